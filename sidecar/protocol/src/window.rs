//! The flag page of a window: a memfd that worker and sidecar both map, one record per stage of the window's memory.
//!
//! ```text
//! 0                              Header
//! HEADER_BYTES + n * RECORD_BYTES   record of stage n: state word (u64), count of runs (u32), zeros up to RUNS_AT, then the runs
//! ```
//! The worker owns the ring: it fills a record, then stores the state word with release order and the next sequence number. The sidecar
//! answers by exchanging exactly that word for one with the same sequence. To the sidecar the page is what a peer says: it reads the word,
//! copies the record once and decodes the copy. Bytes of the runs lie in the stage one behind another, each from a multiple of
//! [`RUN_ALIGN`] on.

use crate::table::ROW_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First bytes of the page.
pub const MAGIC: [u8; 8] = *b"KVCPWNDW";
/// Version of this format.
pub const VERSION: u32 = 1;
/// Bytes in front of the first record.
pub const HEADER_BYTES: u64 = 4096;
/// Bytes of a record.
pub const RECORD_BYTES: u64 = 16 << 10;
/// Offset of the runs in their record.
pub const RUNS_AT: usize = 64;
/// Most runs of a record.
pub const RUNS_MAX: u32 = ((RECORD_BYTES as usize - RUNS_AT) / size_of::<Run>()) as u32;
/// Each run begins at a multiple of so many bytes of its stage.
pub const RUN_ALIGN: u64 = 256;
/// Bytes at the window's start by which both sides show that they see the same memory.
pub const PATTERN_BYTES: usize = 64;

/// On the bell: look at the page.
pub const RING: u8 = 1;
/// On the bell, from the worker, the last that it sends: it has the window's memory mapped no more.
pub const UNMAPPED: u8 = 2;

/// First bytes of the page (native little-endian; both sides run on one machine).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: u32,
    /// Records, and stages of the window.
    pub stages: u32,
    /// Bytes of a stage.
    pub stage_bytes: u64,
    /// [`RECORD_BYTES`].
    pub record_bytes: u32,
    /// [`RUNS_MAX`].
    pub runs_max: u32,
}

impl Header {
    /// The header of a page for so many stages.
    pub fn new(stages: u32, stage_bytes: u64) -> Self {
        Self {
            magic: MAGIC,
            version: VERSION,
            stages,
            stage_bytes,
            record_bytes: RECORD_BYTES as u32,
            runs_max: RUNS_MAX,
        }
    }
}

/// Bytes of a page for so many stages.
pub fn page_bytes(stages: u32) -> u64 {
    record_at(stages)
}

/// Offset of the record of a stage, which begins with its state word.
pub fn record_at(stage: u32) -> u64 {
    HEADER_BYTES + u64::from(stage) * RECORD_BYTES
}

/// Bytes of one slot, or a part of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Run {
    /// First row of the slot.
    pub slot: u32,
    /// Generation of the slot, as granted or answered.
    pub generation: u32,
    /// First byte, from the slot's begin.
    pub offset: u32,
    /// Bytes.
    pub bytes: u32,
}

impl Run {
    /// First byte in the arena.
    pub fn arena_offset(&self) -> u64 {
        u64::from(self.slot) * ROW_BYTES + u64::from(self.offset)
    }
}

/// What a stage is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// The worker may use it.
    Free = 0,
    /// A store: the worker has filled the stage, its bytes go to the arena.
    Filled = 1,
    /// A load: the worker wants bytes of the arena in the stage.
    Wanted = 2,
    /// The sidecar has moved the bytes; the stage is the worker's again.
    Moved = 3,
    /// The sidecar has not moved them, for the reason beside it; the stage is the worker's again.
    Refused = 4,
}

/// Why a stage was not moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// None: the stage was not refused.
    None = 0,
    /// The record is none that a worker can have meant.
    BadRecord = 1,
    /// A slot is not GRANTED to this worker, or not of the named generation.
    NotGranted = 2,
    /// A slot has another generation by now.
    Generation = 3,
    /// The device did not copy.
    CopyFailed = 4,
    /// The window has ended.
    Closed = 5,
}

/// A state word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// What the stage is in.
    pub state: State,
    /// With [`State::Refused`]: why.
    pub reason: Reason,
    /// Raised by the worker with every use of the stage; 48 bits.
    pub sequence: u64,
}

impl Word {
    /// The word as it stands in the page.
    pub fn encode(self) -> u64 {
        self.sequence << 16 | (self.reason as u64) << 8 | self.state as u64
    }

    /// Reads a word; none where no side can have written it.
    pub fn decode(word: u64) -> Option<Self> {
        use Reason::*;
        use State::*;
        let find_state = |s: &State| *s as u64 == word & 0xff;
        let find_reason = |r: &Reason| *r as u64 == word >> 8 & 0xff;
        Some(Self {
            state: [Free, Filled, Wanted, Moved, Refused]
                .into_iter()
                .find(find_state)?,
            reason: [None, BadRecord, NotGranted, Generation, CopyFailed, Closed]
                .into_iter()
                .find(find_reason)?,
            sequence: word >> 16,
        })
    }
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Window to arena.
    Store,
    /// Arena to window.
    Load,
}

impl Direction {
    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Load => "load",
        }
    }
}

/// What a record asks for, checked against the sizes of arena and stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Which way.
    pub direction: Direction,
    /// Sequence of the stage's word.
    pub sequence: u64,
    /// Parts to move, with their offsets in the stage.
    pub runs: Vec<(u64, Run)>,
}

/// Why a record cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// The word asks for nothing.
    #[error("the stage is not handed over")]
    NotHandedOver,
    /// Shorter than its runs, longer than allowed, or without any.
    #[error("a record of {0} runs")]
    Runs(u32),
    /// A run is empty or reaches past the arena's end.
    #[error("run {0} does not lie in the arena")]
    OutsideArena(usize),
    /// The runs together are longer than a stage.
    #[error("run {0} does not lie in the stage")]
    OutsideStage(usize),
}

/// Reads a copied record: its state word as it was read first, and the bytes of the record (whose own first word is not looked at).
/// Total: any bytes give an order whose runs lie in the arena and, apart from each other, in the stage; or a named error.
pub fn decode(
    word: Word,
    record: &[u8],
    arena_bytes: u64,
    stage_bytes: u64,
) -> Result<Order, BadRecord> {
    let direction = match word.state {
        State::Filled => Direction::Store,
        State::Wanted => Direction::Load,
        _ => return Err(BadRecord::NotHandedOver),
    };
    let count = match record.get(8..12) {
        Some(&[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
        _ => 0,
    };
    let end = RUNS_AT + count as usize * size_of::<Run>();
    let listed = record.get(RUNS_AT..end).unwrap_or_default();
    if count == 0 || count > RUNS_MAX || listed.is_empty() {
        return Err(BadRecord::Runs(count));
    }
    let (mut runs, mut at) = (Vec::with_capacity(count as usize), 0);
    for (index, raw) in listed.chunks_exact(size_of::<Run>()).enumerate() {
        let run = Run::read_from_bytes(raw).map_err(|_| BadRecord::Runs(count))?;
        let bytes = u64::from(run.bytes);
        if bytes == 0 || run.arena_offset() + bytes > arena_bytes {
            return Err(BadRecord::OutsideArena(index));
        }
        if at + bytes > stage_bytes {
            return Err(BadRecord::OutsideStage(index));
        }
        runs.push((at, run));
        at = (at + bytes).next_multiple_of(RUN_ALIGN);
    }
    Ok(Order {
        direction,
        sequence: word.sequence,
        runs,
    })
}

/// A record as the worker writes it, without its state word, which is stored last.
pub fn encode(runs: &[Run]) -> Vec<u8> {
    let mut record = vec![0; RUNS_AT];
    record[8..12].copy_from_slice(&(runs.len() as u32).to_le_bytes());
    record.extend_from_slice(runs.as_bytes());
    record
}

const _: () = assert!(size_of::<Run>() == 16);
const _: () = assert!(size_of::<Header>() == 32);

/// Why there is no window. The name (`Debug` form) begins the message of the refusal and is what logs, metrics and status show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unavailable {
    /// The sidecar was not told to use one.
    TransferNotChosen,
    /// `libcuda.so.1` cannot be opened here, or cannot be used.
    NoDriver,
    /// The driver shows no device of this UUID to the sidecar.
    NoDevice,
    /// The device is an instance of a partitioned GPU.
    MigEnabled,
    /// The device takes one process at a time, or none.
    ExclusiveProcess,
    /// The device, or the host, has no memory left for it.
    OutOfMemory,
    /// More bytes were wanted than a window may have, or fewer than a stage needs.
    WindowTooLarge,
    /// What one side wrote was not what the other side read.
    PatternMismatch,
    /// The driver can neither pass memory on by descriptor nor by handle, or failed otherwise.
    DriverFailed,
    /// A window is in the making, its predecessor's copies have not ended yet, or the worker still has it mapped.
    Busy,
}
