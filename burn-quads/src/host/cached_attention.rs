//! Attention over a cache: norm, rotation, cache writes, prefix copies and mixing in one call.
use super::{
    heads::{Angles, HeadNorm, exponentials, mix, scores},
    vector::{Kernel, LANES, dispatch},
};
use crate::modules::attention::{CacheStep, TokenPlace};
use rayon::prelude::*;

/// Multiply-adds below which one thread is faster than several.
const PARALLEL_WORK: usize = 1 << 17;

/// New tokens and what they need; see [`CachedQkv`](crate::layer_backend::CachedQkv).
pub(crate) struct CachedAttention<'a> {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Columns of the values.
    pub max_seq_len: usize,
    /// Columns of the keys: `max_seq_len` rounded up to whole blocks.
    pub key_columns: usize,
    /// `[tokens, heads · head_dim]`.
    pub query: &'a [f32],
    /// `[tokens, kv_heads · head_dim]`.
    pub key: &'a [f32],
    /// `[tokens, kv_heads · head_dim]`.
    pub value: &'a [f32],
    pub query_norm: &'a [f32],
    pub key_norm: &'a [f32],
    /// `None`: heads are not normed, and the norms' weights are ones.
    pub epsilon: Option<f32>,
    /// `[positions, head_dim]`.
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    pub step: &'a CacheStep,
}

impl CachedAttention<'_> {
    /// Writes to the cache, laid out as [`LayerCache`](crate::modules::attention::LayerCache) says, and gives the mixed
    /// values, `[tokens, heads · head_dim]`.
    pub(crate) fn run(&self, keys: &mut [f32], values: &mut [f32]) -> Vec<f32> {
        dispatch(Write {
            input: self,
            keys: &mut *keys,
            values: &mut *values,
        });
        for copy in &self.step.copies {
            self.copy_prefix(copy.from, copy.to, copy.len, keys, values);
        }
        let (keys, values) = (&*keys, &*values);
        let mix = |places: &[TokenPlace], query: &[f32], mixed: &mut [f32]| {
            let input = self;
            dispatch(Mix {
                input,
                keys,
                values,
                places,
                query,
                mixed,
            });
        };
        let width = self.heads * self.head_dim;
        let places = self.step.tokens.as_slice();
        let mut mixed = vec![0f32; places.len() * width];
        let work = places.iter().map(|place| place.position + 1).sum::<usize>() * width;
        if work < PARALLEL_WORK {
            mix(places, self.query, &mut mixed);
        } else {
            let chunk = places.len().div_ceil(4 * rayon::current_num_threads()).max(1);
            mixed
                .par_chunks_mut(chunk * width)
                .zip(self.query.par_chunks(chunk * width))
                .zip(places.par_chunks(chunk))
                .for_each(|((mixed, query), places)| mix(places, query, mixed));
        }
        mixed
    }

    fn copy_prefix(&self, from: usize, to: usize, len: usize, keys: &mut [f32], values: &mut [f32]) {
        for head in 0..self.kv_heads {
            for c in 0..self.head_dim {
                let row = |slot| self.keys_at(slot, head) + c * self.key_columns;
                keys.copy_within(row(from)..row(from) + len, row(to));
            }
            let row = |slot| self.values_at(slot, head);
            values.copy_within(row(from)..row(from) + len * self.head_dim, row(to));
        }
    }

    fn keys_at(&self, slot: usize, kv_head: usize) -> usize {
        (slot * self.kv_heads + kv_head) * self.head_dim * self.key_columns
    }

    fn values_at(&self, slot: usize, kv_head: usize) -> usize {
        (slot * self.kv_heads + kv_head) * self.max_seq_len * self.head_dim
    }

    #[inline(always)]
    fn angles(&self, position: usize) -> Angles<'_> {
        Angles::of(self.cos, self.sin, position, self.head_dim)
    }
}

/// Writes the keys, normed and rotated, and the values of new tokens to their places.
struct Write<'a> {
    input: &'a CachedAttention<'a>,
    keys: &'a mut [f32],
    values: &'a mut [f32],
}

impl Kernel for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let s = self.input;
        let d = s.head_dim;
        let norm = HeadNorm {
            gamma: s.key_norm,
            epsilon: s.epsilon,
        };
        let mut rotated = vec![0f32; d];
        let rows = s.key.chunks_exact(d).zip(s.value.chunks_exact(d));
        let places = s.step.tokens.iter();
        let heads = places.flat_map(|place| (0..s.kv_heads).map(move |head| (place, head)));
        for ((place, head), (key, value)) in heads.zip(rows) {
            norm.apply::<FUSED>(key, s.angles(place.position), &mut rotated);
            let column = s.keys_at(place.slot, head) + place.position;
            for (c, x) in rotated.iter().enumerate() {
                self.keys[column + c * s.key_columns] = *x;
            }
            let row = s.values_at(place.slot, head) + place.position * d;
            self.values[row..row + d].copy_from_slice(value);
        }
    }
}

/// Attention of some of the tokens over the written cache; `query` and `mixed` are `[places, heads · head_dim]`.
struct Mix<'a> {
    input: &'a CachedAttention<'a>,
    keys: &'a [f32],
    values: &'a [f32],
    places: &'a [TokenPlace],
    query: &'a [f32],
    mixed: &'a mut [f32],
}

impl Kernel for Mix<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let s = self.input;
        let d = s.head_dim;
        let norm = HeadNorm {
            gamma: s.query_norm,
            epsilon: s.epsilon,
        };
        let scale = (d as f32).powf(-0.5);
        let group = s.heads / s.kv_heads;
        let longest = self.places.iter().map(|place| place.position + 1).max().unwrap_or(0);
        let mut weights = vec![0f32; longest.next_multiple_of(LANES)];
        let mut q = vec![0f32; d];
        let rows = self.query.chunks_exact(d).zip(self.mixed.chunks_exact_mut(d));
        let heads = self
            .places
            .iter()
            .flat_map(|place| (0..s.heads).map(move |head| (place, head)));
        for ((place, head), (query, mixed)) in heads.zip(rows) {
            let len = place.position + 1;
            norm.apply::<FUSED>(query, s.angles(place.position), &mut q);
            q.iter_mut().for_each(|q| *q *= scale);
            let keys = &self.keys[s.keys_at(place.slot, head / group)..][..d * s.key_columns];
            let values = &self.values[s.values_at(place.slot, head / group)..][..len * d];
            let weights = &mut weights[..len.next_multiple_of(LANES)];
            scores::<FUSED>(&q, keys, s.key_columns, weights);
            let total = exponentials::<FUSED>(weights, len);
            mix::<FUSED>(&weights[..len], values, d, mixed);
            mixed.iter_mut().for_each(|x| *x /= total);
        }
    }
}
