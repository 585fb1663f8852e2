//! Collects what the keys of LMCache set: values of the sidecar's config, and the pool that has the same.

use super::convert;
use super::keys::Outcome;
use super::read::{Entry, Problem, Read};
use crate::config_file::INJECTED_FOLDER;
use kvcachepool_protocol::config::{ByteSize, Duration, PoolKey, Values, pool_keys};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Tiers, the key with the address of each, and what LMCache's config lacks without it.
const ADDRESSES: [(&str, &str, &str); 3] = [
    (
        "disk.",
        "disk.path",
        "the folder of the disk tier, spec.l2Backend.raw.config.base_path",
    ),
    (
        "redis.",
        "redis.urls",
        "the address of Redis, below spec.l2Backend",
    ),
    (
        "s3.",
        "s3.bucket",
        "the address of the bucket, spec.l2Backend.raw.config.s3_endpoint",
    ),
];
const TRANSLATED: &str = "translated";
/// Longest name of a pool.
const NAME_CHARS: usize = 40;

pub struct Options {
    pub name: Option<String>,
    pub workers: u32,
    pub pods_per_node: u32,
}

/// What a conversion says of a value.
pub enum Fate {
    /// It has set keys.
    Translated,
    Automatic(&'static str),
    NotSupported(&'static str),
    /// The value cannot be right. The text says what to write instead.
    Bad(String),
}

/// The result while keys are converted.
pub struct Draft<'a> {
    pub read: &'a Read,
    pub options: &'a Options,
    /// Values of keys of the sidecar's config; of files, the name of the Secret or ConfigMap that has them. A key that begins with `spec.`
    /// is a field of the pool alone.
    values: BTreeMap<&'static str, String>,
    /// The keys that the current conversion has set.
    set: Vec<&'static str>,
    /// The Secret with the password of Redis.
    pub redis_secret: String,
    pub notes: Vec<String>,
    pub name: String,
}

/// What became of a key of LMCache.
pub struct Line {
    pub key: String,
    pub outcome: &'static str,
    /// Fields of the pool and their values; no value if another key sets it.
    pub fields: Vec<(&'static str, Option<String>)>,
    pub detail: String,
}

pub struct Translation {
    pub lines: Vec<Line>,
    /// What the user has to do, and to know.
    pub notes: Vec<String>,
    name: String,
    values: BTreeMap<&'static str, String>,
}

impl Draft<'_> {
    /// Sets a key, if the value is one that a pool may have.
    pub fn set(&mut self, key: &'static str, value: impl Into<String>) -> Fate {
        let value = value.into();
        if let Some(write) = set_by(key).and_then(|set| refused(set, &value)) {
            return Fate::Bad(write);
        }
        self.values.insert(key, value);
        self.set.push(key);
        Fate::Translated
    }

    /// Whether a key was set to another value.
    pub fn has_other(&self, key: &str, value: &str) -> bool {
        self.values.get(key).is_some_and(|set| set != value)
    }

    /// The value of a key of LMCache with this name, at the top level, in `extra_config`, or of an adapter.
    pub fn get(&self, name: &str) -> Option<&serde_yaml::Value> {
        let sections = ["", "extra_config.", "spec.l2Backend.raw.config."];
        let named = |entry: &&Entry| {
            let names = sections
                .iter()
                .map(|section| entry.path.strip_prefix(section));
            names.flatten().any(|key| key == name)
        };
        let entry = self.read.entries.iter().find(named)?;
        (!entry.value.is_null()).then_some(&entry.value)
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name)?.as_str()
    }

    pub fn flag(&self, name: &str) -> bool {
        self.get(name).and_then(|v| v.as_bool()).unwrap_or_default()
    }

    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

impl Translation {
    pub fn new(read: &Read, options: Options) -> Result<Self, Vec<Problem>> {
        let of_object = read.engine.clone().filter(|name| !name.is_empty());
        let name = options.name.clone().or(of_object);
        let name = name.unwrap_or_else(|| "default".to_owned());
        let mut problems = Vec::new();
        if !is_name(&name) {
            problems.push(Problem::BadValue {
                name: "name of the pool".to_owned(),
                write: format!("--name with at most {NAME_CHARS} lower-case letters, digits and -"),
            });
        }
        let mut draft = Draft {
            read,
            options: &options,
            values: BTreeMap::new(),
            set: Vec::new(),
            redis_secret: format!("{name}-redis"),
            notes: Vec::new(),
            name,
        };
        let mut lines = Vec::new();
        for entry in &read.entries {
            match line(&mut draft, entry) {
                Ok(line) => lines.push(line),
                Err(problem) => problems.push(problem),
            }
        }
        for (tier, address, missing) in ADDRESSES {
            let set = draft.values.keys().any(|key| key.starts_with(tier));
            if set && !draft.values.contains_key(address) && problems.is_empty() {
                problems.push(Problem::MissingKey(missing));
            }
        }
        if !draft.values.contains_key("memory.size") && problems.is_empty() {
            if read.engine.is_some() {
                problems.push(Problem::MissingKey(
                    "spec.l1.sizeGB: the size of the memory",
                ));
            }
            convert::memory_of_process(&mut draft, convert::DEFAULT_GIB);
            lines.push(Line {
                key: "max_local_cpu_size".to_owned(),
                outcome: TRANSLATED,
                fields: fields(&mut draft),
                detail: "The key is not set; this is LMCache's default.".to_owned(),
            });
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        draft.note("The cache starts cold: kvcachepool does not read what LMCache stored in memory, files, Redis or S3.".to_owned());
        Ok(Self {
            lines,
            notes: draft.notes,
            name: draft.name,
            values: draft.values,
        })
    }

    /// The pool, as a document for `kubectl apply`.
    pub fn pool(&self) -> Value {
        let mut pool = json!({
            "apiVersion": "kvcachepool.io/v1alpha1",
            "kind": "KVCachePool",
            "metadata": {"name": self.name},
        });
        for (key, value) in &self.values {
            let value = match (*key, set_by(key).map(|set| &set.values)) {
                ("disk.path", _) => json!({}),
                (_, Some(Values::Number(_))) => json!(value.parse::<u64>().ok()),
                _ => json!(value),
            };
            insert(&mut pool, &field(key).split('.').collect::<Vec<_>>(), value);
        }
        pool
    }

    /// The sidecar's config, for a sidecar without Kubernetes.
    pub fn config(&self) -> Value {
        let mut config = json!({});
        let own = self
            .values
            .iter()
            .filter(|(key, _)| !key.starts_with("spec."));
        for (key, value) in own {
            let value = match (*key, set_by(key).map(|set| &set.values)) {
                ("redis.urls", _) => json!([value]),
                ("redis.auth", _) => json!(format!("{INJECTED_FOLDER}/redis")),
                ("s3.auth", _) => json!(format!("{INJECTED_FOLDER}/s3")),
                ("s3.ca", _) => json!(format!("{INJECTED_FOLDER}/s3-ca.crt")),
                (_, Some(Values::Number(_))) => json!(value.parse::<u64>().ok()),
                _ => json!(value),
            };
            insert(&mut config, &key.split('.').collect::<Vec<_>>(), value);
        }
        config
    }
}

fn line(draft: &mut Draft<'_>, entry: &Entry) -> Result<Line, Problem> {
    let (mut note, mut to): (_, &[_]) = ("", &[]);
    let fate = match (&entry.row.outcome, &entry.value) {
        (_, serde_yaml::Value::Null) => Fate::Automatic("The key has no value."),
        (
            Outcome::Translated {
                by,
                note: said,
                to: keys,
            },
            value,
        ) => {
            (note, to) = (said, keys);
            by(draft, value)
        }
        (Outcome::Automatic(why), _) => Fate::Automatic(why),
        (Outcome::NotSupported(_), serde_yaml::Value::Bool(false)) => Fate::Automatic("It is off."),
        (Outcome::NotSupported(why), _) => Fate::NotSupported(why),
    };
    let (outcome, detail) = match fate {
        Fate::Translated => (TRANSLATED, note),
        Fate::Automatic(why) => ("automatic", why),
        Fate::NotSupported(why) => ("not supported", why),
        Fate::Bad(write) => {
            return Err(Problem::BadValue {
                name: entry.name.clone(),
                write,
            });
        }
    };
    let mut fields = fields(draft);
    if fields.is_empty() && outcome == TRANSLATED {
        fields = to.iter().map(|key| (field(key), None)).collect();
    }
    Ok(Line {
        key: entry.name.clone(),
        outcome,
        fields,
        detail: detail.to_owned(),
    })
}

/// The fields that the last conversion has set.
fn fields(draft: &mut Draft<'_>) -> Vec<(&'static str, Option<String>)> {
    let set = std::mem::take(&mut draft.set);
    let value = |key: &'static str| match key {
        "disk.path" => "{}".to_owned(),
        _ => draft.values[key].clone(),
    };
    set.into_iter()
        .map(|key| (field(key), Some(value(key))))
        .collect()
}

/// The field of a pool that sets a key.
pub fn field(key: &'static str) -> &'static str {
    match key {
        "disk.path" => "spec.local.disk.emptyDir",
        "redis.urls" => "spec.shared.redis.external.url",
        "redis.auth" => "spec.shared.redis.external.auth.secretName",
        "s3.auth" => "spec.shared.s3.auth.secretName",
        "s3.ca" => "spec.shared.s3.ca.name",
        _ => set_by(key).map_or(key, |set| set.field),
    }
}

fn set_by(key: &str) -> Option<&'static PoolKey> {
    pool_keys().iter().find(|set| set.key == key)
}

/// What to write instead of a value that a pool may not have.
fn refused(set: &PoolKey, value: &str) -> Option<String> {
    let outside = |least: String, most: String| {
        format!(
            "a value that makes {} one from {least} to {most}; this one makes it {value}",
            set.field
        )
    };
    match &set.values {
        Values::Size(range) => {
            let bytes = value.parse::<ByteSize>().ok().map(|size| size.0);
            let inside = bytes.is_some_and(|bytes| range.contains(&bytes));
            let [least, most] = [range.start(), range.end()].map(|n| ByteSize(*n).to_string());
            (!inside).then(|| outside(least, most))
        }
        Values::Time(range) => {
            let ms = value.parse::<Duration>().ok().map(|time| time.ms);
            let inside = ms.is_some_and(|ms| range.contains(&ms));
            let [least, most] =
                [range.start(), range.end()].map(|ms| Duration::from_ms(*ms).to_string());
            (!inside).then(|| outside(least, most))
        }
        Values::Number(range) => {
            let inside = value.parse::<u64>().is_ok_and(|n| range.contains(&n));
            (!inside).then(|| outside(range.start().to_string(), range.end().to_string()))
        }
        Values::Text(form) => (!(form.matches)(value)).then(|| form.write.to_owned()),
        Values::Choice(_) | Values::Other => None,
    }
}

fn insert(into: &mut Value, path: &[&str], value: Value) {
    match path {
        [] => *into = value,
        [name, rest @ ..] => {
            if !into.is_object() {
                *into = Value::Object(Map::new());
            }
            insert(&mut into[*name], rest, value);
        }
    }
}

fn is_name(name: &str) -> bool {
    let end = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let ends = [name.bytes().next(), name.bytes().last()];
    name.len() <= NAME_CHARS
        && name.bytes().all(|b| end(b) || b == b'-')
        && ends.iter().all(|b| b.is_some_and(end))
}
