//! Canonical JSON: keys sorted by their bytes, no white space, one form for numbers and strings. Equal descriptors have equal bytes on
//! every machine, so their BLAKE3 hash can be an identity.

use serde_json::{Map, Value};

pub const MAX_DESCRIPTOR_BYTES: usize = 1 << 20;
/// Maximum nesting of lists and objects.
pub const MAX_DESCRIPTOR_DEPTH: usize = 32;

/// A text is not a valid descriptor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadDescriptor {
    /// The text is not JSON.
    #[error("the descriptor is not JSON: {0}")]
    NotJson(String),
    /// The text is JSON, but not an object.
    #[error("the descriptor is not a JSON object")]
    NotAnObject,
    /// Longer than [`MAX_DESCRIPTOR_BYTES`].
    #[error("the descriptor has {0} bytes, more than {MAX_DESCRIPTOR_BYTES}")]
    TooLong(usize),
    /// Nested deeper than [`MAX_DESCRIPTOR_DEPTH`].
    #[error("the descriptor is nested deeper than {MAX_DESCRIPTOR_DEPTH} levels")]
    TooDeep,
    /// The descriptor contains a key that the sidecar adds itself.
    #[error("the descriptor has the key \"{0}\", which the sidecar adds itself")]
    ReservedKey(&'static str),
}

/// A JSON object that describes a model or a layout. Unknown keys are kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Descriptor {
    map: Map<String, Value>,
}

impl Descriptor {
    /// Parses a descriptor. Total: any text gives a descriptor or a named error.
    pub fn parse(text: &str) -> Result<Self, BadDescriptor> {
        if text.len() > MAX_DESCRIPTOR_BYTES {
            return Err(BadDescriptor::TooLong(text.len()));
        }
        let value: Value =
            serde_json::from_str(text).map_err(|e| BadDescriptor::NotJson(e.to_string()))?;
        if depth(&value) > MAX_DESCRIPTOR_DEPTH {
            return Err(BadDescriptor::TooDeep);
        }
        match value {
            Value::Object(map) => Ok(Self { map }),
            _ => Err(BadDescriptor::NotAnObject),
        }
    }

    /// Adds a key. Errors: the descriptor already has it.
    pub fn with(mut self, key: &'static str, value: Value) -> Result<Self, BadDescriptor> {
        match self.map.insert(key.to_string(), value) {
            None => Ok(self),
            Some(_) => Err(BadDescriptor::ReservedKey(key)),
        }
    }

    pub fn canonical(&self) -> String {
        let mut out = String::new();
        write_object(&self.map, &mut out);
        out
    }

    /// BLAKE3 of the canonical bytes.
    pub fn identity(&self) -> [u8; 32] {
        *blake3::hash(self.canonical().as_bytes()).as_bytes()
    }

    /// The descriptor as JSON, for display.
    pub fn to_value(&self) -> Value {
        Value::Object(self.map.clone())
    }
}

/// Integers are decimal, other numbers have the shortest form that parses to the same value.
fn write_value(value: &Value, out: &mut String) {
    match value {
        Value::Object(map) => write_object(map, out),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write_value(item, out);
            }
            out.push(']');
        }
        Value::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(i), _, _) => *out += &i.to_string(),
            (_, Some(u), _) => *out += &u.to_string(),
            (_, _, Some(f)) => *out += &format!("{f:?}"),
            (None, None, None) => *out += &n.to_string(),
        },
        scalar => *out += &scalar.to_string(),
    }
}

fn write_object(map: &Map<String, Value>, out: &mut String) {
    let mut keys: Vec<_> = map.iter().collect();
    keys.sort_by(|a, b| a.0.cmp(b.0));
    out.push('{');
    for (i, (key, value)) in keys.into_iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        write_value(&Value::String(key.clone()), out);
        out.push(':');
        write_value(value, out);
    }
    out.push('}');
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}
