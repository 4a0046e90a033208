//! What finding libraries comes to, against stub libraries. The dynamic loader keeps what it opened, so
//! every case is a process of its own: this test binary again, with `MOEFOLD_TEST_CHILD` set.
#![expect(clippy::print_stdout, reason = "the child answers on stdout")]

mod stubs;

use std::path::Path;
use std::process::Command;

use moefold_kernels::cuda::libraries::{Answer, CublasLt, Driver, Library, Nvrtc, find, gate};
use moefold_kernels::cuda::nccl::Nccl;

/// What a process says that finds CUDA in `folder` alone, one line a question.
fn said(folder: &Path) -> String {
    said_with(&[("MOEFOLD_CUDA", folder)], folder)
}

/// The same, told of folders by these variables; paths are shown from `root`.
fn said_with(variables: &[(&str, &Path)], root: &Path) -> String {
    let output = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "child", "--nocapture"])
        .env_clear()
        .env("MOEFOLD_TEST_CHILD", "1")
        .envs(variables.iter().copied())
        .output()
        .expect("the binary starts");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text.replace(&root.display().to_string(), "DIR")
}

/// Not a test of its own: what the other tests run in a process of its own.
#[test]
fn child() {
    if std::env::var_os("MOEFOLD_TEST_CHILD").is_none() {
        return;
    }
    println!();
    for library in Library::ALL {
        match find(library) {
            Answer::Found(found) => {
                let version = found.version.map_or("?".to_owned(), |v| v.to_string());
                println!("{library}: {version} at {}", found.path.display());
                for passed in &found.passed_over {
                    println!(
                        "{library} passed over {}: {}",
                        passed.path.display(),
                        passed.why
                    );
                }
            }
            Answer::Absent { searched } => println!("{library}: absent; {}", searched[0]),
            Answer::Broken { path, why } => println!("{library}: broken {}: {why}", path.display()),
        }
    }
    match Driver::get() {
        Ok(driver) => {
            let launch = driver.library().has("cuLaunchKernel");
            println!("gate: {} devices, can launch: {launch}", driver.devices());
        }
        Err(no_gpu) => println!("gate: {no_gpu} | {}", no_gpu.remedy()),
    }
    if let Err(unusable) = CublasLt::get() {
        println!("gate: {unusable} | {}", unusable.remedy);
    }
    match Nccl::open() {
        Ok(nccl) => println!("gate: {nccl:?}, all-to-all: {}", nccl.has_all_to_all()),
        Err(error) => println!("gate: {error}"),
    }
    match Nvrtc::get() {
        Ok(nvrtc) => println!("gate: NVRTC {}", nvrtc.version()),
        Err(unusable) => println!("gate: {unusable} | {}", unusable.remedy),
    }
}

fn says(text: &str, line: &str) {
    assert!(
        text.lines().any(|said| said == line),
        "no line {line:?} in:\n{text}"
    );
}

/// The machine may have CUDA of its own, which some cases cannot be tried beside.
fn has_own(library: &str) -> bool {
    let empty = tempfile::tempdir().expect("a temporary folder");
    let text = said(empty.path());
    let own = !text.contains(&format!("{library}: absent"));
    if own {
        println!("skipped: this machine has the {library}");
    }
    own
}

#[test]
fn no_driver_is_an_answer() {
    if has_own("driver") {
        return;
    }
    let empty = tempfile::tempdir().expect("a temporary folder");
    let text = said(empty.path());
    says(&text, "driver: absent; DIR (MOEFOLD_CUDA)");
    says(
        &text,
        "gate: driver: not found | install NVIDIA's driver, 525 or newer (Debian, Ubuntu: apt \
         install nvidia-driver); start a container with --gpus all",
    );
}

/// What a process says beside a stub driver of this C.
fn beside_driver(source: &str) -> Option<String> {
    if !stubs::can_compile() || has_own("driver") {
        return None;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    stubs::compile(folder.path(), "libcuda.so.1", source);
    Some(said(folder.path()))
}

#[test]
fn a_driver_without_a_gpu_says_so() {
    for source in [stubs::driver(13000, 100, 0), stubs::driver(13000, 0, 0)] {
        let Some(text) = beside_driver(&source) else {
            return;
        };
        says(&text, "driver: 13.0 at DIR/libcuda.so.1");
        says(
            &text,
            "gate: the driver sees no GPU | check nvidia-smi and CUDA_VISIBLE_DEVICES; start a \
             container with --gpus all",
        );
    }
}

#[test]
fn a_driver_that_does_not_match_its_module_keeps_its_code() {
    let source = stubs::driver(12040, 803, 1);
    let Some(text) = beside_driver(&source) else {
        return;
    };
    says(
        &text,
        "gate: the driver does not start: cuInit failed with 803 \
         (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH) | driver and kernel module differ: reboot, or match \
         a container's libcuda to the host",
    );
    // A driver of CUDA 12 wants the compiler of CUDA 12.
    assert!(text.contains("'nvidia-cuda-nvrtc-cu12==12.4.*'"), "{text}");
}

#[test]
fn an_old_driver_is_refused_with_the_version_it_should_have() {
    let Some(text) = beside_driver(&stubs::driver(11080, 0, 1)) else {
        return;
    };
    says(
        &text,
        "driver: broken DIR/libcuda.so.1: it is version 11.8; 12.0 or newer is needed (tensor \
         maps and code for sm_90a came with it)",
    );
    assert!(
        text.contains("gate: driver: DIR/libcuda.so.1: it is version 11.8"),
        "{text}"
    );
}

#[test]
fn functions_that_are_missing_are_named_and_not_called() {
    let source = stubs::driver(13000, 0, 1).replace("cuDeviceGetName", "cuDeviceNameGet");
    let Some(text) = beside_driver(&source) else {
        return;
    };
    says(&text, "driver: 13.0 at DIR/libcuda.so.1");
    assert!(
        text.contains("gate: driver: DIR/libcuda.so.1 has no cuDeviceGetName | "),
        "{text}"
    );
}

#[test]
fn a_complete_driver_passes_the_gate() {
    let Some(text) = beside_driver(&stubs::driver(13000, 0, 2)) else {
        return;
    };
    says(&text, "gate: 2 devices, can launch: false");
}

/// What a process says beside an NCCL of this version without the functions of these names.
fn beside_nccl(version: u32, missing: &[&str]) -> Option<String> {
    if !stubs::can_compile() || has_own("NCCL") {
        return None;
    }
    let functions = gate::Nccl::FUNCTIONS.iter().chain(&["ncclAlltoAll"]);
    let mut source =
        format!("int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}");
    for name in functions.filter(|name| **name != "ncclGetVersion" && !missing.contains(name)) {
        source = format!("{source}\nint {name}(void) {{ return 3; }}");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    stubs::compile(folder.path(), "libnccl.so.2", &source);
    Some(said(folder.path()))
}

#[test]
fn nccl_is_opened_with_what_it_has() {
    let Some(text) = beside_nccl(22809, &[]) else {
        return;
    };
    says(&text, "NCCL: 2.28.9 at DIR/libnccl.so.2");
    says(&text, "gate: NCCL 2.28.9, all-to-all: true");
    let older = beside_nccl(22107, &["ncclAlltoAll"]).expect("as before");
    says(&older, "gate: NCCL 2.21.7, all-to-all: false");
}

#[test]
fn no_nccl_an_old_one_and_half_of_one_are_refused_with_what_would_help() {
    let Some(text) = beside_nccl(22809, &["ncclCommSplit", "ncclSend"]) else {
        return;
    };
    says(
        &text,
        "gate: ncclGetVersion: NCCL: DIR/libnccl.so.2 has no ncclCommSplit, ncclSend; pip install \
         nvidia-nccl-cu13",
    );
    let old = beside_nccl(21706, &[]).expect("as before");
    says(
        &old,
        "gate: ncclGetVersion: NCCL: DIR/libnccl.so.2: it is version 2.17.6; 2.18 or newer is needed \
         (it is the first to split communicators); pip install nvidia-nccl-cu13",
    );
    let empty = tempfile::tempdir().expect("a temporary folder");
    says(
        &said(empty.path()),
        "gate: ncclGetVersion: NCCL: not found; pip install nvidia-nccl-cu13",
    );
}

#[test]
fn every_variable_leads_to_the_file_it_should() {
    if !stubs::can_compile() || has_own("driver") {
        return;
    }
    let root = tempfile::tempdir().expect("a temporary folder");
    let source = stubs::driver(13000, 0, 1);
    for (variable, inside) in [
        ("MOEFOLD_CUDA", ""),
        ("MOEFOLD_CUDA", "targets/x86_64-linux/lib"),
        ("LD_LIBRARY_PATH", ""),
        ("CUDA_HOME", "lib64"),
        ("CUDA_PATH", "lib"),
        (
            "VIRTUAL_ENV",
            "lib/python3.12/site-packages/nvidia/cu13/lib",
        ),
        ("CONDA_PREFIX", "lib"),
        (
            "HOME",
            ".local/lib/python3.12/site-packages/nvidia/driver/lib",
        ),
    ] {
        let home = root.path().join(variable).join(inside.len().to_string());
        let folder = home.join(inside);
        std::fs::create_dir_all(&folder).expect("a folder");
        stubs::compile(&folder, "libcuda.so.1", &source);
        let text = said_with(&[(variable, &home)], &home);
        let path = Path::new("DIR").join(inside).join("libcuda.so.1");
        says(&text, &format!("driver: 13.0 at {}", path.display()));
    }
}

#[test]
fn files_that_are_no_libraries_are_reported_and_passed_over() {
    if !stubs::can_compile() || has_own("driver") {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let garbage = folder.path().join("libcuda.so.1");
    std::fs::write(&garbage, [0x7f; 4096]).expect("a file");
    let text = said(folder.path());
    assert!(
        text.contains("driver: broken DIR/libcuda.so.1: invalid ELF header"),
        "{text}"
    );

    // A toolkit's folder beside it has one that works.
    let beside = folder.path().join("lib64");
    std::fs::create_dir(&beside).expect("a folder");
    let source = stubs::driver(13000, 0, 1);
    stubs::compile(&beside, "libcuda.so.1", &source);
    let text = said(folder.path());
    says(&text, "driver: 13.0 at DIR/lib64/libcuda.so.1");
    says(
        &text,
        "driver passed over DIR/libcuda.so.1: invalid ELF header",
    );
}

#[test]
fn nvrtc_without_its_second_half_is_broken() {
    if !stubs::can_compile() || has_own("NVRTC") {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = "int nvrtcVersion(int *a, int *b) { *a = 13; *b = 0; return 0; }";
    stubs::compile(folder.path(), "libnvrtc.so.13", source);
    let text = said(folder.path());
    says(
        &text,
        "NVRTC: broken DIR/libnvrtc.so.13: libnvrtc-builtins.so.13.0, without which it compiles \
         nothing, is neither beside it nor on the loader's path",
    );
    stubs::compile(folder.path(), "libnvrtc-builtins.so.13.0", "");
    let text = said(folder.path());
    says(&text, "NVRTC: 13.0 at DIR/libnvrtc.so.13");
    assert!(
        text.contains("gate: NVRTC: DIR/libnvrtc.so.13 has no nvrtcGetErrorString"),
        "{text}"
    );
}

#[test]
fn an_old_copy_gives_way_to_a_newer_one_further_on() {
    if !stubs::can_compile() || has_own("cuBLASLt") {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (mine, system) = (folder.path().join("mine"), folder.path().join("system"));
    std::fs::create_dir(&mine).expect("a folder");
    std::fs::create_dir(&system).expect("a folder");
    let version = |major: u32| {
        format!(
            "int cublasLtGetProperty(int which, int *value) {{
               *value = which == 0 ? {major} : which == 1 ? 1 : 3; return 0; }}"
        )
    };
    // The loader answers a name with what it has open by it, so the first must be closed again.
    stubs::compile(&mine, "libcublasLt.so.12", &version(11));
    stubs::compile(&system, "libcublasLt.so.12", &version(12));
    let variables = [
        ("MOEFOLD_CUDA", mine.as_path()),
        ("LD_LIBRARY_PATH", &system),
    ];
    let text = said_with(&variables, folder.path());
    says(&text, "cuBLASLt: 12.1.3 at DIR/system/libcublasLt.so.12");
    assert!(
        text.contains("cuBLASLt passed over DIR/mine/libcublasLt.so.12: it is version 11.1.3"),
        "{text}"
    );
}
