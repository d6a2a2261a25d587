//! A linear layer computed from the bytes of its packed weight, without the backend: what the layer must equal.
#![allow(dead_code, reason = "each test file uses its part")]
use burn::{
    backend::Flex,
    nn::Linear,
    tensor::{Tensor, TensorData},
};
use burn_nvfp4::{Nvfp4, PackedWeight, WeightFormat, packed_weight};
use kernels_cubecl::{Fp8View, Nvfp4View, OuterScale, WeightView, host};

pub type B = Nvfp4<Flex>;

/// The values of a tensor.
pub fn values<Backend: burn::tensor::backend::Backend, const D: usize>(tensor: &Tensor<Backend, D>) -> Vec<f32> {
    tensor.to_data().to_vec().unwrap()
}

/// The bits of a tensor: `==` on floats would call two zeros equal and two NaNs different.
pub fn bits<Backend: burn::tensor::backend::Backend, const D: usize>(tensor: &Tensor<Backend, D>) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}

/// Reproducible values of about unit size.
pub fn noise(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..count).map(|_| uniform() + uniform() + uniform()).collect()
}

pub fn tensor<Backend: burn::tensor::backend::Backend, const D: usize>(
    seed: u32,
    shape: [usize; D],
) -> Tensor<Backend, D> {
    Tensor::from_data(
        TensorData::new(noise(seed, shape.iter().product()), shape),
        &Default::default(),
    )
}

/// `x [tokens, d_in]` times the packed weight, from its bytes.
pub fn product(x: &[f32], weight: &PackedWeight<Flex>) -> Vec<f32> {
    let (rows, k) = (weight.d_out(), weight.d_in());
    let (codes, block_scales, outer) = (weight.codes(), weight.block_scales(), weight.outer_scales());
    let view = match weight.format() {
        WeightFormat::Nvfp4 => WeightView::Nvfp4(Nvfp4View {
            rows,
            k,
            codes: &codes,
            block_scales: &block_scales,
            outer_scale: OuterScale::Multiply(outer[0]),
        }),
        WeightFormat::Fp8 => WeightView::Fp8(Fp8View {
            rows,
            k,
            codes: &codes,
            channel_scales: &outer,
        }),
    };
    let mut y = vec![0.0; x.len() / k * rows];
    host::matmul(x, x.len() / k, view, weight.activation(), &mut y).unwrap();
    y
}

/// A packed layer: product, then bias, in f32.
pub fn linear<const D: usize>(layer: &Linear<B>, x: Tensor<B, D>) -> Tensor<B, D> {
    let weight = packed_weight(&layer.weight.val()).expect("the layer is packed");
    let mut shape = x.dims();
    let mut y = product(&values(&x), &weight);
    if let Some(bias) = &layer.bias {
        let bias = values(&bias.val());
        for (i, y) in y.iter_mut().enumerate() {
            *y += bias[i % bias.len()];
        }
    }
    shape[D - 1] = weight.d_out();
    Tensor::from_data(TensorData::new(y, shape), &Default::default())
}
