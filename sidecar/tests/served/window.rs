//! Windows between the real sidecar and workers that are killed and stopped at every state of a stage.

use crate::cgroup::Cgroup;
use crate::child::Process;
use crate::client::Answer;
use crate::harness::{Sidecar, children, signal_to, wait_for};
use crate::vllm::{CHUNK_BYTES, Vllm, content, hashes, scheduler_register, worker_register};
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_metrics::snake_case;
use kvcachepool_protocol::config::Config;
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::{
    AbortReply, ErrorCode, Register, RegisterReply, Sections, Window, WindowKind, WindowReply,
};
use kvcachepool_protocol::refs::{SectionRef, pack, unpack};
use kvcachepool_protocol::window::{
    PATTERN_BYTES, Reason, Run, State, Word, encode, page_bytes, record_at,
};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

const CONFIG: &str = "memory: {size: 64Mi}\ntransfer: {mode: CudaWindow, windowSize: 16Mi}\n";
/// Chunks of each test: all in one stage.
const CHUNKS: u32 = 4;

fn served() -> Sidecar {
    let sidecar = Sidecar::start(CONFIG);
    sidecar.wait_populated();
    sidecar
}

/// A worker with a window.
struct Windowed {
    vllm: Vllm,
    window: Mapping,
    page: Mapping,
    bell: OwnedFd,
    reply: WindowReply,
    sequence: u64,
}

fn offering() -> Register {
    Register {
        transfer_modes: vec!["engine".into(), "cuda_window".into()],
        ..worker_register()
    }
}

fn register(vllm: &mut Vllm) {
    let reply: RegisterReply = vllm.worker.ask(Op::Register, &offering()).read();
    assert_eq!(reply.transfer, "cuda_window");
    let _: RegisterReply = vllm
        .scheduler
        .ask(Op::Register, &scheduler_register())
        .read();
}

/// An engine that the sidecar has promised a window.
fn registered(socket: &Path) -> Vllm {
    let mut vllm = Vllm::silent(socket);
    vllm.hello_until_mapped();
    register(&mut vllm);
    vllm
}

/// The same in place of one, for a process of its own.
fn instead_of(vllm: Vllm) -> Vllm {
    let socket = vllm.socket.clone();
    drop(vllm);
    registered(&socket)
}

/// Says that all is done, and stays until the end of standard input, which is that of the test that started this process.
fn stay() {
    println!("\nready");
    std::io::stdin().lines().for_each(drop);
}

fn on(device_uuid: &str) -> Window {
    Window {
        device_uuid: device_uuid.into(),
        ..Window::default()
    }
}

impl Windowed {
    fn attach(socket: &Path) -> Self {
        Self::ask(registered(socket))
    }

    fn ask(vllm: Vllm) -> Self {
        Self::ask_on(vllm, "", WindowKind::Host)
    }

    /// The device's memory can be mapped like any file: it is that of the made-up driver, or the host's.
    fn ask_on(mut vllm: Vllm, uuid: &str, kind: WindowKind) -> Self {
        let answer = vllm.worker.ask(Op::Window, &on(uuid));
        let reply: WindowReply = answer.read();
        assert_eq!((reply.kind, reply.working), (kind, false));
        assert_eq!(reply.fds, ["window", "page", "bell"]);
        let [window, page, bell] = <[OwnedFd; 3]>::try_from(answer.fds).unwrap();
        Self {
            vllm,
            window: Mapping::new(window.as_fd(), reply.bytes).unwrap(),
            page: Mapping::new(page.as_fd(), page_bytes(reply.stages)).unwrap(),
            bell,
            reply,
            sequence: 0,
        }
    }

    /// Shows the sidecar that both see the same memory.
    fn confirm(&mut self) -> Answer {
        let mut pattern = vec![0; PATTERN_BYTES];
        self.window.read(0, &mut pattern);
        assert_eq!(pattern, self.reply.pattern);
        let complement: Vec<u8> = pattern.iter().map(|b| !b).collect();
        self.window.write(0, &complement);
        let seen = Window {
            seen: true,
            ..Window::default()
        };
        self.vllm.worker.ask(Op::Window, &seen)
    }

    fn working(socket: &Path) -> Self {
        Self::attach(socket).works()
    }

    /// With a window in the memory of the made-up device.
    fn on_device(vllm: Vllm) -> Self {
        Self::ask_on(vllm, FIRST, WindowKind::PosixFd).works()
    }

    /// Both sides have seen that it is the same memory.
    fn works(mut self) -> Self {
        let reply: WindowReply = self.confirm().read();
        assert!(reply.working);
        self
    }

    fn runs(refs: &[SectionRef]) -> Vec<Run> {
        let run = |r: &SectionRef| Run {
            slot: r.slot.get(),
            generation: r.generation.get(),
            offset: 0,
            bytes: r.length.get(),
        };
        refs.iter().map(run).collect()
    }

    fn hand_over(&mut self, state: State, runs: &[Run]) {
        self.sequence += 1;
        let at = record_at(0);
        self.page.write(at + 8, &encode(runs)[8..]);
        let word = Word {
            state,
            reason: Reason::None,
            sequence: self.sequence,
        };
        let shared = self.page.word64(at).unwrap();
        shared.store(word.encode(), Ordering::Release);
        // A bell that nobody hears is seen by its end.
        let _ = send(&self.bell, &[1], SendFlags::NOSIGNAL);
    }

    fn fill(&mut self, chunks: &[[u8; 32]], refs: &[SectionRef]) {
        for (i, hash) in (0u64..).zip(chunks) {
            self.window.write(i * CHUNK_BYTES, &content(hash));
        }
        self.hand_over(State::Filled, &Self::runs(refs));
    }

    fn word(&self) -> Word {
        let shared = self.page.word64(record_at(0)).unwrap();
        Word::decode(shared.load(Ordering::Acquire)).unwrap()
    }

    /// The word with which the stage came back.
    fn back(&self) -> Word {
        wait_for("the stage", || {
            let word = self.word();
            matches!(word.state, State::Moved | State::Refused).then_some(word)
        })
    }

    fn hung_up(&self) -> bool {
        let mut rings = [0u8; 16];
        wait_for("the bell's end", || {
            matches!(
                recv(&self.bell, &mut rings, RecvFlags::empty()),
                Ok((_, 0)) | Err(_)
            )
            .then_some(true)
        })
    }

    fn moved(&mut self, state: State, refs: &[SectionRef]) -> Word {
        self.hand_over(state, &Self::runs(refs));
        self.back()
    }

    fn abort(&mut self, refs: &[SectionRef]) {
        let message = Sections {
            region: self.vllm.memory.as_ref().unwrap().region,
            refs: pack(refs),
        };
        let reply: AbortReply = self.vllm.worker.ask(Op::Abort, &message).read();
        assert_eq!(reply.freed as usize, refs.len());
        self.vllm.grants.retain(|g| !refs.contains(g));
    }
}

/// A process of its own that was passed device memory by handle, and hangs up.
pub fn handled(vllm: Vllm) {
    let mut vllm = instead_of(vllm);
    let bell = bell_of_handle(&mut vllm);
    drop(vllm);
    ends(&bell);
    drop(bell);
    stay();
}

/// A process of its own that fills a stage on the made-up device, sees the window's end instead of its stage, and wants its slots back.
pub fn doubting(vllm: Vllm) {
    let mut worker = Windowed::on_device(instead_of(vllm));
    let chunks = hashes(2, CHUNKS);
    let refs = worker.vllm.grant("r", &chunks);
    worker.fill(&chunks, &refs);
    assert!(worker.hung_up());
    assert_eq!(worker.word().state, State::Filled);
    let message = Sections {
        region: worker.vllm.memory.as_ref().unwrap().region,
        refs: pack(&refs),
    };
    worker.vllm.worker.send(Op::Abort, &message, &[]);
    stay();
}

/// A process of its own that fills a stage on the made-up device, whose copies hang.
pub fn hanging(vllm: Vllm) {
    let mut worker = Windowed::on_device(instead_of(vllm));
    let chunks = hashes(2, CHUNKS);
    let refs = worker.vllm.grant("r", &chunks);
    worker.fill(&chunks, &refs);
    stay();
}

/// A process of its own that fills, wants and waits as its input says. `grants` first, so that a stopped sidecar need not answer.
pub fn child(vllm: Vllm) {
    let socket = vllm.socket.clone();
    drop(vllm);
    let mut worker = Windowed::working(&socket);
    let chunks = hashes(2, CHUNKS);
    let refs = worker.vllm.grant("r", &chunks);
    println!("\nready");
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "fill" => worker.fill(&chunks, &refs),
            "want" => worker.hand_over(State::Wanted, &Windowed::runs(&refs)),
            "moved" => assert_eq!(worker.back().state, State::Moved),
            other => panic!("unknown word {other}"),
        }
        println!("\nready");
    }
}

fn stop(sidecar: &Sidecar, signal: Signal) {
    let supervisor = sidecar.supervisor();
    for pid in children(supervisor).into_iter().chain([supervisor]) {
        signal_to(pid, signal);
    }
}

fn slots(sidecar: &Sidecar, state: &str) -> u64 {
    sidecar.status()["memory"]["slots"][state].as_u64().unwrap()
}

#[test]
fn bytes_go_through_a_window_both_ways_and_status_and_metrics_say_so() {
    let sidecar = served();
    let mut worker = Windowed::working(&sidecar.socket());
    let chunks = hashes(1, CHUNKS);
    let refs = worker.vllm.grant("r", &chunks);
    worker.fill(&chunks, &refs);
    assert_eq!(worker.back().state, State::Moved);
    worker.vllm.commit(&refs);
    worker.vllm.check("r", &chunks);
    worker
        .window
        .write(0, &vec![0; CHUNK_BYTES as usize * chunks.len()]);
    let (_, reply) = worker.vllm.probe("l", &chunks);
    let found = unpack(&reply.refs).unwrap();
    assert_eq!(worker.moved(State::Wanted, &found).state, State::Moved);
    for (i, hash) in (0u64..).zip(&chunks) {
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        worker.window.read(i * CHUNK_BYTES, &mut bytes);
        assert_eq!(bytes, content(hash));
    }
    let session = sidecar.status()["sessions"]
        .as_array()
        .unwrap()
        .iter()
        .find(|s| s["role"] == "worker")
        .unwrap()
        .clone();
    assert_eq!(session["transfer"], "cuda_window");
    assert_eq!(session["transfer_reason"], "host memory");
    let bytes = CHUNK_BYTES as f64 * f64::from(CHUNKS);
    for direction in ["store", "load"] {
        let name = format!("window_copied_bytes_total{{direction=\"{direction}\"}}");
        assert_eq!(sidecar.metric(&name), bytes, "{name}");
    }
    assert_eq!(
        sidecar.metric("worker_transfer{mode=\"cuda_window\",reason=\"\"}"),
        1.0
    );
}

#[test]
fn a_window_that_one_side_does_not_see_is_refused_and_stages_of_it_are_not_moved() {
    let sidecar = served();
    let mut worker = Windowed::attach(&sidecar.socket());
    let seen = Window {
        seen: true,
        ..Window::default()
    };
    let error = worker.vllm.worker.ask(Op::Window, &seen).error().unwrap();
    assert_eq!(error.code, ErrorCode::WindowUnavailable);
    assert!(error.message.starts_with("PatternMismatch"), "{error:?}");
    let reason = "worker_transfer{mode=\"engine\",reason=\"pattern_mismatch\"}";
    sidecar.wait_metric(reason, 1.0);
    // the worker copies itself, as ever
    worker.vllm.store("r", &hashes(1, 1));
    worker.vllm.check("r", &hashes(1, 1));
}

#[test]
fn what_a_worker_may_not_ask_for_is_refused_by_name_and_writes_nothing() {
    let sidecar = served();
    let mut worker = Windowed::working(&sidecar.socket());
    let mut other = Windowed::working(&sidecar.socket());
    let theirs = other.vllm.grant("r", &hashes(5, 1));
    other.vllm.write(&theirs[0], &content(&hashes(5, 1)[0]));
    let before = other.vllm.read(&theirs[0]);
    worker.window.write(0, &vec![9; CHUNK_BYTES as usize]);
    let refused = |word: Word| (word.state, word.reason);
    assert_eq!(
        refused(worker.moved(State::Filled, &theirs)),
        (State::Refused, Reason::NotGranted)
    );
    let outside = Run {
        slot: u32::MAX,
        ..Windowed::runs(&theirs)[0]
    };
    worker.hand_over(State::Filled, &[outside]);
    assert_eq!(refused(worker.back()), (State::Refused, Reason::BadRecord));
    worker.hand_over(State::Filled, &[]);
    assert_eq!(refused(worker.back()), (State::Refused, Reason::BadRecord));
    assert_eq!(other.vllm.read(&theirs[0]), before);
    let name = "window_copies_total{direction=\"store\",result=\"not_granted\"}";
    assert_eq!(sidecar.metric(name), 1.0);
    // the window goes on
    let chunks = hashes(1, 1);
    let refs = worker.vllm.grant("r", &chunks);
    worker.fill(&chunks, &refs);
    assert_eq!(worker.back().state, State::Moved);
}

#[test]
fn a_worker_killed_at_any_state_of_a_stage_leaves_nothing_readable_and_all_its_slots_come_back() {
    let sidecar = served();
    for words in [
        &[][..],
        &["fill"],
        &["fill", "moved"],
        &["want"],
        &["want", "moved"],
    ] {
        for stopped in [false, true] {
            if stopped && words.contains(&"moved") {
                continue;
            }
            let mut worker = Process::start("window", &sidecar.socket());
            assert_eq!(slots(&sidecar, "granted"), u64::from(CHUNKS));
            if stopped {
                stop(&sidecar, Signal::STOP);
            }
            for word in words {
                worker.tell(word);
            }
            worker.kill();
            stop(&sidecar, Signal::CONT);
            wait_for("the slots", || {
                (slots(&sidecar, "granted") + slots(&sidecar, "quarantined") == 0).then_some(())
            });
            let mut vllm = Vllm::attach(&sidecar.socket());
            assert_eq!(
                vllm.ready("r", &hashes(2, CHUNKS)),
                0,
                "{words:?} {stopped}"
            );
        }
    }
}

#[test]
fn a_sidecar_killed_at_any_state_of_a_stage_leaves_the_worker_its_slots_until_it_gives_them_back() {
    let sidecar = served();
    let chunks = hashes(3, CHUNKS);
    let mut worker = Windowed::working(&sidecar.socket());
    for state in [State::Free, State::Filled, State::Moved] {
        let refs = worker.vllm.grant("r", &chunks);
        let engine = sidecar.engine();
        if state == State::Moved {
            worker.fill(&chunks, &refs);
            assert_eq!(worker.back().state, State::Moved);
        }
        if state == State::Filled {
            signal_to(engine, Signal::STOP);
            worker.fill(&chunks, &refs);
        }
        signal_to(engine, Signal::KILL);
        assert!(worker.hung_up());
        assert_eq!(worker.word().state, state);
        wait_for("the next engine", || {
            (sidecar.engine() != engine).then_some(())
        });
        let mut vllm = worker.vllm;
        vllm.reconnect_with(register);
        assert_eq!(slots(&sidecar, "granted"), u64::from(CHUNKS), "{state:?}");
        assert_eq!(vllm.ready("p", &chunks), 0);
        worker = Windowed::ask(vllm);
        let reply: WindowReply = worker.confirm().read();
        assert!(reply.working, "a window of the next boot");
        worker.abort(&refs);
        assert_eq!(slots(&sidecar, "granted"), 0);
    }
    let refs = worker.vllm.grant("r", &chunks);
    worker.fill(&chunks, &refs);
    assert_eq!(worker.back().state, State::Moved);
    worker.vllm.commit(&refs);
    worker.vllm.check("r", &chunks);
}

#[test]
fn a_stopped_worker_keeps_its_slots_and_a_stopped_sidecar_moves_what_waits_when_it_goes_on() {
    let sidecar = served();
    let mut child = Process::start("window", &sidecar.socket());
    child.tell("fill");
    child.tell("moved");
    signal_to(child.pid(), Signal::STOP);
    let mut worker = Windowed::working(&sidecar.socket());
    let chunks = hashes(1, CHUNKS);
    let refs = worker.vllm.grant("r", &chunks);
    stop(&sidecar, Signal::STOP);
    worker.fill(&chunks, &refs);
    let given_up = worker.vllm.worker.send(
        Op::Abort,
        &Sections {
            region: worker.vllm.memory.as_ref().unwrap().region,
            refs: pack(&refs),
        },
        &[],
    );
    stop(&sidecar, Signal::CONT);
    let answer = worker.vllm.worker.answer(given_up).unwrap();
    let reply: AbortReply = answer.read();
    assert_eq!(reply.freed, CHUNKS);
    // whichever of the two was first: the copy had ended before the slots were anybody else's
    worker.back();
    assert_eq!(
        slots(&sidecar, "granted"),
        u64::from(CHUNKS),
        "those of the stopped worker"
    );
    signal_to(child.pid(), Signal::CONT);
    child.tell("fill");
    child.tell("moved");
}

/// A sidecar over the made-up driver, and a worker that has registered with it.
fn over_driver(set: &str) -> (tempfile::TempDir, Sidecar, Vllm) {
    let folder = crate::doctor::fake_driver();
    let mut sidecar = Sidecar::prepare(CONFIG);
    let path = folder.path().display();
    sidecar.run_by(&format!("LD_LIBRARY_PATH={path} {set} exec \"$@\""));
    sidecar.wait_socket();
    sidecar.wait_populated();
    let vllm = registered(&sidecar.socket());
    (folder, sidecar, vllm)
}

const FIRST: &str = "11111111-1111-1111-1111-111111111100";

#[test]
fn bytes_go_through_a_window_in_the_memory_of_a_made_up_device() {
    let (_folder, sidecar, vllm) = over_driver("");
    let mut worker = Windowed::on_device(vllm);
    let chunks = hashes(1, CHUNKS);
    let refs = worker.vllm.grant("r", &chunks);
    worker.fill(&chunks, &refs);
    assert_eq!(worker.back().state, State::Moved);
    worker.vllm.commit(&refs);
    worker.vllm.check("r", &chunks);
    worker.window.write(0, &vec![0; CHUNK_BYTES as usize]);
    let (_, reply) = worker.vllm.probe("l", &chunks[..1]);
    let found = unpack(&reply.refs).unwrap();
    assert_eq!(worker.moved(State::Wanted, &found).state, State::Moved);
    let mut bytes = vec![0; CHUNK_BYTES as usize];
    worker.window.read(0, &mut bytes);
    assert_eq!(bytes, content(&chunks[0]));
    let sessions = sidecar.status()["sessions"].clone();
    let memory = &sessions
        .as_array()
        .unwrap()
        .iter()
        .find(|s| s["role"] == "worker");
    let said = memory.unwrap()["transfer_reason"].clone();
    assert_eq!(said, "memory of Fake H100, by descriptor");
    // in the background, whatever was copied
    wait_for("the page locks", || {
        let memory = sidecar.status()["memory"].clone();
        (memory["locked_bytes"] == memory["capacity_bytes"]).then_some(())
    });
    sidecar.wait_metric("memory_locked_bytes", f64::from(64 << 20));
}

#[test]
fn while_a_copy_runs_neither_abort_nor_a_hello_gives_its_slots_back_and_abort_is_answered_behind_it()
 {
    let folder = tempfile::tempdir().unwrap();
    let (held, asked) = (folder.path().join("held"), folder.path().join("held.asked"));
    std::fs::write(&held, []).unwrap();
    let (_driver, sidecar, vllm) = over_driver(&format!("FAKE_HOLD={}", held.display()));
    let mut worker = Windowed::on_device(vllm);
    let chunks = hashes(1, CHUNKS);
    let refs = worker.vllm.grant("r", &chunks);
    worker.fill(&chunks, &refs);
    wait_for("the copy", || asked.exists().then_some(()));
    let message = Sections {
        region: worker.vllm.memory.as_ref().unwrap().region,
        refs: pack(&refs),
    };
    let abort = worker.vllm.worker.send(Op::Abort, &message, &[]);
    let other = worker.vllm.worker.send(Op::Window, &on(FIRST), &[]);
    let answer = worker.vllm.worker.next().unwrap();
    assert_eq!(answer.header.tag, other, "ABORT was read and waits");
    assert_eq!(worker.word().state, State::Filled);
    assert_eq!(slots(&sidecar, "granted"), u64::from(CHUNKS));
    std::fs::remove_file(&held).unwrap();
    let answer = worker.vllm.worker.next().unwrap();
    assert_eq!(answer.header.tag, abort);
    let reply: AbortReply = answer.read();
    assert_eq!(reply.freed, CHUNKS);
    assert_eq!(worker.back().state, State::Moved);
    assert_eq!(slots(&sidecar, "granted"), 0);

    // the same of a HELLO that does not name them
    std::fs::remove_file(&asked).unwrap();
    std::fs::write(&held, []).unwrap();
    let refs = worker.vllm.grant("r", &chunks);
    worker.fill(&chunks, &refs);
    wait_for("the copy", || asked.exists().then_some(()));
    let mut vllm = worker.vllm;
    vllm.grants.clear();
    vllm.reconnect_with(register);
    assert_eq!(slots(&sidecar, "granted"), u64::from(CHUNKS));
    std::fs::remove_file(&held).unwrap();
    wait_for("the slots", || {
        (slots(&sidecar, "granted") == 0).then_some(())
    });
    assert_eq!(vllm.ready("p", &chunks), 0, "nothing of it is readable");
}

#[test]
fn slots_of_a_copy_in_doubt_are_given_to_nobody_even_when_its_worker_is_dead() {
    let (_folder, sidecar, vllm) = over_driver("FAKE_LOST=719");
    drop(vllm);
    let mut child = Process::start("doubt", &sidecar.socket());
    // it has seen the bell's end and asked for its slots back
    let copies = "window_copies_total{direction=\"store\",result=\"in_doubt\"}";
    sidecar.wait_metric(copies, 1.0);
    let mode = "worker_transfer{mode=\"engine\",reason=\"copy_in_doubt\"}";
    sidecar.wait_metric(mode, 1.0);
    let status = sidecar.status();
    assert_eq!(status["reasons"][0]["code"], "CopyInDoubt");
    assert_eq!(status["state"], "degraded");
    child.kill();
    sidecar.wait_metric("session_events_total{event=\"process_died\"}", 2.0);
    let held = slots(&sidecar, "granted") + slots(&sidecar, "quarantined");
    assert_eq!(
        held,
        u64::from(CHUNKS),
        "nobody says that the copy has ended"
    );
    let mut vllm = registered(&sidecar.socket());
    let refused = vllm.worker.ask(Op::Window, &on(FIRST)).error().unwrap();
    let wanted = "DriverFailed: copies that failed or hang, and may not have ended: 1";
    assert!(refused.message.starts_with(wanted), "{refused:?}");
    // the worker copies itself, into other slots
    vllm.store("r", &hashes(2, CHUNKS));
    vllm.check("r", &hashes(2, CHUNKS));
}

#[test]
fn a_copy_that_hangs_is_in_doubt_some_time_after_its_workers_death_and_gives_its_slots_back_when_it_ends()
 {
    let folder = tempfile::tempdir().unwrap();
    let (held, asked) = (folder.path().join("held"), folder.path().join("held.asked"));
    std::fs::write(&held, []).unwrap();
    let (_driver, sidecar, vllm) = over_driver(&format!("FAKE_HOLD={}", held.display()));
    drop(vllm);
    let mut child = Process::start("hang", &sidecar.socket());
    wait_for("the copy", || asked.exists().then_some(()));
    child.kill();
    let copies = "window_copies_total{direction=\"store\",result=\"in_doubt\"}";
    sidecar.wait_metric(copies, 1.0);
    wait_for("the reason", || {
        (sidecar.status()["reasons"][0]["code"] == "CopyInDoubt").then_some(())
    });
    let taken = || slots(&sidecar, "granted") + slots(&sidecar, "quarantined");
    assert_eq!(taken(), u64::from(CHUNKS));
    let mut vllm = registered(&sidecar.socket());
    let refused = vllm.worker.ask(Op::Window, &on(FIRST)).error().unwrap();
    assert!(refused.message.starts_with("DriverFailed: "), "{refused:?}");
    std::fs::remove_file(&held).unwrap();
    wait_for("the slots", || (taken() == 0).then_some(()));
    wait_for("the state", || {
        (sidecar.status()["state"] != "degraded").then_some(())
    });
}

#[test]
fn memory_that_no_descriptor_can_pass_is_named_by_an_ipc_handle() {
    let (_folder, _sidecar, mut vllm) = over_driver("FAKE_NO_FD=1");
    let answer = vllm.worker.ask(Op::Window, &on(FIRST));
    let reply: WindowReply = answer.read();
    assert_eq!(reply.kind, WindowKind::IpcHandle);
    assert_eq!(reply.handle.len(), 64);
    assert_eq!(reply.fds, ["page", "bell"]);
}

/// A worker that was passed device memory by handle.
struct ByHandle {
    sidecar: Sidecar,
    vllm: Vllm,
    bell: OwnedFd,
    /// A file that is there when the memory was freed.
    freed: PathBuf,
    _folders: [tempfile::TempDir; 2],
}

impl ByHandle {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let freed = folder.path().join("freed");
        let set = format!("FAKE_NO_FD=1 FAKE_FREED={}", freed.display());
        let (driver, sidecar, mut vllm) = over_driver(&set);
        Self {
            sidecar,
            bell: bell_of_handle(&mut vllm),
            vllm,
            freed,
            _folders: [folder, driver],
        }
    }
}

fn bell_of_handle(vllm: &mut Vllm) -> OwnedFd {
    let answer = vllm.worker.ask(Op::Window, &on(FIRST));
    let reply: WindowReply = answer.read();
    assert_eq!(reply.kind, WindowKind::IpcHandle);
    let [_page, bell] = <[OwnedFd; 2]>::try_from(answer.fds).unwrap();
    bell
}

fn ends(bell: &OwnedFd) {
    let ended = recv(bell, &mut [0u8; 16], RecvFlags::empty());
    assert!(matches!(ended, Ok((_, 0))), "{ended:?}");
}

#[test]
fn memory_that_was_passed_by_handle_is_freed_when_the_worker_says_that_it_has_unmapped_it() {
    let mut this = ByHandle::new();
    this.vllm.reconnect_with(register);
    ends(&this.bell);
    // the worker may still have it mapped: nothing is freed, and nothing more is made for it
    let refused = this.vllm.worker.ask(Op::Window, &on(FIRST)).error();
    let refused = refused.unwrap().message;
    assert!(refused.starts_with("Busy: "), "{refused}");
    assert!(!this.freed.exists());
    send(&this.bell, &[1, 2], SendFlags::NOSIGNAL).unwrap();
    wait_for("the memory", || this.freed.exists().then_some(()));
    this.vllm.reconnect_with(register);
    bell_of_handle(&mut this.vllm);
}

#[test]
fn memory_by_handle_whose_answer_came_to_nobody_is_freed_at_once_and_the_worker_gets_another() {
    let folder = tempfile::tempdir().unwrap();
    let (slow, asked) = (folder.path().join("slow"), folder.path().join("slow.asked"));
    let freed = folder.path().join("freed");
    std::fs::write(&slow, []).unwrap();
    let set = format!(
        "FAKE_NO_FD=1 FAKE_SLOW={} FAKE_FREED={}",
        slow.display(),
        freed.display()
    );
    let (_driver, _sidecar, mut vllm) = over_driver(&set);
    vllm.worker.send(Op::Window, &on(FIRST), &[]);
    wait_for("the context", || asked.exists().then_some(()));
    vllm.reconnect_with(register);
    std::fs::remove_file(&slow).unwrap();
    wait_for("the memory", || freed.exists().then_some(()));
    bell_of_handle(&mut vllm);
}

#[test]
fn memory_that_was_passed_by_handle_to_a_dead_worker_is_freed_and_not_before() {
    let this = ByHandle::new();
    drop(this.vllm);
    // this process lives: that it hangs up says nothing
    ends(&this.bell);
    drop(this.bell);
    let mut child = Process::start("handle", &this.sidecar.socket());
    assert!(!this.freed.exists());
    child.kill();
    wait_for("the memory", || this.freed.exists().then_some(()));
}

#[test]
fn a_window_that_never_worked_gives_the_devices_memory_back_and_locks_no_page() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("contexts");
    let contexts = || std::fs::read_to_string(&log).unwrap();
    let set = format!("FAKE_CONTEXTS={}", log.display());
    // made, and then less is free than it took
    let (_driver, _sidecar, mut vllm) = over_driver(&format!("FAKE_FREE_WITHIN=271 {set}"));
    vllm.worker.ask(Op::Window, &on(FIRST)).error().unwrap();
    assert_eq!(contexts(), "+-");

    std::fs::remove_file(&log).unwrap();
    let (_driver, sidecar, vllm) = over_driver(&set);
    let mut worker = Windowed::ask_on(vllm, FIRST, WindowKind::PosixFd);
    worker.window.write(0, b"what nobody wants");
    let seen = Window {
        seen: true,
        ..Window::default()
    };
    worker.vllm.worker.ask(Op::Window, &seen).error().unwrap();
    worker.vllm.reconnect_with(register);
    wait_for("the context", || (contexts() == "+-").then_some(()));
    assert_eq!(sidecar.status()["memory"]["locked_bytes"], 0);

    // one that worked leaves it to the next
    let mut worker = Windowed::on_device(worker.vllm);
    sidecar.wait_metric("memory_locked_bytes", f64::from(64 << 20));
    worker.vllm.reconnect_with(register);
    let _next = Windowed::on_device(worker.vllm);
    assert_eq!(contexts(), "+-+");
}

#[test]
fn where_nobody_says_how_much_device_memory_is_free_none_is_taken() {
    let (folder, _sidecar, mut vllm) = over_driver("FAKE_NO_CONTEXT=1");
    std::fs::remove_file(folder.path().join("libnvidia-ml.so.1")).unwrap();
    let error = vllm.worker.ask(Op::Window, &on(FIRST)).error().unwrap();
    let wanted = "NoDriver: libnvidia-ml.so.1: ";
    assert!(error.message.starts_with(wanted), "{error:?}");
}

#[test]
fn why_a_device_gives_no_window_has_a_name_and_the_worker_copies_itself() {
    let devices = [
        ("", "11111111-1111-1111-1111-111111111101", "MigEnabled"),
        (
            "",
            "GPU-11111111-1111-1111-1111-111111111102",
            "ExclusiveProcess",
        ),
        ("", "11111111-1111-1111-1111-111111111109", "NoDevice"),
        ("FAKE_FULL=1", FIRST, "OutOfMemory"),
        // 640 for a context, 16 for the window, 256 that are left to vLLM: asked before there is a context
        ("FAKE_NO_CONTEXT=1 FAKE_FREE=911", FIRST, "OutOfMemory"),
        ("FAKE_NO_CONTEXT=1 FAKE_FREE=912", FIRST, "DriverFailed"),
        ("FAKE_FREE_WITHIN=271", FIRST, "OutOfMemory"),
        ("FAKE_INIT=803", FIRST, "NoDriver"),
    ];
    for (set, uuid, reason) in devices {
        let (_folder, sidecar, mut vllm) = over_driver(set);
        let error = vllm.worker.ask(Op::Window, &on(uuid)).error().unwrap();
        assert_eq!(error.code, ErrorCode::WindowUnavailable);
        assert!(
            error.message.starts_with(&format!("{reason}:")),
            "{error:?}"
        );
        let metric = format!(
            "worker_transfer{{mode=\"engine\",reason=\"{}\"}}",
            snake_case(reason)
        );
        sidecar.wait_metric(&metric, 1.0);
        vllm.store("r", &hashes(1, 1));
    }
}

#[test]
fn where_the_containers_limit_has_room_for_one_window_the_next_worker_waits_for_it_or_copies_itself()
 {
    let (config, _) = Config::parse(CONFIG, false).unwrap();
    let Some(cgroup) = Cgroup::with_limit(config.container_memory_bytes() + (8 << 20)) else {
        return;
    };
    let mut sidecar = Sidecar::prepare(CONFIG);
    sidecar.run_below(&cgroup.procs());
    sidecar.wait_socket();
    sidecar.wait_populated();
    let first = Windowed::working(&sidecar.socket());
    let mut vllm = registered(&sidecar.socket());
    let refused = vllm.worker.ask(Op::Window, &Window::default()).error();
    let refused = refused.unwrap().message;
    assert!(refused.starts_with("OutOfMemory: "), "{refused}");
    drop(first);
    let reply: WindowReply = Windowed::ask(vllm).confirm().read();
    assert!(reply.working);
}
