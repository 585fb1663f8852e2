//! Gauges that belong to an object and disappear with it. Each group of series is replaced as a whole. A series is only its text and its
//! value: thousands of objects with some twenty series each take a few megabytes.

use crate::label::values;
use crate::table::{Kind, Metric, PREFIX};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tracing::error;

/// A value of a gauge: the metric's name without prefix, its label values, and the value.
pub type Gauge<'a> = (&'static str, Vec<&'a str>, f64);

/// The series of a group by metric, each with its labels as text.
type Group = BTreeMap<&'static str, Vec<(Box<str>, f64)>>;

pub(crate) struct Groups {
    /// The gauges of the table, by name.
    metrics: BTreeMap<&'static str, Metric>,
    groups: Mutex<HashMap<Box<str>, Group>>,
}

impl Groups {
    pub(crate) fn of<'a>(table: impl IntoIterator<Item = &'a Metric>) -> Self {
        let gauges = table.into_iter().filter(|m| m.kind == Kind::Gauge);
        Self {
            metrics: gauges.map(|m| (m.name, *m)).collect(),
            groups: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Box<str>, Group>> {
        // The map is valid after every statement.
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn replace(&self, name: &str, gauges: &[Gauge<'_>]) {
        let mut group = Group::new();
        for (metric, labels, value) in gauges {
            match self.metrics.get(metric) {
                Some(known) if known.labels.len() == labels.len() => {
                    let series = (text(known.labels, labels), *value);
                    group.entry(metric).or_default().push(series);
                }
                _ => error!(
                    metric,
                    "no such gauge in the table, or its labels do not fit"
                ),
            }
        }
        self.lock().insert(name.into(), group);
    }

    pub(crate) fn remove(&self, name: &str) {
        self.lock().remove(name);
    }

    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// Appends all series in Prometheus's text format.
    pub(crate) fn write(&self, out: &mut String) {
        let groups = self.lock();
        for metric in self.metrics.values() {
            let series = groups.values().filter_map(|group| group.get(metric.name));
            let mut series = series.flatten().peekable();
            if series.peek().is_none() {
                continue;
            }
            let (name, help, kind) = (metric.name, metric.help, metric.kind.name());
            // Writing to a string cannot fail.
            let _ = writeln!(
                out,
                "# HELP {PREFIX}{name} {help}\n# TYPE {PREFIX}{name} {kind}"
            );
            for (labels, value) in series {
                let _ = writeln!(out, "{PREFIX}{name}{labels} {value}");
            }
        }
    }
}

fn text(names: &[&str], given: &[&str]) -> Box<str> {
    let mut text = String::from("{");
    for (name, value) in names.iter().zip(values(names, given)) {
        let comma = if text.len() > 1 { "," } else { "" };
        let value = value
            .replace('\\', r"\\")
            .replace('"', r#"\""#)
            .replace('\n', r"\n");
        let _ = write!(text, "{comma}{name}=\"{value}\"");
    }
    text.push('}');
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{counter, gauge};

    const TABLE: &[Metric] = &[
        counter("total", &[], "Counted."),
        gauge("level", &["object", "state"], "By state."),
        gauge("size", &["object"], "A size."),
    ];

    fn written(groups: &Groups) -> String {
        let mut out = String::new();
        groups.write(&mut out);
        out
    }

    #[test]
    fn a_group_is_replaced_as_a_whole_and_removed() {
        let groups = Groups::of(TABLE);
        groups.replace(
            "a",
            &[
                ("level", vec!["a", "AtRest"], 1.0),
                ("level", vec!["a", "Moving"], 2.5),
                ("size", vec!["a"], 7.0),
            ],
        );
        assert_eq!(
            written(&groups),
            "# HELP kvcachepool_level By state.\n# TYPE kvcachepool_level gauge\n\
             kvcachepool_level{object=\"a\",state=\"at_rest\"} 1\n\
             kvcachepool_level{object=\"a\",state=\"moving\"} 2.5\n\
             # HELP kvcachepool_size A size.\n# TYPE kvcachepool_size gauge\n\
             kvcachepool_size{object=\"a\"} 7\n"
        );
        groups.replace("b", &[("size", vec!["b"], 1.0)]);
        groups.replace("a", &[("size", vec!["a"], 8.0)]);
        assert!(!written(&groups).contains("level"));
        groups.remove("a");
        assert_eq!(written(&groups).lines().count(), 3, "only that of b");
        groups.clear();
        assert_eq!(written(&groups), "");
    }

    #[test]
    fn label_values_are_escaped() {
        let groups = Groups::of(TABLE);
        groups.replace("a", &[("size", vec!["a\"b\\c\nd"], 1.0)]);
        assert!(written(&groups).contains(r#"{object="a\"b\\c\nd"} 1"#));
    }

    #[test]
    fn wrong_names_kinds_and_labels_add_nothing() {
        let groups = Groups::of(TABLE);
        groups.replace(
            "a",
            &[
                ("unknown", vec![], 1.0),
                ("total", vec![], 1.0),
                ("size", vec![], 1.0),
            ],
        );
        assert_eq!(written(&groups), "");
    }
}
