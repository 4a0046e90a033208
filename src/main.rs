//! The command line of moefold: parse, dispatch to one short file a verb, report failures.

mod bench;
mod cli;
mod clusters;
mod compare;
mod execute;
mod failure;
mod groups;
mod models;
mod output;
mod plan;
mod profile;
mod quickstart;

use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::cli::{Cli, Verb};
use crate::failure::Failure;
use crate::output::Output;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = Output {
        json: cli.common.json,
        quiet: cli.common.quiet,
        verbose: cli.common.verbose,
    };
    match run(cli.verb, output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_broken_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            // Nothing is left to do when stderr is gone as well.
            let _ = writeln!(io::stderr(), "error: {failure}");
            failure.code()
        }
    }
}

fn run(verb: Verb, output: Output) -> Result<(), Failure> {
    match verb {
        Verb::Plan(args) => plan::run(&args, output),
        Verb::Execute(args) => execute::run(&args, output),
        Verb::Profile(args) => profile::run(&args, output),
        Verb::Compare(args) => compare::run(&args, output),
        Verb::Quickstart(args) => quickstart::run(&args, output),
        Verb::Groups(args) => groups::run(&args, output),
        Verb::Models(args) => models::run(&args, output),
        Verb::Clusters(args) => clusters::run(&args, output),
        Verb::Bench(args) => bench::run(&args, output),
        Verb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "moefold", &mut script);
            io::stdout().write_all(&script)?;
            Ok(())
        }
    }
}
