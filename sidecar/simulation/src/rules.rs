//! What must hold, by name.

/// One rule of the protocol that a history broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// A load that is reported good has exactly its key's bytes.
    S1,
    /// No readable digest over bytes that may still change or are not its key's.
    S2,
    /// No slot is granted twice, comes back or is used again under a writer, or under a lease.
    S3,
    /// Never two populated arenas.
    S4,
    /// A chunk that is answered ready is complete, in place, and checked: since the start, with `Always` since the PROBE came.
    S5,
    /// A digest that does not match ends what it belongs to.
    S6,
    /// A chunk goes before its parent.
    S7,
    /// Requested tokens are hits and misses, nothing else.
    S8,
    /// Bounds of memory, grants and pins hold.
    S9,
    /// Only what a request can use is fetched, and only from a tier that is up.
    S10,
    /// What is asked of tiers is waited for, bounded, and adds up.
    S11,
    /// The memory of a window changes hands only when nothing copies from or to it.
    S12,
    /// Every slot comes back, every lease ends, every request ends, and a new one is served.
    L1,
    /// vLLM waits for nobody but itself.
    L2,
    /// An answer to PROBE is final when its wait is over, whatever tiers do.
    L3,
    /// A flush writes down what memory alone holds, and ends.
    L4,
    /// A well-formed frame is not refused.
    P1,
    /// The state machine does not panic.
    P2,
}

/// A broken rule, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which rule.
    pub rule: Rule,
    /// What happened.
    pub what: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.what)
    }
}
