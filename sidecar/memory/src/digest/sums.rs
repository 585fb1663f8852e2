//! XXH3 accumulators for long input, with AVX2, over memory that other processes may write. Seed 0 and the default secret, after "xxHash
//! fast digest algorithm" by Y. Collet (doc/xxhash_spec.md of xxHash, version 0.2.0).
//!
//! Wider vectors gain little: AVX-512 is no faster from caches, and 5% faster from memory.
#![allow(unsafe_code)]

use crate::mapping::Mapping;
use std::arch::asm;
use std::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_mul_epu32, _mm256_set1_epi64x, _mm256_shuffle_epi32,
    _mm256_slli_epi64, _mm256_srli_epi64, _mm256_xor_si256,
};
use std::mem::transmute;
use xxhash_rust::xxh3::xxh3_128;

/// Input up to this length uses other algorithms, which the library provides.
const SHORT_BYTES: u64 = 240;
/// Bytes added to the accumulators at a time.
const STRIPE_BYTES: usize = 64;
/// Stripes of a block. The accumulators are scrambled after each block.
const BLOCK_STRIPES: usize = 16;
/// Bytes held back, because the last stripe is added differently and the end is not known in advance. At least [`SHORT_BYTES`].
const WAITING_BYTES: usize = 256;

const PRIME32_1: u64 = 0x9e37_79b1;
const PRIME32_2: u64 = 0x85eb_ca77;
const PRIME32_3: u64 = 0xc2b2_ae3d;
const PRIME64_1: u64 = 0x9e37_79b1_85eb_ca87;
const PRIME64_2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const PRIME64_3: u64 = 0x1656_67b1_9e37_79f9;
const PRIME64_4: u64 = 0x85eb_ca77_c2b2_ae63;
const PRIME64_5: u64 = 0x27d4_eb2f_1656_67c5;
const PRIME_MX1: u64 = 0x1656_6791_9e37_79f9;

const SECRET: [u64; 24] = [
    0xbe4b_a423_396c_feb8,
    0x1cad_21f7_2c81_017c,
    0xdb97_9083_e96d_d4de,
    0x1f67_b3b7_a4a4_4072,
    0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82,
    0x8e24_43f7_7446_08b8,
    0x4c26_3a81_e690_35e0,
    0xcb00_c391_bb52_283c,
    0xa32e_531b_8b65_d088,
    0x4ef9_0da2_9748_6471,
    0xd8ac_dea9_46ef_1938,
    0x3f34_9ce3_3f76_faa8,
    0x1d4f_0bc7_c7bb_dcf9,
    0x3159_b4cd_4be0_518a,
    0x6473_78d9_c97e_9fc8,
    0xc3eb_d334_83ac_c5ea,
    0xeb63_13fa_ffa0_81c5,
    0x49da_f0b7_51dd_0d17,
    0x9e68_d429_2655_16d3,
    0xfca1_477d_58be_162b,
    0xce31_d07a_d1b8_f88f,
    0x2804_1695_8f3a_cb45,
    0x7e40_4bbb_cafb_d7af,
];
/// Four words of the secret starting at each word. Stripe `i` of a block uses the keys at `i` and `i + 4`; a scramble uses those of a
/// stripe after the block.
static KEYS: [[u64; 4]; 21] = keys();
/// Byte offsets in the secret of the last stripe's key, and of the keys of both result halves.
const LAST_KEY: usize = 121;
const LOW_KEY: usize = 11;
const HIGH_KEY: usize = 117;

const fn keys() -> [[u64; 4]; 21] {
    let (mut keys, mut i) = ([[0; 4]; 21], 0);
    while i < 21 {
        keys[i] = [SECRET[i], SECRET[i + 1], SECRET[i + 2], SECRET[i + 3]];
        i += 1;
    }
    keys
}

/// Eight bytes of the secret, from any offset.
fn secret_at(byte: usize) -> u64 {
    let both = u128::from(SECRET[byte / 8]) | u128::from(SECRET[byte / 8 + 1]) << 64;
    (both >> (byte % 8 * 8)) as u64
}

pub struct Sums {
    lanes: Lanes,
    /// The last stripe that was added, followed by the bytes held back.
    held: [u8; STRIPE_BYTES + WAITING_BYTES],
    waiting: usize,
    bytes: u64,
}

impl Sums {
    /// An empty digest; none if the CPU lacks AVX2.
    pub fn new() -> Option<Self> {
        Some(Self {
            lanes: Lanes::new()?,
            held: [0; _],
            waiting: 0,
            bytes: 0,
        })
    }

    /// Adds a run of bytes, which must be in range.
    pub fn add(&mut self, mapping: &Mapping, mut offset: u64, mut length: u64) {
        self.bytes += length;
        if self.waiting as u64 + length > WAITING_BYTES as u64 {
            let waited = self.add_waiting(mapping, offset);
            offset += waited;
            length -= waited;
            let mapped = self.add_mapped(mapping, offset, length);
            offset += mapped;
            length -= mapped;
        }
        self.wait(mapping, offset, length);
    }

    /// Adds the bytes held back, completed to whole stripes with the run's first bytes. Returns how many bytes of the run this took. The
    /// run must be longer than that; a shorter one is held back as well.
    fn add_waiting(&mut self, mapping: &Mapping, offset: u64) -> u64 {
        let stripes = self.waiting.div_ceil(STRIPE_BYTES);
        let taken = (stripes * STRIPE_BYTES - self.waiting) as u64;
        self.wait(mapping, offset, taken);
        let (_, from) = self.held.split_at(STRIPE_BYTES);
        // SAFETY: `held` contains this many stripes.
        unsafe { self.lanes.add(from.as_ptr(), stripes) };
        let last = self.waiting..self.waiting + STRIPE_BYTES;
        self.held.copy_within(last, 0);
        self.waiting = 0;
        taken
    }

    /// Adds all of a run except its last stripe, complete or not. Returns the number of bytes added.
    fn add_mapped(&mut self, mapping: &Mapping, offset: u64, length: u64) -> u64 {
        let stripes = (length - 1) / STRIPE_BYTES as u64;
        let bytes = stripes * STRIPE_BYTES as u64;
        let Some(from) = mapping.address(offset, bytes).filter(|_| bytes > 0) else {
            return 0;
        };
        // SAFETY: this many bytes are mapped there for as long as the mapping is borrowed.
        unsafe { self.lanes.add(from.as_ptr(), stripes as usize) };
        let (last, _) = self.held.split_at_mut(STRIPE_BYTES);
        mapping.read(offset + bytes - STRIPE_BYTES as u64, last);
        bytes
    }

    fn wait(&mut self, mapping: &Mapping, offset: u64, length: u64) {
        let (_, free) = self.held.split_at_mut(STRIPE_BYTES + self.waiting);
        mapping.read(offset, free.split_at_mut(length as usize).0);
        self.waiting += length as usize;
    }

    /// The digest of all added bytes.
    pub fn value(&self) -> u128 {
        let (_, from) = self.held.split_at(STRIPE_BYTES);
        if self.bytes <= SHORT_BYTES {
            return xxh3_128(from.split_at(self.waiting).0);
        }
        let mut lanes = self.lanes;
        // SAFETY: `held` contains this many whole stripes, and at least one byte after them.
        unsafe { lanes.add(from.as_ptr(), (self.waiting - 1) / STRIPE_BYTES) };
        let last = self.waiting..self.waiting + STRIPE_BYTES;
        lanes.add_last(&self.held[last]);
        let low = lanes.merged(LOW_KEY, self.bytes.wrapping_mul(PRIME64_1));
        let high = lanes.merged(HIGH_KEY, !self.bytes.wrapping_mul(PRIME64_2));
        u128::from(high) << 64 | u128::from(low)
    }
}

/// The eight accumulators. They exist only on CPUs with AVX2.
#[derive(Clone, Copy)]
struct Lanes {
    sums: [u64; 8],
    /// Stripes of the current block already added.
    stripes: usize,
}

impl Lanes {
    fn new() -> Option<Self> {
        is_x86_feature_detected!("avx2").then_some(Self {
            sums: [
                PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5,
                PRIME32_1,
            ],
            stripes: 0,
        })
    }

    /// Adds stripes that are not the last bytes of the input.
    ///
    /// # Safety
    /// This many stripes must be readable at `from`; other processes may write them concurrently.
    unsafe fn add(&mut self, from: *const u8, stripes: usize) {
        // SAFETY: the CPU has AVX2, see `new`; the caller guarantees the rest.
        unsafe { self.add_by_avx2(from, stripes) }
    }

    /// # Safety
    /// As for [`Self::add`].
    #[target_feature(enable = "avx2")]
    unsafe fn add_by_avx2(&mut self, mut from: *const u8, mut stripes: usize) {
        // SAFETY: eight words are two vectors of four, and any bits are valid in both.
        let mut sums: [__m256i; 2] = unsafe { transmute(self.sums) };
        while stripes > 0 {
            let to = BLOCK_STRIPES.min(self.stripes + stripes);
            stripes -= to - self.stripes;
            for i in self.stripes..to {
                // SAFETY: one of the stripes that the caller guarantees.
                let words = unsafe { stripe(from) };
                from = from.wrapping_add(STRIPE_BYTES);
                for (half, (sum, words)) in sums.iter_mut().zip(words).enumerate() {
                    let keyed = _mm256_xor_si256(words, key(i, half));
                    let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
                    // Each word is added to its neighbour's accumulator.
                    let turned = _mm256_shuffle_epi32::<0b01_00_11_10>(words);
                    *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(product, turned));
                }
            }
            self.stripes = to % BLOCK_STRIPES;
            if self.stripes == 0 {
                for (half, sum) in sums.iter_mut().enumerate() {
                    let shifted = _mm256_xor_si256(*sum, _mm256_srli_epi64::<47>(*sum));
                    let keyed = _mm256_xor_si256(shifted, key(BLOCK_STRIPES, half));
                    // A 64-bit by 32-bit product, from its halves.
                    let prime = _mm256_set1_epi64x(PRIME32_1 as i64);
                    let low = _mm256_mul_epu32(keyed, prime);
                    let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(keyed), prime);
                    *sum = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
                }
            }
        }
        // SAFETY: as above.
        self.sums = unsafe { transmute::<[__m256i; 2], [u64; 8]>(sums) };
    }

    /// Adds the last 64 bytes of the input. Some of them may be in the accumulators already.
    fn add_last(&mut self, stripe: &[u8]) {
        for (i, word) in stripe.as_chunks().0.iter().enumerate() {
            let word = u64::from_le_bytes(*word);
            let keyed = word ^ secret_at(LAST_KEY + 8 * i);
            let product = (keyed & u64::from(u32::MAX)) * (keyed >> 32);
            self.sums[i] = self.sums[i].wrapping_add(product);
            self.sums[i ^ 1] = self.sums[i ^ 1].wrapping_add(word);
        }
    }

    /// Merges the accumulators into one word.
    fn merged(&self, key: usize, start: u64) -> u64 {
        let pairs = self.sums.as_chunks::<2>().0.iter().enumerate();
        let merged = pairs.fold(start, |merged, (i, [one, other])| {
            let key = key + 16 * i;
            let product = u128::from(one ^ secret_at(key)) * u128::from(other ^ secret_at(key + 8));
            merged.wrapping_add(product as u64 ^ (product >> 64) as u64)
        });
        let mixed = (merged ^ merged >> 37).wrapping_mul(PRIME_MX1);
        mixed ^ mixed >> 32
    }
}

/// Half of the key of a stripe.
#[target_feature(enable = "avx2")]
fn key(stripe: usize, half: usize) -> __m256i {
    // SAFETY: four words are a vector of four, and any bits are valid in both.
    unsafe { transmute::<[u64; 4], __m256i>(KEYS[stripe + 4 * half]) }
}

/// Loads 64 bytes, with a prefetch of the following ones, which is 25% faster from memory. In assembly, because a load that races with
/// another process's stores is undefined for the compiler.
///
/// # Safety
/// The bytes must be readable.
#[target_feature(enable = "avx2")]
unsafe fn stripe(from: *const u8) -> [__m256i; 2] {
    let (low, high);
    // SAFETY: reads bytes that the caller guarantees; a prefetch past the end has no effect.
    unsafe {
        asm!(
            "prefetcht0 [{from} + 2048]",
            "vmovdqu {low}, [{from}]",
            "vmovdqu {high}, [{from} + 32]",
            from = in(reg) from,
            low = out(ymm_reg) low,
            high = out(ymm_reg) high,
            options(nostack, preserves_flags, readonly),
        );
    }
    [low, high]
}
