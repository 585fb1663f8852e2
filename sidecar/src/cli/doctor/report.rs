//! What the doctor prints with `--json`: facts, and what is made of them. Fields are only ever added. What is not known here is `null`,
//! or empty where it is text.

use super::gpu::Gpu;
use super::host::Host;
use super::modes::Mode;
use serde::Serialize;

/// All that is printed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Version of this program.
    pub version: String,
    /// Nothing that was found stands against serving: the exit code is 0.
    pub serves: bool,
    /// What was found.
    #[serde(flatten)]
    pub facts: Facts,
    /// Ways between GPU and cache.
    pub transfer_modes: Vec<Mode>,
    /// What stands against serving or makes it slow, the heaviest first.
    pub findings: Vec<Finding>,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Facts {
    /// What the config asks for; `null` without one.
    pub wanted: Option<Wanted>,
    /// The node, and the part of it that this process may use.
    pub host: Host,
    /// What the kernel lets this process do, each tried.
    pub facilities: Vec<Facility>,
    /// GPUs and their driver.
    pub gpu: Gpu,
    /// Bytes per second, measured.
    pub speeds: Vec<Speed>,
}

impl Facts {
    /// A facility by name, if it was tried.
    pub fn facility(&self, name: FacilityName) -> Option<&Facility> {
        self.facilities.iter().find(|f| f.name == name)
    }

    /// Bytes per second of a way, if it was measured.
    pub fn speed(&self, name: SpeedName) -> Option<u64> {
        let found = self.speeds.iter().find(|s| s.name == name)?;
        found.bytes_per_second
    }
}

/// What a config asks of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Wanted {
    /// `memory.size`.
    pub arena_bytes: u64,
    /// Bytes of a page of `memory.hugePages`; 4096 = none are asked for.
    pub page_bytes: u64,
    /// Why an arena of this size would be refused; empty = it would not.
    pub arena_refused: String,
    /// `disk.path`; empty = there is no disk tier.
    pub disk: String,
}

/// One facility.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Facility {
    /// Which.
    pub name: FacilityName,
    /// It did what the sidecar needs of it.
    pub works: bool,
    /// Name of what is wrong: an errno, or a word of ours; empty = nothing.
    pub reason: String,
    /// For people.
    pub detail: String,
}

/// What is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum FacilityName {
    /// A memfd with the seals of an arena, which then cannot be cut.
    Memfd,
    /// The same of pages of 2 MiB, one of them mapped.
    MemfdHuge2Mi,
    /// The same of pages of 1 GiB, mapped and not touched.
    MemfdHuge1Gi,
    /// The end of a child, seen by `poll` on its pidfd.
    Pidfd,
    /// A descriptor over a Unix socket (`SCM_RIGHTS`).
    PassDescriptors,
    /// A record lock of a process, as on `sidecar.lock`, seen by another open file.
    RecordLocks,
    /// A record lock of an open file, as the disk tier takes.
    OpenFileLocks,
    /// Is `io_uring_setup` allowed. The sidecar does not use it.
    IoUring,
    /// Writing and reading the folder of the disk tier past the page cache.
    DirectIo,
    /// Keeping memory from being moved out (`mlock`), under `RLIMIT_MEMLOCK`.
    PageLock,
    /// Descriptors that this process may have open (`RLIMIT_NOFILE`).
    OpenFiles,
    /// Memory of a GPU passed to a second process by descriptor. Only where copies of a GPU are measured, too.
    WindowByFd,
    /// The same by legacy IPC handle.
    WindowByHandle,
}

/// One way that bytes take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Speed {
    /// Which.
    pub name: SpeedName,
    /// Measured; `null` = it was not.
    pub bytes_per_second: Option<u64>,
    /// Bytes that were walked through, over and over.
    pub over_bytes: u64,
    /// Threads at it.
    pub threads: u32,
    /// What it bounds.
    pub bounds: String,
    /// Why it was not measured; empty = it was.
    pub reason: String,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum SpeedName {
    /// Plain memory to plain memory.
    CopyOneThread,
    /// The same by a thread for each core.
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
    /// Both at the same time, together.
    PinnedBothWays,
    /// A GPU's window to the host and back; each byte counts once.
    WindowRoundTrip,
    /// What kernels that are bound by a GPU's memory read and write, alone.
    DecodeIdle,
    /// The same beside copies both ways.
    DecodeBeside,
}

/// One thing that stands against serving, or makes it slow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub weight: Weight,
    /// Its name.
    pub name: String,
    /// For people: what was found.
    pub message: String,
    /// For people: what to do.
    pub advice: String,
}

/// How much a finding matters, the heaviest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Weight {
    /// The sidecar cannot serve here.
    Blocks,
    /// It serves with less than was asked for, or may be stopped.
    Degrades,
    /// It serves slowly.
    Slows,
    /// Worth knowing.
    Note,
}
