//! `[task]`: what the problems are.
use burn_quads::tasks::{Addition, ChainSum, DigitOrder, Modular, Operation, TaskError, TaskMixture};

use super::{
    ConfigError, Layers,
    sections::{MANY, MOST_PROBLEMS},
};

type Result<T> = std::result::Result<T, ConfigError>;

/// `[task]`
#[derive(Clone, Debug)]
pub struct TaskConfig {
    /// Different training problems.
    pub train_problems: usize,
    addition: (f64, usize, DigitOrder),
    chain_sum: (f64, usize, usize, bool),
    modular: (f64, usize, usize, Vec<Operation>),
}

impl TaskConfig {
    pub(super) fn read(layers: &Layers) -> Result<Self> {
        let weight = |key| layers.number(key, "0 or more", |weight| weight >= 0.0);
        let orders = [
            ("least_significant_first", DigitOrder::LeastSignificantFirst),
            ("most_significant_first", DigitOrder::MostSignificantFirst),
        ];
        let signs = layers.text("task.modular.operations");
        let operations: Option<Vec<_>> = signs.chars().map(Operation::from_sign).collect();
        let config = Self {
            train_problems: layers.count("task.train_problems", 1..=MOST_PROBLEMS)?,
            addition: (
                weight("task.addition.weight")?,
                layers.count("task.addition.digits", 0..=MANY)?,
                layers.choice("task.addition.order", &orders)?,
            ),
            chain_sum: (
                weight("task.chain_sum.weight")?,
                layers.count("task.chain_sum.terms", 0..=MANY)?,
                layers.count("task.chain_sum.modulus", 0..=MANY)?,
                layers.flag("task.chain_sum.subtract"),
            ),
            modular: (
                weight("task.modular.weight")?,
                layers.count("task.modular.modulus", 0..=MANY)?,
                layers.count("task.modular.max_operand", 0..=MANY)?,
                operations.ok_or_else(|| layers.refuse("task.modular.operations", "one or more of + - *"))?,
            ),
        };
        config.mixture().map_err(|error| config.refuse(layers, &error))?;
        Ok(config)
    }

    /// What somebody must know to find a problem right who reads one.
    pub fn notation(&self) -> &'static str {
        match self.addition {
            (weight, _, DigitOrder::LeastSignificantFirst) if weight > 0.0 => " (sums are written units first)",
            _ => "",
        }
    }

    /// The tasks, to draw from.
    pub fn mixture(&self) -> std::result::Result<TaskMixture, TaskError> {
        let (weight, digits, order) = self.addition;
        let addition = Addition::new(digits as u32, order)?;
        let (chain_weight, terms, modulus, subtract) = self.chain_sum;
        let chain_sum = ChainSum::new(terms, modulus as u32, subtract)?;
        let (modular_weight, remainder, max_operand, operations) = &self.modular;
        let modular = Modular::new(*remainder as u32, *max_operand as u32, operations)?;
        TaskMixture::new(vec![
            (weight, Box::new(addition)),
            (chain_weight, Box::new(chain_sum)),
            (*modular_weight, Box::new(modular)),
        ])
    }

    /// A task's complaint, as one about a setting.
    pub(super) fn refuse(&self, layers: &Layers, error: &TaskError) -> ConfigError {
        match error {
            TaskError::Setting {
                task,
                setting,
                expected,
                ..
            } => layers.refuse(&format!("task.{task}.{setting}"), expected),
            TaskError::NoTask => layers.refuse("task.addition.weight", "a weight above 0 for at least one task"),
            TaskError::TooFew { .. } => layers.refuse("task.train_problems", error),
        }
    }
}
