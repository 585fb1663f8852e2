//! `quant.cu`.

use crate::host::{Argument, Launch, host, run};
use kvcachepool_kernels::codec::{Codec, Element, HEADER_BYTES, Shape, decode, encode};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    name: String,
    codec: Codec,
    shape: Shape,
    group: u16,
    /// Ends of a group that are stored.
    ends: usize,
    raw: Vec<u8>,
    launch: Launch,
}

impl Case {
    /// Bytes of all ends: those of 16 bits each.
    fn ends_bytes(&self) -> usize {
        (self.raw.len() / 2).div_ceil(self.group.into()) * self.ends * 2
    }

    /// Raw numbers, ends and codes after a kernel, and how many groups it refused.
    fn run(&self, way: &str, raw: &[u8], packed: &[u8]) -> ([Vec<u8>; 3], u32) {
        let (ends, codes) = packed.split_at(self.ends_bytes());
        let after = run(
            host(),
            &format!("kv_{way}_{}", self.name),
            self.launch,
            &[
                Argument::Buffer(raw, 0),
                Argument::Number(raw.len() as u64 / 2),
                Argument::Number(self.group.into()),
                Argument::Buffer(ends, 2),
                Argument::Buffer(codes, 1),
                Argument::Buffer(&[0; 4], 0),
            ],
        );
        let [raw, ends, codes, refused] = after.try_into().unwrap();
        let refused = u32::from_ne_bytes(refused.try_into().unwrap());
        ([raw, ends, codes], refused)
    }
}

/// Numbers of about one size, as keys and values are, with zeros, and here and there any bits at all; of bfloat16 also very small numbers, and
/// so large ones that a group is wider than a number can be.
fn any_numbers() -> impl Strategy<Value = Vec<u16>> {
    let size = prop_oneof![
        4 => (0..6u16).prop_map(|shift| (0x83ff, (14 + shift) << 10)),
        1 => Just((0x9fff, 0)),
        1 => Just((0x807f, 0x7f00)),
    ];
    size.prop_flat_map(|(kept, set)| {
        let number = prop_oneof![
            60 => any::<u16>().prop_map(move |bits| bits & kept | set),
            3 => Just(0u16),
            3 => Just(0x8000),
            1 => any::<u16>(),
        ];
        proptest::collection::vec(number, 0..400)
    })
}

fn any_case() -> impl Strategy<Value = Case> {
    let sizes = (1..140u16, 1..4u32, 1..4u32);
    (any_numbers(), sizes, 0..3usize, any::<bool>()).prop_map(
        |(numbers, (group, grid, rows), codec, half)| {
            let (name, codec, ends) = [
                ("fp8", Codec::Fp8 { group }, 1),
                ("int8", Codec::Int8 { group }, 1),
                ("int4", Codec::Int4 { group }, 2),
            ][codec];
            let (element, suffix) = if half {
                (Element::F16, "f16")
            } else {
                (Element::Bf16, "bf16")
            };
            Case {
                name: format!("{name}_{suffix}"),
                codec,
                shape: Shape::flat(element),
                group,
                ends,
                raw: numbers.iter().flat_map(|n| n.to_le_bytes()).collect(),
                launch: Launch {
                    grid: [grid, 1],
                    block: [32, rows],
                },
            }
        },
    )
}

/// Without the sign of NaN, which no one promises.
fn codes_alike(case: &Case, one: &[u8], other: &[u8]) -> bool {
    let fp8 = matches!(case.codec, Codec::Fp8 { .. });
    let plain = |code: &u8| {
        if fp8 && code & 0x7f == 0x7f {
            0x7f
        } else {
            *code
        }
    };
    one.iter().map(plain).eq(other.iter().map(plain))
}

fn numbers_alike(case: &Case, one: &[u8], other: &[u8]) -> bool {
    let infinity = if case.shape.element == Element::F16 {
        0x7c00
    } else {
        0x7f80
    };
    let plain = |pair: &[u8]| {
        let bits = u16::from_le_bytes([pair[0], pair[1]]);
        if bits & 0x7fff > infinity {
            0x7fff
        } else {
            bits
        }
    };
    one.chunks(2).map(plain).eq(other.chunks(2).map(plain))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn packed_bytes_are_those_of_the_reference_and_so_is_what_is_refused(case in any_case()) {
        let mut stored = Vec::new();
        let wanted = encode(case.codec, &case.shape, &case.raw, &mut stored);
        let numbers = case.raw.len() / 2;
        let full = numbers / usize::from(case.group);
        let bytes = |count: usize| if case.ends == 2 { count.div_ceil(2) } else { count };
        let codes = full * bytes(case.group.into()) + bytes(numbers % usize::from(case.group));
        let empty = vec![0; case.ends_bytes() + codes];
        let ([raw, ends, codes], refused) = case.run("pack", &case.raw, &empty);
        prop_assert_eq!(&raw, &case.raw);
        prop_assert_eq!(wanted.is_err(), refused > 0);
        if wanted.is_ok() {
            let (wanted_ends, wanted_codes) = stored[HEADER_BYTES..].split_at(ends.len());
            prop_assert_eq!(&ends, wanted_ends);
            prop_assert!(codes_alike(&case, &codes, wanted_codes), "{:?} {:?}", codes, wanted_codes);
        }
    }

    #[test]
    fn unpacked_numbers_are_those_of_the_reference_for_any_codes(case in any_case(), noise in any::<[u8; 8]>(), damaged: bool) {
        let mut stored = Vec::new();
        if encode(case.codec, &case.shape, &case.raw, &mut stored).is_err() {
            return Ok(());
        }
        let ends = HEADER_BYTES + case.ends_bytes();
        for (code, noise) in stored[ends..].iter_mut().zip(noise.iter().cycle()).step_by(3) {
            *code = *noise;
        }
        if damaged && stored.len() > HEADER_BYTES {
            stored[HEADER_BYTES + usize::from(noise[0]) % case.ends_bytes()] = noise[1];
        }
        let mut wanted = vec![0; case.raw.len()];
        let decoded = decode(case.codec, &case.shape, &stored, &mut wanted);
        let empty = vec![0; case.raw.len()];
        let ([raw, _, _], refused) = case.run("unpack", &empty, &stored[HEADER_BYTES..]);
        prop_assert_eq!(decoded.is_err(), refused > 0);
        if decoded.is_ok() {
            prop_assert!(numbers_alike(&case, &raw, &wanted), "{:?} {:?}", raw, wanted);
        }
    }
}
