//! What CUDA graphs go with, and those that a search tries.

use std::cmp::Reverse;

use crate::choice::{Dispatcher, GraphModule, Graphs, Module, Recompute, RecomputePlan, StackName};
use crate::layout::Illegal;
use crate::model::{Ffn, Layer, Mixer, Model};
use crate::options::SearchOptions;

/// What CUDA graphs do not go with, whatever the degrees are (Megatron-Core's `transformer_config.py`, `cuda_graph_impl`
/// and `cuda_graph_modules`).
pub(super) fn check(model: &Model, options: &SearchOptions, broken: &mut Vec<Illegal>) {
    let graphs = options.fixed_graphs();
    if graphs.is_none() {
        return;
    }
    let mut refuse = |refused: bool, with: &'static str, nearest: &'static str| {
        if refused {
            broken.push(Illegal::Graphs {
                graphs,
                with,
                nearest,
            });
        }
    };
    refuse(
        options.stack == StackName::Moefold,
        "`stack` moefold, which launches none",
        "`cuda_graph` none, or `stack` megatron",
    );
    let of = |module| !graphs.is_whole() && graphs.covers(module);
    let router = of(GraphModule::MoeRouter);
    refuse(
        of(GraphModule::MoePreprocess) && !router,
        "moe_preprocess without moe_router",
        "`cuda_graph` with both",
    );
    refuse(
        of(GraphModule::Moe) && router,
        "moe beside moe_router, which is in it",
        "`cuda_graph` with one of them",
    );
    let pads = options.capacity.is_some_and(|capacity| capacity.pad);
    refuse(
        of(GraphModule::Moe) && !pads,
        "moe where experts get as many rows as routing gives them",
        "padding to a capacity, or `cuda_graph` moe_router,moe_preprocess",
    );
    let has_experts = model.num_moe_layers() > 0;
    let of_experts = [
        GraphModule::Moe,
        GraphModule::MoeRouter,
        GraphModule::MoePreprocess,
    ];
    refuse(
        !has_experts && of_experts.into_iter().any(of),
        "modules of experts in a model without any",
        "`cuda_graph` attn,mlp",
    );
    refuse(
        has_experts && of(GraphModule::Mlp) && !has_dense(model),
        "mlp in a model whose layers all have experts",
        "`cuda_graph` without it",
    );
    let is_linear = |layer: &Layer| matches!(layer.mixer, Some(Mixer::Linear(_)));
    refuse(
        of(GraphModule::Mamba) && !model.layers.iter().any(is_linear),
        "mamba in a model without linear mixers",
        "`cuda_graph` without it",
    );
    refuse(
        options
            .dispatcher
            .is_some_and(|dispatcher| !preprocesses(options, dispatcher)),
        "moe_preprocess where `dispatcher` alltoall reads what a capacity left on the host",
        "padding to the capacity, or `cuda_graph` without it",
    );
    let offloads = options.offload.is_some_and(|offload| !offload.is_none());
    let both = of(GraphModule::Attn) && router;
    refuse(
        offloads && !both,
        "`offload`, which goes with graphs of attn and moe_router alone",
        "`cuda_graph` attn,moe_router, or `offload` none",
    );
    // Where it is open, [`to_try`] takes it.
    let bounds = |dispatcher| dispatcher == Dispatcher::Hybridep;
    let bounded = pads || options.dispatcher.is_none_or(bounds);
    let alone = options.pins.ep == Some(1) && options.pins.etp == Some(1);
    refuse(
        alone && bounds_rows(model, options),
        "experts whose tokens no ranks exchange (ep=1, etp=1), so that no dispatcher bounds their rows",
        "ep of at least 2, or padding to a capacity",
    );
    refuse(
        graphs.is_whole() && has_experts && !bounded,
        "experts whose rows nothing bounds",
        "`dispatcher` hybridep, whose rows a budget bounds, or padding to a capacity",
    );
    let combines = options.overlap.unwrap_or_default().expert_alltoall;
    refuse(
        combines && (of(GraphModule::Moe) || of(GraphModule::Mlp)),
        "expert-alltoall in `overlap` beside graphs of moe or mlp",
        "`cuda_graph` attn,moe_router,moe_preprocess",
    );
}

/// Whether rows of experts are bounded by their dispatcher, as graphs of a whole step need. Megatron-Core has such a
/// dispatcher only where ranks exchange tokens (`MoEFlexTokenDispatcher` in
/// `megatron/core/transformer/moe/token_dispatcher.py`: `TPxEP > 1`).
pub(crate) fn bounds_rows(model: &Model, options: &SearchOptions) -> bool {
    let pads = options.capacity.is_some_and(|capacity| capacity.pad);
    options.fixed_graphs().is_whole() && !pads && model.num_moe_layers() > 0
}

/// Whether a dispatcher prepares tokens without the host where that is to be a graph.
pub(crate) fn preprocesses(options: &SearchOptions, dispatcher: Dispatcher) -> bool {
    let graphs = options.fixed_graphs();
    let of_it = !graphs.is_whole() && graphs.covers(GraphModule::MoePreprocess);
    let drops = options.capacity.is_some_and(|capacity| !capacity.pad);
    !(of_it && drops && dispatcher == Dispatcher::Alltoall)
}

/// Whether a layer has a dense feed-forward block.
fn has_dense(model: &Model) -> bool {
    let is_dense = |layer: &Layer| matches!(layer.ffn, Some(Ffn::Dense(_)));
    model.layers.iter().any(is_dense)
}

/// What runs again is inside of a graph or outside of all.
pub(super) fn again(graphs: Graphs, recompute: &Recompute) -> Option<Illegal> {
    if graphs.is_none() || graphs.is_whole() {
        return None;
    }
    let refuse = |with, nearest| {
        Some(Illegal::Graphs {
            graphs,
            with,
            nearest,
        })
    };
    if *recompute == Recompute::Full {
        return refuse(
            "`recompute` full",
            "`recompute` of modules, or `cuda_graph` full_iteration",
        );
    }
    if recompute.covers(Module::Moe) && graphs.covers(GraphModule::MoeRouter) {
        return refuse(
            "`recompute` moe, which runs the graph of moe_router again",
            "`recompute` without it, or `cuda_graph` without moe_router",
        );
    }
    None
}

/// The graphs that are searched where nothing is said, those of more modules first: all that go with the rest. Those of a
/// whole step come with the dispatcher that bounds the rows of experts, where nothing else is wanted.
pub(crate) fn to_try(model: &Model, options: &SearchOptions) -> Vec<SearchOptions> {
    let under = |graphs: Graphs| {
        let mut options = SearchOptions {
            graphs: Some(graphs),
            ..options.clone()
        };
        if bounds_rows(model, &options) {
            options.dispatcher.get_or_insert(Dispatcher::Hybridep);
        }
        options
    };
    if options.graphs.is_some() || options.stack == StackName::Moefold {
        return vec![under(options.fixed_graphs())];
    }
    let linear = |layer: &Layer| matches!(layer.mixer, Some(Mixer::Linear(_)));
    let softmax = |layer: &Layer| layer.mixer.is_some() && !linear(layer);
    let is_there = |module: &GraphModule| match module {
        GraphModule::Attn => model.layers.iter().any(softmax),
        GraphModule::Mamba => model.layers.iter().any(linear),
        GraphModule::Mlp => has_dense(model),
        GraphModule::Moe | GraphModule::MoeRouter | GraphModule::MoePreprocess => {
            model.num_moe_layers() > 0
        }
    };
    let there: Vec<GraphModule> = GraphModule::ALL.into_iter().filter(is_there).collect();
    let set = |set: usize| {
        let each = there.iter().enumerate();
        let chosen = each.filter(move |(at, _)| set >> at & 1 == 1);
        Graphs::of(chosen.map(|(_, module)| *module))
    };
    let mut sets: Vec<Graphs> = (0..1_usize << there.len()).map(set).collect();
    sets.push(Graphs::FULL_ITERATION);
    sets.sort_by_key(|graphs| Reverse((graphs.is_whole(), graphs.modules().count())));
    let goes_with_the_rest = |options: &SearchOptions| {
        let mut broken = Vec::new();
        check(model, options, &mut broken);
        let mut given = options.recompute.iter().flat_map(RecomputePlan::sets);
        broken.is_empty() && given.all(|set| again(options.fixed_graphs(), set).is_none())
    };
    let each = sets.into_iter().map(under);
    each.filter(goes_with_the_rest).collect()
}
