//! System calls that the doctor tries and that have no safe wrapper.
#![allow(unsafe_code)]

use kvcachepool_memory::mapping::Mapping;
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;

/// Owner of a record lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The process's: `F_SETLK`.
    Process,
    /// The open file's: `F_OFD_SETLK`.
    OpenFile,
}

/// Takes a write lock on the first byte of a file without waiting, or returns the error.
pub fn record_lock(fd: BorrowedFd<'_>, owner: Owner) -> Result<(), Errno> {
    // SAFETY: flock is plain old data; all zero is a valid value, and open-file locks need a pid of zero.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_len = 1;
    let command = match owner {
        Owner::Process => libc::F_SETLK,
        Owner::OpenFile => libc::F_OFD_SETLK,
    };
    // SAFETY: fd is open; `lock` is a valid flock structure that the kernel only reads.
    let rc = unsafe { libc::fcntl(fd.as_raw_fd(), command, &lock) };
    if rc == 0 { Ok(()) } else { Err(last_error()) }
}

/// Bytes of `struct io_uring_params` (`linux/io_uring.h`); all zero asks for nothing special.
const RING_PARAMETERS_BYTES: usize = 120;

/// Creates the smallest ring, and closes it.
pub fn io_uring() -> Result<(), Errno> {
    let mut parameters = [0u64; RING_PARAMETERS_BYTES / 8];
    // SAFETY: the kernel reads and writes no more than the structure's bytes, which the array is as long as and aligned for.
    let rc = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1u32, parameters.as_mut_ptr()) };
    match libc::c_int::try_from(rc) {
        // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
        Ok(fd) if fd >= 0 => drop(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => return Err(last_error()),
    }
    Ok(())
}

/// Locks the pages of a whole mapping in memory. They are unlocked with its end.
pub fn page_lock(mapping: &Mapping) -> Result<(), Errno> {
    let bytes = mapping.length();
    let start = mapping.address(0, bytes).ok_or(Errno::INVAL)?;
    // SAFETY: the range is that of a live mapping; locking changes no content.
    unsafe { rustix::mm::mlock(start.as_ptr().cast(), bytes as usize) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
