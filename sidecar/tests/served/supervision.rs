//! Deaths and ends of the processes of one sidecar.

use crate::child::Process;
use crate::harness::{Sidecar, binary, signal_to, wait_for};
use crate::vllm::{Vllm, hashes};
use kvcachepool_memory::link;
use kvcachepool_memory::lockfile::LockFile;
use kvcachepool_sidecar::supervisor::child::EXIT_RESTART;
use kvcachepool_sidecar::supervisor::messages::{Boot, Claim, FromEngine};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::process::Signal;
use std::os::unix::fs::MetadataExt;

#[test]
fn an_engine_that_is_killed_comes_back_with_the_memory_and_serves_after_a_check() {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 8));
    let region = vllm.memory.as_ref().unwrap().region;
    signal_to(sidecar.engine(), Signal::KILL);
    sidecar.wait_metric("engine_starts_total", 2.0);
    vllm.reconnect();
    assert_eq!(vllm.memory.as_ref().unwrap().region, region);
    vllm.check("r", &hashes(1, 8));
    vllm.store("r2", &hashes(2, 2));
}

#[test]
fn bytes_that_changed_while_no_engine_ran_are_never_served() {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    let (_, reply) = vllm.probe("r", &hashes(1, 2));
    let refs = kvcachepool_protocol::refs::unpack(&reply.refs).unwrap();
    vllm.release("r");
    signal_to(sidecar.engine(), Signal::KILL);
    vllm.write(&refs[1], b"another");
    sidecar.wait_metric("engine_starts_total", 2.0);
    vllm.reconnect();
    wait_for("the verdict on the second chunk", || {
        let (_, reply) = vllm.probe("r", &hashes(1, 2));
        (reply.states == [1, 0]).then_some(())
    });
    sidecar.wait_metric("corrupt_chunks_total", 1.0);
}

#[test]
fn three_boots_without_health_make_the_next_one_start_cold_in_the_same_memory() {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    let region = vllm.memory.as_ref().unwrap().region;
    for start in 2..=4 {
        signal_to(sidecar.engine(), Signal::KILL);
        sidecar.wait_metric("engine_starts_total", f64::from(start));
        sidecar.wait_socket();
    }
    vllm.reconnect();
    assert_eq!(vllm.memory.as_ref().unwrap().region, region);
    assert_eq!(vllm.ready("r", &hashes(1, 2)), 0);
    vllm.store("again", &hashes(1, 2));
}

/// Inodes of the memfds that a process holds open or maps.
fn memory_of(pid: u32) -> Vec<u64> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let mapped = maps
        .lines()
        .filter(|line| line.contains("memfd:"))
        .map(|line| line.split_whitespace().nth(4).unwrap().parse().unwrap());
    open.flatten()
        .filter(|fd| {
            std::fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().contains("memfd:"))
        })
        .map(|fd| std::fs::metadata(fd.path()).unwrap().ino())
        .chain(mapped)
        .collect()
}

#[test]
fn memory_in_which_boot_after_boot_ends_is_let_go_and_not_taken_back() {
    let sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 2));
    let memory = vllm.memory.as_ref().unwrap();
    let region = memory.region;
    let files = [&memory.arena, &memory.table].map(|fd| rustix::fs::fstat(fd).unwrap().st_ino);
    let holds = |pid| memory_of(pid).iter().any(|file| files.contains(file));
    assert!(holds(sidecar.supervisor()) && holds(sidecar.engine()));
    for start in 2..=7 {
        signal_to(sidecar.engine(), Signal::KILL);
        sidecar.wait_metric("engine_starts_total", f64::from(start));
        sidecar.wait_socket();
    }
    // One boot more, which lets go and does not count: no memory is made while another is held.
    assert_eq!(sidecar.metric("engine_starts_total"), 8.0);
    assert_eq!(sidecar.metric("boots_without_health"), 6.0);
    assert!(sidecar.log().contains("reason=restart requested"));
    assert!(!holds(sidecar.supervisor()));
    // It hands the memory back, is told to unmap it, and gets other memory.
    vllm.reconnect();
    assert_ne!(vllm.memory.as_ref().unwrap().region, region);
    assert_eq!(vllm.ready("r", &hashes(1, 2)), 0);
    sidecar.wait_populated();
    vllm.store("again", &hashes(1, 2));
    assert!(!holds(sidecar.supervisor()) && !holds(sidecar.engine()));
    assert_eq!(
        memory_of(sidecar.supervisor()).len(),
        2,
        "what came after it is held as ever"
    );
}

/// An engine whose supervisor is the test.
struct Engine {
    process: std::process::Child,
    link: OwnedFd,
}

impl Engine {
    fn start(sidecar: &Sidecar, region: Option<u64>, fds: &[BorrowedFd<'_>]) -> Self {
        let (link, theirs) = link::pair().unwrap();
        let process = std::process::Command::new(binary())
            .args(["engine", "--config"])
            .arg(sidecar.config())
            .stdin(theirs)
            .spawn()
            .unwrap();
        let boot = Boot {
            claim: Claim::Held(sidecar.socket()),
            region,
            ..Boot::default()
        };
        link::send(&link, &boot, fds).unwrap();
        Self { process, link }
    }

    /// All that it says until this was said.
    fn says(&self, last: impl Fn(&FromEngine) -> bool) -> Vec<FromEngine> {
        let mut said = Vec::new();
        wait_for("a message of the engine", || {
            while let Ok(Some((message, _))) = link::receive::<FromEngine>(&self.link, false) {
                said.push(message);
                if said.last().is_some_and(&last) {
                    return Some(());
                }
            }
            None
        });
        said
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn an_engine_tells_its_supervisor_that_it_lives() {
    let sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    let engine = Engine::start(&sidecar, None, &[]);
    sidecar.wait_socket();
    for _ in 0..3 {
        engine.says(|said| *said == FromEngine::Alive);
    }
}

#[test]
fn an_engine_tells_its_supervisor_of_a_table_before_it_reads_it() {
    let mut sidecar = Sidecar::small();
    let mut keeper = Process::start("store", &sidecar.socket());
    sidecar.kill_all();
    let reads = |said: &FromEngine| matches!(said, FromEngine::Reads { rows: 1024, .. });
    let keeps = |said: &FromEngine| matches!(said, FromEngine::Keep { .. });
    // Memory that a connector hands back, then new memory.
    let engine = Engine::start(&sidecar, None, &[]);
    sidecar.wait_socket();
    keeper.reattach();
    assert!(engine.says(keeps).iter().any(reads));
    drop((engine, keeper));
    let engine = Engine::start(&sidecar, None, &[]);
    assert!(engine.says(keeps).iter().any(reads));
}

#[test]
fn memory_that_an_engine_cannot_use_is_let_go_before_there_is_other() {
    let sidecar = Sidecar::prepare("memory: {size: 64Mi}\n");
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let files = ["arena", "table"].map(|name| rustix::fs::memfd_create(name, flags).unwrap());
    let fds = files.each_ref().map(AsFd::as_fd);
    let mut engine = Engine::start(&sidecar, Some(1), &fds);
    let said = engine.says(|said| *said == FromEngine::LetGo);
    assert!(!said.iter().any(|m| matches!(m, FromEngine::Keep { .. })));
    let status = wait_for("the end of the engine", || {
        engine.process.try_wait().unwrap()
    });
    assert_eq!(status.code(), Some(EXIT_RESTART));
    let lock = LockFile::open(&sidecar.socket().with_file_name("sidecar.lock")).unwrap();
    assert_eq!(lock.begin_boot().unwrap(), 0, "this boot does not count");
}

#[test]
fn health_is_answered_while_no_engine_is() {
    let sidecar = Sidecar::small();
    signal_to(sidecar.engine(), Signal::KILL);
    // Whoever asks at whatever moment is told that the container lives.
    for _ in 0..50 {
        assert_eq!(sidecar.get("/healthz", None).0, 200);
    }
    sidecar.wait_metric("engine_starts_total", 2.0);
}

#[test]
fn sigterm_ends_everything_with_and_without_a_vllm() {
    let mut sidecar = Sidecar::small();
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(1, 1));
    let began = std::time::Instant::now();
    sidecar.signal(Signal::TERM);
    assert_eq!(sidecar.wait_exit(), Some(0));
    assert!(
        began.elapsed().as_secs_f64() < 1.0,
        "at once, a vLLM is attached"
    );
    drop(vllm);
    sidecar.run();
    sidecar.wait_socket();
    sidecar.signal(Signal::TERM);
    assert_eq!(sidecar.wait_exit(), Some(0));
}

#[test]
fn population_is_announced_and_nothing_is_granted_before() {
    let sidecar = Sidecar::start("memory: {size: 256Mi, populateThreads: 1}\n");
    let mut vllm = Vllm::attach(&sidecar.socket());
    sidecar.wait_populated();
    vllm.store("r", &hashes(1, 4));
    let status = sidecar.status();
    assert_eq!(
        status["memory"]["populated_bytes"].as_u64(),
        Some(256 << 20)
    );
}

#[test]
fn pages_that_went_missing_are_there_again_after_the_engines_next_start() {
    let sidecar = Sidecar::small();
    let vllm = Vllm::attach(&sidecar.socket());
    sidecar.wait_populated();
    let arena = &vllm.memory.as_ref().unwrap().arena;
    let blocks = || fstat(arena).unwrap().st_blocks;
    let all = blocks();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(arena, hole, 1 << 20, 1 << 20).unwrap();
    assert!(blocks() < all);
    signal_to(sidecar.engine(), Signal::KILL);
    wait_for("the missing pages", || (blocks() == all).then_some(()));
}

#[test]
fn grants_of_a_process_come_back_with_the_proof_of_its_death() {
    let sidecar = Sidecar::small();
    let mut writer = Process::start("grant", &sidecar.socket());
    let granted = || sidecar.status()["memory"]["slots"]["granted"].as_u64();
    assert_eq!(granted(), Some(4));
    writer.kill();
    wait_for("the slots to come back", || (granted()? == 0).then_some(()));
    let mut vllm = Vllm::attach(&sidecar.socket());
    assert_eq!(
        vllm.ready("r", &hashes(2, 4)),
        0,
        "a dead writer's bytes are never read"
    );
}
