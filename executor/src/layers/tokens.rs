//! Moving between a rank's tokens and its tensor-parallel group's.
//!
//! Between blocks a rank holds `t = T / tp` consecutive rows of the microbatch; inside a
//! tensor-parallel block it needs all `T`. With one TP rank both are the identity and copy nothing.

use moefold_kernels::{Tensor, TensorClass};
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::rank::Context;
use crate::transport::Pending;

/// `[t, w] -> [T, w]`: every rank's rows.
pub fn gather(cx: &Context, x: &Tensor) -> Result<Tensor, Error> {
    start_gather(cx, x)?.finish(cx)
}

/// Starts [`gather`], beside what is asked for until its rows are needed.
pub fn start_gather(cx: &Context, x: &Tensor) -> Result<Gathering, Error> {
    if cx.tp.is_solo() {
        return Ok(Gathering::done(x.clone()));
    }
    let dims = [x.dims()[0] * cx.tp.size(), x.dims()[1]];
    let all = cx.device.empty(TensorClass::Transient, x.dtype(), &dims);
    let pending = cx.comm(Category::TpComm, "all_gather", || {
        cx.tp.start_all_gather(x, &all)
    })?;
    Ok(Gathering {
        all,
        pending: Some(pending),
    })
}

/// Every rank's rows, under way.
#[derive(Debug)]
pub struct Gathering {
    all: Tensor,
    pending: Option<Pending>,
}

impl Gathering {
    /// Rows that are there.
    pub fn done(all: Tensor) -> Self {
        Self { all, pending: None }
    }

    /// The rows `[T, w]`.
    pub fn finish(self, cx: &Context) -> Result<Tensor, Error> {
        if let Some(pending) = self.pending {
            cx.comm(Category::TpComm, "all_gather", || pending.wait())?;
        }
        Ok(self.all)
    }
}

/// `[T, w] -> [t, w]`: the sum over ranks of their parts, at this rank's rows.
pub fn scatter_sum(cx: &Context, partial: Tensor) -> Result<Tensor, Error> {
    if cx.tp.is_solo() {
        return Ok(partial);
    }
    let dims = [partial.dims()[0] / cx.tp.size(), partial.dims()[1]];
    let own = cx
        .device
        .empty(TensorClass::Activations, partial.dtype(), &dims);
    cx.comm(Category::TpComm, "reduce_scatter", || {
        cx.tp.reduce_scatter(&partial, &own)
    })?;
    Ok(own)
}
