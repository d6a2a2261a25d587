//! The matmul of a decode step: few rows of activations, each weight read once, memory-bound.
//!
//! **The residual rides along.** Weights are the 16-row operand of the tensor core and tokens the 8-column one. The rows
//! of the residual pass are further columns: one more MMA on a weight fragment that is decoded already, and no further
//! weight traffic. Up to four tokens share one tile with their residuals.
//!
//! A warp takes `groups` groups of 16 weight rows and walks over `k` in chunks of 256; the `splits` warps of a cube that
//! hold the same rows take chunks in turn, and add up at the end. Lane `4g + t` holds 64 consecutive values of rows `g`
//! and `g + 8`: two 16-byte loads of codes and one word of scales a row, straight from the packed layout. The tensor core
//! does not care which `k` sits in which slot as long as both operands agree. Weights of the next chunk load into
//! registers as soon as those of this one are used up; there is no barrier on their way.
//!
//! Activations are decoded once a cube into shared memory, in the form of fragments, for as many chunks as fit.
//!
//! The order of a sum depends on `splits` and on `k` alone: a chunk after the other within a warp, first pass and residual
//! apart, then `first + residual` of one warp after the other.
use super::format::scale_output;
use super::grouping::{Groups, locate};
use super::matrix::{PackedActivations, PackedWeight, array};
use super::mma16::{UNDO, decode_scale, decode_word};
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::f16;

/// Values of `k` that a warp takes at a time.
const CHUNK: usize = 256;
/// Words of a chunk that a lane holds, of one row.
const WORDS: usize = 8;
/// Bytes of shared memory for decoded activations, at most.
const STAGE: usize = 128 * 1024;

/// Bytes of shared memory of a cube, at most.
pub(super) const MOST_SHARED: usize = STAGE + 32 * 1024;

/// What is compiled into a decode kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Groups of 16 weight rows a warp.
    pub groups: usize,
    /// Warps side by side along the weight's rows.
    pub columns: usize,
    /// Warps that share the chunks of `k`.
    pub splits: usize,
    /// Tiles of 8 tokens; 0 where up to four tokens share a tile with their residuals.
    pub tiles: usize,
    /// With a residual pass.
    pub residual: bool,
    /// Chunks of activations in shared memory, a multiple of `splits`.
    pub staged: usize,
    /// Tokens sorted by expert.
    pub grouped: bool,
    /// Rows of activations by index.
    pub gathered: bool,
}

impl Plan {
    /// Launch table. `splits` depends on the weight's shape alone, so that a row's bits do.
    pub(crate) fn new(tokens: usize, rows: usize, kp: usize, residual: bool, grouped: bool, gathered: bool) -> Self {
        let chunks = kp.div_ceil(CHUNK);
        let most = if rows >= 8192 || chunks < 16 { 8 } else { 16 };
        let splits = chunks.min(most);
        // With 16 splits the activations of 16 chunks are in shared memory at once: two tiles of both passes would not fit.
        let most_tiles = if splits > 8 && residual { 1 } else { 2 };
        let tiles = if grouped { 1 } else { tokens.div_ceil(8).min(most_tiles) };
        let columns = if !grouped && rows >= 8192 && splits <= 8 { 2 } else { 1 };
        let mut plan = Self {
            groups: 2,
            columns,
            splits,
            tiles,
            residual,
            staged: 0,
            grouped,
            gathered,
        };
        if !grouped && residual && tokens <= 4 {
            plan.tiles = 0;
        }
        let fits = STAGE / (plan.operands() * 8 * CHUNK * 2);
        plan.staged = (fits / splits * splits).clamp(splits, chunks.next_multiple_of(splits));
        plan
    }

    /// Tokens of a cube.
    pub(crate) fn tokens(&self) -> usize {
        if self.stacked() { 4 } else { 8 * self.tiles }
    }

    /// Rows of the weight of a cube.
    pub(crate) fn rows(&self) -> usize {
        16 * self.groups * self.columns
    }

    /// Tokens in columns 0..4 of the only tile, residuals in 4..8.
    fn stacked(&self) -> bool {
        self.tiles == 0
    }

    /// Tiles of 8 columns: tokens, then residuals.
    fn operands(&self) -> usize {
        if self.stacked() {
            1
        } else {
            self.tiles * (1 + usize::from(self.residual))
        }
    }

    fn warps(&self) -> usize {
        self.columns * self.splits
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
            CubeDim::new_1d(32 * plan.warps() as u32),
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
    expert: usize,
    first: usize,
    last: usize,
    #[comptime] plan: Plan,
) {
    let def = MmaDefinition::<f16, f16, f32>::new(16usize, 8usize, 16usize);
    let operands = comptime!(plan.operands());
    let rows = rows as usize;
    let kp = kp as usize;
    let chunks = kp.div_ceil(CHUNK);
    let lane = UNIT_POS_PLANE as usize;
    let warp = UNIT_POS as usize / 32;
    let column = warp % plan.columns;
    let split = warp / plan.columns;
    let row0 = CUBE_POS_X as usize * comptime!(plan.rows()) + column * comptime!(16 * plan.groups);

    // This lane's rows, each clamped to the weight: a row past the end is computed and not stored.
    let mut code_rows = Array::<u32>::new(comptime!(2 * plan.groups));
    #[unroll]
    for i in 0..comptime!(2 * plan.groups) {
        let row = min(row0 + lane / 4 + comptime!(8 * i), rows - 1);
        code_rows[i] = u32::cast_from(expert * rows + row);
    }
    let piece = lane % 4;
    let mut codes = Array::<Vector<u32, Const<4>>>::new(comptime!(4 * plan.groups));
    let mut scales = Array::<u32>::new(comptime!(2 * plan.groups));
    let mut next_scales = Array::<u32>::new(comptime!(2 * plan.groups));
    load_codes(w_codes, &code_rows, &mut codes, split, piece, kp, 0usize, plan);
    load_codes(w_codes, &code_rows, &mut codes, split, piece, kp, 1usize, plan);
    load_scales(w_scales, &code_rows, &mut next_scales, split, piece, kp, plan);

    let mut stage = SharedMemory::<Vector<u32, Const<4>>>::new(comptime!(plan.staged * WORDS * plan.operands() * 32));
    let mut sums = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..comptime!(plan.groups * plan.operands()) {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::zeroed();
        sum[1] = Vector::zeroed();
        sums.push(sum);
    }

    let phases = chunks.div_ceil(plan.staged);
    for phase in 0..phases {
        let base = phase * plan.staged;
        if phase > 0 {
            sync_cube();
        }
        stage_activations(
            x_codes,
            x_scales,
            gather,
            &mut stage,
            base,
            first,
            last,
            sources as usize,
            kp,
            plan,
        );
        sync_cube();
        let end = min(base + plan.staged, chunks);
        for chunk in range_stepped(base + split, end, plan.splits) {
            let next = chunk + plan.splits;
            #[unroll]
            for i in 0..comptime!(2 * plan.groups) {
                scales[i] = next_scales[i];
            }
            if next < chunks {
                load_scales(w_scales, &code_rows, &mut next_scales, next, piece, kp, plan);
            }
            let at = (chunk - base) * comptime!(WORDS * plan.operands() * 32) + lane;
            #[unroll]
            for j in 0..WORDS {
                // Rows g and g + 8 of every group, decoded.
                let mut decoded = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * plan.groups));
                #[unroll]
                for i in 0..comptime!(2 * plan.groups) {
                    let words = codes[comptime!(2 * i + j / 4)];
                    decoded[i] = decode_word(
                        words[comptime!(j % 4)],
                        decode_scale(scales[i], comptime!(j as u32 / 2)),
                    );
                }
                #[unroll]
                for b in 0..operands {
                    let tile = stage[at + comptime!((j * operands + b) * 32)];
                    #[unroll]
                    for q in 0..2usize {
                        let mut right = Array::<Vector<f16, Const<2>>>::new(2usize);
                        right[0] = Vector::<f16, Const<2>>::reinterpret(tile[comptime!(2 * q)]);
                        right[1] = Vector::<f16, Const<2>>::reinterpret(tile[comptime!(2 * q + 1)]);
                        #[unroll]
                        for a in 0..plan.groups {
                            let upper = decoded[comptime!(2 * a)];
                            let lower = decoded[comptime!(2 * a + 1)];
                            let mut left = Array::<Vector<f16, Const<2>>>::new(4usize);
                            left[0] = Vector::<f16, Const<2>>::reinterpret(upper[comptime!(2 * q)]);
                            left[1] = Vector::<f16, Const<2>>::reinterpret(lower[comptime!(2 * q)]);
                            left[2] = Vector::<f16, Const<2>>::reinterpret(upper[comptime!(2 * q + 1)]);
                            left[3] = Vector::<f16, Const<2>>::reinterpret(lower[comptime!(2 * q + 1)]);
                            let sum = sums.index_mut(comptime!(a * operands + b));
                            def.execute_inplace(&left, &right, sum);
                        }
                    }
                }
                // The first, resp. second, four words of every row are used up.
                if comptime!(j == 3) {
                    if next < chunks {
                        load_codes(w_codes, &code_rows, &mut codes, next, piece, kp, 0usize, plan);
                    }
                }
                if comptime!(j == 7) {
                    if next < chunks {
                        load_codes(w_codes, &code_rows, &mut codes, next, piece, kp, 1usize, plan);
                    }
                }
            }
        }
    }
    store(units, outer_scales, gather, y, &sums, rows, expert, first, last, plan);
}

/// Words `4 · half..` of every row's piece of a chunk.
#[cube]
fn load_codes(
    w_codes: &Array<Vector<u32, Const<4>>>,
    code_rows: &Array<u32>,
    codes: &mut Array<Vector<u32, Const<4>>>,
    chunk: usize,
    piece: usize,
    kp: usize,
    #[comptime] half: usize,
    #[comptime] plan: Plan,
) {
    // A piece past the end has scales of zero; its codes may be any.
    let vector = min(chunk * 8 + piece * 2, kp / 32 - 2) + half;
    #[unroll]
    for i in 0..comptime!(2 * plan.groups) {
        codes[comptime!(2 * i + half)] = w_codes[code_rows[i] as usize * (kp / 32) + vector];
    }
}

#[cube]
fn load_scales(
    w_scales: &Array<u32>,
    code_rows: &Array<u32>,
    scales: &mut Array<u32>,
    chunk: usize,
    piece: usize,
    kp: usize,
    #[comptime] plan: Plan,
) {
    let step = chunk * 4 + piece;
    let inside = step < kp / 64;
    let step = min(step, kp / 64 - 1);
    #[unroll]
    for i in 0..comptime!(2 * plan.groups) {
        scales[i] = select(inside, w_scales[code_rows[i] as usize * (kp / 64) + step], 0u32);
    }
}

/// Decodes `plan.staged` chunks of the cube's activations, from `base` on, to fragments:
/// `stage[chunk][word][operand][lane]`.
#[cube]
fn stage_activations(
    x_codes: &Array<Vector<u32, Const<4>>>,
    x_scales: &Array<u32>,
    gather: &Array<u32>,
    stage: &mut SharedMemory<Vector<u32, Const<4>>>,
    base: usize,
    first: usize,
    last: usize,
    sources: usize,
    kp: usize,
    #[comptime] plan: Plan,
) {
    let operands = comptime!(plan.operands());
    // Eight vectors of four words a row and chunk.
    let per_row = comptime!(plan.staged * 8);
    let units = comptime!(32 * plan.warps());
    for item in range_stepped(
        UNIT_POS as usize,
        comptime!(plan.staged * 8 * plan.operands() * 8),
        units,
    ) {
        let line = item / per_row;
        let vector = item % per_row;
        let operand = line / 8;
        let column = line % 8;
        let mut token = first + operand * 8 + column;
        let mut residual = 0usize;
        if comptime!(plan.stacked()) {
            token = first + column % 4;
            residual = column / 4;
        } else if comptime!(plan.residual) {
            token = first + (operand % plan.tiles) * 8 + column;
            residual = operand / plan.tiles;
        }
        let at = base * 8 + vector;
        let piece = vector % 8 / 2;
        let word = vector % 2 * 4;
        let mut codes = Vector::<u32, Const<4>>::zeroed();
        let mut scales = 0u32;
        if token < last && at < kp / 32 {
            let mut source = token;
            if comptime!(plan.gathered) {
                source = gather[token] as usize;
            }
            let row = source + residual * sources;
            codes = x_codes[row * (kp / 32) + at];
            scales = x_scales[row * (kp / 64) + at / 2] >> u32::cast_from(at % 2 * 16);
        }
        let to = (vector / 8 * WORDS + word) * comptime!(operands * 32) + operand * 32 + column * 4 + piece;
        #[unroll]
        for i in 0..4usize {
            let scale = decode_scale(scales, comptime!(i as u32 / 2));
            stage[to + comptime!(i * operands * 32)] = decode_word(codes[i], scale);
        }
    }
}

/// Adds the sums of all warps that share rows, and scales.
#[cube]
fn store<Y: Float>(
    units: &Array<f32>,
    outer_scales: &Array<f32>,
    gather: &Array<u32>,
    y: &mut Array<Y>,
    sums: &Sequence<Array<Vector<f32, Const<2>>>>,
    rows: usize,
    expert: usize,
    first: usize,
    last: usize,
    #[comptime] plan: Plan,
) {
    // [warp][group][tile][element][lane]
    let tiles = comptime!(if plan.stacked() { 1 } else { plan.tiles });
    let operands = comptime!(plan.operands());
    let per_warp = comptime!(plan.groups * tiles * 128);
    let mut partial = SharedMemory::<f32>::new(comptime!(
        plan.warps() * plan.groups * if plan.stacked() { 1 } else { plan.tiles } * 128
    ));
    let lane = UNIT_POS_PLANE as usize;
    let warp = UNIT_POS as usize / 32;
    #[unroll]
    for a in 0..plan.groups {
        #[unroll]
        for b in 0..tiles {
            #[unroll]
            for e in 0..4usize {
                let first_pass = sums.index(comptime!(a * operands + b));
                let pair = first_pass[comptime!(e / 2)];
                let mut value = pair[comptime!(e % 2)];
                if comptime!(operands == 2 * tiles) {
                    let second_pass = sums.index(comptime!(a * operands + (b + tiles) % operands));
                    let pair = second_pass[comptime!(e / 2)];
                    value += pair[comptime!(e % 2)];
                }
                partial[warp * per_warp + comptime!(((a * tiles + b) * 4 + e) * 32) + lane] = value;
            }
        }
    }
    sync_cube();
    let outer = outer_scales[expert];
    for at in range_stepped(
        UNIT_POS as usize,
        comptime!(plan.columns) * per_warp,
        comptime!(32 * plan.warps()),
    ) {
        let lane = at % 32;
        let element = at / 32 % 4;
        let tile = at / 128 % tiles;
        let group = at / (128 * tiles) % plan.groups;
        let column = at / per_warp;
        let token = first + tile * 8 + 2 * (lane % 4) + element % 2;
        let row = CUBE_POS_X as usize * comptime!(plan.rows())
            + column * comptime!(16 * plan.groups)
            + group * 16
            + element / 2 * 8
            + lane / 4;
        // Stacked: lanes 2 and 3 of four hold the residuals of lanes 0 and 1.
        let inside = !comptime!(plan.stacked()) || lane % 4 < 2;
        if inside && token < last && row < rows {
            let mut sum = 0.0f32;
            #[unroll]
            for z in 0..plan.splits {
                let mut value = partial[at + comptime!(z * plan.columns) * per_warp];
                if comptime!(plan.stacked()) {
                    value += partial[at + comptime!(z * plan.columns) * per_warp + 2];
                }
                sum += value;
            }
            let mut source = token;
            if comptime!(plan.gathered) {
                source = gather[token] as usize;
            }
            y[token * rows + row] = Y::cast_from(scale_output(sum * UNDO, units[source], outer));
        }
    }
}
