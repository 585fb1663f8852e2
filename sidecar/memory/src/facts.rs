//! Properties of descriptors that other processes passed. They come from the kernel; nothing that the sender says is trusted.
#![allow(unsafe_code)]

use super::memfd::SEALS;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::{fcntl_get_seals, fstat};
use rustix::io::Errno;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Refers to a process, and can be polled for its end.
    Pidfd {
        /// The process has already ended.
        ended: bool,
    },
    /// Anonymous shared memory.
    Memfd {
        size: u64,
        /// It can neither shrink, grow, nor be sealed further, so mapping it is safe.
        sealed: bool,
        /// Device and inode. They are the same for every descriptor of one file.
        inode: (u64, u64),
    },
    Other,
}

/// Examines a descriptor. Never fails: a descriptor that cannot be examined is [`Kind::Other`].
pub fn look(fd: BorrowedFd<'_>) -> Kind {
    if let Ok(seals) = fcntl_get_seals(fd) {
        let Ok(stat) = fstat(fd) else {
            return Kind::Other;
        };
        return Kind::Memfd {
            size: u64::try_from(stat.st_size).unwrap_or(0),
            sealed: seals.contains(SEALS),
            inode: (stat.st_dev, stat.st_ino),
        };
    }
    // Only a pidfd has a `Pid:` line: 0 for a process of a sibling container, -1 for a reaped one.
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
    if !info.is_ok_and(|text| text.lines().any(|line| line.starts_with("Pid:"))) {
        return Kind::Other;
    }
    match has_ended(fd) {
        Some(ended) => Kind::Pidfd { ended },
        None => Kind::Other,
    }
}

/// Whether the process of this pidfd has ended. `None` if the pidfd cannot be polled.
pub fn has_ended(pidfd: BorrowedFd<'_>) -> Option<bool> {
    let mut set = [PollFd::new(&pidfd, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    while let Err(e) = poll(&mut set, Some(&now)) {
        if e != Errno::INTR {
            return None;
        }
    }
    let events = set[0].revents();
    if events.contains(PollFlags::NVAL) {
        return None;
    }
    Some(!events.is_empty())
}

/// Peer's process id, user and group from the kernel. The process id is 0 across sibling containers, so no proof relies on it.
pub fn peer_credentials(socket: impl AsFd) -> Option<(i32, u32, u32)> {
    // Not through rustix: its process id type cannot hold the 0 that the kernel returns here.
    let peer: libc::ucred = socket_option(socket.as_fd(), libc::SO_PEERCRED)?;
    Some((peer.pid, peer.uid, peer.gid))
}

/// SO_PEERPIDFD of linux/socket.h (6.5 and newer): a pidfd of the process that connected.
const SO_PEERPIDFD: libc::c_int = 77;

/// The pidfd of the process at the other end, if the kernel provides it.
pub fn peer_pidfd(socket: impl AsFd) -> Option<OwnedFd> {
    let fd: libc::c_int = socket_option(socket.as_fd(), SO_PEERPIDFD)?;
    // SAFETY: the kernel has just created this descriptor for this process; it has no other owner.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A socket-level option with an integer-only value.
fn socket_option<T: PlainIntegers>(socket: BorrowedFd<'_>, option: libc::c_int) -> Option<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: pointer and length describe exactly `value`; the kernel writes no more than that.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            value.as_mut_ptr().cast(),
            &mut length,
        )
    };
    if rc != 0 || length as usize != size_of::<T>() {
        return None;
    }
    // SAFETY: the kernel filled it, and every bit pattern is a value of T.
    Some(unsafe { value.assume_init() })
}

/// Types for which every bit pattern is valid.
trait PlainIntegers: Copy {}
impl PlainIntegers for libc::c_int {}
impl PlainIntegers for libc::ucred {}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::SealFlags;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_peer_is_seen_as_the_kernel_shows_it() {
        let (a, _b) = UnixStream::pair().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(peer_credentials(&a).unwrap().0, own);
        // Absent on kernels before 6.5; where it is, it is a pidfd of a living process.
        if let Some(pidfd) = peer_pidfd(&a) {
            assert_eq!(look(pidfd.as_fd()), Kind::Pidfd { ended: false });
        }
    }

    #[test]
    fn a_pidfd_tells_the_end_of_its_process() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        assert_eq!(look(pidfd.as_fd()), Kind::Pidfd { ended: false });
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(has_ended(pidfd.as_fd()), Some(true));
    }

    #[test]
    fn files_and_sockets_are_other_and_a_memfd_that_lacks_a_seal_says_so() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert_eq!(look(file.as_fd()), Kind::Other);
        let (a, _b) = UnixStream::pair().unwrap();
        assert_eq!(look(a.as_fd()), Kind::Other);
        let plain =
            rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        for (seals, all) in [
            (SealFlags::empty(), false),
            // Others could add a seal that ends all writes.
            (SealFlags::SHRINK | SealFlags::GROW, false),
            (SEALS, true),
        ] {
            rustix::fs::fcntl_add_seals(&plain, seals).unwrap();
            let look = look(plain.as_fd());
            assert!(matches!(look, Kind::Memfd { sealed, .. } if sealed == all));
        }
    }
}
