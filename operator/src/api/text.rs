//! Sizes and times as text. The text is kept as written, so that a rule can report an invalid value, instead of a failed read of the whole
//! object.

use kvcachepool_protocol::config::{self, BadUnit, ByteSize};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};
use std::borrow::Cow;
use std::fmt;

/// Longest text of a size.
const SIZE_CHARS: u32 = 20;
/// Longest text of a duration: four parts of five digits and a unit each.
const DURATION_CHARS: u32 = 28;
/// Maximum digits of one part of a duration, as in GEP-2257.
const DURATION_DIGITS: usize = 5;

/// A number of bytes: `64Gi`, `512M` or `65536`. A Kubernetes quantity without fractions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct Size(pub String);

impl Size {
    /// The bytes. The error says what to write instead.
    pub fn bytes(&self) -> Result<ByteSize, BadUnit> {
        self.0.parse()
    }
}

impl From<ByteSize> for Size {
    fn from(size: ByteSize) -> Self {
        Self(size.to_string())
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct IntOrString;
        impl de::Visitor<'_> for IntOrString {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as 64Gi, 512Mi or 65536 (bytes)")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                Ok(Size(text.to_string()))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Size, E> {
                Ok(Size(number.to_string()))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Size, E> {
                Ok(Size(number.to_string()))
            }
            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Size, E> {
                Ok(Size(number.to_string()))
            }
        }
        from.deserialize_any(IntOrString)
    }
}

impl JsonSchema for Size {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        // The maximum length bounds the API server's cost estimate of the rules.
        json_schema!({"x-kubernetes-int-or-string": true, "maxLength": SIZE_CHARS})
    }
}

/// A duration: `2s`, `1h30m`, `250ms`. As in GEP-2257, the largest unit first.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Duration(pub String);

impl Duration {
    /// The duration. The error says what to write instead.
    pub fn time(&self) -> Result<config::Duration, BadUnit> {
        // The sidecar's config also accepts days and more digits, Kubernetes does not.
        let short = |digits: &str| digits.len() <= DURATION_DIGITS;
        let parts = self.0.split(|c: char| c.is_ascii_alphabetic());
        if self.0.contains('d') || !parts.into_iter().all(short) {
            return Err(BadUnit("a time such as 250ms, 2s, 10m or 24h"));
        }
        self.0.parse()
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl JsonSchema for Duration {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "maxLength": DURATION_CHARS})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Size, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn a_size_can_be_a_number_or_a_string() {
        for (json, bytes) in [
            ("65536", 65_536),
            ("\"65536\"", 65_536),
            ("\"64Gi\"", 64 << 30),
            ("\"1k\"", 1_000),
        ] {
            assert_eq!(read(json).unwrap().bytes().unwrap().0, bytes, "{json}");
        }
    }

    #[test]
    fn a_malformed_size_is_parsed_and_reports_the_expected_format() {
        for json in [
            "\"lots\"",
            "\"\"",
            "-1",
            "1.5",
            "1e30",
            "\"1.5Gi\"",
            "\"99999999999999999999Ti\"",
        ] {
            let problem = read(json).unwrap().bytes().unwrap_err();
            assert_eq!(
                problem.to_string(),
                "write a size such as 64Gi, 512Mi or 65536 (bytes)",
                "{json}"
            );
        }
    }

    #[test]
    fn a_size_must_be_a_number_or_a_string() {
        for json in ["true", "null", "[]", "{}"] {
            assert!(read(json).is_err(), "{json}");
        }
    }

    #[test]
    fn a_time_has_the_units_and_digits_of_kubernetes() {
        let time = |text: &str| Duration(text.to_string()).time();
        assert_eq!(time("99999h").unwrap().ms, 99_999 * 3_600_000);
        assert_eq!(time("1h2m3s4ms").unwrap().ms, 3_723_004);
        for text in [
            "", "1d", "100000h", "1", "h", "1h1h", "1s1m", "-1s", "1.5s", "1 s", "1\u{b5}s",
        ] {
            let problem = time(text).unwrap_err().to_string();
            assert_eq!(
                problem, "write a time such as 250ms, 2s, 10m or 24h",
                "{text}"
            );
        }
    }
}
