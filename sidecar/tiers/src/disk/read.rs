//! Reads header and sections of an object from its slot into their places. Blocks: for threads where that is allowed.

use super::classes::{UNIT, slot_bytes};
use super::commit::Change;
use super::core::{Core, Step};
use super::fault::{cause, failed, missing};
use super::files::ContainerFile;
use super::name::NameKey;
use super::state::Pinned;
use super::transfer;
use crate::files::raw::Block;
use crate::files::sections::{Section, wanted};
use crate::{Cause, Get, Kind, Place, TierError};
use kvcachepool_protocol::object::{BadObject, HEADER_BYTES, Object, ObjectName, head_bytes};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use std::io;
use std::sync::Arc;

/// Size of the first read of an object: most headers fit.
const FIRST_READ_BYTES: u64 = 16 << 10;

/// An object that is being read: its slot is not reused meanwhile.
struct Pin {
    core: Arc<Core>,
    key: NameKey,
    pinned: Pinned,
}

impl Pin {
    fn offset(&self) -> u64 {
        u64::from(self.pinned.at.slot) * slot_bytes(self.pinned.units)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.core.state.lock().unpin(self.pinned.at);
    }
}

impl Core {
    pub fn head(self: &Arc<Self>, name: &ObjectName) -> Result<Object, TierError> {
        let pin = self.pin(name)?;
        let file = self.file_of(&pin, name)?;
        let block = self.read_block(&pin, &file, name, FIRST_READ_BYTES)?;
        self.head_of(&pin, &file, name, block)
    }

    /// Reads sections of an object; together with its header in one call if they are all of its sections.
    pub fn get(self: &Arc<Self>, get: Get) -> Result<Object, TierError> {
        let (pin, name) = (self.pin(&get.name)?, &get.name);
        let file = self.file_of(&pin, name)?;
        let failed = |e| self.failed_read(&pin, name, e);
        let (head, expected) = expected(&pin, &get).unwrap_or_default();
        let block = match expected.is_empty() {
            true => self.read_block(&pin, &file, name, FIRST_READ_BYTES)?,
            false => self
                .step(Step::ReadSections)
                .and_then(|()| {
                    transfer::read_with_head(file.as_fd(), pin.offset(), head, &expected)
                })
                .map_err(failed)?,
        };
        let object = self.head_of(&pin, &file, name, block)?;
        let sections = wanted(Kind::Disk, pin.offset(), &object, &get)?;
        let lies = |s: &Section| (s.offset, s.span.offset, s.span.length);
        if !sections.iter().map(lies).eq(expected.iter().map(lies)) {
            self.step(Step::ReadSections)
                .and_then(|()| transfer::read(file.as_fd(), &sections))
                .map_err(failed)?;
        }
        Ok(object)
    }

    fn pin(self: &Arc<Self>, name: &ObjectName) -> Result<Pin, TierError> {
        self.check()?;
        let key = NameKey::of(name).ok_or_else(|| missing(Kind::Disk, &name.s3("")))?;
        let pinned = self.state.lock().pin(&key);
        let pinned = pinned.ok_or_else(|| missing(Kind::Disk, &name.s3("")))?;
        Ok(Pin {
            core: self.clone(),
            key,
            pinned,
        })
    }

    /// The open file of a pinned object. A deleted file costs its objects, a deleted folder the tier.
    fn file_of(&self, pin: &Pin, name: &ObjectName) -> Result<Arc<OwnedFd>, TierError> {
        let id = pin.pinned.at.container;
        let open = || -> io::Result<Arc<OwnedFd>> {
            self.step(Step::Read)?;
            let cached = self.state.lock().space.file(id);
            if let Some(file) = cached {
                let links = fstat(&file)?.st_nlink;
                return if links > 0 {
                    Ok(file)
                } else {
                    Err(Errno::NOENT.into())
                };
            }
            let file = self.container_file(id).ok_or(Errno::NOENT)?;
            let opened = Arc::new(self.folder.open_container(file, self.direct)?);
            let mut state = self.state.lock();
            state
                .space
                .opened(id, opened.clone(), self.options.open_files);
            Ok(opened)
        };
        open().map_err(|e| {
            if cause(&e) != Cause::Gone {
                return self.failed_read(pin, name, e);
            }
            if let Err(gone) = self.folder.check() {
                return self.blame(gone, None);
            }
            let mut state = self.state.lock();
            if state.forget_container(id).is_some() {
                state.counts.lost_containers += 1;
            }
            missing(Kind::Disk, &name.s3(""))
        })
    }

    pub fn container_file(&self, id: u32) -> Option<ContainerFile> {
        let state = self.state.lock();
        let container = state.space.container(id)?;
        Some(ContainerFile {
            id,
            units: container.units,
            slots: container.slots(),
        })
    }

    /// Reads the first bytes of an object's slot.
    fn read_block(
        &self,
        pin: &Pin,
        file: &OwnedFd,
        name: &ObjectName,
        bytes: u64,
    ) -> Result<Block, TierError> {
        let bytes = bytes.min(slot_bytes(pin.pinned.units));
        transfer::read_block(file.as_fd(), pin.offset(), bytes)
            .map_err(|e| self.failed_read(pin, name, e))
    }

    /// Decodes the header at the start of these bytes. Reads the rest of a longer header.
    fn head_of(
        &self,
        pin: &Pin,
        file: &OwnedFd,
        name: &ObjectName,
        mut block: Block,
    ) -> Result<Object, TierError> {
        let corrupt = |why: &dyn std::fmt::Display| {
            self.take_out_corrupt(pin);
            TierError::new(
                Kind::Disk,
                Cause::Corrupt,
                format!("{why}; the object was removed from the tier"),
            )
            .about(name.s3(""))
        };
        let bad = |e: BadObject| match Cause::of_head(&e) {
            Cause::Corrupt => corrupt(&e),
            // Written by another build, which may be used again.
            cause => TierError::new(Kind::Disk, cause, e.to_string()).about(name.s3("")),
        };
        let first = block.bytes().get(..HEADER_BYTES).unwrap_or_default();
        let head = head_bytes(first).map_err(bad)?;
        if head > slot_bytes(pin.pinned.units) {
            return Err(corrupt(&"the object's header is longer than its slot"));
        }
        if head > block.bytes().len() as u64 {
            block = self.read_block(pin, file, name, head)?;
        }
        let object = Object::decode(block.bytes()).map_err(bad)?;
        if object.name() != *name {
            self.take_out_corrupt(pin);
            let detail = format!(
                "the slot contains the object {}; it was removed from the tier",
                object.name().s3("")
            );
            return Err(TierError::new(Kind::Disk, Cause::Foreign, detail).about(name.s3("")));
        }
        if object.total_bytes() != pin.pinned.bytes {
            return Err(corrupt(
                &"the object's length differs from that in the index",
            ));
        }
        Ok(object)
    }

    fn take_out_corrupt(&self, pin: &Pin) {
        let mut state = self.state.lock();
        state.counts.corrupt_objects += 1;
        let there = state.index.find(&pin.key);
        let there = there.and_then(|number| state.index.entry(number));
        if there.is_some_and(|entry| entry.at == pin.pinned.at) {
            let record = state.take_out(&pin.key);
            drop(state);
            let records = record.into_iter().collect();
            self.changes.push(Change::Remove(records, None));
        }
    }

    fn failed_read(&self, pin: &Pin, name: &ObjectName, error: io::Error) -> TierError {
        let error = failed("read", "an object", error).about(name.s3(""));
        self.blame(error, Some(pin.pinned.at))
    }
}

/// Bytes before the wanted sections, and the sections' places, if the object has no others, as is usual. `None` if that is impossible or
/// they cannot be read in one call.
fn expected(pin: &Pin, get: &Get) -> Option<(u64, Vec<Section>)> {
    let mut places: Vec<&Place> = get.places.iter().collect();
    places.sort_by_key(|place| (place.group, place.shard));
    let lengths = places.iter().map(|place| place.span.length);
    let head = pin
        .pinned
        .bytes
        .checked_sub(lengths.fold(0, u64::saturating_add))?;
    let a_head = (UNIT..=FIRST_READ_BYTES).contains(&head) && head.is_multiple_of(UNIT);
    if !a_head || !places.iter().all(|p| transfer::goes_in_place(&p.span)) {
        return None;
    }
    let mut offset = pin.offset() + head;
    let section = |place: &Place| {
        let section = Section {
            offset,
            span: place.span.clone(),
        };
        offset += place.span.length;
        section
    };
    Some((head, places.into_iter().map(section).collect()))
}
