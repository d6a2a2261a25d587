//! NVFP4 block scaling: number formats, quantization, residual activation compensation and W4A4 matmul.
//!
//! This crate knows nothing of Burn. Host code works on slices; layouts are written once, here:
//!
//! - A *weight* is stored as `rows` (= `d_out`, or `groups · d_out`) rows of `k` (= `d_in`) values, blocks of 16
//!   along `k`; `codes` is `[rows, k/2]` bytes, the even element in the low nibble; `block_scales` is `[rows, k/16]`
//!   E4M3 bytes; one outer scale a tensor (a group, for experts).
//! - *Activations* are `[tokens, k]`, row-major f32, one power-of-two outer scale a row.
//! - `y[t, n] = Σ_k x̂[t, k] · ŵ[n, k]` (NT).
pub mod error;
pub mod residual;
pub mod weight;

pub use error::Error;
pub use residual::{Compensation, Granularity, ResidualMask, Selection};
pub use weight::{Nvfp4View, OuterScale};

/// Consecutive values along `k` that share one block scale.
pub const BLOCK: usize = 16;
