//! Every mistake that the simulation must see: a rule left out, and the rule that is broken by it.

use super::profile::{Profile, Rates, Slip, Wrong};
use super::rules::Rule;
use crate::engine::config::Verify;
use crate::engine::mistake::Mistake;

/// One mistake with what it must lead to.
#[derive(Debug, Clone, Copy)]
pub struct Expected {
    /// As in the design's model of the slot protocol, where it is there.
    pub name: &'static str,
    /// What is done wrong.
    pub wrong: Wrong,
    /// Rules of which one must be seen broken.
    pub rules: &'static [Rule],
    /// The kind of history in which it shows.
    pub shape: fn(Profile) -> Profile,
}

/// No faults, one instance: what a mistake needs is added.
fn calm(p: Profile) -> Profile {
    Profile { instances: 1, rates: Rates::default(), tails: 0, ttl: 0, slow_digests: false, ..p }
}

fn scarce(p: Profile) -> Profile {
    Profile { section_rows: 16, segments: 1, window_group: false, documents: 3, chunks: 2, requests: 4, stores: 600, ..calm(p) }
}

fn breaks(p: Profile) -> Profile {
    let rates = Rates { break_worker: 150, break_scheduler: 100, ..Rates::default() };
    Profile { rates, ..scarce(p) }
}

fn crashes(p: Profile) -> Profile {
    let rates = Rates { crash: 20, crash_at_write: 80, break_worker: 40, break_scheduler: 40, ..Rates::default() };
    Profile { rates, ..scarce(p) }
}

fn one_process(p: Profile) -> Profile {
    Profile { world: 1, one_process: true, replicated: false, ..breaks(p) }
}

fn containers(p: Profile) -> Profile {
    let rates = Rates { container: 60, upgrade: 0, break_worker: 20, ..Rates::default() };
    Profile { world: 2, replicated: false, ..Profile { rates, ..scarce(p) } }
}

fn upgrades(p: Profile) -> Profile {
    let rates = Rates { container: 60, upgrade: 6, ..Rates::default() };
    Profile { world: 1, one_process: false, replicated: false, stores: 300, rates, ..scarce(p) }
}

fn deaths(p: Profile) -> Profile {
    let rates = Rates { worker_death: 80, crash: 30, ..Rates::default() };
    Profile { gpu: true, rates, ..scarce(p) }
}

fn locks(p: Profile) -> Profile {
    let rates = Rates { worker_death: 30, container: 80, ..Rates::default() };
    Profile { rates, ..scarce(p) }
}

fn fetches(p: Profile) -> Profile {
    let rates = Rates { fetch: 100, crash: 20, ..Rates::default() };
    Profile { fetch_outlives: true, stores: 500, rates, ..scarce(p) }
}

fn digests(p: Profile) -> Profile {
    Profile { slow_digests: true, ..breaks(p) }
}

fn flips(p: Profile) -> Profile {
    let rates = Rates { flip: 200, ..Rates::default() };
    Profile { verify: Verify::Always, stores: 200, rates, ..scarce(p) }
}

fn sizes(p: Profile) -> Profile {
    Profile { tails: 500, segments: 2, ..scarce(p) }
}

fn crowd(p: Profile) -> Profile {
    Profile { requests: 12, ..scarce(p) }
}

fn cancels(p: Profile) -> Profile {
    let rates = Rates { cancel: 50, break_scheduler: 100, ..Rates::default() };
    Profile { rates, ..scarce(p) }
}

fn frozen(p: Profile) -> Profile {
    let rates = Rates { crash: 60, break_worker: 100, ..Rates::default() };
    Profile { frozen_end: true, rates, ..scarce(p) }
}

macro_rules! expect {
    ($($name:literal $wrong:expr, [$($rule:ident),+], $shape:ident;)*) => {
        &[$(Expected { name: $name, wrong: $wrong, rules: &[$(Rule::$rule),+], shape: $shape }),*]
    };
}

use Wrong::{Both, Connector, Sidecar};

/// All of them.
pub const MISTAKES: &[Expected] = expect! {
    "M_TAKE" Connector(Slip::Take), [S3], breaks;
    "M_HELLOSEQ" Sidecar(Mistake::HelloNumbers), [S3], breaks;
    "M_ABORTTAG" Sidecar(Mistake::AbortTag), [S3], breaks;
    "M_GENUNIQ" Both(Mistake::Regions, Slip::Regions), [S1, S3, S4], upgrades;
    "M_LOCKFIRST" Sidecar(Mistake::LockFirst), [S4], locks;
    "M_DIGESTGEN" Sidecar(Mistake::DigestGeneration), [S2], digests;
    "M_BOOTQUAR" Sidecar(Mistake::BootQuarantine), [S3], deaths;
    "M_CANCELWAIT" Sidecar(Mistake::CancelWait), [S3], fetches;
    "M_URING" Sidecar(Mistake::FetchOutlives), [S3], fetches;
    "M_ABORTACK" Connector(Slip::AbortAck), [L1], breaks;
    "M_BEHIND" Connector(Slip::Behind), [L1], breaks;
    "M_DROP" Connector(Slip::Drop), [L2], frozen;
    "B_NOGENCHECK" Connector(Slip::NoGenCheck), [S1], crashes;
    "B_GENLATE" Sidecar(Mistake::GenerationLate), [S1, S5], scarce;
    "B_COMMITNOGEN B_OLDFRAMES" Sidecar(Mistake::CommitGeneration), [S2, S3], breaks;
    "B_NOJOBCHECK" Connector(Slip::NoJobCheck), [S3], breaks;
    "B_FREEONEOF" Sidecar(Mistake::FreeOnEof), [S3], breaks;
    "B_REPLYFIRST" Connector(Slip::ReplyFirst), [S3], crashes;
    "B_ROLEHELLO" Sidecar(Mistake::RoleHello), [S3], one_process;
    "B_INPLACE" Sidecar(Mistake::InPlace), [S2, S3], crashes;
    "B_FLOCK" Connector(Slip::Flock), [L1], deaths;
    "B_POPULATE" Sidecar(Mistake::Populate), [S4], containers;
    "B_ONEBACK" Sidecar(Mistake::OneBack), [S3], containers;
    "B_NOQUAR" Sidecar(Mistake::NoQuarantine), [S3], deaths;
    "B_EARLYCOMMIT" Connector(Slip::EarlyCommit), [S2, S3], scarce;
    "B_NOLEASEEND" Sidecar(Mistake::NoLeaseEnd), [L1], cancels;
    "B_WAITSIDECAR" Connector(Slip::WaitSidecar), [L2], frozen;
    "carve" Sidecar(Mistake::Carve), [S1, S3], sizes;
    "ignore mismatch" Sidecar(Mistake::IgnoreMismatch), [S6], flips;
    "parent first" Sidecar(Mistake::ParentFirst), [S7], scarce;
    "no share of pins" Sidecar(Mistake::PinShare), [S9], crowd;
    "half a chunk" Sidecar(Mistake::HalfChunk), [S5], scarce;
    "evict what is pinned" Sidecar(Mistake::EvictPinned), [S3], crowd;
};
