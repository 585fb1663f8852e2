//! Tiers below memory: what is asked of them when, what is fetched, who waits, and how each of these ends.

mod clears;
mod ends;
mod flush;
mod paced;
mod reads;
mod several;
mod worth;
mod writes;

use super::peer::*;
use crate::config::{Config, TierConfig, WritePolicy};
use crate::sessions::*;
use crate::table::{FREE, GRANTED, PUBLISHED, Table};
use crate::tier::{Cause, Kind};
use crate::{
    ClearJob, Completion, Effect, FetchJob, Landed, LookupJob, Target, TierStats, WriteJob,
};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::key::{ChunkKey, KeyKind, LayoutId, ModelId, NamespaceId, chunk_key};
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::object::{Cipher, Codec, Fidelity, Form, Object, Section};

/// Tiers that are only read from.
pub(super) fn config(tiers: &[Kind]) -> Config {
    let tier = |kind: &Kind| TierConfig {
        write: WritePolicy::None,
        ..TierConfig::new(*kind)
    };
    let mut config = Config {
        tiers: tiers.iter().map(tier).collect(),
        ..World::config()
    };
    config.settings.min_load_tokens = 0;
    config
}

/// A served instance whose tiers are up: (scheduler, worker).
fn tiered(tiers: &[Kind]) -> (World, ConnId, ConnId) {
    limited(config(tiers))
}

fn limited(config: Config) -> (World, ConnId, ConnId) {
    let tiers: Vec<Kind> = config.tiers.iter().map(|t| t.kind).collect();
    let mut w = World::configured(config);
    let (scheduler, worker) = w.instance();
    for tier in tiers {
        state(&mut w, tier, None);
    }
    (w, scheduler, worker)
}

pub(super) fn state(w: &mut World, tier: Kind, down: Option<&str>) {
    let down = down.map(str::to_owned);
    w.input(Input::Completed(Completion::Tier { tier, down }));
}

pub(super) fn orders(w: &mut World) -> Vec<Effect> {
    let mut found = Vec::new();
    w.out.retain(|o| match o {
        Output::Effect(order) if !matches!(order, Effect::Digest(_)) => {
            found.push(order.clone());
            false
        }
        _ => true,
    });
    found
}

fn identity(w: &World) -> (ModelId, LayoutId) {
    let domain = &w.core.status(w.now).domains[0];
    (
        ModelId::from_hex(&domain.model_id).unwrap(),
        LayoutId::from_hex(&domain.layout_id).unwrap(),
    )
}

fn key(w: &World, n: u8) -> ChunkKey {
    let namespace = NamespaceId::default();
    chunk_key(&identity(w).0, &namespace, KeyKind::Prefix, &hash(n))
}

/// Numbers of the chunks of an order's names.
fn named(w: &World, keys: impl IntoIterator<Item = ChunkKey>) -> Vec<u8> {
    let number = |k: ChunkKey| (1..=9).find(|n| key(w, *n) == k);
    keys.into_iter().map(|k| number(k).unwrap()).collect()
}

/// The head of chunk `n` as a tier has it; the digest of a section is a byte repeated.
fn object(w: &World, n: u8, digest: u8) -> Object {
    let (model, layout) = identity(w);
    let bytes = 4 * BLOCK_BYTES;
    Object {
        kind: KeyKind::Prefix,
        codec: Codec::None,
        fidelity: Fidelity::Exact,
        form: Form::default(),
        cipher: Cipher::None,
        model,
        layout,
        namespace: NamespaceId::default(),
        last_hash: hash(n),
        parent: if n == 1 {
            ChunkKey::default()
        } else {
            key(w, n - 1)
        },
        part: 0,
        parts: 1,
        tokens: 64,
        first_token: u32::from(n - 1) * 64,
        created_unix_ms: 0,
        expires_unix_s: 0,
        writer: [0; 16],
        engine: "vllm".into(),
        engine_version: "0.32.0".into(),
        nonce: [0; 24],
        sections: vec![Section {
            group: 0,
            shard: 0,
            stored_bytes: bytes,
            raw_bytes: bytes,
            stored_digest: [digest; 16],
            raw_digest: [digest; 16],
        }],
        block_hashes: Vec::new(),
        token_ids: Vec::new(),
    }
}

/// Takes the only order, which must be a lookup; answers it with the chunks that are there. Returns tier and chunks asked for.
fn look_up(w: &mut World, there: &[u8]) -> (Kind, Vec<u8>) {
    let [
        Effect::Lookup(LookupJob {
            lookup,
            tier,
            names,
            ..
        }),
    ] = <[Effect; 1]>::try_from(orders(w)).expect("one order")
    else {
        panic!("no lookup")
    };
    let asked = named(w, names.iter().map(|n| n.key));
    let present = Ok(asked.iter().map(|n| there.contains(n)).collect());
    w.input(Input::Completed(Completion::Lookup { lookup, present }));
    (tier, asked)
}

/// A fetch that was ordered.
#[derive(Debug, Clone)]
struct Fetch {
    id: crate::FetchId,
    tier: Kind,
    chunk: u8,
    targets: Vec<Target>,
}

/// Takes all orders, which must be fetches.
fn fetches(w: &mut World) -> Vec<Fetch> {
    let mut found = Vec::new();
    for order in orders(w) {
        match order {
            Effect::Fetch(FetchJob {
                fetch,
                tier,
                name,
                sections,
                ..
            }) => found.push(Fetch {
                id: fetch,
                tier,
                chunk: named(w, [name.key])[0],
                targets: sections,
            }),
            other => panic!("{other:?}"),
        }
    }
    found
}

fn chunks(list: &[Fetch]) -> Vec<u8> {
    list.iter().map(|f| f.chunk).collect()
}

fn land(w: &mut World, fetch: &Fetch) {
    let object = object(w, fetch.chunk, fetch.chunk);
    land_as(w, fetch, Ok(object));
}

/// The fetch ends; the bytes in every slot have the chunk's digest.
fn land_as(w: &mut World, fetch: &Fetch, object: Result<Object, Cause>) {
    let landed = object.map(|object| Landed {
        object: Box::new(object),
        digests: vec![Some([fetch.chunk; 16]); fetch.targets.len()],
    });
    w.input(Input::Completed(Completion::Fetch {
        fetch: fetch.id,
        landed,
    }));
}

fn ask(w: &mut World, scheduler: ConnId, request: &str, list: &[u8]) -> (u64, ProbeReply, bool) {
    let tag = w.say(scheduler, Op::Probe, &probe(request, list), NO_FDS);
    let (reply, partial) = w.answer(tag);
    (tag, reply, partial)
}

/// The last answer to a tag so far.
fn last(w: &mut World, asked: u64) -> Option<(ProbeReply, bool)> {
    let mut found = None;
    while w
        .out
        .iter()
        .any(|o| matches!(o, Output::Send { frame, .. } if frame.tag == asked))
    {
        found = Some(w.answer(asked));
    }
    found
}

fn row(w: &World, target: &Target) -> u32 {
    let slot = target.section.slot.get();
    w.core.engine().unwrap().table().row(slot).state
}

fn stats(w: &World, kind: Kind) -> TierStats {
    let mut tiers = w.core.engine().unwrap().tiers();
    tiers.find(|t| t.kind == kind).unwrap().stats.clone()
}

fn audit(w: &World) {
    w.core.engine().unwrap().check().unwrap();
}

/// Memory forgets everything; tiers do not.
fn forget(w: &mut World) {
    w.core.engine_mut().unwrap().memory.clear();
}

fn release(w: &mut World, scheduler: ConnId, request: &str) {
    let requests = vec![request.to_owned()];
    w.say(scheduler, Op::Release, &Release { requests }, NO_FDS);
}

const R: u8 = CHUNK_READY;
const P: u8 = CHUNK_PENDING;
const A: u8 = CHUNK_ABSENT;
