//! `[data]` and `model.folder`: problems in free text, and the model that is trained on them.
use burn_quads::dataset::FieldNames;
use std::path::PathBuf;

use super::{ConfigError, Layers};

type Result<T> = std::result::Result<T, ConfigError>;

/// Where a prompt's template has the question.
pub const QUESTION: &str = "{question}";

/// `[data]` and `model.folder`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataConfig {
    /// A Hugging Face folder: the model and its tokenizer.
    pub model: PathBuf,
    /// JSON lines to train on.
    pub train: PathBuf,
    /// JSON lines for evaluation; without them the end of the training file.
    pub held_out: Option<PathBuf>,
    /// Names of the fields.
    pub fields: FieldNames,
    /// What the model reads, with [`QUESTION`] in it.
    pub prompt: String,
    /// Whether the model's chat template wraps it.
    pub chat_template: bool,
    /// Longest prompt in tokens.
    pub max_prompt_tokens: usize,
    /// How an answer is found right.
    pub verifier: Verifier,
}

/// How an answer is found right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verifier {
    /// The same number, set, interval, expression or text.
    Math,
    /// The same text.
    Exact,
}

impl DataConfig {
    /// `None` when neither a model nor data is given.
    pub(super) fn read(layers: &Layers) -> Result<Option<Self>> {
        let path = |key| {
            Some(layers.text(key))
                .filter(|path| !path.is_empty())
                .map(PathBuf::from)
        };
        let name = |key| Some(layers.text(key)).filter(|name| !name.is_empty()).map(String::from);
        let (model, train, held_out) = (path("model.folder"), path("data.train"), path("data.held_out"));
        let fields = FieldNames {
            prompt: name("data.prompt_field"),
            answer: name("data.answer_field"),
        };
        let prompt = layers.text("data.prompt").to_string();
        if !prompt.contains(QUESTION) {
            return Err(layers.refuse("data.prompt", format!("a text with {QUESTION} in it")));
        }
        let chat_template = layers.flag("data.chat_template");
        let max_prompt_tokens = layers.count("data.max_prompt_tokens", 1..=1_000_000)?;
        let verifier = layers.choice("data.verifier", &[("math", Verifier::Math), ("exact", Verifier::Exact)])?;
        let (model, train) = match (model, train, &held_out) {
            (Some(model), Some(train), _) => (model, train),
            (Some(_), None, _) => {
                return Err(layers.refuse(
                    "data.train",
                    "a file of problems (--data FILE) to train model.folder on",
                ));
            }
            (None, Some(_), _) => {
                let expected = "a Hugging Face folder (--model DIR): problems in free text need a model that reads";
                return Err(layers.refuse("model.folder", expected));
            }
            (None, None, Some(_)) => {
                return Err(layers.refuse("data.train", "a file of problems (--data FILE) beside data.held_out"));
            }
            (None, None, None) => return Ok(None),
        };
        Ok(Some(Self {
            model,
            train,
            held_out,
            fields,
            prompt,
            chat_template,
            max_prompt_tokens,
            verifier,
        }))
    }
}
