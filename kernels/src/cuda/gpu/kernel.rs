//! Loaded programs, and launching their kernels.
#![expect(
    unsafe_code,
    reason = "calls into the driver; see the documentation of `gpu`"
)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};
use moefold_profiles::units::Bytes;

use super::context::{Context, CudaStream, call};
use super::driver::{Driver, INVALID_VALUE};
use crate::cuda::error::DeviceError;
use crate::cuda::platform::Launch;
use crate::cuda::program::{Arg, Program};

/// Dynamic shared memory that a kernel may use without asking: 48 KiB on every architecture.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

/// A program on the device.
pub(super) struct Loaded {
    context: Arc<Context>,
    raw: CUmodule,
    program: String,
    kernels: HashMap<&'static str, Kernel>,
}

/// One of its kernels.
struct Kernel {
    raw: CUfunction,
    /// Threads of a block, at most.
    threads: u32,
    /// Bytes of each parameter, where the driver tells.
    parameters: Option<Vec<usize>>,
    /// Dynamic shared memory that it was allowed.
    shared: u32,
}

impl Loaded {
    pub(super) fn new(
        context: &Arc<Context>,
        program: &Program,
        image: &[u8],
    ) -> Result<Self, DeviceError> {
        let mut raw = ptr::null_mut();
        // SAFETY: a cubin, whose headers say how long it is; the driver copies it.
        unsafe {
            call!(
                &context.driver,
                cuModuleLoadData(&raw mut raw, image.as_ptr().cast()),
                "loading {program}: code made by an NVRTC of a newer major version of CUDA needs a \
                 newer driver"
            )?;
        }
        Ok(Self {
            context: Arc::clone(context),
            raw,
            program: program.to_string(),
            kernels: HashMap::new(),
        })
    }

    /// Streams a kernel, having checked what can be checked. `shared` is what a block may have.
    pub(super) fn launch(
        &mut self,
        launch: &Launch<'_>,
        shared: Bytes,
        stream: &CudaStream,
    ) -> Result<(), DeviceError> {
        let driver = &self.context.driver;
        let kernel = match self.kernels.entry(launch.entry) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let kernel = Kernel::new(driver, self.raw, launch.entry, &self.program)?;
                new.insert(kernel)
            }
        };
        let grid = launch.grid;
        let describe = || format!("{} of {}, {grid:?}", launch.entry, self.program);
        if grid.threads > kernel.threads {
            let limit = kernel.threads;
            return Err(DeviceError::new(
                "cuLaunchKernel",
                format!("{}: the kernel takes {limit} threads a block", describe()),
            ));
        }
        if u64::from(grid.shared) > shared.0 {
            let limit = shared.0;
            return Err(DeviceError::new(
                "cuLaunchKernel",
                format!("{}: a block has {limit} bytes of shared memory", describe()),
            ));
        }
        kernel.check_parameters(launch.args, describe)?;
        kernel.allow_shared(driver, grid.shared, describe)?;
        let mut arguments = launch.args.iter().map(place).collect::<Vec<_>>();
        let [x, y, z] = grid.blocks;
        // SAFETY: the function is loaded; one pointer a parameter, each to a value that lives until
        // after the call, which copies it.
        unsafe {
            call!(
                driver,
                cuLaunchKernel(
                    kernel.raw,
                    x,
                    y,
                    z,
                    grid.threads,
                    1,
                    1,
                    grid.shared,
                    stream.raw,
                    arguments.as_mut_ptr(),
                    ptr::null_mut(),
                ),
                "{}",
                describe()
            )
        }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded here alone; `Gpu` waits for its stream before.
        unsafe { (self.context.driver.cuModuleUnload)(self.raw) };
    }
}

impl Kernel {
    fn new(
        driver: &Driver,
        module: CUmodule,
        entry: &'static str,
        program: &str,
    ) -> Result<Self, DeviceError> {
        let name = CString::new(entry).expect("a kernel's name holds no zero byte");
        let limit = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK as c_uint;
        let (mut raw, mut threads) = (ptr::null_mut(), 0);
        // SAFETY: the module is loaded; places to write to.
        unsafe {
            call!(
                driver,
                cuModuleGetFunction(&raw mut raw, module, name.as_ptr()),
                "{entry} of {program}"
            )?;
            call!(
                driver,
                cuFuncGetAttribute(&raw mut threads, limit, raw),
                "{entry} of {program}"
            )?;
        }
        Ok(Self {
            raw,
            threads: threads.unsigned_abs(),
            parameters: parameters(driver, raw),
            shared: SHARED_WITHOUT_ASKING,
        })
    }

    /// A kernel handed less than it takes would read past the arguments.
    fn check_parameters(
        &self,
        args: &[Arg],
        describe: impl Fn() -> String,
    ) -> Result<(), DeviceError> {
        let Some(parameters) = &self.parameters else {
            return Ok(());
        };
        if args.iter().map(size).eq(parameters.iter().copied()) {
            return Ok(());
        }
        let given = args.iter().map(size).collect::<Vec<_>>();
        Err(DeviceError::new(
            "cuLaunchKernel",
            format!(
                "{}: the kernel takes parameters of {parameters:?} bytes, and was handed {given:?}",
                describe()
            ),
        ))
    }

    fn allow_shared(
        &mut self,
        driver: &Driver,
        shared: u32,
        describe: impl Fn() -> String,
    ) -> Result<(), DeviceError> {
        if shared <= self.shared {
            return Ok(());
        }
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe {
            call!(
                driver,
                cuFuncSetAttribute(self.raw, attribute as c_uint, shared as c_int),
                "{}",
                describe()
            )?;
        }
        self.shared = shared;
        Ok(())
    }
}

/// Bytes of each of a kernel's parameters; drivers before CUDA 12.4 do not tell.
fn parameters(driver: &Driver, function: CUfunction) -> Option<Vec<usize>> {
    let get = driver.cuFuncGetParamInfo?;
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded; places to write to.
        match unsafe { get(function, sizes.len(), &raw mut offset, &raw mut size) } {
            0 => sizes.push(size),
            // The number after the last.
            INVALID_VALUE => return Some(sizes),
            _ => return None,
        }
    }
}

/// Where an argument's value is.
fn place(arg: &Arg) -> *mut c_void {
    let place: *const c_void = match arg {
        Arg::Address(value) => ptr::from_ref(&value.0).cast(),
        Arg::I32(value) => ptr::from_ref(value).cast(),
        Arg::U64(value) => ptr::from_ref(value).cast(),
        Arg::F32(value) => ptr::from_ref(value).cast(),
        Arg::Map(value) => ptr::from_ref(&value.0).cast(),
    };
    // The driver's interface has no pointers to const; it only reads.
    place.cast_mut()
}

fn size(arg: &Arg) -> usize {
    match arg {
        Arg::I32(_) | Arg::F32(_) => 4,
        Arg::Address(_) | Arg::U64(_) => 8,
        Arg::Map(_) => 128,
    }
}
