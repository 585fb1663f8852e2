//! Converts between the sections of a chunk, which lie in memory as a rank's cache has them, and those of a portable object. Outside of all
//! layers: what it hands on are complete sections of an object, with digests of their own.
//!
//! Bytes are compared with a digest on both sides. What is written to slots has passed through private memory, and its digest is computed
//! there.

use super::packing::apart;
use super::scratch::{Room, Scratch};
use super::{Op, deadline};
use crate::{Cause, Get, Place, Put, Span, Stored, Tier, TierError};
use kvcachepool_engine::Landed;
use kvcachepool_kernels::pages::{BlockShape, HeadMajor};
use kvcachepool_protocol::config::CONVERTING_BYTES;
use kvcachepool_protocol::domain::Portable;
use kvcachepool_protocol::object::{Axis, Dim, Form, Object, ObjectName, Section};
use std::collections::BTreeMap;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Reads and writes chunks of a tier.
#[derive(Debug, Clone)]
pub struct Converter {
    tier: Arc<dyn Tier>,
    rooms: Rooms,
    deadline: deadline::Options,
}

/// Memory for conversions in each direction, so that slow writes do not delay reads.
#[derive(Debug, Clone)]
pub struct Rooms {
    read: Room,
    write: Room,
}

impl Rooms {
    /// The memory that the container has for them, divided among this many tiers.
    pub fn of_tiers(tiers: usize) -> Self {
        let room = || Room::new(CONVERTING_BYTES).of_tiers(tiers);
        Self {
            read: room(),
            write: room(),
        }
    }

    /// The same memory, for another tier.
    pub fn of_another(&self) -> Self {
        Self {
            read: self.read.of_another(),
            write: self.write.of_another(),
        }
    }
}

/// Sections of an object by group and pipeline stage, with their lengths.
type Sections = BTreeMap<(u32, u32), u64>;

/// Where a section of a chunk lies in its object.
#[derive(Debug)]
struct Part {
    /// Group, and pipeline stage: the object's section.
    section: (u32, u32),
    /// Offset in that section.
    base: u64,
    /// Bytes of that section.
    section_bytes: u64,
    order: HeadMajor,
}

impl Part {
    /// `None`: the layout has no such section, or not with this length.
    fn new(portable: &Portable, place: &Place) -> Option<Self> {
        let group = portable.groups.get(place.group as usize)?;
        let shape = BlockShape {
            layers: group.layers as usize,
            heads: group.heads as usize,
            kernel_blocks: group.kernel_blocks as usize,
            tokens: group.tokens as usize,
            state_bytes: group.state_bytes as usize,
        };
        let (bytes, block) = (place.span.length, shape.block_bytes().ok()? as u64);
        if !bytes.is_multiple_of(block) {
            return None;
        }
        let (stage, part) = group.locate(place.shard);
        Some(Self {
            section: (place.group, stage),
            base: u64::from(part) * bytes,
            section_bytes: u64::from(group.parts) * bytes,
            order: HeadMajor::new(&portable.layout, &shape, (bytes / block) as usize).ok()?,
        })
    }

    /// Fills a slot from its part of the object's section. Returns the digest of what the slot was given.
    fn fill(&self, section: &Span, slot: &Span) -> Option<[u8; 16]> {
        let (run, mut row) = (self.order.run_bytes(), vec![0; self.order.row_bytes()]);
        let mut digest = Xxh3::new();
        for at in 0..self.order.rows() {
            let mut read = true;
            self.order.row(at, |to, from| {
                read &= section.read(self.base + from as u64, &mut row[to..to + run]);
            });
            if !read || !slot.write((at * row.len()) as u64, &row) {
                return None;
            }
            digest.update(&row);
        }
        Some(digest.digest128().to_le_bytes())
    }

    /// Copies a slot to its part of the object's section. Returns the digest of what was copied.
    fn take(&self, slot: &Span, section: &Span) -> Option<[u8; 16]> {
        let (run, mut row) = (self.order.run_bytes(), vec![0; self.order.row_bytes()]);
        let mut digest = Xxh3::new();
        for at in 0..self.order.rows() {
            if !slot.read((at * row.len()) as u64, &mut row) {
                return None;
            }
            digest.update(&row);
            let mut written = true;
            self.order.row(at, |from, to| {
                written &= section.write(self.base + to as u64, &row[from..from + run]);
            });
            if !written {
                return None;
            }
        }
        Some(digest.digest128().to_le_bytes())
    }
}

/// The object's sections that some sections of a chunk belong to, with their lengths. `None`: the layout does not have them.
fn sections_of(parts: &[Part]) -> Option<Sections> {
    let mut sections = BTreeMap::new();
    for part in parts {
        let bytes = sections.entry(part.section).or_insert(part.section_bytes);
        if *bytes != part.section_bytes {
            return None;
        }
    }
    Some(sections)
}

impl Converter {
    pub(super) fn new(tier: Arc<dyn Tier>, rooms: Rooms, deadline: deadline::Options) -> Self {
        Self {
            tier,
            rooms,
            deadline,
        }
    }

    /// Reads those of the wanted sections of a chunk that its object has. `portable`: how they differ from the object's.
    pub async fn read(
        &self,
        name: &ObjectName,
        places: Vec<Place>,
        portable: Option<Arc<Portable>>,
    ) -> Result<Landed, TierError> {
        let Some(portable) = portable else {
            return read(self.tier.as_ref(), name, &places).await;
        };
        let kind = self.tier.info().kind;
        let about = |e: TierError| e.about(name.s3(""));
        let (parts, sections) = self.parts(&portable, &places).map_err(about)?;
        let scratch = self.scratch(&parts, &sections, Op::Get).await;
        let scratch = scratch.map_err(about)?;
        let wanted = sections.keys().zip(&scratch.spans);
        let wanted: Vec<Place> = wanted
            .map(|((group, shard), span)| Place {
                group: *group,
                shard: *shard,
                span: span.clone(),
            })
            .collect();
        let read = read(self.tier.as_ref(), name, &wanted).await?;
        let fill = move || {
            let (mut found, mut digests) = (Vec::new(), Vec::new());
            for (place, part) in places.iter().zip(&parts) {
                let at = sections.keys().position(|section| *section == part.section);
                let section = at.filter(|at| read.digests[*at].is_some());
                let Some(section) = section.map(|at| &scratch.spans[at]) else {
                    digests.push(None);
                    continue;
                };
                let digest = part.fill(section, &place.span).ok_or_else(|| {
                    let detail = "its place in the arena no longer exists";
                    TierError::new(kind, Cause::Gone, detail)
                })?;
                let (group, shard) = (place.group, place.shard);
                found.push(Section::plain(group, shard, place.span.length, digest));
                digests.push(Some(digest));
            }
            let object = Box::new(Object {
                sections: found,
                ..*read.object
            });
            Ok(Landed { object, digests })
        };
        apart(kind, fill).await.map_err(about)
    }

    /// Writes a chunk with these sections. `portable`: how they differ from the object's. A section of the object is left out if a part
    /// of it is missing.
    pub async fn write(
        &self,
        put: Put,
        portable: Option<Arc<Portable>>,
    ) -> Result<Stored, TierError> {
        let Some(portable) = portable else {
            return self.tier.put(put).await;
        };
        let kind = self.tier.info().kind;
        let name = put.object.name();
        let about = |e: TierError| e.about(name.s3(""));
        let places: Vec<Place> = put
            .object
            .sections
            .iter()
            .zip(put.spans)
            .map(|(section, span)| Place {
                group: section.group,
                shard: section.shard,
                span,
            })
            .collect();
        let (parts, mut sections) = self.parts(&portable, &places).map_err(about)?;
        sections.retain(|section, bytes| {
            let of_section = parts.iter().filter(|part| part.section == *section);
            of_section
                .map(|part| part.order.section_bytes() as u64)
                .sum::<u64>()
                == *bytes
        });
        let scratch = self.scratch(&parts, &sections, Op::Put).await;
        let scratch = scratch.map_err(about)?;
        let object = put.object;
        let take = move || {
            for ((place, part), head) in places.iter().zip(&parts).zip(&object.sections) {
                let at = sections.keys().position(|section| *section == part.section);
                let Some(section) = at.map(|at| &scratch.spans[at]) else {
                    continue;
                };
                let taken = part.take(&place.span, section).ok_or_else(|| {
                    let detail = "a slot's place in the arena no longer exists";
                    TierError::new(kind, Cause::Gone, detail)
                })?;
                if taken != head.raw_digest {
                    let detail = "the bytes in memory do not match the header's digests; nothing was written";
                    return Err(TierError::new(kind, Cause::Corrupt, detail));
                }
            }
            let form = form_of(&portable, &object.form, &parts);
            let section = |((group, shard), span): (&(u32, u32), &Span)| {
                let digest = span.digest()?;
                Some(Section::plain(*group, *shard, span.length, digest))
            };
            let converted: Option<Vec<_>> =
                sections.keys().zip(&scratch.spans).map(section).collect();
            let gone = || TierError::new(kind, Cause::Gone, "the private memory no longer exists");
            Ok(Put {
                object: Object {
                    sections: converted.ok_or_else(gone)?,
                    form,
                    ..object
                },
                spans: scratch.spans,
            })
        };
        let put = apart(kind, take).await.map_err(about)?;
        self.tier.put(put).await
    }

    /// Where the sections of a chunk lie in its object, and the object's sections.
    fn parts(
        &self,
        portable: &Portable,
        places: &[Place],
    ) -> Result<(Vec<Part>, Sections), TierError> {
        let parts = places.iter().map(|place| Part::new(portable, place));
        let parts: Option<Vec<_>> = parts.collect();
        let parts = parts.and_then(|parts| sections_of(&parts).map(|sections| (parts, sections)));
        parts.ok_or_else(|| {
            let detail = "a section of the chunk does not fit its layout";
            TierError::new(self.tier.info().kind, Cause::Shape, detail)
        })
    }

    /// Private memory for sections of an object. It counts the rows too, which are copied one at a time.
    async fn scratch(
        &self,
        parts: &[Part],
        sections: &Sections,
        op: Op,
    ) -> Result<Scratch, TierError> {
        let kind = self.tier.info().kind;
        let lengths: Vec<u64> = sections.values().copied().collect();
        let moved = lengths.iter().sum::<u64>();
        let row = parts.iter().map(|part| part.order.row_bytes()).max();
        let bytes = moved + row.unwrap_or(0) as u64;
        let room = match op {
            Op::Put => &self.rooms.write,
            _ => &self.rooms.read,
        };
        let taken = room.take_within(kind, self.deadline, op, bytes, moved);
        let hold = taken.await?.ok_or_else(|| {
            let detail = "the object needs more memory to convert than its limit";
            TierError::new(kind, Cause::Shape, detail)
        })?;
        room.scratch(kind, &lengths, hold)
    }
}

/// The form of the object's sections, each of which is one block. Known if that of the chunk's blocks is, and all sections have the same.
fn form_of(portable: &Portable, form: &Form, parts: &[Part]) -> Form {
    let flat = Form::flat(form.element());
    let dims = |part: &Part| {
        let group = portable.groups.get(part.section.0 as usize)?;
        let block = form.block_bytes()? as usize;
        let tokens =
            part.order.section_bytes() / block * (group.kernel_blocks * group.tokens) as usize;
        let outer = [
            (Axis::Channel, group.heads * group.parts),
            (Axis::Layer, group.layers),
            (Axis::Token, u32::try_from(tokens).ok()?),
        ];
        let outer = outer.map(|(axis, size)| Dim { axis, size });
        // The innermost dimensions are those of a state.
        let mut rest = group.state_bytes as usize / form.element().bytes();
        let mut inner: Vec<Dim> = Vec::new();
        for dim in form.dims().collect::<Vec<_>>().into_iter().rev() {
            if rest <= 1 {
                break;
            }
            rest /= dim.size as usize;
            inner.push(dim);
        }
        Some(
            outer
                .into_iter()
                .chain(inner.into_iter().rev())
                .collect::<Vec<_>>(),
        )
    };
    let mut all = parts.iter().map(dims);
    let Some(first) = all.next().flatten() else {
        return flat;
    };
    let same = all.all(|other| other.as_ref() == Some(&first));
    let known = Form::new(form.element(), &first).filter(|known| {
        let bytes = known.block_bytes().map(u64::from);
        same && parts.iter().all(|part| bytes == Some(part.section_bytes))
    });
    known.unwrap_or(flat)
}

/// Reads those of the wanted sections that the object has.
async fn read(tier: &dyn Tier, name: &ObjectName, places: &[Place]) -> Result<Landed, TierError> {
    let get = |places| Get {
        name: name.clone(),
        places,
    };
    let first = tier.get(get(places.to_vec())).await;
    let (object, read) = match first {
        Ok(object) => (object, places.to_vec()),
        // Most objects have all sections. Only when one lacks those of a sliding window is its section table read.
        Err(e) if e.cause == Cause::Shape => {
            let head = tier.head(name).await?;
            let had = |p: &&Place| {
                head.section(p.group, p.shard)
                    .is_some_and(|s| s.stored_bytes == p.span.length)
            };
            let had: Vec<Place> = places.iter().filter(had).cloned().collect();
            let lacks = places
                .iter()
                .filter(|p| head.section(p.group, p.shard).is_none())
                .count();
            if had.is_empty() || had.len() + lacks != places.len() {
                return Err(e);
            }
            (tier.get(get(had.clone())).await?, had)
        }
        Err(e) => return Err(e),
    };
    let digest = |place: &Place| {
        let same = |p: &Place| (p.group, p.shard) == (place.group, place.shard);
        read.iter()
            .any(same)
            .then(|| {
                object
                    .section(place.group, place.shard)
                    .map(|s| s.stored_digest)
            })
            .flatten()
    };
    let digests = places.iter().map(digest).collect();
    Ok(Landed {
        object: Box::new(object),
        digests,
    })
}

#[cfg(test)]
mod tests;
