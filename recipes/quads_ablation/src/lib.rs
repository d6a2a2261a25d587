//! Parts of the `quads_ablation` recipe: the comparison that QUADS claims, arm by arm from shared warm-up checkpoints.
#![warn(missing_docs)]
pub mod answer;
pub mod arms;
pub mod checks;
pub mod page;
pub mod plots;
pub mod report;
pub mod results;
pub mod statistics;
pub mod table;

#[cfg(test)]
mod synthetic;
