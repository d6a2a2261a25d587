//! How many different problems a task has shows only when they are drawn. A default that is more than that becomes what
//! there is; a number that somebody asked for is refused, with the largest possible one.
use burn_quads::tasks::{Split, TaskError, TaskMixture};

use super::{ConfigError, Layers, sections::MOST_PROBLEMS};
use crate::{plan::thousands, problems};

const SETS: [(&str, Split); 3] = [
    ("eval.problems", Split::HeldOut),
    ("warmup.validation_problems", Split::Validation),
    ("task.train_problems", Split::Train),
];

/// Fits the sets' sizes to the tasks; returns a note for each that changed. `seed` is the run's.
pub(super) fn fit(layers: &mut Layers, mixture: &TaskMixture, seed: u64) -> Result<Vec<String>, ConfigError> {
    let mut notes = Vec::new();
    for (key, split) in SETS {
        let asked = layers.count(key, 1..=MOST_PROBLEMS)?;
        let Err(TaskError::TooFew { found, .. }) = problems::distinct(mixture, split, asked, seed) else {
            continue;
        };
        let tasks = mixture.names();
        if found == 0 {
            return Err(layers.refuse(
                key,
                format!("a task with {split} problems: {tasks} has none, enlarge it"),
            ));
        }
        if !layers.is_default(key) {
            return Err(layers.refuse(key, format!("at most {found}, all {split} problems of {tasks}")));
        }
        layers.fit(key, found, &format!("all {split} problems of {tasks}"));
        notes.push(format!(
            "{key} is {}, not the default {}: {tasks} has no more {split} problems.",
            thousands(found),
            thousands(asked)
        ));
    }
    Ok(notes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Config, problems::Problems};

    fn load(assignments: &[&str]) -> Result<Config, ConfigError> {
        let assignments: Vec<String> = assignments.iter().map(|a| a.to_string()).collect();
        Config::load(None, &assignments)
    }

    const SMALL: &[&str] = &["task.addition.digits=1", "grpo.prompts_per_step=8"];

    #[test]
    fn a_default_that_a_task_cannot_fill_becomes_what_there_is() {
        let config = load(SMALL).unwrap();
        let problems = Problems::draw(&config).unwrap();
        assert_eq!(problems.held_out.len(), config.eval.problems);
        // 100 sums of two digits.
        let all = problems.held_out.len() + problems.validation.len() + problems.training.len();
        assert_eq!(all, 100);
        assert_eq!(config.notes.len(), 3);
        assert!(
            config.notes[0].starts_with(&format!(
                "eval.problems is {}, not the default 1,024: addition has no more held-out",
                config.eval.problems
            )),
            "{:?}",
            config.notes
        );
        // What a run writes down is taken for granted when it is resumed.
        let mut written = Layers::defaults();
        written.lay_text(&config.toml, "config.toml").unwrap();
        let read = Config::read(&mut written).unwrap();
        assert_eq!((read.fingerprint, read.notes), (config.fingerprint, Vec::new()));
    }

    #[test]
    fn two_digits_work_without_further_settings() {
        let config = load(&["task.addition.digits=2"]).unwrap();
        Problems::draw(&config).unwrap();
    }

    #[test]
    fn a_number_that_was_asked_for_is_refused_with_the_largest_possible() {
        for (key, split) in SETS {
            let asked = format!("{key}=5000");
            let error = load(&[SMALL, &[&asked]].concat()).unwrap_err().to_string();
            let start = format!("{key} = 5000 (from --set): expected at most ");
            let rest = error.strip_prefix(&start).unwrap_or_else(|| panic!("{error}"));
            let (largest, rest) = rest.split_once(',').unwrap();
            assert_eq!(rest, format!(" all {split} problems of addition"));
            let largest: usize = largest.parse().unwrap();
            load(&[SMALL, &[&format!("{key}={largest}")]].concat()).unwrap();
            load(&[SMALL, &[&format!("{key}={}", largest + 1)]].concat()).unwrap_err();
        }
    }

    #[test]
    fn sets_that_no_memory_holds_are_refused_at_once() {
        for (key, _) in SETS {
            let error = load(&[&format!("{key}=1000000000")]).unwrap_err().to_string();
            assert!(error.ends_with("expected a whole number from 1 to 1000000"), "{error}");
        }
    }
}
