//! Group relative policy optimization.
//!
//! Reading order: [`batch`] (what a rollout hands over), [`advantage`] (how much better than its group a completion
//! did), [`correction`] (rollouts of another policy), [`loss`] (the six losses), [`optimizer`] and [`schedule`] (one
//! update), [`config`], [`learner`] (a whole step), [`supervised`] (the warm-up before).
//!
//! The parts can be used alone. Two completions of one prompt, of two tokens and one:
//!
//! ```
//! use burn_quads::grpo::{LossBatch, LossConfig, LossKind, Normalizer, ScaleRewards, group_advantages};
//!
//! let advantages = group_advantages(&[1.0, 0.0], &[0, 0], 2, ScaleRewards::None)?.values;
//! let batch = LossBatch {
//!     lengths: &[2, 1],
//!     mask: &[true; 3],
//!     advantages: &advantages,
//!     log_probs: &[-0.5, -1.0, -2.0],
//!     old_log_probs: None,
//!     reference_log_probs: None,
//!     rollout_log_probs: None,
//!     weights: None,
//! };
//! let output = LossConfig::new(LossKind::Dapo).evaluate(&batch, &Normalizer::of(&batch, 2));
//! // −(0.5 + 0.5 − 0.5) / 3; a step down this gradient makes the first completion likelier, the second less likely.
//! assert!((output.loss + 0.5 / 3.0).abs() < 1e-9);
//! assert!(output.gradient[0] < 0.0 && output.gradient[2] > 0.0);
//! # Ok::<(), burn_quads::grpo::GrpoError>(())
//! ```
pub mod advantage;
pub mod batch;
pub mod config;
pub mod correction;
mod error;
mod gradient;
pub mod learner;
pub mod loss;
mod loss_stats;
mod metrics;
pub mod optimizer;
pub mod schedule;
mod step_metrics;
pub mod supervised;
#[cfg(test)]
mod test_model;

pub use advantage::{Advantages, ScaleRewards, group_advantages};
pub use batch::{Overlong, OverlongMode, RolloutBatch};
pub use config::{GrpoConfig, OldLogProbs};
pub use correction::{Correction, CorrectionMode, CorrectionWeights};
pub use error::GrpoError;
pub use learner::{Learner, StepOutput};
pub use loss::{LossBatch, LossConfig, LossKind, LossOutput, Normalizer};
pub use loss_stats::LossStats;
pub use metrics::Metrics;
pub use optimizer::{AdamWOptimizer, OptimizerConfig, SkippedSteps, Update};
pub use schedule::{LrSchedule, LrShape};
pub use supervised::{SupervisedLearner, SupervisedOutput};
