//! What is open is searched as whole as degrees are: orders of ranks, ways to keys.

use std::path::Path;

use moefold_profiles::pricing::Costs;

use super::{run, small};
use crate::choice::{CpComm, Offload, OffloadModule, Recompute};
use crate::layout::{Batch, Order};
use crate::options::SearchOptions;
use crate::plan::{Plan, PlannedLayout};
use crate::search::{self, again};
use crate::stack::megatron::Declared;

/// The other order is legal where replicas are as many as those of experts, its plans say it, and their groups are its.
#[test]
fn oracle_plans_in_the_other_order_are_of_its_groups() {
    let (mut model, cluster, mut options) = small();
    model.layers.truncate(8);
    options.pins = "mbs=1,cp=1,vpp=1".parse().expect("degrees");
    options.top = usize::MAX;
    let both = [Order::PP_LAST, Order::DP_LAST].map(|order| {
        options.order = Some(order);
        run(&model, &cluster, 32, &options).plans
    });
    let legal = |plan: &&PlannedLayout| plan.layout.pp == 1 || plan.layout.dp == plan.layout.edp;
    let expected = both[0].iter().filter(legal).count();
    assert!(both[1].len() == expected && expected < both[0].len());
    let staged = both[1].iter().find(|plan| plan.layout.pp == 4);
    let staged = staged.expect("some");
    let plan = Plan::of(staged.clone(), &model, &cluster, 32, &options);
    let text = serde_json::to_string(&plan).expect("plain data");
    assert!(text.contains(r#""rank_order":"tp-cp-ep-pp-dp""#), "{text}");
    let read = Plan::parse(&text, Path::new("plan.json")).expect("a plan");
    let layout = read.layout().expect("legal");
    let stride = layout.tp();
    let pipeline = crate::mesh::group_of(&layout, crate::mesh::GroupKind::Pp, 0);
    assert_eq!(pipeline, [0, stride, 2 * stride, 3 * stride]);
    let costs = Costs::for_cluster(&cluster, &[]);
    let again = again(&read, &costs, &Declared).expect("prices");
    assert_eq!(again.predicted.step_s, staged.predicted.step_s);
}

/// With orders of ranks and ways to keys open, each layout has the best of all, each priced by a call of its own; and
/// the ranking of a few is theirs.
#[test]
fn oracle_open_orders_and_ways_to_keys_are_the_best_of_all() {
    let (mut model, cluster, mut options) = small();
    model.layers.truncate(4);
    options.batch = Batch {
        seq_len: 65_536,
        global_batch: 8,
    };
    options.pins = "mbs=1,vpp=1,etp=1".parse().expect("degrees");
    options.recompute = Some(Recompute::Full.into());
    (options.order, options.cp_comm) = (None, None);
    let few = run(&model, &cluster, 16, &options);
    options.top = usize::MAX;
    let open = run(&model, &cluster, 16, &options);
    assert!(open.plans.len() > few.plans.len());
    assert_eq!(few.plans[..], open.plans[..few.plans.len()]);
    let counted = &open.search;
    assert_eq!(
        counted.priced + counted.pruned + counted.refused.values().sum::<u64>(),
        counted.space
    );

    let costs = Costs::for_cluster(&cluster, &[]);
    let mut alone = std::collections::BTreeMap::new();
    let every = SearchOptions {
        order: Some(Order::PP_LAST),
        ..options.clone()
    };
    for plan in run(&model, &cluster, 16, &every).plans {
        let pins = plan.layout.pinned();
        let mut best: Option<(f64, Order, CpComm)> = None;
        for (cp_comm, order) in CpComm::ALL
            .into_iter()
            .flat_map(|way| [(way, Order::PP_LAST), (way, Order::DP_LAST)])
        {
            let own = SearchOptions {
                order: Some(order),
                cp_comm: Some(cp_comm),
                pins,
                ..options.clone()
            };
            let Ok(found) = search::plan(&model, &cluster, 16, &own, &costs, &Declared) else {
                continue;
            };
            let step_s = found.plans[0].predicted.step_s;
            if best.is_none_or(|(least, ..)| step_s < least) {
                best = Some((step_s, order, cp_comm));
            }
        }
        alone.insert(format!("{:?}", plan.layout), best.expect("one"));
    }
    assert_eq!(open.plans.len(), alone.len());
    let mut seen = [0; 2];
    for plan in &open.plans {
        let (step_s, order, cp_comm) = alone[&format!("{:?}", plan.layout)];
        assert_eq!(plan.predicted.step_s, step_s, "{:?}", plan.layout);
        seen[0] += usize::from(plan.rank_order.is_some());
        seen[1] += usize::from(plan.cp_comm() != CpComm::P2p);
        // What of a tie is taken does not matter, what wins alone does.
        if order != Order::PP_LAST {
            assert_eq!(plan.rank_order, Some(order), "{:?}", plan.layout);
        }
        if plan.layout.cp > 1 && cp_comm != CpComm::P2p {
            assert_ne!(plan.cp_comm(), CpComm::P2p, "{:?}", plan.layout);
        }
    }
    assert!(seen.iter().all(|&seen| seen > 0), "{seen:?}");

    // Runners-up may be what the plan itself is not, and are read.
    let (best, rest) = (few.plans[0].clone(), few.alternatives);
    let mut plan = Plan::of(best, &model, &cluster, 16, &options);
    plan.alternatives = rest;
    let text = serde_json::to_string(&plan).expect("plain data");
    let read = Plan::parse(&text, Path::new("plan.json")).expect("a plan");
    assert_eq!(read.alternatives, plan.alternatives);
}

/// With what leaves for the host open, the best is that of all sets of modules, each priced by a search of its own, but
/// for those that the answer does not say it tried.
#[test]
fn oracle_open_offloading_is_the_best_of_all_sets_that_were_tried() {
    let (mut model, cluster, mut options) = small();
    model.layers.truncate(4);
    options.pins = "mbs=1,cp=1,vpp=1,etp=1".parse().expect("degrees");
    options.top = 3;
    let peak = run(&model, &cluster, 8, &options).plans[0]
        .predicted
        .peak_gib;
    let costs = Costs::for_cluster(&cluster, &[]);
    let mut won = std::collections::BTreeSet::new();
    for share in [1.1, 0.95, 0.9, 0.85, 0.8] {
        options.memory_gib = Some(share * peak);
        let open = SearchOptions {
            offload: None,
            ..options.clone()
        };
        let open = run(&model, &cluster, 8, &open);
        let together = &open.search.offloaded_together;
        let set = |bits: u8| {
            let modules = OffloadModule::ALL.into_iter();
            Offload::of(modules.filter(|module| bits >> *module as u8 & 1 == 1))
        };
        let is_union = |set: &Offload| {
            together.iter().all(|part| {
                let left = part.modules().filter(|module| set.covers(*module)).count();
                left == 0 || left == part.modules().count()
            })
        };
        let alone = |offload: Offload| {
            let own = SearchOptions {
                offload: Some(offload),
                ..options.clone()
            };
            let found = search::plan(&model, &cluster, 8, &own, &costs, &Declared);
            Some(found.ok()?.plans[0].predicted.step_s)
        };
        let sets = (0..1 << OffloadModule::ALL.len()).map(set).filter(is_union);
        assert_eq!(sets.clone().count(), 1 << together.len());
        let least_s = sets.filter_map(alone).fold(f64::INFINITY, f64::min);
        assert_eq!(open.plans[0].predicted.step_s, least_s, "{share}");
        won.insert(open.plans[0].offload);
        let counted = &open.search;
        assert_eq!(
            counted.priced + counted.pruned + counted.refused.values().sum::<u64>(),
            counted.space
        );
    }
    assert!(won.contains(&Offload::NONE) && won.len() > 2, "{won:?}");
}

/// What is found under all graphs is legal with the recomputation that was asked for, and is read with its runners-up, whose
/// graphs may be others.
#[test]
fn plans_under_all_graphs_are_read_back_as_they_were() {
    let (mut model, cluster, mut options) = small();
    model.layers.truncate(4);
    options.pins = "mbs=1,cp=1,vpp=1,etp=1".parse().expect("degrees");
    options.graphs = None;
    let costs = Costs::for_cluster(&cluster, &[]);
    let peak = run(&model, &cluster, 8, &options).plans[0]
        .predicted
        .peak_gib;
    let given = |recompute: Recompute| (Some(recompute.into()), 2.0);
    let limits = [2.0, 0.97, 0.94, 0.9, 0.85, 0.8].map(|share| (None, share));
    let mut others = 0;
    for (recompute, share) in limits
        .into_iter()
        .chain([given(Recompute::Full), given(Recompute::None)])
    {
        options.recompute = recompute;
        options.memory_gib = Some(share * peak);
        let Ok(found) = search::plan(&model, &cluster, 8, &options, &costs, &Declared) else {
            continue;
        };
        let best = found.plans[0].clone();
        let runners_up = found.alternatives.iter();
        others += runners_up
            .filter(|other| other.cuda_graph != best.cuda_graph)
            .count();
        let mut plan = Plan::of(best, &model, &cluster, 8, &options);
        plan.alternatives = found.alternatives;
        let text = serde_json::to_string(&plan).expect("plain data");
        let read = Plan::parse(&text, Path::new("plan.json")).expect("a plan");
        assert_eq!(read, plan);
    }
    assert!(others > 0, "some are others");
}
