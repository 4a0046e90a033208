//! [`Shard`]: what one rank holds of a model, declared once.
//!
//! Every parameter of the rank is listed with its shape, its place in the rank's flat buffers and
//! the rectangles of global tensors (Hugging Face names) it is made of. Initialization, loading,
//! saving, the optimizer and the tests all read this one list. It is not storage: buffers belong to
//! [`crate::store`]; and it computes no groups: coordinates come from `planner`'s mesh.
//!
//! The flat buffer of the dense family is ordered so that each treatment is one contiguous range:
//! matrices split over TP, then key/value matrices that several TP ranks share, then what every TP
//! rank holds in full (router matrices, then the one-dimensional norms); vectors come after matrices
//! in each. Where a plan divides buffers into buckets, each bucket is ordered so by itself.

mod declare;

use std::ops::Range;

use moefold_planner::bucket::{self, Division};
use moefold_planner::layout::Layout;
use moefold_planner::mesh::Coordinates;
use moefold_planner::model::{Activation, Model, Moe};
use moefold_planner::schedule::Stage;

use self::declare::Declaration;
use crate::weights::{GlobalTensor, Region};

/// Parameters start at multiples of this many elements: a cache line of f32.
pub(crate) const ALIGNMENT: usize = 16;

/// Which buffer, and so which data-parallel group, a parameter belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Everything but routed experts: reduced and sharded over `dp-cp`.
    Dense,
    /// Routed experts: reduced and sharded over `edp`.
    Expert,
    /// Correction biases of routers: f32 on every device and whole on every rank; the load moves them,
    /// not a gradient.
    Balance,
}

/// What a parameter is for. Layers ask for their weights by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Token embedding `[vocab/tp, hidden]`; also the head where embeddings are tied.
    Embedding,
    /// Norm before the mixer `[hidden]`.
    InputNorm,
    /// Query projection `[heads/tp * d, hidden]`; of compressed queries `[heads/tp * d, q]`.
    Query,
    /// Key projection `[kv_heads/tp * d, hidden]`.
    Key,
    /// Value projection `[kv_heads/tp * d, hidden]`.
    Value,
    /// Bias of queries `[heads/tp * d]`.
    QueryBias,
    /// Bias of keys `[kv_heads/tp * d]`.
    KeyBias,
    /// Bias of values `[kv_heads/tp * d]`.
    ValueBias,
    /// Norm of query heads `[d]`, of all queries `[heads/tp * d]`, or of compressed queries `[q]`.
    QueryNorm,
    /// Norm of key heads `[d]`, or of all keys `[kv_heads/tp * d]`.
    KeyNorm,
    /// Compression of queries `[q, hidden]`.
    QueryDown,
    /// Compression of keys and values, then the part of a key that all heads share `[c + r, hidden]`.
    KvDown,
    /// Norm of compressed keys and values `[c]`.
    KvNorm,
    /// Unrotated part of a key, then a value, head by head, from compressed ones `[heads/tp * (nope + v), c]`.
    KvUp,
    /// Output projection `[hidden, heads/tp * d]`.
    Output,
    /// Bias of the output `[hidden]`.
    OutputBias,
    /// Sinks of attention `[heads/tp]`.
    Sinks,
    /// Norm before the feed-forward block `[hidden]`.
    PostNorm,
    /// Router `[experts, hidden]`.
    Router,
    /// Bias of a router's logits `[experts]`.
    RouterBias,
    /// What is added to a router's scores for its choice alone `[experts]`.
    CorrectionBias,
    /// Gate rows over up rows of every local expert `[experts/ep, 2*f/etp, hidden]`, or of the
    /// dense MLP `[2*f/tp, hidden]`; of [`Form::Together`] gate and up columns in turn
    /// `[experts/ep, hidden, 2*f/etp]`.
    GateUp,
    /// Biases of the same `[experts/ep, 2*f/etp]`.
    GateUpBias,
    /// Down projection `[experts/ep, hidden, f/etp]`, or of the dense MLP `[hidden, f/tp]`; of
    /// [`Form::Together`] `[experts/ep, f/etp, hidden]`.
    Down,
    /// Biases of the same, on every ETP rank `[experts/ep, hidden]`.
    DownBias,
    /// Gate rows over up rows of the shared expert `[2*f/tp, hidden]`.
    SharedGateUp,
    /// Down projection of the shared expert `[hidden, f/tp]`.
    SharedDown,
    /// What the gate of the shared expert's output is made by `[1, hidden]`.
    SharedGate,
    /// Norm of embedded tokens in a depth of multi-token prediction `[hidden]`.
    DepthEmbeddingNorm,
    /// Norm of what comes from the depth before `[hidden]`.
    DepthHiddenNorm,
    /// Projection of both, the embedding first `[hidden, 2 * hidden]`.
    DepthProjection,
    /// Norm between a depth and the head `[hidden]`.
    DepthNorm,
    /// Norm before the head `[hidden]`.
    FinalNorm,
    /// Output head `[vocab/tp, hidden]`.
    Head,
}

/// How the experts of a family of checkpoints rest, and so those of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Matrices of each expert by themselves, `[out, in]`, gate and up two of them.
    Apart,
    /// One tensor of all experts, matrices `[in, out]`, the columns of gate and up in turn: GPT-OSS's.
    Together,
}

impl Form {
    /// That of experts so described.
    pub fn of(moe: &Moe) -> Self {
        match moe.expert.activation {
            Activation::ClippedGelu(_) => Self::Together,
            _ => Self::Apart,
        }
    }
}

/// How TP ranks relate to a parameter, or ETP ranks to one of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Each rank holds another part.
    Split,
    /// This many consecutive TP ranks hold the same key/value head; gradients sum among them.
    SharedBy(usize),
    /// Every TP rank holds all of it and sees a part of its gradient; gradients sum over TP.
    Replicated,
}

/// A rectangle of a global tensor, resting contiguously inside a parameter.
///
/// A one-dimensional tensor counts as `[len, 1]`, one of three dimensions as all of its matrices in a column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// Hugging Face name of the global tensor.
    pub tensor: String,
    /// Its shape.
    pub dims: Vec<usize>,
    /// Rows held.
    pub rows: Range<usize>,
    /// Columns held.
    pub cols: Range<usize>,
    /// Where in the parameter it starts, in elements.
    pub at: usize,
}

impl Slice {
    /// Elements held.
    pub fn len(&self) -> usize {
        self.rows.len() * self.cols.len()
    }

    /// The same rectangle as [`crate::weights`] names it.
    pub fn region(&self) -> Region<'_> {
        Region {
            tensor: &self.tensor,
            dims: &self.dims,
            rows: self.rows.clone(),
            cols: self.cols.clone(),
        }
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One parameter of the rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Decoder layer, where it belongs to one.
    pub layer: Option<u32>,
    /// What it is for.
    pub part: Part,
    /// Which flat buffer holds it.
    pub family: Family,
    /// Shape on this rank.
    pub dims: Vec<usize>,
    /// Where in the flat buffer it starts, in elements.
    pub offset: usize,
    /// What it is made of.
    pub slices: Vec<Slice>,
    /// How TP ranks relate to it.
    pub spread: Spread,
    /// Whether this rank is the one of its TP group, and of the ends of its pipeline, that counts it in sums
    /// over the model.
    pub counted: bool,
    /// Whether the other end of the pipeline has it too, and a part of its gradient: a tied embedding.
    pub at_both_ends: bool,
}

impl Parameter {
    /// Elements on this rank.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its range in the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }

    /// Whether weight decay applies: to tensors of two or more dimensions. The biases of all experts are a
    /// vector for each.
    pub fn decays(&self) -> bool {
        let biases = matches!(self.part, Part::GateUpBias | Part::DownBias);
        self.dims.len() >= 2 && !biases
    }
}

/// Weights that a rank uses one after the other: of them buckets are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// The token embedding, where the first stage is.
    Embedding,
    /// A decoder layer.
    Layer(u32),
    /// What the last stage has beside its layers: norm, head, depths of multi-token prediction. Where weights rest
    /// divided, each depth is a unit by itself, a layer behind those of the model.
    Head,
}

impl Unit {
    /// Those of some pieces of a model, in order of use.
    fn of(model: &Model, pieces: &[Piece], division: Division) -> Vec<Self> {
        let mut units: Vec<Self> = pieces
            .iter()
            .map(|piece| match *piece {
                Piece::Embedding => Self::Embedding,
                Piece::Mixer(layer) | Piece::FeedForward(layer) => Self::Layer(layer),
                Piece::Head => Self::Head,
            })
            .collect();
        units.dedup();
        if matches!(division, Division::Sharded(_)) && units.contains(&Self::Head) {
            let first = model.layers.len() as u32;
            units.extend((first..).take(model.mtp.len()).map(Self::Layer));
        }
        units
    }

    /// The number among `units` of that with a parameter. What is of none of their layers is of the head, and so
    /// is an embedding where the first stage is elsewhere.
    fn with(units: &[Self], parameter: &Parameter) -> usize {
        let own = match (parameter.layer, parameter.part) {
            (Some(layer), _) => Self::Layer(layer),
            (None, Part::Embedding) => Self::Embedding,
            (None, _) => Self::Head,
        };
        let found = units.iter().position(|unit| *unit == own);
        found.unwrap_or(units.len() - 1)
    }
}

/// Weights that are reduced and gathered in one collective: a part of the buffer of their family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Dense, or experts.
    pub family: Family,
    /// Where it is in the family's buffer. It divides into equal shards over the replicas.
    pub range: Range<usize>,
    /// Its units, in order of use.
    pub units: Range<usize>,
}

/// Where a family is whole whose weights and gradients rest divided over its replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Divided {
    /// Replicas, each of which has an equal part of every bucket.
    pub ranks: usize,
    /// Lengths of the buffers that units are whole in: of weights, and of gradients.
    pub buffers: [Vec<usize>; 2],
    /// By unit, which of these are its own.
    pub of_units: [Vec<usize>; 2],
}

/// Everything one rank holds of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Shard {
    /// Parameters in the order of their buffers: dense, then experts.
    pub parameters: Vec<Parameter>,
    /// Length of the dense flat buffer, padded to equal shards over `dp-cp`.
    pub dense_len: usize,
    /// Length of the expert flat buffer, padded to equal shards over `edp`.
    pub expert_len: usize,
    /// Length of the buffer of correction biases.
    pub balance_len: usize,
    /// In order of use.
    pub units: Vec<Unit>,
    /// By family, each in order of use.
    pub buckets: Vec<Bucket>,
    /// Of dense parameters and of experts; none where they rest whole.
    pub divided: [Option<Divided>; 2],
}

/// A piece of the model that runs as one: forward, and later backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Piece {
    /// The token embedding.
    Embedding,
    /// The mixer of a decoder layer, with the norm before it.
    Mixer(u32),
    /// The feed-forward block of a decoder layer, with the norm before it.
    FeedForward(u32),
    /// Final norm, head and loss, and the depths of multi-token prediction.
    Head,
}

/// The pieces of a model, in the order of a forward pass.
pub fn pieces(model: &Model) -> Vec<Piece> {
    pieces_of(model, &[(0..model.layers.len() as u32).collect()], Stage(0))
}

/// The same of one pipeline stage; `stages` are the layers of all of them.
pub fn pieces_of(model: &Model, stages: &[Vec<u32>], stage: Stage) -> Vec<Piece> {
    let number = stage.0 as usize;
    let mut all = Vec::new();
    all.extend((number == 0).then_some(Piece::Embedding));
    for &index in &stages[number] {
        let layer = &model.layers[index as usize];
        all.extend(layer.mixer.is_some().then_some(Piece::Mixer(index)));
        all.extend(layer.ffn.is_some().then_some(Piece::FeedForward(index)));
    }
    all.extend((number + 1 == stages.len()).then_some(Piece::Head));
    all
}

impl Shard {
    /// Declares what the rank at `at` has of some pieces, in the buckets of a [`Division`]. The model and layout
    /// must have passed [`crate::support::check`].
    pub fn new(
        model: &Model,
        layout: &Layout,
        at: &Coordinates,
        pieces: &[Piece],
        division: Division,
    ) -> Self {
        let parameters = Declaration::of_rank(model, layout, at).list(pieces);
        let units = Unit::of(model, pieces, division);
        let ends = bucket::shared_ends(model);
        Self::place(parameters, units, division, ends, replicas(layout))
    }

    /// The same, for whoever asks only where parameters are: those of experts are without the slices that
    /// they are made of, of which there may be hundreds.
    pub(crate) fn unsliced(
        model: &Model,
        layout: &Layout,
        at: &Coordinates,
        pieces: &[Piece],
        division: Division,
    ) -> Self {
        let declaration = Declaration::of_rank(model, layout, at).unsliced();
        Self::place(
            declaration.list(pieces),
            Unit::of(model, pieces, division),
            division,
            bucket::shared_ends(model),
            replicas(layout),
        )
    }

    /// The whole model on one rank.
    pub fn whole(model: &Model) -> Self {
        let pieces = pieces(model);
        let parameters = Declaration::of_whole(model).list(&pieces);
        let division = Division::Whole;
        let units = Unit::of(model, &pieces, division);
        Self::place(parameters, units, division, [false; 2], [1, 1])
    }

    /// Orders parameters and gives each its place: bucket by bucket, and in each by treatment. `ends` says whether
    /// embedding and head have matrices that other units use too.
    fn place(
        mut parameters: Vec<Parameter>,
        units: Vec<Unit>,
        division: Division,
        ends: [bool; 2],
        replicas: [usize; 2],
    ) -> Self {
        let resting = |parameter: &Parameter| parameter.len().next_multiple_of(ALIGNMENT);
        let divided = [Family::Dense, Family::Expert].map(|family| {
            let mut elements = vec![0; units.len()];
            for parameter in parameters.iter().filter(|p| p.family == family) {
                elements[Unit::with(&units, parameter)] += resting(parameter) as u64;
            }
            division.buckets(&elements)
        });
        let bucket_of = |parameter: &Parameter| {
            let unit = Unit::with(&units, parameter);
            let buckets = divided.get(parameter.family as usize);
            let found = buckets.and_then(|all| all.iter().position(|units| units.contains(&unit)));
            found.unwrap_or(0)
        };
        parameters.sort_by_key(|p| (p.family, bucket_of(p), treatment(p), p.layer));
        let numbers: Vec<usize> = parameters.iter().map(bucket_of).collect();
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut end = [0_usize; 3];
        let mut rest = parameters.iter_mut().zip(numbers).peekable();
        for (family, units) in [Family::Dense, Family::Expert].into_iter().zip(&divided) {
            for (number, units) in units.iter().enumerate() {
                let end = &mut end[family as usize];
                let start = *end;
                while let Some((parameter, _)) =
                    rest.next_if(|(p, own)| (p.family, *own) == (family, number))
                {
                    parameter.offset = *end;
                    *end += resting(parameter);
                }
                let grain = ALIGNMENT * replicas[family as usize];
                *end = start + (*end - start).next_multiple_of(grain);
                buckets.push(Bucket {
                    family,
                    range: start..*end,
                    units: units.clone(),
                });
            }
        }
        for (parameter, _) in rest {
            parameter.offset = end[2];
            end[2] += resting(parameter);
        }
        let divided = [Family::Dense, Family::Expert].map(|family| {
            let ranks = replicas[family as usize];
            let Division::Sharded(turns) = division else {
                return None;
            };
            let mut whole = vec![0; units.len()];
            for bucket in buckets.iter().filter(|bucket| bucket.family == family) {
                whole[bucket.units.start] = bucket.range.len() as u64;
            }
            let alone = units.iter().map(|unit| match unit {
                Unit::Embedding => ends[0],
                Unit::Layer(_) => false,
                Unit::Head => ends[1],
            });
            let alone: Vec<bool> = alone.collect();
            let all = [turns.weights, turns.grads].map(|turns| {
                let (of_units, sizes) = bucket::buffers(&whole, &alone, turns);
                (
                    of_units,
                    sizes.into_iter().map(|len| len as usize).collect(),
                )
            });
            let [(of_weights, weights), (of_grads, grads)] = all;
            (ranks > 1).then_some(Divided {
                ranks,
                buffers: [weights, grads],
                of_units: [of_weights, of_grads],
            })
        });
        Self {
            divided,
            parameters,
            dense_len: end[0],
            expert_len: end[1],
            balance_len: end[2],
            units,
            buckets,
        }
    }

    /// Where a family is whole that rests divided; none where it rests whole.
    pub fn divided(&self, family: Family) -> Option<&Divided> {
        self.divided.get(family as usize)?.as_ref()
    }

    /// The bucket that has the elements of a parameter; none where it has none, or no gradient.
    pub fn bucket_of(&self, parameter: &Parameter) -> Option<&Bucket> {
        let own = |bucket: &&Bucket| {
            bucket.family == parameter.family && bucket.range.contains(&parameter.offset)
        };
        let is_there = !parameter.is_empty();
        self.buckets.iter().filter(|_| is_there).find(own)
    }

    /// The parameters of a bucket, in order.
    pub fn in_bucket<'a>(&'a self, bucket: &'a Bucket) -> impl Iterator<Item = &'a Parameter> {
        let own = self.family(bucket.family);
        own.filter(|parameter| bucket.range.contains(&parameter.offset))
    }

    /// Parameters of one family.
    pub fn family(&self, family: Family) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(move |p| p.family == family)
    }

    /// Length of a family's flat buffer.
    pub fn buffer_len(&self, family: Family) -> usize {
        match family {
            Family::Dense => self.dense_len,
            Family::Expert => self.expert_len,
            Family::Balance => self.balance_len,
        }
    }

    /// The parameter for a purpose; a programmer error if the rank has none.
    pub fn find(&self, layer: Option<u32>, part: Part) -> &Parameter {
        self.parameters
            .iter()
            .find(|p| p.layer == layer && p.part == part)
            .unwrap_or_else(|| panic!("no {part:?} of layer {layer:?} in this shard"))
    }

    /// The contiguous range of a bucket of the dense buffer that every TP rank holds in full.
    pub fn replicated_range(&self, bucket: &Bucket) -> Range<usize> {
        let mut replicated = self
            .in_bucket(bucket)
            .filter(|p| p.spread == Spread::Replicated)
            .map(Parameter::range);
        match replicated.next() {
            None => 0..0,
            Some(first) => {
                let end = replicated.last().map_or(first.end, |last| last.end);
                first.start..end
            }
        }
    }
}

/// Replicas of dense parameters and of experts.
fn replicas(layout: &Layout) -> [usize; 2] {
    [layout.dp() * layout.cp(), layout.edp()].map(|count| count as usize)
}

/// Every tensor of the model, by its name in checkpoints.
pub fn global_tensors(model: &Model) -> Vec<GlobalTensor> {
    let shard = Shard::whole(model);
    let slices = shard.parameters.into_iter().flat_map(|p| p.slices);
    let mut all: Vec<GlobalTensor> = slices
        .map(|slice| GlobalTensor {
            name: slice.tensor,
            dims: slice.dims,
        })
        .collect();
    all.sort();
    // Of several experts there may be one.
    all.dedup();
    all
}

/// The order of treatments in the dense buffer.
fn treatment(parameter: &Parameter) -> u8 {
    let vector = u8::from(!parameter.decays());
    match parameter.spread {
        Spread::Split => vector,
        Spread::SharedBy(_) => 2 + vector,
        Spread::Replicated => 4 + vector,
    }
}
