//! `Nvfp4<B>`: NVFP4 for any Burn backend.
//!
//! The decorator leaves B's operations as they are and adds one thing: a float tensor may be a *packed weight*. A
//! linear layer or a matmul with it runs in the activation setting that the weight carries; whatever else reads it
//! gets its decoded values. So an unmodified Burn model runs in W4A4 after two changes by its owner:
//!
//! ```
//! use burn::{backend::Flex, module::Module, nn::LinearConfig};
//! use burn_nvfp4::{Nvfp4, PackLinears, Precision};
//!
//! type B = Nvfp4<Flex>; // was: Flex
//! let model = LinearConfig::new(64, 32).init::<B>(&Default::default());
//! let model = model.map(&mut PackLinears::default().precision(Precision::W4A4));
//! ```
//!
//! In reading order:
//!
//! - [`precision`]: what a linear layer computes in;
//! - [`tensor`], [`packed_weight`](mod@packed_weight): the float tensor, dense or packed;
//! - [`nvfp4_backend`]: what a backend must provide, with defaults on the host (the reference route); [`flex`]: Burn's
//!   CPU backend;
//! - [`decorator`]: `Nvfp4<B>` as a Burn backend;
//! - [`pack`](mod@pack): one tensor; [`pack_linears`], [`packable`], [`audit`]: the linear layers of a model, on which
//!   backends, and what became of them;
//! - [`record`]: packed weights in Burn's records;
//! - [`safetensors_file`]: checkpoint files of others, read without trust and written as a stream;
//! - [`checkpoint`]: NVFP4 checkpoints in the formats of compressed-tensors and ModelOpt;
//! - [`error`]: why something could not be packed.
//!
//! GPUs are features, off by default: `vulkan` for `Nvfp4<Vulkan>`, `cuda` for `Nvfp4<Cuda>`, `cubecl` for any
//! `CubeBackend`. With one of them there is a module `cube`, which says what runs where.
#![warn(missing_docs)]

pub mod audit;
pub mod checkpoint;
#[cfg(feature = "cubecl")]
pub mod cube;
pub mod decorator;
pub mod error;
pub mod flex;
mod host_route;
mod near_paths;
pub mod nvfp4_backend;
pub mod pack;
pub mod pack_linears;
pub mod packable;
pub mod packed_weight;
pub mod precision;
pub mod record;
mod reference;
pub mod safetensors_file;
pub mod tensor;

pub use audit::{LayerAudit, Outcome, PackingAudit};
pub use decorator::Nvfp4QTensor;
pub use error::PackError;
pub use kernels_cubecl::{Activation, Compensation, Granularity, ResidualMask, Selection};
pub use nvfp4_backend::Nvfp4Backend;
pub use pack::{pack, packed_weight};
pub use pack_linears::PackLinears;
pub use packable::PackableBackend;
pub use packed_weight::{OuterScaleConvention, PackedWeight, Storage};
pub use precision::{ParsePrecisionError, Precision, Rac, WeightFormat};
pub use tensor::Nvfp4Tensor;

use core::marker::PhantomData;

/// The backend decorator: B, and packed weights.
#[derive(Clone, Default, Debug)]
pub struct Nvfp4<B>(PhantomData<B>);
