//! What can be found out about a descriptor that another process passed: nothing it says about itself is believed.
#![allow(unsafe_code)]

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

/// What a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Names a process and can be polled for its end.
    Pidfd {
        /// The process has ended already.
        ended: bool,
    },
    /// Anonymous shared memory.
    Memfd {
        /// Bytes.
        size: u64,
        /// It can neither shrink nor grow: mapping it is safe.
        sealed: bool,
        /// Device and inode: the same file has the same pair, whichever descriptor names it.
        inode: (u64, u64),
    },
    /// Neither.
    Other,
}

/// Looks at a descriptor. Total: a descriptor that cannot be looked at is [`Kind::Other`].
pub fn look(fd: BorrowedFd<'_>) -> Kind {
    if let Ok(seals) = fcntl_get_seals(fd) {
        let Ok(stat) = fstat(fd) else {
            return Kind::Other;
        };
        return Kind::Memfd {
            size: u64::try_from(stat.st_size).unwrap_or(0),
            sealed: seals.contains(SealFlags::SHRINK | SealFlags::GROW),
            inode: (stat.st_dev, stat.st_ino),
        };
    }
    // Only a pidfd has a `Pid:` line; it says 0 for a process of a sibling container and -1 for one that was reaped.
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
    if !info.is_ok_and(|text| text.lines().any(|line| line.starts_with("Pid:"))) {
        return Kind::Other;
    }
    match has_ended(fd) {
        Some(ended) => Kind::Pidfd { ended },
        None => Kind::Other,
    }
}

/// Has the process behind this pidfd ended? `None` when it cannot be polled.
pub fn has_ended(pidfd: BorrowedFd<'_>) -> Option<bool> {
    let mut set = [PollFd::new(&pidfd, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut set, Some(&now)).ok()?;
    let events = set[0].revents();
    if events.contains(PollFlags::NVAL) {
        return None;
    }
    Some(!events.is_empty())
}

/// SO_PEERPIDFD of linux/socket.h (6.5 and newer): a pidfd of the process that connected.
const SO_PEERPIDFD: libc::c_int = 77;

/// The pidfd of the process at the other end, where the kernel offers it.
pub fn peer_pidfd(socket: impl AsFd) -> Option<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option writes one int; pointer and length describe exactly that int.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            std::ptr::from_mut(&mut fd).cast(),
            &mut length,
        )
    };
    if rc != 0 || fd < 0 {
        return None;
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}
