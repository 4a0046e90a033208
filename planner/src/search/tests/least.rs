//! What no split takes less than, against all of them where ranks have little room.

use moefold_profiles::pricing::Costs;
use moefold_profiles::statistics::median;

use super::{cluster, cuts, run};
use crate::choice::{ScheduleName, StackName};
use crate::layout::{Batch, Layout};
use crate::model::{Model, presets};
use crate::options::SearchOptions;
use crate::rules::{Rules, Variants};
use crate::search::candidate::{Case, StageSplit};
use crate::search::judged::candidates;
use crate::search::questions;
use crate::search::recompute::Sets;
use crate::search::room::{Of, Room};
use crate::search::schedules::Schedules;
use crate::search::shape::{Question, Shapes};
use crate::search::unit::peak;
use crate::search::watch::unwatched;
use crate::search::{Asked, ENDLESS_GIB, stages};
use crate::stack::ByLayer;
use crate::stack::megatron::Declared;

/// Layers of the model: dense ones first.
const LAYERS: u32 = 6;

/// By how much bounds are below what they bound.
#[derive(Debug, Default)]
struct Off {
    /// The best of all splits, of one stage a rank and of several, by what recomputes: all layers alike, the first of stages, and
    /// each by itself.
    splits: [[Vec<f64>; 3]; 2],
    /// A split whose layers recompute by themselves.
    by_layer: Vec<f64>,
}

impl Off {
    /// All splits of a layout under a schedule, whose ranks have so much room.
    fn add(
        &mut self,
        asked: &Asked<'_>,
        (question, shapes): (&Question<'_>, &Shapes),
        (layout, schedule): (&Layout, ScheduleName),
        schedules: &Schedules,
        share: f64,
    ) {
        let case = |shape| Case {
            question,
            layout,
            shape,
            schedule,
        };
        let whole = case(shapes.all(question, 0));
        let held = case(shapes.held_under(question, schedule, (true, 0)));
        let occupancies = schedules.occupancies(layout, schedule);
        let moments = schedules.moments(layout, schedule);
        let simulated = schedules.simulated(layout, schedule);
        let all = cuts(LAYERS, layout.stages(), [1, 0]).into_iter();
        let all: Vec<StageSplit> = all.map(|cut| StageSplit::new(held, cut)).collect();
        let plain = &question.choices[0];
        let of_plain = all
            .iter()
            .map(|split| peak(&split.memory(held, plain, occupancies)));
        let capacity = of_plain.min().expect("a cut").scale(share);
        let options = SearchOptions {
            memory_gib: Some(capacity.gib()),
            ..question.options.clone()
        };
        let rules = &Rules::of(asked.model, &options);
        let options = &options;
        let question = &questions::question(&Asked { options, ..*asked }, rules).expect("legal");
        let capacity = question.capacity();
        let [whole, held] = [whole, held].map(|case| Case { question, ..case });
        let room = Room::new(whole, moments, capacity).expect("whole weights");
        let step_s = |split: &StageSplit, sets: &Sets| {
            let times = split.times(held, sets);
            simulated.simulator().run(&times).total.seconds().0
        };
        let fits = |split: &StageSplit, sets: &Sets| {
            peak(&split.memory(held, sets, occupancies)) <= capacity
        };
        let set = question.sets.len() - 1;
        let first = (1..3).map(|layers| Sets::First { layers, set });
        let alike = question.choices.iter().step_by(7).cloned();
        for (kind, sets) in alike
            .map(|sets| (0, sets))
            .chain(first.map(|sets| (1, sets)))
        {
            let fitting = all.iter().filter(|split| fits(split, &sets));
            let each = fitting.map(|split| (split, step_s(split, &sets)));
            self.check(
                kind,
                (whole, &room),
                Of::Choice(&sets),
                &each.collect::<Vec<_>>(),
            );
        }
        let by_layer = all.iter().filter_map(|split| {
            let sets = split.by_layer(held, occupancies);
            let sets = sets.filter(|sets| fits(split, sets))?;
            let own_s = step_s(split, &sets);
            if question.by_layer == Some(ByLayer::Each) {
                let bound_s = split.mixed_bound_s(held, occupancies, &simulated);
                let name = || format!("{layout:?} {schedule:?} {:?}", split.stages);
                assert!(bound_s <= own_s, "{}: {bound_s} {own_s}", name());
                self.by_layer.push(own_s / bound_s - 1.0);
            }
            Some((split, own_s))
        });
        let by_layer: Vec<_> = by_layer.collect();
        self.check(2, (whole, &room), Of::Any, &by_layer);
    }

    /// No split takes less than the bound, and none that takes little is not open.
    fn check(
        &mut self,
        kind: usize,
        (case, room): (Case<'_>, &Room<'_>),
        of: Of<'_>,
        each: &[(&StageSplit, f64)],
    ) {
        let by_time = |a: &&(&StageSplit, f64), b: &&(&StageSplit, f64)| a.1.total_cmp(&b.1);
        let Some(&(_, best_s)) = each.iter().min_by(by_time) else {
            return;
        };
        let name = || format!("{:?} {:?} {of:?}", case.layout, case.schedule);
        assert!(room.may_hold(of), "{}", name());
        let most = room.most(of);
        let sets = match of {
            Of::Choice(sets) => sets,
            Of::Any | Of::Some(_) => &case.question.choices[0],
        };
        let bound_s = stages::least_s(case, sets, &most, 1e6);
        assert!(bound_s <= best_s, "{}: {bound_s} {best_s}", name());
        let several = usize::from(case.layout.vpp() > 1);
        self.splits[several][kind].push(best_s / bound_s - 1.0);
        let below_s = 1.02 * best_s;
        let open = stages::open_cuts(case, sets, &most, (below_s, 1000)).expect("few");
        for (split, _) in each.iter().filter(|(_, own_s)| *own_s < below_s) {
            assert!(
                open.contains(&split.stages),
                "{}: {:?}",
                name(),
                split.stages
            );
        }
    }
}

/// Of layouts of a small model, under a schedule where one is named.
fn of_layers(stack: StackName, schedule: Option<ScheduleName>, every: usize) -> Off {
    let mut model: Model = presets::load("deepseek-v3").expect("a preset");
    model.layers.drain(LAYERS as usize + 1..);
    model.layers.drain(..1);
    let mut cluster = cluster("dgx-h100");
    cluster.gpu.memory_gib = ENDLESS_GIB;
    let batch = Batch {
        seq_len: 4096,
        global_batch: 64,
    };
    let options = SearchOptions {
        schedule,
        ..SearchOptions::new(batch, stack)
    };
    let (costs, rules) = (
        Costs::for_cluster(&cluster, &[]),
        Rules::of(&model, &options),
    );
    let asked = Asked::new(&model, &cluster, 16, &options, &costs, &Declared);
    let question = &questions::question(&asked, &rules).expect("legal");
    let layouts = candidates(
        std::slice::from_ref(question),
        (16, Variants::Few),
        &rules,
        &unwatched,
    );
    let layouts = layouts.expect("unwatched").layouts;
    let schedules = Schedules::new(question, &layouts, &unwatched).expect("unwatched");
    let is_cut = |layout: &&Layout| layout.pp() > 1 && layout.stages() <= LAYERS;
    let mut off = Off::default();
    for layout in layouts.iter().filter(is_cut).step_by(every) {
        let shapes = Shapes::new(layout);
        for schedule in question.schedules(layout.pp(), layout.vpp()) {
            for share in [1.2, 0.9, 0.75] {
                let of = (question, &shapes);
                off.add(&asked, of, (layout, schedule), &schedules, share);
            }
        }
    }
    off
}

/// Whatever recomputes, and in whatever order passes run; and bounds are near.
#[test]
fn law_no_split_that_has_room_takes_less_than_its_bound() {
    let [one, several] = [[0.06, 0.1, 0.15], [0.26, 0.46, 0.48]];
    check_bounds(of_layers(StackName::Megatron, None, 7), [one, several]);
    let [one, several] = [[0.025, 0.06, 0.035], [0.17, 0.2, 0.22]];
    check_bounds(of_layers(StackName::Moefold, None, 7), [one, several]);
    // Which are bounded whatever their order.
    let back = [
        ScheduleName::ZbV,
        ScheduleName::VHalf,
        ScheduleName::VMin,
        ScheduleName::DualpipeV,
    ];
    for schedule in back {
        let off = of_layers(StackName::Moefold, Some(schedule), 31);
        assert!(off.splits[1].iter().all(|off| off.len() > 10), "{off:?}");
    }
}

fn check_bounds(off: Off, usual: [[f64; 3]; 2]) {
    let usual = usual.as_flattened();
    for (number, (off, most)) in off.splits.into_iter().flatten().zip(usual).enumerate() {
        let count = off.len();
        let usual = median(off).expect("some");
        assert!(count > 100 && usual < *most, "{number} {count}: {usual}");
    }
    if let Some(usual) = median(off.by_layer) {
        assert!(usual < 0.005, "{usual}");
    }
}

/// What interleaved ranks compute again for want of room is most of what bounds them where there is little.
#[test]
fn golden_ranks_of_several_stages_are_bounded_by_their_room() {
    let model = presets::load("qwen3-235b-a22b").expect("a preset");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 256,
    };
    let options = SearchOptions {
        pins: "tp=1,cp=1,pp=8,vpp=2,ep=8,etp=1,mbs=1"
            .parse()
            .expect("degrees"),
        ..SearchOptions::new(batch, StackName::Moefold)
    };
    let found = run(&model, &cluster("dgx-h100"), 128, &options);
    let gap = found.search.gap;
    assert!(gap < 0.25, "{gap}");
}
