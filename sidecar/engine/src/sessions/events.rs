//! EVENTS: a scheduler's long poll for stored and removed chunks, and the pages of a snapshot.

use super::core::{Asked, Core};
use super::seam::{Host, Now, Output};
use crate::EventDomain;
use kvcachepool_protocol::message::{self, ErrorBody, Events, EventsReply};

/// Longest wait of a poll. Milliseconds.
const WAIT_MS_MAX: u64 = 60_000;

/// A waiting poll. A session has at most one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Poll {
    asked: Asked,
    cursor: u64,
    until_ms: u64,
    /// The cursor belongs to an earlier boot.
    stale: bool,
    snapshot: Option<u32>,
}

impl<H: Host> Core<H> {
    pub(super) fn events(
        &mut self,
        now: Now,
        from: Asked,
        session: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let asked: Events = message::decode(body)?;
        if let Some(older) = self.polls.remove(&session) {
            let nothing = self.nothing_new(&older);
            self.reply(older.asked, 0, &nothing, Vec::new(), out);
        }
        let stale = asked.boot != 0 && asked.boot != self.boot;
        let from_now_on = asked.cursor == 0 && asked.boot == 0;
        let newest = self.engine.as_ref().map_or(0, |e| e.ring().cursor());
        let cursor = if from_now_on { newest } else { asked.cursor };
        let until_ms = now.mono_ms + asked.wait_ms.min(WAIT_MS_MAX);
        self.polls.insert(
            session,
            Poll {
                asked: from,
                cursor,
                until_ms,
                stale,
                snapshot: asked.snapshot,
            },
        );
        Ok(())
    }

    /// Answers polls that have events or have timed out.
    pub(super) fn tell_polls(&mut self, now: Now, out: &mut Vec<Output>) {
        if let Some(engine) = self.engine.as_mut().filter(|_| !self.polls.is_empty()) {
            engine.want_events();
        }
        let newest = self.engine.as_ref().map(|e| e.ring().cursor());
        let due = |p: &Poll| {
            let news = p.stale || p.snapshot.is_some() || newest.is_some_and(|n| n != p.cursor);
            news || now.mono_ms >= p.until_ms
        };
        let due: Vec<u64> = self
            .polls
            .iter()
            .filter(|(_, p)| due(p))
            .map(|(session, _)| *session)
            .collect();
        for session in due {
            self.answer_poll(now, session, out);
        }
    }

    /// Answers a poll. If it finds no event of its session's domain, it advances its cursor and keeps waiting.
    fn answer_poll(&mut self, now: Now, session: u64, out: &mut Vec<Output>) {
        let Some(mut poll) = self.polls.remove(&session) else {
            return;
        };
        let over = now.mono_ms >= poll.until_ms;
        let found = self
            .ready_for(session)
            .map(|ready| (ready.domain.model_id, ready.domain.layout_id))
            .and_then(|domain| self.news(&poll, domain));
        let empty =
            |reply: &EventsReply| !reply.lost && reply.events.is_empty() && poll.snapshot.is_none();
        let reply = match found {
            Some(reply) if over || !empty(&reply) => reply,
            None if over => self.nothing_new(&poll),
            waits => {
                poll.cursor = waits.map_or(poll.cursor, |reply| reply.cursor);
                self.polls.insert(session, poll);
                return;
            }
        };
        self.reply(poll.asked, 0, &reply, Vec::new(), out);
    }

    /// The events for a poll in this domain. None: there is no memory tier.
    fn news(&self, poll: &Poll, domain: EventDomain) -> Option<EventsReply> {
        let engine = self.engine.as_ref()?;
        let newest = engine.ring().cursor();
        let mut reply = match poll.snapshot {
            Some(from) => {
                let (events, next) = engine.resident(from, domain);
                EventsReply {
                    cursor: newest,
                    events,
                    next,
                    ..EventsReply::default()
                }
            }
            None if poll.stale => EventsReply {
                cursor: newest,
                lost: true,
                ..EventsReply::default()
            },
            None => engine.ring().after(poll.cursor, domain),
        };
        reply.boot = self.boot;
        Some(reply)
    }

    /// A reply without events. The poll may be repeated unchanged.
    fn nothing_new(&self, poll: &Poll) -> EventsReply {
        EventsReply {
            cursor: poll.cursor,
            lost: poll.stale,
            boot: self.boot,
            next: poll.snapshot,
            ..EventsReply::default()
        }
    }
}
