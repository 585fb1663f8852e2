//! Administrative operations: look up and pin chunks, and clear everything.

use super::MemoryTier;
use super::entry::Class;
use crate::table::Table;
use kvcachepool_protocol::key::ChunkKey;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub key: ChunkKey,
    /// Position of its first token.
    pub first_token: u32,
    pub tokens: u32,
    pub readable: bool,
    pub bytes: u64,
    /// Number of read leases and soft pins on it.
    pub readers: u32,
    /// Pinned by an admin pin.
    pub pinned: bool,
    /// Unix seconds after which it expires; 0 = never.
    pub expires_unix_s: u64,
}

/// Why a pin was not set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    #[error("no chunk with this key is in memory")]
    NotFound,
    /// Admin pins have a limited share of the arena.
    #[error("admin pins have used up their share of the arena; unpin other keys first")]
    Full,
}

/// Sizes and counts of the memory tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    pub chunks: u64,
    /// Chunks that lack sections.
    pub incomplete_chunks: u64,
    /// Chunks adopted from an earlier boot and not checked yet.
    pub unchecked_chunks: u64,
    /// Free slots in segments that have a slot size.
    pub free_slots: u64,
    pub granted_slots: u64,
    /// Slots that are written, but have no digest yet.
    pub committed_slots: u64,
    pub published_slots: u64,
    /// Slots of dead writers.
    pub quarantined_slots: u64,
    /// Bytes of slots that are not free.
    pub used_bytes: u64,
    /// Bytes granted and not committed.
    pub granted_bytes: u64,
    pub leased_bytes: u64,
    pub soft_pinned_bytes: u64,
    pub admin_pinned_bytes: u64,
}

impl<T: Table> MemoryTier<T> {
    /// Chunks of this key, in all layouts.
    pub fn find_key(&self, key: &ChunkKey) -> Vec<Found> {
        self.index
            .with_key(key)
            .into_iter()
            .filter_map(|e| self.describe(e))
            .collect()
    }

    /// Length of a readable opaque object, and whether it is pinned.
    pub fn readable_object(&self, key: &ChunkKey) -> Option<(u64, bool)> {
        let with_key = self.index.with_key(key);
        let entry = with_key.into_iter().find(|e| self.index[*e].complete())?;
        let bytes = self.stored_bytes(self.index.handle(entry));
        Some((bytes, self.index[entry].admin_pin))
    }

    fn describe(&self, entry: u32) -> Option<Found> {
        let e = self.index.entry(entry)?;
        Some(Found {
            key: e.name.key,
            first_token: e.first_token,
            tokens: e.tokens,
            readable: e.complete(),
            bytes: e.bytes,
            readers: e.leases + e.soft_pins,
            pinned: e.admin_pin,
            expires_unix_s: e.expires_unix_s,
        })
    }

    /// Removes a listed chunk, even a pinned one. Its readers continue. False: it is not listed.
    pub fn remove_listed(&mut self, entry: u32) -> bool {
        if !self.index.entry(entry).is_some_and(|e| e.listed) {
            return false;
        }
        self.unpin(entry);
        self.doom(entry);
        true
    }

    /// Removes every chunk, including pinned ones. Slots being read stay until their leases end; slots being written are taken back from
    /// their writers. Returns the number of chunks removed from the index.
    pub fn clear(&mut self) -> u64 {
        let mut cleared = 0;
        for entry in 0..self.index.len() {
            cleared += u64::from(self.remove_listed(entry));
        }
        self.index.clear_orphans();
        cleared
    }

    /// Sizes and counts for the status. The cost is a few additions per owner and segment, independent of the arena's size.
    pub fn usage(&self) -> Usage {
        let slots = self.slots.counts();
        let of = |class: Class| self.index.count(class);
        Usage {
            chunks: of(Class::Unchecked) + of(Class::Checked),
            incomplete_chunks: of(Class::Incomplete),
            unchecked_chunks: of(Class::Unchecked),
            free_slots: self.slots.free_slots(),
            granted_slots: self.grants.slots(false),
            committed_slots: slots.committed,
            published_slots: slots.published,
            quarantined_slots: self.grants.slots(true),
            used_bytes: self.slots.used_bytes(),
            granted_bytes: slots.granted_bytes,
            leased_bytes: self.pins.leased_bytes(),
            soft_pinned_bytes: self.pins.soft_bytes(),
            admin_pinned_bytes: self.pins.admin_bytes(),
        }
    }
}
