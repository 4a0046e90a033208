//! Writes the actions of each schedule out.

mod vee;

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
        let ranks = (0..).zip(vee::passes(name, places, microbatches));
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

/// The passes of one rank in order.
pub(super) fn passes(
    name: ScheduleName,
    pp: u32,
    vpp: u32,
    microbatches: u32,
    rank: u32,
) -> Vec<Pass> {
    if name.is_vee() {
        let mut ranks = vee::passes(name, name.places(pp, vpp), microbatches);
        return ranks.swap_remove(rank as usize);
    }
    around(name, pp, vpp, microbatches, rank).collect()
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
    use std::collections::VecDeque;

    use super::*;

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
