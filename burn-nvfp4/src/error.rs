//! Why a weight or a model could not be packed.
use burn_backend::Shape;

use crate::WeightFormat;

/// Why a weight, or a model, was not packed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PackError {
    /// The error of one layer of a model.
    #[error("layer `{path}`: {source}")]
    Layer {
        /// Path of the layer in the model.
        path: String,
        /// What is wrong with it.
        source: Box<PackError>,
    },
    /// The tensor is neither a weight nor a stack of weights.
    #[error("expected a weight [d_in, d_out] or [groups, d_in, d_out], got shape {shape}")]
    Rank {
        /// Shape of the tensor.
        shape: Shape,
    },
    /// Blocks of 16 do not cover `d_in`.
    #[error("d_in = {d_in} is not a multiple of 16, the NVFP4 block")]
    UnalignedInput {
        /// Length of the contraction axis.
        d_in: usize,
    },
    /// A weight holds NaN or an infinity.
    #[error("non-finite value {value} at [{group}, {row}, {column}] ([group, d_in, d_out]) of the weight")]
    NonFinite {
        /// Group, 0 for a single weight.
        group: usize,
        /// Index along `d_in`.
        row: usize,
        /// Index along `d_out`.
        column: usize,
        /// The value.
        value: f32,
    },
    /// The amax tensor does not have one value a group.
    #[error("expected {expected} amax value(s), one a group, got {actual}")]
    AmaxLength {
        /// Groups of the weight.
        expected: usize,
        /// Values given.
        actual: usize,
    },
    /// Calibrated compensation needs a mask.
    #[error("calibrated residual compensation needs a residual mask, and none was given")]
    MissingMask,
    /// The mask belongs to another layer.
    #[error("expected a residual mask over d_in = {expected} channels, got {actual}")]
    MaskLength {
        /// `d_in` of the weight.
        expected: usize,
        /// Channels of the mask.
        actual: usize,
    },
    /// A share outside (0, 1].
    #[error("expected a compensated fraction in (0, 1], got {fraction}")]
    Fraction {
        /// The value.
        fraction: f32,
    },
    /// Packed weights cannot go to another format: their high-precision values are gone.
    #[error("the weight is already packed as {actual} and cannot become {expected}; pack the dense model instead")]
    AlreadyPacked {
        /// Format asked for.
        expected: WeightFormat,
        /// Format of the weight.
        actual: WeightFormat,
    },
    /// `Precision::High` asks for no packing.
    #[error("precision `high` keeps weights dense: there is nothing to pack")]
    NothingToPack,
    /// A path given to `PackLinears` names no linear layer of the model.
    #[error("PackLinears::{option}: the model has no linear layer `{path}`{}", near_list(.near))]
    UnknownPath {
        /// The method that took the path.
        option: &'static str,
        /// The path.
        path: String,
        /// Layers with a similar path.
        near: Vec<String>,
    },
    /// A layer is in two sharing groups, or in a group and left dense.
    #[error("PackLinears::share: {reason}")]
    Sharing {
        /// What is wrong.
        reason: String,
    },
    /// Layers that should lie in one stack do not fit each other.
    #[error("`{other}` does not fit `{first}`: {reason}")]
    Stack {
        /// The first layer of the stack.
        first: String,
        /// The layer that does not fit.
        other: String,
        /// What differs.
        reason: String,
    },
    /// Layers that should be one weight have different outer scales.
    #[error(
        "`{first}` and `{other}` have different outer scales, and one weight has one; quantize the original model again, \
         with a tool that lets them share"
    )]
    OuterScales {
        /// A layer.
        first: String,
        /// The layer beside it.
        other: String,
    },
    /// The format layer below refused the values.
    #[error(transparent)]
    Kernel(#[from] kernels_cubecl::Error),
}

impl PackError {
    pub(crate) fn in_layer(self, path: &str) -> Self {
        Self::Layer {
            path: path.to_string(),
            source: Box::new(self),
        }
    }
}

fn near_list(near: &[String]) -> String {
    if near.is_empty() {
        return String::new();
    }
    let names: Vec<_> = near.iter().map(|path| format!("`{path}`")).collect();
    format!("; did you mean {}?", names.join(", "))
}
