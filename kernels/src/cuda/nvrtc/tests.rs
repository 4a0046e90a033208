//! The compiler itself: what it makes of programs, good and bad.

use std::io::{self, Write as _};

use super::report::{complaints, resources};
use super::{Nvrtc, Resources};
use crate::cuda::program::{Architecture, Define, Source};

/// NVRTC, or nothing and a line that says so; a failure where `MOEFOLD_REQUIRE` names it.
pub(crate) fn nvrtc_or_skip() -> Option<Nvrtc> {
    match Nvrtc::find() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) => {
            skip("nvrtc", &format!("compiling kernels ({error})"));
            None
        }
    }
}

/// Says that something is not tested here.
///
/// # Panics
/// When `MOEFOLD_REQUIRE` names what is missing.
pub(crate) fn skip(missing: &str, what: &str) {
    let required = std::env::var("MOEFOLD_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name == missing),
        "MOEFOLD_REQUIRE names {missing}: cannot test {what}"
    );
    // Straight to stderr: the test harness shows what a passing test prints to no one.
    let _ = writeln!(io::stderr(), "skipped for want of {missing}: {what}");
}

const GOOD: Source = Source {
    stem: "good",
    text: r#"
#include "prelude.cuh"
KERNEL(64, 1) scale(const T* x, T* y, float by) {
  y[threadIdx.x] = from_f32<T>(to_f32(x[threadIdx.x]) * by);
}
EXPORT(scale)
"#,
};

const SPILLING: Source = Source {
    stem: "spilling",
    text: r#"
#include "prelude.cuh"
KERNEL(64, 1) local_array(float* x, int n) {
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = x[i * n];
  for (int j = 0; j < n; j++)
    for (int i = 0; i < 64; i++) a[i] *= a[(i + j) & 63];
  for (int i = 0; i < 64; i++) x[i] = a[i];
}
EXPORT(local_array)
"#,
};

const BAD: Source = Source {
    stem: "bad",
    text: "#include \"prelude.cuh\"\nKERNEL(64, 1) broken(float* x) { x[0] = undeclared; }\n",
};

#[test]
fn a_program_compiles_for_every_architecture_and_says_what_it_takes() {
    let Some(nvrtc) = nvrtc_or_skip() else { return };
    for dtype in [moefold_profiles::Dtype::F32, moefold_profiles::Dtype::Bf16] {
        let program = GOOD.with(&[Define::dtype("T", dtype)]);
        for architecture in [Architecture::SM80, Architecture::SM90, Architecture::SM100] {
            let cubin = nvrtc.compile(&program, architecture).expect("it compiles");
            assert!(
                cubin.image.starts_with(b"\x7fELF"),
                "a cubin is an ELF file"
            );
            let [scale]: [Resources; 1] = resources(&cubin.log)
                .try_into()
                .expect("the log speaks of one kernel");
            assert_eq!(scale.entry, "scale");
            assert!((1..=32).contains(&scale.registers), "{scale:?}");
            assert_eq!(scale.stack + scale.spill_stores + scale.shared, 0);
            assert_eq!(complaints(&cubin.log), [""; 0]);
        }
    }
}

#[test]
fn registers_kept_in_memory_are_reported() {
    let Some(nvrtc) = nvrtc_or_skip() else { return };
    let cubin = nvrtc
        .compile(&SPILLING.with(&[]), Architecture::SM90)
        .expect("it compiles");
    assert!(resources(&cubin.log)[0].stack >= 256, "{}", cubin.log);
}

#[test]
fn a_program_that_does_not_compile_shows_the_log_the_file_and_the_defines() {
    let Some(nvrtc) = nvrtc_or_skip() else { return };
    let program = BAD.with(&[Define::int("TILE", 3)]);
    let error = nvrtc
        .compile(&program, Architecture::SM90)
        .expect_err("it does not compile");
    let said = error.during("bad::forward").to_string();
    for part in [
        "bad::forward: nvrtcCompileProgram failed with 6 (NVRTC_ERROR_COMPILATION)",
        "bad.cu -DTILE=3 for sm_90a",
        "bad.cu(2): error: identifier \"undeclared\" is undefined",
    ] {
        assert!(said.contains(part), "{part} is not in:\n{said}");
    }
}
