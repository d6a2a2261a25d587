//! One packed layer of a checkpoint.
use crate::safetensors_file::{Dtype, FileTensor, SafetensorsError};
use kernels_cubecl::{BLOCK, Nvfp4View, OuterScale, WeightLayout, WeightView, e2m1, e4m3, host};

use super::format::{CheckpointFormat, Part};

/// A packed layer: where it lies in the model, its weight, and what a W4A4 file says of its activations.
#[derive(Clone, Debug)]
pub struct CheckpointLayer<'a> {
    /// Path of the module: `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// Codes and scales; `rows` is d_out, `k` is d_in.
    pub weight: Nvfp4View<'a>,
    /// The calibrated outer scale of the activations, in the convention of its format.
    pub input_scale: Option<OuterScale>,
}

/// The tensors of a packed layer, before anything is believed of them.
pub(super) struct LayerTensors<'a> {
    pub codes: FileTensor<'a>,
    pub block_scales: FileTensor<'a>,
    pub outer_scale: FileTensor<'a>,
    pub input_scale: Option<FileTensor<'a>>,
}

impl<'a> CheckpointLayer<'a> {
    /// Checks the tensors of a layer.
    pub(super) fn check(
        format: CheckpointFormat,
        module: &str,
        tensors: &LayerTensors<'a>,
    ) -> Result<Self, SafetensorsError> {
        let (d_out, d_in) = check_codes(&tensors.codes)?;
        check_block_scales(&tensors.block_scales, d_out, d_in)?;
        let outer_scale = format.outer_scale(scale_value(&tensors.outer_scale)?);
        let weight = Nvfp4View {
            rows: d_out,
            k: d_in,
            codes: tensors.codes.bytes,
            block_scales: tensors.block_scales.bytes,
            outer_scale,
        };
        check_range(&tensors.outer_scale, &weight)?;
        let input_scale = tensors.input_scale.as_ref().map(scale_value).transpose()?;
        Ok(Self {
            module: module.to_string(),
            weight,
            input_scale: input_scale.map(|scale| format.outer_scale(scale)),
        })
    }

    /// The decoded values, `[d_out, d_in]`, row-major: `e2m1 · (block_scale · s)` or `e2m1 · (block_scale / s)`, in f32.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.weight.rows * self.weight.k];
        let decoded = host::dequantize_weight(WeightView::Nvfp4(self.weight), WeightLayout::RowMajor, &mut values);
        decoded.expect("the layer's shape was checked");
        values
    }

    /// Bytes of codes and scales.
    pub fn bytes(&self) -> usize {
        let scalars = 1 + usize::from(self.input_scale.is_some());
        self.weight.codes.len() + self.weight.block_scales.len() + 4 * scalars
    }
}

/// What a block scale is divided by.
pub fn divisor(scale: OuterScale) -> f32 {
    match scale {
        OuterScale::Divide(scale) => scale,
        OuterScale::Multiply(scale) => (1.0 / scale).min(f32::MAX),
    }
}

/// What a block scale is multiplied with.
pub fn multiplier(scale: OuterScale) -> f32 {
    match scale {
        OuterScale::Multiply(scale) => scale,
        OuterScale::Divide(scale) => (1.0 / scale).min(f32::MAX),
    }
}

fn check_codes(tensor: &FileTensor<'_>) -> Result<(usize, usize), SafetensorsError> {
    check_dtype(tensor, Dtype::U8)?;
    let &[d_out, bytes] = tensor.shape() else {
        let shape = tensor.shape();
        return Err(tensor.error(format!("shape {shape:?}, expected codes [d_out, d_in/2]")));
    };
    if d_out == 0 || bytes == 0 {
        return Err(tensor.error(format!("shape {:?}, a weight without values", tensor.shape())));
    }
    match bytes.checked_mul(2).filter(|d_in| d_in.is_multiple_of(BLOCK)) {
        Some(d_in) => Ok((d_out, d_in)),
        None => Err(tensor.error(format!(
            "{bytes} bytes a row: codes of two values each, in blocks of {BLOCK}, come in multiples of {}",
            BLOCK / 2
        ))),
    }
}

fn check_block_scales(tensor: &FileTensor<'_>, d_out: usize, d_in: usize) -> Result<(), SafetensorsError> {
    check_dtype(tensor, Dtype::F8_E4M3)?;
    let (expected, actual) = ([d_out, d_in / BLOCK], tensor.shape());
    if actual != expected {
        return Err(tensor.error(format!("shape {actual:?}, the codes ask for {expected:?}")));
    }
    // One comparison finds both: NaN is 0x7F, and all from 0x80 on have a sign.
    let Some(at) = tensor.bytes.iter().position(|byte| *byte >= 0x7f) else {
        return Ok(());
    };
    let (byte, row, column) = (tensor.bytes[at], at / expected[1], at % expected[1]);
    let what = match byte & 0x7f {
        0x7f => "NaN".to_string(),
        _ => format!("negative ({})", e4m3::decode(byte)),
    };
    Err(tensor.error(format!("block scale {byte:#04x} at [{row}, {column}] is {what}")))
}

/// The number of a scale tensor, if it can be a scale.
fn scale_value(tensor: &FileTensor<'_>) -> Result<f32, SafetensorsError> {
    check_dtype(tensor, Dtype::F32)?;
    let Ok(bytes) = <[u8; 4]>::try_from(tensor.bytes) else {
        return Err(tensor.error(format!("shape {:?}, expected one number", tensor.shape())));
    };
    let scale = f32::from_le_bytes(bytes);
    // Below 1/FLT_MAX the reciprocal, which other loaders take, is no number.
    match scale >= 1.0 / f32::MAX && scale.is_finite() {
        true => Ok(scale),
        false => Err(tensor.error(format!(
            "scale {scale:e}, expected a positive number that can be inverted"
        ))),
    }
}

/// Whether all decoded values are finite.
fn check_range(outer_scale: &FileTensor<'_>, weight: &Nvfp4View<'_>) -> Result<(), SafetensorsError> {
    // Bytes of positive E4M3 values order as the values do.
    let largest = weight.block_scales.iter().max().map_or(0.0, |byte| e4m3::decode(*byte));
    match (e2m1::MAX * weight.outer_scale.step(largest)).is_finite() {
        true => Ok(()),
        false => Err(outer_scale.error(format!(
            "with a block scale of {largest}, values beyond the range of f32"
        ))),
    }
}

fn check_dtype(tensor: &FileTensor<'_>, expected: Dtype) -> Result<(), SafetensorsError> {
    match tensor.dtype() == expected {
        true => Ok(()),
        false => Err(tensor.error(format!("{}, expected {expected}", tensor.dtype()))),
    }
}

/// The name of a part's tensor.
pub(super) fn tensor_name(format: CheckpointFormat, module: &str, part: Part) -> String {
    format!("{module}.{}", format.part_name(part))
}
