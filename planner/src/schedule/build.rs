//! Writes the actions of each schedule out.

use std::collections::{BTreeMap, VecDeque};

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
    if name.takes_turns() {
        let mut ranks: Vec<Vec<Action>> = (0..pp)
            .map(|rank| {
                let passes = doubled(name, places, rank, microbatches).into_iter();
                with_messages(passes, rank, places, microbatches)
            })
            .collect();
        receive_as_sent(&mut ranks, places);
        return ranks;
    }
    if name.is_vee() {
        let ranks = (0..).zip(there_and_back(name, places, microbatches));
        return ranks
            .map(|(rank, passes)| with_messages(passes, rank, places, microbatches))
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
        ScheduleName::ZbV
        | ScheduleName::VHalf
        | ScheduleName::VMin
        | ScheduleName::DualpipeV
        | ScheduleName::DualpipeVCombined => {
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

/// The passes of a rank in order, where both stages of a V take turns.
///
/// What is counted are passes of at least `2 pp` microbatches; of those that are not there none is written, and the rest
/// keeps its order, for a pass needs none of another microbatch. Of two that are to run as one and of which one is not
/// there, the other runs alone.
fn doubled(name: ScheduleName, places: Places, rank: u32, microbatches: u32) -> Vec<Pass> {
    let (pp, behind) = (places.pp(), places.pp() - 1 - rank);
    let counted = microbatches.max(pp.saturating_mul(2));
    let mut turns = Turns {
        stages: [0, 1].map(|chunk| Stage(places.stage_of(rank, chunk))),
        forward: [0; 2],
        backward: [0; 2],
        waiting: VecDeque::new(),
        microbatches,
        combines: name.combines(),
        passes: Vec::new(),
    };
    let [down, back] = [0, 1];
    (0..2 * behind).for_each(|_| turns.forward(down));
    for _ in 0..=rank {
        turns.forward(down);
        turns.forward(back);
    }
    for _ in 0..behind {
        turns.backward(back);
        turns.forward(back);
    }
    for turn in 0..=counted - 2 * pp + rank {
        if turn == 0 && behind == 0 {
            // All ranks wait for the first backward pass, so it runs alone.
            turns.forward(down);
            turns.backward(back);
        } else {
            turns.both(down, back);
        }
        turns.both(back, down);
    }
    for _ in 0..behind {
        turns.backward(back);
        turns.both(back, down);
    }
    // As many whole as leave gradients of weights.
    for number in 0..2 * (rank + 1) {
        let chunk = [back, down][number as usize % 2];
        if number <= rank {
            turns.backward(chunk);
        } else {
            turns.backward_input(chunk);
        }
    }
    for _ in 0..behind {
        turns.backward_weight();
        turns.backward_input(down);
    }
    (0..=rank).for_each(|_| turns.backward_weight());
    assert_eq!([turns.forward, turns.backward], [[counted; 2]; 2]);
    assert!(turns.waiting.is_empty(), "no gradient of weights is left");
    turns.passes
}

/// What a rank whose stages take turns has done.
struct Turns {
    stages: [Stage; 2],
    /// Microbatches that have begun, by chunk.
    forward: [u32; 2],
    /// Microbatches that have come back, by chunk.
    backward: [u32; 2],
    /// Chunks and microbatches whose gradients of weights are left.
    waiting: VecDeque<(usize, u32)>,
    /// Those that are there.
    microbatches: u32,
    /// Whether a forward and a backward pass run as one.
    combines: bool,
    passes: Vec<Pass>,
}

impl Turns {
    fn push(&mut self, number: u32, pass: Pass) {
        if number < self.microbatches {
            self.passes.push(pass);
        }
    }

    fn forward(&mut self, chunk: usize) {
        let number = self.forward[chunk];
        self.forward[chunk] += 1;
        self.push(
            number,
            Pass::Forward(self.stages[chunk], Microbatch(number)),
        );
    }

    fn backward_input(&mut self, chunk: usize) {
        let number = self.backward[chunk];
        self.backward[chunk] += 1;
        self.waiting.push_back((chunk, number));
        self.push(
            number,
            Pass::BackwardInput(self.stages[chunk], Microbatch(number)),
        );
    }

    /// The gradients of weights that wait longest.
    fn backward_weight(&mut self) {
        let (chunk, number) = self.waiting.pop_front().expect("some are left");
        self.push(
            number,
            Pass::BackwardWeight(self.stages[chunk], Microbatch(number)),
        );
    }

    /// Both parts, where none are left before them.
    fn backward(&mut self, chunk: usize) {
        self.backward_input(chunk);
        self.backward_weight();
    }

    /// A forward pass of a chunk and a backward pass of the other, as one where they are to be.
    fn both(&mut self, ahead: usize, back: usize) {
        let (forward, backward) = (self.forward[ahead], self.backward[back]);
        if !(self.combines && forward.max(backward) < self.microbatches) {
            self.forward(ahead);
            self.backward(back);
            return;
        }
        self.forward[ahead] += 1;
        self.backward[back] += 1;
        self.passes.push(Pass::Combined(
            (self.stages[ahead], Microbatch(forward)),
            (self.stages[back], Microbatch(backward)),
        ));
    }
}

/// Has every rank receive what another sends it in the order in which that sends it: before a message all that was sent
/// before, which then waits for its pass. Else two ranks could wait for each other, where messages of a rank leave one
/// after the other.
fn receive_as_sent(ranks: &mut [Vec<Action>], places: Places) {
    let mut sent: BTreeMap<(u32, u32), VecDeque<Action>> = BTreeMap::new();
    for (from, actions) in (0..).zip(ranks.iter()) {
        for received in actions.iter().filter_map(|action| action.received_as()) {
            let stage = received.stage().expect("a message is of a stage");
            let line = sent.entry((from, places.rank_of(stage.0))).or_default();
            line.push_back(received);
        }
    }
    for (rank, actions) in (0..).zip(ranks.iter_mut()) {
        let mut early = Vec::new();
        let mut ordered = Vec::with_capacity(actions.len());
        for &action in actions.iter() {
            let from = match action {
                Action::RecvActivation(Stage(s), _) => places.rank_of(s - 1),
                Action::RecvGradient(Stage(s), _) => places.rank_of(s + 1),
                _ => {
                    ordered.push(action);
                    continue;
                }
            };
            if let Some(there) = early.iter().position(|known| *known == action) {
                early.swap_remove(there);
                continue;
            }
            let line = sent
                .get_mut(&(from, rank))
                .expect("what is received is sent");
            loop {
                let next = line.pop_front().expect("what is received is sent");
                ordered.push(next);
                if next == action {
                    break;
                }
                early.push(next);
            }
        }
        *actions = ordered;
    }
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

/// The passes of a rank in the order of their slots, each with its slot.
fn in_slots(
    name: ScheduleName,
    places: Places,
    rank: u32,
    microbatches: u32,
) -> impl Iterator<Item = (u64, Pass)> {
    let slots = slots(back(name), places.pp().into(), rank.into());
    let [first, second] = [0, 1].map(|chunk| Stage(places.stage_of(rank, chunk)));
    let last = slots.into_iter().max().unwrap_or(0) + PERIOD * u64::from(microbatches - 1);
    (0..=last).filter_map(move |slot| {
        // One of the six is in any slot, once the first microbatch has come to it and until the last has.
        let kind = slots.iter().position(|own| own % PERIOD == slot % PERIOD)?;
        let number = slot.checked_sub(slots[kind])? / PERIOD;
        if number >= u64::from(microbatches) {
            return None;
        }
        let m = Microbatch(number as u32);
        let passes = [
            Pass::Forward(first, m),
            Pass::Forward(second, m),
            Pass::BackwardInput(second, m),
            Pass::BackwardInput(first, m),
            Pass::BackwardWeight(second, m),
            Pass::BackwardWeight(first, m),
        ];
        Some((slot, passes[kind]))
    })
}

/// The slot of the last forward pass of a rank.
fn last_forward(name: ScheduleName, places: Places, rank: u32, microbatches: u32) -> u64 {
    let slots = slots(back(name), places.pp().into(), rank.into());
    slots[0].max(slots[1]) + PERIOD * u64::from(microbatches - 1)
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
        let last = last_forward(name, places, rank, microbatches);
        let all = in_slots(name, places, rank, microbatches);
        let (steady, rest): (Vec<_>, Vec<_>) = all.partition(|(slot, _)| *slot <= last);
        let rest = rest.into_iter().map(|(_, pass)| pass);
        let (weights, inputs) = rest.partition(|pass| matches!(pass, Pass::BackwardWeight(..)));
        Self {
            steady: steady.into_iter().map(|(_, pass)| pass).collect(),
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

/// Groups of `pp` microbatches after which what is left behind the last forward pass is the same of any more: the ranks
/// run in step after one.
const SETTLED: u32 = 2;

/// The passes of every rank in order, where stages go there and back as a V.
///
/// A microbatch has a pass of each kind on either stage of a rank, six in all, and each rank is given six slots for them
/// that differ modulo six: so all microbatches run in the same pattern, six slots behind each other, and no two passes
/// meet. A pass comes after what it needs, so the order of slots ends on every rank. Both stages of the last rank follow
/// each other at once.
///
/// Until its last forward pass a rank goes by its slots. What comes behind is taken from a run in which each pass takes
/// one slot, of few microbatches: that of more is the same, of as many later ones.
fn there_and_back(
    name: ScheduleName,
    places: Places,
    microbatches: u32,
) -> impl Iterator<Item = impl Iterator<Item = Pass>> {
    let few = microbatches.min(places.pp().saturating_mul(SETTLED));
    let more = microbatches - few;
    let behind = behind_forwards(name, places, few);
    (0..).zip(behind).map(move |(rank, behind)| {
        let last = last_forward(name, places, rank, microbatches);
        let steady = in_slots(name, places, rank, microbatches);
        let steady = steady.take_while(move |(slot, _)| *slot <= last);
        let later = move |pass: Pass| match pass {
            Pass::BackwardInput(s, m) => Pass::BackwardInput(s, Microbatch(m.0 + more)),
            Pass::BackwardWeight(s, m) => Pass::BackwardWeight(s, Microbatch(m.0 + more)),
            _ => unreachable!("backward passes are divided"),
        };
        steady
            .map(|(_, pass)| pass)
            .chain(behind.into_iter().map(later))
    })
}

/// What every rank runs behind its last forward pass, in order: from a run in which each pass takes one slot.
fn behind_forwards(name: ScheduleName, places: Places, microbatches: u32) -> Vec<Vec<Pass>> {
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
            let is_behind = program.steady.is_empty();
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
            order.extend(pass.filter(|_| is_behind));
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

    /// What is behind the last forward pass of many microbatches is that of few, of as many later ones: the whole run says so.
    #[test]
    fn law_many_microbatches_end_as_few_do() {
        for (name, pp) in NAMES
            .into_iter()
            .flat_map(|name| (2..=16).map(move |pp| (name, pp)))
        {
            let places = name.places(pp, 2);
            for microbatches in [1, pp, 2 * pp, 2 * pp + 1, 3 * pp - 1, 5 * pp + 3] {
                let whole = behind_forwards(name, places, microbatches);
                let found = there_and_back(name, places, microbatches);
                for (found, whole) in found.zip(whole) {
                    let found: Vec<Pass> = found.collect();
                    assert_eq!(found.len() as u64, PERIOD * u64::from(microbatches));
                    assert!(found.ends_with(&whole), "{name:?} {pp} {microbatches}");
                    let is_forward = |pass: &Pass| matches!(pass, Pass::Forward(..));
                    let before = found.len() - whole.len();
                    assert!(
                        is_forward(&found[before - 1]),
                        "{name:?} {pp} {microbatches}"
                    );
                }
            }
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
            ScheduleName::all_of(pp, vpp).flat_map(move |name| {
                let groups = if vpp == 1 || name.is_vee() { 1 } else { pp };
                (1..=7).map(move |count| (name, [pp, vpp, count * groups]))
            })
        })
    }

    /// Stages that take turns, of more ranks and of any number of microbatches.
    fn turns() -> impl Iterator<Item = (ScheduleName, [u32; 3])> {
        let sizes = (2..=16).flat_map(|pp| (1..=2 * pp + 3).map(move |m| [pp, 2, m]));
        sizes.flat_map(|sizes| {
            [ScheduleName::DualpipeV, ScheduleName::DualpipeVCombined].map(|name| (name, sizes))
        })
    }

    /// No more than one message waits for a later pass.
    #[test]
    fn law_stages_that_take_turns_receive_one_message_early_at_most() {
        for (name, [pp, vpp, microbatches]) in turns() {
            let places = name.places(pp, vpp);
            for actions in ranks(name, pp, vpp, microbatches) {
                let mut there = 0_u32;
                for action in actions {
                    // What a pass begins with, and of two that run as one both.
                    let most = 1 + action.passes().count() as u32;
                    there += u32::from(matches!(
                        action,
                        Action::RecvActivation(..) | Action::RecvGradient(..)
                    ));
                    assert!(there <= 3, "{pp} {microbatches}");
                    assert!(action.is_message() || there <= most, "{pp} {microbatches}");
                    for pass in action.passes() {
                        there -= match pass {
                            Action::Forward(s, _) => u32::from(places.is_received(s.0)),
                            Action::Backward(s, _) | Action::BackwardInput(s, _) => {
                                u32::from(places.is_sent(s.0))
                            }
                            _ => 0,
                        };
                    }
                }
                assert_eq!(there, 0, "{pp} {microbatches}");
            }
        }
    }

    /// The orders of both ranks of two, as DualPipeV runs them: F and B of the first stage and f and b of the second, with
    /// gradients of weights (`'`) at once but at the end; and where passes run as one (`F3b1`), which are whole.
    #[test]
    fn golden_stages_that_take_turns() {
        let words = |name: ScheduleName, rank: u32| -> String {
            let places = name.places(2, 2);
            let of = |kinds: [&str; 2], (s, m): (Stage, Microbatch)| {
                format!("{}{}", kinds[usize::from(s.0 >= 2)], m.0)
            };
            let word = |pass: Pass| match pass {
                Pass::Forward(s, m) => of(["F", "f"], (s, m)),
                Pass::BackwardInput(s, m) => of(["B", "b"], (s, m)),
                Pass::BackwardWeight(s, m) => of(["B", "b"], (s, m)) + "'",
                Pass::Combined(ahead, back) => of(["F", "f"], ahead) + &of(["B", "b"], back),
                other @ Pass::Backward(..) => unreachable!("{other:?}"),
            };
            let words = doubled(name, places, rank, 4).into_iter().map(word);
            words.collect::<Vec<_>>().join(" ")
        };
        let apart = ScheduleName::DualpipeV;
        let first =
            "F0 F1 F2 f0 b0 b0' f1 F3 b1 b1' f2 B0 B0' b2 b2' f3 B1 B1' b3 b3' B2 B2' B3 B3'";
        assert_eq!(words(apart, 0), first);
        let last =
            "F0 f0 F1 f1 F2 b0 b0' f2 B0 B0' F3 b1 b1' f3 B1 B1' b2 b2' B2 B2' b3 B3 b3' B3'";
        assert_eq!(words(apart, 1), last);
        let combined = ScheduleName::DualpipeVCombined;
        let first = "F0 F1 F2 f0 b0 b0' f1 F3b1 f2B0 b2 b2' f3B1 b3 b3' B2 B2' B3 B3'";
        assert_eq!(words(combined, 0), first);
        let last = "F0 f0 F1 f1 F2 b0 b0' f2B0 F3b1 f3B1 b2 b2' B2 B2' b3 B3 b3' B3'";
        assert_eq!(words(combined, 1), last);
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

        for (name, [pp, vpp, microbatches]) in pipelines().chain(turns()) {
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
        for (name, [pp, vpp, microbatches]) in pipelines().chain(turns()) {
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
