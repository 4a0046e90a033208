//! The router: logits, scores, the chosen experts, and the losses of both. All of it is f32, whatever the
//! tokens and the matrix are.

use std::ops::Range;

use moefold_kernels::permute::{self, Room, RowMap};
use moefold_kernels::router::{self, Groups, RouterRule, Routing, Stats};
use moefold_kernels::{Dtype, Tensor, TensorClass, z_loss};
use moefold_planner::choice::{Capacity, DropPolicy};
use moefold_planner::model::{Moe, Score};
use moefold_profiles::trace::Category;

use super::Sparse;
use super::balance::{Balance, Balancing, Load, Losses, RoutingStats, ZLoss};
use super::dispatch::{Chosen, Dispatching};
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
    /// Of the logits `[E]`.
    bias: Option<Weight>,
    /// Added to the scores for the choice alone `[E]` f32 (DeepSeek-V3, arXiv 2412.19437, equation 16).
    correction_bias: Option<Tensor>,
    topk: usize,
    num_experts: usize,
    rule: RouterRule,
    balancing: Balancing,
    dispatching: Dispatching,
    losses: Losses,
}

/// What the losses of a router save for backward, whatever else runs again.
#[derive(Debug, Default)]
pub struct RouterSaved {
    /// Gradient of the loss by every score of an expert in each part `[P, E]`, and the parts, where there is a
    /// balancing loss.
    balance: Option<(Tensor, Vec<Range<usize>>)>,
    /// Logits `[t, E]`, where there is a z-loss.
    z: Option<(Tensor, ZLoss)>,
}

impl Router {
    /// The router of `layer` on its weights.
    pub fn new(store: &Store, layer: u32, moe: &Moe, sparse: Sparse) -> Self {
        let Sparse {
            balancing,
            dispatching,
            ..
        } = sparse;
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
            bias: (moe.router.bias).then(|| store.weight(Some(layer), Part::RouterBias)),
            correction_bias: store.correction_bias(layer),
            topk: moe.topk as usize,
            num_experts: moe.experts as usize,
            rule: RouterRule {
                score,
                normalize: moe.router.normalize,
                scale: moe.router.scale as f32,
                groups,
            },
            losses: Losses::new(balancing, moe.topk as usize, moe.experts as usize),
            balancing,
            dispatching,
        }
    }

    /// Begins a step: what a loss has summed up over microbatches is forgotten.
    pub fn begin_step(&self) {
        self.losses.begin_step();
    }

    /// Scores and chooses for `x [t, h]`. What other ranks choose is not known yet, and where nothing is sent
    /// to them the host does not ask what this one does.
    pub fn forward(
        &self,
        cx: &Context,
        x: &Tensor,
    ) -> Result<(Routing, Chosen, RouterSaved, RoutingStats), Error> {
        let logits = self.logits(cx, x);
        let parts = self.losses.parts(cx, x.dims()[0]);
        let (routing, stats) = cx.op(CATEGORY, || self.choose_with_stats(&logits, &parts));
        let map = cx.op(CATEGORY, || permute::map(&routing.ids, self.num_experts));
        let load = if self.dispatching.needs_counts(cx) {
            let counts = cx.to_host("counts_to_host", || map.counts());
            Load::Known(counts.into_iter().map(|count| count as u64).collect())
        } else {
            Load::Offsets(map.offsets.clone())
        };
        let balance = match stats {
            Some(stats) => Some(self.balance(cx, &stats, &load, parts.len(), x.dims()[0])?),
            None => None,
        };
        let z = (self.balancing.z_loss_coef > 0.0).then(|| {
            let rows = (cx.tp.size() * cx.cp.size() * logits.dims()[0]) as f64;
            ZLoss {
                z: cx.op(CATEGORY, || z_loss::forward(&logits)),
                factor: self.balancing.z_loss_coef / rows,
            }
        });
        let saved = RouterSaved {
            balance: balance
                .as_ref()
                .map(|balance| (balance.gradient.clone(), parts)),
            z: z.clone().map(|z| (logits, z)),
        };
        let mut stats = RoutingStats {
            load,
            balance,
            z,
            ..RoutingStats::default()
        };
        let mut chosen = Chosen {
            ids: routing.ids.clone(),
            map: (!self.dispatching.gathers(cx)).then(|| map.clone()),
            load: stats.load.clone(),
            experts: self.num_experts,
            limit: None,
        };
        if let Some(capacity) = self.dispatching.capacity {
            self.limit(cx, &routing, &map, capacity, &mut chosen);
        }
        stats.limit = chosen.limit;
        Ok((routing, chosen, saved, stats))
    }

    /// Leaves of what was chosen, which `all` is the map of, what experts of a capacity take. Where nobody has
    /// counted, there are as many rows as there may be.
    fn limit(
        &self,
        cx: &Context,
        routing: &Routing,
        all: &RowMap,
        capacity: Capacity,
        chosen: &mut Chosen,
    ) {
        let [tokens, topk, experts] =
            [all.num_tokens(), self.topk, self.num_experts].map(|n| n as u64);
        let each = capacity.rows(tokens, topk, experts) as usize;
        let probs = match capacity.drop_policy {
            DropPolicy::Probs => Some(&routing.probs),
            DropPolicy::Position => None,
        };
        let room = match &chosen.load {
            _ if capacity.pad => Room::Each(each),
            Load::Known(load) => Room::Rows(load.iter().map(|&n| each.min(n as usize)).sum()),
            Load::Offsets(_) => Room::Rows(all.num_rows().min(each * self.num_experts)),
        };
        cx.op(CATEGORY, || {
            chosen.ids = permute::limit(&routing.ids, all, each, probs);
            if let Some(map) = &mut chosen.map {
                *map = permute::map_of(&chosen.ids, 0..self.num_experts, room);
            }
        });
        chosen.limit = Some(each);
    }

    /// As [`Router::forward`], of what it was asked for before, so that the map and the statistics are known.
    pub fn again(&self, cx: &Context, x: &Tensor) -> Routing {
        let logits = self.logits(cx, x);
        cx.op(CATEGORY, || self.choose(&logits))
    }

    fn logits(&self, cx: &Context, x: &Tensor) -> Tensor {
        let kind = (TensorClass::Activations, Dtype::F32);
        let bias = self.bias.as_ref();
        linear::forward_as(cx, CATEGORY, kind, x, &self.matrix.value, bias)
    }

    fn choose(&self, logits: &Tensor) -> Routing {
        let bias = self.correction_bias.as_ref();
        router::forward(logits, self.topk, &self.rule, bias)
    }

    /// Whether what is chosen is what has the largest scores.
    fn is_by_score(&self) -> bool {
        self.correction_bias.is_none() && self.rule.groups.is_none()
    }

    /// The choice, with statistics of the largest scores in each part where there is a loss of them.
    fn choose_with_stats(
        &self,
        logits: &Tensor,
        parts: &[Range<usize>],
    ) -> (Routing, Option<Stats>) {
        if !self.balancing.is_of_scores() {
            return (self.choose(logits), None);
        }
        let by_score = RouterRule {
            groups: None,
            ..self.rule
        };
        let (by_score, stats) =
            router::forward_with_stats(logits, self.topk, &by_score, None, parts);
        if self.is_by_score() {
            return (by_score, Some(stats));
        }
        (self.choose(logits), Some(stats))
    }

    /// The losses of the scores of a microbatch. Where the counts are those of the load, the host may have them
    /// already.
    fn balance(
        &self,
        cx: &Context,
        stats: &Stats,
        load: &Load,
        parts: usize,
        tokens: usize,
    ) -> Result<Balance, Error> {
        let counts: Vec<f64> = match load {
            Load::Known(load) if self.is_by_score() && parts == 1 => {
                load.iter().map(|&count| count as f64).collect()
            }
            _ => {
                let counts = cx.to_host("counts_to_host", || stats.counts.to_i32());
                counts.into_iter().map(f64::from).collect()
            }
        };
        self.losses.of(cx, tokens, stats, &counts)
    }

    /// From the gradient of the chosen probabilities `dprobs [t, K]`, and what the losses have saved: adds to
    /// the gradient of the weight, and to the gradient `dx [t, h]` of the router's input `x`.
    pub fn backward(
        &self,
        cx: &Context,
        dprobs: &Tensor,
        (routing, saved): (&Routing, &RouterSaved),
        x: &Tensor,
        dx: &Tensor,
    ) {
        let dlogits = cx.op(CATEGORY, || {
            let rule = &self.rule;
            match &saved.balance {
                None => router::backward(dprobs, routing, rule, None),
                Some((gradient, parts)) => {
                    router::backward_of_parts(dprobs, routing, rule, gradient, parts)
                }
            }
        });
        if let Some((logits, ZLoss { z, factor })) = &saved.z {
            // Of the whole loss, as often as gradients are averaged over.
            let factor = factor * f64::from(cx.layout.cp()) / f64::from(cx.layout.microbatches());
            cx.op(CATEGORY, || {
                z_loss::backward(logits, z, factor as f32, &dlogits);
            });
        }
        linear::bias_grad(cx, CATEGORY, &dlogits, self.bias.as_ref());
        linear::wgrad(cx, CATEGORY, &dlogits, x, &self.matrix.grad);
        linear::dgrad_onto(cx, CATEGORY, &dlogits, &self.matrix.value, dx);
    }
}
