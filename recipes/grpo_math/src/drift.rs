//! Engine drift: how far two builds of this program, on two devices, differ on the same policy and the same tokens.
//!
//! One build exports a measured gap ([`gap_export`](crate::gap_export)); another scores the exported tokens by the exported
//! weights in every precision of its pairings, and compares its log-probs token by token. What differs is arithmetic alone:
//! codes and scales are the same to the bit, sums are not.
use anyhow::{Context, Result, bail};
use burn_nvfp4::Precision;
use burn_quads::{
    checkpoint::ModelFolder,
    mismatch::Mismatch,
    modules::residual_masks::ResidualMasks,
    rollout::{Completion, FinishReason},
    sync::sync,
};
use serde::{Deserialize, Serialize};
use std::{fmt, path::Path};

use crate::{
    backend::{DEVICE, Policy},
    gap_export::{GAP, MASKS, MODEL},
    results::nats,
    sampling::Rollouts,
    scoring::{both_sides, trainer_side},
};

/// What is read of `gap.json`.
#[derive(Deserialize)]
struct GapFile {
    device: String,
    step: usize,
    routing_replay: bool,
    temperature: f32,
    completions: Vec<CompletionTokens>,
    pairings: Vec<PairingLogProbs>,
}

#[derive(Deserialize)]
struct CompletionTokens {
    prompt: Vec<u32>,
    completion: Vec<u32>,
    reward: f32,
}

#[derive(Deserialize)]
struct PairingLogProbs {
    pairing: String,
    trainer: String,
    rollout: String,
    mean: f64,
    trainer_log_probs: Vec<Vec<Option<f32>>>,
    rollout_log_probs: Vec<Vec<Option<f32>>>,
}

/// How far one side of a pairing is from itself elsewhere.
#[derive(Clone, Debug, Serialize)]
pub struct SideDrift {
    /// `trainer`: dense weights, rounded on the way; `rollout`: packed.
    pub side: &'static str,
    /// Its precision.
    pub precision: String,
    /// Mean |log-prob here − log-prob there| in nats.
    pub mean: f64,
    /// Its 99th percentile.
    pub p99: f64,
    /// Its largest value.
    pub max: f64,
}

/// The gap of one pairing on both devices.
#[derive(Clone, Debug, Serialize)]
pub struct PairingDrift {
    /// Name of the pairing.
    pub pairing: String,
    /// Mean |Δ log-prob| of its two sides here, in nats.
    pub gap_here: f64,
    /// The same there.
    pub gap_there: f64,
}

/// The drift between this build's device and that of an export.
#[derive(Clone, Debug, Serialize)]
pub struct DriftReport {
    /// This build's.
    pub device_here: &'static str,
    /// The exporter's.
    pub device_there: String,
    /// GRPO step of the policy.
    pub step: usize,
    /// Tokens compared.
    pub tokens: usize,
    /// By side and precision; a side that several pairings share is there once.
    pub sides: Vec<SideDrift>,
    /// By pairing.
    pub pairings: Vec<PairingDrift>,
}

/// Scores the tokens of an export on this build's device.
///
/// # Errors
/// A file of the export is missing or not what it should be: the error names it.
pub fn measure(export: &Path) -> Result<DriftReport> {
    let path = export.join(GAP);
    let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let file: GapFile = serde_json::from_slice(&text)
        .with_context(|| format!("{} is not what grpo_math gap --export writes", path.display()))?;
    let model = ModelFolder::open(export.join(MODEL))?;
    let vocabulary = model.config().vocab_size;
    check(&file, vocabulary).with_context(|| format!("{} is damaged", path.display()))?;
    let policy: Policy = model.load(&Default::default(), |_| {})?;
    let masks = ResidualMasks::load(&export.join(MASKS))?;
    let rollouts = Rollouts {
        prompts: file.completions.iter().map(|row| row.prompt.clone()).collect(),
        completions: (file.completions.iter().enumerate())
            .map(|(prompt, row)| Completion {
                prompt,
                tokens: row.completion.clone(),
                log_probs: Vec::new(),
                finish: FinishReason::Length,
                expert_ids: None,
            })
            .collect(),
        rewards: file.completions.iter().map(|row| row.reward).collect(),
    };

    let mut report = DriftReport {
        device_here: DEVICE,
        device_there: file.device,
        step: file.step,
        tokens: rollouts.tokens(),
        sides: Vec::new(),
        pairings: Vec::new(),
    };
    for pairing in file.pairings {
        let precision = |text: &str| -> Result<Precision> {
            let parsed = text.parse();
            parsed.with_context(|| format!("{}: the precision {text:?} of {:?}", path.display(), pairing.pairing))
        };
        let (trainer, rollout) = (precision(&pairing.trainer)?, precision(&pairing.rollout)?);
        let (packed, _) = sync(&policy, &rollout, Some(&masks))?;
        // With the masks, should the trainer's precision be one that compensates.
        let trained = trainer_side(&policy.clone().with_residual_masks(&masks)?, &trainer)?;
        let here = both_sides(&trained, &packed, &rollouts, file.temperature, file.routing_replay);
        report.pairings.push(PairingDrift {
            gap_here: here.mismatch().mean,
            gap_there: pairing.mean,
            pairing: pairing.pairing,
        });
        for (side, precision, here, there) in [
            ("trainer", pairing.trainer, here.trainer, pairing.trainer_log_probs),
            ("rollout", pairing.rollout, here.rollout, pairing.rollout_log_probs),
        ] {
            let known = report.sides.iter().any(|s| s.side == side && s.precision == precision);
            // With routing replay a trainer's log-probs depend on its rollout.
            if known && !(file.routing_replay && side == "trainer") {
                continue;
            }
            let there: Vec<f32> = there.iter().flatten().map(|x| x.unwrap_or(f32::NAN)).collect();
            let drift = Mismatch::new(&here.concat(), &there);
            report.sides.push(SideDrift {
                side,
                precision,
                mean: drift.mean,
                p99: drift.p99,
                max: drift.max,
            });
        }
    }
    Ok(report)
}

/// Whether every token has its log-probs and every id is one of the model's.
fn check(file: &GapFile, vocabulary: usize) -> Result<()> {
    for (at, row) in file.completions.iter().enumerate() {
        if row.prompt.is_empty() {
            bail!("completion {at} has an empty prompt");
        }
        if let Some(id) = row
            .prompt
            .iter()
            .chain(&row.completion)
            .find(|id| **id as usize >= vocabulary)
        {
            bail!("completion {at} has the token {id}, and the model a vocabulary of {vocabulary}");
        }
    }
    for pairing in &file.pairings {
        for (side, rows) in [
            ("trainer", &pairing.trainer_log_probs),
            ("rollout", &pairing.rollout_log_probs),
        ] {
            let expected = file.completions.iter().map(|row| row.completion.len());
            if !rows.iter().map(Vec::len).eq(expected) {
                bail!("{side}_log_probs of {:?} are not one a token", pairing.pairing);
            }
        }
    }
    Ok(())
}

impl fmt::Display for DriftReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "|Δ log-prob| of {} and {} on {} tokens of the policy at GRPO step {}, in nats:\n",
            self.device_here, self.device_there, self.tokens, self.step
        )?;
        writeln!(
            f,
            "  {:<8} {:<34} {:>8} {:>8} {:>8}",
            "side", "precision", "mean", "99th p.", "largest"
        )?;
        for side in &self.sides {
            let [mean, p99, max] = [side.mean, side.p99, side.max].map(nats);
            writeln!(
                f,
                "  {:<8} {:<34} {mean:>8} {p99:>8} {max:>8}",
                side.side, side.precision
            )?;
        }
        writeln!(f, "\nMean gap of trainer and rollout:\n")?;
        let (here, there) = (format!("on {}", self.device_here), format!("on {}", self.device_there));
        writeln!(f, "  {:<28} {here:>10} {there:>10}", "pairing")?;
        for pairing in &self.pairings {
            let [here, there] = [pairing.gap_here, pairing.gap_there].map(nats);
            writeln!(f, "  {:<28} {here:>10} {there:>10}", pairing.pairing)?;
        }
        Ok(())
    }
}
