//! Decoding to f16 for 16-bit tensor cores, exactly.
//!
//! An E2M1 code placed in bits 15 and 11..9 of an f16 is its value times 2^-14, subnormals included; an E4M3 scale in bits
//! 14..7 is its value times 2^-8. With a factor of 2^14 their product is `value · scale · 2^-8`, which f16 holds for all
//! codes and scales. [`UNDO`] takes both operands' 2^-8 back after the sum.
use cubecl::prelude::*;
use half::f16;

/// 2^16: what a sum of products of decoded operands is multiplied with.
pub(super) const UNDO: f32 = 65536.0;

/// `scale · 2^6`, twice, from byte `byte` of a word of scales. The sign bit is ignored, as tensor cores do (UE4M3).
#[cube]
pub(super) fn decode_scale(word: u32, #[comptime] byte: u32) -> Vector<f16, Const<2>> {
    let bits = (word >> comptime!(8 * byte)) & 127u32;
    Vector::<f16, Const<2>>::reinterpret(bits * 0x0080_0080u32) * Vector::new(f16::new(16384.0))
}

/// Eight codes times a scale, as pairs (0, 4), (1, 5), (2, 6), (3, 7).
#[cube]
pub(super) fn decode_word(word: u32, scale: Vector<f16, Const<2>>) -> Vector<u32, Const<4>> {
    // A byte a code, the upper half of its f16; odd codes come from the upper nibbles.
    let odd = ((word >> 3u32) & 0x0e0e_0e0eu32) | (word & 0x8080_8080u32);
    let even = ((word << 1u32) & 0x0e0e_0e0eu32) | ((word << 4u32) & 0x8080_8080u32);
    let mut pairs = Vector::<u32, Const<4>>::empty();
    pairs[0usize] = multiply((even << 8u32) & 0xff00_ff00u32, scale);
    pairs[1usize] = multiply((odd << 8u32) & 0xff00_ff00u32, scale);
    pairs[2usize] = multiply(even & 0xff00_ff00u32, scale);
    pairs[3usize] = multiply(odd & 0xff00_ff00u32, scale);
    pairs
}

#[cube]
fn multiply(bits: u32, scale: Vector<f16, Const<2>>) -> u32 {
    u32::reinterpret(Vector::<f16, Const<2>>::reinterpret(bits) * scale)
}
