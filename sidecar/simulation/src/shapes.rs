//! The kinds of history in which mistakes show: scarce memory, and the faults that a mistake needs.

use super::profile::{Profile, Rates};
use kvcachepool_engine::config::Verify;

/// No faults, one instance: what a mistake needs is added.
pub(super) fn calm(p: Profile) -> Profile {
    Profile {
        instances: 1,
        rates: Rates::default(),
        tails: 0,
        ttl: 0,
        tiers: 0,
        paces: [0, 0],
        min_load_tokens: 0,
        slow_digests: false,
        windows: 0,
        ..p
    }
}

pub(super) fn scarce(p: Profile) -> Profile {
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

pub(super) fn breaks(p: Profile) -> Profile {
    let rates = Rates {
        break_worker: 150,
        break_scheduler: 100,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

pub(super) fn resizes(p: Profile) -> Profile {
    let rates = Rates {
        resize: 60,
        crash: 10,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

pub(super) fn crashes(p: Profile) -> Profile {
    let rates = Rates {
        crash: 20,
        crash_at_write: 80,
        break_worker: 40,
        break_scheduler: 40,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

pub(super) fn replies(p: Profile) -> Profile {
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

pub(super) fn one_process(p: Profile) -> Profile {
    Profile {
        world: 1,
        one_process: true,
        replicated: false,
        ..breaks(p)
    }
}

pub(super) fn containers(p: Profile) -> Profile {
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

pub(super) fn upgrades(p: Profile) -> Profile {
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

pub(super) fn deaths(p: Profile) -> Profile {
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

pub(super) fn locks(p: Profile) -> Profile {
    let rates = Rates {
        worker_death: 30,
        container: 80,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

pub(super) fn fetches(p: Profile) -> Profile {
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

pub(super) fn tiers(p: Profile) -> Profile {
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

pub(super) fn short(p: Profile) -> Profile {
    Profile {
        chunks: 2,
        min_load_tokens: 128,
        ..tiers(p)
    }
}

pub(super) fn writes(p: Profile) -> Profile {
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

pub(super) fn drops(p: Profile) -> Profile {
    let rates = Rates {
        fetch: 100,
        drop: 200,
        ..Rates::default()
    };
    Profile {
        section_rows: 8,
        segments: 3,
        rates,
        ..writes(p)
    }
}

pub(super) fn clears(p: Profile) -> Profile {
    let rates = Rates {
        clear: 20,
        ..tiers(p).rates
    };
    Profile { rates, ..tiers(p) }
}

pub(super) fn floods(p: Profile) -> Profile {
    Profile {
        section_rows: 8,
        segments: 2,
        documents: 12,
        ..writes(p)
    }
}

pub(super) fn digests(p: Profile) -> Profile {
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

pub(super) fn cuts(p: Profile) -> Profile {
    let rates = Rates {
        break_scheduler: 400,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

pub(super) fn slow_answers(p: Profile) -> Profile {
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

pub(super) fn deep(p: Profile) -> Profile {
    Profile {
        chunks: 3,
        documents: 2,
        ..scarce(p)
    }
}

pub(super) fn flips(p: Profile) -> Profile {
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

pub(super) fn sizes(p: Profile) -> Profile {
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

pub(super) fn crowd(p: Profile) -> Profile {
    Profile {
        requests: 12,
        ..scarce(p)
    }
}

pub(super) fn cancels(p: Profile) -> Profile {
    let rates = Rates {
        cancel: 50,
        break_scheduler: 100,
        ..Rates::default()
    };
    Profile { rates, ..scarce(p) }
}

pub(super) fn frozen(p: Profile) -> Profile {
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

pub(super) fn windows(p: Profile) -> Profile {
    let rates = Rates {
        window: 60,
        break_worker: 60,
        break_scheduler: 60,
        ..Rates::default()
    };
    Profile {
        windows: 3,
        stages: 2,
        stage_rows: 4,
        rates,
        ..scarce(p)
    }
}

pub(super) fn lost_windows(p: Profile) -> Profile {
    let rates = Rates {
        crash: 40,
        window: 60,
        break_worker: 20,
        ..Rates::default()
    };
    Profile {
        gpu: true,
        rates,
        ..windows(p)
    }
}
