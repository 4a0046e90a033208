//! `moefold gpu-check`: what is asked of [`moefold_gpu_check`], and what is said of its answer.

use std::io::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use moefold_gpu_check::{self as gpu_check, Caller, Error, Options};

use crate::cli::{GpuCheckArgs, Peer};
use crate::doctor;
use crate::failure::Failure;
use crate::output::Output;
use crate::quickstart;

pub(crate) fn run(args: &GpuCheckArgs, output: Output) -> Result<(), Failure> {
    let options = options(args)?;
    if let Some(part) = &args.part {
        return gpu_check::run_part(part, &options, &mut |line| {
            let mut stdout = std::io::stdout();
            stdout.write_all(format!("{line}\n").as_bytes())?;
            stdout.flush()
        })
        .map_err(|error| failure(error, args));
    }
    let mut caller = Caller {
        say: &mut |line| output.say(line),
        unix_s: &|| {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            since.map_or(0, |since| since.as_secs())
        },
        doctor: &|| serde_json::json!(doctor::Report::collect()),
    };
    let report = gpu_check::check(&options, &mut caller).map_err(|error| failure(error, args))?;
    output.answer(&report.summary(), || report.text())?;
    match report.wrong() {
        0 => Ok(()),
        wrong => Err(Failure::Runtime(anyhow!(
            "{wrong} of {} cases and trials are wrong or failed; {} lists them",
            report.made(),
            args.out.join("gpu-check.md").display()
        ))),
    }
}

fn options(args: &GpuCheckArgs) -> Result<Options, Failure> {
    let peer = |peer: &Peer| match peer {
        Peer::Torch => gpu_check::Peer::Torch,
        Peer::Sanitizer => gpu_check::Peer::Sanitizer,
        Peer::Trials => gpu_check::Peer::Trials,
    };
    Ok(Options {
        program: std::env::current_exe()?,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        out: args.out.clone(),
        device: args.device,
        rehearse: args.rehearse,
        small: args.small,
        only: args.only.clone(),
        models: args.models.clone(),
        without: args.without.iter().map(peer).collect(),
        beside: args.beside.clone(),
        python: args.python.clone(),
        deadline: Duration::from_secs(args.deadline_s),
        dies: args.dies.clone(),
        text: quickstart::TEXT,
    })
}

/// The exit code of a check that could not be made, and its message in the words of the flags.
fn failure(error: Error, args: &GpuCheckArgs) -> Failure {
    match error {
        Error::Part(error) => Failure::Request(anyhow!("--part: {error}")),
        Error::NothingWanted => {
            Failure::Request(anyhow!("--only {}: {error}", args.only.join(",")))
        }
        Error::Out { .. } => Failure::Runtime(anyhow!("--out {error}")),
        Error::NoDevice(error) => Failure::Runtime(anyhow!(
            "{error}; `moefold doctor` says what this machine has and what is missing"
        )),
        Error::CaseFailed => Failure::Reported,
        Error::Io(error) => error.into(),
        error => Failure::runtime(error),
    }
}
