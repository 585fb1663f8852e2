//! An order-0 entropy coder of bytes: range asymmetric numeral systems (J. Duda, arXiv:1311.2540) with 12-bit probabilities and 32
//! interleaved states, as F. Giesen describes in "Interleaved entropy coders" (arXiv:1402.3392). 32 states are two vectors of a CPU, or one
//! warp.
//!
//! ```text
//! 32       bit n of byte n / 8: byte value n occurs
//! u16 each frequency of every value that occurs; their sum is 4096
//! 32 x u32 states
//! u16 each words, in the order in which decoding reads them
//! ```

mod coder;
mod table;

use super::CodecError;
use coder::{STATES, decode, encode};
use table::Frequencies;

const STATE_BYTES: usize = 4 * STATES;

/// Appends packed bytes to `out`. Returns false and changes nothing if packing would save less than a 64th: copying such bytes is faster
/// than decoding them.
pub fn pack(bytes: &[u8], words: &mut Vec<u16>, out: &mut Vec<u8>) -> bool {
    let Some(frequencies) = Frequencies::worth_it(bytes) else {
        return false;
    };
    let before = out.len();
    frequencies.write(out);
    let states = encode(&frequencies, bytes, words);
    out.extend(states.iter().flat_map(|state| state.to_le_bytes()));
    out.extend(words.iter().rev().flat_map(|word| word.to_le_bytes()));
    let smaller = out.len() - before < bytes.len();
    if !smaller {
        out.truncate(before);
    }
    smaller
}

/// Unpacks exactly `bytes.len()` bytes.
pub fn unpack(packed: &[u8], bytes: &mut [u8]) -> Result<(), CodecError> {
    let (frequencies, rest) = Frequencies::read(packed)?;
    let (states, words) = rest
        .split_at_checked(STATE_BYTES)
        .ok_or(CodecError::StoredLength)?;
    let mut from = [0; STATES];
    for (state, bytes) in from.iter_mut().zip(states.as_chunks().0) {
        *state = u32::from_le_bytes(*bytes);
    }
    if decode(&frequencies.slots(), from, words, bytes) {
        Ok(())
    } else {
        Err(CodecError::Damaged("words of an entropy coder"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn there_and_back(bytes: &[u8]) -> Option<usize> {
        let (mut out, mut words) = (b"before".to_vec(), Vec::new());
        if !pack(bytes, &mut words, &mut out) {
            assert_eq!(out, b"before");
            return None;
        }
        let packed = out.strip_prefix(b"before").unwrap();
        assert!(packed.len() < bytes.len());
        let mut back = vec![0xa5; bytes.len()];
        unpack(packed, &mut back).unwrap();
        assert!(back == bytes);
        Some(packed.len())
    }

    proptest! {
        #[test]
        fn bytes_come_back(most in 1..=256u32, count in 0..20_000usize, seed in any::<u32>()) {
            let mut state = seed;
            let bytes: Vec<_> = (0..count).map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // The product of two makes small values frequent.
                (((state >> 16 & 0xff) * (state >> 24)) % most) as u8
            }).collect();
            there_and_back(&bytes);
        }

        #[test]
        fn any_words_end(packed in vec(any::<u8>(), 0..2_000), count in 0..4_000usize) {
            let _ = unpack(&packed, &mut vec![0; count]);
        }

        #[test]
        fn any_words_behind_a_sound_table_end(words in vec(any::<u8>(), 0..2_000), count in 0..4_000usize) {
            let mut packed = Vec::new();
            Frequencies::worth_it(&[7; 1_000]).unwrap().write(&mut packed);
            packed.extend(words);
            let _ = unpack(&packed, &mut vec![0; count]);
        }
    }

    #[test]
    fn one_value_needs_no_words() {
        assert_eq!(there_and_back(&[9; 65_536]), Some(32 + 2 + STATE_BYTES));
    }

    #[test]
    fn the_size_is_near_the_entropy() {
        // Value n with a probability of 2^-(n + 1): two bits each on average.
        let bytes: Vec<_> = (1u32..=65_536).map(|n| n.trailing_zeros() as u8).collect();
        let packed = there_and_back(&bytes).unwrap();
        assert!((16_384..16_384 + 300).contains(&packed), "{packed}");
    }

    #[test]
    fn bytes_without_pattern_are_left_alone() {
        let bytes: Vec<_> = (0..65_536u32).map(|n| (n * 7) as u8).collect();
        assert_eq!(there_and_back(&bytes), None);
        assert_eq!(there_and_back(&[]), None);
        assert_eq!(there_and_back(&[1, 2, 3]), None);
    }
}
