//! Safetensors files of others: read without trust, memory-mapped, one tensor at a time; written as a stream.
//!
//! In reading order: `header` (what a file says of itself, and whether that can be true), [`SafetensorsFile`] (one
//! file), [`SafetensorsFolder`] (a checkpoint: one file, or shards and their index), [`SafetensorsWriter`], and
//! [`regular_file`] and [`strict_json`] for the small files beside them.
//!
//! Nothing is believed before it is checked against the file's size: a damaged or hostile file gives an error that names
//! the file and the tensor, no panic and no allocation beyond a small multiple of the header. Files that were links in
//! the Hub's cache work; folders, pipes and devices are refused.
mod file;
mod folder;
mod header;
pub mod regular_file;
pub mod strict_json;
mod writer;

pub use file::{FileTensor, SafetensorsFile};
pub use folder::{INDEX_FILE, SINGLE_FILE, SafetensorsFolder};
pub use header::TensorInfo;
pub use safetensors::Dtype;
pub use writer::{SafetensorsWriter, TensorSpec};

use std::path::{Path, PathBuf};

/// Why a checkpoint file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
    /// The file system refused.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: std::io::Error,
    },
    /// The file as a whole is not what it should be.
    #[error("{}: {problem}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor of the file is not what it should be.
    #[error("{}: {tensor}: {problem}", .path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl SafetensorsError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io {
            path: path.into(),
            source,
        }
    }

    pub(crate) fn file(path: &Path, problem: impl Into<String>) -> Self {
        Self::File {
            path: path.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn tensor(path: &Path, tensor: &str, problem: impl Into<String>) -> Self {
        Self::Tensor {
            path: path.into(),
            tensor: tensor.into(),
            problem: problem.into(),
        }
    }
}
