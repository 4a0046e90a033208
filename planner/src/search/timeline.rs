//! Times the pipeline of a candidate by playing its schedule.
//!
//! The inner loop of the search: ranks run their actions in order, a receive waits for its message.
//! [`crate::simulate`] plays the same schedule as a graph and gives every span.

use super::candidate::Stages;
use super::predict::{Choice, message};
use super::shape::Question;
use crate::schedule::{Action, Schedule};

/// How a simulated pipeline went, in seconds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pipeline {
    /// From the first forward to the last backward.
    pub(crate) total_s: f64,
    /// Work of each pipeline rank.
    pub(crate) busy_s: Vec<f64>,
    /// When each rank begins its first forward.
    pub(crate) start_s: Vec<f64>,
    /// When each rank ends its last backward.
    pub(crate) finish_s: Vec<f64>,
    /// Sends that stall each rank.
    pub(crate) exposed_comm_s: Vec<f64>,
}

/// Plays the schedule of a candidate.
pub(crate) fn pipeline(question: &Question<'_>, choice: &Choice<'_>, stages: &Stages) -> Pipeline {
    let schedule = Schedule::of(choice.layout);
    let message_s = message(question, choice).map_or(0.0, |m| question.costs.collective(&m).time.0);
    // Interleaved stages send under other chunks' work; plain 1F1B waits for its messages.
    let overlapped = question.stack.overlap_p2p && choice.layout.vpp() > 1;
    play(&schedule, stages, message_s, overlapped)
}

fn play(schedule: &Schedule, stages: &Stages, message_s: f64, overlapped: bool) -> Pipeline {
    let ranks = schedule.ranks.len();
    let num_stages = stages.forward_s.len();
    let mut clock = vec![0.0_f64; ranks];
    let mut next = vec![0_usize; ranks];
    let slots = num_stages * schedule.microbatches as usize;
    let slot = |stage: u32, microbatch: u32| microbatch as usize * num_stages + stage as usize;
    // When each stage's input and output gradient arrive.
    let mut activation = vec![f64::NAN; slots];
    let mut gradient = vec![f64::NAN; slots];
    let mut went = Pipeline {
        busy_s: vec![0.0; ranks],
        start_s: vec![f64::NAN; ranks],
        finish_s: vec![0.0; ranks],
        exposed_comm_s: vec![0.0; ranks],
        ..Pipeline::default()
    };
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..ranks {
            while let Some(action) = schedule.ranks[rank].get(next[rank]) {
                match *action {
                    Action::RecvActivation(stage, microbatch) => {
                        let at = activation[slot(stage.0, microbatch.0)];
                        if at.is_nan() {
                            break;
                        }
                        clock[rank] = clock[rank].max(at);
                    }
                    Action::RecvGradient(stage, microbatch) => {
                        let at = gradient[slot(stage.0, microbatch.0)];
                        if at.is_nan() {
                            break;
                        }
                        clock[rank] = clock[rank].max(at);
                    }
                    Action::Forward(stage, _) => {
                        if went.start_s[rank].is_nan() {
                            went.start_s[rank] = clock[rank];
                        }
                        clock[rank] += stages.forward_s[stage.0 as usize];
                        went.busy_s[rank] += stages.forward_s[stage.0 as usize];
                    }
                    Action::Backward(stage, _) => {
                        clock[rank] += stages.backward_s[stage.0 as usize];
                        went.busy_s[rank] += stages.backward_s[stage.0 as usize];
                        went.finish_s[rank] = clock[rank];
                    }
                    Action::SendActivation(stage, microbatch) => {
                        activation[slot(stage.0 + 1, microbatch.0)] = clock[rank] + message_s;
                        if !overlapped {
                            clock[rank] += message_s;
                            went.exposed_comm_s[rank] += message_s;
                        }
                    }
                    Action::SendGradient(stage, microbatch) => {
                        gradient[slot(stage.0 - 1, microbatch.0)] = clock[rank] + message_s;
                        if !overlapped {
                            clock[rank] += message_s;
                            went.exposed_comm_s[rank] += message_s;
                        }
                    }
                    Action::ReduceGradients(_) | Action::OptimizerStep => {}
                }
                next[rank] += 1;
                moved = true;
            }
        }
    }
    assert!(
        next.iter()
            .zip(&schedule.ranks)
            .all(|(&done, actions)| done == actions.len()),
        "a valid schedule never deadlocks"
    );
    went.total_s = clock.iter().copied().fold(0.0, f64::max);
    went
}
