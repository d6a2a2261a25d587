//! Parts of the `grpo_math` recipe.
//!
//! Reading order: [`start`] (all that can refuse a run), [`run`] (a run from its plan to its last table), [`warmup`] (or
//! [`warm_start`]) and [`reinforce`] (its two stages), [`finish`] (the last table); then what they are made of: [`config`], [`problems`]
//! and [`language`] with [`text`],
//! [`sampling`] and [`scoring`], [`session`] with [`checkpoints`] and [`metrics`], [`charts`], [`plots`] and [`report`]; and
//! [`gap`], a measurement of its own, which [`gap_export`] writes down for other programs, and
//! for [`drift`], another build of this one.
#![warn(missing_docs)]
pub mod atomic_write;
pub mod backend;
pub mod charts;
pub mod checkpoints;
pub mod cli;
pub mod config;
pub mod console;
pub mod drift;
pub mod file_lock;
pub mod fingerprint;
pub mod finish;
pub mod gap;
pub mod gap_export;
pub mod interrupt;
pub mod language;
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
pub mod run_lock;
pub mod sampling;
pub mod scoring;
pub mod seeds;
pub mod session;
pub mod start;
pub mod step_lines;
pub mod text;
pub mod times;
pub mod warm_start;
pub mod warmup;
