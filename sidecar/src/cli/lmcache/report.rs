//! Prints what became of each key, as text or JSON.

use super::translation::{Line, Translation};
use serde_json::{Value, json};

pub fn yaml(document: &Value) -> Result<String, String> {
    serde_yaml::to_string(document).map_err(|e| e.to_string())
}

/// A line per key, and what the user has to do.
pub fn text(translation: &Translation) -> String {
    let widths = translation.lines.iter().map(|line| line.key.len());
    let width = widths.max().unwrap_or_default();
    let line = |line: &Line| {
        let fields = line.fields.iter();
        let fields = fields.map(|(field, value)| match value {
            Some(value) => format!("{field}: {value}"),
            None => field.to_string(),
        });
        let fields: Vec<_> = fields.collect();
        let parts = [fields.join(", "), line.detail.clone()];
        let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        let (key, outcome, said) = (&line.key, line.outcome, parts.join("  # "));
        format!("{key:width$}  {outcome:13}  {said}")
            .trim_end()
            .to_owned()
            + "\n"
    };
    let lines = translation.lines.iter().map(line);
    let notes = translation
        .notes
        .iter()
        .map(|note| format!("note: {note}\n"));
    lines.chain(notes).collect()
}

/// Pool, sidecar's config, keys and notes in one document.
pub fn json(translation: &Translation) -> Result<String, String> {
    let key = |line: &Line| {
        let fields = line.fields.iter();
        let fields: Value = fields
            .map(|(field, value)| (field.to_string(), json!(value)))
            .collect::<serde_json::Map<_, _>>()
            .into();
        json!({"key": line.key, "outcome": line.outcome, "fields": fields, "detail": line.detail})
    };
    let document = json!({
        "pool": translation.pool(),
        "config": translation.config(),
        "keys": translation.lines.iter().map(key).collect::<Vec<_>>(),
        "notes": translation.notes,
    });
    serde_json::to_string_pretty(&document).map_err(|e| e.to_string())
}
