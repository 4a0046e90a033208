//! A plan for tests: one rank, no search.

use std::collections::BTreeMap;
use std::path::Path;

use moefold_planner::layout::Batch;
use moefold_planner::model::hf;
use moefold_planner::plan::{
    Confidence, Dispatcher, LayoutRecord, MemoryRecord, Objective, Offload, Optimizer,
    PLAN_VERSION, Pipeline, Plan, PlannedLayout, Predicted, Recompute, Request, ScheduleName,
    StackName,
};
use moefold_profiles::Precision;
use moefold_profiles::trace::TimeByCategory;

/// The tiny Mixtral of the fixtures on one rank.
pub(crate) fn plan() -> Plan {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral");
    let model = hf::read(&folder).expect("a fixture");
    let degrees = LayoutRecord {
        tp: 1,
        cp: 1,
        dp: 1,
        pp: 1,
        vpp: 1,
        ep: 1,
        etp: 1,
        edp: 1,
        mbs: 1,
        microbatches: 4,
    };
    Plan {
        version: PLAN_VERSION,
        planned: PlannedLayout {
            layout: degrees,
            pipeline: Pipeline {
                schedule: ScheduleName::None,
                stages: vec![(0..model.layers.len() as u32).collect()],
            },
            dispatcher: Dispatcher::Alltoall,
            recompute: Recompute::None,
            offload: Offload::None,
            precision: Precision::Fp32,
            optimizer: Optimizer::Adam,
            stack: StackName::Moefold,
            predicted: Predicted {
                step_s: 1.0,
                tokens_per_s_per_gpu: 1.0,
                model_tflops_per_gpu: 1.0,
                mfu: 0.5,
                peak_gib: 0.25,
                memory_gib: MemoryRecord::default(),
                memory_gib_by_pp_rank: vec![0.25],
                time_s: TimeByCategory::default(),
                busy_s: BTreeMap::new(),
                confidence: Confidence::default(),
            },
        },
        model,
        cluster: moefold_profiles::presets::local(1),
        request: Request {
            gpus: 1,
            batch: Batch {
                seq_len: 24,
                global_batch: 4,
            },
            objective: Objective::Throughput,
        },
        profiles: Vec::new(),
        alternatives: Vec::new(),
    }
}
