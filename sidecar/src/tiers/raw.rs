//! Socket calls at addresses of the arena: bytes go between kernel and slot, without a copy of ours.
#![allow(unsafe_code)]

use crate::tiers::Span;
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;
use std::io;
use std::ptr::NonNull;

/// Most bytes of one call: so that other tasks of the thread have their turn.
const CALL_BYTES_MAX: u64 = 512 << 10;

/// Receives at most `bytes` bytes into a span, from `at` on. Does not block.
pub fn receive(fd: BorrowedFd<'_>, span: &Span, at: u64, bytes: u64) -> io::Result<usize> {
    let (start, bytes) = range(span, at, bytes)?;
    // SAFETY: `range` gave an address within a live mapping that the span holds until this returns. The kernel writes there and keeps
    // nothing; no reference to the bytes is made.
    let done = unsafe {
        libc::recv(
            fd.as_raw_fd(),
            start.as_ptr().cast(),
            bytes,
            libc::MSG_DONTWAIT,
        )
    };
    moved(done)
}

/// Sends at most `bytes` bytes of a span, from `at` on. Does not block.
pub fn send(fd: BorrowedFd<'_>, span: &Span, at: u64, bytes: u64) -> io::Result<usize> {
    let (start, bytes) = range(span, at, bytes)?;
    // SAFETY: as for `receive`; the kernel only reads.
    let done = unsafe {
        libc::send(
            fd.as_raw_fd(),
            start.as_ptr().cast(),
            bytes,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    moved(done)
}

fn range(span: &Span, at: u64, bytes: u64) -> io::Result<(NonNull<u8>, usize)> {
    let bytes = bytes.min(CALL_BYTES_MAX);
    let end = at.checked_add(bytes).filter(|end| *end <= span.length);
    let start = end.and_then(|_| span.arena.address(span.offset.checked_add(at)?, bytes));
    Ok((start.ok_or(Errno::FAULT)?, bytes as usize))
}

fn moved(done: isize) -> io::Result<usize> {
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::suite::{Memory, bytes_of, untouched};
    use rustix::fd::AsFd;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn bytes_go_exactly_where_they_shall_and_nowhere_outside_a_span() {
        let memory = Memory::new(1 << 20);
        let (mut near, far) = UnixStream::pair().unwrap();
        near.write_all(b"abcdef").unwrap();
        let span = memory.filled(b"0123456789");
        assert_eq!(receive(far.as_fd(), &span, 2, 4).unwrap(), 4);
        assert_eq!(bytes_of(&span), b"01abcd6789");
        assert_eq!(send(far.as_fd(), &span, 1, 6).unwrap(), 6);
        let mut back = [0; 6];
        near.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"1abcd6");
        let other = memory.span(10);
        for (at, bytes) in [(0, 11), (10, 1), (11, 0), (u64::MAX, 1), (5, u64::MAX)] {
            assert!(receive(far.as_fd(), &other, at, bytes).is_err());
            assert!(send(far.as_fd(), &other, at, bytes).is_err());
        }
        assert!(untouched(&other));
    }
}
