//! Clients on the devices at hand, with an error that says what is missing instead of a panic.
use super::Error;
#[cfg(feature = "cuda")]
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::*;
#[cfg(feature = "vulkan")]
use cubecl::wgpu::{GraphicsApi, Vulkan, WgpuDevice, WgpuRuntime};
use std::sync::{Mutex, PoisonError};

/// A client on the first Vulkan device: a discrete GPU before an integrated one before a software device.
///
/// # Errors
/// There is no Vulkan device.
#[cfg(feature = "vulkan")]
pub fn vulkan() -> Result<ComputeClient<WgpuRuntime>, Error> {
    let find = || {
        let kinds = [
            WgpuDevice::DiscreteGpu(0),
            WgpuDevice::IntegratedGpu(0),
            WgpuDevice::VirtualGpu(0),
            WgpuDevice::Cpu,
        ];
        let exists = |kind: &u16| !WgpuRuntime::enumerate_devices(*kind, &Vulkan::backend()).is_empty();
        (0..4u16)
            .find(exists)
            .map(|kind| WgpuRuntime::client(&kinds[usize::from(kind)]))
    };
    quietly(find).flatten().ok_or_else(|| Error::Unsupported {
        what: "Vulkan".into(),
        why: "no adapter was found; install a Vulkan driver (Debian: mesa-vulkan-drivers)".into(),
    })
}

/// A client on a CUDA device.
///
/// # Errors
/// There is no such device, or no driver.
#[cfg(feature = "cuda")]
pub fn cuda(index: usize) -> Result<ComputeClient<CudaRuntime>, Error> {
    let open = || {
        let count = CudaRuntime::enumerate_devices(0, &()).len();
        (index < count).then(|| CudaRuntime::client(&CudaDevice::new(index)))
    };
    quietly(open).flatten().ok_or_else(|| Error::Unsupported {
        what: format!("CUDA device {index}"),
        why: "no such GPU was found; install NVIDIA's driver and the CUDA toolkit, and set CUDA_PATH to the latter"
            .into(),
    })
}

/// Runs what panics where a driver is missing; none if it did.
fn quietly<T>(f: impl FnOnce() -> T) -> Option<T> {
    // The hook is the process's: one caller at a time, or the silent one stays.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).ok();
    std::panic::set_hook(hook);
    result
}
