//! Where the tokens of a mixture of experts go: the experts of largest logits, and the order that puts the rows of each
//! expert together. One launch each; nothing waits for the device.
use super::{WIDTH, row_grid};
use crate::device::{
    check::{check_f32, check_shared},
    format::INFINITE,
    matrix::{Error, Matrix, allocate, array},
};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a cube that ranks the experts of one token.
const RANKING: usize = 32;
/// Units of the cube that places the rows of one expert.
const PLACING: usize = 256;
/// In place of NaN, which has no place in an order; finite, so that it comes before negative infinity.
const NOT_A_NUMBER: f32 = -1e38;

/// The experts of the `k` largest of each row of `logits` (f32 `[tokens, experts]`), the largest first: `[tokens, k]` i32.
///
/// Of equal logits that of the lower expert comes first; NaN comes after every number that a model gives.
///
/// # Errors
/// `logits` is not f32, has fewer than `k` columns, or more than the device can hold.
pub fn top_experts<R: Runtime>(client: &ComputeClient<R>, logits: &Matrix, k: usize) -> Result<Handle, Error> {
    check_f32("a choice of experts", logits)?;
    if k > logits.columns {
        return Err(Error::Mismatch {
            what: "experts to choose of each token, at most",
            expected: logits.columns,
            actual: k,
        });
    }
    let shared = size_of::<f32>() * logits.columns;
    check_shared(client, &format!("a choice among {} experts", logits.columns), shared)?;
    let chosen = allocate(client, logits.rows * k);
    if logits.rows * k > 0 {
        // SAFETY: one cube a row, rows past the last are neither read nor written; ranks from `k` up are not written.
        unsafe {
            rank_experts::launch_unchecked::<R>(
                client,
                row_grid(logits.rows),
                CubeDim::new_1d(RANKING as u32),
                array(&logits.handle, logits.span()),
                array(&chosen, logits.rows * k),
                logits.rows as u32,
                logits.strides[0] as u32,
                logits.strides[1] as u32,
                k as u32,
                logits.columns,
            );
        }
    }
    Ok(chosen)
}

/// The order that puts the rows of each expert together; rows of one expert stay in order. All i32.
#[derive(Clone, Debug)]
pub struct ExpertOrder {
    /// Row in each place, `[rows]`.
    pub order: Handle,
    /// Place of each row, `[rows]`.
    pub inverse: Handle,
    /// Rows of each expert, `[experts]`.
    pub counts: Handle,
}

/// Sorts `rows` rows by expert, from the expert of each (`[rows]` i32) of at least one. An id that is none of the `experts` counts as the
/// nearest that is.
pub fn order_by_expert<R: Runtime>(
    client: &ComputeClient<R>,
    expert_ids: &Handle,
    rows: usize,
    experts: usize,
) -> ExpertOrder {
    let sorted = ExpertOrder {
        order: allocate(client, rows),
        inverse: allocate(client, rows),
        counts: allocate(client, experts),
    };
    if experts > 0 {
        // SAFETY: rows are read and written below their number; every row has one place, also one of a wrong id.
        unsafe {
            place_rows::launch_unchecked::<R>(
                client,
                CubeCount::Static(experts as u32, 1, 1),
                CubeDim::new_1d(PLACING as u32),
                array(expert_ids, rows),
                array(&sorted.order, rows),
                array(&sorted.inverse, rows),
                array(&sorted.counts, experts),
                rows as u32,
                experts as u32,
            );
        }
    }
    sorted
}

/// One cube a token. An expert's rank is the number of experts before it.
#[cube(launch_unchecked)]
fn rank_experts(
    logits: &Array<f32>,
    chosen: &mut Array<i32>,
    rows: u32,
    row_stride: u32,
    column_stride: u32,
    k: u32,
    #[comptime] experts: usize,
) {
    let mut keys = SharedMemory::<f32>::new(experts);
    let row = CUBE_POS_Y as usize * WIDTH + CUBE_POS_X as usize;
    let unit_pos = UNIT_POS as usize;
    if row < rows as usize {
        for expert in range_stepped(unit_pos, experts, RANKING) {
            let key = logits[row * row_stride as usize + expert * column_stride as usize];
            let is_number = u32::reinterpret(key) & 0x7fff_ffffu32 <= INFINITE;
            keys[expert] = select(is_number, key, NOT_A_NUMBER);
        }
    }
    sync_cube();
    if row < rows as usize {
        for expert in range_stepped(unit_pos, experts, RANKING) {
            let own = keys[expert];
            let mut rank = 0u32;
            for other in 0..experts {
                let key = keys[other];
                if key > own || (key == own && other < expert) {
                    rank += 1u32;
                }
            }
            if rank < k {
                chosen[row * k as usize + rank as usize] = i32::cast_from(expert);
            }
        }
    }
}

/// One cube an expert. A row's place is the number of rows of lower experts, and of earlier rows of its own. Each unit
/// takes a stretch of rows.
#[cube(launch_unchecked)]
fn place_rows(
    expert_ids: &Array<i32>,
    order: &mut Array<i32>,
    inverse: &mut Array<i32>,
    counts: &mut Array<i32>,
    rows: u32,
    experts: u32,
) {
    let mut own = SharedMemory::<u32>::new(PLACING);
    let mut lower = SharedMemory::<u32>::new(PLACING);
    let expert = i32::cast_from(CUBE_POS_X);
    let last_expert = i32::cast_from(experts - 1u32);
    let unit_pos = UNIT_POS as usize;
    let rows = rows as usize;
    let stretch = rows.div_ceil(PLACING);
    let first = min(unit_pos * stretch, rows);
    let end = min(first + stretch, rows);

    let mut own_rows = 0u32;
    let mut lower_rows = 0u32;
    for row in first..end {
        let id = clamp(expert_ids[row], 0i32, last_expert);
        own_rows += u32::cast_from(id == expert);
        lower_rows += u32::cast_from(id < expert);
    }
    own[unit_pos] = own_rows;
    lower[unit_pos] = lower_rows;
    // Running sums over units.
    #[unroll]
    for level in 0..8usize {
        let distance = comptime!(1usize << level);
        let mut own_before = 0u32;
        let mut lower_before = 0u32;
        sync_cube();
        if unit_pos >= distance {
            own_before = own[unit_pos - distance];
            lower_before = lower[unit_pos - distance];
        }
        sync_cube();
        own[unit_pos] += own_before;
        lower[unit_pos] += lower_before;
    }
    sync_cube();
    let mut place = lower[PLACING - 1] + own[unit_pos] - own_rows;
    for row in first..end {
        if clamp(expert_ids[row], 0i32, last_expert) == expert {
            order[place as usize] = i32::cast_from(row);
            inverse[row] = i32::cast_from(place);
            place += 1u32;
        }
    }
    if unit_pos == PLACING - 1 {
        counts[CUBE_POS_X as usize] = i32::cast_from(own[unit_pos]);
    }
}
