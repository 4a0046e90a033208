//! [`Shape`]: everything about a layer that does not depend on the pipeline, worked out once for all
//! layouts that agree on the other degrees.
//!
//! A model of a hundred layers has two or three kinds of them; kinds are priced, layers are counted.

use std::collections::BTreeSet;

use moefold_profiles::Cluster;
use moefold_profiles::pricing::Costs;
use moefold_profiles::units::Bytes;

use crate::choice::{Dispatcher, Overlap, Recompute};
use crate::layout::{Illegal, Layout};
use crate::local::Local;
use crate::model::{Layer, Model};
use crate::options::SearchOptions;
use crate::price::LayerBreakdown;
use crate::runtime::{LayerGroups, Lowered, Piece, Runtime, Setting, StageMemory};
use crate::stack::Stack;

/// The inputs of a search that stay the same throughout.
pub(crate) struct Question<'a> {
    pub(crate) model: &'a Model,
    pub(crate) cluster: &'a Cluster,
    pub(crate) options: &'a SearchOptions,
    pub(crate) costs: &'a Costs,
    pub(crate) stack: Stack,
    /// What runs the plan.
    pub(crate) runtime: &'a dyn Runtime,
    /// What runs beside compute.
    pub(crate) overlap: Overlap,
    /// Recompute sets tried.
    pub(crate) sets: Vec<Recompute>,
    /// The rule each of the others breaks.
    pub(crate) illegal_sets: Vec<Illegal>,
    /// Dispatchers tried.
    pub(crate) dispatchers: Vec<Dispatcher>,
    /// Kind of each decoder layer, an index into `distinct`.
    pub(crate) kind_of: Vec<usize>,
    /// The distinct decoder layers.
    pub(crate) distinct: Vec<&'a Layer>,
}

/// Time and memory of one kind of layer, or of an end of the model.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    /// Its place among the pieces that are asked about.
    place: usize,
    pub(crate) breakdown: LayerBreakdown,
    /// Forward seconds, the host's excess included.
    pub(crate) forward_s: f64,
    /// Backward seconds by recompute set.
    pub(crate) backward_s: Vec<f64>,
    /// Memory by recompute set.
    pub(crate) memory: Vec<StageMemory>,
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) dispatcher: Dispatcher,
    pub(crate) local: Local,
    pub(crate) groups: LayerGroups,
    pub(crate) kinds: Vec<Kind>,
    pub(crate) embedding: Kind,
    /// Norm, head, loss and all multi-token-prediction depths.
    pub(crate) head: Kind,
    /// Buffers of the weight shapes of a set of kinds, the set as bits.
    buffers: Vec<Bytes>,
    /// Recompute sets, the fastest over all layers first.
    sets_by_time: Vec<usize>,
}

/// Models with more kinds of layer than this are charged for every kind on every rank.
const KINDS_AS_BITS: usize = 8;

impl Shape {
    /// Works out the shapes of a layout, one for each dispatcher.
    pub(crate) fn all(question: &Question<'_>, layout: &Layout) -> Vec<Self> {
        let options = question.options;
        let load = options
            .routing
            .as_ref()
            .map_or(1.0, |r| r.load(layout.ep()));
        let local = Local::new(layout, question.model, &options.batch, load);
        let groups = LayerGroups::new(layout, question.cluster);
        // The same for all dispatchers.
        let any = question.setting(layout, question.dispatchers[0], &local, &groups);
        let memory: Vec<Vec<StageMemory>> = question
            .pieces()
            .map(|piece| question.runtime.memory(&any, piece, &question.sets))
            .collect();
        question
            .dispatchers_for(layout.ep())
            .iter()
            .map(|&dispatcher| {
                let setting = question.setting(layout, dispatcher, &local, &groups);
                Self::new(question, &setting, &memory)
            })
            .collect()
    }

    fn new(question: &Question<'_>, setting: &Setting<'_>, memory: &[Vec<StageMemory>]) -> Self {
        let work = |piece| question.runtime.work(setting, piece);
        let lowered: Vec<Lowered> = question.pieces().map(work).collect();
        let each = lowered.iter().zip(memory).enumerate();
        let mut kinds: Vec<Kind> = each
            .map(|(place, (lowered, memory))| question.kind(place, lowered, memory.clone()))
            .collect();
        let head = kinds.pop().expect("the last piece");
        let embedding = kinds.pop().expect("the piece before it");
        Self {
            dispatcher: setting.dispatcher,
            local: *setting.local,
            groups: *setting.groups,
            buffers: buffers(question, &lowered[..kinds.len()]),
            sets_by_time: sets_by_time(question, &kinds),
            kinds,
            embedding,
            head,
        }
    }
}

impl Shape {
    /// Forward and backward seconds of one microbatch over all stages, and of the lightest layer,
    /// without recomputation beyond the first set's.
    pub(crate) fn work_s(&self, question: &Question<'_>) -> (f64, f64) {
        let passes = |kind: &Kind| kind.forward_s + kind.backward_s[0];
        let layers = question
            .kind_of
            .iter()
            .map(|&kind| passes(&self.kinds[kind]));
        let lightest = layers.clone().fold(f64::INFINITY, f64::min);
        let all: f64 = layers.sum();
        (all + passes(&self.embedding) + passes(&self.head), lightest)
    }

    /// Recompute sets, the fastest over all layers first.
    pub(crate) fn sets_by_time(&self) -> &[usize] {
        &self.sets_by_time
    }

    /// What one weight of each shape of some kinds of layer takes (see
    /// [`Stack::weight_shape_buffer`]).
    pub(crate) fn shape_buffer(&self, kinds: u64) -> Bytes {
        let all = self.buffers.len() - 1;
        self.buffers[(kinds as usize).min(all)]
    }
}

fn sets_by_time(question: &Question<'_>, kinds: &[Kind]) -> Vec<usize> {
    let mut layers = vec![0_u32; kinds.len()];
    for &kind in &question.kind_of {
        layers[kind] += 1;
    }
    let backward_s = |set: usize| -> f64 {
        let each = kinds.iter().zip(&layers);
        each.map(|(kind, &layers)| kind.backward_s[set] * f64::from(layers))
            .sum()
    };
    let mut sets: Vec<(f64, usize)> = (0..question.sets.len())
        .map(|set| (backward_s(set), set))
        .collect();
    sets.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    sets.into_iter().map(|(_, set)| set).collect()
}

fn buffers(question: &Question<'_>, kinds: &[Lowered]) -> Vec<Bytes> {
    if question.stack.weight_shape_buffer(1) == Bytes::ZERO {
        return vec![Bytes::ZERO];
    }
    let weights: Vec<BTreeSet<(u64, u64)>> = kinds.iter().map(Lowered::weight_shapes).collect();
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
    let sets = if kinds.len() > KINDS_AS_BITS {
        return vec![of(usize::MAX)];
    } else {
        1_usize << kinds.len()
    };
    (0..sets).map(of).collect()
}

impl Question<'_> {
    /// What is asked of the runtime about a layout of this shape.
    pub(crate) fn setting<'s>(
        &'s self,
        layout: &'s Layout,
        dispatcher: Dispatcher,
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
        }
    }

    /// The distinct layers, the embedding and the head.
    fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let layers = self.distinct.iter().map(|layer| Piece::Layer(layer));
        layers.chain([Piece::Embedding, Piece::Head])
    }

    /// Dispatchers that differ: without an exchange all are one.
    pub(crate) fn dispatchers_for(&self, ep: u32) -> &[Dispatcher] {
        let all = &self.dispatchers;
        if ep == 1 { &all[..1] } else { all }
    }

    /// The work of a kind of a shape of a layout. Not kept, for a search asks only of the few that it
    /// chooses.
    pub(crate) fn lowered(&self, layout: &Layout, shape: &Shape, kind: &Kind) -> Lowered {
        let setting = self.setting(layout, shape.dispatcher, &shape.local, &shape.groups);
        let piece = self.pieces().nth(kind.place);
        let piece = piece.expect("a kind is of a piece");
        self.runtime.work(&setting, piece)
    }

    fn kind(&self, place: usize, lowered: &Lowered, memory: Vec<StageMemory>) -> Kind {
        let breakdown = LayerBreakdown::new(lowered, self.costs, &self.stack);
        let seconds = |breakdown: &crate::price::Breakdown| {
            breakdown.device() + breakdown.host_excess(&self.stack)
        };
        Kind {
            forward_s: seconds(&breakdown.forward),
            backward_s: self
                .sets
                .iter()
                .map(|set| seconds(&breakdown.backward_with(set)))
                .collect(),
            place,
            breakdown,
            memory,
        }
    }
}
