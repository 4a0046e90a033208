//! The other ranks of a traced one: they are assumed to do what it does.

use std::cell::Cell;
use std::rc::Rc;

use moefold_kernels::Device;
use moefold_kernels::meta::Choices;
use moefold_planner::layout::Layout;
use moefold_planner::mesh::{Coordinates, GroupKind};

use crate::rank::Wanted;
use crate::transport::{Communicator, Exchange, Pending, Transport, TransportError};

/// What is assumed of routing.
#[derive(Debug, Clone)]
pub enum Assumed {
    /// Rows that the experts of the traced rank get over the mean of all ranks; every one of them alike.
    Load(f64),
    /// The same by router, in the order in which they run in a step.
    Loads(Rc<[f64]>),
    /// Rows that each member of the group of ranks that exchange tokens (ETP fastest, then EP) sends to
    /// each expert, by router in the order in which they run: as a run had them.
    Recorded(Rc<Vec<Vec<Vec<usize>>>>),
}

impl Assumed {
    /// Every expert gets as many rows.
    pub const BALANCED: Self = Self::Load(1.0);
}

/// The group of ranks that exchange tokens with the traced one, and what they choose.
#[derive(Debug)]
pub(super) struct Crowd {
    assumed: Assumed,
    ep: usize,
    etp: usize,
    /// EP rank of the traced one.
    holder: usize,
    /// Its number among the members.
    member: usize,
    /// Routers that have run.
    routed: Cell<usize>,
    /// What the last of them chose among, until it is exchanged.
    last: Cell<Option<Choices>>,
}

impl Crowd {
    pub(super) fn new(layout: &Layout, at: &Coordinates, assumed: Assumed) -> Self {
        let (ep, etp) = (layout.ep() as usize, layout.etp() as usize);
        let holder = at.ep as usize;
        Self {
            assumed,
            ep,
            etp,
            holder,
            member: at.etp as usize + etp * holder,
            routed: Cell::new(0),
            last: Cell::new(None),
        }
    }

    /// Lets the routers of a meta device choose as the traced rank's do.
    pub(super) fn route(self: &Rc<Self>, device: &Device) {
        let crowd = Rc::clone(self);
        device.assume_routing(Rc::new(move |choices| {
            crowd.last.set(Some(choices));
            crowd.routed.set(crowd.routed.get() + 1);
            crowd.sent(choices, crowd.member)
        }));
    }

    /// Rows from each member to each expert, of the router that ran last.
    fn exchange(&self) -> Option<Vec<Rc<[u64]>>> {
        let choices = self.last.take()?;
        let all = self.all_here(choices);
        let mut known: Vec<(usize, Rc<[u64]>)> = Vec::new();
        let mut words = |member| {
            let here = all.map(|all| self.rows_here(all, choices, member));
            if let Some((_, words)) = known.iter().find(|(rows, _)| Some(*rows) == here) {
                return Rc::clone(words);
            }
            let sent = self.sent(choices, member).into_iter();
            let words: Rc<[u64]> = sent.map(|rows| rows as u64).collect();
            known.extend(here.map(|rows| (rows, Rc::clone(&words))));
            words
        };
        Some((0..self.ep * self.etp).map(&mut words).collect())
    }

    /// Rows of each expert from one member: the experts of the traced rank get their part of all that
    /// members send them, and the others what is left, alike.
    pub(super) fn sent(&self, choices: Choices, member: usize) -> Vec<usize> {
        let here = match &self.assumed {
            Assumed::Recorded(routers) => return routers[self.routed.get() - 1][member].clone(),
            Assumed::Load(_) | Assumed::Loads(_) => self
                .all_here(choices)
                .map_or(0, |all| self.rows_here(all, choices, member)),
        };
        let held = choices.experts / self.ep;
        let mine = self.holder * held..(self.holder + 1) * held;
        let (rest, elsewhere) = (
            choices.experts - held,
            choices.tokens * choices.slots - here,
        );
        let deal = |rows: usize, over: usize, i: usize| rows * (i + 1) / over - rows * i / over;
        let mut others = 0..rest;
        (0..choices.experts)
            .map(|expert| {
                if mine.contains(&expert) {
                    return deal(here, held, expert - mine.start);
                }
                let i = others.next().expect("as many as there are");
                deal(elsewhere, rest, i)
            })
            .collect()
    }

    /// Rows that all members send to the experts of the traced rank under an assumed load.
    fn all_here(&self, choices: Choices) -> Option<usize> {
        let load = match &self.assumed {
            Assumed::Load(load) => *load,
            Assumed::Loads(loads) => loads[self.routed.get().saturating_sub(1) % loads.len()],
            Assumed::Recorded(_) => return None,
        };
        let rows = choices.tokens * choices.slots;
        let all = ((rows * self.etp) as f64 * load).round() as usize;
        Some(all.min(rows * self.ep * self.etp))
    }

    /// What one member sends of `all`: an equal part, the first members one more where that does not divide.
    fn rows_here(&self, all: usize, choices: Choices, member: usize) -> usize {
        let senders = self.ep * self.etp;
        // ETP peers one after the other, so that what each receives divides as the whole does.
        let order = member / self.etp + self.ep * (member % self.etp);
        let until = |order: usize| (all * order).div_ceil(senders);
        (until(order + 1) - until(order)).min(choices.tokens * choices.slots)
    }
}

/// Carries nothing: collectives end when they are awaited, and members send what they are assumed to.
#[derive(Debug)]
struct Peers {
    size: usize,
    /// Where the group is that which exchanges tokens.
    crowd: Option<Rc<Crowd>>,
}

impl Transport for Peers {
    fn start(&self, _exchange: Exchange) -> Result<Pending, TransportError> {
        Ok(Pending::new(|| Ok(())))
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<Rc<[u64]>>, TransportError> {
        let routed = self.crowd.as_ref().and_then(|crowd| crowd.exchange());
        Ok(routed.unwrap_or_else(|| vec![words.into(); self.size]))
    }

    fn sum_numbers(&self, values: &mut [f64]) -> Result<(), TransportError> {
        for value in values {
            *value *= self.size as f64;
        }
        Ok(())
    }
}

/// What is the same for all groups of a traced rank.
pub(super) struct Groups<'a> {
    pub(super) layout: &'a Layout,
    pub(super) rank: u32,
    pub(super) crowd: Rc<Crowd>,
    /// Of a group, the most members that share a memory domain.
    pub(super) domain: &'a dyn Fn(Option<GroupKind>) -> u32,
    /// Whether only those are there that a piece of the model exchanges something over. The rank is alone
    /// in the others.
    pub(super) of_pieces: bool,
}

impl Groups<'_> {
    /// The communicator of a group.
    pub(super) fn of(&self, wanted: Wanted) -> Communicator {
        use GroupKind::{Cp, Ep, Etp, Tp, TpEp};
        let kind = wanted.kind();
        if self.of_pieces && !matches!(kind, Some(Tp | Cp | Ep | Etp | TpEp)) {
            return Communicator::solo(self.rank);
        }
        let ranks = wanted.ranks(self.layout, self.rank);
        let index = ranks.iter().position(|&rank| rank == self.rank);
        let index = index.expect("a rank is in its own groups");
        let routed = kind == Some(GroupKind::TpEp);
        let peers = Peers {
            size: ranks.len(),
            crowd: routed.then(|| Rc::clone(&self.crowd)),
        };
        Communicator::over(wanted.name(), &ranks, index, Rc::new(peers)).spread((self.domain)(kind))
    }
}
