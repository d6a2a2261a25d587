//! Quantized tensors: B's own schemes, and packed weights under the tag that records keep.
//!
//! Burn saves a tensor by its kind: a quantized one keeps its bytes, a float one becomes floats. So a packed weight
//! that comes from a record, or from [`pack`](crate::pack), is a quantized tensor, [`Nvfp4QTensor::Lazy`]; to
//! dequantize it costs nothing and gives the lazy float tensor. Every other scheme is B's business.
use burn_backend::{
    Backend, BoolDType, DType, ExecutionError, FloatDType, IntDType, QTensorPrimitive, Scalar, Shape, Slice,
    TensorData, TensorMetadata, TensorPrimitive, get_device_settings,
    ops::{FloatTensorOps, QTensorOps},
    quantization::{QuantScheme, QuantizationParametersPrimitive},
    tensor::{BoolTensor, Device, IntTensor, QuantizedTensor},
};

use crate::{Nvfp4, Nvfp4Backend, Nvfp4Tensor, WeightFormat, record};

/// A quantized tensor of `Nvfp4<B>`.
#[derive(Clone, Debug)]
pub enum Nvfp4QTensor<B: Backend> {
    /// A tensor in one of B's own schemes.
    Inner(QuantizedTensor<B>),
    /// A packed weight, or what an operation made of one (then dense, and no longer quantized).
    Lazy {
        /// The values.
        tensor: Nvfp4Tensor<B>,
        /// The scheme that Burn's API shows.
        scheme: QuantScheme,
    },
}

impl<B: Nvfp4Backend> Nvfp4QTensor<B> {
    /// A lazily dequantized float tensor.
    fn into_float(self) -> Nvfp4Tensor<B> {
        match self {
            Self::Inner(tensor) => {
                let dtype = get_device_settings::<B>(&B::q_device(&tensor)).float_dtype;
                Nvfp4Tensor::Dense(B::dequantize(tensor, dtype))
            }
            Self::Lazy { tensor, .. } => tensor,
        }
    }
}

impl<B: Nvfp4Backend> TensorMetadata for Nvfp4QTensor<B> {
    fn dtype(&self) -> DType {
        match self {
            Self::Inner(tensor) => tensor.dtype(),
            Self::Lazy {
                tensor: Nvfp4Tensor::Packed(_),
                scheme,
            } => DType::QFloat(*scheme),
            Self::Lazy {
                tensor: Nvfp4Tensor::Dense(tensor),
                ..
            } => tensor.dtype(),
        }
    }
    fn shape(&self) -> Shape {
        match self {
            Self::Inner(tensor) => tensor.shape(),
            Self::Lazy { tensor, .. } => tensor.shape(),
        }
    }
    fn rank(&self) -> usize {
        match self {
            Self::Inner(tensor) => tensor.rank(),
            Self::Lazy { tensor, .. } => tensor.rank(),
        }
    }
}

impl<B: Nvfp4Backend> QTensorPrimitive for Nvfp4QTensor<B> {
    fn scheme(&self) -> &QuantScheme {
        match self {
            Self::Inner(tensor) => tensor.scheme(),
            Self::Lazy { scheme, .. } => scheme,
        }
    }
    fn default_scheme() -> QuantScheme {
        QuantizedTensor::<B>::default_scheme()
    }
}

fn primitive<B: Nvfp4Backend>(tensor: TensorPrimitive<B>) -> TensorPrimitive<Nvfp4<B>> {
    match tensor {
        TensorPrimitive::Float(tensor) => TensorPrimitive::Float(Nvfp4Tensor::Dense(tensor)),
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(Nvfp4QTensor::Inner(tensor)),
    }
}

/// The operand as B sees it, or back if it holds a packed weight.
fn inner_operand<B: Nvfp4Backend>(
    tensor: TensorPrimitive<Nvfp4<B>>,
) -> Result<TensorPrimitive<B>, TensorPrimitive<Nvfp4<B>>> {
    match tensor {
        TensorPrimitive::Float(Nvfp4Tensor::Dense(tensor)) => Ok(TensorPrimitive::Float(tensor)),
        TensorPrimitive::QFloat(Nvfp4QTensor::Inner(tensor)) => Ok(TensorPrimitive::QFloat(tensor)),
        tensor => Err(tensor),
    }
}

/// One operation on B's quantized tensors, and its float counterpart for the lazy ones: `fn q_op / float_op (..)`.
macro_rules! q_ops {
    ($( fn $q:ident / $f:ident ( $($a:ident : $t:ty),* ) -> $ret:ident ; )*) => { $(
        fn $q(tensor: Nvfp4QTensor<B> $(, $a: $t)*) -> q_ops!(@ty $ret) {
            match tensor {
                Nvfp4QTensor::Inner(tensor) => q_ops!(@inner $ret (B::$q(tensor $(, $a)*))),
                Nvfp4QTensor::Lazy { tensor, scheme } => q_ops!(@lazy $ret scheme (Self::$f(tensor $(, $a)*))),
            }
        }
    )* };
    (@ty Quantized) => { Nvfp4QTensor<B> };
    (@ty Any) => { TensorPrimitive<Self> };
    (@ty Int) => { IntTensor<B> };
    (@ty Bool) => { BoolTensor<B> };
    (@ty QuantizedAndInt) => { (Nvfp4QTensor<B>, IntTensor<B>) };
    (@inner Quantized $e:tt) => { Nvfp4QTensor::Inner($e) };
    (@inner Any $e:tt) => { primitive::<B>($e) };
    (@inner QuantizedAndInt $e:tt) => {{ let (tensor, indices) = $e; (Nvfp4QTensor::Inner(tensor), indices) }};
    (@inner $other:ident $e:tt) => { $e };
    (@lazy Quantized $s:ident $e:tt) => { Nvfp4QTensor::Lazy { tensor: $e, scheme: $s } };
    (@lazy Any $s:ident $e:tt) => {{ let _ = $s; TensorPrimitive::Float($e) }};
    (@lazy QuantizedAndInt $s:ident $e:tt) => {{
        let (tensor, indices) = $e;
        (Nvfp4QTensor::Lazy { tensor, scheme: $s }, indices)
    }};
    (@lazy $other:ident $s:ident $e:tt) => {{ let _ = $s; $e }};
}

macro_rules! q_binary_ops {
    ($( fn $q:ident / $f:ident ; )*) => { $(
        fn $q(lhs: Nvfp4QTensor<B>, rhs: Nvfp4QTensor<B>) -> TensorPrimitive<Self> {
            match (lhs, rhs) {
                (Nvfp4QTensor::Inner(lhs), Nvfp4QTensor::Inner(rhs)) => primitive::<B>(B::$q(lhs, rhs)),
                (lhs, rhs) => TensorPrimitive::Float(Self::$f(lhs.into_float(), rhs.into_float())),
            }
        }
    )* };
}

impl<B: Nvfp4Backend> QTensorOps<Self> for Nvfp4<B> {
    /// # Panics
    ///
    /// When the data of a packed weight is damaged: the message says what was expected.
    fn q_from_data(data: TensorData, device: &Device<Self>) -> Nvfp4QTensor<B> {
        match data.dtype {
            DType::QFloat(scheme) if WeightFormat::from_scheme(&scheme).is_some() => {
                let weight = record::from_data::<B>(&data, device)
                    .unwrap_or_else(|error| panic!("cannot load a packed weight of shape {}: {error}", data.shape));
                Nvfp4QTensor::Lazy {
                    tensor: Nvfp4Tensor::Packed(weight),
                    scheme,
                }
            }
            _ => Nvfp4QTensor::Inner(B::q_from_data(data, device)),
        }
    }
    /// NVFP4 and FP8 weights compute their own scales.
    fn quantize(
        tensor: Nvfp4Tensor<B>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> Nvfp4QTensor<B> {
        if WeightFormat::from_scheme(scheme).is_some() {
            return Self::quantize_dynamic(tensor, scheme);
        }
        let qparams = QuantizationParametersPrimitive {
            scales: qparams.scales.dense(),
        };
        Nvfp4QTensor::Inner(B::quantize(tensor.dense(), scheme, qparams))
    }
    /// With the scheme of a [`WeightFormat`], packs a weight whose activations stay in full precision (`w4a16`);
    /// [`PackLinears`](crate::PackLinears) sets the activations too.
    ///
    /// # Panics
    ///
    /// When the tensor cannot be packed, see [`PackError`](crate::PackError).
    fn quantize_dynamic(tensor: Nvfp4Tensor<B>, scheme: &QuantScheme) -> Nvfp4QTensor<B> {
        let Some(format) = WeightFormat::from_scheme(scheme) else {
            return Nvfp4QTensor::Inner(B::quantize_dynamic(tensor.dense(), scheme));
        };
        let weight = match tensor {
            Nvfp4Tensor::Packed(weight) if weight.format() == format => weight,
            tensor => {
                let shape = tensor.shape();
                B::pack_weight(tensor.dense(), format, None)
                    .unwrap_or_else(|error| panic!("cannot pack a tensor of shape {shape}: {error}"))
            }
        };
        Nvfp4QTensor::Lazy {
            tensor: Nvfp4Tensor::Packed(weight),
            scheme: *scheme,
        }
    }
    /// Costs nothing for a packed weight: its values are computed only if an operation other than a product with
    /// activations reads them.
    fn dequantize(tensor: Nvfp4QTensor<B>, dtype: FloatDType) -> Nvfp4Tensor<B> {
        match tensor {
            Nvfp4QTensor::Inner(tensor) => Nvfp4Tensor::Dense(B::dequantize(tensor, dtype)),
            Nvfp4QTensor::Lazy {
                tensor: Nvfp4Tensor::Packed(weight),
                ..
            } => Nvfp4Tensor::Packed(weight.with_dtype(dtype)),
            Nvfp4QTensor::Lazy { tensor, .. } if tensor.dtype() == dtype.into() => tensor,
            Nvfp4QTensor::Lazy { tensor, .. } => Self::float_cast(tensor, dtype),
        }
    }
    fn q_device(tensor: &Nvfp4QTensor<B>) -> Device<Self> {
        match tensor {
            Nvfp4QTensor::Inner(tensor) => B::q_device(tensor),
            Nvfp4QTensor::Lazy { tensor, .. } => Self::float_device(tensor),
        }
    }
    async fn q_into_data(tensor: Nvfp4QTensor<B>) -> Result<TensorData, ExecutionError> {
        match tensor {
            Nvfp4QTensor::Inner(tensor) => B::q_into_data(tensor).await,
            Nvfp4QTensor::Lazy {
                tensor: Nvfp4Tensor::Packed(weight),
                ..
            } => record::into_data(weight).await,
            Nvfp4QTensor::Lazy {
                tensor: Nvfp4Tensor::Dense(tensor),
                ..
            } => B::float_into_data(tensor).await,
        }
    }
    fn q_is_require_grad(tensor: &Nvfp4QTensor<B>) -> bool {
        match tensor {
            Nvfp4QTensor::Inner(tensor) => B::q_is_require_grad(tensor),
            Nvfp4QTensor::Lazy { tensor, .. } => Self::float_is_require_grad(tensor),
        }
    }
    fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self> {
        match (inner_operand(lhs), inner_operand(rhs)) {
            (Ok(lhs), Ok(rhs)) => primitive::<B>(B::q_matmul(lhs, rhs)),
            (lhs, rhs) => {
                let lhs = lhs.map_or_else(|lazy| lazy, primitive::<B>).tensor();
                let rhs = rhs.map_or_else(|lazy| lazy, primitive::<B>).tensor();
                TensorPrimitive::Float(Self::float_matmul(lhs, rhs))
            }
        }
    }
    fn q_gather(dim: usize, tensor: Nvfp4QTensor<B>, indices: IntTensor<B>) -> Nvfp4QTensor<B> {
        match tensor {
            Nvfp4QTensor::Inner(tensor) => Nvfp4QTensor::Inner(B::q_gather(dim, tensor, indices)),
            Nvfp4QTensor::Lazy { tensor, scheme } => Nvfp4QTensor::Lazy {
                tensor: Self::float_gather(dim, tensor, indices),
                scheme,
            },
        }
    }
    fn q_cat(tensors: Vec<Nvfp4QTensor<B>>, dim: usize) -> Nvfp4QTensor<B> {
        let lazy = tensors
            .iter()
            .find(|tensor| matches!(tensor, Nvfp4QTensor::Lazy { .. }));
        match lazy.map(|tensor| *tensor.scheme()) {
            Some(scheme) => {
                let tensors = tensors.into_iter().map(Nvfp4QTensor::into_float).collect();
                Nvfp4QTensor::Lazy {
                    tensor: Self::float_cat(tensors, dim),
                    scheme,
                }
            }
            None => Nvfp4QTensor::Inner(B::q_cat(
                tensors
                    .into_iter()
                    .filter_map(|tensor| match tensor {
                        Nvfp4QTensor::Inner(tensor) => Some(tensor),
                        Nvfp4QTensor::Lazy { .. } => None,
                    })
                    .collect(),
                dim,
            )),
        }
    }
    q_binary_ops! {
        fn q_add / float_add;
        fn q_sub / float_sub;
        fn q_mul / float_mul;
        fn q_div / float_div;
        fn q_powf / float_powf;
    }
    q_ops! {
        fn q_to_device / float_to_device(device: &Device<Self>) -> Quantized;
        fn q_detach / float_detach() -> Quantized;
        fn q_set_require_grad / float_set_require_grad(require_grad: bool) -> Quantized;
        fn q_reshape / float_reshape(shape: Shape) -> Quantized;
        fn q_expand / float_expand(shape: Shape) -> Quantized;
        fn q_transpose / float_transpose() -> Quantized;
        fn q_swap_dims / float_swap_dims(dim1: usize, dim2: usize) -> Quantized;
        fn q_permute / float_permute(axes: &[usize]) -> Quantized;
        fn q_flip / float_flip(axes: &[usize]) -> Quantized;
        fn q_select / float_select(dim: usize, indices: IntTensor<B>) -> Quantized;
        fn q_slice / float_slice(slices: &[Slice]) -> Quantized;
        fn q_repeat_dim / float_repeat_dim(dim: usize, times: usize) -> Quantized;
        fn q_add_scalar / float_add_scalar(rhs: Scalar) -> Any;
        fn q_sub_scalar / float_sub_scalar(rhs: Scalar) -> Any;
        fn q_mul_scalar / float_mul_scalar(rhs: Scalar) -> Any;
        fn q_div_scalar / float_div_scalar(rhs: Scalar) -> Any;
        fn q_clamp_min / float_clamp_min(min: Scalar) -> Any;
        fn q_clamp_max / float_clamp_max(max: Scalar) -> Any;
        fn q_clamp / float_clamp(min: Scalar, max: Scalar) -> Any;
        fn q_neg / float_neg() -> Any;
        fn q_recip / float_recip() -> Any;
        fn q_sum / float_sum() -> Any;
        fn q_sum_dim / float_sum_dim(dim: usize) -> Any;
        fn q_prod / float_prod() -> Any;
        fn q_prod_dim / float_prod_dim(dim: usize) -> Any;
        fn q_mean / float_mean() -> Any;
        fn q_mean_dim / float_mean_dim(dim: usize) -> Any;
        fn q_cumsum / float_cumsum(dim: usize) -> Any;
        fn q_cumprod / float_cumprod(dim: usize) -> Any;
        fn q_cummin / float_cummin(dim: usize) -> Any;
        fn q_cummax / float_cummax(dim: usize) -> Any;
        fn q_exp / float_exp() -> Any;
        fn q_log / float_log() -> Any;
        fn q_log1p / float_log1p() -> Any;
        fn q_powi / float_powi(rhs: IntTensor<B>) -> Any;
        fn q_powi_scalar / float_powi_scalar(rhs: Scalar) -> Any;
        fn q_powf_scalar / float_powf_scalar(value: Scalar) -> Any;
        fn q_sqrt / float_sqrt() -> Any;
        fn q_abs / float_abs() -> Quantized;
        fn q_cos / float_cos() -> Any;
        fn q_sin / float_sin() -> Any;
        fn q_tan / float_tan() -> Any;
        fn q_cosh / float_cosh() -> Any;
        fn q_sinh / float_sinh() -> Any;
        fn q_tanh / float_tanh() -> Any;
        fn q_erf / float_erf() -> Any;
        fn q_argmax / float_argmax(dim: usize, out_dtype: IntDType) -> Int;
        fn q_argmin / float_argmin(dim: usize, out_dtype: IntDType) -> Int;
        fn q_argtopk / float_argtopk(dim: usize, k: usize, out_dtype: IntDType) -> Int;
        fn q_topk / float_topk(dim: usize, k: usize) -> Quantized;
        fn q_max / float_max() -> Quantized;
        fn q_max_dim / float_max_dim(dim: usize) -> Quantized;
        fn q_max_dim_with_indices / float_max_dim_with_indices(dim: usize, out_dtype: IntDType) -> QuantizedAndInt;
        fn q_min / float_min() -> Quantized;
        fn q_min_dim / float_min_dim(dim: usize) -> Quantized;
        fn q_min_dim_with_indices / float_min_dim_with_indices(dim: usize, out_dtype: IntDType) -> QuantizedAndInt;
        fn q_max_abs / float_max_abs() -> Quantized;
        fn q_max_abs_dim / float_max_abs_dim(dim: usize) -> Quantized;
        fn q_any / float_any(out_dtype: BoolDType) -> Bool;
        fn q_any_dim / float_any_dim(dim: usize, out_dtype: BoolDType) -> Bool;
        fn q_all / float_all(out_dtype: BoolDType) -> Bool;
        fn q_all_dim / float_all_dim(dim: usize, out_dtype: BoolDType) -> Bool;
        fn q_sort / float_sort(dim: usize, descending: bool) -> Quantized;
        fn q_sort_with_indices / float_sort_with_indices(dim: usize, descending: bool, out_dtype: IntDType) -> QuantizedAndInt;
        fn q_argsort / float_argsort(dim: usize, descending: bool, out_dtype: IntDType) -> Int;
    }
}
