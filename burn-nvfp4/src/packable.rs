//! Backends whose models `PackLinears` can pack, and packed parameters there.
use burn::{
    backend::{Autodiff, autodiff::checkpoint::strategy::CheckpointStrategy},
    tensor::{Tensor, backend::Backend},
};

use crate::{
    Nvfp4, Nvfp4Backend,
    pack::{lazy_float, packed_weight, quantized},
};

/// Backends whose models can be packed: `Nvfp4<B>`, and `Autodiff` around it.
pub trait PackableBackend: Backend {
    /// The backend below `Nvfp4`.
    type Inner: Nvfp4Backend;
    /// The tensor without its graph.
    fn to_nvfp4<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Nvfp4<Self::Inner>, D>;
    /// A constant.
    fn from_nvfp4<const D: usize>(tensor: Tensor<Nvfp4<Self::Inner>, D>) -> Tensor<Self, D>;
}

impl<B: Nvfp4Backend> PackableBackend for Nvfp4<B> {
    type Inner = B;
    fn to_nvfp4<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }
    fn from_nvfp4<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }
}

impl<B: Nvfp4Backend, C: CheckpointStrategy> PackableBackend for Autodiff<Nvfp4<B>, C> {
    type Inner = B;
    fn to_nvfp4<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Nvfp4<B>, D> {
        tensor.inner()
    }
    fn from_nvfp4<const D: usize>(tensor: Tensor<Nvfp4<B>, D>) -> Tensor<Self, D> {
        Tensor::from_inner(tensor)
    }
}

/// A packed weight as the quantized tensor that a record keeps packed.
pub(crate) fn for_record<B: PackableBackend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    let tensor = B::to_nvfp4(tensor);
    B::from_nvfp4(match packed_weight(&tensor) {
        Some(weight) => quantized(weight),
        None => tensor,
    })
}

/// A packed weight as the float tensor that every operation takes.
pub(crate) fn for_use<B: PackableBackend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    let inner = B::to_nvfp4(tensor.clone());
    match packed_weight(&inner) {
        Some(weight) => B::from_nvfp4(lazy_float(weight)),
        None => tensor,
    }
}
