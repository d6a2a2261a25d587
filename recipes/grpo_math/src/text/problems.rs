//! Training and held-out problems from JSON lines.
use anyhow::{Result, bail};
use burn_quads::{
    dataset::{TextProblem, load_problems},
    tasks::Problem,
};
use std::collections::BTreeSet;

use super::TextLanguage;
use crate::{config::DataConfig, fingerprint::Fingerprint, plan::thousands};

/// Where a held-out file is missing, one problem of so many is held out.
const HELD_OUT_SHARE: usize = 10;

/// The sets of a run, and what was left out of them.
#[derive(Debug)]
pub struct TextProblems {
    /// The training file's name.
    pub name: String,
    /// To train on, in the file's order.
    pub training: Vec<Problem>,
    /// For evaluation only.
    pub held_out: Vec<Problem>,
    /// Most tokens of a prompt.
    pub longest_prompt: usize,
    /// What the user should know.
    pub notes: Vec<String>,
    /// Of what decides a run's course: the problems as token ids, their answers, the ids that end an answer, and the
    /// model's configuration.
    pub fingerprint: Fingerprint,
}

impl TextProblems {
    /// Reads the files. At most `most_held_out` problems are held out; no training problem asks what one of them asks.
    ///
    /// # Errors
    /// When a file cannot be read, or a set would be empty.
    pub fn read(data: &DataConfig, language: &TextLanguage, most_held_out: usize) -> Result<Self> {
        let mut notes = Vec::new();
        let mut training = load_problems(&data.train, &data.fields)?;
        let mut held_out = match &data.held_out {
            Some(path) => load_problems(path, &data.fields)?,
            None => {
                let count = (training.len() / HELD_OUT_SHARE).clamp(1, most_held_out);
                let rest = training.len().saturating_sub(count);
                notes.push(format!(
                    "the last {} problems of {} are held out; another file: --held-out FILE",
                    thousands(count),
                    data.train.display()
                ));
                training.split_off(rest)
            }
        };
        // None of them, also where not all are evaluated on.
        let asked: BTreeSet<&str> = held_out.iter().map(|problem| problem.prompt.trim()).collect();
        let before = training.len();
        training.retain(|problem| !asked.contains(problem.prompt.trim()));
        if training.len() < before {
            let count = thousands(before - training.len());
            notes.push(format!(
                "{count} training problems are left out: they are among the held-out ones"
            ));
        }

        if held_out.len() > most_held_out {
            notes.push(format!(
                "the first {} of {} held-out problems are evaluated on; more: --set eval.problems=N",
                thousands(most_held_out),
                thousands(held_out.len())
            ));
            held_out.truncate(most_held_out);
        }

        let mut longest_prompt = 0;
        let mut fingerprint = Fingerprint::default();
        fingerprint.add(format!("{:?}", language.eos_token_ids()).as_bytes());
        fingerprint.add(language.model().config().to_json().as_bytes());
        let mut short_enough = |set: Vec<TextProblem>, path: &std::path::Path| -> Result<Vec<Problem>> {
            let mut kept = Vec::with_capacity(set.len());
            let count = set.len();
            for problem in set {
                let tokens = language.prompt(&problem.prompt)?;
                if tokens.len() <= data.max_prompt_tokens {
                    longest_prompt = longest_prompt.max(tokens.len());
                    for id in tokens {
                        fingerprint.add(&id.to_le_bytes());
                    }
                    fingerprint.add(problem.answer.as_bytes());
                    fingerprint.add(b"\n");
                    kept.push(Problem {
                        task: "data",
                        canonical: problem.prompt.clone(),
                        prompt: problem.prompt,
                        answer: problem.answer,
                    });
                }
            }
            // Where one set ends and the other begins.
            fingerprint.add(b"\n");
            if kept.len() < count {
                notes.push(format!(
                    "{} of {} problems of {} are left out: their prompts have more than data.max_prompt_tokens = {} tokens",
                    thousands(count - kept.len()),
                    thousands(count),
                    path.display(),
                    data.max_prompt_tokens
                ));
            }
            Ok(kept)
        };
        let training = short_enough(training, &data.train)?;
        let held_out = short_enough(held_out, data.held_out.as_ref().unwrap_or(&data.train))?;
        for (set, what) in [(&training, "train on"), (&held_out, "evaluate on")] {
            if set.is_empty() {
                bail!(
                    "{}: no problem is left to {what}. {}",
                    data.train.display(),
                    notes.join("; ")
                );
            }
        }
        Ok(Self {
            name: data
                .train
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            training,
            held_out,
            longest_prompt,
            notes,
            fingerprint,
        })
    }
}
