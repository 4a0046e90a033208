//! [`Mock`]: the NCCL without GPUs of `mock.c`, for tests here and in other crates.
//!
//! # Why this is sound
//!
//! The library was just compiled from a source that has NCCL's signatures, and beside them its own,
//! which are those used here. It is never closed.
#![expect(
    unsafe_code,
    reason = "calls into a library of C; see the module documentation"
)]

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, ptr};

use libloading::Library;

use super::{DeviceError, Nccl, Version};

/// A loaded mock, with a state of its own.
#[derive(Debug, Clone, Copy)]
pub struct Mock(&'static Library);

impl Mock {
    /// Compiles it, once, and loads a copy; nothing where there is no C compiler.
    pub fn load() -> Option<Self> {
        static COMPILED: OnceLock<Option<PathBuf>> = OnceLock::new();
        let compiled = COMPILED.get_or_init(|| {
            let folder = new_folder();
            let (code, library) = (folder.join("nccl.c"), folder.join("libnccl.so.2"));
            fs::write(&code, include_str!("mock.c")).expect("the source is written");
            let mut command = Command::new("cc");
            command.args(["-shared", "-fPIC", "-O1", "-pthread", "-o"]);
            let output = command.arg(&library).arg(&code).output().ok()?;
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}");
            Some(library)
        });
        // A file that is loaded already would share its state.
        let folder = new_folder();
        let copy = folder.join("copy.so");
        fs::copy(compiled.as_ref()?, &copy).expect("it is copied");
        // SAFETY: the library has no initializers.
        let library = unsafe { Library::new(&copy) }.expect("it was just compiled");
        // What is loaded stays when its file is gone.
        let _ = fs::remove_dir_all(folder);
        Some(Self(Box::leak(Box::new(library))))
    }

    /// As a library of this program's, which lacks the functions of these names.
    pub fn nccl(self, missing: &[&str]) -> Result<Nccl, DeviceError> {
        let find = |name: &str| {
            if missing.contains(&name) {
                return None;
            }
            // SAFETY: an address, which is only copied.
            let symbol = unsafe { self.0.get::<*const c_void>(name) };
            symbol.ok().map(|symbol| *symbol)
        };
        // SAFETY: see the module documentation.
        unsafe { Nccl::new(find, Version::new(2, 28, 9)) }
    }

    fn function<F: Copy>(self, name: &str) -> F {
        // SAFETY: as above; `F` is the type of that function at every call of this one.
        *unsafe { self.0.get::<F>(name) }.expect("the mock has it")
    }

    fn text(self, name: &str) -> String {
        let text = self.function::<extern "C" fn() -> *const c_char>(name)();
        // SAFETY: a buffer of the library's that ends with a zero.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }

    /// The calls so far, a line each; what they were about, indented.
    pub fn said(self) -> String {
        self.text("mock_said")
    }

    /// What no program may do, and was done.
    pub fn wrong(self) -> String {
        self.text("mock_wrong")
    }

    /// Communicators that were made and not ended.
    pub fn alive(self) -> c_long {
        self.function::<extern "C" fn() -> c_long>("mock_alive")()
    }

    /// Calls since the last [`Mock::fail`].
    pub fn calls(self) -> c_long {
        self.function::<extern "C" fn() -> c_long>("mock_calls")()
    }

    /// Makes the `n`-th call from now fail, counting those of `only` where it names one.
    pub fn fail(self, n: c_long, code: c_int, only: &str) {
        let only = CString::new(only).expect("no zero byte");
        let fail = self.function::<extern "C" fn(c_long, c_int, *const c_char)>("mock_fail");
        fail(n, code, only.as_ptr());
    }

    /// How often a busy communicator says so; -1 without end.
    pub fn busy(self, times: c_int) {
        self.function::<extern "C" fn(c_int)>("mock_busy")(times);
    }

    /// Communicators in which the caller is `rank` say from now on that this code happened in the
    /// background.
    pub fn break_down(self, rank: c_int, code: c_int) {
        self.function::<extern "C" fn(c_int, c_int)>("mock_break")(rank, code);
    }

    /// Data moves from here on between ranks that are threads, at once, as on a machine without streams.
    pub fn moves(self) {
        self.drain_by(ptr::null());
    }

    /// The same where streams of this thread have to be drained, by this function of a driver.
    pub(crate) fn drain_by(self, drain: *const c_void) {
        self.function::<extern "C" fn(*const c_void)>("mock_move")(drain);
    }

    /// Fails where something was done that may not be, or is left behind.
    #[track_caller]
    pub fn assert_clean(self) {
        assert_eq!(self.wrong(), "", "after:\n{}", self.said());
        assert_eq!(self.alive(), 0, "left behind after:\n{}", self.said());
    }
}

fn new_folder() -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("moefold-nccl-{}-{number}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    fs::create_dir_all(&folder).expect("the temporary folder is writable");
    folder
}
