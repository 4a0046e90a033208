//! The end of a step: what is reduced and gathered of weights and when, the update, and what passes wait for where weights
//! rest divided.

use moefold_profiles::units::Bytes;
use moefold_profiles::{Collective, Dtype, Op, Precision};

use super::rank::{RankEnd, RankWeights, Unit, several};
use super::{Case, StageSplit, own};
use crate::bucket::{self, Division};
use crate::choice::PrimaryWeights;
use crate::layout::Layout;
use crate::lower::ends::{self, StepGroups};
use crate::mesh::{self, GroupKind, Mesh, Placement, placement};
use crate::model::{Layer, Mixer};
use crate::price::{lengthened, slower};
use crate::runtime::StageMemory;
use crate::search::line::Line;
use crate::search::recompute::Sets;
use crate::search::shape::{Kind, Question};
use crate::search::sharded::{Part, Waits};
use crate::shard::{self, Shard};
use crate::tensors::{Dealt, Tensors};

impl StageSplit {
    /// What passes wait for under some recompute sets where gradients rest divided, or weights too.
    pub(crate) fn waits(&self, case: Case<'_>, rank: usize, sets: &Sets) -> Waits {
        let Case {
            question, layout, ..
        } = case;
        // Where weights rest whole, gradients of all buckets may wait to be reduced.
        let turns = match question.division(layout) {
            Division::Sharded(turns) => Some(turns),
            Division::Whole | Division::AtLeast(_) => None,
        };
        let (end, weights) = (&self.ends[rank], &self.weights[rank]);
        let keeps = question.stack.keeps_units();
        let held = weights.held(false);
        let held = [&held.dense, &held.experts];
        let shards = question.shards(layout);
        let mut parts = Vec::new();
        let mut prices = end.gather_s.iter().zip(&end.reduce_s);
        let mut before = end.gather_across_s.iter().copied();
        for family in (0..2).filter(|&family| shards[family] > 1 || question.outer() > 1) {
            let buffers = turns.map(|turns| {
                [turns.weights, turns.grads]
                    .map(|turns| weights.in_turns(family, held[family], turns).0)
            });
            for (bucket, &elements) in weights.buckets[family].iter().zip(held[family]) {
                let unit = bucket.start;
                let divides = shards[family] > 1;
                let (&gather_s, &reduce_s) = if divides {
                    prices.next().expect("one for each bucket")
                } else {
                    (&0.0, &0.0)
                };
                let sweeps = if keeps {
                    ends::added_up(elements, shards[family]).to_vec()
                } else if question.copies_units() {
                    let dtypes = [weight_dtype(question), question.options.grad_dtype];
                    ends::copied(elements, shards[family], dtypes).to_vec()
                } else {
                    Vec::new()
                };
                let price = |op: &Op| question.costs.op(op).time.0;
                parts.push(Part {
                    family,
                    unit,
                    buffers: match &buffers {
                        Some(buffers) => [0, 1].map(|kind| buffers[kind][unit]),
                        None => [unit; 2],
                    },
                    before_s: before.next().unwrap_or(0.0),
                    gather_s: turns.map(|_| gather_s),
                    reduce_s,
                    swept_s: sweeps.iter().map(price).sum(),
                    sweeps,
                });
            }
        }
        let overlap = question.stack.hides(question.overlap);
        let passes_s = self.passes_by_unit(case, rank, sets);
        let slowed = self.slowed(case, rank, sets);
        Waits::played(
            &parts,
            (&passes_s, slowed),
            overlap,
            keeps,
            layout.microbatches(),
        )
    }

    /// Seconds of the forward and the backward pass of each unit of a rank, in order of use, under some recompute sets.
    pub(super) fn passes_by_unit(&self, case: Case<'_>, rank: usize, sets: &Sets) -> Vec<[f64; 2]> {
        let stages = own(case.layout, rank);
        let kinds = stages.flat_map(|stage| self.each_under(case.shape, stage, sets));
        let kinds: Vec<(&Kind, usize, u32)> = kinds.collect();
        let of_kinds = kinds.iter().flat_map(|&(kind, set, count)| {
            std::iter::repeat_n([kind.forward_s, kind.backward_s[set]], count as usize)
        });
        let mut passes: Vec<[f64; 2]> = of_kinds.collect();
        // Depths that are units by themselves are in the head's time: each a layer like the last one, and a head.
        let depths = self.weights[rank].units.len().saturating_sub(passes.len());
        if depths > 0
            && let [.., (layer, ..), _] = kinds[..]
            && let [.., head] = passes[..]
        {
            let layer = [layer.forward_s, layer.backward_s[sets.of_ends()]];
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

    /// By how much reductions and gathers beside compute slow a rank's passes, forward and backward: the share of
    /// multiprocessors that they take, of what is bound by these. Where layers choose one by one what they compute again, as where they compute
    /// nothing again.
    pub(super) fn slowed(&self, case: Case<'_>, rank: usize, sets: &Sets) -> [f64; 2] {
        let taken = self.ends[rank].taken;
        if taken == 0.0 {
            return [0.0; 2];
        }
        let (mut bound_s, mut all_s) = ([0.0; 2], [0.0; 2]);
        let mut add = |kind: &Kind, set: usize, count: u32| {
            let passes = [
                (kind.breakdown.forward.bound_by_sms(), kind.forward_s),
                (kind.backward_bound_s[set], kind.backward_s[set]),
            ];
            for (pass, (bound, all)) in passes.into_iter().enumerate() {
                bound_s[pass] += bound * f64::from(count);
                all_s[pass] += all * f64::from(count);
            }
        };
        let alike = match sets {
            Sets::Every(set) => Some(*set),
            Sets::Each(_) => Some(0),
            Sets::First { .. } => None,
        };
        for stage in own(case.layout, rank) {
            if let Some(set) = alike {
                let kinds = self.each_kind(case.shape, stage);
                kinds.for_each(|(kind, count)| add(kind, set, count));
            } else {
                let each = self.each_under(case.shape, stage, sets).into_iter();
                each.for_each(|(kind, set, count)| add(kind, set, count));
            }
        }
        [0, 1].map(|pass| taken * bound_s[pass] / f64::max(all_s[pass], f64::MIN_POSITIVE))
    }

    /// Backward passes of a microbatch of a rank's units, in order of use, beside which its gradients are reduced, and by how much these slow them.
    pub(super) fn beside(&self, case: Case<'_>, rank: usize, sets: &Sets) -> (Vec<f64>, f64) {
        let [_, slows] = self.slowed(case, rank, sets);
        let passes_s = self.passes_by_unit(case, rank, sets).into_iter();
        (passes_s.map(|[_, backward_s]| backward_s).collect(), slows)
    }

    /// Seconds by which a rank ends later than its last [backward passes](Self::beside), beside which gradients are reduced that rest whole.
    pub(super) fn reduced_beside_s(
        &self,
        case: Case<'_>,
        rank: usize,
        passes: (&[f64], f64),
    ) -> f64 {
        let (end, layout) = (&self.ends[rank], case.layout);
        if case.question.bucket_elements(layout).is_some() {
            return self.reduced_after(rank, passes, (several(layout), &end.reduce_s));
        }
        let reduce_s: f64 = end.reduce_s.iter().chain(&end.across_s).sum();
        let (passes_s, slows) = passes;
        lengthened(passes_s.iter().sum(), reduce_s, slows)
    }

    /// The same where gradients rest divided. What is reduced in every microbatch is not again at the end, but over instances, unit after unit of the
    /// last backward pass (Megatron-FSDP, `outer_fsdp_group_grad_reduce`).
    pub(super) fn reduced_across_s(&self, case: Case<'_>, rank: usize, sets: &Sets) -> f64 {
        let question = case.question;
        let across_s = &self.ends[rank].across_s[..];
        if question.stack.hides(question.overlap).grad_reduce {
            let (passes_s, slows) = self.beside(case, rank, sets);
            self.reduced_after(rank, (&passes_s, slows), ([true; 2], across_s))
        } else {
            across_s.iter().sum()
        }
    }

    /// Where gradients rest whole and layers choose one by one what they compute again: as much as where they compute nothing again, and what that changes for each second
    /// that those of the rank's first stage do, whose backward pass is the last.
    ///
    /// It is a line to where this stage computes its whole forward pass again, spread over all passes: which layers do so, and when reductions catch up
    /// with passes, moves the end of the step by a part of one stage's recomputation in one microbatch.
    pub(super) fn reduced_by_layer_s(&self, case: Case<'_>, rank: usize) -> Line {
        let (mut passes_s, slows) = self.beside(case, rank, &Sets::Every(0));
        let at_none = self.reduced_beside_s(case, rank, (&passes_s, slows));
        let again_s = self.forward_s(case.shape, rank);
        let all_s: f64 = passes_s.iter().sum();
        if again_s.min(all_s) <= 0.0 {
            return Line {
                at_none,
                slope: 0.0,
            };
        }
        for pass_s in &mut passes_s {
            *pass_s *= 1.0 + again_s / all_s;
        }
        let at_all = self.reduced_beside_s(case, rank, (&passes_s, slows));
        Line {
            at_none,
            slope: (at_all - at_none) / again_s,
        }
    }

    /// Seconds by which a rank ends later than its last [backward passes](Self::beside) alone, until its gradients are reduced: bucket after
    /// bucket of some families, each in `reduce_s` once those of all of its units are whole. Passes beside them are slower.
    pub(super) fn reduced_after(
        &self,
        rank: usize,
        (passes_s, slows): (&[f64], f64),
        (families, reduce_s): ([bool; 2], &[f64]),
    ) -> f64 {
        let buckets = self.weights[rank].of_collectives(families);
        let mut whole: Vec<(Option<usize>, f64)> = buckets
            .iter()
            .zip(reduce_s)
            .map(|((units, late), &seconds)| ((!late).then_some(units.start), seconds))
            .collect();
        whole.sort_by_key(|(unit, _)| std::cmp::Reverse(*unit));
        let mut whole = whole.into_iter().peekable();
        let (mut now, mut free, mut alone) = (0.0_f64, 0.0_f64, 0.0);
        for (unit, &backward_s) in passes_s.iter().enumerate().rev() {
            // Reductions go on without a gap until the last of them ends.
            alone += backward_s;
            now += backward_s + slower(backward_s, free - now, slows);
            while let Some((_, seconds)) = whole.next_if(|(own, _)| *own == Some(unit)) {
                free = free.max(now) + seconds;
            }
        }
        for (_, seconds) in whole {
            free = free.max(now) + seconds;
        }
        free.max(now) - alone
    }

    /// Whether gradients that rest whole are reduced beside the last backward passes. With more to compute in these a rank ends no sooner: for each
    /// second that layers of its first stage compute again by themselves what shows of reductions gets shorter by no more than that.
    pub(crate) fn hides_reductions(case: Case<'_>) -> bool {
        let question = case.question;
        question.stack.hides(question.overlap).grad_reduce && !case.schedule.divides_backward()
    }

    /// Seconds by which a rank ends later at least than its last backward passes under some recompute sets, beside which its gradients
    /// are reduced, however its layers are split into stages.
    pub(crate) fn reduced_at_least_s(&self, case: Case<'_>, rank: usize, sets: &Sets) -> f64 {
        let reduce_s: f64 = self.ends[rank].reduce_s.iter().sum();
        let passes_s = self.passes_by_unit(case, rank, sets).into_iter();
        let backward_s: f64 = passes_s.map(|[_, backward_s]| backward_s).sum();
        (reduce_s - backward_s).max(0.0)
    }

    /// Seconds by which a rank's first forward pass is longer for its weights, which are gathered from the start of the
    /// step in order of use; it begins when the first message is there, and is so much slower beside gathers.
    pub(super) fn gathered_after(
        &self,
        layout: &Layout,
        rank: usize,
        arrives: f64,
        (passes_s, slows): (&[[f64; 2]], f64),
    ) -> f64 {
        let all_s: f64 = self.ends[rank].gather_s.iter().sum();
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
            let lost = slower(*forward_s, all_s - now - wait, slows);
            waited += wait + lost;
            now += wait + forward_s + lost;
        }
        waited
    }

    /// The weights of a pipeline rank, in buckets, and what its replicas update of them.
    pub(super) fn weights_of(&self, case: Case<'_>, rank: usize) -> RankWeights {
        RankWeights {
            dealt: self.dealt(case, rank),
            ..self.buckets_of(case, rank)
        }
    }

    /// What the replicas of a pipeline rank update where they divide whole tensors.
    fn dealt(&self, case: Case<'_>, rank: usize) -> Option<[Dealt; 2]> {
        let Case {
            question,
            layout,
            shape,
            ..
        } = case;
        if !question.options.optimizer.deals_tensors() {
            return None;
        }
        let is_shared = has_one_matrix(case, rank);
        let mut tensors = Tensors::default();
        for stage in own(layout, rank) {
            for (kind, count) in self.each_kind(shape, stage) {
                if !(is_shared && std::ptr::eq(kind, &raw const shape.embedding)) {
                    tensors.add(&kind.tensors, u64::from(count));
                }
            }
        }
        Some(tensors.dealt(question.shards(layout)))
    }

    fn buckets_of(&self, case: Case<'_>, rank: usize) -> RankWeights {
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
            shard: kind.memory.alike().shard,
            resting: resting(kind.memory.alike()),
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
                    head.shard = head.shard.without(matrix.shard);
                    head.resting = head.resting.without(matrix.resting);
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
        let Case { layout, shape, .. } = case;
        let mut shard = Shard::default();
        for stage in own(layout, rank) {
            for (kind, count) in self.each_kind(shape, stage) {
                shard += of(kind.memory.alike()) * u64::from(count);
            }
        }
        if has_one_matrix(case, rank) {
            shard = shard.without(of(shape.embedding.memory.alike()));
        }
        shard
    }

    /// The end of the step on every rank; ranks that hold alike end alike.
    pub(super) fn rank_ends(&self, case: Case<'_>) -> Vec<RankEnd> {
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
            outer: question.outer(),
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

/// Whether a pipeline rank has both ends of the model, and one matrix for both.
fn has_one_matrix(case: Case<'_>, rank: usize) -> bool {
    let places = case.layout.places();
    let has_ends = !places.parts_ends() && places.rank_of(0) as usize == rank;
    case.question.model.tied_embeddings && has_ends
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
    let held = weights.held(question.stack.updates_buckets());
    let mut work = ends::step(
        &held,
        groups,
        [
            question.options.grad_dtype,
            weight_dtype(question),
            question.options.optimizer.moments(),
        ],
        (question.options.masters, question.options.optimizer_offload),
        pair,
        shard::vocab(question.model, shape.local.tp) * question.model.hidden,
    );
    work.optimizer
        .extend(passes_over_gradients(question, &weights.total(), groups));
    let several = several(layout);
    if question.bucket_elements(layout).is_some() && question.overlap.param_gather {
        work.optimizer.extend(ends::cleared(&held, [1; 2]));
    } else if question.shards_weights() && question.stack.keeps_units() {
        // What rests whole is not gathered meanwhile.
        let shards = [groups.dp_cp, groups.edp].map(|group| u64::from(group.ranks));
        work.optimizer.extend(ends::cleared(&held, shards));
        if several[0] {
            // Gradients that TP ranks have in common are completed after every backward pass.
            work.exposed.clear();
        }
    }
    if question.stack.sums_up() {
        let (model, cluster) = (question.model, question.cluster);
        let world = Mesh::of(layout).everyone(cluster);
        work.sums = ends::sums(model, cluster.gpu.is_cpu(), world);
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
    let by_tensor = work.by_tensor.iter();
    let by_tensor_s: f64 = by_tensor
        .map(|(op, times)| question.costs.op(op).time.0 * *times as f64)
        .sum();
    let launched_s = question.stack.common().launch.0 * work.launches as f64;
    let at_once = work.optimizer.iter();
    let at_once_s: f64 = at_once.map(|op| question.costs.op(op).time.0).sum();
    let lists = [
        &work.reduce,
        &work.across,
        &work.gather,
        &work.gather_across,
    ];
    let [reduce_s, across_s, gather_s, gather_across_s] = lists.map(|list| seconds(list));
    let shown = [&work.exposed, &work.sums].map(|list| seconds(list).iter().sum::<f64>());
    // Gathers are of the same ranks as reductions.
    let reduced = (work.reduce.iter().zip(&reduce_s)).chain(work.across.iter().zip(&across_s));
    let (mut taken_s, mut all_s) = (0.0, 0.0);
    for (collective, seconds) in reduced {
        taken_s += seconds * question.costs.taken(collective);
        all_s += seconds;
    }
    RankEnd {
        streamed_s: (streamed_s - beside_s).max(0.0),
        taken: taken_s / f64::max(all_s, f64::MIN_POSITIVE),
        reduce_s,
        across_s,
        gather_s,
        gather_across_s,
        exposed_s: shown.iter().sum(),
        update_s: at_once_s + by_tensor_s + question.stack.host_excess(launched_s, by_tensor_s),
        waiting_s: 0.0,
        work,
    }
}

/// Passes over the gradients of a rank that holds `shard`, beside its optimizer.
fn passes_over_gradients(question: &Question<'_>, shard: &Shard, groups: &StepGroups) -> Vec<Op> {
    if question.copies_units() {
        let families = [(shard.dense(), groups.dp_cp), (shard.experts, groups.edp)];
        let own = families.map(|(held, group)| held.div_ceil(u64::from(group.ranks)));
        ends::clipped(own.iter().sum(), question.widens_gradients()).collect()
    } else if question.stack.sweeps_gradients() {
        ends::passes_over_gradients(shard, groups, question.options.grad_dtype)
    } else {
        Vec::new()
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
