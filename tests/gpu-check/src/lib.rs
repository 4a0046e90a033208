//! Every kernel against its reference and against the clock on the GPU at hand, then training itself:
//! what `moefold gpu-check` does. Options in, a report out.
//!
//! It is for a machine that is at hand for minutes: it builds nothing, and what it has found so far is in
//! `gpu-check.json` and `gpu-check.md` after every part. The cases of each op run in a process of their own
//! with a deadline, and so does each command of a trial: a kernel that hangs or faults takes its process's
//! context with it. Those processes are the command line's own verbs: this crate is handed the
//! program, prints nothing and ends nothing, and what only the command line knows it asks of its
//! [`Caller`].

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use moefold_executor::environment::gpu_clocks;
use moefold_kernels::check::Sizes;
use moefold_kernels::{Device, DeviceError, Dtype};
use rayon::prelude::*;
use serde_json::Value;

mod apart;
mod deadline;
mod error;
mod part;
mod parts;
mod report;
mod sanitizer;
mod torch;
mod trials;

pub use error::Error;
pub use part::run as run_part;
pub use report::{Report, Summary};

use part::{CEILINGS, Said};
use parts::{is_wanted, parts};

/// Processes without times that run together: each is a context on the device, and at the sizes of models some
/// gigabytes on the host.
fn at_once() -> usize {
    thread::available_parallelism()
        .map_or(1, usize::from)
        .min(4)
}

/// What each item comes to, in their order, as many at a time as run together.
fn together<T: Sync, R: Send>(items: &[T], one: impl Fn(&T) -> R + Sync) -> Result<Vec<R>, Error> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(at_once());
    let pool = pool.build().map_err(io::Error::other)?;
    // Items are taken in their order, each when one before it has ended.
    let taken = items.iter().enumerate().par_bridge();
    let mut found: Vec<_> = pool.install(|| taken.map(|(at, item)| (at, one(item))).collect());
    found.sort_unstable_by_key(|(at, _)| *at);
    Ok(found.into_iter().map(|(_, came)| came).collect())
}

/// What a check covers and where it works.
#[derive(Debug, Clone)]
pub struct Options {
    /// The program whose verbs are run.
    pub program: PathBuf,
    /// How this check was started, for the report.
    pub command: String,
    /// Folder for `gpu-check.json`, `gpu-check.md` and what the trials leave.
    pub out: PathBuf,
    /// Which GPU, as the driver numbers them.
    pub device: u32,
    /// Whether the CPU takes the GPU's place, to try the check itself.
    pub rehearse: bool,
    /// Only the small sizes and the shortest trials: right or wrong, no times.
    pub small: bool,
    /// Only ops and trials whose name contains one of these; all where it is empty.
    pub only: Vec<String>,
    /// Only these of the published models, by the names of [`Sizes::real`]; all where it is empty.
    pub models: Vec<String>,
    /// What is left out.
    pub without: Vec<Peer>,
    /// A Python script that trains the cut models with PyTorch.
    pub beside: Option<PathBuf>,
    /// The Python that has PyTorch.
    pub python: OsString,
    /// Time without an answer after which a case counts as hung.
    pub deadline: Duration,
    /// The op whose parts abort, in a rehearsal.
    pub dies: Option<String>,
    /// English text that small models are trained on, a megabyte.
    pub text: &'static str,
}

impl Options {
    fn does(&self, peer: Peer) -> bool {
        !self.without.contains(&peer)
    }

    /// Whether this published model is covered.
    fn covers(&self, model: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|named| named == model)
    }

    /// The sizes of published models that are covered.
    fn real_sizes(&self) -> Vec<Sizes> {
        let mut sizes = Sizes::real();
        sizes.retain(|sizes| self.covers(sizes.name));
        sizes
    }

    fn open(&self, dtype: Dtype) -> Result<Device, DeviceError> {
        if self.rehearse {
            Ok(Device::cpu(1))
        } else {
            Device::cuda(self.device as usize, dtype)
        }
    }
}

/// What a check does beside its own cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Times of PyTorch at the same shapes.
    Torch,
    /// The small cases under compute-sanitizer.
    Sanitizer,
    /// Training, profiles and models.
    Trials,
}

/// What a check asks of whoever started it.
pub struct Caller<'a> {
    /// Says a line of progress.
    pub say: &'a mut dyn FnMut(&str) -> io::Result<()>,
    /// The date, in seconds since 1970.
    pub unix_s: &'a dyn Fn() -> u64,
    /// What the machine has, as `moefold doctor` says it.
    pub doctor: &'a dyn Fn() -> Value,
}

/// Makes a check. What it found so far is in its folder, also where it ends in an error.
pub fn check(options: &Options, caller: &mut Caller<'_>) -> Result<Report, Error> {
    let device = options.open(Dtype::F32).map_err(Error::NoDevice)?;
    let described = format!("{device:?}");
    let gpu = device.properties().map(|gpu| gpu.name.clone());
    drop(device);
    fs::create_dir_all(&options.out).map_err(|cause| Error::Out {
        path: options.out.clone(),
        cause,
    })?;
    let before = gpu_clocks();
    let begun = Instant::now();
    let mut parts = parts(options);
    let trials = trials::NAMES
        .into_iter()
        .filter(|name| is_wanted(name, options) && options.does(Peer::Trials))
        .collect::<Vec<_>>();
    if !parts.iter().any(|part| part.op != CEILINGS) {
        if trials.is_empty() {
            return Err(Error::NothingWanted);
        }
        parts.clear();
    }
    let mut report = Report {
        doctor: (caller.doctor)(),
        device: described,
        command: options.command.clone(),
        clocks: [before, None],
        ceilings: None,
        lines: Vec::new(),
        torch: None,
        sanitizer: None,
        trials: Vec::new(),
    };
    let mut done = 0;
    // What takes no times runs together: starting a process takes longer than most parts do.
    for alike in parts.chunk_by(|part, next| !part.timed && !next.timed) {
        for now in alike.chunks(at_once()) {
            for part in now {
                done += 1;
                (caller.say)(&format!(
                    "[{done}/{} {:>4.0} s] {} {} {}",
                    parts.len(),
                    begun.elapsed().as_secs_f64(),
                    part.op,
                    part.sizes,
                    part.dtype
                ))?;
            }
            for said in apart::run_all(now, options)? {
                match said {
                    Said::Ends(line) => report.add(line),
                    Said::Ceilings(measured) => report.ceilings = Some(measured),
                    Said::Begins(_) => {}
                }
            }
            // Whatever ends this process, what was found so far stays.
            report.write(&options.out, (caller.unix_s)())?;
        }
    }
    let whole = !options.rehearse && options.only.is_empty();
    if whole && !options.small && options.does(Peer::Torch) {
        report.torch = Some(torch::times(&options.python, &options.real_sizes()));
        report.write(&options.out, (caller.unix_s)())?;
    }
    if whole && options.does(Peer::Sanitizer) {
        report.sanitizer = Some(sanitizer::sanitized(options)?);
    }
    for name in trials {
        let seconds = begun.elapsed().as_secs_f64();
        (caller.say)(&format!("[trial {seconds:>4.0} s] {name}"))?;
        let trial = trials::make(name, options, gpu.as_deref())?;
        report.trials.push(trial);
        report.write(&options.out, (caller.unix_s)())?;
    }
    report.clocks[1] = gpu_clocks();
    report.write(&options.out, (caller.unix_s)())?;
    Ok(report)
}
