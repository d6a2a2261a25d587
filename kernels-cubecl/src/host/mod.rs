//! Quantization and matmul on the CPU: the reference route.
//!
//! An output row's bits depend on its own activations and the weight alone: not on other rows, on their number, or on
//! the number of threads.
//!
//! A row of activations that holds NaN or an infinity has NaN outputs, whatever the precision (`Full` excepted, which
//! is plain f32 arithmetic); its neighbours do not change. A weight that is not finite is refused.
#![expect(
    clippy::needless_range_loop,
    reason = "a loop over the lanes of several arrays reads, and compiles, as vector code"
)]
mod activations;
mod dispatch;
mod fp8;
mod matmul;
mod parallel;
mod recipes;
mod rounding;
mod rows;
mod tile;
mod weights;

pub use activations::{accumulate_residual_energy, fake_quantize_activations, quantize_activations};
pub use fp8::quantize_weight_fp8;
pub use matmul::{grouped_matmul, matmul, matmul_quantized};
pub use weights::{dequantize_weight, fake_quantize_weight, quantize_weight, quantize_weight_by};
