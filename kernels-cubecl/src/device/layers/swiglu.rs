//! SwiGLU of gate and up that lie side by side, and its gradient: one unit a value.
use super::{UNITS, unit_value, value_grid};
use crate::device::{
    check::{check_f32, check_len},
    matrix::{Element, Error, Matrix, allocate, array},
};
use cubecl::prelude::*;

/// `silu(gate) · up`: f32 `[rows, 2 · d]`, gate before up, to `[rows, d]`.
///
/// # Errors
/// `gate_up` is not f32, or has an odd number of columns.
pub fn swiglu<R: Runtime>(client: &ComputeClient<R>, gate_up: &Matrix) -> Result<Matrix, Error> {
    let d = half_width(gate_up)?;
    let values = gate_up.rows * d;
    let y = allocate(client, values);
    if values > 0 {
        // SAFETY: values past the last are neither read nor written.
        unsafe {
            multiply::launch_unchecked::<R>(
                client,
                value_grid(values),
                CubeDim::new_1d(UNITS as u32),
                array(&gate_up.handle, gate_up.span()),
                array(&y, values),
                values as u32,
                d as u32,
                gate_up.strides[0] as u32,
                gate_up.strides[1] as u32,
            );
        }
    }
    Ok(Matrix::contiguous(y, Element::F32, gate_up.rows, d))
}

/// The gradient of `gate_up` (`[rows, 2 · d]` without gaps) from that of [`swiglu`]'s result (`grad`).
///
/// # Errors
/// An operand is not f32, or has another shape.
pub fn swiglu_backward<R: Runtime>(
    client: &ComputeClient<R>,
    gate_up: &Matrix,
    grad: &Matrix,
) -> Result<Matrix, Error> {
    let d = half_width(gate_up)?;
    check_f32("the gradient of SwiGLU", grad)?;
    check_len("rows of the gradient", gate_up.rows, grad.rows)?;
    check_len("columns of the gradient", d, grad.columns)?;
    let values = gate_up.rows * d;
    let out = allocate(client, 2 * values);
    if values > 0 {
        // SAFETY: values past the last are neither read nor written.
        unsafe {
            differentiate::launch_unchecked::<R>(
                client,
                value_grid(values),
                CubeDim::new_1d(UNITS as u32),
                array(&gate_up.handle, gate_up.span()),
                array(&grad.handle, grad.span()),
                array(&out, 2 * values),
                values as u32,
                d as u32,
                gate_up.strides[0] as u32,
                gate_up.strides[1] as u32,
                grad.strides[0] as u32,
                grad.strides[1] as u32,
            );
        }
    }
    Ok(Matrix::contiguous(out, Element::F32, gate_up.rows, 2 * d))
}

fn half_width(gate_up: &Matrix) -> Result<usize, Error> {
    check_f32("SwiGLU", gate_up)?;
    let d = gate_up.columns / 2;
    check_len("columns of gate and up", 2 * d, gate_up.columns)?;
    Ok(d)
}

#[cube]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + f32::exp(-x))
}

#[cube(launch_unchecked)]
fn multiply(gate_up: &Array<f32>, y: &mut Array<f32>, values: u32, d: u32, row_stride: u32, column_stride: u32) {
    let at = unit_value();
    let d = d as usize;
    if at < values as usize {
        let row = at / d * row_stride as usize;
        let gate = gate_up[row + at % d * column_stride as usize];
        let up = gate_up[row + (d + at % d) * column_stride as usize];
        y[at] = gate * sigmoid(gate) * up;
    }
}

#[cube(launch_unchecked)]
fn differentiate(
    gate_up: &Array<f32>,
    grad: &Array<f32>,
    out: &mut Array<f32>,
    values: u32,
    d: u32,
    row_stride: u32,
    column_stride: u32,
    grad_row_stride: u32,
    grad_column_stride: u32,
) {
    let at = unit_value();
    let d = d as usize;
    if at < values as usize {
        let column = at % d;
        let row = at / d * row_stride as usize;
        let gate = gate_up[row + column * column_stride as usize];
        let up = gate_up[row + (d + column) * column_stride as usize];
        let slope = grad[at / d * grad_row_stride as usize + column * grad_column_stride as usize];
        let sigmoid = sigmoid(gate);
        // silu' = σ + x·σ·(1 − σ)
        out[at / d * 2 * d + column] = slope * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)));
        out[at / d * 2 * d + d + column] = slope * gate * sigmoid;
    }
}
