//! Layer operations on the CPU, each as one pass over plain slices.
//!
//! Burn's operations allocate and traverse a tensor each; at the sizes of one decode step, or of short sequences, that
//! costs more than the arithmetic. A backend that lends its memory (Flex) runs these instead. A row's result depends on
//! that row only and sums run in a fixed order, so that neither neighbours nor threads change its bits. CPUs with fused
//! multiply-add round once where others round twice: the one difference between them.
pub(crate) mod cached_attention;
pub(crate) mod causal_attention;
mod heads;
pub(crate) mod rms_norm;
pub(crate) mod swiglu;
mod vector;

pub(crate) use heads::KEY_BLOCK;
