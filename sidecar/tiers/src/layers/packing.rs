//! Packs sections on their way to a tier, and unpacks them on their way back. This is the outermost layer: the others count, limit and
//! compare the packed bytes. Callers do not see that an object is packed: its header looks as it would without packing.
//!
//! Raw bytes are compared with the header's digests here in both directions, so an error of a codec is a miss, like an error of a disk.

mod options;
mod packed;
mod section;

use super::scratch::{Hold, Room, Scratch};
use super::verify::discard;
use super::{Op, deadline};
use crate::{
    Cause, Get, Kind, Operation, Page, Place, Put, Removal, Span, Stored, Tier, TierError,
    TierInfo, Usage,
};
use kvcachepool_protocol::object::{Codec, Fidelity, Form, Object, ObjectName, Section, digest};
pub use options::PackingOptions;
pub use packed::{Amount, Packed, Plain};
use section::{longest, packing_bytes, unpacking_bytes};
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

#[derive(Debug)]
pub struct Packing {
    inner: Arc<dyn Tier>,
    /// The codec for puts; gets unpack any codec.
    codec: Codec,
    room: Room,
    /// Time limits of operations; waiting for room is limited the same way.
    deadline: deadline::Options,
    packed: Arc<Packed>,
    corrupt: Arc<AtomicU64>,
}

impl Packing {
    /// Wraps a tier with its other layers; `deadline` limits waiting for room. Objects that cannot be unpacked count as `corrupt`.
    pub fn new(
        inner: Arc<dyn Tier>,
        options: PackingOptions,
        deadline: deadline::Options,
        corrupt: Arc<AtomicU64>,
    ) -> Self {
        let PackingOptions { codec, room } = options;
        Self {
            inner,
            codec,
            room,
            deadline,
            packed: Arc::default(),
            corrupt,
        }
    }

    pub fn packed(&self) -> Arc<Packed> {
        self.packed.clone()
    }

    /// The object's name inside the tier: objects of a lossy codec have names of their own.
    fn inside(&self, name: &ObjectName) -> ObjectName {
        ObjectName {
            fidelity: name.fidelity.max(self.codec.fidelity()),
            ..name.clone()
        }
    }

    fn all_inside<'a>(&self, names: &'a [ObjectName]) -> Cow<'a, [ObjectName]> {
        match self.codec.fidelity() {
            Fidelity::Exact => Cow::Borrowed(names),
            _ => names.iter().map(|name| self.inside(name)).collect(),
        }
    }

    /// Restores the outside name of an object of the tier.
    fn outside(&self, name: &mut ObjectName) {
        if name.fidelity == self.codec.fidelity() {
            name.fidelity = Fidelity::Exact;
        }
    }

    async fn read(&self, mut get: Get) -> Result<Object, TierError> {
        get.name = self.inside(&get.name);
        let mut plain = None;
        if self.codec == Codec::None {
            // A packed section and its place differ in length.
            match self.inner.get(get.clone()).await {
                Err(e) if e.cause == Cause::Shape => plain = Some(e),
                got => return got,
            }
        }
        let head = self.inner.head(&get.name).await?;
        match (head.codec, plain) {
            (Codec::None, Some(shape)) => Err(shape),
            (Codec::None, None) => self.inner.get(get).await.map(raw),
            (_, _) => self.unpack(get, &head).await,
        }
    }

    /// Room for `bytes`, for an operation that moves `moved` bytes. `None`: the whole room is smaller.
    async fn room_for(&self, bytes: u64, op: Op, moved: u64) -> Result<Option<Hold>, TierError> {
        let kind = self.inner.info().kind;
        let room = self.room.take_within(kind, self.deadline, op, bytes, moved);
        room.await
    }

    async fn take_away(&self, name: &ObjectName) {
        discard(self.inner.as_ref(), &self.corrupt, name).await;
    }

    async fn unpack(&self, get: Get, head: &Object) -> Result<Object, TierError> {
        let kind = self.inner.info().kind;
        let sections = wanted(kind, &get, head)?;
        // Longer sections were not packed by this program, and would need unbounded memory.
        if sections
            .iter()
            .any(|s| s.stored_bytes > longest(s.raw_bytes))
        {
            self.take_away(&get.name).await;
            let detail = "a packed section is longer than the codec's maximum for its raw bytes";
            let error = TierError::new(kind, Cause::Corrupt, detail);
            return Err(error.about(get.name.s3("")));
        }
        let lengths: Vec<u64> = sections.iter().map(|s| s.stored_bytes).collect();
        let bytes = unpacking_bytes(head.codec, &sections);
        let about = |e: TierError| e.about(get.name.s3(""));
        let room = self.room_for(bytes, Op::Get, lengths.iter().sum()).await;
        let hold = room.map_err(about)?.ok_or_else(|| {
            let detail = "the packed object needs more memory to unpack than its limit: setting write.codec raises the limit";
            about(TierError::new(kind, Cause::Shape, detail))
        })?;
        let scratch = Scratch::new(kind, &lengths, hold)?;
        let place = |(place, span): (&Place, &Span)| Place {
            span: span.clone(),
            ..*place
        };
        let places = get.places.iter().zip(&scratch.spans).map(place).collect();
        let name = get.name.clone();
        let asked = Get {
            name: name.clone(),
            places,
        };
        let object = self.inner.get(asked).await?;
        let (packed, packed_as) = (self.packed.clone(), object.clone());
        // The inner layers compared the packed bytes; this compares the raw bytes.
        let work = move || {
            let began = Instant::now();
            for ((place, span), section) in get.places.iter().zip(&scratch.spans).zip(&sections) {
                unpack_section(&packed_as, span, &place.span, section).map_err(|why| {
                    let (group, shard) = (section.group, section.shard);
                    TierError::new(
                        kind,
                        Cause::Corrupt,
                        format!("section {group}/{shard}: {why}"),
                    )
                })?;
            }
            packed.get.went(&sections, began.elapsed());
            Ok(())
        };
        if let Err(e) = apart(kind, work).await {
            if e.cause == Cause::Corrupt {
                self.take_away(&name).await;
            }
            return Err(e.about(name.s3("")));
        }
        Ok(raw(object))
    }

    async fn write(&self, mut put: Put) -> Result<Stored, TierError> {
        put.object.fidelity = put.object.fidelity.max(self.codec.fidelity());
        if self.codec != Codec::CacheGen {
            // Only codecs need the form, and sidecars that do not know it can read objects without one.
            put.object.form = Form::flat(put.object.form.element());
        }
        if self.codec == Codec::None || put.object.codec != Codec::None {
            return self.inner.put(put).await;
        }
        let (kind, name) = (self.inner.info().kind, put.object.name());
        let lengths = put.object.sections.iter().map(|s| s.raw_bytes);
        if !lengths.eq(put.spans.iter().map(|span| span.length)) {
            // The inner layers report the error.
            return self.inner.put(put).await;
        }
        // A section that would grow is stored unpacked.
        let lengths: Vec<u64> = put.spans.iter().map(|span| span.length).collect();
        let moved = lengths.iter().sum();
        let room = self.room_for(packing_bytes(&lengths), Op::Put, moved).await;
        let Some(hold) = room.map_err(|e| e.about(name.s3("")))? else {
            self.packed.left_plain(Plain::TooLarge);
            return self.inner.put(put).await;
        };
        let scratch = Scratch::new(kind, &lengths, hold)?;
        let (codec, packed) = (self.codec, self.packed.clone());
        let work = move || {
            let began = Instant::now();
            Ok(match pack(kind, codec, &put, scratch)? {
                Ok((smaller, error)) => {
                    packed.put.went(&smaller.object.sections, began.elapsed());
                    packed.lost(error);
                    smaller
                }
                Err(why) => {
                    packed.left_plain(why);
                    put
                }
            })
        };
        let put = apart(kind, work).await.map_err(|e| e.about(name.s3("")))?;
        self.inner.put(put).await
    }
}

/// Runs outside the socket threads. Once begun, it runs to its end and holds its spans, even when the caller stops waiting.
pub(super) async fn apart<T: Send + 'static>(
    kind: Kind,
    work: impl FnOnce() -> Result<T, TierError> + Send + 'static,
) -> Result<T, TierError> {
    let ended = crate::work::apart(work).await;
    ended.unwrap_or_else(|e| Err(TierError::new(kind, Cause::Io, e.to_string())))
}

/// The sections for the places of a get.
fn wanted(kind: Kind, get: &Get, head: &Object) -> Result<Vec<Section>, TierError> {
    let section = |place: &Place| {
        let found = head.section(place.group, place.shard);
        found.filter(|s| s.raw_bytes == place.span.length).copied()
    };
    let sections: Option<Vec<_>> = get.places.iter().map(section).collect();
    sections.ok_or_else(|| {
        let detail = "a place and its section differ in length";
        TierError::new(kind, Cause::Shape, detail).about(get.name.s3(""))
    })
}

fn unpack_section(
    object: &Object,
    from: &Span,
    to: &Span,
    section: &Section,
) -> Result<(), String> {
    let mut stored = vec![0; from.length as usize];
    let read = from.read(0, &mut stored);
    let raw = section::unpack(object.codec, &object.form, section, &stored)?;
    match read && to.write(0, &raw) {
        true => Ok(()),
        false => Err("its place in the arena no longer exists".into()),
    }
}

/// The same put with packed sections, and their largest relative error; or the reason why it is not packed.
fn pack(
    kind: Kind,
    codec: Codec,
    put: &Put,
    mut scratch: Scratch,
) -> Result<Result<(Put, f64), Plain>, TierError> {
    let (mut object, mut error) = (put.object.clone(), 0f64);
    object.codec = codec;
    for (index, (section, span)) in object.sections.iter_mut().zip(&put.spans).enumerate() {
        let mut raw = vec![0; span.length as usize];
        if !span.read(0, &mut raw) || digest(&raw) != section.raw_digest {
            let detail =
                "the bytes in memory do not match the header's digests; nothing was written";
            return Err(TierError::new(kind, Cause::Corrupt, detail));
        }
        let Ok(packed) = section::pack(codec, &object.form, section, raw) else {
            return Ok(Err(Plain::Unsuited));
        };
        if !scratch.fill(index, &packed.stored) {
            return Ok(Err(Plain::NotSmaller));
        }
        *section = packed.section;
        error = error.max(packed.error);
    }
    let bytes = |of: fn(&Section) -> u64| object.sections.iter().map(of).sum::<u64>();
    let smaller = bytes(|s| s.stored_bytes) < bytes(|s| s.raw_bytes);
    let put = Put {
        object,
        spans: scratch.spans,
    };
    Ok(smaller.then_some((put, error)).ok_or(Plain::NotSmaller))
}

/// The header of an object as it would be without packing.
fn raw(mut object: Object) -> Object {
    object.codec = Codec::None;
    object.fidelity = Fidelity::Exact;
    for section in &mut object.sections {
        section.stored_bytes = section.raw_bytes;
        section.stored_digest = section.raw_digest;
    }
    object
}

impl Tier for Packing {
    fn info(&self) -> &TierInfo {
        self.inner.info()
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        Box::pin(async move { self.inner.lookup(&self.all_inside(names)).await })
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        Box::pin(async move { Ok(raw(self.inner.head(&self.inside(name)).await?)) })
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        Box::pin(self.read(get))
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        Box::pin(self.write(put))
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        Box::pin(async move {
            let names = match removal {
                Removal::Unusable(name) => {
                    let inside = self.inside(name);
                    return self.inner.remove(Removal::Unusable(&inside)).await;
                }
                Removal::Listed(_) if self.codec.fidelity() == Fidelity::Exact => {
                    return self.inner.remove(removal).await;
                }
                // A listing does not say under which of two names an object is stored: both are looked up.
                Removal::Named(_) | Removal::Listed(_) => removal.names(),
            };
            let inside = self.all_inside(&names);
            let removed = self.inner.remove(Removal::Named(&inside)).await?;
            // Objects of other codecs, or of none, are listed by their own names.
            let both = inside.iter().zip(names.iter());
            let others = both.filter(|(inside, name)| inside != name);
            let others: Vec<_> = others.map(|(_, name)| name.clone()).collect();
            match others.is_empty() {
                true => Ok(removed),
                false => Ok(removed + self.inner.remove(Removal::Named(&others)).await?),
            }
        })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        self.inner.usage()
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        Box::pin(async move {
            let mut page = self.inner.list(from, limit).await?;
            for listed in &mut page.objects {
                self.outside(&mut listed.name);
            }
            Ok(page)
        })
    }
}

#[cfg(test)]
mod tests;
