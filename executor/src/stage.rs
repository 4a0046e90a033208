//! [`StageModel`]: the layers of one pipeline stage, and what they save for one microbatch.
//!
//! The order of modules forward and backward is here; when each runs is the schedule's business
//! ([`crate::step`]). A stage takes token ids or the residual stream and gives the residual stream
//! or the loss.

use moefold_kernels::Tensor;
use moefold_kernels::rope::Rope;
use moefold_planner::model::{Ffn, Mixer, Model};

use crate::error::Error;
use crate::layers::Saves;
use crate::layers::attention::{Attention, AttentionSaved};
use crate::layers::embedding::Embedding;
use crate::layers::head::{Head, HeadSaved};
use crate::layers::mlp::{Mlp, MlpSaved};
use crate::model::Holding;
use crate::moe::router::AuxLoss;
use crate::moe::{Moe, MoeSaved, RoutingStats};
use crate::rank::Context;
use crate::store::Store;

/// The modules of one stage.
#[derive(Debug)]
pub struct StageModel {
    embedding: Option<Embedding>,
    layers: Vec<Decoder>,
    head: Option<Head>,
}

/// One decoder layer.
#[derive(Debug)]
struct Decoder {
    index: u32,
    attention: Attention,
    feed_forward: FeedForward,
}

#[derive(Debug)]
enum FeedForward {
    Dense(Box<Mlp>),
    Sparse(Box<Moe>),
}

/// The token ids of one microbatch, and what is the same for every microbatch.
#[derive(Debug)]
pub struct Tokens<'a> {
    /// Inputs `[T]`.
    pub ids: Tensor,
    /// What each should predict `[T]`.
    pub targets: Tensor,
    /// Whole sequences among the `T` tokens.
    pub sequences: usize,
    /// Rotations of their positions.
    pub rope: &'a Rope,
    /// Weight of one token's loss in the loss of this data-parallel replica.
    pub loss_scale: f32,
}

/// What a stage gives.
#[derive(Debug)]
pub enum StageOutput {
    /// The residual stream `[t, h]`, for the next stage.
    Hidden(Tensor),
    /// The loss of every token `[T]`, from the last stage.
    Losses(Tensor),
}

/// What a stage saves of one microbatch.
#[derive(Debug)]
pub struct StageSaved {
    layers: Vec<LayerSaved>,
    head: Option<HeadSaved>,
}

#[derive(Debug)]
struct LayerSaved {
    attention: AttentionSaved,
    feed_forward: FeedForwardSaved,
}

#[derive(Debug)]
enum FeedForwardSaved {
    Dense(Box<MlpSaved>),
    Sparse(Box<MoeSaved>),
}

/// A saved tensor under the names of the declaration.
#[derive(Debug)]
pub struct NamedTensor<'a> {
    /// Decoder layer; absent for the head.
    pub layer: Option<usize>,
    /// Module.
    pub module: &'static str,
    /// Name in the module.
    pub name: &'static str,
    /// The tensor.
    pub tensor: &'a Tensor,
}

impl StageSaved {
    /// Every tensor saved, with its name in the declaration. `layer` counts the stage's layers.
    pub fn tensors(&self) -> Vec<NamedTensor<'_>> {
        fn list<K: Saves>(layer: Option<usize>, saved: &K) -> Vec<NamedTensor<'_>> {
            let named = |(name, tensor)| NamedTensor {
                layer,
                module: K::MODULE,
                name,
                tensor,
            };
            saved.tensors().into_iter().map(named).collect()
        }
        let mut all = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            all.extend(list(Some(index), &layer.attention));
            all.extend(match &layer.feed_forward {
                FeedForwardSaved::Dense(saved) => list(Some(index), saved.as_ref()),
                FeedForwardSaved::Sparse(saved) => list(Some(index), saved.as_ref()),
            });
        }
        if let Some(head) = &self.head {
            all.extend(list(None, head));
        }
        all
    }
}

impl StageModel {
    /// The modules of `holding`, on weights of `store`.
    pub fn new(model: &Model, store: &Store, holding: &Holding, aux: Option<AuxLoss>) -> Self {
        let eps = model.norm.eps;
        let layer = |&index: &u32| {
            let description = &model.layers[index as usize];
            let Some(Mixer::Gqa(gqa)) = &description.mixer else {
                unreachable!("support::check admits only grouped-query attention");
            };
            let feed_forward = match &description.ffn {
                Some(Ffn::Dense(_)) => FeedForward::Dense(Box::new(Mlp::new(store, index, eps))),
                Some(Ffn::Moe(moe)) => {
                    FeedForward::Sparse(Box::new(Moe::new(store, index, moe, eps, aux)))
                }
                None => unreachable!("support::check admits only layers with a feed-forward block"),
            };
            Decoder {
                index,
                attention: Attention::new(store, index, gqa, eps),
                feed_forward,
            }
        };
        Self {
            embedding: holding.embedding.then(|| Embedding::new(store)),
            layers: holding.layers.iter().map(layer).collect(),
            head: holding
                .head
                .then(|| Head::new(store, model.tied_embeddings, eps)),
        }
    }

    /// Runs the stage on one microbatch. `input` is the residual stream from the stage before, if
    /// there is one. `routed` is called with each MoE layer's statistics, in order.
    pub fn forward(
        &self,
        cx: &Context,
        input: Option<Tensor>,
        tokens: &Tokens<'_>,
        mut routed: impl FnMut(RoutingStats),
    ) -> Result<(StageOutput, StageSaved), Error> {
        let mut x = match (&self.embedding, input) {
            (Some(embedding), None) => embedding.forward(cx, &tokens.ids)?,
            (None, Some(input)) => input,
            _ => unreachable!("the first stage has the embedding and no other has"),
        };
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            cx.recorder.at_layer(Some(layer.index));
            let (mid, attention) =
                layer
                    .attention
                    .forward(cx, &x, tokens.sequences, tokens.rope)?;
            let (y, feed_forward) = match &layer.feed_forward {
                FeedForward::Dense(mlp) => {
                    let (y, saved) = mlp.forward(cx, &mid)?;
                    (y, FeedForwardSaved::Dense(Box::new(saved)))
                }
                FeedForward::Sparse(moe) => {
                    let (y, saved, stats) = moe.forward(cx, &mid)?;
                    routed(stats);
                    (y, FeedForwardSaved::Sparse(Box::new(saved)))
                }
            };
            layers.push(LayerSaved {
                attention,
                feed_forward,
            });
            x = y;
        }
        cx.recorder.at_layer(None);
        let Some(head) = &self.head else {
            return Ok((StageOutput::Hidden(x), StageSaved { layers, head: None }));
        };
        let (losses, saved) = head.forward(cx, &x, &tokens.targets, tokens.loss_scale)?;
        let saved = StageSaved {
            layers,
            head: Some(saved),
        };
        Ok((StageOutput::Losses(losses), saved))
    }

    /// Runs the stage backward. `doutput` is the gradient of the residual stream from the stage
    /// after, if there is one; returned is the gradient of the input, unless the embedding took it.
    pub fn backward(
        &self,
        cx: &Context,
        doutput: Option<Tensor>,
        tokens: &Tokens<'_>,
        saved: StageSaved,
    ) -> Result<Option<Tensor>, Error> {
        let mut dx = match (&self.head, saved.head, doutput) {
            (Some(head), Some(saved), None) => head.backward(cx, saved)?,
            (None, None, Some(doutput)) => doutput,
            _ => unreachable!("the last stage has the head and no other has"),
        };
        for (layer, saved) in self.layers.iter().zip(saved.layers).rev() {
            cx.recorder.at_layer(Some(layer.index));
            dx = match (&layer.feed_forward, saved.feed_forward) {
                (FeedForward::Dense(mlp), FeedForwardSaved::Dense(saved)) => {
                    mlp.backward(cx, &dx, *saved)?
                }
                (FeedForward::Sparse(moe), FeedForwardSaved::Sparse(saved)) => {
                    moe.backward(cx, &dx, *saved)?
                }
                _ => unreachable!("a layer saves what its own kind saves"),
            };
            dx = layer.attention.backward(
                cx,
                &dx,
                saved.attention,
                tokens.sequences,
                tokens.rope,
            )?;
        }
        cx.recorder.at_layer(None);
        match &self.embedding {
            None => Ok(Some(dx)),
            Some(embedding) => {
                embedding.backward(cx, &dx, &tokens.ids)?;
                Ok(None)
            }
        }
    }
}
