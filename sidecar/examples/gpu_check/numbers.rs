//! Kernels that compute: turns of keys and quantising.

use crate::Rig;
use crate::data::{Data, FINITE};
use crate::report::{Check, Why, holds, same};
use kvcachepool_kernels::codec::{Codec, Element, HEADER_BYTES, Shape, decode, encode};
use kvcachepool_kernels::pages::{Dtype, Keys, Style, Turn};
use kvcachepool_sidecar::gpu::cuda::buffer::Buffer;
use kvcachepool_sidecar::gpu::cuda::families::{Angles, Packed, Way, packed_bytes};

const STATES: usize = 301;
/// Counts of numbers that are no whole groups, and one group, and less; and what a section has.
const COUNTS: [u64; 5] = [1, 63, 128, 4_099, 65_536];
const GROUPS: [u16; 4] = [1, 33, 64, 128];

/// A codec for numbers that share a scale.
type ByGroup = fn(u16) -> Codec;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        for style in [Style::NeoX, Style::GptJ] {
            for data in FINITE {
                let name = format!("kernels/kv_turn_{style:?}_{dtype:?}").to_lowercase();
                checks.push(Check::new(format!("{name}/{data:?}"), move |rig| {
                    turned(rig, dtype, style, data)
                }));
            }
        }
    }
    let codecs: [(&str, ByGroup); 3] = [
        ("fp8", |group| Codec::Fp8 { group }),
        ("int8", |group| Codec::Int8 { group }),
        ("int4", |group| Codec::Int4 { group }),
    ];
    for (name, codec) in codecs {
        for half in [Half::BF16, Half::F16] {
            for data in FINITE.into_iter().chain([Data::NotFinite]) {
                let said = |way| format!("kernels/kv_{way}_{name}_{}/{data:?}", half.name);
                checks.push(Check::new(said("pack"), move |rig| {
                    packed(rig, codec, half, data)
                }));
                checks.push(Check::new(said("unpack"), move |rig| {
                    unpacked(rig, codec, half, data)
                }));
            }
        }
    }
    checks
}

fn turned(rig: &Rig, dtype: Dtype, style: Style, data: Data) -> Result<String, Why> {
    let kernels = rig.kernels()?;
    let mut moved = 0;
    for (pairs, before, behind) in [(64, 0, 128), (1, 3, 0), (33, 1, 5), (32, 512, 0)] {
        let row = before + 2 * pairs + behind;
        let keys = Keys {
            state_bytes: row * dtype.bytes(),
            offset: before * dtype.bytes(),
            rotary: 2 * pairs,
            dtype,
            style,
        };
        let turn = Turn::by_base(500_000.0, keys.rotary, -777).unwrap();
        let count = STATES * row;
        let mut states: Vec<u8> = match dtype {
            Dtype::Bf16 => bytes_of(&data.halves(count, 7, 0x7f80, 4)),
            Dtype::F16 => bytes_of(&data.halves(count, 10, 0x7c00, 4)),
            Dtype::F32 => {
                let numbers = data.wholes(count, 4);
                numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
            }
        };
        let on_device = Buffer::of(&rig.context, &states)?;
        let angles = Angles::new(kernels, &turn)?;
        kernels.turn(&rig.stream, &keys, &on_device, &angles)?;
        rig.stream.synchronize()?;
        keys.turn(&mut states, &turn).unwrap();
        same("the states", &on_device.content()?, &states)?;
        moved += states.len();
    }
    Ok(format!("{moved} bytes"))
}

/// A type of 16 bits.
#[derive(Clone, Copy)]
struct Half {
    name: &'static str,
    dtype: Dtype,
    element: Element,
    shift: u32,
    infinite: u16,
}

impl Half {
    const BF16: Self = Self {
        name: "bf16",
        dtype: Dtype::Bf16,
        element: Element::Bf16,
        shift: 7,
        infinite: 0x7f80,
    };
    const F16: Self = Self {
        name: "f16",
        dtype: Dtype::F16,
        element: Element::F16,
        shift: 10,
        infinite: 0x7c00,
    };

    /// Numbers whose NaNs are all the same: nobody promises their signs.
    fn plain(self, raw: &[u8]) -> Vec<u8> {
        let pairs = raw.chunks_exact(2);
        let numbers = pairs.map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let plain: Vec<u16> = numbers
            .map(|bits| match bits & 0x7fff > self.infinite {
                true => 0x7fff,
                false => bits,
            })
            .collect();
        bytes_of(&plain)
    }
}

fn bytes_of(numbers: &[u16]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// Codes whose NaNs are all the same.
fn plain_codes(codec: Codec, codes: &[u8]) -> Vec<u8> {
    let fp8 = matches!(codec, Codec::Fp8 { .. });
    let nan = |code: &u8| fp8 && code & 0x7f == 0x7f;
    codes
        .iter()
        .map(|c| if nan(c) { 0x7f } else { *c })
        .collect()
}

/// Raw numbers, ends and codes after a kernel, and how many groups it left out.
fn run(
    rig: &Rig,
    way: Way,
    codec: Codec,
    half: Half,
    [raw, ends, codes]: [&[u8]; 3],
) -> Result<([Vec<u8>; 3], u32), Why> {
    let on_device = |bytes| Buffer::of(&rig.context, bytes);
    let (raw_there, ends_there, codes_there) =
        (on_device(raw)?, on_device(ends)?, on_device(codes)?);
    let refused = on_device(&[0; 4])?;
    let packed = Packed {
        codec,
        dtype: half.dtype,
        numbers: raw.len() as u64 / 2,
        raw: &raw_there,
        ends: &ends_there,
        codes: &codes_there,
        refused: &refused,
    };
    rig.kernels()?.quantise(&rig.stream, way, &packed)?;
    rig.stream.synchronize()?;
    let count = refused.content()?;
    let count = u32::from_ne_bytes(count.as_slice().try_into().unwrap());
    let after = [
        raw_there.content()?,
        ends_there.content()?,
        codes_there.content()?,
    ];
    Ok((after, count))
}

/// Calls `one` with numbers of every count and group.
fn each(
    half: Half,
    data: Data,
    codec: ByGroup,
    mut one: impl FnMut(Codec, &[u8]) -> Result<(), Why>,
) -> Result<String, Why> {
    let mut numbers = 0;
    for count in COUNTS {
        for group in GROUPS {
            let raw = data.halves(
                count as usize,
                half.shift,
                half.infinite,
                count + u64::from(group),
            );
            one(codec(group), &bytes_of(&raw))?;
            numbers += count;
        }
    }
    Ok(format!("{numbers} numbers in groups of {GROUPS:?}"))
}

fn packed(rig: &Rig, codec: ByGroup, half: Half, data: Data) -> Result<String, Why> {
    each(half, data, codec, |codec, raw| {
        let [ends, codes] = packed_bytes(codec, raw.len() as u64 / 2).unwrap();
        let empty = (vec![0; ends as usize], vec![0; codes as usize]);
        let (after, refused) = run(rig, Way::Pack, codec, half, [raw, &empty.0, &empty.1])?;
        same("the numbers", &after[0], raw)?;
        let mut stored = Vec::new();
        let wanted = encode(codec, &Shape::flat(half.element), raw, &mut stored);
        holds(
            wanted.is_err() == (refused > 0),
            format!("{codec:?}: {refused} groups refused, the reference says {wanted:?}"),
        )?;
        if wanted.is_err() {
            return Ok(());
        }
        let (ends, codes) = stored[HEADER_BYTES..].split_at(after[1].len());
        same("the ends", &after[1], ends)?;
        let (got, want) = (plain_codes(codec, &after[2]), plain_codes(codec, codes));
        same("the codes", &got, &want)
    })
}

fn unpacked(rig: &Rig, codec: ByGroup, half: Half, data: Data) -> Result<String, Why> {
    each(half, data, codec, |codec, raw| {
        let shape = Shape::flat(half.element);
        let mut stored = Vec::new();
        if encode(codec, &shape, raw, &mut stored).is_err() {
            // What no codec packs: ends that no group has, which both refuse.
            let [ends, codes] = packed_bytes(codec, raw.len() as u64 / 2).unwrap();
            stored.resize(HEADER_BYTES + (ends + codes) as usize, 0xff);
            let bytes = stored[HEADER_BYTES..].split_at(ends as usize);
            let (_, refused) = run(rig, Way::Unpack, codec, half, [raw, bytes.0, bytes.1])?;
            return holds(
                refused > 0,
                format!("{codec:?}: damaged ends were not refused"),
            );
        }
        let [ends, _] = packed_bytes(codec, raw.len() as u64 / 2).unwrap();
        let begin = HEADER_BYTES + ends as usize;
        // Any codes at all, over ends that a group has.
        for (at, code) in stored[begin..].iter_mut().enumerate().step_by(3) {
            *code = (at as u8).wrapping_mul(37);
        }
        let mut want = vec![0; raw.len()];
        let decoded = decode(codec, &shape, &stored, &mut want);
        let (ends, codes) = stored[HEADER_BYTES..].split_at(ends as usize);
        let empty = vec![0; raw.len()];
        let (after, refused) = run(rig, Way::Unpack, codec, half, [&empty, ends, codes])?;
        holds(
            decoded.is_ok() && refused == 0,
            format!("{codec:?}: {refused} groups refused, the reference says {decoded:?}"),
        )?;
        same("the numbers", &half.plain(&after[0]), &half.plain(&want))
    })
}
