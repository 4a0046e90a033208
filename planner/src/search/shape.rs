//! [`Shape`]: everything about a layer that does not depend on the pipeline, worked out once for all
//! layouts that agree on the other degrees.
//!
//! A model of a hundred layers has two or three kinds of them; kinds are priced, layers are counted. Where
//! every layer is routed in its own way, each is a kind.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::OnceLock;

use moefold_profiles::pricing::Costs;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Cluster, Dtype};
use rayon::prelude::*;

use super::by_layer::{self, LayersWay};
use super::by_set::BySet;
use super::cuts::Cuts;
use super::recompute::{Sets, of_plan};
use crate::bucket::Division;
use crate::choice::{
    Capacity, CpComm, Dispatcher, Offload, Overlap, Recompute, RecomputePlan, ScheduleName, Zero,
};
use crate::layout::{Degrees, Illegal, Layout};
use crate::local::Local;
use crate::memory::{Shards, StateBytes};
use crate::model::{Layer, Model};
use crate::options::{Loads, Routing, SearchOptions};
use crate::price::LayerBreakdown;
use crate::rules::{KeyWays, heads, undivided};
use crate::runtime::{self, LayerGroups, Lowered, Piece, Runtime, Setting, Slot, Stretches, gcd};
use crate::shard::Shard;
use crate::stack::{ByLayer, Stack, usual_bucket};
use crate::tensors::Tensors;

/// The inputs of a search that stay the same throughout.
pub(crate) struct Question<'a> {
    pub(crate) model: &'a Model,
    pub(crate) cluster: &'a Cluster,
    pub(crate) options: &'a SearchOptions,
    /// Layers of each stage of the splits that are tried, where the search is not to choose them.
    pub(crate) splits: &'a [Vec<Vec<u32>>],
    pub(crate) costs: &'a Costs,
    pub(crate) stack: Stack,
    /// What runs the plan.
    pub(crate) runtime: &'a dyn Runtime,
    /// What runs beside compute.
    pub(crate) overlap: Overlap,
    /// Recompute sets of layers.
    pub(crate) sets: Vec<Recompute>,
    /// Which of them each layer takes: what is tried for all layouts, the one without any first.
    pub(crate) choices: Vec<Sets>,
    /// How layers may take different ones of them, where they may.
    pub(crate) by_layer: Option<ByLayer>,
    /// The rule each of the others breaks.
    pub(crate) illegal_sets: Vec<Illegal>,
    /// Dispatchers tried.
    pub(crate) dispatchers: Vec<Dispatcher>,
    /// Ways to the keys of other context-parallel ranks.
    pub(crate) keys: KeyWays,
    /// How tokens reach the experts.
    pub(crate) routing: Assumption<'a>,
    /// Those before it, of a list of such questions, whose graphs have all that its graphs have, and of which no more
    /// leaves for the host: no layout takes less time under it than under one of them.
    pub(crate) above: Vec<usize>,
    /// Whether the dispatcher has to be one that bounds rows, which there is only where tokens are exchanged.
    pub(crate) needs_exchange: bool,
    /// What a plan may fill of each device's memory, where that is less than `options` allow.
    pub(crate) limit: Option<Bytes>,
    /// Kind of each decoder layer, an index into `distinct`.
    pub(crate) kind_of: Vec<usize>,
    /// The distinct decoder layers.
    pub(crate) distinct: Vec<Distinct<'a>>,
}

/// How tokens reach the experts.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Assumption<'a> {
    /// The experts of the rank that is looked at get so many times the mean of all, in every layer.
    Load(f64),
    /// As was recorded.
    Recorded(&'a Routing),
}

impl Assumption<'_> {
    /// All ranks get as many rows.
    pub(crate) const BALANCED: Self = Self::Load(1.0);

    /// Loads under so many expert ranks, by list.
    fn loads(&self, ep: u32) -> Loads {
        match self {
            Self::Load(load) => {
                let capped = load.min(f64::from(ep));
                Loads {
                    busiest: vec![capped],
                    fullest: vec![capped],
                }
            }
            Self::Recorded(routing) => routing.loads(ep),
        }
    }

    /// The list of the `index`-th MoE layer.
    pub(crate) fn list(&self, index: usize) -> usize {
        match self {
            Self::Load(_) => 0,
            Self::Recorded(routing) => routing.list(index),
        }
    }
}

/// A decoder layer that no other is like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Distinct<'a> {
    pub(crate) layer: &'a Layer,
    /// List of the routing that its experts go by; 0 without experts.
    list: usize,
    /// Its number among those whose weights differ.
    pub(crate) weights: usize,
}

/// The distinct decoder layers, and which of them each layer is.
pub(crate) fn distinct<'a>(
    model: &'a Model,
    routing: Assumption<'_>,
) -> (Vec<Distinct<'a>>, Vec<usize>) {
    let mut found: Vec<Distinct<'a>> = Vec::new();
    let mut layers: Vec<&Layer> = Vec::new();
    let mut routed = 0;
    let mut kind_of = Vec::with_capacity(model.layers.len());
    for layer in &model.layers {
        let list = match layer.moe() {
            Some(_) => {
                routed += 1;
                routing.list(routed - 1)
            }
            None => 0,
        };
        let known = layers.iter().position(|&known| known == layer);
        let weights = known.unwrap_or_else(|| {
            layers.push(layer);
            layers.len() - 1
        });
        let own = Distinct {
            layer,
            list,
            weights,
        };
        let known = found.iter().position(|known| *known == own);
        kind_of.push(known.unwrap_or_else(|| {
            found.push(own);
            found.len() - 1
        }));
    }
    (found, kind_of)
}

/// Time and memory of one kind of layer, or of an end of the model.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    /// Its place among the pieces that are asked about.
    place: usize,
    /// A microbatch of it, as its time is priced.
    local: Local,
    pub(crate) breakdown: LayerBreakdown,
    /// Forward seconds, the host's excess included.
    pub(crate) forward_s: f64,
    /// Backward seconds by recompute set.
    pub(crate) backward_s: Vec<f64>,
    /// What of them is products and attention.
    pub(crate) backward_bound_s: Vec<f64>,
    /// What of them only adds to gradients of weights, under any set.
    pub(crate) weight_s: f64,
    /// Memory by recompute set.
    pub(crate) memory: BySet,
    /// The same cut where passes pause, by recompute set; none where they do not or no order is known.
    pub(crate) stretches: Vec<Stretches>,
    /// Time of both passes without recomputation, cut where they pause; none where they do not.
    slots: [Vec<Slot>; 2],
    /// Kernels of both its passes that are nodes of CUDA graphs.
    pub(crate) nodes: u64,
    /// Its parameters, where replicas divide whole tensors.
    pub(crate) tensors: Tensors,
    /// The recompute sets that no other beats, where each layer may take one by itself.
    pub(crate) ways: Vec<LayersWay>,
}

impl Kind {
    /// Time of a pass, cut where it pauses, under a recompute set: what runs again comes last, as does what no op
    /// says.
    pub(crate) fn slots(&self, set: usize, backward: bool) -> Vec<Slot> {
        let mut slots = self.slots[usize::from(backward)].clone();
        let whole_s = if backward {
            self.backward_s[set]
        } else {
            self.forward_s
        };
        let told_s = |slot: &Slot| slot.compute_s + slot.weight_s + slot.sent_s.unwrap_or(0.0);
        let told_s: f64 = slots.iter().map(told_s).sum();
        if let Some(last) = slots.last_mut() {
            last.compute_s += (whole_s - told_s).max(0.0);
        }
        slots
    }

    /// Seconds of both passes under a recompute set.
    pub(crate) fn both_s(&self, set: usize) -> f64 {
        self.forward_s + self.backward_s[set]
    }

    /// Seconds that it computes again under a recompute set.
    pub(crate) fn again_s(&self, set: usize) -> f64 {
        (self.backward_s[set] - self.backward_s[0]).max(0.0)
    }

    /// Seconds of the exchanges of the forward and of the backward pass that another pass may hide.
    pub(crate) fn sent_s(&self) -> [f64; 2] {
        let slots = self.slots.each_ref();
        slots.map(|slots| slots.iter().filter_map(|slot| slot.sent_s).sum())
    }

    /// Seconds of the forward pass and of both, without what may be hidden of such exchanges.
    pub(crate) fn least_s(&self, question: &Question<'_>, set: usize) -> [f64; 2] {
        let hidden = question.hides_at_most();
        let [forward, backward] = self.sent_s().map(|sent_s| hidden * sent_s);
        let both = self.both_s(set);
        [self.forward_s - forward, both - forward - backward]
    }
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) dispatcher: Dispatcher,
    pub(crate) cp_comm: CpComm,
    /// A microbatch under balanced routing.
    pub(crate) local: Local,
    pub(crate) groups: LayerGroups,
    pub(crate) kinds: Vec<Kind>,
    pub(crate) embedding: Kind,
    /// Norm, head, loss and all multi-token-prediction depths.
    pub(crate) head: Kind,
    /// Buffers of the weight shapes of a set of kinds, the set as bits.
    buffers: Vec<Bytes>,
    /// Choices of recompute sets, the fastest over all layers first.
    choices_by_time: Vec<usize>,
}

/// Models with more kinds of layer than this are charged for every kind on every rank.
const KINDS_AS_BITS: usize = 8;

/// What the shapes of a layout depend on: its degrees, and whether the head needs a copy of the embedding.
pub(crate) type ShapeKey = [u32; 6];

pub(crate) fn shape_key(question: &Question<'_>, layout: &Layout) -> ShapeKey {
    let copies = question.embeds_twice() && layout.places().parts_ends();
    [
        layout.tp(),
        layout.cp(),
        layout.ep(),
        layout.etp(),
        layout.mbs(),
        copies.into(),
    ]
}

/// Layouts whose keys a thread tells at once.
const KEYED: usize = 1 << 10;

/// The first layout of each key.
pub(crate) fn by_key<K: Ord + Send>(
    layouts: &[Layout],
    key: impl Fn(&Layout) -> K + Sync,
) -> BTreeMap<K, &Layout> {
    let firsts = |mut known: BTreeMap<K, _>, layout| {
        known.entry(key(layout)).or_insert(layout);
        known
    };
    let joined = |mut before: BTreeMap<K, _>, after| {
        for (key, layout) in after {
            before.entry(key).or_insert(layout);
        }
        before
    };
    let all = layouts.par_iter().with_min_len(KEYED);
    all.fold(BTreeMap::new, firsts)
        .reduce(BTreeMap::new, joined)
}

/// The shapes of a layout, one for each way to keys and each dispatcher: under the first recompute set, and where it is asked for
/// under all of them, each by itself. Most layouts never come near the best, or fit as they are.
pub(crate) struct Shapes {
    layout: Layout,
    /// Under all recompute sets, without time.
    untimed: OnceLock<Vec<Shape>>,
    first: OnceLock<Vec<Shape>>,
    all: Each,
    /// Both with the memory of divided backward passes.
    divided: [Each; 2],
    /// How the layers of each are balanced.
    cuts: OnceLock<Vec<Cuts>>,
}

/// Shapes in the order of the first, as far as they were asked for.
type Each = OnceLock<Vec<OnceLock<Shape>>>;

impl Shapes {
    /// Those of a layout.
    pub(crate) fn new(layout: &Layout) -> Self {
        Self {
            layout: *layout,
            untimed: OnceLock::new(),
            first: OnceLock::new(),
            all: Each::new(),
            divided: Default::default(),
            cuts: OnceLock::new(),
        }
    }

    /// A layout that has them.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Under all recompute sets, without time: to tell what is held.
    pub(crate) fn untimed(&self, question: &Question<'_>) -> &[Shape] {
        let untimed = || Shape::of_ways(question, &self.layout, (&question.sets, false));
        self.untimed.get_or_init(untimed)
    }

    /// Under the recompute sets of the first choice.
    pub(crate) fn first(&self, question: &Question<'_>) -> &[Shape] {
        let first = || Shape::under(question, &self.layout, question.sets_of_first());
        self.first.get_or_init(first)
    }

    /// How the layers of each shape are balanced, as far as that was asked.
    pub(crate) fn cuts(&self, question: &Question<'_>) -> &[Cuts] {
        let shapes = self.first(question).len();
        self.cuts
            .get_or_init(|| (0..shapes).map(|_| Cuts::default()).collect())
    }

    /// One of them under all recompute sets.
    pub(crate) fn all(&self, question: &Question<'_>, index: usize) -> &Shape {
        if question.sets_of_first().len() == question.sets.len() {
            return &self.first(question)[index];
        }
        let all = self.each(&self.all, question);
        all[index].get_or_init(|| {
            let wires = self.first(question)[index].wires();
            let known = all.iter().filter_map(OnceLock::get);
            let known = known.chain(self.untimed.get().into_iter().flatten());
            let memory = Shape::alike(question, known, wires);
            Shape::one(
                question,
                &self.layout,
                (wires, memory),
                (&question.sets, true),
            )
        })
    }

    fn each<'s>(&self, each: &'s Each, question: &Question<'_>) -> &'s [OnceLock<Shape>] {
        let shapes = self.first(question).len();
        each.get_or_init(|| (0..shapes).map(|_| OnceLock::new()).collect())
    }

    /// One of them under the recompute sets of the first choice or under all, as a schedule needs it where memory is asked for.
    pub(crate) fn held_under(
        &self,
        question: &Question<'_>,
        schedule: ScheduleName,
        (all, index): (bool, usize),
    ) -> &Shape {
        let first = question.sets_of_first();
        let all = all && first.len() < question.sets.len();
        let (shape, sets) = if all {
            (self.all(question, index), &question.sets[..])
        } else {
            (&self.first(question)[index], first)
        };
        if !schedule.divides_backward() {
            return shape;
        }
        let divided = self.each(&self.divided[usize::from(all)], question);
        divided[index].get_or_init(|| shape.divided(question, &self.layout, sets))
    }
}

impl Shape {
    /// Works out the shapes of a layout under some recompute sets, one for each way to keys and each dispatcher.
    pub(crate) fn under(question: &Question<'_>, layout: &Layout, sets: &[Recompute]) -> Vec<Self> {
        Self::of_ways(question, layout, (sets, true))
    }

    /// The same without time where they are not `priced`.
    fn of_ways(
        question: &Question<'_>,
        layout: &Layout,
        (sets, priced): (&[Recompute], bool),
    ) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        for cp_comm in question.keys.legal(layout.tp(), layout.cp()) {
            for &dispatcher in question.dispatchers_for(layout.ep(), layout.etp()) {
                let wires = (dispatcher, cp_comm);
                let memory = Self::alike(question, found.iter(), wires);
                found.push(Self::one(question, layout, (wires, memory), (sets, priced)));
            }
        }
        found
    }

    /// The memory of all pieces, in their order, that a shape has in common with one of some others: dispatchers may hold as much.
    fn alike<'s>(
        question: &Question<'_>,
        mut others: impl Iterator<Item = &'s Self>,
        (_, cp_comm): (Dispatcher, CpComm),
    ) -> Option<Vec<BySet>> {
        let other = others.find(|other| other.cp_comm == cp_comm);
        let Self {
            kinds,
            embedding,
            head,
            ..
        } = other.filter(|_| question.runtime.holds_alike())?;
        let pieces = kinds.iter().chain([embedding, head]);
        Some(pieces.map(|kind| kind.memory.clone()).collect())
    }

    /// One of them, of which memory may be known.
    fn one(
        question: &Question<'_>,
        layout: &Layout,
        (wires, memory): ((Dispatcher, CpComm), Option<Vec<BySet>>),
        (sets, priced): (&[Recompute], bool),
    ) -> Self {
        let (timed, held) = (question.timed(layout), question.held(layout));
        let groups = question.layer_groups(layout, wires.1);
        let pieces = || {
            let settings = held
                .iter()
                .map(|held| question.setting(layout, wires, held, &groups));
            question.pieces().zip(settings)
        };
        let memory = memory.unwrap_or_else(|| {
            let memory = |(piece, setting): (Piece<'_>, Setting<'_>)| {
                BySet::new(&question.runtime.memory(&setting, piece, sets))
            };
            pieces().map(memory).collect()
        });
        let stretches: Vec<Vec<Stretches>> = pieces()
            .map(|(piece, setting)| question.stretches(&setting, piece, sets))
            .collect();
        let even = question.local(layout, 1.0);
        let setting = question.setting(layout, wires, &even, &groups);
        let work = |(piece, local): (_, &Local)| {
            let setting = Setting { local, ..setting };
            let priced = priced.then(|| question.runtime.work(&setting, piece, sets));
            priced.unwrap_or_default()
        };
        let lowered: Vec<Lowered> = question.pieces().zip(&timed).map(work).collect();
        let held = (&memory[..], &stretches[..]);
        Self::new(question, &setting, (&timed, &lowered), held, sets)
    }

    /// `timed` has a microbatch of every piece, `lowered` its work.
    fn new(
        question: &Question<'_>,
        setting: &Setting<'_>,
        (timed, lowered): (&[Local], &[Lowered]),
        (memory, stretches): (&[BySet], &[Vec<Stretches>]),
        sets: &[Recompute],
    ) -> Self {
        let held = memory.iter().zip(stretches);
        let each = lowered.iter().zip(held).zip(timed).enumerate();
        let mut kinds: Vec<Kind> = each
            .map(|(place, ((lowered, (memory, stretches)), local))| {
                let held = (memory.clone(), stretches.clone());
                question.kind(place, lowered, *local, held)
            })
            .collect();
        let head = kinds.pop().expect("the last piece");
        let embedding = kinds.pop().expect("the piece before it");
        Self {
            dispatcher: setting.dispatcher,
            cp_comm: setting.cp_comm,
            local: *setting.local,
            groups: *setting.groups,
            buffers: buffers(question, &lowered[..kinds.len()]),
            choices_by_time: choices_by_time(question, &kinds, sets),
            kinds,
            embedding,
            head,
        }
    }
}

impl Shape {
    /// How its tokens reach experts, and its attention keys.
    pub(crate) fn wires(&self) -> (Dispatcher, CpComm) {
        (self.dispatcher, self.cp_comm)
    }

    /// As a schedule needs it where memory is asked for: a shape under all sets of a question.
    pub(crate) fn held_under(
        &self,
        question: &Question<'_>,
        layout: &Layout,
        schedule: ScheduleName,
    ) -> Cow<'_, Self> {
        if schedule.divides_backward() {
            Cow::Owned(self.divided(question, layout, &question.sets))
        } else {
            Cow::Borrowed(self)
        }
    }

    /// The same with the memory of divided backward passes, under the sets that it was worked out for.
    fn divided(&self, question: &Question<'_>, layout: &Layout, sets: &[Recompute]) -> Self {
        let held = question.held(layout);
        let mut shape = self.clone();
        let ends = [&mut shape.embedding, &mut shape.head];
        let kinds = shape.kinds.iter_mut().chain(ends);
        for ((kind, piece), held) in kinds.zip(question.pieces()).zip(&held) {
            let setting = question.setting(layout, self.wires(), held, &self.groups);
            let runtime = question.runtime;
            kind.memory = BySet::new(&runtime.divided_memory(&setting, piece, sets));
            kind.ways = question.ways_of(&kind.memory, &kind.backward_s);
        }
        shape
    }

    /// Choices of recompute sets, the fastest over all layers first.
    pub(crate) fn choices_by_time(&self) -> &[usize] {
        &self.choices_by_time
    }

    /// What one weight of each shape of some layers takes, bits by [`Distinct::weights`] (see
    /// [`Stack::weight_shape_buffer`]).
    pub(crate) fn shape_buffer(&self, kinds: u64) -> Bytes {
        let all = self.buffers.len() - 1;
        self.buffers[(kinds as usize).min(all)]
    }
}

/// The choices that some sets are enough for, by time.
fn choices_by_time(question: &Question<'_>, kinds: &[Kind], sets: &[Recompute]) -> Vec<usize> {
    let there = if sets.len() == question.sets.len() {
        &question.choices
    } else {
        &question.choices[..1]
    };
    let mut layers = vec![0_u32; kinds.len()];
    for &kind in &question.kind_of {
        layers[kind] += 1;
    }
    let backward_s = |sets: &Sets| -> f64 {
        match sets {
            Sets::Every(set) => {
                let each = kinds.iter().zip(&layers);
                each.map(|(kind, &layers)| kind.backward_s[*set] * f64::from(layers))
                    .sum()
            }
            Sets::Each(sets) => {
                let each = sets.iter().zip(&question.kind_of);
                each.map(|(&set, &kind)| kinds[kind].backward_s[set]).sum()
            }
            // It is alone where it is one of them.
            Sets::First { .. } => 0.0,
        }
    };
    let mut choices: Vec<(f64, usize)> = there.iter().map(backward_s).zip(0..).collect();
    choices.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    choices.into_iter().map(|(_, choice)| choice).collect()
}

fn buffers(question: &Question<'_>, kinds: &[Lowered]) -> Vec<Bytes> {
    if question.stack.weight_shape_buffer(1) == Bytes::ZERO {
        return vec![Bytes::ZERO];
    }
    let mut weights: Vec<BTreeSet<(u64, u64)>> = Vec::new();
    for (kind, distinct) in kinds.iter().zip(&question.distinct) {
        if distinct.weights == weights.len() {
            weights.push(kind.weight_shapes());
        }
    }
    let of = |set: usize| {
        let shapes: BTreeSet<(u64, u64)> = weights
            .iter()
            .enumerate()
            .filter(|(index, _)| *index >= KINDS_AS_BITS || set >> index & 1 == 1)
            .flat_map(|(_, shapes)| shapes.iter().copied())
            .collect();
        let elements = shapes.iter().map(|(n, k)| n * k).sum();
        question.stack.weight_shape_buffer(elements)
    };
    let sets = if weights.len() > KINDS_AS_BITS {
        return vec![of(usize::MAX)];
    } else {
        1_usize << weights.len()
    };
    (0..sets).map(of).collect()
}

impl<'a> Question<'a> {
    /// What is asked of the runtime about a layout of this shape.
    pub(crate) fn setting<'s>(
        &'s self,
        layout: &'s Layout,
        (dispatcher, cp_comm): (Dispatcher, CpComm),
        local: &'s Local,
        groups: &'s LayerGroups,
    ) -> Setting<'s> {
        Setting {
            model: self.model,
            layout,
            local,
            groups,
            precision: self.options.precision,
            dispatcher,
            cp_comm,
            capacity: self.expert_capacity(),
            shared_beside: self.overlap.shared_expert,
            sharded: self.shards_weights() && self.shards(layout)[0] > 1,
            offload: self.offload(),
            graphs: self.options.fixed_graphs(),
            fp8_attention: self.options.fp8_attention,
        }
    }

    /// The groups of the layers of a layout, with how many context-parallel ranks exchange heads under a hierarchy: those
    /// that were given, or as many as share an NVLink domain and divide the heads.
    pub(crate) fn layer_groups(&self, layout: &Layout, cp_comm: CpComm) -> LayerGroups {
        let mut groups = LayerGroups::new(layout, self.cluster);
        if cp_comm == CpComm::Hierarchical {
            let near = gcd(groups.cp.ranks, groups.cp.ranks_per_domain);
            let all = heads(self.model);
            let divides = |inside: &u32| {
                let over = u64::from(layout.tp()) * u64::from(*inside);
                near.is_multiple_of(*inside) && all.iter().all(|heads| heads.is_multiple_of(over))
            };
            groups.cp_inside = match self.options.cp_sizes {
                Some([inside, _]) => gcd(inside, groups.cp.ranks),
                None => (1..=near).rev().find(divides).unwrap_or(1),
            };
        }
        groups
    }

    /// Whose saved tensors leave for the host.
    pub(crate) fn offload(&self) -> Offload {
        self.options.offload.unwrap_or_default()
    }

    /// A microbatch of a layout where experts get so many times the mean of all.
    fn local(&self, layout: &Layout, load: f64) -> Local {
        let options = self.options;
        let local = Local::new(layout, self.model, &options.batch, load);
        local.within(self.model, options.capacity)
    }

    /// The same of every piece, by loads.
    fn locals(&self, layout: &Layout, loads: &[f64]) -> Vec<Local> {
        let lists = self.lists();
        lists.map(|list| self.local(layout, loads[list])).collect()
    }

    /// The same of every piece, as its time is priced.
    pub(crate) fn timed(&self, layout: &Layout) -> Vec<Local> {
        let Loads { busiest, .. } = self.routing.loads(layout.ep());
        // While the busiest rank works the others wait, and leave it their turns on the cores.
        let turns = self.costs.turns();
        let busiest: Vec<f64> = busiest.iter().map(|load| (load / turns).max(1.0)).collect();
        self.locals(layout, &busiest)
    }

    /// The same of every piece, as its memory is counted.
    fn held(&self, layout: &Layout) -> Vec<Local> {
        self.locals(layout, &self.routing.loads(layout.ep()).fullest)
    }

    /// The schedules that are tried for a layout, the usual one first.
    pub(crate) fn schedules(
        &self,
        pp: u32,
        vpp: u32,
    ) -> impl Iterator<Item = ScheduleName> + use<> {
        let wanted = self.options.schedule;
        let divides = undivided(self.options).is_none();
        let all = self.stack.schedules(pp, vpp);
        let all = all.filter(move |name| divides || !name.divides_backward());
        // A layout is of one kind of places, and a search of those that go around unless it is told.
        let all = all.filter(move |name| !name.is_vee() || wanted.is_some());
        let combines = self.overlap.expert_alltoall;
        let all = all.filter(move |name| name.combines() == combines);
        all.filter(move |&name| wanted.is_none_or(|wanted| wanted == name))
    }

    /// What passes of a piece take and give between the pauses of combined passes, where they are and it is known.
    fn stretches(
        &self,
        setting: &Setting<'_>,
        piece: Piece<'_>,
        sets: &[Recompute],
    ) -> Vec<Stretches> {
        if !self.overlap.expert_alltoall {
            return Vec::new();
        }
        let delays = self.overlap.delay_wgrad;
        let stretches = self.runtime.stretches(setting, piece, sets, delays);
        stretches.unwrap_or_default()
    }

    /// What of an exchange of tokens another pass may hide at most: it takes multiprocessors from what runs beside it.
    pub(crate) fn hides_at_most(&self) -> f64 {
        1.0 - self.stack.taken_by_exchanges()
    }

    /// Whether weights and gradients are divided too, and layers gathered in every microbatch.
    pub(crate) fn shards_weights(&self) -> bool {
        self.options.zero.divides_weights()
    }

    /// Whether gradients are divided, and reduced in every microbatch.
    pub(crate) fn shards_gradients(&self) -> bool {
        self.options.zero.divides_gradients()
    }

    /// Ranks over which dense parameters, and experts, divide what is divided of them: replicas of one instance.
    pub(crate) fn shards(&self, layout: &Layout) -> [u64; 2] {
        let replicas = [layout.dp() * layout.cp(), layout.edp()];
        replicas.map(|replicas| u64::from(replicas / self.options.instances.max(1)).max(1))
    }

    /// Those over which they divide masters and moments.
    pub(crate) fn state_shards(&self, layout: &Layout) -> [u64; 2] {
        self.shards(layout)
            .map(|shards| shards * u64::from(self.outer()))
    }

    /// What divides weights and gradients, where these rest divided, and what divides masters and moments.
    pub(crate) fn divided(&self, layout: &Layout) -> Shards {
        Shards {
            weights: self.shards(layout),
            states: self.state_shards(layout),
        }
    }

    /// Instances that divide masters and moments further.
    pub(crate) fn outer(&self) -> u32 {
        match self.options.zero {
            Zero::Hybrid => self.options.instances.max(1),
            _ => 1,
        }
    }

    /// Whether divided units are copied out of what was gathered, and their gradients into what is reduced, as PyTorch's
    /// FSDP2 does, which divides each tensor.
    pub(crate) fn copies_units(&self) -> bool {
        self.options.zero == Zero::Fsdp2
    }

    /// Whether it has a rank's part of narrow gradients in f32 for the update.
    pub(crate) fn widens_gradients(&self) -> bool {
        self.copies_units() && self.options.grad_dtype != Dtype::F32
    }

    /// Bytes that a parameter takes.
    pub(crate) fn state_bytes(&self) -> StateBytes {
        let options = self.options;
        let kept = (options.optimizer, options.masters, options.primary_weights);
        self.stack
            .state(options.precision, kept, options.grad_dtype)
    }

    /// Elements that a bucket of gradients has at least; none where each family is reduced and gathered at once.
    pub(crate) fn bucket_elements(&self, layout: &Layout) -> Option<u64> {
        let own = self
            .stack
            .bucket_elements(self.overlap, layout.dp() * layout.cp());
        let own = own.filter(|_| !self.shards_weights());
        own.map(|own| self.options.bucket_elements.unwrap_or(own))
    }

    /// How the weights of a layout are divided into buckets.
    pub(crate) fn division(&self, layout: &Layout) -> Division {
        if self.options.zero == Zero::Gradients {
            // Without units, as weights rest whole, buckets are as large as those of the distributed optimizer
            // (`mcore_fsdp_adapter.py` in `megatron/core/distributed/fsdp`).
            return Division::AtLeast(usual_bucket(layout.dp() * layout.cp()));
        }
        Division::of(
            self.options.zero,
            self.overlap,
            self.bucket_elements(layout),
        )
    }

    /// Whether both ends of a pipeline have the embedding's matrix: a tied head, and depths of multi-token prediction,
    /// which embed tokens where the head is (of Megatron-Core `GPTModel` in `megatron/core/models/gpt/gpt_model.py`, whose
    /// stage with such depths has an embedding of its own, and `_allreduce_word_embedding_grads` of
    /// `megatron/core/distributed/finalize_model_grads.py`).
    pub(crate) fn embeds_twice(&self) -> bool {
        self.model.tied_embeddings || !self.model.mtp.is_empty()
    }

    /// How many tokens an expert takes, where there are experts.
    pub(crate) fn expert_capacity(&self) -> Option<Capacity> {
        let has_experts = self.model.num_moe_layers() > 0;
        self.options.capacity.filter(|_| has_experts)
    }

    /// The distinct layers, the embedding and the head.
    fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let layers = self.distinct.iter();
        let layers = layers.map(|distinct| Piece::Layer(distinct.layer));
        layers.chain([Piece::Embedding, Piece::Head])
    }

    /// The list of the routing that each of them goes by. What experts the head has, in multi-token
    /// prediction, are taken to be routed as those of the last layer.
    fn lists(&self) -> impl Iterator<Item = usize> {
        let last = self.routing.list(self.model.num_moe_layers().max(1) - 1);
        let layers = self.distinct.iter().map(|distinct| distinct.list);
        layers.chain([last, last])
    }

    /// The loads of a layout by MoE layer.
    pub(crate) fn loads(&self, ep: u32) -> Loads {
        let loads = self.routing.loads(ep);
        let by_layer = |loads: &[f64]| {
            let lists = (0..self.model.num_moe_layers()).map(|layer| self.routing.list(layer));
            lists.map(|list| loads[list]).collect()
        };
        Loads {
            busiest: by_layer(&loads.busiest),
            fullest: by_layer(&loads.fullest),
        }
    }

    /// The same question under another routing.
    pub(crate) fn under(&self, routing: Assumption<'a>) -> Self {
        let (distinct, kind_of) = distinct(self.model, routing);
        Self {
            routing,
            distinct,
            kind_of,
            stack: self.stack.clone(),
            sets: self.sets.clone(),
            choices: self.choices.clone(),
            illegal_sets: self.illegal_sets.clone(),
            dispatchers: self.dispatchers.clone(),
            keys: self.keys.clone(),
            above: self.above.clone(),
            ..*self
        }
    }

    /// The same question of one choice of recompute sets.
    pub(crate) fn of(mut self, sets: &Sets) -> Self {
        let plan = self.recompute(sets);
        (self.sets, self.choices) = of_plan(&plan, self.model);
        self.by_layer = None;
        self
    }

    /// Choices of recompute sets that no rule refuses.
    pub(crate) fn legal_sets(&self) -> u64 {
        self.choices.len() as u64 + u64::from(self.by_layer.is_some())
    }

    /// Dispatchers times schedules times ways to keys of some degrees.
    pub(crate) fn ways(&self, degrees: &Degrees) -> u64 {
        let schedules = self.schedules(degrees.pp, degrees.vpp).count().max(1);
        let dispatchers = self.dispatchers_for(degrees.ep, degrees.etp).len();
        let keys = self.keys.legal(degrees.tp, degrees.cp).count().max(1);
        (dispatchers * schedules * keys) as u64
    }

    /// Dispatchers that differ: without an exchange all are one.
    pub(crate) fn dispatchers_for(&self, ep: u32, etp: u32) -> &[Dispatcher] {
        let all = &self.dispatchers;
        if self.needs_exchange && ep * etp == 1 {
            &[]
        } else if self.stack.exchanges(ep, etp) {
            all
        } else {
            &all[..1]
        }
    }

    /// Recompute sets that the first choice needs, which come first.
    fn sets_of_first(&self) -> &[Recompute] {
        match &self.choices[0] {
            Sets::Every(_) => &self.sets[..1],
            Sets::Each(_) | Sets::First { .. } => &self.sets,
        }
    }

    /// What a choice is in a plan.
    pub(crate) fn recompute(&self, sets: &Sets) -> RecomputePlan {
        match sets {
            Sets::Every(set) => self.sets[*set].clone().into(),
            Sets::Each(sets) => {
                RecomputePlan::by_layer(sets.iter().map(|&set| self.sets[set].clone()).collect())
            }
            Sets::First { layers, .. } => {
                let layers = NonZeroU32::new(*layers).expect("one layer at least");
                RecomputePlan::first_of_stages(layers)
            }
        }
    }

    /// The work of a kind of a shape of a layout under one recompute set. Not kept, for a search asks only of
    /// the few that it chooses.
    pub(crate) fn lowered(
        &self,
        layout: &Layout,
        shape: &Shape,
        kind: &Kind,
        set: usize,
    ) -> Lowered {
        let setting = self.setting(layout, shape.wires(), &kind.local, &shape.groups);
        let piece = self.pieces().nth(kind.place);
        let piece = piece.expect("a kind is of a piece");
        let sets = &self.sets[set..=set];
        self.runtime.work(&setting, piece, sets)
    }

    /// The recompute sets of a layer that no other beats, where each layer may take one by itself.
    fn ways_of(&self, memory: &BySet, backward_s: &[f64]) -> Vec<LayersWay> {
        if self.by_layer != Some(ByLayer::Each) {
            return Vec::new();
        }
        let each = memory.iter().zip(backward_s).enumerate();
        let ways = each
            .map(|(set, (memory, &seconds))| LayersWay::of_layer(set, seconds, &memory.passes()));
        by_layer::unbeaten(ways.collect())
    }

    /// The tensors of a piece, of which a rank has so much; none where replicas cut all parameters alike.
    fn tensors(&self, place: usize, local: &Local, held: Shard) -> Tensors {
        if !self.options.optimizer.deals_tensors() {
            return Tensors::default();
        }
        match self.pieces().nth(place) {
            Some(Piece::Layer(layer)) => Tensors::layer(self.model, layer, local),
            Some(Piece::Head) => Tensors::head(self.model, local, held),
            Some(Piece::Embedding) | None => Tensors::embedding(held),
        }
    }

    fn kind(
        &self,
        place: usize,
        lowered: &Lowered,
        local: Local,
        (memory, stretches): (BySet, Vec<Stretches>),
    ) -> Kind {
        let breakdown = LayerBreakdown::new(lowered, self.costs, &self.stack);
        let seconds = |breakdown: &crate::price::Breakdown| {
            breakdown.device() + breakdown.host_excess(&self.stack)
        };
        let each = (0..memory.len()).map(|set| breakdown.backward_under(set));
        let (backward_s, backward_bound_s): (Vec<f64>, Vec<f64>) = each
            .map(|backward| (seconds(&backward), backward.bound_by_sms()))
            .unzip();
        let slots = |list, backward| {
            let price = |work: &_| crate::price::cost_of(work, self.costs).time.0;
            runtime::slots(list, backward, price)
        };
        let hides = self.stack.hides(self.overlap).expert_alltoall;
        let slots = if hides {
            [
                slots(&lowered.forward, false),
                slots(&lowered.backward, true),
            ]
        } else {
            Default::default()
        };
        Kind {
            stretches,
            slots,
            forward_s: seconds(&breakdown.forward),
            weight_s: seconds(&breakdown.weight),
            ways: self.ways_of(&memory, &backward_s),
            nodes: self.stack.graph_nodes(lowered),
            tensors: self.tensors(place, &local, memory.alike().shard),
            backward_s,
            backward_bound_s,
            place,
            local,
            breakdown,
            memory,
        }
    }
}
