//! The gated MLP, its width split over TP: `down(silu(gate) * up)`. With a norm before it and the
//! residual stream around it, it is the dense feed-forward block; a shared expert is one too.

use moefold_kernels::Tensor;
use moefold_kernels::elementwise::add_into;
use moefold_kernels::swiglu::{self, Rule};
use moefold_profiles::trace::Category;

use super::norm::Norm;
use super::{linear, tokens};
use crate::error::Error;
use crate::model::Part;
use crate::rank::Context;
use crate::store::{Store, Weight};

const CATEGORY: Category = Category::Dense;

/// The gated MLP: from and to the rank's own tokens.
#[derive(Debug)]
pub struct Gated {
    gate_up: Weight,
    down: Weight,
}

/// What the MLP saves for backward, beside its input.
#[derive(Debug)]
pub struct GatedSaved {
    /// Gate and up `[T, 2f]`.
    gate_up: Tensor,
    /// `silu(gate) * up` `[T, f]`.
    activation: Tensor,
}

impl Gated {
    /// The MLP on its weights.
    pub fn new(gate_up: Weight, down: Weight) -> Self {
        Self { gate_up, down }
    }

    /// `x [t, h] -> mlp(x) [t, h]`.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> Result<(Tensor, GatedSaved), Error> {
        let all = tokens::gather(cx, x)?;
        let gate_up = linear::forward(cx, CATEGORY, &all, &self.gate_up.value);
        drop(all);
        let activation = cx.op(CATEGORY, || swiglu::forward(&gate_up, None, &Rule::SWIGLU));
        let y = linear::forward(cx, CATEGORY, &activation, &self.down.value);
        let y = tokens::scatter_sum(cx, y)?;
        let saved = GatedSaved {
            gate_up,
            activation,
        };
        Ok((y, saved))
    }

    /// `dy [t, h] -> dx [t, h]`, with the input `x`; adds to the gradients of the weights.
    pub fn backward(
        &self,
        cx: &Context,
        dy: &Tensor,
        x: Tensor,
        saved: GatedSaved,
    ) -> Result<Tensor, Error> {
        let GatedSaved {
            gate_up,
            activation,
        } = saved;
        let dy_all = tokens::gather(cx, dy)?;
        let dactivation = linear::dgrad(cx, CATEGORY, &dy_all, &self.down.value);
        linear::wgrad(cx, CATEGORY, &dy_all, &activation, &self.down.grad);
        drop((dy_all, activation));
        let all = tokens::start_gather(cx, &x)?;
        let (dgate_up, _) = cx.op(CATEGORY, || {
            swiglu::backward(&dactivation, &gate_up, None, &Rule::SWIGLU)
        });
        drop((dactivation, gate_up));
        let all = all.finish(cx)?;
        linear::wgrad(cx, CATEGORY, &dgate_up, &all, &self.gate_up.grad);
        drop((all, x));
        let dall = linear::dgrad(cx, CATEGORY, &dgate_up, &self.gate_up.value);
        tokens::scatter_sum(cx, dall)
    }
}

/// The dense feed-forward block of one layer: `y = x + mlp(norm(x))`.
#[derive(Debug)]
pub struct Mlp {
    norm: Norm,
    gated: Gated,
}

/// What the block saves for backward.
#[derive(Debug)]
pub struct MlpSaved {
    /// Residual stream `[t, h]`.
    input: Tensor,
    /// Its reciprocal root mean squares `[t]`.
    norm_rstd: Tensor,
    /// Input of the MLP `[t, h]`.
    norm_output: Tensor,
    gated: GatedSaved,
}

impl Mlp {
    /// The block of `layer`, on weights of `store`.
    pub fn new(store: &Store, layer: u32, eps: f64) -> Self {
        let weight = |part| store.weight(Some(layer), part);
        Self {
            norm: Norm::new(weight(Part::PostNorm), eps, CATEGORY),
            gated: Gated::new(weight(Part::GateUp), weight(Part::Down)),
        }
    }

    /// `x [t, h] -> x + mlp(norm(x))`.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> Result<(Tensor, MlpSaved), Error> {
        let (normed, norm_rstd) = self.norm.forward(cx, x);
        let (y, gated) = self.gated.forward(cx, &normed)?;
        cx.op(CATEGORY, || add_into(&y, x));
        let saved = MlpSaved {
            input: x.clone(),
            norm_rstd,
            norm_output: normed,
            gated,
        };
        Ok((y, saved))
    }

    /// `dy [t, h] -> dx [t, h]`; adds to the gradients of the weights.
    pub fn backward(&self, cx: &Context, dy: &Tensor, saved: MlpSaved) -> Result<Tensor, Error> {
        let MlpSaved {
            input,
            norm_rstd,
            norm_output,
            gated,
        } = saved;
        let dnormed = self.gated.backward(cx, dy, norm_output, gated)?;
        let dx = self.norm.backward(cx, &dnormed, &input, &norm_rstd);
        cx.op(CATEGORY, || add_into(&dx, dy));
        Ok(dx)
    }
}
