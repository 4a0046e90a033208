//! Whether a plan can be written as settings of Megatron-LM, and how.

use std::path::Path;

use moefold_planner::plan::Plan;
use moefold_planner::settings::{self, Form, Job, Rest, Version};

/// Whether a plan is for whole nodes, or a part of one.
pub(crate) fn fills_nodes(plan: &Plan) -> bool {
    let (gpus, node) = (plan.request.gpus, plan.cluster.gpus_per_node);
    gpus <= node || gpus.is_multiple_of(node)
}

/// How a plan that is at `path` is launched, in words: the command that writes it for the first of some releases of
/// Megatron-LM that can say it, or why none can.
pub(crate) fn launched(plan: &Plan, path: &Path) -> String {
    let to = if fills_nodes(plan) {
        Form::Slurm
    } else {
        Form::MegatronLm
    };
    let job = Job::of_plan(plan);
    let mut why = None;
    for version in [Version::default(), Version::Main] {
        match settings::write(&job, &plan.cluster, version, Rest::Placeholders) {
            Ok(_) => {
                let release = if version == Version::default() {
                    String::new()
                } else {
                    format!(" --megatron {}", version.name())
                };
                let (path, to) = (path.display(), to.name());
                return format!("To launch it: moefold export {path} --to {to}{release}");
            }
            Err(refused) => why = why.or_else(|| refused.into_iter().next()),
        }
    }
    let why = why.map_or_else(String::new, |refusal| refusal.to_string());
    format!("It cannot be exported: {why}")
}
