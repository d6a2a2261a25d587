//! Sampling completions from a model.
//!
//! Reading order: [`engine`] (the loop), `scheduler` (which tokens run next, and where), `sampler` (from logits to a
//! token), `routing` (which experts were chosen), [`cached_lm`] (what a model offers). The cache itself is
//! [`KvCache`](crate::modules::attention::KvCache).
pub mod cached_lm;
pub mod engine;
mod routing;
mod sampler;
mod scheduler;

pub use cached_lm::{CachedLm, CachedOutput};
pub use engine::{RolloutEngine, RolloutError};

use crate::token_log_probs::RowRouting;

/// How completions are sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by it. 0 takes the most probable token (the lowest id among equals).
    pub temperature: f32,
    /// Most tokens of a completion, at least 1.
    pub max_new_tokens: usize,
    /// Tokens that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Request `i` draws from stream `i` of a ChaCha8 generator with this seed, one number a token.
    pub seed: u64,
    /// Whether to record the experts of every token.
    pub record_routing: bool,
}

/// A token that was sampled just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledToken {
    /// Index of the prompt.
    pub prompt: usize,
    /// The token.
    pub token: u32,
}

/// What a request got.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Index of the prompt.
    pub prompt: usize,
    /// Sampled tokens, the ending one included.
    pub tokens: Vec<u32>,
    /// Log-probability of each sampled token under the distribution that it was drawn from, that is at the sampling
    /// temperature. Greedy tokens (temperature 0) have their log-probability at temperature 1.
    pub log_probs: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Experts of every token that the model saw, when asked for: the prompt and all sampled tokens but the last, which
    /// is never fed back.
    pub expert_ids: Option<RowRouting>,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The last token is one of `eos_token_ids`.
    Eos,
    /// `max_new_tokens` were sampled, the last of them ending nothing: the answer is truncated.
    Length,
}
