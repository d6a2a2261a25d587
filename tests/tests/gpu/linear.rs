//! Linear layers of Burn with packed weights.
use crate::support::{
    Stack, activations, assert_product, bits, data, float, lazy, on, on_flex, read, settings, splits_f32, tensor,
    tolerance, values,
};
use burn::{
    backend::Flex,
    tensor::{DType, Tensor, TensorData, module::linear},
};
use burn_backend::TensorMetadata;
use burn_nvfp4::{
    Activation, Compensation, Nvfp4, Nvfp4Backend, OuterScaleConvention, PackedWeight, ResidualMask, Storage,
    WeightFormat, packed_weight,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

pub fn every_precision_is_within_the_bound_of_the_exact_product<B: Stack>() {
    for [tokens, k, n] in [[5, 64, 24], [33, 208, 40], [1, 48, 70]] {
        for (format, activation) in settings(k) {
            let (x, w) = (activations(1, [tokens, k]), data(2, [k, n]));
            let y = B::packed_linear(float::<B>(&x), &on::<B>(&w, format, &activation));
            let x_hat = Flex::fake_quantize_activations(float::<Flex>(&x), &activation);
            let w_hat = Flex::fake_quantize_weight(float::<Flex>(&w), format, None);
            let what = format!("{format}, {activation:?}, {tokens} x {k} x {n}");
            assert_product(
                &read::<B>(&y),
                &read::<Flex>(&x_hat),
                &read::<Flex>(&w_hat),
                [tokens, k, n],
                tolerance::<B>(&activation, k),
                &what,
            );
        }
    }
}

pub fn input_of_one_to_four_dimensions_with_and_without_bias<B: Stack>() {
    for (format, activation) in settings(32) {
        let weight = on_flex(&data(3, [32, 10]), format, &activation);
        let here = on::<B>(&data(3, [32, 10]), format, &activation);
        let bias = data(4, [10]);
        for biased in [false, true] {
            let layer = |x: Tensor<Nvfp4<B>, 4>, dims: Vec<usize>| {
                let (weight, bias) = (lazy::<B, 2>(here.clone()), biased.then(|| tensor::<Nvfp4<B>, 1>(&bias)));
                match dims[..] {
                    [a] => values(linear(x.reshape([a]), weight, bias)),
                    [a, b] => values(linear(x.reshape([a, b]), weight, bias)),
                    [a, b, c] => values(linear(x.reshape([a, b, c]), weight, bias)),
                    _ => values(linear(x, weight, bias)),
                }
            };
            let x = data(5, [2, 3, 2, 32]);
            let expected = linear(
                tensor::<Nvfp4<Flex>, 4>(&x),
                lazy::<Flex, 2>(weight.clone()),
                biased.then(|| tensor(&bias)),
            );
            let expected = values(expected);
            let x = tensor::<Nvfp4<B>, 4>(&x);
            let y = layer(x.clone(), vec![2, 3, 2, 32]);
            for (a, e) in y.iter().zip(&expected) {
                assert!((a - e).abs() < 4e-3, "{format}, {activation:?}: {a} for {e}");
            }
            assert_eq!(bits(&layer(x.clone(), vec![6, 2, 32])), bits(&y));
            assert_eq!(bits(&layer(x.clone(), vec![12, 32])), bits(&y));
            let first = x.slice([0..1, 0..1, 0..1]);
            assert_eq!(layer(first, vec![32]).len(), 10);
        }
    }
}

pub fn half_precision_comes_out_as_it_went_in<B: Stack>() {
    for (format, activation) in settings(64) {
        if format == WeightFormat::Fp8 || activation == Activation::Full {
            continue; // Burn's matmul rounds differently in each type.
        }
        let weight = on::<B>(&data(16, [64, 24]), format, &activation);
        for dtype in [DType::F16, DType::BF16] {
            if !B::supports_dtype(&Default::default(), dtype) {
                continue;
            }
            let half = |data: &TensorData| data.clone().convert_dtype(dtype);
            let (x, bias) = (half(&data(17, [5, 64])), half(&data(18, [24])));
            for biased in [false, true] {
                let product = |x: &TensorData, bias: &TensorData| {
                    let load = |data: &TensorData| B::float_from_data(data.clone(), &Default::default());
                    B::packed_linear_bias(load(x), &weight, biased.then(|| load(bias)))
                };
                let y = product(&x, &bias);
                assert_eq!(y.dtype(), dtype);
                // The sum in f32, then one rounding.
                let exact = product(&x.clone().convert::<f32>(), &bias.clone().convert::<f32>());
                let rounded = TensorData::new(read::<B>(&exact), [5, 24]).convert_dtype(dtype);
                let rounded = rounded.convert::<f32>().to_vec::<f32>().unwrap();
                assert_eq!(
                    bits(&read::<B>(&y)),
                    bits(&rounded),
                    "{activation:?}, {dtype:?}, {biased}"
                );
            }
        }
    }
}

pub fn another_mask_takes_the_place_of_the_one_in_use<B: Stack>() {
    let (x, w) = (float::<B>(&activations(19, [3, 64])), data(20, [64, 24]));
    let masked = |flag: fn(usize) -> bool| {
        let mask = ResidualMask::from_channels(&(0..64).map(flag).collect::<Vec<_>>());
        Activation::Compensated(Compensation::Mask(mask))
    };
    let settings = [
        masked(|c| c % 2 == 0),
        masked(|c| c < 16),
        Activation::Nvfp4,
        masked(|c| c % 2 == 0),
    ];
    let mut weight = on::<B>(&w, WeightFormat::Nvfp4, &settings[0]);
    for setting in settings {
        weight = weight.with_activation(setting.clone()).unwrap();
        let fresh = on::<B>(&w, WeightFormat::Nvfp4, &setting);
        let expected = bits(&read::<B>(&B::packed_linear(x.clone(), &fresh)));
        for _ in 0..2 {
            let y = read::<B>(&B::packed_linear(x.clone(), &weight));
            assert_eq!(bits(&y), expected, "{setting:?}");
        }
    }
}

pub fn strided_and_offset_input<B: Stack>() {
    let weight = on::<B>(&data(6, [32, 10]), WeightFormat::Nvfp4, &Activation::Nvfp4);
    let layer = |x: Tensor<Nvfp4<B>, 3>| values(linear(x, lazy::<B, 2>(weight.clone()), None));
    let strided = tensor::<Nvfp4<B>, 3>(&data(7, [32, 4, 6])).swap_dims(0, 2);
    let copied = tensor::<Nvfp4<B>, 3>(&strided.to_data());
    assert_eq!(bits(&layer(strided)), bits(&layer(copied)));
    let x = tensor::<Nvfp4<B>, 2>(&data(8, [9, 32]));
    let rows = |x: Tensor<Nvfp4<B>, 2>| values(linear(x, lazy::<B, 2>(weight.clone()), None));
    assert_eq!(bits(&rows(x.clone().slice(3..7))), bits(&rows(x.clone())[30..70]));
    let wide = tensor::<Nvfp4<B>, 2>(&data(9, [9, 80]));
    let middle = wide.clone().slice([0..9, 16..48]);
    let copied = tensor::<Nvfp4<B>, 2>(&middle.to_data());
    assert_eq!(bits(&rows(middle)), bits(&rows(copied)));
}

pub fn zero_rows_give_zero_rows<B: Stack>() {
    for (format, activation) in settings(32) {
        let weight = lazy::<B, 2>(on::<B>(&data(10, [32, 10]), format, &activation));
        // Neither zeros nor data: CubeCL 0.10 launches and uploads nothing empty on CUDA.
        let x = Tensor::<Nvfp4<B>, 3>::empty([2, 0, 32], &Default::default());
        let bias = Some(tensor(&data(11, [10])));
        assert_eq!(linear(x, weight, bias).dims(), [2, 0, 10], "{format}, {activation:?}");
    }
}

pub fn a_row_depends_on_no_other_row<B: Stack>() {
    for (format, activation) in settings(64) {
        if (format == WeightFormat::Fp8 || activation == Activation::Full) && !splits_f32::<B>() {
            continue; // Burn's matmul, whose kernel depends on the number of rows.
        }
        let weight = on::<B>(&data(12, [64, 24]), format, &activation);
        let product = |x: &TensorData| read::<B>(&B::packed_linear(float::<B>(x), &weight));
        let x = activations(13, [7, 64]);
        let all = product(&x);
        let x = x.to_vec::<f32>().unwrap();
        let scaled: Vec<f32> = x
            .iter()
            .enumerate()
            .map(|(i, v)| if i < 64 { v * 1e4 } else { *v })
            .collect();
        let scaled = product(&TensorData::new(scaled, [7, 64]));
        for row in 1..7 {
            let one = product(&TensorData::new(x[row * 64..][..64].to_vec(), [1, 64]));
            assert_eq!(bits(&one), bits(&all[row * 24..][..24]), "{activation:?}");
            assert_eq!(bits(&one), bits(&scaled[row * 24..][..24]), "{activation:?}");
        }
    }
}

pub fn a_row_with_nan_or_infinity_is_nan_and_alone<B: Stack>() {
    for (format, activation) in settings(48) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            if activation == Activation::Full {
                continue;
            }
            let weight = on::<B>(&data(14, [48, 10]), format, &activation);
            let product = |x: TensorData| read::<B>(&B::packed_linear(float::<B>(&x), &weight));
            let mut x = activations(15, [3, 48]).to_vec::<f32>().unwrap();
            let clean = product(TensorData::new(x.clone(), [3, 48]));
            x[48 + 4] = bad;
            let y = product(TensorData::new(x, [3, 48]));
            assert!(y[10..20].iter().all(|y| y.is_nan()), "{activation:?}, {bad}");
            assert_eq!(bits(&y[..10]), bits(&clean[..10]), "{activation:?}, {bad}");
            assert_eq!(bits(&y[20..]), bits(&clean[20..]), "{activation:?}, {bad}");
        }
    }
}

pub fn an_outer_scale_may_divide<B: Stack>() {
    fn divided<B: Nvfp4Backend>(weight: PackedWeight<B>) -> PackedWeight<B> {
        let reciprocal = 1.0 / weight.outer_scales()[0];
        let storage = Storage {
            outer_scales: float::<B>(&TensorData::new(vec![reciprocal], [1])),
            convention: OuterScaleConvention::Divide,
            ..weight.storage().clone()
        };
        PackedWeight::new(storage, 2)
    }
    let data = data(16, [48, 10]);
    for activation in [Activation::Full, Activation::Nvfp4] {
        let here = divided(on::<B>(&data, WeightFormat::Nvfp4, &activation));
        let there = divided(on_flex(&data, WeightFormat::Nvfp4, &activation));
        let w = read::<Flex>(&Flex::unpack_weight(&there));
        assert_eq!(bits(&read::<B>(&B::unpack_weight(&here))), bits(&w));
        let x = activations(17, [4, 48]);
        let y = read::<B>(&B::packed_linear(float::<B>(&x), &here));
        let x = read::<Flex>(&Flex::fake_quantize_activations(float::<Flex>(&x), &activation));
        assert_product(
            &y,
            &x,
            &w,
            [4, 48, 10],
            tolerance::<B>(&activation, 48),
            "a scale that divides",
        );
    }
}

pub fn a_transposed_weight_multiplies_with_its_values<B: Stack>() {
    let weight = lazy::<B, 2>(on::<B>(&data(18, [32, 48]), WeightFormat::Nvfp4, &Activation::Nvfp4));
    let transposed = weight.clone().transpose();
    assert!(packed_weight(&transposed).is_some_and(|w| w.is_transposed()));
    let x = tensor::<Nvfp4<B>, 2>(&data(19, [5, 48]));
    let w = values(transposed.clone());
    let y = values(x.clone().matmul(transposed));
    // Burn's own matmul, which takes TF32 where it can.
    let tolerance = if splits_f32::<B>() {
        2f64.powi(-10)
    } else {
        tolerance::<B>(&Activation::Full, 48)
    };
    assert_product(&y, &values(x), &w, [5, 48, 32], tolerance, "transposed");
}

pub fn input_of_another_width_is_refused_with_both_shapes<B: Stack>() {
    let weight = on::<B>(&data(20, [32, 10]), WeightFormat::Nvfp4, &Activation::Nvfp4);
    let x = float::<B>(&data(21, [3, 48]));
    let error = catch_unwind(AssertUnwindSafe(|| B::packed_linear(x, &weight)))
        .map(|_| ())
        .unwrap_err();
    let error = error.downcast_ref::<String>().unwrap();
    let expected = "input [3, 48] does not match the packed weight [32, 10]: expected a last dimension of 32";
    assert!(error.contains(expected), "{error}");
}
