//! Degenerate shapes, values at the ends of the range, refused input, and independence of the number of threads.
use kernels_cubecl::{
    Activation, Compensation, Error, Fp8View, Granularity, Nvfp4View, OuterScale, Pass, QuantizedRows, ResidualMask,
    WeightLayout, WeightView, host,
};

const ROWS: WeightLayout = WeightLayout::RowMajor;

fn activations() -> Vec<Activation> {
    let per_token = Compensation::PerToken {
        granularity: Granularity::Channel,
        fraction: 0.5,
    };
    let mut all = vec![Activation::Full, Activation::Fp8, Activation::Nvfp4];
    all.extend([Compensation::All, per_token].map(Activation::Compensated));
    all
}

/// Values of both signs from a fixed sequence.
fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 % 2003) as f32 - 1001.0) / 300.0).collect()
}

#[test]
fn nothing_in_nothing_out() {
    for (rows, k, tokens) in [(0, 32, 3), (5, 0, 3), (5, 32, 0), (0, 0, 0), (0, 32, 0)] {
        let nvfp4 = host::quantize_weight(&values(rows * k), rows, k, ROWS, None).unwrap();
        let fp8 = host::quantize_weight_fp8(&values(rows * k), rows, k, ROWS).unwrap();
        for view in [WeightView::Nvfp4(nvfp4.view()), WeightView::Fp8(fp8.view())] {
            for layout in [ROWS, WeightLayout::Transposed] {
                host::dequantize_weight(view, layout, &mut vec![0.0; rows * k]).unwrap();
            }
            for activation in activations() {
                let x = values(tokens * k);
                let mut out = vec![f32::NAN; tokens * rows];
                host::matmul(&x, tokens, view, &activation, &mut out).unwrap();
                assert!(out.iter().all(|y| *y == 0.0), "a sum over nothing is 0: {out:?}");
                host::fake_quantize_activations(&x, tokens, k, &activation, &mut vec![0.0; tokens * k]).unwrap();
            }
            let quantized = host::quantize_activations(&values(tokens * k), tokens, k, None).unwrap();
            host::matmul_quantized(&quantized, view, &mut vec![0.0; tokens * rows]).unwrap();
        }
        let mut energy = vec![0.0; k];
        host::accumulate_residual_energy(&[], 0, k, Granularity::Channel, &mut energy).unwrap();
        assert_eq!(energy, vec![0.0; k]);
    }
    host::grouped_matmul(&[], &[], &[], &Activation::Nvfp4, &mut []).unwrap();
    assert_eq!(ResidualMask::from_energy(&[], 0, Granularity::Block64, 0.5).k(), 0);
}

#[test]
fn zeros_in_zeros_out() {
    let (tokens, rows, k) = (3, 5, 32);
    for (x, w) in [
        (vec![0.0; tokens * k], values(rows * k)),
        (vec![-0.0; tokens * k], values(rows * k)),
        (values(tokens * k), vec![0.0; rows * k]),
    ] {
        let packed = host::quantize_weight(&w, rows, k, ROWS, None).unwrap();
        for activation in activations() {
            let mut out = vec![f32::NAN; tokens * rows];
            host::matmul(&x, tokens, WeightView::Nvfp4(packed.view()), &activation, &mut out).unwrap();
            assert!(out.iter().all(|y| *y == 0.0), "{activation:?}: {out:?}");
        }
    }
}

/// The row's scale, and a product near the ends of f32, come out whenever f32 holds them.
#[test]
fn rows_at_the_ends_of_the_range() {
    let k = 32;
    let w: Vec<f32> = (0..k).map(|i| if i % 2 == 0 { 1.0 } else { -0.5 }).collect();
    for (magnitude, weight) in [(3e38, 1e-3), (3e38, 1e-30), (1e-38, 1.0), (1e-38, 1e30), (1e-30, 1e30)] {
        let w: Vec<f32> = w.iter().map(|w| w * weight).collect();
        let packed = host::quantize_weight(&w, 1, k, ROWS, None).unwrap();
        let view = WeightView::Nvfp4(packed.view());
        let mut wq = vec![0.0; k];
        host::dequantize_weight(view, ROWS, &mut wq).unwrap();
        let x: Vec<f32> = (0..k).map(|i| magnitude / (i + 1) as f32).collect();
        for activation in activations() {
            let (mut out, mut xq) = ([f32::NAN], vec![0.0; k]);
            host::matmul(&x, 1, view, &activation, &mut out).unwrap();
            host::fake_quantize_activations(&x, 1, k, &activation, &mut xq).unwrap();
            let expected: f64 = xq.iter().zip(&wq).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            let error = (f64::from(out[0]) - expected).abs() / expected.abs();
            assert!(
                error < 1e-4,
                "{activation:?}, {magnitude:e} · {weight:e}: {} for {expected:e}",
                out[0]
            );
        }
    }
}

/// The largest value rounds up to a multiple that f32 does not hold; the sum is taken in units of the row, and the
/// product is there all the same.
#[test]
fn the_largest_row_has_a_finite_product() {
    let packed = host::quantize_weight(&[1e-3; 16], 1, 16, ROWS, None).unwrap();
    for activation in activations() {
        let mut out = [f32::NAN];
        host::matmul(
            &[f32::MAX; 16],
            1,
            WeightView::Nvfp4(packed.view()),
            &activation,
            &mut out,
        )
        .unwrap();
        let expected = 16.0 * 1e-3 * f32::MAX;
        assert!((out[0] / expected - 1.0).abs() < 0.07, "{activation:?}: {}", out[0]);
    }
}

#[test]
fn full_precision_products_are_those_of_the_decoded_weight() {
    let (tokens, rows, k) = (3, 33, 48);
    let packed = host::quantize_weight(&values(rows * k), rows, k, ROWS, None).unwrap();
    let view = WeightView::Nvfp4(packed.view());
    let (mut wq, mut out) = (vec![0.0; rows * k], vec![0.0; tokens * rows]);
    host::dequantize_weight(view, ROWS, &mut wq).unwrap();
    // One channel at a time: an output is one decoded value.
    for c in [0, 1, 17, 47] {
        let mut x = vec![0.0; tokens * k];
        (0..tokens).for_each(|t| x[t * k + c] = 1.0);
        host::matmul(&x, tokens, view, &Activation::Full, &mut out).unwrap();
        for (at, y) in out.iter().enumerate() {
            assert_eq!(y.to_bits() << 1, wq[at % rows * k + c].to_bits() << 1, "column {c}");
        }
    }
}

#[test]
fn k_beyond_a_panel_is_one_sum() {
    let (tokens, rows, k) = (5, 40, 1040);
    let w: Vec<f32> = (0..rows * k).map(|i| (i % 13) as f32 - 6.0).collect();
    let x: Vec<f32> = (0..tokens * k).map(|i| (i % 7) as f32 - 3.0).collect();
    let packed = host::quantize_weight(&w, rows, k, ROWS, None).unwrap();
    let view = WeightView::Nvfp4(packed.view());
    let (mut out, mut wq) = (vec![0.0; tokens * rows], vec![0.0; rows * k]);
    host::dequantize_weight(view, ROWS, &mut wq).unwrap();
    host::matmul(&x, tokens, view, &Activation::Full, &mut out).unwrap();
    for t in 0..tokens {
        for n in 0..rows {
            let sum: f64 = (0..k).map(|c| f64::from(x[t * k + c]) * f64::from(wq[n * k + c])).sum();
            assert!(
                (f64::from(out[t * rows + n]) - sum).abs() <= 1e-2,
                "{} {sum}",
                out[t * rows + n]
            );
        }
    }
}

#[test]
fn threads_change_no_bit() {
    // Large enough for several pieces, along rows of both operands.
    let (tokens, rows, k) = (300, 200, 256);
    let (x, w) = (values(tokens * k), values(rows * k));
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let packed = host::quantize_weight(&w, rows, k, WeightLayout::Transposed, None).unwrap();
            let fp8 = host::quantize_weight_fp8(&w, rows, k, WeightLayout::Transposed).unwrap();
            let view = WeightView::Nvfp4(packed.view());
            let mut results = Vec::new();
            for activation in activations() {
                let mut out = vec![f32::NAN; tokens * rows];
                host::matmul(&x, tokens, view, &activation, &mut out).unwrap();
                results.push(out);
                let mut out = vec![f32::NAN; tokens * rows];
                host::grouped_matmul(&x, &[7, 0, 290, 3], &[view; 4], &activation, &mut out).unwrap();
                results.push(out);
            }
            for layout in [ROWS, WeightLayout::Transposed] {
                let mut out = vec![f32::NAN; rows * k];
                host::dequantize_weight(view, layout, &mut out).unwrap();
                results.push(out);
            }
            let bits: Vec<Vec<u32>> = results
                .iter()
                .map(|out| out.iter().map(|y| y.to_bits()).collect())
                .collect();
            (packed, fp8, bits)
        })
    };
    let one = on(1);
    for threads in [2, 3, 16] {
        assert!(on(threads) == one, "{threads} threads");
    }
}

fn length<T>(what: &'static str, expected: usize, actual: usize) -> Result<T, Error> {
    Err(Error::Length { what, expected, actual })
}

#[test]
fn wrong_shapes_are_named() {
    assert_eq!(
        host::quantize_weight(&[0.0; 24], 1, 24, ROWS, None),
        Err(Error::UnalignedK { k: 24 })
    );
    assert_eq!(
        host::quantize_weight(&[0.0; 30], 2, 16, ROWS, None),
        length("weight", 32, 30)
    );
    assert!(matches!(
        host::quantize_weight(&[], usize::MAX / 4, 1 << 20, ROWS, None),
        Err(Error::Shape { .. })
    ));
    let packed = host::quantize_weight(&values(64), 2, 32, ROWS, None).unwrap();
    let view = WeightView::Nvfp4(packed.view());
    let mut out = [0.0; 6];
    let matmul = |x: &[f32], tokens, w, out: &mut [f32]| host::matmul(x, tokens, w, &Activation::Nvfp4, out);
    assert_eq!(matmul(&[0.0; 95], 3, view, &mut out), length("activations", 96, 95));
    assert_eq!(matmul(&[0.0; 96], 3, view, &mut out[..5]), length("output", 6, 5));
    let short = WeightView::Nvfp4(Nvfp4View {
        codes: &packed.codes[..31],
        ..packed.view()
    });
    assert_eq!(
        matmul(&[0.0; 96], 3, short, &mut out),
        length("codes of an NVFP4 weight", 32, 31)
    );
    let unaligned = WeightView::Nvfp4(Nvfp4View {
        rows: 1,
        k: 24,
        codes: &[0; 12],
        block_scales: &[0; 1],
        outer_scale: OuterScale::Multiply(1.0),
    });
    assert_eq!(
        matmul(&[0.0; 24], 1, unaligned, &mut out[..1]),
        Err(Error::UnalignedK { k: 24 })
    );
    let fp8 = WeightView::Fp8(Fp8View {
        rows: 1,
        k: 24,
        codes: &[0; 24],
        channel_scales: &[],
    });
    assert_eq!(
        matmul(&[0.0; 24], 1, fp8, &mut out[..1]),
        length("channel scales of an FP8 weight", 1, 0)
    );
    let other = host::quantize_weight(&values(32), 1, 32, ROWS, None).unwrap();
    let weights = [view, WeightView::Nvfp4(other.view())];
    assert!(matches!(
        host::grouped_matmul(&[0.0; 64], &[1, 1], &weights, &Activation::Full, &mut out[..4]),
        Err(Error::GroupShape {
            group: 1,
            rows: 1,
            k: 32,
            first_rows: 2,
            first_k: 32
        })
    ));
    assert_eq!(
        host::grouped_matmul(&[0.0; 32], &[1], &weights[..0], &Activation::Full, &mut out),
        length("counts of a grouped matmul", 0, 1)
    );
    let x = QuantizedRows {
        tokens: 1,
        k: 32,
        encode_scales: vec![1.0],
        first: Pass {
            codes: vec![0; 15],
            block_scales: vec![0; 2],
        },
        residual: None,
    };
    assert_eq!(
        host::matmul_quantized(&x, view, &mut out[..2]),
        length("codes of activations", 16, 15)
    );
}

#[test]
fn compensation_that_does_not_fit_is_named() {
    let quantize = |k: usize, compensation| host::quantize_activations(&vec![0.0; k], 1, k, Some(&compensation));
    assert_eq!(quantize(40, Compensation::All), Err(Error::UnalignedK { k: 40 }));
    let mask = ResidualMask::from_channels(&[true; 16]);
    let error = quantize(32, Compensation::Mask(mask)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "residual mask, channels: expected 32 elements, got 16"
    );
    for fraction in [0.0, -0.5, 1.5, f32::NAN] {
        let compensation = Compensation::PerToken {
            granularity: Granularity::Block16,
            fraction,
        };
        assert!(
            matches!(quantize(32, compensation), Err(Error::Fraction { .. })),
            "{fraction}"
        );
    }
}

#[test]
fn a_weight_that_cannot_be_packed_is_named() {
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut w = values(3 * 32);
        w[32 + 5] = poison;
        let named = |error: Error| matches!(error, Error::NonFinite { row: 1, column: 5, .. });
        assert!(named(host::quantize_weight(&w, 3, 32, ROWS, None).unwrap_err()));
        assert!(named(host::quantize_weight_fp8(&w, 3, 32, ROWS).unwrap_err()));
        assert!(named(
            host::fake_quantize_weight(&w, 3, 32, ROWS, None, &mut vec![0.0; 96]).unwrap_err()
        ));
    }
    let w = values(32);
    for amax in [0.5, f32::NAN, f32::INFINITY, -10.0] {
        let error = host::quantize_weight(&w, 1, 32, ROWS, Some(amax)).unwrap_err();
        assert!(
            matches!(error, Error::Amax { own, .. } if own == kernels_cubecl::amax(&w)),
            "{error}"
        );
    }
}
