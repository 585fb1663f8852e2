//! Counters: the connectors' reports (conserved: requested = hits + misses) and the sessions' own.

use super::core::{Core, text};
use super::seam::Host;
use kvcachepool_protocol::message::{self, ErrorBody, ErrorCode, Report};
use std::collections::BTreeMap;

/// Limit on distinct names that peers can add, per kind.
const NAMES_MAX: usize = 256;
const OTHER: &str = "other";
/// Tokens that a connector's report does not account for.
const UNACCOUNTED: &str = "unaccounted";

/// Counters since the start of the engine process.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub requested_tokens: u64,
    pub hit_tokens: BTreeMap<String, u64>,
    pub miss_tokens: BTreeMap<String, u64>,
    pub load_failed_tokens: u64,
    pub connector_events: BTreeMap<String, u64>,
    pub copied_bytes: BTreeMap<String, u64>,
    pub copied_seconds: BTreeMap<String, f64>,
    pub events: BTreeMap<&'static str, u64>,
    pub ignored: BTreeMap<&'static str, u64>,
    pub refused: BTreeMap<String, u64>,
    /// By `GRANT_*`.
    pub grants: [u64; 9],
    /// By `CHUNK_*`. Counts final answers only.
    pub probe_chunks: [u64; 3],
    pub probes_unready: u64,
}

impl Counters {
    pub fn event(&mut self, name: &'static str) {
        self.add_event(name, 1);
    }

    pub fn add_event(&mut self, name: &'static str, count: u64) {
        if count > 0 {
            *self.events.entry(name).or_default() += count;
        }
    }

    pub fn ignored(&mut self, reason: &'static str) {
        *self.ignored.entry(reason).or_default() += 1;
    }

    pub fn refused(&mut self, code: ErrorCode) {
        *self.refused.entry(format!("{code:?}")).or_default() += 1;
    }

    pub fn granted(&mut self, result: u8) {
        if let Some(count) = self.grants.get_mut(result as usize) {
            *count += 1;
        }
    }

    /// Adds a connector's report. Tokens missing from it count as misses, so that the parts always add up.
    pub fn add(&mut self, report: &Report) {
        let parts = report
            .hit_tokens
            .values()
            .chain(report.miss_tokens.values());
        let accounted = parts.fold(0u64, |sum, n| sum.saturating_add(*n));
        let requested = report.requested_tokens.max(accounted);
        add_all(&mut self.hit_tokens, &report.hit_tokens);
        add_all(&mut self.miss_tokens, &report.miss_tokens);
        if requested > accounted {
            add_named(&mut self.miss_tokens, UNACCOUNTED, requested - accounted);
        }
        if report.requested_tokens != accounted {
            self.event("ReportUnbalanced");
        }
        // summed over the parts, so that it equals them even after a saturation
        self.requested_tokens = self
            .hit_tokens
            .values()
            .chain(self.miss_tokens.values())
            .fold(0u64, |sum, n| sum.saturating_add(*n));
        self.load_failed_tokens = self
            .load_failed_tokens
            .saturating_add(report.load_failed_tokens);
        add_all(&mut self.connector_events, &report.events);
        add_all(&mut self.copied_bytes, &report.copied_bytes);
        for (name, seconds) in &report.copied_seconds {
            if seconds.is_finite() && *seconds >= 0.0 {
                *self
                    .copied_seconds
                    .entry(known_name(&self.copied_seconds, name))
                    .or_default() += seconds;
            }
        }
    }
}

fn add_all(to: &mut BTreeMap<String, u64>, from: &BTreeMap<String, u64>) {
    for (name, count) in from {
        add_named(to, name, *count);
    }
}

fn add_named(to: &mut BTreeMap<String, u64>, name: &str, count: u64) {
    let slot = to.entry(known_name(to, name)).or_default();
    *slot = slot.saturating_add(count);
}

fn known_name<V>(of: &BTreeMap<String, V>, name: &str) -> String {
    let name = text(name);
    if of.len() < NAMES_MAX || of.contains_key(&name) {
        name
    } else {
        OTHER.into()
    }
}

impl<H: Host> Core<H> {
    pub(super) fn report(&mut self, session: u64, body: &[u8]) -> Result<(), ErrorBody> {
        let report: Report = message::decode(body)?;
        self.counters.add(&report);
        if let Some(s) = self.peers.sessions.get_mut(&session) {
            s.oldest_job_ms = report.oldest_job_ms;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn map(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect()
    }

    #[test]
    fn tokens_that_a_connector_left_out_are_misses() {
        let mut c = Counters::default();
        c.add(&Report {
            requested_tokens: 10,
            hit_tokens: map(&[("memory", 4)]),
            ..Report::default()
        });
        assert_eq!(c.miss_tokens, map(&[(UNACCOUNTED, 6)]));
        assert_eq!(c.requested_tokens, 10);
    }

    #[test]
    fn a_peer_cannot_make_us_keep_names_without_bound() {
        let mut c = Counters::default();
        for i in 0..10_000 {
            c.add(&Report {
                events: map(&[(&format!("e{i}"), 1)]),
                ..Report::default()
            });
        }
        assert_eq!(c.connector_events.len(), NAMES_MAX + 1);
        assert_eq!(c.connector_events.values().sum::<u64>(), 10_000);
    }

    proptest! {
        #[test]
        fn requested_is_always_the_sum_of_hits_and_misses(
            reports in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 1..50)
        ) {
            let mut c = Counters::default();
            for (requested, hit, miss) in reports {
                c.add(&Report {
                    requested_tokens: requested % 1000,
                    hit_tokens: map(&[("memory", hit % 1000)]),
                    miss_tokens: map(&[("absent", miss % 1000)]),
                    ..Report::default()
                });
                let sum: u64 = c.hit_tokens.values().chain(c.miss_tokens.values()).sum();
                prop_assert_eq!(c.requested_tokens, sum);
            }
        }
    }
}
