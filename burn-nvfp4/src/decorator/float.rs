//! Float operations. All but the eleven written out first read dense values.
use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData, TensorMetadata,
    ops::{FloatTensorOps, GridSampleOptions},
    tensor::{BoolTensor, Device, IndexingUpdateOp, IntTensor},
};

use crate::{Nvfp4, Nvfp4Backend, Nvfp4Tensor};

delegate! {
    impl FloatTensorOps {
        /// Dense values, whatever the tensor holds.
        async fn float_into_data(tensor: Nvfp4Tensor<B>) -> Result<TensorData, ExecutionError> {
            B::float_into_data(tensor.dense()).await
        }
        fn float_device(tensor: &Nvfp4Tensor<B>) -> Device<Self> {
            match tensor {
                Nvfp4Tensor::Dense(tensor) => B::float_device(tensor),
                Nvfp4Tensor::Packed(weight) => weight.device(),
            }
        }
        fn float_to_device(tensor: Nvfp4Tensor<B>, device: &Device<Self>) -> Nvfp4Tensor<B> {
            match tensor {
                Nvfp4Tensor::Dense(tensor) => Nvfp4Tensor::Dense(B::float_to_device(tensor, device)),
                Nvfp4Tensor::Packed(weight) => Nvfp4Tensor::Packed(weight.to_device(device)),
            }
        }
        /// Another type rounds the values, so only a cast to its own type leaves a weight packed.
        fn float_cast(tensor: Nvfp4Tensor<B>, dtype: FloatDType) -> Nvfp4Tensor<B> {
            match tensor {
                Nvfp4Tensor::Packed(weight) if weight.dtype() == dtype => Nvfp4Tensor::Packed(weight),
                tensor => Nvfp4Tensor::Dense(B::float_cast(tensor.dense(), dtype)),
            }
        }
        fn float_matmul(lhs: Nvfp4Tensor<B>, rhs: Nvfp4Tensor<B>) -> Nvfp4Tensor<B> {
            let lhs = match lhs {
                Nvfp4Tensor::Dense(lhs) => lhs,
                Nvfp4Tensor::Packed(weight) => B::unpack_weight(&weight.with_dtype(rhs.dtype().into())),
            };
            Nvfp4Tensor::Dense(match rhs {
                Nvfp4Tensor::Dense(rhs) => B::float_matmul(lhs, rhs),
                Nvfp4Tensor::Packed(weight) => weight.matmul(lhs),
            })
        }
        fn float_reshape(tensor: Nvfp4Tensor<B>, shape: Shape) -> Nvfp4Tensor<B> {
            match tensor {
                Nvfp4Tensor::Dense(tensor) => Nvfp4Tensor::Dense(B::float_reshape(tensor, shape)),
                Nvfp4Tensor::Packed(weight) => match weight.reshaped(&shape) {
                    Some(weight) => Nvfp4Tensor::Packed(weight),
                    None => Nvfp4Tensor::Dense(B::float_reshape(B::unpack_weight(&weight), shape)),
                },
            }
        }
        fn float_expand(tensor: Nvfp4Tensor<B>, shape: Shape) -> Nvfp4Tensor<B> {
            match tensor {
                Nvfp4Tensor::Dense(tensor) => Nvfp4Tensor::Dense(B::float_expand(tensor, shape)),
                Nvfp4Tensor::Packed(weight) => match weight.reshaped(&shape) {
                    Some(weight) => Nvfp4Tensor::Packed(weight),
                    None => Nvfp4Tensor::Dense(B::float_expand(B::unpack_weight(&weight), shape)),
                },
            }
        }
        fn float_swap_dims(tensor: Nvfp4Tensor<B>, dim1: usize, dim2: usize) -> Nvfp4Tensor<B> {
            match tensor {
                Nvfp4Tensor::Packed(weight) if weight.is_matrix_swap(dim1, dim2) => {
                    Nvfp4Tensor::Packed(weight.transposed())
                }
                tensor => Nvfp4Tensor::Dense(B::float_swap_dims(tensor.dense(), dim1, dim2)),
            }
        }
        fn float_transpose(tensor: Nvfp4Tensor<B>) -> Nvfp4Tensor<B> {
            match tensor {
                Nvfp4Tensor::Dense(tensor) => Nvfp4Tensor::Dense(B::float_transpose(tensor)),
                Nvfp4Tensor::Packed(weight) => Nvfp4Tensor::Packed(weight.transposed()),
            }
        }
        fn float_permute(tensor: Nvfp4Tensor<B>, axes: &[usize]) -> Nvfp4Tensor<B> {
            match tensor {
                Nvfp4Tensor::Dense(tensor) => Nvfp4Tensor::Dense(B::float_permute(tensor, axes)),
                Nvfp4Tensor::Packed(weight) => match weight.permuted(axes) {
                    Some(weight) => Nvfp4Tensor::Packed(weight),
                    None => Nvfp4Tensor::Dense(B::float_permute(B::unpack_weight(&weight), axes)),
                },
            }
        }
        fn float_detach(tensor: Nvfp4Tensor<B>) -> Nvfp4Tensor<B> {
            tensor.map_dense(B::float_detach)
        }
        /// A packed weight has no gradient.
        fn float_set_require_grad(tensor: Nvfp4Tensor<B>, require_grad: bool) -> Nvfp4Tensor<B> {
            tensor.map_dense(|tensor| B::float_set_require_grad(tensor, require_grad))
        }
        fn float_is_require_grad(tensor: &Nvfp4Tensor<B>) -> bool {
            match tensor {
                Nvfp4Tensor::Dense(tensor) => B::float_is_require_grad(tensor),
                Nvfp4Tensor::Packed(_) => false,
            }
        }
    }
    fn float_from_data(data: TensorData, device: &Device) -> Float;
    fn float_random(shape: Shape, distribution: Distribution, device: &Device, dtype: FloatDType) -> Float;
    fn float_zeros(shape: Shape, device: &Device, dtype: FloatDType) -> Float;
    fn float_ones(shape: Shape, device: &Device, dtype: FloatDType) -> Float;
    fn float_full(shape: Shape, fill_value: Scalar, device: &Device, dtype: FloatDType) -> Float;
    fn float_into_int(tensor: Float, out_dtype: IntDType) -> Int;
    fn float_empty(shape: Shape, device: &Device, dtype: FloatDType) -> Float;
    fn float_repeat_dim(tensor: Float, dim: usize, times: usize) -> Float;
    fn float_add(lhs: Float, rhs: Float) -> Float;
    fn float_add_scalar(lhs: Float, rhs: Scalar) -> Float;
    fn float_clamp_min(tensor: Float, min: Scalar) -> Float;
    fn float_clamp_max(tensor: Float, max: Scalar) -> Float;
    fn float_clamp(tensor: Float, min: Scalar, max: Scalar) -> Float;
    fn float_sub(lhs: Float, rhs: Float) -> Float;
    fn float_sub_scalar(lhs: Float, rhs: Scalar) -> Float;
    fn float_mul(lhs: Float, rhs: Float) -> Float;
    fn float_mul_scalar(lhs: Float, rhs: Scalar) -> Float;
    fn float_div(lhs: Float, rhs: Float) -> Float;
    fn float_div_scalar(lhs: Float, rhs: Scalar) -> Float;
    fn float_remainder(lhs: Float, rhs: Float) -> Float;
    fn float_remainder_scalar(lhs: Float, rhs: Scalar) -> Float;
    fn float_cross(lhs: Float, rhs: Float, dim: usize) -> Float;
    fn float_neg(tensor: Float) -> Float;
    fn float_recip(tensor: Float) -> Float;
    fn float_flip(tensor: Float, axes: &[usize]) -> Float;
    fn float_gather(dim: usize, tensor: Float, indices: Int) -> Float;
    fn float_scatter_add(dim: usize, tensor: Float, indices: Int, value: Float) -> Float;
    fn float_scatter_nd(data: Float, indices: Int, values: Float, reduction: IndexingUpdateOp) -> Float;
    fn float_gather_nd(data: Float, indices: Int) -> Float;
    fn float_select(tensor: Float, dim: usize, indices: Int) -> Float;
    fn float_select_add(tensor: Float, dim: usize, indices: Int, value: Float) -> Float;
    fn float_slice(tensor: Float, slices: &[Slice]) -> Float;
    fn float_slice_assign(tensor: Float, slices: &[Slice], value: Float) -> Float;
    fn float_mask_where(tensor: Float, mask: Bool, value: Float) -> Float;
    fn float_mask_fill(tensor: Float, mask: Bool, value: Scalar) -> Float;
    fn float_equal(lhs: Float, rhs: Float, out_dtype: BoolDType) -> Bool;
    fn float_not_equal(lhs: Float, rhs: Float, out_dtype: BoolDType) -> Bool;
    fn float_equal_elem(lhs: Float, rhs: Scalar, out_dtype: BoolDType) -> Bool;
    fn float_not_equal_elem(lhs: Float, rhs: Scalar, out_dtype: BoolDType) -> Bool;
    fn float_greater(lhs: Float, rhs: Float, out_dtype: BoolDType) -> Bool;
    fn float_greater_elem(lhs: Float, rhs: Scalar, out_dtype: BoolDType) -> Bool;
    fn float_greater_equal(lhs: Float, rhs: Float, out_dtype: BoolDType) -> Bool;
    fn float_greater_equal_elem(lhs: Float, rhs: Scalar, out_dtype: BoolDType) -> Bool;
    fn float_lower(lhs: Float, rhs: Float, out_dtype: BoolDType) -> Bool;
    fn float_lower_elem(lhs: Float, rhs: Scalar, out_dtype: BoolDType) -> Bool;
    fn float_lower_equal(lhs: Float, rhs: Float, out_dtype: BoolDType) -> Bool;
    fn float_lower_equal_elem(lhs: Float, rhs: Scalar, out_dtype: BoolDType) -> Bool;
    fn float_sum(tensor: Float) -> Float;
    fn float_sum_dim(tensor: Float, dim: usize) -> Float;
    fn float_prod(tensor: Float) -> Float;
    fn float_prod_dim(tensor: Float, dim: usize) -> Float;
    fn float_mean(tensor: Float) -> Float;
    fn float_mean_dim(tensor: Float, dim: usize) -> Float;
    fn float_cumsum(tensor: Float, dim: usize) -> Float;
    fn float_cumprod(tensor: Float, dim: usize) -> Float;
    fn float_cummin(tensor: Float, dim: usize) -> Float;
    fn float_cummax(tensor: Float, dim: usize) -> Float;
    fn float_exp(tensor: Float) -> Float;
    fn float_log(tensor: Float) -> Float;
    fn float_log1p(tensor: Float) -> Float;
    fn float_powf(lhs: Float, rhs: Float) -> Float;
    fn float_powi(lhs: Float, rhs: Int) -> Float;
    fn float_powi_scalar(lhs: Float, rhs: Scalar) -> Float;
    fn float_powi_scalar_impl(lhs: Float, rhs: Scalar) -> Float;
    fn float_powf_scalar(tensor: Float, value: Scalar) -> Float;
    fn float_powf_scalar_impl(tensor: Float, value: Scalar) -> Float;
    fn float_sqrt(tensor: Float) -> Float;
    fn float_abs(tensor: Float) -> Float;
    fn float_cos(tensor: Float) -> Float;
    fn float_sin(tensor: Float) -> Float;
    fn float_tan(tensor: Float) -> Float;
    fn float_cosh(tensor: Float) -> Float;
    fn float_sinh(tensor: Float) -> Float;
    fn float_tanh(tensor: Float) -> Float;
    fn float_acos(tensor: Float) -> Float;
    fn float_acosh(tensor: Float) -> Float;
    fn float_asin(tensor: Float) -> Float;
    fn float_asinh(tensor: Float) -> Float;
    fn float_atan(tensor: Float) -> Float;
    fn float_atanh(tensor: Float) -> Float;
    fn float_atan2(lhs: Float, rhs: Float) -> Float;
    fn float_round(tensor: Float) -> Float;
    fn float_floor(tensor: Float) -> Float;
    fn float_ceil(tensor: Float) -> Float;
    fn float_trunc(tensor: Float) -> Float;
    fn float_erf(tensor: Float) -> Float;
    fn float_cat(tensors: Vec<Float>, dim: usize) -> Float;
    fn float_argmax(tensor: Float, dim: usize, out_dtype: IntDType) -> Int;
    fn float_argtopk(tensor: Float, dim: usize, k: usize, out_dtype: IntDType) -> Int;
    fn float_topk(tensor: Float, dim: usize, k: usize) -> Float;
    fn float_argmin(tensor: Float, dim: usize, out_dtype: IntDType) -> Int;
    fn float_max(tensor: Float) -> Float;
    fn float_max_dim(tensor: Float, dim: usize) -> Float;
    fn float_max_dim_with_indices(tensor: Float, dim: usize, indices_dtype: IntDType) -> (Float, Int);
    fn float_min(tensor: Float) -> Float;
    fn float_min_dim(tensor: Float, dim: usize) -> Float;
    fn float_min_dim_with_indices(tensor: Float, dim: usize, indices_dtype: IntDType) -> (Float, Int);
    fn float_max_abs(tensor: Float) -> Float;
    fn float_max_abs_dim(tensor: Float, dim: usize) -> Float;
    fn float_any(tensor: Float, out_dtype: BoolDType) -> Bool;
    fn float_any_dim(tensor: Float, dim: usize, out_dtype: BoolDType) -> Bool;
    fn float_all(tensor: Float, out_dtype: BoolDType) -> Bool;
    fn float_all_dim(tensor: Float, dim: usize, out_dtype: BoolDType) -> Bool;
    fn float_sign(tensor: Float) -> Float;
    fn float_sort(tensor: Float, dim: usize, descending: bool) -> Float;
    fn float_sort_with_indices(tensor: Float, dim: usize, descending: bool, indices_dtype: IntDType) -> (Float, Int);
    fn float_argsort(tensor: Float, dim: usize, descending: bool, out_dtype: IntDType) -> Int;
    fn float_grid_sample_2d(tensor: Float, grid: Float, options: GridSampleOptions) -> Float;
    fn float_unfold(tensor: Float, dim: usize, size: usize, step: usize) -> Float;
    fn float_is_nan(tensor: Float, out_dtype: BoolDType) -> Bool;
    fn float_is_inf(tensor: Float, out_dtype: BoolDType) -> Bool;
}
