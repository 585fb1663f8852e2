//! A window's copies over a fake driver that is made to fail. Each test has a driver of its own.
#![allow(unsafe_code)]

use super::api::Query;
use super::context::{Context, Contexts, Driver};
use super::device::CudaDevice;
use super::launch::Kernels;
use super::library::Library;
use crate::device::{Device, NoWindow, Part, Progress, Ticket};
use cudarc::driver::sys::CUresult;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::window::{Direction, Unavailable};
use std::ffi::{CString, c_int};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

const FIRST: &str = "11111111111111111111111111111100";
/// An instance of a partitioned device.
const SECOND: &str = "11111111111111111111111111111101";
const WINDOW: u64 = 4 << 20;
/// Every later call of the context fails with it too.
const LOST: c_int = CUresult::CUDA_ERROR_LAUNCH_FAILED as c_int;

struct Rig {
    context: Arc<Context>,
    device: CudaDevice,
    arena: Arc<Mapping>,
    /// Sets the result of events and streams; 0: the real one.
    fail: unsafe extern "C" fn(c_int),
    events: unsafe extern "C" fn() -> c_int,
    /// Sets whether work submitted earlier hangs.
    stuck: unsafe extern "C" fn(c_int),
    /// Sets whether copies reported as done are still in flight.
    stages: unsafe extern "C" fn(c_int),
}

/// A fake driver for one test.
fn library() -> Library {
    library_with(&[])
}

/// A fake driver built with more arguments.
fn library_with(arguments: &[&str]) -> Library {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_driver.c");
    let built = folder.path().join("libcuda.so.1");
    let compiled = Command::new("cc")
        .args(arguments)
        .args(["-shared", "-fPIC", "-o"])
        .args([&built, &source])
        .status();
    assert!(compiled.unwrap().success());
    Library::open(&CString::new(built.to_str().unwrap()).unwrap()).unwrap()
}

impl Rig {
    fn new() -> Self {
        let library = library();
        // SAFETY: the types are those of fake_driver.c.
        let (fail, stuck, stages) = unsafe {
            let fail = library.function("fake_fail").unwrap();
            let stuck = library.function("fake_stuck").unwrap();
            (fail, stuck, library.function("fake_stages").unwrap())
        };
        // SAFETY: as above.
        let events = unsafe { library.function("fake_events").unwrap() };
        let driver = Box::leak(Box::new(Driver::of(&library).unwrap()));
        let context = Contexts::new().of(driver, FIRST, |_| Ok(())).unwrap();
        Self {
            device: CudaDevice::new(context.clone(), WINDOW).unwrap(),
            context,
            arena: Arc::new(Mapping::private("arena", WINDOW).unwrap()),
            fail,
            events,
            stuck,
            stages,
        }
    }

    fn fail(&self, result: c_int) {
        // SAFETY: it takes an int.
        unsafe { (self.fail)(result) }
    }

    fn stuck(&self, now: bool) {
        // SAFETY: it takes an int.
        unsafe { (self.stuck)(c_int::from(now)) }
    }

    /// Number of events created and not destroyed.
    fn events(&self) -> c_int {
        // SAFETY: it takes nothing.
        unsafe { (self.events)() }
    }

    fn begin(&mut self, bytes: u64) -> Ticket {
        let part = Part {
            window: 0,
            arena: 0,
            bytes,
        };
        self.device
            .begin(Direction::Store, &self.arena, vec![part])
            .unwrap()
    }

    fn settled(&mut self, ticket: Ticket) -> Progress {
        loop {
            match self.device.progress(ticket) {
                Progress::Running => {}
                other => return other,
            }
        }
    }
}

#[test]
fn a_function_that_a_driver_lacks_is_named_and_stops_only_what_needs_it() {
    for (symbol, doctor_needs) in [("cuInit", true), ("cuIpcGetMemHandle", false)] {
        let library = library_with(&[&format!("-D{symbol}=fake_{symbol}")]);
        let missing = Driver::of(&library).err().unwrap();
        assert_eq!(missing, format!("libcuda.so.1 has no {symbol}"));
        assert_eq!(Query::of(&library).err(), doctor_needs.then_some(symbol));
    }
    // This driver has the functions for windows and none for kernels.
    let mut rig = Rig::new();
    let missing = Kernels::load(&rig.context).err().unwrap();
    assert_eq!(missing.to_string(), "cuCtxSynchronize failed with 500");
    let ticket = rig.begin(4096);
    assert_eq!(rig.settled(ticket), Progress::Done);
}

#[test]
fn a_driver_from_before_the_second_version_of_a_function_has_the_first() {
    let library = library_with(&["-DcuDeviceGetUuid_v2=cuDeviceGetUuid"]);
    assert!(Query::of(&library).is_ok());
    assert_eq!(
        Driver::of(&library).err().unwrap(),
        "libcuda.so.1 has no cuDeviceGetUuid_v2"
    );
}

#[test]
fn a_driver_that_hangs_at_one_device_holds_up_nobody_at_another() {
    let driver: &'static Driver = Box::leak(Box::new(Driver::of(&library()).unwrap()));
    let contexts = Contexts::new();
    let ((began, begun), (go, released)) = (channel(), channel::<()>());
    std::thread::scope(|scope| {
        let known = &contexts;
        let hung = move || {
            known.of(driver, FIRST, |_| {
                began.send(()).unwrap();
                let released = released.recv_timeout(Duration::from_secs(20));
                released.map_err(|_| NoWindow::new(Unavailable::DriverFailed, "held up the other"))
            })
        };
        let first = scope.spawn(hung);
        begun.recv().unwrap();
        let second = contexts.of(driver, SECOND, |_| Ok(()));
        assert_eq!(second.err().unwrap().why, Unavailable::MigEnabled);
        go.send(()).unwrap();
        let first = first.join().unwrap().unwrap();
        let again = contexts.of(driver, FIRST, |_| unreachable!("it is there"));
        assert!(Arc::ptr_eq(&first, &again.unwrap()));
    });
    let unknown = contexts.of(driver, "00", |_| Ok(())).err().unwrap();
    assert_eq!(unknown.why, Unavailable::NoDevice);
}

#[test]
fn what_was_written_is_there_also_where_the_driver_only_took_it() {
    let mut rig = Rig::new();
    // SAFETY: it takes an int.
    unsafe { (rig.stages)(1) };
    rig.device.write(7, b"pattern").unwrap();
    let mut there = [0; 9];
    rig.device.read(6, &mut there).unwrap();
    assert_eq!(&there, b"\0pattern\0");
    rig.stuck(true);
    assert!(rig.device.write(0, b"late").is_err());
}

#[test]
fn a_copy_whose_event_fails_has_ended_only_when_its_stream_says_so() {
    let mut rig = Rig::new();
    let ticket = rig.begin(4096);
    rig.fail(LOST);
    for _ in 0..3 {
        let progress = rig.device.progress(ticket);
        assert!(matches!(progress, Progress::Unknown(_)), "{progress:?}");
        let refused = rig.context.trusted().unwrap_err();
        assert_eq!(refused.why, Unavailable::DriverFailed, "no further window");
    }
    rig.fail(0);
    let progress = rig.device.progress(ticket);
    assert!(matches!(progress, Progress::Failed(_)), "{progress:?}");
    assert_eq!((rig.context.trusted(), rig.events()), (Ok(()), 0));
}

#[test]
fn an_error_of_the_question_alone_is_a_copy_that_failed_and_ended() {
    let mut rig = Rig::new();
    let ticket = rig.begin(4096);
    // Events fail, streams do not.
    rig.fail(-LOST);
    let progress = rig.device.progress(ticket);
    assert!(matches!(progress, Progress::Failed(_)), "{progress:?}");
    rig.fail(0);
    let ticket = rig.begin(4096);
    assert_eq!(rig.settled(ticket), Progress::Done, "others go on");
}

#[test]
fn a_copy_that_failed_behind_one_that_is_stuck_runs_on_and_is_not_waited_for() {
    let mut rig = Rig::new();
    let ticket = rig.begin(WINDOW + 1);
    rig.stuck(true);
    for _ in 0..3 {
        assert_eq!(rig.device.progress(ticket), Progress::Running);
    }
    assert_eq!(rig.context.trusted(), Ok(()));
    rig.stuck(false);
    let progress = rig.device.progress(ticket);
    assert!(matches!(progress, Progress::Failed(_)), "{progress:?}");
}

#[test]
fn a_copy_that_is_given_up_allows_no_window_until_it_has_ended() {
    let mut rig = Rig::new();
    for outcome in [0, -LOST] {
        let ticket = rig.begin(4096);
        assert_eq!(rig.device.progress(ticket), Progress::Running);
        for _ in 0..2 {
            rig.device.doubt(ticket);
        }
        assert_eq!(rig.device.progress(ticket), Progress::Running);
        assert!(rig.context.trusted().is_err());
        rig.fail(outcome);
        let done = rig.settled(ticket) == Progress::Done;
        rig.fail(0);
        assert_eq!((done, rig.context.trusted()), (outcome == 0, Ok(())));
    }
}

#[test]
fn a_copy_that_failed_half_submitted_ends_as_any_other() {
    let mut rig = Rig::new();
    let bytes = WINDOW + 1;
    let ticket = rig.begin(bytes);
    rig.fail(LOST);
    let progress = rig.device.progress(ticket);
    assert!(matches!(progress, Progress::Unknown(_)), "{progress:?}");
    rig.fail(0);
    let progress = rig.device.progress(ticket);
    assert!(matches!(progress, Progress::Failed(_)), "{progress:?}");
    assert_eq!(rig.events(), 0);
}
