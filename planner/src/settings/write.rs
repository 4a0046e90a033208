//! [`write()`]: a job as flags and environment for a release of Megatron-LM.

use moefold_profiles::{Cluster, Dtype, Precision};

use super::job::Job;
use super::rules::{self, Target};
use super::table::Facet;
use super::text::Settings;
use super::version::Version;
use super::writer::{Refusal, Writer, Written};
use super::{model, stages};
use crate::choice::{
    Dispatcher, DropPolicy, GraphModule, Masters, Module, Offload, OffloadModule, Optimizer,
    PrimaryWeights, Recompute, ScheduleName, StackName, Zero,
};
use crate::layout::Order;

/// What Megatron-LM needs beside a plan, which says nothing of it: data, length and rates of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// Artificial data, a short run and rates to be replaced, so that the settings run as they are.
    Placeholders,
    /// Nothing: other settings have it.
    Absent,
}

/// Writes a job; what the release cannot say is refused, all of it at once.
pub fn write(
    job: &Job,
    cluster: &Cluster,
    version: Version,
    rest: Rest,
) -> Result<Written, Vec<Refusal>> {
    let mut out = all(job, cluster, version, rest);
    let target = Target {
        version,
        cluster,
        gpus: job.gpus,
    };
    if out.refused.is_empty() {
        // What is written keeps the rules that are read by.
        for broken in rules::broken(&out.written.settings, &target) {
            let (what, nearest) = broken.in_two();
            out.refuse(what, nearest);
        }
    }
    if out.refused.is_empty() {
        Ok(out.written)
    } else {
        Err(out.refused)
    }
}

/// Writes a job, whatever of it is refused.
pub(super) fn all(job: &Job, cluster: &Cluster, version: Version, rest: Rest) -> Writer {
    let mut out = Writer::new(version);
    let options = &job.options;
    model::write(&job.model, options.batch.seq_len, &mut out);
    out.refused_of_model = out.refused.len();
    write_vocabulary(job, rest, &mut out);
    out.set("seq_length", &options.batch.seq_len);
    out.set("micro_batch_size", &options.pins.mbs.unwrap_or(1));
    out.set("global_batch_size", &options.batch.global_batch);
    let microbatches = microbatches(job);
    out.because(format!(
        "{microbatches} microbatches a step on each replica"
    ));
    write_degrees(job, &mut out);
    write_schedule(job, &mut out);
    write_context(job, &mut out);
    let experts = job.model.num_moe_layers() > 0;
    if experts {
        write_dispatch(job, cluster, &mut out);
        write_capacity(job, &mut out);
    }
    write_kernels(job, experts, &mut out);
    write_precision(job, &mut out);
    write_optimizer(job, &mut out);
    write_overlap(job, &mut out);
    write_graphs(job, version, &mut out);
    write_recompute(job, &mut out);
    write_offload(job, &mut out);
    write_environment(job, cluster, version, &mut out);
    if rest == Rest::Placeholders {
        write_placeholders(&mut out);
    }
    out
}

fn microbatches(job: &Job) -> u64 {
    let pins = &job.options.pins;
    let model = pins.tp.unwrap_or(1) * pins.cp.unwrap_or(1) * pins.pp.unwrap_or(1);
    let replicas = u64::from(job.gpus / model.max(1)).max(1);
    let each = replicas * u64::from(pins.mbs.unwrap_or(1));
    job.options.batch.global_batch / each
}

fn write_vocabulary(job: &Job, rest: Rest, out: &mut Writer) {
    let vocabulary = job.model.vocab_size;
    let tp = u64::from(job.options.pins.tp.unwrap_or(1));
    out.set("tokenizer_type", "NullTokenizer");
    if rest == Rest::Placeholders {
        out.because("replace it with --tokenizer-type HuggingFaceTokenizer --tokenizer-model NAME for data of your own");
    }
    out.set("vocab_size", &(vocabulary - 1));
    out.because(format!(
        "{vocabulary} with the end of a document, which the null tokenizer adds"
    ));
    if rest == Rest::Placeholders
        && !vocabulary.is_multiple_of(128 * tp)
        && vocabulary.is_multiple_of(tp)
    {
        let share = vocabulary / tp;
        let by = (1..=7)
            .map(|power| 1_u64 << power)
            .filter(|by| share.is_multiple_of(*by));
        out.set("make_vocab_size_divisible_by", &by.max().unwrap_or(1));
        out.because("no row more than the model has");
    }
}

fn write_degrees(job: &Job, out: &mut Writer) {
    let pins = &job.options.pins;
    let [tp, cp, pp] = [pins.tp, pins.cp, pins.pp].map(|pin| pin.unwrap_or(1));
    let [ep, etp] = [pins.ep, pins.etp].map(|pin| pin.unwrap_or(1));
    out.set("tensor_model_parallel_size", &tp);
    if tp > 1 {
        out.because(format!("attention and dense MLPs over {tp} ranks"));
        out.on("sequence_parallel");
        out.because(
            "norms and residuals over the same ranks; experts need it under tensor parallelism",
        );
    }
    out.set("pipeline_model_parallel_size", &pp);
    if pp > 1 {
        out.because(format!("{} layers over {pp} ranks", job.model.layers.len()));
    }
    if job.options.order == Some(Order::DP_LAST) {
        out.on("use_tp_pp_dp_mapping");
        out.because("stages of a pipeline are neighbours, and replicas apart");
    }
    out.set("context_parallel_size", &cp);
    if cp > 1 {
        let tokens = job.options.batch.seq_len / u64::from(cp);
        out.because(format!("{tokens} tokens of a sequence on a rank"));
    }
    if let Some(moe) = job.model.moe() {
        out.set("expert_model_parallel_size", &ep);
        if ep > 1 {
            let each = moe.experts / u64::from(ep);
            out.because(format!(
                "{} experts over {ep} ranks, {each} on each",
                moe.experts
            ));
        }
        out.set("expert_tensor_parallel_size", &etp);
        if etp != tp {
            out.because("not the tensor-parallel size, which it is where it is absent");
        }
    }
}

fn write_schedule(job: &Job, out: &mut Writer) {
    match job.options.schedule {
        None
        | Some(
            ScheduleName::None
            | ScheduleName::OneFOneB
            | ScheduleName::Interleaved
            | ScheduleName::Combined,
        ) => stages::write(job, out),
        Some(schedule) => out.refuse(
            format!("Megatron-Core has no schedule {}", schedule.name()),
            "--schedule 1f1b or interleaved",
        ),
    }
}

fn write_context(job: &Job, out: &mut Writer) {
    if job.options.pins.cp.unwrap_or(1) > 1 {
        let comm = job.options.cp_comm.unwrap_or_default();
        out.set("cp_comm_type", &comm.name());
        out.because(match comm.name() {
            "p2p" => "keys around a ring, beside attention",
            "a2a" => "heads against tokens",
            "a2a+p2p" => "heads against tokens among neighbours, keys around a ring of the others",
            _ => "all keys at once",
        });
        if let Some(sizes) = job.options.cp_sizes {
            let sizes = sizes.map(|size| size.to_string());
            out.list(
                "hierarchical_context_parallel_sizes",
                sizes.iter().map(String::as_str),
            );
            out.because("ranks that exchange heads, and ranks of a ring");
        }
    }
}

fn write_dispatch(job: &Job, cluster: &Cluster, out: &mut Writer) {
    let domain = cluster.gpus_per_domain;
    let backend = |out: &mut Writer, name: &'static str, why: &str| {
        out.set("moe_token_dispatcher_type", "flex");
        out.because("DeepEP and HybridEP are backends of it");
        if name == "deepep" && out.version < Version::V16 {
            out.on("moe_enable_deepep");
        } else {
            out.set("moe_flex_dispatcher_backend", &name);
        }
        out.because(why);
    };
    match job.options.dispatcher {
        None | Some(Dispatcher::Alltoall) => {
            out.set("moe_token_dispatcher_type", "alltoall");
            out.because(
                "rows to the ranks of their experts; the default gathers all tokens everywhere",
            );
        }
        Some(Dispatcher::Allgather) => out.set("moe_token_dispatcher_type", "allgather"),
        Some(Dispatcher::Deepep) => {
            backend(out, "deepep", "a token once to each rank that needs it");
        }
        Some(Dispatcher::Hybridep) if !rules::has_hybridep(out.version) => out.refuse(
            format!("Megatron-Core {} has no HybridEP", out.version.name()),
            "--megatron 0.16, or a plan with --dispatcher deepep or alltoall",
        ),
        Some(Dispatcher::Hybridep) => backend(
            out,
            "hybridep",
            &format!(
                "a token once to each rank that needs it, and permuted on the way; domains of {domain}"
            ),
        ),
    }
}

fn write_capacity(job: &Job, out: &mut Writer) {
    let Some(capacity) = &job.options.capacity else {
        return;
    };
    out.set(
        "moe_expert_capacity_factor",
        &format!("{:?}", capacity.factor),
    );
    out.because("tokens beyond it pass their experts by");
    out.set("moe_token_drop_policy", &capacity.drop_policy.name());
    out.because(match capacity.drop_policy {
        DropPolicy::Probs => "those of the least probability",
        DropPolicy::Position => "the last ones",
    });
    if capacity.pad {
        out.on("moe_pad_expert_input_to_capacity");
        out.because("as many rows for each expert, so that sizes are known beforehand");
    }
}

fn write_kernels(job: &Job, experts: bool, out: &mut Writer) {
    if experts {
        out.on("moe_grouped_gemm");
        out.because("the experts of a rank in one call; prices presume it");
        out.on("moe_permute_fusion");
        out.because("prices presume it");
        out.set("moe_router_dtype", "fp32");
        out.because("what DeepEP and HybridEP take, and what many experts need");
        out.on("moe_router_fusion");
        out.because("fewer launches; Transformer Engine 2.7 or newer");
        let quantized = !matches!(job.options.precision, Precision::Fp32 | Precision::Bf16);
        if quantized && job.options.dispatcher != Some(Dispatcher::Allgather) {
            out.on(if out.version < Version::V16 {
                "moe_router_padding_for_fp8"
            } else {
                "moe_router_padding_for_quantization"
            });
            out.because("rows of an expert as quantized products want them, without a copy");
        }
    }
    out.on("cross_entropy_loss_fusion");
    out.because("prices presume it");
    // Main refuses Transformer Engine's since pull request 5115 of June 2026.
    if out.version == Version::Main {
        out.set("cross_entropy_fusion_impl", "native");
        out.because("the one that Megatron-LM takes; prices presume Transformer Engine's");
    } else {
        out.set("cross_entropy_fusion_impl", "te");
        out.because("prices presume it");
    }
}

fn write_precision(job: &Job, out: &mut Writer) {
    let precision = job.options.precision;
    if precision != Precision::Fp32 {
        out.on("bf16");
        out.because("weights and activations; main gradients and masters are apart");
    }
    let recipe = match precision {
        Precision::Fp32 | Precision::Bf16 => return,
        Precision::Nvfp4 => {
            out.set("fp4_format", "e2m1");
            out.because("products in NVFP4");
            out.set("fp4_recipe", "nvfp4");
            return;
        }
        Precision::Fp8 => ("hybrid", "tensorwise", "one current scale a tensor"),
        Precision::Fp8Delayed => ("hybrid", "delayed", "one scale a tensor, of steps before"),
        Precision::Fp8Blockwise => (
            "e4m3",
            "blockwise",
            "a scale for 128 values, and for 128 x 128 of weights",
        ),
        Precision::Mxfp8 => ("e4m3", "mxfp8", "a scale for 32 values"),
    };
    let (format, name, why) = recipe;
    out.set("fp8_format", &format);
    out.because("products in FP8");
    out.set("fp8_recipe", &name);
    out.because(why);
    if job.options.primary_weights == PrimaryWeights::Fp8 {
        out.on("fp8_param_gather");
        out.because("weights in FP8, without a copy in bf16");
        if precision == Precision::Mxfp8 {
            out.on("reuse_grad_buf_for_mxfp8_param_ag");
            out.because("which are gathered in bf16, into the buffer of gradients");
        }
    }
    if job.options.fp8_attention {
        out.on("fp8_dot_product_attention");
        out.because("attention in FP8 too");
    }
}

fn write_optimizer(job: &Job, out: &mut Writer) {
    let options = &job.options;
    if options.optimizer.deals_tensors() {
        write_muon(job, out);
    } else if options.zero != Zero::Fsdp2 {
        out.on("use_distributed_optimizer");
        out.because("masters and moments over the replicas");
    }
    match options.zero {
        Zero::States => {}
        Zero::Fsdp2 => {
            out.on("use_torch_fsdp2");
            out.because("PyTorch divides weights, gradients and states over the replicas");
            out.on("no_gradient_accumulation_fusion");
            out.because("it has the gradients, not Megatron's buffers");
            out.set("ckpt_format", "torch_dist");
            out.because("a format that it saves");
        }
        zero @ (Zero::Gradients | Zero::Fsdp | Zero::Hybrid) => {
            let all = zero.divides_weights();
            out.on("use_megatron_fsdp");
            let (what, strategy, why) = if all {
                (
                    "weights and gradients",
                    "optim_grads_params",
                    "all that can be divided",
                )
            } else {
                ("gradients", "optim_grads", "all but the weights")
            };
            out.because(format!("{what} over the replicas too"));
            out.set("data_parallel_sharding_strategy", strategy);
            out.because(why);
            out.set("ckpt_format", "fsdp_dtensor");
            out.because("the one format that Megatron-FSDP saves");
            if zero == Zero::Hybrid {
                out.set("outer_dp_sharding_strategy", "optim");
                out.because("masters and moments over instances too");
            }
        }
    }
    if options.instances > 1 {
        out.set("num_distributed_optimizer_instances", &options.instances);
        out.because("so many parts of the replicas");
    }
    let narrow = options.optimizer == Optimizer::AdamBf16Moments;
    let offloads = !options.optimizer_offload.is_none();
    if narrow || offloads {
        out.on("use_precision_aware_optimizer");
        out.because(if narrow {
            "for types of state other than fp32"
        } else {
            "which offload to the CPU is part of"
        });
    }
    if narrow {
        out.set("exp_avg_dtype", "bf16");
        out.because("half of the first moment");
        out.set("exp_avg_sq_dtype", "bf16");
        out.because("half of the second moment");
    }
    if options.masters == Masters::Remainder {
        out.refuse(
            "Megatron-LM has no flag for masters as remainders, which Transformer Engine decides about",
            "--masters fp32",
        );
    }
    if offloads {
        out.on("optimizer_cpu_offload");
        out.because("a share of masters and moments rests on the host");
        out.set("optimizer_offload_fraction", &options.optimizer_offload.0);
        out.because("that share");
    }
    if options.grad_dtype == Dtype::Bf16 {
        if narrow {
            out.set("main_grads_dtype", "bf16");
        } else {
            out.on("grad_reduce_in_bf16");
        }
        out.because("main gradients and their reduction at half the bytes");
    }
}

/// Muon over whole matrices: 0.16 has an optimizer for it, on main it is what the distributed one comes to.
fn write_muon(job: &Job, out: &mut Writer) {
    let version = out.version;
    match version {
        Version::V14 | Version::V15 => out.refuse(
            format!("Megatron-Core {} has no Muon", version.name()),
            "--megatron 0.16, or --optimizer adam",
        ),
        Version::V16 => {
            out.set("optimizer", "dist_muon");
            out.because("matrices are orthogonalized, whole ones over the replicas");
            if job.options.overlap.unwrap_or_default().of_replicas() {
                out.refuse(
                    "Megatron-Core 0.16 reduces and gathers nothing beside compute under Muon",
                    "--megatron main, or --overlap without grad-reduce and param-gather",
                );
            }
        }
        Version::Main => {
            out.set("optimizer", "muon");
            out.because("matrices are orthogonalized");
            out.on("use_distributed_optimizer");
            out.because("masters and moments over the replicas, each matrix on one");
            out.on("no_use_layer_wise_param_layout");
            out.because("without padding; every replica has all gradients reduced");
        }
    }
}

fn write_overlap(job: &Job, out: &mut Writer) {
    let overlap = job.options.overlap.unwrap_or_default();
    // PyTorch's FSDP2 is not told.
    let torch = job.options.zero == Zero::Fsdp2;
    if overlap.grad_reduce && !torch {
        out.on("overlap_grad_reduce");
        out.because("gradients are reduced under the last backward pass");
    }
    if overlap.param_gather && !torch {
        out.on("overlap_param_gather");
        out.because("weights are gathered under the first forward pass");
    }
    if !overlap.p2p {
        out.on("no_overlap_p2p_communication");
        out.because("messages between stages wait");
    }
    if overlap.shared_expert {
        out.on("moe_shared_expert_overlap");
        out.because("the shared expert computes while tokens travel");
    }
    if overlap.expert_alltoall {
        out.on("overlap_moe_expert_parallel_comm");
        out.because("tokens of one microbatch travel while another's pass computes");
    }
    if overlap.delay_wgrad {
        out.on("delay_wgrad_compute");
        out.because("gradients of weights run beside the next exchange");
    }
    if overlap.tp && job.options.pins.tp.is_some_and(|tp| tp > 1) {
        out.on("tp_comm_overlap");
        out.because("tensor-parallel collectives run beside their products");
    }
    if let Some(elements) = job.options.bucket_elements {
        out.set("ddp_bucket_size", &elements);
        out.because("buckets of gradients as planned");
    }
}

fn write_graphs(job: &Job, version: Version, out: &mut Writer) {
    let graphs = job.options.fixed_graphs();
    if graphs.is_none() {
        return;
    }
    if version < Version::V15 {
        out.refuse(
            format!(
                "Megatron-Core {} has no --cuda-graph-impl, and the plan has cuda_graph {graphs}",
                version.name()
            ),
            "--megatron 0.15",
        );
        return;
    }
    let main = version == Version::Main;
    let experts = job.model.num_moe_layers() > 0;
    let pads = job.options.capacity.is_some_and(|capacity| capacity.pad);
    if graphs.is_whole() {
        out.set(
            "cuda_graph_impl",
            if main { "full_iteration" } else { "local" },
        );
        out.because("all passes of a step are launched at once");
        if !main {
            out.list("cuda_graph_scope", ["full_iteration"].into_iter());
        }
        out.on("no_check_for_nan_in_loss_and_grad");
        out.because("nothing looks into the graph");
        if experts && !pads && !main {
            out.refuse(
                format!(
                    "Megatron-Core {} bounds no rows of experts, which a graph of the whole iteration needs",
                    version.name()
                ),
                "--megatron main",
            );
        }
        if experts && !pads && main {
            out.set("moe_expert_rank_capacity_factor", &1.5);
            out.because("rows of a rank's experts are bounded, so that shapes stay");
            out.on("moe_paged_stash");
            out.on("use_transformer_engine_op_fuser");
        }
    } else {
        out.set("cuda_graph_impl", "transformer_engine");
        out.because("the modules below are launched at once");
        let modules = if main {
            "cuda_graph_modules"
        } else {
            "cuda_graph_scope"
        };
        out.list(modules, graphs.modules().map(GraphModule::name));
    }
    out.on("te_rng_tracker");
    out.because("random states that graphs can take");
}

fn write_recompute(job: &Job, out: &mut Writer) {
    let Some(plan) = &job.options.recompute else {
        return;
    };
    if let Some(layers) = plan.block() {
        out.set("recompute_granularity", "full");
        out.because("some layers run again whole in the backward pass");
        out.set("recompute_method", "block");
        out.because("the first of each stage, and no others");
        out.set("recompute_num_layers", &layers);
        return;
    }
    match plan.alike() {
        None => out.refuse(
            format!("--recompute-modules is one set for all layers, and the plan has {plan}"),
            "one set or block-N, as `plan --stack megatron` searches them",
        ),
        Some(Recompute::None) => {}
        Some(Recompute::Full) => {
            out.set("recompute_granularity", "full");
            out.because("whole layers run again in the backward pass");
            out.set("recompute_method", "uniform");
            out.set("recompute_num_layers", &1);
            out.because("each from its own input");
        }
        Some(Recompute::Modules(modules)) => {
            out.set("recompute_granularity", "selective");
            out.because("the modules below run again in the backward pass");
            out.list(
                "recompute_modules",
                modules.iter().copied().map(Module::name),
            );
        }
    }
}

fn write_offload(job: &Job, out: &mut Writer) {
    let offload = job.options.offload.unwrap_or(Offload::NONE);
    if offload.is_none() {
        return;
    }
    out.on("fine_grained_activation_offloading");
    out.because("what these modules save rests on the host between the passes");
    out.list(
        "offload_modules",
        offload.modules().map(OffloadModule::name),
    );
    if offload.covers(OffloadModule::AttnProj) && !offload.covers(OffloadModule::CoreAttn) {
        out.refuse(
            "Megatron-Core offloads attn_proj only beside core_attn",
            "--offload core_attn,attn_proj",
        );
    }
}

/// The environment that belongs to the flags.
fn write_environment(job: &Job, cluster: &Cluster, version: Version, out: &mut Writer) {
    let options = &job.options;
    let mut set = |name: &str, value: &str, why: &str| {
        out.written.settings.export(name, value);
        out.written.remarks.push((name.to_owned(), why.to_owned()));
    };
    let combines = options.overlap.unwrap_or_default().expert_alltoall;
    let (connections, why) = match options.zero {
        _ if combines => (
            "32",
            "exchanges of tokens beside compute, which 1 would hold up",
        ),
        zero if zero.divides_gradients() => {
            ("8", "more than 1 under FSDP, which Megatron-LM checks")
        }
        _ => (
            "1",
            "collectives start in the order of their launch; checked under tensor or context parallelism before Blackwell",
        ),
    };
    set("CUDA_DEVICE_MAX_CONNECTIONS", connections, why);
    let graphs = !options.fixed_graphs().is_none();
    if !graphs || version == Version::Main {
        let (segments, why) = if options.fixed_graphs().is_whole() {
            (
                "expandable_segments:True,graph_capture_record_stream_reuse:True",
                "no memory lost between blocks, nor inside of a graph",
            )
        } else {
            ("expandable_segments:True", "no memory lost between blocks")
        };
        set("PYTORCH_CUDA_ALLOC_CONF", segments, why);
    }
    if graphs {
        set(
            "NCCL_GRAPH_REGISTER",
            "0",
            "graphs register no buffers of collectives, which such segments forbid",
        );
    }
    set(
        "NCCL_NVLS_ENABLE",
        "0",
        "no buffers for reduction in switches",
    );
    set(
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "1",
        "memory of collectives is let go of at once",
    );
    set(
        "NVTE_FUSED_ATTN",
        "1",
        "fused attention, which prices presume",
    );
    set("NVTE_NORM_FWD_USE_CUDNN", "1", "faster norms");
    set("NVTE_NORM_BWD_USE_CUDNN", "1", "faster norms");
    if !options.offload.unwrap_or(Offload::NONE).is_none() {
        set(
            "NVTE_CPU_OFFLOAD_V1",
            "1",
            "offloaded activations, which Megatron-LM checks from Transformer Engine 2.10 on",
        );
    }
    if options.dispatcher == Some(Dispatcher::Hybridep) && job.model.num_moe_layers() > 0 {
        let ep = options.pins.ep.unwrap_or(1) * options.pins.etp.unwrap_or(1);
        let domain = cluster.gpus_per_domain;
        let near = rules::ranks_near(ep, domain).to_string();
        set(
            "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
            &near,
            "expert ranks of one NVLink domain",
        );
        let racks = domain > cluster.gpus_per_node;
        set(
            "USE_MNNVL",
            if racks { "1" } else { "0" },
            "whether a domain is of several nodes",
        );
    }
}

/// What a plan says nothing of.
fn write_placeholders(out: &mut Writer) {
    out.on("mock_data");
    out.because("replace it with --data-path");
    out.set("train_iters", &50);
    out.because("replace it with the length of your training");
    out.set("eval_iters", &0);
    out.set("lr", "1e-4");
    out.because("replace it with your rates");
    out.set("min_lr", "1e-5");
    out.set("lr_decay_style", "cosine");
    out.set("weight_decay", "0.1");
    out.set("clip_grad", "1.0");
    out.set("adam_beta1", "0.9");
    out.set("adam_beta2", "0.95");
    out.set("log_interval", &1);
    out.on("log_throughput");
    out.on("no_create_attention_mask_in_dataloader");
    out.because("attention is causal; a mask would be copied for nothing");
    out.on("manual_gc");
    out.because("all ranks collect garbage at the same step");
    out.set("manual_gc_interval", &10);
}

/// Flags that may stand where they say nothing: Megatron-LM itself takes them back then.
const IDLE: [&str; 1] = ["sequence_parallel"];

/// The flags that `base` has, with what a plan changes of them: facets that mean the same in both keep the words of
/// `base`, and what the plan says nothing of stays.
pub(super) fn merged(base: &Settings, own: &Written, plan: &Written) -> Written {
    let mut settings = Settings {
        env: base.env.clone(),
        flags: base.flags.clone(),
        // Notes say what these are.
        elsewhere: Vec::new(),
        notes: Vec::new(),
    };
    let mut remarks = Vec::new();
    for facet in Facet::ALL {
        let same = own.of_facet(facet).eq(plan.of_facet(facet));
        if same {
            continue;
        }
        let wanted: Vec<_> = plan.of_facet(facet).cloned().collect();
        settings.flags.retain(|setting| {
            let idle =
                IDLE.contains(&setting.name.as_str()) && own.settings.get(&setting.name).is_none();
            idle || super::writer::facet_of(&setting.name) != Some(facet)
                || wanted.iter().any(|one| one.name == setting.name)
        });
        for one in wanted {
            if let Some(remark) = plan.remark(&one.name) {
                remarks.push((one.name.clone(), remark.to_owned()));
            }
            settings.set(&one.name, one.value);
        }
    }
    for setting in &plan.settings.flags {
        let free = super::writer::facet_of(&setting.name).is_none();
        let differs = own.settings.get(&setting.name) != Some(&setting.value);
        if free && differs {
            settings.set(&setting.name, setting.value.clone());
        }
    }
    for (name, value) in &plan.settings.env {
        if own.settings.variable(name) != Some(value) {
            settings.export(name, value);
            if let Some(remark) = plan.remark(name) {
                remarks.push((name.clone(), remark.to_owned()));
            }
        }
    }
    let mut notes = plan.notes.clone();
    if !base.elsewhere.is_empty() {
        notes.push(format!(
            "not in these settings, as the file that they are put into does not say what it stands for: {}",
            base.elsewhere.join(" ")
        ));
    }
    Written {
        settings,
        remarks,
        notes,
    }
}

/// What runs the plan that is written.
pub fn note_on_stack(stack: StackName) -> Option<&'static str> {
    (stack == StackName::Moefold).then_some(
        "the plan is of the moefold stack: what it predicts is of moefold execute, not of Megatron-LM; plan with \
         --stack megatron to predict that",
    )
}
