//! Every program of the crate, compiled: each for every architecture it is for, within its limits,
//! showing the instructions it is about.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use rayon::prelude::*;

use crate::cuda::cache::Directory;
use crate::cuda::compiler::Compiler;
use crate::cuda::libraries::{Library, find};
use crate::cuda::nvrtc::Cubin;
use crate::cuda::nvrtc::report::{complaints, resources};
use crate::cuda::nvrtc::tests::{nvrtc_or_skip, skip};
use crate::cuda::program::{Architecture, Entry, Listed, Needs, Source};
use crate::programs::programs;

#[test]
fn law_every_program_compiles_within_its_limits() {
    let Some(compiler) = compiler_or_skip() else {
        return;
    };
    let jobs = programs();
    assert!(!jobs.is_empty(), "no op lists a program");
    let offences = jobs
        .par_iter()
        .flat_map_iter(|listed| {
            let architectures = listed.needs.architectures().iter();
            architectures.map(move |&architecture| (listed, architecture))
        })
        .flat_map_iter(|(listed, architecture)| offences(&compiler, listed, architecture))
        .collect::<Vec<_>>();
    assert!(offences.is_empty(), "{}", offences.join("\n"));
}

/// Compiles what changed since the last test: the cache, in a folder beside the test itself, names
/// machine code by all that it depends on and keeps the log with it.
fn compiler_or_skip() -> Option<Compiler> {
    let nvrtc = nvrtc_or_skip()?;
    let test = std::env::current_exe().expect("a test is a file");
    let cache = Directory(test.with_file_name("compiled-kernels"));
    Some(Compiler::new(None, Some(cache), Ok(nvrtc)))
}

/// What is wrong with one program on one architecture.
fn offences(compiler: &Compiler, listed: &Listed, architecture: Architecture) -> Vec<String> {
    let cubin = match compiler.cubin(&listed.program, architecture) {
        Ok(cubin) => cubin,
        Err(error) => return vec![error.to_string()],
    };
    let mut offences: Vec<String> = Vec::new();
    offences.extend(complaints(&cubin.log).into_iter().map(str::to_owned));
    let found = resources(&cubin.log);
    for entry in &listed.entries {
        let name = entry.name;
        let Some(resources) = found.iter().find(|found| found.entry == name) else {
            offences.push(format!("there is no kernel {name}"));
            continue;
        };
        if resources.registers > entry.registers {
            offences.push(format!(
                "{name} takes {} registers, its limit is {}",
                resources.registers, entry.registers
            ));
        }
        if resources.spill_stores + resources.spill_loads + resources.stack > 0 {
            offences.push(format!("{name} keeps registers in memory: {resources:?}"));
        }
        if resources.shared > 0 {
            offences.push(format!("{name} has static shared memory: {resources:?}"));
        }
        if entry.shared > shared_per_block(architecture) {
            offences.push(format!("{name} asks for more shared memory than there is"));
        }
    }
    let unlisted = |name: &str| listed.entries.iter().all(|entry| entry.name != name);
    let unlisted = found.iter().filter(|found| unlisted(&found.entry));
    offences.extend(unlisted.map(|found| format!("{} is not listed", found.entry)));
    offences.extend(missing_instructions(listed, &cubin));
    let what = format!("{} for {architecture}", listed.program);
    let at = |offence| format!("{what}: {offence}");
    offences.into_iter().map(at).collect()
}

/// Shared memory that one block may have (CUDA C++ Programming Guide, "Technical Specifications per
/// Compute Capability").
fn shared_per_block(architecture: Architecture) -> u32 {
    match architecture.major {
        8 => 163 << 10,
        _ => 227 << 10,
    }
}

/// Instructions that kernels should show and do not. Without a disassembler nothing is.
fn missing_instructions(listed: &Listed, cubin: &Cubin) -> Vec<String> {
    if listed.entries.iter().all(|entry| entry.shows.is_empty()) {
        return Vec::new();
    }
    let Some(disassembler) = disassembler() else {
        skip("nvdisasm", "what instructions kernels are made of");
        return Vec::new();
    };
    let code = disassemble(&disassembler, cubin);
    let mut missing = Vec::new();
    for entry in &listed.entries {
        let instructions = code.get(entry.name).map_or("", String::as_str);
        for wanted in entry.shows {
            if !mnemonics(instructions).any(|mnemonic| mnemonic.starts_with(wanted)) {
                missing.push(format!("{} shows no {wanted}", entry.name));
            }
        }
    }
    missing
}

/// `nvdisasm` on the path, or from the wheel that lies beside NVRTC's.
fn disassembler() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).collect::<Vec<_>>();
    let lib = find(Library::Nvrtc).found().map(|found| found.path.clone());
    let beside = lib.and_then(|lib| Some(lib.parent()?.parent()?.join("bin")));
    let mut folders = beside.into_iter().chain(on_path);
    folders.find_map(|folder| Some(folder.join("nvdisasm")).filter(|file| file.is_file()))
}

/// The listing of every kernel of a cubin, by name.
fn disassemble(disassembler: &PathBuf, cubin: &Cubin) -> HashMap<String, String> {
    let folder = tempfile::tempdir().expect("a folder for a cubin");
    let file = folder.path().join("program.cubin");
    fs::write(&file, &cubin.image).expect("a cubin is written");
    let output = Command::new(disassembler).arg("-c").arg(&file).output();
    let output = output.expect("the disassembler starts");
    assert!(
        output.status.success(),
        "{}: {}",
        disassembler.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    sections(&String::from_utf8_lossy(&output.stdout))
}

/// Splits a listing at the headers of its sections: `.section .text.NAME,...`.
fn sections(listing: &str) -> HashMap<String, String> {
    let mut sections: HashMap<String, String> = HashMap::new();
    let mut name = String::new();
    for line in listing.lines() {
        if let Some((".section", section)) = line.trim().split_once(char::is_whitespace) {
            let section = section.split(',').next().unwrap_or_default();
            section
                .strip_prefix(".text.")
                .unwrap_or_default()
                .clone_into(&mut name);
        }
        let text = sections.entry(name.clone()).or_default();
        text.push_str(line);
        text.push('\n');
    }
    sections
}

/// The instructions of a listing: `/*0000*/  @!P0 HGMMA.64x64x16.F32.BF16 R24, ...`.
fn mnemonics(listing: &str) -> impl Iterator<Item = &str> {
    listing.lines().filter_map(|line| {
        let (_, instruction) = line.trim().strip_prefix("/*")?.split_once("*/")?;
        instruction
            .split_whitespace()
            .find(|word| !word.starts_with('@'))
    })
}

#[test]
fn what_a_program_breaks_of_its_limits_is_said() {
    let Some(compiler) = compiler_or_skip() else {
        return;
    };
    let source = Source {
        stem: "planted",
        text: r#"
#include "prelude.cuh"
KERNEL(32, 1) copies(const float* x, float* y) {
  DYN_SMEM(shared);
  cp_async16(shared + 16 * lane_id(), x + 4 * lane_id(), 16);
  cp_async_commit();
  cp_async_wait<0>();
  y[lane_id()] = ((float*)shared)[lane_id()];
}
EXPORT(copies)
KERNEL(32, 1) keeps_an_array(float* x, int n) {
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = x[i * n];
  for (int j = 0; j < n; j++)
    for (int i = 0; i < 64; i++) a[i] *= a[(i + j) & 63];
  for (int i = 0; i < 64; i++) x[i] = a[i];
}
EXPORT(keeps_an_array)
"#,
    };
    let entry = |name, registers, shared, shows| Entry {
        name,
        registers,
        shared,
        shows,
    };
    let check = |entries: &[Entry], expected: &[&str]| {
        let listed = Listed {
            program: source.with(&[]),
            needs: Needs::Sm80,
            entries: entries.to_vec(),
        };
        let found = offences(&compiler, &listed, Architecture::SM80);
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with("planted.cu for sm_80: "), "{found}");
            assert!(found.contains(expected), "{expected} is not in {found}");
        }
    };
    let copies = entry("copies", 32, 512, &["LDGSTS"]);
    let array = "keeps_an_array keeps registers in memory";
    check(&[copies, entry("keeps_an_array", 128, 0, &[])], &[array]);
    check(&[copies], &["keeps_an_array is not listed"]);
    let wrong = [
        entry("copies", 4, 200 << 10, &["HGMMA", "LDGSTS"]),
        entry("keeps_an_array", 128, 0, &[]),
        entry("absent", 1, 1, &[]),
    ];
    let mut expected = vec![
        "copies takes",
        "copies asks for more shared memory than there is",
        array,
        "there is no kernel absent",
    ];
    if disassembler().is_some() {
        expected.push("copies shows no HGMMA");
    }
    check(&wrong, &expected);
}

#[test]
fn a_listing_is_read_by_section_and_mnemonic() {
    let listing = "\
\t.section\t.text.first,\"ax\",@progbits
\t.sectioninfo\t@\"SHI_REGISTERS=80\"
first:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 UTMALDG.2D [UR8], [UR4] ;
\t.section\t.text.second,\"ax\",@progbits
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
";
    let sections = sections(listing);
    let first = mnemonics(&sections["first"]).collect::<Vec<_>>();
    assert_eq!(first, ["LDC", "UTMALDG.2D"]);
    let second = mnemonics(&sections["second"]).collect::<Vec<_>>();
    assert_eq!(second, ["HGMMA.64x64x16.F32.BF16"]);
}
