//! Causal attention over whole sequences, and its gradient: norm, rotation, scores, softmax and mixing of one sequence
//! after the other, with nothing kept between the passes but the inputs.
//!
//! The forward pass computes each token exactly as [`cached_attention`](super::cached_attention) does, so that decoding
//! and scoring of sequences that start at position 0 agree in every bit.
use super::{
    heads::{Angles, HeadNorm, add_scaled, exponentials, mix, scores},
    vector::{Kernel, LANES, dispatch},
};
use crate::layer_backend::MASKED_SCORE;
use rayon::prelude::*;

/// See [`AttentionInput`](crate::layer_backend::AttentionInput).
pub(crate) struct CausalAttention<'a> {
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `[batch, seq, heads · head_dim]`.
    pub query: &'a [f32],
    /// `[batch, seq, kv_heads · head_dim]`.
    pub key: &'a [f32],
    /// `[batch, seq, kv_heads · head_dim]`.
    pub value: &'a [f32],
    pub query_norm: &'a [f32],
    pub key_norm: &'a [f32],
    /// `None`: heads are not normed, and the norms' weights are ones.
    pub epsilon: Option<f32>,
    /// `[batch or 1, seq, head_dim]`.
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    /// `[batch, seq]`, not 0 at padding.
    pub padding: Option<&'a [u8]>,
}

/// Gradients in the order and shapes of the inputs.
pub(crate) struct Gradients {
    pub query: Vec<f32>,
    pub key: Vec<f32>,
    pub value: Vec<f32>,
    pub query_norm: Vec<f32>,
    pub key_norm: Vec<f32>,
}

impl CausalAttention<'_> {
    fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Columns of transposed keys: whole blocks.
    fn columns(&self) -> usize {
        self.seq.next_multiple_of(LANES)
    }

    /// The mixed values, `[batch, seq, heads · head_dim]`.
    pub(crate) fn forward(&self) -> Vec<f32> {
        let mut mixed = vec![0f32; self.query.len()];
        let sequence = (self.seq * self.query_width()).max(1);
        mixed.par_chunks_mut(sequence).enumerate().for_each(|(row, mixed)| {
            let input = self;
            dispatch(Forward { input, row, mixed });
        });
        mixed
    }

    /// `grad` is the gradient of [`Self::forward`]'s result.
    pub(crate) fn backward(&self, grad: &[f32]) -> Gradients {
        let d = self.head_dim;
        let (queries, keys) = (
            (self.seq * self.query_width()).max(1),
            (self.seq * self.key_width()).max(1),
        );
        let mut query = vec![0f32; self.query.len()];
        let mut key = vec![0f32; self.key.len()];
        let mut value = vec![0f32; self.value.len()];
        // Norm gradients by sequence, added in order below: the same sums on any number of threads.
        let mut norms = vec![0f32; self.batch * 2 * d];
        query
            .par_chunks_mut(queries)
            .zip(key.par_chunks_mut(keys))
            .zip(value.par_chunks_mut(keys))
            .zip(norms.par_chunks_mut(2 * d))
            .zip(grad.par_chunks(queries))
            .enumerate()
            .for_each(|(row, ((((query, key), value), norms), grad))| {
                let (query_norm, key_norm) = norms.split_at_mut(d);
                dispatch(Backward {
                    input: self,
                    row,
                    grad,
                    query,
                    key,
                    value,
                    query_norm,
                    key_norm,
                });
            });
        let mut sums = vec![0f32; 2 * d];
        for norms in norms.chunks_exact(2 * d) {
            add_scaled::<false>(1.0, norms, &mut sums);
        }
        let key_norm = sums.split_off(d);
        Gradients {
            query,
            key,
            value,
            query_norm: sums,
            key_norm,
        }
    }

    #[inline(always)]
    fn angles(&self, row: usize, position: usize) -> Angles<'_> {
        let shared = self.cos.len() == self.seq * self.head_dim;
        let first = if shared { 0 } else { row * self.seq };
        Angles::of(self.cos, self.sin, first + position, self.head_dim)
    }

    fn query_norm(&self) -> HeadNorm<'_> {
        HeadNorm {
            gamma: self.query_norm,
            epsilon: self.epsilon,
        }
    }

    fn key_norm(&self) -> HeadNorm<'_> {
        HeadNorm {
            gamma: self.key_norm,
            epsilon: self.epsilon,
        }
    }

    fn scale(&self) -> f32 {
        (self.head_dim as f32).powf(-0.5)
    }

    /// Where token `t` of sequence `row` has its head.
    #[inline(always)]
    fn at(&self, row: usize, t: usize, width: usize, head: usize) -> usize {
        (row * self.seq + t) * width + head * self.head_dim
    }

    /// Keys of one head of one sequence, normed and rotated, transposed to `[head_dim, columns]`.
    #[inline(always)]
    fn rotate_keys<const FUSED: bool>(&self, row: usize, head: usize, rotated: &mut [f32], keys: &mut [f32]) {
        let columns = self.columns();
        for t in 0..self.seq {
            let key = &self.key[self.at(row, t, self.key_width(), head)..][..self.head_dim];
            self.key_norm().apply::<FUSED>(key, self.angles(row, t), rotated);
            for (c, x) in rotated.iter().enumerate() {
                keys[c * columns + t] = *x;
            }
        }
    }

    /// Unnormalised attention weights of token `t` over itself and those before it, in whole blocks; gives their sum.
    #[inline(always)]
    fn weights<const FUSED: bool>(&self, row: usize, t: usize, q: &[f32], keys: &[f32], weights: &mut [f32]) -> f32 {
        scores::<FUSED>(q, keys, self.columns(), weights);
        if let Some(padding) = self.padding {
            let padding = &padding[row * self.seq..][..t + 1];
            for (score, _) in weights.iter_mut().zip(padding).filter(|(_, padding)| **padding != 0) {
                *score = MASKED_SCORE;
            }
        }
        exponentials::<FUSED>(weights, t + 1)
    }
}

/// One sequence; `mixed` is `[seq, heads · head_dim]`.
struct Forward<'a> {
    input: &'a CausalAttention<'a>,
    row: usize,
    mixed: &'a mut [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let (s, row, d) = (self.input, self.row, self.input.head_dim);
        let group = s.heads / s.kv_heads;
        let (norm, scale) = (s.query_norm(), s.scale());
        let mut keys = vec![0f32; d * s.columns()];
        let mut weights = vec![0f32; s.columns()];
        let (mut rotated, mut q) = (vec![0f32; d], vec![0f32; d]);
        for kv_head in 0..s.kv_heads {
            s.rotate_keys::<FUSED>(row, kv_head, &mut rotated, &mut keys);
            let values = &s.value[s.at(row, 0, s.key_width(), kv_head)..];
            for head in kv_head * group..(kv_head + 1) * group {
                for t in 0..s.seq {
                    let query = &s.query[s.at(row, t, s.query_width(), head)..][..d];
                    norm.apply::<FUSED>(query, s.angles(row, t), &mut q);
                    q.iter_mut().for_each(|q| *q *= scale);
                    let weights = &mut weights[..(t + 1).next_multiple_of(LANES)];
                    let total = s.weights::<FUSED>(row, t, &q, &keys, weights);
                    let mixed = &mut self.mixed[s.at(0, t, s.query_width(), head)..][..d];
                    mix::<FUSED>(&weights[..t + 1], values, s.key_width(), mixed);
                    mixed.iter_mut().for_each(|x| *x /= total);
                }
            }
        }
    }
}

/// One sequence; the gradients have the shapes of its inputs, and start at zero.
struct Backward<'a> {
    input: &'a CausalAttention<'a>,
    row: usize,
    grad: &'a [f32],
    query: &'a mut [f32],
    key: &'a mut [f32],
    value: &'a mut [f32],
    query_norm: &'a mut [f32],
    key_norm: &'a mut [f32],
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let (s, row, d) = (self.input, self.row, self.input.head_dim);
        let (columns, group) = (s.columns(), s.heads / s.kv_heads);
        let (norm, scale) = (s.query_norm(), s.scale());
        let mut keys = vec![0f32; d * columns];
        let mut values = vec![0f32; d * columns];
        let mut key_rows = vec![0f32; s.seq * d];
        let mut key_grads = vec![0f32; s.seq * d];
        let (mut weights, mut slopes) = (vec![0f32; columns], vec![0f32; columns]);
        let (mut q, mut q_grad) = (vec![0f32; d], vec![0f32; d]);
        for kv_head in 0..s.kv_heads {
            s.rotate_keys::<FUSED>(row, kv_head, &mut q, &mut keys);
            key_grads.fill(0.0);
            for t in 0..s.seq {
                let value = &s.value[s.at(row, t, s.key_width(), kv_head)..][..d];
                for c in 0..d {
                    values[c * columns + t] = value[c];
                    key_rows[t * d + c] = keys[c * columns + t];
                }
            }
            for head in kv_head * group..(kv_head + 1) * group {
                for t in 0..s.seq {
                    let query = &s.query[s.at(row, t, s.query_width(), head)..][..d];
                    let grad = &self.grad[s.at(0, t, s.query_width(), head)..][..d];
                    norm.apply::<FUSED>(query, s.angles(row, t), &mut q);
                    q.iter_mut().for_each(|q| *q *= scale);
                    let blocks = (t + 1).next_multiple_of(LANES);
                    let (weights, slopes) = (&mut weights[..blocks], &mut slopes[..blocks]);
                    let total = s.weights::<FUSED>(row, t, &q, &keys, weights);
                    weights.iter_mut().for_each(|w| *w /= total);
                    // d loss / d weight_j = grad · value_j, then through the softmax to the scores.
                    scores::<FUSED>(grad, &values, columns, slopes);
                    let (weights, slopes) = (&weights[..t + 1], &mut slopes[..t + 1]);
                    let average: f32 = weights.iter().zip(&*slopes).map(|(w, slope)| w * slope).sum();
                    for (slope, w) in slopes.iter_mut().zip(weights) {
                        *slope = w * (*slope - average);
                    }
                    if let Some(padding) = s.padding {
                        let padding = &padding[row * s.seq..][..t + 1];
                        for (slope, _) in slopes.iter_mut().zip(padding).filter(|(_, padding)| **padding != 0) {
                            *slope = 0.0;
                        }
                    }
                    for j in 0..=t {
                        let value = &mut self.value[s.at(0, j, s.key_width(), kv_head)..][..d];
                        add_scaled::<FUSED>(weights[j], grad, value);
                        add_scaled::<FUSED>(slopes[j], &q, &mut key_grads[j * d..][..d]);
                    }
                    mix::<FUSED>(slopes, &key_rows, d, &mut q_grad);
                    q_grad.iter_mut().for_each(|g| *g *= scale);
                    let query_grad = &mut self.query[s.at(0, t, s.query_width(), head)..][..d];
                    norm.backward::<FUSED>(query, s.angles(row, t), &mut q_grad, query_grad, self.query_norm);
                }
            }
            for t in 0..s.seq {
                let key = &s.key[s.at(row, t, s.key_width(), kv_head)..][..d];
                let grad = &mut key_grads[t * d..][..d];
                let key_grad = &mut self.key[s.at(0, t, s.key_width(), kv_head)..][..d];
                s.key_norm()
                    .backward::<FUSED>(key, s.angles(row, t), grad, key_grad, self.key_norm);
            }
        }
    }
}
