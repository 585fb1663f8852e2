//! `rope.cu`.

use crate::host::{Argument, Launch, host, run};
use kvcachepool_kernels::pages::{Dtype, Keys, Style, Turn};
use proptest::prelude::*;

/// Bits of elements: zeros, subnormal and large numbers among them, no infinity and no NaN.
fn elements(dtype: Dtype, words: &[u32]) -> Vec<u8> {
    let finite = |bits: u16, exponents: u16, shift: u16| {
        let exponent = (bits >> shift) & exponents;
        if exponent == exponents {
            bits & !(1 << shift)
        } else {
            bits
        }
    };
    let wide = |word: &u32| {
        if word >> 23 & 255 == 255 {
            word & !(1 << 23)
        } else {
            *word
        }
    };
    match dtype {
        Dtype::Bf16 => words
            .iter()
            .flat_map(|w| finite(*w as u16, 255, 7).to_le_bytes())
            .collect(),
        Dtype::F16 => words
            .iter()
            .flat_map(|w| finite(*w as u16, 31, 10).to_le_bytes())
            .collect(),
        Dtype::F32 => words.iter().flat_map(|w| wide(w).to_le_bytes()).collect(),
    }
}

fn name(dtype: Dtype, style: Style) -> String {
    format!("kv_turn_{style:?}_{dtype:?}").to_lowercase()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn turns_are_those_of_the_reference_bit_for_bit(
        dtype in proptest::sample::select(vec![Dtype::Bf16, Dtype::F16, Dtype::F32]),
        style in proptest::sample::select(vec![Style::NeoX, Style::GptJ]),
        pairs in 1..70usize, before in 0..3usize, behind in 0..3usize,
        words in proptest::collection::vec(any::<u32>(), 600),
        delta in -100_000i64..100_000, grid in 1..4u32, rows in 1..4u32,
    ) {
        let host = host();
        let row = before + 2 * pairs + behind;
        let keys = Keys {
            state_bytes: row * dtype.bytes(),
            offset: before * dtype.bytes(),
            rotary: 2 * pairs,
            dtype,
            style,
        };
        let turn = Turn::by_base(10_000.0, keys.rotary, delta).unwrap();
        let states = elements(dtype, &words[..words.len() / row * row]);
        let mut wanted = states.clone();
        keys.turn(&mut wanted, &turn).unwrap();
        let floats = |list: &[f32]| -> Vec<u8> { list.iter().flat_map(|f| f.to_ne_bytes()).collect() };
        let (cos, sin) = (floats(turn.cos()), floats(turn.sin()));
        let launch = Launch { grid: [grid, 1], block: [32, rows] };
        let after = run(host, &name(dtype, style), launch, &[
            Argument::Buffer(&states, 0),
            Argument::Number((words.len() / row) as u64),
            Argument::Number(keys.state_bytes as u64),
            Argument::Number(keys.offset as u64),
            Argument::Number(pairs as u64),
            Argument::Buffer(&cos, 0),
            Argument::Buffer(&sin, 0),
        ]);
        prop_assert_eq!(&after[0], &wanted);
    }
}
