//! The registry: built from the table, so that nothing is exported that the table does not name.

use super::metrics_table::{Kind, Metric, PREFIX, all};
use prometheus::{CounterVec, Encoder, GaugeVec, Opts, Registry, TextEncoder};
use std::collections::HashMap;
use tracing::error;

enum Family {
    Counter(CounterVec),
    Gauge(GaugeVec),
}

/// All counters and gauges.
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
        for metric in all() {
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
        if let Some(Family::Counter(family)) = self.families.get(name)
            && let Ok(counter) = family.get_metric_with_label_values(labels)
        {
            counter.inc_by(by as f64);
        }
    }

    /// Sets a gauge.
    pub fn set(&self, name: &str, labels: &[&str], value: f64) {
        if let Some(Family::Gauge(family)) = self.families.get(name)
            && let Ok(gauge) = family.get_metric_with_label_values(labels)
        {
            gauge.set(value);
        }
    }

    /// Forgets all label values of a gauge.
    pub fn clear(&self, name: &str) {
        if let Some(Family::Gauge(family)) = self.families.get(name) {
            family.reset();
        }
    }

    /// Takes the value that the core keeps by itself: a gauge is set, a counter is brought up to it.
    pub fn take(&self, name: &str, labels: &[&str], value: f64) {
        match self.families.get(name) {
            Some(Family::Gauge(_)) => self.set(name, labels, value),
            Some(Family::Counter(family)) => {
                if let Ok(counter) = family.get_metric_with_label_values(labels) {
                    counter.inc_by((value - counter.get()).max(0.0));
                }
            }
            None => error!(metric = name, "a metric that the table does not name"),
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
    let opts = Opts::new(format!("{PREFIX}{}", metric.name), metric.help);
    Ok(match metric.kind {
        Kind::Counter => {
            let family = CounterVec::new(opts, metric.labels)?;
            registry.register(Box::new(family.clone()))?;
            if metric.labels.is_empty() {
                family.get_metric_with_label_values(&[] as &[&str])?;
            }
            Family::Counter(family)
        }
        Kind::Gauge => {
            let family = GaugeVec::new(opts, metric.labels)?;
            registry.register(Box::new(family.clone()))?;
            Family::Gauge(family)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_of_the_table_registers_and_is_exported_by_its_name() {
        let metrics = Metrics::new();
        for metric in all() {
            let labels: Vec<&str> = metric.labels.iter().map(|_| "x").collect();
            match metric.kind {
                Kind::Counter => metrics.add(metric.name, &labels, 2),
                Kind::Gauge => metrics.set(metric.name, &labels, 2.0),
            }
            let line = format!("{PREFIX}{}", metric.name);
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
    fn counters_of_the_core_never_go_back() {
        let metrics = Metrics::new();
        metrics.take("engine_starts_total", &[], 3.0);
        metrics.take("engine_starts_total", &[], 2.0);
        assert!(metrics.text().contains("kvcachepool_engine_starts_total 3"));
    }
}
