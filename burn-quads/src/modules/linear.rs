//! A linear layer with an explicit precision.
