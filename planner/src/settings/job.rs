//! [`Job`]: what settings say, in the planner's own types: a model, ranks, and every choice pinned.

use crate::choice::ScheduleName;
use crate::model::Model;
use crate::options::SearchOptions;
use crate::plan::Plan;

/// See the module's documentation.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The model.
    pub model: Model,
    /// Ranks.
    pub gpus: u32,
    /// Batch, degrees and choices: all that are said, pinned.
    pub options: SearchOptions,
}

impl Job {
    /// What a plan says.
    pub fn of_plan(plan: &Plan) -> Self {
        Self {
            model: plan.model.clone(),
            gpus: plan.request.gpus,
            options: plan.pinned(),
        }
    }

    /// The schedule of pipeline degrees that Megatron-Core runs.
    pub(super) fn schedule(pp: u32, vpp: u32) -> ScheduleName {
        match (pp, vpp) {
            (1, _) => ScheduleName::None,
            (_, 1) => ScheduleName::OneFOneB,
            _ => ScheduleName::Interleaved,
        }
    }
}
