//! One layout under one dispatcher, recompute set and split: what its stages cost, a bound on its
//! step, and its memory.

use moefold_profiles::units::Bytes;

use super::shape::{Question, Shape};
use super::split::Cuts;
use crate::layout::Layout;
use crate::memory::{self, Moment, RankMemory, StageMemory};
use crate::mesh::{GroupKind, placement};
use crate::shard::Shard;

/// The stages of a layout under one recompute set.
#[derive(Debug, Clone)]
pub(crate) struct Stages {
    /// Forward seconds of each stage.
    pub(crate) forward_s: Vec<f64>,
    /// Backward seconds of each stage.
    pub(crate) backward_s: Vec<f64>,
}

impl Stages {
    /// Adds up the layers of each stage.
    pub(crate) fn new(question: &Question<'_>, shape: &Shape, cuts: &Cuts, set: usize) -> Self {
        let stages = cuts.len() - 1;
        let mut forward_s = vec![0.0; stages];
        let mut backward_s = vec![0.0; stages];
        for stage in 0..stages {
            for layer in cuts[stage]..cuts[stage + 1] {
                let kind = &shape.kinds[question.kind_of[layer as usize]];
                forward_s[stage] += kind.forward_s;
                backward_s[stage] += kind.backward_s[set];
            }
        }
        forward_s[0] += shape.embedding.forward_s;
        backward_s[0] += shape.embedding.backward_s[set];
        forward_s[stages - 1] += shape.head.forward_s;
        backward_s[stages - 1] += shape.head.backward_s[set];
        Self {
            forward_s,
            backward_s,
        }
    }

    /// A step takes no less than this, whatever the schedule: a rank runs all its microbatches, and
    /// before its first and after its last the stages before it must run one microbatch's forward
    /// and backward.
    pub(crate) fn bound_s(&self, layout: &Layout) -> f64 {
        let pp = layout.pp() as usize;
        let microbatches = f64::from(layout.microbatches());
        let mut before = 0.0;
        let mut bound = 0.0_f64;
        for rank in 0..pp {
            let own: f64 = (rank..self.forward_s.len())
                .step_by(pp)
                .map(|stage| self.forward_s[stage] + self.backward_s[stage])
                .sum();
            bound = bound.max(before + microbatches * own);
            before += self.forward_s[rank] + self.backward_s[rank];
        }
        bound
    }
}

/// Memory of every pipeline rank.
pub(crate) fn memory(
    question: &Question<'_>,
    layout: &Layout,
    shape: &Shape,
    cuts: &Cuts,
    set: usize,
    moments: &[Vec<Moment>],
) -> Vec<RankMemory> {
    let (pp, stages) = (layout.pp() as usize, cuts.len() - 1);
    let mut by_stage = vec![StageMemory::default(); stages];
    let mut kinds = vec![0_u64; pp];
    for stage in 0..stages {
        for layer in cuts[stage]..cuts[stage + 1] {
            let kind = question.kind_of[layer as usize];
            by_stage[stage].add_layer(&shape.kinds[kind].memory[set]);
            kinds[stage % pp] |= 1 << kind.min(63);
        }
    }
    by_stage[0].add_layer(&shape.embedding.memory[set]);
    by_stage[stages - 1].add_layer(&shape.head.memory[set]);
    if question.model.tied_embeddings && pp == 1 {
        by_stage[stages - 1].shard.split -= shape.embedding.memory[set].shard.split;
    }
    let options = question.options;
    let bytes = question
        .stack
        .state(options.precision, options.optimizer, options.grad_dtype);
    let overhead = overhead(question, layout, shape);
    (0..pp)
        .map(|rank| {
            let own: Vec<StageMemory> = by_stage.iter().skip(rank).step_by(pp).copied().collect();
            let shard = own
                .iter()
                .fold(Shard::default(), |sum, stage| sum + stage.shard);
            let dense_shards = u64::from(layout.dp() * layout.cp());
            let mut held = memory::state(&shard, bytes, dense_shards, u64::from(layout.edp()));
            held.overhead = overhead;
            let buffers = shape.shape_buffer(kinds[rank]) + question.stack.workspace;
            let mut held = memory::at_worst_moment(held, &own, &moments[rank]);
            held.transient += buffers;
            held
        })
        .collect()
}

/// Context, communicators of the groups that have more than one rank, and dispatcher buffers.
fn overhead(question: &Question<'_>, layout: &Layout, shape: &Shape) -> Bytes {
    let stack = &question.stack;
    let degrees = [
        layout.tp(),
        layout.cp(),
        layout.dp() * layout.cp(),
        layout.pp(),
        layout.ep(),
        layout.etp(),
        layout.edp(),
    ];
    let communicators = degrees.iter().filter(|&&degree| degree > 1).count() as u64;
    let ep = placement(layout, GroupKind::Ep, question.cluster);
    let staging = stack.staging(
        shape.dispatcher,
        question.model.hidden,
        ep.ranks,
        ep.ranks_per_domain,
    );
    stack.context + stack.communicator * communicators + staging
}
