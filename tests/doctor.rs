//! `moefold doctor` as a user meets it, on machines that lack this and that: stub libraries stand in
//! for CUDA's, and the program is told to look among them first.
#![expect(clippy::print_stdout, reason = "a test that is skipped says so")]

mod common {
    pub(crate) mod outcome;
}
#[path = "../kernels/tests/stubs/mod.rs"]
mod stubs;

use std::path::Path;
use std::process::Command;

use common::outcome::run;
use serde_json::Value;

/// C of an NVML that knows any device: not cut into instances, three NVLinks up, 1 GiB in use.
const NVML: &str = r#"
static int started = 0;
int nvmlInit_v2(void) { started++; return 0; }
int nvmlShutdown(void) { started--; return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  const char *is = "550.54.15";
  for (int i = 0; i < 10; i++) version[i] = is[i];
  return started == 1 ? 0 : 1;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
  *device = (void *)bus;
  return bus[4] == ':' ? 0 : 6;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
  memory[0] = 150754820096ull;
  memory[1] = memory[0] - (1 << 30);
  memory[2] = 1 << 30;
  return 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later) {
  *now = *later = 0;
  return 0;
}
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
  *active = link < 3;
  return link < 6 ? 0 : 2;
}
"#;

fn doctor(folder: &Path, arguments: &[&str]) -> String {
    let (code, text, errors) = run(Command::new(env!("CARGO_BIN_EXE_moefold"))
        .arg("doctor")
        .args(arguments)
        .env_clear()
        .env("MOEFOLD_CUDA", folder)
        .env("MOEFOLD_CACHE", folder.join("kept")));
    assert_eq!((code, errors.as_str()), (0, ""));
    text.replace(&folder.display().to_string(), "DIR")
}

fn json(folder: &Path) -> Value {
    serde_json::from_str(&doctor(folder, &["--json"])).expect("one JSON document")
}

/// A folder with these stub libraries; none where stubs cannot be tried: no compiler, or CUDA of the
/// machine's own beside them.
fn machine(libraries: &[(&str, &str)]) -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    if !libraries.is_empty() && !stubs::can_compile() {
        return None;
    }
    let own = json(folder.path());
    let own = own["libraries"].as_array().expect("a list");
    if own.iter().any(|library| library["state"] != "absent") {
        println!("skipped: this machine has CUDA of its own");
        return None;
    }
    for (name, source) in libraries {
        stubs::compile(folder.path(), name, source);
    }
    Some(folder)
}

fn missing(report: &Value) -> Vec<&str> {
    let missing = report["missing"].as_array().expect("a list");
    missing.iter().filter_map(|m| m["what"].as_str()).collect()
}

#[test]
fn a_machine_with_nothing_can_plan_and_hears_what_gpus_need() {
    let Some(folder) = machine(&[]) else { return };
    let text = doctor(folder.path(), &[]);
    for part in [
        "kernels    kept in DIR/kept\n",
        "GPUs       none\n",
        "CPU only: planning, and training on the CPU, work as they are. For GPUs:\n",
        "  driver    not found: nothing runs on a GPU\n            install NVIDIA's driver",
        "\n            pip install 'nvidia-cuda-nvrtc==13.*'\n",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    let verbose = doctor(folder.path(), &["-v"]);
    assert!(verbose.contains("\n  DIR (MOEFOLD_CUDA)\n"), "{verbose}");
    let report = json(folder.path());
    assert_eq!(report["gpu"], false);
    assert_eq!(missing(&report), ["driver", "NVRTC", "cuBLASLt", "NCCL"]);
    assert!(report["host"]["memory_bytes"].as_u64() > Some(0));
}

#[test]
fn a_driver_without_a_gpu_keeps_its_code() {
    let source = stubs::driver(13000, 100, 0);
    let Some(folder) = machine(&[("libcuda.so.1", &source)]) else {
        return;
    };
    let report = json(folder.path());
    assert_eq!(report["cuda"], "13.0");
    assert_eq!(report["no_gpu"]["why"], "the driver sees no GPU");
    assert_eq!(missing(&report)[0], "GPU");

    let source = stubs::driver(13000, 803, 1);
    stubs::compile(folder.path(), "libcuda.so.1", &source);
    let report = json(folder.path());
    assert_eq!(report["no_gpu"]["code"], 803);
    let text = doctor(folder.path(), &[]);
    let line = "  GPU       the driver does not start: cuInit failed with 803";
    assert!(text.contains(line), "{text}");
}

#[test]
fn a_driver_that_is_too_old_says_which_would_do() {
    let source = stubs::driver(11080, 0, 1);
    let Some(folder) = machine(&[("libcuda.so.1", &source)]) else {
        return;
    };
    let report = json(folder.path());
    assert_eq!(report["libraries"][0]["state"], "broken");
    let found = report["missing"][0]["found"].as_str().expect("text");
    assert!(
        found.contains("it is version 11.8; 12.0 or newer is needed"),
        "{found}"
    );
}

#[test]
fn devices_their_links_and_what_is_still_missing_are_shown() {
    let driver = stubs::driver(12040, 0, 2);
    let nvrtc = "int nvrtcVersion(int *a, int *b) { *a = 13; *b = 0; return 0; }
                 int nvrtcGetErrorString, nvrtcCreateProgram, nvrtcDestroyProgram,
                     nvrtcCompileProgram, nvrtcGetProgramLogSize, nvrtcGetProgramLog,
                     nvrtcGetCUBINSize, nvrtcGetCUBIN;";
    let nccl = "int ncclGetVersion(int *version) { *version = 22809; return 0; }";
    let Some(folder) = machine(&[
        ("libcuda.so.1", &driver),
        ("libnvidia-ml.so.1", NVML),
        ("libnvrtc-builtins.so.13.0", ""),
        ("libnvrtc.so.13", nvrtc),
        ("libnccl.so.2", nccl),
    ]) else {
        return;
    };
    let report = json(folder.path());
    assert_eq!(report["gpu"], true);
    assert_eq!(report["driver_release"], "550.54.15");
    let device = &report["devices"][1];
    assert_eq!(device["name"], "Stub H200");
    assert_eq!(device["capability"], "9.0");
    assert_eq!(device["memory_bytes"], 150_754_820_096_u64);
    assert_eq!(device["memory_used_bytes"], 1 << 30);
    assert_eq!(device["multiprocessors"], 132);
    assert_eq!(device["clock_mhz"], 1980);
    assert_eq!(device["pci"], "0000:01:00.0");
    assert_eq!(device["mig"], false);
    assert_eq!(device["nvlinks"], 3);
    let kinds: Vec<&str> = report["links"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|link| link["kind"].as_str())
        .collect();
    assert_eq!(kinds, ["nvlink", "pcie"]);
    // NVRTC 13 makes code that a driver of CUDA 12 does not load.
    assert_eq!(missing(&report), ["NVRTC", "cuBLASLt"]);

    let text = doctor(folder.path(), &[]);
    for part in [
        "driver     550.54.15, CUDA 12.4\n",
        "\n  0  Stub H200  9.0         140.40 GiB  1.00 GiB  132  1980        3201",
        "\nreaches  GPU 0  GPU 1\nGPU 0           NVLink\nGPU 1    PCIe\n",
        "\nNCCL      2.28.9   DIR/libnccl.so.2\n",
        "There are GPUs, and something is missing:\n",
        "it is of CUDA 13, and the driver of CUDA 12.4\n",
        "pip install 'nvidia-cuda-nvrtc-cu12==12.4.*'\n",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
}
