//! One server: its connections, and whether it answers. Bytes and questions have connections of their own, so that no lookup waits behind
//! megabytes. Beside other servers one that fails rests for a while: what is there is a miss at once, and the others serve on.

use super::fault::Fault;
use super::pool::{Lane, Lent, Pool, Turn};
use super::url::{Address, How};
use crate::Cause;
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

/// Times and bounds.
#[derive(Debug, Clone)]
pub struct Options {
    /// Connections of one server that move sections.
    pub byte_connections: usize,
    /// Its others.
    pub question_connections: usize,
    /// Longest time until a new connection is ready.
    pub connect: Duration,
    /// One of several servers that does not answer a question for so long is lost; so is one that is silent in a transfer for twice as
    /// long. Half of it is the longest that a question waits for a connection.
    pub answer: Duration,
    /// A lost one of several servers is tried again after this.
    pub rest: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            byte_connections: 8,
            question_connections: 4,
            connect: Duration::from_millis(1_500),
            answer: Duration::from_secs(1),
            rest: Duration::from_secs(1),
        }
    }
}

/// Where a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    /// There.
    Fixed(Address),
    /// Where these sentinels say that the master of this name is.
    Sentinel(Vec<Address>, String),
}

/// How a server is reached and spoken to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dial {
    /// Where it is.
    pub reach: Reach,
    /// How it is spoken to.
    pub how: How,
    /// PEM file of the authorities that it is trusted by.
    pub ca: Option<PathBuf>,
}

/// A server.
pub struct Node {
    /// Its name, for people and for hashing.
    pub name: String,
    pub(super) dial: Dial,
    pub(super) options: Options,
    /// There are others that serve when it does not.
    one_of_many: bool,
    bytes: Pool,
    questions: Pool,
    health: Mutex<Health>,
}

#[derive(Default)]
struct Health {
    /// Not tried before, and why.
    lost: Option<(Instant, String)>,
    /// Connections of an earlier one are of no use any more.
    generation: u64,
    /// What the last read, and the last write, failed for that was the server's own fault.
    failing: [Option<String>; 2],
}

impl Node {
    /// A server to which nothing is connected yet.
    pub fn new(name: String, dial: Dial, options: Options, one_of_many: bool) -> Arc<Self> {
        Arc::new(Self {
            name,
            dial,
            one_of_many,
            bytes: Pool::new(options.byte_connections),
            questions: Pool::new(options.question_connections),
            options,
            health: Mutex::default(),
        })
    }

    /// Is it reached and spoken to in this way, and has it as many beside it?
    pub fn is(&self, dial: &Dial, one_of_many: bool) -> bool {
        self.dial == *dial && self.one_of_many == one_of_many
    }

    /// A connection, an idle one or a new one. Waits while all are in use.
    pub async fn take(self: &Arc<Self>, lane: Lane) -> Result<Lent, Fault> {
        self.turn(lane).await?.connect().await
    }

    /// What it says to a question, or that it does not answer. One of several servers has less time than the whole, so that the others
    /// count; none of it passes while the question waits for its turn.
    pub async fn answers<T, F>(
        self: &Arc<Self>,
        ask: impl FnOnce(Lent) -> F + Send,
    ) -> Result<T, Fault>
    where
        F: Future<Output = Result<T, Fault>> + Send,
    {
        let turn = self.turn(Lane::Questions).await?;
        let ask = async { ask(turn.connect().await?).await };
        if !self.one_of_many {
            return ask.await;
        }
        let answer = timeout(self.options.answer, ask).await;
        answer.unwrap_or_else(|_| {
            let fault = Fault::unreachable("it does not answer");
            self.failed(&fault);
            Err(fault)
        })
    }

    async fn turn(self: &Arc<Self>, lane: Lane) -> Result<Turn, Fault> {
        self.rests(false)?;
        let permit = self.pool(lane).permit();
        let permit = if self.one_of_many && lane == Lane::Questions {
            let in_time = timeout(self.options.answer / 2, permit).await;
            in_time.unwrap_or_else(|_| {
                let why = "all of its connections have been in use for a while";
                Err(Fault::Of(Cause::Busy, why.into()))
            })
        } else {
            permit.await
        };
        Ok(Turn::new(self.clone(), lane, permit?))
    }

    /// Where it is, if that does not change.
    pub fn address(&self) -> Option<Address> {
        match &self.dial.reach {
            Reach::Fixed(address) => Some(address.clone()),
            Reach::Sentinel(..) => None,
        }
    }

    /// Are there others that serve when it does not?
    pub fn one_of_many(&self) -> bool {
        self.one_of_many
    }

    /// Its connections for this.
    pub(super) fn pool(&self, lane: Lane) -> &Pool {
        match lane {
            Lane::Bytes => &self.bytes,
            Lane::Questions => &self.questions,
        }
    }

    /// Of its connections now; those of another generation are not used again.
    pub(super) fn generation(&self) -> u64 {
        self.health.lock().generation
    }

    /// What is wrong with it, as far as is known without asking: with all, or with writing only.
    pub fn trouble(&self, writes: bool) -> Option<String> {
        let health = self.health.lock();
        let lost = health.lost.as_ref().map(|(_, why)| why.clone());
        let failing = health.failing.get(usize::from(writes)).cloned();
        lost.or(failing.flatten())
    }

    /// An operation of it ended in this way.
    pub fn ended(&self, writes: bool, fault: Option<&Fault>) {
        let own = match fault {
            // Not even tried.
            Some(fault) if matches!(fault.cause(), Cause::Busy | Cause::BreakerOpen) => return,
            Some(fault) if fault.redirect().is_some() => None,
            Some(fault) => fault.cause().of_the_tier().then(|| fault.detail()),
            None => None,
        };
        if let Some(failing) = self.health.lock().failing.get_mut(usize::from(writes)) {
            *failing = own;
        }
    }

    /// A connection could not be had, or a question was not answered.
    pub(super) fn failed(&self, fault: &Fault) {
        if fault.is_a_loss() {
            self.lost(None, &fault.detail());
        }
    }

    /// Refuses while it rests. When that is over, one operation is let through (`try_it`) before all others.
    pub(super) fn rests(&self, try_it: bool) -> Result<(), Fault> {
        let mut health = self.health.lock();
        if let Some((until, why)) = &mut health.lost {
            if Instant::now() < *until {
                let detail = format!("it is not tried for a while after: {why}");
                return Err(Fault::Of(Cause::BreakerOpen, detail));
            }
            if try_it {
                *until = Instant::now() + self.options.rest;
            }
        }
        Ok(())
    }

    /// It does not answer, as a connection of this generation shows: all of them are of no use.
    pub(super) fn lost(&self, generation: Option<u64>, why: &str) {
        if !self.forget_connections(generation) || !self.one_of_many {
            return;
        }
        let until = Instant::now() + self.options.rest;
        let before = self.health.lock().lost.replace((until, why.to_string()));
        if before.is_none() {
            warn!(server = self.name, why, "a Redis server is lost");
        }
    }

    /// It answers.
    pub(super) fn answered(&self) {
        if self.health.lock().lost.take().is_some() {
            info!(server = self.name, "a Redis server is back");
        }
    }

    /// Closes the connections of this generation, those in use as soon as they are given back. False: that was done before.
    pub(super) fn forget_connections(&self, generation: Option<u64>) -> bool {
        {
            let mut health = self.health.lock();
            if generation.is_some_and(|of| of != health.generation) {
                return false;
            }
            health.generation += 1;
        }
        self.bytes.clear();
        self.questions.clear();
        true
    }
}
