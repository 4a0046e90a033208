//! [`StageModel`]: the layers of one pipeline stage, and what they save for one microbatch.
//!
//! The order of modules forward and backward is here; when each runs is the schedule's business
//! ([`crate::step`]). A stage takes token ids or the residual stream and gives the residual stream
//! or the loss.

mod depth;

use moefold_kernels::Tensor;
use moefold_kernels::rope::Rope;
use moefold_planner::model::{Ffn, Mixer, Model};

use self::depth::{Depth, DepthSaved};
use crate::error::Error;
use crate::layers::attention::{Attention, AttentionSaved};
use crate::layers::embedding::Embedding;
use crate::layers::head::{Head, HeadSaved};
use crate::layers::latent::{Latent, LatentSaved};
use crate::layers::mlp::{Mlp, MlpSaved};
use crate::model::Piece;
use crate::moe::router::AuxLoss;
use crate::moe::{Moe, MoeSaved, RoutingStats};
use crate::rank::Context;
use crate::store::Store;

/// The modules of one stage.
#[derive(Debug)]
pub struct StageModel {
    embedding: Option<Embedding>,
    blocks: Vec<(u32, Block)>,
    head: Option<Head>,
    /// Beside the head.
    depths: Vec<Depth>,
}

/// A block of a decoder layer, from residual stream to residual stream.
#[derive(Debug)]
enum Block {
    Attention(Box<Attention>),
    Latent(Box<Latent>),
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
    /// For each depth of multi-token prediction the ids to embed, and what each should predict `[T]` both.
    pub ahead: Vec<[Tensor; 2]>,
}

/// What a stage gives.
#[derive(Debug)]
pub enum StageOutput {
    /// The residual stream `[t, h]`, for the next stage.
    Hidden(Tensor),
    /// The loss of every token `[T]`, from the last stage: of the model, then of each depth of multi-token
    /// prediction.
    Losses(Vec<Tensor>),
}

/// What a stage saves of one microbatch.
#[derive(Debug)]
pub struct StageSaved {
    /// With the layer of each.
    blocks: Vec<(u32, BlockSaved)>,
    head: Option<HeadSaved>,
    depths: Vec<DepthSaved>,
}

#[derive(Debug)]
enum BlockSaved {
    Attention(Box<AttentionSaved>),
    Latent(Box<LatentSaved>),
    Dense(Box<MlpSaved>),
    Sparse(Box<MoeSaved>),
}

impl StageModel {
    /// The modules of some pieces, in the order of a forward pass, on weights of `store`. `mtp` is the weight of
    /// the losses of multi-token prediction together.
    pub fn new(
        model: &Model,
        store: &Store,
        pieces: &[Piece],
        aux: Option<AuxLoss>,
        mtp: f64,
    ) -> Self {
        let eps = model.norm.eps;
        let mut stage = Self {
            embedding: None,
            blocks: Vec::new(),
            head: None,
            depths: Vec::new(),
        };
        for piece in pieces {
            match *piece {
                Piece::Embedding => stage.embedding = Some(Embedding::new(store)),
                Piece::Head => {
                    stage.head = Some(Head::new(store, model.tied_embeddings, eps));
                    let first = model.layers.len() as u32;
                    let weight = mtp / model.mtp.len() as f64;
                    let depths = (first..).take(model.mtp.len());
                    let depth = |index| Depth::new(model, store, index, aux, weight);
                    stage.depths = depths.map(depth).collect();
                }
                Piece::Mixer(layer) => {
                    let block = match &model.layer(layer).mixer {
                        Some(Mixer::Gqa(gqa)) => {
                            Block::Attention(Box::new(Attention::new(store, layer, gqa, eps)))
                        }
                        Some(Mixer::Mla(mla)) => {
                            let scaling = model.rope_scaling.as_ref();
                            let latent = Latent::new(store, layer, mla, scaling, eps);
                            Block::Latent(Box::new(latent))
                        }
                        _ => unreachable!("support::check admits no other mixer"),
                    };
                    stage.blocks.push((layer, block));
                }
                Piece::FeedForward(layer) => {
                    let block = match &model.layer(layer).ffn {
                        Some(Ffn::Moe(moe)) => {
                            Block::Sparse(Box::new(Moe::new(store, layer, moe, eps, aux)))
                        }
                        _ => Block::Dense(Box::new(Mlp::new(store, layer, eps))),
                    };
                    stage.blocks.push((layer, block));
                }
            }
        }
        stage
    }

    /// Runs the stage on one microbatch. `input` is the residual stream from the stage before, if
    /// there is one. `routed` is called with each MoE layer and its statistics, in order.
    pub fn forward(
        &self,
        cx: &Context,
        input: Option<Tensor>,
        tokens: &Tokens<'_>,
        mut routed: impl FnMut(u32, RoutingStats),
    ) -> Result<(StageOutput, StageSaved), Error> {
        self.run(cx, input, tokens, &mut routed)
    }

    fn run(
        &self,
        cx: &Context,
        input: Option<Tensor>,
        tokens: &Tokens<'_>,
        routed: &mut dyn FnMut(u32, RoutingStats),
    ) -> Result<(StageOutput, StageSaved), Error> {
        let mut x = match (&self.embedding, input) {
            (Some(embedding), None) => embedding.forward(cx, &tokens.ids)?,
            (None, Some(input)) => input,
            _ => unreachable!("the first stage has the embedding and no other has"),
        };
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (layer, block) in &self.blocks {
            cx.recorder.at_layer(Some(*layer));
            let (y, saved) = match block {
                Block::Attention(attention) => {
                    let (y, saved) = attention.forward(cx, &x, tokens.sequences, tokens.rope)?;
                    (y, BlockSaved::Attention(Box::new(saved)))
                }
                Block::Latent(latent) => {
                    let (y, saved) = latent.forward(cx, &x, tokens.sequences, tokens.rope)?;
                    (y, BlockSaved::Latent(Box::new(saved)))
                }
                Block::Dense(mlp) => {
                    let (y, saved) = mlp.forward(cx, &x)?;
                    (y, BlockSaved::Dense(Box::new(saved)))
                }
                Block::Sparse(moe) => {
                    let (y, saved, stats) = moe.forward(cx, &x)?;
                    routed(*layer, stats);
                    (y, BlockSaved::Sparse(Box::new(saved)))
                }
            };
            blocks.push((*layer, saved));
            x = y;
        }
        cx.recorder.at_layer(None);
        let mut saved = StageSaved {
            blocks,
            head: None,
            depths: Vec::new(),
        };
        let Some(head) = &self.head else {
            return Ok((StageOutput::Hidden(x), saved));
        };
        let (losses, of_head) = head.forward(cx, &x, &tokens.targets, tokens.loss_scale)?;
        drop(x);
        let mut hidden = of_head.normed().clone();
        saved.head = Some(of_head);
        let mut all = vec![losses];
        for (depth, ahead) in self.depths.iter().zip(&tokens.ahead) {
            let (losses, of_depth) = depth.forward(cx, &hidden, tokens, ahead, routed)?;
            hidden = of_depth.head.normed().clone();
            all.push(losses);
            saved.depths.push(of_depth);
        }
        Ok((StageOutput::Losses(all), saved))
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
            (Some(head), Some(of_head), None) => {
                let mut dhidden = None;
                let depths = self.depths.iter().zip(&tokens.ahead).zip(saved.depths);
                for ((depth, ahead), saved) in depths.rev() {
                    dhidden = Some(depth.backward(cx, dhidden, tokens, ahead, saved)?);
                }
                head.backward(cx, of_head, dhidden)?
            }
            (None, None, Some(doutput)) => doutput,
            _ => unreachable!("the last stage has the head and no other has"),
        };
        for ((layer, block), (_, saved)) in self.blocks.iter().zip(saved.blocks).rev() {
            cx.recorder.at_layer(Some(*layer));
            dx = match (block, saved) {
                (Block::Attention(attention), BlockSaved::Attention(saved)) => {
                    attention.backward(cx, &dx, *saved, tokens.sequences, tokens.rope)?
                }
                (Block::Latent(latent), BlockSaved::Latent(saved)) => {
                    latent.backward(cx, &dx, *saved, tokens.sequences, tokens.rope)?
                }
                (Block::Dense(mlp), BlockSaved::Dense(saved)) => mlp.backward(cx, &dx, *saved)?,
                (Block::Sparse(moe), BlockSaved::Sparse(saved)) => moe.backward(cx, &dx, *saved)?,
                _ => unreachable!("a block saves what its own kind saves"),
            };
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
