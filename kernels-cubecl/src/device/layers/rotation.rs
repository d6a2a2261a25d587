//! Rotary positions in the rotate-half form: channel `i` of a head turns with channel `i + d/2`. One unit a value.
use super::{UNITS, unit_value, value_grid};
use crate::device::{
    check::{check_dense, check_f32, check_len},
    matrix::{Element, Error, Matrix, allocate, array},
};
use cubecl::prelude::*;

/// Cosines and sines of tokens, f32 `[tokens of a sequence, d]` without gaps: those of the first half of channels again in
/// the second, and the sines of the first half negated.
#[derive(Clone, Debug)]
pub struct RotaryRows {
    /// Cosines.
    pub cos: Matrix,
    /// Sines.
    pub sin: Matrix,
}

/// Rotates `heads` heads of each token: `x` is f32 `[tokens · heads, d]`, the heads of a token one after the other. With fewer
/// rows than tokens the table starts over: every sequence of a batch has the same.
///
/// # Errors
/// An operand is not f32; `d` is odd or not the table's; the rows of `x` are no multiple of the heads, or the tokens none of the
/// table's rows.
pub fn rotate_heads<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Matrix,
    heads: usize,
    table: &RotaryRows,
) -> Result<Matrix, Error> {
    let RotaryRows { cos, sin } = table;
    let (rows, d) = (x.rows, x.columns);
    for matrix in [x, cos, sin] {
        check_f32("a rotation", matrix)?;
    }
    check_len("channels of a head", d.next_multiple_of(2), d)?;
    for matrix in [cos, sin] {
        check_len("channels of the rotary table", d, matrix.columns)?;
        check_len("rows of the rotary table", cos.rows, matrix.rows)?;
        check_dense("elements from one value of the rotary table to the next", matrix)?;
    }
    check_len("rows of heads", rows.next_multiple_of(heads.max(1)), rows)?;
    let tokens = rows / heads.max(1);
    check_len("tokens", tokens.next_multiple_of(cos.rows.max(1)), tokens)?;
    if rows * d > 0 {
        check_len("heads of a token, at least", heads.max(1), heads)?;
        check_len("rows of the rotary table, at least", cos.rows.max(1), cos.rows)?;
    }
    let y = allocate(client, rows * d);
    if rows * d > 0 {
        // SAFETY: values past the last are neither read nor written; a token's row of the table is below their number.
        unsafe {
            rotate::launch_unchecked::<R>(
                client,
                value_grid(rows * d),
                CubeDim::new_1d(UNITS as u32),
                array(&x.handle, x.span()),
                array(&cos.handle, cos.rows * d),
                array(&sin.handle, cos.rows * d),
                array(&y, rows * d),
                (rows * d) as u32,
                d as u32,
                heads as u32,
                cos.rows as u32,
                x.strides[0] as u32,
                x.strides[1] as u32,
            );
        }
    }
    Ok(Matrix::contiguous(y, Element::F32, rows, d))
}

#[cube(launch_unchecked)]
fn rotate(
    x: &Array<f32>,
    cos: &Array<f32>,
    sin: &Array<f32>,
    y: &mut Array<f32>,
    values: u32,
    d: u32,
    heads: u32,
    table_rows: u32,
    row_stride: u32,
    column_stride: u32,
) {
    let at = unit_value();
    let d = d as usize;
    if at < values as usize {
        let row = at / d;
        let channel = at % d;
        let other = (channel + d / 2) % d;
        let turn = row / heads as usize % table_rows as usize * d + channel;
        let start = row * row_stride as usize;
        let value = x[start + channel * column_stride as usize];
        let swapped = x[start + other * column_stride as usize];
        y[at] = value * cos[turn] + swapped * sin[turn];
    }
}
