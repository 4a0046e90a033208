//! What a schedule keeps alive: the exact replay behind the memory of a pipeline rank.
//!
//! A forward pass leaves its stage's activations until the backward pass of the same microbatch; of one that
//! is divided, what gradients of weights need is taken to be as much until they are computed.
//! Stages differ in size (uneven splits, embedding, head), so counts alone do not give the peak;
//! the replay adds and removes bytes in the order of the schedule.

use std::collections::BTreeMap;

use moefold_profiles::units::Bytes;

use super::build::Pass;
use super::{Action, Schedule, Stage};

/// The most that is alive on a rank, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peak {
    /// Bytes alive.
    pub bytes: Bytes,
    /// Passes (forward or backward) the rank has done when it is first reached.
    pub after_passes: usize,
    /// Microbatches alive of each stage then.
    pub live: BTreeMap<Stage, u32>,
}

impl Peak {
    /// Microbatches alive over all stages of the rank.
    pub fn chunks(&self) -> u32 {
        self.live.values().sum()
    }
}

impl Schedule {
    /// The most bytes of activations alive on a rank, where a stage keeps `bytes(stage)` for each
    /// microbatch from its forward to the end of its backward pass, gradients of weights included.
    pub fn peak_live(&self, rank: u32, bytes: impl Fn(Stage) -> Bytes) -> Peak {
        let passes = self.ranks[rank as usize]
            .iter()
            .filter_map(|action| match *action {
                Action::Forward(stage, microbatch) => Some(Pass::Forward(stage, microbatch)),
                Action::Backward(stage, microbatch) => Some(Pass::Backward(stage, microbatch)),
                Action::BackwardInput(stage, microbatch) => {
                    Some(Pass::BackwardInput(stage, microbatch))
                }
                Action::BackwardWeight(stage, microbatch) => {
                    Some(Pass::BackwardWeight(stage, microbatch))
                }
                Action::Combined { forward, backward } => Some(Pass::Combined(forward, backward)),
                _ => None,
            });
        replay(passes, bytes)
    }

    /// The most chunks (stage and microbatch) alive on a rank at once.
    pub fn in_flight(&self, rank: u32) -> u32 {
        self.peak_live(rank, |_| Bytes(1)).chunks()
    }
}

fn replay(passes: impl Iterator<Item = Pass>, bytes: impl Fn(Stage) -> Bytes) -> Peak {
    let mut alive = Bytes::ZERO;
    let mut live = BTreeMap::new();
    let mut peak = Peak {
        bytes: Bytes::ZERO,
        after_passes: 0,
        live: BTreeMap::new(),
    };
    for (done, pass) in passes.enumerate() {
        let (begun, ended) = match pass {
            Pass::Forward(stage, _) => (Some(stage), None),
            Pass::BackwardInput(..) => (None, None),
            Pass::Backward(stage, _) | Pass::BackwardWeight(stage, _) => (None, Some(stage)),
            Pass::Combined((forward, _), (backward, _)) => (Some(forward), Some(backward)),
        };
        if let Some(stage) = begun {
            alive += bytes(stage);
            *live.entry(stage).or_insert(0) += 1;
            if alive > peak.bytes {
                peak = Peak {
                    bytes: alive,
                    after_passes: done + 1,
                    live: live.clone(),
                };
            }
        }
        if let Some(stage) = ended {
            alive -= bytes(stage);
            *live.get_mut(&stage).expect("forward precedes backward") -= 1;
        }
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::ScheduleName;

    fn in_flight(name: ScheduleName, pp: u32, vpp: u32, microbatches: u32) -> Vec<u32> {
        let schedule = Schedule::new(name, pp, vpp, microbatches);
        (0..pp).map(|rank| schedule.in_flight(rank)).collect()
    }

    /// Live chunks of Megatron's static interleaved schedule: lead plus one.
    #[test]
    fn golden_interleaved_chunks_in_flight() {
        let interleaved = |pp, vpp, m| in_flight(ScheduleName::Interleaved, pp, vpp, m);
        assert_eq!(interleaved(4, 4, 32), [19, 17, 15, 13]);
        assert_eq!(interleaved(8, 4, 64), [39, 37, 35, 33, 31, 29, 27, 25]);
        assert_eq!(interleaved(2, 8, 16), [17, 15]);
        assert_eq!(interleaved(4, 12, 64), [51, 49, 47, 45]);
        // Never more than there are.
        assert_eq!(interleaved(4, 4, 4), [16, 16, 15, 13]);
    }

    #[test]
    fn golden_1f1b_microbatches_in_flight() {
        assert_eq!(in_flight(ScheduleName::OneFOneB, 4, 1, 16), [4, 3, 2, 1]);
        assert_eq!(in_flight(ScheduleName::OneFOneB, 4, 1, 2), [2, 2, 2, 1]);
        assert_eq!(in_flight(ScheduleName::None, 1, 1, 16), [1]);
    }

    /// Every rank keeps as many as the first one of 1F1B (arXiv 2401.10241, section 2.1).
    #[test]
    fn golden_zb_h1_microbatches_in_flight() {
        assert_eq!(in_flight(ScheduleName::ZbH1, 4, 1, 16), [4, 4, 4, 4]);
        assert_eq!(in_flight(ScheduleName::ZbH1, 4, 1, 2), [2, 2, 2, 2]);
        for (pp, microbatches) in (2..9).flat_map(|pp| (1..20).map(move |m| (pp, m))) {
            let most = in_flight(ScheduleName::OneFOneB, pp, 1, microbatches)[0];
            let all = in_flight(ScheduleName::ZbH1, pp, 1, microbatches);
            assert!(
                all.iter().all(|&alive| alive <= most),
                "{pp} {microbatches}"
            );
        }
    }

    /// Stages alive on the fullest rank, where 1F1B has `2 pp` halves alive on its first: no more than these, about half,
    /// and about a third (arXiv 2405.15362, section 3.2).
    #[test]
    fn law_schedules_that_come_back_keep_within_their_bounds() {
        for pp in 2..=24 {
            for (name, most) in [
                (ScheduleName::ZbV, 2 * pp),
                (ScheduleName::VHalf, pp + 3),
                (ScheduleName::VMin, (2 * pp + 8) / 3),
                // One chunk more than half of what there is (arXiv 2412.19437, table 2: `PP + 1` of twice as many ranks).
                (ScheduleName::DualpipeV, 2 * pp + 1),
                (ScheduleName::DualpipeVCombined, 2 * pp + 1),
            ] {
                let found = in_flight(name, pp, 2, 5 * pp);
                let fullest = *found.iter().max().expect("a rank");
                assert!(fullest <= most, "{name:?} {pp}: {found:?}");
                // The bounds are met somewhere near.
                assert!(fullest + 3 >= most, "{name:?} {pp}: {found:?}");
            }
        }
        assert_eq!(in_flight(ScheduleName::ZbV, 4, 2, 16), [8; 4]);
        assert_eq!(in_flight(ScheduleName::DualpipeV, 4, 2, 16), [9; 4]);
        assert_eq!(
            in_flight(ScheduleName::VHalf, 8, 2, 32).iter().max(),
            Some(&11)
        );
        assert_eq!(in_flight(ScheduleName::VMin, 16, 2, 64), [12; 16]);
    }
}
