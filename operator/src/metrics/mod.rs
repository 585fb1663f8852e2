//! The operator's metrics: the one table of families (`table`) and the registry that is built from it.
//! Every part counts through `Metrics` by a name of the table; nothing is exported that the table does not name.
//! Nothing here decides anything.

pub mod table;

use prometheus::{
    CounterVec, Encoder, GaugeVec, HistogramOpts, HistogramVec, Opts, Registry, TextEncoder,
};
use std::collections::HashMap;
use std::time::Duration;
use table::{ALL, Kind, Metric, PREFIX};
use tracing::error;

enum Family {
    Counter(CounterVec),
    Gauge(GaugeVec),
    Seconds(HistogramVec),
}

/// All families.
pub struct Metrics {
    registry: Registry,
    families: HashMap<&'static str, Family>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// A registry with every family of the table.
    pub fn new() -> Self {
        let registry = Registry::new();
        let mut families = HashMap::new();
        for metric in ALL {
            match family(&registry, metric) {
                Ok(family) => {
                    families.insert(metric.name, family);
                }
                // A wrong table is caught by its test; at run time the one metric is missing and everything else works.
                Err(e) => error!(metric = metric.name, error = %e, "metric not registered"),
            }
        }
        Self { registry, families }
    }

    /// Adds to a counter.
    pub fn add(&self, name: &str, labels: &[&str], by: u64) {
        match self.families.get(name) {
            Some(Family::Counter(family)) => match family.get_metric_with_label_values(labels) {
                Ok(counter) => counter.inc_by(by as f64),
                Err(e) => error!(metric = name, error = %e, "labels do not fit the table"),
            },
            _ => error!(metric = name, "no such counter in the table"),
        }
    }

    /// Sets a gauge.
    pub fn set(&self, name: &str, labels: &[&str], value: f64) {
        match self.families.get(name) {
            Some(Family::Gauge(family)) => match family.get_metric_with_label_values(labels) {
                Ok(gauge) => gauge.set(value),
                Err(e) => error!(metric = name, error = %e, "labels do not fit the table"),
            },
            _ => error!(metric = name, "no such gauge in the table"),
        }
    }

    /// Forgets all label values of a gauge.
    pub fn clear(&self, name: &str) {
        match self.families.get(name) {
            Some(Family::Gauge(family)) => family.reset(),
            _ => error!(metric = name, "no such gauge in the table"),
        }
    }

    /// Adds one duration to a histogram.
    pub fn observe(&self, name: &str, labels: &[&str], took: Duration) {
        match self.families.get(name) {
            Some(Family::Seconds(family)) => match family.get_metric_with_label_values(labels) {
                Ok(histogram) => histogram.observe(took.as_secs_f64()),
                Err(e) => error!(metric = name, error = %e, "labels do not fit the table"),
            },
            _ => error!(metric = name, "no such histogram in the table"),
        }
    }

    /// The text that Prometheus reads.
    pub fn text(&self) -> String {
        let mut out = Vec::new();
        if let Err(e) = TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            error!(error = %e, "metrics cannot be encoded");
        }
        String::from_utf8_lossy(&out).into_owned()
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
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_of_the_table_registers_and_is_exported_by_its_name() {
        let metrics = Metrics::new();
        for metric in ALL {
            let labels: Vec<&str> = metric.labels.iter().map(|_| "x").collect();
            let suffix = match metric.kind {
                Kind::Counter => {
                    metrics.add(metric.name, &labels, 2);
                    ""
                }
                Kind::Gauge => {
                    metrics.set(metric.name, &labels, 2.0);
                    ""
                }
                Kind::Seconds(_) => {
                    metrics.observe(metric.name, &labels, Duration::from_secs(2));
                    "_sum"
                }
            };
            let line = format!("{PREFIX}{}{suffix}", metric.name);
            assert!(
                metrics
                    .text()
                    .lines()
                    .any(|l| l.starts_with(&line) && l.ends_with(" 2")),
                "{line}"
            );
            assert!(
                metric.help.ends_with('.'),
                "{line}: a help text is a sentence"
            );
        }
    }

    #[test]
    fn a_name_stands_once_in_the_table() {
        let mut names: Vec<_> = ALL.iter().map(|m| m.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
