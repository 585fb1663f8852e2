//! Vectors for the other language, `vectors/*.json`, and seeds for the fuzzers are written by these tests and must not drift. The connector's tests read the same
//! files. `UPDATE_VECTORS=1 cargo test -p kvcachepool-protocol vectors` writes them anew after a wanted change.

use crate::samples::{messages, object::object};
use kvcachepool_protocol::config::Config;
use kvcachepool_protocol::frame::*;
use kvcachepool_protocol::key::*;
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::object::{Axis, Dim, Element, Form};
use kvcachepool_protocol::{PROTOCOL_VERSION, lockfile, refs, table, window};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::path::Path;
use zerocopy::{FromZeros, IntoBytes};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn must_not_drift(name: &str, vectors: &Value) {
    let text = serde_json::to_string_pretty(vectors).unwrap() + "\n";
    must_be(&format!("vectors/{name}"), text.as_bytes());
}

fn must_be(name: &str, wanted: &[u8]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    if std::env::var_os("UPDATE_VECTORS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, wanted).unwrap();
    }
    let found = std::fs::read(&path).unwrap_or_default();
    assert!(
        found == wanted,
        "{name} is not what the code writes: a change of the wire? See this file's first lines."
    );
}

/// Any msgpack value as JSON, byte strings as `{"hex": ...}`.
struct Shown(Value);

impl<'de> Deserialize<'de> for Shown {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(ShownVisitor).map(Shown)
    }
}

struct ShownVisitor;

impl<'de> Visitor<'de> for ShownVisitor {
    type Value = Value;
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a message")
    }
    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(v.into())
    }
    fn visit_bytes<E>(self, v: &[u8]) -> Result<Value, E> {
        Ok(json!({ "hex": hex(v) }))
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Shown(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(items.into())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some((key, Shown(value))) = map.next_entry::<String, Shown>()? {
            object.insert(key, value);
        }
        Ok(object.into())
    }
}

/// The other way: JSON with `{"hex": ...}` as msgpack.
struct Packed<'a>(&'a Value);

impl Serialize for Packed<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Object(map) => match map.get("hex").and_then(Value::as_str) {
                Some(hex) => {
                    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
                    let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
                    s.serialize_bytes(&bytes)
                }
                None => s.collect_map(map.iter().map(|(k, v)| (k, Packed(v)))),
            },
            Value::Array(items) => s.collect_seq(items.iter().map(Packed)),
            scalar => scalar.serialize(s),
        }
    }
}

/// The fields of a message without which it is refused; all others take their default.
fn required(sample: &messages::Sample) -> Vec<String> {
    let Shown(fields) = rmp_serde::from_slice(&sample.body).unwrap();
    let fields = fields.as_object().unwrap();
    let mut required = Vec::new();
    for name in fields.keys() {
        let mut without = fields.clone();
        without.remove(name);
        let body = rmp_serde::to_vec_named(&Packed(&without.into())).unwrap();
        if (sample.again)(&body).is_err() {
            required.push(name.clone());
        }
    }
    required.sort();
    required
}

#[test]
fn frames() {
    let frames: Vec<_> = messages::all()
        .iter()
        .map(|s| {
            assert_eq!((s.again)(&s.body).unwrap(), s.body, "{}", s.name);
            let Shown(fields) = rmp_serde::from_slice(&s.body).unwrap();
            json!({
                "message": s.name, "op": s.op as u8, "flags": s.flags, "tag": s.tag,
                "fields": fields, "frame": hex(&frame(s.op, s.flags, s.tag, &s.body)),
            })
        })
        .collect();
    let ops: Map<String, Value> = (1..=15u8)
        .map(|op| (format!("{:?}", Op::try_from(op).unwrap()), op.into()))
        .collect();
    let required: BTreeMap<_, _> = messages::all()
        .iter()
        .chain(&messages::nested())
        .map(|s| (s.name, required(s)))
        .collect();
    let bad =
        |header: Header, error: &str| json!({ "header": hex(&header.encode()), "error": error });
    let header = Header {
        length: 0,
        version: 1,
        opcode: 1,
        flags: 0,
        tag: 1,
    };
    must_not_drift(
        "frames.json",
        &json!({
            "version": PROTOCOL_VERSION,
            "header_bytes": HEADER_BYTES,
            "max_body": MAX_BODY,
            "ops": ops,
            "flags": { "reply": FLAG_REPLY, "error": FLAG_ERROR, "partial": FLAG_PARTIAL, "fds": FLAG_FDS, "data": FLAG_DATA },
            "chunk_states": { "absent": CHUNK_ABSENT, "ready": CHUNK_READY, "pending": CHUNK_PENDING },
            "grant_results": {
                "granted": GRANT_GRANTED, "exists": GRANT_EXISTS, "no_room": GRANT_NO_ROOM,
                "not_ready": GRANT_NOT_READY, "no_parent": GRANT_NO_PARENT, "invalid": GRANT_INVALID,
            },
            "bad_headers": [
                bad(Header { version: 3, ..header }, "WrongVersion"),
                bad(Header { version: 0, ..header }, "WrongVersion"),
                bad(Header { length: MAX_BODY as u32 + 1, ..header }, "Oversized"),
            ],
            "required": required,
            "frames": frames,
        }),
    );
}

#[test]
fn keys() {
    let kinds = [
        KeyKind::Prefix,
        KeyKind::Segment,
        KeyKind::Opaque,
        KeyKind::Request,
    ];
    let vectors: Vec<_> = (0..4u8)
        .map(|i| {
            let model = ModelId([i; 32]);
            let namespace = NamespaceId([i.wrapping_mul(17); 32]);
            let last = EngineHash(std::array::from_fn(|at| at as u8 ^ i));
            let kind = kinds[usize::from(i)];
            json!({
                "model": model.hex(), "namespace": namespace.hex(), "kind": kind as u8, "last_block": last.hex(),
                "key": chunk_key(&model, &namespace, kind, &last).hex(),
            })
        })
        .collect();
    must_not_drift("keys.json", &json!({ "chunk_keys": vectors }));
}

#[test]
fn references() {
    let references = messages::refs();
    let fields: Vec<_> = references
        .iter()
        .map(|r| json!({ "slot": r.slot.get(), "generation": r.generation.get(), "length": r.length.get(), "section": r.section.get() }))
        .collect();
    must_not_drift(
        "refs.json",
        &json!({ "bytes_each": 16, "no_slot": refs::NO_SLOT, "refs": fields, "packed": hex(&refs::pack(&references)) }),
    );
}

#[test]
fn lock_file() {
    let offsets: Vec<_> = [1u32, 2, 4095, 4096, u32::MAX]
        .iter()
        .map(|n| json!({ "number": n, "offset": lockfile::lock_offset(*n) }))
        .collect();
    must_not_drift(
        "lockfile.json",
        &json!({
            "sidecar_byte": lockfile::SIDECAR_BYTE, "locks": offsets, "new_file": hex(lockfile::LockFile::NEW.as_bytes()),
        }),
    );
}

#[test]
fn flag_page() {
    use window::{Reason, Run, State, Word};
    let words: Vec<_> = [
        (State::Free, Reason::None, 0),
        (State::Filled, Reason::None, 1),
        (State::Wanted, Reason::None, (1 << 48) - 1),
        (State::Moved, Reason::None, 7),
        (State::Refused, Reason::NotGranted, 8),
    ]
    .into_iter()
    .map(|(state, reason, sequence)| {
        let word = Word { state, reason, sequence };
        json!({ "state": format!("{state:?}"), "reason": format!("{reason:?}"), "sequence": sequence, "word": word.encode() })
    })
    .collect();
    let runs = [
        Run {
            slot: 16,
            generation: 7,
            offset: 0,
            bytes: 65_537,
        },
        Run {
            slot: 0xDEAD,
            generation: u32::MAX,
            offset: 4096,
            bytes: 100,
        },
    ];
    let record = window::encode(&runs);
    let word = Word {
        state: State::Filled,
        reason: Reason::None,
        sequence: 1,
    };
    let order = window::decode(word, &record, 1 << 40, 1 << 20).unwrap();
    let places: Vec<u64> = order.runs.iter().map(|(at, _)| *at).collect();
    must_not_drift(
        "window.json",
        &json!({
            "header": hex(window::Header::new(8, 16 << 20).as_bytes()),
            "header_bytes": window::HEADER_BYTES, "record_bytes": window::RECORD_BYTES, "runs_at": window::RUNS_AT,
            "runs_max": window::RUNS_MAX, "run_align": window::RUN_ALIGN, "page_bytes": window::page_bytes(8),
            "pattern_bytes": window::PATTERN_BYTES, "words": words,
            "runs": runs.map(|r| json!([r.slot, r.generation, r.offset, r.bytes])), "record": hex(&record), "places": places,
        }),
    );
}

fn sample_header() -> table::Header {
    let mut header = table::Header::new_zeroed();
    header.magic = table::MAGIC;
    header.version = table::VERSION;
    header.row_bytes = table::ROW_BYTES as u32;
    header.region = 5;
    header.arena_bytes = 64 << 20;
    header.rows = 1024;
    header.chunks = 256;
    header.segment_bytes = 4 << 20;
    header.rows_offset = table::HEADER_BYTES;
    header.chunks_offset = 4096 + 64 * 1024;
    header.populated_rows = 512;
    header
}

fn sample_row() -> table::Row {
    table::Row {
        state: table::PUBLISHED,
        generation: 7,
        owner: 12,
        slot_rows: 16,
        chunk: 3,
        section: 1,
        length: 1_000_000,
        digest: [0xAA; 16],
        key_prefix: [0xBB; 8],
        ..table::Row::default()
    }
}

#[test]
fn slot_table() {
    use table::{ChunkRecord, Header, Row};
    let (header, row) = (sample_header(), sample_row());
    macro_rules! at {
        ($type:ident: $($field:ident),+) => { json!({ $(stringify!($field): offset_of!($type, $field)),+ }) };
    }
    must_not_drift(
        "table.json",
        &json!({
            "magic": hex(&table::MAGIC), "version": table::VERSION, "header_bytes": table::HEADER_BYTES,
            "arena_bytes_per_row": table::ROW_BYTES, "row_bytes": size_of::<Row>(), "chunk_record_bytes": size_of::<ChunkRecord>(),
            "no_chunk": table::NO_CHUNK,
            "states": { "free": table::FREE, "granted": table::GRANTED, "committed": table::COMMITTED, "published": table::PUBLISHED },
            "header_offsets": at!(Header: magic, version, row_bytes, region, arena_bytes, rows, chunks, segment_bytes, rows_offset, chunks_offset, populated_rows, capacity_rows, shrinks, lowest_rows),
            "row_offsets": at!(Row: state, generation, owner, slot_rows, chunk, section, length, digest, key_prefix),
            "chunk_record_offsets": at!(ChunkRecord: state, kind, fidelity, block_hash_count, key, model, layout, namespace, parent, last_hash, first_token, tokens, needed, expires_unix_s, block_hashes),
            "header": hex(header.as_bytes()), "row": hex(row.as_bytes()),
        }),
    );
}

#[test]
fn seeds_of_the_fuzzers() {
    let mut stream = vec![7];
    for (i, s) in messages::all().iter().enumerate() {
        let bytes = frame(s.op, s.flags, s.tag, &s.body);
        stream.extend_from_slice(&bytes);
        must_be(
            &format!("fuzz/seeds/frames/{i:02}-{}", s.name),
            &[vec![255], bytes].concat(),
        );
    }
    must_be("fuzz/seeds/frames/all", &stream);
    must_be(
        "fuzz/seeds/config/defaults",
        Config::default_yaml().as_bytes(),
    );
    must_be(
        "fuzz/seeds/object/sections",
        &object(3, 16, true).0.encode().unwrap(),
    );
    let mut with_form = object(1, 0, false).0;
    let dims = [(Axis::Token, 16), (Axis::Half, 2), (Axis::Channel, 8)];
    let dims = dims.map(|(axis, size)| Dim { axis, size });
    with_form.form = Form::new(Element::Bf16, &dims).unwrap();
    must_be("fuzz/seeds/object/form", &with_form.encode().unwrap());
    must_be(
        "fuzz/seeds/table/rows",
        &[
            sample_header().as_bytes(),
            &sample_row().as_bytes().repeat(3),
        ]
        .concat(),
    );
    let mut record = window::encode(&[window::Run {
        slot: 16,
        generation: 7,
        offset: 0,
        bytes: 65_537,
    }]);
    let word = window::Word {
        state: window::State::Filled,
        reason: window::Reason::None,
        sequence: 1,
    };
    record[..8].copy_from_slice(&word.encode().to_le_bytes());
    must_be("fuzz/seeds/window/store", &record);
    must_be("fuzz/seeds/descriptor/layout", br#"{"name":"LBHNC","groups":[{"kind":"full","strides":[32768,128]}],"eps":1e-05,"x":null}"#);
}

#[test]
fn the_connector_carries_the_same_table_of_layouts() {
    let table = kvcachepool_protocol::layouts::LAYOUTS_JSON;
    must_be("../connector/kvcachepool/layouts.json", table.as_bytes());
}
