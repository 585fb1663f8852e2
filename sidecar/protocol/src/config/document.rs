//! YAML text as values. An alias repeats what it names, so a short text can become millions of values: they are counted.

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
    Counted(&Cell::new(VALUES_MAX)).deserialize(serde_yaml::Deserializer::from_str(text))
}

/// The mapping that a document is. `None` for any other.
pub fn mapping(text: &str) -> Option<Mapping> {
    match parse(text) {
        Ok(Value::Mapping(mapping)) => Some(mapping),
        _ => None,
    }
}

/// How many more values may follow.
#[derive(Clone, Copy)]
struct Counted<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for Counted<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let Some(left) = self.0.get().checked_sub(1) else {
            return Err(D::Error::custom(format_args!(
                "more than {VALUES_MAX} values; a config needs no aliases"
            )));
        };
        self.0.set(left);
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

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
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
            if let Some(key) = key.as_str().filter(|key| values.contains_key(*key)) {
                return Err(A::Error::custom(format_args!("duplicate key {key:?}")));
            }
            values.insert(key, value);
        }
        Ok(Value::Mapping(values))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<Value, A::Error> {
        let (tag, value) = tagged.variant::<String>()?;
        let value = value.newtype_variant_seed(self)?;
        let tag = Tag::new(tag);
        Ok(Value::Tagged(Box::new(TaggedValue { tag, value })))
    }
}
