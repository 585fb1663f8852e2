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
    Profile {
        instances: 1,
        rates: Rates::default(),
        tails: 0,
        ttl: 0,
        tiers: 0,
        paces: [0, 0],
        min_load_tokens: 0,
        slow_digests: false,
        ..p
    }
}

fn scarce(p: Profile) -> Profile {
    Profile {
        section_rows: 16,
        segments: 1,
        window_group: false,
        documents: 3,
        chunks: 2,
        requests: 4,
        stores: 600,
        ..calm(p)
    }
}

fn breaks(p: Profile) -> Profile {
    let rates = Rates {
        break_worker: 150,
        break_scheduler: 100,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

fn crashes(p: Profile) -> Profile {
    let rates = Rates {
        crash: 20,
        crash_at_write: 80,
        break_worker: 40,
        break_scheduler: 40,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

fn replies(p: Profile) -> Profile {
    let rates = Rates {
        stop_process: 40,
        ..Rates::default()
    };
    Profile {
        world: 1,
        replicated: false,
        documents: 8,
        chunks: 1,
        stores: 800,
        rates,
        ..scarce(p)
    }
}

fn one_process(p: Profile) -> Profile {
    Profile {
        world: 1,
        one_process: true,
        replicated: false,
        ..breaks(p)
    }
}

fn containers(p: Profile) -> Profile {
    let rates = Rates {
        container: 60,
        upgrade: 0,
        break_worker: 20,
        ..Rates::default()
    };
    Profile {
        world: 2,
        one_process: false,
        replicated: false,
        rates,
        ..scarce(p)
    }
}

fn upgrades(p: Profile) -> Profile {
    let rates = Rates {
        container: 60,
        upgrade: 6,
        ..Rates::default()
    };
    Profile {
        world: 1,
        one_process: false,
        replicated: false,
        stores: 300,
        rates,
        ..scarce(p)
    }
}

fn deaths(p: Profile) -> Profile {
    let rates = Rates {
        worker_death: 80,
        crash: 30,
        ..Rates::default()
    };
    Profile {
        gpu: true,
        rates,
        ..scarce(p)
    }
}

fn locks(p: Profile) -> Profile {
    let rates = Rates {
        worker_death: 30,
        container: 80,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

fn fetches(p: Profile) -> Profile {
    let rates = Rates {
        fetch: 100,
        crash: 20,
        ..Rates::default()
    };
    Profile {
        fetch_outlives: true,
        stores: 300,
        tiers: 1,
        filled: 900,
        rates,
        ..scarce(p)
    }
}

fn tiers(p: Profile) -> Profile {
    let rates = Rates {
        fetch: 100,
        tier: 20,
        cancel: 60,
        break_scheduler: 10,
        ..Rates::default()
    };
    Profile {
        stores: 300,
        chunks: 3,
        tiers: 3,
        filled: 500,
        corrupt: 200,
        rates,
        ..scarce(p)
    }
}

fn short(p: Profile) -> Profile {
    Profile {
        chunks: 2,
        min_load_tokens: 128,
        ..tiers(p)
    }
}

fn writes(p: Profile) -> Profile {
    let rates = Rates {
        fetch: 100,
        tier: 30,
        clear: 20,
        ..Rates::default()
    };
    Profile {
        stores: 800,
        documents: 8,
        tiers: 2,
        filled: 100,
        corrupt: 0,
        rates,
        ..scarce(p)
    }
}

fn clears(p: Profile) -> Profile {
    let rates = Rates {
        clear: 20,
        ..tiers(p).rates
    };
    Profile { rates, ..tiers(p) }
}

fn floods(p: Profile) -> Profile {
    Profile {
        section_rows: 8,
        segments: 2,
        documents: 12,
        ..writes(p)
    }
}

fn digests(p: Profile) -> Profile {
    let rates = Rates {
        break_worker: 300,
        break_scheduler: 50,
        ..Rates::default()
    };
    Profile {
        world: 2,
        one_process: false,
        replicated: false,
        documents: 1,
        chunks: 1,
        stores: 900,
        slow_digests: true,
        rates,
        ..scarce(p)
    }
}

fn cuts(p: Profile) -> Profile {
    let rates = Rates {
        break_scheduler: 400,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

fn slow_answers(p: Profile) -> Profile {
    let rates = Rates {
        stop_process: 60,
        stop_sidecar: 60,
        jump: 60,
        ..Rates::default()
    };
    Profile {
        world: 1,
        one_process: false,
        replicated: false,
        documents: 1,
        chunks: 1,
        stores: 900,
        rates,
        ..scarce(p)
    }
}

fn deep(p: Profile) -> Profile {
    Profile {
        chunks: 3,
        documents: 2,
        ..scarce(p)
    }
}

fn flips(p: Profile) -> Profile {
    let rates = Rates {
        flip: 200,
        ..Rates::default()
    };
    Profile {
        verify: Verify::Always,
        stores: 200,
        rates,
        ..scarce(p)
    }
}

fn sizes(p: Profile) -> Profile {
    // small sections in segments that change their slot size often, and readers that take their time
    Profile {
        world: 1,
        replicated: false,
        section_rows: 32,
        tails: 600,
        segments: 2,
        documents: 6,
        chunks: 1,
        stores: 500,
        ..scarce(p)
    }
}

fn crowd(p: Profile) -> Profile {
    Profile {
        requests: 12,
        ..scarce(p)
    }
}

fn cancels(p: Profile) -> Profile {
    let rates = Rates {
        cancel: 50,
        break_scheduler: 100,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

fn frozen(p: Profile) -> Profile {
    let rates = Rates {
        crash: 60,
        break_worker: 100,
        ..Rates::default()
    };
    Profile {
        frozen_end: true,
        rates,
        ..scarce(p)
    }
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
    "B_COMMITNOGEN B_OLDFRAMES" [CommitGeneration, OldFrames] [], [S2, S3], breaks;
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
    "ignore mismatch" [IgnoreMismatch] [], [S6], flips;
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
    "evict what is pinned" [EvictPinned] [], [S3, P2], crowd;
};
