//! Moves objects between slots of a container and the arena: in place where addresses allow direct I/O, otherwise through a small heap
//! block. Disk I/O uses whole multiples of 4 KiB; in the arena only the bytes of a section are touched.

use super::classes::UNIT;
use crate::Span;
use crate::files::raw::{self, Block, Part};
use crate::files::sections::Section;
use rustix::fd::BorrowedFd;
use std::io;

/// Most bytes of an object that are in heap blocks at a time.
const BOUNCE_BYTES: u64 = 1 << 20;
/// Most parts of one transfer.
const PARTS_MAX: usize = 1024;

/// Writes the header at `offset`, and the sections at their offsets, which are multiples of 4 KiB, in order.
pub fn write(fd: BorrowedFd<'_>, offset: u64, head: &[u8], sections: &[Section]) -> io::Result<()> {
    let mut block = Block::new(head.len() as u64);
    if let Some(into) = block.bytes_mut().get_mut(..head.len()) {
        into.copy_from_slice(head);
    }
    let mut run = Run::new(fd, Direction::Write, offset);
    run.push(Part::Block(block), head.len() as u64, None);
    run.sections(sections)
}

/// Reads sections, in order of their offsets.
pub fn read(fd: BorrowedFd<'_>, sections: &[Section]) -> io::Result<()> {
    Run::new(fd, Direction::Read, 0).sections(sections)
}

/// Reads a header of `head` bytes at `offset`, and the sections that follow it without a gap and can be read in place.
pub fn read_with_head(
    fd: BorrowedFd<'_>,
    offset: u64,
    head: u64,
    sections: &[Section],
) -> io::Result<Block> {
    let section = |section: &Section| Part::Arena {
        span: section.span.clone(),
        at: 0,
        bytes: section.span.length,
    };
    let mut parts = vec![Part::Block(Block::new(head))];
    parts.extend(sections.iter().map(section));
    raw::read_all(fd, offset, &mut parts)?;
    match parts.into_iter().next() {
        Some(Part::Block(block)) => Ok(block),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Whether a whole span can be transferred in place.
pub fn goes_in_place(span: &Span) -> bool {
    pieces(span) == [(0, span.length, true)]
}

pub fn read_block(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<Block> {
    let mut parts = [Part::Block(Block::new(bytes))];
    raw::read_all(fd, offset, &mut parts)?;
    match parts {
        [Part::Block(block)] => Ok(block),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

/// Destination of a block's bytes after a read.
#[derive(Debug)]
struct Back {
    part: usize,
    span: Span,
    at: u64,
    bytes: u64,
}

/// Parts that are consecutive in the file.
#[derive(Debug)]
struct Run<'a> {
    fd: BorrowedFd<'a>,
    direction: Direction,
    start: u64,
    end: u64,
    parts: Vec<Part>,
    bounced: u64,
    back: Vec<Back>,
}

impl<'a> Run<'a> {
    fn new(fd: BorrowedFd<'a>, direction: Direction, start: u64) -> Self {
        Self {
            fd,
            direction,
            start,
            end: start,
            parts: Vec::new(),
            bounced: 0,
            back: Vec::new(),
        }
    }

    fn push(&mut self, part: Part, bytes: u64, back: Option<Back>) {
        self.end += bytes.next_multiple_of(UNIT);
        self.parts.push(part);
        self.back.extend(back);
    }

    fn sections(mut self, sections: &[Section]) -> io::Result<()> {
        for section in sections {
            for (at, bytes, in_place) in pieces(&section.span) {
                let bounce = if in_place {
                    0
                } else {
                    bytes.next_multiple_of(UNIT)
                };
                let offset = section.offset + at;
                if offset != self.end
                    || self.parts.len() >= PARTS_MAX
                    || self.bounced + bounce > BOUNCE_BYTES
                {
                    self.flush(offset)?;
                }
                self.piece(&section.span, at, bytes, in_place)?;
            }
        }
        self.flush(0)
    }

    fn piece(&mut self, span: &Span, at: u64, bytes: u64, in_place: bool) -> io::Result<()> {
        let span = span.clone();
        if in_place {
            self.push(Part::Arena { span, at, bytes }, bytes, None);
            return Ok(());
        }
        let mut block = Block::new(bytes);
        self.bounced += block.bytes().len() as u64;
        let back = match self.direction {
            Direction::Write => {
                let into = block.bytes_mut().get_mut(..bytes as usize);
                if !into.is_some_and(|into| span.read(at, into)) {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                None
            }
            Direction::Read => Some(Back {
                part: self.parts.len(),
                span,
                at,
                bytes,
            }),
        };
        self.push(Part::Block(block), bytes, back);
        Ok(())
    }

    /// Transfers the parts, then continues at `offset`.
    fn flush(&mut self, offset: u64) -> io::Result<()> {
        let parts = &mut self.parts;
        match self.direction {
            Direction::Read => raw::read_all(self.fd, self.start, parts)?,
            Direction::Write => raw::write_all(self.fd, self.start, parts)?,
        }
        for back in self.back.drain(..) {
            let Some(Part::Block(block)) = parts.get(back.part) else {
                continue;
            };
            let from = block.bytes().get(..back.bytes as usize);
            if !from.is_some_and(|from| back.span.write(back.at, from)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
        }
        parts.clear();
        (self.start, self.end, self.bounced) = (offset, offset, 0);
        Ok(())
    }
}

/// Cuts a span into pieces (offset, bytes, in place): whole 4 KiB in place if the address is a multiple of 4 KiB.
fn pieces(span: &Span) -> Vec<(u64, u64, bool)> {
    let aligned = span
        .arena
        .address(span.offset, span.length)
        .is_some_and(|start| (start.as_ptr() as u64).is_multiple_of(UNIT));
    let in_place = if aligned {
        span.length - span.length % UNIT
    } else {
        0
    };
    let mut pieces = Vec::with_capacity(2);
    if in_place > 0 {
        pieces.push((0, in_place, true));
    }
    let mut at = in_place;
    while at < span.length {
        let bytes = (span.length - at).min(BOUNCE_BYTES);
        pieces.push((at, bytes, false));
        at += bytes;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_memory::mapping::Mapping;
    use kvcachepool_memory::memfd::{Pages, sealed};
    use proptest::prelude::*;
    use rustix::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    const ARENA: u64 = 8 << 20;

    fn arena(seed: u8) -> Arc<Mapping> {
        let fd = sealed("transfer-test", ARENA, Pages::Base).unwrap();
        let mapping = Mapping::new(fd.as_fd(), ARENA).unwrap();
        let bytes: Vec<u8> = (0..ARENA).map(|i| (i ^ (i >> 9)) as u8 ^ seed).collect();
        mapping.write(0, &bytes);
        Arc::new(mapping)
    }

    fn all(arena: &Mapping) -> Vec<u8> {
        let mut bytes = vec![0; ARENA as usize];
        assert!(arena.read(0, &mut bytes));
        bytes
    }

    fn sections(arena: &Arc<Mapping>, lengths: &[(u64, u64)], from: u64) -> Vec<Section> {
        let (mut offset, mut place) = (from, 0u64);
        lengths
            .iter()
            .map(|(length, shift)| {
                let span = Span::new(arena.clone(), place + shift, *length, Arc::new(())).unwrap();
                let section = Section { offset, span };
                offset += length.next_multiple_of(UNIT);
                place = (place + shift + length).next_multiple_of(UNIT);
                section
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn sections_come_back_and_no_byte_beside_them_is_touched(
            lengths in proptest::collection::vec((1u64..1 << 20, 0u64..2), 1..6),
            cut in 0u64..3,
            shift in 0u64..2,
        ) {
            // Lengths around multiples of 4 KiB; addresses that are such multiples, and others.
            let lengths: Vec<(u64, u64)> = lengths
                .iter()
                .map(|(n, odd)| ((n / UNIT * UNIT + cut).max(1), odd * 8 * shift))
                .collect();
            let (from, into) = (arena(1), arena(2));
            let file = tempfile::tempfile().unwrap();
            let head = vec![7; 8192];
            write(file.as_fd(), UNIT, &head, &sections(&from, &lengths, UNIT * 3)).unwrap();
            let mut expected = all(&into);
            let wanted = sections(&into, &lengths, UNIT * 3);
            let skipped: Vec<Section> = wanted.iter().step_by(2).cloned().collect();
            read(file.as_fd(), &skipped).unwrap();
            let source = all(&from);
            for section in &skipped {
                let span = &section.span;
                let range = span.offset as usize..(span.offset + span.length) as usize;
                expected[range.clone()].copy_from_slice(&source[range]);
            }
            prop_assert!(all(&into) == expected);
            let read = read_block(file.as_fd(), UNIT, 8192).unwrap();
            prop_assert_eq!(read.bytes(), &head[..]);
            let mut on_disk = vec![0; file.metadata().unwrap().len() as usize];
            file.read_exact_at(&mut on_disk, 0).unwrap();
            for section in sections(&from, &lengths, UNIT * 3) {
                let end = (section.offset + section.span.length) as usize;
                let padding = &on_disk[end..end.next_multiple_of(UNIT as usize)];
                prop_assert!(padding.iter().all(|b| *b == 0), "zeros behind a section");
            }
        }
    }
}
