//! The gated MLP, its width split over TP: `down(silu(gate) * up)`. With a norm before it and the
//! residual stream around it, it is the dense feed-forward block; a shared expert is one too.

use moefold_kernels::Tensor;
use moefold_kernels::elementwise::add_into;
use moefold_kernels::swiglu::{self, Rule};
use moefold_planner::choice::{Module, OffloadModule, Recompute};
use moefold_profiles::trace::Category;

use super::norm::{Norm, Normed};
use super::tokens::Gathering;
use super::{linear, tokens};
use crate::error::Error;
use crate::model::Part;
use crate::offload::Saved;
use crate::rank::Context;
use crate::recompute::Kept;
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

    /// Runs the MLP on `x [t, h]` until its down projection.
    pub fn run(&self, cx: &Context, x: &Tensor) -> Result<GatedSaved, Error> {
        self.run_on(cx, tokens::start_gather(cx, x)?)
    }

    /// The same of an `x` whose rows are under way.
    pub fn run_on(&self, cx: &Context, x: Gathering) -> Result<GatedSaved, Error> {
        let all = x.finish(cx)?;
        let gate_up = linear::forward(cx, CATEGORY, &all, &self.gate_up.value);
        drop(all);
        let activation = cx.op(CATEGORY, || swiglu::forward(&gate_up, None, &Rule::SWIGLU));
        Ok(GatedSaved {
            gate_up,
            activation,
        })
    }

    /// `mlp(x) [t, h]`, from what has run of it; lets go of that where `again` covers `module`.
    pub fn finish(
        &self,
        cx: &Context,
        saved: &mut Kept<GatedSaved>,
        (module, again): (Module, &Recompute),
    ) -> Result<Tensor, Error> {
        let activation = &saved.get().activation;
        let y = linear::forward(cx, CATEGORY, activation, &self.down.value);
        saved.drop_of(module, again);
        tokens::scatter_sum(cx, y)
    }

    /// `dy [t, h] -> dx [t, h]`, with the input `x`; adds to the gradients of the weights.
    pub fn backward(
        &self,
        cx: &Context,
        dy: &Tensor,
        x: Tensor,
        saved: GatedSaved,
    ) -> Result<Tensor, Error> {
        let dy = tokens::start_gather(cx, dy)?;
        let (dgate_up, all) = self.backward_down(cx, dy, &x, saved)?;
        drop(x);
        let dall = self.backward_up(cx, &dgate_up, all.finish(cx)?);
        drop(dgate_up);
        tokens::scatter_sum(cx, dall)
    }

    /// The first half of [`Gated::backward`]: the gradient of gate and up `[T, 2f]`, with the input under way.
    pub fn backward_down(
        &self,
        cx: &Context,
        dy: Gathering,
        x: &Tensor,
        saved: GatedSaved,
    ) -> Result<(Tensor, Gathering), Error> {
        let GatedSaved {
            gate_up,
            activation,
        } = saved;
        let dy_all = dy.finish(cx)?;
        let dactivation = linear::dgrad(cx, CATEGORY, &dy_all, &self.down.value);
        linear::wgrad(cx, CATEGORY, &dy_all, &activation, &self.down.grad);
        drop((dy_all, activation));
        let all = tokens::start_gather(cx, x)?;
        let (dgate_up, _) = cx.op(CATEGORY, || {
            swiglu::backward(&dactivation, &gate_up, None, &Rule::SWIGLU)
        });
        Ok((dgate_up, all))
    }

    /// The second half: a part of the gradient of the input `[T, h]`, from that of gate and up and all of the input.
    pub fn backward_up(&self, cx: &Context, dgate_up: &Tensor, all: Tensor) -> Tensor {
        linear::wgrad(cx, CATEGORY, dgate_up, &all, &self.gate_up.grad);
        drop(all);
        linear::dgrad(cx, CATEGORY, dgate_up, &self.gate_up.value)
    }
}

impl Saved for MlpSaved {
    fn each_tensor(&mut self, see: &mut dyn FnMut(OffloadModule, &mut Tensor)) {
        see(OffloadModule::MlpNorm, &mut self.input);
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
    /// Input of the MLP `[t, h]`.
    norm: Kept<Normed>,
    gated: Kept<GatedSaved>,
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

    /// Runs `mlp(norm(x))` of `x [t, h]` until its down projection.
    pub fn run(&self, cx: &Context, x: &Tensor, again: &Recompute) -> Result<MlpSaved, Error> {
        let mut norm = Kept::new(self.norm.forward(cx, x));
        let gated = self.gated.run(cx, &norm.get().output)?;
        norm.drop_of(Module::Layernorm, again);
        Ok(MlpSaved {
            input: x.clone(),
            norm,
            gated: Kept::new(gated),
        })
    }

    /// `x + mlp(norm(x))`, from what has run of it.
    pub fn finish(
        &self,
        cx: &Context,
        saved: &mut MlpSaved,
        again: &Recompute,
    ) -> Result<Tensor, Error> {
        let of = (Module::Mlp, again);
        let y = self.gated.finish(cx, &mut saved.gated, of)?;
        cx.op(CATEGORY, || add_into(&y, &saved.input));
        Ok(y)
    }

    /// `dy [t, h] -> dx [t, h]`; adds to the gradients of the weights.
    pub fn backward(&self, cx: &Context, dy: &Tensor, saved: MlpSaved) -> Result<Tensor, Error> {
        let MlpSaved {
            input,
            mut norm,
            mut gated,
        } = saved;
        let normed = norm.again(cx, || Ok(self.norm.forward(cx, &input)))?;
        gated.again(cx, || self.gated.run(cx, &normed.output))?;
        let Normed { output, rstd } = norm.into_inner();
        let dnormed = self.gated.backward(cx, dy, output, gated.into_inner())?;
        let dx = self.norm.backward(cx, &dnormed, &input, &rstd);
        cx.op(CATEGORY, || add_into(&dx, dy));
        Ok(dx)
    }
}
