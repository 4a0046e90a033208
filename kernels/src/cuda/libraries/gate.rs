//! Tokens that device code asks for first: each proves that a library is open, new enough and has the
//! functions without which it is none.
//!
//! A token is a few bytes and `Copy`. What it does not promise is asked of [`Found::has`] or
//! [`Found::symbol`] before it is called.
#![expect(unsafe_code, reason = "starts the driver; see `Driver::start`")]

use std::ffi::{c_int, c_uint};
use std::fmt;
use std::sync::OnceLock;

use super::{Answer, Found, Library, Version, find};

/// The driver is there, initialized, and sees a GPU.
#[derive(Debug, Clone, Copy)]
pub struct Driver {
    found: &'static Found,
    version: Version,
    devices: u32,
}

/// Why nothing runs on a GPU here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoGpu {
    /// No usable driver: absent, broken, too old or without a function that is needed.
    NoDriver(Unusable),
    /// The driver refused to start: `cuInit` gave this code of `CUresult`.
    Init {
        /// The code.
        code: i32,
    },
    /// It started and has no device for this process.
    NoDevice,
}

/// A library that cannot be used, and what would help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable {
    /// Which.
    pub library: Library,
    /// What was found.
    pub why: String,
    /// What would work.
    pub remedy: String,
}

impl Driver {
    /// The functions that are called without asking.
    pub const FUNCTIONS: [&'static str; 7] = [
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDeviceTotalMem_v2",
    ];

    /// Starts the driver, once for the process.
    pub fn get() -> Result<Self, NoGpu> {
        static DRIVER: OnceLock<Result<Driver, NoGpu>> = OnceLock::new();
        DRIVER.get_or_init(Self::start).clone()
    }

    fn start() -> Result<Self, NoGpu> {
        let found = require(Library::Driver, &Self::FUNCTIONS).map_err(NoGpu::NoDriver)?;
        let version = found
            .version
            .ok_or_else(|| NoGpu::NoDriver(mute(found, Library::Driver)))?;
        // SAFETY: the signatures are those of the documentation; results are taken as the numbers
        // they are, since a newer driver has codes that older declarations do not.
        let (init, count) = unsafe {
            (
                found.symbol::<unsafe extern "C" fn(c_uint) -> c_int>("cuInit"),
                found.symbol::<unsafe extern "C" fn(*mut c_int) -> c_int>("cuDeviceGetCount"),
            )
        };
        let (init, count) = (
            init.expect("it was looked up"),
            count.expect("it was looked up"),
        );
        let checked = |code| match code {
            0 => Ok(()),
            NO_DEVICE => Err(NoGpu::NoDevice),
            code => Err(NoGpu::Init { code }),
        };
        let mut devices = 0;
        // SAFETY: as above; the pointer is to a local.
        unsafe {
            checked(init(0))?;
            checked(count(&raw mut devices))?;
        }
        match u32::try_from(devices) {
            Ok(devices) if devices > 0 => Ok(Self {
                found,
                version,
                devices,
            }),
            _ => Err(NoGpu::NoDevice),
        }
    }

    /// The version of CUDA it speaks.
    pub fn version(self) -> Version {
        self.version
    }

    /// How many devices this process sees; at least one.
    pub fn devices(self) -> u32 {
        self.devices
    }

    /// The library, for functions beyond [`Driver::FUNCTIONS`].
    pub fn library(self) -> &'static Found {
        self.found
    }
}

/// The run-time compiler is there and makes cubins.
#[derive(Debug, Clone, Copy)]
pub struct Nvrtc {
    found: &'static Found,
    version: Version,
}

impl Nvrtc {
    /// The functions that are called without asking.
    pub const FUNCTIONS: [&'static str; 9] = [
        "nvrtcVersion",
        "nvrtcGetErrorString",
        "nvrtcCreateProgram",
        "nvrtcDestroyProgram",
        "nvrtcCompileProgram",
        "nvrtcGetProgramLogSize",
        "nvrtcGetProgramLog",
        "nvrtcGetCUBINSize",
        "nvrtcGetCUBIN",
    ];

    /// Opens it, once for the process.
    pub fn get() -> Result<Self, Unusable> {
        let found = require(Library::Nvrtc, &Self::FUNCTIONS)?;
        let version = found.version.ok_or_else(|| mute(found, Library::Nvrtc))?;
        Ok(Self { found, version })
    }

    /// Its version, which is that of the CUDA it came with.
    pub fn version(self) -> Version {
        self.version
    }

    /// The library, for functions beyond [`Nvrtc::FUNCTIONS`].
    pub fn library(self) -> &'static Found {
        self.found
    }
}

/// Dense products are there.
#[derive(Debug, Clone, Copy)]
pub struct CublasLt {
    found: &'static Found,
}

impl CublasLt {
    /// The functions that are called without asking.
    pub const FUNCTIONS: [&'static str; 14] = [
        "cublasLtCreate",
        "cublasLtDestroy",
        "cublasLtGetProperty",
        "cublasLtGetVersion",
        "cublasLtMatmul",
        "cublasLtMatmulAlgoGetHeuristic",
        "cublasLtMatmulDescCreate",
        "cublasLtMatmulDescDestroy",
        "cublasLtMatmulDescSetAttribute",
        "cublasLtMatmulPreferenceCreate",
        "cublasLtMatmulPreferenceDestroy",
        "cublasLtMatmulPreferenceSetAttribute",
        "cublasLtMatrixLayoutCreate",
        "cublasLtMatrixLayoutDestroy",
    ];

    /// Opens it, once for the process.
    pub fn get() -> Result<Self, Unusable> {
        let found = require(Library::CublasLt, &Self::FUNCTIONS)?;
        Ok(Self { found })
    }

    /// Its version, where it said one.
    pub fn version(self) -> Option<Version> {
        self.found.version
    }

    /// The library, for functions beyond [`CublasLt::FUNCTIONS`].
    pub fn library(self) -> &'static Found {
        self.found
    }
}

/// Collectives between GPUs are there.
#[derive(Debug, Clone, Copy)]
pub struct Nccl {
    found: &'static Found,
    version: Version,
}

impl Nccl {
    /// The functions that are called without asking.
    pub const FUNCTIONS: [&'static str; 17] = [
        "ncclGetVersion",
        "ncclGetErrorString",
        "ncclGetUniqueId",
        "ncclCommInitRankConfig",
        "ncclCommSplit",
        "ncclCommGetAsyncError",
        "ncclCommFinalize",
        "ncclCommDestroy",
        "ncclCommAbort",
        "ncclGroupStart",
        "ncclGroupEnd",
        "ncclAllReduce",
        "ncclReduceScatter",
        "ncclAllGather",
        "ncclBroadcast",
        "ncclSend",
        "ncclRecv",
    ];

    /// Opens it, once for the process.
    pub fn get() -> Result<Self, Unusable> {
        let found = require(Library::Nccl, &Self::FUNCTIONS)?;
        let version = found.version.ok_or_else(|| mute(found, Library::Nccl))?;
        Ok(Self { found, version })
    }

    /// Its version.
    pub fn version(self) -> Version {
        self.version
    }

    /// The library, for functions beyond [`Nccl::FUNCTIONS`].
    pub fn library(self) -> &'static Found {
        self.found
    }
}

/// The library, if it is there with all of these functions.
fn require(library: Library, functions: &[&str]) -> Result<&'static Found, Unusable> {
    let found = match find(library) {
        Answer::Found(found) => found,
        Answer::Absent { .. } => {
            return Err(unusable(library, "not found".to_owned()));
        }
        Answer::Broken { path, why } => {
            return Err(unusable(library, format!("{}: {why}", path.display())));
        }
    };
    let missing: Vec<&str> = functions
        .iter()
        .copied()
        .filter(|name| !found.has(name))
        .collect();
    if missing.is_empty() {
        return Ok(found);
    }
    let names = match missing.as_slice() {
        [first, second, third, rest @ ..] if !rest.is_empty() => {
            format!("{first}, {second}, {third} and {} more", rest.len())
        }
        few => few.join(", "),
    };
    let why = format!("{} has no {names}", found.path.display());
    Err(unusable(library, why))
}

fn mute(found: &Found, library: Library) -> Unusable {
    let why = format!("{} does not say its version", found.path.display());
    unusable(library, why)
}

fn unusable(library: Library, why: String) -> Unusable {
    let driver = match library {
        Library::Driver | Library::Nvml => None,
        _ => super::driver_version(),
    };
    Unusable {
        library,
        why,
        remedy: library.remedy(driver),
    }
}

/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: i32 = 100;

impl NoGpu {
    /// What would help.
    pub fn remedy(&self) -> String {
        match self {
            Self::NoDriver(unusable) => unusable.remedy.clone(),
            Self::NoDevice => {
                "check nvidia-smi and CUDA_VISIBLE_DEVICES; start a container with --gpus all"
            }
            .to_owned(),
            Self::Init { code } => match code {
                // The codes of CUresult, from the driver's documentation.
                34 => "libcuda is a toolkit's stub: take its folder off LD_LIBRARY_PATH",
                802 => "start the fabric manager (systemctl start nvidia-fabricmanager)",
                803 => "driver and kernel module differ: reboot, or match a container's libcuda to the host",
                804 => "the compatibility libcuda does not support this GPU: use the driver's own",
                _ => "check nvidia-smi and the kernel's log (dmesg)",
            }
            .to_owned(),
        }
    }
}

impl fmt::Display for NoGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver(unusable) => unusable.fmt(f),
            Self::Init { code } => {
                write!(f, "the driver does not start: cuInit failed with {code}")?;
                let name = match code {
                    34 => "CUDA_ERROR_STUB_LIBRARY",
                    46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
                    101 => "CUDA_ERROR_INVALID_DEVICE",
                    802 => "CUDA_ERROR_SYSTEM_NOT_READY",
                    803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
                    804 => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
                    999 => "CUDA_ERROR_UNKNOWN",
                    _ => return Ok(()),
                };
                write!(f, " ({name})")
            }
            Self::NoDevice => write!(f, "the driver sees no GPU"),
        }
    }
}

impl std::error::Error for NoGpu {}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.library, self.why)
    }
}

impl std::error::Error for Unusable {}
