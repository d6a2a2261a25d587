//! Quantization and matmul on a GPU: CubeCL kernels for any runtime, from a client and the handles of its buffers.
//!
//! Nothing here waits for the device: every function enqueues kernels and returns handles. Only what is named `read_*`
//! copies to the host, for inspection.
//!
//! # Layouts
//!
//! Everything packed is an array of u32 words, which every runtime has. `k` is the logical length of the contraction
//! axis, `kp` that length padded to a multiple of [`K_STEP`]; the padding holds zero codes and zero scales.
//!
//! | buffer | shape | contents |
//! |---|---|---|
//! | codes | `[rows, kp/8]` | eight E2M1 codes a word, the first in the lowest nibble |
//! | block scales | `[rows, kp/64]` | four E4M3 bytes a word, the first lowest: the scales of one K step |
//! | units of activations | `[tokens]` f32 | `1/S` of each row, a power of two; NaN for a row that is not finite |
//! | outer scales of weights | `[experts]` f32 | `1/S`, multiplied with what the block scales give |
//! | FP8 codes | `[rows, kp/4]` | four E4M3 bytes a word |
//! | FP8 scales | `[rows]` f32 | one a token of activations, one an output channel of weights |
//!
//! Activations with compensation hold two passes in one buffer: the rows of the first, then those of the second, over
//! the same units. A weight of experts is `[experts, rows, …]`. Byte order within words is that of the
//! [host's](crate::host) byte arrays on a little-endian machine.
//!
//! `y[t, n] = (Σ_k x̂[t, k] · ŵ[n, k]) · unit[t] · outer`: f32 accumulation, scales after the sum, one cast at the end.
//!
//! # Numerics
//!
//! Codes and scales equal the host's bits. Outputs agree with the host to `(k + 8) · 2^-23 · Σ|x̂·ŵ|`. Within a
//! [`Route`] a row's bits depend on nothing but the row and the weight: how the sum over `k` is split depends on `k` and
//! on the route alone. An f32 subnormal counts as zero where the device flushes them.
//!
//! # Modules, in reading order
//!
//! - `matrix`, `check`: buffers with their shapes, and what they must be;
//! - `format`: the number formats in kernel code;
//! - `quantize`: activations to codes, with the residual pass;
//! - `pack`: weights to codes;
//! - `route`: which matmul kernel runs where, and their launch table;
//! - `grouping`: tokens sorted by expert, for all of them;
//! - `portable`, `decode`, `bf16_mma`, `block_scaled_mma`: a file a route; `mma16` decodes for two of them;
//! - `bias`: what is added to a product;
//! - `fp8`: the baseline;
//! - `values`: packed operands back to values;
//! - `dense`: what is not packed, experts on any runtime; `dense_mma`: on bf16 tensor cores;
//! - `layers`: what a decoder layer does beside its products.
#![allow(
    clippy::collapsible_if,
    clippy::manual_is_multiple_of,
    clippy::too_many_arguments,
    clippy::type_complexity,
    reason = "kernel code is a language of its own: it has operators but no methods, and takes its buffers one by one"
)]
mod bf16_mma;
mod bias;
mod block_scaled_mma;
mod check;
#[cfg(any(feature = "vulkan", feature = "cuda"))]
mod client;
mod decode;
mod dense;
mod dense_mma;
mod format;
mod fp8;
mod grouping;
mod layers;
mod matrix;
mod mma16;
mod pack;
mod portable;
mod quantize;
mod route;
mod selection;
mod values;

pub use bias::add_bias;
pub use check::MAX_VALUES;
#[cfg(feature = "cuda")]
pub use client::cuda;
#[cfg(feature = "vulkan")]
pub use client::vulkan;
pub use dense::{
    dense_products_use_bf16, grouped_matmul_dense, grouped_outer_product, matmul_dense, outer_product_dense,
};
pub use fp8::{Fp8Rows, matmul_fp8, pack_weight_fp8, quantize_fp8};
pub use layers::{
    ExpertOrder, KeyValueCache, LogSoftmaxParts, RmsNormGradients, RotaryRows, cached_attention, log_softmax_parts,
    order_by_expert, rms_norm, rms_norm_backward, rotate_heads, softmax, softmax_backward, swiglu, swiglu_backward,
    top_experts,
};
pub use matrix::{Element, Error, Matrix, MatrixStack, PackedActivations, PackedWeight};
pub use pack::{Amax, Packer, divides_exactly, pack_weight};
pub use quantize::{DeviceMask, Residual, quantize};
pub use route::{MatmulOptions, Route, Routing, grouped_matmul, matmul};
pub use values::{
    DecodeOptions, Fp8Axis, Fp8Codes, WeightCheck, decode_activations, decode_weight, decode_weight_fp8,
    fake_quantize_fp8,
};

/// Rows of packed buffers are padded to a multiple of this along `k`.
pub const K_STEP: usize = 64;
