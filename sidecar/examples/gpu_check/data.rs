//! What kernels are fed with.

/// A kind of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Any bits that are finite numbers.
    Random,
    /// Zeros of both signs, the least and the largest numbers, and numbers next to powers of two.
    Edge,
    /// The same everywhere.
    Equal,
    /// As `Edge`, with infinities and NaN among them.
    NotFinite,
}

pub const FINITE: [Data; 3] = [Data::Random, Data::Edge, Data::Equal];

impl Data {
    /// Bytes that mean nothing.
    pub fn bytes(self, count: usize, seed: u64) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..count)
            .map(|at| match self {
                Self::Random => random.u8(..),
                Self::Edge => [0, 0xff, 0x80, 0x7f, 1][at % 5],
                Self::Equal | Self::NotFinite => 0xa7,
            })
            .collect()
    }

    /// Bits of numbers of 16 bits, of which the lowest of the exponent is at `shift`, and which are infinite from `infinite` on.
    pub fn halves(self, count: usize, shift: u32, infinite: u16, seed: u64) -> Vec<u16> {
        let mut random = fastrand::Rng::with_seed(seed);
        let one = infinite >> 1 & infinite;
        let edges = [
            0,
            0x8000,
            1,
            0x8001,
            infinite - 1,
            0x8000 | (infinite - 1),
            one,
            one + 1,
            one - 1,
        ];
        let special = [infinite, 0x8000 | infinite, infinite | 1];
        (0..count)
            .map(|at| match self {
                Self::Random => {
                    let bits = random.u16(..);
                    // An exponent that is not all ones.
                    match bits & infinite == infinite {
                        true => bits & !(1 << shift),
                        false => bits,
                    }
                }
                Self::Edge => edges[at % edges.len()],
                Self::Equal => one + 3,
                Self::NotFinite if at % 7 == 3 => special[at / 7 % special.len()],
                Self::NotFinite => edges[at % edges.len()],
            })
            .collect()
    }

    /// Bits of numbers of 32 bits.
    pub fn wholes(self, count: usize, seed: u64) -> Vec<u32> {
        let mut random = fastrand::Rng::with_seed(seed);
        let edges = [
            0,
            1 << 31,
            1,
            0x7f7f_ffff,
            0xff7f_ffff,
            0x3f80_0000,
            0x3f7f_ffff,
            0x0080_0000,
        ];
        let special = [0x7f80_0000, 0xff80_0000, 0x7f80_0001];
        (0..count)
            .map(|at| match self {
                Self::Random => {
                    let bits = random.u32(..);
                    match bits >> 23 & 255 {
                        255 => bits & !(1 << 23),
                        _ => bits,
                    }
                }
                Self::NotFinite if at % 7 == 3 => special[at / 7 % special.len()],
                Self::Edge | Self::NotFinite => edges[at % edges.len()],
                Self::Equal => 0x3fc0_0001,
            })
            .collect()
    }
}
