//! Puts and gets that go on whatever becomes of the servers: each is right, or fails by a name that says that a server is away.

use crate::layers::{Layered, Options, State, layered};
use crate::redis::Redis;
use crate::testing::redis_server::{PATIENCE, open, until};
use crate::testing::suite::{Memory, Sample};
use crate::{Cause, Operation, Tier};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Who puts, and as many who get.
const WORKERS: usize = 3;
/// What fails after such a failure passes.
const PASSES: [Cause; 7] = [
    Cause::Missing,
    Cause::Unreachable,
    Cause::BreakerOpen,
    Cause::Busy,
    Cause::Timeout,
    Cause::Throttled,
    Cause::ReadOnly,
];

/// A tier with its layers, and objects that are there.
pub struct Rig {
    pub redis: Redis,
    pub layers: Layered,
    pub kept: Vec<Sample>,
}

impl Rig {
    /// Puts the objects of these numbers.
    pub async fn new(url: String, numbers: impl Iterator<Item = u64>) -> Self {
        let redis = open(&[url]);
        let rig = Self {
            layers: layered(Arc::new(redis.clone()), &Options::default()),
            redis,
            kept: numbers.map(sample).collect(),
        };
        let memory = Memory::new(4 << 20);
        for sample in &rig.kept {
            until("an object", async || {
                let put = rig.layers.tier.put(sample.put(&memory)).await;
                put.map_err(|e| assert!(PASSES.contains(&e.cause), "{e}"))
                    .is_ok()
            })
            .await;
        }
        rig
    }

    /// Objects that are there are read, others of these numbers are written, from now on.
    pub fn begin(&self, fresh: impl Iterator<Item = u64> + Send + 'static) -> Traffic {
        let shared = Arc::new(Shared {
            tier: self.layers.tier.clone(),
            kept: self.kept.clone(),
            fresh: Mutex::new(Box::new(fresh)),
            written: Mutex::default(),
            read: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        });
        let mut workers = JoinSet::new();
        for worker in 0..WORKERS {
            workers.spawn(shared.clone().write());
            workers.spawn(shared.clone().read(worker));
        }
        Traffic { shared, workers }
    }

    /// These are there, as they were put.
    pub async fn check(&self, samples: &[Sample]) {
        for sample in samples {
            let get = sample.get_all(&Memory::new(1 << 20));
            if let Err(e) = self.layers.tier.get(get.clone()).await {
                panic!("{e}");
            }
            assert!(sample.lies_in(&get.places));
        }
    }

    /// What the breaker lets through of reads and writes.
    pub fn states(&self) -> [State; 2] {
        let breaker = &self.layers.guarded.breaker;
        [breaker.reads().state, breaker.writes().state]
    }
}

/// What goes on.
pub struct Traffic {
    shared: Arc<Shared>,
    workers: JoinSet<()>,
}

struct Shared {
    tier: Arc<dyn Tier>,
    /// Objects that are there.
    kept: Vec<Sample>,
    /// Numbers of those that are to come.
    fresh: Mutex<Box<dyn Iterator<Item = u64> + Send>>,
    /// Those that came.
    written: Mutex<Vec<Sample>>,
    /// Gets that were right.
    read: AtomicU64,
    ended: AtomicBool,
}

/// An object of this number, of several segments.
pub fn sample(number: u64) -> Sample {
    Sample::new(1, number, &[9_000, 5_000])
}

impl Traffic {
    /// Waits until it is seen that objects are written and read.
    pub async fn flows(&self) {
        let all = || {
            let read = self.shared.read.load(SeqCst);
            [read, self.shared.written.lock().len() as u64]
        };
        let (before, began) = (all(), Instant::now());
        while all().iter().zip(before).any(|(now, then)| *now < then + 20) {
            assert!(began.elapsed() < PATIENCE, "{before:?} {:?}", all());
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends it; returns what was written.
    pub async fn end(self) -> Vec<Sample> {
        self.shared.ended.store(true, SeqCst);
        self.workers.join_all().await;
        std::mem::take(&mut *self.shared.written.lock())
    }
}

impl Shared {
    async fn write(self: Arc<Self>) {
        while !self.ended.load(SeqCst) {
            let number = self.fresh.lock().next().unwrap();
            let (sample, memory) = (sample(number), Memory::new(1 << 20));
            if self.passes(self.tier.put(sample.put(&memory))).await {
                self.written.lock().push(sample);
            }
        }
    }

    async fn read(self: Arc<Self>, worker: usize) {
        for sample in self.kept.iter().cycle().skip(worker) {
            if self.ended.load(SeqCst) {
                return;
            }
            let memory = Memory::new(1 << 20);
            let get = sample.get_all(&memory);
            if self.passes(self.tier.get(get.clone())).await {
                assert!(sample.lies_in(&get.places));
                self.read.fetch_add(1, SeqCst);
            }
        }
    }

    /// Did it succeed? What failed must have done so in time, and for a reason that passes.
    async fn passes<T>(&self, operation: Operation<'_, T>) -> bool {
        let ended = timeout(PATIENCE, operation).await.expect("it ended");
        match ended {
            Ok(_) => true,
            Err(e) => {
                assert!(PASSES.contains(&e.cause), "{e}");
                sleep(Duration::from_millis(2)).await;
                false
            }
        }
    }
}
