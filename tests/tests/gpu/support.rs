//! What the tests share.
use burn::{
    backend::Flex,
    tensor::{Int, Tensor, TensorData, TensorPrimitive, backend::Backend},
};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use burn_fusion::{Fusion, FusionBackend, get_client};
use burn_nvfp4::{
    Activation, Compensation, Granularity, Nvfp4, Nvfp4Backend, Nvfp4Tensor, PackedWeight, ResidualMask, WeightFormat,
};
use burn_quads::layer_backend::LayerBackend;
use std::{
    any::TypeId,
    sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

#[cfg(feature = "vulkan")]
pub type PlainVulkan = CubeBackend<burn::backend::wgpu::WgpuRuntime, f32, i32, u8>;
#[cfg(feature = "cuda")]
pub type PlainCuda = CubeBackend<burn_cubecl::cubecl::cuda::CudaRuntime, f32, i32, u8>;

static DEVICE: RwLock<()> = RwLock::new(());

/// Tests share the device, except those of `blocking`, which hold it.
pub fn turn(
    module: &str,
) -> (
    Option<RwLockReadGuard<'static, ()>>,
    Option<RwLockWriteGuard<'static, ()>>,
) {
    match module {
        "blocking" => (None, Some(DEVICE.write().unwrap_or_else(PoisonError::into_inner))),
        _ => (Some(DEVICE.read().unwrap_or_else(PoisonError::into_inner)), None),
    }
}

/// A backend under test.
pub trait Stack: Nvfp4Backend + LayerBackend {
    /// Whether there is a device; says so loudly where there is none.
    fn is_available() -> bool;
    /// Runs `task` on the thread that serves the device, and waits for it: meanwhile nothing is computed or read.
    fn occupy_device(task: impl FnOnce() + Send);
    /// Hands what was asked for to the device's queue, without waiting for the device.
    fn enqueue_all();
}

impl<R: CubeRuntime, F: FloatElement, I: IntElement, BT: BoolElement> Stack for CubeBackend<R, F, I, BT> {
    fn is_available() -> bool {
        static FOUND: Mutex<Vec<(TypeId, bool)>> = Mutex::new(Vec::new());
        let mut known = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = known.iter().find(|(runtime, _)| *runtime == TypeId::of::<R>()) {
            return *found;
        }
        let name = std::any::type_name::<R>();
        let found = match name {
            #[cfg(feature = "vulkan")]
            name if name.contains("Wgpu") => kernels_cubecl::device::vulkan().map(drop),
            #[cfg(feature = "cuda")]
            name if name.contains("Cuda") => kernels_cubecl::device::cuda(0).map(drop),
            name => panic!("tests of {name}"),
        };
        let found = match found {
            Ok(()) => true,
            Err(error) if std::env::var("QUADS_REQUIRE_DEVICE").is_ok_and(|v| v == "1") => panic!("{error}"),
            Err(error) => {
                eprintln!("SKIPPED, NOTHING WAS TESTED: {error}");
                false
            }
        };
        known.push((TypeId::of::<R>(), found));
        found
    }
    fn occupy_device(task: impl FnOnce() + Send) {
        R::client(&Default::default()).exclusive(task).unwrap();
    }
    fn enqueue_all() {}
}

impl<B: FusionBackend + Stack> Stack for Fusion<B> {
    fn is_available() -> bool {
        B::is_available()
    }
    fn occupy_device(task: impl FnOnce() + Send) {
        B::occupy_device(task);
    }
    fn enqueue_all() {
        get_client::<B>(&Default::default()).sync(|| ());
    }
}

/// Reproducible values of about unit size.
pub fn noise(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..count).map(|_| uniform() + uniform() + uniform()).collect()
}

/// Activations: some channels are large.
pub fn activations(seed: u32, [rows, k]: [usize; 2]) -> TensorData {
    let mut values = noise(seed, rows * k);
    for (i, value) in values.iter_mut().enumerate() {
        if (i % k) % 13 == 5 {
            *value *= 30.0;
        }
    }
    TensorData::new(values, [rows, k])
}

pub fn data<const D: usize>(seed: u32, shape: [usize; D]) -> TensorData {
    TensorData::new(noise(seed, shape.iter().product()), shape)
}

pub fn tensor<B: Backend, const D: usize>(data: &TensorData) -> Tensor<B, D> {
    Tensor::from_data(data.clone(), &Default::default())
}

/// The primitive of the backend below `Nvfp4`.
pub fn float<B: Backend>(data: &TensorData) -> FloatTensor<B> {
    B::float_from_data(data.clone(), &Default::default())
}

pub fn counts<B: Backend>(counts: &[i32]) -> IntTensor<B> {
    Tensor::<B, 1, Int>::from_ints(counts, &Default::default()).into_primitive()
}

pub fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().unwrap()
}

/// The values of a primitive.
pub fn read<B: Nvfp4Backend>(tensor: &FloatTensor<B>) -> Vec<f32> {
    B::with_floats(tensor, <[f32]>::to_vec)
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// A packed weight as a tensor that operations take.
pub fn lazy<B: Nvfp4Backend, const D: usize>(weight: PackedWeight<B>) -> Tensor<Nvfp4<B>, D> {
    Tensor::from_primitive(TensorPrimitive::Float(Nvfp4Tensor::Packed(weight)))
}

pub fn mask(k: usize) -> ResidualMask {
    ResidualMask::from_channels(&(0..k).map(|c| c % 3 == 0 && c >= 16).collect::<Vec<_>>())
}

/// Every way for activations to enter a product with a weight of a format.
pub fn settings(k: usize) -> Vec<(WeightFormat, Activation)> {
    let per_token = |granularity, fraction| Activation::Compensated(Compensation::PerToken { granularity, fraction });
    vec![
        (WeightFormat::Nvfp4, Activation::Full),
        (WeightFormat::Nvfp4, Activation::Nvfp4),
        (WeightFormat::Nvfp4, Activation::Compensated(Compensation::All)),
        (
            WeightFormat::Nvfp4,
            Activation::Compensated(Compensation::Mask(mask(k))),
        ),
        (WeightFormat::Nvfp4, per_token(Granularity::Channel, 0.5)),
        (WeightFormat::Nvfp4, per_token(Granularity::Block16, 0.25)),
        (WeightFormat::Nvfp4, per_token(Granularity::Block64, 0.5)),
        (WeightFormat::Fp8, Activation::Fp8),
        (WeightFormat::Fp8, Activation::Full),
    ]
}

/// What a product may be off by, of `Σ|x̂·ŵ|`: the order of its sum; where nothing is packed, bf16 tensor cores take f32 values in
/// two parts.
pub fn tolerance<B: Stack>(activation: &Activation, k: usize) -> f64 {
    let in_packed_kernels = matches!(activation, Activation::Nvfp4 | Activation::Compensated(_));
    let split = match in_packed_kernels || !splits_f32::<B>() {
        true => 0.0,
        false => 3.0 * 2f64.powi(-16),
    };
    split + (k as f64 + 8.0) * 2f64.powi(-23)
}

/// Whether dense products take bf16 tensor cores.
pub fn splits_f32<B>() -> bool {
    std::any::type_name::<B>().contains("Cuda")
}

/// Compares `y [tokens, n]` with the exact product of `x [tokens, k]` and `w [k, n]`, within `tolerance · Σ|x̂·ŵ|`.
pub fn assert_product(y: &[f32], x: &[f32], w: &[f32], [tokens, k, n]: [usize; 3], tolerance: f64, what: &str) {
    assert_eq!(y.len(), tokens * n, "{what}");
    for t in 0..tokens {
        for c in 0..n {
            let products = (0..k).map(|i| f64::from(x[t * k + i]) * f64::from(w[i * n + c]));
            let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
            let error = (f64::from(y[t * n + c]) - sum).abs();
            let bound = tolerance * size;
            assert!(error <= bound, "{what} [{t}, {c}]: error {error:e}, bound {bound:e}");
        }
    }
}

pub fn assert_close(actual: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let size = expected.iter().fold(1e-3f32, |size, v| size.max(v.abs()));
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!(
            (a - e).abs() <= tolerance * size,
            "{what} [{i}]: {a} where Flex has {e}, of values up to {size}"
        );
    }
}

/// A weight of Flex, packed.
pub fn on_flex(data: &TensorData, format: WeightFormat, activation: &Activation) -> PackedWeight<Flex> {
    let packed = Flex::pack_weight(float::<Flex>(data), format, None).unwrap();
    packed.with_activation(activation.clone()).unwrap()
}

/// A weight of B, packed.
pub fn on<B: Stack>(data: &TensorData, format: WeightFormat, activation: &Activation) -> PackedWeight<B> {
    let packed = B::pack_weight(float::<B>(data), format, None).unwrap();
    packed.with_activation(activation.clone()).unwrap()
}
