//! QUADS: reinforcement learning of mixture-of-experts language models on NVFP4 rollouts.
//!
//! Reading order: [`backend`] (operations with straight-through gradients), [`modules`] (layers and the model),
//! [`sync`] (trainer to rollout), [`rollout`] (sampling), [`tasks`] (generated problems), [`dataset`] and [`rewards`]
//! (problems in free text), [`text`] (tokenizers and chat templates), [`checkpoint`] (models in and out), [`grpo`]
//! (learning), [`mismatch`] (how far the two sides differ), [`activation_errors`] (where in the model), [`input_ranges`] (what inference engines ask for besides).
#![warn(missing_docs)]

pub mod activation_errors;
pub mod backend;
pub mod calibrate;
pub mod causal_lm;
pub mod checkpoint;
pub mod dataset;
mod explain;
pub mod grpo;
mod host;
pub mod input_ranges;
pub mod layer_backend;
pub mod mismatch;
pub mod modules;
pub mod rewards;
pub mod rollout;
pub mod sync;
pub mod tasks;
pub mod text;
pub mod token_log_probs;

pub use backend::QuadsBackend;
pub use burn_nvfp4::{Granularity, Precision, Rac, Selection};
pub use explain::explain;
pub use modules::{
    experts::{QuadsExperts, QuadsExpertsConfig},
    linear::{OuterScaleGroup, QuadsLinear, QuadsLinearConfig},
    moe::QuadsMoe,
    moe_config::QuadsMoeConfig,
    straight_through::Backward,
};
