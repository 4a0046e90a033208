//! Lists a rank's parameters, tensor by tensor: the one place that knows checkpoint names and how
//! degrees cut each matrix.

use std::ops::Range;

use moefold_planner::layout::Layout;
use moefold_planner::mesh::Coordinates;
use moefold_planner::model::{Ffn, Gqa, Mixer, Mla, Model, Moe, QkNorm};

use super::{Family, Form, Parameter, Part, Piece, Slice, Spread};

/// Collects parameters; offsets are assigned once all are known.
pub(super) struct Declaration<'a> {
    pub(super) model: &'a Model,
    hidden: usize,
    tp: usize,
    tp_rank: usize,
    ep: usize,
    ep_rank: usize,
    etp: usize,
    etp_rank: usize,
    /// Whether the slices of experts are listed.
    sliced: bool,
    parameters: Vec<Parameter>,
}

impl<'a> Declaration<'a> {
    /// An empty list for the rank at `at`.
    pub(super) fn of_rank(model: &'a Model, layout: &Layout, at: &Coordinates) -> Self {
        Self {
            tp: layout.tp() as usize,
            tp_rank: at.tp as usize,
            ep: layout.ep() as usize,
            ep_rank: at.ep as usize,
            etp: layout.etp() as usize,
            etp_rank: at.etp as usize,
            ..Self::of_whole(model)
        }
    }

    /// An empty list for a rank alone.
    pub(super) fn of_whole(model: &'a Model) -> Self {
        Self {
            model,
            hidden: model.hidden as usize,
            tp: 1,
            tp_rank: 0,
            ep: 1,
            ep_rank: 0,
            etp: 1,
            etp_rank: 0,
            sliced: true,
            parameters: Vec::new(),
        }
    }

    /// The same list, the parameters of experts without their slices.
    pub(super) fn unsliced(self) -> Self {
        Self {
            sliced: false,
            ..self
        }
    }

    /// Lists the parameters of some pieces, in their order; offsets are still zero.
    pub(super) fn list(mut self, pieces: &[Piece]) -> Vec<Parameter> {
        let tied = self.model.tied_embeddings;
        let [first, last] = [Piece::Embedding, Piece::Head].map(|end| pieces.contains(&end));
        // A head that shares the embedding's matrix has it beside it, or has it alone; so have depths of
        // multi-token prediction, which embed tokens.
        let shared = tied || !self.model.mtp.is_empty();
        if first || (last && shared) {
            self.vocabulary(Part::Embedding, "model.embed_tokens.weight");
            if let Some(embedding) = self.parameters.last_mut() {
                embedding.at_both_ends = shared && first != last;
                embedding.counted &= first;
            }
        }
        for piece in pieces {
            match *piece {
                Piece::Embedding => {}
                Piece::Mixer(layer) => self.mixer(layer),
                Piece::FeedForward(layer) => self.feed_forward(layer),
                Piece::Head => {
                    let norm = "model.norm.weight".to_owned();
                    self.norm(None, Part::FinalNorm, norm, self.hidden);
                    if !tied {
                        self.vocabulary(Part::Head, "lm_head.weight");
                    }
                    self.depths();
                }
            }
        }
        self.parameters
    }

    /// The depths of multi-token prediction, by the names that DeepSeek-V3's checkpoint has for them: their
    /// layers follow those of the model.
    fn depths(&mut self) {
        let first = self.model.layers.len();
        for layer in first..first + self.model.mtp.len() {
            let (layer, h) = (layer as u32, self.hidden);
            let name = |tensor: &str| format!("model.layers.{layer}.{tensor}.weight");
            self.norm(Some(layer), Part::DepthEmbeddingNorm, name("enorm"), h);
            self.norm(Some(layer), Part::DepthHiddenNorm, name("hnorm"), h);
            let projection = rectangle(name("eh_proj"), [h, 2 * h], 0..h, 0..2 * h);
            self.matrix(layer, Part::DepthProjection, Spread::Replicated, projection);
            self.mixer(layer);
            self.feed_forward(layer);
            let norm = name("shared_head.norm");
            self.norm(Some(layer), Part::DepthNorm, norm, h);
        }
    }

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
            Part::GateUpBias | Part::DownBias => Family::Expert,
            Part::CorrectionBias => Family::Balance,
            _ => Family::Dense,
        };
        let counted = match (spread, family) {
            (Spread::Split, _) => true,
            (Spread::SharedBy(ranks), _) => self.tp_rank.is_multiple_of(ranks),
            (Spread::Replicated, Family::Expert) => self.etp_rank == 0,
            (Spread::Replicated, _) => self.tp_rank == 0,
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
            at_both_ends: false,
        };
        let held: usize = parameter.slices.iter().map(Slice::len).sum();
        assert!(
            held == parameter.len() || (family == Family::Expert && !self.sliced),
            "{part:?} of {} is covered by slices of {held}",
            parameter.len()
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

    /// A vector that every TP rank holds: a norm's weight, a bias of what was summed up.
    fn norm(&mut self, layer: Option<u32>, part: Part, tensor: String, len: usize) {
        self.vector(layer, part, Spread::Replicated, tensor, (len, 0..len));
    }

    /// Some elements of a vector of `len`.
    fn vector(
        &mut self,
        layer: Option<u32>,
        part: Part,
        spread: Spread,
        tensor: String,
        (len, held): (usize, Range<usize>),
    ) {
        let slice = Slice {
            tensor,
            dims: vec![len],
            rows: held.clone(),
            cols: 0..1,
            at: 0,
        };
        self.push(layer, part, vec![held.len()], spread, vec![slice]);
    }

    /// A matrix held as one rectangle.
    fn matrix(&mut self, layer: u32, part: Part, spread: Spread, slice: Slice) {
        let dims = vec![slice.rows.len(), slice.cols.len()];
        self.push(Some(layer), part, dims, spread, vec![slice]);
    }

    fn mixer(&mut self, layer: u32) {
        let prefix = format!("model.layers.{layer}");
        let Some(mixer) = &self.model.layer(layer).mixer else {
            return;
        };
        let norm = format!("{prefix}.input_layernorm.weight");
        self.norm(Some(layer), Part::InputNorm, norm, self.hidden);
        let prefix = format!("{prefix}.self_attn");
        match mixer {
            Mixer::Gqa(gqa) => self.attention(layer, &prefix, gqa),
            Mixer::Mla(mla) => self.latent(layer, &prefix, mla),
            _ => unreachable!("support::check admits no other mixer"),
        }
    }

    fn feed_forward(&mut self, layer: u32) {
        let prefix = format!("model.layers.{layer}");
        if let Some(ffn) = &self.model.layer(layer).ffn {
            let norm = format!("{prefix}.post_attention_layernorm.weight");
            self.norm(Some(layer), Part::PostNorm, norm, self.hidden);
            match ffn {
                Ffn::Dense(mlp) => {
                    let parts = [Part::GateUp, Part::Down];
                    self.dense(layer, parts, &format!("{prefix}.mlp"), mlp.width as usize);
                }
                Ffn::Moe(moe) => self.moe(layer, &prefix, moe),
            }
        }
    }

    fn attention(&mut self, layer: u32, prefix: &str, gqa: &Gqa) {
        let (h, d) = (self.hidden, gqa.head_dim as usize);
        let (heads, kv_heads) = (gqa.heads as usize, gqa.kv_heads as usize);
        let name = |projection: &str| format!("{prefix}.{projection}.weight");
        let queries = block(heads * d, self.tp, self.tp_rank);
        let held = kv_heads_of(kv_heads, self.tp, self.tp_rank);
        let keys = held.start * d..held.end * d;
        let shared = if self.tp > kv_heads {
            Spread::SharedBy(self.tp / kv_heads)
        } else {
            Spread::Split
        };
        let query = rectangle(name("q_proj"), [heads * d, h], queries.clone(), 0..h);
        let key = rectangle(name("k_proj"), [kv_heads * d, h], keys.clone(), 0..h);
        let value = rectangle(name("v_proj"), [kv_heads * d, h], keys.clone(), 0..h);
        let output = rectangle(name("o_proj"), [h, heads * d], 0..h, queries.clone());
        let (queries, keys) = ((heads * d, queries), (kv_heads * d, keys));
        self.matrix(layer, Part::Query, Spread::Split, query);
        self.matrix(layer, Part::Key, shared, key);
        self.matrix(layer, Part::Value, shared, value);
        self.matrix(layer, Part::Output, Spread::Split, output);
        if gqa.qkv_bias {
            let split = Spread::Split;
            for (part, spread, projection, held) in [
                (Part::QueryBias, split, "q_proj", queries.clone()),
                (Part::KeyBias, shared, "k_proj", keys.clone()),
                (Part::ValueBias, shared, "v_proj", keys.clone()),
            ] {
                let tensor = format!("{prefix}.{projection}.bias");
                self.vector(Some(layer), part, spread, tensor, held);
            }
        }
        if gqa.out_bias {
            let bias = format!("{prefix}.o_proj.bias");
            self.norm(Some(layer), Part::OutputBias, bias, h);
        }
        if gqa.sinks {
            let held = (heads, block(heads, self.tp, self.tp_rank));
            let sinks = format!("{prefix}.sinks");
            self.vector(Some(layer), Part::Sinks, Spread::Split, sinks, held);
        }
        let (query, key) = (name("q_norm"), name("k_norm"));
        match gqa.qk_norm {
            QkNorm::PerHead => {
                self.norm(Some(layer), Part::QueryNorm, query, d);
                self.norm(Some(layer), Part::KeyNorm, key, d);
            }
            QkNorm::Full => {
                self.vector(Some(layer), Part::QueryNorm, Spread::Split, query, queries);
                self.vector(Some(layer), Part::KeyNorm, shared, key, keys);
            }
            QkNorm::None | QkNorm::Weightless => {}
        }
    }

    /// Latent attention: up-projections split by heads, the rest whole on every TP rank.
    fn latent(&mut self, layer: u32, prefix: &str, mla: &Mla) {
        let heads = mla.heads as usize;
        let (nope, rope) = (mla.qk_nope_head_dim as usize, mla.qk_rope_head_dim as usize);
        let (values, compressed) = (mla.v_head_dim as usize, mla.kv_lora_rank as usize);
        let name = |tensor: &str| format!("{prefix}.{tensor}.weight");
        let h = self.hidden;
        let whole =
            |tensor: &str, dims: [usize; 2]| rectangle(name(tensor), dims, 0..dims[0], 0..dims[1]);
        let (query, input) = match mla.q_lora_rank {
            None => ("q_proj", h),
            Some(rank) => {
                let rank = rank as usize;
                let down = whole("q_a_proj", [rank, h]);
                self.matrix(layer, Part::QueryDown, Spread::Replicated, down);
                self.norm(Some(layer), Part::QueryNorm, name("q_a_layernorm"), rank);
                ("q_b_proj", rank)
            }
        };
        let down = whole("kv_a_proj_with_mqa", [compressed + rope, h]);
        self.matrix(layer, Part::KvDown, Spread::Replicated, down);
        let norm = name("kv_a_layernorm");
        self.norm(Some(layer), Part::KvNorm, norm, compressed);

        // Rows of this rank's heads, of so many each.
        let (tp, tp_rank) = (self.tp, self.tp_rank);
        let of_heads = |width: usize| block(heads * width, tp, tp_rank);
        let by_heads = |tensor: &str, width: usize, input: usize| {
            let dims = [heads * width, input];
            rectangle(name(tensor), dims, of_heads(width), 0..input)
        };
        let query = by_heads(query, nope + rope, input);
        let up = by_heads("kv_b_proj", nope + values, compressed);
        let output = rectangle(name("o_proj"), [h, heads * values], 0..h, of_heads(values));
        self.matrix(layer, Part::Query, Spread::Split, query);
        self.matrix(layer, Part::KvUp, Spread::Split, up);
        self.matrix(layer, Part::Output, Spread::Split, output);
    }

    /// An MLP whose width is split over TP.
    fn dense(&mut self, layer: u32, parts: [Part; 2], prefix: &str, width: usize) {
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
            parts[0],
            vec![2 * held.len(), h],
            Spread::Split,
            slices,
        );
        let down = rectangle(format!("{prefix}.down_proj.weight"), [h, width], 0..h, held);
        self.matrix(layer, parts[1], Spread::Split, down);
    }

    fn moe(&mut self, layer: u32, prefix: &str, moe: &Moe) {
        let names = ExpertNames::of(&self.model.model_type);
        let prefix = format!("{prefix}.{}", names.block);
        let (h, experts) = (self.hidden, moe.experts as usize);
        let router = rectangle(
            format!("{prefix}.{}.weight", names.router),
            [experts, h],
            0..experts,
            0..h,
        );
        self.matrix(layer, Part::Router, Spread::Replicated, router);
        if moe.router.bias {
            let bias = format!("{prefix}.{}.bias", names.router);
            self.norm(Some(layer), Part::RouterBias, bias, experts);
        }
        if moe.router.correction_bias {
            let bias = format!("{prefix}.gate.e_score_correction_bias");
            self.norm(Some(layer), Part::CorrectionBias, bias, experts);
        }
        if let Some(shared) = &moe.shared {
            let parts = [Part::SharedGateUp, Part::SharedDown];
            let block = format!("{prefix}.{}", names.shared);
            self.dense(layer, parts, &block, shared.mlp.width as usize);
            if shared.gated_output {
                let gate = format!("{block}_gate.weight");
                let gate = rectangle(gate, [1, h], 0..1, 0..h);
                self.matrix(layer, Part::SharedGate, Spread::Replicated, gate);
            }
        }

        match Form::of(moe) {
            Form::Apart => self.experts_apart(layer, &prefix, &names, moe),
            Form::Together => self.experts_together(layer, &format!("{prefix}.experts"), moe),
        }
    }

    /// Experts whose matrices are tensors of one expert each.
    fn experts_apart(&mut self, layer: u32, prefix: &str, names: &ExpertNames, moe: &Moe) {
        let (h, experts) = (self.hidden, moe.experts as usize);
        let width = moe.expert.width as usize;
        let held = block(width, self.etp, self.etp_rank);
        let local = block(experts, self.ep, self.ep_rank);
        let f = held.len();
        let sliced = if self.sliced { local.clone() } else { 0..0 };
        let mut gate_up = Vec::with_capacity(2 * sliced.len());
        let mut down = Vec::with_capacity(sliced.len());
        for (index, expert) in sliced.enumerate() {
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

    /// Experts that are tensors of all of them, with biases. Those of the second product are whole on every ETP
    /// rank, as the sum over these is.
    fn experts_together(&mut self, layer: u32, prefix: &str, moe: &Moe) {
        let (h, experts) = (self.hidden, moe.experts as usize);
        let width = moe.expert.width as usize;
        let held = block(width, self.etp, self.etp_rank);
        let local = block(experts, self.ep, self.ep_rank);
        let (count, f) = (local.len(), held.len());
        let in_turn = 2 * held.start..2 * held.end;
        let slice = |tensor: &str, dims: &[usize], rows, cols, at| Slice {
            tensor: format!("{prefix}.{tensor}"),
            dims: dims.to_vec(),
            rows,
            cols,
            at,
        };
        let whole = |slice: Slice| if self.sliced { vec![slice] } else { Vec::new() };
        let dims = [experts, h, 2 * width];
        let rows = local.start * h..local.end * h;
        let gate_up = whole(slice("gate_up_proj", &dims, rows, in_turn.clone(), 0));
        let dims = [experts, 2 * width];
        let gate_up_bias = whole(slice("gate_up_proj_bias", &dims, local.clone(), in_turn, 0));
        let dims = [experts, width, h];
        let of_expert = |(index, expert): (usize, usize)| {
            let rows = expert * width + held.start..expert * width + held.end;
            slice("down_proj", &dims, rows, 0..h, index * f * h)
        };
        let sliced = if self.sliced { local.clone() } else { 0..0 };
        let down = sliced.enumerate().map(of_expert).collect();
        let down_bias = whole(slice("down_proj_bias", &[experts, h], local, 0..h, 0));
        let (split, all) = (Spread::Split, Spread::Replicated);
        for (part, dims, spread, slices) in [
            (Part::GateUp, vec![count, h, 2 * f], split, gate_up),
            (Part::GateUpBias, vec![count, 2 * f], split, gate_up_bias),
            (Part::Down, vec![count, f, h], split, down),
            (Part::DownBias, vec![count, h], all, down_bias),
        ] {
            self.push(Some(layer), part, dims, spread, slices);
        }
    }
}

/// How a family of checkpoints names its experts.
struct ExpertNames {
    block: &'static str,
    router: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    /// The block of the shared expert.
    shared: &'static str,
}

impl ExpertNames {
    fn of(model_type: &str) -> Self {
        match model_type {
            "mixtral" => Self {
                block: "block_sparse_moe",
                router: "gate",
                gate: "w1",
                up: "w3",
                down: "w2",
                shared: "shared_expert",
            },
            _ => Self {
                block: "mlp",
                router: if model_type == "gpt_oss" {
                    "router"
                } else {
                    "gate"
                },
                gate: "gate_proj",
                up: "up_proj",
                down: "down_proj",
                shared: if model_type == "qwen2_moe" {
                    "shared_expert"
                } else {
                    "shared_experts"
                },
            },
        }
    }
}

/// A rectangle of a matrix, alone in its parameter.
fn rectangle(tensor: String, dims: [usize; 2], rows: Range<usize>, cols: Range<usize>) -> Slice {
    Slice {
        tensor,
        dims: dims.to_vec(),
        rows,
        cols,
        at: 0,
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
fn vocabulary_rows(vocab: usize, tp: usize, tp_rank: usize) -> Range<usize> {
    let size = vocab.div_ceil(tp);
    (tp_rank * size).min(vocab)..((tp_rank + 1) * size).min(vocab)
}

/// Key/value heads of a TP rank. With more ranks than heads, neighbours share one.
fn kv_heads_of(kv_heads: usize, tp: usize, tp_rank: usize) -> Range<usize> {
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
