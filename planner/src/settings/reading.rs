//! [`read`]: settings as a job, with every flag accounted for: what is read, what has no price, what says nothing of
//! speed or memory, and what is not known.

use std::num::NonZeroU32;

use moefold_profiles::{Dtype, Precision};

use super::job::Job;
use super::rules::{self, Target};
use super::said::{Problem, Said};
use super::table::{self, Role};
use super::text::{Setting, Settings, Value, flag};
use super::version::Version;
use super::{model, stages};
use crate::choice::{
    Capacity, CpComm, Dispatcher, DropPolicy, GraphModule, Graphs, HostShare, Module, Offload,
    OffloadModule, Optimizer, Overlap, PrimaryWeights, Recompute, RecomputePlan, ScheduleName,
    StackName, Zero,
};
use crate::layout::{Batch, Order, PartialDegrees};
use crate::model::Model;
use crate::options::SearchOptions;

/// What settings say.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    /// The job, all that is said pinned.
    pub job: Job,
    /// Rules of Megatron-LM that are broken; those of layouts are the search's to say.
    pub broken: Vec<Problem>,
    /// Flags that change speed or memory and have no price, with what they do.
    pub unpriced: Vec<(Setting, &'static str)>,
    /// Flags that say nothing of either.
    pub kept: Vec<Setting>,
    /// Flags that are not known, with the nearest that is.
    pub unknown: Vec<(Setting, &'static str)>,
    /// What is priced otherwise than it is said.
    pub notes: Vec<String>,
}

/// Reads settings for a target; `given` is a model that stands for what the flags say of one. Of settings that cannot
/// be priced every problem is said.
pub fn read(
    settings: &Settings,
    target: &Target<'_>,
    given: Option<&Model>,
) -> Result<Reading, Vec<Problem>> {
    let mut said = Said::new(settings);
    for Setting { name, value } in &settings.flags {
        if let Value::Words(words) = value
            && table::is_switch(name)
        {
            let expected = "no value: it is on where it stands, and off where it is absent";
            said.wrong(name, &words.join(" "), expected);
        }
    }
    said.notes.extend(settings.notes.iter().cloned());
    if !settings.elsewhere.is_empty() {
        said.notes.push(format!(
            "not read, as this file does not say what it stands for: {}",
            settings.elsewhere.join(" ")
        ));
    }
    let model = match given {
        Some(model) => Some(model.clone()),
        None => model::read(&mut said, None),
    };
    let options = model
        .as_ref()
        .and_then(|model| options(&mut said, model, target));
    let flags = settings
        .flags
        .iter()
        .filter(|setting| setting.value != Value::Off);
    let unknown = flags.filter(|setting| table::find(&setting.name).is_none());
    let unknown = unknown.map(|setting| (setting.clone(), rules::nearest_flag(&setting.name)));
    let unknown: Vec<(Setting, &'static str)> = unknown.collect();
    let (Some(model), Some(options), true) = (model, options, said.problems.is_empty()) else {
        let unknown = unknown.iter();
        let unknown = unknown.map(|(setting, nearest)| Problem::Unknown {
            name: setting.name.clone(),
            nearest,
        });
        said.problems.extend(unknown);
        return Err(said.problems);
    };
    if given.is_some() {
        note_other_model(&mut said, &model);
    }
    let mut broken = rules::broken(settings, target);
    broken.append(&mut said.broken);
    let mut reading = Reading {
        job: Job {
            model,
            gpus: target.gpus,
            options,
        },
        broken,
        unpriced: Vec::new(),
        kept: Vec::new(),
        unknown,
        notes: said.notes,
    };
    for setting in &settings.flags {
        let own = setting.clone();
        match table::find(&setting.name).map(|known| known.role) {
            _ if setting.value == Value::Off => reading.kept.push(own),
            None | Some(Role::Read(_)) => {}
            // PyTorch's FSDP2 adds gradients up where they rest, which is priced.
            Some(Role::Unpriced(_))
                if setting.name == "no_gradient_accumulation_fusion"
                    && settings.is_on("use_torch_fsdp2") => {}
            Some(Role::Unpriced(what)) => reading.unpriced.push((own, what)),
            Some(Role::Kept) => reading.kept.push(own),
        }
    }
    Ok(reading)
}

/// Says where flags describe another model than the one that is given beside them.
fn note_other_model(said: &mut Said<'_>, model: &Model) {
    for (name, own) in [
        ("num_layers", model.layers.len() as u64),
        ("hidden_size", model.hidden),
    ] {
        let number = said.number(name, u64::MAX);
        if let Some(number) = number.filter(|number| *number != own) {
            said.notes.push(format!(
                "{} has {own} where {} says {number}, and is what is priced",
                model.name,
                flag(name)
            ));
        }
    }
}

fn options(said: &mut Said<'_>, model: &Model, target: &Target<'_>) -> Option<SearchOptions> {
    let mut degree = |name| said.degree(name).unwrap_or(1);
    let tp = degree("tensor_model_parallel_size");
    let cp = degree("context_parallel_size");
    let pp = degree("pipeline_model_parallel_size");
    let ep = degree("expert_model_parallel_size");
    let has_experts = model.num_moe_layers() > 0;
    let etp = said.degree("expert_tensor_parallel_size");
    let etp = etp.unwrap_or(if has_experts { tp } else { 1 });
    if tp > 1 && !said.on("sequence_parallel") && !has_experts {
        said.unable(
            "tensor parallelism without sequence parallelism",
            "--sequence-parallel",
        );
    }
    let layers = model.layers.len() as u64;
    let (vpp, stages) = stages::read(said, layers, model.mtp.len(), pp);
    let mbs = said.degree("micro_batch_size");
    if mbs.is_none() && !said.is_there("micro_batch_size") {
        said.missing("micro_batch_size", "sequences of a microbatch");
    }
    let seq_len = said.number("seq_length", 1 << 40);
    if seq_len.is_none() && !said.is_there("seq_length") {
        said.missing("seq_length", "tokens of a sequence");
    }
    let replicas =
        target.gpus / (u64::from(tp) * u64::from(cp) * u64::from(pp)).clamp(1, 1 << 31) as u32;
    let global_batch = said.number("global_batch_size", 1 << 40);
    let global_batch = global_batch.or(mbs.map(|mbs| u64::from(mbs) * u64::from(replicas.max(1))));
    let precision = precision(said);
    let (optimizer, grad_dtype, zero, instances) = optimizer(said);
    let primary_weights = primary_weights(said);
    let fraction = said.real("optimizer_offload_fraction", [0.0, 1.0]);
    let optimizer_offload = HostShare(if said.on("optimizer_cpu_offload") {
        fraction.unwrap_or(1.0)
    } else {
        0.0
    });
    let overlap = overlap(said, model);
    note_idle(said);
    let dispatcher = dispatcher(said, target.version).filter(|_| has_experts);
    let capacity = capacity(said);
    let recompute = recompute(said, layers);
    let offload = offload(said);
    let cp_comm = cp_comm(said);
    let cp_sizes = cp_sizes(said, cp_comm);
    let graphs = graphs(said);
    let fp8_attention = said.on("fp8_dot_product_attention");
    kernels(said, has_experts, target.version);
    let order = if said.on("use_tp_pp_dp_mapping") {
        Order::DP_LAST
    } else {
        Order::default()
    };
    let batch = Batch {
        seq_len: seq_len?,
        global_batch: global_batch?,
    };
    Some(SearchOptions {
        precision,
        pins: PartialDegrees {
            tp: Some(tp),
            cp: Some(cp),
            pp: Some(pp),
            vpp: Some(vpp),
            ep: Some(ep),
            etp: Some(etp),
            mbs: Some(mbs?),
            ..PartialDegrees::default()
        },
        dispatcher,
        order: Some(order),
        cp_comm: Some(cp_comm),
        cp_sizes,
        graphs: Some(graphs),
        fp8_attention,
        capacity,
        recompute: Some(recompute),
        schedule: Some(if overlap.expert_alltoall {
            ScheduleName::Combined
        } else {
            Job::schedule(pp, vpp)
        }),
        offload: Some(offload),
        stages,
        optimizer,
        primary_weights,
        optimizer_offload,
        grad_dtype,
        zero,
        instances,
        overlap: Some(overlap),
        top: 1,
        ..SearchOptions::new(batch, StackName::Megatron)
    })
}

/// Flags that say nothing without another.
const IDLE: [(&str, &str); 10] = [
    ("num_query_groups", "group_query_attention"),
    ("fp8_recipe", "fp8_format"),
    ("recompute_method", "recompute_granularity"),
    ("recompute_modules", "recompute_granularity"),
    ("recompute_num_layers", "recompute_granularity"),
    ("optimizer_offload_fraction", "optimizer_cpu_offload"),
    ("offload_modules", "fine_grained_activation_offloading"),
    ("q_lora_rank", "multi_latent_attention"),
    ("kv_lora_rank", "multi_latent_attention"),
    ("mtp_loss_scaling_factor", "mtp_num_layers"),
];

/// Says which flags change nothing, as what they belong to is absent.
fn note_idle(said: &mut Said<'_>) {
    for (name, other) in IDLE {
        if said.is_there(name) && !said.is_there(other) {
            let (name, other) = (flag(name), flag(other));
            let note = format!("{name} says nothing without {other}");
            said.notes.push(note);
        }
    }
}

fn overlap(said: &mut Said<'_>, model: &Model) -> Overlap {
    // PyTorch's FSDP2 always runs both beside compute.
    let torch = said.on("use_torch_fsdp2");
    let has_shared = model.moe().is_some_and(|moe| moe.shared.is_some());
    let shared_expert = said.on("moe_shared_expert_overlap");
    if shared_expert && !has_shared {
        let note = "--moe-shared-expert-overlap says nothing without a shared expert";
        said.notes.push(note.to_owned());
    }
    Overlap {
        grad_reduce: said.on("overlap_grad_reduce") || torch,
        param_gather: said.on("overlap_param_gather") || torch,
        p2p: !said.on("no_overlap_p2p_communication"),
        shared_expert: shared_expert && has_shared,
        expert_alltoall: said.on("overlap_moe_expert_parallel_comm"),
        delay_wgrad: said.on("delay_wgrad_compute"),
        tp: said.on("tp_comm_overlap"),
    }
}

fn primary_weights(said: &mut Said<'_>) -> PrimaryWeights {
    // What MXFP8 weights are gathered into takes no memory of its own.
    said.on("reuse_grad_buf_for_mxfp8_param_ag");
    if said.on("fp8_param_gather") {
        PrimaryWeights::Fp8
    } else {
        PrimaryWeights::Wide
    }
}

fn precision(said: &mut Said<'_>) -> Precision {
    if said.on("fp16") {
        said.unable("--fp16", "--bf16");
    }
    if !said.on("bf16") {
        return Precision::Fp32;
    }
    let fp8 = said.one_of("fp8_format", &[("hybrid", ()), ("e4m3", ())]);
    let recipe = said.one_of(
        "fp8_recipe",
        &[
            ("tensorwise", Precision::Fp8),
            ("delayed", Precision::Fp8Delayed),
            ("blockwise", Precision::Fp8Blockwise),
            ("mxfp8", Precision::Mxfp8),
        ],
    );
    let fp4 = said.one_of("fp4_format", &[("e2m1", ())]);
    said.one_of("fp4_recipe", &[("nvfp4", ())]);
    match (fp8, fp4) {
        (Some(()), _) => recipe.unwrap_or(Precision::Fp8Delayed),
        (None, Some(())) => Precision::Nvfp4,
        (None, None) => Precision::Bf16,
    }
}

/// The optimizer, the type of main gradients, and what replicas share.
fn optimizer(said: &mut Said<'_>) -> (Optimizer, Dtype, Zero, u32) {
    let name = said.word("optimizer").unwrap_or("adam");
    let muon = ["muon", "dist_muon"].contains(&name);
    if !muon && name != "adam" {
        said.unable(format!("--optimizer {name}"), "--optimizer adam or muon");
    }
    if muon {
        said_of_muon(said);
    }
    let instances = said.degree("num_distributed_optimizer_instances");
    let types = [("fp32", Dtype::F32), ("bf16", Dtype::Bf16)];
    let mut narrow = |name| match said.word(name) {
        Some(other @ ("fp16" | "fp8")) => {
            said.unable(format!("{} {other}", flag(name)), "fp32 or bf16");
            Dtype::F32
        }
        _ => said.one_of(name, &types).unwrap_or(Dtype::F32),
    };
    let [first, second] = ["exp_avg_dtype", "exp_avg_sq_dtype"].map(&mut narrow);
    let masters = narrow("main_params_dtype");
    let mut grads = narrow("main_grads_dtype");
    if masters != Dtype::F32 {
        said.unable("masters other than fp32", "--main-params-dtype fp32");
    }
    if first != second {
        said.unable(
            "moments of two types",
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        );
    }
    if said.on("grad_reduce_in_bf16") {
        grads = Dtype::Bf16;
    }
    let optimizer = match first {
        _ if muon => Optimizer::Muon,
        Dtype::Bf16 => Optimizer::AdamBf16Moments,
        _ => Optimizer::Adam,
    };
    let [fsdp, fsdp2] = ["use_megatron_fsdp", "use_torch_fsdp2"].map(|name| said.on(name));
    let strategy = said
        .word("data_parallel_sharding_strategy")
        .unwrap_or("no_shard");
    let outer = said
        .word("outer_dp_sharding_strategy")
        .unwrap_or("no_shard");
    let zero = match (fsdp, strategy, outer) {
        _ if fsdp2 => Zero::Fsdp2,
        (true, "optim_grads_params", "optim") => Zero::Hybrid,
        (true, "optim_grads_params", _) => Zero::Fsdp,
        (true, "optim_grads", _) => Zero::Gradients,
        (true, "optim", _) | (false, ..) => Zero::States,
        (true, other, _) => {
            said.unable(
                format!("--data-parallel-sharding-strategy {other}"),
                "optim_grads_params, optim_grads, or optim",
            );
            Zero::States
        }
    };
    if fsdp && outer != "no_shard" && zero != Zero::Hybrid {
        said.unable(
            format!("--outer-dp-sharding-strategy {outer} beside it"),
            "no_shard, or optim beside --data-parallel-sharding-strategy optim_grads_params",
        );
    }
    if fsdp2 {
        // Those of the type of weights.
        grads = if said.on("bf16") {
            Dtype::Bf16
        } else {
            Dtype::F32
        };
    }
    let divides = fsdp || fsdp2 || name == "dist_muon" || said.on("use_distributed_optimizer");
    if !divides {
        said.unable(
            "an optimizer whose state every replica holds whole",
            "--use-distributed-optimizer",
        );
    }
    (optimizer, grads, zero, instances.unwrap_or(1))
}

/// What of Muon is priced in one way alone.
fn said_of_muon(said: &mut Said<'_>) {
    for (name, priced) in [
        ("muon_num_ns_steps", "5"),
        ("muon_tp_mode", "blockwise"),
        ("muon_fp32_matmul_prec", "medium"),
        ("muon_scalar_optimizer", "adam"),
    ] {
        if let Some(other) = said.word(name).filter(|word| *word != priced) {
            said.unable(
                format!("{} {other}", flag(name)),
                format!("{} {priced}", flag(name)),
            );
        }
    }
    if said.on("muon_no_split_qkv") {
        said.unable(
            "queries, keys and values orthogonalized as one",
            "settings without --muon-no-split-qkv",
        );
    }
}

fn dispatcher(said: &mut Said<'_>, version: Version) -> Option<Dispatcher> {
    let kind = said.one_of(
        "moe_token_dispatcher_type",
        &[
            ("allgather", Some(Dispatcher::Allgather)),
            ("alltoall", Some(Dispatcher::Alltoall)),
            ("flex", None),
        ],
    );
    if let Some(dispatcher) = kind.unwrap_or(Some(Dispatcher::Allgather)) {
        return Some(dispatcher);
    }
    let backend = said.word("moe_flex_dispatcher_backend");
    match backend.unwrap_or("deepep") {
        "deepep" => Some(Dispatcher::Deepep),
        "hybridep" => Some(Dispatcher::Hybridep),
        other @ ("ncclep" | "deepepv2") if version == Version::Main => {
            said.unable(
                format!("--moe-flex-dispatcher-backend {other}"),
                "deepep or hybridep",
            );
            None
        }
        other => {
            said.wrong("moe_flex_dispatcher_backend", other, "deepep or hybridep");
            None
        }
    }
}

fn capacity(said: &mut Said<'_>) -> Option<Capacity> {
    let factor = said.real("moe_expert_capacity_factor", [-1e9, 1e9]);
    let policies = DropPolicy::ALL.map(|policy| (policy.name(), policy));
    let drop_policy = said
        .one_of("moe_token_drop_policy", &policies)
        .unwrap_or_default();
    let pad = said.on("moe_pad_expert_input_to_capacity");
    // A negative factor is none.
    let factor = factor.filter(|factor| *factor > 0.0)?;
    Some(Capacity {
        factor,
        drop_policy,
        pad,
    })
}

fn recompute(said: &mut Said<'_>, layers: u64) -> RecomputePlan {
    let granularity = said.one_of(
        "recompute_granularity",
        &[("full", true), ("selective", false)],
    );
    let names = Module::ALL.map(|module| (module.name(), module));
    let words = said.words("recompute_modules");
    let method = said.one_of("recompute_method", &[("uniform", true), ("block", false)]);
    let number = said.number("recompute_num_layers", layers);
    let selective =
        granularity == Some(false) || (granularity.is_none() && said.on("recompute_activations"));
    if selective {
        let Some(words) = words else {
            return Recompute::Modules(vec![Module::CoreAttn]).into();
        };
        let mut modules = Vec::new();
        for word in words {
            if let Some((_, module)) = names.iter().find(|(name, _)| name == word) {
                modules.push(*module);
            } else {
                let known: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
                if word == "mhc" {
                    said.unable(format!("recomputing {word}"), known.join(", "));
                } else {
                    said.wrong("recompute_modules", word, &known.join(" or "));
                }
            }
        }
        return Recompute::of(modules).into();
    }
    if granularity != Some(true) {
        return RecomputePlan::default();
    }
    match (method, number) {
        (Some(false), Some(number)) => {
            let number = NonZeroU32::new(number as u32).expect("one of the layers");
            return RecomputePlan::first_of_stages(number);
        }
        (_, Some(2..)) => said.unable(
            "recomputing from the input of every few layers",
            "--recompute-num-layers 1",
        ),
        _ => {}
    }
    Recompute::Full.into()
}

fn offload(said: &mut Said<'_>) -> Offload {
    if said.there_and_above("cpu_offloading_num_layers", 0) {
        said.unable(
            "whole layers on the host",
            "--fine-grained-activation-offloading --offload-modules",
        );
    }
    if !said.on("fine_grained_activation_offloading") {
        return Offload::NONE;
    }
    let words = said.words("offload_modules").unwrap_or_default();
    let mut modules = Vec::new();
    for word in words {
        let mut all = OffloadModule::ALL.into_iter();
        if let Some(module) = all.find(|module| module.name() == word) {
            modules.push(module);
        } else {
            let known = OffloadModule::ALL.map(OffloadModule::name).join(", ");
            said.unable(format!("offloading {word}"), known);
        }
    }
    Offload::of(modules)
}

fn graphs(said: &mut Said<'_>) -> Graphs {
    let [none, modules, local, whole] = [0, 1, 2, 3];
    let kind = said.one_of(
        "cuda_graph_impl",
        &[
            ("none", none),
            ("transformer_engine", modules),
            ("local", local),
            ("full_iteration", whole),
        ],
    );
    // Before 0.15 one of two switches said it.
    let older = ["external_cuda_graph", "enable_cuda_graph"].map(|name| said.on(name));
    let kind = kind.or(older.contains(&true).then_some(modules));
    let [new, old] = ["cuda_graph_modules", "cuda_graph_scope"]
        .map(|name| said.words(name).unwrap_or_default().to_vec());
    let words = [new, old].concat();
    match kind {
        None | Some(0) => return Graphs::NONE,
        Some(3) => return Graphs::FULL_ITERATION,
        _ if words.iter().any(|word| word == "full_iteration") => return Graphs::FULL_ITERATION,
        _ => {}
    }
    let mut found = Vec::new();
    for word in words {
        let mut all = GraphModule::ALL.into_iter();
        if let Some(module) = all.find(|module| module.name() == word) {
            found.push(module);
        } else {
            let known = GraphModule::ALL.map(GraphModule::name).join(", ");
            said.unable(format!("a graph of {word}"), known);
        }
    }
    if found.is_empty() {
        said.unable(
            "graphs of whole layers",
            "--cuda-graph-modules, or --cuda-graph-impl full_iteration",
        );
    }
    Graphs::of(found)
}

fn cp_comm(said: &mut Said<'_>) -> CpComm {
    let words = said.words("cp_comm_type").unwrap_or_default();
    let Some(first) = words.first() else {
        return CpComm::default();
    };
    let known = CpComm::ALL.into_iter().find(|comm| comm.name() == first);
    let alike = words.iter().all(|word| word == first);
    known.filter(|_| alike).unwrap_or_else(|| {
        said.unable(
            format!("--cp-comm-type {}", words.join(" ")),
            CpComm::ALL.map(CpComm::name).join(", "),
        );
        CpComm::default()
    })
}

/// The levels of a hierarchy, which Megatron-LM has to be told.
fn cp_sizes(said: &mut Said<'_>, cp_comm: CpComm) -> Option<[u32; 2]> {
    const NAME: &str = "hierarchical_context_parallel_sizes";
    let words = said.words(NAME).unwrap_or_default();
    let sizes: Option<Vec<u32>> = words.iter().map(|word| word.parse().ok()).collect();
    match sizes.as_deref() {
        Some([inside, outside]) if *inside > 0 && *outside > 0 => {
            (cp_comm == CpComm::Hierarchical).then_some([*inside, *outside])
        }
        _ => {
            let what = match words {
                [] if cp_comm == CpComm::Hierarchical => {
                    format!("--cp-comm-type {} without levels", cp_comm.name())
                }
                [] => return None,
                words => format!("{} {}", flag(NAME), words.join(" ")),
            };
            let nearest = "--hierarchical-context-parallel-sizes with two numbers, ranks that exchange heads and of a ring";
            said.unable(what, nearest);
            None
        }
    }
}

fn kernels(said: &mut Said<'_>, experts: bool, version: Version) {
    let fuses = said.on("cross_entropy_loss_fusion");
    if fuses && version == Version::Main && said.word("cross_entropy_fusion_impl") == Some("te") {
        said.notes.push(
            "Megatron-LM refuses --cross-entropy-fusion-impl te since June 2026 (pull request 5115); native is what it takes"
                .to_owned(),
        );
    }
    if let Some(other) = said
        .word("transformer_impl")
        .filter(|word| *word != "transformer_engine")
    {
        said.unable(format!("--transformer-impl {other}"), "transformer_engine");
    }
    let absent = |said: &Said<'_>, name| !said.is_there(name);
    let mut presumed = Vec::new();
    if experts {
        presumed.extend(
            ["moe_grouped_gemm", "moe_permute_fusion"]
                .into_iter()
                .filter(|name| absent(said, name))
                .map(flag),
        );
    }
    presumed.extend(
        absent(said, "cross_entropy_loss_fusion").then(|| flag("cross_entropy_loss_fusion")),
    );
    if !presumed.is_empty() {
        said.notes.push(format!(
            "priced as though there were {}, and slower without",
            presumed.join(", ")
        ));
    }
}
