//! [`FLAGS`]: every flag of Megatron-LM that is known, once: its default, the first release that has it, and what it is
//! to a plan. What is written and what is read both go by it.
//!
//! Names and defaults are those of `megatron/training/arguments.py` and of the configuration classes of Megatron-Core
//! (see [`Version`]).

use super::version::Version;
use Facet::{
    Batch, Capacity, Context, Degrees, Dispatch, Graphs, Kernels, Model, Offload, Optimizer,
    Overlap, Precision, Recompute, Stages, Vocabulary,
};
use Role::{Kept, Read, Unpriced};
use Version::{Main, V14, V15, V16};

/// What of a plan some flags say together. They are written, read and compared together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Facet {
    /// The model.
    Model,
    /// The size of its vocabulary.
    Vocabulary,
    /// Sequence length and batch.
    Batch,
    /// Parallel degrees.
    Degrees,
    /// Which layers a stage holds.
    Stages,
    /// How attention reaches keys of other ranks.
    Context,
    /// How tokens reach their experts.
    Dispatch,
    /// How many tokens an expert takes.
    Capacity,
    /// Fused and grouped kernels that every price presumes.
    Kernels,
    /// Types of matrix products.
    Precision,
    /// The optimizer, its state and who shares it.
    Optimizer,
    /// What runs beside compute.
    Overlap,
    /// What CUDA graphs launch at once.
    Graphs,
    /// What runs again in backward passes.
    Recompute,
    /// What rests on the host.
    Offload,
}

impl Facet {
    /// All of them, in the order in which they are written.
    pub const ALL: [Self; 15] = [
        Model, Vocabulary, Batch, Degrees, Stages, Context, Dispatch, Capacity, Kernels, Precision,
        Optimizer, Overlap, Graphs, Recompute, Offload,
    ];

    /// In words, for headings.
    pub fn words(self) -> &'static str {
        match self {
            Model => "the model",
            Vocabulary => "its vocabulary",
            Batch => "batch",
            Degrees => "parallel degrees",
            Stages => "pipeline stages",
            Context => "context parallelism",
            Dispatch => "token dispatch",
            Capacity => "expert capacity",
            Kernels => "kernels",
            Precision => "precision",
            Optimizer => "optimizer and its state",
            Overlap => "communication beside compute",
            Graphs => "CUDA graphs",
            Recompute => "recomputation",
            Offload => "offload",
        }
    }
}

/// What a flag is to a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A plan says it.
    Read(Facet),
    /// It changes speed or memory, and has no price: how, in words.
    Unpriced(&'static str),
    /// It changes neither, as far as plans go.
    Kept,
}

/// A flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flag {
    /// Without dashes, words joined by underscores.
    pub name: &'static str,
    /// What holds where it is absent; empty for switches that are off and for what has no value then.
    pub default: &'static str,
    /// The first release that has it, of those that are known.
    pub since: Version,
    /// What it is to a plan.
    pub role: Role,
    /// Whether it takes no value.
    pub is_switch: bool,
}

const fn flag(name: &'static str, default: &'static str, since: Version, role: Role) -> Flag {
    Flag {
        name,
        default,
        since,
        role,
        is_switch: false,
    }
}

const fn switch(name: &'static str, since: Version, role: Role) -> Flag {
    Flag {
        is_switch: true,
        ..flag(name, "", since, role)
    }
}

/// The flag of a name.
pub fn find(name: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.name == name)
}

/// Whether a flag takes no value.
pub(super) fn is_switch(name: &str) -> bool {
    find(name).is_some_and(|known| known.is_switch)
}

/// See the module's documentation.
pub const FLAGS: &[Flag] = &[
    // The model.
    flag("num_layers", "", V14, Read(Model)),
    flag("hidden_size", "", V14, Read(Model)),
    flag("ffn_hidden_size", "", V14, Read(Model)),
    flag("num_attention_heads", "", V14, Read(Model)),
    flag("kv_channels", "", V14, Read(Model)),
    switch("group_query_attention", V14, Read(Model)),
    flag("num_query_groups", "1", V14, Read(Model)),
    flag("max_position_embeddings", "", V14, Read(Model)),
    flag(
        "position_embedding_type",
        "learned_absolute",
        V14,
        Read(Model),
    ),
    switch("use_rotary_position_embeddings", V14, Read(Model)),
    flag("rotary_base", "10000", V14, Read(Model)),
    flag("rotary_percent", "1.0", V14, Read(Model)),
    switch("use_rope_scaling", V14, Read(Model)),
    flag("rope_scaling_factor", "8.0", V14, Read(Model)),
    flag("rope_type", "", V14, Read(Model)),
    flag("normalization", "LayerNorm", V14, Read(Model)),
    flag("norm_epsilon", "1e-05", V14, Read(Model)),
    switch("apply_layernorm_1p", V14, Read(Model)),
    switch("swiglu", V14, Read(Model)),
    switch("squared_relu", V14, Read(Model)),
    switch("disable_bias_linear", V14, Read(Model)),
    switch("add_qkv_bias", V14, Read(Model)),
    switch("untie_embeddings_and_output_weights", V14, Read(Model)),
    switch("qk_layernorm", V14, Read(Model)),
    flag("attention_dropout", "0.1", V14, Read(Model)),
    flag("hidden_dropout", "0.1", V14, Read(Model)),
    flag("init_method_std", "0.02", V14, Read(Model)),
    switch("multi_latent_attention", V14, Read(Model)),
    flag("q_lora_rank", "", V14, Read(Model)),
    flag("kv_lora_rank", "32", V14, Read(Model)),
    flag("qk_head_dim", "128", V14, Read(Model)),
    flag("qk_pos_emb_head_dim", "64", V14, Read(Model)),
    flag("v_head_dim", "128", V14, Read(Model)),
    flag("rotary_scaling_factor", "1.0", V14, Read(Model)),
    flag("mscale", "1.0", V14, Read(Model)),
    flag("mscale_all_dim", "0.0", V14, Read(Model)),
    switch("attention_output_gate", V16, Read(Model)),
    flag("experimental_attention_variant", "", V16, Read(Model)),
    flag("linear_attention_freq", "", V16, Read(Model)),
    flag("linear_conv_kernel_dim", "4", V16, Read(Model)),
    flag("linear_key_head_dim", "128", V16, Read(Model)),
    flag("linear_value_head_dim", "128", V16, Read(Model)),
    flag("linear_num_key_heads", "16", V16, Read(Model)),
    flag("linear_num_value_heads", "32", V16, Read(Model)),
    flag("num_experts", "", V14, Read(Model)),
    flag("moe_layer_freq", "1", V14, Read(Model)),
    flag("moe_ffn_hidden_size", "", V14, Read(Model)),
    flag("moe_shared_expert_intermediate_size", "", V14, Read(Model)),
    switch("moe_shared_expert_gate", V16, Read(Model)),
    flag("moe_router_topk", "2", V14, Read(Model)),
    flag("moe_router_score_function", "softmax", V14, Read(Model)),
    switch("moe_router_pre_softmax", V14, Read(Model)),
    flag("moe_router_num_groups", "", V14, Read(Model)),
    flag("moe_router_group_topk", "", V14, Read(Model)),
    flag("moe_router_topk_scaling_factor", "", V14, Read(Model)),
    switch("moe_router_enable_expert_bias", V14, Read(Model)),
    flag(
        "moe_router_load_balancing_type",
        "aux_loss",
        V14,
        Read(Model),
    ),
    flag("moe_aux_loss_coeff", "0.0", V14, Read(Model)),
    flag("mtp_num_layers", "", V14, Read(Model)),
    // Its vocabulary.
    flag("tokenizer_type", "", V14, Read(Vocabulary)),
    flag("tokenizer_model", "", V14, Read(Vocabulary)),
    flag("vocab_size", "", V14, Read(Vocabulary)),
    flag("padded_vocab_size", "", V15, Read(Vocabulary)),
    // Batch.
    flag("seq_length", "", V14, Read(Batch)),
    flag("micro_batch_size", "", V14, Read(Batch)),
    flag(
        "global_batch_size",
        "micro batch x data-parallel size",
        V14,
        Read(Batch),
    ),
    // Degrees.
    flag("tensor_model_parallel_size", "1", V14, Read(Degrees)),
    switch("sequence_parallel", V14, Read(Degrees)),
    flag("context_parallel_size", "1", V14, Read(Degrees)),
    flag("pipeline_model_parallel_size", "1", V14, Read(Degrees)),
    flag("expert_model_parallel_size", "1", V14, Read(Degrees)),
    flag(
        "expert_tensor_parallel_size",
        "the tensor-parallel size",
        V14,
        Read(Degrees),
    ),
    // Stages.
    flag("pipeline_model_parallel_layout", "", V14, Read(Stages)),
    flag(
        "num_virtual_stages_per_pipeline_rank",
        "",
        V14,
        Read(Stages),
    ),
    flag(
        "num_layers_per_virtual_pipeline_stage",
        "",
        V14,
        Read(Stages),
    ),
    flag("decoder_first_pipeline_num_layers", "", V14, Read(Stages)),
    flag("decoder_last_pipeline_num_layers", "", V14, Read(Stages)),
    switch("account_for_embedding_in_pipeline_split", V14, Read(Stages)),
    switch("account_for_loss_in_pipeline_split", V14, Read(Stages)),
    switch("use_tp_pp_dp_mapping", V14, Read(Degrees)),
    // Keys of other ranks.
    flag("cp_comm_type", "p2p", V14, Read(Context)),
    flag(
        "hierarchical_context_parallel_sizes",
        "",
        V14,
        Read(Context),
    ),
    // Tokens to experts.
    flag(
        "moe_token_dispatcher_type",
        "allgather",
        V14,
        Read(Dispatch),
    ),
    flag("moe_flex_dispatcher_backend", "deepep", V16, Read(Dispatch)),
    switch("moe_enable_deepep", V14, Read(Dispatch)),
    flag("moe_expert_capacity_factor", "", V14, Read(Capacity)),
    flag("moe_token_drop_policy", "probs", V14, Read(Capacity)),
    switch("moe_pad_expert_input_to_capacity", V14, Read(Capacity)),
    // Kernels.
    flag("transformer_impl", "transformer_engine", V14, Read(Kernels)),
    switch("moe_grouped_gemm", V14, Read(Kernels)),
    switch("moe_permute_fusion", V14, Read(Kernels)),
    switch("moe_router_fusion", V14, Read(Kernels)),
    flag(
        "moe_router_dtype",
        "that of the activations",
        V14,
        Read(Kernels),
    ),
    switch("cross_entropy_loss_fusion", V14, Read(Kernels)),
    flag("cross_entropy_fusion_impl", "native", V14, Read(Kernels)),
    // Precision.
    switch("bf16", V14, Read(Precision)),
    switch("fp16", V14, Read(Precision)),
    flag("fp8_format", "", V14, Read(Precision)),
    flag("fp8_recipe", "delayed", V14, Read(Precision)),
    switch("fp8_param_gather", V14, Read(Precision)),
    switch("fp8_dot_product_attention", V14, Read(Precision)),
    switch("reuse_grad_buf_for_mxfp8_param_ag", V14, Read(Precision)),
    flag("fp4_format", "", V15, Read(Precision)),
    flag("fp4_recipe", "nvfp4", V15, Read(Precision)),
    flag(
        "fp8_margin",
        "0",
        V14,
        Unpriced("leaves room in scales of steps before"),
    ),
    flag("fp8_interval", "1", V14, Kept),
    flag("fp8_amax_history_len", "1", V14, Kept),
    flag("fp8_amax_compute_algo", "most_recent", V14, Kept),
    switch(
        "no_fp8_wgrad",
        V14,
        Unpriced("takes gradients of weights in bf16"),
    ),
    switch(
        "tp_only_amax_red",
        V14,
        Unpriced("reduces maxima over tensor-parallel ranks alone"),
    ),
    // Optimizer and who shares its state.
    flag("optimizer", "adam", V14, Read(Optimizer)),
    switch("use_distributed_optimizer", V14, Read(Optimizer)),
    flag(
        "num_distributed_optimizer_instances",
        "1",
        V14,
        Read(Optimizer),
    ),
    switch("no_use_layer_wise_param_layout", Main, Read(Optimizer)),
    flag("muon_num_ns_steps", "5", V16, Read(Optimizer)),
    flag("muon_tp_mode", "blockwise", V16, Read(Optimizer)),
    flag("muon_fp32_matmul_prec", "medium", V16, Read(Optimizer)),
    switch("muon_no_split_qkv", V16, Read(Optimizer)),
    flag("muon_scalar_optimizer", "adam", Main, Read(Optimizer)),
    switch("use_precision_aware_optimizer", V14, Read(Optimizer)),
    flag("main_grads_dtype", "fp32", V14, Read(Optimizer)),
    flag("main_params_dtype", "fp32", V14, Read(Optimizer)),
    flag("exp_avg_dtype", "fp32", V14, Read(Optimizer)),
    flag("exp_avg_sq_dtype", "fp32", V14, Read(Optimizer)),
    switch("grad_reduce_in_bf16", V14, Read(Optimizer)),
    switch("accumulate_allreduce_grads_in_fp32", V14, Read(Optimizer)),
    switch("use_megatron_fsdp", V14, Read(Optimizer)),
    switch("use_torch_fsdp2", V14, Read(Optimizer)),
    flag(
        "data_parallel_sharding_strategy",
        "no_shard",
        V14,
        Read(Optimizer),
    ),
    flag(
        "outer_dp_sharding_strategy",
        "no_shard",
        V14,
        Read(Optimizer),
    ),
    switch("optimizer_cpu_offload", V14, Read(Optimizer)),
    flag("optimizer_offload_fraction", "1.0", V14, Read(Optimizer)),
    // Beside compute.
    switch("overlap_grad_reduce", V14, Read(Overlap)),
    switch("overlap_param_gather", V14, Read(Overlap)),
    switch("no_overlap_p2p_communication", V14, Read(Overlap)),
    switch("moe_shared_expert_overlap", V14, Read(Overlap)),
    switch("overlap_moe_expert_parallel_comm", V14, Read(Overlap)),
    switch("delay_wgrad_compute", V14, Read(Overlap)),
    // Again.
    flag("recompute_granularity", "", V14, Read(Recompute)),
    flag("recompute_method", "", V14, Read(Recompute)),
    flag("recompute_num_layers", "", V14, Read(Recompute)),
    flag("recompute_modules", "core_attn", V14, Read(Recompute)),
    switch("recompute_activations", V14, Read(Recompute)),
    // On the host.
    switch("fine_grained_activation_offloading", V16, Read(Offload)),
    flag("offload_modules", "", V16, Read(Offload)),
    // What has no price.
    switch(
        "ep_overlap_early_attn_memory_release",
        V16,
        Unpriced("lets go of attention's memory earlier"),
    ),
    flag(
        "high_priority_a2a_comm_stream",
        "",
        Main,
        Unpriced("puts token exchange first"),
    ),
    switch(
        "overlap_dispatch_backward_with_experts_wgrad",
        Main,
        Unpriced("hides the backward exchange of tokens"),
    ),
    switch("tp_comm_overlap", V14, Read(Overlap)),
    flag(
        "tp_comm_overlap_cfg",
        "",
        V14,
        Unpriced("tunes tensor-parallel overlap"),
    ),
    switch(
        "overlap_p2p_communication_warmup_flush",
        V14,
        Unpriced("hides messages of warm-up and flush"),
    ),
    switch(
        "overlap_param_gather_with_optimizer_step",
        V14,
        Unpriced("gathers weights beside the optimizer"),
    ),
    switch(
        "defer_embedding_wgrad_compute",
        V14,
        Unpriced("leaves the head's gradient for the flush"),
    ),
    flag(
        "wgrad_deferral_limit",
        "0",
        V14,
        Unpriced("bounds what is left for the flush"),
    ),
    flag(
        "microbatch_group_size_per_virtual_pipeline_stage",
        "the pipeline degree",
        V14,
        Unpriced("interleaves other groups of microbatches"),
    ),
    flag("cuda_graph_impl", "none", V15, Read(Graphs)),
    flag("cuda_graph_modules", "", Main, Read(Graphs)),
    flag("cuda_graph_scope", "", V14, Read(Graphs)),
    flag(
        "cuda_graph_warmup_steps",
        "3",
        V14,
        Unpriced("captures graphs later"),
    ),
    switch("external_cuda_graph", V14, Read(Graphs)),
    switch("enable_cuda_graph", V14, Read(Graphs)),
    switch("te_rng_tracker", V14, Unpriced("goes with graphs")),
    flag(
        "moe_flex_dispatcher_num_sms",
        "",
        Main,
        Unpriced("gives the dispatcher so many multiprocessors"),
    ),
    flag(
        "moe_deepep_num_sms",
        "20",
        V14,
        Unpriced("gives the dispatcher so many multiprocessors"),
    ),
    flag(
        "moe_hybridep_num_sms",
        "16",
        V16,
        Unpriced("gives the dispatcher so many multiprocessors"),
    ),
    switch(
        "moe_permute_fusion_into_hybridep",
        Main,
        Unpriced("permutes in the dispatcher"),
    ),
    flag(
        "moe_expert_rank_capacity_factor",
        "",
        Main,
        Unpriced("bounds the rows of a rank"),
    ),
    switch(
        "moe_paged_stash",
        Main,
        Unpriced("keeps experts' activations in pages"),
    ),
    flag(
        "moe_paged_stash_page_size",
        "64",
        Main,
        Unpriced("sizes those pages"),
    ),
    flag(
        "moe_paged_stash_buffer_size_factor_cuda",
        "1.1",
        Main,
        Unpriced("sizes their buffer"),
    ),
    flag(
        "moe_paged_stash_buffer_size_factor_cpu",
        "0",
        Main,
        Unpriced("sizes their buffer on the host"),
    ),
    switch(
        "use_transformer_engine_op_fuser",
        V16,
        Unpriced("fuses products with what is around them"),
    ),
    switch(
        "moe_use_grouped_tensor",
        Main,
        Unpriced("holds experts' weights as one tensor"),
    ),
    flag(
        "moe_mlp_glu_interleave_size",
        "",
        Main,
        Unpriced("orders gates for a fused kernel"),
    ),
    switch(
        "moe_use_legacy_grouped_gemm",
        V14,
        Unpriced("runs another grouped product"),
    ),
    switch(
        "moe_router_padding_for_quantization",
        V16,
        Unpriced("rounds the rows of an expert up, in the router"),
    ),
    switch(
        "moe_router_padding_for_fp8",
        V14,
        Unpriced("rounds the rows of an expert up; ..._for_quantization since 0.16"),
    ),
    switch(
        "moe_apply_probs_on_input",
        V14,
        Unpriced("multiplies probabilities in elsewhere"),
    ),
    flag(
        "moe_latent_size",
        "",
        V16,
        Unpriced("narrows what is sent to experts"),
    ),
    flag(
        "moe_z_loss_coeff",
        "",
        V14,
        Unpriced("adds a loss to the router"),
    ),
    flag(
        "moe_input_jitter_eps",
        "",
        V14,
        Unpriced("adds noise to the router's input"),
    ),
    switch(
        "moe_router_force_load_balancing",
        V14,
        Unpriced("routes at random, for benchmarks alone: real routing is slower"),
    ),
    switch(
        "fp4_param_gather",
        V15,
        Unpriced("keeps and gathers weights in FP4"),
    ),
    switch(
        "first_last_layers_bf16",
        V14,
        Unpriced("keeps the ends in bf16"),
    ),
    flag(
        "num_layers_at_start_in_bf16",
        "1",
        V14,
        Unpriced("keeps layers in bf16"),
    ),
    flag(
        "num_layers_at_end_in_bf16",
        "1",
        V14,
        Unpriced("keeps layers in bf16"),
    ),
    switch(
        "use_layer_wise_param_layout",
        Main,
        Unpriced("pads what replicas own of matrices and scatters gradients"),
    ),
    switch(
        "overlap_cpu_optimizer_d2h_h2d",
        V14,
        Unpriced("hides the optimizer's copies"),
    ),
    flag(
        "offload_optimizer_states",
        "",
        Main,
        Unpriced("rests moments on the host between steps"),
    ),
    flag(
        "chunked_optimizer_state_offload",
        "",
        Main,
        Unpriced("rests moments on the host between steps"),
    ),
    flag(
        "cpu_offloading_num_layers",
        "0",
        V14,
        Unpriced("rests whole layers on the host"),
    ),
    flag(
        "activation_offload_fraction",
        "1.0",
        Main,
        Unpriced("moves a share of what is offloaded"),
    ),
    flag(
        "min_offloaded_tensor_size",
        "1048576",
        V16,
        Unpriced("leaves small tensors where they are"),
    ),
    flag(
        "delta_offload_bytes_across_pp_ranks",
        "0",
        Main,
        Unpriced("offloads less on later ranks"),
    ),
    flag(
        "fine_grained_offloading_max_inflight_offloads",
        "",
        Main,
        Unpriced("bounds copies at once"),
    ),
    flag(
        "delay_offload_until_cuda_graph",
        "",
        Main,
        Unpriced("offloads after a graph"),
    ),
    switch(
        "hybrid_context_parallel",
        V16,
        Unpriced("varies context parallelism by sequence"),
    ),
    flag(
        "max_seqlen_per_dp_cp_rank",
        "",
        V16,
        Unpriced("bounds the tokens of a rank"),
    ),
    flag(
        "ddp_bucket_size",
        "40 million, or a million for each replica if that is more",
        V14,
        Unpriced("bounds the buckets of gradients"),
    ),
    flag(
        "ddp_num_buckets",
        "",
        V14,
        Unpriced("divides gradients into so many buckets"),
    ),
    switch(
        "ddp_pad_buckets_for_high_nccl_busbw",
        V14,
        Unpriced("rounds buckets up"),
    ),
    switch(
        "ddp_average_in_collective",
        V14,
        Unpriced("averages in the collective"),
    ),
    switch(
        "ddp_reduce_scatter_with_fp32_accumulation",
        V16,
        Unpriced("reduces bf16 gradients in fp32"),
    ),
    switch("use_nccl_ub", V14, Unpriced("registers buffers with NCCL")),
    switch(
        "fsdp_double_buffer",
        V14,
        Unpriced("gathers into two buffers"),
    ),
    flag(
        "suggested_communication_unit_size",
        "",
        V14,
        Unpriced("sizes what is gathered at once"),
    ),
    switch(
        "keep_fp8_transpose_cache",
        V14,
        Unpriced("keeps transposed weights"),
    ),
    switch("use_sharp", V14, Unpriced("reduces in the switches")),
    switch(
        "distribute_saved_activations",
        V14,
        Unpriced("divides what is saved over tensor-parallel ranks"),
    ),
    flag(
        "mtp_standalone",
        "",
        V16,
        Unpriced("gives the MTP depth a stage"),
    ),
    flag(
        "make_vocab_size_divisible_by",
        "128",
        V14,
        Unpriced("rounds the vocabulary up, by times the tensor-parallel size"),
    ),
    switch(
        "manual_gc",
        V14,
        Unpriced("collects garbage at the same steps on all ranks"),
    ),
    flag("manual_gc_interval", "0", V14, Unpriced("says at which")),
    switch(
        "no_check_for_nan_in_loss_and_grad",
        V14,
        Unpriced("spares a synchronization"),
    ),
    switch(
        "use_flash_attn",
        V14,
        Unpriced("asks for flash attention, which prices presume"),
    ),
    flag(
        "attention_backend",
        "auto",
        V14,
        Unpriced("chooses the attention kernel"),
    ),
    switch(
        "no_create_attention_mask_in_dataloader",
        V14,
        Unpriced("spares a mask"),
    ),
    switch("deterministic_mode", V14, Unpriced("takes slower kernels")),
    flag(
        "empty_unused_memory_level",
        "0",
        V14,
        Unpriced("empties the allocator's cache"),
    ),
    switch(
        "no_gradient_accumulation_fusion",
        V14,
        Unpriced("adds gradients up in a kernel of its own"),
    ),
    switch(
        "no_rope_fusion",
        V14,
        Unpriced("rotates in several kernels"),
    ),
    switch(
        "no_masked_softmax_fusion",
        V14,
        Unpriced("takes softmax in several kernels"),
    ),
    switch(
        "no_bias_swiglu_fusion",
        V14,
        Unpriced("gates in several kernels"),
    ),
    switch(
        "no_bias_dropout_fusion",
        V14,
        Unpriced("adds residuals in several kernels"),
    ),
    switch(
        "use_te_activation_func",
        V15,
        Unpriced("takes Transformer Engine's activations"),
    ),
    switch(
        "fp32_residual_connection",
        V14,
        Unpriced("keeps the residual stream in fp32"),
    ),
    switch(
        "attention_softmax_in_fp32",
        V14,
        Unpriced("takes softmax in fp32"),
    ),
    flag(
        "rampup_batch_size",
        "",
        V14,
        Unpriced("begins with smaller batches"),
    ),
    flag(
        "tensor_parallel_num_weight_shards",
        "",
        Main,
        Unpriced("divides weights once more"),
    ),
    flag(
        "expert_tensor_parallel_num_weight_shards",
        "",
        Main,
        Unpriced("divides experts' weights once more"),
    ),
    flag(
        "mla_down_proj_fusion",
        "",
        Main,
        Unpriced("joins products of latent attention"),
    ),
    flag(
        "nccl_communicator_config_path",
        "",
        V14,
        Unpriced("tunes communicators"),
    ),
    flag(
        "high_priority_stream_groups",
        "",
        V14,
        Unpriced("puts some communicators first"),
    ),
    switch(
        "calculate_per_token_loss",
        V14,
        Unpriced("weighs the loss by tokens"),
    ),
    // Models that no flag here describes are said to be so by these.
    flag(
        "window_size",
        "",
        V14,
        Unpriced("limits the keys of attention"),
    ),
    flag(
        "window_attn_skip_freq",
        "",
        V15,
        Unpriced("says which layers are limited"),
    ),
    flag(
        "softmax_type",
        "vanilla",
        V15,
        Unpriced("adds a sink to attention"),
    ),
    switch("quick_geglu", V14, Unpriced("is another activation")),
    flag(
        "activation_func_clamp_value",
        "",
        V15,
        Unpriced("clips activations"),
    ),
    flag("glu_linear_offset", "0.0", V15, Unpriced("shifts gates")),
    flag(
        "no_rope_freq",
        "",
        V14,
        Unpriced("leaves positions out in some layers"),
    ),
    switch(
        "rotary_interleaved",
        V14,
        Unpriced("pairs neighbours in rotations"),
    ),
    flag(
        "rotary_seq_len_interpolation_factor",
        "",
        V14,
        Unpriced("stretches positions"),
    ),
    switch(
        "qk_l2_norm",
        V14,
        Unpriced("norms queries and keys without a weight"),
    ),
    flag(
        "linear_cp_mode",
        "",
        Main,
        Unpriced("says how linear attention is cut over context-parallel ranks"),
    ),
    flag(
        "hybrid_override_pattern",
        "",
        V14,
        Unpriced("mixes kinds of layers"),
    ),
    switch("is_hybrid_model", V14, Unpriced("mixes kinds of layers")),
    flag(
        "heterogeneous_layers_config_path",
        "",
        V14,
        Unpriced("gives layers sizes of their own"),
    ),
    flag("spec", "", V14, Unpriced("is a model of one's own")),
    switch(
        "apply_residual_connection_post_layernorm",
        V14,
        Unpriced("continues from the norm"),
    ),
    switch(
        "moe_use_upcycling",
        V14,
        Unpriced("makes experts of a dense model"),
    ),
    flag(
        "moe_upcycling_granularity",
        "1",
        V14,
        Unpriced("makes smaller experts of it"),
    ),
    // What says nothing of speed or memory.
    flag("lr", "", V14, Kept),
    switch("apply_wd_to_qk_layernorm", V16, Kept),
    flag("min_lr", "0.0", V14, Kept),
    flag("lr_decay_style", "linear", V14, Kept),
    flag("lr_decay_iters", "", V14, Kept),
    flag("lr_decay_samples", "", V14, Kept),
    flag("lr_warmup_iters", "0", V14, Kept),
    flag("lr_warmup_samples", "0", V14, Kept),
    flag("lr_warmup_fraction", "", V14, Kept),
    flag("lr_warmup_init", "0.0", V14, Kept),
    flag("lr_wsd_decay_style", "exponential", V14, Kept),
    flag("lr_wsd_decay_iters", "", V14, Kept),
    flag("lr_wsd_decay_samples", "", V14, Kept),
    switch("override_opt_param_scheduler", V14, Kept),
    switch("use_checkpoint_opt_param_scheduler", V14, Kept),
    flag("decoupled_lr", "", V14, Kept),
    flag("decoupled_min_lr", "", V14, Kept),
    flag("weight_decay", "0.01", V14, Kept),
    flag("start_weight_decay", "", V14, Kept),
    flag("end_weight_decay", "", V14, Kept),
    flag("weight_decay_incr_style", "constant", V14, Kept),
    flag("clip_grad", "1.0", V14, Kept),
    flag("adam_beta1", "0.9", V14, Kept),
    flag("adam_beta2", "0.999", V14, Kept),
    flag("adam_eps", "1e-08", V14, Kept),
    flag("muon_momentum", "0.95", V16, Kept),
    switch("muon_use_nesterov", V16, Kept),
    flag("muon_nesterov", "", Main, Kept),
    flag("muon_scale_mode", "spectral", V16, Kept),
    flag("muon_extra_scale_factor", "1.0", V16, Kept),
    flag("muon_coefficient_type", "quintic", Main, Kept),
    flag("moe_router_bias_update_rate", "0.001", V14, Kept),
    flag("mtp_loss_scaling_factor", "0.1", V14, Kept),
    flag("train_iters", "", V14, Kept),
    flag("train_samples", "", V14, Kept),
    flag("exit_interval", "", V14, Kept),
    flag("exit_duration_in_mins", "", V14, Kept),
    switch("exit_signal_handler", V14, Kept),
    flag("eval_iters", "100", V14, Kept),
    flag("eval_interval", "1000", V14, Kept),
    switch("full_validation", V14, Kept),
    switch("skip_train", V14, Kept),
    flag("seed", "1234", V14, Kept),
    switch("data_parallel_random_init", V14, Kept),
    flag("embedding_init_method_std", "", V15, Kept),
    switch("init_method_xavier_uniform", V14, Kept),
    switch("finetune", V14, Kept),
    flag("pretrained_checkpoint", "", V14, Kept),
    switch("no_initialization", V14, Kept),
    switch("use_cpu_initialization", V14, Kept),
    flag("save", "", V14, Kept),
    flag("save_interval", "", V14, Kept),
    flag("save_retain_interval", "", V14, Kept),
    switch("no_save_optim", V14, Kept),
    switch("no_save_rng", V14, Kept),
    flag("load", "", V14, Kept),
    switch("no_load_optim", V14, Kept),
    switch("no_load_rng", V14, Kept),
    flag("ckpt_step", "", V14, Kept),
    switch("async_save", V14, Kept),
    flag("ckpt_format", "torch_dist", V14, Kept),
    switch("use_persistent_ckpt_worker", V14, Kept),
    switch("ckpt_fully_parallel_save", V14, Kept),
    switch("no_ckpt_fully_parallel_save", V14, Kept),
    switch("ckpt_fully_parallel_load", V14, Kept),
    switch("ckpt_assume_constant_structure", V14, Kept),
    switch("auto_detect_ckpt_format", V14, Kept),
    switch("use_dist_ckpt", V14, Kept),
    flag("dist_ckpt_format", "", V14, Kept),
    flag("dist_ckpt_strictness", "assume_ok_unexpected", V14, Kept),
    switch("dist_ckpt_optim_fully_reshardable", V14, Kept),
    flag("non_persistent_save_interval", "", V14, Kept),
    flag("non_persistent_ckpt_type", "", V14, Kept),
    switch("use_checkpoint_args", V14, Kept),
    switch("exit_on_missing_checkpoint", V14, Kept),
    switch("disable_gloo_process_groups", V14, Kept),
    flag("data_path", "", V14, Kept),
    flag("train_data_path", "", V14, Kept),
    flag("valid_data_path", "", V14, Kept),
    flag("test_data_path", "", V14, Kept),
    flag("data_args_path", "", V14, Kept),
    flag("per_split_data_args_path", "", V14, Kept),
    flag("data_cache_path", "", V14, Kept),
    flag("split", "", V14, Kept),
    switch("mock_data", V14, Kept),
    flag("num_workers", "2", V14, Kept),
    flag("num_dataset_builder_threads", "1", V14, Kept),
    flag("dataloader_type", "", V14, Kept),
    switch("reset_position_ids", V14, Kept),
    switch("reset_attention_mask", V14, Kept),
    switch("eod_mask_loss", V14, Kept),
    switch("no_mmap_bin_files", V14, Kept),
    flag("vocab_file", "", V14, Kept),
    flag("merge_file", "", V14, Kept),
    flag("vocab_extra_ids", "0", V14, Kept),
    flag("tiktoken_pattern", "", V14, Kept),
    flag("tiktoken_num_special_tokens", "1000", V14, Kept),
    flag("tiktoken_special_tokens", "", V14, Kept),
    switch("trust_remote_code", V14, Kept),
    switch("legacy_tokenizer", V15, Kept),
    flag("log_interval", "100", V14, Kept),
    switch("log_throughput", V14, Kept),
    switch("log_progress", V14, Kept),
    switch("log_params_norm", V14, Kept),
    switch("log_num_zeros_in_grad", V14, Kept),
    switch("log_energy", V14, Kept),
    switch("log_straggler", V14, Kept),
    flag("log_memory_interval", "", Main, Kept),
    switch("log_device_memory_used", Main, Kept),
    switch("log_timers_to_tensorboard", V14, Kept),
    switch("log_memory_to_tensorboard", V14, Kept),
    switch("log_validation_ppl_to_tensorboard", V14, Kept),
    switch("log_world_size_to_tensorboard", V14, Kept),
    switch("no_log_loss_scale_to_tensorboard", V14, Kept),
    flag("logging_level", "", V14, Kept),
    flag("timing_log_level", "0", V14, Kept),
    flag("timing_log_option", "minmax", V14, Kept),
    flag("tensorboard_dir", "", V14, Kept),
    flag("tensorboard_log_interval", "1", V14, Kept),
    flag("tensorboard_queue_size", "1000", V14, Kept),
    flag("wandb_project", "", V14, Kept),
    flag("wandb_entity", "", V14, Kept),
    flag("wandb_exp_name", "", V14, Kept),
    flag("wandb_save_dir", "", V14, Kept),
    switch("no_one_logger", V14, Kept),
    switch("moe_per_layer_logging", V14, Kept),
    switch("profile", V14, Kept),
    flag("profile_step_start", "10", V14, Kept),
    flag("profile_step_end", "12", V14, Kept),
    flag("profile_ranks", "0", V14, Kept),
    switch("use_pytorch_profiler", V14, Kept),
    switch("record_memory_history", V14, Kept),
    flag("memory_snapshot_path", "snapshot.pickle", V14, Kept),
    flag("distributed_backend", "nccl", V14, Kept),
    flag("distributed_timeout_minutes", "10", V14, Kept),
    flag("distributed_timeout_seconds_after_init", "", V14, Kept),
    flag("local_rank", "0", V14, Kept),
    flag("rerun_mode", "validate_results", V14, Kept),
    switch("check_for_spiky_loss", V14, Kept),
    switch("check_for_large_grads", V14, Kept),
    flag(
        "check_weight_hash_across_dp_replicas_interval",
        "",
        V14,
        Kept,
    ),
    switch("use_mcore_models", V14, Kept),
    switch("enable_experimental", V14, Kept),
    switch("no_position_embedding", V14, Kept),
    switch("moe_pad_experts_for_cuda_graph_inference", V15, Kept),
    flag("config_logger_dir", "", V14, Kept),
    switch("adlr_autoresume", V14, Kept),
    flag("loss_scale", "", V14, Kept),
    flag("initial_loss_scale", "4294967296", V14, Kept),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_each_flag_is_there_once() {
        let mut names: Vec<&str> = FLAGS.iter().map(|flag| flag.name).collect();
        names.sort_unstable();
        let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).collect();
        assert!(twice.is_empty(), "{twice:?}");
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(names.iter().all(|name| name.chars().all(plain)));
        for facet in Facet::ALL {
            let own = FLAGS.iter().filter(|flag| flag.role == Read(facet));
            assert!(own.count() > 0, "{facet:?}");
        }
    }
}
