//! Log lines of Megatron-LM: `iteration N/ M | ... | elapsed time per iteration (ms): X | ... |
//! global batch size: B | ...`, and `memory (MB) | allocated: A | max allocated: B | ...`
//! (`megatron/training/training.py` and `utils.py`, functions `training_log` and `report_memory`).
//!
//! What launchers put before a line (ranks, dates) and fields that forks add are passed over. Some forks
//! print the mean after the time (`X/mean`): the time counts. The last line of a job that runs or was killed may be cut off, in
//! the middle of a number too: where lines end with `|` and that one does not, it is left out.

use super::gathered::{Imported, Leftovers};
use super::source::{File, Format, ImportError};
use crate::directory::MeasuredSteps;
use crate::units::{Bytes, MIB};

const ELAPSED: &str = "elapsed time per iteration (ms):";
const BATCH: &str = "global batch size:";
const MEMORY: &str = "memory (MB)";
const PEAK: &str = "max allocated:";

/// One logged iteration.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Iteration {
    number: u64,
    seconds: f64,
    batch: Option<u64>,
}

/// Whether a line says how long an iteration took.
pub(super) fn is_iteration(line: &str) -> bool {
    line.contains("iteration") && line.contains(ELAPSED)
}

pub(super) fn read(file: &File<'_>) -> Result<Imported, ImportError> {
    let mut iterations = Vec::new();
    let mut peak: Option<Bytes> = None;
    let (last, ends_line) = (file.text.lines().count(), file.text.ends_with('\n'));
    let is_whole = |line: &str| line.trim_end().ends_with('|');
    let (mut ends_whole, mut is_cut) = (false, false);
    for (index, line) in file.text.lines().enumerate() {
        if is_iteration(line) {
            if index + 1 == last && ends_whole && !is_whole(line) {
                is_cut = true;
                continue;
            }
            ends_whole |= is_whole(line);
            iterations.push(iteration(file, index + 1, line)?);
        } else if line.contains(MEMORY) && line.contains(PEAK) && (index + 1 < last || ends_line) {
            let mib = number(file, index + 1, line, PEAK)?;
            let bytes = Bytes((mib * MIB as f64) as u64);
            peak = Some(peak.map_or(bytes, |other| other.max(bytes)));
        }
    }
    if iterations.is_empty() {
        let why = format!("no line has `iteration` and `{ELAPSED}`");
        return Err(file.nothing(Format::MegatronLog, why));
    }
    let device = file.device(None)?;
    let batch = iterations.iter().rev().find_map(|one| one.batch);
    let mut leftovers = Leftovers::default();
    let kept = steady(&iterations, batch, &mut leftovers);
    if is_cut {
        leftovers.add("iteration", "its line is cut off", None);
    }
    let (from, to) = (kept[0].number, kept[kept.len() - 1].number);
    let mut profile = file.profile(&device, Vec::new());
    profile.steps = Some(MeasuredSteps {
        seconds: kept.iter().map(|iteration| iteration.seconds).collect(),
        global_batch: batch,
        peak_allocated: peak,
        source: format!(
            "{}: {} of {} logged iterations, from {from} to {to}",
            file.name(),
            kept.len(),
            iterations.len()
        ),
    });
    let notes = profile.steps.iter().filter_map(MeasuredSteps::note);
    let notes = notes.map(str::to_owned).collect();
    Ok(Imported {
        format: Format::MegatronLog,
        profile,
        left_out: leftovers.into_list(None),
        device_time: None,
        notes,
    })
}

/// The iterations with the batch that the log ends with, without those of warm-up: the first tenth of a
/// run, one at least, where a run begins with the log and wherever the numbers of iterations fall back.
/// All of them where nothing would be left.
fn steady(
    iterations: &[Iteration],
    batch: Option<u64>,
    leftovers: &mut Leftovers,
) -> Vec<Iteration> {
    let is_other = |one: &Iteration| one.batch.is_some() && one.batch != batch;
    let mut kept = Vec::new();
    for run in iterations.chunk_by(|a, b| a.number < b.number) {
        let warmup = run.len().div_ceil(10);
        for (index, &iteration) in run.iter().enumerate() {
            let why = if index < warmup {
                "warm-up"
            } else if is_other(&iteration) {
                "another global batch than the last one's"
            } else {
                kept.push(iteration);
                continue;
            };
            leftovers.add("iteration", why, Some(iteration.seconds));
        }
    }
    if kept.is_empty() {
        *leftovers = Leftovers::default();
        kept = iterations.to_vec();
        kept.retain(|iteration| !is_other(iteration));
    }
    kept
}

fn iteration(file: &File<'_>, line: usize, text: &str) -> Result<Iteration, ImportError> {
    let after = text.split("iteration").nth(1).unwrap_or_default();
    let digits = after.trim_start().split(['/', ' ']).next();
    let number = digits.unwrap_or_default().parse().map_err(|_| {
        let expected = "`iteration N/ M`, N a whole number";
        file.malformed(
            format!("line {line}"),
            format!("`{}`", text.trim()),
            expected,
        )
    })?;
    let milliseconds = self::number(file, line, text, ELAPSED)?;
    let batch = if text.contains(BATCH) {
        Some(self::number(file, line, text, BATCH)? as u64)
    } else {
        None
    };
    Ok(Iteration {
        number,
        seconds: milliseconds / 1e3,
        batch,
    })
}

/// The number above 0 after a label.
fn number(file: &File<'_>, line: usize, text: &str, label: &str) -> Result<f64, ImportError> {
    let after = text.split_once(label).map_or("", |(_, after)| after);
    let word = after.trim_start().split([' ', '|', '/', ',']).next();
    let word = word.unwrap_or_default();
    match word.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err(file.malformed(
            format!("line {line}, `{label}`"),
            format!("`{word}`"),
            "a number above 0",
        )),
    }
}
