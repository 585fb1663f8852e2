//! Deliberate mistakes, which the simulation must detect. Whether one is made is decided by the implementation of the seam:
//! [`Table::makes`](super::table::Table::makes) for the engine. The product's implementations make none, so no branch for a mistake remains
//! in its build.

use std::cell::Cell;

/// One protocol rule that the sidecar leaves out. Names follow the design's model of the slot protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mistake {
    /// HELLOs are read without comparing their numbers.
    HelloNumbers,
    /// The scheduler's ABORT frees every grant of the chunk, not only the one with its tag.
    AbortTag,
    /// Regions are not compared and a new table starts at generations that an older one used.
    Regions,
    /// Arena descriptors go to a process that holds no lock.
    LockFirst,
    /// A finished digest counts even if the slot changed.
    DigestGeneration,
    /// After a boot, a dead owner is not treated as a GPU writer.
    BootQuarantine,
    /// A cancelled fetch frees its slot at once.
    CancelWait,
    /// Slots of owner 0 are freed at a boot although reads of the dead engine may still land.
    FetchOutlives,
    /// The generation is raised after the reuse.
    GenerationLate,
    /// COMMIT is accepted without comparing the generation.
    CommitGeneration,
    /// A new arena is made while an earlier one is mapped.
    Populate,
    /// A closed connection frees the grants of its process.
    FreeOnEof,
    /// A dead GPU writer's slots are freed at once.
    NoQuarantine,
    /// The hand-back by one process frees the grants of the others.
    OneBack,
    /// The scheduler's HELLO does not end leases that it does not name.
    NoLeaseEnd,
    /// Frames of the older connection are read after the newer one's HELLO.
    OldFrames,
    /// The scheduler's HELLO also takes back grants of the process that it does not name.
    RoleHello,
    /// A PUBLISHED row is rewritten for a new grant without becoming FREE first.
    InPlace,
    /// A segment takes another slot size without raising the generations of its rows.
    Carve,
    /// A mismatching digest is ignored.
    IgnoreMismatch,
    /// An answer does not wait for its digest checks.
    AnswerFirst,
    /// A chunk may be evicted before its children.
    ParentFirst,
    /// Soft pins have no byte share.
    PinShare,
    /// A chunk is readable as soon as one of its sections is.
    HalfChunk,
    /// A pinned chunk may be evicted.
    EvictPinned,
    /// A fetched chunk is readable without a comparison of its digest.
    FetchDigest,
    /// Chunks behind a missing one are fetched.
    FetchHoles,
    /// Fetches have no limit.
    FetchBounds,
    /// Chunks are fetched although they add too few tokens.
    FetchWorthless,
    /// A clear does not clear the tiers.
    ClearMemoryOnly,
    /// The end of a request does not cancel its lookups and fetches.
    NoCancel,
    /// An answer waits for a tier without a timeout.
    TierDelays,
    /// A chunk that one tier did not deliver is not requested from the next.
    NoNextTier,
    /// An unusable object is requested again.
    AskUnusable,
    /// A flush drops chunks that find no room in the queue.
    FlushForgets,
    /// A flush trusts old sightings of objects.
    FlushBelieves,
    /// A chunk may be evicted while it is written to a tier.
    PutUnleased,
    /// A chunk is written although a write of it is in flight.
    PutTwice,
    /// Writes have no limit.
    PutBounds,
    /// Chunks are written to a tier that is down.
    TierIsDown,
    /// The sidecar copies from a window without checking the owner of the slots.
    CopyUnowned,
    /// A slot is taken back while the sidecar copies into it.
    CopyOutlives,
    /// COMMIT is accepted while the sidecar copies into the slot.
    CopyCommit,
    /// A stage is handed back when its copy begins.
    StageEarly,
    /// A stage is handed back before the state machine learns of its copy's end.
    FlagFirst,
    /// A running copy counts as ended.
    CopyEnds,
    /// A copy with an unknown end counts as ended.
    DoubtEnds,
    /// The end of a window does not wait for its copies.
    WindowEnds,
    /// An effect is carried out twice.
    EffectTwice,
    /// A process gets a window while it has another one.
    WindowBeside,
    /// The arena's end is given up under slots in use.
    CutInUse,
    /// The arena's end is given up and the generations of its rows stay.
    CutQuietly,
}

thread_local! {
    static MADE: Cell<u64> = const { Cell::new(0) };
}

/// Sets the mistakes that seams for tests make on this thread from now on.
pub fn make(mistakes: &[Mistake]) {
    MADE.set(mistakes.iter().fold(0, |set, m| set | 1 << (*m as u8)));
}

/// True if this thread makes the mistake. Seams for tests ask it; the product's do not.
pub fn made(mistake: Mistake) -> bool {
    MADE.get() >> (mistake as u8) & 1 == 1
}
