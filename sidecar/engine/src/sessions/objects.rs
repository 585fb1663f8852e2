//! OBJECTS: operations on opaque objects beside looking up, reading and writing them.

use super::chunks::namespace;
use super::core::{Asked, Core};
use super::seam::{Host, Now, Output};
use crate::{Reach, TooManyRemovals};
use kvcachepool_protocol::key::{ChunkKey, KeyKind, chunk_key, unpack_hashes};
use kvcachepool_protocol::message::{self, ErrorBody, ErrorCode, Objects, ObjectsOp, ObjectsReply};

/// Keys of one OBJECTS.
const KEYS_MAX: usize = 4_096;

impl<H: Host> Core<H> {
    pub(super) fn objects(
        &mut self,
        now: Now,
        asked: Asked,
        session: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let objects: Objects = message::decode(body)?;
        let hashes = unpack_hashes(&objects.hashes)
            .map_err(|e| ErrorBody::new(ErrorCode::BadHashes, e.to_string()))?;
        let namespace = namespace(&objects.namespace)?;
        if hashes.len() > KEYS_MAX {
            let said = format!("OBJECTS may name at most {KEYS_MAX} keys");
            return Err(ErrorBody::new(ErrorCode::LimitReached, said));
        }
        let ready = self.ready_for(session);
        let (Some(ready), Some(engine)) = (ready, &mut self.engine) else {
            return Err(ErrorBody::later(ErrorCode::NoArena, self.no_arena.0));
        };
        let keys: Vec<ChunkKey> = hashes
            .iter()
            .map(|hash| chunk_key(&ready.domain.model_id, &namespace, KeyKind::Opaque, hash))
            .collect();
        let mut reply = ObjectsReply::default();
        let done: Vec<bool> = match objects.op {
            ObjectsOp::Remove => {
                let reach = Reach {
                    kind: KeyKind::Opaque,
                    local_tokens: None,
                    max_load_tokens: None,
                    prefill_tokens_per_s: 0,
                    domain: ready.domain,
                    namespace,
                    hashes: Vec::new(),
                };
                let removed = engine.remove_objects(now, &reach, &keys);
                removed.map_err(|TooManyRemovals| {
                    let said = "too many removals wait for a lower tier; retry later";
                    ErrorBody::later(ErrorCode::LimitReached, said)
                })?
            }
            ObjectsOp::Touch => keys.iter().map(|key| engine.touch_key(key)).collect(),
            ObjectsOp::Pin => {
                let ttl_ms = objects.ttl_s.saturating_mul(1000);
                let pin = |key| engine.memory.pin_key(now, key, ttl_ms).is_ok();
                keys.iter().map(pin).collect()
            }
            ObjectsOp::Unpin => keys
                .iter()
                .map(|key| engine.memory.unpin_key(key))
                .collect(),
            ObjectsOp::Stat => {
                let found = keys.iter().map(|key| engine.memory.readable_object(key));
                let found: Vec<_> = found.collect();
                reply.bytes = found
                    .iter()
                    .map(|f| f.map_or(0, |(bytes, _)| bytes))
                    .collect();
                let pinned =
                    |f: &Option<(u64, bool)>| u8::from(f.is_some_and(|(_, pinned)| pinned));
                reply.pinned = found.iter().map(pinned).collect();
                found.iter().map(Option::is_some).collect()
            }
        };
        reply.states = done.into_iter().map(u8::from).collect();
        reply.count = reply.states.iter().map(|state| u32::from(*state)).sum();
        self.reply(asked, 0, &reply, Vec::new(), out);
        Ok(())
    }
}
