//! [`closest`]: where nothing fits, what each way to save memory needs at least, and what would fit.
//!
//! Least memory is looked for among microbatches of one sequence that compute all layers again, where neither was
//! fixed. Where that is near what there is, or goes with nothing else that was fixed, the whole space is searched.

use moefold_profiles::{Cluster, Dtype};

use super::asked::Asked;
use crate::answer::{Saver, Shortage};
use crate::choice::{
    HostShare, Masters, Objective, Offload, Optimizer, PrimaryWeights, Recompute, Zero,
};
use crate::layout::{MAX_GPUS, PartialDegrees};
use crate::model::Model;
use crate::options::{LeastMemory, SearchOptions};
use crate::plan::PlannedLayout;

/// Times as many GPUs as were asked for that are tried, in order.
const MORE_GPUS: [u32; 11] = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];

/// Memory over what there is, from which on no other choice is looked for: other sets of what is computed again
/// save less than this of it.
const NEAR: f64 = 1.25;

/// The best plan for so many ranks, had a device memory without end.
pub(super) type Endless<'a> = dyn Fn(u32, &SearchOptions) -> Option<PlannedLayout> + 'a;

/// The plan of a request that needs the least memory, had a device memory without end. The whole space is searched
/// where that is up to `NEAR` times what a plan may fill, and more.
pub(super) fn least(
    cluster: &Cluster,
    gpus: u32,
    options: &SearchOptions,
    endless: &Endless<'_>,
) -> Option<LeastMemory> {
    let limit_gib = limit_gib(cluster, options);
    let open = SearchOptions {
        objective: Objective::Memory,
        memory_gib: None,
        ..options.clone()
    };
    let mut sparing = open.clone();
    sparing.pins.mbs = sparing.pins.mbs.or(Some(1));
    sparing
        .recompute
        .get_or_insert_with(|| Recompute::Full.into());
    let endless = |options| endless(gpus, options).map(LeastMemory::of);
    let first = endless(&sparing);
    let settled = |least: &LeastMemory| {
        let share = least.peak_gib / limit_gib;
        share <= 1.0 || share > NEAR
    };
    if sparing == open || first.as_ref().is_some_and(settled) {
        return first;
    }
    let second = endless(&open);
    first
        .into_iter()
        .chain(second)
        .min_by(|a, b| a.peak_gib.total_cmp(&b.peak_gib))
}

impl LeastMemory {
    fn of(plan: PlannedLayout) -> Self {
        Self {
            layout: plan.layout,
            recompute: plan.recompute,
            offload: (!plan.offload.is_none()).then_some(plan.offload),
            peak_gib: plan.predicted.peak_gib,
        }
    }
}

moefold_profiles::named! {
    /// A change of a request that needs less memory, by its option and value.
    pub enum Change {
        /// No room is kept free.
        Headroom = "`memory_headroom` 0",
        /// What is computed again is chosen.
        Recompute = "`recompute` auto",
        /// What leaves for the host is chosen.
        Offload = "`offload` auto",
        /// The optimizer's states rest on the host.
        States = "`optimizer_offload_fraction` 1",
        /// Masters are what weights lack.
        Masters = "`masters` remainder",
        /// Weights are in FP8 alone.
        Primary = "`primary_weights` fp8",
        /// All replicas divide, not those of each part.
        Instances = "`num_distributed_optimizer_instances` 1",
        /// Weights and gradients are divided too.
        Fsdp = "`zero` fsdp",
        /// Gradients are narrow.
        Gradients = "`grad_dtype` bf16",
        /// Moments are narrow.
        Moments = "`optimizer` adam-bf16-moments",
        /// Any degrees.
        Layout = "without `layout`",
    }
}

impl Change {
    /// Its option, and what to name.
    pub(super) fn named(self) -> (&'static str, String) {
        let (option, value) = self.name().split_once(' ').unwrap_or((self.name(), ""));
        (option.trim_matches('`'), value.to_owned())
    }

    /// Whether it changes a request.
    pub(super) fn is_open(self, options: &SearchOptions) -> bool {
        let precision = options.precision;
        match self {
            Self::Headroom => options.memory_headroom > 0.0,
            Self::Recompute => options.recompute.is_some(),
            Self::Offload => options.offload == Some(Offload::NONE),
            Self::States => options.optimizer_offload.0 < 1.0,
            Self::Masters => options.masters != Masters::Remainder,
            Self::Primary => {
                precision.compute().bits() < precision.activation().bits()
                    && options.primary_weights == PrimaryWeights::Wide
            }
            // Of one alone there is no hybrid.
            Self::Instances => options.instances > 1 && options.zero != Zero::Hybrid,
            Self::Fsdp => !options.zero.divides_weights(),
            Self::Gradients => options.grad_dtype == Dtype::F32,
            Self::Moments => options.optimizer == Optimizer::Adam,
            Self::Layout => options.pins != PartialDegrees::default(),
        }
    }

    /// Makes it.
    pub(super) fn make(self, model: &Model, options: &mut SearchOptions) {
        match self {
            Self::Headroom => options.memory_headroom = 0.0,
            Self::Recompute => options.recompute = None,
            Self::Offload => {
                options.offload = Some(Offload::all(model));
                // What is computed again has nothing to leave.
                options
                    .recompute
                    .get_or_insert_with(|| Recompute::None.into());
            }
            Self::States => options.optimizer_offload = HostShare(1.0),
            Self::Masters => options.masters = Masters::Remainder,
            Self::Primary => options.primary_weights = PrimaryWeights::Fp8,
            Self::Instances => options.instances = 1,
            Self::Fsdp => options.zero = Zero::Fsdp,
            Self::Gradients => options.grad_dtype = Dtype::Bf16,
            Self::Moments => options.optimizer = Optimizer::AdamBf16Moments,
            Self::Layout => options.pins = PartialDegrees::default(),
        }
    }
}

/// Memory that a plan may fill, GiB.
fn limit_gib(cluster: &Cluster, options: &SearchOptions) -> f64 {
    let limit_gib = cluster.gpu.memory_gib * (1.0 - options.memory_headroom);
    options
        .memory_gib
        .map_or(limit_gib, |gib| gib.min(limit_gib))
}

/// What a request that nothing satisfies for want of memory needs at least: as it is, with each saver by itself,
/// with those that leave all numbers as they are together, where none of these fits with bf16 gradients beside states on the host, and
/// with more GPUs until it fits. Savers that the stack
/// refuses are left out. As it is, it needs `as_it_is`.
pub(super) fn closest(
    asked: &Asked<'_>,
    as_it_is: Option<&LeastMemory>,
    endless: &Endless<'_>,
) -> Shortage {
    let (model, cluster) = (asked.model, asked.cluster);
    let (gpus, options) = (asked.gpus, asked.options);
    let needing = |change: String, gpus: u32, options: &SearchOptions, least: LeastMemory| Saver {
        change,
        gpus,
        layout: least.layout,
        recompute: least.recompute,
        offload: least.offload,
        peak_gib: least.peak_gib,
        fits: least.peak_gib <= limit_gib(cluster, options),
    };
    let saver = |change: String, gpus: u32, options: &SearchOptions| -> Option<Saver> {
        let least = least(cluster, gpus, options, endless)?;
        Some(needing(change, gpus, options, least))
    };
    let open = |change: &Change| change.is_open(options);
    let changed = |changes: &[Change]| {
        let mut changed = options.clone();
        for change in changes {
            change.make(model, &mut changed);
        }
        changed
    };
    let none = |least| needing("none".to_owned(), gpus, options, least);
    let mut savers: Vec<Saver> = as_it_is.cloned().map(none).into_iter().collect();
    for change in Change::ALL.into_iter().filter(open) {
        let found = saver(change.name().to_owned(), gpus, &changed(&[change]));
        let found = found.map(|found| match savers.first() {
            // Nothing has to leave where it may.
            Some(none) if change == Change::Offload && none.peak_gib < found.peak_gib => Saver {
                change: found.change,
                ..none.clone()
            },
            _ => found,
        });
        // Room that is kept free saves nothing.
        savers.extend(found.filter(|found| change != Change::Headroom || found.fits));
    }
    // Those that leave all numbers as they are together, and at last gradients that do not.
    for together in [
        &[Change::States, Change::Masters, Change::Offload][..],
        &[Change::States, Change::Masters, Change::Fsdp],
        &[Change::States, Change::Gradients],
    ] {
        let together: Vec<Change> = together.iter().copied().filter(open).collect();
        if together.len() < 2 || savers.iter().any(|saver| saver.fits) {
            continue;
        }
        let names: Vec<&str> = together.iter().map(|change| change.name()).collect();
        let own = |changes: &[Change]| saver(names.join(", "), gpus, &changed(changes));
        let found = own(&together);
        // Nothing has to leave where it may.
        let others = together.strip_suffix(&[Change::Offload]).and_then(own);
        let least = found.into_iter().chain(others);
        savers.extend(least.min_by(|a, b| a.peak_gib.total_cmp(&b.peak_gib)));
    }
    savers.extend(more_gpus(cluster, gpus, &|more| {
        saver(format!("`gpus` {more}"), more, options)
    }));
    Shortage {
        device_gib: cluster.gpu.memory_gib,
        limit_gib: limit_gib(cluster, options),
        savers,
    }
}

/// What a request needs at least with more GPUs, of those that there are, until it fits.
fn more_gpus(cluster: &Cluster, gpus: u32, saver: &dyn Fn(u32) -> Option<Saver>) -> Vec<Saver> {
    let there = cluster.num_gpus.unwrap_or(MAX_GPUS).min(MAX_GPUS);
    let mut found = Vec::new();
    for times in MORE_GPUS {
        let Some(more) = gpus.checked_mul(times).filter(|&more| more <= there) else {
            break;
        };
        // Some numbers of ranks divide no batch.
        found.extend(saver(more));
        if found.last().is_some_and(|last: &Saver| last.fits) {
            break;
        }
    }
    found
}
