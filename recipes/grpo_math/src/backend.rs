//! The types of this build: which device it is for is a feature of the build, packed weights are on both sides.
use anyhow::Result;
use burn::backend::Autodiff;
use burn_nvfp4::Nvfp4;
use burn_quads::modules::moe::QuadsMoe;

#[cfg(feature = "cuda")]
type Device = burn::backend::Cuda;
#[cfg(all(feature = "vulkan", not(feature = "cuda")))]
type Device = burn::backend::Vulkan;
#[cfg(not(any(feature = "vulkan", feature = "cuda")))]
type Device = burn::backend::Flex;

/// What the rollout runs on.
pub type Rollout = Nvfp4<Device>;
/// What the trainer runs on.
pub type Trainer = Autodiff<Rollout>;
/// The model that learns: f32 masters.
pub type Policy = QuadsMoe<Trainer>;
/// A model that is sampled or scored; packed after a sync.
pub type Sampler = QuadsMoe<Rollout>;

/// The device of this build, as `run.device` names it.
pub const DEVICE: &str = match (cfg!(feature = "cuda"), cfg!(feature = "vulkan")) {
    (true, _) => "cuda:0",
    (false, true) => "vulkan",
    (false, false) => "cpu",
};

/// The feature to build with for a device that this build does not have.
pub fn feature_for(device: &str) -> Option<&'static str> {
    match device {
        "vulkan" => Some("vulkan"),
        "cuda:0" => Some("cuda"),
        _ => None,
    }
}

/// Looks for the device of this build.
///
/// # Errors
/// It is not there; says what to install.
pub fn find_device() -> Result<()> {
    #[cfg(feature = "cuda")]
    kernels_cubecl::device::cuda(0)?;
    #[cfg(all(feature = "vulkan", not(feature = "cuda")))]
    kernels_cubecl::device::vulkan()?;
    Ok(())
}
