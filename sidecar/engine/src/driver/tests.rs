use super::*;
use crate::sessions::FdType;
use crate::sessions::tests::peer::{Pod, hello, pidfd};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::{Role, encode};

/// Devices that write down what they are told.
struct Desk {
    driver: Driver<Pod>,
    ms: u64,
    log: Vec<String>,
    breaks: bool,
}

impl Desk {
    fn new() -> Self {
        let start = Start {
            boot: 1,
            version: String::new(),
            found: None,
            cold: false,
        };
        let driver = Driver::new(Config::default(), Pod::default(), start, Now::default());
        let mut desk = Self {
            driver,
            ms: 1,
            log: Vec::new(),
            breaks: false,
        };
        carry_out(&mut desk);
        desk
    }

    fn connect(&mut self, conn: u64, peer: Option<FdFacts>) -> ConnId {
        connected(self, ConnId(conn), peer, 0);
        ConnId(conn)
    }

    fn hello(&mut self, conn: ConnId) {
        let body = encode(&hello(Role::Scheduler, 1, 1)).unwrap();
        let header = Header {
            length: body.len() as u32,
            version: kvcachepool_protocol::PROTOCOL_VERSION,
            opcode: Op::Hello as u8,
            flags: 0,
            tag: 1,
        };
        frame(self, conn, header, &body, &[pidfd()]);
    }

    fn window(&mut self, conn: ConnId, process: u64) {
        let job = WindowJob {
            window: WindowId { conn, tag: 7 },
            process: ProcessId(process),
            device_uuid: String::new(),
            bytes: 1,
        };
        windows::open(self, job);
    }

    /// What was written down since the last call.
    fn told(&mut self) -> Vec<String> {
        std::mem::take(&mut self.log)
    }
}

impl Devices for Desk {
    type Host = Pod;
    type Fd = FdKind;

    fn driver(&mut self) -> &mut Driver<Pod> {
        &mut self.driver
    }
    fn now(&self) -> Now {
        Now {
            mono_ms: self.ms,
            ..Now::default()
        }
    }
    fn send(&mut self, conn: ConnId, frame: Frame, _: Vec<FdKind>) -> Result<bool, Broken> {
        if self.breaks {
            return Err(Broken);
        }
        self.log
            .push(format!("{} gets {:?} {}", conn.0, frame.op, frame.flags));
        Ok(true)
    }
    fn close(&mut self, conn: ConnId, reason: Option<&'static str>) {
        self.log.push(format!("{} closed {reason:?}", conn.0));
    }
    fn descriptor(&self, kind: FdKind) -> Option<FdKind> {
        Some(kind)
    }
    fn close_descriptors(&mut self, fds: &[FdFacts]) {
        self.log
            .extend(fds.iter().map(|fd| format!("fd {} closed", fd.id.0)));
    }
    fn watch(&mut self, process: ProcessId, fd: FdId) {
        self.log
            .push(format!("process {} watched by fd {}", process.0, fd.0));
    }
    fn start(&mut self, effect: Effect) {
        self.log.push(format!("{effect:?}"));
    }
    fn open_window(&mut self, job: WindowJob) -> Result<(), String> {
        if self.breaks {
            return Err("OutOfMemory: no thread".into());
        }
        self.log
            .push(format!("window of {} opened", job.window.conn.0));
        Ok(())
    }
    fn confirm_window(&mut self, _: WindowId) -> bool {
        false
    }
    fn close_window(&mut self, _: ConnId) {}
    fn unmapped(&mut self, process: ProcessId) {
        self.log.push(format!("process {} unmapped", process.0));
    }
    fn admin(&mut self, _: ConnId, _: u64, _: Admin) {}
    fn log(&mut self, _: &'static str, _: String) {}
}

const REFUSED: u16 =
    kvcachepool_protocol::frame::FLAG_REPLY | kvcachepool_protocol::frame::FLAG_ERROR;

#[test]
fn a_connection_that_takes_no_frame_ends_once_and_the_rest_of_its_frames_is_dropped() {
    let mut desk = Desk::new();
    let peer = FdFacts {
        id: FdId(9),
        kind: FdType::Pidfd,
    };
    let conn = desk.connect(5, Some(peer));
    desk.breaks = true;
    desk.hello(conn);
    let told = desk.told();
    let closed = |what: &str| told.iter().filter(|line| line.contains(what)).count();
    assert_eq!(
        (closed("5 closed None"), closed("fd 9 closed")),
        (1, 1),
        "{told:?}"
    );
    assert_eq!(desk.driver.connections(), 0);
    desk.breaks = false;
    desk.hello(conn);
    lost(&mut desk, conn);
    assert_eq!(desk.told(), ["fd 1 closed"]);
}

#[test]
fn a_reply_outside_the_core_goes_only_to_an_open_connection() {
    let mut desk = Desk::new();
    let conn = desk.connect(1, None);
    let reply = || Frame {
        op: Op::Admin,
        flags: 0,
        tag: 1,
        body: Vec::new(),
    };
    assert!(send(&mut desk, conn, reply(), Vec::new()));
    assert!(!send(&mut desk, ConnId(2), reply(), Vec::new()));
    assert_eq!(desk.told(), ["1 gets Admin 0"]);
}

#[test]
fn a_process_has_one_window_and_the_next_waits_for_its_end() {
    let mut desk = Desk::new();
    let conns: Vec<_> = (0..4).map(|n| desk.connect(n, None)).collect();
    desk.window(conns[0], 1);
    desk.window(conns[1], 1);
    desk.window(conns[2], 2);
    assert_eq!(desk.told(), ["window of 0 opened", "window of 2 opened"]);
    window_released(&mut desk, ProcessId(1));
    assert_eq!(desk.told(), ["window of 1 opened"]);

    // a connection that ends does not wait any more
    desk.window(conns[0], 1);
    desk.window(conns[3], 1);
    lost(&mut desk, conns[0]);
    assert_eq!(desk.told(), ["0 closed None"]);
    desk.ms += 1_999;
    tick(&mut desk);
    assert!(desk.told().is_empty());
    desk.ms += 1;
    tick(&mut desk);
    assert_eq!(desk.told(), [format!("3 gets Window {REFUSED}")]);
    window_released(&mut desk, ProcessId(1));
    assert!(desk.told().is_empty(), "nobody waits");
}

#[test]
fn a_window_that_cannot_be_made_or_is_not_there_is_refused() {
    let mut desk = Desk::new();
    let conn = desk.connect(1, None);
    desk.breaks = true;
    desk.window(conn, 1);
    assert_eq!(
        desk.told(),
        ["1 closed None"],
        "the refusal finds no reader"
    );
    let conn = desk.connect(2, None);
    desk.breaks = false;
    desk.window(conn, 1);
    assert_eq!(
        desk.told(),
        ["window of 2 opened"],
        "the failed one holds no place"
    );
    windows::confirm(&mut desk, WindowId { conn, tag: 8 });
    assert_eq!(desk.told(), [format!("2 gets Window {REFUSED}")]);
}
