//! Dense weights to NVFP4.
use anyhow::{Context, Result, bail};
use burn_nvfp4::{
    checkpoint::{CheckpointFormat, CheckpointLayer, LayerName, QuantizationScheme},
    safetensors_file::{Dtype, FileTensor, SafetensorsWriter, TensorSpec},
};
use kernels_cubecl::{BLOCK, Nvfp4Weight, OuterScale, ParameterType, WeightLayout, WeightRecipe, host};
use rayon::prelude::*;
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use crate::{
    elements::{amax, decode, is_float},
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

/// What a tensor is to quantization.
enum Role {
    /// It stays.
    Dense,
    /// One layer.
    Layer(LayerName),
    /// All experts of a block, `[experts, d_out, d_in]`; for each, the layers that lie one after the other along `d_out`.
    Experts {
        path: String,
        projections: &'static [&'static str],
    },
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
                let fused = tensor.name();
                match self.is_excluded(fused) || projections.iter().any(excluded) {
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

/// Whether a module is the one at `path` or inside it.
fn contains(path: &str, module: &str) -> bool {
    let rest = module.strip_prefix(path);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn role(tensor: &FileTensor<'_>) -> Role {
    let (name, rank) = (tensor.name(), tensor.shape().len());
    if !is_float(tensor.dtype()) {
        return Role::Dense;
    }
    if let Some(layer) = name
        .strip_suffix(".weight")
        .filter(|_| rank == 2)
        .and_then(LayerName::parse)
    {
        return Role::Layer(layer);
    }
    // Transformers' fused names: no `.weight`.
    let experts = [
        ("gate_up_proj", &["gate_proj", "up_proj"][..]),
        ("down_proj", &["down_proj"]),
    ];
    for (fused, projections) in experts {
        let path = name.strip_suffix(fused).and_then(|path| path.strip_suffix('.'));
        if let Some(path) = path.filter(|path| rank == 3 && path.ends_with(".experts")) {
            return Role::Experts {
                path: path.to_string(),
                projections,
            };
        }
    }
    Role::Dense
}

fn expert_modules<'a>(path: &'a str, expert: usize, projections: &'a [&str]) -> impl Iterator<Item = String> + 'a {
    projections
        .iter()
        .map(move |projection| format!("{path}.{expert}.{projection}"))
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

/// A dense weight `[rows, k]`, in the bytes of its file.
struct Matrix<'a> {
    dtype: Dtype,
    bytes: &'a [u8],
    rows: usize,
    k: usize,
}

/// Values that are packed at a time: their f32 copy stays in a thread's cache.
const PIECE: usize = 1 << 17;

impl<'a> Matrix<'a> {
    fn new(dtype: Dtype, bytes: &'a [u8], rows: usize, k: usize) -> Self {
        Self { dtype, bytes, rows, k }
    }

    /// Packs it in pieces of whole rows, so that no f32 copy of the whole is made.
    fn pack(&self, recipe: WeightRecipe, amax: f32) -> Result<Nvfp4Weight, kernels_cubecl::Error> {
        let mut weight = Nvfp4Weight {
            rows: self.rows,
            k: self.k,
            codes: vec![0; self.rows * self.k / 2],
            block_scales: vec![0; self.rows * self.k / BLOCK],
            outer_scale: recipe.outer_scale(amax),
        };
        if self.bytes.is_empty() {
            return Ok(weight);
        }
        let piece = self.k * (PIECE / self.k).max(1);
        let element = self.dtype.bitsize() / 8;
        let codes = weight.codes.par_chunks_mut(piece / 2);
        let pieces = self
            .bytes
            .par_chunks(piece * element)
            .zip(codes)
            .zip(weight.block_scales.par_chunks_mut(piece / BLOCK));
        pieces.try_for_each_init(Vec::new, |values, ((bytes, codes), block_scales)| {
            values.resize(bytes.len() / element, 0.0);
            decode(self.dtype, bytes, values);
            let rows = values.len() / self.k;
            let packed = host::quantize_weight_by(recipe, values, rows, self.k, WeightLayout::RowMajor, Some(amax))?;
            codes.copy_from_slice(&packed.codes);
            block_scales.copy_from_slice(&packed.block_scales);
            Ok(())
        })?;
        Ok(weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dequantize::dense_bytes, elements::encode};
    use kernels_cubecl::{WeightView, amax};

    #[test]
    fn a_matrix_of_many_pieces_is_packed_and_decoded_as_one() {
        // Pieces are of 431 rows, and the last one has fewer.
        let (rows, k) = (1000, 304);
        let value = |i: usize| ((i * 7919 % 2003) as f32 - 1001.0) * 2f32.powi((i * 31 % 7) as i32 - 12);
        let values: Vec<f32> = (0..rows * k).map(value).collect();
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let mut bytes = vec![0; values.len() * dtype.bitsize() / 8];
            encode(dtype, &values, &mut bytes);
            let mut stored = vec![0.0; values.len()];
            decode(dtype, &bytes, &mut stored);
            let amax = 1.5 * amax(&stored);
            for recipe in [Recipe::Te, Recipe::Modelopt, Recipe::CompressedTensors] {
                let recipe = recipe.of(dtype);
                let packed = Matrix::new(dtype, &bytes, rows, k).pack(recipe, amax).unwrap();
                let layout = WeightLayout::RowMajor;
                let whole = host::quantize_weight_by(recipe, &stored, rows, k, layout, Some(amax)).unwrap();
                assert!(packed == whole, "{dtype} {recipe:?}");
                let mut decoded = vec![0.0; values.len()];
                host::dequantize_weight(WeightView::Nvfp4(whole.view()), layout, &mut decoded).unwrap();
                let mut expected = vec![0; bytes.len()];
                encode(dtype, &decoded, &mut expected);
                assert!(dense_bytes(&packed.view(), dtype) == expected, "{dtype} {recipe:?}");
            }
        }
    }
}
