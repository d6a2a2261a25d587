//! Layer operations on the CPU, each as one pass over plain slices.
//!
//! Burn's operations allocate and traverse a tensor each; at the sizes of one decode step that costs more than the
//! arithmetic. Backends that lend their memory (Flex) run these instead. A row's result depends on that row only, its
//! sums run in a fixed order, so that neither neighbours nor threads change its bits. CPUs with fused multiply-add round
//! once where others round twice, the one difference between them.
pub(crate) mod attention;
mod vector;
