//! The lock file beside the socket: counters that never repeat, and locks that show whether a process of an earlier boot is alive.
#![allow(unsafe_code)]

use kvcachepool_protocol::lockfile::{
    LockFile as Header, MAGIC, SIDECAR_BYTE, VERSION, lock_offset,
};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::io::{Errno, pread, pwrite};
use std::path::{Path, PathBuf};
use zerocopy::{FromBytes, IntoBytes};

const HEADER_BYTES: usize = size_of::<Header>();

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
            file.store(&Header {
                magic: MAGIC,
                version: VERSION.into(),
                next_lock: 1.into(),
                next_region: 1.into(),
                unhealthy_boots: 0.into(),
                reserved: 0.into(),
            })?;
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
        let foreign = || LockFileError::Foreign {
            path: self.path.clone(),
        };
        if got != HEADER_BYTES {
            return Err(foreign());
        }
        let header = Header::read_from_bytes(&bytes).map_err(|_| foreign())?;
        if header.magic != MAGIC || header.version.get() != VERSION {
            return Err(foreign());
        }
        Ok(header)
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
    /// before and after it are queried again. The cost is per held lock, not per number.
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
        let mut lock = record(libc::F_WRLCK, start, length);
        // SAFETY: fd is open; `lock` is a valid flock structure that the kernel overwrites.
        let rc = unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_GETLK, &mut lock) };
        if rc != 0 {
            return Err(self.io("F_GETLK", last_error()));
        }
        if i32::from(lock.l_type) == libc::F_UNLCK {
            return Ok(None);
        }
        Ok(Some((lock.l_start as u64, lock.l_len as u64)))
    }

    /// Takes [`SIDECAR_BYTE`] for the life of this process. Returns false if a live sidecar holds it.
    pub fn claim_sidecar(&self) -> Result<bool, LockFileError> {
        match set_lock(self.fd.as_fd(), SIDECAR_BYTE) {
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
        set_lock(fd.as_fd(), lock_offset(number))?;
        Ok(Self { _fd: fd, number })
    }
}

fn set_lock(fd: BorrowedFd<'_>, byte: u64) -> Result<(), Errno> {
    let lock = record(libc::F_WRLCK, byte, 1);
    // SAFETY: fd is open; `lock` is a valid flock structure that the kernel only reads.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(last_error()),
    }
}

fn record(kind: libc::c_int, start: u64, length: u64) -> libc::flock {
    // SAFETY: flock is plain old data; all zero is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start as libc::off_t;
    lock.l_len = length as libc::off_t;
    lock
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
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
}
