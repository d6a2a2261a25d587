//! How problems are written as token ids, and what completions of them are worth.
use anyhow::Result;
use burn_quads::tasks::{Problem, Vocabulary};

use crate::text::TextLanguage;

/// Token ids and rewards of a run's problems.
#[derive(Clone, Debug)]
pub enum Language {
    /// One token a character, for the tasks that are generated here; right is exactly the answer and the end.
    Characters(Vocabulary),
    /// A model's own tokenizer, for problems in free text; right is what a rule finds the same as the answer.
    Text(TextLanguage),
}

impl Language {
    /// What the policy reads.
    pub fn prompt(&self, problem: &Problem) -> Result<Vec<u32>> {
        match self {
            Self::Characters(vocabulary) => Ok(vocabulary.encode_prompt(&problem.prompt)?),
            Self::Text(text) => text.prompt(&problem.prompt),
        }
    }

    /// What the policy would write if it wrote the answer and nothing else, the end included.
    pub fn answer(&self, problem: &Problem) -> Result<Vec<u32>> {
        match self {
            Self::Characters(vocabulary) => Ok(vocabulary.encode_answer(&problem.answer)?),
            Self::Text(text) => text.answer(&problem.answer),
        }
    }

    /// 1 when a completion is right, else 0.
    pub fn reward(&self, problem: &Problem, completion: &[u32]) -> Result<f32> {
        match self {
            Self::Characters(vocabulary) => Ok(problem.reward(vocabulary, completion)?),
            Self::Text(text) => text.reward(&problem.answer, completion),
        }
    }

    /// A problem with its answer, to look at.
    pub fn example(&self, problem: &Problem) -> String {
        match self {
            Self::Characters(_) => format!("{}{}", problem.prompt, problem.answer),
            Self::Text(_) => format!("{} -> {}", problem.prompt, problem.answer),
        }
    }

    /// Tokens that end a completion.
    pub fn eos_token_ids(&self) -> Vec<u32> {
        match self {
            Self::Characters(_) => vec![Vocabulary::EOS],
            Self::Text(text) => text.eos_token_ids().to_vec(),
        }
    }
}
