//! Unmodified linear layers with packed weights.
mod by_hand;

use burn::{
    backend::Flex,
    nn::{Linear, LinearConfig},
    tensor::{DType, Tensor, TensorPrimitive, module::linear},
};
use burn_nvfp4::{
    Activation, Compensation, Granularity, Nvfp4, Nvfp4Backend, Nvfp4QTensor, Nvfp4Tensor, OuterScaleConvention,
    PackLinears, PackedWeight, Precision, Rac, ResidualMask, Selection, Storage, WeightFormat, pack, packed_weight,
};
use by_hand::{B, bits, tensor, values};

fn layer(d_in: usize, d_out: usize, bias: bool) -> Linear<B> {
    let mut layer = LinearConfig::new(d_in, d_out)
        .with_bias(bias)
        .init::<B>(&Default::default());
    layer.weight = layer.weight.map(|_| tensor(1, [d_in, d_out]));
    layer.bias = layer.bias.map(|bias| bias.map(|_| tensor(2, [d_out])));
    layer
}

fn precisions() -> Vec<Precision> {
    let rac = |selection, granularity, fraction| {
        Precision::W4A4Rac(Rac {
            selection,
            granularity,
            fraction,
        })
    };
    vec![
        Precision::W4A16,
        Precision::W4A4,
        Precision::W4A4Rac(Rac::default()),
        rac(Selection::PerToken, Granularity::Channel, 0.5),
        rac(Selection::PerToken, Granularity::Block16, 0.25),
        rac(Selection::Calibrated, Granularity::Channel, 0.5),
        Precision::Fp8,
    ]
}

fn mask(d_in: usize) -> ResidualMask {
    ResidualMask::from_channels(&(0..d_in).map(|c| c % 3 == 0).collect::<Vec<_>>())
}

fn packed(layer: Linear<B>, precision: &Precision) -> Linear<B> {
    let d_in = layer.weight.dims()[0];
    let packer = PackLinears::default()
        .precision(precision.clone())
        .residual_mask("", mask(d_in));
    packer.pack(layer).unwrap().0
}

/// The matmul bound of the numerics: `(K + 8) · 2^-23 · Σ|x̂·ŵ|`, with x̂ and ŵ from fake quantization.
fn assert_within_bound(y: &[f32], x_hat: &[f32], w_hat: &[f32], [tokens, k, n]: [usize; 3]) {
    for t in 0..tokens {
        for c in 0..n {
            let products = (0..k).map(|i| f64::from(x_hat[t * k + i]) * f64::from(w_hat[i * n + c]));
            let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
            let bound = (k as f64 + 8.0) * 2f64.powi(-23) * size;
            let error = (f64::from(y[t * n + c]) - sum).abs();
            assert!(error <= bound, "[{t}, {c}]: error {error:e}, bound {bound:e}");
        }
    }
}

#[test]
fn every_precision_is_the_product_of_fake_quantized_operands() {
    for precision in precisions() {
        let dense = layer(64, 24, false);
        let x = tensor::<B, 2>(3, [5, 64]);
        let packed = packed(dense.clone(), &precision);
        let weight = packed_weight(&packed.weight.val()).unwrap();
        let activation = precision.activation(Some(&mask(64))).unwrap();
        assert_eq!(*weight.activation(), activation, "{precision}");

        let y = values(&packed.forward(x.clone()));
        let dense_x = x.into_primitive().tensor().dense();
        let x_hat = Flex::with_floats(&Flex::fake_quantize_activations(dense_x, &activation), <[f32]>::to_vec);
        let dense_w = dense.weight.val().into_primitive().tensor().dense();
        let w_hat = Flex::fake_quantize_weight(dense_w, precision.weight_format().unwrap(), None);
        let w_hat = Flex::with_floats(&w_hat, <[f32]>::to_vec);
        assert_eq!(
            w_hat,
            values(&packed.weight.val()),
            "{precision}: the packed weight decodes to the QAT weight"
        );
        assert_within_bound(&y, &x_hat, &w_hat, [5, 64, 24]);
    }
}

#[test]
fn input_of_one_to_four_dimensions_with_and_without_bias() {
    for precision in precisions() {
        for bias in [false, true] {
            let layer = packed(layer(32, 10, bias), &precision);
            let x4 = tensor::<B, 4>(4, [2, 3, 2, 32]);
            let expected = bits(&by_hand::linear(&layer, x4.clone()));
            let y4 = layer.forward(x4.clone());
            assert_eq!(y4.dims(), [2, 3, 2, 10]);
            assert_eq!(bits(&y4), expected, "{precision}, bias {bias}");
            let y3 = layer.forward(x4.clone().reshape([6, 2, 32]));
            assert_eq!((y3.dims(), bits(&y3)), ([6, 2, 10], expected.clone()));
            let y2 = layer.forward(x4.clone().reshape([12, 32]));
            assert_eq!((y2.dims(), bits(&y2)), ([12, 10], expected.clone()));
            let first = x4.slice([0..1, 0..1, 0..1]).reshape([32]);
            let y1 = layer.forward(first);
            assert_eq!((y1.dims(), bits(&y1)), ([10], expected[..10].to_vec()));
        }
    }
}

#[test]
fn strided_and_offset_input() {
    let layer = packed(layer(32, 10, true), &Precision::W4A4);
    let x = tensor::<B, 3>(5, [32, 4, 6]);
    let strided = x.clone().swap_dims(0, 2); // [6, 4, 32], last stride 24
    let copied = Tensor::<B, 3>::from_data(strided.to_data(), &Default::default());
    assert_eq!(bits(&layer.forward(strided)), bits(&layer.forward(copied)));
    let x = tensor::<B, 2>(6, [9, 32]);
    let offset = layer.forward(x.clone().slice(3..7));
    assert_eq!(bits(&offset), bits(&layer.forward(x).slice(3..7)));
}

#[test]
fn zero_rows_give_zero_rows() {
    for precision in precisions() {
        let layer = packed(layer(32, 10, true), &precision);
        let x = Tensor::<B, 3>::zeros([2, 0, 32], &Default::default());
        assert_eq!(layer.forward(x).dims(), [2, 0, 10]);
    }
}

#[test]
fn half_precision_input_gets_one_cast_at_the_end() {
    let layer = packed(layer(32, 10, true), &Precision::W4A4);
    let x = tensor::<B, 2>(7, [3, 32]).cast(DType::F16);
    let y = layer.forward(x.clone());
    assert_eq!(y.dtype(), DType::F16);
    let wide = layer.forward(x.cast(DType::F32));
    assert_eq!(y.into_data(), wide.cast(DType::F16).into_data());
}

#[test]
fn a_row_depends_on_no_other_row() {
    for precision in precisions() {
        let layer = packed(layer(64, 24, true), &precision);
        let x = tensor::<B, 2>(8, [7, 64]);
        let all = layer.forward(x.clone());
        let scaled = x.clone().slice_assign(0..1, x.clone().slice(0..1) * 1e4);
        for row in 1..7 {
            let one = bits(&layer.forward(x.clone().slice(row..row + 1)));
            assert_eq!(one, bits(&all.clone().slice(row..row + 1)), "{precision}");
            assert_eq!(
                one,
                bits(&layer.forward(scaled.clone()).slice(row..row + 1)),
                "{precision}"
            );
        }
    }
}

#[test]
fn a_row_with_nan_or_infinity_is_nan_and_alone() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let layer = packed(layer(32, 10, true), &Precision::W4A4);
        let x = tensor::<B, 2>(9, [3, 32]);
        let clean = layer.forward(x.clone());
        let y = layer.forward(x.slice_assign([1..2, 4..5], Tensor::full([1, 1], bad, &Default::default())));
        assert!(values(&y.clone().slice(1..2)).iter().all(|y| y.is_nan()), "{bad}");
        for row in [0, 2] {
            assert_eq!(
                bits(&y.clone().slice(row..row + 1)),
                bits(&clean.clone().slice(row..row + 1)),
                "{bad}"
            );
        }
    }
}

#[test]
fn matmul_and_the_linear_function_are_the_layer() {
    let layer = packed(layer(32, 10, false), &Precision::W4A4);
    let weight = layer.weight.val();
    let x = tensor::<B, 3>(10, [2, 3, 32]);
    let expected = bits(&layer.forward(x.clone()));
    assert_eq!(bits(&x.clone().matmul(weight.clone().unsqueeze())), expected);
    assert_eq!(bits(&linear(x.clone(), weight.clone(), None)), expected);
    // Transposed twice, and through leading ones and back.
    let view = weight
        .transpose()
        .unsqueeze_dims::<4>(&[0, 0])
        .swap_dims(2, 3)
        .reshape([1, 32, 10])
        .squeeze_dim(0);
    assert!(packed_weight(&view).is_some());
    assert_eq!(bits(&linear(x, view, None)), expected);
}

#[test]
fn a_product_with_the_transposed_weight_uses_its_values() {
    let layer = packed(layer(32, 48, false), &Precision::W4A4);
    let dense = Tensor::<B, 2>::from_data(layer.weight.val().to_data(), &Default::default());
    let x = tensor::<B, 2>(11, [5, 48]);
    let expected = bits(&x.clone().matmul(dense.transpose()));
    let transposed = layer.weight.val().transpose();
    assert!(packed_weight(&transposed).is_some_and(|w| w.is_transposed()));
    assert_eq!(bits(&x.clone().matmul(transposed.clone())), expected);
    assert_eq!(bits(&linear(x, transposed, None)), expected);
}

#[test]
fn a_transposed_view_of_a_square_weight_is_not_the_weight() {
    let layer = packed(layer(32, 32, false), &Precision::W4A4);
    let x = tensor::<B, 2>(12, [5, 32]);
    let dense = Tensor::<B, 2>::from_data(layer.weight.val().to_data(), &Default::default()).transpose();
    assert_eq!(
        bits(&x.clone().matmul(layer.weight.val().transpose())),
        bits(&x.matmul(dense))
    );
}

#[test]
fn a_stack_of_weights_multiplies_group_by_group() {
    let stack = tensor::<B, 3>(13, [3, 32, 10]);
    let packed = pack(stack.clone(), &Precision::W4A4, None, None).unwrap();
    let x = tensor::<B, 4>(14, [2, 3, 5, 32]);
    let y = x.clone().matmul(packed.clone().unsqueeze());
    let broadcast = x.clone().slice([0..2, 1..2]).matmul(packed.unsqueeze());
    for group in 0..3 {
        let weight = stack.clone().slice(group..group + 1).reshape([32, 10]);
        let weight = pack(weight, &Precision::W4A4, None, None).unwrap();
        let part = |x: Tensor<B, 4>| bits(&x.reshape([2 * 5, 32]).matmul(weight.clone()));
        let own = x.clone().slice([0..2, group..group + 1]);
        assert_eq!(bits(&y.clone().slice([0..2, group..group + 1])), part(own));
        let shared = x.clone().slice([0..2, 1..2]);
        assert_eq!(bits(&broadcast.clone().slice([0..2, group..group + 1])), part(shared));
    }
}

#[test]
fn groups_share_an_outer_scale_by_their_amax() {
    let device = Default::default();
    let w = tensor::<B, 2>(15, [32, 10]);
    let amax = Tensor::<B, 1>::from_floats([7.5], &device);
    let shared = pack(w.clone(), &Precision::W4A16, Some(amax), None).unwrap();
    assert_eq!(packed_weight(&shared).unwrap().outer_scales(), [1.0 / (2688.0 / 7.5)]);
    let own = values(&w.clone().abs().max())[0];
    let alone = pack(w, &Precision::W4A16, None, None).unwrap();
    assert_eq!(packed_weight(&alone).unwrap().outer_scales(), [1.0 / (2688.0 / own)]);
}

#[test]
fn a_setting_can_change_without_packing_anew() {
    let layer = packed(layer(32, 10, false), &Precision::W4A4);
    let weight = packed_weight(&layer.weight.val()).unwrap();
    let setting = Activation::Compensated(Compensation::All);
    let other = weight.clone().with_activation(setting.clone()).unwrap();
    assert_eq!((other.codes(), other.activation()), (weight.codes(), &setting));
    assert_eq!(*weight.activation(), Activation::Nvfp4, "the first keeps its own");
    let foreign = Activation::Compensated(Compensation::Mask(mask(48)));
    let error = other.with_activation(foreign).unwrap_err().to_string();
    assert_eq!(error, "expected a residual mask over d_in = 32 channels, got 48");
}

#[test]
fn an_outer_scale_may_divide() {
    // compressed-tensors' convention: the same scale, rounded elsewhere.
    let w = packed_weight(&pack(tensor::<B, 2>(16, [32, 10]), &Precision::W4A16, None, None).unwrap()).unwrap();
    let reciprocal = 1.0 / w.outer_scales()[0];
    let outer_scales = Tensor::<Flex, 1>::from_floats([reciprocal], &Default::default())
        .into_primitive()
        .tensor();
    let storage = Storage {
        outer_scales,
        convention: OuterScaleConvention::Divide,
        ..w.storage().clone()
    };
    let divided = PackedWeight::new(storage, 2);
    let (codes, scales) = (divided.codes(), divided.block_scales());
    let decoded = Flex::with_floats(&Flex::unpack_weight(&divided), <[f32]>::to_vec);
    for row in 0..10 {
        for c in 0..32 {
            let at = row * 32 + c;
            let code = codes[at / 2] >> (4 * (at % 2)) & 15;
            let step = kernels_cubecl::e4m3::decode(scales[at / 16]) / reciprocal;
            assert_eq!(decoded[c * 10 + row], kernels_cubecl::e2m1::decode(code) * step);
        }
    }
    let quantized = Nvfp4QTensor::Lazy {
        tensor: Nvfp4Tensor::Packed(divided),
        scheme: WeightFormat::Nvfp4.scheme(),
    };
    let data = Tensor::<B, 2>::from_primitive(TensorPrimitive::QFloat(quantized)).into_data();
    let back = packed_weight(&Tensor::<B, 2>::from_data(data, &Default::default())).unwrap();
    assert_eq!(
        back.storage().convention,
        OuterScaleConvention::Divide,
        "records keep the convention"
    );
}

#[test]
#[should_panic(expected = "input [3, 48] does not match the packed weight [32, 10]: expected a last dimension of 32")]
fn input_of_another_width_is_refused_with_both_shapes() {
    packed(layer(32, 10, false), &Precision::W4A4).forward(tensor::<B, 2>(16, [3, 48]));
}

#[test]
fn a_dense_weight_always_runs_dense() {
    let layer = layer(64, 32, true);
    let x = tensor::<B, 2>(17, [4, 64]);
    let plain = |t: Tensor<B, 2>| Tensor::<Flex, 2>::from_data(t.to_data(), &Default::default());
    let w = plain(layer.weight.val());
    let bias = Tensor::<Flex, 1>::from_data(layer.bias.as_ref().unwrap().val().to_data(), &Default::default());
    assert_eq!(bits(&layer.forward(x.clone())), bits(&linear(plain(x), w, Some(bias))));
}

#[test]
fn packing_keeps_no_dense_primitive() {
    let layer = packed(layer(64, 32, true), &Precision::W4A4);
    match layer.weight.val().into_primitive() {
        TensorPrimitive::<Nvfp4<Flex>>::Float(Nvfp4Tensor::Packed(weight)) => {
            assert_eq!(weight.bytes(), 64 * 32 / 2 + 64 * 32 / 16 + 4);
        }
        other => panic!("{other:?}"),
    }
}
