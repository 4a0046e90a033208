//! [`StageModel`]: the layers of one pipeline stage, and what they save for one microbatch.
//!
//! The order of modules forward and backward is here; when each runs is the schedule's business
//! ([`crate::step`]). A stage takes token ids or the residual stream and gives the residual stream
//! or the loss.

mod depth;

use moefold_kernels::Tensor;
use moefold_kernels::attention::Sequences;
use moefold_kernels::rope::Rope;
use moefold_planner::choice::{Offload, Recompute};
use moefold_planner::model::{Ffn, Mixer, Model};

use self::depth::{Depth, DepthSaved};
use crate::error::Error;
use crate::layers::attention::{Attention, AttentionSaved};
use crate::layers::embedding::Embedding;
use crate::layers::head::{Head, HeadSaved};
use crate::layers::latent::{Latent, LatentSaved};
use crate::layers::mlp::{Mlp, MlpSaved};
use crate::model::{Piece, Unit};
use crate::moe::{Moe, MoeSaved, Routed, RoutingStats, Sparse};
use crate::offload::{Away, Saved};
use crate::rank::Context;
use crate::store::Store;
use crate::turns::now;

/// The modules of one stage.
#[derive(Debug)]
pub struct StageModel {
    embedding: Option<Embedding>,
    layers: Vec<Layer>,
    head: Option<Head>,
    /// Beside the head.
    depths: Vec<Depth>,
    /// What of its layers rests on the host between the passes.
    offload: Offload,
    /// Whether something runs after its layers.
    goes_on: bool,
    /// Whether something else of the stage runs before or after it.
    is_part: bool,
}

/// The blocks of a decoder layer that a stage has.
#[derive(Debug)]
struct Layer {
    index: u32,
    blocks: Vec<Block>,
    /// What of it runs again in the backward pass.
    again: Recompute,
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
    /// What each should predict `[T]`, if anything.
    pub targets: Tensor,
    /// Those that the `T` tokens are of.
    pub sequences: Sequences<'a>,
    /// Rotations of their positions.
    pub rope: &'a Rope,
    /// Weight of one token's loss in the mean over the tokens of this rank's tensor-parallel group; where not all
    /// count, over the ranks' share of those that do.
    pub loss_scale: f32,
    /// For each depth of multi-token prediction the ids to embed, and what each should predict `[T]` both.
    pub ahead: Vec<[Tensor; 2]>,
}

/// Who is told when a stage comes to weights and when it is done with them. A depth of multi-token prediction is a
/// layer behind those of the model.
pub trait Visitor {
    /// A forward pass is about to use the weights of a unit.
    fn before(&mut self, _cx: &Context, _unit: Unit) -> Result<(), Error> {
        Ok(())
    }

    /// A backward pass is about to use the weights of a unit, and to add to its gradients.
    fn before_backward(&mut self, _cx: &Context, _unit: Unit) -> Result<(), Error> {
        Ok(())
    }

    /// A backward pass has added to all gradients of a unit.
    fn added(&mut self, _cx: &Context, _unit: Unit) -> Result<(), Error> {
        Ok(())
    }
}

/// Nobody.
impl Visitor for () {}

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
    layers: Vec<LayerSaved>,
    away: Away,
    head: Option<HeadSaved>,
    depths: Vec<DepthSaved>,
}

/// What a layer saves.
#[derive(Debug)]
enum LayerSaved {
    /// What each of its blocks does.
    Blocks(Vec<BlockSaved>),
    /// Of one that runs again as a whole, its input `[t, h]`, and where its blocks sent tokens.
    Input(Tensor, Vec<Option<Routed>>),
}

#[derive(Debug)]
enum BlockSaved {
    Attention(Box<AttentionSaved>),
    Latent(Box<LatentSaved>),
    Dense(Box<MlpSaved>),
    Sparse(Box<MoeSaved>),
}

impl Block {
    /// Runs the block on `x [t, h]`, until what its backward has no need of.
    async fn run(
        &self,
        cx: &Context,
        x: &Tensor,
        tokens: &Tokens<'_>,
        again: &Recompute,
        routed: &mut impl FnMut(RoutingStats),
    ) -> Result<BlockSaved, Error> {
        Ok(match self {
            Self::Attention(attention) => {
                let saved = attention.run(cx, x, tokens.sequences, tokens.rope, again)?;
                BlockSaved::Attention(Box::new(saved))
            }
            Self::Latent(latent) => {
                let saved = latent.run(cx, x, tokens.sequences, tokens.rope, again)?;
                BlockSaved::Latent(Box::new(saved))
            }
            Self::Dense(mlp) => BlockSaved::Dense(Box::new(mlp.run(cx, x, again)?)),
            Self::Sparse(moe) => {
                let (saved, stats) = moe.run(cx, x, again).await?;
                routed(stats);
                BlockSaved::Sparse(Box::new(saved))
            }
        })
    }

    /// As [`Block::run`], of an `x` that ran before, to be kept until its backward.
    fn run_again(
        &self,
        cx: &Context,
        x: &Tensor,
        tokens: &Tokens<'_>,
        routed: Option<Routed>,
    ) -> Result<BlockSaved, Error> {
        match (self, routed) {
            (Self::Sparse(moe), Some(routed)) => {
                let saved = moe.run_again(cx, x, routed)?;
                Ok(BlockSaved::Sparse(Box::new(saved)))
            }
            _ => now(self.run(cx, x, tokens, &Recompute::None, &mut |_| ())),
        }
    }

    /// The residual stream after the block.
    async fn finish(
        &self,
        cx: &Context,
        saved: &mut BlockSaved,
        again: &Recompute,
    ) -> Result<Tensor, Error> {
        match (self, saved) {
            (Self::Attention(attention), BlockSaved::Attention(saved)) => {
                attention.finish(cx, saved, again)
            }
            (Self::Latent(latent), BlockSaved::Latent(saved)) => latent.finish(cx, saved, again),
            (Self::Dense(mlp), BlockSaved::Dense(saved)) => mlp.finish(cx, saved, again),
            (Self::Sparse(moe), BlockSaved::Sparse(saved)) => moe.finish(cx, saved, again).await,
            _ => unreachable!("a block saves what its own kind saves"),
        }
    }

    async fn backward(
        &self,
        cx: &Context,
        dy: &Tensor,
        tokens: &Tokens<'_>,
        saved: BlockSaved,
    ) -> Result<Tensor, Error> {
        match (self, saved) {
            (Self::Attention(attention), BlockSaved::Attention(saved)) => {
                attention.backward(cx, dy, *saved, tokens.sequences, tokens.rope)
            }
            (Self::Latent(latent), BlockSaved::Latent(saved)) => {
                latent.backward(cx, dy, *saved, tokens.sequences, tokens.rope)
            }
            (Self::Dense(mlp), BlockSaved::Dense(saved)) => {
                // No exchange is to come beside which they could run, and what they read is to go.
                cx.settle_weights();
                mlp.backward(cx, dy, *saved)
            }
            (Self::Sparse(moe), BlockSaved::Sparse(saved)) => moe.backward(cx, dy, *saved).await,
            _ => unreachable!("a block saves what its own kind saves"),
        }
    }
}

impl BlockSaved {
    fn as_saved(&mut self) -> &mut dyn Saved {
        match self {
            Self::Attention(saved) => &mut **saved,
            Self::Latent(saved) => &mut **saved,
            Self::Dense(saved) => &mut **saved,
            Self::Sparse(saved) => &mut **saved,
        }
    }

    /// Where it sent tokens, if it did; all else is let go of.
    fn into_routed(self) -> Option<Routed> {
        match self {
            Self::Sparse(saved) => Some(saved.into_routed()),
            Self::Attention(_) | Self::Latent(_) | Self::Dense(_) => None,
        }
    }
}

impl Layer {
    /// Runs forward; each block is told of to `away`, the last whether it `stays`.
    async fn forward(
        &self,
        cx: &Context,
        mut x: Tensor,
        tokens: &Tokens<'_>,
        routed: &mut impl FnMut(RoutingStats),
        (away, offload, stays): (&mut Away, Offload, bool),
    ) -> Result<(Tensor, LayerSaved), Error> {
        let last = self.blocks.len() - 1;
        let input = (self.again == Recompute::Full).then(|| x.clone());
        let (mut blocks, mut kept) = (Vec::new(), Vec::new());
        for (number, block) in self.blocks.iter().enumerate() {
            let mut saved = block.run(cx, &x, tokens, &self.again, routed).await?;
            x = block.finish(cx, &mut saved, &self.again).await?;
            if input.is_some() {
                kept.push(saved.into_routed());
            } else {
                let stays = stays && number == last;
                away.forward(cx, offload, Some(saved.as_saved()), stays);
                blocks.push(saved);
            }
        }
        let saved = match input {
            Some(input) => {
                away.forward(cx, offload, None, stays);
                LayerSaved::Input(input, kept)
            }
            None => LayerSaved::Blocks(blocks),
        };
        Ok((x, saved))
    }

    async fn backward(
        &self,
        cx: &Context,
        mut dx: Tensor,
        tokens: &Tokens<'_>,
        saved: LayerSaved,
        away: &mut Away,
    ) -> Result<Tensor, Error> {
        let (saved, as_one) = match saved {
            LayerSaved::Blocks(saved) => (saved, false),
            LayerSaved::Input(x, routed) => {
                away.backward(cx, None);
                let saved = cx.again(|| self.run_again(cx, x, tokens, routed))?;
                (saved, true)
            }
        };
        for (block, mut saved) in self.blocks.iter().zip(saved).rev() {
            if !as_one {
                away.backward(cx, Some(saved.as_saved()));
            }
            dx = block.backward(cx, &dx, tokens, saved).await?;
        }
        Ok(dx)
    }

    /// What the blocks save, from the input of the first; nobody asks for the output of the last.
    fn run_again(
        &self,
        cx: &Context,
        mut x: Tensor,
        tokens: &Tokens<'_>,
        routed: Vec<Option<Routed>>,
    ) -> Result<Vec<BlockSaved>, Error> {
        let mut blocks: Vec<BlockSaved> = Vec::with_capacity(self.blocks.len());
        let mut before: Option<&Block> = None;
        for (block, routed) in self.blocks.iter().zip(routed) {
            if let (Some(before), Some(saved)) = (before, blocks.last_mut()) {
                x = now(before.finish(cx, saved, &Recompute::None))?;
            }
            blocks.push(block.run_again(cx, &x, tokens, routed)?);
            before = Some(block);
        }
        Ok(blocks)
    }
}

impl StageModel {
    /// The modules of some pieces, in the order of a forward pass, on weights of `store`. `again` says of a
    /// layer what of it runs again in the backward pass, `offload` what leaves for the host. `mtp` is the weight of the losses of multi-token
    /// prediction together.
    pub fn new(
        model: &Model,
        store: &Store,
        pieces: &[Piece],
        sparse: Sparse,
        (again, offload): (&dyn Fn(u32) -> Recompute, Offload),
        mtp: f64,
    ) -> Self {
        let eps = model.norm.eps;
        let mut stage = Self {
            offload,
            goes_on: pieces.contains(&Piece::Head),
            is_part: false,
            embedding: None,
            layers: Vec::new(),
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
                    let depth = |index| Depth::new(model, store, index, sparse, weight);
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
                    stage.push(layer, block, again);
                }
                Piece::FeedForward(layer) => {
                    let block = match &model.layer(layer).ffn {
                        Some(Ffn::Moe(moe)) => {
                            Block::Sparse(Box::new(Moe::new(store, layer, moe, eps, sparse)))
                        }
                        _ => Block::Dense(Box::new(Mlp::new(store, layer, eps))),
                    };
                    stage.push(layer, block, again);
                }
            }
        }
        stage
    }

    /// The same as a part of a stage that goes on after its layers.
    #[must_use]
    pub(crate) fn going_on(mut self) -> Self {
        (self.goes_on, self.is_part) = (true, true);
        self
    }

    /// Begins a step.
    pub fn begin_step(&self) {
        for block in self.layers.iter().flat_map(|layer| &layer.blocks) {
            if let Block::Sparse(moe) = block {
                moe.begin_step();
            }
        }
        self.depths.iter().for_each(Depth::begin_step);
    }

    fn push(&mut self, index: u32, block: Block, again: &dyn Fn(u32) -> Recompute) {
        match self.layers.last_mut() {
            Some(layer) if layer.index == index => layer.blocks.push(block),
            _ => self.layers.push(Layer {
                index,
                blocks: vec![block],
                again: again(index),
            }),
        }
    }

    /// Runs the stage on one microbatch. `input` is the residual stream from the stage before, if
    /// there is one. `visitor` is told of each unit before it is used. `routed` is called with each MoE layer and its
    /// statistics, in order, and once.
    pub(crate) async fn forward(
        &self,
        cx: &Context,
        input: Option<Tensor>,
        tokens: &Tokens<'_>,
        visitor: &mut dyn Visitor,
        mut routed: impl FnMut(u32, RoutingStats),
    ) -> Result<(StageOutput, StageSaved), Error> {
        self.run(cx, input, tokens, visitor, &mut routed).await
    }

    async fn run(
        &self,
        cx: &Context,
        input: Option<Tensor>,
        tokens: &Tokens<'_>,
        visitor: &mut dyn Visitor,
        routed: &mut dyn FnMut(u32, RoutingStats),
    ) -> Result<(StageOutput, StageSaved), Error> {
        let mut x = match (&self.embedding, input) {
            (Some(embedding), None) => {
                visitor.before(cx, Unit::Embedding)?;
                embedding.forward(cx, &tokens.ids)?
            }
            (None, Some(input)) => input,
            _ => unreachable!("the first stage has the embedding and no other has"),
        };
        let mut layers = Vec::with_capacity(self.layers.len());
        let mut away = Away::default();
        for (number, layer) in self.layers.iter().enumerate() {
            cx.recorder.at_layer(Some(layer.index));
            let stays = !self.goes_on && number + 1 == self.layers.len();
            let to_move = (&mut away, self.offload, stays);
            let routed = &mut |stats| routed(layer.index, stats);
            visitor.before(cx, Unit::Layer(layer.index))?;
            let saved;
            (x, saved) = layer.forward(cx, x, tokens, routed, to_move).await?;
            layers.push(saved);
        }
        cx.recorder.at_layer(None);
        let mut saved = StageSaved {
            layers,
            away,
            head: None,
            depths: Vec::new(),
        };
        let Some(head) = &self.head else {
            saved.away.settle(cx);
            return Ok((StageOutput::Hidden(x), saved));
        };
        visitor.before(cx, Unit::Head)?;
        let (losses, of_head) = head.forward(cx, &x, &tokens.targets, tokens.loss_scale)?;
        drop(x);
        let mut hidden = of_head.normed().clone();
        saved.head = Some(of_head);
        let mut all = vec![losses];
        for (depth, ahead) in self.depths.iter().zip(&tokens.ahead) {
            visitor.before(cx, Unit::Layer(depth.index))?;
            let (losses, of_depth) = depth.forward(cx, &hidden, tokens, ahead, routed)?;
            hidden = of_depth.head.normed().clone();
            all.push(losses);
            saved.depths.push(of_depth);
        }
        saved.away.settle(cx);
        Ok((StageOutput::Losses(all), saved))
    }

    /// Runs the stage backward. `doutput` is the gradient of the residual stream from the stage
    /// after, if there is one; returned is the gradient of the input, unless the embedding took it.
    /// `visitor` is told of each unit before it is used and once its gradients are added to, those of weights too.
    pub(crate) async fn backward(
        &self,
        cx: &Context,
        doutput: Option<Tensor>,
        tokens: &Tokens<'_>,
        saved: StageSaved,
        visitor: &mut dyn Visitor,
    ) -> Result<Option<Tensor>, Error> {
        let mut away = saved.away;
        away.ahead(cx);
        let mut dx = match (&self.head, saved.head, doutput) {
            (Some(head), Some(of_head), None) => {
                let mut dhidden = None;
                let depths = self.depths.iter().zip(&tokens.ahead).zip(saved.depths);
                for ((depth, ahead), saved) in depths.rev() {
                    let unit = Unit::Layer(depth.index);
                    visitor.before_backward(cx, unit)?;
                    dhidden = Some(depth.backward(cx, dhidden, tokens, ahead, saved)?);
                    cx.settle_weights();
                    visitor.added(cx, unit)?;
                }
                visitor.before_backward(cx, Unit::Head)?;
                let dx = head.backward(cx, of_head, dhidden)?;
                // What they read is as large as all logits.
                cx.settle_weights();
                visitor.added(cx, Unit::Head)?;
                dx
            }
            (None, None, Some(doutput)) => doutput,
            _ => unreachable!("the last stage has the head and no other has"),
        };
        // Units whose gradients of weights may wait.
        let mut waiting: Vec<Unit> = Vec::new();
        for (layer, saved) in self.layers.iter().zip(saved.layers).rev() {
            cx.recorder.at_layer(Some(layer.index));
            visitor.before_backward(cx, Unit::Layer(layer.index))?;
            dx = layer.backward(cx, dx, tokens, saved, &mut away).await?;
            waiting.push(Unit::Layer(layer.index));
            let last = waiting.len() - usize::from(cx.weights_wait());
            for unit in waiting.drain(..last) {
                visitor.added(cx, unit)?;
            }
        }
        cx.recorder.at_layer(None);
        if !self.is_part {
            cx.settle_weights();
        }
        for unit in waiting {
            visitor.added(cx, unit)?;
        }
        match &self.embedding {
            None => Ok(Some(dx)),
            Some(embedding) => {
                visitor.before_backward(cx, Unit::Embedding)?;
                embedding.backward(cx, &dx, &tokens.ids)?;
                cx.settle_weights();
                visitor.added(cx, Unit::Embedding)?;
                Ok(None)
            }
        }
    }
}
