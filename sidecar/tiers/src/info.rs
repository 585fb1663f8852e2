//! What a tier says of itself when it is opened. Layers return the info of the tier inside of them; one that changes something of it
//! does so from a copy, so that a layer loses nothing by leaving it out.

use super::Kind;
use std::fmt;
use std::sync::Arc;

/// One of several servers of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Its name, without anything that is secret.
    pub name: String,
    /// It answers, as far as is known; else what it holds is missed.
    pub up: bool,
    /// What is wrong with it, also where it only takes no writes; none = nothing that is known.
    pub trouble: Option<String>,
}

/// A value that changes while a tier is open and is read without a request to the tier.
#[derive(Clone)]
pub struct Reading<T>(Arc<dyn Fn() -> T + Send + Sync>);

impl<T> Reading<T> {
    /// Calls `read` for each reading.
    pub fn new(read: impl Fn() -> T + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// The value now.
    pub fn now(&self) -> T {
        (self.0)()
    }
}

impl<T: fmt::Debug> fmt::Debug for Reading<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

/// What is known of a tier from when it is opened on.
#[derive(Debug, Clone)]
pub struct TierInfo {
    /// Which tier it is.
    pub kind: Kind,
    /// A put compares the spans with the head's digests itself, as they go out, before anything of it can be found. Else that is done
    /// before the put, and all bytes are read once more than they need be.
    pub compares_puts: bool,
    /// Its servers, where it has several, as they are known to be.
    pub servers: Reading<Vec<Server>>,
    /// What it counts of what happens inside it, by name, since it was opened.
    pub counters: Reading<Vec<(&'static str, u64)>>,
    /// The time, in Unix seconds, of the clock that says when its objects were written; none: the clock is this node's, or nothing was
    /// heard of it yet.
    pub unix_s: Reading<Option<u64>>,
}

impl TierInfo {
    /// Of a tier that compares nothing, counts nothing, has one server and this node's clock.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            compares_puts: false,
            servers: Reading::new(Vec::new),
            counters: Reading::new(Vec::new),
            unix_s: Reading::new(|| None),
        }
    }
}
