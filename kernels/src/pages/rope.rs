//! RoPE re-positioning: rotates keys that were computed for some positions to positions `delta` later. Rotary embedding rotates each pair
//! of a key's elements by position times frequency. Rotations in a plane add up (Su et al., RoFormer, 2021, equation 34), so a further
//! rotation by `delta` times frequency suffices. Kernels: `cuda/rope.cu`.

use super::PagesError;
use crate::lanes::{Work, widest};
use crate::number::{Bf16, F16, F32, Number};
use std::marker::PhantomData;

/// Maximum distance of `cos^2 + sin^2` from 1. A table rounded to bfloat16 passes; one scaled by 1.02 does not.
const UNIT_SLACK: f32 = 0.02;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// IEEE 754 binary32.
    F32,
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// The pairing of a key's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Style {
    /// `i` and `i + rotary / 2` ("rotate half").
    NeoX,
    /// `2i` and `2i + 1` ("interleaved").
    GptJ,
}

/// The position of the rotated elements in a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys {
    /// Bytes of a state: key and value of one head and token.
    pub state_bytes: usize,
    /// Bytes before the first rotated element. For MLA, the latent part.
    pub offset: usize,
    /// Number of rotated elements, even: the head size, or less if a model rotates only a part.
    pub rotary: usize,
    pub dtype: Dtype,
    pub style: Style,
}

/// One rotation per pair of elements: cosine and sine of `delta * frequency`.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Turn {
    /// The rotation by `delta` positions for frequencies `base^(-2i / rotary)`, i < rotary / 2. Angles are f64, so cosines are correct to
    /// an f32's last place up to 2^24 positions. Errors: an odd size, a base that is not positive.
    pub fn by_base(base: f64, rotary: usize, delta: i64) -> Result<Self, PagesError> {
        even(rotary)?;
        if !(base.is_finite() && base > 0.0) {
            return Err(PagesError::BadFrequency);
        }
        let exponent = |i: usize| -2.0 * i as f64 / rotary as f64;
        let frequencies: Vec<f64> = (0..rotary / 2).map(|i| base.powf(exponent(i))).collect();
        Self::by_frequencies(&frequencies, delta)
    }

    /// The rotation by `delta` positions for a model's own frequencies (radians per position), as in scaled embeddings.
    ///
    /// Errors: an empty list, or a frequency that is not finite.
    pub fn by_frequencies(frequencies: &[f64], delta: i64) -> Result<Self, PagesError> {
        if frequencies.is_empty() || frequencies.iter().any(|f| !f.is_finite()) {
            return Err(PagesError::BadFrequency);
        }
        let rotations = frequencies.iter().map(|f| (f * delta as f64).sin_cos());
        let (sin, cos) = rotations.map(|(sin, cos)| (sin as f32, cos as f32)).unzip();
        Ok(Self { cos, sin })
    }

    /// The rotation by row `delta` of a model's cosine and sine table. Negate the sines for the inverse.
    ///
    /// Errors: lists of different lengths, values that are no rotation.
    pub fn of_table(cos: &[f32], sin: &[f32]) -> Result<Self, PagesError> {
        if cos.len() != sin.len() {
            return Err(PagesError::AngleCount {
                cosines: cos.len(),
                sines: sin.len(),
                pairs: cos.len(),
            });
        }
        let rotates = |c: f32, s: f32| (c * c + s * s - 1.0).abs() <= UNIT_SLACK;
        match cos.iter().zip(sin).position(|(c, s)| !rotates(*c, *s)) {
            Some(pair) => Err(PagesError::NotARotation { pair }),
            None => Ok(Self {
                cos: cos.to_vec(),
                sin: sin.to_vec(),
            }),
        }
    }
}

impl Turn {
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    pub fn sin(&self) -> &[f32] {
        &self.sin
    }
}

impl Keys {
    /// Rotates the keys of all `states` in place. `states` is a row of whole states, rank-verbatim or canonical. Arithmetic is in f32, and
    /// results round to nearest even in the element type.
    ///
    /// Errors: an odd rotary size, a key outside its state, an incomplete state, a rotation of another size.
    pub fn turn(&self, states: &mut [u8], turn: &Turn) -> Result<(), PagesError> {
        let end = self.check(states.len(), turn)?;
        match self.dtype {
            Dtype::Bf16 => self.turn_all::<Bf16>(end, states, turn),
            Dtype::F16 => self.turn_all::<F16>(end, states, turn),
            Dtype::F32 => self.turn_all::<F32>(end, states, turn),
        }
        Ok(())
    }

    fn turn_all<N: Number>(&self, end: usize, states: &mut [u8], turn: &Turn) {
        widest(Turning::<N> {
            keys: *self,
            end,
            states,
            turn,
            number: PhantomData,
        });
    }

    /// End of the key's rotated bytes, exclusive.
    fn check(&self, states: usize, turn: &Turn) -> Result<usize, PagesError> {
        even(self.rotary)?;
        let bytes = self.rotary.checked_mul(self.dtype.bytes());
        let end = bytes.and_then(|bytes| bytes.checked_add(self.offset));
        let end = end.ok_or(PagesError::Overflow {
            what: "bytes of a key",
        })?;
        if end > self.state_bytes {
            return Err(PagesError::KeyOutsideState {
                end,
                state_bytes: self.state_bytes,
            });
        }
        if !states.is_multiple_of(self.state_bytes) {
            return Err(PagesError::Size {
                what: "a row of states",
                got: states,
                want: states - states % self.state_bytes,
            });
        }
        if turn.cos.len() != self.rotary / 2 {
            return Err(PagesError::AngleCount {
                cosines: turn.cos.len(),
                sines: turn.sin.len(),
                pairs: self.rotary / 2,
            });
        }
        Ok(end)
    }
}

fn even(rotary: usize) -> Result<(), PagesError> {
    if rotary == 0 || !rotary.is_multiple_of(2) {
        return Err(PagesError::OddRotarySize { elements: rotary });
    }
    Ok(())
}

/// Rotates the keys of all states, for one element type.
struct Turning<'a, N> {
    keys: Keys,
    /// End of the key's rotated bytes, exclusive.
    end: usize,
    states: &'a mut [u8],
    turn: &'a Turn,
    number: PhantomData<N>,
}

impl<N: Number> Work for Turning<'_, N> {
    type Done = ();

    #[inline(always)]
    fn run(self) {
        let Keys { offset, style, .. } = self.keys;
        for state in self.states.chunks_exact_mut(self.keys.state_bytes) {
            let key = &mut state[offset..self.end];
            match style {
                Style::NeoX => turn_halves::<N>(key, self.turn),
                Style::GptJ => turn_neighbours::<N>(key, self.turn),
            }
        }
    }
}

#[inline(always)]
fn turn_halves<N: Number>(key: &mut [u8], turn: &Turn) {
    let (low, high) = key.split_at_mut(key.len() / 2);
    let angles = turn.cos.iter().zip(&turn.sin);
    for ((a, b), (cos, sin)) in N::all_mut(low).iter_mut().zip(N::all_mut(high)).zip(angles) {
        (*a, *b) = turned::<N>(*a, *b, *cos, *sin);
    }
}

#[inline(always)]
fn turn_neighbours<N: Number>(key: &mut [u8], turn: &Turn) {
    let pairs = N::all_mut(key).as_chunks_mut::<2>().0;
    let angles = turn.cos.iter().zip(&turn.sin);
    for ([a, b], (cos, sin)) in pairs.iter_mut().zip(angles) {
        (*a, *b) = turned::<N>(*a, *b, *cos, *sin);
    }
}

#[inline(always)]
fn turned<N: Number>(a: N::Bytes, b: N::Bytes, cos: f32, sin: f32) -> (N::Bytes, N::Bytes) {
    let (x, y) = (N::value(a), N::value(b));
    (N::nearest(x * cos - y * sin), N::nearest(y * cos + x * sin))
}
