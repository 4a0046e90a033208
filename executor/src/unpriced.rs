//! Plans that nobody searched or priced: what benches and tests run.

use std::collections::BTreeMap;

use moefold_planner::choice::{
    Dispatcher, Offload, Optimizer, RecomputePlan, ScheduleName, StackName,
};
use moefold_planner::model::Model;
use moefold_planner::plan::{Confidence, LayoutRecord, Pipeline, PlannedLayout, Predicted};
use moefold_profiles::trace::TimeByCategory;
use moefold_profiles::{ByClass, Precision};

/// A layout on this executor, with about as many layers in each stage; every prediction is zero.
pub(crate) fn planned(model: &Model, layout: LayoutRecord) -> PlannedLayout {
    let (layers, stages) = (model.layers.len() as u32, layout.pp * layout.vpp);
    let cut = |stage| layers * stage / stages;
    PlannedLayout {
        layout,
        pipeline: Pipeline {
            schedule: ScheduleName::of(layout.pp, layout.vpp),
            stages: (0..stages)
                .map(|stage| (cut(stage)..cut(stage + 1)).collect())
                .collect(),
        },
        dispatcher: Dispatcher::Alltoall,
        cp_comm_type: None,
        hierarchical_context_parallel_sizes: None,
        rank_order: None,
        capacity: None,
        recompute: RecomputePlan::default(),
        offload: Offload::NONE,
        precision: Precision::Fp32,
        optimizer: Optimizer::Adam,
        grad_dtype: None,
        masters: None,
        primary_weights: None,
        optimizer_offload_fraction: None,
        zero: None,
        overlap: None,
        cuda_graph: None,
        fp8_attention: None,
        optimizer_instances: None,
        bucket_elements: None,
        stack: StackName::Moefold,
        predicted: Predicted {
            step_s: 0.0,
            step_s_low: None,
            step_s_high: None,
            tokens_per_s_per_gpu: 0.0,
            model_tflops_per_gpu: 0.0,
            mfu: 0.0,
            peak_gib: 0.0,
            memory_gib: ByClass::default(),
            host_gib: None,
            memory_gib_by_pp_rank: vec![0.0; layout.pp as usize],
            memory_classes_gib_by_pp_rank: Vec::new(),
            time_s: TimeByCategory::default(),
            critical_pp_rank: None,
            busy_s: BTreeMap::new(),
            calls: BTreeMap::new(),
            confidence: Confidence::default(),
            routing: None,
        },
    }
}
