//! Writes the CUDA source that CubeCL makes of every kernel, for sm_90, sm_100 and sm_120, without a GPU:
//!
//! ```text
//! cargo run --release -p kernels-cubecl --features offline --example cuda_sources -- DIRECTORY
//! ```
//!
//! The kernels are launched through the crate's own entry points on a runtime that only compiles.
mod offline;

use cubecl::prelude::*;
use kernels_cubecl::device::{
    Amax, Element, Fp8Rows, KeyValueCache, MatmulOptions, Matrix, MatrixStack, PackedActivations, PackedWeight,
    Residual, RotaryRows, Route, Routing, cached_attention, grouped_matmul, grouped_matmul_dense,
    grouped_outer_product, log_softmax_parts, matmul, matmul_fp8, order_by_expert, pack_weight, pack_weight_fp8,
    quantize, quantize_fp8, rms_norm, rms_norm_backward, rotate_heads, softmax, softmax_backward, swiglu,
    swiglu_backward, top_experts,
};
use kernels_cubecl::{Compensation, Granularity, ResidualMask, WeightLayout};
use offline::{Architecture, OfflineCuda, SOURCES};

type Client = ComputeClient<OfflineCuda>;

fn main() -> std::io::Result<()> {
    let directory = std::env::args().nth(1).unwrap_or_else(|| "cuda_sources".into());
    std::fs::create_dir_all(&directory)?;
    for arch in [90, 100, 120] {
        let client = OfflineCuda::client(&Architecture(arch));
        // One architecture shows that these compile; what differs from one to another are the matrix instructions.
        if arch == 90 {
            packers(&client);
            fp8s(&client);
            layers(&client);
            matmuls(&client, Route::Portable);
        }
        quantizers(&client);
        dense_products(&client);
        let native = Route::BlockScaledMma.is_available(&client);
        let routes: &[Route] = if native {
            &[Route::BlockScaledMma]
        } else {
            &[Route::Decode, Route::Bf16Mma]
        };
        routes.iter().for_each(|route| matmuls(&client, *route));
    }
    for (index, source) in SOURCES.lock().unwrap().iter().enumerate() {
        let name = format!(
            "{directory}/{index:03}_{}.sm{}.s{}.cu",
            source.name, source.arch, source.shared
        );
        std::fs::write(name, &source.source)?;
    }
    Ok(())
}

/// Names the sources since the last call.
fn label(client: &Client, name: &str) {
    let _ = client.flush();
    cubecl::future::block_on(client.sync()).expect("the queue is empty");
    for source in SOURCES
        .lock()
        .unwrap()
        .iter_mut()
        .rev()
        .take_while(|source| !source.name.contains('-'))
    {
        source.name = format!("{name}-{}", source.name);
    }
}

fn matrix(client: &Client, element: Element, rows: usize, columns: usize) -> Matrix {
    Matrix::contiguous(client.empty(rows * columns * element.size()), element, rows, columns)
}

fn quantizers(client: &Client) {
    let k = 8192;
    let per_token = |granularity| Compensation::PerToken {
        granularity,
        fraction: 0.5,
    };
    let compensations = [
        ("plain", None),
        ("all", Some(Compensation::All)),
        (
            "mask",
            Some(Compensation::Mask(ResidualMask::from_channels(&vec![true; k]))),
        ),
        ("channels", Some(per_token(Granularity::Channel))),
        ("blocks64", Some(per_token(Granularity::Block64))),
    ];
    for element in [Element::F32, Element::BF16] {
        for (name, compensation) in &compensations {
            let residual = Residual::new(client, compensation.as_ref(), k).expect("k is aligned");
            quantize(client, &matrix(client, element, 4, k), &residual).expect("k is aligned");
            label(client, &format!("quantize_{element:?}_{name}"));
        }
    }
    // Many rows share out their work otherwise.
    for residual in [Residual::None, Residual::All] {
        quantize(client, &matrix(client, Element::BF16, 4096, k), &residual).expect("k is aligned");
        label(client, "quantize_BF16_many");
    }
}

fn packers(client: &Client) {
    for layout in [WeightLayout::RowMajor, WeightLayout::Transposed] {
        let w = client.empty(64 * 64 * 4);
        let amax = Amax::new(client, 1);
        amax.include(client, &w, 64 * 64);
        pack_weight(client, &w, [1, 64, 64], layout, &amax).expect("k is aligned");
        label(client, &format!("pack_{layout:?}"));
    }
}

fn matmuls(client: &Client, route: Route) {
    let x = |tokens: usize, k: usize, passes: usize| PackedActivations {
        codes: client.empty(passes * tokens * k / 2),
        block_scales: client.empty(passes * tokens * k / 16),
        units: client.empty(4 * tokens),
        tokens,
        k,
        passes,
        residual_steps: None,
    };
    let w = |experts: usize, rows: usize, k: usize| PackedWeight {
        codes: client.empty(experts * rows * k / 2),
        block_scales: client.empty(experts * rows * k / 16),
        outer_scales: client.empty(4 * experts),
        experts,
        rows,
        k,
    };
    let options = MatmulOptions {
        route: Some(route),
        output: Element::BF16,
    };
    for passes in [1, 2] {
        for (tokens, size) in [
            (1, 8192),
            (8, 8192),
            (16, 8192),
            (8, 4096),
            (16, 4096),
            (64, 2048),
            (4096, 4096),
        ] {
            if route == Route::Decode && tokens > 16 {
                continue;
            }
            matmul(client, &x(tokens, size, passes), &w(1, size, size), options).expect("operands fit");
            label(client, &format!("{route:?}_{tokens}x{size}_passes{passes}"));
        }
        let routing = Routing {
            counts: client.empty(4 * 128),
            tokens: 512,
            gather: Some(client.empty(4 * 512)),
        };
        grouped_matmul(client, &x(64, 2048, passes), &w(128, 1536, 2048), &routing, options).expect("operands fit");
        label(client, &format!("{route:?}_grouped_passes{passes}"));
        let mut sparse = x(256, 1024, 2);
        sparse.residual_steps = Some(client.empty(4 * 16));
        matmul(client, &sparse, &w(1, 1024, 1024), options).expect("operands fit");
        label(client, &format!("{route:?}_sparse"));
    }
}

/// Short rows, as of heads, and long ones, as of tokens and logits.
fn layers(client: &Client) {
    for columns in [64, 4096] {
        let x = matrix(client, Element::F32, 64, columns);
        let gamma = matrix(client, Element::F32, 1, columns);
        rms_norm(client, &x, &gamma, 1e-6).expect("operands fit");
        rms_norm_backward(client, &x, &gamma, 1e-6, &x).expect("operands fit");
        softmax(client, &x).expect("it is f32");
        softmax_backward(client, &x, &x).expect("operands fit");
        log_softmax_parts(client, &x).expect("it is f32");
        label(client, &format!("layer_rows_of_{columns}"));
    }
    let x = matrix(client, Element::F32, 64, 64);
    swiglu(client, &x).expect("columns are even");
    swiglu_backward(client, &x, &matrix(client, Element::F32, 64, 32)).expect("operands fit");
    let (cos, sin) = (matrix(client, Element::F32, 4, 64), matrix(client, Element::F32, 4, 64));
    rotate_heads(client, &x, 16, &RotaryRows { cos, sin }).expect("operands fit");
    label(client, "layer_values");
    top_experts(client, &matrix(client, Element::F32, 64, 128), 8).expect("there are as many experts");
    order_by_expert(client, &client.empty(4 * 512), 512, 128);
    label(client, "layer_routing");
    for (group, head_dim) in [(4, 64), (8, 128), (16, 256)] {
        let cache = KeyValueCache {
            keys: client.empty(4 * 2 * head_dim * 128),
            values: client.empty(4 * 2 * head_dim * 128),
            slots: 1,
            kv_heads: 2,
            head_dim,
            key_columns: 128,
            value_rows: 128,
        };
        let query = matrix(client, Element::F32, 1, 2 * group * head_dim);
        cached_attention(client, &query, &cache, &client.empty(16)).expect("operands fit");
        label(client, &format!("layer_attention_{group}x{head_dim}"));
    }
}

/// Experts that are not packed: weights as they are and transposed, then operands that are read one by one.
fn dense_products(client: &Client) {
    let counts = client.empty(4 * 8);
    let stack = |k: usize, n: usize, strides: [usize; 3]| MatrixStack {
        handle: client.empty(4 * 8 * k * n),
        shape: [8, k, n],
        strides,
    };
    let (k, n) = (1024, 768);
    for (name, tokens, k, n, strides) in [
        ("rows", 8192, k, n, [k * n, n, 1]),
        ("columns", 8192, k, n, [k * n, 1, k]),
        ("few", 64, k, n, [k * n, n, 1]),
        ("few_columns", 64, k, n, [k * n, 1, k]),
        ("any", 8192, 99, 129, [99 * 129, 129, 1]),
        ("few_any", 64, 99, 129, [99 * 129, 1, 99]),
    ] {
        let x = matrix(client, Element::F32, tokens, k);
        grouped_matmul_dense(client, &x, &stack(k, n, strides), &counts).expect("operands fit");
        label(client, &format!("Dense_matmul_{name}"));
    }
    let transposed = Matrix {
        strides: [1, 8192],
        ..matrix(client, Element::F32, 8192, k)
    };
    grouped_matmul_dense(client, &transposed, &stack(k, n, [k * n, n, 1]), &counts).expect("operands fit");
    label(client, "Dense_matmul_transposed");
    let g = matrix(client, Element::F32, 8192, n);
    for (name, x) in [
        ("rows", matrix(client, Element::F32, 8192, k)),
        ("narrow", matrix(client, Element::F32, 8192, 16)),
        ("any", matrix(client, Element::F32, 8192, 99)),
        ("transposed", transposed),
    ] {
        grouped_outer_product(client, &x, &g, &counts, 8).expect("operands fit");
        label(client, &format!("Dense_outer_{name}"));
    }
}

fn fp8s(client: &Client) {
    quantize_fp8(client, &matrix(client, Element::BF16, 4, 8192)).expect("the device has bf16");
    label(client, "quantize_fp8");
    pack_weight_fp8(
        client,
        &client.empty(64 * 64 * 4),
        [1, 64, 64],
        WeightLayout::Transposed,
    );
    label(client, "pack_fp8");
    let rows = |rows: usize, k: usize| Fp8Rows {
        codes: client.empty(rows * k),
        scales: client.empty(4 * rows),
        experts: 1,
        rows,
        k,
    };
    for tokens in [8, 64] {
        let options = MatmulOptions::default();
        matmul_fp8(client, &rows(tokens, 8192), &rows(8192, 8192), None, options).expect("operands fit");
        label(client, &format!("Fp8_{tokens}x8192"));
    }
}
