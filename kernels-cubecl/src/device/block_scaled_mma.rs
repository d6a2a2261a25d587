//! The matmul of GPUs with block-scaled FP4 tensor cores (sm_120, sm_121):
//! `mma.sync … kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64` takes codes and block scales as they are packed.
//!
//! Compiled for these GPUs and inspected; not run on one yet.
//!
//! A warp loads its fragments straight from the packed rows: lane `4g + t` holds eight codes of rows `g` and `g + 8` at
//! `8t` and `8t + 32`, and the word of a row's four scales feeds the instruction as it is. Fragments of the next K step
//! load while this one is multiplied; the warps of a cube share them through the first-level cache.
//!
//! With a residual pass a step multiplies the weight's fragment with both passes' rows. The order of a sum: step after
//! step, first pass before residual.
use super::format::scale_output;
use super::grouping::{Groups, locate, source_row};
use super::matrix::{PackedActivations, PackedWeight, array};
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::{e2m1x2, e4m3};

/// What is compiled into a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    /// Warps along tokens and along the weight's rows.
    pub warps: (usize, usize),
    /// MMA tiles of a warp: 16 tokens by 8 rows.
    pub tiles: (usize, usize),
    /// With a residual pass.
    pub residual: bool,
    /// Tokens sorted by expert.
    pub grouped: bool,
    /// Rows of activations by index.
    pub gathered: bool,
}

impl Plan {
    /// Launch table, by the tokens that a weight is multiplied with.
    pub(crate) fn new(tokens: usize, residual: bool, grouped: bool, gathered: bool) -> Self {
        let (warps, tiles) = match tokens {
            0..=16 => ((1, 4), (1, 2)),
            17..=64 => ((2, 2), (1, 4)),
            _ => ((2, 2), (2, 4)),
        };
        Self {
            warps,
            tiles,
            residual,
            grouped,
            gathered,
        }
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
    // SAFETY: rows past the operands' are read from inside them and not written.
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
    #[comptime] plan: Plan,
) {
    let (expert, first, last) = locate(table, tokens, comptime!(plan.tokens()), plan.grouped);
    if first < last {
        let warp = UNIT_POS as usize / 32;
        let token0 = first + (warp / plan.warps.1) * comptime!(plan.tiles.0 * 16);
        let row0 = CUBE_POS_X as usize * comptime!(plan.rows()) + (warp % plan.warps.1) * comptime!(plan.tiles.1 * 8);
        multiply_tile::<Y>(
            x_codes,
            x_scales,
            units,
            w_codes,
            w_scales,
            outer_scales,
            gather,
            y,
            sources as usize,
            rows as usize,
            kp as usize / 64,
            expert,
            token0,
            row0,
            last,
            plan,
        );
    }
}

#[cube]
fn multiply_tile<Y: Float>(
    x_codes: &Array<u32>,
    x_scales: &Array<u32>,
    units: &Array<f32>,
    w_codes: &Array<u32>,
    w_scales: &Array<u32>,
    outer_scales: &Array<f32>,
    gather: &Array<u32>,
    y: &mut Array<Y>,
    sources: usize,
    rows: usize,
    steps: usize,
    expert: usize,
    token0: usize,
    row0: usize,
    last: usize,
    #[comptime] plan: Plan,
) {
    let def = MmaDefinition::<e2m1x2, e2m1x2, f32>::new_scaled::<e4m3>(16usize, 8usize, 64usize, 4usize);
    let lane = UNIT_POS_PLANE;
    let g = lane as usize / 4;
    let t = lane as usize % 4;
    // Rows that this lane loads, clamped: what lies past the end is computed and not stored.
    let mut x_rows = Array::<u32>::new(comptime!(2 * plan.tiles.0));
    let mut x_scale_rows = Array::<u32>::new(plan.tiles.0);
    #[unroll]
    for i in 0..plan.tiles.0 {
        #[unroll]
        for h in 0..2usize {
            let token = min(token0 + comptime!(16 * i + 8 * h) + g, last - 1);
            x_rows[comptime!(2 * i + h)] = u32::cast_from(source_row(gather, token, plan.gathered));
        }
        let line = def.scales_index(lane, MatrixIdent::A) as usize;
        let token = min(token0 + comptime!(16 * i) + line, last - 1);
        x_scale_rows[i] = u32::cast_from(source_row(gather, token, plan.gathered));
    }
    let mut w_rows = Array::<u32>::new(plan.tiles.1);
    let mut w_scale_rows = Array::<u32>::new(plan.tiles.1);
    #[unroll]
    for j in 0..plan.tiles.1 {
        let line = def.scales_index(lane, MatrixIdent::B) as usize;
        w_rows[j] = u32::cast_from(expert * rows + min(row0 + comptime!(8 * j) + g, rows - 1));
        w_scale_rows[j] = u32::cast_from(expert * rows + min(row0 + comptime!(8 * j) + line, rows - 1));
    }
    let mut sums = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..comptime!(plan.tiles.0 * plan.tiles.1) {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::zeroed();
        sum[1] = Vector::zeroed();
        sums.push(sum);
    }
    let mut right = Array::<u32>::new(comptime!(2 * plan.tiles.1));
    let mut right_scales = Array::<u32>::new(plan.tiles.1);
    let mut left = Array::<u32>::new(comptime!(4 * plan.tiles.0));
    let mut left_scales = Array::<u32>::new(plan.tiles.0);
    let mut rest = Array::<u32>::new(comptime!(4 * plan.tiles.0));
    let mut rest_scales = Array::<u32>::new(plan.tiles.0);
    for step in 0..steps {
        #[unroll]
        for j in 0..plan.tiles.1 {
            let at = (w_rows[j] as usize * steps + step) * 8 + t;
            right[comptime!(2 * j)] = w_codes[at];
            right[comptime!(2 * j + 1)] = w_codes[at + 4];
            right_scales[j] = w_scales[w_scale_rows[j] as usize * steps + step] & 0x7f7f_7f7fu32;
        }
        load_left(
            x_codes,
            x_scales,
            &x_rows,
            &x_scale_rows,
            &mut left,
            &mut left_scales,
            0usize,
            step,
            steps,
            t,
            plan,
        );
        if comptime!(plan.residual) {
            load_left(
                x_codes,
                x_scales,
                &x_rows,
                &x_scale_rows,
                &mut rest,
                &mut rest_scales,
                sources,
                step,
                steps,
                t,
                plan,
            );
        }
        multiply_step(&def, &mut sums, &left, &left_scales, &right, &right_scales, plan);
        if comptime!(plan.residual) {
            multiply_step(&def, &mut sums, &rest, &rest_scales, &right, &right_scales, plan);
        }
    }
    let outer = outer_scales[expert];
    #[unroll]
    for i in 0..plan.tiles.0 {
        #[unroll]
        for h in 0..2usize {
            let (line, pair) = def.position_of_nth(lane, comptime!(h as u32 * 2), MatrixIdent::Accumulator);
            let token = token0 + comptime!(16 * i) + line as usize;
            if token < last {
                let unit = units[source_row(gather, token, plan.gathered)];
                #[unroll]
                for j in 0..plan.tiles.1 {
                    let sum = sums.index(comptime!(i * plan.tiles.1 + j));
                    let values = sum[h];
                    let row = row0 + comptime!(8 * j) + pair as usize;
                    if row < rows {
                        y[token * rows + row] = Y::cast_from(scale_output(values[0usize], unit, outer));
                    }
                    if row + 1 < rows {
                        y[token * rows + row + 1] = Y::cast_from(scale_output(values[1usize], unit, outer));
                    }
                }
            }
        }
    }
}

#[cube]
fn load_left(
    codes: &Array<u32>,
    scales: &Array<u32>,
    rows: &Array<u32>,
    scale_rows: &Array<u32>,
    left: &mut Array<u32>,
    left_scales: &mut Array<u32>,
    offset: usize,
    step: usize,
    steps: usize,
    t: usize,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for i in 0..plan.tiles.0 {
        #[unroll]
        for h in 0..2usize {
            let at = ((rows[comptime!(2 * i + h)] as usize + offset) * steps + step) * 8 + t;
            left[comptime!(4 * i + h)] = codes[at];
            left[comptime!(4 * i + h + 2)] = codes[at + 4];
        }
        left_scales[i] = scales[(scale_rows[i] as usize + offset) * steps + step];
    }
}

#[cube]
#[allow(unused_assignments, reason = "see below")]
fn multiply_step(
    def: &MmaDefinition<e2m1x2, e2m1x2, f32>,
    sums: &mut Sequence<Array<Vector<f32, Const<2>>>>,
    left: &Array<u32>,
    left_scales: &Array<u32>,
    right: &Array<u32>,
    right_scales: &Array<u32>,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for i in 0..plan.tiles.0 {
        let mut a = Array::<Vector<e2m1x2, Const<4>>>::new(4usize);
        #[unroll]
        for r in 0..4usize {
            a[r] = Vector::<e2m1x2, Const<4>>::reinterpret(left[comptime!(4 * i + r)]);
        }
        // Mutable, and assigned after: the compiled instruction takes a reference, which a constant does not give.
        let mut a_scales = Vector::<e4m3, Const<4>>::empty();
        a_scales = Vector::<e4m3, Const<4>>::reinterpret(left_scales[i]);
        #[unroll]
        for j in 0..plan.tiles.1 {
            let mut b = Array::<Vector<e2m1x2, Const<4>>>::new(2usize);
            #[unroll]
            for r in 0..2usize {
                b[r] = Vector::<e2m1x2, Const<4>>::reinterpret(right[comptime!(2 * j + r)]);
            }
            let mut b_scales = Vector::<e4m3, Const<4>>::empty();
            b_scales = Vector::<e4m3, Const<4>>::reinterpret(right_scales[j]);
            let sum = sums.index_mut(comptime!(i * plan.tiles.1 + j));
            let d = def.execute_scaled(&a, &b, sum, a_scales, b_scales);
            sum[0] = d[0];
            sum[1] = d[1];
        }
    }
}
