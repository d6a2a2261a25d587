//! The types of this build: the CPU backend with packed weights, on both sides.
use burn::backend::{Autodiff, Flex};
use burn_nvfp4::Nvfp4;
use burn_quads::modules::moe::QuadsMoe;

/// What the rollout runs on.
pub type Rollout = Nvfp4<Flex>;
/// What the trainer runs on.
pub type Trainer = Autodiff<Rollout>;
/// The model that learns: f32 masters.
pub type Policy = QuadsMoe<Trainer>;
/// A model that is sampled or scored; packed after a sync.
pub type Sampler = QuadsMoe<Rollout>;
