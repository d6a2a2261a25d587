//! The experts of one layer.
