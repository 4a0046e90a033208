//! Oracles of pruning: what a search finds is what every candidate comes to that is asked for by itself.

use std::num::NonZeroU32;

use moefold_profiles::pricing::Costs;
use moefold_profiles::random::mix;
use moefold_profiles::{Cluster, Precision};

use super::{cluster, small};
use crate::answer::Candidate;
use crate::choice::{
    Capacity, CpComm, Dispatcher, DropPolicy, Graphs, PrimaryWeights, RecomputePlan, ScheduleName,
    StackName, Zero,
};
use crate::layout::PartialDegrees;
use crate::model::{Model, presets};
use crate::options::SearchOptions;
use crate::plan::{LayoutRecord, PlannedLayout};
use crate::rules::{Rules, graphs_to_try, space};
use crate::search::floor::floor_s;
use crate::search::front::LESS;
use crate::search::shape::Shape;
use crate::search::{Asked, plan, plan_briefly, questions, recompute};
use crate::stack::megatron::Declared;

/// What is searched, and how often a layout of it is drawn.
struct Space {
    model: Model,
    cluster: Cluster,
    gpus: u32,
    options: SearchOptions,
}

/// A small model on a machine that few of its layouts fit.
fn few_layers(layers: usize, memory_gib: f64) -> Space {
    let (mut model, mut cluster, mut options) = small();
    model.layers.truncate(layers);
    cluster.gpu.memory_gib = memory_gib;
    options.batch.global_batch = 16;
    options.memory_headroom = 0.0;
    Space {
        model,
        cluster,
        gpus: 8,
        options,
    }
}

/// V schedules, each named: no search tries them where nothing is said.
fn vees() -> Vec<Space> {
    let all = [
        ScheduleName::ZbV,
        ScheduleName::VHalf,
        ScheduleName::VMin,
        ScheduleName::DualpipeVCombined,
    ];
    let space = |schedule: ScheduleName| {
        let mut space = few_layers(6, 30.0);
        space.options.stack = StackName::Moefold;
        space.options.precision = Precision::Bf16;
        space.options.schedule = Some(schedule);
        space.options.overlap = schedule
            .combines()
            .then(|| "expert-alltoall,delay-wgrad".parse().expect("kinds"));
        space.options.pins = "vpp=2,cp=1".parse().expect("degrees");
        space
    };
    all.map(space).into()
}

/// Context parallelism in levels.
fn levels() -> Vec<Space> {
    let mut space = few_layers(4, 40.0);
    space.gpus = 16;
    space.cluster.gpus_per_domain = 4;
    space.cluster.gpus_per_node = 4;
    space.options.cp_comm = Some(CpComm::Hierarchical);
    space.options.pins = "mbs=1,etp=1".parse().expect("degrees");
    vec![space]
}

/// FP8, with and without wide weights.
fn eight_bits() -> Vec<Space> {
    let recipes = [
        (Precision::Fp8, PrimaryWeights::Fp8),
        (Precision::Fp8Delayed, PrimaryWeights::Wide),
        (Precision::Fp8Blockwise, PrimaryWeights::Fp8),
    ];
    recipes
        .map(|(precision, primary)| {
            let mut space = few_layers(4, 24.0);
            space.options.precision = precision;
            space.options.primary_weights = primary;
            space.options.pins = "cp=1,etp=1".parse().expect("degrees");
            space
        })
        .into()
}

/// Collectives of tensor-parallel ranks beside products.
fn tensor_beside() -> Vec<Space> {
    let mut space = few_layers(4, 30.0);
    space.options.overlap = Some("grad-reduce,param-gather,p2p,tp".parse().expect("kinds"));
    space.options.pins = "cp=1".parse().expect("degrees");
    vec![space]
}

/// Weights and gradients that rest divided, over all replicas and inside instances of the optimizer; and gradients alone.
fn sharded() -> Vec<Space> {
    let forms = [
        (StackName::Megatron, Zero::Fsdp, 1, 20.0),
        (StackName::Megatron, Zero::Hybrid, 2, 28.0),
        (StackName::Megatron, Zero::Gradients, 1, 28.0),
        (StackName::Moefold, Zero::Fsdp, 1, 20.0),
    ];
    forms
        .map(|(stack, zero, instances, memory_gib)| {
            let mut space = few_layers(4, memory_gib);
            space.options.stack = stack;
            space.options.precision = Precision::Bf16;
            space.options.zero = zero;
            space.options.instances = instances;
            space.options.overlap = Some("grad-reduce,param-gather".parse().expect("kinds"));
            space.options.pins = "pp=1".parse().expect("degrees");
            space
        })
        .into()
}

/// CUDA graphs: of dense layers and shared experts, and under padding those of all experts.
fn graphs() -> Vec<Space> {
    let mut mixed = few_layers(4, 14.0);
    mixed.model = presets::load("deepseek-v2-lite").expect("a preset");
    mixed.model.layers.truncate(4);
    mixed.options.pins = "cp=1,etp=1,mbs=1".parse().expect("degrees");
    mixed.options.graphs = None;
    let mut padded = few_layers(3, 30.0);
    padded.options.pins = mixed.options.pins;
    padded.options.graphs = None;
    padded.options.capacity = Some(Capacity {
        factor: 1.0,
        drop_policy: DropPolicy::default(),
        pad: true,
    });
    vec![mixed, padded]
}

impl Space {
    fn found(&self, options: &SearchOptions) -> Vec<PlannedLayout> {
        let costs = Costs::for_cluster(&self.cluster, &[]);
        let asked = (&self.model, &self.cluster, self.gpus);
        let asked = Asked::new(asked.0, asked.1, asked.2, options, &costs, &Declared);
        plan_briefly(&asked).map_or_else(|_| Vec::new(), |found| found.plans)
    }

    /// What all layers may compute again, and under Megatron-Core all of the first of each stage.
    fn recomputed(&self) -> Vec<RecomputePlan> {
        let sets = recompute::sets(&self.model).into_iter();
        let all = sets.map(RecomputePlan::from);
        let layers = match self.options.stack {
            StackName::Megatron => self.model.layers.len() as u32,
            StackName::Moefold => 0,
        };
        let first = (1..=layers).filter_map(NonZeroU32::new);
        all.chain(first.map(RecomputePlan::first_of_stages))
            .collect()
    }

    /// The fastest of one layout, each candidate by a call of its own.
    fn alone(&self, pins: &PartialDegrees) -> Option<PlannedLayout> {
        let mut best: Option<PlannedLayout> = None;
        for under in graphs_to_try(&self.model, &self.options) {
            for again in self.recomputed() {
                let dispatchers = match under.dispatcher {
                    Some(one) => vec![one],
                    None => Dispatcher::ALL.to_vec(),
                };
                // Without an exchange they are one.
                let differ = if pins.ep == Some(1) {
                    1
                } else {
                    dispatchers.len()
                };
                for dispatcher in dispatchers.into_iter().take(differ) {
                    let options = SearchOptions {
                        pins: *pins,
                        top: 1,
                        recompute: Some(again.clone()),
                        dispatcher: Some(dispatcher),
                        ..under.clone()
                    };
                    let found = self.found(&options).into_iter().next();
                    let step_s = |plan: &PlannedLayout| plan.predicted.step_s;
                    if let Some(found) = found
                        && best
                            .as_ref()
                            .is_none_or(|best| step_s(&found) < step_s(best))
                    {
                        best = Some(found);
                    }
                }
            }
        }
        best
    }

    /// Holds one of `every` legal layouts to its candidates, and those that are asked for first to all.
    /// How many of them fit.
    fn check(&self, every: u64) -> u32 {
        let seed: u64 = match std::env::var("MOEFOLD_SEED") {
            Ok(seed) => seed.parse().expect("a number"),
            Err(_) => 1,
        };
        let all = self.found(&SearchOptions {
            top: usize::MAX,
            ..self.options.clone()
        });
        let few = self.found(&self.options);
        let listed = |plans: &[PlannedLayout]| -> Vec<(LayoutRecord, f64)> {
            let each = plans.iter().take(few.len());
            each.map(|plan| (plan.layout, plan.predicted.step_s))
                .collect()
        };
        assert!(
            !few.is_empty() && few[..] == all[..few.len()],
            "MOEFOLD_SEED={seed} {:?}: {:?} {:?}",
            self.options.zero,
            listed(&few),
            listed(&all)
        );
        let rules = Rules::of(&self.model, &self.options);
        let options = &self.options;
        let tuples = space(&self.model, self.gpus, &options.batch, &options.pins);
        let (mut seen, mut fit) = (0_u64, 0);
        for degrees in tuples {
            let Ok(layout) = rules.layout(&degrees) else {
                continue;
            };
            seen += 1;
            // Numbers far apart of those that come one after the other.
            let drawn = mix(seen + seed);
            if !drawn.is_multiple_of(every) {
                continue;
            }
            let record = LayoutRecord::from(&layout);
            let found = all.iter().find(|plan| plan.layout == record);
            let alone = self.alone(&record.pinned());
            let step_s = |plan: &PlannedLayout| plan.predicted.step_s;
            let own = alone.as_ref().map(step_s);
            let of_search = found.map(step_s);
            // Where layers may recompute by themselves they may be faster than all alike.
            let by_layer = self.options.stack == StackName::Moefold;
            let holds = match (of_search, own) {
                (Some(searched), Some(own)) if by_layer => searched <= own,
                (found, None) => by_layer || found.is_none(),
                (None, Some(_)) => false,
                // Parts of a step that take as long are summed in another order where graphs or dispatchers tie.
                (Some(searched), Some(own)) => (searched - own).abs() < NANOSECOND_S,
            };
            assert!(
                holds,
                "MOEFOLD_SEED={seed} {record:?}: {of_search:?} {own:?} {alone:?}"
            );
            fit += u32::from(own.is_some());
        }
        assert!(seen > 20, "{seen} layouts");
        fit
    }
}

/// What simulated time is rounded to.
const NANOSECOND_S: f64 = 1e-9;

fn check(spaces: &[Space], every: u64) {
    let fit: u32 = spaces.iter().map(|space| space.check(every)).sum();
    assert!(fit > 0, "of layouts drawn none fits");
}

#[test]
fn oracle_some_layouts_are_the_best_of_their_candidates() {
    check(&sharded(), 8);
    check(&vees(), 6);
    check(&levels(), 24);
    check(&eight_bits(), 16);
    check(&tensor_beside(), 20);
    check(&graphs(), 28);
}

#[test]
#[ignore = "takes minutes; some of it is above"]
fn oracle_all_layouts_are_the_best_of_their_candidates() {
    for spaces in [
        vees(),
        levels(),
        eight_bits(),
        tensor_beside(),
        sharded(),
        graphs(),
    ] {
        check(&spaces, 1);
    }
}

/// Candidates are counted that could have been: those of each choice of graphs, however few are looked at.
#[test]
fn law_candidates_of_all_graphs_are_counted() {
    for space in graphs() {
        let costs = Costs::for_cluster(&space.cluster, &[]);
        let count = |options: &SearchOptions| {
            let (model, cluster, gpus) = (&space.model, &space.cluster, space.gpus);
            let found = plan(model, cluster, gpus, options, &costs, &Declared);
            let search = found.expect("something fits").search;
            let refused: u64 = search.refused.values().sum();
            assert_eq!(search.space, refused + search.pruned + search.priced);
            search.space
        };
        let each = graphs_to_try(&space.model, &space.options);
        assert!(each.len() >= 7, "{}", each.len());
        let fixed: u64 = each.iter().map(count).sum();
        assert_eq!(count(&space.options), fixed);
    }
}

/// Those of each way to the keys of other ranks are counted, too.
#[test]
fn law_candidates_of_all_ways_to_keys_are_counted() {
    let model = presets::load("mixtral-8x7b").expect("a preset");
    let cluster = cluster("dgx-h100");
    let costs = Costs::for_cluster(&cluster, &[]);
    let (_, _, mut options) = small();
    options.pins = "tp=1,cp=2".parse().expect("degrees");
    let mut count = |way: Option<CpComm>| {
        options.cp_comm = way;
        let found = plan(&model, &cluster, 32, &options, &costs, &Declared);
        found.expect("something fits").search.space
    };
    // All divide the heads of so few ranks.
    let each = CpComm::ALL.map(|way| count(Some(way)));
    assert!(each.iter().all(|count| *count > 100), "{each:?}");
    assert_eq!(count(None), each.iter().sum::<u64>());
}

/// No layout takes less time under fewer graphs, which is what questions are left out by.
#[test]
fn law_more_graphs_take_no_more_time() {
    for name in ["deepseek-v2-lite", "qwen3-next-80b-a3b"] {
        let model = &presets::load(name).expect("a preset");
        let cluster = &cluster("gb200-nvl72");
        let (_, _, mut options) = small();
        options.graphs = None;
        let costs = &Costs::for_cluster(cluster, &[]);
        let rules = &Rules::of(model, &options);
        let variants = graphs_to_try(model, &options);
        let asked = Asked::new(model, cluster, 16, &options, costs, &Declared);
        let questions = questions(&asked, rules, &variants).expect("legal");
        let tuples = space(model, 16, &options.batch, &options.pins);
        let legal = tuples.filter_map(|degrees| rules.layout(&degrees).ok());
        let mut seen = 0;
        for layout in legal.step_by(97) {
            let first = Shape::under;
            let shapes: Vec<_> = questions
                .iter()
                .map(|of| first(of, &layout, &of.sets[..1]))
                .collect();
            for (own, question) in shapes.iter().zip(&questions) {
                for &above in &question.above {
                    for (less, more) in own.iter().zip(&shapes[above]) {
                        assert_eq!(less.dispatcher, more.dispatcher);
                        let [less, more] = [less, more].map(|shape| shape.work(question));
                        let floor = |work| floor_s(question, &layout, work);
                        assert!(
                            floor(&more) <= floor(&less) * (1.0 + 1e-12),
                            "{name} {layout:?} {} {}",
                            variants[above].fixed_graphs(),
                            question.options.fixed_graphs()
                        );
                        seen += 1;
                    }
                }
            }
        }
        assert!(seen > 500, "{seen}");
        let none = |options: &&SearchOptions| options.graphs == Some(Graphs::NONE);
        assert_eq!(variants.iter().filter(none).count(), 1);
    }
}

/// Step by step a front is what a search finds under less memory than the step before.
#[test]
fn oracle_a_front_is_what_searches_under_less_and_less_memory_find() {
    for (layers, graphs, stack) in [
        (32, Some(Graphs::NONE), StackName::Megatron),
        (8, None, StackName::Megatron),
        // Whose layers compute again one by one.
        (12, Some(Graphs::NONE), StackName::Moefold),
    ] {
        let (mut model, cluster, mut options) = small();
        model.layers.truncate(layers);
        options.graphs = graphs;
        options.stack = stack;
        options.pins = "cp=1,etp=1".parse().expect("degrees");
        options.front = 12;
        let costs = Costs::for_cluster(&cluster, &[]);
        let run = |options: &SearchOptions| {
            let asked = Asked::new(&model, &cluster, 16, options, &costs, &Declared);
            plan_briefly(&asked).ok()
        };
        let found = run(&options).expect("something fits");
        let mut feasible = found.search.feasible;
        options.front = 0;
        options.top = 1;
        let mut peak_gib = found.plans[0].predicted.peak_gib;
        let mut steps = 0;
        for _ in 0..12 {
            options.memory_gib = Some(peak_gib * (1.0 - LESS));
            let Some(next) = run(&options) else {
                break;
            };
            let next = &next.plans[0];
            peak_gib = next.predicted.peak_gib;
            let alike = |candidate: &Candidate| {
                candidate.layout == next.layout
                    && candidate.recompute == next.recompute
                    && candidate.peak_gib == peak_gib
                    // Rounded to nanoseconds, or the sum of parts.
                    && (candidate.step_s / next.predicted.step_s - 1.0).abs() < 1e-6
            };
            let place = feasible.iter().position(alike);
            let place = place.unwrap_or_else(|| panic!("{layers} {steps}: {:?}", next.layout));
            feasible.remove(place);
            steps += 1;
        }
        assert!(steps > 5, "{steps}");
    }
}
