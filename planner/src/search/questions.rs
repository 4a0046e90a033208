//! [`Question`]s that a request comes to.

use moefold_profiles::{Cluster, Precision};

use super::asked::Asked;
use super::recompute::{self, Sets};
use super::request::check_request;
use super::shape::{self, Assumption, Question};
use crate::choice::{Objective, Offload, Recompute};
use crate::layout::Illegal;
use crate::options::{PlanError, SearchOptions};
use crate::rules::{KeyWays, Rules, bounds_rows, clash, preprocesses, runs_beside};
use crate::stack::{ByLayer, Stack};

/// What is asked under each choice of what leaves for the host and what CUDA graphs launch, of these those of more first.
pub(super) fn questions<'a>(
    asked: &Asked<'a>,
    rules: &Rules,
    variants: &'a [SearchOptions],
) -> Result<Vec<Question<'a>>, PlanError> {
    let of = |options: &'a SearchOptions| question(&Asked { options, ..*asked }, rules);
    let mut questions: Vec<Question<'a>> = variants.iter().map(of).collect::<Result<_, _>>()?;
    let graphs = |options: &SearchOptions| options.fixed_graphs();
    for (number, options) in variants.iter().enumerate() {
        let own = graphs(options);
        let leaves = |number: usize| questions[number].offload();
        let has_all = |above: &&usize| {
            let other = graphs(&variants[**above]);
            let mut stays = leaves(**above).modules();
            let dispatchers = &questions[**above].dispatchers;
            let mut tried = questions[number].dispatchers.iter();
            !other.is_whole()
                && own.modules().all(|module| other.covers(module))
                && stays.all(|module| leaves(number).covers(module))
                && tried.all(|dispatcher| dispatchers.contains(dispatcher))
        };
        let above: Vec<usize> = (0..number).collect();
        let above = above.iter().filter(has_all).copied().collect();
        questions[number].above = above;
    }
    Ok(questions)
}

/// Checks what was asked against what stack and cluster can do, and gathers what a search shares.
pub(super) fn question<'a>(asked: &Asked<'a>, rules: &Rules) -> Result<Question<'a>, PlanError> {
    let Asked {
        model,
        cluster,
        gpus,
        options,
        costs,
        runtime,
        ..
    } = *asked;
    let stack = Stack::on(options.stack, cluster, costs.host());
    let stack = stack.under(options.fixed_graphs(), options.overlap);
    let unable = |what: String, limit: String| Err(PlanError::Unable { what, limit });
    if let Some(reason) = runtime.refuses(model, options.precision) {
        return unable(format!("`stack` {}", stack.name().name()), reason);
    }
    if gpus == 0 {
        return unable(
            "`gpus` 0".to_owned(),
            "a job has at least one rank".to_owned(),
        );
    }
    if let Some(there) = cluster.num_gpus
        && gpus > there
    {
        return unable(
            format!("`gpus` {gpus}"),
            format!("cluster {} has {there}", cluster.name),
        );
    }
    check_request(asked, rules)?;
    computes(cluster, options.precision)?;
    let dispatchers = match options.dispatcher {
        _ if model.num_moe_layers() == 0 => vec![stack.common().dispatchers[0]],
        None => {
            let all = stack.common().dispatchers.iter().copied();
            let pads = options.capacity.is_some_and(|capacity| capacity.pad);
            let overlap = options.overlap.unwrap_or_default();
            let beside = overlap.shared_expert || overlap.expert_alltoall;
            all.filter(|&dispatcher| !pads || stack.pads_under(dispatcher))
                .filter(|&dispatcher| !beside || runs_beside(dispatcher))
                .filter(|&dispatcher| preprocesses(options, dispatcher))
                .collect()
        }
        Some(wanted) => vec![wanted],
    };
    let (mut sets, mut choices) = match &options.recompute {
        Some(plan) => recompute::of_plan(plan, model),
        None => (recompute::sets(model), Vec::new()),
    };
    let illegal = |set: &Recompute| clash(options, set);
    let searched = options.recompute.is_none();
    let illegal_sets: Vec<Illegal> = sets.iter().filter_map(illegal).collect();
    if searched {
        sets.retain(|set| illegal(set).is_none());
        choices = (0..sets.len()).map(Sets::Every).collect();
    }
    let by_time = options.objective != Objective::Memory;
    // What leaves beside which layer is not a matter of layers alone.
    let alone = searched
        && by_time
        && choices.len() > 1
        && options.offload == Some(Offload::NONE)
        // Nor is what is alive while passes take turns.
        && !options.overlap.unwrap_or_default().expert_alltoall;
    let by_layer = match stack.recomputes() {
        // Whole layers run again, which other choices may rule out.
        ByLayer::Block => (sets.last() == Some(&Recompute::Full)).then_some(ByLayer::Block),
        ByLayer::Each => Some(ByLayer::Each),
    };
    let by_layer = by_layer.filter(|_| alone);
    let recorded = options.routing.as_ref();
    let routing = recorded.map_or(Assumption::BALANCED, Assumption::Recorded);
    let (distinct, kind_of) = shape::distinct(model, routing);
    Ok(Question {
        runtime,
        model,
        cluster,
        options,
        splits: &[],
        costs,
        overlap: options
            .overlap
            .unwrap_or_else(|| stack.overlap(options.optimizer)),
        stack,
        sets,
        choices,
        by_layer,
        illegal_sets,
        dispatchers,
        keys: KeyWays::of(model, options),
        routing,
        above: Vec::new(),
        needs_exchange: bounds_rows(model, options),
        limit: None,
        kind_of,
        distinct,
    })
}

/// Refuses a precision that devices have no products of.
fn computes(cluster: &Cluster, precision: Precision) -> Result<(), PlanError> {
    let gpu = &cluster.gpu;
    let unable = |limit: String| {
        Err(PlanError::Unable {
            what: format!("`precision` {precision}"),
            limit,
        })
    };
    let compute = precision.compute();
    if gpu.peak(compute).is_none() {
        return unable(format!("{} does not compute in {compute}", gpu.name));
    }
    // Transformer Engine asks for a compute capability of 10 (`check_mxfp8_support`); of AMD's, CDNA 4 has such products.
    let sm = gpu.arch.strip_prefix("sm_").unwrap_or_default();
    let sm = sm.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let is_older = sm.parse().is_ok_and(|sm: u32| sm < 100)
        || (gpu.arch.starts_with("gfx") && !gpu.arch.starts_with("gfx95"));
    if precision == Precision::Mxfp8 && is_older {
        return unable(format!(
            "{} has no products with a scale for 32 values; it has fp8, fp8-delayed and fp8-blockwise",
            gpu.name
        ));
    }
    Ok(())
}
