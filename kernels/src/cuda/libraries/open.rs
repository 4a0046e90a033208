//! Opening one file as one library.
//!
//! # Why the unsafe code is sound
//!
//! Opening a library runs its initializers: these are the vendor's, and whoever can place a file on
//! the loader's path could run anything anyway. The functions called here are the version queries of
//! each library, with the signatures of their documentation, looked up before they are called; none
//! needs a device.
#![expect(
    unsafe_code,
    reason = "foreign libraries; see the module documentation"
)]

use std::ffi::c_int;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::{Found, Library, Version};

/// Opens one file, or one name for the loader to find, and sees whether it is what it should be. No
/// reason in the error: there is no such file.
pub(super) fn open(library: Library, candidate: &Path) -> Result<Found, Option<String>> {
    // SAFETY: see the module documentation.
    let handle = match unsafe { Handle::open(Some(candidate), RTLD_NOW | RTLD_LOCAL) } {
        Ok(handle) => libloading::Library::from(handle),
        Err(libloading::Error::DlOpen { source }) => {
            let why = source.to_string();
            let name = candidate.to_string_lossy();
            let no_such_file = why.contains(&*name) && why.contains("No such file");
            return Err((!no_such_file).then(|| without_prefix(&why, &name)));
        }
        Err(error) => return Err(Some(error.to_string())),
    };
    // A library that fails here is closed again, or the loader would answer its name with it.
    let Inspected { path, version } = inspect(library, &handle)?;
    Ok(Found {
        path: path.unwrap_or_else(|| candidate.to_owned()),
        version,
        passed_over: Vec::new(),
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

/// NVRTC opens its second half by name at its first compilation; a wheel's copy is on no path.
fn open_builtins(nvrtc: Option<&Path>, version: Version) -> Result<(), String> {
    let name = format!("libnvrtc-builtins.so.{}.{}", version.major, version.minor);
    let beside = nvrtc.map(|nvrtc| nvrtc.with_file_name(&name));
    for candidate in beside.into_iter().chain([PathBuf::from(&name)]) {
        // SAFETY: see the module documentation.
        if let Ok(handle) = unsafe { Handle::open(Some(candidate), RTLD_NOW | RTLD_LOCAL) } {
            std::mem::forget(handle);
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

pub(super) fn has(library: &libloading::Library, name: &str) -> bool {
    // SAFETY: the address is looked at, not called.
    unsafe { library.get::<*const ()>(name) }.is_ok()
}

/// # Safety
/// `F` is the type of a pointer to the function of that name, and is not called once the library is
/// closed.
pub(super) unsafe fn symbol<F: Copy>(library: &libloading::Library, name: &str) -> Option<F> {
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
pub(super) fn file_mapped_at(line: &str, address: usize) -> Option<PathBuf> {
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
