//! YAML text as values. An alias repeats what it names, so a short text can become gigabytes: values and their bytes are counted.

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess, Visitor,
};
use serde_yaml::value::{Tag, TaggedValue};
use serde_yaml::{Mapping, Value};
use std::cell::Cell;
use std::fmt;

/// Maximum values of a document. A config has some hundred.
const VALUES_MAX: usize = 10_000;

/// Parses a document.
pub(super) fn parse(text: &str) -> Result<Value, serde_yaml::Error> {
    let left = Left {
        values: Cell::new(VALUES_MAX),
        // Without aliases a document has no more bytes of text than this.
        bytes: Cell::new(2 * text.len()),
    };
    Counted(&left).deserialize(serde_yaml::Deserializer::from_str(text))
}

/// The mapping that a document is. `None` for any other.
pub fn mapping(text: &str) -> Option<Mapping> {
    match parse(text) {
        Ok(Value::Mapping(mapping)) => Some(mapping),
        _ => None,
    }
}

/// What may follow.
struct Left {
    values: Cell<usize>,
    bytes: Cell<usize>,
}

#[derive(Clone, Copy)]
struct Counted<'a>(&'a Left);

impl Counted<'_> {
    /// A text, if so many bytes may follow.
    fn text<E: Error>(self, text: &str) -> Result<String, E> {
        let left = self.0.bytes.get().checked_sub(text.len());
        self.0.bytes.set(left.ok_or_else(swollen)?);
        Ok(text.to_owned())
    }
}

fn swollen<E: Error>() -> E {
    E::custom(format_args!(
        "its aliases repeat too much, or it has more than {VALUES_MAX} values"
    ))
}

impl<'de> DeserializeSeed<'de> for Counted<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let left = self.0.values.get().checked_sub(1);
        self.0.values.set(left.ok_or_else(swollen)?);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Counted<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any YAML value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    /// An empty document.
    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.text(value).map(Value::String)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self)? {
            values.push(value);
        }
        Ok(Value::Sequence(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut values = Mapping::new();
        while let Some((key, value)) = map.next_entry_seed(self, self)? {
            if values.contains_key(&key) {
                return Err(A::Error::custom("the same key twice"));
            }
            values.insert(key, value);
        }
        Ok(Value::Mapping(values))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<Value, A::Error> {
        let (tag, value) = tagged.variant::<String>()?;
        let tag = Tag::new(self.text(&tag)?);
        let value = value.newtype_variant_seed(self)?;
        Ok(Value::Tagged(Box::new(TaggedValue { tag, value })))
    }
}
