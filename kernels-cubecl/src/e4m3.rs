//! E4M3 (`fn`: no infinities), the 8-bit format of block scales and of the FP8 baseline.
use float8::F8E4M3;

/// Largest value, byte `0x7E`.
pub const MAX: f32 = 448.0;

/// Nearest byte, ties to even, saturating at ±448. NaN becomes `0x7F` (`0xFF` when negative).
pub fn encode(x: f32) -> u8 {
    F8E4M3::from_f32(x).to_bits()
}

/// Value of a byte; `0x7F` and `0xFF` are NaN.
pub fn decode(byte: u8) -> f32 {
    VALUES[usize::from(byte)]
}

/// Value of each byte.
pub const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        values[byte] = F8E4M3::from_bits(byte as u8).to_f32();
        byte += 1;
    }
    values
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_even_and_saturates() {
        assert_eq!(
            (encode(448.0), encode(464.0), encode(f32::INFINITY)),
            (0x7e, 0x7e, 0x7e)
        );
        assert_eq!((encode(-449.0), encode(f32::NEG_INFINITY)), (0xfe, 0xfe));
        assert_eq!((encode(1.0625), encode(1.1875)), (0x38, 0x3a)); // halfway between mantissas 0, 1 and 1, 2
        assert_eq!(encode(f32::NAN), 0x7f);
    }

    #[test]
    fn half_the_smallest_subnormal_is_a_tie_to_zero() {
        assert_eq!(encode(2f32.powi(-9)), 1);
        assert_eq!(encode(2f32.powi(-10)), 0);
        assert_eq!(encode(2f32.powi(-10) * 1.0001), 1);
        assert_eq!(encode(-2f32.powi(-10)), 0x80);
    }

    #[test]
    fn every_byte_round_trips() {
        for byte in 0..=255u8 {
            if !decode(byte).is_nan() {
                assert_eq!(encode(decode(byte)), byte, "{byte:02x}");
            }
        }
    }
}
