//! A dense weight on its way to codes and scales.
use burn_nvfp4::safetensors_file::Dtype;
use kernels_cubecl::{BLOCK, Nvfp4Weight, WeightLayout, WeightRecipe, host};
use rayon::prelude::*;

use crate::elements::decode;

/// A dense weight `[rows, k]`, in the bytes of its file.
pub struct Matrix<'a> {
    /// Type of its values.
    pub dtype: Dtype,
    bytes: &'a [u8],
    rows: usize,
    k: usize,
}

/// Values that are packed at a time: their f32 copy stays in a thread's cache.
const PIECE: usize = 1 << 17;

impl<'a> Matrix<'a> {
    /// From row-major values.
    pub fn new(dtype: Dtype, bytes: &'a [u8], rows: usize, k: usize) -> Self {
        Self { dtype, bytes, rows, k }
    }

    /// Packs it in pieces of whole rows, so that no f32 copy of the whole is made. `amax` is the largest magnitude that the
    /// outer scale covers.
    ///
    /// # Errors
    /// When `amax` is below the matrix' own, or `k` is not a multiple of 16.
    pub fn pack(&self, recipe: WeightRecipe, amax: f32) -> Result<Nvfp4Weight, kernels_cubecl::Error> {
        let mut weight = Nvfp4Weight {
            rows: self.rows,
            k: self.k,
            codes: vec![0; self.rows * self.k / 2],
            block_scales: vec![0; self.rows * self.k / BLOCK],
            outer_scale: recipe.outer_scale(amax),
        };
        if self.bytes.is_empty() {
            return Ok(weight);
        }
        let piece = self.k * (PIECE / self.k).max(1);
        let element = self.dtype.bitsize() / 8;
        let codes = weight.codes.par_chunks_mut(piece / 2);
        let pieces = self
            .bytes
            .par_chunks(piece * element)
            .zip(codes)
            .zip(weight.block_scales.par_chunks_mut(piece / BLOCK));
        pieces.try_for_each_init(Vec::new, |values, ((bytes, codes), block_scales)| {
            values.resize(bytes.len() / element, 0.0);
            decode(self.dtype, bytes, values);
            let rows = values.len() / self.k;
            let packed = host::quantize_weight_by(recipe, values, rows, self.k, WeightLayout::RowMajor, Some(amax))?;
            codes.copy_from_slice(&packed.codes);
            block_scales.copy_from_slice(&packed.block_scales);
            Ok(())
        })?;
        Ok(weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dequantize::dense_bytes, elements::encode};
    use kernels_cubecl::{ParameterType, WeightView, amax};

    #[test]
    fn a_matrix_of_many_pieces_is_packed_and_decoded_as_one() {
        // Pieces are of 431 rows, and the last one has fewer.
        let (rows, k) = (1000, 304);
        let value = |i: usize| ((i * 7919 % 2003) as f32 - 1001.0) * 2f32.powi((i * 31 % 7) as i32 - 12);
        let values: Vec<f32> = (0..rows * k).map(value).collect();
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let mut bytes = vec![0; values.len() * dtype.bitsize() / 8];
            encode(dtype, &values, &mut bytes);
            let mut stored = vec![0.0; values.len()];
            decode(dtype, &bytes, &mut stored);
            let amax = 1.5 * amax(&stored);
            for recipe in [
                WeightRecipe::TransformerEngine,
                WeightRecipe::ModelOpt,
                WeightRecipe::CompressedTensors(ParameterType::Bf16),
            ] {
                let packed = Matrix::new(dtype, &bytes, rows, k).pack(recipe, amax).unwrap();
                let layout = WeightLayout::RowMajor;
                let whole = host::quantize_weight_by(recipe, &stored, rows, k, layout, Some(amax)).unwrap();
                assert!(packed == whole, "{dtype} {recipe:?}");
                let mut decoded = vec![0.0; values.len()];
                host::dequantize_weight(WeightView::Nvfp4(whole.view()), layout, &mut decoded).unwrap();
                let mut expected = vec![0; bytes.len()];
                encode(dtype, &decoded, &mut expected);
                assert!(dense_bytes(&packed.view(), dtype) == expected, "{dtype} {recipe:?}");
            }
        }
    }
}
