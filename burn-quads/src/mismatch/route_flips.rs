//! Tokens that chose other experts on the two sides.
use std::collections::BTreeSet;

use crate::{
    grpo::{GrpoError, Metrics},
    token_log_probs::RowRouting,
};

/// How often two forward passes over the same tokens chose different experts. The order of the experts does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouteFlips {
    /// Decisions (a token in a layer) compared.
    pub decisions: usize,
    /// Fraction of decisions that differ in one expert at least.
    pub flip_rate: f64,
    /// Fraction of tokens with a flip in one layer at least.
    pub token_flip_rate: f64,
}

impl RouteFlips {
    /// Compares the routings of the same rows. Positions that only one side has, and those it marks with -1, are left
    /// out. Sides with different numbers of rows, layers or experts a token are refused.
    pub fn new(trainer: &[RowRouting], rollout: &[RowRouting]) -> Result<Self, GrpoError> {
        if trainer.len() != rollout.len() {
            return Err(GrpoError::batch(
                "expert_ids",
                format!("{} rows", trainer.len()),
                rollout.len(),
            ));
        }
        let (mut decisions, mut flips, mut tokens, mut flipped_tokens) = (0, 0, 0, 0);
        for (row, (trainer, rollout)) in trainer.iter().zip(rollout).enumerate() {
            let shape = |routing: &RowRouting| (routing.layers.len(), routing.top_k);
            if shape(trainer) != shape(rollout) {
                return Err(GrpoError::batch(
                    format!("expert_ids[{row}]"),
                    format!("(layers, top_k) {:?}, as the model has", shape(trainer)),
                    format!("{:?}", shape(rollout)),
                ));
            }
            let top_k = trainer.top_k.max(1);
            let positions = (trainer.layers.iter().chain(&rollout.layers))
                .map(|layer| layer.len() / top_k)
                .min()
                .unwrap_or(0);
            for position in 0..positions {
                let ids = position * top_k..(position + 1) * top_k;
                let (mut compared, mut differ) = (0, 0);
                for (trainer, rollout) in trainer.layers.iter().zip(&rollout.layers) {
                    let (trainer, rollout) = (&trainer[ids.clone()], &rollout[ids.clone()]);
                    if trainer[0] < 0 || rollout[0] < 0 {
                        continue;
                    }
                    compared += 1;
                    let set = |ids: &[i32]| ids.iter().copied().collect::<BTreeSet<_>>();
                    differ += (set(trainer) != set(rollout)) as usize;
                }
                decisions += compared;
                flips += differ;
                tokens += (compared > 0) as usize;
                flipped_tokens += (differ > 0) as usize;
            }
        }
        Ok(Self {
            decisions,
            flip_rate: flips as f64 / decisions.max(1) as f64,
            token_flip_rate: flipped_tokens as f64 / tokens.max(1) as f64,
        })
    }

    /// The metrics by name.
    pub fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::new();
        metrics.push("mismatch/route_flip_rate", self.flip_rate);
        metrics.push("mismatch/route_flip_token_rate", self.token_flip_rate);
        metrics
    }
}
