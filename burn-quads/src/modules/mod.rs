//! Layers and the model, from the inside out.
pub mod activation_site;
pub mod attention;
pub mod decoder_layer;
pub mod error_probe;
pub mod experts;
pub mod linear;
pub mod moe;
pub mod moe_config;
mod outlier_channels;
pub mod range_probe;
pub mod residual_masks;
pub mod residual_probe;
pub mod rotary;
pub mod router;
pub(crate) mod seeded_init;
pub mod straight_through;
