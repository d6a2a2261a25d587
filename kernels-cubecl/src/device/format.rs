//! E2M1 and E4M3 in kernel code: integer arithmetic and exact products, no tables in memory, no device division.
//! Equal to [`e2m1`](crate::e2m1) and [`e4m3`](crate::e4m3) for every input that can occur.
use cubecl::prelude::*;

/// Bits of infinity: magnitudes from here on are not finite.
pub(crate) const INFINITE: u32 = 0x7f80_0000;

/// Byte of `v ≥ 0`, ties to even, saturating at 448.
#[cube]
pub(crate) fn e4m3_encode(v: f32) -> u32 {
    let bits = u32::reinterpret(v);
    // Below 2^-6 the spacing is 2^-9; adding 2^23 to multiples of it rounds to an integer.
    let subnormal = u32::reinterpret(v * 512.0 + 8388608.0) & 15u32;
    let normal = ((bits + 0x7_ffffu32 + ((bits >> 20u32) & 1u32)) >> 20u32) - 960u32;
    select(v < 0.015625, subnormal, min(normal, 0x7eu32))
}

/// Value of the low seven bits.
#[cube]
pub(crate) fn e4m3_decode(byte: u32) -> f32 {
    let magnitude = byte & 0x7fu32;
    let subnormal = f32::cast_from(magnitude) * 0.001953125;
    let normal = f32::reinterpret((magnitude << 20u32) + comptime!(120u32 << 23));
    select(magnitude < 8u32, subnormal, normal)
}

/// Bits of 2^23, where f32 has steps of 1.
const BIAS: u32 = 0x4b00_0000;

/// What the biases of eight codes add up to, each shifted by four bits more than the last.
pub(crate) const BIASES: u32 = {
    let (mut sum, mut i) = (0u32, 0);
    while i < 8 {
        sum = (sum << 4).wrapping_add(BIAS);
        i += 1;
    }
    sum
};

/// Code of `y ≥ 0` plus [`BIAS`]; ties to even, saturating at 6.
///
/// The code is `2y` below 2, `y + 2` below 4, `y/2 + 4` above, rounded to an integer: the least of the three, each rounded
/// once, by adding 2^23. Bits of positive numbers order as the numbers do, and integers have a minimum of three.
#[cube]
pub(crate) fn e2m1_biased(y: f32) -> u32 {
    let low = u32::reinterpret(y * 2.0 + 8388608.0);
    let middle = u32::reinterpret(y + 8388610.0);
    let high = u32::reinterpret(y * 0.5 + 8388612.0);
    min(min(min(low, middle), high), comptime!(8388615.0f32.to_bits()))
}

/// Code of `y ≥ 0`.
#[cube]
pub(crate) fn e2m1_encode(y: f32) -> u32 {
    e2m1_biased(y) - BIAS
}

/// Value of a code of [`e2m1_biased`] with a sign in bit 31. Where f32 subnormals count, the code in the upper bits of the
/// mantissa is its value times 2^-126.
#[cube]
pub(crate) fn e2m1_value(biased: u32, sign: u32, #[comptime] subnormals: bool) -> f32 {
    if comptime!(subnormals) {
        f32::reinterpret((biased << 22u32) | sign) * comptime!(2f32.powi(126))
    } else {
        e2m1_decode((biased & 7u32) | (sign >> 28u32))
    }
}

/// Value of the low four bits.
#[cube]
pub(crate) fn e2m1_decode(code: u32) -> f32 {
    let magnitude = code & 7u32;
    let subnormal = f32::cast_from(magnitude) * 0.5;
    let normal = f32::reinterpret((magnitude << 22u32) + comptime!(126u32 << 23));
    let value = select(magnitude < 2u32, subnormal, normal);
    f32::reinterpret(u32::reinterpret(value) | ((code & 8u32) << 28u32))
}

/// `sum · unit · scale` where no product on the way over- or underflows unless the result does: the unit's exponent is
/// split in two halves, one on each side.
#[cube]
pub(crate) fn scale_output(sum: f32, unit: f32, scale: f32) -> f32 {
    let exponent = (u32::reinterpret(unit) >> 23u32) & 255u32;
    // 2^(e/2) for the unit's exponent e.
    let half = f32::reinterpret((exponent / 2u32 + 64u32) << 23u32);
    let other = f32::reinterpret((190u32 - (exponent / 2u32)) << 23u32);
    ((sum * (unit * other)) * scale) * half
}
