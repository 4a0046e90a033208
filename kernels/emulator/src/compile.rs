//! Compiles a program with the C++ compiler into a shared library, and opens it.
//!
//! Libraries are kept beside the running executable, for tests in a folder of its own under the target
//! directory. A library is named by a hash of everything that goes into it. It is written under another
//! name and renamed, so processes that build the same one at once do not meet. One that was opened
//! stays so for the life of the process.
#![expect(
    unsafe_code,
    reason = "opens a library made of sources of `kernels` or of a test, and the prelude, whose \
              initialization does nothing, and keeps it open, so that what is looked up in it stays \
              valid"
)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

use moefold_kernels::cuda::prelude;
use moefold_kernels::cuda::program::{Architecture, Program};

/// The prelude on the CPU: names as included, and texts.
fn headers() -> impl Iterator<Item = (&'static str, &'static str)> {
    let shared = prelude::HEADERS.into_iter();
    let shared = shared.filter(|(name, _)| *name != "prelude/gpu.cuh");
    shared.chain([("prelude/host.cuh", include_str!("host.cuh"))])
}

/// Optimized; instrumented so that every load and store is seen; no contraction or reordering of
/// arithmetic, and no calls that hide accesses.
const FLAGS: &[&str] = &[
    "-x",
    "c++",
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-fno-exceptions",
    "-fasynchronous-unwind-tables",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fno-tree-loop-distribute-patterns",
    "-fsanitize=thread,alignment",
    "-w",
    "-Wno-psabi",
];

/// A library that was opened. Never closed.
pub(crate) struct Library {
    handle: libloading::Library,
    path: PathBuf,
    /// Where it lies in memory.
    base: u64,
    end: u64,
}

/// A kernel of a library.
#[derive(Clone)]
pub(crate) struct Kernel {
    pub(crate) run: unsafe extern "C-unwind" fn(*mut *mut c_void),
    /// Sizes of its parameters in bytes.
    pub(crate) sizes: Vec<u32>,
}

/// The C++ compiler's command and what it says it is; `None` where there is none.
pub(crate) fn compiler() -> Option<&'static (String, String)> {
    static FOUND: OnceLock<Option<(String, String)>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let command = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
            let output = Command::new(&command).arg("--version").output().ok()?;
            let version = String::from_utf8_lossy(&output.stdout).into_owned();
            output.status.success().then_some((command, version))
        })
        .as_ref()
}

/// The library of a program for an architecture.
pub(crate) fn library(
    program: &Program,
    architecture: Architecture,
) -> Result<&'static Library, String> {
    type Slot = Arc<OnceLock<Result<&'static Library, String>>>;
    static OPEN: OnceLock<Mutex<HashMap<String, Slot>>> = OnceLock::new();
    let (command, version) = compiler().ok_or("no C++ compiler; install g++ or set CXX")?;
    let mut text = format!("#define ARCH {}\n", architecture.number());
    for define in &program.defines {
        let (name, value) = (define.name, define.to_string());
        let value = value.split_once('=').map_or("", |(_, value)| value);
        let _ = writeln!(text, "#define {name} {value}");
    }
    let stem = program.source.stem;
    let _ = write!(text, "#line 1 \"{stem}.cu\"\n{}", program.source.text);
    let mut hash = blake3::Hasher::new();
    let flags = FLAGS.join(" ");
    let parts = headers().flat_map(|(name, text)| [name, text]);
    for part in [command, version, flags.as_str(), &text]
        .into_iter()
        .chain(parts)
    {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let key = hash.finalize().to_hex()[..32].to_owned();
    let slot = {
        let open = OPEN.get_or_init(Mutex::default);
        let mut open = open
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        Arc::clone(open.entry(key.clone()).or_default())
    };
    slot.get_or_init(|| {
        let path = folder().join(format!("{stem}-{key}.so"));
        if !path.is_file() {
            build(command, &text, &path).map_err(|error| format!("{program}: {error}"))?;
        }
        Ok(Box::leak(Box::new(Library::open(path)?)))
    })
    .clone()
}

/// Where libraries are kept: beside the executable where that can be written to, else in a folder of
/// this process alone.
fn folder() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let found = FOLDER.get_or_init(|| {
        let beside = std::env::current_exe().ok();
        let beside = beside.and_then(|exe| Some(exe.parent()?.join("emulated-kernels")));
        match beside {
            Some(folder) if fs::create_dir_all(&folder).is_ok() => folder,
            _ => std::env::temp_dir().join(format!("emulated-kernels-{}", std::process::id())),
        }
    });
    found.clone()
}

fn build(command: &str, text: &str, path: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| error.to_string();
    // One folder a build, so that builds of one library at the same time do not meet.
    let own = path.with_extension(format!("{}.building", std::process::id()));
    fs::create_dir_all(own.join("prelude")).map_err(failed)?;
    for (name, text) in headers() {
        fs::write(own.join(name), text).map_err(failed)?;
    }
    let (source, object, library) = (
        own.join("kernel.cu"),
        own.join("kernel.o"),
        own.join("kernel.so"),
    );
    fs::write(&source, text).map_err(failed)?;
    run(Command::new(command)
        .args(FLAGS)
        .arg("-I")
        .arg(&own)
        .arg("-c")
        .arg(&source)
        .arg("-o")
        .arg(&object))?;
    // Linked apart from the compilation, so that no sanitizer's runtime comes along.
    let symbolic = if cfg!(target_os = "macos") {
        &[][..]
    } else {
        &["-Wl,-Bsymbolic"][..]
    };
    run(Command::new(command)
        .arg("-shared")
        .args(symbolic)
        .arg(&object)
        .arg("-o")
        .arg(&library)
        .arg("-lm"))?;
    fs::rename(&library, path).map_err(failed)?;
    fs::remove_dir_all(&own).map_err(failed)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("the C++ compiler refused it: {said}"))
}

impl Library {
    fn open(path: PathBuf) -> Result<Self, String> {
        let failed = |error: libloading::Error| format!("{}: {error}", path.display());
        // SAFETY: the library was built from such sources; loading it runs no code of ours.
        let library = unsafe { libloading::Library::new(&path) }.map_err(failed)?;
        // SAFETY: the prelude defines it with this type.
        let attach = unsafe {
            library.get::<unsafe extern "C" fn(*const super::abi::Model)>(b"moefold_attach\0")
        }
        .map_err(failed)?;
        // SAFETY: the table is a constant with the layout that the prelude declares.
        unsafe { attach(&raw const super::abi::MODEL) };
        let base = *attach as usize as u64;
        let (base, end) = extent(base).unwrap_or((base, base));
        Ok(Self {
            handle: library,
            path,
            base,
            end,
        })
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel, String> {
        let missing = |_| format!("{} has no EXPORT({name})", self.path.display());
        let run = format!("moefold_run_{name}\0");
        let sizes = format!("moefold_sizes_{name}\0");
        // SAFETY: EXPORT of the prelude defines both with these types.
        let (run, sizes) = unsafe {
            type Sizes = unsafe extern "C" fn(*mut u32) -> u32;
            (
                *self.handle.get(run.as_bytes()).map_err(missing)?,
                *self
                    .handle
                    .get::<Sizes>(sizes.as_bytes())
                    .map_err(missing)?,
            )
        };
        // SAFETY: without a place to write to it only counts; then it writes as many as it counted.
        let sizes = unsafe {
            let mut all = vec![0; sizes(std::ptr::null_mut()) as usize];
            sizes(all.as_mut_ptr());
            all
        };
        Ok(Kernel { run, sizes })
    }

    /// Whether an address is the library's own: constants of a kernel.
    pub(crate) fn contains(&self, address: u64) -> bool {
        (self.base..self.end).contains(&address)
    }

    /// A code address as the library's own number for it.
    pub(crate) fn site(&self, address: u64) -> u32 {
        address.wrapping_sub(self.base) as u32
    }

    /// File and line of a site, where binutils are at hand to tell; the innermost that is not the
    /// prelude's.
    pub(crate) fn line(&self, site: u32) -> Option<String> {
        // A return address is behind its call.
        let address = format!("{:#x}", site.checked_sub(1)?);
        let output = Command::new("addr2line")
            .arg("-i")
            .arg("-e")
            .arg(&self.path)
            .arg(address)
            .output();
        let said = String::from_utf8(output.ok()?.stdout).ok()?;
        let line = said.lines().find(|line| !line.contains(".cuh"))?;
        let name = line.rsplit('/').next()?.split(' ').next()?;
        (!name.starts_with('?')).then(|| name.to_owned())
    }
}

/// First and last address of the mapped file that an address is in, as the system tells.
fn extent(address: u64) -> Option<(u64, u64)> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let parse = |line: &str| {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        Some((hex(start)?, hex(end)?, fields.nth(4)?.to_owned()))
    };
    let all: Vec<_> = maps.lines().filter_map(parse).collect();
    let (_, _, name) = all
        .iter()
        .find(|(start, end, _)| (*start..*end).contains(&address))?;
    let of_it = all.iter().filter(|(_, _, other)| other == name);
    let base = of_it.clone().map(|(start, _, _)| *start).min()?;
    let end = of_it.map(|(_, end, _)| *end).max()?;
    Some((base, end))
}
