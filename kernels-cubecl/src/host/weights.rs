//! Packing and unpacking of weights.
use crate::nvfp4::{self, Operand};
use crate::{BLOCK, Error, Fp8Weight, Nvfp4Weight, OuterScale, WeightLayout, WeightView, amax, e4m3, encode_scale};

/// Packs a weight to NVFP4. `amax` is the largest magnitude of the group that shares the outer scale; without it the
/// weight's own.
///
/// # Errors
/// `w` does not have `rows · k` values, `k` is not a multiple of 16, a value is not finite, or `amax` is not finite or
/// below the weight's own.
pub fn quantize_weight(
    w: &[f32],
    rows: usize,
    k: usize,
    layout: WeightLayout,
    amax: Option<f32>,
) -> Result<Nvfp4Weight, Error> {
    if !k.is_multiple_of(BLOCK) {
        return Err(Error::UnalignedK { k });
    }
    let own = finite_amax(w, rows, k, layout)?;
    let amax = amax.unwrap_or(own);
    if !(amax.is_finite() && amax >= own) {
        return Err(Error::Amax { amax, own });
    }
    let scale = encode_scale(amax);
    let mut codes = Vec::with_capacity(rows * k / 2);
    let mut block_scales = Vec::with_capacity(rows * k / BLOCK);
    for row in 0..rows {
        for first in (0..k).step_by(BLOCK) {
            let values: [f32; BLOCK] = std::array::from_fn(|i| w[layout.index(row, first + i, rows, k)]);
            let block = nvfp4::encode_block(&values, scale, Operand::Weight);
            block_scales.push(block.scale);
            codes.extend(nvfp4::pack(&block.codes));
        }
    }
    Ok(Nvfp4Weight {
        rows,
        k,
        codes,
        block_scales,
        outer_scale: OuterScale::Multiply(1.0 / scale),
    })
}

/// Packs a weight to E4M3 with one scale, `amax/448`, a row (output channel).
///
/// # Errors
/// `w` does not have `rows · k` values, or a value is not finite.
pub fn quantize_weight_fp8(w: &[f32], rows: usize, k: usize, layout: WeightLayout) -> Result<Fp8Weight, Error> {
    finite_amax(w, rows, k, layout)?;
    let mut codes = Vec::with_capacity(rows * k);
    let mut channel_scales = Vec::with_capacity(rows);
    for row in 0..rows {
        let values: Vec<f32> = (0..k).map(|c| w[layout.index(row, c, rows, k)]).collect();
        let scale = fp8_scale(amax(&values));
        channel_scales.push(scale);
        codes.extend(values.iter().map(|value| e4m3::encode(value / scale)));
    }
    Ok(Fp8Weight {
        rows,
        k,
        codes,
        channel_scales,
    })
}

/// Decodes a packed weight into `out`, `rows · k` values in `layout`.
///
/// # Errors
/// A buffer of the weight, or `out`, does not have the length that the shape says.
pub fn dequantize_weight(w: WeightView, layout: WeightLayout, out: &mut [f32]) -> Result<(), Error> {
    w.check()?;
    let (rows, k) = (w.rows(), w.k());
    Error::check_length("decoded weight", &[rows, k], out.len())?;
    for row in 0..rows {
        for c in 0..k {
            let at = row * k + c;
            out[layout.index(row, c, rows, k)] = match w {
                WeightView::Nvfp4(w) => {
                    let step = w.outer_scale.step(e4m3::decode(w.block_scales[at / BLOCK] & 0x7f));
                    nvfp4::decode(nvfp4::unpack(w.codes, at), step)
                }
                WeightView::Fp8(w) => e4m3::decode(w.codes[at]) * w.channel_scales[row],
            };
        }
    }
    Ok(())
}

/// Scale of an FP8 row: `amax/448`, 1 when that is 0.
pub(crate) fn fp8_scale(amax: f32) -> f32 {
    let scale = amax / e4m3::MAX;
    if scale == 0.0 { 1.0 } else { scale }
}

/// Largest magnitude of a weight that must be finite.
fn finite_amax(w: &[f32], rows: usize, k: usize, layout: WeightLayout) -> Result<f32, Error> {
    Error::check_length("weight", &[rows, k], w.len())?;
    if let Some(at) = w.iter().position(|value| !value.is_finite()) {
        let (row, column) = match layout {
            WeightLayout::RowMajor => (at / k, at % k),
            WeightLayout::Transposed => (at % rows, at / rows),
        };
        return Err(Error::NonFinite {
            row,
            column,
            value: w[at],
        });
    }
    Ok(amax(w))
}
