//! Rounding to E2M1 and E4M3 by arithmetic, without branches or tables, so that loops over it become vector code.
//! Equal to [`e2m1`](crate::e2m1) and [`e4m3`](crate::e4m3) on every magnitude that is not NaN.
use crate::{e2m1, e4m3};

/// Adding 2^23 times the spacing of a format, and taking it off again, rounds to that spacing, ties to even: the sum
/// has no bits below it.
const MAGIC: i32 = 23;

/// `if` rather than `f32::min`, which has to treat NaN and takes three instructions.
#[inline(always)]
pub(super) fn at_most(x: f32, bound: f32) -> f32 {
    if x < bound { x } else { bound }
}

/// The bits of the spacing's magic number: E2M1 has steps of 0.5 below 2, 1 below 4, and 2 above.
#[inline(always)]
fn e2m1_magic(y: f32) -> u32 {
    let floor = if y > 1.0 { y } else { 1.0 };
    (floor.to_bits() & 0x7f80_0000) + (((MAGIC - 1) as u32) << 23)
}

/// The nearest E2M1 value of `y ≥ 0`.
#[inline(always)]
pub(super) fn to_e2m1(y: f32) -> f32 {
    let y = at_most(y, e2m1::MAX);
    let magic = f32::from_bits(e2m1_magic(y));
    (y + magic) - magic
}

/// Its code.
#[inline(always)]
pub(super) fn to_e2m1_code(y: f32) -> u32 {
    let y = at_most(y, e2m1::MAX);
    let magic = e2m1_magic(y);
    // The sum's low bits count spacings; each doubling of the spacing has two codes before it.
    let spacings = (y + f32::from_bits(magic)).to_bits() - magic;
    spacings + 2 * ((magic >> 23) - (127 + MAGIC as u32 - 1))
}

/// Value of the low four bits. Codes are twice their values' integers in a nibble of a constant: a table in memory would
/// take a gather.
#[inline(always)]
pub(super) fn from_e2m1(code: u32) -> f32 {
    let twice = 0xc864_3210u32 >> (4 * (code & 7)) & 0xf;
    let magnitude = 0.5 * twice as i32 as f32;
    f32::from_bits(magnitude.to_bits() | (code & 8) << 28)
}

/// Smallest normal number of E4M3; below it the spacing is 2^-9.
const E4M3_NORMAL: f32 = 1.0 / 64.0;
/// 2^(23 - 9).
const E4M3_MAGIC: f32 = 16384.0;

/// The nearest E4M3 value of `y ≥ 0`.
#[inline(always)]
pub(super) fn to_e4m3(y: f32) -> f32 {
    let y = at_most(y, e4m3::MAX);
    let bits = y.to_bits();
    let normal = f32::from_bits((bits + 0x7_ffff + (bits >> 20 & 1)) & 0xfff0_0000);
    let subnormal = (y + E4M3_MAGIC) - E4M3_MAGIC;
    if y < E4M3_NORMAL { subnormal } else { normal }
}

/// The byte of a value that [`to_e4m3`] returned.
#[inline(always)]
pub(super) fn e4m3_byte(value: f32) -> u32 {
    let normal = (value.to_bits() >> 20).wrapping_sub((127 - 7) << 3);
    let subnormal = (value + E4M3_MAGIC).to_bits() & 0xf;
    if value < E4M3_NORMAL { subnormal } else { normal }
}

/// Value of a byte.
#[inline(always)]
pub(super) fn from_e4m3(byte: u32) -> f32 {
    let magnitude = byte & 0x7f;
    let normal = f32::from_bits((magnitude << 20) + ((127 - 7) << 23));
    let subnormal = magnitude as i32 as f32 * 2f32.powi(-9);
    let value = if magnitude < 8 { subnormal } else { normal };
    let value = if magnitude == 0x7f { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | (byte & 0x80) << 24)
}

/// `magnitude` with the sign of `of`.
#[inline(always)]
pub(super) fn with_sign(magnitude: f32, of: f32) -> f32 {
    f32::from_bits(magnitude.to_bits() | of.to_bits() & 0x8000_0000)
}

/// Bits of the largest magnitude; infinity or more when a value is not finite. Magnitudes order as their bits do.
#[inline(always)]
pub(super) fn amax_bits(x: &[f32]) -> u32 {
    x.iter()
        .fold(0, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff))
}

/// Bits of infinity: a row whose [`amax_bits`] reach it is not finite.
pub(super) const INFINITE: u32 = 0x7f80_0000;

#[cfg(test)]
mod tests {
    use super::*;

    /// Every magnitude at which a rounding can change (values of the format and the midpoints between them), its
    /// neighbours, and a sample of all others.
    fn magnitudes(values: impl Iterator<Item = f32>) -> impl Iterator<Item = f32> {
        let values: Vec<f32> = values.collect();
        let midpoints: Vec<f32> = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        let edges = values.into_iter().chain(midpoints);
        let edges = edges.flat_map(|edge| [edge.next_down().max(0.0), edge, edge.next_up()]);
        let sample = (0..=INFINITE).step_by(2003).map(f32::from_bits);
        edges
            .chain(sample)
            .chain([f32::MAX, f32::INFINITY, f32::MIN_POSITIVE, f32::from_bits(1)])
    }

    #[test]
    fn e2m1_equals_the_format() {
        for y in magnitudes((0..8).map(e2m1::decode)) {
            let code = e2m1::encode(y);
            assert_eq!(to_e2m1_code(y), u32::from(code), "{y}");
            assert_eq!(to_e2m1(y), e2m1::decode(code), "{y}");
        }
        for code in 0..16 {
            assert_eq!(
                from_e2m1(u32::from(code) | 0x30).to_bits(),
                e2m1::decode(code).to_bits()
            );
        }
    }

    #[test]
    fn e4m3_equals_the_format() {
        for y in magnitudes((0..0x7f).map(e4m3::decode)) {
            let byte = e4m3::encode(y);
            assert_eq!(to_e4m3(y), e4m3::decode(byte), "{y}");
            assert_eq!(e4m3_byte(to_e4m3(y)), u32::from(byte), "{y}");
        }
        for byte in 0..=255u8 {
            let (ours, format) = (from_e4m3(u32::from(byte)), e4m3::decode(byte));
            assert!(
                ours.to_bits() == format.to_bits() || ours.is_nan() && format.is_nan(),
                "{byte:02x}"
            );
        }
    }
}
