//! Pins keep chunks from being evicted: soft pins of PROBEs, read leases, and pins of an administrator.

use super::entry::{Entry, Handle};
use super::{MemoryTier, PinError};
use crate::Time;
use crate::mistake::Mistake;
use crate::table::Table;
use kvcachepool_protocol::key::ChunkKey;
use std::collections::BTreeMap;

/// Bytes held by each kind of pin. A chunk counts once per kind.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    soft_bytes: u64,
    leased_bytes: u64,
    /// End of each admin pin, by entry. Monotonic milliseconds.
    admin: BTreeMap<u32, u64>,
    admin_bytes: u64,
}

impl Pins {
    pub fn soft_bytes(&self) -> u64 {
        self.soft_bytes
    }

    pub fn leased_bytes(&self) -> u64 {
        self.leased_bytes
    }

    pub fn admin_bytes(&self) -> u64 {
        self.admin_bytes
    }
}

impl<T: Table> MemoryTier<T> {
    /// Adds a soft pin. Returns false if soft pins have no bytes left for it in their share of the arena.
    pub fn pin_softly(&mut self, handle: Handle) -> bool {
        let share = self.share(self.config.limits.soft_pin_percent_max);
        let (soft_bytes, keeps_share) = (self.pins.soft_bytes, !T::makes(Mistake::PinShare));
        let Some(e) = self.index.get_mut(handle) else {
            return false;
        };
        let adds = if e.soft_pins == 0 { e.weight } else { 0 };
        if soft_bytes + adds > share && keeps_share {
            return false;
        }
        e.soft_pins += 1;
        self.pins.soft_bytes += adds;
        true
    }

    pub fn unpin_softly(&mut self, handle: Handle) {
        let Some(e) = self.index.get_mut(handle) else {
            return;
        };
        e.soft_pins = e.soft_pins.saturating_sub(1);
        if e.soft_pins == 0 {
            let bytes = e.weight;
            self.pins.soft_bytes = self.pins.soft_bytes.saturating_sub(bytes);
            self.let_go(handle.entry);
        }
    }

    /// True if a lease of a client's object would exceed the share of soft pins. Its reader then relies on generations.
    pub fn leases_are_full(&self, handle: Handle) -> bool {
        let share = self.share(self.config.limits.soft_pin_percent_max);
        let adds = |e: &Entry| if e.leases == 0 { e.weight } else { 0 };
        let adds = self.index.get(handle).map_or(0, adds);
        self.pins.leased_bytes + adds > share
    }

    /// True if a chunk of this size can be pinned softly at all.
    pub fn pinnable(&self, bytes: u64) -> bool {
        bytes <= self.share(self.config.limits.soft_pin_percent_max)
    }

    pub fn lease(&mut self, handle: Handle) {
        let Some(e) = self.index.get_mut(handle) else {
            return;
        };
        e.leases += 1;
        if e.leases == 1 {
            let bytes = e.weight;
            self.pins.leased_bytes += bytes;
        }
    }

    pub fn unlease(&mut self, handle: Handle) {
        let Some(e) = self.index.get_mut(handle) else {
            return;
        };
        e.leases = e.leases.saturating_sub(1);
        if e.leases == 0 {
            let bytes = e.weight;
            self.pins.leased_bytes = self.pins.leased_bytes.saturating_sub(bytes);
            self.let_go(handle.entry);
        }
    }

    /// A pin or lease of the entry ended.
    fn let_go(&mut self, entry: u32) {
        self.remove_if_idle(entry);
        self.unpark(entry);
    }

    /// Drops all pins of a removed entry.
    pub(super) fn drop_pins(&mut self, entry: u32) {
        let Some(e) = self.index.entry_mut(entry) else {
            return;
        };
        let bytes = e.weight;
        let pins = &mut self.pins;
        if std::mem::take(&mut e.soft_pins) > 0 {
            pins.soft_bytes = pins.soft_bytes.saturating_sub(bytes);
        }
        if std::mem::take(&mut e.leases) > 0 {
            pins.leased_bytes = pins.leased_bytes.saturating_sub(bytes);
        }
        if std::mem::take(&mut e.admin_pin) {
            pins.admin.remove(&entry);
            pins.admin_bytes = pins.admin_bytes.saturating_sub(bytes);
        }
    }

    /// Pins chunks of this key for `ttl_ms` (0: until unpinned). Pinned chunks are not evicted, but they may expire or turn out corrupt.
    pub fn pin_key(&mut self, now: Time, key: &ChunkKey, ttl_ms: u64) -> Result<(), PinError> {
        let entries: Vec<u32> = self
            .index
            .with_key(key)
            .into_iter()
            .filter(|e| self.index[*e].complete())
            .collect();
        if entries.is_empty() {
            return Err(PinError::NotFound);
        }
        let until = if ttl_ms == 0 {
            u64::MAX
        } else {
            now.mono_ms.saturating_add(ttl_ms)
        };
        let share = self.share(self.config.limits.admin_pin_percent_max);
        for entry in entries {
            let e = &mut self.index[entry];
            if !e.admin_pin {
                if self.pins.admin_bytes + e.weight > share {
                    return Err(PinError::Full);
                }
                e.admin_pin = true;
                self.pins.admin_bytes += e.weight;
            }
            self.pins.admin.insert(entry, until);
        }
        Ok(())
    }

    /// Ends the pins of this key. Returns false if there were none.
    pub fn unpin_key(&mut self, key: &ChunkKey) -> bool {
        let mut any = false;
        for entry in self.index.with_key(key) {
            any |= self.unpin(entry);
        }
        any
    }

    pub(super) fn unpin(&mut self, entry: u32) -> bool {
        if self.pins.admin.remove(&entry).is_none() {
            return false;
        }
        let Some(e) = self.index.entry_mut(entry) else {
            return false;
        };
        if std::mem::take(&mut e.admin_pin) {
            self.pins.admin_bytes = self.pins.admin_bytes.saturating_sub(e.weight);
        }
        self.let_go(entry);
        true
    }

    pub(crate) fn end_admin_pins(&mut self, now: Time) {
        let over: Vec<u32> = self
            .pins
            .admin
            .iter()
            .filter(|(_, until)| **until <= now.mono_ms)
            .map(|(e, _)| *e)
            .collect();
        for entry in over {
            self.unpin(entry);
        }
    }
}
