//! `moefold doctor`: what this machine has for planning and training, what is missing, what that costs
//! and what to do about it.
//!
//! It only looks: no context is made on a GPU, nothing is written. What is missing is an answer, so
//! the exit code is 0 wherever it could look.

use std::path::PathBuf;

use moefold_executor::device::DeviceSpec;
use moefold_executor::environment::Environment;
use moefold_kernels::cuda::libraries::{
    Answer, CublasLt, Library, NoGpu, Nvrtc, Unusable, driver_version, find, places,
};
use moefold_kernels::cuda::survey::{Survey, Surveyed};
use moefold_profiles::units::Bytes;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::Output;

mod host;
mod text;

use host::Host;

/// Version of the format of the JSON answer.
const VERSION: u32 = 1;

/// What is said of a library that is in none of the places.
const NOT_FOUND: &str = "not found";

/// The oldest compute capability that kernels are written for.
const OLDEST_CAPABILITY: (u32, u32) = (8, 0);

pub(crate) fn run(output: Output) -> Result<(), Failure> {
    let report = Report::collect();
    output.answer(&report, || text::text(&report, output.verbose))
}

/// Memory that this process may use and that is free, or can be freed at once.
pub(crate) fn memory_at_hand() -> Bytes {
    let may = Environment::detect(1, &DeviceSpec::CPU).memory_bytes;
    Bytes(host::available().map_or(may, |available| available.min(may)))
}

/// Everything that was seen.
#[derive(Serialize)]
pub(crate) struct Report {
    version: u32,
    moefold: &'static str,
    /// Whether anything can run on a GPU.
    gpu: bool,
    /// What `--device auto` takes: `cuda` or `cpu`.
    auto_device: &'static str,
    host: Host,
    /// The CUDA that the driver speaks.
    cuda: Option<String>,
    /// The driver's own release.
    driver_release: Option<String>,
    /// Why nothing runs on a GPU.
    no_gpu: Option<Refusal>,
    devices: Vec<Gpu>,
    links: Vec<Link>,
    libraries: Vec<LibraryRow>,
    /// What NVRTC compiles for: 90 is sm_90.
    nvrtc_architectures: Vec<u32>,
    /// Where compiled kernels are kept, and the pack that brings more.
    cache: Option<PathBuf>,
    pack: Option<PathBuf>,
    /// Where libraries are looked for, in order.
    searched: Vec<String>,
    missing: Vec<Missing>,
}

#[derive(Serialize)]
struct Refusal {
    why: String,
    /// The code of `CUresult`, where the driver gave one.
    code: Option<i32>,
}

#[derive(Serialize)]
struct Gpu {
    ordinal: u32,
    name: String,
    capability: Option<String>,
    memory_bytes: Option<u64>,
    memory_used_bytes: Option<u64>,
    multiprocessors: Option<u32>,
    clock_mhz: Option<u32>,
    memory_clock_mhz: Option<u32>,
    l2_bytes: Option<u64>,
    pci: Option<String>,
    mig: Option<bool>,
    nvlinks: Option<u32>,
}

#[derive(Serialize)]
struct Link {
    from: u32,
    to: u32,
    /// `nvlink`, `pcie` or `none`.
    kind: &'static str,
}

#[derive(Serialize)]
struct LibraryRow {
    name: &'static str,
    /// `found`, `absent` or `broken`.
    state: &'static str,
    version: Option<String>,
    path: Option<PathBuf>,
    /// What is wrong with it.
    why: Option<String>,
    passed_over: Vec<PassedOver>,
}

#[derive(Serialize)]
struct PassedOver {
    path: PathBuf,
    why: String,
}

/// Something that is not there or does not work.
#[derive(Debug, Serialize)]
pub(crate) struct Missing {
    pub(crate) what: String,
    pub(crate) found: String,
    costs: &'static str,
    pub(crate) remedy: String,
}

impl Missing {
    /// Whether there is no trace of it, rather than one that does not work.
    pub(crate) fn is_absent(&self) -> bool {
        self.found == NOT_FOUND
    }

    fn library(costs: &'static str, unusable: Unusable) -> Self {
        Self {
            what: unusable.library.name().to_owned(),
            found: unusable.why,
            costs,
            remedy: unusable.remedy,
        }
    }
}

/// Whether ranks can train on this machine's GPUs, the first of which all rank threads share; else
/// what stands in the way first. What `--device auto` goes by.
pub(crate) fn usable(survey: &Survey) -> Result<(), Missing> {
    if let Err(no_gpu) = &survey.driver {
        return Err(no_driver(no_gpu));
    }
    if let Some(first) = survey.devices.first()
        && let Some(mut missing) = too_old(first)
    {
        let newer = survey.devices.iter().find(|gpu| too_old(gpu).is_none());
        if let Some(newer) = newer {
            missing.remedy = format!("start with CUDA_VISIBLE_DEVICES={}", newer.ordinal);
        }
        return Err(missing);
    }
    let compiled = std::env::var_os("MOEFOLD_PACK").is_some_and(|pack| !pack.is_empty())
        || survey.cache.as_deref().is_some_and(|folder| {
            std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
        });
    match no_compiler() {
        Some(missing) if !compiled => Err(missing),
        _ => Ok(()),
    }
}

fn no_driver(no_gpu: &NoGpu) -> Missing {
    Missing {
        what: match no_gpu {
            NoGpu::NoDriver(_) => "driver",
            NoGpu::Init { .. } | NoGpu::NoDevice => "GPU",
        }
        .to_owned(),
        found: match no_gpu {
            NoGpu::NoDriver(unusable) => unusable.why.clone(),
            NoGpu::Init { .. } | NoGpu::NoDevice => no_gpu.to_string(),
        },
        costs: "nothing runs on a GPU",
        remedy: no_gpu.remedy(),
    }
}

fn too_old(device: &Surveyed) -> Option<Missing> {
    let (major, minor) = device.capability?;
    ((major, minor) < OLDEST_CAPABILITY).then(|| Missing {
        what: format!("GPU {}", device.ordinal),
        found: format!("{} has compute capability {major}.{minor}", device.name),
        costs: "nothing runs on this GPU",
        remedy: "kernels need 8.0 or newer (A100, H100, B200, RTX 30 and later)".to_owned(),
    })
}

/// What is missing of NVRTC, which makes the kernels that neither the cache nor a pack has.
fn no_compiler() -> Option<Missing> {
    let costs = "no kernel can be compiled; those in the cache or a pack still run";
    match Nvrtc::get() {
        Err(unusable) => Some(Missing::library(costs, unusable)),
        Ok(found) => too_new(Library::Nvrtc, found.version().major, costs),
    }
}

impl Report {
    pub(crate) fn collect() -> Self {
        let survey = Survey::take();
        let missing = missing(&survey);
        let environment = places::Environment::of_this_process();
        Self {
            version: VERSION,
            moefold: env!("CARGO_PKG_VERSION"),
            gpu: survey.driver.is_ok(),
            auto_device: if usable(&survey).is_ok() {
                "cuda"
            } else {
                "cpu"
            },
            host: Host::detect(),
            cuda: driver_version().map(|version| version.to_string()),
            driver_release: survey.release,
            no_gpu: survey.driver.err().map(|no_gpu| Refusal {
                why: no_gpu.to_string(),
                code: match no_gpu {
                    NoGpu::Init { code } => Some(code),
                    NoGpu::NoDriver(_) | NoGpu::NoDevice => None,
                },
            }),
            devices: survey.devices.into_iter().map(Gpu::from).collect(),
            links: survey
                .links
                .iter()
                .map(|link| Link {
                    from: link.from,
                    to: link.to,
                    kind: match (link.access, link.native_atomics) {
                        (false, _) => "none",
                        (true, false) => "pcie",
                        (true, true) => "nvlink",
                    },
                })
                .collect(),
            libraries: Library::ALL.map(LibraryRow::of).into(),
            nvrtc_architectures: survey.nvrtc_architectures,
            cache: survey.cache,
            pack: std::env::var_os("MOEFOLD_PACK").map(PathBuf::from),
            searched: places::places(&environment)
                .iter()
                .map(ToString::to_string)
                .collect(),
            missing,
        }
    }
}

impl From<Surveyed> for Gpu {
    fn from(device: Surveyed) -> Self {
        Self {
            ordinal: device.ordinal,
            name: device.name,
            capability: device
                .capability
                .map(|(major, minor)| format!("{major}.{minor}")),
            memory_bytes: device.memory.map(|memory| memory.0),
            memory_used_bytes: device.memory_used.map(|memory| memory.0),
            multiprocessors: device.multiprocessors,
            clock_mhz: device.clock_mhz,
            memory_clock_mhz: device.memory_clock_mhz,
            l2_bytes: device.l2.map(|l2| l2.0),
            pci: device.pci,
            mig: device.mig,
            nvlinks: device.nvlinks,
        }
    }
}

impl LibraryRow {
    fn of(library: Library) -> Self {
        let row = |state| Self {
            name: library.name(),
            state,
            version: None,
            path: None,
            why: None,
            passed_over: Vec::new(),
        };
        match find(library) {
            Answer::Found(found) => Self {
                version: found.version.map(|version| version.to_string()),
                path: Some(found.path.clone()),
                passed_over: found
                    .passed_over
                    .iter()
                    .map(|passed| PassedOver {
                        path: passed.path.clone(),
                        why: passed.why.clone(),
                    })
                    .collect(),
                ..row("found")
            },
            Answer::Absent { .. } => row("absent"),
            Answer::Broken { path, why } => Self {
                path: Some(path.clone()),
                why: Some(why.clone()),
                ..row("broken")
            },
        }
    }
}

/// What stands between this machine and training on its GPUs. Of libraries, those alone that something
/// needs.
fn missing(survey: &Survey) -> Vec<Missing> {
    let mut missing = Vec::new();
    missing.extend(survey.driver.as_ref().err().map(no_driver));
    missing.extend(survey.devices.iter().filter_map(too_old));
    missing.extend(no_compiler());
    let cublas = "dense matrix products are left to moefold's own kernels";
    match CublasLt::get() {
        Err(unusable) => missing.push(Missing::library(cublas, unusable)),
        Ok(found) => {
            let major = found.version().map_or(0, |version| version.major);
            missing.extend(too_new(Library::CublasLt, major, cublas));
        }
    }
    if survey.devices.len() != 1 && find(Library::Nccl).found().is_none() {
        missing.push(Missing {
            what: Library::Nccl.name().to_owned(),
            found: match find(Library::Nccl) {
                Answer::Broken { path, why } => format!("{}: {why}", path.display()),
                Answer::Found(_) | Answer::Absent { .. } => NOT_FOUND.to_owned(),
            },
            costs: "no collectives between GPUs (one GPU does without)",
            remedy: Library::Nccl.remedy(driver_version()),
        });
    }
    missing
}

/// A library of a newer major version of CUDA than the driver's, which does not work on it.
fn too_new(library: Library, major: u32, costs: &'static str) -> Option<Missing> {
    let driver = driver_version()?;
    (major > driver.major).then(|| Missing {
        what: library.name().to_owned(),
        found: format!("it is of CUDA {major}, and the driver of CUDA {driver}"),
        costs,
        remedy: library.remedy(Some(driver)),
    })
}
