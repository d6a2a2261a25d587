//! Text from a model of the Hub. In reading order: [`cli`], [`model`] (loading and packing), [`answer`] (sampling).
#![warn(missing_docs)]

pub mod answer;
pub mod cli;
pub mod model;
