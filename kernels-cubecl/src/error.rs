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
}
