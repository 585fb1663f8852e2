//! Writes, reads and deletes an object: these need all rights that a sidecar needs.

use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::key::{ChunkKey, EngineHash, KeyKind, LayoutId, ModelId, NamespaceId};
use kvcachepool_protocol::object::{Cipher, Codec, Fidelity, Form, Object, Section, digest};
use kvcachepool_tiers::{Cause, Get, Place, Put, Removal, Span, Tier, TierError};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Size of the only section.
const BYTES: u64 = 4096;
/// Value of its bytes; the memory for the read is filled with another value.
const WRITTEN: u8 = 0x5A;
const UNTOUCHED: u8 = 0xA5;
/// Expiry of an object that could not be deleted.
const LIFE_S: u64 = 600;

/// Tries the operations that a sidecar uses. `writes`: also put and delete, not only reads.
pub async fn probe(tier: &dyn Tier, writes: bool) -> Result<(), TierError> {
    tier.usage().await?;
    let (object, memory) = (object(), memory(tier)?);
    let name = object.name();
    tier.lookup(std::slice::from_ref(&name)).await?;
    if !writes {
        return Ok(());
    }
    let put = Put {
        object: object.clone(),
        spans: vec![memory.from],
    };
    tier.put(put.clone()).await?;
    // Writing over an existing object needs other rights, as a concurrent write does.
    let again = tier.put(put).await;
    let place = Place {
        group: 0,
        shard: 0,
        span: memory.into.clone(),
    };
    let get = Get {
        name: name.clone(),
        places: vec![place],
    };
    let got = tier.get(get).await;
    // Also after a failed read: a check must leave nothing behind.
    let removed = tier
        .remove(Removal::Named(std::slice::from_ref(&name)))
        .await;
    again?;
    got?;
    removed?;
    let section = object.sections.first().map(|s| s.stored_digest);
    if memory.into.digest() != section {
        let detail = "the bytes that were read differ from those written";
        return Err(TierError::new(tier.info().kind, Cause::Protocol, detail));
    }
    Ok(())
}

/// The memory that the object is written from and read into.
struct Memory {
    from: Span,
    into: Span,
}

fn memory(tier: &dyn Tier) -> Result<Memory, TierError> {
    let failed = |e: String| {
        TierError::new(
            tier.info().kind,
            Cause::Io,
            format!("cannot allocate memory: {e}"),
        )
    };
    let mapping = Mapping::private("check", 2 * BYTES).map_err(|e| failed(e.to_string()))?;
    let mapping = Arc::new(mapping);
    let span = |offset, filled: u8| {
        let span = Span::new(mapping.clone(), offset, BYTES, Arc::new(()))?;
        span.write(0, &[filled; BYTES as usize]).then_some(span)
    };
    match (span(0, WRITTEN), span(BYTES, UNTOUCHED)) {
        (Some(from), Some(into)) => Ok(Memory { from, into }),
        _ => Err(failed("the mapping is too short".to_owned())),
    }
}

/// An object of a domain that no engine uses, with a name that no other check uses.
fn object() -> Object {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let own = format!("{}-{}", since.as_nanos(), fastrand::u64(..));
    let id = |what: &str| *blake3::hash(what.as_bytes()).as_bytes();
    let mut writer = [0; 16];
    writer.copy_from_slice(&digest(own.as_bytes()));
    Object {
        kind: KeyKind::Prefix,
        codec: Codec::None,
        fidelity: Fidelity::Exact,
        form: Form::default(),
        cipher: Cipher::None,
        model: ModelId(id("kvcachepool check")),
        layout: LayoutId(id("kvcachepool check")),
        namespace: NamespaceId::default(),
        last_hash: EngineHash(id(&own)),
        parent: ChunkKey::default(),
        part: 0,
        parts: 1,
        tokens: 1,
        first_token: 0,
        created_unix_ms: since.as_millis().try_into().unwrap_or(u64::MAX),
        expires_unix_s: since.as_secs() + LIFE_S,
        writer,
        engine: "check".to_owned(),
        engine_version: env!("CARGO_PKG_VERSION").to_owned(),
        nonce: [0; 24],
        sections: vec![Section::exact(0, 0, &[WRITTEN; BYTES as usize])],
        block_hashes: Vec::new(),
        token_ids: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::chaos::{Chaos, Faults};
    use crate::testing::shelf::Shelf;
    use kvcachepool_tiers::Kind;

    #[tokio::test]
    async fn a_tier_that_works_holds_afterwards_what_it_held_before() {
        let shelf = Shelf::new(Kind::Redis, 0);
        probe(&shelf, true).await.unwrap();
        assert_eq!(shelf.usage().await.unwrap().objects, 0);
    }

    #[tokio::test]
    async fn a_tier_without_room_is_named_where_it_is_written_to() {
        let shelf = Shelf::new(Kind::S3, 100);
        assert_eq!(probe(&shelf, true).await.unwrap_err().cause, Cause::Full);
        probe(&shelf, false).await.unwrap();
    }

    #[tokio::test]
    async fn bytes_that_come_back_changed_are_named_and_do_not_stay() {
        let shelf = Shelf::new(Kind::S3, 0);
        let wrong = Faults {
            wrong: 1_000,
            ..Faults::none(7)
        };
        let tier = Chaos::new(Arc::new(shelf.clone()), wrong);
        let e = probe(&tier, true).await.unwrap_err();
        assert_eq!(e.cause, Cause::Protocol, "{e}");
        assert_eq!(shelf.usage().await.unwrap().objects, 0);
    }
}
