//! Packed weights, owned and borrowed.
use crate::{BLOCK, Error};

/// The scale above the block scales, in the convention of whoever made the tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OuterScale {
    /// `value = e2m1 · (block_scale · s)`: ours (`1/S`), ModelOpt's `weight_scale_2`.
    Multiply(f32),
    /// `value = e2m1 · (block_scale / s)`: compressed-tensors' `weight_global_scale`.
    Divide(f32),
}

impl OuterScale {
    /// What a block's E2M1 values are multiplied with: the block scale with the outer scale applied, one rounding.
    pub fn step(self, block_scale: f32) -> f32 {
        match self {
            Self::Multiply(s) => block_scale * s,
            Self::Divide(s) => block_scale / s,
        }
    }
}

/// How the f32 matrix of a weight lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[rows, k]`: PyTorch's and checkpoint files' `[d_out, d_in]`.
    #[default]
    RowMajor,
    /// `[k, rows]`: Burn's `[d_in, d_out]`.
    Transposed,
}

impl WeightLayout {
    /// Position of the value in row `row`, column `column` of a `rows × k` weight.
    pub fn index(self, row: usize, column: usize, rows: usize, k: usize) -> usize {
        match self {
            Self::RowMajor => row * k + column,
            Self::Transposed => column * rows + row,
        }
    }
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
    /// `[rows, k/16]`, E4M3. The sign bit is ignored, as tensor cores do (UE4M3).
    pub block_scales: &'a [u8],
    /// The tensor's scale.
    pub outer_scale: OuterScale,
}

/// A packed NVFP4 matrix that owns its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Weight {
    /// Rows, `d_out`.
    pub rows: usize,
    /// Values a row, `d_in`.
    pub k: usize,
    /// `[rows, k/2]`.
    pub codes: Vec<u8>,
    /// `[rows, k/16]`, E4M3.
    pub block_scales: Vec<u8>,
    /// The tensor's scale.
    pub outer_scale: OuterScale,
}

impl Nvfp4Weight {
    /// Borrows the weight.
    pub fn view(&self) -> Nvfp4View<'_> {
        Nvfp4View {
            rows: self.rows,
            k: self.k,
            codes: &self.codes,
            block_scales: &self.block_scales,
            outer_scale: self.outer_scale,
        }
    }
}

/// An FP8 matrix: E4M3 codes with one f32 scale a row (output channel).
#[derive(Clone, Copy, Debug)]
pub struct Fp8View<'a> {
    /// Rows, `d_out`.
    pub rows: usize,
    /// Values a row, `d_in`.
    pub k: usize,
    /// `[rows, k]`, E4M3.
    pub codes: &'a [u8],
    /// `[rows]`: `value = e4m3 · scale`.
    pub channel_scales: &'a [f32],
}

/// An FP8 matrix that owns its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8Weight {
    /// Rows, `d_out`.
    pub rows: usize,
    /// Values a row, `d_in`.
    pub k: usize,
    /// `[rows, k]`, E4M3.
    pub codes: Vec<u8>,
    /// `[rows]`: `value = e4m3 · scale`.
    pub channel_scales: Vec<f32>,
}

impl Fp8Weight {
    /// Borrows the weight.
    pub fn view(&self) -> Fp8View<'_> {
        Fp8View {
            rows: self.rows,
            k: self.k,
            codes: &self.codes,
            channel_scales: &self.channel_scales,
        }
    }
}

/// A packed weight of either format.
#[derive(Clone, Copy, Debug)]
pub enum WeightView<'a> {
    /// NVFP4.
    Nvfp4(Nvfp4View<'a>),
    /// FP8.
    Fp8(Fp8View<'a>),
}

impl WeightView<'_> {
    /// Rows, `d_out`.
    pub fn rows(&self) -> usize {
        match self {
            Self::Nvfp4(w) => w.rows,
            Self::Fp8(w) => w.rows,
        }
    }

    /// Values a row, `d_in`.
    pub fn k(&self) -> usize {
        match self {
            Self::Nvfp4(w) => w.k,
            Self::Fp8(w) => w.k,
        }
    }

    /// Whether the buffers have the lengths that the shape says.
    ///
    /// # Errors
    /// Names the buffer, with both lengths; `k` of an NVFP4 weight that is not a multiple of 16.
    pub fn check(&self) -> Result<(), Error> {
        match self {
            Self::Nvfp4(w) => {
                if !w.k.is_multiple_of(BLOCK) {
                    return Err(Error::UnalignedK { k: w.k });
                }
                Error::check_length("codes of an NVFP4 weight", &[w.rows, w.k / 2], w.codes.len())?;
                Error::check_length(
                    "block scales of an NVFP4 weight",
                    &[w.rows, w.k / BLOCK],
                    w.block_scales.len(),
                )
            }
            Self::Fp8(w) => {
                Error::check_length("codes of an FP8 weight", &[w.rows, w.k], w.codes.len())?;
                Error::check_length("channel scales of an FP8 weight", &[w.rows], w.channel_scales.len())
            }
        }
    }
}
