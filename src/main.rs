//! The command line of moefold: parse, dispatch to one short file a verb, report failures.

mod bench;
mod calibrate;
mod check;
mod cli;
mod clusters;
mod compare;
mod convert;
mod data;
mod device;
mod doctor;
mod dry_run;
mod execute;
mod export;
mod exportable;
mod failure;
mod flags;
mod gpu_check;
mod groups;
mod import;
mod kernels;
mod launch;
mod models;
mod output;
mod plan;
mod profile;
mod quickstart;
mod restart;
mod signals;
mod sizes;
mod validate;
mod watch;

use std::any::Any;
use std::io::{self, Write as _};
use std::panic::{self, PanicHookInfo};
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use mimalloc::MiMalloc;
use moefold_executor::data::in_library;
use moefold_kernels::DeviceError;

use crate::cli::{Cli, DataVerb, Verb};
use crate::failure::Failure;
use crate::output::Output;

/// A search traces millions of small operators, on all cores. What is freed stays for a second, within which a step takes it
/// again; version 2 gave it back after a tenth of one, and every second run met fresh pages.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = Output {
        json: cli.common.json,
        quiet: cli.common.quiet,
        verbose: cli.common.verbose,
    };
    panic::set_hook(Box::new(report_panic));
    let outcome = panic::catch_unwind(|| run(cli.verb, output));
    match outcome.unwrap_or_else(|payload| Err(unwound(payload))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_broken_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            if matches!(failure, Failure::Reported) {
                return failure.code();
            }
            launch::blame(&failure);
            // Nothing is left to do when stderr is gone as well.
            let _ = writeln!(io::stderr(), "error: {failure}");
            failure.code()
        }
    }
}

/// What unwound to the top. The failure of a device comes so, where nobody expected one, and was said by nobody; of
/// a panic [`report_panic`] has said all there is.
fn unwound(payload: Box<dyn Any + Send>) -> Failure {
    match payload.downcast::<DeviceError>() {
        Ok(error) => Failure::runtime(*error),
        Err(_) => Failure::Reported,
    }
}

/// A panic is a defect of this program, unless a library meets a file that it does not expect: one line says where, and
/// no page of frames follows.
fn report_panic(panic: &PanicHookInfo<'_>) {
    if in_library() {
        return;
    }
    let place = panic
        .location()
        .map_or_else(String::new, ToString::to_string);
    let message = panic.payload_as_str().unwrap_or("no message");
    let _ = writeln!(
        io::stderr(),
        "error: a defect of moefold at {place}: {message}"
    );
}

fn run(verb: Verb, output: Output) -> Result<(), Failure> {
    match verb {
        Verb::Plan(args) => plan::run(&args, output),
        Verb::Export(args) => export::run(&args, output),
        Verb::Check(args) => check::run(&args, output),
        Verb::Execute(args) => launch::as_rank(args.launch, || execute::run(&args, output)),
        Verb::Profile(args) => launch::as_rank(args.launch, || profile::run(&args, output)),
        Verb::Import(args) => import::run(&args, output),
        Verb::Compare(args) => compare::run(&args, output),
        Verb::Calibrate(args) => calibrate::run(&args, output),
        Verb::Validate(args) => validate::run(&args, output),
        Verb::Convert(args) => convert::run(&args, output),
        Verb::Data(DataVerb::Prepare(args)) => data::prepare(&args, output),
        Verb::Quickstart(args) => quickstart::run(&args, output),
        Verb::Groups(args) => groups::run(&args, output),
        Verb::Models(args) => models::run(&args, output),
        Verb::Clusters(args) => clusters::run(&args, output),
        Verb::GpuCheck(args) => gpu_check::run(&args, output),
        Verb::Bench(args) => bench::run(&args, output),
        Verb::Doctor => doctor::run(output),
        Verb::Kernels(args) => kernels::run(&args, output),
        Verb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "moefold", &mut script);
            io::stdout().write_all(&script)?;
            Ok(())
        }
    }
}
