//! [`Walk`]: one rank's step, event by event, at any scale.
//!
//! A runtime says what a rank does ([`Event`]s, in order: ops, collectives, allocations); [`play`] prices
//! them on two lanes, compute and communication, beside a host that issues ops ahead, and keeps the account
//! of memory. What comes out is what a run leaves: peaks by class, collectives, a trace.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::rc::Rc;

use moefold_profiles::directory::Key;
use moefold_profiles::pricing::Costs;
use moefold_profiles::trace::{Category, Lane, MemorySample, Origin, Trace, TraceSpan};
use moefold_profiles::units::{Bytes, Instant, Seconds};
use moefold_profiles::{ByClass, Collective, CollectiveKind, Op, TensorClass};
use serde::Serialize;

use crate::mesh::GroupKind;
use crate::stack::Stack;

/// Where in a step something happens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct At {
    /// Microbatch, where it belongs to one.
    pub microbatch: Option<u32>,
    /// Decoder layer, where it belongs to one.
    pub layer: Option<u32>,
}

/// A tensor's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// Its number among all of the rank.
    pub id: u64,
    /// What it counts as.
    pub class: TensorClass,
    /// Its size.
    pub bytes: Bytes,
    /// What it is, where the runtime says; else it is known by the op that follows.
    pub name: Option<Cow<'static, str>>,
}

/// One thing that a rank does.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It runs an op.
    Op {
        /// By its key.
        op: Op,
        /// What its time counts as.
        category: Category,
        /// Where.
        at: At,
        /// Whether it only adds to gradients of weights.
        of_weights: bool,
    },
    /// It starts a collective.
    Started {
        /// Its number among the rank's.
        number: u64,
        /// Name of the group.
        group: Rc<str>,
        /// By its key.
        collective: Collective,
        /// What it takes, where that is not the price of its key.
        seconds: Option<Seconds>,
        /// What its exposed time counts as.
        category: Category,
        /// Where.
        at: At,
    },
    /// It waits for a collective to end.
    Awaited {
        /// Its number among the rank's.
        number: u64,
    },
    /// The host waits to read the device's memory.
    HostRead {
        /// What for.
        name: &'static str,
        /// How often.
        reads: u64,
    },
    /// It starts to copy tensors to its host or back, beside everything else.
    Transfer {
        /// Its number among the rank's.
        number: u64,
        /// Over the link.
        bytes: Bytes,
        /// Whether they leave the device.
        leaves: bool,
        /// Where.
        at: At,
    },
    /// The device waits for a transfer to end.
    Transferred {
        /// Its number among the rank's.
        number: u64,
    },
    /// Memory of the host is taken for a tensor that leaves, which counts as what is told.
    TakenOnHost(Allocation),
    /// Memory of the host is given back.
    GivenOnHost(Allocation),
    /// What comes next waits for another pipeline rank until then.
    NotBefore(Instant),
    /// Memory is taken for a tensor.
    Allocated(Allocation),
    /// A tensor's memory is given back.
    Freed(Allocation),
}

/// Tensors that are alive at the peak, alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Alive {
    /// What they count as.
    pub class: TensorClass,
    /// What they are, or the op they were allocated for.
    pub name: String,
    /// Size of each, in bytes.
    pub bytes: Bytes,
    /// How many.
    pub count: u64,
    /// Size of all, in bytes.
    pub total_bytes: Bytes,
}

/// Collectives of one kind, group and size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Calls {
    /// Name of the group.
    pub group: String,
    /// What it does.
    pub kind: CollectiveKind,
    /// Ranks that take part.
    pub ranks: u32,
    /// Full buffer of one rank in each call.
    pub bytes: Bytes,
    /// Calls in the step.
    pub calls: u64,
    /// Bytes over all calls.
    pub total_bytes: Bytes,
}

/// One rank's step without devices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Walk {
    /// The rank.
    pub rank: u32,
    /// The most bytes of tensors that are alive at once.
    pub peak_bytes: Bytes,
    /// The most bytes of tensors in memory of the host at once; absent where nothing leaves the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<Bytes>,
    /// Those of the device by class; `overhead` is what the plan says is taken beside tensors, and no part of
    /// the peak.
    pub bytes: ByClass<Bytes>,
    /// The largest of what is alive at the peak, alike tensors together, the largest first.
    pub largest: Vec<Alive>,
    /// Every collective, by group, kind and size.
    pub collectives: Vec<Calls>,
    /// How often the host waits to read the device's memory.
    pub host_waits: u64,
    /// Ops in the step.
    pub ops: u64,
    /// Predicted time of the step on this rank.
    pub step_s: f64,
}

/// A walk with its trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Walked {
    /// Totals.
    pub walk: Walk,
    /// Spans with predicted times.
    pub trace: Trace,
    /// Bytes alive by class, as they change.
    pub memory: Vec<MemorySample>,
}

/// Entries of [`Walk::largest`].
const LARGEST: usize = 12;

/// Plays what a rank sets up and then does in a step.
pub fn play(rank: u32, setup: &[Event], step: &[Event], costs: &Costs, stack: &Stack) -> Walked {
    let mut player = Player::new(rank, costs, stack);
    for event in setup {
        player.account(event);
    }
    player.peak = (player.live.total(), player.live, 0);
    player.sample();
    for (index, event) in step.iter().enumerate() {
        player.account(event);
        if player.live.total() > player.peak.0 {
            player.peak = (player.live.total(), player.live, index + 1);
        }
        player.time(event);
    }
    player.sample();
    let (peak_bytes, bytes, until) = player.peak;
    Walked {
        walk: Walk {
            rank,
            peak_bytes,
            host_bytes: (player.on_host[1] > Bytes::ZERO).then_some(player.on_host[1]),
            bytes,
            largest: largest(setup, &step[..until]),
            collectives: player.calls(),
            host_waits: player.host_waits,
            ops: player.ops,
            step_s: [player.communication, player.replicas, player.tokens]
                .into_iter()
                .fold(player.compute, f64::max),
        },
        trace: Trace {
            origin: Origin::Predicted,
            spans: player.spans,
        },
        memory: player.samples,
    }
}

/// A kind of collective with its size, for counting.
type CallKey = (Rc<str>, CollectiveKind, u32, Bytes);

struct Player<'a> {
    rank: u32,
    costs: &'a Costs,
    stack: &'a Stack,
    live: ByClass<Bytes>,
    /// Bytes in memory of the host, and the most so far.
    on_host: [Bytes; 2],
    /// Bytes, by class, after how many events of the step.
    peak: (Bytes, ByClass<Bytes>, usize),
    /// When each lane is free, those of collectives over replicas and of tokens, which hold up no others, by themselves, and when the
    /// host has issued what it was asked for, in seconds.
    compute: f64,
    communication: f64,
    replicas: f64,
    tokens: f64,
    host: f64,
    /// When collectives over replicas run, with the share of multiprocessors that each takes.
    beside: Vec<([f64; 2], f64)>,
    /// When the stream of copies is free, and when transfers end that were started.
    copies: f64,
    copied: BTreeMap<u64, f64>,
    /// When collectives end that were started.
    ends: BTreeMap<u64, f64>,
    calls: BTreeMap<CallKey, u64>,
    host_waits: u64,
    ops: u64,
    spans: Vec<TraceSpan>,
    samples: Vec<MemorySample>,
}

impl<'a> Player<'a> {
    fn new(rank: u32, costs: &'a Costs, stack: &'a Stack) -> Self {
        Self {
            rank,
            costs,
            stack,
            live: ByClass::default(),
            on_host: [Bytes::ZERO; 2],
            copies: 0.0,
            copied: BTreeMap::new(),
            peak: (Bytes::ZERO, ByClass::default(), 0),
            compute: 0.0,
            communication: 0.0,
            replicas: 0.0,
            tokens: 0.0,
            host: 0.0,
            beside: Vec::new(),
            ends: BTreeMap::new(),
            calls: BTreeMap::new(),
            host_waits: 0,
            ops: 0,
            spans: Vec::new(),
            samples: Vec::new(),
        }
    }

    /// What an op loses in its time to collectives beside it: of what is bound by multiprocessors, the share that they take.
    fn slower(&mut self, op: &Op, [start, end]: [f64; 2]) -> f64 {
        self.beside.retain(|([_, until], _)| *until > start);
        if !op.is_bound_by_sms() {
            return 0.0;
        }
        let lost = |([from, until], taken): &([f64; 2], f64)| {
            (until.min(end) - from.max(start)).max(0.0) * taken
        };
        self.beside.iter().map(lost).sum()
    }

    fn account(&mut self, event: &Event) {
        match event {
            Event::Allocated(tensor) => self.live[tensor.class] += tensor.bytes,
            Event::Freed(tensor) => {
                let live = self.live[tensor.class];
                self.live[tensor.class] = live - tensor.bytes;
            }
            Event::TakenOnHost(tensor) => {
                let [now, most] = &mut self.on_host;
                *now += tensor.bytes;
                *most = (*most).max(*now);
            }
            Event::GivenOnHost(tensor) => self.on_host[0] -= tensor.bytes,
            _ => {}
        }
    }

    fn time(&mut self, event: &Event) {
        let launch = self.stack.common().launch.0;
        match event {
            Event::Op {
                op, category, at, ..
            } => {
                self.ops += 1;
                self.host += launch;
                let start = self.compute.max(self.host);
                let alone = self.costs.op(op).time.0;
                self.compute = start + alone + self.slower(op, [start, start + alone]);
                let span = (Lane::Compute, op.stem(), *category, *at);
                self.span(span, Some(Key::Op(*op)), [start, self.compute]);
                self.sample();
            }
            Event::Started {
                number,
                group,
                collective,
                seconds,
                category,
                at,
            } => {
                self.host += launch;
                let ready = self.compute.max(self.host);
                let price = seconds.unwrap_or_else(|| self.costs.collective(collective).time);
                // Messages between stages go beside collectives.
                let message = *category == Category::PpComm;
                let lane = if GroupKind::over_replicas(group) {
                    &mut self.replicas
                } else if GroupKind::sends_tokens(group) {
                    &mut self.tokens
                } else {
                    &mut self.communication
                };
                let start = if message { ready } else { ready.max(*lane) };
                let end = start + price.0;
                if !message {
                    *lane = end;
                }
                if GroupKind::over_replicas(group) {
                    let taken = self.costs.taken(collective);
                    self.beside.push(([start, end], taken));
                }
                self.ends.insert(*number, end);
                let span = (Lane::Communication, collective.kind.stem(), *category, *at);
                let key = Some(Key::Collective(*collective));
                self.span(span, key, [start, end]);
                let Collective {
                    kind, ranks, bytes, ..
                } = *collective;
                let call = (Rc::clone(group), kind, ranks, bytes);
                *self.calls.entry(call).or_default() += 1;
            }
            Event::Awaited { number } => {
                let end = self.ends.remove(number).unwrap_or(0.0);
                self.compute = self.compute.max(end);
            }
            Event::HostRead { name, reads } => {
                self.host_waits += reads;
                let start = self.compute.max(self.host);
                let end = start + self.stack.common().sync.0 * *reads as f64;
                (self.host, self.compute) = (end, end);
                let span = (Lane::Host, *name, Category::Host, At::default());
                self.span(span, None, [start, end]);
            }
            Event::Transfer {
                number,
                bytes,
                leaves,
                at,
            } => {
                self.host += launch;
                let start = self.compute.max(self.host).max(self.copies);
                self.copies = start + self.costs.transfer(*bytes, *leaves).time.0;
                self.copied.insert(*number, self.copies);
                let span = (Lane::Communication, "host_copy", Category::Offload, *at);
                self.span(span, None, [start, self.copies]);
            }
            Event::Transferred { number } => {
                let end = self.copied.remove(number).unwrap_or(0.0);
                self.compute = self.compute.max(end);
            }
            Event::NotBefore(instant) => {
                self.compute = self.compute.max(instant.0 as f64 * 1e-9);
            }
            Event::Allocated(_)
            | Event::Freed(_)
            | Event::TakenOnHost(_)
            | Event::GivenOnHost(_) => {}
        }
    }

    fn span(
        &mut self,
        (lane, name, category, at): (Lane, &'static str, Category, At),
        key: Option<Key>,
        [start, end]: [f64; 2],
    ) {
        let instant = |seconds: f64| Instant((seconds * 1e9).round() as u64);
        self.spans.push(TraceSpan {
            rank: self.rank,
            lane,
            name: name.to_owned(),
            category,
            key,
            start: instant(start),
            end: instant(end),
            microbatch: at.microbatch,
            layer: at.layer,
            step: None,
        });
    }

    /// Notes what is alive now.
    fn sample(&mut self) {
        let at = Instant((self.compute * 1e9).round() as u64);
        if self
            .samples
            .last()
            .is_none_or(|last| last.bytes != self.live)
        {
            self.samples.push(MemorySample {
                rank: self.rank,
                at,
                bytes: self.live,
            });
        }
    }

    fn calls(&self) -> Vec<Calls> {
        let calls = self.calls.iter();
        calls
            .map(|((group, kind, ranks, bytes), &calls)| Calls {
                group: group.to_string(),
                kind: *kind,
                ranks: *ranks,
                bytes: *bytes,
                calls,
                total_bytes: *bytes * calls,
            })
            .collect()
    }
}

/// The largest of what some events leave alive. A tensor of the step without a name is known by the op
/// after it.
fn largest(setup: &[Event], step: &[Event]) -> Vec<Alive> {
    let mut alive: BTreeMap<u64, (TensorClass, Bytes, String)> = BTreeMap::new();
    let mut unnamed: Vec<u64> = Vec::new();
    for (index, event) in setup.iter().chain(step).enumerate() {
        if index == setup.len() {
            // Each is what its class is.
            unnamed.clear();
        }
        match event {
            Event::Allocated(tensor) => {
                let name = tensor.name.as_deref().unwrap_or_default().to_owned();
                if name.is_empty() {
                    unnamed.push(tensor.id);
                }
                alive.insert(tensor.id, (tensor.class, tensor.bytes, name));
            }
            Event::Freed(tensor) => {
                alive.remove(&tensor.id);
            }
            Event::Op { op, .. } => {
                for id in unnamed.drain(..) {
                    if let Some((_, _, name)) = alive.get_mut(&id) {
                        op.stem().clone_into(name);
                    }
                }
            }
            _ => {}
        }
    }
    let mut alike: BTreeMap<(TensorClass, String, Bytes), u64> = BTreeMap::new();
    for (_, (class, bytes, name)) in alive {
        let name = if name.is_empty() {
            class.name().to_owned()
        } else {
            name
        };
        *alike.entry((class, name, bytes)).or_default() += 1;
    }
    let mut all: Vec<Alive> = alike
        .into_iter()
        .map(|((class, name, bytes), count)| Alive {
            class,
            name,
            bytes,
            count,
            total_bytes: bytes * count,
        })
        .collect();
    all.sort_by_key(|alive| std::cmp::Reverse(alive.total_bytes));
    all.truncate(LARGEST);
    all
}
