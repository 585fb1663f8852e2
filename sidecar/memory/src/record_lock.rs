//! Record locks (`fcntl`) of the lock file and of folders that only one sidecar may use.
#![allow(unsafe_code)]

use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;

/// Owner of a record lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The process's: `F_SETLK`.
    Process,
    /// The open file's: `F_OFD_SETLK`.
    OpenFile,
}

/// Takes a write lock on `length` bytes of a file without waiting. Length 0: up to the end of the file, however long it gets.
pub fn try_lock(fd: BorrowedFd<'_>, owner: Owner, start: u64, length: u64) -> Result<(), Errno> {
    let lock = write_lock(start, length);
    let command = match owner {
        Owner::Process => libc::F_SETLK,
        Owner::OpenFile => libc::F_OFD_SETLK,
    };
    // SAFETY: fd is open; `lock` is a valid flock structure that the kernel only reads.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, &lock) } {
        0 => Ok(()),
        _ => Err(last_error()),
    }
}

/// A lock of another owner in this range, as start and length. The kernel names any of them, not the lowest.
pub fn any_lock(fd: BorrowedFd<'_>, start: u64, length: u64) -> Result<Option<(u64, u64)>, Errno> {
    let mut lock = write_lock(start, length);
    // SAFETY: fd is open; `lock` is a valid flock structure that the kernel overwrites.
    let rc = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLK, &mut lock) };
    if rc != 0 {
        return Err(last_error());
    }
    let found = i32::from(lock.l_type) != libc::F_UNLCK;
    Ok(found.then_some((lock.l_start as u64, lock.l_len as u64)))
}

fn write_lock(start: u64, length: u64) -> libc::flock {
    // SAFETY: flock is plain old data; all zero is a valid value, and open-file locks need a pid of zero.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start as libc::off_t;
    lock.l_len = length as libc::off_t;
    lock
}

/// The error of the last system call that has no safe wrapper.
pub fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
