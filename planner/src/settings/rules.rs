//! [`broken`]: rules of Megatron-LM on its flags and environment that settings break.
//!
//! They are those of `validate_args` (`megatron/training/arguments.py`) and of the configuration classes of
//! Megatron-Core that are no rule of parallel layouts: those are the planner's own ([`crate::layout::Illegal`]).

use moefold_profiles::Cluster;
use moefold_profiles::nearest::nearest;

use super::said::Problem;
use super::table::{self, FLAGS};
use super::text::{Settings, Value, flag};
use super::version::Version;
use crate::model::{Layer, LinearKind, LinearMixer, Mixer, Model};

/// Where settings are to run.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// The release of Megatron-LM.
    pub version: Version,
    /// The cluster.
    pub cluster: &'a Cluster,
    /// Ranks.
    pub gpus: u32,
}

impl Problem {
    /// What is wrong, and what would work.
    pub(super) fn in_two(&self) -> (String, String) {
        match self {
            Self::Illegal { rule, nearest } => (rule.clone(), nearest.clone()),
            Self::Unable { what, nearest } => (what.clone(), nearest.clone()),
            other => (other.to_string(), "the value above".to_owned()),
        }
    }
}

/// Every rule that settings break.
pub fn broken(settings: &Settings, target: &Target<'_>) -> Vec<Problem> {
    let mut rules = Rules {
        settings,
        target,
        broken: Vec::new(),
    };
    rules.versions();
    rules.recompute();
    rules.groups();
    rules.experts();
    rules.linear_attention();
    rules.overlap();
    rules.precision();
    rules.muon();
    rules.torch_fsdp2();
    rules.graphs();
    rules.environment();
    rules.hybrid_ep();
    rules.choices();
    rules.splits();
    rules.training();
    rules.broken
}

/// Ranks of a group that share an NVLink domain of so many GPUs: as many in each domain.
pub(super) fn ranks_near(group: u32, domain: u32) -> u32 {
    let most = group.min(domain);
    if group.is_multiple_of(most) {
        return most;
    }
    let divides = |near: &u32| group.is_multiple_of(*near) && domain.is_multiple_of(*near);
    (1..=most).rev().find(divides).unwrap_or(1)
}

/// Whether a release cuts the sequences of a model over context-parallel ranks: not those of gated DeltaNet before main.
pub fn cuts_sequences(model: &Model, version: Version) -> bool {
    let is_linear = |layer: &Layer| match &layer.mixer {
        Some(Mixer::Linear(linear)) => linear.kind == LinearKind::GatedDeltaNet,
        _ => false,
    };
    version >= Version::Main || !model.layers.iter().any(is_linear)
}

/// Whether a release has HybridEP.
pub fn has_hybridep(version: Version) -> bool {
    table::find("moe_flex_dispatcher_backend").is_some_and(|flag| version >= flag.since)
}

struct Rules<'a> {
    settings: &'a Settings,
    target: &'a Target<'a>,
    broken: Vec<Problem>,
}

impl<'a> Rules<'a> {
    fn on(&self, name: &'static str) -> bool {
        debug_assert!(table::find(name).is_some(), "{name} is not in the table");
        self.settings.is_on(name)
    }

    fn there(&self, name: &'static str) -> bool {
        debug_assert!(table::find(name).is_some(), "{name} is not in the table");
        !matches!(self.settings.get(name), None | Some(Value::Off))
    }

    fn words(&self, name: &'static str) -> &'a [String] {
        debug_assert!(table::find(name).is_some(), "{name} is not in the table");
        match self.settings.get(name) {
            Some(Value::Words(words)) => words,
            _ => &[],
        }
    }

    fn word(&self, name: &'static str) -> Option<&'a str> {
        self.words(name).first().map(String::as_str)
    }

    /// A number, or the default of the flag.
    fn number(&self, name: &'static str, default: u64) -> u64 {
        let word = self.word(name);
        word.and_then(|word| word.parse().ok()).unwrap_or(default)
    }

    fn says(&self, name: &'static str, word: &str) -> bool {
        self.words(name).iter().any(|own| own == word)
    }

    /// A rule that is broken where `is_broken`.
    fn rule(&mut self, is_broken: bool, rule: impl Into<String>, nearest: impl Into<String>) {
        if is_broken {
            self.broken.push(Problem::Illegal {
                rule: rule.into(),
                nearest: nearest.into(),
            });
        }
    }

    fn versions(&mut self) {
        let version = self.target.version;
        let newer: Vec<_> = self
            .settings
            .flags
            .iter()
            .filter(|setting| setting.value != Value::Off)
            .filter_map(|setting| table::find(&setting.name))
            .filter(|known| known.since > version)
            .collect();
        for known in newer {
            let since = known.since.name();
            self.rule(
                true,
                format!(
                    "Megatron-Core {} has no {}",
                    version.name(),
                    flag(known.name)
                ),
                format!("--megatron {since}, or settings without it"),
            );
        }
        let flex = self.word("moe_token_dispatcher_type") == Some("flex");
        self.rule(
            flex && version < Version::V16 && !self.on("moe_enable_deepep"),
            format!(
                "the flex dispatcher of Megatron-Core {} needs DeepEP",
                version.name()
            ),
            "--moe-enable-deepep, or --moe-token-dispatcher-type alltoall",
        );
        self.rule(
            self.on("moe_enable_deepep") && !flex,
            "--moe-enable-deepep is a backend of the flex dispatcher",
            "--moe-token-dispatcher-type flex",
        );
        self.rule(
            self.on("moe_enable_deepep")
                && self.word("moe_flex_dispatcher_backend") == Some("hybridep"),
            "--moe-enable-deepep and --moe-flex-dispatcher-backend hybridep are two backends",
            "one of them",
        );
    }

    fn recompute(&mut self) {
        let granularity = self.word("recompute_granularity");
        let (full, selective) = (
            granularity == Some("full"),
            granularity == Some("selective"),
        );
        self.rule(
            full && !(self.there("recompute_method") && self.there("recompute_num_layers")),
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
            "--recompute-method uniform --recompute-num-layers 1",
        );
        self.rule(
            selective && (self.there("recompute_method") || self.there("recompute_num_layers")),
            "--recompute-method and --recompute-num-layers go with --recompute-granularity full alone",
            "--recompute-modules",
        );
        self.rule(
            selective && self.says("recompute_modules", "moe_act") && !self.on("moe_grouped_gemm"),
            "recomputing moe_act needs grouped experts",
            "--moe-grouped-gemm",
        );
        self.rule(
            selective
                && self.says("recompute_modules", "mla_up_proj")
                && !self.on("multi_latent_attention"),
            "recomputing mla_up_proj needs latent attention",
            "--recompute-modules without it",
        );
        self.rule(
            self.on("fine_grained_activation_offloading") && !self.there("offload_modules"),
            "--fine-grained-activation-offloading needs modules to offload",
            "--offload-modules core_attn",
        );
        self.rule(
            self.on("distribute_saved_activations") && self.on("sequence_parallel"),
            "--distribute-saved-activations does not go with --sequence-parallel",
            "one of them",
        );
        self.rule(
            self.on("distribute_saved_activations")
                && self.number("tensor_model_parallel_size", 1) == 1,
            "--distribute-saved-activations needs tensor parallelism to distribute over",
            "settings without it",
        );
        self.rule(
            self.on("recompute_activations") && granularity == Some("full"),
            "--recompute-activations is --recompute-granularity selective, and full is said",
            "one of them",
        );
        let layers = self.number("cpu_offloading_num_layers", 0);
        let pipeline = self.number("pipeline_model_parallel_size", 1);
        self.rule(
            layers > 0 && (pipeline > 1 || granularity.is_some()),
            "--cpu-offloading-num-layers goes with neither a pipeline nor recomputation",
            "--fine-grained-activation-offloading",
        );
    }

    /// Before 0.16 ranks did not share a group of keys and values: `TransformerConfig.__post_init__`.
    fn groups(&mut self) {
        let tp = self.number("tensor_model_parallel_size", 1);
        let is_older = self.target.version < Version::V16 && self.on("group_query_attention");
        let groups = self.number("num_query_groups", 1);
        self.rule(
            is_older && tp > 0 && !groups.is_multiple_of(tp),
            format!("--num-query-groups {groups} does not divide over --tensor-model-parallel-size {tp} before 0.16"),
            "a degree that divides it, or --megatron 0.16",
        );
    }

    fn experts(&mut self) {
        let experts = self.there("num_experts");
        let tp = self.number("tensor_model_parallel_size", 1);
        self.rule(
            experts && tp > 1 && !self.on("sequence_parallel"),
            format!("experts under --tensor-model-parallel-size {tp} train with sequence parallelism alone"),
            "--sequence-parallel",
        );
        self.rule(
            !experts && self.number("expert_model_parallel_size", 1) > 1,
            "--expert-model-parallel-size needs experts",
            "--num-experts, or --expert-model-parallel-size 1",
        );
        let capacity = self.there("moe_expert_capacity_factor");
        let pads = self.on("moe_pad_expert_input_to_capacity");
        self.rule(
            pads && !capacity,
            "--moe-pad-expert-input-to-capacity needs a capacity",
            "--moe-expert-capacity-factor 1.0",
        );
        let flex = self.word("moe_token_dispatcher_type") == Some("flex");
        let hybrid = self.word("moe_flex_dispatcher_backend") == Some("hybridep");
        self.rule(
            pads && flex && !hybrid,
            "DeepEP does not pad to a capacity",
            "--moe-token-dispatcher-type alltoall",
        );
        let balance = self.words("moe_router_load_balancing_type");
        let known = ["aux_loss", "seq_aux_loss", "global_aux_loss", "none"];
        let other = balance.iter().find(|word| !known.contains(&word.as_str()));
        if let Some(other) = other.filter(|_| capacity) {
            self.rule(
                true,
                format!("--moe-expert-capacity-factor does not go with --moe-router-load-balancing-type {other}"),
                known.join(", "),
            );
        }
        let sigmoid = self.word("moe_router_score_function") == Some("sigmoid");
        self.rule(
            self.on("moe_router_enable_expert_bias") && !sigmoid,
            "--moe-router-enable-expert-bias needs sigmoid scores",
            "--moe-router-score-function sigmoid",
        );
        let one = experts && self.number("moe_router_topk", 2) == 1;
        self.rule(
            one && !sigmoid && !self.on("moe_router_pre_softmax") && balance != ["sinkhorn"],
            "a softmax over the one expert chosen is 1 whatever the router says",
            "--moe-router-pre-softmax",
        );
        self.rule(
            self.there("moe_router_group_topk") && !self.there("moe_router_num_groups"),
            "--moe-router-group-topk needs --moe-router-num-groups",
            "both, or neither",
        );
        let coefficients = self.words("moe_aux_loss_coeff").len();
        self.rule(
            balance.len() > 1 && coefficients != balance.len(),
            format!(
                "{} losses balance experts, and there are {coefficients} coefficients",
                balance.len()
            ),
            "as many of --moe-aux-loss-coeff",
        );
        self.rule(
            self.on("moe_paged_stash") && !self.there("moe_expert_rank_capacity_factor"),
            "--moe-paged-stash needs a bound on the rows of a rank",
            "--moe-expert-rank-capacity-factor 1.5",
        );
        self.rule(
            self.there("moe_expert_rank_capacity_factor") && !(flex && hybrid),
            "--moe-expert-rank-capacity-factor is HybridEP's",
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        );
    }

    /// `__post_init__` of `TransformerConfig` and of `MLATransformerConfig`, and `GatedDeltaNet`, in 0.16.1.
    fn linear_attention(&mut self) {
        self.rule(
            self.on("attention_output_gate") && self.on("multi_latent_attention"),
            "--attention-output-gate does not go with --multi-latent-attention",
            "one of them",
        );
        if !self.there("experimental_attention_variant") {
            return;
        }
        let context = self.number("context_parallel_size", 1);
        self.rule(
            context > 1 && self.target.version == Version::V16,
            format!("gated DeltaNet of Megatron-Core 0.16 knows no context parallelism, and --context-parallel-size is {context}"),
            "--context-parallel-size 1, or --megatron main",
        );
        self.rule(
            self.on("squared_relu"),
            "the convolution of gated DeltaNet runs under SiLU alone",
            "--swiglu",
        );
        let keys = self.number("linear_num_key_heads", 16);
        let values = self.number("linear_num_value_heads", 32);
        let widths = [
            self.number("linear_key_head_dim", 128),
            self.number("linear_value_head_dim", 128),
        ];
        let rows = LinearMixer::gated_delta_net([values, keys], widths, 0).in_proj;
        // `get_fp8_align_size`.
        let by = match self.word("fp8_recipe") {
            Some("mxfp8") => 32,
            _ => 16,
        };
        self.rule(
            self.there("fp8_format") && !rows.is_multiple_of(by),
            format!("gated DeltaNet projects to {rows} rows, which FP8 wants divisible by {by}"),
            format!("--linear-num-value-heads divisible by {by}, or bf16"),
        );
    }

    fn overlap(&mut self) {
        let dispatcher = self
            .word("moe_token_dispatcher_type")
            .unwrap_or("allgather");
        let shared = self.on("moe_shared_expert_overlap");
        let own = match self.target.version {
            Version::Main => dispatcher != "allgather",
            _ => dispatcher == "alltoall",
        };
        self.rule(
            shared && !own,
            format!("--moe-shared-expert-overlap does not run beside the dispatcher {dispatcher} in Megatron-Core {}",
                self.target.version.name()),
            "--moe-token-dispatcher-type alltoall, or settings without it",
        );
        let combined = self.on("overlap_moe_expert_parallel_comm");
        self.rule(
            combined && shared,
            "--overlap-moe-expert-parallel-comm and --moe-shared-expert-overlap exclude each other",
            "one of them",
        );
        self.rule(
            combined && self.number("expert_model_parallel_size", 1) == 1,
            "--overlap-moe-expert-parallel-comm has nothing to hide without expert parallelism",
            "--expert-model-parallel-size above 1, or settings without it",
        );
        self.rule(
            combined && dispatcher == "allgather",
            "--overlap-moe-expert-parallel-comm needs the dispatcher alltoall or flex",
            "--moe-token-dispatcher-type alltoall",
        );
        let again = self.word("recompute_granularity");
        let moe = again == Some("selective") && self.says("recompute_modules", "moe");
        self.rule(
            combined && (again == Some("full") || moe),
            "--overlap-moe-expert-parallel-comm does not go with recomputation of whole layers or of moe",
            "--recompute-granularity selective with other modules",
        );
        let stages = [
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
        ];
        let counted = stages.into_iter().any(|name| self.there(name));
        let interleaves = counted || self.there("pipeline_model_parallel_layout");
        let pipeline = self.number("pipeline_model_parallel_size", 1);
        self.rule(
            combined && pipeline > 1 && !interleaves,
            "--overlap-moe-expert-parallel-comm in a pipeline needs virtual stages",
            "--num-virtual-stages-per-pipeline-rank 2",
        );
        self.rule(
            self.on("overlap_param_gather_with_optimizer_step") && !interleaves,
            "--overlap-param-gather-with-optimizer-step needs virtual stages",
            "--num-virtual-stages-per-pipeline-rank 2, or settings without it",
        );
        // `forward_backward_pipelining_with_interleaving` (`megatron/core/pipeline_parallel/schedules.py`).
        let group = self.number("microbatch_group_size_per_virtual_pipeline_stage", pipeline);
        self.rule(
            counted && self.number(stages[0], 2) > 1 && group < pipeline,
            format!("--microbatch-group-size-per-virtual-pipeline-stage {group} is below --pipeline-model-parallel-size {pipeline}"),
            format!("--microbatch-group-size-per-virtual-pipeline-stage {pipeline}"),
        );
        self.rule(
            self.on("delay_wgrad_compute") && !combined,
            "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm",
            "both, or neither",
        );
        self.rule(
            self.on("tp_comm_overlap")
                && (!self.on("sequence_parallel")
                    || self.number("tensor_model_parallel_size", 1) == 1),
            "--tp-comm-overlap needs tensor and sequence parallelism",
            "--tensor-model-parallel-size 2 --sequence-parallel",
        );
    }

    fn precision(&mut self) {
        let bf16 = self.on("bf16");
        self.rule(
            self.on("moe_grouped_gemm") && !bf16,
            "--moe-grouped-gemm multiplies bf16 alone",
            "--bf16",
        );
        self.rule(
            bf16 && self.on("fp16"),
            "--bf16 and --fp16 exclude each other",
            "--bf16",
        );
        let (fp8, fp4) = (self.there("fp8_format"), self.there("fp4_format"));
        self.rule(
            fp8 && fp4,
            "--fp8-format and --fp4-format exclude each other",
            "one of them",
        );
        let rounds =
            self.on("moe_router_padding_for_quantization") || self.on("moe_router_padding_for_fp8");
        self.rule(
            rounds && !(fp8 || fp4),
            "padding for quantized products needs some",
            "--fp8-format, or settings without the padding",
        );
        let gathers = !matches!(
            self.word("moe_token_dispatcher_type"),
            Some("alltoall" | "flex")
        );
        self.rule(
            rounds && gathers,
            "the dispatcher allgather does not pad for quantized products",
            "--moe-token-dispatcher-type alltoall",
        );
        self.rule(
            self.on("fp8_param_gather") && !fp8,
            "--fp8-param-gather needs FP8",
            "--fp8-format hybrid",
        );
        self.rule(
            self.on("fp8_dot_product_attention") && !fp8,
            "--fp8-dot-product-attention needs FP8",
            "--fp8-format hybrid",
        );
        self.rule(
            self.on("fp4_param_gather") && !fp4,
            "--fp4-param-gather needs FP4",
            "--fp4-format e2m1",
        );
        let offloads = self.on("optimizer_cpu_offload");
        self.rule(
            offloads && !self.on("use_precision_aware_optimizer"),
            "--optimizer-cpu-offload needs the precision-aware optimizer",
            "--use-precision-aware-optimizer",
        );
        let delayed = self
            .word("fp8_recipe")
            .is_none_or(|recipe| recipe == "delayed");
        self.rule(
            offloads && self.on("fp8_param_gather") && !delayed,
            "--optimizer-cpu-offload goes with --fp8-param-gather under delayed scaling alone",
            "settings without --fp8-param-gather, or --fp8-recipe delayed",
        );
        let narrow = self.word("main_grads_dtype") == Some("bf16");
        self.rule(
            narrow && self.on("accumulate_allreduce_grads_in_fp32"),
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other",
            "one of them",
        );
        let types = [
            "main_grads_dtype",
            "main_params_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
        ];
        let other = types
            .into_iter()
            .find(|name| self.word(name).is_some_and(|word| word != "fp32"));
        if let Some(other) = other.filter(|_| !self.on("use_precision_aware_optimizer")) {
            self.rule(
                true,
                format!(
                    "{} other than fp32 needs the precision-aware optimizer",
                    flag(other)
                ),
                "--use-precision-aware-optimizer",
            );
        }
    }

    /// What Muon does not go with: `validate_args` and `OptimizerConfig`, and of 0.16 `get_megatron_muon_optimizer`.
    fn muon(&mut self) {
        let name = self.word("optimizer").unwrap_or("adam");
        if !["muon", "dist_muon"].contains(&name) {
            return;
        }
        let version = self.target.version;
        let own = version.name();
        self.rule(
            version < Version::V16,
            format!("Megatron-Core {own} has no --optimizer {name}"),
            "--megatron 0.16, or --optimizer adam",
        );
        let old = version < Version::Main;
        self.rule(
            old && self.on("use_distributed_optimizer"),
            format!("--use-distributed-optimizer does not go with Muon in Megatron-Core {own}"),
            "--optimizer dist_muon without it, or --megatron main",
        );
        let beside = self.on("overlap_grad_reduce") || self.on("overlap_param_gather");
        self.rule(
            old && beside,
            format!("Muon reduces and gathers nothing beside compute in Megatron-Core {own}"),
            "settings without --overlap-grad-reduce and --overlap-param-gather, or --megatron main",
        );
        self.rule(
            self.on("use_megatron_fsdp") || self.on("use_torch_fsdp2"),
            "Muon does not go with FSDP",
            "--optimizer adam, or settings without FSDP",
        );
        let aware = self.on("use_precision_aware_optimizer");
        self.rule(
            aware || self.on("optimizer_cpu_offload"),
            "the precision-aware optimizer, which offload to the CPU is, is Adam's alone",
            "--optimizer adam, or settings without --use-precision-aware-optimizer and --optimizer-cpu-offload",
        );
    }

    /// What PyTorch's FSDP2 does not go with, beyond what the planner's own rules say: `validate_args`.
    fn torch_fsdp2(&mut self) {
        if !self.on("use_torch_fsdp2") {
            return;
        }
        let fused = !self.on("no_gradient_accumulation_fusion");
        let format = self.word("ckpt_format").unwrap_or("torch_dist");
        let saves = ["torch_dist", "torch_dcp"].contains(&format);
        for (is_broken, with, nearest) in [
            (
                self.on("use_megatron_fsdp"),
                "--use-megatron-fsdp",
                "one of them",
            ),
            (
                self.on("use_distributed_optimizer"),
                "--use-distributed-optimizer",
                "settings without it",
            ),
            (
                self.on("overlap_grad_reduce") || self.on("overlap_param_gather"),
                "--overlap-grad-reduce or --overlap-param-gather",
                "settings without them, as it always does",
            ),
            (
                self.on("use_precision_aware_optimizer"),
                "--use-precision-aware-optimizer",
                "settings without it",
            ),
            (
                fused,
                "gradients that are added up in products",
                "--no-gradient-accumulation-fusion",
            ),
            (
                !saves,
                "another format of checkpoints",
                "--ckpt-format torch_dist",
            ),
        ] {
            let rule = format!("--use-torch-fsdp2 does not go with {with}");
            self.rule(is_broken, rule, nearest);
        }
    }

    fn graphs(&mut self) {
        let graphs = self.on("external_cuda_graph")
            || self.on("enable_cuda_graph")
            || self
                .word("cuda_graph_impl")
                .is_some_and(|word| word != "none");
        let whole = self.word("cuda_graph_impl") == Some("full_iteration")
            || self.says("cuda_graph_scope", "full_iteration");
        self.rule(
            graphs && !whole && self.word("recompute_granularity") == Some("full"),
            "full recomputation does not go with graphs of layers",
            "--recompute-granularity selective",
        );
        self.rule(
            graphs && whole && !self.on("no_check_for_nan_in_loss_and_grad"),
            "a graph of the whole iteration leaves no place to look for NaN",
            "--no-check-for-nan-in-loss-and-grad",
        );
        let modules = self.there("cuda_graph_modules");
        self.rule(
            modules && self.word("cuda_graph_impl") == Some("full_iteration"),
            "a graph of the whole iteration has no modules",
            "--cuda-graph-impl full_iteration without --cuda-graph-modules",
        );
        let [router, preprocess, moe, mlp, attn] =
            ["moe_router", "moe_preprocess", "moe", "mlp", "attn"].map(|word| {
                self.says("cuda_graph_scope", word) || self.says("cuda_graph_modules", word)
            });
        let alone = preprocess && !router;
        let both = moe && router;
        self.rule(
            alone,
            "a graph of moe_preprocess needs moe_router beside it",
            "both",
        );
        self.rule(
            both,
            "graphs of moe and of moe_router exclude each other",
            "one of them",
        );
        self.rule(
            moe && !self.on("moe_pad_expert_input_to_capacity"),
            "a graph of moe needs experts that get as many rows each",
            "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity, or --cuda-graph-modules moe_router moe_preprocess",
        );
        self.rule(
            graphs && self.on("overlap_moe_expert_parallel_comm") && (moe || mlp),
            "--overlap-moe-expert-parallel-comm does not go with graphs of moe or mlp",
            "--cuda-graph-modules attn moe_router moe_preprocess",
        );
        self.rule(
            graphs && self.number("cpu_offloading_num_layers", 0) > 0,
            "--cpu-offloading-num-layers does not go with graphs",
            "--fine-grained-activation-offloading",
        );
        let offloads = self.on("fine_grained_activation_offloading");
        self.rule(
            graphs && offloads && (whole || !(attn && router)),
            "--fine-grained-activation-offloading goes with graphs of both attn and moe_router alone",
            "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router",
        );
        let experts = self.there("num_experts");
        let bounded = self.there("moe_expert_rank_capacity_factor")
            || self.on("moe_pad_expert_input_to_capacity");
        self.rule(
            graphs && whole && experts && !bounded,
            "a graph of the whole iteration needs experts whose rows are bounded",
            "--moe-expert-rank-capacity-factor 1.5 with HybridEP, or --moe-pad-expert-input-to-capacity",
        );
        let allocator = self
            .settings
            .variable("PYTORCH_CUDA_ALLOC_CONF")
            .unwrap_or("");
        let expands = allocator.contains("expandable_segments:True");
        let registers = self.settings.variable("NCCL_GRAPH_REGISTER") != Some("0");
        let main = self.target.version == Version::Main;
        self.rule(
            graphs && expands && registers && main,
            "graphs over expandable segments need NCCL_GRAPH_REGISTER=0",
            "NCCL_GRAPH_REGISTER=0",
        );
        self.rule(
            graphs && expands && !main,
            format!(
                "Megatron-Core {} takes no graphs over expandable segments",
                self.target.version.name()
            ),
            "PYTORCH_CUDA_ALLOC_CONF without expandable_segments:True",
        );
    }

    fn environment(&mut self) {
        let fsdp = self.on("use_megatron_fsdp") || self.on("use_torch_fsdp2");
        let connections = self.settings.variable("CUDA_DEVICE_MAX_CONNECTIONS");
        self.rule(
            fsdp && connections == Some("1"),
            "FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1",
            "CUDA_DEVICE_MAX_CONNECTIONS=8",
        );
        self.rule(
            self.on("use_megatron_fsdp") && self.word("ckpt_format") != Some("fsdp_dtensor"),
            "Megatron-FSDP saves checkpoints of the format fsdp_dtensor alone",
            "--ckpt-format fsdp_dtensor",
        );
        let tp = self.number("tensor_model_parallel_size", 1);
        let cp = self.number("context_parallel_size", 1);
        let arch = self.target.cluster.gpu.arch.strip_prefix("sm_");
        let older = arch
            .and_then(|arch| arch.parse().ok())
            .is_some_and(|arch: u32| arch < 100);
        let free = fsdp || self.on("overlap_moe_expert_parallel_comm");
        self.rule(
            (tp > 1 || cp > 1) && older && !free && connections != Some("1"),
            format!(
                "tensor or context parallelism on {} needs CUDA_DEVICE_MAX_CONNECTIONS=1, and it is {}",
                self.target.cluster.gpu.name,
                connections.unwrap_or("absent")
            ),
            "CUDA_DEVICE_MAX_CONNECTIONS=1",
        );
        self.rule(
            self.on("overlap_moe_expert_parallel_comm") && connections == Some("1"),
            "--overlap-moe-expert-parallel-comm hides nothing under CUDA_DEVICE_MAX_CONNECTIONS=1",
            "CUDA_DEVICE_MAX_CONNECTIONS=32",
        );
    }

    /// `_hybrid_ep_num_nodes` of `megatron/core/transformer/moe/fused_a2a.py` on main.
    fn hybrid_ep(&mut self) {
        const NAME: &str = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN";
        let hybrid = self.word("moe_flex_dispatcher_backend") == Some("hybridep");
        let Some(found) = self.settings.variable(NAME).filter(|_| hybrid) else {
            return;
        };
        let tp = self.number("tensor_model_parallel_size", 1);
        let group = self.number("expert_model_parallel_size", 1)
            * self.number("expert_tensor_parallel_size", tp);
        let near = found.parse().ok().filter(|near: &u64| *near > 0);
        let own = u32::try_from(group).unwrap_or(u32::MAX);
        self.rule(
            near.is_none_or(|near| !group.is_multiple_of(near)),
            format!(
                "{NAME} is {found}, which does not divide the {group} ranks that exchange tokens"
            ),
            format!(
                "{NAME}={}",
                ranks_near(own, self.target.cluster.gpus_per_domain)
            ),
        );
    }

    /// Choices of the parser of Megatron-LM that no price hangs on.
    fn choices(&mut self) {
        const CHOICES: [(&str, &[&str]); 6] = [
            ("moe_router_dtype", &["fp32", "fp64"]),
            (
                "moe_router_load_balancing_type",
                &[
                    "aux_loss",
                    "seq_aux_loss",
                    "global_aux_loss",
                    "sinkhorn",
                    "none",
                ],
            ),
            ("cross_entropy_fusion_impl", &["native", "te"]),
            (
                "attention_backend",
                &["flash", "fused", "unfused", "local", "auto"],
            ),
            (
                "ckpt_format",
                &["torch_dist", "torch_dcp", "fsdp_dtensor", "torch", "zarr"],
            ),
            (
                "cuda_graph_scope",
                &[
                    "attn",
                    "mlp",
                    "moe",
                    "moe_router",
                    "moe_preprocess",
                    "mamba",
                    "full",
                    "full_iteration",
                    "full_iteration_inference",
                ],
            ),
        ];
        for (name, all) in CHOICES {
            let other = self
                .words(name)
                .iter()
                .find(|word| !all.contains(&word.as_str()));
            if let Some(other) = other {
                let known = nearest(other, all.iter().copied()).unwrap_or(all[0]);
                self.rule(
                    true,
                    format!("{} is {other}, and may be {}", flag(name), all.join(", ")),
                    format!("{} {known}", flag(name)),
                );
            }
        }
    }

    /// Ways to say how layers are split that exclude each other: `TransformerConfig.__post_init__`.
    fn splits(&mut self) {
        let there = |names: [&'static str; 2]| {
            let both = names.into_iter().filter(|name| self.there(name));
            let flags: Vec<String> = both.map(flag).collect();
            (!flags.is_empty()).then(|| flags.join(" and "))
        };
        let layout = self.there("pipeline_model_parallel_layout");
        let layout = layout.then(|| flag("pipeline_model_parallel_layout"));
        let ends = there([
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        ]);
        let counted = there([
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ]);
        for (one, other) in [(&layout, &ends), (&layout, &counted), (&ends, &counted)] {
            if let (Some(one), Some(other)) = (one, other) {
                let rule = format!("{one} does not go with {other}");
                self.rule(true, rule, format!("{one} alone"));
            }
        }
    }

    fn training(&mut self) {
        self.rule(
            self.there("train_iters") && self.there("train_samples"),
            "--train-iters and --train-samples exclude each other",
            "one of them",
        );
        let tokens = self.number("seq_length", 0);
        let longest = self.number("max_position_embeddings", u64::MAX);
        self.rule(
            tokens > longest,
            format!("--seq-length {tokens} is above --max-position-embeddings {longest}"),
            format!("--max-position-embeddings {tokens}"),
        );
    }
}

/// The known flag that an unknown one was most likely meant to be.
pub(super) fn nearest_flag(name: &str) -> &'static str {
    nearest(name, FLAGS.iter().map(|flag| flag.name)).unwrap_or_default()
}
