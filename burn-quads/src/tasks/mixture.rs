//! Several tasks, drawn by weight, with their splits kept apart.
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;

use super::{Problem, Split, Task, TaskError, Vocabulary};

/// Draws without success after which a split counts as exhausted. A split holds an eighth of the problems, so a
/// thousand misses in a row mean that there is nothing (more) to find.
const PATIENCE: usize = 2_000;

/// Tasks and how often each is drawn.
#[derive(Debug)]
pub struct TaskMixture {
    tasks: Vec<(f64, Box<dyn Task>)>,
    total: f64,
}

impl TaskMixture {
    /// A mixture of tasks with their weights, which need not sum to 1; tasks of weight 0 are left out.
    pub fn new(tasks: Vec<(f64, Box<dyn Task>)>) -> Result<Self, TaskError> {
        for (weight, task) in &tasks {
            if !weight.is_finite() || *weight < 0.0 {
                return Err(TaskError::Setting {
                    task: task.name(),
                    setting: "weight",
                    value: weight.to_string(),
                    expected: "a finite number, 0 or more",
                });
            }
        }
        let tasks: Vec<_> = tasks.into_iter().filter(|(weight, _)| *weight > 0.0).collect();
        if tasks.is_empty() {
            return Err(TaskError::NoTask);
        }
        let total = tasks.iter().map(|(weight, _)| weight).sum();
        Ok(Self { tasks, total })
    }

    /// The characters of all tasks.
    pub fn vocabulary(&self) -> Vocabulary {
        Vocabulary::new(
            self.tasks
                .iter()
                .flat_map(|(_, task)| task.alphabet().chars().collect::<Vec<_>>()),
        )
    }

    /// Names of the tasks, joined for people: `"addition, modular"`.
    pub fn names(&self) -> String {
        self.tasks
            .iter()
            .map(|(_, task)| task.name())
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Most tokens in a prompt, the beginning of sequence included.
    pub fn max_prompt_tokens(&self) -> usize {
        1 + self
            .tasks
            .iter()
            .map(|(_, task)| task.max_prompt_len())
            .max()
            .unwrap_or(0)
    }

    /// Most tokens in an answer, the end of sequence included.
    pub fn max_answer_tokens(&self) -> usize {
        1 + self
            .tasks
            .iter()
            .map(|(_, task)| task.max_answer_len())
            .max()
            .unwrap_or(0)
    }

    /// One problem of a split; the same one may come again.
    pub fn sample(&self, split: Split, rng: &mut ChaCha8Rng) -> Result<Problem, TaskError> {
        let task = self.choose(rng);
        self.find(task, split, rng, |_| true)
            .ok_or_else(|| self.too_few(1, 0, split))
    }

    /// `count` different problems of a split, in the order in which they were drawn.
    pub fn distinct(&self, split: Split, count: usize, rng: &mut ChaCha8Rng) -> Result<Vec<Problem>, TaskError> {
        let mut seen = BTreeSet::new();
        let mut problems = Vec::with_capacity(count);
        while problems.len() < count {
            let task = self.choose(rng);
            match self.find(task, split, rng, |problem| seen.insert(problem.prompt.clone())) {
                Some(problem) => problems.push(problem),
                None => return Err(self.too_few(count, problems.len(), split)),
            }
        }
        Ok(problems)
    }

    fn choose(&self, rng: &mut ChaCha8Rng) -> &dyn Task {
        let mut left = rng.random::<f64>() * self.total;
        for (weight, task) in &self.tasks {
            left -= weight;
            if left < 0.0 {
                return task.as_ref();
            }
        }
        // Rounding can leave a last sliver of weight.
        self.tasks[self.tasks.len() - 1].1.as_ref()
    }

    fn find(
        &self,
        task: &dyn Task,
        split: Split,
        rng: &mut ChaCha8Rng,
        mut accept: impl FnMut(&Problem) -> bool,
    ) -> Option<Problem> {
        (0..PATIENCE)
            .map(|_| task.generate(rng))
            .find(|problem| problem.split() == split && accept(problem))
    }

    fn too_few(&self, asked: usize, found: usize, split: Split) -> TaskError {
        TaskError::TooFew {
            asked,
            found,
            split,
            tasks: self.names(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::{Addition, ChainSum, DigitOrder, Modular, Operation};
    use rand::SeedableRng;

    fn mixture(weights: [f64; 3]) -> Result<TaskMixture, TaskError> {
        TaskMixture::new(vec![
            (
                weights[0],
                Box::new(Addition::new(3, DigitOrder::LeastSignificantFirst)?),
            ),
            (weights[1], Box::new(ChainSum::new(4, 10, true)?)),
            (
                weights[2],
                Box::new(Modular::new(7, 99, &[Operation::Add, Operation::Subtract])?),
            ),
        ])
    }

    #[test]
    fn no_split_holds_a_problem_of_another() {
        let mixture = mixture([1.0, 1.0, 1.0]).unwrap();
        let draw = |split, seed| {
            let problems = mixture
                .distinct(split, 1_500, &mut ChaCha8Rng::seed_from_u64(seed))
                .unwrap();
            problems
                .into_iter()
                .map(|p| (p.task, p.canonical))
                .collect::<BTreeSet<_>>()
        };
        let train = draw(Split::Train, 1);
        let validation = draw(Split::Validation, 2);
        let held_out = draw(Split::HeldOut, 3);
        assert!(train.is_disjoint(&validation) && train.is_disjoint(&held_out) && validation.is_disjoint(&held_out));
    }

    #[test]
    fn tasks_come_by_weight_in_every_split() {
        let mixture = mixture([3.0, 0.0, 1.0]).unwrap();
        assert_eq!(mixture.names(), "addition, modular");
        for split in [Split::Train, Split::Validation, Split::HeldOut] {
            let mut rng = ChaCha8Rng::seed_from_u64(5);
            let problems: Vec<_> = (0..2_000).map(|_| mixture.sample(split, &mut rng).unwrap()).collect();
            assert!(problems.iter().all(|problem| problem.split() == split));
            let addition = problems.iter().filter(|problem| problem.task == "addition").count();
            assert!(addition.abs_diff(1_500) < 100, "{addition} of 2000");
        }
    }

    #[test]
    fn the_vocabulary_writes_every_problem() {
        let mixture = mixture([1.0, 1.0, 1.0]).unwrap();
        let vocabulary = mixture.vocabulary();
        assert_eq!(vocabulary.len(), 3 + "()%*+-=0123456789".len() - 1);
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        for problem in mixture.distinct(Split::Train, 300, &mut rng).unwrap() {
            let prompt = vocabulary.encode_prompt(&problem.prompt).unwrap();
            let answer = vocabulary.encode_answer(&problem.answer).unwrap();
            assert!(prompt.len() <= mixture.max_prompt_tokens());
            assert!(answer.len() <= mixture.max_answer_tokens());
            assert_eq!(problem.reward(&vocabulary, &answer).unwrap(), 1.0);
            assert_eq!(problem.reward(&vocabulary, &prompt).unwrap(), 0.0);
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_set() {
        let mixture = mixture([1.0, 2.0, 0.5]).unwrap();
        let draw = |seed| {
            mixture
                .distinct(Split::HeldOut, 100, &mut ChaCha8Rng::seed_from_u64(seed))
                .unwrap()
        };
        assert_eq!(draw(4), draw(4));
        assert_ne!(draw(4), draw(5));
    }

    #[test]
    fn a_task_with_too_few_problems_says_how_many_it_has() {
        let tiny = TaskMixture::new(vec![(
            1.0,
            Box::new(Addition::new(1, DigitOrder::MostSignificantFirst).unwrap()),
        )]);
        let error = tiny
            .unwrap()
            .distinct(Split::HeldOut, 90, &mut ChaCha8Rng::seed_from_u64(1))
            .unwrap_err();
        let TaskError::TooFew { asked: 90, found, .. } = error else {
            panic!("{error}")
        };
        assert!((1..90).contains(&found), "{found}");
    }

    #[test]
    fn impossible_weights_are_refused() {
        assert_eq!(mixture([0.0, 0.0, 0.0]).unwrap_err(), TaskError::NoTask);
        for weight in [-1.0, f64::NAN, f64::INFINITY] {
            let error = mixture([1.0, weight, 0.0]).unwrap_err();
            assert!(error.to_string().starts_with("chain_sum: weight is"), "{error}");
        }
    }
}
