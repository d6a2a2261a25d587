//! Rows of activations, quantized straight to the values that a matmul multiplies.
//!
//! Values come in units of the row: `x̂ = value · unit`, and the unit joins the other scales after the sum. For NVFP4
//! the unit is `1/S`; a value of one pass is `e2m1 · block_scale`, a multiple of 2^-10 up to 2688. Both passes share
//! `S`, so the sum of their values is exact in f32, and **one product serves both passes**: compensation costs the
//! quantization alone.
use super::dispatch::{Kernel, Vectors};
use super::fp8::fp8_scale;
use super::parallel;
use super::rounding::{INFINITE, amax_bits, at_most, to_e2m1, to_e4m3, with_sign};
use crate::residual::{rank, select_units, unit_count, unit_energy};
use crate::{Activation, BLOCK, Compensation, Granularity, nvfp4};

/// Quantizes every row of `x` (`[tokens, k]`) into `values` (`[tokens, k]`) and `units` (`[tokens]`). A row that is not
/// finite gets a unit of NaN, and values that do not matter then. `activation` has been checked against `k` and is not
/// `Full`.
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
const COST: usize = 32;

/// How a row is quantized.
enum RowFormat {
    Fp8,
    Nvfp4,
    All,
    /// One word a channel, in blocks, all ones where the residual is kept.
    Mask(Vec<[u32; BLOCK]>),
    /// So many units of each row.
    PerToken(Granularity, usize),
}

impl RowFormat {
    fn new(activation: &Activation, k: usize) -> Self {
        match activation {
            Activation::Full => unreachable!("full-precision activations are not quantized"),
            Activation::Nvfp4 => Self::Nvfp4,
            Activation::Compensated(Compensation::All) => Self::All,
            Activation::Compensated(Compensation::Mask(mask)) => {
                let word = |c| if mask.contains(c) { u32::MAX } else { 0 };
                Self::Mask(
                    (0..k / BLOCK)
                        .map(|b| std::array::from_fn(|i| word(b * BLOCK + i)))
                        .collect(),
                )
            }
            Activation::Compensated(Compensation::PerToken { granularity, fraction }) => {
                Self::PerToken(*granularity, unit_count(granularity.units(k), *fraction))
            }
            Activation::Fp8 => Self::Fp8,
        }
    }
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
    fn run<V: Vectors, const TOKENS: usize, const COUNT: usize, const LANES: usize>(self, _: V) {
        let rows = self.x.chunks_exact(self.k).zip(self.values.chunks_exact_mut(self.k));
        let mut row = Nvfp4Row::new(self.k);
        for ((x, values), unit) in rows.zip(self.units) {
            *unit = match self.format {
                RowFormat::Fp8 => fp8(x, values),
                RowFormat::Nvfp4 => row.first_pass::<false>(x, values),
                RowFormat::All => {
                    let unit = row.first_pass::<true>(x, values);
                    row.second_pass(values);
                    unit
                }
                RowFormat::Mask(mask) => {
                    let unit = row.first_pass::<true>(x, values);
                    row.mask_residual(mask);
                    row.second_pass(values);
                    unit
                }
                RowFormat::PerToken(granularity, count) => {
                    let unit = row.first_pass::<true>(x, values);
                    row.select_residual(*granularity, *count);
                    row.second_pass(values);
                    unit
                }
            };
        }
    }
}

/// Quantizes a row to E4M3; returns its unit.
#[inline(always)]
fn fp8(x: &[f32], values: &mut [f32]) -> f32 {
    let amax = amax_bits(x);
    if amax >= INFINITE {
        return f32::NAN;
    }
    let unit = fp8_scale(f32::from_bits(amax));
    for (value, x) in values.iter_mut().zip(x) {
        let y = x / unit;
        *value = with_sign(to_e4m3(y.abs()), y);
    }
    unit
}

/// A row on its way to NVFP4.
struct Nvfp4Row {
    /// The row's encode scale.
    scale: f32,
    /// Bits of each block's amax.
    amax: Vec<u32>,
    /// Each block's scale.
    scales: Vec<f32>,
    /// What each block's values are multiplied with before they are rounded.
    inverses: Vec<f32>,
    /// x - x̂ after the first pass.
    residual: Vec<[f32; BLOCK]>,
    /// Energy of each unit of a selection, its rank, and whether it is selected.
    energy: Vec<f32>,
    ranks: Vec<u32>,
    selected: Vec<bool>,
}

// Loops over arrays here, not `map` or `from_fn`: those are functions, and when the compiler does not inline one it is
// compiled for the oldest processor.
impl Nvfp4Row {
    fn new(k: usize) -> Self {
        let blocks = k / BLOCK;
        Self {
            scale: 1.0,
            amax: vec![0; blocks.next_multiple_of(BLOCK)],
            scales: vec![0.0; blocks.next_multiple_of(BLOCK)],
            inverses: vec![0.0; blocks.next_multiple_of(BLOCK)],
            residual: vec![[0.0; BLOCK]; blocks],
            energy: Vec::new(),
            ranks: Vec::new(),
            selected: Vec::new(),
        }
    }

    /// Quantizes the row, and returns its unit; sets `residual` when asked to.
    #[inline(always)]
    fn first_pass<const RESIDUAL: bool>(&mut self, x: &[f32], values: &mut [f32]) -> f32 {
        let (x, values) = (x.as_chunks::<BLOCK>().0, values.as_chunks_mut::<BLOCK>().0);
        let Some(amax) = block_amax(x, &mut self.amax) else {
            return f32::NAN;
        };
        self.scale = nvfp4::row_encode_scale(f32::from_bits(amax));
        let unit = 1.0 / self.scale;
        self.set_scales();
        let scales = self.inverses.iter().zip(&self.scales);
        let blocks = x.iter().zip(&mut *values).zip(&mut self.residual).zip(scales);
        for (((x, values), residual), (inverse, scale)) in blocks {
            for i in 0..BLOCK {
                values[i] = to_signed_e2m1(x[i], *inverse) * scale;
                if RESIDUAL {
                    residual[i] = x[i] - values[i] * unit;
                }
            }
        }
        if RESIDUAL && amax >= 2f32.powi(127).to_bits() {
            // x̂ may have overflown.
            let residual = self.residual.as_flattened_mut().iter_mut();
            for ((residual, x), value) in residual.zip(x.as_flattened()).zip(values.as_flattened()) {
                *residual = nvfp4::residual(*x, *value, unit);
            }
        }
        unit
    }

    /// Sets the residuals to zero that the second pass does not see.
    #[inline(always)]
    fn mask_residual(&mut self, mask: &[[u32; BLOCK]]) {
        for (residual, mask) in self.residual.iter_mut().zip(mask) {
            for i in 0..BLOCK {
                residual[i] = f32::from_bits(residual[i].to_bits() & mask[i]);
            }
        }
    }

    /// As `mask_residual`, with the `count` units of most energy selected.
    #[inline(always)]
    fn select_residual(&mut self, granularity: Granularity, count: usize) {
        let k = self.residual.len() * BLOCK;
        self.energy.resize(granularity.units(k), 0.0);
        self.ranks.resize(granularity.units(k), 0);
        self.selected.resize(granularity.units(k), false);
        unit_energy(self.residual.as_flattened(), granularity, &mut self.energy);
        for (ranks, energy) in self.ranks.iter_mut().zip(&self.energy) {
            *ranks = rank(*energy);
        }
        select_units(&self.ranks, count, &mut self.selected);
        let units = self.residual.as_flattened_mut().chunks_mut(granularity.channels());
        for (residual, selected) in units.zip(&self.selected) {
            let mask = if *selected { u32::MAX } else { 0 };
            for r in residual {
                *r = f32::from_bits(r.to_bits() & mask);
            }
        }
    }

    /// Adds the values of the residual.
    #[inline(always)]
    fn second_pass(&mut self, values: &mut [f32]) {
        if block_amax(&self.residual, &mut self.amax).is_none() {
            return;
        }
        self.set_scales();
        let values = values.as_chunks_mut::<BLOCK>().0;
        let scales = self.inverses.iter().zip(&self.scales);
        for ((values, residual), (inverse, scale)) in values.iter_mut().zip(&self.residual).zip(scales) {
            for i in 0..BLOCK {
                values[i] += to_signed_e2m1(residual[i], *inverse) * scale;
            }
        }
    }

    #[inline(always)]
    fn set_scales(&mut self) {
        // In whole vectors.
        let amax = self.amax.as_chunks::<BLOCK>().0;
        let scales = self.scales.as_chunks_mut::<BLOCK>().0;
        let inverses = self.inverses.as_chunks_mut::<BLOCK>().0;
        for ((amax, scales), inverses) in amax.iter().zip(scales).zip(inverses) {
            for b in 0..BLOCK {
                scales[b] = to_e4m3(f32::from_bits(amax[b]) * (self.scale * nvfp4::SIXTH));
                // 1/0 counts as FLT_MAX before the row's scale enters.
                inverses[b] = at_most(at_most(1.0 / scales[b], f32::MAX) * self.scale, f32::MAX);
            }
        }
    }
}

/// Bits of each block's amax, and of the largest; none when a value is not finite.
#[inline(always)]
fn block_amax(x: &[[f32; BLOCK]], amax: &mut [u32]) -> Option<u32> {
    let mut largest = 0;
    for (x, amax) in x.iter().zip(amax) {
        *amax = amax_bits(x);
        largest = largest.max(*amax);
        // Within the loop: this keeps the compiler from working on many blocks at a time, which would take a gather for
        // every value.
        if largest >= INFINITE {
            return None;
        }
    }
    Some(largest)
}

#[inline(always)]
fn to_signed_e2m1(x: f32, inverse: f32) -> f32 {
    with_sign(to_e2m1((x * inverse).abs()), x)
}
