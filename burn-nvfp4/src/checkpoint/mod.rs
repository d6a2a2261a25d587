//! NVFP4 checkpoints as other tools read and write them: compressed-tensors' `nvfp4-pack-quantized` and ModelOpt's.
//!
//! | | compressed-tensors | ModelOpt |
//! |---|---|---|
//! | codes, U8 `[d_out, d_in/2]` | `weight_packed` | `weight` |
//! | block scales, F8_E4M3 `[d_out, d_in/16]` | `weight_scale` | `weight_scale` |
//! | outer scale, F32 | `weight_global_scale` `[1]`, divides | `weight_scale_2` `[]`, multiplies |
//! | activation scale (W4A4 files), F32 | `input_global_scale` `[1]`, divides | `input_scale` `[]`, multiplies |
//!
//! A packed layer is what [`PackedWeight`](crate::PackedWeight) stores: rows of `d_in` values, the even element in the
//! low nibble, plain row-major scales. So codes and block scales go in and out as bytes, and an outer scale keeps its
//! maker's convention: it is never recomputed, because makers round it.
//!
//! In reading order:
//!
//! - [`mod@format`]: the two formats and their tensors;
//! - [`scheme`]: what `config.json` and `hf_quant_config.json` say of them;
//! - [`layer`]: one packed layer, checked;
//! - [`folder`]: the packed layers of a checkpoint;
//! - [`names`]: which layers of a model get packed, and which share an outer scale;
//! - [`load`], [`export`]: packed layers to and from `Nvfp4<B>`.
pub mod export;
pub mod folder;
pub mod format;
pub mod layer;
pub mod load;
pub mod names;
pub mod scheme;

pub use export::ExportedWeight;
pub use folder::Nvfp4Folder;
pub use format::CheckpointFormat;
pub use layer::{CheckpointLayer, divisor, multiplier};
pub use load::load_weight;
pub use names::{LayerName, Projection};
pub use scheme::{QuantizationScheme, SchemeError};
