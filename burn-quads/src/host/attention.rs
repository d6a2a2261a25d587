//! Attention over a cache: norm, rotation, cache writes, prefix copies and mixing in one call.
use super::vector::{Kernel, LANES, dispatch, exp, larger, multiply_add, reduce, sum_of_squares};
use crate::modules::attention::{CacheStep, CachedQkv, LayerCache, TokenPlace};
use burn::tensor::{Tensor, TensorData, TensorPrimitive};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;
use std::array;

/// Keys of one block of scores: caches have whole blocks of key columns.
pub(crate) const KEY_BLOCK: usize = LANES;

/// Multiply-adds below which one thread is faster than several.
const PARALLEL_WORK: usize = 1 << 17;

/// Sizes of one layer's cache and heads.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Columns of the values.
    max_seq_len: usize,
    /// Columns of the keys: `max_seq_len` rounded up to whole blocks.
    key_columns: usize,
}

impl Sizes {
    fn keys_at(&self, slot: usize, kv_head: usize) -> usize {
        (slot * self.kv_heads + kv_head) * self.head_dim * self.key_columns
    }

    fn values_at(&self, slot: usize, kv_head: usize) -> usize {
        (slot * self.kv_heads + kv_head) * self.max_seq_len * self.head_dim
    }
}

/// RMS norm of one head and its rotation.
struct NormRotate<'a> {
    gamma: &'a [f32],
    epsilon: f32,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl NormRotate<'_> {
    #[inline(always)]
    fn apply<const FUSED: bool>(&self, x: &[f32], position: usize, out: &mut [f32]) {
        let (d, half) = (x.len(), x.len() / 2);
        let inverse = 1.0 / (sum_of_squares::<FUSED>(x) / d as f32 + self.epsilon).sqrt();
        let (low, high) = out.split_at_mut(half);
        let cos = &self.cos[position * d..][..half];
        let sin = &self.sin[position * d + half..][..half];
        let (x_low, x_high) = x.split_at(half);
        let (gamma_low, gamma_high) = self.gamma.split_at(half);
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
}

#[inline(always)]
fn load<const N: usize>(x: &[f32], start: usize) -> [f32; N] {
    x[start..start + N].try_into().expect("N numbers")
}

/// [`AttentionBackend::cached_attention`](crate::modules::attention::AttentionBackend::cached_attention).
pub(crate) fn cached_attention(
    qkv: CachedQkv<Flex>,
    cache: &mut LayerCache<Flex>,
    step: &CacheStep,
) -> Tensor<Flex, 2> {
    let [tokens, width] = qkv.query.dims();
    step.check(tokens, cache);
    let (keys, values) = cache.take();
    let sizes = Sizes {
        heads: qkv.heads,
        kv_heads: values.dims()[1],
        head_dim: values.dims()[3],
        max_seq_len: values.dims()[2],
        key_columns: keys.dims()[3],
    };
    let (query, key, value) = (flex(qkv.query), flex(qkv.key), flex(qkv.value));
    let (query_norm, key_norm) = (flex(qkv.query_norm), flex(qkv.key_norm));
    let (cos, sin) = (flex(qkv.rope.cos), flex(qkv.rope.sin));
    let norm_rotate = |gamma| NormRotate {
        gamma,
        epsilon: qkv.epsilon as f32,
        cos: slice(&cos),
        sin: slice(&sin),
    };

    let (mut keys, mut values) = (flex(keys), flex(values));
    {
        let (keys, values) = (keys.storage_mut::<f32>(), values.storage_mut::<f32>());
        dispatch(Write {
            sizes,
            norm_rotate: norm_rotate(slice(&key_norm)),
            key: slice(&key),
            value: slice(&value),
            places: &step.tokens,
            keys: &mut *keys,
            values: &mut *values,
        });
        for copy in &step.copies {
            copy_prefix(sizes, copy.from, copy.to, copy.len, keys, values);
        }
    }
    let mut mixed = vec![0f32; tokens * width];
    let attend = Attend {
        sizes,
        norm_rotate: norm_rotate(slice(&query_norm)),
        keys: slice(&keys),
        values: slice(&values),
    };
    let work = step.tokens.iter().map(|t| t.position + 1).sum::<usize>() * width;
    let rows = |places: &[TokenPlace], query: &[f32], mixed: &mut [f32]| {
        let attend = &attend;
        dispatch(Rows {
            attend,
            places,
            query,
            mixed,
        });
    };
    if work < PARALLEL_WORK || width == 0 {
        rows(&step.tokens, slice(&query), &mut mixed);
    } else {
        let chunk = tokens.div_ceil(4 * rayon::current_num_threads()).max(1);
        mixed
            .par_chunks_mut(chunk * width)
            .zip(slice(&query).par_chunks(chunk * width))
            .zip(step.tokens.par_chunks(chunk))
            .for_each(|((mixed, query), places)| rows(places, query, mixed));
    }
    cache.restore(tensor(keys), tensor(values));
    tensor(FlexTensor::from_data(TensorData::new(mixed, [tokens, width])))
}

fn flex<const D: usize>(x: Tensor<Flex, D>) -> FlexTensor {
    x.into_primitive().tensor().to_contiguous()
}

fn tensor<const D: usize>(x: FlexTensor) -> Tensor<Flex, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// The values of a contiguous tensor.
fn slice(x: &FlexTensor) -> &[f32] {
    x.as_slice::<f32>().expect("a contiguous f32 tensor")
}

/// Writes the keys, normed and rotated, and the values of new tokens to their places.
struct Write<'a> {
    sizes: Sizes,
    norm_rotate: NormRotate<'a>,
    key: &'a [f32],
    value: &'a [f32],
    places: &'a [TokenPlace],
    keys: &'a mut [f32],
    values: &'a mut [f32],
}

impl Kernel for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let sizes = self.sizes;
        let d = sizes.head_dim;
        let mut rotated = vec![0f32; d];
        let rows = self.key.chunks_exact(d).zip(self.value.chunks_exact(d));
        let places = self.places.iter();
        let heads = places.flat_map(|place| (0..sizes.kv_heads).map(move |head| (place, head)));
        for ((place, head), (key, value)) in heads.zip(rows) {
            self.norm_rotate.apply::<FUSED>(key, place.position, &mut rotated);
            let column = sizes.keys_at(place.slot, head) + place.position;
            for (c, x) in rotated.iter().enumerate() {
                self.keys[column + c * sizes.key_columns] = *x;
            }
            let row = sizes.values_at(place.slot, head) + place.position * d;
            self.values[row..row + d].copy_from_slice(value);
        }
    }
}

fn copy_prefix(sizes: Sizes, from: usize, to: usize, len: usize, keys: &mut [f32], values: &mut [f32]) {
    for head in 0..sizes.kv_heads {
        for c in 0..sizes.head_dim {
            let row = |slot| sizes.keys_at(slot, head) + c * sizes.key_columns;
            keys.copy_within(row(from)..row(from) + len, row(to));
        }
        let row = |slot| sizes.values_at(slot, head);
        values.copy_within(row(from)..row(from) + len * sizes.head_dim, row(to));
    }
}

/// Attention of new tokens over the written cache.
struct Attend<'a> {
    sizes: Sizes,
    norm_rotate: NormRotate<'a>,
    keys: &'a [f32],
    values: &'a [f32],
}

/// Some of the tokens; `query` and `mixed` are `[places, heads · head_dim]`.
struct Rows<'a> {
    attend: &'a Attend<'a>,
    places: &'a [TokenPlace],
    query: &'a [f32],
    mixed: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Rows {
            attend,
            places,
            query,
            mixed,
        } = self;
        let s = attend.sizes;
        let d = s.head_dim;
        let scale = (d as f32).powf(-0.5);
        let group = s.heads / s.kv_heads;
        let longest = places.iter().map(|p| p.position + 1).max().unwrap_or(0);
        let mut weights = vec![0f32; longest.next_multiple_of(LANES)];
        let mut q = vec![0f32; d];
        let rows = query.chunks_exact(d).zip(mixed.chunks_exact_mut(d));
        let heads = places.iter().flat_map(|p| (0..s.heads).map(move |h| (p, h)));
        for ((place, head), (query, mixed)) in heads.zip(rows) {
            let len = place.position + 1;
            attend.norm_rotate.apply::<FUSED>(query, place.position, &mut q);
            q.iter_mut().for_each(|q| *q *= scale);
            let keys = &attend.keys[s.keys_at(place.slot, head / group)..][..d * s.key_columns];
            let values = &attend.values[s.values_at(place.slot, head / group)..][..len * d];
            let weights = &mut weights[..len.next_multiple_of(LANES)];
            scores::<FUSED>(&q, keys, s.key_columns, weights);
            let total = exponentials::<FUSED>(weights, len);
            mix::<FUSED>(&weights[..len], values, mixed);
            mixed.iter_mut().for_each(|x| *x /= total);
        }
    }
}

/// Dot products of `q` with every column of `keys` `[head_dim, columns]`, as many as `out` holds: whole blocks.
#[inline(always)]
fn scores<const FUSED: bool>(q: &[f32], keys: &[f32], columns: usize, out: &mut [f32]) {
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
fn exponentials<const FUSED: bool>(scores: &mut [f32], len: usize) -> f32 {
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

/// Adds `w · row` to `sums`.
#[inline(always)]
fn add_row<const FUSED: bool>(w: f32, row: &[f32], sums: &mut [f32; LANES]) {
    let row = &row[..LANES];
    for lane in 0..LANES {
        sums[lane] = multiply_add::<FUSED>(w, row[lane], sums[lane]);
    }
}

/// `Σ weight_j · value_j`, `values` being `[weights, head_dim]`.
#[inline(always)]
fn mix<const FUSED: bool>(weights: &[f32], values: &[f32], out: &mut [f32]) {
    let d = out.len();
    let mut blocks = out.chunks_exact_mut(LANES);
    let mut channel = 0;
    for out in &mut blocks {
        // Even and odd weights apart: two chains of additions that do not wait for each other.
        let (mut even, mut odd) = ([0f32; LANES], [0f32; LANES]);
        let mut start = channel;
        let pairs = weights.chunks_exact(2);
        let last = pairs.remainder();
        for pair in pairs {
            add_row::<FUSED>(pair[0], &values[start..], &mut even);
            add_row::<FUSED>(pair[1], &values[start + d..], &mut odd);
            start += 2 * d;
        }
        for w in last {
            add_row::<FUSED>(*w, &values[start..], &mut even);
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
            for (out, x) in rest.iter_mut().zip(&values[j * d + channel..]) {
                *out = multiply_add::<FUSED>(*w, *x, *out);
            }
        }
    }
}
