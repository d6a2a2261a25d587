//! Grouped-query attention with QK-norm and rotary positions, as in Qwen3 (a norm for each head) and OLMoE (one over the
//! whole projection).
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
    straight_through::Backward,
};
use crate::{
    backend::QuadsBackend,
    layer_backend::{AttentionInput, CachedQkv, HeadNorms, rms_norm},
};
use burn::{
    config::Config,
    module::Module,
    nn::{RmsNorm, RmsNormConfig},
    prelude::Backend,
    tensor::{Bool, Int, Tensor},
};
use burn_nvfp4::Precision;
use serde::{Deserialize, Serialize};

/// What the norms of queries and keys run over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// Each head of `head_dim` channels (Qwen3).
    #[default]
    Head,
    /// All heads together (OLMoE).
    Projection,
}

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
    /// What `q_norm` and `k_norm` run over.
    #[config(default = "QkNorm::Head")]
    pub qk_norm: QkNorm,
    /// Largest magnitude of queries, keys and values: beyond it they are cut off, after the norms. Needs
    /// [`QkNorm::Projection`].
    pub clip_qkv: Option<f64>,
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
    /// If `num_key_value_heads` does not divide `num_attention_heads`, a width does not fit the precision, or `clip_qkv`
    /// is set with norms of single heads.
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
        assert!(
            self.clip_qkv.is_none() || self.qk_norm == QkNorm::Projection,
            "attention: clip_qkv needs qk_norm = projection"
        );
        let norm = |heads: usize| {
            let width = match self.qk_norm {
                QkNorm::Head => self.head_dim,
                QkNorm::Projection => heads * self.head_dim,
            };
            RmsNormConfig::new(width).with_epsilon(self.rms_norm_eps).init(device)
        };
        QuadsAttention {
            q_proj: linear(self.hidden_size, heads * self.head_dim),
            k_proj: linear(self.hidden_size, kv_heads * self.head_dim),
            v_proj: linear(self.hidden_size, kv_heads * self.head_dim),
            o_proj: linear(heads * self.head_dim, self.hidden_size),
            q_norm: norm(heads),
            k_norm: norm(kv_heads),
            num_attention_heads: heads,
            qk_norm: self.qk_norm,
            clip_qkv: self.clip_qkv,
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
    /// Norm of each query head (`[head_dim]`), or of all together, before the rotation.
    pub q_norm: RmsNorm<B>,
    /// Norm of each key head (`[head_dim]`), or of all together, before the rotation.
    pub k_norm: RmsNorm<B>,
    num_attention_heads: usize,
    #[module(skip)]
    qk_norm: QkNorm,
    #[module(skip)]
    clip_qkv: Option<f64>,
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

    /// The attention with another straight-through gradient of its projections.
    pub fn with_backward(self, backward: Backward) -> Self {
        Self {
            q_proj: self.q_proj.with_backward(backward),
            k_proj: self.k_proj.with_backward(backward),
            v_proj: self.v_proj.with_backward(backward),
            o_proj: self.o_proj.with_backward(backward),
            ..self
        }
    }

    /// q, k and v, which share the input and the outer scale.
    pub fn qkv(&self) -> OuterScaleGroup<'_, B, 3> {
        OuterScaleGroup::new([&self.q_proj, &self.k_proj, &self.v_proj])
    }

    /// The norms that attention itself applies, head by head.
    fn head_norms(&self) -> Option<HeadNorms<B>> {
        (self.qk_norm == QkNorm::Head).then(|| HeadNorms {
            query: self.q_norm.gamma.val(),
            key: self.k_norm.gamma.val(),
            epsilon: self.q_norm.epsilon,
        })
    }
}

impl<B: QuadsBackend> QuadsAttention<B> {
    /// Queries, keys and values of `x`, normed here unless attention norms each head.
    fn project<const D: usize>(&self, x: Tensor<B, D>) -> [Tensor<B, D>; 3] {
        let [query, key, value] = self.qkv().forward(x);
        let [query, key] = match self.qk_norm {
            QkNorm::Head => [query, key],
            QkNorm::Projection => [rms_norm(&self.q_norm, query), rms_norm(&self.k_norm, key)],
        };
        match self.clip_qkv {
            None => [query, key, value],
            Some(limit) => [query, key, value].map(|x| x.clamp(-limit, limit)),
        }
    }

    /// Causal attention over whole sequences.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden_size]`
    /// - output: `[batch, seq, hidden_size]`; rows at padding are finite and mean nothing
    pub fn forward(&self, x: Tensor<B, 3>, context: &AttentionContext<B>) -> Tensor<B, 3> {
        let [query, key, value] = self.project(x);
        self.o_proj.forward(B::causal_attention(AttentionInput {
            query,
            key,
            value,
            norms: self.head_norms(),
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
        let [query, key, value] = self.project(x);
        let qkv = CachedQkv {
            query,
            key,
            value,
            norms: self.head_norms(),
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
