//! Compares memory with its digests: before the answer (`Verify::Always`), beside it (`Verify::Background`), and once after a start. A
//! digest counts only if its slot still has the state and generation from the start of the check. It proves the state at that start, so a
//! later PROBE waits for another check.

use super::config::Verify;
use super::effect::{DigestJob, Effect};
use super::memory::{Handle, NONE, SlotTable, say};
use super::mistake::Mistake;
use super::name::FastMap;
use super::pace::CHECKS;
use super::table::{FREE, PUBLISHED, Table};
use super::{Changed, Engine, Time};
use std::collections::VecDeque;

/// Digest checks in flight, and the chunks that must be checked after a start.
#[derive(Debug, Default)]
pub(crate) struct Verifier {
    /// By row.
    checks: FastMap<u32, Check>,
    last_check: u64,
    /// Checks of the sweep in flight.
    sweeping: u32,
    sweep_queue: VecDeque<Handle>,
}

impl Verifier {
    /// Queues chunks of an earlier boot.
    pub fn adopt(&mut self, chunks: Vec<Handle>) {
        self.sweep_queue.extend(chunks);
    }

    /// Forgets the check of a row that was freed with this generation.
    pub fn forget(&mut self, row: u32, generation: u32) {
        let freed = |check: &Check| check.generation == generation;
        if self.checks.get(&row).is_some_and(freed) {
            self.take(row);
        }
    }

    /// The sweep's checks are counted, and each check is of a published slot, or of a slot whose end was not reported yet.
    pub fn check<T: Table>(&self, slots: &SlotTable<T>) -> Result<(), String> {
        let sweeping = self.checks.values().filter(|c| c.sweep).count();
        say(sweeping == self.sweeping as usize, "SweepIsCounted", || {
            format!("{} counted, {sweeping} there", self.sweeping)
        })?;
        for (number, check) in &self.checks {
            let row = slots.row(*number);
            let same = row.generation != check.generation || matches!(row.state, PUBLISHED | FREE);
            say(same, "ChecksAreOfPublishedSlots", || {
                format!("slot {number}: {check:?}, {row:?}")
            })?;
        }
        Ok(())
    }

    fn take(&mut self, row: u32) -> Option<Check> {
        let check = self.checks.remove(&row)?;
        if check.sweep {
            self.sweeping -= 1;
        }
        Some(check)
    }

    /// Notes a check of a row. Returns its number; none if it is in flight already, and at least as urgent.
    fn begin(&mut self, row: u32, check: Check) -> Option<Begun> {
        let stale = |known: &Check| known.generation != check.generation;
        if self.checks.get(&row).is_some_and(stale) {
            // of the row's earlier use, whose end was not reported yet
            self.take(row);
        }
        match self.checks.get_mut(&row) {
            Some(known) if known.urgent || !check.urgent => None,
            Some(known) => {
                known.urgent = true;
                Some(Begun {
                    number: known.number,
                    new: false,
                })
            }
            None => {
                self.last_check += 1;
                let number = self.last_check;
                self.sweeping += u32::from(check.sweep);
                self.checks.insert(row, Check { number, ..check });
                Some(Begun { number, new: true })
            }
        }
    }
}

/// A check whose digest is to be computed.
struct Begun {
    number: u64,
    /// False: it was in flight, and became urgent.
    new: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Check {
    /// Returned with its digests. Digests of an earlier check of the slot may still arrive.
    pub number: u64,
    pub generation: u32,
    pub urgent: bool,
    pub sweep: bool,
}

impl<T: Table> Engine<T> {
    /// True if a PROBE that arrived at `since_ms` must wait for a check of this entry. A check begun in the same millisecond counts.
    pub(crate) fn must_check(&self, entry: u32, since_ms: u64) -> bool {
        let checked = self.memory.index.entry(entry).and_then(|e| e.checked_ms);
        match self.memory.config.verify {
            Verify::Always => {
                checked.is_none_or(|at| at < since_ms && !T::makes(Mistake::AnswerFirst))
            }
            Verify::Background => checked.is_none(),
        }
    }

    /// Starts a background check if the last one is too old.
    pub(crate) fn check_if_old(&mut self, now: Time, entry: u32) {
        let Some(e) = self.memory.index.entry(entry) else {
            return;
        };
        let old = e
            .checked_ms
            .is_some_and(|at| now.mono_ms.saturating_sub(at) > self.memory.config.verify_age_ms);
        // without budget, the next hit starts the check
        if old && e.checking == 0 && self.paced(now, entry) {
            self.start_check(now, entry, false, false);
        }
    }

    /// True if the rate limit allows a background check now.
    fn paced(&mut self, now: Time, entry: u32) -> bool {
        let bytes = self.memory.stored_bytes(self.memory.index.handle(entry));
        self.writes.take(now.mono_ms, CHECKS, bytes)
    }

    /// Compares all sections of an entry. A running check is not repeated, but becomes urgent.
    pub(crate) fn start_check(&mut self, now: Time, entry: u32, urgent: bool, sweep: bool) {
        let Some(e) = self.memory.index.entry_mut(entry) else {
            return;
        };
        if e.checking == 0 {
            e.check_began_ms = now.mono_ms;
        }
        let slots = e.slots.clone();
        for row_number in slots {
            if row_number == NONE {
                continue;
            }
            let row = self.memory.slots.row(row_number);
            if row.state != PUBLISHED {
                continue;
            }
            let check = Check {
                number: 0,
                generation: row.generation,
                urgent,
                sweep,
            };
            let Some(begun) = self.verifier.begin(row_number, check) else {
                continue;
            };
            if begun.new
                && let Some(e) = self.memory.index.entry_mut(entry)
            {
                e.checking += 1;
            }
            self.memory.stats.checks += 1;
            self.effects.push(Effect::Digest(DigestJob {
                slot: row_number,
                generation: row.generation,
                check: begun.number,
                length: row.length,
                urgent,
            }));
        }
    }

    pub(crate) fn compare(
        &mut self,
        now: Time,
        row_number: u32,
        number: u64,
        digest: Option<[u8; 16]>,
    ) {
        let of_this = self.verifier.checks.get(&row_number);
        if of_this.is_none_or(|check| check.number != number) {
            return;
        }
        let Some(check) = self.verifier.take(row_number) else {
            return;
        };
        let row = self.memory.slots.row(row_number);
        let entry = row.chunk;
        let Some(e) = self
            .memory
            .index
            .entry_mut(entry)
            .filter(|e| e.live && check.generation == row.generation)
        else {
            return;
        };
        e.checking = e.checking.saturating_sub(1);
        if digest == Some(row.digest) || T::makes(Mistake::IgnoreMismatch) {
            if e.checking == 0 {
                e.checked_ms = Some(e.check_began_ms);
                self.memory.index.recount(entry);
                let chunk = self.memory.index.handle(entry);
                self.wake_waiters(chunk);
                if self.leases.is_awaited(chunk) {
                    self.start_check(now, entry, true, false);
                }
            }
            return;
        }
        self.memory.corrupt(entry, row_number);
    }

    /// A check of the chunk, or the chunk itself, ended: answers the waiting PROBEs. PROBEs that arrived after the check began keep waiting.
    pub(crate) fn wake_waiters(&mut self, chunk: Handle) {
        let listed = self.memory.index.get(chunk).is_some_and(|e| e.listed);
        for id in self.leases.take_waiters(chunk) {
            let asked = self.leases.probe(id).map(|p| p.asked_ms);
            if listed && asked.is_some_and(|asked_ms| self.must_check(chunk.entry, asked_ms)) {
                self.leases.wait(chunk, id);
                continue;
            }
            let Some(probe) = self.leases.probe_mut(id) else {
                continue;
            };
            probe.waits.remove(&chunk);
            if probe.answered {
                continue;
            }
            if !probe.open() {
                self.changed.push(Changed::Final { probe: id });
            } else if let Some(tier_lookup) = probe
                .tier_lookup
                .as_mut()
                .filter(|_| probe.waits.is_empty())
            {
                // lower tiers may take longer than the checks
                tier_lookup.changed = true;
                self.lower.changed(id);
            }
        }
    }

    /// Continues the checks required after a start, a few at a time.
    pub(crate) fn sweep(&mut self, now: Time) {
        while self.verifier.sweeping < self.memory.config.sweep_in_flight_max {
            let Some(handle) = self.verifier.sweep_queue.front().copied() else {
                return;
            };
            let waits = self
                .memory
                .index
                .get(handle)
                .is_some_and(|e| e.checked_ms.is_none() && e.checking == 0);
            if waits && !self.paced(now, handle.entry) {
                return;
            }
            self.verifier.sweep_queue.pop_front();
            if waits {
                self.start_check(now, handle.entry, false, true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(generation: u32, urgent: bool, sweep: bool) -> Check {
        Check {
            number: 0,
            generation,
            urgent,
            sweep,
        }
    }

    #[test]
    fn a_check_of_an_earlier_use_of_a_row_does_not_stand_for_a_new_one() {
        let mut verifier = Verifier::default();
        let first = verifier.begin(7, check(1, true, true)).unwrap();
        assert!(verifier.begin(7, check(1, true, false)).is_none());
        let second = verifier.begin(7, check(2, true, false)).unwrap();
        assert!(second.new && second.number > first.number);
        assert_eq!(verifier.sweeping, 0);
        verifier.forget(7, 1);
        assert!(verifier.begin(7, check(2, true, false)).is_none());
        verifier.forget(7, 2);
        assert!(verifier.checks.is_empty());
    }
}
