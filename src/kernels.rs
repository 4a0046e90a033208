//! `moefold kernels`: every CUDA kernel compiled, what each takes, and packs for other machines.

use anyhow::{Context as _, anyhow};
use moefold_kernels::ahead::{self, Compiled, Kernel};
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::KernelsArgs;
use crate::failure::Failure;
use crate::output::Output;

/// The answer as JSON.
#[derive(Serialize)]
struct KernelsJson {
    nvrtc: String,
    kernels: Vec<Row>,
}

/// One kernel of one program on one architecture.
#[derive(Serialize)]
struct Row {
    kernel: String,
    program: String,
    architecture: String,
    registers: u32,
    registers_max: u32,
    spill_bytes: u32,
    stack_bytes: u32,
    dynamic_shared_bytes_max: u32,
}

impl From<&Kernel> for Row {
    fn from(kernel: &Kernel) -> Self {
        let resources = &kernel.resources;
        Self {
            kernel: resources.entry.clone(),
            program: kernel.program.clone(),
            architecture: kernel.architecture.to_string(),
            registers: resources.registers,
            registers_max: kernel.registers_max,
            spill_bytes: resources.spill_stores + resources.spill_loads,
            stack_bytes: resources.stack,
            dynamic_shared_bytes_max: kernel.dynamic_shared_max,
        }
    }
}

pub(crate) fn run(args: &KernelsArgs, output: Output) -> Result<(), Failure> {
    let mut architectures = Vec::new();
    for name in &args.arch {
        let architecture = name.parse();
        architectures
            .push(architecture.map_err(|error| Failure::Request(anyhow!("--arch {error}")))?);
    }
    let compiled = ahead::compile(&architectures).map_err(Failure::runtime)?;
    if let Some(path) = &args.out {
        compiled
            .write(path)
            .with_context(|| format!("--out {}", path.display()))
            .map_err(Failure::Runtime)?;
    }
    let answer = KernelsJson {
        nvrtc: compiled.nvrtc.to_string(),
        kernels: compiled.kernels.iter().map(Row::from).collect(),
    };
    output.answer(&answer, || describe(&answer, &compiled))?;
    if let Some(path) = &args.out {
        let path = path.display();
        output.say(&format!("\nWrote {path}; name it in MOEFOLD_PACK."))?;
    }
    Ok(())
}

fn describe(answer: &KernelsJson, compiled: &Compiled) -> String {
    let mut table = Table::new([
        "kernel",
        "program",
        "architecture",
        ">registers",
        ">limit",
        ">spilled bytes",
        ">stack bytes",
        ">shared bytes",
    ]);
    for row in &answer.kernels {
        table.row([
            row.kernel.clone(),
            row.program.clone(),
            row.architecture.clone(),
            row.registers.to_string(),
            row.registers_max.to_string(),
            row.spill_bytes.to_string(),
            row.stack_bytes.to_string(),
            row.dynamic_shared_bytes_max.to_string(),
        ]);
    }
    format!(
        "{} programs by NVRTC {}\n\n{}",
        compiled.num_programs(),
        answer.nvrtc,
        table.markdown()
    )
}
