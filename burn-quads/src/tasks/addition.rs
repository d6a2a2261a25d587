//! Sums of two numbers, 17 + 250 = 267 with the units first: `710+052=` → `7620`.
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::{Problem, Task, TaskError};

/// In which order the digits of operands and answer are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigitOrder {
    /// Units first: each digit of the answer depends on one column and a carry, and the digits of its column are
    /// always the same distance away, which rotary positions can learn from few problems.
    LeastSignificantFirst,
    /// As people write.
    MostSignificantFirst,
}

/// Sums of two numbers of `digits` digits, leading zeros written; the answer has `digits + 1`.
#[derive(Clone, Debug)]
pub struct Addition {
    digits: u32,
    order: DigitOrder,
}

impl Addition {
    /// Sums of numbers of 1 to 9 digits.
    pub fn new(digits: u32, order: DigitOrder) -> Result<Self, TaskError> {
        if !(1..=9).contains(&digits) {
            return Err(TaskError::Setting {
                task: "addition",
                setting: "digits",
                value: digits.to_string(),
                expected: "1 to 9",
            });
        }
        Ok(Self { digits, order })
    }

    /// `number` in `width` digits, in this task's order.
    fn digits(&self, number: u64, width: usize) -> String {
        let as_written = format!("{number:0width$}");
        match self.order {
            DigitOrder::MostSignificantFirst => as_written,
            DigitOrder::LeastSignificantFirst => as_written.chars().rev().collect(),
        }
    }

    fn problem(&self, a: u64, b: u64) -> Problem {
        let width = self.digits as usize;
        Problem {
            task: self.name(),
            prompt: format!("{}+{}=", self.digits(a, width), self.digits(b, width)),
            answer: self.digits(a + b, width + 1),
            canonical: format!("{:0width$}+{:0width$}", a.min(b), a.max(b)),
        }
    }
}

impl Task for Addition {
    fn name(&self) -> &'static str {
        "addition"
    }

    fn alphabet(&self) -> String {
        "0123456789+=".into()
    }

    fn generate(&self, rng: &mut ChaCha8Rng) -> Problem {
        let end = 10u64.pow(self.digits);
        let (a, b) = (rng.random_range(0..end), rng.random_range(0..end));
        self.problem(a, b)
    }

    fn max_prompt_len(&self) -> usize {
        2 * self.digits as usize + 2
    }

    fn max_answer_len(&self) -> usize {
        self.digits as usize + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn digits_are_padded_and_ordered_as_asked() {
        let units_first = Addition::new(3, DigitOrder::LeastSignificantFirst).unwrap();
        let problem = units_first.problem(17, 995);
        assert_eq!((problem.prompt.as_str(), problem.answer.as_str()), ("710+599=", "2101"));
        let as_written = Addition::new(2, DigitOrder::MostSignificantFirst)
            .unwrap()
            .problem(5, 9);
        assert_eq!(
            (as_written.prompt.as_str(), as_written.answer.as_str()),
            ("05+09=", "014")
        );
    }

    #[test]
    fn mirrored_sums_share_a_split() {
        let task = Addition::new(3, DigitOrder::LeastSignificantFirst).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for _ in 0..200 {
            let (a, b) = (rng.random_range(0..1000), rng.random_range(0..1000));
            assert_eq!(task.problem(a, b).split(), task.problem(b, a).split());
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_problems() {
        let task = Addition::new(9, DigitOrder::MostSignificantFirst).unwrap();
        let draw = |seed| task.generate(&mut ChaCha8Rng::seed_from_u64(seed));
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let problem = draw(7);
        assert_eq!(problem.prompt.len(), task.max_prompt_len());
        assert_eq!(problem.answer.len(), task.max_answer_len());
    }

    #[test]
    fn impossible_widths_are_refused() {
        for digits in [0, 10] {
            let error = Addition::new(digits, DigitOrder::MostSignificantFirst).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("addition: digits is {digits}; expected 1 to 9")
            );
        }
    }
}
