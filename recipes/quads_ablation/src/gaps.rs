//! The gaps of a series' arms at the end of a warm-up: the same tokens, sampled once in full precision, scored by both sides of
//! every arm, the rollout's by its own engine.
use anyhow::Result;
use burn_nvfp4::Precision;
use burn_quads::{
    mismatch::{Decomposition, Mismatch},
    modules::residual_masks::ResidualMasks,
    sync::sync,
};
use grpo_math::{
    backend::{Policy, Sampler},
    config::Config,
    problems::Problems,
    sampling::{Rollouts, Sampling},
    scoring::{token_log_probs, trainer_side, weights_and_activations},
    seeds,
    session::calibrate,
};
use std::path::Path;

use crate::{
    arms::{ARMS, Arm},
    files::GapsFile,
    results::Gap,
    series::all_settings,
    warm,
};

/// Measures the gaps of arms, by letter, at the end of the warm-up in a folder, under the settings of a series. `None` where it
/// was to stop.
///
/// # Errors
/// When the warm-up has no whole checkpoint, or cannot be sampled.
pub fn measure(
    warmup: &Path,
    name: &str,
    assignments: &[String],
    arms: &[String],
    completions: usize,
    stop: &dyn Fn() -> bool,
) -> Result<Option<GapsFile>> {
    let config = Config::load(None, assignments)?;
    let problems = Problems::draw(&config)?;
    let (policy, warm) = warm::policy(&config, &problems, warmup)?;
    let held_out = problems.more_held_out(completions, "gap problems")?;
    let held_out: Vec<_> = held_out.iter().collect();
    let mut sampling = Sampling::new(&config, &problems)?;
    let seed = seeds::seed(config.run.seed, "gap", 0);
    let rollouts = sampling.rollouts(&trainer_side(&policy, &Precision::High)?, &held_out, seed)?;
    let mut gaps = Vec::new();
    for arm in ARMS.iter().filter(|arm| arms.iter().any(|letter| letter == arm.letter)) {
        if stop() {
            return Ok(None);
        }
        let config = Config::load(None, &of_arm(assignments, arm))?;
        let masks = calibrate(&config, &problems, &policy)?;
        gaps.push(gap(&config, arm, &policy, &masks, &mut sampling, &rollouts)?);
    }
    Ok(Some(GapsFile {
        settings: all_settings(assignments)?,
        warmup: name.into(),
        warmup_steps: warm.warmup_steps,
        warmup_s: warm.elapsed_s,
        completions: rollouts.completions.len(),
        accuracy: rollouts.mean_reward(),
        gaps,
    }))
}

/// Settings of a series under those of an arm.
pub fn of_arm(assignments: &[String], arm: &Arm) -> Vec<String> {
    let own = arm.settings().map(|(key, value)| format!("{key}={value}"));
    assignments.iter().cloned().chain(own).collect()
}

/// The gap of one arm. With routing replay its trainer takes the experts that its rollout chooses for the tokens.
fn gap(
    config: &Config,
    arm: &Arm,
    policy: &Policy,
    masks: &ResidualMasks,
    sampling: &mut Sampling,
    rollouts: &Rollouts,
) -> Result<Gap> {
    let (trainer, rollout) = (&config.learner.precision, &config.rollout.precision);
    let temperature = config.rollout.temperature as f32;
    let (packed, _) = sync(policy, rollout, Some(masks))?;
    let replay = config.rollout.routing_replay;
    let engine = sampling.given(&packed, rollouts, replay)?;
    let scored = |model: &Sampler| token_log_probs(model, &engine, temperature, replay);
    let trainer_log_probs = scored(&trainer_side(policy, trainer)?);
    let engine_log_probs: Vec<f32> = engine.completions.iter().flat_map(|c| c.log_probs.clone()).collect();
    let mismatch = Mismatch::new(&trainer_log_probs, &engine_log_probs);
    let parts = match weights_and_activations(rollout, trainer) {
        None => None,
        Some(mixed) => {
            let (weights, _) = sync(policy, &mixed, Some(masks))?;
            let (weights, precision) = (scored(&weights), scored(&packed));
            Some(Decomposition::new(
                &trainer_log_probs,
                &weights,
                &precision,
                &engine_log_probs,
            ))
        }
    };
    let total = |parts: &Decomposition| residue(parts, &trainer_log_probs, &engine_log_probs);
    let part = |of: fn(&Decomposition) -> &Vec<f64>| parts.as_ref().map(|parts| mean_absolute(of(parts)));
    Ok(Gap {
        arm: arm.letter.into(),
        tokens: mismatch.tokens,
        mean: mismatch.mean,
        p99: mismatch.p99,
        max: mismatch.max,
        weight: part(|parts| &parts.weight),
        activation: part(|parts| &parts.activation),
        numerics: part(|parts| &parts.numerics),
        residue: parts.as_ref().map(total),
    })
}

/// Largest difference of a token between the sum of the parts and the gap itself.
fn residue(parts: &Decomposition, trainer: &[f32], engine: &[f32]) -> f64 {
    let finite = trainer
        .iter()
        .zip(engine)
        .filter(|(a, b)| a.is_finite() && b.is_finite());
    let direct = finite.map(|(trainer, engine)| f64::from(*engine) - f64::from(*trainer));
    let differences = direct.zip(&parts.total).map(|(direct, sum)| (direct - sum).abs());
    differences.fold(0.0, f64::max)
}

fn mean_absolute(values: &[f64]) -> f64 {
    values.iter().map(|value| value.abs()).sum::<f64>() / values.len().max(1) as f64
}
