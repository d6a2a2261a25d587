//! Attention over a [`KvCache`](super::KvCache), as one operation of the backend.
use super::{CacheStep, LayerCache, MASKED_SCORE};
use crate::{host, modules::rotary::RotaryEmbedding};
use burn::{
    backend::{Autodiff, Flex, autodiff::checkpoint::strategy::CheckpointStrategy},
    module::Param,
    nn::RmsNorm,
    prelude::Backend,
    tensor::{Bool, Int, Tensor, TensorData, TensorPrimitive, activation::softmax},
};
use burn_nvfp4::{Nvfp4, Nvfp4Backend, Nvfp4Tensor};

/// Projections of new tokens, before norm and rotation, and what these need.
#[derive(Debug)]
pub struct CachedQkv<B: Backend> {
    /// `[tokens, heads · head_dim]`.
    pub query: Tensor<B, 2>,
    /// `[tokens, kv_heads · head_dim]`.
    pub key: Tensor<B, 2>,
    /// `[tokens, kv_heads · head_dim]`.
    pub value: Tensor<B, 2>,
    /// Norm weight of each query head, `[head_dim]`.
    pub query_norm: Tensor<B, 1>,
    /// Norm weight of each key head, `[head_dim]`.
    pub key_norm: Tensor<B, 1>,
    /// Epsilon of both norms.
    pub epsilon: f64,
    /// Rotations by position.
    pub rope: RotaryEmbedding<B>,
    /// Query heads.
    pub heads: usize,
}

/// A backend that attends over a cache.
pub trait AttentionBackend: Backend {
    /// Norms and rotates `qkv`, writes keys and values to their places, copies prefixes, and gives each token's mixed
    /// values `[tokens, heads · head_dim]` over columns `0..=position` of its slot.
    ///
    /// The default is made of Burn's operations and right on every backend; it writes a token at a time. Flex runs one
    /// threaded host function, in which a token's result does not depend on the others.
    fn cached_attention(qkv: CachedQkv<Self>, cache: &mut LayerCache<Self>, step: &CacheStep) -> Tensor<Self, 2> {
        composite(qkv, cache, step)
    }
}

impl AttentionBackend for Flex {
    fn cached_attention(qkv: CachedQkv<Self>, cache: &mut LayerCache<Self>, step: &CacheStep) -> Tensor<Self, 2> {
        host::attention::cached_attention(qkv, cache, step)
    }
}

impl<B: Backend, C: CheckpointStrategy> AttentionBackend for Autodiff<B, C> {}

impl<B: Nvfp4Backend + AttentionBackend> AttentionBackend for Nvfp4<B> {
    fn cached_attention(qkv: CachedQkv<Self>, cache: &mut LayerCache<Self>, step: &CacheStep) -> Tensor<Self, 2> {
        let (keys, values) = cache.take();
        let mut inner = LayerCache {
            keys: unwrap(keys),
            values: unwrap(values),
        };
        let qkv = CachedQkv {
            query: unwrap(qkv.query),
            key: unwrap(qkv.key),
            value: unwrap(qkv.value),
            query_norm: unwrap(qkv.query_norm),
            key_norm: unwrap(qkv.key_norm),
            epsilon: qkv.epsilon,
            rope: RotaryEmbedding {
                cos: unwrap(qkv.rope.cos),
                sin: unwrap(qkv.rope.sin),
            },
            heads: qkv.heads,
        };
        let mixed = B::cached_attention(qkv, &mut inner, step);
        cache.restore(wrap(inner.keys), wrap(inner.values));
        wrap(mixed)
    }
}

/// The tensor of the backend that [`Nvfp4`] decorates.
fn unwrap<B: Nvfp4Backend, const D: usize>(x: Tensor<Nvfp4<B>, D>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x.into_primitive().tensor().dense()))
}

fn wrap<B: Nvfp4Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<Nvfp4<B>, D> {
    Tensor::from_primitive(TensorPrimitive::Float(Nvfp4Tensor::Dense(x.into_primitive().tensor())))
}

/// [`AttentionBackend::cached_attention`] in operations that every backend has.
pub(super) fn composite<B: Backend>(qkv: CachedQkv<B>, cache: &mut LayerCache<B>, step: &CacheStep) -> Tensor<B, 2> {
    let [tokens, width] = qkv.query.dims();
    step.check(tokens, cache);
    let (mut keys, mut values) = cache.take();
    let device = keys.device();
    let [_, kv_heads, _, d] = values.dims();
    let indices = |of: fn(&super::TokenPlace) -> usize| {
        let list: Vec<i64> = step.tokens.iter().map(|t| of(t) as i64).collect();
        Tensor::<B, 1, Int>::from_data(TensorData::new(list, [tokens]), &device)
    };
    let positions = indices(|t| t.position);
    let rotation = qkv.rope.rotation(positions.clone().reshape([tokens, 1]));
    let norm_rotate = |x: Tensor<B, 2>, heads: usize, gamma: Tensor<B, 1>| {
        let norm = RmsNorm {
            gamma: Param::from_tensor(gamma),
            epsilon: qkv.epsilon,
        };
        rotation.apply(norm.forward(x.reshape([tokens, 1, heads, d])))
    };
    let query = norm_rotate(qkv.query, qkv.heads, qkv.query_norm);
    let key = norm_rotate(qkv.key, kv_heads, qkv.key_norm).reshape([tokens, kv_heads, d, 1]);
    let value = qkv.value.reshape([tokens, kv_heads, 1, d]);

    for (i, place) in step.tokens.iter().enumerate() {
        let (s, p) = (place.slot, place.position);
        let row = |t: &Tensor<B, 4>| t.clone().narrow(0, i, 1);
        keys = keys.slice_assign([s..s + 1, 0..kv_heads, 0..d, p..p + 1], row(&key));
        values = values.slice_assign([s..s + 1, 0..kv_heads, p..p + 1, 0..d], row(&value));
    }
    for copy in &step.copies {
        let (from, to, n) = (copy.from, copy.to, copy.len);
        let k = keys.clone().slice([from..from + 1, 0..kv_heads, 0..d, 0..n]);
        keys = keys.slice_assign([to..to + 1, 0..kv_heads, 0..d, 0..n], k);
        let v = values.clone().slice([from..from + 1, 0..kv_heads, 0..n]);
        values = values.slice_assign([to..to + 1, 0..kv_heads, 0..n, 0..d], v);
    }

    let used = step.tokens.iter().map(|t| t.position + 1).max().unwrap_or(0);
    let slot_ids = indices(|t| t.slot);
    let seen_keys = keys.clone().narrow(3, 0, used).select(0, slot_ids.clone());
    let seen_values = values.clone().narrow(2, 0, used).select(0, slot_ids);
    cache.restore(keys, values);

    let beyond: Tensor<B, 2, Bool> = Tensor::<B, 1, Int>::arange(0..used as i64, &device)
        .reshape([1, used])
        .expand([tokens, used])
        .greater(positions.reshape([tokens, 1]).expand([tokens, used]));
    let query = (query * (d as f32).powf(-0.5)).reshape([tokens, kv_heads, qkv.heads / kv_heads, d]);
    let scores = query
        .matmul(seen_keys)
        .mask_fill(beyond.reshape([tokens, 1, 1, used]), MASKED_SCORE);
    softmax(scores, 3).matmul(seen_values).reshape([tokens, width])
}
