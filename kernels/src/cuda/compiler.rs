//! [`Compiler`]: a program's machine code from wherever it is found: a pack, the cache, NVRTC.
//!
//! Compiling takes a tenth of a second a program and needs NVRTC; both are for the first time only.
//! A pack (`MOEFOLD_PACK`) brings what was compiled on another machine, the cache keeps what was
//! compiled on this one. Where all three fail, the error says what was looked for and what to install.

use std::path::Path;

use rayon::prelude::*;

use crate::cuda::cache::Directory;
use crate::cuda::cache::pack::Pack;
use crate::cuda::error::DeviceError;
use crate::cuda::libraries::Version;
use crate::cuda::nvrtc::{Cubin, Nvrtc};
use crate::cuda::program::{Architecture, Program};

/// Gives machine code of programs. Shared by the threads that compile.
pub(crate) struct Compiler {
    pack: Option<Pack>,
    cache: Option<Directory>,
    /// Why there is none, otherwise.
    nvrtc: Result<Nvrtc, DeviceError>,
}

impl Compiler {
    /// With what the environment names: `MOEFOLD_PACK`, the cache directory, the NVRTC that is
    /// found. A pack that is named has to be readable.
    pub(crate) fn from_environment() -> Result<Self, DeviceError> {
        let pack = std::env::var_os("MOEFOLD_PACK")
            .filter(|path| !path.is_empty())
            .map(|path| open_pack(Path::new(&path)))
            .transpose()?;
        Ok(Self::new(pack, Directory::cache(), Nvrtc::find()))
    }

    pub(crate) fn new(
        pack: Option<Pack>,
        cache: Option<Directory>,
        nvrtc: Result<Nvrtc, DeviceError>,
    ) -> Self {
        Self { pack, cache, nvrtc }
    }

    /// The version of NVRTC, or why there is none.
    pub(crate) fn version(&self) -> Result<Version, DeviceError> {
        match &self.nvrtc {
            Ok(nvrtc) => Ok(nvrtc.version()),
            Err(error) => Err(error.clone()),
        }
    }

    /// Machine code of one program that runs on `architecture`.
    pub(crate) fn cubin(
        &self,
        program: &Program,
        architecture: Architecture,
    ) -> Result<Cubin, DeviceError> {
        let architecture = architecture.code();
        if let Some(pack) = &self.pack
            && let Some(cubin) = pack.get(program, architecture)
        {
            return Ok(cubin);
        }
        let nvrtc = match &self.nvrtc {
            Ok(nvrtc) => nvrtc,
            Err(missing) => {
                let cached = self.cache.as_ref();
                return cached
                    .and_then(|cache| cache.get_any(program, architecture))
                    .ok_or_else(|| self.nowhere(program, architecture, missing));
            }
        };
        let version = nvrtc.version();
        if let Some(cache) = &self.cache
            && let Some(cubin) = cache.get(program, architecture, version)
        {
            return Ok(cubin);
        }
        let cubin = nvrtc.compile(program, architecture)?;
        if let Some(cache) = &self.cache {
            // A cache that cannot be written costs the next start its time and nothing else.
            let _ = cache.put(program, architecture, version, &cubin);
        }
        Ok(cubin)
    }

    /// Machine code of many programs, compiled on all cores; in the order asked for.
    pub(crate) fn cubins(
        &self,
        programs: &[(Program, Architecture)],
    ) -> Result<Vec<Cubin>, DeviceError> {
        programs
            .par_iter()
            .map(|(program, architecture)| self.cubin(program, *architecture))
            .collect()
    }

    fn nowhere(
        &self,
        program: &Program,
        architecture: Architecture,
        missing: &DeviceError,
    ) -> DeviceError {
        let pack = match &self.pack {
            Some(_) => "the pack named by MOEFOLD_PACK does not have it",
            None => "MOEFOLD_PACK names no pack",
        };
        let cache = match &self.cache {
            Some(Directory(path)) => format!("nor does the cache {}", path.display()),
            None => "there is no cache directory (MOEFOLD_CACHE, HOME)".to_owned(),
        };
        DeviceError {
            detail: format!(
                "no machine code of {program} for {architecture}: {pack}, {cache}, and NVRTC is not \
                 there to compile it: {}. Install it with `pip install nvidia-cuda-nvrtc`, or bring \
                 a pack written elsewhere by `moefold kernels --out FILE`",
                missing.detail
            ),
            ..missing.clone()
        }
    }
}

/// Opens a pack that the user named.
fn open_pack(path: &Path) -> Result<Pack, DeviceError> {
    Pack::open(path)
        .map_err(|error| DeviceError::new("MOEFOLD_PACK", format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests;
