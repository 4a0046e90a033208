//! [`Gpu`]: the platform that is a real GPU, through its driver.
//!
//! A stream is a stream; work waits for another stream only where it is told to. Memory is plain
//! allocations, which the arena above divides; uploads go through a ring of pinned memory, programs
//! come from [`Compiler`] and are loaded once.
//!
//! # Why this is sound
//!
//! Every function comes from [`driver::Driver`], resolved with the signatures of `cuda.h` from a
//! library that stays open. Handles are owned by values that destroy them once, on drop, and keep the
//! context they belong to alive; a context is made current on the thread before any call that needs
//! one. What goes to other threads is a [`Mark`]: an event that was recorded before it is shared, and a
//! hold on its context, which the driver lets every thread of the process use. A stream may wait for an
//! event of another thread's stream, as ranks of one GPU share its primary context. The event is destroyed
//! (or used again) when the last of them lets go. Nothing else here is `Send`. Addresses
//! and sizes of device memory are checked by the tensors above; the device cannot write host memory
//! but for [`Gpu::download`], which waits. What a kernel is handed is checked against what it takes,
//! where the driver tells.
#![expect(
    unsafe_code,
    reason = "calls into the driver; see the module documentation"
)]

use std::cell::{Cell, OnceCell, RefCell};
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use moefold_profiles::Dtype;
use moefold_profiles::units::Bytes;

use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use crate::cuda::compiler::Compiler;
use crate::cuda::cublaslt::{self, CublasLt};
use crate::cuda::error::DeviceError;
use crate::cuda::platform::{
    Address, Dense, Direction, Grouped, Launch, Lent, Module, Overhead, Platform, Properties,
    Stream,
};
use crate::cuda::program::{Architecture, EncodedMap, Program, Swizzle, TensorMap};
use crate::cuda::survey::memory_used;
use crate::event::Event;

use context::{Context, CudaEvent, CudaStream, Mark, Marks, Used, call};
use driver::Driver;
use kernel::Loaded;
use staging::Staging;

mod context;
mod driver;
mod kernel;
mod staging;

/// Bytes of one of the segments that uploads go through.
const SEGMENT_BYTES: usize = 1 << 20;

/// What cuBLASLt may use beside its operands: what NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// A GPU.
pub(crate) struct Gpu {
    // Dropped in this order, the context last.
    dense: OnceCell<Option<CublasLt>>,
    modules: RefCell<Vec<Loaded>>,
    /// By stream, as the two below.
    staging: RefCell<[Staging; Stream::ALL.len()]>,
    /// Where a stream was when another was last told to wait for it.
    joins: [CudaEvent; Stream::ALL.len()],
    marks: Arc<Marks>,
    streams: [CudaStream; Stream::ALL.len()],
    stream: Cell<Stream>,
    context: Arc<Context>,
    properties: Properties,
    compiler: Compiler,
    cublaslt: Option<cublaslt::Functions>,
}

/// What a GPU lends: memory of the process's one context on it, which is known by its handle.
struct LentBy {
    context: usize,
}

/// GPUs of this machine that the driver shows to this process.
pub(crate) fn count() -> Result<usize, DeviceError> {
    context::count(&Driver::open()?)
}

impl Gpu {
    /// The GPU of this number.
    pub(crate) fn open(index: usize) -> Result<Self, DeviceError> {
        let driver = Arc::new(Driver::open()?);
        let compiler = Compiler::from_environment()?;
        let cublaslt = cublaslt::Functions::find();
        Self::new(driver, compiler, cublaslt, memory_used, index)
    }

    fn new(
        driver: Arc<Driver>,
        compiler: Compiler,
        cublaslt: Option<cublaslt::Functions>,
        used: Used,
        index: usize,
    ) -> Result<Self, DeviceError> {
        let context = Context::retain(driver, used, index)?;
        let properties = context.properties()?;
        if properties.architecture < Architecture::SM80 {
            let Architecture { major, minor } = properties.architecture;
            return Err(DeviceError::new(
                "cuDeviceGetAttribute",
                format!(
                    "GPU {index} is a {} of compute capability {major}.{minor}; kernels need 8.0 \
                     (A100) or newer",
                    properties.name
                ),
            ));
        }
        let (join, stream) = (|| CudaEvent::new(&context), || CudaStream::new(&context));
        Ok(Self {
            dense: OnceCell::new(),
            modules: RefCell::default(),
            staging: RefCell::new(Stream::ALL.map(|_| Staging::new(&context, SEGMENT_BYTES))),
            joins: [join()?, join()?, join()?, join()?, join()?, join()?],
            marks: Marks::new(&context),
            streams: [
                stream()?,
                stream()?,
                stream()?,
                stream()?,
                stream()?,
                stream()?,
            ],
            stream: Cell::new(Stream::Compute),
            context,
            properties,
            compiler,
            cublaslt,
        })
    }

    /// The driver, with this GPU's context current.
    fn driver(&self) -> Result<&Driver, DeviceError> {
        self.context.enter()?;
        Ok(&self.context.driver)
    }

    /// The stream that work goes to now.
    fn stream(&self) -> &CudaStream {
        &self.streams[self.stream.get() as usize]
    }

    /// cuBLASLt, where it is found and may be used now.
    fn library(&self) -> Result<Option<&CublasLt>, DeviceError> {
        if self.stream.get() != Stream::Compute {
            // The workspace is the compute stream's.
            return Ok(None);
        }
        self.driver()?;
        if self.dense.get().is_none() {
            let library = self.open_cublaslt()?;
            self.dense.get_or_init(|| library);
        }
        Ok(self.dense.get().and_then(Option::as_ref))
    }

    /// cuBLASLt with its workspace, where it is found.
    fn open_cublaslt(&self) -> Result<Option<CublasLt>, DeviceError> {
        let Some(functions) = self.cublaslt else {
            return Ok(None);
        };
        let workspace = self.allocate(WORKSPACE_BYTES as u64)?;
        match CublasLt::new(functions, workspace, WORKSPACE_BYTES) {
            Ok(library) => {
                let bytes = WORKSPACE_BYTES as u64;
                self.context.usage(|usage| usage.workspaces += bytes);
                Ok(Some(library))
            }
            Err(error) => {
                self.free(workspace, WORKSPACE_BYTES as u64);
                Err(error)
            }
        }
    }
}

impl Platform for Gpu {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn divides(&self) -> bool {
        true
    }

    fn allocate(&self, bytes: u64) -> Result<Address, DeviceError> {
        let driver = self.driver()?;
        let mut address = 0;
        // SAFETY: a place to write to.
        let code = unsafe { (driver.cuMemAlloc_v2)(&raw mut address, bytes.max(1) as usize) };
        driver.check("cuMemAlloc_v2", code, || {
            let (free, total) = self.context.memory();
            let asked = gib(Bytes(bytes));
            if code == driver::OUT_OF_MEMORY {
                format!("asked for {asked}, {} of {} is free", gib(free), gib(total))
            } else {
                format!("asked for {asked}")
            }
        })?;
        self.context.usage(|usage| usage.allocated += bytes);
        Ok(Address(address))
    }

    fn free(&self, address: Address, bytes: u64) {
        self.context.usage(|usage| usage.allocated -= bytes);
        let Ok(driver) = self.driver() else {
            return;
        };
        // A failure of the work that is waited for comes back with the next call that can tell it.
        for stream in &self.streams {
            let _ = stream.synchronize();
        }
        // SAFETY: allocated by `allocate`, freed once, used by nothing any more.
        unsafe { (driver.cuMemFree_v2)(address.0) };
    }

    fn allocate_host(&self, bytes: u64) -> Result<Address, DeviceError> {
        let mut base = ptr::null_mut();
        // SAFETY: a place to write to.
        unsafe {
            call!(
                self.driver()?,
                cuMemHostAlloc(&raw mut base, bytes.max(1) as usize, 0),
                "{bytes} bytes of pinned host memory; `ulimit -l` may forbid them"
            )?;
        }
        Ok(Address(base as u64))
    }

    fn free_host(&self, address: Address, _bytes: u64) {
        let Ok(driver) = self.driver() else {
            return;
        };
        // As of memory of the device: work that was asked for may still use it.
        for stream in &self.streams {
            let _ = stream.synchronize();
        }
        // SAFETY: allocated by `allocate_host`, freed once, used by nothing any more.
        unsafe { (driver.cuMemFreeHost)(address.0 as *mut c_void) };
    }

    fn transfer(
        &self,
        src: Address,
        dst: Address,
        bytes: u64,
        direction: Direction,
    ) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        let (driver, stream, count) = (self.driver()?, self.stream().raw, bytes as usize);
        // SAFETY: memory of the device on one side, pinned memory of the host on the other, neither freed
        // before all streams are done.
        unsafe {
            match direction {
                Direction::ToDevice => call!(
                    driver,
                    cuMemcpyHtoDAsync_v2(dst.0, src.0 as *const c_void, count, stream),
                    "copying {bytes} bytes to the GPU"
                ),
                Direction::ToHost => call!(
                    driver,
                    cuMemcpyDtoHAsync_v2(dst.0 as *mut c_void, src.0, count, stream),
                    "copying {bytes} bytes from the GPU"
                ),
            }
        }
    }

    fn upload(&self, dst: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.driver()?;
        let staging = &mut self.staging.borrow_mut()[self.stream.get() as usize];
        staging.upload(self.stream(), dst, bytes)
    }

    fn download(&self, src: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let driver = self.driver()?;
        // SAFETY: the destination is a live slice, and is waited for.
        let queued = unsafe {
            call!(
                driver,
                cuMemcpyDtoHAsync_v2(
                    bytes.as_mut_ptr().cast(),
                    src.0,
                    bytes.len(),
                    self.stream().raw
                ),
                "copying {} bytes from the GPU",
                bytes.len()
            )
        };
        // Waited for in any case: the slice is the caller's again on return.
        let done = self.stream().synchronize();
        queued.and(done)
    }

    fn copy(&self, src: Address, dst: Address, bytes: u64) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: device memory on both sides.
        unsafe {
            call!(
                self.driver()?,
                cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes as usize, self.stream().raw),
                "copying {bytes} bytes on the GPU"
            )
        }
    }

    fn fill(&self, dst: Address, byte: u8, bytes: u64) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: device memory.
        unsafe {
            call!(
                self.driver()?,
                cuMemsetD8Async(dst.0, byte, bytes as usize, self.stream().raw),
                "setting {bytes} bytes"
            )
        }
    }

    fn forget(&self, _dst: Address, _bytes: u64) {}

    fn load(&self, program: &Program) -> Result<Module, DeviceError> {
        self.driver()?;
        let cubin = self.compiler.cubin(program, self.properties.architecture)?;
        let loaded = Loaded::new(&self.context, program, &cubin.image)?;
        let mut modules = self.modules.borrow_mut();
        modules.push(loaded);
        Ok(Module(modules.len() - 1))
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.driver()?;
        let shared = self.properties.shared_per_block;
        let mut modules = self.modules.borrow_mut();
        modules[launch.module.0].launch(launch, shared, self.stream())
    }

    fn encode(&self, map: &TensorMap) -> Result<EncodedMap, DeviceError> {
        encode(self.driver()?, map)
    }

    fn dense(&self, product: &Dense) -> Result<bool, DeviceError> {
        match self.library()? {
            Some(library) => library.dense(self.stream().raw.cast(), product),
            None => Ok(false),
        }
    }

    fn has_grouped(&self) -> bool {
        let architecture = self.properties.architecture;
        self.cublaslt
            .is_some_and(|functions| functions.has_grouped(architecture))
    }

    fn grouped(&self, product: &Grouped) -> Result<bool, DeviceError> {
        match self.library()? {
            Some(library) if self.has_grouped() => {
                library.grouped(self.stream().raw.cast(), product)
            }
            _ => Ok(false),
        }
    }

    fn switch(&self, stream: Stream) -> Stream {
        self.stream.replace(stream)
    }

    fn after(&self, stream: Stream) -> Result<(), DeviceError> {
        self.driver()?;
        let join = &self.joins[stream as usize];
        join.record(&self.streams[stream as usize])?;
        self.stream().wait(join)
    }

    fn record_event(&self) -> Result<Event, DeviceError> {
        self.driver()?;
        let mark = self.marks.record(self.stream())?;
        Ok(Event::of_machine(mark))
    }

    fn memory_info(&self) -> Result<Option<(Bytes, Bytes)>, DeviceError> {
        self.driver()?;
        Ok(Some(self.context.memory_info()?))
    }

    fn overhead(&self) -> Result<Option<Overhead>, DeviceError> {
        self.driver()?;
        let (free, total) = self.context.memory_info()?;
        let usage = self.context.usage(|usage| *usage);
        let known = usage.at_first + usage.allocated;
        Ok(Some(Overhead {
            context: Bytes(usage.at_first - usage.others.unwrap_or(0)),
            others: usage.others.map(Bytes),
            workspaces: Bytes(usage.workspaces),
            other: Bytes((total.0 - free.0).saturating_sub(known)),
        }))
    }

    fn lend(&self, _address: Address, _bytes: u64) -> Result<Lent, DeviceError> {
        Ok(Lent::new(LentBy {
            context: self.context.number(),
        }))
    }

    fn adopt(&self, lent: &Lent) -> Result<(), DeviceError> {
        let lender = lent.known::<LentBy>();
        if lender.is_some_and(|lender| lender.context == self.context.number()) {
            return Ok(());
        }
        Err(DeviceError::new(
            "accept",
            "the memory offered is of another device; ranks that share memory are threads on one GPU",
        ))
    }

    fn disown(&self, _address: Address) {}

    fn wait_for(&self, event: &Event) -> Result<(), DeviceError> {
        let Some(mark) = event.mark::<Mark>() else {
            // What the host has seen done is done.
            return Ok(());
        };
        self.driver()?;
        self.stream().wait(mark.event())
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.driver()?;
        self.streams.iter().try_for_each(CudaStream::synchronize)
    }

    fn is_idle(&self) -> Result<bool, DeviceError> {
        self.driver()?;
        for stream in &self.streams {
            if !stream.is_idle()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn raw_stream(&self) -> Result<*mut c_void, DeviceError> {
        self.driver()?;
        Ok(self.stream().raw.cast())
    }

    fn timed(&self, work: &mut dyn FnMut()) -> Result<f64, DeviceError> {
        self.driver()?;
        let (start, end) = (
            CudaEvent::timed(&self.context)?,
            CudaEvent::timed(&self.context)?,
        );
        start.record(self.stream())?;
        work();
        end.record(self.stream())?;
        end.synchronize()?;
        end.seconds_since(&start)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // What is dropped next is in use until then.
        let _ = self.synchronize();
        if let Some(Some(library)) = self.dense.take() {
            let bytes = WORKSPACE_BYTES as u64;
            self.free(library.workspace(), bytes);
            self.context.usage(|usage| usage.workspaces -= bytes);
        }
    }
}

/// The driver's form of a tensor map.
fn encode(driver: &Driver, map: &TensorMap) -> Result<EncodedMap, DeviceError> {
    const CALL: &str = "cuTensorMapEncodeTiled";
    let Some(encode_tiled) = driver.cuTensorMapEncodeTiled else {
        return Err(DeviceError::new(
            CALL,
            "the driver has no such function; install one of CUDA 12.0 or later",
        ));
    };
    let dims = map.dims.len();
    assert!(
        (1..=5).contains(&dims) && map.strides.len() + 1 == dims && map.tile.len() == dims,
        "a tensor map has as many tile sizes as dims and one stride less: {map:?}"
    );
    let dtype = match map.dtype {
        Dtype::F32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        Dtype::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Dtype::I32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_INT32,
        Dtype::Fp8 | Dtype::Fp4 => panic!("no kernel copies tiles of {}", map.dtype),
    };
    let swizzle = match map.swizzle {
        Swizzle::None => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::B32 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::B64 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::B128 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let mut encoded = CUtensorMap { opaque: [0; 16] };
    let every_element = [1_u32; 5];
    // SAFETY: arrays of `dims` entries (one less for strides), which the driver reads during the
    // call; the address is only stored.
    let code = unsafe {
        encode_tiled(
            &raw mut encoded,
            dtype as c_uint,
            dims as c_uint,
            map.address.0 as *mut _,
            map.dims.as_ptr(),
            map.strides.as_ptr(),
            map.tile.as_ptr(),
            every_element.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as c_uint,
            swizzle as c_uint,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as c_uint,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as c_uint,
        )
    };
    driver.check(CALL, code, || format!("{map:?}"))?;
    Ok(EncodedMap(encoded.opaque))
}

fn gib(bytes: Bytes) -> String {
    format!("{:.2} GiB", bytes.0 as f64 / f64::from(1 << 30))
}

#[cfg(test)]
pub(crate) mod tests;
