//! Objects that every topology can read: with any number of ranks, any block size, and the backends and versions of the engine that give
//! the bytes the same meaning.
//!
//! The sections of a group are the ranks' parts of its blocks, in the order of the ranks' caches. In an object, each pipeline stage of the
//! group has one section instead: `[head][layer][token][state]` (`pages::order` of the crate of kernels), with the heads of all ranks.

use super::{Descriptor, SectionPlan};
use crate::key::LayoutId;
use crate::layouts::{LAYOUTS_JSON, Layout, LayoutTable};
use serde_json::json;

/// Most bytes of a chunk and a block of a portable layout. They are in memory of the sidecar during a conversion.
pub const MAX_PORTABLE_BYTES: u64 = 128 << 20;

/// How the sections of each group become those of an object, in order of the groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portable {
    /// Order of the dimensions of a block.
    pub layout: Layout,
    pub groups: Vec<PortableGroup>,
}

/// The sizes of a block of one rank, and how many ranks have a part of the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortableGroup {
    pub layers: u32,
    /// Kernel blocks per block.
    pub kernel_blocks: u32,
    pub heads: u32,
    /// Tokens of a kernel block; 1 if only the backend knows the tokens of a block.
    pub tokens: u32,
    /// Bytes of one token of one head in one layer, or of a kernel block's.
    pub state_bytes: u32,
    /// Parts of the heads: shards of a pipeline stage.
    pub parts: u32,
}

impl PortableGroup {
    /// Stage and part of a shard.
    pub fn locate(&self, shard: u32) -> (u32, u32) {
        (shard / self.parts, shard % self.parts)
    }
}

impl Portable {
    /// What the connector says of a layout, and the identity of the layout in objects. `None`: the objects have the layout of the ranks.
    pub(super) fn of(layout: &Descriptor, plan: &SectionPlan) -> Option<(Self, LayoutId)> {
        let block_bytes = plan.groups().iter().map(|group| group.block_bytes).max();
        let chunk_bytes = plan.chunk_bytes(plan.chunk_tokens());
        if chunk_bytes.saturating_add(block_bytes?) > MAX_PORTABLE_BYTES {
            return None;
        }
        let described = layout.to_value();
        let groups = described.get("groups")?.as_array()?;
        let stages = u32::try_from(described.get("parallel")?.get("pp")?.as_u64()?).ok()?;
        if groups.len() != plan.groups().len() || stages == 0 {
            return None;
        }
        let (mut converted, mut meanings) = (Vec::new(), Vec::new());
        for (group, plan) in groups.iter().zip(plan.groups()) {
            let described = group.get("portable")?;
            let size = |name| u32::try_from(described.get(name)?.as_u64()?).ok();
            let group = PortableGroup {
                layers: size("layers")?,
                kernel_blocks: size("kernel_blocks")?,
                heads: size("heads")?,
                tokens: size("tokens")?,
                state_bytes: size("state_bytes")?,
                parts: plan.shards / stages,
            };
            let sizes = [group.layers, group.kernel_blocks, group.heads, group.tokens];
            let bytes = sizes
                .iter()
                .try_fold(u64::from(group.state_bytes), |bytes, size| {
                    bytes.checked_mul(u64::from(*size))
                });
            if bytes != Some(plan.block_bytes) || !plan.shards.is_multiple_of(stages) {
                return None;
            }
            meanings.push(json!({
                "meaning": described.get("meaning")?,
                "layers": group.layers,
                "heads": u64::from(group.heads) * u64::from(group.parts),
                "state_bytes": group.state_bytes,
                "kind": plan.kind.name(),
                "window_tokens": plan.window_tokens,
            }));
            converted.push(group);
        }
        let table = LayoutTable::parse(LAYOUTS_JSON).ok()?;
        let order = table.layout(described.get("kv_layout")?.as_str()?)?;
        let identity = json!({
            "objects": "portable",
            "engine": described.get("engine")?,
            "stages": stages,
            "groups": meanings,
        });
        let identity = Descriptor::parse(&identity.to_string()).ok()?.identity();
        let portable = Self {
            layout: order.clone(),
            groups: converted,
        };
        Some((portable, LayoutId(identity)))
    }
}
