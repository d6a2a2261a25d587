//! What a plan refuses before anything is run: files of other settings, other arms, other warm-ups.
use anyhow::{Context, Error, Result, bail};
use grpo_math::{checkpoints::Checkpoints, config::Layers, metrics::Position};
use std::path::Path;

use super::{Job, Plan};
use crate::{
    arms::{ARMS, Arm},
    assemble,
    files::{self, ArmFile, GapsFile},
    layout::arm_file,
    series::{Settings, all_settings, differences, settings_of},
};

impl Plan {
    /// Refuses a series of which something is there already that was made with other settings (of other seeds, say), or
    /// that does not fit together.
    ///
    /// # Errors
    /// The settings that differ, by name; what [`assemble::results`] refuses.
    pub(super) fn check_series(&self) -> Result<()> {
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

    /// Refuses a warm-up that is not the one that what is there of the series and the seed began with: it was made elsewhere,
    /// and made again here.
    ///
    /// # Errors
    /// The file and the warm-up; what cannot be read.
    pub fn check_warmup(&self, job: &Job) -> Result<()> {
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
}

/// Refuses what was made with other settings than are asked for.
fn refuse_difference(made_at: &Path, made: &Settings, asked: &Settings, absent: &str) -> Result<()> {
    let differing: Vec<_> = differences(made, asked, absent)
        .map(|[key, made, asked]| format!("{key} was {made}, and is {asked}"))
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
