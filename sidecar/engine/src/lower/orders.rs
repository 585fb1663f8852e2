//! Orders to the shell about tiers, and its reports.

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
    /// Slot and length of the section's bytes.
    pub section: SectionRef,
}

/// An order about a tier. Every order with a report is reported exactly once, whatever happens to the tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Look up objects, in prefix order. Ends with [`Report::LookedUp`].
    Lookup {
        lookup: u64,
        tier: Kind,
        names: Vec<ObjectName>,
    },
    /// Cancel a lookup. A later report of it is ignored.
    CancelLookup { lookup: u64 },
    /// Read an object into slots and compute each section's digest. Ends with [`Report::Fetched`], which must follow the last write into
    /// any of the slots, even after a cancellation.
    Fetch {
        fetch: FetchId,
        tier: Kind,
        name: ObjectName,
        /// All sections that the object may have, in order. Sections of groups that keep a window may be missing.
        sections: Vec<Target>,
    },
    /// Cancel a fetch. It is still reported, and its slots are not reused before the report.
    CancelFetch { fetch: FetchId },
    /// Write an object. Its slots are leased. Ends with [`Report::PutDone`], which must follow the last read of any of them.
    Put {
        put: u64,
        tier: Kind,
        /// Head of the object. The writer's id is zero: the shell fills in its own.
        object: Box<Object>,
        /// Slots of the sections, in the object's order. The shell compares the bytes with the head's digests.
        sections: Vec<Target>,
        /// The object may exist already: look it up before reading the slots.
        look_first: bool,
    },
    /// Delete an unusable object, if it is still the one that was fetched. Has no report.
    Discard { tier: Kind, name: ObjectName },
    /// Remove all objects of the tier, or those of some domains. Ends with [`Report::Cleared`].
    Clear {
        tier: Kind,
        /// Domains to remove; none = all.
        domains: Option<Domains>,
    },
    /// The answer to a PROBE changed: call `Engine::partial_answer`.
    News { probe: u64 },
}

/// Result of a successful fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Landed {
    /// Head of the object as stored in the tier.
    pub object: Box<Object>,
    /// xxh3-128, little-endian, of the bytes now in the slot, per section of the order. None: the object lacks the section, and nothing was
    /// written.
    pub digests: Vec<Option<[u8; 16]>>,
}

/// Result of an order, or a change of a tier's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// A tier went up or down.
    State {
        tier: Kind,
        /// Reason why it is down; none = up.
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
        /// On success, the slots match the digests. On failure, their content is undefined.
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
