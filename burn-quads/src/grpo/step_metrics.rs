//! The numbers that a step leaves in the log.
use super::{Advantages, GrpoConfig, LossKind, LossStats, Metrics, RolloutBatch, Update};

/// What happened in a step, update by update.
#[derive(Default)]
pub(super) struct StepRecord {
    pub(super) stats: LossStats,
    /// Minibatches without a row that could move a parameter.
    pub(super) empty_updates: usize,
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
}

impl StepRecord {
    pub(super) fn update(&mut self, loss: f64, update: Update) {
        if let Update::Applied { grad_norm } = update {
            self.losses.push(loss);
            self.grad_norms.push(grad_norm);
        }
    }

    /// Names of verl and TRL where these have one; which of them are there depends on the settings alone.
    pub(super) fn metrics(
        &self,
        config: &GrpoConfig,
        batch: &RolloutBatch,
        advantages: &Advantages,
        entropies: &[Vec<f32>],
    ) -> Metrics {
        let stats = &self.stats;
        let updates = self.losses.len();
        let scored = batch
            .rewards
            .iter()
            .filter(|reward| !reward.is_nan())
            .map(|&reward| reward as f64);
        let (reward_mean, reward_std) = mean_and_std(&scored.collect::<Vec<_>>());
        let lengths = batch
            .completions
            .iter()
            .map(|tokens| tokens.len() as f64)
            .collect::<Vec<_>>();
        let truncated = batch
            .truncated
            .iter()
            .map(|&truncated| truncated as u8 as f64)
            .collect::<Vec<_>>();
        let entropies = entropies.concat().into_iter().map(f64::from).collect::<Vec<_>>();
        // Over a step's updates the loss is a mean and its KL term still a sum.
        let kl_loss = stats.kl_loss() / updates.max(1) as f64;

        let mut metrics = Metrics::from([
            ("reward/mean", reward_mean),
            ("reward/std", reward_std),
            ("reward/missing", advantages.missing_rewards as f64),
            ("frac_reward_zero_std", advantages.frac_reward_zero_std),
            ("response_length/mean", mean_and_std(&lengths).0),
            ("response_length/max", lengths.iter().copied().fold(0.0, f64::max)),
            ("response_length/clip_ratio", mean_and_std(&truncated).0),
            (
                "actor/pg_loss",
                mean_and_std(&self.losses).0 - config.loss.beta as f64 * kl_loss,
            ),
        ]);
        if config.loss.beta > 0.0 {
            metrics.push("actor/kl_loss", kl_loss);
            metrics.push("actor/kl", stats.kl());
        }
        metrics.push("actor/entropy", mean_and_std(&entropies).0);
        metrics.push("actor/ppo_kl", stats.ppo_kl());
        if config.loss.kind == LossKind::Cispo {
            metrics.push("actor/pg_clipfrac", stats.cispo_clip_ratio());
            metrics.push("cispo_clip_ratio", stats.cispo_clip_ratio());
        } else {
            metrics.push("actor/pg_clipfrac", stats.clip_region_mean());
            metrics.push("actor/pg_clipfrac_lower", stats.clip_delta_mean());
            metrics.push("clip_ratio/low_mean", stats.clip_low_mean());
            metrics.push("clip_ratio/low_min", stats.clip_low_min());
            metrics.push("clip_ratio/high_mean", stats.clip_high_mean());
            metrics.push("clip_ratio/high_max", stats.clip_high_max());
        }
        if config.loss.off_policy_mask_threshold.is_some() {
            metrics.push("actor/off_policy_rows", stats.off_policy_rows() as f64);
        }
        metrics.push("actor/grad_norm", mean_and_std(&self.grad_norms).0);
        metrics.push(
            "actor/grad_norm_max",
            self.grad_norms.iter().copied().fold(0.0, f64::max),
        );
        metrics.push("actor/updates", updates as f64);
        metrics.push("actor/empty_updates", self.empty_updates as f64);
        metrics
    }
}

/// Both 0 for no values; the deviation is the sample's.
fn mean_and_std(values: &[f64]) -> (f64, f64) {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, (squares / (count - 1.0).max(1.0)).sqrt())
}
