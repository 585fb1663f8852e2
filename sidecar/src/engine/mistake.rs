//! Mistakes that the simulation and tests make on purpose, to show that they would see them. In a production build `made` is a constant
//! `false`: no branch is left of any of them.

/// One rule of the protocol left out, on the sidecar's side. Names as in the design's model of the slot protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mistake {
    /// HELLOs are read without comparing their numbers.
    HelloNumbers,
    /// The scheduler's ABORT frees every grant of the chunk, not the one with its tag.
    AbortTag,
    /// Regions are not compared and a new table starts at generations that an older one used.
    Regions,
    /// Arena descriptors go to a process that holds no lock.
    LockFirst,
    /// A finished digest counts whatever became of the slot.
    DigestGeneration,
    /// After a boot a dead owner is not taken for a GPU writer.
    BootQuarantine,
    /// A cancelled fetch frees its slot at once.
    CancelWait,
    /// Owner-0 slots are freed at a boot although reads of the dead engine may still land.
    FetchOutlives,
    /// The generation is raised after the reuse.
    GenerationLate,
    /// COMMIT is accepted without comparing the generation.
    CommitGeneration,
    /// A new arena is made while an earlier one is mapped.
    Populate,
    /// A closed connection frees the grants of its process.
    FreeOnEof,
    /// A dead GPU writer's slots come back at once.
    NoQuarantine,
    /// The hand-back by one process frees the grants of the others.
    OneBack,
    /// The scheduler's HELLO does not end leases that it does not name.
    NoLeaseEnd,
    /// Frames of the older connection are read after the newer one's HELLO.
    OldFrames,
    /// The scheduler's HELLO, too, gives back the process's grants that it does not name.
    RoleHello,
    /// A PUBLISHED row is rewritten for a new grant without becoming FREE first.
    InPlace,
    /// A segment takes another slot size without raising the generations of its rows.
    Carve,
    /// A digest that does not match is not acted upon.
    IgnoreMismatch,
    /// An answer does not wait for the digests that it asks for.
    AnswerFirst,
    /// A chunk may go before its children.
    ParentFirst,
    /// Soft pins have no byte share.
    PinShare,
    /// A chunk is readable as soon as one of its sections is.
    HalfChunk,
    /// A pinned chunk may be evicted.
    EvictPinned,
    /// What a tier gave is readable without a look at its digest.
    FetchDigest,
    /// Chunks behind a missing one are fetched, too.
    FetchHoles,
    /// Fetches have no bound.
    FetchBounds,
    /// Chunks are fetched although they add too little.
    FetchWorthless,
    /// A clear leaves tiers as they are.
    ClearMemoryOnly,
    /// A request that ends leaves its lookups and fetches behind.
    NoCancel,
    /// An answer waits for a tier without end.
    TierDelays,
    /// A chunk that one tier did not give is not asked of the next.
    NoNextTier,
    /// An object that could not be used is asked for again.
    AskUnusable,
    /// A flush leaves out what finds no room in the queue.
    FlushForgets,
    /// A flush believes a tier to have what it had a long time ago.
    FlushBelieves,
    /// A chunk may go while it is written down.
    PutUnleased,
    /// A chunk is written down although it is on its way.
    PutTwice,
    /// Writes have no bound.
    PutBounds,
    /// Chunks are written to a tier that is down.
    TierIsDown,
    /// The sidecar copies from a window without looking whose the slots are.
    CopyUnowned,
    /// A slot comes back while the sidecar copies into it.
    CopyOutlives,
    /// COMMIT is accepted while the sidecar copies into the slot.
    CopyCommit,
    /// A stage is given back when its copy has begun.
    StageEarly,
    /// A stage is given back before the state machine hears of its copy's end.
    FlagFirst,
    /// A copy that runs counts as ended.
    CopyEnds,
    /// A copy of which nobody says that it has ended counts as ended.
    DoubtEnds,
    /// A window's end does not wait for its copies.
    WindowEnds,
}

#[cfg(any(test, feature = "simulation"))]
mod switch {
    use std::cell::Cell;

    thread_local! {
        static MADE: Cell<u64> = const { Cell::new(0) };
    }

    /// Is this mistake made on this thread?
    pub fn made(mistake: super::Mistake) -> bool {
        MADE.get() >> (mistake as u8) & 1 == 1
    }

    /// Makes exactly these mistakes on this thread from now on.
    pub fn make(mistakes: &[super::Mistake]) {
        MADE.set(mistakes.iter().fold(0, |set, m| set | 1 << (*m as u8)));
    }
}

#[cfg(any(test, feature = "simulation"))]
pub use switch::{made, make};

/// Is this mistake made? Never in production.
#[cfg(not(any(test, feature = "simulation")))]
#[inline(always)]
pub const fn made(_: Mistake) -> bool {
    false
}
