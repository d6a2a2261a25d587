//! The matmul of many rows on 16-bit tensor cores.
//!
//! Packed operands go through registers into shared memory as 16-bit floats; warps multiply from there. (Operands become
//! f16, which holds E2M1 · E4M3 as exactly as bf16 does and takes fewer instructions.) Two buffers: while warps multiply
//! one K step of 64, they decode the next into the other, and the one after that is on its way from memory. One barrier a
//! step.
//!
//! With a residual pass a step multiplies the weight's tile with both passes' rows; steps in which a fixed mask has no bit
//! are skipped. The order of a sum: step after step, first pass before residual, and the tensor core's 16 `k` at a time;
//! the same for every tile shape.
use super::format::scale_output;
use super::grouping::{Groups, locate, source_row};
use super::matrix::{PackedActivations, PackedWeight, array};
use super::mma16::{UNDO, decode_scales, decode_word};
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::f16;

/// 16-byte vectors of a shared row: 64 values and one vector of padding, so that `ldmatrix` meets no bank twice.
const PITCH: usize = 9;

/// What is compiled into a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Warps along tokens and along the weight's rows.
    pub warps: (usize, usize),
    /// MMA tiles of a warp: 16 tokens by 8 rows.
    pub tiles: (usize, usize),
    /// K steps in registers, on their way.
    pub depth: usize,
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
        let shape = |warps, tiles, depth| Self {
            warps,
            tiles,
            depth,
            residual,
            sparse: false,
            grouped: false,
            gathered: false,
        };
        let table = [
            shape((2, 4), (4, 8), 1),
            shape((2, 4), (2, 4), 2),
            shape((2, 2), (1, 4), 2),
        ];
        let cubes = |plan: &Self| tokens.div_ceil(plan.tokens()) * rows.div_ceil(plan.rows());
        // The largest tile that fits and still makes a cube for most of a large device's multiprocessors.
        let fits = |plan: &&Self| plan.shared() <= shared && cubes(plan) >= 96;
        *table.iter().find(fits).unwrap_or(&table[2])
    }

    /// Tokens of a cube.
    pub(crate) fn tokens(&self) -> usize {
        self.warps.0 * self.tiles.0 * 16
    }

    /// Rows of the weight of a cube.
    pub(crate) fn rows(&self) -> usize {
        self.warps.1 * self.tiles.1 * 8
    }

    fn threads(&self) -> usize {
        self.warps.0 * self.warps.1 * 32
    }

    /// Shared rows of one buffer: tokens of each pass, then the weight's.
    fn lines(&self) -> usize {
        self.tokens() * (1 + usize::from(self.residual)) + self.rows()
    }

    /// Bytes of shared memory.
    fn shared(&self) -> usize {
        2 * self.lines() * PITCH * 16
    }

    /// Loads of 32 codes a unit, for so many rows.
    fn loads(&self, rows: usize) -> usize {
        (2 * rows).div_ceil(self.threads())
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
    active: &Array<u32>,
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
            active,
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
    active: &Array<u32>,
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
    let rows = rows as usize;
    let steps = kp as usize / 64;
    let sources = sources as usize;
    let row0 = CUBE_POS_X as usize * comptime!(plan.rows());
    let threads = comptime!(plan.threads());
    let x_loads = comptime!(plan.loads(plan.tokens()));
    let w_loads = comptime!(plan.loads(plan.rows()));
    let r_loads = comptime!(if plan.residual { x_loads } else { 1 });
    let lines = comptime!(plan.lines());

    // The rows that this unit loads; a row past the end counts as one of zero scales.
    let mut x_rows = Array::<u32>::new(x_loads);
    let mut x_inside = Array::<u32>::new(x_loads);
    let unit_pos = UNIT_POS as usize;
    let half = unit_pos % 2;
    #[unroll]
    for i in 0..x_loads {
        let token = first + (unit_pos + comptime!(i * threads)) / 2;
        x_inside[i] = select(token < last, 0xffff_ffffu32, 0u32);
        let source = source_row(gather, min(token, last - 1), plan.gathered);
        x_rows[i] = u32::cast_from(source);
    }
    let mut w_rows = Array::<u32>::new(w_loads);
    #[unroll]
    for i in 0..w_loads {
        let row = min(row0 + (unit_pos + comptime!(i * threads)) / 2, rows - 1);
        w_rows[i] = u32::cast_from(expert * rows + row);
    }

    let depth = comptime!(plan.depth);
    let mut x_packed = Array::<Vector<u32, Const<4>>>::new(comptime!(x_loads * plan.depth));
    let mut x_words = Array::<u32>::new(comptime!(x_loads * plan.depth));
    let mut r_packed = Array::<Vector<u32, Const<4>>>::new(comptime!(r_loads * plan.depth));
    let mut r_words = Array::<u32>::new(comptime!(r_loads * plan.depth));
    let mut w_packed = Array::<Vector<u32, Const<4>>>::new(comptime!(w_loads * plan.depth));
    let mut w_words = Array::<u32>::new(comptime!(w_loads * plan.depth));
    let mut shared = SharedMemory::<Vector<f16, Const<8>>>::new(comptime!(2 * plan.lines() * PITCH));

    let mut sums = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..comptime!(plan.tiles.0 * plan.tiles.1) {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::zeroed();
        sum[1] = Vector::zeroed();
        sums.push(sum);
    }

    #[unroll]
    for d in 0..depth {
        fetch(
            w_codes,
            w_scales,
            &w_rows,
            0usize,
            &mut w_packed,
            &mut w_words,
            d,
            steps,
            w_loads,
            d,
        );
        fetch(
            x_codes,
            x_scales,
            &x_rows,
            0usize,
            &mut x_packed,
            &mut x_words,
            d,
            steps,
            x_loads,
            d,
        );
        mask_outside(&x_inside, &mut x_words, x_loads, d);
        if comptime!(plan.residual) {
            if is_active(active, d, steps, plan.sparse) {
                fetch(
                    x_codes,
                    x_scales,
                    &x_rows,
                    sources,
                    &mut r_packed,
                    &mut r_words,
                    d,
                    steps,
                    x_loads,
                    d,
                );
                mask_outside(&x_inside, &mut r_words, x_loads, d);
            }
        }
    }
    // A step decodes what registers hold into one buffer and multiplies the step before from the other.
    let turns = (steps + 1).div_ceil(depth);
    for turn in 0..turns {
        #[unroll]
        for d in 0..depth {
            let step = turn * depth + d;
            let to = (step % 2) * comptime!(lines * PITCH);
            let from = ((step + 1) % 2) * comptime!(lines * PITCH);
            if step < steps {
                put(
                    &mut shared,
                    &x_packed,
                    &x_words,
                    to,
                    half,
                    comptime!(plan.tokens()),
                    d,
                    plan,
                );
                if comptime!(plan.residual) {
                    if is_active(active, step, steps, plan.sparse) {
                        let r_to = to + comptime!(plan.tokens() * PITCH);
                        put(
                            &mut shared,
                            &r_packed,
                            &r_words,
                            r_to,
                            half,
                            comptime!(plan.tokens()),
                            d,
                            plan,
                        );
                    }
                }
                let w_to = to + comptime!((plan.lines() - plan.rows()) * PITCH);
                put(
                    &mut shared,
                    &w_packed,
                    &w_words,
                    w_to,
                    half,
                    comptime!(plan.rows()),
                    d,
                    plan,
                );
            }
            let next = step + depth;
            if next < steps {
                fetch(
                    w_codes,
                    w_scales,
                    &w_rows,
                    0usize,
                    &mut w_packed,
                    &mut w_words,
                    next,
                    steps,
                    w_loads,
                    d,
                );
                fetch(
                    x_codes,
                    x_scales,
                    &x_rows,
                    0usize,
                    &mut x_packed,
                    &mut x_words,
                    next,
                    steps,
                    x_loads,
                    d,
                );
                mask_outside(&x_inside, &mut x_words, x_loads, d);
                if comptime!(plan.residual) {
                    if is_active(active, next, steps, plan.sparse) {
                        fetch(
                            x_codes,
                            x_scales,
                            &x_rows,
                            sources,
                            &mut r_packed,
                            &mut r_words,
                            next,
                            steps,
                            x_loads,
                            d,
                        );
                        mask_outside(&x_inside, &mut r_words, x_loads, d);
                    }
                }
            }
            if step > 0 && step <= steps {
                let active = is_active(active, step - 1, steps, plan.sparse);
                multiply_step(&shared, &mut sums, from, active, &def, plan);
            }
            sync_cube();
        }
    }

    let lane = UNIT_POS_PLANE;
    let warp = unit_pos / 32;
    let token0 = first + (warp / plan.warps.1) * comptime!(plan.tiles.0 * 16);
    let column0 = row0 + (warp % plan.warps.1) * comptime!(plan.tiles.1 * 8);
    let outer = outer_scales[expert];
    #[unroll]
    for i in 0..plan.tiles.0 {
        #[unroll]
        for h in 0..2usize {
            let (line, pair) = def.position_of_nth(lane, comptime!(h as u32 * 2), MatrixIdent::Accumulator);
            let token = token0 + comptime!(i * 16) + line as usize;
            if token < last {
                let unit = units[source_row(gather, token, plan.gathered)];
                #[unroll]
                for j in 0..plan.tiles.1 {
                    let sum = sums.index(comptime!(i * plan.tiles.1 + j));
                    let values = sum[h];
                    let row = column0 + comptime!(j * 8) + pair as usize;
                    if row < rows {
                        y[token * rows + row] = Y::cast_from(scale_output(values[0usize] * UNDO, unit, outer));
                    }
                    if row + 1 < rows {
                        y[token * rows + row + 1] = Y::cast_from(scale_output(values[1usize] * UNDO, unit, outer));
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

/// Loads 32 codes and their two scales for each of this unit's rows, for step `depth` of those in registers.
#[cube]
fn fetch(
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    rows: &Array<u32>,
    offset: usize,
    packed: &mut Array<Vector<u32, Const<4>>>,
    words: &mut Array<u32>,
    step: usize,
    steps: usize,
    #[comptime] loads: usize,
    #[comptime] depth: usize,
) {
    let half = UNIT_POS as usize % 2;
    let step = min(step, steps - 1);
    #[unroll]
    for i in 0..loads {
        let row = rows[i] as usize + offset;
        packed[comptime!(depth * loads + i)] = codes[(row * steps + step) * 2 + half];
        words[comptime!(depth * loads + i)] = scales[row * steps + step] >> u32::cast_from(half * 16);
    }
}

#[cube]
fn mask_outside(inside: &Array<u32>, words: &mut Array<u32>, #[comptime] loads: usize, #[comptime] depth: usize) {
    #[unroll]
    for i in 0..loads {
        words[comptime!(depth * loads + i)] &= inside[i];
    }
}

/// Decodes step `depth` of those in registers into shared memory.
#[cube]
fn put(
    shared: &mut SharedMemory<Vector<f16, Const<8>>>,
    packed: &Array<Vector<u32, Const<4>>>,
    words: &Array<u32>,
    to: usize,
    half: usize,
    #[comptime] rows: usize,
    #[comptime] depth: usize,
    #[comptime] plan: Plan,
) {
    let threads = comptime!(plan.threads());
    let loads = comptime!(plan.loads(rows));
    #[unroll]
    for i in 0..loads {
        let line = (UNIT_POS as usize + comptime!(i * threads)) / 2;
        if comptime!((2 * rows) % threads == 0) || line < rows {
            let at = to + line * PITCH + half * 4;
            let codes = packed[comptime!(depth * loads + i)];
            let scales = decode_scales(words[comptime!(depth * loads + i)]);
            #[unroll]
            for q in 0..4usize {
                let decoded = decode_word(codes[q], scales, comptime!(q / 2));
                shared[at + q] = Vector::<f16, Const<8>>::reinterpret(decoded);
            }
        }
    }
}

/// Multiplies one K step from shared memory.
#[cube]
fn multiply_step(
    shared: &SharedMemory<Vector<f16, Const<8>>>,
    sums: &mut Sequence<Array<Vector<f32, Const<2>>>>,
    from: usize,
    active: bool,
    def: &MmaDefinition<f16, f16, f32>,
    #[comptime] plan: Plan,
) {
    let lane = UNIT_POS_PLANE as usize;
    let warp = UNIT_POS as usize / 32;
    let token0 = (warp / plan.warps.1) * comptime!(plan.tiles.0 * 16);
    let row0 = (warp % plan.warps.1) * comptime!(plan.tiles.1 * 8);
    let w_from = from + comptime!((plan.lines() - plan.rows()) * PITCH);
    // Two halves of 32; one ldmatrix loads a weight fragment for both steps of 16 in a half.
    #[unroll]
    for half in 0..2usize {
        let mut right = Sequence::<Array<Vector<f16, Const<2>>>>::new();
        #[unroll]
        for j in 0..plan.tiles.1 {
            let at = w_from + (row0 + comptime!(j * 8) + lane % 8) * PITCH + comptime!(half * 4) + lane / 8;
            let line = shared.slice(at, at + 1);
            right.push(def.load_matrix::<Vector<f16, Const<8>>, Const<2>>(&line, MatrixIdent::B, 4usize, false));
        }
        multiply_half(shared, sums, &right, from, token0, lane, def, half, plan);
        if comptime!(plan.residual) {
            if active {
                let from = from + comptime!(plan.tokens() * PITCH);
                multiply_half(shared, sums, &right, from, token0, lane, def, half, plan);
            }
        }
    }
}

#[cube]
fn multiply_half(
    shared: &SharedMemory<Vector<f16, Const<8>>>,
    sums: &mut Sequence<Array<Vector<f32, Const<2>>>>,
    right: &Sequence<Array<Vector<f16, Const<2>>>>,
    from: usize,
    token0: usize,
    lane: usize,
    def: &MmaDefinition<f16, f16, f32>,
    #[comptime] half: usize,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for q in 0..2usize {
        #[unroll]
        for i in 0..plan.tiles.0 {
            let at = from + (token0 + comptime!(i * 16) + lane % 16) * PITCH + comptime!(half * 4 + q * 2) + lane / 16;
            let line = shared.slice(at, at + 1);
            let left = def.load_matrix::<Vector<f16, Const<8>>, Const<2>>(&line, MatrixIdent::A, 4usize, false);
            #[unroll]
            for j in 0..plan.tiles.1 {
                let both = right.index(j);
                let mut fragment = Array::<Vector<f16, Const<2>>>::new(2usize);
                fragment[0] = both[comptime!(q * 2)];
                fragment[1] = both[comptime!(q * 2 + 1)];
                let sum = sums.index_mut(comptime!(i * plan.tiles.1 + j));
                def.execute_inplace(&left, &fragment, sum);
            }
        }
    }
}
