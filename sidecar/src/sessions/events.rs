//! EVENTS: the long poll of a scheduler for what was stored and removed.

use super::core::{Asked, Core, Refusal};
use super::seam::{Host, Now, Output};
use kvcachepool_protocol::message::{self, Events, EventsReply};

/// Longest wait of one poll.
const WAIT_MS_MAX: u64 = 60_000;

/// A poll that waits. A session has one at most.
#[derive(Debug, Clone, Copy)]
pub(super) struct Poll {
    asked: Asked,
    cursor: u64,
    until_ms: u64,
}

impl<H: Host> Core<H> {
    pub(super) fn events(
        &mut self,
        now: Now,
        from: Asked,
        session: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), Refusal> {
        let asked: Events = message::decode(body)?;
        if let Some(older) = self.polls.remove(&session) {
            let nothing = EventsReply {
                cursor: older.cursor,
                ..EventsReply::default()
            };
            self.reply(older.asked, 0, &nothing, Vec::new(), out);
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
                asked: from,
                cursor,
                until_ms,
            },
        );
        Ok(())
    }

    /// Answers polls that have something to be told, or whose time is over.
    pub(super) fn tell_polls(&mut self, now: Now, out: &mut Vec<Output>) {
        let newest = self.engine.as_ref().map(|e| e.ring().cursor());
        let due = |p: &Poll| newest.is_some_and(|n| n != p.cursor) || now.mono_ms >= p.until_ms;
        let due: Vec<u64> = self
            .polls
            .iter()
            .filter(|(_, p)| due(p))
            .map(|(session, _)| *session)
            .collect();
        for session in due {
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
        self.reply(poll.asked, 0, &reply, Vec::new(), out);
    }
}
