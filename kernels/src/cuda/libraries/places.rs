//! Where CUDA libraries are looked for, in order.
//!
//! 1. `MOEFOLD_CUDA`: folders separated by colons, of libraries or of a whole toolkit.
//! 2. The system's loader by file name: `LD_LIBRARY_PATH`, then its own cache and folders.
//! 3. `CUDA_HOME` and `CUDA_PATH`: a toolkit.
//! 4. `/usr/local/cuda` and `/usr/local/cuda-*`, the newest first.
//! 5. Where a driver is put aside: `/usr/local/nvidia/lib64`, `/usr/lib/wsl/lib`,
//!    `/run/opengl-driver/lib`.
//! 6. Wheels: `nvidia/*/lib` in the site-packages of `VIRTUAL_ENV`, `CONDA_PREFIX`, of the prefix of
//!    `python3` on `PATH` and of the user. Folders only: no Python is started.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// One place to look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Wherever the system's loader finds a file of the name.
    Loader,
    /// A folder, with what led to it (`CUDA_HOME`).
    Folder {
        /// The folder.
        path: PathBuf,
        /// The variable or convention that named it.
        because: &'static str,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loader => write!(f, "LD_LIBRARY_PATH and the system's loader"),
            Self::Folder { path, because } => write!(f, "{} ({because})", path.display()),
        }
    }
}

/// What the places depend on.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// `MOEFOLD_CUDA`.
    pub moefold_cuda: Option<OsString>,
    /// `CUDA_HOME`.
    pub cuda_home: Option<OsString>,
    /// `CUDA_PATH`.
    pub cuda_path: Option<OsString>,
    /// `VIRTUAL_ENV`.
    pub virtual_env: Option<OsString>,
    /// `CONDA_PREFIX`.
    pub conda_prefix: Option<OsString>,
    /// `PATH`.
    pub path: Option<OsString>,
    /// `HOME`.
    pub home: Option<OsString>,
    /// The root of the file system: `/`.
    pub root: PathBuf,
}

impl Environment {
    /// That of this process.
    pub fn of_this_process() -> Self {
        let read = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self {
            moefold_cuda: read("MOEFOLD_CUDA"),
            cuda_home: read("CUDA_HOME"),
            cuda_path: read("CUDA_PATH"),
            virtual_env: read("VIRTUAL_ENV"),
            conda_prefix: read("CONDA_PREFIX"),
            path: read("PATH"),
            home: read("HOME"),
            root: PathBuf::from("/"),
        }
    }
}

/// The places to look in, in order. Folders that do not exist are left out, but for those that the
/// user named.
pub fn places(environment: &Environment) -> Vec<Place> {
    let mut found = Found::default();
    for folder in split(environment.moefold_cuda.as_ref()) {
        found.named(&folder, "MOEFOLD_CUDA");
        found.toolkit(&folder, "MOEFOLD_CUDA");
    }
    found.places.push(Place::Loader);
    for (home, because) in [
        (&environment.cuda_home, "CUDA_HOME"),
        (&environment.cuda_path, "CUDA_PATH"),
    ] {
        if let Some(home) = home {
            found.toolkit(Path::new(home), because);
        }
    }
    let local = environment.root.join("usr/local");
    found.toolkit(&local.join("cuda"), "a toolkit's usual place");
    for toolkit in newest_first(&local, "cuda-") {
        found.toolkit(&toolkit, "a toolkit's usual place");
    }
    for aside in [
        "usr/local/nvidia/lib64",
        "usr/lib/wsl/lib",
        "run/opengl-driver/lib",
    ] {
        found.folder(environment.root.join(aside), "a driver's usual place");
    }
    if let Some(prefix) = &environment.virtual_env {
        found.python(Path::new(prefix), "VIRTUAL_ENV");
    }
    if let Some(prefix) = &environment.conda_prefix {
        found.folder(Path::new(prefix).join("lib"), "CONDA_PREFIX");
        found.python(Path::new(prefix), "CONDA_PREFIX");
    }
    for prefix in python_prefixes(environment.path.as_ref()) {
        // Debian's Python has what pip installs for everyone in the next prefix.
        if prefix == environment.root.join("usr") {
            found.python(&local, "python3 on PATH");
        }
        found.python(&prefix, "python3 on PATH");
    }
    if let Some(home) = &environment.home {
        found.python(&Path::new(home).join(".local"), "pip install --user");
    }
    found.places
}

#[derive(Default)]
struct Found {
    places: Vec<Place>,
}

impl Found {
    /// A folder the user named: listed even when it is not there, so that a report shows the slip.
    fn named(&mut self, path: &Path, because: &'static str) {
        let place = Place::Folder {
            path: path.to_owned(),
            because,
        };
        if !self.places.contains(&place) {
            self.places.push(place);
        }
    }

    fn folder(&mut self, path: PathBuf, because: &'static str) {
        // `lib64` is often a link to `lib`.
        let Ok(resolved) = path.canonicalize() else {
            return;
        };
        let known = |place: &Place| match place {
            Place::Loader => false,
            Place::Folder { path, .. } => path.canonicalize().is_ok_and(|path| path == resolved),
        };
        if resolved.is_dir() && !self.places.iter().any(known) {
            self.places.push(Place::Folder { path, because });
        }
    }

    /// Where a CUDA toolkit keeps its libraries.
    fn toolkit(&mut self, home: &Path, because: &'static str) {
        self.folder(home.join("lib64"), because);
        self.folder(home.join("lib"), because);
        for target in children(&home.join("targets")) {
            self.folder(target.join("lib"), because);
        }
    }

    /// Where pip puts NVIDIA's wheels under a prefix.
    fn python(&mut self, prefix: &Path, because: &'static str) {
        for lib in [prefix.join("lib"), prefix.join("lib64")] {
            for python in newest_first(&lib, "python3") {
                for packages in ["site-packages", "dist-packages"] {
                    for wheel in children(&python.join(packages).join("nvidia")) {
                        self.folder(wheel.join("lib"), because);
                    }
                }
            }
        }
    }
}

fn split(list: Option<&OsString>) -> Vec<PathBuf> {
    list.map(|list| std::env::split_paths(list).collect::<Vec<_>>())
        .unwrap_or_default()
        .into_iter()
        .filter(|path| !path.as_os_str().is_empty())
        .collect()
}

/// The prefixes that the first `python3` on the path may belong to: a virtual environment's own, then
/// that of the installation its links lead to.
fn python_prefixes(path: Option<&OsString>) -> Vec<PathBuf> {
    let python = split(path)
        .into_iter()
        .map(|folder| folder.join("python3"))
        .find(|candidate| candidate.is_file());
    let Some(python) = python else {
        return Vec::new();
    };
    let resolved = python.canonicalize().unwrap_or_else(|_| python.clone());
    let mut prefixes: Vec<PathBuf> = [python, resolved]
        .iter()
        .filter_map(|python| Some(python.parent()?.parent()?.to_owned()))
        .collect();
    prefixes.dedup();
    prefixes
}

/// The folders in a folder, by name; none where it cannot be read.
fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found
}

/// The folders whose names are `prefix` and a version, the newest version first.
fn newest_first(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let version = |path: &Path| -> Option<Vec<u32>> {
        let name = path.file_name()?.to_str()?;
        let rest = name.strip_prefix(prefix)?;
        let parts = rest.split('.').filter(|part| !part.is_empty());
        parts.map(|part| part.parse().ok()).collect()
    };
    let mut found: Vec<(Vec<u32>, PathBuf)> = children(folder)
        .into_iter()
        .filter_map(|path| Some((version(&path)?, path)))
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests;
