//! What a row of the table says of keys of LMCache.

use super::translation::{Draft, Fate};
use serde_yaml::Value;

/// Keys of LMCache that one thing becomes of.
pub struct Row {
    pub keys: &'static [Key],
    pub outcome: Outcome,
}

pub struct Key {
    /// Path in LMCache's YAML, or the name of a variable that no key of the YAML has. A `*` at the end: all keys that begin like this.
    pub name: &'static str,
    pub form: Form,
    /// The key's name in newer versions of LMCache, if the setting was renamed.
    pub renamed: Option<&'static str>,
}

pub const fn key(name: &'static str, form: Form) -> Key {
    Key {
        name,
        form,
        renamed: None,
    }
}

/// The older name of a setting.
pub const fn older(name: &'static str, form: Form, renamed: &'static str) -> Key {
    Key {
        name,
        form,
        renamed: Some(renamed),
    }
}

/// What becomes of a key.
pub enum Outcome {
    /// It sets these keys of the sidecar's config, or fields of a pool.
    Translated {
        to: &'static [&'static str],
        note: &'static str,
        by: Convert,
    },
    /// kvcachepool does it without a setting, or does not need it.
    Automatic(&'static str),
    /// kvcachepool does not have it. The text says what to use instead.
    NotSupported(&'static str),
}

/// Converts a value that has the form of its key.
pub type Convert = fn(&mut Draft<'_>, &Value) -> Fate;

/// The type of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Flag,
    Whole,
    Number,
    Text,
    /// Whole numbers, also as one text with commas.
    Numbers,
    /// Texts, also as one text with commas.
    Texts,
    /// Settings without a type of their own.
    Any,
}

impl Form {
    /// The value in the form of the key, as LMCache reads it. The error says what to write instead.
    pub fn read(self, value: &Value) -> Result<Value, &'static str> {
        let text = value.as_str().map(str::trim);
        match self {
            Self::Flag => match (value, text) {
                (Value::Bool(_), _) => Some(value.clone()),
                (Value::Number(_), _) => match value.as_i64() {
                    Some(bit @ (0 | 1)) => Some(Value::Bool(bit == 1)),
                    _ => None,
                },
                (_, Some(text)) => match text.to_ascii_lowercase().as_str() {
                    "true" | "1" => Some(Value::Bool(true)),
                    "false" | "0" => Some(Value::Bool(false)),
                    _ => None,
                },
                _ => None,
            },
            Self::Whole => value
                .as_i64()
                .or_else(|| text?.parse().ok())
                .map(Value::from),
            Self::Number => value
                .as_f64()
                .or_else(|| text?.parse().ok())
                .filter(|number: &f64| !number.is_nan())
                .map(Value::from),
            Self::Text => value.is_string().then(|| value.clone()),
            Self::Numbers => list(value, |item| {
                item.as_f64()
                    .or_else(|| item.as_str()?.trim().parse().ok())?;
                Some(item.clone())
            }),
            Self::Texts => list(value, |item| item.is_string().then(|| item.clone())),
            Self::Any => Some(value.clone()),
        }
        .ok_or(self.write())
    }

    fn write(self) -> &'static str {
        match self {
            Self::Flag => "true or false",
            Self::Whole => "a whole number",
            Self::Number => "a number",
            Self::Text => "a text",
            Self::Numbers => "a list of numbers",
            Self::Texts => "a list of texts",
            Self::Any => "a value",
        }
    }
}

fn list(value: &Value, item: impl Fn(&Value) -> Option<Value>) -> Option<Value> {
    let items: Vec<Value> = match value {
        Value::Sequence(items) => items.clone(),
        Value::String(text) => {
            let parts = text.split(',').map(str::trim);
            parts
                .filter(|part| !part.is_empty())
                .map(Value::from)
                .collect()
        }
        other => vec![other.clone()],
    };
    let items: Option<Vec<Value>> = items.iter().map(item).collect();
    items.map(Value::Sequence)
}

/// All rows of the table.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    super::table::SECTIONS.iter().flat_map(|(_, rows)| *rows)
}

/// The key with this name, and its row. A key with the whole name is preferred to a family.
pub fn find(name: &str) -> Option<(&'static Key, &'static Row)> {
    let keys = || rows().flat_map(|row| row.keys.iter().map(move |key| (key, row)));
    let family = |key: &Key| {
        let start = key.name.strip_suffix('*');
        start.is_some_and(|start| name.starts_with(start))
    };
    keys()
        .find(|(key, _)| key.name == name)
        .or_else(|| keys().find(|(key, _)| family(key)))
}
