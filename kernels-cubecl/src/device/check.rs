//! What operands must be, and the errors that say what they are instead.
use super::matrix::{Element, Error, Matrix};
use cubecl::prelude::*;

/// Values of an operand or a result, at most.
pub const MAX_VALUES: usize = u32::MAX as usize;

pub(super) fn check_len(what: &'static str, expected: usize, actual: usize) -> Result<(), Error> {
    match expected == actual {
        true => Ok(()),
        false => Err(Error::Mismatch { what, expected, actual }),
    }
}

/// f32, and within the reach of 32-bit indices.
pub(super) fn check_f32(what: &str, matrix: &Matrix) -> Result<(), Error> {
    if matrix.element != Element::F32 {
        return Err(Error::Unsupported {
            what: format!("{what} of {:?}", matrix.element),
            why: "it is made for f32".into(),
        });
    }
    check_reach(what, matrix.span().max(matrix.rows.saturating_mul(matrix.columns)))
}

/// So many values are within the reach of 32-bit indices.
pub(super) fn check_reach(what: &str, values: usize) -> Result<(), Error> {
    match values <= MAX_VALUES {
        true => Ok(()),
        false => Err(Error::Unsupported {
            what: format!("{what} over {values} values"),
            why: "kernels count values in 32 bits".into(),
        }),
    }
}

/// One row, or rows one behind the other.
pub(super) fn check_dense(what: &'static str, matrix: &Matrix) -> Result<(), Error> {
    if matrix.columns > 1 {
        check_len(what, 1, matrix.strides[1])?;
    }
    match matrix.rows > 1 {
        true => check_len(what, matrix.columns, matrix.strides[0]),
        false => Ok(()),
    }
}

/// So many bytes may be shared among the units of a cube.
pub(super) fn check_shared<R: Runtime>(client: &ComputeClient<R>, what: &str, bytes: usize) -> Result<(), Error> {
    let limit = client.properties().hardware.max_shared_memory_size;
    match bytes <= limit {
        true => Ok(()),
        false => Err(Error::Unsupported {
            what: what.into(),
            why: format!("a cube would share {bytes} bytes, it may {limit}"),
        }),
    }
}
