//! [`Runtime`]: what the planner asks of the program that is to run a plan.
//!
//! The planner knows what a layout does to shapes; what a program does with them is the program's to say:
//! which ops and collectives a piece of the model is on one rank, what it allocates, what it keeps between
//! its passes. Megatron-Core is answered for by declarations ([`crate::stack::megatron`]); this project's
//! executor answers for itself by running its own modules without memory, and is handed in by whoever
//! calls. An answer depends on its question alone.

mod level;
mod passes;
mod stage;
mod stretch;
mod work;

use std::fmt;

use moefold_profiles::Precision;

use crate::choice::Recompute;
use crate::model::{Layer, Model};
use crate::shard::Shard;

pub use level::{Account, Height, Level};
pub use passes::{Away, Passes, Running};
pub use stage::{StageMemory, WorkingSets};
pub use stretch::{Slot, Stretch, Stretches, cut, highest, seconds, slots};
pub(crate) use work::gcd;
pub use work::{Again, LayerGroups, Lowered, Part, Setting, Task, Work};

/// What is asked about.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a> {
    /// The token embedding.
    Embedding,
    /// A decoder layer of the model.
    Layer(&'a Layer),
    /// Final norm, head, loss and all multi-token-prediction depths.
    Head,
}

/// A block of a decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Block {
    /// The token mixer with its norm and the residual sum.
    Mixer,
    /// The feed-forward block with its.
    FeedForward,
}

/// What a rank holds throughout a step, and between its stages and those of others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepMemory {
    /// Alive throughout a step, beside weights, gradients and the optimizer's state.
    pub standing: Level,
    /// A message to another pipeline rank: it is there before the pass that begins with it, and after the one
    /// that gave it until the next of its direction is sent. Nothing where its memory is not known.
    pub message: Level,
    /// What an update of weights has beside their states: the factor on gradients.
    pub update: Level,
    /// Elements that flat buffers end at a multiple of, for each rank they are divided over; 0 where they
    /// end with the last parameter.
    pub grain: u64,
}

/// See the module's documentation.
pub trait Runtime: fmt::Debug + Sync {
    /// Why it cannot run a model in a precision at all, if it cannot.
    fn refuses(&self, _model: &Model, _precision: Precision) -> Option<String> {
        None
    }

    /// The work of one microbatch, forward and backward, and what runs again under each of some recompute
    /// sets, at most [`Again::MOST`] of them.
    fn work(&self, setting: &Setting<'_>, piece: Piece<'_>, sets: &[Recompute]) -> Lowered;

    /// The part that a block has in the work of a layer: nothing of what runs again or leaves for the host. A
    /// mixer does not depend on degrees of experts, a feed-forward block of attention's only on tp and tokens.
    fn block(&self, setting: &Setting<'_>, layer: &Layer, block: Block) -> Lowered;

    /// Whether memory is the same under every dispatcher.
    fn holds_alike(&self) -> bool {
        false
    }

    /// The memory of one microbatch under each of some recompute sets.
    fn memory(
        &self,
        setting: &Setting<'_>,
        piece: Piece<'_>,
        sets: &[Recompute],
    ) -> Vec<StageMemory>;

    /// The same where the schedule divides backward passes; of runtimes that can.
    fn divided_memory(
        &self,
        setting: &Setting<'_>,
        piece: Piece<'_>,
        sets: &[Recompute],
    ) -> Vec<StageMemory> {
        self.memory(setting, piece, sets)
    }

    /// The same cut where passes wait for tokens that ranks exchange, gradients of weights left for later where it
    /// `delays` them; nothing of runtimes that say no order.
    fn stretches(
        &self,
        _setting: &Setting<'_>,
        _piece: Piece<'_>,
        _sets: &[Recompute],
        _delays: bool,
    ) -> Option<Vec<Stretches>> {
        None
    }

    /// Of each depth of multi-token prediction its parameters and what is between them, where weights rest divided
    /// and depths are gathered by themselves; none of a runtime that gathers them with the head.
    fn depths(&self, _setting: &Setting<'_>) -> Vec<[Shard; 2]> {
        Vec::new()
    }

    /// Memory of a step of so many microbatches.
    fn step(&self, setting: &Setting<'_>, microbatches: u32) -> StepMemory;
}
