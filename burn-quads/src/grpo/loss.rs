//! The losses: from log-probs of sampled tokens to one number and its derivative by each log-prob.
//!
//! With `lp` the policy's log-prob of a sampled token, `A` the advantage of its completion and `sg` "no gradient":
//!
//! ```text
//! r  = exp(lp − lp_old)                                    ratio of a token; lp_old = sg(lp) when none is given
//! s  = exp(mean over the completion of lp − lp_old)        ratio of a completion (gspo)
//! ℓ  = −min(min(r, δ)·A, clip(r, 1 − ε_low, 1 + ε_high)·A) grpo, bnpo, dr_grpo, dapo; gspo with s for r
//! ℓ  = −sg(min(r, ε_high))·A·lp                            cispo: an absolute cap, no lower bound
//! k3 = exp(lp_ref − lp) − (lp_ref − lp) − 1                Schulman's estimate of KL(policy ‖ reference)
//! L  = ℓ·keep·w + β·k3                                     w: rollout correction; or β·k3·r (`kl_times_ratio`)
//!
//! grpo, gspo   mean over completions of (mean over tokens of L)
//! bnpo         sum of L / tokens of the minibatch
//! dr_grpo      sum of L / (completions · max_completion_length)
//! dapo, cispo  sum of L / (tokens of the rollout batch / minibatches)
//! ```
//!
//! These are TRL's definitions (1.16), golden values in `tests/fixtures/grpo`. `keep` is 0 for completions with A < 0
//! whose mean of `lp_rollout − lp` passes `off_policy_mask_threshold` (DeepSeek-V3.2). Differences of log-probs are
//! clamped to ±20 before the exponential, with derivative 0 beyond, as in verl. Tokens that the mask leaves out are
//! never read, so whatever stands there does no harm.
//!
//! A loss has one number a sampled token as input, a few thousand in all: it is computed on the host in f64, with the
//! derivative written beside each formula, and [`LossOutput::attach`] hands both to Burn's autodiff.
use burn::{
    prelude::Backend,
    tensor::{Tensor, TensorData},
};
use serde::{Deserialize, Serialize};

mod input;

pub use input::{LossBatch, Normalizer};

use super::{GrpoError, loss_stats::LossStats};

/// Differences of log-probs are clamped to ± this before the exponential.
pub const LOG_RATIO_BOUND: f64 = 20.0;

/// Which loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    /// Mean over completions of the mean over tokens (DeepSeekMath).
    Grpo,
    /// Mean over the tokens of the minibatch.
    Bnpo,
    /// Sum over tokens by a constant length (Dr. GRPO; meant with `scale_rewards = "none"`).
    DrGrpo,
    /// Mean over the tokens of the rollout batch (DAPO).
    #[default]
    Dapo,
    /// Clipped importance weights without gradient (MiniMax-M1).
    Cispo,
    /// One ratio a completion (Qwen's GSPO).
    Gspo,
}

/// A loss and its settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossConfig {
    /// Which loss.
    pub kind: LossKind,
    /// `ε_low`; absent: 0.2, and 3e-4 for gspo.
    pub epsilon_low: Option<f32>,
    /// `ε_high`; absent: 0.28 ("clip higher"), 4e-4 for gspo, and for cispo, where it caps the ratio itself, 5.
    pub epsilon_high: Option<f32>,
    /// `δ`, the second clip of completions with a negative advantage ("two-sided"); absent: none.
    pub delta: Option<f32>,
    /// `β`, weight of the KL term against the reference policy; 0: no reference policy is kept.
    pub beta: f32,
    /// Multiplies the KL term by the ratio (TRL's `use_bias_correction_kl`).
    pub kl_times_ratio: bool,
    /// Drops completions with a negative advantage that the policy has moved away from by more than this; absent: none.
    pub off_policy_mask_threshold: Option<f32>,
}

impl Default for LossConfig {
    fn default() -> Self {
        Self {
            kind: LossKind::default(),
            epsilon_low: None,
            epsilon_high: None,
            delta: None,
            beta: 0.0,
            kl_times_ratio: false,
            off_policy_mask_threshold: None,
        }
    }
}

/// A loss with its derivative.
#[derive(Clone, Debug)]
pub struct LossOutput {
    /// The loss.
    pub loss: f64,
    /// Derivative of the loss by each of `log_probs`; 0 where the mask is false.
    pub gradient: Vec<f32>,
    /// `L` of each token; 0 where the mask is false.
    pub per_token_loss: Vec<f32>,
    /// `k3` (times the ratio if asked for) of each token; empty without a KL term.
    pub per_token_kl: Vec<f32>,
    /// What the metrics are made of.
    pub stats: LossStats,
}

impl LossOutput {
    /// The loss as a tensor `[1]` whose gradient by `log_probs` (the tensor whose values the loss was given) is
    /// [`gradient`](Self::gradient).
    pub fn attach<B: Backend>(&self, log_probs: Tensor<B, 1>) -> Tensor<B, 1> {
        let linear = along(log_probs, &self.gradient);
        linear.clone() - linear.detach() + self.loss
    }
}

/// A tensor `[1]` whose gradient by `log_probs` is `gradient`; its value means nothing.
pub(super) fn along<B: Backend>(log_probs: Tensor<B, 1>, gradient: &[f32]) -> Tensor<B, 1> {
    let gradient = TensorData::new(gradient.to_vec(), [gradient.len()]);
    let gradient = Tensor::from_data(gradient, &log_probs.device());
    (log_probs * gradient).sum()
}

/// A value and its derivative by the log ratio or log-prob that it depends on.
#[derive(Clone, Copy)]
struct Term {
    value: f64,
    slope: f64,
}

impl Term {
    const ZERO: Self = Self { value: 0.0, slope: 0.0 };

    /// Selects rather than multiplies by 0: a dropped token may be infinite.
    fn weighted(self, weight: f64) -> Self {
        if weight == 0.0 {
            return Self::ZERO;
        }
        Self {
            value: self.value * weight,
            slope: self.slope * weight,
        }
    }
}

/// `exp(clamp(x, ±20))` and its derivative by x. NaN stays NaN.
fn bounded_exp(x: f64) -> Term {
    let value = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp();
    Term {
        value,
        slope: if x.abs() > LOG_RATIO_BOUND { 0.0 } else { value },
    }
}

/// k3 and its derivative by the policy's log-prob.
fn k3(reference: f64, log_prob: f64) -> Term {
    let difference = reference - log_prob;
    let exp = bounded_exp(difference);
    let clamped = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND);
    Term {
        value: exp.value - clamped - 1.0,
        slope: if difference.abs() > LOG_RATIO_BOUND {
            0.0
        } else {
            1.0 - exp.value
        },
    }
}

impl LossConfig {
    /// A loss with its default settings.
    pub fn new(kind: LossKind) -> Self {
        Self {
            kind,
            ..Self::default()
        }
    }

    /// `(ε_low, ε_high)` in force.
    pub fn epsilons(&self) -> (f64, f64) {
        let (low, high) = match self.kind {
            LossKind::Gspo => (3e-4, 4e-4),
            LossKind::Cispo => (0.2, 5.0),
            _ => (0.2, 0.28),
        };
        (
            self.epsilon_low.unwrap_or(low) as f64,
            self.epsilon_high.unwrap_or(high) as f64,
        )
    }

    /// Refuses settings that cannot work.
    pub fn validate(&self) -> Result<(), GrpoError> {
        let (low, high) = self.epsilons();
        if !(0.0..1.0).contains(&low) {
            return Err(GrpoError::option("loss.epsilon_low", "a number in [0, 1)", low));
        }
        if !(high >= 0.0 && high.is_finite()) {
            return Err(GrpoError::option(
                "loss.epsilon_high",
                "a finite number of at least 0",
                high,
            ));
        }
        if let Some(delta) = self.delta {
            if self.kind == LossKind::Cispo {
                return Err(GrpoError::option("loss.delta", "none: cispo has no second clip", delta));
            }
            if !(delta as f64 > 1.0 + high && delta.is_finite()) {
                return Err(GrpoError::option(
                    "loss.delta",
                    format!("a finite number above 1 + epsilon_high ({})", 1.0 + high),
                    delta,
                ));
            }
        }
        if !(self.beta >= 0.0 && self.beta.is_finite()) {
            return Err(GrpoError::option(
                "loss.beta",
                "a finite number of at least 0",
                self.beta,
            ));
        }
        if let Some(threshold) = self.off_policy_mask_threshold
            && !(threshold >= 0.0 && threshold.is_finite())
        {
            return Err(GrpoError::option(
                "loss.off_policy_mask_threshold",
                "a finite number of at least 0",
                threshold,
            ));
        }
        Ok(())
    }

    /// The loss of a batch, by the denominators of the whole that it is a part of.
    ///
    /// A batch without a token that counts has loss 0 and gradient 0. A NaN log-prob in a completion whose advantage is
    /// not 0 makes the loss NaN: divergence must be seen.
    ///
    /// # Panics
    ///
    /// If the slices do not fit `lengths`, or β > 0 without reference log-probs.
    pub fn evaluate(&self, batch: &LossBatch<'_>, normalizer: &Normalizer) -> LossOutput {
        batch.assert_shapes(self.beta);
        let tokens = batch.mask.len();
        let mut output = LossOutput {
            loss: 0.0,
            gradient: vec![0.0; tokens],
            per_token_loss: vec![0.0; tokens],
            per_token_kl: vec![0.0; if self.beta > 0.0 { tokens } else { 0 }],
            stats: LossStats::default(),
        };
        let mut start = 0;
        for (row, &length) in batch.lengths.iter().enumerate() {
            let counted = (start..start + length).filter(|&t| batch.mask[t]).collect::<Vec<_>>();
            self.evaluate_row(batch, row, &counted, normalizer, &mut output);
            start += length;
        }
        output
    }

    /// Adds one completion; `counted` are the indices of its tokens that count.
    fn evaluate_row(
        &self,
        batch: &LossBatch<'_>,
        row: usize,
        counted: &[usize],
        normalizer: &Normalizer,
        output: &mut LossOutput,
    ) {
        let advantage = batch.advantages[row] as f64;
        let beta = self.beta as f64;
        let log_prob = |t: usize| batch.log_probs[t] as f64;
        // Without old log-probs the difference is 0, or NaN where the log-prob is not finite.
        let log_ratio = |t: usize| log_prob(t) - batch.old_log_probs.map_or(log_prob(t), |old| old[t] as f64);
        let length = counted.len().max(1) as f64;
        // The ratio of the whole completion, for gspo: its slope is by the mean of the log ratios.
        let sequence_ratio = bounded_exp(counted.iter().map(|&t| log_ratio(t)).sum::<f64>() / length);
        let by_sequence = self.kind == LossKind::Gspo;
        let token_scale = match self.kind {
            LossKind::Grpo | LossKind::Gspo => 1.0 / (length * normalizer.rows.max(1) as f64),
            LossKind::Bnpo | LossKind::Dapo | LossKind::Cispo => 1.0 / normalizer.tokens.max(1.0),
            LossKind::DrGrpo => 1.0 / (normalizer.rows.max(1) * normalizer.max_completion_length.max(1)) as f64,
        };
        let keep = self.keeps(batch, advantage, counted);

        let mut row_stats = output
            .stats
            .row(by_sequence.then_some(self.clipped(sequence_ratio.value, advantage)));
        // gspo: the derivative of the sum over tokens by the completion's log ratio, shared out at the end.
        let mut sequence_slope = 0.0;
        for &t in counted {
            let ratio = if by_sequence {
                sequence_ratio
            } else {
                bounded_exp(log_ratio(t))
            };
            let weight = batch.weights.map_or(1.0, |weights| weights[t] as f64);
            let policy = self
                .policy_term(ratio, advantage, log_prob(t))
                .weighted(if keep { weight } else { 0.0 });
            let (mut value, mut slope) = (policy.value, 0.0);
            let mut ratio_slope = policy.slope;
            if let (true, Some(reference)) = (beta > 0.0, batch.reference_log_probs) {
                let kl = k3(reference[t] as f64, log_prob(t));
                let factor = if self.kl_times_ratio { ratio.value } else { 1.0 };
                value += beta * kl.value * factor;
                slope += beta * kl.slope * factor;
                if self.kl_times_ratio {
                    ratio_slope += beta * kl.value * ratio.slope;
                }
                output.per_token_kl[t] = (kl.value * factor) as f32;
                output.stats.add_kl(kl.value * factor, token_scale * kl.value * factor);
            }
            if by_sequence {
                sequence_slope += token_scale * ratio_slope;
            } else {
                slope += ratio_slope;
            }
            output.loss += token_scale * value;
            output.per_token_loss[t] = value as f32;
            output.gradient[t] = (token_scale * slope) as f32;
            row_stats.token(-log_ratio(t), self.clipped(ratio.value, advantage));
        }
        if by_sequence {
            for &t in counted {
                output.gradient[t] = (output.gradient[t] as f64 + sequence_slope / length) as f32;
            }
        }
        let dropped = !keep && !counted.is_empty();
        output.stats.finish_row(row_stats, dropped);
    }

    /// The policy loss of a token; the slope is by the log ratio of the token or completion.
    fn policy_term(&self, ratio: Term, advantage: f64, log_prob: f64) -> Term {
        let (low, high) = self.epsilons();
        // Not f64::min: it would turn NaN into the bound.
        let capped = |cap: f64| {
            if ratio.value > cap {
                Term { value: cap, slope: 0.0 }
            } else {
                ratio
            }
        };
        if self.kind == LossKind::Cispo {
            let weight = capped(high).value;
            return Term {
                value: -weight * advantage * log_prob,
                slope: -weight * advantage,
            };
        }
        let free = self.delta.map_or(ratio, |delta| capped(delta as f64));
        let clipped = if ratio.value > 1.0 + high {
            Term {
                value: 1.0 + high,
                slope: 0.0,
            }
        } else if ratio.value < 1.0 - low {
            Term {
                value: 1.0 - low,
                slope: 0.0,
            }
        } else {
            ratio
        };
        let least = if free.value * advantage <= clipped.value * advantage {
            free
        } else {
            clipped
        };
        least.weighted(-advantage)
    }

    /// Where a ratio stands to the clip range, seen from the side on which the clip takes the gradient away.
    fn clipped(&self, ratio: f64, advantage: f64) -> Clipped {
        let (low, high) = self.epsilons();
        if self.kind == LossKind::Cispo {
            return Clipped {
                cap: ratio > high && advantage > 0.0,
                ..Clipped::default()
            };
        }
        Clipped {
            low: ratio < 1.0 - low && advantage < 0.0,
            high: ratio > 1.0 + high && advantage > 0.0,
            delta: self.delta.is_some_and(|delta| ratio > delta as f64) && advantage < 0.0,
            cap: false,
        }
    }

    /// The off-policy mask of a completion.
    fn keeps(&self, batch: &LossBatch<'_>, advantage: f64, counted: &[usize]) -> bool {
        let Some(threshold) = self.off_policy_mask_threshold else {
            return true;
        };
        let sampled = batch.rollout_log_probs.or(batch.old_log_probs);
        let moved = counted
            .iter()
            .map(|&t| sampled.map_or(0.0, |sampled| sampled[t] as f64 - batch.log_probs[t] as f64))
            // A token without a rollout log-prob is no evidence.
            .map(|difference| if difference.is_nan() { 0.0 } else { difference })
            .sum::<f64>()
            / counted.len().max(1) as f64;
        advantage >= 0.0 || moved <= threshold as f64
    }
}

/// Which clips a ratio passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clipped {
    /// Below 1 − ε_low with A < 0.
    pub(crate) low: bool,
    /// Above 1 + ε_high with A > 0.
    pub(crate) high: bool,
    /// Above δ with A < 0.
    pub(crate) delta: bool,
    /// cispo: above ε_high with A > 0.
    pub(crate) cap: bool,
}

#[cfg(test)]
mod tests;
