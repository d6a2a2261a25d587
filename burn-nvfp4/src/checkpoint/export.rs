//! Packed weights of a model on their way to a checkpoint.
use kernels_cubecl::{BLOCK, Nvfp4View, OuterScale};
use std::ops::Range;

use crate::{Nvfp4Backend, OuterScaleConvention, PackedWeight, WeightFormat};

use super::layer::CheckpointLayer;

/// Codes and scales of a packed weight, on the host: what a rollout multiplies with, byte for byte.
#[derive(Clone, Debug)]
pub struct ExportedWeight {
    d_in: usize,
    d_out: usize,
    codes: Vec<u8>,
    block_scales: Vec<u8>,
    outer_scales: Vec<OuterScale>,
}

impl ExportedWeight {
    /// Copies a packed weight; `None` when its format is not NVFP4.
    pub fn new<B: Nvfp4Backend>(weight: &PackedWeight<B>) -> Option<Self> {
        let outer_scale = match weight.storage().convention {
            OuterScaleConvention::Multiply => OuterScale::Multiply,
            OuterScaleConvention::Divide => OuterScale::Divide,
        };
        (weight.format() == WeightFormat::Nvfp4).then(|| Self {
            d_in: weight.d_in(),
            d_out: weight.d_out(),
            codes: weight.codes(),
            block_scales: weight.block_scales(),
            outer_scales: weight.outer_scales().into_iter().map(outer_scale).collect(),
        })
    }

    /// Matrices in the stack, 1 for a single weight.
    pub fn groups(&self) -> usize {
        self.outer_scales.len()
    }

    /// Outputs of a matrix.
    pub fn d_out(&self) -> usize {
        self.d_out
    }

    /// Outputs `rows` of a matrix as a layer of its own. `input_scale` is there when activations are to be quantized too.
    ///
    /// # Panics
    /// When there is no such matrix or output.
    pub fn layer(
        &self,
        module: String,
        group: usize,
        rows: Range<usize>,
        input_scale: Option<OuterScale>,
    ) -> CheckpointLayer<'_> {
        assert!(rows.end <= self.d_out, "outputs {rows:?} of {}", self.d_out);
        let rows = group * self.d_out + rows.start..group * self.d_out + rows.end;
        let part = |row: usize| rows.start * row..rows.end * row;
        CheckpointLayer {
            module,
            weight: Nvfp4View {
                rows: rows.len(),
                k: self.d_in,
                codes: &self.codes[part(self.d_in / 2)],
                block_scales: &self.block_scales[part(self.d_in / BLOCK)],
                outer_scale: self.outer_scales[group],
            },
            input_scale,
        }
    }
}
