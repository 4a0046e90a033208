//! The experts of one rank: two grouped products around a gated activation.
//!
//! Rows arrive in expert order with their probabilities and leave the same way; where they come from
//! is [`super::dispatch`]'s business. With ETP the rank holds a slice of every expert's width and its
//! outputs are parts of a sum.

use moefold_kernels::Tensor;
use moefold_kernels::grouped_gemm::{self, Rows};
use moefold_kernels::swiglu::{self, Rule};
use moefold_profiles::trace::Category;

use crate::rank::Context;
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
    activation: Tensor,
    /// `p` `[N]`.
    row_probs: Tensor,
}

impl Experts {
    /// Experts on their weights.
    pub fn new(gate_up: Weight, down: Weight) -> Self {
        Self { gate_up, down }
    }

    /// `x [N, h], p [N] -> [N, h]`, rows in expert order.
    pub fn forward(
        &self,
        cx: &Context,
        x: Tensor,
        row_probs: Tensor,
        rows: Rows<'_>,
    ) -> (Tensor, ExpertsSaved) {
        let gate_up = cx.op(CATEGORY, || {
            grouped_gemm::forward_of(&x, &self.gate_up.value, rows)
        });
        let activation = cx.op(CATEGORY, || {
            swiglu::forward(&gate_up, Some(&row_probs), &Rule::SWIGLU)
        });
        let y = cx.op(CATEGORY, || {
            grouped_gemm::forward_of(&activation, &self.down.value, rows)
        });
        let saved = ExpertsSaved {
            input: x,
            gate_up,
            activation,
            row_probs,
        };
        (y, saved)
    }

    /// `dy [N, h] -> (dx [N, h], dp [N])`; adds to the gradients of the weights.
    pub fn backward(
        &self,
        cx: &Context,
        dy: Tensor,
        saved: ExpertsSaved,
        rows: Rows<'_>,
    ) -> (Tensor, Tensor) {
        let ExpertsSaved {
            input,
            gate_up,
            activation,
            row_probs,
        } = saved;
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
        (dx, dprobs.expect("probabilities went in"))
    }
}
