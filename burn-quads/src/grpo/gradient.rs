//! Gradients of a loss on log-probs by a model's parameters, a part of a minibatch at a time.
use burn::{
    module::AutodiffModule,
    optim::{GradientsAccumulator, GradientsParams},
    tensor::Tensor,
};

use super::loss::along;
use crate::{
    causal_lm::CausalLm,
    token_log_probs::{CompletionRows, DifferentiableLogProbs, TokenRow, token_log_probs},
};

/// Adds up the gradients of a minibatch.
pub(super) struct MinibatchGradient<M> {
    accumulator: GradientsAccumulator<M>,
}

impl<M> MinibatchGradient<M> {
    pub(super) fn new() -> Self {
        Self {
            accumulator: GradientsAccumulator::new(),
        }
    }

    /// Runs the rows forward, gives their log-probs to `derivative`, which answers with the loss's derivative by each,
    /// and adds the gradient of the parameters. None from `derivative` means that nothing shall be added.
    pub(super) fn add<B>(
        &mut self,
        model: &M,
        rows: &[TokenRow<'_>],
        temperature: f32,
        derivative: impl FnOnce(&[f32]) -> Option<Vec<f32>>,
    ) where
        B: DifferentiableLogProbs,
        M: AutodiffModule<B> + CausalLm<B>,
    {
        let head = model.head_weight();
        let device = head.device();
        let layout = CompletionRows::new(rows);
        let hidden = model.hidden_states(&layout.input(&device)).hidden;
        let states = layout.predicting_states(hidden);
        let log_probs: Tensor<B, 1> = token_log_probs(states, head, layout.targets(&device), temperature);
        let values = log_probs.clone().into_data().iter::<f32>().collect::<Vec<_>>();
        if let Some(derivative) = derivative(&values) {
            let gradients = along(log_probs, &derivative).backward();
            let gradients = GradientsParams::from_grads(gradients, model);
            self.accumulator.accumulate(model, gradients);
        }
    }

    pub(super) fn finish(mut self) -> GradientsParams {
        self.accumulator.grads()
    }
}
