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

use super::matrix::{Element, Error, Matrix};
use cubecl::prelude::*;

/// Values of an operand or a result, at most.
pub const MAX_VALUES: usize = u32::MAX as usize;
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

/// f32, and within the reach of 32-bit indices.
fn check_f32(what: &str, matrix: &Matrix) -> Result<(), Error> {
    if matrix.element != Element::F32 {
        return Err(Error::Unsupported {
            what: format!("{what} of {:?}", matrix.element),
            why: "it is made for f32".into(),
        });
    }
    let values = matrix.span().max(matrix.rows.saturating_mul(matrix.columns));
    match values <= MAX_VALUES {
        true => Ok(()),
        false => Err(Error::Unsupported {
            what: format!("{what} over {values} values"),
            why: "kernels count values in 32 bits".into(),
        }),
    }
}

/// One row, or rows one behind the other.
fn check_dense(what: &'static str, matrix: &Matrix) -> Result<(), Error> {
    if matrix.columns > 1 {
        check_len(what, 1, matrix.strides[1])?;
    }
    match matrix.rows > 1 {
        true => check_len(what, matrix.columns, matrix.strides[0]),
        false => Ok(()),
    }
}

/// Bytes that a cube of a device may share among its units.
fn check_shared<R: Runtime>(client: &ComputeClient<R>, what: &str, bytes: usize) -> Result<(), Error> {
    let limit = client.properties().hardware.max_shared_memory_size;
    match bytes <= limit {
        true => Ok(()),
        false => Err(Error::Unsupported {
            what: what.into(),
            why: format!("a cube would share {bytes} bytes, it may {limit}"),
        }),
    }
}

fn check_len(what: &'static str, expected: usize, actual: usize) -> Result<(), Error> {
    match expected == actual {
        true => Ok(()),
        false => Err(Error::Mismatch { what, expected, actual }),
    }
}

/// The sum of all units' values, in every unit.
#[cube]
fn sum_over_cube(own: f32, #[comptime] units: usize) -> f32 {
    let mut shared = SharedMemory::<f32>::new(units);
    let unit_pos = UNIT_POS as usize;
    shared[unit_pos] = own;
    #[unroll]
    for level in 0..comptime!(units.trailing_zeros() as usize) {
        let width = comptime!(units >> (level + 1));
        sync_cube();
        if unit_pos < width {
            shared[unit_pos] += shared[unit_pos + width];
        }
    }
    sync_cube();
    shared[0]
}

/// The largest of all units' values, in every unit.
#[cube]
fn largest_over_cube(own: f32, #[comptime] units: usize) -> f32 {
    let mut shared = SharedMemory::<f32>::new(units);
    let unit_pos = UNIT_POS as usize;
    shared[unit_pos] = own;
    #[unroll]
    for level in 0..comptime!(units.trailing_zeros() as usize) {
        let width = comptime!(units >> (level + 1));
        sync_cube();
        if unit_pos < width {
            shared[unit_pos] = max(shared[unit_pos], shared[unit_pos + width]);
        }
    }
    sync_cube();
    shared[0]
}
