//! A loaded model's folder: its tokenizer, its chat template, its weights, and folders like it.
use anyhow::{Context, Result, bail};
use burn_quads::{
    checkpoint::{FolderFormat, ModelFolder, save_folder},
    rewards::{exact_reward, math_reward},
    text::{ChatMessage, ChatTemplate, TextError, TextTokenizer},
};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    backend::Policy,
    config::{DataConfig, QUESTION, Verifier},
    progress::LoadBar,
    run_folder::RunFolder,
};

/// How a loaded model reads problems, and how its answers are judged.
#[derive(Clone, Debug)]
pub struct TextLanguage(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    folder: ModelFolder,
    tokenizer: TextTokenizer,
    chat_template: Option<ChatTemplate>,
    template: String,
    /// The prompt ends within the model's thoughts: an answer comes after them.
    opens_thinking: bool,
    verifier: Verifier,
    eos_token_ids: Vec<u32>,
}

impl Parts {
    /// A question in the prompt's template, and that in the chat template.
    fn rendered(&self, question: &str) -> Result<String> {
        let text = self.template.replace(QUESTION, question);
        Ok(match &self.chat_template {
            Some(template) => template.render(&[ChatMessage::new("user", text)], true, &BTreeMap::new())?,
            None => text,
        })
    }
}

impl TextLanguage {
    /// Reads the folder's configuration, tokenizer and template; the weights later.
    ///
    /// # Errors
    /// When a file is absent or damaged, the model is not supported, its vocabulary is smaller than the tokenizer's, or no
    /// token ends a text.
    pub fn open(data: &DataConfig) -> Result<Self> {
        let folder = ModelFolder::open(&data.model)?;
        if folder.quantization_config().is_some() {
            bail!(
                "{}: the weights are quantized (quantization_config in config.json), and a master weight is needed for \
                 training: take the model that they were made of, or `nvfp4_convert dequantize` first",
                data.model.display()
            );
        }
        let tokenizer = TextTokenizer::open(&data.model)?;
        let chat_template = match data.chat_template.then(|| ChatTemplate::open(&data.model)) {
            None | Some(Err(TextError::NoChatTemplate { .. })) => None,
            Some(template) => Some(template?),
        };
        let name = data.model.display();
        if folder.config().vocab_size < tokenizer.vocab_size() {
            bail!(
                "{name}: the tokenizer has {} tokens and the model {}: they do not belong together",
                tokenizer.vocab_size(),
                folder.config().vocab_size
            );
        }
        let eos_token_ids = folder.eos_token_ids().to_vec();
        if eos_token_ids.is_empty() {
            bail!("{name}: no eos_token_id in generation_config.json or config.json: no answer would ever end");
        }
        let mut parts = Parts {
            folder,
            tokenizer,
            chat_template,
            template: data.prompt.clone(),
            opens_thinking: false,
            verifier: data.verifier,
            eos_token_ids,
        };
        let rendered = parts.rendered("?")?;
        parts.opens_thinking = rendered.rfind("<think>") > rendered.rfind("</think>");
        Ok(Self(Arc::new(parts)))
    }

    /// The model's folder.
    pub fn model(&self) -> &ModelFolder {
        &self.0.folder
    }

    /// Tokens that end a completion.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.0.eos_token_ids
    }

    /// Reads the weights, with a bar that shows how far it is.
    pub fn load_model(&self) -> Result<Policy> {
        let bar = LoadBar::new();
        let model = self.0.folder.load(&Default::default(), |progress| bar.show(progress))?;
        bar.finish();
        Ok(model)
    }

    /// A question in the prompt's template, as a chat where the model has one.
    pub fn prompt(&self, question: &str) -> Result<Vec<u32>> {
        let text = self.0.rendered(question)?;
        let ids = match self.0.chat_template {
            Some(_) => self.0.tokenizer.encode_rendered(&text)?,
            None => self.0.tokenizer.encode(&text)?,
        };
        if ids.is_empty() {
            bail!("{}: a prompt without a token: {text:?}", self.0.folder.path().display());
        }
        Ok(ids)
    }

    /// A bare answer and the end.
    pub fn answer(&self, answer: &str) -> Result<Vec<u32>> {
        let mut ids = self.0.tokenizer.encode_rendered(&format!("\\boxed{{{answer}}}"))?;
        ids.push(self.0.eos_token_ids[0]);
        Ok(ids)
    }

    /// 1 when the text of a completion gives the right answer. A completion that was cut off is judged like any other.
    pub fn reward(&self, answer: &str, completion: &[u32]) -> Result<f32> {
        let mut text = self.0.tokenizer.decode(completion)?;
        if self.0.opens_thinking {
            text.insert_str(0, "<think>");
        }
        Ok(match self.0.verifier {
            Verifier::Math => math_reward(&text, answer),
            Verifier::Exact => exact_reward(&text, answer),
        })
    }

    /// What makes a folder with f32 weights a model of its own: configuration, tokenizer, generation settings.
    pub fn write_beside_weights(&self, folder: &Path) -> Result<()> {
        let written = self.f32_format().write_companions(folder);
        written.with_context(|| format!("cannot write {}", folder.display()))
    }

    /// That of a folder like the model's, with every weight in f32.
    pub fn f32_format(&self) -> FolderFormat {
        FolderFormat::like(&self.0.folder).with_dtype(burn_nvfp4::safetensors_file::Dtype::F32)
    }

    /// Writes the model after step `step` in the form in which it was loaded: names, types, tokenizer.
    pub fn export(&self, policy: &Policy, run: &RunFolder, step: usize) -> Result<PathBuf> {
        let path = run.model(step);
        if !path.exists() {
            let policy = policy
                .clone()
                .with_precision(self.0.folder.config().precision.clone())?;
            save_folder(&policy, &path, &FolderFormat::like(&self.0.folder))?;
        }
        Ok(path)
    }
}
