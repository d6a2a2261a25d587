//! `tokenizer.json`.
use super::TextError;
use burn_nvfp4::safetensors_file::regular_file;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};
use tokenizers::Tokenizer;

const FILE: &str = "tokenizer.json";
/// Six times the largest that is in use.
const MAX_BYTES: u64 = 200_000_000;

/// The tokenizer of a Hub folder.
#[derive(Clone, Debug)]
pub struct TextTokenizer {
    path: PathBuf,
    tokenizer: Tokenizer,
    vocab_size: usize,
}

impl TextTokenizer {
    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// When it is absent, no file, or not what the `tokenizers` library writes.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, TextError> {
        let path = folder.as_ref().join(FILE);
        let bytes = regular_file::read(&path, MAX_BYTES)?;
        // The library has panicked on damaged files before.
        let read = catch_unwind(|| Tokenizer::from_bytes(&bytes));
        let damaged = |problem: String| TextError::Damaged {
            path: path.clone(),
            problem,
        };
        let mut tokenizer = match read {
            Ok(read) => read.map_err(|error| damaged(error.to_string()))?,
            Err(_) => return Err(damaged("the tokenizer's library cannot read it".into())),
        };
        // Lengths are the caller's business; a tokenizer that cuts or pads in silence is not.
        let _ = tokenizer.with_truncation(None);
        tokenizer.with_padding(None);
        let ids = tokenizer.get_vocab(true).into_values();
        Ok(Self {
            vocab_size: ids.max().map_or(0, |largest| largest as usize + 1),
            path,
            tokenizer,
        })
    }

    /// One more than the largest id. A model may have more tokens than its tokenizer, never fewer.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token, such as `<|im_end|>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// The ids of a text, with what the tokenizer puts around every text (a beginning-of-sequence token, say).
    ///
    /// # Errors
    /// When the tokenizer has no token for a part of it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_as(text, true)
    }

    /// The ids of a rendered [`ChatTemplate`](super::ChatTemplate), which has its special tokens already.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_as(text, false)
    }

    fn encode_as(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encode = || self.tokenizer.encode_fast(text, add_special_tokens);
        Ok(self.guarded(encode)?.get_ids().to_vec())
    }

    /// The text of ids, without special tokens.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails. Unknown ids are left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.guarded(|| self.tokenizer.decode(ids, true))
    }

    /// The text of ids, special tokens spelt out.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_with_special_tokens(&self, ids: &[u32]) -> Result<String, TextError> {
        self.guarded(|| self.tokenizer.decode(ids, false))
    }

    /// Text as its ids arrive.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream {
            tokenizer: self,
            ids: vec![],
            given: 0,
        }
    }

    fn guarded<T>(&self, run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, TextError> {
        let refuse = |problem| TextError::Tokenizer {
            path: self.path.clone(),
            problem,
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(result) => result.map_err(|error| refuse(error.to_string())),
            Err(_) => Err(refuse("the tokenizer's library cannot run it".into())),
        }
    }
}

/// What is not given yet of a text whose ids arrive one by one; see [`TextTokenizer::stream`].
///
/// A token may hold a part of a character: text is given when its characters are whole.
#[derive(Clone, Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    ids: Vec<u32>,
    /// Bytes of the text of `ids` that were given.
    given: usize,
}

impl TextStream<'_> {
    /// Takes an id, and gives the text that is certain now; often that of the id.
    ///
    /// # Errors
    /// As [`TextTokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        // A character that is cut decodes to the replacement character.
        match text.ends_with('\u{FFFD}') {
            true => Ok(String::new()),
            false => Ok(self.rest(&text)),
        }
    }

    /// What was held back, when no id follows.
    ///
    /// # Errors
    /// As [`TextTokenizer::decode`].
    pub fn finish(mut self) -> Result<String, TextError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(self.rest(&text))
    }

    fn rest(&mut self, text: &str) -> String {
        let rest = text.get(self.given..).unwrap_or_default().to_string();
        self.given = text.len();
        self.forget();
        rest
    }

    /// Keeps the cost of a token from growing with the text: of what was given, a few ids stay as context.
    fn forget(&mut self) {
        const CONTEXT: usize = 8;
        if self.ids.len() < 8 * CONTEXT {
            return;
        }
        let kept = self.ids[self.ids.len() - CONTEXT..].to_vec();
        if let Ok(text) = self.tokenizer.decode(&kept) {
            self.ids = kept;
            self.given = text.len();
        }
    }
}
