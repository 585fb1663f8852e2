//! Socket calls at addresses of the arena: bytes move between kernel and slot without a copy.
#![allow(unsafe_code)]

use crate::Span;
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;
use std::io;
use std::ptr::NonNull;

/// Most bytes per call, so that other tasks of the thread get their turn, and received bytes are still in the CPU cache when they are
/// hashed.
const CALL_BYTES_MAX: u64 = 512 << 10;

/// Receives at most `bytes` bytes into a span from `at` on. Does not block.
pub fn receive(fd: BorrowedFd<'_>, span: &Span, at: u64, bytes: u64) -> io::Result<usize> {
    let (start, bytes) = range(span, at, bytes)?;
    // SAFETY: `range` returned an address within a live mapping that the span holds until this returns. The kernel writes there and keeps
    // no reference; no Rust reference to the bytes is created.
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

/// Bytes of a span, and bytes before and after them.
pub struct Around<'a> {
    /// Sent first.
    pub before: &'a [u8],
    pub span: &'a Span,
    /// Offset of the first byte in the span.
    pub at: u64,
    /// Number of bytes of the span.
    pub bytes: u64,
    /// Sent last.
    pub behind: &'a [u8],
}

/// Sends as many of the first bytes as one call takes. Does not block.
pub fn send(fd: BorrowedFd<'_>, all: &Around<'_>) -> io::Result<usize> {
    let (start, bytes) = range(all.span, all.at, all.bytes)?;
    // The rest of the span must be sent before `behind`.
    let behind = match bytes as u64 == all.bytes {
        true => all.behind,
        false => &[],
    };
    let part = |start: *const u8, bytes| libc::iovec {
        iov_base: start.cast_mut().cast(),
        iov_len: bytes,
    };
    let mut parts = [
        part(all.before.as_ptr(), all.before.len()),
        part(start.as_ptr(), bytes),
        part(behind.as_ptr(), behind.len()),
    ];
    // SAFETY: plain old data, for which zeros are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    // SAFETY: the parts live until this returns; for the span's part as in `receive`. The kernel only reads.
    let done = unsafe {
        libc::sendmsg(
            fd.as_raw_fd(),
            &message,
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
    use crate::testing::suite::{Memory, bytes_of, untouched};
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
        let all = |span, at, bytes| Around {
            before: b"<",
            span,
            at,
            bytes,
            behind: b">",
        };
        assert_eq!(send(far.as_fd(), &all(&span, 1, 6)).unwrap(), 8);
        assert_eq!(send(far.as_fd(), &all(&span, 10, 0)).unwrap(), 2);
        let mut back = [0; 10];
        near.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"<1abcd6><>");
        let other = memory.span(10);
        for (at, bytes) in [(0, 11), (10, 1), (11, 0), (u64::MAX, 1), (5, u64::MAX)] {
            assert!(receive(far.as_fd(), &other, at, bytes).is_err());
            assert!(send(far.as_fd(), &all(&other, at, bytes)).is_err());
        }
        assert!(untouched(&other));
    }

    #[test]
    fn nothing_behind_a_span_goes_before_all_of_it() {
        let memory = Memory::new(4 << 20);
        let (mut near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let bytes: Vec<u8> = (0..2u32 << 20).map(|n| (n / 7) as u8).collect();
        let span = memory.filled(&bytes);
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            near.read_to_end(&mut all).unwrap();
            all
        });
        let (mut sent, end) = (0, bytes.len() + 8);
        while sent < end {
            let (before, behind) = (
                &b"<<<<"[sent.min(4)..],
                &b">>>>"[sent.saturating_sub(end - 4)..],
            );
            let at = sent.saturating_sub(4).min(bytes.len()) as u64;
            let all = Around {
                before,
                span: &span,
                at,
                bytes: bytes.len() as u64 - at,
                behind,
            };
            match send(far.as_fd(), &all) {
                Ok(n) => sent += n,
                Err(e) => {
                    assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
                    let wait = rustix::event::PollFlags::OUT;
                    let mut fds = [rustix::event::PollFd::new(&far, wait)];
                    rustix::event::poll(&mut fds, None).unwrap();
                }
            }
        }
        drop(far);
        assert!(reader.join().unwrap() == [&b"<<<<"[..], &bytes, b">>>>"].concat());
    }
}
