//! RMS norm of rows, and its gradients: one cube a row.
use super::{Reduction, cube_row, one_of_cube, row_grid, row_units};
use crate::device::{
    check::{check_dense, check_f32, check_len},
    matrix::{Element, Error, Matrix, allocate, array},
};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// `x / √(mean(x²) + ε) · γ` of each row of `x` (f32 `[rows, columns]`); `gamma` is one row without gaps.
///
/// # Errors
/// An operand is not f32, or `gamma` does not have the columns of `x`.
pub fn rms_norm<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Matrix,
    gamma: &Matrix,
    epsilon: f32,
) -> Result<Matrix, Error> {
    check("an RMS norm", x, gamma)?;
    let y = allocate(client, x.rows * x.columns);
    if x.rows * x.columns > 0 {
        let units = row_units(x.columns);
        // SAFETY: one cube a row; rows past the last are neither read nor written.
        unsafe {
            normalize::launch_unchecked::<R>(
                client,
                row_grid(x.rows),
                CubeDim::new_1d(units as u32),
                array(&x.handle, x.span()),
                array(&gamma.handle, x.columns),
                array(&y, x.rows * x.columns),
                x.rows as u32,
                x.columns as u32,
                x.strides[0] as u32,
                x.strides[1] as u32,
                epsilon,
                units,
            );
        }
    }
    Ok(Matrix::contiguous(y, Element::F32, x.rows, x.columns))
}

/// What [`rms_norm_backward`] gives, both f32 `[rows, columns]` without gaps.
#[derive(Clone, Debug)]
pub struct RmsNormGradients {
    /// The gradient of `x`.
    pub x: Matrix,
    /// What each row adds to the gradient of `gamma`.
    pub gamma_rows: Matrix,
}

/// Gradients of [`rms_norm`], from that of its result (`grad`).
///
/// # Errors
/// An operand is not f32, or has another shape.
pub fn rms_norm_backward<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Matrix,
    gamma: &Matrix,
    epsilon: f32,
    grad: &Matrix,
) -> Result<RmsNormGradients, Error> {
    check("gradients of an RMS norm", x, gamma)?;
    check_f32("gradients of an RMS norm", grad)?;
    check_len("rows of the gradient", x.rows, grad.rows)?;
    check_len("columns of the gradient", x.columns, grad.columns)?;
    let values = x.rows * x.columns;
    let (dx, products) = (allocate(client, values), allocate(client, values));
    if values > 0 {
        let units = row_units(x.columns);
        // SAFETY: one cube a row; rows past the last are neither read nor written.
        unsafe {
            differentiate::launch_unchecked::<R>(
                client,
                row_grid(x.rows),
                CubeDim::new_1d(units as u32),
                array(&x.handle, x.span()),
                array(&gamma.handle, x.columns),
                array(&grad.handle, grad.span()),
                array(&dx, values),
                array(&products, values),
                x.rows as u32,
                x.columns as u32,
                x.strides[0] as u32,
                x.strides[1] as u32,
                grad.strides[0] as u32,
                grad.strides[1] as u32,
                epsilon,
                units,
            );
        }
    }
    let matrix = |handle: Handle| Matrix::contiguous(handle, Element::F32, x.rows, x.columns);
    Ok(RmsNormGradients {
        x: matrix(dx),
        gamma_rows: matrix(products),
    })
}

fn check(what: &str, x: &Matrix, gamma: &Matrix) -> Result<(), Error> {
    check_f32(what, x)?;
    check_f32(what, gamma)?;
    check_len("rows of gamma", 1, gamma.rows)?;
    check_len("values of gamma", x.columns, gamma.columns)?;
    check_dense("elements from one value of gamma to the next", gamma)
}

#[cube(launch_unchecked)]
fn normalize(
    x: &Array<f32>,
    gamma: &Array<f32>,
    y: &mut Array<f32>,
    rows: u32,
    columns: u32,
    row_stride: u32,
    column_stride: u32,
    epsilon: f32,
    #[comptime] units: usize,
) {
    let row = cube_row();
    let columns = columns as usize;
    let mut squares = 0.0f32;
    if row < rows as usize {
        for column in range_stepped(UNIT_POS as usize, columns, units) {
            let value = x[row * row_stride as usize + column * column_stride as usize];
            squares += value * value;
        }
    }
    let mean = one_of_cube(squares, units, Reduction::Sum) / f32::cast_from(columns);
    let inverse = 1.0 / f32::sqrt(mean + epsilon);
    if row < rows as usize {
        for column in range_stepped(UNIT_POS as usize, columns, units) {
            let value = x[row * row_stride as usize + column * column_stride as usize];
            y[row * columns + column] = value * inverse * gamma[column];
        }
    }
}

/// `dx = (g·γ − n · mean(g·γ·n)) / rms` and `g · n` with the normed row `n = x / rms`.
#[cube(launch_unchecked)]
fn differentiate(
    x: &Array<f32>,
    gamma: &Array<f32>,
    grad: &Array<f32>,
    dx: &mut Array<f32>,
    products: &mut Array<f32>,
    rows: u32,
    columns: u32,
    row_stride: u32,
    column_stride: u32,
    grad_row_stride: u32,
    grad_column_stride: u32,
    epsilon: f32,
    #[comptime] units: usize,
) {
    let row = cube_row();
    let columns = columns as usize;
    let mut squares = 0.0f32;
    let mut along = 0.0f32;
    if row < rows as usize {
        for column in range_stepped(UNIT_POS as usize, columns, units) {
            let value = x[row * row_stride as usize + column * column_stride as usize];
            let slope = grad[row * grad_row_stride as usize + column * grad_column_stride as usize];
            squares += value * value;
            along += slope * gamma[column] * value;
        }
    }
    let mean = one_of_cube(squares, units, Reduction::Sum) / f32::cast_from(columns);
    let inverse = 1.0 / f32::sqrt(mean + epsilon);
    let along = one_of_cube(along, units, Reduction::Sum) / f32::cast_from(columns) * inverse;
    if row < rows as usize {
        for column in range_stepped(UNIT_POS as usize, columns, units) {
            let normed = x[row * row_stride as usize + column * column_stride as usize] * inverse;
            let slope = grad[row * grad_row_stride as usize + column * grad_column_stride as usize];
            dx[row * columns + column] = (slope * gamma[column] - normed * along) * inverse;
            products[row * columns + column] = slope * normed;
        }
    }
}
