//! Every rule that options bring, by itself and together with those of degrees.

use super::super::Rules;
use super::*;
use crate::choice::{
    Capacity, Dispatcher, DropPolicy, HostShare, Masters, Optimizer, PrimaryWeights, StackName,
    Zero,
};
use crate::layout::{Batch, PartialDegrees};
use crate::model::presets;

const BATCH: Batch = Batch {
    seq_len: 4096,
    global_batch: 256,
};

fn named<T: Copy>(all: &[T], name: fn(T) -> &'static str, word: &str) -> T {
    let found = all.iter().find(|&&member| name(member) == word);
    *found.expect("a known name")
}

/// Options by name and value, `overlap none stack moefold`.
fn options(words: &str) -> SearchOptions {
    let words: Vec<&str> = words.split_whitespace().collect();
    let pairs = || words.chunks(2).map(|pair| (pair[0], pair[1]));
    let stack = pairs().find(|(option, _)| *option == "stack");
    let stack = stack.map_or(StackName::Megatron, |(_, word)| {
        named(&StackName::ALL, StackName::name, word)
    });
    let mut options = SearchOptions::new(BATCH, stack);
    for (option, word) in pairs() {
        match option {
            "stack" => {}
            "overlap" => options.overlap = Some(word.parse().expect("kinds")),
            "precision" => options.precision = named(&Precision::ALL, Precision::name, word),
            "recompute" => options.recompute = Some(word.parse().expect("a set")),
            "cuda_graph" => options.graphs = Some(word.parse().expect("graphs")),
            "offload" => options.offload = Some(word.parse().expect("modules")),
            "dispatcher" => {
                options.dispatcher = Some(named(&Dispatcher::ALL, Dispatcher::name, word));
            }
            "cp_comm_type" => {
                options.cp_comm = (word != "auto").then(|| named(&CpComm::ALL, CpComm::name, word));
            }
            "capacity" | "pad" => {
                options.capacity = Some(Capacity {
                    factor: word.parse().expect("a factor"),
                    drop_policy: DropPolicy::Probs,
                    pad: option == "pad",
                });
            }
            "schedule" => {
                options.schedule = Some(named(&ScheduleName::ALL, ScheduleName::name, word));
            }
            "ddp_bucket_size" => options.bucket_elements = Some(word.parse().expect("a size")),
            "optimizer_offload_fraction" => {
                options.optimizer_offload = HostShare(word.parse().expect("a number"));
            }
            "hierarchical_context_parallel_sizes" => {
                let (inside, outside) = word.split_once('x').expect("two");
                let sizes = [inside, outside].map(|size| size.parse().expect("a number"));
                options.cp_sizes = Some(sizes);
            }
            "rank_order" => options.order = Some(word.parse().expect("an order")),
            "num_distributed_optimizer_instances" => {
                options.instances = word.parse().expect("a number");
            }
            "optimizer" => options.optimizer = named(&Optimizer::ALL, Optimizer::name, word),
            "grad_dtype" => options.grad_dtype = named(&Dtype::ALL, Dtype::name, word),
            "masters" => options.masters = named(&Masters::ALL, Masters::name, word),
            "primary_weights" => {
                options.primary_weights = named(&PrimaryWeights::ALL, PrimaryWeights::name, word);
            }
            "fp8_attention" => options.fp8_attention = word == "true",
            "zero" => options.zero = named(&Zero::ALL, Zero::name, word),
            "pipeline-layout" => options.stages = Some(word.parse().expect("stages")),
            other => panic!("{other}"),
        }
    }
    options
}

fn broken(model: &str, degrees: &str, words: &str) -> Vec<Illegal> {
    let model = presets::load(model).expect("a preset");
    let pins: PartialDegrees = degrees.parse().expect("degrees");
    let rules = Rules::of(&model, &options(words));
    rules.layout(&pins.or_one(128)).err().unwrap_or_default()
}

/// One rule is broken, and its message holds these words.
fn check(degrees: &str, words: &str, reason: &str, expected: &[&str]) {
    let broken = broken("mixtral-8x22b", degrees, words);
    assert_eq!(broken.len(), 1, "{degrees} {words}: {broken:?}");
    assert_eq!(broken[0].reason(), reason);
    let message = broken[0].to_string();
    for expected in expected {
        assert!(message.contains(expected), "`{message}` lacks `{expected}`");
    }
}

#[test]
fn schedules_are_of_their_degrees_and_stacks() {
    let pairs = [
        ("pp=1", "none", true),
        ("pp=8", "none", false),
        ("pp=8", "1f1b", true),
        ("pp=1", "1f1b", false),
        ("pp=8,vpp=7", "1f1b", false),
        ("pp=8,vpp=7", "interleaved", true),
        ("pp=8", "interleaved", false),
        ("pp=8", "zb-h1", true),
        ("pp=8,vpp=7", "zb-h1", false),
        ("pp=1", "zb-h1", false),
        ("pp=8,vpp=2", "zb-v", true),
        ("pp=8,vpp=2", "v-half", true),
        ("pp=4,vpp=2", "v-min", true),
        ("pp=4,vpp=2", "dualpipe-v", true),
        ("pp=8", "zb-v", false),
        ("pp=8,vpp=7", "dualpipe-v", false),
        ("pp=8,vpp=7", "v-half", false),
        ("pp=1", "v-min", false),
        ("pp=1,ep=8", "combined overlap expert-alltoall", true),
        ("pp=8,ep=8", "combined overlap expert-alltoall", true),
        ("pp=8,vpp=7,ep=8", "combined overlap expert-alltoall", true),
        (
            "pp=4,vpp=2,ep=8",
            "dualpipe-v-combined overlap expert-alltoall,delay-wgrad",
            true,
        ),
    ];
    for (degrees, schedule, goes) in pairs {
        let words = format!("stack moefold schedule {schedule}");
        if goes {
            let broken = broken("mixtral-8x22b", degrees, &words);
            assert!(broken.is_empty(), "{degrees} {schedule}: {broken:?}");
        } else {
            check(degrees, &words, "schedule", &[schedule, "nearest"]);
        }
    }
    let expected = ["megatron", "zb-h1", "nearest: 1f1b, or `stack` moefold"];
    check(
        "pp=8",
        "stack megatron schedule zb-h1",
        "stack_schedule",
        &expected,
    );
    let expected = [
        "megatron",
        "v-half",
        "nearest: interleaved, or `stack` moefold",
    ];
    check(
        "pp=8,vpp=2",
        "stack megatron schedule v-half",
        "stack_schedule",
        &expected,
    );
}

/// Open degrees may become what a schedule needs; pinned ones may not.
#[test]
fn a_schedule_contradicts_only_pinned_degrees() {
    let model = presets::load("mixtral-8x22b").expect("a preset");
    for (pins, schedule, contradicts) in [
        ("tp=2", "zb-h1", false),
        ("pp=4", "zb-h1", false),
        ("pp=1", "zb-h1", true),
        ("vpp=2", "zb-h1", true),
        ("pp=4", "v-min", false),
        ("vpp=3", "v-min", true),
        ("pp=1", "zb-v", true),
        ("tp=2", "interleaved", false),
        ("vpp=1", "interleaved", true),
        ("pp=2", "none", true),
    ] {
        let options = options(&format!("stack moefold schedule {schedule}"));
        let pins: PartialDegrees = pins.parse().expect("degrees");
        let broken = Rules::of(&model, &options).contradictions(&pins, 128);
        let found = broken.iter().any(|rule| rule.reason() == "schedule");
        assert_eq!(found, contradicts, "{pins:?} {schedule}: {broken:?}");
    }
}

/// Rules of choices that this release prices.
#[test]
fn each_rule_of_a_choice_has_its_message() {
    let windows = broken("gpt-oss-20b", "cp=2", "stack moefold");
    let reasons: Vec<&str> = windows.iter().map(Illegal::reason).collect();
    assert_eq!(reasons, ["stack_cp"], "{windows:?}");
    let said = windows[0].to_string();
    assert!(
        said.contains("p2p would; nearest: `cp_comm_type` a2a"),
        "{said}"
    );
    let exchanged = broken("gpt-oss-20b", "cp=2", "stack moefold cp_comm_type a2a");
    assert!(exchanged.is_empty(), "{exchanged:?}");
    check(
        "tp=4,cp=4",
        "cp_comm_type a2a",
        "heads_over_cp",
        &[
            "8 heads",
            "tp x cp = 4 x 4 = 16",
            "cp = 2",
            "`cp_comm_type` p2p",
        ],
    );
    check(
        "",
        "stack moefold precision fp8",
        "stack_precision",
        &["`precision` fp8", "it runs fp32, bf16"],
    );
    check(
        "",
        "stack moefold dispatcher deepep",
        "stack_dispatcher",
        &["deepep", "it has alltoall, allgather"],
    );
    check(
        "",
        "capacity 0",
        "capacity_factor",
        &["`expert_capacity_factor` 0", "nearest: 1"],
    );
    for (stack, dispatcher) in [("megatron", "hybridep"), ("moefold", "allgather")] {
        check(
            "",
            &format!("stack {stack} dispatcher {dispatcher} pad 1.5"),
            "padded_dispatcher",
            &[stack, dispatcher, "`dispatcher` alltoall"],
        );
    }
    check(
        "",
        "recompute mla_up_proj,shared_experts,moe_act",
        "recompute_absent",
        &[
            "mla_up_proj, shared_experts",
            "core_attn, layernorm, moe_act, moe",
        ],
    );
    check(
        "",
        "precision fp8-delayed recompute moe_act",
        "moe_act_under_delayed_fp8",
        &["moe_act", "`precision` fp8,"],
    );
    check(
        "",
        "overlap param-gather",
        "param_gather_alone",
        &["grad-reduce,param-gather"],
    );
    check(
        "pp=2,vpp=7",
        "overlap none",
        "vpp_pair_without_p2p",
        &["vpp = 7", "pp = 2", "vpp = 1"],
    );
    check(
        "pp=8,vpp=7",
        "pipeline-layout E(tt|)*27ttL",
        "pipeline_layout",
        &[
            "layout are 28",
            "8 x 7 = 56",
            "pp = 7 and vpp = 4, or pp = 14 and vpp = 2",
        ],
    );
    check(
        "",
        "pipeline-layout Et*57L",
        "pipeline_layout_layers",
        &["57 decoder layers", "has 56"],
    );
    check(
        "",
        "pipeline-layout Et*56mL",
        "pipeline_layout_depths",
        &["1 MTP", "has 0", "no m"],
    );
}

/// Of what is captured as a graph.
#[test]
fn each_rule_of_graphs_has_its_message() {
    for (choices, parts) in [
        (
            "cuda_graph moe_preprocess",
            ["moe_preprocess without", "both"],
        ),
        (
            "pad 1.0 cuda_graph moe,moe_router",
            ["beside moe_router", "one of them"],
        ),
        (
            "dispatcher alltoall cuda_graph full_iteration",
            ["nothing bounds", "hybridep"],
        ),
        ("cuda_graph mlp", ["all have experts", "without it"]),
        ("cuda_graph mamba", ["without linear mixers", "without it"]),
        (
            "capacity 1.0 dispatcher alltoall cuda_graph moe_router,moe_preprocess",
            ["left on the host", "padding"],
        ),
        (
            "offload moe_act cuda_graph attn",
            ["`offload`", "attn,moe_router"],
        ),
        (
            "recompute full cuda_graph attn",
            ["`recompute` full", "of modules"],
        ),
        (
            "recompute moe cuda_graph moe_router",
            ["again", "without moe_router"],
        ),
    ] {
        check("", choices, "cuda_graph", &parts);
    }
}

#[test]
fn each_rule_of_orders_has_its_message() {
    const BEFORE: &str = "rank_order tp-cp-ep-pp-dp";
    check(
        "pp=8,ep=8",
        BEFORE,
        "pipeline_groups",
        &["edp = 2 and dp = 16", "ep x etp = tp x cp"],
    );
    check(
        "",
        "rank_order tp-cp-dp-ep-pp",
        "rank_order",
        &["tp-cp-dp-ep-pp", "nearest: one of them"],
    );
    for degrees in ["ep=8", "pp=8,ep=8,tp=8", "pp=8", "pp=8,tp=2,cp=2,ep=4"] {
        let broken = broken("mixtral-8x22b", degrees, BEFORE);
        assert!(broken.is_empty(), "{degrees}: {broken:?}");
    }
}

/// Of context parallelism in levels.
#[test]
fn each_rule_of_levels_has_its_message() {
    const LEVELS: &str = "hierarchical_context_parallel_sizes";
    for (degrees, words, reason, parts) in [
        (
            "cp=8",
            "cp_comm_type a2a+p2p hierarchical_context_parallel_sizes 2x2",
            "cp_hierarchy_sizes",
            [
                "are 4 context-parallel ranks, and cp is 8",
                "nearest: cp = 4",
            ],
        ),
        (
            "cp=8,tp=4",
            "cp_comm_type a2a+p2p hierarchical_context_parallel_sizes 4x2",
            "heads_over_cp_level",
            ["8 heads", "4 x 4"],
        ),
        (
            "cp=8",
            "cp_comm_type a2a hierarchical_context_parallel_sizes 4x2",
            "cp_hierarchy_alone",
            ["and there is a2a", "a2a+p2p"],
        ),
        (
            "",
            "cp_comm_type a2a+p2p stack moefold",
            "stack_cp_hierarchy",
            ["`cp_comm_type` a2a or p2p", "`stack` megatron"],
        ),
    ] {
        check(degrees, words, reason, &parts);
    }
    let fits = format!("cp_comm_type a2a+p2p {LEVELS} 4x2");
    for (degrees, words) in [
        ("cp=8,tp=2", fits.as_str()),
        ("cp=8,tp=16", "cp_comm_type a2a+p2p"),
        ("tp=2", "cp_comm_type a2a+p2p"),
    ] {
        let broken = broken("mixtral-8x22b", degrees, words);
        assert!(broken.is_empty(), "{degrees} {words}: {broken:?}");
    }
}

/// Of what data parallelism divides and runs beside compute.
#[test]
fn each_rule_of_replicas_has_its_message() {
    check(
        "",
        "ddp_bucket_size 0 stack moefold",
        "empty_buckets",
        &["`ddp_bucket_size` 0", "nearest: 1"],
    );
    check(
        "",
        "zero fsdp ddp_bucket_size 7 stack moefold",
        "fsdp_buckets",
        &["`ddp_bucket_size` 7", "every layer", "`zero` 1"],
    );
    check(
        "pp=2",
        "zero fsdp",
        "fsdp_over_pp",
        &["pp is 2", "nearest: pp = 1"],
    );
    for (degrees, instances, parts) in [
        (
            "tp=8,pp=8",
            4,
            ["2 replicas of dense parameters", "nearest: 2"],
        ),
        ("ep=8,etp=8", 4, ["2 replicas of experts", "nearest: 2"]),
    ] {
        let words = format!("num_distributed_optimizer_instances {instances}");
        check(degrees, &words, "optimizer_instances", &parts);
    }
    check(
        "",
        "num_distributed_optimizer_instances 2 stack moefold",
        "stack_optimizer_instances",
        &["nearest: 1", "`stack` megatron"],
    );
    for (words, expected) in [
        ("ddp_bucket_size 7", "megatron"),
        (
            "ddp_bucket_size 7 overlap p2p stack moefold",
            "`overlap` grad-reduce",
        ),
    ] {
        let expected = ["`ddp_bucket_size` 7", expected];
        check("", words, "buckets_without_overlap", &expected);
    }
}

#[test]
fn muon_divides_whole_matrices_and_is_of_megatron_core() {
    for words in [
        "optimizer muon",
        "optimizer muon grad_dtype bf16",
        "optimizer muon overlap grad-reduce,param-gather,p2p",
        "optimizer muon precision mxfp8",
    ] {
        assert!(broken("mixtral-8x22b", "", words).is_empty(), "{words}");
    }
    for (with, nearest) in [
        ("zero fsdp", "`zero` 1"),
        ("zero 2", "`zero` 1"),
        ("num_distributed_optimizer_instances 2", "1 of them"),
        ("masters remainder", "`masters` fp32"),
        (
            "precision fp8 primary_weights fp8",
            "`primary_weights` wide",
        ),
        (
            "optimizer_offload_fraction 0.5",
            "`optimizer_offload_fraction` 0",
        ),
    ] {
        let words = format!("optimizer muon {with}");
        let expected = ["`optimizer` muon", nearest, "`optimizer` adam"];
        check("", &words, "muon", &expected);
    }
    let expected = ["`optimizer` muon: stack moefold", "`stack` megatron"];
    for words in [
        "stack moefold optimizer muon",
        "stack moefold zero fsdp optimizer muon",
    ] {
        check("", words, "stack_optimizer", &expected);
    }
}

#[test]
fn gradients_that_rest_divided_are_reduced_beside_compute() {
    let expected = ["`zero` 2", "grad-reduce", "`zero` 1"];
    for overlap in ["none", "p2p"] {
        check(
            "",
            &format!("zero 2 overlap {overlap}"),
            "zero_at_once",
            &expected,
        );
    }
    assert!(broken("mixtral-8x22b", "", "zero 2 overlap grad-reduce").is_empty());
}

#[test]
fn a_share_of_states_is_from_0_to_1() {
    for share in ["1.5", "-0.1", "NaN"] {
        let words = format!("stack moefold optimizer_offload_fraction {share}");
        let expected = [&format!("`optimizer_offload_fraction` {share}"), "to 1"];
        check("", &words, "host_share", &expected);
    }
}

#[test]
fn weights_in_fp8_are_multiplied_in_it_and_leave_no_remainder() {
    for precision in ["bf16", "nvfp4"] {
        let words = format!("precision {precision} primary_weights fp8");
        let expected = ["`primary_weights` fp8", precision, "mxfp8"];
        check("", &words, "primary_weights", &expected);
    }
    let words = "precision mxfp8 primary_weights fp8 masters remainder";
    let expected = ["`masters` remainder", "`primary_weights` wide"];
    check("", words, "remainder_of_fp8", &expected);
}

#[test]
fn attention_in_fp8_needs_a_recipe_and_kernels_that_do() {
    for precision in ["bf16", "nvfp4"] {
        let words = format!("precision {precision} fp8_attention true");
        let expected = ["`fp8_attention`", precision, "mxfp8"];
        check("", &words, "fp8_attention", &expected);
    }
    let words = "stack moefold precision bf16 fp8_attention true";
    let broken = broken("mixtral-8x22b", "", words);
    let said = broken[0].to_string();
    assert!(
        said.contains("`stack` moefold, whose attention is wide"),
        "{said}"
    );
}

#[test]
fn nothing_remains_of_masters_beside_weights_of_f32() {
    check(
        "",
        "stack moefold masters remainder",
        "whole_masters",
        &[
            "`masters` remainder",
            "`precision` fp32",
            "`precision` bf16",
        ],
    );
}

#[test]
fn gradients_are_narrow_where_a_stack_accumulates_them_so() {
    check(
        "",
        "stack moefold grad_dtype bf16",
        "stack_gradients",
        &["`grad_dtype` fp32", "`stack` megatron"],
    );
    let said = broken("mixtral-8x7b", "", "stack megatron grad_dtype bf16");
    assert!(said.is_empty(), "{said:?}");
}

#[test]
fn each_rule_of_some_layers_and_of_divided_gradients_has_its_message() {
    for (words, reason, parts) in [
        (
            "recompute 0-3=full",
            "stack_recompute",
            ["megatron", "block-1"],
        ),
        (
            "stack moefold recompute block-3",
            "stack_block",
            ["moefold", "0,4=full"],
        ),
        (
            "recompute block-57",
            "recompute_layers",
            ["block-57", "the model has 56"],
        ),
    ] {
        check("", words, reason, &parts);
    }
    check(
        "pp=2",
        "zero 2",
        "zero_2_over_pp",
        &["pp is 2", "nearest: pp = 1"],
    );
    for zero in ["2", "hfsdp num_distributed_optimizer_instances 1", "fsdp2"] {
        let words = format!("stack moefold zero {zero}");
        let broken = broken("mixtral-8x22b", "", &words);
        let broken: Vec<&str> = broken.iter().map(Illegal::reason).collect();
        assert_eq!(broken.first(), Some(&"stack_zero"), "{zero}: {broken:?}");
    }
    let halves = "zero hfsdp num_distributed_optimizer_instances 2";
    for (degrees, words, reason, parts) in [
        ("", "zero hfsdp", "hfsdp_alone", ["is 1", "nearest: 2"]),
        ("pp=2", halves, "fsdp_over_pp", ["`zero` hfsdp", "pp = 1"]),
        (
            "",
            &format!("{halves} precision mxfp8 primary_weights fp8"),
            "hfsdp_weights",
            ["precision` mxfp8", "`primary_weights` wide"],
        ),
    ] {
        check(degrees, words, reason, &parts);
    }
    let narrow = "zero fsdp2 grad_dtype bf16";
    for (degrees, words, nearest) in [
        ("", "zero fsdp2", "`grad_dtype` bf16"),
        ("ep=8", narrow, "ep = 1"),
        (
            "",
            &format!("{narrow} num_distributed_optimizer_instances 2"),
            "1 of them",
        ),
        (
            "",
            &format!("{narrow} optimizer adam-bf16-moments"),
            "`optimizer` adam",
        ),
        ("", &format!("{narrow} masters remainder"), "`masters` fp32"),
        (
            "",
            &format!("{narrow} precision fp8 primary_weights fp8"),
            "`primary_weights` wide",
        ),
        (
            "",
            &format!("{narrow} optimizer_offload_fraction 1"),
            "`optimizer_offload_fraction` 0",
        ),
    ] {
        check(degrees, words, "fsdp2", &["does not go with", nearest]);
    }
    check(
        "tp=2",
        narrow,
        "fsdp2_experts",
        &["etp = 1 where tp = 2", "nearest: etp = 2"],
    );
    let dense = broken("llama-3.1-8b", "tp=2", narrow);
    assert!(dense.is_empty(), "{dense:?}");
    check(
        "",
        &format!("{narrow} overlap grad-reduce"),
        "zero_at_once",
        &["grad-reduce,param-gather in `overlap`", "always"],
    );
    let tied = broken("granite-3.1-1b-a400m-instruct", "", narrow);
    let said: Vec<String> = tied.iter().map(ToString::to_string).collect();
    assert!(
        said.len() == 1 && said[0].contains("a tied embedding"),
        "{said:?}"
    );
}

#[test]
fn each_rule_of_offloading_has_its_message() {
    check(
        "",
        "stack megatron offload moe_act,attn_proj",
        "offload_alone",
        &["attn_proj", "`offload` core_attn,attn_proj"],
    );
    check(
        "",
        "stack moefold recompute moe offload expert_fc1,moe_act",
        "offload_recomputed",
        &["`recompute` moe", "`offload` expert_fc1+moe_act"],
    );
    check(
        "",
        "stack megatron recompute block-2 offload moe_act",
        "offload_block",
        &["block-2", "`offload` none"],
    );
    let dense = broken(
        "llama-3.1-8b",
        "",
        "stack moefold offload moe_act,attn_proj",
    );
    let said: Vec<String> = dense.iter().map(ToString::to_string).collect();
    let expected = "no layer of the model has moe_act to offload; nearest: modules it has, attn_norm, qkv_linear";
    assert!(said.len() == 1 && said[0].contains(expected), "{said:?}");
}

#[test]
fn choices_that_go_together_break_nothing() {
    for (degrees, words) in [
        ("pp=2,vpp=7", "overlap p2p"),
        ("pp=2", "overlap none"),
        ("pp=8,vpp=7", "overlap none"),
        ("tp=2,ep=8", "zero fsdp"),
        ("tp=2,ep=8", "zero fsdp stack moefold"),
        ("tp=2,ep=8", "zero 2"),
        (
            "tp=2,ep=4",
            "zero hfsdp num_distributed_optimizer_instances 4",
        ),
        ("tp=2,etp=2,cp=2", "zero fsdp2 grad_dtype bf16"),
        ("", "zero fsdp2 grad_dtype bf16 precision fp8"),
        ("tp=2,ep=8", "zero 2 num_distributed_optimizer_instances 4"),
        (
            "tp=2,ep=4",
            "zero fsdp num_distributed_optimizer_instances 4",
        ),
        ("pp=2,ep=4", "num_distributed_optimizer_instances 2"),
        ("", "precision fp8 recompute moe_act"),
        ("", "precision fp8-delayed recompute full"),
        ("", "precision fp8-delayed recompute moe,layernorm"),
        ("", "overlap grad-reduce,param-gather"),
        ("pp=4,vpp=7", "pipeline-layout E(tt|)*27ttL"),
        ("tp=8", "stack moefold"),
        ("pp=8", "stack moefold"),
        ("pp=2,vpp=7", "stack moefold"),
        ("tp=8", "stack moefold precision bf16"),
        ("tp=8", "stack moefold precision bf16 masters remainder"),
        ("", "precision fp8 masters remainder"),
        ("", "optimizer_offload_fraction 1"),
        ("", "stack megatron offload core_attn,attn_proj,moe_act"),
        ("", "stack moefold offload attn_proj"),
        (
            "pp=8",
            "stack moefold offload moe_act,core_attn recompute moe",
        ),
    ] {
        let broken = broken("mixtral-8x22b", degrees, words);
        assert!(broken.is_empty(), "{degrees} {words}: {broken:?}");
    }
    // The core keeps nothing where it runs again, so the projection after it asks for nothing.
    let words = "stack megatron recompute mla_up_proj offload attn_proj";
    assert!(broken("deepseek-v3", "", words).is_empty());
    for stages in ["Et*61mL", "Et*61L"] {
        let broken = broken("deepseek-v3", "", &format!("pipeline-layout {stages}"));
        assert!(broken.is_empty(), "{stages}: {broken:?}");
    }
}

/// What goes with passes that run as one, and what not.
#[test]
fn each_rule_of_combined_passes_has_its_message() {
    let of_degrees = [
        ("pp=8", "expert_alltoall_without_ep", "nearest: ep = 2"),
        (
            "pp=8,ep=8",
            "expert_alltoall_without_vpp",
            "nearest: vpp = 2",
        ),
    ];
    for (degrees, reason, expected) in of_degrees {
        let broken = broken("mixtral-8x22b", degrees, "overlap expert-alltoall");
        let found = broken.iter().find(|broken| broken.reason() == reason);
        let found = found.expect(reason).to_string();
        assert!(found.contains(expected), "{found}");
    }
    check(
        "ep=8",
        "overlap delay-wgrad",
        "delay_wgrad_alone",
        &["nearest: `overlap` expert-alltoall,delay-wgrad"],
    );
    check(
        "tp=2",
        "stack moefold overlap tp",
        "tp_beside",
        &["`stack` megatron", "`overlap` without tp"],
    );
    check(
        "ep=8",
        "schedule combined",
        "combined_without_overlap",
        &["nearest: expert-alltoall in `overlap`", "auto"],
    );
    check(
        "pp=4,vpp=2,ep=8",
        "stack moefold schedule dualpipe-v-combined",
        "combined_without_overlap",
        &["nearest: expert-alltoall in `overlap`, or `schedule` dualpipe-v"],
    );
    for (words, expected) in [
        ("dispatcher allgather", "nearest: `dispatcher` alltoall"),
        ("recompute full", "nearest: `recompute` of other modules"),
        ("recompute block-1", "nearest: `recompute` of other modules"),
        ("recompute moe", "nearest: `recompute` of other modules"),
        (
            "schedule none",
            "nearest: `schedule` combined, dualpipe-v-combined, or auto",
        ),
        ("zero fsdp", "nearest: `zero` 1"),
        ("zero 2", "nearest: `zero` 1"),
        ("offload moe_act", "nearest: `offload` none"),
    ] {
        let words = format!("overlap grad-reduce,expert-alltoall {words}");
        check("ep=8", &words, "expert_alltoall", &[expected]);
    }
    let refused = |model, words: &str| {
        let broken = broken(model, "ep=8", words);
        broken.iter().map(Illegal::reason).collect::<Vec<_>>()
    };
    let both = "overlap expert-alltoall,shared-expert";
    assert_eq!(refused("deepseek-v3", both), ["expert_alltoall"]);
    assert!(refused("llama-3.1-8b", "overlap expert-alltoall").contains(&"expert_alltoall"));
    for words in ["", "recompute mla_up_proj,moe_act", "dispatcher deepep"] {
        let words = format!("overlap expert-alltoall,delay-wgrad {words}");
        assert_eq!(refused("deepseek-v3", &words), [""; 0], "{words}");
    }
}

#[test]
fn rules_of_degrees_and_of_choices_are_reported_together() {
    let broken = broken(
        "mixtral-8x22b",
        "tp=5,ep=3,pp=2,vpp=2",
        "stack moefold precision fp8-delayed recompute moe_act",
    );
    let reasons: Vec<&str> = broken.iter().map(Illegal::reason).collect();
    assert_eq!(
        reasons,
        [
            "attention_grid",
            "expert_grid",
            "heads_over_tp",
            "kv_heads_over_tp",
            "hidden_over_tp",
            "experts_over_ep",
            "sequence_over_tp",
            "stack_precision",
            "moe_act_under_delayed_fp8",
        ]
    );
}

/// What goes with the shared expert beside dispatch, and what not.
#[test]
fn each_rule_of_the_shared_expert_has_its_message() {
    check(
        "",
        "overlap shared-expert",
        "no_shared_expert",
        &[
            "shared-expert in `overlap`",
            "nearest: `overlap` without it",
        ],
    );
    for (words, reason, expected) in [
        (
            "overlap shared-expert dispatcher allgather",
            "shared_expert_dispatcher",
            "not with allgather",
        ),
        (
            "overlap shared-expert recompute shared_experts,layernorm",
            "shared_expert_recomputed",
            "`recompute` without shared_experts",
        ),
    ] {
        let found = broken("deepseek-v3", "", words);
        assert_eq!(found.len(), 1, "{words}: {found:?}");
        assert_eq!(found[0].reason(), reason);
        assert!(found[0].to_string().contains(expected), "{}", found[0]);
    }
    for words in ["recompute full", "recompute moe", "dispatcher deepep"] {
        let words = format!("overlap shared-expert {words}");
        assert_eq!(broken("deepseek-v3", "", &words), [], "{words}");
    }
}
