//! The record lock that keeps two sidecars out of one folder.

use kvcachepool_memory::record_lock::{Owner, try_lock};
use rustix::fd::{AsFd, OwnedFd};
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
        match try_lock(fd.as_fd(), Owner::OpenFile, 0, 0) {
            Ok(()) => Ok(Some(Self { fd })),
            Err(Errno::ACCESS | Errno::AGAIN) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Device and inode number of the locked file.
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let stat = fstat(&self.fd)?;
        Ok((stat.st_dev, stat.st_ino))
    }
}
