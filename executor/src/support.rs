//! [`check`]: what this version runs, and everything in a plan that it does not.
//!
//! Refusing happens once, before any rank starts, and names every reason together; nothing further
//! in checks again. A plan for another executor is no error of the plan.

use moefold_planner::choice::{Dispatcher, Offload, ScheduleName, StackName};
use moefold_planner::model::{Feature, Model, features};
use moefold_planner::plan::PlannedLayout;
use moefold_planner::stack::Stack;
use moefold_profiles::{Dtype, Precision};

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
    "qwen3",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
];

/// Architectural traits that the layers implement.
const FEATURES: &[Feature] = &[
    Feature::GroupedQueryAttention,
    Feature::LatentAttention,
    Feature::Yarn,
    Feature::MultiTokenPrediction,
    Feature::PartialRotary,
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
    Feature::CorrectionBias,
    Feature::GroupLimitedRouting,
    Feature::RouterScaling,
    Feature::TiedEmbeddings,
];

/// Refuses a plan or a model that this version cannot run on `device`.
pub fn check(plan: &PlannedLayout, model: &Model, device: &DeviceSpec) -> Result<(), Unsupported> {
    let mut reasons = in_plan(plan, device);
    reasons.extend(in_model(model));
    if reasons.is_empty() {
        Ok(())
    } else {
        Err(Unsupported { reasons })
    }
}

fn in_plan(plan: &PlannedLayout, device: &DeviceSpec) -> Vec<String> {
    let degrees = &plan.layout;
    let interleaved = degrees.pp == 1 && plan.pipeline.schedule == ScheduleName::Interleaved;
    let dispatchers = Stack::of(StackName::Moefold).common().dispatchers;
    let dispatcher = format!("{:?}", plan.dispatcher).to_lowercase();
    let refusals = [
        (
            degrees.cp > 1,
            format!(
                "context parallelism is not implemented, found cp={}, use cp=1",
                degrees.cp
            ),
        ),
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
            plan.capacity.is_some_and(|capacity| capacity.pad)
                && plan.dispatcher == Dispatcher::Allgather,
            "padding to capacity under dispatcher \"allgather\" is not implemented, use \"alltoall\""
                .to_owned(),
        ),
        (
            plan.offload != Offload::None,
            "offloading is not implemented, use offload \"none\"".to_owned(),
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
    reasons.extend(missing.map(|feature| format!("{feature} is not implemented")));
    reasons
}

#[cfg(test)]
mod tests {
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
        ] {
            assert_eq!(check_model(name), Ok(()), "{name}");
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

    #[test]
    fn every_reason_of_a_plan_is_named() {
        let mut asked = plan();
        asked.layout.cp = 2;
        asked.precision = Precision::Bf16;
        asked.dispatcher = Dispatcher::Deepep;
        let model = moefold_planner::model::presets::load("mixtral-8x7b").expect("a preset");
        let refused = check(&asked, &model, &DeviceSpec::CPU).expect_err("three reasons");
        assert_eq!(refused.reasons.len(), 3, "{refused}");
        for part in ["cp=2", "bf16", "deepep"] {
            assert!(refused.to_string().contains(part), "{refused} lacks {part}");
        }
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
