//! Products of activations with packed weights.
use super::{dequantize_weight, fake_quantize_activations};
use crate::{Activation, Error, WeightLayout, WeightView};

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
    Error::check_length("counts of a grouped matmul", &[w.len()], counts.len())?;
    let (rows, k) = w.first().map_or((0, 0), |w| (w.rows(), w.k()));
    for (group, w) in w.iter().enumerate() {
        w.check()?;
        if (w.rows(), w.k()) != (rows, k) {
            return Err(Error::GroupShape {
                group,
                rows: w.rows(),
                k: w.k(),
                first_rows: rows,
                first_k: k,
            });
        }
    }
    let tokens = counts
        .iter()
        .try_fold(0usize, |sum, &n| sum.checked_add(n))
        .ok_or(Error::Shape {
            what: "activations",
            shape: counts.to_vec(),
        })?;
    Error::check_length("activations", &[tokens, k], x.len())?;
    Error::check_length("output", &[tokens, rows], out.len())?;
    let mut xq = vec![0.0; x.len()];
    fake_quantize_activations(x, tokens, k, activation, &mut xq)?;
    let mut wq = vec![0.0; rows * k];
    let mut first = 0;
    for (&count, w) in counts.iter().zip(w) {
        dequantize_weight(*w, WeightLayout::RowMajor, &mut wq)?;
        for t in first..first + count {
            for n in 0..rows {
                let products = xq[t * k..][..k].iter().zip(&wq[n * k..][..k]);
                out[t * rows + n] = products.fold(0.0, |sum, (x, w)| sum + x * w);
            }
        }
        first += count;
    }
    Ok(())
}
