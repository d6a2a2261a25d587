//! A warm-up that another run has made (`warmup.from`): its policy, its steps and their lines of metrics.
use anyhow::{Context, Result, bail};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::{
    checkpoints::{Checkpoint, Checkpoints},
    config::{Config, Layers, fingerprint},
    metrics::{self, History, Position, VALIDATION},
    problems::Problems,
    run_folder::RunFolder,
    session::{check_settings, read_policy},
    warmup::Warm,
};

/// The checkpoint after a warm-up has them already; one without any can be given them.
const OUTLIER_CHANNELS: &str = "model.outlier_channels";
const OUTLIER_GAIN: &str = "model.outlier_gain";

/// The checkpoint that a run begins with in place of a warm-up of its own, read and found to be of the same kind.
#[derive(Debug)]
pub struct WarmStart {
    /// The lines of the warm-up; the new run's begin with them.
    pub history: History,
    checkpoint: Checkpoint,
    accuracy: Option<f64>,
    outlier_channels: usize,
}

impl WarmStart {
    /// What `warmup.from` names, if it names something. Nothing of the other run is changed.
    ///
    /// # Errors
    /// When there is no such run or checkpoint, either is damaged, or the run was made with another model, task or seed: the
    /// error has the setting that differs.
    pub fn find(config: &Config) -> Result<Option<Self>> {
        let Some(path) = &config.warmup.from else {
            return Ok(None);
        };
        Self::read(config, path)
            .with_context(|| format!("warmup.from = \"{}\" cannot be used", path.display()))
            .map(Some)
    }

    fn read(config: &Config, path: &Path) -> Result<Self> {
        let folder = RunFolder::at(&folder_of_run(path)?);
        let mut settings = Layers::defaults();
        settings.lay_file(&folder.config())?;
        check_agreement(config, &settings, &folder.config())?;
        let checkpoint = Checkpoints::new(folder.checkpoints()).read(Position::Grpo(0))?;
        check_settings(&folder, &fingerprint(&settings), &checkpoint)?;
        let history = History::read(&folder.metrics(), Position::Grpo(0), checkpoint.state.warmup_steps)?;
        let in_warmup = |line: &&metrics::MetricsLine| matches!(line.position, Position::Warmup(_));
        let lines = metrics::read(&folder.metrics())?;
        let mut measured = lines.iter().filter(in_warmup).filter_map(|line| line.get(VALIDATION));
        Ok(Self {
            accuracy: measured.next_back(),
            outlier_channels: settings.count(OUTLIER_CHANNELS, 0..=usize::MAX)?,
            history,
            checkpoint,
        })
    }

    /// The policy after the warm-up, as if this run had made it.
    pub fn warm(&self, config: &Config, problems: &Problems) -> Result<Warm> {
        let (policy, _) = read_policy(config, problems, &self.checkpoint)?;
        Ok(Warm {
            policy,
            steps: self.checkpoint.state.warmup_steps,
            accuracy: self.accuracy,
            outlier_channels: self.outlier_channels,
        })
    }
}

/// The run that a path means: its folder, or that of its first checkpoint.
fn folder_of_run(path: &Path) -> Result<PathBuf> {
    let is_run = |path: &Path| path.join("config.toml").is_file();
    if is_run(path) {
        return Ok(path.into());
    }
    let path = path.canonicalize().context("there is no such folder")?;
    match path.parent().and_then(Path::parent).filter(|run| is_run(run)) {
        Some(run) if Checkpoints::new(run.join("checkpoints")).path(Position::Grpo(0)) == path => Ok(run.into()),
        Some(run) => bail!(
            "it is not the checkpoint after the warm-up; expected the run's folder {}, or its checkpoints/step_0000",
            run.display()
        ),
        None => bail!("it is not the folder of a run (it has no config.toml), nor its checkpoints/step_0000"),
    }
}

/// Refuses the warm-up of another model, on another task or with another seed. How it goes on may differ.
fn check_agreement(config: &Config, theirs: &Layers, path: &Path) -> Result<()> {
    let mut ours = Layers::defaults();
    ours.lay_text(&config.toml, "this run's settings")?;
    let plain = theirs.count(OUTLIER_CHANNELS, 0..=usize::MAX)? == 0;
    let theirs: BTreeMap<_, _> = theirs.values().collect();
    for (key, value) in ours.values() {
        let decides = key == "run.seed" || key.starts_with("model.") || key.starts_with("task.");
        let free = plain && [OUTLIER_CHANNELS, OUTLIER_GAIN].contains(&key);
        if decides && !free && theirs.get(key) != Some(&value) {
            bail!("{key} = {value}: expected {}, as in {}", theirs[key], path.display());
        }
    }
    Ok(())
}
