//! Random use, restarts in between, all invariants after every step; and at the end everything comes back.

use super::rig::*;
use crate::config::{Config, EvictionPolicy};
use crate::table::{FREE, PUBLISHED, Table};
use crate::*;
use kvcachepool_protocol::refs::SectionRef;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Grant {
        path: Vec<u8>,
        tail: u8,
        groups: u32,
    },
    Commit {
        pick: usize,
    },
    Abort {
        pick: usize,
    },
    AbortTag {
        back: u64,
    },
    Fetch {
        path: Vec<u8>,
    },
    Fetched {
        pick: usize,
    },
    FetchEnded {
        pick: usize,
    },
    Digest {
        pick: usize,
        wrong: bool,
    },
    Probe {
        request: u8,
        path: Vec<u8>,
    },
    Pin {
        request: u8,
        from: u32,
        to: u32,
        back: u64,
    },
    Release {
        request: u8,
    },
    Death {
        owner: usize,
        quarantine_ms: u64,
    },
    Reconcile {
        owner: usize,
        keep: usize,
    },
    AdminPin {
        path: Vec<u8>,
    },
    Clear,
    Pass {
        ms: u64,
    },
    Restart {
        cold: bool,
    },
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0u8..3, 1..5)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (path(), 0u8..8, 1u32..4).prop_map(|(path, tail, groups)| Step::Grant { path, tail, groups }),
        10 => any::<usize>().prop_map(|pick| Step::Commit { pick }),
        1 => any::<usize>().prop_map(|pick| Step::Abort { pick }),
        1 => (0u64..6).prop_map(|back| Step::AbortTag { back }),
        2 => path().prop_map(|path| Step::Fetch { path }),
        2 => any::<usize>().prop_map(|pick| Step::Fetched { pick }),
        1 => any::<usize>().prop_map(|pick| Step::FetchEnded { pick }),
        12 => (any::<usize>(), 0u8..40).prop_map(|(pick, w)| Step::Digest { pick, wrong: w == 0 }),
        6 => (0u8..4, path()).prop_map(|(request, path)| Step::Probe { request, path }),
        3 => (0u8..4, 0u32..2, 0u32..4, 0u64..3).prop_map(|(request, from, to, back)| Step::Pin { request, from, to, back }),
        3 => (0u8..4).prop_map(|request| Step::Release { request }),
        1 => (0usize..2, 0u64..2).prop_map(|(owner, q)| Step::Death { owner, quarantine_ms: q * 30_000 }),
        1 => (0usize..2, any::<usize>()).prop_map(|(owner, keep)| Step::Reconcile { owner, keep }),
        1 => path().prop_map(|path| Step::AdminPin { path }),
        1 => (0u8..10).prop_map(|n| if n == 0 { Step::Clear } else { Step::Pass { ms: 100 } }),
        3 => (0u64..20_000).prop_map(|ms| Step::Pass { ms }),
        1 => (0u8..4).prop_map(|c| Step::Restart { cold: c == 0 }),
    ]
}

struct Run {
    rig: Rig,
    granted: Vec<SectionRef>,
    digests: Vec<(u32, u32, u64)>,
    fetched: Vec<(FetchId, SectionRef)>,
}

impl Run {
    fn owner(section: u32) -> u32 {
        OWNERS[section as usize % 2]
    }

    fn collect(&mut self) {
        loop {
            let digests = self.rig.digests();
            let changed = self.rig.engine.take_changed();
            if digests.is_empty() && changed.is_empty() {
                return;
            }
            let known = digests.iter().map(|d| (d.slot, d.generation, d.check));
            self.digests.extend(known);
            for change in changed {
                if let Changed::Final { probe } = change {
                    self.rig.engine.final_answer(self.rig.now, probe);
                }
            }
        }
    }

    fn take(&mut self, step: Step) {
        let rig = &mut self.rig;
        match step {
            Step::Grant { path, tail, groups } => {
                let tokens = if tail < 3 {
                    (u32::from(tail) + 1) * 16
                } else {
                    CHUNK_TOKENS
                };
                let (_, refs) = rig.grant(&path, tokens, groups);
                self.granted.extend(refs);
            }
            Step::Commit { pick } if !self.granted.is_empty() => {
                let r = self.granted.swap_remove(pick % self.granted.len());
                rig.engine.memory.commit(Self::owner(r.section.get()), r);
            }
            Step::Abort { pick } if !self.granted.is_empty() => {
                let r = self.granted.swap_remove(pick % self.granted.len());
                rig.engine.memory.abort(Self::owner(r.section.get()), r);
            }
            Step::Fetch { path } => {
                if let Some((id, refs)) = rig.fetch(&path) {
                    self.fetched.extend(refs.into_iter().map(|r| (id, r)));
                }
            }
            Step::Fetched { pick } if !self.fetched.is_empty() => {
                let (_, r) = self.fetched.swap_remove(pick % self.fetched.len());
                rig.engine
                    .memory
                    .fetched(rig.now, r, [r.slot.get() as u8; 16]);
            }
            Step::FetchEnded { pick } if !self.fetched.is_empty() => {
                let (id, r) = self.fetched.swap_remove(pick % self.fetched.len());
                rig.engine.memory.cancel_fetch(id);
                rig.engine.memory.fetch_ended(r);
            }
            Step::AbortTag { back } => {
                rig.engine
                    .memory
                    .abort_grant(1, rig.tag.saturating_sub(back), None);
            }
            Step::Digest { pick, wrong } if !self.digests.is_empty() => {
                let (slot, generation, check) = self.digests.swap_remove(pick % self.digests.len());
                let byte = if wrong { 0xEE } else { slot as u8 };
                rig.engine
                    .digest_done(rig.now, slot, generation, check, Some([byte; 16]));
            }
            Step::Probe { request, path } => {
                let known = rig.probe(&format!("r{request}"), &path).1;
                assert_eq!(known.states.len(), path.len());
            }
            Step::Pin {
                request,
                from,
                to,
                back,
            } => {
                let tag = rig.tag.saturating_sub(back);
                rig.engine
                    .pin(rig.now, 1, &format!("r{request}"), tag, from, to);
            }
            Step::Release { request } => rig.engine.release(rig.now, 1, &format!("r{request}")),
            Step::Death {
                owner,
                quarantine_ms,
            } => rig
                .engine
                .memory
                .owner_died(rig.now, OWNERS[owner], quarantine_ms),
            Step::Reconcile { owner, keep } => {
                let named: Vec<(u32, u32)> = self
                    .granted
                    .iter()
                    .skip(keep % 4)
                    .map(|r| (r.slot.get(), r.generation.get()))
                    .collect();
                rig.engine.memory.reconcile(OWNERS[owner], &named, false);
            }
            Step::AdminPin { path } => {
                let _ = rig
                    .engine
                    .memory
                    .pin_key(rig.now, &key(&path, CHUNK_TOKENS), 10_000);
            }
            Step::Clear => {
                rig.engine.clear();
            }
            Step::Pass { ms } => {
                rig.now.mono_ms += ms;
                rig.engine.tick(rig.now);
            }
            Step::Restart { cold } => {
                let table = rig.engine.table().clone();
                let config = rig.engine.memory.config.clone();
                rig.engine = Engine::new(rig.now, table, config, cold);
                self.digests.clear();
                self.fetched.clear();
            }
            _ => {}
        }
        self.collect();
    }

    fn end(&mut self) {
        for request in 0..4 {
            self.rig
                .engine
                .release(self.rig.now, 1, &format!("r{request}"));
        }
        for (_, r) in std::mem::take(&mut self.fetched) {
            self.rig.engine.memory.fetch_ended(r);
        }
        for owner in OWNERS {
            self.rig.engine.memory.owner_died(self.rig.now, owner, 0);
        }
        for (slot, generation, check) in std::mem::take(&mut self.digests) {
            let digest = Some([slot as u8; 16]);
            self.rig
                .engine
                .digest_done(self.rig.now, slot, generation, check, digest);
        }
        for _ in 0..3 {
            self.rig.now.mono_ms += 60_000;
            self.rig.engine.tick(self.rig.now);
            self.collect();
            self.rig.digest_all();
        }
    }
}

proptest! {
    #[test]
    fn invariants_hold_under_random_use_and_everything_comes_back(
        policy in prop_oneof![
            Just(EvictionPolicy::S3Fifo), Just(EvictionPolicy::Lru), Just(EvictionPolicy::Lfu), Just(EvictionPolicy::Fifo)
        ],
        steps in prop::collection::vec(step(), 1..300)
    ) {
        // 64 rows in one segment: full sections of four rows, tails of one and two
        let mut config = Config { policy, ..Config::default() };
        config.limits.granted_bytes_max = 3 << 20;
        let rig = Rig::new(4 << 20, config, plan(2, true, 64 << 10));
        let mut run = Run { rig, granted: Vec::new(), digests: Vec::new(), fetched: Vec::new() };
        for step in steps {
            let said = format!("{step:?}");
            run.take(step);
            if let Err(broken) = run.rig.engine.check() {
                return Err(TestCaseError::fail(format!("{broken} after {said}")));
            }
        }
        run.end();
        prop_assert_eq!(run.rig.engine.check(), Ok(()));
        let table = run.rig.engine.table();
        for row in 0..table.geometry().rows {
            let state = table.row(row).state;
            prop_assert!(state == FREE || state == PUBLISHED, "row {row} is {state}");
        }
        let usage = run.rig.engine.memory.usage();
        prop_assert_eq!((usage.leased_bytes, usage.soft_pinned_bytes, usage.granted_bytes), (0, 0, 0));
        prop_assert_eq!(usage.incomplete_chunks, 0);
        prop_assert!(run.rig.engine.memory.grants.is_empty());
    }
}
