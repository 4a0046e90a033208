//! Memory that CUDA graphs take of Megatron-Core beside what the same work takes without them.
//!
//! Graphs of modules ([Transformer Engine](https://github.com/NVIDIA/TransformerEngine), `make_graphed_callables` with
//! `_reuse_graph_input_output_buffers`) share one pool, in the order of the schedule. Inputs are copied into buffers that
//! stay; a layer's input is saved without graphs too, so that alone is no more. More is
//!
//! - what a graph gives, alive until the backward pass of its microbatch, where without it that is let go of: the output of
//!   the shared expert, and the norm before the experts where that would run again;
//! - the message that a stage has received, which the schedule keeps beside the copy of it;
//! - gradients of what graphs give, in buffers that stay, one set for all;
//! - the working set of what is a graph beside that of what is none, since no block of one pool serves the other;
//! - the driver's record of every kernel: a graph has nodes, and in a pipeline, as where passes are combined, each
//!   microbatch has graphs of its own (`2 L M` of `L` layers and `M` microbatches, else `2 L`;
//!   `TECudaGraphHelper._get_cuda_graph_input_data` in `megatron/core/transformer/cuda_graphs.py`).
//!
//! A graph of the whole step is one pool and has the nodes of all microbatches. Rows of dropless experts are bounded by a
//! budget, and what works on them is as large as the budget; what they save goes to pages of their true size
//! (`--moe-paged-stash`).

use moefold_profiles::units::Bytes;

use crate::choice::{GraphModule, Graphs, Module, Recompute};
use crate::local::Local;
use crate::model::{Ffn, Layer, Mixer, Model};
use crate::runtime::Setting;

/// What the driver has for a kernel of a graph: about 10 KB (NVIDIA/cccl#3768, CUDA 12.8). Drivers of CUDA 11 had 64 KB.
pub const NODE: Bytes = Bytes(10_000);

/// Rows that the experts of a rank may get over those they do, under graphs of the whole step:
/// `--moe-expert-rank-capacity-factor` in the recipes of Megatron-Bridge 26.08.
const BUDGET: f64 = 1.5;

/// Whether all of a layer's mixer is a graph.
fn has_mixer(graphs: Graphs, layer: &Layer) -> bool {
    match &layer.mixer {
        Some(Mixer::Linear(_)) => graphs.covers(GraphModule::Mamba),
        Some(_) => graphs.covers(GraphModule::Attn),
        None => false,
    }
}

/// Whether graphs begin with what a stage receives.
pub fn copy_messages(graphs: Graphs, model: &Model) -> bool {
    !graphs.is_whole() && model.layers.iter().any(|layer| has_mixer(graphs, layer))
}

/// Elements in the type of activations that a layer keeps of a microbatch since they come out of a graph.
pub(super) fn given(setting: &Setting<'_>, layer: &Layer, recompute: &Recompute) -> u64 {
    let graphs = setting.graphs;
    let router = !graphs.is_whole() && graphs.covers(GraphModule::MoeRouter);
    let Some(Ffn::Moe(moe)) = layer.ffn.as_ref().filter(|_| router) else {
        return 0;
    };
    let width = setting.local.tokens_local * setting.model.hidden;
    let shared = moe.shared.is_some() && !setting.shared_beside;
    let norm = recompute.covers(Module::Layernorm);
    width * (u64::from(shared) + u64::from(norm))
}

/// Elements in the type of activations that the passes of a layer work in, of the mixer and of the feed-forward block
/// `[mixer, ffn]`: at a time the one or the other, or both where only one of them is a graph; and gradients of what
/// graphs give.
pub(super) fn at_once(
    setting: &Setting<'_>,
    layer: &Layer,
    [mixer, ffn]: [u64; 2],
    backward: bool,
) -> u64 {
    let graphs = setting.graphs;
    if graphs.is_none() || graphs.is_whole() {
        return mixer.max(ffn);
    }
    let width = setting.local.tokens_local * setting.model.hidden;
    let (first, dense) = (has_mixer(graphs, layer), graphs.covers(GraphModule::Mlp));
    let (second, router) = match &layer.ffn {
        Some(Ffn::Dense(_)) => (dense, false),
        Some(Ffn::Moe(_)) => (
            graphs.covers(GraphModule::Moe),
            graphs.covers(GraphModule::MoeRouter),
        ),
        None => (first, false),
    };
    let apart = first != second && mixer > 0 && ffn > 0;
    let works = if apart { mixer + ffn } else { mixer.max(ffn) };
    // Of the residual stream, and behind the router of the rows to send and of the shared expert.
    let gives = u64::from(first || second || router) + 2 * u64::from(router);
    works + if backward { width * gives } else { 0 }
}

/// Rows that the experts of a rank work on at once.
pub(super) fn rows(setting: &Setting<'_>, local: &Local) -> u64 {
    let pads = setting.capacity.is_some_and(|capacity| capacity.pad);
    if setting.graphs.is_whole() && !pads {
        (local.expert_rows as f64 * BUDGET) as u64
    } else {
        local.expert_rows
    }
}
