//! The kernels and shapes that are timed. Weights rotate over more memory than the second-level cache holds.
use crate::report::{Line, Report};
use crate::timing::{Client, Timer};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels_cubecl::device::{
    Element, Fp8Rows, MatmulOptions, Matrix, MatrixStack, PackedActivations, PackedWeight, Residual, Route, Routing,
    grouped_matmul, grouped_matmul_dense, grouped_outer_product, matmul, matmul_fp8, quantize, quantize_fp8,
};
use kernels_cubecl::{Compensation, Granularity, ResidualMask};

/// Bytes that weights rotate over.
const ROTATION: usize = 256 << 20;

struct Random(u64);

impl Random {
    fn word(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 24) as u32
    }

    fn words(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.word()).collect()
    }

    /// Bytes of scales: numbers of the usual size.
    fn scales(&mut self, words: usize) -> Vec<u32> {
        (0..words).map(|_| (self.word() & 0x0f0f_0f0f) + 0x2828_2828).collect()
    }

    /// bf16 activations, about normal.
    fn activations(&mut self, client: &Client, tokens: usize, k: usize) -> Matrix {
        let mut uniform = || f32::from(self.word() as u16) / 65536.0;
        let values: Vec<half::bf16> = (0..tokens * k)
            .map(|_| half::bf16::from_f32((uniform() + uniform() + uniform() - 1.5) * 2.0))
            .collect();
        let handle = client.create_from_slice(half::bf16::as_bytes(&values));
        Matrix::contiguous(handle, Element::BF16, tokens, k)
    }

    /// Copies of one weight.
    fn weights(&mut self, client: &Client, experts: usize, rows: usize, k: usize) -> Vec<PackedWeight> {
        let values = experts * rows * k;
        let (codes, scales) = (self.words(values / 8), self.scales(values / 64));
        let outer = vec![1e-3f32; experts];
        let copies = ROTATION.div_ceil(values * 9 / 16).max(2);
        let weight = |_| PackedWeight {
            codes: upload(client, &codes),
            block_scales: upload(client, &scales),
            outer_scales: client.create_from_slice(f32::as_bytes(&outer)),
            experts,
            rows,
            k,
        };
        (0..copies).map(weight).collect()
    }
}

fn upload(client: &Client, words: &[u32]) -> Handle {
    client.create_from_slice(u32::as_bytes(words))
}

/// Packed bytes of `values` values.
fn packed(values: usize) -> f64 {
    values as f64 * 0.5625
}

fn options(route: Route) -> MatmulOptions {
    MatmulOptions {
        route: Some(route),
        output: Element::BF16,
    }
}

fn name(residual: &Residual) -> &'static str {
    match residual {
        Residual::None => "plain",
        Residual::All => "RAC, all",
        Residual::Mask(_) => "RAC, block64 0.5",
        Residual::PerToken(..) => "RAC, per token",
    }
}

fn half_of_the_steps(client: &Client, k: usize) -> Residual {
    let units: Vec<bool> = (0..k / 64).map(|i| i % 2 == 0).collect();
    let mask = ResidualMask::from_units(&units, k, Granularity::Block64);
    Residual::new(client, Some(&Compensation::Mask(mask)), k).expect("the mask fits")
}

pub fn quantization(timer: &Timer, report: &mut Report) {
    let client = &timer.client;
    for (tokens, k) in [(1, 8192), (16, 8192), (16, 4096), (4096, 8192)] {
        let x = Random(7).activations(client, tokens, k);
        let mut kinds = vec![Residual::None, Residual::All];
        if tokens > 1000 {
            let per_token = Compensation::PerToken {
                granularity: Granularity::Channel,
                fraction: 0.5,
            };
            kinds.push(half_of_the_steps(client, k));
            kinds.push(Residual::new(client, Some(&per_token), k).expect("the fraction is valid"));
        }
        for residual in kinds {
            let us = timer.microseconds(|_| drop(quantize(client, &x, &residual).expect("k is aligned")));
            let passes = if matches!(residual, Residual::None) { 1.0 } else { 2.0 };
            report.push(Line {
                kernel: format!("quantize bf16, {}", name(&residual)),
                tokens,
                rows: 0,
                k,
                us,
                bytes: (tokens * k * 2) as f64 + passes * packed(tokens * k),
                flops: 0.0,
            });
        }
    }
}

fn dense(
    timer: &Timer,
    report: &mut Report,
    route: Route,
    tokens: usize,
    size: usize,
    residual: &Residual,
    ws: &[PackedWeight],
) {
    let client = &timer.client;
    let x = Random(9).activations(client, tokens, size);
    let quantized = quantize(client, &x, residual).expect("k is aligned");
    let run = |x: &PackedActivations, i: usize| {
        drop(matmul(client, x, &ws[i % ws.len()], options(route)).expect("operands fit"));
    };
    let share = match residual {
        Residual::None => 1.0,
        Residual::Mask(_) => 1.5,
        _ => 2.0,
    };
    let line = |kernel: String, us: f64, more: f64| Line {
        kernel,
        tokens,
        rows: size,
        k: size,
        us,
        bytes: packed(size * size) + share * packed(tokens * size) + (tokens * size * 2) as f64 + more,
        flops: share * 2.0 * (tokens * size * size) as f64,
    };
    let us = timer.microseconds(|i| run(&quantized, i));
    report.push(line(format!("{route:?}, {}", name(residual)), us, 0.0));
    let us = timer.microseconds(|i| run(&quantize(client, &x, residual).expect("k is aligned"), i));
    report.push(line(
        format!("quantize + {route:?}, {}", name(residual)),
        us,
        (tokens * size * 2) as f64,
    ));
}

pub fn decode(timer: &Timer, report: &mut Report) {
    for size in [8192, 4096] {
        let ws = Random(5).weights(&timer.client, 1, size, size);
        for tokens in [1, 4, 8, 16] {
            for residual in [Residual::None, Residual::All] {
                dense(timer, report, Route::Decode, tokens, size, &residual, &ws);
            }
        }
    }
}

pub fn tiled(timer: &Timer, report: &mut Report) {
    let size = 4096;
    let ws = Random(6).weights(&timer.client, 1, size, size);
    for tokens in [64, 512, 4096] {
        for residual in [Residual::None, half_of_the_steps(&timer.client, size), Residual::All] {
            dense(timer, report, Route::Bf16Mma, tokens, size, &residual, &ws);
        }
    }
}

/// 128 experts, 8 of them a token, 2048 → 2 × 768 → 2048, 64 tokens.
pub fn grouped(timer: &Timer, report: &mut Report) {
    let client = &timer.client;
    let (experts, top, tokens) = (128usize, 8usize, 64usize);
    let mut random = Random(3);
    let mut assigned: Vec<(u32, u32)> = Vec::new();
    for token in 0..tokens as u32 {
        let mut chosen: Vec<u32> = Vec::new();
        while chosen.len() < top {
            let expert = random.word() % experts as u32;
            if !chosen.contains(&expert) {
                chosen.push(expert);
            }
        }
        assigned.extend(chosen.into_iter().map(|expert| (expert, token)));
    }
    assigned.sort();
    let mut counts = vec![0u32; experts];
    assigned.iter().for_each(|(expert, _)| counts[*expert as usize] += 1);
    let hit = counts.iter().filter(|count| **count > 0).count();
    let gather: Vec<u32> = assigned.iter().map(|(_, token)| *token).collect();
    let routed = tokens * top;
    for (rows, k, gathers) in [(2 * 768, 2048, true), (2048, 768, false)] {
        let ws = random.weights(client, experts, rows, k);
        let sources = if gathers { tokens } else { routed };
        let x = random.activations(client, sources, k);
        let gather = gathers.then(|| upload(client, &gather));
        let routing = Routing {
            counts: upload(client, &counts),
            tokens: routed,
            gather,
        };
        for residual in [Residual::None, Residual::All] {
            let quantized = quantize(client, &x, &residual).expect("k is aligned");
            let us = timer.microseconds(|i| {
                let w = &ws[i % ws.len()];
                drop(grouped_matmul(client, &quantized, w, &routing, options(Route::Decode)).expect("operands fit"));
            });
            let passes = quantized.passes as f64;
            report.push(Line {
                kernel: format!("grouped Decode, {hit} experts hit, {}", name(&residual)),
                tokens: routed,
                rows,
                k,
                us,
                bytes: packed(hit * rows * k),
                flops: passes * 2.0 * (routed * rows * k) as f64,
            });
        }
    }
}

/// Experts that are not packed, in a step of training: forward, the gradient of their input, and that of their weights.
pub fn experts(timer: &Timer, report: &mut Report) {
    let client = &timer.client;
    let experts = 32usize;
    let mut random = Random(4);
    for (tokens, k, n) in [
        (32_768usize, 1024usize, 768usize),
        (32_768, 384, 1024),
        (256, 1024, 768),
    ] {
        let mut matrix = |rows: usize, columns: usize| {
            let values: Vec<f32> = (0..rows * columns)
                .map(|_| f32::from(random.word() as i16) / 32_768.0)
                .collect();
            Matrix::contiguous(
                client.create_from_slice(f32::as_bytes(&values)),
                Element::F32,
                rows,
                columns,
            )
        };
        let (x, g, w) = (matrix(tokens, k), matrix(tokens, n), matrix(experts * k, n));
        // Experts differ in rows.
        let each = tokens / experts;
        let counts: Vec<u32> = (0..experts)
            .map(|e| [each, 2 * each, each / 2, each / 2][e % 4] as u32)
            .collect();
        let counts = upload(client, &counts);
        let stack = |shape, strides| MatrixStack {
            handle: w.handle.clone(),
            shape,
            strides,
        };
        let forward = stack([experts, k, n], [k * n, n, 1]);
        let backward = stack([experts, n, k], [k * n, 1, n]);
        let mut push = |kernel: &str, us| {
            report.push(Line {
                kernel: format!("grouped dense {kernel}"),
                tokens,
                rows: n,
                k,
                us,
                bytes: 4.0 * (tokens * (k + n) + experts * k * n) as f64,
                flops: 2.0 * (tokens * k * n) as f64,
            });
        };
        let us =
            timer.microseconds(|_| drop(grouped_matmul_dense(client, &x, &forward, &counts).expect("operands fit")));
        push("forward", us);
        let us =
            timer.microseconds(|_| drop(grouped_matmul_dense(client, &g, &backward, &counts).expect("operands fit")));
        push("input gradient", us);
        let us = timer
            .microseconds(|_| drop(grouped_outer_product(client, &x, &g, &counts, experts).expect("operands fit")));
        push("weight gradient", us);
    }
}

pub fn fp8(timer: &Timer, report: &mut Report) {
    let client = &timer.client;
    for size in [8192usize, 4096] {
        let mut random = Random(2);
        let codes = random
            .words(size * size / 4)
            .iter()
            .map(|w| w & 0xbfbf_bfbf)
            .collect::<Vec<_>>();
        let weight = |_| Fp8Rows {
            codes: upload(client, &codes),
            scales: client.create_from_slice(f32::as_bytes(&vec![1e-3f32; size])),
            experts: 1,
            rows: size,
            k: size,
        };
        let ws: Vec<Fp8Rows> = (0..ROTATION.div_ceil(size * size)).map(weight).collect();
        for tokens in [1, 8, 16] {
            let x = random.activations(client, tokens, size);
            let x = quantize_fp8(client, &x).expect("the device has bf16");
            let options = MatmulOptions {
                route: None,
                output: Element::BF16,
            };
            let us = timer.microseconds(|i| {
                drop(matmul_fp8(client, &x, &ws[i % ws.len()], None, options).expect("operands fit"))
            });
            report.push(Line {
                kernel: "FP8".into(),
                tokens,
                rows: size,
                k: size,
                us,
                bytes: (size * size + tokens * size * 3) as f64,
                flops: 2.0 * (tokens * size * size) as f64,
            });
        }
    }
}
