//! The problems of a run: three sets that share none, and the order in which training meets them.
use anyhow::Result;
use burn_quads::tasks::{Problem, Split, TaskError, TaskMixture, Vocabulary};
use rand::seq::SliceRandom;

use crate::{config::Config, seeds};

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

/// Problems, and how they are written.
#[derive(Debug)]
pub struct Problems {
    /// Where warm-up problems come from.
    pub mixture: TaskMixture,
    /// Characters to token ids.
    pub vocabulary: Vocabulary,
    /// For evaluation only.
    pub held_out: Vec<Problem>,
    /// Stops the warm-up.
    pub validation: Vec<Problem>,
    /// GRPO's prompts.
    pub training: Vec<Problem>,
    seed: u64,
}

impl Problems {
    /// Draws the sets that the settings ask for.
    pub fn draw(config: &Config) -> Result<Self> {
        let mixture = config.task.mixture()?;
        let set = |split, count| distinct(&mixture, split, count, config.run.seed);
        Ok(Self {
            held_out: set(Split::HeldOut, config.eval.problems)?,
            validation: set(Split::Validation, config.warmup.validation_problems)?,
            training: set(Split::Train, config.task.train_problems)?,
            vocabulary: mixture.vocabulary(),
            mixture,
            seed: config.run.seed,
        })
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
    pub fn warmup_batch(&self, step: usize, count: usize) -> Result<Vec<Problem>> {
        let mut rng = seeds::stream(self.seed, "warmup problems", step as u64);
        (0..count)
            .map(|_| Ok(self.mixture.sample(Split::Train, &mut rng)?))
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
