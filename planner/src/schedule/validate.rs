//! [`Schedule::validate`]: is every piece of work done once, in an order that can finish?

use super::{Action, Microbatch, Schedule, Stage};

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
    /// Proves that every rank does every forward and backward of its stages exactly once with the
    /// messages and in the order that data needs, reduces every stage's gradients and then steps
    /// once, and that all ranks together run to the end, sends waiting for nobody.
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
            if !self.belongs(action, rank) {
                return Err(at(Fault::Misplaced(action)));
            }
            for needs in self.needs(action, rank).into_iter().flatten() {
                if !done.has(needs) {
                    return Err(at(Fault::TooEarly { action, needs }));
                }
            }
            if !done.mark(action) {
                return Err(at(Fault::Repeated(action)));
            }
        }
        match self.required(rank).find(|&action| !done.has(action)) {
            Some(action) => Err((actions.len(), Fault::Missing(action))),
            None => Ok(()),
        }
    }

    fn belongs(&self, action: Action, rank: u32) -> bool {
        let last = self.num_stages() - 1;
        let held = action
            .stage()
            .is_none_or(|stage| stage.0 <= last && self.rank_of(stage) == rank);
        let exists = action
            .microbatch()
            .is_none_or(|microbatch| microbatch.0 < self.microbatches);
        let has_neighbour = match action {
            Action::RecvActivation(stage, _) | Action::SendGradient(stage, _) => stage.0 > 0,
            Action::SendActivation(stage, _) | Action::RecvGradient(stage, _) => stage.0 < last,
            _ => true,
        };
        held && exists && has_neighbour
    }

    /// What must have been done on the same rank before an action. The end of the step needs all
    /// that comes before it, and asks for the last of each kind only when it is its turn: a missing
    /// one is found by [`Schedule::required`].
    fn needs(&self, action: Action, rank: u32) -> [Option<Action>; 2] {
        let last = self.num_stages() - 1;
        match action {
            Action::Forward(s, m) if s.0 > 0 => [Some(Action::RecvActivation(s, m)), None],
            Action::SendActivation(s, m) => [Some(Action::Forward(s, m)), None],
            Action::Backward(s, m) => [
                Some(Action::Forward(s, m)),
                (s.0 < last).then_some(Action::RecvGradient(s, m)),
            ],
            Action::SendGradient(s, m) => [Some(Action::Backward(s, m)), None],
            Action::ReduceGradients(s) => {
                let microbatch = Microbatch(self.microbatches - 1);
                [Some(Action::Backward(s, microbatch)), None]
            }
            Action::OptimizerStep => [Some(Action::ReduceGradients(Stage(rank))), None],
            Action::RecvActivation(..) | Action::RecvGradient(..) | Action::Forward(..) => {
                [None, None]
            }
        }
    }

    /// Everything a rank has to do.
    fn required(&self, rank: u32) -> impl Iterator<Item = Action> {
        let stages = (0..self.vpp).map(move |chunk| Stage(chunk * self.pp + rank));
        let passes = stages.clone().flat_map(move |stage| {
            (0..self.microbatches).flat_map(move |m| {
                let m = Microbatch(m);
                [
                    Action::RecvActivation(stage, m),
                    Action::Forward(stage, m),
                    Action::SendActivation(stage, m),
                    Action::RecvGradient(stage, m),
                    Action::Backward(stage, m),
                    Action::SendGradient(stage, m),
                ]
            })
        });
        passes
            .filter(move |&action| self.belongs(action, rank))
            .chain(stages.map(Action::ReduceGradients))
            .chain([Action::OptimizerStep])
    }
}

/// Which actions a rank has done, as a bit for each.
struct Done {
    microbatches: usize,
    stages: usize,
    bits: Vec<bool>,
}

impl Done {
    fn new(schedule: &Schedule) -> Self {
        let (stages, microbatches) = (
            schedule.num_stages() as usize,
            schedule.microbatches as usize,
        );
        Self {
            microbatches,
            stages,
            bits: vec![false; 6 * stages * microbatches + stages + 1],
        }
    }

    fn index(&self, action: Action) -> usize {
        let kind = match action {
            Action::RecvActivation(..) => 0,
            Action::Forward(..) => 1,
            Action::SendActivation(..) => 2,
            Action::RecvGradient(..) => 3,
            Action::Backward(..) => 4,
            Action::SendGradient(..) => 5,
            Action::ReduceGradients(Stage(s)) => {
                return 6 * self.stages * self.microbatches + s as usize;
            }
            Action::OptimizerStep => return self.bits.len() - 1,
        };
        let stage = action.stage().expect("passes and messages have one").0 as usize;
        let microbatch = action.microbatch().expect("and a microbatch").0 as usize;
        (kind * self.stages + stage) * self.microbatches + microbatch
    }

    fn has(&self, action: Action) -> bool {
        self.bits[self.index(action)]
    }

    /// Marks an action done; false where it was already.
    fn mark(&mut self, action: Action) -> bool {
        let index = self.index(action);
        !std::mem::replace(&mut self.bits[index], true)
    }
}
