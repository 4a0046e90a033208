//! [`Exchange`]: rows to the ranks of their experts and back, by an all-to-all.
//!
//! Rows leave in expert order, so each EP peer's rows are consecutive: an all-to-all moves them. With
//! ETP, the ranks that hold slices of the same experts then share what each received. Rows arrive
//! ordered by sender; sorting them by local expert makes them ready for grouped products. The way
//! back is the mirror image, a sum over ETP in place of the sharing. Every size is known from one exchange of
//! counts, or beforehand where every expert gets as many rows of every rank.

use std::ops::Range;
use std::rc::Rc;

use moefold_kernels::{Tensor, TensorClass, elementwise, reduce, rows};
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::rank::Context;
use crate::transport::{Communicator, Pending, TransportError};

/// The moves of one microbatch.
#[derive(Debug)]
pub(super) struct Exchange {
    /// Rows of each expert held here, all senders together.
    pub(super) counts: Vec<usize>,
    /// Rows to each EP peer.
    send_rows: Vec<usize>,
    /// Rows from each EP peer.
    recv_rows: Vec<usize>,
    /// Whether every EP peer sends every other as many.
    even: bool,
    /// Rows that each ETP peer received: the blocks of the shared buffer.
    etp_rows: Vec<usize>,
    /// Blocks of the rows as they arrive, in the order of local experts; none where rows arrive in
    /// that order.
    blocks: Option<rows::Chunks>,
}

impl Exchange {
    /// Lays out every move, from the rows that each member of the group has for each expert.
    pub(super) fn new(cx: &Context, all: &[Rc<[u64]>]) -> Self {
        let (ep, etp) = (cx.ep.size(), cx.etp.size());
        let held = all[0].len() / ep;
        let (me, holder) = (cx.etp.index(), cx.ep.index());
        // In the tp-ep group, member `i + etp * j` is ETP rank `i` of EP rank `j`.
        let member = |etp_rank: usize, ep_rank: usize| &all[etp_rank + etp * ep_rank];
        let send_rows: Vec<usize> = member(me, holder).chunks_exact(held).map(sum).collect();
        // What every sender has for each expert here, in the order of arrival.
        let senders: Vec<&[u64]> = (0..etp * ep)
            .map(|sender| &member(sender / ep, sender % ep)[holder * held..(holder + 1) * held])
            .collect();
        let arriving: Vec<usize> = senders.iter().map(|rows| sum(rows)).collect();
        let mut counts = vec![0; held];
        for sender in &senders {
            for (count, &rows) in counts.iter_mut().zip(*sender) {
                *count += rows as usize;
            }
        }
        Self {
            blocks: (held > 1).then(|| {
                if cx.device.is_meta() {
                    let all = senders.iter().flat_map(|sender| *sender);
                    let count = all.filter(|rows| **rows > 0).count();
                    return rows::Chunks::unlisted(count, counts.iter().sum());
                }
                by_expert(&senders, &arriving, held)
            }),
            counts,
            even: all_even((0..ep).map(|peer| member(me, peer)), &send_rows),
            send_rows,
            recv_rows: arriving[me * ep..(me + 1) * ep].to_vec(),
            etp_rows: arriving
                .chunks_exact(ep)
                .map(|rows| rows.iter().sum())
                .collect(),
        }
    }

    /// `[t K, w]` in expert order, on the way to `[N, w]` in local expert order; numbers `[t K, 1]` with them.
    pub(super) fn there(
        &self,
        cx: &Context,
        rows: Tensor,
        numbers: Option<Tensor>,
    ) -> Result<UnderWay<'_>, Error> {
        let numbers = numbers.map(|numbers| self.start_dispatch(cx, numbers));
        Ok(UnderWay {
            numbers: numbers.transpose()?,
            rows: self.start_dispatch(cx, rows)?,
        })
    }

    /// `[N, w]` in local expert order, on the way to `[t K, w]` in expert order, summed over ETP; numbers `[N, 1]`
    /// with them.
    pub(super) fn back(
        &self,
        cx: &Context,
        rows: Tensor,
        numbers: Option<Tensor>,
    ) -> Result<UnderWay<'_>, Error> {
        let numbers = numbers.map(|numbers| self.start_combine(cx, numbers));
        Ok(UnderWay {
            numbers: numbers.transpose()?,
            rows: self.start_combine(cx, rows)?,
        })
    }

    fn sorted(&self, cx: &Context, arrived: Tensor) -> Tensor {
        let Some(blocks) = &self.blocks else {
            return arrived;
        };
        cx.op(Category::RouterPermute, || {
            rows::gather_chunks(&arrived, blocks)
        })
    }

    fn unsorted(&self, cx: &Context, rows: Tensor) -> Tensor {
        let Some(blocks) = &self.blocks else {
            return rows;
        };
        cx.op(Category::RouterPermute, || {
            rows::scatter_chunks(&rows, blocks)
        })
    }

    fn start_dispatch(&self, cx: &Context, rows: Tensor) -> Result<Moving<'_>, Error> {
        let dims = [self.etp_rows.iter().sum(), rows.width()];
        let shared = cx
            .device
            .empty(TensorClass::Activations, rows.dtype(), &dims);
        let own = shared.rows(self.etp_block(cx.etp.index()));
        let pending = if cx.ep.is_solo() {
            cx.op(Category::RouterPermute, || elementwise::copy(&rows, &own));
            None
        } else {
            Some(cx.comm(Category::EpComm, "all_to_all", || {
                let (send, receive) = (&self.send_rows, &self.recv_rows);
                start_all_to_all(&cx.ep, self.even, [&rows, &own], [send, receive])
            })?)
        };
        Ok(Moving {
            exchange: self,
            tensor: shared,
            source: Some(rows),
            pending,
            share: true,
        })
    }

    fn start_combine(&self, cx: &Context, rows: Tensor) -> Result<Moving<'_>, Error> {
        let rows = self.unsorted(cx, rows);
        let own = self.sum_over_etp(cx, rows)?;
        if cx.ep.is_solo() {
            return Ok(self.at_home(own));
        }
        let dims = [self.send_rows.iter().sum(), own.width()];
        let home = cx
            .device
            .empty(TensorClass::Activations, own.dtype(), &dims);
        let pending = cx.comm(Category::EpComm, "all_to_all", || {
            let (send, receive) = (&self.recv_rows, &self.send_rows);
            start_all_to_all(&cx.ep, self.even, [&own, &home], [send, receive])
        })?;
        Ok(Moving {
            exchange: self,
            tensor: home,
            source: Some(own),
            pending: Some(pending),
            share: false,
        })
    }

    /// Rows that need not move.
    fn at_home(&self, rows: Tensor) -> Moving<'_> {
        Moving {
            exchange: self,
            tensor: rows,
            source: None,
            pending: None,
            share: false,
        }
    }

    /// Rows of one ETP peer in the shared buffer.
    fn etp_block(&self, peer: usize) -> Range<usize> {
        let start: usize = self.etp_rows[..peer].iter().sum();
        start..start + self.etp_rows[peer]
    }

    /// Gives every ETP peer the rows that each of them received.
    fn share_over_etp(&self, cx: &Context, shared: &Tensor) -> Result<(), Error> {
        if cx.etp.is_solo() {
            return Ok(());
        }
        let mut pending = Vec::with_capacity(self.etp_rows.len());
        let mut first = 0;
        for (peer, rows) in self.etp_rows.iter().enumerate() {
            let block = shared.rows(first..first + rows);
            first += rows;
            let start = || cx.etp.start_broadcast(&block, peer);
            pending.push(cx.comm(Category::TpComm, "broadcast", start)?);
        }
        for pending in pending {
            cx.comm(Category::TpComm, "broadcast", || pending.wait())?;
        }
        Ok(())
    }

    /// Sums the parts of every ETP peer at the rows this rank received.
    fn sum_over_etp(&self, cx: &Context, parts: Tensor) -> Result<Tensor, Error> {
        if cx.etp.is_solo() {
            return Ok(parts);
        }
        let (peers, own) = (self.etp_rows.len(), self.etp_rows[cx.etp.index()]);
        let dims = [peers * own, parts.width()];
        let received = cx
            .device
            .empty(TensorClass::Transient, parts.dtype(), &dims);
        cx.comm(Category::TpComm, "all_to_all", || {
            let arriving = vec![own; peers];
            let even = all_equal(self.etp_rows.iter().copied());
            let rows: [&[usize]; 2] = [&self.etp_rows, &arriving];
            start_all_to_all(&cx.etp, even, [&parts, &received], rows)?.wait()
        })?;
        drop(parts);
        let dims = [own, received.width()];
        let sum = cx
            .device
            .empty(TensorClass::Activations, received.dtype(), &dims);
        let parts: Vec<Tensor> = (0..peers)
            .map(|peer| received.rows(peer * own..(peer + 1) * own))
            .collect();
        cx.op(Category::TpComm, || {
            reduce::sum_ordered(&parts.iter().collect::<Vec<_>>(), &sum);
        });
        Ok(sum)
    }
}

/// Rows under way, and numbers where some go with them.
pub(super) struct UnderWay<'a> {
    rows: Moving<'a>,
    numbers: Option<Moving<'a>>,
}

impl UnderWay<'_> {
    /// What has arrived: rows and numbers.
    pub(super) fn finish(self, cx: &Context) -> Result<(Tensor, Option<Tensor>), Error> {
        let Self { rows, numbers } = self;
        let exchange = rows.exchange;
        if rows.share {
            // They are sorted while the rows are still under way.
            let numbers = numbers.map(|numbers| {
                let numbers = numbers.finish(cx)?;
                Ok::<_, Error>(exchange.sorted(cx, numbers))
            });
            let numbers = numbers.transpose()?;
            let rows = rows.finish(cx)?;
            return Ok((exchange.sorted(cx, rows), numbers));
        }
        let rows = rows.finish(cx)?;
        let numbers = numbers.map(|numbers| numbers.finish(cx));
        Ok((rows, numbers.transpose()?))
    }
}

/// Rows under way.
struct Moving<'a> {
    exchange: &'a Exchange,
    /// Where they arrive.
    tensor: Tensor,
    /// What was sent, which is alive until it has arrived, whoever would let go of it earlier.
    source: Option<Tensor>,
    pending: Option<Pending>,
    /// Whether they go to experts, so that ETP peers share what arrived.
    share: bool,
}

impl Moving<'_> {
    fn finish(self, cx: &Context) -> Result<Tensor, Error> {
        if let Some(pending) = self.pending {
            cx.comm(Category::EpComm, "all_to_all", || pending.wait())?;
        }
        drop(self.source);
        if self.share {
            self.exchange.share_over_etp(cx, &self.tensor)?;
        }
        Ok(self.tensor)
    }
}

/// Starts the exchange of rows between members who have all seen all counts, and so agree on whether
/// they are even.
fn start_all_to_all(
    group: &Communicator,
    even: bool,
    [src, dst]: [&Tensor; 2],
    [send, receive]: [&[usize]; 2],
) -> Result<Pending, TransportError> {
    if even {
        group.start_all_to_all_even(src, dst)
    } else {
        group.start_all_to_all(src, send, dst, receive)
    }
}

fn sum(rows: &[u64]) -> usize {
    rows.iter().sum::<u64>() as usize
}

/// Whether EP peers, by their rows for each expert, all send each other as many as one of them says.
fn all_even<'a>(mut peers: impl Iterator<Item = &'a Rc<[u64]>>, send_rows: &[usize]) -> bool {
    let mut known: Option<&Rc<[u64]>> = None;
    peers.all(|rows| {
        // Peers that share their counts are looked at once.
        if known.is_some_and(|known| Rc::ptr_eq(known, rows)) {
            return true;
        }
        known = Some(rows);
        let held = rows.len() / send_rows.len();
        let mut each = rows.chunks_exact(held).map(sum);
        each.all(|rows| rows == send_rows[0])
    })
}

/// Blocks of the rows of some senders, one sender after the other, in the order of local experts. Each
/// sender has `arriving` rows.
fn by_expert(senders: &[&[u64]], arriving: &[usize], held: usize) -> rows::Chunks {
    let mut end = 0;
    let first = arriving.iter().map(|rows| {
        end += rows;
        end - rows
    });
    let mut starts: Vec<usize> = first.collect();
    let places =
        (0..held).flat_map(|expert| (0..senders.len()).map(move |sender| (expert, sender)));
    let blocks = places.map(|(expert, sender)| {
        let start = starts[sender];
        starts[sender] += senders[sender][expert] as usize;
        start..starts[sender]
    });
    blocks.collect()
}

fn all_equal(mut numbers: impl Iterator<Item = usize>) -> bool {
    let first = numbers.next();
    numbers.all(|number| Some(number) == first)
}
