//! Reads LMCache's YAML and its variables, and checks names and types.

use super::keys::{self, Key, Row};
use kvcachepool_protocol::config::similar;
use serde_yaml::{Mapping, Value};
use std::fmt;
use std::path::{Path, PathBuf};

/// The variable with the path of LMCache's file.
pub const FILE: &str = "LMCACHE_CONFIG_FILE";
/// Variables of LMCache begin like this.
const VARIABLE: &str = "LMCACHE_";
/// The kind of the resource of LMCache's operator.
const ENGINE: &str = "LMCacheEngine";
/// The section of a file that plugins and connectors read.
const EXTRA: &str = "extra_config";

/// One problem of LMCache's config. The texts do not repeat values: they may be secrets.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("Unreadable: {0}")]
    Unreadable(String),
    #[error("NotYaml: {0}")]
    NotYaml(String),
    #[error("NotAMapping: {path}: found {found}; write keys with values")]
    NotAMapping { path: String, found: &'static str },
    #[error(
        "WrongKind: found the kind {0}; the command reads an LMCacheEngine, or the file of LMCACHE_CONFIG_FILE"
    )]
    WrongKind(String),
    #[error("UnknownKey: {0}")]
    UnknownKey(String),
    #[error("WrongType: {name}: found {found}; write {write}")]
    WrongType {
        name: String,
        found: &'static str,
        write: String,
    },
    #[error("BadValue: {name}: write {write}")]
    BadValue { name: String, write: String },
    #[error(
        "MixedGenerations: {older} and {newer}: no version of LMCache reads both; keep the keys of one"
    )]
    MixedGenerations { older: String, newer: String },
    #[error("MissingKey: {0}")]
    MissingKey(&'static str),
    #[error("NothingToTranslate: no file is given, and no variable LMCACHE_* is set")]
    NothingToTranslate,
}

/// Every problem of LMCache's config.
#[derive(Debug)]
pub struct Invalid {
    pub source: Option<PathBuf>,
    pub problems: Vec<Problem>,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = self.source.as_deref();
        let source = source.map_or("variables LMCACHE_*".into(), Path::to_string_lossy);
        write!(f, "{source} cannot be translated")?;
        self.problems.iter().try_for_each(|p| write!(f, "\n  {p}"))
    }
}

/// A key of LMCache that is set.
pub struct Entry {
    /// The name as written.
    pub name: String,
    /// The path in LMCache's YAML, or the name of a variable that has none.
    pub path: String,
    pub key: &'static Key,
    pub row: &'static Row,
    /// In the form of the key; `Null` if the key has no value.
    pub value: Value,
}

/// A checked config of LMCache.
pub struct Read {
    pub entries: Vec<Entry>,
    /// Name of the LMCacheEngine, if it is one.
    pub engine: Option<String>,
    /// Name of the master of Redis Sentinel.
    pub master: String,
}

/// A file's text.
pub fn file(path: &Path) -> Result<String, Invalid> {
    std::fs::read_to_string(path).map_err(|e| Invalid {
        source: Some(path.to_owned()),
        problems: vec![Problem::Unreadable(e.to_string())],
    })
}

impl Read {
    /// Reads the text of a file and variables. A variable replaces the key of the file.
    pub fn new(text: Option<&str>, variables: &[(String, String)]) -> Result<Self, Vec<Problem>> {
        let mut problems = Vec::new();
        let mut named: Vec<(String, Value)> = Vec::new();
        let mut engine = None;
        if let Some(text) = text {
            let document = document(text).map_err(|problem| vec![problem])?;
            match document.contains_key("kind") {
                true => engine = Some(resource(document, &mut named, &mut problems)),
                false => leaves("", document, &mut named, &mut problems),
            }
        }
        let variables = || variables.iter();
        // Kubernetes adds variables for each Service, also for one whose name begins with `lmcache-`.
        let services = variables().filter_map(|(name, _)| name.strip_suffix("_SERVICE_HOST"));
        let services: Vec<_> = services.collect();
        let of_service = |name: &str| {
            let mut rests = services
                .iter()
                .filter_map(|service| name.strip_prefix(service));
            rests.any(|rest| rest.starts_with("_SERVICE_") || rest.starts_with("_PORT"))
        };
        for (name, value) in variables().filter(|(name, _)| !of_service(name)) {
            if let Some(name) = name.strip_prefix(VARIABLE).filter(|_| name != FILE) {
                variable(name, value, &mut named, &mut problems);
            }
        }
        if text.is_none() && named.is_empty() && problems.is_empty() {
            problems.push(Problem::NothingToTranslate);
        }
        let mut entries = Vec::new();
        for (name, value) in named {
            match entry(name, &value) {
                Ok(entry) => entries.push(entry),
                Err(problem) => problems.push(problem),
            }
        }
        mixed(&entries, engine.is_some(), &mut problems);
        let master = variables().find(|(name, _)| name == "REDIS_SERVICE_NAME");
        let master = master.map_or("redismaster", |(_, name)| name).to_owned();
        match problems.is_empty() {
            true => Ok(Self {
                entries,
                engine,
                master,
            }),
            false => Err(problems),
        }
    }
}

fn document(text: &str) -> Result<Mapping, Problem> {
    let document: Value = serde_yaml::from_str(text).map_err(|e| Problem::NotYaml(place(&e)))?;
    match document {
        Value::Mapping(document) => Ok(document),
        Value::Null => Ok(Mapping::new()),
        other => Err(Problem::NotAMapping {
            path: "document".to_owned(),
            found: found(&other),
        }),
    }
}

/// Where a document is wrong. The parser's own text may repeat a value.
fn place(error: &serde_yaml::Error) -> String {
    let place = error.location().map_or("the file".to_owned(), |at| {
        format!("line {}, column {}", at.line(), at.column())
    });
    format!(
        "{place} cannot be read; write one YAML document without tags, with each key once and numbers of at most 64 bits"
    )
}

/// The fields of an LMCacheEngine, and its name.
fn resource(
    document: Mapping,
    named: &mut Vec<(String, Value)>,
    problems: &mut Vec<Problem>,
) -> String {
    let mut name = String::new();
    for (key, value) in document {
        match (key_name(&key).as_str(), value) {
            ("apiVersion" | "status", _) => {}
            ("kind", kind) if kind.as_str() == Some(ENGINE) => {}
            ("kind", kind) => {
                let kind = kind.as_str().unwrap_or(found(&kind)).to_owned();
                problems.push(Problem::WrongKind(kind));
            }
            ("metadata", metadata) => {
                let of_object = metadata.get("name").and_then(Value::as_str);
                name = of_object.unwrap_or_default().to_owned();
            }
            ("spec", Value::Mapping(spec)) => leaves("spec.", spec, named, problems),
            ("spec", other) => problems.push(Problem::NotAMapping {
                path: "spec".to_owned(),
                found: found(&other),
            }),
            (other, _) if keys::find(other).is_some() => {
                problems.push(Problem::MixedGenerations {
                    older: other.to_owned(),
                    newer: format!("kind: {ENGINE}"),
                });
            }
            (other, _) => problems.push(unknown(other)),
        }
    }
    name
}

/// The keys of a mapping by path. A mapping that is the value of a known key stays whole.
fn leaves(
    path: &str,
    mapping: Mapping,
    named: &mut Vec<(String, Value)>,
    problems: &mut Vec<Problem>,
) {
    for (key, value) in mapping {
        let name = format!("{path}{}", key_name(&key));
        let inner = format!("{name}.");
        let begins = |key: &Key| key.name.starts_with(&inner);
        let section = keys::rows().flat_map(|row| row.keys).any(begins);
        match value {
            Value::Mapping(mapping) if section => leaves(&inner, mapping, named, problems),
            Value::Null if section => {}
            other if section => problems.push(Problem::NotAMapping {
                path: name,
                found: found(&other),
            }),
            value => named.push((name, value)),
        }
    }
}

/// Adds a variable, in place of the key of the file.
fn variable(
    name: &str,
    value: &str,
    named: &mut Vec<(String, Value)>,
    problems: &mut Vec<Problem>,
) {
    let key = name.to_ascii_lowercase();
    if key == EXTRA {
        named.retain(|(name, _)| !name.starts_with("extra_config."));
        match serde_json::from_str(value).ok().and_then(as_mapping) {
            Some(mapping) => leaves("extra_config.", mapping, named, problems),
            None => problems.push(Problem::WrongType {
                name: format!("{VARIABLE}{name}"),
                found: "a text",
                write: "a JSON object".to_owned(),
            }),
        }
        return;
    }
    named.retain(|(name, _)| *name != key);
    let value = value.trim();
    let inner = ['"', '\'']
        .iter()
        .find_map(|quote| value.strip_prefix(*quote)?.strip_suffix(*quote));
    let value = Value::from(inner.unwrap_or(value));
    named.push((format!("{VARIABLE}{name}"), value));
}

fn as_mapping(value: Value) -> Option<Mapping> {
    match value {
        Value::Mapping(mapping) => Some(mapping),
        _ => None,
    }
}

fn entry(name: String, value: &Value) -> Result<Entry, Problem> {
    let of_variable = name.strip_prefix(VARIABLE).map(str::to_ascii_lowercase);
    let mut paths = [Some(name.clone()), of_variable].into_iter().flatten();
    let known = paths.find_map(|path| keys::find(&path).map(|found| (path, found)));
    let Some((path, (key, row))) = known else {
        return Err(unknown(&name));
    };
    let value = match value {
        Value::Null => Value::Null,
        value => key.form.read(value).map_err(|write| Problem::WrongType {
            name: name.clone(),
            found: found(value),
            write: write.to_owned(),
        })?,
    };
    Ok(Entry {
        name,
        path,
        key,
        row,
        value,
    })
}

/// Reports names of one setting from two generations, and keys of vLLM's process beside a resource.
fn mixed(entries: &[Entry], engine: bool, problems: &mut Vec<Problem>) {
    let of_today = |name: &str| entries.iter().find(|entry| entry.path == name);
    for entry in entries {
        if let Some(newer) = entry.key.renamed.and_then(of_today) {
            problems.push(Problem::MixedGenerations {
                older: entry.name.clone(),
                newer: newer.name.clone(),
            });
        }
        let elsewhere = ["spec.", VARIABLE];
        let of_process = !elsewhere.iter().any(|start| entry.path.starts_with(start));
        if engine && of_process {
            problems.push(Problem::MixedGenerations {
                older: entry.name.clone(),
                newer: format!("kind: {ENGINE}"),
            });
        }
    }
}

fn unknown(name: &str) -> Problem {
    let names = keys::rows().flat_map(|row| row.keys).map(|key| key.name);
    let names = names.filter(|name| !name.ends_with('*'));
    let guess = match name.strip_prefix(VARIABLE) {
        // A variable of a key of the YAML, or one without such a key.
        Some(variable) => {
            let names = names.map(|name| name.trim_start_matches(VARIABLE));
            let guess = similar(variable, names).map(str::to_ascii_uppercase);
            guess.map(|guess| format!("{VARIABLE}{guess}"))
        }
        None => similar(name, names).map(str::to_owned),
    };
    Problem::UnknownKey(match guess {
        Some(guess) => format!("{name}: did you mean {guess}?"),
        None => format!("{name}: LMCache has no such key; remove it"),
    })
}

fn key_name(key: &Value) -> String {
    key.as_str().unwrap_or(found(key)).to_owned()
}

pub fn found(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Sequence(_) => "a list",
        Value::Mapping(_) => "a section",
        Value::Tagged(_) => "a tagged value",
    }
}
