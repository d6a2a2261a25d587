//! What there is to do: warm-ups, gaps and arms, in the order in which they are started; what is done of it, and what
//! each needs.
mod choice;
mod refuse;
#[cfg(test)]
mod tests;

pub use choice::RULE;

use anyhow::{Context, Error, Result};
use grpo_math::{
    checkpoints::Checkpoints, config::Config, metrics::Position, run_folder::RunFolder, run_lock::RunLock,
};
use std::{collections::BTreeSet, path::PathBuf};

use crate::{
    arms::Arm,
    files::{self, ArmFile, GapsFile},
    gaps::of_arm,
    layout::{Layout, arm_file},
    results::Chosen,
    series::{Series, Settings, assignments, warmup_settings},
    worker::{self, Run, Work},
};
use choice::tries;

/// One process's work.
#[derive(Clone, Debug, PartialEq)]
pub enum Job {
    /// The warm-up of a seed.
    Warmup {
        /// Name, shared by all series that agree in its settings.
        name: String,
        /// `run.seed`
        seed: u64,
        /// Its settings.
        settings: Settings,
    },
    /// The gaps at the end of a warm-up, under the settings of a series.
    Gaps {
        /// The series.
        series: Series,
        /// `run.seed`
        seed: u64,
    },
    /// One arm.
    Arm {
        /// The series.
        series: Series,
        /// `run.seed`
        seed: u64,
        /// The arm.
        arm: &'static Arm,
        /// A value that is tried for the setting that the series chooses.
        tried: Option<String>,
    },
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It is never done again.
    Done,
    /// It goes on from its last checkpoint.
    Begun,
    /// Nothing of it is there.
    Missing,
}

/// The series that are asked for, and where they are.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where.
    pub layout: Layout,
    /// What, in this order.
    pub series: Vec<Series>,
    /// All that are declared, for the names of warm-ups.
    pub declared: Vec<Series>,
    /// `run.device`
    pub device: String,
    /// Whether complete arms keep their checkpoints; without it only the last.
    pub keep_checkpoints: bool,
}

impl Plan {
    /// All jobs, done or not.
    pub fn jobs(&self) -> Vec<Job> {
        let mut jobs = Vec::new();
        let mut warmed = BTreeSet::new();
        let mut warm = |series: &Series, seeds: &[u64], jobs: &mut Vec<Job>| {
            let name = self.warmup_name(series);
            for &seed in seeds {
                if warmed.insert((name.clone(), seed)) {
                    jobs.push(Job::Warmup {
                        name: name.clone(),
                        seed,
                        settings: warmup_settings(&series.settings),
                    });
                }
            }
        };
        for series in &self.series {
            let Some(choice) = &series.choice else { continue };
            if self.layout.choice(&series.name).exists() {
                continue;
            }
            warm(series, &choice.seeds, &mut jobs);
            jobs.extend(tries(series, choice));
        }
        for series in &self.series {
            warm(series, &series.seeds, &mut jobs);
            for &seed in &series.seeds {
                jobs.push(Job::Gaps {
                    series: series.clone(),
                    seed,
                });
                jobs.extend(series.arms.iter().map(|arm| Job::Arm {
                    series: series.clone(),
                    seed,
                    arm,
                    tried: None,
                }));
            }
        }
        jobs
    }

    /// What is not done yet, in the order of [`Plan::jobs`], and how much is done. A warm-up is left only where something that
    /// is not done starts from it.
    ///
    /// # Errors
    /// When something was made with other settings, or a file cannot be read.
    pub fn left(&self) -> Result<(Vec<(Job, State)>, usize)> {
        let (mut left, mut done) = (Vec::new(), 0);
        for series in &self.series {
            let Some(choice) = &series.choice else { continue };
            // Tries that are to be run are among the jobs.
            if self.layout.choice(&series.name).exists() {
                tries(series, choice)
                    .iter()
                    .try_for_each(|job| self.check_settings(job))?;
            }
            self.chosen(series, choice)?;
        }
        for job in self.jobs() {
            self.check_settings(&job)?;
            match self.state(&job)? {
                State::Done => done += 1,
                state => left.push((job, state)),
            }
        }
        self.check_series()?;
        for (job, _) in &left {
            self.check_warmup(job)?;
        }
        let needed: BTreeSet<PathBuf> = left.iter().filter_map(|(job, _)| self.warmup_of(job)).collect();
        left.retain(|(job, _)| !job.is_warmup() || needed.contains(&self.path(job)));
        Ok((left, done))
    }

    /// The folder of the warm-up that a job starts from; a warm-up starts from none.
    pub fn warmup_of(&self, job: &Job) -> Option<PathBuf> {
        match job {
            Job::Warmup { .. } => None,
            Job::Gaps { series, seed } | Job::Arm { series, seed, .. } => {
                Some(self.layout.warmup(&self.warmup_name(series), *seed))
            }
        }
    }

    /// Letters of the arms that a series is declared with, whichever of them are asked for.
    fn declared_arms(&self, series: &Series) -> Vec<String> {
        let declared = self.declared.iter().find(|declared| declared.name == series.name);
        let arms = &declared.unwrap_or(series).arms;
        arms.iter().map(|arm| arm.letter.to_string()).collect()
    }

    /// Whether what was measured is what would be: of fewer arms or completions it is measured anew.
    fn has_all_gaps(&self, file: &GapsFile, series: &Series) -> bool {
        let measured = |letter: &String| file.gaps.iter().any(|gap| gap.arm == *letter);
        file.completions == series.gap_completions && self.declared_arms(series).iter().all(measured)
    }

    /// The first declared series with the same warm-up, whose name it has.
    fn warmup_name(&self, series: &Series) -> String {
        let settings = warmup_settings(&series.settings);
        let same = |other: &&Series| warmup_settings(&other.settings) == settings;
        let mut all = self.declared.iter().chain(&self.series);
        all.find(same)
            .map_or_else(|| series.name.clone(), |series| series.name.clone())
    }

    /// Settings of a job with its seed and device, the arm's among them.
    fn assignments(&self, job: &Job) -> Result<Vec<String>> {
        let seed_and_device = |seed: u64| [format!("run.seed={seed}"), format!("run.device={}", self.device)];
        Ok(match job {
            Job::Warmup { seed, settings, .. } => {
                let mut all = assignments(settings);
                all.extend(seed_and_device(*seed));
                all.extend(
                    [
                        "grpo.steps=0",
                        "trainer.precision=high",
                        "rollout.precision=high",
                        "eval.problems=256",
                        "checkpoint.keep=1",
                    ]
                    .map(String::from),
                );
                all
            }
            Job::Gaps { series, seed } => {
                // They are measured before anything is chosen, and depend on nothing that is: any value will do, always the
                // same.
                let any = series.choice.as_ref().map(|choice| choice.grid[0].as_str());
                let mut all = self.of_series(series, any)?;
                all.extend(seed_and_device(*seed));
                all
            }
            Job::Arm {
                series,
                seed,
                arm,
                tried,
            } => {
                let mut all = self.of_series(series, tried.as_deref())?;
                all.extend(seed_and_device(*seed));
                let warmup = self.warmup_of(job).context("an arm starts from a warm-up")?;
                // Runs that are resumed from elsewhere must find it.
                let warmup = std::path::absolute(&warmup).unwrap_or(warmup);
                all.push(format!(
                    "warmup.from={}",
                    toml::Value::from(warmup.display().to_string())
                ));
                of_arm(&all, arm)
            }
        })
    }

    fn of_series(&self, series: &Series, tried: Option<&str>) -> Result<Vec<String>> {
        let mut all = series.assignments();
        match (&series.choice, tried) {
            (None, _) => {}
            (Some(choice), Some(value)) => all.push(format!("{}={value}", choice.key)),
            (Some(choice), None) => match self.chosen(series, choice)? {
                Some(Chosen { key, chosen, .. }) => all.push(format!("{key}={chosen}")),
                // Nothing but the arms themselves depends on it.
                None => all.push(format!("{}={}", choice.key, choice.grid[0])),
            },
        }
        Ok(all)
    }

    /// Where the job leaves what it does.
    pub fn path(&self, job: &Job) -> PathBuf {
        match job {
            Job::Warmup { name, seed, .. } => self.layout.warmup(name, *seed),
            Job::Gaps { series, seed } => self.layout.gaps(&series.name, *seed),
            Job::Arm {
                series,
                seed,
                arm,
                tried,
            } => match tried {
                Some(value) => self.layout.choice_arm(&series.name, value, *seed, arm),
                None => self.layout.arm(&series.name, *seed, arm),
            },
        }
    }

    /// How far it is.
    ///
    /// # Errors
    /// When its file cannot be read.
    pub fn state(&self, job: &Job) -> Result<State> {
        let path = self.path(job);
        let begun = || match worker::has_begun(&path)? {
            true => Ok::<_, Error>(State::Begun),
            false => Ok(State::Missing),
        };
        Ok(match job {
            Job::Warmup { .. } => match Checkpoints::new(path.join("checkpoints")).read(Position::Grpo(0)) {
                Ok(_) => State::Done,
                Err(_) => begun()?,
            },
            Job::Gaps { series, .. } => match files::read::<GapsFile>(&path)? {
                Some(file) if self.has_all_gaps(&file, series) => State::Done,
                _ => State::Missing,
            },
            Job::Arm { .. } => match files::read::<ArmFile>(&arm_file(&path))? {
                Some(arm) if arm.complete => State::Done,
                _ => begun()?,
            },
        })
    }

    /// Whether an arm that takes no more steps has a checkpoint to be judged by.
    pub fn can_be_judged(&self, job: &Job) -> bool {
        let checkpoints = Checkpoints::new(self.path(job).join("checkpoints"));
        job.is_arm() && checkpoints.newest().is_ok_and(|(newest, _)| newest.is_some())
    }

    /// Whether all that it needs is there.
    ///
    /// # Errors
    /// When a file of a choice cannot be read.
    pub fn is_ready(&self, job: &Job) -> Result<bool> {
        let ended = |warmup: PathBuf| Checkpoints::new(warmup.join("checkpoints")).path(Position::Grpo(0));
        let warm = self.warmup_of(job).is_none_or(|warmup| ended(warmup).is_dir());
        Ok(match job {
            Job::Arm {
                series, tried: None, ..
            } => match &series.choice {
                Some(choice) => warm && self.chosen(series, choice)?.is_some(),
                None => warm,
            },
            _ => warm,
        })
    }

    /// Whether a living process works on its run: the worker of a call that was killed, which saves after its step, or somebody
    /// who resumes the run by hand.
    pub fn is_held(&self, job: &Job) -> bool {
        let is_run = !matches!(job, Job::Gaps { .. });
        is_run && RunLock::is_held(&RunFolder::at(&self.path(job)))
    }

    /// What a process is told; `given_up` says why an arm will take no more steps.
    ///
    /// # Errors
    /// When a file of a choice cannot be read.
    pub fn work(&self, job: &Job, given_up: Option<&str>) -> Result<Work> {
        let assignments = self.assignments(job)?;
        let path = self.path(job);
        Ok(match job {
            Job::Warmup { .. } => Work::Warmup {
                run: Run {
                    folder: path,
                    assignments,
                },
            },
            Job::Gaps { series, .. } => Work::Gaps {
                warmup: self
                    .warmup_of(job)
                    .context("gaps are measured at the end of a warm-up")?,
                name: self.warmup_name(series),
                assignments,
                arms: self.declared_arms(series),
                completions: series.gap_completions,
                to: path,
            },
            Job::Arm { series, arm, .. } => Work::Arm {
                run: Run {
                    folder: path,
                    assignments,
                },
                letter: arm.letter.into(),
                final_problems: series.final_problems,
                given_up: given_up.map(String::from),
                keep_checkpoints: self.keep_checkpoints,
            },
        })
    }

    /// What it costs, in steps of an arm; a guess that only the time left is made of.
    pub fn weight(&self, job: &Job) -> f64 {
        match job {
            Job::Warmup { .. } => 80.0,
            Job::Gaps { .. } => 20.0,
            Job::Arm { series, .. } => series.steps() as f64 + 10.0,
        }
    }
}

impl Job {
    /// What it is called on the way.
    pub fn name(&self) -> String {
        match self {
            Self::Warmup { name, seed, .. } => format!("warm-up {name}, seed {seed}"),
            Self::Gaps { series, seed } => format!("gaps of {}, seed {seed}", series.name),
            Self::Arm {
                series,
                seed,
                arm,
                tried,
            } => match (tried, &series.choice) {
                (Some(value), Some(choice)) => {
                    format!(
                        "{}, {} = {value}, seed {seed}, arm {}",
                        series.name, choice.key, arm.letter
                    )
                }
                _ => format!("{}, seed {seed}, arm {}", series.name, arm.letter),
            },
        }
    }

    /// Whether others start from it.
    pub fn is_warmup(&self) -> bool {
        matches!(self, Self::Warmup { .. })
    }

    /// Whether it is an arm of the table.
    pub fn is_arm(&self) -> bool {
        matches!(self, Self::Arm { .. })
    }
}

/// Whether `grpo_math` was built for a device.
///
/// # Errors
/// It was not; says how to build it.
pub fn check_device(device: &str) -> Result<()> {
    Config::load(None, &[format!("run.device={device}")])?;
    grpo_math::backend::find_device()
}
