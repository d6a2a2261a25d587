//! Group relative policy optimization.
