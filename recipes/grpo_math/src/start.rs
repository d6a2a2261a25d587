//! Before a run's first step: all that can refuse it is looked at before anything of it is changed.
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

use crate::{
    backend,
    checkpoints::{Checkpoint, Checkpoints},
    config::Config,
    console,
    metrics::{History, Position},
    problems::Problems,
    run_folder::RunFolder,
    run_lock::RunLock,
    session::{check_fingerprint, check_problems},
    step_lines::StepLines,
    warm_start::WarmStart,
};

/// A run that can begin, or go on.
#[derive(Debug)]
pub struct Start {
    /// Its settings.
    pub config: Config,
    /// Its folder.
    pub folder: RunFolder,
    /// Its problems.
    pub problems: Problems,
    /// Where it goes on from; absent: it is new.
    pub resumed: Option<Resumed>,
    /// The warm-up of another run that a new one begins with.
    pub warm: Option<WarmStart>,
    _lock: RunLock,
}

/// What a resumed run goes on from.
#[derive(Debug)]
pub struct Resumed {
    /// The newest whole checkpoint.
    pub checkpoint: Checkpoint,
    /// The checkpoint after the warm-up, where a KL term refers to it.
    pub first: Option<Checkpoint>,
    /// The lines of `metrics.jsonl` up to the checkpoint.
    pub history: History,
    /// The lines of `answers.jsonl` up to the checkpoint.
    pub answers: StepLines,
    /// Those of `layers.jsonl`.
    pub layers: StepLines,
}

/// A run whose folder lacks what it would go on from.
#[derive(Debug, thiserror::Error)]
#[error("{reason}\nNothing was changed. Put it back as it was, or start a new run with --config {}", config.display())]
pub struct CannotGoOn {
    /// What is not there, or not whole.
    pub reason: String,
    config: PathBuf,
}

impl Start {
    /// A new run, in a folder of its own.
    pub fn new(config: Config) -> Result<Self> {
        // Before there is a folder: a missing device, or settings that draw too few problems, should leave nothing behind.
        backend::find_device()?;
        let problems = Problems::draw(&config)?;
        let warm = WarmStart::find(&config)?;
        let folder = RunFolder::create(&config)?;
        Ok(Self {
            _lock: RunLock::take(&folder)?,
            config,
            folder,
            problems,
            resumed: None,
            warm,
        })
    }

    /// The run in a folder, from its newest whole checkpoint; `assignments` are the settings that may change. Checkpoints
    /// that are damaged are named on the way.
    ///
    /// # Errors
    /// When another process works on the run, its settings are not those that the checkpoint belongs to, or it is asked for
    /// fewer steps than it has taken; [`CannotGoOn`] when it has no whole checkpoint, or not the checkpoint's lines of
    /// `metrics.jsonl`.
    pub fn resume(path: &Path, assignments: &[String]) -> Result<Self> {
        backend::find_device()?;
        let (folder, config) = RunFolder::open(path, assignments)?;
        let lock = RunLock::take(&folder)?;
        let checkpoint = newest_checkpoint(&folder, &config)?;
        let position = checkpoint.state.position;
        let mut first = None;
        if let Position::Grpo(reached) = position {
            let steps = config.learner.steps;
            if reached > steps {
                bail!("grpo.steps = {steps}: the run has reached step {reached}; expected at least that");
            }
            if config.learner.grpo.loss.beta > 0.0 {
                let checkpoint = Checkpoints::new(folder.checkpoints())
                    .read(Position::Grpo(0))
                    .context("the checkpoint after the warm-up is needed, which grpo.kl_coefficient refers to")?;
                check_fingerprint(&folder, &config, &checkpoint)?;
                first = Some(checkpoint);
            }
        }
        let history = History::read(&folder.metrics(), position, warmup_steps(&checkpoint));
        let history = history.map_err(|error| CannotGoOn {
            reason: format!("{}; without its history the run cannot go on", console::explain(&error)),
            config: folder.config(),
        })?;
        let problems = Problems::draw(&config)?;
        check_problems(&config, &problems, &checkpoint)?;
        Ok(Self {
            problems,
            resumed: Some(Resumed {
                checkpoint,
                first,
                history,
                answers: StepLines::resume(folder.answers(), position)?,
                layers: StepLines::resume(folder.layers(), position)?,
            }),
            // Its own first checkpoint has all that the run needs of it.
            warm: None,
            config,
            folder,
            _lock: lock,
        })
    }

    /// After which step it goes on.
    pub fn position(&self) -> Position {
        let resumed = self.resumed.as_ref();
        resumed.map_or(Position::Warmup(0), |resumed| resumed.checkpoint.state.position)
    }
}

fn warmup_steps(checkpoint: &Checkpoint) -> usize {
    match checkpoint.state.position {
        Position::Warmup(step) => step,
        Position::Grpo(_) => checkpoint.state.warmup_steps,
    }
}

fn newest_checkpoint(folder: &RunFolder, config: &Config) -> Result<Checkpoint> {
    let (newest, damaged) = Checkpoints::new(folder.checkpoints()).newest()?;
    for checkpoint in &damaged {
        let path = checkpoint.path.display();
        console::err(format!("Damaged, not used: {path} ({})", checkpoint.reason));
    }
    let Some(checkpoint) = newest else {
        return Err(CannotGoOn {
            reason: format!("{} has no whole checkpoint to go on from", folder.path().display()),
            config: folder.config(),
        }
        .into());
    };
    check_fingerprint(folder, config, &checkpoint)?;
    Ok(checkpoint)
}
