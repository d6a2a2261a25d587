//! Tensors of files into the parameters of a model.
use std::{collections::BTreeMap, path::Path};

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Tensor, TensorData, backend::Backend},
};
use burn_nvfp4::safetensors_file::{Dtype, SafetensorsFolder};

use super::{
    CheckpointError,
    param_path::ParamPath,
    parts::{ExpertNaming, Part, parts},
};
use crate::modules::{moe::QuadsMoe, moe_config::QuadsMoeConfig};

/// How far a load has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress<'a> {
    /// The parameter that is there now, by its path in the model.
    pub parameter: &'a str,
    /// Bytes of the files read so far.
    pub bytes: u64,
    /// Bytes of the files that will be read.
    pub total_bytes: u64,
}

/// Fills the parameters of `model` from `files`, one after the other; their ids stay. `origin` is what errors name.
pub(super) fn load_files<B: Backend>(
    model: QuadsMoe<B>,
    files: &SafetensorsFolder,
    origin: &Path,
    progress: &mut dyn FnMut(LoadProgress<'_>),
) -> Result<QuadsMoe<B>, CheckpointError> {
    let config = model.config().clone();
    let names = Names {
        config: &config,
        files,
        path: ParamPath::default(),
    };
    let mut expected = Expected {
        names: names.clone(),
        tensors: BTreeMap::new(),
    };
    model.visit(&mut expected);
    let problems = mismatches(files, &expected.tensors, config.tie_word_embeddings, |_| false);
    if !problems.is_empty() {
        return Err(CheckpointError::Mismatch {
            path: origin.into(),
            problems,
        });
    }
    let wanted = files
        .tensors()
        .filter(|tensor| expected.tensors.contains_key(tensor.name()));
    let total_bytes = wanted.map(|tensor| tensor.bytes.len() as u64).sum();
    Ok(model.map(&mut Reader {
        names,
        bytes: 0,
        total_bytes,
        progress,
    }))
}

/// What the tensors of the parameter at `path` are called in `files`.
#[derive(Clone)]
pub(super) struct Names<'a> {
    pub config: &'a QuadsMoeConfig,
    pub files: &'a SafetensorsFolder,
    pub path: ParamPath,
}

impl Names<'_> {
    pub(super) fn parts(&self, shape: &[usize]) -> Vec<Part> {
        parts(self.config, &self.path, shape, |fused| match self.files.tensor(fused) {
            Some(_) => ExpertNaming::Fused,
            None => ExpertNaming::PerExpert,
        })
    }
}

/// What the files must hold.
struct Expected<'a> {
    names: Names<'a>,
    tensors: BTreeMap<String, Vec<usize>>,
}

impl<B: Backend> ModuleVisitor<B> for Expected<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.names.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let parts = self.names.parts(&param.lazy_shape());
        self.tensors
            .extend(parts.into_iter().map(|part| (part.name, part.shape)));
    }
}

const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// One line for each tensor that is missing, of another shape or type, or neither expected nor known otherwise.
pub(super) fn mismatches(
    files: &SafetensorsFolder,
    expected: &BTreeMap<String, Vec<usize>>,
    tied: bool,
    known: impl Fn(&str) -> bool,
) -> Vec<String> {
    let mut problems = vec![];
    for (name, shape) in expected {
        match files.tensor(name) {
            None => problems.push(format!("missing: {name} {shape:?}")),
            Some(tensor) if tensor.shape() != shape => {
                problems.push(format!("shape: {name} is {:?}, expected {shape:?}", tensor.shape()));
            }
            Some(tensor) if !matches!(tensor.dtype(), Dtype::F32 | Dtype::BF16 | Dtype::F16) => {
                problems.push(format!("type: {name} is {}, expected F32, BF16 or F16", tensor.dtype()));
            }
            Some(_) => {}
        }
    }
    let unknown = |name: &str| !expected.contains_key(name) && !known(name);
    for tensor in files.tensors().filter(|tensor| unknown(tensor.name())) {
        // Some writers store a tied head once more.
        let embedding = files.tensor(EMBEDDING).filter(|_| tied && tensor.name() == HEAD);
        match embedding {
            Some(embedding) if embedding.bytes == tensor.bytes => {}
            Some(_) => problems.push(format!(
                "values: {HEAD} differs from {EMBEDDING}, though tie_word_embeddings is true"
            )),
            None => problems.push(format!("unexpected: {} {:?}", tensor.name(), tensor.shape())),
        }
    }
    problems
}

/// Fills parameters from files that [`mismatches`] found to fit.
struct Reader<'a, 'b> {
    names: Names<'a>,
    bytes: u64,
    total_bytes: u64,
    progress: &'b mut dyn FnMut(LoadProgress<'_>),
}

impl<B: Backend> ModuleMapper<B> for Reader<'_, '_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.names.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.path.exit();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let shape = param.lazy_shape();
        let mut values = vec![0f32; shape.num_elements()];
        for part in self.names.parts(&shape) {
            let tensor = self.names.files.tensor(&part.name).expect("it was found to be there");
            part.read(&tensor, &mut values);
            self.bytes += tensor.bytes.len() as u64;
        }
        (self.progress)(LoadProgress {
            parameter: &self.names.path.to_string(),
            bytes: self.bytes,
            total_bytes: self.total_bytes,
        });
        let id = param.id;
        let tensor = Tensor::from_data(TensorData::new(values, shape), &param.lazy_device());
        param.transform_for_load(tensor, id)
    }
}
