//! Sections of an object: where they are in a file, and where in the arena.

use crate::{Cause, Get, Kind, Span, TierError};
use kvcachepool_protocol::object::Object;

/// A section: its offset in the file, and its bytes in the arena.
#[derive(Debug, Clone)]
pub struct Section {
    pub offset: u64,
    pub span: Span,
}

impl Section {
    /// Offset of the first byte behind it.
    pub fn end(&self) -> u64 {
        self.offset + self.span.length
    }
}

/// The wanted sections in the order of the file, in which the object begins at `start`.
pub fn wanted(
    kind: Kind,
    start: u64,
    object: &Object,
    get: &Get,
) -> Result<Vec<Section>, TierError> {
    let offsets = object.offsets();
    let mut sections = Vec::with_capacity(get.places.len());
    for place in &get.places {
        let (group, shard) = (place.group, place.shard);
        let shape = |why: String| {
            let why = format!("section {group}.{shard} {why}");
            TierError::new(kind, Cause::Shape, why).about(get.name.s3(""))
        };
        let index = object
            .sections
            .binary_search_by_key(&(group, shard), |s| (s.group, s.shard))
            .map_err(|_| shape("is not in the object".to_string()))?;
        let stored = object.sections.get(index).map_or(0, |s| s.stored_bytes);
        if stored != place.span.length {
            let length = place.span.length;
            return Err(shape(format!(
                "has {stored} bytes, but its place has {length}"
            )));
        }
        sections.push(Section {
            offset: start + offsets.get(index).copied().unwrap_or(0),
            span: place.span.clone(),
        });
    }
    sections.sort_by_key(|section| section.offset);
    Ok(sections)
}
