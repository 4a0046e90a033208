//! Collectives of rank threads on one GPU: tensors stay where they are, and ranks read each other's.
//!
//! Members meet through the mailbox several times, and each time say how far their streams have come:
//! first what they offer, then that they have read it. A member that has met the others launches its
//! next piece of work on its communication stream, behind the events they gave, and goes on; no host
//! waits for a device. A reduction is cut into one shard a member, who sums it in member order, in f32,
//! over its own part of the tensor, where nobody else reads; an all-reduce then gathers the shards.
//! Nothing is staged, so nothing is allocated. The last meeting is what lets a tensor be written again:
//! by then everybody's reads of it are queued, and the member's stream waits for them.
//!
//! Of a message, the receiver has it when its copy is done; the sender is told that at a second meeting, and
//! keeps its tensor until then.
//!
//! A member that waits, for whatever, advances all that it has in flight as far as that goes
//! ([`Flights::advance`]): so it does not matter in which order members wait.
//!
//! Where a member fails in the midst, the others may still come to read what it offered before they hear
//! of that: its tensors and its device stay until every rank has ended ([`Flights::abandon`]).

use std::cell::{Cell, OnceCell, RefCell};
use std::ops::{ControlFlow, Range};
use std::rc::Rc;
use std::time::{Duration, Instant};

use moefold_kernels::{Device, Event, Tensor, reduce};

use super::{Started, Threads, call_of};
use crate::transport::mailbox::{Collected, Payload};
use crate::transport::{Carried, Exchange, Pending, Reduce, TransportError};

/// Elements whose multiples shards begin at, so that they are read 16 bytes at a time.
const GRAIN: usize = 8;

/// What one rank has in flight, over all its groups. Clones share it.
#[derive(Debug, Clone, Default)]
pub(in crate::transport) struct Flights(Rc<RefCell<Vec<Rc<Flight>>>>);

impl Flights {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Takes every collective as far as the other members' posts allow.
    pub(super) fn advance(&self) -> Result<(), TransportError> {
        // None of them starts another.
        let flights = self.0.borrow().clone();
        for flight in flights {
            flight.advance(Duration::ZERO)?;
        }
        self.0
            .borrow_mut()
            .retain(|flight| flight.done.get().is_none());
        Ok(())
    }

    /// Waits until the device is done with what it was asked for of collectives that did not end.
    pub(in crate::transport) fn synchronize(&self) {
        self.0
            .borrow()
            .iter()
            .for_each(|flight| flight.device.synchronize());
    }

    /// Lets go of collectives that will not end: with them, of the tensors that others may read.
    pub(in crate::transport) fn abandon(&self) {
        // A flight has a clone of these, and may be the last to have its device.
        let flights = self.0.take();
        drop(flights);
    }
}

/// A collective of which this member has posted its part.
#[derive(Debug)]
struct Flight {
    started: Started,
    exchange: Exchange,
    device: Device,
    /// When its tensors were ready here.
    since: Event,
    /// What the other members offered.
    theirs: RefCell<Vec<Option<Tensor>>>,
    /// The meeting that comes next.
    meeting: Cell<u32>,
    /// When all that the first piece of work reads was there.
    begun: OnceCell<Event>,
    /// When everybody was done with everybody's tensors.
    done: OnceCell<Event>,
}

/// Posts what this member offers of a collective on its device's memory.
pub(super) fn start(threads: &Threads, exchange: Exchange) -> Result<Pending, TransportError> {
    let offered = match &exchange {
        Exchange::Broadcast { tensor, root } => (threads.member == *root).then_some(tensor),
        Exchange::Receive { .. } => None,
        other => Some(other.tensor()),
    };
    let device = exchange.tensor().device().clone();
    let data = match offered {
        Some(tensor) => Payload::Offer(tensor.offer()),
        None => Payload::Event(device.record_event()),
    };
    let since = match &data {
        Payload::Offer(offer) => offer.ready().clone(),
        _ => device.record_event(),
    };
    let rows = match &exchange {
        Exchange::AllToAll { send_rows, .. } => send_rows.clone(),
        _ => Vec::new(),
    };
    let flight = Rc::new(Flight {
        started: threads.post(call_of(&exchange), data, rows)?,
        exchange,
        device,
        since,
        theirs: RefCell::default(),
        meeting: Cell::new(0),
        begun: OnceCell::new(),
        done: OnceCell::new(),
    });
    let flights = &threads.flights;
    flights.0.borrow_mut().push(Rc::clone(&flight));
    flights.advance()?;
    Ok(Pending::on_device(move || flight.wait()))
}

impl Flight {
    /// Lets the compute stream see the result, and go on beside collectives that come after it. The host
    /// waits for the other members' hosts at most.
    fn wait(&self) -> Result<Carried, TransportError> {
        let Started {
            mail,
            flights,
            waited_ns,
            ..
        } = &self.started;
        let mailbox = mail.shared();
        let begun = Instant::now();
        let done = loop {
            let heard = mailbox.events();
            self.advance(begun.elapsed())?;
            flights.advance()?;
            if let Some(done) = self.done.get() {
                break done.clone();
            }
            let listening = Instant::now();
            mailbox.listen(heard, begun.elapsed());
            waited_ns.set(waited_ns.get() + listening.elapsed().as_nanos() as u64);
        };
        self.device.wait_for(&done);
        let begun = self.begun.get().expect("what is done has begun").clone();
        Ok(Carried { begun, done })
    }

    /// Goes from meeting to meeting as long as all members are there.
    fn advance(&self, waited: Duration) -> Result<(), TransportError> {
        while self.done.get().is_none() {
            let meeting = self.meeting.get();
            let Some(all) = self.started.look(meeting, waited)? else {
                return Ok(());
            };
            if meeting == 0 {
                self.check_rows(&all)?;
            }
            let work = || self.after(meeting, &all);
            let stream = self.started.group.key.stream();
            match self.device.beside_since(stream, &self.since, work) {
                ControlFlow::Continue(event) => {
                    self.started
                        .meet(meeting + 1, Payload::Event(event), true)?;
                }
                ControlFlow::Break(event) => {
                    if let Exchange::Receive { .. } = self.exchange {
                        // Tells the sender, and is told nothing.
                        let read = Payload::Event(event.clone());
                        self.started.meet(meeting + 1, read, false)?;
                    }
                    self.done.get_or_init(|| event);
                }
            }
            self.meeting.set(meeting + 1);
        }
        Ok(())
    }

    /// Launches what follows a meeting, and the event when that is done: for the next meeting, or after
    /// the last the event when all is.
    fn after(&self, meeting: u32, all: &Collected) -> ControlFlow<Event, Event> {
        let others = all.posts.iter().enumerate();
        let others = others.map(|(member, post)| self.hears(meeting, member).then_some(&post.data));
        if meeting == 0 {
            *self.theirs.borrow_mut() = others
                .map(|data| match data {
                    Some(Payload::Offer(offer)) => Some(self.device.accept(offer)),
                    _ => None,
                })
                .collect();
            self.begun.get_or_init(|| self.device.record_event());
        } else {
            for data in others.flatten() {
                let Payload::Event(event) = data else {
                    unreachable!("calls were matched, yet {data:?} is not an event");
                };
                self.device.wait_for(event);
            }
        }
        match (&self.exchange, meeting) {
            (Exchange::AllReduce { tensor, reduce }, 0) => {
                let shard = self.shards(tensor.len()).swap_remove(self.started.member);
                let own = tensor.view(shard.start, &[shard.len()]);
                self.reduce(*reduce, tensor, shard, &own);
            }
            (Exchange::AllReduce { tensor, .. }, 1) => {
                let shards = self.shards(tensor.len());
                Self::copy(shards.into_iter().enumerate().map(|(member, shard)| {
                    let part = |of: &Tensor| of.view(shard.start, &[shard.len()]);
                    Some((part(&self.of(member, tensor)?), part(tensor)))
                }));
            }
            (Exchange::AllGather { src, dst }, 0) => {
                let len = src.len();
                Self::copy((0..self.started.size()).map(|member| {
                    let from = self.of(member, src)?;
                    Some((from.reshape(&[len]), dst.view(member * len, &[len])))
                }));
            }
            (Exchange::ReduceScatter { src, dst }, 0) => {
                let start = self.started.member * dst.len();
                self.reduce(Reduce::Sum, src, start..start + dst.len(), dst);
            }
            (
                Exchange::AllToAll {
                    src,
                    dst,
                    recv_rows,
                    ..
                },
                0,
            ) => {
                let width: usize = src.dims()[1..].iter().product();
                let mut at = 0;
                Self::copy(all.posts.iter().enumerate().map(|(member, post)| {
                    let before: usize = post.rows[..self.started.member].iter().sum();
                    let len = recv_rows[member] * width;
                    let to = dst.view(at, &[len]);
                    at += len;
                    Some((self.of(member, src)?.view(before * width, &[len]), to))
                }));
            }
            (Exchange::Broadcast { tensor, root }, 0) => {
                if self.started.member != *root {
                    Self::copy(
                        [self.of(*root, tensor).map(|from| (from, tensor.clone()))].into_iter(),
                    );
                }
            }
            (Exchange::Shift { src, dst }, 0) => {
                let from = self.of(self.started.before(), src);
                Self::copy([from.map(|from| (from, dst.clone()))].into_iter());
            }
            (Exchange::Send { .. }, 0) => {}
            (other, _) => {
                if let Exchange::Receive { tensor, .. } = other {
                    let sent = self.of(0, tensor).map(|sent| (sent, tensor.clone()));
                    Self::copy([sent].into_iter());
                }
                self.theirs.borrow_mut().clear();
                return ControlFlow::Break(self.device.record_event());
            }
        }
        ControlFlow::Continue(self.device.record_event())
    }

    /// Whether a meeting is with another member: on a ring first with the one that is read, then with the one
    /// that reads.
    fn hears(&self, meeting: u32, member: usize) -> bool {
        let is_heard = match self.exchange {
            Exchange::Shift { .. } if meeting == 0 => member == self.started.before(),
            Exchange::Shift { .. } => member == self.started.after(),
            _ => true,
        };
        is_heard && member != self.started.member
    }

    /// What a member offered, or `own` of this member itself.
    fn of(&self, member: usize, own: &Tensor) -> Option<Tensor> {
        if member == self.started.member {
            return Some(own.clone());
        }
        self.theirs.borrow()[member].clone()
    }

    /// Reduces one range of all members' tensors to `dst`, which may be this range of `own`.
    fn reduce(&self, how: Reduce, own: &Tensor, range: Range<usize>, dst: &Tensor) {
        if range.is_empty() {
            return;
        }
        let part = |member| {
            let whole = self
                .of(member, own)
                .expect("every member of a reduction offers");
            whole.view(range.start, &[range.len()])
        };
        let parts: Vec<Tensor> = (0..self.started.size()).map(part).collect();
        let parts: Vec<&Tensor> = parts.iter().collect();
        match how {
            Reduce::Sum => reduce::sum_ordered(&parts, dst),
            Reduce::Max => reduce::maximum(&parts, dst),
        }
    }

    /// Copies every first over its second, but where they are the same.
    fn copy(pairs: impl Iterator<Item = Option<(Tensor, Tensor)>>) {
        let pairs: Vec<(Tensor, Tensor)> = pairs
            .flatten()
            .filter(|(from, to)| !from.is_empty() && !from.same_memory(to))
            .collect();
        let pairs: Vec<(&Tensor, &Tensor)> = pairs.iter().map(|(from, to)| (from, to)).collect();
        reduce::copy_all(&pairs);
    }

    /// One range a member, of about equal lengths.
    fn shards(&self, len: usize) -> Vec<Range<usize>> {
        let size = self.started.size();
        let start = |member: usize| {
            if member == size {
                len
            } else {
                len * member / size / GRAIN * GRAIN
            }
        };
        (0..size).map(|i| start(i)..start(i + 1)).collect()
    }

    /// Refuses rows that their sender counts otherwise.
    fn check_rows(&self, all: &Collected) -> Result<(), TransportError> {
        let Exchange::AllToAll { recv_rows, .. } = &self.exchange else {
            return Ok(());
        };
        for (other, post) in all.posts.iter().enumerate() {
            let rows = post.rows[self.started.member];
            if rows != recv_rows[other] {
                return Err(self.started.refuse(other, recv_rows[other], rows));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
