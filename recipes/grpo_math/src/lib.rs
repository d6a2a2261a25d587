//! Parts of the `grpo_math` recipe.
//!
//! Reading order: [`run`] (a run from its plan to its last table), [`warmup`] and [`reinforce`] (its two stages), [`finish`]
//! (the last table); then what they are made of: [`config`], [`problems`], [`sampling`], [`session`] with [`checkpoints`] and
//! [`metrics`], [`plots`] and [`report`]; and [`gap`], a measurement of its own.
#![warn(missing_docs)]
pub mod atomic_write;
pub mod backend;
pub mod checkpoints;
pub mod cli;
pub mod config;
pub mod finish;
pub mod gap;
pub mod interrupt;
pub mod metrics;
pub mod optimizer_state;
pub mod peak_memory;
pub mod plan;
pub mod plots;
pub mod problems;
pub mod progress;
pub mod reinforce;
pub mod report;
pub mod results;
pub mod run;
pub mod run_folder;
pub mod sampling;
pub mod seeds;
pub mod session;
pub mod warmup;
