//! Moving between a rank's tokens and its tensor-parallel group's.
//!
//! Between blocks a rank holds `t = T / tp` consecutive rows of the microbatch; inside a
//! tensor-parallel block it needs all `T`. With one TP rank both are the identity and copy nothing.

use moefold_kernels::{Tensor, TensorClass};
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::rank::Context;

/// `[t, w] -> [T, w]`: every rank's rows.
pub fn gather(cx: &Context, x: &Tensor) -> Result<Tensor, Error> {
    if cx.tp.is_solo() {
        return Ok(x.clone());
    }
    let dims = [x.dims()[0] * cx.tp.size(), x.dims()[1]];
    let all = cx.device.empty(TensorClass::Transient, x.dtype(), &dims);
    cx.comm(Category::TpComm, "all_gather", || cx.tp.all_gather(x, &all))?;
    Ok(all)
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
