//! Containers and their slots: free, held or used by an object. No I/O.

use super::classes::slot_bytes;
use super::files::ID_MAX;
use rustix::fd::OwnedFd;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct At {
    /// Container; numbers are not reused.
    pub container: u32,
    /// Slot in the container.
    pub slot: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    /// Being written, or emptied but the removal is not durable or a reader remains.
    Held,
    /// Number in the index.
    Of(u32),
    /// Unreadable: not used any more.
    Bad,
}

#[derive(Debug)]
pub struct Container {
    pub units: u32,
    slots: Vec<Slot>,
    free: Vec<u32>,
    held: u32,
    live: u32,
    /// Time of the last use of one of its objects.
    newest: u64,
    file: Option<Arc<OwnedFd>>,
}

impl Container {
    fn bytes(&self) -> u64 {
        self.slots.len() as u64 * slot_bytes(self.units)
    }

    pub fn slots(&self) -> u32 {
        self.slots.len() as u32
    }
}

#[derive(Debug, Default)]
pub struct Space {
    containers: BTreeMap<u32, Container>,
    /// Per class: containers with a free slot. The lowest is filled first, so that the others become empty.
    open: BTreeMap<u32, BTreeSet<u32>>,
    bytes: u64,
    next: u32,
    /// Containers with an open file, oldest first.
    opened: VecDeque<u32>,
}

impl Space {
    /// Bytes of all container files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn container(&self, id: u32) -> Option<&Container> {
        self.containers.get(&id)
    }

    /// A number that no container ever had. `None`: all valid numbers are used.
    pub fn next_id(&mut self) -> Option<u32> {
        let id = self.next;
        self.saw_id(id);
        (id <= ID_MAX).then_some(id)
    }

    /// Records that a number was used.
    pub fn saw_id(&mut self, id: u32) {
        self.next = self.next.max(id.saturating_add(1));
    }

    /// Adds a container of free slots.
    pub fn add(&mut self, id: u32, units: u32, slots: u32, file: Option<Arc<OwnedFd>>) {
        self.saw_id(id);
        let container = Container {
            units,
            slots: vec![Slot::Free; slots as usize],
            free: (0..slots).rev().collect(),
            held: 0,
            live: 0,
            newest: 0,
            file: None,
        };
        self.bytes += container.bytes();
        self.containers.insert(id, container);
        self.open.entry(units).or_default().insert(id);
        if let Some(file) = file {
            self.opened(id, file, usize::MAX);
        }
    }

    /// Removes a container with its content. The caller removes its entries from the index first.
    pub fn remove(&mut self, id: u32) {
        if let Some(container) = self.containers.remove(&id) {
            self.bytes -= container.bytes();
            self.close_class(container.units, id);
        }
        self.opened.retain(|opened| *opened != id);
    }

    /// Takes a free slot, which is held from then on.
    pub fn take(&mut self, units: u32) -> Option<At> {
        let id = *self.open.get(&units)?.first()?;
        let container = self.containers.get_mut(&id)?;
        let slot = container.free.pop()?;
        container.held += 1;
        if let Some(place) = container.slots.get_mut(slot as usize) {
            *place = Slot::Held;
        }
        if container.free.is_empty() {
            self.close_class(units, id);
        }
        Some(At {
            container: id,
            slot,
        })
    }

    fn close_class(&mut self, units: u32, id: u32) {
        if let Some(open) = self.open.get_mut(&units) {
            open.remove(&id);
            if open.is_empty() {
                self.open.remove(&units);
            }
        }
    }

    /// Assigns a held slot to an object.
    pub fn own(&mut self, at: At, entry: u32) {
        let Some(container) = self.containers.get_mut(&at.container) else {
            return;
        };
        if let Some(place) = container.slots.get_mut(at.slot as usize)
            && *place == Slot::Held
        {
            *place = Slot::Of(entry);
            container.held -= 1;
            container.live += 1;
        }
    }

    /// Holds the slot of an object that left the index; it must not be reused yet.
    pub fn hold(&mut self, at: At) {
        let Some(container) = self.containers.get_mut(&at.container) else {
            return;
        };
        if let Some(place) = container.slots.get_mut(at.slot as usize)
            && matches!(place, Slot::Of(_))
        {
            *place = Slot::Held;
            container.held += 1;
            container.live -= 1;
        }
    }

    /// Frees a held slot.
    pub fn free(&mut self, at: At) {
        let Some(container) = self.containers.get_mut(&at.container) else {
            return;
        };
        if let Some(place) = container.slots.get_mut(at.slot as usize)
            && *place == Slot::Held
        {
            *place = Slot::Free;
            container.held -= 1;
            container.free.push(at.slot);
            let units = container.units;
            self.open.entry(units).or_default().insert(at.container);
        }
    }

    /// Marks a held slot as unusable for good.
    pub fn spoil(&mut self, at: At) {
        let Some(container) = self.containers.get_mut(&at.container) else {
            return;
        };
        let Some(place) = container.slots.get_mut(at.slot as usize) else {
            return;
        };
        match place {
            Slot::Free => container.free.retain(|slot| *slot != at.slot),
            Slot::Held => container.held -= 1,
            Slot::Of(_) | Slot::Bad => return,
        }
        *place = Slot::Bad;
        let (units, full) = (container.units, container.free.is_empty());
        if full {
            self.close_class(units, at.container);
        }
    }

    /// Entry of the object in a slot.
    pub fn owner(&self, at: At) -> Option<u32> {
        match self.container(at.container)?.slots.get(at.slot as usize)? {
            Slot::Of(entry) => Some(*entry),
            _ => None,
        }
    }

    /// While records are read at open: sets the owner of a slot. Returns the previous owner; `Err`: there is no such slot.
    pub fn set_owner(&mut self, at: At, entry: Option<u32>) -> Result<Option<u32>, ()> {
        let container = self.containers.get_mut(&at.container).ok_or(())?;
        let place = container.slots.get_mut(at.slot as usize).ok_or(())?;
        let before = std::mem::replace(place, entry.map_or(Slot::Free, Slot::Of));
        Ok(match before {
            Slot::Of(entry) => Some(entry),
            _ => None,
        })
    }

    /// After all records were read: counts free slots.
    pub fn settle(&mut self) {
        self.open.clear();
        for (id, container) in &mut self.containers {
            container.free.clear();
            for (slot, place) in container.slots.iter().enumerate().rev() {
                if *place == Slot::Free {
                    container.free.push(slot as u32);
                }
            }
            container.live = container.slots() - container.free.len() as u32;
            if !container.free.is_empty() {
                self.open.entry(container.units).or_default().insert(*id);
            }
        }
    }

    pub fn entries(&self, id: u32) -> impl Iterator<Item = u32> {
        self.container(id)
            .into_iter()
            .flat_map(|container| &container.slots)
            .filter_map(|slot| match slot {
                Slot::Of(entry) => Some(*entry),
                _ => None,
            })
    }

    /// Records that one of its objects was used at `clock`.
    pub fn used(&mut self, id: u32, clock: u64) {
        if let Some(container) = self.containers.get_mut(&id) {
            container.newest = container.newest.max(clock);
        }
    }

    /// A container without objects and held slots.
    pub fn empty(&self) -> Option<u32> {
        self.containers
            .iter()
            .find(|(_, c)| c.live == 0 && c.held == 0)
            .map(|(id, _)| *id)
    }

    /// The container whose objects were not used for the longest time, of another class than `but`, without held slots, and not named by
    /// `spared`.
    pub fn coldest(&self, but: Option<u32>, spared: impl Fn(u32) -> bool) -> Option<u32> {
        self.containers
            .iter()
            .filter(|(id, c)| c.held == 0 && Some(c.units) != but && !spared(**id))
            .min_by_key(|(_, c)| c.newest)
            .map(|(id, _)| *id)
    }

    pub fn file(&self, id: u32) -> Option<Arc<OwnedFd>> {
        self.containers.get(&id)?.file.clone()
    }

    /// Keeps an open file; at most `limit` are kept.
    pub fn opened(&mut self, id: u32, file: Arc<OwnedFd>, limit: usize) {
        let Some(container) = self.containers.get_mut(&id) else {
            return;
        };
        if container.file.replace(file).is_none() {
            self.opened.push_back(id);
        }
        while self.opened.len() > limit.max(1) {
            let Some(oldest) = self.opened.pop_front() else {
                break;
            };
            if let Some(container) = self.containers.get_mut(&oldest) {
                container.file = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_container_is_filled_first() {
        let mut space = Space::default();
        space.add(3, 2, 2, None);
        space.add(1, 2, 1, None);
        space.add(2, 5, 1, None);
        let taken: Vec<_> = std::iter::from_fn(|| space.take(2)).collect();
        let at = |container, slot| At { container, slot };
        assert_eq!(taken, [at(1, 0), at(3, 0), at(3, 1)]);
        assert_eq!(space.take(7), None);
        assert_eq!(space.bytes(), (3 * 2 + 5) * 4096);
        assert_eq!(space.next_id(), Some(4));
    }

    #[test]
    fn a_slot_is_taken_again_only_when_it_is_free() {
        let mut space = Space::default();
        space.add(0, 1, 1, None);
        let at = space.take(1).unwrap();
        space.own(at, 9);
        assert_eq!(space.take(1), None);
        assert_eq!(space.entries(0).collect::<Vec<_>>(), [9]);
        space.free(at);
        assert_eq!(space.take(1), None, "an object's slot is not freed at once");
        space.hold(at);
        assert_eq!(space.empty(), None, "held");
        assert_eq!(space.coldest(None, |_| false), None, "held");
        space.free(at);
        assert_eq!(space.empty(), Some(0));
        assert_eq!(space.take(1), Some(at));
    }

    #[test]
    fn a_spoilt_slot_is_nobodys_and_keeps_no_container() {
        let mut space = Space::default();
        space.add(0, 1, 2, None);
        let first = space.take(1).unwrap();
        space.own(first, 9);
        assert_eq!(space.owner(first), Some(9));
        space.spoil(first);
        assert_eq!(space.owner(first), Some(9), "it is an object's");
        space.hold(first);
        space.spoil(first);
        space.free(first);
        let second = At { slot: 1, ..first };
        assert_eq!(space.take(1), Some(second));
        space.free(second);
        space.spoil(second);
        assert_eq!(space.take(1), None);
        assert_eq!(space.empty(), Some(0));
    }

    #[test]
    fn the_coldest_container_is_the_one_not_used_for_longest() {
        let mut space = Space::default();
        for (id, units, newest) in [(0, 1, 5), (1, 2, 9), (2, 3, 7), (3, 4, 1)] {
            space.add(id, units, 1, None);
            space.used(id, newest);
        }
        assert_eq!(space.coldest(None, |id| id == 3), Some(0));
        assert_eq!(space.coldest(Some(4), |id| id == 0), Some(2));
    }

    #[test]
    fn a_removed_container_is_no_place_any_more() {
        let mut space = Space::default();
        space.add(0, 1, 4, None);
        let at = space.take(1).unwrap();
        space.remove(0);
        for act in [Space::free, Space::hold] {
            act(&mut space, at);
        }
        space.own(at, 1);
        assert_eq!(space.take(1), None);
        assert_eq!(space.bytes(), 0);
    }
}
