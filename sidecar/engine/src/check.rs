//! Compares memory with its digests: before the answer (`Verify::Always`), beside it (`Verify::Background`), and once after a start. A
//! digest counts only if its slot still has the state and generation from the start of the check. It proves the state at that start, so a
//! later PROBE waits for another check.

use super::config::Verify;
use super::entry::NONE;
use super::mistake::Mistake;
use super::pace::CHECKS;
use super::table::{COMMITTED, FREE, PUBLISHED, Table};
use super::{Action, Engine, Time};

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
        let checked = self.entries.get(entry as usize).and_then(|e| e.checked_ms);
        match self.config.verify {
            Verify::Always => {
                checked.is_none_or(|at| at < since_ms && !T::makes(Mistake::AnswerFirst))
            }
            Verify::Background => checked.is_none(),
        }
    }

    /// Starts a background check if the last one is too old.
    pub(crate) fn check_if_old(&mut self, now: Time, entry: u32) {
        let Some(e) = self.entries.get(entry as usize) else {
            return;
        };
        let old = e
            .checked_ms
            .is_some_and(|at| now.mono_ms.saturating_sub(at) > self.config.verify_age_ms);
        // without budget, the next hit starts the check
        if old && e.checking == 0 && self.paced(now, entry) {
            self.start_check(now, entry, false, false);
        }
    }

    /// True if the rate limit allows a background check now.
    fn paced(&mut self, now: Time, entry: u32) -> bool {
        let bytes = self.stored_bytes(self.handle(entry));
        self.writes.take(now.mono_ms, CHECKS, bytes)
    }

    /// Compares all sections of an entry. A running check is not repeated, but becomes urgent.
    pub(crate) fn start_check(&mut self, now: Time, entry: u32, urgent: bool, sweep: bool) {
        let Some(e) = self.entries.get_mut(entry as usize) else {
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
            let row = self.table.row(row_number);
            if row.state != PUBLISHED {
                continue;
            }
            let number = match self.checks.get_mut(&row_number) {
                Some(check) if check.urgent || !urgent => continue,
                Some(check) => {
                    check.urgent = true;
                    check.number
                }
                None => {
                    self.last_check += 1;
                    self.checks.insert(
                        row_number,
                        Check {
                            number: self.last_check,
                            generation: row.generation,
                            urgent,
                            sweep,
                        },
                    );
                    if sweep {
                        self.sweeping += 1;
                    }
                    if let Some(e) = self.entries.get_mut(entry as usize) {
                        e.checking += 1;
                    }
                    self.last_check
                }
            };
            self.stats.checks += 1;
            self.actions.push(Action::Digest {
                slot: row_number,
                generation: row.generation,
                check: number,
                length: row.length,
                urgent,
            });
        }
    }

    /// Handles a digest. `None`: it could not be computed, which counts as a mismatch.
    pub fn digest_done(
        &mut self,
        now: Time,
        row_number: u32,
        generation: u32,
        check: u64,
        digest: Option<[u8; 16]>,
    ) {
        let row = self.table.row(row_number);
        let same = row.generation == generation;
        match row.state {
            COMMITTED if same || T::makes(Mistake::DigestGeneration) => match digest {
                Some(digest) => self.publish(now, row_number, &row, digest),
                None => self.lose_committed(row_number),
            },
            PUBLISHED if same => self.compare(now, row_number, check, digest),
            _ => {}
        }
        self.sweep(now);
    }

    /// A committed section without a digest: voids its grant.
    fn lose_committed(&mut self, row_number: u32) {
        if let Some(id) = self.by_row.get(&row_number).copied() {
            self.void(id);
        }
    }

    fn compare(&mut self, now: Time, row_number: u32, number: u64, digest: Option<[u8; 16]>) {
        let of_this = self.checks.get(&row_number);
        if of_this.is_none_or(|check| check.number != number) {
            return;
        }
        let Some(check) = self.checks.remove(&row_number) else {
            return;
        };
        if check.sweep {
            self.sweeping -= 1;
        }
        let row = self.table.row(row_number);
        let entry = row.chunk;
        let Some(e) = self
            .entries
            .get_mut(entry as usize)
            .filter(|e| e.live && check.generation == row.generation)
        else {
            return;
        };
        e.checking = e.checking.saturating_sub(1);
        if digest == Some(row.digest) || T::makes(Mistake::IgnoreMismatch) {
            if e.checking == 0 {
                e.checked_ms = Some(e.check_began_ms);
                self.recount(entry);
                self.wake_waiters(entry);
                if self.leases.waiters.contains_key(&entry) {
                    self.start_check(now, entry, true, false);
                }
            }
            return;
        }
        self.stats.corrupt_chunks += 1;
        self.corrupt(entry, row_number);
    }

    /// A check or the entry itself ended: answers the waiting PROBEs. PROBEs that arrived after the check began keep waiting.
    pub(crate) fn wake_waiters(&mut self, entry: u32) {
        let listed = self.entries.get(entry as usize).is_some_and(|e| e.listed);
        for id in self.leases.waiters.remove(&entry).unwrap_or_default() {
            let asked = self.leases.probes.get(&id).map(|p| p.asked_ms);
            if listed && asked.is_some_and(|asked_ms| self.must_check(entry, asked_ms)) {
                self.leases.waiters.entry(entry).or_default().push(id);
                continue;
            }
            let Some(probe) = self.leases.probes.get_mut(&id) else {
                continue;
            };
            probe.waits.retain(|h| h.entry != entry);
            if probe.answered {
                continue;
            }
            if !probe.open() {
                self.actions.push(Action::ProbeDone { probe: id });
            } else if let Some(asking) = probe.asking.as_mut().filter(|_| probe.waits.is_empty()) {
                // lower tiers may take longer than the checks
                asking.changed = true;
                self.lower.news.push(id);
            }
        }
    }

    /// The bytes of a section changed: its generation fails the loads in progress, and the entry leaves the index.
    fn corrupt(&mut self, entry: u32, row_number: u32) {
        if let Some(e) = self.entries.get_mut(entry as usize) {
            let row = self.table.row(row_number);
            if let Some(slot) = e.slots.get_mut(row.section as usize) {
                *slot = NONE;
            }
        }
        self.table.set_state(row_number, FREE);
        let generation = self.table.row(row_number).generation;
        self.table
            .set_generation(row_number, generation.wrapping_add(1));
        self.alloc.give(row_number);
        self.row_left(entry);
        // `doom` needs the record, which still names the chunk here
        self.doom(entry);
    }

    /// Continues the checks required after a start, a few at a time.
    pub(crate) fn sweep(&mut self, now: Time) {
        while self.sweeping < self.config.sweep_in_flight_max {
            let Some(handle) = self.sweep_queue.front().copied() else {
                return;
            };
            let waits = self
                .get(handle)
                .is_some_and(|e| e.checked_ms.is_none() && e.checking == 0);
            if waits && !self.paced(now, handle.entry) {
                return;
            }
            self.sweep_queue.pop_front();
            if waits {
                self.start_check(now, handle.entry, false, true);
            }
        }
    }
}
