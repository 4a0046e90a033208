//! The shared expert: an MLP that every token passes beside its routed experts, with its output behind
//! a sigmoid gate or without one.
//!
//! It runs as the dense MLP does, on the rank's own tokens and split over TP (Megatron-Core,
//! `shared_experts.py`). `y += sigmoid(x . w) mlp(x)`, the gate's logit in f32 (Qwen2-MoE); without a
//! gate `y += mlp(x)` (DeepSeek-V3, GLM-4.5).
//!
//! Beside the exchange of tokens it runs in halves: until its activation while they go to the experts, its down
//! projection while they come back, and so in the backward pass (Megatron-Core, `--moe-shared-expert-overlap`).
//! What it needs of TP ranks is asked for before tokens leave, as collectives go one after the other. Its output is
//! added when it is without, so that all bits are the same.

use moefold_kernels::elementwise::add_into;
use moefold_kernels::{Dtype, Tensor, TensorClass, gate};
use moefold_planner::choice::{Module, Recompute};
use moefold_planner::model::SharedExpert;
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::layers::mlp::{Gated, GatedSaved};
use crate::layers::tokens::Gathering;
use crate::layers::{linear, tokens};
use crate::model::Part;
use crate::rank::Context;
use crate::recompute::Kept;
use crate::store::{Store, Weight};

const CATEGORY: Category = Category::Dense;

/// All of it is let go of together, or nothing.
const KEEPING: (Module, &Recompute) = (Module::SharedExperts, &Recompute::None);

/// The shared expert of one layer.
#[derive(Debug)]
pub struct Shared {
    mlp: Gated,
    /// `[1, h]`.
    gate: Option<Weight>,
}

/// What it saves for backward, beside its input.
#[derive(Debug)]
pub struct SharedSaved {
    mlp: GatedSaved,
    behind: Option<Behind>,
}

/// Its first half, before its output is asked for.
#[derive(Debug)]
pub struct Begun {
    mlp: Kept<GatedSaved>,
    /// Of the gate `[t, 1]` f32.
    logits: Option<Tensor>,
}

/// The first half of its backward pass.
pub struct BegunBackward {
    /// Gradient of gate and up `[T, 2f]`.
    dgate_up: Tensor,
    /// Its input, under way to all TP ranks.
    all: Gathering,
    /// Of the gate `[t, 1]`.
    dlogits: Option<Tensor>,
}

/// What is behind the gate.
#[derive(Debug)]
struct Behind {
    /// `[t, h]`.
    output: Tensor,
    /// `[t, 1]` f32.
    logits: Tensor,
}

impl Shared {
    /// The shared expert of `layer`, on weights of `store`.
    pub fn new(store: &Store, layer: u32, shared: &SharedExpert) -> Self {
        let weight = |part| store.weight(Some(layer), part);
        Self {
            mlp: Gated::new(weight(Part::SharedGateUp), weight(Part::SharedDown)),
            gate: shared.gated_output.then(|| weight(Part::SharedGate)),
        }
    }

    /// Adds what it makes of `x [t, h]` to `y [t, h]`.
    pub fn forward(&self, cx: &Context, x: &Tensor, y: &Tensor) -> Result<SharedSaved, Error> {
        let mut mlp = Kept::new(self.mlp.run(cx, x)?);
        let output = self.mlp.finish(cx, &mut mlp, KEEPING)?;
        let logits = self.logits(cx, x);
        Ok(Self::add(cx, mlp.into_inner(), output, logits, y))
    }

    /// The first half, of an `x [t, h]` that is under way to all TP ranks.
    pub fn begin(&self, cx: &Context, x: &Tensor, all: Gathering) -> Result<Begun, Error> {
        let mlp = Kept::new(self.mlp.run_on(cx, all)?);
        let logits = self.logits(cx, x);
        Ok(Begun { mlp, logits })
    }

    /// Its output, before the gate: the second half.
    pub fn output(&self, cx: &Context, begun: &mut Begun) -> Result<Tensor, Error> {
        self.mlp.finish(cx, &mut begun.mlp, KEEPING)
    }

    /// Adds the output to `y [t, h]`.
    pub fn finish(cx: &Context, begun: Begun, output: Tensor, y: &Tensor) -> SharedSaved {
        Self::add(cx, begun.mlp.into_inner(), output, begun.logits, y)
    }

    fn add(
        cx: &Context,
        mlp: GatedSaved,
        output: Tensor,
        logits: Option<Tensor>,
        y: &Tensor,
    ) -> SharedSaved {
        let Some(logits) = logits else {
            cx.op(CATEGORY, || add_into(y, &output));
            return SharedSaved { mlp, behind: None };
        };
        cx.op(CATEGORY, || gate::add(&output, &logits, y));
        let behind = Some(Behind { output, logits });
        SharedSaved { mlp, behind }
    }

    /// The gate's, where there is one.
    fn logits(&self, cx: &Context, x: &Tensor) -> Option<Tensor> {
        let kind = (TensorClass::Activations, Dtype::F32);
        self.gate
            .as_ref()
            .map(|weight| linear::forward_as(cx, CATEGORY, kind, x, &weight.value, None))
    }

    /// As [`Shared::forward`], of an `x` that it has added to the sum before. Without a gate nobody asks for
    /// its output.
    pub fn again(&self, cx: &Context, x: &Tensor) -> Result<SharedSaved, Error> {
        let mut mlp = Kept::new(self.mlp.run(cx, x)?);
        let behind = match &self.gate {
            Some(_) => {
                let output = self.mlp.finish(cx, &mut mlp, KEEPING)?;
                self.logits(cx, x).map(|logits| Behind { output, logits })
            }
            None => None,
        };
        let mlp = mlp.into_inner();
        Ok(SharedSaved { mlp, behind })
    }

    /// Adds to the gradient `dx [t, h]` of its input `x`, from that of its sum `dy [t, h]`, and to the
    /// gradients of the weights.
    pub fn backward(
        &self,
        cx: &Context,
        dy: &Tensor,
        x: &Tensor,
        saved: SharedSaved,
        dx: &Tensor,
    ) -> Result<(), Error> {
        let SharedSaved { mlp, behind } = saved;
        let (doutput, dlogits) = self.behind_gate(cx, dy, x, behind);
        if let (Some(weight), Some(dlogits)) = (&self.gate, dlogits) {
            linear::dgrad_onto(cx, CATEGORY, &dlogits, &weight.value, dx);
        }
        let own = self.mlp.backward(cx, &doutput, x.clone(), mlp)?;
        cx.op(CATEGORY, || add_into(dx, &own));
        Ok(())
    }

    /// Asks for what [`Shared::begin_backward`] needs of TP ranks: the gradient of the output, under way to them,
    /// and that of the gate.
    pub fn start_backward(
        &self,
        cx: &Context,
        dy: &Tensor,
        x: &Tensor,
        saved: &mut SharedSaved,
    ) -> Result<(Gathering, Option<Tensor>), Error> {
        let (doutput, dlogits) = self.behind_gate(cx, dy, x, saved.behind.take());
        Ok((tokens::start_gather(cx, &doutput)?, dlogits))
    }

    /// The first half of the backward pass.
    pub fn begin_backward(
        &self,
        cx: &Context,
        (doutput, dlogits): (Gathering, Option<Tensor>),
        x: &Tensor,
        saved: SharedSaved,
    ) -> Result<BegunBackward, Error> {
        let (dgate_up, all) = self.mlp.backward_down(cx, doutput, x, saved.mlp)?;
        Ok(BegunBackward {
            dgate_up,
            all,
            dlogits,
        })
    }

    /// The second half: a part of the gradient of the input `[T, h]`, and the gradient of the gate.
    pub fn end_backward(
        &self,
        cx: &Context,
        begun: BegunBackward,
    ) -> Result<(Tensor, Option<Tensor>), Error> {
        let BegunBackward {
            dgate_up,
            all,
            dlogits,
        } = begun;
        let all = all.finish(cx)?;
        Ok((self.mlp.backward_up(cx, &dgate_up, all), dlogits))
    }

    /// Adds both to the gradient `dx [t, h]` of the input.
    pub fn finish_backward(
        &self,
        cx: &Context,
        (dall, dlogits): (Tensor, Option<Tensor>),
        dx: &Tensor,
    ) -> Result<(), Error> {
        if let (Some(weight), Some(dlogits)) = (&self.gate, dlogits) {
            linear::dgrad_onto(cx, CATEGORY, &dlogits, &weight.value, dx);
        }
        let own = tokens::scatter_sum(cx, dall)?;
        cx.op(CATEGORY, || add_into(dx, &own));
        Ok(())
    }

    /// The gradient behind the gate, and that of its logits; adds to that of its weights.
    fn behind_gate(
        &self,
        cx: &Context,
        dy: &Tensor,
        x: &Tensor,
        behind: Option<Behind>,
    ) -> (Tensor, Option<Tensor>) {
        let (Some(weight), Some(Behind { output, logits })) = (&self.gate, behind) else {
            return (dy.clone(), None);
        };
        let (behind, dlogits) = cx.op(CATEGORY, || gate::backward(dy, &output, &logits));
        linear::wgrad(cx, CATEGORY, &dlogits, x, &weight.grad);
        (behind, Some(dlogits))
    }
}
