//! Writing a folder of the Hub.
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use burn::tensor::backend::Backend;
use burn_nvfp4::{
    checkpoint::scheme::QUANTIZATION_CONFIG,
    safetensors_file::{Dtype, INDEX_FILE, SINGLE_FILE, SafetensorsWriter, TensorSpec, regular_file},
};
use serde_json::{Value, json};

use super::{
    CheckpointError, ModelFolder,
    folder::{CONFIG, GENERATION_CONFIG},
    parts::ExpertNaming,
    pytorch_metadata,
    save::{Files, tensors},
};
use crate::modules::{moe::QuadsMoe, moe_config::QuadsMoeConfig};

/// Files beside the weights that belong to a model and do not change with them.
const COMPANIONS: [&str; 9] = [
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];
/// What version 5 of transformers takes.
const SHARD_BYTES: u64 = 50_000_000_000;

/// How a model is written to a folder.
#[derive(Clone, Debug)]
pub struct FolderFormat {
    config_text: String,
    model: String,
    naming: ExpertNaming,
    dtype: Dtype,
    dtypes: BTreeMap<String, Dtype>,
    shard_bytes: u64,
    companions: Vec<PathBuf>,
}

/// Why a folder could not be written.
#[derive(Debug, thiserror::Error)]
pub enum SaveFolderError {
    /// The weights could not be written.
    #[error(transparent)]
    Weights(#[from] CheckpointError),
    /// The file system refused.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What it said.
        source: std::io::Error,
    },
    /// There is something already: nothing is overwritten.
    #[error("{}: exists already, and a model is never written over another", .path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The format was taken from another model.
    #[error("{field}: the model differs from the one whose format it is to be saved in")]
    OtherModel {
        /// A field in which they differ.
        field: String,
    },
}

impl FolderFormat {
    /// For a model that was made here: weights in `dtype`, one of F32, BF16 and F16; a matrix for each expert.
    ///
    /// # Panics
    /// When `dtype` is another.
    pub fn new(config: &QuadsMoeConfig, dtype: Dtype) -> Self {
        let config_text = config.to_json();
        Self {
            model: config_text.clone(),
            config_text,
            naming: ExpertNaming::PerExpert,
            dtype: Dtype::F32,
            dtypes: BTreeMap::new(),
            shard_bytes: SHARD_BYTES,
            companions: vec![],
        }
        .with_dtype(dtype)
    }

    /// That of a folder: the same configuration, names and types, and its tokenizer and generation settings beside.
    pub fn like(folder: &ModelFolder) -> Self {
        let fused = |name: &str| name.ends_with(".mlp.experts.gate_up_proj");
        let tensors = || folder.files().tensors();
        Self {
            config_text: folder.config_text().into(),
            model: folder.config().to_json(),
            naming: match tensors().any(|tensor| fused(tensor.name())) {
                true => ExpertNaming::Fused,
                false => ExpertNaming::PerExpert,
            },
            dtype: folder.dtype().unwrap_or(Dtype::F32),
            dtypes: tensors()
                .filter(|tensor| matches!(tensor.dtype(), Dtype::F32 | Dtype::BF16 | Dtype::F16))
                .map(|tensor| (tensor.name().into(), tensor.dtype()))
                .collect(),
            shard_bytes: SHARD_BYTES,
            companions: COMPANIONS.iter().map(|name| folder.path().join(name)).collect(),
        }
    }

    /// All weights in another type, one of F32, BF16 and F16.
    ///
    /// # Panics
    /// When it is another.
    pub fn with_dtype(mut self, dtype: Dtype) -> Self {
        let name = match dtype {
            Dtype::F32 => "float32",
            Dtype::BF16 => "bfloat16",
            Dtype::F16 => "float16",
            other => panic!("weights are saved as F32, BF16 or F16, not {other}"),
        };
        let mut json: Value = serde_json::from_str(&self.config_text).expect("a config.json");
        let field = if json.get("torch_dtype").is_some() {
            "torch_dtype"
        } else {
            "dtype"
        };
        if json[field] != name {
            json[field] = name.into();
            self.config_text = serde_json::to_string_pretty(&json).expect("it was JSON");
        }
        self.dtype = dtype;
        self.dtypes.clear();
        self
    }

    /// Starts a new file before one would exceed `bytes`, where it holds more than one tensor.
    pub fn with_shard_bytes(mut self, bytes: u64) -> Self {
        self.shard_bytes = bytes;
        self
    }

    /// Type of a tensor that is not packed.
    pub(super) fn dtype(&self, name: &str) -> Dtype {
        self.dtypes.get(name).copied().unwrap_or(self.dtype)
    }

    /// `config.json` with another quantization.
    fn config_text_with(&self, quantization: Option<Value>) -> String {
        let mut json: Value = serde_json::from_str(&self.config_text).expect("a config.json");
        let fields = json.as_object_mut().expect("an object");
        let before = match &quantization {
            Some(config) => fields.insert(QUANTIZATION_CONFIG.into(), config.clone()),
            None => fields.remove(QUANTIZATION_CONFIG),
        };
        match before == quantization {
            // To the byte.
            true => self.config_text.clone(),
            false => serde_json::to_string_pretty(&json).expect("it was JSON"),
        }
    }

    /// Writes all but the weights into an existing folder: the configuration, and the tokenizer and generation settings.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn write_companions(&self, folder: &Path) -> Result<(), SaveFolderError> {
        write_file(&folder.join(CONFIG), self.config_text_with(None).as_bytes())?;
        self.copy_companions(folder)
    }

    fn copy_companions(&self, folder: &Path) -> Result<(), SaveFolderError> {
        for companion in &self.companions {
            if companion.symlink_metadata().is_ok() {
                let (mut from, _) = regular_file::open(companion).map_err(CheckpointError::from)?;
                let path = folder.join(companion.file_name().expect("they are files"));
                let copy = File::create(&path).and_then(|mut to| std::io::copy(&mut from, &mut to).and(to.sync_all()));
                copy.map_err(|source| SaveFolderError::Io { path, source })?;
            }
        }
        Ok(())
    }

    fn check<B: Backend>(&self, model: &QuadsMoe<B>) -> Result<(), SaveFolderError> {
        let parse = |text: &str| serde_json::from_str::<BTreeMap<String, Value>>(text).expect("written by us");
        let (given, expected) = (parse(&model.config().to_json()), parse(&self.model));
        let differs = |(field, value): &(&String, &Value)| given.get(*field) != Some(*value);
        let differing = expected.iter().find(differs).map(|(field, _)| field);
        match differing.or_else(|| given.keys().find(|field| !expected.contains_key(*field))) {
            Some(field) => Err(SaveFolderError::OtherModel { field: field.clone() }),
            None => Ok(()),
        }
    }
}

/// Writes `model` to a new folder, as transformers reads it. The folder is there when all of it is on the disk, or not at
/// all. One parameter at a time is held beside the model.
///
/// # Errors
/// When the folder exists and is not empty, the file system refuses, a weight is packed or does not fit its type, or the
/// format belongs to another model.
pub fn save_folder<B: Backend>(
    model: &QuadsMoe<B>,
    folder: &Path,
    format: &FolderFormat,
) -> Result<(), SaveFolderError> {
    let dtype = |name: &str| format.dtype(name);
    let tensors = tensors(model, format.naming, dtype)?;
    save_tensors(model, folder, format, tensors, Extras::default(), |files| {
        files.write(model, format.naming)
    })
}

/// What a folder has beside what its format says.
#[derive(Default)]
pub(super) struct Extras {
    /// For `config.json`.
    pub quantization_config: Option<Value>,
    /// Small files of JSON, by name.
    pub files: Vec<(String, Value)>,
}

/// Makes a new folder of these tensors, which `write_tensors` writes.
pub(super) fn save_tensors<B: Backend>(
    model: &QuadsMoe<B>,
    folder: &Path,
    format: &FolderFormat,
    tensors: Vec<TensorSpec>,
    extras: Extras,
    write_tensors: impl FnOnce(Files) -> Result<(), CheckpointError>,
) -> Result<(), SaveFolderError> {
    format.check(model)?;
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |source| SaveFolderError::Io { path, source }
    };
    if folder.symlink_metadata().is_ok() && !fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none()) {
        return Err(SaveFolderError::Exists { path: folder.into() });
    }
    let mut name = folder.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    let aside = folder.with_file_name(name);
    match fs::remove_dir_all(&aside) {
        // Left by a process that was ended.
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(io(&aside)(error)),
    }
    fs::create_dir_all(&aside).map_err(io(&aside))?;
    let written = write(&aside, format, tensors, extras, write_tensors);
    let whole = written.and_then(|()| fs::rename(&aside, folder).map_err(io(folder)));
    if whole.is_err() {
        // The error that matters is the first one.
        let _ = fs::remove_dir_all(&aside);
    }
    whole
}

fn write(
    folder: &Path,
    format: &FolderFormat,
    tensors: Vec<TensorSpec>,
    extras: Extras,
    write_tensors: impl FnOnce(Files) -> Result<(), CheckpointError>,
) -> Result<(), SaveFolderError> {
    let shards = shards(tensors, format.shard_bytes);
    let names: Vec<String> = match shards.len() {
        1 => vec![SINGLE_FILE.into()],
        n => (1..=n).map(|i| format!("model-{i:05}-of-{n:05}.safetensors")).collect(),
    };
    let mut files = Files {
        writers: vec![],
        tensors: BTreeMap::new(),
    };
    let mut weight_map = BTreeMap::new();
    let mut total_size = 0;
    for (index, (name, shard)) in names.iter().zip(shards).enumerate() {
        for tensor in &shard {
            files.tensors.insert(tensor.name.clone(), (index, tensor.dtype));
            weight_map.insert(tensor.name.clone(), name.clone());
            total_size += bytes(tensor);
        }
        let writer = SafetensorsWriter::create(&folder.join(name), shard, pytorch_metadata());
        files.writers.push(writer.map_err(CheckpointError::from)?);
    }
    write_tensors(files)?;
    if names.len() > 1 {
        let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
        let text = serde_json::to_string_pretty(&index).expect("names and a number are JSON");
        write_file(&folder.join(INDEX_FILE), text.as_bytes())?;
    }
    write_file(
        &folder.join(CONFIG),
        format.config_text_with(extras.quantization_config).as_bytes(),
    )?;
    for (name, json) in extras.files {
        let text = serde_json::to_string_pretty(&json).expect("it is JSON");
        write_file(&folder.join(name), text.as_bytes())?;
    }
    format.copy_companions(folder)
}

fn bytes(tensor: &TensorSpec) -> u64 {
    let elements: u64 = tensor.shape.iter().map(|n| *n as u64).product();
    elements * tensor.dtype.bitsize() as u64 / 8
}

fn shards(tensors: Vec<TensorSpec>, limit: u64) -> Vec<Vec<TensorSpec>> {
    let mut shards = vec![vec![]];
    let mut filled = 0;
    for tensor in tensors {
        let size = bytes(&tensor);
        if filled > 0 && filled + size > limit {
            shards.push(vec![]);
            filled = 0;
        }
        filled += size;
        shards.last_mut().expect("there is one").push(tensor);
    }
    shards
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), SaveFolderError> {
    let write = File::create(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    write.map_err(|source| SaveFolderError::Io {
        path: path.into(),
        source,
    })
}
