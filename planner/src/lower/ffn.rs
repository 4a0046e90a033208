//! Lowers feed-forward blocks: dense MLPs, shared experts, and routed experts with their router.

use moefold_profiles::op::SweepKind;
use moefold_profiles::trace::Category;
use moefold_profiles::{CollectiveKind, Dtype, Op, Pass, Precision};

use super::{Writer, dispatch};
use crate::choice::{Dispatcher, GraphModule};
use crate::model::{Activation, Ffn, Mlp, Moe};
use crate::runtime::{Part, Setting};

/// Lowers the norm, the block and the residual sum after it.
pub(crate) fn lower(work: &mut Writer<'_>, ffn: &Ffn) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    match ffn {
        Ffn::Dense(mlp) => {
            work.at(Category::Dense, Part::Norm);
            work.norm(local.tokens_local, hidden);
            work.at(Category::Dense, Part::Mlp);
            lower_mlp(work, mlp);
            work.at(Category::Dense, Part::Residual);
        }
        Ffn::Moe(moe) => {
            work.at(Category::RouterPermute, Part::Norm);
            work.norm(local.tokens_local, hidden);
            lower_moe(work, moe);
            work.at(Category::RouterPermute, Part::Residual);
        }
    }
    work.residual();
}

fn fc1_width(mlp: &Mlp) -> u64 {
    mlp.width * if mlp.gated { 2 } else { 1 }
}

fn lower_mlp(work: &mut Writer<'_>, mlp: &Mlp) {
    lower_up(work, mlp);
    lower_down(work, mlp);
}

/// Until the activation of an MLP.
fn lower_up(work: &mut Writer<'_>, mlp: &Mlp) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    work.enter_tp(hidden);
    let (m, n) = (local.tokens, fc1_width(mlp) / local.tp);
    if work.is_at(Part::Shared) {
        work.linear(m, n, hidden);
    } else {
        work.linear_of_norm(m, n, hidden);
    }
    let (dim, dtype) = (mlp.width / local.tp, work.wide);
    work.both(|pass| Op::Swiglu {
        rows: local.tokens,
        dim,
        pass,
        dtype,
    });
}

/// From the activation of an MLP on.
fn lower_down(work: &mut Writer<'_>, mlp: &Mlp) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    work.linear(local.tokens, hidden, mlp.width / local.tp);
    work.leave_tp(hidden);
}

fn lower_moe(work: &mut Writer<'_>, moe: &Moe) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    work.at(Category::RouterPermute, Part::Router);
    let dtype = work.wide;
    work.linear_in(local.tokens_local, moe.experts, hidden, dtype);
    work.both(|pass| Op::Router {
        rows: local.tokens_local,
        experts: moe.experts,
        topk: moe.topk,
        pass,
    });
    // Its first half beside the dispatch of tokens, its second beside the combine; the backward of each is the
    // other (Megatron-Core, `shared_experts.py`).
    if let Some(shared) = moe.shared.as_ref().filter(|_| work.setting.shared_beside) {
        dispatch::lower_rows(work);
        dispatch::lower_exchange(work, moe, Some(Part::Shared));
        work.at(Category::Dense, Part::Shared);
        lower_up(work, &shared.mlp);
        lower_experts(work, moe);
        work.at(Category::RouterPermute, Part::Dispatch);
        dispatch::lower_exchange(work, moe, Some(Part::Shared));
        work.at(Category::Dense, Part::Shared);
        lower_down(work, &shared.mlp);
        return;
    }
    if let Some(shared) = &moe.shared {
        work.at(Category::Dense, Part::Shared);
        lower_mlp(work, &shared.mlp);
    }
    dispatch::lower_rows(work);
    // Dispatch and combine forward; the backward of each is the other.
    dispatch::lower_exchange(work, moe, None);
    lower_experts(work, moe);
    work.at(Category::RouterPermute, Part::Dispatch);
    dispatch::lower_exchange(work, moe, None);
}

fn lower_experts(work: &mut Writer<'_>, moe: &Moe) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    let rows = local.expert_rows;
    let width = moe.expert.width / local.etp;
    let etp = work.setting.groups.etp;

    // Rows are gathered over the expert-tensor-parallel group before, and their sums scattered after;
    // the all-gather dispatcher has done both over the experts' and their tensor-parallel ranks at once.
    let exchanged = local.ep > 1 && work.setting.dispatcher == Dispatcher::Allgather;
    if !exchanged {
        work.at(Category::Experts, Part::Dispatch);
        let gathered = rows * hidden;
        let (gather, scatter) = (CollectiveKind::AllGather, CollectiveKind::ReduceScatter);
        work.send_forward(etp, gather, gathered, Category::TpComm);
        work.send_forward(etp, scatter, gathered, Category::TpComm);
        work.send_backward(etp, gather, gathered, Category::TpComm);
        work.send_backward(etp, scatter, gathered, Category::TpComm);
    }

    work.at(Category::Experts, Part::Experts);
    // Static shapes need the fused experts, whose products and activation quantize as they write.
    let fused = work.setting.graphs.covers(GraphModule::Moe)
        && !work.setting.capacity.is_some_and(|capacity| capacity.pad);
    let inner = fc1_width(&moe.expert) / local.etp;
    let padded = padded(work, rows);
    work.quantize(true, padded * hidden);
    grouped_linear(work, rows, inner, hidden);
    if !fused {
        work.quantize(false, padded * inner);
        work.quantize(true, padded * width);
    }
    work.at(Category::Experts, Part::ExpertActivation);
    let dtype = work.wide;
    if fused {
        // What is left of an activation in the products before and behind it: its output is written, and back its input
        // read once more.
        let sweep = |kind| Op::Sweep {
            kind,
            len: padded * width,
            dtype,
        };
        work.forward(sweep(SweepKind::Fill));
        work.backward(sweep(SweepKind::Copy));
    } else {
        if matches!(moe.expert.activation, Activation::ClippedGelu(_)) {
            lower_clipping(work, padded * inner);
        }
        work.both(|pass| Op::Swiglu {
            rows: padded,
            dim: width,
            pass,
            dtype,
        });
    }
    work.at(Category::Experts, Part::Experts);
    grouped_linear(work, rows, hidden, width);
    work.quantize(false, padded * hidden);
    if moe.expert.bias && !fused {
        lower_bias(work, rows * hidden);
    }
}

/// Rows of experts with those that fill each up to a multiple of what a recipe quantizes at once, half of it on average
/// (`get_align_size_for_quantization`, Transformer Engine, `pytorch/quantization.py`). Products count their tiles
/// themselves, and what is padded to a capacity is full.
fn padded(work: &Writer<'_>, rows: u64) -> u64 {
    let Setting {
        precision,
        capacity,
        local,
        ..
    } = work.setting;
    let multiple = match precision {
        Precision::Fp32 | Precision::Bf16 => 0,
        Precision::Fp8 | Precision::Fp8Delayed | Precision::Fp8Blockwise => 16,
        Precision::Mxfp8 => 32,
        Precision::Nvfp4 => 128,
    };
    if capacity.is_some_and(|capacity| capacity.pad) {
        return rows;
    }
    rows + local.experts_local * multiple / 2
}

/// Clips both halves of the experts' first product, each by itself, and puts them together again before the compiled
/// activation (`weighted_bias_quick_geglu_impl`, `megatron/core/fusions/fused_bias_geglu.py`): `len` elements are read
/// and written twice. Back the halves are gathered, and the gradient is masked by the input.
fn lower_clipping(work: &mut Writer<'_>, len: u64) {
    let dtype = work.wide;
    let copy = Op::Sweep {
        kind: SweepKind::Copy,
        len,
        dtype,
    };
    work.forward(copy);
    work.forward(copy);
    work.backward(copy);
    work.backward(Op::Add { len, dtype });
}

/// The bias of the experts' second product, which Megatron-Core adds expert by expert, times the probabilities of its
/// rows, in f32 (`TEGroupedMLP._apply_bias`, `megatron/core/transformer/moe/experts.py`): a product and a sum each, all
/// put together and rounded; back a rounding, two products and two sums. The others are in products.
fn lower_bias(work: &mut Writer<'_>, len: u64) {
    let groups = work.setting.local.experts_local.max(1);
    let (wide, each) = (work.wide, len.div_ceil(groups));
    let add = |len, dtype| Op::Add { len, dtype };
    for _ in 0..groups {
        work.forward(add(each, Dtype::F32));
    }
    let (kind, dtype) = (SweepKind::Copy, Dtype::F32);
    work.forward(Op::Sweep { kind, len, dtype });
    work.forward(add(len, wide));
    for _ in 0..groups {
        work.backward(add(each, Dtype::F32));
        work.backward(add(each, Dtype::F32));
    }
    work.backward(add(len, wide));
    work.backward(add(len, wide));
}

fn grouped_linear(work: &mut Writer<'_>, rows: u64, n: u64, k: u64) {
    let groups = work.setting.local.experts_local;
    let dtype = work.setting.precision.compute();
    let op = |pass| Op::GroupedGemm {
        groups,
        rows,
        n,
        k,
        pass,
        dtype,
    };
    work.forward(op(Pass::Forward));
    work.backward(op(Pass::Dgrad));
    work.backward(op(Pass::Wgrad));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Batch;
    use crate::local::Local;
    use crate::lower::layer;
    use crate::model::presets;
    use crate::rules::{Rules, space};
    use crate::runtime::{LayerGroups, Task};

    /// Collectives over the experts' ranks of a forward pass, TP1 EP4 ETP2 on 16 ranks.
    fn exchanges(dispatcher: Dispatcher) -> Vec<(CollectiveKind, u32)> {
        let work = lowered(
            "mixtral-8x7b",
            "tp=1,cp=1,pp=1,ep=4,etp=2,mbs=1",
            dispatcher,
        )
        .forward;
        let sent = work.iter().filter_map(|work| match work.task {
            Task::Collective(collective) => Some((collective.kind, collective.ranks)),
            _ => None,
        });
        sent.collect()
    }

    /// The first layer of a model on 16 ranks.
    fn lowered(preset: &str, pins: &str, dispatcher: Dispatcher) -> crate::runtime::Lowered {
        lowered_in(preset, pins, dispatcher, Precision::Bf16)
    }

    /// The same in a precision.
    fn lowered_in(
        preset: &str,
        pins: &str,
        dispatcher: Dispatcher,
        precision: Precision,
    ) -> crate::runtime::Lowered {
        let model = presets::load(preset).expect("a preset");
        let cluster = moefold_profiles::presets::cluster("dgx-h100").expect("a preset");
        let batch = Batch {
            seq_len: 4096,
            global_batch: 32,
        };
        let pins = pins.parse().expect("degrees");
        let mut degrees = space(&model, 16, &batch, &pins);
        let layout = Rules::new(&model, &batch)
            .layout(&degrees.next().expect("pinned"))
            .expect("a legal layout");
        let local = Local::new(&layout, &model, &batch, 1.0);
        let groups = LayerGroups::new(&layout, &cluster);
        let setting = Setting {
            precision,
            dispatcher,
            ..Setting::plain(&model, &layout, &local, &groups)
        };
        layer(&setting, &model.layers[0])
    }

    /// Of GPT-OSS on 4 ranks of experts: 8 of 32 experts a rank, 16384 rows of 2880 for 4096 tokens and 4 choices. Each
    /// expert adds its bias in f32, and back two products; queries and keys turn in 4 passes of bf16 each way.
    #[test]
    fn golden_biases_of_experts_and_unfused_rotation() {
        let pins = "tp=1,cp=1,pp=1,ep=4,etp=1,mbs=1";
        let both = |preset: &str| {
            let lowered = lowered(preset, pins, Dispatcher::Alltoall);
            [lowered.forward, lowered.backward].map(|list| {
                let of = |part: Part, wanted: Op| {
                    let is_it = |work: &&crate::runtime::Work| {
                        work.part == Some(part) && work.task == Task::Op(wanted)
                    };
                    list.iter().filter(is_it).count()
                };
                let (rows, heads) = (4096 * 4, 4096 * (64 + 8) * 64);
                let add = |len, dtype| Op::Add { len, dtype };
                [
                    of(Part::Experts, add(rows / 8 * 2880, Dtype::F32)),
                    of(Part::Projection, add(heads, Dtype::Bf16)),
                ]
            })
        };
        assert_eq!(both("gpt-oss-20b"), [[8, 4], [16, 4]]);
        assert_eq!(both("mixtral-8x7b"), [[0, 0], [0, 0]]);
    }

    /// 8 experts a rank of 16384 rows in MXFP8, which quantizes 32 at once: 16 more rows each.
    #[test]
    fn golden_rows_of_experts_are_padded_to_what_is_quantized_at_once() {
        let rows = |precision| {
            let pins = "tp=1,cp=1,pp=1,ep=4,etp=1,mbs=1";
            let list = lowered_in("gpt-oss-20b", pins, Dispatcher::Alltoall, precision).forward;
            let of = |work: &crate::runtime::Work| match work.task {
                Task::Op(Op::Swiglu { rows, .. }) => Some(rows),
                _ => None,
            };
            list.iter().find_map(of).expect("an activation")
        };
        assert_eq!(rows(Precision::Bf16), 4096 * 4);
        assert_eq!(rows(Precision::Fp8), 4096 * 4 + 8 * 8);
        assert_eq!(rows(Precision::Mxfp8), 4096 * 4 + 8 * 16);
    }

    #[test]
    fn golden_all_gather_dispatch_includes_the_expert_tensor_group() {
        use CollectiveKind::{AllGather, AllToAll, ReduceScatter};
        let gathered = exchanges(Dispatcher::Allgather);
        assert_eq!(gathered, [(AllGather, 8), (AllGather, 8)]);
        let sent = exchanges(Dispatcher::Alltoall);
        let own = [(AllGather, 2), (ReduceScatter, 2)];
        assert_eq!(
            sent,
            [&[(AllToAll, 4)][..], &own, &[(AllToAll, 4)]].concat()
        );
    }
}
