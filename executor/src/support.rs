//! [`check`]: what this version runs, and everything in a plan that it does not.
//!
//! Refusing happens once, before any rank starts, and names every reason together; nothing further
//! in checks again. A plan for another executor is no error of the plan.

use moefold_kernels::{attention, latent_kv, permute, router};
use moefold_planner::choice::{CpComm, Dispatcher, ScheduleName, StackName, Zero};
use moefold_planner::model::{Feature, Mixer, Model, features};
use moefold_planner::plan::PlannedLayout;
use moefold_planner::stack::Stack;
use moefold_profiles::{Dtype, Precision};

use crate::data::Packing;
use crate::device::DeviceSpec;
use crate::error::Unsupported;

/// Families whose checkpoints are known by tensor name.
pub(crate) const FAMILIES: &[&str] = &[
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "llama",
    "mistral",
    "qwen3",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "gpt_oss",
];

/// Architectural traits that the layers implement.
const FEATURES: &[Feature] = &[
    Feature::GroupedQueryAttention,
    Feature::LatentAttention,
    Feature::Yarn,
    Feature::Llama3Scaling,
    Feature::MultiTokenPrediction,
    Feature::PartialRotary,
    Feature::SlidingWindow,
    Feature::AttentionSinks,
    Feature::QkvBias,
    Feature::OutBias,
    Feature::QkNormPerHead,
    Feature::QkNormFull,
    Feature::DenseLayers,
    Feature::Experts,
    Feature::SharedExpert,
    Feature::GatedSharedExpert,
    Feature::SoftmaxRouter,
    Feature::TopkSoftmaxRouter,
    Feature::SigmoidRouter,
    Feature::RouterBias,
    Feature::CorrectionBias,
    Feature::GroupLimitedRouting,
    Feature::RouterScaling,
    Feature::ExpertBias,
    Feature::ClippedGelu,
    Feature::TiedEmbeddings,
];

/// Refuses a plan or a model that this version cannot run on `device`.
pub fn check(plan: &PlannedLayout, model: &Model, device: &DeviceSpec) -> Result<(), Unsupported> {
    let mut reasons = in_plan(plan, device);
    reasons.extend(in_model(model));
    reasons.extend(uncut(plan, model));
    if device.is_gpu() {
        reasons.extend(beyond_kernels(model));
    }
    if reasons.is_empty() {
        Ok(())
    } else {
        Err(Unsupported { reasons })
    }
}

/// Refuses samples whose documents are apart, where a plan lets keys travel.
pub fn check_packing(plan: &PlannedLayout, packing: Packing) -> Result<(), Unsupported> {
    let masked = packing.reset_attention_mask && travels(plan);
    let reason = masked.then(|| cut(plan, "--reset-attention-mask"));
    reason.map_or(Ok(()), |reason| {
        Err(Unsupported {
            reasons: vec![reason],
        })
    })
}

/// Why the sequences of a model are not cut, where a plan would.
fn uncut(plan: &PlannedLayout, model: &Model) -> Option<String> {
    let window = Feature::SlidingWindow;
    let refused = features(model).contains(&window) && travels(plan);
    refused.then(|| cut(plan, &window.to_string()))
}

/// Whether ranks that cut sequences have blocks of keys.
fn travels(plan: &PlannedLayout) -> bool {
    plan.layout.cp > 1 && plan.cp_comm() != CpComm::A2a
}

fn cut(plan: &PlannedLayout, what: &str) -> String {
    format!(
        "{what} under context parallelism is implemented with cp_comm_type \"a2a\" alone, found \"{}\" and \
         cp={}, use \"a2a\" or cp=1",
        plan.cp_comm().name(),
        plan.layout.cp
    )
}

fn in_plan(plan: &PlannedLayout, device: &DeviceSpec) -> Vec<String> {
    let degrees = &plan.layout;
    let interleaved = degrees.pp == 1 && plan.pipeline.schedule == ScheduleName::Interleaved;
    let dispatchers = Stack::of(StackName::Moefold).common().dispatchers;
    let dispatcher = plan.dispatcher.name();
    let refusals = [
        (
            interleaved,
            "the interleaved schedule needs a pipeline, use \"none\"".to_owned(),
        ),
        (
            !dispatchers.contains(&plan.dispatcher),
            format!(
                "dispatcher \"{dispatcher}\" is not implemented, use \"alltoall\" or \"allgather\""
            ),
        ),
        (
            plan.cuda_graph.is_some(),
            "CUDA graphs are not implemented, use cuda_graph \"none\"".to_owned(),
        ),
        (
            plan.capacity.is_some_and(|capacity| capacity.pad)
                && plan.dispatcher == Dispatcher::Allgather,
            "padding to capacity under dispatcher \"allgather\" is not implemented, use \"alltoall\""
                .to_owned(),
        ),
        (
            plan.zero == Some(Zero::Fsdp) && degrees.pp > 1,
            format!(
                "fully sharded data parallelism under a pipeline is not implemented, found zero \"fsdp\" and pp={}, use \"1\" or pp=1",
                degrees.pp
            ),
        ),
        (
            !matches!(plan.zero, None | Some(Zero::States | Zero::Fsdp)),
            format!(
                "replicas divide states alone, or weights and gradients too, found zero \"{}\", use \"1\" or \"fsdp\"",
                plan.zero.unwrap_or_default().name()
            ),
        ),
        (
            plan.recompute.block().is_some(),
            "recomputing the first layers of each stage is not implemented, found recompute {\"block\": ..}, use layers by number"
                .to_owned(),
        ),
        (
            plan.layout.cp > 1 && plan.cp_comm() == CpComm::Hierarchical,
            "context parallelism in levels is not implemented, found cp_comm_type \"a2a+p2p\", use \"a2a\" or \"p2p\""
                .to_owned(),
        ),
        (
            plan.optimizer.deals_tensors(),
            format!(
                "optimizer \"{}\" is not implemented, use \"adam\"",
                plan.optimizer.name()
            ),
        ),
        (
            plan.optimizer_instances.is_some(),
            format!(
                "instances of the optimizer are not implemented, found optimizer_instances {}, leave it out",
                plan.optimizer_instances.unwrap_or(1)
            ),
        ),
        (
            plan.precision.compute() != device.dtype(),
            precision(plan.precision, device),
        ),
    ];
    let refused = refusals.into_iter().filter(|(refused, _)| *refused);
    refused.map(|(_, reason)| reason).collect()
}

/// Why a precision is not that of `device`.
fn precision(asked: Precision, device: &DeviceSpec) -> String {
    match (device, asked.compute()) {
        (_, Dtype::Fp8 | Dtype::Fp4) => {
            format!("precision \"{asked}\" is not implemented, use \"bf16\" or \"fp32\"")
        }
        (DeviceSpec::Cpu { .. }, _) => format!(
            "precision \"{asked}\" is not implemented on the CPU, use \"fp32\", or a CUDA device"
        ),
        (_, dtype) => format!(
            "precision \"{asked}\" computes in {dtype}, the device was asked for {}",
            device.dtype()
        ),
    }
}

pub(crate) fn in_model(model: &Model) -> Vec<String> {
    let mut reasons = Vec::new();
    if !FAMILIES.contains(&model.model_type.as_str()) {
        reasons.push(format!(
            "model_type \"{}\" is not implemented, found in {}, known: {}",
            model.model_type,
            model.name,
            FAMILIES.join(", ")
        ));
    }
    let features = features(model).into_iter();
    let missing = features.filter(|feature| !FEATURES.contains(feature));
    reasons.extend(missing.map(|feature| match (feature, &model.rope_scaling) {
        (Feature::RotaryScaling, Some(scaling)) => format!(
            "{feature} of rope_type \"{}\" is not implemented, \"yarn\" and \"llama3\" are",
            scaling.kind
        ),
        _ => format!("{feature} is not implemented"),
    }));
    reasons
}

/// What of a model is larger than the kernels of a GPU take.
pub(crate) fn beyond_kernels(model: &Model) -> Vec<String> {
    let mut sizes = Vec::new();
    for layer in model.layers.iter().chain(&model.mtp) {
        match &layer.mixer {
            Some(Mixer::Gqa(gqa)) => {
                sizes.push((gqa.head_dim, "elements of a head", attention::MAX_WIDTH));
            }
            Some(Mixer::Mla(mla)) => {
                let key = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
                let widest = key.max(mla.v_head_dim);
                sizes.push((widest, "elements of a head", attention::MAX_WIDTH));
                let shared = "rotated elements of a key";
                sizes.push((mla.qk_rope_head_dim, shared, latent_kv::MAX_SHARED));
            }
            _ => {}
        }
        let Some(moe) = layer.moe() else {
            continue;
        };
        sizes.push((moe.experts, "experts", permute::MAX_EXPERTS));
        sizes.push((moe.topk, "experts of a token", router::MAX_TOPK));
        if let Some(groups) = &moe.router.groups {
            sizes.push((groups.groups, "groups of experts", router::MAX_TOPK));
            let scoring = "experts that score a group";
            sizes.push((groups.scored_by, scoring, router::MAX_SCORED_BY));
        }
    }
    sizes.sort_unstable_by_key(|&(size, what, _)| (what, std::cmp::Reverse(size)));
    sizes.dedup_by_key(|(_, what, _)| *what);
    let beyond = sizes.iter().filter(|(size, _, most)| *size > *most as u64);
    let reason = |(size, what, most): &(u64, &str, usize)| {
        format!(
            "{size} {what} are not implemented on GPUs, found in {}, at most {most} are; the CPU takes more",
            model.name
        )
    };
    beyond.map(reason).collect()
}

#[cfg(test)]
mod tests {
    use moefold_planner::choice::{GraphModule, Graphs, Optimizer};
    use moefold_planner::model::{Ffn, Mixer, RouterGroups};

    use super::*;
    use crate::testing;

    fn plan() -> PlannedLayout {
        testing::plan().planned
    }

    fn check_model(name: &str) -> Result<(), Unsupported> {
        let model = moefold_planner::model::presets::load(name).expect("a preset");
        check(&plan(), &model, &DeviceSpec::CPU)
    }

    #[test]
    fn presets_of_known_families_run() {
        for name in [
            "mixtral-8x7b",
            "mixtral-8x22b",
            "qwen3-30b-a3b",
            "qwen3-235b-a22b",
            "deepseek-v2-lite",
            "deepseek-v2",
            "deepseek-v3",
            "kimi-k2",
            "glm-4.5",
            "olmoe-1b-7b",
            "qwen2-57b-a14b",
            "gpt-oss-20b",
            "gpt-oss-120b",
            "llama-3.1-8b",
        ] {
            assert_eq!(check_model(name), Ok(()), "{name}");
        }
    }

    #[test]
    fn full_sharding_of_stages_is_refused_by_name() {
        let mut plan = plan();
        plan.zero = Some(Zero::Fsdp);
        let model = testing::plan().model;
        assert_eq!(check(&plan, &model, &DeviceSpec::CPU), Ok(()));
        plan.layout.pp = 2;
        let refused = check(&plan, &model, &DeviceSpec::CPU).expect_err("no such thing");
        let text = refused.to_string();
        for part in ["fully sharded", "pp=2", "use \"1\" or pp=1"] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
    }

    #[test]
    fn layers_that_rotate_parts_of_other_widths_are_refused_by_name() {
        let mut model = testing::plan().model;
        let Some(Mixer::Gqa(gqa)) = &mut model.layers[1].mixer else {
            panic!("a layer of grouped-query attention")
        };
        gqa.rotary_dim /= 2;
        let refused = check(&plan(), &model, &DeviceSpec::CPU).expect_err("one table");
        let refused = refused.to_string();
        assert!(
            refused.contains("rotary embeddings of several widths"),
            "{refused}"
        );
    }

    #[test]
    fn levels_of_context_parallel_ranks_are_refused_by_name() {
        let mut plan = plan();
        plan.layout.cp = 2;
        plan.cp_comm_type = Some(CpComm::Hierarchical);
        let model = testing::plan().model;
        let refused = check(&plan, &model, &DeviceSpec::CPU).expect_err("no such thing");
        assert!(refused.to_string().contains("\"a2a+p2p\", use"));
    }

    #[test]
    fn muon_is_refused_by_name() {
        let mut plan = plan();
        plan.optimizer = Optimizer::Muon;
        let model = testing::plan().model;
        let refused = check(&plan, &model, &DeviceSpec::CPU).expect_err("no such thing");
        assert!(refused.to_string().contains("optimizer \"muon\""));
    }

    #[test]
    fn what_only_megatron_divides_and_recomputes_is_refused_by_name() {
        let model = testing::plan().model;
        let refused = |plan: &PlannedLayout| {
            let refused = check(plan, &model, &DeviceSpec::CPU).expect_err("no such thing");
            refused.to_string()
        };
        for zero in [Zero::Gradients, Zero::Hybrid, Zero::Fsdp2] {
            let mut divided = plan();
            divided.zero = Some(zero);
            assert!(refused(&divided).contains(&format!("zero \"{}\"", zero.name())));
        }
        let mut block = plan();
        block.recompute = "block-2".parse().expect("two layers");
        assert!(refused(&block).contains("{\"block\": ..}"));
    }

    #[test]
    fn instances_of_the_optimizer_are_refused_by_name() {
        let mut plan = plan();
        plan.optimizer_instances = Some(2);
        let model = testing::plan().model;
        let refused = check(&plan, &model, &DeviceSpec::CPU).expect_err("no such thing");
        assert!(refused.to_string().contains("optimizer_instances 2"));
    }

    #[test]
    fn graphs_are_refused_with_what_runs() {
        let mut plan = plan();
        let model = testing::plan().model;
        for graphs in [Graphs::FULL_ITERATION, Graphs::of([GraphModule::Attn])] {
            plan.cuda_graph = Some(graphs);
            let refused = check(&plan, &model, &DeviceSpec::CPU).expect_err("no such thing");
            assert_eq!(
                refused
                    .to_string()
                    .matches("CUDA graphs are not implemented, use cuda_graph \"none\"")
                    .count(),
                1,
                "{refused}"
            );
        }
    }

    #[test]
    fn other_architectures_are_refused_by_name() {
        let refused = check_model("glm-5").expect_err("an indexer");
        let text = refused.to_string();
        for part in ["glm_moe_dsa", "sparse attention with an indexer"] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
    }

    /// What a configuration of a family that runs may say beside what runs.
    #[test]
    fn what_a_known_family_may_ask_for_is_run_or_refused_by_name() {
        let refused = |name: &str, changes: serde_json::Value, part: &str| {
            let preset = moefold_planner::model::presets::find(name).expect("a preset");
            let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../planner/models");
            let text = std::fs::read(models.join(format!("{}.json", preset.name)));
            let mut config: serde_json::Value =
                serde_json::from_slice(&text.expect("a file")).expect("a configuration");
            let keys = config.as_object_mut().expect("keys");
            keys.extend(changes.as_object().expect("keys").clone());
            let text = match moefold_planner::model::hf::parse("changed", &config.to_string()) {
                Ok(model) => match check(&plan(), &model, &DeviceSpec::CPU) {
                    Ok(()) => String::new(),
                    Err(refused) => refused.to_string(),
                },
                Err(error) => error.to_string(),
            };
            assert_eq!(part.is_empty(), text.is_empty(), "{changes}: {text}");
            assert!(text.contains(part), "{changes}: {text} lacks {part}");
        };
        let scaled =
            |kind: &str| serde_json::json!({"rope_scaling": {"rope_type": kind, "factor": 2.0}});
        for name in [
            "mixtral-8x7b",
            "qwen3-30b-a3b",
            "llama-3.1-8b",
            "gpt-oss-20b",
            "deepseek-v3",
        ] {
            for kind in ["linear", "dynamic", "longrope"] {
                refused(name, scaled(kind), &format!("rope_type \"{kind}\""));
            }
            refused(
                name,
                serde_json::json!({"attention_dropout": 0.1}),
                "attention dropout",
            );
            refused(
                name,
                serde_json::json!({"hidden_act": "gelu"}),
                "hidden_act",
            );
        }
        let one = |key: &str, value: serde_json::Value| serde_json::json!({key: value});
        refused(
            "mixtral-8x7b",
            one("router_jitter_noise", 0.01.into()),
            "router_jitter_noise",
        );
        refused("mixtral-8x7b", one("sliding_window", 64.into()), "");
        refused("qwen3-30b-a3b", one("use_sliding_window", true.into()), "");
        refused("llama-3.1-8b", one("mlp_bias", true.into()), "MLP biases");
        refused(
            "olmoe-1b-7b",
            one("clip_qkv", 8.0.into()),
            "clipped q, k, v",
        );
        refused(
            "deepseek-v3",
            one("attention_bias", true.into()),
            "attention_bias",
        );
        refused(
            "gpt-oss-20b",
            one("swiglu_alpha", 1.0.into()),
            "swiglu_alpha",
        );
    }

    #[test]
    fn every_reason_of_a_plan_is_named() {
        let mut asked = plan();
        asked.precision = Precision::Bf16;
        asked.dispatcher = Dispatcher::Deepep;
        let model = moefold_planner::model::presets::load("mixtral-8x7b").expect("a preset");
        let refused = check(&asked, &model, &DeviceSpec::CPU).expect_err("two reasons");
        assert_eq!(refused.reasons.len(), 2, "{refused}");
        for part in ["bf16", "deepep"] {
            assert!(refused.to_string().contains(part), "{refused} lacks {part}");
        }
    }

    #[test]
    fn what_no_kernel_takes_is_refused_on_gpus_with_its_limit() {
        let mut model = moefold_planner::model::presets::load("glm-4.5").expect("a preset");
        let cuda = DeviceSpec::Cuda {
            dtype: Dtype::F32,
            reserve: None,
        };
        assert_eq!(check(&plan(), &model, &cuda), Ok(()));
        let last = model.layers.last_mut().expect("there are layers");
        if let Some(Mixer::Gqa(gqa)) = &mut last.mixer {
            gqa.head_dim = 257;
        }
        if let Some(Ffn::Moe(moe)) = &mut last.ffn {
            (moe.experts, moe.topk) = (1025, 33);
            moe.router.groups = Some(RouterGroups {
                groups: 41,
                topk: 2,
                scored_by: 9,
            });
        }
        let refused = check(&plan(), &model, &cuda).expect_err("five sizes");
        assert_eq!(refused.reasons.len(), 5, "{refused}");
        let text = refused.to_string();
        for part in [
            "257 elements of a head are not implemented on GPUs, found in GLM-4.5, at most 256",
            "1025 experts are",
            "at most 1024",
            "33 experts of a token are",
            "41 groups of experts",
            "at most 32",
            "9 experts that score a group",
        ] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
        assert_eq!(check(&plan(), &model, &DeviceSpec::CPU), Ok(()));
    }

    #[test]
    fn a_precision_runs_where_a_device_stores_it() {
        let cuda = |dtype| DeviceSpec::Cuda {
            dtype,
            reserve: None,
        };
        let model = moefold_planner::model::presets::load("mixtral-8x7b").expect("a preset");
        let check = |precision, device: &DeviceSpec| {
            let mut asked = plan();
            asked.precision = precision;
            check(&asked, &model, device).map_err(|refused| refused.to_string())
        };
        for device in [DeviceSpec::CPU, cuda(Dtype::F32)] {
            assert_eq!(check(Precision::Fp32, &device), Ok(()));
        }
        assert_eq!(check(Precision::Bf16, &cuda(Dtype::Bf16)), Ok(()));
        for (precision, device, part) in [
            (
                Precision::Bf16,
                DeviceSpec::CPU,
                "use \"fp32\", or a CUDA device",
            ),
            (Precision::Bf16, cuda(Dtype::F32), "was asked for f32"),
            (Precision::Fp32, cuda(Dtype::Bf16), "was asked for bf16"),
            (Precision::Fp8, cuda(Dtype::Bf16), "use \"bf16\""),
            (Precision::Nvfp4, DeviceSpec::CPU, "use \"bf16\""),
        ] {
            let refused = check(precision, &device).expect_err(part);
            assert!(refused.contains(part), "{refused} lacks {part}");
        }
    }
}
