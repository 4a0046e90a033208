//! What the planner, profiles and reports read.

use std::path::Path;
use std::sync::LazyLock;

use moefold_executor::moe::balance::Balancing;
use moefold_executor::{data, trace};
use moefold_planner::answer::Answer;
use moefold_planner::choice::{Offload, Overlap, Recompute, RecomputePlan};
use moefold_planner::layout::PartialDegrees;
use moefold_planner::mesh::Order;
use moefold_planner::model::{self, Model, hf};
use moefold_planner::options::{PipelineLayout, Routing};
use moefold_planner::plan::Plan;
use moefold_planner::published;
use moefold_planner::settings::{self, Job, Target as Megatron, Version, reading};
use moefold_profiles::directory::Key;
use moefold_profiles::import::{self, Format};
use moefold_profiles::{Cluster, Costs, Profile, presets};
use moefold_reports::Page;
use serde_json::Value;

use crate::target::{Target, file, put, said};

pub(super) const TARGETS: [Target; 21] = [
    Target::new("config", "config.json of a model", |_, input| {
        let model = hf::parse("config.json", &text(input));
        said(model.map(|model| model::describe(&model, 4096)))
    })
    .also(&["planner/models"]),
    Target::new("cluster", "TOML of a cluster", |place, input| {
        said(presets::load_cluster(&put(place, "cluster.toml", input)))
    }),
    Target::new("plan", "plan.json", |_, input| said(plan(input))),
    Target::new(
        "dry-run",
        "plan.json, which is walked where it is accepted",
        |_, input| {
            let plan = plan(input)?;
            let costs = Costs::for_cluster(&plan.cluster, &[]);
            let (balancing, packing) = (Balancing::default(), data::Packing::default());
            said(trace::dry_run(&plan, 0, balancing, packing, &costs, &[]))
        },
    )
    .one_of(4)
    .also(&["tests/hostile/corpus/plan"]),
    Target::new("answer", "what `plan --json` prints", |_, input| {
        let answer: Result<Answer, _> = serde_json::from_slice(input);
        let answer = answer.map_err(|error| error.to_string())?;
        said(answer.check(Path::new("answer.json")))
    }),
    Target::new(
        "profile",
        "profile.json, which prices what it holds",
        |place, input| {
            put(place, "profile.json", input);
            let profile = Profile::load(place).map_err(|error| error.to_string())?;
            let keys: Vec<Key> = profile.samples.iter().map(|sample| sample.key).collect();
            let costs = Costs::for_cluster(&HERE, &[profile]);
            for key in keys {
                let cost = match key {
                    Key::Op(op) => costs.op(&op),
                    Key::Collective(collective) => {
                        let waited_s = costs.waiting(&collective).after(1.0);
                        assert!(
                            waited_s.is_finite() && waited_s >= 0.0,
                            "{waited_s} s waited after one"
                        );
                        costs.collective(&collective)
                    }
                    Key::Host(_) => continue,
                };
                let seconds = cost.time.0;
                assert!(
                    seconds.is_finite() && seconds >= 0.0,
                    "a price of {seconds} s"
                );
            }
            Ok(())
        },
    ),
    Target::new("kineto", "traces of PyTorch's profiler", |place, input| {
        imported(place, input, Format::Kineto)
    })
    .also(&[
        "profiles/tests/fixtures/kineto-gpu.json",
        "profiles/tests/fixtures/kineto-gloo.json",
    ]),
    Target::new("nccl-tests", "output of nccl-tests", |place, input| {
        imported(place, input, Format::NcclTests)
    })
    .also(&["profiles/tests/fixtures/nccl-tests.txt"]),
    Target::new("megatron-log", "log of Megatron-LM", |place, input| {
        imported(place, input, Format::MegatronLog)
    })
    .also(&["profiles/tests/fixtures/megatron.log"]),
    Target::new("simumax", "system file of SimuMax", |place, input| {
        imported(place, input, Format::Simumax)
    })
    .also(&["profiles/tests/fixtures/simumax.json"]),
    Target::new("import", "any of these, recognized", |place, input| {
        let path = put(place, "file", input);
        said(import::import(&path, &import::Options::default()))
    })
    .also(&["profiles/tests/fixtures"]),
    Target::new(
        "steps",
        "steps.jsonl of a run, as routing",
        |place, input| {
            put(place, "steps.jsonl", input);
            routing(place)
        },
    )
    .prepare(|place| {
        drop(put(
            place,
            "summary.json",
            &file("tests/hostile/corpus/summary/summary.json"),
        ));
    }),
    Target::new(
        "summary",
        "summary.json of a run, as routing",
        |place, input| {
            put(place, "summary.json", input);
            routing(place)
        },
    )
    .prepare(|place| {
        drop(put(
            place,
            "steps.jsonl",
            &file("tests/hostile/corpus/steps/steps.jsonl"),
        ));
    }),
    Target::new("routing", "tokens an expert", |place, input| {
        routing(&put(place, "routing.json", input))
    }),
    Target::new(
        "compare",
        "a run as `compare` reads it: steps, summary and machine",
        |place, input| compared(place, input).map(drop),
    )
    .prepare(planned),
    Target::new(
        "pictures",
        "the same run, whose page, tables and plots are written",
        |place, input| {
            // Rasters take a tenth of a second each.
            said(compared(place, input)?.write(&place.join("out")))
        },
    )
    .also(&["tests/hostile/corpus/compare"])
    .prepare(planned)
    .one_of(100),
    Target::new(
        "megatron-shell",
        "flags of Megatron-LM in a script",
        |_, input| megatron("settings.sh", input),
    ),
    Target::new(
        "megatron-yaml",
        "flags of Megatron-LM in YAML",
        |_, input| megatron("settings.yaml", input),
    )
    .also(&["planner/tests/fixtures/recipes"]),
    Target::new(
        "base",
        "flags of Megatron-LM in a script, which a plan is put into",
        |_, input| {
            let base = settings::parse("settings.sh", &text(input));
            let base = base.map_err(|error| error.to_string())?;
            let plan = &*PLANNED;
            let target = Megatron {
                version: Version::V16,
                cluster: &plan.cluster,
                gpus: plan.request.gpus,
            };
            let read = |model| reading::read(&base, &target, model);
            let read = read(None).or_else(|_| read(Some(&plan.model)));
            let read = read.map_err(|problems| format!("{problems:?}"))?;
            let job = Job::of_plan(plan);
            let written = settings::onto(&base, &read, &job, &target);
            let written = written.map_err(|refused| format!("{refused:?}"))?;
            settings::changes(&base, &written.settings);
            Ok(())
        },
    )
    .also(&["tests/hostile/corpus/megatron-shell"]),
    Target::new("published", "table of measured layouts", |_, input| {
        said(published::parse(Path::new("rows.csv"), &text(input)))
    }),
    Target::new("words", "values of flags", |_, input| {
        let text = text(input);
        let text = text.trim_end();
        // Every word is read by every reader of one.
        let all = [
            said(text.parse::<PartialDegrees>()),
            said(text.parse::<PipelineLayout>()),
            said(text.parse::<Order>()),
            said(text.parse::<Offload>()),
            said(text.parse::<Recompute>()),
            said(text.parse::<RecomputePlan>()),
            said(text.parse::<Overlap>()),
            said(text.parse::<data::Split>()),
        ];
        if all.iter().any(Result::is_ok) {
            return Ok(());
        }
        Err(all
            .into_iter()
            .filter_map(Result::err)
            .collect::<Vec<_>>()
            .join("; "))
    }),
];

/// The cluster of the profile in the corpus.
static HERE: LazyLock<Cluster> = LazyLock::new(|| presets::local(4));
static HOPPER: LazyLock<Cluster> =
    LazyLock::new(|| presets::cluster("dgx-h100").expect("a preset"));

static PLANNED: LazyLock<Plan> =
    LazyLock::new(|| plan(&file("tests/hostile/corpus/plan/megatron.json")).expect("a plan"));

/// What readers of text are given: files that are no UTF-8 are refused before.
fn text(input: &[u8]) -> String {
    String::from_utf8_lossy(input).into_owned()
}

fn plan(input: &[u8]) -> Result<Plan, String> {
    let plan = Plan::parse(&text(input), Path::new("plan.json"));
    let plan = plan.map_err(|error| error.to_string())?;
    plan.layout()
        .expect("a plan that was read has a legal layout");
    Ok(plan)
}

fn imported(place: &Path, input: &[u8], format: Format) -> Result<(), String> {
    let path = put(place, "file", input);
    let options = import::Options {
        format: Some(format),
        device: Some("h100"),
    };
    let imported = import::import(&path, &options).map_err(|error| error.to_string())?;
    // What was imported is saved, which refuses what no reader would take.
    imported
        .profile
        .save(&place.join("profile"))
        .expect("a legal profile");
    Ok(())
}

/// Puts the plan of the corpus where a run is read.
fn planned(place: &Path) {
    let run = place.join("run");
    std::fs::create_dir_all(&run).expect("a temporary folder");
    put(
        &run,
        "plan.json",
        &file("tests/hostile/corpus/plan/tiny.json"),
    );
}

/// A run, its steps, summary and machine, as `compare` reads it.
fn compared(place: &Path, input: &[u8]) -> Result<Page, String> {
    let Ok(Value::Object(parts)) = serde_json::from_slice(input) else {
        return Err("no object".to_owned());
    };
    let run = place.join("run");
    let part = |name: &str| parts.get(name).unwrap_or(&Value::Null);
    if let Some(lines) = part("steps").as_array() {
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        put(&run, "steps.jsonl", lines.join("\n").as_bytes());
    }
    put(&run, "summary.json", part("summary").to_string().as_bytes());
    put(&run, "env.json", part("env").to_string().as_bytes());
    Page::of(&[run]).map_err(|error| error.to_string())
}

fn routing(path: &Path) -> Result<(), String> {
    let routing = Routing::read(path);
    let routing = routing.map_err(|error| error.to_string())?;
    for ep in [1, 2, 8] {
        let loads = routing.loads(ep);
        let mut all = loads.busiest.iter().chain(&loads.fullest);
        assert!(all.all(|load| load.is_finite()), "{loads:?}");
    }
    Ok(())
}

fn megatron(name: &str, input: &[u8]) -> Result<(), String> {
    let settings = settings::parse(name, &text(input)).map_err(|error| error.to_string())?;
    let target = Megatron {
        version: Version::V16,
        cluster: &HOPPER,
        gpus: 64,
    };
    let given: Option<&Model> = None;
    let read = reading::read(&settings, &target, given);
    said(read.map_err(|problems| format!("{problems:?}")))
}
