//! Packed weights as borrowed views.

/// The scale above the block scales, in the convention of whoever made the tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OuterScale {
    /// `value = e2m1 · (block_scale · s)`: ours (`1/S`), ModelOpt's `weight_scale_2`.
    Multiply(f32),
    /// `value = e2m1 · (block_scale / s)`: compressed-tensors' `weight_global_scale`.
    Divide(f32),
}

/// A packed NVFP4 matrix of `rows` rows of `k` values.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4View<'a> {
    /// Rows, `d_out`.
    pub rows: usize,
    /// Values a row, `d_in`.
    pub k: usize,
    /// `[rows, k/2]`.
    pub codes: &'a [u8],
    /// `[rows, k/16]`, E4M3.
    pub block_scales: &'a [u8],
    /// The tensor's scale.
    pub outer_scale: OuterScale,
}
