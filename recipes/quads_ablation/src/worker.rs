//! What one process does: a warm-up, the gaps at its end, or one arm. It is told as JSON, says what it has to say into a
//! log, and leaves a file when it is done.
use anyhow::{Context, Error, Result, anyhow, bail};
use burn_quads::{rollout::RolloutError, sync::SyncError};
use grpo_math::{
    checkpoints::Checkpoints,
    config::{Config, Diverged},
    console,
    interrupt::Interrupt,
    metrics::Position,
    run::{Outcome, run},
    run_folder::RunFolder,
    run_lock::RunLock,
    start::{CannotGoOn, Start},
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{collect, files, gaps, layout::arm_file};

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// Makes a policy that is right now and then.
    Warmup {
        /// Where the run and its settings are.
        run: Run,
    },
    /// Measures the gaps of a series' arms at the end of a warm-up.
    Gaps {
        /// The warm-up's folder.
        warmup: PathBuf,
        /// Its name.
        name: String,
        /// Settings of the series, with the seed.
        assignments: Vec<String>,
        /// Letters of the arms.
        arms: Vec<String>,
        /// Completions to measure on.
        completions: usize,
        /// The file to write.
        to: PathBuf,
    },
    /// Trains an arm, and evaluates it.
    Arm {
        /// Where the run and its settings are.
        run: Run,
        /// Letter of the arm.
        letter: String,
        /// Held-out problems that start and end are judged by.
        final_problems: usize,
        /// Why there will be no more steps; evaluates what there is.
        given_up: Option<String>,
        /// Whether all its checkpoints stay when it is complete; without it only the last.
        keep_checkpoints: bool,
    },
}

/// A run of `grpo_math`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Its folder.
    pub folder: PathBuf,
    /// Its settings but for name and directory.
    pub assignments: Vec<String>,
}

/// How a piece of work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its file is there.
    Done,
    /// It was asked to stop, and saved.
    Stopped,
}

/// Does it.
///
/// # Errors
/// What the run failed with, divergence apart: that is a result.
pub fn work(work: &Work) -> Result<Ended> {
    let interrupt = Interrupt::listen()?;
    let parent = parent_id();
    // Nobody would take the result of a process whose parent is gone.
    let stop = move |_: Position| interrupt.is_requested() || parent_id() != parent;
    match work {
        Work::Warmup { run } => Ok(match take_up(run, &stop)?.1 {
            Outcome::Complete(_) => Ended::Done,
            Outcome::Stopped(_) => Ended::Stopped,
        }),
        Work::Gaps {
            warmup,
            name,
            assignments,
            arms,
            completions,
            to,
        } => {
            let stop = || stop(Position::Grpo(0));
            let Some(measured) = gaps::measure(warmup, name, assignments, arms, *completions, &stop)? else {
                return Ok(Ended::Stopped);
            };
            files::write(to, &measured)?;
            Ok(Ended::Done)
        }
        Work::Arm {
            run,
            letter,
            final_problems,
            given_up,
            keep_checkpoints,
        } => {
            let ended = arm(run, letter, *final_problems, given_up.as_deref(), &stop)?;
            if ended == Ended::Done && given_up.is_none() && !keep_checkpoints {
                remove_first_checkpoint(run)?;
            }
            Ok(ended)
        }
    }
}

fn arm(
    run: &Run,
    letter: &str,
    final_problems: usize,
    given_up: Option<&str>,
    stop: &dyn Fn(Position) -> bool,
) -> Result<Ended> {
    let stopped = match given_up {
        Some(reason) => {
            // What cannot go on because it is another run's is not judged either.
            Start::resume(&run.folder, &[]).map_err(|error| advised(error, &run.folder))?;
            Some(reason.to_string())
        }
        None => match take_up(run, stop) {
            Ok((_, Outcome::Complete(_))) => None,
            Ok((_, Outcome::Stopped(_))) => return Ok(Ended::Stopped),
            Err(error) if diverged(&error) => {
                let reason = console::explain(&error);
                console::err(format!("The arm cannot go on: {reason}"));
                Some(reason)
            }
            Err(error) => return Err(error),
        },
    };
    let stop = || stop(Position::Grpo(0));
    let Some(mut arm) = collect::arm(run, letter, final_problems, stopped, &stop)? else {
        return Ok(Ended::Stopped);
    };
    arm.complete = given_up.is_none();
    files::write(&arm_file(&run.folder), &arm)?;
    Ok(Ended::Done)
}

/// The policy after the warm-up is in the warm-up's folder too.
fn remove_first_checkpoint(run: &Run) -> Result<()> {
    let first = Checkpoints::new(run.folder.join("checkpoints")).path(Position::Grpo(0));
    match first.is_dir() {
        true => fs::remove_dir_all(&first).with_context(|| format!("cannot remove {}", first.display())),
        false => Ok(()),
    }
}

/// Whether a run failed because its numbers did: going on would end the same.
fn diverged(error: &Error) -> bool {
    error.chain().any(|cause| {
        cause.is::<Diverged>()
            || matches!(cause.downcast_ref(), Some(RolloutError::NonFiniteLogits { .. }))
            || matches!(
                cause.downcast_ref(),
                Some(SyncError::Pack { .. } | SyncError::Scale { .. })
            )
    })
}

/// An arm or a warm-up is made anew by removing it, not as a new run of `grpo_math`.
fn advised(error: Error, folder: &Path) -> Error {
    match error.downcast_ref::<CannotGoOn>() {
        Some(CannotGoOn { reason, .. }) => anyhow!(
            "{reason}. Put it back as it was, or remove {}: the same command then runs it anew",
            folder.display()
        ),
        None => error,
    }
}

/// Whether a run has left something to go on from.
///
/// # Errors
/// When the folder of its checkpoints cannot be read, or has some without the run's settings.
pub fn has_begun(folder: &Path) -> Result<bool> {
    let checkpoints = Checkpoints::new(folder.join("checkpoints"));
    let begun = !checkpoints.positions()?.is_empty();
    if begun && !folder.join("config.toml").is_file() {
        bail!(
            "{} has checkpoints and no config.toml. Put it back, or remove the folder: the same command then runs it anew",
            folder.display()
        );
    }
    Ok(begun)
}

/// Runs from the beginning, or from the newest checkpoint that the folder has.
fn take_up(run_of: &Run, stop: &dyn Fn(Position) -> bool) -> Result<(RunFolder, Outcome)> {
    let folder = &run_of.folder;
    let start = match has_begun(folder)? {
        true => Start::resume(folder, &[]).map_err(|error| advised(error, folder))?,
        false => {
            // A process that died before its first checkpoint leaves nothing to go on from; one that lives is left alone.
            if folder.exists() {
                console::err(format!(
                    "{}: no checkpoint to go on from: begins anew",
                    folder.display()
                ));
                drop(RunLock::take(&RunFolder::at(folder))?);
                fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
            }
            Start::new(run_of.config()?)?
        }
    };
    let outcome = run(&start, stop)?;
    Ok((start.folder.clone(), outcome))
}

impl Run {
    /// Its settings.
    ///
    /// # Errors
    /// When `grpo_math` refuses them.
    pub fn config(&self) -> Result<Config> {
        self.config_with(&[])
    }

    /// Its settings, and some changes.
    ///
    /// # Errors
    /// When `grpo_math` refuses them.
    pub fn config_with(&self, changes: &[String]) -> Result<Config> {
        let part = |part: Option<&std::ffi::OsStr>| part.and_then(|part| part.to_str()).map(String::from);
        let name = part(self.folder.file_name());
        let directory = self.folder.parent().map(Path::as_os_str);
        let (Some(name), Some(directory)) = (name, part(directory)) else {
            return Err(anyhow!(
                "{}: expected a folder with a name in UTF-8",
                self.folder.display()
            ));
        };
        let mut assignments = self.assignments.clone();
        // As TOML text: a path may look like a number.
        assignments.push(format!("run.name={}", toml::Value::from(name)));
        assignments.push(format!("run.directory={}", toml::Value::from(directory)));
        assignments.extend_from_slice(changes);
        Ok(Config::load(None, &assignments)?)
    }
}

#[cfg(unix)]
fn parent_id() -> u32 {
    std::os::unix::process::parent_id()
}

#[cfg(not(unix))]
fn parent_id() -> u32 {
    0
}
