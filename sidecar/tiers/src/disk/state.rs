//! The tier's state: index and slots, readers and writers, and eviction. No I/O; one short-held lock protects it.
//!
//! States of a slot: free -> held (being written) -> used by an object -> held (removal not durable, or still read) -> free.

use super::classes::{slot_bytes, slots};
use super::files::ContainerFile;
use super::index::{Entry, Index};
use super::name::NameKey;
use super::record::{Record, What};
use super::space::{At, Space};
use std::collections::{HashMap, HashSet};
use tokio::sync::watch;

/// Least recently used objects that are searched for one of the wanted class, before a container of another class is evicted.
const NEAR: usize = 64;
/// A container in the last room must have at least this fraction (1/n) of its normal slots.
const WORTH: u32 = 4;
/// Most objects of a class that are evicted at once for one slot: they share a sync.
const TOGETHER: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Most bytes of container files.
    pub capacity: u64,
    /// Eviction begins when the slots of objects have more bytes.
    pub high: u64,
    /// Eviction ends at this number of bytes.
    pub low: u64,
    /// Most objects: each takes memory.
    pub objects: usize,
}

/// Counters since the folder was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Objects evicted for others.
    pub evicted: u64,
    /// Objects whose header was corrupt or of another object; removed.
    pub corrupt_objects: u64,
    pub corrupt_records: u64,
    /// Journals with a torn end.
    pub torn_tails: u64,
    /// Records of slots that no longer exist.
    pub stray_records: u64,
    pub lost_containers: u64,
    /// Foreign names in the folder.
    pub foreign_files: u64,
}

impl Counts {
    /// The counters by their names in metrics and logs.
    pub fn named(self) -> [(&'static str, u64); 7] {
        [
            ("Evicted", self.evicted),
            ("CorruptObject", self.corrupt_objects),
            ("CorruptRecord", self.corrupt_records),
            ("TornTail", self.torn_tails),
            ("StrayRecord", self.stray_records),
            ("LostContainer", self.lost_containers),
            ("ForeignFile", self.foreign_files),
        ]
    }
}

/// Next step on the way to a free slot.
#[derive(Debug, PartialEq, Eq)]
pub enum Plan {
    /// A free slot.
    Slot(At),
    /// Create this container.
    Make(ContainerFile),
    /// Delete this container's file; its objects are already out of the index.
    Unlink(ContainerFile),
    /// Make these removals durable.
    Evict(Vec<Record>),
    /// No slot is available.
    Full,
}

/// An object that is being read: its slot does not change until [`State::unpin`].
#[derive(Debug, Clone, Copy)]
pub struct Pinned {
    pub at: At,
    pub units: u32,
    /// Bytes of the object.
    pub bytes: u64,
}

#[derive(Debug)]
pub struct State {
    pub index: Index,
    pub space: Space,
    pub counts: Counts,
    bounds: Bounds,
    /// Bytes of the slots of objects.
    bytes: u64,
    /// Slots that are being read, with the number of readers.
    reading: HashMap<At, u32>,
    /// Slots to free after their last reader.
    after_readers: HashSet<At>,
    /// Objects that are being written. Waiting writers hold a clone of the receiver.
    pub writing: HashMap<NameKey, watch::Receiver<()>>,
}

impl State {
    pub fn new(bounds: Bounds) -> Self {
        Self {
            index: Index::default(),
            space: Space::default(),
            counts: Counts::default(),
            bounds,
            bytes: 0,
            reading: HashMap::new(),
            after_readers: HashSet::new(),
            writing: HashMap::new(),
        }
    }

    /// Bytes of the slots of objects.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn slot_bytes(&self, at: At) -> u64 {
        self.space
            .container(at.container)
            .map_or(0, |container| slot_bytes(container.units))
    }

    /// Begins to read an object.
    pub fn pin(&mut self, name: &NameKey) -> Option<Pinned> {
        let number = self.index.find(name)?;
        let entry = *self.index.entry(number)?;
        let units = self.space.container(entry.at.container)?.units;
        self.touch(number);
        *self.reading.entry(entry.at).or_default() += 1;
        Some(Pinned {
            at: entry.at,
            units,
            bytes: entry.bytes,
        })
    }

    pub fn unpin(&mut self, at: At) {
        let Some(readers) = self.reading.get_mut(&at) else {
            return;
        };
        *readers -= 1;
        if *readers == 0 {
            self.reading.remove(&at);
            if self.after_readers.remove(&at) {
                self.space.free(at);
            }
        }
    }

    /// Marks an object as used.
    pub fn touch(&mut self, number: u32) {
        self.index.touch(number);
        if let Some(entry) = self.index.entry(number) {
            self.space.used(entry.at.container, entry.used);
        }
    }

    /// Makes an object with a durable record visible in its slot. False: its container was lost in the meantime.
    pub fn publish(&mut self, record: &Record) -> bool {
        if self.space.container(record.at.container).is_none() {
            return false;
        }
        if let Some(before) = self.index.remove(&record.name) {
            self.bytes -= self.slot_bytes(before.at);
            self.space.hold(before.at);
            // The newer record is durable and replaces a removal record of the older object.
            self.release(before.at);
        }
        let Record { name, at, .. } = *record;
        let number = self
            .index
            .insert(name, at, record.bytes, record.written_unix_s);
        self.space.own(at, number);
        self.bytes += self.slot_bytes(at);
        self.touch(number);
        true
    }

    /// Removes an object from the index. Its slot is held until the returned record is durable; then call [`State::release`].
    pub fn take_out(&mut self, name: &NameKey) -> Option<Record> {
        let entry = self.index.remove(name)?;
        self.bytes -= self.slot_bytes(entry.at);
        self.space.hold(entry.at);
        Some(record(What::Remove, &entry))
    }

    /// The object of a slot.
    pub fn lies_at(&self, at: At) -> Option<NameKey> {
        let number = self.space.owner(at)?;
        Some(self.index.entry(number)?.name)
    }

    /// Frees a held slot, now or after its last reader.
    pub fn release(&mut self, at: At) {
        if self.reading.contains_key(&at) {
            self.after_readers.insert(at);
        } else {
            self.space.free(at);
        }
    }

    /// Removes the least recently used objects if there are too many bytes or objects. The last object is kept, however large it is. The
    /// caller makes the removals durable.
    pub fn over_high(&mut self) -> Vec<Record> {
        let mut objects = self.index.len().saturating_sub(self.bounds.objects);
        let mut surplus = match self.bytes > self.bounds.high {
            true => self.bytes - self.bounds.low,
            false => 0,
        };
        let victims: Vec<NameKey> = self
            .index
            .oldest_first()
            .take(self.index.len().saturating_sub(1))
            .filter(|entry| !self.reading.contains_key(&entry.at))
            .take_while(|entry| {
                let more = surplus > 0 || objects > 0;
                surplus = surplus.saturating_sub(self.slot_bytes(entry.at));
                objects = objects.saturating_sub(1);
                more
            })
            .map(|entry| entry.name)
            .collect();
        self.evict(&victims)
    }

    fn evict(&mut self, victims: &[NameKey]) -> Vec<Record> {
        let records: Vec<Record> = victims.iter().filter_map(|v| self.take_out(v)).collect();
        self.counts.evicted += records.len() as u64;
        records
    }

    /// The next step to a free slot of a class. `no_space`: the file system has no room for another container. Only one caller at a
    /// time may follow plans.
    pub fn plan(&mut self, units: u32, no_space: bool) -> Plan {
        if let Some(at) = self.space.take(units) {
            return Plan::Slot(at);
        }
        if !no_space && let Some(file) = self.another_container(units, WORTH) {
            return Plan::Make(file);
        }
        let empty = self.space.empty();
        if let Some(file) = empty.and_then(|id| self.forget_container(id)) {
            return Plan::Unlink(file);
        }
        let victims = self.of_class(units, NEAR);
        if !victims.is_empty() {
            return Plan::Evict(self.evict(&victims));
        }
        if let Some(file) = self.drain_coldest(Some(units)) {
            return Plan::Unlink(file);
        }
        let victims = self.of_class(units, usize::MAX);
        if !victims.is_empty() {
            return Plan::Evict(self.evict(&victims));
        }
        match self.another_container(units, u32::MAX) {
            Some(file) if !no_space => Plan::Make(file),
            _ => Plan::Full,
        }
    }

    /// A container in the remaining room, if it has at least 1 / `worth` of its normal slots.
    fn another_container(&mut self, units: u32, worth: u32) -> Option<ContainerFile> {
        let room = self.bounds.capacity.saturating_sub(self.space.bytes());
        let fit = u32::try_from(room / slot_bytes(units)).unwrap_or(u32::MAX);
        let wanted = slots(units, self.bounds.capacity);
        let slots = wanted.min(fit);
        if slots == 0 || slots < wanted / worth {
            return None;
        }
        let id = self.space.next_id()?;
        Some(ContainerFile { id, units, slots })
    }

    /// Unread objects of a class among the `within` least recently used ones.
    fn of_class(&self, units: u32, within: usize) -> Vec<NameKey> {
        let is = |at: At| self.space.container(at.container).map(|c| c.units) == Some(units);
        self.index
            .oldest_first()
            .take(within)
            .filter(|entry| is(entry.at) && !self.reading.contains_key(&entry.at))
            .take(TOGETHER)
            .map(|entry| entry.name)
            .collect()
    }

    /// Evicts the container that was not used for the longest time. Its file can be deleted at once, since records of missing containers
    /// are ignored.
    pub fn drain_coldest(&mut self, but: Option<u32>) -> Option<ContainerFile> {
        let read: HashSet<u32> = self.reading.keys().map(|at| at.container).collect();
        let id = self.space.coldest(but, |id| read.contains(&id))?;
        self.forget_container(id)
    }

    /// Removes a container with all its objects, which count as evicted.
    pub fn forget_container(&mut self, id: u32) -> Option<ContainerFile> {
        let container = self.space.container(id)?;
        let file = ContainerFile {
            id,
            units: container.units,
            slots: container.slots(),
        };
        let numbers: Vec<u32> = self.space.entries(id).collect();
        for number in numbers {
            let Some(name) = self.index.entry(number).map(|entry| entry.name) else {
                continue;
            };
            if self.index.remove(&name).is_some() {
                self.bytes -= slot_bytes(file.units);
                self.counts.evicted += 1;
            }
        }
        self.space.remove(id);
        Some(file)
    }

    /// Applies a record of the snapshot or the journal. Records come in write order; the last one of a slot and of a name counts.
    pub fn replay(&mut self, record: &Record) {
        self.space.saw_id(record.at.container);
        match record.what {
            What::Put => self.replay_put(record),
            What::Remove => {
                let there = self.index.find(&record.name);
                let same = there
                    .and_then(|number| self.index.entry(number))
                    .is_some_and(|entry| entry.at == record.at);
                if same {
                    self.drop_entry(&record.name);
                }
            }
        }
    }

    fn replay_put(&mut self, record: &Record) {
        let Some(container) = self.space.container(record.at.container) else {
            self.counts.stray_records += 1;
            // The older object of this name is void in any case.
            self.drop_entry(&record.name);
            return;
        };
        let fits = record.bytes <= slot_bytes(container.units)
            && record.at.slot < container.slots()
            && record.name.name().is_some();
        if !fits {
            self.counts.stray_records += 1;
            return;
        }
        self.drop_entry(&record.name);
        let Record { name, at, .. } = *record;
        let number = self
            .index
            .insert(name, at, record.bytes, record.written_unix_s);
        if let Ok(Some(before)) = self.space.set_owner(at, Some(number)) {
            let name = self.index.entry(before).map(|entry| entry.name);
            if let Some(name) = name {
                self.index.remove(&name);
            }
        }
    }

    fn drop_entry(&mut self, name: &NameKey) {
        if let Some(entry) = self.index.remove(name) {
            // The slot belongs to it: otherwise the entry would already be removed.
            let _ = self.space.set_owner(entry.at, None);
        }
    }

    /// Called after all records were read.
    pub fn settle(&mut self) {
        self.space.settle();
        self.bytes = 0;
        for number in 0..self.index.numbers() {
            if let Some(entry) = self.index.entry(number) {
                let (id, used) = (entry.at.container, entry.used);
                self.bytes += self.slot_bytes(entry.at);
                self.space.used(id, used);
            }
        }
    }

    /// Snapshot records of numbers from `from` on, with the time of their last use; at most `limit` numbers are checked.
    pub fn used(&self, from: u32, limit: u32) -> impl Iterator<Item = (u64, u32)> {
        let end = from.saturating_add(limit).min(self.index.numbers());
        (from..end).filter_map(|number| Some((self.index.entry(number)?.used, number)))
    }

    /// The snapshot record of a number.
    pub fn snapshot(&self, number: u32) -> Option<Record> {
        Some(record(What::Put, self.index.entry(number)?))
    }
}

fn record(what: What, entry: &Entry) -> Record {
    Record {
        what,
        name: entry.name,
        at: entry.at,
        bytes: entry.bytes,
        written_unix_s: entry.written_unix_s.into(),
    }
}
