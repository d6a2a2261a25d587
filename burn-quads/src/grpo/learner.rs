//! The learner: from a rollout batch to an updated policy.
//!
//! One [`Learner::step`]: score the completions as the trainer sees them (the *old* log-probs), compare them with the
//! rollout's, make advantages and correction weights, then update minibatch by minibatch, for some epochs.
//! Three log-probs of each token are kept apart: the rollout engine's, the trainer's before the first update, and the
//! trainer's now.
use burn::{module::AutodiffModule, tensor::backend::AutodiffBackend};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

use super::{
    AdamWOptimizer, Advantages, GrpoConfig, GrpoError, LossBatch, LossKind, Metrics, Normalizer, OldLogProbs,
    OverlongMode, RolloutBatch, SkippedSteps, Update, gradient::MinibatchGradient, group_advantages, optimizer::update,
    step_metrics::StepRecord,
};
use crate::{
    causal_lm::CausalLm,
    layer_backend::LayerBackend,
    mismatch::{Mismatch, RouteFlips},
    token_log_probs::{DifferentiableLogProbs, ScoreOptions, Scores, score},
};

/// A policy that learns from rollouts.
pub struct Learner<B, M>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    config: GrpoConfig,
    /// Absent only while an update holds it.
    model: Option<M>,
    optimizer: AdamWOptimizer<B, M>,
    reference: Option<M::InnerModule>,
    step: usize,
    skipped: SkippedSteps,
}

/// What a step hands back.
#[derive(Clone, Debug)]
pub struct StepOutput {
    /// Numbers for the log.
    pub metrics: Metrics,
    /// The gap between trainer and rollout on this batch, before the update.
    pub mismatch: Mismatch,
    /// Log-probs of the completions' tokens as the trainer had them before the update, by row.
    pub old_log_probs: Vec<Vec<f32>>,
    /// Advantage of each row.
    pub advantages: Vec<f32>,
}

/// What the minibatches of a step share; token columns are flat, row after row.
struct Prepared<'a> {
    batch: &'a RolloutBatch,
    /// First token of each row, and the end.
    offsets: Vec<usize>,
    /// False for rows whose tokens do not count.
    counts: Vec<bool>,
    advantages: Advantages,
    old: Vec<f32>,
    reference: Option<Vec<f32>>,
    rollout: Vec<f32>,
    weights: Vec<f32>,
}

impl Prepared<'_> {
    fn length(&self, row: usize) -> usize {
        self.offsets[row + 1] - self.offsets[row]
    }

    /// A token column of some rows.
    fn gather(&self, column: &[f32], rows: &[usize]) -> Vec<f32> {
        rows.iter()
            .flat_map(|&row| &column[self.offsets[row]..self.offsets[row + 1]])
            .copied()
            .collect()
    }

    /// Tokens of some rows that count.
    fn counted_tokens(&self, rows: impl Iterator<Item = usize>) -> usize {
        rows.filter(|&row| self.counts[row]).map(|row| self.length(row)).sum()
    }
}

impl<B, M> Learner<B, M>
where
    B: DifferentiableLogProbs,
    M: AutodiffModule<B> + CausalLm<B>,
    M::InnerModule: CausalLm<B::InnerBackend>,
{
    /// A learner that has not learnt yet. With a KL term the policy as it is becomes the frozen reference.
    pub fn new(model: M, config: GrpoConfig) -> Result<Self, GrpoError> {
        config.validate()?;
        Ok(Self {
            reference: (config.loss.beta > 0.0).then(|| model.valid()),
            optimizer: config.optimizer.init(),
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

    /// The settings.
    pub fn config(&self) -> &GrpoConfig {
        &self.config
    }

    /// The reference policy, when there is a KL term.
    pub fn reference(&self) -> Option<&M::InnerModule> {
        self.reference.as_ref()
    }

    /// Batches learnt from.
    pub fn steps(&self) -> usize {
        self.step
    }

    /// Updates that were skipped because the loss or gradient was not finite.
    pub fn skipped_steps(&self) -> SkippedSteps {
        self.skipped
    }

    /// The optimizer: its `to_record` holds the moments by parameter id.
    pub fn optimizer(&self) -> &AdamWOptimizer<B, M> {
        &self.optimizer
    }

    /// Goes on from where another learner was. Together with the model's parameters this is all that a step depends on:
    /// the next one equals what the other learner's would have been, bit for bit. The reference policy, if there is one,
    /// is to be restored with [`set_reference`](Self::set_reference).
    pub fn restore(&mut self, optimizer: AdamWOptimizer<B, M>, steps: usize, skipped: SkippedSteps) {
        self.optimizer = optimizer;
        self.step = steps;
        self.skipped = skipped;
    }

    /// Replaces the reference policy; without a KL term it is not kept.
    pub fn set_reference(&mut self, reference: M::InnerModule) {
        self.reference = (self.config.loss.beta > 0.0).then_some(reference);
    }

    /// Learns from a batch.
    ///
    /// An error leaves the policy as it was, except [`GrpoError::Diverged`], which comes after the updates that were
    /// still finite.
    ///
    /// # Panics
    ///
    /// If the model does not accept the expert ids that are to be replayed.
    pub fn step(&mut self, batch: &RolloutBatch) -> Result<StepOutput, GrpoError> {
        batch.validate(self.model().head_weight().dims()[1])?;
        self.validate(batch)?;
        let rewards = self.shaped_rewards(batch);
        let advantages = group_advantages(
            &rewards,
            &batch.group,
            self.config.group_size,
            self.config.scale_rewards,
        )?;

        let policy = self.model().valid();
        let record_routing = batch.expert_ids.is_some() && !self.config.routing_replay;
        let scores = self.score(&policy, batch, self.config.routing_replay, record_routing);
        let reference = self
            .reference
            .as_ref()
            // The reference is a policy of its own, with its own routes.
            .map(|reference| self.score(reference, batch, false, false).log_probs.concat());
        let flips = match &batch.expert_ids {
            Some(expert_ids) if record_routing => Some(RouteFlips::new(&scores.routing, expert_ids)?),
            _ => None,
        };
        // The handles of its parameters would keep the updates from working in place.
        drop(policy);

        let old = scores.log_probs.concat();
        let rollout = batch.rollout_log_probs.concat();
        let mismatch = Mismatch::new(&old, &rollout);
        let lengths = batch.completions.iter().map(Vec::len).collect::<Vec<_>>();
        let counts = (0..batch.rows())
            .map(|row| self.config.overlong.mode != OverlongMode::Mask || !batch.truncated[row])
            .collect::<Vec<_>>();
        let mask = token_mask(&counts, &lengths);
        let correction = self.config.correction.weights(&old, &rollout, &mask, &lengths);

        let old = match self.config.old_log_probs {
            OldLogProbs::Trainer => old,
            OldLogProbs::Rollout => rollout.clone(),
        };
        let mut record = StepRecord::default();
        let prepared = Prepared {
            batch,
            offsets: offsets(&lengths),
            counts,
            advantages,
            old,
            reference,
            rollout,
            weights: correction.values.clone(),
        };
        for epoch in 0..self.config.epochs {
            let order = row_order(self.config.seed, self.step, epoch, batch.rows());
            for rows in order.chunks(batch.rows() / self.config.minibatches) {
                self.minibatch(&prepared, rows, &mut record)?;
            }
        }

        let mut metrics = record.metrics(&self.config, batch, &prepared.advantages, &scores.entropies);
        metrics.push("actor/lr", self.config.optimizer.schedule.at(self.step));
        metrics.push("skipped_steps", self.skipped.total as f64);
        metrics.push("rollout_corr/rejected_fraction", correction.rejected_fraction());
        metrics.extend(&mismatch.metrics());
        if let Some(flips) = flips {
            metrics.extend(&flips.metrics());
        }
        self.step += 1;
        Ok(StepOutput {
            metrics,
            mismatch,
            old_log_probs: scores.log_probs,
            advantages: prepared.advantages.values,
        })
    }

    fn validate(&self, batch: &RolloutBatch) -> Result<(), GrpoError> {
        self.config.validate_rows(batch.rows())?;
        let limit = self.config.max_completion_length;
        if let Some(row) = batch.completions.iter().position(|tokens| tokens.len() > limit) {
            return Err(GrpoError::batch(
                format!("completions[{row}]"),
                format!("at most max_completion_length ({limit}) tokens"),
                batch.completions[row].len(),
            ));
        }
        if self.config.routing_replay && batch.expert_ids.is_none() {
            return Err(GrpoError::batch(
                "expert_ids",
                "the rollout's expert ids, for routing_replay",
                "none",
            ));
        }
        Ok(())
    }

    fn shaped_rewards(&self, batch: &RolloutBatch) -> Vec<f32> {
        let penalty = |row: usize| {
            let length = batch.completions[row].len();
            self.config.overlong.penalty(length, self.config.max_completion_length)
        };
        (0..batch.rows()).map(|row| batch.rewards[row] + penalty(row)).collect()
    }

    fn score<I: LayerBackend, N: CausalLm<I>>(
        &self,
        model: &N,
        batch: &RolloutBatch,
        replay: bool,
        record_routing: bool,
    ) -> Scores {
        let rows = (0..batch.rows()).map(|row| batch.row(row, replay)).collect::<Vec<_>>();
        let options = ScoreOptions {
            temperature: self.config.temperature,
            rows_per_forward: self.config.score_rows,
            record_routing,
        };
        score(model, &rows, &options)
    }

    /// One update on some rows of the batch.
    fn minibatch(&mut self, prepared: &Prepared<'_>, rows: &[usize], record: &mut StepRecord) -> Result<(), GrpoError> {
        let normalizer = self.normalizer(prepared, rows);
        // Rows without a gradient are not computed at all: dropping them changes no sum, the denominators know of them.
        let (live, without_gradient): (Vec<_>, Vec<_>) = rows
            .iter()
            .copied()
            .partition(|&row| self.carries_gradient(prepared, row));
        record.stats.add_without_gradient(match self.config.loss.kind {
            LossKind::Gspo => without_gradient.len(),
            _ => prepared.counted_tokens(without_gradient.into_iter()),
        });
        if live.is_empty() {
            // AdamW would move the parameters along their old momentum.
            record.empty_updates += 1;
            return Ok(());
        }

        let mut gradient = MinibatchGradient::new();
        let mut loss = 0.0;
        for rows in live.chunks(self.config.micro_batch_rows.unwrap_or(live.len())) {
            loss += self.micro_batch(prepared, rows, &normalizer, &mut gradient, record);
            if !loss.is_finite() {
                break;
            }
        }
        let outcome = if loss.is_finite() {
            let learning_rate = self.config.optimizer.schedule.at(self.step);
            let model = self.model.take().expect("the model is away only inside an update");
            let max_grad_norm = self.config.optimizer.max_grad_norm;
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
        record.update(loss, outcome);
        self.skipped.count(outcome, &self.config.optimizer, self.step)
    }

    /// Adds the gradient of some rows; returns their share of the loss.
    fn micro_batch(
        &self,
        prepared: &Prepared<'_>,
        rows: &[usize],
        normalizer: &Normalizer,
        gradient: &mut MinibatchGradient<M>,
        record: &mut StepRecord,
    ) -> f64 {
        let lengths = rows.iter().map(|&row| prepared.length(row)).collect::<Vec<_>>();
        let mask = vec![true; lengths.iter().sum()];
        let advantages = rows
            .iter()
            .map(|&row| prepared.advantages.values[row])
            .collect::<Vec<_>>();
        let [old, rollout, weights] =
            [&prepared.old, &prepared.rollout, &prepared.weights].map(|column| prepared.gather(column, rows));
        let reference = prepared.reference.as_ref().map(|column| prepared.gather(column, rows));
        let token_rows = rows
            .iter()
            .map(|&row| prepared.batch.row(row, self.config.routing_replay))
            .collect::<Vec<_>>();
        let old_of_rollout = self.config.old_log_probs == OldLogProbs::Rollout;
        let mut loss = 0.0;
        gradient.add(self.model(), &token_rows, self.config.temperature, |log_probs| {
            let output = self.config.loss.evaluate(
                &LossBatch {
                    lengths: &lengths,
                    mask: &mask,
                    advantages: &advantages,
                    log_probs,
                    // With a single update the policy is still the old one: the ratio is 1, not 1 plus the rounding of
                    // another batch shape.
                    old_log_probs: (self.config.updates() > 1 || old_of_rollout).then_some(&old),
                    reference_log_probs: reference.as_deref(),
                    rollout_log_probs: Some(&rollout),
                    weights: Some(&weights),
                },
                normalizer,
            );
            loss = output.loss;
            if !loss.is_finite() {
                return None;
            }
            record.stats.merge(&output.stats);
            Some(output.gradient)
        });
        loss
    }

    /// Whether any token of a row can move a parameter.
    fn carries_gradient(&self, prepared: &Prepared<'_>, row: usize) -> bool {
        let weights = &prepared.weights[prepared.offsets[row]..prepared.offsets[row + 1]];
        let by_reward = prepared.advantages.values[row] != 0.0 && weights.iter().any(|&weight| weight != 0.0);
        prepared.counts[row] && prepared.length(row) > 0 && (by_reward || self.config.loss.beta > 0.0)
    }

    fn normalizer(&self, prepared: &Prepared<'_>, rows: &[usize]) -> Normalizer {
        let tokens = match self.config.loss.kind {
            LossKind::Dapo | LossKind::Cispo => {
                prepared.counted_tokens(0..prepared.batch.rows()) as f64 / self.config.minibatches as f64
            }
            _ => prepared.counted_tokens(rows.iter().copied()) as f64,
        };
        let counted = |row: &&usize| prepared.counts[**row] && prepared.length(**row) > 0;
        Normalizer {
            rows: rows.iter().filter(counted).count(),
            tokens,
            max_completion_length: self.config.max_completion_length,
        }
    }
}

/// The order of rows in an epoch: a function of these numbers alone.
fn row_order(seed: u64, step: usize, epoch: usize, rows: usize) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(step as u64);
    let mut order = (0..rows).collect::<Vec<_>>();
    for _ in 0..=epoch {
        order.shuffle(&mut rng);
    }
    order
}

fn offsets(lengths: &[usize]) -> Vec<usize> {
    let mut offsets = vec![0];
    for length in lengths {
        offsets.push(offsets[offsets.len() - 1] + length);
    }
    offsets
}

fn token_mask(rows: &[bool], lengths: &[usize]) -> Vec<bool> {
    rows.iter()
        .zip(lengths)
        .flat_map(|(&counts, &length)| std::iter::repeat_n(counts, length))
        .collect()
}

#[cfg(test)]
mod tests;
