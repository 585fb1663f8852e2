//! Circuit breaker of a tier: after several failures in a row operations are refused for a pause, then one operation is let through as a
//! probe. The pause grows until a probe succeeds. Reads and writes have separate breakers: a full or read-only tier still serves reads.

use super::Op;
use super::chance::Chance;
use super::retry::refused_here;
use crate::{Cause, Kind, TierError};
use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// It opens after this many failures in a row.
    pub failures: u32,
    /// First pause; each later one may be twice as long.
    pub pause: Duration,
    pub pause_max: Duration,
    /// Seed of the pauses' jitter; `None`: a random one per process.
    pub seed: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            failures: 5,
            pause: Duration::from_secs(1),
            pause_max: Duration::from_secs(30),
            seed: None,
        }
    }
}

/// State of a breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Lets all operations through.
    Closed,
    /// Refuses all operations.
    Open,
    /// Lets one operation through as a probe.
    HalfOpen,
}

/// Status of one breaker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    pub state: State,
    /// The failure that opened it last.
    pub reason: Option<TierError>,
}

impl Side {
    /// The failure that opened it, while it is open.
    pub fn shut(self) -> Option<TierError> {
        self.reason.filter(|_| self.state == State::Open)
    }
}

#[derive(Debug)]
pub struct Breaker {
    reads: Switch,
    writes: Switch,
}

impl Breaker {
    /// Both breakers start closed.
    pub fn new(options: Options) -> Self {
        let write_seed = options.seed.map(|seed| seed ^ 1);
        Self {
            reads: Switch::new(options),
            writes: Switch::new(Options {
                seed: write_seed,
                ..options
            }),
        }
    }

    /// Fails while the breaker refuses such operations, which then need not wait for anything.
    pub fn check(&self, tier: Kind, op: Op) -> Result<(), TierError> {
        let refusal = self.switch(op).now.lock().refusal();
        refusal.map_or(Ok(()), |detail| Err(refused(tier, detail)))
    }

    /// Lets an operation with this deadline through, or refuses it.
    pub fn enter(&self, tier: Kind, op: Op, until: Instant) -> Result<Pass<'_>, TierError> {
        let pass = self.switch(op).enter(tier, until);
        pass.map_err(|detail| refused(tier, detail))
    }

    fn switch(&self, op: Op) -> &Switch {
        match op.writes() {
            true => &self.writes,
            false => &self.reads,
        }
    }

    /// Status of the breaker of lookup, head, get, usage and list.
    pub fn reads(&self) -> Side {
        self.reads.side()
    }

    /// Status of the breaker of put and remove.
    pub fn writes(&self) -> Side {
        self.writes.side()
    }
}

fn refused(tier: Kind, detail: String) -> TierError {
    TierError::new(tier, Cause::BreakerOpen, detail)
}

#[derive(Debug)]
struct Switch {
    options: Options,
    chance: Chance,
    now: Mutex<Now>,
}

#[derive(Debug)]
struct Now {
    phase: Phase,
    /// Rises with every change of the phase: results of operations from an earlier phase are ignored.
    turn: u64,
    reason: Option<TierError>,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Closed { failures: u32 },
    Open { until: Instant, pause: Duration },
    HalfOpen { pause: Duration },
}

/// An operation that was let through. If it is dropped, it says nothing about the tier, except after its deadline: then the tier hangs.
#[derive(Debug)]
pub struct Pass<'a> {
    switch: &'a Switch,
    tier: Kind,
    turn: u64,
    deadline: Instant,
    left: bool,
}

impl Switch {
    fn new(options: Options) -> Self {
        Self {
            options,
            chance: Chance::new(options.seed),
            now: Mutex::new(Now {
                phase: Phase::Closed { failures: 0 },
                turn: 0,
                reason: None,
            }),
        }
    }

    fn side(&self) -> Side {
        let now = self.now.lock();
        Side {
            state: match now.phase {
                Phase::Closed { .. } => State::Closed,
                Phase::Open { until, .. } if Instant::now() < until => State::Open,
                Phase::Open { .. } | Phase::HalfOpen { .. } => State::HalfOpen,
            },
            reason: now.reason.clone(),
        }
    }

    fn enter(&self, tier: Kind, deadline: Instant) -> Result<Pass<'_>, String> {
        let mut now = self.now.lock();
        if let Some(refusal) = now.refusal() {
            return Err(refusal);
        }
        if let Phase::Open { pause, .. } = now.phase {
            now.turns(Phase::HalfOpen { pause });
        }
        Ok(Pass {
            switch: self,
            tier,
            turn: now.turn,
            deadline,
            left: false,
        })
    }

    /// The tier answered an operation of this phase: resets the failures.
    fn answered(&self, turn: u64) {
        let mut now = self.now.lock();
        if now.turn != turn {
            return;
        }
        match &mut now.phase {
            Phase::Closed { failures } => *failures = 0,
            _ => now.turns(Phase::Closed { failures: 0 }),
        }
    }

    fn failed(&self, turn: u64, reason: impl FnOnce() -> TierError) {
        let mut now = self.now.lock();
        if now.turn != turn {
            return;
        }
        let pause = match &mut now.phase {
            Phase::Closed { failures } => {
                *failures += 1;
                if *failures < self.options.failures {
                    return;
                }
                self.options.pause
            }
            Phase::HalfOpen { pause } | Phase::Open { pause, .. } => pause.saturating_mul(2),
        };
        let pause = pause.min(self.options.pause_max);
        let until = Instant::now() + self.chance.jittered(pause);
        now.turns(Phase::Open { until, pause });
        now.reason = Some(reason());
    }

    /// The probe gave no result: the next operation becomes the probe.
    fn silent(&self, turn: u64) {
        let mut now = self.now.lock();
        if let (true, Phase::HalfOpen { pause }) = (now.turn == turn, now.phase) {
            let until = Instant::now();
            now.turns(Phase::Open { until, pause });
        }
    }
}

impl Now {
    /// Why an operation is refused at present; `None`: the next one is let through.
    fn refusal(&self) -> Option<String> {
        let reason = || {
            let reason = self.reason.as_ref();
            reason.map(TierError::to_string).unwrap_or_default()
        };
        match self.phase {
            Phase::Closed { .. } => None,
            Phase::HalfOpen { .. } => Some(format!(
                "waiting for the result of one probe operation after: {}",
                reason()
            )),
            Phase::Open { until, .. } => {
                let left = until.saturating_duration_since(Instant::now());
                let seconds = left.as_secs_f64();
                let paused = || format!("paused for another {seconds:.1} s after: {}", reason());
                (!left.is_zero()).then(paused)
            }
        }
    }

    fn turns(&mut self, phase: Phase) {
        self.phase = phase;
        self.turn += 1;
    }
}

impl Pass<'_> {
    /// Records the result of the operation.
    pub fn leave(mut self, error: Option<&TierError>) {
        self.left = true;
        match error {
            Some(e) if e.of_the_tier() => self.switch.failed(self.turn, || e.clone()),
            // Refused by a layer, not by the tier; or by one of its servers, which says nothing about the others.
            Some(e) if e.of_a_part || refused_here(e.cause) => {
                self.switch.silent(self.turn);
            }
            _ => self.switch.answered(self.turn),
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        if Instant::now() >= self.deadline {
            let why = "no answer before the deadline";
            let reason = || TierError::new(self.tier, Cause::Timeout, why);
            self.switch.failed(self.turn, reason);
        } else {
            self.switch.silent(self.turn);
        }
    }
}

#[cfg(test)]
mod tests;
