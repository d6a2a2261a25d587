//! What there is to do: warm-ups, gaps and arms, in the order in which they are started; what is done of it, and what
//! each needs.
use anyhow::{Context, Error, Result, bail};
use grpo_math::{
    checkpoints::Checkpoints,
    config::{Config, Layers},
    metrics::Position,
    run_folder::RunFolder,
    run_lock::RunLock,
};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use crate::{
    arms::{ARMS, Arm},
    assemble,
    files::{self, ArmFile, GapsFile},
    gaps::of_arm,
    layout::{Layout, arm_file},
    results::{Chosen, Tried},
    series::{Choice, Series, Settings, all_settings, assignments, settings_of, warmup_settings},
    worker::{self, Run, Work},
};

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

/// How a value is chosen, in words.
pub const RULE: &str = "the highest mean over the seeds of pass@1 at the end, in the arm's own precision; of equals the \
                        first of the list";

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
            for job in tries(series, choice) {
                self.check_settings(&job)?;
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
            self.is_ready(job)?;
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

    /// What a series has chosen, from its file or from its tries, all of which have ended; `None` as long as one has not.
    ///
    /// # Errors
    /// When a file of the choice cannot be read, or tells of another choice than the declared one.
    pub fn chosen(&self, series: &Series, choice: &Choice) -> Result<Option<Chosen>> {
        let path = self.layout.choice(&series.name);
        if let Some(file) = files::read::<Chosen>(&path)? {
            check_choice(choice, &file).with_context(|| path.display().to_string())?;
            return Ok(Some(file));
        }
        let mut tried = Vec::new();
        let mut judged_on = BTreeSet::new();
        for value in &choice.grid {
            let mut pass_at_1 = Vec::new();
            for &seed in &choice.seeds {
                let run = self.layout.choice_arm(&series.name, value, seed, choice.arm);
                let Some(arm) = ArmFile::of(&run, choice.arm)?.filter(|arm| arm.complete) else {
                    return Ok(None);
                };
                judged_on.insert(arm.run.end.own.0.len());
                pass_at_1.push(arm.run.end.own.share());
            }
            tried.push(Tried {
                value: value.clone(),
                pass_at_1,
            });
        }
        if judged_on.len() > 1 {
            bail!(
                "{}: its tries were judged on different numbers of problems: {judged_on:?}. Remove those that are not {}",
                self.layout.choice(&series.name).with_extension("").display(),
                series.final_problems
            );
        }
        let chosen = best(&tried).context("a choice has values")?.value.clone();
        Ok(Some(Chosen {
            rule: RULE.into(),
            key: choice.key.clone(),
            arm: choice.arm.letter.into(),
            seeds: choice.seeds.clone(),
            tried,
            chosen,
        }))
    }

    /// Writes what a series has chosen, as soon as all of its tries have ended. What was chosen once stays.
    ///
    /// # Errors
    /// When a file of the choice cannot be read or written.
    pub fn keep_choice(&self, series: &Series) -> Result<()> {
        let path = self.layout.choice(&series.name);
        let Some(choice) = &series.choice else {
            return Ok(());
        };
        match self.chosen(series, choice)? {
            Some(chosen) if files::read::<Chosen>(&path)?.is_none() => files::write(&path, &chosen),
            _ => Ok(()),
        }
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
    /// When a file of a choice cannot be read, or the warm-up is not the one that the others of the seed began with.
    pub fn is_ready(&self, job: &Job) -> Result<bool> {
        let ended = |warmup: PathBuf| Checkpoints::new(warmup.join("checkpoints")).path(Position::Grpo(0));
        let warm = self.warmup_of(job).is_none_or(|warmup| ended(warmup).is_dir());
        if warm {
            self.check_warmup(job)?;
        }
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

    /// Refuses a warm-up that is not the one that what is there of the series and the seed began with: it was made elsewhere,
    /// and made again here.
    fn check_warmup(&self, job: &Job) -> Result<()> {
        let (Job::Gaps { series, seed } | Job::Arm { series, seed, .. }) = job else {
            return Ok(());
        };
        let (series, warmup) = (&series.name, self.warmup_of(job).context("it starts from a warm-up")?);
        let of_gaps = || {
            let path = self.layout.gaps(series, *seed);
            Ok::<_, Error>(files::read::<GapsFile>(&path)?.map(|file| (path, file.warmup_steps)))
        };
        let of_arm = |arm: &'static Arm| {
            let run = self.layout.arm(series, *seed, arm);
            Ok::<_, Error>(ArmFile::of(&run, arm)?.map(|file| (arm_file(&run), file.warmup_steps)))
        };
        let mut there = ARMS.iter().map(of_arm).chain(std::iter::once_with(of_gaps));
        let Some((file, steps)) = there.find_map(Result::transpose).transpose()? else {
            return Ok(());
        };
        // One that is damaged is named by what starts from it.
        match Checkpoints::new(warmup.join("checkpoints")).read(Position::Grpo(0)) {
            Ok(checkpoint) if checkpoint.state.warmup_steps != steps => bail!(
                "{} begins after {steps} steps of a warm-up, and {} took {}: another one. Put the first back, or use another --out",
                file.display(),
                warmup.display(),
                checkpoint.state.warmup_steps
            ),
            _ => Ok(()),
        }
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

    /// Refuses a series of which something is there already that was made with other settings (of other seeds, say), or
    /// that does not fit together.
    ///
    /// # Errors
    /// The settings that differ, by name; what [`assemble::results`] refuses.
    fn check_series(&self) -> Result<()> {
        let there = assemble::results(&self.layout, &self.declared, &self.device, false)?;
        for series in &self.series {
            let found = there.series.iter().find(|found| found.name == series.name);
            let declared = self.declared.iter().find(|declared| declared.name == series.name);
            let (Some(found), Some(declared)) = (found, declared) else {
                continue;
            };
            // A choice alone tells no settings; those of its tries are looked at by themselves.
            if found.seeds.is_empty() {
                continue;
            }
            let mut asked = assemble::of_series(&all_settings(&self.of_series(series, None)?)?, declared);
            let mut made = found.settings.clone();
            if let (Some(choice), None) = (&series.choice, &found.choice) {
                asked.remove(&choice.key);
                made.remove(&choice.key);
            }
            refuse_difference(&self.layout.series(&series.name), &made, &asked, "the default")?;
        }
        Ok(())
    }

    /// Refuses to go on with what is another arm's, or was made with other settings.
    ///
    /// # Errors
    /// The two arms; the settings that differ, by name; a choice that is not there.
    pub fn check_settings(&self, job: &Job) -> Result<()> {
        let path = self.path(job);
        let made = match job {
            Job::Warmup { .. } => None,
            Job::Gaps { .. } => files::read::<GapsFile>(&path)?.map(|file| file.settings),
            Job::Arm { arm, .. } => ArmFile::of(&path, arm)?.map(|file| file.settings),
        };
        let file = path.join("config.toml");
        let mut made = match made {
            Some(made) => made,
            None if file.is_file() => {
                let mut layers = Layers::defaults();
                layers.lay_file(&file)?;
                settings_of(&layers)
            }
            None => return Ok(()),
        };
        if let Job::Arm {
            series, tried: None, ..
        } = job
            && let Some(choice) = &series.choice
            && self.chosen(series, choice)?.is_none()
        {
            bail!(
                "{} is there, and {} is not, which says how its {} was chosen. Put that back, or use another --out",
                path.display(),
                self.layout.choice(&series.name).display(),
                choice.key
            );
        }
        let mut asked = all_settings(&self.assignments(job)?)?;
        if let Job::Arm {
            series, tried: Some(_), ..
        } = job
            && self.layout.choice(&series.name).is_file()
        {
            // What has been chosen was chosen wherever its tries ran.
            made.remove("run.device");
            asked.remove("run.device");
        }
        refuse_difference(&path, &made, &asked, "not a setting")
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

/// The jobs that a value is chosen by.
fn tries(series: &Series, choice: &Choice) -> Vec<Job> {
    let try_of = |value: &String, seed: u64| Job::Arm {
        series: series.clone(),
        seed,
        arm: choice.arm,
        tried: Some(value.clone()),
    };
    let values = choice.grid.iter();
    values
        .flat_map(|value| choice.seeds.iter().map(move |&seed| try_of(value, seed)))
        .collect()
}

/// What [`RULE`] takes. Means that differ by less are equal: a file keeps five digits.
fn best(tried: &[Tried]) -> Option<&Tried> {
    const EQUAL: f64 = 2e-5;
    let mean = |tried: &Tried| tried.pass_at_1.iter().sum::<f64>() / tried.pass_at_1.len() as f64;
    tried.iter().fold(None::<&Tried>, |best, tried| match best {
        Some(best) if mean(best) + EQUAL >= mean(tried) => Some(best),
        _ => Some(tried),
    })
}

/// Refuses a choice that is not the declared one, or does not follow from what was tried.
fn check_choice(choice: &Choice, file: &Chosen) -> Result<()> {
    let Chosen {
        key,
        chosen,
        arm,
        seeds,
        tried,
        ..
    } = file;
    if *key != choice.key || !choice.grid.contains(chosen) {
        bail!("{key} = {chosen} was chosen, which the declaration does not offer; use another --out");
    }
    if *arm != choice.arm.letter || *seeds != choice.seeds {
        bail!(
            "{key} was chosen by arm {arm} with the seeds {seeds:?}, where arm {} and {:?} are declared; use another --out",
            choice.arm.letter,
            choice.seeds
        );
    }
    let whole = |tried: &Tried| tried.pass_at_1.len() == seeds.len() && tried.pass_at_1.iter().all(|p| p.is_finite());
    if !tried.iter().map(|tried| &tried.value).eq(&choice.grid) || !tried.iter().all(whole) {
        bail!(
            "expected a result of each of {} with each seed; remove it to choose again from the tries",
            choice.grid.join(", ")
        );
    }
    match best(tried) {
        Some(best) if best.value == *chosen => Ok(()),
        best => bail!(
            "{key} = {chosen} was chosen, where {} has {RULE}",
            best.map_or("nothing", |best| &best.value)
        ),
    }
}

/// Refuses what was made with other settings than are asked for.
fn refuse_difference(made_at: &Path, made: &Settings, asked: &Settings, absent: &str) -> Result<()> {
    let keys: BTreeSet<_> = asked.keys().chain(made.keys()).collect();
    let value = |settings: &Settings, key: &String| settings.get(key).cloned().unwrap_or(absent.into());
    let differing: Vec<_> = keys
        .into_iter()
        .filter(|key| made.get(*key) != asked.get(*key))
        .map(|key| format!("{key} was {}, and is {}", value(made, key), value(asked, key)))
        .collect();
    if !differing.is_empty() {
        bail!(
            "{} was made with other settings: {}. Undo the change, or use another --out",
            made_at.display(),
            differing.join("; ")
        );
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        results::{Answers, ArmRun, Curve, Evaluation},
        series::{DECLARED, Declaration},
    };

    fn plan(test: &str) -> Plan {
        let out = std::env::temp_dir().join(format!("quads_ablation_{}_{test}", std::process::id()));
        let _ = std::fs::remove_dir_all(&out);
        let declared = Declaration::read(DECLARED, false).unwrap();
        Plan {
            layout: Layout::new(out),
            series: declared.select(&["hard".into()]).unwrap(),
            declared: declared.series,
            device: grpo_math::backend::DEVICE.into(),
            keep_checkpoints: false,
        }
    }

    fn finished(right: usize, settings: Settings) -> ArmFile {
        let answers = Answers((0..100).map(|problem| problem < right).collect());
        let evaluation = Evaluation {
            own: answers.clone(),
            trainer: answers.clone(),
            high: answers.clone(),
            w4a4: answers,
        };
        ArmFile {
            complete: true,
            settings,
            warmup_steps: 1,
            processor: None,
            run: ArmRun {
                arm: "A".into(),
                start: evaluation.clone(),
                end: evaluation,
                steps: 1,
                stopped: None,
                skipped_updates: 0,
                collapse: None,
                curve: Curve::default(),
                layers: vec![],
                wall_s: 0.0,
                host: None,
            },
        }
    }

    #[test]
    fn the_learning_rate_is_chosen_by_one_arm_before_the_others_run() {
        let plan = plan("choice");
        let hard = &plan.series[0];
        let choice = hard.choice.clone().unwrap();
        let jobs = plan.jobs();
        let tries = choice.grid.len() * choice.seeds.len();
        let tried = |job: &&Job| matches!(job, Job::Arm { tried: Some(_), .. });
        assert_eq!(jobs.iter().filter(tried).count(), tries);
        let is = |wanted: &str| jobs.iter().find(|job| job.name() == wanted).unwrap();
        let try_of = |value: &str, seed: u64| Job::Arm {
            series: hard.clone(),
            seed,
            arm: choice.arm,
            tried: Some(value.into()),
        };
        let (arm, gaps) = (is("hard, seed 1, arm B"), is("gaps of hard, seed 1"));
        // Warm-ups are there; only the choice is not.
        for seed in hard.seeds.iter().chain(&choice.seeds) {
            let warm = plan.layout.warmup("hard", *seed).join("checkpoints/step_0000");
            std::fs::create_dir_all(warm).unwrap();
        }
        let measured = plan.work(gaps, None).unwrap();

        // Means of 0.40, 0.60, 0.60 and 0.10: of the two best the first.
        let rights = [[30, 50], [80, 40], [60, 60], [10, 10]];
        for (index, (value, rights)) in choice.grid.iter().zip(rights).enumerate() {
            for (seed, right) in choice.seeds.iter().zip(rights) {
                assert_eq!(plan.chosen(hard, &choice).unwrap(), None, "{index} of {tries}");
                assert!(!plan.is_ready(arm).unwrap() && plan.is_ready(gaps).unwrap());
                let run = plan.layout.choice_arm("hard", value, *seed, choice.arm);
                let settings = all_settings(&plan.assignments(&try_of(value, *seed)).unwrap()).unwrap();
                files::write(&arm_file(&run), &finished(right, settings)).unwrap();
            }
        }
        assert!(plan.is_ready(arm).unwrap());
        let chosen = choice.grid[1].clone();
        assert_eq!(plan.chosen(hard, &choice).unwrap().unwrap().chosen, chosen);
        // Without settings they are no warm-ups to go on from.
        std::fs::remove_dir_all(plan.layout.out().join("warmups")).unwrap();
        plan.left().unwrap();
        assert!(!plan.layout.choice("hard").exists(), "looking writes nothing");
        plan.keep_choice(hard).unwrap();
        let file: Chosen = files::read(&plan.layout.choice("hard")).unwrap().unwrap();
        assert_eq!((&file.chosen, &file.tried[1].pass_at_1), (&chosen, &vec![0.8, 0.4]));
        let Work::Arm { run, .. } = plan.work(arm, None).unwrap() else {
            panic!("an arm's work");
        };
        assert!(run.assignments.contains(&format!("{}={chosen}", choice.key)));
        // What was measured before the choice stays as it is, and nothing is tried again.
        assert_eq!(plan.work(gaps, None).unwrap(), measured);
        assert_eq!(plan.jobs().iter().filter(tried).count(), 0);
        // A file of another choice, or of none, is refused before anything is run.
        let with = |change: &dyn Fn(&mut Chosen)| {
            let mut other = file.clone();
            change(&mut other);
            serde_json::to_string(&other).unwrap()
        };
        for (text, expected) in [
            ("{".into(), "cannot read"),
            (
                with(&|file| file.chosen = "7".into()),
                "trainer.learning_rate = 7 was chosen, which the declaration does not offer",
            ),
            (
                with(&|file| file.arm = "B".into()),
                "was chosen by arm B with the seeds",
            ),
            (
                with(&|file| file.seeds = vec![1, 2]),
                "with the seeds [1, 2], where arm A",
            ),
            (with(&|file| file.tried.clear()), "expected a result of each of 3e-5"),
            (
                with(&|file| file.tried[0].pass_at_1[0] = f64::NAN),
                "expected a result of each of 3e-5",
            ),
            (
                with(&|file| file.chosen = "3e-4".into()),
                "trainer.learning_rate = 3e-4 was chosen, where 1e-4 has the highest mean",
            ),
        ] {
            std::fs::write(plan.layout.choice("hard"), text).unwrap();
            let error = format!("{:#}", plan.left().unwrap_err());
            assert!(error.contains("choice.json") && error.contains(expected), "{error}");
        }
        // It alone, as it is carried to another machine, tells nothing of the settings there.
        let mut elsewhere = self::plan("choice_carried");
        elsewhere.series[0].change(&["grpo.steps=50".into()]).unwrap();
        files::write(&elsewhere.layout.choice("hard"), &file).unwrap();
        let (left, _) = elsewhere.left().unwrap();
        assert!(
            left.iter()
                .all(|(job, _)| !matches!(job, Job::Arm { tried: Some(_), .. }))
        );
        std::fs::remove_dir_all(elsewhere.layout.out()).unwrap();
        // A try of another arm, or made with other settings, is found beside it; one of another device is none.
        files::write(&plan.layout.choice("hard"), &file).unwrap();
        plan.left().unwrap();
        let run = plan
            .layout
            .choice_arm("hard", &choice.grid[0], choice.seeds[0], choice.arm);
        let whole: ArmFile = files::read(&arm_file(&run)).unwrap().unwrap();
        let mut other = whole.clone();
        other.settings.insert("run.device".into(), "\"cuda:0\"".into());
        files::write(&arm_file(&run), &other).unwrap();
        plan.left().unwrap();
        other.settings.insert("grpo.steps".into(), "8".into());
        files::write(&arm_file(&run), &other).unwrap();
        let error = format!("{:#}", plan.left().unwrap_err());
        assert!(error.contains("grpo.steps was 8, and is 100"), "{error}");
        other = whole.clone();
        other.run.arm = "B".into();
        files::write(&arm_file(&run), &other).unwrap();
        let error = format!("{:#}", plan.left().unwrap_err());
        assert!(
            error.contains("the file of arm B, where that of arm A is expected"),
            "{error}"
        );
        // Judged on fewer problems than the others.
        other = whole;
        other.run.end.own.0.pop();
        files::write(&arm_file(&run), &other).unwrap();
        std::fs::remove_file(plan.layout.choice("hard")).unwrap();
        let error = format!("{:#}", plan.left().unwrap_err());
        assert!(error.contains("different numbers of problems: {99, 100}"), "{error}");
        // An arm whose choice is gone.
        std::fs::remove_dir_all(&run).unwrap();
        let run = plan.path(arm);
        std::fs::create_dir_all(run.join("checkpoints")).unwrap();
        std::fs::write(run.join("config.toml"), "").unwrap();
        let error = format!("{:#}", plan.left().unwrap_err());
        assert!(
            error.contains("seed_1/B is there, and") && error.contains("choice.json is not"),
            "{error}"
        );
        std::fs::remove_dir_all(plan.layout.out()).unwrap();
    }

    /// As many right answers of 1,024, as a file keeps their shares.
    #[test]
    fn equal_means_stay_equal_in_a_file() {
        let tried = |value: &str, right: [f64; 2]| Tried {
            value: value.into(),
            pass_at_1: right.map(|right| right / 1024.0).to_vec(),
        };
        for more in 0..100 {
            let more = f64::from(more);
            let tried = [tried("1", [700.0, 700.0]), tried("2", [700.0 + more, 700.0 - more])];
            let text = serde_json::to_string(&tried).unwrap();
            let read: Vec<Tried> = serde_json::from_str(&text).unwrap();
            assert_eq!(best(&read).unwrap().value, "1", "{text}");
        }
        let close = [tried("1", [700.0, 700.0]), tried("2", [700.0, 701.0])];
        assert_eq!(best(&close).unwrap().value, "2");
    }

    #[test]
    fn series_that_agree_share_their_warm_ups() {
        let mut plan = plan("warmups");
        plan.series = plan.declared.clone();
        let jobs = plan.jobs();
        let names: BTreeSet<_> = jobs
            .iter()
            .filter_map(|job| match job {
                Job::Warmup { name, .. } => Some(name.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(names, BTreeSet::from(["calm", "hard", "scaling-128", "scaling-256"]));
    }

    /// All that are declared, so that those of a later call are there; no others: `rollout_old` refuses G.
    #[test]
    fn gaps_are_those_of_the_arms_that_a_series_is_declared_with() {
        let mut plan = plan("gaps");
        plan.series = plan.declared.clone();
        for series in &mut plan.series {
            series.arms.truncate(1);
        }
        let arms = |name: &str| {
            let job = plan.jobs().into_iter().find_map(|job| match job {
                Job::Gaps { ref series, .. } if series.name == name => Some(job),
                _ => None,
            });
            let warm = plan.layout.warmup("calm", 1);
            std::fs::create_dir_all(warm.join("checkpoints/step_0000")).unwrap();
            match plan.work(&job.unwrap(), None).unwrap() {
                Work::Gaps { arms, .. } => arms.join(" "),
                other => panic!("{other:?} is no measurement of gaps"),
            }
        };
        assert_eq!(arms("calm"), "A B C D E E+ F F' G H I");
        assert_eq!(arms("rollout_old"), "A B C D E E+ F F' H I");
        std::fs::remove_dir_all(plan.layout.out()).unwrap();
    }
}
