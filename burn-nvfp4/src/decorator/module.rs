//! Operations of modules. `linear` is where every `burn::nn::Linear` lands.
use burn_backend::{
    TensorMetadata,
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward, DeformConvOptions,
        InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices, MaxPool2dBackward, MaxPool2dWithIndices,
        ModuleOps, UnfoldOptions,
    },
    tensor::{BoolTensor, IntTensor},
};

use crate::{Nvfp4, Nvfp4Backend, Nvfp4Tensor};

delegate! {
    impl ModuleOps {
        fn linear(x: Nvfp4Tensor<B>, weight: Nvfp4Tensor<B>, bias: Option<Nvfp4Tensor<B>>) -> Nvfp4Tensor<B> {
            let (x, bias) = (x.dense(), bias.map(Nvfp4Tensor::dense));
            Nvfp4Tensor::Dense(match weight {
                Nvfp4Tensor::Packed(weight) if weight.is_linear_weight() => B::packed_linear_bias(x, &weight, bias),
                Nvfp4Tensor::Packed(weight) => {
                    let dtype = x.dtype().into();
                    B::linear(x, B::unpack_weight(&weight.with_dtype(dtype)), bias)
                }
                Nvfp4Tensor::Dense(weight) => B::linear(x, weight, bias),
            })
        }
        fn deform_conv2d_backward(
            x: Nvfp4Tensor<B>,
            offset: Nvfp4Tensor<B>,
            weight: Nvfp4Tensor<B>,
            mask: Option<Nvfp4Tensor<B>>,
            bias: Option<Nvfp4Tensor<B>>,
            output_grad: Nvfp4Tensor<B>,
            options: DeformConvOptions<2>,
        ) -> DeformConv2dBackward<Self> {
            let grads = B::deform_conv2d_backward(
                x.dense(),
                offset.dense(),
                weight.dense(),
                mask.map(Nvfp4Tensor::dense),
                bias.map(Nvfp4Tensor::dense),
                output_grad.dense(),
                options,
            );
            DeformConv2dBackward {
                x_grad: Nvfp4Tensor::Dense(grads.x_grad),
                offset_grad: Nvfp4Tensor::Dense(grads.offset_grad),
                weight_grad: Nvfp4Tensor::Dense(grads.weight_grad),
                mask_grad: grads.mask_grad.map(Nvfp4Tensor::Dense),
                bias_grad: grads.bias_grad.map(Nvfp4Tensor::Dense),
            }
        }
        fn max_pool1d_with_indices(
            x: Nvfp4Tensor<B>,
            kernel_size: usize,
            stride: usize,
            padding: usize,
            dilation: usize,
            ceil_mode: bool,
        ) -> MaxPool1dWithIndices<Self> {
            let pooled = B::max_pool1d_with_indices(x.dense(), kernel_size, stride, padding, dilation, ceil_mode);
            MaxPool1dWithIndices { output: Nvfp4Tensor::Dense(pooled.output), indices: pooled.indices }
        }
        fn max_pool1d_with_indices_backward(
            x: Nvfp4Tensor<B>,
            kernel_size: usize,
            stride: usize,
            padding: usize,
            dilation: usize,
            ceil_mode: bool,
            output_grad: Nvfp4Tensor<B>,
            indices: IntTensor<B>,
        ) -> MaxPool1dBackward<Self> {
            let grads = B::max_pool1d_with_indices_backward(
                x.dense(),
                kernel_size,
                stride,
                padding,
                dilation,
                ceil_mode,
                output_grad.dense(),
                indices,
            );
            MaxPool1dBackward { x_grad: Nvfp4Tensor::Dense(grads.x_grad) }
        }
        fn max_pool2d_with_indices(
            x: Nvfp4Tensor<B>,
            kernel_size: [usize; 2],
            stride: [usize; 2],
            padding: [usize; 2],
            dilation: [usize; 2],
            ceil_mode: bool,
        ) -> MaxPool2dWithIndices<Self> {
            let pooled = B::max_pool2d_with_indices(x.dense(), kernel_size, stride, padding, dilation, ceil_mode);
            MaxPool2dWithIndices { output: Nvfp4Tensor::Dense(pooled.output), indices: pooled.indices }
        }
        fn max_pool2d_with_indices_backward(
            x: Nvfp4Tensor<B>,
            kernel_size: [usize; 2],
            stride: [usize; 2],
            padding: [usize; 2],
            dilation: [usize; 2],
            ceil_mode: bool,
            output_grad: Nvfp4Tensor<B>,
            indices: IntTensor<B>,
        ) -> MaxPool2dBackward<Self> {
            let grads = B::max_pool2d_with_indices_backward(
                x.dense(),
                kernel_size,
                stride,
                padding,
                dilation,
                ceil_mode,
                output_grad.dense(),
                indices,
            );
            MaxPool2dBackward { x_grad: Nvfp4Tensor::Dense(grads.x_grad) }
        }
    }
    fn linear_x_backward(weight: Float, output_grad: Float) -> Float;
    fn embedding(weights: Float, indices: Int) -> Float;
    fn embedding_backward(weights: Float, output_grad: Float, indices: Int) -> Float;
    fn linear_weight_backward(x: Float, output_grad: Float) -> Float;
    fn linear_bias_backward(output_grad: Float) -> Float;
    fn conv1d(x: Float, weight: Float, bias: Option<Float>, options: ConvOptions<1>) -> Float;
    fn conv1d_x_backward(x: Float, weight: Float, output_grad: Float, options: ConvOptions<1>) -> Float;
    fn conv1d_weight_backward(x: Float, weight: Float, output_grad: Float, options: ConvOptions<1>) -> Float;
    fn conv1d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float;
    fn conv2d(x: Float, weight: Float, bias: Option<Float>, options: ConvOptions<2>) -> Float;
    fn conv2d_x_backward(x: Float, weight: Float, output_grad: Float, options: ConvOptions<2>) -> Float;
    fn conv2d_weight_backward(x: Float, weight: Float, output_grad: Float, options: ConvOptions<2>) -> Float;
    fn conv2d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float;
    fn deform_conv2d(x: Float, offset: Float, weight: Float, mask: Option<Float>, bias: Option<Float>, options: DeformConvOptions<2>) -> Float;
    fn conv3d(x: Float, weight: Float, bias: Option<Float>, options: ConvOptions<3>) -> Float;
    fn conv3d_x_backward(x: Float, weight: Float, output_grad: Float, options: ConvOptions<3>) -> Float;
    fn conv3d_weight_backward(x: Float, weight: Float, output_grad: Float, options: ConvOptions<3>) -> Float;
    fn conv3d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float;
    fn conv_transpose1d(x: Float, weight: Float, bias: Option<Float>, options: ConvTransposeOptions<1>) -> Float;
    fn conv_transpose1d_x_backward(weight: Float, output_grad: Float, options: ConvTransposeOptions<1>) -> Float;
    fn conv_transpose1d_weight_backward(x: Float, weight: Float, output_grad: Float, options: ConvTransposeOptions<1>) -> Float;
    fn conv_transpose1d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float;
    fn conv_transpose2d(x: Float, weight: Float, bias: Option<Float>, options: ConvTransposeOptions<2>) -> Float;
    fn conv_transpose2d_x_backward(weight: Float, output_grad: Float, options: ConvTransposeOptions<2>) -> Float;
    fn conv_transpose2d_weight_backward(x: Float, weight: Float, output_grad: Float, options: ConvTransposeOptions<2>) -> Float;
    fn conv_transpose2d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float;
    fn conv_transpose3d(x: Float, weight: Float, bias: Option<Float>, options: ConvTransposeOptions<3>) -> Float;
    fn conv_transpose3d_x_backward(weight: Float, output_grad: Float, options: ConvTransposeOptions<3>) -> Float;
    fn conv_transpose3d_weight_backward(x: Float, weight: Float, output_grad: Float, options: ConvTransposeOptions<3>) -> Float;
    fn conv_transpose3d_bias_backward(x: Float, bias: Float, output_grad: Float) -> Float;
    fn unfold4d(x: Float, kernel_size: [usize; 2], options: UnfoldOptions) -> Float;
    fn avg_pool1d(x: Float, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> Float;
    fn avg_pool1d_backward(x: Float, grad: Float, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> Float;
    fn avg_pool2d(x: Float, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> Float;
    fn avg_pool2d_backward(x: Float, grad: Float, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> Float;
    fn adaptive_avg_pool2d(x: Float, output_size: [usize; 2]) -> Float;
    fn adaptive_avg_pool2d_backward(x: Float, grad: Float) -> Float;
    fn adaptive_avg_pool1d(x: Float, output_size: usize) -> Float;
    fn adaptive_avg_pool1d_backward(x: Float, grad: Float) -> Float;
    fn max_pool1d(x: Float, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> Float;
    fn max_pool2d(x: Float, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> Float;
    fn interpolate(x: Float, output_size: [usize; 2], options: InterpolateOptions) -> Float;
    fn interpolate_backward(x: Float, grad: Float, output_size: [usize; 2], options: InterpolateOptions) -> Float;
    fn attention(query: Float, key: Float, value: Float, mask: Option<Bool>, attn_bias: Option<Float>, options: AttentionModuleOptions) -> Float;
    fn layer_norm(tensor: Float, gamma: Float, beta: Option<Float>, epsilon: f64) -> Float;
    fn ctc_loss(log_probs: Float, targets: Int, input_lengths: Int, target_lengths: Int, blank: usize) -> Float;
    fn has_ctc_loss_backward() -> bool;
    fn ctc_loss_backward(log_probs: Float, targets: Int, input_lengths: Int, target_lengths: Int, grad_loss: Float, blank: usize) -> Float;
    fn rfft(signal: Float, dim: usize, n: Option<usize>) -> (Float, Float);
    fn irfft(spectrum_re: Float, spectrum_im: Float, dim: usize, n: Option<usize>) -> Float;
}
