//! Metrics of lower tiers, and of the decisions between loading and prefill.

use super::core::Core;
use super::seam::Host;

impl<H: Host> Core<H> {
    pub(super) fn tier_metrics(&self, put: &mut dyn FnMut(&'static str, &[&str], f64)) {
        for tier in self.engine.iter().flat_map(|e| e.tiers()) {
            let (name, s) = (tier.kind.name(), tier.stats);
            let up = tier.down.is_none() && !tier.clears;
            let up = if up { 1.0 } else { 0.0 };
            put("tier_up", &[name], up);
            if let Some(reason) = tier.down {
                put("tier_down", &[name, reason], 1.0);
            }
            let maps = [
                ("tier_lookup_chunks_total", &s.lookups),
                ("tier_fetch_chunks_total", &s.fetches),
                ("tier_write_chunks_total", &s.puts),
                ("tier_clears_total", &s.clears),
            ];
            for (metric, map) in maps {
                for (result, count) in map {
                    put(metric, &[name, result], *count as f64);
                }
            }
            put("tier_fetched_bytes_total", &[name], s.fetched_bytes as f64);
            put("tier_written_bytes_total", &[name], s.put_bytes as f64);
            put(
                "tier_cleared_objects_total",
                &[name],
                s.cleared_objects as f64,
            );
            for (operation, ms) in ["lookup", "fetch"].into_iter().zip(tier.expected_ms) {
                put(
                    "tier_expected_seconds",
                    &[name, operation],
                    ms as f64 / 1000.0,
                );
            }
            if let Some(estimate) = tier.estimate {
                let latency_s = estimate.latency_us as f64 / 1e6;
                put("tier_estimated_latency_seconds", &[name], latency_s);
                let speed = estimate.bytes_per_s() as f64;
                put("tier_estimated_bytes_per_second", &[name], speed);
            }
            put("tier_waiting_bytes", &[name], tier.waiting_bytes as f64);
            let gauges = [
                (
                    "fetch",
                    f64::from(tier.fetches_waiting),
                    tier.fetch_bytes as f64,
                ),
                ("write", tier.writes_waiting as f64, tier.write_bytes as f64),
            ];
            for (direction, waiting, bytes) in gauges {
                put("tier_waiting_chunks", &[name, direction], waiting);
                put("tier_in_flight_bytes", &[name, direction], bytes);
            }
        }
    }

    pub(super) fn load_metrics(&self, put: &mut dyn FnMut(&'static str, &[&str], f64)) {
        let speeds = self.peers.sessions.values().map(|s| s.prefill_tokens_per_s);
        if let Some(slowest) = speeds.filter(|speed| *speed > 0).min() {
            put("prefill_tokens_per_second", &[], slowest as f64);
        }
        let Some(engine) = &self.engine else {
            return;
        };
        for (direction, pace) in ["read", "write"].into_iter().zip(engine.paces()) {
            put("pacing_bytes_total", &[direction], pace.bytes as f64);
            let waited_s = pace.waited_ms as f64 / 1000.0;
            put("pacing_waited_seconds_total", &[direction], waited_s);
        }
        let loads = engine.loads();
        for (choice, count) in &loads.choices {
            put("load_choices_total", &[choice], *count as f64);
        }
        for (outcome, count) in &loads.outcomes {
            put("loads_total", &[outcome], *count as f64);
        }
        let expected_s = loads.expected_us as f64 / 1e6;
        put("load_expected_seconds_total", &[], expected_s);
        let took_s = loads.took_us as f64 / 1e6;
        put("load_took_seconds_total", &[], took_s);
    }
}
