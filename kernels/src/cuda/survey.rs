//! [`Survey`]: what CUDA has on this machine, for a report. Nothing is set up: no context, no memory.
//!
//! The driver says what devices are and which reach each other; NVML, where it is there, adds clocks,
//! MIG and NVLink; NVRTC, what it compiles for. What a library does not say is left out.
#![expect(unsafe_code, reason = "calls the driver and NVRTC; see below")]

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::PathBuf;

use cudarc::driver::sys::{CUdevice_P2PAttribute, CUdevice_attribute};
use moefold_profiles::units::Bytes;

use crate::cuda::cache::Directory;
use crate::cuda::libraries::{Driver, Found, NoGpu, Nvrtc, Version};

mod nvml;

use nvml::Nvml;

/// What CUDA has on this machine.
#[derive(Debug, Clone)]
pub struct Survey {
    /// The version of CUDA that the driver speaks; or why nothing runs on a GPU.
    pub driver: Result<Version, NoGpu>,
    /// The driver's own release (`580.95.05`).
    pub release: Option<String>,
    /// The devices this process sees, in the driver's order.
    pub devices: Vec<Surveyed>,
    /// Every ordered pair of devices.
    pub links: Vec<Link>,
    /// What NVRTC compiles for: 90 is sm_90.
    pub nvrtc_architectures: Vec<u32>,
    /// Where compiled kernels are kept; none where they are not.
    pub cache: Option<PathBuf>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surveyed {
    /// Its number among those this process sees.
    pub ordinal: u32,
    /// The vendor's name of it.
    pub name: String,
    /// Compute capability, major and minor: 9 and 0 for sm_90.
    pub capability: Option<(u32, u32)>,
    /// Memory in all.
    pub memory: Option<Bytes>,
    /// Memory in use, by anyone.
    pub memory_used: Option<Bytes>,
    /// Streaming multiprocessors.
    pub multiprocessors: Option<u32>,
    /// Highest clock of the multiprocessors, MHz.
    pub clock_mhz: Option<u32>,
    /// Highest clock of the memory, MHz.
    pub memory_clock_mhz: Option<u32>,
    /// Level-two cache.
    pub l2: Option<Bytes>,
    /// Where it sits (`0000:1b:00.0`).
    pub pci: Option<String>,
    /// Whether it is cut into instances (MIG); none where it cannot be, or NVML is not there.
    pub mig: Option<bool>,
    /// NVLinks that are up; none where NVML is not there.
    pub nvlinks: Option<u32>,
}

/// What one device can do with the memory of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// The device that reads and writes.
    pub from: u32,
    /// The device whose memory it is.
    pub to: u32,
    /// Whether it can address it at all.
    pub access: bool,
    /// Whether atomics work on it. PCIe does not carry them all; NVLink does.
    pub native_atomics: bool,
}

impl Survey {
    /// Asks every library that is there.
    pub fn take() -> Self {
        let driver = Driver::get();
        let nvml = Nvml::open();
        let (devices, links) = match &driver {
            Ok(driver) => (
                (0..driver.devices())
                    .map(|ordinal| device(*driver, nvml.as_ref(), ordinal))
                    .collect(),
                links(*driver),
            ),
            Err(_) => (Vec::new(), Vec::new()),
        };
        Self {
            driver: driver.map(Driver::version),
            release: nvml.as_ref().and_then(Nvml::release),
            devices,
            links,
            nvrtc_architectures: Nvrtc::get().map_or(Vec::new(), nvrtc_architectures),
            cache: Directory::cache().map(|Directory(path)| path),
        }
    }
}

/// Memory in use by anyone of the device that sits there, where NVML tells.
pub(crate) fn memory_used(pci: &str) -> Option<Bytes> {
    Nvml::open()?.device(pci)?.memory_used()
}

// SAFETY of the calls below: every function is looked up by the name that its type is written for,
// with the types of the driver's and NVRTC's documentation; devices are numbers, and every pointer is
// to a local that is as large as the call is told.

/// A result of 0 is success.
fn succeeded(code: c_int) -> Option<()> {
    (code == 0).then_some(())
}

fn device(driver: Driver, nvml: Option<&Nvml>, ordinal: u32) -> Surveyed {
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    };
    let library = driver.library();
    let handle = handle(library, ordinal);
    let ask = |attribute| attribute_of(library, handle?, attribute);
    let mhz = |attribute| Some(ask(attribute)? / 1000);
    let pci = handle.and_then(|handle| pci_of(library, handle));
    let managed = nvml
        .zip(pci.as_ref())
        .and_then(|(nvml, pci)| nvml.device(pci));
    Surveyed {
        ordinal,
        name: handle
            .and_then(|handle| name_of(library, handle))
            .unwrap_or_else(|| "unknown".to_owned()),
        capability: ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
            .zip(ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)),
        memory: handle.and_then(|handle| memory_of(library, handle)),
        memory_used: managed.as_ref().and_then(nvml::Managed::memory_used),
        multiprocessors: ask(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        clock_mhz: mhz(CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        memory_clock_mhz: mhz(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
        l2: ask(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE).map(|bytes| Bytes(bytes.into())),
        mig: managed.as_ref().and_then(nvml::Managed::mig),
        nvlinks: managed.as_ref().and_then(nvml::Managed::nvlinks),
        pci,
    }
}

fn handle(library: &Found, ordinal: u32) -> Option<c_int> {
    let mut handle = 0;
    // SAFETY: see above.
    let code = unsafe {
        let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int =
            library.symbol("cuDeviceGet")?;
        get(&raw mut handle, ordinal.cast_signed())
    };
    succeeded(code)?;
    Some(handle)
}

fn attribute_of(library: &Found, device: c_int, attribute: CUdevice_attribute) -> Option<u32> {
    let mut value = 0;
    // SAFETY: see above.
    let code = unsafe {
        let get: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int =
            library.symbol("cuDeviceGetAttribute")?;
        get(&raw mut value, attribute as c_int, device)
    };
    succeeded(code)?;
    u32::try_from(value).ok()
}

fn memory_of(library: &Found, device: c_int) -> Option<Bytes> {
    let mut bytes = 0_usize;
    // SAFETY: see above.
    let code = unsafe {
        let get: unsafe extern "C" fn(*mut usize, c_int) -> c_int =
            library.symbol("cuDeviceTotalMem_v2")?;
        get(&raw mut bytes, device)
    };
    succeeded(code)?;
    Some(Bytes(bytes as u64))
}

fn name_of(library: &Found, device: c_int) -> Option<String> {
    text::<128>(|buffer, length| {
        // SAFETY: see above.
        unsafe {
            let get: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int =
                library.symbol("cuDeviceGetName")?;
            succeeded(get(buffer, length as c_int, device))
        }
    })
}

fn pci_of(library: &Found, device: c_int) -> Option<String> {
    text::<64>(|buffer, length| {
        // SAFETY: see above.
        unsafe {
            let get: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int =
                library.symbol("cuDeviceGetPCIBusId")?;
            succeeded(get(buffer, length as c_int, device))
        }
    })
}

/// A string that a call writes, ended by a zero, into at most `LENGTH` bytes.
fn text<const LENGTH: usize>(
    write: impl FnOnce(*mut c_char, c_uint) -> Option<()>,
) -> Option<String> {
    let mut buffer = [0_u8; LENGTH];
    write(buffer.as_mut_ptr().cast(), LENGTH as c_uint)?;
    let text = CStr::from_bytes_until_nul(&buffer).ok()?;
    Some(text.to_string_lossy().into_owned())
}

fn links(driver: Driver) -> Vec<Link> {
    let devices = 0..driver.devices();
    let pairs = devices
        .clone()
        .flat_map(|from| devices.clone().map(move |to| (from, to)));
    pairs
        .filter(|(from, to)| from != to)
        .filter_map(|(from, to)| link(driver.library(), from, to))
        .collect()
}

fn link(library: &Found, from: u32, to: u32) -> Option<Link> {
    let devices = (handle(library, from)?, handle(library, to)?);
    let ask = |attribute: CUdevice_P2PAttribute| {
        let mut value = 0;
        // SAFETY: see above.
        let code = unsafe {
            let get: unsafe extern "C" fn(*mut c_int, c_int, c_int, c_int) -> c_int =
                library.symbol("cuDeviceGetP2PAttribute")?;
            get(&raw mut value, attribute as c_int, devices.0, devices.1)
        };
        succeeded(code)?;
        Some(value != 0)
    };
    Some(Link {
        from,
        to,
        access: ask(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)?,
        native_atomics: ask(CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)
            .unwrap_or(false),
    })
}

fn nvrtc_architectures(nvrtc: Nvrtc) -> Vec<u32> {
    let ask = || {
        let library = nvrtc.library();
        let mut count = 0;
        // SAFETY: see above; the list has as many places as the count that was just given.
        unsafe {
            let number: unsafe extern "C" fn(*mut c_int) -> c_int =
                library.symbol("nvrtcGetNumSupportedArchs")?;
            let list: unsafe extern "C" fn(*mut c_int) -> c_int =
                library.symbol("nvrtcGetSupportedArchs")?;
            succeeded(number(&raw mut count))?;
            let mut found = vec![0; usize::try_from(count).ok()?];
            succeeded(list(found.as_mut_ptr()))?;
            Some(found.into_iter().map(c_int::unsigned_abs).collect())
        }
    };
    ask().unwrap_or_default()
}
