//! Decisions between the core and the devices: carries out the core's outputs in order, ends each connection once, closes passed descriptors
//! after their frame, limits each process to one window, and decides about memory of boots that failed. No clocks, sockets or threads.
//! The sidecar runs this driver over the operating system, and the simulation runs it over models.

mod boot;
#[cfg(test)]
mod tests;
mod windows;

pub use boot::{EarlierMemory, HEALTHY_AFTER_MS};
pub use windows::{window_answered, window_ended, window_released};

use crate::mistake::Mistake;
use crate::sessions::{
    ConnId, Core, FdFacts, FdId, FdKind, Frame, Host, Input, Now, Output, ProcessId, Start,
    WindowId, WindowJob,
};
use crate::table::Table;
use crate::{Effect, config::Config};
use kvcachepool_protocol::frame::Header;
use kvcachepool_protocol::message::Admin;
use std::collections::BTreeMap;
use windows::Windows;

/// A send failed: the peer is gone, or does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

/// What a driver acts on. The driver calls these methods; they call nothing of the driver.
pub trait Devices {
    type Host: Host;
    /// A descriptor to pass with a frame.
    type Fd;

    fn driver(&mut self) -> &mut Driver<Self::Host>;
    fn now(&self) -> Now;

    /// Queues a frame and sends what fits now. False: the connection closes after its queue is sent, and takes no more frames.
    fn send(&mut self, conn: ConnId, frame: Frame, fds: Vec<Self::Fd>) -> Result<bool, Broken>;
    /// Stops reading a connection and closes it after its queued frames are sent. Without a reason, the peer or an error ended it.
    fn close(&mut self, conn: ConnId, reason: Option<&'static str>);
    /// None: there is no such descriptor.
    fn descriptor(&self, kind: FdKind) -> Option<Self::Fd>;
    /// Closes those that were not taken.
    fn close_descriptors(&mut self, fds: &[FdFacts]);
    /// Takes a pidfd, and reports the end of its process with [`died`].
    fn watch(&mut self, process: ProcessId, fd: FdId);

    /// Starts to carry out an effect, and reports its end with [`Input::Completed`].
    fn start(&mut self, effect: Effect);

    /// Starts to create a window. Its end is reported with [`window_released`], whatever happens. On error nothing has started.
    fn open_window(&mut self, job: WindowJob) -> Result<(), String>;
    /// Starts to compare the pattern's complement in the connection's window. False: it has none.
    fn confirm_window(&mut self, window: WindowId) -> bool;
    /// Starts to end the connection's window, if it has one.
    fn close_window(&mut self, conn: ConnId);
    /// A process is proven dead, and no longer has its window mapped.
    fn unmapped(&mut self, process: ProcessId);

    /// Starts to carry out a tool's request.
    fn admin(&mut self, conn: ConnId, tag: u64, request: Admin);
    fn log(&mut self, event: &'static str, detail: String);
}

/// The core, and what its driver knows of connections and windows.
pub struct Driver<H: Host> {
    core: Core<H>,
    /// Outputs to carry out.
    out: Vec<Output>,
    /// Open connections, with their peers' pidfds.
    conns: BTreeMap<ConnId, Option<FdFacts>>,
    windows: Windows,
}

impl<H: Host> Driver<H> {
    /// Creates the core. The caller continues with [`carry_out`].
    pub fn new(config: Config, host: H, start: Start<H::Table>, now: Now) -> Self {
        let mut out = Vec::new();
        Self {
            core: Core::new(config, host, start, now, &mut out),
            out,
            conns: BTreeMap::new(),
            windows: Windows::default(),
        }
    }

    pub fn core(&self) -> &Core<H> {
        &self.core
    }

    pub fn connections(&self) -> usize {
        self.conns.len()
    }

    /// Calls the core. The caller continues with [`carry_out`].
    pub fn ask<R>(
        &mut self,
        now: Now,
        call: impl FnOnce(&mut Core<H>, Now, &mut Vec<Output>) -> R,
    ) -> R {
        call(&mut self.core, now, &mut self.out)
    }
}

/// Calls the core and carries out the resulting outputs.
pub fn with_core<D: Devices, R>(
    devices: &mut D,
    call: impl FnOnce(&mut Core<D::Host>, Now, &mut Vec<Output>) -> R,
) -> R {
    let now = devices.now();
    let answer = devices.driver().ask(now, call);
    carry_out(devices);
    answer
}

/// Passes an input to the core. For connections, frames, deaths and ticks there are functions of their own.
pub fn handle(devices: &mut impl Devices, input: Input<'_>) {
    with_core(devices, |core, now, out| core.handle(now, input, out));
}

/// A connection was accepted.
pub fn connected(devices: &mut impl Devices, conn: ConnId, peer: Option<FdFacts>, pid: u32) {
    devices.driver().conns.insert(conn, peer);
    handle(devices, Input::Connected { conn, peer, pid });
}

/// A frame was read. Its descriptors, and memory that was returned with it, are closed here unless the core keeps them: while they exist,
/// they are charged to the pod.
pub fn frame<D: Devices>(
    devices: &mut D,
    conn: ConnId,
    header: Header,
    body: &[u8],
    fds: &[FdFacts],
) {
    // A frame of another connection may have closed this one: the rest of its frames is dropped.
    if devices.driver().conns.contains_key(&conn) {
        let input = Input::Frame {
            conn,
            header,
            body,
            fds,
        };
        with_core(devices, |core, now, out| {
            core.handle(now, input, out);
            core.host_mut().drop_adopted();
        });
    }
    devices.close_descriptors(fds);
}

/// A connection ended for a reason outside the core. Without effect on one that is closed already.
pub fn lost(devices: &mut impl Devices, conn: ConnId) {
    disconnect(devices, conn);
    carry_out(devices);
}

/// A watched process is dead.
pub fn died(devices: &mut impl Devices, process: ProcessId) {
    handle(devices, Input::ProcessDied { process });
    devices.unmapped(process);
}

/// Runs timers. Call it only after every readable socket was read.
pub fn tick(devices: &mut impl Devices) {
    handle(devices, Input::Tick);
    windows::refuse_expired(devices);
    carry_out(devices);
}

/// Sends a frame that the core did not build. False: the connection is gone and the peer does not get the frame.
pub fn send<D: Devices>(devices: &mut D, conn: ConnId, frame: Frame, fds: Vec<D::Fd>) -> bool {
    let sent = send_frame(devices, conn, frame, fds);
    carry_out(devices);
    sent
}

/// Carries out what the core wants, in order.
pub fn carry_out(devices: &mut impl Devices) {
    loop {
        let outputs = std::mem::take(&mut devices.driver().out);
        if outputs.is_empty() {
            return;
        }
        for output in outputs {
            one(devices, output);
        }
    }
}

fn one<D: Devices>(devices: &mut D, output: Output) {
    match output {
        Output::Send { conn, frame, fds } => {
            let fds = fds.into_iter().filter_map(|kind| devices.descriptor(kind));
            let fds = fds.collect();
            send_frame(devices, conn, frame, fds);
        }
        Output::Close { conn, reason } => {
            close(devices, conn, Some(reason));
        }
        Output::WatchProcess { process, fd } => devices.watch(process, fd),
        Output::Effect(effect) => {
            if makes::<D>(Mistake::EffectTwice) {
                devices.start(effect.clone());
            }
            devices.start(effect);
        }
        Output::OpenWindow(job) => windows::open(devices, job),
        Output::ConfirmWindow { conn, tag } => windows::confirm(devices, WindowId { conn, tag }),
        Output::Admin { conn, tag, request } => devices.admin(conn, tag, request),
        Output::Log { event, detail } => devices.log(event, detail),
    }
}

fn makes<D: Devices>(mistake: Mistake) -> bool {
    <D::Host as Host>::Table::makes(mistake)
}

/// Calls the core while outputs are carried out: what it wants now follows after them.
fn tell(devices: &mut impl Devices, input: Input<'_>) {
    let now = devices.now();
    let driver = devices.driver();
    driver.ask(now, |core, now, out| core.handle(now, input, out));
}

fn send_frame<D: Devices>(devices: &mut D, conn: ConnId, frame: Frame, fds: Vec<D::Fd>) -> bool {
    if !devices.driver().conns.contains_key(&conn) {
        return false;
    }
    let sent = devices.send(conn, frame, fds);
    sent.unwrap_or_else(|Broken| {
        disconnect(devices, conn);
        false
    })
}

fn disconnect(devices: &mut impl Devices, conn: ConnId) {
    if close(devices, conn, None) {
        tell(devices, Input::Disconnected { conn });
    }
}

/// False: the connection is closed already.
fn close(devices: &mut impl Devices, conn: ConnId, reason: Option<&'static str>) -> bool {
    let Some(pidfd) = devices.driver().conns.remove(&conn) else {
        return false;
    };
    devices.close_descriptors(pidfd.as_slice());
    windows::close(devices, conn);
    devices.close(conn, reason);
    true
}
