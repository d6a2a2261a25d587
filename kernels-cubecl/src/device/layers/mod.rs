//! What a decoder layer does beside its products, each in one launch: general operations take up to dozens, and with few
//! tokens the time is that of the launches. All f32; a row's bits depend on the row alone.
//!
//! - `rms_norm`, `swiglu`: with their gradients;
//! - `rotation`: rotary positions;
//! - `routing`: which experts a token goes to, and the order by expert.
mod rms_norm;
mod rotation;
mod routing;
mod swiglu;

pub use rms_norm::{RmsNormGradients, rms_norm, rms_norm_backward};
pub use rotation::{RotaryRows, rotate_heads};
pub use routing::{ExpertOrder, order_by_expert, top_experts};
pub use swiglu::{swiglu, swiglu_backward};

use super::matrix::{Element, Error, Matrix};
use cubecl::prelude::*;

/// Cubes along x; more go along y.
const WIDTH: usize = 32_768;
/// Units of a cube where each unit takes a value.
const UNITS: usize = 256;

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

fn check_f32(what: &str, matrix: &Matrix) -> Result<(), Error> {
    match matrix.element {
        Element::F32 => Ok(()),
        other => Err(Error::Unsupported {
            what: format!("{what} of {other:?}"),
            why: "it is made for f32".into(),
        }),
    }
}

fn check_len(what: &'static str, expected: usize, actual: usize) -> Result<(), Error> {
    match expected == actual {
        true => Ok(()),
        false => Err(Error::Mismatch { what, expected, actual }),
    }
}
