//! Domains in object names: which model the KV belongs to, and how its bytes are arranged.

use kvcachepool_protocol::object::ObjectName;
use std::fmt;
use std::str::FromStr;

/// First 16 hex digits of ModelId and LayoutId. Text form: `model/layout`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Domain {
    model: String,
    layout: String,
}

impl Domain {
    /// Domain of an object.
    pub fn of(name: &ObjectName) -> Self {
        Self {
            model: name.model.clone(),
            layout: name.layout.clone(),
        }
    }

    /// Whether the object belongs to this domain.
    pub fn has(&self, name: &ObjectName) -> bool {
        (&self.model, &self.layout) == (&name.model, &name.layout)
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.model, self.layout)
    }
}

impl FromStr for Domain {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let hex16 = |part: &str| {
            let digits = part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            (part.len() == 16 && digits).then(|| part.to_owned())
        };
        let (model, layout) = text.split_once('/').unwrap_or_default();
        match (hex16(model), hex16(layout)) {
            (Some(model), Some(layout)) => Ok(Self { model, layout }),
            _ => Err("write it as `inspect` prints it: 16 lower-case hex digits, a slash, 16 more"),
        }
    }
}
