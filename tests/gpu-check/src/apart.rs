//! Parts in processes of their own: each is the program's verb `gpu-check` with `--part`, which says how
//! it goes on stdout ([`crate::part`]).

use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use moefold_kernels::Op;

use crate::part::{Line, Outcome, Part, Said, cases_of};
use crate::{Error, Options, together};

/// What the program is called with to run a part.
pub(crate) fn arguments(part: &Part, options: &Options) -> Result<Vec<OsString>, Error> {
    let part = serde_json::to_string(part)?;
    let device = options.device.to_string();
    let words = ["gpu-check", "--part", &part, "--device", &device, "--out"];
    let mut arguments: Vec<OsString> = words.map(OsString::from).into();
    arguments.push(options.out.clone().into());
    if options.rehearse {
        arguments.push("--rehearse".into());
    }
    if let Some(op) = &options.dies {
        arguments.extend(["--dies".into(), op.into()]);
    }
    Ok(arguments)
}

/// Runs parts at the same time, each as [`run`] does; what they said, in their order.
pub(crate) fn run_all(parts: &[Part], options: &Options) -> Result<Vec<Said>, Error> {
    let found = together(parts, |part| run(part, options))?;
    let found = found.into_iter().collect::<Result<Vec<_>, Error>>()?;
    Ok(found.into_iter().flatten().collect())
}

/// Runs a part in a process of its own, and what is left of it in another where a case ended that one.
/// Every case is a line in the end; a part that died without a word is one too.
fn run(part: &Part, options: &Options) -> Result<Vec<Said>, Error> {
    let mut part = part.clone();
    let mut all = Vec::new();
    loop {
        let (said, why) = run_once(&part, options)?;
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
    let known = cases_of(part);
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
fn run_once(part: &Part, options: &Options) -> Result<(Vec<Said>, Option<String>), Error> {
    let mut command = Command::new(&options.program);
    command
        .args(arguments(part, options)?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let stdout = child.stdout.take().ok_or_else(no_pipe)?;
    let stderr = child.stderr.take().ok_or_else(no_pipe)?;
    let (send, receive) = mpsc::channel();
    let reader = thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                break;
            }
        }
    });
    let complaints = thread::spawn(move || {
        let lines = BufReader::new(stderr).lines().map_while(Result::ok);
        lines.last().unwrap_or_default()
    });
    let mut said = Vec::new();
    let mut why = None;
    loop {
        match receive.recv_timeout(options.deadline) {
            Ok(line) => said.extend(serde_json::from_str::<Said>(&line)),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                why = Some(format!(
                    "no answer for {} s: killed",
                    options.deadline.as_secs()
                ));
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

fn no_pipe() -> Error {
    io::Error::other("a part's output could not be read").into()
}
