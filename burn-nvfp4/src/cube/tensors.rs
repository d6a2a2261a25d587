//! Burn's tensors as the kernels' matrices, and back.
use burn_backend::{DType, DeviceOps, FloatDType, IntDType, Shape, TensorMetadata, ops::IntTensorOps};
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl::{prelude::ComputeClient, server::Handle};
use kernels_cubecl::{
    BLOCK, device,
    device::{Element, Matrix, Packer},
};
use std::{
    any::TypeId,
    collections::HashMap,
    sync::{LazyLock, Mutex},
};

use crate::{Nvfp4Backend, OuterScaleConvention, PackedWeight, Storage, WeightFormat};

/// A float tensor in another type, if it has not that type already.
pub(super) fn cast<B: Nvfp4Backend>(x: B::FloatTensorPrimitive, dtype: FloatDType) -> B::FloatTensorPrimitive {
    match x.dtype() == dtype.into() {
        true => x,
        false => B::float_cast(x, dtype),
    }
}

/// As f32 in row-major order without gaps.
pub(super) fn dense_f32<R, F, I, BT>(x: CubeTensor<R>) -> CubeTensor<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    into_contiguous(cast::<CubeBackend<R, F, I, BT>>(x, FloatDType::F32))
}

/// The element type of the kernels, where they have it.
pub(super) fn element(dtype: DType) -> Option<Element> {
    match dtype {
        DType::F32 => Some(Element::F32),
        DType::F16 => Some(Element::F16),
        DType::BF16 => Some(Element::BF16),
        _ => None,
    }
}

/// `x [.., k]` as rows; a type that the kernels do not have becomes f32.
pub(super) fn rows<R, F, I, BT>(x: CubeTensor<R>) -> Matrix
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let shape = x.shape();
    let (tokens, k) = crate::reference::rows(&shape);
    let x = match element(x.dtype) {
        Some(_) => x,
        None => cast::<CubeBackend<R, F, I, BT>>(x, FloatDType::F32),
    };
    let x = match shape.num_dims() {
        2 => x,
        _ => <CubeBackend<R, F, I, BT> as burn_backend::ops::FloatTensorOps<_>>::float_reshape(
            x,
            Shape::from([tokens, k]),
        ),
    };
    matrix(&x)
}

/// A tensor of rank 2 of a type that the kernels have.
pub(super) fn matrix<R: CubeRuntime>(x: &CubeTensor<R>) -> Matrix {
    let strides = x.meta.strides();
    Matrix {
        handle: x.handle.clone(),
        element: element(x.dtype).expect("a type that the kernels have"),
        rows: x.meta.shape()[0],
        columns: x.meta.shape()[1],
        strides: [strides[0], strides[1]],
    }
}

/// The counts of a grouped product, `[groups]` words. Counts are not negative: I32 and U32 have the same bits.
pub(super) fn counts<R, F, I, BT>(counts: CubeTensor<R>) -> Handle
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let counts = match counts.dtype {
        DType::I32 | DType::U32 => counts,
        _ => CubeBackend::<R, F, I, BT>::int_cast(counts, IntDType::I32),
    };
    into_contiguous(counts).handle
}

/// A tensor from a buffer of the same device as `like`.
pub(super) fn tensor<R: CubeRuntime>(
    like: &CubeTensor<R>,
    handle: Handle,
    shape: Shape,
    dtype: DType,
) -> CubeTensor<R> {
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, dtype)
}

/// A weight that the kernels packed, in a view of `rank` dimensions.
pub(super) fn from_device<R, F, I, BT>(
    like: &CubeTensor<R>,
    packed: device::PackedWeight,
    rank: usize,
) -> PackedWeight<CubeBackend<R, F, I, BT>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let rows = packed.experts * packed.rows;
    let kp = packed.padded_k();
    let storage = Storage {
        format: WeightFormat::Nvfp4,
        activation: kernels_cubecl::Activation::Full,
        groups: packed.experts,
        d_in: packed.k,
        d_out: packed.rows,
        codes: tensor(like, packed.codes, Shape::from([rows, kp / 2]), DType::U8),
        block_scales: tensor(like, packed.block_scales, Shape::from([rows, kp / BLOCK]), DType::U8),
        outer_scales: tensor(like, packed.outer_scales, Shape::from([packed.experts]), DType::F32),
        convention: OuterScaleConvention::Multiply,
    };
    PackedWeight::new(storage, rank)
}

/// The buffers of an NVFP4 weight. Its outer scales are as they are stored.
pub(super) fn to_device<R, F, I, BT>(weight: &PackedWeight<CubeBackend<R, F, I, BT>>) -> device::PackedWeight
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let storage = weight.storage();
    device::PackedWeight {
        codes: into_contiguous(storage.codes.clone()).handle,
        block_scales: into_contiguous(storage.block_scales.clone()).handle,
        outer_scales: into_contiguous(storage.outer_scales.clone()).handle,
        experts: storage.groups,
        rows: storage.d_out,
        k: storage.d_in,
    }
}

/// Where a device's weights are packed. Found out once a device: that waits for it.
pub(super) fn packer<R: CubeRuntime>(client: &ComputeClient<R>, device: &R::Device) -> Packer {
    static KNOWN: LazyLock<Mutex<HashMap<(TypeId, String), Packer>>> = LazyLock::new(Mutex::default);
    let key = (TypeId::of::<R>(), format!("{:?}", DeviceOps::id(device)));
    let mut known = KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *known
        .entry(key)
        .or_insert_with(|| Packer::new(client).expect("the device can be read"))
}
