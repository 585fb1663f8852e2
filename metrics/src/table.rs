//! What a table of metrics is made of.

/// Prefix of every name.
pub const PREFIX: &str = "kvcachepool_";

/// Kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Only grows while the process lives.
    Counter,
    /// Goes both ways.
    Gauge,
    /// Histogram of seconds, with these upper bounds.
    Seconds(&'static [f64]),
}

impl Kind {
    /// As Prometheus names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Seconds(_) => "histogram",
        }
    }
}

/// One metric family.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name without prefix.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
    /// Label names, in the order of their values.
    pub labels: &'static [&'static str],
    /// For people: a sentence.
    pub help: &'static str,
}

impl Metric {
    /// Its row in the docs: name, type, labels, help.
    pub fn doc_row(&self) -> String {
        let labels: Vec<String> = self.labels.iter().map(|l| format!("`{l}`")).collect();
        let (name, kind, labels) = (self.name, self.kind.name(), labels.join(", "));
        format!("| `{PREFIX}{name}` | {kind} | {labels} | {} |\n", self.help)
    }
}

/// A counter of a table.
pub const fn counter(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    metric(Kind::Counter, name, labels, help)
}

/// A gauge of a table.
pub const fn gauge(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    metric(Kind::Gauge, name, labels, help)
}

/// A histogram of a table, in seconds, with these upper bounds.
pub const fn seconds(
    bounds: &'static [f64],
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    metric(Kind::Seconds(bounds), name, labels, help)
}

const fn metric(
    kind: Kind,
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric {
        name,
        kind,
        labels,
        help,
    }
}
