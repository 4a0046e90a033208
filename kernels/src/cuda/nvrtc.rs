//! NVRTC: a [`Program`] to machine code for one architecture.
//!
//! The library is opened at run time; the prelude's headers are handed over in memory, so nothing is
//! read from disk and no CUDA header is needed. NVRTC compiles programs of several threads at once.
//!
//! # Why this is sound
//!
//! Functions come from a table whose signatures are those of `nvrtc.h` and whose library is never
//! unloaded. Every pointer handed over is to memory that outlives the call, sizes are the ones the
//! library asked for, and a handle is destroyed once, when [`Handle`] drops.
#![expect(unsafe_code, reason = "calls into NVRTC; see the module documentation")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::ptr;

use cudarc::nvrtc::sys::nvrtcProgram;

use crate::cuda::error::DeviceError;
use crate::cuda::libraries::{Version, gate};
use crate::cuda::prelude;
use crate::cuda::program::{Architecture, Define, Program, Source};
use crate::cuda::table::table;

pub(crate) mod report;

pub use report::Resources;

/// Results are numbers: see [`crate::cuda::table`].
type Code = c_int;

table! {
    /// What is called of NVRTC.
    Functions {
        nvrtcVersion: fn(*mut c_int, *mut c_int) -> Code;
        nvrtcCreateProgram: fn(
            *mut nvrtcProgram, *const c_char, *const c_char,
            c_int, *const *const c_char, *const *const c_char,
        ) -> Code;
        nvrtcDestroyProgram: fn(*mut nvrtcProgram) -> Code;
        nvrtcCompileProgram: fn(nvrtcProgram, c_int, *const *const c_char) -> Code;
        nvrtcGetProgramLogSize: fn(nvrtcProgram, *mut usize) -> Code;
        nvrtcGetProgramLog: fn(nvrtcProgram, *mut c_char) -> Code;
        nvrtcGetCUBINSize: fn(nvrtcProgram, *mut usize) -> Code;
        nvrtcGetCUBIN: fn(nvrtcProgram, *mut c_char) -> Code;
    }
    optional {}
}

/// Machine code of a program, and what the compiler said about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cubin {
    pub(crate) image: Vec<u8>,
    pub(crate) log: String,
}

/// Options of the compiler.
pub(crate) fn options(architecture: Architecture) -> [String; 3] {
    [
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--ptxas-options=-v".to_owned(),
    ]
}

/// The text that is compiled: the defines, then the source with its own line numbers. As options the
/// defines would also reach the header that NVRTC puts before every source, which has a `T` of its
/// own.
pub(crate) fn source(program: &Program, architecture: Architecture) -> String {
    let mut source = format!("#define ARCH {}\n", architecture.number());
    for Define { name, value } in &program.defines {
        // Writing to a string does not fail.
        let _ = writeln!(source, "#define {name} {value}");
    }
    let Source { stem, text } = program.source;
    let _ = write!(source, "#line 1 \"{stem}.cu\"\n{text}");
    source
}

/// An NVRTC that was found.
pub(crate) struct Nvrtc {
    functions: Functions,
    version: Version,
}

impl Nvrtc {
    /// The NVRTC of this machine. The error says what to install.
    pub(crate) fn find() -> Result<Self, DeviceError> {
        let token = gate::Nvrtc::get().map_err(|unusable| {
            DeviceError::new("NVRTC", format!("{}; {}", unusable.why, unusable.remedy))
        })?;
        let found = token.library();
        // SAFETY: the library is NVRTC and stays open.
        unsafe { Self::new(|symbol| found.symbol(symbol)) }
    }

    /// The compiler of a library in which `find` looks functions up. The error says what is missing.
    ///
    /// # Safety
    /// The library is NVRTC and stays loaded.
    pub(crate) unsafe fn new(
        find: impl Fn(&str) -> Option<*const c_void>,
    ) -> Result<Self, DeviceError> {
        // SAFETY: the signatures are NVRTC's, the rest is the caller's.
        let functions = unsafe { Functions::resolve(find) }.map_err(|symbol| {
            DeviceError::new(
                "dlsym",
                format!("the NVRTC found has no {symbol}; install nvidia-cuda-nvrtc 13.0 or later"),
            )
        })?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two integers to write to.
        let code = unsafe { (functions.nvrtcVersion)(&raw mut major, &raw mut minor) };
        check("nvrtcVersion", code, String::new)?;
        Ok(Self {
            functions,
            version: Version::new(major.unsigned_abs(), minor.unsigned_abs(), 0),
        })
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Compiles a program. The error of a program that does not compile holds the compiler's log.
    pub(crate) fn compile(
        &self,
        program: &Program,
        architecture: Architecture,
    ) -> Result<Cubin, DeviceError> {
        let what = || format!("{program} for {architecture} by NVRTC {}", self.version);
        let handle = Handle::create(&self.functions, program, architecture).map_err(|error| {
            DeviceError {
                detail: what(),
                ..error
            }
        })?;
        let options = options(architecture).map(text);
        let options = options.each_ref().map(|option| option.as_ptr());
        // SAFETY: the options live until after the call.
        let code = unsafe {
            (self.functions.nvrtcCompileProgram)(
                handle.program,
                options.len() as c_int,
                options.as_ptr(),
            )
        };
        let log = handle.log();
        check("nvrtcCompileProgram", code, || {
            format!("{}\n{}", what(), log.trim_end())
        })?;
        let image = handle.image().map_err(|error| DeviceError {
            detail: what(),
            ..error
        })?;
        Ok(Cubin { image, log })
    }
}

/// A program inside NVRTC.
struct Handle<'a> {
    functions: &'a Functions,
    program: nvrtcProgram,
}

impl<'a> Handle<'a> {
    fn create(
        functions: &'a Functions,
        program: &Program,
        architecture: Architecture,
    ) -> Result<Self, DeviceError> {
        let source = text(source(program, architecture));
        let file = text(format!("{}.cu", program.source.stem));
        let headers = prelude::HEADERS.map(|(name, content)| (text(name), text(content)));
        let names = headers.each_ref().map(|(name, _)| name.as_ptr());
        let contents = headers.each_ref().map(|(_, content)| content.as_ptr());
        let mut handle = ptr::null_mut();
        // SAFETY: all texts live until after the call, which copies them; the arrays have as many
        // entries as said.
        let code = unsafe {
            (functions.nvrtcCreateProgram)(
                &raw mut handle,
                source.as_ptr(),
                file.as_ptr(),
                headers.len() as c_int,
                contents.as_ptr(),
                names.as_ptr(),
            )
        };
        check("nvrtcCreateProgram", code, String::new)?;
        Ok(Self {
            functions,
            program: handle,
        })
    }

    /// What the compiler said; empty where it does not tell.
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: a size to write to, then as many bytes as it says.
        unsafe {
            if (self.functions.nvrtcGetProgramLogSize)(self.program, &raw mut size) != 0 {
                return String::new();
            }
            let mut log = vec![0_u8; size];
            if (self.functions.nvrtcGetProgramLog)(self.program, log.as_mut_ptr().cast()) != 0 {
                return String::new();
            }
            while log.last() == Some(&0) {
                log.pop();
            }
            String::from_utf8_lossy(&log).into_owned()
        }
    }

    fn image(&self) -> Result<Vec<u8>, DeviceError> {
        let mut size = 0;
        // SAFETY: a size to write to.
        let code = unsafe { (self.functions.nvrtcGetCUBINSize)(self.program, &raw mut size) };
        check("nvrtcGetCUBINSize", code, String::new)?;
        let mut image = vec![0_u8; size];
        // SAFETY: as many bytes as the library said.
        let code =
            unsafe { (self.functions.nvrtcGetCUBIN)(self.program, image.as_mut_ptr().cast()) };
        check("nvrtcGetCUBIN", code, String::new)?;
        Ok(image)
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        // A program that cannot be destroyed is leaked: there is nothing else to do about it.
        // SAFETY: created by NVRTC, destroyed here alone.
        unsafe { (self.functions.nvrtcDestroyProgram)(&raw mut self.program) };
    }
}

fn check(
    call: &'static str,
    code: Code,
    detail: impl FnOnce() -> String,
) -> Result<(), DeviceError> {
    if code == 0 {
        return Ok(());
    }
    let mut error = DeviceError::new(call, detail());
    error.code = Some((i64::from(code), name(code).to_owned()));
    Err(error)
}

/// The name of a code, as `nvrtc.h` has it.
fn name(code: Code) -> &'static str {
    match code {
        1 => "NVRTC_ERROR_OUT_OF_MEMORY",
        2 => "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        3 => "NVRTC_ERROR_INVALID_INPUT",
        4 => "NVRTC_ERROR_INVALID_PROGRAM",
        5 => "NVRTC_ERROR_INVALID_OPTION",
        6 => "NVRTC_ERROR_COMPILATION",
        7 => "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        8 => "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
        9 => "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
        10 => "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        11 => "NVRTC_ERROR_INTERNAL_ERROR",
        _ => "a code that this version does not know",
    }
}

/// Text for C.
///
/// # Panics
/// When it holds a zero byte, which no source of this crate does.
fn text(text: impl Into<String>) -> CString {
    CString::new(text.into()).expect("sources and options hold no zero byte")
}

#[cfg(test)]
pub(crate) mod tests;
