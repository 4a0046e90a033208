//! [`variants`]: what a search tries where what leaves for the host is open: sets of modules, nothing first.
//!
//! No layout takes less time where more leaves, so a set is looked at only where none of those within it can do as well
//! ([`Question::above`](super::shape::Question)).

use moefold_profiles::units::Bytes;

use super::Asked;
use super::shape::Question;
use crate::choice::{Offload, OffloadModule};
use crate::model::{Model, count};
use crate::options::{PlanError, SearchOptions};
use crate::rules::{Rules, graphs_to_try};

/// What leaves together: the inputs of both norms, which are one residual stream, and what attention itself keeps.
const TOGETHER: [&[OffloadModule]; 4] = [
    &[OffloadModule::AttnNorm, OffloadModule::MlpNorm],
    &[
        OffloadModule::QkvLinear,
        OffloadModule::CoreAttn,
        OffloadModule::AttnProj,
    ],
    &[OffloadModule::ExpertFc1],
    &[OffloadModule::MoeAct],
];

/// Modules that leave together where that is open: every union of these is tried. None where it is not.
pub(super) fn together(model: &Model, options: &SearchOptions) -> Vec<Offload> {
    let there = match options.offload {
        Some(_) => Offload::NONE,
        None => Offload::all(model),
    };
    // Nothing that is computed again alone: a pinned `recompute` may leave nothing.
    let there = match &options.recompute {
        Some(recompute) => there.kept(model, &|layer| recompute.of_layer(layer)),
        None => there,
    };
    let of = |part: &[OffloadModule]| {
        let left = part.iter().copied();
        Offload::of(left.filter(|module| there.covers(*module)))
    };
    let parts = TOGETHER.into_iter().map(of);
    parts.filter(|part| !part.is_none()).collect()
}

/// What is fixed of what is open, in the order in which it is tried: sets of modules, of each what CUDA graphs launch.
pub(super) fn variants(asked: &Asked<'_>) -> Vec<SearchOptions> {
    let (model, options) = (asked.model, asked.options);
    let of = |offload| {
        let options = SearchOptions {
            offload: Some(offload),
            ..options.clone()
        };
        graphs_to_try(model, &options)
    };
    if let Some(fixed) = options.offload {
        return of(fixed);
    }
    let together = together(model, options);
    let set = |bits: u32| {
        let parts = (0..)
            .zip(&together)
            .filter(move |(part, _)| bits >> part & 1 == 1);
        Offload::of(parts.flat_map(|(_, part)| part.modules()))
    };
    let mut sets: Vec<u32> = (1..1 << together.len()).collect();
    sets.sort_by_key(|bits| bits.count_ones());
    let legal = |options: &SearchOptions| {
        let rules = Rules::of(model, options);
        rules.contradictions(&options.pins, asked.gpus).is_empty()
    };
    let some = sets.into_iter().flat_map(|bits| of(set(bits)));
    of(Offload::NONE)
        .into_iter()
        .chain(some.filter(legal))
        .collect()
}

/// Refuses a share of the optimizer on hosts that have no room for it under any layout: masters and moments rest on one rank
/// each at least.
pub(super) fn fits_on_hosts(question: &Question<'_>, gpus: u32) -> Result<(), PlanError> {
    let (cluster, share) = (question.cluster, question.options.optimizer_offload.0);
    let states = count::params(question.model).total() as f64 * question.state_bytes().sharded;
    // Shares are rounded to a few elements of each family.
    let of_node = f64::from(cluster.gpus_per_node.min(gpus)) / f64::from(gpus);
    let of_node = 0.999 * share * states * of_node;
    let least_gib = Bytes(of_node as u64).gib();
    let there_gib = cluster.host_memory_gib;
    if cluster.gpu.is_cpu() || least_gib <= there_gib {
        return Ok(());
    }
    Err(PlanError::Hosts {
        share,
        least_gib,
        there_gib,
        cluster: cluster.name.clone(),
    })
}
