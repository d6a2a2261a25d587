//! What can be wrong with an input.

/// Why an input was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// `k` is not a multiple of the block.
    #[error("k = {k} is not a multiple of 16, the NVFP4 block")]
    UnalignedK {
        /// Length of the contraction axis.
        k: usize,
    },
    /// A buffer does not have the length that its shape says.
    #[error("{what}: expected {expected} elements, got {actual}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Elements that the shape asks for.
        expected: usize,
        /// Elements given.
        actual: usize,
    },
    /// A weight holds NaN or an infinity.
    #[error("non-finite value {value} at row {row}, column {column} of a weight")]
    NonFinite {
        /// Row of the value.
        row: usize,
        /// Column of the value.
        column: usize,
        /// The value.
        value: f32,
    },
    /// A shape has more elements than an address space.
    #[error("{what}: the shape {shape:?} has more elements than can be addressed")]
    Shape {
        /// Which buffer.
        what: &'static str,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The amax that a weight shall be scaled by is not one of its (or its group's) values.
    #[error("amax {amax} given for a weight whose own is {own}: a finite value of at least that was expected")]
    Amax {
        /// The amax given.
        amax: f32,
        /// The weight's own.
        own: f32,
    },
    /// A share of channels outside (0, 1].
    #[error("fraction {fraction} of channels to compensate: a value in (0, 1] was expected")]
    Fraction {
        /// The fraction given.
        fraction: f32,
    },
    /// The weights of a grouped matmul differ in shape.
    #[error("group {group} has a [{rows}, {k}] weight, group 0 a [{first_rows}, {first_k}] one")]
    GroupShape {
        /// Index of the group.
        group: usize,
        /// Its rows.
        rows: usize,
        /// Its contraction length.
        k: usize,
        /// Rows of the first group.
        first_rows: usize,
        /// Contraction length of the first group.
        first_k: usize,
    },
}

impl Error {
    /// Whether a buffer of `actual` elements has `shape`.
    pub(crate) fn check_length(what: &'static str, shape: &[usize], actual: usize) -> Result<(), Self> {
        let expected = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
        match expected {
            Some(expected) if expected == actual => Ok(()),
            Some(expected) => Err(Self::Length { what, expected, actual }),
            None => Err(Self::Shape {
                what,
                shape: shape.to_vec(),
            }),
        }
    }
}
