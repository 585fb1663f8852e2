//! A small world for these tests: a host without files, and peers that say what a test makes them say.

use crate::config::Config;
use crate::memory_table::MemoryTable;
use crate::sessions::*;
use crate::table::{Geometry, ROW_BYTES, Table};
use crate::{Completion, DigestJob, Effect};
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_PARTIAL, Header, Op};
use kvcachepool_protocol::key::EngineHash;
use kvcachepool_protocol::message::{self, *};
use kvcachepool_protocol::refs::{SectionRef, unpack};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A digest that is asked for.
#[derive(Debug)]
pub struct Job {
    pub slot: u32,
    pub generation: u32,
    pub check: u64,
    pub urgent: bool,
}

/// Locks, counters and memory of a pod.
#[derive(Debug, Default)]
pub struct Pod {
    pub locked: BTreeSet<u32>,
    pub next_lock: u32,
    pub next_region: u64,
    /// Tables that connectors may hand back, by the number of the arena's descriptor.
    pub kept: BTreeMap<u64, MemoryTable>,
    pub arenas_fail: bool,
    pub lock_file_fails: bool,
    /// Bytes to which new arenas can grow; 0: they keep their size.
    pub most_bytes: u64,
    /// Bytes that an arena may have, if that is limited.
    pub limit_bytes: Option<u64>,
    /// The arena's pages cannot be given back.
    pub pages_stay: bool,
    /// Rows that were to be populated and released.
    pub grown: Vec<Range<u32>>,
    pub released: Vec<Range<u32>>,
}

impl Pod {
    fn readable_locks(&self) -> Result<&BTreeSet<u32>, HostError> {
        if self.lock_file_fails {
            return Err(HostError("no lock file".into()));
        }
        Ok(&self.locked)
    }
}

impl Host for Pod {
    type Table = MemoryTable;
    fn next_lock(&mut self) -> Result<u32, HostError> {
        self.next_lock += 1;
        Ok(self.next_lock)
    }
    fn next_region(&mut self) -> Result<u64, HostError> {
        self.next_region += 1;
        Ok(self.next_region)
    }
    fn lock_held(&mut self, number: u32) -> Result<bool, HostError> {
        self.readable_locks().map(|held| held.contains(&number))
    }
    fn locks_held(&mut self) -> Result<Vec<u32>, HostError> {
        self.readable_locks()
            .map(|held| held.iter().copied().collect())
    }
    fn most_bytes(&mut self) -> u64 {
        self.most_bytes
    }
    fn create(&mut self, geometry: Geometry, rows: u32) -> Result<MemoryTable, HostError> {
        if self.arenas_fail {
            return Err(HostError("no memory".into()));
        }
        let mut table = MemoryTable::new(geometry);
        table.set_capacity_rows(rows);
        Ok(table)
    }
    fn grow(&mut self, rows: Range<u32>) -> Result<(), HostError> {
        let end = u64::from(rows.end) * ROW_BYTES;
        match self.limit_bytes {
            Some(limit) if end > limit => Err(HostError(format!("{end} bytes exceed the limit"))),
            _ => {
                self.grown.push(rows);
                Ok(())
            }
        }
    }
    fn can_resize(&self) -> bool {
        !self.pages_stay
    }
    fn release(&mut self, rows: Range<u32>) -> Result<(), HostError> {
        self.released.push(rows);
        Ok(())
    }
    fn adopt(&mut self, arena: FdId, _table: FdId) -> Result<MemoryTable, HostError> {
        self.kept.remove(&arena.0).ok_or(HostError(
            "slot table of version 9; this build supports version 1".into(),
        ))
    }
}

pub struct World {
    pub core: Core<Pod>,
    pub now: Now,
    pub out: Vec<Output>,
    conns: u64,
    tags: u64,
}

pub const NO_FDS: &[FdFacts] = &[];

/// Bytes of one block in one shard: a chunk of four blocks takes one row.
pub const BLOCK_BYTES: u64 = 16 << 10;

pub fn pidfd() -> FdFacts {
    FdFacts {
        id: FdId(1),
        kind: FdType::Pidfd,
    }
}

pub fn memfd(id: u64, live: bool) -> FdFacts {
    FdFacts {
        id: FdId(id),
        kind: FdType::Memfd { sealed: true, live },
    }
}

pub fn hash(n: u8) -> EngineHash {
    EngineHash([n; 32])
}

pub fn hello(role: Role, process: u8, number: u64) -> Hello {
    Hello {
        version: 1,
        role,
        engine: "vllm".into(),
        engine_version: "0.32.0".into(),
        instance: "i".into(),
        incarnation: vec![process; 16],
        number,
        rank: 0,
        fds: vec!["pidfd".into()],
        lock: None,
        region: None,
        grants: Vec::new(),
        requests: Vec::new(),
        watches_shrinks: true,
        off: None,
    }
}

pub fn register_worker() -> Register {
    Register {
        world: 1,
        local_world: 1,
        model: r#"{"model":"m"}"#.into(),
        layout: r#"{"layout":"l"}"#.into(),
        device: "cpu".into(),
        device_uuid: String::new(),
        transfer_modes: vec!["engine".into()],
        groups: vec![Group {
            kind: "full".into(),
            block_tokens: 16,
            block_bytes: BLOCK_BYTES,
            shards: 1,
            shard: 0,
            writer: true,
            window_tokens: 0,
        }],
        scheduler_block_tokens: 16,
        chunk_tokens: 64,
        hashing: None,
    }
}

pub fn register_scheduler() -> Register {
    Register {
        groups: Vec::new(),
        model: String::new(),
        layout: String::new(),
        hashing: Some(Hashing {
            algorithm: "sha256_cbor".into(),
            root: "0".repeat(64),
            random_root: false,
            block_tokens: 16,
        }),
        ..register_worker()
    }
}

/// Chunk `n` (from 1) of a prefix of full chunks.
pub fn chunk(n: u8) -> GrantChunk {
    GrantChunk {
        bytes: 0,
        hash: hash(n).0.to_vec(),
        parent: if n == 1 {
            Vec::new()
        } else {
            hash(n - 1).0.to_vec()
        },
        first_token: u32::from(n - 1) * 64,
        tokens: 64,
        groups: 1,
        block_hashes: Vec::new(),
    }
}

pub fn probe(request: &str, chunks: &[u8]) -> Probe {
    Probe {
        independent: false,
        request: request.into(),
        namespace: Vec::new(),
        hashes: chunks.iter().flat_map(|n| hash(*n).0).collect(),
        tail_tokens: 0,
        local_tokens: Some(0),
        budget_ms: 0,
        max_load_tokens: None,
        prefill_tokens_per_s: 0,
    }
}

impl World {
    pub fn new() -> Self {
        Self::of(Pod::default(), None)
    }

    pub fn config() -> Config {
        let mut config = Config {
            arena_bytes: 8 << 20,
            ..Config::default()
        };
        config.limits.granted_bytes_max = 0;
        config
    }

    pub fn of(pod: Pod, found: Option<MemoryTable>) -> Self {
        let mut world = Self::unpopulated(pod, found);
        world.populate();
        world
    }

    /// A world whose arena has no pages yet.
    pub fn empty() -> Self {
        Self::unpopulated(Pod::default(), None)
    }

    fn unpopulated(pod: Pod, found: Option<MemoryTable>) -> Self {
        Self::with(Self::config(), pod, found)
    }

    /// A populated world with another configuration.
    pub fn configured(config: Config) -> Self {
        let mut world = Self::with(config, Pod::default(), None);
        world.populate();
        world
    }

    /// A populated world with another configuration, over a table that an earlier boot left.
    pub fn configured_with(config: Config, found: MemoryTable) -> Self {
        let mut world = Self::with(config, Pod::default(), Some(found));
        world.populate();
        world
    }

    pub fn with(config: Config, pod: Pod, found: Option<MemoryTable>) -> Self {
        let now = Now {
            mono_ms: 1_000,
            unix_s: 1_000,
        };
        let mut out = Vec::new();
        let start = Start {
            boot: 7,
            version: "0".into(),
            found,
            cold: false,
        };
        let core = Core::new(config, pod, start, now, &mut out);
        Self {
            core,
            now,
            out,
            conns: 0,
            tags: 0,
        }
    }

    pub fn populate(&mut self) {
        self.input(Input::Populated { rows: u32::MAX });
    }

    pub fn input(&mut self, input: Input<'_>) {
        self.core.handle(self.now, input, &mut self.out);
    }

    pub fn connect(&mut self) -> ConnId {
        self.conns += 1;
        let conn = ConnId(self.conns);
        self.input(Input::Connected {
            conn,
            peer: None,
            pid: 4_000 + self.conns as u32,
        });
        conn
    }

    /// Sends a frame; returns its tag.
    pub fn say<B: Serialize>(&mut self, conn: ConnId, op: Op, body: &B, fds: &[FdFacts]) -> u64 {
        self.tags += 1;
        let body = message::encode(body).unwrap();
        let header = Header {
            length: body.len() as u32,
            version: 1,
            opcode: op as u8,
            flags: 0,
            tag: self.tags,
        };
        self.input(Input::Frame {
            conn,
            header,
            body: &body,
            fds,
        });
        self.tags
    }

    /// The answer to a tag, which must be there and no error. Also whether it was partial.
    pub fn answer<B: DeserializeOwned>(&mut self, asked: u64) -> (B, bool) {
        let at = self
            .out
            .iter()
            .position(|o| matches!(o, Output::Send { frame, .. } if frame.tag == asked));
        let Output::Send { frame, .. } = self.out.remove(at.expect("an answer")) else {
            unreachable!()
        };
        let Frame { flags, body, .. } = frame;
        assert_eq!(
            flags & FLAG_ERROR,
            0,
            "{:?}",
            message::decode::<ErrorBody>(&body)
        );
        (message::decode(&body).unwrap(), flags & FLAG_PARTIAL != 0)
    }

    pub fn ask<B: Serialize, R: DeserializeOwned>(&mut self, conn: ConnId, op: Op, body: &B) -> R {
        let tag = self.say(conn, op, body, NO_FDS);
        self.answer(tag).0
    }

    /// Says HELLO with a pidfd and, where `hello` names them, arena 11 and table 12.
    pub fn greet(&mut self, conn: ConnId, hello: &Hello, live: bool) -> HelloReply {
        let mut fds = Vec::new();
        for name in &hello.fds {
            fds.push(match name.as_str() {
                "pidfd" => pidfd(),
                "arena" => memfd(11, live),
                _ => memfd(12, live),
            });
        }
        let tag = self.say(conn, Op::Hello, hello, &fds);
        self.answer(tag).0
    }

    /// The error that answered a tag, and whether the connection was closed after it.
    pub fn error(&mut self, asked: u64) -> (ErrorCode, bool) {
        let at = self
            .out
            .iter()
            .position(|o| matches!(o, Output::Send { frame, .. } if frame.tag == asked))
            .expect("an answer");
        let Output::Send { frame, conn, .. } = self.out.remove(at) else {
            unreachable!()
        };
        let Frame { flags, body, .. } = frame;
        assert_ne!(flags & FLAG_ERROR, 0);
        let closed = self
            .out
            .iter()
            .any(|o| matches!(o, Output::Close { conn: c, .. } if *c == conn));
        (message::decode::<ErrorBody>(&body).unwrap().code, closed)
    }

    /// A process with its lock and the arena. Returns its connection.
    pub fn attach(&mut self, role: Role, process: u8) -> ConnId {
        self.attach_to("i", role, process)
    }

    /// The same, of an instance of this name.
    pub fn attach_to(&mut self, instance: &str, role: Role, process: u8) -> ConnId {
        self.attach_as(Hello {
            instance: instance.into(),
            ..hello(role, process, 1)
        })
    }

    /// The same for a process that says this first.
    pub fn attach_as(&mut self, first: Hello) -> ConnId {
        let conn = self.connect();
        let reply = self.greet(conn, &first, true);
        assert_eq!(reply.memory, Memory::LockFirst);
        self.core.host_mut().locked.insert(reply.lock.unwrap());
        let again = Hello {
            lock: reply.lock,
            number: 2,
            ..first
        };
        assert_eq!(self.greet(conn, &again, true).memory, Memory::Sent);
        conn
    }

    /// A scheduler and one worker, registered: (scheduler, worker).
    pub fn instance(&mut self) -> (ConnId, ConnId) {
        let worker = self.attach(Role::Worker, 1);
        let scheduler = self.attach(Role::Scheduler, 2);
        let first: RegisterReply = self.ask(worker, Op::Register, &register_worker());
        assert!(!first.ready);
        let second: RegisterReply = self.ask(scheduler, Op::Register, &register_scheduler());
        assert!(second.ready);
        (scheduler, worker)
    }

    /// The scheduler of an instance beside the first one, that serves another model.
    pub fn another_model(&mut self) -> ConnId {
        let worker = self.attach_to("j", Role::Worker, 3);
        let scheduler = self.attach_to("j", Role::Scheduler, 4);
        let model = Register {
            model: r#"{"model":"other"}"#.into(),
            ..register_worker()
        };
        let _: RegisterReply = self.ask(worker, Op::Register, &model);
        let reply: RegisterReply = self.ask(scheduler, Op::Register, &register_scheduler());
        assert!(reply.ready);
        scheduler
    }

    pub fn process(&self, nth: usize) -> ProcessId {
        let watched: Vec<ProcessId> = self
            .out
            .iter()
            .filter_map(|o| match o {
                Output::WatchProcess { process, .. } => Some(*process),
                _ => None,
            })
            .collect();
        watched[nth]
    }

    /// Digests that are asked for, taken out.
    pub fn digests(&mut self) -> Vec<Job> {
        let mut found = Vec::new();
        self.out.retain(|o| match o {
            Output::Effect(Effect::Digest(DigestJob {
                slot,
                generation,
                check,
                urgent,
                ..
            })) => {
                found.push(Job {
                    slot: *slot,
                    generation: *generation,
                    check: *check,
                    urgent: *urgent,
                });
                false
            }
            _ => true,
        });
        found
    }

    /// Ends a digest.
    pub fn digest_is(&mut self, job: &Job, digest: [u8; 16]) {
        self.input(Input::Completed(Completion::Digest {
            slot: job.slot,
            generation: job.generation,
            check: job.check,
            digest: Some(digest),
        }));
    }

    /// Ends all digests: the digest of a slot is its number.
    pub fn digest_all(&mut self) {
        for job in self.digests() {
            self.digest_is(&job, [job.slot as u8; 16]);
        }
    }

    pub fn grant(&mut self, scheduler: ConnId, chunks: &[GrantChunk]) -> (u64, GrantReply) {
        let grant = Grant {
            request: "r".into(),
            namespace: Vec::new(),
            chunks: chunks.to_vec(),
            ttl_s: 0,
        };
        let tag = self.say(scheduler, Op::Grant, &grant, NO_FDS);
        (tag, self.answer(tag).0)
    }

    pub fn commit(&mut self, worker: ConnId, region: u64, refs: &[u8]) {
        self.say(
            worker,
            Op::Commit,
            &Sections {
                region,
                refs: refs.to_vec(),
            },
            NO_FDS,
        );
    }

    /// Stores chunks in full.
    pub fn store(
        &mut self,
        scheduler: ConnId,
        worker: ConnId,
        chunks: &[GrantChunk],
    ) -> Vec<SectionRef> {
        let (_, granted) = self.grant(scheduler, chunks);
        assert!(
            granted.results.iter().all(|r| *r == GRANT_GRANTED),
            "{:?}",
            granted.results
        );
        self.commit(worker, granted.region, &granted.refs);
        self.digest_all();
        unpack(&granted.refs).unwrap()
    }

    pub fn states(&mut self, scheduler: ConnId, request: &str, chunks: &[u8]) -> Vec<u8> {
        let reply: ProbeReply = self.ask(scheduler, Op::Probe, &probe(request, chunks));
        reply.states
    }

    /// How often sessions saw an event of this name.
    pub fn session_events(&self, name: &str) -> u64 {
        let mut seen = 0.0;
        self.core.metrics(&mut |metric, labels, value| {
            if metric == "session_events_total" && labels == [name] {
                seen = value;
            }
        });
        seen as u64
    }

    pub fn pass(&mut self, ms: u64) {
        self.now.mono_ms += ms;
        self.now.unix_s += ms / 1000;
        self.input(Input::Tick);
    }
}
