//! [`Schedule`]: the order of work of one training step, as data.
//!
//! The simulator prices it and the executor interprets it; neither invents an order of its own.
//! A schedule is a list of [`Action`]s for each pipeline rank. Constructors are pure functions;
//! tensors that cross ranks are explicit actions, so a reader sees every message. Sends never wait
//! for their receiver; a receive waits for its message. Whether a schedule is sound is
//! [`Schedule::validate`], how it looks [`Schedule::grid`], what it keeps alive [`Schedule::peak_live`].

mod build;
mod grid;
mod live;
mod validate;

use serde::{Deserialize, Serialize};

use crate::choice::{Overlap, ScheduleName};
use crate::layout::{Layout, Places};

pub use live::Peak;
pub use validate::{Fault, ScheduleError};

/// A pipeline stage, counted over virtual stages: see [`Places`].
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
    /// Of a stage's backward pass, all but what only adds to gradients of weights.
    BackwardInput(Stage, Microbatch),
    /// The rest of it.
    BackwardWeight(Stage, Microbatch),
    /// Runs a stage forward and a stage backward of another microbatch as one: while one of them waits for tokens that
    /// ranks exchange, the other computes. The backward pass begins, and they take turns.
    Combined {
        /// What runs forward.
        forward: (Stage, Microbatch),
        /// What runs backward.
        backward: (Stage, Microbatch),
    },
    /// Sends the gradient of a stage's input to the stage before it.
    SendGradient(Stage, Microbatch),
    /// Reduces the gradients of a stage over its data-parallel groups.
    ReduceGradients(Stage),
    /// Clips, updates the shard's weights and gathers them.
    OptimizerStep,
}

impl Action {
    /// The stage it concerns, of two passes the one forward; none for the optimizer step.
    pub fn stage(self) -> Option<Stage> {
        match self {
            Self::RecvActivation(stage, _)
            | Self::Forward(stage, _)
            | Self::SendActivation(stage, _)
            | Self::RecvGradient(stage, _)
            | Self::Backward(stage, _)
            | Self::BackwardInput(stage, _)
            | Self::BackwardWeight(stage, _)
            | Self::SendGradient(stage, _)
            | Self::Combined {
                forward: (stage, _),
                ..
            }
            | Self::ReduceGradients(stage) => Some(stage),
            Self::OptimizerStep => None,
        }
    }

    /// The microbatch it concerns, of two passes the one forward; none at the end of the step.
    pub fn microbatch(self) -> Option<Microbatch> {
        match self {
            Self::RecvActivation(_, microbatch)
            | Self::Forward(_, microbatch)
            | Self::SendActivation(_, microbatch)
            | Self::RecvGradient(_, microbatch)
            | Self::Backward(_, microbatch)
            | Self::BackwardInput(_, microbatch)
            | Self::BackwardWeight(_, microbatch)
            | Self::SendGradient(_, microbatch)
            | Self::Combined {
                forward: (_, microbatch),
                ..
            } => Some(microbatch),
            Self::ReduceGradients(_) | Self::OptimizerStep => None,
        }
    }

    /// What it does: itself, or where it is two passes each of them.
    pub fn passes(self) -> impl Iterator<Item = Self> + Clone {
        let (first, second) = match self {
            Self::Combined { forward, backward } => (
                Self::Forward(forward.0, forward.1),
                Some(Self::Backward(backward.0, backward.1)),
            ),
            one => (one, None),
        };
        std::iter::once(first).chain(second)
    }

    /// Whether it sends or receives.
    pub fn is_message(self) -> bool {
        matches!(
            self,
            Self::RecvActivation(..)
                | Self::SendActivation(..)
                | Self::RecvGradient(..)
                | Self::SendGradient(..)
        )
    }

    /// The receive that a send completes: its counterpart on the neighbouring stage.
    pub fn received_as(self) -> Option<Self> {
        match self {
            Self::SendActivation(Stage(s), m) => Some(Self::RecvActivation(Stage(s + 1), m)),
            Self::SendGradient(Stage(s), m) => Some(Self::RecvGradient(Stage(s - 1), m)),
            _ => None,
        }
    }
}

/// The order of work of one step on every pipeline rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Which one it is.
    pub name: ScheduleName,
    /// Pipeline ranks.
    pub pp: u32,
    /// Stages a rank.
    pub vpp: u32,
    /// Microbatches a step.
    pub microbatches: u32,
    /// What each pipeline rank does, in order.
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// Writes a schedule out.
    ///
    /// - [`ScheduleName::None`]: one rank, forward and backward in turn.
    /// - [`ScheduleName::OneFOneB`]: rank `r` runs `pp - r - 1` forwards ahead, then one forward
    ///   and one backward in turn, then the backwards left (PipeDream-flush, arXiv 2104.04473,
    ///   section 2.2.1).
    /// - [`ScheduleName::Interleaved`]: `vpp` stages a rank, microbatches in groups of `pp`; rank
    ///   `r` runs `2 (pp - r - 1) + (vpp - 1) pp` forwards ahead (the same, section 2.2.2; counts
    ///   as in `megatron/core/pipeline_parallel/schedules.py`).
    /// - [`ScheduleName::ZbH1`]: 1F1B whose backward passes are divided. Rank `r` runs the gradients of
    ///   weights of a microbatch after the gradient of the input of the `r`-th microbatch behind it, so that
    ///   every rank has `pp` microbatches alive at most, as many as the first rank of 1F1B (Qi et al., Zero
    ///   Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1).
    /// - [`ScheduleName::ZbV`], [`ScheduleName::VHalf`], [`ScheduleName::VMin`]: two stages a rank, there and back as a V,
    ///   and divided backward passes. Every microbatch runs in one pattern, six slots behind the one before it. Passes
    ///   that go down the ranks, forward on the first chunks and backward on the second, take a slot a rank; those that
    ///   come back take five, two or one. So each rank has about `pp`, a half or a third of microbatches alive, where 1F1B
    ///   has `pp` on the first (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3).
    ///   Once a rank has no forward pass left, gradients of weights wait for what other ranks wait for.
    /// - [`ScheduleName::DualpipeV`]: the same places. Rank `r` runs `2 (pp - r - 1)` forwards of its first stage ahead, then
    ///   `r + 1` of either in turn, then as many backwards as there are ranks behind it, each before a forward of the second
    ///   stage; from then on a forward of one stage and a backward of the other in turn, so that exchanges of tokens
    ///   could hide (DeepSeek-V3, arXiv 2412.19437, section 3.2.1, DualPipe; DualPipeV, which folds it onto half the
    ///   ranks: <https://github.com/deepseek-ai/DualPipe>). Every backward pass is divided; gradients of weights follow at
    ///   once but those of the last `r + 1` passes before only the first stage has any left, and of what comes
    ///   then, which wait for the bubbles. A message is received after all that its sender sent before, one of them at most
    ///   ahead of its pass. Of fewer than `2 pp` microbatches it is the order of so many with those left out
    ///   that are not there.
    /// - [`ScheduleName::DualpipeVCombined`]: the same order, in which each forward pass and the backward pass
    ///   beside it run as one, the backward pass whole. On the last rank the first of them do not, as all ranks wait
    ///   for that backward pass (the same sources).
    /// - [`ScheduleName::Combined`]: rank `r` runs `2 (pp - r - 1) + (vpp - 1) pp + 1` forwards ahead, then each forward
    ///   beside a backward, then the backwards left: the interleaved schedule with one more ahead, as the forward
    ///   that a backward needs cannot run beside it (Megatron-Core,
    ///   `megatron/core/pipeline_parallel/combined_1f1b.py`). Without virtual stages the lead is twice that of 1F1B, as
    ///   neighbours that wait for both halves of what the other does would take turns.
    ///
    /// # Panics
    /// Where the name does not go with the sizes; a [`Layout`] always has a schedule, see
    /// [`Schedule::of`].
    pub fn new(name: ScheduleName, pp: u32, vpp: u32, microbatches: u32) -> Self {
        Self {
            name,
            pp,
            vpp,
            microbatches,
            ranks: build::ranks(name, pp, vpp, microbatches),
        }
    }

    /// The schedule of that name of a layout, which is one of [`ScheduleName::all_of`] it.
    ///
    /// # Panics
    /// Where the layout is not [under](Layout::under) the schedule.
    pub fn of(layout: &Layout, name: ScheduleName) -> Self {
        let places = name.places(layout.pp(), layout.vpp());
        assert_eq!(places, layout.places(), "the layout is under {name:?}");
        Self::new(name, layout.pp(), layout.vpp(), layout.microbatches())
    }

    /// Stages over all ranks.
    pub fn num_stages(&self) -> u32 {
        self.pp * self.vpp
    }

    /// Which pipeline rank has which stage.
    pub fn places(&self) -> Places {
        self.name.places(self.pp, self.vpp)
    }

    /// The pipeline rank that holds a stage.
    pub fn rank_of(&self, stage: Stage) -> u32 {
        self.places().rank_of(stage.0)
    }
}

/// Kinds of action that are of a stage and a microbatch.
const KINDS: usize = 8;

/// A dense number for every action that a schedule of some size can hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ActionIndex {
    stages: usize,
    microbatches: usize,
}

impl ActionIndex {
    pub(crate) fn of(schedule: &Schedule) -> Self {
        Self {
            stages: schedule.num_stages() as usize,
            microbatches: schedule.microbatches as usize,
        }
    }

    /// One past the largest number of a receive.
    pub(crate) fn receives(self) -> usize {
        2 * self.stages * self.microbatches
    }

    /// One past the largest number.
    pub(crate) fn len(self) -> usize {
        KINDS * self.stages * self.microbatches + self.stages + 1
    }

    pub(crate) fn number(self, action: Action) -> usize {
        let (kind, Stage(stage), Microbatch(microbatch)) = match action {
            Action::RecvActivation(stage, microbatch) => (0, stage, microbatch),
            Action::RecvGradient(stage, microbatch) => (1, stage, microbatch),
            Action::Forward(stage, microbatch) => (2, stage, microbatch),
            Action::SendActivation(stage, microbatch) => (3, stage, microbatch),
            Action::Backward(stage, microbatch) => (4, stage, microbatch),
            Action::SendGradient(stage, microbatch) => (5, stage, microbatch),
            Action::BackwardInput(stage, microbatch) => (6, stage, microbatch),
            Action::BackwardWeight(stage, microbatch) => (7, stage, microbatch),
            Action::ReduceGradients(Stage(stage)) => {
                return KINDS * self.stages * self.microbatches + stage as usize;
            }
            Action::OptimizerStep => return self.len() - 1,
            Action::Combined { .. } => unreachable!("its passes have numbers"),
        };
        (kind * self.stages + stage as usize) * self.microbatches + microbatch as usize
    }
}

impl ScheduleName {
    /// The schedule that goes with pipeline degrees where none is chosen: none without a pipeline, 1F1B, or
    /// interleaved over virtual stages.
    pub fn of(pp: u32, vpp: u32) -> Self {
        match (pp, vpp) {
            (1, _) => Self::None,
            (_, 1) => Self::OneFOneB,
            _ => Self::Interleaved,
        }
    }

    /// All that go with them, that one first.
    pub fn all_of(pp: u32, vpp: u32) -> impl Iterator<Item = Self> + Clone {
        let usual = Self::of(pp, vpp);
        let divided = (usual == Self::OneFOneB).then_some(Self::ZbH1);
        let vees = Self::ALL.iter().copied().filter(|name| name.is_vee());
        let vees = vees.filter(move |_| pp > 1 && vpp == 2);
        let combined = (pp > 1 || vpp == 1).then_some(Self::Combined);
        std::iter::once(usual)
            .chain(divided)
            .chain(vees)
            .chain(combined)
    }

    /// What is written down of it beside degrees: nothing where they say it.
    pub fn chosen(self) -> Option<Self> {
        (self.divides_backward() || self.combines()).then_some(self)
    }

    /// Whether it goes with some pipeline degrees.
    pub fn goes_with(self, pp: u32, vpp: u32) -> bool {
        Self::all_of(pp, vpp).any(|name| name == self)
    }

    /// Whether backward passes are divided into gradients of inputs and of weights, but those that forward passes run
    /// beside.
    pub fn divides_backward(self) -> bool {
        self == Self::ZbH1 || self.is_vee()
    }

    /// Whether stages go there and back as a V.
    pub fn is_vee(self) -> bool {
        matches!(self, Self::ZbV | Self::VHalf | Self::VMin) || self.takes_turns()
    }

    /// Whether both stages of a V take turns.
    pub(crate) fn takes_turns(self) -> bool {
        matches!(self, Self::DualpipeV | Self::DualpipeVCombined)
    }

    /// Which pipeline rank has which stage under degrees that it goes with.
    pub fn places(self, pp: u32, vpp: u32) -> Places {
        Places::new(pp, vpp, self.is_vee())
    }

    /// Whether forward passes run beside backward passes.
    pub fn combines(self) -> bool {
        matches!(self, Self::Combined | Self::DualpipeVCombined)
    }

    /// The same where so much runs beside compute: of an order that is there with combined passes and without, the one
    /// that goes with that.
    #[must_use]
    pub fn beside(self, overlap: Overlap) -> Self {
        match self {
            Self::DualpipeV if overlap.expert_alltoall => Self::DualpipeVCombined,
            other => other,
        }
    }

    /// The same order without combined passes, where there is one.
    pub(crate) fn apart(self) -> Option<Self> {
        (self == Self::DualpipeVCombined).then_some(Self::DualpipeV)
    }

    /// The degrees that it goes with, in words.
    pub fn degrees(self) -> &'static str {
        match self {
            Self::None => "pp=1",
            Self::OneFOneB | Self::ZbH1 => "pp of at least 2 and vpp=1",
            Self::Interleaved => "pp and vpp of at least 2",
            Self::ZbV | Self::VHalf | Self::VMin | Self::DualpipeV | Self::DualpipeVCombined => {
                "pp of at least 2 and vpp=2"
            }
            Self::Combined => "any degrees",
        }
    }
}
