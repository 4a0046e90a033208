//! Lowers the token mixers: grouped-query, latent, shared-key/value attention and linear mixers.
//!
//! Under context parallelism a rank holds `1/cp` of the sequence in zig-zag order. On a ring (Megatron-Core's
//! default, `p2p`) it meets one block of keys at a time, gathered all of them; or it has the whole sequence of a
//! share of the heads. Both go together: neighbours exchange heads, and their blocks go around a ring (`a2a+p2p`).

use moefold_profiles::op::SweepKind;
use moefold_profiles::trace::Category;
use moefold_profiles::{CollectiveKind, Dtype, Op, Pass};

use super::{Writer, over};
use crate::choice::CpComm;
use crate::mesh::Placement;
use crate::model::{Gqa, LinearMixer, Mixer, Mla, QkNorm, SharedKv};
use crate::runtime::{Part, Task};

/// Lowers the norm, the mixer and the residual sum after it.
pub(crate) fn lower(work: &mut Writer<'_>, mixer: &Mixer) {
    let local = *work.setting.local;
    work.at(Category::Attention, Part::Norm);
    work.norm(local.tokens_local, work.setting.model.hidden);
    match mixer {
        Mixer::Gqa(gqa) => lower_gqa(work, gqa),
        Mixer::Mla(mla) => lower_mla(work, mla),
        Mixer::SharedKv(shared) => lower_shared_kv(work, shared),
        Mixer::Linear(linear) => lower_linear(work, linear),
    }
    work.residual();
}

/// The shape of an attention core.
struct Core {
    heads: u64,
    kv_heads: u64,
    /// Keys a query sees at most, where fewer than the sequence.
    keys: Option<u64>,
    qk_dim: u64,
    v_dim: u64,
}

fn lower_core(work: &mut Writer<'_>, core: &Core) {
    let local = *work.setting.local;
    work.at(Category::Attention, Part::Core);
    let dtype = if work.setting.fp8_attention {
        Dtype::Fp8
    } else {
        work.wide
    };
    // A window or a selection leaves a band of the causal triangle: every query sees `keys`.
    let limited = core.keys.filter(|&keys| keys < local.seq_len);
    let [exchanging, ring] = work.setting.groups.cp_levels(work.setting.cp_comm);
    let (inside, blocks) = (u64::from(exchanging.ranks), u64::from(ring.ranks));
    if inside > 1 {
        exchange_heads(work, core, exchanging);
    }
    // Between exchanges a rank has the tokens of its neighbours, and a share of the heads.
    let own = local.seq_len.div_ceil(local.cp) * inside;
    let (heads, kv_heads) = (core.heads.div_ceil(inside), core.kv_heads.div_ceil(inside));
    let attention = |q_len, kv_len, causal| {
        move |pass| Op::Attention {
            batch: local.mbs,
            heads,
            kv_heads,
            q_len,
            kv_len,
            qk_dim: core.qk_dim,
            v_dim: core.v_dim,
            causal,
            pass,
            dtype,
        }
    };
    let tokens = local.tokens * inside;
    let block = tokens * kv_heads * (core.qk_dim + core.v_dim);
    if work.setting.fp8_attention {
        quantize_core(work, tokens, heads * core.qk_dim, block, heads * core.v_dim);
    }
    if let Some(keys) = limited {
        work.forward(attention(own, keys, false)(Pass::Forward));
        // cuDNN's backward kernels in FP8 skip nothing of a window (NVIDIA/cudnn-frontend@60e572b7, gpt_oss on GB200: 1.73
        // to 90 ms from 4096 to 32768 positions in a window of 128, where bf16 takes 0.47 to 3.7).
        let whole = work.setting.fp8_attention;
        work.backward(if whole {
            attention(own, own, true)(Pass::Backward)
        } else {
            attention(own, keys, false)(Pass::Backward)
        });
    } else {
        // The rank's own block is causal; of every other block the zig-zag order leaves half.
        work.both(attention(own, own, true));
        for _ in 1..blocks {
            work.both(attention(own, own.div_ceil(2), false));
        }
        // Of each block the partial output is merged into the output, and back the gradient of its queries. Halves
        // of other blocks are copied before their core, and gradients of their keys and values summed after it
        // (Transformer Engine, `context_parallel.py`, `AttnFuncWithCPAndKVP2P`).
        let dtype = work.wide;
        let output = tokens * heads * core.v_dim;
        for _ in 0..if blocks > 1 { blocks } else { 0 } {
            work.both(|_| Op::Add { len: output, dtype });
        }
        for _ in 1..blocks {
            work.both(|_| Op::Add { len: block, dtype });
        }
    }
    // Ring attention: each rank passes its keys and values on as often as there are others, each time beside the core of
    // a block of which there is one more, and in the backward pass their gradients with them. Gathering all blocks moves
    // the same bytes over the same links, but beside nothing.
    let gathers = work.setting.cp_comm == CpComm::Allgather;
    let beside = (!gathers).then_some(Part::Core);
    if blocks > 1 {
        let all = work.wide.bytes(block * blocks);
        let gather = over(ring, CollectiveKind::AllGather, all);
        let reduce = over(ring, CollectiveKind::ReduceScatter, all);
        work.push(true, Task::Collective(gather), Category::CpComm, beside);
        work.push(false, Task::Collective(gather), Category::CpComm, beside);
        work.push(false, Task::Collective(reduce), Category::CpComm, beside);
    }
}

/// Queries, keys and values are written in FP8 along rows and columns before the core, and back so is the gradient of the
/// output; gradients of the three are read in FP8 and written in the wide type (Transformer Engine, `FusedAttnFunc`): each
/// as many bytes as a copy in bf16.
fn quantize_core(work: &mut Writer<'_>, tokens: u64, queries: u64, others: u64, output: u64) {
    let dtype = work.wide;
    let copy = |len| Op::Sweep {
        kind: SweepKind::Copy,
        len,
        dtype,
    };
    let inputs = tokens * queries + others;
    work.forward(copy(inputs));
    work.backward(copy(tokens * output));
    work.backward(copy(inputs));
}

/// Exchanges of heads against tokens: queries, keys and values before the core and the output after, in the backward
/// pass their gradients the other way.
fn exchange_heads(work: &mut Writer<'_>, core: &Core, group: Placement) {
    let (tokens, dtype) = (work.setting.local.tokens, work.wide);
    let exchange = |width: u64| {
        let bytes = dtype.bytes(tokens * width);
        Task::Collective(over(group, CollectiveKind::AllToAll, bytes))
    };
    let inputs = core.heads * core.qk_dim + core.kv_heads * (core.qk_dim + core.v_dim);
    let (inputs, output) = (exchange(inputs), exchange(core.heads * core.v_dim));
    for (forward, [first, last]) in [(true, [inputs, output]), (false, [output, inputs])] {
        work.push(forward, first, Category::CpComm, None);
        work.push(forward, last, Category::CpComm, None);
    }
}

fn lower_gqa(work: &mut Writer<'_>, gqa: &Gqa) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    let heads = gqa.heads / local.tp;
    let kv_heads = local.kv_heads(gqa.kv_heads);
    let projected = heads * if gqa.output_gate { 2 } else { 1 } + 2 * kv_heads;
    work.at(Category::Attention, Part::Projection);
    work.enter_tp(hidden);
    work.linear_of_norm(local.tokens, projected * gqa.head_dim, hidden);
    if gqa.qk_norm != QkNorm::None {
        work.norm(local.tokens * (heads + kv_heads), gqa.head_dim);
    }
    lower_rope(work, local.tokens * (heads + kv_heads), gqa.rotary_dim);
    lower_core(
        work,
        &Core {
            heads,
            kv_heads,
            keys: gqa.window,
            qk_dim: gqa.head_dim,
            v_dim: gqa.head_dim,
        },
    );
    work.at(Category::Attention, Part::Output);
    if gqa.output_gate {
        let (len, dtype) = (local.tokens * heads * gqa.head_dim, work.wide);
        work.both(|_| Op::Add { len, dtype });
    }
    work.linear(local.tokens, hidden, heads * gqa.head_dim);
    work.leave_tp(hidden);
    if gqa.out_bias {
        // Added by itself where it is not fused with the sum into the residual stream.
        let (len, dtype) = (local.tokens_local * hidden, work.wide);
        let sweep = |kind| Op::Sweep { kind, len, dtype };
        work.forward(sweep(SweepKind::Copy));
        work.backward(sweep(SweepKind::Sum));
    }
}

/// Rotation of queries and keys. Under YaRN their lengths change too, which the fused kernel does not do: Megatron-Core
/// then multiplies by cosines, turns halves, multiplies by sines, sums and puts together, each by itself
/// (`megatron/core/models/common/embeddings/rope_utils.py`): 24 bytes an element, and back as many.
fn lower_rope(work: &mut Writer<'_>, rows: u64, dim: u64) {
    let scaling = work.setting.model.rope_scaling.as_ref();
    if scaling.is_none_or(|scaling| scaling.kind != "yarn") {
        work.rope(rows, dim);
        return;
    }
    let (len, dtype) = (rows * dim, work.wide);
    for _ in 0..4 {
        work.both(|_| Op::Add { len, dtype });
    }
}

fn lower_mla(work: &mut Writer<'_>, mla: &Mla) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    let heads = mla.heads / local.tp;
    let (nope, rope, v) = (mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim);
    let kv_rank = mla.kv_lora_rank;

    // Down-projections run on the rank's own tokens with duplicated weights.
    work.at(Category::Attention, Part::Projection);
    if let Some(rank) = mla.q_lora_rank {
        work.linear(local.tokens_local, rank, hidden);
        work.norm(local.tokens_local, rank);
    }
    work.linear(local.tokens_local, kv_rank + rope, hidden);
    work.norm(local.tokens_local, kv_rank);
    // The latents are gathered, not the hidden states.
    let query_input = mla.q_lora_rank.unwrap_or(hidden);
    work.enter_tp(query_input + kv_rank + rope);

    work.at(Category::Attention, Part::UpProjection);
    work.linear_of_norm(local.tokens, heads * (nope + rope), query_input);
    work.linear_of_norm(local.tokens, heads * (nope + v), kv_rank);
    work.rope(local.tokens * heads, rope);
    // The rotated part is concatenated to every key head: the keys are written once more.
    work.rope(local.tokens * heads, nope + rope);

    let mut keys = None;
    if let Some(indexer) = &mla.indexer {
        keys = Some(indexer.topk);
    }
    if let Some(indexer) = mla.indexer.as_ref().filter(|indexer| !indexer.shared) {
        work.at(Category::Attention, Part::Projection);
        work.linear(
            local.tokens_local,
            indexer.heads * indexer.head_dim,
            query_input,
        );
        work.linear(local.tokens_local, indexer.head_dim + indexer.heads, hidden);
        lower_index_scores(work, indexer.heads, indexer.head_dim, local.seq_len);
    }
    lower_core(
        work,
        &Core {
            heads,
            kv_heads: heads,
            keys,
            qk_dim: nope + rope,
            v_dim: v,
        },
    );
    work.at(Category::Attention, Part::Output);
    work.linear(local.tokens, hidden, heads * v);
    work.leave_tp(hidden);
}

/// Scores of a lightning indexer: every query against every earlier key, one weighted sum over
/// index heads, no values (DeepSeek-V3.2 report, section 2). Queries are split over the
/// tensor-parallel ranks.
fn lower_index_scores(work: &mut Writer<'_>, heads: u64, head_dim: u64, keys: u64) {
    let local = *work.setting.local;
    let dtype = work.wide;
    work.both(|pass| Op::Attention {
        batch: local.mbs,
        heads,
        kv_heads: 1,
        q_len: local.seq_len.div_ceil(local.cp * local.tp),
        kv_len: keys,
        qk_dim: head_dim,
        v_dim: 0,
        causal: true,
        pass,
        dtype,
    });
}

fn lower_shared_kv(work: &mut Writer<'_>, shared: &SharedKv) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    let heads = shared.heads / local.tp;
    work.at(Category::Attention, Part::Projection);
    work.linear(local.tokens_local, shared.q_lora_rank, hidden);
    work.norm(local.tokens_local, shared.q_lora_rank);
    work.linear(local.tokens_local, shared.head_dim, hidden);
    work.norm(local.tokens_local, shared.head_dim);
    work.enter_tp(shared.q_lora_rank + shared.head_dim);
    work.at(Category::Attention, Part::UpProjection);
    work.linear(local.tokens, heads * shared.head_dim, shared.q_lora_rank);
    work.rope(local.tokens * heads, shared.head_dim);

    // A query sees its window, and of the compressed distant keys all or the selected ones.
    let mut keys = shared.window;
    if let Some(compressed) = local.seq_len.checked_div(shared.compress_ratio) {
        // The compressor reads every token and writes one key in `compress_ratio`.
        work.at(Category::Attention, Part::Projection);
        work.linear(local.tokens_local, shared.head_dim, hidden);
        match &shared.indexer {
            Some(indexer) => {
                work.linear(
                    local.tokens_local,
                    indexer.heads * indexer.head_dim,
                    shared.q_lora_rank,
                );
                lower_index_scores(work, indexer.heads, indexer.head_dim, compressed);
                keys += indexer.topk.min(compressed);
            }
            None => keys += compressed,
        }
    }
    lower_core(
        work,
        &Core {
            heads,
            kv_heads: 1,
            keys: Some(keys),
            qk_dim: shared.head_dim,
            v_dim: shared.head_dim,
        },
    );
    // Grouped low-rank output: each group of heads to its own latent, then all latents to hidden.
    work.at(Category::Attention, Part::Output);
    let groups = shared.o_groups.div_ceil(local.tp).max(1);
    let per_group = (heads * shared.head_dim).div_ceil(groups);
    work.linear(local.tokens * groups, shared.o_lora_rank, per_group);
    work.linear(local.tokens, hidden, groups * shared.o_lora_rank);
    work.leave_tp(hidden);
}

fn lower_linear(work: &mut Writer<'_>, linear: &LinearMixer) {
    let local = *work.setting.local;
    let hidden = work.setting.model.hidden;
    let (in_proj, out_proj) = (linear.in_proj / local.tp, linear.out_proj / local.tp);
    work.at(Category::Attention, Part::Projection);
    work.enter_tp(hidden);
    work.linear_of_norm(local.tokens, in_proj, hidden);
    work.at(Category::Attention, Part::Core);
    let dtype = work.wide;
    // Convolution, recurrence and gate each pass over the projected values once. States of a chunk of 128 tokens are
    // f32 and touched four times: written, passed on, read (mamba_ssm, `ssd_combined.py`).
    let states = linear.heads.div_ceil(local.tp) * linear.key_dim * linear.value_dim;
    let states = states * 4 * 2 / 128;
    work.both(|pass| Op::LinearAttention {
        rows: local.tokens,
        heads: linear.heads.div_ceil(local.tp),
        state: linear.key_dim * linear.value_dim,
        width: 3 * in_proj + 2 * out_proj + states,
        pass,
        dtype,
    });
    work.at(Category::Attention, Part::Output);
    work.linear(local.tokens, hidden, out_proj);
    work.leave_tp(hidden);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Batch;
    use crate::local::Local;
    use crate::lower::layer;
    use crate::model::presets;
    use crate::rules::{Rules, space};
    use crate::runtime::{LayerGroups, Setting, Work};

    /// Forward and backward work of Mixtral 8x7B (32 heads and 8 of keys, 128 wide) under TP 2 and CP 4.
    fn lowered(cp_comm: CpComm) -> [Vec<Work>; 2] {
        let model = presets::load("mixtral-8x7b").expect("a preset");
        let cluster = moefold_profiles::presets::cluster("dgx-h100").expect("a preset");
        let batch = Batch {
            seq_len: 32_768,
            global_batch: 8,
        };
        let pins = "tp=2,cp=4,pp=1,ep=8,etp=1,mbs=1".parse().expect("degrees");
        let degrees = space(&model, 8, &batch, &pins).next().expect("pinned");
        let layout = Rules::new(&model, &batch).layout(&degrees);
        let layout = layout.expect("a legal layout");
        let local = Local::new(&layout, &model, &batch, 1.0);
        let groups = LayerGroups {
            cp_inside: 2,
            ..LayerGroups::new(&layout, &cluster)
        };
        let setting = Setting {
            cp_comm,
            ..Setting::plain(&model, &layout, &local, &groups)
        };
        let lowered = layer(&setting, &model.layers[0]);
        [lowered.forward, lowered.backward]
    }

    /// Both levels of a hierarchy: two neighbours exchange half of the heads, and have two blocks of their tokens; one half
    /// of the other two ranks' goes around.
    #[test]
    fn golden_what_a_hierarchy_computes_and_sends() {
        use CollectiveKind::{AllGather, AllToAll, ReduceScatter};
        let own = |width: u64| 8192 * width * 128 * 2;
        // Two blocks of 16384 tokens of 2 heads of keys and values.
        let ring = 2 * 16_384 * 2 * 256 * 2;
        let [forward, backward] = communication(CpComm::Hierarchical);
        let there = [
            (AllToAll, own(16 + 4 + 4), false),
            (AllToAll, own(16), false),
            (AllGather, ring, true),
        ];
        assert_eq!(sent(&forward), there);
        let back = [
            (AllToAll, own(16), false),
            (AllToAll, own(16 + 4 + 4), false),
            (AllGather, ring, true),
            (ReduceScatter, ring, true),
        ];
        assert_eq!(sent(&backward), back);
        let groups = |work: &[Work]| -> Vec<[u32; 2]> {
            let each = work.iter().filter_map(|work| match work.task {
                Task::Collective(all) => Some([all.ranks, all.ranks_per_domain]),
                _ => None,
            });
            each.collect()
        };
        assert_eq!(groups(&forward), [[2, 2]; 3]);
        let dtype = moefold_profiles::Dtype::Bf16;
        let [forward, _] = lowered(CpComm::Hierarchical);
        let attention: Vec<(u64, u64, u64, bool)> = forward
            .iter()
            .filter_map(|work| match work.task {
                Task::Op(Op::Attention {
                    heads,
                    q_len,
                    kv_len,
                    causal,
                    ..
                }) => Some((heads, q_len, kv_len, causal)),
                _ => None,
            })
            .collect();
        assert_eq!(
            attention,
            [(8, 16_384, 16_384, true), (8, 16_384, 8192, false)]
        );
        let len = 16_384 * 8 * 128;
        let merged = |work: &&Work| {
            work.part == Some(Part::Core) && work.task == Task::Op(Op::Add { len, dtype })
        };
        assert_eq!(forward.iter().filter(merged).count(), 2);
    }

    /// That of both passes over the context-parallel group.
    fn communication(cp_comm: CpComm) -> [Vec<Work>; 2] {
        lowered(cp_comm).map(|work| {
            let work = work.into_iter();
            work.filter(|work| work.category == Category::CpComm)
                .collect()
        })
    }

    /// Of a ring of four, 8192 tokens each: a causal block and three halves, the output of 16 heads merged four times,
    /// and keys and values of 4 heads passed over three times, in both passes.
    #[test]
    fn golden_what_a_ring_computes() {
        for (pass, work) in lowered(CpComm::P2p).into_iter().enumerate() {
            let of = |wanted: Op| {
                let is_it =
                    |work: &&Work| work.part == Some(Part::Core) && work.task == Task::Op(wanted);
                work.iter().filter(is_it).count()
            };
            let dtype = moefold_profiles::Dtype::Bf16;
            let attention = |kv_len, causal| Op::Attention {
                batch: 1,
                heads: 16,
                kv_heads: 4,
                q_len: 8192,
                kv_len,
                qk_dim: 128,
                v_dim: 128,
                causal,
                pass: [
                    moefold_profiles::Pass::Forward,
                    moefold_profiles::Pass::Backward,
                ][pass],
                dtype,
            };
            assert_eq!(of(attention(8192, true)), 1);
            assert_eq!(of(attention(4096, false)), 3);
            let output = 8192 * 16 * 128;
            assert_eq!(of(Op::Add { len: output, dtype }), 4);
            let block = 8192 * 4 * 256;
            assert_eq!(of(Op::Add { len: block, dtype }), 3);
        }
    }

    fn sent(work: &[Work]) -> Vec<(CollectiveKind, u64, bool)> {
        let sent = work.iter().filter_map(|work| match work.task {
            Task::Collective(all) => Some((all.kind, all.bytes.0, work.beside.is_some())),
            _ => None,
        });
        sent.collect()
    }

    /// Elements a token of a tensor-parallel rank, as Megatron-Core and Transformer Engine send them: keys and
    /// values `2 * 4 * 128` around the ring or gathered, and there and back again in the backward pass; heads
    /// against tokens queries, keys and values, and the output.
    #[test]
    fn golden_what_travels_between_context_parallel_ranks() {
        use CollectiveKind::{AllGather, AllToAll, ReduceScatter};
        let all = 32_768 * 2 * 4 * 128 * 2;
        for (cp_comm, beside) in [(CpComm::P2p, true), (CpComm::Allgather, false)] {
            let [forward, backward] = communication(cp_comm);
            assert_eq!(sent(&forward), [(AllGather, all, beside)]);
            let back = [(AllGather, all, beside), (ReduceScatter, all, beside)];
            assert_eq!(sent(&backward), back);
        }
        let [forward, backward] = communication(CpComm::A2a);
        let own = |width: u64| 8192 * width * 128 * 2;
        let mut expected = vec![
            (AllToAll, own(16 + 4 + 4), false),
            (AllToAll, own(16), false),
        ];
        assert_eq!(sent(&forward), expected);
        expected.reverse();
        assert_eq!(sent(&backward), expected);
    }
}
