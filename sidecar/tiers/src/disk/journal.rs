//! The journal of a generation, and the snapshot that begins the next one.

use super::core::{Core, Step};
use super::fault::failed;
use super::files::{journal_file, new_file, snapshot_file};
use super::folder::Folder;
use super::record::RECORD_BYTES;
use crate::{Cause, TierError};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fstat};
use rustix::io::{Errno, retry_on_intr};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that are allocated ahead, so that a full file system is noticed before a record needs the room.
const AHEAD_BYTES: u64 = 1 << 20;
/// Entries that are read per hold of the lock.
const ENTRIES: u32 = 8192;
/// Bytes of a snapshot that are written at a time.
const WRITE_BYTES: usize = 1 << 20;
/// A new generation begins when the journal has more than this many records per object: an open reads them all.
const RECORDS_PER_OBJECT: u64 = 1;

#[derive(Debug)]
pub struct Journal {
    file: File,
    name: String,
    generation: u64,
    end: u64,
    allocated: u64,
    /// No snapshot before this many records, because the last attempt failed.
    not_before: u64,
}

impl Journal {
    /// Opens or creates the journal of a generation. Bytes after `end` were torn and are truncated.
    pub fn open(folder: &Folder, generation: u64, end: u64) -> Result<Self, TierError> {
        let name = journal_file(generation);
        let fail = |e: io::Error| failed("open", &folder.place(&name), e);
        let fd = folder
            .open_file(&name, OFlags::RDWR | OFlags::CREATE)
            .map_err(|e| fail(e.into()))?;
        let file = File::from(fd);
        if file.metadata().map_err(fail)?.len() != end {
            file.set_len(end).map_err(fail)?;
        }
        file.sync_all().map_err(fail)?;
        folder.sync()?;
        Ok(Self {
            file,
            name,
            generation,
            end,
            allocated: 0,
            not_before: 0,
        })
    }

    pub fn records(&self) -> u64 {
        self.end / RECORD_BYTES as u64
    }

    /// Whether it is still in its folder.
    pub fn check(&self, folder: &Folder) -> Result<(), TierError> {
        let links = fstat(&self.file).map(|stat| stat.st_nlink);
        match links {
            Ok(0) => Err(failed("write", &folder.place(&self.name), Errno::NOENT)),
            Ok(_) => folder.check(),
            Err(e) => Err(failed("inspect", &folder.place(&self.name), e)),
        }
    }

    /// Reserves room for `bytes` more. An error is that of a full file system.
    pub fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        let end = self.end + bytes;
        if end <= self.allocated {
            return Ok(());
        }
        let wanted = end + AHEAD_BYTES;
        let bytes = wanted - self.end;
        match retry_on_intr(|| fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.end, bytes)) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                self.allocated = wanted;
                Ok(())
            }
            Err(e) => Err(e.into()),
        }
    }

    /// Appends records and makes them durable. After a failure they may exist or not.
    pub fn append(&mut self, core: &Core, records: &[u8]) -> Result<(), TierError> {
        let place = core.folder.place(&self.name);
        core.step(Step::Append)
            .and_then(|()| self.file.write_all_at(records, self.end))
            .map_err(|e| failed("write", &place, e))?;
        core.step(Step::SyncJournal)
            .and_then(|()| self.file.sync_data())
            .map_err(|e| failed("sync", &place, e))?;
        self.end += records.len() as u64;
        core.step(Step::Durable)
            .map_err(|e| failed("sync", &place, e))
    }

    /// Whether it is so much longer than the state that a snapshot is due.
    pub fn is_long(&self, objects: u64, records_min: u64) -> bool {
        let limit = objects * RECORDS_PER_OBJECT + records_min;
        self.records() > limit.max(self.not_before)
    }

    /// Writes a snapshot and begins the next generation. A failure before the rename of the snapshot changes nothing.
    pub fn next_generation(&mut self, core: &Core) -> Result<(), TierError> {
        let name = snapshot_file(self.generation + 1);
        let new = new_file(&name);
        let next = self.write_next(core, &new, &name).inspect_err(|_| {
            let _ = core.folder.remove(&new);
            self.not_before = self.records() * 2;
        })?;
        let before = std::mem::replace(self, next);
        let named = core.folder.sync();
        named
            .and_then(|()| core.step_of("snapshot", Step::SnapshotNamed))
            .map_err(|e| TierError {
                // After any failure the folder must be read again: it is unknown which generation another open would use.
                cause: Cause::Io,
                ..e
            })?;
        // Remaining files are removed at the next open.
        let _ = core.folder.remove(&before.name);
        let _ = core.folder.remove(&snapshot_file(before.generation));
        Ok(())
    }

    /// Creates the next generation's journal, and a renamed snapshot.
    fn write_next(&self, core: &Core, new: &str, name: &str) -> Result<Self, TierError> {
        self.write_snapshot(core, new)?;
        let next = Self::open(&core.folder, self.generation + 1, 0)?;
        core.step_of("snapshot", Step::JournalMade)?;
        core.folder.rename(new, name)?;
        Ok(next)
    }

    /// Only the journal's own thread assigns slots to other objects, so what is read between two holds of the lock stays valid.
    fn write_snapshot(&self, core: &Core, name: &str) -> Result<(), TierError> {
        let place = core.folder.place(name);
        let fail = |e: io::Error| failed("write", &place, e);
        let file = File::from(core.folder.create(name)?);
        let (mut order, mut from) = (Vec::new(), 0);
        loop {
            let state = core.state.lock();
            if from >= state.index.numbers() {
                break;
            }
            order.extend(state.used(from, ENTRIES));
            from += ENTRIES;
        }
        // The order of use is restored by the order of the records.
        order.sort_unstable();
        let (mut bytes, mut end) = (Vec::with_capacity(WRITE_BYTES), 0u64);
        for numbers in order.chunks(ENTRIES as usize) {
            {
                let state = core.state.lock();
                for record in numbers.iter().filter_map(|(_, n)| state.snapshot(*n)) {
                    record.write(&mut bytes);
                }
            }
            file.write_all_at(&bytes, end).map_err(fail)?;
            end += bytes.len() as u64;
            bytes.clear();
        }
        core.step(Step::SnapshotWritten).map_err(fail)?;
        file.sync_all().map_err(fail)
    }
}
