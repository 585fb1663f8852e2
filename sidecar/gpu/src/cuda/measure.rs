//! Measures the throughput of plain copies from page-locked memory and of window copies, and their effect on a busy device. All of it takes
//! device memory, and the last one runs kernels, so do not use it on a serving GPU.

use super::Failed;
use super::api::UNKNOWN;
use super::buffer::{Buffer, Pinned};
use super::context::Context;
use super::launch::{Kernels, LaunchError};
use super::stream::Stream;
use crate::device::{Device, DeviceError, NoWindow, Part, Progress};
use kvcachepool_kernels::launch::Packing;
use kvcachepool_kernels::launch::pages::Loops;
use kvcachepool_kernels::pages::{BlockShape, HeadMajor, PagesError};
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_memory::memfd::MemfdError;
use kvcachepool_protocol::layouts::{LAYOUTS_JSON, LayoutTable};
use kvcachepool_protocol::window::Direction;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes per copy: the typical size of a load.
pub const JOB_BYTES: u64 = 64 << 20;
/// Copies submitted before waiting for the first.
const AHEAD: u64 = 4;
/// Bytes of a part of a window's copy: one block with all layers of a model with 8 B parameters.
const PART_BYTES: u64 = 2 << 20;

/// A measurement failed, with the message of what refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotMeasured(String);

impl NotMeasured {
    pub fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

macro_rules! reasons {
    ($($error:ty),*) => {
        $(impl From<$error> for NotMeasured {
            fn from(error: $error) -> Self {
                Self(error.to_string())
            }
        })*
    };
}
reasons!(
    Failed,
    NoWindow,
    DeviceError,
    LaunchError,
    PagesError,
    MemfdError,
    rustix::io::Errno
);

/// Bytes per second in each direction at the same time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Both {
    pub load: f64,
    pub store: f64,
}

/// One direction of plain copies: memory on both sides and a stream.
struct Lane {
    direction: Direction,
    stream: Stream,
    device: Buffer,
    host: Pinned,
}

impl Lane {
    fn new(context: &Arc<Context>, direction: Direction) -> Result<Self, NotMeasured> {
        let mapping = Mapping::private("kvcachepool-measure", JOB_BYTES)?;
        mapping.populate(0, JOB_BYTES)?;
        Ok(Self {
            direction,
            stream: Stream::new(context)?,
            device: Buffer::new(context, JOB_BYTES)?,
            host: Pinned::new(context, Arc::new(mapping))?,
        })
    }

    fn job(&self) -> Result<(), Failed> {
        match self.direction {
            Direction::Load => self
                .device
                .copy_in(&self.stream, 0, &self.host, 0, JOB_BYTES),
            Direction::Store => self
                .device
                .copy_out(&self.stream, 0, &self.host, 0, JOB_BYTES),
        }
    }

    /// Bytes per second, measured while `on` returns true.
    fn run(&self, on: &dyn Fn() -> bool) -> Result<f64, Failed> {
        self.job()?;
        self.stream.synchronize()?;
        let (began, mut bytes) = (Instant::now(), 0);
        while on() || bytes == 0 {
            for _ in 0..AHEAD {
                self.job()?;
                bytes += JOB_BYTES;
            }
            self.stream.synchronize()?;
        }
        Ok(rate(bytes, began.elapsed()))
    }
}

/// Plain copies of [`JOB_BYTES`] between page-locked memory and the device: the reference for other copies. Takes twice that much of both
/// memories.
pub struct Link {
    load: Lane,
    store: Lane,
}

impl Link {
    pub fn new(context: &Arc<Context>) -> Result<Self, NotMeasured> {
        Ok(Self {
            load: Lane::new(context, Direction::Load)?,
            store: Lane::new(context, Direction::Store)?,
        })
    }

    /// Bytes per second in one direction.
    pub fn one_way(&self, direction: Direction, time: Duration) -> Result<f64, NotMeasured> {
        let lane = match direction {
            Direction::Load => &self.load,
            Direction::Store => &self.store,
        };
        let began = Instant::now();
        Ok(lane.run(&|| began.elapsed() < time)?)
    }

    /// Bytes per second in both directions at once.
    pub fn both(&self, time: Duration) -> Result<Both, NotMeasured> {
        let began = Instant::now();
        self.both_while(&|| began.elapsed() < time)
    }

    /// Like `both`, while `on` returns true: the load of workers' own copies at full rate. Runs on the calling thread.
    pub fn both_while(&self, on: &(dyn Fn() -> bool + Sync)) -> Result<Both, NotMeasured> {
        std::thread::scope(|scope| {
            let store = scope.spawn(|| self.store.run(on));
            let load = self.load.run(on);
            let store = store.join().unwrap_or(Err(Failed {
                call: "a thread",
                result: UNKNOWN,
            }));
            Ok(Both {
                load: load?,
                store: store?,
            })
        })
    }
}

/// A window's copies between its memory and page-locked host memory, as the sidecar makes them.
pub struct WindowLink {
    device: Box<dyn Device>,
    host: Pinned,
    half: u64,
}

impl WindowLink {
    /// Creates a window of this size on the device with this UUID. Loads use its first half, stores its second.
    pub fn new(context: &Arc<Context>, uuid: &str, bytes: u64) -> Result<Self, NotMeasured> {
        let mapping = Mapping::private("kvcachepool-measure", bytes)?;
        mapping.populate(0, bytes)?;
        Ok(Self {
            device: super::open_alone(uuid, bytes)?,
            host: Pinned::new(context, Arc::new(mapping))?,
            half: bytes / 2,
        })
    }

    pub fn memory(&self) -> String {
        self.device.memory()
    }

    /// Bytes per second in one direction.
    pub fn one_way(&mut self, direction: Direction, time: Duration) -> Result<f64, NotMeasured> {
        let began = Instant::now();
        let [rate, _] = self.run([direction, direction], 1, &|| began.elapsed() < time)?;
        Ok(rate)
    }

    /// Bytes per second in both directions at once, while `on` returns true.
    pub fn both_while(&mut self, on: &dyn Fn() -> bool) -> Result<Both, NotMeasured> {
        let [load, store] = self.run([Direction::Load, Direction::Store], 2, on)?;
        Ok(Both { load, store })
    }

    /// Bytes per second that are stored and then loaded. Each byte counts once.
    pub fn round_trip(&mut self, time: Duration) -> Result<f64, NotMeasured> {
        let (began, mut bytes) = (Instant::now(), 0);
        while began.elapsed() < time || bytes == 0 {
            self.run([Direction::Store; 2], 1, &|| false)?;
            self.run([Direction::Load; 2], 1, &|| false)?;
            bytes += self.half;
        }
        Ok(rate(bytes, began.elapsed()))
    }

    /// Keeps one copy in flight in each of the first `count` directions.
    fn run(
        &mut self,
        directions: [Direction; 2],
        count: usize,
        on: &dyn Fn() -> bool,
    ) -> Result<[f64; 2], NotMeasured> {
        let began = Instant::now();
        let (mut bytes, mut tickets) = ([0; 2], [None; 2]);
        loop {
            let more = on();
            for (at, direction) in directions.into_iter().enumerate().take(count) {
                let ended = match tickets[at] {
                    None => more || bytes[at] == 0,
                    Some(ticket) => match self.device.progress(ticket) {
                        Progress::Running => false,
                        Progress::Failed(error) | Progress::Unknown(error) => {
                            return Err(error.into());
                        }
                        Progress::Done => {
                            tickets[at] = None;
                            bytes[at] += self.half;
                            more
                        }
                    },
                };
                if ended {
                    tickets[at] = Some(self.begin(direction)?);
                }
            }
            if tickets.iter().all(Option::is_none) {
                let took = began.elapsed();
                return Ok(bytes.map(|bytes| rate(bytes, took)));
            }
            std::thread::yield_now();
        }
    }

    fn begin(&mut self, direction: Direction) -> Result<crate::device::Ticket, DeviceError> {
        let first = match direction {
            Direction::Load => 0,
            Direction::Store => self.half,
        };
        let parts = (0..self.half).step_by(PART_BYTES as usize);
        let parts = parts.map(|at| Part {
            window: first + at,
            arena: first + at,
            bytes: PART_BYTES.min(self.half - at),
        });
        let arena = self.host.mapping().clone();
        self.device.begin(direction, &arena, parts.collect())
    }
}

/// A workload similar to decoding: a chain of memory-bound kernels, step after step.
pub struct Decode {
    kernels: Arc<Kernels>,
    stream: Stream,
    loops: Loops<Kernels>,
    from: Buffer,
    to: Buffer,
    layers: usize,
}

/// Step times in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Steps {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    pub count: usize,
}

impl Decode {
    /// Steps of this many kernels, like a model's layers, each of which reads and writes this many bytes. Takes twice that much memory.
    pub fn new(
        kernels: Arc<Kernels>,
        layers: usize,
        layer_bytes: u64,
    ) -> Result<Self, NotMeasured> {
        let table = LayoutTable::parse(LAYOUTS_JSON).map_err(|e| NotMeasured(e.to_string()))?;
        let layout = table
            .layout("LBHNC")
            .ok_or_else(|| NotMeasured("no layout LBHNC".into()))?;
        // Runs of 8 KiB, one per warp.
        let shape = BlockShape {
            layers: 1,
            heads: 8,
            kernel_blocks: 1,
            tokens: 16,
            state_bytes: 512,
        };
        let blocks = layer_bytes as usize / shape.block_bytes()?;
        let loops = Loops::new(&*kernels, HeadMajor::new(layout, &shape, blocks)?)?;
        let context = kernels.context().clone();
        Ok(Self {
            stream: Stream::new(&context)?,
            from: Buffer::new(&context, layer_bytes)?,
            to: Buffer::new(&context, layer_bytes)?,
            kernels,
            loops,
            layers,
        })
    }

    /// Bytes read and written per step.
    pub fn step_bytes(&self) -> u64 {
        2 * self.from.bytes() * self.layers as u64
    }

    pub fn steps(&self, time: Duration) -> Result<Steps, NotMeasured> {
        self.step()?;
        let began = Instant::now();
        let mut took = Vec::new();
        while began.elapsed() < time || took.is_empty() {
            let step = Instant::now();
            self.step()?;
            took.push(step.elapsed().as_secs_f64());
        }
        took.sort_unstable_by(f64::total_cmp);
        let at = |share: usize| took.get((took.len() - 1) * share / 100).copied();
        Ok(Steps {
            p50: at(50).unwrap_or(0.0),
            p99: at(99).unwrap_or(0.0),
            count: took.len(),
        })
    }

    /// Measures steps beside plain copies in both directions at full rate. Returns both results.
    pub fn steps_beside(&self, link: &Link, time: Duration) -> Result<(Steps, Both), NotMeasured> {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let copies = scope.spawn(|| link.both_while(&|| !over.load(Ordering::Relaxed)));
            let steps = self.steps(time);
            over.store(true, Ordering::Relaxed);
            let copies = copies.join();
            let copies = copies.unwrap_or_else(|_| Err(NotMeasured("a thread ended".into())));
            Ok((steps?, copies?))
        })
    }

    fn step(&self) -> Result<(), LaunchError> {
        for _ in 0..self.layers {
            let kernels = &*self.kernels;
            self.loops
                .change(kernels, &self.stream, Packing::Pack, &self.from, &self.to)?;
        }
        Ok(self.stream.synchronize()?)
    }
}

fn rate(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64().max(1e-9)
}
