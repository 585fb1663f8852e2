//! The coder's states. A state is in [`LOW`]..2^31. It emits and consumes words of 16 bits, so one word brings it back into that range.

use super::table::{BITS, Frequencies, Slots, TOTAL};
use crate::lanes::{Work, widest};

/// Number of interleaved states.
pub const STATES: usize = 32;
/// The smallest state. Encoding starts and decoding must end with it.
const LOW: u32 = 1 << 15;

/// How a value is coded: a state becomes `state / frequency * TOTAL + state % frequency + start`. The division is a multiplication by a
/// reciprocal (R. Alverson, "Integer division using reciprocals", 1991), exact below 2^31.
#[derive(Clone, Copy, Default)]
struct Step {
    /// States at or above this would leave the range, and emit a word first.
    limit: u32,
    reciprocal: u32,
    shift: u32,
    bias: u32,
    /// [`TOTAL`] minus the frequency.
    rest: u32,
}

impl Step {
    fn new(start: u32, frequency: u32) -> Self {
        // The exact reciprocal of 1 does not fit. This one is too small by one, and the bias compensates for that.
        let (reciprocal, shift, bias) = if frequency == 1 {
            (u32::MAX, 0, start + TOTAL - 1)
        } else {
            let shift = u32::BITS - (frequency - 1).leading_zeros();
            let dividend = (1u64 << (shift + 31)) + u64::from(frequency) - 1;
            ((dividend / u64::from(frequency)) as u32, shift - 1, start)
        };
        Self {
            limit: frequency << (31 - BITS),
            reciprocal,
            shift,
            bias,
            rest: TOTAL - frequency,
        }
    }

    #[inline(always)]
    fn next(&self, state: u32) -> u32 {
        let quotient = ((u64::from(state) * u64::from(self.reciprocal)) >> 32) as u32 >> self.shift;
        state
            .wrapping_add(self.bias)
            .wrapping_add(quotient.wrapping_mul(self.rest))
    }
}

/// Encodes from the last byte to the first. Overwrites `words`; decoding reads them from their end.
pub fn encode(frequencies: &Frequencies, bytes: &[u8], words: &mut Vec<u16>) -> [u32; STATES] {
    let mut steps = [Step::default(); 256];
    for (value, range) in frequencies.with_starts() {
        steps[value] = Step::new(range.start, range.len() as u32);
    }
    // A byte emits at most one word. One more is written, but not kept.
    words.clear();
    words.resize(bytes.len() + 1, 0);
    let (mut states, mut count) = ([LOW; STATES], 0);
    let mut code = |state: &mut u32, byte: u8| {
        let step = &steps[usize::from(byte)];
        // Whether a word is due is unpredictable, so it is always written, and kept by counting it.
        let due = *state >= step.limit;
        words[count] = *state as u16;
        count += usize::from(due);
        *state = step.next(if due { *state >> 16 } else { *state });
    };
    let (rounds, rest) = bytes.as_chunks::<STATES>();
    for (state, byte) in states.iter_mut().zip(rest).rev() {
        code(state, *byte);
    }
    for round in rounds.iter().rev() {
        for (state, byte) in states.iter_mut().zip(round).rev() {
            code(state, *byte);
        }
    }
    words.truncate(count);
    states
}

/// Decodes exactly `bytes.len()` bytes from little-endian words. Returns false if the states and words do not encode that many bytes.
pub fn decode(slots: &Slots, states: [u32; STATES], words: &[u8], bytes: &mut [u8]) -> bool {
    widest(Decode {
        slots,
        states,
        words,
        bytes,
    })
}

struct Decode<'a> {
    slots: &'a Slots,
    states: [u32; STATES],
    words: &'a [u8],
    bytes: &'a mut [u8],
}

impl Work for Decode<'_> {
    type Done = bool;

    #[inline(always)]
    fn run(mut self) -> bool {
        let mut at = 0usize;
        let (rounds, rest) = self.bytes.as_chunks_mut::<STATES>();
        for bytes in rounds {
            let words = window(self.words, at);
            at = at.wrapping_add(decode_round(self.slots, &mut self.states, &words, bytes));
        }
        let words = window(self.words, at);
        at = at.wrapping_add(decode_round(self.slots, &mut self.states, &words, rest));
        at.checked_mul(2) == Some(self.words.len()) && self.states == [LOW; STATES]
    }
}

/// The words of one round, from a position on; zeros past the last one. Decoding detects later that it has read too many.
#[inline(always)]
fn window(words: &[u8], at: usize) -> [u8; 2 * STATES] {
    let rest = words.get(at.saturating_mul(2)..).unwrap_or_default();
    match rest.first_chunk() {
        Some(bytes) => *bytes,
        None => {
            let mut bytes = [0; 2 * STATES];
            bytes[..rest.len()].copy_from_slice(rest);
            bytes
        }
    }
}

/// Decodes one byte from each state. Returns the number of words consumed.
#[inline(always)]
fn decode_round(
    slots: &Slots,
    states: &mut [u32; STATES],
    words: &[u8; 2 * STATES],
    bytes: &mut [u8],
) -> usize {
    for (state, byte) in states.iter_mut().zip(&mut *bytes) {
        let slot = slots[(*state % TOTAL) as usize];
        let (frequency, above_start) = ((slot >> 8) % TOTAL + 1, slot >> 20);
        *byte = slot as u8;
        // This is below 2^32 for every state.
        *state = frequency
            .wrapping_mul(*state >> BITS)
            .wrapping_add(above_start);
    }
    let words = words.as_chunks::<2>().0;
    let mut taken = 0usize;
    for (state, _) in states.iter_mut().zip(bytes) {
        let due = *state < LOW;
        let word = u32::from(u16::from_le_bytes(words[taken % STATES]));
        *state = if due { *state << 16 | word } else { *state };
        taken = taken.wrapping_add(due.into());
    }
    taken
}
