//! One part of a check, in a process of its own: a kernel that hangs or breaks the device's context
//! ends that process and not the check.

use std::io;

use moefold_kernels::check::{self, Case, Sizes};
use moefold_kernels::cuda::model;
use moefold_kernels::{Device, Dtype, catch};
use serde::{Deserialize, Serialize};

use crate::{Error, Options};

/// What inputs are drawn from.
pub(crate) const SEED: u64 = 1;

/// The part that measures what times are held against.
pub(crate) const CEILINGS: &str = "ceilings";

/// The part that confirms the emulator's model of the hardware.
pub(crate) const HARDWARE: &str = "hardware";

/// What a part covers: the cases of one op at one set of sizes in one dtype.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// Name of the sizes.
    pub(crate) sizes: String,
    pub(crate) dtype: Dtype,
    /// The op's stem (`grouped_gemm`), or [`CEILINGS`] or [`HARDWARE`].
    pub(crate) op: String,
    /// Whether times are taken, of cases that another part compares.
    pub(crate) timed: bool,
    /// Cases that an earlier process of this part ran or died of.
    pub(crate) skip: Vec<String>,
}

impl Part {
    fn skips(&self, case: &str) -> bool {
        self.skip.iter().any(|skipped| skipped == case)
    }
}

/// What became of one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) case: String,
    pub(crate) sizes: String,
    pub(crate) dtype: Dtype,
    pub(crate) flops: f64,
    pub(crate) bytes: f64,
    pub(crate) matrix: bool,
    pub(crate) outcome: Outcome,
}

impl Line {
    /// Whether this and `other` are of the same case.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        (&self.case, &self.sizes, self.dtype) == (&other.case, &other.sizes, other.dtype)
    }

    /// Whether it ran and every output is right.
    pub(crate) fn is_right(&self) -> bool {
        match &self.outcome {
            Outcome::Ran { outputs, .. } => {
                !outputs.is_empty() && outputs.iter().all(|output| output.passes)
            }
            Outcome::Failed(_) => false,
        }
    }

    /// Takes over what became of the same case when it was timed; a wrong one keeps no time.
    pub(crate) fn take_time(&mut self, timed: Outcome) {
        if !self.is_right() {
            return;
        }
        match (&mut self.outcome, timed) {
            (Outcome::Ran { time, .. }, Outcome::Ran { time: taken, .. }) => *time = taken,
            (outcome, failed) => *outcome = failed,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// It ran; errors of its outputs against the reference, and its time where they are right and one
    /// was taken.
    Ran {
        outputs: Vec<Output>,
        time: Option<Time>,
    },
    /// The device failed, or the process did.
    Failed(String),
}

/// One output's distance from the reference's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Output {
    pub(crate) name: String,
    /// Null where it is no number.
    pub(crate) error: Option<f64>,
    pub(crate) worst_row: Option<f64>,
    pub(crate) tolerance: f64,
    pub(crate) passes: bool,
}

/// Times of a case, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Time {
    pub(crate) median_s: f64,
    pub(crate) quartiles_s: [f64; 2],
    pub(crate) runs: usize,
}

/// What the device reaches at most, as measured by the part `ceilings`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ceilings {
    pub(crate) copy_bytes_per_s: f64,
    pub(crate) dense_flops_per_s: f64,
}

/// What a part says, one JSON object a line, before each case and after it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    Begins(String),
    Ends(Line),
    Ceilings(Ceilings),
}

/// Runs a part in this process, as [`crate::check`] asks for it in the words of `--part`, and says how it
/// goes, each time one line that must be out before the call returns.
///
/// # Errors
/// [`Error::Part`] where `part` is no part, [`Error::CaseFailed`] where a case failed that has been said.
pub fn run(
    part: &str,
    options: &Options,
    say: &mut dyn FnMut(&str) -> io::Result<()>,
) -> Result<(), Error> {
    let part: Part = serde_json::from_str(part).map_err(Error::Part)?;
    if options.dies.as_ref() == Some(&part.op) {
        std::process::abort();
    }
    let mut say = |said: &Said| -> Result<(), Error> { Ok(say(&serde_json::to_string(said)?)?) };
    match part.op.as_str() {
        CEILINGS => say(&Said::Ceilings(ceilings(&part, options)?)),
        HARDWARE => hardware(&part, options, &mut say),
        _ => cases(&part, options, &mut say),
    }
}

fn ceilings(part: &Part, options: &Options) -> Result<Ceilings, Error> {
    let measured = catch(|| {
        let device = options.open(part.dtype)?;
        Ok(check::ceilings(&device, 1 << 30, 8192, 30))
    });
    let measured = measured.and_then(|inner| inner).map_err(Error::Device)?;
    Ok(Ceilings {
        copy_bytes_per_s: measured.copy_bytes_per_s,
        dense_flops_per_s: measured.dense_flops_per_s,
    })
}

/// Says what a part has to say.
type Say<'a> = dyn FnMut(&Said) -> Result<(), Error> + 'a;

fn cases(part: &Part, options: &Options, say: &mut Say<'_>) -> Result<(), Error> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let reference = Device::cpu(cores);
    let opened = catch(|| options.open(part.dtype)).and_then(|inner| inner);
    let device = opened.map_err(Error::Device)?;
    for case in cases_of(part) {
        say(&Said::Begins(case.name.clone()))?;
        let outcome = catch(|| one(&case, part, &device, &reference))
            .unwrap_or_else(|error| Some(Outcome::Failed(error.to_string())));
        let Some(outcome) = outcome else {
            continue;
        };
        let failed = matches!(outcome, Outcome::Failed(_));
        say(&Said::Ends(Line {
            sizes: part.sizes.clone(),
            dtype: part.dtype,
            flops: case.op.flops().0,
            bytes: case.bytes() as f64,
            matrix: case.op.is_matrix(),
            case: case.name,
            outcome,
        }))?;
        if failed {
            // What the device does after a failure says nothing.
            return Err(Error::CaseFailed);
        }
    }
    Ok(())
}

/// Holds the device to what the emulator claims of the hardware, instruction by instruction.
fn hardware(part: &Part, options: &Options, say: &mut Say<'_>) -> Result<(), Error> {
    let opened = catch(|| options.open(part.dtype)).and_then(|inner| inner);
    let opened = opened.map_err(Error::Device)?;
    let Some(properties) = opened.properties() else {
        return Ok(());
    };
    let mut cases = model::cases(properties.architecture);
    cases.retain(|case| !part.skips(&case.name));
    for case in cases {
        say(&Said::Begins(case.name.clone()))?;
        let found = catch(|| case.run(&opened));
        let failed = found.is_err();
        let outcome = match found {
            Err(error) => Outcome::Failed(error.to_string()),
            Ok(words) => {
                let differ = words.got.iter().zip(&words.want).filter(|(g, w)| g != w);
                let missing = words.got.len().abs_diff(words.want.len());
                let wrong = (differ.count() + missing) as f64;
                Outcome::Ran {
                    outputs: vec![Output {
                        name: format!("{} words", words.want.len()),
                        error: Some(wrong),
                        worst_row: None,
                        tolerance: 0.0,
                        passes: wrong == 0.0,
                    }],
                    time: None,
                }
            }
        };
        say(&Said::Ends(Line {
            sizes: part.sizes.clone(),
            dtype: part.dtype,
            flops: 0.0,
            bytes: 0.0,
            matrix: false,
            case: case.name,
            outcome,
        }))?;
        if failed {
            return Err(Error::CaseFailed);
        }
    }
    Ok(())
}

/// The cases a part covers.
pub(crate) fn cases_of(part: &Part) -> Vec<Case> {
    let all = Sizes::small().into_iter().chain(Sizes::real());
    let mut cases = Vec::new();
    for sizes in all.filter(|sizes| sizes.name == part.sizes) {
        cases.extend(check::cases(&sizes, part.dtype));
        if Sizes::real().contains(&sizes) {
            cases.push(check::dense_peer(&sizes, part.dtype));
        }
    }
    cases.retain(|case| stem(case) == part.op && !part.skips(&case.name));
    cases
}

/// The op of a case, without the function (`gemm` of `gemm::wgrad qkv`).
pub(crate) fn stem(case: &Case) -> &str {
    let end = case.name.find([':', ' ']).unwrap_or(case.name.len());
    &case.name[..end]
}

/// What becomes of one case; nothing where the device lacks what it is about.
fn one(case: &Case, part: &Part, device: &Device, reference: &Device) -> Option<Outcome> {
    if !case.is_for(device) {
        return None;
    }
    if part.timed {
        let timing = check::time(case, device, 5, 30);
        let time = Some(Time {
            median_s: timing.median_s,
            quartiles_s: timing.quartiles_s,
            runs: timing.runs,
        });
        let outputs = Vec::new();
        return Some(Outcome::Ran { outputs, time });
    }
    device.poison(true);
    let verdicts = check::agrees(case, device, reference, SEED);
    device.poison(false);
    let outputs = verdicts
        .iter()
        .map(|verdict| Output {
            name: verdict.output.to_owned(),
            error: verdict.error.is_finite().then_some(verdict.error),
            worst_row: verdict.worst_row.is_finite().then_some(verdict.worst_row),
            tolerance: verdict.tolerance,
            passes: verdict.passes(),
        })
        .collect();
    Some(Outcome::Ran {
        outputs,
        time: None,
    })
}
