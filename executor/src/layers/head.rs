//! Final norm, output head and token cross entropy, the vocabulary split over TP.
//!
//! The logits exist only on the rank that computes them: the softmax over the whole vocabulary needs
//! one maximum and two sums a token from the other TP ranks (Megatron-LM's vocabulary-parallel cross
//! entropy). Both are of the dtype of activations, the statistics of f32. The gradient replaces the
//! logits in place, so one buffer serves both.

use moefold_kernels::cross_entropy::{self, Reduced};
use moefold_kernels::elementwise::{add_into, duplicate};
use moefold_kernels::{Tensor, TensorClass};
use moefold_profiles::trace::Category;

use super::norm::{Norm, Normed};
use super::{linear, tokens};
use crate::error::Error;
use crate::model::Part;
use crate::rank::Context;
use crate::store::{Store, Weight};

const CATEGORY: Category = Category::Dense;

/// Final norm, head and loss, on the last stage.
#[derive(Debug)]
pub struct Head {
    norm: Norm,
    matrix: Weight,
    vocab_start: usize,
}

/// What the head saves for backward.
#[derive(Debug)]
pub struct HeadSaved {
    /// Residual stream `[t, h]`.
    input: Tensor,
    /// Input of the head `[t, h]`.
    norm: Normed,
    /// Gradient of the loss by the logits `[T, vocab/tp]`.
    logits_gradient: Tensor,
}

impl HeadSaved {
    /// Input of the head `[t, h]`: what it reads of the residual stream, normed.
    pub fn normed(&self) -> &Tensor {
        &self.norm.output
    }
}

impl Head {
    /// The head on weights of `store`; `tied` to the embedding or with a matrix of its own.
    pub fn new(store: &Store, tied: bool, eps: f64) -> Self {
        let part = if tied { Part::Embedding } else { Part::Head };
        Self {
            norm: Norm::new(store.weight(None, Part::FinalNorm), eps, CATEGORY),
            matrix: store.weight(None, part),
            vocab_start: store.shard.find(None, part).slices[0].rows.start,
        }
    }

    /// The head of a depth of multi-token prediction: the matrix of the model's, a norm of its own.
    pub fn of_depth(store: &Store, layer: u32, tied: bool, eps: f64) -> Self {
        Self {
            norm: Norm::new(store.weight(Some(layer), Part::DepthNorm), eps, CATEGORY),
            ..Self::new(store, tied, eps)
        }
    }

    /// `x [t, h], targets [T] -> token losses [T]`; their gradient is prepared for a loss of
    /// `gradient_scale` times their sum.
    pub fn forward(
        &self,
        cx: &Context,
        x: &Tensor,
        targets: &Tensor,
        gradient_scale: f32,
    ) -> Result<(Tensor, HeadSaved), Error> {
        let norm = self.norm.forward(cx, x);
        let all = tokens::gather(cx, &norm.output)?;
        let kind = (TensorClass::Logits, all.dtype());
        let logits = linear::forward_as(cx, CATEGORY, kind, &all, &self.matrix.value, None);
        drop(all);
        let own = cx.op(CATEGORY, || cross_entropy::row_statistics(&logits));
        let max = if cx.tp.is_solo() {
            own.top.clone()
        } else {
            let max = cx.op(CATEGORY, || duplicate(&own.top, TensorClass::Transient));
            cx.comm(Category::TpComm, "all_reduce", || {
                cx.tp.all_reduce_max(&max)
            })?;
            max
        };
        let (sum, target) = cx.op(CATEGORY, || {
            cross_entropy::rebase(&logits, &own, &max, targets, self.vocab_start)
        });
        drop(own);
        if !cx.tp.is_solo() {
            let start = |part| cx.tp.start_all_reduce(part);
            let sums = cx.comm(Category::TpComm, "all_reduce", || start(&sum))?;
            let targets = cx.comm(Category::TpComm, "all_reduce", || start(&target))?;
            for pending in [targets, sums] {
                cx.comm(Category::TpComm, "all_reduce", || pending.wait())?;
            }
        }
        let losses = cx.op(CATEGORY, || {
            let reduced = Reduced {
                top: &max,
                sum_exp: &sum,
                target: &target,
            };
            cross_entropy::finish(&logits, reduced, targets, self.vocab_start, gradient_scale)
        });
        let saved = HeadSaved {
            input: x.clone(),
            norm,
            logits_gradient: logits,
        };
        Ok((losses, saved))
    }

    /// The gradient of the residual stream `[t, h]`; adds to the gradients of the weights. `dnext` is that of
    /// [`HeadSaved::normed`], where something else reads it.
    pub fn backward(
        &self,
        cx: &Context,
        saved: HeadSaved,
        dnext: Option<Tensor>,
    ) -> Result<Tensor, Error> {
        let HeadSaved {
            input,
            norm: Normed { output, rstd },
            logits_gradient,
        } = saved;
        let all = tokens::gather(cx, &output)?;
        linear::wgrad(cx, CATEGORY, &logits_gradient, &all, &self.matrix.grad);
        drop((all, output));
        let dall = linear::dgrad(cx, CATEGORY, &logits_gradient, &self.matrix.value);
        drop(logits_gradient);
        let dnormed = tokens::scatter_sum(cx, dall)?;
        if let Some(dnext) = dnext {
            cx.op(CATEGORY, || add_into(&dnormed, &dnext));
        }
        Ok(self.norm.backward(cx, &dnormed, &input, &rstd))
    }
}
