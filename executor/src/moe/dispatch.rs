//! [`Dispatch`]: the way of one microbatch's rows to the experts and back.
//!
//! Rows leave in expert order, so each EP peer's rows are consecutive: an all-to-all moves them. With
//! ETP, the ranks that hold slices of the same experts then share what each received. Rows arrive
//! ordered by sender; sorting them by local expert makes them ready for grouped products. The way
//! back is the mirror image, a sum over ETP in place of the sharing. Nothing is dropped and every
//! size is known from one exchange of counts. Payloads are opaque: activations, gradients and
//! probabilities take the same way.

use std::ops::Range;

use moefold_kernels::grouped_gemm::Rows;
use moefold_kernels::permute::RowMap;
use moefold_kernels::{Tensor, TensorClass, elementwise, reduce, rows};
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::rank::Context;
use crate::transport::{Communicator, Pending, TransportError};

/// The routes of one microbatch through one MoE layer.
#[derive(Debug)]
pub struct Dispatch {
    /// From token order to expert order, on the rank the tokens are from.
    pub map: RowMap,
    /// Rows of each expert held here, all senders together.
    pub counts: Vec<usize>,
    /// First row of each of them, and the number of rows, on the device: `[held + 1]` i32; absent
    /// where those of the map are the same.
    offsets: Option<Tensor>,
    /// Rows to each EP peer.
    send_rows: Vec<usize>,
    /// Rows from each EP peer.
    recv_rows: Vec<usize>,
    /// Whether every EP peer sends every other as many.
    even: bool,
    /// Rows that each ETP peer received: the blocks of the shared buffer.
    etp_rows: Vec<usize>,
    /// Blocks of the rows as they arrive, in the order of local experts; empty where rows arrive in
    /// that order.
    blocks: Vec<Range<usize>>,
}

impl Dispatch {
    /// Exchanges counts and lays out every move. `map` orders the rank's rows by expert.
    pub fn plan(cx: &Context, map: RowMap) -> Result<Self, Error> {
        let own: Vec<u64> = map.counts.iter().map(|&count| count as u64).collect();
        let all = if cx.tp_ep.is_solo() {
            vec![own]
        } else {
            cx.comm(Category::EpComm, "exchange_counts", || {
                cx.tp_ep.exchange_counts(&own)
            })?
        };
        let (ep, etp) = (cx.ep.size(), cx.etp.size());
        let held = map.counts.len() / ep;
        // In the tp-ep group, member `i + etp * j` is ETP rank `i` of EP rank `j`.
        let rows = |etp_rank: usize, ep_rank: usize, expert: usize| {
            all[etp_rank + etp * ep_rank][expert] as usize
        };
        // Rows of each member for all experts of each EP rank.
        let sums: Vec<u64> = all
            .iter()
            .flat_map(|counts| {
                counts
                    .chunks_exact(held)
                    .map(|held| held.iter().sum::<u64>())
            })
            .collect();
        let to_holder = |etp_rank: usize, ep_rank: usize, holder: usize| -> usize {
            sums[(etp_rank + etp * ep_rank) * ep + holder] as usize
        };
        let (me, holder) = (cx.etp.index(), cx.ep.index());
        let experts = holder * held..(holder + 1) * held;

        let mut arrival = Vec::with_capacity(etp * ep * held);
        let mut end = 0;
        for sender in 0..etp * ep {
            for expert in experts.clone() {
                let start = end;
                end += rows(sender / ep, sender % ep, expert);
                arrival.push(start..end);
            }
        }
        let counts: Vec<usize> = (0..held)
            .map(|e| arrival.iter().skip(e).step_by(held).map(Range::len).sum())
            .collect();
        let offsets = (!cx.tp_ep.is_solo()).then(|| offsets(cx, &counts));
        let in_order = held == 1 || etp * ep == 1;
        let by_expert = (0..held).flat_map(|e| arrival.iter().skip(e).step_by(held).cloned());
        Ok(Self {
            blocks: if in_order {
                Vec::new()
            } else {
                by_expert.collect()
            },
            counts,
            offsets,
            send_rows: (0..ep).map(|peer| to_holder(me, holder, peer)).collect(),
            recv_rows: (0..ep).map(|peer| to_holder(me, peer, holder)).collect(),
            even: all_equal((0..ep * ep).map(|pair| to_holder(me, pair / ep, pair % ep))),
            etp_rows: (0..etp)
                .map(|i| (0..ep).map(|j| to_holder(i, j, holder)).sum())
                .collect(),
            map,
        })
    }

    /// Which rows the experts here process.
    pub fn rows(&self) -> Rows<'_> {
        Rows::Offsets(self.offsets.as_ref().unwrap_or(&self.map.offsets))
    }

    /// Rows that the experts here process.
    pub fn num_rows(&self) -> usize {
        self.counts.iter().sum()
    }

    /// `[t K, w]` in expert order `-> [N, w]` in local expert order.
    pub fn to_experts(&self, cx: &Context, rows: Tensor) -> Result<Tensor, Error> {
        let arrived = self.start_dispatch(cx, rows)?.finish(cx)?;
        Ok(self.sorted(cx, arrived))
    }

    /// [`Dispatch::to_experts`] for rows and for one number a row, both under way together.
    pub fn to_experts_with(
        &self,
        cx: &Context,
        rows: Tensor,
        numbers: Tensor,
    ) -> Result<(Tensor, Tensor), Error> {
        let numbers = self.start_dispatch(cx, as_column(numbers))?;
        let rows = self.start_dispatch(cx, rows)?;
        let numbers = numbers.finish(cx)?;
        let numbers = self.sorted(cx, numbers);
        let rows = rows.finish(cx)?;
        Ok((self.sorted(cx, rows), as_vector(numbers)))
    }

    /// `[N, w]` in local expert order `-> [t K, w]` in expert order, summed over ETP.
    pub fn from_experts(&self, cx: &Context, rows: Tensor) -> Result<Tensor, Error> {
        self.start_combine(cx, rows)?.finish(cx)
    }

    /// [`Dispatch::from_experts`] for rows and for one number a row, both under way together.
    pub fn from_experts_with(
        &self,
        cx: &Context,
        rows: Tensor,
        numbers: Tensor,
    ) -> Result<(Tensor, Tensor), Error> {
        let numbers = self.start_combine(cx, as_column(numbers))?;
        let rows = self.start_combine(cx, rows)?;
        Ok((rows.finish(cx)?, as_vector(numbers.finish(cx)?)))
    }

    fn sorted(&self, cx: &Context, arrived: Tensor) -> Tensor {
        if self.blocks.is_empty() {
            return arrived;
        }
        cx.op(Category::RouterPermute, || {
            rows::gather_chunks(&arrived, &self.blocks)
        })
    }

    fn unsorted(&self, cx: &Context, rows: Tensor) -> Tensor {
        if self.blocks.is_empty() {
            return rows;
        }
        cx.op(Category::RouterPermute, || {
            rows::scatter_chunks(&rows, &self.blocks)
        })
    }

    fn start_dispatch(&self, cx: &Context, rows: Tensor) -> Result<Moving<'_>, Error> {
        if cx.tp_ep.is_solo() {
            return Ok(self.there(rows));
        }
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
            dispatch: self,
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
            return Ok(self.there(own));
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
            dispatch: self,
            tensor: home,
            source: Some(own),
            pending: Some(pending),
            share: false,
        })
    }

    /// Rows that need not move.
    fn there(&self, rows: Tensor) -> Moving<'_> {
        Moving {
            dispatch: self,
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
        for peer in 0..self.etp_rows.len() {
            let block = shared.rows(self.etp_block(peer));
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

/// Rows under way.
struct Moving<'a> {
    dispatch: &'a Dispatch,
    /// Where they arrive.
    tensor: Tensor,
    /// What was sent, which is alive until it has arrived, whoever would let go of it earlier.
    source: Option<Tensor>,
    pending: Option<Pending>,
    /// Whether ETP peers share what arrived.
    share: bool,
}

impl Moving<'_> {
    fn finish(self, cx: &Context) -> Result<Tensor, Error> {
        if let Some(pending) = self.pending {
            cx.comm(Category::EpComm, "all_to_all", || pending.wait())?;
        }
        drop(self.source);
        if self.share {
            self.dispatch.share_over_etp(cx, &self.tensor)?;
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

fn all_equal(mut numbers: impl Iterator<Item = usize>) -> bool {
    let first = numbers.next();
    numbers.all(|number| Some(number) == first)
}

/// Where the rows of each expert start, and where the last ones end.
fn offsets(cx: &Context, counts: &[usize]) -> Tensor {
    let mut ends = vec![0];
    ends.extend(counts.iter().scan(0, |end, &count| {
        *end += i32::try_from(count).expect("rows are counted in i32");
        Some(*end)
    }));
    let dims = [ends.len()];
    cx.device.from_i32(TensorClass::Activations, &ends, &dims)
}

#[expect(clippy::needless_pass_by_value, reason = "the only handle, reshaped")]
fn as_column(numbers: Tensor) -> Tensor {
    numbers.reshape(&[numbers.len(), 1])
}

#[expect(clippy::needless_pass_by_value, reason = "the only handle, reshaped")]
fn as_vector(column: Tensor) -> Tensor {
    column.reshape(&[column.len()])
}
