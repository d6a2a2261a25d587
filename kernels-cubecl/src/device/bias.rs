//! A bias added to the rows of a product in f32, then the one cast to the type of the result: one pass for both.
use super::matrix::{Element, Error, Matrix, allocate, array};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a cube.
const UNITS: u32 = 256;

/// `y[t, n] + bias[n]` in `output`'s type, row-major. `y` is f32 and row-major without gaps, `bias` one row without gaps.
///
/// # Errors
/// `bias` has another number of columns than `y`, or the device lacks a type.
pub fn add_bias<R: Runtime>(
    client: &ComputeClient<R>,
    y: &Matrix,
    bias: &Matrix,
    output: Element,
) -> Result<Matrix, Error> {
    let (rows, columns) = (y.rows, y.columns);
    if (bias.rows, bias.columns) != (1, columns) {
        return Err(Error::Mismatch {
            what: "values of a bias",
            expected: columns,
            actual: bias.rows * bias.columns,
        });
    }
    for element in [bias.element, output] {
        if !element.is_native(client) {
            return Err(Error::Unsupported {
                what: format!("a bias in {element:?}"),
                why: "it has no such type".into(),
            });
        }
    }
    let sum = allocate(client, (rows * columns * output.size()).div_ceil(4));
    if rows * columns > 0 {
        match bias.element {
            Element::F32 => to_output::<R, f32>(client, y, &bias.handle, output, &sum),
            Element::F16 => to_output::<R, half::f16>(client, y, &bias.handle, output, &sum),
            Element::BF16 => to_output::<R, half::bf16>(client, y, &bias.handle, output, &sum),
        }
    }
    Ok(Matrix::contiguous(sum, output, rows, columns))
}

fn to_output<R: Runtime, B: Float + CubeElement>(
    client: &ComputeClient<R>,
    y: &Matrix,
    bias: &Handle,
    output: Element,
    sum: &Handle,
) {
    match output {
        Element::F32 => launch::<R, B, f32>(client, y, bias, sum),
        Element::F16 => launch::<R, B, half::f16>(client, y, bias, sum),
        Element::BF16 => launch::<R, B, half::bf16>(client, y, bias, sum),
    }
}

fn launch<R: Runtime, B: Float + CubeElement, Y: Float + CubeElement>(
    client: &ComputeClient<R>,
    y: &Matrix,
    bias: &Handle,
    sum: &Handle,
) {
    let values = y.rows * y.columns;
    // As many as fill a large device; each takes what is left in strides.
    let cubes = values.div_ceil(UNITS as usize).min(4096);
    // SAFETY: indices are checked against the number of values.
    unsafe {
        add_rows::launch_unchecked::<B, Y, R>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            array(&y.handle, values),
            array(bias, y.columns),
            array(sum, values),
            values as u32,
            y.columns as u32,
            cubes as u32,
        );
    }
}

#[cube(launch_unchecked)]
fn add_rows<B: Float, Y: Float>(
    y: &Array<f32>,
    bias: &Array<B>,
    sum: &mut Array<Y>,
    values: u32,
    columns: u32,
    cubes: u32,
) {
    let first = CUBE_POS_X as usize * UNITS as usize + UNIT_POS as usize;
    for i in range_stepped(first, values as usize, cubes as usize * UNITS as usize) {
        sum[i] = Y::cast_from(y[i] + f32::cast_from(bias[i % columns as usize]));
    }
}
