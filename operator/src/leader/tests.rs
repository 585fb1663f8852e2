//! Unit tests, and a model of two candidates whose clocks run at different rates and whose messages are delayed or lost.

use super::elect::{Action, Candidate, Record, Timing};
use proptest::prelude::*;
use std::time::Duration;

const TIMING: Timing = Timing {
    lease_duration: Duration::from_secs(12),
    renew_deadline: Duration::from_secs(8),
    retry_period: Duration::from_secs(2),
};

fn record(holder: &str, version: u64) -> Record {
    Record {
        holder: holder.to_owned(),
        lease_duration: Some(TIMING.lease_duration),
        version: version.to_string(),
    }
}

fn at(second: u64) -> Duration {
    Duration::from_secs(second)
}

#[test]
fn a_missing_lease_is_created_and_a_released_one_is_taken_at_once() {
    let mut me = Candidate::new("me".into(), TIMING);
    assert_eq!(me.step(None, at(0)), Action::Create);
    assert_eq!(
        me.step(Some(record("", 1)), at(1)),
        Action::Hold { taken: true }
    );
}

#[test]
fn a_lease_is_taken_only_if_it_stops_changing() {
    let mut me = Candidate::new("me".into(), TIMING);
    for second in 0..60 {
        assert_eq!(
            me.step(Some(record("other", second)), at(second)),
            Action::Wait
        );
    }
    assert_eq!(me.step(Some(record("other", 59)), at(70)), Action::Wait);
    assert_eq!(
        me.step(Some(record("other", 59)), at(71)),
        Action::Hold { taken: true }
    );
}

#[test]
fn a_deleted_lease_is_recreated_by_its_holder_at_once_and_by_others_after_the_lease_duration() {
    let (mut holder, mut other) = (
        Candidate::new("holder".into(), TIMING),
        Candidate::new("other".into(), TIMING),
    );
    assert_eq!(
        holder.step(Some(record("holder", 1)), at(0)),
        Action::Hold { taken: false }
    );
    assert_eq!(other.step(Some(record("holder", 1)), at(0)), Action::Wait);
    assert_eq!(holder.step(None, at(1)), Action::Create);
    for second in 1..13 {
        assert_eq!(other.step(None, at(second)), Action::Wait);
    }
    assert_eq!(other.step(None, at(13)), Action::Create);
}

#[test]
fn a_recreated_lease_restarts_the_wait() {
    let mut other = Candidate::new("other".into(), TIMING);
    assert_eq!(other.step(Some(record("holder", 1)), at(0)), Action::Wait);
    assert_eq!(other.step(None, at(10)), Action::Wait);
    assert_eq!(other.step(Some(record("holder", 2)), at(11)), Action::Wait);
    assert_eq!(other.step(None, at(22)), Action::Wait);
    assert_eq!(other.step(None, at(34)), Action::Create);
}

#[test]
fn the_first_check_never_takes_a_held_lease() {
    let mut me = Candidate::new("me".into(), TIMING);
    assert_eq!(
        me.step(Some(record("other", 1)), at(1_000_000)),
        Action::Wait
    );
}

#[test]
fn a_longer_lease_duration_of_the_holder_is_respected_up_to_a_maximum() {
    for (written, waits) in [(30, 30), (1_000_000, 60), (1, 12)] {
        let lease = Record {
            lease_duration: Some(at(written)),
            ..record("other", 1)
        };
        let mut me = Candidate::new("me".into(), TIMING);
        me.step(Some(lease.clone()), at(0));
        assert_eq!(me.step(Some(lease.clone()), at(waits - 1)), Action::Wait);
        assert_eq!(
            me.step(Some(lease), at(waits)),
            Action::Hold { taken: true }
        );
    }
}

#[test]
fn a_leader_session_counts_from_before_the_write_and_expires() {
    let mut me = Candidate::new("me".into(), TIMING);
    assert_eq!(me.leads_until(at(0)), None);
    me.record_renewal(at(5));
    assert_eq!(me.leads_until(at(12)), Some(at(13)));
    assert_eq!(me.leads_until(at(13)), None);
}

#[test]
fn a_leader_that_reads_another_holder_stops_at_once() {
    let mut me = Candidate::new("me".into(), TIMING);
    me.record_renewal(at(0));
    assert_eq!(me.step(Some(record("other", 9)), at(1)), Action::Wait);
    assert_eq!(me.leads_until(at(1)), None);
}

/// A candidate checks the Lease. Its write arrives after `write_ms`, and the response `answer_ms` later unless it is lost.
#[derive(Debug, Clone)]
struct Check {
    candidate: usize,
    wait_ms: u64,
    write_ms: u64,
    answer_ms: Option<u64>,
}

fn check() -> impl Strategy<Value = Check> {
    let delay = prop_oneof![4 => 0..50u64, 1 => 0..20_000u64];
    let lost = proptest::option::weighted(0.8, delay.clone());
    (
        0..2usize,
        prop_oneof![4 => 0..2500u64, 1 => 0..20_000u64],
        delay,
        lost,
    )
        .prop_map(|(candidate, wait_ms, write_ms, answer_ms)| Check {
            candidate,
            wait_ms,
            write_ms,
            answer_ms,
        })
}

enum Event {
    Write {
        candidate: usize,
        action: Action,
        version: Option<u64>,
        started: Duration,
        answer_ms: Option<u64>,
    },
    Answer {
        candidate: usize,
        started: Duration,
    },
}

struct World {
    lease: Option<(usize, u64)>,
    versions: u64,
    candidates: [Candidate; 2],
    /// Ticks of each clock per 1000 ms of real time.
    rates: [u64; 2],
    pending: Vec<(u64, Event)>,
}

impl World {
    fn clock(&self, candidate: usize, real_ms: u64) -> Duration {
        Duration::from_micros(real_ms * self.rates[candidate])
    }

    fn assert_one_leader(&self, real_ms: u64) {
        let leads = |candidate: usize| {
            self.candidates[candidate]
                .leads_until(self.clock(candidate, real_ms))
                .is_some()
        };
        assert!(!(leads(0) && leads(1)), "two leaders at {real_ms} ms");
    }

    fn run_until(&mut self, end_ms: u64) {
        while let Some(next) = (0..self.pending.len())
            .filter(|i| self.pending[*i].0 <= end_ms)
            .min_by_key(|i| self.pending[*i].0)
        {
            let (now, event) = self.pending.swap_remove(next);
            match event {
                Event::Write {
                    candidate,
                    action,
                    version,
                    started,
                    answer_ms,
                } => {
                    let fits = match action {
                        Action::Create => self.lease.is_none(),
                        Action::Hold { .. } => self.lease.map(|l| l.1) == version,
                        Action::Wait => false,
                    };
                    if fits {
                        self.versions += 1;
                        self.lease = Some((candidate, self.versions));
                        if let Some(delay) = answer_ms {
                            self.pending
                                .push((now + delay, Event::Answer { candidate, started }));
                        }
                    }
                }
                Event::Answer { candidate, started } => {
                    self.candidates[candidate].record_renewal(started);
                    // Sessions only start here and expire by themselves, so no other time has to be checked.
                    self.assert_one_leader(now);
                }
            }
        }
    }

    fn check(&mut self, check: &Check, now: u64) {
        let candidate = check.candidate;
        let read = self
            .lease
            .map(|(holder, version)| record(["a", "b"][holder], version));
        let started = self.clock(candidate, now);
        let action = self.candidates[candidate].step(read, started);
        self.assert_one_leader(now);
        let version = self.lease.map(|l| l.1);
        let write = Event::Write {
            candidate,
            action,
            version,
            started,
            answer_ms: check.answer_ms,
        };
        self.pending.push((now + check.write_ms, write));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn two_candidates_never_lead_at_once(
        checks in proptest::collection::vec(check(), 1..150),
        rates in [850..1150u64, 850..1150u64],
    ) {
        let candidates = ["a", "b"].map(|name| Candidate::new(name.into(), TIMING));
        let mut world = World { lease: None, versions: 0, candidates, rates, pending: Vec::new() };
        let mut now = 0;
        for check in &checks {
            now += check.wait_ms;
            world.run_until(now);
            world.check(check, now);
        }
        world.run_until(now + 60_000);
    }

    /// After a kill at any time, the other candidate leads within 20 s.
    #[test]
    fn a_killed_leader_is_replaced_within_20_s(phase_ms in 0..2000u64, killed_ms in 0..2000u64) {
        let mut b = Candidate::new("b".into(), TIMING);
        // The leader renews every 2 s until it is killed. The follower checks every 2 s, at another phase.
        let killed = 30_000 + killed_ms;
        let mut now = phase_ms;
        loop {
            let renewed = now.min(killed) / 2000;
            let ms = Duration::from_millis(now);
            if b.step(Some(record("a", renewed)), ms) != Action::Wait {
                break;
            }
            now += 2000;
        }
        prop_assert!(now >= killed && now - killed < 20_000, "{} ms", now - killed);
    }
}
