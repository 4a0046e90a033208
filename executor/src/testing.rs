//! A plan for tests: one rank, no search.

use std::path::Path;

use moefold_planner::layout::Batch;
use moefold_planner::model::hf;
use moefold_planner::plan::{LayoutRecord, Objective, PLAN_VERSION, Plan, Request};

use crate::unpriced::planned;

/// The tiny Mixtral of the fixtures on one rank.
pub(crate) fn plan() -> Plan {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral");
    let model = hf::read(&folder).expect("a fixture");
    let layout = LayoutRecord {
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
        planned: planned(&model, layout),
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
