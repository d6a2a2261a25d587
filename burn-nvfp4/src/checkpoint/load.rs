//! Packed layers of a checkpoint as weights of `Nvfp4<B>`: the bytes of the files, no dense copy.
use burn::tensor::Tensor;
use burn_backend::{FloatDType, tensor::Device};
use kernels_cubecl::{BLOCK, OuterScale, ResidualMask};

use crate::{
    Nvfp4, Nvfp4Backend, OuterScaleConvention, PackError, PackedWeight, Precision, Storage, WeightFormat,
    pack::quantized,
    reference::{block_scales_tensor, codes_tensor, floats_tensor},
};

use super::layer::CheckpointLayer;

/// Layers as a packed weight `[d_in, d_out]`, or a stack of them `[groups, d_in, d_out]`: the experts of a mixture. The layers
/// of a group lie side by side along `d_out`, gate before up.
///
/// # Errors
/// When the layers of a group have different outer scales, which one weight cannot have, shapes or conventions differ, or
/// the precision is not one of NVFP4 weights or does not fit `d_in`.
///
/// # Panics
/// When there is no layer, or there are several groups for a tensor of two dimensions.
pub fn load_weight<B: Nvfp4Backend, const D: usize>(
    groups: &[&[CheckpointLayer<'_>]],
    precision: &Precision,
    mask: Option<&ResidualMask>,
    device: &Device<B>,
) -> Result<Tensor<Nvfp4<B>, D>, PackError> {
    activated(stack(groups, D, device)?, precision, mask).map(quantized)
}

fn activated<B: Nvfp4Backend>(
    weight: PackedWeight<B>,
    precision: &Precision,
    mask: Option<&ResidualMask>,
) -> Result<PackedWeight<B>, PackError> {
    match precision.weight_format() {
        Some(WeightFormat::Nvfp4) => weight.with_activation(precision.activation(mask)?),
        Some(expected) => Err(PackError::AlreadyPacked {
            expected,
            actual: WeightFormat::Nvfp4,
        }),
        None => Err(PackError::NothingToPack),
    }
}

fn stack<B: Nvfp4Backend>(
    groups: &[&[CheckpointLayer<'_>]],
    rank: usize,
    device: &Device<B>,
) -> Result<PackedWeight<B>, PackError> {
    let first = &groups[0][0];
    let d_in = first.weight.k;
    let d_out: usize = groups[0].iter().map(|layer| layer.weight.rows).sum();
    let rows = groups.len() * d_out;
    let mut codes = Vec::with_capacity(rows * d_in / 2);
    let mut block_scales = Vec::with_capacity(rows * d_in / BLOCK);
    let mut outer_scales = Vec::with_capacity(groups.len());
    let mut convention = None;
    for layers in groups {
        let differ = |index: usize, reason: String| PackError::Stack {
            first: first.module.clone(),
            other: layers[index].module.clone(),
            reason,
        };
        let rows: usize = layers.iter().map(|layer| layer.weight.rows).sum();
        for (index, layer) in layers.iter().enumerate() {
            if (rows, layer.weight.k) != (d_out, d_in) {
                let reason = format!("[{d_out}, {d_in}] and [{rows}, {}]", layer.weight.k);
                return Err(differ(index, reason));
            }
            if layer.weight.outer_scale != layers[0].weight.outer_scale {
                return Err(PackError::OuterScales {
                    first: layers[0].module.clone(),
                    other: layer.module.clone(),
                });
            }
            codes.extend_from_slice(layer.weight.codes);
            block_scales.extend_from_slice(layer.weight.block_scales);
        }
        let (this, scale) = match layers[0].weight.outer_scale {
            OuterScale::Multiply(scale) => (OuterScaleConvention::Multiply, scale),
            OuterScale::Divide(scale) => (OuterScaleConvention::Divide, scale),
        };
        if *convention.get_or_insert(this) != this {
            return Err(differ(0, "one outer scale divides, the other multiplies".into()));
        }
        outer_scales.push(scale);
    }
    let storage = Storage {
        format: WeightFormat::Nvfp4,
        activation: kernels_cubecl::Activation::Full,
        groups: groups.len(),
        d_in,
        d_out,
        codes: codes_tensor::<B>(codes, WeightFormat::Nvfp4, d_in, rows, device),
        block_scales: block_scales_tensor::<B>(block_scales, WeightFormat::Nvfp4, d_in, rows, device),
        outer_scales: floats_tensor::<B>(outer_scales, [groups.len()].into(), device, FloatDType::F32),
        convention: convention.unwrap_or_default(),
    };
    Ok(PackedWeight::new(storage, rank))
}
