//! Reductions over the units of a cube, and the choice of each row's largest residuals that is made of them.
use super::quantize::{Kind, Plan};
use cubecl::prelude::*;

/// Largest value of all units of the cube, in every unit. `shared` has a word a unit.
#[cube]
pub(super) fn cube_max(value: u32, shared: &mut SharedMemory<u32>, #[comptime] plan: Plan) -> u32 {
    let unit_pos = UNIT_POS as usize;
    if comptime!(plan.nvidia) {
        let largest = plane_max(value);
        sync_cube();
        if unit_pos % 32 == 0 {
            shared[unit_pos / 32] = largest;
        }
        sync_cube();
        let mut result = shared[0];
        #[unroll]
        for plane in 1..comptime!(plan.units / 32) {
            result = max(result, shared[plane]);
        }
        result
    } else {
        sync_cube();
        shared[unit_pos] = value;
        let levels = comptime!(plan.units.ilog2());
        #[unroll]
        for level in 0..levels {
            let width = comptime!(plan.units >> (level + 1));
            sync_cube();
            if unit_pos < width {
                shared[unit_pos] = max(shared[unit_pos], shared[unit_pos + width]);
            }
        }
        sync_cube();
        shared[0]
    }
}

/// Sum over all units of the cube, in every unit.
#[cube]
fn cube_sum(value: u32, shared: &mut SharedMemory<u32>, #[comptime] plan: Plan) -> u32 {
    let unit_pos = UNIT_POS as usize;
    if comptime!(plan.nvidia) {
        let sum = plane_sum(value);
        sync_cube();
        if unit_pos % 32 == 0 {
            shared[unit_pos / 32] = sum;
        }
        sync_cube();
        let mut result = shared[0];
        #[unroll]
        for plane in 1..comptime!(plan.units / 32) {
            result += shared[plane];
        }
        result
    } else {
        sync_cube();
        shared[unit_pos] = value;
        let levels = comptime!(plan.units.ilog2());
        #[unroll]
        for level in 0..levels {
            let width = comptime!(plan.units >> (level + 1));
            sync_cube();
            if unit_pos < width {
                shared[unit_pos] += shared[unit_pos + width];
            }
        }
        sync_cube();
        shared[0]
    }
}

/// Sets all but the `count` channels or blocks of largest energy to zero; ties go to the lower index.
///
/// Energies are not negative, so that their bits order them. Bit by bit, the largest bound that `count` of them reach;
/// then, among those equal to the bound, the lowest index that leaves as many as are still missing.
#[cube]
pub(super) fn keep_largest(
    v: &mut Array<f32>,
    shared: &mut SharedMemory<u32>,
    k: usize,
    count: u32,
    zero: u32,
    #[comptime] plan: Plan,
) {
    // Units of selection that this unit of the cube holds, and the channels of one.
    let per_block = comptime!(if plan.kind == Kind::Channels { 16 } else { 1 });
    let width = comptime!(16 / per_block);
    let mut ranks = Array::<u32>::new(comptime!(plan.blocks * per_block));
    let unit_pos = UNIT_POS as usize;
    #[unroll]
    for b in 0..plan.blocks {
        let block = comptime!(b * plan.units) + unit_pos;
        if comptime!(plan.kind == Kind::Blocks64) {
            // Four neighbours share a unit of selection; the sum runs through their blocks in order.
            let quarter = unit_pos % 4;
            let mut sum = 0.0f32;
            #[unroll]
            for turn in 0..4usize {
                sync_cube();
                if turn > 0 && quarter == turn {
                    sum = f32::reinterpret(shared[unit_pos - 1]);
                }
                if quarter == turn {
                    sum = add_squares(v, sum, comptime!(b * 16), 16usize, zero);
                    shared[unit_pos] = u32::reinterpret(sum);
                }
            }
            sync_cube();
            ranks[b] = rank_bits(shared[unit_pos - quarter + 3], block / 4 * 64 < k);
        } else {
            #[unroll]
            for j in 0..per_block {
                let energy = add_squares(v, 0.0f32, comptime!(b * 16 + j * width), width, zero);
                ranks[comptime!(b * per_block + j)] = rank_bits(u32::reinterpret(energy), block * 16 < k);
            }
        }
    }
    let mut bound = 0u32;
    for i in 0..31u32 {
        let candidate = bound | (1u32 << (30u32 - i));
        if count_above(&ranks, candidate, shared, plan) >= count {
            bound = candidate;
        }
    }
    let missing = count - min(count_above(&ranks, bound + 1u32, shared, plan), count);
    // Tied units below `limit` are `missing` at most.
    let mut limit = 0u32;
    for i in 0..24u32 {
        let candidate = limit + (1u32 << (23u32 - i));
        let mut tied = 0u32;
        #[unroll]
        for b in 0..plan.blocks {
            #[unroll]
            for j in 0..per_block {
                let below = index_of(unit_pos, b, j, per_block, plan) < candidate;
                let counts = select(comptime!(plan.kind == Kind::Blocks64) && unit_pos % 4 != 0, 0u32, 1u32);
                let equal = ranks[comptime!(b * per_block + j)] == bound;
                tied += select(below && equal, counts, 0u32);
            }
        }
        if cube_sum(tied, shared, plan) <= missing {
            limit = candidate;
        }
    }
    #[unroll]
    for b in 0..plan.blocks {
        #[unroll]
        for j in 0..per_block {
            let rank = ranks[comptime!(b * per_block + j)];
            let tied = rank == bound && index_of(unit_pos, b, j, per_block, plan) < limit;
            if !(rank > bound || tied) {
                #[unroll]
                for i in 0..width {
                    v[comptime!(b * 16 + j * width + i)] = 0.0;
                }
            }
        }
    }
}

/// `sum` plus the squares of `v[at..at + count]`, in order, each operation rounded once: the exclusive or with a zero that
/// the compiler does not know keeps it from contracting product and sum.
#[cube]
fn add_squares(v: &Array<f32>, sum: f32, #[comptime] at: usize, #[comptime] count: usize, zero: u32) -> f32 {
    let mut sum = sum;
    #[unroll]
    for i in 0..count {
        let r = v[comptime!(at + i)];
        sum += f32::reinterpret(u32::reinterpret(r * r) ^ zero);
    }
    sum
}

/// The host's rank: 0 for what does not exist.
#[cube]
fn rank_bits(energy: u32, exists: bool) -> u32 {
    select(exists, energy + 1u32, 0u32)
}

/// Index along `k` of a unit of selection.
#[cube]
fn index_of(
    unit_pos: usize,
    #[comptime] b: usize,
    #[comptime] j: usize,
    #[comptime] per_block: usize,
    #[comptime] plan: Plan,
) -> u32 {
    let block = comptime!(b * plan.units) + unit_pos;
    let mut index = block * per_block + j;
    if comptime!(plan.kind == Kind::Blocks64) {
        index = block / 4;
    }
    u32::cast_from(index)
}

/// How many units of selection have a rank of at least `bound`.
#[cube]
fn count_above(ranks: &Array<u32>, bound: u32, shared: &mut SharedMemory<u32>, #[comptime] plan: Plan) -> u32 {
    let mut sum = 0u32;
    #[unroll]
    for i in 0..comptime!(if plan.kind == Kind::Channels {
        plan.blocks * 16
    } else {
        plan.blocks
    }) {
        sum += select(ranks[i] >= bound, 1u32, 0u32);
    }
    if comptime!(plan.kind == Kind::Blocks64) {
        // Held by four neighbours: counted once.
        sum = select(UNIT_POS % 4u32 == 0u32, sum, 0u32);
    }
    cube_sum(sum, shared, plan)
}
