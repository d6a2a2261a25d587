//! Which values the straight-through gradient of a quantized product goes through.
use burn::tensor::{Tensor, TensorPrimitive};
use burn_nvfp4::Precision;

use crate::backend::QuadsBackend;

/// What a layer whose weight is dense multiplies with on the way back. The forward pass is the same, bit for bit: `ŷ = x̂ · ŵ`
/// with the quantized values that the precision has. In `high`, and where weights are packed, there is no difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backward {
    /// The values of the forward pass: `dx = g · ŵᵀ`, `dw = x̂ᵀ · g`.
    #[default]
    Quantized,
    /// The values before they were quantized: `dx = g · wᵀ`, `dw = xᵀ · g`, as if the product had been computed in full
    /// precision. Costs one more product in training.
    Unquantized,
}

impl Backward {
    /// What matters in a precision: where nothing is quantized there is one gradient.
    pub(super) fn within(self, precision: &Precision) -> Self {
        match precision {
            Precision::High => Self::Quantized,
            _ => self,
        }
    }

    /// Quantized values for the forward pass: no part of the graph where the gradient goes elsewhere.
    pub(super) fn values<B: QuadsBackend, const D: usize>(self, quantized: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::Quantized => quantized,
            Self::Unquantized => quantized.detach(),
        }
    }

    /// `value`, a quantized product, with its own gradient or that of the product of unquantized values.
    pub(super) fn of<B: QuadsBackend, const D: usize>(
        self,
        value: Tensor<B, D>,
        unquantized: impl FnOnce() -> Tensor<B, D>,
    ) -> Tensor<B, D> {
        match self {
            Self::Quantized => value,
            Self::Unquantized => {
                let primitive = |tensor: Tensor<B, D>| tensor.into_primitive().tensor();
                let tensor = B::with_gradient_of(primitive(value.detach()), || primitive(unquantized()));
                Tensor::from_primitive(TensorPrimitive::Float(tensor))
            }
        }
    }
}
