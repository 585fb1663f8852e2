//! Histograms whose counts are kept elsewhere: the library's own only count what they observe.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{self, LabelPair, MetricFamily, MetricType};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

/// The counts of one series.
#[derive(Debug, Clone)]
struct Total {
    /// By bucket, not cumulative; the last one counts what is above all bounds.
    counts: Vec<u64>,
    sum: f64,
}

/// A histogram of seconds with labels. Clones have the same series.
#[derive(Clone)]
pub(crate) struct Totals {
    desc: Desc,
    bounds: &'static [f64],
    /// By label values.
    series: Arc<Mutex<BTreeMap<Vec<String>, Total>>>,
}

impl Totals {
    pub(crate) fn new(
        name: String,
        help: &str,
        labels: &[&str],
        bounds: &'static [f64],
    ) -> Result<Self, prometheus::Error> {
        let labels = labels.iter().map(ToString::to_string).collect();
        Ok(Self {
            desc: Desc::new(name, help.to_string(), labels, HashMap::new())?,
            bounds,
            series: Arc::default(),
        })
    }

    /// Replaces a series. False: the numbers of labels or buckets differ from those of the table.
    pub(crate) fn take(&self, labels: Vec<String>, counts: &[u64], sum: f64) -> bool {
        if labels.len() != self.desc.variable_labels.len() || counts.len() != self.bounds.len() + 1
        {
            return false;
        }
        let counts = counts.to_vec();
        // The map is valid after every statement.
        let mut series = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        series.insert(labels, Total { counts, sum });
        true
    }

    fn histogram(&self, total: &Total) -> proto::Histogram {
        let mut below = 0;
        let bucket = |(bound, count): (&f64, &u64)| {
            below += count;
            let mut bucket = proto::Bucket::default();
            bucket.set_upper_bound(*bound);
            bucket.set_cumulative_count(below);
            bucket
        };
        let buckets = self.bounds.iter().zip(&total.counts).map(bucket).collect();
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(buckets);
        histogram.set_sample_count(total.counts.iter().sum());
        histogram.set_sample_sum(total.sum);
        histogram
    }
}

impl Collector for Totals {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let series = self.series.lock().unwrap_or_else(PoisonError::into_inner);
        let metric = |(values, total): (&Vec<String>, &Total)| {
            let label = |(name, value): (&String, &String)| {
                let mut label = LabelPair::default();
                label.set_name(name.clone());
                label.set_value(value.clone());
                label
            };
            let names = self.desc.variable_labels.iter();
            let mut metric = proto::Metric::from_label(names.zip(values).map(label).collect());
            metric.set_histogram(self.histogram(total));
            metric
        };
        let mut family = MetricFamily::default();
        family.set_name(self.desc.fq_name.clone());
        family.set_help(self.desc.help.clone());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(series.iter().map(metric).collect());
        vec![family]
    }
}
