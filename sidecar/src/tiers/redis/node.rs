//! One server: how to reach it, and its connections. Bytes and questions have connections of their own, so that no lookup waits behind
//! megabytes. Beside other servers one that fails rests for a while: what is there is a miss at once, and the others serve on.

use super::auth::Login;
use super::connection::Connection;
use super::fault::Fault;
use super::resp::Reply;
use super::stream::Stream;
use super::url::{Address, How};
use crate::tiers::Cause;
use parking_lot::Mutex;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

/// For what a connection is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Sections.
    Bytes,
    /// Everything else.
    Questions,
}

/// Times and bounds.
#[derive(Debug, Clone)]
pub struct Options {
    /// Connections of one server that move sections.
    pub byte_connections: usize,
    /// Its others.
    pub question_connections: usize,
    /// Longest time until a new connection is ready.
    pub connect: Duration,
    /// One of several servers that says nothing for so long is lost.
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
#[derive(Debug, Clone)]
pub enum Reach {
    /// There.
    Fixed(Address),
    /// Where these sentinels say that the master of this name is.
    Sentinel(Vec<Address>, String),
}

/// A server.
pub struct Node {
    /// Its name, for people and for hashing.
    pub name: String,
    reach: Reach,
    how: How,
    ca: Option<PathBuf>,
    options: Options,
    /// There are others that serve when it does not.
    one_of_many: bool,
    bytes: Pool,
    questions: Pool,
    health: Mutex<Health>,
}

struct Pool {
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
}

#[derive(Default)]
struct Health {
    /// Not tried before, and why.
    lost: Option<(Instant, String)>,
}

/// A connection for one operation; dropped, it goes back if it can be used again.
pub struct Lent {
    node: Arc<Node>,
    lane: Lane,
    connection: Option<Connection>,
    _permit: OwnedSemaphorePermit,
}

impl Node {
    /// A server to which nothing is connected yet.
    pub fn new(
        name: String,
        reach: Reach,
        how: How,
        ca: Option<PathBuf>,
        options: Options,
        one_of_many: bool,
    ) -> Arc<Self> {
        let pool = |connections: usize| Pool {
            permits: Arc::new(Semaphore::new(connections.max(1))),
            idle: Mutex::default(),
        };
        Arc::new(Self {
            name,
            reach,
            how,
            ca,
            one_of_many,
            bytes: pool(options.byte_connections),
            questions: pool(options.question_connections),
            options,
            health: Mutex::default(),
        })
    }

    /// A connection, an idle one or a new one. Waits while all are in use.
    pub async fn take(self: &Arc<Self>, lane: Lane) -> Result<Lent, Fault> {
        self.rests(false)?;
        let pool = self.pool(lane);
        let permit = pool.permits.clone().acquire_owned().await;
        let permit = permit.map_err(Fault::unreachable)?;
        self.rests(true)?;
        let idle = || {
            let mut idle = pool.idle.lock();
            while let Some(connection) = idle.pop() {
                if !connection.is_stale() {
                    return Some(connection);
                }
            }
            None
        };
        let connection = match idle() {
            Some(connection) => connection,
            None => self
                .connect()
                .await
                .inspect_err(|fault| self.failed(fault))?,
        };
        Ok(Lent {
            node: self.clone(),
            lane,
            connection: Some(connection),
            _permit: permit,
        })
    }

    /// What it says, or that it does not answer: one of several servers has less time than the whole, so that the others count.
    pub async fn answers<T>(
        &self,
        ask: impl Future<Output = Result<T, Fault>> + Send,
    ) -> Result<T, Fault> {
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

    /// Where it is, if that does not change.
    pub fn address(&self) -> Option<Address> {
        match &self.reach {
            Reach::Fixed(address) => Some(address.clone()),
            Reach::Sentinel(..) => None,
        }
    }

    fn pool(&self, lane: Lane) -> &Pool {
        match lane {
            Lane::Bytes => &self.bytes,
            Lane::Questions => &self.questions,
        }
    }

    fn failed(&self, fault: &Fault) {
        if let Fault::Of(Cause::Unreachable, why) = fault {
            self.lost(why);
        }
    }

    /// Refuses while it rests. When that is over, one operation is let through (`try_it`) before all others.
    fn rests(&self, try_it: bool) -> Result<(), Fault> {
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

    /// It does not answer: its connections are of no use.
    fn lost(&self, why: &str) {
        self.forget_idle();
        if !self.one_of_many {
            return;
        }
        let until = Instant::now() + self.options.rest;
        let before = self.health.lock().lost.replace((until, why.to_string()));
        if before.is_none() {
            warn!(server = self.name, why, "a Redis server is lost");
        }
    }

    fn answered(&self) {
        if self.health.lock().lost.take().is_some() {
            info!(server = self.name, "a Redis server is back");
        }
    }

    fn forget_idle(&self) {
        for pool in [&self.bytes, &self.questions] {
            let idle = std::mem::take(&mut *pool.idle.lock());
            drop(idle);
        }
    }

    /// A new connection, ready for commands.
    async fn connect(&self) -> Result<Connection, Fault> {
        let longest = self.options.connect;
        let connected = timeout(longest, async {
            match &self.reach {
                Reach::Fixed(address) => self.connect_to(address).await,
                Reach::Sentinel(sentinels, master) => self.connect_by(sentinels, master).await,
            }
        });
        connected.await.unwrap_or_else(|_| {
            let seconds = longest.as_secs_f64();
            Err(Fault::unreachable(format!(
                "no connection within {seconds:.1} s"
            )))
        })
    }

    async fn connect_to(&self, address: &Address) -> Result<Connection, Fault> {
        // A file that is missing is named, whether the server is there or not.
        let login = self.login().await?;
        let mut connection = self.stream_to(address).await?;
        log_in(&mut connection, login.as_ref()).await?;
        if self.how.database != 0 {
            let database = self.how.database.to_string();
            connection.command(&[b"SELECT", database.as_bytes()]);
            connection.answer().await?;
        }
        Ok(connection)
    }

    async fn stream_to(&self, address: &Address) -> Result<Connection, Fault> {
        let stream = Stream::connect(address, self.how.tls, self.ca.as_deref()).await;
        let stream = stream.map_err(|e| match e.kind() {
            std::io::ErrorKind::InvalidInput => Fault::Of(Cause::Config, e.to_string()),
            // What TLS says about a certificate stays so.
            std::io::ErrorKind::InvalidData => {
                Fault::Of(Cause::Unauthenticated, format!("TLS: {e}; see redis.ca"))
            }
            _ => Fault::unreachable(e),
        })?;
        Ok(Connection::new(stream))
    }

    async fn login(&self) -> Result<Option<Login>, Fault> {
        let login = self.how.auth.login().await;
        login.map_err(|why| Fault::Of(Cause::Unauthenticated, why))
    }

    /// Asks sentinels where the master is until one knows, and makes sure that it is one.
    async fn connect_by(&self, sentinels: &[Address], master: &str) -> Result<Connection, Fault> {
        let mut last = Fault::unreachable("there is no sentinel");
        for sentinel in sentinels {
            match self.master_by(sentinel, master).await {
                Ok(address) => return self.connect_to_master(&address).await,
                Err(fault) => last = fault.at(&format!("sentinel {sentinel}")),
            }
        }
        Err(last)
    }

    async fn master_by(&self, sentinel: &Address, master: &str) -> Result<Address, Fault> {
        // One that does not answer must leave time for the next.
        let ask = async {
            let mut connection = self.stream_to(sentinel).await?;
            let known = async |connection: &mut Connection| {
                connection.command(&[b"SENTINEL", b"get-master-addr-by-name", master.as_bytes()]);
                connection.answer().await
            };
            let answer = match known(&mut connection).await {
                Err(Fault::Refused(text)) if text.starts_with("NOAUTH") => {
                    log_in(&mut connection, self.login().await?.as_ref()).await?;
                    known(&mut connection).await?
                }
                answer => answer?,
            };
            let Reply::Array(parts) = answer else {
                let why = format!("it knows no master \"{master}\"");
                return Err(Fault::Of(Cause::Config, why));
            };
            address(&parts).ok_or_else(|| Fault::protocol("it named no address"))
        };
        let asked = timeout(self.options.connect / 3, ask).await;
        asked.unwrap_or_else(|_| Err(Fault::unreachable("it did not answer")))
    }

    async fn connect_to_master(&self, address: &Address) -> Result<Connection, Fault> {
        let connected = self.connect_to(address).await;
        let mut connection = connected.map_err(|fault| fault.at(&address.to_string()))?;
        connection.command(&[b"ROLE"]);
        match connection.answer().await? {
            Reply::Array(parts) if parts.first() == Some(&Reply::Bulk(b"master".to_vec())) => {
                Ok(connection)
            }
            _ => Err(Fault::unreachable(format!(
                "{address} is not the master any more"
            ))),
        }
    }
}

/// Says who we are.
async fn log_in(connection: &mut Connection, login: Option<&Login>) -> Result<(), Fault> {
    let Some(login) = login else {
        return Ok(());
    };
    let password = login.password.as_bytes();
    match &login.user {
        Some(user) => connection.command(&[b"AUTH", user.as_bytes(), password]),
        None => connection.command(&[b"AUTH", password]),
    }
    let refused = |why: String| Err(Fault::Of(Cause::Unauthenticated, why));
    match connection.reply().await? {
        Reply::Simple(_) => Ok(()),
        Reply::Error(text) if text.contains("without any password configured") => {
            refused("a password is set here, and the server wants none".into())
        }
        // Only the first word: a server may repeat what it did not understand.
        Reply::Error(text) => match text.split(' ').next().unwrap_or_default() {
            word @ ("LOADING" | "MASTERDOWN") => Err(Fault::Refused(word.into())),
            word => refused(format!(
                "{word}: user or password are wrong, or may not log in"
            )),
        },
        _ => Err(Fault::protocol("AUTH was answered by no status")),
    }
}

/// Host and port as two strings.
fn address(parts: &[Reply]) -> Option<Address> {
    let [Reply::Bulk(host), Reply::Bulk(port)] = parts else {
        return None;
    };
    let host = String::from_utf8(host.clone()).ok()?;
    let port = std::str::from_utf8(port).ok()?.parse().ok()?;
    Some(Address::Tcp(host, port))
}

impl Deref for Lent {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        match &self.connection {
            Some(connection) => connection,
            None => unreachable!("only its drop takes it"),
        }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Connection {
        match &mut self.connection {
            Some(connection) => connection,
            None => unreachable!("only its drop takes it"),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else {
            return;
        };
        let node = &self.node;
        if let Some(why) = connection.broken() {
            node.lost(why);
        } else if connection.is_outdated() {
            node.forget_idle();
        } else if connection.is_clean() {
            connection.set_asking(false);
            node.answered();
            node.pool(self.lane).idle.lock().push(connection);
        } else if connection.silence() >= Some(node.options.answer) {
            node.lost("it does not answer");
        }
    }
}
