//! E2M1, the 4-bit element format: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, bit 3 is the sign.
use float4::F4E2M1;

/// Largest value.
pub const MAX: f32 = 6.0;

/// Nearest code, ties to the even code, saturating at ±6. Keeps the sign of zero (-0 is code 8); NaN becomes +6, as
/// `cvt.rn.satfinite.e2m1x2.f32` has it.
pub fn encode(x: f32) -> u8 {
    if x.is_nan() {
        return 7; // whatever the sign of the NaN
    }
    F4E2M1::from_f64(f64::from(x)).to_bits()
}

/// Value of the low four bits.
pub fn decode(code: u8) -> f32 {
    VALUES[usize::from(code & 0xf)]
}

/// Value of each code.
pub const VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, MAX, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -MAX,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_even_code() {
        let ties = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)];
        for (x, code) in ties {
            assert_eq!(encode(x), code, "{x}");
            assert_eq!(encode(-x), code | 8, "-{x}");
        }
    }

    #[test]
    fn zero_keeps_its_sign_and_the_rest_saturates() {
        assert_eq!((encode(0.0), encode(-0.0)), (0, 8));
        assert_eq!((encode(f32::INFINITY), encode(f32::NEG_INFINITY)), (7, 15));
        assert_eq!((encode(f32::NAN), encode(-f32::NAN)), (7, 7));
        assert_eq!((encode(f32::MIN_POSITIVE), encode(-1e-45)), (0, 8));
    }

    #[test]
    fn every_code_round_trips() {
        for code in 0..16 {
            assert_eq!(encode(decode(code)), code);
        }
    }
}
