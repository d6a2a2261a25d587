//! Packing and unpacking of weights.
use super::dispatch::{Kernel, Vectors, dispatch};
use super::parallel;
use super::recipes::Encoder;
use super::rounding::{INFINITE, amax_bits, e4m3_byte};
use super::tile::{self, Decoded, Matrix, STRIP};
use crate::{BLOCK, Error, Nvfp4Weight, WeightLayout, WeightRecipe, WeightView, encode_scale};
use rayon::prelude::*;
use std::ops::Range;

/// What packing or unpacking a value costs, in multiply-adds.
const COST: usize = 32;

/// Rows of a piece of work come in multiples of this, so that only the last piece has partial tiles.
const PIECE_ROWS: usize = 32;

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
    quantize_weight_by(WeightRecipe::TransformerEngine, w, rows, k, layout, amax)
}

/// [`quantize_weight`] by the formulas of another maker. `amax` must be the same for all tensors that share an outer
/// scale, and for all parts of a tensor that is packed in parts of whole rows.
///
/// # Errors
/// As [`quantize_weight`].
pub fn quantize_weight_by(
    recipe: WeightRecipe,
    w: &[f32],
    rows: usize,
    k: usize,
    layout: WeightLayout,
    amax: Option<f32>,
) -> Result<Nvfp4Weight, Error> {
    let amax = checked_amax(w, rows, k, layout, amax)?;
    let encoder = Encoder::new(recipe, amax);
    let mut codes = vec![0; rows * k / 2];
    let mut block_scales = vec![0; rows * k / BLOCK];
    if !w.is_empty() {
        let (pieces, piece) = piece_rows(rows, w.len());
        let chunks = codes
            .chunks_mut(piece * k / 2)
            .zip(block_scales.chunks_mut(piece * k / BLOCK));
        parallel::run(
            pieces,
            chunks.enumerate().map(|(i, (codes, block_scales))| QuantizeRows {
                w: Matrix {
                    values: w,
                    rows,
                    k,
                    layout,
                    offset: 0,
                },
                encoder,
                row: i * piece,
                codes,
                block_scales,
            }),
        );
    }
    Ok(Nvfp4Weight {
        rows,
        k,
        codes,
        block_scales,
        outer_scale: recipe.outer_scale(amax),
    })
}

/// Rounds a weight to what it decodes to once packed by [`quantize_weight`], bit for bit, without packing it: what a
/// quantization-aware trainer sees. `out` has the layout of `w`.
///
/// # Errors
/// As [`quantize_weight`]; `out` must be as long as `w`.
pub fn fake_quantize_weight(
    w: &[f32],
    rows: usize,
    k: usize,
    layout: WeightLayout,
    amax: Option<f32>,
    out: &mut [f32],
) -> Result<(), Error> {
    let scale = encode_scale(checked_amax(w, rows, k, layout, amax)?);
    Error::check_length("fake-quantized weight", &[rows, k], out.len())?;
    let w = Matrix {
        values: w,
        rows,
        k,
        layout,
        offset: 0,
    };
    write_tiles(Source::Rounded(w, scale), rows, k, layout, out);
    Ok(())
}

/// Decodes a packed weight into `out`, `rows · k` values in `layout`.
///
/// # Errors
/// A buffer of the weight, or `out`, does not have the length that the shape says.
pub fn dequantize_weight(w: WeightView, layout: WeightLayout, out: &mut [f32]) -> Result<(), Error> {
    w.check()?;
    Error::check_length("decoded weight", &[w.rows(), w.k()], out.len())?;
    write_tiles(Source::Packed(w), w.rows(), w.k(), layout, out);
    Ok(())
}

/// The largest magnitude that the outer scale of a weight covers, if the weight can be packed under it.
fn checked_amax(w: &[f32], rows: usize, k: usize, layout: WeightLayout, amax: Option<f32>) -> Result<f32, Error> {
    if !k.is_multiple_of(BLOCK) {
        return Err(Error::UnalignedK { k });
    }
    let own = finite_amax(w, rows, k, layout)?;
    let amax = amax.unwrap_or(own);
    if !(amax.is_finite() && amax >= own) {
        return Err(Error::Amax { amax, own });
    }
    Ok(amax)
}

/// Largest magnitude of a weight that must be finite.
pub(super) fn finite_amax(w: &[f32], rows: usize, k: usize, layout: WeightLayout) -> Result<f32, Error> {
    Error::check_length("weight", &[rows, k], w.len())?;
    let piece = w.len().div_ceil(parallel::pieces(w.len())).max(1);
    let bits = match w.len() <= piece {
        true => dispatch(Amax(w)),
        false => w.par_chunks(piece).map(|w| dispatch(Amax(w))).max().unwrap_or(0),
    };
    if bits < INFINITE {
        return Ok(f32::from_bits(bits));
    }
    let at = w.iter().position(|value| !value.is_finite()).unwrap_or(0);
    let (row, column) = match layout {
        WeightLayout::RowMajor => (at / k, at % k),
        WeightLayout::Transposed => (at % rows, at / rows),
    };
    Err(Error::NonFinite {
        row,
        column,
        value: w[at],
    })
}

struct Amax<'a>(&'a [f32]);

impl Kernel for Amax<'_> {
    type Output = u32;

    #[inline(always)]
    fn run<V: Vectors, const TOKENS: usize, const COUNT: usize, const LANES: usize>(self, _: V) -> u32 {
        amax_bits(self.0)
    }
}

/// Into how many pieces work on `values` values is split, and how many of `lines` rows or columns are in one.
pub(super) fn piece_rows(lines: usize, values: usize) -> (usize, usize) {
    let pieces = parallel::pieces(COST.saturating_mul(values));
    (pieces, lines.div_ceil(pieces).next_multiple_of(PIECE_ROWS))
}

struct QuantizeRows<'a> {
    w: Matrix<&'a [f32]>,
    encoder: Encoder,
    row: usize,
    codes: &'a mut [u8],
    block_scales: &'a mut [u8],
}

impl Kernel for QuantizeRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors, const TOKENS: usize, const COUNT: usize, const LANES: usize>(self, _: V) {
        let k = self.w.k;
        let panels = self
            .codes
            .chunks_mut(LANES * k / 2)
            .zip(self.block_scales.chunks_mut(LANES * k / BLOCK));
        for (panel, (codes, block_scales)) in panels.enumerate() {
            let lanes = block_scales.len() / (k / BLOCK);
            let mut strip = [[0.0; LANES]; STRIP];
            for first in (0..k).step_by(STRIP) {
                let strip = &mut strip[..STRIP.min(k - first)];
                self.w.load(self.row + panel * LANES, first, strip);
                self.encoder.encode(strip, |b, words, scales| {
                    let mut bytes = [0; LANES];
                    for lane in 0..LANES {
                        bytes[lane] = e4m3_byte(scales[lane]) as u8;
                    }
                    let at = first / BLOCK + b;
                    for lane in 0..lanes {
                        block_scales[lane * (k / BLOCK) + at] = bytes[lane];
                        let codes = &mut codes[(lane * (k / BLOCK) + at) * BLOCK / 2..][..BLOCK / 2];
                        codes[..4].copy_from_slice(&words[0][lane].to_le_bytes());
                        codes[4..].copy_from_slice(&words[1][lane].to_le_bytes());
                    }
                });
            }
        }
    }
}

/// Where decoded values come from.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// A packed weight.
    Packed(WeightView<'a>),
    /// An f32 weight, and its encode scale.
    Rounded(Matrix<&'a [f32]>, f32),
}

/// Writes the `rows × k` values of `source` into `out`.
fn write_tiles(source: Source, rows: usize, k: usize, layout: WeightLayout, out: &mut [f32]) {
    if out.is_empty() {
        return;
    }
    // Pieces are contiguous in `out`: rows of a row-major matrix, columns of a transposed one.
    let (lines, line) = match layout {
        WeightLayout::RowMajor => (rows, k),
        WeightLayout::Transposed => (k, rows),
    };
    let (pieces, piece) = piece_rows(lines, out.len());
    parallel::run(
        pieces,
        out.chunks_mut(piece * line).enumerate().map(|(i, values)| {
            let span = i * piece..i * piece + values.len() / line;
            let (row_span, column_span) = match layout {
                WeightLayout::RowMajor => (span, 0..k),
                WeightLayout::Transposed => (0..rows, span),
            };
            let offset = i * piece * line;
            WriteTiles {
                source,
                row_span,
                column_span,
                out: Matrix {
                    values,
                    rows,
                    k,
                    layout,
                    offset,
                },
            }
        }),
    );
}

struct WriteTiles<'a> {
    source: Source<'a>,
    row_span: Range<usize>,
    column_span: Range<usize>,
    out: Matrix<&'a mut [f32]>,
}

impl Kernel for WriteTiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors, const TOKENS: usize, const COUNT: usize, const LANES: usize>(mut self, vectors: V) {
        let mut strip = [[0.0; LANES]; STRIP];
        for row in self.row_span.step_by(LANES) {
            for first in self.column_span.clone().step_by(STRIP) {
                let strip = &mut strip[..STRIP.min(self.column_span.end - first)];
                match self.source {
                    Source::Packed(w) => {
                        tile::decode::<V, COUNT, LANES>(vectors, w, Decoded::Values, row, first, strip)
                    }
                    Source::Rounded(w, encode_scale) => {
                        w.load(row, first, strip);
                        tile::round(strip, encode_scale);
                    }
                }
                self.out.store(row, first, strip);
            }
        }
    }
}
