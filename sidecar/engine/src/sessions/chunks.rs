//! Requests about chunks: PROBE, PIN and RELEASE find and lease them; GRANT, COMMIT and ABORT grant their slots and take them back.

use super::core::{Asked, Core};
use super::seam::{Host, Now, Output};
use crate::mistake::Mistake;
use crate::table::Table;
use crate::{Answer, Engine, GrantContext, Question, Reach, Time, Wish};
use kvcachepool_protocol::domain::SectionPlan;
use kvcachepool_protocol::frame::{FLAG_PARTIAL, Op};
use kvcachepool_protocol::key::{EngineHash, KeyKind, NamespaceId, chunk_key, unpack_hashes};
use kvcachepool_protocol::message::{
    self, Abort, AbortReply, ErrorBody, ErrorCode, GRANT_INVALID, GRANT_NOT_READY, GRANT_TOO_LARGE,
    Grant, GrantChunk, GrantReply, Pin, Probe, ProbeReply, Release, Role, Sections,
};
use kvcachepool_protocol::refs;

const REQUEST_ID_MAX: usize = 1024;
/// Longest wait of a PROBE for opaque objects. Milliseconds.
const OBJECT_WAIT_MS_MAX: u64 = 600_000;

impl<H: Host> Core<H> {
    pub(super) fn probe(
        &mut self,
        now: Now,
        asked: Asked,
        session: u64,
        role: Role,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let kind = key_kind(role);
        let probe: Probe = message::decode(body)?;
        let hashes = unpack_hashes(&probe.hashes)
            .map_err(|e| ErrorBody::new(ErrorCode::BadHashes, e.to_string()))?;
        let namespace = namespace(&probe.namespace)?;
        if probe.request.len() > REQUEST_ID_MAX {
            return Err(ErrorBody::new(
                ErrorCode::BadBody,
                "the request id is longer than 1024 bytes",
            ));
        }
        let ready = self.ready_for(session);
        let (Some(ready), Some(engine)) = (ready, &mut self.engine) else {
            let reason = if self.engine.is_none() {
                self.no_arena.0
            } else {
                "NotRegistered"
            };
            self.counters.probes_unready += 1;
            let reply = ProbeReply {
                states: vec![message::CHUNK_ABSENT; hashes.len()],
                tiers: vec![0; hashes.len()],
                reason: reason.into(),
                ..ProbeReply::default()
            };
            self.reply(asked, 0, &reply, Vec::new(), out);
            return Ok(());
        };
        let plan = &ready.domain.plan;
        if probe.tail_tokens != 0 && !plan.valid_tokens(probe.tail_tokens) {
            return Err(ErrorBody::new(
                ErrorCode::BadHashes,
                "tail_tokens is not a multiple of the scheduler's block size",
            ));
        }
        // the index cannot hold more chunks than this, and the limit bounds the cost of a frame
        let keys_max = engine.geometry().chunks as usize;
        if hashes.len() > keys_max {
            let said = format!("a PROBE may name at most {keys_max} chunks");
            return Err(ErrorBody::new(ErrorCode::LimitReached, said));
        }
        // a process-local domain stays in memory
        let reaches = !self.config.tiers.is_empty() && ready.domain.not_shareable.is_none();
        let reach = reaches.then(|| Reach {
            kind,
            local_tokens: probe.local_tokens,
            max_load_tokens: probe.max_load_tokens,
            prefill_tokens_per_s: probe.prefill_tokens_per_s,
            domain: ready.domain.clone(),
            namespace,
            hashes: hashes.to_vec(),
        });
        let question = Question {
            scheduler: session,
            request: probe.request.as_str().into(),
            tag: asked.tag,
            kind,
            independent: probe.independent && kind == KeyKind::Opaque,
            layout: ready.domain.layout_id,
            sections: plan.sections(),
            keys: hashes
                .iter()
                .map(|hash| chunk_key(&ready.domain.model_id, &namespace, kind, hash))
                .collect(),
            chunk_tokens: plan.chunk_tokens(),
            tail_tokens: probe.tail_tokens,
            local_tokens: match kind {
                // objects are checked only to be read
                KeyKind::Opaque => probe.local_tokens.or(Some(u64::MAX)),
                _ => probe.local_tokens,
            },
            wait_ms: match (kind, probe.budget_ms) {
                (_, 0) => self.config.settings.load_timeout_ms,
                // nothing could compute an object, so its client alone says how long it waits
                (KeyKind::Opaque, ms) => ms.min(OBJECT_WAIT_MS_MAX),
                (_, ms) => ms.min(self.config.settings.load_timeout_ms),
            },
            reach,
        };
        if let Some(s) = self.peers.sessions.get_mut(&session) {
            s.prefill_tokens_per_s = probe.prefill_tokens_per_s;
            engine.learn(&ready.domain, &s.engine, &s.engine_version);
        }
        let Some(answer) = engine.probe(now, question) else {
            let said = format!(
                "limit of requests reached (limits.requests = {}); raise the limit",
                self.config.limits.requests_max
            );
            return Err(ErrorBody::later(ErrorCode::LimitReached, said));
        };
        self.answer_probe(asked, answer, out);
        Ok(())
    }

    fn answer_probe(&mut self, asked: Asked, answer: Answer, out: &mut Vec<Output>) {
        if !answer.pending {
            for state in &answer.states {
                if let Some(count) = self.counters.probe_chunks.get_mut(*state as usize) {
                    *count += 1;
                }
            }
        }
        let flags = if answer.pending { FLAG_PARTIAL } else { 0 };
        let reply = ProbeReply {
            states: answer.states,
            refs: answer.refs,
            region: self.region().unwrap_or(0),
            pending_ms: answer.pending_ms,
            tiers: answer.tiers,
            reason: String::new(),
            declined: answer.declined.into(),
        };
        self.reply(asked, flags, &reply, Vec::new(), out);
    }

    /// Sends the final answer of a waiting PROBE, after its checks ended or timed out.
    pub(super) fn finish_probe(&mut self, now: Time, probe: u64, out: &mut Vec<Output>) {
        let engine = self.engine.as_mut();
        let answer = engine.and_then(|e| e.final_answer(now, probe));
        self.answer_later(answer, out);
    }

    /// Sends an update of a waiting PROBE.
    pub(super) fn probe_news(&mut self, probe: u64, out: &mut Vec<Output>) {
        let answer = self.engine.as_ref().and_then(|e| e.partial_answer(probe));
        self.answer_later(answer, out);
    }

    /// Sends an answer, as (session, tag, answer), to the session's connection, if it has one.
    fn answer_later(&mut self, answer: Option<(u64, u64, Answer)>, out: &mut Vec<Output>) {
        let Some((session, tag, answer)) = answer else {
            return;
        };
        if let Some(conn) = self.peers.sessions.get(&session).and_then(|s| s.conn) {
            let asked = Asked {
                conn,
                op: Op::Probe,
                tag,
            };
            self.answer_probe(asked, answer, out);
        }
    }

    pub(super) fn pin_request(
        &mut self,
        now: Now,
        session: u64,
        body: &[u8],
    ) -> Result<(), ErrorBody> {
        let pin: Pin = message::decode(body)?;
        if let Some(engine) = &mut self.engine {
            let held = engine.pin(now, session, &pin.request, pin.probe, pin.from, pin.to);
            if held < pin.to.saturating_sub(pin.from) {
                self.counters.event("PinWithoutSoftPin");
            }
        }
        Ok(())
    }

    pub(super) fn release(&mut self, now: Now, session: u64, body: &[u8]) -> Result<(), ErrorBody> {
        let release: Release = message::decode(body)?;
        if let Some(engine) = &mut self.engine {
            for request in &release.requests {
                engine.release(now, session, request);
            }
        }
        Ok(())
    }

    pub(super) fn grant(
        &mut self,
        now: Now,
        asked: Asked,
        session: u64,
        role: Role,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let kind = key_kind(role);
        let grant: Grant = message::decode(body)?;
        let namespace = namespace(&grant.namespace)?;
        let ready = self.ready_for(session).filter(|_| !self.draining);
        let context = ready.as_ref().map(|ready| GrantContext {
            scheduler: session,
            tag: asked.tag,
            kind,
            model: ready.domain.model_id,
            layout: ready.domain.layout_id,
            namespace,
            plan: &ready.domain.plan,
            writers: &ready.writers,
            expires_unix_s: match grant.ttl_s {
                0 => 0,
                ttl_s => now.unix_s + u64::from(ttl_s),
            },
        });
        if let (Some(ready), Some(engine), Some(s)) =
            (&ready, &mut self.engine, self.peers.sessions.get(&session))
        {
            engine.learn(&ready.domain, &s.engine, &s.engine_version);
        }
        let mut reply = GrantReply {
            region: self.region().unwrap_or(0),
            ..GrantReply::default()
        };
        let mut packed = Vec::new();
        for chunk in &grant.chunks {
            let result = match (&context, &mut self.engine) {
                (Some(context), Some(engine)) if kind == KeyKind::Opaque => {
                    grant_object(now, engine, context, chunk, &mut packed)
                }
                (Some(context), Some(engine)) => match wish(context, chunk) {
                    Some(wish) => engine.memory.grant(now, context, &wish, &mut packed),
                    None => GRANT_INVALID,
                },
                _ => GRANT_NOT_READY,
            };
            self.counters.granted(result);
            reply.results.push(result);
        }
        reply.refs = refs::pack(&packed);
        self.reply(asked, 0, &reply, Vec::new(), out);
        Ok(())
    }

    pub(super) fn commit(&mut self, session: u64, body: &[u8]) -> Result<(), ErrorBody> {
        for section in self.sections(body)? {
            if let Some((lock, engine)) = self.writer(session) {
                engine.memory.commit(lock, section);
            }
        }
        Ok(())
    }

    pub(super) fn abort(
        &mut self,
        asked: Asked,
        session: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let sections = self.sections(body)?;
        let mut freed = 0;
        for section in &sections {
            if let Some((lock, engine)) = self.writer(session) {
                freed += u32::from(engine.memory.abort(lock, *section));
            }
        }
        let slots = sections.iter().map(|s| s.slot.get()).collect();
        self.answer_abort(asked, session, slots, freed, out)
    }

    /// Sections of a worker's message; none if they name another region than the live one.
    fn sections(&mut self, body: &[u8]) -> Result<Vec<refs::SectionRef>, ErrorBody> {
        let sections: Sections = message::decode(body)?;
        let unpacked = refs::unpack(&sections.refs)
            .map_err(|e| ErrorBody::new(ErrorCode::BadBody, e.to_string()))?;
        if Some(sections.region) != self.region() && !H::Table::makes(Mistake::Regions) {
            self.counters.ignored("OtherRegion");
            return Ok(Vec::new());
        }
        Ok(unpacked)
    }

    fn writer(&mut self, session: u64) -> Option<(u32, &mut crate::Engine<H::Table>)> {
        let lock = self.peers.process_of_session(session)?.lock?;
        Some((lock, self.engine.as_mut()?))
    }

    pub(super) fn abort_grant(
        &mut self,
        asked: Asked,
        session: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let abort: Abort = message::decode(body)?;
        let hashes = unpack_hashes(&abort.hashes)
            .map_err(|e| ErrorBody::new(ErrorCode::BadHashes, e.to_string()))?;
        let only = (!hashes.is_empty()).then_some(hashes);
        let freed = self
            .engine
            .as_mut()
            .map_or(0, |e| e.memory.abort_grant(session, abort.grant, only));
        self.reply(asked, 0, &AbortReply { freed }, Vec::new(), out);
        Ok(())
    }
}

/// Kind of the keys of a session.
fn key_kind(role: Role) -> KeyKind {
    match role {
        Role::Opaque => KeyKind::Opaque,
        _ => KeyKind::Prefix,
    }
}

/// Grants the pieces of an opaque object.
fn grant_object<T: Table>(
    now: Now,
    engine: &mut Engine<T>,
    context: &GrantContext<'_>,
    chunk: &GrantChunk,
    refs: &mut Vec<refs::SectionRef>,
) -> u8 {
    let Ok(last_hash) = EngineHash::try_from(chunk.hash.as_slice()) else {
        return GRANT_INVALID;
    };
    if chunk.bytes == 0 {
        return GRANT_INVALID;
    }
    let fits = |plan: &SectionPlan| {
        plan.longest_section_bytes() <= engine.geometry().segment_bytes
            && chunk.bytes <= engine.memory.granted_bytes_max() / 2
            && engine.memory.pinnable(plan.slot_bytes(1))
    };
    let Some(plan) = SectionPlan::opaque(chunk.bytes).filter(fits) else {
        return GRANT_TOO_LARGE;
    };
    let wish = Wish {
        key: chunk_key(&context.model, &context.namespace, context.kind, &last_hash),
        parent: None,
        last_hash,
        first_token: 0,
        tokens: 1,
        sections: u128::MAX >> (128 - plan.sections()),
        block_hashes: &[],
    };
    let context = GrantContext {
        plan: &plan,
        ..*context
    };
    engine.memory.grant(now, &context, &wish, refs)
}

/// Decodes a namespace id; empty = the default namespace.
pub(super) fn namespace(said: &[u8]) -> Result<NamespaceId, ErrorBody> {
    if said.is_empty() {
        return Ok(NamespaceId::default());
    }
    NamespaceId::try_from(said).map_err(|e| ErrorBody::new(ErrorCode::BadHashes, e.to_string()))
}

/// Converts a chunk of a GRANT; none if it is malformed.
fn wish<'a>(context: &GrantContext<'_>, chunk: &'a GrantChunk) -> Option<Wish<'a>> {
    let plan = context.plan;
    let key =
        |hash: &EngineHash| chunk_key(&context.model, &context.namespace, KeyKind::Prefix, hash);
    let groups_known = chunk.groups != 0 && chunk.groups & !plan.all_groups() == 0;
    let placed = chunk.first_token.is_multiple_of(plan.chunk_tokens())
        && chunk.first_token.checked_add(chunk.tokens).is_some()
        && chunk.parent.is_empty() == (chunk.first_token == 0);
    if !groups_known || !placed || !plan.valid_tokens(chunk.tokens) {
        return None;
    }
    let last_hash = EngineHash::try_from(chunk.hash.as_slice()).ok()?;
    let parent = match chunk.parent.as_slice() {
        [] => None,
        hash => Some(key(&EngineHash::try_from(hash).ok()?)),
    };
    Some(Wish {
        key: key(&last_hash),
        parent,
        last_hash,
        first_token: chunk.first_token,
        tokens: chunk.tokens,
        sections: plan.section_map(chunk.groups),
        block_hashes: unpack_hashes(&chunk.block_hashes).ok()?,
    })
}
