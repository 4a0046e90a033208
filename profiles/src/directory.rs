//! Profile directories: what was measured here, with where and how.
//!
//! A profile is raw samples with provenance, one file `profile.json` in a directory of its own.
//! Medians, spread and prices are derived when it is read ([`crate::pricing`]); nothing is averaged
//! before it is stored.

use std::iter::Sum;
use std::ops::Add;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::calibration::Calibration;
use crate::cluster::Cluster;
use crate::collective::Collective;
use crate::files::write_atomically;
use crate::host::HostCost;
use crate::op::{Op, is_shape};
use crate::statistics;
use crate::units::{Bytes, Seconds};

/// Version of the format of `profile.json`.
pub const PROFILE_VERSION: u32 = 3;

/// The file in a profile directory.
pub const PROFILE_FILE: &str = "profile.json";

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Key {
    /// A device operation.
    Op(Op),
    /// A collective.
    Collective(Collective),
    /// Something between the device and its host.
    Host(HostCost),
}

/// Times that are none: less than light takes for a micrometre, more than 30 years.
const SHORTEST_S: f64 = 1e-15;
const LONGEST_S: f64 = 1e9;
/// And the most times that waits are of.
const MOST_WAITS: f64 = 1e9;

/// What is expected of a number of bytes.
const BYTES: &str = "bytes that memory holds";

impl Key {
    /// What of a key from a file nothing has, where in it, and what would do.
    fn wrong(&self) -> Option<(String, String, String)> {
        let no_size = |bytes: Bytes| (!is_shape(&[bytes.0])).then(|| bytes.0.to_string());
        match self {
            Self::Op(op) => {
                let (name, found, expected) = op.wrong()?;
                Some((format!("op.{name}"), found, expected))
            }
            Self::Collective(collective) => {
                let of = |name: &str| format!("collective.{name}");
                for (name, ranks) in [
                    ("ranks", collective.ranks),
                    ("ranks_per_domain", collective.ranks_per_domain),
                ] {
                    if ranks == 0 {
                        return Some((of(name), "0".to_owned(), "at least 1".to_owned()));
                    }
                }
                let found = no_size(collective.bytes)?;
                Some((of("bytes"), found, BYTES.to_owned()))
            }
            Self::Host(cost) => {
                let HostCost::Copy { bytes, .. } = cost else {
                    return None;
                };
                let found = no_size(*bytes)?;
                Some(("host.bytes".to_owned(), found, BYTES.to_owned()))
            }
        }
    }

    /// The name in tables and traces.
    pub fn stem(&self) -> &'static str {
        match self {
            Self::Op(op) => op.stem(),
            Self::Collective(collective) => collective.kind.stem(),
            Self::Host(cost) => cost.stem(),
        }
    }
}

crate::named! {
    /// What surrounded an op while it was timed. Prices prefer the first that a key has.
    pub enum Taken {
        /// Steps of training: operands as warm and memory as new as a step leaves them, other ranks beside.
        Training = "training",
        /// Runs by themselves, with operands that were not in a core's own caches.
        Cold = "cold",
        /// Runs by themselves, back to back, with whatever caches held.
        Repeated = "repeated",
    }
}

/// Repeated timings of one key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// What was timed.
    pub key: Key,
    /// Under what conditions.
    pub taken: Taken,
    /// Rows of the fullest group over the mean, where a grouped product was given uneven groups. Such
    /// samples show what skew costs; prices come from the even ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skew: Option<f64>,
    /// Raw timings after warm-up, seconds each: of a collective, of the exchange once all ranks are there.
    pub seconds: Vec<f64>,
    /// Of a collective, what ranks waited for the last of them to come to it. Empty where that was not measured, and where ranks
    /// were made to begin together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<Wait>,
}

/// What a rank waited at a collective, each time that it came to it or several times together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<f64>", into = "Vec<f64>")]
pub struct Wait {
    /// Seconds until the last rank was there.
    pub waited_s: f64,
    /// Seconds since it had last met others.
    pub apart_s: f64,
    /// How many times that was; 0 where nobody said, as earlier profiles do not.
    pub times: u64,
}

impl Wait {
    /// One time.
    pub fn once([waited_s, apart_s]: [f64; 2]) -> Self {
        Self {
            waited_s,
            apart_s,
            times: 1,
        }
    }
}

impl Add for Wait {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            waited_s: self.waited_s + other.waited_s,
            apart_s: self.apart_s + other.apart_s,
            times: self.times + other.times,
        }
    }
}

impl Sum for Wait {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Self::add)
    }
}

impl TryFrom<Vec<f64>> for Wait {
    type Error = String;

    fn try_from(numbers: Vec<f64>) -> Result<Self, String> {
        match numbers[..] {
            [waited_s, apart_s] => Ok(Self {
                waited_s,
                apart_s,
                times: 0,
            }),
            [waited_s, apart_s, times]
                if (1.0..=MOST_WAITS).contains(&times) && times.fract() == 0.0 =>
            {
                Ok(Self {
                    waited_s,
                    apart_s,
                    times: times as u64,
                })
            }
            _ => Err(format!(
                "waits: {numbers:?}: expected seconds waited, seconds apart, and how many times that was, from 1 to 1e9"
            )),
        }
    }
}

impl From<Wait> for Vec<f64> {
    fn from(wait: Wait) -> Self {
        let mut numbers = vec![wait.waited_s, wait.apart_s];
        numbers.extend((wait.times > 0).then_some(wait.times as f64));
        numbers
    }
}

/// A profile directory's content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Version of this format, [`PROFILE_VERSION`].
    pub version: u32,
    /// The device, as [`crate::Gpu::name`] has it (`cpu`, `h100`).
    pub device: String,
    /// What its vendor calls it, where it is not the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
    /// Whether all ranks ran on one device. Its collectives are copies within one memory then, which
    /// says nothing of links, and no price comes from them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared_device: bool,
    /// What a rank's device took of its memory beside tensors, where it is not the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<OverheadBytes>,
    /// The host: processor, memory, system, in words.
    pub machine: String,
    /// Cores the process could use.
    pub cores: u32,
    /// Ranks that ran at the same time when the samples were taken.
    pub concurrent_ranks: u32,
    /// Driver, compiler and library versions, `name version` each.
    pub versions: Vec<String>,
    /// Clocks, in words, where they are known; else empty.
    pub clocks: String,
    /// Seconds that a fixed piece of work took on all cores before samples were taken and after, where they are of a CPU whose
    /// ranks are threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace_s: Option<[f64; 2]>,
    /// When, as RFC 3339.
    pub date: String,
    /// The command that measured.
    pub command: String,
    /// Steps of training that were timed as a whole, where there are some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<MeasuredSteps>,
    /// What steps of known layouts were fitted to, where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// Raw samples.
    pub samples: Vec<Sample>,
}

/// Optimizer steps of one training run, timed as a whole by whatever ran them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredSteps {
    /// Wall seconds a step, in the order of steps; steps of warm-up are left out.
    pub seconds: Vec<f64>,
    /// Sequences a step over all ranks, where the source says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub global_batch: Option<u64>,
    /// Most memory that tensors of one rank had allocated, of the worst rank that the source names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_allocated: Option<Bytes>,
    /// Where the figures are from, in words: the file, and which of its steps.
    pub source: String,
}

impl MeasuredSteps {
    /// The median step, for a plan whose steps have so many sequences. Where it is of another, what was found and what
    /// was expected.
    pub fn median_of(&self, global_batch: u64) -> Result<f64, String> {
        if let Some(found) = self.global_batch.filter(|&found| found != global_batch) {
            return Err(format!(
                "found steps of {found} sequences, expected {global_batch}, the plan's global batch"
            ));
        }
        let median = statistics::median(self.seconds.clone());
        median.ok_or_else(|| "found no steps, expected at least one".to_owned())
    }

    /// What one should know before believing them, where there is something.
    pub fn note(&self) -> Option<&'static str> {
        (self.seconds.len() == 1)
            .then_some("the measurement has one step, which may be one of warm-up")
    }
}

/// Device memory beside the tensors of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverheadBytes {
    /// Taken by opening the device: the CUDA context, and what the driver reserves for it.
    pub context: Bytes,
    /// Workspaces that libraries were given.
    pub workspaces: Bytes,
    /// Taken since by other means: code of kernels and what they spill, memory that libraries allocate
    /// themselves, and whatever other programs took meanwhile.
    pub other: Bytes,
    /// Taken already when the device was opened, by other programs and the driver: no part of the
    /// overhead. Absent where NVML was not there to say; `context` has it then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub others: Option<Bytes>,
}

impl OverheadBytes {
    /// All that the rank took.
    pub fn total(&self) -> Bytes {
        self.context + self.workspaces + self.other
    }
}

/// Why a profile was refused.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file could not be read.
    #[error("cannot read the profile {path} (`moefold profile --out DIR` writes one)")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The directory or file could not be written.
    #[error("cannot write the profile {path}")]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not JSON, or a key or value that a profile does not have.
    #[error("{path} is not a profile: {message}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What the parser said, with the line.
        message: String,
    },
    /// Written by another version of the program.
    #[error(
        "{path} has profile version {found}; this program reads version {PROFILE_VERSION}: measure again"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version in the file.
        found: String,
    },
    /// A value that no measurement has.
    #[error("{path}: `{key}` is {found}; expected {expected}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value in the file.
        found: String,
        /// What would work.
        expected: String,
    },
    /// Measured on a device that the cluster does not have.
    #[error(
        "the profile was measured on `{found}` and the cluster {cluster} has `{expected}`: \
         its times say nothing there; measure on one of its devices, or leave the profile out"
    )]
    Device {
        /// The cluster.
        cluster: String,
        /// The profile's device.
        found: String,
        /// The cluster's device.
        expected: String,
    },
}

impl Sample {
    /// Timings of a key, evenly loaded, without waits.
    pub fn of(key: Key, taken: Taken, seconds: Vec<f64>) -> Self {
        Self {
            key,
            taken,
            skew: None,
            seconds,
            waits: Vec::new(),
        }
    }

    /// The median timing.
    pub fn median(&self) -> Seconds {
        Seconds(self.quantile(0.5))
    }

    /// Relative spread: the interquartile range over the median, 0 for a single timing.
    pub fn spread(&self) -> f64 {
        (self.quantile(0.75) - self.quantile(0.25)) / self.median().0
    }

    fn quantile(&self, q: f64) -> f64 {
        statistics::quantile(self.seconds.clone(), q).expect("a sample has at least one timing")
    }
}

impl Profile {
    /// Samples taken on a device, one rank on one core, of whose machine and time nothing is known.
    pub fn of(device: &str, samples: Vec<Sample>) -> Self {
        Self {
            version: PROFILE_VERSION,
            device: device.to_owned(),
            device_name: None,
            shared_device: false,
            overhead: None,
            machine: String::new(),
            cores: 1,
            concurrent_ranks: 1,
            versions: Vec::new(),
            clocks: String::new(),
            pace_s: None,
            date: String::new(),
            command: String::new(),
            steps: None,
            calibration: None,
            samples,
        }
    }

    /// Reads `dir/profile.json`.
    pub fn load(dir: &Path) -> Result<Self, ProfileError> {
        let path = dir.join(PROFILE_FILE);
        let text = std::fs::read_to_string(&path).map_err(|source| ProfileError::Unreadable {
            path: path.clone(),
            source,
        })?;
        Self::parse(&path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ProfileError> {
        let malformed = |error: serde_json::Error| ProfileError::Malformed {
            path: path.to_owned(),
            message: error.to_string(),
        };
        // The version first: another version may have other keys.
        let value: serde_json::Value = serde_json::from_str(text).map_err(malformed)?;
        let version = &value["version"];
        if version != PROFILE_VERSION {
            return Err(ProfileError::Version {
                path: path.to_owned(),
                found: version.to_string(),
            });
        }
        let profile: Self = serde_json::from_str(text).map_err(malformed)?;
        profile.validate(path)?;
        Ok(profile)
    }

    /// Writes `dir/profile.json` under a temporary name and renames it, so that a reader never sees
    /// half a file. The directory is created where it is missing.
    pub fn save(&self, dir: &Path) -> Result<(), ProfileError> {
        let path = dir.join(PROFILE_FILE);
        self.validate(&path)?;
        let unwritable = |source| ProfileError::Unwritable {
            path: path.clone(),
            source,
        };
        std::fs::create_dir_all(dir).map_err(unwritable)?;
        write_atomically(&path, |out| out.write_all(self.to_json().as_bytes())).map_err(unwritable)
    }

    /// Hash of the content (BLAKE3, hexadecimal): what a plan names as its source.
    pub fn hash(&self) -> String {
        blake3::hash(self.to_json().as_bytes()).to_hex().to_string()
    }

    /// Whether the profile was measured on the cluster's device.
    pub fn check(&self, cluster: &Cluster) -> Result<(), ProfileError> {
        if self.device.eq_ignore_ascii_case(&cluster.gpu.name) {
            return Ok(());
        }
        Err(ProfileError::Device {
            cluster: cluster.name.clone(),
            found: self.device.clone(),
            expected: cluster.gpu.name.clone(),
        })
    }

    fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a profile has only string keys");
        text.push('\n');
        text
    }

    pub(crate) fn validate(&self, path: &Path) -> Result<(), ProfileError> {
        let invalid = |key: &str, found: String, expected: &str| ProfileError::Invalid {
            path: path.to_owned(),
            key: key.to_owned(),
            found,
            expected: expected.to_owned(),
        };
        if self.version != PROFILE_VERSION {
            return Err(ProfileError::Version {
                path: path.to_owned(),
                found: self.version.to_string(),
            });
        }
        if self.cores == 0 {
            return Err(invalid("cores", "0".into(), "at least 1"));
        }
        if self.concurrent_ranks == 0 {
            return Err(invalid("concurrent_ranks", "0".into(), "at least 1"));
        }
        let timings = |key: &str, seconds: &[f64]| {
            if seconds.is_empty() {
                return Err(invalid(key, "empty".into(), "at least one timing"));
            }
            let wrong = |seconds: &&f64| !(SHORTEST_S..=LONGEST_S).contains(*seconds);
            match seconds.iter().find(wrong) {
                Some(seconds) => Err(invalid(
                    key,
                    seconds.to_string(),
                    "seconds from 1e-15 to 1e9",
                )),
                None => Ok(()),
            }
        };
        if let Some(pace_s) = &self.pace_s {
            timings("pace_s", pace_s)?;
        }
        if let Some(steps) = &self.steps {
            timings("steps.seconds", &steps.seconds)?;
        }
        if let Some((key, found)) = self.calibration.as_ref().and_then(Calibration::wrong) {
            let key = format!("calibration.{key}");
            return Err(invalid(&key, found.to_string(), "a number above 0"));
        }
        for (index, sample) in self.samples.iter().enumerate() {
            if let Some((key, found, expected)) = sample.key.wrong() {
                let key = format!("samples[{index}].key.{key}");
                return Err(invalid(&key, found, &expected));
            }
            timings(&format!("samples[{index}].seconds"), &sample.seconds)?;
            let wrong = |seconds: &f64| !(0.0..=LONGEST_S).contains(seconds);
            for (number, wait) in sample.waits.iter().enumerate() {
                if let Some(seconds) = [wait.waited_s, wait.apart_s].into_iter().find(wrong) {
                    let key = format!("samples[{index}].waits[{number}]");
                    return Err(invalid(&key, seconds.to_string(), "seconds from 0 to 1e9"));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibration::{Fitted, FittedStep};
    use crate::collective::CollectiveKind;
    use crate::presets;
    use crate::units::Bytes;
    use crate::{Dtype, Pass};

    fn profile() -> Profile {
        let permute = Key::Op(Op::Permute {
            rows: 8,
            dim: 4,
            pass: Pass::Forward,
            dtype: Dtype::F32,
        });
        let reduce = Key::Collective(Collective {
            kind: CollectiveKind::AllReduce,
            bytes: Bytes(1024),
            ranks: 4,
            ranks_per_domain: 4,
        });
        let samples = vec![
            Sample::of(permute, Taken::Cold, vec![3e-6, 1e-6, 2e-6, 10e-6]),
            Sample {
                skew: Some(2.5),
                waits: vec![
                    Wait::once([0.0, 2e-6]),
                    Wait {
                        times: 3,
                        ..Wait::once([1e-6, 1e-6])
                    },
                ],
                ..Sample::of(reduce, Taken::Training, vec![5e-6])
            },
        ];
        Profile {
            machine: "a processor, 20 GiB".into(),
            cores: 2,
            concurrent_ranks: 4,
            versions: vec!["moefold 0.1.0".into()],
            date: "2026-01-02T03:04:05Z".into(),
            command: "moefold profile".into(),
            steps: Some(MeasuredSteps {
                seconds: vec![0.75, 0.625],
                global_batch: Some(32),
                peak_allocated: None,
                source: "train.log, iterations 3 to 4".into(),
            }),
            calibration: Some(calibration()),
            ..Profile::of("cpu", samples)
        }
    }

    fn calibration() -> Calibration {
        let of = |factor| Fitted {
            factor,
            sigma: 0.03,
            prior_sigma: 0.25,
        };
        Calibration {
            stack: "megatron".into(),
            compute: of(1.25),
            network: of(1.5),
            host: of(2.0),
            covariance: [
                [0.0009, -0.0003, 0.0],
                [-0.0003, 0.0009, 0.0],
                [0.0, 0.0, 0.0009],
            ],
            residual_sigma: 0.04,
            steps: vec![FittedStep {
                source: "plan.json, 2.5".into(),
                measured_s: 2.5,
                before_s: 2.0,
                after_s: 2.45,
                left_out_s: None,
            }],
        }
    }

    #[test]
    fn golden_a_fitted_step_is_as_sure_as_its_parts() {
        let sigma = |shares| calibration().sigma(shares);
        // Variances of 0.03 and 0.04: a right triangle.
        assert!((sigma([1.0, 0.0, 0.0]) - 0.05).abs() < 1e-12);
        // What is known of a sum is more than of its parts where their errors make up for each other.
        let half = 0.0016_f64 + 0.25 * (0.0009 + 0.0009 - 0.0006);
        assert!((sigma([0.5, 0.5, 0.0]) - half.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn golden_median_and_spread() {
        let sample = &profile().samples[0];
        assert!((sample.median().0 - 2.5e-6).abs() < 1e-18);
        // Quartiles of 1, 2, 3, 10: 1.75 and 4.75.
        assert!((sample.spread() - 3.0 / 2.5).abs() < 1e-12);
        assert_eq!(profile().samples[1].spread(), 0.0);
    }

    #[test]
    fn law_a_profile_round_trips_with_its_hash() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let dir = dir.path().join("new");
        profile().save(&dir).expect("writable");
        let read = Profile::load(&dir).expect("readable");
        assert_eq!(read, profile());
        assert_eq!(read.hash(), profile().hash());
        let mut other = profile();
        other.samples[0].seconds[0] *= 2.0;
        assert_ne!(other.hash(), profile().hash());
        let left: Vec<_> = std::fs::read_dir(&dir).expect("listed").collect();
        assert_eq!(left.len(), 1, "the temporary file is gone");
    }

    #[test]
    fn refusals_name_the_file_and_what_is_wrong() {
        let check = |change: &dyn Fn(&str) -> String, part: &str| {
            let text = change(&profile().to_json());
            let error = Profile::parse(Path::new("p/profile.json"), &text).expect_err("refused");
            let error = error.to_string();
            assert!(
                error.contains("p/profile.json") && error.contains(part),
                "{error}"
            );
        };
        check(
            &|text| text.replace("\"version\": 3", "\"version\": 7"),
            "version 7",
        );
        check(&|text| text.replace("\"cores\"", "\"cpus\""), "cpus");
        check(
            &|text| text.replace("\"cores\": 2", "\"cores\": 0"),
            "`cores` is 0",
        );
        check(&|text| text.replace("5e-6", "-5e-6"), "samples[1].seconds");
        check(&|text| text.replace("5e-6", "5e-324"), "samples[1].seconds");
        check(&|text| text.replace("5e-6", "1e300"), "samples[1].seconds");
        check(
            &|text| text.replace("\"dim\": 4", "\"dim\": 0"),
            "`samples[0].key.op.dim` is 0; expected 1 to ",
        );
        check(
            &|text| text.replace("\"dim\": 4", "\"dim\": 9223372036854775808"),
            "`samples[0].key.op.dim` is 9223372036854775808",
        );
        check(
            &|text| text.replace("\"ranks\": 4,", "\"ranks\": 0,"),
            "`samples[1].key.collective.ranks` is 0",
        );
        check(
            &|text| text.replace("\"bytes\": 1024", "\"bytes\": 18446744073709551615"),
            "`samples[1].key.collective.bytes`",
        );
        check(&|text| text.replace("0.625", "-0.625"), "`steps.seconds`");
        let paced = "\"pace_s\": [0.01, 0], \"date\":";
        check(&|text| text.replace("\"date\":", paced), "`pace_s` is 0");
        check(
            &|text| text.replace("\"factor\": 1.5", "\"factor\": -1.5"),
            "`calibration.network.factor`",
        );
        check(
            &|text| text.replace("permute", "permutation"),
            "permutation",
        );
        check(&|_| "{".into(), "not a profile");
        let missing = Profile::load(Path::new("/nonexistent")).expect_err("refused");
        assert!(missing.to_string().contains("/nonexistent/profile.json"));
    }

    #[test]
    fn a_profile_of_another_device_is_refused() {
        let h100 = presets::cluster("dgx-h100").expect("a preset");
        let error = profile()
            .check(&h100)
            .expect_err("another device")
            .to_string();
        assert!(
            error.contains("`cpu`") && error.contains("`h100`"),
            "{error}"
        );
        assert!(profile().check(&presets::local(3)).is_ok());
    }
}
