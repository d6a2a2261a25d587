//! What the rollout engine needs of a language model.
use crate::{
    backend::QuadsBackend,
    layer_backend::rms_norm,
    modules::{
        attention::{CacheStep, KvCache, KvCacheConfig, QuadsAttention},
        moe::QuadsMoe,
    },
};
use burn::{
    prelude::Backend,
    tensor::{Int, Tensor},
};

/// A decoder-only language model that can append tokens to a cache.
pub trait CachedLm<B: Backend> {
    /// Number of tokens in the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Longest sequence that the model has positions for.
    fn max_positions(&self) -> usize;

    /// The cache that `slots` sequences of up to `max_seq_len` tokens need.
    fn cache_config(&self, slots: usize, max_seq_len: usize) -> KvCacheConfig;

    /// Where the model lives.
    fn device(&self) -> B::Device;

    /// Runs `tokens` `[tokens]` at the places that `step` gives them, after what `cache` holds of their sequences.
    fn forward_cached(&self, tokens: Tensor<B, 1, Int>, cache: &mut KvCache<B>, step: &CacheStep) -> CachedOutput<B>;

    /// The head: `[n, hidden]` to logits `[n, vocab]`.
    fn logits(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2>;
}

/// The last hidden states of appended tokens, after the final norm and before the head.
#[derive(Clone, Debug)]
pub struct CachedOutput<B: Backend> {
    /// `[tokens, hidden]`.
    pub hidden: Tensor<B, 2>,
    /// Chosen experts, `[tokens, top_k]` a mixture-of-experts layer.
    pub expert_ids: Vec<Tensor<B, 2, Int>>,
}

impl<B: QuadsBackend> CachedLm<B> for QuadsMoe<B> {
    fn vocab_size(&self) -> usize {
        self.config().vocab_size
    }

    fn max_positions(&self) -> usize {
        self.rope.max_seq_len()
    }

    fn cache_config(&self, slots: usize, max_seq_len: usize) -> KvCacheConfig {
        KvCacheConfig {
            num_layers: self.layers.len(),
            slots,
            num_key_value_heads: self.config().num_key_value_heads,
            max_seq_len,
            head_dim: self.config().head_dim,
        }
    }

    fn device(&self) -> B::Device {
        self.embed_tokens.weight.device()
    }

    fn forward_cached(&self, tokens: Tensor<B, 1, Int>, cache: &mut KvCache<B>, step: &CacheStep) -> CachedOutput<B> {
        let [n] = tokens.dims();
        let mut x = self.embed_tokens.forward(tokens.reshape([1, n])).squeeze_dim::<2>(0);
        let mut expert_ids = Vec::with_capacity(self.layers.len());
        for (layer, cache) in self.layers.iter().zip(&mut cache.layers) {
            let attend = |attention: &QuadsAttention<B>, x| attention.forward_cached(x, &self.rope, cache, step);
            let (y, routing) = layer.forward_with(x, attend, None);
            x = y;
            expert_ids.extend(routing.map(|routing| routing.expert_ids));
        }
        CachedOutput {
            hidden: rms_norm(&self.norm, x),
            expert_ids,
        }
    }

    fn logits(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        QuadsMoe::logits(self, hidden)
    }
}
