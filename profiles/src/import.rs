//! Measurements that others made, as a [`Profile`].
//!
//! A file is read whole, recognized by its content, and turned into samples of the keys that prices are
//! asked for. What has no key is counted and named in the answer; nothing is guessed in silence. Each
//! format has a file here: [`kineto`] (traces of PyTorch's profiler), [`nccl`] (output of nccl-tests),
//! [`megatron`] (log lines of Megatron-LM) and [`simumax`] (system files of another simulator). Nothing
//! is written here: the caller saves the profile.

mod kineto;
mod megatron;
mod nccl;
mod simumax;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::directory::{Key, Profile, Sample, Taken};
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

/// What a caller may say about a file.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// What it is; else its content says.
    pub format: Option<Format>,
    /// The device it was measured on, a GPU preset or `cpu`; else the file says.
    pub device: Option<&'a str>,
}

/// What was read from a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// What the file is.
    pub format: Format,
    /// Its measurements. The date is empty where the file has none.
    pub profile: Profile,
    /// What became no sample, that with the most time first.
    pub left_out: Vec<LeftOut>,
    /// How the device spent the time of a trace.
    pub device_time: Option<DeviceTime>,
    /// What one should know about how the file was read, a sentence each.
    pub notes: Vec<String>,
}

/// Work of one name that became no sample.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LeftOut {
    /// The name in the file.
    pub name: String,
    /// Why it is left out.
    pub why: String,
    /// How often it is there.
    pub count: u64,
    /// Its time, seconds; absent where the file has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Its share of all the time of ops and collectives in the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
}

/// How a device spent the time from the first op of a trace to the end of the last, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DeviceTime {
    /// From the first op to the end of the last.
    pub span_s: f64,
    /// At least one op, copy or collective ran.
    pub busy_s: f64,
    /// Nothing ran: the device waited for its host, or for other ranks.
    pub idle_s: f64,
    /// A collective ran, waiting for its last rank included.
    pub collective_s: f64,
    /// A collective ran and nothing else.
    pub exposed_collective_s: f64,
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

/// Reads a file of measurements, compressed by gzip or not.
pub fn import(path: &Path, options: &Options<'_>) -> Result<Imported, ImportError> {
    if let Some(name) = options.device.filter(|name| *name != CPU) {
        presets::gpu(name)?;
    }
    let text = read(path)?;
    let format = match options.format {
        Some(format) => format,
        None => recognize(&text).ok_or_else(|| ImportError::Unrecognized {
            path: path.to_owned(),
            found: beginning(&text),
        })?,
    };
    let file = File {
        path,
        text: &text,
        device: options.device,
    };
    match format {
        Format::Kineto => kineto::read(&file),
        Format::NcclTests => nccl::read(&file),
        Format::MegatronLog => megatron::read(&file),
        Format::Simumax => simumax::read(&file),
    }
}

/// What profiles call the CPU.
const CPU: &str = "cpu";

/// The first bytes of a gzip member (RFC 1952, section 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// A file with what the caller says about it.
struct File<'a> {
    path: &'a Path,
    text: &'a str,
    device: Option<&'a str>,
}

impl File<'_> {
    fn malformed(
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
    fn no_json(&self, error: &serde_json::Error, expected: &str) -> ImportError {
        let place = format!("line {} column {}", error.line(), error.column());
        self.malformed(place, error.to_string(), expected)
    }

    fn nothing(&self, format: Format, why: impl Into<String>) -> ImportError {
        ImportError::Nothing {
            path: self.path.to_owned(),
            format: format.name(),
            why: why.into(),
        }
    }

    /// The name of the device: the caller's word, else the file's.
    fn device(&self, stated: Option<&str>) -> Result<String, ImportError> {
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
    fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// The profile of what was read.
    fn profile(&self, device: &str, samples: Vec<Sample>) -> Profile {
        Profile {
            machine: format!("imported from {}", self.name()),
            command: format!("moefold import {}", self.path.display()),
            ..Profile::of(device, samples)
        }
    }
}

fn read(path: &Path) -> Result<String, ImportError> {
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

/// The format that a text is in.
fn recognize(text: &str) -> Option<Format> {
    let text = text.trim_start_matches('\u{feff}').trim_start();
    if text.starts_with(['{', '[']) {
        return if text.contains("\"traceEvents\"") || text.starts_with('[') {
            Some(Format::Kineto)
        } else if text.contains("\"accelerator\"") && text.contains("\"networks\"") {
            Some(Format::Simumax)
        } else {
            None
        };
    }
    let mut lines = text.lines();
    lines.find_map(|line| {
        if nccl::is_header(line) {
            Some(Format::NcclTests)
        } else if megatron::is_iteration(line) {
            Some(Format::MegatronLog)
        } else {
            None
        }
    })
}

/// The first characters of a text, for a message.
fn beginning(text: &str) -> String {
    const SHOWN: usize = 40;
    let mut shown: String = text.trim_start().chars().take(SHOWN).collect();
    if text.trim_start().chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    shown.replace(char::is_control, " ")
}

/// The most ranks of a group that share an NVLink domain, where `of_host` of them share a host: a domain
/// may be larger than a host (`gb200-nvl72`), which the presets of the device's clusters say.
fn of_one_domain(device: &str, ranks: u32, of_host: u32) -> u32 {
    let clusters = presets::cluster_names()
        .into_iter()
        .filter(|&name| name != "local")
        .filter_map(|name| presets::cluster(name).ok());
    let wide = clusters
        .filter(|cluster| cluster.gpu.name.eq_ignore_ascii_case(device))
        .filter(|cluster| cluster.gpus_per_domain > cluster.gpus_per_node)
        .map(|cluster| cluster.gpus_per_domain)
        .max();
    wide.unwrap_or(of_host).max(of_host).min(ranks)
}

/// Timings by key, in the order of keys.
#[derive(Debug, Default)]
struct Timings(BTreeMap<Key, Vec<f64>>);

impl Timings {
    fn add(&mut self, key: Key, seconds: f64) {
        self.0.entry(key).or_default().push(seconds);
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn into_samples(self, taken: Taken) -> Vec<Sample> {
        let samples = self.0.into_iter();
        let sample = |(key, seconds)| Sample::of(key, taken, seconds);
        samples.map(sample).collect()
    }
}

/// What becomes no sample, by name and reason.
#[derive(Debug, Default)]
struct Leftovers(BTreeMap<(String, String), (u64, Option<f64>)>);

impl Leftovers {
    fn add(&mut self, name: &str, why: &str, seconds: Option<f64>) {
        let key = (name.to_owned(), why.to_owned());
        let (count, total) = self.0.entry(key).or_default();
        *count += 1;
        if let Some(seconds) = seconds {
            *total = Some(total.unwrap_or(0.0) + seconds);
        }
    }

    /// The list, that with the most time first; shares are of `total` seconds.
    fn into_list(self, total: Option<f64>) -> Vec<LeftOut> {
        let entries = self.0.into_iter();
        let mut list: Vec<LeftOut> = entries
            .map(|((name, why), (count, seconds))| LeftOut {
                name,
                why,
                count,
                seconds,
                share: seconds
                    .zip(total.filter(|&total| total > 0.0))
                    .map(|(seconds, total)| seconds / total),
            })
            .collect();
        let time = |item: &LeftOut| item.seconds.unwrap_or(0.0);
        list.sort_by(|a, b| {
            let by_time = time(b).total_cmp(&time(a));
            by_time
                .then(b.count.cmp(&a.count))
                .then(a.name.cmp(&b.name))
        });
        list
    }
}
