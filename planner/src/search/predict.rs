//! Prices one candidate in full and writes its breakdown: simulated step, memory, where time goes.

use moefold_profiles::pricing::Costs;
use moefold_profiles::trace::{Category, TimeByCategory};
use moefold_profiles::units::{Bytes, Seconds};
use moefold_profiles::{ByClass, Dtype, Source};

use super::candidate::{Case, StageSplit, message, own};
use super::recompute::Sets;
use super::shape::{Question, Shape};
use super::sharded::Waits;
use crate::choice::{CpComm, Masters, Overlap, PrimaryWeights, ScheduleName, StackName, Zero};
use crate::interval::{Class, Interval, Known, of_prices, told_apart as told_apart_by};
use crate::layout::{Layout, Order};
use crate::model::count;
use crate::plan::{Confidence, LayoutRecord, Pipeline, PlannedLayout, Predicted};
use crate::price::{self, Breakdown, BusyByStem};
use crate::simulate::{Simulator, StageTimes, Timeline};

/// A candidate chosen for pricing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) schedule: ScheduleName,
    pub(crate) shape: &'a Shape,
    pub(crate) split: &'a StageSplit,
    pub(crate) sets: &'a Sets,
}

impl<'a> Choice<'a> {
    fn case(&self, question: &'a Question<'a>) -> Case<'a> {
        Case {
            question,
            layout: self.layout,
            shape: self.shape,
            schedule: self.schedule,
        }
    }

    /// What passes of a rank wait for where gradients rest divided, or weights too.
    fn waits(&self, question: &Question<'_>, rank: usize) -> Waits {
        let waits = || self.split.waits(self.case(question), rank, self.sets);
        question.shards_gradients().then(waits).unwrap_or_default()
    }
}

/// A candidate priced in full.
pub(crate) struct Priced {
    pub(crate) plan: PlannedLayout,
    /// Where the time of the step goes on average over pipeline ranks. The critical rank of one
    /// layout has the head and that of another has not, so this is what layouts are compared by.
    pub(crate) mean_s: TimeByCategory,
}

/// Everything predicted about a candidate, whose passes depend on each other as the simulator has it.
pub(crate) fn planned(
    question: &Question<'_>,
    choice: &Choice<'_>,
    simulator: &Simulator,
    memory: &[ByClass<Bytes>],
    on_host: Bytes,
) -> Priced {
    let (layout, options) = (choice.layout, question.options);
    let times = choice.split.times(choice.case(question), choice.sets);
    let timeline = simulator.run(&times);
    let critical = timeline.critical as usize;
    let (forward, backward) = rank_breakdowns(choice, critical);
    let simulated = (&times, &timeline);
    let time_s = time_by_category(question, choice, simulated, critical, (&forward, &backward));
    let mean_s = mean(question, choice, simulated);
    // The step is the sum of its parts, exactly.
    let step_s = time_s.total().0;

    let busy = busy(question, choice, critical);
    let confidence = confidence(&busy);
    let interval = interval(question, &confidence, &time_s);

    let tokens = (options.batch.seq_len * options.batch.global_batch) as f64;
    let gpus = f64::from(layout.gpus());
    let flops_per_token = count::flops_per_token(question.model, options.batch.seq_len).0;
    let flops_per_s = tokens * flops_per_token / step_s / gpus;
    let peak = question
        .cluster
        .gpu
        .peak(mfu_dtype(question))
        .map_or(f64::INFINITY, |peak| peak.0);
    let mfu = flops_per_s / peak;
    assert!(
        mfu <= 1.0 || !is_bounded(question),
        "an MFU of {mfu} of {layout:?}: prices are faster than the device"
    );
    let worst = memory
        .iter()
        .copied()
        .reduce(|a, b| if b.total() > a.total() { b } else { a })
        .unwrap_or_default();
    let (offload, recompute) = (question.offload(), question.recompute(choice.sets));
    let plan = PlannedLayout {
        layout: LayoutRecord::from(layout),
        pipeline: Pipeline {
            schedule: choice.schedule,
            stages: choice.split.stages.clone(),
        },
        dispatcher: choice.shape.dispatcher,
        cp_comm_type: (layout.cp() > 1).then_some(choice.shape.cp_comm),
        hierarchical_context_parallel_sizes: (layout.cp() > 1
            && choice.shape.cp_comm == CpComm::Hierarchical)
            .then(|| {
                let inside = choice.shape.groups.cp_inside;
                [inside, layout.cp() / inside]
            }),
        capacity: question.expert_capacity(),
        rank_order: Some(layout.order()).filter(|order| *order != Order::default()),
        recompute: recompute.clone(),
        offload: offload.kept(question.model, &|layer| recompute.of_layer(layer)),
        precision: options.precision,
        optimizer: options.optimizer,
        grad_dtype: (options.grad_dtype != Dtype::F32).then_some(options.grad_dtype),
        masters: (options.masters != Masters::default()).then_some(options.masters),
        primary_weights: (options.primary_weights != PrimaryWeights::default())
            .then_some(options.primary_weights),
        optimizer_offload_fraction: Some(options.optimizer_offload)
            .filter(|share| !share.is_none()),
        zero: (options.zero != Zero::default()).then_some(options.zero),
        optimizer_instances: (options.instances > 1).then_some(options.instances),
        overlap: (question.overlap
            != Overlap::unsaid(options.stack, question.cluster.gpu.is_cpu()))
        .then_some(question.overlap),
        cuda_graph: options.graphs.filter(|graphs| !graphs.is_none()),
        fp8_attention: options.fp8_attention.then_some(true),
        bucket_elements: question.bucket_elements(layout),
        stack: options.stack,
        predicted: Predicted {
            step_s,
            step_s_low: Some(step_s * interval.low),
            step_s_high: Some(step_s * interval.high),
            tokens_per_s_per_gpu: tokens / step_s / gpus,
            model_tflops_per_gpu: flops_per_s / 1e12,
            mfu,
            peak_gib: worst.total().gib(),
            memory_gib: worst.map(Bytes::gib),
            host_gib: (!offload.is_none() || !options.optimizer_offload.is_none())
                .then(|| on_host.gib()),
            memory_gib_by_pp_rank: memory.iter().map(|rank| rank.total().gib()).collect(),
            memory_classes_gib_by_pp_rank: memory.iter().map(|rank| rank.map(Bytes::gib)).collect(),
            critical_pp_rank: Some(timeline.critical),
            busy_s: busy
                .iter()
                .map(|(stem, busy)| (stem.clone(), busy.seconds()))
                .collect(),
            calls: busy
                .into_iter()
                .map(|(stem, busy)| (stem, busy.calls))
                .collect(),
            confidence,
            time_s,
            routing: None,
        },
    };
    Priced { plan, mean_s }
}

/// What a step may take over what is predicted.
fn interval(question: &Question<'_>, confidence: &Confidence, time_s: &TimeByCategory) -> Interval {
    let (costs, options) = (question.costs, question.options);
    let class = Class::of(question.cluster, options.precision);
    let known = Known {
        confidence,
        samples: costs.samples_spread(),
        fitted: costs
            .calibration()
            .map(|fitted| fitted.sigma(crate::interval::shares(time_s))),
        assumed: question.cluster.gpu.is_cpu(),
    };
    crate::interval::of(options.stack, class, &known)
}

/// By how much of its step time the second of some plans must be slower to be told apart from the first.
pub(crate) fn told_apart(stack: StackName, costs: &Costs, priced: &[Priced]) -> Option<f64> {
    let [first, second, ..] = priced else {
        return None;
    };
    let [first, second] = [&first.plan.predicted, &second.plan.predicted];
    let samples = costs.samples_spread().unwrap_or(0.0);
    let sigma = of_prices(&first.confidence, samples);
    Some(told_apart_by(stack, &first.time_s, &second.time_s, sigma))
}

/// Where time goes on average over pipeline ranks.
fn mean(
    question: &Question<'_>,
    choice: &Choice<'_>,
    (times, timeline): (&StageTimes, &Timeline),
) -> TimeByCategory {
    let mut sum = TimeByCategory::default();
    for rank in 0..timeline.ranks.len() {
        let (forward, backward) = rank_breakdowns(choice, rank);
        let simulated = (times, timeline);
        let own = time_by_category(question, choice, simulated, rank, (&forward, &backward));
        for category in Category::ALL {
            sum.add(category, own.get(category));
        }
    }
    sum.scaled(1.0 / timeline.ranks.len() as f64)
}

/// Where a pipeline rank's time goes. Its passes are told by category as priced, messages,
/// waiting, reduction and update as simulated.
fn time_by_category(
    question: &Question<'_>,
    choice: &Choice<'_>,
    (times, timeline): (&StageTimes, &Timeline),
    rank: usize,
    (forward, backward): (&Breakdown, &Breakdown),
) -> TimeByCategory {
    let simulated = &timeline.ranks[rank];
    let microbatches = f64::from(choice.layout.microbatches());
    let mut time = TimeByCategory::default();
    let mut priced = 0.0;
    for category in Category::ALL.into_iter().filter(|c| c.is_of_a_pass()) {
        let seconds = (forward.get(category) + backward.get(category)) * microbatches;
        priced += seconds;
        time.add(category, Seconds(seconds));
    }
    // Of the exchanges of tokens, what runs beside compute.
    let hidden = simulated.hidden.seconds().0;
    priced -= hidden;
    time.add(Category::EpComm, Seconds(-hidden));
    let waits = choice.waits(question, rank);
    // What the first forward pass of a step waits for beside where weights rest divided.
    let [first, other] = [&times.first_forward, &times.forward].map(|of| of[rank].seconds().0);
    let gather = (first - waits.first_forward) - (other - waits.forward);
    // Launches the device waits for are charged a layer at a time and are in no category above.
    let sharded = waits.passes_s(choice.layout.microbatches());
    let passes = (simulated.forward + simulated.backward).seconds().0 - gather - sharded;
    time.add(Category::Host, Seconds((passes - priced).max(0.0)));
    time.add(Category::PpComm, simulated.p2p.seconds());
    time.add(Category::Bubble, simulated.bubble.seconds());
    let end = &choice.split.ends[rank];
    let reductions = simulated.reduce.seconds().0 + gather + sharded + end.exposed_s;
    time.add(Category::DpComm, Seconds(reductions));
    time.add(Category::Optimizer, Seconds(end.update_s));
    time.add(Category::Offload, Seconds(end.streamed_s));
    time.add(Category::Waiting, Seconds(end.waiting_s));
    time
}

/// Whether nothing but the device bounds what work there is and how fast: prices of a profile, factors of a
/// calibration and those that one tries are the user's, and of tokens that a capacity drops the model FLOPs count all.
fn is_bounded(question: &Question<'_>) -> bool {
    let costs = question.costs;
    let ours = costs.samples_spread().is_none() && costs.calibration().is_none();
    ours && costs.factors().compute >= 1.0 && question.expert_capacity().is_none()
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
fn rank_breakdowns(choice: &Choice<'_>, rank: usize) -> (Breakdown, Breakdown) {
    let (mut forward, mut backward) = (Breakdown::default(), Breakdown::default());
    for stage in own(choice.layout, rank) {
        for (kind, set, count) in choice.split.each_under(choice.shape, stage, choice.sets) {
            let again = kind.breakdown.backward_under(set);
            for _ in 0..count {
                forward.merge(&kind.breakdown.forward);
                backward.merge(&again);
            }
        }
    }
    (forward, backward)
}

/// Busy time of a pipeline rank in a step.
fn busy(question: &Question<'_>, choice: &Choice<'_>, rank: usize) -> BusyByStem {
    let mut busy = BusyByStem::new();
    let microbatches = f64::from(choice.layout.microbatches());
    for stage in own(choice.layout, rank) {
        for (kind, set, count) in choice.split.each_under(choice.shape, stage, choice.sets) {
            let times = f64::from(count) * microbatches;
            let lowered = question.lowered(choice.layout, choice.shape, kind, set);
            price::add_busy(&mut busy, &lowered.forward, question.costs, times);
            price::add_busy(&mut busy, &lowered.backward, question.costs, times);
            price::add_busy(&mut busy, lowered.again(0), question.costs, times);
        }
    }
    if let Some((message, cost)) = message(choice.case(question)) {
        // Both ways over each of its boundaries, sent or received.
        let places = choice.layout.places();
        let boundaries = |stage: usize| {
            let stage = stage as u32;
            u32::from(places.is_received(stage)) + u32::from(places.is_sent(stage))
        };
        let boundaries: u32 = own(choice.layout, rank).map(boundaries).sum();
        let total = busy.entry(message.kind.stem().to_owned()).or_default();
        let calls = 2.0 * f64::from(boundaries) * microbatches;
        total.add(cost, calls);
    }
    let work = &choice.split.ends[rank].work;
    let at_once = work.optimizer.iter().map(|op| (op, 1.0));
    let by_tensor = work.by_tensor.iter();
    let by_tensor = by_tensor.map(|(op, times)| (op, *times as f64));
    for (op, calls) in at_once.chain(by_tensor) {
        let total = busy.entry(op.stem().to_owned()).or_default();
        total.add(question.costs.op(op), calls);
    }
    for (&bytes, leaves) in work
        .streamed
        .iter()
        .flat_map(|bytes| [(bytes, false), (bytes, true)])
    {
        let total = busy.entry("host_copy".to_owned()).or_default();
        total.add(question.costs.transfer(bytes, leaves), 1.0);
    }
    // Divided weights are gathered before the passes of every microbatch, and divided gradients reduced after them.
    let waits = choice.waits(question, rank);
    let gathers: Vec<f64> = if question.shards_weights() {
        waits.gathered(choice.layout.microbatches()).collect()
    } else {
        vec![1.0; work.gather.len()]
    };
    let reductions = if question.shards_gradients() {
        microbatches
    } else {
        1.0
    };
    let once = [&work.exposed, &work.across, &work.gather_across, &work.sums];
    let once = std::iter::repeat(1.0).zip(once.into_iter().flatten());
    let reduced = std::iter::repeat(reductions).zip(&work.reduce);
    for (calls, collective) in gathers
        .into_iter()
        .zip(&work.gather)
        .chain(reduced)
        .chain(once)
    {
        let total = busy.entry(collective.kind.stem().to_owned()).or_default();
        total.add(question.costs.collective(collective), calls);
    }
    for op in &waits.swept {
        let total = busy.entry(op.stem().to_owned()).or_default();
        total.add(question.costs.op(op), microbatches);
    }
    busy
}

/// How the prices of what keeps a rank busy are known.
fn confidence(busy: &BusyByStem) -> Confidence {
    let of = |source: Source| -> f64 {
        let each = busy.values().map(|busy| busy.by_source_s[source as usize]);
        each.sum()
    };
    let [measured, interpolated, extrapolated] = Source::ALL.map(of);
    let total = measured + interpolated + extrapolated;
    if total <= 0.0 {
        return Confidence {
            extrapolated: 1.0,
            ..Confidence::default()
        };
    }
    Confidence {
        measured: measured / total,
        interpolated: interpolated / total,
        extrapolated: extrapolated / total,
    }
}
