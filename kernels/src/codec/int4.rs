//! 4-bit integers. The smallest number of a group becomes 0, the largest 15. The first half of a group is in the low nibbles of its bytes,
//! the second half in the high nibbles, so that neighbours are packed and unpacked together. In an odd group the last high nibble is zero.

use super::grouped::Quantiser;
use super::scale::{ROUND, Scale, within};
use crate::number::Number;
const LARGEST: f32 = 15.0;

pub struct Int4;

impl Quantiser for Int4 {
    const ENDS: usize = 2;

    #[inline(always)]
    fn bytes(numbers: usize) -> usize {
        numbers.div_ceil(2)
    }

    #[inline(always)]
    fn ends<N: Number>(numbers: &[N::Bytes]) -> Option<[N::Bytes; 2]> {
        let first = N::order(*numbers.first()?);
        let (mut least, mut greatest) = (first, first);
        for number in numbers {
            least = least.min(N::order(*number));
            greatest = greatest.max(N::order(*number));
        }
        Some([N::at(least), N::at(greatest)])
    }

    #[inline(always)]
    fn line<N: Number>(ends: [N::Bytes; 2]) -> Option<[f32; 2]> {
        let finite = ends.iter().all(|end| N::magnitude(*end) < N::INFINITY);
        let ordered = N::order(ends[0]) <= N::order(ends[1]);
        (finite && ordered).then(|| ends.map(N::value))
    }

    #[inline(always)]
    fn quantise<N: Number>([low, high]: [f32; 2], numbers: &[N::Bytes], codes: &mut [u8]) {
        let scale = Scale::new(low, high, LARGEST);
        let code = |number: N::Bytes| (scale.up(N::value(number)) + ROUND).to_bits() as u8 & 15;
        let (first, second) = numbers.split_at(codes.len());
        for ((first, second), byte) in first.iter().zip(second).zip(&mut *codes) {
            *byte = code(*first) | code(*second) << 4;
        }
        if let (Some(byte), Some(number)) = (codes.get_mut(second.len()), first.get(second.len())) {
            *byte = code(*number);
        }
    }

    #[inline(always)]
    fn restore<N: Number>([low, high]: [f32; 2], codes: &[u8], numbers: &mut [N::Bytes]) {
        let scale = Scale::new(low, high, LARGEST);
        let number = |code: u8| N::nearest(within(scale.down(f32::from(code)), low, high));
        let (first, second) = numbers.split_at_mut(codes.len());
        for (first, code) in first.iter_mut().zip(codes) {
            *first = number(code & 15);
        }
        for (second, code) in second.iter_mut().zip(codes) {
            *second = number(code >> 4);
        }
    }
}
