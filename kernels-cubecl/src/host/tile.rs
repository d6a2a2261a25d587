//! Weights one tile at a time: `LANES` rows side by side, so that each value along `k` is a vector over rows.
//!
//! A tile is `[k, LANES]`; lanes past the last row hold zeros. Tiles are all that is ever decoded of a packed weight
//! during a product.
use super::dispatch::Vectors;
use super::rounding::{at_most, from_e4m3, to_e2m1, to_e2m1_code, to_e4m3, with_sign};
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
pub(super) fn decode<V: Vectors, const COUNT: usize, const LANES: usize>(
    vectors: V,
    w: WeightView,
    decoded: Decoded,
    row: usize,
    first: usize,
    tile: &mut [[f32; LANES]],
) {
    match w {
        WeightView::Nvfp4(w) => decode_nvfp4::<V, COUNT, LANES>(vectors, w, decoded, row, first, tile),
        WeightView::Fp8(w) => {
            for (strip, tile) in tile.chunks_mut(STRIP).enumerate() {
                decode_fp8(w, decoded, row, first + strip * STRIP, tile);
            }
        }
    }
}

/// Columns that are packed, or decoded from FP8, together: what is kept of them fits local arrays.
pub(super) const STRIP: usize = BLOCKS * BLOCK;

/// Blocks of a strip.
pub(super) const BLOCKS: usize = 4;

#[inline(always)]
fn decode_nvfp4<V: Vectors, const COUNT: usize, const LANES: usize>(
    vectors: V,
    w: Nvfp4View,
    decoded: Decoded,
    row: usize,
    first: usize,
    tile: &mut [[f32; LANES]],
) {
    // Codes and block scales of each lane; none in lanes past the last row.
    let mut codes: [&[[u8; BLOCK / 2]]; LANES] = [&[]; LANES];
    let mut block_scales: [&[u8]; LANES] = [&[]; LANES];
    for lane in 0..LANES.min(w.rows - row) {
        let at = (row + lane) * w.k + first;
        codes[lane] = w.codes[at / 2..][..tile.len() / 2].as_chunks().0;
        block_scales[lane] = &w.block_scales[at / BLOCK..][..tile.len() / BLOCK];
    }
    for (b, block) in tile.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        let mut words = [[0; LANES]; 2];
        let mut steps = [0.0; LANES];
        for lane in 0..LANES {
            if let (Some(codes), Some(scale)) = (codes[lane].get(b), block_scales[lane].get(b)) {
                let codes = u64::from_le_bytes(*codes);
                (words[0][lane], words[1][lane]) = (codes as u32, (codes >> 32) as u32);
                steps[lane] = e4m3::VALUES[usize::from(scale & 0x7f)];
            }
        }
        if decoded == Decoded::Values {
            for step in &mut steps {
                *step = w.outer_scale.step(*step);
            }
        }
        for (lines, words) in block.as_chunks_mut::<8>().0.iter_mut().zip(&words) {
            for (i, line) in lines.iter_mut().enumerate() {
                for v in 0..COUNT {
                    let step = vectors.load(&steps, v);
                    vectors.store(vectors.decode_e2m1(words, v, 4 * i as u32, step), line, v);
                }
            }
        }
    }
}

#[inline(always)]
fn decode_fp8<const LANES: usize>(w: Fp8View, decoded: Decoded, row: usize, first: usize, strip: &mut [[f32; LANES]]) {
    let mut codes = [[0u8; LANES]; STRIP];
    let mut scales = [1.0; LANES];
    for lane in 0..LANES.min(w.rows - row) {
        for (codes, code) in codes
            .iter_mut()
            .zip(&w.codes[(row + lane) * w.k + first..][..strip.len()])
        {
            codes[lane] = *code;
        }
        if decoded == Decoded::Values {
            scales[lane] = w.channel_scales[row + lane];
        }
    }
    for (line, codes) in strip.iter_mut().zip(&codes) {
        for lane in 0..LANES {
            line[lane] = from_e4m3(u32::from(codes[lane])) * scales[lane];
        }
    }
}

/// An f32 matrix `rows × k` in either layout, or a contiguous part of it, read and written by tiles.
///
/// Whole lines are copied as arrays: a copy of unknown length is a function call.
#[derive(Clone, Copy)]
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
                    let values = &self.values[(first + i) * self.rows + row - self.offset..];
                    match values.first_chunk() {
                        Some(values) if lanes == LANES => *line = *values,
                        _ => line[..lanes].copy_from_slice(&values[..lanes]),
                    }
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
                    let values = &mut self.values[(first + i) * self.rows + row - self.offset..];
                    match values.first_chunk_mut() {
                        Some(values) if lanes == LANES => *values = *line,
                        _ => values[..lanes].copy_from_slice(&line[..lanes]),
                    }
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

/// Block scales of a strip, and the inverses to encode with: one of each a block and lane.
#[inline(always)]
pub(super) fn block_scales<const LANES: usize>(
    strip: &[[f32; LANES]],
    encode_scale: f32,
) -> [BlockScales<LANES>; BLOCKS] {
    let amax = block_amax(strip);
    let mut blocks = [BlockScales {
        scales: [0.0; LANES],
        inverses: [0.0; LANES],
    }; BLOCKS];
    for (block, amax) in blocks.iter_mut().zip(&amax) {
        for lane in 0..LANES {
            let scale = to_e4m3(f32::from_bits(amax[lane]) * (encode_scale * nvfp4::SIXTH));
            block.scales[lane] = scale;
            block.inverses[lane] = at_most(1.0 / (scale * (1.0 / encode_scale)), f32::MAX);
        }
    }
    blocks
}

/// Bits of the largest magnitude of each block of a strip, in each lane.
#[inline(always)]
pub(super) fn block_amax<const LANES: usize>(strip: &[[f32; LANES]]) -> [[u32; LANES]; BLOCKS] {
    // One loop over all lines. In a loop over one block, whose length is known, the compiler would reduce lane by lane.
    let mut amax = [[0; LANES]; BLOCKS];
    for (i, line) in strip.iter().enumerate() {
        let amax = &mut amax[i / BLOCK % BLOCKS];
        for lane in 0..LANES {
            amax[lane] = amax[lane].max(line[lane].to_bits() & 0x7fff_ffff);
        }
    }
    amax
}

/// The scales of one block in each lane.
#[derive(Clone, Copy)]
pub(super) struct BlockScales<const LANES: usize> {
    pub scales: [f32; LANES],
    /// What values are multiplied with before they are rounded.
    pub inverses: [f32; LANES],
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

/// Rounds a strip to what it decodes to once packed.
#[inline(always)]
pub(super) fn round<const LANES: usize>(strip: &mut [[f32; LANES]], encode_scale: f32) {
    let blocks = block_scales(strip, encode_scale);
    for (block, scales) in strip.as_chunks_mut::<BLOCK>().0.iter_mut().zip(&blocks) {
        let mut steps = scales.scales;
        for step in &mut steps {
            *step *= 1.0 / encode_scale;
        }
        for line in block {
            for lane in 0..LANES {
                let y = line[lane] * scales.inverses[lane];
                line[lane] = with_sign(to_e2m1(y.abs()) * steps[lane], line[lane]);
            }
        }
    }
}
