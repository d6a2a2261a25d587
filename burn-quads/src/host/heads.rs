//! What one attention head does with one token: norm and rotation, scores, softmax, mixing.
use super::vector::{LANES, exp, larger, multiply_add, reduce, sum_of_squares};
use std::array;

/// Keys of one block of scores: transposed keys have whole blocks of columns.
pub(crate) const KEY_BLOCK: usize = LANES;

/// RMS norm of a head where it has one, and its rotation by half-split pairs.
#[derive(Clone, Copy)]
pub(super) struct HeadNorm<'a> {
    /// `[head_dim]`.
    pub gamma: &'a [f32],
    /// `None`: the head is rotated only, and `gamma` is ones.
    pub epsilon: Option<f32>,
}

/// A row of the rotary tables, as [`RotaryEmbedding`](crate::modules::rotary::RotaryEmbedding) keeps them.
#[derive(Clone, Copy)]
pub(super) struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
}

impl<'a> Angles<'a> {
    /// Row `row` of tables `[rows, head_dim]`. Both halves of a row hold the same angles; the sine of the first half
    /// has its sign changed.
    #[inline(always)]
    pub(super) fn of(cos: &'a [f32], sin: &'a [f32], row: usize, head_dim: usize) -> Self {
        let half = head_dim / 2;
        Self {
            cos: &cos[row * head_dim..][..half],
            sin: &sin[row * head_dim + half..][..half],
        }
    }
}

impl HeadNorm<'_> {
    #[inline(always)]
    fn inverse_rms<const FUSED: bool>(&self, x: &[f32]) -> f32 {
        match self.epsilon {
            Some(epsilon) => 1.0 / (sum_of_squares::<FUSED>(x) / x.len() as f32 + epsilon).sqrt(),
            None => 1.0,
        }
    }

    /// `x` `[head_dim]`, normed and rotated.
    #[inline(always)]
    pub(super) fn apply<const FUSED: bool>(&self, x: &[f32], angles: Angles, out: &mut [f32]) {
        let half = x.len() / 2;
        let inverse = self.inverse_rms::<FUSED>(x);
        let (low, high) = out.split_at_mut(half);
        let (x_low, x_high) = x.split_at(half);
        let (gamma_low, gamma_high) = self.gamma.split_at(half);
        let (cos, sin) = (angles.cos, angles.sin);
        // Loads before stores, eight at a time: the compiler cannot know that the slices lie apart.
        const WIDTH: usize = 8;
        let whole = half - half % WIDTH;
        for i in (0..whole).step_by(WIDTH) {
            let (a, b) = (load::<WIDTH>(x_low, i), load::<WIDTH>(x_high, i));
            let (gamma_a, gamma_b) = (load::<WIDTH>(gamma_low, i), load::<WIDTH>(gamma_high, i));
            let (c, s) = (load::<WIDTH>(cos, i), load::<WIDTH>(sin, i));
            let a: [f32; WIDTH] = array::from_fn(|lane| a[lane] * inverse * gamma_a[lane]);
            let b: [f32; WIDTH] = array::from_fn(|lane| b[lane] * inverse * gamma_b[lane]);
            low[i..i + WIDTH].copy_from_slice(&array::from_fn::<_, WIDTH, _>(|l| a[l] * c[l] - b[l] * s[l]));
            high[i..i + WIDTH].copy_from_slice(&array::from_fn::<_, WIDTH, _>(|l| b[l] * c[l] + a[l] * s[l]));
        }
        for i in whole..half {
            let a = x_low[i] * inverse * gamma_low[i];
            let b = x_high[i] * inverse * gamma_high[i];
            low[i] = a * cos[i] - b * sin[i];
            high[i] = b * cos[i] + a * sin[i];
        }
    }

    /// From the gradient of [`Self::apply`]'s output, which it overwrites, the gradient of `x`; adds that of `gamma`.
    #[inline(always)]
    pub(super) fn backward<const FUSED: bool>(
        &self,
        x: &[f32],
        angles: Angles,
        grad: &mut [f32],
        dx: &mut [f32],
        dgamma: &mut [f32],
    ) {
        let (d, half) = (x.len(), x.len() / 2);
        let inverse = self.inverse_rms::<FUSED>(x);
        // The rotation back.
        let (low, high) = grad.split_at_mut(half);
        for i in 0..half {
            let (a, b) = (low[i], high[i]);
            low[i] = a * angles.cos[i] + b * angles.sin[i];
            high[i] = b * angles.cos[i] - a * angles.sin[i];
        }
        // y = x / rms · γ: dx = (g − n · mean(g · n)) / rms with n = x / rms and g = γ · dy.
        let mut along = 0.0;
        for i in 0..d {
            let normed = x[i] * inverse;
            dgamma[i] += grad[i] * normed;
            grad[i] *= self.gamma[i];
            along += grad[i] * normed;
        }
        // Without a norm nothing depends on the length of x.
        let along = match self.epsilon {
            Some(_) => along / d as f32 * inverse,
            None => 0.0,
        };
        for i in 0..d {
            dx[i] = (grad[i] - x[i] * along) * inverse;
        }
    }
}

#[inline(always)]
fn load<const N: usize>(x: &[f32], start: usize) -> [f32; N] {
    x[start..start + N].try_into().expect("N numbers")
}

/// Adds `w · row` to `sums`.
#[inline(always)]
fn add_row<const FUSED: bool>(w: f32, row: &[f32], sums: &mut [f32; LANES]) {
    let row = &row[..LANES];
    for lane in 0..LANES {
        sums[lane] = multiply_add::<FUSED>(w, row[lane], sums[lane]);
    }
}

/// Dot products of `q` with every column of `keys` `[head_dim, columns]`, as many as `out` holds: whole blocks.
#[inline(always)]
pub(super) fn scores<const FUSED: bool>(q: &[f32], keys: &[f32], columns: usize, out: &mut [f32]) {
    for (block, out) in out.chunks_exact_mut(LANES).enumerate() {
        let mut sums = [0f32; LANES];
        let mut start = block * LANES;
        for q in q {
            add_row::<FUSED>(*q, &keys[start..], &mut sums);
            start += columns;
        }
        out.copy_from_slice(&sums);
    }
}

/// Replaces the first `len` scores by `exp(score − largest)`, the rest by 0, and gives their sum.
#[inline(always)]
pub(super) fn exponentials<const FUSED: bool>(scores: &mut [f32], len: usize) -> f32 {
    scores[len..].fill(f32::NEG_INFINITY);
    let mut largest = [f32::NEG_INFINITY; LANES];
    for block in scores.chunks_exact(LANES) {
        for lane in 0..LANES {
            largest[lane] = larger(largest[lane], block[lane]);
        }
    }
    let largest = reduce(largest, larger);
    let mut sums = [0f32; LANES];
    for block in scores.chunks_exact_mut(LANES) {
        for lane in 0..LANES {
            block[lane] = exp::<FUSED>(block[lane] - largest);
            sums[lane] += block[lane];
        }
    }
    reduce(sums, |a, b| a + b)
}

/// `out = Σ weight_j · row_j`, row `j` of `rows` starting at `j · stride`.
#[inline(always)]
pub(super) fn mix<const FUSED: bool>(weights: &[f32], rows: &[f32], stride: usize, out: &mut [f32]) {
    let mut blocks = out.chunks_exact_mut(LANES);
    let mut channel = 0;
    for out in &mut blocks {
        // Even and odd weights apart: two chains of additions that do not wait for each other.
        let (mut even, mut odd) = ([0f32; LANES], [0f32; LANES]);
        let mut start = channel;
        let pairs = weights.chunks_exact(2);
        let last = pairs.remainder();
        for pair in pairs {
            add_row::<FUSED>(pair[0], &rows[start..], &mut even);
            add_row::<FUSED>(pair[1], &rows[start + stride..], &mut odd);
            start += 2 * stride;
        }
        for w in last {
            add_row::<FUSED>(*w, &rows[start..], &mut even);
        }
        for lane in 0..LANES {
            out[lane] = even[lane] + odd[lane];
        }
        channel += LANES;
    }
    let rest = blocks.into_remainder();
    rest.fill(0.0);
    if !rest.is_empty() {
        for (j, w) in weights.iter().enumerate() {
            add_scaled::<FUSED>(*w, &rows[j * stride + channel..], rest);
        }
    }
}

/// `out += w · row`, as many numbers as `out` holds.
#[inline(always)]
pub(super) fn add_scaled<const FUSED: bool>(w: f32, row: &[f32], out: &mut [f32]) {
    let row = &row[..out.len()];
    for (out, x) in out.iter_mut().zip(row) {
        *out = multiply_add::<FUSED>(w, *x, *out);
    }
}
