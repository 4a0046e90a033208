//! Lowers what is not a decoder layer: embedding, head and loss, multi-token prediction, and the
//! work of a step after its microbatches (reductions, norm, optimizer).

use std::ops::Range;

use moefold_profiles::op::SweepKind;
use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Collective, CollectiveKind, Dtype, Op, Pass};

use super::{Writer, over};
use crate::choice::{HostShare, Masters};
use crate::mesh::Placement;
use crate::model::{Layer, Model};
use crate::runtime::{Lowered, Part, Setting};
use crate::shard::{self, Shard};
use crate::tensors::{self, Dealt, Owned};

/// The embedding of the first stage: vocabulary parallel, its partial rows scattered over tokens.
pub fn embedding(setting: &Setting<'_>) -> Lowered {
    let mut work = Writer::new(setting);
    let local = *setting.local;
    work.at(Category::Dense, Part::Ends);
    let (dim, dtype) = (setting.model.hidden, work.wide);
    work.both(|pass| Op::Embedding {
        rows: local.tokens,
        dim,
        pass,
        dtype,
    });
    work.leave_tp(setting.model.hidden);
    work.lowered
}

/// Final norm, head and cross entropy of the last stage.
pub fn head(setting: &Setting<'_>) -> Lowered {
    let mut work = Writer::new(setting);
    lower_head(&mut work);
    work.lowered
}

fn lower_head(work: &mut Writer<'_>) {
    let local = *work.setting.local;
    let model = work.setting.model;
    work.at(Category::Dense, Part::Ends);
    work.norm(local.tokens_local, model.hidden);
    work.enter_tp(model.hidden);
    let vocab = shard::vocab(model, local.tp);
    // The head stays in the wide type under every recipe.
    let dtype = work.wide;
    work.linear_in(local.tokens, vocab, model.hidden, dtype);
    work.both(|pass| Op::CrossEntropy {
        rows: local.tokens,
        vocab,
        pass,
        dtype,
    });
    // Row maximum; target logit and sum of exponentials (f32).
    let tp = work.setting.groups.tp;
    if tp.ranks > 1 {
        for values in [local.tokens, 2 * local.tokens] {
            let reduce = over(tp, CollectiveKind::AllReduce, Dtype::F32.bytes(values));
            work.push(
                true,
                crate::runtime::Task::Collective(reduce),
                Category::TpComm,
                None,
            );
        }
    }
}

/// One multi-token-prediction depth: norms of the hidden state and of the next token's embedding,
/// projection `2h -> h`, its layer, and the head again.
pub fn mtp(setting: &Setting<'_>, layer: &Layer) -> Lowered {
    let mut work = Writer::new(setting);
    let local = *setting.local;
    let hidden = setting.model.hidden;
    let dtype = work.wide;
    work.at(Category::Dense, Part::Ends);
    work.both(|pass| Op::Embedding {
        rows: local.tokens,
        dim: hidden,
        pass,
        dtype,
    });
    work.norm(2 * local.tokens_local, hidden);
    work.enter_tp(2 * hidden);
    work.linear(local.tokens, hidden / local.tp, 2 * hidden);
    let inner = super::layer(setting, layer);
    lower_head(&mut work);
    let mut lowered = work.lowered;
    lowered.forward.extend(inner.forward);
    lowered.backward.extend(inner.backward);
    lowered
}

/// The collectives one rank takes part in once a step, and the optimizer's ops.
#[derive(Debug, Clone, Default)]
pub struct StepWork {
    /// Gradient reductions.
    pub reduce: Vec<Collective>,
    /// Reductions of what these leave, over instances of the optimizer.
    pub across: Vec<Collective>,
    /// Weight gathers after the update.
    pub gather: Vec<Collective>,
    /// Weight gathers over instances that divide the states, before the first pass of the next step.
    pub gather_across: Vec<Collective>,
    /// Reductions that nothing hides: gradients of replicated parameters, of a tied embedding.
    pub exposed: Vec<Collective>,
    /// Sums over all ranks of what a step says of itself.
    pub sums: Vec<Collective>,
    /// Gradient norm and update.
    pub optimizer: Vec<Op>,
    /// What of the update runs tensor by tensor, each op with how often.
    pub by_tensor: Vec<(Op, u64)>,
    /// Kernels of these, which the host launches one by one.
    pub launches: u64,
    /// States that rest on the host and pass through the device beside their update, piece by piece.
    pub streamed: Vec<Bytes>,
}

/// Groups of the step's own collectives.
#[derive(Debug, Clone, Copy)]
pub struct StepGroups {
    /// Data and context parallel: reduces dense gradients. Where replicas are several instances of the optimizer, those
    /// of one.
    pub dp_cp: Placement,
    /// Expert data parallel, likewise.
    pub edp: Placement,
    /// Ranks of several instances that have the same part of dense parameters, and of experts.
    pub across: Option<[Placement; 2]>,
    /// Instances that divide the states of each part among them, if they do; one else.
    pub outer: u32,
    /// Tensor parallel.
    pub tp: Placement,
}

/// Passes that Megatron-Core makes over the gradients of a rank that holds `shard`, beside its optimizer.
/// The buffers are set to zero before the step and scaled by the number of replicas before they are
/// reduced (`megatron/core/distributed/param_and_grad_buffer.py` at d98e8a64). The rank's own part is scaled
/// where the norm is clipped (`megatron/core/optimizer/clip_grads.py`).
pub fn passes_over_gradients(shard: &Shard, groups: &StepGroups, grad_dtype: Dtype) -> Vec<Op> {
    let sweep = |kind, len, dtype| Op::Sweep { kind, len, dtype };
    let mut passes = Vec::new();
    for (parameters, group) in [(shard.dense(), groups.dp_cp), (shard.experts, groups.edp)] {
        if parameters == 0 {
            continue;
        }
        passes.push(sweep(SweepKind::Fill, parameters, grad_dtype));
        if groups.dp_cp.ranks > 1 || groups.across.is_some() {
            passes.push(sweep(SweepKind::Scale, parameters, grad_dtype));
        }
        let own = parameters.div_ceil(u64::from(group.ranks) * u64::from(groups.outer));
        passes.push(sweep(SweepKind::Scale, own, Dtype::F32));
    }
    passes
}

/// Setting the gradients of each bucket of a rank to zero, or where it rests divided those of the rank's part in
/// `shards` of each family, where nothing hides it: this project's executor does it beside the gathers of weights,
/// unless the next step begins with these.
pub fn cleared(held: &Held, shards: [u64; 2]) -> Vec<Op> {
    let kind = SweepKind::Fill;
    let families = [&held.dense, &held.experts].into_iter().zip(shards);
    let own =
        families.flat_map(|(buckets, shards)| buckets.iter().map(move |own| own.div_ceil(shards)));
    own.filter(|&len| len > 0)
        .map(|len| Op::Sweep {
            kind,
            len,
            dtype: Dtype::F32,
        })
        .collect()
}

/// What this project's executor sums over all ranks once a step, where there are several: before the update losses and
/// the square of the norm, as a CPU's f64 or a GPU's f32; after it how many tokens each expert got, and each layer dropped. Counts that
/// padded microbatches leave on the device, and tokens under a mask, are summed besides; these have no price.
pub fn sums(model: &Model, on_cpu: bool, world: Placement) -> Vec<Collective> {
    if world.ranks < 2 {
        return Vec::new();
    }
    let numbers = 4 + model.mtp.len() as u64;
    let said = if on_cpu { 8 * numbers } else { 4 * numbers };
    let layers = || model.layers.iter().chain(&model.mtp).filter_map(Layer::moe);
    let counts: u64 = layers().map(|moe| moe.experts + 1).sum();
    let sum = |bytes| over(world, CollectiveKind::AllReduce, Bytes(bytes));
    vec![sum(said), sum(8 * counts)]
}

/// What PyTorch's FSDP2 copies and adds of a unit of so many elements of one of so many shards in a microbatch: weights
/// out of what was gathered before each pass, gradients into what is reduced, and the rank's part of them to those of other
/// microbatches (`foreach_all_gather_copy_out` and `foreach_reduce` in
/// `torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`). `dtypes` are those of weights and gradients.
pub fn copied(elements: u64, shards: u64, [weights, grads]: [Dtype; 2]) -> [Op; 4] {
    let copy = |len, dtype| Op::Sweep {
        kind: SweepKind::Copy,
        len,
        dtype,
    };
    let own = Op::Add {
        len: elements.div_ceil(shards),
        dtype: grads,
    };
    let weights = copy(elements, weights);
    [weights, weights, copy(elements, grads), own]
}

/// What Megatron-Core does with a rank's own part of so many gradients where PyTorch's FSDP2 has reduced them: the part is made
/// f32 where it is narrow (`Float16OptimizerWithFloat16Params` in `megatron/core/optimizer/optimizer.py`), and scaled where the
/// norm is clipped.
pub fn clipped(own: u64, widens: bool) -> impl Iterator<Item = Op> {
    let sweep = |kind| Op::Sweep {
        kind,
        len: own,
        dtype: Dtype::F32,
    };
    let widened = widens.then(|| sweep(SweepKind::Copy));
    widened.into_iter().chain([sweep(SweepKind::Scale)])
}

/// Adding the reduced gradients of a unit of so many elements to those of one of so many shards, and setting the
/// buffer that they were whole in to zero: what this project's executor does where they rest divided.
pub fn added_up(elements: u64, shards: u64) -> [Op; 2] {
    let dtype = Dtype::F32;
    let own = Op::Add {
        len: elements.div_ceil(shards),
        dtype,
    };
    let kind = SweepKind::Fill;
    let len = elements;
    [own, Op::Sweep { kind, len, dtype }]
}

/// What a rank holds, by bucket.
#[derive(Debug, Clone, Default)]
pub struct Held {
    /// Parameters that are reduced over DP x CP, of each bucket.
    pub dense: Vec<u64>,
    /// Those of them that are the same on every tensor-parallel rank.
    pub replicated: Vec<u64>,
    /// Parameters of experts, of each bucket.
    pub experts: Vec<u64>,
    /// Whether each bucket is updated by itself; else a family is at once. Where states rest on the host, what does not
    /// is priced as updated at once.
    pub updated_apart: bool,
    /// Where replicas divide whole tensors, what they update of dense ones and of experts.
    pub dealt: Option<[Dealt; 2]>,
}

impl Held {
    /// Buckets of units, of their dense parameters and of their experts.
    pub fn of(
        units: impl IntoIterator<Item = Shard, IntoIter: Clone>,
        [dense, experts]: [&[Range<usize>]; 2],
        updated_apart: bool,
    ) -> Self {
        let units = units.into_iter();
        let of = |own: fn(&Shard) -> u64, buckets: &[Range<usize>]| -> Vec<u64> {
            let sum = |bucket: &Range<usize>| {
                let units = units.clone().skip(bucket.start).take(bucket.len());
                units.map(|unit| own(&unit)).sum()
            };
            buckets.iter().map(sum).collect()
        };
        Self {
            dense: of(Shard::dense, dense),
            replicated: of(|shard| shard.replicated, dense),
            experts: of(|shard| shard.experts, experts),
            updated_apart,
            dealt: None,
        }
    }
}

/// Lowers the end of a step for a rank. Reductions and gathers are those of the dense buckets in their order, then
/// those of experts. Where instances divide states, the last reductions leave each its part, and updated weights are gathered
/// over them first (HFSDP of Megatron-FSDP, `hsdp_wbuf` and `hsdp_gbuf` in `param_and_grad_buffer.py` at 0056bc94). Gradients are reduced in
/// `grad_dtype`; weights are gathered in `weight_dtype` (ZeRO-1, Megatron's distributed optimizer); moments
/// are of `moments`, `masters` is what is kept of masters, and `on_host` of all these rests on the host.
/// Where replicas divide whole tensors, every one has all gradients reduced, and weights are gathered in parts that differ
/// (`LayerWiseDistributedOptimizer` in `megatron/core/optimizer/layer_wise_optimizer.py` of 0.16.1), priced by the bytes of all.
/// `tied` is the embedding's size on this rank where first and last stage share it.
pub fn step(
    held: &Held,
    groups: &StepGroups,
    [grad_dtype, weight_dtype, moments]: [Dtype; 3],
    (masters, on_host): (Masters, HostShare),
    tied: Option<Placement>,
    tied_elements: u64,
) -> StepWork {
    let mut work = StepWork::default();
    let across = groups.across.map(|across| across.map(Some));
    let [dense_across, experts_across] = across.unwrap_or_default();
    let [dense_dealt, experts_dealt] = match &held.dealt {
        Some([dense, experts]) => [Some(dense), Some(experts)],
        None => [None, None],
    };
    for (buckets, group, across, dealt) in [
        (&held.dense, groups.dp_cp, dense_across, dense_dealt),
        (&held.experts, groups.edp, experts_across, experts_dealt),
    ] {
        let parameters: u64 = buckets.iter().sum();
        if parameters == 0 {
            continue;
        }
        let reduction = match dealt {
            Some(_) => CollectiveKind::AllReduce,
            None => CollectiveKind::ReduceScatter,
        };
        // Of each bucket an instance leaves a rank its part, which the others have too.
        if let Some(across) = across {
            let parts = buckets.iter();
            let parts = parts.map(|bucket| bucket.div_ceil(u64::from(group.ranks)));
            let divides = groups.outer > 1;
            let reduction = if divides {
                CollectiveKind::ReduceScatter
            } else {
                CollectiveKind::AllReduce
            };
            for part in parts {
                work.across
                    .push(over(across, reduction, grad_dtype.bytes(part)));
                if divides {
                    let bytes = weight_dtype.bytes(part);
                    let gather = over(across, CollectiveKind::AllGather, bytes);
                    work.gather_across.push(gather);
                }
            }
        }
        for &bucket in buckets.iter().filter(|_| group.ranks > 1) {
            work.reduce
                .push(over(group, reduction, grad_dtype.bytes(bucket)));
            work.gather.push(over(
                group,
                CollectiveKind::AllGather,
                weight_dtype.bytes(bucket),
            ));
        }
        if let Some(dealt) = dealt {
            update_tensors(&dealt.busiest, weight_dtype, &mut work);
            continue;
        }
        let owners = u64::from(group.ranks) * u64::from(groups.outer);
        let shard = |parameters: u64| parameters.div_ceil(owners);
        let len = shard(parameters);
        let own: Vec<u64> = if held.updated_apart {
            buckets.iter().copied().map(shard).collect()
        } else {
            vec![len]
        };
        let norms = own.iter().filter(|len| **len > 0);
        work.optimizer
            .extend(norms.map(|&len| Op::GradNorm { len }));
        let pieces = on_host.pieces(len);
        let kept = if on_host.is_none() {
            own
        } else {
            vec![len - on_host.on_host(len)]
        };
        let master = if weight_dtype == Dtype::F32 {
            0
        } else {
            masters.dtype().bits()
        };
        let state = |len: u64| Bytes(len * (master + 2 * moments.bits()) / 8);
        work.streamed.extend(pieces.iter().map(|&len| state(len)));
        for len in kept.into_iter().chain(pieces).filter(|&len| len > 0) {
            work.optimizer.push(Op::Adamw {
                len,
                dtype: weight_dtype,
                moments,
                remainders: masters == Masters::Remainder,
            });
        }
    }
    let replicated = held.replicated.iter().filter(|&&replicated| replicated > 0);
    for &replicated in replicated.filter(|_| groups.tp.ranks > 1) {
        work.exposed.push(over(
            groups.tp,
            CollectiveKind::AllReduce,
            grad_dtype.bytes(replicated),
        ));
    }
    if let Some(pair) = tied
        && tied_elements > 0
    {
        let bytes: Bytes = grad_dtype.bytes(tied_elements);
        work.exposed
            .push(over(pair, CollectiveKind::AllReduce, bytes));
    }
    work
}

/// The norm and the update of what a replica owns. Matrices take Muon's: weight decay, momentum, a norm that divides, the
/// iterations on bf16 (`muon_fp32_matmul_prec` medium), a scale, and the step (`OrthogonalizedOptimizer.step` and
/// `newton_schulz` in `emerging_optimizers/orthogonalized_optimizers` of NVIDIA-NeMo/Emerging-Optimizers at 116b71a4 and
/// 0001f6e2). Each is a kernel, a norm two and a division two more; conversions count as copies of f32. All else is
/// updated at once, by Adam.
fn update_tensors(owned: &Owned, weight_dtype: Dtype, work: &mut StepWork) {
    let elements = owned.elements();
    if elements == 0 {
        return;
    }
    work.optimizer.push(Op::GradNorm { len: elements });
    let adams = owned.adams();
    if adams > 0 {
        work.optimizer.push(Op::Adamw {
            len: adams,
            dtype: weight_dtype,
            moments: Dtype::F32,
            remainders: false,
        });
    }
    let sweep = |kind, len| Op::Sweep {
        kind,
        len,
        dtype: Dtype::F32,
    };
    let add = |len| Op::Add {
        len,
        dtype: Dtype::F32,
    };
    let matrices = owned.0.iter().filter(|(tensor, _)| tensor.is_matrix());
    for (tensor, count) in matrices {
        let len = tensor.elements;
        let mut parts = 0;
        let mut run = |op, times: u64| work.by_tensor.push((op, times * count));
        // Decay, and at the end the step.
        run(sweep(SweepKind::Scale, len), 1);
        run(add(len), 1);
        for [rows, columns] in tensor.matrices() {
            let len = rows * columns;
            run(sweep(SweepKind::Sum, len), 1);
            run(sweep(SweepKind::Scale, len), 2);
            run(sweep(SweepKind::Copy, len), 2);
            for product in iteration(rows, columns) {
                run(product, tensors::ITERATIONS);
            }
            parts += 1;
        }
        // Momentum.
        run(add(len), 1);
        if parts > 1 {
            run(sweep(SweepKind::Copy, len), 1);
        }
        let each = 3 + parts * (7 + 3 * tensors::ITERATIONS) + u64::from(parts > 1);
        work.launches += each * count;
    }
    // Masters to weights.
    if elements > adams {
        work.optimizer
            .push(sweep(SweepKind::Copy, elements - adams));
    }
}

/// The products of a Newton-Schulz iteration on a matrix `X` of so many rows and columns, of which there are no fewer:
/// `A = X X'`, `B = b A + c A A` and `a X + B X` (arXiv 2502.16982, equation 2). One that is higher is turned.
fn iteration(rows: u64, columns: u64) -> [Op; 3] {
    let (low, high) = (rows.min(columns), rows.max(columns));
    let product = |n, k| Op::Gemm {
        m: low,
        n,
        k,
        pass: Pass::Forward,
        dtype: Dtype::Bf16,
    };
    [product(low, high), product(low, low), product(high, low)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two tensors of eight matrices of 4 x 8 and 16 vectors of 3, over two replicas; a matrix of queries, keys and values is
    /// three.
    #[test]
    fn golden_matrices_are_updated_one_by_one_and_gradients_reduced_whole() {
        let alone = |ranks| Placement {
            ranks,
            ranks_per_domain: ranks,
            ranks_per_node: ranks,
        };
        let groups = StepGroups {
            dp_cp: alone(2),
            edp: alone(1),
            across: None,
            outer: 1,
            tp: alone(1),
        };
        let held = |counted: &tensors::Counted| Held {
            dense: vec![counted.iter().map(|(t, n)| t.elements * n).sum()],
            dealt: Some([Dealt::new(counted, 2), Dealt::default()]),
            ..Held::default()
        };
        let lower = |counted: &tensors::Counted| {
            let dtypes = [Dtype::F32, Dtype::Bf16, Dtype::F32];
            let states = (Masters::default(), HostShare::default());
            step(&held(counted), &groups, dtypes, states, None, 0)
        };
        let counted = [
            (tensors::Tensor::matrix(8, 4), 8),
            (tensors::Tensor::plain(3), 16),
        ];
        let work = lower(&counted.into());
        let of = |list: &[Collective]| -> Vec<(CollectiveKind, u64)> {
            list.iter().map(|one| (one.kind, one.bytes.0)).collect()
        };
        let all = 8 * 32 + 16 * 3;
        assert_eq!(of(&work.reduce), [(CollectiveKind::AllReduce, 4 * all)]);
        assert_eq!(of(&work.gather), [(CollectiveKind::AllGather, 2 * all)]);
        let own = |op: &Op| match op {
            Op::GradNorm { len } | Op::Adamw { len, .. } | Op::Sweep { len, .. } => *len,
            other => panic!("{other:?}"),
        };
        let at_once: Vec<u64> = work.optimizer.iter().map(own).collect();
        assert_eq!(at_once, [all / 2, 8 * 3, 4 * 32]);
        // Three products of five iterations of four matrices, turned so that there are no fewer columns than rows.
        let products: Vec<([u64; 3], u64)> = work
            .by_tensor
            .iter()
            .filter_map(|(op, times)| match op {
                Op::Gemm { m, n, k, .. } => Some(([*m, *n, *k], *times)),
                _ => None,
            })
            .collect();
        assert_eq!(
            products,
            [([4, 4, 8], 20), ([4, 4, 4], 20), ([4, 8, 4], 20)]
        );
        let flops = work
            .by_tensor
            .iter()
            .map(|(op, n)| op.flops().0 * *n as f64);
        let gemms = 4.0 * 5.0 * (4.0 * 16.0 * 8.0 + 2.0 * 64.0);
        assert!(flops.sum::<f64>() >= gemms);
        assert_eq!(work.launches, 4 * (3 + 22));
    }

    /// Three units over two replicas, experts over one.
    #[test]
    fn golden_buckets_are_updated_and_cleared_by_themselves_where_a_stack_does() {
        let shard = |split, replicated, experts| Shard {
            split,
            replicated,
            experts,
            wide: 0,
        };
        let units = [shard(10, 0, 0), shard(5, 2, 8), shard(5, 0, 4)];
        let alone = |ranks| Placement {
            ranks,
            ranks_per_domain: ranks,
            ranks_per_node: ranks,
        };
        let groups = StepGroups {
            dp_cp: alone(2),
            edp: alone(1),
            across: None,
            outer: 1,
            tp: alone(1),
        };
        let work = |apart: bool, on_host: f64| {
            let held = Held::of(units, [&[0..2, 2..3], &[1..2, 2..3]], apart);
            let states = (Masters::default(), HostShare(on_host));
            let work = step(&held, &groups, [Dtype::F32; 3], states, None, 0);
            let of = |stem: &str| -> Vec<u64> {
                let of = work.optimizer.iter().filter(|op| op.stem() == stem);
                of.map(|op| match op {
                    Op::GradNorm { len } | Op::Adamw { len, .. } => *len,
                    other => panic!("{other:?}"),
                })
                .collect()
            };
            (of("grad_norm"), of("adamw"), held)
        };
        let (norms, updates, held) = work(true, 0.0);
        assert_eq!((norms, updates), (vec![9, 3, 8, 4], vec![9, 3, 8, 4]));
        let lens = |shards| -> Vec<u64> {
            let ops = cleared(&held, shards).into_iter();
            ops.map(|op| match op {
                Op::Sweep { len, .. } => len,
                other => panic!("{other:?}"),
            })
            .collect()
        };
        assert_eq!(lens([1; 2]), [17, 5, 8, 4]);
        assert_eq!(lens([2, 1]), [9, 3, 8, 4]);
        let (norms, updates, _) = work(false, 0.0);
        assert_eq!((norms, updates), (vec![11, 12], vec![11, 12]));
        let (norms, updates, _) = work(true, 1.0);
        assert_eq!(norms, [9, 3, 8, 4]);
        assert_eq!(updates.iter().sum::<u64>(), 11 + 12);
    }
}
