//! Rules that judge the facts: what prevents serving here, what slows it down, and what to do about it. No probes run here.

use super::findings_gpu;
use super::report::{Facility, FacilityName, Facts, Finding, SpeedName, Wanted, Weight};
use crate::cli::status::size;

const GIB: u64 = 1 << 30;
/// A vLLM of several ranks keeps message queues and NCCL's buffers there.
const DEV_SHM_MIN: u64 = GIB;
/// Memory below which no useful arena fits.
const AVAILABLE_MIN: u64 = 4 * GIB;
/// Cores for copies, digests and population at the same time.
const CORES_MIN: f64 = 2.0;
/// A digest reads what a copy reads and writes, so it should take at most as long as three copies: a slower one delays stores.
const DIGEST_SHARE_MIN: f64 = 0.33;
/// One thread copies several times as fast on an idle machine with all memory channels populated.
const COPY_MIN: u64 = 3_000_000_000;
/// Below this, computing a prompt is often faster than loading it.
const DISK_MIN: u64 = 200_000_000;
/// Runnable threads per core above which threads wait for each other most of the time.
const LOAD_MAX: f64 = 1.5;
const BASE_PAGE: u64 = 4096;

/// One rule: returns a finding if the facts show its problem.
pub(super) type Rule = fn(&Facts) -> Option<Finding>;

/// All findings, most severe first.
pub fn judged(facts: &Facts) -> Vec<Finding> {
    let rules: [Rule; 19] = [
        memfd,
        pidfd,
        pass_descriptors,
        record_locks,
        arena,
        quota,
        memory,
        huge_pages,
        disk,
        open_files,
        cores,
        load,
        shmem_pages,
        digest,
        copy,
        disk_speed,
        page_lock,
        dev_shm,
        room,
    ];
    let rules = rules.iter().chain(findings_gpu::RULES);
    let mut found: Vec<Finding> = rules.filter_map(|rule| rule(facts)).collect();
    found.sort_by_key(|finding| finding.weight);
    found
}

/// Whether nothing prevents serving.
pub fn serves(findings: &[Finding]) -> bool {
    findings.iter().all(|f| f.weight != Weight::Blocks)
}

pub(super) fn finding(
    weight: Weight,
    name: &str,
    message: String,
    advice: &str,
) -> Option<Finding> {
    Some(Finding {
        weight,
        name: name.to_owned(),
        message,
        advice: advice.to_owned(),
    })
}

fn failed(facts: &Facts, name: FacilityName) -> Option<&Facility> {
    facts.facility(name).filter(|facility| !facility.works)
}

fn said(facility: &Facility) -> String {
    format!("{} ({})", facility.detail, facility.reason)
}

fn wanted(facts: &Facts) -> Option<&Wanted> {
    facts.wanted.as_ref()
}

fn memfd(facts: &Facts) -> Option<Finding> {
    let found = failed(facts, FacilityName::Memfd)?;
    let advice = "the arena is a sealed memfd: allow memfd_create and F_ADD_SEALS in the seccomp profile, or use another sandbox";
    finding(Weight::Blocks, "MemfdRefused", said(found), advice)
}

fn pidfd(facts: &Facts) -> Option<Finding> {
    let found = failed(facts, FacilityName::Pidfd)?;
    let advice = "the sidecar refuses vLLM without a pidfd that supports poll (NoProofOfDeath): use Linux 5.3 or newer, and allow pidfd_open";
    finding(Weight::Blocks, "PidfdRefused", said(found), advice)
}

fn pass_descriptors(facts: &Facts) -> Option<Finding> {
    let found = failed(facts, FacilityName::PassDescriptors)?;
    let advice = "vLLM gets the arena over a Unix socket: allow SCM_RIGHTS in the sandbox";
    finding(Weight::Blocks, "DescriptorsRefused", said(found), advice)
}

fn record_locks(facts: &Facts) -> Option<Finding> {
    let found = failed(facts, FacilityName::RecordLocks)?;
    // Without a config the folder is a guess.
    let weight = match facts.wanted {
        Some(_) => Weight::Blocks,
        None => Weight::Note,
    };
    let advice = "the folder of the socket must exist, be writable, and be on a file system with record locks: use an emptyDir or /run";
    finding(weight, "RuntimeFolderUnusable", said(found), advice)
}

fn arena(facts: &Facts) -> Option<Finding> {
    let refused = &wanted(facts)?.arena_refused;
    if refused.is_empty() {
        return None;
    }
    let advice = "the other memory is for both processes, slot table, index and page tables, and for each tier, codec, window and CUDA context";
    finding(
        Weight::Blocks,
        "ArenaExceedsMemoryLimit",
        refused.clone(),
        advice,
    )
}

fn quota(facts: &Facts) -> Option<Finding> {
    let quota = facts.host.cpu_quota_cores.filter(|quota| *quota < 1.0)?;
    let message = format!("the CPU limit of this process is {quota:.2} of a core");
    let advice = "the process is throttled for the rest of each 100 ms, and replies to vLLM are late: raise the CPU limit, or remove it";
    finding(Weight::Degrades, "CpuThrottled", message, advice)
}

fn memory(facts: &Facts) -> Option<Finding> {
    let available = facts.host.memory_available_bytes?;
    let arena = wanted(facts).filter(|w| w.page_bytes == BASE_PAGE);
    let (weight, needed) = match arena {
        Some(wanted) => (Weight::Degrades, wanted.arena_bytes),
        None => (Weight::Note, AVAILABLE_MIN),
    };
    if available >= needed {
        return None;
    }
    let message = format!(
        "{} of memory are available, {} are needed",
        size(available),
        size(needed)
    );
    let advice = "the arena's pages are populated at the start: when the node has none left, population stops or a process is killed. \
                  The memory of a running sidecar counts as used";
    finding(weight, "MemoryShort", message, advice)
}

fn huge_pages(facts: &Facts) -> Option<Finding> {
    let wanted = wanted(facts).filter(|w| w.page_bytes > BASE_PAGE)?;
    let pages = facts.host.huge_pages.iter();
    let mut of_size = pages.filter(|pages| pages.page_bytes == wanted.page_bytes);
    let free = of_size.next().map_or(0, |pages| pages.free);
    let needed = wanted.arena_bytes.div_ceil(wanted.page_bytes);
    if free >= needed {
        return None;
    }
    let message = format!(
        "{free} pages of {} are free, the arena needs {needed}",
        size(wanted.page_bytes)
    );
    let advice = "the sidecar uses normal pages instead (HugePagesUnavailable): reserve more huge pages on the node, or set memory.hugePages to None";
    finding(Weight::Degrades, "HugePagesShort", message, advice)
}

fn disk(facts: &Facts) -> Option<Finding> {
    let found = failed(facts, FacilityName::DirectIo)?;
    if found.reason == "Unsupported" {
        let advice = "objects go through the page cache, which counts against the container's memory limit: use another file system";
        return finding(Weight::Slows, "DirectIoUnsupported", said(found), advice);
    }
    let advice =
        "the memory tier serves without the disk tier: run `kvcachepool-sidecar check` for details";
    finding(Weight::Degrades, "DiskFolderUnusable", said(found), advice)
}

fn open_files(facts: &Facts) -> Option<Finding> {
    let found = failed(facts, FacilityName::OpenFiles)?;
    let advice = "each rank of vLLM and each lower tier needs open files: raise the limit";
    finding(Weight::Degrades, "OpenFilesFew", said(found), advice)
}

fn cores(facts: &Facts) -> Option<Finding> {
    let all = f64::from(facts.host.cores);
    let cores = facts
        .host
        .cpu_quota_cores
        .map_or(all, |quota| quota.min(all));
    // Below one core the quota has its own finding.
    if cores >= CORES_MIN || facts.host.cpu_quota_cores.is_some_and(|quota| quota < 1.0) {
        return None;
    }
    let message = format!("this process may use {cores:.1} cores");
    let advice = "digests, population and lower tiers compete with replies to vLLM: give the sidecar two cores";
    finding(Weight::Slows, "CoresFew", message, advice)
}

fn load(facts: &Facts) -> Option<Finding> {
    let (load, cores) = (facts.host.load?, facts.host.node_cores);
    if cores == 0 || load <= LOAD_MAX * f64::from(cores) {
        return None;
    }
    let message = format!("{load:.1} threads compete for the node's {cores} cores");
    let advice = "the speeds measured here and the cache itself are slowed down by other processes: set CPU requests on pods, or use another node";
    finding(Weight::Slows, "NodeBusy", message, advice)
}

fn shmem_pages(facts: &Facts) -> Option<Finding> {
    let word = facts.host.shmem_huge_pages.as_str();
    let asked = wanted(facts).is_some_and(|w| w.page_bytes > BASE_PAGE);
    if asked || !matches!(word, "never" | "deny" | "advise") {
        return None;
    }
    let message = format!("the arena uses pages of 4Ki: shmem_enabled is {word}");
    let advice = "for a large arena set memory.hugePages and reserve huge pages, or write within_size to \
                  /sys/kernel/mm/transparent_hugepage/shmem_enabled: page tables are smaller and population is faster";
    finding(Weight::Note, "SmallPages", message, advice)
}

fn digest(facts: &Facts) -> Option<Finding> {
    let (digest, copy) = (
        facts.speed(SpeedName::Digest)?,
        facts.speed(SpeedName::CopyOneThread)?,
    );
    if digest as f64 >= DIGEST_SHARE_MIN * copy as f64 {
        return None;
    }
    let message = format!(
        "digests run at {:.1} GB/s, copies at {:.1}",
        gigabytes(digest),
        gigabytes(copy)
    );
    let advice = "a chunk is stored only after its digest, and with memory.verify: Always also loaded only after one: use the released binary, and raise memory.verifyThreads if cores are idle";
    finding(Weight::Slows, "DigestSlow", message, advice)
}

fn copy(facts: &Facts) -> Option<Finding> {
    let copy = facts
        .speed(SpeedName::CopyOneThread)
        .filter(|copy| *copy < COPY_MIN)?;
    let message = format!("one thread copies {:.1} GB/s", gigabytes(copy));
    let advice = "other processes use the memory or this core, or the machine is small: check the other pods of the node and the CPU limits";
    finding(Weight::Slows, "CopySlow", message, advice)
}

fn disk_speed(facts: &Facts) -> Option<Finding> {
    let read = facts
        .speed(SpeedName::DiskRead)
        .filter(|read| *read < DISK_MIN)?;
    let message = format!("the disk tier reads {:.0} MB/s", read as f64 / 1e6);
    let advice = "computing is often faster than such a load, and the connector then chooses it: use a local NVMe volume";
    finding(Weight::Slows, "DiskSlow", message, advice)
}

fn page_lock(facts: &Facts) -> Option<Finding> {
    let found = failed(facts, FacilityName::PageLock)?;
    if found.reason == "NoRoom" {
        return None;
    }
    let advice = "drivers and network cards that respect this limit cannot lock the arena: raise RLIMIT_MEMLOCK of the container \
                  runtime. CPU-only nodes do not need it";
    finding(Weight::Note, "PageLockLimited", said(found), advice)
}

fn dev_shm(facts: &Facts) -> Option<Finding> {
    let bytes = facts.host.dev_shm_bytes.filter(|b| *b < DEV_SHM_MIN)?;
    let message = format!("/dev/shm has {}", size(bytes));
    let advice = "the cache does not use it, but a vLLM of several ranks does: mount an emptyDir of medium Memory there";
    finding(Weight::Note, "DevShmSmall", message, advice)
}

fn room(facts: &Facts) -> Option<Finding> {
    let speeds = facts.speeds.iter().map(|speed| &speed.reason);
    let passed = failed(facts, FacilityName::WindowByFd).map(|passed| &passed.reason);
    speeds.chain(passed).find(|reason| *reason == "NoRoom")?;
    let room = size(facts.host.memory_room_bytes);
    let message =
        format!("some speeds were not measured: this process may use only {room} more memory");
    let advice = "run doctor in a container with more free memory, or on a disk with more free space: a sidecar may need the rest here";
    finding(Weight::Note, "NoRoom", message, advice)
}

pub(super) fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

#[cfg(test)]
#[path = "findings_tests.rs"]
mod tests;
