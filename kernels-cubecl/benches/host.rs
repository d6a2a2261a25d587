//! Packed products on the host beside the dense f32 product of the same shape (`gemm`, as burn-flex calls it), in one
//! run, interleaved. Ratios above 1 are faster than dense.
//!
//! `cargo bench -p kernels-cubecl --bench host`
use kernels_cubecl::{Activation, Compensation, Granularity, WeightLayout, WeightView, host};
use std::time::Instant;

/// Pseudo-random values around 0, the same in every run.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(|_| uniform() + uniform() + uniform()).collect()
}

/// A name and what is timed under it.
type Body<'a> = (&'a str, Box<dyn FnMut() + 'a>);

/// Median and best microseconds of each closure; one call of each a round.
fn measure(rounds: usize, bodies: &mut [Body]) -> Vec<(f64, f64)> {
    let mut times = vec![Vec::with_capacity(rounds); bodies.len()];
    for _ in 0..rounds {
        for (times, (_, body)) in times.iter_mut().zip(bodies.iter_mut()) {
            let start = Instant::now();
            body();
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    for times in &mut times {
        times.sort_by(f64::total_cmp);
    }
    times.into_iter().map(|times| (times[rounds / 2], times[0])).collect()
}

/// `out = x · w`, `x` `[m, k]`, `w` `[k, n]`, threads as in burn-flex.
fn dense(m: usize, k: usize, n: usize, x: &[f32], w: &[f32], out: &mut [f32]) {
    let parallelism = match m * k * n >= 192 * 192 * 192 {
        true => gemm::Parallelism::Rayon(0),
        false => gemm::Parallelism::None,
    };
    assert!(x.len() == m * k && w.len() == k * n && out.len() == m * n);
    // SAFETY: the buffers have the lengths that shapes and strides ask for.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            false,
            x.as_ptr(),
            1,
            k as isize,
            w.as_ptr(),
            1,
            n as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn per_token() -> Activation {
    Activation::Compensated(Compensation::PerToken {
        granularity: Granularity::Block16,
        fraction: 0.5,
    })
}

fn products(groups: usize, tokens: usize, k: usize, rows: usize) {
    let x = values(groups * tokens * k, 1);
    let dense_weights: Vec<Vec<f32>> = (0..groups).map(|g| values(k * rows, 2 + g as u64)).collect();
    let pack = |w: &Vec<f32>| host::quantize_weight(w, rows, k, WeightLayout::Transposed, None).unwrap();
    let packed: Vec<_> = dense_weights.iter().map(pack).collect();
    let views: Vec<WeightView> = packed.iter().map(|w| WeightView::Nvfp4(w.view())).collect();
    let fp8: Vec<_> = dense_weights
        .iter()
        .map(|w| host::quantize_weight_fp8(w, rows, k, WeightLayout::Transposed).unwrap())
        .collect();
    let fp8_views: Vec<WeightView> = fp8.iter().map(|w| WeightView::Fp8(w.view())).collect();
    let counts = vec![tokens; groups];
    let mut out = vec![0.0; tokens * rows];
    let mut bodies: Vec<Body> = vec![(
        "dense",
        Box::new(|| {
            for (x, w) in x.chunks_exact(tokens * k).zip(&dense_weights) {
                dense(tokens, k, rows, x, w, &mut out);
            }
        }),
    )];
    for (name, views, activation) in [
        ("w4a16", &views, Activation::Full),
        ("w4a4", &views, Activation::Nvfp4),
        ("rac all", &views, Activation::Compensated(Compensation::All)),
        ("rac token", &views, per_token()),
        ("fp8", &fp8_views, Activation::Fp8),
    ] {
        let (x, counts, mut out) = (&x, &counts, vec![0.0; groups * tokens * rows]);
        bodies.push((
            name,
            Box::new(move || host::grouped_matmul(x, counts, views, &activation, &mut out).unwrap()),
        ));
    }
    print_row(&format!("{groups} x [{tokens}, {k}] x [{k}, {rows}]"), &mut bodies);
}

fn conversions(k: usize, rows: usize) {
    let w = values(k * rows, 1);
    let packed = host::quantize_weight(&w, rows, k, WeightLayout::Transposed, None).unwrap();
    let (mut out, mut rounded) = (vec![0.0; k * rows], vec![0.0; k * rows]);
    let x = values(64 * k, 3);
    let (mut y, mut xq) = (vec![0.0; 64 * rows], vec![0.0; 64 * k]);
    let layout = WeightLayout::Transposed;
    let mut bodies: Vec<Body> = vec![
        ("dense, 64 rows", Box::new(|| dense(64, k, rows, &x, &w, &mut y))),
        (
            "pack",
            Box::new(|| drop(host::quantize_weight(&w, rows, k, layout, None).unwrap())),
        ),
        (
            "unpack",
            Box::new(|| host::dequantize_weight(WeightView::Nvfp4(packed.view()), layout, &mut out).unwrap()),
        ),
        (
            "fake-quantize",
            Box::new(|| host::fake_quantize_weight(&w, rows, k, layout, None, &mut rounded).unwrap()),
        ),
        (
            "64 rows, rac all",
            Box::new(|| {
                let all = Activation::Compensated(Compensation::All);
                host::fake_quantize_activations(&x, 64, k, &all, &mut xq).unwrap()
            }),
        ),
    ];
    print_row(&format!("weight [{k}, {rows}]"), &mut bodies);
}

fn print_row(shape: &str, bodies: &mut [Body]) {
    let times = measure(301, bodies);
    println!("{shape:30} median us  ratio    best us  ratio");
    for ((name, _), (median, best)) in bodies.iter().zip(&times) {
        let (dense_median, dense_best) = times[0];
        println!(
            "  {name:28} {median:9.1} {:6.2}  {best:9.1} {:6.2}",
            dense_median / median,
            dense_best / best
        );
    }
}

fn main() {
    for (groups, tokens, k, rows) in [
        (1, 64, 128, 128),
        (1, 64, 128, 352),
        (1, 64, 352, 128),
        (8, 16, 128, 128),
        (8, 16, 128, 352),
        (8, 16, 352, 128),
        (1, 1, 128, 352),
        (1, 8, 128, 352),
        (1, 2048, 128, 352),
        (1, 64, 1024, 1024),
    ] {
        products(groups, tokens, k, rows);
    }
    conversions(128, 352);
    conversions(1024, 1024);
}
