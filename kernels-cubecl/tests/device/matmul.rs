//! Every route agrees with the host within the bound of the design, and a row's bits depend on that row alone.
use crate::{Client, Random, client, download, upload};
use kernels_cubecl::device::{Element, MatmulOptions, PackedWeight, Residual, Route, matmul, quantize};
use kernels_cubecl::{Compensation, Granularity, Nvfp4Weight, ResidualMask, WeightLayout, WeightView, host};

pub fn routes(client: &Client) -> Vec<Route> {
    Route::ALL
        .into_iter()
        .filter(|route| route.is_available(client))
        .collect()
}

fn pack(rows: usize, k: usize, seed: u64) -> Nvfp4Weight {
    host::quantize_weight(
        &Random::new(seed).weights(rows, k),
        rows,
        k,
        WeightLayout::RowMajor,
        None,
    )
    .unwrap()
}

/// Decoded weights, `[rows, k]`.
pub fn decode(w: &Nvfp4Weight) -> Vec<f64> {
    let mut values = vec![0.0; w.rows * w.k];
    host::dequantize_weight(WeightView::Nvfp4(w.view()), WeightLayout::RowMajor, &mut values).unwrap();
    values.into_iter().map(f64::from).collect()
}

/// `|Δ| ≤ (k + 8) · 2^-23 · Σ|x̂·ŵ|`, and NaN where the row is NaN.
pub fn assert_within_bound(name: &str, actual: &[f32], x: &[f32], w: &[f64], k: usize) {
    let (tokens, rows) = (x.len() / k, w.len() / k);
    for t in 0..tokens {
        for n in 0..rows {
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for (x, w) in x[t * k..][..k].iter().zip(&w[n * k..][..k]) {
                let product = f64::from(*x) * w;
                sum += product;
                magnitude += product.abs();
            }
            let (actual, bound) = (
                f64::from(actual[t * rows + n]),
                (k + 8) as f64 * 2f64.powi(-23) * magnitude,
            );
            let agrees = (actual - sum).abs() <= bound || sum.is_nan() && actual.is_nan();
            assert!(
                agrees,
                "{name}: token {t}, output {n}: {actual} for {sum}, bound {bound:e}"
            );
        }
    }
}

fn options(route: Route) -> MatmulOptions {
    MatmulOptions {
        route: Some(route),
        output: Element::F32,
    }
}

#[test]
fn every_route_agrees_with_the_host() {
    let Some(client) = client() else { return };
    let shapes = [
        (1, 1, 16),
        (1, 64, 64),
        (7, 70, 80),
        (8, 128, 512),
        (16, 40, 1024),
        (33, 96, 336),
        (130, 72, 128),
    ];
    for route in routes(&client) {
        for (tokens, rows, k) in shapes {
            let w = pack(rows, k, 2);
            let device_w = PackedWeight::from_host(&client, &[w.view()]).unwrap();
            let mut x = Random::new(tokens as u64).activations(tokens, k);
            if tokens > 4 {
                x[2 * k + 3] = f32::NAN;
                x[3 * k..4 * k].fill(0.0);
            }
            let matrix = upload(&client, Element::F32, &x, tokens, k);
            for compensation in [None, Some(Compensation::All)] {
                let name = format!("{route:?}, {tokens} x {rows} x {k}, {compensation:?}");
                let residual = Residual::new(&client, compensation.as_ref(), k).unwrap();
                let packed = quantize(&client, &matrix, &residual).unwrap();
                let y = matmul(&client, &packed, &device_w, options(route)).unwrap();
                let xq = host::quantize_activations(&x, tokens, k, compensation.as_ref())
                    .unwrap()
                    .decode();
                assert_within_bound(&name, &download(&client, &y), &xq, &decode(&w), k);
            }
        }
    }
}

/// The first rows of every batch size from 1 to 257 have the bits that they have alone.
#[test]
fn rows_do_not_depend_on_their_batch() {
    let Some(client) = client() else { return };
    let (rows, k, most) = (72, 320, 257);
    let w = pack(rows, k, 4);
    let device_w = PackedWeight::from_host(&client, &[w.view()]).unwrap();
    let x = Random::new(6).activations(most, k);
    // On a software device a sample of the sizes has to do.
    let sizes: Vec<usize> = if cfg!(feature = "cuda") {
        (1..=most).collect()
    } else {
        [
            1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257,
        ]
        .to_vec()
    };
    for route in routes(&client) {
        for compensation in [None, Some(Compensation::All)] {
            let residual = Residual::new(&client, compensation.as_ref(), k).unwrap();
            let product = |x: &[f32]| {
                let tokens = x.len() / k;
                let packed = quantize(&client, &upload(&client, Element::F32, x, tokens, k), &residual).unwrap();
                let y = download(&client, &matmul(&client, &packed, &device_w, options(route)).unwrap());
                y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let whole = product(&x);
            for &tokens in &sizes {
                let part = product(&x[..tokens * k]);
                assert!(
                    part == whole[..tokens * rows],
                    "{route:?}, {tokens} tokens, {compensation:?}"
                );
            }
            // Other neighbours, and another place in the batch.
            let mut moved = Random::new(7).activations(19, k);
            moved.extend(&x[..3 * k]);
            assert!(
                product(&moved)[19 * rows..] == whole[..3 * rows],
                "{route:?}: behind other rows"
            );
        }
    }
}

#[test]
fn outputs_of_other_types_are_rounded_once() {
    let Some(client) = client() else { return };
    let (tokens, rows, k) = (5, 48, 192);
    let w = PackedWeight::from_host(&client, &[pack(rows, k, 1).view()]).unwrap();
    let x = upload(&client, Element::F32, &Random::new(1).activations(tokens, k), tokens, k);
    let packed = quantize(&client, &x, &Residual::All).unwrap();
    for route in routes(&client) {
        let exact = download(&client, &matmul(&client, &packed, &w, options(route)).unwrap());
        for output in [Element::F16, Element::BF16] {
            let options = MatmulOptions {
                output,
                ..options(route)
            };
            match matmul(&client, &packed, &w, options) {
                Ok(y) => assert_eq!(
                    download(&client, &y),
                    crate::round_to(output, &exact),
                    "{route:?}, {output:?}"
                ),
                Err(error) => {
                    assert!(!output.is_native(&client), "{error}");
                    assert!(error.to_string().contains("not available"), "{error}");
                }
            }
        }
    }
}

/// Scales at the ends of f32 whose product f32 holds.
#[test]
fn scales_do_not_overflow_on_the_way() {
    let Some(client) = client() else { return };
    let k = 64;
    let magnitudes = [(3e38f32, 1e-30f32), (1e-30, 1e30), (1e30, 1e-38), (1e-20, 1e-17)];
    for route in routes(&client) {
        for (magnitude, weight) in magnitudes {
            let w = vec![weight; 16 * k];
            let w = host::quantize_weight(&w, 16, k, WeightLayout::RowMajor, None).unwrap();
            let x: Vec<f32> = (0..k).map(|i| magnitude / (i + 1) as f32).collect();
            let matrix = upload(&client, Element::F32, &x, 1, k);
            let packed = quantize(&client, &matrix, &Residual::None).unwrap();
            let device_w = PackedWeight::from_host(&client, &[w.view()]).unwrap();
            let y = matmul(&client, &packed, &device_w, options(route)).unwrap();
            let xq = host::quantize_activations(&x, 1, k, None).unwrap().decode();
            let name = format!("{route:?}, {magnitude:e} times {weight:e}");
            assert_within_bound(&name, &download(&client, &y), &xq, &decode(&w), k);
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let Some(client) = client() else { return };
    let w = PackedWeight::from_host(&client, &[pack(16, 64, 1).view()]).unwrap();
    let x = upload(&client, Element::F32, &[1.0; 32], 1, 32);
    let packed = quantize(&client, &x, &Residual::None).unwrap();
    let error = matmul(&client, &packed, &w, MatmulOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "contraction length of the activations: expected 64, got 32"
    );
}

/// The shapes that large models have, and with them every launch plan; outputs of a sample of the weight's rows.
#[test]
#[cfg(feature = "cuda")]
fn large_shapes_agree_with_the_host() {
    let Some(client) = client() else { return };
    let shapes = [
        (3, 8192, 8192),
        (8, 8192, 8192),
        (16, 8192, 8192),
        (8, 4096, 4096),
        (16, 4096, 4096),
        (64, 2048, 2048),
    ];
    for (tokens, rows, k) in shapes
        .into_iter()
        .chain([(300, 5000, 1040), (1100, 2056, 1024), (1050, 6100, 272)])
    {
        let mut random = Random::new(11);
        let w = Nvfp4Weight {
            rows,
            k,
            codes: (0..rows * k / 2).map(|_| random.bits() as u8).collect(),
            block_scales: (0..rows * k / 16)
                .map(|_| (0x18 + random.bits() % 0x30) as u8)
                .collect(),
            outer_scale: kernels_cubecl::OuterScale::Multiply(3e-4),
        };
        let device_w = PackedWeight::from_host(&client, &[w.view()]).unwrap();
        let sample: Vec<usize> = (0..41).map(|i| i * 1237 % rows).chain([rows - 1]).collect();
        let part = |bytes: &[u8]| {
            let per_row = bytes.len() / rows;
            sample
                .iter()
                .flat_map(|row| bytes[row * per_row..][..per_row].to_vec())
                .collect::<Vec<_>>()
        };
        let part = Nvfp4Weight {
            rows: sample.len(),
            codes: part(&w.codes),
            block_scales: part(&w.block_scales),
            ..w
        };
        let x = random.activations(tokens, k);
        let matrix = upload(&client, Element::F32, &x, tokens, k);
        for compensation in [None, Some(Compensation::All)] {
            let residual = Residual::new(&client, compensation.as_ref(), k).unwrap();
            let packed = quantize(&client, &matrix, &residual).unwrap();
            let xq = host::quantize_activations(&x, tokens, k, compensation.as_ref())
                .unwrap()
                .decode();
            for route in routes(&client) {
                let y = download(&client, &matmul(&client, &packed, &device_w, options(route)).unwrap());
                let y: Vec<f32> = y.chunks(rows).flat_map(|row| sample.iter().map(|n| row[*n])).collect();
                let name = format!("{route:?}, {tokens} x {rows} x {k}, {compensation:?}");
                assert_within_bound(&name, &y, &xq, &decode(&part), k);
            }
        }
    }
}

/// A fixed mask by blocks of 64: K steps without a bit are skipped, and nothing changes.
#[test]
fn steps_outside_the_mask_are_skipped() {
    let Some(client) = client() else { return };
    let (tokens, rows, k) = (40, 96, 1024);
    let w = pack(rows, k, 12);
    let device_w = PackedWeight::from_host(&client, &[w.view()]).unwrap();
    let x = Random::new(13).activations(tokens, k);
    let matrix = upload(&client, Element::F32, &x, tokens, k);
    let units: Vec<bool> = (0..k / 64).map(|i| i % 3 == 1).collect();
    let mask = ResidualMask::from_units(&units, k, Granularity::Block64);
    let compensation = Compensation::Mask(mask);
    let packed = quantize(
        &client,
        &matrix,
        &Residual::new(&client, Some(&compensation), k).unwrap(),
    )
    .unwrap();
    assert!(packed.residual_steps.is_some());
    let xq = host::quantize_activations(&x, tokens, k, Some(&compensation))
        .unwrap()
        .decode();
    for route in routes(&client) {
        let y = download(&client, &matmul(&client, &packed, &device_w, options(route)).unwrap());
        assert_within_bound(&format!("{route:?}"), &y, &xq, &decode(&w), k);
    }
}
