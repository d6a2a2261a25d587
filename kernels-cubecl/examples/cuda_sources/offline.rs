//! A CubeCL runtime without a device: a launch compiles the kernel to CUDA C++ for a chosen architecture and keeps the
//! source. Host code that is generic over the runtime runs on it unchanged; what it reads back are zeros.
//!
//! Properties and compiler options are those that `cubecl-cuda` gives a device of the architecture.
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{Device, DeviceId, DeviceService};
use cubecl_common::future::DynFut;
use cubecl_common::profile::{ProfileDuration, TimingMethod};
use cubecl_common::stream_id::StreamId;
use cubecl_core::ir::features::{Plane, Tma, TypeUsage};
use cubecl_core::ir::*;
use cubecl_core::zspace::{Shape, Strides};
use cubecl_cpp::DialectWmmaCompiler;
use cubecl_cpp::cuda::CudaDialect;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::{CudaWmmaCompiler, contiguous_elements_cuda};
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features, register_scaled_mma_features,
    register_wmma_features,
};
use cubecl_runtime::allocator::ContiguousMemoryLayoutPolicy;
use cubecl_runtime::client::ComputeClient;
use cubecl_runtime::compiler::CubeTask;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, MemoryConfiguration, MemoryManagement, MemoryManagementOptions,
    MemoryUsage,
};
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::*;
use cubecl_runtime::storage::{BytesResource, BytesStorage, ManagedResource};
use cubecl_runtime::timestamp_profiler::TimestampProfiler;
use std::sync::{Arc, Mutex};

type Compiler = CppCompiler<CudaDialect<CudaWmmaCompiler>>;

/// A compiled kernel.
#[derive(Clone, Debug)]
pub struct Source {
    pub name: String,
    pub arch: u32,
    pub source: String,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// Every kernel launched so far.
pub static SOURCES: Mutex<Vec<Source>> = Mutex::new(Vec::new());

/// A device of this architecture: 90, 100, 120.
#[derive(Clone, Debug, Hash, PartialEq, Eq, Default)]
pub struct Architecture(pub u32);

impl Device for Architecture {
    fn from_id(id: DeviceId) -> Self {
        Self(u32::from(id.index_id))
    }

    fn to_id(&self) -> DeviceId {
        DeviceId {
            type_id: 0,
            index_id: self.0 as u16,
        }
    }
}

#[derive(Debug)]
pub struct Server {
    arch: u32,
    options: CompilationOptions,
    memory: MemoryManagement<BytesStorage>,
    profiler: TimestampProfiler,
    utilities: Arc<ServerUtilities<Self>>,
}

impl ServerCommunication for Server {
    const SERVER_COMM_ENABLED: bool = false;
}

fn properties(arch: u32, memory: MemoryDeviceProperties) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: if arch / 10 == 12 { 101_376 } else { 227 * 1024 },
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        max_vector_size: VectorSize::MAX,
    };
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);
    register_supported_types(&mut properties);
    properties.features.plane.insert(Plane::Sync);
    properties.features.plane.insert(Plane::Ops);
    properties.features.plane.insert(Plane::NonUniformControlFlow);
    properties.features.copy_async = true;
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    for kind in [FloatKind::F16, FloatKind::BF16] {
        properties.features.matmul.ldmatrix.insert(ElemType::Float(kind).into());
        properties.features.matmul.stmatrix.insert(ElemType::Float(kind).into());
    }
    for kind in [FloatKind::E4M3, FloatKind::E5M2] {
        properties.register_type_usage(ElemType::Float(kind), TypeUsage::Conversion | TypeUsage::Buffer);
    }
    properties.features.tma.insert(Tma::Base);
    properties.register_semantic_type(SemanticType::TensorMap);
    properties.features.cube_cluster = true;
    if arch >= 100 {
        let packed = StorageType::Packed(ElemType::Float(FloatKind::E2M1), 2);
        properties.register_type_usage(packed, TypeUsage::Conversion | TypeUsage::Buffer);
    }
    let version = CudaArchitecture { version: arch };
    register_wmma_features(CudaWmmaCompiler::supported_wmma_combinations(&version), &mut properties);
    register_mma_features(CudaWmmaCompiler::supported_mma_combinations(&version), &mut properties);
    register_scaled_mma_features(
        CudaWmmaCompiler::supported_scaled_mma_combinations(&version),
        &mut properties,
    );
    properties
}

impl DeviceService for Server {
    fn init(id: DeviceId) -> Self {
        let arch = u32::from(id.index_id);
        let memory_properties = MemoryDeviceProperties {
            max_page_size: 1 << 34,
            alignment: 512,
        };
        let memory = MemoryManagement::from_configuration(
            BytesStorage::default(),
            &memory_properties,
            MemoryConfiguration::default(),
            Arc::new(ServerLogger::default()),
            MemoryManagementOptions::new("offline"),
        );
        let options = CompilationOptions {
            warp_size: 32,
            supports_features: CppSupportedFeatures {
                fast_math: true,
                grid_constants: true,
                clusters: true,
                elect_sync: true,
                fast_tanh: true,
            },
        };
        let utilities = ServerUtilities::new(
            properties(arch, memory_properties),
            Arc::new(ServerLogger::default()),
            (),
            ContiguousMemoryLayoutPolicy::new(512),
        );
        Self {
            arch,
            options,
            memory,
            profiler: TimestampProfiler::default(),
            utilities: Arc::new(utilities),
        }
    }

    fn utilities(&self) -> Arc<dyn std::any::Any + Send + Sync> {
        self.utilities.clone()
    }
}

impl ComputeServer for Server {
    type Kernel = Box<dyn CubeTask<Compiler>>;
    type Storage = BytesStorage;
    type MemoryLayoutPolicy = ContiguousMemoryLayoutPolicy;
    type Info = ();

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, _: StreamId) {
        let reserved = self.memory.reserve(size).unwrap();
        self.memory.bind(reserved, memory, 0).unwrap();
    }

    fn read(&mut self, what: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let zeros = |c: CopyDescriptor| Bytes::from_bytes_vec(vec![0; c.handle.size_in_used() as usize]);
        let all = what.into_iter().map(zeros).collect();
        Box::pin(async move { Ok(all) })
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn get_resource(&mut self, b: Binding, _: StreamId) -> Result<ManagedResource<BytesResource>, ServerError> {
        let resource = self
            .memory
            .get_resource(b.memory.clone(), b.offset_start, b.offset_end)?;
        Ok(ManagedResource::new(b.memory, resource))
    }

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        _: CubeCount,
        _: KernelArguments,
        mode: ExecutionMode,
        _: StreamId,
    ) {
        let address = kernel.address_type();
        let kernel = kernel
            .compile(&mut Default::default(), &self.options, mode, address)
            .unwrap_or_else(|e| panic!("sm_{}: {e:?}", self.arch));
        SOURCES.lock().unwrap().push(Source {
            name: kernel.entrypoint_name,
            arch: self.arch,
            shared: kernel.repr.as_ref().map_or(0, |r| r.shared_memory_size()),
            source: kernel.source,
        });
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_usage(&mut self, _: StreamId) -> Result<MemoryUsage, ServerError> {
        Ok(self.memory.memory_usage())
    }

    fn memory_cleanup(&mut self, _: StreamId) {}

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Ok(self.profiler.start())
    }

    fn end_profile(&mut self, _: StreamId, token: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        self.profiler.stop(token)
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, _: StreamId) {
        self.memory.mode(mode);
    }
}

/// The runtime.
#[derive(Debug, Clone)]
pub struct OfflineCuda;

impl Runtime for OfflineCuda {
    type Compiler = Compiler;
    type Server = Server;
    type Device = Architecture;

    fn client(device: &Architecture) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_: &ComputeClient<Self>) -> &'static str {
        "offline-cuda"
    }

    fn require_array_lengths() -> bool {
        true
    }

    fn max_cube_count() -> (u32, u32, u32) {
        (i32::MAX as u32, 65535, 65535)
    }

    fn can_read_tensor(_: &Shape, _: &Strides) -> bool {
        true
    }

    fn target_properties() -> TargetProperties {
        TargetProperties {
            mma: MmaProperties {
                register_size_bits: 32,
                const_plane_size: 32,
                register_layout_a: MatrixLayout::RowMajor,
                register_layout_b: MatrixLayout::ColMajor,
                register_layout_acc: MatrixLayout::RowMajor,
                register_duplication_a: 1,
                register_duplication_b: 1,
                register_duplication_acc: 1,
                contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
            },
        }
    }

    fn enumerate_devices(_: u16, _: &()) -> Vec<DeviceId> {
        Vec::new()
    }
}
