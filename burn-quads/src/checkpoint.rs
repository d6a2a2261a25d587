//! Checkpoints of the model as safetensors, with Hugging Face's names and orientations.
//!
//! | parameter | in the file |
//! |---|---|
//! | `layers.N.self_attn.q_proj.weight` `[d_in, d_out]` | `model.layers.N.self_attn.q_proj.weight` `[d_out, d_in]` |
//! | `layers.N.mlp.gate.weight` `[hidden, experts]` | `model.layers.N.mlp.gate.weight` `[experts, hidden]` |
//! | `layers.N.mlp.experts.gate_up_proj` `[experts, hidden, 2 · ff]` | `model.layers.N.mlp.experts.E.gate_proj.weight` and `….up_proj.weight` `[ff, hidden]` |
//! | `layers.N.mlp.experts.down_proj` `[experts, ff, hidden]` | `model.layers.N.mlp.experts.E.down_proj.weight` `[hidden, ff]` |
//! | `layers.N.input_layernorm.gamma` | `model.layers.N.input_layernorm.weight` |
//! | `embed_tokens.weight` | `model.embed_tokens.weight` |
//! | `lm_head` `[hidden, vocab]` | `lm_head.weight` `[vocab, hidden]`; absent when tied |
//!
//! Everything is f32. Residual masks lie in a file of their own ([`ResidualMasks::save`]).
//!
//! [`ResidualMasks::save`]: crate::modules::residual_masks::ResidualMasks::save
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    path::{Path, PathBuf},
};

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    tensor::{DType, Tensor, TensorData, backend::Backend},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::modules::moe::QuadsMoe;

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
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
    /// The file holds other tensors than the model has.
    #[error("{} does not fit the model:\n{}", .path.display(), .problems.join("\n"))]
    Mismatch {
        /// The file.
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
}

/// Writes the parameters of `model` to `path`.
///
/// # Errors
/// When the file cannot be written, or a weight is packed.
pub fn save<B: Backend>(model: &QuadsMoe<B>, path: &Path) -> Result<(), CheckpointError> {
    let mut writer = Writer {
        path: ParamPath::default(),
        tensors: BTreeMap::new(),
        problem: None,
    };
    model.visit(&mut writer);
    if let Some(problem) = writer.problem {
        return Err(problem);
    }
    let views = writer.tensors.iter().map(|(name, (shape, bytes))| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
        (name, view.expect("the bytes were made for this shape"))
    });
    // What transformers asks for before it reads a file.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(|error| failed(path, error))
}

/// Reads the parameters of `model` from `path`. Their ids stay, so an optimizer's state still belongs to them.
///
/// # Errors
/// When the file cannot be read, or its tensors are not exactly those of the model: the error lists every tensor that is
/// missing, unexpected, or of another shape or type.
pub fn load<B: Backend>(model: QuadsMoe<B>, path: &Path) -> Result<QuadsMoe<B>, CheckpointError> {
    let bytes = std::fs::read(path).map_err(|source| CheckpointError::Io {
        path: path.into(),
        source,
    })?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| failed(path, error))?;
    let mut expected = Expected::default();
    model.visit(&mut expected);
    let problems = mismatches(&file, &expected.tensors);
    if !problems.is_empty() {
        return Err(CheckpointError::Mismatch {
            path: path.into(),
            problems,
        });
    }
    Ok(model.map(&mut Reader {
        path: ParamPath::default(),
        file,
    }))
}

pub(crate) fn failed(path: &Path, error: safetensors::SafeTensorError) -> CheckpointError {
    let path = path.into();
    match error {
        safetensors::SafeTensorError::IoError(source) => CheckpointError::Io { path, source },
        source => CheckpointError::Format { path, source },
    }
}

/// The parameters of a module by path, in the fixed order of its fields.
pub fn named_param_ids<B: Backend, M: Module<B>>(model: &M) -> Vec<(String, ParamId)> {
    #[derive(Default)]
    struct Names {
        path: ParamPath,
        names: Vec<(String, ParamId)>,
    }
    impl<B: Backend> ModuleVisitor<B> for Names {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.enter(name);
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.exit();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.names.push((self.path.to_string(), param.id));
        }
    }
    let mut visitor = Names::default();
    model.visit(&mut visitor);
    visitor.names
}

/// Where a visitor is in the module tree.
#[derive(Clone, Debug, Default)]
pub(crate) struct ParamPath(Vec<String>);

impl ParamPath {
    pub fn enter(&mut self, name: &str) {
        self.0.push(name.to_string());
    }
    pub fn exit(&mut self) {
        self.0.pop();
    }
}

impl std::fmt::Display for ParamPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join("."))
    }
}

/// A tensor of the file, as a part of a parameter.
struct Part {
    name: String,
    /// In the file.
    shape: Vec<usize>,
    /// The elements of the parameter that it holds, in the order of the file.
    elements: Elements,
}

enum Elements {
    /// All of them.
    All,
    /// Columns of one matrix of the parameter, transposed: element `[c, r]` of the file is at
    /// `first + r · row_stride + c` of the parameter.
    Transposed { first: usize, row_stride: usize },
}

impl Part {
    fn whole(name: String, shape: &[usize]) -> Self {
        Self {
            name,
            shape: shape.to_vec(),
            elements: Elements::All,
        }
    }

    /// Columns `columns` of matrix `index` of a parameter `[.., rows, width]`.
    fn transposed(name: String, index: usize, [rows, width]: [usize; 2], columns: Range<usize>) -> Self {
        Self {
            name,
            shape: vec![columns.len(), rows],
            elements: Elements::Transposed {
                first: index * rows * width + columns.start,
                row_stride: width,
            },
        }
    }

    fn read(&self, file: &[f32], parameter: &mut [f32]) {
        match self.elements {
            Elements::All => parameter.copy_from_slice(file),
            Elements::Transposed { first, row_stride } => {
                let rows = self.shape[1];
                for (c, column) in file.chunks_exact(rows).enumerate() {
                    for (r, value) in column.iter().enumerate() {
                        parameter[first + r * row_stride + c] = *value;
                    }
                }
            }
        }
    }

    fn write(&self, parameter: &[f32]) -> Vec<f32> {
        match self.elements {
            Elements::All => parameter.to_vec(),
            Elements::Transposed { first, row_stride } => {
                let (columns, rows) = (self.shape[0], self.shape[1]);
                let element = |c: usize, r: usize| parameter[first + r * row_stride + c];
                (0..columns)
                    .flat_map(|c| (0..rows).map(move |r| element(c, r)))
                    .collect()
            }
        }
    }
}

/// The tensors of the file that make up the parameter at `path`.
fn parts(path: &ParamPath, shape: &[usize]) -> Vec<Part> {
    let path: Vec<&str> = path.0.iter().map(String::as_str).collect();
    match (path.as_slice(), shape) {
        (["lm_head"], &[hidden, vocab]) => {
            let name = "lm_head.weight".to_string();
            vec![Part::transposed(name, 0, [hidden, vocab], 0..vocab)]
        }
        ([.., "embed_tokens", "weight"], _) => vec![Part::whole(format!("model.{}", path.join(".")), shape)],
        ([module @ .., "experts", "gate_up_proj"], &[experts, hidden, width]) => {
            let module = module.join(".");
            let part = |expert: usize, name: &str, columns| {
                let name = format!("model.{module}.experts.{expert}.{name}.weight");
                Part::transposed(name, expert, [hidden, width], columns)
            };
            (0..experts)
                .flat_map(|e| [part(e, "gate_proj", 0..width / 2), part(e, "up_proj", width / 2..width)])
                .collect()
        }
        ([module @ .., "experts", "down_proj"], &[experts, ff, hidden]) => {
            let module = module.join(".");
            (0..experts)
                .map(|e| {
                    let name = format!("model.{module}.experts.{e}.down_proj.weight");
                    Part::transposed(name, e, [ff, hidden], 0..hidden)
                })
                .collect()
        }
        // Hugging Face calls the scale of a norm its weight.
        ([module @ .., "gamma"], _) => vec![Part::whole(format!("model.{}.weight", module.join(".")), shape)],
        (_, &[d_in, d_out]) => {
            let name = format!("model.{}", path.join("."));
            vec![Part::transposed(name, 0, [d_in, d_out], 0..d_out)]
        }
        _ => vec![Part::whole(format!("model.{}", path.join(".")), shape)],
    }
}

/// What the file must hold.
#[derive(Default)]
struct Expected {
    path: ParamPath,
    tensors: BTreeMap<String, Vec<usize>>,
}

impl<B: Backend> ModuleVisitor<B> for Expected {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let parts = parts(&self.path, &param.lazy_shape());
        self.tensors
            .extend(parts.into_iter().map(|part| (part.name, part.shape)));
    }
}

fn mismatches(file: &SafeTensors, expected: &BTreeMap<String, Vec<usize>>) -> Vec<String> {
    let mut problems = vec![];
    for (name, shape) in expected {
        match file.tensor(name) {
            Err(_) => problems.push(format!("missing: {name} {shape:?}")),
            Ok(tensor) if tensor.shape() != shape => {
                problems.push(format!("shape: {name} is {:?}, expected {shape:?}", tensor.shape()))
            }
            Ok(tensor) if tensor.dtype() != Dtype::F32 => {
                problems.push(format!("type: {name} is {:?}, expected F32", tensor.dtype()));
            }
            Ok(_) => {}
        }
    }
    let mut unexpected: Vec<_> = file.iter().filter(|(name, _)| !expected.contains_key(*name)).collect();
    unexpected.sort_by_key(|(name, _)| *name);
    problems.extend(
        unexpected
            .iter()
            .map(|(name, tensor)| format!("unexpected: {name} {:?}", tensor.shape())),
    );
    problems
}

struct Writer {
    path: ParamPath,
    tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
    problem: Option<CheckpointError>,
}

impl<B: Backend> ModuleVisitor<B> for Writer {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.val();
        if tensor.dtype() != DType::F32 {
            self.problem.get_or_insert(CheckpointError::NotF32 {
                parameter: self.path.to_string(),
                dtype: tensor.dtype(),
            });
            return;
        }
        let shape = tensor.shape();
        let data = tensor.into_data();
        let values = data.as_slice::<f32>().expect("an f32 tensor");
        for part in parts(&self.path, &shape) {
            let bytes = part.write(values).into_iter().flat_map(f32::to_le_bytes).collect();
            self.tensors.insert(part.name, (part.shape, bytes));
        }
    }
}

/// Fills parameters from a file that [`mismatches`] found to fit.
struct Reader<'a> {
    path: ParamPath,
    file: SafeTensors<'a>,
}

impl<B: Backend> ModuleMapper<B> for Reader<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let shape = param.lazy_shape();
        let mut values = vec![0f32; shape.num_elements()];
        for part in parts(&self.path, &shape) {
            let tensor = self.file.tensor(&part.name).expect("the file was found to have it");
            let (chunks, _) = tensor.data().as_chunks::<4>();
            let data: Vec<f32> = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            part.read(&data, &mut values);
        }
        let id = param.id;
        let tensor = Tensor::from_data(TensorData::new(values, shape), &param.lazy_device());
        param.transform_for_load(tensor, id)
    }
}
