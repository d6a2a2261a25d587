//! Softmax over rows, its gradient, and the parts of its logarithm: one cube a row.
use super::{Reduction, cube_row, one_of_cube, row_grid, row_units};
use crate::device::{
    check::{check_f32, check_len},
    matrix::{Element, Error, Matrix, allocate, array},
};
use cubecl::prelude::*;

/// Softmax of each row of `x` (f32 `[rows, columns]`). A row that holds NaN or positive infinity is NaN, and one of
/// nothing but negative infinity.
///
/// # Errors
/// `x` is not f32.
pub fn softmax<R: Runtime>(client: &ComputeClient<R>, x: &Matrix) -> Result<Matrix, Error> {
    check_f32("a softmax", x)?;
    let values = x.rows * x.columns;
    let y = allocate(client, values);
    if values > 0 {
        let units = row_units(x.columns);
        // SAFETY: one cube a row; rows past the last are neither read nor written.
        unsafe {
            normalize::launch_unchecked::<R>(
                client,
                row_grid(x.rows),
                CubeDim::new_1d(units as u32),
                array(&x.handle, x.span()),
                array(&y, values),
                x.rows as u32,
                x.columns as u32,
                x.strides[0] as u32,
                x.strides[1] as u32,
                units,
            );
        }
    }
    Ok(Matrix::contiguous(y, Element::F32, x.rows, x.columns))
}

/// The gradient of the input of [`softmax`] from its result `y` and that of the result: `y · (grad − Σ y·grad)`.
///
/// # Errors
/// An operand is not f32, or they differ in shape.
pub fn softmax_backward<R: Runtime>(client: &ComputeClient<R>, y: &Matrix, grad: &Matrix) -> Result<Matrix, Error> {
    check_f32("the gradient of a softmax", y)?;
    check_f32("the gradient of a softmax", grad)?;
    check_len("rows of the gradient", y.rows, grad.rows)?;
    check_len("columns of the gradient", y.columns, grad.columns)?;
    let values = y.rows * y.columns;
    let dx = allocate(client, values);
    if values > 0 {
        let units = row_units(y.columns);
        // SAFETY: one cube a row; rows past the last are neither read nor written.
        unsafe {
            differentiate::launch_unchecked::<R>(
                client,
                row_grid(y.rows),
                CubeDim::new_1d(units as u32),
                array(&y.handle, y.span()),
                array(&grad.handle, grad.span()),
                array(&dx, values),
                y.rows as u32,
                y.columns as u32,
                y.strides[0] as u32,
                y.strides[1] as u32,
                grad.strides[0] as u32,
                grad.strides[1] as u32,
                units,
            );
        }
    }
    Ok(Matrix::contiguous(dx, Element::F32, y.rows, y.columns))
}

/// What the logarithm of a softmax is made of: `x − largest − log_sum`. Both f32 `[rows, 1]`.
#[derive(Clone, Debug)]
pub struct LogSoftmaxParts {
    /// The largest of each row; anything where the row holds NaN.
    pub largest: Matrix,
    /// `ln Σ exp(x − largest)`.
    pub log_sum: Matrix,
}

/// The parts of the logarithm of each row's softmax (`x` f32 `[rows, columns]`, at least one column).
///
/// # Errors
/// `x` is not f32, or has rows without columns.
pub fn log_softmax_parts<R: Runtime>(client: &ComputeClient<R>, x: &Matrix) -> Result<LogSoftmaxParts, Error> {
    check_f32("a log-softmax", x)?;
    if x.rows > 0 {
        check_len("columns of a log-softmax, at least", x.columns.max(1), x.columns)?;
    }
    let (largest, log_sum) = (allocate(client, x.rows), allocate(client, x.rows));
    if x.rows > 0 {
        let units = row_units(x.columns);
        // SAFETY: one cube a row; rows past the last are neither read nor written.
        unsafe {
            reduce::launch_unchecked::<R>(
                client,
                row_grid(x.rows),
                CubeDim::new_1d(units as u32),
                array(&x.handle, x.span()),
                array(&largest, x.rows),
                array(&log_sum, x.rows),
                x.rows as u32,
                x.columns as u32,
                x.strides[0] as u32,
                x.strides[1] as u32,
                units,
            );
        }
    }
    Ok(LogSoftmaxParts {
        largest: Matrix::contiguous(largest, Element::F32, x.rows, 1),
        log_sum: Matrix::contiguous(log_sum, Element::F32, x.rows, 1),
    })
}

/// The largest value of a row, and the sum of all exponentials relative to it, in every unit.
#[cube]
fn row_parts(
    x: &Array<f32>,
    start: usize,
    inside: bool,
    columns: usize,
    column_stride: usize,
    #[comptime] units: usize,
) -> (f32, f32) {
    let mut largest = 0.0f32;
    if inside {
        largest = x[start];
        for column in range_stepped(UNIT_POS as usize, columns, units) {
            largest = max(largest, x[start + column * column_stride]);
        }
    }
    let largest = one_of_cube(largest, units, Reduction::Largest);
    let mut sum = 0.0f32;
    if inside {
        for column in range_stepped(UNIT_POS as usize, columns, units) {
            sum += f32::exp(x[start + column * column_stride] - largest);
        }
    }
    (largest, one_of_cube(sum, units, Reduction::Sum))
}

#[cube(launch_unchecked)]
fn normalize(
    x: &Array<f32>,
    y: &mut Array<f32>,
    rows: u32,
    columns: u32,
    row_stride: u32,
    column_stride: u32,
    #[comptime] units: usize,
) {
    let row = cube_row();
    let inside = row < rows as usize;
    let columns = columns as usize;
    let stride = column_stride as usize;
    let start = row * row_stride as usize;
    let (largest, sum) = row_parts(x, start, inside, columns, stride, units);
    if inside {
        for column in range_stepped(UNIT_POS as usize, columns, units) {
            y[row * columns + column] = f32::exp(x[start + column * stride] - largest) / sum;
        }
    }
}

#[cube(launch_unchecked)]
fn differentiate(
    y: &Array<f32>,
    grad: &Array<f32>,
    dx: &mut Array<f32>,
    rows: u32,
    columns: u32,
    row_stride: u32,
    column_stride: u32,
    grad_row_stride: u32,
    grad_column_stride: u32,
    #[comptime] units: usize,
) {
    let row = cube_row();
    let inside = row < rows as usize;
    let columns = columns as usize;
    let y_start = row * row_stride as usize;
    let grad_start = row * grad_row_stride as usize;
    let mut along = 0.0f32;
    if inside {
        for column in range_stepped(UNIT_POS as usize, columns, units) {
            let slope = grad[grad_start + column * grad_column_stride as usize];
            along += y[y_start + column * column_stride as usize] * slope;
        }
    }
    let along = one_of_cube(along, units, Reduction::Sum);
    if inside {
        for column in range_stepped(UNIT_POS as usize, columns, units) {
            let slope = grad[grad_start + column * grad_column_stride as usize];
            dx[row * columns + column] = y[y_start + column * column_stride as usize] * (slope - along);
        }
    }
}

#[cube(launch_unchecked)]
fn reduce(
    x: &Array<f32>,
    largest: &mut Array<f32>,
    log_sum: &mut Array<f32>,
    rows: u32,
    columns: u32,
    row_stride: u32,
    column_stride: u32,
    #[comptime] units: usize,
) {
    let row = cube_row();
    let inside = row < rows as usize;
    let start = row * row_stride as usize;
    let (row_largest, sum) = row_parts(x, start, inside, columns as usize, column_stride as usize, units);
    if inside && UNIT_POS == 0 {
        largest[row] = row_largest;
        log_sum[row] = f32::ln(sum);
    }
}
