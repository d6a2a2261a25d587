//! NVFP4 block scaling: number formats, quantization, residual activation compensation and W4A4 matmul.
//!
//! This crate knows nothing of Burn. Layouts are written once, here:
//!
//! - A *weight* is stored as `rows` (= `d_out`) rows of `k` (= `d_in`) values, blocks of 16 along `k`; `codes` is
//!   `[rows, k/2]` bytes, the even element in the low nibble; `block_scales` is `[rows, k/16]` E4M3 bytes; one outer
//!   scale a tensor (an expert, for experts). FP8 weights are `[rows, k]` E4M3 bytes with one f32 scale a row.
//! - *Activations* are `[tokens, k]`, row-major f32, one power-of-two outer scale a row.
//! - `y[t, n] = Σ_k x̂[t, k] · ŵ[n, k]` (NT), `[tokens, rows]`.
//!
//! In reading order:
//!
//! - [`e2m1`], [`e4m3`]: the number formats;
//! - [`nvfp4`]: block scaling, one block at a time; with the formats, the definition of the numerics;
//! - [`weight`], [`activation`]: what is packed, owned and borrowed;
//! - [`recipe`]: the formulas of other makers of packed weights;
//! - [`residual`]: which part of the quantization residual is quantized a second time;
//! - [`host`]: quantization and matmul on the CPU;
//! - `device` (features `vulkan` and `cuda`): the same on a GPU, and what a decoder layer does between its products;
//! - [`error`]: what can be wrong with an input.
#![warn(missing_docs)]

pub mod activation;
#[cfg(feature = "device")]
pub mod device;
pub mod e2m1;
pub mod e4m3;
pub mod error;
pub mod host;
pub mod nvfp4;
pub mod recipe;
pub mod residual;
pub mod weight;

pub use activation::{Activation, Pass, QuantizedRows, ResidualPass};
pub use error::Error;
pub use nvfp4::{amax, encode_scale};
pub use recipe::{ParameterType, WeightRecipe};
pub use residual::{Compensation, Granularity, ResidualMask, Selection};
pub use weight::{Fp8View, Fp8Weight, Nvfp4View, Nvfp4Weight, OuterScale, WeightLayout, WeightView};

/// Consecutive values along `k` that share one block scale.
pub const BLOCK: usize = 16;
