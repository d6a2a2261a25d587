//! The parameters of a model into files, one after the other.
use std::collections::BTreeMap;

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Tensor, backend::Backend},
};
use burn_nvfp4::safetensors_file::{Dtype, SafetensorsWriter, TensorSpec};

use super::{
    CheckpointError,
    param_path::ParamPath,
    parts::{ExpertNaming, Part, parts},
};
use crate::modules::{moe::QuadsMoe, moe_config::QuadsMoeConfig};

/// The tensors that a model's files hold, in the order of its parameters.
pub(super) fn tensors<B: Backend>(
    model: &QuadsMoe<B>,
    naming: ExpertNaming,
    dtype: impl Fn(&str) -> Dtype,
) -> Result<Vec<TensorSpec>, CheckpointError> {
    struct Tensors<'a, F> {
        config: &'a QuadsMoeConfig,
        path: ParamPath,
        naming: ExpertNaming,
        dtype: F,
        tensors: Vec<TensorSpec>,
        problem: Option<CheckpointError>,
    }
    impl<B: Backend, F: Fn(&str) -> Dtype> ModuleVisitor<B> for Tensors<'_, F> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.enter(name);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            // Packed weights, say.
            let tensor = param.val();
            if tensor.dtype() != DType::F32 {
                self.problem.get_or_insert(CheckpointError::NotF32 {
                    parameter: self.path.to_string(),
                    dtype: tensor.dtype(),
                });
            }
            let parts = parts(self.config, &self.path, &tensor.shape(), |_| self.naming);
            let dtype = &self.dtype;
            self.tensors.extend(parts.into_iter().map(|part| TensorSpec {
                dtype: dtype(&part.name),
                name: part.name,
                shape: part.shape,
            }));
        }
    }
    let mut visitor = Tensors {
        config: model.config(),
        path: ParamPath::default(),
        naming,
        dtype,
        tensors: vec![],
        problem: None,
    };
    model.visit(&mut visitor);
    match visitor.problem {
        None => Ok(visitor.tensors),
        Some(problem) => Err(problem),
    }
}

/// Where the tensors of a model go.
pub(super) struct Files {
    pub writers: Vec<SafetensorsWriter>,
    /// File and type of each tensor.
    pub tensors: BTreeMap<String, (usize, Dtype)>,
}

impl Files {
    /// Writes every parameter and finishes the files. One parameter at a time is held beside the model.
    pub(super) fn write<B: Backend>(self, model: &QuadsMoe<B>, naming: ExpertNaming) -> Result<(), CheckpointError> {
        let mut writer = Writer {
            config: model.config(),
            path: ParamPath::default(),
            naming,
            files: self,
            problem: None,
        };
        model.visit(&mut writer);
        if let Some(problem) = writer.problem {
            return Err(problem);
        }
        writer.files.finish()
    }

    /// Writes a part of a parameter with these values.
    pub(super) fn write_part(&mut self, part: &Part, parameter: &[f32]) -> Result<(), CheckpointError> {
        let (_, dtype) = self.tensors[&part.name];
        let bytes = part
            .write(parameter, dtype)
            .map_err(|value| CheckpointError::Overflow {
                tensor: part.name.clone(),
                value,
                dtype,
            })?;
        self.write_bytes(&part.name, &bytes)
    }

    /// Writes a tensor.
    pub(super) fn write_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        let (file, _) = self.tensors[name];
        Ok(self.writers[file].write(name, bytes)?)
    }

    /// Gives the files their names.
    pub(super) fn finish(self) -> Result<(), CheckpointError> {
        for file in self.writers {
            file.finish()?;
        }
        Ok(())
    }
}

struct Writer<'a> {
    config: &'a QuadsMoeConfig,
    path: ParamPath,
    naming: ExpertNaming,
    files: Files,
    problem: Option<CheckpointError>,
}

impl Writer<'_> {
    fn write(&mut self, shape: &[usize], values: &[f32]) -> Result<(), CheckpointError> {
        let parts = parts(self.config, &self.path, shape, |_| self.naming);
        parts.iter().try_for_each(|part| self.files.write_part(part, values))
    }
}

impl<B: Backend> ModuleVisitor<B> for Writer<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.problem.is_some() {
            return;
        }
        let data = param.val().into_data();
        let values = data.as_slice::<f32>().expect("found to be f32 before");
        self.problem = self.write(&data.shape, values).err();
    }
}
