//! GRANT, COMMIT and ABORT: granting slots and taking them back.

use super::core::{Asked, Core, Refusal};
use super::read::namespace;
use super::seam::{Host, Now, Output};
use crate::mistake::Mistake;
use crate::table::Table;
use crate::{GrantContext, Wish};
use kvcachepool_protocol::key::{EngineHash, KeyKind, chunk_key, unpack_hashes};
use kvcachepool_protocol::message::{
    self, Abort, AbortReply, ErrorCode, GRANT_INVALID, GRANT_NOT_READY, Grant, GrantChunk,
    GrantReply, Sections,
};
use kvcachepool_protocol::refs;

impl<H: Host> Core<H> {
    pub(super) fn grant(
        &mut self,
        now: Now,
        asked: Asked,
        session: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), Refusal> {
        let grant: Grant = message::decode(body)?;
        let namespace = namespace(&grant.namespace)?;
        let ready = self.ready_for(session).filter(|_| !self.draining);
        let context = ready.as_ref().map(|ready| GrantContext {
            scheduler: session,
            tag: asked.tag,
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

    pub(super) fn commit(&mut self, session: u64, body: &[u8]) -> Result<(), Refusal> {
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
    ) -> Result<(), Refusal> {
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
    fn sections(&mut self, body: &[u8]) -> Result<Vec<refs::SectionRef>, Refusal> {
        let sections: Sections = message::decode(body)?;
        let unpacked = refs::unpack(&sections.refs)
            .map_err(|e| Refusal::new(ErrorCode::BadBody, e.to_string()))?;
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
    ) -> Result<(), Refusal> {
        let abort: Abort = message::decode(body)?;
        let hashes = unpack_hashes(&abort.hashes)
            .map_err(|e| Refusal::new(ErrorCode::BadHashes, e.to_string()))?;
        let only = (!hashes.is_empty()).then_some(hashes);
        let freed = self
            .engine
            .as_mut()
            .map_or(0, |e| e.memory.abort_grant(session, abort.grant, only));
        self.reply(asked, 0, &AbortReply { freed }, Vec::new(), out);
        Ok(())
    }
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
    let [low, high] = plan.section_map(chunk.groups);
    Some(Wish {
        key: key(&last_hash),
        parent,
        last_hash,
        first_token: chunk.first_token,
        tokens: chunk.tokens,
        sections: u128::from(low) | u128::from(high) << 64,
        block_hashes: unpack_hashes(&chunk.block_hashes).ok()?,
    })
}
