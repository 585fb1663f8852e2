//! What a remote client asks: lookups and leases, memory to write, reads and writes.

use super::super::objects::Pieces;
use super::super::upstream::{Reply, Upstream};
use super::frames::{Body, Failed};
use super::{BUFFER_BYTES, Client, Lease, Writing};
use kvcachepool_protocol::frame::{MAX_BODY, Op};
use kvcachepool_protocol::key::EngineHash;
use kvcachepool_protocol::message::{
    CHUNK_READY, ErrorBody, ErrorCode, GRANT_GRANTED, Grant, GrantReply, Pin, Probe, ProbeReply,
    Sections, decode,
};
use kvcachepool_protocol::refs::pack;
use kvcachepool_protocol::remote::{
    self, KEYS_MAX, MAP_BYTES_MAX, Parts, ReadReply, WRITE_COMPLETE, WRITE_LOST, WRITE_MORE,
    WriteReply,
};
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// What the sidecar may take for a PROBE beyond the client's budget.
const PROBE_PATIENCE: Duration = Duration::from_secs(10);
/// Requests of one connection that hold leases, and that hold granted memory.
const REQUESTS_MAX: usize = 1024;
/// Pieces of the objects that one connection leases.
const PIECES_MAX: usize = 16_384;
/// Longest data of a READ's reply: its map must fit into the frame, too.
const DATA_BYTES_MAX: usize = MAX_BODY - MAP_BYTES_MAX;

impl<'a> Client<'a> {
    /// Looks keys up, and leases what is ready if the client asks for more than existence.
    pub(super) async fn probe(&mut self, asked: Probe) -> Result<remote::ProbeReply, Failed> {
        let leases = asked.local_tokens.is_some();
        let keys = asked.hashes.len() / size_of::<EngineHash>();
        if keys > KEYS_MAX {
            let said = format!("a PROBE may name {KEYS_MAX} keys, got {keys}");
            return Err(ErrorBody::new(ErrorCode::LimitReached, said).into());
        }
        if leases {
            free_place(&self.leases, &asked.request)?;
        }
        let id = self.server.new_request();
        // Nothing of vLLM's part of the message is the client's to set.
        let probe = Probe {
            request: id.clone(),
            namespace: asked.namespace,
            hashes: asked.hashes,
            tail_tokens: 0,
            local_tokens: leases.then_some(0),
            budget_ms: asked.budget_ms,
            max_load_tokens: None,
            prefill_tokens_per_s: 0,
            independent: asked.independent,
        };
        let longest = self.upstream.hello.settings.load_timeout_ms;
        let longest = Duration::from_millis(asked.budget_ms.max(longest)) + PROBE_PATIENCE;
        let replied = timeout(longest, self.upstream.request(Op::Probe, &probe)).await;
        let Ok(replied) = replied else {
            self.release(vec![id]);
            let said = "the sidecar did not answer in time";
            return Err(ErrorBody::later(ErrorCode::NoArena, said).into());
        };
        let (tag, reply) = replied?;
        let (reply, objects) = match self.probed(reply, keys, leases) {
            Ok(probed) if probed.1.iter().any(Option::is_some) => probed,
            nothing => {
                self.release(vec![id]);
                return nothing.map(|(reply, _)| reply);
            }
        };
        let lease = Lease {
            request: id,
            objects,
        };
        let pieces = lease.pieces();
        if self.pieces + pieces > PIECES_MAX {
            self.release(vec![lease.request]);
            let said = format!("a connection may lease {PIECES_MAX} pieces; end some leases");
            let error = match pieces > PIECES_MAX {
                true => ErrorBody::new(ErrorCode::LimitReached, said),
                false => ErrorBody::later(ErrorCode::LimitReached, said),
            };
            return Err(error.into());
        }
        let pin = Pin {
            request: lease.request.clone(),
            probe: tag,
            from: 0,
            to: u32::try_from(keys).unwrap_or(u32::MAX),
        };
        self.upstream.send(Op::Pin, &pin);
        self.pieces += pieces;
        self.leases.insert(asked.request, lease);
        Ok(reply)
    }

    /// Reads the reply to a PROBE: what the client hears, and the objects by position of their keys.
    fn probed(
        &self,
        reply: Reply,
        keys: usize,
        leases: bool,
    ) -> Result<(remote::ProbeReply, Vec<Option<Pieces>>), Failed> {
        let mut reply: ProbeReply = decode(&reply?)?;
        if reply.states.is_empty() && !reply.reason.is_empty() {
            reply.states = vec![0; keys];
        }
        let ready = reply.states.iter().filter(|s| **s == CHUNK_READY).count();
        if reply.states.len() != keys
            || (leases && ready > 0 && reply.region != self.upstream.region)
        {
            return Err(self.distrust("a reply to PROBE for other keys or another memory"));
        }
        let mut objects = Vec::new();
        if leases {
            let found =
                Pieces::of_refs(&reply.refs, ready).map_err(|e| self.distrust(&e.to_string()))?;
            let mut found = found.into_iter();
            let located = reply.states.iter().map(|state| match *state {
                CHUNK_READY => found.next(),
                _ => None,
            });
            objects = located.collect();
        }
        let bytes = objects.iter().flatten().map(|pieces| pieces.bytes);
        let reply = remote::ProbeReply {
            bytes: bytes.collect(),
            states: reply.states,
            reason: reply.reason,
        };
        Ok((reply, objects))
    }

    pub(super) async fn grant(&mut self, mut grant: Grant) -> Result<remote::GrantReply, Failed> {
        let id = self.server.new_request();
        let asked = std::mem::replace(&mut grant.request, id);
        free_place(&self.grants, &asked)?;
        let (_, reply) = self.upstream.request(Op::Grant, &grant).await?;
        let reply: GrantReply = decode(&reply?).map_err(|e| self.distrust(&e.to_string()))?;
        let granted = |result: &u8| *result == GRANT_GRANTED;
        let count = reply.results.iter().copied().filter(|r| granted(r)).count();
        let fits = reply.results.len() == grant.chunks.len()
            && (count == 0 || reply.region == self.upstream.region);
        let found = Pieces::of_refs(&reply.refs, count);
        let (true, Ok(found)) = (fits, found) else {
            return Err(self.distrust("a reply to GRANT that does not fit the request"));
        };
        let mut found = found.into_iter();
        let mut writing = Vec::new();
        for (chunk, result) in grant.chunks.iter().zip(&reply.results) {
            let pieces = if granted(result) { found.next() } else { None };
            if pieces.as_ref().is_some_and(|p| p.bytes != chunk.bytes) {
                return Err(self.distrust("a GRANT of another length"));
            }
            writing.push(pieces.map(|pieces| Writing { pieces, written: 0 }));
        }
        if count > 0 {
            self.progress = Instant::now();
            self.grants.insert(asked, writing);
        }
        Ok(remote::GrantReply {
            results: reply.results,
        })
    }

    pub(super) async fn read(&self, read: &Parts) -> Result<Body<'a>, Failed> {
        let Some(bytes) = read.data_bytes().filter(|bytes| *bytes <= DATA_BYTES_MAX) else {
            return Err(too_many(DATA_BYTES_MAX).into());
        };
        let buffers = self.server.buffers(bytes.div_ceil(BUFFER_BYTES)).await;
        let buffers = buffers.map_err(|_| Failed::Lost)?;
        let lease = self.leases.get(&read.request);
        let mut data = vec![0; bytes];
        let mut filled = 0;
        let mut found = Vec::with_capacity(read.parts.len());
        for part in read.iter() {
            let object = lease.and_then(|lease| lease.objects.get(part.index as usize)?.as_ref());
            let end = filled + part.length as usize;
            let copied = match (object, data.get_mut(filled..end)) {
                (Some(pieces), Some(into)) => {
                    if !pieces.contains(part.offset, u64::from(part.length)) {
                        return Err(beyond(pieces).into());
                    }
                    self.upstream.memory.read(pieces, part.offset, into)
                }
                _ => false,
            };
            found.push(u8::from(copied));
            filled = if copied { end } else { filled };
        }
        data.truncate(filled);
        let metrics = &self.server.metrics;
        metrics.add("remote_bytes_total", &["read"], filled as u64);
        Ok(Body {
            front: remote::front(&ReadReply { found })?,
            data: Some((data, buffers)),
        })
    }

    pub(super) fn write(&mut self, write: &Parts, data: &[u8]) -> Result<WriteReply, Failed> {
        if write.data_bytes() != Some(data.len()) {
            let said = "the parts of a WRITE do not have as many bytes as its data";
            return Err(ErrorBody::new(ErrorCode::BadBody, said).into());
        }
        let Some(objects) = self.grants.get_mut(&write.request) else {
            let written = vec![WRITE_LOST; write.parts.len()];
            return Ok(WriteReply { written });
        };
        // All parts are checked before the first is copied.
        let mut next: HashMap<u32, u64> = HashMap::new();
        for part in write.iter() {
            let Some(object) = objects.get(part.index as usize) else {
                let said = format!("the GRANT has no object {}", part.index);
                return Err(ErrorBody::new(ErrorCode::BadBody, said).into());
            };
            let Some(writing) = object else {
                continue;
            };
            let at = next.entry(part.index).or_insert(writing.written);
            if part.offset != *at {
                let said = format!(
                    "expected byte {at} of object {}, got {}",
                    part.index, part.offset
                );
                return Err(ErrorBody::new(ErrorCode::BadBody, said).into());
            }
            if !writing.pieces.contains(*at, u64::from(part.length)) {
                return Err(beyond(&writing.pieces).into());
            }
            *at += u64::from(part.length);
        }
        let mut rest = data;
        let mut written = Vec::with_capacity(write.parts.len());
        for part in write.iter() {
            let (bytes, left) = rest.split_at(rest.len().min(part.length as usize));
            rest = left;
            let object = objects.get_mut(part.index as usize);
            let Some((object, writing)) = object.and_then(|o| o.take().map(|w| (o, w))) else {
                written.push(WRITE_LOST);
                continue;
            };
            let Writing {
                pieces,
                written: at,
            } = writing;
            let copied = self.upstream.memory.write(&pieces, at, bytes);
            let at = at + u64::from(part.length);
            if copied {
                self.progress = Instant::now();
            }
            if copied && at < pieces.bytes {
                written.push(WRITE_MORE);
                *object = Some(Writing {
                    pieces,
                    written: at,
                });
                continue;
            }
            let op = if copied { Op::Commit } else { Op::Abort };
            let sent = self.upstream.send(op, &sections(&self.upstream, &pieces));
            written.push(match copied && sent {
                true => WRITE_COMPLETE,
                false => WRITE_LOST,
            });
        }
        if objects.iter().all(Option::is_none) {
            self.grants.remove(&write.request);
        }
        let metrics = &self.server.metrics;
        metrics.add("remote_bytes_total", &["written"], data.len() as u64);
        Ok(WriteReply { written })
    }
}

fn free_place<V>(held: &HashMap<String, V>, request: &str) -> Result<(), ErrorBody> {
    if held.contains_key(request) {
        let said = format!("the request {request} still holds memory; use another id");
        return Err(ErrorBody::new(ErrorCode::BadBody, said));
    }
    if held.len() >= REQUESTS_MAX {
        let said = format!("a connection may have {REQUESTS_MAX} open requests; end some of them");
        return Err(ErrorBody::later(ErrorCode::LimitReached, said));
    }
    Ok(())
}

fn too_many(most: usize) -> ErrorBody {
    let said = format!("the parts of one frame may have 1 to {most} bytes together");
    ErrorBody::new(ErrorCode::BadBody, said)
}

fn beyond(pieces: &Pieces) -> ErrorBody {
    let said = format!("a part ends after the object's {} bytes", pieces.bytes);
    ErrorBody::new(ErrorCode::BadBody, said)
}

pub(super) fn sections(upstream: &Upstream, pieces: &Pieces) -> Sections {
    Sections {
        region: upstream.region,
        refs: pack(&pieces.refs),
    }
}
