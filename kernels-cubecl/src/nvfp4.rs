//! NVFP4 block scaling, the definition: 16 consecutive values share an E4M3 scale, all blocks of a tensor (weights) or
//! of a row (activations) share an outer encode scale `S`. All arithmetic is f32, each operation rounded once.
//!
//! ```text
//! sf    = e4m3(min(block_amax * (S * f32(1/6)), FLT_MAX))      # a zero block gives byte 0x00
//! inv   = min(1 / (f32(sf) * (1/S)), FLT_MAX)                  # weights: exact division
//! inv   = min(R[sf] * S, FLT_MAX)                              # activations: R[sf] = 1/f32(sf), R[0] = FLT_MAX
//! code  = e2m1(x * inv)
//! value = e2m1(code) * (f32(sf) * (1/S))
//! ```
//!
//! Weights follow NVIDIA TransformerEngine (`core_nvfp4.cuh`). Activations take `S` from [`row_encode_scale`], a power
//! of two, which makes `inv` and every decoded product exact.
//!
//! These are primitives: NaN is ignored by [`amax`] and encodes as +6, as on the hardware. What a user sees of NaN and
//! infinities is decided in [`host`](crate::host).
use crate::{BLOCK, e2m1, e4m3};

/// `f32(1/6)`: the block scale maps the block's largest magnitude to 6.
pub(crate) const SIXTH: f32 = 1.0 / e2m1::MAX;

/// Which of the two inverses a block is encoded with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Any `S`; the inverse is a division.
    Weight,
    /// `S` is a power of two; the inverse is a table of reciprocals, which needs no division on a device.
    Activation,
}

/// An encoded block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// E4M3 byte.
    pub scale: u8,
    /// One E2M1 code a value, unpacked.
    pub codes: [u8; BLOCK],
}

/// Largest magnitude; NaN is ignored, an empty slice gives 0.
pub fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// The encode scale `S` of a weight: `min(2688/amax, FLT_MAX)`, 1 when `amax` is 0 or infinite.
pub fn encode_scale(amax: f32) -> f32 {
    let scale = (e2m1::MAX * e4m3::MAX / amax).min(f32::MAX);
    if amax == 0.0 || scale == 0.0 { 1.0 } else { scale }
}

/// The encode scale `S` of an activation row, a power of two: `2^(11-E)` for an amax of exponent `E`, half of that when
/// its mantissa is above 1.3125 (`2688 = 1.3125 · 2^11`), the exponent kept in [-126, 126]; 1 when `amax` is 0.
pub fn row_encode_scale(amax: f32) -> f32 {
    if amax == 0.0 {
        return 1.0;
    }
    let bits = amax.to_bits();
    let exponent = (bits >> 23 & 0xff) as i32 - 127; // -127 for a subnormal amax: the clamp is what counts there
    let above = i32::from(bits & 0x7f_ffff > 0x28_0000);
    let exponent = (11 - exponent - above).clamp(-126, 126);
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The block's E4M3 scale.
pub fn block_scale(block_amax: f32, encode_scale: f32) -> u8 {
    e4m3::encode((block_amax * (encode_scale * SIXTH)).min(f32::MAX))
}

/// Value of a block scale. The sign bit is ignored, as tensor cores do (UE4M3).
pub fn decode_scale(scale: u8) -> f32 {
    e4m3::decode(scale & 0x7f)
}

/// What the values of a block are multiplied with before they are rounded to E2M1.
pub fn inverse(scale: u8, encode_scale: f32, operand: Operand) -> f32 {
    let scale = decode_scale(scale);
    let inverse = match operand {
        Operand::Weight => 1.0 / (scale * (1.0 / encode_scale)),
        // Byte 0 has no reciprocal; the table holds FLT_MAX there.
        Operand::Activation => (1.0 / scale).min(f32::MAX) * encode_scale,
    };
    inverse.min(f32::MAX)
}

/// Encodes up to [`BLOCK`] values as one block.
pub fn encode_block(x: &[f32], encode_scale: f32, operand: Operand) -> Block {
    let scale = block_scale(amax(x), encode_scale);
    let inverse = inverse(scale, encode_scale, operand);
    let mut codes = [0; BLOCK];
    for (code, value) in codes.iter_mut().zip(x) {
        *code = e2m1::encode(value * inverse);
    }
    Block { scale, codes }
}

/// Value of one element: `e2m1(code) · step`, where `step` is the block's scale with the outer scale applied.
pub fn decode(code: u8, step: f32) -> f32 {
    e2m1::decode(code) * step
}

/// What the first pass leaves of an activation, `x - x̂`, where `x̂` is `value · unit`: an E2M1 code times its block scale,
/// and `1/S`. Rounding may take `x̂` beyond the largest f32; the difference is there all the same.
pub fn residual(x: f32, value: f32, unit: f32) -> f32 {
    let difference = x - value * unit;
    if difference.is_finite() {
        difference
    } else {
        2.0 * (0.5 * x - value * (0.5 * unit))
    }
}

/// Two codes a byte, the even element in the low nibble.
pub fn pack(codes: &[u8]) -> impl Iterator<Item = u8> + '_ {
    codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4)
}

/// The code of element `index` of packed codes.
pub fn unpack(packed: &[u8], index: usize) -> u8 {
    packed[index / 2] >> (4 * (index % 2)) & 0xf
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_the_format_s_own_values_is_exact() {
        let x: [f32; 16] = std::array::from_fn(|i| e2m1::decode(i as u8));
        let block = encode_block(&x, 1.0, Operand::Weight);
        assert_eq!(block.scale, 0x38); // 1.0
        assert_eq!(block.codes, std::array::from_fn(|i| i as u8));
    }

    #[test]
    fn row_encode_scale_steps_above_1_3125() {
        assert_eq!(row_encode_scale(2688.0), 1.0);
        assert_eq!(row_encode_scale(2688.0f32.next_up()), 0.5);
        assert_eq!(row_encode_scale(1.3125), 2048.0);
        assert_eq!(row_encode_scale(1.0), 2048.0);
        assert_eq!(row_encode_scale(0.0), 1.0);
    }

    #[test]
    fn row_encode_scale_is_clamped_for_tiny_rows() {
        assert_eq!(row_encode_scale(f32::MAX), 2f32.powi(-117));
        assert_eq!(row_encode_scale(2f32.powi(-115)), 2f32.powi(126));
        assert_eq!(row_encode_scale(2f32.powi(-114)), 2f32.powi(125));
        assert_eq!(row_encode_scale(f32::from_bits(1)), 2f32.powi(126));
    }

    #[test]
    fn encode_scale_of_degenerate_amax() {
        assert_eq!(encode_scale(0.0), 1.0);
        assert_eq!(encode_scale(f32::INFINITY), 1.0);
        assert_eq!(encode_scale(f32::from_bits(1)), f32::MAX);
        assert_eq!(encode_scale(2688.0), 1.0);
    }
}
