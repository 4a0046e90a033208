//! `--device` as a user meets it, on machines with and without a GPU: stub libraries stand in for
//! CUDA's, with a GPU of any size.
#![expect(clippy::print_stdout, reason = "a test that is skipped says so")]

mod common {
    pub(crate) mod json;
    pub(crate) mod outcome;
}
#[path = "../kernels/tests/stubs/mod.rs"]
mod stubs;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::json;
use common::outcome::run;
use serde_json::Value;

/// A machine: a folder with the CUDA libraries it has.
struct Machine(tempfile::TempDir);

/// An NVRTC of CUDA `major`.0.
fn nvrtc(major: u32) -> String {
    format!(
        "int nvrtcVersion(int *a, int *b) {{ *a = {major}; *b = 0; return 0; }}
         int nvrtcGetErrorString, nvrtcCreateProgram, nvrtcDestroyProgram, nvrtcCompileProgram,
             nvrtcGetProgramLogSize, nvrtcGetProgramLog, nvrtcGetCUBINSize, nvrtcGetCUBIN;"
    )
}

impl Machine {
    /// None where stubs cannot be tried: no compiler, or CUDA of the machine's own beside them.
    fn with(libraries: &[(&str, String)]) -> Option<Self> {
        let machine = Self(tempfile::tempdir().expect("a temporary folder"));
        if !libraries.is_empty() && !stubs::can_compile() {
            return None;
        }
        let (_, report, _) = machine.run(&["doctor", "--json"]);
        let report = json::document(&report);
        let own = report["libraries"].as_array().expect("a list");
        if own.iter().any(|library| library["state"] != "absent") {
            println!("skipped: this machine has CUDA of its own");
            return None;
        }
        for (name, source) in libraries {
            stubs::compile(machine.0.path(), name, source);
        }
        Some(machine)
    }

    /// One H200, or as much of one as this many bytes.
    fn with_gpu(bytes: u64) -> Option<Self> {
        Self::with_gpus(&[bytes])
    }

    /// An H200 for each number, or as much of one as this many bytes.
    fn with_gpus(bytes: &[u64]) -> Option<Self> {
        let all: Vec<String> = bytes.iter().map(|bytes| format!("{bytes}ul")).collect();
        let of_device = format!("((unsigned long[]){{{}}})[device]", all.join(", "));
        let driver = stubs::driver(13000, 0, bytes.len() as i32);
        let driver = driver.replace("150754820096ul", &of_device);
        Self::with(&[
            ("libcuda.so.1", driver),
            ("libnvrtc-builtins.so.13.0", String::new()),
            ("libnvrtc.so.13", nvrtc(13)),
        ])
    }

    /// Runs the program; its exit code, standard output and standard error.
    fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        self.run_in(&[], arguments)
    }

    /// The same with these variables in its environment.
    fn run_in(&self, variables: &[(&str, &str)], arguments: &[&str]) -> (i32, String, String) {
        run(Command::new(env!("CARGO_BIN_EXE_moefold"))
            .args(arguments)
            .env_clear()
            .envs(variables.iter().copied())
            .env("MOEFOLD_CUDA", self.0.path())
            .env("MOEFOLD_CACHE", self.0.path().join("kept")))
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// Writes a plan for this project's executor on H200s.
    fn plan(&self, rest: &[&str]) -> String {
        let plan = self.path("plan.json");
        let stack = [
            "plan",
            "--cluster",
            "dgx-h200",
            "--stack",
            "moefold",
            "--out",
        ];
        let (code, _, errors) = self.run(&[&stack[..], &[&plan], rest].concat());
        assert_eq!(code, 0, "{errors}");
        plan
    }

    /// What `execute` says of a plan; it leaves nothing behind.
    fn refused(&self, rest: &[&str]) -> String {
        self.refused_in(&[], rest)
    }

    /// The same with these variables in its environment.
    fn refused_in(&self, variables: &[(&str, &str)], rest: &[&str]) -> String {
        let (code, errors) = self.execute(variables, rest);
        assert_eq!(code, 2, "{errors}");
        assert_eq!(errors.lines().count(), 1, "one line: {errors}");
        errors
    }

    /// Has the plan judged and found to have room: what fails is the stub, which has no memory to give,
    /// when a rank opens it.
    fn accepted(&self, rest: &[&str]) {
        let (code, errors) = self.execute(&[], rest);
        assert_eq!(code, 1, "{errors}");
        check(&errors, &["the driver found has no cu"]);
    }

    /// Executes the plan, which leaves nothing behind.
    fn execute(&self, variables: &[(&str, &str)], rest: &[&str]) -> (i32, String) {
        let text = self.path("text.txt");
        fs::write(&text, "a text ".repeat(40_000)).expect("writes");
        let (plan, out) = (self.path("plan.json"), self.path("run"));
        let execute = [
            "execute", &plan, "--text", &text, "--out", &out, "--steps", "1",
        ];
        let (code, _, errors) = self.run_in(variables, &[&execute, rest].concat());
        assert!(!Path::new(&out).exists() || code == 1, "{errors}");
        let _ = fs::remove_dir_all(&out);
        (code, errors)
    }
}

fn check(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

const TINY: [&str; 8] = [
    "--model",
    "quickstart",
    "--gpus",
    "1",
    "--seq-len",
    "64",
    "--global-batch",
    "2",
];

#[test]
fn without_a_gpu_auto_is_the_cpu_and_cuda_is_refused_with_what_would_help() {
    let Some(machine) = Machine::with(&[]) else {
        return;
    };
    machine.plan(&[&TINY[..], &["--precision", "fp32"]].concat());
    let refusal = machine.refused(&["--device", "cuda"]);
    check(
        &refusal,
        &[
            "--device cuda: driver: not found",
            "install NVIDIA's driver",
        ],
    );
    let (plan, text) = (machine.path("plan.json"), machine.path("text.txt"));
    let arguments = ["execute", &plan, "--text", &text, "--steps", "1", "--out"];
    let (code, _, errors) = machine.run(&[&arguments[..], &[&machine.path("cpu-run")]].concat());
    // Nobody expects a GPU of a machine without a driver.
    assert_eq!((code, errors.as_str()), (0, ""));
    let environment = fs::read_to_string(machine.path("cpu-run/env.json")).expect("written");
    check(&environment, &["\"device\": \"cpu\""]);
    // bf16 is what plans for GPUs are made in.
    machine.plan(&TINY);
    let refusal = machine.refused(&[]);
    check(
        &refusal,
        &[
            "precision \"bf16\" is not implemented on the CPU",
            "moefold doctor",
        ],
    );
}

#[test]
fn a_gpu_that_cannot_be_used_is_named_where_auto_leaves_it() {
    let Some(machine) = Machine::with(&[
        ("libcuda.so.1", stubs::driver(12040, 0, 1)),
        ("libnvrtc-builtins.so.13.0", String::new()),
        ("libnvrtc.so.13", nvrtc(13)),
    ]) else {
        return;
    };
    let (code, doctor, _) = machine.run(&["doctor"]);
    assert_eq!(code, 0);
    check(&doctor, &["--device auto trains on the CPU.\n"]);
    machine.plan(&[&TINY[..], &["--precision", "fp32"]].concat());
    let (text, plan) = (machine.path("text.txt"), machine.path("plan.json"));
    fs::write(&text, "a text ".repeat(40)).expect("writes");
    let arguments = ["execute", &plan, "--text", &text, "--steps", "1", "--out"];
    let (code, _, errors) = machine.run(&[&arguments[..], &[&machine.path("run")]].concat());
    assert_eq!(code, 0, "{errors}");
    check(
        &errors,
        &[
            "note: device cpu, since of NVRTC this was found: it is of CUDA 13",
            "nvidia-cuda-nvrtc-cu12==12.4.*",
        ],
    );
}

#[test]
fn a_usable_gpu_is_what_doctor_and_auto_take() {
    let Some(machine) = Machine::with_gpu(150_754_820_096) else {
        return;
    };
    let (_, doctor, _) = machine.run(&["doctor", "--json"]);
    let report = json::document(&doctor);
    assert_eq!(report["auto_device"], "cuda");
    let (_, doctor, _) = machine.run(&["doctor"]);
    check(&doctor, &["--device auto trains on GPU 0 (Stub H200).\n"]);
    // The stub has no memory to give: what is asked of it fails, after it was picked.
    machine.plan(&[&TINY[..], &["--precision", "fp32"]].concat());
    let (text, plan) = (machine.path("text.txt"), machine.path("plan.json"));
    fs::write(&text, "a text ".repeat(40)).expect("writes");
    let arguments = ["execute", &plan, "--text", &text, "--out"];
    let (code, _, errors) = machine.run(&[&arguments[..], &[&machine.path("run")]].concat());
    assert_eq!(code, 1, "{errors}");
    check(&errors, &["note: device cuda: GPU 0 (Stub H200)\n"]);
}

#[test]
fn a_plan_for_more_memory_than_there_is_hears_what_fits() {
    let Some(machine) = Machine::with_gpu(3 << 29) else {
        return;
    };
    let job = [
        "--model",
        "quickstart",
        "--gpus",
        "1",
        "--seq-len",
        "1024",
        "--global-batch",
        "64",
        "--precision",
        "fp32",
        "--layout",
    ];
    machine.plan(&[&job[..], &["mbs=64"]].concat());
    let refusal = machine.refused(&["--device", "cuda"]);
    check(
        &refusal,
        &[
            "on GPU 0 (Stub H200), which has 1.50 GiB free of 1.50 GiB",
            "1 rank of ",
            "what fits: the same layout with --layout tp=1,cp=1,pp=1,vpp=1,ep=1,etp=1,mbs=",
        ],
    );
    // What it said fits does, and in what it said it takes: not in less.
    let fits = refusal.split("--layout ").nth(1).expect("a layout");
    let mut words = fits.split(' ');
    let layout = words.next().expect("degrees");
    let takes: f64 = words
        .nth(1)
        .expect("a size")
        .parse()
        .expect("a number of GiB");
    machine.plan(&[&job[..], &[layout]].concat());
    machine.accepted(&["--device", "cuda"]);
    let of_size = |gib: f64| Machine::with_gpu((gib * f64::from(1 << 30)) as u64);
    for (gib, fits) in [(takes + 0.01, true), (takes - 0.01, false)] {
        let machine = of_size(gib).expect("there was one");
        machine.plan(&[&job[..], &[layout]].concat());
        if fits {
            machine.accepted(&["--device", "cuda"]);
        } else {
            check(
                &machine.refused(&["--device", "cuda"]),
                &["the plan needs "],
            );
        }
    }
}

#[test]
fn a_process_of_a_launcher_judges_the_gpu_that_it_takes() {
    const LARGE: u64 = 150_754_820_096;
    let Some(machine) = Machine::with_gpus(&[LARGE, 1 << 30]) else {
        return;
    };
    machine.plan(&[
        "--model",
        "quickstart",
        "--gpus",
        "3",
        "--seq-len",
        "64",
        "--global-batch",
        "6",
        "--precision",
        "fp32",
    ]);
    let of_rank = |rank: &'static str| {
        [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "1"),
            ("MOEFOLD_SECRET", "a secret of the tests"),
            ("MOEFOLD_TIMEOUT_S", "0.5"),
        ]
    };
    let env = ["--device", "cuda", "--launch", "env"];
    // A context and NCCL take more than the second GPU has, and there is no third.
    let small = machine.refused_in(&of_rank("1"), &env);
    check(
        &small,
        &[
            "on GPU 1 (Stub H200), which has 1.00 GiB free",
            " for NCCL; ",
        ],
    );
    let none = machine.refused_in(&of_rank("2"), &env);
    check(
        &none,
        &[
            "rank 2 is to take GPU 2 of its machine",
            "which has 2 GPUs",
            "at most 2 ranks",
        ],
    );
    // The first goes on to look for the others.
    let (code, errors) = machine.execute(&of_rank("0"), &env);
    assert_eq!(code, 1, "{errors}");
    check(&errors, &["at 127.0.0.1:1"]);
    // Of processes that this machine is to start all are judged; of threads the GPU they share.
    let processes = machine.refused(&["--device", "cuda", "--launch", "processes"]);
    check(
        &processes,
        &["the plan has 3 ranks, a GPU each, and this machine has 2 GPUs"],
    );
    machine.accepted(&["--device", "cuda"]);
}

#[test]
fn what_a_profile_measured_beside_tensors_is_taken_for_what_is_assumed() {
    let Some(machine) = Machine::with_gpu(150_754_820_096) else {
        return;
    };
    let path = machine.plan(&[&TINY[..], &["--precision", "fp32"]].concat());
    let mut plan = json::read(&path);
    plan["predicted"]["memory_gib"]["overhead"] = 141.5.into();
    let mut write = |profiles: Value| {
        plan["profiles"] = profiles;
        fs::write(&path, plan.to_string()).expect("writes");
    };
    write(serde_json::json!([{ "name": "measured", "hash": "0" }]));
    let refusal = machine.refused(&["--device", "cuda"]);
    check(
        &refusal,
        &["141.50 GiB for the context and libraries, as the plan's profile measured"],
    );
    // Without one the number in the file is nobody's.
    write(serde_json::json!([]));
    machine.accepted(&["--device", "cuda"]);
}

#[test]
fn a_profile_that_measured_nothing_beside_tensors_is_not_said_to_have() {
    let Some(machine) = Machine::with_gpu(1 << 29) else {
        return;
    };
    let path = machine.plan(&[&TINY[..], &["--precision", "fp32"]].concat());
    let mut plan = json::read(&path);
    plan["profiles"] = serde_json::json!([{ "name": "measured", "hash": "0" }]);
    fs::write(&path, plan.to_string()).expect("writes");
    check(
        &machine.refused(&["--device", "cuda"]),
        &["600.00 MiB for the context and libraries, as is assumed where no profile says"],
    );
}

#[test]
fn ranks_that_share_a_gpu_are_counted_together_and_more_gpus_are_named() {
    let Some(machine) = Machine::with_gpu(150_754_820_096) else {
        return;
    };
    machine.plan(&[
        "--model",
        "mixtral-8x7b",
        "--gpus",
        "8",
        "--seq-len",
        "4096",
        "--global-batch",
        "8",
        "--precision",
        "fp32",
    ]);
    let refusal = machine.refused(&["--device", "cuda"]);
    check(
        &refusal,
        &[
            "8 ranks of ",
            "8 such GPUs, a rank each, would do (--layout tp=",
        ],
    );
}
