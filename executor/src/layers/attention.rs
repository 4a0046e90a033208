//! Grouped-query attention with rotary positions, and where a model has them biases of queries, keys,
//! values and the output, norms of queries and keys (of each head, or of the whole projection), sliding
//! windows and sinks.
//!
//! Heads are split over TP. The block takes and gives the residual stream: `y = x + attention(norm(x))`.
//! Its core is causal over whole sequences, wherever context-parallel ranks have them ([`super::context`]).

use moefold_kernels::attention::{Mask, Sequences};
use moefold_kernels::elementwise::add_into;
use moefold_kernels::{Tensor, rope};
use moefold_planner::choice::{Module, OffloadModule, Recompute};
use moefold_planner::model::{Gqa, QkNorm};
use moefold_profiles::trace::Category;

use super::context::{self, AsTheyAre, Carried, Inputs, flat};
use super::norm::{Norm, Normed};
use super::{linear, tokens};
use crate::error::Error;
use crate::model::Part;
use crate::offload::Saved;
use crate::rank::Context;
use crate::recompute::Kept;
use crate::store::{Store, Weight};

const CATEGORY: Category = Category::Attention;

/// The attention block of one layer.
#[derive(Debug)]
pub struct Attention {
    norm: Norm,
    query: Weight,
    key: Weight,
    value: Weight,
    output: Weight,
    /// Of queries, keys and values.
    biases: Option<[Weight; 3]>,
    /// Of the output: the first TP rank adds it to its part of the sum.
    output_bias: Option<Weight>,
    qk_norm: Option<QkNorms>,
    /// One of each head here `[n]`.
    sinks: Option<Weight>,
    mask: Mask,
    head_dim: usize,
    rotary_dim: usize,
    scale: f32,
}

/// Norms of queries and keys.
#[derive(Debug)]
struct QkNorms {
    query: Norm,
    key: Norm,
    /// Whether each is over the whole projection, divided over TP, rather than over a head.
    is_full: bool,
}

/// What the block saves for backward.
#[derive(Debug)]
pub struct AttentionSaved {
    /// Residual stream `[t, h]`.
    input: Tensor,
    /// Input of the projections `[t, h]`.
    norm: Kept<Normed>,
    heads: Heads,
    core: Kept<Core>,
}

/// What goes into the core.
#[derive(Debug)]
struct Heads {
    /// Queries `[T, n, d]`, normalized and rotated.
    query: Tensor,
    /// Keys `[T, m, d]`, normalized and rotated.
    key: Tensor,
    /// Values `[T, m, d]`.
    value: Tensor,
    /// Where queries and keys are normalized.
    before_norm: Option<BeforeNorm>,
}

#[derive(Debug)]
struct BeforeNorm {
    query: Tensor,
    query_rstd: Tensor,
    key: Tensor,
    key_rstd: Tensor,
}

/// What comes out of it.
#[derive(Debug)]
struct Core {
    /// Output `[T, n, d]`.
    output: Tensor,
    /// Log-sum-exp of the scores.
    lse: Tensor,
}

impl Attention {
    /// The block of `layer`, on weights of `store`.
    pub fn new(store: &Store, layer: u32, gqa: &Gqa, eps: f64) -> Self {
        let weight = |part| store.weight(Some(layer), part);
        let norm = |part| Norm::new(weight(part), eps, CATEGORY);
        Self {
            norm: norm(Part::InputNorm),
            query: weight(Part::Query),
            key: weight(Part::Key),
            value: weight(Part::Value),
            output: weight(Part::Output),
            biases: gqa
                .qkv_bias
                .then(|| [Part::QueryBias, Part::KeyBias, Part::ValueBias].map(weight)),
            output_bias: gqa.out_bias.then(|| weight(Part::OutputBias)),
            qk_norm: (gqa.qk_norm != QkNorm::None).then(|| QkNorms {
                query: norm(Part::QueryNorm),
                key: norm(Part::KeyNorm),
                is_full: gqa.qk_norm == QkNorm::Full,
            }),
            sinks: gqa.sinks.then(|| weight(Part::Sinks)),
            mask: (gqa.window).map_or(Mask::Causal, |keys| Mask::Window(keys as usize)),
            head_dim: gqa.head_dim as usize,
            rotary_dim: gqa.rotary_dim as usize,
            scale: (gqa.head_dim as f32).sqrt().recip(),
        }
    }

    /// Runs `attention(norm(x))` of `x [t, h]`, of these sequences, until its output projection.
    pub fn run(
        &self,
        cx: &Context,
        x: &Tensor,
        sequences: Sequences<'_>,
        rope: &rope::Rope,
        again: &Recompute,
    ) -> Result<AttentionSaved, Error> {
        let mut norm = Kept::new(self.norm.forward(cx, x));
        let heads = self.heads(cx, &norm.get().output, rope)?;
        norm.drop_of(Module::Layernorm, again);
        let core = self.core(cx, &heads, sequences)?;
        Ok(AttentionSaved {
            input: x.clone(),
            norm,
            heads,
            core: Kept::new(core),
        })
    }

    /// `x + attention(norm(x))`, from what has run of it.
    pub fn finish(
        &self,
        cx: &Context,
        saved: &mut AttentionSaved,
        again: &Recompute,
    ) -> Result<Tensor, Error> {
        let output = flat(&saved.core.get().output);
        let bias = self.output_bias.as_ref().filter(|_| cx.tp.index() == 0);
        let weight = &self.output.value;
        let projected = linear::forward_biased(cx, CATEGORY, &output, weight, bias);
        drop(output);
        saved.core.drop_of(Module::CoreAttn, again);
        let y = tokens::scatter_sum(cx, projected)?;
        cx.op(CATEGORY, || add_into(&y, &saved.input));
        Ok(y)
    }

    fn heads(&self, cx: &Context, normed: &Tensor, rope: &rope::Rope) -> Result<Heads, Error> {
        let all = tokens::gather(cx, normed)?;
        let heads = |weight: &Weight, of: usize| {
            let bias = self.biases.as_ref().map(|biases| &biases[of]);
            let projected = linear::forward_biased(cx, CATEGORY, &all, &weight.value, bias);
            let tokens = projected.dims()[0];
            let heads = projected.dims()[1] / self.head_dim;
            projected.reshape(&[tokens, heads, self.head_dim])
        };
        let mut query = heads(&self.query, 0);
        let mut key = heads(&self.key, 1);
        let value = heads(&self.value, 2);
        drop(all);

        let mut before_norm = None;
        if let Some(norms) = &self.qk_norm {
            let (normed_query, query_rstd) = norms.forward(cx, &norms.query, &query)?;
            let (normed_key, key_rstd) = norms.forward(cx, &norms.key, &key)?;
            before_norm = Some(BeforeNorm {
                query: std::mem::replace(&mut query, normed_query),
                query_rstd,
                key: std::mem::replace(&mut key, normed_key),
                key_rstd,
            });
        }
        if self.rotary_dim > 0 {
            cx.op(CATEGORY, || {
                rope::forward(&query, rope);
                rope::forward(&key, rope);
            });
        }
        Ok(Heads {
            query,
            key,
            value,
            before_norm,
        })
    }

    fn core(&self, cx: &Context, heads: &Heads, sequences: Sequences<'_>) -> Result<Core, Error> {
        let carried = heads.carried(cx);
        let inputs = self.inputs(heads, carried.as_ref(), sequences);
        let [output, lse] = context::forward(cx, &AsTheyAre, inputs)?;
        Ok(Core { output, lse })
    }

    fn inputs<'a>(
        &'a self,
        heads: &'a Heads,
        carried: Option<&'a Carried>,
        sequences: Sequences<'a>,
    ) -> Inputs<'a> {
        Inputs {
            query: &heads.query,
            key: &heads.key,
            value: &heads.value,
            carried,
            sequences,
            mask: self.mask,
            scale: self.scale,
            sinks: self.sinks.as_ref(),
        }
    }

    /// `dy [t, h] -> dx [t, h]`; adds to the gradients of the weights.
    pub fn backward(
        &self,
        cx: &Context,
        dy: &Tensor,
        saved: AttentionSaved,
        sequences: Sequences<'_>,
        rope: &rope::Rope,
    ) -> Result<Tensor, Error> {
        let AttentionSaved {
            input,
            mut norm,
            heads,
            mut core,
        } = saved;
        core.again(cx, || self.core(cx, &heads, sequences))?;
        let Core { output, lse } = core.into_inner();
        linear::bias_grad(cx, CATEGORY, dy, self.output_bias.as_ref());
        let dy_all = tokens::gather(cx, dy)?;
        let doutput = linear::dgrad(cx, CATEGORY, &dy_all, &self.output.value);
        linear::wgrad(cx, CATEGORY, &dy_all, &flat(&output), &self.output.grad);
        drop(dy_all);
        let normed = norm.again(cx, || Ok(self.norm.forward(cx, &input)))?;
        let all = tokens::start_gather(cx, &normed.output)?;

        let doutput = doutput.reshape(output.dims());
        let carried = heads.carried(cx);
        let inputs = self.inputs(&heads, carried.as_ref(), sequences);
        let gradients = context::backward(cx, &AsTheyAre, inputs, doutput, [output, lse])?;
        let (mut dquery, mut dkey, dvalue) = (gradients.query, gradients.key, gradients.value);
        if let Some([others_key, others_value]) = gradients.carried {
            cx.op(CATEGORY, || {
                add_into(&dkey, &others_key);
                add_into(&dvalue, &others_value);
            });
        }
        let before_norm = heads.before_norm;
        drop((carried, heads.query, heads.key, heads.value));
        if self.rotary_dim > 0 {
            cx.op(CATEGORY, || {
                rope::backward(&dquery, rope);
                rope::backward(&dkey, rope);
            });
        }
        if let (Some(norms), Some(before)) = (&self.qk_norm, before_norm) {
            let [query, key] = [&norms.query, &norms.key];
            dquery = norms.backward(cx, query, &dquery, &before.query, &before.query_rstd)?;
            dkey = norms.backward(cx, key, &dkey, &before.key, &before.key_rstd)?;
        }
        let (dquery, dkey, dvalue) = (flat(&dquery), flat(&dkey), flat(&dvalue));

        let all = all.finish(cx)?;
        linear::wgrad(cx, CATEGORY, &dquery, &all, &self.query.grad);
        linear::wgrad(cx, CATEGORY, &dkey, &all, &self.key.grad);
        linear::wgrad(cx, CATEGORY, &dvalue, &all, &self.value.grad);
        let Normed { output, rstd } = norm.into_inner();
        drop((all, output));
        for (of, gradient) in [&dquery, &dkey, &dvalue].into_iter().enumerate() {
            let bias = self.biases.as_ref().map(|biases| &biases[of]);
            linear::bias_grad(cx, CATEGORY, gradient, bias);
        }
        let dall = linear::dgrad(cx, CATEGORY, &dquery, &self.query.value);
        linear::dgrad_onto(cx, CATEGORY, &dkey, &self.key.value, &dall);
        linear::dgrad_onto(cx, CATEGORY, &dvalue, &self.value.value, &dall);
        let dnormed = tokens::scatter_sum(cx, dall)?;
        let dx = self.norm.backward(cx, &dnormed, &input, &rstd);
        cx.op(CATEGORY, || add_into(&dx, dy));
        Ok(dx)
    }
}

impl Saved for AttentionSaved {
    fn each_tensor(&mut self, see: &mut dyn FnMut(OffloadModule, &mut Tensor)) {
        see(OffloadModule::AttnNorm, &mut self.input);
        if let Some(norm) = self.norm.there() {
            see(OffloadModule::QkvLinear, &mut norm.output);
        }
        let heads = &mut self.heads;
        for tensor in [&mut heads.query, &mut heads.key, &mut heads.value] {
            see(OffloadModule::CoreAttn, tensor);
        }
        if let Some(core) = self.core.there() {
            see(OffloadModule::AttnProj, &mut core.output);
        }
    }
}

impl Heads {
    /// What other ranks are given of them.
    fn carried(&self, cx: &Context) -> Option<Carried> {
        context::travels(cx).then(|| [self.key.clone(), self.value.clone()])
    }
}

impl QkNorms {
    /// `[T, n, d]` with its reciprocal root mean squares.
    fn forward(&self, cx: &Context, norm: &Norm, x: &Tensor) -> Result<(Tensor, Tensor), Error> {
        let rows = self.rows(x);
        let Normed { output, rstd } = if self.is_full {
            norm.forward_divided(cx, &rows)?
        } else {
            norm.forward(cx, &rows)
        };
        Ok((output.reshape(x.dims()), rstd))
    }

    fn backward(
        &self,
        cx: &Context,
        norm: &Norm,
        dy: &Tensor,
        x: &Tensor,
        rstd: &Tensor,
    ) -> Result<Tensor, Error> {
        let (dy, rows) = (self.rows(dy), self.rows(x));
        let dx = if self.is_full {
            norm.backward_divided(cx, &dy, &rows, rstd)?
        } else {
            norm.backward(cx, &dy, &rows, rstd)
        };
        Ok(dx.reshape(x.dims()))
    }

    /// `[T, n, d]` by what is normed together.
    fn rows(&self, x: &Tensor) -> Tensor {
        let dims = x.dims();
        if self.is_full {
            flat(x)
        } else {
            x.reshape(&[dims[0] * dims[1], dims[2]])
        }
    }
}
