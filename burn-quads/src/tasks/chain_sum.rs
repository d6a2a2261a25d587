//! Running totals of a chain of digits: `3+5-2+9=` → `3865`.
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::{Problem, Task, TaskError};

/// A chain of signed digits; the answer is every running total modulo `modulus`, one digit a term, so that the policy
/// shows its work and one slip spoils all that follows.
#[derive(Clone, Debug)]
pub struct ChainSum {
    terms: usize,
    modulus: u32,
    subtract: bool,
}

impl ChainSum {
    /// Chains of 2 to 32 terms modulo 2 to 10; `subtract` allows minus signs.
    pub fn new(terms: usize, modulus: u32, subtract: bool) -> Result<Self, TaskError> {
        let check = |setting, value: usize, range: std::ops::RangeInclusive<usize>, expected| {
            if range.contains(&value) {
                return Ok(());
            }
            Err(TaskError::Setting {
                task: "chain_sum",
                setting,
                value: value.to_string(),
                expected,
            })
        };
        check("terms", terms, 2..=32, "2 to 32")?;
        check("modulus", modulus as usize, 2..=10, "2 to 10")?;
        Ok(Self {
            terms,
            modulus,
            subtract,
        })
    }

    fn problem(&self, terms: &[(bool, u32)]) -> Problem {
        let (mut prompt, mut answer, mut total) = (String::new(), String::new(), 0);
        for (i, &(minus, digit)) in terms.iter().enumerate() {
            if i > 0 {
                prompt.push(if minus { '-' } else { '+' });
            }
            prompt.push(char::from(b'0' + digit as u8));
            total = (total + if minus { self.modulus - digit } else { digit }) % self.modulus;
            answer.push(char::from(b'0' + total as u8));
        }
        let canonical = format!("{prompt}%{}", self.modulus);
        prompt.push('=');
        Problem {
            task: self.name(),
            prompt,
            answer,
            canonical,
        }
    }
}

impl Task for ChainSum {
    fn name(&self) -> &'static str {
        "chain_sum"
    }

    fn alphabet(&self) -> String {
        let digits = (0..self.modulus).map(|digit| char::from(b'0' + digit as u8));
        digits.chain("+=".chars()).chain(self.subtract.then_some('-')).collect()
    }

    fn generate(&self, rng: &mut ChaCha8Rng) -> Problem {
        let terms: Vec<_> = (0..self.terms)
            .map(|i| {
                let minus = self.subtract && i > 0 && rng.random_range(0..2u32) == 1;
                (minus, rng.random_range(0..self.modulus))
            })
            .collect();
        self.problem(&terms)
    }

    fn max_prompt_len(&self) -> usize {
        2 * self.terms
    }

    fn max_answer_len(&self) -> usize {
        self.terms
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn the_answer_is_every_running_total() {
        let problem = ChainSum::new(4, 10, true)
            .unwrap()
            .problem(&[(false, 3), (false, 5), (true, 2), (false, 9)]);
        assert_eq!((problem.prompt.as_str(), problem.answer.as_str()), ("3+5-2+9=", "3865"));
        let below_zero = ChainSum::new(2, 7, true).unwrap().problem(&[(false, 2), (true, 5)]);
        assert_eq!((below_zero.prompt.as_str(), below_zero.answer.as_str()), ("2-5=", "24"));
        let minus_zero = ChainSum::new(2, 7, true).unwrap().problem(&[(false, 2), (true, 0)]);
        assert_eq!(minus_zero.answer, "22");
    }

    #[test]
    fn generated_chains_stay_in_their_alphabet_and_lengths() {
        for subtract in [false, true] {
            let task = ChainSum::new(5, 6, subtract).unwrap();
            let alphabet = task.alphabet();
            assert_eq!(alphabet.contains('-'), subtract);
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            for _ in 0..100 {
                let problem = task.generate(&mut rng);
                assert_eq!(problem.prompt.len(), task.max_prompt_len());
                assert_eq!(problem.answer.len(), task.max_answer_len());
                let text = format!("{}{}", problem.prompt, problem.answer);
                assert!(text.chars().all(|c| alphabet.contains(c)), "{text}");
            }
        }
    }

    #[test]
    fn impossible_settings_are_refused() {
        assert!(
            ChainSum::new(1, 10, false)
                .unwrap_err()
                .to_string()
                .contains("terms is 1; expected 2 to 32")
        );
        assert!(
            ChainSum::new(4, 11, false)
                .unwrap_err()
                .to_string()
                .contains("modulus is 11; expected 2 to 10")
        );
    }
}
