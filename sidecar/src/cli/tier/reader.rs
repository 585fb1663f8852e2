//! Reads objects and compares their bytes with their digests, as many at once as memory holds.

use super::AT_ONCE;
use futures::StreamExt;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::config::ByteSize;
use kvcachepool_protocol::object::{ALIGN, Object, ObjectName, Section};
use kvcachepool_tiers::{Cause, Get, Kind, Place, Span, Tier, TierError};
use std::collections::VecDeque;
use std::sync::Arc;

const OBJECTS_AT_ONCE: usize = 8;
/// Objects whose headers are read ahead of their sections.
const HEADS: usize = 64;

/// Memory that sections are read into.
pub(super) struct Memory(Arc<Mapping>);

impl Memory {
    /// Allocates `size` bytes.
    pub(super) fn new(size: ByteSize) -> Result<Self, String> {
        let bytes = size.0.max(ALIGN).next_multiple_of(ALIGN);
        let mapping = Mapping::private("kvcachepool-verify", bytes);
        let mapping = mapping.map_err(|e| format!("--memory {size}: {e}"))?;
        Ok(Self(Arc::new(mapping)))
    }

    /// Places for sections from `at` on, for as many of them as there is room. Advances `at`.
    fn places(&self, sections: &[Section], at: &mut u64) -> Vec<Place> {
        let place = |section: &Section| {
            let span = Span::new(self.0.clone(), *at, section.stored_bytes, Arc::new(()))?;
            *at += section.stored_bytes.next_multiple_of(ALIGN);
            Some(Place {
                group: section.group,
                shard: section.shard,
                span,
            })
        };
        sections.iter().map_while(place).collect()
    }
}

/// An object, with the bytes of its sections or the error.
pub(super) type Checked = (ObjectName, Result<u64, TierError>);

/// An object, its header, and the places of its sections: only some of them if they do not fit.
struct Due {
    name: ObjectName,
    head: Head,
    places: Vec<Place>,
}

type Head = Result<Object, TierError>;

/// Takes as many objects as memory holds.
fn batch(heads: &mut VecDeque<(ObjectName, Head)>, memory: &Memory) -> Vec<Due> {
    let mut at = 0;
    let mut batch = Vec::new();
    while let Some((name, head)) = heads.pop_front() {
        let sections = head.as_ref().map_or(&[][..], |head| &head.sections);
        let places = memory.places(sections, &mut at);
        let whole = places.len() == sections.len();
        if !whole && !batch.is_empty() {
            heads.push_front((name, head));
            break;
        }
        batch.push(Due { name, head, places });
        // An object that is read in parts gets all memory.
        if !whole {
            break;
        }
    }
    batch
}

pub(super) struct Reader<'a> {
    tier: &'a dyn Tier,
    memory: &'a Memory,
    left: VecDeque<ObjectName>,
    heads: VecDeque<(ObjectName, Head)>,
}

impl<'a> Reader<'a> {
    /// Reads the objects `names` into `memory`.
    pub(super) fn new(tier: &'a dyn Tier, memory: &'a Memory, names: Vec<ObjectName>) -> Self {
        Self {
            tier,
            memory,
            left: names.into(),
            heads: VecDeque::new(),
        }
    }

    /// Reads and checks as many further objects as memory holds. Returns their results in order; empty when none are left.
    pub(super) async fn next(&mut self) -> Vec<Checked> {
        if self.heads.is_empty() {
            self.read_heads().await;
        }
        let batch = batch(&mut self.heads, self.memory);
        let each = batch.into_iter().map(async |Due { name, head, places }| {
            let read = match head {
                Ok(head) => self.read(&name, &head.sections, places).await,
                Err(e) => Err(e),
            };
            (name, read)
        });
        let each = futures::stream::iter(each).buffered(OBJECTS_AT_ONCE);
        each.collect().await
    }

    async fn read_heads(&mut self) {
        let names = self.left.drain(..self.left.len().min(HEADS));
        let tier = self.tier;
        let each = names.map(async |name| {
            let head = tier.head(&name).await;
            (name, head)
        });
        let each = futures::stream::iter(each).buffered(AT_ONCE);
        self.heads = each.collect().await;
    }

    /// Reads and checks an object, in parts when `places` holds only some of its sections; each part then uses the whole memory. Returns
    /// the bytes of its sections.
    async fn read(
        &self,
        name: &ObjectName,
        sections: &[Section],
        mut places: Vec<Place>,
    ) -> Result<u64, TierError> {
        let mut left = sections;
        while !places.is_empty() {
            let (part, rest) = left.split_at(places.len());
            self.check(name, part, places).await?;
            left = rest;
            places = self.memory.places(left, &mut 0);
        }
        if let Some(section) = left.first() {
            let needed = ByteSize(section.stored_bytes.next_multiple_of(ALIGN));
            let detail = format!("a section is larger than the memory; use --memory {needed}");
            return Err(self.failed(Cause::Config, name, detail));
        }
        Ok(sections.iter().map(|s| s.stored_bytes).sum())
    }

    async fn check(
        &self,
        name: &ObjectName,
        sections: &[Section],
        places: Vec<Place>,
    ) -> Result<(), TierError> {
        let spans: Vec<Span> = places.iter().map(|place| place.span.clone()).collect();
        let name = name.clone();
        let get = Get {
            name: name.clone(),
            places,
        };
        let head = self.tier.get(get).await?;
        if head.name() != name {
            let detail = format!(
                "another object is stored under this name: {}",
                head.name().s3("")
            );
            return Err(self.failed(Cause::Foreign, &name, detail));
        }
        for (section, span) in sections.iter().zip(spans) {
            if span.digest() != Some(section.stored_digest) {
                let (group, shard) = (section.group, section.shard);
                let detail = format!("section {group}/{shard} does not match its digest");
                return Err(self.failed(Cause::Corrupt, &name, detail));
            }
        }
        Ok(())
    }

    fn failed(&self, cause: Cause, name: &ObjectName, detail: impl Into<String>) -> TierError {
        let tier: Kind = self.tier.info().kind;
        TierError::new(tier, cause, detail).about(name.s3(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::suite::Sample;

    #[test]
    fn a_batch_is_what_fits_and_what_does_not_fit_is_alone() {
        let memory = Memory::new(ByteSize(64 << 10)).unwrap();
        let kib: [&[u64]; 7] = [&[16, 16], &[32], &[4], &[60, 8], &[4], &[65], &[64]];
        let mut heads: VecDeque<_> = kib
            .iter()
            .zip(0..)
            .map(|(lengths, number)| {
                let bytes: Vec<_> = lengths.iter().map(|kib| kib << 10).collect();
                let sample = Sample::new(1, number, &bytes);
                (sample.name(), Ok(sample.object))
            })
            .collect();
        heads.push_back((
            heads[0].0.clone(),
            Err(TierError::new(Kind::Disk, Cause::Gone, "")),
        ));
        let mut taken = Vec::new();
        while !heads.is_empty() {
            let batch = batch(&mut heads, &memory);
            taken.push(batch.iter().map(|due| due.places.len()).collect::<Vec<_>>());
        }
        let expected: [&[usize]; 6] = [&[2, 1], &[1], &[1], &[1], &[0], &[1, 0]];
        assert_eq!(taken, expected);
    }
}
