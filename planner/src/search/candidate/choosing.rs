//! The choices of layers that compute again one by one, and what none of them takes less than.

use std::rc::Rc;

use moefold_profiles::TensorClass;
use moefold_profiles::units::{GIB, Seconds, Span};

use super::{Case, StageSplit, own};
use crate::memory::Occupancy;
use crate::search::by_layer::{self, Choice, Chunk, Counts, LayersWay, Looked};
use crate::search::by_set::OfSet;
use crate::search::mix::{self, Alike, Way};
use crate::search::recompute::Sets;
use crate::search::schedules::Simulated;
use crate::search::shape::{Kind, Question, Shape};
use crate::simulate::{StageTimes, lower_bound};
use crate::stack::ByLayer;

/// What the layers of a rank may choose of.
pub(super) struct OfRank<'l> {
    pub(super) stages: Vec<usize>,
    /// By stage of its own.
    chunks: Vec<Rc<Chunk<'l>>>,
    occupancies: &'l [Occupancy],
    /// Bytes that its stages may take at each instant.
    rooms: Vec<i64>,
}

impl OfRank<'_> {
    /// See [`by_layer::fastest`].
    pub(super) fn fastest(&self, counts: &[Counts], looked: Looked<'_>) -> (Option<Choice>, f64) {
        let (chunks, under) = self.asked();
        by_layer::fastest(&chunks, under, counts, looked)
    }

    /// See [`by_layer::quicker`].
    pub(super) fn quicker(
        &self,
        counts: &[Counts],
        below_s: f64,
        looked: Looked<'_>,
    ) -> Result<Option<Choice>, f64> {
        let (chunks, under) = self.asked();
        by_layer::quicker(&chunks, under, (counts, below_s), looked)
    }

    /// The sets of the layers of each stage that take the least time of those that fit and are looked at first, if any do, and whether no others
    /// take less: all are looked at where there is one stage. See [`by_layer`].
    fn fast(&self) -> (Option<Vec<Vec<usize>>>, bool) {
        if self.stages.len() > 1 {
            let (chunks, under) = self.asked();
            let fast = by_layer::fast(&chunks, under, &self.alike());
            return (fast.map(|fast| fast.1), false);
        }
        let (fastest, least_s) = self.fastest(&self.alike(), Looked::Few);
        let own_s = fastest.as_ref().map_or(f64::INFINITY, |own| own.0);
        let is_known = own_s <= least_s;
        (fastest.map(|own| own.1), is_known)
    }

    /// Every second of every stage counts.
    pub(super) fn alike(&self) -> Vec<Counts> {
        vec![Counts::all(1.0); self.stages.len()]
    }

    fn asked(&self) -> (Vec<&Chunk<'_>>, (&[Occupancy], &[i64])) {
        let chunks = self.chunks.iter().map(Rc::as_ref);
        (chunks.collect(), (self.occupancies, &self.rooms))
    }
}

impl StageSplit {
    /// The recompute sets of layers that take the least time of those that fit, if any do, as the stack lets layers differ.
    pub(crate) fn by_layer(&self, case: Case<'_>, occupancies: &[Vec<Occupancy>]) -> Option<Sets> {
        match case.question.by_layer? {
            ByLayer::Block => self.fewest_again(case, occupancies),
            ByLayer::Each => {
                let mut sets = vec![0; case.question.kind_of.len()];
                for own in self.ranks(case, occupancies) {
                    let (fast, _) = own.fast();
                    self.take(&mut sets, &own.stages, fast?);
                }
                Some(Sets::each(sets))
            }
        }
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
        self.chunk_of(shape, stage, self.ways(shape, stage))
    }

    /// The ways to run each layer of a stage, the fastest first.
    pub(super) fn ways<'l>(&self, shape: &'l Shape, stage: usize) -> Vec<&'l [LayersWay]> {
        let layers = self.layers(stage);
        layers
            .map(|(_, kind)| shape.kinds[kind].ways.as_slice())
            .collect()
    }

    /// The ways to run a stage of which each layer takes one of some.
    fn chunk_of<'l>(&self, shape: &Shape, stage: usize, ways: Vec<&'l [LayersWay]>) -> Chunk<'l> {
        let (received, sent) = (stage > 0, stage + 1 < self.stages.len());
        let first = (!received).then(|| shape.embedding.memory[0].passes());
        let last = (!sent).then(|| shape.head.memory[0].passes());
        let message = (self.message.total(), received, sent);
        Chunk::new(first.as_ref(), ways, last.as_ref(), message)
    }

    /// What the layers of a rank of one stage may choose of, each of some ways.
    pub(super) fn among<'l>(
        &self,
        case: Case<'_>,
        (rank, occupancies): (usize, &'l [Occupancy]),
        ways: &[&'l [LayersWay]],
    ) -> OfRank<'l> {
        let chunk = |stage| Rc::new(self.chunk_of(case.shape, stage, ways.to_vec()));
        self.of_rank(case, (rank, occupancies), chunk)
    }

    /// Seconds of a microbatch that the layers of a rank compute again at least where each chooses by itself, of choices that fit; infinite
    /// where none does.
    pub(crate) fn again_at_least_s(
        &self,
        case: Case<'_>,
        rank: usize,
        occupancies: &[Occupancy],
    ) -> f64 {
        let chunk = |stage| Rc::new(self.chunk(case.shape, stage));
        let own = self.of_rank(case, (rank, occupancies), chunk);
        let (_, all_s) = own.fastest(&own.alike(), Looked::Few);
        let layers = own.stages.iter().flat_map(|&stage| self.layers(stage));
        let once_s: f64 = layers
            .map(|(_, kind)| case.shape.kinds[kind].backward_s[0])
            .sum();
        // Sums are rounded.
        (all_s * (1.0 - 1e-12) - once_s).max(0.0)
    }

    /// What the layers of each rank may choose of; chunks that are alike are made once.
    pub(super) fn ranks<'l>(
        &self,
        case: Case<'l>,
        occupancies: &'l [Vec<Occupancy>],
    ) -> Vec<OfRank<'l>> {
        let mut known: Vec<(usize, Rc<Chunk<'l>>)> = Vec::new();
        let mut chunk = |stage: usize| -> Rc<Chunk<'l>> {
            let ends = |stage: usize| [stage > 0, stage + 1 < self.stages.len()];
            let alike = |(known, _): &&(usize, Rc<Chunk<'_>>)| {
                self.runs[*known] == self.runs[stage] && ends(*known) == ends(stage)
            };
            if let Some((_, chunk)) = known.iter().find(alike) {
                return Rc::clone(chunk);
            }
            let chunk = Rc::new(self.chunk(case.shape, stage));
            known.push((stage, Rc::clone(&chunk)));
            chunk
        };
        let each = occupancies.iter().enumerate();
        let each = each
            .map(|(rank, occupancies)| self.of_rank(case, (rank, &occupancies[..]), &mut chunk));
        each.collect()
    }

    /// What the layers of a rank may choose of, of the chunks of its stages.
    fn of_rank<'l>(
        &self,
        case: Case<'_>,
        (rank, occupancies): (usize, &'l [Occupancy]),
        chunk: impl FnMut(usize) -> Rc<Chunk<'l>>,
    ) -> OfRank<'l> {
        let stages: Vec<usize> = own(case.layout, rank).collect();
        OfRank {
            chunks: stages.iter().copied().map(chunk).collect(),
            stages,
            occupancies,
            rooms: self.rooms(case, rank, occupancies),
        }
    }

    /// Layers of some stages take what was chosen for them.
    pub(super) fn take(&self, sets: &mut [usize], stages: &[usize], chosen: Vec<Vec<usize>>) {
        for (&stage, chosen) in stages.iter().zip(chosen) {
            for (&layer, set) in self.stages[stage].iter().zip(chosen) {
                sets[layer as usize] = set;
            }
        }
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
        let times = self.times_with(case, [plain, &slowest(case)], &more_s);
        (!fits).then(|| lower_bound(layout.places(), layout.microbatches(), &times))
    }

    /// Durations at least where backward passes of each rank take so many seconds of a microbatch more than under the first of some recompute sets:
    /// its last stage has them. No layer takes less than under those, nor more than under the second. Of passes that hide nothing of each other.
    pub(super) fn times_with(
        &self,
        case: Case<'_>,
        ends: [&Sets; 2],
        more_s: &[f64],
    ) -> StageTimes {
        let layout = case.layout;
        let mut times = self.times(case, ends[0]);
        assert!(times.hidden.is_none(), "layers do not choose there");
        for (rank, more_s) in more_s.iter().enumerate() {
            let own = own(layout, rank);
            let last = own.clone().last().expect("a rank has a stage");
            // Stages are rounded one by one.
            let others = u64::from(layout.vpp()) - 1;
            let more = Span(((more_s.min(1e9) * 1e9) as u64).saturating_sub(others));
            let waits = if case.question.shards_gradients() {
                // Three passes are rounded to nanoseconds on either side.
                let hidden = self.may_hide_s(case, rank, ends);
                let [usual, last, across] =
                    hidden.map(|seconds| Seconds(seconds).to_span() + Span(3));
                let reduce = &mut times.reduce[rank];
                *reduce -= across.min(*reduce);
                [usual, last]
            } else {
                [Span::ZERO; 2]
            };
            let hidden = if case.question.shards_gradients() {
                Span::ZERO
            } else if Self::hides_reductions(case) {
                let reduce = &mut times.reduce[rank];
                *reduce = if layout.vpp() == 1 {
                    let by_layer = self.reduced_by_layer_s(case, rank);
                    Seconds(by_layer.at(more.seconds().0).max(0.0)).to_span()
                } else {
                    // All of it may be of other stages, or hide as much.
                    *reduce - more.min(*reduce)
                };
                Span::ZERO
            } else {
                own.map(|stage| times.reduce[stage]).sum()
            };
            times.backward[last] += more - waits[0].min(more);
            times.last_backward[last] += more - (waits[1] + hidden).min(more);
        }
        times
    }

    /// Where gradients rest divided and layers take no less than under the first of some recompute sets and no more than under the second, what may
    /// be hidden of what passes wait for under the first, see [`may_hide_s`](crate::search::sharded::Waits::may_hide_s), and of what is reduced over
    /// instances.
    fn may_hide_s(&self, case: Case<'_>, rank: usize, ends: [&Sets; 2]) -> [f64; 3] {
        let [fastest, slowest] = ends.map(|sets| {
            let waits = self.waits(case, rank, sets);
            let across_s = self.reduced_across_s(case, rank, sets);
            (waits, across_s)
        });
        let slowed = self.slowed(case, rank, ends[0]);
        let [usual, last] = fastest.0.may_hide_s(&slowest.0, slowed);
        [usual, last, (fastest.1 - slowest.1).max(0.0)]
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
    /// each layer runs this layout and split in less; infinite where it is known that none fits.
    pub(crate) fn mixed_bound_s(
        &self,
        case: Case<'_>,
        occupancies: &[Vec<Occupancy>],
        simulated: &Simulated,
    ) -> f64 {
        let (layout, shape) = (case.layout, case.shape);
        let plain = &case.question.choices[0];
        let ranks = self.ranks(case, occupancies);
        let more_s = |(rank, occupancies): (usize, &Vec<Occupancy>)| {
            let (fast, is_known) = ranks[rank].fast();
            if is_known {
                let Some(fast) = fast else {
                    return f64::INFINITY;
                };
                let layers = own(layout, rank).flat_map(|stage| self.layers(stage));
                let each = layers.zip(fast.iter().flatten());
                let again = each.map(|((_, kind), &set)| shape.kinds[kind].again_s(set));
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
        if more_s.contains(&f64::INFINITY) {
            return f64::INFINITY;
        }
        let times = self.times_with(case, [plain, &slowest(case)], &more_s);
        let step = if layout.vpp() == 1 {
            simulated.simulator().run(&times).total
        } else {
            lower_bound(layout.places(), layout.microbatches(), &times)
        };
        step.seconds().0
    }
}

/// The sets under which each layer takes its slowest way.
fn slowest(case: Case<'_>) -> Sets {
    let of_kind = |kind: &Kind| kind.ways.last().map_or(0, LayersWay::set);
    let sets: Vec<usize> = case.shape.kinds.iter().map(of_kind).collect();
    let layers = case.question.kind_of.iter();
    Sets::Each(layers.map(|&kind| sets[kind]).collect())
}

/// So many layers at the beginning of each stage compute all again, which comes last of all sets.
fn first_of_stages(question: &Question<'_>, layers: u32) -> Sets {
    let set = question.sets.len() - 1;
    Sets::First { layers, set }
}
