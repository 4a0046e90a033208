//! [`Schedule::validate`]: is every piece of work done once, in an order that can finish?

use super::{Action, ActionIndex, Microbatch, Schedule, Stage};

/// What is wrong with a schedule, and where; prints the grid around the place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pipeline rank {rank}, action {position}: {fault}\n{grid}")]
pub struct ScheduleError {
    /// The pipeline rank.
    pub rank: u32,
    /// Index into its actions; their number where one is missing at the end.
    pub position: usize,
    /// What is wrong.
    pub fault: Fault,
    /// The schedule as far as it runs, the offending cell in brackets.
    pub grid: String,
}

/// What is wrong with an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The rank does not hold the stage, or there is no such stage, microbatch or message.
    #[error("{0:?} does not belong here")]
    Misplaced(Action),
    /// Done before.
    #[error("{0:?} was done before")]
    Repeated(Action),
    /// Something it needs on the same rank has not been done.
    #[error("{action:?} comes before {needs:?}")]
    TooEarly {
        /// The action.
        action: Action,
        /// What has to come first.
        needs: Action,
    },
    /// Never done.
    #[error("{0:?} is never done")]
    Missing(Action),
    /// Every rank that still has work waits for a message.
    #[error("deadlock: {0:?} waits for a message that is never sent before it")]
    Deadlock(Action),
}

impl Schedule {
    /// Proves that every rank does every forward and backward of its stages exactly once, with the
    /// messages and in the order that data needs, then reduces every stage's gradients and steps once.
    /// Backward passes are whole, or divided where the schedule is one of those; there those are whole that forward
    /// passes run beside.
    /// Proves that all ranks together run to the end, where sends wait for nobody.
    pub fn validate(&self) -> Result<(), ScheduleError> {
        for (rank, actions) in self.ranks.iter().enumerate() {
            self.check_rank(rank as u32, actions)
                .map_err(|(position, fault)| self.error(rank as u32, position, fault))?;
        }
        match self.dry_run().stuck {
            None => Ok(()),
            Some((rank, position)) => {
                let action = self.ranks[rank as usize][position];
                Err(self.error(rank, position, Fault::Deadlock(action)))
            }
        }
    }

    fn error(&self, rank: u32, position: usize, fault: Fault) -> ScheduleError {
        ScheduleError {
            rank,
            position,
            fault,
            grid: self.grid_around(rank, position),
        }
    }

    fn check_rank(&self, rank: u32, actions: &[Action]) -> Result<(), (usize, Fault)> {
        let mut done = Done::new(self);
        for (position, &action) in actions.iter().enumerate() {
            let at = |fault| (position, fault);
            let is_pair = matches!(action, Action::Combined { .. });
            let mut parts = self.parts(action);
            if is_pair && !self.name.combines() || !parts.all(|part| self.belongs(part, rank)) {
                return Err(at(Fault::Misplaced(action)));
            }
            // Neither of two passes may need the other.
            if let Some(needs) = self.first_missing(action, rank, &done) {
                return Err(at(Fault::TooEarly { action, needs }));
            }
            for part in self.parts(action) {
                if !done.mark(part) {
                    return Err(at(Fault::Repeated(part)));
                }
            }
        }
        match self.required(rank).find(|&action| !done.has(action)) {
            Some(action) => Err((actions.len(), Fault::Missing(action))),
            None => Ok(()),
        }
    }

    /// What an action does: where backward passes are divided, a whole one that runs beside a forward pass as its parts.
    fn parts(&self, action: Action) -> impl Iterator<Item = Action> + Clone {
        let is_pair = matches!(action, Action::Combined { .. });
        let divides = is_pair && self.name.divides_backward();
        let parts = move |pass| match pass {
            Action::Backward(s, m) if divides => {
                let weight = Action::BackwardWeight(s, m);
                (Action::BackwardInput(s, m), Some(weight))
            }
            whole => (whole, None),
        };
        let parts = action.passes().map(parts);
        parts.flat_map(|(first, second)| std::iter::once(first).chain(second))
    }

    fn belongs(&self, action: Action, rank: u32) -> bool {
        let places = self.places();
        let held = action
            .stage()
            .is_none_or(|stage| stage.0 < places.stages() && self.rank_of(stage) == rank);
        let exists = action
            .microbatch()
            .is_none_or(|microbatch| microbatch.0 < self.microbatches);
        let divides = self.name.divides_backward();
        let is_done_here = match action {
            Action::Backward(..) => !divides,
            Action::BackwardInput(..) | Action::BackwardWeight(..) => divides,
            Action::RecvActivation(stage, _) | Action::SendGradient(stage, _) => {
                places.is_received(stage.0)
            }
            Action::SendActivation(stage, _) | Action::RecvGradient(stage, _) => {
                places.is_sent(stage.0)
            }
            _ => true,
        };
        held && exists && is_done_here
    }

    /// The first thing that must have been done on the same rank before an action and was not.
    fn first_missing(&self, action: Action, rank: u32, done: &Done) -> Option<Action> {
        let missing = |needs: Action| (!done.has(needs)).then_some(needs);
        let places = self.places();
        let last = places.stages() - 1;
        match action {
            Action::RecvActivation(..) | Action::RecvGradient(..) => None,
            Action::Forward(s, _) if s.0 == 0 => None,
            Action::Forward(s, m) if places.is_received(s.0) => {
                missing(Action::RecvActivation(s, m))
            }
            // The stage before is on the same rank.
            Action::Forward(s, m) => missing(Action::Forward(Stage(s.0 - 1), m)),
            Action::SendActivation(s, m) => missing(Action::Forward(s, m)),
            Action::Backward(s, m) | Action::BackwardInput(s, m) if s.0 == last => {
                missing(Action::Forward(s, m))
            }
            Action::Backward(s, m) | Action::BackwardInput(s, m) => {
                let after = match action {
                    _ if places.is_sent(s.0) => Action::RecvGradient(s, m),
                    Action::Backward(..) => Action::Backward(Stage(s.0 + 1), m),
                    _ => Action::BackwardInput(Stage(s.0 + 1), m),
                };
                missing(Action::Forward(s, m)).or_else(|| missing(after))
            }
            Action::BackwardWeight(s, m) => missing(Action::BackwardInput(s, m)),
            Action::SendGradient(s, m) => missing(if self.name.divides_backward() {
                Action::BackwardInput(s, m)
            } else {
                Action::Backward(s, m)
            }),
            Action::ReduceGradients(s) => (0..self.microbatches).map(Microbatch).find_map(|m| {
                missing(if self.name.divides_backward() {
                    Action::BackwardWeight(s, m)
                } else {
                    Action::Backward(s, m)
                })
            }),
            Action::OptimizerStep => self
                .required(rank)
                .filter(|&needs| needs != Action::OptimizerStep)
                .find_map(missing),
            Action::Combined { .. } => {
                let is_first = |part: &Action| !matches!(part, Action::BackwardWeight(..));
                let mut first = self.parts(action).filter(is_first);
                first.find_map(|part| self.first_missing(part, rank, done))
            }
        }
    }

    /// Everything a rank has to do.
    fn required(&self, rank: u32) -> impl Iterator<Item = Action> {
        let stages = self.places().of_rank(rank).map(Stage);
        let passes = stages.clone().flat_map(move |stage| {
            (0..self.microbatches).flat_map(move |m| {
                let m = Microbatch(m);
                [
                    Action::RecvActivation(stage, m),
                    Action::Forward(stage, m),
                    Action::SendActivation(stage, m),
                    Action::RecvGradient(stage, m),
                    Action::Backward(stage, m),
                    Action::BackwardInput(stage, m),
                    Action::SendGradient(stage, m),
                    Action::BackwardWeight(stage, m),
                ]
            })
        });
        passes
            .filter(move |&action| self.belongs(action, rank))
            .chain(stages.map(Action::ReduceGradients))
            .chain([Action::OptimizerStep])
    }
}

/// Which actions a rank has done.
struct Done {
    index: ActionIndex,
    bits: Vec<bool>,
}

impl Done {
    fn new(schedule: &Schedule) -> Self {
        let index = ActionIndex::of(schedule);
        Self {
            index,
            bits: vec![false; index.len()],
        }
    }

    fn has(&self, action: Action) -> bool {
        self.bits[self.index.number(action)]
    }

    /// Marks an action done; false where it was already.
    fn mark(&mut self, action: Action) -> bool {
        !std::mem::replace(&mut self.bits[self.index.number(action)], true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::ScheduleName;

    fn every(mut check: impl FnMut(Schedule)) {
        for pp in 1..=6 {
            for microbatches in 1..=9 {
                for name in ScheduleName::all_of(pp, 1) {
                    check(Schedule::new(name, pp, 1, microbatches));
                }
            }
            for vpp in 2..=4 {
                for groups in (1..=3).filter(|_| pp > 1) {
                    for name in ScheduleName::all_of(pp, vpp) {
                        check(Schedule::new(name, pp, vpp, groups * pp));
                        if name.is_vee() {
                            check(Schedule::new(name, pp, vpp, groups * pp - 1));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn law_every_schedule_is_sound() {
        every(|schedule| {
            schedule
                .validate()
                .expect("constructors write sound schedules");
        });
    }

    /// Dropping, doubling or hoisting any single action of a small schedule is found out.
    #[test]
    fn law_no_single_damage_goes_unnoticed() {
        let divided = Schedule::new(ScheduleName::ZbH1, 2, 1, 3);
        let interleaved = Schedule::new(ScheduleName::Interleaved, 2, 2, 2);
        let combined = Schedule::new(ScheduleName::Combined, 2, 2, 4);
        let there_and_back = Schedule::new(ScheduleName::VHalf, 2, 2, 4);
        let both = Schedule::new(ScheduleName::DualpipeVCombined, 2, 2, 5);
        for (sound, rank) in [divided, interleaved, combined, there_and_back, both]
            .iter()
            .flat_map(|of| [(of, 0), (of, 1)])
        {
            for position in 0..sound.ranks[rank].len() {
                let mut dropped = sound.clone();
                dropped.ranks[rank].remove(position);
                assert!(dropped.validate().is_err());
                let mut doubled = sound.clone();
                let action = doubled.ranks[rank][position];
                doubled.ranks[rank].insert(position, action);
                assert!(doubled.validate().is_err());
                let mut swapped = sound.clone();
                swapped.ranks.swap(0, 1);
                assert!(swapped.validate().is_err());
            }
        }
    }

    /// A part of a backward pass in the wrong place is named.
    #[test]
    fn gradients_of_weights_come_after_those_of_inputs_and_before_reductions() {
        let (s, m) = (Stage(0), Microbatch(1));
        let sound = Schedule::new(ScheduleName::ZbH1, 2, 1, 2);
        let at = |wanted| sound.ranks[0].iter().position(|&action| action == wanted);
        let weight = at(Action::BackwardWeight(s, m)).expect("of the rank");
        let early_at = at(Action::BackwardInput(s, m)).expect("of the rank");
        let mut early = sound.clone();
        let action = early.ranks[0].remove(weight);
        early.ranks[0].insert(early_at, action);
        let fault = early.validate().expect_err("before its input").fault;
        let (action, needs) = (Action::BackwardWeight(s, m), Action::BackwardInput(s, m));
        assert_eq!(fault, Fault::TooEarly { action, needs });
        let mut late = sound.clone();
        late.ranks[0].swap(weight, weight + 1);
        let fault = late.validate().expect_err("after its reduction").fault;
        let (action, needs) = (Action::ReduceGradients(s), Action::BackwardWeight(s, m));
        assert_eq!(fault, Fault::TooEarly { action, needs });
        let mut whole = sound;
        whole.ranks[0][early_at] = Action::Backward(s, m);
        let fault = whole.validate().expect_err("of another schedule").fault;
        assert_eq!(fault, Fault::Misplaced(Action::Backward(s, m)));
    }

    #[test]
    fn golden_deadlock_is_shown_in_its_place() {
        let mut schedule = Schedule::new(ScheduleName::OneFOneB, 2, 1, 2);
        // Rank 0 forgets its lead: it waits for a gradient that needs its own second forward.
        let first = schedule.ranks[1].remove(0);
        schedule.ranks[1].insert(3, first);
        let error = schedule.validate().expect_err("forward before its input");
        assert_eq!(error.rank, 1);
        assert!(matches!(error.fault, Fault::TooEarly { .. }));

        let mut schedule = Schedule::new(ScheduleName::OneFOneB, 2, 1, 2);
        let m = Microbatch;
        schedule.ranks[1] = vec![
            Action::RecvActivation(Stage(1), m(0)),
            Action::Forward(Stage(1), m(0)),
            Action::RecvActivation(Stage(1), m(1)),
            Action::Forward(Stage(1), m(1)),
            Action::Backward(Stage(1), m(1)),
            Action::SendGradient(Stage(1), m(1)),
            Action::Backward(Stage(1), m(0)),
            Action::SendGradient(Stage(1), m(0)),
            Action::ReduceGradients(Stage(1)),
            Action::OptimizerStep,
        ];
        schedule.validate().expect("late, but it ends");

        let mut stuck = schedule.clone();
        // Rank 0 wants the gradient of microbatch 0 before it sends microbatch 1, rank 1 the reverse.
        let order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9];
        let old = stuck.ranks[0].clone();
        assert_eq!(old.len(), order.len());
        stuck.ranks[0] = order.map(|at: usize| old[at]).to_vec();
        let error = stuck.validate().expect_err("both wait");
        assert!(matches!(error.fault, Fault::Deadlock(_)), "{error}");
        assert_eq!(
            error.to_string().lines().collect::<Vec<_>>(),
            [
                "pipeline rank 0, action 2: deadlock: RecvGradient(Stage(0), Microbatch(0)) waits \
                 for a message that is never sent before it",
                "  0 | F0 []",
                "  1 |  . F0",
            ]
        );
    }

    #[test]
    fn golden_grids() {
        let check = |schedule: Schedule, rows: &[&str]| {
            assert_eq!(schedule.grid().lines().collect::<Vec<_>>(), rows);
        };
        check(
            Schedule::new(ScheduleName::OneFOneB, 3, 1, 4),
            &[
                "  0 | F0 F1 F2  .  . B0 F3 B1  . B2  . B3",
                "  1 |  . F0 F1  . B0 F2 B1 F3 B2  . B3  .",
                "  2 |  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .",
            ],
        );
        check(
            Schedule::new(ScheduleName::ZbH1, 3, 1, 4),
            &[
                "  0 | F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3",
                "  1 |  . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
                "  2 |  .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
            ],
        );
        check(
            Schedule::new(ScheduleName::ZbV, 2, 2, 2),
            &[
                "  0 | F0a F1a   . F0b I0b W0b F1b I1b I0a W1b I1a W0a W1a",
                "  1 |   . F0a F0b F1a F1b I0b I0a W0b I1b I1a W0a W1b W1a",
            ],
        );
        check(
            Schedule::new(ScheduleName::VMin, 2, 2, 2),
            &[
                "  0 | F0a   .   . F0b I0b W0b F1a I0a W0a F1b I1b W1b   . I1a W1a",
                "  1 |   . F0a F0b   .   . I0b I0a F1a F1b W0b W0a I1b I1a W1b W1a",
            ],
        );
        check(
            Schedule::new(ScheduleName::DualpipeVCombined, 2, 2, 4),
            &[
                "  0 |    F0a    F1a    F2a    F0b    I0b    W0b    F1b F3aB1b      . F2bB0a    I2b    W2b F3bB1a    I3b    W3b    I2a    W2a    I3a    W3a",
                "  1 |      .    F0a    F0b    F1a    F1b    F2a    I0b    W0b F2bB0a F3aB1b F3bB1a    I2b    W2b    I2a    W2a    I3b    I3a    W3b    W3a",
            ],
        );
        check(
            Schedule::new(ScheduleName::Interleaved, 2, 2, 2),
            &[
                "  0 | F0a F1a F0b F1b   . B0b   . B1b B0a B1a",
                "  1 |   . F0a F1a F0b B0b F1b B1b B0a B1a   .",
            ],
        );
        check(
            Schedule::new(ScheduleName::Combined, 1, 1, 3),
            &["  0 |   F0 F1B0 F2B1   B2"],
        );
        check(
            Schedule::new(ScheduleName::Combined, 2, 1, 5),
            &[
                "  0 |   F0   F1   F2 F3B0 F4B1   B2   B3   B4",
                "  1 |    .   F0 F1B0 F2B1 F3B2 F4B3   B4    .",
            ],
        );
        check(
            Schedule::new(ScheduleName::Combined, 2, 2, 4),
            &[
                "  0 |    F0a    F1a    F0b    F1b    F2a F3aB0b F2bB1b F3bB0a    B1a    B2b    B3b    B2a    B3a",
                "  1 |      .    F0a    F1a    F0b F1bB0b F2aB1b F3aB0a F2bB1a F3bB2b    B3b    B2a    B3a      .",
            ],
        );
    }
}
