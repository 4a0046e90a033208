//! What happened before what inside a block: vector clocks.
//!
//! An agent is whoever touches memory: a thread, the tensor core of a warp (its wgmma run beside the
//! warp), or one of a few slots that bulk copies in flight take in turn. Each has a count of its own,
//! which advances whenever it tells others what it did; a [`Clock`] is the last count of every agent
//! that its holder knows of. Counts go up over all blocks and launches of a machine, so that a count
//! alone says which block it is of. Clocks are shared until they differ: after a barrier all threads
//! hold the same one. (FastTrack, Flanagan and Freund 2009, with one clock a barrier.)

use std::rc::Rc;

/// An agent's number in its block.
pub(crate) type Agent = u16;

/// What is known to have happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Clock {
    /// The last count known, by agent.
    known: Box<[u32]>,
    /// Timestamps of other blocks of this launch, learned through atomics.
    foreign: Option<Rc<[Foreign]>>,
}

/// A timestamp of another block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Foreign {
    /// Which block, in the order of execution.
    pub(crate) turn: usize,
    pub(crate) timestamp: Timestamp,
}

/// What an agent did and knew at one point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Timestamp {
    pub(crate) who: Agent,
    pub(crate) now: u32,
    pub(crate) clock: Rc<Clock>,
}

impl Clock {
    /// Nothing at or after `base` is known of any of `agents`.
    pub(crate) fn new(agents: usize, base: u32) -> Rc<Self> {
        Rc::new(Self {
            known: vec![base - 1; agents].into(),
            foreign: None,
        })
    }

    pub(crate) fn known(&self, who: Agent) -> u32 {
        self.known[usize::from(who)]
    }

    /// Whether count `when` of agent `who` in the block of this turn, another one, is known.
    pub(crate) fn knows_foreign(&self, turn: usize, who: Agent, when: u32) -> bool {
        self.foreign
            .iter()
            .flat_map(|all| all.iter())
            .any(|foreign| {
                let timestamp = &foreign.timestamp;
                foreign.turn == turn
                    && (timestamp.who == who && timestamp.now >= when
                        || timestamp.clock.known(who) >= when)
                    || timestamp.clock.knows_foreign(turn, who, when)
            })
    }

    fn absorb(&mut self, other: &Self) {
        for (mine, theirs) in self.known.iter_mut().zip(&other.known) {
            *mine = (*mine).max(*theirs);
        }
        if let Some(theirs) = &other.foreign {
            self.absorb_foreign(theirs);
        }
    }

    fn absorb_foreign(&mut self, theirs: &Rc<[Foreign]>) {
        self.foreign = Some(match self.foreign.take() {
            Some(mine) if Rc::ptr_eq(&mine, theirs) => mine,
            Some(mine) => {
                let new = theirs.iter().filter(|foreign| !mine.contains(foreign));
                mine.iter().chain(new).cloned().collect()
            }
            None => Rc::clone(theirs),
        });
    }

    /// This and that these counts of these agents have passed.
    pub(crate) fn with(self: &Rc<Self>, passed: &[(Agent, u32)]) -> Rc<Self> {
        if passed.iter().all(|&(who, when)| self.known(who) >= when) {
            return Rc::clone(self);
        }
        let mut clock = (**self).clone();
        for &(who, when) in passed {
            let known = &mut clock.known[usize::from(who)];
            *known = (*known).max(when);
        }
        Rc::new(clock)
    }

    /// This and timestamps of other blocks.
    pub(crate) fn with_foreign(self: &Rc<Self>, timestamps: &Rc<[Foreign]>) -> Rc<Self> {
        let mut clock = (**self).clone();
        clock.absorb_foreign(timestamps);
        Rc::new(clock)
    }
}

impl Timestamp {
    /// Starts a new count, after what was done so far has been told to others.
    pub(crate) fn tick(&mut self) {
        self.now += 1;
    }
}

/// What all of these know together, and what they did. There is at least one.
pub(crate) fn join<'a>(timestamps: impl Iterator<Item = &'a Timestamp> + Clone) -> Rc<Clock> {
    let first = timestamps.clone().next().expect("somebody takes part");
    let mut clock = (*first.clock).clone();
    let mut last = &first.clock;
    for timestamp in timestamps {
        if !Rc::ptr_eq(&timestamp.clock, &first.clock) && !Rc::ptr_eq(&timestamp.clock, last) {
            clock.absorb(&timestamp.clock);
            last = &timestamp.clock;
        }
        let known = &mut clock.known[usize::from(timestamp.who)];
        *known = (*known).max(timestamp.now);
    }
    Rc::new(clock)
}

/// Joins pairs of clocks, and remembers the last results: the threads of a warp ask the same.
#[derive(Default)]
pub(crate) struct Joiner {
    recent: Vec<[Rc<Clock>; 3]>,
    next: usize,
}

impl Joiner {
    const KEPT: usize = 16;

    pub(crate) fn join(&mut self, a: &Rc<Clock>, b: &Rc<Clock>) -> Rc<Clock> {
        if Rc::ptr_eq(a, b) {
            return Rc::clone(a);
        }
        let same = |r: &&[Rc<Clock>; 3]| Rc::ptr_eq(&r[0], a) && Rc::ptr_eq(&r[1], b);
        if let Some([_, _, joined]) = self.recent.iter().find(same) {
            return Rc::clone(joined);
        }
        let mut joined = (**a).clone();
        joined.absorb(b);
        let joined = Rc::new(joined);
        let entry = [Rc::clone(a), Rc::clone(b), Rc::clone(&joined)];
        if self.recent.len() < Self::KEPT {
            self.recent.push(entry);
        } else {
            self.recent[self.next] = entry;
            self.next = (self.next + 1) % Self::KEPT;
        }
        joined
    }

    pub(crate) fn clear(&mut self) {
        self.recent.clear();
    }
}
