//! Text for a model and from it: the tokenizer and the chat template of a Hub folder.
//!
//! | file | what is taken from it |
//! |---|---|
//! | `tokenizer.json` | [`TextTokenizer`] |
//! | `chat_template.jinja`, else `chat_template` in `tokenizer_config.json` | [`ChatTemplate`] |
//! | `tokenizer_config.json` | the special tokens that a template may name |
//!
//! Training never passes through here twice: what was sampled is learnt from as ids ([`Completion::tokens`]), because text
//! that is tokenized again need not give the same ids.
//!
//! [`Completion::tokens`]: crate::rollout::Completion::tokens
mod chat_template;
mod python_json;
mod tokenizer;

pub use chat_template::{ChatMessage, ChatTemplate};
pub use tokenizer::{TextStream, TextTokenizer};

use burn_nvfp4::safetensors_file::SafetensorsError;
use std::path::PathBuf;

/// Why there is no text, or no tokens.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file is absent, or no file.
    #[error(transparent)]
    File(#[from] SafetensorsError),
    /// A file is damaged, or asks for something unknown.
    #[error("{}: {problem}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The folder has no chat template.
    #[error(
        "{}: no chat_template.jinja, and no chat_template in tokenizer_config.json: the model was not made for chats",
        .folder.display()
    )]
    NoChatTemplate {
        /// The folder.
        folder: PathBuf,
    },
    /// The template does not accept the messages.
    #[error("the chat template in {}: {problem}", .path.display())]
    Template {
        /// Where it comes from.
        path: PathBuf,
        /// What it said.
        problem: String,
    },
    /// The tokenizer refused a text or an id.
    #[error("{}: {problem}", .path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// What it said.
        problem: String,
    },
}
