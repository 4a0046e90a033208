//! Tracing: the executor's own modules, run on a [meta device](moefold_kernels::meta), say what they do.
//!
//! Nothing is written twice: the ops and collectives of a layer, and the tensors it takes and gives back,
//! are those that its module asks for when it runs. [`Traced`] answers the planner's questions with them,
//! [`walk`] goes through whole steps. What the data decides, how many rows each expert gets, is assumed
//! ([`Assumed`]).

use moefold_planner::choice::StackName;
use moefold_planner::model::Model;
use moefold_planner::runtime::Runtime;
use moefold_planner::stack::megatron::Declared;
use moefold_profiles::Cluster;

mod answers;
mod dry_run;
mod heard;
#[cfg(test)]
mod hostile;
mod peers;
mod tape;
#[cfg(test)]
mod tests;
mod walk;

pub use answers::Traced;
pub use dry_run::dry_run;
pub use peers::Assumed;
pub use tape::Tape;
pub(crate) use tape::allocation;
pub use walk::{rank_on, step};

/// Who answers for a stack, about one model on the devices of one cluster.
pub fn runtime<'a>(stack: StackName, model: &'a Model, cluster: &Cluster) -> Box<dyn Runtime + 'a> {
    match stack {
        StackName::Megatron => Box::new(Declared),
        StackName::Moefold => Box::new(Traced::new(model, cluster)),
    }
}
