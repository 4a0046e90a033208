//! Feeds every reader of this program what nobody should write, and says what ended it.
//!
//! `hostile --target NAME --inputs N --seed S` makes inputs from those in `corpus` by changes that are drawn from the
//! seed ([`mutate`]), and reads each in a process of its own kind ([`worker`]): a panic, an abort, a second of computing
//! or a gibibyte of memory ends it. Such an input is made small ([`hunt`]), printed and kept in a file. What a reader
//! is, and which inputs it begins with, is in [`targets`].

mod hunt;
mod mutate;
mod target;
mod targets;
mod worker;

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Hostile inputs for every reader.
#[derive(Debug, Parser)]
struct Cli {
    /// Readers to feed [default: all]; `--list` names them.
    #[arg(long)]
    target: Vec<String>,
    /// Inputs of each reader.
    #[arg(long, default_value_t = 1000)]
    inputs: u64,
    /// What they are drawn from.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds of computing that an input may take.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Memory that it may take, MiB.
    #[arg(long, default_value_t = 1024)]
    memory_mib: u64,
    /// Where inputs that end a reader are kept.
    #[arg(long, default_value = "target/hostile")]
    keep: PathBuf,
    /// Names the readers.
    #[arg(long)]
    list: bool,
    /// Reads this file instead.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Reads inputs from this number on, in this process, and notes in the folder which.
    #[arg(long, hide = true, requires = "notes")]
    worker: Option<u64>,
    #[arg(long, hide = true)]
    notes: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // Nothing is left to do when stderr is gone as well.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Whether no input ended a reader.
fn run(cli: &Cli) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    if cli.list {
        for target in targets::all() {
            writeln!(out, "{:<20} {}", target.name, target.about)?;
        }
        return Ok(true);
    }
    let named = |name: &String| {
        let known = || targets::all().chain(targets::planted());
        known().find(|target| target.name == name).ok_or_else(|| {
            let names: Vec<&str> = targets::all().map(|target| target.name).collect();
            io::Error::other(format!(
                "--target {name}: expected one of {}",
                names.join(", ")
            ))
        })
    };
    let chosen = match &cli.target[..] {
        [] => targets::all().collect(),
        names => names.iter().map(named).collect::<io::Result<Vec<_>>>()?,
    };
    let limits = worker::Limits {
        seconds: cli.seconds,
        bytes: cli.memory_mib << 20,
    };
    if let (Some(first), Some(notes), [target]) = (cli.worker, &cli.notes, &chosen[..]) {
        let read = match &cli.file {
            Some(file) => worker::Inputs::File(file),
            None => worker::Inputs::Drawn {
                seed: cli.seed,
                numbers: first..cli.inputs,
            },
        };
        worker::run(target, &read, limits, notes)?;
        return Ok(true);
    }
    let mut held = true;
    for target in chosen {
        let hunt = hunt::Hunt {
            target,
            seed: cli.seed,
            limits,
            keep: &cli.keep,
        };
        held &= match &cli.file {
            Some(file) => hunt.file(file, &mut out)?,
            None => hunt.run(cli.inputs, &mut out)?,
        };
    }
    Ok(held)
}
