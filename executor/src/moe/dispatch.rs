//! [`Dispatch`]: the way of one microbatch's rows to the experts and back.
//!
//! Where a rank has all experts no row moves. Else rows are [exchanged](alltoall), or all tokens are
//! [gathered](allgather). A limit of rows an expert is one of each sender's tokens (Megatron-Core's
//! "sub-sequence" dropping), so what is dropped depends on the layout. Payloads are opaque: activations and
//! gradients take the same way, probabilities beside them.

mod allgather;
mod alltoall;

use std::rc::Rc;

use moefold_kernels::permute::{self, RowMap};
use moefold_kernels::{Tensor, TensorClass};
use moefold_planner::choice::{Capacity, Dispatcher};
use moefold_profiles::trace::Category;

use self::allgather::Gather;
use self::alltoall::{Exchange, UnderWay};
use super::balance::Load;
use crate::error::Error;
use crate::rank::Context;
use crate::turns::pause;

/// How tokens go to the experts: what a plan chooses of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dispatching {
    /// Which way.
    pub dispatcher: Dispatcher,
    /// How many of them an expert takes of each rank; all where absent.
    pub capacity: Option<Capacity>,
}

impl Default for Dispatching {
    fn default() -> Self {
        Self {
            dispatcher: Dispatcher::Alltoall,
            capacity: None,
        }
    }
}

impl Dispatching {
    /// Whether the host must know within a step how many rows a rank has for each expert: where it sends some
    /// to others, and not always as many.
    pub fn needs_counts(&self, cx: &Context) -> bool {
        !(cx.tp_ep.is_solo() || self.capacity.is_some_and(|capacity| capacity.pad))
    }

    /// Whether this rank gathers the tokens of others.
    pub(super) fn gathers(&self, cx: &Context) -> bool {
        self.dispatcher == Dispatcher::Allgather && !cx.tp_ep.is_solo()
    }
}

/// What the tokens of a rank have chosen.
#[derive(Debug)]
pub struct Chosen {
    /// The experts, -1 of what was dropped: `[t, K]`.
    pub ids: Tensor,
    /// From token order to expert order; absent where all tokens are gathered.
    pub map: Option<RowMap>,
    /// Tokens of each expert before any were dropped.
    pub load: Load,
    /// Experts there are.
    pub experts: usize,
    /// Tokens that each takes of a rank.
    pub limit: Option<usize>,
}

/// The routes of one microbatch through one MoE layer.
#[derive(Debug)]
pub struct Dispatch {
    /// Tokens that chose each expert there is, on all ranks that exchange tokens here; empty where no host has
    /// asked.
    pub exchanged: Vec<u64>,
    /// Rows that the experts here process.
    rows: usize,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// The rank has all experts.
    Home(RowMap),
    /// Rows leave in the order of the map. The offsets are those of the experts held here `[held + 1]` i32.
    Exchange {
        map: RowMap,
        exchange: Box<Exchange>,
        offsets: Tensor,
    },
    Gather(Gather),
}

impl Dispatch {
    /// Exchanges counts where they are known and lays out every move.
    pub fn plan(cx: &Context, chosen: Chosen) -> Result<Self, Error> {
        let Chosen {
            ids,
            map,
            load,
            experts,
            limit,
        } = chosen;
        if cx.tp_ep.is_solo() {
            let map = map.expect("a rank alone gathers nothing");
            return Ok(Self {
                exchanged: Vec::new(),
                rows: map.num_rows(),
                way: Way::Home(map),
            });
        }
        let mut exchanged = Vec::new();
        let mut all: Vec<Rc<[u64]>> = match &load {
            Load::Known(load) => cx.comm(Category::EpComm, "all_gather", || {
                cx.tp_ep.exchange_counts(load)
            })?,
            // All are padded to the same.
            Load::Offsets(_) => {
                let each = limit.expect("without counts there is a capacity");
                vec![vec![each as u64; experts].into(); cx.tp_ep.size()]
            }
        };
        if let Load::Known(_) = load {
            exchanged = vec![0; experts];
            for (sender, times) in by_counts(&all) {
                for (sum, &rows) in exchanged.iter_mut().zip(sender) {
                    *sum += rows * times;
                }
            }
            if let Some(limit) = limit {
                let within = |rows: &Rc<[u64]>| rows.iter().map(|&n| n.min(limit as u64)).collect();
                all = all.iter().map(within).collect();
            }
        }
        let held = experts / cx.ep.size();
        let Some(map) = map else {
            let here = cx.ep.index() * held..(cx.ep.index() + 1) * held;
            let of_sender = |sender: &Rc<[u64]>| sender[here.clone()].iter().sum::<u64>();
            let rows = all.iter().map(of_sender).sum::<u64>() as usize;
            return Ok(Self {
                exchanged,
                rows,
                way: Way::Gather(Gather::new(cx, &ids, held, rows)?),
            });
        };
        let exchange = Box::new(Exchange::new(cx, &all));
        Ok(Self {
            exchanged,
            rows: exchange.counts.iter().sum(),
            way: Way::Exchange {
                map,
                offsets: offsets(cx, &exchange.counts),
                exchange,
            },
        })
    }

    /// Which rows the experts here process: where those of each start, and the last ones end `[E/ep + 1]`.
    pub fn offsets(&self) -> &Tensor {
        match &self.way {
            Way::Home(map) => &map.offsets,
            Way::Exchange { offsets, .. } => offsets,
            Way::Gather(gather) => gather.offsets(),
        }
    }

    /// Rows that the experts here process.
    pub fn num_rows(&self) -> usize {
        self.rows
    }

    /// By what rows are put in order before they leave: see [`leaving`].
    pub fn map(&self) -> Option<&RowMap> {
        match &self.way {
            Way::Home(map) | Way::Exchange { map, .. } => Some(map),
            Way::Gather(_) => None,
        }
    }

    /// Whether rows are sent to other ranks, so that something may run meanwhile.
    pub fn sends(&self) -> bool {
        matches!(self.way, Way::Exchange { .. })
    }

    /// Starts [`Dispatch::to_experts`], or [`Dispatch::to_experts_with`] where numbers leave too.
    ///
    /// # Panics
    /// When no rows are [sent](Dispatch::sends).
    pub fn start_to_experts(
        &self,
        cx: &Context,
        rows: Tensor,
        numbers: Option<Tensor>,
    ) -> Result<Sent<'_>, Error> {
        let Way::Exchange { exchange, .. } = &self.way else {
            unreachable!("no rows are sent")
        };
        let under_way = exchange.there(cx, rows, numbers.map(as_column))?;
        Ok(Sent {
            under_way,
            home: None,
        })
    }

    /// Starts [`Dispatch::from_experts`], or [`Dispatch::from_experts_with`] where numbers come too.
    ///
    /// # Panics
    /// When no rows are [sent](Dispatch::sends).
    pub fn start_from_experts(
        &self,
        cx: &Context,
        rows: Tensor,
        numbers: Option<Tensor>,
    ) -> Result<Sent<'_>, Error> {
        let Way::Exchange { map, exchange, .. } = &self.way else {
            unreachable!("no rows are sent")
        };
        let under_way = exchange.back(cx, rows, numbers.map(as_column))?;
        Ok(Sent {
            under_way,
            home: Some(map),
        })
    }

    /// What is [`leaving`] `-> [N, w]` in local expert order. A pass pauses while rows are under way, here and in the
    /// others.
    pub async fn to_experts(&self, cx: &Context, rows: Tensor) -> Result<Tensor, Error> {
        match &self.way {
            Way::Home(_) => Ok(rows),
            Way::Exchange { .. } => {
                let sent = self.start_to_experts(cx, rows, None)?;
                pause().await;
                Ok(sent.finish(cx)?.0)
            }
            Way::Gather(gather) => gather.there(cx, &rows),
        }
    }

    /// [`Dispatch::to_experts`] for rows and what [leaves with them](leaving_numbers), both under way together.
    pub async fn to_experts_with(
        &self,
        cx: &Context,
        rows: Tensor,
        numbers: Tensor,
    ) -> Result<(Tensor, Tensor), Error> {
        match &self.way {
            Way::Home(_) => Ok((rows, numbers)),
            Way::Exchange { .. } => {
                let sent = self.start_to_experts(cx, rows, Some(numbers))?;
                pause().await;
                sent.finish_with(cx)
            }
            Way::Gather(gather) => {
                let [rows, numbers] = gather.there_with(cx, &rows, &numbers)?;
                Ok((rows, numbers))
            }
        }
    }

    /// `[N, w]` in local expert order `-> [t, w]`, the sum over a token's rows.
    pub async fn from_experts(&self, cx: &Context, rows: Tensor) -> Result<Tensor, Error> {
        let (rows, map) = match &self.way {
            Way::Home(map) => (rows, map),
            Way::Exchange { .. } => {
                let sent = self.start_from_experts(cx, rows, None)?;
                pause().await;
                return Ok(sent.finish(cx)?.0);
            }
            Way::Gather(gather) => return gather.back(cx, rows),
        };
        Ok(cx.op(Category::RouterPermute, || {
            permute::unpermute(&rows, map, None)
        }))
    }

    /// [`Dispatch::from_experts`] for rows and for one number a row `[N] -> [t, K]`, both under way together.
    pub async fn from_experts_with(
        &self,
        cx: &Context,
        rows: Tensor,
        numbers: Tensor,
    ) -> Result<(Tensor, Tensor), Error> {
        match &self.way {
            Way::Home(map) => {
                let (x, numbers) = unpermuted(cx, &rows, Some(&numbers), map);
                Ok((x, numbers.expect("given")))
            }
            Way::Exchange { .. } => {
                let sent = self.start_from_experts(cx, rows, Some(numbers))?;
                pause().await;
                sent.finish_with(cx)
            }
            Way::Gather(gather) => {
                let [x, numbers] = gather.back_with(cx, rows, numbers)?;
                Ok((x, numbers))
            }
        }
    }
}

/// Rows that are sent to experts or back, and numbers where some go with them.
pub struct Sent<'a> {
    under_way: UnderWay<'a>,
    /// The order that they come back to.
    home: Option<&'a RowMap>,
}

impl Sent<'_> {
    /// What they are once they have arrived.
    pub fn finish(self, cx: &Context) -> Result<(Tensor, Option<Tensor>), Error> {
        let (rows, numbers) = self.under_way.finish(cx)?;
        let numbers = numbers.map(as_vector);
        Ok(match self.home {
            None => (rows, numbers),
            Some(map) => unpermuted(cx, &rows, numbers.as_ref(), map),
        })
    }

    /// The same of rows that numbers go with.
    pub fn finish_with(self, cx: &Context) -> Result<(Tensor, Tensor), Error> {
        let (rows, numbers) = self.finish(cx)?;
        Ok((rows, numbers.expect("numbers went with the rows")))
    }
}

/// The sums over each token's rows, and its numbers `[t, K]`.
fn unpermuted(
    cx: &Context,
    rows: &Tensor,
    numbers: Option<&Tensor>,
    map: &RowMap,
) -> (Tensor, Option<Tensor>) {
    cx.op(Category::RouterPermute, || {
        let x = permute::unpermute(rows, map, None);
        let numbers = numbers.map(|numbers| permute::unpermute_slots(numbers, map));
        (x, numbers)
    })
}

/// Tokens `[t, w]` as they leave: a row for each choice in the order of a map, or where there is none as they
/// are.
pub fn leaving(cx: &Context, x: &Tensor, map: Option<&RowMap>) -> Tensor {
    map.map_or_else(
        || x.clone(),
        |map| cx.op(Category::RouterPermute, || permute::forward(x, map)),
    )
}

/// Numbers of choices `[t, K]` as they leave with [tokens](leaving).
pub fn leaving_numbers(cx: &Context, numbers: &Tensor, map: Option<&RowMap>) -> Tensor {
    map.map_or_else(
        || numbers.clone(),
        |map| {
            cx.op(Category::RouterPermute, || {
                permute::permute_slots(numbers, map)
            })
        },
    )
}

/// The counts of members, each with how many members share them.
fn by_counts(all: &[Rc<[u64]>]) -> Vec<(&[u64], u64)> {
    let mut shared: Vec<(&Rc<[u64]>, u64)> = Vec::new();
    for counts in all {
        match shared
            .iter_mut()
            .find(|(known, _)| Rc::ptr_eq(known, counts))
        {
            Some((_, members)) => *members += 1,
            None => shared.push((counts, 1)),
        }
    }
    shared
        .into_iter()
        .map(|(counts, members)| (&**counts, members))
        .collect()
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
