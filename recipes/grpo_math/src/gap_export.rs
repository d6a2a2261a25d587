//! A measured gap for other programs: whoever has the checkpoint, the tokens and our log-probs can measure it anew, with an
//! engine and a rounding of their own. `tests/interop/check_gaps.py` does, with Hugging Face transformers.
//!
//! | file | |
//! |---|---|
//! | `model/` | the policy as a Hugging Face folder, in f32: what is rounded is said by each side's precision |
//! | `residual_masks.safetensors` | for each layer one byte a channel, 1 where `calibrated` compensates |
//! | `gap.json` | temperature, token ids, and for each pairing both sides' log-probs and their gap |
use anyhow::{Context, Result, bail};
use burn_nvfp4::safetensors_file::Dtype;
use burn_quads::checkpoint::{FolderFormat, save_folder};
use serde::Serialize;
use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use crate::{
    backend::DEVICE,
    gap::{Measurement, PairingGap},
    language::Language,
    problems::Problems,
};

pub(crate) const MODEL: &str = "model";
pub(crate) const MASKS: &str = "residual_masks.safetensors";
pub(crate) const GAP: &str = "gap.json";

/// A new folder for a measurement.
#[derive(Debug)]
pub struct Export(PathBuf);

/// `gap.json`.
#[derive(Serialize)]
struct GapFile<'a> {
    /// Whose arithmetic it is, as `run.device` names it.
    device: &'static str,
    /// GRPO step of the policy.
    step: usize,
    /// Whether each trainer took the experts that its rollout chose.
    routing_replay: bool,
    /// What the logits are divided by before the softmax.
    temperature: f32,
    completions: Vec<CompletionTokens<'a>>,
    pairings: Vec<PairingLogProbs<'a>>,
}

/// A completion that the policy sampled in high precision.
#[derive(Serialize)]
struct CompletionTokens<'a> {
    /// Token ids.
    prompt: &'a [u32],
    /// Token ids.
    completion: &'a [u32],
    reward: f32,
}

/// The gap of a pairing, and log-probs of every completion's tokens; null where one is not finite.
#[derive(Serialize)]
struct PairingLogProbs<'a> {
    #[serde(flatten)]
    gap: &'a PairingGap,
    trainer_log_probs: &'a [Vec<f32>],
    rollout_log_probs: &'a [Vec<f32>],
}

impl Export {
    /// # Errors
    /// There is something already: nothing is overwritten.
    pub fn new(folder: &Path) -> Result<Self> {
        let name = folder.display();
        if folder.file_name().is_none() {
            bail!("--export {name}: expected the name of a new folder");
        }
        if folder.symlink_metadata().is_ok() {
            bail!("--export {name}: exists already, and is not overwritten; name a new folder");
        }
        Ok(Self(folder.into()))
    }

    /// Where it is, or will be.
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Writes the folder. It is there when it is whole, or not at all.
    pub fn write(&self, measured: &Measurement, problems: &Problems) -> Result<()> {
        let name = self.0.file_name().unwrap_or_default().to_string_lossy();
        let aside = self.0.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        let write = || {
            fs::create_dir_all(&aside)?;
            write_into(&aside, measured, problems)?;
            // A folder that somebody made in the meantime stays: only an empty one can be replaced.
            Ok(fs::rename(&aside, &self.0)?)
        };
        write()
            .inspect_err(|_: &anyhow::Error| drop(fs::remove_dir_all(&aside)))
            .with_context(|| format!("cannot write {}", self.0.display()))
    }
}

fn write_into(folder: &Path, measured: &Measurement, problems: &Problems) -> Result<()> {
    let format = match &problems.language {
        Language::Text(text) => text.f32_format(),
        Language::Characters(_) => FolderFormat::new(measured.policy.config(), Dtype::F32),
    };
    save_folder(&measured.policy, &folder.join(MODEL), &format)?;
    measured.masks.save(&folder.join(MASKS))?;
    let mut file = BufWriter::new(File::create(folder.join(GAP))?);
    serde_json::to_writer(&mut file, &GapFile::new(measured))?;
    file.write_all(b"\n")?;
    file.into_inner()?.sync_all()?;
    Ok(())
}

impl<'a> GapFile<'a> {
    fn new(measured: &'a Measurement) -> Self {
        let Measurement { report, rollouts, .. } = measured;
        let completions = rollouts
            .prompts
            .iter()
            .zip(&rollouts.completions)
            .zip(&rollouts.rewards);
        let pairings = report.gaps.iter().zip(&measured.log_probs);
        Self {
            device: DEVICE,
            step: report.step,
            routing_replay: report.routing_replay,
            temperature: measured.temperature,
            completions: completions
                .map(|((prompt, completion), reward)| CompletionTokens {
                    prompt,
                    completion: &completion.tokens,
                    reward: *reward,
                })
                .collect(),
            pairings: pairings
                .map(|(gap, sides)| PairingLogProbs {
                    gap,
                    trainer_log_probs: &sides.trainer,
                    rollout_log_probs: &sides.rollout,
                })
                .collect(),
        }
    }
}
