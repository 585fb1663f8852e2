//! Vectored I/O at addresses of the arena: the only place of the tiers with files that uses such addresses.
#![allow(unsafe_code)]

use crate::Span;
use kvcachepool_protocol::object::ALIGN as UNIT;
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;
use std::io;
use std::ptr::NonNull;

/// Most vectors per system call (`IOV_MAX`).
const VECTORS_MAX: usize = 1024;

/// Zeroed heap memory, aligned to 4 KiB, for transfers that direct I/O cannot do in place.
#[derive(Debug)]
pub struct Block {
    memory: Vec<u8>,
    from: usize,
    length: usize,
}

impl Block {
    /// `length` bytes, rounded up to 4 KiB.
    pub fn new(length: u64) -> Self {
        let length = length.next_multiple_of(UNIT) as usize;
        let memory = vec![0; length + UNIT as usize];
        let from = memory.as_ptr().align_offset(UNIT as usize);
        Self {
            memory,
            from,
            length,
        }
    }

    pub fn bytes(&self) -> &[u8] {
        self.memory
            .get(self.from..self.from + self.length)
            .unwrap_or_default()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory
            .get_mut(self.from..self.from + self.length)
            .unwrap_or_default()
    }
}

/// One contiguous piece of memory of a transfer.
#[derive(Debug)]
pub enum Part {
    /// In the arena; the span keeps it alive.
    Arena {
        span: Span,
        /// Offset in the span.
        at: u64,
        bytes: u64,
    },
    /// Heap memory.
    Block(Block),
}

impl Part {
    /// Address and length. `None`: outside of its span.
    fn vector(&mut self) -> Option<libc::iovec> {
        let (start, bytes) = match self {
            Self::Arena { span, at, bytes } => {
                at.checked_add(*bytes).filter(|end| *end <= span.length)?;
                let start = span.arena.address(span.offset.checked_add(*at)?, *bytes)?;
                (start, usize::try_from(*bytes).ok()?)
            }
            Self::Block(block) => {
                let bytes = block.bytes_mut();
                (NonNull::from(&mut *bytes).cast::<u8>(), bytes.len())
            }
        };
        Some(libc::iovec {
            iov_base: start.as_ptr().cast(),
            iov_len: bytes,
        })
    }
}

/// Writes all parts consecutively from `offset` of the file on.
pub fn write_all(fd: BorrowedFd<'_>, offset: u64, parts: &mut [Part]) -> io::Result<()> {
    transfer(offset, parts, |vectors, count, offset| {
        // SAFETY: every vector was made by `Part::vector` of a part that is borrowed until `transfer` ends: a checked range of a live
        // mapping or of heap memory, from which the kernel only reads. No reference to arena bytes is created.
        unsafe { libc::pwritev(fd.as_raw_fd(), vectors, count, offset) }
    })
}

/// Fills all parts consecutively from `offset` of the file on.
pub fn read_all(fd: BorrowedFd<'_>, offset: u64, parts: &mut [Part]) -> io::Result<()> {
    transfer(offset, parts, |vectors, count, offset| {
        // SAFETY: as for `write_all`. The parts are borrowed for writing, and the arena's pages are written only through their address, as
        // every other writer does.
        unsafe { libc::preadv(fd.as_raw_fd(), vectors, count, offset) }
    })
}

fn transfer(
    mut offset: u64,
    parts: &mut [Part],
    call: impl Fn(*const libc::iovec, libc::c_int, libc::off_t) -> isize,
) -> io::Result<()> {
    let vectors: Option<Vec<libc::iovec>> = parts.iter_mut().map(Part::vector).collect();
    let mut vectors = vectors.ok_or(Errno::FAULT)?;
    let mut rest = vectors.as_mut_slice();
    loop {
        let empty = rest.iter().take_while(|v| v.iov_len == 0).count();
        rest = rest.get_mut(empty..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(());
        }
        let count = rest.len().min(VECTORS_MAX);
        let at = libc::off_t::try_from(offset).map_err(|_| Errno::FBIG)?;
        match call(rest.as_ptr(), count as libc::c_int, at) {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            done if done > 0 => {
                offset += done as u64;
                advance(rest, done as usize);
            }
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}

/// Removes the transferred bytes from the front of the vectors.
fn advance(vectors: &mut [libc::iovec], mut done: usize) {
    for vector in vectors {
        let part = done.min(vector.iov_len);
        vector.iov_base = vector.iov_base.wrapping_byte_add(part);
        vector.iov_len -= part;
        done -= part;
        if done == 0 {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use std::io::{Read, Seek, Write};

    fn blocks(sizes: &[u64]) -> Vec<Part> {
        sizes.iter().map(|n| Part::Block(Block::new(*n))).collect()
    }

    #[test]
    fn blocks_are_aligned_and_zero() {
        for length in [1, 4095, 4096, 4097, 1 << 20] {
            let block = Block::new(length);
            assert!((block.bytes().as_ptr() as usize).is_multiple_of(4096));
            assert_eq!(block.bytes().len() as u64, length.next_multiple_of(4096));
            assert!(block.bytes().iter().all(|b| *b == 0));
        }
    }

    #[test]
    fn more_parts_than_one_call_takes_are_all_moved_in_order() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..2500 * 4096u32).map(|i| (i / 4096 + i) as u8).collect();
        file.write_all(&bytes).unwrap();
        let mut parts = blocks(&[4096; 2500]);
        read_all(file.as_fd(), 0, &mut parts).unwrap();
        let copy = tempfile::tempfile().unwrap();
        write_all(copy.as_fd(), 4096, &mut parts).unwrap();
        let (mut copy, mut read) = (copy, Vec::new());
        copy.rewind().unwrap();
        copy.read_to_end(&mut read).unwrap();
        assert!(read[..4096].iter().all(|b| *b == 0));
        assert!(read[4096..] == bytes);
    }

    #[test]
    fn a_file_that_ends_too_soon_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 5000]).unwrap();
        let got = read_all(file.as_fd(), 0, &mut blocks(&[4096, 4096]));
        assert_eq!(got.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_was_moved_is_taken_off_the_front() {
        let mut bytes = [0u8; 30];
        let start = bytes.as_mut_ptr();
        let vector = |at: usize, n: usize| libc::iovec {
            iov_base: start.wrapping_add(at).cast(),
            iov_len: n,
        };
        let mut vectors = [vector(0, 10), vector(10, 0), vector(10, 20)];
        advance(&mut vectors, 13);
        assert_eq!(vectors.map(|v| v.iov_len), [0, 0, 17]);
        assert_eq!(vectors[2].iov_base, start.wrapping_add(13).cast());
    }
}
