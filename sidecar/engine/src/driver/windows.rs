//! Windows: who may have one, and the replies to WINDOW.

use super::{Devices, carry_out, makes, send_frame, tell};
use crate::mistake::Mistake;
use crate::sessions::{ConnId, Frame, Input, ProcessId, WindowId, WindowJob, WindowNews};
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_FDS, FLAG_REPLY, Op};
use kvcachepool_protocol::message::{ErrorBody, ErrorCode, WindowReply, encode};
use kvcachepool_protocol::window::Unavailable;
use std::collections::BTreeSet;

/// How long a new window waits for the process's previous one: its running copies end, and the worker unmaps it. Milliseconds.
const PATIENCE_MS: u64 = 2_000;

/// Each process has at most one window, so that unreleased windows cannot pile up.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// Processes that have a window, or may still have an old one mapped.
    holders: BTreeSet<ProcessId>,
    /// Windows that wait for the previous one, and until when.
    waiting: Vec<(WindowJob, u64)>,
}

/// A window's reply to WINDOW, with its descriptors; on error, `Unavailable` with its detail.
pub type Answer<Fd> = Result<(WindowReply, Vec<Fd>), String>;

/// Replies to WINDOW; with `memory` the window works from now on. False: the worker does not get the reply.
pub fn window_answered<D: Devices>(
    devices: &mut D,
    window: WindowId,
    tag: u64,
    answer: Answer<D::Fd>,
    memory: Option<String>,
) -> bool {
    let sent = reply(devices, window, tag, answer, memory);
    carry_out(devices);
    sent
}

/// No more copies are made for a window.
pub fn window_ended(devices: &mut impl Devices, window: WindowId, reason: String) {
    let news = WindowNews::Unavailable { reason };
    tell(devices, Input::Window { window, news });
    carry_out(devices);
}

/// The process's window is gone, or was not made.
pub fn window_released(devices: &mut impl Devices, process: ProcessId) {
    release(devices, process);
    carry_out(devices);
}

/// Ends the connection's earlier window.
pub(super) fn open<D: Devices>(devices: &mut D, job: WindowJob) {
    close(devices, job.window.conn);
    let until = devices.now().mono_ms + PATIENCE_MS;
    let windows = &mut devices.driver().windows;
    if windows.holders.contains(&job.process) && !makes::<D>(Mistake::WindowBeside) {
        windows.waiting.push((job, until));
    } else {
        begin(devices, job);
    }
}

pub(super) fn close(devices: &mut impl Devices, conn: ConnId) {
    let waiting = &mut devices.driver().windows.waiting;
    waiting.retain(|(job, _)| job.window.conn != conn);
    devices.close_window(conn);
}

pub(super) fn confirm(devices: &mut impl Devices, window: WindowId) {
    if !devices.confirm_window(window) {
        refuse(devices, window, "this connection has no window");
    }
}

pub(super) fn refuse_expired(devices: &mut impl Devices) {
    let now = devices.now().mono_ms;
    let expired = |(_, until): &mut (WindowJob, u64)| now >= *until;
    let waiting = &mut devices.driver().windows.waiting;
    let expired: Vec<_> = waiting.extract_if(.., expired).collect();
    for (job, _) in expired {
        let said = "the previous window is still mapped, or its copies are in flight";
        refuse(devices, job.window, said);
    }
}

fn begin(devices: &mut impl Devices, job: WindowJob) {
    let (window, process) = (job.window, job.process);
    devices.driver().windows.holders.insert(process);
    if let Err(reason) = devices.open_window(job) {
        reply(devices, window, window.tag, Err(reason), None);
        release(devices, process);
    }
}

fn release(devices: &mut impl Devices, process: ProcessId) {
    let windows = &mut devices.driver().windows;
    windows.holders.remove(&process);
    let next = windows
        .waiting
        .iter()
        .position(|(j, _)| j.process == process);
    if let Some((job, _)) = next.map(|at| windows.waiting.remove(at)) {
        begin(devices, job);
    }
}

fn refuse(devices: &mut impl Devices, window: WindowId, detail: &str) {
    let reason = format!("{:?}: {detail}", Unavailable::Busy);
    reply(devices, window, window.tag, Err(reason), None);
}

/// The core learns of the window before the worker can use it.
fn reply<D: Devices>(
    devices: &mut D,
    window: WindowId,
    tag: u64,
    answer: Answer<D::Fd>,
    memory: Option<String>,
) -> bool {
    let news = match &answer {
        Err(reason) => Some(WindowNews::Unavailable {
            reason: reason.clone(),
        }),
        Ok(_) => memory.map(|memory| WindowNews::Works { memory }),
    };
    if let Some(news) = news {
        tell(devices, Input::Window { window, news });
    }
    let (flags, body, fds) = match answer {
        Ok((reply, fds)) => {
            let flags = if fds.is_empty() { 0 } else { FLAG_FDS };
            (flags, encode(&reply), fds)
        }
        Err(message) => {
            let error = ErrorBody::new(ErrorCode::WindowUnavailable, message);
            (FLAG_ERROR, encode(&error), Vec::new())
        }
    };
    body.is_ok_and(|body| {
        let frame = Frame {
            op: Op::Window,
            flags: FLAG_REPLY | flags,
            tag,
            body,
        };
        send_frame(devices, window.conn, frame, fds)
    })
}
