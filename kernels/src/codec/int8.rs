//! 8-bit integers. The largest magnitude of a group becomes 127. Code -128 is never written.

use super::grouped::Quantiser;
use super::scale::{ROUND, Scale, within};
use crate::number::Number;
const LARGEST: f32 = 127.0;

pub struct Int8;

impl Quantiser for Int8 {
    #[inline(always)]
    fn ends<N: Number>(numbers: &[N::Bytes]) -> Option<[N::Bytes; 2]> {
        let largest = N::largest(numbers);
        (largest < N::INFINITY).then(|| [N::at(largest); 2])
    }

    #[inline(always)]
    fn quantise<N: Number>([low, high]: [f32; 2], numbers: &[N::Bytes], codes: &mut [u8]) {
        let scale = Scale::new(low, high, LARGEST);
        for (number, code) in numbers.iter().zip(codes) {
            *code = (scale.up(N::value(*number)) + ROUND).to_bits() as u8;
        }
    }

    #[inline(always)]
    fn restore<N: Number>([low, high]: [f32; 2], codes: &[u8], numbers: &mut [N::Bytes]) {
        let scale = Scale::new(low, high, LARGEST);
        for (number, code) in numbers.iter_mut().zip(codes) {
            let value = scale.down(f32::from(*code as i8));
            *number = N::nearest(within(value, -high, high));
        }
    }
}
