//! The log-prob gap of pairings of trainer and rollout: the same completions, sampled once from the policy in high
//! precision, scored by both sides of each pairing.
use anyhow::Result;
use burn::module::AutodiffModule;
use burn_nvfp4::{Precision, Rac};
use burn_quads::{
    mismatch::Mismatch,
    modules::residual_masks::ResidualMasks,
    sync::sync,
    tasks::Split,
    token_log_probs::{ScoreOptions, TokenRow, score},
};
use kernels_cubecl::{Granularity, Selection};
use serde::Serialize;
use std::fmt;

use crate::{
    backend::{Policy, Sampler},
    checkpoints::Checkpoint,
    config::Config,
    problems::Problems,
    results::nats,
    sampling::{Rollouts, Sampling},
    seeds,
    session::{calibrate, read_policy},
};

/// Log-probs of the completions' tokens, completion after completion.
pub fn token_log_probs(model: &Sampler, rollouts: &Rollouts, temperature: f32) -> Vec<f32> {
    let rows: Vec<TokenRow<'_>> = rollouts
        .prompts
        .iter()
        .zip(&rollouts.completions)
        .map(|(prompt, completion)| TokenRow {
            prompt,
            completion: &completion.tokens,
            routing: None,
        })
        .collect();
    let options = ScoreOptions {
        temperature,
        ..ScoreOptions::default()
    };
    score(model, &rows, &options).log_probs.concat()
}

/// The trainer's model in a precision, for scoring without gradients: f32 masters, rounded on the way.
pub fn trainer_side(policy: &Policy, precision: &Precision) -> Result<Sampler> {
    Ok(policy.valid().with_precision(precision.clone())?)
}

/// A trainer and a rollout.
#[derive(Clone, Debug)]
pub struct Pairing {
    /// What it is called.
    pub name: &'static str,
    /// Precision of the trainer.
    pub trainer: Precision,
    /// Precision of the rollout.
    pub rollout: Precision,
}

/// The pairings that the method is compared with, from worst to best.
pub fn pairings() -> Vec<Pairing> {
    let paper = Rac {
        selection: Selection::Calibrated,
        granularity: Granularity::Channel,
        fraction: 0.5,
    };
    let all = Rac {
        selection: Selection::All,
        ..paper
    };
    let pairing = |name, trainer, rollout| Pairing { name, trainer, rollout };
    vec![
        pairing("naive", Precision::High, Precision::W4A4),
        pairing("fp8", Precision::High, Precision::Fp8),
        pairing("qat without rac", Precision::W4A16, Precision::W4A4),
        pairing(
            "quads, half of the channels",
            Precision::W4A16,
            Precision::W4A4Rac(paper),
        ),
        pairing("quads, all channels", Precision::W4A16, Precision::W4A4Rac(all)),
        pairing("high on both sides", Precision::High, Precision::High),
    ]
}

/// The gap of one pairing.
#[derive(Clone, Debug, Serialize)]
pub struct PairingGap {
    /// Name of the pairing.
    pub pairing: &'static str,
    /// Precision of the trainer.
    pub trainer: String,
    /// Precision of the rollout.
    pub rollout: String,
    /// Mean |Δ log-prob| in nats.
    pub mean: f64,
    /// Its 99th percentile.
    pub p99: f64,
    /// Its largest value.
    pub max: f64,
    /// KL(rollout ‖ trainer), k3 estimator.
    pub k3_kl: f64,
}

/// The gaps of all pairings.
#[derive(Clone, Debug, Serialize)]
pub struct GapReport {
    /// GRPO step of the policy.
    pub step: usize,
    /// Completions.
    pub completions: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Share of right ones.
    pub accuracy: f64,
    /// By pairing.
    pub gaps: Vec<PairingGap>,
}

/// Samples completions of held-out problems from a checkpoint's policy in high precision, and measures the gaps on them.
pub fn measure_checkpoint(
    config: &Config,
    checkpoint: &Checkpoint,
    step: usize,
    completions: usize,
) -> Result<GapReport> {
    let problems = Problems::draw(config)?;
    let (policy, _) = read_policy(config, &problems, checkpoint)?;
    let masks = calibrate(config, &problems, &policy)?;
    let mut rng = seeds::stream(config.run.seed, "gap problems", 0);
    let held_out = problems.mixture.distinct(Split::HeldOut, completions, &mut rng)?;
    let held_out: Vec<_> = held_out.iter().collect();
    let mut sampling = Sampling::new(config, &problems)?;
    let seed = seeds::seed(config.run.seed, "gap", step as u64);
    let rollouts = sampling.rollouts(&trainer_side(&policy, &Precision::High)?, &held_out, seed)?;
    measure(&policy, step, &masks, &rollouts, config.rollout.temperature as f32)
}

/// Scores completions, sampled from `policy` in high precision, by both sides of every pairing.
fn measure(
    policy: &Policy,
    step: usize,
    masks: &ResidualMasks,
    rollouts: &Rollouts,
    temperature: f32,
) -> Result<GapReport> {
    let mut gaps = Vec::new();
    for Pairing { name, trainer, rollout } in pairings() {
        let (packed, _) = sync(policy, &rollout, Some(masks))?;
        let mismatch = Mismatch::new(
            &token_log_probs(&trainer_side(policy, &trainer)?, rollouts, temperature),
            &token_log_probs(&packed, rollouts, temperature),
        );
        gaps.push(PairingGap {
            pairing: name,
            trainer: trainer.to_string(),
            rollout: rollout.to_string(),
            mean: mismatch.mean,
            p99: mismatch.p99,
            max: mismatch.max,
            k3_kl: mismatch.k3_kl,
        });
    }
    Ok(GapReport {
        step,
        completions: rollouts.completions.len(),
        tokens: rollouts.tokens(),
        accuracy: rollouts.mean_reward(),
        gaps,
    })
}

impl GapReport {
    /// Mean gap of a pairing over that of the naive one.
    pub fn share_of_naive(&self, pairing: &str) -> Option<f64> {
        let mean = |name: &str| Some(self.gaps.iter().find(|gap| gap.pairing == name)?.mean);
        Some(mean(pairing)? / mean("naive")?)
    }
}

impl fmt::Display for GapReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} completions ({} tokens) of the policy at GRPO step {}, sampled once in high precision; {:.1} % are right.",
            self.completions,
            self.tokens,
            self.step,
            100.0 * self.accuracy
        )?;
        writeln!(f, "|Δ log-prob| of trainer and rollout on these tokens, in nats:\n")?;
        writeln!(
            f,
            "  {:<28} {:<8} {:<34} {:>8} {:>9} {:>8} {:>9}",
            "pairing", "trainer", "rollout", "mean", "of naive", "99th p.", "largest"
        )?;
        for gap in &self.gaps {
            let share = self
                .share_of_naive(gap.pairing)
                .map(|share| format!("{:.1} %", 100.0 * share));
            writeln!(
                f,
                "  {:<28} {:<8} {:<34} {:>8} {:>9} {:>8} {:>9}",
                gap.pairing,
                gap.trainer,
                gap.rollout,
                nats(gap.mean),
                share.unwrap_or_default(),
                nats(gap.p99),
                nats(gap.max)
            )?;
        }
        Ok(())
    }
}
