//! `moefold kernels` as a user types it: the table, a pack, and what it says where NVRTC is missing.

use std::process::{Command, Output};

use tempfile::tempdir;

/// Runs the program with the libraries of this machine and a cache that tests keep, and share with those that compile every
/// program: what did not change is not compiled again.
fn kernels(arguments: &[&str]) -> Output {
    let test = std::env::current_exe().expect("a test is a file");
    Command::new(env!("CARGO_BIN_EXE_moefold"))
        .arg("kernels")
        .args(arguments)
        .env("MOEFOLD_CACHE", test.with_file_name("compiled-kernels"))
        .output()
        .expect("the program starts")
}

#[test]
fn kernels_are_compiled_shown_and_packed_or_it_is_said_what_to_install() {
    let folder = tempdir().expect("a folder");
    let pack = folder.path().join("kernels.pack");
    let out = pack.to_str().expect("a path in UTF-8");
    let output = kernels(&["--json", "--arch", "sm_80", "--out", out]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(1) {
        let required = std::env::var("MOEFOLD_REQUIRE").unwrap_or_default();
        assert!(!required.contains("nvrtc"), "{stderr}");
        assert!(stderr.contains("nvidia-cuda-nvrtc"), "{stderr}");
        assert!(!pack.exists());
        return;
    }
    assert!(output.status.success(), "{stderr}");
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let kernels = answer["kernels"].as_array().expect("a list");
    assert!(!kernels.is_empty());
    for kernel in kernels {
        assert_eq!(kernel["architecture"], "sm_80");
        assert!(kernel["registers"].as_u64() <= kernel["registers_max"].as_u64());
    }
    let written = std::fs::metadata(&pack).expect("a pack").len();
    assert!(written > 1000, "{written} bytes");
}

#[test]
fn an_architecture_that_is_none_is_a_bad_request() {
    for wrong in ["sm_70", "hopper"] {
        let output = kernels(&["--arch", wrong]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains(wrong) && stderr.contains("sm_90a"),
            "{stderr}"
        );
    }
}
