//! The problems of a run: three sets that share none, and the order in which training meets them.
use anyhow::{Result, bail};
use burn_quads::tasks::{Problem, Split, TaskError, TaskMixture};
use rand::seq::SliceRandom;

use crate::{
    config::Config,
    language::Language,
    seeds,
    text::{TextLanguage, TextProblems},
};

/// The same held-out problems in every run of a task: the seed of the run does not enter.
const FIXED: u64 = 0;

/// `count` different problems of a set; those that train depend on the run's seed.
pub fn distinct(mixture: &TaskMixture, split: Split, count: usize, seed: u64) -> Result<Vec<Problem>, TaskError> {
    let seed = match split {
        Split::Train => seed,
        Split::Validation | Split::HeldOut => FIXED,
    };
    mixture.distinct(split, count, &mut seeds::stream(seed, "problems", split as u64))
}

/// Where problems come from.
#[derive(Debug)]
pub enum Source {
    /// They are generated.
    Tasks(TaskMixture),
    /// They were read from files.
    Files(TextProblems),
}

/// Problems, and how they are written.
#[derive(Debug)]
pub struct Problems {
    /// Where they come from.
    pub source: Source,
    /// Problems to token ids, completions to rewards.
    pub language: Language,
    /// For evaluation only.
    pub held_out: Vec<Problem>,
    /// Stops the warm-up; none where there is no warm-up.
    pub validation: Vec<Problem>,
    /// GRPO's prompts.
    pub training: Vec<Problem>,
    /// Of what was read from files and decides a run's course: problems, tokens, model. Absent where nothing was.
    pub fingerprint: Option<String>,
    seed: u64,
}

impl Problems {
    /// Draws, or reads, the sets that the settings ask for.
    pub fn draw(config: &Config) -> Result<Self> {
        let seed = config.run.seed;
        if let Some(data) = &config.data {
            let language = TextLanguage::open(data)?;
            let mut files = TextProblems::read(data, &language, config.eval.problems)?;
            let positions = language.model().config().max_position_embeddings;
            let longest = files.longest_prompt + config.rollout.max_new_tokens;
            if longest > positions {
                bail!(
                    "rollout.max_new_tokens = {}: with prompts of up to {} tokens that exceeds the model's {positions} \
                     positions (max_position_embeddings); lower it, or data.max_prompt_tokens",
                    config.rollout.max_new_tokens,
                    files.longest_prompt
                );
            }
            return Ok(Self {
                fingerprint: Some(files.fingerprint.to_string()),
                held_out: std::mem::take(&mut files.held_out),
                training: std::mem::take(&mut files.training),
                validation: vec![],
                source: Source::Files(files),
                language: Language::Text(language),
                seed,
            });
        }
        let mixture = config.task.mixture()?;
        let set = |split, count| distinct(&mixture, split, count, seed);
        Ok(Self {
            fingerprint: None,
            held_out: set(Split::HeldOut, config.eval.problems)?,
            validation: set(Split::Validation, config.warmup.validation_problems)?,
            training: set(Split::Train, config.task.train_problems)?,
            language: Language::Characters(mixture.vocabulary()),
            source: Source::Tasks(mixture),
            seed,
        })
    }

    /// What they are, in a word or two.
    pub fn names(&self) -> String {
        match &self.source {
            Source::Tasks(mixture) => mixture.names(),
            Source::Files(files) => files.name.clone(),
        }
    }

    /// Most tokens of a prompt.
    pub fn max_prompt_tokens(&self) -> usize {
        match &self.source {
            Source::Tasks(mixture) => mixture.max_prompt_tokens(),
            Source::Files(files) => files.longest_prompt,
        }
    }

    /// Most tokens of a prompt with its completion that is to be expected.
    pub fn expected_tokens(&self, max_new_tokens: usize) -> usize {
        self.max_prompt_tokens()
            + match &self.source {
                Source::Tasks(mixture) => mixture.max_answer_tokens(),
                Source::Files(_) => max_new_tokens,
            }
    }

    /// `count` held-out problems to measure something else on; fewer where there are no more.
    pub fn more_held_out(&self, count: usize, stream: &'static str) -> Result<Vec<Problem>, TaskError> {
        match &self.source {
            Source::Files(_) => Ok(self.held_out.iter().take(count).cloned().collect()),
            Source::Tasks(mixture) => {
                let draw = |count| mixture.distinct(Split::HeldOut, count, &mut seeds::stream(self.seed, stream, 0));
                match draw(count) {
                    Err(TaskError::TooFew { found, .. }) => draw(found),
                    drawn => drawn,
                }
            }
        }
    }

    /// `count` training problems from number `next` on. Number `epoch · n + i` is the `i`-th of a pass over all `n`
    /// training problems, each pass in an order of its own; a batch may reach over a pass's end.
    pub fn batch(&self, next: u64, count: usize) -> Vec<&Problem> {
        let size = self.training.len() as u64;
        let mut batch = Vec::with_capacity(count);
        let mut epoch = next / size;
        let mut order = self.order(epoch);
        for number in next..next + count as u64 {
            if number / size != epoch {
                epoch = number / size;
                order = self.order(epoch);
            }
            batch.push(&self.training[order[(number % size) as usize]]);
        }
        batch
    }

    /// Problems of one step of the warm-up, drawn anew from the training split.
    ///
    /// # Errors
    /// When they come from files: a model that is loaded needs no warm-up.
    pub fn warmup_batch(&self, step: usize, count: usize) -> Result<Vec<Problem>> {
        let Source::Tasks(mixture) = &self.source else {
            bail!("a warm-up needs generated problems");
        };
        let mut rng = seeds::stream(self.seed, "warmup problems", step as u64);
        (0..count)
            .map(|_| Ok(mixture.sample(Split::Train, &mut rng)?))
            .collect()
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.training.len()).collect();
        order.shuffle(&mut seeds::stream(self.seed, "training order", epoch));
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn problems(seed: u64, train: usize) -> Problems {
        let settings = [
            format!("run.seed={seed}"),
            format!("task.train_problems={train}"),
            "grpo.prompts_per_step=2".into(),
            "eval.problems=50".into(),
            "warmup.validation_problems=40".into(),
        ];
        Problems::draw(&Config::load(None, &settings).unwrap()).unwrap()
    }

    #[test]
    fn the_three_sets_share_no_problem() {
        let problems = problems(1, 500);
        let canonical = |set: &[Problem]| set.iter().map(|p| p.canonical.clone()).collect::<BTreeSet<_>>();
        let mut training = canonical(&problems.training);
        for step in 0..20 {
            training.extend(canonical(&problems.warmup_batch(step, 64).unwrap()));
        }
        let (validation, held_out) = (canonical(&problems.validation), canonical(&problems.held_out));
        assert!(training.is_disjoint(&validation) && training.is_disjoint(&held_out));
        assert!(validation.is_disjoint(&held_out));
    }

    #[test]
    fn held_out_problems_are_the_same_for_every_seed() {
        let (one, two) = (problems(1, 20), problems(2, 20));
        assert_eq!((&one.held_out, &one.validation), (&two.held_out, &two.validation));
        assert_ne!(one.training, two.training);
    }

    #[test]
    fn every_pass_meets_every_problem_once_in_another_order() {
        let problems = problems(3, 10);
        let pass = |epoch: u64| {
            problems
                .batch(10 * epoch, 10)
                .iter()
                .map(|p| p.prompt.clone())
                .collect::<Vec<_>>()
        };
        let (first, second) = (pass(0), pass(1));
        assert_ne!(first, second);
        let set = |pass: &[String]| pass.iter().cloned().collect::<BTreeSet<_>>();
        assert_eq!(set(&first).len(), 10);
        assert_eq!(set(&first), set(&second));
        // A batch over the end of a pass is the end of one and the beginning of the next.
        let across: Vec<_> = problems.batch(7, 6).iter().map(|p| p.prompt.clone()).collect();
        assert_eq!(across, [&first[7..], &second[..3]].concat());
    }
}
