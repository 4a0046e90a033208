//! Whether a plan's ranks have room on the GPUs that run them, and what would have.
//!
//! Bytes are the planner's for this executor, worked out again from the plan's layout, so that an
//! edited file is judged by what it says. Ranks that are threads all share the first GPU.

use anyhow::anyhow;
use moefold_planner::layout::PartialDegrees;
use moefold_planner::options::SearchOptions;
use moefold_planner::plan::{Objective, Plan, PlannedLayout, StackName};
use moefold_planner::search;
use moefold_planner::stack::{ASSUMED_OVERHEAD, WORKSPACE};
use moefold_profiles::Costs;
use moefold_profiles::units::{Bytes, GIB};

use super::Gpu;
use crate::cli::Launch;
use crate::failure::Failure;

/// Refuses a plan that needs more GPUs than there are, or more memory than they have free.
pub(super) fn check(plan: &Plan, gpus: &[Gpu], launch: Launch) -> Result<(), Failure> {
    let ranks = plan.request.gpus;
    let sharing = match launch {
        Launch::Threads => ranks,
        Launch::Processes | Launch::Env => 1,
    };
    if launch == Launch::Processes && ranks as usize > gpus.len() {
        return Err(Failure::Request(anyhow!(
            "--launch processes: the plan has {ranks} ranks, a GPU each, and this machine has {}: \
             --launch threads runs all of them on GPU 0, --launch env on several machines, and \
             `plan --gpus {}` makes a plan for what is here",
            counted(gpus.len()),
            gpus.len()
        )));
    }
    for gpu in &gpus[..gpus.len().min(if sharing > 1 { 1 } else { ranks as usize })] {
        has_room(plan, gpu, sharing)?;
    }
    Ok(())
}

fn counted(gpus: usize) -> String {
    match gpus {
        1 => "1 GPU".to_owned(),
        more => format!("{more} GPUs"),
    }
}

/// Memory beside tensors of so many ranks on one GPU: they share a context, and each gives the
/// matrix library a workspace.
fn beside(sharing: u32) -> Bytes {
    ASSUMED_OVERHEAD + WORKSPACE * u64::from(sharing - 1)
}

fn has_room(plan: &Plan, gpu: &Gpu, sharing: u32) -> Result<(), Failure> {
    let (Some(free), Some(memory)) = (gpu.free(), gpu.memory) else {
        return Ok(());
    };
    let rank = tensors(plan);
    let needed = rank * u64::from(sharing) + beside(sharing);
    if needed <= free {
        return Ok(());
    }
    let ranks = |sharing: u32, each: Bytes| match sharing {
        1 => format!("1 rank of {each}"),
        ranks => format!("{ranks} ranks of {each}"),
    };
    Err(Failure::Request(anyhow!(
        "the plan needs {needed} on GPU {} ({}), which has {free} free of {memory}: {} in tensors, and \
         {} for the context and libraries; {}",
        gpu.ordinal,
        gpu.name,
        ranks(sharing, rank),
        beside(sharing),
        what_fits(plan, free, sharing)
    )))
}

/// Tensors of the fullest rank: what the planner says of the plan's layout, or the file where the
/// planner has nothing to say.
fn tensors(plan: &Plan) -> Bytes {
    let degrees = pins(&plan.planned);
    let found = least(plan, plan.request.gpus, degrees);
    found.map_or_else(|| allocated(&plan.planned), |planned| allocated(&planned))
}

fn allocated(planned: &PlannedLayout) -> Bytes {
    let memory = &planned.predicted.memory_gib;
    Bytes(((memory.total() - memory.overhead) * GIB as f64).ceil() as u64)
}

/// The degrees of a plan, all pinned.
fn pins(planned: &PlannedLayout) -> PartialDegrees {
    let layout = &planned.layout;
    PartialDegrees {
        tp: Some(layout.tp),
        cp: Some(layout.cp),
        pp: Some(layout.pp),
        vpp: Some(layout.vpp),
        ep: Some(layout.ep),
        etp: Some(layout.etp),
        mbs: Some(layout.mbs),
        ..PartialDegrees::default()
    }
}

/// The layout of least memory on `ranks` ranks under these pins, for this executor.
fn least(plan: &Plan, ranks: u32, pins: PartialDegrees) -> Option<PlannedLayout> {
    let options = SearchOptions {
        precision: plan.planned.precision,
        optimizer: plan.planned.optimizer,
        objective: Objective::Memory,
        pins,
        top: 1,
        ..SearchOptions::new(plan.request.batch, StackName::Moefold)
    };
    let mut cluster = plan.cluster.clone();
    cluster.num_gpus = None;
    // What is asked is how much, not whether.
    cluster.gpu.memory_gib = 1e9;
    let costs = Costs::for_cluster(&cluster, &[]);
    let found = search::plan(&plan.model, &cluster, ranks, &options, &costs).ok()?;
    found.plans.into_iter().next()
}

/// What of the same job has room: a smaller microbatch, another layout of as many ranks, fewer ranks
/// on the GPU, more GPUs.
fn what_fits(plan: &Plan, free: Bytes, sharing: u32) -> String {
    let ranks = plan.request.gpus;
    let room = |sharing: u32, planned: &PlannedLayout| {
        let needed = allocated(planned) * u64::from(sharing) + beside(sharing);
        (needed <= free).then_some(needed)
    };
    let mut degrees = pins(&plan.planned);
    for mbs in (1..plan.planned.layout.mbs).rev() {
        degrees.mbs = Some(mbs);
        let found = least(plan, ranks, degrees);
        if let Some(needed) = found.and_then(|planned| room(sharing, &planned)) {
            return format!("what fits: the same layout with --layout {degrees} takes {needed}");
        }
    }
    let free_choice = PartialDegrees::default();
    let other = least(plan, ranks, free_choice);
    if let Some(planned) = &other
        && let Some(needed) = room(sharing, planned)
    {
        return format!("what fits: --layout {} takes {needed}", pins(planned));
    }
    if ranks > 1
        && sharing > 1
        && let Some(planned) = least(plan, 1, free_choice)
        && let Some(needed) = room(1, &planned)
    {
        return format!("what fits: one rank (plan --gpus 1) takes {needed}");
    }
    let first = if sharing > 1 { ranks } else { 2 * ranks };
    for more in std::iter::successors(Some(first), |gpus| Some(2 * gpus)) {
        if more > MOST_GPUS {
            break;
        }
        let Some(planned) = least(plan, more, free_choice) else {
            continue;
        };
        if room(1, &planned).is_some() {
            let none = match ranks {
                1 => "no layout of one rank fits".to_owned(),
                _ if sharing > 1 => format!("no layout of {ranks} ranks fits on one GPU"),
                _ => format!("no layout of {ranks} ranks fits"),
            };
            return format!(
                "{none}; {more} such GPUs, a rank each, would do (--layout {}, {} of tensors a rank)",
                pins(&planned),
                allocated(&planned)
            );
        }
    }
    "no layout fits, with shorter sequences or fewer layers one might".to_owned()
}

/// Where looking for enough GPUs ends.
const MOST_GPUS: u32 = 1024;
