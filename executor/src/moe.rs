//! The mixture-of-experts block: `y = x + Σ p_e expert_e(norm(x))` over the chosen experts.
//!
//! Dropless. A rank routes the `t` tokens it holds between blocks, sends a row for each of the `K`
//! choices to the rank that holds the expert, and gets the rows back processed. Attention's TP, CP
//! and DP say only which tokens a rank holds; EP and ETP are laid over the same ranks independently
//! (MoE Parallel Folding, arXiv 2504.14960). The routing probability multiplies the activation inside
//! the expert, so that expert outputs need not be saved. A [`shared`] expert's output is added on the rank
//! that the token is from. Capacity limits and drop-and-pad are not here.
//!
//! Shapes: `t` local tokens, `K` choices, `N` rows that this rank's experts process, `E` all experts,
//! `f` expert width on this rank, `h` residual width.

pub mod dispatch;
pub mod experts;
pub mod router;
pub mod shared;

use moefold_kernels::elementwise::add_into;
use moefold_kernels::{Tensor, permute};
use moefold_planner::model::Moe as Description;
use moefold_profiles::trace::Category;

use self::dispatch::Dispatch;
use self::experts::{Experts, ExpertsSaved};
use self::router::{AuxLoss, Router, RouterSaved};
use self::shared::{Shared, SharedSaved};
use crate::error::Error;
use crate::layers::norm::Norm;
use crate::model::Part;
use crate::rank::Context;
use crate::store::Store;

/// The sparse feed-forward block of one layer.
#[derive(Debug)]
pub struct Moe {
    norm: Norm,
    router: Router,
    experts: Experts,
    shared: Option<Shared>,
}

/// What the block saves for backward.
#[derive(Debug)]
pub struct MoeSaved {
    /// Residual stream `[t, h]`.
    input: Tensor,
    /// Its reciprocal root mean squares `[t]`.
    norm_rstd: Tensor,
    /// Input of router and dispatch `[t, h]`.
    norm_output: Tensor,
    router: RouterSaved,
    dispatch: Dispatch,
    experts: ExpertsSaved,
    shared: Option<SharedSaved>,
}

/// What routing one microbatch was like.
#[derive(Debug, Clone, Default)]
pub struct RoutingStats {
    /// Local tokens sent to each expert.
    pub load: Vec<u64>,
    /// Tokens sent to each expert by all ranks that this one exchanges tokens with, itself among them.
    pub exchanged: Vec<u64>,
    /// What this rank's part of the load-balancing loss is made of; absent when off.
    pub balance: Option<Balance>,
}

/// The load-balancing loss of one microbatch, not multiplied out: the inner product of the two, times
/// the microbatches of the step.
#[derive(Debug, Clone)]
pub struct Balance {
    /// Sums of the scores of every expert over this rank's tokens `[E]`.
    pub score_sums: Tensor,
    /// The gradient of the step's loss by every score of an expert `[E]`.
    pub gradient: Tensor,
}

impl Moe {
    /// The block of `layer`, on weights of `store`.
    pub fn new(
        store: &Store,
        layer: u32,
        moe: &Description,
        eps: f64,
        aux: Option<AuxLoss>,
    ) -> Self {
        let weight = |part| store.weight(Some(layer), part);
        Self {
            norm: Norm::new(weight(Part::PostNorm), eps, Category::Experts),
            router: Router::new(store, layer, moe, aux),
            experts: Experts::new(weight(Part::GateUp), weight(Part::Down)),
            shared: (moe.shared.as_ref()).map(|shared| Shared::new(store, layer, shared)),
        }
    }

    /// `x [t, h] -> x + experts(norm(x))`.
    pub fn forward(
        &self,
        cx: &Context,
        x: &Tensor,
    ) -> Result<(Tensor, MoeSaved, RoutingStats), Error> {
        let (normed, norm_rstd) = self.norm.forward(cx, x);
        let (router, map, mut stats) = self.router.forward(cx, &normed)?;
        let (sent, sent_probs) = cx.op(Category::RouterPermute, || {
            let rows = permute::forward(&normed, &map);
            (rows, permute::permute_slots(&router.routing.probs, &map))
        });
        let dispatch = Dispatch::plan(cx, map)?;
        stats.exchanged.clone_from(&dispatch.exchanged);
        let (rows, row_probs) = dispatch.to_experts_with(cx, sent, sent_probs)?;
        let (rows, experts) = self.experts.forward(cx, rows, row_probs, dispatch.rows());
        let rows = dispatch.from_experts(cx, rows)?;
        let y = cx.op(Category::RouterPermute, || {
            permute::unpermute(&rows, &dispatch.map, None)
        });
        drop(rows);
        let shared = match &self.shared {
            Some(shared) => Some(shared.forward(cx, &normed, &y)?),
            None => None,
        };
        cx.op(Category::Experts, || add_into(&y, x));
        let saved = MoeSaved {
            input: x.clone(),
            norm_rstd,
            norm_output: normed,
            router,
            dispatch,
            experts,
            shared,
        };
        Ok((y, saved, stats))
    }

    /// `dy [t, h] -> dx [t, h]`; adds to the gradients of the weights.
    pub fn backward(&self, cx: &Context, dy: &Tensor, saved: MoeSaved) -> Result<Tensor, Error> {
        let dispatch = &saved.dispatch;
        let sent = cx.op(Category::RouterPermute, || {
            permute::forward(dy, &dispatch.map)
        });
        let drows = dispatch.to_experts(cx, sent)?;
        let (drows, drow_probs) = self
            .experts
            .backward(cx, drows, saved.experts, dispatch.rows());
        let (drows, drow_probs) = dispatch.from_experts_with(cx, drows, drow_probs)?;
        let (dnormed, dprobs) = cx.op(Category::RouterPermute, || {
            let dnormed = permute::unpermute(&drows, &dispatch.map, None);
            (
                dnormed,
                permute::unpermute_slots(&drow_probs, &dispatch.map),
            )
        });
        drop((drows, drow_probs));
        self.router
            .backward(cx, &dprobs, &saved.router, &saved.norm_output, &dnormed);
        if let (Some(shared), Some(own)) = (&self.shared, saved.shared) {
            shared.backward(cx, dy, &saved.norm_output, own, &dnormed)?;
        }
        let dx = self
            .norm
            .backward(cx, &dnormed, &saved.input, &saved.norm_rstd);
        cx.op(Category::Experts, || add_into(&dx, dy));
        Ok(dx)
    }
}
