//! [`Heard`]: what the tape of a traced pass says it does, as the planner asks for it.

use std::pin::pin;

use moefold_planner::runtime::{Account, Level, Part, Setting, Stretch, Task, Work};
use moefold_planner::walk::Event;
use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Collective, CollectiveKind, Op};

use super::Tape;
use crate::error::Error;
use crate::later::WeightGradients;
use crate::rank::Context;
use crate::transport::ranks_of_link;
use crate::turns::turn;

/// What takes time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Item {
    doing: Doing,
    pub(super) category: Category,
    /// Whether it only adds to gradients of weights.
    of_weights: bool,
    /// Whether the pass pauses behind it.
    pauses: bool,
}

impl Item {
    /// What is no op.
    fn other(doing: Doing, category: Category) -> Self {
        Self {
            doing,
            category,
            of_weights: false,
            pauses: false,
        }
    }

    /// It as the planner prices it, its group where the setting has it. Messages around a ring run beside the
    /// core of attention on a device that communicates in a stream of its own, and tokens are sent beside the shared
    /// expert where that is chosen.
    pub(super) fn work(&self, setting: &Setting<'_>, queues: bool) -> Work {
        let Item {
            doing,
            category,
            of_weights,
            pauses,
        } = self;
        let shared_beside = queues && setting.shared_beside && *category != Category::Recompute;
        let mut beside = None;
        let mut part = None;
        let task = match doing {
            Doing::Op(op, sending) => {
                part = match op {
                    Op::Attention { .. } => Some(Part::Core),
                    _ => (shared_beside && *sending).then_some(Part::Shared),
                };
                Task::Op(*op)
            }
            Doing::HostRead => Task::HostRead,
            Doing::Collective(group, collective, sending) => {
                // Tokens have a stream of their own.
                part = (shared_beside && *sending).then_some(Part::Shared);
                let groups = setting.groups;
                let placement = match group {
                    Group::Tp => groups.tp,
                    Group::Cp => groups.cp,
                    Group::Ep => groups.ep,
                    Group::Etp => groups.etp,
                    Group::TpEp => groups.tp_ep,
                };
                if queues && collective.kind == CollectiveKind::SendRecv {
                    beside = Some(Part::Core);
                } else if shared_beside
                    && *category == Category::EpComm
                    && collective.kind == CollectiveKind::AllToAll
                {
                    beside = Some(Part::Shared);
                }
                let ranks_per_domain = match collective.kind {
                    CollectiveKind::SendRecv => {
                        ranks_of_link(placement.ranks, placement.ranks_per_domain)
                    }
                    _ => placement.ranks_per_domain,
                };
                Task::Collective(Collective {
                    ranks_per_domain,
                    ..*collective
                })
            }
        };
        Work {
            task,
            category: *category,
            part,
            beside,
            of_weights: *of_weights,
            pauses: *pauses,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Doing {
    /// Whether tokens are sent meanwhile.
    Op(Op, bool),
    /// The same.
    Collective(Group, Collective, bool),
    HostRead,
}

/// The group of a collective.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Group {
    Tp,
    Cp,
    Ep,
    Etp,
    TpEp,
}

impl Group {
    fn of(name: &str) -> Self {
        match name {
            "tp" => Self::Tp,
            "cp" => Self::Cp,
            "ep" => Self::Ep,
            "etp" => Self::Etp,
            "tp-ep" => Self::TpEp,
            other => unreachable!("a piece exchanges nothing over {other}"),
        }
    }
}

/// What takes time, in order. Each item is there once, however often it runs: attention on a ring has thousands of
/// steps of few kinds, and ranks that share the slices of an expert broadcast as often as there are of them.
#[derive(Debug, Default)]
pub(super) struct Items {
    items: Vec<Item>,
    /// Which of them runs, and how often in a row.
    runs: Vec<(u32, u32)>,
}

impl Items {
    pub(super) fn len(&self) -> usize {
        self.runs.iter().map(|(_, times)| *times as usize).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Item> {
        let run = |&(item, times): &(u32, u32)| {
            std::iter::repeat_n(&self.items[item as usize], times as usize)
        };
        self.runs.iter().flat_map(run)
    }
}

impl FromIterator<Item> for Items {
    fn from_iter<I: IntoIterator<Item = Item>>(all: I) -> Self {
        let Self {
            mut items,
            mut runs,
        } = Self::default();
        for item in all {
            let known = items.iter().position(|known| *known == item);
            let which = known.unwrap_or(items.len()) as u32;
            if known.is_none() {
                items.push(item);
            }
            match runs.last_mut() {
                Some((last, times)) if *last == which => *times += 1,
                _ => runs.push((which, 1)),
            }
        }
        items.shrink_to_fit();
        runs.shrink_to_fit();
        Self { items, runs }
    }
}

/// When gradients of weights run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OfWeights {
    /// Where the backward pass comes to them.
    AtOnce,
    /// After the backward pass.
    After,
    /// Behind the start of the next exchange.
    Delayed,
}

/// What is heard of a pass.
#[derive(Default)]
pub(super) struct Heard {
    pub(super) items: Vec<Item>,
    /// Above what was alive before.
    pub(super) account: Account,
    /// Taken in memory of the host.
    pub(super) on_host: Level,
    /// What starts to leave for it in the stream of copies.
    pub(super) leaves: Bytes,
    /// The largest allocation.
    pub(super) largest: Bytes,
}

/// Runs a pass pause by pause; `last` is the end of it.
pub(super) fn in_turns<T, U>(
    cx: &Context,
    tape: &Tape,
    pass: impl Future<Output = Result<T, Error>>,
    mut last: impl FnMut(T) -> U,
) -> Result<(U, Turns), Error> {
    let mut pass = pin!(pass);
    let mut turns = Turns::default();
    loop {
        let ended = turn(pass.as_mut()).transpose()?.map(&mut last);
        let own = tape.read(Heard::of);
        cx.settle_weights();
        turns.add([own, tape.read(Heard::of)], ended.is_none());
        if let Some(ended) = ended {
            return Ok((ended, turns));
        }
    }
}

/// The same of a backward pass, and what of it is left for later.
pub(super) fn back_in_turns<T>(
    cx: &Context,
    tape: &Tape,
    of_weights: OfWeights,
    pass: impl Future<Output = Result<T, Error>>,
) -> Result<((T, Turns), WeightGradients), Error> {
    let run = || in_turns(cx, tape, pass, |dx| dx);
    if of_weights == OfWeights::After {
        let (ran, left) = cx.leaving_weights(run);
        return Ok((ran?, left));
    }
    let delays = of_weights == OfWeights::Delayed;
    if delays {
        cx.delay_weights();
    }
    let ran = run()?;
    if delays {
        cx.end_delay();
    }
    Ok((ran, WeightGradients::default()))
}

/// What is heard of a pass, pause by pause.
#[derive(Default)]
pub(super) struct Turns {
    pub(super) heard: Heard,
    pub(super) stretches: Vec<Stretch>,
}

impl Turns {
    /// What a pass does up to a pause or its end, and what it has left behind of gradients of weights.
    fn add(&mut self, [mut own, left]: [Heard; 2], pauses: bool) {
        self.stretches.push(Stretch {
            own: own.account,
            left: left.account,
            pauses,
            settles: false,
        });
        if let Some(item) = own.items.last_mut() {
            item.pauses = pauses;
        }
        self.heard.append(own);
        self.heard.append(left);
    }
}

impl Heard {
    fn append(&mut self, next: Self) {
        self.items.extend(next.items);
        self.account.append(&next.account);
        self.on_host = self.on_host + next.on_host;
        self.leaves += next.leaves;
        self.largest = self.largest.max(next.largest);
    }

    pub(super) fn of(events: &[Event]) -> Self {
        let mut heard = Self::default();
        let mut sent: Vec<u64> = Vec::new();
        for event in events {
            match event {
                Event::Op {
                    op,
                    category,
                    of_weights,
                    ..
                } => heard.items.push(Item {
                    doing: Doing::Op(*op, !sent.is_empty()),
                    category: *category,
                    of_weights: *of_weights,
                    pauses: false,
                }),
                Event::Started {
                    number,
                    group,
                    collective,
                    category,
                    ..
                } => {
                    let group = Group::of(group);
                    let beside = !(sent.is_empty() || matches!(group, Group::Ep));
                    let doing = Doing::Collective(group, *collective, beside);
                    let sends = *category == Category::EpComm;
                    sent.extend(sends.then_some(*number));
                    heard.items.push(Item::other(doing, *category));
                }
                Event::HostRead { reads: 1, .. } => {
                    let item = Item::other(Doing::HostRead, Category::Host);
                    heard.items.push(item);
                }
                Event::HostRead { name, reads } => {
                    unreachable!("{name} reads {reads} times at once")
                }
                Event::Allocated(tensor) => {
                    heard.account.take(tensor.class, tensor.bytes);
                    heard.largest = heard.largest.max(tensor.bytes);
                }
                Event::Freed(tensor) => heard.account.give(tensor.class, tensor.bytes),
                Event::Awaited { number } => sent.retain(|sent| sent != number),
                Event::TakenOnHost(tensor) => {
                    heard.on_host = heard.on_host + Level::of(tensor.class, tensor.bytes);
                }
                Event::Transfer { bytes, leaves, .. } if *leaves => heard.leaves += *bytes,
                Event::Transfer { .. }
                | Event::Transferred { .. }
                | Event::GivenOnHost(_)
                | Event::NotBefore(_) => {}
            }
        }
        heard
    }
}
