//! LEB128 integers: seven bits per byte, the lowest first; the highest bit marks that another byte follows.

use crate::codec::CodecError;

/// Appends a number to `out`.
pub fn write(mut number: u32, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Reads a number from the front.
pub fn read(packed: &mut &[u8]) -> Result<u32, CodecError> {
    let mut number = 0;
    for shift in [0, 7, 14, 21, 28] {
        let byte = *packed.split_off_first().ok_or(CodecError::StoredLength)?;
        number |= u32::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err(CodecError::Damaged("number of more than five bytes"))
}
