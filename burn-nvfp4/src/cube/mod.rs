//! Burn's GPU backends: `CubeBackend<R, …>` on the kernels of [`kernels_cubecl::device`], and `Fusion` around it.
//!
//! Packing reads one word back, whether the weight was sound; it happens at a sync. Everything else, forward and backward,
//! enqueues kernels and waits for nothing: the counts of a grouped product stay on the device, and on `Fusion` each
//! operation is a custom one of its stream.
//!
//! | weight | activations | product |
//! |---|---|---|
//! | NVFP4 | NVFP4, with or without compensation | the packed kernels, f32 sums |
//! | any | otherwise | the rounded values of both, f32: the dense kernels |
//!
//! The dense kernels take bf16 tensor cores where a GPU has them, for values split in two, and err by some 2^-16 (Burn's own
//! matmul takes TF32 for f32 there, and errs by 2^-11). Elsewhere they are Burn's matmul, and a plain grouped kernel. Rows of
//! packed weights are padded to [`K_STEP`](kernels_cubecl::device::K_STEP) values.
//!
//! - `tensors`: Burn's tensors as the kernels' matrices, and back;
//! - `backend`: the operations;
//! - `fusion`: each as a custom operation;
//! - [`custom_op`]: how, for whoever adds operations of their own.
mod backend;
pub mod custom_op;
mod fusion;
mod tensors;

use kernels_cubecl::device::Route;
use std::sync::RwLock;

static PINNED: RwLock<Option<Route>> = RwLock::new(None);

/// Runs every packed product of this process on one kernel, whatever the number of rows; `None`, the default, lets the
/// device and the number of rows decide. A row's bits are the same in every call on the same route, so pin one where decoding
/// and scoring must agree bit for bit. The numbers that are summed are the same on every route.
///
/// A product panics on a device that lacks the route: ask [`Route::is_available`].
pub fn pin_route(route: Option<Route>) {
    *PINNED.write().expect("the lock is held for an assignment only") = route;
}

/// The route that [`pin_route`] has set.
pub fn pinned_route() -> Option<Route> {
    *PINNED.read().expect("the lock is held for an assignment only")
}
