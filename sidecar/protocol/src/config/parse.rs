//! Converts YAML text to [`Config`] and back. All problems of a file are reported at once, each with what to write instead.

use super::document;
use super::section::Key;
use super::slot::Slot;
use super::{Config, Reload};
use serde_yaml::{Mapping, Value};
use std::collections::HashSet;
use std::fmt;

/// Longest config file that is read.
const MAX_BYTES: usize = 256 << 10;

/// Maximum unknown keys for which a similar one is searched.
const SIMILAR_MAX: usize = 20;

/// A key that this version does not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownKey {
    /// Path, for example `memory.szie`.
    pub path: String,
    /// The most similar known key.
    pub similar: Option<&'static str>,
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: unknown key", self.path)?;
        match self.similar {
            Some(path) => write!(f, "; did you mean {path}?"),
            None => write!(
                f,
                "; `kvcachepool-sidecar config --defaults` lists all keys"
            ),
        }
    }
}

/// One problem of a config.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text is not YAML.
    #[error("not a YAML document: {0}")]
    NotYaml(String),
    /// The text exceeds the size limit.
    #[error("{0} bytes are too many for a config; at most {MAX_BYTES} are read")]
    TooLong(usize),
    /// A section is not a mapping.
    #[error("{path}: found {found}; write keys of this section below it, indented")]
    NotASection {
        /// Path of the section; `document` for the top level.
        path: String,
        /// The value that was found.
        found: String,
    },
    /// A value is not valid for its key.
    #[error("{path}: found {found}; write {write}")]
    BadValue {
        path: &'static str,
        /// The value that was found.
        found: String,
        /// What to write instead.
        write: String,
    },
    /// A key that this version does not know.
    #[error("{0}")]
    Unknown(UnknownKey),
}

/// An invalid config, with every problem in the order of the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// At least one problem.
    pub problems: Vec<Problem>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            let gap = if i == 0 { "" } else { "\n" };
            write!(f, "{gap}{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Parses a config. Absent keys have their default. With `managed` (or `managed: true` in the file) unknown keys are returned as
    /// warnings; otherwise they are errors.
    pub fn parse(text: &str, managed: bool) -> Result<(Config, Vec<UnknownKey>), ConfigError> {
        let only = |problem| ConfigError {
            problems: vec![problem],
        };
        if text.len() > MAX_BYTES {
            return Err(only(Problem::TooLong(text.len())));
        }
        let document = document::parse(text).map_err(|e| only(Problem::NotYaml(e.to_string())))?;
        let mut problems = Vec::new();
        let mut config = Config::default();
        let mut left = flatten(document, &mut problems);
        for mut key in config.keys() {
            let Some(at) = left.iter().position(|(path, _)| path == key.path) else {
                continue;
            };
            let (_, value) = left.swap_remove(at);
            if let Err(problem) = take(&mut key, &value) {
                problems.push(problem);
            }
        }
        left.sort_by(|a, b| a.0.cmp(&b.0));
        let mut known = Config::default();
        let known: Vec<_> = known.keys().iter().map(|key| key.path).collect();
        let unknown: Vec<_> = left
            .into_iter()
            .enumerate()
            .map(|(i, (path, _))| UnknownKey {
                similar: (i < SIMILAR_MAX)
                    .then(|| similar(&path, known.iter().copied()))
                    .flatten(),
                path,
            })
            .collect();
        if !(managed || config.managed) {
            problems.extend(unknown.iter().cloned().map(Problem::Unknown));
        }
        if problems.is_empty() {
            Ok((config, unknown))
        } else {
            Err(ConfigError { problems })
        }
    }

    /// The default config as a file, with a comment per key.
    pub fn default_yaml() -> String {
        Config::default().print(true, |slot| slot.text())
    }

    /// This config as a file without comments. [`Config::parse`] is the inverse.
    pub fn to_yaml(&self) -> String {
        self.print(false, |slot| slot.text())
    }

    /// Like [`Config::to_yaml`], but URLs are printed without user and password.
    pub fn shown_yaml(&self) -> String {
        self.print(false, |slot| slot.shown())
    }

    /// Path and value of every key as text, for logs. URLs are printed without user and password.
    pub fn entries(&self) -> Vec<(&'static str, String)> {
        self.clone()
            .keys()
            .into_iter()
            .map(|key| (key.path, key.slot.shown()))
            .collect()
    }

    fn print(&self, comments: bool, value: impl Fn(&Slot<'_>) -> String) -> String {
        let mut out = String::new();
        let mut open = "";
        for key in self.clone().keys() {
            let (section, name) = key.path.split_once('.').unwrap_or(("", key.path));
            if section != open {
                let gap = if comments { "\n" } else { "" };
                out += &format!("{gap}{section}:\n");
                open = section;
            }
            let indent = if section.is_empty() { "" } else { "  " };
            if comments {
                out += &comment(&key, indent);
            }
            out += &format!("{indent}{name}: {}\n", scalar(&key.slot, value(&key.slot)));
        }
        out
    }
}

fn comment(key: &Key<'_>, indent: &str) -> String {
    let range = key.slot.range();
    let range = if range.is_empty() {
        range
    } else {
        format!(" [{range}]")
    };
    let restart = match key.reload {
        Reload::Live => "",
        Reload::Servers => " The first of them, the last, and other files for them need a restart.",
        Reload::Arena => " Huge pages, windows, and more than the node's memory need a restart.",
        Reload::Restart => " Needs a restart.",
    };
    format!("{indent}# {}{range}{restart}\n", key.about)
}

/// A value as YAML, quoted if the plain form would parse as another type.
fn scalar(slot: &Slot<'_>, text: String) -> String {
    let quoted = matches!(
        slot,
        Slot::Name(_) | Slot::Text(..) | Slot::Listen(_) | Slot::Socket(_) | Slot::File(_)
    );
    // JSON strings are valid YAML strings.
    if quoted {
        serde_json::Value::from(text).to_string()
    } else {
        text
    }
}

/// The leaves of a config's two levels, by path.
fn flatten(document: Value, problems: &mut Vec<Problem>) -> Vec<(String, Value)> {
    let mut leaves = Vec::new();
    let mut known = Config::default();
    let known = known.keys();
    let sections: HashSet<_> = known
        .iter()
        .filter_map(|key| key.path.split_once('.'))
        .map(|(section, _)| section)
        .collect();
    for (name, value) in section("document", document, problems) {
        let name = key_name(&name);
        if !sections.contains(&*name) {
            leaves.push((name, value));
            continue;
        }
        for (inner, value) in section(&name, value, problems) {
            leaves.push((format!("{name}.{}", key_name(&inner)), value));
        }
    }
    leaves
}

fn section(path: &str, value: Value, problems: &mut Vec<Problem>) -> Mapping {
    match value {
        Value::Mapping(map) => map,
        Value::Null => Mapping::new(),
        other => {
            problems.push(Problem::NotASection {
                path: path.to_string(),
                found: found(&other),
            });
            Mapping::new()
        }
    }
}

fn key_name(key: &Value) -> String {
    match key {
        Value::String(s) => s.clone(),
        other => found(other),
    }
}

fn take(key: &mut Key<'_>, value: &Value) -> Result<(), Problem> {
    let text = match (value, &key.slot) {
        (Value::String(s), _) => Some(s.clone()),
        (Value::Number(n), Slot::Size(..) | Slot::Count(..) | Slot::Number(..)) => {
            Some(n.to_string())
        }
        (Value::Bool(b), Slot::Flag(_)) => Some(b.to_string()),
        (Value::Null, Slot::Name(_) | Slot::Text(..) | Slot::File(_)) => Some(String::new()),
        (Value::Null, Slot::Urls(_)) => Some("[]".to_string()),
        (Value::Sequence(items), Slot::Urls(_)) => serde_json::to_string(items).ok(),
        _ => None,
    };
    let result = match &text {
        Some(text) => key.slot.set(text),
        None => match key.slot.set("") {
            Err(write) => Err(write),
            Ok(()) => Err("a text, in quotes if it looks like a number".to_string()),
        },
    };
    result.map_err(|write| Problem::BadValue {
        path: key.path,
        // A URL may hold a password.
        found: match (value, &key.slot) {
            (Value::String(_), Slot::Urls(_)) => "a text".to_string(),
            _ => found(value),
        },
        write,
    })
}

fn found(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_string(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        // The text may hold a password.
        Value::String(s) if s.contains("://") => "a URL".to_string(),
        Value::String(s) => {
            let short: String = s.chars().take(64).collect();
            let cut = if short.len() < s.len() { "..." } else { "" };
            format!("\"{short}{cut}\"")
        }
        Value::Sequence(_) => "a list".to_string(),
        Value::Mapping(_) => "a section".to_string(),
        Value::Tagged(_) => "a tagged value".to_string(),
    }
}

/// The known path with the smallest edit distance, preferring the same section, if it is a plausible typo.
pub fn similar<'a>(path: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let parts = |p: &str| match p.rsplit_once('.') {
        Some((section, last)) => (section.to_string(), last.to_lowercase()),
        None => (String::new(), p.to_lowercase()),
    };
    let (section, last) = parts(path);
    known
        .into_iter()
        .map(|path| {
            let (other, name) = parts(path);
            (edits(&last, &name), other != section, path)
        })
        .min()
        .filter(|(distance, _, _)| *distance <= 2)
        .map(|(_, _, path)| path)
}

/// Levenshtein distance of short texts.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
