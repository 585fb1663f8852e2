//! A vLLM of one rank in miniature: scheduler and worker roles of one process, its lock, its mappings. It follows the protocol to
//! the letter; tests break the rule that they are about through its parts.
#![allow(unsafe_code)]

use crate::client::{Answer, Connection};
use crate::wait::wait_for;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::lockfile::lock_offset;
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::refs::{SectionRef, pack, unpack};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Tokens of a chunk.
pub const CHUNK: u32 = 256;
/// Tokens of a block.
pub const BLOCK: u32 = 16;
/// Bytes of a block over all layers.
pub const BLOCK_BYTES: u64 = 8 << 10;
/// Bytes of a full chunk's only section.
pub const CHUNK_BYTES: u64 = BLOCK_BYTES * (CHUNK / BLOCK) as u64;

pub struct Memory {
    pub region: u64,
    pub arena: OwnedFd,
    pub table: OwnedFd,
    pub bytes: Mapping,
}

pub struct Vllm {
    pub socket: PathBuf,
    pub incarnation: Vec<u8>,
    pub number: u64,
    pub lock: Option<u32>,
    pub memory: Option<Memory>,
    pub pidfd: OwnedFd,
    pub worker: Connection,
    pub scheduler: Connection,
    /// Bytes of a block over all layers.
    pub block_bytes: u64,
    /// Slots granted and neither committed nor aborted.
    pub grants: Vec<SectionRef>,
}

/// 16 bytes that no other client of this test run has.
pub fn incarnation() -> Vec<u8> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut bytes = std::process::id().to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    bytes
}

pub fn own_pidfd() -> OwnedFd {
    rustix::process::pidfd_open(
        rustix::process::getpid(),
        rustix::process::PidfdFlags::empty(),
    )
    .unwrap()
}

/// A hash chain: `count` chunk hashes of prompt `prompt`.
pub fn hashes(prompt: u64, count: u32) -> Vec<[u8; 32]> {
    (0..count)
        .map(|i| {
            let mut hash = [7u8; 32];
            hash[..8].copy_from_slice(&prompt.to_le_bytes());
            hash[8..12].copy_from_slice(&i.to_le_bytes());
            hash
        })
        .collect()
}

/// The bytes that a chunk shall have.
pub fn content(hash: &[u8; 32]) -> Vec<u8> {
    content_of(hash, CHUNK_BYTES as usize)
}

/// The same of a chunk of another length, a multiple of a hash's.
pub fn content_of(hash: &[u8; 32], bytes: usize) -> Vec<u8> {
    hash.repeat(bytes / hash.len())
}

pub fn hello(role: Role, number: u64, incarnation: &[u8]) -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        role,
        engine: "vllm".into(),
        engine_version: "0.32.0".into(),
        instance: incarnation.iter().map(|b| format!("{b:02x}")).collect(),
        incarnation: incarnation.to_vec(),
        number,
        rank: 0,
        fds: Vec::new(),
        lock: None,
        region: None,
        grants: Vec::new(),
        requests: Vec::new(),
        watches_shrinks: true,
        off: None,
    }
}

pub fn worker_register() -> Register {
    Register {
        world: 1,
        local_world: 1,
        model: r#"{"name":"toy","dtype":"float32"}"#.into(),
        layout: r#"{"name":"toy"}"#.into(),
        device: "cpu".into(),
        device_uuid: String::new(),
        transfer_modes: vec!["engine".into()],
        groups: vec![Group {
            kind: "full".into(),
            block_tokens: BLOCK,
            block_bytes: BLOCK_BYTES,
            shards: 1,
            shard: 0,
            writer: true,
            window_tokens: 0,
        }],
        scheduler_block_tokens: BLOCK,
        chunk_tokens: CHUNK,
        hashing: None,
    }
}

pub fn scheduler_register() -> Register {
    Register {
        groups: Vec::new(),
        hashing: Some(Hashing {
            algorithm: "sha256_cbor".into(),
            root: "ab".repeat(32),
            random_root: false,
            block_tokens: BLOCK,
        }),
        ..worker_register()
    }
}

impl Vllm {
    /// A process that has said nothing yet.
    pub fn silent(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            incarnation: incarnation(),
            number: 0,
            lock: None,
            memory: None,
            pidfd: own_pidfd(),
            worker: Connection::open(socket),
            scheduler: Connection::open(socket),
            block_bytes: BLOCK_BYTES,
            grants: Vec::new(),
        }
    }

    /// Locked, mapped and registered: ready to probe and store.
    pub fn attach(socket: &Path) -> Self {
        Self::attach_with(socket, BLOCK_BYTES)
    }

    /// The same with blocks of another length.
    pub fn attach_with(socket: &Path, block_bytes: u64) -> Self {
        let mut this = Self::silent(socket);
        this.block_bytes = block_bytes;
        this.hello_until_mapped();
        this.register();
        this
    }

    pub fn hello(&mut self, role: Role) -> Answer {
        self.number += 1;
        let mut message = hello(role, self.number, &self.incarnation);
        message.lock = self.lock;
        message.fds = vec!["pidfd".into()];
        if role == Role::Worker {
            message.grants = pack(&self.grants);
        }
        let mut fds: Vec<BorrowedFd<'_>> = vec![self.pidfd.as_fd()];
        if let Some(memory) = &self.memory {
            message.region = Some(memory.region);
            message.fds.extend(["arena".into(), "table".into()]);
            fds.extend([memory.arena.as_fd(), memory.table.as_fd()]);
        }
        let connection = match role {
            Role::Worker => &mut self.worker,
            _ => &mut self.scheduler,
        };
        connection.ask_with(Op::Hello, &message, &fds)
    }

    /// HELLOs of the worker until memory is mapped, then one of the scheduler.
    pub fn hello_until_mapped(&mut self) {
        wait_for("memory", || {
            let answer = self.hello(Role::Worker);
            let reply: HelloReply = answer.read();
            self.take(&reply, answer.fds);
            (reply.memory == kvcachepool_protocol::message::Memory::Held
                || reply.memory == kvcachepool_protocol::message::Memory::Sent)
                .then_some(())
        });
        let reply: HelloReply = self.hello(Role::Scheduler).read();
        assert_eq!(reply.memory, kvcachepool_protocol::message::Memory::Held);
    }

    pub fn take(&mut self, reply: &HelloReply, fds: Vec<OwnedFd>) {
        use kvcachepool_protocol::message::Memory as Said;
        match reply.memory {
            Said::LockFirst => {
                assert_eq!(reply.fds, ["lock"]);
                let number = reply.lock.unwrap();
                let [fd] = <[OwnedFd; 1]>::try_from(fds).unwrap();
                lock_byte(&fd, number);
                // Closing any descriptor of this file would drop every lock of the process.
                std::mem::forget(fd);
                self.lock = Some(number);
            }
            Said::Sent => {
                assert_eq!(reply.fds, ["arena", "table"]);
                let [arena, table] = <[OwnedFd; 2]>::try_from(fds).unwrap();
                let bytes = Mapping::new(arena.as_fd(), reply.arena_bytes).unwrap();
                self.memory = Some(Memory {
                    region: reply.region.unwrap(),
                    arena,
                    table,
                    bytes,
                });
            }
            Said::Unmap => self.memory = None,
            Said::Held => {}
            Said::None => std::thread::sleep(std::time::Duration::from_millis(20)),
        }
    }

    pub fn register(&mut self) {
        let mut message = worker_register();
        message.groups[0].block_bytes = self.block_bytes;
        let _: RegisterReply = self.worker.ask(Op::Register, &message).read();
        let reply: RegisterReply = self
            .scheduler
            .ask(Op::Register, &scheduler_register())
            .read();
        assert!(reply.ready);
    }

    /// New connections after the sidecar went away; the process, its lock and its mappings are as before.
    pub fn reconnect(&mut self) {
        self.reconnect_with(Self::register);
    }

    /// The same, with another way to register.
    pub fn reconnect_with(&mut self, register: impl FnOnce(&mut Self)) {
        wait_for("the socket", || {
            std::os::unix::net::UnixStream::connect(&self.socket).ok()
        });
        self.worker = Connection::open(&self.socket);
        self.scheduler = Connection::open(&self.socket);
        self.hello_until_mapped();
        register(self);
    }

    pub fn probe_message(&self, request: &str, hashes: &[[u8; 32]]) -> Probe {
        Probe {
            request: request.into(),
            namespace: Vec::new(),
            hashes: hashes.concat(),
            tail_tokens: 0,
            local_tokens: None,
            budget_ms: 2_000,
            max_load_tokens: None,
            prefill_tokens_per_s: 0,
            independent: false,
        }
    }

    /// The final answer to a PROBE, with its tag.
    pub fn probe(&mut self, request: &str, hashes: &[[u8; 32]]) -> (u64, ProbeReply) {
        let message = self.probe_message(request, hashes);
        self.probe_with(&message)
    }

    /// The final answer to the PROBE of a request that holds nothing itself, with its tag: tiers below memory are asked.
    pub fn probe_below(&mut self, request: &str, hashes: &[[u8; 32]]) -> (u64, ProbeReply) {
        let message = Probe {
            local_tokens: Some(0),
            ..self.probe_message(request, hashes)
        };
        self.probe_with(&message)
    }

    /// Says that the first `chunks` chunks of a PROBE are loaded.
    pub fn pin(&mut self, request: &str, probe: u64, chunks: usize) {
        let message = Pin {
            request: request.into(),
            probe,
            from: 0,
            to: chunks as u32,
        };
        self.scheduler.send(Op::Pin, &message, &[]);
    }

    /// Of these chunks the first `count` and no others come, from the tier of this number, with the right bytes.
    pub fn finds_below(&mut self, hashes: &[[u8; 32]], count: usize, tier: u8) {
        let (_, reply) = self.probe_below("warm", hashes);
        let ready: Vec<_> = reply.states.iter().map(|s| *s == CHUNK_READY).collect();
        let wanted: Vec<_> = (0..hashes.len()).map(|at| at < count).collect();
        assert_eq!(ready, wanted, "{:?}", reply.states);
        assert_eq!(reply.tiers.get(..count), Some(&vec![tier; count][..]));
        let refs = unpack(&reply.refs).unwrap();
        for (slot, hash) in refs.iter().zip(hashes) {
            assert_eq!(self.read(slot), content(hash));
        }
    }

    /// The final answer to this PROBE, with its tag.
    pub fn probe_with(&mut self, message: &Probe) -> (u64, ProbeReply) {
        let tag = self.scheduler.send(Op::Probe, message, &[]);
        loop {
            let answer = self
                .scheduler
                .answer(tag)
                .expect("the connection was closed");
            if answer.header.flags & kvcachepool_protocol::frame::FLAG_PARTIAL == 0 {
                return (tag, answer.read());
            }
        }
    }

    pub fn grant_message(&self, request: &str, hashes: &[[u8; 32]]) -> Grant {
        let chunks = hashes
            .iter()
            .enumerate()
            .map(|(i, hash)| GrantChunk {
                hash: hash.to_vec(),
                parent: i.checked_sub(1).map_or(Vec::new(), |p| hashes[p].to_vec()),
                first_token: i as u32 * CHUNK,
                tokens: CHUNK,
                groups: 1,
                block_hashes: Vec::new(),
                bytes: 0,
            })
            .collect();
        Grant {
            request: request.into(),
            namespace: Vec::new(),
            chunks,
            ttl_s: 0,
        }
    }

    /// Slots for chunks; all must be granted.
    pub fn grant(&mut self, request: &str, hashes: &[[u8; 32]]) -> Vec<SectionRef> {
        let message = self.grant_message(request, hashes);
        self.grant_of(&message)
    }

    fn grant_of(&mut self, message: &Grant) -> Vec<SectionRef> {
        let reply: GrantReply = self.scheduler.ask(Op::Grant, message).read();
        assert!(
            reply.results.iter().all(|r| *r == GRANT_GRANTED),
            "{:?}",
            reply.results
        );
        assert_eq!(reply.region, self.memory.as_ref().unwrap().region);
        let refs = unpack(&reply.refs).unwrap();
        self.grants.extend(&refs);
        refs
    }

    pub fn write(&self, slot: &SectionRef, bytes: &[u8]) {
        let at = u64::from(slot.slot.get()) << 16;
        assert!(self.memory.as_ref().unwrap().bytes.write(at, bytes));
    }

    pub fn read(&self, slot: &SectionRef) -> Vec<u8> {
        let mut bytes = vec![0; slot.length.get() as usize];
        let at = u64::from(slot.slot.get()) << 16;
        assert!(self.memory.as_ref().unwrap().bytes.read(at, &mut bytes));
        bytes
    }

    pub fn commit(&mut self, refs: &[SectionRef]) {
        let message = Sections {
            region: self.memory.as_ref().unwrap().region,
            refs: pack(refs),
        };
        self.worker.send(Op::Commit, &message, &[]);
        self.grants.retain(|g| !refs.contains(g));
    }

    /// Stores chunks of a GRANT and does not wait.
    pub fn store_granted(&mut self, message: &Grant, hashes: &[[u8; 32]]) {
        let refs = self.grant_of(message);
        for (slot, hash) in refs.iter().zip(hashes) {
            self.write(slot, &content(hash));
        }
        self.commit(&refs);
    }

    /// Stores chunks and waits until they can be read.
    pub fn store(&mut self, request: &str, hashes: &[[u8; 32]]) {
        let message = self.grant_message(request, hashes);
        self.store_granted(&message, hashes);
        self.wait_ready(request, hashes);
        self.release(request);
    }

    pub fn wait_ready(&mut self, request: &str, hashes: &[[u8; 32]]) {
        wait_for("chunks to become readable", || {
            let (_, reply) = self.probe(request, hashes);
            reply.states.iter().all(|s| *s == CHUNK_READY).then_some(())
        });
    }

    pub fn release(&mut self, request: &str) {
        let message = Release {
            requests: vec![request.into()],
        };
        self.scheduler.send(Op::Release, &message, &[]);
    }

    /// Probes, reads all chunks and compares them with what was stored.
    pub fn check(&mut self, request: &str, hashes: &[[u8; 32]]) {
        self.wait_ready(request, hashes);
        let (probe, reply) = self.probe(request, hashes);
        self.pin(request, probe, hashes.len());
        let refs = unpack(&reply.refs).unwrap();
        for (slot, hash) in refs.iter().zip(hashes) {
            assert_eq!(self.read(slot), content(hash));
        }
        self.release(request);
    }

    /// How many of these chunks can be read now.
    pub fn ready(&mut self, request: &str, hashes: &[[u8; 32]]) -> usize {
        let (_, reply) = self.probe(request, hashes);
        self.release(request);
        reply.states.iter().filter(|s| **s == CHUNK_READY).count()
    }
}

pub fn lock_byte(fd: &OwnedFd, number: u32) {
    // SAFETY: flock is plain old data; the descriptor is open.
    unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = libc::F_WRLCK as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
        lock.l_start = lock_offset(number) as libc::off_t;
        lock.l_len = 1;
        assert_eq!(libc::fcntl(fd.as_raw_fd(), libc::F_SETLK, &lock), 0);
    }
}
