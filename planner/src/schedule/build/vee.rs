//! The passes of pipelines that go there and back as a V.
//!
//! Time is cut into slots of one pass each. A microbatch has a pass of each kind on either stage of a rank, six in all,
//! and each rank is given six slots for them that differ modulo six: so all microbatches run in the same pattern, six
//! slots behind each other, and no two passes meet. A pass comes after what it needs, so the order of slots ends on
//! every rank. Both stages of the last rank follow each other at once.

use std::collections::VecDeque;

use super::{Microbatch, Pass, Stage};
use crate::choice::ScheduleName;
use crate::layout::Places;

/// Slots from one microbatch to the next: a rank's passes of one.
const PERIOD: u64 = 6;

/// How many slots later a rank runs a pass than the rank before it, of passes that come back to the first rank. Those
/// that go down the ranks take one. A microbatch is alive on a rank, over both stages, for as many slots as all ranks
/// take there and back twice, so `pp * (1 + back) / 3` stages are, and `6 / (1 + back)` is what memory is divided by.
fn back(name: ScheduleName) -> u64 {
    match name {
        ScheduleName::ZbV => 5,
        ScheduleName::VHalf => 2,
        ScheduleName::VMin => 1,
        other => unreachable!("{other:?} is no V"),
    }
}

/// The slots of the first microbatch on a rank: both forward passes, the gradients of inputs of the second stage and of
/// the first, and of weights in that order.
fn slots(back: u64, pp: u64, rank: u64) -> [u64; 6] {
    // The backward pass begins when the forward pass has ended, or a few slots later where passes would meet.
    let ended = pp + back * (pp - 1) + 1;
    let inputs = |rank: u64, later: u64| {
        let comes_back = pp + back * (pp - 1 - rank);
        let backward = ended + later;
        [rank, comes_back, backward + rank, backward + comes_back]
    };
    let are_apart = |later: &u64| {
        (0..pp.min(PERIOD)).all(|rank| {
            let mut slots = inputs(rank, *later).map(|slot| slot % PERIOD);
            slots.sort_unstable();
            slots.windows(2).all(|pair| pair[0] != pair[1])
        })
    };
    let later = (0..PERIOD).find(are_apart);
    let inputs = inputs(rank, later.expect("one of a period"));
    let mut taken = inputs.to_vec();
    for of in [inputs[2], inputs[3]] {
        let is_free = |slot: &u64| taken.iter().all(|other| other % PERIOD != slot % PERIOD);
        let free = (of + 1..=of + PERIOD).find(is_free);
        taken.push(free.expect("six slots for six passes"));
    }
    [taken[0], taken[1], taken[2], taken[3], taken[4], taken[5]]
}

/// What a rank is to do, in order.
struct Program {
    /// Until its last forward pass.
    steady: VecDeque<Pass>,
    /// Gradients of inputs behind it.
    inputs: VecDeque<Pass>,
    /// Gradients of weights behind it.
    weights: VecDeque<Pass>,
}

impl Program {
    /// The order of slots.
    fn of(name: ScheduleName, places: Places, rank: u32, microbatches: u32) -> Self {
        let slots = slots(back(name), places.pp().into(), rank.into());
        let [first, second] = [0, 1].map(|chunk| Stage(places.stage_of(rank, chunk)));
        let mut all: Vec<(u64, Pass)> = (0..microbatches)
            .flat_map(|number| {
                let m = Microbatch(number);
                let passes = [
                    Pass::Forward(first, m),
                    Pass::Forward(second, m),
                    Pass::BackwardInput(second, m),
                    Pass::BackwardInput(first, m),
                    Pass::BackwardWeight(second, m),
                    Pass::BackwardWeight(first, m),
                ];
                let at = move |slot: u64| slot + PERIOD * u64::from(number);
                slots.map(at).into_iter().zip(passes)
            })
            .collect();
        all.sort_unstable_by_key(|(slot, _)| *slot);
        let is_forward = |(_, pass): &(u64, Pass)| matches!(pass, Pass::Forward(..));
        let last = all.iter().rposition(is_forward).expect("a microbatch");
        let rest = all.split_off(last + 1).into_iter().map(|(_, pass)| pass);
        let (weights, inputs) = rest.partition(|pass| matches!(pass, Pass::BackwardWeight(..)));
        Self {
            steady: all.into_iter().map(|(_, pass)| pass).collect(),
            inputs,
            weights,
        }
    }

    /// The next pass, if it can run. Behind the last forward pass gradients of inputs go first: others wait for them.
    fn next(&mut self, can_run: impl Fn(&Pass) -> bool) -> Option<Pass> {
        if !self.steady.is_empty() {
            return self.steady.pop_front_if(|pass| can_run(pass));
        }
        let first = self.inputs.pop_front_if(|pass| can_run(pass));
        first.or_else(|| self.weights.pop_front_if(|pass| can_run(pass)))
    }
}

/// The passes of every rank in order, from a run in which each takes one slot.
pub(super) fn passes(name: ScheduleName, places: Places, microbatches: u32) -> Vec<Vec<Pass>> {
    let program = |rank| Program::of(name, places, rank, microbatches);
    let mut programs: Vec<Program> = (0..places.pp()).map(program).collect();
    let mut order: Vec<Vec<Pass>> = programs.iter().map(|_| Vec::new()).collect();
    let last = places.stages() - 1;
    let number = |stage: u32, m: Microbatch| (stage * microbatches + m.0) as usize;
    // When forward passes and gradients of inputs have ended.
    let never = vec![u64::MAX; (places.stages() * microbatches) as usize];
    let [mut there, mut back] = [never.clone(), never];
    let mut left = PERIOD * u64::from(microbatches) * u64::from(places.pp());
    for slot in 0.. {
        let before = left;
        for (program, order) in programs.iter_mut().zip(&mut order) {
            let pass = program.next(|pass| match *pass {
                Pass::Forward(Stage(0), _) => true,
                Pass::Forward(s, m) => there[number(s.0 - 1, m)] <= slot,
                Pass::BackwardInput(s, m) if s.0 == last => there[number(s.0, m)] <= slot,
                Pass::BackwardInput(s, m) => back[number(s.0 + 1, m)] <= slot,
                Pass::BackwardWeight(s, m) => back[number(s.0, m)] <= slot,
                _ => unreachable!("backward passes are divided"),
            });
            match pass {
                Some(Pass::Forward(s, m)) => there[number(s.0, m)] = slot + 1,
                Some(Pass::BackwardInput(s, m)) => back[number(s.0, m)] = slot + 1,
                _ => {}
            }
            left -= u64::from(pass.is_some());
            order.extend(pass);
        }
        if left == 0 {
            break;
        }
        assert!(left < before, "the order of slots ends");
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [ScheduleName; 3] = [ScheduleName::ZbV, ScheduleName::VHalf, ScheduleName::VMin];

    /// Slots of passes come after those of what they need, differ modulo six, and both stages of the last rank follow
    /// each other.
    #[test]
    fn law_no_two_passes_meet_and_each_comes_after_what_it_needs() {
        for (name, pp) in NAMES
            .into_iter()
            .flat_map(|name| (2..=40).map(move |pp| (name, pp)))
        {
            let ranks: Vec<[u64; 6]> = (0..pp).map(|rank| slots(back(name), pp, rank)).collect();
            for slots in &ranks {
                let mut places: Vec<u64> = slots.iter().map(|slot| slot % PERIOD).collect();
                places.sort_unstable();
                assert_eq!(places, [0, 1, 2, 3, 4, 5], "{name:?} {pp}");
                assert!(slots[4] > slots[2] && slots[5] > slots[3]);
            }
            for pair in ranks.windows(2) {
                let [above, below] = [pair[0], pair[1]];
                assert!(below[0] > above[0] && above[1] > below[1], "{name:?} {pp}");
                assert!(below[2] > above[2] && above[3] > below[3], "{name:?} {pp}");
            }
            let [first, last] = [ranks[0], ranks[ranks.len() - 1]];
            assert!(first[2] > first[1]);
            assert_eq!([last[0] + 1, last[2] + 1], [last[1], last[3]]);
        }
    }
}
