//! NVFP4 back to dense weights: what the codes and scales say, in F32 or rounded to BF16.
use anyhow::Result;
use burn_nvfp4::{
    checkpoint::{CheckpointLayer, Nvfp4Folder, QuantizationScheme},
    safetensors_file::{Dtype, FileTensor, SafetensorsWriter, TensorSpec},
};
use kernels_cubecl::{BLOCK, Nvfp4View, WeightLayout, WeightView, host};
use rayon::prelude::*;
use serde_json::{Map, Value};

use crate::{elements::encode, shards::Conversion, source::Source};

/// Type of the dense weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DenseType {
    /// Rounded: what checkpoints usually have.
    #[default]
    Bf16,
    /// Exact.
    F32,
}

impl DenseType {
    fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::BF16,
            Self::F32 => Dtype::F32,
        }
    }

    /// As `config.json` calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
        }
    }
}

/// Dequantization of a model.
pub struct Dequantize<'a> {
    packed: &'a Nvfp4Folder,
    dtype: DenseType,
}

impl<'a> Dequantize<'a> {
    /// Of a quantized model.
    ///
    /// # Errors
    /// When the model is not quantized.
    pub fn new(source: &'a Source, dtype: DenseType) -> Result<Self> {
        let packed = source.require_packed()?;
        Ok(Self { packed, dtype })
    }
}

impl Conversion for Dequantize<'_> {
    fn specs(&self, tensor: &FileTensor<'_>) -> Result<Vec<TensorSpec>> {
        let Some(layer) = layer_of_codes(self.packed, tensor)? else {
            return Ok(unpacked(self.packed, tensor).into_iter().collect());
        };
        Ok(vec![TensorSpec {
            name: format!("{}.weight", layer.module),
            dtype: self.dtype.dtype(),
            shape: vec![layer.weight.rows, layer.weight.k],
        }])
    }

    fn write(&self, tensor: &FileTensor<'_>, writer: &mut SafetensorsWriter) -> Result<()> {
        if let Some(layer) = layer_of_codes(self.packed, tensor)? {
            let bytes = dense_bytes(&layer.weight, self.dtype.dtype());
            writer.write(&format!("{}.weight", layer.module), &bytes)?;
        } else if unpacked(self.packed, tensor).is_some() {
            writer.write(tensor.name(), tensor.bytes)?;
        }
        Ok(())
    }

    fn scheme(&self) -> Option<QuantizationScheme> {
        None
    }

    fn change_config(&self, config: &mut Map<String, Value>) {
        let key = if config.contains_key("torch_dtype") {
            "torch_dtype"
        } else {
            "dtype"
        };
        config.insert(key.into(), self.dtype.name().into());
    }
}

/// The packed layer that a tensor holds the codes of: the layer is written where they were.
pub(crate) fn layer_of_codes<'a>(
    packed: &'a Nvfp4Folder,
    tensor: &FileTensor<'_>,
) -> Result<Option<CheckpointLayer<'a>>> {
    let Some(module) = packed.module_of(tensor.name()).filter(|_| tensor.dtype() == Dtype::U8) else {
        return Ok(None);
    };
    Ok(packed.layer(module)?)
}

/// A tensor that belongs to no packed layer.
pub(crate) fn unpacked(packed: &Nvfp4Folder, tensor: &FileTensor<'_>) -> Option<TensorSpec> {
    packed.module_of(tensor.name()).is_none().then(|| TensorSpec {
        name: tensor.name().into(),
        dtype: tensor.dtype(),
        shape: tensor.shape().into(),
    })
}

/// Values that are decoded at a time: their f32 copy stays in a thread's cache.
const PIECE: usize = 1 << 17;

/// The decoded values in a type, row-major.
pub(crate) fn dense_bytes(weight: &Nvfp4View<'_>, dtype: Dtype) -> Vec<u8> {
    let element = dtype.bitsize() / 8;
    let mut bytes = vec![0; weight.rows * weight.k * element];
    if bytes.is_empty() {
        return bytes;
    }
    let piece = (PIECE / weight.k).max(1);
    let parts = bytes.par_chunks_mut(piece * weight.k * element);
    let codes = weight.codes.par_chunks(piece * weight.k / 2);
    let block_scales = weight.block_scales.par_chunks(piece * weight.k / BLOCK);
    parts
        .zip(codes)
        .zip(block_scales)
        .for_each_init(Vec::new, |values, ((bytes, codes), block_scales)| {
            values.resize(bytes.len() / element, 0.0);
            let part = Nvfp4View {
                rows: values.len() / weight.k,
                codes,
                block_scales,
                ..*weight
            };
            let decoded = host::dequantize_weight(WeightView::Nvfp4(part), WeightLayout::RowMajor, values);
            decoded.expect("rows of a layer that was checked");
            encode(dtype, values, bytes);
        });
    bytes
}
