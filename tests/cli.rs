//! The command line as a user meets it: answers, refusals, exit codes, files.

mod common {
    pub(crate) mod json;
    pub(crate) mod outcome;
    pub(crate) mod program;
}

use std::fs;
use std::path::Path;

use common::json;
use common::outcome::run;
use common::program::program;
use serde_json::Value;

/// Runs a command that must succeed and returns its one JSON document.
fn answer(arguments: &[&str]) -> Value {
    let (code, answer, errors) = run(&mut program(arguments));
    assert_eq!(code, 0, "{arguments:?}: {errors}");
    json::document(&answer)
}

/// Runs a command that must fail with an exit code, and says all of `parts` in its one message.
fn refused(arguments: &[&str], code: i32, parts: &[&str]) {
    let (found, answer, stderr) = run(&mut program(arguments));
    assert_eq!(found, code, "{arguments:?}: {stderr}");
    assert!(answer.is_empty(), "a refusal leaves stdout alone");
    assert!(!stderr.contains("panicked"), "{stderr}");
    for part in parts {
        assert!(
            stderr.contains(part),
            "{arguments:?} does not say {part:?}: {stderr}"
        );
    }
}

const MIXTRAL: [&str; 11] = [
    "plan",
    "--model",
    "mixtral-8x22b",
    "--cluster",
    "dgx-h100",
    "--gpus",
    "128",
    "--seq-len",
    "4096",
    "--global-batch",
    "256",
];

fn mixtral<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments: Vec<&str> = MIXTRAL.to_vec();
    arguments.extend(more);
    arguments
}

/// Each number of GPUs comes to what a search of it alone does, and the best is the least of them.
#[test]
fn differential_numbers_of_gpus_are_searches_of_each() {
    const QWEN: [&str; 11] = [
        "plan",
        "--model",
        "qwen3-30b-a3b",
        "--cluster",
        "dgx-h100",
        "--seq-len",
        "4096",
        "--global-batch",
        "64",
        "--layout",
        "mbs=1,cp=1,vpp=1",
    ];
    let ask = |more: &[&str]| answer(&[&QWEN[..], &["--json"], more].concat());
    let text = "--gpus 40 --objective cost --tokens 1e12 --usd-per-gpu-hour 2";
    let found = ask(&text.split_whitespace().collect::<Vec<_>>());
    let sizes = found["sizes"].as_array().expect("several");
    assert!(sizes.len() > 2, "{sizes:?}");
    let of = |size: &Value, key: &str| size[key].as_f64().expect("a number");
    let mut least = f64::INFINITY;
    for size in sizes {
        let gpus = size["gpus"].to_string();
        let alone = ask(&["--gpus", &gpus]);
        let step_s = of(&alone["plans"][0]["predicted"], "step_s");
        assert_eq!(of(size, "step_s"), step_s);
        // 4096 * 64 tokens a step, in days of 86 400 s, at 2 dollars for 3600 s of a GPU.
        let seconds = step_s * 1e12 / 262_144.0;
        let usd = seconds * of(size, "gpus") * 2.0 / 3600.0;
        assert!((of(size, "days") * 86_400.0 / seconds - 1.0).abs() < 1e-9);
        assert!((of(size, "usd_per_trillion_tokens") / usd - 1.0).abs() < 1e-9);
        least = least.min(of(size, "usd_per_trillion_tokens"));
    }
    let chosen = |found: &Value| {
        let gpus = found["request"]["gpus"].as_f64();
        let sizes = found["sizes"].as_array().expect("several");
        let chosen = sizes.iter().find(|size| size["gpus"].as_f64() == gpus);
        chosen.expect("among them").clone()
    };
    assert_eq!(of(&chosen(&found), "usd_per_trillion_tokens"), least);
    // The fewest within a deadline that the fastest just meets.
    let days = sizes.iter().map(|size| of(size, "days"));
    let fastest = days.fold(f64::INFINITY, f64::min);
    let first = sizes.iter().find(|size| of(size, "days") <= fastest * 1.01);
    let first = first.expect("the fastest at least");
    let deadline = format!("--deadline={}", fastest * 1.01);
    let in_time = "--gpus 40 --objective gpus --tokens 1e12";
    let mut in_time: Vec<&str> = in_time.split_whitespace().collect();
    in_time.push(&deadline);
    assert_eq!(ask(&in_time)["request"]["gpus"], first["gpus"]);
    let too_late = [
        &QWEN[..],
        &[
            "--gpus",
            "40",
            "--objective",
            "gpus",
            "--tokens",
            "1e12",
            "--deadline",
            "0.1",
        ],
    ]
    .concat();
    refused(
        &too_late,
        3,
        &["up to 40", "1e12 tokens in 0.1 days", " take "],
    );
}

#[test]
fn what_several_numbers_of_gpus_need_is_asked_for() {
    for (more, parts) in [
        (&["--objective", "gpus"][..], &["--tokens is missing"][..]),
        (
            &["--objective", "gpus", "--tokens", "1e12"],
            &["--deadline is missing"],
        ),
        (
            &["--objective", "cost", "--deadline", "3"],
            &["--tokens is missing"],
        ),
        (
            &["--tokens", "1e12"],
            &[
                "--tokens goes with --objective cost, gpus or goodput",
                "throughput",
            ],
        ),
        (
            &["--objective", "goodput"],
            &["--gpu-mtbf is missing", "--gpu-mtbf 50000"],
        ),
        (
            &["--objective", "goodput", "--gpu-mtbf", "50000"],
            &["--storage-gb-per-s is missing", "--save-time"],
        ),
        (
            &[
                "--objective",
                "goodput",
                "--gpu-mtbf",
                "50000",
                "--save-time",
                "0",
            ],
            &["--restart-time is missing", "--restart-time 600"],
        ),
        (
            &[
                "--objective",
                "gpus",
                "--tokens",
                "1e12",
                "--deadline",
                "9",
                "--restart-time",
                "9",
            ],
            &["--gpu-mtbf is missing"],
        ),
        (
            &["--objective", "seq-len", "--gpu-mtbf", "50000"],
            &["--gpu-mtbf goes with", "found --objective seq-len"],
        ),
        (
            &["--objective", "goodput", "--gpu-mtbf", "0"],
            &["--gpu-mtbf: found 0, expected a number above 0"],
        ),
        (
            &["--objective", "cost", "--tokens=-3"],
            &["--tokens: found -3", "above 0"],
        ),
    ] {
        refused(&mixtral(more), 2, parts);
    }
    let local = "plan --model tiny-mixtral --cluster local --gpus 4 --seq-len 64 --global-batch 8 --objective cost";
    let local: Vec<&str> = local.split_whitespace().collect();
    refused(
        &local,
        2,
        &["has no `usd_per_gpu_hour`", "--usd-per-gpu-hour"],
    );
}

/// What failures leave is Daly's model of the fastest plan of each number of GPUs, saved as often as is best.
#[test]
fn differential_goodput_is_what_failures_leave_of_each_number_of_gpus() {
    let flags = "--layout tp=2,mbs=1,cp=1 --objective goodput --tokens 1e12 --json --top 1 --gpu-mtbf 3000 \
                 --storage-gb-per-s 20 --restart-time 900";
    let found = answer(&mixtral(&flags.split_whitespace().collect::<Vec<_>>()));
    let sizes = found["sizes"].as_array().expect("several");
    assert!(sizes.len() > 1, "{sizes:?}");
    let of = |value: &Value, key: &str| value[key].as_f64().expect("a number");
    let mut best = (0.0, &Value::Null);
    for size in sizes {
        let (gpus, step_s) = (of(size, "gpus"), of(size, "step_s"));
        let own = &size["failures"];
        let between = 3000.0 * 3600.0 / gpus;
        assert!((of(own, "mtbf_hours") * 3600.0 / between - 1.0).abs() < 1e-9);
        // 140.6e9 parameters of bf16 weights, f32 masters and moments: 14 bytes each, at 20 GB/s.
        let save = of(own, "save_s");
        assert!(
            (save / (140.6e9 * 14.0 / 20e9) - 1.0).abs() < 1e-3,
            "{save}"
        );
        let goodput = |steps: f64| {
            let time = steps * step_s;
            let lost = (900.0 / between).exp() * (((time + save) / between).exp() - 1.0);
            time / between / lost
        };
        let steps = of(own, "save_every_steps");
        assert!((of(own, "goodput") / goodput(steps) - 1.0).abs() < 1e-9);
        assert!(goodput(steps) >= goodput(steps + 1.0));
        assert!(steps == 1.0 || goodput(steps) >= goodput(steps - 1.0));
        let lasting = of(size, "tokens_per_s") * goodput(steps);
        assert!((of(size, "days") * 86_400.0 * lasting / 1e12 - 1.0).abs() < 1e-9);
        if lasting > best.0 {
            best = (lasting, &size["gpus"]);
        }
    }
    assert_eq!(&found["request"]["gpus"], best.1);
}

/// Experts of a histogram are placed on all ranks, none twice, and the busiest is less busy.
#[test]
fn experts_are_placed_by_a_histogram() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("histogram.json");
    let tokens: Vec<u64> = (0..128).map(|expert| 10 + expert * expert).collect();
    fs::write(&path, serde_json::to_string(&tokens).expect("numbers")).expect("a file");
    let routing = path.display().to_string();
    let asked = "plan --model qwen3-30b-a3b --cluster dgx-h100 --gpus 16 --seq-len 4096 --global-batch 64 --top 1 \
                 --layout tp=1,cp=1,pp=1,ep=8,etp=1,mbs=1 --recompute full";
    let asked: Vec<&str> = asked.split_whitespace().collect();
    let with = |more: &[&str]| {
        [&asked[..], more]
            .concat()
            .iter()
            .map(|&word| word.to_owned())
            .collect::<Vec<_>>()
    };
    let placed = |copies: &str| {
        let arguments = with(&["--routing", &routing, "--place-experts", copies, "--json"]);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        answer(&arguments)
    };
    let found = placed("0");
    let own = &found["experts"];
    let layer = &own["layers"][0];
    let mut held: Vec<u64> = Vec::new();
    for rank in layer["ranks"].as_array().expect("ranks") {
        let rank = rank.as_array().expect("experts");
        assert_eq!(rank.len(), 16);
        held.extend(rank.iter().map(|expert| expert.as_u64().expect("a number")));
    }
    held.sort_unstable();
    assert_eq!(held, (0..128).collect::<Vec<u64>>());
    // In order the last sixteen have the most; placed they are even.
    let share = tokens[112..].iter().sum::<u64>() as f64 / tokens.iter().sum::<u64>() as f64;
    assert!((layer["in_order"].as_f64().expect("a number") / (8.0 * share) - 1.0).abs() < 1e-9);
    assert!(layer["busiest"].as_f64().expect("a number") < 1.01);
    let first = found["plans"][0]["predicted"]["step_s"].as_f64();
    let in_order = own["in_order_step_s"].as_f64();
    assert!((in_order.expect("a time") / first.expect("a time") - 1.0).abs() < 1e-6);
    assert!(own["step_s"].as_f64() < own["in_order_step_s"].as_f64());
    let copied = placed("2");
    let ranks = copied["experts"]["layers"][0]["ranks"].as_array();
    let held = ranks
        .expect("ranks")
        .iter()
        .map(|rank| rank.as_array().map_or(0, Vec::len));
    let held: Vec<usize> = held.collect();
    assert!(held.iter().all(|&held| held <= 18) && held.iter().sum::<usize>() >= 128);
    assert!(copied["experts"].get("step_s").is_none());
    refused(
        &[&asked[..], &["--place-experts", "0"]].concat(),
        2,
        &["--place-experts: routing is balanced", "--routing RUN_DIR"],
    );
    let arguments = with(&["--routing", &routing, "--place-experts", "200"]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    refused(&arguments, 2, &["--place-experts 200", "at most 112 more"]);
}

/// The plans of the longest sequence are those of a search at that length, and one more step of the grid does not fit.
#[test]
fn differential_the_longest_sequence_is_planned() {
    let flags = "--layout tp=8,pp=8,cp=2,ep=8,etp=1,vpp=1,mbs=1 --recompute full --top 1 --json";
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let at = |seq_len: &str, more: &[&str]| {
        let asked =
            "plan --model mixtral-8x22b --cluster dgx-h100 --gpus 128 --global-batch 8 --seq-len";
        let mut arguments: Vec<&str> = asked.split_whitespace().collect();
        arguments.push(seq_len);
        arguments.extend(flags.iter().chain(more));
        run(&mut program(&arguments))
    };
    let (code, found, errors) = at("4000", &["--objective", "seq-len"]);
    assert_eq!(code, 0, "{errors}");
    let found = json::document(&found);
    let longest = found["request"]["seq_len"].as_u64().expect("a length");
    let lengths = found["lengths"].as_array().expect("several");
    assert_eq!(lengths[0]["seq_len"], 4000);
    assert!(longest > 100_000 && longest.is_multiple_of(32), "{longest}");
    let (code, alone, _) = at(&longest.to_string(), &[]);
    assert_eq!(code, 0);
    assert_eq!(json::document(&alone)["plans"], found["plans"]);
    let (code, ..) = at(&(longest + 32).to_string(), &[]);
    assert_eq!(code, 3);
    let (code, _, errors) = at("67000000", &["--objective", "seq-len"]);
    assert_eq!(code, 3, "{errors}");
}

#[test]
fn a_search_has_as_long_as_it_is_given() {
    refused(
        &mixtral(&["--time-limit", "1e-9"]),
        1,
        &["--time-limit 0.000000001", "no plan was found", "--layout"],
    );
    for wrong in ["0", "-1", "inf"] {
        refused(
            &mixtral(&["--time-limit", wrong]),
            2,
            &["--time-limit", wrong, "expected seconds above 0"],
        );
    }
    let found = answer(&mixtral(&["--time-limit", "1e6", "--json"]));
    assert!(found["search"].get("unseen").is_none());
}

#[test]
fn golden_groups_of_a_folded_layout() {
    let groups = answer(&[
        "groups",
        "--gpus",
        "16",
        "--layout",
        "tp=2,cp=2,ep=8,etp=1",
        "--json",
    ]);
    assert_eq!(groups["cp"][1], serde_json::json!([1, 3]));
    assert_eq!(
        groups["ep"][1],
        serde_json::json!([8, 9, 10, 11, 12, 13, 14, 15])
    );
    assert_eq!(groups["edp"][0], serde_json::json!([0, 8]));
    let printed = ["TP2 CP2 DP2 PP2 | EP4 | mbs 1", "tp-cp-ep-pp-dp"].join(" | ");
    let ordered = answer(&["groups", "--gpus", "16", "--layout", &printed, "--json"]);
    assert_eq!(ordered["pp"][0], serde_json::json!([0, 4]));
    assert_eq!(
        groups["dp-cp"][0],
        serde_json::json!([0, 2, 4, 6, 8, 10, 12, 14])
    );
    assert_eq!(groups.as_object().expect("an object").len(), 12);
}

#[test]
fn golden_models_answer_with_the_contract_keys() {
    let model = answer(&["models", "deepseek-v3", "--json"]);
    assert_eq!(model["layers"], 61);
    for key in [
        "total_params",
        "active_params",
        "mtp_params",
        "flops_per_token",
    ] {
        assert!(model[key].is_number(), "{key} in {model}");
    }
    assert_eq!(
        answer(&["models", "--json"])
            .as_array()
            .expect("a list")
            .len(),
        44
    );
}

#[test]
fn lists_are_tables_for_people() {
    for (verb, part) in [("models", "Qwen3-30B-A3B"), ("clusters", "gb200-nvl72")] {
        let (code, answer, _) = run(&mut program(&[verb]));
        assert_eq!(code, 0);
        assert!(answer.contains(part));
    }
}

#[test]
fn law_plan_is_deterministic_and_its_parts_sum_up() {
    let mut answers = [(); 2].map(|()| answer(&mixtral(&["--top", "3", "--json"])));
    for answer in &mut answers {
        answer["search"]["elapsed_s"] = 0.into();
    }
    assert_eq!(answers[0], answers[1]);

    let plans = answers[0]["plans"].as_array().expect("plans");
    assert_eq!(plans.len(), 3);
    for plan in plans {
        let predicted = &plan["predicted"];
        let sum = |key: &str| -> f64 {
            predicted[key]
                .as_object()
                .expect("an object")
                .values()
                .filter_map(Value::as_f64)
                .sum()
        };
        let step_s = predicted["step_s"].as_f64().expect("a number");
        assert!((sum("time_s") - step_s).abs() <= 1e-9 * step_s);
        assert!((sum("confidence") - 1.0).abs() < 1e-9);
        let peak = predicted["peak_gib"].as_f64().expect("a number");
        assert!(
            (sum("memory_gib") - peak).abs() < 1e-6 * peak,
            "memory adds up"
        );
        assert!(peak < 80.0, "fits an H100");
    }
}

/// What is not searched has the figures of a search with its flag and the degrees and stages of the first plan.
#[test]
fn differential_what_is_not_searched_is_priced_as_by_itself() {
    const DEEPSEEK: &str = "plan --model deepseek-v2-lite --cluster dgx-h100 --gpus 32 --seq-len 4096 --global-batch 256 \
                            --precision fp8 --memory-headroom 64.8 --recompute none --json";
    let words: Vec<&str> = DEEPSEEK.split_whitespace().collect();
    let found = answer(&[&words[..], &["--layout", "pp=4,tp=2,vpp=7,mbs=2"]].concat());
    let first = &found["plans"][0]["layout"];
    let pinned = ["tp", "cp", "pp", "vpp", "ep", "etp", "mbs"].map(|d| format!("{d}={}", first[d]));
    let pinned = pinned.join(",");
    let stages = found["plans"][0]["pipeline"]["stages"].as_array();
    let layers = |stage: &Value| "t".repeat(stage.as_array().expect("layers").len());
    let stages: Vec<String> = stages.expect("stages").iter().map(layers).collect();
    let stages = format!("E{}L", stages.join("|"));
    let listed = found["search"]["not_searched"].as_array();
    let listed = listed.expect("some").iter();
    let (mut fit, mut short, mut illegal) = (Vec::new(), Vec::new(), Vec::new());
    let mut before = 0.0;
    for one in listed {
        let (option, value) = (one["option"].as_str(), one["value"].as_str());
        let (option, value) = option.zip(value).expect("words");
        let flag = format!("--{}", option.replace('_', "-"));
        let at = ["--layout", &pinned, "--pipeline-layout", &stages];
        let named = [&words[..], &at, &[&flag, value]].concat();
        let (code, own, errors) = run(&mut program(&named));
        let which = match one["fits"].as_bool() {
            Some(true) => {
                assert_eq!(code, 0, "{flag} {value}: {errors}");
                let own = &json::document(&own)["plans"][0]["predicted"];
                for key in ["step_s", "peak_gib"] {
                    assert_eq!(one[key], own[key], "{flag} {value}");
                }
                let step_s = one["step_s"].as_f64().expect("a number");
                assert!(before <= step_s, "{flag} {value}");
                before = step_s;
                &mut fit
            }
            Some(false) => {
                assert_eq!(code, 3, "{flag} {value}: {errors}");
                let own = &json::document(&own)["savers"][0];
                assert_eq!(
                    (&own["change"], &one["peak_gib"]),
                    (&"none".into(), &own["peak_gib"])
                );
                assert!(one["step_s"].is_null(), "{flag} {value}");
                &mut short
            }
            None => {
                assert_eq!(code, 2, "{flag} {value}: {errors}");
                assert!(one["step_s"].is_null() && one["peak_gib"].is_null());
                &mut illegal
            }
        };
        which.push(format!("{option} {value}"));
    }
    for word in [
        "masters remainder",
        "primary_weights fp8",
        "optimizer_offload_fraction 1",
        ",tp",
        ",shared-expert",
    ] {
        assert!(fit.iter().any(|one| one.ends_with(word)), "{word}: {fit:?}");
    }
    assert!(
        !short.is_empty() && !illegal.is_empty(),
        "{fit:?} {short:?} {illegal:?}"
    );
}

#[test]
fn graphs_are_searched_where_that_is_asked_for() {
    let layout = "tp=2,cp=1,pp=8,vpp=7,ep=8,etp=1,mbs=1";
    let asked = |graphs| {
        let plan = answer(&mixtral(&[
            "--layout",
            layout,
            "--cuda-graph",
            graphs,
            "--json",
        ]));
        let of = |key: &str| {
            plan["plans"][0]["predicted"][key]
                .as_f64()
                .expect("a number")
        };
        let overhead = &plan["plans"][0]["predicted"]["memory_gib"]["overhead"];
        let graphs = plan["plans"][0]["cuda_graph"].as_str().map(str::to_owned);
        let space = plan["search"]["space"].as_u64().expect("a count");
        (
            graphs,
            of("step_s"),
            overhead.as_f64().expect("a number"),
            space,
        )
    };
    let (none, auto) = (asked("none"), asked("auto"));
    assert_eq!(none.0, None);
    let graphs = auto.0.expect("host time is worth memory");
    assert!(auto.1 < none.1 && auto.2 > none.2, "{graphs}");
    // Four dispatchers, and eight choices of recomputation, of which one, of the first layers of each stage, goes with no
    // graphs of modules. Of these there are five: attention, two of the router with and without. The whole step is under
    // one dispatcher.
    assert_eq!((none.3, auto.3), (4 * 8, 4 * 8 + 5 * 4 * 7 + 8));
}

#[test]
fn law_the_front_trades_speed_for_memory() {
    let answer = answer(&mixtral(&[
        "--layout",
        "tp=2,cp=1,etp=1",
        "--front",
        "--json",
    ]));
    let winner = answer["plans"][0]["predicted"]["peak_gib"]
        .as_f64()
        .expect("a number");
    let feasible = answer["search"]["feasible"].as_array().expect("candidates");
    let of = |candidate: &Value, key: &str| candidate[key].as_f64().expect("a number");
    let mut smaller: Vec<(f64, f64)> = feasible
        .iter()
        .map(|candidate| (of(candidate, "peak_gib"), of(candidate, "step_s")))
        .filter(|(peak_gib, _)| *peak_gib < winner)
        .collect();
    smaller.sort_by(|a, b| a.0.total_cmp(&b.0));
    // The least memory of all is far below the fastest layout's, and slower.
    let (least_gib, slowest_s) = smaller[0];
    let fastest_s = of(&answer["plans"][0]["predicted"], "step_s");
    assert!(
        least_gib < 0.8 * winner && slowest_s > fastest_s,
        "{smaller:?}"
    );
}

#[test]
fn a_plan_written_is_a_plan_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("plan.json");
    let path = path.to_str().expect("UTF-8");
    answer(&mixtral(&[
        "--layout",
        "tp=2,cp=1,pp=8,vpp=7,ep=8,mbs=1",
        "--json",
        "--out",
        path,
    ]));
    let plan = json::read(path);
    assert_eq!(plan["version"], 1);
    assert_eq!(plan["layout"]["dp"], 8);

    // Nothing is searched where the plan would have no place.
    let missing = folder.path().join("no/plan.json");
    let missing = missing.to_str().expect("UTF-8");
    let says = [
        &*format!("--out {missing}: cannot be written"),
        "No such file",
    ];
    refused(&mixtral(&["--out", missing]), 1, &says);
    let place = folder.path().to_str().expect("UTF-8");
    refused(&mixtral(&["--out", place]), 1, &["is a directory"]);

    // A plan for another executor is refused with everything that is in the way.
    refused(&["execute", path, "--text", "missing.txt"], 2, &["bf16"]);

    // Edited by hand: a schedule of another stack, unknown keys, other versions and illegal layouts are refused by name.
    let mut edited = plan.clone();
    edited["pipeline"]["schedule"] = "zb-h1".into();
    let other = folder.path().join("other.json");
    fs::write(&other, edited.to_string()).expect("writable");
    refused(
        &["execute", other.to_str().expect("UTF-8"), "--text", "x.txt"],
        2,
        &["other.json", "pipeline.schedule", "zb-h1"],
    );
    for (key, value, says) in [
        ("surprise", serde_json::json!(1), "surprise"),
        ("version", serde_json::json!(99), "99"),
    ] {
        let mut edited = plan.clone();
        edited[key] = value;
        let path = folder.path().join("edited.json");
        fs::write(&path, edited.to_string()).expect("writable");
        let path = path.to_str().expect("UTF-8");
        refused(
            &["execute", path, "--text", "x.txt"],
            2,
            &["edited.json", says],
        );
    }
    let mut edited = plan.clone();
    edited["layout"]["ep"] = 3.into();
    let path = folder.path().join("illegal.json");
    fs::write(&path, edited.to_string()).expect("writable");
    refused(
        &["execute", path.to_str().expect("UTF-8"), "--text", "x.txt"],
        2,
        &["illegal.json", "3"],
    );
}

#[test]
fn bad_requests_are_refused_with_what_would_work() {
    refused(
        &["quickstart", "--ranks", "3"],
        2,
        &["--ranks: found 3", "1, 2, 4, 8, 16"],
    );
    refused(
        &["models", "mixtral-9x9b"],
        2,
        &["mixtral-9x9b", "Mixtral-8x7B"],
    );
    refused(&["clusters", "dgx-h101"], 2, &["dgx-h101", "dgx-h100"]);
    refused(
        &["models", "./no/such/config.json"],
        2,
        &["no/such/config.json"],
    );
    refused(
        &["groups", "--gpus", "16", "--layout", "tp=3,ep=5"],
        2,
        &["16", "3", "5"],
    );
    refused(
        &["groups", "--gpus", "16", "--layout", "tq=2"],
        2,
        &["tq", "tp"],
    );
    refused(&mixtral(&["--precision", "bf17"]), 2, &["bf17", "bf16"]);
    refused(
        &mixtral(&["--overlap", "p2p,cp"]),
        2,
        &["--overlap", "`cp`", "grad-reduce"],
    );
    refused(&mixtral(&["--recompute", "act"]), 2, &["act", "moe_act"]);
    refused(
        &mixtral(&["--layout", "tp=2,tp=4"]),
        2,
        &["--layout", "tp is given twice"],
    );
    let layout = "CP2 PP8x7 DP8 | EP8 EDP2 | mbs 1 | cp a2a";
    for other in ["p2p", "allgather"] {
        refused(
            &mixtral(&["--layout", layout, "--cp-comm-type", other]),
            2,
            &["--layout says `cp a2a`", "--cp-comm-type", other],
        );
    }
    refused(
        &mixtral(&["--pipeline-layout", "Et"]),
        2,
        &["--pipeline-layout", "expected L once"],
    );
    refused(&["plan", "--model", "mixtral-8x7b"], 2, &["--cluster"]);
    refused(&["execute", "plan.json"], 2, &["--text", "--data"]);
    for threads in ["0", "1000000"] {
        let found = format!("--threads: found {threads}, expected 1 to 1024");
        refused(&["bench", "--threads", threads], 2, &[&found]);
    }
}

#[test]
fn schedules_are_refused_by_name() {
    let of = |schedule: &'static str, more: &[&'static str]| {
        mixtral(&[&["--schedule", schedule], more].concat())
    };
    refused(&of("zb-h2", &[]), 2, &["--schedule", "zb-h2", "zb-h1"]);
    refused(&of("dualpipe", &[]), 2, &["--schedule", "dualpipe-v"]);
    let megatron = ["megatron", "zb-h1", "1f1b", "--stack"];
    refused(&of("zb-h1", &[]), 2, &megatron);
    let megatron = ["megatron", "v-min", "interleaved", "--stack"];
    refused(&of("v-min", &[]), 2, &megatron);
    let ours = ["--stack", "moefold", "--layout"];
    for (schedule, layout) in [
        ("zb-h1", "pp=8,vpp=7"),
        ("zb-h1", "pp=1"),
        ("v-half", "pp=8,vpp=1"),
        ("zb-v", "pp=1"),
        ("dualpipe-v", "pp=8,vpp=4"),
        ("none", "pp=2"),
        ("interleaved", "vpp=1"),
    ] {
        let more = [&ours[..], &[layout]].concat();
        refused(
            &of(schedule, &more),
            2,
            &["--schedule", schedule, "nearest"],
        );
    }
}

#[test]
fn every_rule_that_a_request_breaks_is_said_at_once() {
    // Degrees that contradict the ranks, the model and the schedule.
    refused(
        &mixtral(&["--layout", "tp=5,cp=1,pp=1,vpp=2,ep=3,etp=1,mbs=1"]),
        2,
        &[
            "128 GPUs are not divisible by tp x cp x pp = 5 x 1 x 1",
            "48 heads are not divisible by tp = 5",
            "8 experts are not divisible by ep = 3; nearest: ep = 2 or 4",
            "vpp = 2 needs a pipeline",
            "the nearest legal degrees are tp=4,",
        ],
    );
    // One degree alone that no layout of the model has is a bad request too.
    refused(
        &mixtral(&["--layout", "ep=16"]),
        2,
        &[
            "8 experts are not divisible by ep = 16",
            "the nearest legal degrees are ep=8",
        ],
    );
    // Degrees and choices together.
    refused(
        &mixtral(&[
            "--layout",
            "pp=2,vpp=4",
            "--overlap",
            "param-gather",
            "--precision",
            "fp8-delayed",
            "--recompute",
            "moe_act,mla_up_proj",
            "--pipeline-layout",
            "Et*57L",
        ]),
        2,
        &[
            "vpp = 4 over pp = 2 needs p2p overlap",
            "pipeline layout are 1, and pp x vpp = 2 x 4 = 8",
            "57 decoder layers (t), and the model has 56",
            "param-gather in --overlap needs grad-reduce",
            "moe_act cannot be recomputed under --precision fp8-delayed",
            "no layer of the model has mla_up_proj",
        ],
    );
    // Each layout breaks one rule or another.
    refused(
        &mixtral(&["--layout", "vpp=56"]),
        2,
        &["no layout is legal", "empty_stages", "vpp_without_pp"],
    );
}

#[test]
fn why_says_what_became_of_a_layout() {
    let why = |layout: &str| {
        let answer = answer(&mixtral(&["--json", "--why", layout]));
        let [step, first] = ["why", "plans"].map(|key| answer[key].clone());
        (
            step,
            first[0]["predicted"]["step_s"].as_f64().expect("a number"),
        )
    };
    let (slower, first_s) = why("TP4 PP8x7 | EP8 | mbs 1");
    assert_eq!(slower["verdict"], "slower", "{slower}");
    let step_s = slower["best"]["step_s"].as_f64().expect("a number");
    let bound = |name: &str| slower["bounds"][name].as_f64().expect("a number");
    let (work_s, split_s) = (bound("work_s"), bound("split_s"));
    assert!(first_s < step_s && work_s <= split_s && split_s <= step_s);
    let more = slower["more_s"].as_object().expect("a table");
    let sum: f64 = more
        .values()
        .map(|more| more.as_f64().expect("a number"))
        .sum();
    assert!((sum - (step_s - first_s)).abs() < 1e-9);
    let (refused, _) = why("tp=3");
    assert_eq!(refused["verdict"], "refused");
    assert!(
        refused["rules"][0]
            .as_str()
            .expect("words")
            .contains("tp x cp x pp = 3")
    );
    let (large, _) = why("tp=1,pp=1,ep=1,etp=1");
    assert_eq!(large["verdict"], "memory");
}

#[test]
fn nothing_feasible_is_an_answer_of_its_own() {
    let arguments = [
        "plan",
        "--model",
        "mixtral-8x7b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "4",
        "--seq-len",
        "4096",
        "--global-batch",
        "64",
    ];
    let parts = [
        "GiB",
        "--zero fsdp",
        "The smallest of these changes that fits: --optimizer-offload-fraction 1. By more ranks alone: --gpus 12.",
    ];
    refused(&arguments, 3, &parts);
    let arguments: Vec<&str> = arguments.into_iter().chain(["--json"]).collect();
    let (code, answer, _) = run(&mut program(&arguments));
    assert_eq!(code, 3);
    let savers = json::document(&answer)["savers"].clone();
    let savers = savers.as_array().expect("a list");
    assert!(savers.len() > 4 && savers[0]["fits"] == false);
    assert_eq!(savers.last().expect("some")["fits"], true, "{savers:?}");
}

#[test]
fn the_cluster_file_of_the_formats_is_one() {
    let page = include_str!("../docs/formats/model-and-cluster.md");
    let block = page
        .split("```toml\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ours.toml");
    fs::write(&path, block.expect("the page shows a cluster file")).expect("writable");
    let cluster = answer(&["clusters", path.to_str().expect("UTF-8"), "--json"]);
    assert_eq!(cluster["cluster"]["num_gpus"], 512);
}

#[test]
fn completions_are_a_script() {
    let (code, script, _) = run(&mut program(&["completions", "bash"]));
    assert_eq!(code, 0);
    assert!(script.contains("moefold"));
}

#[test]
fn a_quickstart_closes_the_loop() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("quickstart");
    let out_text = out.to_str().expect("UTF-8");
    let answer = answer(&["quickstart", "--steps", "6", "--out", out_text, "--json"]);
    for file in [
        "report/report.html",
        "profile/profile.json",
        "plan-best.json",
    ] {
        assert!(out.join(file).is_file(), "{file}");
    }
    let trained = out.join("run-profiled");
    for file in [
        "steps.jsonl",
        "trace.json",
        "plan.json",
        "env.json",
        "summary.json",
    ] {
        assert!(trained.join(file).is_file(), "{file}");
    }
    let steps = fs::read_to_string(trained.join("steps.jsonl")).expect("written");
    let losses: Vec<f64> = steps
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("a step"))
        .map(|step| step["loss"].as_f64().expect("a number"))
        .collect();
    assert_eq!(losses.len(), 6);
    assert!(losses[5] < losses[0] - 0.5, "it learns: {losses:?}");
    assert_eq!(answer["final_loss"].as_f64(), Some(losses[5]));
    // The plan of the second run is folded and rests on measurements.
    let plan = json::read(trained.join("plan.json"));
    assert_eq!(
        (
            &plan["layout"]["tp"],
            &plan["layout"]["etp"],
            &plan["layout"]["ep"]
        ),
        (&2.into(), &1.into(), &4.into())
    );
    // Training meets other sizes of what routing decides, between which the balanced ones lie.
    let known = &plan["predicted"]["confidence"];
    assert!(
        known["measured"].as_f64().expect("a number") > 0.5,
        "{known}"
    );
    assert!(
        known["extrapolated"].as_f64().expect("a number") < 0.01,
        "{known}"
    );
    self_contained(&out.join("report/report.html"));
    // A profile of four ranks at a time is scaled for two, and the user is told.
    let profile = out.join("profile");
    let profile = profile.to_str().expect("UTF-8");
    let (_, _, said) = run(&mut program(&[
        "plan",
        "--model",
        "quickstart",
        "--cluster",
        "local",
        "--gpus",
        "2",
        "--seq-len",
        "128",
        "--global-batch",
        "4",
        "--profile",
        profile,
        "--json",
    ]));
    assert!(
        said.starts_with("note: ") && said.contains("4 ranks at a time"),
        "{said}"
    );
    // It is never written over.
    refused(&["quickstart", "--out", out_text], 2, &["not empty"]);
}

/// A report loads nothing: no scripts, styles, fonts or pictures from elsewhere.
fn self_contained(page: &Path) {
    let page = fs::read_to_string(page).expect("written");
    for outside in ["src=\"http", "href=\"http", "url(http", "@import"] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn imports_write_a_whole_profile_or_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let fixture = |name: &str| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = root.join("profiles/tests/fixtures").join(name);
        path.to_str().expect("text").to_owned()
    };
    let out = folder.path().join("network");
    let out = out.to_str().expect("text");
    let imported = answer(&["import", &fixture("nccl-tests.txt"), "--out", out, "--json"]);
    assert_eq!(imported["format"], "nccl-tests");
    assert_eq!(imported["device"], "h100");
    assert_eq!(
        imported["keys"],
        serde_json::json!({"all_reduce": 2, "all_to_all": 1})
    );
    assert_eq!(imported["left_out"][0]["name"], "all_reduce_perf");
    // It prices plans of its device, and only those.
    let best = answer(&mixtral(&["--profile", out, "--top", "1", "--json"]));
    assert!(best["plans"][0]["predicted"]["step_s"].is_number());

    let steps = folder.path().join("steps");
    let steps = steps.to_str().expect("text");
    let log = fixture("megatron.log");
    let flags = ["import", &log, "--device", "b200", "--out", steps];
    let (code, text, errors) = run(&mut program(&flags));
    assert_eq!(code, 0, "{errors}");
    assert!(
        text.contains("1.002 s a step") && text.contains("warm-up"),
        "{text}"
    );
    refused(&mixtral(&["--profile", steps]), 2, &["`b200`", "`h100`"]);

    let none = folder.path().join("none");
    let none = none.to_str().expect("text");
    refused(
        &["import", &log, "--out", none],
        2,
        &["megatron.log", "--device"],
    );
    let forced = ["import", &log, "--format", "simumax", "--out", none];
    refused(&forced, 2, &["megatron.log", "line 1"]);
    assert!(!Path::new(none).exists());
}
