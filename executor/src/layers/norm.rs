//! RMSNorm with its weight.

use moefold_kernels::Tensor;
use moefold_kernels::rms_norm::{self, Over};
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::rank::Context;
use crate::store::Weight;

/// A norm over the last dimension.
#[derive(Debug)]
pub struct Norm {
    weight: Weight,
    eps: f32,
    category: Category,
}

/// What a norm gives; backward needs `rstd`.
#[derive(Debug)]
pub struct Normed {
    /// `y [rows, d]`.
    pub output: Tensor,
    /// Reciprocal root mean squares `[rows]`.
    pub rstd: Tensor,
}

impl Norm {
    /// A norm whose time counts as `category`.
    pub fn new(weight: Weight, eps: f64, category: Category) -> Self {
        Self {
            weight,
            eps: eps as f32,
            category,
        }
    }

    /// `x [rows, d] -> y [rows, d]`; backward needs `x` too.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> Normed {
        let (output, rstd) = cx.op(self.category, || {
            rms_norm::forward(x, &self.weight.value, self.eps)
        });
        Normed { output, rstd }
    }

    /// [`Norm::forward`] of rows whose columns are divided over TP, this rank's `[rows, d]`: the mean is over
    /// those of all ranks, a sum over TP.
    pub fn forward_divided(&self, cx: &Context, x: &Tensor) -> Result<Normed, Error> {
        if cx.tp.is_solo() {
            return Ok(self.forward(cx, x));
        }
        let squares = cx.op(self.category, || rms_norm::squares(x, &self.weight.value));
        let over = over_all(cx, x, &squares)?;
        let (output, rstd) = cx.op(self.category, || {
            rms_norm::forward_over(&over, x, &self.weight.value, self.eps)
        });
        Ok(Normed { output, rstd })
    }

    /// The backward pass of [`Norm::forward_divided`]. Where ranks share a column, the gradients of each are a
    /// part of the column's, and so is what they get.
    pub fn backward_divided(
        &self,
        cx: &Context,
        dy: &Tensor,
        x: &Tensor,
        rstd: &Tensor,
    ) -> Result<Tensor, Error> {
        if cx.tp.is_solo() {
            return Ok(self.backward(cx, dy, x, rstd));
        }
        let products = cx.op(self.category, || {
            rms_norm::products(dy, x, &self.weight.value)
        });
        let over = over_all(cx, x, &products)?;
        let Weight { value, grad } = &self.weight;
        Ok(cx.op(self.category, || {
            rms_norm::backward_over(&over, dy, x, value, rstd, grad)
        }))
    }

    /// `dy -> dx`; adds to the weight's gradient.
    pub fn backward(&self, cx: &Context, dy: &Tensor, x: &Tensor, rstd: &Tensor) -> Tensor {
        cx.op(self.category, || {
            rms_norm::backward(dy, x, &self.weight.value, rstd, &self.weight.grad)
        })
    }
}

/// Makes `sums` of the rows of `x` those over all TP ranks. A column that several ranks hold counts as
/// often among the elements as it does in the sums.
fn over_all<'a>(cx: &Context, x: &Tensor, sums: &'a Tensor) -> Result<Over<'a>, Error> {
    cx.comm(Category::TpComm, "all_reduce", || cx.tp.all_reduce(sums))?;
    Ok(Over {
        width: x.width() * cx.tp.size(),
        sums: Some(sums),
    })
}
