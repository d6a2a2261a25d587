//! How far the trainer's policy and the rollout's differ on the tokens that were sampled.
//!
//! [`Mismatch`] compares two lists of log-probs of the same tokens, [`Decomposition`] splits the difference into the
//! parts that weights, activations and the engine's arithmetic cause, and [`RouteFlips`] counts tokens that chose other
//! experts. With `d = log π_trainer − log π_rollout` and `r = exp(d)`, clamped to ±20 before the exponential; all sums
//! are made on the host in f64, in token order. Names follow verl, TRL and prime-rl where these have one.
mod decomposition;
mod route_flips;

pub use decomposition::Decomposition;
pub use route_flips::RouteFlips;

use crate::grpo::{Metrics, loss::LOG_RATIO_BOUND};

/// The difference between two policies on sampled tokens. All fields are 0, ratios 1, when no token has two log-probs.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// Tokens compared.
    pub tokens: usize,
    /// Tokens left out because one of the log-probs is not finite.
    pub unscored_tokens: usize,
    /// Mean of |d|.
    pub mean: f64,
    /// 99th percentile of |d|: the least value that 99 % of the tokens do not pass.
    pub p99: f64,
    /// Greatest |d|.
    pub max: f64,
    /// Mean of −d: the plain estimate of KL(rollout ‖ trainer) from tokens of the rollout.
    pub kl: f64,
    /// Mean of r − 1 − d: the same with less variance, never negative.
    pub k3_kl: f64,
    /// Mean of r·d − (r − 1): KL(trainer ‖ rollout) from tokens of the rollout, never negative.
    pub k3_kl_reverse: f64,
    /// Mean of r² − 1.
    pub chi2_token: f64,
    /// Mean of r.
    pub is_mean: f64,
    /// Effective sample size of the ratios as a fraction: (Σr)² / (n·Σr²).
    pub effective_sample_size: f64,
    /// Fraction of tokens with r outside [1/2, 2].
    pub out_of_bounds: f64,
    /// Mean, greatest and standard deviation of |π_trainer − π_rollout|.
    pub probs_diff_mean: f64,
    /// See `probs_diff_mean`.
    pub probs_diff_max: f64,
    /// See `probs_diff_mean`.
    pub probs_diff_std: f64,
    /// Pearson correlation of the probabilities; 1 where both do not vary.
    pub probs_pearson: f64,
}

impl Mismatch {
    /// Compares log-probs of the same sampled tokens.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn new(trainer: &[f32], rollout: &[f32]) -> Self {
        assert_eq!(
            trainer.len(),
            rollout.len(),
            "trainer and rollout score the same tokens"
        );
        let pairs = trainer
            .iter()
            .zip(rollout)
            .filter(|(trainer, rollout)| trainer.is_finite() && rollout.is_finite())
            .map(|(&trainer, &rollout)| (trainer as f64, rollout as f64))
            .collect::<Vec<_>>();
        let mean = |of: &dyn Fn(f64, f64) -> f64| {
            pairs
                .iter()
                .map(|&(trainer, rollout)| of(trainer, rollout))
                .sum::<f64>()
                / pairs.len().max(1) as f64
        };
        let log_ratio = |trainer: f64, rollout: f64| (trainer - rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND);
        let of_ratio = |of: &dyn Fn(f64, f64) -> f64| {
            mean(&|trainer, rollout| {
                let d = log_ratio(trainer, rollout);
                of(d, d.exp())
            })
        };
        let absolute = Summary::of(pairs.iter().map(|(trainer, rollout)| (trainer - rollout).abs()));
        let probs = Summary::of(
            pairs
                .iter()
                .map(|(trainer, rollout)| (trainer.exp() - rollout.exp()).abs()),
        );
        let (is_mean, is_square) = (of_ratio(&|_, r| r), of_ratio(&|_, r| r * r));
        let empty = pairs.is_empty();
        Self {
            tokens: pairs.len(),
            unscored_tokens: trainer.len() - pairs.len(),
            mean: absolute.mean,
            p99: absolute.p99,
            max: absolute.max,
            kl: mean(&|trainer, rollout| rollout - trainer),
            k3_kl: of_ratio(&|d, r| r - 1.0 - d),
            k3_kl_reverse: of_ratio(&|d, r| r * d - (r - 1.0)),
            chi2_token: of_ratio(&|_, r| r * r - 1.0),
            is_mean: if empty { 1.0 } else { is_mean },
            effective_sample_size: if empty { 1.0 } else { is_mean * is_mean / is_square },
            out_of_bounds: of_ratio(&|_, r| if (0.5..=2.0).contains(&r) { 0.0 } else { 1.0 }),
            probs_diff_mean: probs.mean,
            probs_diff_max: probs.max,
            probs_diff_std: probs.std,
            probs_pearson: pearson(&pairs.iter().map(|p| (p.0.exp(), p.1.exp())).collect::<Vec<_>>()),
        }
    }

    /// The metrics by name.
    pub fn metrics(&self) -> Metrics {
        Metrics::from([
            ("sampling/sampling_logp_difference/mean", self.mean),
            ("sampling/sampling_logp_difference/p99", self.p99),
            ("sampling/sampling_logp_difference/max", self.max),
            ("rollout_corr/kl", self.kl),
            ("rollout_corr/k3_kl", self.k3_kl),
            ("rollout_corr/k3_kl_reverse", self.k3_kl_reverse),
            ("rollout_corr/chi2_token", self.chi2_token),
            ("rollout_corr/rollout_is_mean", self.is_mean),
            ("rollout_corr/rollout_is_eff_sample_size", self.effective_sample_size),
            ("rollout_corr/rollout_is_oob_ratio", self.out_of_bounds),
            ("rollout_corr/unscored_tokens", self.unscored_tokens as f64),
            ("training/rollout_probs_diff_mean", self.probs_diff_mean),
            ("training/rollout_probs_diff_max", self.probs_diff_max),
            ("training/rollout_probs_diff_std", self.probs_diff_std),
            ("training/rollout_actor_probs_pearson_corr", self.probs_pearson),
        ])
    }

    /// A warning when the mean gap passes `warn_above` nats.
    pub fn warning(&self, warn_above: f64) -> Option<GapWarning> {
        (self.mean > warn_above).then_some(GapWarning {
            mean: self.mean,
            max: self.max,
            warn_above,
        })
    }
}

/// The gap passes what was set as harmless.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "the log-probs of sampled tokens differ by {mean:.4} on average (at most {max:.2}) between rollout and trainer, \
     above mismatch.warn_above = {warn_above}: learning may become unstable; rollouts in w4a4_rac with a w4a16 \
     trainer, routing replay or a correction (tis, icepop) make the gap smaller or harmless"
)]
pub struct GapWarning {
    /// Mean of |Δ log-prob|.
    pub mean: f64,
    /// Greatest |Δ log-prob|.
    pub max: f64,
    /// The bound that was passed.
    pub warn_above: f64,
}

/// Mean, deviation and upper tail of some values; all 0 when there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Summary {
    pub(crate) mean: f64,
    pub(crate) std: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Summary {
    pub(crate) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values = values.collect::<Vec<_>>();
        let Some(count) = std::num::NonZeroUsize::new(values.len()) else {
            return Self::default();
        };
        let count = count.get();
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
        values.sort_by(f64::total_cmp);
        Self {
            mean,
            std: if count > 1 {
                (squares / (count - 1) as f64).sqrt()
            } else {
                0.0
            },
            // Nearest rank: the smallest value with at least 99 % of the values at or below it.
            p99: values[(count * 99).div_ceil(100) - 1],
            max: values[count - 1],
        }
    }
}

/// Pearson correlation; 1 when neither side varies or nothing is there, 0 when one of them does not.
fn pearson(pairs: &[(f64, f64)]) -> f64 {
    let count = pairs.len().max(1) as f64;
    let (x_mean, y_mean) = (
        pairs.iter().map(|pair| pair.0).sum::<f64>() / count,
        pairs.iter().map(|pair| pair.1).sum::<f64>() / count,
    );
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for (x, y) in pairs {
        let (x, y) = (x - x_mean, y - y_mean);
        (xx, yy, xy) = (xx + x * x, yy + y * y, xy + x * y);
    }
    match (xx > 0.0, yy > 0.0) {
        (true, true) => xy / (xx.sqrt() * yy.sqrt()),
        (false, false) => 1.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests;
