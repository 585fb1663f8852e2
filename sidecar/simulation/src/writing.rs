//! Chunks that are written down: read from their slots while these are leased, and what tiers make of them.

use super::counts::Fault;
use super::lower::{Held, Store};
use super::memory::{Bytes, right_digest, rows_of, short};
use super::rules::Rule;
use super::world::World;
use kvcachepool_engine::table::ROW_BYTES;
use kvcachepool_engine::tier::{Cause, Kind, Stored};
use kvcachepool_engine::{Completion, Effect, Target, WriteJob};
use std::collections::btree_map::Entry;

/// Writes under way with a tier, and bytes that may wait.
pub const PUTS_MAX: u32 = 2;
pub const PUT_BYTES_MAX: u64 = 40 << 16;
/// Requests under whose names the slots of writes are leased.
const PUT_LEASES: u32 = 1 << 31;

impl World {
    /// The state machine wants a chunk written down.
    pub(super) fn put_ordered(&mut self, job: &WriteJob) {
        let (object, targets) = (&job.object, &job.sections);
        let hash = short(&object.last_hash.0);
        let Some(at) = self.memory.borrow().supervisor else {
            return;
        };
        let flips = |t: &Target| self.bytes_of(at, &t.section, hash) == Bytes::Flipped;
        let flipped = targets.iter().any(flips);
        for (section, target) in object.sections.iter().zip(targets) {
            let right = right_digest(hash, target.section.section.get(), section.raw_bytes);
            if section.raw_digest != right && !flipped {
                self.broke(Rule::S2, || {
                    format!("a head promises other bytes than those of its key: {section:?}")
                });
            }
        }
        self.lower.ever.insert(hash);
        let leased = targets
            .iter()
            .map(|t| (t.section.slot.get(), t.section.generation.get()))
            .map(|(slot, generation)| (slot, generation, PUT_LEASES + job.put as u32));
        self.memory.borrow_mut().regions[at].leased.extend(leased);
        self.hit(Fault::PutBegun);
    }

    /// A chunk is written only once at a time, and within bounds.
    pub(super) fn put_bounds(&mut self, tier: usize) {
        let (mut keys, mut bytes) = (Vec::new(), 0);
        for job in self.side.jobs.iter().filter(|j| j.tier == tier) {
            if let Effect::Write(write) = &job.effect {
                keys.push(write.object.key());
                bytes += job.bytes;
            }
        }
        let count = keys.len();
        let most = PUT_BYTES_MAX.min(u64::from(self.p.segments) * 64 * ROW_BYTES / 4);
        keys.sort_unstable();
        keys.dedup();
        if keys.len() < count {
            self.broke(Rule::S10, || "a chunk is written twice at once".into());
        }
        if count > PUTS_MAX as usize || count > 1 && bytes > most {
            self.broke(Rule::S9, || {
                format!("{count} writes of {bytes} bytes at once with tier {tier}")
            });
        }
    }

    /// After a flush, with all tiers at hand, each that is written to has what can be read in memory.
    pub(super) fn all_is_written(&mut self) {
        let Some(core) = self.side.core() else {
            return;
        };
        let Some(engine) = core.engine() else {
            return;
        };
        let mut lost = Vec::new();
        let everything = |s: &&Store| s.told_up && !s.clearing && s.kind != Kind::S3;
        for store in self.lower.stores.iter().filter(everything) {
            for hash in &self.lower.granted {
                let Some(key) = self.lower.key_of(hash) else {
                    continue;
                };
                let found = engine.find_key(&key);
                let readable = found.iter().any(|f| f.readable);
                if readable && !store.objects.contains_key(&key.0) {
                    lost.push((store.kind, key));
                }
            }
        }
        let flushes = engine.flushes();
        if flushes || !lost.is_empty() {
            self.broke(Rule::L4, || {
                format!("flush under way: {flushes}; not written: {lost:?}")
            });
        }
    }

    /// A write ends: what was read is compared with the head's digests, mostly.
    pub(super) fn put_ends(&mut self, tier: usize, region: usize, job: WriteJob, fails: bool) {
        let WriteJob {
            put,
            object,
            sections: targets,
            ..
        } = job;
        let hash = short(&object.last_hash.0);
        let as_promised = object.sections.iter().zip(&targets).all(|(section, t)| {
            let (slot, length) = (t.section.slot.get(), u64::from(t.section.length.get()));
            let m = self.memory.borrow();
            let writes = m.regions[region]
                .writers
                .iter()
                .any(|w| super::memory::overlap(w.slot, w.rows, slot, rows_of(length)));
            !writes && m.digest(region, slot, length) == section.raw_digest
        });
        // before the state machine lets the slots go
        for r in &mut self.memory.borrow_mut().regions {
            r.leased.retain(|l| l.2 != PUT_LEASES + put as u32);
        }
        let stored = if fails {
            Err(if self.rng.chance(500) {
                Cause::Full
            } else {
                Cause::Timeout
            })
        } else if !as_promised && !self.rng.chance(200) {
            Err(Cause::Corrupt)
        } else {
            let store = &mut self.lower.stores[tier];
            match store.objects.entry(object.key().0) {
                Entry::Occupied(_) => Ok(Stored::Already),
                Entry::Vacant(place) => {
                    store.spoilt.remove(&object.key().0);
                    place.insert(Held {
                        object: *object,
                        hash,
                        wrong: false,
                        stale: false,
                        // one that did not look at what it wrote is found out by who reads it
                        corrupt: !as_promised,
                    });
                    Ok(Stored::New)
                }
            }
        };
        self.hit(match stored {
            Ok(_) => Fault::PutStored,
            Err(Cause::Corrupt) => Fault::PutCorrupt,
            Err(_) => Fault::PutFailed,
        });
        self.tell_core(Completion::Write { put, stored });
    }
}
