//! Quantisation by groups. The header is followed by the stored ends of every group, in the type of the raw numbers, then by the codes of
//! every group:
//!
//! ```text
//! groups x { the largest magnitude, or the smallest and the largest number }
//! groups x { codes }                                                        the last group may be shorter
//! ```
//! The ends are numbers of the group, so they are exact in its type. Both sides compute the scales from them.

use super::{CodecError, Element, GROUP_MAX};
use crate::lanes::{Work, widest};
use crate::number::{Bf16, F16, F32, Number};
use std::marker::PhantomData;

/// Bytes of codes that are staged before they are appended to the output. They fit in the L1 cache.
const STAGE_BYTES: usize = 4_096;

/// A quantisation method. All of it is inlined: see [`Work`].
pub trait Quantiser {
    /// Number of stored ends: 1 (the largest magnitude) or 2.
    const ENDS: usize = 1;

    /// Bytes of `count` codes: one byte each by default.
    #[inline(always)]
    fn bytes(numbers: usize) -> usize {
        numbers
    }
    /// The ends of a group, the stored ones first. `None` if the group cannot be packed.
    fn ends<N: Number>(numbers: &[N::Bytes]) -> Option<[N::Bytes; 2]>;
    /// Stored ends as values, from low to high. `None` if no group can have these ends.
    #[inline(always)]
    fn line<N: Number>(ends: [N::Bytes; 2]) -> Option<[f32; 2]> {
        N::is_bound(ends[0]).then(|| [0.0, N::value(ends[0])])
    }
    fn quantise<N: Number>(line: [f32; 2], numbers: &[N::Bytes], codes: &mut [u8]);
    fn restore<N: Number>(line: [f32; 2], codes: &[u8], numbers: &mut [N::Bytes]);
}

/// Packs numbers in groups of 1 to [`GROUP_MAX`].
pub fn pack<Q: Quantiser>(
    element: Element,
    group: u16,
    raw: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    match element {
        Element::Opaque => Err(CodecError::NotNumbers),
        Element::Bf16 => pack_numbers::<Q, Bf16>(group, raw, out),
        Element::F16 => pack_numbers::<Q, F16>(group, raw, out),
        Element::F32 => pack_numbers::<Q, F32>(group, raw, out),
    }
}

/// Unpacks exactly as many numbers as were packed.
pub fn unpack<Q: Quantiser>(
    element: Element,
    group: u16,
    packed: &[u8],
    raw: &mut [u8],
) -> Result<(), CodecError> {
    match element {
        Element::Opaque => Err(CodecError::NotNumbers),
        Element::Bf16 => unpack_numbers::<Q, Bf16>(group, packed, raw),
        Element::F16 => unpack_numbers::<Q, F16>(group, packed, raw),
        Element::F32 => unpack_numbers::<Q, F32>(group, packed, raw),
    }
}

fn pack_numbers<Q: Quantiser, N: Number>(
    group: u16,
    raw: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let sizes = Sizes::new::<Q, N>(group, raw.len())?;
    out.reserve(sizes.ends + sizes.codes);
    let ends_at = out.len();
    out.resize(ends_at + sizes.ends, 0);
    widest(Pack::<Q, N> {
        group: group.into(),
        numbers: N::all(raw),
        ends_at,
        out,
        how: PhantomData,
    })
}

fn unpack_numbers<Q: Quantiser, N: Number>(
    group: u16,
    packed: &[u8],
    raw: &mut [u8],
) -> Result<(), CodecError> {
    let sizes = Sizes::new::<Q, N>(group, raw.len())?;
    let (ends, codes) = packed
        .split_at_checked(sizes.ends)
        .filter(|(_, codes)| codes.len() == sizes.codes)
        .ok_or(CodecError::StoredLength)?;
    widest(Unpack::<Q, N> {
        group: group.into(),
        ends: N::all(ends),
        codes,
        numbers: N::all_mut(raw),
        how: PhantomData,
    })
}

/// Sizes of packed bytes.
struct Sizes {
    ends: usize,
    codes: usize,
}

impl Sizes {
    fn new<Q: Quantiser, N: Number>(group: u16, raw: usize) -> Result<Self, CodecError> {
        if !(1..=GROUP_MAX).contains(&group) {
            return Err(CodecError::Group(group));
        }
        let (group, bytes) = (usize::from(group), size_of::<N::Bytes>());
        if !raw.is_multiple_of(bytes) {
            return Err(CodecError::RawLength { raw });
        }
        let numbers = raw / bytes;
        Ok(Self {
            ends: numbers.div_ceil(group) * Q::ENDS * bytes,
            codes: numbers / group * Q::bytes(group) + Q::bytes(numbers % group),
        })
    }
}

struct Pack<'a, Q, N: Number> {
    group: usize,
    numbers: &'a [N::Bytes],
    ends_at: usize,
    out: &'a mut Vec<u8>,
    how: PhantomData<Q>,
}

impl<Q: Quantiser, N: Number> Work for Pack<'_, Q, N> {
    type Done = Result<(), CodecError>;

    #[inline(always)]
    fn run(self) -> Self::Done {
        let mut stage = [0; STAGE_BYTES];
        let (mut at, mut ends_at) = (0, self.ends_at);
        let staged = STAGE_BYTES / Q::bytes(self.group) * self.group;
        for numbers in self.numbers.chunks(staged) {
            let mut filled = 0;
            for numbers in numbers.chunks(self.group) {
                let ends = Q::ends::<N>(numbers).ok_or(CodecError::NotFinite { at })?;
                let line = Q::line::<N>(ends).ok_or(CodecError::NotFinite { at })?;
                for end in &ends[..Q::ENDS] {
                    let end = end.as_ref();
                    self.out[ends_at..ends_at + end.len()].copy_from_slice(end);
                    ends_at += end.len();
                }
                let codes = &mut stage[filled..][..Q::bytes(numbers.len())];
                filled += codes.len();
                at += numbers.len();
                Q::quantise::<N>(line, numbers, codes);
            }
            self.out.extend_from_slice(&stage[..filled]);
        }
        Ok(())
    }
}

struct Unpack<'a, Q, N: Number> {
    group: usize,
    ends: &'a [N::Bytes],
    codes: &'a [u8],
    numbers: &'a mut [N::Bytes],
    how: PhantomData<Q>,
}

impl<Q: Quantiser, N: Number> Work for Unpack<'_, Q, N> {
    type Done = Result<(), CodecError>;

    #[inline(always)]
    fn run(self) -> Self::Done {
        let groups = self.numbers.chunks_mut(self.group);
        let codes = self.codes.chunks(Q::bytes(self.group));
        for ((numbers, codes), ends) in groups.zip(codes).zip(self.ends.chunks_exact(Q::ENDS)) {
            let mut both = [N::Bytes::default(); 2];
            both[..Q::ENDS].copy_from_slice(ends);
            let line = Q::line::<N>(both).ok_or(CodecError::Damaged("ends of a group"))?;
            Q::restore::<N>(line, codes, numbers);
        }
        Ok(())
    }
}
