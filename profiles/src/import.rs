//! Measurements that others made, as a [profile](crate::Profile).
//!
//! A file is read whole, recognized by its content, and turned into samples of the keys that prices are
//! asked for. What has no key is counted and named in the answer; nothing is guessed in silence. Each
//! format has a file here: `kineto` (traces of PyTorch's profiler), `nccl` (output of nccl-tests),
//! `megatron` (log lines of Megatron-LM) and `simumax` (system files of another simulator). Nothing
//! is written here: the caller saves the profile.

mod gathered;
mod kineto;
mod megatron;
mod nccl;
mod simumax;
mod source;

use std::path::Path;

pub use gathered::{DeviceTime, Imported, LeftOut};
pub use source::{Format, ImportError};

use crate::directory::{MeasuredSteps, Profile};
use crate::presets;
use source::{CPU, File};

/// What a caller may say about a file.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// What it is; else its content says.
    pub format: Option<Format>,
    /// The device it was measured on, a GPU preset or `cpu`; else the file says.
    pub device: Option<&'a str>,
}

/// Reads a file of measurements, compressed by gzip or not.
pub fn import(path: &Path, options: &Options<'_>) -> Result<Imported, ImportError> {
    if let Some(name) = options.device.filter(|name| *name != CPU) {
        presets::gpu(name)?;
    }
    let text = source::read(path)?;
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
    let imported = match format {
        Format::Kineto => kineto::read(&file),
        Format::NcclTests => nccl::read(&file),
        Format::MegatronLog => megatron::read(&file),
        Format::Simumax => simumax::read(&file),
    }?;
    // Numbers that are legal one by one may make times that are none.
    imported.profile.validate(path)?;
    Ok(imported)
}

/// The text of a file, compressed by gzip or not.
pub fn text(path: &Path) -> Result<String, ImportError> {
    source::read(path)
}

/// Whether a text is a log of Megatron-LM with lines of steps.
pub fn is_log(text: &str) -> bool {
    recognize(text) == Some(Format::MegatronLog)
}

/// The steps that a profile directory or a log of Megatron-LM holds; a directory may have none.
pub fn steps(path: &Path) -> Result<Option<MeasuredSteps>, ImportError> {
    if path.is_dir() {
        let profile = Profile::load(path).map_err(ImportError::Directory)?;
        return Ok(profile.steps);
    }
    let options = Options {
        format: Some(Format::MegatronLog),
        // Whose steps they are, whoever asks knows.
        device: Some(CPU),
    };
    Ok(import(path, &options)?.profile.steps)
}

/// The format that a text is in.
fn recognize(text: &str) -> Option<Format> {
    let text = text.trim_start_matches('\u{feff}').trim_start();
    // Lines of a log begin with a date in brackets, or with what launchers put there.
    if !text.starts_with('{') {
        let of_line = |line: &str| {
            if nccl::is_header(line) {
                Some(Format::NcclTests)
            } else if megatron::is_iteration(line) {
                Some(Format::MegatronLog)
            } else {
                None
            }
        };
        let found = text.lines().find_map(of_line);
        return found.or_else(|| text.starts_with('[').then_some(Format::Kineto));
    }
    if text.contains("\"traceEvents\"") {
        Some(Format::Kineto)
    } else if text.contains("\"accelerator\"") && text.contains("\"networks\"") {
        Some(Format::Simumax)
    } else {
        None
    }
}

/// How a text begins, for a message.
fn beginning(text: &str) -> String {
    const SHOWN: usize = 40;
    let text = text.trim();
    if text.is_empty() {
        return "is empty".to_owned();
    }
    let mut shown: String = text.chars().take(SHOWN).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    format!("begins with `{}`", shown.replace(char::is_control, " "))
}
