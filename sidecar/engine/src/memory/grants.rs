//! Open grants, the processes that write their slots, and copies of the sidecar into such slots.

use super::check::say;
use super::entry::Handle;
use super::slots::{SlotTable, bytes_of};
use crate::name::{FastMap, Name};
use crate::table::{COMMITTED, GRANTED, Row, Table};
use kvcachepool_protocol::key::EngineHash;
use std::collections::BTreeSet;

/// The sections of one chunk granted by one GRANT.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    pub chunk: Handle,
    pub name: Name,
    pub last_hash: EngineHash,
    /// (scheduler, tag); none for grants of an earlier boot and for fetches.
    pub asked_by: Option<(u64, u64)>,
    /// When it was granted; none for objects, for grants of an earlier boot and for fetches.
    pub granted_ms: Option<u64>,
    /// Rows that are still GRANTED or COMMITTED.
    pub rows: Vec<u32>,
    /// Sections that the chunk needs when the grant ends.
    pub needed: u128,
    /// Voided; its rows are taken back one by one.
    pub void: bool,
}

/// The slots that a process has to write.
#[derive(Debug, Clone, Default)]
struct Owner {
    rows: BTreeSet<u32>,
    bytes: u64,
    /// The process is dead; its rows are freed at this time.
    free_at_ms: Option<u64>,
}

/// Copies in flight into a row. Parts of a slot may arrive in several stages.
#[derive(Debug, Clone, Copy, Default)]
struct Copies {
    count: u32,
    /// Take the slot back when the last copy ends.
    comes_back: bool,
}

/// All grants, by id, by row and by what asked for them.
#[derive(Debug)]
pub(crate) struct Grants {
    grants: FastMap<u64, Grant>,
    next: u64,
    /// Grant id of each GRANTED or COMMITTED row.
    by_row: FastMap<u32, u64>,
    by_tag: FastMap<(u64, u64), Vec<u64>>,
    /// By lock number; 0 is the sidecar.
    owners: FastMap<u32, Owner>,
    /// Rows that the sidecar itself copies from a window.
    copies: FastMap<u32, Copies>,
}

impl Default for Grants {
    fn default() -> Self {
        Self {
            grants: FastMap::default(),
            next: 1,
            by_row: FastMap::default(),
            by_tag: FastMap::default(),
            owners: FastMap::default(),
            copies: FastMap::default(),
        }
    }
}

impl Grants {
    /// Opens a grant. Returns its id.
    pub fn open(&mut self, grant: Grant) -> u64 {
        let id = self.next;
        self.next += 1;
        self.by_row.extend(grant.rows.iter().map(|row| (*row, id)));
        if let Some(tag) = grant.asked_by {
            self.by_tag.entry(tag).or_default().push(id);
        }
        self.grants.insert(id, grant);
        id
    }

    pub fn get(&self, id: u64) -> Option<&Grant> {
        self.grants.get(&id)
    }

    /// Id of the grant of a row.
    pub fn of_row(&self, row: u32) -> Option<u64> {
        self.by_row.get(&row).copied()
    }

    /// Ids of the grants of a GRANT.
    pub fn of_tag(&self, scheduler: u64, tag: u64) -> Vec<u64> {
        let ids = self.by_tag.get(&(scheduler, tag));
        ids.cloned().unwrap_or_default()
    }

    /// Ids of the grants that fit, in order.
    pub fn select(&self, fits: impl Fn(&Grant) -> bool) -> Vec<u64> {
        let fitting = self.grants.iter().filter(|(_, g)| fits(g));
        let mut ids: Vec<u64> = fitting.map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    /// Marks a grant as void. None: it is unknown, or void already.
    pub fn void(&mut self, id: u64) -> Option<Grant> {
        let grant = self.grants.get_mut(&id)?;
        if std::mem::replace(&mut grant.void, true) {
            return None;
        }
        Some(grant.clone())
    }

    /// No ABORT of a scheduler may name the grant any more.
    fn forget_tag(&mut self, id: u64) {
        let Some(tag) = self.grants.get_mut(&id).and_then(|g| g.asked_by.take()) else {
            return;
        };
        if let Some(list) = self.by_tag.get_mut(&tag) {
            list.retain(|g| *g != id);
            if list.is_empty() {
                self.by_tag.remove(&tag);
            }
        }
    }

    /// The chunk of a grant does not need these sections. Returns the chunk.
    pub fn needs_less(&mut self, id: u64, sections: u128) -> Option<Handle> {
        let grant = self.grants.get_mut(&id)?;
        grant.needed &= !sections;
        Some(grant.chunk)
    }

    /// Removes a row from its grant. Returns the grant, with its id, if that was its last row: it is forgotten.
    pub fn leave(&mut self, row: u32) -> Option<(u64, Grant)> {
        let id = self.by_row.remove(&row)?;
        let grant = self.grants.get_mut(&id)?;
        grant.rows.retain(|r| *r != row);
        if !grant.rows.is_empty() {
            return None;
        }
        self.forget_tag(id);
        self.grants.remove(&id).map(|grant| (id, grant))
    }

    /// A row was freed.
    pub fn forget_row(&mut self, row: u32) {
        self.by_row.remove(&row);
    }

    /// Assigns a granted row to its owner.
    pub fn hold(&mut self, number: u32, row: &Row) {
        let o = self.owners.entry(row.owner).or_default();
        o.rows.insert(number);
        o.bytes += bytes_of(row);
    }

    /// The row's owner has no right to write it any more.
    pub fn let_go(&mut self, number: u32, row: &Row) {
        if let Some(o) = self.owners.get_mut(&row.owner)
            && o.rows.remove(&number)
        {
            o.bytes = o.bytes.saturating_sub(bytes_of(row));
            if o.rows.is_empty() && o.free_at_ms.is_none() {
                self.owners.remove(&row.owner);
            }
        }
    }

    /// Rows that an owner has to write.
    pub fn rows_of(&self, owner: u32) -> Vec<u32> {
        let rows = self.owners.get(&owner).map(|o| &o.rows);
        rows.into_iter().flatten().copied().collect()
    }

    /// An owner is proven dead; its rows are freed at `free_at_ms`. False: it owns nothing, or is known to be dead.
    pub fn owner_died(&mut self, owner: u32, free_at_ms: u64) -> bool {
        let living = |o: &&mut Owner| o.free_at_ms.is_none();
        let Some(o) = self.owners.get_mut(&owner).filter(living) else {
            return false;
        };
        o.free_at_ms = Some(free_at_ms);
        true
    }

    /// True if the owner is dead and its rows are not freed yet.
    pub fn is_dead(&self, owner: u32) -> bool {
        let owner = self.owners.get(&owner);
        owner.is_some_and(|o| o.free_at_ms.is_some())
    }

    /// Dead owners whose rows may be freed now.
    pub fn quarantines_over(&self, now_ms: u64) -> Vec<u32> {
        self.owners_where(|_, o| o.free_at_ms.is_some_and(|at| at <= now_ms))
    }

    /// Forgets a dead owner, unless copies into its slots are in flight.
    pub fn forget_owner(&mut self, owner: u32) {
        if self.owners.get(&owner).is_some_and(|o| o.rows.is_empty()) {
            self.owners.remove(&owner);
        }
    }

    /// Locks that own slots and are not known to be dead.
    pub fn living_owners(&self) -> Vec<u32> {
        self.owners_where(|owner, o| owner != 0 && o.free_at_ms.is_none() && !o.rows.is_empty())
    }

    fn owners_where(&self, is: impl Fn(u32, &Owner) -> bool) -> Vec<u32> {
        let owners = self.owners.iter().filter(|(owner, o)| is(**owner, o));
        let mut list: Vec<u32> = owners.map(|(owner, _)| *owner).collect();
        list.sort_unstable();
        list
    }

    /// True if a process that lives owns rows with this lock.
    pub fn lives(&self, owner: u32) -> bool {
        let owner = self.owners.get(&owner);
        owner.is_some_and(|o| o.free_at_ms.is_none())
    }

    /// Bytes granted to a lock's holder and not committed.
    pub fn granted_to(&self, owner: u32) -> u64 {
        self.owners.get(&owner).map_or(0, |o| o.bytes)
    }

    /// Number of slots that living owners, or dead ones, have to write.
    pub fn slots(&self, dead: bool) -> u64 {
        let owners = self.owners.values();
        owners
            .filter(|o| o.free_at_ms.is_some() == dead)
            .map(|o| o.rows.len() as u64)
            .sum()
    }

    /// A copy into a row begins.
    pub fn copy_begins(&mut self, row: u32) {
        self.copies.entry(row).or_default().count += 1;
    }

    /// A copy into a row has ended. True if that was the last one, and the row is to be taken back now.
    pub fn copy_ended(&mut self, row: u32) -> bool {
        let Some(copies) = self.copies.get_mut(&row) else {
            return false;
        };
        copies.count -= 1;
        if copies.count > 0 {
            return false;
        }
        self.copies.remove(&row).is_some_and(|c| c.comes_back)
    }

    /// True if a copy into the row is in flight.
    pub fn is_copied(&self, row: u32) -> bool {
        self.copies.contains_key(&row)
    }

    /// True if the row is to be taken back when its copies have ended.
    pub fn comes_back(&self, row: u32) -> bool {
        self.copies.get(&row).is_some_and(|c| c.comes_back)
    }

    /// The row is to be taken back. True if copies must end first.
    pub fn defer(&mut self, row: u32) -> bool {
        let copies = self.copies.get_mut(&row);
        copies.map(|c| c.comes_back = true).is_some()
    }

    /// Grants, owners and rows name each other.
    pub fn check<T: Table>(&self, slots: &SlotTable<T>) -> Result<(), String> {
        for number in 0..slots.geometry().rows {
            let row = slots.row(number);
            let owner = self.owners.get(&row.owner);
            let owned = owner.is_some_and(|o| o.rows.contains(&number));
            say(row.state != GRANTED || owned, "GrantedHasOwner", || {
                format!("slot {number} of {}", row.owner)
            })?;
        }
        for (owner, o) in &self.owners {
            for row in &o.rows {
                let r = slots.row(*row);
                let right = r.state == GRANTED && r.owner == *owner;
                say(right, "OwnedIsGranted", || format!("slot {row} of {owner}"))?;
            }
            let bytes: u64 = o.rows.iter().map(|row| bytes_of(&slots.row(*row))).sum();
            say(bytes == o.bytes, "OwnedBytesAreCounted", || {
                format!("{} counted of {owner}, {bytes} there", o.bytes)
            })?;
        }
        for (id, grant) in &self.grants {
            say(!grant.rows.is_empty(), "GrantHasRows", || {
                format!("grant {id}")
            })?;
            for row in &grant.rows {
                let state = slots.row(*row).state;
                let right = self.by_row.get(row) == Some(id)
                    && (state == GRANTED || state == COMMITTED && !grant.void);
                say(right, "GrantOwnsItsRows", || {
                    format!("grant {id}, slot {row}, state {state}")
                })?;
            }
        }
        for (row, id) in &self.by_row {
            let known = self.grants.get(id).is_some_and(|g| g.rows.contains(row));
            say(known, "RowKnowsItsGrant", || {
                format!("slot {row}, grant {id}")
            })?;
        }
        for id in self.by_tag.values().flatten() {
            say(self.grants.contains_key(id), "TagNamesGrants", || {
                format!("grant {id}")
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
impl Grants {
    pub fn is_empty(&self) -> bool {
        self.grants.is_empty() && self.by_tag.is_empty()
    }
}
