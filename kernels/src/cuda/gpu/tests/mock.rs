//! The driver of `driver.c`, compiled when a test runs. Every test loads its own copy.

use std::ffi::{CStr, CString, c_char, c_int, c_long};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::Library;

use crate::cuda::nvrtc::tests::skip;

/// A loaded mock. Stays loaded: what it gave may be in use until the process ends.
#[derive(Clone, Copy)]
pub(crate) struct Mock(&'static Library);

/// Compiles C to a library once, or says that it cannot.
pub(crate) fn library(
    slot: &'static OnceLock<Option<PathBuf>>,
    name: &str,
    source: &str,
) -> Option<&'static Path> {
    let compile = || {
        let folder = tempfile::tempdir().expect("a folder").keep();
        let (code, library) = (folder.join(format!("{name}.c")), folder.join(name));
        fs::write(&code, source).expect("the source is written");
        let mut command = Command::new("cc");
        command.args(["-shared", "-fPIC", "-O1", "-o"]);
        let output = command.arg(&library).arg(&code).output().ok()?;
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Some(library)
    };
    let library = slot.get_or_init(compile).as_deref();
    if library.is_none() {
        skip("stubs", "calls into CUDA's libraries (no C compiler, cc)");
    }
    library
}

impl Mock {
    /// A driver of its own, or nothing and a line that says so.
    pub(crate) fn driver() -> Option<Self> {
        static DRIVER: OnceLock<Option<PathBuf>> = OnceLock::new();
        library(&DRIVER, "mock-driver", include_str!("driver.c")).map(Self::copy_of)
    }

    /// Loads a copy: a file that is loaded already would share its state.
    pub(crate) fn copy_of(library: &Path) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join("mock.so");
        fs::copy(library, &copy).expect("it is copied");
        // SAFETY: the library has no initializers.
        let library = unsafe { Library::new(&copy) }.expect("it was just compiled");
        Self(Box::leak(Box::new(library)))
    }

    /// The address of a function.
    pub(crate) fn find(self, name: &str) -> Option<*const std::ffi::c_void> {
        // SAFETY: an address, which is only copied.
        let symbol = unsafe { self.0.get::<*const std::ffi::c_void>(name) };
        symbol.ok().map(|symbol| *symbol)
    }

    /// A function of the mock's own interface.
    ///
    /// # Safety
    /// `F` is the type of a pointer to it.
    pub(crate) unsafe fn function<F: Copy>(self, name: &str) -> F {
        // SAFETY: the caller's.
        *unsafe { self.0.get::<F>(name) }.expect("the mock has it")
    }

    fn text(self, name: &str) -> String {
        // SAFETY: the signature is that of the mock; the text is static.
        unsafe {
            let text = self.function::<extern "C" fn() -> *const c_char>(name)();
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }

    /// The calls so far, a line each; what they were about, indented.
    pub(crate) fn said(self) -> String {
        self.text("mock_said")
    }

    /// What no program may do, and was done.
    pub(crate) fn wrong(self) -> String {
        self.text("mock_wrong")
    }

    /// What was made and not destroyed.
    pub(crate) fn alive(self) -> c_long {
        // SAFETY: the signature is that of the mock.
        unsafe { self.function::<extern "C" fn() -> c_long>("mock_alive")() }
    }

    /// Calls since the last [`Mock::fail`].
    pub(crate) fn calls(self) -> c_long {
        // SAFETY: the signature is that of the mock.
        unsafe { self.function::<extern "C" fn() -> c_long>("mock_calls")() }
    }

    pub(crate) fn capability(self, value: c_int) {
        // SAFETY: the signature is that of the mock.
        unsafe { self.function::<extern "C" fn(c_int)>("mock_capability")(value) }
    }

    /// Makes the `n`-th call from now fail, counting those of `only` where it names one.
    pub(crate) fn fail(self, n: c_long, code: c_int, only: &str) {
        type Fail = extern "C" fn(c_long, c_int, *const c_char);
        let only = CString::new(only).expect("no zero byte");
        // SAFETY: the signature is that of the mock, which copies the text.
        unsafe { self.function::<Fail>("mock_fail")(n, code, only.as_ptr()) }
    }

    /// Makes every call from now on fail.
    pub(crate) fn poison(self, code: c_int) {
        // SAFETY: the signature is that of the mock.
        unsafe { self.function::<extern "C" fn(c_int)>("mock_poison")(code) }
    }

    /// Fails where something was done that may not be, or is left behind.
    #[track_caller]
    pub(crate) fn assert_clean(self) {
        assert_eq!(self.wrong(), "", "after:\n{}", self.said());
        assert_eq!(self.alive(), 0, "left behind after:\n{}", self.said());
    }
}
