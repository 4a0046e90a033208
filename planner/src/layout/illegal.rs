//! [`Illegal`]: a rule of parallel layouts that some degrees break.
//!
//! Each variant carries what does not go together, numbers where there are any; its message adds
//! the nearest values that would. The rules are those Megatron-Core checks when it builds process
//! groups and validates arguments (`megatron/core/parallel_state.py`,
//! `megatron/core/transformer/transformer_config.py`, `megatron/training/arguments.py`, main of
//! August 2026), and what a stack can run. Refusing a layout is a result, not an error of the
//! program.
//!
//! Rules of Megatron-Core that are no variant:
//!
//! - *Kept by construction.* Sequence parallelism is on exactly where TP is, so neither experts nor
//!   TP overlap lack it; experts and context never share a grid; weights are gathered by the
//!   distributed optimizer, which is always on; experts always run as a grouped product; p2p overlap
//!   is off without virtual stages; a model has grouped queries or latent attention, never both. EP
//!   may exceed DP.
//! - *Of the model alone* (top-1 routing needs softmax before top-k, an expert bias needs sigmoid or
//!   sqrt-softplus scores): every model that is read is priced.
//! - *Of features this release does not price*, which no option asks for: budgets of a rank's rows and paged
//!   stash, overlap of the exchange of tokens with attention.
//! - *Of versions of software* (Transformer Engine 2.6 for recomputed norms in FP8): a stack is taken
//!   to be new enough.
//! - *Disputed upstream*: whether MTP goes with CP.

use super::nearest::{Nearest, divisors, multiples, product};
use super::{Order, PartialDegrees};
use crate::choice::{
    CpComm, Dispatcher, Graphs, Module, Offload, OffloadModule, Optimizer, ScheduleName, StackName,
    Zero,
};
use moefold_profiles::Precision;

/// The most ranks a job may have: far above any machine, and small enough that listing them all is
/// harmless.
pub const MAX_GPUS: u32 = 1 << 20;

/// The most forward passes a step may have, of all its microbatches through all its stages: about as many as 15,360
/// microbatches make of 64 stages, whose simulation takes half a gibibyte.
pub const MAX_PASSES: u32 = 1 << 20;

/// The most rows of a tensor: kernels count them in 32 bits, and as many of any model are terabytes.
pub const MAX_ROWS: u32 = i32::MAX as u32;

/// A rule that some degrees or choices break, with both numbers and the nearest legal values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(
    missing_docs,
    reason = "the fields are the quantities their variant's sentence names"
)]
pub enum Illegal {
    /// A degree or size of zero.
    #[error("{key} is 0, and must be at least 1")]
    Zero { key: &'static str },
    /// More work in a step than anyone has.
    #[error("{key} is {found}; at most {most} is planned")]
    Huge {
        /// Which quantity.
        key: &'static str,
        /// How much of it.
        found: u128,
        /// What would do.
        most: u64,
    },
    /// More rows than an op counts.
    #[error(
        "a microbatch has up to {rows} rows {what} on a rank; at most {MAX_ROWS} are planned; a smaller mbs or ep, or a larger cp or tp has fewer"
    )]
    Rows {
        /// Which.
        what: &'static str,
        /// How many.
        rows: u128,
    },
    /// More ranks than this program lists.
    #[error("{gpus} GPUs are more than the {MAX_GPUS} this program plans for")]
    TooManyGpus { gpus: u32 },
    /// The attention grid does not tile the ranks.
    #[error("{gpus} GPUs are not divisible by tp x cp x pp = {tp} x {cp} x {pp} = {}; nearest: {} GPUs, or a product of {}",
        product(&[*tp, *cp, *pp]), multiples(*gpus, product(&[*tp, *cp, *pp])), divisors((*gpus).into(), product(&[*tp, *cp, *pp])))]
    AttentionGrid {
        gpus: u32,
        tp: u32,
        cp: u32,
        pp: u32,
    },
    /// The expert grid does not tile the ranks.
    #[error("{gpus} GPUs are not divisible by etp x ep x pp = {etp} x {ep} x {pp} = {}; nearest: {} GPUs, or a product of {}",
        product(&[*etp, *ep, *pp]), multiples(*gpus, product(&[*etp, *ep, *pp])), divisors((*gpus).into(), product(&[*etp, *ep, *pp])))]
    ExpertGrid {
        gpus: u32,
        etp: u32,
        ep: u32,
        pp: u32,
    },
    /// The pipeline groups of the two grids differ under an order that does not put pp last.
    #[error(
        "with pp before dp in the rank order, pp = {pp} needs edp = dp, and here edp = {edp} and dp = {dp}; nearest: pp = 1, ep x etp = tp x cp, or the order tp-cp-ep-dp-pp"
    )]
    PipelineGroups { pp: u32, dp: u32, edp: u32 },
    /// A data-parallel degree was given that the others contradict.
    #[error(
        "{key} = {given} was asked for, but the other degrees give {key} = {found}; nearest: leave {key} out, or {key}={found}"
    )]
    Replicas {
        key: &'static str,
        given: u32,
        found: u32,
    },
    /// Experts cannot be spread evenly over EP.
    #[error("{experts} experts are not divisible by ep = {ep}; nearest: ep = {}", divisors(*experts, (*ep).into()))]
    Experts { experts: u64, ep: u32 },
    /// An expert's width cannot be split by ETP.
    #[error("expert width {width} is not divisible by etp = {etp}; nearest: etp = {}", divisors(*width, (*etp).into()))]
    ExpertWidth { width: u64, etp: u32 },
    /// Expert parallelism on a model without experts.
    #[error("the model has no experts, so {key} = {degree} splits nothing; nearest: {key} = 1")]
    NoExperts { key: &'static str, degree: u32 },
    /// Attention (or state) heads cannot be split by TP.
    #[error("{heads} heads are not divisible by tp = {tp}; nearest: tp = {}", divisors(*heads, (*tp).into()))]
    Heads { heads: u64, tp: u32 },
    /// Key/value heads can neither be split nor replicated evenly.
    #[error("{kv_heads} key/value heads are neither a multiple nor a divisor of tp = {tp}; nearest: tp = {}",
        Nearest::around((*tp).into(), |tp| tp % kv_heads == 0 || kv_heads % tp == 0))]
    KvHeads { kv_heads: u64, tp: u32 },
    /// The residual width cannot be split by TP.
    #[error("hidden size {hidden} is not divisible by tp = {tp}; nearest: tp = {}", divisors(*hidden, (*tp).into()))]
    Hidden { hidden: u64, tp: u32 },
    /// A dense MLP cannot be split by TP.
    #[error("dense MLP width {width} is not divisible by tp = {tp}; nearest: tp = {}", divisors(*width, (*tp).into()))]
    DenseWidth { width: u64, tp: u32 },
    /// The shared expert cannot be split by TP.
    #[error("shared expert width {width} is not divisible by tp = {tp}; nearest: tp = {}", divisors(*width, (*tp).into()))]
    SharedWidth { width: u64, tp: u32 },
    /// The sequence cannot be cut into the 2 CP chunks of the causal zig-zag.
    #[error("sequence length {seq_len} is not divisible by 2 x cp = {}; nearest: cp = {}, or a sequence length of {}",
        2 * u64::from(*cp), Nearest::around((*cp).into(), |cp| cp == 1 || seq_len % (2 * cp) == 0), multiples(*seq_len, 2 * u64::from(*cp)))]
    SequenceOverCp { seq_len: u64, cp: u32 },
    /// Sequence parallelism cannot cut a context-parallel shard.
    #[error("sequence length {seq_len} over cp = {cp} is not divisible by tp = {tp}, which sequence parallelism needs; nearest: tp = {}, or a sequence length of {}",
        divisors(seq_len / u64::from(*cp), (*tp).into()), multiples(*seq_len, sequence_unit(*cp, *tp)))]
    SequenceOverTp { seq_len: u64, cp: u32, tp: u32 },
    /// The batch cannot be dealt to the replicas in whole microbatches.
    #[error("global batch {global_batch} is not divisible by mbs x dp = {mbs} x {dp} = {}; nearest: a global batch of {}, or mbs x dp = {}",
        product(&[*mbs, *dp]), multiples(*global_batch, product(&[*mbs, *dp])), divisors(*global_batch, product(&[*mbs, *dp])))]
    GlobalBatch {
        global_batch: u64,
        mbs: u32,
        dp: u32,
    },
    /// More passes than this program schedules.
    #[error(
        "a step of {microbatches} microbatches through {stages} stages is more than the {MAX_PASSES} passes this program schedules; nearest: a smaller global batch, or a larger mbs or dp"
    )]
    Microbatches { microbatches: u64, stages: u64 },
    /// Virtual stages without a pipeline.
    #[error("vpp = {vpp} needs a pipeline, and pp = 1; nearest: vpp = 1, or pp = 2")]
    InterleavedAlone { vpp: u32 },
    /// The interleaved schedule works in groups of PP microbatches.
    #[error("vpp = {vpp} interleaves groups of pp = {pp} microbatches, and a step has {microbatches}; nearest: {} microbatches, or vpp = 1",
        multiples(*microbatches, (*pp).into()))]
    InterleavedGroups {
        vpp: u32,
        microbatches: u32,
        pp: u32,
    },
    /// More stages than layers and the ends of the model.
    #[error("{layers} layers, the embedding and the head cannot fill pp x vpp = {pp} x {vpp} = {} stages; nearest: pp x vpp = {} or less, or `pipeline_layout`, which may leave stages empty",
        product(&[*pp, *vpp]), layers.saturating_add(2))]
    EmptyStages { layers: u64, pp: u32, vpp: u32 },
    /// Two interleaved ranks exchange messages only while they compute.
    #[error(
        "vpp = {vpp} over pp = 2 needs p2p overlap (Megatron-Core), which `overlap` leaves out; nearest: vpp = 1, pp = 3 or more, or p2p in `overlap`"
    )]
    InterleavedPair { vpp: u32 },
    /// A schedule of other pipeline degrees.
    #[error("`schedule` {} is of {}, and pp = {pp} and vpp = {vpp}; nearest: those degrees, or `schedule` auto", schedule.name(), schedule.degrees())]
    Schedule {
        schedule: ScheduleName,
        pp: u32,
        vpp: u32,
    },
    /// Given stages are not as many as the degrees make.
    #[error("the stages of the pipeline layout are {given}, and pp x vpp = {pp} x {vpp} = {}; nearest: {}",
        product(&[*pp, *vpp]), degrees_of_stages(*given, *pp))]
    StageCount { given: u64, pp: u32, vpp: u32 },
    /// Given stages hold other layers than the model has.
    #[error(
        "the pipeline layout places {given} decoder layers (t), and the model has {layers}; nearest: {layers} t"
    )]
    StageLayers { given: u64, layers: u64 },
    /// Given stages hold other multi-token-prediction depths than the model has.
    #[error(
        "the pipeline layout places {given} MTP depths (m), and the model has {depths}; nearest: {}", if *depths == 0 { "no m".to_owned() } else { format!("{depths} m, or none, and they stand with the head") }
    )]
    StageDepths { given: u64, depths: u64 },
    /// Sequences whose attention the stack cannot cut.
    #[error(
        "the moefold stack cuts no sequences under sliding windows while keys travel, as cp = {cp} with `cp_comm_type` {} would; nearest: `cp_comm_type` a2a, or cp = 1",
        cp_comm.name()
    )]
    UncutAttention { cp_comm: CpComm, cp: u32 },
    /// Context parallelism that exchanges heads against tokens cannot cut the heads of a tensor-parallel rank.
    #[error("{heads} heads are not divisible by tp x cp = {tp} x {cp} = {}, which `cp_comm_type` a2a needs; nearest: cp = {}, or `cp_comm_type` p2p",
        product(&[*tp, *cp]), divisors(heads / u64::from(*tp).max(1), (*cp).into()))]
    HeadsOverCp { heads: u64, tp: u32, cp: u32 },
    /// A precision the stack does not run.
    #[error("the {} stack does not run `precision` {precision}; it runs {}",
        stack.name(), names(known, Precision::name))]
    StackPrecision {
        stack: StackName,
        precision: Precision,
        known: &'static [Precision],
    },
    /// A dispatcher the stack has not.
    #[error("the {} stack has no `dispatcher` {}; it has {}", stack.name(), dispatcher.name(),
        names(known, Dispatcher::name))]
    StackDispatcher {
        stack: StackName,
        dispatcher: Dispatcher,
        known: &'static [Dispatcher],
    },
    /// A schedule the stack has not.
    #[error("the {} stack has no `schedule` {}; it has none, 1f1b, interleaved; nearest: {}, or `stack` moefold", stack.name(), schedule.name(), undivided(*schedule).name())]
    StackSchedule {
        stack: StackName,
        schedule: ScheduleName,
    },
    /// A schedule that leaves gradients of weights for later, beside what hides under them.
    #[error("`schedule` {} divides backward passes, in which {with} has no price; nearest: {}, or a plan without {with}", schedule.name(), undivided(*schedule).name())]
    DividedBackward {
        schedule: ScheduleName,
        with: &'static str,
    },
    /// A factor that is no share of tokens.
    #[error("`expert_capacity_factor` {factor} is not above 0; nearest: 1")]
    CapacityFactor { factor: String },
    /// A capacity of experts that the model has not.
    #[error("the model has no experts, so `expert_capacity_factor` drops nothing; nearest: none")]
    CapacityAlone,
    /// A dispatcher under which the stack does not pad.
    #[error("the {} stack does not `pad_expert_input_to_capacity` under `dispatcher` {}; nearest: `dispatcher` alltoall",
        stack.name(), dispatcher.name())]
    PaddedDispatcher {
        stack: StackName,
        dispatcher: Dispatcher,
    },
    /// Recomputation of modules the model lacks.
    #[error(
        "no layer of the model has {} to recompute; nearest: modules it has, {}",
        names(absent, Module::name),
        names(present, Module::name)
    )]
    AbsentModules {
        absent: Vec<Module>,
        present: Vec<Module>,
    },
    /// Recomputation by layer in a stack whose layers are alike but for the first of each stage.
    #[error(
        "the {} stack computes the same again in every layer, or all of the first layers of each stage; nearest: one set for all in `recompute`, block-1, or `stack` moefold", stack.name()
    )]
    StackRecompute { stack: StackName },
    /// Recomputation by stage in a stack that does it by layer.
    #[error(
        "the {} stack takes layers by their numbers, and `recompute` block-{layers} counts those of each stage; nearest: numbers, as in `recompute` 0,4=full, or `stack` megatron", stack.name()
    )]
    StackBlock { stack: StackName, layers: u32 },
    /// Recomputation of layers that the model has not.
    #[error("`recompute` names layer {}, and the model has layers 0 to {}", named - 1, layers - 1)]
    RecomputeLayers { named: u64, layers: u64 },
    /// Recomputation of more layers of a stage than the model has.
    #[error(
        "`recompute` block-{named} is of {named} layers of each stage, and the model has {layers}; nearest: `recompute` full"
    )]
    RecomputeBlock { named: u64, layers: u64 },
    /// Gradients that rest divided and are not reduced beside compute.
    #[error(
        "`zero` {} needs {needs} in `overlap`, {}; nearest: `overlap` {needs}, or `zero` 1",
        zero.name(),
        if *zero == Zero::Fsdp2 { "as PyTorch's FSDP2 always has" } else { "which Megatron-LM turns on" }
    )]
    DividedAtOnce { zero: Zero, needs: &'static str },
    /// Offloading of the input of attention's projection without that of the core.
    #[error(
        "attn_proj in `offload` needs core_attn beside it (Megatron-Core); nearest: `offload` core_attn,attn_proj"
    )]
    OffloadAlone,
    /// Offloading of modules that keep nothing in the model.
    #[error(
        "no layer of the model has {} to offload; nearest: modules it has, {}",
        names(absent, OffloadModule::name),
        names(present, OffloadModule::name)
    )]
    AbsentOffload {
        absent: Vec<OffloadModule>,
        present: Vec<OffloadModule>,
    },
    /// Offloading of nothing but what is computed again.
    #[error(
        "`recompute` {recompute} computes all again that `offload` {offload} would move; nearest: `offload` none, or less in `recompute`"
    )]
    RecomputedOffload { recompute: String, offload: Offload },
    /// Offloading beside recomputation of the first layers of stages.
    #[error(
        "`offload` {offload} beside `recompute` block-{layers} would move other tensors of each layer, which is not priced; nearest: `offload` none, or modules in `recompute`"
    )]
    BlockOffload { layers: u32, offload: Offload },
    /// Recomputing the experts' activation and delayed scaling of FP8 exclude each other.
    #[error(
        "moe_act cannot be recomputed under `precision` fp8-delayed (Megatron-Core); nearest: `precision` fp8, or `recompute` without moe_act"
    )]
    DelayedScaling,
    /// Weights are gathered bucket by bucket as gradients were reduced.
    #[error(
        "param-gather in `overlap` needs grad-reduce beside it (Megatron-Core); nearest: `overlap` grad-reduce,param-gather"
    )]
    GatherAlone,
    /// Nothing can run beside the dispatch of tokens.
    #[error(
        "shared-expert in `overlap` has no shared expert to run beside the exchange of tokens: the model has none; nearest: `overlap` without it"
    )]
    NoSharedExpert,
    /// A dispatcher that nothing runs beside.
    #[error(
        "shared-expert in `overlap` goes with dispatchers that send tokens, not with {} (Megatron-Core); nearest: `dispatcher` alltoall",
        dispatcher.name()
    )]
    SharedDispatcher { dispatcher: Dispatcher },
    /// What ran beside the dispatch cannot run again alone.
    #[error(
        "shared_experts cannot be recomputed with shared-expert in `overlap` (Megatron-Core); nearest: `recompute` without shared_experts"
    )]
    SharedAgain,
    /// What two passes that run as one do not go with.
    #[error(
        "expert-alltoall in `overlap` runs passes of two microbatches as one and does not go with {with}; nearest: {nearest}"
    )]
    Combined {
        with: &'static str,
        nearest: &'static str,
    },
    /// Passes run as one to hide what nobody asked to hide.
    #[error(
        "`schedule` {} hides the exchange of tokens, which `overlap` leaves out; nearest: expert-alltoall in `overlap`, or `schedule` {}",
        schedule.name(),
        schedule.apart().map_or("auto", ScheduleName::name)
    )]
    CombinedSchedule { schedule: ScheduleName },
    /// What CUDA graphs do not go with.
    #[error("`cuda_graph` {graphs} does not go with {with}; nearest: {nearest}")]
    Graphs {
        graphs: Graphs,
        with: &'static str,
        nearest: &'static str,
    },
    /// Attention in FP8 without its recipe or kernels.
    #[error("`fp8_attention` does not go with {with}; nearest: {nearest}")]
    Fp8Attention { with: String, nearest: &'static str },
    /// No rank sends tokens to another.
    #[error(
        "expert-alltoall in `overlap` hides the exchange of tokens, and ep = 1 has none; nearest: ep = 2, or `overlap` without it"
    )]
    CombinedAlone,
    /// Megatron-Core combines passes of interleaved stages alone.
    #[error(
        "expert-alltoall in `overlap` over pp = {pp} needs virtual stages (Megatron-Core), and vpp = 1; nearest: vpp = 2, pp = 1, or `stack` moefold"
    )]
    CombinedStages { pp: u32 },
    /// Nothing that gradients of weights could wait for.
    #[error(
        "delay-wgrad in `overlap` needs expert-alltoall beside it (Megatron-Core); nearest: `overlap` expert-alltoall,delay-wgrad"
    )]
    DelayedAlone,
    /// Tensor-parallel collectives beside products, which this project's executor does not run so.
    #[error("tp in `overlap` needs `stack` megatron; nearest: `overlap` without tp")]
    TensorBeside,
    /// Full sharding in buckets of so many elements.
    #[error(
        "`ddp_bucket_size` {size} (`bucket_elements` of a plan) divides nothing: under `zero` fsdp every layer is a bucket; nearest: without it, or `zero` 1"
    )]
    ShardedBuckets { size: u64 },
    /// Full sharding of pipeline stages.
    #[error(
        "`zero` {} gathers layers in every microbatch and goes without a pipeline, and pp is {pp}; nearest: pp = 1, or `zero` 1",
        zero.name()
    )]
    ShardedStages { zero: Zero, pp: u32 },
    /// Divided gradients of pipeline stages.
    #[error(
        "`zero` 2 reduces gradients in every microbatch and is priced without a pipeline, and pp is {pp}; nearest: pp = 1, or `zero` 1"
    )]
    ReducedStages { pp: u32 },
    /// A stack that divides states alone, or weights and gradients too, over all replicas.
    #[error(
        "`zero` {}: stack moefold divides gradients where it divides weights, over all replicas; nearest: `zero` 1, `zero` fsdp, or `stack` megatron",
        zero.name()
    )]
    StackZero { zero: Zero },
    /// Two levels of replicas of which one has one.
    #[error(
        "`zero` hfsdp divides masters and moments over instances further, and `num_distributed_optimizer_instances` is 1; nearest: 2, or `zero` fsdp"
    )]
    HybridAlone,
    /// What PyTorch's FSDP2 is not for in Megatron-LM.
    #[error(
        "`zero` fsdp2 does not go with {with} (Megatron-LM's --use-torch-fsdp2); nearest: {nearest}, or `zero` fsdp"
    )]
    Fsdp2 { with: String, nearest: String },
    /// Experts that have other replicas than what is dense.
    #[error(
        "`zero` fsdp2 divides all parameters over the same replicas, and etp = {etp} where tp = {tp}; nearest: etp = {tp}, or `zero` fsdp"
    )]
    Fsdp2Experts { tp: u32, etp: u32 },
    /// Weights whose transposed copies stay.
    #[error(
        "`zero` hfsdp does not go with `primary_weights` fp8 under `precision` {precision}, whose transposed copies Megatron-FSDP does not divide over instances; nearest: `primary_weights` wide, or `zero` fsdp"
    )]
    HybridWeights { precision: Precision },
    /// A stack without a hierarchy of context-parallel ranks.
    #[error(
        "`cp_comm_type` a2a+p2p: stack moefold exchanges heads among all context-parallel ranks or has all in one ring; nearest: `cp_comm_type` a2a or p2p, or `stack` megatron"
    )]
    StackHierarchy,
    /// Levels that are not those of the degree.
    #[error(
        "`hierarchical_context_parallel_sizes` {} {} are {} context-parallel ranks, and cp is {cp}; nearest: cp = {}",
        sizes[0], sizes[1], u64::from(sizes[0]) * u64::from(sizes[1]), u64::from(sizes[0]) * u64::from(sizes[1])
    )]
    HierarchySizes { sizes: [u32; 2], cp: u32 },
    /// Levels of a group that has none.
    #[error(
        "`hierarchical_context_parallel_sizes` goes with `cp_comm_type` a2a+p2p, and there is {}; nearest: that, or without it",
        cp_comm.name()
    )]
    HierarchyAlone { cp_comm: CpComm },
    /// Heads that do not divide among neighbours.
    #[error(
        "{heads} heads are not divisible by tp times the first of `hierarchical_context_parallel_sizes` = {tp} x {inside}, over which they are exchanged; nearest: without the sizes, which takes as many as divide"
    )]
    HeadsOverLevel { heads: u64, tp: u32, inside: u32 },
    /// An order that no runtime numbers ranks in.
    #[error(
        "`rank_order` {order}: Megatron-LM numbers ranks in tp-cp-ep-dp-pp, or with --use-tp-pp-dp-mapping in tp-cp-ep-pp-dp; nearest: one of them"
    )]
    RankOrder { order: Order },
    /// Replicas that cannot be cut into as many parts.
    #[error(
        "`num_distributed_optimizer_instances` {instances} does not divide the {replicas} replicas of {what} (Megatron-Core cuts those of dense parameters, dp * cp, and of experts, edp, alike); nearest: {nearest}"
    )]
    Instances {
        instances: u32,
        replicas: u32,
        what: &'static str,
        nearest: u32,
    },
    /// A stack that divides over all replicas.
    #[error(
        "`num_distributed_optimizer_instances` {instances}: stack moefold divides over all replicas; nearest: 1, or `stack` megatron"
    )]
    StackInstances { instances: u32 },
    /// A share that is none.
    #[error(
        "`optimizer_offload_fraction` {share} is no share of the optimizer's state; nearest: 0, where all rests on the device, to 1"
    )]
    HostShare { share: String },
    /// Nothing remains of f32 masters beside f32 weights.
    #[error(
        "`masters` remainder keeps what bf16 weights lack of f32 masters, and in `precision` fp32 weights lack nothing; nearest: `masters` fp32, or `precision` bf16"
    )]
    WholeMasters,
    /// An optimizer that a stack has not.
    #[error(
        "`optimizer` {}: stack moefold updates all parameters with Adam; nearest: `optimizer` adam, or `stack` megatron",
        optimizer.name()
    )]
    StackOptimizer { optimizer: Optimizer },
    /// What Megatron-Core's layer-wise optimizer, which divides whole matrices, does not go with.
    #[error("`optimizer` muon does not go with {with}; nearest: {nearest}, or `optimizer` adam")]
    Muon {
        with: &'static str,
        nearest: &'static str,
    },
    /// Gradients of a type that a stack does not accumulate in.
    #[error(
        "`grad_dtype` bf16: stack moefold accumulates gradients in fp32; nearest: `grad_dtype` fp32, or `stack` megatron"
    )]
    StackGradients,
    /// Weights in FP8 where nothing multiplies in it.
    #[error(
        "`primary_weights` fp8 needs a `precision` that multiplies in FP8, not {precision}; nearest: `primary_weights` wide, or `precision` fp8, fp8-delayed, fp8-blockwise or mxfp8"
    )]
    PrimaryWeights { precision: Precision },
    /// Masters as remainders of weights that are no bf16.
    #[error(
        "`masters` remainder keeps what bf16 weights lack of f32 masters, and `primary_weights` fp8 keeps no bf16 weights; nearest: `masters` fp32, or `primary_weights` wide"
    )]
    RemainderOfFp8,
    /// Nothing is divided into buckets.
    #[error(
        "`ddp_bucket_size` {size} (`bucket_elements` of a plan) divides nothing: stack {stack} {why}; nearest: {nearest}",
        stack = stack.name(),
        why = match stack { StackName::Megatron => "is priced with its own buckets", StackName::Moefold => "reduces and gathers each family at once" },
        nearest = match stack { StackName::Megatron => "without it", StackName::Moefold => "`overlap` grad-reduce,param-gather beside it" }
    )]
    BucketsAlone { size: u64, stack: StackName },
    /// A bucket without elements.
    #[error(
        "`ddp_bucket_size` 0 (`bucket_elements` of a plan), and a bucket has at least one parameter; nearest: 1"
    )]
    EmptyBuckets,
}

impl Illegal {
    /// A short stable key, for counting refusals.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Zero { .. } => "zero",
            Self::Huge { .. } => "huge",
            Self::Rows { .. } => "rows",
            Self::TooManyGpus { .. } => "too_many_gpus",
            Self::AttentionGrid { .. } => "attention_grid",
            Self::ExpertGrid { .. } => "expert_grid",
            Self::PipelineGroups { .. } => "pipeline_groups",
            Self::Replicas { .. } => "replicas",
            Self::Experts { .. } => "experts_over_ep",
            Self::ExpertWidth { .. } => "expert_width_over_etp",
            Self::NoExperts { .. } => "no_experts",
            Self::Heads { .. } => "heads_over_tp",
            Self::KvHeads { .. } => "kv_heads_over_tp",
            Self::Hidden { .. } => "hidden_over_tp",
            Self::DenseWidth { .. } => "dense_width_over_tp",
            Self::SharedWidth { .. } => "shared_width_over_tp",
            Self::SequenceOverCp { .. } => "sequence_over_cp",
            Self::SequenceOverTp { .. } => "sequence_over_tp",
            Self::GlobalBatch { .. } => "global_batch",
            Self::Microbatches { .. } => "microbatches",
            Self::InterleavedAlone { .. } => "vpp_without_pp",
            Self::InterleavedGroups { .. } => "vpp_microbatches",
            Self::EmptyStages { .. } => "empty_stages",
            Self::InterleavedPair { .. } => "vpp_pair_without_p2p",
            Self::Schedule { .. } => "schedule",
            Self::StageCount { .. } => "pipeline_layout",
            Self::StageLayers { .. } => "pipeline_layout_layers",
            Self::StageDepths { .. } => "pipeline_layout_depths",
            Self::UncutAttention { .. } => "stack_cp",
            Self::HeadsOverCp { .. } => "heads_over_cp",
            Self::StackPrecision { .. } => "stack_precision",
            Self::StackDispatcher { .. } => "stack_dispatcher",
            Self::StackSchedule { .. } => "stack_schedule",
            Self::DividedBackward { .. } => "divided_backward",
            Self::CapacityFactor { .. } => "capacity_factor",
            Self::CapacityAlone => "capacity_without_experts",
            Self::PaddedDispatcher { .. } => "padded_dispatcher",
            Self::AbsentModules { .. } => "recompute_absent",
            Self::StackRecompute { .. } => "stack_recompute",
            Self::StackBlock { .. } => "stack_block",
            Self::RecomputeLayers { .. } | Self::RecomputeBlock { .. } => "recompute_layers",
            Self::DividedAtOnce { .. } => "zero_at_once",
            Self::OffloadAlone => "offload_alone",
            Self::AbsentOffload { .. } => "offload_absent",
            Self::RecomputedOffload { .. } => "offload_recomputed",
            Self::BlockOffload { .. } => "offload_block",
            Self::DelayedScaling => "moe_act_under_delayed_fp8",
            Self::GatherAlone => "param_gather_alone",
            Self::NoSharedExpert => "no_shared_expert",
            Self::SharedDispatcher { .. } => "shared_expert_dispatcher",
            Self::SharedAgain => "shared_expert_recomputed",
            Self::Combined { .. } => "expert_alltoall",
            Self::CombinedSchedule { .. } => "combined_without_overlap",
            Self::Graphs { .. } => "cuda_graph",
            Self::Fp8Attention { .. } => "fp8_attention",
            Self::CombinedAlone => "expert_alltoall_without_ep",
            Self::CombinedStages { .. } => "expert_alltoall_without_vpp",
            Self::DelayedAlone => "delay_wgrad_alone",
            Self::TensorBeside => "tp_beside",
            Self::ShardedBuckets { .. } => "fsdp_buckets",
            Self::ShardedStages { .. } => "fsdp_over_pp",
            Self::ReducedStages { .. } => "zero_2_over_pp",
            Self::StackZero { .. } => "stack_zero",
            Self::HybridAlone => "hfsdp_alone",
            Self::Fsdp2 { .. } => "fsdp2",
            Self::Fsdp2Experts { .. } => "fsdp2_experts",
            Self::HybridWeights { .. } => "hfsdp_weights",
            Self::StackHierarchy => "stack_cp_hierarchy",
            Self::HierarchySizes { .. } => "cp_hierarchy_sizes",
            Self::HierarchyAlone { .. } => "cp_hierarchy_alone",
            Self::HeadsOverLevel { .. } => "heads_over_cp_level",
            Self::RankOrder { .. } => "rank_order",
            Self::Instances { .. } => "optimizer_instances",
            Self::StackInstances { .. } => "stack_optimizer_instances",
            Self::BucketsAlone { .. } => "buckets_without_overlap",
            Self::EmptyBuckets => "empty_buckets",
            Self::WholeMasters => "whole_masters",
            Self::StackGradients => "stack_gradients",
            Self::StackOptimizer { .. } => "stack_optimizer",
            Self::Muon { .. } => "muon",
            Self::PrimaryWeights { .. } => "primary_weights",
            Self::RemainderOfFp8 => "remainder_of_fp8",
            Self::HostShare { .. } => "host_share",
        }
    }

    /// Whether a rule that these pins break with 1 for every open degree stays broken whatever the
    /// open ones are. Larger degrees divide less, so most rules do; the others speak of degrees that
    /// were open.
    pub(crate) fn stays_broken(&self, pins: &PartialDegrees) -> bool {
        match self {
            // A larger microbatch divides no better, but fewer replicas may.
            Self::GlobalBatch {
                global_batch, mbs, ..
            } => pins.fixes_dp() || !global_batch.is_multiple_of((*mbs).into()),
            Self::InterleavedGroups { .. } => pins.fixes_dp(),
            Self::Microbatches { .. } => pins.fixes_dp() && pins.mbs.is_some(),
            Self::InterleavedAlone { .. } => pins.pp.is_some(),
            Self::Rows { .. } => pins.cp.is_some() && pins.tp.is_some(),
            Self::CombinedAlone => pins.ep.is_some(),
            Self::Fsdp2Experts { .. } => pins.tp.is_some() && pins.etp.is_some(),
            Self::PipelineGroups { .. } => {
                let all = [pins.tp, pins.cp, pins.ep, pins.etp];
                all.iter().all(Option::is_some)
            }
            Self::CombinedStages { .. } => pins.pp.is_some() && pins.vpp.is_some(),
            // Open degrees are 1 here, and may be more.
            Self::Schedule { schedule, pp, vpp } => {
                let most = |pin: Option<u32>, degree: u32| pin.unwrap_or(degree.max(2));
                let open = [
                    (*pp, *vpp),
                    (*pp, most(pins.vpp, *vpp)),
                    (most(pins.pp, *pp), *vpp),
                ];
                let both = (most(pins.pp, *pp), most(pins.vpp, *vpp));
                !open
                    .iter()
                    .chain([&both])
                    .any(|&(pp, vpp)| schedule.goes_with(pp, vpp))
            }
            Self::StageCount { given, pp, vpp } => {
                let both = pins.pp.and(pins.vpp).is_some();
                both || !given.is_multiple_of(product(&[*pp, *vpp]))
            }
            _ => true,
        }
    }
}

fn names<T: Copy>(list: &[T], name: fn(T) -> &'static str) -> String {
    let names: Vec<&str> = list.iter().map(|&item| name(item)).collect();
    names.join(", ")
}

/// The schedule of the same degrees that runs backward passes whole.
fn undivided(schedule: ScheduleName) -> ScheduleName {
    if schedule.is_vee() {
        ScheduleName::Interleaved
    } else {
        ScheduleName::OneFOneB
    }
}

/// Degrees that make as many stages as were given: the nearest pp that divides them, and its vpp.
fn degrees_of_stages(given: u64, pp: u32) -> String {
    let pp = u64::from(pp);
    if pp != 0 && given.is_multiple_of(pp) {
        return format!("pp = {pp} and vpp = {}", given / pp);
    }
    let near = divisors(given, pp);
    let with = |pp: u64| format!("pp = {pp} and vpp = {}", given / pp);
    let words: Vec<String> = [near.below, near.above]
        .into_iter()
        .flatten()
        .map(with)
        .collect();
    words.join(", or ")
}

/// What a sequence must be a multiple of to be cut by the zig-zag of CP and then by TP.
fn sequence_unit(cp: u32, tp: u32) -> u64 {
    let halves = if cp > 1 && !tp.is_multiple_of(2) {
        2
    } else {
        1
    };
    product(&[halves, cp, tp])
}
