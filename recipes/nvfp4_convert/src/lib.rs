//! Quantizes checkpoints to NVFP4, converts between the formats of compressed-tensors and ModelOpt, and checks the result.
//!
//! Every command that writes works shard by shard, tensor by tensor: an input tensor is mapped, not read, and what is
//! made of it is written before the next one is looked at. In reading order:
//!
//! - [`cli`]: the command line;
//! - [`source`]: the model that is read, packed or dense;
//! - [`output_folder`]: where results are written aside, resumed, and get their name when they are whole;
//! - [`shards`]: what every writing command does, given what becomes of each tensor;
//! - [`elements`]: tensors of F32, BF16 and F16, in parts;
//! - [`roles`], [`matrix`], [`quantize`]: which tensors get packed, and how; [`dequantize`], [`convert`];
//! - [`prompts`], [`calibrate`]: the activation scales of W4A4, from given text;
//! - [`inspect`], [`verify`], [`logits_gap`]: what a checkpoint holds, and how far it is from its original;
//! - [`table`]: how they are laid out.
#![warn(missing_docs)]

pub mod calibrate;
pub mod cli;
pub mod convert;
pub mod dequantize;
pub mod elements;
pub mod inspect;
pub mod logits_gap;
pub mod matrix;
pub mod output_folder;
pub mod prompts;
pub mod quantize;
pub mod roles;
pub mod shards;
pub mod source;
pub mod table;
pub mod verify;
