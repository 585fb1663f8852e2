//! Objects, an arena and a folder for tests.

use super::super::core::Step;
use super::super::name::NameKey;
use super::super::space::At;
use super::super::{Disk, Options};
use super::Watch;
use crate::testing::suite::once_free;
use crate::{Cause, Get, Place, Put, Removal, Span, Stored, Tier, TierError};
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_memory::memfd::{Pages, sealed};
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind, LayoutId, ModelId, NamespaceId};
use kvcachepool_protocol::object::{
    Cipher, Codec, Fidelity, Form, Object, ObjectName, Section, digest,
};
use parking_lot::{Condvar, Mutex};
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const ARENA: u64 = 32 << 20;
/// How long anything here may take.
pub const DEADLINE: Duration = Duration::from_secs(60);

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

/// Waits for a condition.
pub fn until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes of section `section` of object `i`.
pub fn bytes_of(i: u32, section: usize, length: u64) -> Vec<u8> {
    let seed = digest(&[i.to_le_bytes(), (section as u32).to_le_bytes()].concat());
    let mut bytes: Vec<u8> = seed.iter().cycle().take(length as usize).copied().collect();
    for (n, part) in bytes.chunks_mut(16).enumerate() {
        part[0] = part[0].wrapping_add(n as u8);
    }
    bytes
}

/// Object `i`, with sections of these lengths.
pub fn object(i: u32, lengths: &[u64]) -> Object {
    let sections = lengths
        .iter()
        .enumerate()
        .map(|(n, length)| Section::exact(n as u32 / 2, n as u32 % 2, &bytes_of(i, n, *length)))
        .collect();
    Object {
        kind: KeyKind::Prefix,
        codec: Codec::None,
        fidelity: Fidelity::Exact,
        form: Form::default(),
        cipher: Cipher::None,
        model: ModelId([1; 32]),
        layout: LayoutId([2; 32]),
        namespace: NamespaceId([0; 32]),
        last_hash: EngineHash(*blake3::hash(&i.to_le_bytes()).as_bytes()),
        parent: ChunkKey([0; 32]),
        part: 0,
        parts: 1,
        tokens: 256,
        first_token: 0,
        created_unix_ms: 1_800_000_000_000,
        expires_unix_s: 0,
        writer: [3; 16],
        engine: "vllm".to_string(),
        engine_version: "0.30.0".to_string(),
        nonce: [0; 24],
        sections,
        block_hashes: Vec::new(),
        token_ids: Vec::new(),
    }
}

/// An arena whose runs are given out in turn.
#[derive(Debug)]
pub struct Memory {
    arena: Arc<Mapping>,
    next: AtomicU64,
    /// Added to every offset: 0 = multiples of 4 KiB.
    pub shift: u64,
}

impl Memory {
    pub fn new() -> Self {
        let fd = sealed("disk-test", ARENA, Pages::Base).unwrap();
        Self {
            arena: Arc::new(Mapping::new(fd.as_fd(), ARENA).unwrap()),
            next: AtomicU64::new(0),
            shift: 0,
        }
    }

    pub fn span(&self, length: u64) -> Span {
        self.held(length, Arc::new(()))
    }

    pub fn held(&self, length: u64, hold: Arc<()>) -> Span {
        let room = (length + self.shift).next_multiple_of(4096);
        let mut offset = self.next.fetch_add(room, Relaxed) % (ARENA / 2);
        if offset + room > ARENA {
            offset = 0;
        }
        Span::new(self.arena.clone(), offset + self.shift, length, hold).unwrap()
    }

    pub fn put(&self, object: &Object, i: u32) -> Put {
        let spans = object
            .sections
            .iter()
            .enumerate()
            .map(|(n, section)| {
                let span = self.span(section.stored_bytes);
                assert!(span.write(0, &bytes_of(i, n, section.stored_bytes)));
                span
            })
            .collect();
        Put {
            object: object.clone(),
            spans,
        }
    }

    pub fn get(&self, object: &Object) -> Get {
        let places = object.sections.iter().map(|section| {
            let span = self.span(section.stored_bytes);
            span.write(0, &vec![0xee; section.stored_bytes as usize]);
            Place {
                group: section.group,
                shard: section.shard,
                span,
            }
        });
        Get {
            name: object.name(),
            places: places.collect(),
        }
    }
}

/// Are the places of a get what the object's sections say?
pub fn whole(object: &Object, places: &[Place]) -> bool {
    object.sections.iter().zip(places).all(|(section, place)| {
        let mut bytes = vec![0; place.span.length as usize];
        place.span.read(0, &mut bytes)
            && place.span.length == section.stored_bytes
            && digest(&bytes) == section.stored_digest
    })
}

/// A folder, an arena, and the tier.
#[derive(Debug)]
pub struct Rig {
    pub temp: tempfile::TempDir,
    pub memory: Memory,
    pub options: Options,
    pub capacity: u64,
}

impl Rig {
    pub fn new(capacity: u64) -> Self {
        Self {
            temp: tempfile::tempdir().unwrap(),
            memory: Memory::new(),
            options: Options {
                read_threads: 4,
                write_threads: 4,
                probe_every: Duration::ZERO,
                ..Options::default()
            },
            capacity,
        }
    }

    pub fn watched(
        capacity: u64,
        watch: impl Fn(Step) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let mut rig = Self::new(capacity);
        rig.options.watch = Watch::new(watch);
        rig
    }

    /// One that waits at this step while the gate is closed; it is open.
    pub fn gated(capacity: u64, step: Step) -> (Self, Gate) {
        let gate = Gate::at(step);
        let at = gate.clone();
        let rig = Self::watched(capacity, move |step| {
            at.pass(step);
            Ok(())
        });
        (rig, gate)
    }

    pub fn path(&self) -> PathBuf {
        self.temp.path().join("tier")
    }

    pub fn open(&self) -> Disk {
        let _ = std::fs::create_dir(self.path());
        self.open_at(&self.path())
    }

    pub fn open_at(&self, path: &Path) -> Disk {
        let open = || Disk::open(path, self.capacity, self.options.clone());
        block_on(once_free(open))
    }

    /// What is said of a folder that is not taken.
    pub fn refused(&self) -> TierError {
        Disk::open(&self.path(), self.capacity, self.options.clone()).unwrap_err()
    }

    pub fn put(&self, disk: &Disk, i: u32, lengths: &[u64]) -> Result<Stored, TierError> {
        let object = object(i, lengths);
        block_on(disk.put(self.memory.put(&object, i)))
    }

    pub fn get(&self, disk: &Disk, object: &Object) -> Result<(), Cause> {
        let get = self.memory.get(object);
        let places = get.places.clone();
        let found = block_on(disk.get(get)).map_err(|e| e.cause)?;
        assert_eq!(found, *object);
        assert!(whole(object, &places), "bytes of {:?}", object.name());
        Ok(())
    }

    pub fn has(&self, disk: &Disk, i: u32) -> bool {
        let names = [object(i, &[1]).name()];
        block_on(disk.lookup(&names)).unwrap() == [true]
    }

    /// The slot that it lies in.
    pub fn place(&self, disk: &Disk, i: u32) -> At {
        let core = disk.live.now().unwrap();
        let state = core.state.lock();
        let key = NameKey::of(&object(i, &[1]).name()).unwrap();
        let number = state.index.find(&key).unwrap();
        state.index.entry(number).unwrap().at
    }

    pub fn remove(&self, disk: &Disk, i: u32) -> u64 {
        block_on(disk.remove(Removal::Named(&[object(i, &[1]).name()]))).unwrap()
    }

    /// Waits until all that was asked for is durable.
    pub fn settle(&self, disk: &Disk) {
        assert_eq!(block_on(disk.remove(Removal::Named(&[]))), Ok(0));
    }

    /// Ends it without a snapshot, as a process that dies now does.
    pub fn die(disk: Disk) {
        disk.end(super::super::commit::End::AsItIs);
    }
}

/// Reads every object that is there; each must be whole.
pub fn all_whole(disk: &Disk, memory: &Memory) -> Vec<ObjectName> {
    let page = block_on(disk.list(None, usize::MAX)).unwrap();
    assert_eq!(page.next, None);
    for listed in &page.objects {
        let object = block_on(disk.head(&listed.name)).unwrap();
        assert_eq!(object.total_bytes(), listed.bytes);
        let get = memory.get(&object);
        let places = get.places.clone();
        block_on(disk.get(get)).unwrap();
        assert!(whole(&object, &places), "{:?}", listed.name);
    }
    page.objects.into_iter().map(|listed| listed.name).collect()
}

/// Blocks whoever comes to a step, until it is opened.
#[derive(Debug, Clone)]
pub struct Gate {
    inner: Arc<(Mutex<(bool, usize)>, Condvar)>,
    step: Step,
}

impl Gate {
    pub fn at(step: Step) -> Self {
        Self {
            inner: Arc::default(),
            step,
        }
    }

    /// Closed from now on.
    pub fn close(&self) {
        self.inner.0.lock().0 = true;
    }

    pub fn open(&self) {
        self.inner.0.lock().0 = false;
        self.inner.1.notify_all();
    }

    pub fn pass(&self, step: Step) {
        if step != self.step {
            return;
        }
        let mut state = self.inner.0.lock();
        state.1 += 1;
        while state.0 {
            let waited = self.inner.1.wait_for(&mut state, DEADLINE);
            assert!(!waited.timed_out(), "the gate was not opened");
        }
        state.1 -= 1;
    }

    pub fn wait_for(&self, count: usize) {
        until("somebody comes to the gate", || {
            self.inner.0.lock().1 >= count
        });
    }
}

/// Fails a step while it is set.
#[derive(Debug, Clone, Default)]
pub struct Failing(Arc<Mutex<Option<(Step, Errno)>>>);

impl Failing {
    pub fn set(&self, step: Step, errno: Errno) {
        *self.0.lock() = Some((step, errno));
    }

    pub fn clear(&self) {
        *self.0.lock() = None;
    }

    pub fn step(&self, step: Step) -> std::io::Result<()> {
        match *self.0.lock() {
            Some((at, errno)) if at == step => Err(errno.into()),
            _ => Ok(()),
        }
    }
}
