//! The report of `doctor --output json`: facts and their judgement. Fields are only ever added. Unknown values are `null`, or empty
//! if they are text.

use super::gpu::Gpu;
use super::host::Host;
use super::modes::Mode;
use serde::Serialize;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub version: String,
    /// Nothing prevents serving: the exit code is 0.
    pub serves: bool,
    #[serde(flatten)]
    pub facts: Facts,
    /// Transfer modes between GPU and cache.
    pub transfer_modes: Vec<Mode>,
    /// Problems, most severe first.
    pub findings: Vec<Finding>,
}

/// Facts of the node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Facts {
    /// Requirements of the config; `null` without one.
    pub wanted: Option<Wanted>,
    /// The node, and the part of it that this process may use.
    pub host: Host,
    /// Kernel features that were tried.
    pub facilities: Vec<Facility>,
    pub gpu: Gpu,
    pub speeds: Vec<Speed>,
}

impl Facts {
    pub fn facility(&self, name: FacilityName) -> Option<&Facility> {
        self.facilities.iter().find(|f| f.name == name)
    }

    /// Bytes per second of a measurement, if it has a result.
    pub fn speed(&self, name: SpeedName) -> Option<u64> {
        let found = self.speeds.iter().find(|s| s.name == name)?;
        found.bytes_per_second
    }
}

/// Requirements of a config.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Wanted {
    /// `memory.size`.
    pub arena_bytes: u64,
    /// Page size of `memory.hugePages` in bytes; 4096 without huge pages.
    pub page_bytes: u64,
    /// Why an arena of this size would be refused; empty if it would not.
    pub arena_refused: String,
    /// `disk.path`; empty without a disk tier.
    pub disk: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Facility {
    pub name: FacilityName,
    /// It did what the sidecar needs.
    pub works: bool,
    /// Reason name: an errno, or a name of our own; empty if it works.
    pub reason: String,
    pub detail: String,
}

impl Facility {
    /// From what was found: a detail, or a reason name and a detail.
    pub fn of(name: FacilityName, found: Result<String, (String, String)>) -> Self {
        let works = found.is_ok();
        let (reason, detail) = found.map_or_else(|why| why, |detail| (String::new(), detail));
        Self {
            name,
            works,
            reason,
            detail,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum FacilityName {
    /// A memfd with the seals of an arena, which cannot be truncated.
    Memfd,
    /// The same with pages of 2 MiB, one of them mapped.
    MemfdHuge2Mi,
    /// The same with pages of 1 GiB, mapped and not touched.
    MemfdHuge1Gi,
    /// The end of a child, reported by `poll` on its pidfd.
    Pidfd,
    /// A descriptor over a Unix socket (`SCM_RIGHTS`).
    PassDescriptors,
    /// A record lock of a process, as on `sidecar.lock`, tested from another open file.
    RecordLocks,
    /// A record lock of an open file, as the disk tier uses.
    OpenFileLocks,
    /// Whether `io_uring_setup` is allowed. The sidecar does not use it.
    IoUring,
    /// Direct I/O in the folder of the disk tier.
    DirectIo,
    /// Locking memory (`mlock`), under `RLIMIT_MEMLOCK`.
    PageLock,
    /// Descriptors that this process may have open (`RLIMIT_NOFILE`).
    OpenFiles,
    /// Memory of a GPU passed to a second process by descriptor. Only with copy measurements.
    WindowByFd,
    /// The same by legacy IPC handle.
    WindowByHandle,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Speed {
    pub name: SpeedName,
    /// `null` if not measured.
    pub bytes_per_second: Option<u64>,
    /// Size of the memory area or file that the measurement repeatedly covers.
    pub over_bytes: u64,
    pub threads: u32,
    /// The operation that this speed limits.
    pub bounds: String,
    /// Why it was not measured; empty if it was.
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum SpeedName {
    /// Plain memory to plain memory.
    CopyOneThread,
    /// The same with one thread per core.
    CopyAllCores,
    /// xxh3-128 of the arena.
    Digest,
    /// Plain memory to the arena.
    ArenaWrite,
    /// The arena to plain memory.
    ArenaRead,
    /// Direct writes to the disk tier's folder, one at a time.
    DiskWrite,
    /// Direct reads from there.
    DiskRead,
    /// Page-locked memory to a GPU.
    PinnedToDevice,
    /// A GPU to page-locked memory.
    PinnedFromDevice,
    /// Both at the same time, summed.
    PinnedBothWays,
    /// A GPU's window to the host and back; each byte counts once.
    WindowRoundTrip,
    /// Reads and writes of kernels that are limited by a GPU's memory bandwidth, alone.
    DecodeIdle,
    /// The same beside copies in both directions.
    DecodeBeside,
}

/// A problem that prevents serving or slows it down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub weight: Weight,
    pub name: String,
    pub message: String,
    pub advice: String,
}

/// Severity of a finding, most severe first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Weight {
    /// The sidecar cannot serve here.
    Blocks,
    /// It serves with less than the config asks for, or may be stopped.
    Degrades,
    Slows,
    Note,
}
