//! Writes the actions of each schedule out.

use super::{Action, Microbatch, Stage};
use crate::choice::ScheduleName;

/// A forward or backward pass of one stage over one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward(Stage, Microbatch),
    Backward(Stage, Microbatch),
}

/// The actions of every rank.
pub(super) fn ranks(name: ScheduleName, pp: u32, vpp: u32, microbatches: u32) -> Vec<Vec<Action>> {
    (0..pp)
        .map(|rank| {
            let passes = passes(name, pp, vpp, microbatches, rank);
            with_messages(passes, rank, pp, vpp, microbatches)
        })
        .collect()
}

/// The passes of one rank in order.
///
/// All three schedules are one: some forwards ahead, then a forward and a backward in turn, then
/// the backwards left. They differ in the lead and in the order that stages are taken in.
pub(super) fn passes(
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
    }
    .min(total);
    let forward = move |k: u64| {
        let (chunk, microbatch) = interleaved(k, pp, vpp);
        Pass::Forward(Stage(chunk * pp + rank), Microbatch(microbatch))
    };
    let backward = move |k: u64| {
        let (chunk, microbatch) = interleaved(k, pp, vpp);
        Pass::Backward(Stage((vpp - 1 - chunk) * pp + rank), Microbatch(microbatch))
    };
    let warm_up = (0..ahead).map(forward);
    let steady = (ahead..total).flat_map(move |k| [forward(k), backward(k - ahead)]);
    let drain = (total - ahead..total).map(backward);
    warm_up.chain(steady).chain(drain)
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
    pp: u32,
    vpp: u32,
    microbatches: u32,
) -> Vec<Action> {
    let last = pp * vpp - 1;
    let mut actions = Vec::with_capacity(6 * (microbatches as usize) * vpp as usize + 8);
    for pass in passes {
        match pass {
            Pass::Forward(stage, microbatch) => {
                if stage.0 > 0 {
                    actions.push(Action::RecvActivation(stage, microbatch));
                }
                actions.push(Action::Forward(stage, microbatch));
                if stage.0 < last {
                    actions.push(Action::SendActivation(stage, microbatch));
                }
            }
            Pass::Backward(stage, microbatch) => {
                if stage.0 < last {
                    actions.push(Action::RecvGradient(stage, microbatch));
                }
                actions.push(Action::Backward(stage, microbatch));
                if stage.0 > 0 {
                    actions.push(Action::SendGradient(stage, microbatch));
                }
            }
        }
    }
    for chunk in (0..vpp).rev() {
        actions.push(Action::ReduceGradients(Stage(chunk * pp + rank)));
    }
    actions.push(Action::OptimizerStep);
    actions
}

#[cfg(test)]
mod tests {
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
