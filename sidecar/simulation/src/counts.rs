//! How often what happened, over many histories.

macro_rules! faults {
    ($($name:ident,)*) => {
        /// Faults and rare paths that the histories must reach.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Fault {
            $($name,)*
        }

        /// How many there are.
        pub const FAULTS: usize = ALL.len();

        /// Every fault once, in order.
        pub const ALL: &[Fault] = &[$(Fault::$name,)*];
    };
}

faults! {
    WorkerConnectionBroke,
    SchedulerConnectionBroke,
    AnswersLost,
    FramesReadAfterBreak,
    FramesDroppedUnread,
    SendFailed,
    NewerHelloReadFirst,
    EngineCrash,
    CrashAtTableWrite,
    CrashInBoot,
    ColdStart,
    MemoryDropped,
    ContainerDeath,
    HandedBack,
    HandedBackByOneOfTwo,
    OtherFormat,
    Unmapped,
    ArenaHeldByEarlierBoot,
    WorkerDeath,
    SchedulerDeath,
    LateDma,
    SidecarStopped,
    ProcessStopped,
    TimeJump,
    BitFlip,
    FlipFound,
    Cancelled,
    NoRoom,
    DigestOfStaleSlot,
    DigestFailed,
    DoubleReport,
    WentOff,
    OtherSizeWanted,
    ArenaResized,
    GrantGivenUp,
    NotShipped,
    AbortRepeated,
    StoreJobDropped,
    RowLost,
    SaidBehindHello,
    LoadFailedByGeneration,
    LoadOfOtherRegion,
    Flush,
    FetchBegun,
    FetchCancelled,
    FetchOutlivedEngine,
    EarlyProbe,
    TierAsked,
    TierDown,
    TierUp,
    TierHung,
    TierDropped,
    TierDiscarded,
    TierFailed,
    TierLied,
    TierCorrupt,
    WindowMissing,
    WroteAfterCancel,
    LateReport,
    HitOfTier,
    PutBegun,
    PutStored,
    PutFailed,
    PutCorrupt,
    Cleared,
    TierCleared,
    ClearFailed,
    Expired,
    Evicted,
    PartialAnswer,
    PinAfterReboot,
    WindowWorks,
    WindowRefused,
    WindowWithdrawn,
    WindowLost,
    StageStored,
    StageLoaded,
    StageRefused,
    CopyRefused,
    CopyFailed,
    CopyHung,
    CopyOverdue,
    CopyInDoubt,
    DoubtSettled,
    CopyOutlivedWorker,
    CopyOutlivedEngine,
    CrashUnderCopy,
    CrashBeforeFlag,
    DeathBeforeHandOver,
    DeathBeforeMove,
    DeathBeforeFlag,
    LostStoreAnswered,
    LostStoreGivenBack,
    PlainAfterWindow,
    Drained,
}

/// Counters of one or many histories.
#[derive(Debug, Clone, Copy)]
pub struct Counts {
    pub faults: [u64; FAULTS],
    pub histories: u64,
    pub events: u64,
    pub loads_good: u64,
    pub stores_done: u64,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            faults: [0; FAULTS],
            histories: 0,
            events: 0,
            loads_good: 0,
            stores_done: 0,
        }
    }
}

impl Counts {
    /// One more.
    pub fn hit(&mut self, fault: Fault) {
        self.faults[fault as usize] += 1;
    }

    /// Adds those of another thread.
    pub fn add(&mut self, other: &Self) {
        for (a, b) in self.faults.iter_mut().zip(&other.faults) {
            *a += b;
        }
        self.histories += other.histories;
        self.events += other.events;
        self.loads_good += other.loads_good;
        self.stores_done += other.stores_done;
    }

    /// (name, count) of every fault.
    pub fn list(&self) -> Vec<(String, u64)> {
        ALL.iter()
            .map(|f| (format!("{f:?}"), self.faults[*f as usize]))
            .collect()
    }
}
