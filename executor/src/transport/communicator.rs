//! [`Communicator`]: the collectives of one process group, on tensors.
//!
//! It checks shapes (a wrong one is a programmer's error), serves groups of one by local copies, and
//! hands the rest to the group's [`Transport`].

use std::rc::Rc;

use moefold_kernels::{Tensor, elementwise};
use moefold_profiles::units::Bytes;
use moefold_profiles::{Collective, CollectiveKind};

use super::{CollectiveLog, Exchange, Pending, Reduce, Transport, TransportError};

/// One rank's end of a process group. Clones share it; members must call in the same order.
#[derive(Debug, Clone)]
pub struct Communicator {
    ranks: Rc<[u32]>,
    index: usize,
    /// Absent in a group of one.
    transport: Option<Rc<dyn Transport>>,
    /// As traces and logs call it.
    name: Rc<str>,
    /// The most members that share one memory domain.
    ranks_per_domain: u32,
    log: Option<CollectiveLog>,
}

impl Communicator {
    /// The group of one rank: every collective is a local copy.
    pub fn solo(rank: u32) -> Self {
        Self {
            ranks: Rc::new([rank]),
            index: 0,
            transport: None,
            name: "solo".into(),
            ranks_per_domain: 1,
            log: None,
        }
    }

    /// The group of `ranks`, in their order, of which the caller is number `index`; all of them in one
    /// memory domain until [`Communicator::spread`] says otherwise.
    pub fn over(name: &str, ranks: &[u32], index: usize, transport: Rc<dyn Transport>) -> Self {
        assert!(index < ranks.len(), "member {index} of {ranks:?}");
        Self {
            ranks: ranks.into(),
            index,
            transport: (ranks.len() > 1).then_some(transport),
            name: name.into(),
            ranks_per_domain: ranks.len() as u32,
            log: None,
        }
    }

    /// The same, of which at most so many members share one memory domain.
    #[must_use]
    pub fn spread(self, ranks_per_domain: u32) -> Self {
        Self {
            ranks_per_domain,
            ..self
        }
    }

    /// The same, which notes its collectives in `log`.
    pub(crate) fn noting(self, log: Option<CollectiveLog>) -> Self {
        Self { log, ..self }
    }

    /// Members.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The caller's number in the group.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The members' global ranks, in group order.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// Whether the group has one member.
    pub fn is_solo(&self) -> bool {
        self.transport.is_none()
    }

    /// Sums `tensor` over the members, in place.
    pub fn all_reduce(&self, tensor: &Tensor) -> Result<(), TransportError> {
        self.start_all_reduce(tensor)?.wait()
    }

    /// The elementwise maximum of `tensor` over the members, in place.
    pub fn all_reduce_max(&self, tensor: &Tensor) -> Result<(), TransportError> {
        self.start(Exchange::AllReduce {
            tensor: tensor.clone(),
            reduce: Reduce::Max,
        })?
        .wait()
    }

    /// Concatenates the members' `src` into `dst`, in member order.
    pub fn all_gather(&self, src: &Tensor, dst: &Tensor) -> Result<(), TransportError> {
        self.start_all_gather(src, dst)?.wait()
    }

    /// Sums the members' `src` and keeps this member's part in `dst`.
    pub fn reduce_scatter(&self, src: &Tensor, dst: &Tensor) -> Result<(), TransportError> {
        self.start_reduce_scatter(src, dst)?.wait()
    }

    /// Sends the rows of `src`, ordered by receiver, and receives into `dst`, ordered by sender.
    pub fn all_to_all(
        &self,
        src: &Tensor,
        send_rows: &[usize],
        dst: &Tensor,
        recv_rows: &[usize],
    ) -> Result<(), TransportError> {
        self.start_all_to_all(src, send_rows, dst, recv_rows)?
            .wait()
    }

    /// [`Communicator::all_to_all`] where every member sends every member as many rows.
    pub fn all_to_all_even(&self, src: &Tensor, dst: &Tensor) -> Result<(), TransportError> {
        self.start_all_to_all_even(src, dst)?.wait()
    }

    /// Copies member `root`'s `tensor` to all.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<(), TransportError> {
        self.start(Exchange::Broadcast {
            tensor: tensor.clone(),
            root,
        })?
        .wait()
    }

    /// Starts [`Communicator::all_reduce`].
    pub fn start_all_reduce(&self, tensor: &Tensor) -> Result<Pending, TransportError> {
        self.start(Exchange::AllReduce {
            tensor: tensor.clone(),
            reduce: Reduce::Sum,
        })
    }

    /// Starts [`Communicator::all_gather`].
    pub fn start_all_gather(&self, src: &Tensor, dst: &Tensor) -> Result<Pending, TransportError> {
        self.start(Exchange::AllGather {
            src: src.clone(),
            dst: dst.clone(),
        })
    }

    /// Starts [`Communicator::reduce_scatter`].
    pub fn start_reduce_scatter(
        &self,
        src: &Tensor,
        dst: &Tensor,
    ) -> Result<Pending, TransportError> {
        self.start(Exchange::ReduceScatter {
            src: src.clone(),
            dst: dst.clone(),
        })
    }

    /// Starts [`Communicator::all_to_all`].
    pub fn start_all_to_all(
        &self,
        src: &Tensor,
        send_rows: &[usize],
        dst: &Tensor,
        recv_rows: &[usize],
    ) -> Result<Pending, TransportError> {
        self.start(Exchange::AllToAll {
            src: src.clone(),
            send_rows: send_rows.to_vec(),
            dst: dst.clone(),
            recv_rows: recv_rows.to_vec(),
            even: false,
        })
    }

    /// Starts [`Communicator::all_to_all_even`]. That the counts are even has to be known to all
    /// members: a member's own do not tell, and transports go another way then.
    pub fn start_all_to_all_even(
        &self,
        src: &Tensor,
        dst: &Tensor,
    ) -> Result<Pending, TransportError> {
        let size = self.size();
        let rows = src.dims().first().copied().unwrap_or(0);
        assert_eq!(rows % size, 0, "{rows} rows for {size} members");
        self.start(Exchange::AllToAll {
            src: src.clone(),
            send_rows: vec![rows / size; size],
            dst: dst.clone(),
            recv_rows: vec![rows / size; size],
            even: true,
        })
    }

    /// Starts [`Communicator::broadcast`].
    pub fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, TransportError> {
        self.start(Exchange::Broadcast {
            tensor: tensor.clone(),
            root,
        })
    }

    /// Starts to send `src` to the next member and to receive `dst` from the one before, in a ring of all.
    pub fn start_shift(&self, src: &Tensor, dst: &Tensor) -> Result<Pending, TransportError> {
        self.start(Exchange::Shift {
            src: src.clone(),
            dst: dst.clone(),
        })
    }

    /// Starts to send `tensor` to member `to`. The receiver is not waited for, here or at any time before
    /// [`Pending::wait`]; the tensor stays as it is until then.
    pub fn start_send(&self, tensor: &Tensor, to: usize) -> Result<Pending, TransportError> {
        self.start(Exchange::Send {
            tensor: tensor.clone(),
            to,
        })
    }

    /// `tensor` becomes the next one that member `from` sends to this one.
    pub fn receive(&self, tensor: &Tensor, from: usize) -> Result<(), TransportError> {
        self.start(Exchange::Receive {
            tensor: tensor.clone(),
            from,
        })?
        .wait()
    }

    /// Every member's `counts`, in member order; their lengths may differ.
    pub fn exchange_counts(&self, counts: &[u64]) -> Result<Vec<Rc<[u64]>>, TransportError> {
        match &self.transport {
            None => Ok(vec![counts.into()]),
            Some(transport) => {
                let words = counts.len() * self.size();
                self.noted(CollectiveKind::AllGather, words, || {
                    transport.gather_words(counts)
                })
            }
        }
    }

    /// Sums host numbers over the members, in member order, in place.
    pub fn all_reduce_f64(&self, values: &mut [f64]) -> Result<(), TransportError> {
        match &self.transport {
            None => Ok(()),
            Some(transport) => {
                let words = values.len();
                self.noted(CollectiveKind::AllReduce, words, || {
                    transport.sum_numbers(values)
                })
            }
        }
    }

    /// Notes an exchange of so many words of 8 bytes between hosts, which ends when `exchange` does.
    fn noted<T>(
        &self,
        kind: CollectiveKind,
        words: usize,
        exchange: impl FnOnce() -> Result<T, TransportError>,
    ) -> Result<T, TransportError> {
        let started = self.log.as_ref().map(|log| {
            let key = Collective {
                kind,
                bytes: Bytes(8 * words as u64),
                ranks: self.ranks.len() as u32,
                ranks_per_domain: self.ranks_per_domain,
            };
            (log, log.start(&self.name, key))
        });
        let result = exchange()?;
        if let Some((log, started)) = started {
            log.ended(started);
        }
        Ok(result)
    }

    /// Waits until every member has come.
    pub fn barrier(&self) -> Result<(), TransportError> {
        let Some(transport) = &self.transport else {
            return Ok(());
        };
        transport.gather_words(&[]).map(drop)
    }

    /// The key of a collective in the cost tables.
    fn key(&self, exchange: &Exchange) -> Collective {
        let ranks = match exchange {
            Exchange::Send { .. } | Exchange::Receive { .. } | Exchange::Shift { .. } => 2,
            _ => self.ranks.len() as u32,
        };
        let ranks_per_domain = match exchange {
            Exchange::Shift { .. } => ranks_of_link(self.ranks.len() as u32, self.ranks_per_domain),
            _ => self.ranks_per_domain.min(ranks),
        };
        Collective {
            kind: exchange.kind(),
            bytes: exchange.full().bytes(),
            ranks,
            ranks_per_domain,
        }
    }

    /// Starts any collective.
    pub fn start(&self, exchange: Exchange) -> Result<Pending, TransportError> {
        check(&exchange, self.size(), self.index);
        match &self.transport {
            Some(transport) => {
                let key = self.log.as_ref().map(|log| (log, self.key(&exchange)));
                let pending = transport.start(exchange)?;
                Ok(match key {
                    None => pending,
                    Some((log, key)) => pending.noted_in(log, log.start(&self.name, key)),
                })
            }
            None => Ok(Pending::new(move || {
                copy_locally(&exchange);
                Ok(())
            })),
        }
    }
}

/// The ranks of one memory domain among the two of the slowest link of a ring.
pub(crate) fn ranks_of_link(ranks: u32, ranks_per_domain: u32) -> u32 {
    if ranks_per_domain < ranks { 1 } else { 2 }
}

/// Asserts that the tensors of a collective fit each other and the group, of which the caller is member
/// `own`.
fn check(exchange: &Exchange, size: usize, own: usize) {
    let stem = exchange.stem();
    match exchange {
        Exchange::AllReduce { .. } => {}
        Exchange::AllGather { src, dst } => {
            assert_eq!(src.len() * size, dst.len(), "{stem} over {size} members");
            assert_eq!(src.dtype(), dst.dtype(), "{stem}: types differ");
        }
        Exchange::ReduceScatter { src, dst } => {
            assert_eq!(src.len(), dst.len() * size, "{stem} over {size} members");
            assert_eq!(src.dtype(), dst.dtype(), "{stem}: types differ");
        }
        Exchange::AllToAll {
            src,
            send_rows,
            dst,
            recv_rows,
            ..
        } => {
            assert_eq!(send_rows.len(), size, "{stem}: send counts");
            assert_eq!(recv_rows.len(), size, "{stem}: receive counts");
            assert_eq!(src.dtype(), dst.dtype(), "{stem}: types differ");
            let (sent, received) = (send_rows.iter().sum(), recv_rows.iter().sum());
            assert_eq!(src.dims().first(), Some(&sent), "{stem}: rows sent");
            assert_eq!(dst.dims().first(), Some(&received), "{stem}: rows received");
            assert_eq!(src.dims()[1..], dst.dims()[1..], "{stem}: widths differ");
        }
        Exchange::Shift { src, dst } => {
            assert_eq!(src.len(), dst.len(), "{stem}: lengths");
            assert_eq!(src.dtype(), dst.dtype(), "{stem}: types differ");
        }
        Exchange::Broadcast { root, .. } => assert!(*root < size, "{stem} from {root} of {size}"),
        Exchange::Send { to: other, .. } | Exchange::Receive { from: other, .. } => {
            assert!(
                *other < size && *other != own,
                "{stem} between members {own} and {other} of {size}"
            );
        }
    }
}

/// A group of one: what it sends is what it receives.
fn copy_locally(exchange: &Exchange) {
    match exchange {
        Exchange::AllReduce { .. } | Exchange::Broadcast { .. } => {}
        Exchange::AllGather { src, dst }
        | Exchange::ReduceScatter { src, dst }
        | Exchange::AllToAll { src, dst, .. }
        | Exchange::Shift { src, dst } => elementwise::copy(src, dst),
        Exchange::Send { .. } | Exchange::Receive { .. } => {
            unreachable!("a message is between two members")
        }
    }
}
