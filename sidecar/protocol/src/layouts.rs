//! The table of KV layouts that are served (`layouts.json`): which spec is which kind of group, which attention backend stores blocks in
//! which order, and how a block is addressed. The connector reads the same file.
//!
//! Rule: the dimensions left of `B` choose a piece of a block, those right of it are the bytes of the piece. What stands in no row is
//! not served: the cache is off in that vLLM, by name.

use serde::Deserialize;

/// The file.
pub const LAYOUTS_JSON: &str = include_str!("../layouts.json");

/// The whole table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutTable {
    /// Version of the file's format.
    pub version: u32,
    /// Engine that the names belong to.
    pub engine: String,
    /// What the dimensions count.
    pub dims: std::collections::BTreeMap<Dim, String>,
    /// What a state holds.
    pub contents: std::collections::BTreeMap<Content, String>,
    /// Orders of the dimensions in memory.
    pub layouts: Vec<Layout>,
    /// Kinds of KV groups.
    pub specs: Vec<Spec>,
    /// Attention backends.
    pub backends: Vec<Backend>,
}

/// A dimension of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub enum Dim {
    /// Layers.
    L,
    /// Blocks.
    B,
    /// KV heads of the rank.
    H,
    /// States of a block.
    N,
    /// Bytes of a state.
    C,
}

/// One order of the dimensions.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// vLLM's name, e.g. `LBHNC`.
    pub name: String,
    /// Older name.
    pub alias: Option<String>,
    /// Dimensions, outermost first.
    pub order: Vec<Dim>,
    /// Dimensions that choose a piece of a block.
    pub pieces: Vec<Dim>,
    /// Dimensions whose product is the bytes of a piece.
    pub run: Vec<Dim>,
    /// Blocks of this layout are moved.
    pub served: bool,
}

/// One class of vLLM's KV cache specs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Class name.
    pub spec: String,
    /// Kind of group; absent = not served.
    pub group: Option<GroupName>,
    /// How many shards the group has over tensor-parallel ranks.
    pub shards: Option<Shards>,
    /// Why it is not served, by name.
    pub reason: Option<String>,
}

/// `Group::kind` of REGISTER.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupName {
    /// Every token's KV counts.
    Full,
    /// Only the last tokens count.
    Window,
}

/// Shards of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shards {
    /// One per rank, at most one per KV head; further ranks hold replicas.
    KvHeads,
    /// One, held by all ranks.
    One,
}

/// What a state of a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// A key and a value, side by side.
    Halves,
    /// One vector.
    One,
    /// Nobody else knows.
    Own,
}

/// One attention backend.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backend {
    /// vLLM's name of it.
    pub name: String,
    /// What its states hold.
    pub content: Content,
    /// `cpu`, `cuda`.
    pub devices: Vec<String>,
    /// Specs it is served with.
    pub specs: Vec<String>,
    /// Layouts it is served with.
    pub layouts: Vec<String>,
}

impl LayoutTable {
    /// Reads a table.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// A layout by its name or its older name.
    pub fn layout(&self, name: &str) -> Option<&Layout> {
        self.layouts
            .iter()
            .find(|l| l.name == name || l.alias.as_deref() == Some(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn table() -> LayoutTable {
        LayoutTable::parse(LAYOUTS_JSON).unwrap()
    }

    #[test]
    fn names_spell_the_order_and_the_rule_of_pieces_holds() {
        let table = table();
        assert_eq!(table.version, 1);
        assert_eq!(table.layouts.len(), 6);
        for layout in &table.layouts {
            let spelled: String = layout.order.iter().map(|d| format!("{d:?}")).collect();
            assert_eq!(spelled, layout.name);
            let blocks = layout.order.iter().position(|d| *d == Dim::B).unwrap();
            assert_eq!(layout.pieces, layout.order[..blocks], "{}", layout.name);
            assert_eq!(layout.run, layout.order[blocks + 1..], "{}", layout.name);
        }
        assert_eq!(table.layout("HND").unwrap().name, "LBHNC");
        assert_eq!(table.layout("NHD").unwrap().name, "LBNHC");
        assert!(table.layout("XYZ").is_none());
    }

    #[test]
    fn a_spec_is_served_or_has_a_reason() {
        for spec in table().specs {
            assert_eq!(spec.group.is_some(), spec.reason.is_none(), "{}", spec.spec);
            assert_eq!(spec.group.is_some(), spec.shards.is_some(), "{}", spec.spec);
        }
    }

    #[test]
    fn backends_name_only_served_rows() {
        let table = table();
        let mut names = HashSet::new();
        for backend in &table.backends {
            assert!(names.insert(&backend.name), "{} stands twice", backend.name);
            assert!(!backend.devices.is_empty());
            for layout in &backend.layouts {
                assert!(table.layout(layout).is_some_and(|l| l.served), "{layout}");
            }
            for spec in &backend.specs {
                let row = table.specs.iter().find(|s| s.spec == *spec);
                assert!(row.is_some_and(|s| s.group.is_some()), "{spec}");
            }
        }
    }

    #[test]
    fn a_torn_table_is_an_error() {
        assert!(LayoutTable::parse(&LAYOUTS_JSON[..LAYOUTS_JSON.len() / 2]).is_err());
        assert!(LayoutTable::parse("{}").is_err());
    }
}
