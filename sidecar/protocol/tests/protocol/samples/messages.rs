//! One of every message, with every field set to something that is not its default.

use kvcachepool_protocol::domain::MAX_OPAQUE_BYTES;
use kvcachepool_protocol::frame::*;
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::refs::{NO_SLOT, SectionRef, pack};
use kvcachepool_protocol::remote;
use std::collections::BTreeMap;

/// A message with the frame it travels in.
pub struct Sample {
    pub name: &'static str,
    pub op: Op,
    pub flags: u16,
    pub tag: u64,
    pub body: Vec<u8>,
    /// Reads the body as its message and writes it again.
    pub again: fn(&[u8]) -> Result<Vec<u8>, BadBody>,
}

fn sample<T: serde::Serialize + serde::de::DeserializeOwned>(
    name: &'static str,
    op: Op,
    flags: u16,
    tag: u64,
    message: &T,
) -> Sample {
    Sample {
        name,
        op,
        flags,
        tag,
        body: encode(message).unwrap(),
        again: |body| encode(&decode::<T>(body)?),
    }
}

fn hash(byte: u8) -> Vec<u8> {
    vec![byte; 32]
}

pub fn refs() -> Vec<SectionRef> {
    vec![
        SectionRef::new(16, 7, 1_048_576, 0),
        SectionRef::new(NO_SLOT, 0, 0, 1),
        SectionRef::new(0xDEAD_BEEF, u32::MAX, 65_537, 127),
    ]
}

fn counts<V: Copy>(pairs: &[(&str, V)]) -> BTreeMap<String, V> {
    pairs.iter().map(|(k, v)| (k.to_string(), *v)).collect()
}

fn parts() -> remote::Parts {
    remote::Parts {
        request: "7".into(),
        parts: vec![(0, 0, 4 << 20), (u32::MAX, u64::MAX, 1)],
    }
}

fn hashing() -> Hashing {
    Hashing {
        algorithm: "sha256/py3.11".into(),
        root: "ab".repeat(32),
        random_root: true,
        block_tokens: 16,
    }
}

fn group() -> Group {
    Group {
        kind: "window".into(),
        block_tokens: 16,
        block_bytes: 1 << 40,
        shards: 2,
        shard: 1,
        writer: true,
        window_tokens: 1024,
    }
}

fn grant_chunk() -> GrantChunk {
    GrantChunk {
        bytes: 0,
        hash: hash(6),
        parent: hash(7),
        first_token: 256,
        tokens: 256,
        groups: 0b11,
        block_hashes: [hash(8), hash(6)].concat(),
    }
}

/// Values inside messages, as samples of their own; their frames mean nothing.
pub fn nested() -> Vec<Sample> {
    vec![
        sample("Hashing", Op::Register, 0, 0, &hashing()),
        sample("Group", Op::Register, 0, 0, &group()),
        sample("GrantChunk", Op::Grant, 0, 0, &grant_chunk()),
    ]
}

pub fn all() -> Vec<Sample> {
    let packed = pack(&refs());
    let hello = Hello {
        version: 1,
        role: Role::Worker,
        engine: "vllm".into(),
        engine_version: "0.32.0".into(),
        instance: "engine-0".into(),
        incarnation: (0..16).collect(),
        number: 3,
        rank: 1,
        fds: vec!["pidfd".into(), "arena".into(), "table".into()],
        lock: Some(12),
        region: Some(5),
        grants: packed.clone(),
        requests: vec!["req-1".into()],
        watches_shrinks: true,
        off: None,
    };
    let hello_off = Hello {
        role: Role::Plugin,
        fds: vec![],
        lock: None,
        region: None,
        grants: vec![],
        requests: vec![],
        watches_shrinks: false,
        off: Some("VllmTooOld".into()),
        ..hello.clone()
    };
    let settings = Settings {
        chunk_tokens: 256,
        save: Save::PromptAndDecode,
        min_load_tokens: 512,
        load_timeout_ms: 2000,
        first_poll_wait_us: 1000,
        step_wait_us: 2000,
        grant_timeout_ms: 1000,
        store_bytes_in_flight: 1 << 28,
        skip_last_tokens: 32,
    };
    let hello_reply = HelloReply {
        version: 1,
        sidecar_version: "0.1.0".into(),
        session: 9,
        boot: u64::MAX,
        features: vec!["verify".into()],
        settings,
        memory: Memory::Sent,
        reason: "none".into(),
        retry_ms: 100,
        lock: Some(12),
        region: Some(5),
        arena_bytes: 1 << 32,
        table_bytes: 1 << 24,
        fds: vec!["arena".into(), "table".into()],
    };
    let register = Register {
        world: 2,
        local_world: 2,
        model: r#"{"name":"m"}"#.into(),
        layout: r#"{"name":"LBHNC"}"#.into(),
        device: "cuda".into(),
        device_uuid: "GPU-1".into(),
        transfer_modes: vec!["engine".into()],
        groups: vec![group()],
        scheduler_block_tokens: 64,
        chunk_tokens: 256,
        hashing: Some(hashing()),
    };
    let register_reply = RegisterReply {
        layout_id: hash(1),
        model_id: hash(2),
        slot_bytes: vec![65_536, 1 << 33],
        transfer: "engine".into(),
        transfer_reason: "NoWindow".into(),
        ready: true,
    };
    let probe = Probe {
        independent: true,
        request: "req-1".into(),
        namespace: hash(3),
        hashes: [hash(4), hash(5)].concat(),
        tail_tokens: 64,
        local_tokens: Some(128),
        budget_ms: 1900,
        max_load_tokens: Some(4096),
        prefill_tokens_per_s: 12_000,
    };
    let probe_reply = ProbeReply {
        states: vec![CHUNK_READY, CHUNK_PENDING, CHUNK_ABSENT],
        refs: packed.clone(),
        region: 5,
        pending_ms: 3,
        tiers: vec![1, 2, 0],
        reason: "NotRegistered".into(),
        declined: "recompute".into(),
    };
    let grant = Grant {
        request: "req-1".into(),
        namespace: hash(3),
        chunks: vec![grant_chunk()],
        ttl_s: 3600,
    };
    let grant_reply = GrantReply {
        results: vec![
            GRANT_GRANTED,
            GRANT_EXISTS,
            GRANT_NO_ROOM,
            GRANT_NOT_READY,
            GRANT_NO_PARENT,
            GRANT_INVALID,
        ],
        refs: packed.clone(),
        region: 5,
    };
    let sections = Sections {
        region: 5,
        refs: packed,
    };
    let event = Event {
        kind: "stored".into(),
        tier: "memory".into(),
        block_hashes: hash(8),
        parent: hash(7),
        tokens: 256,
        hash: hash(8),
        namespace: hash(6),
        first_token: 512,
    };
    let objects = Objects {
        op: ObjectsOp::Pin,
        namespace: hash(6),
        hashes: hash(1),
        ttl_s: 60,
    };
    let described = ObjectsReply {
        count: 1,
        states: vec![1, 0],
        bytes: vec![1 << 30, 0],
        pinned: vec![1, 0],
    };
    let report = Report {
        requested_tokens: 1000,
        hit_tokens: counts(&[("memory", 600)]),
        miss_tokens: counts(&[("absent", 300), ("minLoadTokens", 100)]),
        load_failed_tokens: 1,
        events: counts(&[("grant_refused", 2)]),
        copied_bytes: counts(&[("load", 1 << 40), ("store", 3)]),
        copied_seconds: counts(&[("load", 0.5)]),
        oldest_job_ms: 7,
    };
    let error = ErrorBody {
        code: ErrorCode::SectionTooLarge,
        message: "too large".into(),
        retryable: true,
    };
    let admin = Admin {
        op: "pin".into(),
        keys: vec!["00".repeat(32)],
        ttl_s: 60,
        token: "t".into(),
    };
    vec![
        sample("Hello", Op::Hello, FLAG_FDS, 1, &hello),
        sample("Hello", Op::Hello, 0, 2, &hello_off),
        sample(
            "HelloReply",
            Op::Hello,
            FLAG_REPLY | FLAG_FDS,
            1,
            &hello_reply,
        ),
        sample("Register", Op::Register, 0, 3, &register),
        sample(
            "RegisterReply",
            Op::Register,
            FLAG_REPLY,
            3,
            &register_reply,
        ),
        sample("Probe", Op::Probe, 0, 4, &probe),
        sample(
            "ProbeReply",
            Op::Probe,
            FLAG_REPLY | FLAG_PARTIAL,
            4,
            &probe_reply,
        ),
        sample(
            "Pin",
            Op::Pin,
            0,
            5,
            &Pin {
                request: "req-1".into(),
                probe: 4,
                from: 1,
                to: 3,
            },
        ),
        sample(
            "Release",
            Op::Release,
            0,
            6,
            &Release {
                requests: vec!["req-1".into(), "req-2".into()],
            },
        ),
        sample("Grant", Op::Grant, 0, 7, &grant),
        sample("GrantReply", Op::Grant, FLAG_REPLY, 7, &grant_reply),
        sample("Sections", Op::Commit, 0, 8, &sections),
        sample("Sections", Op::Abort, 0, 9, &sections),
        sample(
            "Abort",
            Op::Abort,
            0,
            10,
            &Abort {
                grant: 7,
                hashes: hash(6),
            },
        ),
        sample(
            "AbortReply",
            Op::Abort,
            FLAG_REPLY,
            10,
            &AbortReply { freed: 2 },
        ),
        sample(
            "Events",
            Op::Events,
            0,
            11,
            &Events {
                cursor: 40,
                wait_ms: 30_000,
                boot: 3,
                snapshot: Some(512),
            },
        ),
        sample(
            "EventsReply",
            Op::Events,
            FLAG_REPLY,
            11,
            &EventsReply {
                cursor: 41,
                lost: true,
                events: vec![event],
                boot: 3,
                next: Some(1024),
            },
        ),
        sample("Admin", Op::Admin, 0, 12, &admin),
        sample("Report", Op::Report, 0, u64::MAX, &report),
        sample("Objects", Op::Objects, 0, 14, &objects),
        sample("ObjectsReply", Op::Objects, FLAG_REPLY, 14, &described),
        sample(
            "RemoteHello",
            Op::Hello,
            0,
            20,
            &remote::Hello {
                version: 1,
                engine: "lmcache".into(),
                engine_version: "0.5.6".into(),
                instance: "lmcache-0123456789ab".into(),
                key: "0123456789abcdef".into(),
            },
        ),
        sample(
            "RemoteHelloReply",
            Op::Hello,
            FLAG_REPLY,
            20,
            &remote::HelloReply {
                version: 1,
                sidecar_version: "0.1.0".into(),
                boot: u64::MAX,
                features: vec![FEATURE_OBJECTS.into()],
                arena_bytes: 64 << 30,
            },
        ),
        sample(
            "RemoteProbeReply",
            Op::Probe,
            FLAG_REPLY,
            21,
            &remote::ProbeReply {
                states: vec![CHUNK_READY, CHUNK_ABSENT, CHUNK_READY],
                bytes: vec![1, MAX_OPAQUE_BYTES],
                reason: "NoArena".into(),
            },
        ),
        sample(
            "RemoteGrantReply",
            Op::Grant,
            FLAG_REPLY,
            22,
            &remote::GrantReply {
                results: vec![GRANT_GRANTED, GRANT_QUOTA],
            },
        ),
        sample("RemoteParts", Op::Read, 0, 23, &parts()),
        sample(
            "RemoteReadReply",
            Op::Read,
            FLAG_REPLY,
            23,
            &remote::ReadReply { found: vec![1, 0] },
        ),
        sample(
            "RemoteWriteReply",
            Op::Write,
            FLAG_REPLY,
            24,
            &remote::WriteReply {
                written: vec![
                    remote::WRITE_LOST,
                    remote::WRITE_MORE,
                    remote::WRITE_COMPLETE,
                ],
            },
        ),
        sample(
            "ErrorBody",
            Op::Register,
            FLAG_REPLY | FLAG_ERROR,
            3,
            &error,
        ),
        sample(
            "Window",
            Op::Window,
            0,
            12,
            &Window {
                device_uuid: "GPU-00112233-4455-6677-8899-aabbccddeeff".into(),
                bytes: 128 << 20,
                seen: true,
            },
        ),
        sample(
            "WindowReply",
            Op::Window,
            FLAG_REPLY | FLAG_FDS,
            12,
            &WindowReply {
                working: true,
                kind: WindowKind::PosixFd,
                bytes: 128 << 20,
                stages: 8,
                stage_bytes: 16 << 20,
                pattern: vec![0xa5; 64],
                handle: vec![9; 64],
                fds: ["window", "page", "bell"].map(String::from).into(),
            },
        ),
    ]
}
