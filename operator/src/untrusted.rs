//! Parses JSON that anybody may have written. A short text can become large values, so the values are counted before they are parsed.

use serde::de::DeserializeOwned;
use thiserror::Error;

/// Why a text is not parsed.
#[derive(Debug, Error)]
pub enum Unparsed {
    #[error("more than {0} values")]
    TooManyValues(usize),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// Parses JSON of at most `values_max` values. The caller limits its bytes.
pub fn from_slice<T: DeserializeOwned>(text: &[u8], values_max: usize) -> Result<T, Unparsed> {
    if values(text) > values_max {
        return Err(Unparsed::TooManyValues(values_max));
    }
    Ok(serde_json::from_slice(text)?)
}

/// The number of values, or more: each value but the outermost is the first of a list or an object, or follows a comma.
fn values(text: &[u8]) -> usize {
    let (mut count, mut quoted, mut escaped) = (1, false, false);
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' | b'[' | b'{' if !quoted => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn counted(value: &Value) -> usize {
        1 + match value {
            Value::Array(list) => list.iter().map(counted).sum(),
            Value::Object(map) => map.values().map(counted).sum(),
            _ => 0,
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::from),
            "[,\\[{\"\\\\a]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                proptest::collection::btree_map("[,\\[{\"\\\\a]{0,4}", inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_value_escapes_the_count(value in any_json()) {
            let text = value.to_string();
            prop_assert!(values(text.as_bytes()) >= counted(&value), "{text}");
            prop_assert!(values(text.as_bytes()) <= 2 * counted(&value), "{text}");
        }
    }

    #[test]
    fn more_values_than_the_limit_are_not_parsed() {
        let text = json!([[0, 1], {"a": ","}]).to_string();
        assert!(from_slice::<Value>(text.as_bytes(), 6).is_ok());
        let error = from_slice::<Value>(text.as_bytes(), 5).unwrap_err();
        assert_eq!(error.to_string(), "more than 5 values");
        assert!(matches!(
            from_slice::<Value>(b"{", 6),
            Err(Unparsed::Json(_))
        ));
    }
}
