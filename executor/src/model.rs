//! [`Shard`]: what one rank holds of a model, declared once.
//!
//! Every parameter of the rank is listed with its shape, its place in the rank's flat buffers and
//! the rectangles of global tensors (Hugging Face names) it is made of. Initialization, loading,
//! saving, the optimizer and the tests all read this one list. It is not storage: buffers belong to
//! [`crate::store`]; and it computes no groups: coordinates come from `planner`'s mesh.
//!
//! The flat buffer of the dense family is ordered so that each treatment is one contiguous range:
//! matrices split over TP, then key/value matrices that several TP ranks share, then what every TP
//! rank holds in full (router matrices, then the one-dimensional norms).

use std::ops::Range;

use moefold_planner::layout::Layout;
use moefold_planner::mesh::Coordinates;
use moefold_planner::model::{Ffn, Gqa, Mixer, Model, Moe, QkNorm};

use crate::weights::{GlobalTensor, Region};

/// Parameters start at multiples of this many elements: a cache line of f32.
const ALIGNMENT: usize = 16;

/// Which buffer, and so which data-parallel group, a parameter belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Everything but routed experts: reduced and sharded over `dp-cp`.
    Dense,
    /// Routed experts: reduced and sharded over `edp`.
    Expert,
}

/// What a parameter is for. Layers ask for their weights by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Token embedding `[vocab/tp, hidden]`; also the head where embeddings are tied.
    Embedding,
    /// Norm before the mixer `[hidden]`.
    InputNorm,
    /// Query projection `[heads/tp * d, hidden]`.
    Query,
    /// Key projection `[kv_heads/tp * d, hidden]`.
    Key,
    /// Value projection `[kv_heads/tp * d, hidden]`.
    Value,
    /// Norm of query heads `[d]`.
    QueryNorm,
    /// Norm of key heads `[d]`.
    KeyNorm,
    /// Output projection `[hidden, heads/tp * d]`.
    Output,
    /// Norm before the feed-forward block `[hidden]`.
    PostNorm,
    /// Router `[experts, hidden]`.
    Router,
    /// Gate rows over up rows of every local expert `[experts/ep, 2*f/etp, hidden]`, or of the
    /// dense MLP `[2*f/tp, hidden]`.
    GateUp,
    /// Down projection `[experts/ep, hidden, f/etp]`, or of the dense MLP `[hidden, f/tp]`.
    Down,
    /// Norm before the head `[hidden]`.
    FinalNorm,
    /// Output head `[vocab/tp, hidden]`.
    Head,
}

/// How TP ranks relate to a parameter.
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
/// A one-dimensional tensor counts as `[len, 1]`.
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
    /// Whether this rank is the one of its TP group that counts it in sums over the model.
    pub counted: bool,
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

    /// Whether weight decay applies: to tensors of two or more dimensions.
    pub fn decays(&self) -> bool {
        self.dims.len() >= 2
    }
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
}

/// What a rank of the pipeline holds of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// Decoder layers, in order.
    pub layers: Vec<u32>,
    /// Whether the embedding is here.
    pub embedding: bool,
    /// Whether final norm, head and loss are here.
    pub head: bool,
}

impl Holding {
    /// The whole model, as without a pipeline.
    pub fn whole(model: &Model) -> Self {
        Self {
            layers: (0..model.layers.len() as u32).collect(),
            embedding: true,
            head: true,
        }
    }
}

impl Shard {
    /// Declares the shard of the rank at `at`. The model and layout must have passed
    /// [`crate::support::check`].
    pub fn new(model: &Model, layout: &Layout, at: &Coordinates, holding: &Holding) -> Self {
        let replicas = [layout.dp() * layout.cp(), layout.edp()];
        let list = Declaration {
            model,
            hidden: model.hidden as usize,
            tp: layout.tp() as usize,
            tp_rank: at.tp as usize,
            ep: layout.ep() as usize,
            ep_rank: at.ep as usize,
            etp: layout.etp() as usize,
            etp_rank: at.etp as usize,
            parameters: Vec::new(),
        };
        Self::declare(list, holding, replicas.map(|count| count as usize))
    }

    /// The whole model on one rank.
    pub fn whole(model: &Model) -> Self {
        let list = Declaration {
            model,
            hidden: model.hidden as usize,
            tp: 1,
            tp_rank: 0,
            ep: 1,
            ep_rank: 0,
            etp: 1,
            etp_rank: 0,
            parameters: Vec::new(),
        };
        Self::declare(list, &Holding::whole(model), [1, 1])
    }

    fn declare(mut list: Declaration<'_>, holding: &Holding, replicas: [usize; 2]) -> Self {
        let model = list.model;
        if holding.embedding || (holding.head && model.tied_embeddings) {
            list.vocabulary(Part::Embedding, "model.embed_tokens.weight");
        }
        for &layer in &holding.layers {
            list.layer(layer);
        }
        if holding.head {
            list.norm(
                None,
                Part::FinalNorm,
                "model.norm.weight".to_owned(),
                list.hidden,
            );
            if !model.tied_embeddings {
                list.vocabulary(Part::Head, "lm_head.weight");
            }
        }
        let mut parameters = list.parameters;
        parameters.sort_by_key(|p| (p.family, treatment(p), p.layer));
        let mut end = [0_usize; 2];
        for parameter in &mut parameters {
            let end = &mut end[parameter.family as usize];
            parameter.offset = *end;
            *end = (*end + parameter.len()).next_multiple_of(ALIGNMENT);
        }
        Self {
            parameters,
            dense_len: end[0].next_multiple_of(ALIGNMENT * replicas[0]),
            expert_len: end[1].next_multiple_of(ALIGNMENT * replicas[1]),
        }
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
        }
    }

    /// The parameter for a purpose; a programmer error if the rank has none.
    pub fn find(&self, layer: Option<u32>, part: Part) -> &Parameter {
        self.parameters
            .iter()
            .find(|p| p.layer == layer && p.part == part)
            .unwrap_or_else(|| panic!("no {part:?} of layer {layer:?} in this shard"))
    }

    /// The contiguous range of the dense buffer that every TP rank holds in full.
    pub fn replicated_range(&self) -> Range<usize> {
        let mut replicated = self
            .family(Family::Dense)
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
    all
}

/// The order of treatments in the dense buffer.
fn treatment(parameter: &Parameter) -> u8 {
    match parameter.spread {
        Spread::Split => 0,
        Spread::SharedBy(_) => 1,
        Spread::Replicated if parameter.decays() => 2,
        Spread::Replicated => 3,
    }
}

/// Collects parameters; offsets are assigned once all are known.
struct Declaration<'a> {
    model: &'a Model,
    hidden: usize,
    tp: usize,
    tp_rank: usize,
    ep: usize,
    ep_rank: usize,
    etp: usize,
    etp_rank: usize,
    parameters: Vec<Parameter>,
}

impl Declaration<'_> {
    fn push(
        &mut self,
        layer: Option<u32>,
        part: Part,
        dims: Vec<usize>,
        spread: Spread,
        slices: Vec<Slice>,
    ) {
        let family = match part {
            Part::GateUp | Part::Down if dims.len() == 3 => Family::Expert,
            _ => Family::Dense,
        };
        let counted = family == Family::Expert
            || match spread {
                Spread::Split => true,
                Spread::SharedBy(ranks) => self.tp_rank.is_multiple_of(ranks),
                Spread::Replicated => self.tp_rank == 0,
            };
        let parameter = Parameter {
            layer,
            part,
            family,
            dims,
            offset: 0,
            slices,
            spread,
            counted,
        };
        let held: usize = parameter.slices.iter().map(Slice::len).sum();
        assert_eq!(
            held,
            parameter.len(),
            "{part:?} is not covered by its slices"
        );
        self.parameters.push(parameter);
    }

    /// Rows of a vocabulary matrix: equal blocks, the last ranks taking what is left.
    fn vocabulary(&mut self, part: Part, tensor: &str) {
        let rows = vocabulary_rows(self.model.vocab_size as usize, self.tp, self.tp_rank);
        let dims = vec![self.model.vocab_size as usize, self.hidden];
        let slice = Slice {
            tensor: tensor.to_owned(),
            dims,
            rows: rows.clone(),
            cols: 0..self.hidden,
            at: 0,
        };
        self.push(
            None,
            part,
            vec![rows.len(), self.hidden],
            Spread::Split,
            vec![slice],
        );
    }

    fn norm(&mut self, layer: Option<u32>, part: Part, tensor: String, len: usize) {
        let slice = Slice {
            tensor,
            dims: vec![len],
            rows: 0..len,
            cols: 0..1,
            at: 0,
        };
        self.push(layer, part, vec![len], Spread::Replicated, vec![slice]);
    }

    /// A matrix split by rows or columns.
    fn matrix(
        &mut self,
        layer: u32,
        part: Part,
        tensor: String,
        dims: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
        spread: Spread,
    ) {
        let local = vec![rows.len(), cols.len()];
        let slice = Slice {
            tensor,
            dims: dims.to_vec(),
            rows,
            cols,
            at: 0,
        };
        self.push(Some(layer), part, local, spread, vec![slice]);
    }

    fn layer(&mut self, layer: u32) {
        let prefix = format!("model.layers.{layer}");
        let description = &self.model.layers[layer as usize];
        let norm = |name: &str| format!("{prefix}.{name}.weight");
        if let Some(Mixer::Gqa(gqa)) = &description.mixer {
            self.norm(
                Some(layer),
                Part::InputNorm,
                norm("input_layernorm"),
                self.hidden,
            );
            self.attention(layer, &format!("{prefix}.self_attn"), gqa);
        }
        match &description.ffn {
            Some(ffn) => {
                self.norm(
                    Some(layer),
                    Part::PostNorm,
                    norm("post_attention_layernorm"),
                    self.hidden,
                );
                match ffn {
                    Ffn::Dense(mlp) => {
                        self.dense(layer, &format!("{prefix}.mlp"), mlp.width as usize)
                    }
                    Ffn::Moe(moe) => self.moe(layer, &prefix, moe),
                }
            }
            None => {}
        }
    }

    fn attention(&mut self, layer: u32, prefix: &str, gqa: &Gqa) {
        let (h, d) = (self.hidden, gqa.head_dim as usize);
        let (heads, kv_heads) = (gqa.heads as usize, gqa.kv_heads as usize);
        let name = |projection: &str| format!("{prefix}.{projection}.weight");
        let queries = block(heads * d, self.tp, self.tp_rank);
        let held = kv_heads_of(kv_heads, self.tp, self.tp_rank);
        let keys = held.start * d..held.end * d;
        let spread = if self.tp > kv_heads {
            Spread::SharedBy(self.tp / kv_heads)
        } else {
            Spread::Split
        };
        self.matrix(
            layer,
            Part::Query,
            name("q_proj"),
            [heads * d, h],
            queries.clone(),
            0..h,
            Spread::Split,
        );
        self.matrix(
            layer,
            Part::Key,
            name("k_proj"),
            [kv_heads * d, h],
            keys.clone(),
            0..h,
            spread,
        );
        self.matrix(
            layer,
            Part::Value,
            name("v_proj"),
            [kv_heads * d, h],
            keys,
            0..h,
            spread,
        );
        self.matrix(
            layer,
            Part::Output,
            name("o_proj"),
            [h, heads * d],
            0..h,
            queries,
            Spread::Split,
        );
        if gqa.qk_norm == QkNorm::PerHead {
            self.norm(Some(layer), Part::QueryNorm, name("q_norm"), d);
            self.norm(Some(layer), Part::KeyNorm, name("k_norm"), d);
        }
    }

    fn dense(&mut self, layer: u32, prefix: &str, width: usize) {
        let h = self.hidden;
        let held = block(width, self.tp, self.tp_rank);
        let half = |projection: &str, at: usize| Slice {
            tensor: format!("{prefix}.{projection}.weight"),
            dims: vec![width, h],
            rows: held.clone(),
            cols: 0..h,
            at,
        };
        let slices = vec![half("gate_proj", 0), half("up_proj", held.len() * h)];
        self.push(
            Some(layer),
            Part::GateUp,
            vec![2 * held.len(), h],
            Spread::Split,
            slices,
        );
        let down = format!("{prefix}.down_proj.weight");
        self.matrix(
            layer,
            Part::Down,
            down,
            [h, width],
            0..h,
            held,
            Spread::Split,
        );
    }

    fn moe(&mut self, layer: u32, prefix: &str, moe: &Moe) {
        let names = ExpertNames::of(&self.model.model_type);
        let prefix = format!("{prefix}.{}", names.block);
        let (h, experts) = (self.hidden, moe.experts as usize);
        let router = format!("{prefix}.gate.weight");
        self.matrix(
            layer,
            Part::Router,
            router,
            [experts, h],
            0..experts,
            0..h,
            Spread::Replicated,
        );

        let width = moe.expert.width as usize;
        let held = block(width, self.etp, self.etp_rank);
        let local = block(experts, self.ep, self.ep_rank);
        let f = held.len();
        let mut gate_up = Vec::with_capacity(2 * local.len());
        let mut down = Vec::with_capacity(local.len());
        for (index, expert) in local.clone().enumerate() {
            let name = |projection: &str| format!("{prefix}.experts.{expert}.{projection}.weight");
            let half = |projection, at| Slice {
                tensor: name(projection),
                dims: vec![width, h],
                rows: held.clone(),
                cols: 0..h,
                at,
            };
            gate_up.push(half(names.gate, 2 * index * f * h));
            gate_up.push(half(names.up, (2 * index + 1) * f * h));
            down.push(Slice {
                tensor: name(names.down),
                dims: vec![h, width],
                rows: 0..h,
                cols: held.clone(),
                at: index * h * f,
            });
        }
        self.push(
            Some(layer),
            Part::GateUp,
            vec![local.len(), 2 * f, h],
            Spread::Split,
            gate_up,
        );
        self.push(
            Some(layer),
            Part::Down,
            vec![local.len(), h, f],
            Spread::Split,
            down,
        );
    }
}

/// How a family of checkpoints names its experts.
struct ExpertNames {
    block: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
}

impl ExpertNames {
    fn of(model_type: &str) -> Self {
        match model_type {
            "mixtral" => Self {
                block: "block_sparse_moe",
                gate: "w1",
                up: "w3",
                down: "w2",
            },
            _ => Self {
                block: "mlp",
                gate: "gate_proj",
                up: "up_proj",
                down: "down_proj",
            },
        }
    }
}

/// The `index`-th of `parts` equal blocks of `0..whole`.
fn block(whole: usize, parts: usize, index: usize) -> Range<usize> {
    assert!(
        whole.is_multiple_of(parts),
        "{whole} does not divide into {parts}"
    );
    let size = whole / parts;
    index * size..(index + 1) * size
}

/// Vocabulary entries of a TP rank: blocks of `ceil(vocab / tp)`, the last ranks taking less.
pub fn vocabulary_rows(vocab: usize, tp: usize, tp_rank: usize) -> Range<usize> {
    let size = vocab.div_ceil(tp);
    (tp_rank * size).min(vocab)..((tp_rank + 1) * size).min(vocab)
}

/// Key/value heads of a TP rank. With more ranks than heads, neighbours share one.
pub fn kv_heads_of(kv_heads: usize, tp: usize, tp_rank: usize) -> Range<usize> {
    if tp <= kv_heads {
        block(kv_heads, tp, tp_rank)
    } else {
        assert!(
            tp.is_multiple_of(kv_heads),
            "{tp} TP ranks cannot share {kv_heads} heads evenly"
        );
        let head = tp_rank * kv_heads / tp;
        head..head + 1
    }
}
