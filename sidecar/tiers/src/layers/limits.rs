//! Limits operations and bytes in flight, and the number of waiting operations; further ones are refused at once. Reads, writes and other
//! operations have separate budgets, so that many stores cannot delay a lookup. An operation takes its whole share in one step.

use super::Op;
use crate::{Cause, Kind, TierError};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Limits of one budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    pub operations: usize,
    /// Most bytes of sections; an operation with more runs alone.
    pub bytes: u64,
    pub waiting: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    pub reads: Budget,
    pub writes: Budget,
    /// Budget of all other operations.
    pub questions: Budget,
}

impl Default for Options {
    fn default() -> Self {
        let transfers = Budget {
            operations: 64,
            bytes: 256 << 20,
            waiting: 4_096,
        };
        Self {
            reads: transfers,
            writes: transfers,
            questions: Budget {
                operations: 64,
                bytes: u64::MAX,
                waiting: 4_096,
            },
        }
    }
}

#[derive(Debug)]
pub struct Limits {
    reads: Arc<Gate>,
    writes: Arc<Gate>,
    questions: Arc<Gate>,
}

impl Limits {
    pub fn new(options: Options) -> Self {
        Self {
            reads: Gate::new(options.reads),
            writes: Gate::new(options.writes),
            questions: Gate::new(options.questions),
        }
    }

    /// Waits for the share of an operation. Too many waiting ones are an error.
    pub async fn enter(&self, tier: Kind, op: Op, bytes: u64) -> Result<Permit, TierError> {
        let gate = match op {
            Op::Get => &self.reads,
            Op::Put => &self.writes,
            _ => &self.questions,
        };
        gate.enter(bytes).await.ok_or_else(|| {
            let waiting = gate.budget.waiting;
            let detail = format!("too many operations wait for this tier: {waiting}");
            TierError::new(tier, Cause::Busy, detail)
        })
    }
}

/// The queue of one budget, in order of arrival.
#[derive(Debug)]
struct Gate {
    budget: Budget,
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    operations: usize,
    bytes: u64,
    waiting: VecDeque<Waiter>,
    next: u64,
}

#[derive(Debug)]
struct Waiter {
    number: u64,
    bytes: u64,
    enter: oneshot::Sender<()>,
}

/// A running operation; its drop frees its share.
#[derive(Debug)]
pub struct Permit {
    gate: Arc<Gate>,
    bytes: u64,
}

/// A waiting operation; its drop removes it from the queue.
#[derive(Debug)]
struct Waiting<'a> {
    gate: &'a Arc<Gate>,
    number: u64,
    bytes: u64,
    entered: bool,
}

impl Gate {
    fn new(budget: Budget) -> Arc<Self> {
        // A budget of zero would hold every operation until its deadline.
        let budget = Budget {
            operations: budget.operations.max(1),
            bytes: budget.bytes.max(1),
            ..budget
        };
        Arc::new(Self {
            budget,
            now: Mutex::default(),
        })
    }

    /// `None`: the queue is full.
    async fn enter(self: &Arc<Self>, bytes: u64) -> Option<Permit> {
        let bytes = bytes.min(self.budget.bytes);
        let (waiting, entered) = {
            let mut now = self.now.lock();
            if now.waiting.is_empty() && self.fits(&now, bytes) {
                now.takes(bytes);
                return Some(self.permit(bytes));
            }
            if now.waiting.len() >= self.budget.waiting {
                return None;
            }
            let (enter, entered) = oneshot::channel();
            let number = now.next;
            now.next += 1;
            now.waiting.push_back(Waiter {
                number,
                bytes,
                enter,
            });
            let waiting = Waiting {
                gate: self,
                number,
                bytes,
                entered: false,
            };
            (waiting, entered)
        };
        entered.await.ok()?;
        Some(waiting.enters())
    }

    fn permit(self: &Arc<Self>, bytes: u64) -> Permit {
        Permit {
            gate: self.clone(),
            bytes,
        }
    }

    fn fits(&self, now: &Now, bytes: u64) -> bool {
        let room = self.budget.bytes - now.bytes;
        now.operations < self.budget.operations && bytes <= room
    }

    /// Admits waiting operations in order while the next one fits: small operations do not overtake a large one for ever.
    fn admit(&self, now: &mut Now) {
        while let Some(next) = now.waiting.front() {
            if !self.fits(now, next.bytes) {
                return;
            }
            let Some(next) = now.waiting.pop_front() else {
                return;
            };
            // The share is taken now. If the operation is dropped before it runs again, `Waiting` returns the share.
            now.takes(next.bytes);
            let _ = next.enter.send(());
        }
    }

    fn gives_back(&self, bytes: u64) {
        let mut now = self.now.lock();
        now.operations -= 1;
        now.bytes -= bytes;
        self.admit(&mut now);
    }
}

impl Now {
    fn takes(&mut self, bytes: u64) {
        self.operations += 1;
        self.bytes += bytes;
    }
}

impl Waiting<'_> {
    fn enters(mut self) -> Permit {
        self.entered = true;
        self.gate.permit(self.bytes)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.entered {
            return;
        }
        let mut now = self.gate.now.lock();
        let before = now.waiting.len();
        now.waiting.retain(|waiter| waiter.number != self.number);
        if now.waiting.len() == before {
            // It was admitted, but its waiter was gone.
            drop(now);
            self.gate.gives_back(self.bytes);
        } else {
            // The operations behind it may fit although it did not.
            self.gate.admit(&mut now);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.gate.gives_back(self.bytes);
    }
}

#[cfg(test)]
pub(super) mod tests;
