//! [`Choices`]: what the options of a job besides its degrees demand, of the degrees and of one
//! another.
//!
//! Gathered once from [`SearchOptions`], as [`super::Rules`] gathers the sizes of a model. Choices
//! that break a rule among themselves are refused with every tuple of degrees.

use super::graphs;
use super::keys::KeyWays;
use crate::choice::{
    CpComm, Dispatcher, Masters, Module, Offload, OffloadModule, Optimizer, Overlap,
    PrimaryWeights, Recompute, RecomputePlan, ScheduleName, StackName, Zero,
};
use crate::layout::{Degrees, Illegal, Order};
use crate::model::{Layer, Model};
use crate::options::{PipelineLayout, SearchOptions};
use crate::stack::{ByLayer, Stack};
use moefold_profiles::{Dtype, Precision};

/// See the module's documentation. The default demands nothing.
#[derive(Debug, Clone, Default)]
pub(super) struct Choices {
    /// How keys may travel.
    pub(super) keys: KeyWays,
    /// Stages that were given.
    stages: Option<u64>,
    /// The schedule that was given.
    schedule: Option<ScheduleName>,
    /// Whether interleaved ranks must exchange messages while they compute nothing.
    without_p2p: bool,
    /// What replicas divide.
    zero: Zero,
    /// Whether the model has experts.
    has_experts: bool,
    /// Parts that replicas are cut into.
    instances: u32,
    /// How ranks are numbered.
    pub(super) order: Order,
    /// The stack, where forward and backward passes of two microbatches run as one.
    combines: Option<StackName>,
    /// Rules that the choices break among themselves.
    pub(super) broken: Vec<Illegal>,
}

impl Choices {
    pub(super) fn of(model: &Model, options: &SearchOptions) -> Self {
        let stack = Stack::of(options.stack);
        let stages = options.stages.as_ref();
        Self {
            keys: KeyWays::of(model, options),
            stages: stages.map(|given| given.stages().len() as u64),
            schedule: options.schedule,
            without_p2p: stack.pairs_need_overlap()
                && !options.overlap.unwrap_or(stack.common().overlap).p2p,
            zero: options.zero,
            has_experts: model.num_moe_layers() > 0,
            instances: options.instances,
            order: options.order.unwrap_or_default(),
            combines: (options.overlap.unwrap_or_default().expert_alltoall)
                .then_some(options.stack),
            broken: broken(model, options, &stack),
        }
    }

    /// Has a schedule given, and the layers of so many stages.
    pub(super) fn give_stages(&mut self, schedule: ScheduleName, stages: usize) {
        self.schedule = Some(schedule);
        self.stages = Some(stages as u64);
    }

    /// The schedule that was given.
    pub(super) fn schedule(&self) -> Option<ScheduleName> {
        self.schedule
    }

    /// Whether each stage's layers were given.
    pub(super) fn gives_stages(&self) -> bool {
        self.stages.is_some()
    }

    /// Adds what some degrees break.
    pub(super) fn check(&self, d: &Degrees, broken: &mut Vec<Illegal>) {
        self.keys.check(d.tp, d.cp, broken);
        let (pp, vpp) = (d.pp, d.vpp);
        if self.without_p2p && pp == 2 && vpp > 1 {
            broken.push(Illegal::InterleavedPair { vpp });
        }
        if self.combines.is_some() && d.ep == 1 {
            broken.push(Illegal::CombinedAlone);
        }
        if self.combines == Some(StackName::Megatron) && pp > 1 && vpp == 1 {
            broken.push(Illegal::CombinedStages { pp });
        }
        match self.zero {
            Zero::Gradients if pp > 1 => broken.push(Illegal::ReducedStages { pp }),
            zero if zero.divides_weights() && pp > 1 => {
                broken.push(Illegal::ShardedStages { zero, pp });
            }
            Zero::States | Zero::Gradients | Zero::Fsdp | Zero::Hybrid | Zero::Fsdp2 => {}
        }
        if self.zero == Zero::Fsdp2 {
            if d.ep > 1 {
                let (with, nearest) = (format!("ep = {}", d.ep), "ep = 1".to_owned());
                broken.push(Illegal::Fsdp2 { with, nearest });
            }
            if self.has_experts && d.etp != d.tp {
                let (tp, etp) = (d.tp, d.etp);
                broken.push(Illegal::Fsdp2Experts { tp, etp });
            }
        }
        if self.instances > 1 {
            self.check_instances(d, broken);
        }
        if self.order != Order::default() {
            let [dp, edp] = [[d.tp, d.cp], [d.etp, d.ep]].map(|[a, b]| {
                let each = u64::from(a) * u64::from(b) * u64::from(pp);
                u64::from(d.gpus).checked_div(each).unwrap_or(0) as u32
            });
            if pp > 1 && dp != edp {
                broken.push(Illegal::PipelineGroups { pp, dp, edp });
            }
        }
        if let Some(given) = self.stages
            && given != u64::from(pp) * u64::from(vpp)
        {
            broken.push(Illegal::StageCount { given, pp, vpp });
        }
        let fits = |&schedule: &ScheduleName| schedule.goes_with(pp, vpp);
        if let Some(schedule) = self.schedule.filter(|schedule| !fits(schedule)) {
            broken.push(Illegal::Schedule { schedule, pp, vpp });
        }
        broken.extend(self.broken.iter().cloned());
    }
}

impl Choices {
    /// Whether the replicas of some degrees can be cut as is asked (Megatron-Core's `parallel_state.py`). Those of experts
    /// count where there are experts or not, as there.
    fn check_instances(&self, d: &Degrees, broken: &mut Vec<Illegal>) {
        let families = [
            ("dense parameters", [d.tp, d.pp, 1]),
            ("experts", [d.etp, d.ep, d.pp]),
        ];
        for (what, degrees) in families {
            let each = degrees.iter().map(|&degree| u64::from(degree)).product();
            let gpus = u64::from(d.gpus);
            if each == 0 || !gpus.is_multiple_of(each) {
                // Which is refused by itself.
                continue;
            }
            let replicas = (gpus / each) as u32;
            let divides = |parts: &u32| replicas.is_multiple_of(*parts);
            if !divides(&self.instances) {
                broken.push(Illegal::Instances {
                    instances: self.instances,
                    replicas,
                    what,
                    nearest: (1..=self.instances.min(replicas))
                        .rev()
                        .find(divides)
                        .unwrap_or(1),
                });
            }
        }
    }
}

/// The schedules that a stack has for some pipeline degrees, the usual one first.
pub(crate) fn schedules(stack: StackName, pp: u32, vpp: u32) -> Vec<ScheduleName> {
    Stack::of(stack).schedules(pp, vpp).collect()
}

/// What is chosen that has no price in a divided backward pass.
pub(crate) fn undivided(options: &SearchOptions) -> Option<&'static str> {
    let overlap = options.overlap.unwrap_or_default();
    overlap
        .shared_expert
        .then_some("shared-expert in `overlap`")
}

/// Every rule that choices break whatever the degrees are.
fn broken(model: &Model, options: &SearchOptions, stack: &Stack) -> Vec<Illegal> {
    let mut broken = Vec::new();
    let name = stack.name();
    let precision = options.precision;
    if !stack.common().precisions.contains(&precision) {
        broken.push(Illegal::StackPrecision {
            stack: name,
            precision,
            known: stack.common().precisions,
        });
    }
    let has_experts = model.num_moe_layers() > 0;
    if let Some(dispatcher) = options.dispatcher
        && has_experts
        && !stack.common().dispatchers.contains(&dispatcher)
    {
        broken.push(Illegal::StackDispatcher {
            stack: name,
            dispatcher,
            known: stack.common().dispatchers,
        });
    }
    if let Some(schedule) = options.schedule
        && schedule.divides_backward()
        && !stack.divides_backward()
    {
        broken.push(Illegal::StackSchedule {
            stack: name,
            schedule,
        });
    }
    if let Some(schedule) = options.schedule.filter(|one| one.divides_backward())
        && let Some(with) = undivided(options)
    {
        broken.push(Illegal::DividedBackward { schedule, with });
    }
    check_capacity(model, options, stack, &mut broken);
    if let Some(stages) = &options.stages {
        check_stages(stages, model, &mut broken);
    }
    if let Some(recompute) = &options.recompute {
        check_recompute(recompute, model, stack, &mut broken);
        let illegal = |set| clash(options, set);
        broken.extend(recompute.sets().into_iter().find_map(illegal));
    }
    if let Some(offload) = options.offload.filter(|offload| !offload.is_none()) {
        check_offload(offload, model, options, stack, &mut broken);
    }
    let overlap = options.overlap.unwrap_or_default();
    if overlap.shared_expert {
        if !model.layers.iter().any(shares_expert) {
            broken.push(Illegal::NoSharedExpert);
        }
        if let Some(dispatcher) = options.dispatcher.filter(|&one| !runs_beside(one)) {
            broken.push(Illegal::SharedDispatcher { dispatcher });
        }
    }
    check_combined(model, options, &mut broken);
    graphs::check(model, options, &mut broken);
    check_fp8_attention(options, &mut broken);
    if overlap.param_gather && !overlap.grad_reduce {
        broken.push(Illegal::GatherAlone);
    }
    check_states(options, &mut broken);
    if options.zero == Zero::Fsdp2 && name == StackName::Megatron {
        check_fsdp2(model, options, &mut broken);
    }
    let keys = KeyWays::of(model, options);
    if keys.tried() == [CpComm::Hierarchical] && name == StackName::Moefold {
        broken.push(Illegal::StackHierarchy);
    }
    if let Some(cp_comm) = options.cp_comm
        && options.cp_sizes.is_some()
        && cp_comm != CpComm::Hierarchical
    {
        broken.push(Illegal::HierarchyAlone { cp_comm });
    }
    if let Some(order) = options.order
        && ![Order::PP_LAST, Order::DP_LAST].contains(&order)
    {
        broken.push(Illegal::RankOrder { order });
    }
    if options.instances > 1 && name == StackName::Moefold {
        broken.push(Illegal::StackInstances {
            instances: options.instances,
        });
    }
    check_buckets(options, &mut broken);
    broken
}

/// What is wrong with a size of buckets.
fn check_buckets(options: &SearchOptions, broken: &mut Vec<Illegal>) {
    let name = options.stack;
    match options.bucket_elements {
        Some(0) => broken.push(Illegal::EmptyBuckets),
        Some(size) if options.zero.divides_weights() && name == StackName::Moefold => {
            broken.push(Illegal::ShardedBuckets { size });
        }
        // What nobody says runs beside compute on some devices.
        Some(size)
            if name == StackName::Megatron
                || options
                    .overlap
                    .is_some_and(|overlap| !overlap.of_replicas()) =>
        {
            broken.push(Illegal::BucketsAlone { size, stack: name });
        }
        _ => {}
    }
}

/// What is wrong with a limit on the rows of experts.
fn check_capacity(
    model: &Model,
    options: &SearchOptions,
    stack: &Stack,
    broken: &mut Vec<Illegal>,
) {
    let Some(capacity) = &options.capacity else {
        return;
    };
    let has_experts = model.num_moe_layers() > 0;
    let factor = capacity.factor;
    if !has_experts {
        broken.push(Illegal::CapacityAlone);
    }
    if !(factor.is_finite() && factor > 0.0) {
        broken.push(Illegal::CapacityFactor {
            factor: factor.to_string(),
        });
    }
    if let Some(dispatcher) = options.dispatcher
        && has_experts
        && capacity.pad
        && !stack.pads_under(dispatcher)
    {
        broken.push(Illegal::PaddedDispatcher {
            stack: stack.name(),
            dispatcher,
        });
    }
}

/// What combined passes do not go with, whatever the degrees are (Megatron-Core's `transformer_config.py`,
/// `overlap_moe_expert_parallel_comm` and `delay_wgrad_compute`).
fn check_combined(model: &Model, options: &SearchOptions, broken: &mut Vec<Illegal>) {
    let overlap = options.overlap.unwrap_or_default();
    if overlap.delay_wgrad && !overlap.expert_alltoall {
        broken.push(Illegal::DelayedAlone);
    }
    if overlap.tp && options.stack != StackName::Megatron {
        broken.push(Illegal::TensorBeside);
    }
    if !overlap.expert_alltoall {
        if let Some(schedule) = options.schedule.filter(|one| one.combines()) {
            broken.push(Illegal::CombinedSchedule { schedule });
        }
        return;
    }
    let mut refuse = |refused: bool, with: &'static str, nearest: &'static str| {
        if refused {
            broken.push(Illegal::Combined { with, nearest });
        }
    };
    let has_experts = model.num_moe_layers() > 0;
    refuse(
        !has_experts,
        "a model without experts",
        "`overlap` without it",
    );
    let sends = options.dispatcher.is_none_or(runs_beside);
    refuse(
        has_experts && !sends,
        "`dispatcher` allgather, which sends no tokens",
        "`dispatcher` alltoall",
    );
    refuse(
        overlap.shared_expert,
        "shared-expert, which hides the same exchanges",
        "`overlap` without shared-expert",
    );
    refuse(
        options.schedule.is_some_and(|named| !named.combines()),
        "another `schedule` than its own",
        "`schedule` combined, dualpipe-v-combined, or auto",
    );
    refuse(
        options.zero == Zero::Gradients,
        "`zero` 2, which reduces the gradients of each pass",
        "`zero` 1",
    );
    refuse(
        options.zero.divides_weights(),
        "`zero` fsdp, hfsdp or fsdp2, which gathers the layers of each pass",
        "`zero` 1",
    );
    let offloads = options.offload.is_some_and(|offload| !offload.is_none());
    refuse(
        offloads,
        "`offload`, whose copies are timed for passes that run alone",
        "`offload` none",
    );
    let megatron = options.stack == StackName::Megatron;
    refuse(
        megatron && model.mtp.len() > 1,
        "several depths of multi-token prediction (Megatron-Core)",
        "one depth, or `stack` moefold",
    );
}

/// What attention in FP8 does not go with: it needs an FP8 recipe (Megatron-Core's `fp8_dot_product_attention`).
fn check_fp8_attention(options: &SearchOptions, broken: &mut Vec<Illegal>) {
    if !options.fp8_attention {
        return;
    }
    if options.stack == StackName::Moefold {
        broken.push(Illegal::Fp8Attention {
            with: "`stack` moefold, whose attention is wide".to_owned(),
            nearest: "`fp8_attention` false, or `stack` megatron",
        });
    }
    if options.precision.compute() != Dtype::Fp8 {
        broken.push(Illegal::Fp8Attention {
            with: format!("`precision` {}", options.precision),
            nearest: "`precision` fp8, fp8-delayed, fp8-blockwise or mxfp8",
        });
    }
}

/// The rule that a recompute set breaks beside what else is chosen, if any. Full recomputation runs whole
/// layers again and takes no notice of their modules.
pub(crate) fn clash(options: &SearchOptions, recompute: &Recompute) -> Option<Illegal> {
    let combines = options.overlap.unwrap_or_default().expert_alltoall;
    if combines && (*recompute == Recompute::Full || recompute.covers(Module::Moe)) {
        return Some(Illegal::Combined {
            with: "recomputing exchanges of tokens (full, moe) (Megatron-Core)",
            nearest: "`recompute` of other modules, or none",
        });
    }
    if let Some(clash) = graphs::again(options.fixed_graphs(), recompute) {
        return Some(clash);
    }
    let Recompute::Modules(modules) = recompute else {
        return None;
    };
    let delayed = options.precision == Precision::Fp8Delayed;
    if delayed && recompute.covers(Module::MoeAct) {
        return Some(Illegal::DelayedScaling);
    }
    let beside = options.overlap.unwrap_or_default().shared_expert;
    (beside && modules.contains(&Module::SharedExperts)).then_some(Illegal::SharedAgain)
}

/// Whether a layer has an expert that every token passes.
fn shares_expert(layer: &Layer) -> bool {
    layer.moe().is_some_and(|moe| moe.shared.is_some())
}

/// Whether the shared expert can run while this dispatcher sends tokens (Megatron-Core's
/// `transformer_config.py`, `moe_shared_expert_overlap`).
pub(crate) fn runs_beside(dispatcher: Dispatcher) -> bool {
    dispatcher != Dispatcher::Allgather
}

fn check_recompute(plan: &RecomputePlan, model: &Model, stack: &Stack, broken: &mut Vec<Illegal>) {
    let name = stack.name();
    match (stack.recomputes(), plan.block()) {
        (ByLayer::Block, None) if plan.alike().is_none() => {
            broken.push(Illegal::StackRecompute { stack: name });
        }
        (ByLayer::Each, Some(layers)) => {
            let layers = layers.get();
            broken.push(Illegal::StackBlock {
                stack: name,
                layers,
            });
        }
        _ => {}
    }
    let named = u64::from(plan.named_layers());
    let layers = model.layers.len() as u64;
    if named > layers {
        broken.push(match plan.block() {
            None => Illegal::RecomputeLayers { named, layers },
            Some(_) => Illegal::RecomputeBlock { named, layers },
        });
    }
    let modules = |set: &Recompute| match set {
        Recompute::Modules(modules) => modules.clone(),
        Recompute::None | Recompute::Full => Vec::new(),
    };
    let wanted = plan.sets().into_iter().flat_map(modules);
    let present = Module::of(model);
    let mut absent: Vec<Module> = wanted.filter(|module| !present.contains(module)).collect();
    absent.sort_unstable();
    absent.dedup();
    if !absent.is_empty() {
        broken.push(Illegal::AbsentModules { absent, present });
    }
}

fn check_offload(
    offload: Offload,
    model: &Model,
    options: &SearchOptions,
    stack: &Stack,
    broken: &mut Vec<Illegal>,
) {
    let alone = offload.covers(OffloadModule::AttnProj) && !offload.covers(OffloadModule::CoreAttn);
    // Where the core keeps nothing, as it runs again, there is nothing to ask for.
    let core = Offload::of([OffloadModule::CoreAttn]);
    let core = match &options.recompute {
        Some(recompute) => core.kept(model, &|layer| recompute.of_layer(layer)),
        None => core,
    };
    if alone && !core.is_none() && !stack.offloads_projection_alone() {
        broken.push(Illegal::OffloadAlone);
    }
    let there = Offload::all(model);
    let absent: Vec<_> = offload.modules().filter(|m| !there.covers(*m)).collect();
    if !absent.is_empty() {
        broken.push(Illegal::AbsentOffload {
            absent,
            present: there.modules().collect(),
        });
    } else if let Some(layers) = options.recompute.as_ref().and_then(RecomputePlan::block) {
        let layers = layers.get();
        broken.push(Illegal::BlockOffload { layers, offload });
    } else if let Some(recompute) = &options.recompute {
        let left = offload.kept(model, &|layer| recompute.of_layer(layer));
        if left.is_none() {
            broken.push(Illegal::RecomputedOffload {
                recompute: recompute.to_string(),
                offload,
            });
        }
    }
}

/// What is kept of the optimizer's states, and where.
fn check_states(options: &SearchOptions, broken: &mut Vec<Illegal>) {
    if !options.optimizer_offload.is_legal() {
        broken.push(Illegal::HostShare {
            share: options.optimizer_offload.0.to_string(),
        });
    }
    let own = matches!(options.zero, Zero::States | Zero::Fsdp);
    if !own && options.stack == StackName::Moefold {
        broken.push(Illegal::StackZero { zero: options.zero });
    }
    let lacks = |what: fn(&Overlap) -> bool| options.overlap.as_ref().is_some_and(|own| !what(own));
    let zero = options.zero;
    if zero == Zero::Gradients && lacks(|overlap| overlap.grad_reduce) {
        let needs = "grad-reduce";
        broken.push(Illegal::DividedAtOnce { zero, needs });
    } else if zero == Zero::Fsdp2 && lacks(|overlap| overlap.grad_reduce && overlap.param_gather) {
        let needs = "grad-reduce,param-gather";
        broken.push(Illegal::DividedAtOnce { zero, needs });
    }
    if options.zero == Zero::Hybrid && options.stack == StackName::Megatron {
        check_hybrid(options, broken);
    }
    if options.grad_dtype != Dtype::F32 && options.stack == StackName::Moefold {
        broken.push(Illegal::StackGradients);
    }
    if options.optimizer.deals_tensors() {
        check_muon(options, broken);
    }
    if options.masters == Masters::Remainder && options.precision == Precision::Fp32 {
        broken.push(Illegal::WholeMasters);
    }
    if options.primary_weights == PrimaryWeights::Fp8 {
        let precision = options.precision;
        if precision.compute() != Dtype::Fp8 {
            broken.push(Illegal::PrimaryWeights { precision });
        } else if options.masters == Masters::Remainder {
            broken.push(Illegal::RemainderOfFp8);
        }
    }
}

/// What Megatron-FSDP does not divide over instances: where there is one, and weights that have a transposed copy
/// (`param_and_grad_buffer.py` in `megatron/core/distributed/fsdp/src/megatron_fsdp` at 0056bc94).
fn check_hybrid(options: &SearchOptions, broken: &mut Vec<Illegal>) {
    if options.instances == 1 {
        broken.push(Illegal::HybridAlone);
    }
    let precision = options.precision;
    if options.primary_weights == PrimaryWeights::Fp8 && precision == Precision::Mxfp8 {
        broken.push(Illegal::HybridWeights { precision });
    }
}

/// What PyTorch's FSDP2 does not go with whatever the degrees are (Megatron-LM, `validate_args` in
/// `megatron/training/arguments.py`): it is no distributed optimizer, and has gradients of the type of weights.
fn check_fsdp2(model: &Model, options: &SearchOptions, broken: &mut Vec<Illegal>) {
    let grads = options.precision.activation();
    let adam = options.optimizer == Optimizer::Adam || options.optimizer.deals_tensors();
    let several = options.instances > 1;
    for (refused, with, nearest) in [
        (
            model.tied_embeddings,
            "a tied embedding".to_owned(),
            "`zero` 1".to_owned(),
        ),
        (
            several,
            format!(
                "`num_distributed_optimizer_instances` {}",
                options.instances
            ),
            "1 of them".to_owned(),
        ),
        (
            options.grad_dtype != grads,
            format!("`grad_dtype` {}", options.grad_dtype.name()),
            format!("`grad_dtype` {}", grads.name()),
        ),
        (
            !adam,
            format!("`optimizer` {}", options.optimizer.name()),
            "`optimizer` adam".to_owned(),
        ),
        (
            options.masters == Masters::Remainder,
            "`masters` remainder".to_owned(),
            "`masters` fp32".to_owned(),
        ),
        (
            options.primary_weights == PrimaryWeights::Fp8,
            "`primary_weights` fp8".to_owned(),
            "`primary_weights` wide".to_owned(),
        ),
        (
            !options.optimizer_offload.is_none(),
            "`optimizer_offload_fraction`".to_owned(),
            "`optimizer_offload_fraction` 0".to_owned(),
        ),
    ] {
        if refused {
            broken.push(Illegal::Fsdp2 { with, nearest });
        }
    }
}

/// What Muon does not go with (Megatron-Core's `validate_args` and `OptimizerConfig`, which ties the precision-aware optimizer to
/// Adam; `LayerWiseDistributedOptimizer`, whose parts are those of all replicas).
fn check_muon(options: &SearchOptions, broken: &mut Vec<Illegal>) {
    if options.stack == StackName::Moefold {
        broken.push(Illegal::StackOptimizer {
            optimizer: options.optimizer,
        });
        return;
    }
    for (refused, with, nearest) in [
        (
            options.zero.divides_gradients(),
            "`zero` 2, fsdp, hfsdp or fsdp2, which cut matrices",
            "`zero` 1",
        ),
        (
            options.instances > 1,
            "several `num_distributed_optimizer_instances`",
            "1 of them",
        ),
        (
            options.masters == Masters::Remainder,
            "`masters` remainder of the precision-aware optimizer, which is Adam's",
            "`masters` fp32",
        ),
        (
            options.primary_weights == PrimaryWeights::Fp8,
            "`primary_weights` fp8, whose gathers matrix by matrix have no price",
            "`primary_weights` wide",
        ),
        (
            !options.optimizer_offload.is_none(),
            "`optimizer_offload_fraction`, whose states are Adam's",
            "`optimizer_offload_fraction` 0",
        ),
    ] {
        if refused {
            broken.push(Illegal::Muon { with, nearest });
        }
    }
}

/// Without any `m` the depths stand with the head.
fn check_stages(stages: &PipelineLayout, model: &Model, broken: &mut Vec<Illegal>) {
    let given = stages.stages().iter().map(Vec::len).sum::<usize>() as u64;
    let layers = model.layers.len() as u64;
    if given != layers {
        broken.push(Illegal::StageLayers { given, layers });
    }
    let (given, depths) = (stages.depths() as u64, model.mtp.len() as u64);
    if given != 0 && given != depths {
        broken.push(Illegal::StageDepths { given, depths });
    }
}

#[cfg(test)]
mod tests;
