//! The model that is read.
use anyhow::{Context, Result, bail};
use burn_nvfp4::{
    checkpoint::{
        Nvfp4Folder,
        folder::{CONFIG_FILE, read_json},
    },
    safetensors_file::{FileTensor, SafetensorsFile, SafetensorsFolder},
};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A checkpoint folder: its configuration and tensors.
#[derive(Debug)]
pub struct Source {
    /// Where it is.
    pub path: PathBuf,
    /// `config.json`.
    pub config: Map<String, Value>,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    Dense(SafetensorsFolder),
    Packed(Nvfp4Folder),
}

impl Source {
    /// Opens a folder.
    ///
    /// # Errors
    /// When a file is absent or damaged, or the model is quantized in another way than NVFP4.
    pub fn open(path: &Path) -> Result<Self> {
        let config = read_json(&path.join(CONFIG_FILE))?;
        let weights = match Nvfp4Folder::open(path)? {
            Some(packed) => Weights::Packed(packed),
            None => Weights::Dense(SafetensorsFolder::open(path)?),
        };
        let path = path.into();
        Ok(Self { path, config, weights })
    }

    /// All tensors.
    pub fn folder(&self) -> &SafetensorsFolder {
        match &self.weights {
            Weights::Dense(folder) => folder,
            Weights::Packed(packed) => packed.files(),
        }
    }

    /// The files, in the order of their names.
    pub fn files(&self) -> &[SafetensorsFile] {
        self.folder().files()
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<FileTensor<'_>> {
        self.folder().tensor(name)
    }

    /// The packed layers, if the model is quantized.
    pub fn packed(&self) -> Option<&Nvfp4Folder> {
        match &self.weights {
            Weights::Dense(_) => None,
            Weights::Packed(packed) => Some(packed),
        }
    }

    /// The packed layers.
    ///
    /// # Errors
    /// When the model is not quantized.
    pub fn require_packed(&self) -> Result<&Nvfp4Folder> {
        self.packed().with_context(|| {
            format!(
                "{}: config.json has no quantization_config, so the model is not quantized",
                self.path.display()
            )
        })
    }

    /// Refuses a model that is quantized.
    ///
    /// # Errors
    /// When it is.
    pub fn require_dense(&self) -> Result<()> {
        match self.packed() {
            None => Ok(()),
            Some(packed) => bail!(
                "{}: the model is quantized already ({})",
                self.path.display(),
                packed.scheme().format
            ),
        }
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.folder().tensors().map(|tensor| tensor.bytes.len() as u64).sum()
    }
}
