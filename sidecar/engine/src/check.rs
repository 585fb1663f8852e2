//! Checks of redundant state between the parts, for tests and the simulation. Each line is one named invariant.

use super::Engine;
use super::memory::{Handle, say};
use super::table::Table;
use std::collections::BTreeMap;

impl<T: Table> Engine<T> {
    /// Returns the first violated invariant, by name and with numbers. It examines everything.
    pub fn check(&self) -> Result<(), String> {
        self.memory.slots.check_shared()?;
        self.check_notes()?;
        self.check_own()
    }

    /// Like [`Engine::check`], except for what other processes can write.
    pub(crate) fn check_own(&self) -> Result<(), String> {
        self.memory.check()?;
        self.verifier.check(&self.memory.slots)?;
        self.leases.check()?;
        self.check_pins()?;
        self.check_tiers()
    }

    /// Every pin of a chunk has a holder.
    fn check_pins(&self) -> Result<(), String> {
        let (soft, mut leased) = self.leases.held();
        for chunk in self.lower.being_written() {
            *leased.entry(chunk).or_default() += 1;
        }
        for (chunk, e) in self.memory.index.live() {
            let held = |pins: &BTreeMap<Handle, u32>| pins.get(&chunk).copied().unwrap_or(0);
            say(e.soft_pins == held(&soft), "SoftPinsEnd", || {
                format!("{chunk:?}: {} of {}", e.soft_pins, held(&soft))
            })?;
            say(e.leases == held(&leased), "LeasesEnd", || {
                format!("{chunk:?}: {} of {}", e.leases, held(&leased))
            })?;
        }
        Ok(())
    }
}
