//! A file of measurements: what it may be, its text, and why it is refused.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::directory::{Profile, ProfileError, Sample};
use crate::presets;

crate::named! {
    /// What a file of measurements is.
    pub enum Format {
        /// A Chrome trace of `torch.profiler`.
        Kineto = "kineto",
        /// What nccl-tests print.
        NcclTests = "nccl-tests",
        /// What Megatron-LM prints while it trains.
        MegatronLog = "megatron-log",
        /// A system file of SimuMax.
        Simumax = "simumax",
    }
}

/// Why a file was not imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file could not be read.
    #[error("cannot read {path}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// No format is recognized.
    #[error(
        "{path} begins with `{found}`, which is no format of measurements; expected a trace of \
         torch.profiler, output of nccl-tests, a log of Megatron-LM or a system file of SimuMax \
         (--format says which it is)"
    )]
    Unrecognized {
        /// The file.
        path: PathBuf,
        /// Its first characters.
        found: String,
    },
    /// Something in the file is not as its format has it.
    #[error("{path}: {place}: found {found}; expected {expected}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line or key.
        place: String,
        /// What is there.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// Neither file nor caller says what was measured.
    #[error(
        "{path} does not say which device was measured; --device NAME does: cpu, or one of {known}"
    )]
    NoDevice {
        /// The file.
        path: PathBuf,
        /// The presets.
        known: String,
    },
    /// What the file says makes times that are none.
    #[error("{0}, as this file would make it")]
    Profile(#[from] ProfileError),
    /// The caller named an unknown device.
    #[error(transparent)]
    Device(#[from] presets::ClusterError),
    /// The file was read and holds no measurement.
    #[error("{path} is a file of {format} with nothing to import: {why}")]
    Nothing {
        /// The file.
        path: PathBuf,
        /// The format.
        format: &'static str,
        /// What is missing, and what would help.
        why: String,
    },
}

/// What profiles call the CPU.
pub(super) const CPU: &str = "cpu";

/// The first bytes of a gzip member (RFC 1952, section 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// A file with what the caller says about it.
pub(super) struct File<'a> {
    pub(super) path: &'a Path,
    pub(super) text: &'a str,
    pub(super) device: Option<&'a str>,
}

impl File<'_> {
    pub(super) fn malformed(
        &self,
        place: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> ImportError {
        ImportError::Malformed {
            path: self.path.to_owned(),
            place: place.into(),
            found: found.into(),
            expected: expected.into(),
        }
    }

    /// What the parser of JSON says, with its place.
    pub(super) fn no_json(&self, error: &serde_json::Error, expected: &str) -> ImportError {
        let place = format!("line {} column {}", error.line(), error.column());
        self.malformed(place, error.to_string(), expected)
    }

    pub(super) fn nothing(&self, format: Format, why: impl Into<String>) -> ImportError {
        ImportError::Nothing {
            path: self.path.to_owned(),
            format: format.name(),
            why: why.into(),
        }
    }

    /// The name of the device: the caller's word, else the file's.
    pub(super) fn device(&self, stated: Option<&str>) -> Result<String, ImportError> {
        if let Some(name) = self.device {
            return Ok(name.to_lowercase());
        }
        stated
            .map(str::to_owned)
            .ok_or_else(|| ImportError::NoDevice {
                path: self.path.to_owned(),
                known: presets::gpu_names().join(", "),
            })
    }

    /// The name of the file alone.
    pub(super) fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// The profile of what was read.
    pub(super) fn profile(&self, device: &str, samples: Vec<Sample>) -> Profile {
        Profile {
            machine: format!("imported from {}", self.name()),
            command: format!("moefold import {}", self.path.display()),
            ..Profile::of(device, samples)
        }
    }
}

pub(super) fn read(path: &Path) -> Result<String, ImportError> {
    let unreadable = |source| ImportError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let mut bytes = std::fs::read(path).map_err(unreadable)?;
    if bytes.starts_with(&GZIP) {
        let mut text = Vec::new();
        flate2::read::MultiGzDecoder::new(&bytes[..])
            .read_to_end(&mut text)
            .map_err(unreadable)?;
        bytes = text;
    }
    // Names of kernels and hosts may be in any encoding; no figure is.
    Ok(match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    })
}
