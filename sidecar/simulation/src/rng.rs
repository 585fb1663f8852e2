//! The only source of chance: a history is a function of its seed.

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A stream that differs from those of other seeds and other purposes.
    pub fn new(seed: u64, purpose: u64) -> Self {
        Self(seed.wrapping_mul(0xD134_2543_DE82_EF95) ^ purpose.wrapping_mul(0xA24B_AED4_963E_E407))
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// 0..n; 0 for n = 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// True `permille` times in a thousand.
    pub fn chance(&mut self, permille: u32) -> bool {
        self.below(1000) < permille as usize
    }

    /// from..=to.
    pub fn span(&mut self, from: u64, to: u64) -> u64 {
        from + self.below((to - from + 1) as usize) as u64
    }
}

/// Spreads a number over 64 bits.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
