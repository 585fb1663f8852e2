//! The flag page of a window: a memfd that worker and sidecar both map, with one record per stage of the window's memory.
//!
//! ```text
//! 0                              Header
//! HEADER_BYTES + n * RECORD_BYTES   record of stage n: state word (u64), count of runs (u32), zeros up to RUNS_AT, then the runs
//! ```
//! The worker owns the ring. It fills a record, then stores the state word with release order and the next sequence number. The sidecar
//! answers by exchanging exactly that word for one with the same sequence. The sidecar does not trust the page: it reads the word, copies
//! the record once and decodes the copy. The runs' bytes are consecutive in the stage, each starting at a multiple of [`RUN_ALIGN`].

use crate::table::ROW_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First bytes of the page.
pub const MAGIC: [u8; 8] = *b"KVCPWNDW";
/// Version of this format.
pub const VERSION: u32 = 1;
/// Bytes before the first record.
pub const HEADER_BYTES: u64 = 4096;
pub const RECORD_BYTES: u64 = 16 << 10;
/// Offset of the runs in their record.
pub const RUNS_AT: usize = 64;
/// Maximum runs of a record.
pub const RUNS_MAX: u32 = ((RECORD_BYTES as usize - RUNS_AT) / size_of::<Run>()) as u32;
/// Each run starts at a multiple of this many bytes of its stage.
pub const RUN_ALIGN: u64 = 256;
/// Bytes at the start of the window with which both sides verify that they map the same memory.
pub const PATTERN_BYTES: usize = 64;

/// Byte on the bell: check the page.
pub const RING: u8 = 1;
/// Last byte on the bell from the worker: it has unmapped the window's memory.
pub const UNMAPPED: u8 = 2;

/// First bytes of the page (native little-endian; both sides run on one machine).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: u32,
    /// Number of records, and of stages of the window.
    pub stages: u32,
    pub stage_bytes: u64,
    /// [`RECORD_BYTES`].
    pub record_bytes: u32,
    /// [`RUNS_MAX`].
    pub runs_max: u32,
}

impl Header {
    /// The header of a page for `stages` stages.
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

/// Bytes of a page for `stages` stages.
pub fn page_bytes(stages: u32) -> u64 {
    record_at(stages)
}

/// Offset of the record of a stage. It begins with the state word.
pub fn record_at(stage: u32) -> u64 {
    HEADER_BYTES + u64::from(stage) * RECORD_BYTES
}

/// Bytes of one slot, or a part of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Run {
    pub slot: u32,
    /// Generation of the slot, from the GRANT or the PROBE reply.
    pub generation: u32,
    /// First byte, relative to the start of the slot.
    pub offset: u32,
    /// Length in bytes.
    pub bytes: u32,
}

impl Run {
    pub fn arena_offset(&self) -> u64 {
        u64::from(self.slot) * ROW_BYTES + u64::from(self.offset)
    }
}

/// State of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// The worker may use the stage.
    Free = 0,
    /// A store: the worker has filled the stage, and the sidecar should copy it to the arena.
    Filled = 1,
    /// A load: the worker wants bytes of the arena in the stage.
    Wanted = 2,
    /// The sidecar has copied the bytes. The worker owns the stage again.
    Moved = 3,
    /// The sidecar has not copied them, for the reason in the word. The worker owns the stage again.
    Refused = 4,
}

/// Why a stage was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// The stage was not refused.
    None = 0,
    /// The record is malformed.
    BadRecord = 1,
    /// A slot is not GRANTED to this worker, or has another generation.
    NotGranted = 2,
    /// A slot's generation has changed.
    Generation = 3,
    /// The device failed to copy.
    CopyFailed = 4,
    /// The window has ended.
    Closed = 5,
}

/// A state word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// State of the stage.
    pub state: State,
    /// With [`State::Refused`]: the reason.
    pub reason: Reason,
    /// Raised by the worker with every use of the stage; 48 bits.
    pub sequence: u64,
}

impl Word {
    /// The word's encoding in the page.
    pub fn encode(self) -> u64 {
        self.sequence << 16 | (self.reason as u64) << 8 | self.state as u64
    }

    /// Decodes a word. `None` if neither side could have written it.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Window to arena.
    Store,
    /// Arena to window.
    Load,
}

impl Direction {
    /// Name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Load => "load",
        }
    }
}

/// The copies that a record requests, checked against the sizes of arena and stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    pub direction: Direction,
    /// Sequence of the stage's word.
    pub sequence: u64,
    /// Runs to copy, with their offsets in the stage.
    pub runs: Vec<(u64, Run)>,
}

/// Why a record cannot be executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// The word requests nothing.
    #[error("the stage is not handed over")]
    NotHandedOver,
    /// The record is shorter than its runs, longer than allowed, or without runs.
    #[error("a record of {0} runs; expected 1 to {RUNS_MAX} that fit into it")]
    Runs(u32),
    /// A run is empty or extends past the arena's end.
    #[error("run {0} is empty or outside the arena")]
    OutsideArena(usize),
    /// The runs together are longer than a stage.
    #[error("run {0} is outside the stage")]
    OutsideStage(usize),
}

/// Decodes a copied record: its state word as it was first read, and the bytes of the record, whose own first word is ignored. Total: any
/// bytes give an order whose runs are inside the arena and, without overlap, inside the stage; or a named error.
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

/// Encodes a record for the worker, without its state word, which is stored last.
pub fn encode(runs: &[Run]) -> Vec<u8> {
    let mut record = vec![0; RUNS_AT];
    record[8..12].copy_from_slice(&(runs.len() as u32).to_le_bytes());
    record.extend_from_slice(runs.as_bytes());
    record
}

const _: () = assert!(size_of::<Run>() == 16);
const _: () = assert!(size_of::<Header>() == 32);

/// Why there is no window. The name (`Debug` form) begins the message of the refusal and is shown in logs, metrics and status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unavailable {
    /// The sidecar is not configured to use one.
    TransferNotChosen,
    /// `libcuda.so.1` cannot be opened or used.
    NoDriver,
    /// The driver shows the sidecar no device with this UUID.
    NoDevice,
    /// The device is an instance of a partitioned GPU.
    MigEnabled,
    /// The device accepts one process at a time, or none.
    ExclusiveProcess,
    /// The device or the host is out of memory.
    OutOfMemory,
    /// The request exceeds a window's maximum, or is smaller than a stage needs.
    WindowTooLarge,
    /// One side did not read what the other side wrote.
    PatternMismatch,
    /// The driver can share memory neither by descriptor nor by handle, or failed otherwise.
    DriverFailed,
    /// A window is being created, the previous one's copies have not ended, or the worker still maps it.
    Busy,
}
