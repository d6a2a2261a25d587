//! Supervised learning on completions, with the learner's machinery: how a policy is warmed up before GRPO.
use burn::{module::AutodiffModule, tensor::backend::AutodiffBackend};

use super::{
    AdamWOptimizer, GrpoError, OptimizerConfig, SkippedSteps, Update, gradient::MinibatchGradient, optimizer::update,
};
use crate::{
    causal_lm::CausalLm,
    token_log_probs::{DifferentiableLogProbs, TokenRow},
};

/// A policy that learns to give known completions.
pub struct SupervisedLearner<B, M>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    config: OptimizerConfig,
    /// Absent only while an update holds it.
    model: Option<M>,
    optimizer: AdamWOptimizer<B, M>,
    step: usize,
    skipped: SkippedSteps,
}

/// What a supervised step hands back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SupervisedOutput {
    /// Mean cross-entropy of the completions' tokens in nats, before the update.
    pub loss: f64,
    /// The update.
    pub update: Update,
}

impl<B, M> SupervisedLearner<B, M>
where
    B: DifferentiableLogProbs,
    M: AutodiffModule<B> + CausalLm<B>,
{
    /// A learner that has not learnt yet.
    pub fn new(model: M, config: OptimizerConfig) -> Result<Self, GrpoError> {
        config.validate()?;
        Ok(Self {
            optimizer: config.init(),
            config,
            model: Some(model),
            step: 0,
            skipped: SkippedSteps::default(),
        })
    }

    /// The policy.
    pub fn model(&self) -> &M {
        self.model.as_ref().expect("the model is away only inside an update")
    }

    /// The policy, taken out.
    pub fn into_model(self) -> M {
        self.model.expect("the model is away only inside an update")
    }

    /// Batches learnt from.
    pub fn steps(&self) -> usize {
        self.step
    }

    /// The optimizer: its `to_record` holds the moments by parameter id.
    pub fn optimizer(&self) -> &AdamWOptimizer<B, M> {
        &self.optimizer
    }

    /// Updates that were skipped because the loss or gradient was not finite.
    pub fn skipped_steps(&self) -> SkippedSteps {
        self.skipped
    }

    /// Goes on from where another learner was.
    pub fn restore(&mut self, optimizer: AdamWOptimizer<B, M>, steps: usize, skipped: SkippedSteps) {
        self.optimizer = optimizer;
        self.step = steps;
        self.skipped = skipped;
    }

    /// One update on the mean cross-entropy of the rows' completion tokens; prompts are given, not learnt.
    /// `micro_batch_rows` rows run at once.
    pub fn step(&mut self, rows: &[TokenRow<'_>], micro_batch_rows: usize) -> Result<SupervisedOutput, GrpoError> {
        if micro_batch_rows == 0 {
            return Err(GrpoError::option("micro_batch_rows", "at least 1", 0));
        }
        if let Some(row) = rows.iter().position(|row| row.prompt.is_empty()) {
            return Err(GrpoError::batch(format!("rows[{row}].prompt"), "one token at least", 0));
        }
        let vocab = self.model().head_weight().dims()[1];
        for (index, row) in rows.iter().enumerate() {
            if let Some(&token) = row
                .prompt
                .iter()
                .chain(row.completion)
                .find(|&&token| token as usize >= vocab)
            {
                return Err(GrpoError::batch(
                    format!("rows[{index}]"),
                    format!("token ids below the model's vocabulary of {vocab}"),
                    token,
                ));
            }
        }
        let tokens = rows.iter().map(|row| row.completion.len()).sum::<usize>();
        if tokens == 0 {
            return Err(GrpoError::batch("rows", "one completion token at least", 0));
        }
        let mut gradient = MinibatchGradient::new();
        let mut loss = 0.0;
        for rows in rows.chunks(micro_batch_rows) {
            gradient.add(self.model(), rows, 1.0, |log_probs| {
                let sum = log_probs.iter().map(|&log_prob| log_prob as f64).sum::<f64>();
                loss -= sum / tokens as f64;
                sum.is_finite()
                    .then(|| vec![(-1.0 / tokens as f64) as f32; log_probs.len()])
            });
        }
        let outcome = if loss.is_finite() {
            let model = self.model.take().expect("the model is away only inside an update");
            let learning_rate = self.config.schedule.at(self.step);
            let max_grad_norm = self.config.max_grad_norm;
            let (model, outcome) = update(
                model,
                gradient.finish(),
                &mut self.optimizer,
                max_grad_norm,
                learning_rate,
            );
            self.model = Some(model);
            outcome
        } else {
            Update::Skipped { quantity: "loss" }
        };
        self.skipped.count(outcome, &self.config, self.step)?;
        self.step += 1;
        Ok(SupervisedOutput { loss, update: outcome })
    }
}

#[cfg(test)]
mod tests;
