//! [`Depth`]: one depth of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).
//!
//! Depth `k` predicts of each token the one `k + 1` after it: from what the depth before gives for the token
//! (the model itself before the first), normed as a head norms it, and the embedding of the token `k` after it.
//! Both are normed and projected from `2h` to `h`; a decoder layer and a norm follow. Embedding and head are the
//! model's, and nothing of a depth runs again in the backward pass. The projection is whole on every TP rank and runs on its own tokens, since divided it would exchange
//! twice what it reads.

use moefold_kernels::{Tensor, TensorClass, rows};
use moefold_planner::choice::{Offload, Recompute};
use moefold_planner::model::Model;
use moefold_profiles::trace::Category;

use super::{StageModel, StageOutput, StageSaved, Tokens};
use crate::error::Error;
use crate::layers::embedding::Embedding;
use crate::layers::head::{Head, HeadSaved};
use crate::layers::linear;
use crate::layers::norm::Norm;
use crate::model::{Part, Piece};
use crate::moe::{RoutingStats, Sparse};
use crate::rank::Context;
use crate::store::{Store, Weight};
use crate::turns::now;

const CATEGORY: Category = Category::Dense;

/// Nothing of it runs again, and nothing leaves.
const KEEPING: (&dyn Fn(u32) -> Recompute, Offload) = (&|_| Recompute::None, Offload::NONE);

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Depth {
    /// Its number among the layers of checkpoints.
    pub(super) index: u32,
    embedding: Embedding,
    embedding_norm: Norm,
    hidden_norm: Norm,
    projection: Weight,
    layer: StageModel,
    head: Head,
    /// Of its loss in the whole.
    weight: f32,
}

/// What a depth saves for backward.
#[derive(Debug)]
pub(super) struct DepthSaved {
    /// Embedded tokens `[t, h]`.
    embedded: Tensor,
    embedded_rstd: Tensor,
    /// What the depth before gives `[t, h]`.
    hidden: Tensor,
    hidden_rstd: Tensor,
    /// Both normed, the embedding first: input of the projection `[t, 2h]`.
    joined: Tensor,
    layer: StageSaved,
    pub(super) head: HeadSaved,
}

impl Depth {
    /// The depth whose layer is the `index`-th of checkpoints, on weights of `store`.
    pub(super) fn new(
        model: &Model,
        store: &Store,
        index: u32,
        sparse: Sparse,
        weight: f64,
    ) -> Self {
        let eps = model.norm.eps;
        let norm = |part| Norm::new(store.weight(Some(index), part), eps, CATEGORY);
        let pieces = [Piece::Mixer(index), Piece::FeedForward(index)];
        Self {
            index,
            embedding: Embedding::new(store),
            embedding_norm: norm(Part::DepthEmbeddingNorm),
            hidden_norm: norm(Part::DepthHiddenNorm),
            projection: store.weight(Some(index), Part::DepthProjection),
            layer: StageModel::new(model, store, &pieces, sparse, KEEPING, 0.0),
            head: Head::of_depth(store, index, model.tied_embeddings, eps),
            weight: weight as f32,
        }
    }

    /// Forgets the microbatches of the step before.
    pub(super) fn begin_step(&self) {
        self.layer.begin_step();
    }

    /// From `hidden [t, h]`, what the depth before gives, the loss of every token `[T]`. Of `ahead` are the ids
    /// to embed and those to predict, both `[T]`.
    pub(super) fn forward(
        &self,
        cx: &Context,
        hidden: &Tensor,
        tokens: &Tokens<'_>,
        [ids, targets]: &[Tensor; 2],
        routed: &mut dyn FnMut(u32, RoutingStats),
    ) -> Result<(Tensor, DepthSaved), Error> {
        let embedded = self.embedding.forward(cx, ids)?;
        let first = self.embedding_norm.forward(cx, &embedded);
        let second = self.hidden_norm.forward(cx, hidden);
        let (rows, width) = (hidden.dims()[0], hidden.width());
        let joined = cx
            .device
            .empty(TensorClass::Activations, hidden.dtype(), &[rows, 2 * width]);
        cx.op(CATEGORY, || {
            rows::scatter_columns(&first.output, &joined, 0..width);
            rows::scatter_columns(&second.output, &joined, width..2 * width);
        });
        let [embedded_rstd, hidden_rstd] = [first, second].map(|normed| normed.rstd);
        let x = linear::forward(cx, CATEGORY, &joined, &self.projection.value);
        let (output, layer) = now(self.layer.run(cx, Some(x), tokens, &mut (), routed))?;
        let StageOutput::Hidden(x) = output else {
            unreachable!("a layer gives the residual stream")
        };
        let scale = tokens.loss_scale * self.weight;
        let (losses, head) = self.head.forward(cx, &x, targets, scale)?;
        let saved = DepthSaved {
            embedded,
            embedded_rstd,
            hidden: hidden.clone(),
            hidden_rstd,
            joined,
            layer,
            head,
        };
        Ok((losses, saved))
    }

    /// The gradient of what the depth before gives `[t, h]`, from that of what this one gives where there is a
    /// next; adds to the gradients of the weights.
    pub(super) fn backward(
        &self,
        cx: &Context,
        dnext: Option<Tensor>,
        tokens: &Tokens<'_>,
        [ids, _]: &[Tensor; 2],
        saved: DepthSaved,
    ) -> Result<Tensor, Error> {
        let DepthSaved {
            embedded,
            embedded_rstd,
            hidden,
            hidden_rstd,
            joined,
            layer,
            head,
        } = saved;
        let dx = self.head.backward(cx, head, dnext)?;
        let dx = now(self.layer.backward(cx, Some(dx), tokens, layer, &mut ()))?;
        let dx = dx.expect("a layer has no embedding to take it");
        linear::wgrad(cx, CATEGORY, &dx, &joined, &self.projection.grad);
        drop(joined);
        let djoined = linear::dgrad(cx, CATEGORY, &dx, &self.projection.value);
        drop(dx);
        let width = hidden.width();
        let columns = |range| cx.op(CATEGORY, || rows::gather_columns(&djoined, range));
        let (first, second) = (columns(0..width), columns(width..2 * width));
        drop(djoined);
        let dembedded = self
            .embedding_norm
            .backward(cx, &first, &embedded, &embedded_rstd);
        drop((first, embedded));
        self.embedding.backward(cx, &dembedded, ids)?;
        drop(dembedded);
        Ok(self
            .hidden_norm
            .backward(cx, &second, &hidden, &hidden_rstd))
    }
}
