//! The router: logits, scores, the chosen experts, and the load-balancing loss. All of it is f32,
//! whatever the tokens and the matrix are.

use moefold_kernels::permute::{self, RowMap};
use moefold_kernels::router::{self, Groups, RouterRule, Routing, Stats};
use moefold_kernels::{Dtype, Tensor, TensorClass};
use moefold_planner::model::{Moe, Score};
use moefold_profiles::trace::Category;

use super::{Balance, RoutingStats};
use crate::error::Error;
use crate::layers::linear;
use crate::model::Part;
use crate::rank::Context;
use crate::store::{Store, Weight};

const CATEGORY: Category = Category::RouterPermute;

/// The router of one layer.
#[derive(Debug)]
pub struct Router {
    /// `[E, h]`.
    matrix: Weight,
    /// Added to the scores for the choice alone `[E]` f32 (DeepSeek-V3, arXiv 2412.19437, equation 16).
    correction_bias: Option<Tensor>,
    topk: usize,
    num_experts: usize,
    rule: RouterRule,
    aux: Option<AuxLoss>,
}

/// The load-balancing loss of Switch Transformers (arXiv 2101.03961, equation 4), over the tokens
/// of one microbatch in one TP group: `coefficient * E / (K T²) * Σ_e (Σ_t p_te) * count_e`.
#[derive(Debug, Clone, Copy)]
pub struct AuxLoss {
    /// Weight of the loss.
    pub coefficient: f64,
    /// Microbatches of the step: each microbatch's loss counts for its share of the mean.
    pub microbatches: u32,
}

impl Router {
    /// The router of `layer` on its weights, with a balancing loss or without.
    pub fn new(store: &Store, layer: u32, moe: &Moe, aux: Option<AuxLoss>) -> Self {
        let score = match moe.router.score {
            Score::TopkThenSoftmax => router::Score::TopkThenSoftmax,
            Score::SoftmaxThenTopk => router::Score::SoftmaxThenTopk,
            Score::Sigmoid => router::Score::Sigmoid,
            other => unreachable!("support::check refuses {other:?}"),
        };
        let groups = moe.router.groups.as_ref().map(|groups| Groups {
            groups: groups.groups as usize,
            topk: groups.topk as usize,
            scored_by: groups.scored_by as usize,
        });
        Self {
            matrix: store.weight(Some(layer), Part::Router),
            correction_bias: store.correction_bias(layer),
            topk: moe.topk as usize,
            num_experts: moe.experts as usize,
            rule: RouterRule {
                score,
                normalize: moe.router.normalize,
                scale: moe.router.scale as f32,
                groups,
            },
            aux,
        }
    }

    /// Scores and chooses for `x [t, h]`. What other ranks choose is not known yet.
    pub fn forward(
        &self,
        cx: &Context,
        x: &Tensor,
    ) -> Result<(Routing, RowMap, RoutingStats), Error> {
        let logits = self.logits(cx, x);
        let (routing, stats) = cx.op(CATEGORY, || {
            if self.aux.is_none() {
                return (self.choose(&logits), None);
            }
            let (topk, rule, bias) = (self.topk, &self.rule, self.correction_bias.as_ref());
            let (routing, stats) = router::forward_with_stats(&logits, topk, rule, bias);
            (routing, Some(stats))
        });
        let sorted = cx.op(CATEGORY, || permute::sort(&routing.ids, self.num_experts));
        let map = cx.to_host("counts_to_host", || sorted.counted());
        let balance = match (&self.aux, stats) {
            (Some(aux), Some(stats)) => Some(self.balance(cx, aux, stats, &map)?),
            _ => None,
        };
        let stats = RoutingStats {
            load: map.counts.iter().map(|&count| count as u64).collect(),
            balance,
            ..RoutingStats::default()
        };
        Ok((routing, map, stats))
    }

    /// As [`Router::forward`], of what it was asked for before, so that the map and the statistics are known.
    pub fn again(&self, cx: &Context, x: &Tensor) -> Routing {
        let logits = self.logits(cx, x);
        cx.op(CATEGORY, || self.choose(&logits))
    }

    fn logits(&self, cx: &Context, x: &Tensor) -> Tensor {
        let kind = (TensorClass::Activations, Dtype::F32);
        linear::forward_as(cx, CATEGORY, kind, x, &self.matrix.value)
    }

    fn choose(&self, logits: &Tensor) -> Routing {
        let bias = self.correction_bias.as_ref();
        router::forward(logits, self.topk, &self.rule, bias)
    }

    /// The balancing loss of the microbatch; its gradient by the scores is the same for every token.
    /// The counts are the map's, which the host has already.
    fn balance(
        &self,
        cx: &Context,
        aux: &AuxLoss,
        stats: Stats,
        map: &RowMap,
    ) -> Result<Balance, Error> {
        let mut counts: Vec<f64> = map.counts.iter().map(|&count| count as f64).collect();
        if !cx.tp.is_solo() {
            cx.comm(Category::TpComm, "all_reduce", || {
                cx.tp.all_reduce_f64(&mut counts)
            })?;
        }
        let tokens = counts.iter().sum::<f64>() / self.topk as f64;
        let factor =
            aux.coefficient * self.num_experts as f64 / (self.topk as f64 * tokens * tokens);
        let share = factor / f64::from(aux.microbatches);
        let gradient: Vec<f32> = counts.iter().map(|c| (share * c) as f32).collect();
        let gradient = cx
            .device
            .from_f32(TensorClass::Activations, &gradient, &[self.num_experts]);
        Ok(Balance {
            score_sums: stats.score_sums,
            gradient,
        })
    }

    /// From the gradient of the chosen probabilities `dprobs [t, K]`, and that of a balancing loss by every
    /// score of an expert `balance [E]`: adds to the gradient of the weight, and to the gradient `dx [t, h]`
    /// of the router's input `x`.
    pub fn backward(
        &self,
        cx: &Context,
        dprobs: &Tensor,
        (routing, balance): (&Routing, Option<&Tensor>),
        x: &Tensor,
        dx: &Tensor,
    ) {
        let dlogits = cx.op(CATEGORY, || {
            router::backward(dprobs, routing, &self.rule, balance)
        });
        linear::wgrad(cx, CATEGORY, &dlogits, x, &self.matrix.grad);
        linear::dgrad_onto(cx, CATEGORY, &dlogits, &self.matrix.value, dx);
    }
}
