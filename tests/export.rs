//! `moefold export` as a user meets it, and held to Megatron-Core's own classes where they are.

mod common {
    pub(crate) mod outcome;
    pub(crate) mod program;
}

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use common::outcome::run;
use common::program::program;
use moefold_profiles::TensorClass;

/// Plans into a folder.
fn plan(folder: &Path, arguments: &str) {
    let words = arguments.split_whitespace();
    let mut command = program(&words.collect::<Vec<_>>());
    let (code, _, errors) = run(command.current_dir(folder).args(["--out", "plan.json"]));
    assert_eq!(code, 0, "{arguments}: {errors}");
}

fn moefold(folder: &Path, arguments: &str) -> (i32, String, String) {
    let words = arguments.split_whitespace();
    run(program(&words.collect::<Vec<_>>()).current_dir(folder))
}

const QWEN: &str = "plan --model qwen3-30b-a3b --cluster dgx-h100 --gpus 32 --seq-len 4096 --global-batch 256 \
                    --layout tp=2,cp=1,pp=2,vpp=2,ep=8,etp=1,mbs=1";

#[test]
fn a_job_of_slurm_has_all_that_it_takes() {
    let folder = tempfile::tempdir().expect("a folder");
    plan(folder.path(), QWEN);
    let (code, script, errors) = moefold(folder.path(), "export plan.json --to slurm");
    assert_eq!(code, 0, "{errors}");
    for part in [
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-layout",
        "--expert-tensor-parallel-size 1",
        "--sequence-parallel",
        "--mock-data",
        "srun bash",
    ] {
        assert!(script.contains(part), "{part}: {script}");
    }
    assert!(!script.contains("force-load-balancing"), "{script}");
    // A shell finds nothing wrong with it, and sees the flags.
    let path = folder.path().join("job.sh");
    fs::write(&path, &script).expect("writes");
    let checked = Command::new("bash").arg("-n").arg(&path).status();
    assert!(checked.expect("bash runs").success(), "{script}");
}

#[test]
fn what_a_target_cannot_say_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    plan(
        folder.path(),
        "plan --model tiny-mixtral --cluster local --gpus 2 --seq-len 32 --global-batch 8 \
         --layout pp=2,tp=1,ep=1,etp=1,cp=1,vpp=1,mbs=1 --schedule zb-h1 --recompute 0=full",
    );
    let (code, answer, errors) = moefold(folder.path(), "export plan.json --to torchrun");
    assert_eq!(code, 2, "{answer}");
    assert!(errors.contains("no schedule zb-h1"), "{errors}");
    assert!(errors.contains("one set for all layers"), "{errors}");
    let (code, _, errors) = moefold(folder.path(), "export plan.json --to kubernetes");
    assert_eq!(code, 2);
    assert!(errors.contains("megatron-yaml"), "{errors}");
}

#[test]
fn a_plan_says_how_it_is_exported() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    for (on, expected) in [
        (
            "qwen3-30b-a3b --gpus 16",
            "moefold export p.json --to slurm\n",
        ),
        (
            "qwen3-30b-a3b --gpus 12 --layout dp=12",
            "moefold export p.json --to megatron-lm\n",
        ),
        (
            "gpt-oss-20b --gpus 16",
            "It cannot be exported: no flags of Megatron-LM",
        ),
    ] {
        let all = format!(
            "plan --cluster dgx-h100 --seq-len 4096 --global-batch 48 --out p.json --model {on}"
        );
        let (code, said, errors) = moefold(folder, &all);
        assert_eq!(code, 0, "{on}: {errors}");
        assert!(said.contains(expected), "{on}: {said}");
    }
}

fn json(folder: &Path, name: &str) -> serde_json::Value {
    let text = fs::read_to_string(folder.join(name)).expect(name);
    serde_json::from_str(&text).expect(name)
}

#[test]
fn what_is_exported_is_checked_as_it_was_planned_and_what_beats_it_can_be_put_in() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    plan(folder, QWEN);
    let done = |arguments: &str| {
        let (code, answer, errors) = moefold(folder, arguments);
        assert_eq!(code, 0, "{arguments}: {answer}{errors}");
        answer
    };
    done("export plan.json --to torchrun --out now.sh");
    let on = "--cluster dgx-h100 --gpus 32";
    let said = done(&format!(
        "check now.sh {on} --out now.json --better better.json"
    ));
    for part in [
        "Qwen3-30B-A3B on 32 GPUs",
        "Legal.",
        "Fits:",
        "percent faster",
        "plan tries only where named (--overlap grad-reduce,param-gather,p2p,expert-alltoall,delay-wgrad)",
        "Not read",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let (planned, read) = (json(folder, "plan.json"), json(folder, "now.json"));
    for key in ["layout", "pipeline", "dispatcher", "recompute", "precision"] {
        assert_eq!(planned[key], read[key], "{key}");
    }
    assert_eq!(planned["predicted"]["step_s"], read["predicted"]["step_s"]);
    done("export better.json --to torchrun --base now.sh --out faster.sh");
    done(&format!("check faster.sh {on} --out faster.json"));
    let (better, read) = (json(folder, "better.json"), json(folder, "faster.json"));
    assert_eq!(better["layout"], read["layout"]);
    assert_eq!(better["predicted"]["step_s"], read["predicted"]["step_s"]);

    // Every pipeline rank has its memory by class; that of the fullest is the plan's.
    let predicted = &json(folder, "now.json")["predicted"];
    let ranks = predicted["memory_classes_gib_by_pp_rank"].as_array();
    let ranks = ranks.expect("a list");
    assert!(ranks.len() > 1);
    assert!(ranks.contains(&predicted["memory_gib"]), "{predicted}");
    for (rank, classes) in ranks.iter().enumerate() {
        let gib = TensorClass::ALL.map(|class| classes[class.name()].as_f64().expect("a number"));
        let all = predicted["memory_gib_by_pp_rank"][rank].as_f64();
        let all = all.expect("a number");
        assert!((gib.iter().sum::<f64>() - all).abs() < 1e-9 * all);
        let row = gib.iter().chain([&all]).map(|gib| format!("{gib:.1}"));
        let row: Vec<String> = [rank.to_string()].into_iter().chain(row).collect();
        let is_row = |line: &str| line.split_whitespace().eq(row.iter().map(String::as_str));
        assert!(said.lines().any(is_row), "{row:?}: {said}");
    }
}

#[test]
fn settings_that_break_rules_or_do_not_fit_are_refused_and_mended() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    plan(folder, QWEN);
    let (code, _, errors) = moefold(folder, "export plan.json --to torchrun --out now.sh");
    assert_eq!(code, 0, "{errors}");
    let on = "--cluster dgx-h100 --gpus 32";
    let script = fs::read_to_string(folder.join("now.sh")).expect("reads");
    let edited = |from: &str, to: &str| {
        assert!(script.contains(from), "{from}: {script}");
        fs::write(folder.join("edited.sh"), script.replace(from, to)).expect("writes");
    };
    edited("--sequence-parallel", "");
    let (code, said, _) = moefold(folder, &format!("check edited.sh {on}"));
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("nearest: --sequence-parallel"), "{said}");
    edited(
        "--expert-model-parallel-size 8",
        "--expert-model-parallel-size 6",
    );
    let (code, said, _) = moefold(folder, &format!("check edited.sh {on}"));
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("the nearest legal degrees are"), "{said}");
    // Rules that the planner has of its options are in Megatron-LM's words.
    edited("--overlap-grad-reduce", "");
    let (code, said, _) = moefold(folder, &format!("check edited.sh {on}"));
    assert_eq!(code, 2, "{said}");
    let rules = said.split("\nChange").next().expect("the first part");
    assert!(
        rules.contains("--overlap-param-gather needs") && !rules.contains("--overlap "),
        "{said}"
    );
    edited("--micro-batch-size 1", "--micro-batch-size 16");
    let (code, said, errors) = moefold(folder, &format!("check edited.sh {on}"));
    assert_eq!(code, 3, "{said}{errors}");
    assert!(said.contains("Does not fit"), "{said}");
    edited("--num-layers 48", "--num-layers");
    let (code, _, errors) = moefold(folder, &format!("check edited.sh {on}"));
    assert_eq!(code, 2);
    assert!(errors.contains("--num-layers: found `nothing`"), "{errors}");
    fs::write(folder.join("edited.sh"), "echo hello\n").expect("writes");
    let (code, _, errors) = moefold(folder, &format!("check edited.sh {on}"));
    assert_eq!(code, 2);
    assert!(
        errors.contains("no flag of Megatron-LM is in it"),
        "{errors}"
    );
}

#[test]
fn flags_that_megatron_does_not_have_are_no_job() {
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let folder = scratch.path();
    for command in [
        "plan --model tiny-mixtral --cluster dgx-h100 --gpus 8 --seq-len 256 --global-batch 64 -q --out plan.json",
        "export plan.json --to megatron-lm --megatron main --out now.sh",
    ] {
        let (code, _, errors) = moefold(folder, command);
        assert_eq!(code, 0, "{command}: {errors}");
    }
    let on = "--cluster dgx-h100 --gpus 8";
    let script = fs::read_to_string(folder.join("now.sh")).expect("reads");
    let edited = |from: &str, to: &str| {
        assert!(script.contains(from), "{from}: {script}");
        fs::write(folder.join("edited.sh"), script.replace(from, to)).expect("writes");
    };
    edited("--lr ", "--learning-rate ");
    let (code, said, errors) = moefold(folder, &format!("check edited.sh {on}"));
    assert_eq!(code, 2, "{said}");
    assert!(
        said.contains("Unknown:\n  --learning-rate; nearest:"),
        "{said}"
    );
    assert!(
        errors.contains("Megatron-LM does not have a flag of the settings (1)"),
        "{errors}"
    );
    edited("--num-layers 2", "--num-layerss 2");
    let (code, _, errors) = moefold(folder, &format!("check edited.sh {on}"));
    assert_eq!(code, 2);
    let both = "--num-layers is missing; expected the number of decoder layers\n  \
                --num-layerss is unknown; nearest: --num-layers";
    assert!(errors.contains(both), "{errors}");
    // Before 0.16 ranks did not share keys and values, and there was no HybridEP: what is proposed is of the release.
    edited(
        "--tensor-model-parallel-size 1",
        "--tensor-model-parallel-size 4 --sequence-parallel",
    );
    let (code, said, _) = moefold(folder, &format!("check edited.sh {on} --megatron 0.15"));
    assert_eq!(code, 2, "{said}");
    assert!(
        said.contains("--num-query-groups 2 does not divide"),
        "{said}"
    );
    let (_, said, _) = moefold(folder, &format!("check now.sh {on} --model mixtral-8x7b"));
    assert!(
        said.contains("has 32 where --num-layers says 2, and is what is priced"),
        "{said}"
    );
}

/// What Megatron-Core itself makes of what is exported, for a plan of each kind of flag.
#[test]
#[ignore = "needs Megatron-Core: MOEFOLD_MEGATRON=/path/to/python cargo test --test export -- --ignored"]
fn megatron_core_takes_what_is_exported() {
    let python = std::env::var("MOEFOLD_MEGATRON")
        .expect("MOEFOLD_MEGATRON is a python that has megatron-core");
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracles/megatron_config.py");
    for request in [
        QWEN,
        "plan --model deepseek-v3 --cluster dgx-h100 --gpus 1024 --seq-len 4096 --global-batch 8192 --precision fp8-blockwise \
         --optimizer adam-bf16-moments --recompute mla_up_proj,mlp --dispatcher deepep \
         --layout tp=2,cp=1,pp=8,vpp=4,ep=64,etp=1,mbs=1 --pipeline-layout Et*3|(tt|)*29|mL",
        "plan --model mixtral-8x7b --cluster dgx-h100 --gpus 64 --seq-len 8192 --global-batch 256 --recompute full \
         --layout tp=2,cp=2,pp=2,vpp=1,ep=8,etp=1,mbs=1 --grad-dtype bf16 --expert-capacity-factor 1.0 --dispatcher alltoall",
        "plan --model qwen2-57b-a14b --cluster gb200-nvl72 --gpus 64 --seq-len 4096 --global-batch 256 --precision mxfp8 \
         --overlap grad-reduce,param-gather,p2p,shared-expert --dispatcher alltoall --layout tp=1,cp=1,pp=1,ep=8,etp=1,mbs=1",
        "plan --model glm-4.5-air --cluster dgx-b200 --gpus 128 --seq-len 4096 --global-batch 512 --offload core_attn,attn_proj \
         --layout tp=1,cp=1,pp=2,ep=8,etp=1,mbs=1",
        "plan --model llama-3.1-8b --cluster dgx-h100 --gpus 16 --seq-len 8192 --global-batch 64 --zero fsdp --layout tp=1,pp=1,cp=1,mbs=1",
        "plan --model deepseek-v2-lite --cluster dgx-h100 --gpus 16 --seq-len 4096 --global-batch 64 --precision fp8-delayed \
         --layout tp=1,pp=2,vpp=1,cp=1,ep=8,etp=1,mbs=1",
        "plan --model qwen3-next-80b-a3b --cluster dgx-h100 --gpus 64 --seq-len 4096 --global-batch 256 --layout tp=1,cp=1,pp=2,ep=16,etp=1",
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        plan(folder.path(), request);
        let (code, exported, errors) =
            moefold(folder.path(), "export plan.json --to megatron-lm --json");
        assert_eq!(code, 0, "{request}: {errors}");
        let mut child = Command::new(&python)
            .arg(&oracle)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("python runs");
        let mut input = child.stdin.take().expect("a pipe");
        input.write_all(exported.as_bytes()).expect("writes");
        drop(input);
        let judged = child.wait_with_output().expect("python ends");
        let errors = String::from_utf8_lossy(&judged.stderr);
        assert!(judged.status.success(), "{request}: {errors}");
    }
}
