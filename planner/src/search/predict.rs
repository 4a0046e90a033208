//! Prices one candidate in full: simulated pipeline, reductions, optimizer, memory, breakdown.

use std::collections::BTreeMap;

use moefold_profiles::trace::{Category, TimeByCategory};
use moefold_profiles::units::{Bytes, GIB, Seconds};
use moefold_profiles::{Collective, CollectiveKind, Dtype};

use super::candidate::Stages;
use super::shape::{Question, Shape};
use super::split::Cuts;
use super::timeline::{Pipeline, pipeline};
use crate::layout::Layout;
use crate::lower::ends::{self, StepGroups, StepWork};
use crate::memory::RankMemory;
use crate::mesh::{GroupKind, placement};
use crate::model::count;
use crate::plan::{Confidence, LayoutRecord, PlannedLayout, Predicted, ScheduleName};
use crate::price::{self, Bill};
use crate::shard::{self, Shard};

/// A candidate chosen for pricing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) shape: &'a Shape,
    pub(crate) cuts: &'a Cuts,
    pub(crate) set: usize,
}

/// The seconds of a step and where the pipeline's critical rank spends them.
pub(crate) struct Step {
    pub(crate) total_s: f64,
    pipeline: Pipeline,
    /// The rank with the most work.
    rank: usize,
    exposed_reduce_s: f64,
    exposed_gather_s: f64,
    other_reduce_s: f64,
    optimizer_s: f64,
}

/// Times a step without writing its breakdown.
pub(crate) fn step(question: &Question<'_>, choice: &Choice<'_>) -> Step {
    let stages = Stages::new(question, choice.shape, choice.cuts, choice.set);
    let pipeline = pipeline(question, choice, &stages);
    let pp = choice.layout.pp() as usize;
    let microbatches = f64::from(choice.layout.microbatches());
    let busy = |rank: usize| -> f64 {
        (rank..stages.forward_s.len())
            .step_by(pp)
            .map(|stage| stages.forward_s[stage] + stages.backward_s[stage])
            .sum::<f64>()
            * microbatches
    };
    let rank = (0..pp)
        .max_by(|&a, &b| busy(a).total_cmp(&busy(b)).then(b.cmp(&a)))
        .unwrap_or(0);

    let (mut reduced, mut gathered) = (pipeline.total_s, 0.0_f64);
    let (mut other, mut optimizer) = (0.0_f64, 0.0_f64);
    for own in 0..pp {
        let work = step_work(question, choice, own);
        let seconds = |list: &[Collective]| -> f64 {
            list.iter()
                .map(|collective| question.costs.collective(collective).time.0)
                .sum()
        };
        let reduce = seconds(&work.reduce);
        let gather = seconds(&work.gather);
        // Gradients of a stage are complete in its last backward; what the reduction overlaps is
        // that backward, what it may still use is the time until the last rank has finished.
        let chunks = (own..stages.forward_s.len()).step_by(pp);
        let (mut last_backward, mut first_forward) = (0.0, 0.0);
        for stage in chunks {
            last_backward += stages.backward_s[stage];
            first_forward += stages.forward_s[stage];
        }
        let hidden = if question.stack.overlap_grad_reduce {
            reduce.min(last_backward)
        } else {
            0.0
        };
        reduced = reduced.max(pipeline.finish_s[own] + reduce - hidden);
        // Weights are needed by the first forward; later ranks have until their first message.
        let slack = if question.stack.overlap_param_gather {
            pipeline.start_s[own] + first_forward
        } else {
            0.0
        };
        gathered = gathered.max(gather - slack);
        other = other.max(seconds(&work.exposed));
        let own_optimizer: f64 = work
            .optimizer
            .iter()
            .map(|op| question.costs.op(op).time.0)
            .sum();
        optimizer = optimizer.max(own_optimizer);
    }
    let exposed_reduce_s = reduced - pipeline.total_s;
    Step {
        total_s: reduced + gathered + other + optimizer,
        rank,
        exposed_reduce_s,
        exposed_gather_s: gathered,
        other_reduce_s: other,
        optimizer_s: optimizer,
        pipeline,
    }
}

/// The step's own work on one pipeline rank.
fn step_work(question: &Question<'_>, choice: &Choice<'_>, rank: usize) -> StepWork {
    let (layout, options) = (choice.layout, question.options);
    let stages = choice.cuts.len() - 1;
    let pp = layout.pp() as usize;
    let mut shard = Shard::default();
    for stage in (rank..stages).step_by(pp) {
        for layer in choice.cuts[stage]..choice.cuts[stage + 1] {
            let kind = &choice.shape.kinds[question.kind_of[layer as usize]];
            shard += kind.memory[choice.set].shard;
        }
    }
    let table = choice.shape.embedding.memory[choice.set].shard;
    let tied = question.model.tied_embeddings;
    if rank == 0 {
        shard += table;
    }
    if rank + 1 == pp {
        shard += choice.shape.head.memory[choice.set].shard;
        if tied && pp == 1 {
            shard.split -= table.split;
        }
    }
    let of = |kind| placement(layout, kind, question.cluster);
    let groups = StepGroups {
        dp_cp: of(GroupKind::DpCp),
        edp: of(GroupKind::Edp),
        tp: of(GroupKind::Tp),
    };
    let at_an_end = rank == 0 || rank + 1 == pp;
    let pair = (tied && pp > 1 && at_an_end).then(|| {
        let mut pair = of(GroupKind::Pp);
        pair.ranks_per_domain = pair.ranks_per_domain.min(2);
        pair.ranks_per_node = pair.ranks_per_node.min(2);
        pair.ranks = 2;
        pair
    });
    ends::step(
        &shard,
        &groups,
        options.grad_dtype,
        weight_dtype(question),
        pair,
        shard::vocab(question.model, &choice.shape.local) * question.model.hidden,
    )
}

fn weight_dtype(question: &Question<'_>) -> Dtype {
    question.options.precision.activation()
}

/// A message between neighbouring stages: the residual stream of a rank's tokens.
pub(crate) fn message(question: &Question<'_>, choice: &Choice<'_>) -> Option<Collective> {
    let pp = placement(choice.layout, GroupKind::Pp, question.cluster);
    let elements =
        choice.shape.local.tokens_local * question.model.hidden * question.model.residual_streams;
    (pp.ranks > 1).then(|| Collective {
        kind: CollectiveKind::SendRecv,
        bytes: question.options.precision.activation().bytes(elements),
        ranks: 2,
        ranks_per_domain: pp.ranks_per_domain.min(2),
    })
}

/// Everything predicted about a candidate.
pub(crate) fn planned(
    question: &Question<'_>,
    choice: &Choice<'_>,
    memory: &[RankMemory],
) -> PlannedLayout {
    let step = step(question, choice);
    let (layout, options) = (choice.layout, question.options);
    let (forward, backward) = rank_bills(question, choice, step.rank);
    let microbatches = f64::from(layout.microbatches());
    let mut time = TimeByCategory::default();
    let mut device = 0.0;
    for category in Category::ALL {
        let seconds = (forward.get(category) + backward.get(category)) * microbatches;
        device += seconds;
        time.add(category, Seconds(seconds));
    }
    // Launches the device waits for are charged a stage at a time; the rank's own work is what the
    // pipeline ran, so the rest of it is the host.
    let own = step.pipeline.busy_s[step.rank];
    time.add(Category::Host, Seconds((own - device).max(0.0)));
    let messages = step.pipeline.exposed_comm_s[step.rank];
    time.add(Category::PpComm, Seconds(messages));
    let waiting = step.pipeline.total_s - own.max(device) - messages;
    time.add(Category::Bubble, Seconds(waiting.max(0.0)));
    time.add(
        Category::DpComm,
        Seconds(step.exposed_reduce_s + step.exposed_gather_s + step.other_reduce_s),
    );
    time.add(Category::Optimizer, Seconds(step.optimizer_s));
    // The step is the sum of its parts, exactly.
    let step_s = time.total().0;

    let tokens = (options.batch.seq_len * options.batch.global_batch) as f64;
    let gpus = f64::from(layout.gpus());
    let flops_per_token = count::flops_per_token(question.model, options.batch.seq_len).0;
    let flops_per_s = tokens * flops_per_token / step_s / gpus;
    let peak = question
        .cluster
        .gpu
        .peak(mfu_dtype(question))
        .map_or(f64::INFINITY, |peak| peak.0);
    let worst = memory
        .iter()
        .copied()
        .reduce(|a, b| if b.total() > a.total() { b } else { a })
        .unwrap_or_default();
    PlannedLayout {
        layout: LayoutRecord::from(layout),
        pipeline: crate::plan::Pipeline {
            schedule: ScheduleName::of(layout),
            stages: choice
                .cuts
                .windows(2)
                .map(|cut| (cut[0]..cut[1]).collect())
                .collect(),
        },
        dispatcher: choice.shape.dispatcher,
        recompute: question.sets[choice.set].clone(),
        offload: crate::plan::Offload::None,
        precision: options.precision,
        optimizer: options.optimizer,
        stack: options.stack,
        predicted: Predicted {
            step_s,
            tokens_per_s_per_gpu: tokens / step_s / gpus,
            model_tflops_per_gpu: flops_per_s / 1e12,
            mfu: flops_per_s / peak,
            peak_gib: worst.total().gib(),
            memory_gib: worst.record(),
            memory_gib_by_pp_rank: memory.iter().map(|rank| rank.total().gib()).collect(),
            busy_s: busy(question, choice, &step),
            confidence: confidence(&forward, &backward),
            time_s: time,
        },
    }
}

/// The dtype whose peak the model FLOP/s are compared with.
fn mfu_dtype(question: &Question<'_>) -> Dtype {
    let compute = question.options.precision.compute();
    if question.cluster.gpu.peak(compute).is_some() {
        compute
    } else {
        Dtype::F32
    }
}

/// One microbatch's work on a pipeline rank, both passes.
fn rank_bills(question: &Question<'_>, choice: &Choice<'_>, rank: usize) -> (Bill, Bill) {
    let set = &question.sets[choice.set];
    let (mut forward, mut backward) = (Bill::default(), Bill::default());
    for_each_kind(question, choice, rank, |kind, times| {
        let again = kind.bill.backward_with(set);
        for _ in 0..times {
            forward.merge(&kind.bill.forward);
            backward.merge(&again);
        }
    });
    (forward, backward)
}

/// Calls `each` with every kind of work on a pipeline rank and how often it occurs.
fn for_each_kind(
    question: &Question<'_>,
    choice: &Choice<'_>,
    rank: usize,
    mut each: impl FnMut(&super::shape::Kind, u32),
) {
    let (pp, stages) = (choice.layout.pp() as usize, choice.cuts.len() - 1);
    let mut times = vec![0; choice.shape.kinds.len()];
    for stage in (rank..stages).step_by(pp) {
        for layer in choice.cuts[stage]..choice.cuts[stage + 1] {
            times[question.kind_of[layer as usize]] += 1;
        }
    }
    for (kind, &times) in choice.shape.kinds.iter().zip(&times) {
        each(kind, times);
    }
    if rank == 0 {
        each(&choice.shape.embedding, 1);
    }
    if rank + 1 == pp {
        each(&choice.shape.head, 1);
    }
}

/// Busy seconds a step of the critical rank by stem, hidden work included.
fn busy(question: &Question<'_>, choice: &Choice<'_>, step: &Step) -> BTreeMap<String, f64> {
    let mut busy = BTreeMap::new();
    let microbatches = f64::from(choice.layout.microbatches());
    let set = &question.sets[choice.set];
    for_each_kind(question, choice, step.rank, |kind, times| {
        let times = f64::from(times) * microbatches;
        if times == 0.0 {
            return;
        }
        price::add_busy(&mut busy, &kind.lowered.forward, question.costs, times);
        price::add_busy(&mut busy, &kind.lowered.backward, question.costs, times);
        let again: Vec<_> = kind
            .lowered
            .forward
            .iter()
            .filter(|work| crate::lower::runs_again(set, work.part))
            .copied()
            .collect();
        price::add_busy(&mut busy, &again, question.costs, times);
    });
    let work = step_work(question, choice, step.rank);
    for op in &work.optimizer {
        *busy.entry(op.stem().to_owned()).or_insert(0.0) += question.costs.op(op).time.0;
    }
    for collective in work.reduce.iter().chain(&work.gather).chain(&work.exposed) {
        *busy.entry(collective.kind.stem().to_owned()).or_insert(0.0) +=
            question.costs.collective(collective).time.0;
    }
    busy
}

fn confidence(forward: &Bill, backward: &Bill) -> Confidence {
    let (a, b) = (forward.by_source(), backward.by_source());
    let seconds = [a[0] + b[0], a[1] + b[1], a[2] + b[2]];
    let total: f64 = seconds.iter().sum();
    if total <= 0.0 {
        return Confidence {
            extrapolated: 1.0,
            ..Confidence::default()
        };
    }
    let (measured, interpolated) = (seconds[0] / total, seconds[1] / total);
    Confidence {
        measured,
        interpolated,
        extrapolated: 1.0 - measured - interpolated,
    }
}

/// What a device can hold, less nothing: the plan's own overhead is part of its memory.
pub(crate) fn capacity(question: &Question<'_>) -> Bytes {
    Bytes((question.cluster.gpu.memory_gib * GIB as f64) as u64)
}
