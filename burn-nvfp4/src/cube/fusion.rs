//! `Fusion`: each operation is a custom one of its stream, run when the stream is.
//!
//! Shapes are checked here, before an operation is registered: a panic on the device's thread would come late and elsewhere.
use burn_backend::{
    DType, Shape, TensorMetadata,
    tensor::{Device, FloatTensor, IntTensor},
};
use burn_fusion::{Client, Fusion, FusionBackend, FusionTensor, NoOp, stream::OperationStreams};
use burn_ir::{InitOperationIr, OperationIr};
use kernels_cubecl::Activation;

use super::custom_op::{self, Call};
use crate::{
    Nvfp4Backend, PackError, PackedWeight, WeightFormat, host_route,
    packed_weight::Frame,
    reference::{check_bias, check_grouped, check_linear, check_outer, weight_dims},
};

type Runtime<B> = <B as FusionBackend>::FusionRuntime;

/// A weight from the next three inputs: codes, block scales, outer scales.
fn read_weight<B: FusionBackend + Nvfp4Backend>(call: &mut Call<'_, B>, frame: &Frame) -> PackedWeight<B> {
    let (codes, block_scales) = (call.int(), call.int());
    frame.clone().fill(codes, block_scales, call.float())
}

/// [`custom_op::defer`] of what gives one float tensor.
fn defer<B: FusionBackend + Nvfp4Backend>(
    name: &'static str,
    inputs: Vec<FusionTensor<Runtime<B>>>,
    output: (Shape, DType),
    run: impl Fn(&mut Call<'_, B>) -> FloatTensor<B> + Send + Sync + 'static,
) -> FusionTensor<Runtime<B>> {
    let mut outputs = custom_op::defer::<B>(name, inputs, [output], move |call| {
        let output = run(call);
        call.give_float(output);
    });
    outputs.remove(0)
}

/// The tensors of a weight, as inputs.
fn parts<B: FusionBackend + Nvfp4Backend>(
    first: impl IntoIterator<Item = FusionTensor<Runtime<B>>>,
    weight: &PackedWeight<Fusion<B>>,
) -> Vec<FusionTensor<Runtime<B>>> {
    let storage = weight.storage();
    let parts = [&storage.codes, &storage.block_scales, &storage.outer_scales];
    first.into_iter().chain(parts.into_iter().cloned()).collect()
}

/// A tensor of B as one of its stream.
fn registered<B: FusionBackend>(
    client: &Client<Runtime<B>>,
    handle: B::Handle,
    shape: Shape,
    dtype: DType,
) -> FusionTensor<Runtime<B>> {
    let operation = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
    let streams = OperationStreams::default();
    let mut outputs = client.register(streams, OperationIr::Init(operation), NoOp::<B>::new());
    outputs.remove(0)
}

impl<B: FusionBackend + Nvfp4Backend> Nvfp4Backend for Fusion<B> {
    const ROW_STEP: usize = B::ROW_STEP;

    fn packs_on_device(device: &Device<B>) -> bool {
        B::packs_on_device(device)
    }

    /// Runs the stream and waits: whether the weight can be packed is known then.
    fn pack_weight(
        weight: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> Result<PackedWeight<Self>, PackError> {
        weight_dims(&weight.shape, format)?;
        let client = weight.client.clone();
        let amax = amax.map(|amax| client.resolve_tensor_float::<B>(amax));
        let weight = client.resolve_tensor_float::<B>(weight);
        let packed = B::pack_weight(weight, format, amax)?;
        let storage = packed.storage();
        let int = |tensor: &IntTensor<B>| {
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            registered::<B>(&client, B::int_tensor_handle(tensor.clone()), shape, dtype)
        };
        let float = |tensor: &FloatTensor<B>| {
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            registered::<B>(&client, B::float_tensor_handle(tensor.clone()), shape, dtype)
        };
        Ok(packed.frame().fill(
            int(&storage.codes),
            int(&storage.block_scales),
            float(&storage.outer_scales),
        ))
    }

    fn unpack_weight(weight: &PackedWeight<Self>) -> FloatTensor<Self> {
        let output = (weight.shape(), weight.dtype().into());
        let frame = weight.frame();
        defer::<B>("nvfp4_unpack_weight", parts::<B>([], weight), output, move |inputs| {
            B::unpack_weight(&read_weight(inputs, &frame))
        })
    }

    fn packed_linear_bias(
        x: FloatTensor<Self>,
        weight: &PackedWeight<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let mut shape = x.shape();
        check_linear(&shape, weight);
        check_bias(bias.as_ref().map(TensorMetadata::shape), weight);
        let last = shape.num_dims() - 1;
        shape[last] = weight.d_out();
        let output = (shape, x.dtype);
        let (frame, has_bias) = (weight.frame(), bias.is_some());
        let mut inputs = parts::<B>([x], weight);
        inputs.extend(bias);
        defer::<B>("nvfp4_packed_linear", inputs, output, move |inputs| {
            let (x, weight) = (inputs.float(), read_weight(inputs, &frame));
            let bias = has_bias.then(|| inputs.float());
            B::packed_linear_bias(x, &weight, bias)
        })
    }

    fn packed_grouped_linear(
        x: FloatTensor<Self>,
        weight: &PackedWeight<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let weights = [weight.groups(), weight.d_in(), weight.d_out()];
        check_grouped(&x.shape, &weights.into(), &counts.shape);
        let output = (Shape::from([x.shape[0], weight.d_out()]), x.dtype);
        let frame = weight.frame();
        let inputs = parts::<B>([x, counts], weight);
        defer::<B>("nvfp4_packed_grouped_linear", inputs, output, move |inputs| {
            let (x, counts) = (inputs.float(), inputs.int());
            B::packed_grouped_linear(x, &read_weight(inputs, &frame), counts)
        })
    }

    fn fake_quantize_weight(
        weight: FloatTensor<Self>,
        format: WeightFormat,
        amax: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let shape = weight.shape();
        let fail = |error: PackError| -> ! { panic!("fake quantization of a weight {shape}: {error}") };
        let (groups, ..) = weight_dims(&shape, format).unwrap_or_else(|error| fail(error));
        let actual = amax.as_ref().map_or(groups, |amax| amax.shape.num_elements());
        if actual != groups && format == WeightFormat::Nvfp4 {
            let expected = groups;
            fail(PackError::AmaxLength { expected, actual });
        }
        // Asked here: the stream's thread cannot wait for the device.
        if format == WeightFormat::Nvfp4 && !B::packs_on_device(weight.client.device()) {
            return host_route::fake_quantize_weight::<Self>(weight, format, amax);
        }
        let output = (shape.clone(), weight.dtype);
        let has_amax = amax.is_some();
        let inputs = [weight].into_iter().chain(amax).collect();
        defer::<B>("nvfp4_fake_quantize_weight", inputs, output, move |inputs| {
            let weight = inputs.float();
            let amax = has_amax.then(|| inputs.float());
            B::fake_quantize_weight(weight, format, amax)
        })
    }

    fn fake_quantize_activations(x: FloatTensor<Self>, activation: &Activation) -> FloatTensor<Self> {
        if *activation == Activation::Full {
            return x;
        }
        let k = x.shape[x.shape.num_dims() - 1];
        if let Err(error) = activation.check(k) {
            panic!("fake quantization of activations {}: {error}", x.shape);
        }
        let output = (x.shape(), x.dtype);
        let activation = activation.clone();
        defer::<B>("nvfp4_fake_quantize_activations", vec![x], output, move |inputs| {
            B::fake_quantize_activations(inputs.float(), &activation)
        })
    }

    fn grouped_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, counts: IntTensor<Self>) -> FloatTensor<Self> {
        check_grouped(&x.shape, &weight.shape, &counts.shape);
        let output = (Shape::from([x.shape[0], weight.shape[2]]), x.dtype);
        defer::<B>("nvfp4_grouped_linear", vec![x, weight, counts], output, |inputs| {
            let (x, weight) = (inputs.float(), inputs.float());
            B::grouped_linear(x, weight, inputs.int())
        })
    }

    fn grouped_linear_weight_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        counts: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let output = (check_outer(&x.shape, &grad.shape, &counts.shape), x.dtype);
        let inputs = vec![x, grad, counts];
        defer::<B>("nvfp4_grouped_weight_gradient", inputs, output, |inputs| {
            let (x, grad) = (inputs.float(), inputs.float());
            B::grouped_linear_weight_backward(x, grad, inputs.int())
        })
    }
}
