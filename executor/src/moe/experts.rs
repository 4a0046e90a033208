//! The experts of one rank: two grouped products around a gated activation.
//!
//! Rows arrive in expert order with their probabilities and leave the same way; where they come from
//! is [`super::dispatch`]'s business. With ETP the rank holds a slice of every expert's width and its
//! outputs are parts of a sum, to which the first of the ETP ranks adds the bias of the second product.

use moefold_kernels::elementwise::add_into;
use moefold_kernels::grouped_gemm::{self, Matrices, Rows};
use moefold_kernels::swiglu::{self, Rule};
use moefold_kernels::{Tensor, expert_bias};
use moefold_planner::choice::{Module, OffloadModule, Recompute};
use moefold_planner::model::{Activation, Moe};
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::model::{Form, Part};
use crate::offload::Saved;
use crate::rank::Context;
use crate::recompute::Kept;
use crate::store::{Store, Weight};

const CATEGORY: Category = Category::Experts;

/// The experts held by the rank.
#[derive(Debug)]
pub struct Experts {
    /// `[E/ep, 2f, h]`, or by input `[E/ep, h, 2f]`.
    gate_up: Weight,
    /// `[E/ep, h, f]`, or by input `[E/ep, f, h]`.
    down: Weight,
    /// Of both products `[E/ep, 2f]` and `[E/ep, h]`.
    biases: Option<[Weight; 2]>,
    form: Form,
    rule: Rule,
}

/// What the experts save for backward.
#[derive(Debug)]
pub struct ExpertsSaved {
    /// Rows `[N, h]`.
    input: Tensor,
    /// Gate and up `[N, 2f]`.
    gate_up: Tensor,
    /// The gated activation times `p` `[N, f]`.
    activation: Kept<Tensor>,
    /// `p` `[N]`.
    row_probs: Tensor,
}

impl Saved for ExpertsSaved {
    fn each_tensor(&mut self, see: &mut dyn FnMut(OffloadModule, &mut Tensor)) {
        see(OffloadModule::ExpertFc1, &mut self.input);
        see(OffloadModule::MoeAct, &mut self.gate_up);
    }
}

impl Experts {
    /// The experts of `layer`, on weights of `store`.
    pub fn new(store: &Store, layer: u32, moe: &Moe) -> Self {
        let weight = |part| store.weight(Some(layer), part);
        let biases = [Part::GateUpBias, Part::DownBias];
        Self {
            gate_up: weight(Part::GateUp),
            down: weight(Part::Down),
            biases: moe.expert.bias.then(|| biases.map(weight)),
            form: Form::of(moe),
            rule: match moe.expert.activation {
                Activation::Silu => Rule::SWIGLU,
                Activation::ClippedGelu(limit) => Rule {
                    limit: limit as f32,
                    ..Rule::GPT_OSS
                },
                other => unreachable!("support::check refuses {other:?}"),
            },
        }
    }

    fn matrices<'a>(&self, tensor: &'a Tensor) -> Matrices<'a> {
        matrices(self.form, tensor)
    }

    /// Adds the gradient of matrices, of rows that start at `offsets`.
    fn wgrad(&self, cx: &Context, dy: &Tensor, x: &Tensor, offsets: &Tensor, weight: &Weight) {
        let (form, grad) = (self.form, weight.grad.clone());
        let [dy, x, offsets] = [dy, x, offsets].map(Tensor::clone);
        cx.of_weights(CATEGORY, move || {
            grouped_gemm::wgrad_of(&dy, &x, Rows::Offsets(&offsets), matrices(form, &grad));
        });
    }

    /// Adds the gradient of a bias of rows that start at `offsets`, each times its probability where there are any.
    fn bias_grad(
        cx: &Context,
        dy: &Tensor,
        row_probs: Option<&Tensor>,
        offsets: &Tensor,
        bias: &Weight,
    ) {
        let (row_probs, grad) = (row_probs.cloned(), bias.grad.clone());
        let [dy, offsets] = [dy, offsets].map(Tensor::clone);
        cx.of_weights(CATEGORY, move || {
            expert_bias::grad(&dy, row_probs.as_ref(), Rows::Offsets(&offsets), &grad);
        });
    }

    fn activation(&self, cx: &Context, gate_up: &Tensor, row_probs: &Tensor) -> Tensor {
        cx.op(CATEGORY, || {
            swiglu::forward(gate_up, Some(row_probs), &self.rule)
        })
    }

    /// Runs the experts on `x [N, h], p [N]`, rows in expert order, those of each from `offsets`, until their second
    /// product.
    pub fn run(
        &self,
        cx: &Context,
        x: Tensor,
        row_probs: Tensor,
        offsets: &Tensor,
    ) -> ExpertsSaved {
        let rows = Rows::Offsets(offsets);
        let gate_up = cx.op(CATEGORY, || {
            grouped_gemm::forward_of(&x, self.matrices(&self.gate_up.value), rows)
        });
        if let Some([bias, _]) = &self.biases {
            cx.op(CATEGORY, || {
                expert_bias::add(&gate_up, &bias.value, None, rows);
            });
        }
        let activation = self.activation(cx, &gate_up, &row_probs);
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
        offsets: &Tensor,
        again: &Recompute,
    ) -> Tensor {
        let rows = Rows::Offsets(offsets);
        let y = cx.op(CATEGORY, || {
            let down = self.matrices(&self.down.value);
            grouped_gemm::forward_of(saved.activation.get(), down, rows)
        });
        if let Some([_, bias]) = self.biases.as_ref().filter(|_| cx.etp.index() == 0) {
            cx.op(CATEGORY, || {
                expert_bias::add(&y, &bias.value, Some(&saved.row_probs), rows);
            });
        }
        saved.activation.drop_of(Module::MoeAct, again);
        y
    }

    /// `dy [N, h] -> (dx [N, h], dp [N])`; adds to the gradients of the weights.
    pub fn backward(
        &self,
        cx: &Context,
        dy: Tensor,
        saved: ExpertsSaved,
        offsets: &Tensor,
    ) -> Result<(Tensor, Tensor), Error> {
        let ExpertsSaved {
            input,
            gate_up,
            activation: mut kept,
            row_probs,
        } = saved;
        kept.again(cx, || Ok(self.activation(cx, &gate_up, &row_probs)))?;
        let activation = kept.into_inner();
        let rows = Rows::Offsets(offsets);
        self.wgrad(cx, &dy, &activation, offsets, &self.down);
        let dactivation = cx.op(CATEGORY, || {
            grouped_gemm::dgrad_of(&dy, self.matrices(&self.down.value), rows)
        });
        let dprobs_of_bias = self.down_bias_backward(cx, &dy, &row_probs, offsets);
        drop((dy, activation));
        let (dgate_up, dprobs) = cx.op(CATEGORY, || {
            swiglu::backward(&dactivation, &gate_up, Some(&row_probs), &self.rule)
        });
        let dprobs = dprobs.expect("probabilities went in");
        drop((dactivation, gate_up, row_probs));
        if let Some(of_bias) = dprobs_of_bias {
            cx.op(CATEGORY, || add_into(&dprobs, &of_bias));
        }
        if let Some([bias, _]) = &self.biases {
            Self::bias_grad(cx, &dgate_up, None, offsets, bias);
        }
        self.wgrad(cx, &dgate_up, &input, offsets, &self.gate_up);
        drop(input);
        let dx = cx.op(CATEGORY, || {
            grouped_gemm::dgrad_of(&dgate_up, self.matrices(&self.gate_up.value), rows)
        });
        Ok((dx, dprobs))
    }

    /// Adds to the gradient of the second product's bias, which every ETP rank has in full, all rows being with
    /// each; and on the rank that adds that bias gives the gradient of the probabilities by it `[N]`.
    fn down_bias_backward(
        &self,
        cx: &Context,
        dy: &Tensor,
        row_probs: &Tensor,
        offsets: &Tensor,
    ) -> Option<Tensor> {
        let [_, bias] = self.biases.as_ref()?;
        Self::bias_grad(cx, dy, Some(row_probs), offsets, bias);
        let rows = Rows::Offsets(offsets);
        (cx.etp.index() == 0)
            .then(|| cx.op(CATEGORY, || expert_bias::grad_probs(dy, &bias.value, rows)))
    }
}

fn matrices(form: Form, tensor: &Tensor) -> Matrices<'_> {
    match form {
        Form::Apart => Matrices::from(tensor),
        Form::Together => Matrices::by_input(tensor),
    }
}
