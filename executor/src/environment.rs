//! [`Environment`]: the machine, software and command of a measurement or a run.
//!
//! A number without provenance is not a sample. What the system does not say is left out, never
//! guessed.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use moefold_kernels::cuda::libraries::{Library, driver_version, find};
use moefold_kernels::cuda::survey::Survey;
use moefold_profiles::presets::Machine;
use moefold_profiles::units::Bytes;
use serde::Serialize;

use crate::device::DeviceSpec;
use crate::options::Resumed;

/// Version of the format of `env.json`.
pub const ENV_VERSION: u32 = 1;

/// Where and how something ran; the file `env.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Environment {
    /// Format version, [`ENV_VERSION`].
    pub version: u32,
    /// Version of this program.
    pub moefold: String,
    /// Kind of device: `cpu` or `cuda`.
    pub device: String,
    /// Where that is `cuda`: the GPUs this process sees, and the libraries it calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda: Option<CudaEnvironment>,
    /// The processor's name, where the system says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processor: Option<String>,
    /// Vector instructions that the matrix kernels can use.
    pub features: Vec<&'static str>,
    /// Cores the process may use.
    pub cores: u32,
    /// Memory the process may use, bytes.
    pub memory_bytes: u64,
    /// Operating system and architecture.
    pub system: String,
    /// When, as RFC 3339 in UTC.
    pub date: String,
    /// The command line.
    pub command: Vec<String>,
    /// Rank threads.
    pub ranks: u32,
    /// Threads of each rank.
    pub threads_per_rank: u32,
    /// Of a run: the checkpoint that it went on from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed: Option<Resumed>,
}

/// GPUs and CUDA's libraries, as they say it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CudaEnvironment {
    /// Every GPU.
    pub gpus: Vec<GpuEnvironment>,
    /// The driver's release, the CUDA it speaks, and each library with its version.
    pub versions: Vec<String>,
    /// Clocks, temperature and power when this was asked, where the driver's tool is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clocks: Option<String>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuEnvironment {
    /// The vendor's name of it.
    pub name: String,
    /// Compute capability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capability: Option<String>,
    /// Memory in all, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// What was taken of it when the run began, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
}

impl CudaEnvironment {
    /// Asks driver and libraries; nothing is set up on a GPU.
    pub fn detect() -> Self {
        let survey = Survey::take();
        let release = survey.release.map(|release| format!("driver {release}"));
        let cuda = driver_version().map(|version| format!("CUDA {version}"));
        let libraries = Library::ALL
            .into_iter()
            .filter(|&library| library != Library::Driver)
            .filter_map(|library| {
                let version = find(library).found()?.version?;
                Some(format!("{} {version}", library.name()))
            });
        Self {
            gpus: survey
                .devices
                .into_iter()
                .map(|device| GpuEnvironment {
                    name: device.name,
                    capability: device
                        .capability
                        .map(|(major, minor)| format!("{major}.{minor}")),
                    memory_bytes: device.memory.map(|bytes| bytes.0),
                    memory_used_bytes: device.memory_used.map(|bytes| bytes.0),
                })
                .collect(),
            versions: release.into_iter().chain(cuda).chain(libraries).collect(),
            clocks: gpu_clocks(),
        }
    }
}

/// Clocks, temperature and power of the GPUs as `nvidia-smi` gives them, where it is there.
pub fn gpu_clocks() -> Option<String> {
    const FIELDS: &str = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,\
                          power.draw,power.limit";
    let output = Command::new("nvidia-smi")
        .args([&format!("--query-gpu={FIELDS}"), "--format=csv,noheader"])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

impl Environment {
    /// This process, now, with `ranks` ranks on `device`.
    pub fn detect(ranks: u32, device: &DeviceSpec) -> Self {
        let machine = Machine::detect();
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let system = [std::env::consts::OS, kernel.trim(), std::env::consts::ARCH];
        Self {
            version: ENV_VERSION,
            moefold: env!("CARGO_PKG_VERSION").to_owned(),
            device: device.name().to_owned(),
            cuda: (device.name() == "cuda").then(CudaEnvironment::detect),
            processor: std::fs::read_to_string("/proc/cpuinfo")
                .ok()
                .and_then(|text| processor_name(&text)),
            features: vector_features(),
            cores: machine.cores,
            memory_bytes: machine.memory.0,
            system: system
                .into_iter()
                .filter(|part| !part.is_empty())
                .collect::<Vec<_>>()
                .join(" "),
            date: rfc3339(SystemTime::now()),
            command: std::env::args_os()
                .map(|word| word.display().to_string())
                .collect(),
            ranks,
            threads_per_rank: device.threads_per_rank(ranks) as u32,
            resumed: None,
        }
    }

    /// This program and the libraries it calls, `name version` each.
    pub fn versions(&self) -> Vec<String> {
        let own = format!("moefold {}", self.moefold);
        let cuda = self.cuda.iter().flat_map(|cuda| cuda.versions.clone());
        [own].into_iter().chain(cuda).collect()
    }

    /// The host in words, for a profile.
    pub fn machine(&self) -> String {
        let processor = self.processor.as_deref().unwrap_or("unknown processor");
        let memory_gib = self.memory_bytes as f64 / (1_u64 << 30) as f64;
        format!(
            "{processor}, {} cores, {memory_gib:.1} GiB, {}",
            self.cores, self.system
        )
    }
}

/// The most that this process had of the host's memory so far, where the system says it (`VmHWM`, proc(5)).
pub fn resident_peak() -> Option<Bytes> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    high_water(&status)
}

fn high_water(status: &str) -> Option<Bytes> {
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(Bytes(kib * 1024))
}

/// The `model name` of `/proc/cpuinfo`.
fn processor_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))?;
    let (_, name) = line.split_once(':')?;
    Some(name.trim().to_owned())
}

#[cfg(target_arch = "x86_64")]
fn vector_features() -> Vec<&'static str> {
    let known = [
        ("avx2", std::is_x86_feature_detected!("avx2")),
        ("fma", std::is_x86_feature_detected!("fma")),
        ("avx512f", std::is_x86_feature_detected!("avx512f")),
    ];
    known
        .into_iter()
        .filter_map(|(name, present)| present.then_some(name))
        .collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn vector_features() -> Vec<&'static str> {
    Vec::new()
}

/// A moment in UTC, to the second. Days become dates by the proleptic Gregorian calendar (Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`).
pub fn rfc3339(moment: SystemTime) -> String {
    let seconds = moment
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, so that leap days come last in their year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn golden_dates() {
        let at = |seconds| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_704_067_199), "2023-12-31T23:59:59Z");
        assert_eq!(at(1_709_251_200), "2024-03-01T00:00:00Z");
    }

    #[test]
    fn law_every_day_of_four_centuries_follows_the_one_before() {
        let mut expected = (1970, 1, 1);
        for day in 0..146_097_u64 {
            let (year, month, date) = expected;
            let text = rfc3339(UNIX_EPOCH + Duration::from_secs(day * 86_400));
            assert_eq!(text, format!("{year:04}-{month:02}-{date:02}T00:00:00Z"));
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match month {
                2 if leap => 29,
                2 => 28,
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            expected = match (month, date) {
                (12, 31) => (year + 1, 1, 1),
                (_, date) if date == length => (year, month + 1, 1),
                _ => (year, month, date + 1),
            };
        }
    }

    #[test]
    fn a_process_says_how_much_memory_it_had() {
        let status = "Name:\tmoefold\nVmHWM:\t   12345 kB\nVmRSS:\t   12000 kB\n";
        assert_eq!(high_water(status), Some(Bytes(12345 * 1024)));
        assert_eq!(high_water("Name:\tmoefold\n"), None);
        let now = resident_peak();
        assert!(now.is_none_or(|now| now > Bytes(1 << 20)), "{now:?}");
    }

    #[test]
    fn this_machine_says_what_it_is() {
        let environment = Environment::detect(
            4,
            &DeviceSpec::Cpu {
                threads_per_rank: Some(1),
            },
        );
        assert!(environment.cores > 0 && environment.memory_bytes > 0);
        assert!(!environment.command.is_empty());
        assert_eq!(
            processor_name("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n").as_deref(),
            Some("A CPU @ 2 GHz")
        );
    }
}
