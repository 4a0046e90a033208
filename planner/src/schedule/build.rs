//! Writes the actions of each schedule out.

use std::collections::VecDeque;

use super::{Action, Microbatch, Stage};
use crate::choice::ScheduleName;
use crate::layout::Places;

/// A forward or backward pass of one stage over one microbatch, or of a divided backward pass one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward(Stage, Microbatch),
    Backward(Stage, Microbatch),
    BackwardInput(Stage, Microbatch),
    BackwardWeight(Stage, Microbatch),
    /// One forward beside one backward.
    Combined((Stage, Microbatch), (Stage, Microbatch)),
}

/// The actions of every rank.
pub(super) fn ranks(name: ScheduleName, pp: u32, vpp: u32, microbatches: u32) -> Vec<Vec<Action>> {
    let places = name.places(pp, vpp);
    if name.is_vee() {
        let ranks = (0..).zip(there_and_back(name, places, microbatches));
        return ranks
            .map(|(rank, passes)| with_messages(passes.into_iter(), rank, places, microbatches))
            .collect();
    }
    (0..pp)
        .map(|rank| {
            let passes = around(name, pp, vpp, microbatches, rank);
            with_messages(passes, rank, places, microbatches)
        })
        .collect()
}

/// The passes of one rank in order, where stages go around.
///
/// All of these schedules are one: some forwards ahead, then a forward and a backward in turn, then the backwards left.
/// They differ in the lead, in the order that stages are taken in, in whether a forward and a backward run as one, and
/// in whether a backward pass is divided: gradients of weights then come so many backward passes later, and those left
/// at the end.
fn around(
    name: ScheduleName,
    pp: u32,
    vpp: u32,
    microbatches: u32,
    rank: u32,
) -> impl Iterator<Item = Pass> {
    assert!(pp >= 1 && vpp >= 1 && microbatches >= 1 && rank < pp);
    let total = u64::from(microbatches) * u64::from(vpp);
    let behind = u64::from(pp - rank - 1);
    let ahead = match name {
        ScheduleName::None => {
            assert!(pp == 1 && vpp == 1, "without a pipeline pp and vpp are 1");
            0
        }
        ScheduleName::OneFOneB => {
            assert!(vpp == 1, "1F1B has one stage a rank");
            behind
        }
        ScheduleName::ZbH1 => {
            assert!(
                pp > 1 && vpp == 1,
                "ZB-H1 has one stage a rank of a pipeline"
            );
            behind
        }
        ScheduleName::Interleaved => {
            assert!(
                pp > 1 && vpp > 1,
                "interleaving needs several stages a rank"
            );
            assert!(
                microbatches.is_multiple_of(pp),
                "interleaving takes microbatches in groups of pp"
            );
            2 * behind + u64::from(vpp - 1) * u64::from(pp)
        }
        ScheduleName::Combined => {
            assert!(
                vpp == 1 || (pp > 1 && microbatches.is_multiple_of(pp)),
                "interleaving takes microbatches of a pipeline in groups of pp"
            );
            2 * behind + u64::from(vpp - 1) * u64::from(pp) + 1
        }
        ScheduleName::ZbV | ScheduleName::VHalf | ScheduleName::VMin => {
            unreachable!("stages that come back have passes of their own")
        }
    }
    .min(total);
    let first = move |k: u64| {
        let (chunk, microbatch) = interleaved(k, pp, vpp);
        (Stage(chunk * pp + rank), Microbatch(microbatch))
    };
    let forward = move |k: u64| {
        let (stage, microbatch) = first(k);
        Pass::Forward(stage, microbatch)
    };
    let place = move |k: u64| {
        let (chunk, microbatch) = interleaved(k, pp, vpp);
        (Stage((vpp - 1 - chunk) * pp + rank), Microbatch(microbatch))
    };
    // Gradients of weights come so much later; where nothing is divided there are none.
    let later = name.divides_backward().then_some(u64::from(rank));
    let weight = move |k: u64| {
        let (stage, microbatch) = place(k);
        Pass::BackwardWeight(stage, microbatch)
    };
    let backward = move |k: u64| {
        let (stage, microbatch) = place(k);
        let first = match later {
            None => Pass::Backward(stage, microbatch),
            Some(_) => Pass::BackwardInput(stage, microbatch),
        };
        let second = later.and_then(|later| k.checked_sub(later)).map(weight);
        std::iter::once(first).chain(second)
    };
    let warm_up = (0..ahead).map(forward);
    let combines = name.combines();
    let steady = (ahead..total).flat_map(move |k| {
        let both = combines.then(|| Pass::Combined(first(k), place(k - ahead)));
        let apart = (!combines).then(|| std::iter::once(forward(k)).chain(backward(k - ahead)));
        both.into_iter().chain(apart.into_iter().flatten())
    });
    let drain = (total - ahead..total).flat_map(backward);
    let left = (total - later.unwrap_or(0).min(total)..total).map(weight);
    warm_up.chain(steady).chain(drain).chain(left)
}

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

/// The passes of every rank in order, where stages go there and back as a V: from a run in which each takes one slot.
///
/// A microbatch has a pass of each kind on either stage of a rank, six in all, and each rank is given six slots for them
/// that differ modulo six: so all microbatches run in the same pattern, six slots behind each other, and no two passes
/// meet. A pass comes after what it needs, so the order of slots ends on every rank. Both stages of the last rank follow
/// each other at once.
fn there_and_back(name: ScheduleName, places: Places, microbatches: u32) -> Vec<Vec<Pass>> {
    let program = |rank| Program::of(name, places, rank, microbatches);
    let mut programs: Vec<Program> = (0..places.pp()).map(program).collect();
    let mut order: Vec<Vec<Pass>> = programs.iter().map(|_| Vec::new()).collect();
    let last = places.stages() - 1;
    let number = |stage: u32, m: Microbatch| stage as usize * microbatches as usize + m.0 as usize;
    // When forward passes and gradients of inputs have ended.
    let never = vec![u64::MAX; places.stages() as usize * microbatches as usize];
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

/// The chunk and microbatch of a rank's pass number `k`: groups of `pp` microbatches, each group
/// through one chunk after the other. With one chunk it is microbatch `k`.
fn interleaved(k: u64, pp: u32, vpp: u32) -> (u32, u32) {
    let (pp, vpp) = (u64::from(pp), u64::from(vpp));
    let group = k / (pp * vpp);
    let within = k % (pp * vpp);
    ((within / pp) as u32, (group * pp + within % pp) as u32)
}

/// Adds receives before and sends after passes, and the end of the step.
///
/// Gradients are reduced from the last stage to the first, the order in which they are complete.
fn with_messages(
    passes: impl Iterator<Item = Pass>,
    rank: u32,
    places: Places,
    microbatches: u32,
) -> Vec<Action> {
    // What a stage receives forward it sends the gradient of, and the other way around.
    let received = |stage: Stage| places.is_received(stage.0);
    let sent = |stage: Stage| places.is_sent(stage.0);
    let mut actions = Vec::with_capacity(6 * (microbatches as usize) * places.vpp() as usize + 8);
    for pass in passes {
        match pass {
            Pass::Combined(forward, backward) => {
                // What both begin with, and what both gave.
                if received(forward.0) {
                    actions.push(Action::RecvActivation(forward.0, forward.1));
                }
                if sent(backward.0) {
                    actions.push(Action::RecvGradient(backward.0, backward.1));
                }
                actions.push(Action::Combined { forward, backward });
                if sent(forward.0) {
                    actions.push(Action::SendActivation(forward.0, forward.1));
                }
                if received(backward.0) {
                    actions.push(Action::SendGradient(backward.0, backward.1));
                }
            }
            Pass::Forward(stage, microbatch) => {
                if received(stage) {
                    actions.push(Action::RecvActivation(stage, microbatch));
                }
                actions.push(Action::Forward(stage, microbatch));
                if sent(stage) {
                    actions.push(Action::SendActivation(stage, microbatch));
                }
            }
            Pass::Backward(stage, microbatch) | Pass::BackwardInput(stage, microbatch) => {
                if sent(stage) {
                    actions.push(Action::RecvGradient(stage, microbatch));
                }
                actions.push(match pass {
                    Pass::Backward(..) => Action::Backward(stage, microbatch),
                    _ => Action::BackwardInput(stage, microbatch),
                });
                if received(stage) {
                    actions.push(Action::SendGradient(stage, microbatch));
                }
            }
            Pass::BackwardWeight(stage, microbatch) => {
                actions.push(Action::BackwardWeight(stage, microbatch));
            }
        }
    }
    for chunk in (0..places.vpp()).rev() {
        let stage = Stage(places.stage_of(rank, chunk));
        actions.push(Action::ReduceGradients(stage));
    }
    actions.push(Action::OptimizerStep);
    actions
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

    #[test]
    fn golden_trivial_schedule_has_no_messages() {
        let ranks = ranks(ScheduleName::None, 1, 1, 2);
        let (s, m) = (Stage(0), Microbatch);
        assert_eq!(
            ranks,
            vec![vec![
                Action::Forward(s, m(0)),
                Action::Backward(s, m(0)),
                Action::Forward(s, m(1)),
                Action::Backward(s, m(1)),
                Action::ReduceGradients(s),
                Action::OptimizerStep,
            ]]
        );
    }

    /// Schedules with messages: name, pipeline ranks, stages of each, microbatches.
    fn pipelines() -> impl Iterator<Item = (ScheduleName, [u32; 3])> {
        let sizes = (2..=6).flat_map(|pp| (1..=3).map(move |vpp| [pp, vpp]));
        sizes.flat_map(|[pp, vpp]| {
            let groups = if vpp == 1 { 1 } else { pp };
            let sizes = (1..=7).map(move |count| [pp, vpp, count * groups]);
            ScheduleName::all_of(pp, vpp)
                .flat_map(move |name| sizes.clone().map(move |s| (name, s)))
        })
    }

    /// A message as its receiver takes it, its direction, and the ranks that send and receive it.
    fn message(action: Action, places: Places) -> Option<(Action, usize, [u32; 2])> {
        let (received, back) = match action {
            Action::SendActivation(..) | Action::SendGradient(..) => {
                let received = action.received_as()?;
                (received, matches!(received, Action::RecvGradient(..)))
            }
            Action::RecvActivation(..) => (action, false),
            Action::RecvGradient(..) => (action, true),
            _ => return None,
        };
        let to = received.stage()?.0;
        let from = if back { to + 1 } else { to - 1 };
        let line = [from, to].map(|stage| places.rank_of(stage));
        Some((received, usize::from(back), line))
    }

    /// Who receives a message knows it by its place among those of its direction between the two.
    #[test]
    fn law_messages_are_received_in_the_order_they_are_sent_in() {
        use std::collections::BTreeMap;

        for (name, [pp, vpp, microbatches]) in pipelines() {
            let mut order: [BTreeMap<_, Vec<Action>>; 2] = Default::default();
            let places = name.places(pp, vpp);
            for action in ranks(name, pp, vpp, microbatches).into_iter().flatten() {
                if let Some((received, back, line)) = message(action, places) {
                    let received_here = usize::from(received == action);
                    let of = &mut order[received_here];
                    of.entry((back, line)).or_default().push(received);
                }
            }
            let [sent, received] = order;
            assert_eq!(sent, received, "{pp} {vpp} {microbatches}");
        }
    }

    /// A rank may keep one message of a direction to another, and wait with the next until that one is received; and
    /// messages of a rank may leave one after the other, each once the one before it is received.
    #[test]
    fn law_ranks_whose_messages_wait_for_each_other_come_to_the_end() {
        for (name, [pp, vpp, microbatches]) in pipelines() {
            let places = name.places(pp, vpp);
            let ranks = ranks(name, pp, vpp, microbatches);
            let mut done = vec![0; pp as usize];
            // By sender, what was sent and not received.
            let mut sent = vec![VecDeque::new(); pp as usize];
            let mut moved = true;
            while moved {
                moved = false;
                for (rank, actions) in ranks.iter().enumerate() {
                    while let Some(&action) = actions.get(done[rank]) {
                        if let Some((received, back, [from, to])) = message(action, places) {
                            let sent: &mut VecDeque<_> = &mut sent[from as usize];
                            if received != action {
                                if sent.iter().any(|(_, line)| *line == (back, to)) {
                                    break;
                                }
                                sent.push_back((received, (back, to)));
                            } else if sent.pop_front_if(|(first, _)| *first == action).is_none() {
                                break;
                            }
                        }
                        done[rank] += 1;
                        moved = true;
                    }
                }
            }
            let lengths: Vec<usize> = ranks.iter().map(Vec::len).collect();
            assert_eq!(done, lengths, "{pp} {vpp} {microbatches}");
        }
    }

    #[test]
    fn golden_forward_order_of_two_groups() {
        let order: Vec<(u32, u32)> = (0..8).map(|k| interleaved(k, 2, 2)).collect();
        assert_eq!(
            order,
            [
                (0, 0),
                (0, 1),
                (1, 0),
                (1, 1),
                (0, 2),
                (0, 3),
                (1, 2),
                (1, 3)
            ]
        );
    }
}
