//! Packed weights of a folder into a model for rollouts: codes and scales as they lie in the files.
use std::collections::BTreeMap;

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Tensor, TensorData, backend::BackendTypes},
};
use burn_nvfp4::{
    LayerAudit, Nvfp4, Nvfp4Backend, Outcome, PackingAudit, Precision,
    checkpoint::{CheckpointLayer, Nvfp4Folder, load_weight},
    packed_weight,
    safetensors_file::SafetensorsError,
};

use super::{
    CheckpointError, LoadProgress, ModelFolder, OpenError,
    load::{Names, mismatches},
    param_path::ParamPath,
    parts::Part,
};
use crate::{
    layer_backend::LayerBackend,
    modules::{linear::QuadsLinear, moe::QuadsMoe, residual_masks::ResidualMasks},
};

impl ModelFolder {
    /// Loads a model whose weights are packed to NVFP4, by compressed-tensors or ModelOpt, for rollouts in `precision`, and
    /// says what became of each weight. No dense copy is made of what is packed; the rest becomes f32. Layers that the
    /// folder has dense run in [`Precision::High`]. `masks` are needed when the precision compensates calibrated channels.
    ///
    /// A static activation scale in the files is not used: activations get their scale from each token.
    ///
    /// # Errors
    /// As [`load`](Self::load); when the folder is not quantized, a scale is impossible, or layers that are one weight here
    /// (gate and up of an expert) have different outer scales; when the model cannot run in the precision.
    pub fn load_packed<B: Nvfp4Backend + LayerBackend>(
        &self,
        precision: &Precision,
        masks: Option<&ResidualMasks>,
        device: &<Nvfp4<B> as BackendTypes>::Device,
        mut progress: impl FnMut(LoadProgress<'_>),
    ) -> Result<(QuadsMoe<Nvfp4<B>>, PackingAudit), OpenError> {
        let Some(packed) = Nvfp4Folder::open(self.path())? else {
            return Err(self.refuse_config("no quantization_config: the weights are not packed; load them with `load`"));
        };
        self.check_sizes()?;
        let config = self.config().clone();
        let names = PackedNames {
            names: Names {
                config: &config,
                files: packed.files(),
                path: ParamPath::default(),
            },
            packed: &packed,
        };
        let model = config.init::<Nvfp4<B>>(device);
        names.check(&model)?;
        let mut reader = Reader {
            total_bytes: packed.files().tensors().map(|tensor| tensor.bytes.len() as u64).sum(),
            names,
            bytes: 0,
            progress: &mut progress,
            audit: PackingAudit::default(),
            problem: None,
        };
        let model = model.map(&mut reader);
        if let Some(problem) = reader.problem {
            return Err(problem);
        }
        let mut audit = reader.audit;
        let model = run_in(model, precision, masks)?;
        for layer in &mut audit.layers {
            if let Outcome::Packed(of) = &mut layer.outcome {
                *of = precision.clone();
            }
        }
        Ok((model, audit))
    }
}

/// Sets how activations enter packed weights. Dense ones stay in high precision.
fn run_in<B: Nvfp4Backend + LayerBackend>(
    mut model: QuadsMoe<Nvfp4<B>>,
    precision: &Precision,
    masks: Option<&ResidualMasks>,
) -> Result<QuadsMoe<Nvfp4<B>>, OpenError> {
    if let Some(masks) = masks {
        model = model.with_residual_masks(masks)?;
    }
    let mut model = model.with_precision(precision.clone())?;
    let is_packed = |linear: &QuadsLinear<Nvfp4<B>>| packed_weight(&linear.weight.val()).is_some();
    for (index, layer) in model.layers.iter_mut().enumerate() {
        let refuse = |name: &str| {
            let parameter = format!("layers.{index}.{name}");
            move |source| OpenError::Packed { parameter, source }
        };
        let attention = &mut layer.self_attn;
        if is_packed(&attention.q_proj) {
            let [q, k, v] = attention.qkv().pack(precision).map_err(refuse("self_attn.qkv_proj"))?;
            (attention.q_proj, attention.k_proj, attention.v_proj) = (q, k, v);
        } else {
            for linear in [&mut attention.q_proj, &mut attention.k_proj, &mut attention.v_proj] {
                *linear = linear.clone().with_precision(Precision::High);
            }
        }
        let o_proj = attention.o_proj.clone();
        attention.o_proj = match is_packed(&o_proj) {
            true => o_proj.pack(precision).map_err(refuse("self_attn.o_proj"))?,
            false => o_proj.with_precision(Precision::High),
        };
        let experts = layer.mlp.experts.clone();
        layer.mlp.experts = match packed_weight(&experts.down_proj.val()) {
            Some(_) => experts.pack(precision).map_err(|error| OpenError::Packed {
                parameter: format!("layers.{index}.mlp.experts.{}", error.tensor),
                source: error.source,
            })?,
            None => experts.with_precision(Precision::High),
        };
    }
    Ok(model)
}

/// The tensors of the parameter at the names' path, in a folder with packed layers.
struct PackedNames<'a> {
    names: Names<'a>,
    packed: &'a Nvfp4Folder,
}

/// What a parameter is made of.
enum Parts {
    /// Tensors.
    Dense(Vec<Part>),
    /// Packed modules, with what shape their weights have in files, `[d_out, d_in]`.
    Packed(Vec<(String, Vec<usize>)>),
    /// Both: a parameter is packed or not.
    Mixed { packed: String, dense: String },
}

impl PackedNames<'_> {
    fn parts(&self, shape: &[usize]) -> Parts {
        let parts = self.names.parts(shape);
        let module = |part: &Part| {
            let module = part.name.strip_suffix(".weight")?;
            self.packed.is_packed(module).then(|| module.to_string())
        };
        let modules: Vec<Option<String>> = parts.iter().map(module).collect();
        match (
            modules.iter().position(Option::is_some),
            modules.iter().position(Option::is_none),
        ) {
            (Some(packed), Some(dense)) => Parts::Mixed {
                packed: parts[packed].name.clone(),
                dense: parts[dense].name.clone(),
            },
            (Some(_), None) => {
                let modules = modules.into_iter().flatten();
                Parts::Packed(modules.zip(parts.into_iter().map(|part| part.shape)).collect())
            }
            (None, _) => Parts::Dense(parts),
        }
    }

    /// Whether the folder has exactly the tensors of the model.
    fn check<B: Nvfp4Backend>(&self, model: &QuadsMoe<Nvfp4<B>>) -> Result<(), OpenError> {
        let mut expected = Expected {
            names: PackedNames {
                names: self.names.clone(),
                packed: self.packed,
            },
            dense: BTreeMap::new(),
            packed: BTreeMap::new(),
            problems: vec![],
        };
        model.visit(&mut expected);
        expected.check_groups();
        let files = self.packed.files();
        let known = |name: &str| {
            let module = self.packed.module_of(name);
            module.is_some_and(|module| expected.packed.contains_key(module))
        };
        let tied = self.names.config.tie_word_embeddings;
        let mut problems = mismatches(files, &expected.dense, tied, known);
        for (module, shape) in &expected.packed {
            let layer = self.packed.layer(module)?.expect("a packed module");
            let actual = [layer.weight.rows, layer.weight.k];
            if *shape != actual {
                problems.push(format!("shape: {module} is {actual:?}, expected {shape:?}"));
            }
        }
        problems.extend(expected.problems);
        match problems.is_empty() {
            true => Ok(()),
            false => Err(OpenError::Weights(CheckpointError::Mismatch {
                path: self.packed.path().into(),
                problems,
            })),
        }
    }
}

/// What the folder must hold.
struct Expected<'a> {
    names: PackedNames<'a>,
    dense: BTreeMap<String, Vec<usize>>,
    packed: BTreeMap<String, Vec<usize>>,
    problems: Vec<String>,
}

impl Expected<'_> {
    /// Layers that one product serves are packed together or not at all.
    fn check_groups(&mut self) {
        let mut check = |layer: usize, members: &[&str]| {
            let name = |member: &&str| format!("model.layers.{layer}.{member}");
            let members = members.iter().map(name).filter(|module| {
                self.packed.contains_key(module) || self.dense.contains_key(&format!("{module}.weight"))
            });
            let (packed, dense): (Vec<_>, Vec<_>) = members.partition(|module| self.packed.contains_key(module));
            if let (Some(packed), Some(dense)) = (packed.first(), dense.first()) {
                self.problems.push(format!(
                    "mixed: {packed} is packed and {dense} is not, but they go together"
                ));
            }
        };
        for layer in 0..self.names.names.config.num_hidden_layers {
            check(layer, &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
            check(layer, &["mlp.experts.0.gate_proj", "mlp.experts.0.down_proj"]);
            check(layer, &["mlp.gate_proj", "mlp.down_proj"]);
        }
    }
}

impl<B: Nvfp4Backend> ModuleVisitor<Nvfp4<B>> for Expected<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.names.names.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.names.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Nvfp4<B>, D>>) {
        match self.names.parts(&param.lazy_shape()) {
            Parts::Dense(parts) => self.dense.extend(parts.into_iter().map(|part| (part.name, part.shape))),
            Parts::Packed(modules) => self.packed.extend(modules),
            Parts::Mixed { packed, dense } => {
                self.problems.push(format!(
                    "mixed: {packed} is packed and {dense} is not, but they are one weight"
                ));
            }
        }
    }
}

/// Fills parameters from a folder that was found to fit.
struct Reader<'a, 'b> {
    names: PackedNames<'a>,
    bytes: u64,
    total_bytes: u64,
    progress: &'b mut dyn FnMut(LoadProgress<'_>),
    audit: PackingAudit,
    /// The first one; parameters stay as they are from then on.
    problem: Option<OpenError>,
}

impl Reader<'_, '_> {
    fn packed<B: Nvfp4Backend, const D: usize>(
        &mut self,
        modules: &[(String, Vec<usize>)],
        groups: usize,
        device: &<Nvfp4<B> as BackendTypes>::Device,
    ) -> Result<Tensor<Nvfp4<B>, D>, OpenError> {
        let layer = |(module, _): &(String, Vec<usize>)| {
            let layer = self.names.packed.layer(module)?;
            Ok::<_, SafetensorsError>(layer.expect("a packed module"))
        };
        let layers: Vec<CheckpointLayer<'_>> = modules.iter().map(layer).collect::<Result<_, _>>()?;
        self.bytes += layers.iter().map(|layer| layer.bytes() as u64).sum::<u64>();
        let groups: Vec<&[CheckpointLayer<'_>]> = layers.chunks(layers.len() / groups).collect();
        load_weight(&groups, &Precision::W4A16, None, device).map_err(|source| OpenError::Packed {
            parameter: self.names.names.path.to_string(),
            source,
        })
    }

    fn record(&mut self, shape: Vec<usize>, outcome: Outcome, bytes: usize) {
        self.audit.push(LayerAudit {
            path: self.names.names.path.to_string(),
            bytes_before: 4 * shape.iter().product::<usize>(),
            bytes_after: bytes,
            shape,
            outcome,
        });
        (self.progress)(LoadProgress {
            parameter: &self.names.names.path.to_string(),
            bytes: self.bytes,
            total_bytes: self.total_bytes,
        });
    }
}

impl<B: Nvfp4Backend> ModuleMapper<Nvfp4<B>> for Reader<'_, '_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.names.names.path.enter(name);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.names.path.exit();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Nvfp4<B>, D>>) -> Param<Tensor<Nvfp4<B>, D>> {
        if self.problem.is_some() {
            return param;
        }
        let shape = param.lazy_shape();
        match self.names.parts(&shape) {
            Parts::Packed(modules) => {
                let groups = if D == 3 { shape[0] } else { 1 };
                match self.packed::<B, D>(&modules, groups, &param.lazy_device()) {
                    Ok(tensor) => {
                        let bytes = packed_weight(&tensor).map_or(0, |weight| weight.bytes());
                        self.record(shape.to_vec(), Outcome::Packed(Precision::W4A16), bytes);
                        Param::initialized(param.id, tensor)
                    }
                    Err(problem) => {
                        self.problem = Some(problem);
                        param
                    }
                }
            }
            Parts::Dense(parts) => {
                let mut values = vec![0f32; shape.num_elements()];
                for part in &parts {
                    let tensor = self
                        .names
                        .packed
                        .files()
                        .tensor(&part.name)
                        .expect("it was found to be there");
                    part.read(&tensor, &mut values);
                    self.bytes += tensor.bytes.len() as u64;
                }
                if D > 1 {
                    self.record(
                        shape.to_vec(),
                        Outcome::Left("dense in the folder".into()),
                        4 * values.len(),
                    );
                }
                let id = param.id;
                let tensor = Tensor::from_data(TensorData::new(values, shape), &param.lazy_device());
                param.transform_for_load(tensor, id)
            }
            Parts::Mixed { .. } => unreachable!("the folder was found to fit"),
        }
    }
}
