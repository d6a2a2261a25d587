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

/// Code of `y ≥ 0`, ties to even, saturating at 6.
///
/// Adding 2^22 times a power of two rounds to half of it: steps of 0.5 below 2, 1 below 4, 2 above. The sum's low bits
/// count steps, and each doubling of the step has two codes before it. (Subtracting the power again would give the value,
/// but Vulkan compilers reassociate the two to nothing.)
#[cube]
pub(crate) fn e2m1_encode(y: f32) -> u32 {
    let y = min(y, 6.0);
    let magic = (u32::reinterpret(max(y, 1.0)) & 0x7f80_0000u32) + comptime!(22u32 << 23);
    let sum = y + f32::reinterpret(magic);
    u32::reinterpret(sum) - magic + (magic >> 22u32) - 298u32
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
