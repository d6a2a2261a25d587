//! The calibrated residual masks of a model, by layer, and their file.
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use kernels_cubecl::ResidualMask;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// Residual masks by layer: `layers.N.self_attn.qkv_proj`, `layers.N.self_attn.o_proj`,
/// `layers.N.mlp.experts.gate_up_proj`, `layers.N.mlp.experts.down_proj`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResidualMasks(BTreeMap<String, ResidualMask>);

/// Why masks do not fit a model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("residual masks do not fit the model: {}", .0.join("; "))]
pub struct MaskError(Vec<String>);

/// Why masks could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum MaskFileError {
    /// The file system refused.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: std::io::Error,
    },
    /// The file is no safetensors file, or cut short.
    #[error("{}: {source}", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },
    /// A tensor is no mask.
    #[error("{}: {layer}: {problem}", .path.display())]
    Mask {
        /// The file.
        path: PathBuf,
        /// The tensor.
        layer: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl FromIterator<(String, ResidualMask)> for ResidualMasks {
    fn from_iter<I: IntoIterator<Item = (String, ResidualMask)>>(masks: I) -> Self {
        Self(masks.into_iter().collect())
    }
}

impl ResidualMasks {
    /// The mask of a layer.
    pub fn get(&self, layer: &str) -> Option<&ResidualMask> {
        self.0.get(layer)
    }

    /// All masks, by the name of the layer.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ResidualMask)> {
        self.0.iter().map(|(layer, mask)| (layer.as_str(), mask))
    }

    /// Writes the masks to a safetensors file: for each layer one byte a channel, 1 where it is compensated.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), MaskFileError> {
        let bytes: Vec<(&String, Vec<u8>)> = self
            .0
            .iter()
            .map(|(layer, mask)| (layer, (0..mask.k()).map(|c| u8::from(mask.contains(c))).collect()))
            .collect();
        let views = bytes.iter().map(|(layer, bytes)| {
            let view = TensorView::new(Dtype::U8, vec![bytes.len()], bytes);
            (layer, view.expect("the bytes were made for this shape"))
        });
        safetensors::serialize_to_file(views, None, path).map_err(|error| failed(path, error))
    }

    /// Reads masks that [`save`](Self::save) wrote. Whether they fit a model,
    /// [`QuadsMoe::with_residual_masks`](super::moe::QuadsMoe::with_residual_masks) checks.
    ///
    /// # Errors
    /// When the file cannot be read, or holds something else.
    pub fn load(path: &Path) -> Result<Self, MaskFileError> {
        let bytes = std::fs::read(path).map_err(|source| MaskFileError::Io {
            path: path.into(),
            source,
        })?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| failed(path, error))?;
        let mut masks = BTreeMap::new();
        for (layer, tensor) in file.iter() {
            let refuse = |problem: String| MaskFileError::Mask {
                path: path.into(),
                layer: layer.into(),
                problem,
            };
            if tensor.dtype() != Dtype::U8 || tensor.shape().len() != 1 {
                let (dtype, shape) = (tensor.dtype(), tensor.shape());
                return Err(refuse(format!(
                    "{dtype:?} {shape:?} is no mask, expected U8 [channels]"
                )));
            }
            if let Some(byte) = tensor.data().iter().find(|byte| **byte > 1) {
                return Err(refuse(format!("a mask holds 0 and 1, found {byte}")));
            }
            let channels: Vec<bool> = tensor.data().iter().map(|byte| *byte == 1).collect();
            masks.insert(layer.to_string(), ResidualMask::from_channels(&channels));
        }
        Ok(Self(masks))
    }

    /// Whether the masks are exactly those of `layers`, given by name and number of channels.
    pub(crate) fn check(&self, layers: &[(String, usize)]) -> Result<(), MaskError> {
        let mut problems = vec![];
        for (name, k) in layers {
            match self.get(name) {
                None => problems.push(format!("{name} has none")),
                Some(mask) if mask.k() != *k => {
                    problems.push(format!("{name} has {} channels, expected {k}", mask.k()));
                }
                Some(_) => {}
            }
        }
        let unexpected = self
            .0
            .keys()
            .filter(|name| !layers.iter().any(|(layer, _)| layer == *name));
        problems.extend(unexpected.map(|name| format!("{name} is not a layer of the model")));
        match problems.is_empty() {
            true => Ok(()),
            false => Err(MaskError(problems)),
        }
    }
}

fn failed(path: &Path, error: safetensors::SafeTensorError) -> MaskFileError {
    let path = path.into();
    match error {
        safetensors::SafeTensorError::IoError(source) => MaskFileError::Io { path, source },
        source => MaskFileError::Format { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("burn-quads-{}-{name}.safetensors", std::process::id()))
    }

    #[test]
    fn masks_survive_a_file() {
        let mask = |k: usize, every: usize| {
            let channels: Vec<bool> = (0..k).map(|c| c.is_multiple_of(every)).collect();
            ResidualMask::from_channels(&channels)
        };
        let masks: ResidualMasks = [
            ("layers.0.a".to_string(), mask(48, 3)),
            ("layers.1.b".to_string(), mask(16, 2)),
        ]
        .into_iter()
        .collect();
        let path = file("masks");
        masks.save(&path).unwrap();
        let loaded = ResidualMasks::load(&path).unwrap();
        assert_eq!(loaded, masks);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let error = ResidualMasks::load(&path).unwrap_err().to_string();
        assert!(error.starts_with(&path.display().to_string()), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_with_something_else_is_refused() {
        let path = file("no-masks");
        let data = [2u8, 0, 1, 1];
        let view = |dtype, shape: Vec<usize>| TensorView::new(dtype, shape, &data).unwrap();
        let load = |view| {
            safetensors::serialize_to_file([("layers.0.x", view)], None, &path).unwrap();
            ResidualMasks::load(&path).unwrap_err().to_string()
        };
        assert!(load(view(Dtype::U8, vec![4])).ends_with("layers.0.x: a mask holds 0 and 1, found 2"));
        assert!(load(view(Dtype::F32, vec![1])).ends_with("F32 [1] is no mask, expected U8 [channels]"));
        std::fs::remove_file(path).unwrap();
    }
}
