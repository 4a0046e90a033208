//! A file of measurements: what it may be, its text, and why it is refused.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use crate::directory::{Profile, ProfileError, Sample};
use crate::presets;
use crate::units::{Bytes, MIB};

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
    /// The file is compressed and holds more than is unpacked.
    #[error(
        "{path} unpacks to more than {most}, which is the most that is unpacked here; where that is right, unpack it \
         (gunzip --keep) and import what comes of it"
    )]
    Unpacked {
        /// The file.
        path: PathBuf,
        /// The bound.
        most: Bytes,
    },
    /// No format is recognized.
    #[error(
        "{path} {found}, which is no format of measurements; expected a trace of \
         torch.profiler, output of nccl-tests, a log of Megatron-LM or a system file of SimuMax \
         (--format says which it is)"
    )]
    Unrecognized {
        /// The file.
        path: PathBuf,
        /// How it begins, in words.
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
    #[error("this file would make a profile that is not valid")]
    Profile(#[from] ProfileError),
    /// A profile directory cannot be read.
    #[error(transparent)]
    Directory(ProfileError),
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

/// A file that gzip has packed is unpacked to so much, since a small one may hold any number of zeros. One that is not
/// packed takes what it takes on disk.
const UNPACKED_MOST: Bytes = Bytes(512 * MIB);

/// A line without what launchers put before it: `[1,0]<stdout>:` of `mpirun --tag-output`, with the name of the job and a space
/// behind it since Open MPI 5 (`[prterun-node-1@1,0]<stdout>: `), `0: ` of `srun --label`.
pub(super) fn untagged(line: &str) -> &str {
    let digits = |c: char| c.is_ascii_digit();
    let of_mpirun = line.strip_prefix('[').and_then(|rest| {
        let (_, rest) = rest.split_once(',')?;
        let rest = rest.trim_start_matches(digits).strip_prefix("]<std")?;
        let (stream, rest) = rest.split_once(">:")?;
        let is_stream = matches!(stream, "out" | "err");
        is_stream.then(|| rest.strip_prefix(' ').unwrap_or(rest))
    });
    let of_srun = || {
        let rest = line.trim_start().strip_prefix(digits)?;
        rest.trim_start_matches(digits).strip_prefix(": ")
    };
    of_mpirun.or_else(of_srun).unwrap_or(line)
}

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

/// The text of a file, compressed by gzip or not.
pub(super) fn read(path: &Path) -> Result<String, ImportError> {
    read_within(path, UNPACKED_MOST)
}

/// The same, which unpacks to at most so much.
fn read_within(path: &Path, most: Bytes) -> Result<String, ImportError> {
    let unreadable = |source| ImportError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let mut bytes = std::fs::read(path).map_err(unreadable)?;
    if bytes.starts_with(&GZIP) {
        let text = unpacked(&bytes, most).map_err(unreadable)?;
        bytes = text.ok_or_else(|| ImportError::Unpacked {
            path: path.to_owned(),
            most,
        })?;
    }
    // Names of kernels and hosts may be in any encoding; no figure is.
    Ok(match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    })
}

/// What gzip has packed; none where that is more than `most`, of which no more is unpacked either.
fn unpacked(bytes: &[u8], most: Bytes) -> io::Result<Option<Vec<u8>>> {
    let mut text = Vec::new();
    MultiGzDecoder::new(bytes)
        .take(most.0 + 1)
        .read_to_end(&mut text)?;
    Ok(Some(text).filter(|text| text.len() as u64 <= most.0))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut out = GzEncoder::new(Vec::new(), Compression::best());
        out.write_all(bytes).expect("memory takes bytes");
        out.finish().expect("memory takes bytes")
    }

    #[test]
    fn what_unpacks_to_more_than_the_bound_is_refused_however_it_is_packed() {
        let whole = vec![b' '; 1 << 20];
        let in_parts = [packed(&whole[..1 << 19]), packed(&whole[1 << 19..])].concat();
        for packed in [packed(&whole), in_parts] {
            assert!(packed.len() < 1 << 12);
            let most = |bytes| unpacked(&packed, Bytes(bytes)).expect("is gzip");
            assert_eq!(most(1 << 20).map(|text| text.len()), Some(1 << 20));
            assert_eq!(most((1 << 20) - 1), None);
        }
    }

    #[test]
    fn a_file_that_unpacks_to_more_than_the_bound_is_refused_with_it_and_a_way() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("trace.json.gz");
        std::fs::write(&path, packed(&[b' '; 4097])).expect("writable");
        assert!(read(&path).is_ok());
        let refused = read_within(&path, Bytes(4096)).expect_err("is too long");
        let refused = refused.to_string();
        assert!(
            refused.contains("unpacks to more than 4.00 KiB") && refused.contains("gunzip"),
            "{refused}"
        );
    }
}
