//! Log-probs (and entropies) of given tokens under a language model, without the whole `[batch, seq, vocab]` log-softmax.
//!
//! Only the positions that predict a completion's token are kept ([`CompletionRows`]), and the head runs over them a
//! chunk at a time: `log p = logit of the token − logsumexp of the logits`, in f32, at the sampling temperature.
//! [`token_log_probs`] is one operation of Burn's autodiff: its backward pass makes each chunk's logits again, so that
//! no `[tokens, vocab]` tensor lives from one pass to the other. [`token_log_probs_and_entropies`] is for backends
//! without gradients, and [`score`] runs a model over prompts and completions.
mod chunked;
mod rows;
mod score;

pub use chunked::{DifferentiableLogProbs, token_log_probs, token_log_probs_and_entropies};
pub use rows::{CompletionRows, RowRouting, TokenRow};
pub use score::{ScoreOptions, Scores, score};
