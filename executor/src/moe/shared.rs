//! The shared expert: an MLP that every token passes beside its routed experts, with its output behind
//! a sigmoid gate or without one.
//!
//! It runs as the dense MLP does, on the rank's own tokens and split over TP (Megatron-Core,
//! `shared_experts.py`). `y += sigmoid(x . w) mlp(x)`, the gate's logit in f32 (Qwen2-MoE); without a
//! gate `y += mlp(x)` (DeepSeek-V3, GLM-4.5).

use moefold_kernels::elementwise::add_into;
use moefold_kernels::{Dtype, Tensor, TensorClass, gate};
use moefold_planner::choice::{Module, Recompute};
use moefold_planner::model::SharedExpert;
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::layers::linear;
use crate::layers::mlp::{Gated, GatedSaved};
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
        let mlp = mlp.into_inner();
        let Some(weight) = &self.gate else {
            cx.op(CATEGORY, || add_into(y, &output));
            return Ok(SharedSaved { mlp, behind: None });
        };
        let behind = behind(cx, x, output, weight);
        cx.op(CATEGORY, || gate::add(&behind.output, &behind.logits, y));
        let behind = Some(behind);
        Ok(SharedSaved { mlp, behind })
    }

    /// As [`Shared::forward`], of an `x` that it has added to the sum before. Without a gate nobody asks for
    /// its output.
    pub fn again(&self, cx: &Context, x: &Tensor) -> Result<SharedSaved, Error> {
        let mut mlp = Kept::new(self.mlp.run(cx, x)?);
        let behind = match &self.gate {
            Some(weight) => {
                let output = self.mlp.finish(cx, &mut mlp, KEEPING)?;
                Some(behind(cx, x, output, weight))
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
        let mut doutput = dy.clone();
        if let (Some(weight), Some(Behind { output, logits })) = (&self.gate, behind) {
            let (behind, dlogits) = cx.op(CATEGORY, || gate::backward(dy, &output, &logits));
            linear::wgrad(cx, CATEGORY, &dlogits, x, &weight.grad);
            linear::dgrad_onto(cx, CATEGORY, &dlogits, &weight.value, dx);
            doutput = behind;
        }
        let own = self.mlp.backward(cx, &doutput, x.clone(), mlp)?;
        cx.op(CATEGORY, || add_into(dx, &own));
        Ok(())
    }
}

fn behind(cx: &Context, x: &Tensor, output: Tensor, weight: &Weight) -> Behind {
    let kind = (TensorClass::Activations, Dtype::F32);
    let logits = linear::forward_as(cx, CATEGORY, kind, x, &weight.value, None);
    Behind { output, logits }
}
