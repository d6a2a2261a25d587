//! The policy that the arms of a seed start from.
use anyhow::Result;
use grpo_math::{
    backend::Policy,
    checkpoints::{Checkpoints, RunState},
    config::Config,
    metrics::Position,
    problems::Problems,
    reinforce::with_outliers,
    run_folder::RunFolder,
    session::read_policy,
};
use std::path::Path;

/// Reads what a warm-up ended with, and makes of it what an arm begins with; with the state of the warm-up.
///
/// # Errors
/// When the warm-up has no whole checkpoint.
pub fn policy(config: &Config, problems: &Problems, warmup: &Path) -> Result<(Policy, RunState)> {
    let (folder, _) = RunFolder::open(warmup, &[])?;
    let checkpoint = Checkpoints::new(folder.checkpoints()).read(Position::Grpo(0))?;
    let (policy, _) = read_policy(config, problems, &checkpoint)?;
    Ok((with_outliers(config, policy, 0)?, checkpoint.state))
}
