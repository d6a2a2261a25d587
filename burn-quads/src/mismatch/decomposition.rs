//! The gap in parts: what quantized weights, quantized activations and the engine's arithmetic do to a log-prob.
use super::Summary;
use crate::grpo::Metrics;

/// Parts of `δ = log-prob by the rollout engine − log-prob by the trainer`, a token each.
///
/// With trainer precision (Wt, At), rollout precision (Wr, Ar) and `lp` by one engine unless said:
///
/// ```text
/// δ_weight = lp(Wr, At) − lp(Wt, At)
/// δ_act    = lp(Wr, Ar) − lp(Wr, At)
/// δ_num    = lp_rollout_engine(Wr, Ar) − lp(Wr, Ar)
/// δ        = δ_weight + δ_act + δ_num
/// ```
///
/// `δ` is defined as the sum, in f64 and in this order; it is `lp_rollout_engine − lp(Wt, At)` up to a rounding of f64
/// (the log-probs are f32). Tokens where one of the four is not finite are left out of all fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decomposition {
    /// From the weights.
    pub weight: Vec<f64>,
    /// From the activations.
    pub activation: Vec<f64>,
    /// From the engine: order of sums, caches, batch shapes.
    pub numerics: Vec<f64>,
    /// The whole gap.
    pub total: Vec<f64>,
    /// Tokens left out.
    pub unscored_tokens: usize,
}

impl Decomposition {
    /// Splits the gap of the same sampled tokens: `trainer` is lp(Wt, At), `rollout_weights` lp(Wr, At),
    /// `rollout_precision` lp(Wr, Ar), `rollout_engine` what the engine returned while sampling.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn new(trainer: &[f32], rollout_weights: &[f32], rollout_precision: &[f32], rollout_engine: &[f32]) -> Self {
        let tokens = trainer.len();
        assert!(
            [rollout_weights, rollout_precision, rollout_engine]
                .iter()
                .all(|lp| lp.len() == tokens),
            "the four lists of log-probs score the same {tokens} tokens"
        );
        let mut parts = Self::default();
        for token in 0..tokens {
            let lp = [trainer, rollout_weights, rollout_precision, rollout_engine].map(|lp| lp[token] as f64);
            if lp.iter().any(|lp| !lp.is_finite()) {
                parts.unscored_tokens += 1;
                continue;
            }
            let (weight, activation, numerics) = (lp[1] - lp[0], lp[2] - lp[1], lp[3] - lp[2]);
            parts.weight.push(weight);
            parts.activation.push(activation);
            parts.numerics.push(numerics);
            parts.total.push(weight + activation + numerics);
        }
        parts
    }

    /// Mean, 99th percentile and maximum of the absolute value of each part.
    pub fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::new();
        for (names, part) in [
            (
                [
                    "mismatch/delta_weight/mean",
                    "mismatch/delta_weight/p99",
                    "mismatch/delta_weight/max",
                ],
                &self.weight,
            ),
            (
                [
                    "mismatch/delta_act/mean",
                    "mismatch/delta_act/p99",
                    "mismatch/delta_act/max",
                ],
                &self.activation,
            ),
            (
                [
                    "mismatch/delta_num/mean",
                    "mismatch/delta_num/p99",
                    "mismatch/delta_num/max",
                ],
                &self.numerics,
            ),
            (
                ["mismatch/delta/mean", "mismatch/delta/p99", "mismatch/delta/max"],
                &self.total,
            ),
        ] {
            let summary = Summary::of(part.iter().map(|delta| delta.abs()));
            for (name, value) in names.into_iter().zip([summary.mean, summary.p99, summary.max]) {
                metrics.push(name, value);
            }
        }
        metrics
    }
}
