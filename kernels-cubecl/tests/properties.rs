//! What no table lists: properties of quantization and products for whatever input.
use kernels_cubecl::nvfp4::{self, Operand};
use kernels_cubecl::{
    Activation, BLOCK, Compensation, Fp8View, Granularity, Nvfp4View, OuterScale, ParameterType, ResidualMask,
    WeightLayout, WeightRecipe, WeightView, amax, e2m1, e4m3, encode_scale, host,
};
use proptest::prelude::*;

/// Values as tensors hold them: a spread of magnitudes, zeros of both signs.
fn moderate() -> BoxedStrategy<f32> {
    prop_oneof![
        8 => -4f32..4.0,
        2 => (-4f32..4.0, -12i32..6).prop_map(|(x, e)| x * 2f32.powi(e)),
        1 => prop_oneof![Just(0.0), Just(-0.0), Just(100.0f32), Just(-57.25)],
        1 => (-64i32..64).prop_map(|n| n as f32 / 8.0),
    ]
    .boxed()
}

/// Any finite value, subnormal and largest included.
fn finite() -> BoxedStrategy<f32> {
    prop_oneof![
        4 => moderate(),
        2 => any::<u32>().prop_map(f32::from_bits).prop_map(|x| if x.is_finite() { x } else { 0.0 }),
        1 => prop_oneof![Just(f32::MAX), Just(f32::MIN), Just(f32::MIN_POSITIVE), Just(1e-45f32)],
    ]
    .boxed()
}

/// A matrix of 1 to `rows` rows and 1 to 12 blocks, most rows of one magnitude.
fn matrix(rows: usize, value: BoxedStrategy<f32>) -> impl Strategy<Value = (Vec<f32>, usize, usize)> {
    (1..=rows, 1..=12usize).prop_flat_map(move |(rows, blocks)| {
        let k = blocks * BLOCK;
        (prop::collection::vec(value.clone(), rows * k), Just(rows), Just(k))
    })
}

fn activation(k: usize) -> impl Strategy<Value = Activation> {
    let granularity = prop_oneof![
        Just(Granularity::Channel),
        Just(Granularity::Block16),
        Just(Granularity::Block64)
    ];
    prop_oneof![
        Just(Activation::Full),
        Just(Activation::Fp8),
        Just(Activation::Nvfp4),
        Just(Activation::Compensated(Compensation::All)),
        prop::collection::vec(any::<bool>(), k)
            .prop_map(|mask| Activation::Compensated(Compensation::Mask(ResidualMask::from_channels(&mask)))),
        (granularity, 0.01f32..=1.0).prop_map(|(granularity, fraction)| {
            Activation::Compensated(Compensation::PerToken { granularity, fraction })
        }),
    ]
}

fn with_activation(
    rows: usize,
    value: BoxedStrategy<f32>,
) -> impl Strategy<Value = (Vec<f32>, usize, usize, Activation)> {
    matrix(rows, value).prop_flat_map(|(x, rows, k)| (Just(x), Just(rows), Just(k), activation(k)))
}

/// `n` values from a seed, of magnitudes from 2^-8 to 2^4: large operands need no shrinking.
fn seeded(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state >> 32
    };
    (0..n)
        .map(|_| (next() as f32 / (1u64 << 31) as f32 - 1.0) * 2f32.powi((next() % 13) as i32 - 8))
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn fake_quantize(x: &[f32], tokens: usize, k: usize, activation: &Activation) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len()];
    host::fake_quantize_activations(x, tokens, k, activation, &mut out).unwrap();
    out
}

fn dequantize(w: WeightView, layout: WeightLayout) -> Vec<f32> {
    let mut out = vec![f32::NAN; w.rows() * w.k()];
    host::dequantize_weight(w, layout, &mut out).unwrap();
    out
}

fn matmul(x: &[f32], tokens: usize, w: WeightView, activation: &Activation) -> Vec<f32> {
    let mut out = vec![f32::NAN; tokens * w.rows()];
    host::matmul(x, tokens, w, activation, &mut out).unwrap();
    out
}

fn transpose(x: &[f32], rows: usize, k: usize) -> Vec<f32> {
    (0..rows * k).map(|at| x[at % rows * k + at / rows]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn activations_equal_their_definition((x, tokens, k, activation) in with_activation(4, finite())) {
        let quick = fake_quantize(&x, tokens, k, &activation);
        let slow = match &activation {
            Activation::Full => x.clone(),
            Activation::Fp8 => x
                .chunks(k)
                .flat_map(|row| {
                    let scale = Some(amax(row) / 448.0).filter(|scale| *scale != 0.0).unwrap_or(1.0);
                    row.iter().map(move |x| e4m3::decode(e4m3::encode(x / scale)) * scale)
                })
                .collect(),
            _ => host::quantize_activations(&x, tokens, k, activation.compensation()).unwrap().decode(),
        };
        prop_assert_eq!(bits(&quick), bits(&slow));
    }

    #[test]
    fn weights_equal_their_definition((w, rows, k) in matrix(40, finite()), headroom in 1f32..4.0) {
        let group_amax = Some(amax(&w) * headroom).filter(|amax| amax.is_finite());
        let scale = encode_scale(group_amax.unwrap_or(amax(&w)));
        let blocks: Vec<_> = w.chunks(BLOCK).map(|x| nvfp4::encode_block(x, scale, Operand::Weight)).collect();
        let codes: Vec<u8> = blocks.iter().flat_map(|block| nvfp4::pack(&block.codes).collect::<Vec<_>>()).collect();
        let block_scales: Vec<u8> = blocks.iter().map(|block| block.scale).collect();
        let values: Vec<f32> = blocks
            .iter()
            .flat_map(|block| {
                let step = OuterScale::Multiply(1.0 / scale).step(e4m3::decode(block.scale));
                block.codes.map(|code| nvfp4::decode(code, step))
            })
            .collect();
        for layout in [WeightLayout::RowMajor, WeightLayout::Transposed] {
            let place = |w: &[f32]| match layout {
                WeightLayout::RowMajor => w.to_vec(),
                WeightLayout::Transposed => transpose(w, rows, k),
            };
            let packed = host::quantize_weight(&place(&w), rows, k, layout, group_amax).unwrap();
            prop_assert_eq!(&packed.codes, &codes);
            prop_assert_eq!(&packed.block_scales, &block_scales);
            let decoded = dequantize(WeightView::Nvfp4(packed.view()), layout);
            prop_assert_eq!(bits(&decoded), bits(&place(&values)));
            let mut rounded = vec![f32::NAN; w.len()];
            host::fake_quantize_weight(&place(&w), rows, k, layout, group_amax, &mut rounded).unwrap();
            prop_assert_eq!(bits(&rounded), bits(&decoded));
        }
    }

    #[test]
    fn weights_equal_the_definition_of_each_recipe(
        (w, rows, k) in matrix(40, finite()),
        group in prop_oneof![Just(1f32), 1f32..1000.0],
    ) {
        let group_amax = (amax(&w) * group).min(f32::MAX);
        for recipe in [
            WeightRecipe::TransformerEngine,
            WeightRecipe::ModelOpt,
            WeightRecipe::CompressedTensors(ParameterType::F32),
            WeightRecipe::CompressedTensors(ParameterType::Bf16),
        ] {
            let blocks = w.chunks(BLOCK).map(|block| recipe.encode_block(block, group_amax));
            let (scales, codes): (Vec<u8>, Vec<_>) = blocks.map(|block| (block.scale, block.codes)).unzip();
            let codes: Vec<u8> = codes.iter().flat_map(|codes| nvfp4::pack(codes)).collect();
            for (layout, w) in [(WeightLayout::RowMajor, &w), (WeightLayout::Transposed, &transpose(&w, rows, k))] {
                let packed = host::quantize_weight_by(recipe, w, rows, k, layout, Some(group_amax)).unwrap();
                prop_assert_eq!(packed.outer_scale, recipe.outer_scale(group_amax));
                prop_assert_eq!(&packed.block_scales, &scales);
                prop_assert_eq!(&packed.codes, &codes);
            }
        }
    }

    #[test]
    fn fp8_weights_equal_their_definition(
        rows in 1..40usize,
        k in 1..70usize, // not only whole blocks
        seed in any::<u64>(),
    ) {
        let w = &seeded(rows * k, seed);
        let scale = |row: &[f32]| Some(amax(row) / 448.0).filter(|scale| *scale != 0.0).unwrap_or(1.0);
        let scales: Vec<f32> = w.chunks(k).map(scale).collect();
        let codes: Vec<u8> = (0..rows * k).map(|at| e4m3::encode(w[at] / scales[at / k])).collect();
        let values: Vec<f32> = (0..rows * k).map(|at| e4m3::decode(codes[at]) * scales[at / k]).collect();
        for (layout, w) in [(WeightLayout::RowMajor, w.to_vec()), (WeightLayout::Transposed, transpose(w, rows, k))] {
            let packed = host::quantize_weight_fp8(&w, rows, k, layout).unwrap();
            prop_assert_eq!(&packed.codes, &codes);
            prop_assert_eq!(bits(&packed.channel_scales), bits(&scales));
        }
        let view = Fp8View { rows, k, codes: &codes, channel_scales: &scales };
        prop_assert_eq!(bits(&dequantize(WeightView::Fp8(view), WeightLayout::RowMajor)), bits(&values));
        let transposed = dequantize(WeightView::Fp8(view), WeightLayout::Transposed);
        prop_assert_eq!(bits(&transposed), bits(&transpose(&values, rows, k)));
    }

    #[test]
    fn every_byte_of_a_foreign_file_decodes_by_its_maker_s_rule(
        codes in prop::collection::vec(any::<u8>(), 3 * 24),
        block_scales in prop::collection::vec(0u8..0x7f, 3 * 3),
        scale in 1e-6f32..1e6,
    ) {
        let at = |i: usize| (e2m1::decode(nvfp4::unpack(&codes, i)), e4m3::decode(block_scales[i / BLOCK]));
        let multiplied: Vec<f32> = (0..3 * 48).map(|i| at(i).0 * (at(i).1 * scale)).collect();
        let divided: Vec<f32> = (0..3 * 48).map(|i| at(i).0 * (at(i).1 / scale)).collect();
        for (outer_scale, expected) in [(OuterScale::Multiply(scale), multiplied), (OuterScale::Divide(scale), divided)] {
            let view = Nvfp4View { rows: 3, k: 48, codes: &codes, block_scales: &block_scales, outer_scale };
            let values = dequantize(WeightView::Nvfp4(view), WeightLayout::RowMajor);
            prop_assert_eq!(bits(&values), bits(&expected));
        }
    }

    #[test]
    fn powers_of_two_change_nothing_but_the_outer_scale((x, tokens, k) in matrix(3, moderate()), shift in -60i32..60) {
        let shifted: Vec<f32> = x.iter().map(|x| x * 2f32.powi(shift)).collect();
        let quantize = |x: &[f32]| host::quantize_activations(x, tokens, k, Some(&Compensation::All)).unwrap();
        let (plain, moved) = (quantize(&x), quantize(&shifted));
        prop_assert_eq!(&plain.first, &moved.first);
        prop_assert_eq!(&plain.residual, &moved.residual);
        for (row, (plain, moved)) in plain.encode_scales.iter().zip(&moved.encode_scales).enumerate() {
            let zero = amax(&x[row * k..][..k]) == 0.0;
            prop_assert_eq!(*moved, if zero { 1.0 } else { plain * 2f32.powi(-shift) });
        }

        let pack = |w: &[f32]| host::quantize_weight(w, tokens, k, WeightLayout::RowMajor, None).unwrap();
        let (plain, moved) = (pack(&x), pack(&shifted));
        prop_assert_eq!(&plain.codes, &moved.codes);
        prop_assert_eq!(&plain.block_scales, &moved.block_scales);
    }

    #[test]
    fn errors_stay_within_their_bounds((x, tokens, k) in matrix(3, moderate())) {
        let quantized = host::quantize_activations(&x, tokens, k, Some(&Compensation::All)).unwrap();
        let first = quantized.decode_pass(&quantized.first);
        let both = quantized.decode();
        let second_scales = &quantized.residual.as_ref().unwrap().pass.block_scales;
        for (b, block) in x.chunks(BLOCK).enumerate() {
            let largest = amax(block);
            let slack = 1.0 + 1e-6; // the comparison's own roundings
            let normal = |byte: u8| e4m3::decode(byte) >= 2f32.powi(-6);
            let subnormal = 6.0 * 2f32.powi(-10) / quantized.encode_scales[b * BLOCK / k];
            let t = 1.0625 * largest / 6.0;
            let residual = (0..BLOCK).map(|i| (block[i] - first[b * BLOCK + i]).abs()).fold(0.0, f32::max);
            let (first_bound, second_bound) = if normal(quantized.first.block_scales[b]) && normal(second_scales[b]) {
                (t, 1.13 * largest / 36.0)
            } else {
                (t + subnormal, 1.0625 * residual / 6.0 + subnormal)
            };
            for i in 0..BLOCK {
                prop_assert!((block[i] - first[b * BLOCK + i]).abs() <= first_bound * slack, "first pass, block {}", b);
                prop_assert!((block[i] - both[b * BLOCK + i]).abs() <= second_bound * slack, "second pass, block {}", b);
            }
        }
    }

    #[test]
    fn products_agree_with_double_precision(
        (x, tokens, k, activation) in with_activation(9, moderate()),
        rows in 1..70usize,
        seed in any::<u64>(),
        fp8 in any::<bool>(),
        divide in any::<bool>(),
    ) {
        let w = &seeded(rows * k, seed);
        let mut packed = host::quantize_weight(w, rows, k, WeightLayout::RowMajor, None).unwrap();
        if let (true, OuterScale::Multiply(scale)) = (divide, packed.outer_scale) {
            packed.outer_scale = OuterScale::Divide(1.0 / scale);
        }
        let packed_fp8 = host::quantize_weight_fp8(w, rows, k, WeightLayout::RowMajor).unwrap();
        let view = if fp8 { WeightView::Fp8(packed_fp8.view()) } else { WeightView::Nvfp4(packed.view()) };
        let out = matmul(&x, tokens, view, &activation);
        let xq = fake_quantize(&x, tokens, k, &activation);
        let wq = dequantize(view, WeightLayout::RowMajor);
        for t in 0..tokens {
            for n in 0..rows {
                let products = (0..k).map(|c| f64::from(xq[t * k + c]) * f64::from(wq[n * k + c]));
                let (sum, magnitude) = products.fold((0.0, 0.0), |(sum, magnitude), p| (sum + p, magnitude + p.abs()));
                let bound = (k + 8) as f64 * 2f64.powi(-23) * magnitude + 1e-44;
                let error = (f64::from(out[t * rows + n]) - sum).abs();
                prop_assert!(error <= bound, "row {}, column {}: {} off, {} allowed", t, n, error, bound);
            }
        }
    }

    #[test]
    fn a_row_s_bits_do_not_depend_on_its_batch(
        (x, tokens, k, activation) in with_activation(21, moderate()),
        seed in any::<u64>(),
    ) {
        let packed = host::quantize_weight(&seeded(40 * k, seed), 40, k, WeightLayout::RowMajor, None).unwrap();
        let view = WeightView::Nvfp4(packed.view());
        let together = matmul(&x, tokens, view, &activation);
        let mut alone = Vec::new();
        for row in x.chunks(k) {
            alone.extend(matmul(row, 1, view, &activation));
        }
        prop_assert_eq!(bits(&together), bits(&alone));
        let mut energy = vec![0.0; k];
        host::accumulate_residual_energy(&x, tokens, k, Granularity::Channel, &mut energy).unwrap();
        let mut streamed = vec![0.0; k];
        for row in x.chunks(k) {
            host::accumulate_residual_energy(row, 1, k, Granularity::Channel, &mut streamed).unwrap();
        }
        prop_assert_eq!(bits(&energy), bits(&streamed));
    }

    #[test]
    fn packed_activations_give_the_same_product((x, tokens, k, activation) in with_activation(5, finite())) {
        prop_assume!(!matches!(activation, Activation::Full | Activation::Fp8));
        let w: Vec<f32> = (0..24 * k).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
        let packed = host::quantize_weight(&w, 24, k, WeightLayout::RowMajor, None).unwrap();
        let view = WeightView::Nvfp4(packed.view());
        let quantized = host::quantize_activations(&x, tokens, k, activation.compensation()).unwrap();
        let mut out = vec![f32::NAN; tokens * 24];
        host::matmul_quantized(&quantized, view, &mut out).unwrap();
        prop_assert_eq!(bits(&out), bits(&matmul(&x, tokens, view, &activation)));
    }

    #[test]
    fn groups_are_products_of_their_own(
        counts in prop::collection::vec(0..9usize, 0..6),
        seed in any::<u64>(),
    ) {
        let (rows, k) = (48, 32);
        let tokens: usize = counts.iter().sum();
        let packed: Vec<_> = seeded(counts.len() * rows * k, seed)
            .chunks(rows * k)
            .map(|w| host::quantize_weight(w, rows, k, WeightLayout::RowMajor, None).unwrap())
            .collect();
        let views: Vec<_> = packed.iter().map(|w| WeightView::Nvfp4(w.view())).collect();
        let x = &seeded(tokens * k, !seed);
        let activation = Activation::Compensated(Compensation::All);
        let mut grouped = vec![f32::NAN; tokens * rows];
        host::grouped_matmul(x, &counts, &views, &activation, &mut grouped[..if views.is_empty() { 0 } else { tokens * rows }])
            .unwrap();
        let (mut separate, mut first) = (Vec::new(), 0);
        for (count, view) in counts.iter().zip(&views) {
            separate.extend(matmul(&x[first * k..(first + count) * k], *count, *view, &activation));
            first += count;
        }
        prop_assert_eq!(bits(&grouped), bits(&separate));
    }

    #[test]
    fn a_row_that_is_not_finite_is_seen_and_stays_alone(
        (mut x, tokens, k, activation) in with_activation(9, moderate()),
        at in any::<prop::sample::Index>(),
        poison in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)],
    ) {
        prop_assume!(activation != Activation::Full);
        let w: Vec<f32> = (0..20 * k).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
        let packed = host::quantize_weight(&w, 20, k, WeightLayout::RowMajor, None).unwrap();
        let view = WeightView::Nvfp4(packed.view());
        let clean = (matmul(&x, tokens, view, &activation), fake_quantize(&x, tokens, k, &activation));
        let at = at.index(x.len());
        x[at] = poison;
        let dirty = (matmul(&x, tokens, view, &activation), fake_quantize(&x, tokens, k, &activation));
        for row in 0..tokens {
            let (product, values) = (&dirty.0[row * 20..][..20], &dirty.1[row * k..][..k]);
            if row == at / k {
                prop_assert!(product.iter().chain(values).all(|value| value.is_nan()));
            } else {
                prop_assert_eq!(bits(product), bits(&clean.0[row * 20..][..20]));
                prop_assert_eq!(bits(values), bits(&clean.1[row * k..][..k]));
            }
        }
    }
}
