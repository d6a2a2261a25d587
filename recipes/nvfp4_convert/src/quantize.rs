//! Dense weights to NVFP4.
use anyhow::{Context, Result, bail};
use burn_nvfp4::{
    checkpoint::{CheckpointFormat, CheckpointLayer, LayerName, QuantizationScheme},
    safetensors_file::{Dtype, FileTensor, SafetensorsWriter, TensorSpec},
};
use kernels_cubecl::{BLOCK, OuterScale, ParameterType, WeightRecipe};
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use crate::{
    elements::amax,
    matrix::Matrix,
    roles::{Role, contains, expert_modules, role},
    shards::Conversion,
    source::Source,
};

/// Whose formulas weights are packed by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recipe {
    /// TransformerEngine's: what training and rollouts of this project use.
    #[default]
    Te,
    /// ModelOpt's, byte for byte.
    Modelopt,
    /// compressed-tensors' and llm-compressor's, byte for byte.
    CompressedTensors,
}

impl Recipe {
    /// The format of whoever made the recipe; TransformerEngine has none, and gets the one that more engines load.
    pub fn format(self) -> CheckpointFormat {
        match self {
            Self::Te | Self::CompressedTensors => CheckpointFormat::CompressedTensors,
            Self::Modelopt => CheckpointFormat::ModelOpt,
        }
    }

    /// For parameters of a type. llm-compressor computes scales in the type that the model was loaded with; in F16 they
    /// would overflow, and are computed in f32.
    fn of(self, parameters: Dtype) -> WeightRecipe {
        match self {
            Self::Te => WeightRecipe::TransformerEngine,
            Self::Modelopt => WeightRecipe::ModelOpt,
            Self::CompressedTensors => WeightRecipe::CompressedTensors(match parameters {
                Dtype::BF16 => ParameterType::Bf16,
                _ => ParameterType::F32,
            }),
        }
    }
}

/// Largest magnitude of the activations of each module: what static activation scales are made of.
pub type InputAmax = BTreeMap<String, f32>;

/// Quantization of a model.
pub struct Quantize<'a> {
    source: &'a Source,
    recipe: Recipe,
    format: CheckpointFormat,
    exclude: BTreeSet<String>,
    input_amax: Option<InputAmax>,
    /// Largest magnitude of each group of layers that share an outer scale, once looked at; by its first module.
    amax: RefCell<HashMap<String, f32>>,
}

impl<'a> Quantize<'a> {
    /// `exclude` are paths of modules that stay dense, with all they contain.
    ///
    /// # Errors
    /// When the model is quantized already, has nothing to quantize, or a path names nothing that would be.
    pub fn new(
        source: &'a Source,
        recipe: Recipe,
        format: CheckpointFormat,
        exclude: impl IntoIterator<Item = String>,
    ) -> Result<Self> {
        source.require_dense()?;
        let quantize = Self {
            source,
            recipe,
            format,
            exclude: exclude.into_iter().collect(),
            input_amax: None,
            amax: RefCell::default(),
        };
        quantize.check_exclusions()?;
        Ok(quantize)
    }

    /// The output also says how activations are quantized: by a scale made of the largest magnitude of each module's.
    pub fn with_input_amax(self, input_amax: InputAmax) -> Self {
        Self {
            input_amax: Some(input_amax),
            ..self
        }
    }

    fn role(&self, tensor: &FileTensor<'_>) -> Role {
        match role(tensor) {
            Role::Layer(layer) if self.is_excluded(&layer.module()) => Role::Dense,
            Role::Experts { path, projections } => {
                let excluded = |projection: &&str| self.is_excluded(&format!("{path}.{projection}"));
                match projections.iter().any(excluded) {
                    true => Role::Dense,
                    false => Role::Experts { path, projections },
                }
            }
            role => role,
        }
    }

    /// Whether a module or one that contains it is to stay dense.
    fn is_excluded(&self, module: &str) -> bool {
        self.exclude.iter().any(|path| contains(path, module))
    }

    /// Each exclusion leaves something dense, and takes layers that engines fuse together or not at all.
    fn check_exclusions(&self) -> Result<()> {
        let layers: Vec<LayerName> = self
            .source
            .folder()
            .tensors()
            .flat_map(|tensor| match role(&tensor) {
                Role::Dense => vec![],
                Role::Layer(layer) => vec![layer],
                Role::Experts { path, projections } => projections
                    .iter()
                    .filter_map(|projection| LayerName::parse(&format!("{path}.{projection}")))
                    .collect(),
            })
            .collect();
        if layers.is_empty() {
            bail!("{}: no layer to quantize among its tensors", self.source.path.display());
        }
        for path in &self.exclude {
            if !layers.iter().any(|layer| contains(path, &layer.module())) {
                bail!("--exclude {path}: the model has no such module with layers to quantize");
            }
        }
        self.check_experts(&layers)?;
        for layer in &layers {
            let dense = layer
                .sharing()
                .filter(|layer| self.is_excluded(&layer.module()))
                .count();
            if dense != 0 && dense != layer.sharing().count() {
                let group: Vec<String> = layer.sharing().map(|layer| layer.module()).collect();
                bail!(
                    "--exclude: {} are fused by inference engines, and stay dense together or not at all",
                    group.join(", ")
                );
            }
        }
        Ok(())
    }

    /// Engines keep all experts of a block in one weight.
    fn check_experts(&self, layers: &[LayerName]) -> Result<()> {
        let mut blocks: BTreeMap<&str, [bool; 2]> = BTreeMap::new();
        for layer in layers {
            if let Some((path, _)) = layer.expert() {
                blocks.entry(path).or_default()[usize::from(self.is_excluded(&layer.module()))] = true;
            }
        }
        match blocks.into_iter().find(|(_, seen)| *seen == [true; 2]) {
            Some((path, _)) => bail!("--exclude: the experts of {path} stay dense together or not at all"),
            None => Ok(()),
        }
    }

    /// The largest magnitude that a layer's outer scale covers.
    fn shared_amax(&self, layer: &LayerName) -> Result<f32> {
        let first = layer.sharing().next().expect("a layer shares with itself").module();
        if let Some(amax) = self.amax.borrow().get(&first) {
            return Ok(*amax);
        }
        let mut largest = 0f32;
        for member in layer.sharing() {
            if let Some(tensor) = self.source.tensor(&format!("{}.weight", member.module())) {
                largest = largest.max(amax(&tensor, tensor.bytes)?);
            }
        }
        self.amax.borrow_mut().insert(first, largest);
        Ok(largest)
    }

    /// The outer scale of a module's activations.
    fn input_scale(&self, module: &str) -> Result<Option<OuterScale>> {
        let Some(input_amax) = &self.input_amax else {
            return Ok(None);
        };
        let amax = input_amax
            .get(module)
            .with_context(|| format!("{module}: no activations were calibrated"))?;
        let recipe = match self.format {
            CheckpointFormat::CompressedTensors => WeightRecipe::CompressedTensors(ParameterType::F32),
            CheckpointFormat::ModelOpt => WeightRecipe::ModelOpt,
        };
        Ok(Some(recipe.outer_scale(*amax)))
    }

    fn write_layer(
        &self,
        module: String,
        matrix: &Matrix<'_>,
        amax: f32,
        writer: &mut SafetensorsWriter,
    ) -> Result<()> {
        let weight = matrix
            .pack(self.recipe.of(matrix.dtype), amax)
            .with_context(|| module.clone())?;
        let input_scale = self.input_scale(&module)?;
        let layer = CheckpointLayer {
            module,
            weight: weight.view(),
            input_scale,
        };
        Ok(self.format.write(writer, &layer)?)
    }
}

impl Conversion for Quantize<'_> {
    fn specs(&self, tensor: &FileTensor<'_>) -> Result<Vec<TensorSpec>> {
        let w4a4 = self.input_amax.is_some();
        match self.role(tensor) {
            Role::Dense => Ok(vec![copied(tensor)]),
            Role::Layer(layer) => {
                let [d_out, d_in] = *tensor.shape() else {
                    unreachable!("a layer is a matrix")
                };
                check_d_in(tensor, d_in)?;
                Ok(self.format.tensor_specs(&layer.module(), d_out, d_in, w4a4))
            }
            Role::Experts { path, projections } => {
                let [experts, rows, d_in] = *tensor.shape() else {
                    unreachable!("experts are a stack")
                };
                check_d_in(tensor, d_in)?;
                if !rows.is_multiple_of(projections.len()) {
                    return Err(tensor
                        .error(format!("{rows} rows, expected as many of gate as of up"))
                        .into());
                }
                let d_out = rows / projections.len();
                let modules = (0..experts).flat_map(|expert| expert_modules(&path, expert, projections));
                Ok(modules
                    .flat_map(|module| self.format.tensor_specs(&module, d_out, d_in, w4a4))
                    .collect())
            }
        }
    }

    fn write(&self, tensor: &FileTensor<'_>, writer: &mut SafetensorsWriter) -> Result<()> {
        match self.role(tensor) {
            Role::Dense => Ok(writer.write(tensor.name(), tensor.bytes)?),
            Role::Layer(layer) => {
                let [rows, k] = *tensor.shape() else {
                    unreachable!("a layer is a matrix")
                };
                let matrix = Matrix::new(tensor.dtype(), tensor.bytes, rows, k);
                self.write_layer(layer.module(), &matrix, self.shared_amax(&layer)?, writer)
            }
            Role::Experts { path, projections } => {
                let [experts, rows, k] = *tensor.shape() else {
                    unreachable!("experts are a stack")
                };
                let d_out = rows / projections.len();
                let layer = d_out * k * tensor.dtype().bitsize() / 8;
                for expert in 0..experts {
                    let first = expert * projections.len() * layer;
                    let amax = amax(tensor, &tensor.bytes[first..first + projections.len() * layer])?;
                    for (index, module) in expert_modules(&path, expert, projections).enumerate() {
                        let bytes = &tensor.bytes[first + index * layer..][..layer];
                        self.write_layer(module, &Matrix::new(tensor.dtype(), bytes, d_out, k), amax, writer)?;
                    }
                }
                Ok(())
            }
        }
    }

    fn scheme(&self) -> Option<QuantizationScheme> {
        Some(QuantizationScheme {
            format: self.format,
            w4a4: self.input_amax.is_some(),
        })
    }
}

fn copied(tensor: &FileTensor<'_>) -> TensorSpec {
    TensorSpec {
        name: tensor.name().into(),
        dtype: tensor.dtype(),
        shape: tensor.shape().into(),
    }
}

fn check_d_in(tensor: &FileTensor<'_>, d_in: usize) -> Result<()> {
    match d_in.is_multiple_of(BLOCK) {
        true => Ok(()),
        false => {
            let module = tensor.name().trim_end_matches(".weight");
            let problem = format!("d_in = {d_in} is not a multiple of {BLOCK}, the NVFP4 block; --exclude {module}?");
            Err(tensor.error(problem).into())
        }
    }
}
