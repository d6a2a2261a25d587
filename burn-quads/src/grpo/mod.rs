//! Group relative policy optimization.
//!
//! Reading order: [`batch`] (what a rollout hands over), [`advantage`] (how much better than its group a completion
//! did), [`correction`] (rollouts of another policy), [`loss`] (the six losses).
pub mod advantage;
pub mod batch;
pub mod correction;
mod error;
pub mod loss;
mod loss_stats;
mod metrics;

pub use advantage::{Advantages, ScaleRewards, group_advantages};
pub use batch::{Overlong, OverlongMode, RolloutBatch};
pub use correction::{Correction, CorrectionMode, CorrectionWeights};
pub use error::GrpoError;
pub use loss::{LossBatch, LossConfig, LossKind, LossOutput, Normalizer};
pub use loss_stats::LossStats;
pub use metrics::Metrics;
