//! The matmul of a decode step: few rows of activations, each weight read once, memory-bound.
//!
//! **The residual rides along.** Weights are the 16-row operand of the tensor core and tokens the 8-column one. The rows
//! of the residual pass are further columns: one more MMA on a weight fragment that is decoded already, and no further
//! weight traffic. Up to four tokens share one tile with their residuals.
//!
//! A warp takes `groups` groups of 16 weight rows and walks over `k` in chunks of 256; the `splits` warps of a cube hold
//! the same rows, take chunks in turn, and add up at the end. Of a chunk, lane `4g + t` holds 64 consecutive values of rows
//! `g` and `g + 8`: 32 bytes of codes in two loads, the first of which brings the whole line, and one word of scales,
//! straight from the packed layout. It holds the same piece of token `g` of every tile. (The tensor core does not care which `k` sits in
//! which slot as long as both operands agree.) Nothing passes through shared memory, and there is no barrier before the
//! end: as soon as a half is used up, that of the warp's next chunk is on its way to the same registers.
//!
//! The order of a sum depends on `splits` and on `k` alone: a chunk after the other within a warp, first pass and residual
//! apart, then `first + residual` of one warp after the other.
use super::format::scale_output;
use super::grouping::{Groups, locate, source_row};
use super::matrix::{PackedActivations, PackedWeight, array};
use super::mma16::{MAGNITUDES, UNDO, decode_scales, decode_word};
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::f16;

/// Values of `k` that a warp takes at a time.
const CHUNK: usize = 256;
/// What is compiled into a decode kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Groups of 16 weight rows.
    pub groups: usize,
    /// Warps that share the chunks of `k`.
    pub splits: usize,
    /// Tiles of 8 tokens; 0 where up to four tokens share a tile with their residuals.
    pub tiles: usize,
    /// With a residual pass.
    pub residual: bool,
    /// Tokens sorted by expert.
    pub grouped: bool,
    /// Rows of activations by index.
    pub gathered: bool,
}

impl Plan {
    /// Launch table, measured on an H200. `splits` depends on the weight's shape alone, so that a row's bits do.
    pub(crate) fn new(tokens: usize, rows: usize, kp: usize, residual: bool, grouped: bool, gathered: bool) -> Self {
        let chunks = kp.div_ceil(CHUNK);
        let splits = if rows < 4096 { (chunks / 2).clamp(4, 16) } else { 8 };
        let splits = splits.min(chunks);
        let tiles = match (grouped, residual && tokens <= 4) {
            (true, _) => 1,
            (false, true) => 0,
            // Where cubes are few, two of them share a weight's rows sooner than one takes twice the operands.
            (false, false) if rows < 8192 && residual => 1,
            (false, false) => tokens.div_ceil(8).min(2),
        };
        let mut plan = Self {
            groups: 1,
            splits,
            tiles,
            residual,
            grouped,
            gathered,
        };
        plan.groups = match (rows, plan.operands()) {
            _ if grouped => 4,
            (0..4096, _) | (4096..8192, 1) => 1,
            (_, 4) => 4,
            _ => 2,
        };
        plan
    }

    /// Tokens of a cube.
    pub(crate) fn tokens(&self) -> usize {
        if self.stacked() { 4 } else { 8 * self.tiles }
    }

    /// Rows of the weight of a cube.
    pub(crate) fn rows(&self) -> usize {
        16 * self.groups
    }

    /// Tokens in columns 0..4 of the only tile, residuals in 4..8.
    fn stacked(&self) -> bool {
        self.tiles == 0
    }

    /// Tiles of 8 columns of the output.
    fn columns(&self) -> usize {
        self.tiles.max(1)
    }

    /// Tiles of 8 columns that are multiplied: tokens, then residuals.
    fn operands(&self) -> usize {
        if self.stacked() {
            1
        } else {
            self.tiles * (1 + usize::from(self.residual))
        }
    }
}

/// Writes `y` (`[tokens, rows]`).
pub(super) fn launch<R: Runtime, Y: Float + CubeElement>(
    client: &ComputeClient<R>,
    x: &PackedActivations,
    w: &PackedWeight,
    groups: &Groups,
    plan: Plan,
    y: &Handle,
) {
    let kp = x.padded_k();
    // SAFETY: rows and chunks past the operands' are read from inside them and not written.
    unsafe {
        multiply::launch_unchecked::<Y, R>(
            client,
            CubeCount::Static(w.rows.div_ceil(plan.rows()) as u32, groups.tiles as u32, 1),
            CubeDim::new_1d(32 * plan.splits as u32),
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
            MAGNITUDES,
            plan,
        );
    }
}

/// Grid: x over rows of the weight, y over tiles of tokens.
#[cube(launch_unchecked)]
fn multiply<Y: Float>(
    x_codes: &Array<Vector<u32, Const<4>>>,
    x_scales: &Array<u32>,
    units: &Array<f32>,
    w_codes: &Array<Vector<u32, Const<4>>>,
    w_scales: &Array<u32>,
    outer_scales: &Array<f32>,
    table: &Array<u32>,
    gather: &Array<u32>,
    y: &mut Array<Y>,
    sources: u32,
    tokens: u32,
    rows: u32,
    kp: u32,
    magnitudes: u32,
    #[comptime] plan: Plan,
) {
    let (expert, first, last) = locate(table, tokens, comptime!(plan.tokens()), plan.grouped);
    if first < last {
        multiply_tile::<Y>(
            x_codes,
            x_scales,
            units,
            w_codes,
            w_scales,
            outer_scales,
            gather,
            y,
            sources,
            rows,
            kp,
            magnitudes,
            expert,
            first,
            last,
            plan,
        );
    }
}

#[cube]
fn multiply_tile<Y: Float>(
    x_codes: &Array<Vector<u32, Const<4>>>,
    x_scales: &Array<u32>,
    units: &Array<f32>,
    w_codes: &Array<Vector<u32, Const<4>>>,
    w_scales: &Array<u32>,
    outer_scales: &Array<f32>,
    gather: &Array<u32>,
    y: &mut Array<Y>,
    sources: u32,
    rows: u32,
    kp: u32,
    magnitudes: u32,
    expert: usize,
    first: usize,
    last: usize,
    #[comptime] plan: Plan,
) {
    let operands = comptime!(plan.operands());
    let rows = rows as usize;
    let kp = kp as usize;
    let chunks = kp.div_ceil(CHUNK);
    let lane = UNIT_POS_PLANE as usize;
    let split = UNIT_POS as usize / 32;
    let piece = lane % 4;

    // This lane's rows of the weight and of each operand, clamped: what lies past the end is computed and not stored.
    let mut w_rows = Array::<u32>::new(comptime!(2 * plan.groups));
    #[unroll]
    for i in 0..comptime!(2 * plan.groups) {
        let row = min(
            CUBE_POS_X as usize * comptime!(plan.rows()) + lane / 4 + comptime!(8 * i),
            rows - 1,
        );
        w_rows[i] = u32::cast_from(expert * rows + row);
    }
    let w_lines = comptime!(2 * plan.groups);
    let mut w = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * w_lines));
    let mut w_steps = Array::<u32>::new(w_lines);
    fetch_scales(w_scales, &w_rows, &mut w_steps, split, piece, kp, w_lines);
    fetch(w_codes, &w_rows, &mut w, split, piece, kp, 0usize, w_lines);
    fetch(w_codes, &w_rows, &mut w, split, piece, kp, 1usize, w_lines);

    let mut x_rows = Array::<u32>::new(operands);
    #[unroll]
    for b in 0..operands {
        let mut token = first + comptime!(b % plan.columns() * 8) + lane / 4;
        let mut pass = comptime!(b / plan.columns()).runtime();
        if comptime!(plan.stacked()) {
            token = first + lane / 4 % 4;
            pass = lane / 16;
        }
        let source = source_row(gather, min(token, last - 1), plan.gathered);
        x_rows[b] = u32::cast_from(source + pass * sources as usize);
    }
    let mut x = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * operands));
    let mut x_steps = Array::<u32>::new(operands);
    fetch_scales(x_scales, &x_rows, &mut x_steps, split, piece, kp, operands);
    fetch(x_codes, &x_rows, &mut x, split, piece, kp, 0usize, operands);
    fetch(x_codes, &x_rows, &mut x, split, piece, kp, 1usize, operands);

    // Scales of the outputs, for the end.
    let mut tile_units = SharedMemory::<f32>::new(comptime!(8 * plan.columns()));
    if UNIT_POS < comptime!(8 * plan.columns() as u32) {
        let token = min(first + UNIT_POS as usize, last - 1);
        tile_units[UNIT_POS as usize] = units[source_row(gather, token, plan.gathered)];
    }
    let outer = outer_scales[expert];

    let mut sums = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..comptime!(plan.groups * plan.operands()) {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::zeroed();
        sum[1] = Vector::zeroed();
        sums.push(sum);
    }

    let mut next_w_steps = Array::<u32>::new(w_lines);
    let mut next_x_steps = Array::<u32>::new(operands);
    for chunk in range_stepped(split, chunks, plan.splits) {
        let next = chunk + plan.splits;
        if next < chunks {
            fetch_scales(w_scales, &w_rows, &mut next_w_steps, next, piece, kp, w_lines);
            fetch_scales(x_scales, &x_rows, &mut next_x_steps, next, piece, kp, operands);
        }
        #[unroll]
        for half in 0..2usize {
            multiply_half(&w, &w_steps, &x, &x_steps, &mut sums, magnitudes, half, plan);
            // This half is used up.
            if next < chunks {
                fetch(x_codes, &x_rows, &mut x, next, piece, kp, half, operands);
                fetch(w_codes, &w_rows, &mut w, next, piece, kp, half, w_lines);
            }
        }
        #[unroll]
        for i in 0..w_lines {
            w_steps[i] = next_w_steps[i];
        }
        #[unroll]
        for b in 0..operands {
            x_steps[b] = next_x_steps[b];
        }
    }
    store(&tile_units, outer, y, &sums, rows, first, last, plan);
}

/// Half of this lane's 64 codes of a chunk, of every row. What lies past the end is read from inside the row; its scales
/// are zero.
#[cube]
fn fetch(
    codes: &Array<Vector<u32, Const<4>>>,
    rows: &Array<u32>,
    to: &mut Array<Vector<u32, Const<4>>>,
    chunk: usize,
    piece: usize,
    kp: usize,
    #[comptime] half: usize,
    #[comptime] lines: usize,
) {
    let vectors = kp / 32;
    let step = min(chunk * 4 + piece, kp / 64 - 1);
    #[unroll]
    for i in 0..lines {
        to[comptime!(half * lines + i)] = codes[rows[i] as usize * vectors + 2 * step + half];
    }
}

/// The four scales of this lane's codes of a chunk, of every row.
#[cube]
fn fetch_scales(
    scales: &Array<u32>,
    rows: &Array<u32>,
    to: &mut Array<u32>,
    chunk: usize,
    piece: usize,
    kp: usize,
    #[comptime] lines: usize,
) {
    let steps = kp / 64;
    let step = chunk * 4 + piece;
    let inside = select(step < steps, 0xffff_ffffu32, 0u32);
    let step = min(step, steps - 1);
    #[unroll]
    for i in 0..lines {
        to[i] = scales[rows[i] as usize * steps + step] & inside;
    }
}

/// Multiplies four words of every row: 32 values of `k` a lane.
#[cube]
fn multiply_half(
    w: &Array<Vector<u32, Const<4>>>,
    w_steps: &Array<u32>,
    x: &Array<Vector<u32, Const<4>>>,
    x_steps: &Array<u32>,
    sums: &mut Sequence<Array<Vector<f32, Const<2>>>>,
    magnitudes: u32,
    #[comptime] half: usize,
    #[comptime] plan: Plan,
) {
    let def = MmaDefinition::<f16, f16, f32>::new(16usize, 8usize, 16usize);
    let operands = comptime!(plan.operands());
    let w_lines = comptime!(2 * plan.groups);
    let mut w_pairs = Array::<Vector<f16, Const<2>>>::new(w_lines);
    #[unroll]
    for i in 0..w_lines {
        w_pairs[i] = decode_scales(w_steps[i] >> comptime!(16 * half as u32));
    }
    let mut x_pairs = Array::<Vector<f16, Const<2>>>::new(operands);
    #[unroll]
    for b in 0..operands {
        x_pairs[b] = decode_scales(x_steps[b] >> comptime!(16 * half as u32));
    }
    #[unroll]
    for j in 0..4usize {
        let mut tiles = Array::<Vector<u32, Const<4>>>::new(operands);
        #[unroll]
        for b in 0..operands {
            let words = x[comptime!(half * operands + b)];
            tiles[b] = decode_word(words[j], x_pairs[b], magnitudes, comptime!(j / 2));
        }
        #[unroll]
        for a in 0..plan.groups {
            let words = w[comptime!(half * w_lines + 2 * a)];
            let upper = decode_word(words[j], w_pairs[comptime!(2 * a)], magnitudes, comptime!(j / 2));
            let words = w[comptime!(half * w_lines + 2 * a + 1)];
            let lower = decode_word(words[j], w_pairs[comptime!(2 * a + 1)], magnitudes, comptime!(j / 2));
            #[unroll]
            for q in 0..2usize {
                let mut left = Array::<Vector<f16, Const<2>>>::new(4usize);
                left[0] = Vector::<f16, Const<2>>::reinterpret(upper[comptime!(2 * q)]);
                left[1] = Vector::<f16, Const<2>>::reinterpret(lower[comptime!(2 * q)]);
                left[2] = Vector::<f16, Const<2>>::reinterpret(upper[comptime!(2 * q + 1)]);
                left[3] = Vector::<f16, Const<2>>::reinterpret(lower[comptime!(2 * q + 1)]);
                #[unroll]
                for b in 0..operands {
                    let tile = tiles[b];
                    let mut right = Array::<Vector<f16, Const<2>>>::new(2usize);
                    right[0] = Vector::<f16, Const<2>>::reinterpret(tile[comptime!(2 * q)]);
                    right[1] = Vector::<f16, Const<2>>::reinterpret(tile[comptime!(2 * q + 1)]);
                    let sum = sums.index_mut(comptime!(a * operands + b));
                    def.execute_inplace(&left, &right, sum);
                }
            }
        }
    }
}

/// Adds the sums of all warps, and scales.
#[cube]
fn store<Y: Float>(
    tile_units: &SharedMemory<f32>,
    outer: f32,
    y: &mut Array<Y>,
    sums: &Sequence<Array<Vector<f32, Const<2>>>>,
    rows: usize,
    first: usize,
    last: usize,
    #[comptime] plan: Plan,
) {
    // [warp][group][tile][element][lane]
    let columns = comptime!(plan.columns());
    let operands = comptime!(plan.operands());
    let per_warp = comptime!(plan.groups * plan.columns() * 128);
    let mut partial = SharedMemory::<f32>::new(comptime!(plan.splits * plan.groups * plan.columns() * 128));
    let lane = UNIT_POS_PLANE as usize;
    let split = UNIT_POS as usize / 32;
    #[unroll]
    for a in 0..plan.groups {
        #[unroll]
        for b in 0..columns {
            #[unroll]
            for e in 0..4usize {
                let first_pass = sums.index(comptime!(a * operands + b));
                let pair = first_pass[comptime!(e / 2)];
                let mut value = pair[comptime!(e % 2)];
                if comptime!(operands == 2 * columns) {
                    let second_pass = sums.index(comptime!(a * operands + (b + columns) % operands));
                    let pair = second_pass[comptime!(e / 2)];
                    value += pair[comptime!(e % 2)];
                }
                partial[split * per_warp + comptime!(((a * columns + b) * 4 + e) * 32) + lane] = value;
            }
        }
    }
    sync_cube();
    for at in range_stepped(UNIT_POS as usize, per_warp, comptime!(32 * plan.splits)) {
        let lane = at % 32;
        let element = at / 32 % 4;
        let column = at / 128 % columns * 8 + 2 * (lane % 4) + element % 2;
        let group = at / (128 * columns);
        let token = first + column;
        let row = CUBE_POS_X as usize * comptime!(plan.rows()) + group * 16 + element / 2 * 8 + lane / 4;
        // Stacked: lanes 2 and 3 of four hold the residuals of lanes 0 and 1.
        let inside = !comptime!(plan.stacked()) || lane % 4 < 2;
        if inside && token < last && row < rows {
            let mut sum = 0.0f32;
            #[unroll]
            for z in 0..plan.splits {
                let mut value = partial[at + comptime!(z) * per_warp];
                if comptime!(plan.stacked()) {
                    value += partial[at + comptime!(z) * per_warp + 2];
                }
                sum += value;
            }
            y[token * rows + row] = Y::cast_from(scale_output(sum * UNDO, tile_units[column], outer));
        }
    }
}
