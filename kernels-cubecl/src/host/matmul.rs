//! Products of activations with packed weights.
//!
//! Every output is one sum over `k` in order, each step a fused multiply-add where the processor has one (without, a
//! product is rounded before it is added; the two differ only where products are not exact, which NVFP4's and FP8's
//! are, compensated and full-precision activations' are not). The sum's order does not depend on tiles, pieces or the
//! number of rows, so neither do the bits.
//!
//! With quantized activations the sum runs over values in units (`e2m1 · block_scale` on both sides), and
//! `f32(sum · (unit · outer scale))`, one rounding, is the output. With full-precision activations it runs over the
//! decoded weight, and is the output.
use super::dispatch::{Kernel, Vectors};
use super::tile::{self, Decoded};
use super::{parallel, rows};
use crate::{Activation, Error, OuterScale, QuantizedRows, WeightView};

/// `out[t, n] = Σ_k x̂[t, k] · ŵ[n, k]`: `x` is `[tokens, k]` and enters as `activation` says, `out` is
/// `[tokens, rows]`.
///
/// # Errors
/// A buffer does not have the length that the shape says, or the activation does not fit `k`.
pub fn matmul(x: &[f32], tokens: usize, w: WeightView, activation: &Activation, out: &mut [f32]) -> Result<(), Error> {
    grouped_matmul(x, &[tokens], &[w], activation, out)
}

/// [`matmul`] of each group of rows with its own weight: the first `counts[0]` rows of `x` with `w[0]`, and so on. The
/// weights have one shape, `out` is `[Σ counts, rows]`. A group without rows costs nothing.
///
/// # Errors
/// As [`matmul`]; `counts` and `w` differ in length, or the weights in shape.
pub fn grouped_matmul(
    x: &[f32],
    counts: &[usize],
    w: &[WeightView],
    activation: &Activation,
    out: &mut [f32],
) -> Result<(), Error> {
    let (rows, k) = check_weights(counts, w)?;
    let tokens = counts
        .iter()
        .try_fold(0usize, |sum, &n| sum.checked_add(n))
        .ok_or(Error::Shape {
            what: "activations",
            shape: counts.to_vec(),
        })?;
    activation.check(k)?;
    Error::check_length("activations", &[tokens, k], x.len())?;
    Error::check_length("output", &[tokens, rows], out.len())?;
    if out.is_empty() {
        return Ok(());
    }
    if let Activation::Full = activation {
        multiply(Rows::Values(x), k, counts, w, out);
        return Ok(());
    }
    let (mut values, mut units) = (vec![0.0; x.len()], vec![0.0; tokens]);
    rows::quantize(x, k, activation, &mut values, &mut units);
    multiply(Rows::Units(&values, &units), k, counts, w, out);
    Ok(())
}

/// [`matmul`] with activations that are quantized already: the same bits.
///
/// # Errors
/// As [`matmul`].
pub fn matmul_quantized(x: &QuantizedRows, w: WeightView, out: &mut [f32]) -> Result<(), Error> {
    let (rows, k) = check_weights(&[x.tokens], &[w])?;
    x.check()?;
    if x.k != k {
        return Err(Error::Length {
            what: "channels of quantized activations",
            expected: k,
            actual: x.k,
        });
    }
    Error::check_length("output", &[x.tokens, rows], out.len())?;
    let units: Vec<f32> = x.encode_scales.iter().map(|scale| 1.0 / scale).collect();
    multiply(Rows::Units(&x.values_in_units(), &units), k, &[x.tokens], &[w], out);
    Ok(())
}

/// The shape that all weights have.
fn check_weights(counts: &[usize], w: &[WeightView]) -> Result<(usize, usize), Error> {
    Error::check_length("counts of a grouped matmul", &[w.len()], counts.len())?;
    let (first_rows, first_k) = w.first().map_or((0, 0), |w| (w.rows(), w.k()));
    for (group, w) in w.iter().enumerate() {
        w.check()?;
        let (rows, k) = (w.rows(), w.k());
        if (rows, k) != (first_rows, first_k) {
            return Err(Error::GroupShape {
                group,
                rows,
                k,
                first_rows,
                first_k,
            });
        }
    }
    Ok((first_rows, first_k))
}

/// Activations as they are multiplied, `[tokens, k]`.
#[derive(Clone, Copy)]
enum Rows<'a> {
    Values(&'a [f32]),
    /// Values and the unit of each row.
    Units(&'a [f32], &'a [f32]),
}

/// What decoding a weight's value costs, in multiply-adds.
const DECODE_COST: usize = 10;

/// Rows of outputs and columns of tiles come in pieces of at least this many.
const PIECE: usize = 32;

/// Splits the product over threads. All lengths have been checked.
fn multiply(x: Rows, k: usize, counts: &[usize], w: &[WeightView], mut out: &mut [f32]) {
    let rows = w.first().map_or(0, |w| w.rows());
    if out.is_empty() {
        return;
    }
    let cost = |tokens: usize| (tokens + DECODE_COST).saturating_mul(rows).saturating_mul(k);
    let total = counts
        .iter()
        .filter(|&&tokens| tokens > 0)
        .fold(0usize, |sum, &tokens| sum.saturating_add(cost(tokens)));
    let pieces = parallel::pieces(total);
    let share = total.div_ceil(pieces).max(1);
    let mut kernels = Vec::new();
    let mut first = 0;
    for (&tokens, &w) in counts.iter().zip(w).filter(|(tokens, _)| **tokens > 0) {
        let group_pieces = cost(tokens).div_ceil(share).max(1);
        // Columns first: a piece of the rows decodes the weight for itself.
        let columns = rows.div_ceil(group_pieces).next_multiple_of(PIECE);
        let token_pieces = group_pieces / rows.div_ceil(columns);
        let piece_tokens = tokens.div_ceil(token_pieces.max(1)).max(PIECE);
        let group;
        (group, out) = out.split_at_mut(tokens * rows);
        for out in group.chunks_mut(piece_tokens * rows) {
            let last = first + out.len() / rows;
            let mut pieces: Vec<Vec<&mut [f32]>> = Vec::new();
            pieces.resize_with(rows.div_ceil(columns), Vec::new);
            for row in out.chunks_exact_mut(rows) {
                pieces
                    .iter_mut()
                    .zip(row.chunks_mut(columns))
                    .for_each(|(piece, row)| piece.push(row));
            }
            kernels.extend(pieces.into_iter().enumerate().map(|(piece, out)| Product {
                x: match x {
                    Rows::Values(values) => Rows::Values(&values[first * k..last * k]),
                    Rows::Units(values, units) => Rows::Units(&values[first * k..last * k], &units[first..last]),
                },
                k,
                w,
                row: piece * columns,
                out,
            }));
            first = last;
        }
    }
    parallel::run(pieces, kernels.into_iter());
}

/// The product of some rows of activations with some rows of a weight.
struct Product<'a> {
    x: Rows<'a>,
    k: usize,
    w: WeightView<'a>,
    /// First row of the weight.
    row: usize,
    /// One slice a row of activations, one output a row of the weight.
    out: Vec<&'a mut [f32]>,
}

/// Columns that are decoded at a time: a tile of 32 rows takes 32 KB and stays in the first-level cache.
const PANEL: usize = 256;

/// Rows of activations that are multiplied with a tile before the next is decoded.
const CHUNK: usize = 128;

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors, const TOKENS: usize, const COUNT: usize, const LANES: usize>(mut self, vectors: V) {
        let (x, decoded) = match self.x {
            Rows::Values(values) => (values, Decoded::Values),
            Rows::Units(values, _) => (values, Decoded::Units),
        };
        let columns = self.out.first().map_or(0, |row| row.len());
        let mut tile = vec![[0.0; LANES]; PANEL.min(self.k)];
        let mut sums = vec![[0.0; LANES]; CHUNK.min(self.out.len())];
        for (chunk, out) in self.out.chunks_mut(CHUNK).enumerate() {
            let sums = &mut sums[..out.len()];
            for column in (0..columns).step_by(LANES) {
                sums.fill([0.0; LANES]);
                for first in (0..self.k).step_by(PANEL) {
                    let tile = &mut tile[..PANEL.min(self.k - first)];
                    tile::decode::<V, COUNT, LANES>(vectors, self.w, decoded, self.row + column, first, tile);
                    let x = Columns {
                        x: &x[chunk * CHUNK * self.k..],
                        k: self.k,
                        first,
                    };
                    let done = add_products::<V, TOKENS, COUNT, LANES>(vectors, &x, tile, sums, 0);
                    let done = add_products::<V, 4, COUNT, LANES>(vectors, &x, tile, sums, done);
                    let done = add_products::<V, 2, COUNT, LANES>(vectors, &x, tile, sums, done);
                    add_products::<V, 1, COUNT, LANES>(vectors, &x, tile, sums, done);
                }
                let width = LANES.min(columns - column);
                for (t, (out, sums)) in out.iter_mut().zip(&*sums).enumerate() {
                    let out = &mut out[column..column + width];
                    match self.x {
                        Rows::Values(_) => scale(sums, 1.0, out),
                        Rows::Units(_, units) => {
                            let unit = units[chunk * CHUNK + t];
                            match self.w {
                                WeightView::Nvfp4(w) => scale(sums, f64::from(unit) * outer_factor(w.outer_scale), out),
                                WeightView::Fp8(w) => {
                                    scale_channels(sums, unit, &w.channel_scales[self.row + column..], out);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Columns of rows of activations, from `first` on.
struct Columns<'a> {
    x: &'a [f32],
    k: usize,
    first: usize,
}

/// Adds the products of a tile with `TOKENS` rows at a time to their sums, from row `token` on; returns the first row
/// that is left. The sums of one step stay in registers.
#[inline(always)]
fn add_products<V: Vectors, const TOKENS: usize, const COUNT: usize, const LANES: usize>(
    vectors: V,
    x: &Columns,
    tile: &[[f32; LANES]],
    sums: &mut [[f32; LANES]],
    mut token: usize,
) -> usize {
    while token + TOKENS <= sums.len() {
        let lines = &mut sums[token..token + TOKENS];
        let mut rows: [&[f32]; TOKENS] = [&[]; TOKENS];
        let mut step = [[vectors.load(&lines[0], 0); COUNT]; TOKENS];
        for t in 0..TOKENS {
            rows[t] = &x.x[(token + t) * x.k + x.first..][..tile.len()];
            for v in 0..COUNT {
                step[t][v] = vectors.load(&lines[t], v);
            }
        }
        for (c, line) in tile.iter().enumerate() {
            let mut w = step[0];
            for v in 0..COUNT {
                w[v] = vectors.load(line, v);
            }
            for t in 0..TOKENS {
                for v in 0..COUNT {
                    step[t][v] = vectors.multiply_add(rows[t][c], w[v], step[t][v]);
                }
            }
        }
        for t in 0..TOKENS {
            for v in 0..COUNT {
                vectors.store(step[t][v], &mut lines[t], v);
            }
        }
        token += TOKENS;
    }
    token
}

/// What the outer scale puts on a sum of values in units.
fn outer_factor(outer_scale: OuterScale) -> f64 {
    match outer_scale {
        OuterScale::Multiply(s) => f64::from(s),
        OuterScale::Divide(s) => 1.0 / f64::from(s),
    }
}

/// `out = f32(sums · factor)`, rounded once: no scale on the way over- or underflows.
#[inline(always)]
fn scale<const LANES: usize>(sums: &[f32; LANES], factor: f64, out: &mut [f32]) {
    if f64::from(factor as f32) == factor {
        // The same bits, on narrower numbers.
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum * factor as f32;
        }
    } else {
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = (f64::from(*sum) * factor) as f32;
        }
    }
}

/// [`scale`] with a factor a column, `unit · channel_scale`.
#[inline(always)]
fn scale_channels<const LANES: usize>(sums: &[f32; LANES], unit: f32, channel_scales: &[f32], out: &mut [f32]) {
    for ((out, sum), channel_scale) in out.iter_mut().zip(sums).zip(channel_scales) {
        *out = (f64::from(*sum) * (f64::from(unit) * f64::from(*channel_scale))) as f32;
    }
}
