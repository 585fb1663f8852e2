//! One history from its first step to its end: chance decides who moves; at the end faults stop, everything is drained, and what
//! must have come back is looked for.

use super::counts::{Counts, Fault};
use super::memory::settled;
use super::profile::{Profile, Wrong};
use super::rules::{Rule, Violation};
use super::text::piece;
use super::world::{Part, Phase, World, say};

/// What a history came to.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub seed: u64,
    pub counts: Counts,
    pub violation: Option<Violation>,
}

/// Runs the history of a seed.
pub fn run(seed: u64, wrong: Wrong, shape: &dyn Fn(Profile) -> Profile, tracing: bool) -> Outcome {
    let profile = wrong.begin(shape(Profile::of(seed)));
    let mut w = World::new(seed, profile, tracing);
    say!(w, "{profile:?}");
    w.play();
    if w.violation.is_none() {
        w.finish();
    }
    w.counts.histories = 1;
    w.counts.events = w.events;
    if let Some(v) = w.violation.clone() {
        say!(w, "VIOLATION {v}");
    }
    Outcome {
        seed,
        counts: w.counts,
        violation: w.violation,
    }
}

impl World {
    fn play(&mut self) {
        let mut idle = 0;
        while self.events < self.p.events && self.violation.is_none() {
            self.now += self.rng.below(7) as u64;
            if self.step() {
                self.events += 1;
                idle = 0;
            } else {
                idle += 1;
                if idle > 20 {
                    self.now += 50;
                }
            }
            self.collect();
            self.end_ghosts();
        }
    }

    fn step(&mut self) -> bool {
        if self.rng.chance(40) {
            self.wake();
        }
        if self.p.windows != 0 && self.rng.chance(350) {
            return self.window_step();
        }
        match self.rng.below(100) {
            0..20 => self.sidecar_step(),
            20..36 => self.answer_step(),
            36..67 => self.part_step(),
            67..70 if self.p.tiers == 0 => self.part_step(),
            67..70 => !self.side.stopped && self.tier_step(),
            70..77 => !self.side.stopped && self.digest_step(),
            77..80 => !self.side.stopped && self.tick(),
            80..82 => !self.side.stopped && self.populate_step(),
            82..84 => !self.side.stopped && self.death_step(),
            84..86 => !self.side.stopped && self.boot_step(),
            86..88 => {
                let instance = self.rng.below(self.instances.len());
                self.instance_step(instance)
            }
            88..90 => !self.side.stopped && self.tier_step(),
            _ => self.fault_step(),
        }
    }

    /// Who was stopped goes on.
    fn wake(&mut self) {
        if self.side.stopped && self.rng.chance(200) {
            self.side.stopped = false;
            say!(self, "SIGCONT of the sidecar");
        }
        for pid in 0..self.procs.len() {
            if self.procs[pid].stopped && self.rng.chance(200) {
                self.procs[pid].stopped = false;
                say!(self, "SIGCONT of process {pid}");
            }
        }
    }

    fn sidecar_step(&mut self) -> bool {
        if self.side.stopped || self.conns.is_empty() {
            return false;
        }
        let before = self.core_stats(|s| s.evicted_chunks);
        let start = self.rng.below(self.conns.len());
        for n in 0..self.conns.len() {
            let at = (start + n) % self.conns.len();
            let c = &self.conns[at];
            if c.lags_until <= self.now
                && (c.server_open || !c.up.is_empty())
                && (!c.accepted || !c.up.is_empty() || !c.client_open)
                && self.sidecar_reads(at)
            {
                self.note_evictions(before);
                return true;
            }
        }
        let dead = |c: &super::world::Conn| !c.server_open && !c.client_open && c.up.is_empty();
        self.conns.retain(|c| !dead(c));
        false
    }

    fn answer_step(&mut self) -> bool {
        if self.conns.is_empty() {
            return false;
        }
        let start = self.rng.below(self.conns.len());
        for n in 0..self.conns.len() {
            let at = (start + n) % self.conns.len();
            if self.client_reads(at) {
                return true;
            }
        }
        false
    }

    fn client_reads(&mut self, at: usize) -> bool {
        let c = &mut self.conns[at];
        let (part, pid) = (c.part, c.pid);
        if !c.client_open || self.procs[pid].stopped || !self.procs[pid].alive {
            return false;
        }
        if let Some(wire) = c.down.pop_front() {
            self.read_answer(part, wire);
            return true;
        }
        if c.server_open {
            return false;
        }
        say!(self, "{part:?} notices the broken connection");
        let backoff = self.rng.span(0, 20);
        self.lose(part, backoff);
        true
    }

    fn part_step(&mut self) -> bool {
        let part = self.any_part();
        self.one_step(part)
    }

    fn one_step(&mut self, part: Part) -> bool {
        let pid = self.pid(part);
        if !self.procs[pid].alive || self.procs[pid].stopped {
            return false;
        }
        if self.unmap_step(pid) || self.rng.chance(400) && self.link_step(part) {
            return true;
        }
        let moved = match part.rank {
            None => self.scheduler_step(part.instance),
            Some(rank) => self.worker_step(part.instance, rank),
        };
        moved || self.link_step(part)
    }

    // -- the end

    fn finish(&mut self) {
        self.faults_on = false;
        self.hit(Fault::Drained);
        say!(self, "faults end");
        for p in &mut self.procs {
            p.stopped = false;
        }
        if self.p.frozen_end {
            self.vllm_alone();
        }
        self.side.stopped = false;
        self.memory.borrow_mut().writes_left = None;
        if self.violation.is_none() {
            self.drain(70, 2_000);
            self.all_came_back();
        }
        if self.violation.is_none() {
            self.prove();
        }
        if self.violation.is_none() && self.p.tiers > 0 {
            self.flush();
            self.drain(3, 2_000);
            self.all_is_written();
        }
    }

    /// The sidecar never moves again: vLLM must come to rest by itself.
    fn vllm_alone(&mut self) {
        say!(self, "the sidecar stands still for ever");
        for _ in 0..60 {
            self.now += 100;
            self.end_ghosts();
            while self.vllm_moves() {
                self.events += 1;
            }
            if self.quiet() {
                return;
            }
        }
        let what = self.unquiet();
        self.broke(Rule::L2, || format!("vLLM still waits: {what}"));
    }

    fn vllm_moves(&mut self) -> bool {
        let mut any = false;
        for instance in 0..self.instances.len() {
            any |= self.instance_step(instance);
        }
        for at in 0..self.conns.len() {
            any |= self.client_reads(at);
        }
        for part in self.parts() {
            any |= self.one_step(part);
        }
        any && self.violation.is_none()
    }

    fn sidecar_moves(&mut self) -> bool {
        let mut any = self.boot_step() | self.populate_step() | self.death_step();
        for at in 0..self.conns.len() {
            any |= self.sidecar_reads(at);
        }
        while self.digest_step() {
            any = true;
        }
        if !self.side.jobs.is_empty() {
            any |= self.tier_step();
        }
        any |= self.windows_move();
        any && self.violation.is_none()
    }

    /// Everybody moves until nobody can, then time passes; again and again.
    fn drain(&mut self, rounds: u32, each_ms: u64) {
        for _ in 0..rounds {
            self.now += each_ms;
            self.end_ghosts();
            let mut turns = 0;
            while self.vllm_moves() | self.sidecar_moves() {
                self.events += 1;
                turns += 1;
                if turns > 3_000 || self.violation.is_some() {
                    break;
                }
            }
            self.conns
                .retain(|c| c.server_open || c.client_open || !c.up.is_empty());
            if self.violation.is_some() {
                return;
            }
            if turns > 3_000 {
                let what = self.unquiet();
                self.broke(Rule::L1, || format!("no end of moving: {what}"));
                return;
            }
            self.tick();
            self.collect();
        }
    }

    fn quiet(&self) -> bool {
        self.instances
            .iter()
            .all(|i| i.scheduler.quiet() && i.workers.iter().all(super::worker::Worker::idle))
    }

    fn unquiet(&self) -> String {
        let mut text = String::new();
        for (at, i) in self.instances.iter().enumerate() {
            let open: Vec<String> = i
                .scheduler
                .requests
                .iter()
                .map(|r| format!("{} {:?}", r.id, r.state))
                .collect();
            text.push_str(&format!(
                "instance {at}: requests {open:?}, links {:?}",
                i.scheduler.link.phase
            ));
            for w in &i.workers {
                text.push_str(&format!(
                    ", rank {} {:?} {:?} queue {} inbox {}",
                    w.rank,
                    w.link.phase,
                    w.step,
                    w.queue.len(),
                    w.inbox.len()
                ));
            }
            text.push_str("; ");
        }
        text
    }

    /// L1: every slot is FREE or PUBLISHED, nothing is leased or granted, no request is open.
    fn all_came_back(&mut self) {
        if !self.quiet() {
            let what = self.unquiet();
            self.broke(Rule::L1, || format!("requests do not end: {what}"));
        }
        let up = |i: &super::world::Instance| {
            i.scheduler.link.phase == Phase::Up
                && i.workers
                    .iter()
                    .all(|w| w.link.phase == Phase::Up && w.link.registered)
        };
        if !self.instances.iter().all(up) {
            let what = self.unquiet();
            self.broke(Rule::L1, || format!("sessions do not come back: {what}"));
        }
        let back: usize = self.instances.iter().map(|i| i.scheduler.back.len()).sum();
        if back > 0 {
            self.broke(Rule::L1, || format!("{back} ABORTs are never answered"));
        }
        self.windows_rest();
        let supervisor = self.memory.borrow().supervisor;
        let Some(at) = supervisor else {
            self.broke(Rule::L1, || "there is no memory tier".into());
            return;
        };
        let held = {
            let m = self.memory.borrow();
            (0u32..)
                .zip(&m.regions[at].rows)
                .find(|(_, r)| !settled(r.state))
                .map(|(n, r)| (n, *r))
        };
        if let Some((n, row)) = held {
            self.broke(Rule::L1, || format!("slot {n} never comes back: {row:?}"));
        }
        let usage = self
            .side
            .core()
            .and_then(|c| c.engine())
            .map(|e| e.usage())
            .unwrap_or_default();
        let held = usage.leased_bytes
            + usage.soft_pinned_bytes
            + usage.granted_bytes
            + usage.granted_slots
            + usage.quarantined_slots;
        if held > 0 {
            self.broke(Rule::L1, || {
                format!("leases, pins or grants never end: {usage:?}")
            });
        }
        self.tiers_rest();
        self.tokens();
    }

    /// S8: requested tokens are hits and misses.
    fn tokens(&mut self) {
        let (mut requested, mut told) = (0.0, 0.0);
        if let Some(core) = self.side.core() {
            core.metrics(&mut |name, _, value| match name {
                "requested_tokens_total" => requested += value,
                "hit_tokens_total" | "miss_tokens_total" => told += value,
                _ => {}
            });
        }
        if requested != told {
            self.broke(Rule::S8, || {
                format!("{requested} tokens requested, {told} hit or missed")
            });
        }
    }

    /// A new prompt is stored and found again by every instance.
    fn prove(&mut self) {
        for instance in 0..self.instances.len() {
            let text = piece(1_000 + 2 * instance, 0, None);
            for load in [false, true] {
                for _ in 0..3 {
                    self.begin(instance, load, vec![text], 0, true);
                    self.drain(1, 100);
                    let (stored, loaded) = self.instances[instance].scheduler.proofs;
                    if (if load { loaded } else { stored }) > 0 {
                        break;
                    }
                    self.drain(2, 2_000);
                }
            }
            let proofs = self.instances[instance].scheduler.proofs;
            if proofs.0 == 0 || proofs.1 == 0 {
                self.broke(Rule::L1, || {
                    format!("a new prompt is not served in the end: stored, loaded {proofs:?}")
                });
            }
        }
    }
}
