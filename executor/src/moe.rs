//! The mixture-of-experts block: `y = x + Σ p_e expert_e(norm(x))` over the chosen experts.
//!
//! A rank routes the `t` tokens it holds between blocks, sends a row for each of the `K`
//! choices to the rank that holds the expert, and gets the rows back processed. Attention's TP, CP
//! and DP say only which tokens a rank holds; EP and ETP are laid over the same ranks independently
//! (MoE Parallel Folding, arXiv 2504.14960). The routing probability multiplies the activation inside
//! the expert, so that expert outputs need not be saved. A [`shared`] expert's output is added on the rank
//! that the token is from. Of what a limit of an expert's capacity drops, no row is sent and the probability has
//! no gradient.
//!
//! Shapes: `t` local tokens, `K` choices, `N` rows that this rank's experts process, `E` all experts,
//! `f` expert width on this rank, `h` residual width.

pub mod balance;
pub mod dispatch;
pub mod experts;
pub mod router;
pub mod shared;

use moefold_kernels::Tensor;
use moefold_kernels::elementwise::add_into;
use moefold_kernels::permute::RowMap;
use moefold_kernels::router::Routing;
use moefold_planner::choice::{Module, OffloadModule, Recompute};
use moefold_planner::model::Moe as Description;
use moefold_profiles::trace::Category;

pub use self::balance::{Balance, Load, RoutingStats, ZLoss};

use self::balance::Balancing;
use self::dispatch::{Dispatch, Dispatching, leaving, leaving_numbers};
use self::experts::{Experts, ExpertsSaved};
use self::router::{Router, RouterSaved};
use self::shared::{Begun, Shared, SharedSaved};
use crate::error::Error;
use crate::layers::norm::{Norm, Normed};
use crate::layers::tokens;
use crate::model::Part;
use crate::offload::Saved;
use crate::rank::Context;
use crate::recompute::Kept;
use crate::store::Store;
use crate::turns::now;

/// How sparse blocks work, beside what the model says.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sparse {
    /// How the load of experts is balanced.
    pub balancing: Balancing,
    /// How tokens go to them.
    pub dispatching: Dispatching,
    /// Whether the shared expert runs while they do.
    pub shared_beside: bool,
}

/// The sparse feed-forward block of one layer.
#[derive(Debug)]
pub struct Moe {
    norm: Norm,
    router: Router,
    experts: Experts,
    shared: Option<Shared>,
    /// See [`Sparse`].
    shared_beside: bool,
}

/// What the block saves for backward.
#[derive(Debug)]
pub struct MoeSaved {
    /// Residual stream `[t, h]`.
    input: Tensor,
    /// Input of router and dispatch `[t, h]`.
    norm: Kept<Normed>,
    routed: Routed,
    rows: Kept<ExpertRows>,
    /// Of the shared expert, where there is one.
    shared: Kept<SharedSaved>,
    /// Its first half, where it ran beside dispatch and the second is to come.
    begun: Option<Begun>,
}

/// Where tokens went, which is kept whatever runs again.
#[derive(Debug)]
pub struct Routed {
    dispatch: Dispatch,
    router: RouterSaved,
}

/// The rows of the experts here, until they are sent back.
#[derive(Debug)]
struct ExpertRows {
    /// Chosen experts, their probabilities, and the scores of all.
    routing: Routing,
    experts: ExpertsSaved,
}

impl Moe {
    /// The block of `layer`, on weights of `store`.
    pub fn new(store: &Store, layer: u32, moe: &Description, eps: f64, sparse: Sparse) -> Self {
        let weight = |part| store.weight(Some(layer), part);
        Self {
            norm: Norm::new(weight(Part::PostNorm), eps, Category::Experts),
            router: Router::new(store, layer, moe, sparse),
            experts: Experts::new(store, layer, moe),
            shared: (moe.shared.as_ref()).map(|shared| Shared::new(store, layer, shared)),
            shared_beside: sparse.shared_beside,
        }
    }

    /// Begins a step.
    pub fn begin_step(&self) {
        self.router.begin_step();
    }

    /// Runs `experts(norm(x))` of `x [t, h]` until the experts' second product.
    pub async fn run(
        &self,
        cx: &Context,
        x: &Tensor,
        again: &Recompute,
    ) -> Result<(MoeSaved, RoutingStats), Error> {
        let mut norm = Kept::new(self.norm.forward(cx, x));
        let normed = &norm.get().output;
        let (routing, chosen, router, mut stats) = self.router.forward(cx, normed)?;
        let sent = permuted(cx, normed, &routing, chosen.map.as_ref());
        if self.shared.is_none() {
            norm.drop_of(Module::Layernorm, again);
        }
        let dispatch = Dispatch::plan(cx, chosen)?;
        stats.exchanged.clone_from(&dispatch.exchanged);
        let (rows, begun) = match self.beside(&dispatch) {
            None => (self.rows(cx, routing, sent, &dispatch).await?, None),
            Some(shared) => {
                let normed = &norm.get().output;
                let all = tokens::start_gather(cx, normed)?;
                let (rows, probs) = sent;
                let sent = dispatch.start_to_experts(cx, rows, Some(probs))?;
                let begun = shared.begin(cx, normed, all)?;
                let (rows, probs) = sent.finish_with(cx)?;
                let experts = self.experts.run(cx, rows, probs, dispatch.offsets());
                (ExpertRows { routing, experts }, Some(begun))
            }
        };
        let saved = MoeSaved {
            input: x.clone(),
            norm,
            routed: Routed { dispatch, router },
            rows: Kept::new(rows),
            shared: Kept::later(),
            begun,
        };
        Ok((saved, stats))
    }

    /// The shared expert, where it runs while tokens are sent.
    fn beside(&self, dispatch: &Dispatch) -> Option<&Shared> {
        let beside = self.shared_beside && dispatch.sends();
        self.shared.as_ref().filter(|_| beside)
    }

    /// As [`Moe::run`], of an `x` that ran before: tokens go where they went.
    pub fn run_again(&self, cx: &Context, x: &Tensor, routed: Routed) -> Result<MoeSaved, Error> {
        let norm = self.norm.forward(cx, x);
        let rows = self.rows_again(cx, &norm.output, &routed.dispatch)?;
        Ok(MoeSaved {
            input: x.clone(),
            norm: Kept::new(norm),
            routed,
            rows: Kept::new(rows),
            shared: Kept::later(),
            begun: None,
        })
    }

    /// `x + experts(norm(x))`, from what has run of it.
    pub async fn finish(
        &self,
        cx: &Context,
        saved: &mut MoeSaved,
        again: &Recompute,
    ) -> Result<Tensor, Error> {
        let MoeSaved {
            input,
            norm,
            routed: Routed { dispatch, .. },
            rows: kept,
            shared: kept_shared,
            begun,
        } = saved;
        let experts = &mut kept.get_mut().experts;
        let rows = self.experts.finish(cx, experts, dispatch.offsets(), again);
        kept.drop_of(Module::Moe, again);
        let (y, own) = match (&self.shared, begun.take()) {
            (Some(shared), Some(mut begun)) => {
                let sent = dispatch.start_from_experts(cx, rows, None)?;
                let output = shared.output(cx, &mut begun)?;
                let (y, _) = sent.finish(cx)?;
                let own = Shared::finish(cx, begun, output, &y);
                (y, Some(own))
            }
            (shared, _) => {
                let y = dispatch.from_experts(cx, rows).await?;
                let own = (shared.as_ref()).map(|own| own.forward(cx, &norm.get().output, &y));
                (y, own.transpose()?)
            }
        };
        if let Some(own) = own {
            norm.drop_of(Module::Layernorm, again);
            *kept_shared = Kept::new(own);
            kept_shared.drop_of(Module::SharedExperts, again);
            kept_shared.drop_of(Module::Moe, again);
        }
        cx.op(Category::Experts, || add_into(&y, input));
        Ok(y)
    }

    async fn rows(
        &self,
        cx: &Context,
        routing: Routing,
        (sent, sent_probs): (Tensor, Tensor),
        dispatch: &Dispatch,
    ) -> Result<ExpertRows, Error> {
        let (rows, row_probs) = dispatch.to_experts_with(cx, sent, sent_probs).await?;
        let experts = self.experts.run(cx, rows, row_probs, dispatch.offsets());
        Ok(ExpertRows { routing, experts })
    }

    fn rows_again(
        &self,
        cx: &Context,
        normed: &Tensor,
        dispatch: &Dispatch,
    ) -> Result<ExpertRows, Error> {
        let routing = self.router.again(cx, normed);
        let sent = permuted(cx, normed, &routing, dispatch.map());
        // What runs again lets no other pass have its turn.
        now(self.rows(cx, routing, sent, dispatch))
    }

    /// `dy [t, h] -> dx [t, h]`; adds to the gradients of the weights.
    pub async fn backward(
        &self,
        cx: &Context,
        dy: &Tensor,
        saved: MoeSaved,
    ) -> Result<Tensor, Error> {
        let MoeSaved {
            input,
            mut norm,
            routed: Routed { dispatch, router },
            rows: mut kept,
            shared: mut own,
            begun: _,
        } = saved;
        let normed = &norm.again(cx, || Ok(self.norm.forward(cx, &input)))?.output;
        kept.again(cx, || self.rows_again(cx, normed, &dispatch))?;
        let ExpertRows { routing, experts } = kept.into_inner();
        let sent = leaving(cx, dy, dispatch.map());
        let chosen = (&routing, &router);
        let dnormed = if let Some(shared) = self.beside(&dispatch) {
            own.again(cx, || shared.again(cx, normed))?;
            let mut own = own.into_inner();
            let asked = shared.start_backward(cx, dy, normed, &mut own)?;
            let sent = dispatch.start_to_experts(cx, sent, None)?;
            let begun = shared.begin_backward(cx, asked, normed, own)?;
            let (drows, _) = sent.finish(cx)?;
            let (drows, dprobs) = self
                .experts
                .backward(cx, drows, experts, dispatch.offsets())?;
            let sent = dispatch.start_from_experts(cx, drows, Some(dprobs))?;
            let own = shared.end_backward(cx, begun)?;
            let (dnormed, dprobs) = sent.finish_with(cx)?;
            self.router.backward(cx, &dprobs, chosen, normed, &dnormed);
            shared.finish_backward(cx, own, &dnormed)?;
            dnormed
        } else {
            let drows = dispatch.to_experts(cx, sent).await?;
            let (drows, dprobs) = self
                .experts
                .backward(cx, drows, experts, dispatch.offsets())?;
            let (dnormed, dprobs) = dispatch.from_experts_with(cx, drows, dprobs).await?;
            self.router.backward(cx, &dprobs, chosen, normed, &dnormed);
            if let Some(shared) = &self.shared {
                own.again(cx, || shared.again(cx, normed))?;
                shared.backward(cx, dy, normed, own.into_inner(), &dnormed)?;
            }
            dnormed
        };
        let rstd = &norm.get().rstd;
        let dx = self.norm.backward(cx, &dnormed, &input, rstd);
        cx.op(Category::Experts, || add_into(&dx, dy));
        Ok(dx)
    }
}

impl Saved for MoeSaved {
    fn each_tensor(&mut self, see: &mut dyn FnMut(OffloadModule, &mut Tensor)) {
        see(OffloadModule::MlpNorm, &mut self.input);
        if let Some(rows) = self.rows.there() {
            rows.experts.each_tensor(see);
        }
    }
}

impl MoeSaved {
    /// Where tokens went; all else is let go of.
    pub fn into_routed(self) -> Routed {
        self.routed
    }
}

/// Tokens and their probabilities as they leave.
fn permuted(cx: &Context, x: &Tensor, routing: &Routing, map: Option<&RowMap>) -> (Tensor, Tensor) {
    let rows = leaving(cx, x, map);
    (rows, leaving_numbers(cx, &routing.probs, map))
}
