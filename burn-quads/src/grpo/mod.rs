//! Group relative policy optimization.
//!
//! Reading order: [`batch`] (what a rollout hands over), [`advantage`] (how much better than its group a completion
//! did), [`correction`] (rollouts of another policy), [`loss`] (the six losses), [`optimizer`] and [`schedule`] (one
//! update), [`config`], [`learner`] (a whole step), [`supervised`] (the warm-up before).
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
pub use config::GrpoConfig;
pub use correction::{Correction, CorrectionMode, CorrectionWeights};
pub use error::GrpoError;
pub use learner::{Learner, StepOutput};
pub use loss::{LossBatch, LossConfig, LossKind, LossOutput, Normalizer};
pub use loss_stats::LossStats;
pub use metrics::Metrics;
pub use optimizer::{AdamWOptimizer, OptimizerConfig, SkippedSteps, Update};
pub use schedule::{LrSchedule, LrShape};
pub use supervised::{SupervisedLearner, SupervisedOutput};
