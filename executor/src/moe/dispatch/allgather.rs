//! [`Gather`]: every token to every rank that exchanges tokens, and sums of what their experts made back.
//!
//! All ranks gather all tokens with their choices, and each takes the rows of its own experts. On the way back
//! a rank sums the rows of each token that it has; a reduce-scatter sums over ranks, experts of other ranks and
//! slices of the same ones alike, and leaves every rank its own tokens.

use moefold_kernels::permute::{self, Room, RowMap};
use moefold_kernels::{Tensor, TensorClass};
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::rank::Context;
use crate::transport::Pending;

const PERMUTE: Category = Category::RouterPermute;

/// The rows of one microbatch.
#[derive(Debug)]
pub(super) struct Gather {
    /// From the tokens of all ranks to the rows of the experts here.
    map: RowMap,
}

impl Gather {
    /// The `rows` of `held` experts here, of the choices of all ranks: `ids [t, K]` are this rank's.
    pub(super) fn new(cx: &Context, ids: &Tensor, held: usize, rows: usize) -> Result<Self, Error> {
        let (all, pending) = start(cx, ids)?;
        wait(cx, pending)?;
        let first = cx.ep.index() * held;
        let map = cx.op(PERMUTE, || {
            permute::map_of(&all, first..first + held, Room::Rows(rows))
        });
        Ok(Self { map })
    }

    /// First row of each expert here, and their end.
    pub(super) fn offsets(&self) -> &Tensor {
        &self.map.offsets
    }

    /// `[t, w] -> [N, w]` in local expert order.
    pub(super) fn there(&self, cx: &Context, x: &Tensor) -> Result<Tensor, Error> {
        let (all, pending) = start(cx, x)?;
        wait(cx, pending)?;
        Ok(cx.op(PERMUTE, || permute::forward(&all, &self.map)))
    }

    /// [`Gather::there`] for tokens and for a number of each choice `[t, K] -> [N]`, both under way together.
    pub(super) fn there_with(
        &self,
        cx: &Context,
        x: &Tensor,
        numbers: &Tensor,
    ) -> Result<[Tensor; 2], Error> {
        let (all_numbers, numbers) = start(cx, numbers)?;
        let (all, x) = start(cx, x)?;
        wait(cx, numbers)?;
        let numbers = cx.op(PERMUTE, || permute::permute_slots(&all_numbers, &self.map));
        drop(all_numbers);
        wait(cx, x)?;
        let rows = cx.op(PERMUTE, || permute::forward(&all, &self.map));
        Ok([rows, numbers])
    }

    /// `[N, w]` in local expert order `-> [t, w]`, summed over a token's rows on all ranks.
    pub(super) fn back(&self, cx: &Context, rows: Tensor) -> Result<Tensor, Error> {
        let parts = cx.op(PERMUTE, || permute::unpermute(&rows, &self.map, None));
        drop(rows);
        let (sum, pending) = start_sum(cx, &parts)?;
        wait_for_sum(cx, pending)?;
        Ok(sum)
    }

    /// [`Gather::back`] for rows and for a number of each `[N] -> [t, K]`, both under way together.
    pub(super) fn back_with(
        &self,
        cx: &Context,
        rows: Tensor,
        numbers: Tensor,
    ) -> Result<[Tensor; 2], Error> {
        let numbers_parts = cx.op(PERMUTE, || permute::unpermute_slots(&numbers, &self.map));
        drop(numbers);
        let (numbers, numbers_pending) = start_sum(cx, &numbers_parts)?;
        let parts = cx.op(PERMUTE, || permute::unpermute(&rows, &self.map, None));
        drop(rows);
        let (sum, pending) = start_sum(cx, &parts)?;
        wait_for_sum(cx, numbers_pending)?;
        wait_for_sum(cx, pending)?;
        Ok([sum, numbers])
    }
}

/// Starts to gather what every member has, in their order.
fn start(cx: &Context, own: &Tensor) -> Result<(Tensor, Pending), Error> {
    let all = of_members(cx, own, own.dims()[0] * cx.tp_ep.size());
    let start = || cx.tp_ep.start_all_gather(own, &all);
    let pending = cx.comm(Category::EpComm, "all_gather", start)?;
    Ok((all, pending))
}

fn wait(cx: &Context, pending: Pending) -> Result<(), Error> {
    Ok(cx.comm(Category::EpComm, "all_gather", || pending.wait())?)
}

/// Starts to sum the parts that every member has of what each is to have.
fn start_sum(cx: &Context, parts: &Tensor) -> Result<(Tensor, Pending), Error> {
    let own = of_members(cx, parts, parts.dims()[0] / cx.tp_ep.size());
    let start = || cx.tp_ep.start_reduce_scatter(parts, &own);
    let pending = cx.comm(Category::EpComm, "reduce_scatter", start)?;
    Ok((own, pending))
}

fn wait_for_sum(cx: &Context, pending: Pending) -> Result<(), Error> {
    Ok(cx.comm(Category::EpComm, "reduce_scatter", || pending.wait())?)
}

/// So many rows like those of a tensor.
fn of_members(cx: &Context, like: &Tensor, rows: usize) -> Tensor {
    let dims = [rows, like.width()];
    cx.device
        .empty(TensorClass::Activations, like.dtype(), &dims)
}
