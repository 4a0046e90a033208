//! [`Tensors`]: the parameters of a rank as Megatron-Core makes tensors of them; and [`Dealt`]: what one replica updates where
//! whole tensors are divided over replicas.
//!
//! Muon orthogonalizes matrices (arXiv 2502.16982, section 2.1), so no replica may own a part of one. The layer-wise optimizer of
//! Megatron-Core sorts the tensors of a rank by their elements and deals them out to its replicas, there and back
//! (`LayerWiseDistributedOptimizer.shard_params` in `megatron/core/optimizer/layer_wise_optimizer.py` of 0.16.1; on main with
//! `--no-use-layer-wise-param-layout`).
//! Which tensors are matrices is said by `get_megatron_muon_optimizer` in `megatron/core/optimizer/muon.py` of 0.16.1: all of two
//! dimensions but embedding and head, routers among them. Queries, keys and values are one tensor and several matrices
//! (`muon_split_qkv`), a gate and what it multiplies are one matrix, and so is each projection of each expert. What
//! tensor-parallel ranks have of a matrix is orthogonalized by itself (`muon_tp_mode` blockwise).
//!
//! Left out: the vectors of a layer are dealt as one tensor.

use std::collections::BTreeMap;

use crate::local::Local;
use crate::model::{Ffn, Gqa, Layer, LinearMixer, Mixer, Mla, Mlp, Model, SharedKv};
use crate::shard::{self, Shard};

/// Newton-Schulz iterations of an update: Megatron-Core's `muon_num_ns_steps`, and those of arXiv 2502.16982.
pub const ITERATIONS: u64 = 5;

/// A parameter. Tensors are in order of their elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tensor {
    /// Elements.
    pub elements: u64,
    /// Rows of the matrices that are orthogonalized, each by itself: at most queries, their gates, keys and values.
    rows: [u64; 4],
    /// Columns of each.
    columns: u64,
}

impl Tensor {
    /// What Adam updates: vectors, convolutions, matrices of a vocabulary.
    pub fn plain(elements: u64) -> Self {
        Self {
            elements,
            rows: [0; 4],
            columns: 0,
        }
    }

    /// One matrix.
    pub fn matrix(rows: u64, columns: u64) -> Self {
        Self::stacked([rows, 0, 0, 0], columns)
    }

    /// Matrices of so many rows, one under the other.
    fn stacked(rows: [u64; 4], columns: u64) -> Self {
        Self {
            elements: rows.iter().sum::<u64>() * columns,
            rows,
            columns,
        }
    }

    /// Rows and columns of its matrices.
    pub fn matrices(&self) -> impl Iterator<Item = [u64; 2]> + use<> {
        let columns = self.columns;
        let rows = self.rows.into_iter().filter(|&rows| rows > 0);
        rows.map(move |rows| [rows, columns])
    }

    /// Whether it is orthogonalized.
    pub fn is_matrix(&self) -> bool {
        self.columns > 0
    }

    /// FLOPs of its iterations: of `m` rows and `n` columns, `m` at most `n`, those of `X X'`, of its square, and of that
    /// times `X`.
    fn flops(&self) -> f64 {
        let each = self.matrices().map(|[rows, columns]| {
            let (m, n) = (rows.min(columns) as f64, rows.max(columns) as f64);
            4.0 * m * m * n + 2.0 * m * m * m
        });
        ITERATIONS as f64 * each.sum::<f64>()
    }
}

/// Tensors, each with how many are alike.
pub type Counted = BTreeMap<Tensor, u64>;

fn elements<'t>(tensors: impl IntoIterator<Item = (&'t Tensor, &'t u64)>) -> u64 {
    let each = tensors.into_iter();
    each.map(|(tensor, count)| tensor.elements * count).sum()
}

/// The tensors of a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tensors {
    /// Dense ones, dealt over DP x CP.
    pub dense: Counted,
    /// Those of routed experts, dealt over EDP.
    pub experts: Counted,
}

impl Tensors {
    /// A decoder layer on one rank.
    pub fn layer(model: &Model, layer: &Layer, local: &Local) -> Self {
        let mut tensors = Self::matrices(model, layer, local);
        tensors.fill(shard::layer(model, layer, local));
        tensors
    }

    /// The embedding on one rank, which has so much of it.
    pub fn embedding(held: Shard) -> Self {
        let mut tensors = Self::default();
        tensors.fill(held);
        tensors
    }

    /// The head and the depths of multi-token prediction on one rank, which has so much of them all.
    pub fn head(model: &Model, local: &Local, held: Shard) -> Self {
        let mut tensors = Self::default();
        let hidden = model.hidden;
        let vocabulary = Tensor::plain(shard::vocab(model, local.tp) * hidden);
        tensors.put([vocabulary]);
        for depth in &model.mtp {
            tensors.add(&Self::matrices(model, depth, local), 1);
            tensors.put([Tensor::matrix(hidden.div_ceil(local.tp), 2 * hidden)]);
        }
        tensors.fill(held);
        tensors
    }

    /// Adds so many times as many.
    pub fn add(&mut self, other: &Self, times: u64) {
        let families = [
            (&mut self.dense, &other.dense),
            (&mut self.experts, &other.experts),
        ];
        for (own, other) in families {
            for (&tensor, count) in other {
                *own.entry(tensor).or_default() += count * times;
            }
        }
    }

    /// What each replica updates, over so many of dense tensors and of experts.
    pub fn dealt(&self, replicas: [u64; 2]) -> [Dealt; 2] {
        let [dense, experts] = replicas;
        [
            Dealt::new(&self.dense, dense),
            Dealt::new(&self.experts, experts),
        ]
    }

    /// Adds dense tensors.
    fn put(&mut self, tensors: impl IntoIterator<Item = Tensor>) {
        for tensor in tensors.into_iter().filter(|tensor| tensor.elements > 0) {
            *self.dense.entry(tensor).or_default() += 1;
        }
    }

    /// Adds what is missing of what the rank has, as one tensor of each family that Adam updates.
    fn fill(&mut self, held: Shard) {
        for (own, held) in [
            (&mut self.dense, held.dense()),
            (&mut self.experts, held.experts),
        ] {
            let named = elements(&*own);
            debug_assert!(named <= held, "matrices of {named} of {held} parameters");
            let rest = held.saturating_sub(named);
            if rest > 0 {
                *own.entry(Tensor::plain(rest)).or_default() += 1;
            }
        }
    }

    fn matrices(model: &Model, layer: &Layer, local: &Local) -> Self {
        let mut tensors = Self::default();
        let hidden = model.hidden;
        let mixer = match &layer.mixer {
            None => Vec::new(),
            Some(Mixer::Gqa(own)) => gqa(own, hidden, local),
            Some(Mixer::Mla(own)) => mla(own, hidden, local),
            Some(Mixer::SharedKv(own)) => shared_kv(own, hidden, local),
            Some(Mixer::Linear(own)) => linear(own, hidden, local),
        };
        tensors.put(mixer);
        match &layer.ffn {
            None => {}
            Some(Ffn::Dense(own)) => tensors.put(mlp(own, hidden, local.tp)),
            Some(Ffn::Moe(moe)) => {
                tensors.put([Tensor::matrix(moe.experts, hidden)]);
                if let Some(shared) = &moe.shared {
                    tensors.put(mlp(&shared.mlp, hidden, local.tp));
                    tensors.put(shared.gated_output.then(|| Tensor::matrix(1, hidden)));
                }
                for tensor in mlp(&moe.expert, hidden, local.etp) {
                    *tensors.experts.entry(tensor).or_default() += moe.experts.div_ceil(local.ep);
                }
            }
        }
        tensors
    }
}

/// The two projections of an MLP over so many ranks, a gate in the first.
fn mlp(mlp: &Mlp, hidden: u64, ranks: u64) -> [Tensor; 2] {
    let inner = if mlp.gated { 2 } else { 1 };
    let width = mlp.width.div_ceil(ranks);
    [
        Tensor::matrix(inner * width, hidden),
        Tensor::matrix(hidden, width),
    ]
}

fn gqa(gqa: &Gqa, hidden: u64, local: &Local) -> Vec<Tensor> {
    let queries = (gqa.heads * gqa.head_dim).div_ceil(local.tp);
    let gates = if gqa.output_gate { queries } else { 0 };
    let keys = local.kv_heads(gqa.kv_heads) * gqa.head_dim;
    vec![
        Tensor::stacked([queries, gates, keys, keys], hidden),
        Tensor::matrix(hidden, queries),
    ]
}

fn mla(mla: &Mla, hidden: u64, local: &Local) -> Vec<Tensor> {
    let of_heads = |width: u64| (mla.heads * width).div_ceil(local.tp);
    let (queries, values) = (
        of_heads(mla.qk_nope_head_dim + mla.qk_rope_head_dim),
        of_heads(mla.v_head_dim),
    );
    let mut tensors = vec![
        Tensor::matrix(mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        Tensor::matrix(
            of_heads(mla.qk_nope_head_dim + mla.v_head_dim),
            mla.kv_lora_rank,
        ),
        Tensor::matrix(hidden, values),
    ];
    match mla.q_lora_rank {
        None => tensors.push(Tensor::matrix(queries, hidden)),
        Some(rank) => tensors.extend([Tensor::matrix(rank, hidden), Tensor::matrix(queries, rank)]),
    }
    if let Some(indexer) = mla.indexer.as_ref().filter(|indexer| !indexer.shared) {
        let rank = mla.q_lora_rank.unwrap_or(hidden);
        tensors.extend([
            Tensor::matrix(indexer.heads * indexer.head_dim, rank),
            Tensor::matrix(indexer.head_dim, hidden),
            Tensor::matrix(indexer.heads, hidden),
        ]);
    }
    tensors
}

/// Of compressors only the number of parameters is known: Adam's.
fn shared_kv(shared: &SharedKv, hidden: u64, local: &Local) -> Vec<Tensor> {
    let queries = (shared.heads * shared.head_dim).div_ceil(local.tp);
    let groups = shared.o_groups.div_ceil(local.tp).max(1);
    let outputs = groups * shared.o_lora_rank;
    vec![
        Tensor::matrix(shared.q_lora_rank, hidden),
        Tensor::matrix(queries, shared.q_lora_rank),
        Tensor::matrix(shared.head_dim, hidden),
        Tensor::matrix(outputs, queries / groups),
        Tensor::matrix(hidden, outputs),
    ]
}

/// Convolutions have three dimensions.
fn linear(linear: &LinearMixer, hidden: u64, local: &Local) -> Vec<Tensor> {
    vec![
        Tensor::matrix(linear.in_proj.div_ceil(local.tp), hidden),
        Tensor::matrix(hidden, linear.out_proj.div_ceil(local.tp)),
    ]
}

/// What one replica updates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owned(pub Vec<(Tensor, u64)>);

impl Owned {
    /// Elements of all.
    pub fn elements(&self) -> u64 {
        elements(self.0.iter().map(|(tensor, count)| (tensor, count)))
    }

    /// Elements that Adam updates.
    pub fn adams(&self) -> u64 {
        let plain = self.0.iter().filter(|(tensor, _)| !tensor.is_matrix());
        elements(plain.map(|(tensor, count)| (tensor, count)))
    }

    /// FLOPs of all iterations.
    pub fn flops(&self) -> f64 {
        let each = self.0.iter();
        each.map(|(tensor, count)| tensor.flops() * *count as f64)
            .sum()
    }
}

/// What replicas update of a family, of those that have most.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Dealt {
    /// All of it.
    pub elements: u64,
    /// Of the replica that has most state.
    pub fullest: Owned,
    /// Of the replica that has most to compute.
    pub busiest: Owned,
}

impl Dealt {
    /// Deals tensors out, the smallest first, to the first replica and on to the last, and back from there. Replicas that
    /// get alike are looked at once: what a run of equal tensors gives them changes only where it begins and ends.
    pub fn new(tensors: &Counted, replicas: u64) -> Self {
        let mut at = 0;
        let mut runs = Vec::with_capacity(tensors.len());
        for (&tensor, &count) in tensors {
            runs.push((tensor, at, at + count));
            at += count;
        }
        let ends = runs.iter().flat_map(|&(_, first, end)| [first, end]);
        let mut looked_at: Vec<u64> = ends
            .flat_map(|end| {
                let turn = end % (2 * replicas);
                let replica = turn.min(2 * replicas - 1 - turn);
                [replica.saturating_sub(1), replica, replica + 1]
            })
            .filter(|&replica| replica < replicas)
            .collect();
        looked_at.sort_unstable();
        looked_at.dedup();
        let owned = |replica: u64| {
            let turns = [replica, 2 * replicas - 1 - replica];
            let before = |end: u64| -> u64 {
                let each = turns.iter();
                each.map(|&turn| (end + 2 * replicas - 1 - turn) / (2 * replicas))
                    .sum()
            };
            let own = runs.iter();
            let own = own.map(|&(tensor, first, end)| (tensor, before(end) - before(first)));
            Owned(own.filter(|(_, count)| *count > 0).collect())
        };
        let mut dealt = Self {
            elements: elements(tensors),
            ..Self::default()
        };
        // A master and one moment; of Adam's two.
        let state = |owned: &Owned| 2 * owned.elements() + owned.adams();
        let work = |owned: &Owned| (owned.flops(), owned.elements());
        for replica in looked_at {
            let owned = owned(replica);
            if state(&owned) > state(&dealt.fullest) {
                dealt.fullest = owned.clone();
            }
            if work(&owned) > work(&dealt.busiest) {
                dealt.busiest = owned;
            }
        }
        dealt
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    fn local(tp: u64, ep: u64) -> Local {
        Local {
            tokens: 8,
            tokens_local: 8,
            seq_len: 8,
            mbs: 1,
            tp,
            cp: 1,
            ep,
            etp: 1,
            sent_rows: 8,
            expert_rows: 8,
            experts_local: 1,
        }
    }

    #[test]
    fn law_tensors_are_all_that_a_rank_holds_and_all_but_a_few_are_matrices() {
        for name in presets::names() {
            let model = presets::load(name).expect("a preset");
            for (tp, ep) in [(1, 1), (2, 2)] {
                let local = &local(tp, ep);
                let table = shard::embedding(&model, local);
                let mut head = shard::head(&model, local);
                for depth in shard::mtp(&model, local) {
                    head += depth;
                }
                for (held, tensors) in [
                    (table, Tensors::embedding(table)),
                    (head, Tensors::head(&model, local, head)),
                ] {
                    assert_eq!(elements(&tensors.dense), held.dense(), "{name} {tp}");
                    assert_eq!(elements(&tensors.experts), held.experts, "{name} {ep}");
                }
                for layer in &model.layers {
                    let held = shard::layer(&model, layer, local);
                    let tensors = Tensors::layer(&model, layer, local);
                    assert_eq!(elements(&tensors.dense), held.dense(), "{name} {tp}");
                    assert_eq!(elements(&tensors.experts), held.experts, "{name} {ep}");
                    let known = !matches!(layer.mixer, Some(Mixer::SharedKv(_)));
                    for dealt in tensors.dealt([1; 2]) {
                        let adams = dealt.fullest.adams();
                        assert!(!known || adams * 20 <= dealt.elements, "{name}: {adams}");
                    }
                }
            }
        }
    }

    /// A Mixtral layer: queries 4096 x 4096, keys and values 1024 x 4096, output 4096 x 4096, router 8 x 4096, of each expert
    /// 28672 x 4096 and 4096 x 14336; two norms. FLOPs of five iterations, of matrices one after the other.
    #[test]
    fn golden_flops_of_a_mixtral_layer() {
        let model = presets::load("mixtral-8x7b").expect("a preset");
        let tensors = Tensors::layer(&model, &model.layers[0], &local(1, 1));
        let [dense, experts] = tensors.dealt([1; 2]);
        let plainly = |matrices: &[[f64; 2]]| {
            let mut flops = 0.0;
            for &[rows, columns] in matrices {
                let (m, n) = if rows < columns {
                    (rows, columns)
                } else {
                    (columns, rows)
                };
                for _ in 0..5 {
                    flops += 2.0 * m * n * m;
                    flops += 2.0 * m * m * m;
                    flops += 2.0 * m * m * n;
                }
            }
            flops
        };
        let of_dense = [
            [4096.0, 4096.0],
            [1024.0, 4096.0],
            [1024.0, 4096.0],
            [4096.0, 4096.0],
            [8.0, 4096.0],
        ];
        let mut of_experts = Vec::new();
        for _ in 0..8 {
            of_experts.extend([[28672.0, 4096.0], [4096.0, 14336.0]]);
        }
        for (dealt, matrices) in [(&dense, &of_dense[..]), (&experts, &of_experts)] {
            let (found, expected) = (dealt.busiest.flops(), plainly(matrices));
            assert!((found / expected - 1.0).abs() < 1e-12, "{found} {expected}");
        }
        assert_eq!(
            (dense.fullest.adams(), experts.fullest.adams()),
            (2 * 4096, 0)
        );
    }

    /// The example of `shard_params`: ten tensors over four replicas.
    #[test]
    fn golden_tensors_are_dealt_there_and_back() {
        let tensors: Counted = (1..=10).map(|size| (Tensor::plain(size), 1)).collect();
        // 0, 7, 8; 1, 6, 9; 2, 5; 3, 4: of 1 + 8 + 9, 2 + 7 + 10, 3 + 6, 4 + 5 elements.
        let dealt = Dealt::new(&tensors, 4);
        assert_eq!((dealt.elements, dealt.fullest.elements()), (55, 19));
        let sizes: Vec<u64> = dealt.fullest.0.iter().map(|own| own.0.elements).collect();
        assert_eq!(sizes, [2, 7, 10]);
    }

    /// Against hands that are dealt one tensor at a time.
    #[test]
    fn differential_the_fullest_and_busiest_of_all_replicas() {
        let tensors: Counted = [
            (Tensor::plain(40), 7),
            (Tensor::matrix(8, 16), 3),
            (Tensor::matrix(2, 64), 5),
            (Tensor::stacked([16, 0, 4, 4], 16), 11),
            (Tensor::matrix(64, 16), 29),
            (Tensor::plain(5000), 2),
        ]
        .into();
        for replicas in 1..=70 {
            let mut hands = vec![Owned::default(); replicas];
            let each = tensors.iter();
            let each = each.flat_map(|(&tensor, &count)| (0..count).map(move |_| tensor));
            for (place, tensor) in each.enumerate() {
                let turn = place % (2 * replicas);
                let replica = if turn < replicas {
                    turn
                } else {
                    2 * replicas - 1 - turn
                };
                hands[replica].0.push((tensor, 1));
            }
            let all: u64 = hands.iter().map(Owned::elements).sum();
            let fullest = hands.iter().map(|own| 2 * own.elements() + own.adams());
            let busiest = hands.iter().map(Owned::flops).fold(0.0, f64::max);
            let dealt = Dealt::new(&tensors, replicas as u64);
            let state = 2 * dealt.fullest.elements() + dealt.fullest.adams();
            assert_eq!(dealt.elements, all);
            assert_eq!(Some(state), fullest.max(), "{replicas}");
            assert_eq!(dealt.busiest.flops(), busiest, "{replicas}");
        }
    }
}
