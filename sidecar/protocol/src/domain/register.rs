//! Validates REGISTER messages of the ranks and of the scheduler one by one, and joins them to a domain.

use super::numbers::form;
use super::{BadDescriptor, BadPlan, Descriptor, GroupKind, GroupPlan, Portable, SectionPlan};
use crate::key::{LayoutId, ModelId};
use crate::message::{ErrorCode, Group, Hashing, Register};
use crate::object::{Fidelity, Form};
use serde_json::{Value, json};
use std::sync::Arc;

/// Maximum ranks of an instance.
const MAX_WORLD: u32 = 1_024;
/// Reason of a rank that is still hashing its weights. It registers again when it has finished.
const PROVISIONAL: &str = "WeightsHashing";
/// Longest name of a reason, in characters.
const REASON_MAX: usize = 64;

/// Why a REGISTER, or the join of several, is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The number of ranks is out of range.
    #[error("{0} ranks; 1 to {MAX_WORLD} are supported")]
    World(u32),
    /// The ranks of the instance do not all run in this pod.
    #[error(
        "{local} of {world} ranks run in this pod: the connector is too old for instances over several pods"
    )]
    MultiNode { local: u32, world: u32 },
    /// The model descriptor is invalid.
    #[error("model: {0}")]
    Model(BadDescriptor),
    /// The layout descriptor is invalid.
    #[error("layout: {0}")]
    Layout(BadDescriptor),
    /// An unsupported kind of KV group.
    #[error("group {group}: kind \"{kind}\" is not supported (full, window, state)")]
    Kind {
        group: usize,
        /// The kind, truncated to 32 characters.
        kind: String,
    },
    /// A shard outside its group.
    #[error("group {group}: shard {shard} does not exist; the group has {shards} shards")]
    Shard {
        group: usize,
        /// Shard of the rank.
        shard: u32,
        shards: u32,
    },
    /// The groups form no plan.
    #[error("{0}")]
    Plan(BadPlan),
    /// A hash algorithm that is unknown or not collision resistant.
    #[error(
        "hash algorithm \"{0}\" is refused: start vLLM with --prefix-caching-hash-algo sha256 or sha256_cbor"
    )]
    HashAlgorithm(String),
    /// The hashing part is missing or malformed.
    #[error("hashing: {0}")]
    Hashing(&'static str),
    /// Two parts of one instance contradict each other.
    #[error("rank {rank}: its {what} differs from that of rank 0 or the scheduler")]
    Mismatch {
        /// The rank that differs.
        rank: u32,
        what: &'static str,
    },
    /// A shard has no writer, or several.
    #[error("group {group}: shard {shard} has {writers} writers, not one")]
    Writers {
        group: usize,
        shard: u32,
        /// Number of ranks that would write it.
        writers: usize,
    },
}

impl Refused {
    /// Name of the refusal on the wire.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::MultiNode { .. } => ErrorCode::MultiNodeUnsupported,
            Self::HashAlgorithm(_) => ErrorCode::HashAlgorithmRefused,
            Self::Plan(BadPlan::SectionBytes { .. }) => ErrorCode::SectionTooLarge,
            Self::Mismatch { .. } | Self::Writers { .. } => ErrorCode::DescriptorMismatch,
            _ => ErrorCode::BadBody,
        }
    }
}

/// The validated registration of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct RankPart {
    /// Number of ranks of the instance.
    pub world: u32,
    /// Model descriptor without the hashing part.
    pub model: Descriptor,
    /// Layout descriptor with the sections.
    pub layout: Descriptor,
    /// Identity of `layout`.
    pub layout_id: LayoutId,
    pub plan: SectionPlan,
    /// Per group: the shard of this rank, and whether this rank writes it.
    pub shards: Vec<(u32, bool)>,
    /// The device is a GPU: its writes may complete after its process has died.
    pub gpu: bool,
}

impl RankPart {
    /// Validates a worker's REGISTER.
    pub fn check(register: &Register) -> Result<Self, Refused> {
        check_world(register)?;
        let groups = register
            .groups
            .iter()
            .enumerate()
            .map(|(i, group)| group_plan(i, group))
            .collect::<Result<Vec<_>, _>>()?;
        let plan = SectionPlan::new(
            register.chunk_tokens,
            register.scheduler_block_tokens,
            groups,
        )
        .map_err(Refused::Plan)?;
        let layout = Descriptor::parse(&register.layout)
            .and_then(|layout| layout.with("sections", describe(&plan)))
            .map_err(Refused::Layout)?;
        Ok(Self {
            world: register.world,
            model: Descriptor::parse(&register.model).map_err(Refused::Model)?,
            layout_id: LayoutId(layout.identity()),
            layout,
            plan,
            shards: register
                .groups
                .iter()
                .map(|g| (g.shard, g.writer))
                .collect(),
            gpu: register.device != "cpu",
        })
    }

    /// Whether this rank registers again when it has hashed its weights.
    pub fn is_provisional(&self) -> bool {
        unshared_reasons(&self.model.to_value())
            .iter()
            .any(|why| why == PROVISIONAL)
    }

    /// Indices of the sections that this rank writes.
    pub fn written_sections(&self) -> impl Iterator<Item = u32> + '_ {
        self.shards
            .iter()
            .enumerate()
            .filter(|(_, (_, writer))| *writer)
            .filter_map(|(group, (shard, _))| self.plan.section(group, *shard))
    }
}

/// The validated registration of the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerPart {
    /// Number of ranks of the instance.
    pub world: u32,
    /// How blocks are hashed.
    pub hashing: Hashing,
}

impl SchedulerPart {
    /// Validates a scheduler's REGISTER.
    pub fn check(register: &Register) -> Result<Self, Refused> {
        check_world(register)?;
        let hashing = register
            .hashing
            .clone()
            .ok_or(Refused::Hashing("missing in the scheduler's REGISTER"))?;
        let name = &hashing.algorithm;
        if name != "sha256_cbor" && !name.strip_prefix("sha256/py").is_some_and(is_minor) {
            return Err(Refused::HashAlgorithm(name.chars().take(32).collect()));
        }
        let root = hashing.root.as_bytes();
        let lower_hex = |b: &u8| b.is_ascii_digit() || (b'a'..=b'f').contains(b);
        if root.len() != 64 || !root.iter().all(lower_hex) {
            return Err(Refused::Hashing("root is not 64 lower-case hex digits"));
        }
        if hashing.block_tokens == 0 {
            return Err(Refused::Hashing("block_tokens is 0"));
        }
        Ok(Self {
            world: register.world,
            hashing,
        })
    }
}

/// A domain. Processes with equal domains have interchangeable bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Domain {
    /// Identity of the KV values.
    pub model_id: ModelId,
    /// Identity of the layout in memory.
    pub layout_id: LayoutId,
    /// Identity of the layout in objects.
    pub object_layout: LayoutId,
    /// How objects differ from chunks in memory. `None`: they do not, and `object_layout` is `layout_id`.
    pub portable: Option<Arc<Portable>>,
    /// Canonical descriptor behind `model_id`.
    pub model: Descriptor,
    /// Canonical descriptor behind `layout_id`.
    pub layout: Descriptor,
    pub plan: SectionPlan,
    /// Number format of all KV groups.
    pub form: Form,
    /// Why no other process can share the domain: `NotShareable/` and a name. `None` if it is shareable.
    pub not_shareable: Option<String>,
}

/// Joins the parts of one instance to its domain; `ranks` is in rank order. A lossy codec gives another model identity, so that values from
/// such a tier are never taken for values that the engine computed.
pub fn join(
    scheduler: &SchedulerPart,
    ranks: &[&RankPart],
    fidelity: Fidelity,
) -> Result<Domain, Refused> {
    let first = ranks.first().ok_or(Refused::World(0))?;
    for (rank, part) in (0u32..).zip(ranks) {
        let mismatch = |what| Refused::Mismatch { rank, what };
        if part.world != scheduler.world || part.world as usize != ranks.len() {
            return Err(mismatch("number of ranks"));
        }
        if part.model != first.model {
            return Err(mismatch("model"));
        }
        if part.plan != first.plan {
            return Err(mismatch("list of KV groups"));
        }
        if part.layout_id != first.layout_id {
            return Err(mismatch("layout"));
        }
    }
    if !first
        .plan
        .scheduler_block_tokens()
        .is_multiple_of(scheduler.hashing.block_tokens)
    {
        return Err(Refused::Hashing(
            "a scheduler block is not a whole number of hash blocks",
        ));
    }
    for (group, plan) in first.plan.groups().iter().enumerate() {
        for shard in 0..plan.shards {
            let writers = ranks
                .iter()
                .filter(|part| part.shards.get(group) == Some(&(shard, true)))
                .count();
            if writers != 1 {
                return Err(Refused::Writers {
                    group,
                    shard,
                    writers,
                });
            }
        }
    }
    let model = model_identity(
        first.model.clone(),
        &scheduler.hashing,
        first.plan.chunk_tokens(),
    )
    .map_err(Refused::Model)?;
    let model = match fidelity {
        Fidelity::Exact => model,
        lossy => model
            .with("fidelity", lossy.name().into())
            .map_err(Refused::Model)?,
    };
    let unshared = if scheduler.hashing.random_root {
        Some("RandomHashSeed".to_owned())
    } else {
        unshared_reasons(&model.to_value()).into_iter().next()
    };
    let portable = Portable::of(&first.layout, &first.plan);
    let (portable, object_layout) = portable.map_or((None, first.layout_id), |(portable, id)| {
        (Some(Arc::new(portable)), id)
    });
    Ok(Domain {
        model_id: ModelId(model.identity()),
        layout_id: first.layout_id,
        object_layout,
        portable,
        model,
        layout: first.layout.clone(),
        plan: first.plan.clone(),
        form: form(&first.layout, &first.plan),
        not_shareable: unshared.map(|why| format!("NotShareable/{why}")),
    })
}

/// Reasons why a model descriptor identifies only one instance: `{"kind": "unshared", "reason": name}` anywhere in it, in key order. An
/// instance name chosen by a person is not unique: another instance with other weights could have it too.
fn unshared_reasons(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) if fields.get("kind").is_some_and(|kind| kind == "unshared") => {
            let reason = fields.get("reason").and_then(Value::as_str);
            let named = reason.unwrap_or("NoFingerprint");
            vec![named.chars().take(REASON_MAX).collect()]
        }
        Value::Object(fields) => fields.values().flat_map(unshared_reasons).collect(),
        Value::Array(list) => list.iter().flat_map(unshared_reasons).collect(),
        _ => Vec::new(),
    }
}

/// The worker's model descriptor with the scheduler's hashing added. Its identity is the [`ModelId`].
pub fn model_identity(
    model: Descriptor,
    hashing: &Hashing,
    chunk_tokens: u32,
) -> Result<Descriptor, BadDescriptor> {
    let hashing = json!({
        "algorithm": hashing.algorithm,
        "root": hashing.root,
        "block_tokens": hashing.block_tokens,
    });
    model
        .with("hashing", hashing)?
        .with("chunk_tokens", chunk_tokens.into())
}

fn check_world(register: &Register) -> Result<(), Refused> {
    if register.world == 0 || register.world > MAX_WORLD {
        return Err(Refused::World(register.world));
    }
    if register.local_world != 0 && register.local_world != register.world {
        return Err(Refused::MultiNode {
            local: register.local_world,
            world: register.world,
        });
    }
    Ok(())
}

fn group_plan(i: usize, group: &Group) -> Result<GroupPlan, Refused> {
    let kind = match group.kind.as_str() {
        "full" => GroupKind::Full,
        "window" => GroupKind::Window,
        "state" => GroupKind::State,
        other => {
            return Err(Refused::Kind {
                group: i,
                kind: other.chars().take(32).collect(),
            });
        }
    };
    if group.shard >= group.shards {
        return Err(Refused::Shard {
            group: i,
            shard: group.shard,
            shards: group.shards,
        });
    }
    Ok(GroupPlan {
        kind,
        block_tokens: group.block_tokens,
        block_bytes: group.block_bytes,
        shards: group.shards,
        window_tokens: group.window_tokens,
    })
}

fn describe(plan: &SectionPlan) -> serde_json::Value {
    let groups: Vec<_> = plan
        .groups()
        .iter()
        .map(|g| {
            json!({
                "kind": g.kind.name(), "block_tokens": g.block_tokens, "block_bytes": g.block_bytes,
                "shards": g.shards, "window_tokens": g.window_tokens,
            })
        })
        .collect();
    json!({ "chunk_tokens": plan.chunk_tokens(), "scheduler_block_tokens": plan.scheduler_block_tokens(), "groups": groups })
}

fn is_minor(version: &str) -> bool {
    let digits = |s: &str| !s.is_empty() && s.len() <= 3 && s.bytes().all(|b| b.is_ascii_digit());
    version
        .split_once('.')
        .is_some_and(|(major, minor)| digits(major) && digits(minor))
}
