//! Numbers to planes of bytes, and back. Numbers are turned left by a bit first: the sign, which cannot be foreseen, leaves the byte of the
//! exponent, which can.

use crate::lanes::Work;

/// Numbers of `B` bytes -> `B` planes one behind another, that of the exponent first.
pub struct Split<'a, const B: usize> {
    pub numbers: &'a [[u8; B]],
    /// `B` bytes for each number.
    pub planes: &'a mut [u8],
}

impl<const B: usize> Work for Split<'_, B> {
    type Done = ();

    #[inline(always)]
    fn run(self) {
        let planes = self.planes.chunks_exact_mut(self.numbers.len().max(1));
        for (plane, bytes) in planes.enumerate() {
            // Of the byte and the one below, from whose highest bit the turn makes the lowest; that of the lowest byte is the sign.
            let (this, below) = (B - 1 - plane, (2 * B - 2 - plane) % B);
            for (byte, number) in bytes.iter_mut().zip(self.numbers) {
                *byte = number[this] << 1 | number[below] >> 7;
            }
        }
    }
}

/// Planes -> numbers of `B` bytes.
pub struct Join<'a, const B: usize> {
    /// `B` bytes for each number.
    pub planes: &'a [u8],
    pub numbers: &'a mut [[u8; B]],
}

impl<const B: usize> Work for Join<'_, B> {
    type Done = ();

    #[inline(always)]
    fn run(self) {
        let count = self.numbers.len();
        // Byte n stands in plane B - 1 - n.
        let plane = |byte: usize| &self.planes[(B - 1 - byte) * count..][..count];
        let planes: [&[u8]; B] = std::array::from_fn(plane);
        for (n, number) in self.numbers.iter_mut().enumerate() {
            let turned: [u8; B] = std::array::from_fn(|byte| planes[byte][n]);
            *number = std::array::from_fn(|byte| turned[byte] >> 1 | turned[(byte + 1) % B] << 7);
        }
    }
}
