//! Descriptors, identities, sections and what REGISTER refuses.

use kvcachepool_protocol::domain::*;
use kvcachepool_protocol::message::{ErrorCode, Group, Hashing, Register};
use kvcachepool_protocol::object::{Axis, Dim, Element, Fidelity, Form};
use proptest::prelude::*;
use serde_json::{Value, json};

fn group(kind: &str, block_bytes: u64, shards: u32, shard: u32) -> Group {
    Group {
        kind: kind.into(),
        block_tokens: 16,
        block_bytes,
        shards,
        shard,
        writer: true,
        window_tokens: if kind == "window" { 1024 } else { 0 },
    }
}

fn worker(groups: Vec<Group>) -> Register {
    Register {
        world: 2,
        local_world: 2,
        model: r#"{"name":"m","dtype":"float32"}"#.into(),
        layout: r#"{"name":"LBHNC"}"#.into(),
        device: "cpu".into(),
        device_uuid: String::new(),
        transfer_modes: vec!["engine".into()],
        groups,
        scheduler_block_tokens: 64,
        chunk_tokens: 256,
        hashing: None,
    }
}

fn scheduler() -> Register {
    Register {
        hashing: Some(Hashing {
            algorithm: "sha256_cbor".into(),
            root: "ab".repeat(32),
            random_root: false,
            block_tokens: 16,
        }),
        ..worker(vec![])
    }
}

fn rank(shard: u32) -> RankPart {
    RankPart::check(&worker(vec![group("full", 4096, 2, shard)])).unwrap()
}

#[test]
fn canonical_json_sorts_by_bytes_and_is_compact() {
    let descriptor =
        Descriptor::parse(r#" {"b": [1, 2.50, 1e-5, null, true], "é": "ü\n\"", "a": {"z": -1, "B": 18446744073709551615}, "f": 10000.0} "#).unwrap();
    assert_eq!(
        descriptor.canonical(),
        r#"{"a":{"B":18446744073709551615,"z":-1},"b":[1,2.5,1e-5,null,true],"f":10000.0,"é":"ü\n\""}"#
    );
}

#[test]
fn identities_are_what_they_were() {
    let model = Descriptor::parse(r#"{"name": "m", "dtype": "float32"}"#).unwrap();
    let hashing = scheduler().hashing.unwrap();
    let full = model_identity(model, &hashing, 256).unwrap();
    assert_eq!(
        full.canonical(),
        format!(
            r#"{{"chunk_tokens":256,"dtype":"float32","hashing":{{"algorithm":"sha256_cbor","block_tokens":16,"root":"{}"}},"name":"m"}}"#,
            "ab".repeat(32)
        )
    );
    let domain = join(
        &SchedulerPart::check(&scheduler()).unwrap(),
        &[&rank(0), &rank(1)],
        Fidelity::Exact,
    )
    .unwrap();
    assert_eq!(domain.model_id.hex16(), "d83444e658130698");
    assert_eq!(domain.layout_id.hex16(), "7043ee0abd9ced2b");
    assert_eq!(
        domain.model_id.0,
        *blake3::hash(full.canonical().as_bytes()).as_bytes()
    );
    assert_eq!(domain.not_shareable, None);
    assert_eq!(
        domain.layout.canonical(),
        r#"{"name":"LBHNC","sections":{"chunk_tokens":256,"groups":[{"block_bytes":4096,"block_tokens":16,"kind":"full","shards":2,"window_tokens":0}],"scheduler_block_tokens":64}}"#
    );
}

#[test]
fn unknown_keys_are_kept_and_decide_the_identity() {
    let one = Descriptor::parse(r#"{"new_in_0.40": {"x": [1]}}"#).unwrap();
    let other = Descriptor::parse(r#"{"new_in_0.40": {"x": [2]}}"#).unwrap();
    assert_ne!(one.identity(), other.identity());
    assert_eq!(one.to_value(), json!({"new_in_0.40": {"x": [1]}}));
}

#[test]
fn descriptors_are_bounded() {
    let deep = |n: usize| format!("{{\"a\":{}1{}}}", "[".repeat(n), "]".repeat(n));
    assert!(Descriptor::parse(&deep(MAX_DESCRIPTOR_DEPTH - 1)).is_ok());
    assert_eq!(
        Descriptor::parse(&deep(MAX_DESCRIPTOR_DEPTH)),
        Err(BadDescriptor::TooDeep)
    );
    assert!(matches!(
        Descriptor::parse(&deep(5000)),
        Err(BadDescriptor::NotJson(_))
    ));
    let long = format!("{{\"a\":\"{}\"}}", "x".repeat(MAX_DESCRIPTOR_BYTES));
    assert_eq!(
        Descriptor::parse(&long),
        Err(BadDescriptor::TooLong(long.len()))
    );
    assert_eq!(Descriptor::parse("[]"), Err(BadDescriptor::NotAnObject));
    let hashing = scheduler().hashing.unwrap();
    let taken = Descriptor::parse(r#"{"hashing": 1}"#).unwrap();
    assert_eq!(
        model_identity(taken, &hashing, 256),
        Err(BadDescriptor::ReservedKey("hashing"))
    );
}

#[test]
fn a_chunk_with_a_state_is_one_block_and_is_read_without_the_state_too() {
    let of = |kind: &str, bytes| Group {
        block_tokens: 256,
        ..group(kind, bytes, 2, 0)
    };
    let register = Register {
        scheduler_block_tokens: 256,
        ..worker(vec![of("full", 4096), of("state", 70_000)])
    };
    let plan = RankPart::check(&register).unwrap().plan;
    assert_eq!(plan.groups()[1].kind, GroupKind::State);
    assert_eq!([0, 2].map(|s| plan.section_bytes(s, 256)), [4096, 70_000]);
    assert_eq!((plan.all_groups(), plan.full_groups()), (0b11, 0b01));
    assert!(!plan.valid_tokens(128), "no chunk ends within a block");
}

#[test]
fn sections_are_numbered_by_group_then_shard() {
    let mut latent = group("full", 1000, 1, 0);
    latent.block_tokens = 64;
    let part = RankPart::check(&worker(vec![group("window", 4096, 2, 1), latent])).unwrap();
    let plan = &part.plan;
    assert_eq!(plan.sections(), 3);
    assert_eq!(
        [plan.section(0, 1), plan.section(1, 0), plan.section(1, 1)],
        [Some(1), Some(2), None]
    );
    assert_eq!(
        [plan.locate(0), plan.locate(2), plan.locate(3)],
        [Some((0, 0)), Some((1, 0)), None]
    );
    assert_eq!(
        [plan.full_bytes(0), plan.full_bytes(1)],
        [16 * 4096, 4 * 1000]
    );
    assert_eq!(plan.section_bytes(1, 64), 4 * 4096);
    assert_eq!(plan.chunk_bytes(64), 2 * 4 * 4096 + 1000);
    assert_eq!(plan.longest_section_bytes(), 65_536);
    assert_eq!((plan.all_groups(), plan.full_groups()), (0b11, 0b10));
    assert_eq!(plan.section_map(0b01), 0b011);
    assert_eq!(plan.section_map(u32::MAX), 0b111);
    assert!(plan.valid_tokens(256) && plan.valid_tokens(64));
    assert!(!plan.valid_tokens(0) && !plan.valid_tokens(65) && !plan.valid_tokens(320));
    assert_eq!(part.written_sections().collect::<Vec<_>>(), [1, 2]);
    assert_eq!(slot_rows(1 << 20), [16, 8, 4, 2, 1]);
    assert_eq!(slot_rows(70_000), [2, 1]);
    assert_eq!(slot_rows(1), [1]);
    assert_eq!(slot_rows(7 * 65_536), [7, 4, 2, 1]);
}

#[test]
fn an_opaque_object_is_cut_into_pieces_that_add_up() {
    const MIB: u64 = 1 << 20;
    for (bytes, pieces, piece) in [
        (1, 1, 1),
        (4 * MIB, 1, 4 * MIB),
        (4 * MIB + 1, 2, 4 * MIB),
        (512 * MIB, 128, 4 * MIB),
        (512 * MIB + 1, 65, 8 * MIB),
        (1024 * MIB, 128, 8 * MIB),
        (MAX_OPAQUE_BYTES, 65, 16 * MIB),
    ] {
        let plan = SectionPlan::opaque(bytes).unwrap();
        assert_eq!(plan.sections(), pieces, "{bytes}");
        assert_eq!(plan.longest_section_bytes(), piece, "{bytes}");
        assert_eq!(plan.chunk_bytes(1), bytes);
        for section in 0..pieces {
            let slot = u64::from(plan.section_rows(section, 1)) * 65_536;
            let used = plan.section_bytes(section, 1);
            assert!(
                used <= slot && slot <= (used + used / 4).max(65_536 * 2),
                "{bytes}: {used} in {slot}"
            );
            assert_eq!(plan.locate(section), Some((0, section)));
        }
    }
    assert_eq!(SectionPlan::opaque(0), None);
    assert_eq!(SectionPlan::opaque(MAX_OPAQUE_BYTES + 1), None);
}

#[test]
fn every_bad_register_has_its_name() {
    let good = worker(vec![group("full", 4096, 2, 0)]);
    let refused = |change: &dyn Fn(&mut Register)| {
        let mut r = good.clone();
        change(&mut r);
        let e = RankPart::check(&r).unwrap_err();
        (e.code(), e.to_string())
    };
    let plan = |r: &mut Register, f: &dyn Fn(&mut Group)| f(&mut r.groups[0]);
    use ErrorCode::*;
    for (code, text, got) in [
        (BadBody, "0 ranks", refused(&|r| r.world = 0)),
        (
            MultiNodeUnsupported,
            "1 of 2 ranks run in this pod",
            refused(&|r| r.local_world = 1),
        ),
        (
            BadBody,
            "model: the descriptor is not JSON",
            refused(&|r| r.model = "{".into()),
        ),
        (
            BadBody,
            "layout: the descriptor has the key \"sections\"",
            refused(&|r| r.layout = r#"{"sections":1}"#.into()),
        ),
        (BadBody, "0 KV groups", refused(&|r| r.groups.clear())),
        (
            BadBody,
            "33 KV groups",
            refused(&|r| r.groups = vec![group("full", 1, 1, 0); 33]),
        ),
        (
            BadBody,
            "200 sections",
            refused(&|r| plan(r, &|g| g.shards = 200)),
        ),
        (
            BadBody,
            "group 0: kind \"mamba\"",
            refused(&|r| plan(r, &|g| g.kind = "mamba".into())),
        ),
        (
            BadBody,
            "group 0: shard 2 does not exist",
            refused(&|r| plan(r, &|g| g.shard = 2)),
        ),
        (
            BadBody,
            "group 0: a window group needs",
            refused(&|r| plan(r, &|g| g.kind = "window".into())),
        ),
        (
            BadBody,
            "group 0: states need chunks of one block, 16 tokens, and these have 256",
            refused(&|r| plan(r, &|g| g.kind = "state".into())),
        ),
        (
            BadBody,
            "group 0: tokens of a block",
            refused(&|r| plan(r, &|g| g.block_bytes = 0)),
        ),
        (
            BadBody,
            "group 0: a chunk of 256 tokens",
            refused(&|r| plan(r, &|g| g.block_tokens = 48)),
        ),
        (
            BadBody,
            "a scheduler block of 100 tokens",
            refused(&|r| r.scheduler_block_tokens = 100),
        ),
        (
            SectionTooLarge,
            "group 0: a section of 17592186044416",
            refused(&|r| plan(r, &|g| g.block_bytes = 1 << 40)),
        ),
        (
            SectionTooLarge,
            "group 0: a section of",
            refused(&|r| plan(r, &|g| g.block_bytes = u64::MAX)),
        ),
    ] {
        assert_eq!(got.0, code, "{}", got.1);
        assert!(got.1.starts_with(text), "{}", got.1);
    }
}

#[test]
fn weak_or_unknown_hashing_is_refused() {
    let refused = |algorithm: &str, root: &str, block_tokens| {
        let mut r = scheduler();
        r.hashing = Some(Hashing {
            algorithm: algorithm.into(),
            root: root.into(),
            random_root: false,
            block_tokens,
        });
        SchedulerPart::check(&r).map_err(|e| e.code())
    };
    let root = "0".repeat(64);
    assert!(refused("sha256_cbor", &root, 16).is_ok());
    assert!(refused("sha256/py3.11", &root, 16).is_ok());
    for name in [
        "sha256",
        "xxhash",
        "xxhash_cbor",
        "sha256/py",
        "sha256/py3",
        "sha256/py3.x",
        "",
    ] {
        assert_eq!(
            refused(name, &root, 16),
            Err(ErrorCode::HashAlgorithmRefused),
            "{name}"
        );
    }
    assert_eq!(refused("sha256_cbor", "00", 16), Err(ErrorCode::BadBody));
    assert_eq!(
        refused("sha256_cbor", &"G".repeat(64), 16),
        Err(ErrorCode::BadBody)
    );
    assert_eq!(refused("sha256_cbor", &root, 0), Err(ErrorCode::BadBody));
    let mut r = scheduler();
    r.hashing = None;
    assert!(SchedulerPart::check(&r).is_err());
}

#[test]
fn ranks_that_differ_make_no_domain() {
    let scheduler_part = SchedulerPart::check(&scheduler()).unwrap();
    let with = |change: &dyn Fn(&mut Register)| {
        let mut r = worker(vec![group("full", 4096, 2, 1)]);
        change(&mut r);
        let second = RankPart::check(&r).unwrap();
        join(&scheduler_part, &[&rank(0), &second], Fidelity::Exact).unwrap_err()
    };
    for (error, text) in [
        (
            with(&|r| (r.world, r.local_world) = (1, 1)),
            "number of ranks",
        ),
        (with(&|r| r.model = "{}".into()), "model"),
        (with(&|r| r.layout = "{}".into()), "layout"),
        (
            with(&|r| r.groups[0].block_bytes = 8192),
            "list of KV groups",
        ),
        (
            with(&|r| r.groups[0].writer = false),
            "shard 1 has 0 writers",
        ),
        (with(&|r| r.groups[0].shard = 0), "shard 0 has 2 writers"),
    ] {
        assert_eq!(error.code(), ErrorCode::DescriptorMismatch);
        assert!(error.to_string().contains(text), "{error}");
    }
    assert!(join(&scheduler_part, &[&rank(0)], Fidelity::Exact).is_err());
    assert!(join(&scheduler_part, &[], Fidelity::Exact).is_err());
    let mut random = scheduler();
    random.hashing.as_mut().unwrap().random_root = true;
    let random = SchedulerPart::check(&random).unwrap();
    let domain = join(&random, &[&rank(0), &rank(1)], Fidelity::Exact).unwrap();
    let why = domain.not_shareable.as_deref();
    assert_eq!(why, Some("NotShareable/RandomHashSeed"));
}

#[test]
fn weights_without_a_fingerprint_are_shared_with_nobody() {
    let not_shareable = |model: Value| {
        let mut r = worker(vec![group("full", 4096, 1, 0)]);
        (r.world, r.local_world, r.model) = (1, 1, model.to_string());
        let mut alone = scheduler();
        (alone.world, alone.local_world) = (1, 1);
        let alone = SchedulerPart::check(&alone).unwrap();
        let rank = RankPart::check(&r).unwrap();
        join(&alone, &[&rank], Fidelity::Exact)
            .unwrap()
            .not_shareable
    };
    let files = json!({"kind": "files", "digest": "ab"});
    let unshared = json!({"kind": "unshared", "reason": "Gguf", "instance": "chosen-by-a-user"});
    assert_eq!(not_shareable(json!({"model": {"weights": files}})), None);
    for model in [
        json!({"model": {"weights": unshared}}),
        json!({"model": {"weights": files}, "speculative": {"draft": {"weights": unshared}}}),
        json!({"list": [files, unshared]}),
    ] {
        let why = not_shareable(model);
        assert_eq!(why.as_deref(), Some("NotShareable/Gguf"));
    }
}

#[test]
fn what_may_have_lost_something_is_another_model_and_the_same_layout() {
    let scheduler = SchedulerPart::check(&scheduler()).unwrap();
    let domain = |fidelity| join(&scheduler, &[&rank(0), &rank(1)], fidelity).unwrap();
    let domains = Fidelity::ALL.map(domain);
    for (i, domain) in domains.iter().enumerate() {
        assert_eq!(domain.layout_id, domains[0].layout_id);
        let said = domain.model.to_value();
        let lossy = Fidelity::ALL[i] != Fidelity::Exact;
        let name = lossy.then(|| Fidelity::ALL[i].name().into());
        assert_eq!(said.get("fidelity").cloned(), name);
        for other in &domains[..i] {
            assert_ne!(domain.model_id, other.model_id);
        }
    }
    // A model that says it itself is none.
    let mut sly = worker(vec![group("full", 4096, 1, 0)]);
    (sly.world, sly.local_world) = (1, 1);
    sly.model = r#"{"fidelity":"exact"}"#.into();
    let mut alone = self::scheduler();
    (alone.world, alone.local_world) = (1, 1);
    let (alone, sly) = (
        SchedulerPart::check(&alone).unwrap(),
        RankPart::check(&sly).unwrap(),
    );
    assert!(join(&alone, &[&sly], Fidelity::Fp8).is_err());
}

#[test]
fn numbers_are_what_the_layout_says_of_every_tensor() {
    let said = |dtypes: &[&str]| {
        let tensor = |dtype: &&str| json!({"dtype": dtype, "shape": [2]});
        let groups: Vec<_> = dtypes
            .iter()
            .map(|d| json!({"tensors": [tensor(d)]}))
            .collect();
        let mut register = worker(vec![group("full", 4096, 1, 0)]);
        (register.world, register.local_world) = (1, 1);
        register.layout = json!({"groups": groups}).to_string();
        let mut alone = scheduler();
        (alone.world, alone.local_world) = (1, 1);
        let rank = RankPart::check(&register).unwrap();
        let alone = SchedulerPart::check(&alone).unwrap();
        join(&alone, &[&rank], Fidelity::Exact).unwrap().form
    };
    for (dtypes, element) in [
        (&["torch.bfloat16"][..], Element::Bf16),
        (&["torch.float16", "torch.float16"], Element::F16),
        (&["torch.float32"], Element::F32),
        (&["torch.float32", "torch.bfloat16"], Element::Opaque),
        (&["torch.uint8"], Element::Opaque),
        (&[], Element::Opaque),
    ] {
        assert_eq!(said(dtypes), Form::flat(element), "{dtypes:?}");
    }
}

#[test]
fn a_form_is_what_the_layout_says_of_every_group_and_what_its_blocks_hold() {
    let said = |blocks: &[u64], forms: &[Value]| {
        let tensors = json!([{"dtype": "torch.bfloat16"}]);
        let described: Vec<_> = forms
            .iter()
            .map(|form| json!({"tensors": tensors, "form": form}))
            .collect();
        let groups = blocks.iter().map(|bytes| group("full", *bytes, 1, 0));
        let mut register = worker(groups.collect());
        (register.world, register.local_world) = (1, 1);
        register.layout = json!({"groups": described}).to_string();
        let mut alone = scheduler();
        (alone.world, alone.local_world) = (1, 1);
        let rank = RankPart::check(&register).unwrap();
        let alone = SchedulerPart::check(&alone).unwrap();
        join(&alone, &[&rank], Fidelity::Exact).unwrap().form
    };
    let list = json!([["layer", 2], ["token", 16], ["half", 2], ["channel", 32]]);
    let dims = [
        (Axis::Layer, 2),
        (Axis::Token, 16),
        (Axis::Half, 2),
        (Axis::Channel, 32),
    ];
    let dims = dims.map(|(axis, size)| Dim { axis, size });
    let (form, flat) = (
        Form::new(Element::Bf16, &dims).unwrap(),
        Form::flat(Element::Bf16),
    );
    assert_eq!(said(&[4096], std::slice::from_ref(&list)), form);
    assert_eq!(said(&[4096, 4096], &[list.clone(), list.clone()]), form);
    let shorter = json!([["layer", 1], ["token", 16], ["half", 2], ["channel", 64]]);
    for (blocks, forms, why) in [
        (vec![4096], vec![json!(null)], "nobody knows"),
        (vec![4096], vec![json!({"token": 2048})], "no list"),
        (vec![8192], vec![list.clone()], "blocks are longer"),
        (
            vec![4096, 8192],
            vec![list.clone(), list.clone()],
            "some are",
        ),
        (
            vec![4096, 4096],
            vec![list.clone(), shorter],
            "another form",
        ),
        (
            vec![4096, 4096],
            vec![list.clone(), json!(null)],
            "one unknown",
        ),
        (vec![4096], vec![json!([["head", 2048]])], "unknown axis"),
        (vec![4096], vec![json!([["token", -2048]])], "negative"),
        (vec![4096], vec![json!([["token", 2048, 1]])], "three"),
        (vec![4096], vec![json!([["half", 2048]])], "halves"),
    ] {
        assert_eq!(said(&blocks, &forms), flat, "{why}");
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::hash_map("\\PC{0,4}", inner, 0..6)
                .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_text_gives_a_descriptor_or_an_error(text in "\\PC{0,100}") {
        let _ = Descriptor::parse(&text);
    }

    #[test]
    fn canonical_json_reads_back_to_itself(value in any_json()) {
        let descriptor = Descriptor::parse(&json!({ "value": value }).to_string()).unwrap();
        let text = descriptor.canonical();
        prop_assert_eq!(Descriptor::parse(&text).unwrap().canonical(), text);
    }

    #[test]
    fn sections_cover_the_chunk(shards in prop::collection::vec(1u32..8, 1..10), bytes in 1u64..100_000, blocks in 1u32..=4) {
        let groups = shards.iter().map(|s| GroupPlan { kind: GroupKind::Full, block_tokens: 16, block_bytes: bytes, shards: *s, window_tokens: 0 }).collect();
        let plan = SectionPlan::new(256, 64, groups).unwrap();
        for section in 0..plan.sections() {
            let (group, shard) = plan.locate(section).unwrap();
            prop_assert_eq!(plan.section(group, shard), Some(section));
        }
        let tokens = blocks * 64;
        prop_assert_eq!(plan.chunk_bytes(tokens), u64::from(plan.sections()) * u64::from(tokens / 16) * bytes);
        let map = plan.section_map(plan.all_groups());
        prop_assert_eq!(map.count_ones(), plan.sections());
    }

    #[test]
    fn slot_sizes_fall_to_one_row_and_fit_every_half(full in 1u64..=u64::from(u32::MAX)) {
        let rows = slot_rows(full);
        prop_assert_eq!(*rows.last().unwrap(), 1);
        prop_assert!(u64::from(rows[0]) * 65_536 >= full && u64::from(rows[0] - 1) * 65_536 < full);
        prop_assert!(rows.windows(2).all(|w| w[0] > w[1] && w[1] * 2 + 1 >= w[0]));
    }
}

/// The domain of an instance with one group of 8 heads in 2 layers, 32 tokens and 16 bytes a state.
fn portable(ranks: u32, block_tokens: u32, change: impl Fn(&mut Value)) -> Domain {
    let heads = 8 / ranks;
    let mut layout = json!({
        "engine": "vllm", "engine_version": "0.32", "kv_layout": "LBHNC", "parallel": {"tp": ranks, "pp": 1},
        "groups": [{"portable": {
            "layers": 2, "kernel_blocks": 1, "heads": heads, "tokens": block_tokens, "state_bytes": 16,
            "meaning": {"dtype": "torch.bfloat16"},
        }}],
    });
    change(&mut layout);
    let bytes = 2 * u64::from(heads) * u64::from(block_tokens) * 16;
    let part = |shard| {
        let register = Register {
            world: ranks,
            local_world: ranks,
            layout: layout.to_string(),
            groups: vec![Group {
                block_tokens,
                ..group("full", bytes, ranks, shard)
            }],
            ..worker(vec![])
        };
        RankPart::check(&register).unwrap()
    };
    let parts: Vec<_> = (0..ranks).map(part).collect();
    let scheduler = SchedulerPart::check(&Register {
        world: ranks,
        local_world: ranks,
        ..scheduler()
    });
    join(
        &scheduler.unwrap(),
        &parts.iter().collect::<Vec<_>>(),
        Fidelity::Exact,
    )
    .unwrap()
}

#[test]
fn objects_have_one_layout_for_all_topologies_and_versions() {
    let one = portable(1, 16, |_| {});
    assert_ne!(one.object_layout, one.layout_id);
    let group = one.portable.as_ref().unwrap().groups[0];
    assert_eq!((group.heads, group.parts, group.locate(0)), (8, 1, (0, 0)));
    for (ranks, block_tokens) in [(2, 16), (8, 16), (1, 32), (4, 64)] {
        let other = portable(ranks, block_tokens, |layout| {
            layout["engine_version"] = "0.33".into();
            layout["kv_layout"] = "NHD".into();
        });
        assert_eq!(other.object_layout, one.object_layout);
        assert_eq!(other.model_id, one.model_id);
        assert_ne!(other.layout_id, one.layout_id);
        let group = other.portable.unwrap().groups[0];
        assert_eq!((group.heads, group.parts), (8 / ranks, ranks));
    }
}

#[test]
fn what_changes_the_meaning_of_bytes_is_another_layout() {
    let one = portable(2, 16, |_| {}).object_layout;
    let other: [&dyn Fn(&mut Value); 3] = [
        &|layout| layout["groups"][0]["portable"]["meaning"]["dtype"] = "torch.float16".into(),
        &|layout| layout["groups"][0]["portable"]["meaning"]["head_sizes"] = json!([[4, 4]]),
        &|layout| layout["parallel"]["pp"] = 2.into(),
    ];
    for change in other {
        let other = portable(2, 16, change);
        assert!(other.portable.is_some());
        assert_ne!(other.object_layout, one);
    }
}

#[test]
fn objects_that_nobody_else_can_read_have_the_layout_of_the_ranks() {
    let none: [&dyn Fn(&mut Value); 7] = [
        &|layout| layout["groups"][0]["portable"] = Value::Null,
        &|layout| layout["groups"] = json!([]),
        &|layout| layout["kv_layout"] = "another".into(),
        &|layout| layout["parallel"]["pp"] = 3.into(),
        &|layout| layout["parallel"]["pp"] = 0.into(),
        // not the bytes of a block
        &|layout| layout["groups"][0]["portable"]["heads"] = 3.into(),
        &|layout| layout["groups"][0]["portable"]["layers"] = u64::MAX.into(),
    ];
    for change in none {
        let domain = portable(2, 16, change);
        assert_eq!(domain.portable, None);
        assert_eq!(domain.object_layout, domain.layout_id);
    }
    // A chunk that is too long to convert.
    let large = |block_bytes: u64| {
        let layout = json!({
            "engine": "vllm", "kv_layout": "LBHNC", "parallel": {"pp": 1},
            "groups": [{"portable": {
                "layers": 1, "kernel_blocks": 1, "heads": 1, "tokens": 1, "state_bytes": block_bytes, "meaning": {},
            }}],
        });
        let register = Register {
            world: 1,
            local_world: 1,
            layout: layout.to_string(),
            groups: vec![group("full", block_bytes, 1, 0)],
            ..worker(vec![])
        };
        let scheduler = Register {
            world: 1,
            local_world: 1,
            ..scheduler()
        };
        let (scheduler, rank) = (SchedulerPart::check(&scheduler), RankPart::check(&register));
        join(&scheduler.unwrap(), &[&rank.unwrap()], Fidelity::Exact).unwrap()
    };
    // 16 blocks of a chunk, and one
    assert!(large(MAX_PORTABLE_BYTES / 17).portable.is_some());
    assert_eq!(large(MAX_PORTABLE_BYTES / 17 + 1).portable, None);
}
