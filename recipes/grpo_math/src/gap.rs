//! The log-prob gap of pairings of trainer and rollout: the same completions, sampled once from the policy in high
//! precision, scored by both sides of each pairing.
use anyhow::{Result, bail};
use burn_nvfp4::{Precision, Rac};
use burn_quads::{modules::residual_masks::ResidualMasks, sync::sync};
use kernels_cubecl::{Granularity, Selection};
use serde::Serialize;
use std::fmt;

use crate::{
    backend::Policy,
    checkpoints::Checkpoint,
    config::Config,
    problems::Problems,
    results::nats,
    sampling::{Rollouts, Sampling},
    scoring::{BothSides, both_sides, trainer_side},
    seeds,
    session::{calibrate, check_problems, read_policy},
};

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
    /// Whether each trainer took the experts that its rollout chose.
    pub routing_replay: bool,
    /// Completions.
    pub completions: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Share of right ones.
    pub accuracy: f64,
    /// By pairing.
    pub gaps: Vec<PairingGap>,
}

/// Completions that are sampled when no number is asked for and there are as many held-out problems.
pub const COMPLETIONS: usize = 512;

/// Gaps, and what they were measured on.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The gaps.
    pub report: GapReport,
    /// The policy, in f32.
    pub policy: Policy,
    /// Its calibrated residual masks.
    pub masks: ResidualMasks,
    /// The completions.
    pub rollouts: Rollouts,
    /// Log-probs of their tokens, by pairing.
    pub log_probs: Vec<BothSides>,
    /// What the logits were divided by.
    pub temperature: f32,
}

/// Samples completions of held-out problems from a checkpoint's policy in high precision, and measures the gaps on them.
/// Without a number of `completions` there are [`COMPLETIONS`], or one for each held-out problem that the task has.
pub fn measure_checkpoint(
    config: &Config,
    problems: &Problems,
    checkpoint: &Checkpoint,
    step: usize,
    completions: Option<usize>,
) -> Result<Measurement> {
    check_problems(config, problems, checkpoint)?;
    let (policy, _) = read_policy(config, problems, checkpoint)?;
    let masks = calibrate(config, problems, &policy)?;
    let held_out = problems.more_held_out(completions.unwrap_or(COMPLETIONS), "gap problems")?;
    if let Some(asked) = completions.filter(|asked| *asked > held_out.len()) {
        bail!(
            "--completions {asked}: expected at most {}, all held-out problems of {}",
            held_out.len(),
            problems.names()
        );
    }
    let held_out: Vec<_> = held_out.iter().collect();
    let mut sampling = Sampling::new(config, problems)?;
    let seed = seeds::seed(config.run.seed, "gap", step as u64);
    let rollouts = sampling.rollouts(&trainer_side(&policy, &Precision::High)?, &held_out, seed)?;
    measure(config, policy, step, masks, rollouts)
}

/// Scores completions, sampled from `policy` in high precision, by both sides of every pairing.
fn measure(
    config: &Config,
    policy: Policy,
    step: usize,
    masks: ResidualMasks,
    rollouts: Rollouts,
) -> Result<Measurement> {
    let (temperature, replay) = (config.rollout.temperature as f32, config.rollout.routing_replay);
    let (mut gaps, mut log_probs) = (Vec::new(), Vec::new());
    for Pairing { name, trainer, rollout } in pairings() {
        let (packed, _) = sync(&policy, &rollout, Some(&masks))?;
        let sides = both_sides(
            &trainer_side(&policy, &trainer)?,
            &packed,
            &rollouts,
            temperature,
            replay,
        );
        let mismatch = sides.mismatch();
        gaps.push(PairingGap {
            pairing: name,
            trainer: trainer.to_string(),
            rollout: rollout.to_string(),
            mean: mismatch.mean,
            p99: mismatch.p99,
            max: mismatch.max,
            k3_kl: mismatch.k3_kl,
        });
        log_probs.push(sides);
    }
    let report = GapReport {
        step,
        routing_replay: replay,
        completions: rollouts.completions.len(),
        tokens: rollouts.tokens(),
        accuracy: rollouts.mean_reward(),
        gaps,
    };
    Ok(Measurement {
        report,
        policy,
        masks,
        rollouts,
        log_probs,
        temperature,
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
        let replay = match self.routing_replay {
            true => ", each trainer through its rollout's experts (rollout.routing_replay)",
            false => "",
        };
        writeln!(
            f,
            "|Δ log-prob| of trainer and rollout on these tokens, in nats{replay}:\n"
        )?;
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
