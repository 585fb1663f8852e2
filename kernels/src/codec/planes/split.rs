//! Splits numbers into byte planes, and joins them. Numbers are first rotated left by one bit: the sign is unpredictable, and so leaves the
//! predictable exponent byte.

use crate::lanes::Work;

/// Splits numbers of `B` bytes into `B` concatenated planes, the exponent's plane first.
pub struct Split<'a, const B: usize> {
    pub numbers: &'a [[u8; B]],
    /// `B` bytes per number.
    pub planes: &'a mut [u8],
}

impl<const B: usize> Work for Split<'_, B> {
    type Done = ();

    #[inline(always)]
    fn run(self) {
        let planes = self.planes.chunks_exact_mut(self.numbers.len().max(1));
        for (plane, bytes) in planes.enumerate() {
            // This byte and the one below, whose highest bit becomes the lowest after the rotation. For the lowest byte that is the sign.
            let (this, below) = (B - 1 - plane, (2 * B - 2 - plane) % B);
            for (byte, number) in bytes.iter_mut().zip(self.numbers) {
                *byte = number[this] << 1 | number[below] >> 7;
            }
        }
    }
}

/// Joins planes into numbers of `B` bytes.
pub struct Join<'a, const B: usize> {
    /// `B` bytes per number.
    pub planes: &'a [u8],
    pub numbers: &'a mut [[u8; B]],
}

impl<const B: usize> Work for Join<'_, B> {
    type Done = ();

    #[inline(always)]
    fn run(self) {
        let count = self.numbers.len();
        // Byte n is in plane B - 1 - n.
        let plane = |byte: usize| &self.planes[(B - 1 - byte) * count..][..count];
        let planes: [&[u8]; B] = std::array::from_fn(plane);
        for (n, number) in self.numbers.iter_mut().enumerate() {
            let turned: [u8; B] = std::array::from_fn(|byte| planes[byte][n]);
            *number = std::array::from_fn(|byte| turned[byte] >> 1 | turned[(byte + 1) % B] << 7);
        }
    }
}
