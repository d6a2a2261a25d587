//! What can be wrong with a configuration, a batch or a run.

/// An error of the GRPO learner.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GrpoError {
    /// A configuration value that cannot work.
    #[error("{option}: expected {expected}, got {got}")]
    Option {
        /// The option's key.
        option: &'static str,
        /// What is accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// A batch whose parts do not fit together.
    #[error("{field}: expected {expected}, got {got}")]
    Batch {
        /// The field, with the row where there is one.
        field: String,
        /// What is accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// Too many updates in a row had a loss or a gradient that is not finite.
    #[error(
        "training diverged: {consecutive} updates in a row had a {quantity} that is not finite (step {step}); \
         lower optimizer.schedule.learning_rate, or start again from an earlier checkpoint"
    )]
    Diverged {
        /// How many updates in a row were skipped.
        consecutive: usize,
        /// What was not finite in the last one: `loss` or `gradient norm`.
        quantity: &'static str,
        /// The learner's step.
        step: usize,
    },
}

impl GrpoError {
    pub(crate) fn option(option: &'static str, expected: impl Into<String>, got: impl ToString) -> Self {
        Self::Option {
            option,
            expected: expected.into(),
            got: got.to_string(),
        }
    }

    pub(crate) fn batch(field: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Self {
        Self::Batch {
            field: field.into(),
            expected: expected.into(),
            got: got.to_string(),
        }
    }
}
