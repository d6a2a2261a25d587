//! Rows of activations, quantized straight to the values that a matmul multiplies.
//!
//! Values come in units of the row: `x̂ = value · unit`, and the unit joins the other scales after the sum. For NVFP4
//! the unit is `1/S`; a value of one pass is `e2m1 · block_scale`, a multiple of 2^-10 up to 2688. Both passes share
//! `S`, so the sum of their values is exact in f32, and **one product serves both passes**: compensation costs the
//! quantization alone.
use super::dispatch::Kernel;
use super::parallel;
use super::rounding::{INFINITE, amax_bits, e4m3_byte, to_e2m1, to_e4m3, with_sign};
use super::weights::fp8_scale;
use crate::residual::{select_units, unit_energy};
use crate::{Activation, BLOCK, Compensation, Granularity, e4m3, nvfp4};

/// Value and reciprocal of each block scale; byte 0 has FLT_MAX for a reciprocal.
const SCALES: [(f32, f32); 128] = {
    let mut scales = [(0.0, f32::MAX); 128];
    let mut byte = 1;
    while byte < 127 {
        let value = e4m3::VALUES[byte];
        scales[byte] = (value, 1.0 / value);
        byte += 1;
    }
    scales
};

/// Quantizes every row of `x` (`[tokens, k]`) into `values` (`[tokens, k]`) and `units` (`[tokens]`). A row that is not
/// finite gets zeros in a unit of NaN. `activation` has been checked against `k` and is not `Full`.
pub(super) fn quantize(x: &[f32], k: usize, activation: &Activation, values: &mut [f32], units: &mut [f32]) {
    if k == 0 {
        return units.fill(1.0);
    }
    let format = &RowFormat::new(activation, k);
    let pieces = parallel::pieces(COST.saturating_mul(x.len()));
    let rows = units.len().div_ceil(pieces).max(1);
    let kernels = x
        .chunks(rows * k)
        .zip(values.chunks_mut(rows * k))
        .zip(units.chunks_mut(rows));
    let kernels = kernels.map(|((x, values), units)| QuantizeRows {
        x,
        k,
        format,
        values,
        units,
    });
    parallel::run(pieces, kernels);
}

/// What quantizing a value costs, in multiply-adds.
const COST: usize = 16;

/// How a row is quantized.
enum RowFormat {
    Fp8,
    Nvfp4,
    All,
    /// One word a channel, all ones where the residual is kept.
    Mask(Vec<u32>),
    PerToken(Granularity, f32),
}

impl RowFormat {
    fn new(activation: &Activation, k: usize) -> Self {
        match activation {
            Activation::Full => unreachable!("full-precision activations are not quantized"),
            Activation::Nvfp4 => Self::Nvfp4,
            Activation::Compensated(Compensation::All) => Self::All,
            Activation::Compensated(Compensation::Mask(mask)) => {
                Self::Mask((0..k).map(|c| channel_word(mask.contains(c))).collect())
            }
            Activation::Compensated(Compensation::PerToken { granularity, fraction }) => {
                Self::PerToken(*granularity, *fraction)
            }
            Activation::Fp8 => Self::Fp8,
        }
    }
}

fn channel_word(selected: bool) -> u32 {
    if selected { u32::MAX } else { 0 }
}

struct QuantizeRows<'a> {
    x: &'a [f32],
    k: usize,
    format: &'a RowFormat,
    values: &'a mut [f32],
    units: &'a mut [f32],
}

impl Kernel for QuantizeRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const TOKENS: usize, const LANES: usize, const FUSED: bool>(self) {
        let rows = self.x.chunks_exact(self.k).zip(self.values.chunks_exact_mut(self.k));
        for ((x, values), unit) in rows.zip(self.units) {
            let amax = amax_bits(x);
            if amax >= INFINITE {
                values.fill(0.0);
                *unit = f32::NAN;
                continue;
            }
            let amax = f32::from_bits(amax);
            if let RowFormat::Fp8 = self.format {
                *unit = fp8_scale(amax);
                for (value, x) in values.iter_mut().zip(x) {
                    let y = x / *unit;
                    *value = with_sign(to_e4m3(y.abs()), y);
                }
                continue;
            }
            let scale = nvfp4::row_encode_scale(amax);
            *unit = 1.0 / scale;
            match self.format {
                RowFormat::All => two_passes(x, scale, |r, _| r, values),
                RowFormat::Mask(mask) => two_passes(x, scale, masked(mask), values),
                RowFormat::PerToken(granularity, fraction) => {
                    first_pass(x, scale, values);
                    // `values` are exact in units of a power of two, and so is the residual's definition, x - x̂.
                    let residual: Vec<f32> = x.iter().zip(&*values).map(|(x, value)| x - value * *unit).collect();
                    let selected = select_units(&unit_energy(&residual, *granularity), *fraction);
                    let channels = granularity.channels();
                    let mask: Vec<u32> = (0..self.k).map(|c| channel_word(selected[c / channels])).collect();
                    two_passes(x, scale, masked(&mask), values);
                }
                _ => first_pass(x, scale, values),
            }
        }
    }
}

#[inline(always)]
fn masked(mask: &[u32]) -> impl Fn(f32, usize) -> f32 + '_ {
    |r, c| f32::from_bits(r.to_bits() & mask[c])
}

/// A block's E2M1 values, signed, and its scale.
#[inline(always)]
fn encode_block(x: &[f32; BLOCK], scale: f32) -> ([f32; BLOCK], f32) {
    let amax = f32::from_bits(amax_bits(x));
    let byte = e4m3_byte(to_e4m3(amax * (scale * nvfp4::SIXTH)));
    let (block_scale, reciprocal) = SCALES[byte as usize & 0x7f];
    let inverse = (reciprocal * scale).min(f32::MAX);
    (x.map(|x| with_sign(to_e2m1((x * inverse).abs()), x)), block_scale)
}

#[inline(always)]
fn first_pass(x: &[f32], scale: f32, values: &mut [f32]) {
    for (x, values) in x.as_chunks().0.iter().zip(values.as_chunks_mut::<BLOCK>().0) {
        let (codes, block_scale) = encode_block(x, scale);
        *values = codes.map(|code| code * block_scale);
    }
}

/// `keep(residual, channel)` is the residual that the second pass sees.
#[inline(always)]
fn two_passes(x: &[f32], scale: f32, keep: impl Fn(f32, usize) -> f32, values: &mut [f32]) {
    let unit = 1.0 / scale;
    for (b, (x, values)) in x
        .as_chunks()
        .0
        .iter()
        .zip(values.as_chunks_mut::<BLOCK>().0)
        .enumerate()
    {
        let (first, first_scale) = encode_block(x, scale);
        let step = first_scale * unit;
        let residual: [f32; BLOCK] = std::array::from_fn(|i| keep(x[i] - first[i] * step, b * BLOCK + i));
        let (second, second_scale) = encode_block(&residual, scale);
        *values = std::array::from_fn(|i| first[i] * first_scale + second[i] * second_scale);
    }
}
