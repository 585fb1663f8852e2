//! The lock file beside the socket: counters that never repeat, and locks that show whether a process of an earlier boot is alive.

use crate::record_lock::{Owner, any_lock, try_lock};
use kvcachepool_protocol::lockfile::{LockFile as Header, SIDECAR_BYTE, VERSION, lock_offset};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::io::{Errno, pread, pwrite};
use std::path::{Path, PathBuf};
use zerocopy::IntoBytes;

const HEADER_BYTES: usize = size_of::<Header>();
/// Most locks that processes of one pod hold. A process that locks more has written to the file's counters.
const HELD_MAX: usize = 65_536;

#[derive(Debug, thiserror::Error)]
pub enum LockFileError {
    #[error("lock file {path}: {step} failed: {source}; make the socket's folder writable")]
    Io {
        path: PathBuf,
        step: &'static str,
        source: Errno,
    },
    /// The file has other content or another version. It is not changed, because its numbers may be in use.
    #[error(
        "{path} is not a lock file of version {VERSION}: stop the processes that use it, or remove it"
    )]
    Foreign { path: PathBuf },
    #[error("processes hold more than {HELD_MAX} locks of {path}; create the pod again")]
    TooManyLocks { path: PathBuf },
}

/// An open lock file. Open it only once per process: closing any other descriptor of the file drops the process's locks.
#[derive(Debug)]
pub struct LockFile {
    fd: OwnedFd,
    path: PathBuf,
}

impl LockFile {
    /// Opens or creates the file.
    pub fn open(path: &Path) -> Result<Self, LockFileError> {
        let fail = |step, source| LockFileError::Io {
            path: path.to_owned(),
            step,
            source,
        };
        let fd = open(
            path,
            OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o600),
        )
        .map_err(|e| fail("open", e))?;
        let file = Self {
            fd,
            path: path.to_owned(),
        };
        let size = fstat(&file.fd).map_err(|e| fail("fstat", e))?.st_size;
        if size == 0 {
            file.store(&Header::NEW)?;
        }
        file.load()?;
        Ok(file)
    }

    /// The descriptor, for passing to a connector.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn load(&self) -> Result<Header, LockFileError> {
        let mut bytes = [0u8; HEADER_BYTES];
        let got = pread(&self.fd, &mut bytes, 0).map_err(|e| self.io("pread", e))?;
        Header::parse(&bytes[..got]).ok_or_else(|| self.foreign())
    }

    fn foreign(&self) -> LockFileError {
        LockFileError::Foreign {
            path: self.path.clone(),
        }
    }

    fn store(&self, header: &Header) -> Result<(), LockFileError> {
        match pwrite(&self.fd, header.as_bytes(), 0) {
            Ok(HEADER_BYTES) => Ok(()),
            Ok(_) => Err(self.io("pwrite", Errno::NOSPC)),
            Err(e) => Err(self.io("pwrite", e)),
        }
    }

    fn io(&self, step: &'static str, source: Errno) -> LockFileError {
        LockFileError::Io {
            path: self.path.clone(),
            step,
            source,
        }
    }

    /// Allocates a lock number. It is written to the file before this returns, so no number is given twice.
    pub fn draw_lock(&self) -> Result<u32, LockFileError> {
        let mut header = self.load()?;
        let number = header.next_lock.get();
        header.next_lock = number.wrapping_add(1).max(1).into();
        self.store(&header)?;
        Ok(number)
    }

    /// The first unused lock number. Processes of earlier boots may hold lower ones.
    pub fn next_lock(&self) -> Result<u32, LockFileError> {
        Ok(self.load()?.next_lock.get())
    }

    /// Allocates a region number. Never gives one twice.
    pub fn draw_region(&self) -> Result<u64, LockFileError> {
        let mut header = self.load()?;
        let number = header.next_region.get();
        header.next_region = number.wrapping_add(1).into();
        self.store(&header)?;
        Ok(number)
    }

    /// Number of earlier starts since the engine was last healthy for 60 s. Counts this start afterwards.
    pub fn begin_boot(&self) -> Result<u32, LockFileError> {
        let mut header = self.load()?;
        let before = header.unhealthy_boots.get();
        header.unhealthy_boots = before.saturating_add(1).into();
        self.store(&header)?;
        Ok(before)
    }

    /// Resets the count: the engine was healthy for 60 s.
    pub fn healthy(&self) -> Result<(), LockFileError> {
        self.set_unhealthy_boots(0)
    }

    /// This boot ended on request, so it does not count as unhealthy. If it was healthy before, the reset of the count stays.
    pub fn ended_on_request(&self, before: u32) -> Result<(), LockFileError> {
        self.set_unhealthy_boots(before.min(self.load()?.unhealthy_boots.get()))
    }

    fn set_unhealthy_boots(&self, boots: u32) -> Result<(), LockFileError> {
        let mut header = self.load()?;
        header.unhealthy_boots = boots.into();
        self.store(&header)
    }

    /// Whether a live process holds the lock `number`. Does not take the lock.
    pub fn is_held(&self, number: u32) -> Result<bool, LockFileError> {
        self.byte_held(lock_offset(number))
    }

    /// All allocated lock numbers that live processes hold, in order. The kernel names any lock of a range and not the lowest, so the parts
    /// before and after it are queried again. The cost is per held lock, not per number. More than 65,536 held locks are an error.
    pub fn held(&self) -> Result<Vec<u32>, LockFileError> {
        let mut held = Vec::new();
        let mut ranges = vec![(lock_offset(1), lock_offset(self.next_lock()?))];
        while let Some((from, end)) = ranges.pop() {
            if from >= end {
                continue;
            }
            let Some((start, length)) = self.first_lock(from, end - from)? else {
                continue;
            };
            let first = start.max(from);
            // Length 0 means up to the end of the file, however long it gets.
            let stop = match length {
                0 => end,
                n => (start + n).min(end),
            };
            if stop - first > (HELD_MAX - held.len()) as u64 {
                return Err(LockFileError::TooManyLocks {
                    path: self.path.clone(),
                });
            }
            held.extend((first..stop).map(|byte| (byte - lock_offset(0)) as u32));
            ranges.push((from, first));
            ranges.push((stop, end));
        }
        held.sort_unstable();
        Ok(held)
    }

    fn byte_held(&self, byte: u64) -> Result<bool, LockFileError> {
        Ok(self.first_lock(byte, 1)?.is_some())
    }

    fn first_lock(&self, start: u64, length: u64) -> Result<Option<(u64, u64)>, LockFileError> {
        any_lock(self.fd(), start, length).map_err(|e| self.io("F_GETLK", e))
    }

    /// Takes [`SIDECAR_BYTE`] for the life of this process. Returns false if a live sidecar holds it.
    pub fn claim_sidecar(&self) -> Result<bool, LockFileError> {
        match try_lock(self.fd(), Owner::Process, SIDECAR_BYTE, 1) {
            Ok(()) => Ok(true),
            Err(Errno::ACCESS | Errno::AGAIN) => Ok(false),
            Err(e) => Err(self.io("F_SETLK", e)),
        }
    }
}

/// A process's proof of life: the lock on its byte of a sidecar's lock file, until it is dropped.
#[derive(Debug)]
pub struct HeldLock {
    _fd: OwnedFd,
    pub number: u32,
}

impl HeldLock {
    /// Locks the byte `number` of the file that the sidecar passed. The process must have no other descriptor of the file.
    pub fn take(fd: OwnedFd, number: u32) -> Result<Self, Errno> {
        try_lock(fd.as_fd(), Owner::Process, lock_offset(number), 1)?;
        Ok(Self { _fd: fd, number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_on_request_takes_back_its_own_boot_and_no_health() {
        let folder = tempfile::tempdir().unwrap();
        let lock = LockFile::open(&folder.path().join("sidecar.lock")).unwrap();
        for before in 0..3 {
            assert_eq!(lock.begin_boot().unwrap(), before);
        }
        let before = lock.begin_boot().unwrap();
        lock.ended_on_request(before).unwrap();
        assert_eq!(lock.begin_boot().unwrap(), 3, "this boot does not count");
        lock.healthy().unwrap();
        lock.ended_on_request(3).unwrap();
        assert_eq!(lock.begin_boot().unwrap(), 0, "health stays");
    }

    #[test]
    fn a_peer_that_locks_the_whole_file_costs_no_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sidecar.lock");
        let lock = LockFile::open(&path).unwrap();
        lock.store(&Header {
            next_lock: u32::MAX.into(),
            ..Header::NEW
        })
        .unwrap();
        // A lock of an open file conflicts with those of its own process too.
        let hold = |start, length| {
            let peer = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
            try_lock(peer.as_fd(), Owner::OpenFile, start, length).unwrap();
            peer
        };
        let most = HELD_MAX as u64;
        let peer = hold(lock_offset(5), most);
        assert_eq!(lock.held().unwrap().len(), HELD_MAX);
        let other = hold(lock_offset(u32::MAX - 1), 1);
        assert!(matches!(
            lock.held(),
            Err(LockFileError::TooManyLocks { .. })
        ));
        drop((peer, other));
        let _peer = hold(0, 0);
        assert!(matches!(
            lock.held(),
            Err(LockFileError::TooManyLocks { .. })
        ));
    }
}
