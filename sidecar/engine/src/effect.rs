//! Work that the engine requests from the shell, and its results. Every effect with a completion is completed exactly once, whatever
//! happens to the tier.

use crate::memory::FetchId;
use crate::tier::{Cause, Kind, Stored};
use kvcachepool_protocol::domain::Portable;
use kvcachepool_protocol::key::{LayoutId, ModelId};
use kvcachepool_protocol::object::{Object, ObjectName};
use kvcachepool_protocol::refs::SectionRef;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Work for the shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    Digest(DigestJob),
    Lookup(LookupJob),
    Head(HeadJob),
    /// Cancel a lookup. A later completion of it is ignored.
    CancelLookup {
        lookup: u64,
    },
    Fetch(FetchJob),
    /// Cancel a fetch. It is still completed, and its slots are not reused before that.
    CancelFetch {
        fetch: FetchId,
    },
    Write(WriteJob),
    /// Delete an unusable object, if it is still the one that was fetched. Has no completion.
    Discard {
        tier: Kind,
        name: ObjectName,
    },
    Remove(RemoveJob),
    Clear(ClearJob),
}

/// Compute the xxh3-128 of `length` bytes at `slot * 64 KiB` of the arena. Ends with [`Completion::Digest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DigestJob {
    /// First row of the slot.
    pub slot: u32,
    pub generation: u32,
    /// Number of the check, returned with the digest. 0 marks the digest that publishes a slot.
    pub check: u64,
    pub length: u64,
    /// A request waits for the digest: process it before those that are not urgent.
    pub urgent: bool,
}

/// Look up objects, in prefix order. Ends with [`Completion::Lookup`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookupJob {
    pub lookup: u64,
    pub tier: Kind,
    pub names: Vec<ObjectName>,
    /// The names are no prefix: look up each by itself.
    pub independent: bool,
}

/// Read the head of an object whose length is unknown. Ends with [`Completion::Head`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadJob {
    pub head: u64,
    pub tier: Kind,
    pub name: ObjectName,
}

/// Read an object into slots and compute each section's digest. Ends with [`Completion::Fetch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchJob {
    pub fetch: FetchId,
    pub tier: Kind,
    pub name: ObjectName,
    /// All sections that the chunk may have, in order. Sections of groups that keep a window may be missing.
    pub sections: Vec<Target>,
    /// The object's sections, if they differ from the chunk's.
    pub portable: Option<Arc<Portable>>,
}

/// Write an object. Its slots are leased. Ends with [`Completion::Write`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteJob {
    pub put: u64,
    pub tier: Kind,
    /// Head of the object, with the chunk's sections. The writer's id is zero: the shell fills in its own.
    pub object: Box<Object>,
    /// Slots of the sections, in that order. The shell compares the bytes with the head's digests.
    pub sections: Vec<Target>,
    /// The object's sections, if they differ from the chunk's.
    pub portable: Option<Arc<Portable>>,
    /// The object may exist already: look it up before reading the slots.
    pub look_first: bool,
}

/// Remove objects, whoever wrote them. Ends with [`Completion::Remove`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoveJob {
    pub removal: u64,
    pub tier: Kind,
    pub names: Vec<ObjectName>,
}

/// Remove all objects of the tier, or those of some domains. Ends with [`Completion::Clear`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClearJob {
    pub tier: Kind,
    /// Domains to remove; none = all.
    pub domains: Option<Domains>,
}

/// Domains as pairs of model and layout ids.
pub type Domains = BTreeSet<(ModelId, LayoutId)>;

/// A section of an object and its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    pub group: u32,
    pub shard: u32,
    /// Slot and length of the section's bytes.
    pub section: SectionRef,
}

/// Result of an effect, or a change of a tier's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Completion {
    Digest {
        slot: u32,
        generation: u32,
        check: u64,
        /// xxh3-128, little-endian. None: it could not be computed.
        digest: Option<[u8; 16]>,
    },
    Lookup {
        lookup: u64,
        /// One answer per name, in order.
        present: Result<Vec<bool>, Cause>,
    },
    Head {
        head: u64,
        object: Result<Box<Object>, Cause>,
    },
    /// A fetch ended, even one that was cancelled: nothing writes into its slots any more.
    Fetch {
        fetch: FetchId,
        /// On success, the slots match the digests. On failure, their content is undefined.
        landed: Result<Landed, Cause>,
    },
    /// A write ended: nothing reads its slots any more.
    Write {
        put: u64,
        stored: Result<Stored, Cause>,
    },
    Remove {
        removal: u64,
        /// Number of objects that existed.
        removed: Result<u64, Cause>,
    },
    Clear {
        tier: Kind,
        removed: Result<u64, Cause>,
    },
    /// A tier went up or down.
    Tier {
        tier: Kind,
        /// Reason why it is down; none = up.
        down: Option<String>,
    },
}

/// Result of a successful fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Landed {
    /// Head of the object, with the chunk's sections as far as they were read.
    pub object: Box<Object>,
    /// xxh3-128, little-endian, of the bytes now in the slot, per section of the job. None: the object lacks the section, and nothing was
    /// written.
    pub digests: Vec<Option<[u8; 16]>>,
}
