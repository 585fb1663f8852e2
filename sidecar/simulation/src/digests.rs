//! The pool that takes digests, with its delays, and bits that flip in what is readable.

use super::counts::Fault;
use super::memory::{Bytes, FLIPPED, TORN, overlap, rows_of};
use super::rules::Rule;
use super::world::{World, say};
use kvcachepool_engine::sessions::Input;
use kvcachepool_engine::table::PUBLISHED;
use kvcachepool_engine::{Completion, DigestJob};
use kvcachepool_protocol::refs::SectionRef;
use std::collections::BTreeMap;

/// A digest under way.
#[derive(Debug, Clone)]
pub struct Digest {
    pub region: usize,
    pub work: DigestJob,
    pub begun: Option<[u8; 16]>,
    pub clean: bool,
}

impl World {
    /// A digest thread begins or ends a job.
    pub fn digest_step(&mut self) -> bool {
        if self.side.driver.is_none() || self.side.digests.is_empty() {
            return false;
        }
        if self.p.slow_digests && self.faults_on && self.rng.chance(700) {
            return false;
        }
        let at = self.rng.below(self.side.digests.len());
        let job = self.side.digests[at].clone();
        let Some(begun) = job.begun else {
            let digest = self
                .memory
                .borrow()
                .digest(job.region, job.work.slot, job.work.length);
            let writes = self.memory.borrow().regions[job.region]
                .writers
                .iter()
                .any(|w| overlap(w.slot, w.rows, job.work.slot, rows_of(job.work.length)));
            self.side.digests[at].begun = Some(digest);
            self.side.digests[at].clean = !writes;
            return true;
        };
        self.side.digests.swap_remove(at);
        let mut digest = Some(begun);
        if !job.clean {
            let mut torn = begun;
            torn[0] ^= 1;
            digest = Some(torn);
        }
        if self.faults_on && self.rng.chance(self.p.rates.digest_fails) {
            self.hit(Fault::DigestFailed);
            digest = None;
        }
        let row = self.memory.borrow().regions[job.region].rows[job.work.slot as usize];
        if row.generation != job.work.generation || !matches!(row.state, 2 | 3) {
            self.hit(Fault::DigestOfStaleSlot);
        }
        let differs = row.state == PUBLISHED
            && row.generation == job.work.generation
            && digest != Some(row.digest);
        if differs {
            self.memory.borrow_mut().may_go = Some(job.work.slot);
            if digest.is_some() {
                self.hit(Fault::FlipFound);
            }
        }
        say!(
            self,
            "digest of slot {} generation {} ends, differs {differs}",
            job.work.slot,
            job.work.generation
        );
        let boot = self.side.boot;
        self.drive(Input::Completed(Completion::Digest {
            slot: job.work.slot,
            generation: job.work.generation,
            check: job.work.check,
            digest,
        }));
        self.memory.borrow_mut().may_go = None;
        if differs && self.side.driver.is_some() && self.side.boot == boot {
            self.mismatch_counts(&job);
        }
        true
    }

    /// A slot whose digest differs again and again should be gone.
    fn mismatch_counts(&mut self, job: &Digest) {
        let row = self.memory.borrow().regions[job.region].rows[job.work.slot as usize];
        if row.state != PUBLISHED || row.generation != job.work.generation {
            return;
        }
        let list = &mut self.side.mismatches;
        let seen = match list
            .iter_mut()
            .find(|(s, g, _)| (*s, *g) == (job.work.slot, job.work.generation))
        {
            Some((_, _, n)) => {
                *n += 1;
                *n
            }
            None => {
                list.push((job.work.slot, job.work.generation, 1));
                1
            }
        };
        if seen >= 3 {
            self.broke(Rule::S6, || {
                format!(
                    "slot {} is still readable after {seen} digests that differ",
                    job.work.slot
                )
            });
        }
    }

    /// Bits of a readable slot flip.
    pub fn flip(&mut self) -> bool {
        let Some(at) = self.memory.borrow().supervisor else {
            return false;
        };
        let row = {
            let m = self.memory.borrow();
            let rows = &m.regions[at].rows;
            let first = self.rng.below(rows.len());
            (0..rows.len())
                .map(|n| (first + n) % rows.len())
                .find(|r| rows[*r].state == PUBLISHED)
        };
        let Some(row) = row else { return false };
        {
            let mut m = self.memory.borrow_mut();
            let c = &mut m.regions[at].content[row];
            if *c & (TORN | FLIPPED) != 0 {
                return false;
            }
            *c |= FLIPPED;
        }
        self.side.flips.insert(row as u32, self.now);
        self.hit(Fault::BitFlip);
        say!(self, "a bit of slot {row} flips");
        true
    }

    /// Remembers which bytes of a region flipped before this boot.
    pub(super) fn note_flips(&mut self, region: Option<usize>) {
        let m = self.memory.borrow();
        let flipped = |c: &u64| c & FLIPPED != 0 && c & TORN == 0;
        self.side.flips = match region {
            Some(at) => (0u32..)
                .zip(&m.regions[at].content)
                .filter(|(_, c)| flipped(c))
                .map(|(row, _)| (row, 0))
                .collect(),
            None => BTreeMap::new(),
        };
    }

    /// How the rows of a reference compare with a key.
    pub fn bytes_of(&self, region: usize, section: &SectionRef, hash: u64) -> Bytes {
        let rows = rows_of(u64::from(section.length.get()));
        self.memory.borrow().compare(
            region,
            section.slot.get(),
            rows,
            hash,
            section.section.get(),
        )
    }
}
