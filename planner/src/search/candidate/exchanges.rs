//! [`Exchanges`]: what passes of a stage exchange of tokens and compute meanwhile, and what two passes that are combined hide of it.

use moefold_profiles::units::{Seconds, Span};

use super::{Case, StageSplit, own};
use crate::choice::StackName;
use crate::runtime::{Slot, seconds};
use crate::search::recompute::Sets;
use crate::search::shape::{Kind, Question};
use crate::search::stages::hides;
use crate::simulate::Hidden;

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct Exchanges {
    /// Forward and backward, in order.
    slots: [Vec<Slot>; 2],
    /// Seconds of the host.
    issued_s: [f64; 2],
}

impl Exchanges {
    /// Those of some pieces of the model in order, each under its recompute set and as often as it follows itself.
    pub(crate) fn of(question: &Question<'_>, pieces: &[(&Kind, usize, u32)]) -> Self {
        let repeated = |&(kind, set, count): &(&Kind, usize, u32), backward| {
            let slots = kind.slots(set, backward);
            std::iter::repeat_n(slots, count as usize).flatten()
        };
        let forward = pieces.iter().flat_map(|piece| repeated(piece, false));
        let backward = pieces.iter().rev().flat_map(|piece| repeated(piece, true));
        let mut issued_s = [0.0; 2];
        if question.stack.name() == StackName::Megatron {
            for &(kind, set, count) in pieces {
                let passes = [kind.breakdown.forward, kind.breakdown.backward_under(set)];
                for (sum, pass) in issued_s.iter_mut().zip(passes) {
                    *sum += pass.issued_s() * f64::from(count);
                }
            }
        }
        Self {
            slots: [forward.collect(), backward.collect()],
            issued_s,
        }
    }

    /// Seconds by which a backward pass is shorter beside a forward pass than both are one after the other, or by itself where none
    /// is beside it, under gradients of weights that wait.
    pub(crate) fn hidden_s(&self, question: &Question<'_>, forward: Option<&Self>) -> f64 {
        let all = |slots: &[Slot]| -> f64 {
            let of = |slot: &Slot| slot.compute_s + slot.weight_s + slot.sent_s.unwrap_or(0.0);
            slots.iter().map(of).sum()
        };
        let backward = &self.slots[1];
        let (forward, issued_s) = forward.map_or((&[][..], 0.0), |forward| {
            (&forward.slots[0], forward.issued_s[0])
        });
        let apart = all(forward) + all(backward);
        // No pass is shorter than the host takes for it.
        let hidden = question.hides_at_most()
            * (apart - seconds(forward, backward, question.overlap.delay_wgrad));
        hidden.min(apart - issued_s - self.issued_s[1]).max(0.0)
    }
}

impl StageSplit {
    /// What combined passes hide of their exchanges under some recompute sets, where they are combined.
    pub(super) fn hidden(&self, case: Case<'_>, sets: &Sets) -> Option<Hidden> {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        if !hides(case) {
            return None;
        }
        let span = |seconds| Seconds(seconds).to_span();
        let stages = 0..self.stages.len();
        let of_stage = |stage| Exchanges::of(question, &self.each_under(shape, stage, sets));
        let all: Vec<Exchanges> = stages.map(of_stage).collect();
        let together = all.iter().enumerate().map(|(stage, forward)| {
            let own = own(layout, layout.places().rank_of(stage as u32) as usize);
            own.map(|other| span(all[other].hidden_s(question, Some(forward))))
                .collect::<Vec<Span>>()
        });
        let alone = all.iter().map(|own| span(own.hidden_s(question, None)));
        Some(Hidden::new(
            layout.places(),
            together.collect(),
            alone.collect(),
        ))
    }
}
