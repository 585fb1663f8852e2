//! A tier below memory: fetches into slots that the engine owns, cancelled ones, and reads that outlive the engine.

use super::counts::Fault;
use super::memory::{ENGINE, rows_of};
use super::sidecar::survives;
use super::world::{World, say};
use crate::engine::FetchId;
use crate::sessions::Input;
use kvcachepool_protocol::refs::SectionRef;

/// A fetch of one section from a tier.
#[derive(Debug, Clone, Copy)]
pub struct Fetch {
    pub id: FetchId,
    pub region: usize,
    pub section: SectionRef,
    pub hash: u64,
    pub begun: bool,
    pub cancelled: bool,
}

impl World {
    /// A fetch begins, goes on, is cancelled or ends.
    pub fn fetch_step(&mut self) -> bool {
        if self.side.core.is_none() {
            return false;
        }
        if self.side.fetches.is_empty() || self.rng.chance(300) {
            return self.faults_on && self.fetch_begins();
        }
        let at = self.rng.below(self.side.fetches.len());
        let f = self.side.fetches[at];
        if !f.cancelled && self.faults_on && self.rng.chance(250) {
            return self.fetch_cancelled(f.id);
        }
        let (slot, generation, length) = (
            f.section.slot.get(),
            f.section.generation.get(),
            u64::from(f.section.length.get()),
        );
        if !f.begun && !f.cancelled {
            self.side.fetches[at].begun = true;
            self.touched(f.region, slot, rows_of(length));
            self.memory
                .borrow_mut()
                .begin_write(f.region, ENGINE, 0, slot, generation, length);
            self.collect();
            return true;
        }
        self.side.fetches.swap_remove(at);
        let whole = (!f.cancelled).then_some((f.hash, f.section.section.get()));
        if f.begun {
            self.memory
                .borrow_mut()
                .end_write(f.region, ENGINE, slot, whole);
        }
        let digest = self.memory.borrow().digest(f.region, slot, length);
        let now = self.core_now();
        let time = crate::engine::Time {
            mono_ms: now.mono_ms,
            unix_s: now.unix_s,
        };
        if let Some(engine) = self.side.core.as_mut().and_then(|c| c.engine_mut()) {
            survives(|| {
                if f.cancelled {
                    engine.fetch_ended(f.section);
                } else {
                    engine.fetched(time, f.section, digest);
                }
            });
        }
        say!(
            self,
            "fetch into slot {slot} ends, cancelled {}",
            f.cancelled
        );
        self.nudge();
        true
    }

    fn fetch_cancelled(&mut self, id: FetchId) -> bool {
        for f in self.side.fetches.iter_mut().filter(|f| f.id == id) {
            f.cancelled = true;
        }
        if let Some(engine) = self.side.core.as_mut().and_then(|c| c.engine_mut()) {
            survives(|| engine.cancel_fetch(id));
        }
        say!(self, "fetch {id:?} is cancelled");
        self.hit(Fault::FetchCancelled);
        self.nudge();
        true
    }

    fn fetch_begins(&mut self) -> bool {
        use super::memory::short;
        use super::text::{block_hashes, piece};
        use kvcachepool_protocol::key::{
            EngineHash, KeyKind, NamespaceId, chunk_key, unpack_hashes,
        };
        let domain = match self.side.domain.take() {
            Some(d) => d,
            None => self.domain(),
        };
        let (document, at) = (
            self.rng.below(self.p.documents),
            self.rng.below(self.p.chunks),
        );
        let piece = piece(document, at, None);
        let namespace = NamespaceId::default();
        let key = |h: &[u8; 32]| {
            chunk_key(
                &domain.model_id,
                &namespace,
                KeyKind::Prefix,
                &EngineHash(*h),
            )
        };
        let hashes = block_hashes(&piece);
        let [low, high] = domain.plan.section_map(1);
        let context = crate::engine::GrantContext {
            scheduler: 0,
            tag: 0,
            model: domain.model_id,
            layout: domain.layout_id,
            namespace,
            plan: &domain.plan,
            writers: &[],
            expires_unix_s: 0,
        };
        let wish = crate::engine::Wish {
            key: key(&piece.hash),
            parent: piece.parent.as_ref().map(&key),
            last_hash: EngineHash(piece.hash),
            first_token: piece.first_token,
            tokens: piece.tokens,
            sections: u128::from(low) | u128::from(high) << 64,
            block_hashes: unpack_hashes(&hashes).unwrap(),
        };
        let now = self.core_now();
        let time = crate::engine::Time {
            mono_ms: now.mono_ms,
            unix_s: now.unix_s,
        };
        let begun = self
            .side
            .core
            .as_mut()
            .and_then(|c| c.engine_mut())
            .and_then(|e| survives(|| e.fetch(time, &context, &wish)).flatten());
        self.side.domain = Some(domain);
        let region = self.memory.borrow().supervisor;
        let (Some((id, sections)), Some(region)) = (begun, region) else {
            self.nudge();
            return false;
        };
        self.hit(Fault::FetchBegun);
        say!(self, "fetch {id:?} begins: {sections:?}");
        for section in sections {
            self.side.fetches.push(Fetch {
                id,
                region,
                section,
                hash: short(&piece.hash),
                begun: false,
                cancelled: false,
            });
        }
        self.nudge();
        true
    }

    /// Passes on what the engine wants after it was called beside the socket.
    fn nudge(&mut self) {
        if self.memory.borrow().crashed {
            self.after(Vec::new(), Some(Fault::CrashAtTableWrite));
            return;
        }
        let rows = self.side.populated;
        self.drive(Input::Populated { rows });
    }
}
