//! Properties of a tier, known when it is opened. A layer returns the info of the tier inside it, and changes fields only in a copy, so
//! that no layer drops a property by omission.

use super::Kind;
use std::fmt;
use std::sync::Arc;

/// One of several servers of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Its name, without secrets.
    pub name: String,
    /// The last known state. Objects of a server that is down are misses.
    pub up: bool,
    /// Its last error, also one that concerns only writes; `None` if there is none.
    pub trouble: Option<String>,
}

/// A value that changes while a tier is open and is read without a request to the tier.
#[derive(Clone)]
pub struct Reading<T>(Arc<dyn Fn() -> T + Send + Sync>);

impl<T> Reading<T> {
    /// `read` is called for each reading.
    pub fn new(read: impl Fn() -> T + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    pub fn now(&self) -> T {
        (self.0)()
    }
}

impl<T: fmt::Debug> fmt::Debug for Reading<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

/// Properties of an open tier.
#[derive(Debug, Clone)]
pub struct TierInfo {
    pub kind: Kind,
    /// A put compares the spans with the header's digests while sending them, before the object becomes visible. Otherwise a layer compares
    /// them before the put, which reads all bytes once more.
    pub compares_puts: bool,
    /// State of its servers, if it has several.
    pub servers: Reading<Vec<Server>>,
    /// Counters of events inside it since it was opened, by name.
    pub counters: Reading<Vec<(&'static str, u64)>>,
    /// Time in Unix seconds of the clock that dates its objects. `None`: this node's clock is used, or the server's is not known yet.
    pub unix_s: Reading<Option<u64>>,
    /// What its operator should know while it serves.
    pub remark: Option<String>,
}

impl TierInfo {
    /// A tier without counters, with one server and this node's clock, that does not compare puts.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            compares_puts: false,
            servers: Reading::new(Vec::new),
            counters: Reading::new(Vec::new),
            unix_s: Reading::new(|| None),
            remark: None,
        }
    }
}
