//! Checkpoints of the model as safetensors, with Hugging Face's names and orientations.
//!
//! | parameter | in the file |
//! |---|---|
//! | `layers.N.self_attn.q_proj.weight` `[d_in, d_out]` | `model.layers.N.self_attn.q_proj.weight` `[d_out, d_in]` |
//! | `layers.N.mlp.gate.weight` `[hidden, experts]` | `model.layers.N.mlp.gate.weight` `[experts, hidden]` |
//! | `layers.N.mlp.experts.gate_up_proj` `[experts, hidden, 2 · ff]` | `model.layers.N.mlp.experts.E.gate_proj.weight` and `….up_proj.weight` `[ff, hidden]`, or `model.layers.N.mlp.experts.gate_up_proj` `[experts, 2 · ff, hidden]` |
//! | `layers.N.mlp.experts.down_proj` `[experts, ff, hidden]` | `model.layers.N.mlp.experts.E.down_proj.weight` `[hidden, ff]`, or `model.layers.N.mlp.experts.down_proj` `[experts, hidden, ff]` |
//! | the same of a dense layer, one expert | `model.layers.N.mlp.{gate,up,down}_proj.weight` |
//! | `layers.N.input_layernorm.gamma` | `model.layers.N.input_layernorm.weight` |
//! | `embed_tokens.weight` | `model.embed_tokens.weight` |
//! | `lm_head` `[hidden, vocab]` | `lm_head.weight` `[vocab, hidden]`; absent when tied |
//!
//! Two forms: [`save`] and [`load`] keep a model in training, one file of f32; [`ModelFolder`] and [`save_folder`] are for
//! folders of the Hub, with their configuration, shards and 16-bit floats; [`ModelFolder::load_packed`] and
//! [`save_packed_folder`] for folders whose weights are packed to NVFP4. In reading order: `parts` (the table above),
//! `load`, `save`, `config_json`, [`ModelFolder`], [`save_folder`], `load_packed`, `save_packed`.
//!
//! Residual masks lie in a file of their own ([`ResidualMasks::save`]).
//!
//! [`ResidualMasks::save`]: crate::modules::residual_masks::ResidualMasks::save
mod config_json;
mod folder;
mod load;
mod load_packed;
mod param_path;
mod parts;
mod save;
mod save_folder;
mod save_packed;

pub use folder::{ModelFolder, OpenError};
pub use load::LoadProgress;
pub(crate) use param_path::ParamPath;
pub use param_path::named_param_ids;
pub use parts::ExpertNaming;
pub use save_folder::{FolderFormat, SaveFolderError, save_folder};
pub use save_packed::{PackedFormat, save_packed_folder};

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use burn::tensor::{DType, backend::Backend};
use burn_nvfp4::{
    WeightFormat,
    safetensors_file::{Dtype, SafetensorsError, SafetensorsFolder, SafetensorsWriter},
};

use crate::modules::moe::QuadsMoe;

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file is absent, damaged, or cannot be written.
    #[error(transparent)]
    File(#[from] SafetensorsError),
    /// The file holds other tensors than the model has.
    #[error("{} does not fit the model:\n{}", .path.display(), .problems.join("\n"))]
    Mismatch {
        /// The file or folder.
        path: PathBuf,
        /// One line for each tensor that is missing, unexpected, or of another shape or type.
        problems: Vec<String>,
    },
    /// A parameter of the model is not f32: packed weights cannot be saved here.
    #[error(
        "{parameter} is {dtype:?}, and only f32 parameters can be saved: save the trainer's model, not the packed one"
    )]
    NotF32 {
        /// The parameter.
        parameter: String,
        /// Its type.
        dtype: DType,
    },
    /// A weight is packed in another format than NVFP4, which checkpoints of NVFP4 do not have.
    #[error("{parameter} is packed to {format}, and only NVFP4 can be saved")]
    NotNvfp4 {
        /// The parameter.
        parameter: String,
        /// Its format.
        format: WeightFormat,
    },
    /// No weight is packed.
    #[error("no weight is packed: pack the model first, or save it as it is")]
    NothingPacked,
    /// Activations are to be quantized, and a layer has no scale for them.
    #[error("{module}: no scale of its activations")]
    NoInputScale {
        /// The layer.
        module: String,
    },
    /// A weight is too large for the type that it should be stored in.
    #[error("{tensor}: {value} is beyond the range of {dtype}")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// The weight.
        value: f32,
        /// The type.
        dtype: Dtype,
    },
}

/// Writes the parameters of `model` to `path`, in f32. The file is there when it is whole, or not at all.
///
/// # Errors
/// When the file cannot be written, or a weight is packed.
pub fn save<B: Backend>(model: &QuadsMoe<B>, path: &Path) -> Result<(), CheckpointError> {
    let naming = ExpertNaming::PerExpert;
    let tensors = save::tensors(model, naming, |_| Dtype::F32)?;
    let files = save::Files {
        tensors: tensors
            .iter()
            .map(|tensor| (tensor.name.clone(), (0, tensor.dtype)))
            .collect(),
        writers: vec![SafetensorsWriter::create(path, tensors, pytorch_metadata())?],
    };
    files.write(model, naming)
}

/// What transformers asks for before it reads a file.
fn pytorch_metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_string(), "pt".to_string())])
}

/// Reads the parameters of `model` from `path`. Their ids stay, so an optimizer's state still belongs to them.
///
/// # Errors
/// When the file cannot be read, or its tensors are not exactly those of the model: the error lists every tensor that is
/// missing, unexpected, or of another shape or type.
pub fn load<B: Backend>(model: QuadsMoe<B>, path: &Path) -> Result<QuadsMoe<B>, CheckpointError> {
    let files = SafetensorsFolder::from_file(path)?;
    load::load_files(model, &files, path, &mut |_| {})
}
