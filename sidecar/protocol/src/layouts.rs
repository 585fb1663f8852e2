//! The table of supported KV layouts (`layouts.json`): the kind of group of each spec, the block layouts of each attention backend, and the
//! addressing of a block. The connector reads the same file.
//!
//! The dimensions left of `B` select a piece of a block, those right of it are the bytes of the piece. A layout without a row is not
//! supported: the cache is off in that vLLM, with a named reason.

use crate::domain::GroupKind;
use serde::Deserialize;

/// The content of `layouts.json`.
pub const LAYOUTS_JSON: &str = include_str!("../layouts.json");

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutTable {
    /// Version of the file's format.
    pub version: u32,
    /// The engine that the names refer to.
    pub engine: String,
    /// Meaning of the dimensions.
    pub dims: std::collections::BTreeMap<Dim, String>,
    /// Meaning of the contents of a state.
    pub contents: std::collections::BTreeMap<Content, String>,
    pub layouts: Vec<Layout>,
    pub specs: Vec<Spec>,
    pub backends: Vec<Backend>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub enum Dim {
    L,
    B,
    /// KV heads of the rank.
    H,
    /// States (tokens) of a block.
    N,
    C,
}

/// One order of the dimensions.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// vLLM's name, for example `LBHNC`.
    pub name: String,
    pub alias: Option<String>,
    /// Dimensions, outermost first.
    pub order: Vec<Dim>,
    /// Dimensions that select a piece of a block.
    pub pieces: Vec<Dim>,
    /// Dimensions whose product is the bytes of a piece.
    pub run: Vec<Dim>,
    /// Whether blocks in this layout are supported.
    pub served: bool,
}

/// One class of vLLM's KV cache specs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    pub spec: String,
    /// Kind of group. `None` if the spec is not supported.
    pub group: Option<GroupKind>,
    /// Number of the group's shards over tensor-parallel ranks.
    pub shards: Option<Shards>,
    /// Name of the reason why the spec is not supported.
    pub reason: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shards {
    /// One per rank, at most one per KV head. Further ranks hold replicas.
    KvHeads,
    /// One, held by all ranks.
    One,
}

/// Content of a state of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// A key followed by a value.
    Halves,
    One,
    /// A format that only the backend knows.
    Own,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backend {
    /// vLLM's name of the backend.
    pub name: String,
    /// Content of its states.
    pub content: Content,
    /// `cpu`, `cuda`.
    pub devices: Vec<String>,
    pub specs: Vec<String>,
    pub layouts: Vec<String>,
    /// Of content [`Content::Own`]: the bytes of a head in a kernel block contain those of no other head.
    #[serde(default)]
    pub heads_apart: bool,
    /// Of content [`Content::Own`]: minor versions with the same bytes, from the oldest.
    #[serde(default)]
    pub same: Vec<String>,
}

impl LayoutTable {
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Finds a layout by its name or alias.
    pub fn layout(&self, name: &str) -> Option<&Layout> {
        self.layouts
            .iter()
            .find(|l| l.name == name || l.alias.as_deref() == Some(name))
    }

    /// Finds a class of specs.
    pub fn spec(&self, name: &str) -> Option<&Spec> {
        self.specs.iter().find(|spec| spec.spec == name)
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
            assert!(
                names.insert(&backend.name),
                "duplicate backend {}",
                backend.name
            );
            assert!(!backend.devices.is_empty());
            for layout in &backend.layouts {
                assert!(table.layout(layout).is_some_and(|l| l.served), "{layout}");
            }
            for spec in &backend.specs {
                assert!(
                    table.spec(spec).is_some_and(|s| s.group.is_some()),
                    "{spec}"
                );
            }
        }
    }

    #[test]
    fn a_torn_table_is_an_error() {
        assert!(LayoutTable::parse(&LAYOUTS_JSON[..LAYOUTS_JSON.len() / 2]).is_err());
        assert!(LayoutTable::parse("{}").is_err());
    }
}
