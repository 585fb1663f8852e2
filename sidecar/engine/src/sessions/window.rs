//! WINDOW: selects a worker's transfer mode, and checks which copies the sidecar may make for it. The shell owns the memory and copies.

use super::core::{Asked, Core, text};
use super::seam::{ConnId, Host, Now, Output, ProcessId, WindowId, WindowJob, WindowNews};
use crate::config::TransferMode;
use crate::mistake::Mistake;
use crate::table::Table;
use kvcachepool_protocol::message::{
    self, AbortReply, ErrorBody, ErrorCode, Register, Role, Window,
};
use kvcachepool_protocol::window::{Order, Reason, Unavailable};
use std::collections::BTreeMap;

/// The worker copies between vLLM's KV blocks and the arena.
pub(super) const ENGINE: &str = "engine";
/// The worker copies between vLLM's KV blocks and a window, and the sidecar between window and arena.
pub(super) const WINDOW: &str = "cuda_window";

/// Transfer state of a worker.
#[derive(Debug, Default)]
pub(super) struct Mode {
    /// The reply to REGISTER told the worker to request a window.
    pub chosen: bool,
    /// The last requested window.
    pub asked: Option<WindowId>,
    /// Both sides have verified that window.
    pub works: bool,
    /// Why the other mode is not used; in window mode, the kind of the window's memory.
    pub reason: String,
}

impl Mode {
    pub fn name(&self) -> &'static str {
        if self.works { WINDOW } else { ENGINE }
    }
}

/// Limit per connection. A copy takes milliseconds.
const WAITING_ABORTS_MAX: usize = 256;

/// An ABORT that waits for copies into its slots to end.
#[derive(Debug)]
pub(super) struct WaitingAbort {
    asked: Asked,
    slots: Vec<u32>,
    freed: u32,
}

fn unavailable(why: Unavailable, detail: &str) -> ErrorBody {
    ErrorBody::new(ErrorCode::WindowUnavailable, format!("{why:?}: {detail}"))
}

impl<H: Host> Core<H> {
    /// The transfer mode of a registering worker, and the reason.
    pub(super) fn choose_transfer(
        &mut self,
        session: u64,
        register: &Register,
    ) -> (&'static str, String) {
        let offered = register.transfer_modes.iter().any(|mode| mode == WINDOW);
        let (chosen, reason) = match self.config.transfer {
            TransferMode::CudaWindow if offered => (true, "WindowAsked"),
            TransferMode::CudaWindow => (false, "WindowNotOffered"),
            TransferMode::Auto | TransferMode::Engine => (false, "TransferNotChosen"),
        };
        if let Some(s) = self.peers.sessions.get_mut(&session) {
            s.transfer = Mode {
                chosen,
                reason: reason.into(),
                ..Mode::default()
            };
        }
        (if chosen { WINDOW } else { ENGINE }, reason.to_owned())
    }

    pub(super) fn window(
        &mut self,
        asked: Asked,
        session: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let window: Window = message::decode(body)?;
        let registered = self.registered_rank(session);
        let Some(s) = self.peers.sessions.get_mut(&session) else {
            return Ok(());
        };
        if !registered {
            let said = "WINDOW is accepted only from a worker that has registered";
            return Err(ErrorBody::later(ErrorCode::NotRegistered, said));
        }
        if !s.transfer.chosen {
            let said = "the sidecar's `transfer` is not CudaWindow, or this worker did not offer `cuda_window`";
            return Err(unavailable(Unavailable::TransferNotChosen, said));
        }
        let Asked { conn, tag, .. } = asked;
        if window.seen {
            if s.transfer.asked.is_none_or(|w| w.conn != conn) {
                return Err(unavailable(
                    Unavailable::PatternMismatch,
                    "this connection has no window",
                ));
            }
            out.push(Output::ConfirmWindow { conn, tag });
            return Ok(());
        }
        if s.transfer.asked.is_some_and(|w| w.conn == conn) {
            let said = "this connection already has a window, or is opening one; send REGISTER before another WINDOW";
            return Err(unavailable(Unavailable::Busy, said));
        }
        let most = self.config.window_bytes;
        if window.bytes > most {
            let said = format!(
                "requested {} bytes, but transfer.windowSize is {most}",
                window.bytes
            );
            return Err(unavailable(Unavailable::WindowTooLarge, &said));
        }
        s.had_window = true;
        self.windows_used = true;
        let window_id = WindowId { conn, tag };
        s.transfer.asked = Some(window_id);
        s.transfer.works = false;
        out.push(Output::OpenWindow(WindowJob {
            window: window_id,
            process: s.process,
            device_uuid: text(&window.device_uuid),
            bytes: match window.bytes {
                0 => most,
                wanted => wanted,
            },
        }));
        Ok(())
    }

    /// True if this session is a registered rank of its instance, in a process that maps the live arena.
    fn registered_rank(&self, session: u64) -> bool {
        let Some(s) = self.peers.sessions.get(&session) else {
            return false;
        };
        let maps = self.peers.process_of_session(session).and_then(|p| p.maps);
        let instance = self.instances.get(&s.instance);
        s.role == Role::Worker
            && maps.is_some()
            && maps == self.region()
            && instance.is_some_and(|i| i.ranks.values().any(|(id, _)| *id == session))
    }

    /// Registered workers by transfer mode and name of the reason.
    pub(super) fn transfers(&self) -> BTreeMap<(&'static str, String), u32> {
        let mut counts = BTreeMap::new();
        for (id, s) in &self.peers.sessions {
            if self.registered_rank(*id) {
                let name = match s.transfer.works {
                    true => "",
                    false => s.transfer.reason.split(':').next().unwrap_or_default(),
                };
                *counts
                    .entry((s.transfer.name(), name.to_owned()))
                    .or_default() += 1;
            }
        }
        counts
    }

    /// Handles a change of a requested window.
    pub(super) fn window_news(
        &mut self,
        window: WindowId,
        news: WindowNews,
        out: &mut Vec<Output>,
    ) {
        let known = self.peers.conns.get(&window.conn).and_then(|c| c.session);
        let Some(s) = known.and_then(|id| self.peers.sessions.get_mut(&id)) else {
            return;
        };
        if s.transfer.asked != Some(window) {
            return;
        }
        let (event, detail) = match news {
            WindowNews::Works { memory } => {
                s.transfer.works = true;
                s.transfer.reason = memory;
                ("WindowWorks", &s.transfer.reason)
            }
            WindowNews::Unavailable { reason } => {
                s.transfer.works = false;
                s.transfer.asked = None;
                s.transfer.reason = reason;
                ("WindowUnavailable", &s.transfer.reason)
            }
        };
        self.counters.event(event);
        out.push(Output::Log {
            event,
            detail: format!("rank {} of {}: {detail}", s.rank, s.instance),
        });
    }

    /// True unless the process is proven dead.
    pub fn lives(&self, process: ProcessId) -> bool {
        self.peers.processes.contains_key(&process)
    }

    /// Checks whether the sidecar may start a copy that the window requests, in an arena of this region. An allowed copy must be ended with
    /// [`Core::window_copy_ended`].
    pub fn window_copy_begins(
        &mut self,
        window: WindowId,
        region: u64,
        order: &Order,
    ) -> Result<(), Reason> {
        let session = self.peers.conns.get(&window.conn).and_then(|c| c.session);
        let session = session.filter(|id| {
            let current = self.peers.sessions.get(id).and_then(|s| s.transfer.asked);
            current == Some(window) && self.registered_rank(*id) && self.region() == Some(region)
        });
        let lock = session
            .and_then(|id| self.peers.process_of_session(id))
            .and_then(|p| p.lock);
        let owner = match lock {
            Some(lock) => lock,
            None if H::Table::makes(Mistake::CopyUnowned) => 0,
            None => return Err(Reason::Closed),
        };
        let engine = self.engine.as_mut().ok_or(Reason::Closed)?;
        engine
            .memory
            .copy_begins(owner, order.direction, &order.runs)
    }

    /// A copy ended, successfully or not. Call this before its stage is handed back.
    pub fn window_copy_ended(&mut self, now: Now, order: &Order, out: &mut Vec<Output>) {
        if let Some(engine) = &mut self.engine {
            engine.memory.copy_ended(order.direction, &order.runs);
        }
        self.answer_aborts(out);
        self.act(now, out);
    }

    /// Answers the ABORT of a worker that has or had a window, once no copies into its slots are running.
    pub(super) fn answer_abort(
        &mut self,
        asked: Asked,
        session: u64,
        mut slots: Vec<u32>,
        freed: u32,
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let session = self.peers.sessions.get(&session);
        if !session.is_some_and(|s| s.had_window) {
            return Ok(());
        }
        let same = |w: &&WaitingAbort| w.asked.conn == asked.conn;
        if self.waiting_aborts.iter().filter(same).count() >= WAITING_ABORTS_MAX {
            let said = "too many ABORTs wait for these copies; retry after they are answered";
            return Err(ErrorBody::later(ErrorCode::LimitReached, said));
        }
        let engine = self.engine.as_ref();
        slots.retain(|slot| engine.is_some_and(|e| e.memory.copies_into(std::iter::once(*slot))));
        self.waiting_aborts.push(WaitingAbort {
            asked,
            slots,
            freed,
        });
        self.answer_aborts(out);
        Ok(())
    }

    fn answer_aborts(&mut self, out: &mut Vec<Output>) {
        let engine = self.engine.as_ref();
        let copied = |w: &WaitingAbort| {
            engine.is_some_and(|e| e.memory.copies_into(w.slots.iter().copied()))
        };
        let waiting = std::mem::take(&mut self.waiting_aborts);
        let (wait, over): (Vec<_>, Vec<_>) = waiting.into_iter().partition(copied);
        self.waiting_aborts = wait;
        for abort in over {
            let freed = abort.freed;
            self.reply(abort.asked, 0, &AbortReply { freed }, Vec::new(), out);
        }
    }

    /// The connection ended, and its window with it: no more copies are made for it.
    pub(super) fn window_disconnected(&mut self, session: u64, conn: ConnId) {
        self.waiting_aborts.retain(|w| w.asked.conn != conn);
        if let Some(s) = self.peers.sessions.get_mut(&session)
            && s.transfer.asked.is_some_and(|w| w.conn == conn)
        {
            s.transfer.asked = None;
            s.transfer.works = false;
            s.transfer.reason = "Disconnected".into();
        }
    }
}
