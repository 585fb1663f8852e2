//! Status, health and metrics, and the administrative operations.

use super::core::Core;
use super::seam::{Host, Now, Output};
use crate::table::ROW_BYTES;
use crate::{Durations, EventDomain, Found, PinError};
use kvcachepool_protocol::domain;
use kvcachepool_protocol::key::ChunkKey;
use kvcachepool_protocol::message::{ErrorCode, Role};
use kvcachepool_protocol::status::{
    Counters, Domain, MemoryTier, Reason, Session, Slots, State, Status, Tier,
};
use std::collections::BTreeMap;

/// Why an administrative operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    #[error("invalid chunk key \"{0}\": expected 64 hex digits")]
    BadKey(String),
    #[error("no memory tier: {0}")]
    NoArena(String),
    #[error("{0}")]
    Pin(#[from] PinError),
}

impl AdminError {
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::BadKey(_) => ErrorCode::BadHashes,
            Self::NoArena(_) => ErrorCode::NoArena,
            Self::Pin(PinError::NotFound) => ErrorCode::NotFound,
            Self::Pin(PinError::Full) => ErrorCode::LimitReached,
        }
    }
}

impl<H: Host> Core<H> {
    /// Chunks with these keys, in all layouts.
    pub fn lookup(&self, keys: &[String]) -> Result<Vec<Found>, AdminError> {
        let keys = parse_keys(keys)?;
        let Some(engine) = &self.engine else {
            return Err(self.no_arena_error());
        };
        Ok(keys
            .iter()
            .flat_map(|key| engine.memory.find_key(key))
            .collect())
    }

    /// Removes every chunk from memory, and starts the clear of lower tiers, which are unavailable meanwhile. Returns the number of chunks
    /// removed from memory.
    pub fn clear(&mut self, now: Now, out: &mut Vec<Output>) -> Result<u64, AdminError> {
        let Some(engine) = &mut self.engine else {
            return Err(self.no_arena_error());
        };
        for domain in self.instances.values().filter_map(|i| i.domain.as_ref()) {
            engine
                .lower
                .note_domain(domain.model_id, domain.object_layout);
        }
        let cleared = engine.clear();
        self.act(now, out);
        Ok(cleared)
    }

    /// Pins chunks for `ttl_s` seconds; 0 = until unpinned. Returns the number of pinned keys. Stops at the first key that cannot be
    /// pinned.
    pub fn pin(&mut self, now: Now, keys: &[String], ttl_s: u64) -> Result<u64, AdminError> {
        let keys = parse_keys(keys)?;
        let Some(engine) = &mut self.engine else {
            return Err(self.no_arena_error());
        };
        for key in &keys {
            engine
                .memory
                .pin_key(now, key, ttl_s.saturating_mul(1000))?;
        }
        Ok(keys.len() as u64)
    }

    /// Ends pins. Returns the number of keys that had one.
    pub fn unpin(
        &mut self,
        now: Now,
        keys: &[String],
        out: &mut Vec<Output>,
    ) -> Result<u64, AdminError> {
        let keys = parse_keys(keys)?;
        let Some(engine) = &mut self.engine else {
            return Err(self.no_arena_error());
        };
        let ended = keys
            .iter()
            .filter(|key| engine.memory.unpin_key(key))
            .count() as u64;
        self.act(now, out);
        Ok(ended)
    }

    fn no_arena_error(&self) -> AdminError {
        AdminError::NoArena(self.no_arena.0.to_owned())
    }

    /// Overall state, and the reasons why the sidecar is not ready. Used by readiness probes.
    pub fn health(&self) -> (State, Vec<Reason>) {
        let reasons = match &self.engine {
            Some(_) => Vec::new(),
            None => vec![Reason {
                code: self.no_arena.0.into(),
                message: self.no_arena.1.clone(),
            }],
        };
        let state = match (self.draining, &self.engine) {
            (true, _) => State::Draining,
            (false, Some(_)) => State::Ready,
            (false, None) => State::Degraded,
        };
        (state, reasons)
    }

    /// The state machine's part of the status. The shell adds version, configuration and container.
    pub fn status(&self, now: Now) -> Status {
        let memory = self.memory_status();
        let (state, reasons) = self.health();
        Status {
            boot: self.boot,
            version: self.version.clone(),
            protocol: kvcachepool_protocol::PROTOCOL_VERSION,
            uptime_s: (now.mono_ms - self.started.mono_ms.min(now.mono_ms)) / 1000,
            state,
            reasons,
            tiers: std::iter::once(Tier {
                name: "memory".into(),
                state: memory.state,
                reason: memory.reason.clone(),
                used_bytes: memory.used_bytes,
                capacity_bytes: memory.capacity_bytes,
                ..Tier::default()
            })
            .chain(self.lower_tiers())
            .collect(),
            memory,
            sessions: self.session_status(),
            domains: self.domain_status(),
            counters: self.counter_status(),
            ..Status::default()
        }
    }

    /// The last reported state of lower tiers. The shell adds their bytes and texts.
    pub fn lower_tiers(&self) -> impl Iterator<Item = Tier> {
        self.config.tiers.iter().map(|tier| {
            let said = self.tiers_down.get(&tier.kind);
            let mut views = self.engine.iter().flat_map(|e| e.tiers());
            let clears = views.find(|view| view.kind == tier.kind && view.clears);
            let (state, reason) = match said {
                Some(None) if let Some(view) = &clears => {
                    (State::Off, view.down.unwrap_or("Clearing").into())
                }
                Some(None) => (State::Ready, String::new()),
                Some(Some(why)) => (State::Off, why.clone()),
                None => (State::Starting, "Starting".into()),
            };
            Tier {
                name: tier.kind.name().into(),
                state,
                reason,
                ..Tier::default()
            }
        })
    }

    fn memory_status(&self) -> MemoryTier {
        let Some(engine) = &self.engine else {
            return MemoryTier {
                state: State::Off,
                reason: self.no_arena.0.into(),
                ..MemoryTier::default()
            };
        };
        let (usage, geometry) = (engine.memory.usage(), engine.geometry());
        MemoryTier {
            state: State::Ready,
            reason: String::new(),
            region: Some(geometry.region),
            capacity_bytes: engine.capacity_bytes(),
            target_bytes: self.config.arena_bytes,
            resize_waits: self.resize_waits.clone(),
            populated_bytes: u64::from(engine.populated_rows()) * ROW_BYTES,
            // filled in by the shell
            locked_bytes: 0,
            used_bytes: usage.used_bytes,
            chunks: usage.chunks,
            incomplete_chunks: usage.incomplete_chunks,
            chunk_capacity: geometry.of_size(engine.capacity_bytes()).chunks.into(),
            slots: Slots {
                free: usage.free_slots,
                granted: usage.granted_slots,
                committed: usage.committed_slots,
                published: usage.published_slots,
                quarantined: usage.quarantined_slots,
            },
            leased_bytes: usage.leased_bytes,
            pinned_bytes: usage.soft_pinned_bytes,
            unchecked_chunks: usage.unchecked_chunks,
        }
    }

    fn session_status(&self) -> Vec<Session> {
        let domains = self.domains();
        let mut list: Vec<Session> = self
            .peers
            .sessions
            .iter()
            .map(|(id, s)| {
                let instance = self.instances.get(&s.instance);
                let registered = instance.is_some_and(|i| {
                    i.ranks.values().any(|(r, _)| r == id)
                        || i.scheduler.as_ref().is_some_and(|(r, _)| r == id)
                });
                let ready = self.ready_for(*id).is_some();
                // a client of opaque objects registers nothing
                let registered = registered || s.role == Role::Opaque && ready;
                let domain = instance.and_then(|i| i.domain.as_ref());
                let lock = self.peers.process_of_session(*id).and_then(|p| p.lock);
                let granted = match (s.role, lock, &self.engine) {
                    (Role::Worker | Role::Opaque, Some(lock), Some(engine)) => {
                        engine.memory.grants.granted_to(lock)
                    }
                    _ => 0,
                };
                let moves = s.role == Role::Worker && registered;
                Session {
                    id: *id,
                    role: s.role,
                    engine: s.engine.clone(),
                    version: s.engine_version.clone(),
                    instance: s.instance.clone(),
                    rank: s.rank,
                    pid: s.pid,
                    lock,
                    connected: s.conn.is_some(),
                    registered,
                    ready,
                    domain: domain
                        .and_then(|d| domains.keys().position(|k| *k == (d.model_id, d.layout_id)))
                        .map(|at| at as u32),
                    transfer: match moves {
                        true => s.transfer.name().into(),
                        false => String::new(),
                    },
                    transfer_reason: match moves {
                        true => s.transfer.reason.clone(),
                        false => String::new(),
                    },
                    off: String::new(),
                    granted_bytes: granted,
                }
            })
            .collect();
        list.extend(self.offs.iter().map(|(instance, reason)| Session {
            role: Role::Plugin,
            engine: "vllm".into(),
            instance: instance.clone(),
            off: reason.clone(),
            ..Session::default()
        }));
        list
    }

    /// Domains of all instances. The first instance of a domain describes it.
    fn domains(&self) -> BTreeMap<EventDomain, &domain::Domain> {
        let described = self.instances.values().rev();
        described
            .filter_map(|i| i.domain.as_deref())
            .map(|d| ((d.model_id, d.layout_id), d))
            .collect()
    }

    /// Number of process-local domains, by reason.
    fn unshared_domains(&self) -> BTreeMap<&str, u32> {
        let mut counts = BTreeMap::new();
        let domains = self.domains();
        for reason in domains.values().filter_map(|d| d.not_shareable.as_deref()) {
            *counts.entry(reason).or_default() += 1;
        }
        counts
    }

    fn domain_status(&self) -> Vec<Domain> {
        let status = |d: &domain::Domain| Domain {
            model_id: d.model_id.hex(),
            layout_id: d.layout_id.hex(),
            object_layout: d.object_layout.hex(),
            model: d.model.to_value(),
            layout: d.layout.to_value(),
            chunk_tokens: d.plan.chunk_tokens(),
            chunk_bytes: d.plan.chunk_bytes(d.plan.chunk_tokens()),
            shareable: d.not_shareable.is_none(),
            reason: d.not_shareable.clone().unwrap_or_default(),
        };
        self.domains().into_values().map(status).collect()
    }

    fn counter_status(&self) -> Counters {
        let stats = self.engine.as_ref().map(|e| *e.stats()).unwrap_or_default();
        Counters {
            requested_tokens: self.counters.requested_tokens,
            hit_tokens: self.counters.hit_tokens.clone(),
            miss_tokens: self.counters.miss_tokens.clone(),
            load_failed_tokens: self.counters.load_failed_tokens,
            stored_chunks: stats.stored_chunks,
            evicted_chunks: stats.evicted_chunks,
            corrupt_chunks: stats.corrupt_chunks,
            adopted_chunks: stats.adopted_chunks,
        }
    }

    /// Passes the current value of every metric of sessions and engine to `put`: name without prefix, label values, value.
    pub fn metrics(&self, put: &mut dyn FnMut(&'static str, &[&str], f64)) {
        let c = &self.counters;
        put("requested_tokens_total", &[], c.requested_tokens as f64);
        put("load_failed_tokens_total", &[], c.load_failed_tokens as f64);
        put("probes_unready_total", &[], c.probes_unready as f64);
        let maps = [
            ("hit_tokens_total", &c.hit_tokens),
            ("miss_tokens_total", &c.miss_tokens),
            ("connector_events_total", &c.connector_events),
            ("connector_copied_bytes_total", &c.copied_bytes),
            ("refused_total", &c.refused),
        ];
        for (name, map) in maps {
            for (label, value) in map {
                put(name, &[label], *value as f64);
            }
        }
        for (label, value) in &c.copied_seconds {
            put("connector_copied_seconds_total", &[label], *value);
        }
        for (label, value) in &c.events {
            put("session_events_total", &[label], *value as f64);
        }
        for (label, value) in &c.ignored {
            put("frames_ignored_total", &[label], *value as f64);
        }
        let results = [
            "",
            "granted",
            "exists",
            "no_room",
            "not_ready",
            "no_parent",
            "invalid",
            "quota",
            "too_large",
        ];
        for (label, value) in results.iter().zip(c.grants).skip(1) {
            put("grants_total", &[label], value as f64);
        }
        for (label, value) in ["absent", "ready", "pending"]
            .iter()
            .zip(c.probe_chunks)
            .take(2)
        {
            put("probe_chunks_total", &[label], value as f64);
        }
        for (role, name) in [
            (Role::Scheduler, "scheduler"),
            (Role::Worker, "worker"),
            (Role::Opaque, "opaque"),
        ] {
            let count = self
                .peers
                .sessions
                .values()
                .filter(|s| s.role == role)
                .count();
            put("sessions", &[name], count as f64);
        }
        for (reason, domains) in self.unshared_domains() {
            put("unshared_domains", &[reason], f64::from(domains));
        }
        for ((mode, reason), workers) in self.transfers() {
            put("worker_transfer", &[mode, &reason], f64::from(workers));
        }
        let oldest = self
            .peers
            .sessions
            .values()
            .map(|s| s.oldest_job_ms)
            .max()
            .unwrap_or(0);
        put("oldest_copy_job_seconds", &[], oldest as f64 / 1000.0);
        self.engine_metrics(put);
        self.tier_metrics(put);
        self.load_metrics(put);
    }

    /// Reports all histograms: name, and what happened.
    pub fn histograms(&self, put: &mut dyn FnMut(&'static str, &Durations)) {
        if let Some(engine) = &self.engine {
            put("probe_seconds", &engine.stats().probes);
            put("load_seconds", &engine.stats().loads);
            put("store_seconds", &engine.stats().stores);
        }
    }

    fn engine_metrics(&self, put: &mut dyn FnMut(&'static str, &[&str], f64)) {
        let Some(engine) = &self.engine else { return };
        let (s, u) = (engine.stats(), engine.memory.usage());
        let counters = [
            ("stored_chunks_total", s.stored_chunks),
            ("adopted_chunks_total", s.adopted_chunks),
            ("expired_chunks_total", s.expired_chunks),
            ("corrupt_chunks_total", s.corrupt_chunks),
            ("evicted_bytes_total", s.evicted_bytes),
            ("voided_grants_total", s.voided_grants),
            ("checks_total", s.checks),
            ("commits_ignored_total", s.commits_ignored),
        ];
        for (name, value) in counters {
            put(name, &[], value as f64);
        }
        put("evicted_chunks_total", &["room"], s.evicted_chunks as f64);
        put(
            "evicted_chunks_total",
            &["incomplete"],
            s.evicted_incomplete as f64,
        );
        put(
            "soft_pins_ended_total",
            &["expired"],
            s.soft_pins_expired as f64,
        );
        put(
            "soft_pins_ended_total",
            &["displaced"],
            s.soft_pins_displaced as f64,
        );
        let slots = [
            ("free", u.free_slots),
            ("granted", u.granted_slots),
            ("committed", u.committed_slots),
            ("published", u.published_slots),
            ("quarantined", u.quarantined_slots),
        ];
        for (state, value) in slots {
            put("slots", &[state], value as f64);
        }
        let gauges = [
            ("chunks", u.chunks),
            ("incomplete_chunks", u.incomplete_chunks),
            ("unchecked_chunks", u.unchecked_chunks),
            ("memory_used_bytes", u.used_bytes),
            ("memory_capacity_bytes", engine.capacity_bytes()),
            ("memory_target_bytes", self.config.arena_bytes),
            ("granted_bytes", u.granted_bytes),
            ("leased_bytes", u.leased_bytes),
            ("soft_pinned_bytes", u.soft_pinned_bytes),
            ("admin_pinned_bytes", u.admin_pinned_bytes),
            ("events_cursor", engine.ring().cursor()),
        ];
        for (name, value) in gauges {
            put(name, &[], value as f64);
        }
    }
}

fn parse_keys(keys: &[String]) -> Result<Vec<ChunkKey>, AdminError> {
    let bad = |hex: &str| AdminError::BadKey(hex.chars().take(80).collect());
    keys.iter()
        .map(|hex| ChunkKey::from_hex(hex).map_err(|_| bad(hex)))
        .collect()
}
