//! `arm.json`, `gaps.json` and `choice.json`: small files that can be carried from one machine to another.
use anyhow::{Context, Result};
use grpo_math::atomic_write::write_atomically;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{fs, path::Path};

use crate::{
    results::{ArmRun, Gap},
    series::Settings,
};

/// What an arm leaves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmFile {
    /// False where its process crashed or was killed: the next call goes on with it.
    pub complete: bool,
    /// Every setting of the run but its place.
    pub settings: Settings,
    /// Steps of the warm-up.
    pub warmup_steps: usize,
    /// What it ran on.
    pub processor: Option<String>,
    /// What `results.json` says of it.
    pub run: ArmRun,
}

/// What a warm-up leaves, for the arms of a series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GapsFile {
    /// Every setting of the warm-up and the series but their place.
    pub settings: Settings,
    /// Name of the warm-up.
    pub warmup: String,
    /// Its steps.
    pub warmup_steps: usize,
    /// Its wall time, in seconds.
    pub warmup_s: f64,
    /// Completions that the gaps are measured on.
    pub completions: usize,
    /// Share of right ones.
    pub accuracy: f64,
    /// By arm.
    pub gaps: Vec<Gap>,
}

/// A setting that was chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChoiceFile {
    /// How.
    pub rule: String,
    /// The setting.
    pub key: String,
    /// The arm that decided.
    pub arm: String,
    /// Its seeds.
    pub seeds: Vec<u64>,
    /// What was tried.
    pub tried: Vec<Tried>,
    /// The value that all arms run with.
    pub chosen: String,
}

/// One value of a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// The value.
    pub value: String,
    /// Pass@1 at the end, in the arm's own precision, by seed.
    pub pass_at_1: Vec<f64>,
}

/// Reads one of these files; `None` where there is none.
///
/// # Errors
/// When it cannot be read, or is of another form; the file is named.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let value = serde_json::from_str(&text)
        .with_context(|| format!("cannot read {} (remove it to measure again)", path.display()))?;
    Ok(Some(value))
}

/// Writes one of these files.
///
/// # Errors
/// When it cannot be written; the file is named.
pub fn write<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    }
    write_atomically(path, &serde_json::to_vec(value)?)
}
