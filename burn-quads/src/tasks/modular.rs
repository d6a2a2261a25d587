//! Modular arithmetic: `(47+38)%7=` → `1`.
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::{Problem, Task, TaskError};

/// An operation of modular arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `+`
    Add,
    /// `-`
    Subtract,
    /// `*`
    Multiply,
}

impl Operation {
    /// The operation of a sign.
    pub fn from_sign(sign: char) -> Option<Self> {
        match sign {
            '+' => Some(Self::Add),
            '-' => Some(Self::Subtract),
            '*' => Some(Self::Multiply),
            _ => None,
        }
    }

    fn sign(self) -> char {
        match self {
            Self::Add => '+',
            Self::Subtract => '-',
            Self::Multiply => '*',
        }
    }
}

/// Two numbers up to `max_operand`, one of `operations`, and the remainder by `modulus` (never negative).
#[derive(Clone, Debug)]
pub struct Modular {
    modulus: u32,
    max_operand: u32,
    operations: Vec<Operation>,
}

impl Modular {
    /// Modulus 2 to 1,000, operands 1 to 9,999, at least one operation.
    pub fn new(modulus: u32, max_operand: u32, operations: &[Operation]) -> Result<Self, TaskError> {
        let refuse = |setting, value: String, expected| TaskError::Setting {
            task: "modular",
            setting,
            value,
            expected,
        };
        if !(2..=1_000).contains(&modulus) {
            return Err(refuse("modulus", modulus.to_string(), "2 to 1000"));
        }
        if !(1..=9_999).contains(&max_operand) {
            return Err(refuse("max_operand", max_operand.to_string(), "1 to 9999"));
        }
        if operations.is_empty() {
            return Err(refuse("operations", "empty".into(), "one or more of + - *"));
        }
        Ok(Self {
            modulus,
            max_operand,
            operations: operations.to_vec(),
        })
    }

    fn problem(&self, a: u32, operation: Operation, b: u32) -> Problem {
        let width = self.max_operand.to_string().len();
        let (sign, modulus) = (operation.sign(), i64::from(self.modulus));
        let (x, y) = (i64::from(a), i64::from(b));
        let remainder = match operation {
            Operation::Add => x + y,
            Operation::Subtract => x - y,
            Operation::Multiply => x * y,
        }
        .rem_euclid(modulus);
        let (first, second) = match operation {
            Operation::Subtract => (a, b),
            Operation::Add | Operation::Multiply => (a.min(b), a.max(b)),
        };
        Problem {
            task: self.name(),
            prompt: format!("({a:0width$}{sign}{b:0width$})%{modulus}="),
            answer: remainder.to_string(),
            canonical: format!("({first:0width$}{sign}{second:0width$})%{modulus}"),
        }
    }
}

impl Task for Modular {
    fn name(&self) -> &'static str {
        "modular"
    }

    fn alphabet(&self) -> String {
        let signs = self.operations.iter().map(|operation| operation.sign());
        "0123456789()%=".chars().chain(signs).collect()
    }

    fn generate(&self, rng: &mut ChaCha8Rng) -> Problem {
        let a = rng.random_range(0..=self.max_operand);
        let b = rng.random_range(0..=self.max_operand);
        let operation = self.operations[rng.random_range(0..self.operations.len() as u32) as usize];
        self.problem(a, operation, b)
    }

    fn max_prompt_len(&self) -> usize {
        2 * self.max_operand.to_string().len() + self.modulus.to_string().len() + 5
    }

    fn max_answer_len(&self) -> usize {
        (self.modulus - 1).to_string().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn remainders_are_never_negative() {
        let task = Modular::new(7, 99, &[Operation::Add, Operation::Subtract, Operation::Multiply]).unwrap();
        let written = |a, operation, b| {
            let problem = task.problem(a, operation, b);
            format!("{}{}", problem.prompt, problem.answer)
        };
        assert_eq!(written(47, Operation::Add, 38), "(47+38)%7=1");
        assert_eq!(written(3, Operation::Subtract, 38), "(03-38)%7=0");
        assert_eq!(written(3, Operation::Subtract, 4), "(03-04)%7=6");
        assert_eq!(written(99, Operation::Multiply, 99), "(99*99)%7=1");
    }

    #[test]
    fn only_operations_that_commute_share_a_canonical_form() {
        let task = Modular::new(10, 99, &[Operation::Add]).unwrap();
        let canonical = |a, operation, b| task.problem(a, operation, b).canonical;
        assert_eq!(canonical(5, Operation::Add, 2), canonical(2, Operation::Add, 5));
        assert_eq!(
            canonical(5, Operation::Multiply, 2),
            canonical(2, Operation::Multiply, 5)
        );
        assert_ne!(
            canonical(5, Operation::Subtract, 2),
            canonical(2, Operation::Subtract, 5)
        );
    }

    #[test]
    fn generated_problems_stay_in_their_alphabet_and_lengths() {
        let task = Modular::new(13, 120, &[Operation::Subtract, Operation::Multiply]).unwrap();
        let alphabet = task.alphabet();
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for _ in 0..200 {
            let problem = task.generate(&mut rng);
            assert_eq!(problem.prompt.len(), task.max_prompt_len());
            assert!(problem.answer.len() <= task.max_answer_len());
            let text = format!("{}{}", problem.prompt, problem.answer);
            assert!(text.chars().all(|c| alphabet.contains(c)), "{text}");
        }
    }

    #[test]
    fn impossible_settings_are_refused() {
        let add = [Operation::Add];
        assert!(
            Modular::new(1, 99, &add)
                .unwrap_err()
                .to_string()
                .contains("modulus is 1; expected 2 to 1000")
        );
        assert!(
            Modular::new(7, 0, &add)
                .unwrap_err()
                .to_string()
                .contains("max_operand is 0")
        );
        assert!(
            Modular::new(7, 99, &[])
                .unwrap_err()
                .to_string()
                .contains("operations is empty")
        );
    }
}
