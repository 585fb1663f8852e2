//! Writes and removes: takes a slot, writes the object's bytes, and hands the change to the commit thread. Blocks: for threads where
//! that is allowed.

use super::classes::{slot_bytes, slot_units};
use super::commit::{Answer, Change, Written};
use super::core::{Claim, Core, HeldSlot, Step};
use super::fault::failed;
use super::files::ContainerFile;
use super::name::NameKey;
use super::record::{Record, What};
use super::space::At;
use super::state::Plan;
use super::transfer;
use crate::files::sections::Section;
use crate::{Cause, Kind, Put, Stored, TierError};
use kvcachepool_protocol::object::ObjectName;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{oneshot, watch};

/// Plans that are followed for one slot before the tier counts as full: other writers may take the freed slots.
const PLANS_MAX: usize = 10_000;

impl Core {
    /// Writes an object's bytes and queues the commit, which sends the answer.
    pub fn put(self: &Arc<Self>, put: Put, claim: Claim, answer: Answer<Stored>) {
        match self.write(put) {
            Ok((record, file, slot)) => self.changes.push(Change::Put(Box::new(Written {
                record,
                file,
                slot,
                claim,
                answer,
            }))),
            Err(error) => {
                drop(claim);
                let _ = answer.send(Err(error));
            }
        }
    }

    fn write(self: &Arc<Self>, put: Put) -> Result<(Record, Arc<OwnedFd>, HeldSlot), TierError> {
        self.check()?;
        let Put { object, spans } = put;
        let name = object.name();
        let shape = |why: String| TierError::new(Kind::Disk, Cause::Shape, why).about(name.s3(""));
        let head = object.encode().map_err(|e| shape(e.to_string()))?;
        let lengths = object.sections.iter().map(|s| s.stored_bytes);
        if !lengths.eq(spans.iter().map(|s| s.length)) {
            return Err(shape(
                "the spans do not have the length that the header states".to_string(),
            ));
        }
        let bytes = object.total_bytes();
        let (key, units) = NameKey::of(&name)
            .zip(slot_units(bytes))
            .filter(|(_, units)| slot_bytes(*units) <= self.capacity)
            .ok_or_else(|| full("the object is larger than the tier").about(name.s3("")))?;
        let (slot, file) = self.slot(units).map_err(|e| e.about(name.s3("")))?;
        let offset = u64::from(slot.at.slot) * slot_bytes(units);
        let sections: Vec<Section> = object
            .offsets()
            .into_iter()
            .zip(spans)
            .map(|(at, span)| Section {
                offset: offset + at,
                span,
            })
            .collect();
        self.step(Step::Write)
            .and_then(|()| transfer::write(file.as_fd(), offset, &head, &sections))
            .and_then(|()| self.step(Step::Written))
            .map_err(|e| {
                let error = failed("write", "an object", e).about(name.s3(""));
                self.blame(error, Some(slot.at))
            })?;
        let record = Record {
            what: What::Put,
            name: key,
            at: slot.at,
            bytes,
            written_unix_s: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
        };
        Ok((record, file, slot))
    }

    /// A free slot and its file.
    fn slot(self: &Arc<Self>, units: u32) -> Result<(HeldSlot, Arc<OwnedFd>), TierError> {
        let taken = self.state.lock().space.take(units);
        let slot = match taken {
            Some(at) => HeldSlot::new(self, at),
            None => self.make_slot(units)?,
        };
        let cached = self.state.lock().space.file(slot.at.container);
        if let Some(file) = cached {
            return Ok((slot, file));
        }
        let id = slot.at.container;
        let file = self.container_file(id).ok_or(Errno::NOENT);
        let opened = file.and_then(|file| self.folder.open_container(file, self.direct));
        let opened = opened.map_err(|e| self.blame(failed("open", "a container", e), None))?;
        let opened = Arc::new(opened);
        let mut state = self.state.lock();
        state
            .space
            .opened(id, opened.clone(), self.options.open_files);
        drop(state);
        Ok((slot, opened))
    }

    fn make_slot(self: &Arc<Self>, units: u32) -> Result<HeldSlot, TierError> {
        let _one = self.making.lock();
        // Pending removals may free a slot.
        self.settle(Vec::new())?;
        let mut no_space = false;
        for _ in 0..PLANS_MAX {
            self.check()?;
            let plan = self.state.lock().plan(units, no_space);
            match plan {
                Plan::Slot(at) => return Ok(HeldSlot::new(self, at)),
                Plan::Make(file) => match self.make_what_fits(file) {
                    Err(e) if e.cause == Cause::Full => no_space = true,
                    other => other.map_err(|e| self.blame(e, None))?,
                },
                Plan::Unlink(file) => {
                    let removed = self.folder.remove(&file.name());
                    removed.map_err(|e| self.blame(e, None))?;
                    no_space = false;
                }
                Plan::Evict(records) => self.settle(records)?,
                Plan::Full => break,
            }
        }
        Err(full(
            "no room: all evictable objects are being read or written",
        ))
    }

    /// Creates a container, with fewer slots if the file system has no room for all.
    fn make_what_fits(&self, mut file: ContainerFile) -> Result<(), TierError> {
        loop {
            match self.make(file) {
                Err(e) if e.cause == Cause::Full && file.slots > 1 => file.slots /= 2,
                other => return other,
            }
        }
    }

    fn make(&self, file: ContainerFile) -> Result<(), TierError> {
        self.step_of("a container", Step::Make)?;
        let fd = self.folder.create_container(file, self.direct)?;
        let mut state = self.state.lock();
        state.space.add(file.id, file.units, file.slots, None);
        state
            .space
            .opened(file.id, Arc::new(fd), self.options.open_files);
        Ok(())
    }

    /// Waits until these removals, and earlier ones, are durable and their slots free.
    fn settle(&self, records: Vec<Record>) -> Result<(), TierError> {
        let (answer, answered) = oneshot::channel();
        self.changes.push(Change::Remove(records, Some(answer)));
        answered.blocking_recv().unwrap_or_else(|_| self.check())
    }

    /// Removes objects from the index. Returns how many existed; `answer` is sent when the removal is durable.
    pub fn remove(&self, names: &[ObjectName], answer: Answer<()>) -> u64 {
        let records: Vec<Record> = {
            let mut state = self.state.lock();
            names
                .iter()
                .filter_map(NameKey::of)
                .filter_map(|key| state.take_out(&key))
                .collect()
        };
        let count = records.len() as u64;
        self.changes.push(Change::Remove(records, Some(answer)));
        count
    }

    /// Drops a slot and its object without waiting; the slot is not written again until the process ends.
    pub fn give_up(&self, at: At) {
        let mut state = self.state.lock();
        let name = state.lies_at(at);
        let record = name.and_then(|name| state.take_out(&name));
        state.space.spoil(at);
        drop(state);
        let records = record.into_iter().collect();
        self.changes.push(Change::Remove(records, None));
    }

    /// The right to write an object. `Ok(None)`: it exists. `Err`: it is being written; retry after that ends.
    pub fn claim(self: &Arc<Self>, key: NameKey) -> Result<Option<Claim>, watch::Receiver<()>> {
        let mut state = self.state.lock();
        if let Some(number) = state.index.find(&key) {
            state.touch(number);
            return Ok(None);
        }
        if let Some(writing) = state.writing.get(&key) {
            return Err(writing.clone());
        }
        let (ends, waits) = watch::channel(());
        state.writing.insert(key, waits);
        Ok(Some(Claim::new(self, key, ends)))
    }
}

fn full(detail: &str) -> TierError {
    TierError::new(Kind::Disk, Cause::Full, detail)
}
