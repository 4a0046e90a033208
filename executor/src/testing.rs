//! A plan for tests (one rank, no search), and whether there is an emulator.

use std::io::Write as _;
use std::path::Path;

use moefold_planner::choice::Objective;
use moefold_planner::layout::Batch;
use moefold_planner::model::hf;
use moefold_planner::plan::{LayoutRecord, PLAN_VERSION, Plan, Request};

use crate::device::DeviceSpec;
use crate::unpriced::planned;

/// Whether an emulated device can be opened; said where not, and a failure where `MOEFOLD_REQUIRE`
/// names the emulator.
pub(crate) fn is_at_hand(device: &DeviceSpec) -> bool {
    let made = device.open(0, 1);
    if let Err(missing) = &made {
        let required = std::env::var("MOEFOLD_REQUIRE").unwrap_or_default();
        assert!(!required.contains("emulator"), "{missing}");
        let _ = writeln!(std::io::stderr(), "not tested on CUDA: {missing}");
    }
    made.is_ok()
}

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
            memory_headroom: None,
        },
        profiles: Vec::new(),
        alternatives: Vec::new(),
    }
}
