//! The libraries of CUDA, found and opened at run time. Their absence is an answer.
//!
//! The program links none of them, so one binary runs with and without a GPU. [`find`] looks in the
//! places of [`places`] once per library and says what it found: a library, nothing (with what to
//! install), or something that does not work (with why). [`gate`] turns that into the tokens that
//! device code needs.
//!
//! `cudarc`, whose bindings call the driver, NVRTC, cuBLAS and cuBLASLt, opens libraries by name
//! alone and panics when one, or one of its symbols, is missing. So a library is opened here first,
//! by its path and for the whole process; the dynamic loader then answers `cudarc` by the name the
//! library gives itself. NCCL and NVML are called through [`Found::symbol`].
//!
//! # Why the unsafe code is sound
//!
//! Opening a library runs its initializers: these are the vendor's, and whoever can place a file on
//! the loader's path could run anything anyway. Libraries stay open until the process ends, so a
//! symbol never dangles. The functions called here are the version queries of each library, with the
//! signatures of their documentation, looked up before they are called; none needs a device.
#![expect(
    unsafe_code,
    reason = "foreign libraries; see the module documentation"
)]

use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW};

pub mod gate;
pub mod places;

pub use gate::{CublasLt, Driver, NoGpu, Nvrtc, Unusable};

use places::Place;

/// A library that some part of the CUDA backend needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Library {
    /// The driver (`libcuda`): everything on a GPU.
    Driver,
    /// The run-time compiler: kernels that are not in the cache or a pack.
    Nvrtc,
    /// Dense matrix products.
    CublasLt,
    /// The older interface to dense products; nothing needs it.
    Cublas,
    /// Collectives between GPUs.
    Nccl,
    /// Management: clocks, NVLink, MIG.
    Nvml,
}

impl Library {
    /// All of them, in the order they are reported.
    pub const ALL: [Self; 6] = [
        Self::Driver,
        Self::Nvrtc,
        Self::CublasLt,
        Self::Cublas,
        Self::Nccl,
        Self::Nvml,
    ];

    /// The name people know it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
            Self::Cublas => "cuBLAS",
            Self::Nccl => "NCCL",
            Self::Nvml => "NVML",
        }
    }

    /// File names to look for, the best first. `driver` is the CUDA version of the driver, where
    /// there is one: code of a newer major version of CUDA does not run on it.
    fn file_names(self, driver: Option<Version>) -> Vec<String> {
        let stem = match self {
            Self::Driver => return vec!["libcuda.so.1".to_owned()],
            Self::Nccl => return vec!["libnccl.so.2".to_owned(), "libnccl.so".to_owned()],
            Self::Nvml => return vec!["libnvidia-ml.so.1".to_owned()],
            Self::Nvrtc => "nvrtc",
            Self::CublasLt => "cublasLt",
            Self::Cublas => "cublas",
        };
        // Majors whose interface the bindings know; others are not answered to `cudarc` by name.
        let majors = match driver {
            Some(driver) if driver.major == 12 => [12, 13],
            _ => [13, 12],
        };
        majors
            .map(|major| format!("lib{stem}.so.{major}"))
            .into_iter()
            .chain([format!("lib{stem}.so")])
            .collect()
    }

    /// The oldest version that does what is asked of it, and why no older one.
    fn oldest(self) -> Option<(Version, &'static str)> {
        match self {
            Self::Driver => Some((
                Version::new(12, 0, 0),
                "tensor maps and code for sm_90a came with it",
            )),
            Self::Nvrtc => Some((Version::new(12, 0, 0), "it is the first to compile sm_90a")),
            Self::CublasLt | Self::Cublas => {
                Some((Version::new(12, 0, 0), "the bindings know 12 and 13"))
            }
            Self::Nccl => Some((
                Version::new(2, 18, 0),
                "it is the first to split communicators",
            )),
            Self::Nvml => None,
        }
    }

    /// What to do to have it, for a driver of that CUDA version.
    pub fn remedy(self, driver: Option<Version>) -> String {
        let (major, minor) = driver.map_or((13, None), |driver| {
            if driver.major < 13 {
                (12, Some(driver.minor))
            } else {
                (13, Some(driver.minor))
            }
        });
        match self {
            Self::Driver | Self::Nvml => {
                "install NVIDIA's driver, 525 or newer (Debian, Ubuntu: apt install \
                 nvidia-driver); start a container with --gpus all"
                    .to_owned()
            }
            // Code of a newer minor version may not load, so the compiler is the driver's own.
            Self::Nvrtc => {
                let suffix = if major == 12 { "-cu12" } else { "" };
                match minor {
                    Some(minor) => {
                        format!("pip install 'nvidia-cuda-nvrtc{suffix}=={major}.{minor}.*'")
                    }
                    None => format!("pip install 'nvidia-cuda-nvrtc{suffix}=={major}.*'"),
                }
            }
            Self::CublasLt | Self::Cublas => {
                let suffix = if major == 12 { "-cu12" } else { "" };
                format!("pip install 'nvidia-cublas{suffix}=={major}.*'")
            }
            Self::Nccl => format!("pip install nvidia-nccl-cu{major}"),
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A version of a library, or of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Incompatible when it differs.
    pub major: u32,
    /// Additions.
    pub minor: u32,
    /// Corrections; 0 where the library does not say.
    pub patch: u32,
}

impl Version {
    /// `major.minor.patch`.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// The driver and the runtime write 12.4 as 12040.
    fn from_cuda(number: c_int) -> Self {
        let number = number.unsigned_abs();
        Self::new(number / 1000, number % 1000 / 10, number % 10)
    }

    /// NCCL, since 2.9, writes 2.28.9 as 22809; before it, 2.8.4 as 2804.
    fn from_nccl(number: c_int) -> Self {
        let number = number.unsigned_abs();
        let unit = if number < 10_000 { 1000 } else { 10_000 };
        Self::new(number / unit, number % unit / 100, number % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        match self.patch {
            0 => Ok(()),
            patch => write!(f, ".{patch}"),
        }
    }
}

/// What looking for a library came to.
#[derive(Debug)]
pub enum Answer {
    /// It is open.
    Found(Found),
    /// No file of its name is where libraries are looked for.
    Absent {
        /// Where that was, in words and in order.
        searched: Vec<String>,
    },
    /// There is one, and it does not work.
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it: the loader's words, a missing symbol, an old version.
        why: String,
    },
}

impl Answer {
    /// The library, where it is there and works.
    pub fn found(&self) -> Option<&Found> {
        match self {
            Self::Found(found) => Some(found),
            Self::Absent { .. } | Self::Broken { .. } => None,
        }
    }
}

/// An open library.
#[derive(Debug)]
pub struct Found {
    /// The file that answers calls.
    pub path: PathBuf,
    /// What it says it is, where it says anything.
    pub version: Option<Version>,
    /// Files of the name that were not used, each with why.
    pub passed_over: Vec<PassedOver>,
    handle: &'static libloading::Library,
}

/// A file that was looked at and not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedOver {
    /// The file.
    pub path: PathBuf,
    /// Why it was not used.
    pub why: String,
}

impl Found {
    /// Whether the library has a function of that name. Asked before every function that not all
    /// versions have.
    pub fn has(&self, symbol: &str) -> bool {
        has(self.handle, symbol)
    }

    /// The function of that name, where the library has one.
    ///
    /// # Safety
    /// `F` is the type of a pointer to that very function.
    pub unsafe fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise; the library is never closed.
        unsafe { symbol(self.handle, name) }
    }
}

/// Looks for a library, opens it and keeps it open; later calls give the same answer.
pub fn find(library: Library) -> &'static Answer {
    static ANSWERS: [OnceLock<Answer>; Library::ALL.len()] =
        [const { OnceLock::new() }; Library::ALL.len()];
    ANSWERS[library as usize].get_or_init(|| {
        if library == Library::Cublas {
            // It calls cuBLASLt and finds it by name, so that must be open by then.
            find(Library::CublasLt);
        }
        search(library)
    })
}

/// The version of CUDA that the driver speaks.
pub fn driver_version() -> Option<Version> {
    find(Library::Driver).found()?.version
}

/// The first place whose file opens; of several failures, the first is reported.
fn search(library: Library) -> Answer {
    let driver = match library {
        Library::Driver | Library::Nvml => None,
        _ => driver_version(),
    };
    let names = library.file_names(driver);
    let mut passed_over = Vec::new();
    let mut searched = Vec::new();
    for place in places::places(&places::Environment::of_this_process()) {
        searched.push(place.to_string());
        for name in &names {
            let candidate = match &place {
                Place::Loader => PathBuf::from(name),
                Place::Folder { path, .. } => path.join(name),
            };
            if matches!(place, Place::Folder { .. }) && !candidate.exists() {
                continue;
            }
            match open(library, &candidate) {
                Ok(mut found) => {
                    found.passed_over.splice(0..0, passed_over);
                    return Answer::Found(found);
                }
                Err(None) => {}
                Err(Some(why)) => passed_over.push(PassedOver {
                    path: candidate,
                    why,
                }),
            }
        }
    }
    match passed_over.into_iter().next() {
        Some(PassedOver { path, why }) => Answer::Broken { path, why },
        None => Answer::Absent { searched },
    }
}

/// Opens one file, or one name for the loader to find. No reason in the error: there is no such file.
fn open(library: Library, candidate: &Path) -> Result<Found, Option<String>> {
    // SAFETY: see the module documentation.
    let ours = match unsafe { Handle::open(Some(candidate), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(handle) => libloading::Library::from(handle),
        Err(libloading::Error::DlOpen { source }) => {
            let why = source.to_string();
            let name = candidate.to_string_lossy();
            let no_such_file = why.contains(&*name) && why.contains("No such file");
            return Err((!no_such_file).then(|| without_prefix(&why, &name)));
        }
        Err(error) => return Err(Some(error.to_string())),
    };
    // A library that fails here is closed again, and gives its name free for the next.
    let opened = inspect(library, &ours)?;
    let ours = &*Box::leak(Box::new(ours));
    let Some(handle) = answering(library, ours) else {
        return Err(Some(
            "it does not carry the name it is looked up by (SONAME)".to_owned(),
        ));
    };
    let used = inspect(library, handle)?;
    let mut passed_over = Vec::new();
    if used.path != opened.path {
        passed_over.extend(opened.path.map(|path| PassedOver {
            path,
            why: "the system's loader puts another copy first".to_owned(),
        }));
    }
    Ok(Found {
        path: used.path.unwrap_or_else(|| candidate.to_owned()),
        version: used.version,
        passed_over,
        handle,
    })
}

struct Inspected {
    path: Option<PathBuf>,
    version: Option<Version>,
}

/// Whether an open library is what its name says, and new enough.
fn inspect(library: Library, handle: &libloading::Library) -> Result<Inspected, String> {
    let query = match library {
        Library::Driver => "cuDriverGetVersion",
        Library::Nvrtc => "nvrtcVersion",
        Library::CublasLt => "cublasLtGetProperty",
        Library::Cublas => "cublasGetProperty",
        Library::Nccl => "ncclGetVersion",
        // It says its version only once it is initialized.
        Library::Nvml => "nvmlInit_v2",
    };
    if !has(handle, query) {
        return Err(format!("it has no {query}"));
    }
    let path = path_of(handle, query);
    let version = version(library, handle);
    if let (Some(version), Some((oldest, reason))) = (version, library.oldest())
        && version < oldest
    {
        return Err(format!(
            "it is version {version}; {oldest} or newer is needed ({reason})"
        ));
    }
    if let (Library::Nvrtc, Some(version)) = (library, version) {
        open_builtins(path.as_deref(), version)?;
    }
    Ok(Inspected { path, version })
}

/// The library that the bindings call now that `ours` is open; none, and a panic at every call, where
/// they do not find it by name.
fn answering(
    library: Library,
    ours: &'static libloading::Library,
) -> Option<&'static libloading::Library> {
    use cudarc::{cublas, cublaslt, driver, nvrtc};
    // SAFETY: both functions of each pair only open libraries; the second panics unless the first
    // says yes.
    unsafe {
        match library {
            Library::Driver => driver::sys::is_culib_present().then(|| driver::sys::culib()),
            Library::Nvrtc => nvrtc::sys::is_culib_present().then(|| nvrtc::sys::culib()),
            Library::CublasLt => cublaslt::sys::is_culib_present().then(|| cublaslt::sys::culib()),
            Library::Cublas => cublas::sys::is_culib_present().then(|| cublas::sys::culib()),
            Library::Nccl | Library::Nvml => Some(ours),
        }
    }
}

/// NVRTC opens its second half by name at its first compilation; a wheel's copy is on no path.
fn open_builtins(nvrtc: Option<&Path>, version: Version) -> Result<(), String> {
    let name = format!("libnvrtc-builtins.so.{}.{}", version.major, version.minor);
    let beside = nvrtc.map(|nvrtc| nvrtc.with_file_name(&name));
    for candidate in beside.into_iter().chain([PathBuf::from(&name)]) {
        // SAFETY: see the module documentation.
        if let Ok(handle) = unsafe { Handle::open(Some(candidate), RTLD_NOW | RTLD_GLOBAL) } {
            Box::leak(Box::new(handle));
            return Ok(());
        }
    }
    Err(format!(
        "{name}, without which it compiles nothing, is neither beside it nor on the loader's path"
    ))
}

fn version(library: Library, handle: &libloading::Library) -> Option<Version> {
    // SAFETY: the signatures are those of the libraries' documentation; 0 is success in all four.
    unsafe {
        match library {
            Library::Driver => {
                let query: unsafe extern "C" fn(*mut c_int) -> c_int =
                    symbol(handle, "cuDriverGetVersion")?;
                let mut number = 0;
                (query(&raw mut number) == 0).then(|| Version::from_cuda(number))
            }
            Library::Nvrtc => {
                let query: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                    symbol(handle, "nvrtcVersion")?;
                let (mut major, mut minor) = (0, 0);
                (query(&raw mut major, &raw mut minor) == 0)
                    .then(|| Version::new(major.unsigned_abs(), minor.unsigned_abs(), 0))
            }
            Library::CublasLt | Library::Cublas => {
                let name = match library {
                    Library::CublasLt => "cublasLtGetProperty",
                    _ => "cublasGetProperty",
                };
                let query: unsafe extern "C" fn(c_int, *mut c_int) -> c_int = symbol(handle, name)?;
                // 0, 1 and 2 ask for the major, minor and patch numbers.
                let mut parts = [0; 3];
                for (which, part) in (0..).zip(&mut parts) {
                    if query(which, part) != 0 {
                        return None;
                    }
                }
                let [major, minor, patch] = parts.map(c_int::unsigned_abs);
                Some(Version::new(major, minor, patch))
            }
            Library::Nccl => {
                let query: unsafe extern "C" fn(*mut c_int) -> c_int =
                    symbol(handle, "ncclGetVersion")?;
                let mut number = 0;
                (query(&raw mut number) == 0).then(|| Version::from_nccl(number))
            }
            Library::Nvml => None,
        }
    }
}

fn has(library: &libloading::Library, name: &str) -> bool {
    // SAFETY: the address is looked at, not called.
    unsafe { library.get::<*const ()>(name) }.is_ok()
}

/// # Safety
/// `F` is the type of a pointer to the function of that name, and is not called once the library is
/// closed.
unsafe fn symbol<F: Copy>(library: &libloading::Library, name: &str) -> Option<F> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<F>(name) }.ok().map(|found| *found)
}

/// The file that a symbol was loaded from, as the system tells (Linux; nothing elsewhere).
fn path_of(library: &libloading::Library, name: &str) -> Option<PathBuf> {
    // SAFETY: the address is looked at, not called.
    let address = *unsafe { library.get::<*const ()>(name) }.ok()? as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| file_mapped_at(line, address))
}

/// Reads one line of a process's memory map: `7f..-7f.. r-xp offset device inode      path`.
fn file_mapped_at(line: &str, address: usize) -> Option<PathBuf> {
    let (range, _) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    let path = &line[line.find('/')?..];
    (start..end).contains(&address).then(|| PathBuf::from(path))
}

/// The loader starts its message with the file, which is reported beside it anyway.
fn without_prefix(message: &str, name: &str) -> String {
    let rest = message.strip_prefix(name).unwrap_or(message);
    rest.trim_start_matches([':', ' ']).to_owned()
}

#[cfg(test)]
mod tests;
