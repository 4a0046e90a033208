//! Collectives, ready to be timed: the world is cut into groups of the key's size, and all groups
//! exchange at the same time, as they do in training. What shares a machine counts as one memory domain.

use std::cell::RefCell;
use std::collections::BTreeMap;

use moefold_kernels::{Device, Dtype};
use moefold_profiles::{Collective, CollectiveKind};

use super::ops;
use crate::transport::{Communicator, RankContext, TransportError};

/// Where the ranks of a world are: machine by machine, so many on each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Machines {
    ranks: u32,
    /// Ranks of each; absent where they are not numbered machine by machine.
    each: Option<u32>,
}

impl Machines {
    /// What the ranks say of their places; all of them call it.
    pub(super) fn find(rank: &RankContext, world: &Communicator) -> Result<Self, TransportError> {
        let own = [rank.local_rank(), rank.local_ranks()].map(u64::from);
        let places = world.exchange_counts(&own)?;
        Ok(Self::of(&places))
    }

    /// By each rank's number on its machine, and how many are there.
    pub(super) fn of(places: &[impl AsRef<[u64]>]) -> Self {
        let each = places[0].as_ref()[1];
        let in_turn = (0..).zip(places);
        let is_even = (places.len() as u64).is_multiple_of(each)
            && in_turn
                .into_iter()
                .all(|(rank, place)| *place.as_ref() == [rank % each, each]);
        Self {
            ranks: places.len() as u32,
            each: is_even.then_some(each as u32),
        }
    }

    /// Why a collective cannot be measured among these ranks.
    pub(super) fn refusal(&self, collective: &Collective) -> Option<&'static str> {
        let Collective {
            ranks,
            ranks_per_domain,
            ..
        } = *collective;
        let near = ranks_per_domain.min(ranks);
        if ranks < 2 || !self.ranks.is_multiple_of(ranks) {
            return Some("its group does not divide the ranks that run");
        }
        let Some(each) = self.each else {
            return Some("the ranks that run are not numbered machine by machine");
        };
        let machines = self.ranks / each;
        if collective.crosses_domains() && machines == 1 {
            return Some("the ranks that run share one machine, and with it one memory domain");
        }
        if !ranks.is_multiple_of(near)
            || !each.is_multiple_of(near)
            || !machines.is_multiple_of(ranks / near)
        {
            return Some("its group does not divide the ranks of a machine, or the machines");
        }
        None
    }

    /// The group of a rank in a collective that is not refused: as many ranks of as many machines as the
    /// key says.
    fn group_of(&self, rank: u32, collective: &Collective) -> Vec<u32> {
        let each = self.each.expect("else it is refused");
        let near = collective.ranks_per_domain.min(collective.ranks);
        let far = collective.ranks / near;
        let (machine, place) = (rank / each, rank % each);
        let (machine, place) = (machine / far * far, place / near * near);
        (machine..machine + far)
            .flat_map(|machine| (place..place + near).map(move |place| machine * each + place))
            .collect()
    }
}

/// One rank's groups, made at their first use. All ranks ask for the same in the same order.
#[derive(Debug)]
pub(super) struct Groups<'a> {
    rank: &'a RankContext,
    machines: Machines,
    /// By the ranks of a group, and those of a machine.
    made: RefCell<BTreeMap<[u32; 2], Communicator>>,
    /// The same of two ranks that send each other messages.
    lines: RefCell<BTreeMap<[u32; 2], Communicator>>,
}

impl<'a> Groups<'a> {
    pub(super) fn new(rank: &'a RankContext, machines: Machines) -> Self {
        Self {
            rank,
            machines,
            made: RefCell::default(),
            lines: RefCell::default(),
        }
    }

    fn of(&self, collective: &Collective) -> Communicator {
        let messages = collective.kind == CollectiveKind::SendRecv;
        let make = || {
            let members = self.machines.group_of(self.rank.rank(), collective);
            if messages {
                self.rank.lines("profile", &members, &[[0, 1], [1, 0]])
            } else {
                self.rank.communicator("profile", &members)
            }
        };
        let size = [collective.ranks, collective.ranks_per_domain];
        let made = if messages { &self.lines } else { &self.made };
        let mut made = made.borrow_mut();
        made.entry(size).or_insert_with(make).clone()
    }

    /// A closure that runs the collective once.
    pub(super) fn prepare(
        &self,
        device: &Device,
        collective: &Collective,
    ) -> Box<dyn FnMut() -> Result<(), TransportError>> {
        let group = self.of(collective);
        let size = group.size();
        // Whole shards; a buffer smaller than one element a rank is rounded up to that.
        let shard = (collective.bytes.0 as usize / 4).div_ceil(size).max(1);
        let seed = self.rank.rank().into();
        let tensor = |len: usize| ops::random(device, Dtype::F32, &[len], seed);
        let (whole, part) = (tensor(shard * size), tensor(shard));
        match collective.kind {
            CollectiveKind::AllReduce => Box::new(move || group.all_reduce(&whole)),
            CollectiveKind::AllGather => Box::new(move || group.all_gather(&part, &whole)),
            CollectiveKind::ReduceScatter => Box::new(move || group.reduce_scatter(&whole, &part)),
            CollectiveKind::Broadcast => Box::new(move || group.broadcast(&whole, 0)),
            CollectiveKind::AllToAll => {
                let received = tensor(shard * size).reshape(&[size, shard]);
                let sent = whole.reshape(&[size, shard]);
                Box::new(move || group.all_to_all_even(&sent, &received))
            }
            CollectiveKind::SendRecv => {
                // In turns, so that neither goes ahead.
                let (own, mut turn) = (group.index(), 0);
                Box::new(move || {
                    turn = 1 - turn;
                    if turn == own {
                        group.start_send(&whole, 1 - own)?.wait()
                    } else {
                        group.receive(&whole, 1 - own)
                    }
                })
            }
        }
    }
}

#[cfg(test)]
mod tests;
