//! The registry built from a table.

use crate::groups::{Gauge, Groups};
use crate::label::values;
use crate::table::{Kind, Metric, PREFIX};
use crate::totals::Totals;
use prometheus::{
    CounterVec, Encoder, GaugeVec, HistogramOpts, HistogramVec, Opts, Registry, TextEncoder,
};
use std::collections::HashMap;
use std::time::Duration;
use tracing::error;

enum Family {
    Counter(CounterVec),
    Gauge(GaugeVec),
    Seconds(HistogramVec),
    KeptSeconds(Totals),
}

/// The metric families of a program. An unknown name or a wrong number of labels is logged as an error and otherwise ignored.
/// Label values are exported in snake_case (`label::values`).
pub struct Metrics {
    registry: Registry,
    /// Each family, with the names of its labels.
    families: HashMap<&'static str, (Family, &'static [&'static str])>,
    groups: Groups,
}

impl Metrics {
    /// Registers every family of a table.
    pub fn of<'a>(table: impl IntoIterator<Item = &'a Metric>) -> Self {
        let table: Vec<&Metric> = table.into_iter().collect();
        let registry = Registry::new();
        let mut families = HashMap::new();
        let groups = Groups::of(table.iter().copied());
        for metric in table {
            match family(&registry, metric) {
                Ok(family) => {
                    families.insert(metric.name, (family, metric.labels));
                }
                // A test catches an invalid table. At run time only this metric is missing.
                Err(e) => error!(metric = metric.name, error = %e, "metric not registered"),
            }
        }
        Self {
            registry,
            families,
            groups,
        }
    }

    /// Adds the metrics of the process itself, `process_*`, where the system has them.
    pub fn with_process(self) -> Self {
        #[cfg(target_os = "linux")]
        {
            use prometheus::process_collector::ProcessCollector;
            let process = self
                .registry
                .register(Box::new(ProcessCollector::for_self()));
            if let Err(e) = process {
                error!(error = %e, "metrics of the process not registered");
            }
        }
        self
    }

    pub fn add(&self, name: &str, labels: &[&str], by: u64) {
        match self.families.get(name) {
            Some((Family::Counter(family), names)) => {
                fitting(
                    name,
                    family.get_metric_with_label_values(&values(names, labels)),
                    |counter| {
                        counter.inc_by(by as f64);
                    },
                );
            }
            _ => error!(metric = name, "no such counter in the table"),
        }
    }

    pub fn set(&self, name: &str, labels: &[&str], value: f64) {
        match self.families.get(name) {
            Some((Family::Gauge(family), names)) => {
                fitting(
                    name,
                    family.get_metric_with_label_values(&values(names, labels)),
                    |gauge| {
                        gauge.set(value);
                    },
                );
            }
            _ => error!(metric = name, "no such gauge in the table"),
        }
    }

    /// Removes all label values of a gauge.
    pub fn clear(&self, name: &str) {
        match self.families.get(name) {
            Some((Family::Gauge(family), _)) => family.reset(),
            _ => error!(metric = name, "no such gauge in the table"),
        }
    }

    /// Replaces all gauges of a group, such as those of one object. A gauge is either set by group or by `set`.
    pub fn replace_group(&self, group: &str, gauges: &[Gauge<'_>]) {
        self.groups.replace(group, gauges);
    }

    pub fn remove_group(&self, group: &str) {
        self.groups.remove(group);
    }

    pub fn clear_groups(&self) {
        self.groups.clear();
    }

    pub fn observe(&self, name: &str, labels: &[&str], took: Duration) {
        match self.families.get(name) {
            Some((Family::Seconds(family), names)) => {
                fitting(
                    name,
                    family.get_metric_with_label_values(&values(names, labels)),
                    |histogram| {
                        histogram.observe(took.as_secs_f64());
                    },
                );
            }
            _ => error!(metric = name, "no such histogram in the table"),
        }
    }

    /// Sets a gauge, or raises a counter to a total that is kept elsewhere. A counter never decreases.
    pub fn take(&self, name: &str, labels: &[&str], value: f64) {
        match self.families.get(name) {
            Some((Family::Gauge(_), _)) => self.set(name, labels, value),
            Some((Family::Counter(family), names)) => {
                fitting(
                    name,
                    family.get_metric_with_label_values(&values(names, labels)),
                    |counter| {
                        counter.inc_by((value - counter.get()).max(0.0));
                    },
                );
            }
            _ => error!(metric = name, "no such gauge or counter in the table"),
        }
    }

    /// Replaces a series of a histogram that is kept elsewhere. `counts`: by bucket of the table, not cumulative, and in the last one what is
    /// above all of them.
    pub fn take_seconds(&self, name: &str, labels: &[&str], counts: &[u64], sum: Duration) {
        let taken = match self.families.get(name) {
            Some((Family::KeptSeconds(family), names)) => {
                let labels = values(names, labels).into_iter().map(Into::into).collect();
                family.take(labels, counts, sum.as_secs_f64())
            }
            _ => false,
        };
        if !taken {
            error!(
                metric = name,
                "no such kept histogram in the table, or it does not fit"
            );
        }
    }

    /// The metrics in Prometheus's text format.
    pub fn text(&self) -> String {
        let mut out = Vec::new();
        if let Err(e) = TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            error!(error = %e, "metrics cannot be encoded");
        }
        let mut text = String::from_utf8_lossy(&out).into_owned();
        self.groups.write(&mut text);
        text
    }
}

/// Labels that do not fit the table are a programming error. They must not end the program.
fn fitting<M>(name: &str, found: Result<M, prometheus::Error>, with: impl FnOnce(M)) {
    match found {
        Ok(metric) => with(metric),
        Err(e) => error!(metric = name, error = %e, "labels do not fit the table"),
    }
}

fn family(registry: &Registry, metric: &Metric) -> Result<Family, prometheus::Error> {
    let name = format!("{PREFIX}{}", metric.name);
    Ok(match metric.kind {
        Kind::Counter => {
            let family = CounterVec::new(Opts::new(name, metric.help), metric.labels)?;
            registry.register(Box::new(family.clone()))?;
            if metric.labels.is_empty() {
                family.get_metric_with_label_values(&[] as &[&str])?;
            }
            Family::Counter(family)
        }
        Kind::Gauge => {
            let family = GaugeVec::new(Opts::new(name, metric.help), metric.labels)?;
            registry.register(Box::new(family.clone()))?;
            Family::Gauge(family)
        }
        Kind::Seconds(buckets) => {
            let opts = HistogramOpts::new(name, metric.help).buckets(buckets.to_vec());
            let family = HistogramVec::new(opts, metric.labels)?;
            registry.register(Box::new(family.clone()))?;
            Family::Seconds(family)
        }
        Kind::KeptSeconds(buckets) => {
            let family = Totals::new(name, metric.help, metric.labels, buckets)?;
            registry.register(Box::new(family.clone()))?;
            Family::KeptSeconds(family)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{counter, gauge, kept_seconds, seconds};

    const TABLE: &[Metric] = &[
        counter("plain_total", &[], "Counted."),
        counter("labelled_total", &["a", "b"], "Counted by two labels."),
        gauge("level", &["a"], "Goes both ways."),
        seconds(&[1.0, 5.0], "wait_seconds", &[], "Waits."),
        seconds(&[1.0], "labelled_seconds", &["a"], "Waits by a label."),
        kept_seconds(&[1.0, 5.0], "kept_seconds", &["a"], "Counted elsewhere."),
    ];

    #[test]
    fn each_kind_is_exported_by_its_name_with_its_labels() {
        let metrics = Metrics::of(TABLE);
        metrics.add("plain_total", &[], 2);
        metrics.add("labelled_total", &["x", "y"], 3);
        metrics.set("level", &["x"], -1.5);
        metrics.observe("wait_seconds", &[], Duration::from_secs(2));
        let text = metrics.text();
        for line in [
            "kvcachepool_plain_total 2",
            "kvcachepool_labelled_total{a=\"x\",b=\"y\"} 3",
            "kvcachepool_level{a=\"x\"} -1.5",
            "kvcachepool_wait_seconds_bucket{le=\"1\"} 0",
            "kvcachepool_wait_seconds_bucket{le=\"5\"} 1",
            "kvcachepool_wait_seconds_sum 2",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
        metrics.clear("level");
        assert!(!metrics.text().contains("kvcachepool_level{"));
    }

    #[test]
    fn every_kind_exports_its_label_values_in_snake_case() {
        let metrics = Metrics::of(TABLE);
        metrics.add("labelled_total", &["QueueFull", "minLoadTokens"], 1);
        metrics.take("labelled_total", &["queue_full", "min_load_tokens"], 2.0);
        metrics.set("level", &["Ok"], 1.0);
        metrics.observe("labelled_seconds", &["InDoubt"], Duration::from_secs(1));
        let text = metrics.text();
        for line in [
            "kvcachepool_labelled_total{a=\"queue_full\",b=\"min_load_tokens\"} 2",
            "kvcachepool_level{a=\"ok\"} 1",
            "kvcachepool_labelled_seconds_count{a=\"in_doubt\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn a_counter_without_labels_is_there_from_the_start() {
        assert!(
            Metrics::of(TABLE)
                .text()
                .contains("kvcachepool_plain_total 0")
        );
    }

    #[test]
    fn a_counter_that_somebody_else_keeps_never_goes_back() {
        let metrics = Metrics::of(TABLE);
        metrics.take("plain_total", &[], 3.0);
        metrics.take("plain_total", &[], 2.0);
        metrics.take("level", &["x"], 3.0);
        metrics.take("level", &["x"], 2.0);
        assert!(metrics.text().contains("kvcachepool_plain_total 3"));
        assert!(metrics.text().contains("kvcachepool_level{a=\"x\"} 2"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_program_exports_its_memory_processor_time_and_files() {
        let text = Metrics::of(TABLE).with_process().text();
        for name in ["cpu_seconds_total", "resident_memory_bytes", "open_fds"] {
            assert!(
                text.contains(&format!("\nprocess_{name} ")),
                "{name} in\n{text}"
            );
        }
    }

    #[test]
    fn a_histogram_that_somebody_else_keeps_has_its_latest_counts() {
        let metrics = Metrics::of(TABLE);
        assert!(!metrics.text().contains("kept_seconds"), "no series yet");
        metrics.take_seconds(
            "kept_seconds",
            &["Late"],
            &[1, 0, 0],
            Duration::from_secs(1),
        );
        metrics.take_seconds(
            "kept_seconds",
            &["Late"],
            &[1, 2, 3],
            Duration::from_secs(40),
        );
        metrics.take_seconds("kept_seconds", &["b"], &[4, 0, 0], Duration::from_secs(2));
        let text = metrics.text();
        let lines: Vec<&str> = text
            .lines()
            .filter(|l| l.contains("kept_seconds"))
            .collect();
        let expected = [
            "# HELP kvcachepool_kept_seconds Counted elsewhere.",
            "# TYPE kvcachepool_kept_seconds histogram",
            "kvcachepool_kept_seconds_bucket{a=\"b\",le=\"1\"} 4",
            "kvcachepool_kept_seconds_bucket{a=\"b\",le=\"5\"} 4",
            "kvcachepool_kept_seconds_bucket{a=\"b\",le=\"+Inf\"} 4",
            "kvcachepool_kept_seconds_sum{a=\"b\"} 2",
            "kvcachepool_kept_seconds_count{a=\"b\"} 4",
            "kvcachepool_kept_seconds_bucket{a=\"late\",le=\"1\"} 1",
            "kvcachepool_kept_seconds_bucket{a=\"late\",le=\"5\"} 3",
            "kvcachepool_kept_seconds_bucket{a=\"late\",le=\"+Inf\"} 6",
            "kvcachepool_kept_seconds_sum{a=\"late\"} 40",
            "kvcachepool_kept_seconds_count{a=\"late\"} 6",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn wrong_names_kinds_and_labels_change_nothing() {
        let metrics = Metrics::of(TABLE);
        let before = metrics.text();
        metrics.add("unknown_total", &[], 1);
        metrics.add("labelled_total", &["x"], 1);
        metrics.set("plain_total", &[], 1.0);
        metrics.observe("level", &["x"], Duration::from_secs(1));
        metrics.take("wait_seconds", &[], 1.0);
        metrics.take_seconds("wait_seconds", &[], &[1, 0, 0], Duration::ZERO);
        metrics.take_seconds("kept_seconds", &["x"], &[1, 0], Duration::ZERO);
        metrics.take_seconds("kept_seconds", &["x", "y"], &[1, 0, 0], Duration::ZERO);
        assert_eq!(metrics.text(), before);
    }
}
