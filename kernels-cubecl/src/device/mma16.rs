//! Decoding to f16 for 16-bit tensor cores, exactly.
//!
//! An E2M1 code placed in bits 15 and 11..9 of an f16 is its value times 2^-14, subnormals included; an E4M3 scale in bits
//! 14..7 is its value times 2^-8, and a factor of 2^8 makes it the value. Their product is `value · scale · 2^-14`: at
//! least 2^-24 and of at most six significant bits, so f16 holds it for all codes and scales. [`UNDO`] takes both operands'
//! 2^-14 back after the sum.
use cubecl::prelude::*;
use half::f16;

/// 2^28: what a sum of products of decoded operands is multiplied with.
pub(super) const UNDO: f32 = 268_435_456.0;

/// Bits 3..1 of every byte. A kernel gets it as an argument: of a mask that it knows, the compiler makes two instructions.
pub(super) const MAGNITUDES: u32 = 0x0e0e_0e0e;

/// Two scales from the lower bytes of a word. The sign bits are ignored, as tensor cores do (UE4M3).
#[cube]
pub(super) fn decode_scales(word: u32) -> Vector<f16, Const<2>> {
    let bits = (word & 0x7fu32) | ((word << 8u32) & 0x007f_0000u32);
    let bits = bits << 7u32;
    Vector::<f16, Const<2>>::reinterpret(bits) * Vector::new(f16::new(256.0))
}

/// Eight codes times scale `index` of two, as pairs (0, 4), (1, 5), (2, 6), (3, 7). `magnitudes`: [`MAGNITUDES`].
#[cube]
pub(super) fn decode_word(
    word: u32,
    scales: Vector<f16, Const<2>>,
    magnitudes: u32,
    #[comptime] index: usize,
) -> Vector<u32, Const<4>> {
    let scale = Vector::<f16, Const<2>>::new(scales[index]);
    // A byte a code, the upper half of its f16: three bits of magnitude from the one operand, the sign from the other. The
    // bits between are masked with the pairs.
    let odd = merge(word >> 3u32, word, magnitudes);
    let even = merge(word << 1u32, word << 4u32, magnitudes);
    let mut pairs = Vector::<u32, Const<4>>::empty();
    pairs[0usize] = multiply(even << 8u32, scale);
    pairs[1usize] = multiply(odd << 8u32, scale);
    pairs[2usize] = multiply(even, scale);
    pairs[3usize] = multiply(odd, scale);
    pairs
}

/// The bits of a mask from the one, the others from the other: one logic instruction.
#[cube]
fn merge(magnitudes: u32, signs: u32, mask: u32) -> u32 {
    ((magnitudes ^ signs) & mask) ^ signs
}

#[cube]
fn multiply(bits: u32, scale: Vector<f16, Const<2>>) -> u32 {
    u32::reinterpret(Vector::<f16, Const<2>>::reinterpret(bits & 0x8e00_8e00u32) * scale)
}
