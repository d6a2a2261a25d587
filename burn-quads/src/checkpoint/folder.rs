//! A folder of the Hub: a model with its configuration.
use std::path::{Path, PathBuf};

use burn::tensor::backend::Backend;
use burn_nvfp4::{
    PackError,
    safetensors_file::{Dtype, FileTensor, SafetensorsError, SafetensorsFolder, regular_file, strict_json},
};
use serde_json::{Map, Value};

use super::{
    CheckpointError,
    load::{LoadProgress, load_files},
};
use crate::modules::{
    moe::{PrecisionError, QuadsMoe},
    moe_config::{ConfigError, QuadsMoeConfig},
    residual_masks::MaskError,
};

pub(super) const CONFIG: &str = "config.json";
pub(super) const GENERATION_CONFIG: &str = "generation_config.json";
/// A configuration is a page of text.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Sine and cosine of a million positions of 128 channels.
const MAX_ROTARY_BYTES: usize = 1 << 30;

/// A Qwen3-MoE or OLMoE folder as the Hub has them: `config.json`, and `model.safetensors` or shards with their index.
///
/// ```no_run
/// use burn::backend::Flex;
/// use burn_nvfp4::Nvfp4;
/// use burn_quads::checkpoint::ModelFolder;
///
/// let folder = ModelFolder::open("models/OLMoE-1B-7B-0924")?;
/// let model = folder.load::<Nvfp4<Flex>>(&Default::default(), |_| {})?;
/// # let _ = model;
/// # Ok::<_, burn_quads::checkpoint::OpenError>(())
/// ```
#[derive(Debug)]
pub struct ModelFolder {
    path: PathBuf,
    config: QuadsMoeConfig,
    config_text: String,
    config_json: Map<String, Value>,
    eos_token_ids: Vec<u32>,
    files: SafetensorsFolder,
}

/// Why a folder could not be opened or loaded.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A file is absent or damaged.
    #[error(transparent)]
    File(#[from] SafetensorsError),
    /// `config.json` is damaged, or of a model that is not supported.
    #[error("{}: {source}", .path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ConfigError,
    },
    /// A setting beside the model is not what it should be.
    #[error("{}: {problem}", .path.display())]
    Setting {
        /// The file.
        path: PathBuf,
        /// The field and what is wrong with it.
        problem: String,
    },
    /// The weights do not fit the configuration.
    #[error(transparent)]
    Weights(#[from] CheckpointError),
    /// Packed weights cannot run in the precision.
    #[error(transparent)]
    Precision(#[from] PrecisionError),
    /// The masks belong to another model.
    #[error(transparent)]
    Masks(#[from] MaskError),
    /// A packed weight cannot be one of the model's.
    #[error("{parameter}: {source}")]
    Packed {
        /// Path of the parameter.
        parameter: String,
        /// What is wrong with it.
        source: PackError,
    },
}

impl ModelFolder {
    /// Reads the configuration and the headers of the weights.
    ///
    /// # Errors
    /// When a file is absent or damaged, or the model is not supported.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let config_path = path.join(CONFIG);
        let config_text = regular_file::read_text(&config_path, MAX_CONFIG_BYTES)?;
        let config = QuadsMoeConfig::from_json(&config_text).map_err(|source| OpenError::Config {
            path: config_path.clone(),
            source,
        })?;
        let config_json = strict_json::parse_object(config_text.as_bytes()).expect("it was read just now");
        Ok(Self {
            eos_token_ids: eos_token_ids(path, &config_json, config.vocab_size)?,
            files: SafetensorsFolder::open(path)?,
            path: path.into(),
            config,
            config_text,
            config_json,
        })
    }

    /// Where the folder is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration, in [`Precision::High`](crate::Precision::High).
    pub fn config(&self) -> &QuadsMoeConfig {
        &self.config
    }

    /// `config.json` as it stands there.
    pub fn config_text(&self) -> &str {
        &self.config_text
    }

    /// The tokens that end a text: those of `generation_config.json`, else of `config.json`. May be empty.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// How the weights are quantized, if they are.
    pub fn quantization_config(&self) -> Option<&Value> {
        self.config_json
            .get("quantization_config")
            .filter(|value| !value.is_null())
    }

    /// The type that the configuration gives for the weights.
    pub fn dtype(&self) -> Option<Dtype> {
        ["dtype", "torch_dtype"]
            .iter()
            .find_map(|field| match self.config_json.get(*field)?.as_str()? {
                "float32" => Some(Dtype::F32),
                "bfloat16" => Some(Dtype::BF16),
                "float16" => Some(Dtype::F16),
                _ => None,
            })
    }

    /// The weights.
    pub fn files(&self) -> &SafetensorsFolder {
        &self.files
    }

    /// Loads the model, one parameter after the other, into f32. `progress` is called after each.
    ///
    /// # Errors
    /// When the tensors are not exactly those that the configuration asks for (all that are missing, unexpected or of
    /// another shape or type in one error), or they are quantized.
    pub fn load<B: Backend>(
        &self,
        device: &B::Device,
        mut progress: impl FnMut(LoadProgress<'_>),
    ) -> Result<QuadsMoe<B>, OpenError> {
        if self.quantization_config().is_some() {
            let problem = "quantization_config: the weights are quantized; load them with `load_packed`";
            return Err(self.refuse_config(problem));
        }
        self.check_sizes()?;
        let model = self.config.init(device);
        Ok(load_files(model, &self.files, &self.path, &mut progress)?)
    }

    /// An error about `config.json`.
    pub(super) fn refuse_config(&self, problem: impl Into<String>) -> OpenError {
        OpenError::Setting {
            path: self.path.join(CONFIG),
            problem: problem.into(),
        }
    }

    /// Whether the model that the configuration describes can be that of the files, before anything is made for it.
    pub(super) fn check_sizes(&self) -> Result<(), OpenError> {
        let refuse = |problem: String| self.refuse_config(problem);
        let config = &self.config;
        // A byte of packed codes holds two.
        let held = |tensor: FileTensor<'_>| {
            let values = if tensor.dtype() == Dtype::U8 { 2 } else { 1 };
            tensor
                .shape()
                .iter()
                .fold(values, |n: u64, d| n.saturating_mul(*d as u64))
        };
        let held: u64 = self.files.tensors().map(held).fold(0, u64::saturating_add);
        // A weight or two that are missing are listed later, by name.
        let plausible = |n: u64| n <= held.saturating_mul(2).saturating_add(1 << 20);
        match config.num_params() {
            Some(n) if plausible(n) => {}
            n => {
                let n = n.map_or("more than 2^64".into(), |n| n.to_string());
                let problem = format!("describes a model of {n} parameters, the files hold {held}");
                return Err(refuse(problem));
            }
        }
        let rotary = config.max_position_embeddings.checked_mul(8 * config.head_dim);
        if rotary.is_none_or(|bytes| bytes > MAX_ROTARY_BYTES) {
            let positions = config.max_position_embeddings;
            let problem = format!("max_position_embeddings = {positions}: the table of positions would exceed 1 GiB");
            return Err(refuse(problem));
        }
        Ok(())
    }
}

/// The eos tokens of `generation_config.json` where it names them, else of `config.json`.
fn eos_token_ids(folder: &Path, config: &Map<String, Value>, vocab_size: usize) -> Result<Vec<u32>, OpenError> {
    let path = folder.join(GENERATION_CONFIG);
    let refuse = |path: &Path, problem: String| OpenError::Setting {
        path: path.into(),
        problem,
    };
    if path.symlink_metadata().is_ok() {
        let text = regular_file::read(&path, MAX_CONFIG_BYTES)?;
        let json = strict_json::parse_object(&text).map_err(|problem| refuse(&path, problem))?;
        if let Some(value) = json.get("eos_token_id").filter(|value| !value.is_null()) {
            return token_ids(value, vocab_size).map_err(|problem| refuse(&path, problem));
        }
    }
    let value = config.get("eos_token_id").unwrap_or(&Value::Null);
    token_ids(value, vocab_size).map_err(|problem| refuse(&folder.join(CONFIG), problem))
}

/// One token, several, or none. A token that the model does not have would end nothing.
fn token_ids(value: &Value, vocab_size: usize) -> Result<Vec<u32>, String> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match value {
        Value::Null => Some(vec![]),
        Value::Array(list) => list.iter().map(id).collect(),
        value => id(value).map(|id| vec![id]),
    };
    let ids = ids.ok_or_else(|| format!("eos_token_id = {value}: must be a token id or a list of them"))?;
    match ids.iter().find(|id| **id as usize >= vocab_size) {
        Some(id) => Err(format!(
            "eos_token_id = {value}: the model has no token {id}, its vocabulary has {vocab_size}"
        )),
        None => Ok(ids),
    }
}
