//! Plans to settings and back, over drawn plans; and the recipes that Megatron-LM publishes.

use moefold_profiles::pricing::Costs;
use moefold_profiles::{Cluster, Dtype, Precision};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;
use crate::choice::{
    Offload, OffloadModule, Optimizer, PrimaryWeights, ScheduleName, StackName, Zero,
};
use crate::layout::Batch;
use crate::model::{Model, presets};
use crate::options::{Effort, SearchOptions};
use crate::plan::Plan;
use crate::search;
use crate::stack::megatron::Declared;

fn cluster(name: &str) -> Cluster {
    moefold_profiles::presets::cluster(name).expect("a preset")
}

/// The best plan of a request; nothing where there is none.
fn planned(model: &Model, cluster: &Cluster, gpus: u32, options: &SearchOptions) -> Option<Plan> {
    let costs = Costs::for_cluster(cluster, &[]);
    let found = search::plan(model, cluster, gpus, options, &costs, &Declared).ok()?;
    let planned = found.plans.into_iter().next()?;
    Some(Plan::of(planned, model, cluster, gpus, options))
}

fn heading(plan: &Plan) -> Heading {
    Heading {
        lines: vec!["a plan".to_owned()],
        name: "plan".to_owned(),
        gpus: plan.request.gpus,
        gpus_per_node: plan.cluster.gpus_per_node,
        version: Version::Main,
    }
}

fn target(plan: &Plan) -> Target<'_> {
    Target {
        version: Version::Main,
        cluster: &plan.cluster,
        gpus: plan.request.gpus,
    }
}

/// The plan that a job is.
fn plan_of(job: &Job, cluster: &Cluster) -> Option<Plan> {
    planned(&job.model, cluster, job.gpus, &job.options)
}

/// What a request may be of.
#[derive(Debug, Clone)]
struct Drawn {
    preset: usize,
    cluster: &'static str,
    gpus: u32,
    precision: Precision,
    choices: u32,
    form: Form,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let clusters = prop_oneof![Just("dgx-h100"), Just("gb200-nvl72"), Just("dgx-b200")];
    let precisions = prop_oneof![
        Just(Precision::Bf16),
        Just(Precision::Bf16),
        Just(Precision::Fp8),
        Just(Precision::Fp8Blockwise),
        Just(Precision::Mxfp8),
        Just(Precision::Nvfp4),
    ];
    let forms = proptest::sample::select(Form::ALL.to_vec());
    (
        0..presets::all().len(),
        clusters,
        3_u32..8,
        precisions,
        any::<u32>(),
        forms,
    )
        .prop_map(|(preset, cluster, power, precision, choices, form)| Drawn {
            preset,
            cluster,
            gpus: 1 << power,
            precision,
            choices,
            form,
        })
}

/// A plan as drawn, of a Megatron that has all memory.
fn plan_drawn(drawn: &Drawn) -> Option<Plan> {
    let model = presets::all()[drawn.preset].load().expect("a preset");
    let mut cluster = cluster(drawn.cluster);
    cluster.gpu.memory_gib = search::ENDLESS_GIB;
    let bit = |at: u32| drawn.choices >> at & 1 == 1;
    let batch = Batch {
        seq_len: 4096,
        global_batch: 512,
    };
    let mut options = SearchOptions::new(batch, StackName::Megatron);
    options.precision = drawn.precision;
    options.top = 1;
    options.effort = Effort::Brief;
    options.pins.mbs = Some(1);
    options.pins.tp = Some(if bit(0) { 2 } else { 1 });
    options.pins.cp = Some(if bit(1) && bit(2) { 2 } else { 1 });
    options.pins.pp = Some(if bit(3) { 4 } else { 1 });
    if bit(4) {
        options.optimizer = Optimizer::AdamBf16Moments;
    }
    if bit(5) {
        options.grad_dtype = Dtype::Bf16;
    }
    if bit(21) && bit(22) {
        options.optimizer = Optimizer::Muon;
    }
    if bit(14) && drawn.precision.compute() == Dtype::Fp8 {
        options.primary_weights = PrimaryWeights::Fp8;
    }
    options.fp8_attention = bit(15) && drawn.precision.compute() == Dtype::Fp8;
    let sets = ["none", "full", "layernorm,core_attn", "block-1", "block-3"];
    let set = sets[(drawn.choices >> 6) as usize % sets.len()];
    options.recompute = Some(set.parse().expect("a set"));
    if bit(8) && bit(9) {
        options.offload = Some(Offload::of([OffloadModule::AttnNorm]));
    }
    if bit(10) {
        let words = ["none", "grad-reduce,p2p", "grad-reduce,param-gather,p2p"];
        let chosen = words[(drawn.choices >> 11) as usize % 3];
        options.overlap = Some(chosen.parse().expect("overlap"));
    }
    if bit(13) && bit(14) && model.num_moe_layers() > 0 {
        options.capacity = Some(crate::choice::Capacity {
            factor: 1.25,
            drop_policy: crate::choice::DropPolicy::Position,
            pad: false,
        });
    }
    if bit(17) && bit(18) {
        options.cp_comm = Some(crate::choice::CpComm::Hierarchical);
    }
    if bit(19) && bit(20) {
        options.order = Some(crate::layout::Order::DP_LAST);
    }
    if bit(15) && bit(16) {
        options.instances = 2;
    }
    if bit(21) && !bit(3) {
        let kinds = [Zero::Gradients, Zero::Fsdp, Zero::Hybrid, Zero::Fsdp2];
        options.zero = kinds[usize::from(bit(23)) + 2 * usize::from(bit(24))];
        match options.zero {
            Zero::Hybrid => options.instances = 2,
            Zero::Fsdp2 => options.grad_dtype = Dtype::Bf16,
            _ => {}
        }
    }
    planned(&model, &cluster, drawn.gpus, &options)
}

/// Writes a plan, reads it back, prices what was read, and compares.
fn round_trip(plan: &Plan, form: Form) -> Result<(), String> {
    let job = Job::of_plan(plan);
    let written = match write(&job, &plan.cluster, Version::Main, Rest::Placeholders) {
        Ok(written) => written,
        Err(refused) => {
            // By name, and with what would work.
            let named = |one: &Refusal| !one.what.is_empty() && !one.nearest.is_empty();
            return if refused.iter().all(named) {
                Ok(())
            } else {
                Err(format!("{refused:?}"))
            };
        }
    };
    assert!(!written.settings.is_on("moe_router_force_load_balancing"));
    let text = text_of(form, &written, &heading(plan));
    let ending = if form == Form::MegatronYaml {
        "yaml"
    } else {
        "sh"
    };
    let read = parse(&format!("plan.{ending}"), &text).map_err(|error| error.to_string())?;
    if sorted(&read) != sorted(&written.settings) {
        return Err(format!("{text}\n{:?}", changes(&written.settings, &read)));
    }
    let said = reading::read(&read, &target(plan), None);
    let said = said.map_err(|problems| format!("{text}\n{problems:?}"))?;
    if !(said.broken.is_empty() && said.unknown.is_empty()) {
        return Err(format!("{:?} {:?}", said.broken, said.unknown));
    }
    if !same_model(&said.job.model, &plan.model) {
        return Err(format!("{:?}\n{:?}", said.job.model, plan.model));
    }
    let again = plan_of(&said.job, &plan.cluster).ok_or("what is read cannot be planned")?;
    let (mut found, expected) = (again.planned, plan.planned.clone());
    if found.predicted.step_s.to_bits() != expected.predicted.step_s.to_bits() {
        return Err(format!(
            "{} {}",
            found.predicted.step_s, expected.predicted.step_s
        ));
    }
    found.predicted = expected.predicted.clone();
    if found != expected {
        return Err(format!("{found:?}\n{expected:?}"));
    }
    Ok(())
}

fn law_of_round_trips(cases: u32) {
    let exported = std::cell::Cell::new(0_u32);
    let mut runner = TestRunner::new(Config {
        cases,
        ..Config::default()
    });
    runner
        .run(&drawn(), |drawn| {
            let Some(plan) = plan_drawn(&drawn) else {
                return Ok(());
            };
            exported.set(exported.get() + 1);
            round_trip(&plan, drawn.form).map_err(TestCaseError::fail)
        })
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(
        exported.get() * 4 > cases,
        "{} plans of {cases}",
        exported.get()
    );
}

#[test]
fn law_a_plan_is_read_as_it_is_written() {
    law_of_round_trips(60);
}

/// `cargo test -p moefold-planner settings -- --ignored`
#[test]
#[ignore = "takes minutes; a sample runs above"]
fn law_every_plan_is_read_as_it_is_written() {
    law_of_round_trips(1500);
}

/// The recipes, with where each runs.
const RECIPES: [(&str, &str, u32, &str); 7] = [
    (
        "deepseek-v3-h100-bf16",
        "dgx-h100",
        1024,
        include_str!("../../tests/fixtures/recipes/deepseek-v3-h100-bf16.yaml"),
    ),
    (
        "deepseek-v3-h100-fp8",
        "dgx-h100",
        1024,
        include_str!("../../tests/fixtures/recipes/deepseek-v3-h100-fp8.yaml"),
    ),
    (
        "qwen3-30b-gb200-bf16",
        "gb200-nvl72",
        16,
        include_str!("../../tests/fixtures/recipes/qwen3-30b-gb200-bf16.yaml"),
    ),
    (
        "qwen3-30b-gb200-mxfp8-graphs",
        "gb200-nvl72",
        16,
        include_str!("../../tests/fixtures/recipes/qwen3-30b-gb200-mxfp8-graphs.yaml"),
    ),
    (
        "qwen3-30b-gb200-mxfp8-paged-stash",
        "gb200-nvl72",
        16,
        include_str!("../../tests/fixtures/recipes/qwen3-30b-gb200-mxfp8-paged-stash.yaml"),
    ),
    (
        "qwen3-30b-h100-bf16",
        "dgx-h100",
        32,
        include_str!("../../tests/fixtures/recipes/qwen3-30b-h100-bf16.yaml"),
    ),
    (
        "qwen3-30b-h100-fp8",
        "dgx-h100",
        32,
        include_str!("../../tests/fixtures/recipes/qwen3-30b-h100-fp8.yaml"),
    ),
];

fn recipe(name: &str) -> (Settings, Cluster, u32) {
    let own = RECIPES.iter().find(|(own, ..)| *own == name);
    let (_, on, gpus, text) = own.expect("a recipe");
    let settings = parse("recipe.yaml", text).expect("a recipe reads");
    (settings, cluster(on), *gpus)
}

fn reading_of(settings: &Settings, cluster: &Cluster, gpus: u32) -> Reading {
    let target = Target {
        version: Version::Main,
        cluster,
        gpus,
    };
    let read = reading::read(settings, &target, None);
    read.unwrap_or_else(|problems| panic!("{problems:?}"))
}

#[test]
fn law_a_recipe_comes_out_as_it_went_in() {
    for (name, ..) in RECIPES {
        let (settings, mut cluster, gpus) = recipe(name);
        cluster.gpu.memory_gib = search::ENDLESS_GIB;
        let reading = reading_of(&settings, &cluster, gpus);
        assert!(reading.unknown.is_empty(), "{name}: {:?}", reading.unknown);
        let preset = if name.starts_with("deepseek") {
            "DeepSeek-V3"
        } else {
            "Qwen3-30B-A3B"
        };
        assert_eq!(reading.job.model.name, preset, "{name}");
        let plan = plan_of(&reading.job, &cluster).unwrap_or_else(|| panic!("{name} has no plan"));
        let target = target(&plan);
        let put = onto(&settings, &reading, &Job::of_plan(&plan), &target);
        let put = put.unwrap_or_else(|refused| panic!("{name}: {refused:?}"));
        if name == "deepseek-v3-h100-bf16" {
            // 61 layers are no multiple of 16 stages: only a layout can say which stage has what.
            assert_eq!(reading.broken.len(), 1, "{:?}", reading.broken);
            let rule = reading.broken[0].to_string();
            assert!(
                rule.contains("61 layers") && rule.contains("layout"),
                "{rule}"
            );
            let changed = changes(&settings, &put.settings);
            assert_eq!(changed.len(), 1, "{changed:?}");
            assert_eq!(changed[0].name, "--pipeline-model-parallel-layout");
            continue;
        }
        assert!(reading.broken.is_empty(), "{name}: {:?}", reading.broken);
        assert_eq!(changes(&settings, &put.settings), [], "{name}");
        assert_eq!(put.settings, settings, "{name}");
        for form in Form::ALL {
            let ending = if form == Form::MegatronYaml {
                "yaml"
            } else {
                "sh"
            };
            let text = text_of(form, &put, &heading(&plan));
            let read = parse(&format!("out.{ending}"), &text).expect("reads");
            let mut expected = settings.clone();
            if form != Form::MegatronYaml {
                // A command line cannot say that a switch is off.
                expected.flags.retain(|setting| setting.value != Value::Off);
            }
            assert_eq!(sorted(&read), sorted(&expected), "{name} {form:?}");
            let again = reading_of(&read, &cluster, gpus);
            assert_eq!(again.job, reading.job, "{name} {form:?}");
        }
    }
}

/// A command line has flags under headings, in another order.
fn sorted(settings: &Settings) -> Settings {
    let mut settings = settings.clone();
    settings.flags.sort_by(|a, b| a.name.cmp(&b.name));
    settings
}

#[test]
fn golden_what_recipes_say() {
    let (settings, cluster, gpus) = recipe("deepseek-v3-h100-fp8");
    let reading = reading_of(&settings, &cluster, gpus);
    let options = &reading.job.options;
    assert_eq!(
        options.pins.to_string(),
        "tp=2,cp=1,pp=8,vpp=4,ep=64,etp=1,mbs=1"
    );
    assert_eq!(options.precision, Precision::Fp8Blockwise);
    assert_eq!(options.optimizer, Optimizer::AdamBf16Moments);
    assert_eq!(options.schedule, Some(ScheduleName::Combined));
    let overlap = options.overlap.expect("said");
    assert!(overlap.expert_alltoall && overlap.delay_wgrad);
    assert_eq!(
        options.dispatcher.map(crate::choice::Dispatcher::name),
        Some("deepep")
    );
    let set = options.recompute.as_ref().map(ToString::to_string);
    assert_eq!(set.as_deref(), Some("mla_up_proj+mlp"));
    let stages = options.stages.as_ref().expect("a layout").stages();
    let sizes: Vec<usize> = stages.iter().map(Vec::len).collect();
    assert_eq!(sizes[..3], [3, 2, 2]);
    assert_eq!(sizes[29..], [2, 0, 0]);
    assert!(
        reading
            .notes
            .iter()
            .any(|note| note.contains("beside the head"))
    );
    let unpriced: Vec<&str> = reading
        .unpriced
        .iter()
        .map(|(one, _)| one.name.as_str())
        .collect();
    assert!(
        unpriced.contains(&"moe_router_force_load_balancing"),
        "{unpriced:?}"
    );
    assert_eq!(options.primary_weights, PrimaryWeights::Fp8);
    let kept: Vec<&str> = reading.kept.iter().map(|one| one.name.as_str()).collect();
    for name in ["lr", "load", "mock_data", "finetune"] {
        assert!(kept.contains(&name), "{name}: {kept:?}");
    }
}

/// A job that every release can be told.
fn plain_job(optimizer: Optimizer) -> (Job, Cluster) {
    let (model, cluster) = (presets::load("mixtral-8x7b"), cluster("dgx-h100"));
    let batch = Batch {
        seq_len: 4096,
        global_batch: 256,
    };
    let options = SearchOptions {
        optimizer,
        dispatcher: Some(crate::choice::Dispatcher::Alltoall),
        pins: "tp=1,pp=4,ep=8,mbs=1".parse().expect("degrees"),
        top: 1,
        ..SearchOptions::new(batch, StackName::Megatron)
    };
    let plan = planned(&model.expect("a preset"), &cluster, 64, &options);
    (Job::of_plan(&plan.expect("feasible")), cluster)
}

/// Muon is its own optimizer in 0.16 and what the distributed one comes to on main; before, there is none.
#[test]
fn muon_is_written_for_its_release_and_read_back() {
    let (mut job, cluster) = plain_job(Optimizer::Muon);
    let gpus = job.gpus;
    let written = |job: &Job, version| write(job, &cluster, version, Rest::Placeholders);
    let word = |written: &Written| match written.settings.get("optimizer") {
        Some(Value::Words(words)) => words.join(" "),
        other => format!("{other:?}"),
    };
    for (version, name, on, off) in [
        (
            Version::V16,
            "dist_muon",
            &[][..],
            &[
                "use_distributed_optimizer",
                "no_use_layer_wise_param_layout",
            ][..],
        ),
        (
            Version::Main,
            "muon",
            &[
                "use_distributed_optimizer",
                "no_use_layer_wise_param_layout",
            ],
            &[],
        ),
    ] {
        let out = written(&job, version).expect("can be said");
        assert_eq!(word(&out), name);
        assert!(on.iter().all(|name| out.settings.is_on(name)), "{name}");
        assert!(!off.iter().any(|name| out.settings.is_on(name)), "{name}");
        let target = Target {
            version,
            cluster: &cluster,
            gpus,
        };
        let again = reading::read(&out.settings, &target, None).expect("reads");
        assert_eq!(again.broken, [], "{name}");
        assert_eq!(again.job.options.optimizer, Optimizer::Muon);
        let put = onto(&out.settings, &again, &again.job, &target).expect("can be said");
        assert_eq!(put.settings, out.settings, "{name}");
    }
    let refused = |job: &Job, version| -> String {
        let refused = written(job, version).expect_err("cannot be said");
        let each = refused.iter().map(ToString::to_string);
        each.collect::<Vec<_>>().join("\n")
    };
    assert!(refused(&job, Version::V15).contains("Megatron-Core 0.15 has no Muon"));
    job.options.overlap = Some("grad-reduce,param-gather,p2p".parse().expect("overlap"));
    assert!(refused(&job, Version::V16).contains("nothing beside compute under Muon"));
    assert!(written(&job, Version::Main).is_ok());
}

#[test]
fn what_muon_does_not_go_with_is_said_by_flag() {
    let said = |version, flags: &[(&str, Option<&str>)]| -> String {
        let (job, cluster) = plain_job(Optimizer::Adam);
        let written = write(&job, &cluster, Version::Main, Rest::Placeholders);
        let mut settings = written.expect("can be said").settings;
        let gpus = job.gpus;
        for &(name, word) in flags {
            settings.flags.retain(|setting| setting.name != name);
            settings.set(name, word.map_or(Value::On, Value::word));
        }
        let target = Target {
            version,
            cluster: &cluster,
            gpus,
        };
        match reading::read(&settings, &target, None) {
            Ok(reading) => format!("{:?}", reading.broken),
            Err(problems) => {
                let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
                lines.join("\n")
            }
        }
    };
    let (muon, dist) = (
        ("optimizer", Some("muon")),
        ("optimizer", Some("dist_muon")),
    );
    for (version, flags, expected) in [
        (Version::V15, &[muon][..], "has no --optimizer muon"),
        (Version::V16, &[dist], "does not go with Muon"),
        (
            Version::V16,
            &[dist, ("overlap_grad_reduce", None)],
            "nothing beside compute",
        ),
        (
            Version::Main,
            &[muon, ("use_precision_aware_optimizer", None)],
            "is Adam's alone",
        ),
        (
            Version::Main,
            &[muon, ("muon_num_ns_steps", Some("8"))],
            "--muon-num-ns-steps 8 has no price here; nearest: --muon-num-ns-steps 5",
        ),
        (
            Version::Main,
            &[muon, ("muon_tp_mode", Some("duplicated"))],
            "--muon-tp-mode duplicated has no price",
        ),
        (
            Version::Main,
            &[muon, ("muon_no_split_qkv", None)],
            "orthogonalized as one has no price",
        ),
    ] {
        let said = said(version, flags);
        assert!(said.contains(expected), "{flags:?}: {said}");
    }
}

/// A recipe with some flags otherwise, and what is then said of it.
fn said_of(name: &str, flags: &[(&str, Option<Value>)]) -> String {
    let (mut settings, cluster, gpus) = recipe(name);
    for (flag, value) in flags {
        settings.flags.retain(|setting| setting.name != *flag);
        if let Some(value) = value {
            settings.set(flag, value.clone());
        }
    }
    let target = Target {
        version: Version::Main,
        cluster: &cluster,
        gpus,
    };
    match reading::read(&settings, &target, None) {
        Ok(reading) => format!("{}\n{:?}", lines(&reading.broken), reading.unknown),
        Err(problems) => lines(&problems),
    }
}

fn lines(problems: &[Problem]) -> String {
    let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

/// A recipe, a flag, what it is set to (nothing takes it away, `on` is a switch), and what is then said.
const WRONG: &[[&str; 4]] = &[
    [
        "deepseek",
        "moe_router_dtype",
        "fp33",
        "--moe-router-dtype is fp33, and may be fp32, fp64",
    ],
    [
        "deepseek",
        "attention_backend",
        "flsh",
        "nearest: --attention-backend flash",
    ],
    [
        "deepseek",
        "moe_router_load_balancing_type",
        "aux_los",
        "balancing-type aux_loss",
    ],
    [
        "qwen",
        "ckpt_format",
        "torch_dst",
        "nearest: --ckpt-format torch_dist",
    ],
    [
        "qwen",
        "cuda_graph_scope",
        "atn",
        "nearest: --cuda-graph-scope attn",
    ],
    [
        "qwen",
        "distribute_saved_activations",
        "on",
        "--distribute-saved-activations needs tensor parallelism",
    ],
    [
        "deepseek",
        "pipeline_model_parallel_layout",
        "Ettm|(tt|)*29L",
        "has MTP depths (m) in other places",
    ],
    [
        "deepseek",
        "decoder_last_pipeline_num_layers",
        "2",
        "--pipeline-model-parallel-layout does not go with --decoder-last-pipeline-num-layers",
    ],
    [
        "deepseek",
        "account_for_loss_in_pipeline_split",
        "on",
        "--pipeline-model-parallel-layout does not go with --account-for-loss-in-pipeline-split",
    ],
    ["qwen", "num_layers", "", "--num-layers is missing"],
    [
        "qwen",
        "num_layers",
        "many",
        "--num-layers: found `many`, expected a whole number",
    ],
    ["qwen", "num_layers", "$L", "`$L` holds a variable"],
    [
        "qwen",
        "overlap_grad_reduce",
        "true",
        "--overlap-grad-reduce: found `true`, expected no value",
    ],
    [
        "qwen",
        "optimizer_cpu_offload",
        "on",
        "needs the precision-aware optimizer",
    ],
    [
        "qwen",
        "fine_grained_activation_offloading",
        "on",
        "needs modules to offload",
    ],
    [
        "deepseek",
        "recompute_modules",
        "core_atn",
        "--recompute-modules: found `core_atn`, expected core_attn or",
    ],
    ["qwen", "num_layers", "", "--num-layers is missing"],
    [
        "qwen",
        "micro_batch_size",
        "",
        "--micro-batch-size is missing",
    ],
    ["qwen", "tokenizer_model", "mine", "--vocab-size is missing"],
    [
        "qwen",
        "use_distributed_optimizer",
        "",
        "nearest: --use-distributed-optimizer",
    ],
    ["qwen", "moe_router_topk", "129", "at most the 128 experts"],
    ["qwen", "optimizer", "sgd", "--optimizer sgd has no price"],
    [
        "qwen",
        "cp_comm_type",
        "a2a+p2p",
        "--cp-comm-type a2a+p2p without levels has no price",
    ],
    [
        "qwen",
        "window_size",
        "128,0",
        "the model that --window-size makes",
    ],
    [
        "qwen",
        "position_embedding_type",
        "",
        "--position-embedding-type rope",
    ],
    [
        "qwen",
        "tensor_paralel_size",
        "2",
        "tensor_model_parallel_size",
    ],
    [
        "qwen",
        "delay_wgrad_compute",
        "on",
        "needs --overlap-moe-expert-parallel-comm",
    ],
    [
        "qwen",
        "moe_pad_expert_input_to_capacity",
        "on",
        "needs a capacity",
    ],
    [
        "qwen",
        "recompute_granularity",
        "full",
        "--recompute-method uniform",
    ],
    [
        "qwen",
        "moe_router_enable_expert_bias",
        "on",
        "needs sigmoid scores",
    ],
    [
        "qwen",
        "seq_length",
        "65536",
        "is above --max-position-embeddings 40960",
    ],
    [
        "qwen",
        "bf16",
        "",
        "--moe-grouped-gemm multiplies bf16 alone",
    ],
    [
        "qwen",
        "use_megatron_fsdp",
        "on",
        "--data-parallel-sharding-strategy no_shard has no price",
    ],
    [
        "qwen",
        "use_torch_fsdp2",
        "on",
        "--use-torch-fsdp2 does not go with --use-distributed-optimizer",
    ],
    [
        "qwen",
        "use_torch_fsdp2",
        "on",
        "--use-torch-fsdp2 does not go with gradients that are added up in products",
    ],
    ["qwen", "fp8_param_gather", "on", "needs FP8"],
    ["qwen", "fp8_dot_product_attention", "on", "needs FP8"],
    [
        "deepseek",
        "use_precision_aware_optimizer",
        "",
        "precision-aware optimizer",
    ],
    ["deepseek", "sequence_parallel", "", "--sequence-parallel"],
    [
        "deepseek",
        "pipeline_model_parallel_layout",
        "Et|tL",
        "has 2 stages",
    ],
    [
        "deepseek",
        "pipeline_model_parallel_layout",
        "Ex",
        "the symbols E, t, m, L",
    ],
    ["deepseek", "moe_layer_freq", "[0]*3", "a list of 61"],
    [
        "deepseek",
        "recompute_modules",
        "mhc",
        "recomputing mhc has no price",
    ],
    [
        "deepseek",
        "num_virtual_stages_per_pipeline_rank",
        "4",
        "say the same thing",
    ],
];

#[test]
fn what_is_wrong_is_said_by_its_flag() {
    for [recipe, flag, value, expected] in WRONG {
        let name = match *recipe {
            "qwen" => "qwen3-30b-h100-bf16",
            _ => "deepseek-v3-h100-fp8",
        };
        let value = match *value {
            "" => None,
            "on" => Some(Value::On),
            word => Some(Value::word(&word)),
        };
        let found = said_of(name, &[(*flag, value)]);
        assert!(found.contains(expected), "{flag}: {found} lacks {expected}");
    }
    let full = ("recompute_granularity", Some(Value::word("full")));
    let found = said_of(
        "qwen3-30b-h100-bf16",
        &[full, ("recompute_activations", Some(Value::On))],
    );
    assert!(found.contains("--recompute-activations is --recompute-granularity selective"));
}

/// Words of flags and variables that break a rule of CUDA graphs, the last of which alone makes them, with what is said.
const GRAPHS: &[(&[&str], &str)] = &[
    (
        &["cuda_graph_impl=local", "recompute_granularity=full"],
        "full recomputation does not go with graphs of layers",
    ),
    (
        &[
            "no_check_for_nan_in_loss_and_grad=off",
            "moe_pad_expert_input_to_capacity=on",
            "cuda_graph_impl=full_iteration",
        ],
        "leaves no place to look for NaN",
    ),
    (
        &["cuda_graph_impl=local", "cuda_graph_modules=moe_preprocess"],
        "a graph of moe_preprocess needs moe_router beside it",
    ),
    (
        &["cuda_graph_impl=local", "cuda_graph_modules=moe_router,moe"],
        "graphs of moe and of moe_router exclude each other",
    ),
    (
        &["cuda_graph_impl=local", "cuda_graph_modules=moe"],
        "a graph of moe needs experts that get as many rows each",
    ),
    (
        &[
            "cuda_graph_impl=local",
            "cuda_graph_modules=mlp",
            "overlap_moe_expert_parallel_comm=on",
        ],
        "--overlap-moe-expert-parallel-comm does not go with graphs of moe or mlp",
    ),
    (
        &["cuda_graph_impl=local", "cpu_offloading_num_layers=1"],
        "--cpu-offloading-num-layers does not go with graphs",
    ),
    (
        &[
            "cuda_graph_impl=transformer_engine",
            "cuda_graph_modules=attn",
            "fine_grained_activation_offloading=on",
        ],
        "goes with graphs of both attn and moe_router alone",
    ),
    (
        &[
            "no_check_for_nan_in_loss_and_grad=on",
            "cuda_graph_impl=full_iteration",
        ],
        "a graph of the whole iteration needs experts whose rows are bounded",
    ),
    (
        &[
            "cuda_graph_impl=local",
            "$PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ],
        "graphs over expandable segments need NCCL_GRAPH_REGISTER=0",
    ),
    (
        &[
            "$NCCL_GRAPH_REGISTER=0",
            "cuda_graph_impl=local",
            "0.16",
            "$PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ],
        "0.16 takes no graphs over expandable segments",
    ),
];

#[test]
fn every_rule_of_cuda_graphs_is_said_where_it_is_broken_and_not_before() {
    for (words, expected) in GRAPHS {
        let said = |words: &[&str]| {
            let (mut settings, cluster, gpus) = recipe("qwen3-30b-h100-bf16");
            settings.env.clear();
            let mut version = Version::Main;
            for word in words {
                match word.split_once('=') {
                    None => version = Version::V16,
                    Some((name, value)) => match (name.strip_prefix('$'), value) {
                        (Some(variable), value) => settings.export(variable, value),
                        (None, "on") => settings.set(name, Value::On),
                        (None, "off") => settings.flags.retain(|setting| setting.name != name),
                        (None, value) => {
                            let words = value.split(',').map(str::to_owned);
                            settings.set(name, Value::Words(words.collect()));
                        }
                    },
                }
            }
            let target = Target {
                version,
                cluster: &cluster,
                gpus,
            };
            format!("{:?}", broken(&settings, &target))
        };
        let found = said(words);
        assert!(
            found.contains(expected),
            "{words:?}: {found} lacks {expected}"
        );
        let found = said(&words[..words.len() - 1]);
        assert!(!found.contains(expected), "{words:?} but the last: {found}");
    }
}

#[test]
fn releases_have_their_own_flags() {
    let (settings, cluster, gpus) = recipe("qwen3-30b-h100-bf16");
    let flags = |version| {
        let target = Target {
            version,
            cluster: &cluster,
            gpus,
        };
        broken(&settings, &target)
    };
    assert_eq!(flags(Version::V16), []);
    let older = format!("{:?}", flags(Version::V14));
    assert!(
        older.contains("0.14 has no --moe-flex-dispatcher-backend"),
        "{older}"
    );

    let reading = reading_of(&settings, &cluster, gpus);
    let mut job = reading.job.clone();
    job.options.dispatcher = Some(crate::choice::Dispatcher::Deepep);
    let flags = |version| {
        let written = write(&job, &cluster, version, Rest::Placeholders).expect("can be said");
        (
            written.settings.is_on("moe_enable_deepep"),
            written.settings.get("moe_flex_dispatcher_backend").cloned(),
        )
    };
    assert_eq!(flags(Version::V14), (true, None));
    assert_eq!(flags(Version::V16), (false, Some(Value::word("deepep"))));
    job.options.offload = Some(Offload::of([OffloadModule::AttnNorm]));
    job.options.dispatcher = Some(crate::choice::Dispatcher::Hybridep);
    let refused = write(&job, &cluster, Version::V15, Rest::Placeholders).expect_err("too old");
    let refused = format!("{refused:?}");
    for what in [
        "has no --fine-grained-activation-offloading",
        "has no HybridEP",
    ] {
        assert!(refused.contains(&format!("0.15 {what}")), "{refused}");
    }
}

#[test]
fn what_megatron_cannot_say_is_refused_by_name() {
    let (settings, cluster, gpus) = recipe("qwen3-30b-h100-bf16");
    let job = reading_of(&settings, &cluster, gpus).job;
    let refused = |edit: &dyn Fn(&mut Job)| {
        let mut job = job.clone();
        edit(&mut job);
        let refused = write(&job, &cluster, Version::Main, Rest::Placeholders);
        let all: Vec<String> = refused
            .expect_err("refused")
            .iter()
            .map(ToString::to_string)
            .collect();
        all.join("\n")
    };
    let by_layer = refused(&|job| job.options.recompute = Some("0-3=full".parse().expect("sets")));
    assert!(
        by_layer.contains("one set for all layers") && by_layer.contains("0-3=full"),
        "{by_layer}"
    );
    let divided = refused(&|job| job.options.schedule = Some(ScheduleName::ZbH1));
    assert!(divided.contains("no schedule zb-h1"), "{divided}");
    for (preset, expected) in [
        ("gpt-oss-20b", "sliding-window attention"),
        ("MiniMax-Text-01", "lightning attention"),
        ("DeepSeek-V4-Flash", "hyper-connections"),
        ("granite-3.1-1b-a400m-instruct", "constant multipliers"),
        ("Kimi-K2-Instruct", "YaRN"),
    ] {
        let model = presets::load(preset).expect("a preset");
        let found = refused(&|job| job.model = model.clone());
        assert!(found.contains(expected), "{preset}: {found}");
    }
}

/// Settings that a plan is put into keep no rule broken that the plan says how to keep.
#[test]
fn what_is_broken_is_mended_where_a_plan_is_put() {
    let (mut settings, cluster, gpus) = recipe("deepseek-v3-h100-fp8");
    settings
        .flags
        .retain(|setting| setting.name != "sequence_parallel");
    settings.export("CUDA_DEVICE_MAX_CONNECTIONS", "1");
    let target = Target {
        version: Version::Main,
        cluster: &cluster,
        gpus,
    };
    assert_eq!(
        broken(&settings, &target).len(),
        2,
        "{:?}",
        broken(&settings, &target)
    );
    let reading = reading_of(&settings, &cluster, gpus);
    let put = onto(&settings, &reading, &reading.job, &target).expect("can be said");
    assert_eq!(broken(&put.settings, &target), []);
    let said: Vec<String> = changes(&settings, &put.settings)
        .into_iter()
        .map(|change| change.name)
        .collect();
    assert_eq!(said, ["--sequence-parallel", "CUDA_DEVICE_MAX_CONNECTIONS"]);
}

/// 72 GPUs of a domain do not divide a group of 128.
#[test]
fn golden_ranks_of_a_domain_divide_it() {
    let shares = [(8, 8), (16, 8), (4, 8), (128, 72), (64, 72), (12, 8)];
    let near = shares.map(|(group, domain)| rules::ranks_near(group, domain));
    assert_eq!(near, [8, 8, 4, 8, 64, 4]);
}

/// Linear attention between layers of softmax attention is written for its release and read back, by a number or by a list.
#[test]
fn golden_linear_attention_between_layers_of_softmax() {
    let model = presets::load("Qwen3-Next-80B-A3B-Instruct").expect("a preset");
    let cluster = cluster("dgx-h100");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 64,
    };
    let mut options = SearchOptions::new(batch, StackName::Megatron);
    options.recompute = Some("full".parse().expect("a set"));
    options.pins = "tp=1,cp=1,pp=2,vpp=1,ep=16,etp=1,mbs=1"
        .parse()
        .expect("degrees");
    let plan = planned(&model, &cluster, 64, &options).expect("fits");
    let job = Job::of_plan(&plan);
    let write = |version| write(&job, &cluster, version, Rest::Placeholders);
    let written = write(Version::V16).expect("written").settings;
    for (name, value) in [
        ("experimental_attention_variant", "gated_delta_net"),
        ("linear_attention_freq", "4"),
        ("linear_num_key_heads", "16"),
        ("linear_num_value_heads", "32"),
        ("linear_key_head_dim", "128"),
        ("linear_value_head_dim", "128"),
        ("linear_conv_kernel_dim", "4"),
        ("rotary_percent", "0.25"),
    ] {
        assert_eq!(written.get(name), Some(&Value::word(value)), "{name}");
    }
    assert!(written.is_on("attention_output_gate") && written.is_on("apply_layernorm_1p"));
    let before = write(Version::V15).expect_err("has none");
    assert!(
        before[0]
            .to_string()
            .contains("0.15 has no --attention-output-gate")
    );

    let listed = |value| {
        let mut settings = written.clone();
        settings.set("linear_attention_freq", value);
        settings
    };
    let of_yaml = ["1", "1", "1", "0"].repeat(12).into_iter();
    for settings in [
        &written,
        &listed(Value::word("([1]*3+[0])*12")),
        &listed(Value::Words(of_yaml.map(str::to_owned).collect())),
    ] {
        let read = reading_of(settings, &cluster, 64).job.model;
        assert!(same_model(&read, &model), "{read:?}");
    }
    let said = |name: &str, value: Value| {
        let mut settings = written.clone();
        settings.set(name, value);
        let target = Target {
            version: Version::V16,
            cluster: &cluster,
            gpus: 64,
        };
        let own = reading::read(&settings, &target, None).map(|reading| reading.broken);
        let all = own.unwrap_or_else(|problems| problems);
        let all: Vec<String> = all.iter().map(ToString::to_string).collect();
        all.join("\n")
    };
    let words = Value::word;
    for (name, value, expected) in [
        (
            "linear_attention_freq",
            Value::Off,
            "--linear-attention-freq",
        ),
        ("linear_attention_freq", words("[1]*3"), "a list of 48"),
        (
            "linear_attention_freq",
            words("[1]*48"),
            "without softmax attention",
        ),
        ("linear_attention_freq", words("5"), "--mtp-num-layers"),
        (
            "linear_num_value_heads",
            words("24"),
            "a multiple of the 16 key heads",
        ),
        (
            "experimental_attention_variant",
            words("dsa"),
            "gated_delta_net",
        ),
        (
            "context_parallel_size",
            words("2"),
            "no context parallelism",
        ),
        ("squared_relu", Value::On, "under SiLU alone"),
        (
            "multi_latent_attention",
            Value::On,
            "--attention-output-gate does not go",
        ),
    ] {
        let found = said(name, value);
        assert!(found.contains(expected), "{name}: {found}");
    }
}

/// Layers of each stage that run again are said as Megatron-LM counts them, and read as they are said.
#[test]
fn golden_a_block_of_each_stage_runs_again() {
    let (settings, cluster, gpus) = recipe("qwen3-30b-h100-bf16");
    let mut job = reading_of(&settings, &cluster, gpus).job;
    job.options.recompute = Some("block-3".parse().expect("a block"));
    let written = write(&job, &cluster, Version::V16, Rest::Placeholders).expect("can be said");
    for (name, word) in [
        ("recompute_granularity", "full"),
        ("recompute_method", "block"),
        ("recompute_num_layers", "3"),
    ] {
        assert_eq!(written.settings.get(name), Some(&Value::word(&word)));
    }
    let read = reading_of(&written.settings, &cluster, gpus).job.options;
    assert_eq!(read.recompute, job.options.recompute);
    // Of stages that have no more all run again, and still no depth of multi-token prediction.
    let mut settings = written.settings;
    settings.set("recompute_num_layers", Value::word(&48));
    let read = reading_of(&settings, &cluster, gpus).job.options;
    assert_eq!(read.recompute, Some("block-48".parse().expect("a block")));
    settings.set("recompute_method", Value::word(&"uniform"));
    let said = reading::read(
        &settings,
        &Target {
            version: Version::Main,
            cluster: &cluster,
            gpus,
        },
        None,
    );
    let said = format!("{:?}", said.expect_err("not priced"));
    assert!(said.contains("the input of every few layers"), "{said}");
}

/// 94 layers with both ends among them, as Qwen3-235B-A22B is trained (`examples/moe_recipes` of Megatron-LM).
#[test]
fn golden_ends_that_count_as_layers() {
    let (settings, cluster, gpus) = recipe("qwen3-30b-h100-bf16");
    let model = presets::load("Qwen3-235B-A22B").expect("a preset");
    for (each, vpp, sizes) in [("3", 4, [2, 3, 2]), ("1", 12, [0, 1, 0])] {
        let mut settings = settings.clone();
        let words = |value: &str| Value::Words(vec![value.to_owned()]);
        settings.set("num_layers", words("94"));
        settings.set("pipeline_model_parallel_size", words("8"));
        settings.set("num_layers_per_virtual_pipeline_stage", words(each));
        settings.set("account_for_embedding_in_pipeline_split", Value::On);
        settings.set("account_for_loss_in_pipeline_split", Value::On);
        let target = Target {
            version: Version::Main,
            cluster: &cluster,
            gpus: 8 * gpus,
        };
        let read = reading::read(&settings, &target, Some(&model));
        let options = read.expect("reads").job.options;
        assert_eq!(options.pins.vpp, Some(vpp));
        let stages = options.stages.expect("given");
        let found: Vec<usize> = stages.stages().iter().map(Vec::len).collect();
        let last = found.len() - 1;
        assert_eq!(found.len(), 8 * vpp as usize);
        assert_eq!([found[0], found[1], found[last]], sizes);
    }
}

#[test]
fn a_plan_put_into_settings_changes_what_it_says_otherwise_and_nothing_else() {
    let (settings, cluster, gpus) = recipe("qwen3-30b-h100-bf16");
    let reading = reading_of(&settings, &cluster, gpus);
    let mut job = reading.job.clone();
    job.options.recompute = Some("layernorm".parse().expect("a set"));
    job.options.dispatcher = Some(crate::choice::Dispatcher::Alltoall);
    let target = Target {
        version: Version::Main,
        cluster: &cluster,
        gpus,
    };
    let put = onto(&settings, &reading, &job, &target).expect("can be said");
    let found: Vec<String> = changes(&settings, &put.settings)
        .into_iter()
        .map(|one| format!("{} {:?} {:?}", one.name, one.from, one.to))
        .collect();
    assert_eq!(
        found,
        [
            r#"--moe-token-dispatcher-type Some("flex") Some("alltoall")"#,
            r#"--recompute-granularity None Some("selective")"#,
            r#"--recompute-modules None Some("layernorm")"#,
            r#"--moe-flex-dispatcher-backend Some("hybridep") None"#,
        ]
    );
    assert_eq!(put.settings.get("lr"), settings.get("lr"));
    let again = reading_of(&put.settings, &cluster, gpus);
    assert_eq!(again.job, job);
    // An older release says DeepEP otherwise, and lacks a flag of what is there.
    let mut settings = settings;
    let deepep = Value::Words(vec!["deepep".to_owned()]);
    settings.set("moe_flex_dispatcher_backend", deepep);
    let reading = reading_of(&settings, &cluster, gpus);
    let target = Target {
        version: Version::V15,
        ..target
    };
    let put = onto(&settings, &reading, &reading.job, &target).expect("can be said");
    let left_out =
        |note: &String| note.contains("0.15") && note.contains("--moe-flex-dispatcher-backend");
    assert!(put.notes.iter().any(left_out), "{:?}", put.notes);
    assert!(put.settings.is_on("moe_enable_deepep"));
    assert_eq!(put.settings.get("moe_flex_dispatcher_backend"), None);
}

#[test]
fn what_is_spelled_out_as_it_is_is_no_change() {
    let read = |text: &str| parse("a.sh", text).expect("flags");
    let before = read("--num-layers 4 --cp-comm-type p2p --swiglu");
    let after = read("--num-layers 4 --context-parallel-size 1 --bf16");
    let changed = changes(&before, &after);
    let names: Vec<&str> = changed.iter().map(|change| change.name.as_str()).collect();
    assert_eq!(names, ["--bf16", "--swiglu"]);
}
