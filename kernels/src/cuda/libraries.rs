//! The libraries of CUDA, found and opened at run time. Their absence is an answer.
//!
//! The program links none of them, so one binary runs with and without a GPU. [`find`] looks in the
//! places of [`places`] once per library and says what it found: a library, nothing (with where it
//! looked), or something that does not work (with why). [`gate`] turns that into the tokens that
//! device code asks for first.
//!
//! Functions are called as [`Found::symbol`] gives them. The crate `cudarc` declares their types; its
//! functions are never called, because they open libraries by name alone and panic when one, or one
//! of its symbols, is missing.
#![expect(unsafe_code, reason = "hands on symbols; the promise is the caller's")]

use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;

pub mod gate;
mod open;
pub mod places;
mod version;

pub use gate::{CublasLt, Driver, Nccl, NoGpu, Nvrtc, Unusable};
pub use version::Version;

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
        // Majors whose interface is known here.
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
                Some((Version::new(12, 0, 0), "its interface is that of 12"))
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
    handle: libloading::Library,
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
        open::has(&self.handle, symbol)
    }

    /// The function of that name, where the library has one.
    ///
    /// # Safety
    /// `F` is the type of a pointer to that very function. (A library that was found is never closed.)
    pub unsafe fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise.
        unsafe { open::symbol(&self.handle, name) }
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
            match open::open(library, &candidate) {
                Ok(found) => {
                    return Answer::Found(Found {
                        passed_over,
                        ..found
                    });
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

#[cfg(test)]
mod tests;
