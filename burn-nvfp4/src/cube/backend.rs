//! `Nvfp4Backend` on the kernels.
use burn_backend::{
    Backend, DType, FloatDType, Shape, TensorMetadata,
    ops::FloatTensorOps,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, kernel::into_contiguous, tensor::CubeTensor,
};
use cubecl::prelude::ComputeClient;
use kernels_cubecl::{
    Activation, WeightLayout, device,
    device::{
        Amax, DecodeOptions, Element, Fp8Axis, Fp8Codes, MatmulOptions, Matrix, MatrixStack, Residual, Routing,
        WeightCheck,
    },
};

use super::{
    pinned_route,
    tensors::{cast, counts as counts_of, dense_f32, element, from_device, matrix, packer, rows, tensor, to_device},
};
use crate::{
    Nvfp4Backend, OuterScaleConvention, PackError, PackedWeight, WeightFormat, host_route,
    reference::{check_bias, check_grouped, check_linear, check_outer, weight_dims},
};

impl<R, F, I, BT> Nvfp4Backend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    const ROW_STEP: usize = device::K_STEP;

    fn packs_on_device(device: &R::CubeDevice) -> bool {
        packer::<R>(&R::client(device), device).is_on_device()
    }

    fn pack_weight(
        weight: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> Result<PackedWeight<Self>, PackError> {
        let shape = weight.shape();
        weight_dims(&shape, format)?;
        if format != WeightFormat::Nvfp4 || !packer(&weight.client, &weight.device).is_on_device() {
            return host_route::pack_weight::<Self>(weight, format, amax);
        }
        let (packed, check) = pack::<R, F, I, BT>(&weight, amax.clone())?;
        match check.read_sound(&weight.client) {
            Ok(true) => {
                let packed = from_device(&weight, packed, shape.num_dims());
                Ok(packed.with_dtype(weight.dtype.into()))
            }
            // The host says where, and of what size.
            Ok(false) => host_route::pack_weight::<Self>(weight, format, amax),
            Err(error) => panic!("packing a weight {shape}: {error}"),
        }
    }

    fn unpack_weight(weight: &PackedWeight<Self>) -> FloatTensor<Self> {
        let mut shape = weight.shape();
        let rank = shape.num_dims();
        (shape[rank - 2], shape[rank - 1]) = (weight.d_in(), weight.d_out());
        let dense = decode(weight);
        let dense = tensor(&weight.storage().codes, dense.handle, shape, DType::F32);
        let dense = cast::<Self>(dense, weight.dtype());
        match weight.is_transposed() {
            true => Self::float_swap_dims(dense, rank - 2, rank - 1),
            false => dense,
        }
    }

    fn packed_linear_bias(
        x: FloatTensor<Self>,
        weight: &PackedWeight<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let mut shape = x.shape();
        let dtype = x.dtype.into();
        check_linear(&shape, weight);
        check_bias(bias.as_ref().map(CubeTensor::shape), weight);
        let last = shape.num_dims() - 1;
        shape[last] = weight.d_out();
        if shape.num_elements() == 0 {
            return nothing::<Self>(shape, &x.device, dtype);
        }
        if is_packed_product(weight) {
            let y = packed_product::<R, F, I, BT>(x, weight, bias);
            return Self::float_reshape(cast::<Self>(y, dtype), shape);
        }
        let x = rounded_rows::<R, F, I, BT>(x, weight.activation());
        let y = dense_product::<R, F, I, BT>(x, tensor_2d(&weight.storage().codes, decode(weight)));
        let y = match bias {
            Some(bias) => {
                let bias = cast::<Self>(bias, FloatDType::F32);
                let bias = Self::float_reshape(bias, Shape::from([1, weight.d_out()]));
                Self::float_add(y, bias)
            }
            None => y,
        };
        Self::float_reshape(cast::<Self>(y, dtype), shape)
    }

    fn packed_grouped_linear(
        x: FloatTensor<Self>,
        weight: &PackedWeight<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let shape = x.shape();
        let dtype = x.dtype.into();
        let weights = [weight.groups(), weight.d_in(), weight.d_out()];
        check_grouped(&shape, &weights.into(), &counts.shape());
        let shape = Shape::from([shape[0], weight.d_out()]);
        if shape.num_elements() == 0 {
            return nothing::<Self>(shape, &x.device, dtype);
        }
        let (client, counts) = (x.client.clone(), counts_of::<R, F, I, BT>(counts));
        let like = x.clone();
        let y = match is_packed_product(weight) {
            true => {
                let routing = Routing {
                    counts,
                    tokens: shape[0],
                    gather: None,
                };
                let operands = operands(weight);
                let x = quantize::<R, F, I, BT>(x, &operands.residual);
                let options = options(output(&like, false));
                device::grouped_matmul(&client, &x, &operands.weight, &routing, options)
            }
            false => {
                let x = rounded_rows::<R, F, I, BT>(x, weight.activation());
                device::grouped_matmul_dense(&client, &matrix(&x), &decode(weight), &counts)
            }
        };
        let y = y.unwrap_or_else(|error| panic!("grouped linear: packed weight {}: {error}", weight.shape()));
        cast::<Self>(from_matrix(&like, y, shape), dtype)
    }

    fn fake_quantize_weight(
        weight: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let (shape, dtype) = (weight.shape(), weight.dtype.into());
        let fail = |error: PackError| -> ! { panic!("fake quantization of a weight {shape}: {error}") };
        let (groups, d_in, d_out) = weight_dims(&shape, format).unwrap_or_else(|error| fail(error));
        if format == WeightFormat::Nvfp4 && !packer(&weight.client, &weight.device).is_on_device() {
            return host_route::fake_quantize_weight::<Self>(weight, format, amax);
        }
        let client = weight.client.clone();
        let values = match format {
            WeightFormat::Nvfp4 => {
                let (packed, check) = pack::<R, F, I, BT>(&weight, amax).unwrap_or_else(|error| fail(error));
                let options = DecodeOptions {
                    layout: WeightLayout::Transposed,
                    divide: false,
                    check: Some(&check),
                };
                device::decode_weight(&client, &packed, options)
            }
            WeightFormat::Fp8 => {
                let dense = dense_f32::<R, F, I, BT>(weight.clone());
                let own = Amax::new(&client, groups);
                own.include(&client, &dense.handle, d_in * d_out);
                let check = WeightCheck::new(&client, &own, None);
                let axis = Fp8Axis::Channels {
                    experts: groups,
                    k: d_in,
                    rows: d_out,
                };
                device::fake_quantize_fp8(&client, &dense.handle, axis, Some(&check))
            }
        };
        cast::<Self>(tensor(&weight, values, shape, DType::F32), dtype)
    }

    fn fake_quantize_activations(x: FloatTensor<Self>, activation: &Activation) -> FloatTensor<Self> {
        let (shape, dtype) = (x.shape(), x.dtype.into());
        if *activation == Activation::Full || shape.num_elements() == 0 {
            return x;
        }
        let x = rounded_rows::<R, F, I, BT>(x, activation);
        Self::float_reshape(cast::<Self>(x, dtype), shape)
    }

    fn grouped_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, counts: IntTensor<Self>) -> FloatTensor<Self> {
        let dtype = x.dtype.into();
        check_grouped(&x.shape(), &weight.shape(), &counts.shape());
        let shape = Shape::from([x.shape()[0], weight.shape()[2]]);
        if shape.num_elements() == 0 {
            return nothing::<Self>(shape, &x.device, dtype);
        }
        let x = cast::<Self>(x, FloatDType::F32);
        let weight = cast::<Self>(weight, FloatDType::F32);
        let strides = weight.meta.strides();
        let stack = MatrixStack {
            handle: weight.handle.clone(),
            shape: [weight.shape()[0], weight.shape()[1], weight.shape()[2]],
            strides: [strides[0], strides[1], strides[2]],
        };
        let counts = counts_of::<R, F, I, BT>(counts);
        let y = device::grouped_matmul_dense(&x.client, &matrix(&x), &stack, &counts);
        let y = y.unwrap_or_else(|error| panic!("grouped linear: {error}"));
        cast::<Self>(tensor(&x, y.handle, shape, DType::F32), dtype)
    }

    fn grouped_linear_weight_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let dtype = x.dtype.into();
        let shape = check_outer(&x.shape(), &grad.shape(), &counts.shape());
        if shape.num_elements() == 0 {
            return nothing::<Self>(shape, &x.device, dtype);
        }
        if x.shape()[0] == 0 {
            return Self::float_zeros(shape, &x.device, dtype);
        }
        let x = cast::<Self>(x, FloatDType::F32);
        let grad = cast::<Self>(grad, FloatDType::F32);
        let counts = counts_of::<R, F, I, BT>(counts);
        let dw = device::grouped_outer_product(&x.client, &matrix(&x), &matrix(&grad), &counts, shape[0]);
        let dw = dw.unwrap_or_else(|error| panic!("gradient of a grouped linear: {error}"));
        cast::<Self>(tensor(&x, dw, shape, DType::F32), dtype)
    }
}

/// A tensor without elements. Burn would launch a kernel of no cubes to fill it, which CUDA refuses.
fn nothing<B: Backend>(shape: Shape, device: &B::Device, dtype: FloatDType) -> FloatTensor<B> {
    B::float_empty(shape, device, dtype)
}

/// Whether the packed kernels make the product.
fn is_packed_product<B: Nvfp4Backend>(weight: &PackedWeight<B>) -> bool {
    let packed = matches!(weight.activation(), Activation::Nvfp4 | Activation::Compensated(_));
    weight.format() == WeightFormat::Nvfp4 && packed
}

fn options(output: Element) -> MatmulOptions {
    MatmulOptions {
        route: pinned_route(),
        output,
    }
}

/// What a product with `x` writes: the type of `x`, where the device has it. To f32 only is a bias added.
fn output<R: CubeRuntime>(x: &CubeTensor<R>, has_bias: bool) -> Element {
    element(x.dtype)
        .filter(|element| !has_bias && element.is_native(&x.client))
        .unwrap_or(Element::F32)
}

/// What the packed kernels take of a weight.
struct Operands {
    /// Its outer scales multiply.
    weight: device::PackedWeight,
    /// With a mask in the device's memory.
    residual: Residual,
}

/// Made at the first product and kept with the weight.
fn operands<R, F, I, BT>(weight: &PackedWeight<CubeBackend<R, F, I, BT>>) -> &Operands
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    weight.kept().get_or_make(|| {
        let residual = residual(&weight.storage().codes.client, weight.activation(), weight.d_in());
        Operands {
            weight: multiplying(weight),
            residual,
        }
    })
}

/// The residual pass that an activation setting asks for. Uploads a mask.
fn residual<R: CubeRuntime>(client: &ComputeClient<R>, activation: &Activation, k: usize) -> Residual {
    Residual::new(client, activation.compensation(), k)
        .unwrap_or_else(|error| panic!("compensation of {k} channels: {error}"))
}

/// A product of the packed kernels, `[tokens, d_out]`, in the type of `x` where the device has it.
fn packed_product<R, F, I, BT>(
    x: CubeTensor<R>,
    weight: &PackedWeight<CubeBackend<R, F, I, BT>>,
    bias: Option<CubeTensor<R>>,
) -> CubeTensor<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let fail = |error: device::Error| -> ! { panic!("linear: packed weight {}: {error}", weight.shape()) };
    let (like, operands) = (x.clone(), operands(weight));
    let client = &like.client;
    let quantized = quantize::<R, F, I, BT>(x, &operands.residual);
    let options = options(output(&like, bias.is_some()));
    let y = device::matmul(client, &quantized, &operands.weight, options).unwrap_or_else(|error| fail(error));
    let y = match bias {
        None => y,
        Some(bias) => {
            let native = element(bias.dtype).is_some_and(|element| element.is_native(client));
            let bias = match native {
                true => into_contiguous(bias),
                false => dense_f32::<R, F, I, BT>(bias),
            };
            let bias = Matrix::contiguous(
                bias.handle.clone(),
                element(bias.dtype).expect("a type that the kernels have"),
                1,
                weight.d_out(),
            );
            device::add_bias(client, &y, &bias, output(&like, false)).unwrap_or_else(|error| fail(error))
        }
    };
    let shape = Shape::from([y.rows, y.columns]);
    from_matrix(&like, y, shape)
}

/// A matrix without gaps as a tensor.
fn from_matrix<R: CubeRuntime>(like: &CubeTensor<R>, y: Matrix, shape: Shape) -> CubeTensor<R> {
    let dtype = match y.element {
        Element::F32 => DType::F32,
        Element::F16 => DType::F16,
        Element::BF16 => DType::BF16,
    };
    tensor(like, y.handle, shape, dtype)
}

/// Packs under the weight's own amax, or a given one; the check tells whether it could be packed.
fn pack<R, F, I, BT>(
    weight: &CubeTensor<R>,
    amax: Option<CubeTensor<R>>,
) -> Result<(device::PackedWeight, WeightCheck), PackError>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let client = &weight.client;
    let (groups, d_in, d_out) = weight_dims(&weight.shape(), WeightFormat::Nvfp4)?;
    let dense = dense_f32::<R, F, I, BT>(weight.clone());
    let own = Amax::new(client, groups);
    own.include(client, &dense.handle, d_in * d_out);
    let given = match amax {
        Some(amax) if amax.shape().num_elements() != groups => {
            return Err(PackError::AmaxLength {
                expected: groups,
                actual: amax.shape().num_elements(),
            });
        }
        amax => amax.map(|amax| dense_f32::<R, F, I, BT>(amax).handle),
    };
    let check = WeightCheck::new(client, &own, given.as_ref());
    let amax = match given {
        Some(given) => own.replaced_by(given),
        None => own,
    };
    let sizes = [groups, d_out, d_in];
    let packed = device::pack_weight(client, &dense.handle, sizes, WeightLayout::Transposed, &amax);
    let packed = packed.unwrap_or_else(|error| panic!("packing a weight {}: {error}", weight.shape()));
    Ok((packed, check))
}

/// An NVFP4 weight whose outer scales multiply.
fn multiplying<R, F, I, BT>(weight: &PackedWeight<CubeBackend<R, F, I, BT>>) -> device::PackedWeight
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let packed = to_device(weight);
    match weight.storage().convention {
        OuterScaleConvention::Multiply => packed,
        OuterScaleConvention::Divide => {
            let scales = CubeBackend::<R, F, I, BT>::float_recip(weight.storage().outer_scales.clone());
            device::PackedWeight {
                outer_scales: into_contiguous(scales).handle,
                ..packed
            }
        }
    }
}

/// The values of a packed weight, `[groups, d_in, d_out]`.
fn decode<R, F, I, BT>(weight: &PackedWeight<CubeBackend<R, F, I, BT>>) -> MatrixStack
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let storage = weight.storage();
    let client = &storage.codes.client;
    let handle = match storage.format {
        WeightFormat::Nvfp4 => {
            let options = DecodeOptions {
                layout: WeightLayout::Transposed,
                divide: storage.convention == OuterScaleConvention::Divide,
                check: None,
            };
            device::decode_weight(client, &to_device(weight), options)
        }
        WeightFormat::Fp8 => {
            let codes = Fp8Codes {
                codes: into_contiguous(storage.codes.clone()).handle,
                scales: into_contiguous(storage.outer_scales.clone()).handle,
                experts: storage.groups,
                rows: storage.d_out,
                k: storage.d_in,
                padded_k: weight.padded_d_in(),
            };
            device::decode_weight_fp8(client, &codes)
        }
    };
    let shape = [storage.groups, storage.d_in, storage.d_out];
    MatrixStack {
        handle,
        shape,
        strides: [shape[1] * shape[2], shape[2], 1],
    }
}

/// A stack of one matrix as a tensor.
fn tensor_2d<R: CubeRuntime>(like: &CubeTensor<R>, stack: MatrixStack) -> CubeTensor<R> {
    let [_, rows, columns] = stack.shape;
    tensor(like, stack.handle, Shape::from([rows, columns]), DType::F32)
}

/// f32 `[tokens, k]` times `[k, n]`: on bf16 tensor cores as experts are, where there are any, else by Burn's matmul.
fn dense_product<R, F, I, BT>(x: CubeTensor<R>, w: CubeTensor<R>) -> CubeTensor<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let y = match device::matmul_dense(&x.client, &matrix(&x), &matrix(&w)) {
        Ok(y) => y,
        Err(device::Error::Unsupported { .. }) => return CubeBackend::<R, F, I, BT>::float_matmul(x, w),
        Err(error) => panic!("linear: {error}"),
    };
    let shape = Shape::from([y.rows, y.columns]);
    from_matrix(&x, y, shape)
}

/// Activations as the packed kernels take them.
fn quantize<R, F, I, BT>(x: CubeTensor<R>, residual: &Residual) -> device::PackedActivations
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let (client, shape) = (x.client.clone(), x.shape());
    let quantized = device::quantize(&client, &rows::<R, F, I, BT>(x), residual);
    quantized.unwrap_or_else(|error| panic!("quantization of activations {shape}: {error}"))
}

/// The values that a product sees in place of `x`, f32 `[tokens, k]`.
fn rounded_rows<R, F, I, BT>(x: CubeTensor<R>, activation: &Activation) -> CubeTensor<R>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let (tokens, k) = crate::reference::rows(&x.shape());
    let shape = Shape::from([tokens, k]);
    let (client, like) = (x.client.clone(), x.clone());
    let values = match activation {
        Activation::Full => {
            let x = cast::<CubeBackend<R, F, I, BT>>(x, FloatDType::F32);
            return CubeBackend::<R, F, I, BT>::float_reshape(x, shape);
        }
        Activation::Nvfp4 | Activation::Compensated(_) => {
            let residual = residual(&client, activation, k);
            device::decode_activations(&client, &quantize::<R, F, I, BT>(x, &residual)).handle
        }
        Activation::Fp8 => {
            let x = dense_f32::<R, F, I, BT>(x);
            device::fake_quantize_fp8(&client, &x.handle, Fp8Axis::Tokens { tokens, k }, None)
        }
    };
    tensor(&like, values, shape, DType::F32)
}
