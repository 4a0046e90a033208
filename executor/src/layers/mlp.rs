//! The dense gated MLP, its width split over TP: `y = x + down(silu(gate) * up)` of `norm(x)`.

use moefold_kernels::Tensor;
use moefold_kernels::elementwise::add_into;
use moefold_kernels::swiglu::{self, Rule};
use moefold_planner::choice::{Module, Recompute};
use moefold_profiles::trace::Category;

use super::norm::{Norm, Normed};
use super::{linear, tokens};
use crate::error::Error;
use crate::model::Part;
use crate::rank::Context;
use crate::recompute::Kept;
use crate::store::{Store, Weight};

const CATEGORY: Category = Category::Dense;

/// The dense feed-forward block of one layer.
#[derive(Debug)]
pub struct Mlp {
    norm: Norm,
    gate_up: Weight,
    down: Weight,
}

/// What the block saves for backward.
#[derive(Debug)]
pub struct MlpSaved {
    /// Residual stream `[t, h]`.
    input: Tensor,
    /// Input of the first product `[t, h]`.
    norm: Kept<Normed>,
    hidden: Kept<Hidden>,
}

/// What the down projection reads, and what that is of.
#[derive(Debug)]
struct Hidden {
    /// Gate and up `[T, 2f]`.
    gate_up: Tensor,
    /// `silu(gate) * up` `[T, f]`.
    activation: Tensor,
}

impl Mlp {
    /// The block of `layer`, on weights of `store`.
    pub fn new(store: &Store, layer: u32, eps: f64) -> Self {
        let weight = |part| store.weight(Some(layer), part);
        Self {
            norm: Norm::new(weight(Part::PostNorm), eps, CATEGORY),
            gate_up: weight(Part::GateUp),
            down: weight(Part::Down),
        }
    }

    /// Runs `mlp(norm(x))` of `x [t, h]` until its down projection.
    pub fn run(&self, cx: &Context, x: &Tensor, again: &Recompute) -> Result<MlpSaved, Error> {
        let mut norm = Kept::new(self.norm.forward(cx, x));
        let hidden = self.hidden(cx, &norm.get().output)?;
        norm.drop_of(Module::Layernorm, again);
        Ok(MlpSaved {
            input: x.clone(),
            norm,
            hidden: Kept::new(hidden),
        })
    }

    /// `x + mlp(norm(x))`, from what has run of it.
    pub fn finish(
        &self,
        cx: &Context,
        saved: &mut MlpSaved,
        again: &Recompute,
    ) -> Result<Tensor, Error> {
        let activation = &saved.hidden.get().activation;
        let y = linear::forward(cx, CATEGORY, activation, &self.down.value);
        saved.hidden.drop_of(Module::Mlp, again);
        let y = tokens::scatter_sum(cx, y)?;
        cx.op(CATEGORY, || add_into(&y, &saved.input));
        Ok(y)
    }

    fn hidden(&self, cx: &Context, normed: &Tensor) -> Result<Hidden, Error> {
        let all = tokens::gather(cx, normed)?;
        let gate_up = linear::forward(cx, CATEGORY, &all, &self.gate_up.value);
        drop(all);
        let activation = cx.op(CATEGORY, || swiglu::forward(&gate_up, None, &Rule::SWIGLU));
        Ok(Hidden {
            gate_up,
            activation,
        })
    }

    /// `dy [t, h] -> dx [t, h]`; adds to the gradients of the weights.
    pub fn backward(&self, cx: &Context, dy: &Tensor, saved: MlpSaved) -> Result<Tensor, Error> {
        let MlpSaved {
            input,
            mut norm,
            mut hidden,
        } = saved;
        let normed = norm.again(cx, || Ok(self.norm.forward(cx, &input)))?;
        hidden.again(cx, || self.hidden(cx, &normed.output))?;
        let Hidden {
            gate_up,
            activation,
        } = hidden.into_inner();
        let dy_all = tokens::gather(cx, dy)?;
        let dactivation = linear::dgrad(cx, CATEGORY, &dy_all, &self.down.value);
        linear::wgrad(cx, CATEGORY, &dy_all, &activation, &self.down.grad);
        drop((dy_all, activation));
        let all = tokens::start_gather(cx, &norm.get().output)?;
        let (dgate_up, _) = cx.op(CATEGORY, || {
            swiglu::backward(&dactivation, &gate_up, None, &Rule::SWIGLU)
        });
        drop((dactivation, gate_up));
        let all = all.finish(cx)?;
        linear::wgrad(cx, CATEGORY, &dgate_up, &all, &self.gate_up.grad);
        let Normed { output, rstd } = norm.into_inner();
        drop((all, output));
        let dall = linear::dgrad(cx, CATEGORY, &dgate_up, &self.gate_up.value);
        let dnormed = tokens::scatter_sum(cx, dall)?;
        let dx = self.norm.backward(cx, &dnormed, &input, &rstd);
        cx.op(CATEGORY, || add_into(&dx, dy));
        Ok(dx)
    }
}
