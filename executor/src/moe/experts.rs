//! The experts of one rank: two grouped products around a gated activation.
//!
//! Rows arrive in expert order with their probabilities and leave the same way; where they come from
//! is [`super::dispatch`]'s business. With ETP the rank holds a slice of every expert's width and its
//! outputs are parts of a sum.

use moefold_kernels::Tensor;
use moefold_kernels::grouped_gemm::{self, Rows};
use moefold_kernels::swiglu::{self, Rule};
use moefold_planner::choice::{Module, Recompute};
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::rank::Context;
use crate::recompute::Kept;
use crate::store::Weight;

const CATEGORY: Category = Category::Experts;

/// The experts held by the rank.
#[derive(Debug)]
pub struct Experts {
    /// `[E/ep, 2f, h]`.
    gate_up: Weight,
    /// `[E/ep, h, f]`.
    down: Weight,
}

/// What the experts save for backward.
#[derive(Debug)]
pub struct ExpertsSaved {
    /// Rows `[N, h]`.
    input: Tensor,
    /// Gate and up `[N, 2f]`.
    gate_up: Tensor,
    /// `silu(gate) * up * p` `[N, f]`.
    activation: Kept<Tensor>,
    /// `p` `[N]`.
    row_probs: Tensor,
}

impl Experts {
    /// Experts on their weights.
    pub fn new(gate_up: Weight, down: Weight) -> Self {
        Self { gate_up, down }
    }

    /// Runs the experts on `x [N, h], p [N]`, rows in expert order, until their second product.
    pub fn run(&self, cx: &Context, x: Tensor, row_probs: Tensor, rows: Rows<'_>) -> ExpertsSaved {
        let gate_up = cx.op(CATEGORY, || {
            grouped_gemm::forward_of(&x, &self.gate_up.value, rows)
        });
        let activation = activation(cx, &gate_up, &row_probs);
        ExpertsSaved {
            input: x,
            gate_up,
            activation: Kept::new(activation),
            row_probs,
        }
    }

    /// `[N, h]`, rows in expert order, from what has run.
    pub fn finish(
        &self,
        cx: &Context,
        saved: &mut ExpertsSaved,
        rows: Rows<'_>,
        again: &Recompute,
    ) -> Tensor {
        let y = cx.op(CATEGORY, || {
            grouped_gemm::forward_of(saved.activation.get(), &self.down.value, rows)
        });
        saved.activation.drop_of(Module::MoeAct, again);
        y
    }

    /// `dy [N, h] -> (dx [N, h], dp [N])`; adds to the gradients of the weights.
    pub fn backward(
        &self,
        cx: &Context,
        dy: Tensor,
        saved: ExpertsSaved,
        rows: Rows<'_>,
    ) -> Result<(Tensor, Tensor), Error> {
        let ExpertsSaved {
            input,
            gate_up,
            activation: mut kept,
            row_probs,
        } = saved;
        kept.again(cx, || Ok(activation(cx, &gate_up, &row_probs)))?;
        let activation = kept.into_inner();
        let dactivation = cx.op(CATEGORY, || {
            grouped_gemm::wgrad_of(&dy, &activation, rows, &self.down.grad);
            grouped_gemm::dgrad_of(&dy, &self.down.value, rows)
        });
        drop((dy, activation));
        let (dgate_up, dprobs) = cx.op(CATEGORY, || {
            swiglu::backward(&dactivation, &gate_up, Some(&row_probs), &Rule::SWIGLU)
        });
        drop((dactivation, gate_up, row_probs));
        let dx = cx.op(CATEGORY, || {
            grouped_gemm::wgrad_of(&dgate_up, &input, rows, &self.gate_up.grad);
            drop(input);
            grouped_gemm::dgrad_of(&dgate_up, &self.gate_up.value, rows)
        });
        Ok((dx, dprobs.expect("probabilities went in")))
    }
}

fn activation(cx: &Context, gate_up: &Tensor, row_probs: &Tensor) -> Tensor {
    cx.op(CATEGORY, || {
        swiglu::forward(gate_up, Some(row_probs), &Rule::SWIGLU)
    })
}
