//! The backend itself: types, device and seed.
use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData};

use crate::{Nvfp4, Nvfp4Backend, Nvfp4QTensor, Nvfp4Tensor};

impl<B: Nvfp4Backend> BackendTypes for Nvfp4<B> {
    type Device = B::Device;
    type FloatTensorPrimitive = Nvfp4Tensor<B>;
    type FloatElem = B::FloatElem;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;
    type QuantizedTensorPrimitive = Nvfp4QTensor<B>;
}

impl<B: Nvfp4Backend> Backend for Nvfp4<B> {
    fn ad_enabled(device: &Self::Device) -> bool {
        B::ad_enabled(device)
    }
    fn memory_persistent_allocations<Output: Send, Input: Send, Func: Fn(Input) -> Output + Send>(
        device: &Self::Device,
        input: Input,
        func: Func,
    ) -> Output {
        B::memory_persistent_allocations(device, input, func)
    }
    fn memory_cleanup(device: &Self::Device) {
        B::memory_cleanup(device)
    }
    fn name(device: &Self::Device) -> String {
        format!("nvfp4<{}>", B::name(device))
    }
    fn seed(device: &Self::Device, seed: u64) {
        B::seed(device, seed)
    }
    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        B::sync(device)
    }
    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device)
    }
    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        B::supports_dtype(device, dtype)
    }
    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }
    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}
