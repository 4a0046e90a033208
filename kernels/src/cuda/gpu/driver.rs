//! The functions of the driver that are called, and how their failures read.
//!
//! The table is the only way into the driver: it is filled from a library that was found to be one,
//! and a required function that is missing is an error there, not a crash later.
#![expect(
    unsafe_code,
    reason = "the driver's functions as pointers; see the documentation of `gpu`"
)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUresult, CUstream,
    CUtensorMap,
};

use crate::cuda::error::DeviceError;
use crate::cuda::libraries::{Library, gate};
use crate::cuda::table::table;

/// Results are numbers: see [`crate::cuda::table`].
pub(super) type Code = c_uint;

const SUCCESS: Code = CUresult::CUDA_SUCCESS as Code;
pub(super) const OUT_OF_MEMORY: Code = CUresult::CUDA_ERROR_OUT_OF_MEMORY as Code;
pub(super) const NOT_READY: Code = CUresult::CUDA_ERROR_NOT_READY as Code;
pub(super) const INVALID_VALUE: Code = CUresult::CUDA_ERROR_INVALID_VALUE as Code;

table! {
    /// What is called of the driver. Names are those of the library: `_v2` where the header of
    /// `cuda.h` renames a function to it.
    Driver {
        cuInit: fn(c_uint) -> Code;
        cuDeviceGetCount: fn(*mut c_int) -> Code;
        cuDeviceGet: fn(*mut CUdevice, c_int) -> Code;
        cuDeviceGetName: fn(*mut c_char, c_int, CUdevice) -> Code;
        cuDeviceTotalMem_v2: fn(*mut usize, CUdevice) -> Code;
        cuDeviceGetAttribute: fn(*mut c_int, c_uint, CUdevice) -> Code;
        cuDevicePrimaryCtxRetain: fn(*mut CUcontext, CUdevice) -> Code;
        cuDevicePrimaryCtxRelease_v2: fn(CUdevice) -> Code;
        cuCtxSetCurrent: fn(CUcontext) -> Code;
        cuMemGetInfo_v2: fn(*mut usize, *mut usize) -> Code;
        cuMemAlloc_v2: fn(*mut CUdeviceptr, usize) -> Code;
        cuMemFree_v2: fn(CUdeviceptr) -> Code;
        cuMemHostAlloc: fn(*mut *mut c_void, usize, c_uint) -> Code;
        cuMemFreeHost: fn(*mut c_void) -> Code;
        cuMemcpyHtoDAsync_v2: fn(CUdeviceptr, *const c_void, usize, CUstream) -> Code;
        cuMemcpyDtoHAsync_v2: fn(*mut c_void, CUdeviceptr, usize, CUstream) -> Code;
        cuMemcpyDtoDAsync_v2: fn(CUdeviceptr, CUdeviceptr, usize, CUstream) -> Code;
        cuMemsetD8Async: fn(CUdeviceptr, u8, usize, CUstream) -> Code;
        cuStreamCreate: fn(*mut CUstream, c_uint) -> Code;
        cuStreamDestroy_v2: fn(CUstream) -> Code;
        cuStreamSynchronize: fn(CUstream) -> Code;
        cuStreamQuery: fn(CUstream) -> Code;
        cuStreamWaitEvent: fn(CUstream, CUevent, c_uint) -> Code;
        cuEventCreate: fn(*mut CUevent, c_uint) -> Code;
        cuEventDestroy_v2: fn(CUevent) -> Code;
        cuEventRecord: fn(CUevent, CUstream) -> Code;
        cuEventSynchronize: fn(CUevent) -> Code;
        cuEventQuery: fn(CUevent) -> Code;
        cuEventElapsedTime: fn(*mut f32, CUevent, CUevent) -> Code;
        cuModuleLoadData: fn(*mut CUmodule, *const c_void) -> Code;
        cuModuleUnload: fn(CUmodule) -> Code;
        cuModuleGetFunction: fn(*mut CUfunction, CUmodule, *const c_char) -> Code;
        cuFuncGetAttribute: fn(*mut c_int, c_uint, CUfunction) -> Code;
        cuFuncSetAttribute: fn(CUfunction, c_uint, c_int) -> Code;
        cuLaunchKernel: fn(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
            c_uint, CUstream, *mut *mut c_void, *mut *mut c_void,
        ) -> Code;
    }
    optional {
        cuDeviceGetPCIBusId: fn(*mut c_char, c_int, CUdevice) -> Code;
        cuFuncGetParamInfo: fn(CUfunction, usize, *mut usize, *mut usize) -> Code;
        cuGetErrorName: fn(Code, *mut *const c_char) -> Code;
        cuTensorMapEncodeTiled: fn(
            *mut CUtensorMap, c_uint, c_uint, *mut c_void, *const u64, *const u64,
            *const u32, *const u32, c_uint, c_uint, c_uint, c_uint,
        ) -> Code;
    }
}

impl Driver {
    /// The driver of this machine, initialized.
    pub(super) fn open() -> Result<Self, DeviceError> {
        let token = gate::Driver::get().map_err(|no_gpu| {
            let mut error = DeviceError::new("cuInit", format!("{no_gpu}; {}", no_gpu.remedy()));
            if let gate::NoGpu::Init { code } = no_gpu {
                error.code = Some((i64::from(code), name_of(code.unsigned_abs())));
            }
            error
        })?;
        let found = token.library();
        // SAFETY: the library is the driver and stays open.
        unsafe { Self::new(|symbol| found.symbol(symbol)) }
    }

    /// The driver in which `find` looks functions up, initialized.
    ///
    /// # Safety
    /// The library is the driver and stays open.
    pub(super) unsafe fn new(
        find: impl Fn(&str) -> Option<*const c_void>,
    ) -> Result<Self, DeviceError> {
        // SAFETY: the signatures are the driver's, the rest is the caller's.
        let driver = unsafe { Self::resolve(find) }.map_err(|symbol| {
            DeviceError::new(
                "dlsym",
                format!(
                    "the driver found has no {symbol}; {}",
                    Library::Driver.remedy(None)
                ),
            )
        })?;
        // SAFETY: takes no pointer.
        let code = unsafe { (driver.cuInit)(0) };
        driver.check("cuInit", code, || "starting the driver".to_owned())?;
        Ok(driver)
    }

    /// An error where `code` is one. `doing` says what was being done.
    pub(super) fn check(
        &self,
        call: &'static str,
        code: Code,
        doing: impl FnOnce() -> String,
    ) -> Result<(), DeviceError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut error = DeviceError::new(call, doing());
        error.code = Some((i64::from(code), self.name(code)));
        if is_sticky(code) {
            error.detail.push_str(
                "; a kernel that ran before failed, and this process can do no more on the GPU. \
                 CUDA_LAUNCH_BLOCKING=1 makes the launch itself fail",
            );
        }
        Err(error)
    }

    /// The name of a code, by the driver where it knows more than this table.
    fn name(&self, code: Code) -> String {
        if let Some(name) = known_name(code) {
            return name;
        }
        let unknown = || name_of(code);
        let Some(get) = self.cuGetErrorName else {
            return unknown();
        };
        let mut name = ptr::null();
        // SAFETY: a pointer to write to; what is written is a constant of the driver.
        unsafe {
            if get(code, &raw mut name) != SUCCESS || name.is_null() {
                return unknown();
            }
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }
}

/// Whether a context answers every later call with this code too.
fn is_sticky(code: Code) -> bool {
    STICKY.iter().any(|&sticky| sticky as Code == code)
}

/// Failures of a kernel, after which its context is of no use.
const STICKY: [CUresult; 12] = [
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUresult::CUDA_ERROR_CONTAINED,
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
];

/// Codes besides those that a training run may meet.
const KNOWN: [CUresult; 22] = [
    CUresult::CUDA_ERROR_INVALID_VALUE,
    CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    CUresult::CUDA_ERROR_NOT_INITIALIZED,
    CUresult::CUDA_ERROR_DEINITIALIZED,
    CUresult::CUDA_ERROR_STUB_LIBRARY,
    CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUresult::CUDA_ERROR_NO_DEVICE,
    CUresult::CUDA_ERROR_INVALID_DEVICE,
    CUresult::CUDA_ERROR_INVALID_IMAGE,
    CUresult::CUDA_ERROR_INVALID_CONTEXT,
    CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    CUresult::CUDA_ERROR_OPERATING_SYSTEM,
    CUresult::CUDA_ERROR_INVALID_HANDLE,
    CUresult::CUDA_ERROR_NOT_FOUND,
    CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUresult::CUDA_ERROR_NOT_SUPPORTED,
    CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
    CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
    CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
    CUresult::CUDA_ERROR_UNKNOWN,
];

/// The name of a code in the tables above. The bindings' own way of printing one calls the driver.
fn known_name(code: Code) -> Option<String> {
    let mut known = STICKY.iter().chain(&KNOWN);
    known
        .find(|known| **known as Code == code)
        .map(|known| format!("{known:?}"))
}

fn name_of(code: Code) -> String {
    known_name(code).unwrap_or_else(|| "a code that this version does not know".to_owned())
}
