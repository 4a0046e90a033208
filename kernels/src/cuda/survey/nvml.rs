//! NVML, the management library: what the driver's own interface does not say of a device.
//!
//! Constants are those of NVML's documentation.
#![expect(unsafe_code, reason = "calls NVML; see below")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use moefold_profiles::units::Bytes;

use super::{succeeded, text};
use crate::cuda::libraries::{Found, Library, find};

/// No device has more links (`NVML_NVLINK_MAX_LINKS`).
const MOST_LINKS: c_uint = 18;

/// NVML, started; stopped on drop.
pub(super) struct Nvml {
    library: &'static Found,
}

/// A device as NVML knows it.
pub(super) struct Managed<'a> {
    nvml: &'a Nvml,
    handle: *mut c_void,
}

// SAFETY of the calls below: every function is looked up by the name that its type is written for,
// with the types of NVML's documentation, between `nvmlInit_v2` and `nvmlShutdown`; handles are those
// it gave, and every pointer is to a local that is as large as the call expects.

impl Nvml {
    /// Starts NVML, where it is there and willing.
    pub(super) fn open() -> Option<Self> {
        let library = find(Library::Nvml).found()?;
        // SAFETY: see above.
        unsafe {
            let start: unsafe extern "C" fn() -> c_int = library.symbol("nvmlInit_v2")?;
            succeeded(start())?;
        }
        Some(Self { library })
    }

    /// The driver's release.
    pub(super) fn release(&self) -> Option<String> {
        text::<96>(|buffer, length| {
            // SAFETY: see above.
            unsafe {
                let get: unsafe extern "C" fn(*mut c_char, c_uint) -> c_int =
                    self.library.symbol("nvmlSystemGetDriverVersion")?;
                succeeded(get(buffer, length))
            }
        })
    }

    /// The device that sits there; NVML's own order is not the driver's.
    pub(super) fn device(&self, pci: &str) -> Option<Managed<'_>> {
        let pci = CString::new(pci).ok()?;
        let mut handle = ptr::null_mut();
        // SAFETY: see above.
        unsafe {
            let get: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int =
                self.library.symbol("nvmlDeviceGetHandleByPciBusId_v2")?;
            succeeded(get(pci.as_ptr(), &raw mut handle))?;
        }
        Some(Managed { nvml: self, handle })
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: see above.
        unsafe {
            let stop = self
                .library
                .symbol::<unsafe extern "C" fn() -> c_int>("nvmlShutdown");
            if let Some(stop) = stop {
                stop();
            }
        }
    }
}

/// `nvmlMemory_t`, bytes.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

impl Managed<'_> {
    pub(super) fn memory_used(&self) -> Option<Bytes> {
        let mut memory = Memory::default();
        // SAFETY: see above.
        unsafe {
            let get: unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int =
                self.nvml.library.symbol("nvmlDeviceGetMemoryInfo")?;
            succeeded(get(self.handle, &raw mut memory))?;
        }
        Some(Bytes(memory.used))
    }

    /// Whether it is cut into instances; none where it cannot be.
    pub(super) fn mig(&self) -> Option<bool> {
        let (mut now, mut after_reset) = (0, 0);
        // SAFETY: see above.
        unsafe {
            let get: unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut c_uint) -> c_int =
                self.nvml.library.symbol("nvmlDeviceGetMigMode")?;
            succeeded(get(self.handle, &raw mut now, &raw mut after_reset))?;
        }
        Some(now != 0)
    }

    /// How many of its NVLinks are up.
    pub(super) fn nvlinks(&self) -> Option<u32> {
        // SAFETY: see above.
        let state: unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint) -> c_int =
            unsafe { self.nvml.library.symbol("nvmlDeviceGetNvLinkState")? };
        let up = (0..MOST_LINKS).filter(|link| {
            let mut active = 0;
            // SAFETY: see above. A link the device does not have is an error, not an active one.
            let code = unsafe { state(self.handle, *link, &raw mut active) };
            code == 0 && active != 0
        });
        Some(up.count() as u32)
    }
}
