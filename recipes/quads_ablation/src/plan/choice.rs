//! How a series chooses the value of a setting: by tries of one arm on seeds of their own, before any other arm runs.
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;

use super::{Job, Plan};
use crate::{
    files::{self, ArmFile},
    results::{Chosen, Tried},
    series::{Choice, Series},
};

/// How a value is chosen, in words.
pub const RULE: &str = "the highest mean over the seeds of pass@1 at the end, in the arm's own precision; of equals the \
                        first of the list";

impl Plan {
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
}

/// The jobs that a value is chosen by.
pub(super) fn tries(series: &Series, choice: &Choice) -> Vec<Job> {
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
pub(super) fn best(tried: &[Tried]) -> Option<&Tried> {
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
