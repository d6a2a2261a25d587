//! Parts of the `quads_ablation` recipe: the comparison that QUADS claims, arm by arm from shared warm-up checkpoints.
//!
//! Reading order: [`arms`] and [`series`] (what is compared, as data), [`collapse`] (a rule), [`plan`] (what there is to
//! do) and [`scheduler`] (several processes at once), [`worker`] (what one of them does) with [`warm`], [`gaps`] and [`collect`],
//! [`files`] and [`layout`] (what it leaves, and where), [`assemble`] and [`results`] (all of it in one file), [`statistics`],
//! [`checks`] and [`answer`] (what it means), [`table`], [`plots`], [`report`] and [`page`] (how it is shown).
#![warn(missing_docs)]
pub mod answer;
pub mod arms;
pub mod assemble;
pub mod checks;
pub mod cli;
pub mod collapse;
pub mod collect;
pub mod files;
pub mod gaps;
pub mod layout;
pub mod list;
pub mod lock;
pub mod machine;
pub mod page;
pub mod plan;
pub mod plots;
pub mod report;
pub mod results;
pub mod scheduler;
pub mod series;
pub mod statistics;
pub mod table;
pub mod warm;
pub mod worker;

#[cfg(test)]
mod synthetic;
