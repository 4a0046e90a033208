//! `moefold gpu-check`: every kernel against its reference and against the clock on the GPU at hand, then
//! training itself.
//!
//! One command for a machine that is at hand for minutes: it builds nothing, and what it has found so
//! far is in `gpu-check.json` and `gpu-check.md` after every part. The cases of each op, and each
//! command of a trial ([`trials`]), run in a process of their own with a deadline, since a kernel that
//! hangs or faults takes its process's context with it.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use moefold_executor::environment::gpu_clocks;
use moefold_kernels::check::Sizes;
use moefold_kernels::{Device, DeviceError, Dtype, Op};
use serde::Serialize;

use crate::cli::{GpuCheckArgs, Peer};
use crate::doctor;
use crate::failure::Failure;
use crate::output::Output;
use part::{CEILINGS, Ceilings, HARDWARE, Line, Outcome, Part, Said};
use peers::Sanitized;
use report::Report;
use trials::Verdict;

mod part;
mod peers;
mod report;
mod trials;

/// The device under test.
#[derive(Debug, Clone, Copy)]
enum Target {
    /// The GPU of this number.
    Gpu(u32),
    /// The CPU in its place.
    Rehearsal,
}

impl Target {
    fn of(args: &GpuCheckArgs) -> Self {
        if args.rehearse {
            Self::Rehearsal
        } else {
            Self::Gpu(args.device)
        }
    }

    fn open(self, dtype: Dtype) -> Result<Device, DeviceError> {
        match self {
            Self::Gpu(index) => Device::cuda(index as usize, dtype),
            Self::Rehearsal => Ok(Device::cpu(1)),
        }
    }
}

pub(crate) fn run(args: &GpuCheckArgs, output: Output) -> Result<(), Failure> {
    let target = Target::of(args);
    if let Some(part) = &args.part {
        let part: Part = serde_json::from_str(part)
            .map_err(|error| Failure::Request(anyhow!("--part: {error}")))?;
        if args.dies.as_ref() == Some(&part.op) {
            std::process::abort();
        }
        return part::run(&part, target);
    }
    let (described, gpu) = target
        .open(Dtype::F32)
        .map(|device| {
            let name = device.properties().map(|gpu| gpu.name.clone());
            (format!("{device:?}"), name)
        })
        .map_err(|error| {
            Failure::Runtime(anyhow!(
                "{error}; `moefold doctor` says what this machine has and what is missing"
            ))
        })?;
    fs::create_dir_all(&args.out)
        .with_context(|| format!("--out {}: could not create it", args.out.display()))
        .map_err(Failure::Runtime)?;
    let before = gpu_clocks();
    let begun = Instant::now();
    let mut parts = parts(args);
    let trials = trials::NAMES
        .into_iter()
        .filter(|name| is_wanted(name, args) && !args.without.contains(&Peer::Trials))
        .collect::<Vec<_>>();
    if !parts.iter().any(|part| part.op != CEILINGS) {
        if trials.is_empty() {
            let only = args.only.join(",");
            return Err(Failure::Request(anyhow!(
                "--only {only}: no op or trial has this in its name; gemm, grouped_gemm, attention, \
                 permute are some ops, the trials are {}",
                trials::NAMES.join(", ")
            )));
        }
        parts.clear();
    }
    let mut report = Report {
        doctor: doctor::Report::collect(),
        device: described,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        clocks: [before, None],
        ceilings: None,
        lines: Vec::new(),
        torch: None,
        sanitizer: None,
        trials: Vec::new(),
    };
    for (done, part) in parts.iter().enumerate() {
        output.say(&format!(
            "[{}/{} {:>4.0} s] {} {} {}",
            done + 1,
            parts.len(),
            begun.elapsed().as_secs_f64(),
            part.op,
            part.sizes,
            part.dtype
        ))?;
        for said in run_apart(part, args)? {
            match said {
                Said::Ends(line) => report.lines.push(line),
                Said::Ceilings(measured) => report.ceilings = Some(measured),
                Said::Begins(_) => {}
            }
        }
        // Whatever ends this process, what was found so far stays.
        report.write(&args.out)?;
    }
    let whole = !args.rehearse && args.only.is_empty();
    if whole && !args.small && !args.without.contains(&Peer::Torch) {
        report.torch = Some(peers::torch(&args.python, &Sizes::real()));
        report.write(&args.out)?;
    }
    if whole && !args.without.contains(&Peer::Sanitizer) {
        report.sanitizer = Some(sanitized(args)?);
    }
    for name in trials {
        let seconds = begun.elapsed().as_secs_f64();
        output.say(&format!("[trial {seconds:>4.0} s] {name}"))?;
        report
            .trials
            .push(trials::make(name, args, gpu.as_deref())?);
        report.write(&args.out)?;
    }
    report.clocks[1] = gpu_clocks();
    report.write(&args.out)?;
    let wrong = report.wrong();
    output.answer(&report.summary(), || report.text())?;
    if wrong > 0 {
        return Err(Failure::Runtime(anyhow!(
            "{wrong} of {} cases and trials are wrong or failed; {} lists them",
            report.lines.len() + report.trials.len(),
            args.out.join("gpu-check.md").display()
        )));
    }
    Ok(())
}

/// Whether an op or a trial was asked for.
fn is_wanted(name: &str, args: &GpuCheckArgs) -> bool {
    args.only.is_empty() || args.only.iter().any(|only| name.contains(only))
}

/// Parts in the order of what matters: right at small sizes, right at real ones, then how fast.
fn parts(args: &GpuCheckArgs) -> Vec<Part> {
    let special = |op: &str| Part {
        sizes: "-".to_owned(),
        dtype: Dtype::Bf16,
        op: op.to_owned(),
        timed: false,
        skip: Vec::new(),
    };
    let mut parts = Vec::new();
    let dies = args.dies.as_deref() == Some(HARDWARE);
    if dies || (!args.rehearse && args.only.is_empty()) {
        parts.push(special(HARDWARE));
    }
    if !args.small {
        parts.push(special(CEILINGS));
    }
    let mut ask = |sizes: &Sizes, dtype, timed| {
        let all = Part {
            sizes: sizes.name.to_owned(),
            dtype,
            op: String::new(),
            timed,
            skip: Vec::new(),
        };
        for op in stems(sizes, dtype) {
            if is_wanted(&op, args) {
                parts.push(Part { op, ..all.clone() });
            }
        }
    };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for sizes in Sizes::small() {
            ask(&sizes, dtype, false);
        }
    }
    if args.small {
        return parts;
    }
    for sizes in Sizes::real() {
        ask(&sizes, Dtype::Bf16, true);
    }
    parts
}

fn stems(sizes: &Sizes, dtype: Dtype) -> Vec<String> {
    let mut stems: Vec<String> = Vec::new();
    for case in moefold_kernels::check::cases(sizes, dtype) {
        let stem = part::stem(&case);
        if !stems.iter().any(|known| known == stem) {
            stems.push(stem.to_owned());
        }
    }
    stems
}

/// Runs a part in a process of its own, and what is left of it in another where a case ended that one.
/// Every case is a line in the end; a part that died without a word is one too.
fn run_apart(part: &Part, args: &GpuCheckArgs) -> Result<Vec<Said>, Failure> {
    let mut part = part.clone();
    let mut all = Vec::new();
    loop {
        let (said, why) = run_once(&part, args)?;
        let (mut begun, mut ended) = (None, Vec::new());
        for said in &said {
            match said {
                Said::Begins(case) => begun = Some(case.clone()),
                Said::Ends(line) => {
                    begun = None;
                    ended.push(line.case.clone());
                }
                Said::Ceilings(_) => {}
            }
        }
        all.extend(said);
        let Some(why) = why else { return Ok(all) };
        if let Some(case) = begun {
            all.push(Said::Ends(failed(&part, &case, &why)));
            ended.push(case);
        }
        if ended.is_empty() {
            // It died before its first case, and would again.
            all.push(Said::Ends(failed(&part, &part.op, &why)));
            return Ok(all);
        }
        part.skip.extend(ended);
    }
}

/// The line of a case that ended its process.
fn failed(part: &Part, case: &str, why: &str) -> Line {
    let known = part::cases_of(part);
    let known = known.iter().find(|known| known.name == case);
    let op = known.map(|case| &case.op);
    Line {
        sizes: part.sizes.clone(),
        dtype: part.dtype,
        flops: op.map_or(0.0, |op| op.flops().0),
        bytes: known.map_or(0.0, |case| case.bytes() as f64),
        matrix: op.is_some_and(Op::is_matrix),
        case: case.to_owned(),
        outcome: Outcome::Failed(why.to_owned()),
    }
}

/// Runs a part in one process: what it said, and why it ended early if it did.
fn run_once(part: &Part, args: &GpuCheckArgs) -> Result<(Vec<Said>, Option<String>), Failure> {
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command
        .arg("gpu-check")
        .args([
            "--part",
            &serde_json::to_string(part).map_err(Failure::runtime)?,
        ])
        .args(["--device", &args.device.to_string()])
        .arg("--out")
        .arg(&args.out)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if args.rehearse {
        command.arg("--rehearse");
    }
    if let Some(op) = &args.dies {
        command.args(["--dies", op]);
    }
    let mut child = command.spawn()?;
    let stdout = child.stdout.take().ok_or_else(no_pipe)?;
    let stderr = child.stderr.take().ok_or_else(no_pipe)?;
    let (send, receive) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                break;
            }
        }
    });
    let complaints = std::thread::spawn(move || {
        let lines = BufReader::new(stderr).lines().map_while(Result::ok);
        lines.last().unwrap_or_default()
    });
    let deadline = Duration::from_secs(args.deadline_s);
    let mut said = Vec::new();
    let mut why = None;
    loop {
        match receive.recv_timeout(deadline) {
            Ok(line) => said.extend(serde_json::from_str::<Said>(&line)),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                why = Some(format!("no answer for {} s: killed", args.deadline_s));
                // It may have ended in the meantime; either way it is gone.
                let _ = child.kill();
                break;
            }
        }
    }
    let status = child.wait()?;
    let last = complaints.join().unwrap_or_default();
    drop(receive);
    let _ = reader.join();
    if !status.success() {
        why = why.or_else(|| Some(format!("{status}: {last}")));
    }
    Ok((said, why))
}

fn no_pipe() -> Failure {
    Failure::Runtime(anyhow!("a part's output could not be read"))
}

/// The smallest sizes under the tools of compute-sanitizer, each op in a process of its own.
fn sanitized(args: &GpuCheckArgs) -> Result<Vec<Sanitized>, Failure> {
    let program = std::env::current_exe()?;
    let mut notes = Vec::new();
    // Rows of whole 16 bytes: those the kernels of tiles and bulk copies take.
    let Some(sizes) = Sizes::small().into_iter().find(Sizes::is_wide) else {
        return Ok(notes);
    };
    let until = Instant::now() + peers::SANITIZER_TIME;
    let stems = stems(&sizes, Dtype::Bf16);
    // One tool over all ops before the next: what there is no time for is the last tool's.
    let runs = peers::TOOLS
        .iter()
        .flat_map(|&tool| stems.iter().map(move |op| (tool, op)));
    for (tool, op) in runs {
        let part = Part {
            sizes: sizes.name.to_owned(),
            dtype: Dtype::Bf16,
            op: op.clone(),
            timed: false,
            skip: Vec::new(),
        };
        let part = serde_json::to_string(&part).map_err(Failure::runtime)?;
        let arguments = [
            "gpu-check",
            "--part",
            &part,
            "--device",
            &args.device.to_string(),
            "--out",
            &args.out.to_string_lossy(),
        ]
        .map(str::to_owned);
        let log = args.out.join(format!("{tool}-{op}.log"));
        notes.push(peers::sanitizer(
            tool, op, &program, &arguments, &log, until,
        ));
    }
    Ok(notes)
}

/// The answer of the command.
#[derive(Debug, Serialize)]
struct Summary {
    device: String,
    cases: usize,
    wrong: usize,
    ceilings: Option<Ceilings>,
    trials: Vec<(&'static str, Verdict)>,
}
