//! What the rollout engine needs of a language model.
use crate::modules::attention::{CacheStep, KvCache, KvCacheConfig};
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
