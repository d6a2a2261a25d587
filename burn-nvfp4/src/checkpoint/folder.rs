//! The packed layers of a checkpoint folder.
use crate::safetensors_file::{Dtype, FileTensor, SafetensorsError, SafetensorsFolder, regular_file, strict_json};
use serde_json::{Map, Value};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{
    format::{CheckpointFormat, PARTS, Part},
    layer::{CheckpointLayer, LayerTensors, tensor_name},
    scheme::{HF_QUANT_CONFIG_FILE, QuantizationScheme, SchemeError},
};

/// Name of the model's configuration.
pub const CONFIG_FILE: &str = "config.json";
/// Far more than any configuration has.
const MAX_CONFIG_BYTES: u64 = 10_000_000;

/// A checkpoint with packed layers.
#[derive(Debug)]
pub struct Nvfp4Folder {
    path: PathBuf,
    scheme: QuantizationScheme,
    files: SafetensorsFolder,
    /// Those that are packed.
    modules: BTreeSet<String>,
    /// The module of each tensor of a packed layer.
    parts: BTreeMap<String, String>,
}

impl Nvfp4Folder {
    /// Opens a folder, or gives `None` when its model is not quantized.
    ///
    /// # Errors
    /// When a file cannot be read, the quantization is not NVFP4 in one of the two formats, or packed layers lack a tensor.
    pub fn open(path: &Path) -> Result<Option<Self>, SafetensorsError> {
        let Some(scheme) = read_scheme(path)? else {
            return Ok(None);
        };
        let files = SafetensorsFolder::open(path)?;
        let modules: BTreeSet<String> = files
            .tensors()
            .filter_map(|tensor| packed_module(scheme.format, &tensor))
            .collect();
        let mut parts = BTreeMap::new();
        for module in &modules {
            for part in PARTS {
                parts.insert(tensor_name(scheme.format, module, part), module.clone());
            }
        }
        let folder = Self {
            path: path.into(),
            scheme,
            files,
            modules,
            parts,
        };
        folder.check_tensors()?;
        Ok(Some(folder))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What its configuration says.
    pub fn scheme(&self) -> &QuantizationScheme {
        &self.scheme
    }

    /// All its tensors.
    pub fn files(&self) -> &SafetensorsFolder {
        &self.files
    }

    /// The modules that are packed, sorted.
    pub fn modules(&self) -> impl ExactSizeIterator<Item = &str> {
        self.modules.iter().map(String::as_str)
    }

    /// Whether a module is packed.
    pub fn is_packed(&self, module: &str) -> bool {
        self.modules.contains(module)
    }

    /// The packed module that a tensor belongs to.
    pub fn module_of(&self, tensor: &str) -> Option<&str> {
        self.parts.get(tensor).map(String::as_str)
    }

    /// A packed layer; `None` when the module is not packed.
    ///
    /// # Errors
    /// When a tensor has another type or shape than the format says, an outer scale is no positive number, a block scale
    /// is negative or NaN, or values decode beyond the range of f32.
    pub fn layer(&self, module: &str) -> Result<Option<CheckpointLayer<'_>>, SafetensorsError> {
        if !self.is_packed(module) {
            return Ok(None);
        }
        let tensors = LayerTensors {
            codes: self.part(module, Part::Codes)?,
            block_scales: self.part(module, Part::BlockScales)?,
            outer_scale: self.part(module, Part::OuterScale)?,
            input_scale: match self.scheme.w4a4 {
                true => Some(self.part(module, Part::InputScale)?),
                false => None,
            },
        };
        CheckpointLayer::check(self.scheme.format, module, &tensors).map(Some)
    }

    fn part(&self, module: &str, part: Part) -> Result<FileTensor<'_>, SafetensorsError> {
        let name = tensor_name(self.scheme.format, module, part);
        self.files.tensor(&name).ok_or_else(|| {
            let problem = format!("missing, though {module} is packed");
            SafetensorsError::tensor(&self.path, &name, problem)
        })
    }

    /// Each packed layer has all its tensors, and no tensor of another format is left over.
    fn check_tensors(&self) -> Result<(), SafetensorsError> {
        for module in &self.modules {
            for part in PARTS {
                if part != Part::InputScale || self.scheme.w4a4 {
                    self.part(module, part)?;
                }
            }
        }
        for tensor in self.files.tensors() {
            let (module, last) = tensor.name().rsplit_once('.').unwrap_or(("", tensor.name()));
            if !self.parts.contains_key(tensor.name()) && FOREIGN.contains(&last) {
                let format = self.scheme.format;
                let problem = format!("no part of a layer that {format} packs to NVFP4, so {module} cannot be read");
                return Err(tensor.error(problem));
            }
        }
        Ok(())
    }
}

/// Tensors of quantized layers that this reader does not know: other methods, or layers that lack their codes.
const FOREIGN: [&str; 14] = [
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "pre_quant_scale",
    "k_scale",
    "v_scale",
];

fn packed_module(format: CheckpointFormat, tensor: &FileTensor<'_>) -> Option<String> {
    let (module, last) = tensor.name().rsplit_once('.')?;
    // ModelOpt's codes have the name of dense weights, and another type.
    let codes = last == format.part_name(Part::Codes)
        && (format == CheckpointFormat::CompressedTensors || tensor.dtype() == Dtype::U8);
    codes.then(|| module.to_string())
}

/// Reads a JSON object of a checkpoint folder.
///
/// # Errors
/// When it cannot be read or is no JSON object.
pub fn read_json(path: &Path) -> Result<Map<String, Value>, SafetensorsError> {
    let text = regular_file::read(path, MAX_CONFIG_BYTES)?;
    strict_json::parse_object(&text).map_err(|problem| SafetensorsError::file(path, problem))
}

/// What the configuration of a folder says of quantization.
///
/// # Errors
/// When a configuration cannot be read, or is another than NVFP4.
pub fn read_scheme(folder: &Path) -> Result<Option<QuantizationScheme>, SafetensorsError> {
    let path = folder.join(CONFIG_FILE);
    let refuse = |path: &Path, error: SchemeError| SafetensorsError::file(path, error.to_string());
    let scheme = QuantizationScheme::from_config(&read_json(&path)?).map_err(|error| refuse(&path, error))?;
    let own = folder.join(HF_QUANT_CONFIG_FILE);
    if scheme.is_some() || own.symlink_metadata().is_err() {
        return Ok(scheme);
    }
    let scheme = QuantizationScheme::from_hf_quant_config(&read_json(&own)?);
    scheme.map(Some).map_err(|error| refuse(&own, error))
}
