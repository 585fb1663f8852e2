//! The entries of a table of metrics.

/// Prefix of every metric name.
pub const PREFIX: &str = "kvcachepool_";

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Never decreases during a process's life.
    Counter,
    Gauge,
    /// Histogram of seconds, with these upper bounds.
    Seconds(&'static [f64]),
    /// The same, with counts that are kept elsewhere.
    KeptSeconds(&'static [f64]),
}

impl Kind {
    /// The type's name in Prometheus's text format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Seconds(_) | Self::KeptSeconds(_) => "histogram",
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name without prefix.
    pub name: &'static str,
    pub kind: Kind,
    /// Label names, in the order of their values.
    pub labels: &'static [&'static str],
    /// Help text, one sentence.
    pub help: &'static str,
}

impl Metric {
    /// The row in the docs: name, type, labels, help.
    pub fn doc_row(&self) -> String {
        let labels: Vec<String> = self.labels.iter().map(|l| format!("`{l}`")).collect();
        let (name, kind, labels) = (self.name, self.kind.name(), labels.join(", "));
        format!("| `{PREFIX}{name}` | {kind} | {labels} | {} |\n", self.help)
    }
}

type Text = &'static str;
type Labels = &'static [&'static str];
type Bounds = &'static [f64];

pub const fn counter(name: Text, labels: Labels, help: Text) -> Metric {
    metric(Kind::Counter, name, labels, help)
}

pub const fn gauge(name: Text, labels: Labels, help: Text) -> Metric {
    metric(Kind::Gauge, name, labels, help)
}

/// A histogram of seconds with these upper bounds.
pub const fn seconds(bounds: Bounds, name: Text, labels: Labels, help: Text) -> Metric {
    metric(Kind::Seconds(bounds), name, labels, help)
}

/// The same, with counts that are kept elsewhere.
pub const fn kept_seconds(bounds: Bounds, name: Text, labels: Labels, help: Text) -> Metric {
    metric(Kind::KeptSeconds(bounds), name, labels, help)
}

const fn metric(kind: Kind, name: Text, labels: Labels, help: Text) -> Metric {
    Metric {
        name,
        kind,
        labels,
        help,
    }
}
