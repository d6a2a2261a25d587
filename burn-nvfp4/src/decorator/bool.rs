//! Boolean operations, all B's own.
use burn_backend::{
    BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    ops::BoolTensorOps,
    tensor::{BoolTensor, Device, IntTensor},
};

use crate::{Nvfp4, Nvfp4Backend, Nvfp4Tensor};

delegate! {
    impl BoolTensorOps {
        async fn bool_into_data(tensor: BoolTensor<B>) -> Result<TensorData, ExecutionError> {
            B::bool_into_data(tensor).await
        }
        fn bool_argwhere(
            tensor: BoolTensor<B>,
            out_dtype: IntDType,
        ) -> impl Future<Output = IntTensor<B>> + 'static + Send {
            B::bool_argwhere(tensor, out_dtype)
        }
    }
    fn bool_empty(shape: Shape, device: &Device, dtype: BoolDType) -> Bool;
    fn bool_zeros(shape: Shape, device: &Device, dtype: BoolDType) -> Bool;
    fn bool_ones(shape: Shape, device: &Device, dtype: BoolDType) -> Bool;
    fn bool_from_data(data: TensorData, device: &Device) -> Bool;
    fn bool_into_int(tensor: Bool, out_dtype: IntDType) -> Int;
    fn bool_into_float(tensor: Bool, out_dtype: FloatDType) -> Float;
    fn bool_device(tensor: &Bool) -> Device;
    fn bool_to_device(tensor: Bool, device: &Device) -> Bool;
    fn bool_reshape(tensor: Bool, shape: Shape) -> Bool;
    fn bool_slice(tensor: Bool, slices: &[Slice]) -> Bool;
    fn bool_slice_assign(tensor: Bool, slices: &[Slice], value: Bool) -> Bool;
    fn bool_mask_where(tensor: Bool, mask: Bool, value: Bool) -> Bool;
    fn bool_mask_fill(tensor: Bool, mask: Bool, value: Scalar) -> Bool;
    fn bool_gather(dim: usize, tensor: Bool, indices: Int) -> Bool;
    fn bool_scatter_or(dim: usize, tensor: Bool, indices: Int, value: Bool) -> Bool;
    fn bool_select(tensor: Bool, dim: usize, indices: Int) -> Bool;
    fn bool_select_or(tensor: Bool, dim: usize, indices: Int, value: Bool) -> Bool;
    fn bool_repeat_dim(tensor: Bool, dim: usize, times: usize) -> Bool;
    fn bool_cat(tensors: Vec<Bool>, dim: usize) -> Bool;
    fn bool_equal(lhs: Bool, rhs: Bool) -> Bool;
    fn bool_not_equal(lhs: Bool, rhs: Bool) -> Bool;
    fn bool_equal_elem(lhs: Bool, rhs: Scalar) -> Bool;
    fn bool_not_equal_elem(lhs: Bool, rhs: Scalar) -> Bool;
    fn bool_not(tensor: Bool) -> Bool;
    fn bool_and(lhs: Bool, rhs: Bool) -> Bool;
    fn bool_or(lhs: Bool, rhs: Bool) -> Bool;
    fn bool_xor(lhs: Bool, rhs: Bool) -> Bool;
    fn bool_transpose(tensor: Bool) -> Bool;
    fn bool_swap_dims(tensor: Bool, dim1: usize, dim2: usize) -> Bool;
    fn bool_permute(tensor: Bool, axes: &[usize]) -> Bool;
    fn bool_flip(tensor: Bool, axes: &[usize]) -> Bool;
    fn bool_any(tensor: Bool) -> Bool;
    fn bool_any_dim(tensor: Bool, dim: usize) -> Bool;
    fn bool_all(tensor: Bool) -> Bool;
    fn bool_all_dim(tensor: Bool, dim: usize) -> Bool;
    fn bool_expand(tensor: Bool, shape: Shape) -> Bool;
    fn bool_unfold(tensor: Bool, dim: usize, size: usize, step: usize) -> Bool;
}
