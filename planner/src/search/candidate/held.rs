//! Memory of pipeline ranks under a choice of recompute sets, and the choices by layer that fit it.

use std::iter::repeat_n;
use std::rc::Rc;

use moefold_profiles::units::{Bytes, GIB, Seconds, Span};
use moefold_profiles::{ByClass, Dtype, TensorClass};

use super::rank::several;
use super::{Case, StageSplit, message, own};
use crate::bucket::Division;
use crate::choice::{CpComm, in_flight};
use crate::layout::Layout;
use crate::memory::{self, Occupancy};
use crate::mesh::{GroupKind, placement};
use crate::runtime::{Height as _, Level, Running, StageMemory, Stretch, highest};
use crate::search::by_layer::{self, Chunk};
use crate::search::by_set::OfSet;
use crate::search::mix::{self, Alike, Way};
use crate::search::recompute::Sets;
use crate::search::schedules::Simulated;
use crate::search::shape::{Kind, Question, Shape};
use crate::simulate::{StageTimes, lower_bound};
use crate::stack::{ByLayer, graphs};

/// A backward pass of a stage in two: that of the layers behind its first, and that of those.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turns {
    /// What the layers behind work in, above all that the stage saved.
    pub(crate) behind: Level,
    /// What the first layers work in, above what they saved themselves.
    pub(crate) first: Level,
    /// What the layers behind had saved: by then nothing is left of it.
    pub(crate) gone: Level,
}

/// How often layers choose anew by what is on the longest path.
const ROUNDS: usize = 40;

impl StageSplit {
    /// Memory of a pipeline rank that no recompute set changes.
    pub(crate) fn held_by(&self, pipeline_rank: usize) -> ByClass<Bytes> {
        self.held[pipeline_rank]
    }

    /// The memory of a stage under some recompute sets, in the order of its layers.
    pub(crate) fn stage_memory(&self, shape: &Shape, stage: usize, sets: &Sets) -> StageMemory {
        let mut memory = StageMemory::default();
        for (kind, set, count) in self.each_under(shape, stage, sets) {
            memory.add_layers(&kind.memory.under(set), count);
        }
        let (passes, copied) = (&mut memory.passes, self.copied_by(stage));
        passes.saved = passes.saved + copied;
        passes.forward = passes.forward + copied;
        memory
    }

    /// The most that no recompute set changes, over all ranks.
    pub(crate) fn held(&self) -> Bytes {
        let totals = self.held.iter().map(ByClass::total);
        totals.max().unwrap_or(Bytes::ZERO)
    }

    /// What CUDA graphs have of the message that a stage receives.
    pub(crate) fn copied_by(&self, stage: usize) -> Level {
        self.copied * i64::from(stage > 0 && !self.runs[stage].is_empty())
    }

    /// What the driver has for the CUDA graphs of a pipeline rank: in a pipeline, and where passes of two microbatches
    /// run as one, each microbatch has its own, and one of the whole step has all of them.
    fn of_graphs(&self, case: Case<'_>, rank: usize) -> Bytes {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let stages = own(layout, rank).flat_map(|stage| self.each_kind(shape, stage));
        let nodes: u64 = stages
            .map(|(kind, count)| kind.nodes * u64::from(count))
            .sum();
        let combined = question.overlap.expert_alltoall;
        let each = layout.pp() > 1 || combined || question.options.fixed_graphs().is_whole();
        let copies = if each { layout.microbatches() } else { 1 };
        Bytes(graphs::NODE.0 * nodes * u64::from(copies))
    }

    /// Works out what no recompute set changes: state, buffers that stay, context and communicators.
    pub(super) fn hold(&mut self, case: Case<'_>) {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let options = question.options;
        let bytes = question.state_bytes();
        let overhead = overhead(case);
        let setting = question.setting(layout, shape.wires(), &shape.local, &shape.groups);
        let step = question.runtime.step(&setting, layout.microbatches());
        self.message = step.message;
        if graphs::copy_messages(options.fixed_graphs(), question.model)
            && let Some((message, _)) = message(case)
        {
            self.copied = Level::of(TensorClass::Activations, message.bytes);
        }
        let pp = layout.pp() as usize;
        let shards = question.divided(layout);
        let states = shards.states;
        let share = options.optimizer_offload;
        let state = |elements: u64| Bytes((elements as f64 * bytes.sharded) as u64);
        self.streamed = (0..pp)
            .map(|rank| {
                let families = self.weights[rank].resting(step.grain, states);
                let families = families.iter().zip(states);
                let pieces = families.clone().flat_map(|(buckets, shards)| {
                    share.pieces(buckets.iter().sum::<u64>().div_ceil(shards))
                });
                let pieces: Vec<u64> = pieces.collect();
                let on_device = if let Some(dealt) = &self.weights[rank].dealt {
                    let gathered = !question.overlap.param_gather;
                    let beside = bytes.beside_tensors(dealt, states, gathered);
                    Level::of(TensorClass::Transient, beside)
                } else if question.widens_gradients() {
                    // In f32, for the update.
                    let own = families
                        .map(|(buckets, shards)| buckets.iter().sum::<u64>().div_ceil(shards));
                    Level::of(TensorClass::Transient, Dtype::F32.bytes(own.sum()))
                } else if pieces.is_empty() {
                    Level::default()
                } else {
                    Level::of(TensorClass::Optimizer, state(in_flight(&pieces))) + step.update
                };
                (state(pieces.iter().sum()), on_device)
            })
            .collect();
        self.held = (0..pp)
            .map(|rank| {
                let resting = self.weights[rank].resting(step.grain, states);
                let weights = &self.weights[rank];
                let held = resting
                    .each_ref()
                    .map(|buckets| buckets.iter().sum::<u64>());
                let wide = weights.units.iter().map(|unit| unit.resting.wide).sum();
                let mut held = match question.division(layout) {
                    Division::Sharded(turns) => {
                        let whole = if question.stack.keeps_units() {
                            // It quantizes nothing.
                            let [whole, grads] = weights.whole(turns, &resting, several(layout));
                            bytes.weights(whole, 0) + bytes.gradients(grads)
                        } else {
                            let units = weights.units.iter().map(|unit| unit.resting);
                            let units = units.map(|unit| {
                                let total = unit.total();
                                [bytes.weights(total, unit.wide), bytes.gradients(total)]
                            });
                            memory::largest_units(
                                units,
                                if question.copies_units() { 2 } else { 1 },
                            )
                        };
                        memory::fully_sharded(held, wide, bytes, shards, whole)
                    }
                    Division::Whole | Division::AtLeast(_) if question.shards_gradients() => {
                        let families = held.iter().zip(several(layout));
                        let reduced = families.filter(|(_, several)| *several);
                        let reduced: u64 = reduced.map(|(held, _)| held).sum();
                        let whole = bytes.gradients(reduced.min(memory::REDUCED_AT_ONCE));
                        memory::gradients_sharded(held, wide, bytes, shards, whole)
                    }
                    Division::Whole | Division::AtLeast(_) => {
                        memory::state(held, wide, bytes, states)
                    }
                };
                if let Some(dealt) = &weights.dealt {
                    let each = dealt.iter().map(|dealt| bytes.owned(&dealt.fullest));
                    held[TensorClass::Optimizer] = each.sum();
                }
                held[TensorClass::Optimizer] -= self.streamed[rank].0;
                held = held + step.standing.bytes();
                held[TensorClass::Transient] += self.buffers(case, rank);
                held[TensorClass::Overhead] = overhead + self.of_graphs(case, rank);
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
        let ranks = (0..case.layout.pp() as usize).zip(occupancies);
        ranks
            .map(|(rank, occupancies)| self.memory_of(case, rank, sets, occupancies))
            .collect()
    }

    /// Memory of one of them.
    fn memory_of(
        &self,
        case: Case<'_>,
        rank: usize,
        sets: &Sets,
        occupancies: &[Occupancy],
    ) -> ByClass<Bytes> {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        let places = layout.places();
        let stage_of = |chunk| places.stage_of(rank as u32, chunk as u32) as usize;
        let own = self.own_memory((layout, shape), rank, sets);
        let stretches = self.own_stretches(case, rank, sets);
        let running = |at: &Occupancy| match (&stretches, at.running) {
            (Some(stretches), _) => self.running(case, rank, &own, stretches, at),
            (None, Running::Combined { backward }) => {
                self.layer_by_layer(case, [at.chunk, backward].map(stage_of), sets)
            }
            (None, Running::Backward) if matches!(sets, Sets::First { .. }) => {
                let turns = self.turns(shape, stage_of(at.chunk), sets);
                // What is sent comes back before the pass.
                let sent = own[at.chunk].passes.running(Running::Backward);
                sent + turns.behind.higher(turns.first - turns.gone)
            }
            (None, one) => own[at.chunk].running(one),
        };
        let mut held = memory::at_worst_instant(
            self.held[rank],
            &own,
            occupancies,
            self.message,
            self.streamed[rank].1,
            running,
        );
        let allocated = held.total() - held[TensorClass::Overhead];
        held[TensorClass::Overhead] += allocated.scale(question.stack.fragmentation());
        held
    }

    /// How a stage runs backward whose first layers alone compute all again.
    pub(crate) fn turns(&self, shape: &Shape, stage: usize, sets: &Sets) -> Turns {
        let all = self.each_under(shape, stage, sets);
        let again = |set: usize| matches!(sets, Sets::First { set: own, .. } if *own == set);
        let first = all.iter().rposition(|&(_, set, _)| again(set));
        let parts = all.split_at(first.map_or(0, |last| last + 1));
        let [first, behind] = [parts.0, parts.1].map(|part| {
            let mut memory = StageMemory::default();
            for &(kind, set, count) in part {
                memory.add_layers(&kind.memory.under(set), count);
            }
            memory
        });
        Turns {
            behind: behind.running(Running::Backward),
            first: first.running(Running::Backward),
            gone: behind.passes.saved,
        }
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
            Running::Backward if !case.schedule.divides_backward() => {
                returned(at.chunk) + highest(&[], &stretches[at.chunk][1])
            }
            one => own[at.chunk].running(one),
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
            let saved = |kind: &Kind, set: usize| kind.memory[set].passes().saved;
            let each =
                each.flat_map(|(kind, set, count)| repeat_n(saved(kind, set), count as usize));
            let mut each: Vec<Level> = each.collect();
            if let Some(first) = each.first_mut() {
                *first = *first + self.copied_by(stage);
            }
            each
        };
        let of_stage = |stage| self.stage_memory(case.shape, stage, sets);
        let going = of_stage(backward);
        let received = u32::from(forward > 0) + u32::from(backward + 1 < self.stages.len());
        let messages = self.message * i64::from(received);
        // The embedding runs backward when both passes are over.
        let last = messages + of_stage(forward).passes.saved - going.passes.saved + going.last();
        let mut level = messages
            + of_stage(forward).working(Running::Forward)
            + going.working(Running::Backward);
        let (mut coming, mut going) = (
            layers(forward).into_iter(),
            layers(backward).into_iter().rev(),
        );
        let mut peak = level.higher(last);
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

    /// The recompute sets of layers that take the least time of those that fit, if any do, as the stack lets layers differ.
    pub(crate) fn by_layer(&self, case: Case<'_>, occupancies: &[Vec<Occupancy>]) -> Option<Sets> {
        match case.question.by_layer? {
            ByLayer::Block => self.fewest_again(case, occupancies),
            ByLayer::Each => {
                let chosen = self.each_by_itself(case, occupancies, (&self.alike(), false));
                chosen.map(|(sets, _)| sets)
            }
        }
    }

    /// The same where each layer chooses, with a shorter step as far as one is found: seconds of a stage count the more the more passes of it
    /// are on the longest paths of choices before.
    pub(crate) fn by_layer_in_step(
        &self,
        case: Case<'_>,
        occupancies: &[Vec<Occupancy>],
        simulated: &Simulated,
    ) -> Option<Sets> {
        let simulator = simulated.simulator();
        let mut passes = vec![u64::from(case.layout.microbatches()); self.stages.len()];
        let mut weights = self.alike();
        let mut best: Option<(Span, Sets)> = None;
        // The first is that of the search.
        for round in 0..ROUNDS {
            let found = self.each_by_itself(case, occupancies, (&weights, round > 0));
            let Some((sets, _)) = found else {
                if round == 0 {
                    continue;
                }
                break;
            };
            let times = self.times(case, &sets);
            let step = simulator.run(&times).total;
            let path = simulator.longest(&times);
            let computes_again =
                matches!(&sets, Sets::Each(each) if each.iter().any(|set| *set > 0));
            if best.as_ref().is_none_or(|(least, _)| step < *least) {
                best = Some((step, sets));
            }
            // The one stage of a rank counts for all of it.
            if case.layout.vpp() == 1 || !computes_again {
                break;
            }
            if round == 0 {
                continue;
            }
            for (passes, more) in passes.iter_mut().zip(&path.backward) {
                *passes += u64::from(*more);
            }
            weights = passes.iter().map(|&passes| passes as f64).collect();
        }
        best.map(|(_, sets)| sets)
    }

    /// Of each stage a second counts as much.
    fn alike(&self) -> Vec<f64> {
        vec![1.0; self.stages.len()]
    }

    /// The fewest layers at the beginning of each stage with which all ranks have room where they alone compute all again:
    /// no more of them take less time. All of every stage are a choice of their own, but for depths of multi-token
    /// prediction.
    fn fewest_again(&self, case: Case<'_>, occupancies: &[Vec<Occupancy>]) -> Option<Sets> {
        let question = case.question;
        let capacity = question.capacity();
        // What has not fitted last is likely not to fit next.
        let mut fullest = 0;
        let ranks = occupancies.len();
        self.firsts(question).into_iter().find(|sets| {
            let mut each = (0..ranks).map(|rank| (fullest + rank) % ranks);
            let too_full = each.find(|&rank| {
                let memory = self.memory_of(case, rank, sets, &occupancies[rank]);
                memory.total() > capacity
            });
            fullest = too_full.unwrap_or(fullest);
            too_full.is_none()
        })
    }

    /// One layer at the beginning of each stage computes all again, two, and so on to what is not all of every stage.
    pub(crate) fn firsts(&self, question: &Question<'_>) -> Vec<Sets> {
        let most = self.stages.iter().map(Vec::len).max().unwrap_or(0) as u32;
        let most = most - u32::from(question.model.mtp.is_empty());
        (1..=most)
            .map(|layers| first_of_stages(question, layers))
            .collect()
    }

    /// The ways to run a stage where each layer chooses by itself.
    fn chunk<'l>(&self, shape: &'l Shape, stage: usize) -> Chunk<'l> {
        let (received, sent) = (stage > 0, stage + 1 < self.stages.len());
        let layers = self.layers(stage);
        let layers = layers.map(|(_, kind)| shape.kinds[kind].ways.as_slice());
        let first = (!received).then(|| shape.embedding.memory[0].passes());
        let last = (!sent).then(|| shape.head.memory[0].passes());
        let message = (self.message.total(), received, sent);
        Chunk::new(first.as_ref(), layers.collect(), last.as_ref(), message)
    }

    /// Seconds of a microbatch that the layers of a rank compute again at least where each chooses by itself, of choices that fit; infinite
    /// where none does.
    pub(crate) fn again_at_least_s(
        &self,
        case: Case<'_>,
        rank: usize,
        occupancies: &[Occupancy],
    ) -> f64 {
        let stages = || own(case.layout, rank);
        let chunks: Vec<Chunk<'_>> = stages()
            .map(|stage| self.chunk(case.shape, stage))
            .collect();
        let chunks: Vec<&Chunk<'_>> = chunks.iter().collect();
        let rooms = self.rooms(case, rank, occupancies);
        let all_s = by_layer::least_s(&chunks, (occupancies, &rooms));
        let layers = stages().flat_map(|stage| self.layers(stage));
        let once_s: f64 = layers
            .map(|(_, kind)| case.shape.kinds[kind].backward_s[0])
            .sum();
        // Sums are rounded.
        (all_s * (1.0 - 1e-12) - once_s).max(0.0)
    }

    /// A choice for each layer by itself, on every rank whose memory it fits, and by rank whether no other has shorter backward passes, of which
    /// a second of each stage counts so much: see [`by_layer`], which may look at all ways where a rank has several stages, too.
    fn each_by_itself(
        &self,
        case: Case<'_>,
        occupancies: &[Vec<Occupancy>],
        (weights, looks_at_all): (&[f64], bool),
    ) -> Option<(Sets, Vec<bool>)> {
        let Case {
            question, shape, ..
        } = case;
        // Chunks that are alike are looked at once.
        let mut known: Vec<(usize, Rc<Chunk<'_>>)> = Vec::new();
        let mut chunk = |stage: usize| -> Rc<Chunk<'_>> {
            let ends = |stage: usize| [stage > 0, stage + 1 < self.stages.len()];
            let alike = |(known, _): &&(usize, Rc<Chunk<'_>>)| {
                self.runs[*known] == self.runs[stage] && ends(*known) == ends(stage)
            };
            if let Some((_, chunk)) = known.iter().find(alike) {
                return Rc::clone(chunk);
            }
            let chunk = Rc::new(self.chunk(shape, stage));
            known.push((stage, Rc::clone(&chunk)));
            chunk
        };
        let (mut sets, mut are_known) = (vec![0; question.kind_of.len()], Vec::new());
        for (rank, occupancies) in occupancies.iter().enumerate() {
            let own = own(case.layout, rank);
            let chunks: Vec<Rc<Chunk<'_>>> = own.clone().map(&mut chunk).collect();
            let chunks: Vec<&Chunk<'_>> = chunks.iter().map(Rc::as_ref).collect();
            let rooms = self.rooms(case, rank, occupancies);
            let weights: Vec<f64> = own.clone().map(|stage| weights[stage]).collect();
            let looks_at_all = looks_at_all || chunks.len() == 1;
            let under = (&occupancies[..], &rooms[..]);
            let found = by_layer::fastest(&chunks, under, (&weights, looks_at_all))?;
            are_known.push(found.is_known);
            for (stage, chosen) in own.zip(found.sets) {
                for (&layer, set) in self.stages[stage].iter().zip(chosen) {
                    sets[layer as usize] = set;
                }
            }
        }
        Some((Sets::Each(sets), are_known))
    }

    /// No schedule runs a step in less, whatever each layer recomputes; nothing where it all fits as it is.
    ///
    /// What a rank keeps beyond its room it lets go of at the best rate of its layers, at each instant. Where only the first
    /// layers of stages compute anything again, one does of each.
    pub(crate) fn by_layer_bound(
        &self,
        case: Case<'_>,
        occupancies: &[Vec<Occupancy>],
    ) -> Option<Span> {
        if case.question.by_layer == Some(ByLayer::Block) {
            let plain = &case.question.choices[0];
            let capacity = case.question.capacity();
            let too_full = |(rank, occupancies): (usize, &Vec<Occupancy>)| {
                self.memory_of(case, rank, plain, occupancies).total() > capacity
            };
            let fits = !occupancies.iter().enumerate().any(too_full);
            return (!fits).then(|| self.bound(case, &first_of_stages(case.question, 1)));
        }
        let (layout, shape) = (case.layout, case.shape);
        let plain = &case.question.choices[0];
        let mut fits = true;
        let more_s = |(rank, occupancies): (usize, &Vec<Occupancy>)| {
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
                        let passes = kind.memory[0].passes().totals();
                        by_layer::best_saver(&kind.ways, kind.backward_s[0], &passes, [live, kept])
                    });
                    rates.fold(0.0, f64::max)
                });
                let over = (kept - room).max(0) as f64;
                if over > 0.0 {
                    more_s = more_s.max(over / rate.fold(0.0, f64::max));
                }
            }
            more_s
        };
        let more_s: Vec<f64> = occupancies.iter().enumerate().map(more_s).collect();
        let times = self.times_with(case, &more_s);
        (!fits).then(|| lower_bound(layout.places(), layout.microbatches(), &times))
    }

    /// Durations where nothing is computed again but what takes each rank so many seconds of a microbatch, at least: its last stage
    /// has them. Of passes that hide nothing of each other.
    fn times_with(&self, case: Case<'_>, more_s: &[f64]) -> StageTimes {
        let plain = &case.question.choices[0];
        let mut times = self.times(case, plain);
        assert!(times.hidden.is_none(), "layers do not choose there");
        for (rank, more_s) in more_s.iter().enumerate() {
            let own = own(case.layout, rank);
            let last = own.clone().last().expect("a rank has a stage");
            // Stages are rounded one by one.
            let others = u64::from(case.layout.vpp()) - 1;
            let more = Span(((more_s.min(1e9) * 1e9) as u64).saturating_sub(others));
            // What passes wait for, and what is reduced after the last, may be hidden under it.
            let waits = if case.question.shards_gradients() {
                // Gathers of a forward pass come after reductions of the microbatch before.
                let waits = self.waits(case, rank, plain);
                let both = [
                    waits.forward + waits.backward,
                    waits.first_forward + waits.last_backward,
                ];
                both.map(|seconds| Seconds(seconds).to_span())
            } else {
                [Span::ZERO; 2]
            };
            let hidden = if Self::hides_reductions(case) && !case.question.shards_gradients() {
                let behind = Seconds(self.reduced_last_s(case, rank)).to_span();
                let less = Seconds(more.seconds().0 * self.hides_at_most()).to_span();
                let reduce = &mut times.reduce[rank];
                *reduce = (*reduce - less.min(*reduce)).max(behind.min(*reduce));
                Span::ZERO
            } else {
                own.map(|stage| times.reduce[stage]).sum()
            };
            times.backward[last] += more - waits[0].min(more);
            times.last_backward[last] += more - (waits[1] + hidden).min(more);
        }
        times
    }

    /// Bytes that the stages of a rank may take at some instants.
    fn rooms(&self, case: Case<'_>, rank: usize, occupancies: &[Occupancy]) -> Vec<i64> {
        let own = own(case.layout, rank);
        let kinds = own.flat_map(|stage| self.each_kind(case.shape, stage));
        let beside: i64 = kinds
            .map(|(kind, count)| kind.memory.alike().beside.total() * i64::from(count))
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

    /// What the step could shrink to if every layer chose its recompute set by itself: see [`crate::search::mix`]. No choice for
    /// each layer runs this layout and split in less.
    pub(crate) fn mixed_bound_s(
        &self,
        case: Case<'_>,
        occupancies: &[Vec<Occupancy>],
        simulated: &Simulated,
    ) -> f64 {
        let (layout, shape) = (case.layout, case.shape);
        let plain = &case.question.choices[0];
        let chosen = self.each_by_itself(case, occupancies, (&self.alike(), false));
        let more_s = |(rank, occupancies): (usize, &Vec<Occupancy>)| {
            if let Some((Sets::Each(sets), are_known)) = &chosen
                && are_known[rank]
            {
                let layers = own(layout, rank).flat_map(|stage| self.layers(stage));
                let again =
                    layers.map(|(layer, kind)| shape.kinds[kind].again_s(sets[layer as usize]));
                return again.sum::<f64>() * (1.0 - 1e-9);
            }
            let memory = self.own_memory((layout, shape), rank, plain);
            let mut rooms: Vec<f64> = self
                .rooms(case, rank, occupancies)
                .into_iter()
                .map(|room| room as f64)
                .collect();
            let mut groups = Vec::new();
            for (stage, memory) in own(layout, rank).zip(&memory) {
                let chunk = layout.places().chunk_of(stage as u32) as usize;
                let live: Vec<u32> = occupancies.iter().map(|at| at.live[chunk]).collect();
                // What is kept of the ends of the model and of messages, and of gradients of weights at least.
                let mut ends = memory.passes.saved.total();
                let mut kept = 0;
                let kinds = shape.kinds.iter().zip(&self.counts[stage]);
                for (kind, &layers) in kinds.filter(|(_, layers)| **layers > 0) {
                    let saved = |memory: &OfSet| memory.passes().saved.total();
                    ends -= i64::from(layers) * saved(&kind.memory[0]);
                    let each = kind.memory.distinct().iter();
                    let least = each.map(|memory| memory.passes().kept.total()).min();
                    kept += i64::from(layers) * least.unwrap_or(0);
                    let ways = kind.memory.iter().enumerate();
                    let ways = ways.map(|(set, memory)| Way {
                        seconds: kind.again_s(set),
                        gib: saved(memory) as f64 / GIB as f64,
                    });
                    groups.push(Alike {
                        layers,
                        live: live.clone(),
                        ways: ways.collect(),
                    });
                }
                for (room, at) in rooms.iter_mut().zip(occupancies) {
                    *room -= ends as f64 * f64::from(at.live[chunk]);
                    *room -= kept as f64 * f64::from(at.kept[chunk]);
                }
            }
            let rooms: Vec<f64> = rooms.iter().map(|room| room / GIB as f64).collect();
            // As exact as solvers are.
            mix::least_work(&groups, &rooms).unwrap_or(0.0) * (1.0 - 1e-9)
        };
        let more_s: Vec<f64> = occupancies.iter().enumerate().map(more_s).collect();
        let times = self.times_with(case, &more_s);
        let step = if layout.vpp() == 1 {
            simulated.simulator().run(&times).total
        } else {
            lower_bound(layout.places(), layout.microbatches(), &times)
        };
        step.seconds().0
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
        let has_experts = question.model.num_moe_layers() > 0;
        case.shape.shape_buffer(kinds) + question.stack.workspace(has_experts)
    }
}

/// So many layers at the beginning of each stage compute all again, which comes last of all sets.
fn first_of_stages(question: &Question<'_>, layers: u32) -> Sets {
    let set = question.sets.len() - 1;
    Sets::First { layers, set }
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
        + stack.pipeline_communicators(layout.places())
        + stack.communicators_beside(layout, shape.dispatcher, question.embeds_twice());
    let ep = placement(layout, GroupKind::Ep, question.cluster);
    let staging = stack.staging(
        shape.dispatcher,
        question.model.hidden,
        ep.ranks,
        ep.ranks_per_domain,
    );
    stack.common().context + stack.common().communicator * communicators + staging
}
