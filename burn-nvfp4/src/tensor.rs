//! The float tensor of `Nvfp4<B>`: dense, or a packed weight that is decoded when an operation asks for values.
use burn_backend::{Backend, DType, Shape, TensorMetadata, tensor::FloatTensor};

use crate::{Nvfp4Backend, PackedWeight};

/// A float tensor.
#[derive(Clone, Debug)]
pub enum Nvfp4Tensor<B: Backend> {
    /// A tensor of B.
    Dense(FloatTensor<B>),
    /// A packed weight; products with activations use it as it is, all else decodes it.
    Packed(PackedWeight<B>),
}

impl<B: Nvfp4Backend> Nvfp4Tensor<B> {
    /// The values, as a tensor of B.
    pub fn dense(self) -> FloatTensor<B> {
        match self {
            Self::Dense(tensor) => tensor,
            Self::Packed(weight) => B::unpack_weight(&weight),
        }
    }
    /// Applies `f` to a dense tensor, and leaves a packed weight alone.
    pub(crate) fn map_dense(self, f: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(f(tensor)),
            packed => packed,
        }
    }
}

impl<B: Nvfp4Backend> TensorMetadata for Nvfp4Tensor<B> {
    fn dtype(&self) -> DType {
        match self {
            Self::Dense(tensor) => tensor.dtype(),
            Self::Packed(weight) => weight.dtype().into(),
        }
    }
    fn shape(&self) -> Shape {
        match self {
            Self::Dense(tensor) => tensor.shape(),
            Self::Packed(weight) => weight.shape(),
        }
    }
    fn rank(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.rank(),
            Self::Packed(weight) => weight.rank(),
        }
    }
}
