//! Signals as a readable descriptor, so that the supervisor's loop handles them one at a time.
#![allow(unsafe_code)]

use kvcachepool_memory::record_lock::last_error;
use rustix::fd::{AsFd, FromRawFd, OwnedFd};
use rustix::io::{Errno, read};

/// Signals that the supervisor handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM or SIGINT: end.
    Terminate,
    /// SIGHUP: reload the config.
    Reload,
    /// SIGCHLD: a child ended.
    Child,
}

/// Blocks the signals for this process and returns the descriptor that they are read from. The engine clears the mask that it
/// inherits.
pub fn open() -> Result<OwnedFd, Errno> {
    // SAFETY: sigset_t is plain old data that sigemptyset fills; all pointers are to locals; signalfd returns a new descriptor or -1.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGCHLD] {
            libc::sigaddset(&mut set, signal);
        }
        if libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) != 0 {
            return Err(last_error());
        }
        let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            return Err(last_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

pub fn next(fd: impl AsFd) -> Option<Signal> {
    let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
    loop {
        match read(fd.as_fd(), &mut info) {
            Ok(n) if n == info.len() => {}
            Err(Errno::INTR) => continue,
            _ => return None,
        }
        let number = i32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        return Some(match number {
            libc::SIGHUP => Signal::Reload,
            libc::SIGCHLD => Signal::Child,
            _ => Signal::Terminate,
        });
    }
}
