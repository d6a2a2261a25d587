//! Operations with straight-through gradients.
