//! What the shell is asked to do with tiers, and what it says about how that ended.

use super::super::fetch::FetchId;
use super::clearing::Domains;
use crate::tier::{Cause, Kind, Stored};
use kvcachepool_protocol::object::{Object, ObjectName};
use kvcachepool_protocol::refs::SectionRef;

/// A section of an object and its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    pub group: u32,
    pub shard: u32,
    /// Where its bytes go, and how many there are.
    pub section: SectionRef,
}

/// Something to do with a tier. Every order that can be reported is reported exactly once, whatever happens to the tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Ask which of these are there; they are in prefix order. Ends with [`Report::LookedUp`].
    Lookup {
        lookup: u64,
        tier: Kind,
        names: Vec<ObjectName>,
    },
    /// Nobody waits for this lookup any more; a report of it is ignored.
    CancelLookup {
        lookup: u64,
    },
    /// Read an object into slots, taking the digest of each on the way. Ends with [`Report::Fetched`], said when nothing writes into any
    /// of the slots any more: not when somebody stopped to wait for it.
    Fetch {
        fetch: FetchId,
        tier: Kind,
        name: ObjectName,
        /// All its sections may be here, in order; it may lack those of groups that keep a window only.
        sections: Vec<Target>,
    },
    /// Nobody waits for this fetch any more. It is still reported, and its slots are nobody else's before that.
    CancelFetch {
        fetch: FetchId,
    },
    /// Write an object. Its slots are leased meanwhile. Ends with [`Report::PutDone`], said when nothing reads any of them any more.
    Put {
        put: u64,
        tier: Kind,
        /// Its head. The writer's id is zero: the shell puts its own there.
        object: Box<Object>,
        /// Where its sections lie, in its order. The bytes are compared with the head's digests on the way.
        sections: Vec<Target>,
        /// It may well be there: to be looked up before it is read.
        look_first: bool,
    },
    /// Take an object away that nobody can use, if it is still the one that was fetched. Nothing is reported of it.
    Discard {
        tier: Kind,
        name: ObjectName,
    },
    /// Remove objects: all that the tier holds, or those of some domains. Ends with [`Report::Cleared`].
    Clear {
        tier: Kind,
        /// Whose; none = all.
        domains: Option<Domains>,
    },
    /// The answer to a PROBE has changed: `Engine::partial_answer`.
    News {
        probe: u64,
    },
}

/// What came of a fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Landed {
    /// The object's head, as the tier has it.
    pub object: Box<Object>,
    /// Per section of the order: xxh3-128 of the bytes that are in its slot now, little-endian. None: the object has no such section,
    /// and nothing was written there.
    pub digests: Vec<Option<[u8; 16]>>,
}

/// How an order ended, or what became of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// A tier is up, or down.
    State {
        tier: Kind,
        /// Why it is down; none = up.
        down: Option<String>,
    },
    LookedUp {
        lookup: u64,
        /// One answer per name, in order.
        present: Result<Vec<bool>, Cause>,
    },
    /// A fetch ended: nothing writes into its slots any more.
    Fetched {
        fetch: FetchId,
        /// The slots hold what the digests say; else they hold anything.
        landed: Result<Landed, Cause>,
    },
    /// A write ended: nothing reads its slots any more.
    PutDone {
        put: u64,
        stored: Result<Stored, Cause>,
    },
    Cleared {
        tier: Kind,
        removed: Result<u64, Cause>,
    },
}
