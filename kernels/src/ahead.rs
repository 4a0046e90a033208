//! Every kernel compiled ahead of time, on any machine with NVRTC: packs and resource reports.

use std::io;
use std::path::Path;

use crate::cuda::cache::{Directory, pack};
use crate::cuda::compiler::Compiler;
use crate::cuda::error::DeviceError;
use crate::cuda::libraries::Version;
use crate::cuda::nvrtc::report::resources;
use crate::cuda::nvrtc::{Cubin, Nvrtc};
use crate::cuda::program::{Architecture, Entry, Listed, Needs, Program};
use crate::programs::programs;

pub use crate::cuda::nvrtc::Resources;

/// All programs of the crate, compiled.
pub struct Compiled {
    /// What compiled them.
    pub nvrtc: Version,
    /// What each kernel takes.
    pub kernels: Vec<Kernel>,
    programs: Vec<(Program, Architecture)>,
    cubins: Vec<Cubin>,
}

/// One kernel of one program on one architecture.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The program: file and defines.
    pub program: String,
    /// What it was compiled for.
    pub architecture: Architecture,
    /// What it takes.
    pub resources: Resources,
    /// Registers of a thread that it may take.
    pub registers_max: u32,
    /// Bytes of dynamic shared memory that a launch may ask for.
    pub dynamic_shared_max: u32,
}

/// How many programs of the pack in a file are whole, whatever they are; refuses what is no pack.
pub fn whole_in(path: &Path) -> io::Result<usize> {
    pack::whole(path)
}

/// Compiles every program for those of `architectures` that it is for, on all cores; without any
/// named, for those that kernels are written for. What the cache holds is taken from there.
pub fn compile(architectures: &[Architecture]) -> Result<Compiled, DeviceError> {
    let compiler = Compiler::new(None, Directory::cache(), Nvrtc::find());
    let nvrtc = compiler.version()?;
    let mut jobs = Vec::new();
    let mut entries: Vec<Vec<Entry>> = Vec::new();
    let packed = |listed: &Listed| listed.needs != Needs::Odd;
    for listed in programs().into_iter().filter(packed) {
        let claimed = listed.needs.architectures().to_vec();
        let wanted = if architectures.is_empty() {
            claimed
        } else {
            let included = |&architecture: &Architecture| listed.needs.includes(architecture);
            let mut codes = architectures
                .iter()
                .copied()
                .filter(included)
                .map(Architecture::code)
                .collect::<Vec<_>>();
            codes.sort_unstable();
            codes.dedup();
            codes
        };
        for architecture in wanted {
            jobs.push((listed.program.clone(), architecture));
            entries.push(listed.entries.clone());
        }
    }
    let cubins = compiler.cubins(&jobs)?;
    let mut kernels = Vec::new();
    for (((program, architecture), cubin), entries) in jobs.iter().zip(&cubins).zip(&entries) {
        for resources in resources(&cubin.log) {
            let limits = entries.iter().find(|entry| entry.name == resources.entry);
            kernels.push(Kernel {
                program: program.to_string(),
                architecture: *architecture,
                registers_max: limits.map_or(0, |limits| limits.registers),
                dynamic_shared_max: limits.map_or(0, |limits| limits.shared),
                resources,
            });
        }
    }
    Ok(Compiled {
        nvrtc,
        kernels,
        programs: jobs,
        cubins,
    })
}

impl Compiled {
    /// Writes the machine code as a pack, which `MOEFOLD_PACK` may name on another machine.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let programs = self.programs.iter().zip(&self.cubins);
        let entries =
            programs.map(|((program, architecture), cubin)| (program, *architecture, cubin));
        pack::write_pack(path, self.nvrtc, entries)
    }

    /// How many programs there are, each for one architecture.
    pub fn num_programs(&self) -> usize {
        self.programs.len()
    }
}

#[cfg(test)]
mod tests;
