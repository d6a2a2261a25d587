//! Weights one tile at a time: `LANES` rows side by side, so that each value along `k` is a vector over rows.
//!
//! A tile is `[k, LANES]`; lanes past the last row hold zeros. Tiles are all that is ever decoded of a packed weight
//! during a product.
use super::rounding::{at_most, to_e2m1, to_e2m1_code, to_e4m3, twice_e2m1, with_sign};
use crate::{BLOCK, Fp8View, Nvfp4View, WeightLayout, WeightView, e4m3, nvfp4};

/// What a decoded weight is multiplied with already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decoded {
    /// All its scales: the values themselves.
    Values,
    /// Its block scales alone; outer and channel scales join after the sum.
    Units,
}

/// Decodes columns `first..first + tile.len()` of rows `row..row + LANES`. `first` and the length are multiples of 16
/// for an NVFP4 weight.
#[inline(always)]
pub(super) fn decode<const LANES: usize>(
    w: WeightView,
    decoded: Decoded,
    row: usize,
    first: usize,
    tile: &mut [[f32; LANES]],
) {
    match w {
        WeightView::Nvfp4(w) => decode_nvfp4(w, decoded, row, first, tile),
        WeightView::Fp8(w) => decode_fp8(w, decoded, row, first, tile),
    }
}

#[inline(always)]
fn decode_nvfp4<const LANES: usize>(
    w: Nvfp4View,
    decoded: Decoded,
    row: usize,
    first: usize,
    tile: &mut [[f32; LANES]],
) {
    let lanes = LANES.min(w.rows - row);
    for (b, block) in tile.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        let column = first + b * BLOCK;
        let mut steps = [0.0; LANES];
        for (lane, step) in steps.iter_mut().enumerate().take(lanes) {
            *step = e4m3::VALUES[usize::from(w.block_scales[(row + lane) * (w.k / BLOCK) + column / BLOCK] & 0x7f)];
        }
        if decoded == Decoded::Values {
            steps = steps.map(|block_scale| w.outer_scale.step(block_scale));
        }
        for (half, lines) in block.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // Eight codes of each row in a word.
            let mut words = [0; LANES];
            for (lane, word) in words.iter_mut().enumerate().take(lanes) {
                let at = ((row + lane) * w.k + column) / 2 + 4 * half;
                *word = w.codes[at..]
                    .first_chunk()
                    .map_or(0, |bytes| u32::from_le_bytes(*bytes));
            }
            for (i, line) in lines.iter_mut().enumerate() {
                for lane in 0..LANES {
                    let code = words[lane] >> (4 * i);
                    let value = 0.5 * twice_e2m1(code & 7) * steps[lane];
                    line[lane] = f32::from_bits(value.to_bits() ^ (code & 8) << 28);
                }
            }
        }
    }
}

#[inline(always)]
fn decode_fp8<const LANES: usize>(w: Fp8View, decoded: Decoded, row: usize, first: usize, tile: &mut [[f32; LANES]]) {
    for lane in 0..LANES.min(w.rows - row) {
        let scale = match decoded {
            Decoded::Values => w.channel_scales[row + lane],
            Decoded::Units => 1.0,
        };
        let codes = &w.codes[(row + lane) * w.k + first..][..tile.len()];
        for (line, code) in tile.iter_mut().zip(codes) {
            line[lane] = e4m3::VALUES[usize::from(*code)] * scale;
        }
    }
    for line in tile {
        line[LANES.min(w.rows - row)..].fill(0.0);
    }
}

/// An f32 matrix `rows × k` in either layout, or a contiguous part of it, read and written by tiles.
pub(super) struct Matrix<T> {
    pub values: T,
    pub rows: usize,
    pub k: usize,
    pub layout: WeightLayout,
    /// Position in the matrix of the first of `values`.
    pub offset: usize,
}

impl Matrix<&[f32]> {
    /// Columns `first..first + tile.len()` of rows `row..row + LANES`.
    #[inline(always)]
    pub(super) fn load<const LANES: usize>(&self, row: usize, first: usize, tile: &mut [[f32; LANES]]) {
        let lanes = LANES.min(self.rows - row);
        match self.layout {
            WeightLayout::Transposed => {
                for (i, line) in tile.iter_mut().enumerate() {
                    line[..lanes].copy_from_slice(&self.values[(first + i) * self.rows + row - self.offset..][..lanes]);
                }
            }
            WeightLayout::RowMajor => {
                for lane in 0..lanes {
                    let values = &self.values[(row + lane) * self.k + first - self.offset..];
                    for (line, value) in tile.iter_mut().zip(values) {
                        line[lane] = *value;
                    }
                }
            }
        }
    }
}

impl Matrix<&mut [f32]> {
    /// Stores a tile at columns `first..first + tile.len()` of rows `row..row + LANES`.
    #[inline(always)]
    pub(super) fn store<const LANES: usize>(&mut self, row: usize, first: usize, tile: &[[f32; LANES]]) {
        let lanes = LANES.min(self.rows - row);
        match self.layout {
            WeightLayout::Transposed => {
                for (i, line) in tile.iter().enumerate() {
                    self.values[(first + i) * self.rows + row - self.offset..][..lanes].copy_from_slice(&line[..lanes]);
                }
            }
            WeightLayout::RowMajor => {
                for lane in 0..lanes {
                    let values = &mut self.values[(row + lane) * self.k + first - self.offset..];
                    for (value, line) in values.iter_mut().zip(tile) {
                        *value = line[lane];
                    }
                }
            }
        }
    }
}

/// One block in each lane: its scales, and the inverses to encode with.
#[inline(always)]
pub(super) fn block_scales<const LANES: usize>(
    block: &[[f32; LANES]; BLOCK],
    encode_scale: f32,
) -> ([f32; LANES], [f32; LANES]) {
    let mut amax = [0; LANES];
    for line in block {
        for lane in 0..LANES {
            amax[lane] = amax[lane].max(line[lane].to_bits() & 0x7fff_ffff);
        }
    }
    let scales = amax.map(|amax| to_e4m3(f32::from_bits(amax) * (encode_scale * nvfp4::SIXTH)));
    let outer = 1.0 / encode_scale;
    (scales, scales.map(|scale| at_most(1.0 / (scale * outer), f32::MAX)))
}

/// Codes of one block in each lane, eight a word.
#[inline(always)]
pub(super) fn encode<const LANES: usize>(block: &[[f32; LANES]; BLOCK], inverses: &[f32; LANES]) -> [[u32; LANES]; 2] {
    let mut words = [[0; LANES]; 2];
    for (lines, words) in block.as_chunks::<8>().0.iter().zip(&mut words) {
        for (i, line) in lines.iter().enumerate() {
            for lane in 0..LANES {
                let y = line[lane] * inverses[lane];
                words[lane] |= (to_e2m1_code(y.abs()) | line[lane].to_bits() >> 28 & 8) << (4 * i);
            }
        }
    }
    words
}

/// Rounds one block in each lane to what it decodes to once packed.
#[inline(always)]
pub(super) fn round<const LANES: usize>(block: &mut [[f32; LANES]; BLOCK], encode_scale: f32) {
    let (scales, inverses) = block_scales(block, encode_scale);
    let steps = scales.map(|scale| scale * (1.0 / encode_scale));
    for line in block {
        for lane in 0..LANES {
            let y = line[lane] * inverses[lane];
            line[lane] = with_sign(to_e2m1(y.abs()) * steps[lane], line[lane]);
        }
    }
}
