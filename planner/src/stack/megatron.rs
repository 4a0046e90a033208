//! [`Declared`]: Megatron-Core with Transformer Engine, by declarations.
//!
//! What it runs is in [`crate::lower`]; here is what it keeps for the backward pass and works in.
//! The list follows Megatron-LM at d98e8a64 (grouped experts of `megatron/core/transformer/moe`,
//! multi-latent attention, flash attention, dropout 0, memory-efficient permutation: the routing
//! probability multiplies the activation, so expert outputs are not saved). It is checked against
//! Table 3 of arXiv 2603.07685: 1788 MiB for a DeepSeek-V3 layer at 4096 tokens.

use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Dtype, Precision};

use crate::choice::{Module, Offload, OffloadModule, Recompute};
use crate::local::Local;
use crate::lower::{self, ends};
use crate::model::{
    Ffn, Gqa, Layer, LinearKind, LinearMixer, Mixer, Mla, Mlp, Model, Moe, QkNorm, SharedKv,
};
use crate::runtime::{
    Again, Block, Level, Lowered, Part, Passes, Piece, Runtime, Setting, StageMemory, StepMemory,
    Task, Work, WorkingSets,
};
use crate::saved::SavedTensor;
use crate::shard;
use crate::stack::graphs;

/// Answers for Megatron-Core.
#[derive(Debug, Clone, Copy, Default)]
pub struct Declared;

impl Runtime for Declared {
    fn work(&self, setting: &Setting<'_>, piece: Piece<'_>, sets: &[Recompute]) -> Lowered {
        let mut lowered = match piece {
            Piece::Embedding => ends::embedding(setting),
            Piece::Layer(layer) => lower::layer(setting, layer),
            Piece::Head => {
                let mut lowered = ends::head(setting);
                for layer in &setting.model.mtp {
                    let depth = ends::mtp(setting, layer);
                    lowered.forward.extend(depth.forward);
                    lowered.backward.extend(depth.backward);
                }
                lowered
            }
        };
        lowered.again = again(&lowered.forward, sets);
        if let (Piece::Layer(layer), false) = (piece, setting.offload.is_none()) {
            // Under one recompute set, what leaves is what it leaves.
            let set = match sets {
                [set] => set,
                _ => &Recompute::None,
            };
            let [_, bytes] = kept_and_moved(setting, layer, set);
            let transfer = |leaves| Work {
                task: Task::Transfer { bytes, leaves },
                category: Category::Offload,
                part: None,
                beside: None,
                of_weights: false,
                pauses: false,
            };
            lowered.forward.push(transfer(true));
            lowered.backward.insert(0, transfer(false));
        }
        lowered
    }

    fn block(&self, setting: &Setting<'_>, layer: &Layer, block: Block) -> Lowered {
        lower::block(setting, layer, block)
    }

    fn holds_alike(&self) -> bool {
        true
    }

    fn memory(
        &self,
        setting: &Setting<'_>,
        piece: Piece<'_>,
        sets: &[Recompute],
    ) -> Vec<StageMemory> {
        match piece {
            Piece::Embedding => {
                let shard = shard::embedding(setting.model, setting.local);
                // Its gradient is a matrix of its own in the type of the weights, which is then added to the main
                // gradients (`VocabParallelEmbedding` in `megatron/core/tensor_parallel/layers.py`,
                // `_make_backward_post_hook` in `megatron/core/distributed/distributed_data_parallel.py`).
                let gradient = setting.precision.activation().bytes(shard.split);
                let memory = StageMemory {
                    shard,
                    sets: WorkingSets {
                        embedding: gradient,
                        ..WorkingSets::default()
                    },
                    ..StageMemory::default()
                };
                vec![memory; sets.len()]
            }
            Piece::Layer(layer) => {
                let of = |set| layer_memory(setting, layer, set);
                sets.iter().map(of).collect()
            }
            Piece::Head => {
                // Of the depths of multi-token prediction nothing leaves.
                let offload = setting.offload;
                let setting = &Setting {
                    offload: Offload::NONE,
                    ..*setting
                };
                let whole = |mut memory: StageMemory| {
                    if !offload.is_none() {
                        memory.passes = memory.passes.leaving(Level::default());
                    }
                    memory
                };
                let of = |set| whole(head_memory(setting, set));
                sets.iter().map(of).collect()
            }
        }
    }

    fn step(&self, _setting: &Setting<'_>, _microbatches: u32) -> StepMemory {
        StepMemory::default()
    }
}

/// The forward work, part after part, with the sets that run it again.
fn again(forward: &[Work], sets: &[Recompute]) -> Vec<Again> {
    let parts = forward.chunk_by(|a, b| a.part == b.part);
    let of = |work: &[Work]| {
        let part = work[0].part?;
        let sets = Again::sets(sets.iter().map(|set| runs_again(set, part)));
        let work = work.to_vec();
        (sets > 0).then_some(Again { sets, work })
    };
    parts.filter_map(of).collect()
}

/// Whether a recompute set runs the forward work of a part again in the backward pass.
fn runs_again(recompute: &Recompute, part: Part) -> bool {
    let modules = match recompute {
        Recompute::None => return false,
        Recompute::Full => return part != Part::Ends,
        Recompute::Modules(modules) => modules,
    };
    modules.iter().any(|module| match module {
        Module::CoreAttn => part == Part::Core,
        Module::MlaUpProj => part == Part::UpProjection,
        Module::Layernorm => part == Part::Norm,
        Module::MoeAct => part == Part::ExpertActivation,
        Module::Mlp => part == Part::Mlp,
        Module::SharedExperts => part == Part::Shared,
        Module::Moe => matches!(
            part,
            Part::Router | Part::Dispatch | Part::Experts | Part::ExpertActivation | Part::Shared
        ),
    })
}

fn layer_memory(setting: &Setting<'_>, layer: &Layer, recompute: &Recompute) -> StageMemory {
    let (model, local) = (setting.model, setting.local);
    let [kept, moved] = kept_and_moved(setting, layer, recompute);
    let (forward, backward) = transient(setting, layer, recompute);
    StageMemory {
        shard: shard::layer(model, layer, local),
        passes: if setting.offload.is_none() {
            Passes::keeping(kept)
        } else {
            Passes::keeping_beside(kept, moved)
        },
        sets: WorkingSets {
            forward,
            backward,
            ..WorkingSets::default()
        },
        ..StageMemory::default()
    }
}

/// Bytes that a layer keeps on the device, and that leave for the host (fine-grained activation offloading,
/// `megatron/core/pipeline_parallel/fine_grained_activation_offload.py`): a layer's leave beside the next layer and
/// come back beside it.
fn kept_and_moved(setting: &Setting<'_>, layer: &Layer, recompute: &Recompute) -> [Bytes; 2] {
    let (model, local, precision) = (setting.model, setting.local, setting.precision);
    let leaves = |tensor: &SavedTensor| {
        let module = offloaded_with(tensor);
        module.is_some_and(|m| setting.offload.covers(m) && m.is_kept(layer, recompute))
    };
    let mut bytes = [Bytes::ZERO; 2];
    for tensor in saved(model, layer, local, precision, recompute) {
        bytes[usize::from(leaves(&tensor))] += tensor.bytes();
    }
    bytes[0] += precision
        .activation()
        .bytes(graphs::given(setting, layer, recompute));
    bytes
}

/// The module of `--offload-modules` that moves a saved tensor.
fn offloaded_with(tensor: &SavedTensor) -> Option<OffloadModule> {
    Some(match (tensor.module, tensor.name) {
        ("attention", "input") => OffloadModule::AttnNorm,
        ("attention", "norm_output" | "query_latent_norm" | "kv_latent_norm") => {
            OffloadModule::QkvLinear
        }
        ("attention", "query" | "key" | "value") => OffloadModule::CoreAttn,
        ("attention", "output") => OffloadModule::AttnProj,
        ("mlp" | "moe", "input") => OffloadModule::MlpNorm,
        ("moe", "dispatched") => OffloadModule::ExpertFc1,
        ("moe", "fc1_output") => OffloadModule::MoeAct,
        _ => return None,
    })
}

/// Final norm, head and loss, and the multi-token-prediction depths beside them. A tied head on one rank
/// with the embedding is the same matrix; the caller takes it off.
fn head_memory(setting: &Setting<'_>, recompute: &Recompute) -> StageMemory {
    let (model, local) = (setting.model, setting.local);
    let wide = setting.precision.activation();
    let vocab = shard::vocab(model, local.tp);
    // Transformer Engine's cross entropy turns wide logits into their gradient in place.
    let logits = Bytes(2 * local.tokens * vocab);
    // An unused weight gradient in bf16 keeps autograd's hooks firing
    // (`megatron/core/tensor_parallel/layers.py`), beside the gathered input and its gradient. Autograd keeps that of the
    // main logits until it has added that of each depth, whose logits are backward after them.
    let unused = 2 * vocab * model.hidden;
    let unused = if model.mtp.is_empty() {
        unused
    } else {
        unused.max((2 * unused).saturating_sub(logits.0))
    };
    let head = unused + 4 * local.tokens * model.hidden;
    let width = local.tokens_local * model.hidden;
    let mut shard = shard::head(model, local);
    // Depths embed tokens: where the embedding is on another rank, with a copy of it.
    let embeds = !model.mtp.is_empty() && !model.tied_embeddings;
    if embeds && setting.layout.places().parts_ends() {
        shard += shard::embedding(model, local);
    }
    let mut memory = StageMemory {
        shard,
        // Input and output of the final norm.
        passes: Passes::keeping(wide.bytes(2 * width)),
        sets: WorkingSets {
            logits,
            head: Bytes(head),
            ..WorkingSets::default()
        },
        ..StageMemory::default()
    };
    for (layer, shard) in model.mtp.iter().zip(shard::mtp(model, local)) {
        // Two norms' inputs, the projection's input of twice the width, the final norm's two; the
        // depth's logits wait, as the main head's, for the backward pass.
        let ends = StageMemory {
            passes: Passes::keeping(wide.bytes(6 * width)),
            sets: WorkingSets {
                logits,
                ..WorkingSets::default()
            },
            ..StageMemory::default()
        };
        let inner = StageMemory {
            shard,
            ..layer_memory(setting, layer, recompute)
        };
        memory.add_layers(&inner, 1);
        memory.add_layers(&ends, 1);
    }
    memory
}

/// A list being written: one line a tensor.
struct List<'a> {
    saved: Vec<SavedTensor>,
    module: &'static str,
    wide: Dtype,
    linear: Dtype,
    recompute: &'a Recompute,
}

impl List<'_> {
    /// A tensor in the type activations travel in.
    fn wide(&mut self, name: &'static str, elements: u64) {
        self.push(name, elements, self.wide);
    }

    /// The input of a linear layer, saved in the type it multiplies in.
    fn linear_input(&mut self, name: &'static str, elements: u64) {
        self.push(name, elements, self.linear);
    }

    /// Whether linear layers keep a narrower copy of their input than the tensor itself.
    fn quantizes(&self) -> bool {
        self.linear.bits() < self.wide.bits()
    }

    /// Attention's output, which the core keeps for its own backward in the type it travels in, and
    /// the input of the projection after it. Where neither quantizes they are one tensor.
    fn core_output(&mut self, elements: u64, gated: bool) {
        let own = self.quantizes() && !self.drops(Module::CoreAttn);
        if gated || own {
            self.wide("core_output", elements);
        }
        self.linear_input("output", elements);
    }

    fn push(&mut self, name: &'static str, elements: u64, dtype: Dtype) {
        if elements > 0 {
            self.saved.push(SavedTensor {
                module: self.module,
                name,
                elements,
                dtype,
            });
        }
    }

    fn drops(&self, module: Module) -> bool {
        self.recompute.covers(module)
    }
}

/// See the module's documentation.
pub fn saved(
    model: &Model,
    layer: &Layer,
    local: &Local,
    precision: Precision,
    recompute: &Recompute,
) -> Vec<SavedTensor> {
    let mut list = List {
        saved: Vec::with_capacity(24),
        module: "layer",
        wide: precision.activation(),
        linear: precision.compute(),
        recompute,
    };
    let residual = local.tokens_local * model.hidden * model.residual_streams;
    if *recompute == Recompute::Full {
        list.wide("input", residual);
        return list.saved;
    }
    if let Some(mixer) = &layer.mixer {
        list.module = "attention";
        list.wide("input", residual);
        norm_output(&mut list, model, local);
        match mixer {
            Mixer::Gqa(gqa) => keep_gqa(&mut list, gqa, local),
            Mixer::Mla(mla) => keep_mla(&mut list, mla, local),
            Mixer::SharedKv(shared) => keep_shared_kv(&mut list, shared, local),
            Mixer::Linear(linear) => keep_linear(&mut list, linear, local),
        }
    }
    match &layer.ffn {
        Some(Ffn::Dense(mlp)) => {
            list.module = "mlp";
            list.wide("input", residual);
            norm_output(&mut list, model, local);
            if !list.drops(Module::Mlp) {
                keep_mlp(&mut list, mlp, local.tokens, local.tp);
            }
        }
        Some(Ffn::Moe(moe)) => {
            list.module = "moe";
            list.wide("input", residual);
            // The router reads its input, and recomputation starts from it, unquantized.
            let input = local.tokens_local * model.hidden;
            if list.drops(Module::Moe) {
                list.wide("norm_output", input);
            } else {
                if !list.drops(Module::Layernorm) {
                    list.wide("norm_output", input);
                    let copied = moe.shared.is_some() && !list.drops(Module::SharedExperts);
                    if list.quantizes() && copied {
                        list.linear_input("shared_input", input);
                    }
                }
                keep_moe(&mut list, model, moe, local);
            }
        }
        None => {}
    }
    list.saved
}

/// The norm before a block of linear layers: its output is their input.
fn norm_output(list: &mut List<'_>, model: &Model, local: &Local) {
    if !list.drops(Module::Layernorm) {
        list.linear_input("norm_output", local.tokens_local * model.hidden);
    }
}

fn keep_gqa(list: &mut List<'_>, gqa: &Gqa, local: &Local) {
    let q = local.tokens * gqa.heads * gqa.head_dim / local.tp;
    let kv = local.tokens * local.kv_heads(gqa.kv_heads) * gqa.head_dim;
    list.wide("query", q);
    list.wide("key", kv);
    list.wide("value", kv);
    if gqa.qk_norm != QkNorm::None {
        list.wide("query_before_norm", q);
        list.wide("key_before_norm", kv);
    }
    if gqa.output_gate {
        list.wide("gate", q);
    }
    list.core_output(q, gqa.output_gate);
    lse(list, gqa.heads, local);
}

fn keep_mla(list: &mut List<'_>, mla: &Mla, local: &Local) {
    let qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
    if let Some(rank) = mla.q_lora_rank {
        list.wide("query_latent", local.tokens_local * rank);
        list.linear_input("query_latent_norm", local.tokens_local * rank);
    }
    list.wide(
        "kv_latent",
        local.tokens_local * (mla.kv_lora_rank + mla.qk_rope_head_dim),
    );
    list.linear_input("kv_latent_norm", local.tokens_local * mla.kv_lora_rank);
    if !list.drops(Module::MlaUpProj) {
        list.wide("query", local.tokens * mla.heads * qk / local.tp);
        list.wide("key", local.tokens * mla.heads * qk / local.tp);
        list.wide(
            "value",
            local.tokens * mla.heads * mla.v_head_dim / local.tp,
        );
    }
    if let Some(indexer) = &mla.indexer {
        list.wide(
            "index_query",
            local.tokens_local * indexer.heads * indexer.head_dim,
        );
        list.wide("index_key", local.tokens * indexer.head_dim);
        list.push(
            "selected_keys",
            local.tokens * indexer.topk.min(local.seq_len),
            Dtype::I32,
        );
    }
    let output = local.tokens * mla.heads * mla.v_head_dim / local.tp;
    list.core_output(output, false);
    lse(list, mla.heads, local);
}

/// DeepSeek-V4 attention: the shared key/value head is saved by every rank.
fn keep_shared_kv(list: &mut List<'_>, shared: &SharedKv, local: &Local) {
    let q = local.tokens * shared.heads * shared.head_dim / local.tp;
    list.wide("query_latent", local.tokens_local * shared.q_lora_rank);
    list.linear_input("query_latent_norm", local.tokens_local * shared.q_lora_rank);
    if !list.drops(Module::MlaUpProj) {
        list.wide("query", q);
    }
    list.wide("key_value", local.tokens * shared.head_dim);
    let distant = (local.tokens * shared.head_dim).checked_div(shared.compress_ratio);
    list.wide("compressed_key_value", distant.unwrap_or(0));
    if let Some(indexer) = &shared.indexer {
        list.wide(
            "index_query",
            local.tokens_local * indexer.heads * indexer.head_dim,
        );
        list.push(
            "selected_keys",
            local.tokens * indexer.topk.min(local.seq_len),
            Dtype::I32,
        );
    }
    list.core_output(q, false);
    list.linear_input(
        "output_latent",
        local.tokens * shared.o_groups * shared.o_lora_rank / local.tp,
    );
    lse(list, shared.heads, local);
}

/// A linear mixer: what it projected, its convolved copy, and its output before the projection. The fused scan of Mamba-2
/// convolves again in the backward pass, and keeps what it scanned before its gate besides
/// (`MambaSplitConv1dScanCombinedFn` of mamba_ssm, `ops/triton/ssd_combined.py`, which `MambaMixer._ssm_training` in
/// `megatron/core/ssm/mamba_mixer.py` calls; its norm follows by itself).
fn keep_linear(list: &mut List<'_>, linear: &LinearMixer, local: &Local) {
    list.wide("projected", local.tokens * linear.in_proj / local.tp);
    if linear.kind == LinearKind::Mamba2 {
        list.wide("scanned", local.tokens * linear.out_proj / local.tp);
    } else {
        list.wide("convolved", local.tokens * linear.in_proj / local.tp);
    }
    list.wide("mixed", local.tokens * linear.out_proj / local.tp);
    list.linear_input("output", local.tokens * linear.out_proj / local.tp);
}

/// The softmax's log-sum-exp, which flash attention keeps instead of the scores.
fn lse(list: &mut List<'_>, heads: u64, local: &Local) {
    if !list.drops(Module::CoreAttn) {
        list.push("log_sum_exp", local.tokens * heads / local.tp, Dtype::F32);
    }
}

fn keep_mlp(list: &mut List<'_>, mlp: &Mlp, tokens: u64, tp: u64) {
    list.wide("fc1_output", tokens * fc1_width(mlp) / tp);
    list.linear_input("activation", tokens * mlp.width / tp);
}

fn fc1_width(mlp: &Mlp) -> u64 {
    mlp.width * if mlp.gated { 2 } else { 1 }
}

fn keep_moe(list: &mut List<'_>, model: &Model, moe: &Moe, local: &Local) {
    // Probabilities (f32), the boolean map and the row ids of the permutation: 10 bytes an expert
    // and token, the count of the Megatron model zoo's estimator (deepseek_mem_estimate.py).
    list.push(
        "routing",
        local.tokens_local * moe.experts * 10 / 4,
        Dtype::F32,
    );
    let rows = local.expert_rows;
    list.linear_input("dispatched", rows * model.hidden);
    list.wide("fc1_output", rows * fc1_width(&moe.expert) / local.etp);
    if !list.drops(Module::MoeAct) {
        list.linear_input("activation", rows * moe.expert.width / local.etp);
    }
    list.push("row_probabilities", rows, Dtype::F32);
    if let Some(shared) = &moe.shared
        && !list.drops(Module::SharedExperts)
    {
        list.module = "shared_expert";
        keep_mlp(list, &shared.mlp, local.tokens, local.tp);
    }
}

/// Peak working set of one layer besides what it keeps: forward, backward.
///
/// Forward of a MoE block holds send and receive buffers of dispatch and the experts' output; its
/// backward the gradients of dispatched rows on both sides of the exchange and of both inner
/// activations. Attention's backward holds the gradients of q, k, v and of the output. What a
/// recompute set dropped is back while the layer's backward runs. The maximum over blocks is taken.
fn transient(setting: &Setting<'_>, layer: &Layer, recompute: &Recompute) -> (Bytes, Bytes) {
    let (model, local, precision) = (setting.model, setting.local, setting.precision);
    let wide = |elements: u64| precision.activation().bytes(elements);
    let residual = local.tokens_local * model.hidden * model.residual_streams;
    let (mixer_forward, mixer_backward) = match &layer.mixer {
        Some(Mixer::Gqa(gqa)) => {
            let q = local.tokens * gqa.heads * gqa.head_dim / local.tp;
            let kv = local.tokens * local.kv_heads(gqa.kv_heads) * gqa.head_dim;
            (local.tokens * model.hidden, 2 * q + 2 * kv)
        }
        Some(Mixer::Mla(mla)) => {
            let qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
            let per_head = 2 * qk + 2 * mla.v_head_dim;
            let all = local.tokens * mla.heads * per_head / local.tp;
            (local.tokens * model.hidden, all)
        }
        Some(Mixer::SharedKv(shared)) => {
            let q = local.tokens * shared.heads * shared.head_dim / local.tp;
            (local.tokens * model.hidden, 2 * q)
        }
        Some(Mixer::Linear(linear)) => {
            let all = local.tokens * (2 * linear.in_proj + linear.out_proj) / local.tp;
            (local.tokens * model.hidden, all)
        }
        None => (0, 0),
    };
    let (ffn_forward, ffn_backward) = match &layer.ffn {
        Some(Ffn::Dense(mlp)) => {
            let inner = local.tokens * (fc1_width(mlp) + mlp.width) / local.tp;
            (
                local.tokens * model.hidden,
                inner + local.tokens * model.hidden,
            )
        }
        Some(Ffn::Moe(moe)) => {
            let sent = local.sent_rows * model.hidden;
            let rows = graphs::rows(setting, local);
            let inner = rows * (fc1_width(&moe.expert) + moe.expert.width) / local.etp;
            (
                sent + rows * model.hidden,
                sent + rows * model.hidden + inner,
            )
        }
        None => (0, 0),
    };
    let dropped = if *recompute == Recompute::None {
        Bytes::ZERO
    } else {
        let bytes = |recompute: &Recompute| -> Bytes {
            saved(model, layer, local, precision, recompute)
                .iter()
                .map(SavedTensor::bytes)
                .sum()
        };
        bytes(&Recompute::None).saturating_sub(bytes(recompute))
    };
    let at_once = |both, backward| graphs::at_once(setting, layer, both, backward);
    (
        wide(residual + at_once([mixer_forward, ffn_forward], false)),
        wide(residual + at_once([mixer_backward, ffn_backward], true)) + dropped,
    )
}

#[cfg(test)]
mod tests {
    use moefold_profiles::{HostTimes, TensorClass};

    use super::*;
    use crate::choice::{Dispatcher, Masters, Optimizer, PrimaryWeights, StackName};
    use crate::layout::{Batch, Layout, PartialDegrees};
    use crate::memory;
    use crate::model::presets;
    use crate::runtime::LayerGroups;
    use crate::shard::{self, Shard};
    use crate::stack::Stack;

    /// DeepSeek-V3 at 4096 tokens, TP1 EP64: the setting of arXiv 2603.07685, Table 3.
    fn local() -> Local {
        Local {
            tokens: 4096,
            tokens_local: 4096,
            seq_len: 4096,
            mbs: 1,
            tp: 1,
            cp: 1,
            ep: 64,
            etp: 1,
            sent_rows: 4096 * 8,
            expert_rows: 4096 * 8,
            experts_local: 4,
        }
    }

    fn mib(model: &Model, recompute: &Recompute) -> f64 {
        let layer = &model.layers[60];
        saved(model, layer, &local(), Precision::Bf16, recompute)
            .iter()
            .map(SavedTensor::bytes)
            .sum::<Bytes>()
            .mib()
    }

    #[test]
    fn golden_a_deepseek_v3_layer_keeps_1788_mib() {
        let model = presets::load("deepseek-v3").expect("a preset");
        let all = mib(&model, &Recompute::None);
        assert!((all - 1788.0).abs() < 1.0, "{all}");
        // Without memory-efficient permutation the experts' outputs are saved too: 448 MiB, and the
        // sum is the table's 2236 MiB a layer, 131.0 GiB for the 60 layers it counts alive.
        let outputs = f64::from(4096 * 8 * 7168 / 512) / 1024.0;
        assert_eq!(outputs, 448.0);
        assert!(((all + outputs) * 60.0 / 1024.0 - 131.0).abs() < 0.1);
        assert!((outputs * 60.0 / 1024.0 - 26.25).abs() < 0.01);
    }

    #[test]
    fn golden_fp8_keeps_attentions_output_and_the_routers_input_wide_besides() {
        let model = presets::load("deepseek-v3").expect("a preset");
        let tensors = |precision, recompute: &Recompute| {
            let tensors = saved(&model, &model.layers[60], &local(), precision, recompute);
            let bytes = |name: &str| {
                let of = tensors.iter().filter(|saved| saved.name == name);
                of.map(SavedTensor::bytes).sum::<Bytes>().mib()
            };
            // The input norm of attention, and that of the experts.
            let names = ["core_output", "output", "norm_output", "shared_input"];
            names.map(bytes)
        };
        let none = Recompute::None;
        assert_eq!(tensors(Precision::Bf16, &none), [0.0, 128.0, 112.0, 0.0]);
        assert_eq!(tensors(Precision::Fp8, &none), [128.0, 64.0, 84.0, 28.0]);
        let moe = Recompute::of(vec![Module::Moe, Module::CoreAttn]);
        assert_eq!(tensors(Precision::Fp8, &moe), [0.0, 64.0, 84.0, 0.0]);
    }

    #[test]
    fn golden_recomputing_latent_up_projections_frees_512_mib() {
        let model = presets::load("deepseek-v3").expect("a preset");
        let all = mib(&model, &Recompute::None);
        let less = |module| all - mib(&model, &Recompute::of(vec![module]));
        assert_eq!(less(Module::MlaUpProj), 512.0);
        assert_eq!(less(Module::MoeAct), 128.0);
        assert_eq!(less(Module::Layernorm), 112.0);
        assert_eq!(less(Module::SharedExperts), 48.0);
        assert_eq!(mib(&model, &Recompute::Full), 56.0);
    }

    #[test]
    fn golden_state_of_the_published_deepseek_v3_breakdown() {
        // 256 GPUs, PP4 EP64: 16 MoE layers a rank, EDP 1, dense state over 64 replicas; embedding,
        // head, router and MTP are left out there, so the router is taken off here.
        let model = presets::load("deepseek-v3").expect("a preset");
        let layer = shard::layer(&model, &model.layers[60], &local());
        let mut rank = Shard::default();
        for _ in 0..16 {
            rank += layer;
            rank.replicated -= 256 * 7168;
        }
        let stack = Stack::of(StackName::Megatron);
        let bytes = stack.state(
            Precision::Bf16,
            (Optimizer::Adam, Masters::Fp32, PrimaryWeights::Wide),
            Dtype::F32,
        );
        let state = memory::state([rank.dense(), rank.experts], rank.wide, bytes, [64, 1]);
        let held = (state[TensorClass::Weights] + state[TensorClass::Gradients]).gib();
        assert!((held - 36.4).abs() < 0.05, "{held}");
        assert!(
            (state[TensorClass::Optimizer].gib() - 32.1).abs() < 0.05,
            "{}",
            state[TensorClass::Optimizer]
        );
    }

    /// Nemotron 3 Nano projects 2688 to 10304 = 2 x 4096 + 2 x 8 x 128 + 64 and back from 4096: a scan keeps what was
    /// projected, what it scanned, its output and that normed, 2 bytes each, beside the layer's input and its norm.
    #[test]
    fn golden_what_a_mamba_layer_keeps() {
        let model = presets::load("nvidia-nemotron-3-nano-30b-a3b-bf16").expect("a preset");
        let is_mamba = |layer: &&Layer| matches!(&layer.mixer, Some(Mixer::Linear(_)));
        let layer = model.layers.iter().find(is_mamba).expect("a mixer");
        let tensors = saved(&model, layer, &local(), Precision::Bf16, &Recompute::None);
        let of_mixer = tensors.iter().filter(|saved| saved.module == "attention");
        let bytes: Bytes = of_mixer.map(SavedTensor::bytes).sum();
        assert_eq!(bytes.0, 4096 * 2 * (2 * 2688 + 10304 + 3 * 4096));
    }

    /// DeepSeek-V3's depth embeds tokens where the head is: with a matrix of its own in a pipeline. Two logits of
    /// 129280 x 7168 are backward one after the other, 2 bytes each, and the unused gradient of the first waits for that
    /// of the second, when the first logits are gone.
    #[test]
    fn golden_a_depth_has_an_embedding_and_a_gradient_that_waits() {
        let model = presets::load("deepseek-v3").expect("a preset");
        let cluster = moefold_profiles::presets::cluster("dgx-h100").expect("a preset");
        let batch = Batch {
            seq_len: 4096,
            global_batch: 64,
        };
        let matrix = 129_280 * 7168;
        for (pins, matrices) in [("tp=1,pp=1,ep=64", 1), ("tp=1,pp=2,ep=32", 2)] {
            let degrees: PartialDegrees = format!("{pins},mbs=1").parse().expect("degrees");
            let layout = Layout::new(&degrees.or_one(64), &model, &batch).expect("legal");
            let local = Local::new(&layout, &model, &batch, 1.0);
            let groups = LayerGroups::new(&layout, &cluster);
            let setting = Setting::plain(&model, &layout, &local, &groups);
            let head = Declared.memory(&setting, Piece::Head, &[Recompute::Full]);
            let depths = shard::mtp(&model, setting.local)[0].split;
            assert_eq!(head[0].shard.split - depths, matrices * matrix, "{pins}");
            let (logits, unused) = (2 * 4096 * 129_280, 2 * matrix);
            assert_eq!(head[0].sets.logits.0, 2 * logits);
            let beside = head[0].sets.head.0 - 4 * 4096 * 7168;
            assert_eq!(beside, 2 * unused - logits);
        }
    }

    /// Megatron-LM, `docs/user-guide/features/dist_optimizer.md`: 6 + 12 / d; with moments of bf16 and remainders
    /// 6 + 6 / d.
    #[test]
    fn golden_bytes_of_a_parameter() {
        use Optimizer::{Adam, AdamBf16Moments};
        let stack = Stack::of(StackName::Megatron);
        for (precision, optimizer, masters, expected) in [
            (Precision::Bf16, Adam, Masters::Fp32, 12.0),
            (Precision::Bf16, Adam, Masters::Remainder, 10.0),
            (Precision::Bf16, AdamBf16Moments, Masters::Fp32, 8.0),
            (Precision::Bf16, AdamBf16Moments, Masters::Remainder, 6.0),
            (Precision::Fp32, Adam, Masters::Fp32, 8.0),
        ] {
            let kept = (optimizer, masters, PrimaryWeights::Wide);
            let bytes = stack.state(precision, kept, Dtype::F32);
            assert_eq!(
                (bytes.sharded, bytes.adams),
                (expected, 0.0),
                "{precision} {optimizer:?} {masters:?}"
            );
        }
        // A master and a momentum; of what Adam updates, a second moment.
        let kept = (Optimizer::Muon, Masters::Fp32, PrimaryWeights::Wide);
        let bytes = stack.state(Precision::Bf16, kept, Dtype::F32);
        assert_eq!((bytes.sharded, bytes.adams), (8.0, 4.0));
        assert_eq!(stack.saved(Precision::Bf16, Optimizer::Muon), 10.0);
    }

    /// By hand, from the groups of `parallel_state.py`. 64 H100 under TP1 PP4 EP16 and NCCL had 6.25 GiB beside what
    /// their allocators had reserved (Megatron-LM#6429: 68,973 MB of the device, 62,570 MB reserved): context,
    /// communicators, and buffers for the seven ranks beside it that it exchanges tokens with.
    #[test]
    fn golden_communicators_of_a_rank() {
        use Dispatcher::{Alltoall, Hybridep};
        let model = presets::load("qwen3-30b-a3b").expect("a preset");
        let batch = Batch {
            seq_len: 2048,
            global_batch: 256,
        };
        let layout = |pins: &str, gpus| {
            let degrees: PartialDegrees = format!("{pins},mbs=1").parse().expect("degrees");
            Layout::new(&degrees.or_one(gpus), &model, &batch).expect("legal")
        };
        let stack = Stack::of(StackName::Megatron);
        for (pins, gpus, dispatcher, ends_share, expected) in [
            ("tp=1,pp=4,vpp=2,ep=16", 64, Alltoall, true, 5),
            ("tp=1,pp=4,vpp=2,ep=16", 64, Alltoall, false, 4),
            ("tp=1,pp=1,ep=8", 16, Hybridep, true, 2),
            ("tp=2,pp=1,ep=1", 2, Alltoall, false, 3),
            ("tp=1,pp=1,ep=1", 1, Alltoall, false, 0),
        ] {
            let layout = layout(pins, gpus);
            let beside = stack.communicators_beside(&layout, dispatcher, ends_share);
            assert_eq!(beside, expected, "{pins} {dispatcher:?}");
            let ours = Stack::of(StackName::Moefold);
            assert_eq!(
                ours.communicators_beside(&layout, dispatcher, ends_share),
                0
            );
        }
        // Beside these five: of the replicas, of the experts and of the pipeline.
        let common = stack.common();
        let pairs = stack.staging(Alltoall, model.hidden, 16, 8);
        let beside = (common.context + common.communicator * 8 + pairs).gib();
        assert!((beside / 6.25 - 1.0).abs() < 0.02, "{beside}");
    }

    /// Copies of weights in FP8, by hand: rows and columns on Hopper, one for both on Blackwell where a tensor has one
    /// scale; 32 values and a byte of scale each way under MXFP8.
    #[test]
    fn golden_bytes_of_quantized_weights() {
        use PrimaryWeights::{Fp8, Wide};
        let bytes = |cluster: &str, precision, primary| {
            let cluster = moefold_profiles::presets::cluster(cluster).expect("a preset");
            let stack = Stack::on(StackName::Megatron, &cluster, &HostTimes::default());
            let kept = (Optimizer::Adam, Masters::Fp32, primary);
            stack.state(precision, kept, Dtype::F32).weight
        };
        for (cluster, precision, wide, fp8) in [
            ("dgx-h100", Precision::Fp8, 4.0, 2.0),
            ("gb200-nvl72", Precision::Fp8, 3.0, 1.0),
            ("gb200-nvl72", Precision::Fp8Blockwise, 4.0, 2.0),
            ("gb200-nvl72", Precision::Mxfp8, 4.0625, 2.0625),
        ] {
            assert_eq!(
                bytes(cluster, precision, Wide),
                wide,
                "{cluster} {precision}"
            );
            assert_eq!(bytes(cluster, precision, Fp8), fp8, "{cluster} {precision}");
        }
    }

    #[test]
    fn law_recomputing_more_never_keeps_more() {
        use crate::choice::Module::{Layernorm, MlaUpProj, Mlp, Moe, MoeAct, SharedExperts};
        for preset in presets::names() {
            let model = presets::load(preset).expect("a preset");
            for layer in &model.layers {
                let bytes = |recompute: &Recompute| -> Bytes {
                    saved(&model, layer, &local(), Precision::Bf16, recompute)
                        .iter()
                        .map(SavedTensor::bytes)
                        .sum()
                };
                let none = bytes(&Recompute::None);
                let full = bytes(&Recompute::Full);
                for module in [Layernorm, MlaUpProj, Mlp, Moe, MoeAct, SharedExperts] {
                    let some = bytes(&Recompute::of(vec![module]));
                    assert!(some <= none && full <= some, "{preset} {module:?}");
                }
            }
        }
    }
}
