//! [`StageSplit`]: one layout under one dispatcher and one split into stages, ready for every choice of
//! recompute sets: durations of its stages, bound, simulated step, memory.

use std::iter::repeat_n;
use std::ops::Range;
use std::rc::Rc;

use moefold_profiles::units::{Bytes, GIB, Seconds, Span};
use moefold_profiles::{ByClass, Collective, CollectiveKind, Dtype, Op, Precision, TensorClass};

use super::by_layer::{self, Chunk};
use super::mix::{self, Alike, Way};
use super::recompute::Sets;
use super::shape::{Kind, Question, Shape};
use super::sharded::{Part, Waits};
use crate::bucket::{self, Division, Turns};
use crate::choice::{CpComm, PrimaryWeights, ScheduleName, StackName, in_flight};
use crate::layout::Layout;
use crate::lower::ends::{self, Held, StepGroups, StepWork};
use crate::memory::{self, Occupancy};
use crate::mesh::{self, GroupKind, Placement, placement};
use crate::model::{Layer, Mixer};
use crate::partition::{self, Weights};
use crate::runtime::{Height as _, Level, Running, Slot, StageMemory, Stretch, highest, seconds};
use crate::shard::{self, Shard};
use crate::simulate::{Hidden, StageTimes, lower_bound};

/// What is asked, and of which layout under which dispatcher.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) question: &'a Question<'a>,
    pub(crate) layout: &'a Layout,
    /// Its microbatch and kinds of layers; where the schedule divides backward passes and memory is asked for, with
    /// the memory of those.
    pub(crate) shape: &'a Shape,
    pub(crate) schedule: ScheduleName,
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct StageSplit {
    /// Layers of each stage.
    pub(crate) stages: Vec<Vec<u32>>,
    /// Layers of each kind in each stage.
    counts: Vec<Vec<u32>>,
    /// Kinds of the layers of each stage in order, with how many follow one another.
    runs: Vec<Vec<(usize, u32)>>,
    /// Durations; those of backward passes are of the first choice of recompute sets.
    times: StageTimes,
    /// Work at the end of the step, of each pipeline rank.
    pub(crate) ends: Vec<RankEnd>,
    /// By rank: states of the optimizer that rest on the host, and the most that the device has at once as they
    /// pass through it.
    streamed: Vec<(Bytes, Level)>,
    /// Memory of each pipeline rank that no recompute set changes.
    held: Vec<ByClass<Bytes>>,
    /// A message between stages.
    message: Level,
    /// By pipeline rank.
    weights: Vec<RankWeights>,
    /// What passes wait for where weights and gradients rest divided.
    waits: Waits,
}

/// The weights of a pipeline rank, as they are reduced and gathered.
#[derive(Debug, Clone, PartialEq)]
struct RankWeights {
    /// Units of which buckets are made, in order of use; all in one where nothing is divided.
    units: Vec<Unit>,
    /// Runs of units: of dense parameters, of experts.
    buckets: [Vec<Range<usize>>; 2],
}

/// Weights that are in one bucket.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Unit {
    /// Parameters.
    shard: Shard,
    /// The same with what is between them where they rest.
    resting: Shard,
    /// Whether gradients of dense parameters are completed after the last pass: where both ends of a pipeline
    /// have them, and where tensor-parallel ranks share heads of keys.
    late: bool,
    /// Whether other units use its matrices too, so that where it rests divided it has buffers of its own.
    alone: bool,
}

impl RankWeights {
    fn new(units: Vec<Unit>, division: Division) -> Self {
        let of = |own: fn(&Shard) -> u64| {
            let elements: Vec<u64> = units.iter().map(|unit| own(&unit.resting)).collect();
            division.buckets(&elements)
        };
        Self {
            buckets: [of(Shard::dense), of(|shard| shard.experts)],
            units,
        }
    }

    /// Elements of each bucket where they rest, of dense parameters and of experts, cut over so many ranks each.
    fn resting(&self, grain: u64, shards: [u64; 2]) -> [Vec<u64>; 2] {
        let [dense, experts] = &self.buckets;
        let of = |own: fn(&Shard) -> u64, buckets: &[Range<usize>], shards| -> Vec<u64> {
            let elements: Vec<u64> = self.units.iter().map(|unit| own(&unit.resting)).collect();
            bucket::padded(&elements, buckets, grain, shards)
        };
        [
            of(Shard::dense, dense, shards[0]),
            of(|shard| shard.experts, experts, shards[1]),
        ]
    }

    /// The buffers of units that take turns, by unit, and the elements of each buffer; of buckets of a family that
    /// have so many elements.
    fn in_turns(&self, family: usize, elements: &[u64], turns: usize) -> (Vec<usize>, Vec<u64>) {
        let mut whole = vec![0; self.units.len()];
        for (bucket, &elements) in self.buckets[family].iter().zip(elements) {
            whole[bucket.start] = elements;
        }
        let alone: Vec<bool> = self.units.iter().map(|unit| unit.alone).collect();
        bucket::buffers(&whole, &alone, turns)
    }

    /// Elements of the buffers in which units are whole that rest divided, of weights and of gradients; of families
    /// with several replicas.
    fn whole(&self, turns: Turns, resting: &[Vec<u64>; 2], several: [bool; 2]) -> [u64; 2] {
        [turns.weights, turns.grads].map(|turns| {
            let families = (0..2).filter(|&family| several[family]);
            let sizes = families.map(|family| self.in_turns(family, &resting[family], turns).1);
            sizes.flatten().sum()
        })
    }

    fn held(&self) -> Held {
        let [dense, experts] = &self.buckets;
        let of = |own: fn(&Shard) -> u64, buckets: &[Range<usize>]| -> Vec<u64> {
            let sum = |bucket: &Range<usize>| {
                let units = self.units[bucket.clone()].iter();
                units.map(|unit| own(&unit.shard)).sum()
            };
            buckets.iter().map(sum).collect()
        };
        Held {
            dense: of(Shard::dense, dense),
            replicated: of(|shard| shard.replicated, dense),
            experts: of(|shard| shard.experts, experts),
        }
    }

    fn total(&self) -> Shard {
        let units = self.units.iter();
        units.fold(Shard::default(), |sum, unit| sum + unit.shard)
    }

    /// Of each collective of a list, over buckets of families with several replicas, its units and whether it
    /// waits for the end of all passes.
    fn of_collectives(&self, several: [bool; 2]) -> Vec<(Range<usize>, bool)> {
        let families = self.buckets.iter().zip(several).enumerate();
        let families = families.filter(|(_, (_, several))| *several);
        families
            .flat_map(|(family, (buckets, _))| buckets.iter().map(move |bucket| (family, bucket)))
            .map(|(family, bucket)| {
                let late = self.units[bucket.clone()].iter().any(|unit| unit.late);
                (bucket.clone(), family == 0 && late)
            })
            .collect()
    }
}

/// The end of a step on one pipeline rank, in seconds.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankEnd {
    pub(crate) work: StepWork,
    /// Gradient reductions and weight gathers, each by itself; reductions nothing hides; norm and update.
    reduce_s: Vec<f64>,
    /// Reductions over instances of the optimizer.
    across_s: f64,
    gather_s: Vec<f64>,
    pub(crate) exposed_s: f64,
    pub(crate) update_s: f64,
    /// What states that rest on the host take on their ways beyond the update beside them.
    pub(crate) streamed_s: f64,
    /// Waiting for ranks that met nowhere before.
    pub(crate) waiting_s: f64,
}

/// The splits tried for a layout: balanced by time, and equal numbers of layers where they divide.
pub(crate) fn splits(case: Case<'_>) -> Vec<StageSplit> {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    if let Some(given) = &question.options.stages {
        return vec![StageSplit::new(case, given.stages().to_vec())];
    }
    let layers = layer_weights(question, shape);
    let weights = weights(case, &layers);
    let mut splits = Vec::with_capacity(2);
    splits.extend(partition::uniform(
        layers.len() as u32,
        layout.pp(),
        layout.vpp(),
    ));
    if layout.pp() > 1
        && let Some(balanced) = partition::partition(&weights, layout.places())
        && !splits.contains(&balanced.stages)
    {
        splits.push(balanced.stages);
    }
    splits
        .into_iter()
        .map(|stages| StageSplit::new(case, stages))
        .collect()
}

/// A split good enough to judge a layout by, found in one pass: the given one, equal numbers of
/// layers where they divide, or about equal times.
pub(crate) fn likely_split(case: Case<'_>) -> Option<StageSplit> {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let stages = if let Some(given) = &question.options.stages {
        given.stages().to_vec()
    } else {
        let layers = layer_weights(question, shape);
        partition::uniform(layers.len() as u32, layout.pp(), layout.vpp())
            .or_else(|| partition::proportional(&weights(case, &layers), layout.stages()))?
    };
    Some(StageSplit::new(case, stages))
}

fn nanoseconds(seconds: f64) -> u64 {
    Seconds(seconds).to_span().0
}

fn layer_weights(question: &Question<'_>, shape: &Shape) -> Vec<u64> {
    let sets = &question.choices[0];
    let each = (0..).zip(&question.kind_of);
    each.map(|(layer, &kind)| nanoseconds(shape.kinds[kind].both_s(sets.of(layer))))
        .collect()
}

/// Stages of a layout weigh so much. The embedding has a stage of its own where there are more stages than layers
/// alone: Megatron-Core lets it in any, and it is the lightest end.
fn weights<'l>(case: Case<'_>, layers: &'l [u64]) -> Weights<'l> {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let set = question.choices[0].of_ends();
    Weights {
        layers,
        first: nanoseconds(shape.embedding.both_s(set)),
        last: nanoseconds(shape.head.both_s(set)),
        first_may_be_bare: layout.stages() as usize > layers.len(),
        last_may_be_bare: true,
    }
}

/// The stages of a pipeline rank.
pub(crate) fn own(layout: &Layout, rank: usize) -> impl Iterator<Item = usize> + Clone + use<> {
    let own = layout.places().of_rank(rank as u32);
    own.map(|stage| stage as usize)
}

impl StageSplit {
    pub(crate) fn new(case: Case<'_>, stages: Vec<Vec<u32>>) -> Self {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let counts: Vec<Vec<u32>> = stages
            .iter()
            .map(|layers| {
                let mut count = vec![0; shape.kinds.len()];
                for &layer in layers {
                    count[question.kind_of[layer as usize]] += 1;
                }
                count
            })
            .collect();
        let mut split = Self {
            times: StageTimes::new(
                layout.pp(),
                vec![Span::ZERO; stages.len()],
                vec![Span::ZERO; stages.len()],
            ),
            runs: stages.iter().map(|layers| runs(question, layers)).collect(),
            stages,
            counts,
            ends: Vec::new(),
            streamed: Vec::new(),
            held: Vec::new(),
            message: Level::default(),
            weights: Vec::new(),
            waits: Waits::default(),
        };
        let ranks = 0..layout.pp() as usize;
        split.weights = ranks.map(|rank| split.weights_of(case, rank)).collect();
        split.hold(case);
        split.ends = split.rank_ends(case);
        split.time(case);
        split
    }

    /// Memory of a pipeline rank that no recompute set changes.
    pub(crate) fn held_by(&self, pipeline_rank: usize) -> ByClass<Bytes> {
        self.held[pipeline_rank]
    }

    /// Everything of a stage, layers by kind and the ends of the model.
    pub(crate) fn each_kind<'s>(
        &'s self,
        shape: &'s Shape,
        stage: usize,
    ) -> impl Iterator<Item = (&'s Kind, u32)> {
        let layers = shape.kinds.iter().zip(self.counts[stage].iter().copied());
        let first = (stage == 0).then_some((&shape.embedding, 1));
        let last = (stage + 1 == self.stages.len()).then_some((&shape.head, 1));
        layers
            .filter(|(_, count)| *count > 0)
            .chain(first)
            .chain(last)
    }

    /// Everything of a stage in order, each with its recompute set.
    pub(crate) fn each_under<'s>(
        &'s self,
        shape: &'s Shape,
        stage: usize,
        sets: &Sets,
    ) -> Vec<(&'s Kind, usize, u32)> {
        let mut all: Vec<(&Kind, usize, u32)> = Vec::new();
        all.extend((stage == 0).then_some((&shape.embedding, sets.of_ends(), 1)));
        match sets {
            Sets::Every(set) => {
                let runs = self.runs[stage].iter();
                all.extend(runs.map(|&(kind, count)| (&shape.kinds[kind], *set, count)));
            }
            Sets::Each(sets) => {
                let layers = self.layers(stage);
                all.extend(
                    layers.map(|(layer, kind)| (&shape.kinds[kind], sets[layer as usize], 1)),
                );
            }
        }
        let last = stage + 1 == self.stages.len();
        all.extend(last.then_some((&shape.head, sets.of_ends(), 1)));
        all
    }

    /// The layers of a stage in order, with their kinds.
    fn layers(&self, stage: usize) -> impl Iterator<Item = (u32, usize)> {
        let runs = self.runs[stage].iter();
        let kinds = runs.flat_map(|&(kind, count)| repeat_n(kind, count as usize));
        self.stages[stage].iter().copied().zip(kinds)
    }

    /// The memory of a stage under some recompute sets, in the order of its layers.
    pub(crate) fn stage_memory(&self, shape: &Shape, stage: usize, sets: &Sets) -> StageMemory {
        let mut memory = StageMemory::default();
        for (kind, set, count) in self.each_under(shape, stage, sets) {
            memory.add_layers(&kind.memory[set], count);
        }
        memory
    }

    /// Fills in durations that do not depend on recompute sets, and backward passes of their first choice.
    fn time(&mut self, case: Case<'_>) {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let pp = layout.pp() as usize;
        let stages = self.stages.len();
        let forward_s: Vec<f64> = (0..stages)
            .map(|stage| {
                self.each_kind(shape, stage)
                    .map(|(kind, count)| kind.forward_s * f64::from(count))
                    .sum()
            })
            .collect();
        let backward_s = self.backward_s(shape, &question.choices[0]);
        let span = |seconds: &f64| Seconds(*seconds).to_span();
        self.times.forward = forward_s.iter().map(span).collect();
        self.times.first_forward.clone_from(&self.times.forward);
        self.times.backward = backward_s.iter().map(span).collect();
        self.times.last_backward.clone_from(&self.times.backward);
        if case.schedule.divides_backward() {
            let weight = (0..stages).map(|stage| Seconds(self.weight_s(shape, stage)).to_span());
            self.times.weight = Some(weight.collect());
        }
        self.times.hidden = self.hidden(question, layout, shape, &question.choices[0]);
        if let Some(message) = message(case) {
            let hop = question.costs.collective(&message).time.to_span();
            self.times.hop = vec![hop; stages - 1];
        }
        // Interleaved stages send under other chunks' work; plain 1F1B waits for its messages.
        let stack = &question.stack;
        self.times.hop_overlapped = stack.sends_beside(question.overlap, layout.vpp());
        let mut arrives = 0.0;
        for rank in 0..pp {
            let own = own(layout, rank);
            let end = &self.ends[rank];
            // A stage's gradients are whole in its last backward, under which they are reduced, and where that is
            // divided only after it; weights are gathered from the start, under what precedes their first use.
            let last_backward: f64 = own.clone().map(|stage| backward_s[stage]).sum();
            let first_forward: f64 = own.clone().map(|stage| forward_s[stage]).sum();
            let (reduce_s, gather_s): (f64, f64) =
                (end.reduce_s.iter().sum(), end.gather_s.iter().sum());
            let reduce_s = reduce_s + end.across_s;
            let by_bucket = question.bucket_elements(layout).is_some();
            let overlap = stack.hides(question.overlap);
            let by_unit = by_bucket || question.shards_weights();
            let passes_s = if by_unit {
                self.passes_by_unit(case, rank)
            } else {
                Vec::new()
            };
            if question.shards_weights() {
                self.waits = self.waits(case, rank, &passes_s);
                let Waits {
                    first_forward,
                    forward,
                    backward,
                    ..
                } = self.waits;
                let span = |seconds| Seconds(seconds).to_span();
                self.times.forward[rank] += span(forward);
                self.times.first_forward[rank] += span(first_forward);
                self.times.backward[rank] += span(backward);
                self.times.last_backward[rank] += span(backward);
            }
            let reduce = match (overlap.grad_reduce, by_bucket) {
                // What is reduced and gathered in every microbatch is not again at the end, but over instances, under
                // the last backward pass (Megatron-FSDP, `outer_fsdp_group_grad_reduce`).
                (beside, _) if question.shards_weights() => {
                    let hidden = if beside { last_backward } else { 0.0 };
                    self.waits.reduce + (end.across_s - hidden).max(0.0)
                }
                (false, _) => reduce_s,
                _ if case.schedule.divides_backward() => reduce_s,
                (true, false) => reduce_s - last_backward,
                (true, true) => self.reduced_after(layout, rank, &passes_s),
            };
            self.times.reduce[rank] = Seconds(reduce).to_span();
            let gather = match (overlap.param_gather, by_bucket) {
                _ if question.shards_weights() => 0.0,
                (false, _) => gather_s,
                (true, false) => (gather_s - arrives - first_forward).max(0.0),
                (true, true) => self.gathered_after(layout, rank, arrives, &passes_s),
            };
            self.times.first_forward[rank] += Seconds(gather).to_span();
            // Ranks that meet nowhere before meet at the end.
            let apart: f64 = own.clone().map(|stage| self.apart_s(shape, stage)).sum();
            let reduced = end.work.reduce.iter().chain(&end.work.across);
            let share = reduced.chain(&end.work.exposed).next();
            let share = share.map_or(0.0, |collective| question.costs.waiting(collective));
            let waiting_s = share * apart * f64::from(layout.microbatches());
            let optimizer_s = end.exposed_s + end.update_s + end.streamed_s + waiting_s;
            self.times.optimizer[rank] = Seconds(optimizer_s).to_span();
            self.ends[rank].waiting_s = waiting_s;
            arrives += forward_s[rank];
        }
    }

    /// What combined passes hide of their exchanges under some recompute sets, where they are combined.
    fn hidden(
        &self,
        question: &Question<'_>,
        layout: &Layout,
        shape: &Shape,
        sets: &Sets,
    ) -> Option<Hidden> {
        if !question.stack.hides(question.overlap).expert_alltoall {
            return None;
        }
        let delays = question.overlap.delay_wgrad;
        let slots = |stage: usize, backward: bool| -> Vec<Slot> {
            let mut all = self.each_under(shape, stage, sets);
            if backward {
                all.reverse();
            }
            let each = all.into_iter();
            each.flat_map(|(kind, set, count)| {
                let slots = kind.slots(set, backward);
                std::iter::repeat_n(slots, count as usize).flatten()
            })
            .collect()
        };
        let all = |slots: &[Slot]| -> f64 {
            let of = |slot: &Slot| slot.compute_s + slot.weight_s + slot.sent_s.unwrap_or(0.0);
            slots.iter().map(of).sum()
        };
        let stages = 0..self.stages.len();
        let slots: Vec<[Vec<Slot>; 2]> = stages
            .map(|stage| [false, true].map(|backward| slots(stage, backward)))
            .collect();
        // Exchanges take multiprocessors from what runs beside them, and no pass is shorter than the host takes for it.
        let left = 1.0 - question.stack.taken_by_exchanges();
        let issued: Vec<[f64; 2]> = (0..self.stages.len())
            .map(|stage| {
                let mut sum = [0.0; 2];
                if question.stack.name() == StackName::Megatron {
                    for (kind, set, count) in self.each_under(shape, stage, sets) {
                        let passes = [kind.breakdown.forward, kind.breakdown.backward_under(set)];
                        for (sum, pass) in sum.iter_mut().zip(passes) {
                            *sum += pass.issued_s() * f64::from(count);
                        }
                    }
                }
                sum
            })
            .collect();
        let less = |forward: &[Slot], backward: &[Slot], issued_s: f64| {
            let apart = all(forward) + all(backward);
            let hidden = left * (apart - seconds(forward, backward, delays));
            Seconds(hidden.min(apart - issued_s).max(0.0)).to_span()
        };
        let places = layout.places();
        let together = slots.iter().enumerate().map(|(stage, [forward, _])| {
            let own = own(layout, places.rank_of(stage as u32) as usize);
            own.map(|other| {
                let issued_s = issued[stage][0] + issued[other][1];
                less(forward, &slots[other][1], issued_s)
            })
            .collect()
        });
        let most = |[forward, backward]: &[Vec<Slot>; 2]| {
            let sent = forward.iter().chain(backward);
            Seconds(sent.filter_map(|slot| slot.sent_s).sum()).to_span()
        };
        Some(Hidden {
            together: together.collect(),
            alone: slots
                .iter()
                .zip(&issued)
                .map(|([_, backward], issued)| less(&[], backward, issued[1]))
                .collect(),
            most: slots.iter().map(most).collect(),
        })
    }

    /// Seconds of a backward pass of a stage that only add to gradients of weights.
    fn weight_s(&self, shape: &Shape, stage: usize) -> f64 {
        let kinds = self.each_kind(shape, stage);
        kinds
            .map(|(kind, count)| kind.weight_s * f64::from(count))
            .sum()
    }

    /// What passes wait for where weights and gradients rest divided.
    fn waits(&self, case: Case<'_>, rank: usize, passes_s: &[[f64; 2]]) -> Waits {
        let Case {
            question, layout, ..
        } = case;
        let Division::Sharded(turns) = question.division(layout) else {
            return Waits::default();
        };
        let (end, weights) = (&self.ends[rank], &self.weights[rank]);
        let keeps = question.stack.keeps_units();
        let held = weights.held();
        let held = [&held.dense, &held.experts];
        let shards = question.shards(layout);
        let mut parts = Vec::new();
        let mut prices = end.gather_s.iter().zip(&end.reduce_s);
        for family in (0..2).filter(|&family| shards[family] > 1) {
            let buffers = [turns.weights, turns.grads]
                .map(|turns| weights.in_turns(family, held[family], turns).0);
            for (bucket, &elements) in weights.buckets[family].iter().zip(held[family]) {
                let unit = bucket.start;
                let (&gather_s, &reduce_s) = prices.next().expect("one for each bucket");
                let sweeps = ends::added_up(elements, shards[family]);
                let sweeps = if keeps { sweeps.to_vec() } else { Vec::new() };
                let price = |op: &Op| question.costs.op(op).time.0;
                parts.push(Part {
                    family,
                    unit,
                    buffers: [0, 1].map(|kind| buffers[kind][unit]),
                    gather_s,
                    reduce_s,
                    swept_s: sweeps.iter().map(price).sum(),
                    sweeps,
                });
            }
        }
        let overlap = question.stack.hides(question.overlap);
        Waits::played(&parts, passes_s, overlap, keeps, layout.microbatches())
    }

    /// What the passes of a microbatch wait for weights and gradients that are divided, seconds.
    pub(crate) fn sharded_s(&self) -> f64 {
        self.waits.forward + self.waits.backward
    }

    /// What adds reduced gradients up where they rest divided, in every microbatch.
    pub(crate) fn swept(&self) -> &[Op] {
        &self.waits.swept
    }

    /// How often each gather of weights that rest divided runs in a step of so many microbatches.
    pub(crate) fn gathers(&self, microbatches: u32) -> impl Iterator<Item = f64> {
        let each = self.waits.gathers.iter();
        each.map(move |&[first, other]| f64::from(first + other * (microbatches - 1)))
    }

    /// Seconds of the forward and the backward pass of each unit of a rank, in order of use, under the first choice
    /// of recompute sets.
    fn passes_by_unit(&self, case: Case<'_>, rank: usize) -> Vec<[f64; 2]> {
        let sets = &case.question.choices[0];
        let stages = own(case.layout, rank);
        let kinds = stages.flat_map(|stage| self.each_under(case.shape, stage, sets));
        let mut passes: Vec<[f64; 2]> = kinds
            .flat_map(|(kind, set, count)| {
                std::iter::repeat_n([kind.forward_s, kind.backward_s[set]], count as usize)
            })
            .collect();
        // Depths that are units by themselves are in the head's time: each a layer like the last one, and a head.
        let depths = self.weights[rank].units.len().saturating_sub(passes.len());
        if depths > 0
            && let [.., layer, head] = passes[..]
        {
            let each = [0, 1].map(|pass| {
                let heads = head[pass] - layer[pass] * depths as f64;
                heads.max(0.0) / (depths + 1) as f64
            });
            let of_depth = [0, 1].map(|pass| {
                let left = (head[pass] - each[pass]) / depths as f64;
                left.max(0.0)
            });
            passes.pop();
            passes.push(each);
            passes.extend(std::iter::repeat_n(of_depth, depths));
        }
        passes
    }

    /// Seconds from the end of a rank's last backward pass until its gradients are reduced, bucket after bucket,
    /// each once those of all of its units are whole.
    fn reduced_after(&self, layout: &Layout, rank: usize, passes_s: &[[f64; 2]]) -> f64 {
        let units = &self.weights[rank];
        let mut buckets = units.of_collectives(several(layout));
        let end = &self.ends[rank];
        let whole_at = |unit: usize| -> f64 {
            passes_s[unit..]
                .iter()
                .map(|[_, backward_s]| backward_s)
                .sum()
        };
        let last = whole_at(0);
        let mut ready: Vec<(f64, f64)> = buckets
            .drain(..)
            .zip(&end.reduce_s)
            .map(|((units, late), &seconds)| {
                (if late { last } else { whole_at(units.start) }, seconds)
            })
            .collect();
        ready.sort_by(|a, b| a.0.total_cmp(&b.0));
        let reduced = ready
            .iter()
            .fold(0.0_f64, |free, (whole, seconds)| free.max(*whole) + seconds);
        (reduced - last).max(0.0)
    }

    /// Seconds that a rank's first forward pass waits for its weights, which are gathered from the start of the
    /// step in order of use; it begins when the first message is there.
    fn gathered_after(
        &self,
        layout: &Layout,
        rank: usize,
        arrives: f64,
        passes_s: &[[f64; 2]],
    ) -> f64 {
        let buckets = self.weights[rank].of_collectives(several(layout));
        let mut wanted: Vec<(usize, f64)> = buckets
            .iter()
            .zip(&self.ends[rank].gather_s)
            .map(|((units, _), &seconds)| (units.start, seconds))
            .collect();
        wanted.sort_by_key(|(unit, _)| *unit);
        let mut wanted = wanted.into_iter().peekable();
        let (mut gathered, mut now) = (0.0, arrives);
        let mut waited = 0.0;
        for (unit, [forward_s, _]) in passes_s.iter().enumerate() {
            while let Some((_, seconds)) = wanted.next_if(|(wanted, _)| *wanted <= unit) {
                gathered += seconds;
            }
            let wait = (gathered - now).max(0.0);
            waited += wait;
            now += wait + forward_s;
        }
        waited
    }

    /// Seconds of both passes of a stage in layers whose ranks meet no others.
    fn apart_s(&self, shape: &Shape, stage: usize) -> f64 {
        self.each_kind(shape, stage)
            .map(|(kind, count)| {
                let passes = kind.breakdown.forward.apart() + kind.breakdown.backward.apart();
                passes * f64::from(count)
            })
            .sum()
    }

    fn backward_s(&self, shape: &Shape, sets: &Sets) -> Vec<f64> {
        (0..self.stages.len())
            .map(|stage| match sets {
                // As many layers of a kind as there are, at once.
                Sets::Every(set) => self
                    .each_kind(shape, stage)
                    .map(|(kind, count)| kind.backward_s[*set] * f64::from(count))
                    .sum(),
                Sets::Each(_) => self
                    .each_under(shape, stage, sets)
                    .iter()
                    .map(|(kind, set, count)| kind.backward_s[*set] * f64::from(*count))
                    .sum(),
            })
            .collect()
    }

    /// Durations under some recompute sets.
    pub(crate) fn times(&self, case: Case<'_>, sets: &Sets) -> StageTimes {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let mut times = self.times.clone();
        if *sets != question.choices[0] {
            times.hidden = self.hidden(question, layout, shape, sets);
            let backward = self.backward_s(shape, sets);
            times.backward = backward
                .iter()
                .map(|&seconds| Seconds(seconds + self.waits.backward).to_span())
                .collect();
            times.last_backward.clone_from(&times.backward);
        }
        times
    }

    /// The most that no recompute set changes, over all ranks.
    pub(crate) fn held(&self) -> Bytes {
        let totals = self.held.iter().map(ByClass::total);
        totals.max().unwrap_or(Bytes::ZERO)
    }

    /// No schedule runs a step in less.
    pub(crate) fn bound(&self, case: Case<'_>, sets: &Sets) -> Span {
        let layout = case.layout;
        let times = self.times(case, sets);
        lower_bound(layout.places(), layout.microbatches(), &times)
    }

    /// Exposed gather of a rank, which its first forward waits for.
    pub(crate) fn exposed_gather(&self, rank: usize) -> Span {
        self.times.first_forward[rank] - self.times.forward[rank]
    }

    /// Works out what no recompute set changes: state, buffers that stay, context and communicators.
    fn hold(&mut self, case: Case<'_>) {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let options = question.options;
        let kept = (options.optimizer, options.masters, options.primary_weights);
        let bytes = question
            .stack
            .state(options.precision, kept, options.grad_dtype);
        let overhead = overhead(case);
        let setting = question.setting(layout, shape.wires(), &shape.local, &shape.groups);
        let step = question.runtime.step(&setting, layout.microbatches());
        self.message = step.message;
        let pp = layout.pp() as usize;
        let shards = question.shards(layout);
        let share = options.optimizer_offload;
        let state = |elements: u64| Bytes((elements as f64 * bytes.sharded) as u64);
        self.streamed = (0..pp)
            .map(|rank| {
                let families = self.weights[rank].resting(step.grain, shards);
                let families = families.into_iter().zip(shards);
                let pieces = families.flat_map(|(buckets, shards)| {
                    share.pieces(buckets.iter().sum::<u64>().div_ceil(shards))
                });
                let pieces: Vec<u64> = pieces.collect();
                let on_device = if pieces.is_empty() {
                    Level::default()
                } else {
                    Level::of(TensorClass::Optimizer, state(in_flight(&pieces))) + step.update
                };
                (state(pieces.iter().sum()), on_device)
            })
            .collect();
        self.held = (0..pp)
            .map(|rank| {
                let resting = self.weights[rank].resting(step.grain, shards);
                let weights = &self.weights[rank];
                let held = resting
                    .each_ref()
                    .map(|buckets| buckets.iter().sum::<u64>());
                let mut held = match question.division(layout) {
                    Division::Sharded(turns) => {
                        let whole = if question.stack.keeps_units() {
                            weights.whole(turns, &resting, several(layout))
                        } else {
                            let units = weights.units.iter();
                            memory::largest_units(units.map(|unit| unit.resting.total()))
                        };
                        memory::fully_sharded(held, bytes, shards, whole)
                    }
                    Division::Whole | Division::AtLeast(_) => memory::state(held, bytes, shards),
                };
                held[TensorClass::Optimizer] -= self.streamed[rank].0;
                held = held + step.standing.bytes();
                held[TensorClass::Transient] += self.buffers(case, rank);
                held[TensorClass::Overhead] = overhead;
                held
            })
            .collect();
    }

    /// Memory of every pipeline rank.
    pub(crate) fn memory(
        &self,
        case: Case<'_>,
        sets: &Sets,
        occupancies: &[Vec<Occupancy>],
    ) -> Vec<ByClass<Bytes>> {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let places = layout.places();
        let stage_of = |rank, chunk| places.stage_of(rank as u32, chunk as u32) as usize;
        (0..layout.pp() as usize)
            .map(|rank| {
                let own = self.own_memory((layout, shape), rank, sets);
                let stretches = self.own_stretches(case, rank, sets);
                let running = |at: &Occupancy| match (&stretches, at.running) {
                    (Some(stretches), _) => self.running(case, rank, &own, stretches, at),
                    (None, Running::Combined { backward }) => self.layer_by_layer(
                        case,
                        [at.chunk, backward].map(|chunk| stage_of(rank, chunk)),
                        sets,
                    ),
                    (None, one) => own[at.chunk].running(one),
                };
                let mut held = memory::at_worst_instant(
                    self.held[rank],
                    &own,
                    &occupancies[rank],
                    self.message,
                    self.streamed[rank].1,
                    running,
                );
                let allocated = held.total() - held[TensorClass::Overhead];
                held[TensorClass::Overhead] += allocated.scale(question.stack.fragmentation());
                held
            })
            .collect()
    }

    /// What the stages of a pipeline rank take and give between pauses, forward and backward, where that is known.
    fn own_stretches(
        &self,
        case: Case<'_>,
        rank: usize,
        sets: &Sets,
    ) -> Option<Vec<[Vec<Stretch>; 2]>> {
        let of_stage = |stage: usize| {
            let mut both = [Vec::new(), Vec::new()];
            for (kind, set, count) in self.each_under(case.shape, stage, sets) {
                let own = kind.stretches.get(set)?;
                for _ in 0..count {
                    both[0].extend_from_slice(&own.forward);
                }
            }
            for (kind, set, count) in self.each_under(case.shape, stage, sets).iter().rev() {
                let own = kind.stretches.get(*set)?;
                for _ in 0..*count {
                    both[1].extend_from_slice(&own.backward);
                }
            }
            Some(both)
        };
        own(case.layout, rank).map(of_stage).collect()
    }

    /// What is alive at most while passes of a rank run, above what is kept: see [`memory::at_worst_instant`].
    fn running(
        &self,
        case: Case<'_>,
        rank: usize,
        own: &[StageMemory],
        stretches: &[[Vec<Stretch>; 2]],
        at: &Occupancy,
    ) -> Level {
        let places = case.layout.places();
        let stage_of = |chunk: usize| places.stage_of(rank as u32, chunk as u32) as usize;
        // What a pass begins with, of another stage.
        let message = |is_there: bool| self.message * i64::from(is_there);
        let received = |chunk: usize| message(stage_of(chunk) > 0);
        let returned = |chunk: usize| message(stage_of(chunk) + 1 < self.stages.len());
        match at.running {
            Running::Combined { backward } => {
                let messages = received(at.chunk) + returned(backward);
                messages + highest(&stretches[at.chunk][0], &stretches[backward][1])
            }
            Running::Backward => returned(at.chunk) + highest(&[], &stretches[at.chunk][1]),
            Running::Forward | Running::Weight => own[at.chunk].running(at.running),
        }
    }

    /// What is alive at most while the forward pass of a stage and the backward pass of another take turns layer by layer,
    /// above what is kept; each has what it works in all along. Megatron-Core lets go of what a layer has saved after its
    /// backward pass, and of that of the last when both passes are over (`TransformerModelChunkSchedulePlan.run` in
    /// `megatron/core/models/common/model_chunk_schedule_plan.py`).
    fn layer_by_layer(
        &self,
        case: Case<'_>,
        [forward, backward]: [usize; 2],
        sets: &Sets,
    ) -> Level {
        let layers = |stage: usize| -> Vec<Level> {
            let each = self.each_under(case.shape, stage, sets).into_iter();
            let saved = |kind: &Kind, set: usize| kind.memory[set].passes.saved;
            each.flat_map(|(kind, set, count)| repeat_n(saved(kind, set), count as usize))
                .collect()
        };
        let works = |stage, pass| self.stage_memory(case.shape, stage, sets).running(pass);
        let received = u32::from(forward > 0) + u32::from(backward + 1 < self.stages.len());
        let mut level = self.message * i64::from(received)
            + works(forward, Running::Forward)
            + works(backward, Running::Backward);
        let (mut coming, mut going) = (
            layers(forward).into_iter(),
            layers(backward).into_iter().rev(),
        );
        let mut peak = level;
        while coming.len() + going.len() > 0 {
            level = level + coming.next().unwrap_or_default();
            peak = peak.higher(level);
            if let Some(saved) = going.next().filter(|_| going.len() > 0) {
                level = level - saved;
            }
        }
        peak
    }

    /// The stages of a pipeline rank, whole.
    fn own_memory(
        &self,
        (layout, shape): (&Layout, &Shape),
        rank: usize,
        sets: &Sets,
    ) -> Vec<StageMemory> {
        let whole = |stage: usize| {
            let sent = stage + 1 < self.stages.len();
            let memory = self.stage_memory(shape, stage, sets);
            memory.between(self.message, stage > 0, sent)
        };
        own(layout, rank).map(whole).collect()
    }

    /// The most bytes that a rank has in memory of its host.
    pub(crate) fn on_host(
        &self,
        case: Case<'_>,
        sets: &Sets,
        occupancies: &[Vec<Occupancy>],
    ) -> Bytes {
        let ranks = (0..).zip(occupancies);
        // No pass runs beside an update, so both are there at once.
        let of_rank = |(rank, occupancies): (usize, &Vec<Occupancy>)| {
            let states = self.streamed[rank].0;
            if case.question.offload().is_none() {
                return states;
            }
            let own = self.own_memory((case.layout, case.shape), rank, sets);
            states + memory::on_host(&own, occupancies)
        };
        ranks.map(of_rank).max().unwrap_or(Bytes::ZERO)
    }

    /// The recompute sets of layers that take the least time on every rank whose memory they fit, if any do:
    /// see [`by_layer`].
    pub(crate) fn by_layer(&self, case: Case<'_>, occupancies: &[Vec<Occupancy>]) -> Option<Sets> {
        let Case {
            question, shape, ..
        } = case;
        // Chunks that are alike are looked at once.
        let mut known: Vec<(usize, Rc<Chunk>)> = Vec::new();
        let mut chunk = |stage: usize| -> Rc<Chunk> {
            let (received, sent) = (stage > 0, stage + 1 < self.stages.len());
            let alike = |(known, _): &&(usize, Rc<Chunk>)| {
                let known = *known;
                let known_ends = (known > 0, known + 1 < self.stages.len());
                self.runs[known] == self.runs[stage] && known_ends == (received, sent)
            };
            if let Some((_, chunk)) = known.iter().find(alike) {
                return Rc::clone(chunk);
            }
            let layers = self
                .layers(stage)
                .map(|(_, kind)| shape.kinds[kind].ways.as_slice());
            let first = (!received).then_some(&shape.embedding.memory[0].passes);
            let last = (!sent).then_some(&shape.head.memory[0].passes);
            let message = (self.message.total(), received, sent);
            let layers: Vec<_> = layers.collect();
            let chunk = Rc::new(Chunk::new(first, &layers, last, message));
            known.push((stage, Rc::clone(&chunk)));
            chunk
        };
        let mut sets = vec![0; question.kind_of.len()];
        for (rank, occupancies) in occupancies.iter().enumerate() {
            let own = own(case.layout, rank);
            let chunks: Vec<Rc<Chunk>> = own.clone().map(&mut chunk).collect();
            let rooms = self.rooms(case, rank, occupancies);
            let found = by_layer::fastest(&chunks, occupancies, &rooms)?;
            for (stage, chosen) in own.zip(found) {
                for (&layer, set) in self.stages[stage].iter().zip(chosen) {
                    sets[layer as usize] = set;
                }
            }
        }
        Some(Sets::Each(sets))
    }

    /// No schedule runs a step in less, whatever each layer recomputes; nothing where it all fits as it is.
    ///
    /// What a rank keeps beyond its room it lets go of at the best rate of its layers, at each instant.
    pub(crate) fn by_layer_bound(
        &self,
        case: Case<'_>,
        occupancies: &[Vec<Occupancy>],
    ) -> Option<Span> {
        let (layout, shape) = (case.layout, case.shape);
        let plain = &case.question.choices[0];
        let mut times = self.times(case, plain);
        let mut fits = true;
        for (rank, occupancies) in occupancies.iter().enumerate() {
            let own = own(case.layout, rank);
            let memory = self.own_memory((layout, shape), rank, plain);
            let rooms = self.rooms(case, rank, occupancies);
            let mut more_s = 0.0_f64;
            for (at, room) in occupancies.iter().zip(rooms) {
                let counts = || at.live.iter().zip(&at.kept);
                let kept: i64 = (memory.iter().zip(counts()))
                    .map(|(memory, (&live, &kept))| {
                        memory.passes.saved.total() * i64::from(live)
                            + memory.passes.kept.total() * i64::from(kept)
                    })
                    .sum();
                fits &= kept + memory[at.chunk].running(at.running).total() <= room;
                let rate = own.clone().zip(counts()).map(|(stage, (&live, &kept))| {
                    let kinds = self.runs[stage].iter();
                    let rates = kinds.map(|&(kind, _)| {
                        let kind = &shape.kinds[kind];
                        let passes = kind.memory[0].passes.totals();
                        by_layer::best_saver(&kind.ways, kind.backward_s[0], &passes, [live, kept])
                    });
                    rates.fold(0.0, f64::max)
                });
                let over = (kept - room).max(0) as f64;
                if over > 0.0 {
                    more_s = more_s.max(over / rate.fold(0.0, f64::max));
                }
            }
            let last = own.last().expect("a rank has a stage");
            let more = Span((more_s.min(1e9) * 1e9) as u64);
            times.backward[last] += more;
            times.last_backward[last] += more;
        }
        (!fits).then(|| lower_bound(layout.places(), layout.microbatches(), &times))
    }

    /// Bytes that the stages of a rank may take at some instants.
    fn rooms(&self, case: Case<'_>, rank: usize, occupancies: &[Occupancy]) -> Vec<i64> {
        let own = own(case.layout, rank);
        let kinds = own.flat_map(|stage| self.each_kind(case.shape, stage));
        let beside: i64 = kinds
            .map(|(kind, count)| kind.memory[0].beside.total() * i64::from(count))
            .sum();
        let room = self.room(case.question, rank) - beside;
        let sent = |at: &Occupancy| self.message.total() * i64::from(at.messages);
        occupancies.iter().map(|at| room - sent(at)).collect()
    }

    /// Bytes of a rank's tensors that fit beside those that no recompute set changes. Allocated memory may be
    /// so much that with its fragmentation it fits.
    fn room(&self, question: &Question<'_>, rank: usize) -> i64 {
        let held = self.held[rank];
        let overhead = held[TensorClass::Overhead].0 as f64;
        let all = question.capacity().0 as f64 - overhead;
        let allocated = (all / (1.0 + question.stack.fragmentation())).floor();
        allocated as i64 - (held.total().0 as i64 - overhead as i64)
    }

    /// What the step could shrink to if every layer chose its recompute set by itself: see
    /// [`super::mix`]. No schedule runs this layout and split in less.
    pub(crate) fn mixed_bound_s(&self, case: Case<'_>, occupancies: &[Vec<Occupancy>]) -> f64 {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let microbatches = f64::from(layout.microbatches());
        let (mut before, mut bound) = (0.0, 0.0_f64);
        for (rank, occupancies) in occupancies.iter().enumerate() {
            let room = self.room(question, rank) as f64 / GIB as f64;
            let mut groups = Vec::new();
            // What gradients of weights need at least, whatever runs again.
            let mut least = vec![0.0; occupancies.len()];
            let mut ends_s = 0.0;
            for stage in own(layout, rank) {
                let chunk = layout.places().chunk_of(stage as u32) as usize;
                let live: Vec<u32> = occupancies.iter().map(|m| m.live[chunk]).collect();
                for (kind, &layers) in shape.kinds.iter().zip(&self.counts[stage]) {
                    let kept = kind.memory.iter().map(|memory| memory.passes.kept.gib());
                    let kept = f64::from(layers) * kept.fold(f64::INFINITY, f64::min);
                    for (least, at) in least.iter_mut().zip(occupancies) {
                        *least += kept * f64::from(at.kept[chunk]);
                    }
                    let ways = kind.memory.iter().zip(&kind.backward_s);
                    let sent_s: f64 = kind.sent_s().iter().sum();
                    groups.push(Alike {
                        layers,
                        live: live.clone(),
                        ways: ways
                            .map(|(memory, backward_s)| Way {
                                seconds: kind.forward_s + backward_s - sent_s,
                                gib: memory.passes.saved.gib(),
                            })
                            .collect(),
                    });
                }
                let first = (stage == 0).then_some(&shape.embedding);
                let last = (stage + 1 == self.stages.len()).then_some(&shape.head);
                for end in first.into_iter().chain(last) {
                    ends_s += end.least_s(0)[1];
                }
            }
            groups.retain(|group| group.layers > 0);
            // The first stage keeps nothing of what it sends.
            let sent = |m: &Occupancy| self.message * i64::from(m.live[0]);
            let rooms: Vec<f64> = occupancies
                .iter()
                .zip(least)
                .map(|(m, least)| {
                    if rank == 0 {
                        room + sent(m).gib() - least
                    } else {
                        room - least
                    }
                })
                .collect();
            if let Some(work) = mix::least_work(&groups, &rooms) {
                bound = bound.max(before + microbatches * (work + ends_s));
            }
            // Stages before it still have their backward passes behind its last one; not so where that is a
            // divided one.
            let back = if case.schedule.divides_backward() {
                Span::ZERO
            } else {
                let hidden = self.times.hidden.as_ref();
                let alone = hidden.map_or(Span::ZERO, |hidden| hidden.alone[rank]);
                self.times.backward[rank] - alone
            };
            before += (self.times.forward[rank] + back).seconds().0;
        }
        bound
    }

    /// Buffers that stay: one for each shape of weight, workspaces.
    fn buffers(&self, case: Case<'_>, rank: usize) -> Bytes {
        let question = case.question;
        let mut kinds = 0_u64;
        for stage in own(case.layout, rank) {
            for (kind, &count) in self.counts[stage].iter().enumerate() {
                if count > 0 {
                    kinds |= 1 << question.distinct[kind].weights.min(63);
                }
            }
        }
        case.shape.shape_buffer(kinds) + question.stack.workspace()
    }

    /// The weights of a pipeline rank, in buckets.
    fn weights_of(&self, case: Case<'_>, rank: usize) -> RankWeights {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let resting = |memory: &StageMemory| memory.shard + memory.padding;
        let division = question.division(layout);
        if division == Division::Whole {
            let unit = Unit {
                shard: self.shard(case, rank, |memory| memory.shard),
                resting: self.shard(case, rank, resting),
                ..Unit::default()
            };
            return RankWeights::new(vec![unit], division);
        }
        let of = |kind: &Kind, late| Unit {
            shard: kind.memory[0].shard,
            resting: resting(&kind.memory[0]),
            late,
            alone: false,
        };
        let alone = bucket::shared_ends(question.model);
        let shares = |layer: &Layer| {
            let heads = match &layer.mixer {
                Some(Mixer::Gqa(gqa)) => gqa.kv_heads,
                _ => return false,
            };
            u64::from(layout.tp()) > heads
        };
        let tied = question.model.tied_embeddings;
        // A matrix of both ends of a pipeline.
        let late = layout.places().parts_ends() && question.embeds_twice();
        let mut units = Vec::new();
        for stage in own(layout, rank) {
            units.extend((stage == 0).then(|| Unit {
                alone: alone[0],
                ..of(&shape.embedding, late)
            }));
            for (_, kind) in self.layers(stage) {
                let layer = question.distinct[kind].layer;
                units.push(of(&shape.kinds[kind], shares(layer)));
            }
            if stage + 1 == self.stages.len() {
                let shared = question.model.mtp.iter().any(shares);
                let mut head = of(&shape.head, late || shared);
                if tied && !layout.places().parts_ends() {
                    let matrix = of(&shape.embedding, false);
                    head.shard.split -= matrix.shard.split;
                    head.resting.split -= matrix.resting.split;
                }
                head.alone = alone[1];
                let mut depths = Vec::new();
                if question.shards_weights() {
                    let setting =
                        question.setting(layout, shape.wires(), &shape.local, &shape.groups);
                    depths = question.runtime.depths(&setting);
                }
                for [shard, padding] in &depths {
                    head.shard = head.shard.without(*shard);
                    head.resting = head.resting.without(*shard + *padding);
                }
                units.push(head);
                units.extend(depths.into_iter().map(|[shard, padding]| Unit {
                    shard,
                    resting: shard + padding,
                    late: shared,
                    alone: false,
                }));
            }
        }
        RankWeights::new(units, division)
    }

    /// Parameters of a pipeline rank, by those of its parts. A tied head on the rank of the embedding is one matrix
    /// with it.
    fn shard(&self, case: Case<'_>, rank: usize, of: impl Fn(&StageMemory) -> Shard) -> Shard {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let mut shard = Shard::default();
        for stage in own(layout, rank) {
            for (kind, count) in self.each_kind(shape, stage) {
                shard += of(&kind.memory[0]) * u64::from(count);
            }
        }
        let places = layout.places();
        let has_ends = !places.parts_ends() && places.rank_of(0) as usize == rank;
        if question.model.tied_embeddings && has_ends {
            shard.split -= of(&shape.embedding.memory[0]).split;
        }
        shard
    }

    /// The end of the step on every rank; ranks that hold alike end alike.
    fn rank_ends(&self, case: Case<'_>) -> Vec<RankEnd> {
        let Case {
            question, layout, ..
        } = case;
        let pp = layout.pp() as usize;
        let of = |kind| placement(layout, kind, question.cluster);
        let instances = question.options.instances;
        let replicas = if instances > 1 {
            let cut = |kind| mesh::cut(layout, kind, instances, question.cluster);
            let [[dp_cp, dense], [edp, experts]] = [GroupKind::DpCp, GroupKind::Edp].map(cut);
            (dp_cp, edp, Some([dense, experts]))
        } else {
            (of(GroupKind::DpCp), of(GroupKind::Edp), None)
        };
        let groups = StepGroups {
            dp_cp: replicas.0,
            edp: replicas.1,
            across: replicas.2,
            tp: of(GroupKind::Tp),
        };
        let shared = question.embeds_twice() && layout.places().parts_ends();
        let pair = shared.then(|| {
            let mut pair = of(GroupKind::Pp);
            pair.ranks_per_domain = pair.ranks_per_domain.min(2);
            pair.ranks_per_node = pair.ranks_per_node.min(2);
            pair.ranks = 2;
            pair
        });
        let mut ends: Vec<RankEnd> = Vec::with_capacity(pp);
        let mut before = None;
        for rank in 0..pp {
            let pair = pair.filter(|_| rank == 0 || rank + 1 == pp);
            let held = (&self.weights[rank], pair);
            let end = match ends.last() {
                Some(end) if before == Some(held) => end.clone(),
                _ => rank_end(case, held.0, &groups, pair),
            };
            ends.push(end);
            before = Some(held);
        }
        ends
    }
}

/// Whether dense parameters and experts have several replicas.
fn several(layout: &Layout) -> [bool; 2] {
    [layout.dp() * layout.cp(), layout.edp()].map(|replicas| replicas > 1)
}

/// Kinds of layers in order, with how many follow one another.
fn runs(question: &Question<'_>, layers: &[u32]) -> Vec<(usize, u32)> {
    let mut runs: Vec<(usize, u32)> = Vec::new();
    for &layer in layers {
        let kind = question.kind_of[layer as usize];
        match runs.last_mut() {
            Some((last, count)) if *last == kind => *count += 1,
            _ => runs.push((kind, 1)),
        }
    }
    runs
}

fn rank_end(
    case: Case<'_>,
    weights: &RankWeights,
    groups: &StepGroups,
    pair: Option<Placement>,
) -> RankEnd {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let mut work = ends::step(
        &weights.held(),
        groups,
        [
            question.options.grad_dtype,
            weight_dtype(question),
            question.options.optimizer.moments(),
        ],
        (question.options.masters, question.options.optimizer_offload),
        pair,
        shard::vocab(question.model, &shape.local) * question.model.hidden,
    );
    if question.stack.sweeps_gradients() {
        let grads = question.options.grad_dtype;
        let passes = ends::passes_over_gradients(&weights.total(), groups, grads);
        work.optimizer.extend(passes);
    }
    let several = several(layout);
    if question.bucket_elements(layout).is_some() && question.overlap.param_gather {
        work.optimizer.extend(ends::cleared(&weights.total()));
    } else if question.shards_weights() && question.stack.keeps_units() {
        // What rests whole is not gathered meanwhile.
        let all = weights.total();
        let dense = all.dense() / u64::from(groups.dp_cp.ranks);
        let experts = all.experts / u64::from(groups.edp.ranks);
        let own = Shard {
            split: dense,
            replicated: 0,
            experts,
        };
        work.optimizer.extend(ends::cleared(&own));
        if several[0] {
            // Gradients that TP ranks have in common are completed after every backward pass.
            work.exposed.clear();
        }
    }
    // Collectives of layers that are alike are alike.
    let seconds = |list: &[Collective]| -> Vec<f64> {
        let mut last: Option<(&Collective, f64)> = None;
        let price = |collective| {
            if let Some((known, price)) = last.filter(|(known, _)| *known == collective) {
                last = Some((known, price));
                return price;
            }
            let price = question.costs.collective(collective).time.0;
            last = Some((collective, price));
            price
        };
        list.iter().map(price).collect()
    };
    let ways = |&bytes: &Bytes| {
        let both = [false, true].map(|leaves| question.costs.transfer(bytes, leaves).time.0);
        both.iter().sum::<f64>()
    };
    let updates = work.optimizer.iter();
    let updates = updates.filter(|op| matches!(op, Op::Adamw { .. }));
    let beside_s: f64 = updates.map(|op| question.costs.op(op).time.0).sum();
    let streamed_s: f64 = work.streamed.iter().map(ways).sum();
    RankEnd {
        streamed_s: (streamed_s - beside_s).max(0.0),
        reduce_s: seconds(&work.reduce),
        across_s: seconds(&work.across).iter().sum(),
        gather_s: seconds(&work.gather),
        exposed_s: seconds(&work.exposed).iter().sum(),
        update_s: work
            .optimizer
            .iter()
            .map(|op| question.costs.op(op).time.0)
            .sum(),
        waiting_s: 0.0,
        work,
    }
}

fn weight_dtype(question: &Question<'_>) -> Dtype {
    let options = question.options;
    match (options.primary_weights, options.precision) {
        // MXFP8 scales along rows and along columns need the wide values (Megatron-LM,
        // `--reuse-grad-buf-for-mxfp8-param-ag`).
        (PrimaryWeights::Wide, _) | (PrimaryWeights::Fp8, Precision::Mxfp8) => {
            options.precision.activation()
        }
        (PrimaryWeights::Fp8, _) => Dtype::Fp8,
    }
}

/// A message between neighbouring stages: the residual stream of a rank's tokens.
pub(crate) fn message(case: Case<'_>) -> Option<Collective> {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let pp = placement(layout, GroupKind::Pp, question.cluster);
    let elements =
        shape.local.tokens_local * question.model.hidden * question.model.residual_streams;
    (pp.ranks > 1).then(|| Collective {
        kind: CollectiveKind::SendRecv,
        bytes: question.options.precision.activation().bytes(elements),
        ranks: 2,
        ranks_per_domain: pp.ranks_per_domain.min(2),
    })
}

/// Context, communicators of the groups that have more than one rank, and dispatcher buffers.
pub(crate) fn overhead(case: Case<'_>) -> Bytes {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let stack = &question.stack;
    let degrees = [
        layout.tp(),
        layout.cp(),
        layout.dp() * layout.cp(),
        layout.ep(),
        layout.etp(),
        layout.edp(),
    ];
    // Instances of the optimizer have groups of their own, inside and across.
    let instances = question.options.instances;
    let inside = question.shards(layout).map(|shards| shards > 1);
    let instances = if instances > 1 {
        2 + inside.into_iter().filter(|several| *several).count() as u64
    } else {
        0
    };
    let levels = shape.groups.cp_levels(shape.cp_comm);
    let levels = if shape.cp_comm == CpComm::Hierarchical {
        levels.iter().filter(|level| level.ranks > 1).count() as u64
    } else {
        0
    };
    let communicators = degrees.iter().filter(|&&degree| degree > 1).count() as u64
        + levels
        + instances
        + stack.pipeline_communicators(layout.places());
    let ep = placement(layout, GroupKind::Ep, question.cluster);
    let staging = stack.staging(
        shape.dispatcher,
        question.model.hidden,
        ep.ranks,
        ep.ranks_per_domain,
    );
    stack.common().context + stack.common().communicator * communicators + staging
}
