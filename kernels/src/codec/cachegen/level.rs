//! Quantises rows of numbers to levels, and restores them. With `steps` steps to either side, level 0 is the negated largest magnitude of
//! the row, level `steps` is zero, and level `2 * steps` is the largest magnitude. A row of zeros has level `steps` throughout.

use crate::codec::scale::{ROUND, Scale, within};
use crate::codec::{CodecError, Shape};
use crate::lanes::{Work, widest};
use crate::number::Number;
use std::marker::PhantomData;

/// Quantisation steps of a plane to either side of zero: half of LMCache's bins, less one. LMCache uses 32 bins for the first 10 layers of
/// keys and the first 2 of values, and for all layers of models with fewer than 10; else 16. A tensor of keys and values in one counts as keys.
pub fn steps(shape: &Shape, plane: usize) -> u8 {
    const MANY: u8 = 32 / 2 - 1;
    const FEW: u8 = 16 / 2 - 1;
    let halves = shape.halves.max(1) as usize;
    let (layer, half) = (plane / halves, plane % halves);
    let layers_with_many = if half == 0 { 10 } else { 2 };
    if shape.layers < 10 || layer < layers_with_many {
        MANY
    } else {
        FEW
    }
}

/// Quantises a plane and appends the largest magnitude of each row to `out`. Returns the first row with a number that is not finite, if
/// any.
pub fn quantise<N: Number>(
    steps: u8,
    channels: usize,
    numbers: &[N::Bytes],
    levels: &mut [u8],
    out: &mut Vec<u8>,
) -> Option<usize> {
    widest(Quantise::<N> {
        steps,
        channels,
        numbers,
        levels,
        out,
    })
}

struct Quantise<'a, N: Number> {
    steps: u8,
    channels: usize,
    numbers: &'a [N::Bytes],
    levels: &'a mut [u8],
    out: &'a mut Vec<u8>,
}

impl<N: Number> Work for Quantise<'_, N> {
    type Done = Option<usize>;

    #[inline(always)]
    fn run(self) -> Option<usize> {
        let steps = f32::from(self.steps);
        let rows = self.numbers.chunks_exact(self.channels);
        let levels = self.levels.chunks_exact_mut(self.channels);
        for (row, (numbers, levels)) in rows.zip(levels).enumerate() {
            let largest = N::largest(numbers);
            if largest >= N::INFINITY {
                return Some(row);
            }
            self.out.extend_from_slice(N::at(largest).as_ref());
            let scale = Scale::new(0.0, N::value(N::at(largest)), steps);
            for (number, level) in numbers.iter().zip(levels) {
                *level = (scale.up(N::value(*number)) + steps + ROUND).to_bits() as u8;
            }
        }
        None
    }
}

/// Restores the numbers of rows from their levels and largest magnitudes.
pub fn restore<N: Number>(
    steps: u8,
    channels: usize,
    rows: &[N::Bytes],
    levels: &[u8],
    numbers: &mut [N::Bytes],
) -> Result<(), CodecError> {
    widest(Restore::<N> {
        steps,
        channels,
        rows,
        levels,
        numbers,
        how: PhantomData,
    })
}

struct Restore<'a, N: Number> {
    steps: u8,
    channels: usize,
    rows: &'a [N::Bytes],
    levels: &'a [u8],
    numbers: &'a mut [N::Bytes],
    how: PhantomData<N>,
}

impl<N: Number> Work for Restore<'_, N> {
    type Done = Result<(), CodecError>;

    #[inline(always)]
    fn run(self) -> Self::Done {
        let steps = f32::from(self.steps);
        let levels = self.levels.chunks_exact(self.channels);
        let numbers = self.numbers.chunks_exact_mut(self.channels);
        for ((largest, levels), numbers) in self.rows.iter().zip(levels).zip(numbers) {
            if !N::is_bound(*largest) {
                return Err(CodecError::Damaged("largest magnitude of a row"));
            }
            let largest = N::value(*largest);
            let scale = Scale::new(0.0, largest, steps);
            for (level, number) in levels.iter().zip(numbers) {
                let value = scale.down(f32::from(*level) - steps);
                *number = N::nearest(within(value, -largest, largest));
            }
        }
        Ok(())
    }
}
