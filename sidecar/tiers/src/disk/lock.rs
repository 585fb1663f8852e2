//! The record lock that keeps two sidecars out of one folder.
#![allow(unsafe_code)]

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use std::io;

/// A write lock on a file, held as long as this value lives. It belongs to the open file, not to the process: a second open of the
/// folder by the same process is refused too, and closing another descriptor of the file does not release it.
#[derive(Debug)]
pub struct Lock {
    fd: OwnedFd,
}

impl Lock {
    /// Takes the lock. `Ok(None)`: another open file holds it.
    pub fn take(fd: OwnedFd) -> io::Result<Option<Self>> {
        // SAFETY: flock is plain old data; all zero is a valid value, and open-file locks need a pid of zero.
        let mut whole: libc::flock = unsafe { std::mem::zeroed() };
        whole.l_type = libc::F_WRLCK as libc::c_short;
        whole.l_whence = libc::SEEK_SET as libc::c_short;
        // SAFETY: fd is open; `whole` is a valid flock structure that the kernel only reads.
        let rc = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &whole) };
        if rc == 0 {
            return Ok(Some(Self { fd }));
        }
        let error = io::Error::last_os_error();
        match Errno::from_io_error(&error) {
            Some(Errno::ACCESS | Errno::AGAIN) => Ok(None),
            _ => Err(error),
        }
    }

    /// Device and inode number of the locked file.
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let stat = fstat(&self.fd)?;
        Ok((stat.st_dev, stat.st_ino))
    }
}
