//! Sizes of a model's KV, and what a tier holds of it.

use super::model::{Layer, Model, Span};
use super::{Flags, KvDtype, SizeError};
use crate::config::{ByteSize, Config};
use crate::domain::{GroupKind, GroupPlan, MAX_SECTIONS, SectionPlan, slot_rows};
use crate::geometry::Geometry;
use crate::layouts::{LAYOUTS_JSON, LayoutTable, Shards, Spec};
use crate::object::{ALIGN, HEADER_BYTES};
use serde::Serialize;

/// Sizes of a model's KV. Without other words a number of bytes is over all ranks, with replicas that are stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `model_type` of the language model.
    pub model: String,
    /// Type of the numbers in KV.
    pub kv_dtype: &'static str,
    pub tensor_parallel: u32,
    pub block_tokens: u32,
    /// Tokens of a chunk: whole blocks.
    pub chunk_tokens: u32,
    pub groups: Vec<Group>,
    /// Bytes per token, without state.
    pub token_bytes: u64,
    /// The same on one rank.
    pub rank_token_bytes: u64,
    pub chunk_bytes: u64,
    /// Needs of one prompt, if its length is known.
    pub prompt: Option<Prompt>,
    /// What each tier holds. Empty without sizes of tiers.
    pub tiers: Vec<TierSize>,
}

/// Layers of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Group {
    /// `full`, `window`, `chunked` or `state`.
    pub kind: &'static str,
    /// vLLM's class of the layers' KV.
    pub spec: &'static str,
    pub layers: u64,
    /// Distinct parts over the ranks: sections of a chunk.
    pub shards: u32,
    /// Tokens of a window, sliding or not, else 0.
    pub window_tokens: u32,
    /// Bytes per token; 0 for state.
    pub token_bytes: u64,
    pub rank_token_bytes: u64,
    pub chunk_bytes: u64,
    /// Bytes of one copy of the state; 0 for other kinds.
    pub state_bytes: u64,
    pub rank_state_bytes: u64,
}

/// What one prompt needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Prompt {
    pub tokens: u64,
    /// Tokens in whole blocks; the rest is not stored.
    pub stored_tokens: u64,
    /// Chunks, with the tail.
    pub chunks: u64,
    /// Bytes that are stored at most: every chunk with the sections of all groups.
    pub stored_bytes: u64,
    /// Bytes that a load of the prompt copies: of windows only the last tokens, and one state.
    pub loaded_bytes: u64,
}

/// What a tier holds at least.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TierSize {
    /// `memory` or `disk`.
    pub tier: &'static str,
    pub size_bytes: u64,
    pub chunks: u64,
    pub tokens: u64,
    /// Prompts without a common prefix, if their length is known.
    pub prompts: Option<u64>,
    /// Why the tier holds nothing. Empty if it holds something.
    pub reason: String,
}

impl Layer {
    fn kind(&self) -> &'static str {
        match self {
            Self::Heads {
                span: Span::Window(_),
                ..
            } => "window",
            Self::Heads {
                span: Span::Chunk(_),
                ..
            } => "chunked",
            Self::Heads { .. } | Self::Latent { .. } => "full",
            Self::State(_) => "state",
        }
    }

    /// The name in the layout table.
    fn spec(&self) -> &'static str {
        match self {
            Self::Heads {
                span: Span::Full, ..
            } => "FullAttentionSpec",
            Self::Heads {
                span: Span::Window(_),
                ..
            } => "SlidingWindowSpec",
            Self::Heads {
                span: Span::Chunk(_),
                ..
            } => "ChunkedLocalAttentionSpec",
            Self::Latent { .. } => "MLAAttentionSpec",
            Self::State(_) => "MambaSpec",
        }
    }

    /// Bytes per token on one of `tp` ranks.
    fn rank_token_bytes(&self, tp: u32, kv: KvDtype) -> Result<u64, SizeError> {
        match self {
            Self::Heads { heads, .. } => {
                let ranks = u64::from(tp);
                if !heads.count.is_multiple_of(ranks) && !ranks.is_multiple_of(heads.count) {
                    let what = format!("the {} KV heads", heads.count);
                    return Err(SizeError::BadTensorParallel { what, tp });
                }
                Ok((heads.count / ranks).max(1) * 2 * heads.numbers * kv.bytes())
            }
            Self::Latent { numbers } => Ok(numbers * kv.bytes()),
            Self::State(_) => Ok(0),
        }
    }
}

impl Group {
    fn new(
        layer: &Layer,
        layers: u64,
        row: &Spec,
        flags: &Flags,
        dtypes: (KvDtype, KvDtype),
    ) -> Result<Self, SizeError> {
        let (kv, model) = dtypes;
        let rank_token_bytes = layers * layer.rank_token_bytes(flags.tp, kv)?;
        let rank_state_bytes = match layer {
            Layer::State(state) => layers.saturating_mul(state.rank_bytes(flags.tp, model)?),
            _ => 0,
        };
        let shards = match row.shards {
            Some(Shards::One) => 1,
            // The connector stores replicas of a KV head: vLLM does not say which ranks hold the same.
            Some(Shards::KvHeads) | None => flags.tp,
        };
        Ok(Self {
            kind: layer.kind(),
            spec: layer.spec(),
            layers,
            shards,
            window_tokens: match layer {
                Layer::Heads {
                    span: Span::Window(tokens) | Span::Chunk(tokens),
                    ..
                } => *tokens,
                _ => 0,
            },
            token_bytes: rank_token_bytes.saturating_mul(u64::from(shards)),
            rank_token_bytes,
            chunk_bytes: 0,
            state_bytes: rank_state_bytes.saturating_mul(u64::from(shards)),
            rank_state_bytes,
        })
    }

    /// The KV groups that vLLM splits these layers into, with at most `most` layers each.
    fn plans(
        &self,
        kind: GroupKind,
        most: u64,
        block_tokens: u32,
    ) -> impl Iterator<Item = GroupPlan> {
        let groups = self.layers.div_ceil(most);
        let layer_bytes = match self.rank_state_bytes {
            0 => self.rank_token_bytes / self.layers * u64::from(block_tokens),
            state => state / self.layers,
        };
        (0..groups).map(move |group| GroupPlan {
            kind,
            block_tokens,
            block_bytes: (self.layers - group)
                .div_ceil(groups)
                .saturating_mul(layer_bytes),
            shards: self.shards,
            window_tokens: self.window_tokens,
        })
    }
}

/// Tokens of vLLM's block for models with states: the smallest whole number of blocks whose KV is at least as long as a state. `None` for
/// other models.
fn unified_block_tokens(
    layers: &[Layer],
    flags: &Flags,
    dtypes: (KvDtype, KvDtype),
) -> Result<Option<u32>, SizeError> {
    let (kv, model) = dtypes;
    let (mut state_bytes, mut token_bytes) = (0, 0);
    for layer in layers {
        match layer {
            Layer::State(state) => {
                state_bytes = state.rank_bytes(flags.tp, model)?.max(state_bytes)
            }
            layer => token_bytes = layer.rank_token_bytes(flags.tp, kv)?.max(token_bytes),
        }
    }
    if state_bytes == 0 || token_bytes == 0 {
        return Ok(None);
    }
    let tokens = state_bytes
        .div_ceil(token_bytes)
        .next_multiple_of(u64::from(flags.block_size));
    Ok(Some(u32::try_from(tokens).unwrap_or(u32::MAX)))
}

impl Report {
    pub(super) fn new(
        model: &Model,
        flags: &Flags,
        config: Option<&Config>,
    ) -> Result<Self, SizeError> {
        let table =
            LayoutTable::parse(LAYOUTS_JSON).map_err(|e| SizeError::LayoutTable(e.to_string()))?;
        let dtypes = model.dtypes(flags.dtype)?;
        let defaults = Config::default();
        let chunk = flags
            .chunk_tokens
            .unwrap_or(config.unwrap_or(&defaults).cache.chunk_tokens);
        let mut kinds: Vec<(Layer, u64)> = Vec::new();
        for layer in &model.layers {
            match kinds.iter_mut().find(|(kind, _)| kind == layer) {
                Some((_, count)) => *count += 1,
                None => kinds.push((*layer, 1)),
            }
        }
        let unified = unified_block_tokens(&model.layers, flags, dtypes)?;
        let block_tokens = unified.unwrap_or(flags.block_size);
        // A chunk has the state at its end only.
        let chunk_tokens = unified.unwrap_or(chunk.next_multiple_of(flags.block_size));
        let no_row =
            |layer: &Layer| SizeError::LayoutTable(format!("no group for {}", layer.spec()));
        let (mut groups, mut served) = (Vec::new(), Vec::new());
        for (layer, layers) in &kinds {
            let row = table.spec(layer.spec());
            let row = row.ok_or_else(|| no_row(layer))?;
            let mut group = Group::new(layer, *layers, row, flags, dtypes)?;
            group.chunk_bytes = group
                .token_bytes
                .saturating_mul(u64::from(chunk_tokens))
                .saturating_add(group.state_bytes);
            served.push(row.group.ok_or_else(|| no_row(layer))?);
            groups.push(group);
        }
        let sum = |bytes: fn(&Group) -> u64| groups.iter().map(bytes).fold(0, u64::saturating_add);
        let mut report = Self {
            model: model.name.clone(),
            kv_dtype: dtypes.0.name(),
            tensor_parallel: flags.tp,
            block_tokens,
            chunk_tokens,
            token_bytes: sum(|group| group.token_bytes),
            rank_token_bytes: sum(|group| group.rank_token_bytes),
            chunk_bytes: sum(|group| group.chunk_bytes),
            groups,
            prompt: None,
            tiers: Vec::new(),
        };
        report.prompt = flags.tokens.map(|tokens| report.prompt(tokens));
        let plan = report.plan(&served)?;
        let disk = config
            .filter(|config| config.disk.path.is_some())
            .map(|config| config.disk.size);
        let memory = flags.memory.or(config.map(|config| config.memory.size));
        let entries = config.unwrap_or(&defaults).limits.index_entries;
        report
            .tiers
            .extend(memory.map(|size| report.memory(&plan, size, entries)));
        report
            .tiers
            .extend(flags.disk.or(disk).map(|size| report.disk(&plan, size)));
        Ok(report)
    }

    fn prompt(&self, tokens: u64) -> Prompt {
        let block = u64::from(self.block_tokens);
        let stored_tokens = tokens - tokens % block;
        let loaded = |group: &Group| {
            let window = u64::from(group.window_tokens);
            let tokens = match group.kind {
                "chunked" => stored_tokens % window.max(1),
                "window" => stored_tokens.min(window.next_multiple_of(block)),
                _ => stored_tokens,
            };
            tokens
                .saturating_mul(group.token_bytes)
                .saturating_add(group.state_bytes)
        };
        let chunks = stored_tokens.div_ceil(u64::from(self.chunk_tokens));
        let states = self.groups.iter().map(|group| group.state_bytes);
        Prompt {
            tokens,
            stored_tokens,
            chunks,
            stored_bytes: stored_tokens
                .saturating_mul(self.token_bytes)
                .saturating_add(chunks.saturating_mul(states.sum())),
            loaded_bytes: self.groups.iter().map(loaded).fold(0, u64::saturating_add),
        }
    }

    /// The sections of a chunk. Where layers differ, vLLM makes its KV groups equally long: it splits the larger kinds into groups of as many
    /// layers as the smallest kind has, unless the kinds are nearly equal.
    fn plan(&self, served: &[GroupKind]) -> Result<SectionPlan, SizeError> {
        let layers = || self.groups.iter().map(|group| group.layers);
        let (least, most) = (layers().min().unwrap_or(1), layers().max().unwrap_or(1));
        let size = if 2 * most < 3 * least { most } else { least };
        let plans = self
            .groups
            .iter()
            .zip(served)
            .flat_map(|(group, kind)| group.plans(*kind, size, self.block_tokens));
        let plans = plans.take(MAX_SECTIONS + 1).collect();
        Ok(SectionPlan::new(
            self.chunk_tokens,
            self.block_tokens,
            plans,
        )?)
    }

    /// What an arena of this size holds, with slots of whole rows in segments of one slot size.
    fn memory(&self, plan: &SectionPlan, size: ByteSize, index_entries: u32) -> TierSize {
        let geometry = Geometry::new(0, size.0, index_entries);
        let segments = u64::from(geometry.rows / geometry.segment_rows());
        let slots: Vec<(u64, u64)> = (plan.groups().iter().enumerate())
            .map(|(group, sections)| {
                let rows = slot_rows(plan.full_bytes(group))
                    .first()
                    .copied()
                    .unwrap_or(1);
                (
                    u64::from(sections.shards),
                    u64::from(geometry.segment_rows() / rows),
                )
            })
            .collect();
        if slots.iter().any(|(_, slots)| *slots == 0) {
            let reason = format!(
                "SectionTooLarge: a section of {} does not fit into a segment of {}: raise memory.size or lower cache.chunkTokens",
                ByteSize(plan.longest_section_bytes()).short(),
                ByteSize(geometry.segment_bytes).short()
            );
            return TierSize {
                reason,
                ..self.tier("memory", size, 0)
            };
        }
        let fits = |chunks: u64| {
            let needed = slots
                .iter()
                .map(|(shards, slots)| (chunks * shards).div_ceil(*slots));
            needed.sum::<u64>() <= segments
        };
        let (mut chunks, mut too_many) = (0, u64::from(geometry.chunks) + 1);
        while too_many - chunks > 1 {
            let half = chunks.midpoint(too_many);
            match fits(half) {
                true => chunks = half,
                false => too_many = half,
            }
        }
        self.tier("memory", size, chunks)
    }

    /// What a disk of this size holds. Slots of the disk waste at most 1/16 of their bytes.
    fn disk(&self, plan: &SectionPlan, size: ByteSize) -> TierSize {
        let (tokens, blocks) = (
            u64::from(self.chunk_tokens),
            u64::from(self.chunk_tokens / self.block_tokens),
        );
        let meta = 64 * u64::from(plan.sections()) + 32 * blocks + 4 * tokens;
        let head = (HEADER_BYTES as u64 + meta).next_multiple_of(ALIGN);
        let sections = (plan.groups().iter().enumerate()).map(|(group, sections)| {
            plan.full_bytes(group).next_multiple_of(ALIGN) * u64::from(sections.shards)
        });
        let object = head + sections.sum::<u64>();
        self.tier(
            "disk",
            size,
            size.0 / object.saturating_add(object.div_ceil(15)),
        )
    }

    fn tier(&self, tier: &'static str, size: ByteSize, chunks: u64) -> TierSize {
        TierSize {
            tier,
            size_bytes: size.0,
            chunks,
            tokens: chunks.saturating_mul(u64::from(self.chunk_tokens)),
            prompts: self.prompt.map(|prompt| chunks / prompt.chunks.max(1)),
            reason: String::new(),
        }
    }
}
