//! Kernel features that this process may use. Each one is tried the way the sidecar uses it: a version number says nothing about
//! seccomp, limits of a container, or the file system of a folder.

use super::deadline::Deadline;
use super::report::{Facility, FacilityName};
use super::sys;
use crate::cli::status::size;
use kvcachepool_memory::link;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_memory::memfd::{Pages, sealed};
use kvcachepool_memory::record_lock::{Owner, try_lock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags, ftruncate};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Timeout of a probe.
const LONGEST: Duration = Duration::from_secs(2);
const TRIED_BYTES: u64 = 1 << 20;
/// Bytes to lock in memory: more than the common default limit of 8 MiB.
const LOCKED_BYTES: u64 = 16 << 20;
/// Bytes of a direct write, and the alignment of its address.
const BLOCK_BYTES: usize = 4096;

/// Why a feature does not work: a reason name, and a text.
#[derive(Debug)]
struct Refused {
    reason: String,
    detail: String,
}

impl Refused {
    fn of(reason: &str, detail: impl Into<String>) -> Self {
        Self {
            reason: reason.to_owned(),
            detail: detail.into(),
        }
    }

    fn at(step: &str) -> impl FnOnce(Errno) -> Self {
        move |e| Self::of(&name(e), format!("{step}: {e}"))
    }
}

/// Tries all features. `runtime` is the folder of locks, `disk` that of the disk tier, `room_bytes` the memory that may be used.
pub fn tried(
    deadline: Deadline,
    runtime: PathBuf,
    disk: Option<PathBuf>,
    room_bytes: u64,
) -> Vec<Facility> {
    let one = |name, look: fn() -> Result<String, Refused>| facility(deadline, name, look);
    let folder = runtime.clone();
    let mut all = vec![
        one(FacilityName::Memfd, || memfd(Pages::Base, TRIED_BYTES)),
        one(FacilityName::MemfdHuge2Mi, || huge(Pages::Huge2Mi)),
        one(FacilityName::MemfdHuge1Gi, || huge(Pages::Huge1Gi)),
        one(FacilityName::Pidfd, pidfd),
        one(FacilityName::PassDescriptors, pass_descriptors),
        facility(deadline, FacilityName::RecordLocks, move || {
            locks(&runtime, Owner::Process)
        }),
        facility(deadline, FacilityName::OpenFileLocks, move || {
            locks(&folder, Owner::OpenFile)
        }),
        one(FacilityName::IoUring, io_uring),
        facility(deadline, FacilityName::PageLock, move || {
            page_lock(room_bytes)
        }),
        one(FacilityName::OpenFiles, open_files),
    ];
    if let Some(disk) = disk {
        all.push(facility(deadline, FacilityName::DirectIo, move || {
            direct_io(&disk)
        }));
    }
    all
}

fn facility(
    deadline: Deadline,
    name: FacilityName,
    look: impl FnOnce() -> Result<String, Refused> + Send + 'static,
) -> Facility {
    let slow = || Err(Refused::of("TimedOut", "no answer in time"));
    let found = deadline.within(LONGEST, look).unwrap_or_else(slow);
    Facility::of(name, found.map_err(|r| (r.reason, r.detail)))
}

fn memfd(pages: Pages, bytes: u64) -> Result<String, Refused> {
    let fd = sealed("kvcachepool-doctor", bytes, pages)
        .map_err(|e| Refused::of(&name(e.source), e.to_string()))?;
    if ftruncate(&fd, 0).is_ok() {
        return Err(Refused::of(
            "NotSealed",
            "a sealed memfd could be truncated",
        ));
    }
    Mapping::new(fd.as_fd(), bytes).map_err(Refused::at("mmap"))?;
    Ok("sealed, mapped, cannot be truncated".into())
}

/// Mapping reserves the page, so a node without one reports an error. The page is not touched.
fn huge(pages: Pages) -> Result<String, Refused> {
    memfd(pages, pages.bytes()).map_err(|refused| match refused.reason.as_str() {
        "ENOMEM" => Refused::of("NoFreePages", "the node has no free page of this size"),
        _ => refused,
    })
}

/// A child process ends, and its pidfd must become readable.
fn pidfd() -> Result<String, Refused> {
    let spawned = Command::new("/proc/self/exe")
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut child = spawned.map_err(|e| Refused::of("NoChild", format!("cannot start: {e}")))?;
    let watched = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
    let ended = watched
        .map_err(Refused::at("pidfd_open"))
        .and_then(|pidfd| readable(&pidfd));
    // Errors are ignored: there is nothing left to wait for.
    let _ = child.kill().and_then(|()| child.wait());
    match ended? {
        true => Ok("poll reported the end of a process".into()),
        false => Err(Refused::of(
            "NotPolled",
            "poll did not report the end of a process",
        )),
    }
}

fn readable(fd: &OwnedFd) -> Result<bool, Refused> {
    let mut set = [PollFd::new(fd, PollFlags::IN)];
    let longest = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    let count = poll(&mut set, Some(&longest)).map_err(Refused::at("poll"))?;
    Ok(count == 1 && set[0].revents().contains(PollFlags::IN))
}

/// Passes a memfd through a socket, as arenas are passed; it must arrive as the same file.
fn pass_descriptors() -> Result<String, Refused> {
    let broken = |e: link::LinkError| Refused::of("NotPassed", e.to_string());
    let fd = sealed("kvcachepool-doctor", TRIED_BYTES, Pages::Base)
        .map_err(|e| Refused::of("NoMemfd", e.to_string()))?;
    let (ours, theirs) = link::pair().map_err(Refused::at("socketpair"))?;
    link::send(&ours, &(), &[fd.as_fd()]).map_err(broken)?;
    let (_, fds) = link::receive::<()>(&theirs, false)
        .map_err(broken)?
        .unwrap_or_default();
    let identity = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    match fds.as_slice() {
        [got] if identity(got) == identity(&fd) => {
            Ok("passed a memfd through a Unix socket".into())
        }
        _ => Err(Refused::of("NotPassed", "the descriptor did not arrive")),
    }
}

/// Two open files of a name that is then removed: the lock on one must exclude the other.
fn locks(folder: &Path, owner: Owner) -> Result<String, Refused> {
    let tag = match owner {
        Owner::Process => "process",
        Owner::OpenFile => "file",
    };
    let path = folder.join(format!(".kvcachepool-doctor-{tag}-{}", std::process::id()));
    let place = folder.display();
    let open = |flags| {
        rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o600))
            .map_err(|e| unusable(folder, e))
    };
    let first = open(OFlags::RDWR | OFlags::CREATE)?;
    let second = open(OFlags::RDWR);
    rustix::fs::unlink(&path).map_err(Refused::at("unlink"))?;
    let second = second?;
    try_lock(first.as_fd(), owner, 0, 1).map_err(Refused::at("fcntl"))?;
    match try_lock(second.as_fd(), Owner::OpenFile, 0, 1) {
        Err(Errno::ACCESS | Errno::AGAIN) => {
            Ok(format!("a lock in {place} excluded another open file"))
        }
        Err(e) => Err(Refused::at("fcntl")(e)),
        Ok(()) => Err(Refused::of(
            "NotKeptOut",
            format!("two open files in {place} hold the same lock"),
        )),
    }
}

fn unusable(folder: &Path, error: Errno) -> Refused {
    let place = folder.display();
    match error {
        Errno::NOENT => Refused::of("NoFolder", format!("{place} does not exist")),
        e => Refused::of(&name(e), format!("cannot write to {place}: {e}")),
    }
}

fn io_uring() -> Result<String, Refused> {
    let unused = "the sidecar does not use it";
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let reason = match sys::io_uring() {
        Ok(()) => return Ok(format!("allowed; {unused}")),
        Err(Errno::NOSYS) => "NotInKernel".to_owned(),
        Err(Errno::PERM) if disabled.is_ok_and(|n| n.trim() != "0") => "SysctlDisabled".to_owned(),
        Err(Errno::PERM) => "SeccompDenied".to_owned(),
        Err(e) => name(e),
    };
    Err(Refused::of(&reason, unused))
}

fn page_lock(room_bytes: u64) -> Result<String, Refused> {
    let limit = limit_text(Resource::Memlock, size);
    if room_bytes / 8 < LOCKED_BYTES {
        return Err(Refused::of("NoRoom", "too little free memory to try it"));
    }
    let fd = sealed("kvcachepool-doctor", LOCKED_BYTES, Pages::Base)
        .map_err(|e| Refused::of("NoMemfd", e.to_string()))?;
    let mapping = Mapping::new(fd.as_fd(), LOCKED_BYTES).map_err(Refused::at("mmap"))?;
    let tried = size(LOCKED_BYTES);
    match sys::page_lock(&mapping) {
        Ok(()) => Ok(format!("locked {tried}, RLIMIT_MEMLOCK {limit}")),
        Err(e) => Err(Refused::of(
            &name(e),
            format!("cannot lock {tried}, RLIMIT_MEMLOCK {limit}"),
        )),
    }
}

/// Descriptors that a sidecar with default limits can need: connections, each with some of its own, and files of a disk tier.
const OPEN_FILES_MIN: u64 = 1024;

fn open_files() -> Result<String, Refused> {
    let text = limit_text(Resource::Nofile, |n| n.to_string());
    let text = format!("RLIMIT_NOFILE {text}");
    match getrlimit(Resource::Nofile).current {
        Some(most) if most < OPEN_FILES_MIN => Err(Refused::of("Few", text)),
        _ => Ok(text),
    }
}

fn limit_text(resource: Resource, shown: fn(u64) -> String) -> String {
    getrlimit(resource)
        .current
        .map_or("unlimited".into(), shown)
}

/// Writes and reads a block past the page cache, in a file without a name.
fn direct_io(folder: &Path) -> Result<String, Refused> {
    let file = unnamed(folder).map_err(|e| match e {
        Errno::INVAL | Errno::OPNOTSUPP => Refused::of(
            "Unsupported",
            format!("{} does not support direct I/O", folder.display()),
        ),
        e => unusable(folder, e),
    })?;
    let mut memory = vec![0xa5; 2 * BLOCK_BYTES];
    let from = memory.as_ptr().align_offset(BLOCK_BYTES);
    let block = memory.get_mut(from..from + BLOCK_BYTES).unwrap_or_default();
    let moved = rustix::io::pwrite(&file, block, 0).and_then(|_| {
        block.fill(0);
        rustix::io::pread(&file, &mut *block, 0)
    });
    match moved {
        Ok(BLOCK_BYTES) if block.iter().all(|byte| *byte == 0xa5) => Ok(format!(
            "wrote and read {} past the page cache",
            folder.display()
        )),
        Ok(_) => Err(Refused::of(
            "NotRead",
            "the bytes that were read differ from those written",
        )),
        Err(Errno::INVAL) => Err(Refused::of(
            "Unsupported",
            "direct reads or writes are refused",
        )),
        Err(e) => Err(Refused::at("direct write and read")(e)),
    }
}

/// A file for direct I/O whose name is already removed: nothing remains of it, however this process ends.
pub fn unnamed(folder: &Path) -> Result<OwnedFd, Errno> {
    let path = folder.join(format!(".kvcachepool-doctor-{}", std::process::id()));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&path, flags | OFlags::DIRECT, Mode::from_raw_mode(0o600));
    // Some file systems create the file even when they refuse direct I/O.
    let removed = rustix::fs::unlink(&path);
    let file = opened?;
    removed.map(|()| file)
}

fn name(error: Errno) -> String {
    let known = match error {
        Errno::PERM => "EPERM",
        Errno::ACCESS => "EACCES",
        Errno::NOSYS => "ENOSYS",
        Errno::NOMEM => "ENOMEM",
        Errno::INVAL => "EINVAL",
        Errno::NODEV => "ENODEV",
        Errno::NOENT => "ENOENT",
        Errno::ROFS => "EROFS",
        Errno::NOSPC => "ENOSPC",
        Errno::MFILE => "EMFILE",
        Errno::AGAIN => "EAGAIN",
        Errno::IO => "EIO",
        Errno::OPNOTSUPP => "EOPNOTSUPP",
        other => return format!("errno{}", other.raw_os_error()),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(all: &[Facility], name: FacilityName) -> &Facility {
        all.iter().find(|f| f.name == name).unwrap()
    }

    #[test]
    fn what_every_sidecar_needs_works_where_its_tests_run_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (runtime, disk) = (folder.path().to_owned(), folder.path().to_owned());
        let all = tried(Deadline::start(), runtime, Some(disk), 1 << 30);
        for name in [
            FacilityName::Memfd,
            FacilityName::Pidfd,
            FacilityName::PassDescriptors,
            FacilityName::RecordLocks,
            FacilityName::OpenFileLocks,
        ] {
            assert!(found(&all, name).works, "{all:#?}");
        }
        // Features that depend on the machine have a reason name when they do not work.
        for facility in &all {
            assert_eq!(facility.works, facility.reason.is_empty(), "{facility:?}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn folders_that_are_missing_are_named() {
        let missing = PathBuf::from("/nonexistent/kvcachepool");
        let all = tried(Deadline::start(), missing.clone(), Some(missing), 0);
        for name in [FacilityName::RecordLocks, FacilityName::DirectIo] {
            assert_eq!(found(&all, name).reason, "NoFolder");
        }
        assert_eq!(found(&all, FacilityName::PageLock).reason, "NoRoom");
    }
}
