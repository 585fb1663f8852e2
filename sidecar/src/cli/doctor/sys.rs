//! System calls that the doctor tries and that have no safe wrapper.
#![allow(unsafe_code)]

use kvcachepool_memory::mapping::Mapping;
use kvcachepool_memory::record_lock::last_error;
use rustix::fd::{FromRawFd, OwnedFd};
use rustix::io::Errno;

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
