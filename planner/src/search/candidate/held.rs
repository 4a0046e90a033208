//! Memory of pipeline ranks under a choice of recompute sets.

use std::iter::repeat_n;

use moefold_profiles::units::Bytes;
use moefold_profiles::{ByClass, Dtype, TensorClass};

use super::rank::several;
use super::{Case, StageSplit, message, own};
use crate::bucket::Division;
use crate::choice::{CpComm, in_flight};
use crate::layout::Layout;
use crate::memory::{self, Occupancy};
use crate::mesh::{GroupKind, placement};
use crate::runtime::{Height as _, Level, Running, StageMemory, Stretch, highest};
use crate::search::recompute::Sets;
use crate::search::shape::{Kind, Shape};
use crate::stack::graphs;

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
    pub(super) fn memory_of(
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
    pub(super) fn own_memory(
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
