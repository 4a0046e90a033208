//! [`StageSplit`]: one layout under one dispatcher and one split into stages, ready for every choice of
//! recompute sets: durations of its stages, bound, simulated step, memory.

mod choosing;
mod end;
mod exchanges;
mod held;
mod in_step;
mod rank;
mod waiting;

use std::iter::repeat_n;

use moefold_profiles::cost::Cost;
use moefold_profiles::units::{Bytes, Seconds, Span};
use moefold_profiles::{ByClass, Collective, CollectiveKind};

use super::cuts::Cuts;
use super::recompute::Sets;
use super::shape::{Kind, Question, Shape};
use super::sharded::Waits;
use crate::choice::ScheduleName;
use crate::layout::Layout;
use crate::mesh::{GroupKind, Mesh};
use crate::partition::{self, Weights};
use crate::price::lengthened;
use crate::runtime::Level;
use crate::simulate::{StageTimes, lower_bound};

pub(crate) use exchanges::Exchanges;
pub(crate) use held::overhead;
pub(crate) use in_step::{InStep, PARTS};
use rank::{RankEnd, RankWeights};

/// Steps that are shorter by no more than this share are not looked for: programs are solved in floating point.
pub(crate) const NEAR: f64 = 1e-6;

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
    /// Durations that no recompute set changes; the others are nothing.
    fixed: StageTimes,
    /// All of them under the first choice of recompute sets.
    under_first: StageTimes,
    /// Work at the end of the step, of each pipeline rank.
    pub(crate) ends: Vec<RankEnd>,
    /// By rank: states of the optimizer that rest on the host, and the most that the device has at once as they
    /// pass through it.
    streamed: Vec<(Bytes, Level)>,
    /// Memory of each pipeline rank that no recompute set changes.
    held: Vec<ByClass<Bytes>>,
    /// A message between stages.
    message: Level,
    /// What CUDA graphs have of such a message beside it.
    pub(super) copied: Level,
    /// By pipeline rank.
    weights: Vec<RankWeights>,
}

/// The splits tried for a layout: balanced by time, and equal numbers of layers where they divide. What is balanced is
/// kept in `known`, by places of stages, for those who ask again about the same shape.
pub(crate) fn splits(case: Case<'_>, known: &Cuts) -> Vec<StageSplit> {
    let Case {
        question, layout, ..
    } = case;
    if let Some(given) = &question.options.stages {
        return vec![StageSplit::new(case, given.stages().to_vec())];
    }
    if !question.splits.is_empty() {
        let each = question.splits.iter();
        return each
            .map(|stages| StageSplit::new(case, stages.clone()))
            .collect();
    }
    let first = &question.choices[0];
    let layers = layer_weights(case, first);
    let weights = weights(case, &layers, first);
    let mut splits = Vec::with_capacity(2);
    splits.extend(partition::uniform(
        layers.len() as u32,
        layout.pp(),
        layout.vpp(),
    ));
    if layout.pp() > 1
        && let Some(balanced) = known.of(layout.places(), || {
            let balanced = partition::partition(&weights, layout.places());
            balanced.map(|balanced| balanced.stages)
        })
        && !splits.contains(&balanced)
    {
        splits.push(balanced);
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
        question, layout, ..
    } = case;
    let stages = if let Some(given) = &question.options.stages {
        given.stages().to_vec()
    } else {
        let first = &question.choices[0];
        let layers = layer_weights(case, first);
        let weights = weights(case, &layers, first);
        partition::uniform(layers.len() as u32, layout.pp(), layout.vpp())
            .or_else(|| partition::proportional(&weights, layout.stages()))?
    };
    Some(StageSplit::new(case, stages))
}

pub(super) fn nanoseconds(seconds: f64) -> u64 {
    Seconds(seconds).to_span().0
}

pub(super) fn layer_weights(case: Case<'_>, sets: &Sets) -> Vec<u64> {
    let each = (0..).zip(&case.question.kind_of);
    each.map(|(layer, &kind)| nanoseconds(case.shape.kinds[kind].both_s(sets.least(layer))))
        .collect()
}

/// Stages of a layout weigh so much under some recompute sets. The embedding has a stage of its own where there are more
/// stages than layers alone: Megatron-Core lets it in any, and it is the lightest end.
pub(super) fn weights<'l>(case: Case<'_>, layers: &'l [u64], sets: &Sets) -> Weights<'l> {
    let Case { layout, shape, .. } = case;
    let set = sets.of_ends();
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
        let free = vec![Span::ZERO; stages.len()];
        let fixed = StageTimes::new(layout.pp(), free.clone(), free);
        let mut split = Self {
            under_first: fixed.clone(),
            fixed,
            runs: stages.iter().map(|layers| runs(question, layers)).collect(),
            stages,
            counts,
            ends: Vec::new(),
            streamed: Vec::new(),
            held: Vec::new(),
            message: Level::default(),
            copied: Level::default(),
            weights: Vec::new(),
        };
        let ranks = 0..layout.pp() as usize;
        split.weights = ranks.map(|rank| split.weights_of(case, rank)).collect();
        split.hold(case);
        split.ends = split.rank_ends(case);
        split.time(case);
        split
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
            Sets::First { layers, set } => {
                let mut left = *layers;
                for &(kind, count) in &self.runs[stage] {
                    let again = count.min(left);
                    left -= again;
                    let parts = [(*set, again), (0, count - again)].into_iter();
                    let parts = parts.filter(|(_, count)| *count > 0);
                    all.extend(parts.map(|(set, count)| (&shape.kinds[kind], set, count)));
                }
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

    /// Fills in durations: those that no recompute set changes, and all under the first choice of sets.
    fn time(&mut self, case: Case<'_>) {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let stages = self.stages.len();
        let forward_s: Vec<f64> = (0..stages)
            .map(|stage| self.forward_s(shape, stage))
            .collect();
        self.fixed.forward = spans(&forward_s);
        self.fixed.first_forward.clone_from(&self.fixed.forward);
        if case.schedule.divides_backward() {
            let weight = (0..stages).map(|stage| Seconds(self.weight_s(shape, stage)).to_span());
            self.fixed.weight = Some(weight.collect());
        }
        if let Some((_, cost)) = message(case) {
            self.fixed.hop = vec![cost.time.to_span(); stages - 1];
        }
        // Interleaved stages send under other chunks' work; plain 1F1B waits for its messages.
        let stack = &question.stack;
        self.fixed.hop_overlapped = stack.sends_beside(question.overlap, layout.vpp());
        let mut arrives = 0.0;
        for (rank, first_s) in forward_s.iter().take(layout.pp() as usize).enumerate() {
            let own = own(layout, rank);
            let end = &self.ends[rank];
            let gather = self.gather_shows_s(case, rank, arrives);
            self.fixed.first_forward[rank] += Seconds(gather).to_span();
            // Ranks that meet nowhere before meet at the end, and so do others.
            let apart: f64 = own.map(|stage| self.apart_s(shape, stage)).sum();
            let reduced = end.work.reduce.iter().chain(&end.work.across);
            let mut met = reduced.chain(&end.work.exposed).chain(&end.work.sums);
            let apart_s = apart * f64::from(layout.microbatches());
            let waiting_s = met.next().map_or(0.0, |collective| {
                question.costs.waiting(collective).after(apart_s)
            });
            let optimizer_s = end.exposed_s + end.update_s + end.streamed_s + waiting_s;
            self.fixed.optimizer[rank] = Seconds(optimizer_s).to_span();
            self.ends[rank].waiting_s = waiting_s;
            arrives += first_s;
        }
        self.under_first = self.times_under(case, &question.choices[0]);
    }

    /// Seconds by which the first forward pass of a rank, which begins when the first message is there, is longer for its weights: these
    /// are gathered from the start, under what precedes their first use.
    pub(crate) fn gather_shows_s(&self, case: Case<'_>, rank: usize, arrives: f64) -> f64 {
        let Case {
            question, layout, ..
        } = case;
        let gather_s: f64 = self.ends[rank].gather_s.iter().sum();
        if question.shards_weights() {
            return 0.0;
        }
        if !question.stack.hides(question.overlap).param_gather {
            return gather_s;
        }
        let first = &question.choices[0];
        let [slows, _] = self.slowed(case, rank, first);
        if question.bucket_elements(layout).is_some() {
            let passes_s = self.passes_by_unit(case, rank, first);
            return self.gathered_after(layout, rank, arrives, (&passes_s, slows));
        }
        let stages = own(layout, rank);
        let forward_s: f64 = stages.map(|stage| self.forward_s(case.shape, stage)).sum();
        // Until its first message comes a rank computes nothing.
        let beside_s = (gather_s - arrives).max(0.0);
        lengthened(forward_s, beside_s, slows)
    }

    /// Seconds of a forward pass of a stage.
    fn forward_s(&self, shape: &Shape, stage: usize) -> f64 {
        let kinds = self.each_kind(shape, stage);
        kinds
            .map(|(kind, count)| kind.forward_s * f64::from(count))
            .sum()
    }

    /// Durations under some recompute sets, of those that they do not change.
    fn times_under(&self, case: Case<'_>, sets: &Sets) -> StageTimes {
        let Case {
            question, shape, ..
        } = case;
        let mut times = self.fixed.clone();
        let backward_s = self.backward_s(shape, sets);
        times.backward = spans(&backward_s);
        times.last_backward.clone_from(&times.backward);
        times.hidden = self.hidden(case, sets);
        for (rank, end) in self.ends.iter().enumerate() {
            // A stage's gradients are whole in its last backward, under which they are reduced, and where that is divided
            // only after it.
            let reduce = if question.shards_gradients() {
                let waits = self.waits(case, rank, sets);
                add_waits(&mut times, rank, &waits);
                waits.reduce + self.reduced_across_s(case, rank, sets)
            } else if !Self::hides_reductions(case) {
                end.reduce_s.iter().chain(&end.across_s).sum()
            } else if let Sets::Each(_) = sets {
                let once_s = self.backward_of(shape, rank, &Sets::Every(0));
                let by_layer = self.reduced_by_layer_s(case, rank);
                by_layer.at(backward_s[rank] - once_s).max(0.0)
            } else {
                let (passes_s, slows) = self.beside(case, rank, sets);
                self.reduced_beside_s(case, rank, (&passes_s, slows))
            };
            times.reduce[rank] = Seconds(reduce).to_span();
        }
        times
    }

    /// Seconds of a backward pass of a stage that only add to gradients of weights.
    fn weight_s(&self, shape: &Shape, stage: usize) -> f64 {
        let kinds = self.each_kind(shape, stage);
        kinds
            .map(|(kind, count)| kind.weight_s * f64::from(count))
            .sum()
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
        let stages = 0..self.stages.len();
        stages
            .map(|stage| self.backward_of(shape, stage, sets))
            .collect()
    }

    /// Seconds of the backward pass of a stage.
    fn backward_of(&self, shape: &Shape, stage: usize, sets: &Sets) -> f64 {
        match sets {
            // As many layers of a kind as there are, at once.
            Sets::Every(set) => self
                .each_kind(shape, stage)
                .map(|(kind, count)| kind.backward_s[*set] * f64::from(count))
                .sum(),
            Sets::Each(_) | Sets::First { .. } => self
                .each_under(shape, stage, sets)
                .iter()
                .map(|(kind, set, count)| kind.backward_s[*set] * f64::from(*count))
                .sum(),
        }
    }

    /// Durations under some recompute sets.
    pub(crate) fn times(&self, case: Case<'_>, sets: &Sets) -> StageTimes {
        if *sets == case.question.choices[0] {
            self.under_first.clone()
        } else {
            self.times_under(case, sets)
        }
    }

    /// No schedule runs a step in less.
    pub(crate) fn bound(&self, case: Case<'_>, sets: &Sets) -> Span {
        let layout = case.layout;
        let times = self.times(case, sets);
        lower_bound(layout.places(), layout.microbatches(), &times)
    }
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

pub(crate) fn spans(seconds: &[f64]) -> Vec<Span> {
    let each = seconds.iter();
    each.map(|seconds| Seconds(*seconds).to_span()).collect()
}

/// Adds what passes wait for where gradients rest divided.
fn add_waits(times: &mut StageTimes, rank: usize, waits: &Waits) {
    let span = |seconds| Seconds(seconds).to_span();
    times.forward[rank] += span(waits.forward);
    times.first_forward[rank] += span(waits.first_forward);
    times.backward[rank] += span(waits.backward);
    times.last_backward[rank] += span(waits.last_backward);
}

/// A message between neighbouring stages, the residual stream of a rank's tokens, and its price.
pub(crate) fn message(case: Case<'_>) -> Option<(Collective, Cost)> {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let cluster = question.cluster;
    if layout.pp() == 1 {
        return None;
    }
    let mesh = Mesh::of(layout);
    let pp = mesh.placement(GroupKind::Pp, cluster);
    let elements =
        shape.local.tokens_local * question.model.hidden * question.model.residual_streams;
    let message = Collective {
        kind: CollectiveKind::SendRecv,
        bytes: question.options.precision.activation().bytes(elements),
        ranks: 2,
        ranks_per_domain: pp.ranks_per_domain.min(2),
    };
    let domains = mesh.reach(GroupKind::Pp, cluster);
    Some((message, question.costs.message(&message, domains)))
}
