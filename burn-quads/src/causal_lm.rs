//! What the learner and the mismatch metrics need of a language model.
use burn::{
    prelude::Backend,
    tensor::{Bool, Int, Tensor},
};

/// Sequences to run a model on, as one rectangle.
#[derive(Clone, Debug)]
pub struct TokenBatch<B: Backend> {
    /// Token ids `[batch, seq]`.
    pub tokens: Tensor<B, 2, Int>,
    /// Position of each token `[batch, seq]`; `0..seq` in every row when absent. Left-padded rows need them.
    pub positions: Option<Tensor<B, 2, Int>>,
    /// True at padding `[batch, seq]`; padding is never attended to.
    pub padding: Option<Tensor<B, 2, Bool>>,
    /// Expert ids to use instead of the router's own choice (routing replay).
    pub replay: Option<RoutingReplay<B>>,
}

impl<B: Backend> TokenBatch<B> {
    /// Whole rows without padding.
    pub fn new(tokens: Tensor<B, 2, Int>) -> Self {
        Self {
            tokens,
            positions: None,
            padding: None,
            replay: None,
        }
    }
}

/// Expert ids of another forward pass, one tensor `[batch · seq, top_k]` a mixture-of-experts layer, in layer order.
/// A row that starts with -1 is routed by the live router.
#[derive(Clone, Debug)]
pub struct RoutingReplay<B: Backend> {
    /// Ids by layer.
    pub expert_ids: Vec<Tensor<B, 2, Int>>,
}

/// The last hidden states, after the final norm and before the head.
#[derive(Clone, Debug)]
pub struct HiddenOutput<B: Backend> {
    /// `[batch, seq, hidden]`.
    pub hidden: Tensor<B, 3>,
    /// Chosen experts, `[batch · seq, top_k]` a mixture-of-experts layer.
    pub expert_ids: Vec<Tensor<B, 2, Int>>,
    /// Router logits, `[batch · seq, experts]` a mixture-of-experts layer.
    pub router_logits: Vec<Tensor<B, 2>>,
}

/// A decoder-only language model whose head is one matrix.
pub trait CausalLm<B: Backend> {
    /// Hidden states of whole sequences under causal attention.
    fn hidden_states(&self, input: &TokenBatch<B>) -> HiddenOutput<B>;
    /// The head, `[hidden, vocab]`: logits are `hidden · head`.
    fn head_weight(&self) -> Tensor<B, 2>;
}
