//! Layers and the model.
pub mod attention;
pub mod experts;
pub mod linear;
pub mod moe;
pub mod rotary;
pub mod router;
