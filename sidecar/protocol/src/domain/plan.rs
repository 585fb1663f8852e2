//! How a chunk is divided into sections, and the slot sizes of sections.

use crate::table::ROW_BYTES;
use serde::Deserialize;

/// Maximum KV groups of a domain. GRANT names groups in a 32-bit map.
pub const MAX_GROUPS: usize = 32;
/// Maximum sections of a domain. A chunk record names sections in a 128-bit map.
pub const MAX_SECTIONS: usize = 128;
/// Longest opaque object: a value of 1 GiB, with its key and header.
pub const MAX_OPAQUE_BYTES: u64 = (1 << 30) + (256 << 10);
/// Length of an opaque object's pieces, unless it would have more than [`MAX_SECTIONS`]. The smallest segment holds one.
pub(super) const PIECE_BYTES_MIN: u64 = 4 << 20;
/// Longest section. A reference has a 32-bit length.
const MAX_SECTION_BYTES: u64 = u32::MAX as u64;

/// Which tokens' KV a group's blocks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// All tokens. A chunk without this section cannot be read.
    Full,
    /// Only the last tokens (sliding window).
    Window,
    /// The state behind its last token (linear attention, Mamba, short convolutions). vLLM has it at few boundaries.
    State,
}

impl GroupKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window => "window",
            Self::State => "state",
        }
    }
}

/// One KV group over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupPlan {
    pub kind: GroupKind,
    pub block_tokens: u32,
    /// Bytes per block over all layers, on one rank.
    pub block_bytes: u64,
    /// Number of shards over all ranks.
    pub shards: u32,
    /// Tokens that the window spans; 0 for the other kinds.
    pub window_tokens: u32,
}

/// Why groups do not form a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadPlan {
    /// No groups, or too many.
    #[error("{0} KV groups; 1 to {MAX_GROUPS} are served")]
    Groups(usize),
    #[error("{0} sections (groups times shards); at most {MAX_SECTIONS} are served")]
    Sections(u64),
    #[error("group {0}: tokens of a block, bytes of a block and shards must not be 0")]
    Zero(usize),
    /// A window group without a window, or another one with one.
    #[error("group {0}: a window group needs window_tokens, other kinds must not have any")]
    Window(usize),
    /// A chunk has the state at its end only.
    #[error(
        "group {group}: states need chunks of one block, {block_tokens} tokens, and these have {chunk_tokens}"
    )]
    State {
        group: usize,
        chunk_tokens: u32,
        block_tokens: u32,
    },
    /// A chunk is not a whole number of blocks.
    #[error(
        "group {group}: a chunk of {chunk_tokens} tokens is not a whole number of blocks of {block_tokens}"
    )]
    Chunk {
        group: usize,
        chunk_tokens: u32,
        block_tokens: u32,
    },
    /// Tails are counted in scheduler blocks, so groups and chunks must divide evenly.
    #[error(
        "a scheduler block of {0} tokens is not a whole number of every group's blocks, or a chunk is not a whole number of scheduler blocks"
    )]
    SchedulerBlock(u32),
    /// A section is longer than a reference can describe.
    #[error("group {group}: a section of {bytes} bytes is longer than {MAX_SECTION_BYTES}")]
    SectionBytes {
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
    /// Index of each group's first section.
    first: Vec<u32>,
    sections: u32,
    /// Length of the last section of an opaque object.
    last_bytes: Option<u64>,
}

impl SectionPlan {
    /// Validates the groups and numbers their sections.
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
            if g.kind == GroupKind::State && chunk_tokens != g.block_tokens {
                return Err(BadPlan::State {
                    group: i,
                    chunk_tokens,
                    block_tokens: g.block_tokens,
                });
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
            last_bytes: None,
        })
    }

    /// Plan of an opaque object of `bytes` bytes: pieces of equal length, and a last one with the rest. `None` if it is empty or longer than
    /// [`MAX_OPAQUE_BYTES`].
    pub fn opaque(bytes: u64) -> Option<Self> {
        if bytes == 0 || bytes > MAX_OPAQUE_BYTES {
            return None;
        }
        let piece = PIECE_BYTES_MIN.max(bytes.div_ceil(MAX_SECTIONS as u64).next_power_of_two());
        let pieces = u32::try_from(bytes.div_ceil(piece)).ok()?;
        let group = GroupPlan {
            kind: GroupKind::Full,
            block_tokens: 1,
            block_bytes: piece.min(bytes),
            shards: pieces,
            window_tokens: 0,
        };
        let plan = Self::new(1, 1, vec![group]).ok()?;
        Some(Self {
            last_bytes: Some(bytes - u64::from(pieces - 1) * piece),
            ..plan
        })
    }

    pub fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// A tail is a multiple of this many tokens.
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

    /// Index of the section of a group's shard.
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

    /// Whether a chunk may have this many tokens: a full chunk, or a tail of whole scheduler blocks.
    pub fn valid_tokens(&self, tokens: u32) -> bool {
        tokens > 0
            && tokens <= self.chunk_tokens
            && tokens.is_multiple_of(self.scheduler_block_tokens)
    }

    /// Bytes of a section of a chunk with `tokens` tokens (whole blocks, at most a full chunk); 0 for an unknown section.
    pub fn section_bytes(&self, section: u32, tokens: u32) -> u64 {
        if let Some(last) = self.last_bytes
            && section + 1 == self.sections
        {
            return last;
        }
        self.locate(section)
            .and_then(|(group, _)| self.groups.get(group))
            .map_or(0, |g| {
                u64::from(tokens.min(self.chunk_tokens) / g.block_tokens) * g.block_bytes
            })
    }

    /// Bytes of a group's section in a full chunk.
    pub fn full_bytes(&self, group: usize) -> u64 {
        self.first
            .get(group)
            .map_or(0, |section| self.section_bytes(*section, self.chunk_tokens))
    }

    /// Bytes of the longest full section. A segment must hold it.
    pub fn longest_section_bytes(&self) -> u64 {
        (0..self.groups.len())
            .map(|group| self.full_bytes(group))
            .max()
            .unwrap_or(0)
    }

    /// Rows of the slot for a section of a chunk with `tokens` tokens.
    pub fn section_rows(&self, section: u32, tokens: u32) -> u32 {
        let bytes = self.section_bytes(section, tokens);
        let rows = u32::try_from(bytes.div_ceil(ROW_BYTES)).unwrap_or(u32::MAX);
        if self.last_bytes.is_some() {
            return coarse_rows(rows);
        }
        let group = self.locate(section).map_or(0, |(group, _)| group);
        let mut sizes = slot_rows(self.full_bytes(group)).into_iter().rev();
        sizes.find(|size| *size >= rows).unwrap_or(rows)
    }

    /// Bytes of the slots of a chunk with all its sections.
    pub fn slot_bytes(&self, tokens: u32) -> u64 {
        let rows = (0..self.sections).map(|section| u64::from(self.section_rows(section, tokens)));
        rows.sum::<u64>() * ROW_BYTES
    }

    /// Bytes of a chunk with all its sections.
    pub fn chunk_bytes(&self, tokens: u32) -> u64 {
        (0..self.sections)
            .map(|section| self.section_bytes(section, tokens))
            .sum()
    }

    /// Bitmap of all groups.
    pub fn all_groups(&self) -> u32 {
        u32::MAX >> (MAX_GROUPS - self.groups.len())
    }

    /// Bitmap of the groups whose sections every readable chunk has.
    pub fn full_groups(&self) -> u32 {
        self.groups
            .iter()
            .enumerate()
            .filter(|(_, g)| g.kind == GroupKind::Full)
            .fold(0, |map, (i, _)| map | 1 << i)
    }

    /// Bitmap of the sections of a bitmap of groups. Unknown groups are ignored.
    pub fn section_map(&self, groups: u32) -> u128 {
        (0..self.sections)
            .filter(|s| self.locate(*s).is_some_and(|(g, _)| groups >> g & 1 == 1))
            .fold(0, |map, s| map | 1 << s)
    }
}

/// Slot size of a piece of an opaque object: four sizes per doubling, so that few sizes share the arena and at most a quarter is unused.
fn coarse_rows(rows: u32) -> u32 {
    let step = (rows.max(4) - 1).ilog2().saturating_sub(2);
    rows.next_multiple_of(1 << step)
}

/// Slot sizes, in rows of 64 KiB, for sections whose full length is `full_bytes`: the full size first, then repeated halves for tails, down
/// to one row.
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
