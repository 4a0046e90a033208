//! [`Schedule`]: the order of work of one training step, as data.
//!
//! The simulator prices it and the executor interprets it; neither invents an order of its own.
//! A schedule is a list of [`Action`]s for each pipeline rank. Constructors are pure functions;
//! tensors that cross ranks are explicit actions, so a reader sees every message.

use serde::{Deserialize, Serialize};

/// A pipeline stage, counted over virtual stages: stage `s` is chunk `s / pp` of pipeline rank
/// `s % pp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stage(pub u32);

/// A microbatch of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Microbatch(pub u32);

/// One thing a pipeline rank does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Receives the input of a stage from the stage before it.
    RecvActivation(Stage, Microbatch),
    /// Runs a stage forward.
    Forward(Stage, Microbatch),
    /// Sends the output of a stage to the stage after it.
    SendActivation(Stage, Microbatch),
    /// Receives the gradient of a stage's output from the stage after it.
    RecvGradient(Stage, Microbatch),
    /// Runs a stage backward.
    Backward(Stage, Microbatch),
    /// Sends the gradient of a stage's input to the stage before it.
    SendGradient(Stage, Microbatch),
    /// Reduces the gradients of a stage over its data-parallel groups.
    ReduceGradients(Stage),
    /// Clips, updates the shard's weights and gathers them.
    OptimizerStep,
}
