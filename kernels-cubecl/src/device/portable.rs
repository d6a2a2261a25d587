//! The matmul of any runtime, NVFP4 and FP8: u32 and f32 arithmetic alone.
//!
//! A cube makes 32 × 32 outputs, 2 × 2 a unit. Both passes of the activations are multiples of one unit and their sum is
//! exact in f32, so one product serves both: compensation costs the decoding alone.
use super::format::{e2m1_decode, e4m3_decode, scale_output};
use super::fp8::Fp8Rows;
use super::grouping::{Groups, locate, source_row};
use super::matrix::{PackedActivations, PackedWeight, array};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Outputs along either side of a cube.
pub(super) const TILE: usize = 32;
/// Columns of `k` that are decoded at a time: one block of 16.
const DEPTH: usize = 16;
/// Words from one column of a decoded tile to the next; odd, against bank conflicts.
const PITCH: usize = TILE + 1;

/// What packed operands are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Format {
    Nvfp4,
    /// Scales are one a row of either operand, and there are no block scales.
    Fp8,
}

/// Writes `y` (`[tokens, rows]`), the product of FP8 operands.
pub(super) fn launch_fp8<R: Runtime, Y: Float + CubeElement>(
    client: &ComputeClient<R>,
    x: &Fp8Rows,
    w: &Fp8Rows,
    groups: &Groups,
    y: &Handle,
) {
    let (kp, rows) = (x.padded_k(), w.rows / w.experts);
    // SAFETY: rows past the operands' are neither read nor written; block scales are not read.
    unsafe {
        multiply::launch_unchecked::<Y, R>(
            client,
            CubeCount::Static(rows.div_ceil(TILE) as u32, groups.tiles as u32, 1),
            CubeDim::new_2d(16, 16),
            array(&x.codes, x.rows * kp / 4),
            array(&x.codes, 1),
            array(&x.scales, x.rows),
            array(&w.codes, w.rows * kp / 4),
            array(&w.codes, 1),
            array(&w.scales, w.rows),
            array(groups.table(&x.scales), groups.table_len()),
            array(groups.gather(&x.scales), groups.gather_len()),
            array(y, groups.tokens * rows),
            x.rows as u32,
            groups.tokens as u32,
            rows as u32,
            kp as u32,
            Format::Fp8,
            false,
            groups.is_grouped(),
            groups.is_gathered(),
        );
    }
}

/// Writes `y` (`[tokens, rows]`).
pub(super) fn launch<R: Runtime, Y: Float + CubeElement>(
    client: &ComputeClient<R>,
    x: &PackedActivations,
    w: &PackedWeight,
    groups: &Groups,
    y: &Handle,
) {
    let kp = x.padded_k();
    // SAFETY: rows past the operands' are neither read nor written.
    unsafe {
        multiply::launch_unchecked::<Y, R>(
            client,
            CubeCount::Static(w.rows.div_ceil(TILE) as u32, groups.tiles as u32, 1),
            CubeDim::new_2d(16, 16),
            array(&x.codes, x.passes * x.tokens * kp / 8),
            array(&x.block_scales, x.passes * x.tokens * kp / 64),
            array(&x.units, x.tokens),
            array(&w.codes, w.experts * w.rows * kp / 8),
            array(&w.block_scales, w.experts * w.rows * kp / 64),
            array(&w.outer_scales, w.experts),
            array(groups.table(&x.units), groups.table_len()),
            array(groups.gather(&x.units), groups.gather_len()),
            array(y, groups.tokens * w.rows),
            x.tokens as u32,
            groups.tokens as u32,
            w.rows as u32,
            kp as u32,
            Format::Nvfp4,
            x.passes == 2,
            groups.is_grouped(),
            groups.is_gathered(),
        );
    }
}

/// Grid: x over columns of the output, y over tiles of tokens.
#[cube(launch_unchecked)]
fn multiply<Y: Float>(
    x_codes: &Array<u32>,
    x_scales: &Array<u32>,
    units: &Array<f32>,
    w_codes: &Array<u32>,
    w_scales: &Array<u32>,
    outer_scales: &Array<f32>,
    table: &Array<u32>,
    gather: &Array<u32>,
    y: &mut Array<Y>,
    sources: u32,
    tokens: u32,
    rows: u32,
    kp: u32,
    #[comptime] format: Format,
    #[comptime] residual: bool,
    #[comptime] grouped: bool,
    #[comptime] gathered: bool,
) {
    let sources = sources as usize;
    let rows = rows as usize;
    let kp = kp as usize;
    let (expert, first, last) = locate(table, tokens, TILE, grouped);
    let column = CUBE_POS_X as usize * TILE;
    let unit_x = UNIT_POS_X as usize;
    let unit_y = UNIT_POS_Y as usize;

    let mut tile_x = SharedMemory::<f32>::new(DEPTH * PITCH);
    let mut tile_w = SharedMemory::<f32>::new(DEPTH * PITCH);
    let mut sums = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        sums[i] = 0.0;
    }
    // What this unit decodes: two neighbouring values of one row.
    let line = UNIT_POS as usize / 8;
    let pair = (UNIT_POS as usize % 8) * 2;
    let token = first + line;
    let channel = column + line;
    let source = source_row(gather, min(token, tokens as usize - 1), gathered);
    // A tile without tokens costs nothing.
    let blocks = select(first < last, kp / DEPTH, 0usize);
    for block in 0..blocks {
        let at = block * DEPTH + pair;
        let mut x0 = 0.0f32;
        let mut x1 = 0.0f32;
        if token < last {
            let (a, b) = decode_pair(x_codes, x_scales, source, at, kp, format);
            x0 = a;
            x1 = b;
            if residual {
                let (a, b) = decode_pair(x_codes, x_scales, source + sources, at, kp, format);
                x0 += a;
                x1 += b;
            }
        }
        let mut w0 = 0.0f32;
        let mut w1 = 0.0f32;
        if channel < rows {
            let (a, b) = decode_pair(w_codes, w_scales, expert * rows + channel, at, kp, format);
            w0 = a;
            w1 = b;
        }
        sync_cube();
        tile_x[pair * PITCH + line] = x0;
        tile_x[(pair + 1) * PITCH + line] = x1;
        tile_w[pair * PITCH + line] = w0;
        tile_w[(pair + 1) * PITCH + line] = w1;
        sync_cube();
        #[unroll]
        for l in 0..DEPTH {
            let a0 = tile_x[l * PITCH + unit_y * 2];
            let a1 = tile_x[l * PITCH + unit_y * 2 + 1];
            let b0 = tile_w[l * PITCH + unit_x * 2];
            let b1 = tile_w[l * PITCH + unit_x * 2 + 1];
            sums[0] = fma(a0, b0, sums[0]);
            sums[1] = fma(a0, b1, sums[1]);
            sums[2] = fma(a1, b0, sums[2]);
            sums[3] = fma(a1, b1, sums[3]);
        }
    }
    #[unroll]
    for i in 0..4usize {
        let token = first + unit_y * 2 + comptime!(i / 2);
        let channel = column + unit_x * 2 + comptime!(i % 2);
        if token < last && token < first + TILE && channel < rows {
            let source = source_row(gather, token, gathered);
            let mut scale_at = expert;
            if comptime!(format == Format::Fp8) {
                scale_at = expert * rows + channel;
            }
            let outer = outer_scales[scale_at];
            y[token * rows + channel] = Y::cast_from(scale_output(sums[i], units[source], outer));
        }
    }
}

/// Two values of row `row` from column `at` on, in units.
#[cube]
fn decode_pair(
    codes: &Array<u32>,
    scales: &Array<u32>,
    row: usize,
    at: usize,
    kp: usize,
    #[comptime] format: Format,
) -> (f32, f32) {
    if comptime!(format == Format::Nvfp4) {
        let word = codes[row * (kp / 8) + at / 8] >> u32::cast_from(4 * (at % 8));
        let byte = scales[row * (kp / 64) + at / 64] >> u32::cast_from(8 * (at / 16 % 4));
        let step = e4m3_decode(byte);
        (e2m1_decode(word) * step, e2m1_decode(word >> 4u32) * step)
    } else {
        let word = codes[row * (kp / 4) + at / 4] >> u32::cast_from(8 * (at % 4));
        (signed_e4m3(word), signed_e4m3(word >> 8u32))
    }
}

/// Value of the low byte, sign included.
#[cube]
fn signed_e4m3(byte: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(e4m3_decode(byte)) | ((byte & 128u32) << 24u32))
}
