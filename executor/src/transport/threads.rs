//! The transport over a mailbox, between rank threads and, on the CPU, between processes: tensors into
//! posts and back. Those in memory of a GPU stay there ([`device`]); of the CPU's the values travel.
//!
//! A reduction is cut into one shard a member. Whoever waits computes every shard that nobody has
//! begun, its own first, each as the sum of the posts in rank order: the members share the work, the
//! bits do not depend on who did it, and awaiting two collectives in different orders on different
//! ranks cannot deadlock, since no shard needs a particular member.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moefold_kernels::Tensor;
use moefold_profiles::Dtype;

use super::mail::Mail;
use super::mailbox::{Call, Collected, Group, GroupKey, Payload, Post, Step};
use super::shelf::Shelf;
use super::{Exchange, Pending, Place, Reduce, Transport, TransportError};

mod device;

pub(super) use device::Flights;

/// Name of the reduction to the maximum.
pub(super) const ALL_REDUCE_MAX: &str = "all_reduce (max)";

/// Name of the exchange of words.
pub(super) const WORDS: &str = "gather_words";

/// One member's end of a group.
#[derive(Debug)]
pub(super) struct Threads {
    mail: Rc<dyn Mail>,
    group: Arc<Group>,
    member: usize,
    next: Cell<u64>,
    last_call: Rc<RefCell<Option<String>>>,
    waited_ns: Rc<Cell<u64>>,
    /// Collectives of the rank on a GPU, of all its groups.
    flights: Flights,
    /// Memory of the rank's posts.
    shelf: Shelf,
    /// Where messages of this member go and come from, by sender and receiver.
    lines: RefCell<BTreeMap<[usize; 2], Rc<Self>>>,
}

impl Threads {
    pub(super) fn join(
        mail: Rc<dyn Mail>,
        key: &GroupKey,
        member: usize,
        last_call: Rc<RefCell<Option<String>>>,
        waited_ns: Rc<Cell<u64>>,
        flights: Flights,
        shelf: Shelf,
    ) -> Self {
        Self {
            group: mail.group(key),
            mail,
            member,
            next: Cell::new(0),
            last_call,
            waited_ns,
            flights,
            shelf,
            lines: RefCell::default(),
        }
    }

    /// The group of the two members that messages from one to the other pass through, the sender first. Each
    /// has an order of its own.
    fn line(&self, from: usize, to: usize) -> Rc<Self> {
        let make = || {
            let key = &self.group.key;
            let key = GroupKey {
                name: format!("{} from {from} to {to}", key.name),
                ranks: vec![key.ranks[from], key.ranks[to]],
                instance: key.instance,
            };
            Rc::new(Self::join(
                Rc::clone(&self.mail),
                &key,
                usize::from(self.member == to),
                Rc::clone(&self.last_call),
                Rc::clone(&self.waited_ns),
                self.flights.clone(),
                self.shelf.clone(),
            ))
        };
        let mut lines = self.lines.borrow_mut();
        Rc::clone(lines.entry([from, to]).or_insert_with(make))
    }

    /// Posts this member's part of the group's next collective.
    pub(super) fn post(
        &self,
        call: Call,
        data: Payload,
        rows: Vec<usize>,
    ) -> Result<Started, TransportError> {
        let post = Post {
            call,
            data,
            rows,
            collects: true,
        };
        self.post_all(post)
    }

    /// The same of a member that collects nothing.
    pub(super) fn tell(&self, call: Call, data: Payload) -> Result<Started, TransportError> {
        let post = Post {
            call,
            data,
            rows: Vec::new(),
            collects: false,
        };
        self.post_all(post)
    }

    fn post_all(&self, post: Post) -> Result<Started, TransportError> {
        let sequence = self.next.get();
        self.next.set(sequence + 1);
        let started = Started {
            mail: Rc::clone(&self.mail),
            group: Arc::clone(&self.group),
            member: self.member,
            sequence,
            call: post.call.clone(),
            waited_ns: Rc::clone(&self.waited_ns),
            flights: self.flights.clone(),
            shelf: self.shelf.clone(),
        };
        *self.last_call.borrow_mut() = Some(started.place().to_string());
        self.mail.post(&self.group, sequence, self.member, post)?;
        Ok(started)
    }
}

impl Transport for Threads {
    fn start(&self, exchange: Exchange) -> Result<Pending, TransportError> {
        let on_device = exchange.tensor().device().properties().is_some();
        let line = match exchange {
            Exchange::Send { to, .. } => Some(self.line(self.member, to)),
            Exchange::Receive { from, .. } => Some(self.line(from, self.member)),
            _ => None,
        };
        let group = line.as_deref().unwrap_or(self);
        if on_device {
            device::start(group, exchange)
        } else {
            group.start_on_host(exchange)
        }
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<Rc<[u64]>>, TransportError> {
        let call = Call {
            what: WORDS,
            element: "u64",
            size: 0,
            root: 0,
        };
        let started = self.post(call, Payload::U64(words.to_vec()), Vec::new())?;
        let all = started.collect()?;
        let words_of = |post: &Arc<Post>| match &post.data {
            Payload::U64(words) => words.as_slice().into(),
            other => unreachable!("calls were matched, yet {other:?} is not words"),
        };
        Ok(all.posts.iter().map(words_of).collect())
    }
}

impl Threads {
    /// A copy of a tensor's values.
    fn read(&self, tensor: &Tensor) -> Payload {
        if tensor.dtype() == Dtype::I32 {
            return Payload::I32(tensor.to_i32());
        }
        let mut values = self.shelf.take(tensor.len());
        tensor.copy_to_f32(&mut values);
        Payload::F32(values)
    }

    /// Starts a collective on the CPU's tensors, whose values travel.
    fn start_on_host(&self, exchange: Exchange) -> Result<Pending, TransportError> {
        let call = call_of(&exchange);
        let pending = match exchange {
            Exchange::AllReduce { tensor, reduce } => {
                let started = self.post(call, self.read(&tensor), Vec::new())?;
                Pending::new(move || started.all_reduce(&tensor, reduce))
            }
            Exchange::AllGather { src, dst } => {
                let started = self.post(call, self.read(&src), Vec::new())?;
                let len = src.len();
                Pending::new(move || {
                    for (i, post) in started.collect()?.posts.iter().enumerate() {
                        write(&dst, i * len, &post.data, 0..len);
                    }
                    Ok(())
                })
            }
            Exchange::ReduceScatter { src, dst } => {
                let started = self.post(call, self.read(&src), Vec::new())?;
                Pending::new(move || started.reduce_scatter(&dst))
            }
            Exchange::AllToAll {
                src,
                send_rows,
                dst,
                recv_rows,
                ..
            } => {
                let width: usize = src.dims()[1..].iter().product();
                let started = self.post(call, self.read(&src), send_rows)?;
                Pending::new(move || {
                    let all = started.collect()?;
                    let mut at = 0;
                    for (other, post) in all.posts.iter().enumerate() {
                        let rows = post.rows[started.member];
                        if rows != recv_rows[other] {
                            return Err(started.refuse(other, recv_rows[other], rows));
                        }
                        let before: usize = post.rows[..started.member].iter().sum();
                        let sent = before * width..(before + rows) * width;
                        write(&dst, at, &post.data, sent);
                        at += rows * width;
                    }
                    Ok(())
                })
            }
            Exchange::Broadcast { tensor, root } => {
                let data = if self.member == root {
                    self.read(&tensor)
                } else {
                    Payload::U64(Vec::new())
                };
                let started = self.post(call, data, Vec::new())?;
                Pending::new(move || {
                    let all = started.collect()?;
                    if started.member != root {
                        write(&tensor, 0, &all.posts[root].data, 0..tensor.len());
                    }
                    Ok(())
                })
            }
            Exchange::Shift { src, dst } => {
                let started = self.post(call, self.read(&src), Vec::new())?;
                Pending::new(move || {
                    let all = started.collect()?;
                    write(&dst, 0, &all.posts[started.before()].data, 0..dst.len());
                    Ok(())
                })
            }
            // The members of a line are the sender and the receiver.
            Exchange::Send { tensor, .. } => {
                self.tell(call, self.read(&tensor))?;
                Pending::new(|| Ok(()))
            }
            Exchange::Receive { tensor, .. } => {
                let started = self.post(call, Payload::U64(Vec::new()), Vec::new())?;
                Pending::new(move || {
                    let all = started.collect()?;
                    write(&tensor, 0, &all.posts[0].data, 0..tensor.len());
                    Ok(())
                })
            }
        };
        Ok(pending)
    }
}

/// A collective that this member has posted its part of.
#[derive(Debug)]
pub(super) struct Started {
    mail: Rc<dyn Mail>,
    group: Arc<Group>,
    member: usize,
    sequence: u64,
    call: Call,
    waited_ns: Rc<Cell<u64>>,
    flights: Flights,
    shelf: Shelf,
}

impl Started {
    fn size(&self) -> usize {
        self.group.key.ranks.len()
    }

    fn all_reduce(&self, tensor: &Tensor, reduce: Reduce) -> Result<(), TransportError> {
        let all = self.collect()?;
        let shards = shard_ranges(tensor.len(), self.size());
        for i in (0..shards.len()).map(|i| (i + self.member) % shards.len()) {
            all.shards[i].get_or_init(|| {
                let mut shard = self.shelf.take(shards[i].len());
                combine(&all, shards[i].clone(), reduce, &mut shard);
                shard
            });
        }
        for (shard, range) in all.shards.iter().zip(shards) {
            let shard = shard.get().expect("every shard was initialized above");
            write_f32(tensor, range.start, shard);
        }
        Ok(())
    }

    fn reduce_scatter(&self, dst: &Tensor) -> Result<(), TransportError> {
        let all = self.collect()?;
        let own = self.member * dst.len();
        let mut sum = vec![0.0; BLOCK.min(dst.len())];
        for at in (0..dst.len()).step_by(BLOCK) {
            let sum = &mut sum[..BLOCK.min(dst.len() - at)];
            let range = own + at..own + at + sum.len();
            combine(&all, range, Reduce::Sum, sum);
            write_f32(dst, at, sum);
        }
        Ok(())
    }

    /// The member before this one, in a ring.
    fn before(&self) -> usize {
        (self.member + self.size() - 1) % self.size()
    }

    /// The member after it.
    fn after(&self) -> usize {
        (self.member + 1) % self.size()
    }

    fn place(&self) -> Place {
        Place {
            op: self.call.to_string(),
            group: self.group.key.to_string(),
            sequence: self.sequence,
        }
    }

    /// All members' posts; what it takes until the last is there counts as waiting.
    pub(super) fn collect(&self) -> Result<Collected, TransportError> {
        let begun = Instant::now();
        let collected = if self.flights.is_empty() {
            self.mail
                .collect(&self.group, self.sequence, self.member, &self.call)
        } else {
            self.collect_in_flight()
        };
        let waited_ns = begun.elapsed().as_nanos() as u64;
        self.waited_ns.set(self.waited_ns.get() + waited_ns);
        collected
    }

    /// The same, going on with what is in flight meanwhile: others may wait for that before they come.
    fn collect_in_flight(&self) -> Result<Collected, TransportError> {
        let begun = Instant::now();
        loop {
            let heard = self.mail.shared().events();
            self.flights.advance()?;
            let waited = begun.elapsed();
            if let Some(collected) = self.look(0, waited)? {
                return Ok(collected);
            }
            self.mail.shared().listen(heard, waited);
        }
    }

    /// All members' posts of one meeting, if they are there.
    fn look(&self, meeting: u32, waited: Duration) -> Result<Option<Collected>, TransportError> {
        let step = Step {
            sequence: self.sequence,
            meeting,
        };
        self.mail
            .shared()
            .look(&self.group, step, self.member, &self.call, waited)
    }

    /// Posts this member's part of a later meeting, which it collects or not.
    fn meet(&self, meeting: u32, data: Payload, collects: bool) -> Result<(), TransportError> {
        let post = Post {
            call: self.call.clone(),
            data,
            rows: Vec::new(),
            collects,
        };
        let step = Step {
            sequence: self.sequence,
            meeting,
        };
        self.mail
            .shared()
            .post_at(&self.group, step, self.member, post)
    }

    fn refuse(&self, other: usize, expected_rows: usize, sent_rows: usize) -> TransportError {
        let rank = self.group.key.ranks[self.member];
        let error = TransportError::Rows {
            rank,
            place: self.place(),
            other_rank: self.group.key.ranks[other],
            expected_rows,
            sent_rows,
        };
        self.mail.poison(rank, error.to_string());
        error
    }
}

/// One range a member, of nearly equal lengths; the first ones are longer.
fn shard_ranges(len: usize, size: usize) -> Vec<Range<usize>> {
    (0..size)
        .map(|i| len * i / size..len * (i + 1) / size)
        .collect()
}

/// Elements that are summed at a time: they stay in a core's own cache.
const BLOCK: usize = 1 << 13;

/// The reduction of one range of all posts, in member order.
fn combine(all: &Collected, range: Range<usize>, reduce: Reduce, result: &mut [f32]) {
    let mut parts = all.posts.iter().map(|post| match &post.data {
        Payload::F32(data) => &data[range.clone()],
        other => unreachable!("only f32 is reduced, not {other:?}"),
    });
    result.copy_from_slice(parts.next().expect("a group has members"));
    for part in parts {
        let pairs = result.iter_mut().zip(part);
        match reduce {
            Reduce::Sum => pairs.for_each(|(a, &b)| *a += b),
            Reduce::Max => pairs.for_each(|(a, &b)| *a = a.max(b)),
        }
    }
}

fn element(tensor: &Tensor) -> &'static str {
    match tensor.dtype() {
        Dtype::F32 => "f32",
        Dtype::Bf16 => "bf16",
        Dtype::I32 => "i32",
        other => unreachable!("no device has {other} tensors"),
    }
}

/// What this member asks of its group.
fn call_of(exchange: &Exchange) -> Call {
    let tensor = exchange.tensor();
    let call = Call {
        what: exchange.stem(),
        element: element(tensor),
        size: tensor.len(),
        root: 0,
    };
    match exchange {
        Exchange::AllReduce { reduce, .. } => Call {
            what: match reduce {
                Reduce::Sum => call.what,
                Reduce::Max => ALL_REDUCE_MAX,
            },
            ..call
        },
        Exchange::AllGather { .. }
        | Exchange::ReduceScatter { .. }
        | Exchange::Shift { .. }
        | Exchange::Send { .. }
        | Exchange::Receive { .. } => call,

        Exchange::AllToAll { src, .. } => Call {
            size: src.dims()[1..].iter().product(),
            ..call
        },
        Exchange::Broadcast { root, .. } => Call {
            root: *root,
            ..call
        },
    }
}

/// Writes a range of a post to `tensor` from element `at`.
fn write(tensor: &Tensor, at: usize, data: &Payload, range: Range<usize>) {
    match data {
        Payload::F32(data) => write_f32(tensor, at, &data[range]),
        Payload::I32(data) => {
            if !range.is_empty() {
                tensor.view(at, &[range.len()]).copy_from_i32(&data[range]);
            }
        }
        other => unreachable!("{other:?} is not what a tensor holds"),
    }
}

fn write_f32(tensor: &Tensor, at: usize, data: &[f32]) {
    if !data.is_empty() {
        tensor.view(at, &[data.len()]).copy_from_f32(data);
    }
}
