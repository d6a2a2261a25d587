//! The matmul of many rows on 16-bit tensor cores.
//!
//! Operands become f16, which holds E2M1 · E4M3 as exactly as bf16 does and takes fewer instructions. As in the decode
//! route, weights are the 16-row operand of the tensor core and tokens the 8-column one. A warp decodes its weights in
//! registers, straight from the packed layout: nobody else in the cube wants them. All warps want the tokens: a cube decodes
//! them into shared memory. Two buffers: while warps multiply one K step of 64, they decode the next step's tokens into the
//! other, and those after that are on their way from memory. One barrier a step.
//!
//! Of a K step, lane `4g + t` holds two words of codes of rows `g` and `g + 8` of a group, that is one block, and reads the
//! same words of token `g`, decoded: 16 bytes a word. (The tensor core does not care which `k` sits in which slot as long as
//! both operands agree.)
//!
//! With a residual pass a word of the weight is multiplied with both passes' rows; steps in which a fixed mask has no bit
//! are skipped. The order of a sum: word after word, first pass before residual; the same for every tile shape.
use super::format::scale_output;
use super::grouping::{Groups, locate, source_row};
use super::matrix::{PackedActivations, PackedWeight, array};
use super::mma16::{MAGNITUDES, UNDO, decode_scales, decode_word};
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::f16;

/// 16-byte vectors of a shared row: 64 values and one vector of padding, so that a load meets no bank twice.
const PITCH: usize = 9;

/// What is compiled into a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Warps along tokens and along the weight's rows.
    pub warps: (usize, usize),
    /// MMA tiles of a warp: 8 tokens by 16 rows.
    pub tiles: (usize, usize),
    /// With a residual pass.
    pub residual: bool,
    /// Only in the steps that are flagged.
    pub sparse: bool,
    /// Tokens sorted by expert.
    pub grouped: bool,
    /// Rows of activations by index.
    pub gathered: bool,
}

impl Plan {
    /// Launch table, by the tokens that a weight is multiplied with and the shared memory of a cube.
    pub(crate) fn new(tokens: usize, rows: usize, shared: usize, residual: bool) -> Self {
        let shape = |warps, tiles| Self {
            warps,
            tiles,
            residual,
            sparse: false,
            grouped: false,
            gathered: false,
        };
        let table = [
            shape((1, 8), (16, 2)),
            shape((1, 4), (8, 2)),
            shape((2, 2), (4, 1)),
            shape((1, 4), (4, 1)),
        ];
        let cubes = |plan: &Self| tokens.div_ceil(plan.tokens()) * rows.div_ceil(plan.rows());
        // The largest tile that fits, is filled by half, and still makes a cube for each of a large device's multiprocessors.
        let fits = |plan: &&Self| {
            plan.shared() <= shared && 2 * tokens > plan.tokens() && (cubes(plan) >= 192 || plan.rows() == 32)
        };
        *table.iter().find(fits).unwrap_or(&table[3])
    }

    /// Tokens of a cube.
    pub(crate) fn tokens(&self) -> usize {
        self.warps.0 * self.tiles.0 * 8
    }

    /// Rows of the weight of a cube.
    pub(crate) fn rows(&self) -> usize {
        self.warps.1 * self.tiles.1 * 16
    }

    fn threads(&self) -> usize {
        self.warps.0 * self.warps.1 * 32
    }

    /// Shared rows of one buffer: tokens of each pass.
    fn lines(&self) -> usize {
        self.tokens() * (1 + usize::from(self.residual))
    }

    /// Bytes of shared memory.
    fn shared(&self) -> usize {
        2 * self.lines() * PITCH * 16
    }

    /// Loads of 32 codes a unit, for the tokens of one pass.
    fn loads(&self) -> usize {
        (2 * self.tokens()).div_ceil(self.threads())
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
    let steps = x.residual_steps.as_ref();
    let plan = Plan {
        sparse: plan.residual && steps.is_some(),
        ..plan
    };
    // SAFETY: rows past the operands' are neither read nor written.
    unsafe {
        multiply::launch_unchecked::<Y, R>(
            client,
            CubeCount::Static(w.rows.div_ceil(plan.rows()) as u32, groups.tiles as u32, 1),
            CubeDim::new_1d(plan.threads() as u32),
            array(&x.codes, x.passes * x.tokens * kp / 8),
            array(&x.block_scales, x.passes * x.tokens * kp / 64),
            array(&x.units, x.tokens),
            array(&w.codes, w.experts * w.rows * kp / 8),
            array(&w.block_scales, w.experts * w.rows * kp / 64),
            array(&w.outer_scales, w.experts),
            array(groups.table(&x.units), groups.table_len()),
            array(groups.gather(&x.units), groups.gather_len()),
            array(steps.unwrap_or(&x.units), if plan.sparse { kp / 64 } else { 1 }),
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
    w_codes: &Array<Vector<u32, Const<2>>>,
    w_scales: &Array<u32>,
    outer_scales: &Array<f32>,
    table: &Array<u32>,
    gather: &Array<u32>,
    active: &Array<u32>,
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
            active,
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
    w_codes: &Array<Vector<u32, Const<2>>>,
    w_scales: &Array<u32>,
    outer_scales: &Array<f32>,
    gather: &Array<u32>,
    active: &Array<u32>,
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
    let rows = rows as usize;
    let steps = kp as usize / 64;
    let sources = sources as usize;
    let unit_pos = UNIT_POS as usize;
    let lane = UNIT_POS_PLANE as usize;
    let warp = unit_pos / 32;
    let threads = comptime!(plan.threads());
    let loads = comptime!(plan.loads());
    let r_loads = comptime!(if plan.residual { plan.loads() } else { 1 });
    let w_lines = comptime!(2 * plan.tiles.1);
    let lines = comptime!(plan.lines());
    let w_row0 =
        CUBE_POS_X as usize * comptime!(plan.rows()) + (warp % plan.warps.1) * comptime!(plan.tiles.1 * 16) + lane / 4;

    // The rows that this unit loads; a token past the end counts as one of zero scales, a row past the end is not stored.
    let mut x_rows = Array::<u32>::new(loads);
    let mut x_inside = Array::<u32>::new(loads);
    #[unroll]
    for i in 0..loads {
        let token = first + (unit_pos + comptime!(i * threads)) / 2;
        x_inside[i] = select(token < last, 0xffff_ffffu32, 0u32);
        let source = source_row(gather, min(token, last - 1), plan.gathered);
        x_rows[i] = u32::cast_from(source);
    }
    let mut w_rows = Array::<u32>::new(w_lines);
    #[unroll]
    for i in 0..w_lines {
        w_rows[i] = u32::cast_from(expert * rows + min(w_row0 + comptime!(8 * i), rows - 1));
    }

    let mut x_packed = Array::<Vector<u32, Const<4>>>::new(loads);
    let mut x_words = Array::<u32>::new(loads);
    let mut r_packed = Array::<Vector<u32, Const<4>>>::new(r_loads);
    let mut r_words = Array::<u32>::new(r_loads);
    let mut w_packed = Array::<Vector<u32, Const<2>>>::new(w_lines);
    let mut w_words = Array::<u32>::new(w_lines);
    let mut shared = SharedMemory::<Vector<u32, Const<4>>>::new(comptime!(2 * plan.lines() * PITCH));
    let r_at = comptime!(plan.tokens() * PITCH);

    let mut sums = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..comptime!(plan.tiles.0 * plan.tiles.1) {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::zeroed();
        sum[1] = Vector::zeroed();
        sums.push(sum);
    }

    fetch_weights(
        w_codes,
        w_scales,
        &w_rows,
        &mut w_packed,
        &mut w_words,
        0usize,
        steps,
        w_lines,
    );
    fetch(
        x_codes,
        x_scales,
        &x_rows,
        &x_inside,
        0usize,
        &mut x_packed,
        &mut x_words,
        0usize,
        steps,
        loads,
    );
    if comptime!(plan.residual) {
        if is_active(active, 0usize, steps, plan.sparse) {
            fetch(
                x_codes,
                x_scales,
                &x_rows,
                &x_inside,
                sources,
                &mut r_packed,
                &mut r_words,
                0usize,
                steps,
                loads,
            );
        }
    }
    // Turn 0 has nothing to multiply yet; later ones multiply the step before.
    for turn in 0..(steps + 1) {
        let to = (turn % 2) * comptime!(lines * PITCH);
        let from = ((turn + 1) % 2) * comptime!(lines * PITCH);
        if turn < steps {
            put(&mut shared, &x_packed, &x_words, to, magnitudes, plan);
            if comptime!(plan.residual) {
                if is_active(active, turn, steps, plan.sparse) {
                    put(&mut shared, &r_packed, &r_words, to + r_at, magnitudes, plan);
                }
            }
        }
        let next = turn + 1;
        if next < steps {
            fetch(
                x_codes,
                x_scales,
                &x_rows,
                &x_inside,
                0usize,
                &mut x_packed,
                &mut x_words,
                next,
                steps,
                loads,
            );
            if comptime!(plan.residual) {
                if is_active(active, next, steps, plan.sparse) {
                    fetch(
                        x_codes,
                        x_scales,
                        &x_rows,
                        &x_inside,
                        sources,
                        &mut r_packed,
                        &mut r_words,
                        next,
                        steps,
                        loads,
                    );
                }
            }
        }
        if turn > 0 {
            let active = is_active(active, turn - 1, steps, plan.sparse);
            #[unroll]
            for j in 0..2usize {
                let weights = decode_weights(&w_packed, &w_words, magnitudes, j, plan);
                if comptime!(j == 1) {
                    // These registers are used up.
                    fetch_weights(
                        w_codes,
                        w_scales,
                        &w_rows,
                        &mut w_packed,
                        &mut w_words,
                        turn,
                        steps,
                        w_lines,
                    );
                }
                multiply_word(&shared, &mut sums, &weights, from, j, plan);
                if comptime!(plan.residual) {
                    if active {
                        multiply_word(&shared, &mut sums, &weights, from + r_at, j, plan);
                    }
                }
            }
        }
        sync_cube();
    }

    let token0 = first + (warp / plan.warps.1) * comptime!(plan.tiles.0 * 8) + lane % 4 * 2;
    let outer = outer_scales[expert];
    #[unroll]
    for b in 0..plan.tiles.0 {
        #[unroll]
        for e in 0..2usize {
            let token = token0 + comptime!(8 * b + e);
            if token < last {
                let unit = units[source_row(gather, token, plan.gathered)];
                #[unroll]
                for i in 0..w_lines {
                    let sum = sums.index(comptime!(i / 2 * plan.tiles.0 + b));
                    let values = sum[comptime!(i % 2)];
                    let row = w_row0 + comptime!(8 * i);
                    if row < rows {
                        y[token * rows + row] = Y::cast_from(scale_output(values[e] * UNDO, unit, outer));
                    }
                }
            }
        }
    }
}

/// Whether the residual has a value in a K step.
#[cube]
fn is_active(active: &Array<u32>, step: usize, steps: usize, #[comptime] sparse: bool) -> bool {
    if comptime!(sparse) {
        active[min(step, steps - 1)] != 0u32
    } else {
        true.runtime()
    }
}

/// Loads 32 codes and their two scales for each of this unit's tokens.
#[cube]
fn fetch(
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    rows: &Array<u32>,
    inside: &Array<u32>,
    offset: usize,
    packed: &mut Array<Vector<u32, Const<4>>>,
    words: &mut Array<u32>,
    step: usize,
    steps: usize,
    #[comptime] loads: usize,
) {
    let half = UNIT_POS as usize % 2;
    #[unroll]
    for i in 0..loads {
        let row = rows[i] as usize + offset;
        packed[i] = codes[(row * steps + step) * 2 + half];
        words[i] = (scales[row * steps + step] >> u32::cast_from(half * 16)) & inside[i];
    }
}

/// Loads this lane's block of every row of the weight, and its scale; the last step's again past the end.
#[cube]
fn fetch_weights(
    codes: &Array<Vector<u32, Const<2>>>,
    scales: &Array<u32>,
    rows: &Array<u32>,
    packed: &mut Array<Vector<u32, Const<2>>>,
    words: &mut Array<u32>,
    step: usize,
    steps: usize,
    #[comptime] lines: usize,
) {
    let block = UNIT_POS_PLANE as usize % 4;
    let step = min(step, steps - 1);
    #[unroll]
    for i in 0..lines {
        let at = rows[i] as usize * steps + step;
        packed[i] = codes[at * 4 + block];
        words[i] = scales[at];
    }
}

/// Decodes this unit's tokens into shared memory.
#[cube]
fn put(
    shared: &mut SharedMemory<Vector<u32, Const<4>>>,
    packed: &Array<Vector<u32, Const<4>>>,
    words: &Array<u32>,
    to: usize,
    magnitudes: u32,
    #[comptime] plan: Plan,
) {
    let threads = comptime!(plan.threads());
    let half = UNIT_POS as usize % 2;
    #[unroll]
    for i in 0..comptime!(plan.loads()) {
        let line = (UNIT_POS as usize + comptime!(i * threads)) / 2;
        if comptime!((2 * plan.tokens()) % threads == 0) || line < comptime!(plan.tokens()) {
            let at = to + line * PITCH + half * 4;
            let codes = packed[i];
            let scales = decode_scales(words[i]);
            #[unroll]
            for q in 0..4usize {
                shared[at + q] = decode_word(codes[q], scales, magnitudes, comptime!(q / 2));
            }
        }
    }
}

/// Word `j` of every group of 16 rows as two operands of 16 `k` each.
#[cube]
fn decode_weights(
    packed: &Array<Vector<u32, Const<2>>>,
    words: &Array<u32>,
    magnitudes: u32,
    #[comptime] j: usize,
    #[comptime] plan: Plan,
) -> Sequence<Array<Vector<f16, Const<2>>>> {
    let shift = UNIT_POS_PLANE % 4u32 * 8u32;
    let mut weights = Sequence::<Array<Vector<f16, Const<2>>>>::new();
    #[unroll]
    for a in 0..plan.tiles.1 {
        let codes = packed[comptime!(2 * a)];
        let scales = decode_scales(words[comptime!(2 * a)] >> shift);
        let upper = decode_word(codes[j], scales, magnitudes, 0usize);
        let codes = packed[comptime!(2 * a + 1)];
        let scales = decode_scales(words[comptime!(2 * a + 1)] >> shift);
        let lower = decode_word(codes[j], scales, magnitudes, 0usize);
        #[unroll]
        for q in 0..2usize {
            let mut left = Array::<Vector<f16, Const<2>>>::new(4usize);
            left[0] = Vector::<f16, Const<2>>::reinterpret(upper[comptime!(2 * q)]);
            left[1] = Vector::<f16, Const<2>>::reinterpret(lower[comptime!(2 * q)]);
            left[2] = Vector::<f16, Const<2>>::reinterpret(upper[comptime!(2 * q + 1)]);
            left[3] = Vector::<f16, Const<2>>::reinterpret(lower[comptime!(2 * q + 1)]);
            weights.push(left);
        }
    }
    weights
}

/// Multiplies word `j` of the weights with all of the warp's tokens.
#[cube]
fn multiply_word(
    shared: &SharedMemory<Vector<u32, Const<4>>>,
    sums: &mut Sequence<Array<Vector<f32, Const<2>>>>,
    weights: &Sequence<Array<Vector<f16, Const<2>>>>,
    from: usize,
    #[comptime] j: usize,
    #[comptime] plan: Plan,
) {
    let def = MmaDefinition::<f16, f16, f32>::new(16usize, 8usize, 16usize);
    let lane = UNIT_POS_PLANE as usize;
    let token0 = UNIT_POS as usize / 32 / plan.warps.1 * comptime!(plan.tiles.0 * 8) + lane / 4;
    #[unroll]
    for b in 0..plan.tiles.0 {
        let tile = shared[from + (token0 + comptime!(8 * b)) * PITCH + lane % 4 * 2 + j];
        #[unroll]
        for q in 0..2usize {
            let mut right = Array::<Vector<f16, Const<2>>>::new(2usize);
            right[0] = Vector::<f16, Const<2>>::reinterpret(tile[comptime!(2 * q)]);
            right[1] = Vector::<f16, Const<2>>::reinterpret(tile[comptime!(2 * q + 1)]);
            #[unroll]
            for a in 0..plan.tiles.1 {
                let left = weights.index(comptime!(2 * a + q));
                let sum = sums.index_mut(comptime!(a * plan.tiles.0 + b));
                def.execute_inplace(left, &right, sum);
            }
        }
    }
}
