//! Reads and writes objects: header and sections go between the file and their place in the arena without a copy. Blocks: for threads where
//! that is allowed.

use super::Folder;
use super::fault::failed;
use super::root::{Published, is_file, modified_s, open_file, sync};
use crate::files::fault::missing;
use crate::files::raw::{self, Block, Part};
use crate::files::sections::{Section, wanted};
use crate::{Cause, Get, Kind, Put, Stored, TierError};
use kvcachepool_protocol::object::{BadObject, HEADER_BYTES, Object, ObjectName, head_bytes};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Stat, fstat, statat};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Size of the first read of an object: most headers fit.
const FIRST_READ_BYTES: u64 = 16 << 10;

/// A file under an object's name. Another file under the name is another version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    inode: u64,
    modified: (i64, u64),
}

impl Version {
    pub fn of(found: &Stat) -> Self {
        Self {
            inode: found.st_ino,
            modified: (found.st_mtime, found.st_mtime_nsec),
        }
    }
}

impl Folder {
    /// Length of the object at this path; `None`: it does not exist.
    pub fn bytes(&self, path: &str) -> Result<Option<u64>, TierError> {
        let dir = self.root.dir()?;
        match statat(&dir, path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(is_file(&found).then(|| length(&found))),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::STALE) => Ok(None),
            Err(e) => Err(failed("look up", "an object", e).about(path)),
        }
    }

    /// Reads the header of an object, and sections into their places.
    pub fn get(&self, get: &Get) -> Result<Object, TierError> {
        let (dir, path) = (self.root.dir()?, get.name.s3(""));
        let found = |cause, detail: String| {
            TierError::new(Kind::FileSystem, cause, detail).about(path.clone())
        };
        let failed = |e: io::Error| match Errno::from_io_error(&e) {
            Some(Errno::NOENT | Errno::NOTDIR | Errno::STALE) => missing(Kind::FileSystem, &path),
            Some(Errno::LOOP) => found(Cause::Foreign, "the name is a symbolic link".into()),
            None if e.kind() == io::ErrorKind::UnexpectedEof => found(
                Cause::Corrupt,
                "the file is shorter than when it was opened".into(),
            ),
            _ => failed("read", "an object", e).about(path.clone()),
        };
        let file: File = open_file(dir.as_fd(), &path)
            .map_err(|e| failed(e.into()))?
            .into();
        let there = fstat(&file).map_err(|e| failed(e.into()))?;
        if !is_file(&there) {
            return Err(found(
                Cause::Foreign,
                "the name is not that of a file".into(),
            ));
        }
        self.tags.read(&path, Some(Version::of(&there)));
        let bad = |e: BadObject| found(Cause::of_head(&e), e.to_string());
        let total = length(&there);
        let mut head = vec![0; total.min(FIRST_READ_BYTES) as usize];
        file.read_exact_at(&mut head, 0).map_err(failed)?;
        if head.len() >= HEADER_BYTES {
            let needed = head_bytes(&head).map_err(bad)?;
            if needed > total {
                return Err(bad(BadObject::Torn { got: total, needed }));
            }
            let read = head.len();
            if needed > read as u64 {
                head.resize(needed as usize, 0);
                let rest = head.get_mut(read..).unwrap_or_default();
                file.read_exact_at(rest, read as u64).map_err(failed)?;
            }
        }
        let object = Object::decode(&head).map_err(bad)?;
        if object.name() != get.name {
            let detail = format!("the file holds the object {}", object.name().s3(""));
            return Err(found(Cause::Foreign, detail));
        }
        if object.total_bytes() != total {
            let says = object.total_bytes();
            let detail = format!("the file has {total} bytes, but its header says {says}");
            return Err(found(Cause::Corrupt, detail));
        }
        let sections = wanted(Kind::FileSystem, 0, &object, get)?;
        move_sections(&sections, |offset, parts| {
            raw::read_all(file.as_fd(), offset, parts)
        })
        .map_err(failed)?;
        Ok(object)
    }

    /// Writes an object, unless it exists.
    pub fn put(&self, put: Put) -> Result<Stored, TierError> {
        let Put { object, spans } = put;
        let path = object.name().s3("");
        let shape =
            |why: String| TierError::new(Kind::FileSystem, Cause::Shape, why).about(path.clone());
        let lengths = object.sections.iter().map(|s| s.stored_bytes);
        if !lengths.eq(spans.iter().map(|s| s.length)) {
            return Err(shape("spans and sections differ in length".into()));
        }
        let head = object.encode().map_err(|e| shape(e.to_string()))?;
        if ObjectName::from_s3("", &path).is_err() {
            return Err(shape("the object has no name".into()));
        }
        if self.bytes(&path)?.is_some() {
            return Ok(Stored::Already);
        }
        let offsets = object.offsets().into_iter();
        let sections: Vec<_> = offsets
            .zip(spans)
            .map(|(offset, span)| Section { offset, span })
            .collect();
        let dir = self.root.dir()?;
        let stored = self.write(&dir, &path, object.total_bytes(), &head, &sections);
        stored.map_err(|e| failed("write", "an object", e).about(path.clone()))
    }

    fn write(
        &self,
        dir: &OwnedFd,
        path: &str,
        total: u64,
        head: &[u8],
        sections: &[Section],
    ) -> io::Result<Stored> {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let folder = self.root.folder(dir, parent)?;
        let mut new = self.root.create(folder.as_fd())?;
        new.file.set_len(total)?;
        write_all(new.file.as_fd(), head, sections)?;
        // Before the name exists: with a file system over a network others see bytes only after a sync.
        new.file.sync_all()?;
        self.clock.is_now(modified_s(&fstat(&new.file)?));
        let published = self.root.publish(&mut new, name)?;
        drop(new);
        if published == Published::Already {
            return Ok(Stored::Already);
        }
        if let Err(e) = sync(folder.as_fd()) {
            let _ = rustix::fs::unlinkat(&folder, name, AtFlags::empty());
            return Err(e.into());
        }
        Ok(Stored::New)
    }
}

fn length(found: &Stat) -> u64 {
    u64::try_from(found.st_size).unwrap_or(0)
}

fn write_all(fd: BorrowedFd<'_>, head: &[u8], sections: &[Section]) -> io::Result<()> {
    let mut block = Block::new(head.len() as u64);
    if let Some(into) = block.bytes_mut().get_mut(..head.len()) {
        into.copy_from_slice(head);
    }
    raw::write_all(fd, 0, &mut [Part::Block(block)])?;
    move_sections(sections, |offset, parts| raw::write_all(fd, offset, parts))
}

/// Moves sections in the order of the file, those without a gap between them by one call.
fn move_sections(
    sections: &[Section],
    transfer: impl Fn(u64, &mut [Part]) -> io::Result<()>,
) -> io::Result<()> {
    let end = |section: &Section| section.offset + section.span.length;
    for run in sections.chunk_by(|before, next| end(before) == next.offset) {
        let part = |section: &Section| Part::Arena {
            span: section.span.clone(),
            at: 0,
            bytes: section.span.length,
        };
        let mut parts: Vec<Part> = run.iter().map(part).collect();
        if let Some(first) = run.first() {
            transfer(first.offset, &mut parts)?;
        }
    }
    Ok(())
}
