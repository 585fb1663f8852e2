//! Typed access to the fields of a model's config, with errors that name the field.

use super::SizeError;
use serde_json::{Map, Value};

/// Largest number that a field may have, except window lengths. Products of a few fields fit in 64 bits.
const NUMBER_MAX: u64 = 1 << 20;

/// The fields of a language model.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    values: &'a Map<String, Value>,
    model: String,
}

impl<'a> Fields<'a> {
    pub fn new(values: &'a Map<String, Value>) -> Result<Self, SizeError> {
        let mut fields = Self {
            values,
            model: "the model".to_owned(),
        };
        fields.model = fields
            .text("model_type")?
            .ok_or_else(|| fields.missing("model_type"))?
            .to_owned();
        Ok(fields)
    }

    /// `model_type`.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Whether the config has the field, also as null.
    pub fn names(&self, field: &str) -> bool {
        self.values.contains_key(field)
    }

    /// A field that is present and not null.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.values.get(field).filter(|value| !value.is_null())
    }

    pub fn text(&self, field: &str) -> Result<Option<&'a str>, SizeError> {
        let value = self.get(field);
        value
            .map(|v| v.as_str().ok_or_else(|| bad(field, v, "a string")))
            .transpose()
    }

    /// A positive number, if present.
    pub fn optional(&self, field: &str) -> Result<Option<u64>, SizeError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(number) if (1..=NUMBER_MAX).contains(&number) => Ok(Some(number)),
            _ => Err(bad(field, value, "a number from 1 to 1048576")),
        }
    }

    /// A positive number.
    pub fn number(&self, field: &'static str) -> Result<u64, SizeError> {
        self.optional(field)?.ok_or_else(|| self.missing(field))
    }

    /// The length of a sliding window; `None` if the field is absent, null or 0.
    pub fn window(&self) -> Result<Option<u32>, SizeError> {
        const FIELD: &str = "sliding_window";
        let Some(value) = self.get(FIELD) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|n| u32::try_from(n).ok()) {
            Some(tokens) => Ok(Some(tokens).filter(|tokens| *tokens > 0)),
            None => Err(bad(FIELD, value, "a number of tokens or null")),
        }
    }

    /// A list of texts, if present.
    pub fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>, SizeError> {
        let Some(value) = self.get(field) else {
            return Ok(None);
        };
        value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_str).collect())
            .map(Some)
            .ok_or_else(|| bad(field, value, "a list of strings"))
    }

    pub fn missing(&self, field: &'static str) -> SizeError {
        SizeError::MissingField {
            model: self.model.clone(),
            field,
        }
    }
}

/// The error of a field whose value is not the expected one.
pub fn bad(field: &str, found: &Value, expected: &'static str) -> SizeError {
    let mut found = found.to_string();
    if found.len() > 80 {
        found = found.chars().take(80).chain("...".chars()).collect();
    }
    SizeError::BadField {
        field: field.to_owned(),
        found,
        expected,
    }
}
