//! Grouped-query attention with per-head QK-norm and rotary positions, as in Qwen3.
//!
//! [`QuadsAttention::forward`] runs whole sequences (scoring, training); [`QuadsAttention::forward_cached`] appends
//! tokens to a [`KvCache`] (sampling). Both compute one function.
mod kv_cache;
#[cfg(test)]
mod tests;

pub use kv_cache::{CacheStep, KvCache, KvCacheConfig, LayerCache, PrefixCopy, TokenPlace};

use super::{
    linear::{OuterScaleGroup, QuadsLinear, QuadsLinearConfig},
    rotary::{RotaryEmbedding, Rotation},
};
use crate::{
    backend::QuadsBackend,
    layer_backend::{AttentionInput, CachedQkv},
};
use burn::{
    config::Config,
    module::Module,
    nn::{RmsNorm, RmsNormConfig},
    prelude::Backend,
    tensor::{Bool, Int, Tensor},
};
use burn_nvfp4::Precision;

/// Configuration of [`QuadsAttention`], with the names of Qwen3's `config.json`.
#[derive(Config, Debug)]
pub struct QuadsAttentionConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Channels of one head, independent of `hidden_size`.
    pub head_dim: usize,
    /// Whether the four projections have a bias.
    #[config(default = false)]
    pub attention_bias: bool,
    /// Epsilon of `q_norm` and `k_norm`.
    #[config(default = "1e-6")]
    pub rms_norm_eps: f64,
    /// Precision of the four projections.
    #[config(default = "Precision::W4A16")]
    pub precision: Precision,
}

impl QuadsAttentionConfig {
    /// Makes the module with random weights.
    ///
    /// # Panics
    /// If `num_key_value_heads` does not divide `num_attention_heads`, or a width does not fit the precision.
    pub fn init<B: Backend>(&self, device: &B::Device) -> QuadsAttention<B> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        assert!(
            kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "attention: num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})"
        );
        let linear = |d_input, d_output| {
            QuadsLinearConfig::new(d_input, d_output)
                .with_bias(self.attention_bias)
                .with_precision(self.precision.clone())
                .init(device)
        };
        let norm = || {
            RmsNormConfig::new(self.head_dim)
                .with_epsilon(self.rms_norm_eps)
                .init(device)
        };
        QuadsAttention {
            q_proj: linear(self.hidden_size, heads * self.head_dim),
            k_proj: linear(self.hidden_size, kv_heads * self.head_dim),
            v_proj: linear(self.hidden_size, kv_heads * self.head_dim),
            o_proj: linear(heads * self.head_dim, self.hidden_size),
            q_norm: norm(),
            k_norm: norm(),
            num_attention_heads: heads,
        }
    }
}

/// Self-attention of one decoder layer. Field names are Hugging Face's.
#[derive(Module, Debug)]
pub struct QuadsAttention<B: Backend> {
    /// `[hidden_size, num_attention_heads · head_dim]`.
    pub q_proj: QuadsLinear<B>,
    /// `[hidden_size, num_key_value_heads · head_dim]`.
    pub k_proj: QuadsLinear<B>,
    /// `[hidden_size, num_key_value_heads · head_dim]`.
    pub v_proj: QuadsLinear<B>,
    /// `[num_attention_heads · head_dim, hidden_size]`.
    pub o_proj: QuadsLinear<B>,
    /// Norm over `head_dim` of each query head, before the rotation.
    pub q_norm: RmsNorm<B>,
    /// Norm over `head_dim` of each key head, before the rotation.
    pub k_norm: RmsNorm<B>,
    num_attention_heads: usize,
}

impl<B: Backend> QuadsAttention<B> {
    /// The attention with its projections in another precision.
    ///
    /// # Panics
    /// As [`QuadsLinear::with_precision`].
    pub fn with_precision(self, precision: Precision) -> Self {
        let set = |linear: QuadsLinear<B>| linear.with_precision(precision.clone());
        Self {
            q_proj: set(self.q_proj),
            k_proj: set(self.k_proj),
            v_proj: set(self.v_proj),
            o_proj: set(self.o_proj),
            ..self
        }
    }

    /// q, k and v, which share the input and the outer scale.
    pub fn qkv(&self) -> OuterScaleGroup<'_, B, 3> {
        OuterScaleGroup::new([&self.q_proj, &self.k_proj, &self.v_proj])
    }
}

impl<B: QuadsBackend> QuadsAttention<B> {
    /// Causal attention over whole sequences.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden_size]`
    /// - output: `[batch, seq, hidden_size]`; rows at padding are finite and mean nothing
    pub fn forward(&self, x: Tensor<B, 3>, context: &AttentionContext<B>) -> Tensor<B, 3> {
        let [query, key, value] = self.qkv().forward(x);
        self.o_proj.forward(B::causal_attention(AttentionInput {
            query,
            key,
            value,
            query_norm: self.q_norm.gamma.val(),
            key_norm: self.k_norm.gamma.val(),
            epsilon: self.q_norm.epsilon,
            cos: context.rotation.cos.clone(),
            sin: context.rotation.sin.clone(),
            padding: context.padding.clone(),
            heads: self.num_attention_heads,
        }))
    }

    /// Appends tokens to their slots of the cache and attends to everything before them there. Tokens of several
    /// slots, and several tokens of a slot (a prompt), go through one call.
    ///
    /// # Shapes
    /// - x: `[tokens, hidden_size]`, in the order of `step.tokens`
    /// - output: `[tokens, hidden_size]`
    ///
    /// # Panics
    /// If `step` does not fit `x`, the cache or the rotary tables.
    pub fn forward_cached(
        &self,
        x: Tensor<B, 2>,
        rope: &RotaryEmbedding<B>,
        cache: &mut LayerCache<B>,
        step: &CacheStep,
    ) -> Tensor<B, 2> {
        let [query, key, value] = self.qkv().forward(x);
        let qkv = CachedQkv {
            query,
            key,
            value,
            query_norm: self.q_norm.gamma.val(),
            key_norm: self.k_norm.gamma.val(),
            epsilon: self.q_norm.epsilon,
            rope: rope.clone(),
            heads: self.num_attention_heads,
        };
        self.o_proj.forward(B::cached_attention(qkv, cache, step))
    }
}

/// What all layers share in one pass over whole sequences.
#[derive(Clone, Debug)]
pub struct AttentionContext<B: Backend> {
    rotation: Rotation<B>,
    padding: Option<Tensor<B, 2, Bool>>,
}

impl<B: Backend> AttentionContext<B> {
    /// - `positions` `[batch, seq]`: 0, 1, 2, … in every row when absent. Left-padded rows need them.
    /// - `padding` `[batch, seq]`, true at padding, on either side: no token attends to it.
    pub fn new(
        rope: &RotaryEmbedding<B>,
        seq: usize,
        positions: Option<Tensor<B, 2, Int>>,
        padding: Option<Tensor<B, 2, Bool>>,
    ) -> Self {
        let rotation = match positions {
            Some(positions) => rope.rotation(positions),
            None => rope.first(seq),
        };
        Self { rotation, padding }
    }
}
