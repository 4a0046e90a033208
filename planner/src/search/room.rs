//! [`Room`]: how many layers the ranks of a pipeline have room for, whatever the split into stages.
//!
//! Most layouts that would be fast do not fit, and cutting a model into their stages only shows that. But a rank that
//! holds `n` layers holds their state, what each of them saves of every microbatch that is alive or keeps for gradients of weights that
//! wait, and what the backward pass of one of them works in. So each rank has room for so many, and where these are fewer than the
//! model has, no split fits. Counted so: the heaviest kind of layer alone, the two heaviest, and so on, all as the lightest
//! among them. Where layers may compute again one by one, [`Savers`] says what they do at least. What units of buckets, messages in the middle of a pipeline and buffers of weights take is left out.

use std::ops::Range;

use moefold_profiles::ByClass;
use moefold_profiles::units::Bytes;

use super::by_set::OfSet;
use super::candidate::{Case, overhead, own};
use super::moments::Moment;
use super::recompute::Sets;
use super::savers::{AsLightest, KindOfLayer, Saver, Savers};
use super::shape::Kind;
use crate::layout::Layout;
use crate::memory::Occupancy;
use crate::runtime::Running;
use crate::shard::Shard;

/// A floor of the memory of a layout, ready for every choice of recompute sets.
pub(crate) struct Room<'a> {
    case: Case<'a>,
    /// By pipeline rank.
    moments: &'a [Vec<Moment>],
    /// What tensors may take of a device.
    free: f64,
    /// What a message between stages takes.
    message: f64,
    /// Kinds of layers that there are, the one of heaviest state first: their places, a layer's state, and how many there are.
    kinds: Vec<(usize, f64, u32)>,
    /// State of the embedding and of the head.
    ends: [f64; 2],
}

/// What layers take at least.
#[derive(Debug, Clone, Copy)]
struct Least {
    state: f64,
    saved: f64,
    /// The same of one of a stage whose first layers alone take the set that is asked about.
    saved_behind: f64,
    /// What is kept for gradients of weights, where the shape knows the memory of divided backward passes.
    kept: f64,
    /// What the backward pass of a stage with one of them works in.
    running: f64,
    layers: u32,
}

/// What is asked of each kind of layer: one of its recompute sets, or the least of some.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Of<'s> {
    /// A choice of recompute sets.
    Choice(&'s Sets),
    /// One of some recompute sets for all layers.
    Some(&'s [usize]),
    /// Any choice, each layer by itself.
    Any,
}

impl<'a> Room<'a> {
    /// That of a case where a rank may fill so much of its device; more of it is counted where a schedule divides backward passes
    /// and the shape knows their memory. Nothing where weights rest divided: their buffers are most of it.
    pub(crate) fn new(case: Case<'a>, moments: &'a [Vec<Moment>], capacity: Bytes) -> Option<Self> {
        let (question, layout, shape) = (case.question, case.layout, case.shape);
        if question.shards_weights() {
            return None;
        }
        let options = question.options;
        let bytes = question.state_bytes();
        // Some of what is divided may rest on the host.
        let sharded = if options.optimizer_offload.is_none() {
            bytes.sharded
        } else {
            0.0
        };
        let shards = question.state_shards(layout).map(|shards| shards as f64);
        let state = |shard: Shard| {
            let families = [shard.dense(), shard.experts].map(|count| count as f64);
            let each = families.iter().zip(shards);
            let wide = shard.wide as f64 * (bytes.unquantized - bytes.weight);
            let each = each.map(|(count, shards)| {
                let parts = if question.shards_gradients() {
                    shards
                } else {
                    1.0
                };
                count * (bytes.weight + bytes.gradient / parts + sharded / shards)
            });
            each.sum::<f64>() + wide
        };
        let mut layers = vec![0; shape.kinds.len()];
        for &kind in &question.kind_of {
            layers[kind] += 1;
        }
        let each = shape.kinds.iter().zip(layers).enumerate();
        let each = each.filter(|(_, (_, layers))| *layers > 0);
        let mut kinds: Vec<(usize, f64, u32)> = each
            .map(|(place, (kind, layers))| (place, state(kind.memory.alike().shard), layers))
            .collect();
        kinds.sort_by(|a, b| b.1.total_cmp(&a.1));
        let mut ends = [&shape.embedding, &shape.head].map(|end| state(end.memory.alike().shard));
        if question.model.tied_embeddings && !layout.places().parts_ends() {
            // One matrix.
            ends[0] = 0.0;
        }
        let setting = question.setting(layout, shape.wires(), &shape.local, &shape.groups);
        let step = question.runtime.step(&setting, layout.microbatches());
        let overhead = overhead(case);
        let all = capacity.0.saturating_sub(overhead.0) as f64;
        // Bytes are rounded, here and where they are counted.
        let free = all / (1.0 + question.stack.fragmentation()) * (1.0 + 1e-9) + 4096.0;
        Some(Self {
            case,
            moments,
            free,
            message: step.message.total() as f64,
            kinds,
            ends,
        })
    }

    /// Whether the layers may fit under some recompute sets; if not, no split of them does.
    pub(crate) fn may_hold(&self, of: Of<'_>) -> bool {
        self.of_heaviest(of, |heaviest| heaviest.without_place() == 0)
    }

    /// The most layers that each pipeline rank may hold under some recompute sets: of the heaviest kind, of the two heaviest,
    /// and so on.
    pub(crate) fn most(&self, of: Of<'_>) -> Most {
        let (kinds, kind_of) = (&self.kinds, &self.case.question.kind_of);
        let mut most = Most::default();
        let sets: Vec<usize> = match of {
            Of::Any => (0..self.case.question.sets.len()).collect(),
            Of::Choice(&Sets::First { set, .. }) => vec![set],
            Of::Choice(_) | Of::Some(_) => Vec::new(),
        };
        self.of_heaviest(of, |heaviest| {
            let among = &kinds[..=most.groups.len()];
            let is_one = |kind| among.iter().any(|(place, ..)| *place == kind);
            let mut before = vec![0];
            for &kind in kind_of {
                before.push(before[before.len() - 1] + u64::from(is_one(kind)));
            }
            let ranks = (0..self.moments.len()).map(|rank| heaviest.most_on(rank));
            let by_rank = ranks.collect();
            most.groups.push(MostOf { before, by_rank });
            if most.groups.len() == kinds.len() && !sets.is_empty() {
                most.savers = Some(heaviest.savers(&sets));
            }
            true
        });
        most
    }

    /// What layers may take of each rank under some recompute sets at each instant, of the heaviest kind, of the two heaviest, and so
    /// on; not where there is no room for any, which [`Self::most`] says.
    pub(crate) fn shares(&self, of: Of<'_>, occupancies: &[Vec<Occupancy>]) -> Vec<Vec<Shares>> {
        let mut all: Vec<Vec<Shares>> = vec![Vec::new(); occupancies.len()];
        let holder = self.case.layout.places();
        let holder = holder.rank_of(holder.stages() - 1) as usize;
        let mut among = vec![false; self.case.shape.kinds.len()];
        let mut kinds = self.kinds.iter();
        self.of_heaviest(of, |heaviest| {
            if let Some((place, ..)) = kinds.next() {
                among[*place] = true;
            }
            for (rank, (of_rank, all)) in occupancies.iter().zip(&mut all).enumerate() {
                for at in of_rank {
                    let moment = Moment::of(at, [rank == 0, rank == holder]);
                    let free = self.free - heaviest.beside(rank, &moment);
                    if free <= 0.0 {
                        continue;
                    }
                    let least = heaviest.least;
                    let each = at.live.iter().zip(&at.kept).map(|(&live, &kept)| {
                        [least.saved, least.saved_behind].map(|saved| {
                            let bytes = least.state
                                + saved * f64::from(live)
                                + least.kept * f64::from(kept);
                            bytes / free
                        })
                    });
                    let own = Shares {
                        among: among.clone(),
                        by_chunk: each.collect(),
                    };
                    if !all.iter().any(|known| known.covers(&own)) {
                        all.retain(|known| !own.covers(known));
                        all.push(own);
                    }
                }
            }
            true
        });
        all
    }

    /// What layers take of each rank at each instant where each may compute again what it may by itself, by classes of kinds that are
    /// alike but for their memory; and how they take less.
    pub(crate) fn by_layer(
        &self,
        classes: &[Vec<usize>],
        occupancies: &[Vec<Occupancy>],
    ) -> (Vec<Saver>, Vec<Vec<SavedShares>>) {
        let sets = 0..self.case.question.sets.len();
        let mut savers = Vec::new();
        let mut each_class = Vec::new();
        for (class, places) in classes.iter().enumerate() {
            let kinds = self
                .kinds
                .iter()
                .filter(|(place, ..)| places.contains(place));
            let kinds = kinds.map(|&(place, state, _)| (&self.case.shape.kinds[place], state));
            let least = |of: &dyn Fn(&Kind, f64) -> f64| {
                let each = kinds.clone().map(|(kind, state)| of(kind, state));
                each.fold(f64::INFINITY, f64::min)
            };
            each_class.push(OfClass {
                state: least(&|_, state| state),
                saved: least(&|kind, _| saved(&kind.memory[0])),
                kept: least(&|kind, _| least_of(kind, &kept)),
            });
            let ways = kinds.flat_map(|(kind, _)| sets.clone().map(|set| way(kind, set)));
            savers.extend(Saver::all(class, ways.collect()));
        }
        let mut all = Vec::new();
        self.of_heaviest(Of::Any, |heaviest| {
            if heaviest.least.layers as usize == self.case.question.kind_of.len() {
                let each = occupancies.iter().enumerate();
                let of_rank = each.map(|(rank, of_rank)| {
                    let instants = heaviest.instants(rank, of_rank).into_iter();
                    let shares = instants.map(|of| SavedShares::of(&of, &each_class, &savers));
                    shares.collect()
                });
                all = of_rank.collect();
            }
            true
        });
        (savers, all)
    }

    /// Whether something is so of the heaviest kind, of the two heaviest, and so on to all.
    fn of_heaviest(&self, of: Of<'_>, mut is_so: impl FnMut(&Heaviest<'_, '_>) -> bool) -> bool {
        let least = |kind: &Kind, own: &dyn Fn(&OfSet) -> f64| match of {
            Of::Choice(Sets::Every(set)) => own(&kind.memory[*set]),
            Of::Some(sets) => {
                let each = sets.iter().map(|&set| own(&kind.memory[set]));
                each.fold(f64::INFINITY, f64::min)
            }
            Of::Choice(Sets::Each(_) | Sets::First { .. }) | Of::Any => least_of(kind, own),
        };
        let saved_behind = |kind: &Kind| match of {
            Of::Choice(Sets::First { .. }) => saved(&kind.memory[0]),
            _ => least(kind, &saved),
        };
        // A whole backward pass alone.
        let whole = !self.case.schedule.divides_backward() && !self.case.schedule.combines();
        let in_order = whole && self.case.question.offload().is_none();
        let passes = |memory: &OfSet| {
            let bytes = memory.passes().running(Running::Backward).total();
            if in_order { bytes.max(0) as f64 } else { 0.0 }
        };
        let works = |memory: &OfSet| {
            let bytes = memory.sets.backward.0;
            if whole { bytes as f64 } else { 0.0 }
        };
        // Any kind may be the last of a stage.
        let shape = self.case.shape;
        let (embedding, head) = (&shape.embedding, &shape.head);
        let kinds = || self.kinds.iter().map(|(place, ..)| &shape.kinds[*place]);
        let last = kinds().map(|kind| least(kind, &passes));
        let last = last.fold(f64::INFINITY, f64::min);
        let lightest = kinds().map(|kind| least(kind, &works));
        let lightest = lightest.fold(f64::INFINITY, f64::min);
        let ends = Ends {
            saved: [least(embedding, &saved), least(head, &saved)],
            running: least(head, &passes),
        };
        let mut sum: Option<Least> = None;
        let first = match of {
            Of::Choice(Sets::First { layers, .. }) => *layers,
            _ => u32::MAX,
        };
        for (kind, (_, state, layers)) in kinds().zip(&self.kinds) {
            let own = Least {
                state: *state,
                saved: least(kind, &saved),
                saved_behind: saved_behind(kind),
                kept: least(kind, &kept),
                running: least(kind, &works),
                layers: *layers,
            };
            let all = sum.map_or(own, |sum| Least {
                state: sum.state.min(own.state),
                saved: sum.saved.min(own.saved),
                saved_behind: sum.saved_behind.min(own.saved_behind),
                kept: sum.kept.min(own.kept),
                running: sum.running.min(own.running),
                layers: sum.layers + own.layers,
            });
            sum = Some(all);
            let heaviest = Heaviest {
                room: self,
                least: all,
                first,
                ends: &ends,
                last,
                lightest,
            };
            if !is_so(&heaviest) {
                return false;
            }
        }
        true
    }
}

/// What a layer saves of a microbatch.
fn saved(memory: &OfSet) -> f64 {
    memory.passes().saved.total() as f64
}

/// What it keeps for gradients of weights.
fn kept(memory: &OfSet) -> f64 {
    memory.passes().kept.total() as f64
}

/// Seconds of a microbatch that a layer takes more under a recompute set, and bytes that it saves less.
fn way(kind: &Kind, set: usize) -> [f64; 2] {
    let [plain, own] = [0, set].map(|set| saved(&kind.memory[set]));
    [kind.again_s(set), plain - own]
}

/// The least of something under all recompute sets.
fn least_of(kind: &Kind, own: &dyn Fn(&OfSet) -> f64) -> f64 {
    let each = kind.memory.distinct().iter().map(own);
    each.fold(f64::INFINITY, f64::min)
}

/// What a layer of a class takes at least.
struct OfClass {
    state: f64,
    /// Where nothing is computed again.
    saved: f64,
    kept: f64,
}

/// What layers take of what a rank has for them at an instant: together no more than all of it.
#[derive(Debug, Clone)]
pub(crate) struct SavedShares {
    /// By chunk, what a layer of each class takes, and what each [`Saver`] takes off.
    pub(crate) by_chunk: Vec<[Vec<f64>; 2]>,
}

/// What is asked of the heaviest kinds of layers of a room.
struct Heaviest<'r, 'a> {
    room: &'r Room<'a>,
    least: Least,
    /// So many of a stage may be its first.
    first: u32,
    ends: &'r Ends,
    /// What the backward pass of the last layer of a stage works in at least, and that of any.
    last: f64,
    lightest: f64,
}

impl SavedShares {
    /// At an instant of which is given what one byte is, one that is saved in each chunk, and one that is kept.
    fn of(instant: &[f64], classes: &[OfClass], savers: &[Saver]) -> Self {
        let (live, kept) = instant[1..].split_at(instant.len() / 2);
        let by_chunk = live.iter().zip(kept).map(|(live, kept)| {
            let of_class =
                |class: &OfClass| instant[0] * class.state + live * class.saved + kept * class.kept;
            let layers = classes.iter().map(of_class);
            let savers = savers.iter().map(|saver| live * saver.bytes);
            [layers.collect(), savers.collect()]
        });
        Self {
            by_chunk: by_chunk.collect(),
        }
    }
}

impl Heaviest<'_, '_> {
    /// Instants of a rank at which layers may have the least: each says what share of all that they may take is one byte, one that is saved
    /// of a microbatch in each chunk, and one that is kept of it.
    fn instants(&self, rank: usize, occupancies: &[Occupancy]) -> Vec<Vec<f64>> {
        let places = self.room.case.layout.places();
        let holder = places.rank_of(places.stages() - 1) as usize;
        let mut most: Vec<Vec<f64>> = Vec::new();
        for at in occupancies {
            let moment = Moment::of(at, [rank == 0, rank == holder]);
            let free = self.room.free - self.beside(rank, &moment);
            let counts = [1]
                .into_iter()
                .chain(at.live.iter().chain(&at.kept).copied());
            let own: Vec<f64> = counts.map(|count| f64::from(count) / free).collect();
            let covers = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(own, other)| own >= other);
            if free > 0.0 && !most.iter().any(|known| covers(known, &own)) {
                most.retain(|known| !covers(&own, known));
                most.push(own);
            }
        }
        most
    }

    /// How many of them all ranks together have no room for.
    fn without_place(&self) -> u64 {
        let mut left = u64::from(self.least.layers);
        for rank in 0..self.room.moments.len() {
            if left == 0 {
                break;
            }
            left = left.saturating_sub(self.most_on(rank));
        }
        left
    }

    /// The most of them that a pipeline rank has room for.
    fn most_on(&self, rank: usize) -> u64 {
        let Self { room, least, .. } = *self;
        let first = f64::from(self.first) * f64::from(room.case.layout.vpp());
        let most = room.moments[rank].iter().map(|at| {
            let each = |saved: f64| least.state + saved * at.live + least.kept * at.kept;
            let free = room.free - self.beside(rank, at);
            let places = free / each(least.saved);
            let places = if places > first {
                let behind = (free - first * each(least.saved)) / each(least.saved_behind);
                first + behind
            } else {
                places
            };
            places.max(0.0) as u64
        });
        most.min().unwrap_or(u64::MAX)
    }

    /// What a pipeline rank holds at an instant beside the state of its layers and what they have saved.
    fn beside(&self, rank: usize, at: &Moment) -> f64 {
        let Self {
            room,
            least,
            ends,
            last,
            lightest,
            ..
        } = *self;
        let layout = room.case.layout;
        let several = layout.vpp() > 1;
        // Given stages may be empty.
        let given = room.case.question.options.stages.is_some();
        // The first may be, where there are more of them than layers; the last may be anyway.
        let bare = layout.stages() as usize > room.case.question.kind_of.len();
        let holder = layout.places().rank_of(layout.stages() - 1) as usize;
        let stages = f64::from(layout.stages() > 1);
        let (is_first, is_last) = (rank == 0, rank == holder);
        let state = f64::from(is_first) * room.ends[0] + f64::from(is_last) * room.ends[1];
        let mut taken = state + room.message * at.messages;
        if is_first {
            // What the first stage sends is not kept.
            taken += at.ends[0] * (ends.saved[0] - room.message * stages);
        }
        if is_last {
            taken += at.ends[1] * (ends.saved[1] + room.message * stages);
        }
        if at.goes_back && !(several && given) {
            // What runs may be an end of the model alone.
            let (first_bare, last_bare) = (several && is_first && bare, several && is_last);
            if !first_bare && !last_bare {
                taken += if several { lightest } else { least.running };
            }
            taken += match (is_last, first_bare) {
                (true, _) => last.min(ends.running),
                (false, true) => 0.0,
                (false, false) => last,
            };
        }
        taken
    }

    /// What layers compute again at least for want of room, where each may take any of some recompute sets.
    fn savers(&self, sets: &[usize]) -> Savers {
        let room = self.room;
        let free = |rank: usize| {
            let each = room.moments[rank].iter();
            each.map(|at| [room.free - self.beside(rank, at), at.live])
                .collect()
        };
        let mut kinds = vec![KindOfLayer::default(); room.case.shape.kinds.len()];
        for &(place, state, _) in &room.kinds {
            let kind = &room.case.shape.kinds[place];
            let ways = sets.iter().map(|&set| way(kind, set));
            kinds[place] = KindOfLayer {
                state,
                saved: saved(&kind.memory[0]),
                ways: ways.collect(),
            };
        }
        let free = (0..room.moments.len()).map(free).collect();
        Savers::new(free, kinds, &room.case.question.kind_of)
    }
}

/// The most layers that each pipeline rank may hold, of each of several groups of kinds; any where there is none. And what it
/// computes again at least, where layers may do so one by one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Most {
    groups: Vec<MostOf>,
    savers: Option<Savers>,
}

/// What each layer of some kinds takes of what a rank has for layers at an instant: together no more than all of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shares {
    /// By kind of layer, whether it is one of these.
    pub(crate) among: Vec<bool>,
    /// By chunk of the rank: one of those that may be the first of a stage, and one behind these.
    pub(crate) by_chunk: Vec<[f64; 2]>,
}

impl Shares {
    /// Whether no layer takes more by another.
    fn covers(&self, other: &Self) -> bool {
        let mut both = self.by_chunk.iter().zip(&other.by_chunk);
        self.among == other.among
            && both.all(|(own, other)| own[0] >= other[0] && own[1] >= other[1])
    }
}

/// The most layers of some kinds.
#[derive(Debug, Clone)]
struct MostOf {
    /// How many are before each layer of the model, and in all.
    before: Vec<u64>,
    /// That a pipeline rank may hold.
    by_rank: Vec<u64>,
}

impl Most {
    /// Whether a rank may hold some layers, which follow one another.
    pub(crate) fn may_hold(&self, rank: usize, layers: &Range<usize>) -> bool {
        let mut groups = self.groups.iter();
        groups.all(|of| of.before[layers.end] - of.before[layers.start] <= of.by_rank[rank])
    }

    /// Seconds of a microbatch that a rank computes again at least where it has some layers, which follow one another; none where
    /// it may not hold them.
    pub(crate) fn again_s(&self, rank: usize, layers: &Range<usize>) -> Option<f64> {
        if !self.may_hold(rank, layers) {
            return None;
        }
        let savers = self.savers.as_ref();
        savers.map_or(Some(0.0), |savers| savers.again_s(rank, layers))
    }

    /// The same of layers of some kinds, wherever they are, where layers may compute again one by one.
    pub(crate) fn as_lightest(&self, is_one: &dyn Fn(usize) -> bool) -> Option<AsLightest<'_>> {
        let savers = self.savers.as_ref();
        savers.map(|savers| savers.as_lightest(is_one))
    }

    /// Layers of all kinds that a rank may hold.
    pub(crate) fn of_rank(&self, rank: usize) -> u64 {
        self.groups
            .last()
            .map_or(u64::MAX, |of_all| of_all.by_rank[rank])
    }

    /// Ranks that some stages take too much memory of may hold fewer layers of all kinds than they do. None where one has none.
    pub(crate) fn lower_full(
        &mut self,
        layout: &Layout,
        stages: &[Vec<u32>],
        taken: &[ByClass<Bytes>],
        capacity: Bytes,
    ) -> Option<()> {
        for (rank, taken) in taken.iter().enumerate() {
            let taken = taken.total();
            if taken <= capacity {
                continue;
            }
            let held = own(layout, rank).map(|stage| stages[stage].len() as u64);
            let held: u64 = held.sum();
            // Several stages may be too much by several layers: about as many as have that for their share.
            let above = if layout.vpp() > 1 {
                (taken - capacity).0 / (taken.0 / held.max(1)).max(1)
            } else {
                1
            };
            let left = held.checked_sub(above.max(1))?;
            if let Some(of_all) = self.groups.last_mut() {
                of_all.by_rank[rank] = of_all.by_rank[rank].min(left);
            }
        }
        Some(())
    }
}

/// What the ends of the model take at least.
struct Ends {
    saved: [f64; 2],
    /// What the backward pass of the head works in, in stacks that say in what order.
    running: f64,
}

#[cfg(test)]
mod tests {
    use moefold_profiles::pricing::Costs;

    use super::*;
    use crate::choice::StackName;
    use crate::layout::Batch;
    use crate::model::presets;
    use crate::options::SearchOptions;
    use crate::rules::{Rules, Variants};
    use crate::schedule::Schedule;
    use crate::search::Asked;
    use crate::search::candidate::StageSplit;
    use crate::search::judged::candidates;
    use crate::search::moments::moments;
    use crate::search::questions::question;
    use crate::search::shape::Shape;
    use crate::search::tests::cuts;
    use crate::search::unit::peak;
    use crate::search::watch::unwatched;
    use crate::stack::megatron::Declared;

    /// Of all splits of a layout the one of least memory has room, and with a fifth less of it few would.
    #[test]
    fn law_what_fits_has_room() {
        check(StackName::Megatron, 13);
        // Gradients of weights wait here, too.
        check(StackName::Moefold, 5);
    }

    fn check(stack: StackName, every: usize) {
        let mut model = presets::load("deepseek-v3").expect("a preset");
        model.layers.drain(7..);
        model.layers.drain(..2);
        let cluster = &moefold_profiles::presets::cluster("dgx-h200").expect("a preset");
        let batch = Batch {
            seq_len: 4096,
            global_batch: 32,
        };
        let options = &SearchOptions::new(batch, stack);
        let costs = &Costs::for_cluster(cluster, &[]);
        let rules = &Rules::of(&model, options);
        let asked = Asked::new(&model, cluster, 32, options, costs, &Declared);
        let question = question(&asked, rules);
        let question = &question.expect("legal");
        let layouts = candidates(
            std::slice::from_ref(question),
            (32, Variants::Few),
            rules,
            &unwatched,
        )
        .expect("unwatched")
        .layouts;
        let (mut seen, mut refused) = (0, 0);
        for layout in layouts.iter().step_by(every) {
            let shapes = Shape::under(question, layout, &question.sets);
            for schedule in question.schedules(layout.pp(), layout.vpp()) {
                let actions = Schedule::of(layout, schedule);
                let occupancies = &crate::memory::occupancies(&actions);
                let moments = &moments(occupancies, layout.places());
                let shape = &*shapes[0].held_under(question, layout, schedule);
                let case = Case {
                    question,
                    layout,
                    shape,
                    schedule,
                };
                let stages = layout.stages();
                let ends = [u32::from(stages <= 5), u32::from(stages == 1)];
                let cuts = cuts(5, stages, ends).into_iter();
                let splits: Vec<StageSplit> = cuts.map(|cut| StageSplit::new(case, cut)).collect();
                for sets in question.choices.iter().step_by(5) {
                    let least = splits
                        .iter()
                        .map(|split| peak(&split.memory(case, sets, occupancies)))
                        .min()
                        .expect("a cut");
                    let holds = |capacity| {
                        let room = Room::new(case, moments, capacity).expect("whole weights");
                        assert!(room.may_hold(Of::Any) || !room.may_hold(Of::Choice(sets)));
                        room.may_hold(Of::Choice(sets))
                    };
                    assert!(holds(least), "{layout:?} {sets:?} {least:?}");
                    seen += 1;
                    refused += u32::from(!holds(least.scale(0.8)));
                }
            }
        }
        assert!(
            seen > 500 && refused * 10 > seen * 9,
            "{stack:?}: {refused} of {seen}"
        );
    }
}
