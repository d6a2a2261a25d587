//! A model with packed weights into a folder of the Hub, in the format of compressed-tensors or ModelOpt.
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Tensor},
};
use burn_nvfp4::{
    Nvfp4, Nvfp4Backend, WeightFormat,
    checkpoint::{CheckpointFormat, CheckpointLayer, ExportedWeight, QuantizationScheme, scheme::HF_QUANT_CONFIG_FILE},
    packed_weight,
    safetensors_file::{Dtype, TensorSpec},
};
use kernels_cubecl::OuterScale;

use super::{
    CheckpointError,
    param_path::ParamPath,
    parts::{ExpertNaming, Part, parts},
    save::Files,
    save_folder::{Extras, FolderFormat, SaveFolderError, save_tensors},
};
use crate::modules::{moe::QuadsMoe, moe_config::QuadsMoeConfig};

/// How a packed model is written.
#[derive(Clone, Debug)]
pub struct PackedFormat {
    /// Whose format.
    pub checkpoint: CheckpointFormat,
    /// For each module that is packed, by its name in the files, the outer scale of its activations: engines then quantize
    /// activations too (W4A4), all tokens by that one scale and without residual compensation, which is not what a rollout
    /// in this project does. `None` writes a weight-only (W4A16) model.
    pub input_scales: Option<BTreeMap<String, OuterScale>>,
}

impl PackedFormat {
    /// Weight-only.
    pub fn new(checkpoint: CheckpointFormat) -> Self {
        Self {
            checkpoint,
            input_scales: None,
        }
    }
}

/// Writes a model with packed weights, such as [`sync`](crate::sync::sync) makes, to a new folder that inference engines
/// load. Codes and block scales are the model's, byte for byte; its outer scales too, or their reciprocals where the format
/// divides by them. `format` says how the rest is stored. The folder is there when all of it is on the disk, or not at all.
///
/// # Errors
/// As [`save_folder`](super::save_folder); when a weight is packed to FP8, nothing is packed, or an activation scale is
/// missing.
pub fn save_packed_folder<B: Nvfp4Backend>(
    model: &QuadsMoe<Nvfp4<B>>,
    folder: &Path,
    format: &FolderFormat,
    packed: &PackedFormat,
) -> Result<(), SaveFolderError> {
    let scheme = QuantizationScheme {
        format: packed.checkpoint,
        w4a4: packed.input_scales.is_some(),
    };
    let mut tensors = Tensors {
        config: model.config(),
        path: ParamPath::default(),
        scheme: &scheme,
        packed,
        dtype: &|name| format.dtype(name),
        tensors: vec![],
        modules: 0,
        // The head even where it is tied and has no tensor.
        unpacked: BTreeSet::from(["lm_head".to_string()]),
        problem: None,
    };
    model.visit(&mut tensors);
    if tensors.modules == 0 {
        tensors.problem.get_or_insert(CheckpointError::NothingPacked);
    }
    if let Some(problem) = tensors.problem {
        return Err(problem.into());
    }
    let ignored = scheme.ignored(tensors.unpacked);
    let extras = Extras {
        quantization_config: Some(scheme.quantization_config(&ignored)),
        files: scheme
            .hf_quant_config(&ignored)
            .into_iter()
            .map(|own| (HF_QUANT_CONFIG_FILE.to_string(), own))
            .collect(),
    };
    let write = |files| {
        let mut writer = Writer {
            config: model.config(),
            path: ParamPath::default(),
            packed,
            files,
            problem: None,
        };
        model.visit(&mut writer);
        match writer.problem {
            None => writer.files.finish(),
            Some(problem) => Err(problem),
        }
    };
    save_tensors(model, folder, format, tensors.tensors, extras, write)
}

/// A part of a packed weight: rows of one of its matrices.
struct PackedPart {
    module: String,
    group: usize,
    rows: std::ops::Range<usize>,
}

/// The modules that a packed parameter is in files.
fn packed_parts(parts: Vec<Part>, groups: usize) -> Vec<PackedPart> {
    let per_group = parts.len() / groups;
    let mut start = 0;
    let part = |(index, part): (usize, Part)| {
        let (group, first) = (index / per_group, index % per_group == 0);
        start = if first { 0 } else { start };
        let rows = start..start + part.shape[0];
        start = rows.end;
        let module = part
            .name
            .strip_suffix(".weight")
            .expect("a matrix is a weight")
            .to_string();
        PackedPart { module, group, rows }
    };
    parts.into_iter().enumerate().map(part).collect()
}

/// The tensors of the files.
struct Tensors<'a> {
    config: &'a QuadsMoeConfig,
    path: ParamPath,
    scheme: &'a QuantizationScheme,
    packed: &'a PackedFormat,
    dtype: &'a dyn Fn(&str) -> Dtype,
    tensors: Vec<TensorSpec>,
    modules: usize,
    unpacked: BTreeSet<String>,
    problem: Option<CheckpointError>,
}

impl<B: Nvfp4Backend> ModuleVisitor<Nvfp4<B>> for Tensors<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Nvfp4<B>, D>>) {
        let tensor = param.val();
        let parts = parts(self.config, &self.path, &tensor.shape(), |_| ExpertNaming::PerExpert);
        let Some(weight) = packed_weight(&tensor) else {
            if tensor.dtype() != DType::F32 {
                self.problem.get_or_insert(CheckpointError::NotF32 {
                    parameter: self.path.to_string(),
                    dtype: tensor.dtype(),
                });
            }
            for part in parts {
                if let Some(module) = part.name.strip_suffix(".weight").filter(|_| part.shape.len() == 2) {
                    self.unpacked.insert(module.to_string());
                }
                self.tensors.push(TensorSpec {
                    dtype: (self.dtype)(&part.name),
                    name: part.name,
                    shape: part.shape,
                });
            }
            return;
        };
        if weight.format() != WeightFormat::Nvfp4 {
            self.problem.get_or_insert(CheckpointError::NotNvfp4 {
                parameter: self.path.to_string(),
                format: weight.format(),
            });
            return;
        }
        for part in packed_parts(parts, weight.groups()) {
            if let Some(scales) = &self.packed.input_scales
                && !scales.contains_key(&part.module)
            {
                self.problem.get_or_insert(CheckpointError::NoInputScale {
                    module: part.module.clone(),
                });
            }
            self.modules += 1;
            let (rows, w4a4) = (part.rows.len(), self.scheme.w4a4);
            self.tensors
                .extend(self.scheme.format.tensor_specs(&part.module, rows, weight.d_in(), w4a4));
        }
    }
}

/// Writes every parameter, one at a time.
struct Writer<'a> {
    config: &'a QuadsMoeConfig,
    path: ParamPath,
    packed: &'a PackedFormat,
    files: Files,
    problem: Option<CheckpointError>,
}

impl Writer<'_> {
    fn write_packed(&mut self, weight: &ExportedWeight, parts: Vec<Part>) -> Result<(), CheckpointError> {
        for PackedPart { module, group, rows } in packed_parts(parts, weight.groups()) {
            let input_scale = self.packed.input_scales.as_ref().map(|scales| scales[&module]);
            let layer: CheckpointLayer<'_> = weight.layer(module, group, rows, input_scale);
            for (name, bytes) in self.packed.checkpoint.tensors(&layer) {
                self.files.write_bytes(&name, &bytes)?;
            }
        }
        Ok(())
    }
}

impl<B: Nvfp4Backend> ModuleVisitor<Nvfp4<B>> for Writer<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Nvfp4<B>, D>>) {
        if self.problem.is_some() {
            return;
        }
        let tensor = param.val();
        let parts = parts(self.config, &self.path, &tensor.shape(), |_| ExpertNaming::PerExpert);
        let written = match packed_weight(&tensor).as_ref().and_then(ExportedWeight::new) {
            Some(weight) => self.write_packed(&weight, parts),
            None => {
                let data = tensor.into_data();
                let values = data.as_slice::<f32>().expect("found to be f32");
                parts.iter().try_for_each(|part| self.files.write_part(part, values))
            }
        };
        self.problem = written.err();
    }
}
