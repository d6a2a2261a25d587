//! The defaults against Flex, and what they refuse.
use super::*;
use crate::{Nvfp4, Nvfp4Tensor};
use burn_backend::{TensorData, tensor::Device};
use burn_flex::Flex;
use kernels_cubecl::{Compensation, Granularity, ResidualMask};

/// A backend that lends nothing and has no kernels: every operation reads back.
type Plain = Nvfp4<Flex>;
impl Nvfp4Backend for Plain {}

fn device() -> Device<Flex> {
    Default::default()
}
fn noise(seed: usize, shape: &[usize]) -> TensorData {
    let count: usize = shape.iter().product();
    let values = (0..count)
        .map(|i| (((i + seed) * 7919 % 1013) as f32 - 506.0) / 300.0)
        .collect();
    TensorData::new::<f32, _>(values, Shape::from(shape.to_vec()))
}
fn flex(data: TensorData) -> FloatTensor<Flex> {
    use burn_backend::ops::FloatTensorOps;
    Flex::float_from_data(data, &device())
}
fn plain(data: TensorData) -> FloatTensor<Plain> {
    Nvfp4Tensor::Dense(flex(data))
}
fn same(on_plain: FloatTensor<Plain>, on_flex: FloatTensor<Flex>) {
    let read = |tensor: &FloatTensor<Flex>| Flex::with_floats(tensor, |v| v.iter().map(|v| v.to_bits()).collect());
    let (a, b): (Vec<u32>, Vec<u32>) = (read(&on_plain.clone().dense()), read(&on_flex));
    assert_eq!((on_plain.shape(), a), (on_flex.shape(), b));
}

#[test]
fn the_defaults_compute_what_flex_computes() {
    let counts = TensorData::new(vec![2i32, 0, 3], [3]);
    let mask = ResidualMask::from_channels(&[true; 32]);
    for (format, activation) in [
        (WeightFormat::Nvfp4, Activation::Full),
        (WeightFormat::Nvfp4, Activation::Nvfp4),
        (WeightFormat::Nvfp4, Activation::Compensated(Compensation::Mask(mask))),
        (
            WeightFormat::Nvfp4,
            Activation::Compensated(Compensation::PerToken {
                granularity: Granularity::Channel,
                fraction: 0.3,
            }),
        ),
        (WeightFormat::Fp8, Activation::Fp8),
    ] {
        let amax = TensorData::new(vec![4.0f32], [1]);
        let on_flex = Flex::pack_weight(flex(noise(1, &[32, 6])), format, Some(flex(amax.clone()))).unwrap();
        let on_plain = Plain::pack_weight(plain(noise(1, &[32, 6])), format, Some(plain(amax))).unwrap();
        let on_flex = on_flex.with_activation(activation.clone()).unwrap();
        let on_plain = on_plain.with_activation(activation.clone()).unwrap();
        assert_eq!(on_plain.codes(), on_flex.codes());
        assert_eq!(on_plain.block_scales(), on_flex.block_scales());
        assert_eq!(on_plain.outer_scales(), on_flex.outer_scales());
        same(Plain::unpack_weight(&on_plain), Flex::unpack_weight(&on_flex));
        let (x, bias) = (noise(5, &[2, 3, 32]), noise(7, &[6]));
        same(
            Plain::packed_linear_bias(plain(x.clone()), &on_plain, Some(plain(bias.clone()))),
            Flex::packed_linear_bias(flex(x.clone()), &on_flex, Some(flex(bias))),
        );
        same(
            Plain::fake_quantize_activations(plain(x.clone()), &activation),
            Flex::fake_quantize_activations(flex(x), &activation),
        );
        let stack = noise(9, &[3, 32, 6]);
        let packed = Flex::pack_weight(flex(stack.clone()), format, None).unwrap();
        let values = Flex::unpack_weight(&packed);
        same(
            Plain::fake_quantize_weight(plain(stack.clone()), format, None),
            values.clone(),
        );
        same(
            Plain::fake_quantize_weight(plain(stack.clone()), format, None),
            Flex::fake_quantize_weight(flex(stack.clone()), format, None),
        );
        let on_flex = Flex::pack_weight(flex(stack.clone()), format, None).unwrap();
        let on_plain = Plain::pack_weight(plain(stack.clone()), format, None).unwrap();
        let x = noise(11, &[5, 32]);
        use burn_backend::ops::IntTensorOps;
        let int = |data: TensorData| Flex::int_from_data(data, &device());
        same(
            Plain::packed_grouped_linear(plain(x.clone()), &on_plain, int(counts.clone())),
            Flex::packed_grouped_linear(flex(x.clone()), &on_flex, int(counts.clone())),
        );
        same(
            Plain::grouped_linear(plain(x.clone()), plain(stack.clone()), int(counts.clone())),
            Flex::grouped_linear(flex(x.clone()), flex(stack), int(counts.clone())),
        );
    }
}

#[test]
fn packing_twice_over_still_multiplies() {
    let w = Plain::pack_weight(plain(noise(1, &[32, 6])), WeightFormat::Nvfp4, None).unwrap();
    let twice: FloatTensor<Nvfp4<Plain>> = Nvfp4Tensor::Packed(w.clone());
    use burn_backend::ops::FloatTensorOps;
    let y = Nvfp4::<Plain>::float_matmul(Nvfp4Tensor::Dense(plain(noise(2, &[4, 32]))), twice);
    same(y.dense(), Plain::packed_linear(plain(noise(2, &[4, 32])), &w).dense());
}

#[test]
fn a_non_finite_weight_fakes_nan_everywhere() {
    let mut values: Vec<f32> = noise(1, &[32, 6]).to_vec().unwrap();
    values[40] = f32::NAN;
    let weight = flex(TensorData::new(values, [32, 6]));
    for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
        let faked = Flex::fake_quantize_weight(weight.clone(), format, None);
        Flex::with_floats(&faked, |values| {
            assert!(values.len() == 192 && values.iter().all(|v| v.is_nan()))
        });
    }
    let amax = flex(TensorData::new(vec![f32::NAN], [1]));
    let faked = Flex::fake_quantize_weight(flex(noise(1, &[32, 6])), WeightFormat::Nvfp4, Some(amax));
    Flex::with_floats(&faked, |values| assert!(values.iter().all(|v| v.is_nan())));
}

#[test]
fn what_cannot_be_packed_is_said() {
    let error = |shape: &[usize]| Flex::pack_weight(flex(noise(1, shape)), WeightFormat::Nvfp4, None).unwrap_err();
    assert_eq!(error(&[20, 4]), PackError::UnalignedInput { d_in: 20 });
    assert_eq!(
        error(&[16]).to_string(),
        "expected a weight [d_in, d_out] or [groups, d_in, d_out], got shape [16]"
    );
    assert!(matches!(error(&[2, 2, 16, 4]), PackError::Rank { .. }));
    let amax = |values: Vec<f32>| {
        let len = values.len();
        let amax = flex(TensorData::new(values, [len]));
        Flex::pack_weight(flex(noise(1, &[2, 16, 4])), WeightFormat::Nvfp4, Some(amax)).map(|_| ())
    };
    assert_eq!(amax(vec![9.0]), Err(PackError::AmaxLength { expected: 2, actual: 1 }));
    assert!(
        amax(vec![9.0, 1e-3])
            .unwrap_err()
            .to_string()
            .starts_with("amax 0.001 given for a weight whose own is")
    );
    assert_eq!(amax(vec![9.0, 9.0]), Ok(()));
}
