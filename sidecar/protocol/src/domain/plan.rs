//! How a chunk is cut into sections, and which slot sizes they take.

use crate::table::ROW_BYTES;

/// KV groups of a domain: GRANT names them in a 32-bit map.
pub const MAX_GROUPS: usize = 32;
/// Sections of a domain: a chunk record names them in a 128-bit map.
pub const MAX_SECTIONS: usize = 128;
/// Longest section: a reference carries its length in 32 bits.
const MAX_SECTION_BYTES: u64 = u32::MAX as u64;

/// What the blocks of a group hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Every token's KV counts: a chunk without this section cannot be read.
    Full,
    /// Only the last tokens count.
    Window,
}

impl GroupKind {
    /// Name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window => "window",
        }
    }
}

/// One KV group over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupPlan {
    /// What its blocks hold.
    pub kind: GroupKind,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of a block over all layers, on one rank.
    pub block_bytes: u64,
    /// Shards over all ranks.
    pub shards: u32,
    /// Tokens a window reaches back; 0 for `Full`.
    pub window_tokens: u32,
}

/// Why groups make no plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadPlan {
    /// No group, or too many.
    #[error("{0} KV groups; 1 to {MAX_GROUPS} are served")]
    Groups(usize),
    /// Too many sections.
    #[error("{0} sections (groups times shards); at most {MAX_SECTIONS} are served")]
    Sections(u64),
    /// A size is zero.
    #[error("group {0}: tokens of a block, bytes of a block and shards must not be 0")]
    Zero(usize),
    /// A window without a reach, or a reach without a window.
    #[error("group {0}: a window group needs window_tokens, a full one must not have any")]
    Window(usize),
    /// Chunks are no whole number of blocks.
    #[error(
        "group {group}: a chunk of {chunk_tokens} tokens is no whole number of blocks of {block_tokens}"
    )]
    Chunk {
        /// Group.
        group: usize,
        /// Tokens of a chunk.
        chunk_tokens: u32,
        /// Tokens of a block.
        block_tokens: u32,
    },
    /// Tails are counted in scheduler blocks.
    #[error(
        "a scheduler block of {0} tokens is no whole number of every group's blocks, or a chunk no whole number of it"
    )]
    SchedulerBlock(u32),
    /// A section is longer than a reference can say.
    #[error("group {group}: a section of {bytes} bytes is longer than {MAX_SECTION_BYTES}")]
    SectionBytes {
        /// Group.
        group: usize,
        /// Bytes of a full section.
        bytes: u128,
    },
}

/// The sections of a domain: groups in order, shards within a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SectionPlan {
    chunk_tokens: u32,
    scheduler_block_tokens: u32,
    groups: Vec<GroupPlan>,
    /// Number of the first section of each group.
    first: Vec<u32>,
    sections: u32,
}

impl SectionPlan {
    /// Checks the groups and numbers their sections.
    pub fn new(
        chunk_tokens: u32,
        scheduler_block_tokens: u32,
        groups: Vec<GroupPlan>,
    ) -> Result<Self, BadPlan> {
        if groups.is_empty() || groups.len() > MAX_GROUPS {
            return Err(BadPlan::Groups(groups.len()));
        }
        let sections: u64 = groups.iter().map(|g| u64::from(g.shards)).sum();
        if sections > MAX_SECTIONS as u64 {
            return Err(BadPlan::Sections(sections));
        }
        let block = scheduler_block_tokens;
        if block == 0 || chunk_tokens == 0 || !chunk_tokens.is_multiple_of(block) {
            return Err(BadPlan::SchedulerBlock(block));
        }
        let mut first = Vec::with_capacity(groups.len());
        let mut next = 0;
        for (i, g) in groups.iter().enumerate() {
            if g.block_tokens == 0 || g.block_bytes == 0 || g.shards == 0 {
                return Err(BadPlan::Zero(i));
            }
            if (g.kind == GroupKind::Window) != (g.window_tokens > 0) {
                return Err(BadPlan::Window(i));
            }
            if !chunk_tokens.is_multiple_of(g.block_tokens) {
                return Err(BadPlan::Chunk {
                    group: i,
                    chunk_tokens,
                    block_tokens: g.block_tokens,
                });
            }
            if !block.is_multiple_of(g.block_tokens) {
                return Err(BadPlan::SchedulerBlock(block));
            }
            let bytes = u128::from(chunk_tokens / g.block_tokens) * u128::from(g.block_bytes);
            if bytes > u128::from(MAX_SECTION_BYTES) {
                return Err(BadPlan::SectionBytes { group: i, bytes });
            }
            first.push(next);
            next += g.shards;
        }
        Ok(Self {
            chunk_tokens,
            scheduler_block_tokens: block,
            groups,
            first,
            sections: next,
        })
    }

    /// Tokens of a full chunk.
    pub fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// Tokens that a tail is a multiple of.
    pub fn scheduler_block_tokens(&self) -> u32 {
        self.scheduler_block_tokens
    }

    /// The groups, in vLLM's order.
    pub fn groups(&self) -> &[GroupPlan] {
        &self.groups
    }

    /// Number of sections of a chunk.
    pub fn sections(&self) -> u32 {
        self.sections
    }

    /// Number of the section of a group's shard.
    pub fn section(&self, group: usize, shard: u32) -> Option<u32> {
        let shards = self.groups.get(group)?.shards;
        (shard < shards).then(|| self.first.get(group).map(|f| f + shard))?
    }

    /// Group and shard of a section.
    pub fn locate(&self, section: u32) -> Option<(usize, u32)> {
        if section >= self.sections {
            return None;
        }
        let group = self
            .first
            .partition_point(|f| *f <= section)
            .checked_sub(1)?;
        Some((group, section - self.first.get(group)?))
    }

    /// Is this a token count that a chunk may have: a full chunk, or a tail of whole scheduler blocks?
    pub fn valid_tokens(&self, tokens: u32) -> bool {
        tokens > 0
            && tokens <= self.chunk_tokens
            && tokens.is_multiple_of(self.scheduler_block_tokens)
    }

    /// Bytes of a section of a chunk with `tokens` tokens (whole blocks; at most a full chunk). 0 for an unknown section.
    pub fn section_bytes(&self, section: u32, tokens: u32) -> u64 {
        self.locate(section)
            .and_then(|(group, _)| self.groups.get(group))
            .map_or(0, |g| {
                u64::from(tokens.min(self.chunk_tokens) / g.block_tokens) * g.block_bytes
            })
    }

    /// Bytes of a full chunk's section of a group.
    pub fn full_bytes(&self, group: usize) -> u64 {
        self.first
            .get(group)
            .map_or(0, |section| self.section_bytes(*section, self.chunk_tokens))
    }

    /// Bytes of the longest full section: what a segment must hold.
    pub fn longest_section_bytes(&self) -> u64 {
        (0..self.groups.len())
            .map(|group| self.full_bytes(group))
            .max()
            .unwrap_or(0)
    }

    /// Bytes of a chunk with all its sections.
    pub fn chunk_bytes(&self, tokens: u32) -> u64 {
        (0..self.sections)
            .map(|section| self.section_bytes(section, tokens))
            .sum()
    }

    /// Map of all groups, a bit each.
    pub fn all_groups(&self) -> u32 {
        u32::MAX >> (MAX_GROUPS - self.groups.len())
    }

    /// Map of the groups whose sections every readable chunk has.
    pub fn full_groups(&self) -> u32 {
        self.groups
            .iter()
            .enumerate()
            .filter(|(_, g)| g.kind == GroupKind::Full)
            .fold(0, |map, (i, _)| map | 1 << i)
    }

    /// Map of the sections (128 bits, low word first) of a map of groups. Unknown groups are ignored.
    pub fn section_map(&self, groups: u32) -> [u64; 2] {
        let map = (0..self.sections)
            .filter(|s| self.locate(*s).is_some_and(|(g, _)| groups >> g & 1 == 1))
            .fold(0u128, |map, s| map | 1 << s);
        [map as u64, (map >> 64) as u64]
    }
}

/// Slot sizes, in rows of 64 KiB, for sections whose full length is `full_bytes`: the full one first, then its halvings for tails,
/// down to one row.
pub fn slot_rows(full_bytes: u64) -> Vec<u32> {
    let rows = |bytes: u64| u32::try_from(bytes.div_ceil(ROW_BYTES)).unwrap_or(u32::MAX);
    let mut sizes = Vec::new();
    let mut bytes = full_bytes.max(1);
    loop {
        let size = rows(bytes);
        if sizes.last() != Some(&size) {
            sizes.push(size);
        }
        if size <= 1 {
            return sizes;
        }
        bytes = bytes.div_ceil(2);
    }
}
