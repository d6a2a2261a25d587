//! Problems with a verifiable answer: what the policy is asked, and when it is right.
//!
//! A [`Task`] draws [`Problem`]s; a [`TaskMixture`] draws from several by weight and keeps training, validation and
//! held-out problems apart by [`Split`]; the [`Vocabulary`] turns text into token ids, one a character. The reward is
//! [`Problem::reward`]: 1 for exactly the answer and the end of sequence, 0 for anything else.
mod addition;
mod chain_sum;
mod mixture;
mod modular;
mod problem;
mod split;
mod vocabulary;

pub use addition::{Addition, DigitOrder};
pub use chain_sum::ChainSum;
pub use mixture::TaskMixture;
pub use modular::{Modular, Operation};
pub use problem::{Problem, Task, TaskError};
pub use split::Split;
pub use vocabulary::{Vocabulary, VocabularyError};
