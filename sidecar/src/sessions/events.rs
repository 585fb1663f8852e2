//! EVENTS: the long poll of a scheduler for what was stored and removed.

use super::core::{Core, Refusal};
use super::seam::{ConnId, Host, Now, Output};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::{self, Events, EventsReply};

/// Longest wait of one poll.
const WAIT_MS_MAX: u64 = 60_000;

/// A poll that waits. A session has one at most.
#[derive(Debug, Clone, Copy)]
pub(super) struct Poll {
    conn: ConnId,
    tag: u64,
    cursor: u64,
    until_ms: u64,
}

impl<H: Host> Core<H> {
    pub(super) fn events(
        &mut self,
        now: Now,
        conn: ConnId,
        session: u64,
        tag: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), Refusal> {
        let asked: Events = message::decode(body)?;
        if let Some(older) = self.polls.remove(&session) {
            let nothing = EventsReply {
                cursor: older.cursor,
                ..EventsReply::default()
            };
            self.reply(
                older.conn,
                Op::Events,
                0,
                older.tag,
                &nothing,
                Vec::new(),
                out,
            );
        }
        let newest = self.engine.as_ref().map_or(0, |e| e.ring().cursor());
        let cursor = if asked.cursor == 0 {
            newest
        } else {
            asked.cursor
        };
        let until_ms = now.mono_ms + asked.wait_ms.min(WAIT_MS_MAX);
        self.polls.insert(
            session,
            Poll {
                conn,
                tag,
                cursor,
                until_ms,
            },
        );
        if asked.wait_ms == 0 {
            self.end_polls(now, out);
        }
        Ok(())
    }

    /// Answers polls that have something to be told.
    pub(super) fn tell_polls(&mut self, _now: Now, out: &mut Vec<Output>) {
        let Some(newest) = self.engine.as_ref().map(|e| e.ring().cursor()) else {
            return;
        };
        let told: Vec<u64> = self
            .polls
            .iter()
            .filter(|(_, p)| p.cursor != newest)
            .map(|(s, _)| *s)
            .collect();
        for session in told {
            self.answer_poll(session, out);
        }
    }

    /// Answers polls whose time is over.
    pub(super) fn end_polls(&mut self, now: Now, out: &mut Vec<Output>) {
        let over: Vec<u64> = self
            .polls
            .iter()
            .filter(|(_, p)| now.mono_ms >= p.until_ms)
            .map(|(s, _)| *s)
            .collect();
        for session in over {
            self.answer_poll(session, out);
        }
    }

    fn answer_poll(&mut self, session: u64, out: &mut Vec<Output>) {
        let Some(poll) = self.polls.remove(&session) else {
            return;
        };
        let reply = match &self.engine {
            Some(engine) => engine.ring().after(poll.cursor),
            None => EventsReply {
                cursor: poll.cursor,
                ..EventsReply::default()
            },
        };
        self.reply(poll.conn, Op::Events, 0, poll.tag, &reply, Vec::new(), out);
    }
}
