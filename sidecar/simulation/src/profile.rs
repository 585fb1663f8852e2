//! What kind of history a seed gives: sizes, who is there, which faults happen how often; and which mistakes are made.

use super::rng::Rng;
use kvcachepool_engine::config::{EvictionPolicy, Verify};
use kvcachepool_engine::mistake::Mistake;

/// A rule that the connector's side leaves out on purpose. Names as in the design's model of the slot protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Slip {
    /// A store job is taken between the list of a HELLO and its answer.
    Take,
    /// The scheduler's ABORT is said once, answered or not.
    AbortAck,
    /// What ends between a HELLO's list and its answer is not said.
    Behind,
    /// A store job waits for HELLO's answer without end.
    Drop,
    /// A load is reported without comparing generations.
    NoGenCheck,
    /// The worker writes without looking at the row.
    NoJobCheck,
    /// COMMIT before the copy ended.
    EarlyCommit,
    /// Loads, too, wait for a connection.
    WaitSidecar,
    /// A lock that a forked child keeps: death is not seen after a boot.
    Flock,
    /// The answer to a GRANT leaves before GRANTED is stored.
    ReplyFirst,
    /// A job of a region that is not mapped is done all the same.
    Regions,
    /// The worker fills a stage without looking at the row.
    StageUnchecked,
    /// COMMIT before the stages of a store are back.
    StageUnwaited,
    /// The grants of a store that was lost with a window are not kept.
    ForgetLost,
    /// They are given back as soon as another boot answers.
    LostAtOnce,
}

/// Per thousand steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rates {
    pub break_worker: u32,
    pub break_scheduler: u32,
    pub crash: u32,
    pub crash_at_write: u32,
    pub container: u32,
    pub upgrade: u32,
    pub worker_death: u32,
    pub scheduler_death: u32,
    pub stop_sidecar: u32,
    pub stop_process: u32,
    pub jump: u32,
    pub flip: u32,
    pub cancel: u32,
    pub double_report: u32,
    pub digest_fails: u32,
    pub off: u32,
    pub fetch: u32,
    pub clear: u32,
    pub tier: u32,
    /// Objects that a tier drops, silently.
    pub drop: u32,
    /// Also per thousand copies of windows, and windows that are made.
    pub window: u32,
    /// Changes of the arena's size in the config.
    pub resize: u32,
}

/// One kind of history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    pub instances: usize,
    pub world: u32,
    /// Scheduler and worker live in one process (one rank only).
    pub one_process: bool,
    pub gpu: bool,
    /// All ranks hold the same KV: the first writes.
    pub replicated: bool,
    pub window_group: bool,
    /// Segments of 64 rows.
    pub segments: u32,
    /// Rows of a full section.
    pub section_rows: u32,
    pub documents: usize,
    pub chunks: usize,
    pub requests: usize,
    /// Per thousand requests that store.
    pub stores: u32,
    pub tails: u32,
    pub ttl: u32,
    pub policy: EvictionPolicy,
    pub verify: Verify,
    pub soft_pin_percent: u32,
    pub fetch_outlives: bool,
    /// Tiers below memory.
    pub tiers: usize,
    /// Per thousand chunks that a tier has at the start, and of these that are not what their heads say.
    pub filled: u32,
    pub corrupt: u32,
    /// Bytes per second from tiers and to them; 0 = no bound.
    pub paces: [u64; 2],
    /// Tokens that tiers must add at least.
    pub min_load_tokens: u32,
    pub slow_digests: bool,
    pub kernel_pidfd: bool,
    pub rates: Rates,
    pub events: u64,
    /// The history ends with a sidecar that is gone, to see whether vLLM waits.
    pub frozen_end: bool,
    pub slips: u32,
    /// A bit for each rank whose worker copies through a window.
    pub windows: u32,
    /// Stages of a window, and rows of a stage.
    pub stages: u32,
    pub stage_rows: u32,
}

impl Profile {
    /// The kind of history of a seed.
    pub fn of(seed: u64) -> Self {
        let mut rng = Rng::new(seed, 1);
        let r = &mut rng;
        let world = 1 + u32::from(r.chance(500));
        let pressure = r.chance(150);
        let mut on = |rate: u64| {
            if r.chance(450) {
                1 + r.below(rate as usize) as u32
            } else {
                0
            }
        };
        let rates = Rates {
            break_worker: on(30),
            break_scheduler: on(30),
            crash: on(6),
            crash_at_write: on(10),
            container: on(5),
            upgrade: on(3),
            worker_death: on(5),
            scheduler_death: on(4),
            stop_sidecar: on(8),
            stop_process: on(8),
            jump: on(8),
            flip: on(8),
            cancel: on(30),
            double_report: on(30),
            digest_fails: on(15),
            off: on(4),
            fetch: on(30),
            clear: on(4),
            tier: 0,
            drop: 0,
            window: 0,
            resize: 0,
        };
        let tiers = if rates.fetch > 0 {
            1 + rates.fetch as usize % 3
        } else {
            0
        };
        let mut profile = Self {
            instances: 1 + usize::from(r.chance(200)),
            world,
            one_process: world == 1 && r.chance(600),
            gpu: r.chance(500),
            replicated: world == 2 && r.chance(250),
            window_group: r.chance(250),
            segments: 1 + r.below(2) as u32,
            section_rows: if pressure {
                32
            } else {
                [8, 16, 16, 32][r.below(4)]
            },
            documents: 1 + r.below(if pressure { 8 } else { 4 }),
            chunks: 1 + r.below(3),
            requests: if pressure { 24 } else { 2 + r.below(5) },
            stores: 450,
            tails: if r.chance(500) { 300 } else { 0 },
            ttl: if r.chance(300) { 200 } else { 0 },
            policy: [
                EvictionPolicy::S3Fifo,
                EvictionPolicy::Lru,
                EvictionPolicy::Lfu,
                EvictionPolicy::Fifo,
            ][r.below(4)],
            verify: if r.chance(300) {
                Verify::Background
            } else {
                Verify::Always
            },
            soft_pin_percent: 50,
            fetch_outlives: r.chance(500),
            tiers,
            filled: 600,
            corrupt: 60,
            paces: [0, 0],
            min_load_tokens: 0,
            slow_digests: r.chance(200),
            kernel_pidfd: r.chance(800),
            rates,
            events: 1000,
            frozen_end: r.chance(500),
            slips: 0,
            windows: 0,
            stages: 1,
            stage_rows: 64,
        };
        if r.chance(450) {
            profile.rates.tier = 1 + r.below(12) as u32;
        }
        if r.chance(300) {
            profile.rates.drop = 1 + r.below(12) as u32;
        }
        profile.min_load_tokens = [0, 0, 64, 128][r.below(4)];
        if r.chance(300) {
            profile.paces = [4 << 20, 64 << 20];
        }
        if r.chance(400) {
            profile.windows = 1 + r.below(3) as u32;
            profile.stages = 1 + r.below(3) as u32;
            profile.stage_rows = [4, 8, 16, 64][r.below(4)];
            if r.chance(600) {
                profile.rates.window = 1 + r.below(60) as u32;
            }
        }
        if r.chance(250) {
            profile.rates.resize = 1 + r.below(20) as u32;
        }
        profile.fitting()
    }

    /// A chunk fits into the share of soft pins: else it could never be read.
    fn fitting(mut self) -> Self {
        // every slot size needs a segment of its own
        self.segments += u32::from(self.window_group) + u32::from(self.tails > 0);
        let shards = if self.replicated { 1 } else { self.world };
        let rows = |p: &Self| p.section_rows * shards * if p.window_group { 3 } else { 2 } / 2;
        while rows(&self) * 5 > self.segments * 64 * 2 {
            self.section_rows /= 2;
        }
        self
    }

    /// With rules left out on the connector's side.
    pub fn slipping(mut self, slips: &[Slip]) -> Self {
        self.slips = slips.iter().fold(0, |set, s| set | 1 << (*s as u8));
        self
    }

    /// Is this rule left out?
    pub fn slips(&self, slip: Slip) -> bool {
        self.slips >> (slip as u8) & 1 == 1
    }
}

/// What is done wrong on either side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wrong {
    /// By the sidecar.
    pub sidecar: &'static [Mistake],
    /// By the connector, or by the machine below.
    pub connector: &'static [Slip],
}

impl Wrong {
    /// Every rule is kept.
    pub const NOTHING: Self = Self {
        sidecar: &[],
        connector: &[],
    };

    /// Makes the sidecar's part of it on this thread and notes the connector's in the profile.
    pub fn begin(self, profile: Profile) -> Profile {
        kvcachepool_engine::mistake::make(self.sidecar);
        profile.slipping(self.connector)
    }
}
