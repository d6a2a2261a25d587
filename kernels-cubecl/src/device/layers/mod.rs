//! What a decoder layer does beside its products, each in one launch: general operations take up to dozens, and with few
//! tokens the time is that of the launches. All f32, of operands within the reach of 32-bit indices; a row's bits depend on the row
//! alone.
//!
//! - `rms_norm`, `swiglu`, `softmax`: with their gradients;
//! - `rotation`: rotary positions; `cached_attention`: new tokens over the keys and values of those before;
//! - `routing`: which experts a token goes to, and the order by expert.
mod cached_attention;
mod rms_norm;
mod rotation;
mod routing;
mod softmax;
mod swiglu;

pub use cached_attention::{KeyValueCache, cached_attention};
pub use rms_norm::{RmsNormGradients, rms_norm, rms_norm_backward};
pub use rotation::{RotaryRows, rotate_heads};
pub use routing::{ExpertOrder, order_by_expert, top_experts};
pub use softmax::{LogSoftmaxParts, log_softmax_parts, softmax, softmax_backward};
pub use swiglu::{swiglu, swiglu_backward};

use cubecl::prelude::*;

/// Cubes along x; more go along y.
const WIDTH: usize = 32_768;
/// Units of a cube where each unit takes a value.
const UNITS: usize = 256;

/// Units of a cube that takes a row: a warp where rows are short, as those of heads are.
fn row_units(columns: usize) -> usize {
    if columns <= 512 { 32 } else { 256 }
}

/// One cube a row.
fn row_grid(rows: usize) -> CubeCount {
    CubeCount::Static(rows.min(WIDTH) as u32, rows.div_ceil(WIDTH) as u32, 1)
}

/// One unit a value.
fn value_grid(values: usize) -> CubeCount {
    row_grid(values.div_ceil(UNITS))
}

/// The row of this cube in a [`row_grid`].
#[cube]
fn cube_row() -> usize {
    CUBE_POS_Y as usize * WIDTH + CUBE_POS_X as usize
}

/// The value of this unit in a [`value_grid`].
#[cube]
fn unit_value() -> usize {
    cube_row() * UNITS + UNIT_POS as usize
}

/// How values become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reduction {
    Sum,
    Largest,
}

/// Reduces each of `rows` rows of `shared`, to which every unit has written a value, to its first place. Units meet before
/// and after.
#[cube]
fn reduce_over_cube(
    shared: &mut SharedMemory<f32>,
    #[comptime] rows: usize,
    #[comptime] units: usize,
    #[comptime] reduction: Reduction,
) {
    let unit_pos = UNIT_POS as usize;
    #[unroll]
    for level in 0..comptime!(units.trailing_zeros() as usize) {
        let half = comptime!(units >> (level + 1));
        sync_cube();
        if unit_pos < half {
            #[unroll]
            for row in 0..rows {
                let at = comptime!(row * units) + unit_pos;
                if comptime!(reduction == Reduction::Sum) {
                    shared[at] += shared[at + half];
                } else {
                    shared[at] = max(shared[at], shared[at + half]);
                }
            }
        }
    }
    sync_cube();
}

/// One of all units' values, in every unit.
#[cube]
fn one_of_cube(own: f32, #[comptime] units: usize, #[comptime] reduction: Reduction) -> f32 {
    let mut shared = SharedMemory::<f32>::new(units);
    shared[UNIT_POS as usize] = own;
    reduce_over_cube(&mut shared, 1usize, units, reduction);
    shared[0]
}
