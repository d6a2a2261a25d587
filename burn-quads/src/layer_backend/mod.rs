//! Operations of a decoder layer that a backend may run as one.
//!
//! Each has a definition in Burn's operations (`composite`), right on every backend, and a gradient. On `Autodiff` what layers are
//! made of is one node of the graph that keeps its inputs only; the rest is differentiated as it is defined. Flex overrides what it spends its time in with single passes on the host (`host`), GPUs nearly all with kernels
//! (`device`).
//!
//! | operation | what it does |
//! |---|---|
//! | `dense_product` | `x · w`, where a backend has a better one than Burn's |
//! | `rms_norm` | `x / √(mean(x²) + ε) · γ` by row |
//! | `swiglu` | `silu(gate) · up` |
//! | `softmax_rows` | of each row |
//! | `log_softmax_parts` | each row less its largest value, and the logarithm of the sum of exponentials |
//! | `rotate` | rotary positions of heads |
//! | `causal_attention` | QK-norm, rotation and causal attention over whole sequences |
//! | `cached_attention` | the same for new tokens over a cache, without a gradient |
//! | `attend_to_cache` | the last part of that |
//! | `top_experts` | the experts of largest logits, without a gradient |
//! | `order_by_expert` | the order that puts the rows of each expert together |
//! | `permute_rows` | a row for each expert of a token, in that order |
//! | `unpermute_rows` | back in the order of tokens |
mod autodiff;
mod composite;
#[cfg(feature = "cubecl")]
mod device;
mod flex;
mod nvfp4;
#[cfg(test)]
mod tests;

pub(crate) use autodiff::{ProductGradients, product_node};

use crate::modules::{
    attention::{CacheStep, LayerCache},
    rotary::{RotaryEmbedding, Rotation},
};
use burn::{
    nn::RmsNorm,
    prelude::Backend,
    tensor::{Bool, DType, Int, Tensor},
};

/// Score of a key that must not be attended to. Finite, so that a row without any key (padding) stays finite too: its
/// weights become equal instead of 0/0. Beside a real score its weight is exactly 0.
pub(crate) const MASKED_SCORE: f32 = -1e30;

/// RMS norms over each head of queries and keys, before the rotation.
#[derive(Clone, Debug)]
pub struct HeadNorms<B: Backend> {
    /// Weight of each query head, `[head_dim]`.
    pub query: Tensor<B, 1>,
    /// Weight of each key head, `[head_dim]`.
    pub key: Tensor<B, 1>,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// Projections of whole sequences, before norm and rotation, and what these need.
#[derive(Clone, Debug)]
pub struct AttentionInput<B: Backend> {
    /// `[batch, seq, heads · head_dim]`.
    pub query: Tensor<B, 3>,
    /// `[batch, seq, kv_heads · head_dim]`.
    pub key: Tensor<B, 3>,
    /// `[batch, seq, kv_heads · head_dim]`.
    pub value: Tensor<B, 3>,
    /// Norms of the heads; absent when only the rotation is left to do.
    pub norms: Option<HeadNorms<B>>,
    /// Rotary tables by position in the sequence, `[batch or 1, seq, head_dim]`, laid out as [`RotaryEmbedding`]'s.
    pub cos: Tensor<B, 3>,
    /// As `cos`.
    pub sin: Tensor<B, 3>,
    /// True at padding `[batch, seq]`: never attended to.
    pub padding: Option<Tensor<B, 2, Bool>>,
    /// Query heads.
    pub heads: usize,
}

/// Gradients of the tensors of an [`AttentionInput`] that have one.
#[derive(Clone, Debug)]
pub struct AttentionGradients<B: Backend> {
    /// Of `query`.
    pub query: Tensor<B, 3>,
    /// Of `key`.
    pub key: Tensor<B, 3>,
    /// Of `value`.
    pub value: Tensor<B, 3>,
    /// Of the norms' weights: of queries, of keys.
    pub norms: Option<[Tensor<B, 1>; 2]>,
}

/// Projections of new tokens, before norm and rotation, and what these need.
#[derive(Clone, Debug)]
pub struct CachedQkv<B: Backend> {
    /// `[tokens, heads · head_dim]`.
    pub query: Tensor<B, 2>,
    /// `[tokens, kv_heads · head_dim]`.
    pub key: Tensor<B, 2>,
    /// `[tokens, kv_heads · head_dim]`.
    pub value: Tensor<B, 2>,
    /// Norms of the heads; absent when only the rotation is left to do.
    pub norms: Option<HeadNorms<B>>,
    /// Rotations by position.
    pub rope: RotaryEmbedding<B>,
    /// Query heads.
    pub heads: usize,
}

/// The order that puts the rows of each expert together; rows of one expert stay in order.
#[derive(Clone, Debug)]
pub struct ExpertOrder<B: Backend> {
    /// Row in each place, `[rows]`.
    pub order: Tensor<B, 1, Int>,
    /// Place of each row, `[rows]`.
    pub inverse: Tensor<B, 1, Int>,
    /// Rows of each expert, `[experts]`.
    pub counts: Tensor<B, 1, Int>,
}

/// What a backend may run as one; see the [module](self).
pub trait LayerBackend: Backend {
    /// Whether [`Self::dense_product`] of f32 is better than Burn's matmul on a device: nearer to f32 than its TF32, and a row's bits
    /// depend on the row and the weight alone.
    fn has_dense_product(_device: &Self::Device) -> bool {
        false
    }

    /// `x · w` of f32 `[rows, k]` and `[k, n]`.
    fn dense_product(x: Tensor<Self, 2>, w: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x.matmul(w)
    }

    /// The gradient of `w` from `x` and that of [`Self::dense_product`]'s result, `[k, n]`.
    fn dense_product_weight_backward(x: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x.transpose().matmul(grad)
    }

    /// `x / √(mean(x²) + ε) · γ` of each row: `[rows, d]`, `gamma` `[d]`.
    fn rms_norm(x: Tensor<Self, 2>, gamma: Tensor<Self, 1>, epsilon: f64) -> Tensor<Self, 2> {
        composite::rms_norm(x, gamma, epsilon)
    }

    /// Gradients of `x` and `gamma` from that of [`Self::rms_norm`]'s result.
    fn rms_norm_backward(
        x: Tensor<Self, 2>,
        gamma: Tensor<Self, 1>,
        epsilon: f64,
        grad: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 1>) {
        composite::rms_norm_backward(x, gamma, epsilon, grad)
    }

    /// `silu(gate) · up` with gate and up side by side: `[rows, 2 · d]` to `[rows, d]`.
    fn swiglu(gate_up: Tensor<Self, 2>) -> Tensor<Self, 2> {
        composite::swiglu(gate_up)
    }

    /// The gradient of `gate_up` from that of [`Self::swiglu`]'s result.
    fn swiglu_backward(gate_up: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        composite::swiglu_backward(gate_up, grad)
    }

    /// Softmax of each row of `[rows, columns]`.
    fn softmax_rows(x: Tensor<Self, 2>) -> Tensor<Self, 2> {
        composite::softmax_rows(x)
    }

    /// The gradient of `x` from the result `y` of [`Self::softmax_rows`] and that of the result.
    fn softmax_rows_backward(y: Tensor<Self, 2>, grad: Tensor<Self, 2>) -> Tensor<Self, 2> {
        composite::softmax_rows_backward(y, grad)
    }

    /// What the logarithm of a row's softmax is made of: the row less its largest value, `[rows, columns]`, and the logarithm of
    /// the sum of the exponentials of that, `[rows, 1]`.
    fn log_softmax_parts(x: Tensor<Self, 2>) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        composite::log_softmax_parts(x)
    }

    /// Turns the heads `[batch, seq, heads, head_dim]` of each token by its position.
    fn rotate(x: Tensor<Self, 4>, rotation: &Rotation<Self>) -> Tensor<Self, 4> {
        rotation.apply(x)
    }

    /// Norms and rotates queries and keys, and gives each token's mixed values over itself and the tokens before it:
    /// `[batch, seq, heads · head_dim]`. Rows at padding are finite and mean nothing.
    fn causal_attention(input: AttentionInput<Self>) -> Tensor<Self, 3> {
        composite::causal_attention(input)
    }

    /// Gradients from that of [`Self::causal_attention`]'s result. The default runs the forward pass again.
    fn causal_attention_backward(input: AttentionInput<Self>, grad: Tensor<Self, 3>) -> AttentionGradients<Self> {
        composite::causal_attention_backward(input, grad)
    }

    /// Norms and rotates `qkv`, writes keys and values to their places, copies prefixes, and gives each token's mixed
    /// values `[tokens, heads · head_dim]` over columns `0..=position` of its slot.
    ///
    /// On Flex a token's result does not depend on the others.
    fn cached_attention(qkv: CachedQkv<Self>, cache: &mut LayerCache<Self>, step: &CacheStep) -> Tensor<Self, 2> {
        composite::cached_attention(qkv, cache, step)
    }

    /// What [`Self::cached_attention`] does once keys and values are in their places: mixes those of each token's slot, for
    /// `query` `[tokens, heads, head_dim]`, normed and rotated. `places` `[tokens, 2]` are slot and position of each token, the
    /// largest position being `longest − 1`.
    fn attend_to_cache(
        query: Tensor<Self, 3>,
        cache: &LayerCache<Self>,
        places: Tensor<Self, 2, Int>,
        longest: usize,
    ) -> Tensor<Self, 2> {
        composite::attend_to_cache(query, cache, places, longest)
    }

    /// The `k` experts of largest logits (`[tokens, experts]`), the largest first: `[tokens, k]`.
    fn top_experts(logits: Tensor<Self, 2>, k: usize) -> Tensor<Self, 2, Int> {
        composite::top_experts(logits, k)
    }

    /// The order that puts the rows of each expert together, from the expert of each row.
    fn order_by_expert(expert_ids: Tensor<Self, 1, Int>, experts: usize) -> ExpertOrder<Self> {
        composite::order_by_expert(expert_ids, experts)
    }

    /// `x` `[tokens, d]` once for each expert of a token, sorted by expert: `[rows, d]`. The order is one of `tokens · top_k` rows,
    /// in which those of a token were side by side.
    fn permute_rows(x: Tensor<Self, 2>, order: &ExpertOrder<Self>) -> Tensor<Self, 2> {
        composite::permute_rows(x, order)
    }

    /// The gradient of `x` `[tokens, d]` from that of [`Self::permute_rows`]'s result: each token's rows, added.
    fn permute_rows_backward(grad: Tensor<Self, 2>, order: &ExpertOrder<Self>, tokens: usize) -> Tensor<Self, 2> {
        composite::permute_rows_backward(grad, order, tokens)
    }

    /// Rows sorted by expert, in the order of tokens: `[rows, d]` to `[rows, d]`.
    fn unpermute_rows(rows: Tensor<Self, 2>, order: &ExpertOrder<Self>) -> Tensor<Self, 2> {
        rows.select(0, order.inverse.clone())
    }

    /// The gradient of `rows` from that of [`Self::unpermute_rows`]'s result.
    fn unpermute_rows_backward(grad: Tensor<Self, 2>, order: &ExpertOrder<Self>) -> Tensor<Self, 2> {
        grad.select(0, order.order.clone())
    }
}

/// [`LayerBackend::rms_norm`] of a module, over the last dimension.
pub(crate) fn rms_norm<B: LayerBackend, const D: usize>(norm: &RmsNorm<B>, x: Tensor<B, D>) -> Tensor<B, D> {
    let shape = x.shape();
    let d = shape[D - 1];
    let rows = shape.num_elements() / d;
    B::rms_norm(x.reshape([rows, d]), norm.gamma.val(), norm.epsilon).reshape(shape)
}

/// `x · w` by [`LayerBackend::dense_product`] where that is the better one, else by Burn's matmul.
pub(crate) fn product<B: LayerBackend>(x: Tensor<B, 2>, w: Tensor<B, 2>) -> Tensor<B, 2> {
    match takes_dense_product(&x, &w) {
        true => B::dense_product(x, w),
        false => x.matmul(w),
    }
}

/// The gradient of `w` from `x` and that of [`product`]'s result.
pub(crate) fn product_weight_backward<B: LayerBackend>(x: Tensor<B, 2>, grad: Tensor<B, 2>) -> Tensor<B, 2> {
    match takes_dense_product(&x, &grad) {
        true => B::dense_product_weight_backward(x, grad),
        false => x.transpose().matmul(grad),
    }
}

/// Whether [`LayerBackend::dense_product`] is the better one, and the operands are f32 and within the reach of its kernels.
pub(crate) fn takes_dense_product<B: LayerBackend>(a: &Tensor<B, 2>, b: &Tensor<B, 2>) -> bool {
    // A grid has 65,535 tiles of at least 32 rows, and values are counted in 32 bits.
    const MOST_ROWS: usize = 65_535 * 32;
    let ([rows, k], n) = (a.dims(), b.dims()[1]);
    let products = [a.shape().num_elements(), b.shape().num_elements(), rows * n, k * n];
    a.dtype() == DType::F32
        && b.dtype() == DType::F32
        && B::has_dense_product(&a.device())
        && rows <= MOST_ROWS
        && products.into_iter().all(|values| values <= u32::MAX as usize)
}
