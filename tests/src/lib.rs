//! Tests that cross crates are in `tests/tests/`, their files in `tests/fixtures/`.
//!
//! The items here are the pages of the documentation, so that their Rust blocks are compiled and run.

/// The front page.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;

/// How to swap the backend.
#[cfg(doctest)]
#[doc = include_str!("../../docs/how-to/swap-the-backend.md")]
pub struct SwapTheBackend;

/// How to add `QuadsLinear`.
#[cfg(doctest)]
#[doc = include_str!("../../docs/how-to/add-quads-linear.md")]
pub struct AddQuadsLinear;

/// How to use a Hugging Face model.
#[cfg(doctest)]
#[doc = include_str!("../../docs/how-to/use-a-hugging-face-model.md")]
pub struct UseAHuggingFaceModel;

/// How to read and write NVFP4 checkpoints.
#[cfg(doctest)]
#[doc = include_str!("../../docs/how-to/nvfp4-checkpoints.md")]
pub struct Nvfp4Checkpoints;
