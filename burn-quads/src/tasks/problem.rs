//! One problem, and what a task is.
use rand_chacha::ChaCha8Rng;
use std::fmt::Debug;

use super::{Split, Vocabulary, VocabularyError};

/// A prompt and the only answer that earns a reward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Name of the task that made it.
    pub task: &'static str,
    /// What the policy reads, `"710+052="`.
    pub prompt: String,
    /// What it has to write, `"7620"`.
    pub answer: String,
    /// The canonical form of the prompt: prompts that ask the same thing (17 + 250, 250 + 17) share it, so that no
    /// split holds the mirror image of another's problem.
    pub canonical: String,
}

impl Problem {
    /// Where the problem belongs.
    pub fn split(&self) -> Split {
        Split::of(self.task, &self.canonical)
    }

    /// 1 when the completion is exactly the answer and the end of sequence, else 0. Any token ids are fine, and what
    /// the completion copies from the prompt earns nothing.
    pub fn reward(&self, vocabulary: &Vocabulary, completion: &[u32]) -> Result<f32, VocabularyError> {
        let answer = vocabulary.encode_answer(&self.answer)?;
        Ok(if completion == answer { 1.0 } else { 0.0 })
    }
}

/// A kind of problem: a seeded generator. The same state of the generator gives the same problem on every machine.
pub trait Task: Debug + Send + Sync {
    /// Name, as in configuration files.
    fn name(&self) -> &'static str;
    /// Characters that its prompts and answers are made of.
    fn alphabet(&self) -> String;
    /// Draws one problem, evenly over all of the task's.
    fn generate(&self, rng: &mut ChaCha8Rng) -> Problem;
    /// Most characters in a prompt.
    fn max_prompt_len(&self) -> usize;
    /// Most characters in an answer.
    fn max_answer_len(&self) -> usize;
}

/// A task or a mixture that cannot be made, or has too few problems.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TaskError {
    /// A setting out of range.
    #[error("{task}: {setting} is {value}; expected {expected}")]
    Setting {
        /// Task.
        task: &'static str,
        /// Name of the setting.
        setting: &'static str,
        /// What it was.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// No task has a weight above 0.
    #[error("no task has a weight above 0")]
    NoTask,
    /// Not as many different problems as asked for.
    #[error(
        "asked for {asked} different {split} problems of {tasks}, found {found}: ask for fewer, or enlarge the task"
    )]
    TooFew {
        /// How many were asked for.
        asked: usize,
        /// How many there seem to be.
        found: usize,
        /// Of which split.
        split: Split,
        /// Of which tasks.
        tasks: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn problem() -> (Problem, Vocabulary) {
        let problem = Problem {
            task: "addition",
            prompt: "12+30=".into(),
            answer: "240".into(),
            canonical: "12+30".into(),
        };
        (problem, Vocabulary::new("0123456789+=".chars()))
    }

    #[test]
    fn only_the_answer_and_the_end_earn_a_reward() {
        let (problem, vocabulary) = problem();
        let reward = |ids: &[u32]| problem.reward(&vocabulary, ids).unwrap();
        let answer = vocabulary.encode("240").unwrap();
        let end = |mut ids: Vec<u32>| {
            ids.push(Vocabulary::EOS);
            ids
        };
        assert_eq!(reward(&end(answer.clone())), 1.0);
        assert_eq!(reward(&answer), 0.0, "no end of sequence");
        assert_eq!(reward(&end(end(answer.clone()))), 0.0, "tokens after the end");
        assert_eq!(reward(&[]), 0.0);
        assert_eq!(reward(&[Vocabulary::EOS]), 0.0);
        for text in ["0240", "2400", "24", "12+30=240", "12+30=", "42", "240240"] {
            assert_eq!(reward(&end(vocabulary.encode(text).unwrap())), 0.0, "{text}");
        }
        let mut padded = vec![Vocabulary::PAD];
        padded.extend(end(answer));
        assert_eq!(reward(&padded), 0.0);
    }

    #[test]
    fn an_answer_outside_the_vocabulary_is_an_error_not_a_zero() {
        let (problem, _) = problem();
        assert!(problem.reward(&Vocabulary::new("01".chars()), &[]).is_err());
    }

    proptest! {
        #[test]
        fn any_tokens_are_judged(ids in proptest::collection::vec(any::<u32>(), 0..12)) {
            let (problem, vocabulary) = problem();
            let right = vocabulary.decode(&ids) == "240<eos>";
            prop_assert_eq!(problem.reward(&vocabulary, &ids).unwrap(), if right { 1.0 } else { 0.0 });
        }

        #[test]
        fn short_sequences_of_real_tokens_are_judged(ids in proptest::collection::vec(0u32..16, 0..6)) {
            let (problem, vocabulary) = problem();
            let right = vocabulary.decode(&ids) == "240<eos>";
            prop_assert_eq!(problem.reward(&vocabulary, &ids).unwrap(), if right { 1.0 } else { 0.0 });
        }
    }
}
