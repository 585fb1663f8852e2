//! Lossless packing. Raw bytes are cut into blocks. A block of numbers is split into planes, one per byte of a number, because exponents of
//! neighbours are similar while their mantissas are noise. A plane is packed by an entropy coder, or stored as it is if packing saves
//! nothing. Stored bytes exceed the raw ones by at most the header and one byte per plane and block.
//!
//! ```text
//! per block of 128 KiB, per plane:   u8 0, the plane   |   u8 1, u32 bytes of the packed plane, the packed plane
//! after the planes of the last:      raw bytes that form no whole number
//! ```

mod split;

use super::{CodecError, Element, nothing_left, rans, take};
use crate::lanes::widest;
use split::{Join, Split};

/// Raw bytes of a block. Its planes and tables fit in the L2 cache.
pub const BLOCK_BYTES: usize = 128 << 10;

const ALONE: u8 = 0;
const PACKED: u8 = 1;

/// Packs any bytes. `element` selects the planes; a wrong element costs space only.
pub fn pack(element: Element, raw: &[u8], out: &mut Vec<u8>) {
    let (mut planes, mut words) = (vec![0; raw.len().min(BLOCK_BYTES)], Vec::new());
    for block in raw.chunks(BLOCK_BYTES) {
        let (numbers, rest) = block.split_at(whole(element, block.len()));
        let planes = &mut planes[..numbers.len()];
        split(element, numbers, planes);
        for plane in planes.chunks(plane_bytes(element, numbers.len())) {
            pack_plane(plane, &mut words, out);
        }
        out.extend_from_slice(rest);
    }
}

/// Unpacks exactly as many bytes as were packed.
pub fn unpack(element: Element, mut packed: &[u8], raw: &mut [u8]) -> Result<(), CodecError> {
    let mut planes = vec![0; raw.len().min(BLOCK_BYTES)];
    for block in raw.chunks_mut(BLOCK_BYTES) {
        let (numbers, rest) = block.split_at_mut(whole(element, block.len()));
        let planes = &mut planes[..numbers.len()];
        for plane in planes.chunks_mut(plane_bytes(element, numbers.len())) {
            unpack_plane(&mut packed, plane)?;
        }
        join(element, planes, numbers);
        rest.copy_from_slice(take(&mut packed, rest.len())?);
    }
    nothing_left(packed)
}

/// Bytes of a block that form whole numbers.
fn whole(element: Element, block: usize) -> usize {
    block - block % element.bytes()
}

/// Bytes of each plane of a block, at least one.
fn plane_bytes(element: Element, numbers: usize) -> usize {
    (numbers / element.bytes()).max(1)
}

fn split(element: Element, raw: &[u8], planes: &mut [u8]) {
    match element {
        Element::Opaque => planes.copy_from_slice(raw),
        Element::Bf16 | Element::F16 => widest(Split::<2> {
            numbers: raw.as_chunks().0,
            planes,
        }),
        Element::F32 => widest(Split::<4> {
            numbers: raw.as_chunks().0,
            planes,
        }),
    }
}

fn join(element: Element, planes: &[u8], raw: &mut [u8]) {
    match element {
        Element::Opaque => raw.copy_from_slice(planes),
        Element::Bf16 | Element::F16 => widest(Join::<2> {
            planes,
            numbers: raw.as_chunks_mut().0,
        }),
        Element::F32 => widest(Join::<4> {
            planes,
            numbers: raw.as_chunks_mut().0,
        }),
    }
}

fn pack_plane(plane: &[u8], words: &mut Vec<u16>, out: &mut Vec<u8>) {
    let at = out.len();
    out.extend([PACKED, 0, 0, 0, 0]);
    if rans::pack(plane, words, out) {
        let bytes = (out.len() - at - 5) as u32;
        out[at + 1..at + 5].copy_from_slice(&bytes.to_le_bytes());
    } else {
        out.truncate(at);
        out.push(ALONE);
        out.extend_from_slice(plane);
    }
}

fn unpack_plane(packed: &mut &[u8], plane: &mut [u8]) -> Result<(), CodecError> {
    match take(packed, 1)? {
        [ALONE] => plane.copy_from_slice(take(packed, plane.len())?),
        [PACKED] => {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(take(packed, 4)?);
            rans::unpack(take(packed, u32::from_le_bytes(bytes) as usize)?, plane)?;
        }
        _ => return Err(CodecError::Damaged("kind of a plane")),
    }
    Ok(())
}
