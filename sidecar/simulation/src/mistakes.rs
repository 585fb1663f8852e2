//! Every mistake that the simulation must see: a rule left out, and the rule that is broken by it.

use super::profile::{Profile, Slip, Wrong};
use super::rules::Rule;
use super::shapes::*;
use kvcachepool_engine::mistake::Mistake;

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

macro_rules! expect {
    ($($name:literal [$($m:ident),*] [$($s:ident),*], [$($rule:ident),+], $shape:ident;)*) => {
        &[$(Expected {
            name: $name,
            wrong: Wrong { sidecar: &[$(Mistake::$m),*], connector: &[$(Slip::$s),*] },
            rules: &[$(Rule::$rule),+],
            shape: $shape,
        }),*]
    };
}

/// All of them.
pub const MISTAKES: &[Expected] = expect! {
    "M_TAKE" [] [Take], [S3], breaks;
    "M_HELLOSEQ" [HelloNumbers] [], [S3], breaks;
    "M_ABORTTAG" [AbortTag] [], [S3], slow_answers;
    "M_GENUNIQ" [Regions] [Regions], [S1, S3, S4], upgrades;
    "M_LOCKFIRST" [LockFirst] [], [S4], locks;
    "M_DIGESTGEN" [DigestGeneration] [], [S2], digests;
    "M_BOOTQUAR" [BootQuarantine] [], [S3], deaths;
    "M_CANCELWAIT" [CancelWait] [], [S3, S11], fetches;
    "M_URING" [FetchOutlives] [], [S3], fetches;
    "M_ABORTACK" [] [AbortAck], [L1], cuts;
    "M_BEHIND" [] [Behind], [L1], breaks;
    "M_DROP" [] [Drop], [L2], frozen;
    "B_NOGENCHECK" [] [NoGenCheck], [S1], crashes;
    "B_GENLATE" [GenerationLate] [], [S1, S2, S5], scarce;
    "B_COMMITNOGEN B_OLDFRAMES" [CommitGeneration, OldFrames] [], [S2, S3, L1], breaks;
    "B_NOJOBCHECK" [] [NoJobCheck], [S3], breaks;
    "B_FREEONEOF" [FreeOnEof] [], [S3], breaks;
    "B_REPLYFIRST" [] [ReplyFirst], [S2, S3], replies;
    "B_ROLEHELLO" [RoleHello] [], [S3], one_process;
    "B_INPLACE" [InPlace] [], [S2, S3], crashes;
    "B_FLOCK" [] [Flock], [L1], deaths;
    "B_POPULATE" [Populate] [], [S4], containers;
    "B_ONEBACK" [OneBack] [], [S3], containers;
    "B_NOQUAR" [NoQuarantine] [], [S3], deaths;
    "B_EARLYCOMMIT" [] [EarlyCommit], [S2, S3], scarce;
    "B_NOLEASEEND" [NoLeaseEnd] [], [L1], cancels;
    "B_WAITSIDECAR" [] [WaitSidecar], [L2], frozen;
    "carve" [Carve] [], [S1, S3], sizes;
    "ignore mismatch" [IgnoreMismatch] [], [S5, S6], flips;
    "an answer before its digests" [AnswerFirst] [], [S5], flips;
    "parent first" [ParentFirst] [], [S7], deep;
    "no share of pins" [PinShare] [], [S9], crowd;
    "half a chunk" [HalfChunk] [], [S5], scarce;
    "a tier's bytes without their digest" [FetchDigest] [], [S2, S5], tiers;
    "fetches behind a hole" [FetchHoles] [], [S10], tiers;
    "fetches that add too little" [FetchWorthless] [], [S10], short;
    "fetches without a bound" [FetchBounds] [], [S9], tiers;
    "a tier's failure ends the prefix" [NoNextTier] [], [S11], tiers;
    "what could not be used is asked for again" [AskUnusable] [], [S10], tiers;
    "a clear leaves tiers as they are" [ClearMemoryOnly] [], [S10], clears;
    "nothing is cancelled" [NoCancel] [], [S11], tiers;
    "an answer waits for a tier" [TierDelays] [], [L3], tiers;
    "a chunk goes while it is written down" [PutUnleased] [], [S3, S11], writes;
    "a chunk is written twice at once" [PutTwice] [], [S10, S11], writes;
    "writes without a bound" [PutBounds] [], [S9, S11], writes;
    "a tier that is down is written to" [TierIsDown] [], [S10], writes;
    "a flush leaves out what finds no room" [FlushForgets] [], [L4], floods;
    "a flush believes what was seen long ago" [FlushBelieves] [], [L4], drops;
    "a stage is given back before its copy has ended" [StageEarly] [], [S1, S12], windows;
    "a stage is given back before its copy's end is known" [FlagFirst] [], [S12], windows;
    "a copy that runs counts as ended" [CopyEnds] [], [S1, S2, S3, S12], windows;
    "a copy in doubt counts as ended" [DoubtEnds] [], [S3, S12], windows;
    "a window's end waits for no copy" [WindowEnds] [], [S12], windows;
    "a process gets a window beside its other one" [WindowBeside] [], [S12], windows;
    "an effect is carried out twice" [EffectTwice] [], [S3, S9, S10, S11], writes;
    "a copy into slots of others" [CopyUnowned] [StageUnchecked], [S3], windows;
    "a slot comes back under a copy" [CopyOutlives] [], [S3], windows;
    "COMMIT under a copy" [CopyCommit] [StageUnwaited], [S2, S3], windows;
    "a store that was lost with a window is forgotten" [] [ForgetLost], [L1, S3], lost_windows;
    "a store that was lost with a window is given back at once" [] [LostAtOnce], [S3], lost_windows;
    "the arena's end goes under its slots" [CutInUse] [], [S2, S3, S9, P2], resizes;
    "the arena's end goes under its readers" [CutQuietly] [], [S1], resizes;
    "evict what is pinned" [EvictPinned] [], [S3, P2], crowd;
};
