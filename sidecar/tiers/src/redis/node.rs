//! One server: its connections and its state. Sections and other requests use separate connections, so that no lookup waits behind
//! megabytes. One of several servers pauses after a failure: its objects are misses at once, and the others still serve.

use super::fault::Fault;
use super::pool::{Lane, Lent, Pool};
use super::tls::TlsFiles;
use super::url::{Address, How};
use crate::Cause;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

#[derive(Debug, Clone)]
pub struct Options {
    /// Connections per server for sections.
    pub byte_connections: usize,
    /// Other connections per server.
    pub question_connections: usize,
    /// Time limit for opening a connection.
    pub connect: Duration,
    /// One of several servers is lost if it does not answer a request for this long, or is silent in a transfer for twice as long. A
    /// request waits for a free connection for at most half of it.
    pub answer: Duration,
    /// Retry interval of a lost server among several.
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

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    Fixed(Address),
    /// The master of this name according to these sentinels.
    Sentinel(Vec<Address>, String),
}

/// How to connect to a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dial {
    pub reach: Reach,
    pub how: How,
    pub tls_files: TlsFiles,
}

pub struct Node {
    /// Its name, for messages and for hashing.
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
    /// Not retried before this time, and why.
    lost: Option<(Instant, String)>,
    /// Connections of an earlier generation are useless.
    generation: u64,
    /// The last error of reads and of writes that the server itself caused.
    failing: [Option<String>; 2],
}

impl Node {
    /// A server without connections yet.
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

    /// Whether it has these settings.
    pub fn is(&self, dial: &Dial, one_of_many: bool) -> bool {
        self.dial == *dial && self.one_of_many == one_of_many
    }

    /// An idle or a new connection. Waits while all are in use.
    pub async fn take(self: &Arc<Self>, lane: Lane) -> Result<Lent, Fault> {
        self.lend(lane, None).await
    }

    /// A connection for one request. One of several servers has less than the operation's whole time to answer, so that the others can
    /// answer. Connecting is part of that time; the wait for a connection is not.
    pub async fn take_to_ask(self: &Arc<Self>) -> Result<Lent, Fault> {
        let longest = self.one_of_many.then_some(self.options.answer);
        self.lend(Lane::Questions, longest).await
    }

    async fn lend(self: &Arc<Self>, lane: Lane, longest: Option<Duration>) -> Result<Lent, Fault> {
        self.rests(false)?;
        let permit = self.pool(lane).permit();
        let permit = if self.one_of_many && lane == Lane::Questions {
            let in_time = timeout(self.options.answer / 2, permit).await;
            in_time.unwrap_or_else(|_| {
                let why = "no free connection: all are in use";
                Err(Fault::Of(Cause::Busy, why.into()))
            })
        } else {
            permit.await
        };
        let permit = permit?;
        self.rests(true)?;
        let deadline = longest.map(|longest| Instant::now() + longest);
        let generation = self.generation();
        let mut connection = match self.pool(lane).idle(generation) {
            Some(connection) => connection,
            None => {
                let connected = self.connect().await;
                connected.inspect_err(|fault| self.failed(fault))?
            }
        };
        connection.set_deadline(deadline);
        Ok(Lent::new(
            self.clone(),
            lane,
            generation,
            connection,
            permit,
        ))
    }

    /// Its address, if that cannot change.
    pub fn address(&self) -> Option<Address> {
        match &self.dial.reach {
            Reach::Fixed(address) => Some(address.clone()),
            Reach::Sentinel(..) => None,
        }
    }

    /// Whether other servers serve when it does not.
    pub fn one_of_many(&self) -> bool {
        self.one_of_many
    }

    /// Its connections for this purpose.
    pub(super) fn pool(&self, lane: Lane) -> &Pool {
        match lane {
            Lane::Bytes => &self.bytes,
            Lane::Questions => &self.questions,
        }
    }

    /// Generation of its connections; older ones are not used again.
    pub(super) fn generation(&self) -> u64 {
        self.health.lock().generation
    }

    /// Its last known error, of all operations or of writes only.
    pub fn trouble(&self, writes: bool) -> Option<String> {
        let health = self.health.lock();
        let lost = health.lost.as_ref().map(|(_, why)| why.clone());
        let failing = health.failing.get(usize::from(writes)).cloned();
        lost.or(failing.flatten())
    }

    /// Records the result of an operation.
    pub fn ended(&self, writes: bool, fault: Option<&Fault>) {
        let own = match fault {
            // Refused before it reached the server.
            Some(fault) if matches!(fault.cause(), Cause::Busy | Cause::BreakerOpen) => return,
            Some(fault) if fault.redirect().is_some() => None,
            Some(fault) => fault.cause().of_the_tier().then(|| fault.detail()),
            None => None,
        };
        if let Some(failing) = self.health.lock().failing.get_mut(usize::from(writes)) {
            *failing = own;
        }
    }

    /// Records that no connection could be opened, or a request was not answered.
    pub(super) fn failed(&self, fault: &Fault) {
        if fault.is_a_loss() {
            self.lost(None, &fault.detail());
        }
    }

    /// Refuses operations while it pauses. Then one operation (`try_it`) is let through before all others.
    pub(super) fn rests(&self, try_it: bool) -> Result<(), Fault> {
        let mut health = self.health.lock();
        if let Some((until, why)) = &mut health.lost {
            if Instant::now() < *until {
                let detail = format!("paused after: {why}");
                return Err(Fault::Of(Cause::BreakerOpen, detail));
            }
            if try_it {
                *until = Instant::now() + self.options.rest;
            }
        }
        Ok(())
    }

    /// Marks it as lost because a connection of this generation failed: all of them are useless.
    pub(super) fn lost(&self, generation: Option<u64>, why: &str) {
        if !self.forget_connections(generation) || !self.one_of_many {
            return;
        }
        let until = Instant::now() + self.options.rest;
        let before = self.health.lock().lost.replace((until, why.to_string()));
        if before.is_none() {
            warn!(
                server = self.name,
                reason = why,
                "Redis server failed; its objects are misses until it answers"
            );
        }
    }

    /// Records that it answers.
    pub(super) fn answered(&self) {
        if self.health.lock().lost.take().is_some() {
            info!(server = self.name, "Redis server answers again");
        }
    }

    /// Closes the connections of this generation, those in use when they are returned. False: that was already done.
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
