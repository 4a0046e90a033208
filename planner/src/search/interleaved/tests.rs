//! The best of splits against all that there are.

use std::ops::ControlFlow;

use moefold_profiles::pricing::Costs;
use moefold_profiles::random::SplitMix64;
use moefold_profiles::units::Bytes;

use super::super::unit::Unit;
use super::*;
use crate::choice::{Optimizer, ScheduleName, StackName, Zero};
use crate::layout::{Batch, Layout};
use crate::model::presets;
use crate::options::{Routing, SearchOptions};
use crate::rules::{Rules, Variants};
use crate::runtime::{StageMemory, WorkingSets};
use crate::search::Asked;
use crate::search::by_set::BySet;
use crate::search::judged::candidates;
use crate::search::questions::question;
use crate::search::schedules::Schedules;
use crate::search::shape::{Shape, Shapes};
use crate::search::stages::hides;
use crate::search::tests::cuts;
use crate::search::watch::{self, Phase, Progress};
use crate::stack::megatron::Declared;

/// How many cases were looked at, of how many some splits had no room, and in how many stages of equal size were not the best.
#[derive(Debug, Default)]
struct Seen {
    cases: usize,
    full: usize,
    uneven: usize,
    /// Whose limits were narrowed by probes.
    narrowed: usize,
    /// Of how many a few rows say of two recompute sets at once that no split takes a tenth less than the best.
    over: usize,
}

/// The best split that has room is found and is known to be, whatever the room.
fn check(
    name: &str,
    layers: &[usize],
    (stack, optimizer, routing): (StackName, Optimizer, Option<Routing>),
    overlap: Option<&str>,
    every: usize,
) -> Seen {
    let options = SearchOptions {
        optimizer,
        routing,
        overlap: overlap.map(|overlap| overlap.parse().expect("overlaps")),
        ..SearchOptions::new(BATCH, stack)
    };
    let mut seen = Seen::default();
    each_layout(
        (name, layers),
        &options,
        every,
        |question, layout, schedules| {
            see(question, layout, schedules, &mut seen);
        },
    );
    seen
}

/// Looks that nothing stops.
fn unwatched() -> Looks<'static> {
    Looks::new(&watch::unwatched, Phase::Looking, 1)
}

const BATCH: Batch = Batch {
    seq_len: 4096,
    global_batch: 64,
};

/// Does something with every n-th layout of some layers of a model on 16 GPUs that is a pipeline, or where gradients are divided, none.
fn each_layout(
    (name, layers): (&str, &[usize]),
    options: &SearchOptions,
    every: usize,
    mut with: impl FnMut(&mut Question<'_>, &Layout, &Schedules),
) {
    let mut model = presets::load(name).expect("a preset");
    let own = layers.iter().map(|&layer| model.layers[layer].clone());
    model.layers = own.collect();
    let cluster = &moefold_profiles::presets::cluster("dgx-h100").expect("a preset");
    let costs = &Costs::for_cluster(cluster, &[]);
    let rules = &Rules::of(&model, options);
    let asked = Asked::new(&model, cluster, 16, options, costs, &Declared);
    let mut question = question(&asked, rules).expect("legal");
    let found = candidates(
        std::slice::from_ref(&question),
        (16, Variants::Few),
        rules,
        &watch::unwatched,
    );
    let layouts = found.expect("unwatched").layouts;
    let schedules = &Schedules::new(&question, &layouts, &watch::unwatched).expect("unwatched");
    let most = layers.len() as u32 + 1;
    let is_asked = |layout: &&Layout| {
        let is_pipeline = layout.pp() > 1;
        is_pipeline != options.zero.divides_gradients() && layout.stages() <= most
    };
    for layout in layouts.iter().filter(is_asked).step_by(every) {
        with(&mut question, layout, schedules);
    }
}

/// The best splits of a layout under some recompute sets, with and without a limit of memory.
fn see(question: &mut Question<'_>, layout: &Layout, schedules: &Schedules, seen: &mut Seen) {
    let num_layers = question.kind_of.len() as u32;
    let shapes = Shapes::new(layout);
    let names: Vec<_> = question.schedules(layout.pp(), layout.vpp()).collect();
    let set = question.sets.len() - 1;
    let first = (1..3).map(|layers| Sets::First { layers, set });
    let choices = question.choices.iter().step_by(7).cloned();
    // Behind the first half of layers all compute again.
    let of_layer = |layer| if layer < num_layers / 2 { 0 } else { set };
    let by_layer = Sets::Each((0..num_layers).map(of_layer).collect());
    let each: Vec<Sets> = choices.chain(first).chain([by_layer]).collect();
    let of_name = |name: ScheduleName| each.iter().map(move |sets| (name, sets));
    for (schedule, sets) in names.into_iter().flat_map(of_name) {
        let mut limit = None;
        for has_limit in [false, true] {
            question.limit = limit.filter(|_| has_limit);
            let case = Case {
                question,
                layout,
                shape: shapes.held_under(question, schedule, (true, 0)),
                schedule,
            };
            if !Interleaved::may_look(case) {
                continue;
            }
            let (most, is_so) = check_case((case, sets), num_layers, schedules);
            let [is_uneven, is_narrowed, is_over] = is_so;
            limit = Some(most);
            seen.cases += 1;
            seen.full += usize::from(has_limit);
            seen.uneven += usize::from(is_uneven);
            seen.narrowed += usize::from(is_narrowed);
            seen.over += usize::from(is_over);
        }
    }
}

/// The longest paths under some recompute sets, where nothing needs room.
fn paths<'q>(
    of: (Case<'q>, &Sets),
    most: &Most,
    under: (Simulated, &'q [Vec<Occupancy>]),
) -> Option<Paths<'q>> {
    let endless = f64::INFINITY;
    let mut splits = Interleaved::new(of, (None, most), under, (0.0, endless));
    let mut best_s = endless;
    while splits.least_s() < best_s {
        let found = splits.look((best_s, usize::MAX), None, &unwatched());
        best_s = found.map_or(best_s, |best| best.step_s);
        let paths = splits.paths();
        if paths.is_some() {
            return paths;
        }
    }
    None
}

/// The same of a case, of whose splits no cut is above what one takes, no row of memory is above one that has room, and no probe takes one
/// away that takes less than is known. Memory that two of three have no room in, whether the best has stages that differ, whether
/// probes took splits away, and whether it is known at once of it and of the fastest set that no split takes a tenth less.
fn check_case(
    (case, sets): (Case<'_>, &Sets),
    num_layers: u32,
    schedules: &Schedules,
) -> (Bytes, [bool; 3]) {
    let (layout, schedule) = (case.layout, case.schedule);
    let occupancies = schedules.occupancies(layout, schedule);
    let simulated = || schedules.simulated(layout, schedule);
    let ends = [u32::from(layout.stages() <= num_layers), 0];
    let of_split = |stages: Vec<Vec<u32>>| {
        let split = StageSplit::new(case, stages);
        let times = split.times(case, sets);
        let step_s = simulated().simulator().run(&times).total.seconds().0;
        let peak = peak(&split.memory(case, sets, occupancies));
        (step_s, peak, split.stages)
    };
    let all = cuts(num_layers, layout.stages(), ends).into_iter();
    let mut all: Vec<_> = all.map(of_split).collect();
    all.sort_by_key(|(_, peak, _)| *peak);
    let third = all[all.len() / 3].1;
    let capacity = case.question.capacity();
    all.retain(|(_, peak, _)| *peak <= capacity);
    let best = all.iter().min_by(|a, b| a.0.total_cmp(&b.0));
    let room = Room::new(case, schedules.moments(layout, schedule), capacity);
    let room = room.expect("whole weights");
    let most = room.most(Of::Choice(sets));
    let under = (simulated(), occupancies);
    let mut splits = Interleaved::new(
        (case, sets),
        (Some(&room), &most),
        under,
        (0.0, f64::INFINITY),
    );
    let paths = paths(
        (case, &case.question.choices[0]),
        &most,
        (simulated(), occupancies),
    );
    if let Some(limits) = splits.limits.clone() {
        splits.ends = Ends::new(case, sets, &limits);
        splits.hiding = Hiding::new((case, sets), &limits, splits.simulated.simulator());
        let points = all.iter().map(|(step_s, _, stages)| {
            let sizes: Vec<u32> = stages.iter().map(|stage| stage.len() as u32).collect();
            (*step_s, Point::of(&splits.classes, &sizes))
        });
        let points: Vec<(f64, Point)> = points.collect();
        let at = points.iter().step_by(points.len() / 3 + 1);
        let own = at.map(|(_, point)| splits.cut(&limits, point));
        let of_first = paths
            .iter()
            .flat_map(|paths| splits.along_all(paths, &limits));
        let rows: Vec<Row> = own.chain(of_first).collect();
        for row in &rows {
            for (step_s, other) in &points {
                let least_s = row.value(other);
                assert!(
                    least_s <= *step_s,
                    "{layout:?} {sets:?}: {least_s} {step_s}"
                );
            }
        }
        for (_, point) in &points {
            let mut rows = splits.memory.iter().flatten();
            assert!(
                rows.all(|row| row.value(point) <= 1.0),
                "{layout:?} {sets:?}"
            );
        }
    }
    let mut is_narrowed = false;
    for (mut below_s, paths) in [
        (f64::INFINITY, None),
        (1.01 * best.map_or(1.0, |best| best.0), paths),
    ] {
        let (room, under) = ((Some(&room), &most), (simulated(), occupancies));
        let mut splits = Interleaved::new((case, sets), room, under, (0.0, below_s));
        let mut found = splits.look((below_s, usize::MAX), paths.as_ref(), &unwatched());
        for looks in 0.. {
            below_s = found.as_ref().map_or(below_s, |found| found.step_s);
            splits.close(below_s);
            if splits.least_s() == f64::INFINITY {
                break;
            }
            is_narrowed |= probes_leave(&splits, below_s, &all);
            found = splits
                .look((below_s, usize::MAX), None, &unwatched())
                .or(found);
            assert!(looks < 20_000, "{layout:?} {schedule:?} {sets:?}");
        }
        let is_best = match (best, &found) {
            (Some(best), Some(found)) => {
                best.0 <= found.step_s && splits.enough_s(found.step_s) <= best.0
            }
            (best, found) => best.is_none() && found.is_none(),
        };
        assert!(
            is_best,
            "{layout:?} {schedule:?} {sets:?} {capacity:?}: {best:?} {found:?}"
        );
    }
    let differ = |(.., stages): &(f64, Bytes, Vec<Vec<u32>>)| {
        stages.iter().any(|stage| stage.len() != stages[0].len())
    };
    let is_over = best.is_some_and(|best| is_over((case, sets), (&room, schedules), best.0));
    (third, [best.is_some_and(differ), is_narrowed, is_over])
}

/// Whether it is known at once of some recompute set and of the first, which is the fastest, that no split takes a tenth less than the best
/// under it; never that none takes as long.
fn is_over(
    (case, sets): (Case<'_>, &Sets),
    (room, schedules): (&Room<'_>, &Schedules),
    best_s: f64,
) -> bool {
    let Sets::Every(set) = *sets else {
        return false;
    };
    if case.schedule.combines() || hides(case) {
        return false;
    }
    let (both, occupancies) = ([0, set], schedules.occupancies(case.layout, case.schedule));
    let most = room.most(Of::Some(&both));
    let is_over = |below_s| {
        let under = (schedules.simulated(case.layout, case.schedule), occupancies);
        let within = (Some(room), &most, &both[..]);
        let fastest = (case, &Sets::Every(0));
        let mut splits = Interleaved::of_any(fastest, within, under, (0.0, below_s));
        splits.glance(below_s, None)
    };
    assert!(
        !is_over(best_s * (1.0 + 2.0 * NEAR) + 1e-7),
        "{:?} {set}",
        case.layout
    );
    is_over(0.9 * best_s)
}

/// Whether probes narrow the limits of splits, of which none is lost that takes less than something.
fn probes_leave(
    splits: &Interleaved<'_>,
    below_s: f64,
    all: &[(f64, Bytes, Vec<Vec<u32>>)],
) -> bool {
    let [node] = &splits.open[..] else {
        return false;
    };
    let holds = |limits: &Limits, stages: &[Vec<u32>]| holds(splits.case.layout, limits, stages);
    let (narrowed, _) = splits.probed(node, (below_s, usize::MAX), &unwatched());
    for (step_s, _, stages) in all {
        let is_left = || {
            narrowed
                .as_ref()
                .is_some_and(|limits| holds(limits, stages))
        };
        assert!(
            *step_s >= splits.enough_s(below_s) || !holds(&node.limits, stages) || is_left(),
            "{stages:?}: {step_s} {below_s}"
        );
    }
    narrowed.as_ref() != Some(&node.limits)
}

/// Whether a split is within some limits.
fn holds(layout: &Layout, limits: &Limits, stages: &[Vec<u32>]) -> bool {
    let sizes: Vec<u32> = stages.iter().map(|stage| stage.len() as u32).collect();
    let ranks =
        (0..limits.ranks.len()).map(|rank| own(layout, rank).map(|stage| sizes[stage]).sum());
    let ranks: Vec<u32> = ranks.collect();
    let each = sizes.iter().zip(&limits.stages);
    let mut each = each.chain(ranks.iter().zip(&limits.ranks));
    each.all(|(layers, [fewest, most])| (fewest..=most).contains(&layers))
}

/// Where each layer computes again what it may by itself, the least that is known of all splits and of each is no more than any choice takes
/// that has room.
#[test]
fn law_no_choice_of_each_layer_takes_less() {
    for (name, layers, every) in [
        ("mixtral-8x7b", [0; 7], 31),
        ("deepseek-v2-lite", [0, 0, 1, 1, 1, 1, 1], 67),
    ] {
        let (mut full, mut near) = (0, 0);
        let options = SearchOptions::new(BATCH, StackName::Moefold);
        let mut random = SplitMix64::new(41);
        each_layout(
            (name, &layers),
            &options,
            every,
            |question, layout, schedules| {
                for share in each_choice((question, layout, schedules), &mut random) {
                    full += 1;
                    near += u32::from(share > 0.93);
                }
            },
        );
        assert!(full > 10 && near * 2 > full, "{name}: {near} of {full}");
    }
}

/// Of the choices of all layers that have room, the one that is found takes the least, also where gradients rest divided: all are tried.
#[test]
fn oracle_no_choice_of_layers_is_better_in_the_step() {
    let models = [
        ("mixtral-8x7b", &[0; 4][..]),
        ("deepseek-v2-lite", &[0, 1, 1][..]),
    ];
    for (zero, seq_len, every) in [(Zero::States, 4096, [7, 67]), (Zero::Fsdp, 512, [19, 131])] {
        let (mut full, mut divided) = (0, 0);
        for (layers, every) in models.into_iter().zip(every) {
            let options = SearchOptions {
                zero,
                ..SearchOptions::new(Batch { seq_len, ..BATCH }, StackName::Moefold)
            };
            each_layout(layers, &options, every, |question, layout, schedules| {
                if layout.vpp() == 1 && layout.pp() > 1 {
                    return;
                }
                let own = each_in_step((question, layout, schedules));
                full += own.len();
                divided += own.into_iter().filter(|is_divided| *is_divided).count();
            });
        }
        assert!(full > 20 && divided > 5, "{zero:?}: {divided} of {full}");
    }
}

/// Where layers choose, their order says what they work in.
fn order(shape: &mut Shape) {
    let ends = [&mut shape.embedding, &mut shape.head];
    for kind in shape.kinds.iter_mut().chain(ends) {
        let ordered = |set| StageMemory {
            sets: WorkingSets::default(),
            ..kind.memory.under(set)
        };
        let each: Vec<StageMemory> = (0..kind.memory.len()).map(ordered).collect();
        kind.memory = BySet::new(&each);
    }
}

/// Of a layout under less and less memory, whether choices had to be divided to know the best.
fn each_in_step(
    (question, layout, schedules): (&mut Question<'_>, &Layout, &Schedules),
) -> Vec<bool> {
    let shapes = Shapes::new(layout);
    let schedule = question.schedules(layout.pp(), layout.vpp()).next();
    let Some(schedule) = schedule else {
        return Vec::new();
    };
    let layers = question.kind_of.len() as u32;
    let occupancies = schedules.occupancies(layout, schedule);
    let simulated = schedules.simulated(layout, schedule);
    let mut all: Vec<([f64; 2], Bytes)> = Vec::new();
    let mut divided = Vec::new();
    for limit in [None, Some(6), Some(3), Some(1)] {
        let mut peaks: Vec<Bytes> = all.iter().map(|(_, peak)| *peak).collect();
        peaks.sort_unstable();
        question.limit = limit.map(|part| peaks[peaks.len() * part / 10]);
        let mut shape = shapes.held_under(question, schedule, (true, 0)).clone();
        order(&mut shape);
        let case = Case {
            question,
            layout,
            shape: &shape,
            schedule,
        };
        let ends = [u32::from(layout.stages() <= layers), 0];
        let stages = cuts(layers, layout.stages(), ends).swap_remove(0);
        let split = StageSplit::new(case, stages);
        if limit.is_none() {
            let each = question.kind_of.iter().map(|&kind| {
                let kind = &case.shape.kinds[kind];
                (0..kind.memory.len()).collect::<Vec<usize>>()
            });
            let mut choices: Vec<Vec<usize>> = vec![Vec::new()];
            for own in each {
                let with = |before: Vec<usize>| {
                    let each = own.iter().map(move |set| [&before[..], &[*set]].concat());
                    each.collect::<Vec<_>>()
                };
                choices = choices.into_iter().flat_map(with).collect();
            }
            let of_choice = |sets: Vec<usize>| {
                // Where all layers choose alike that is a choice for all, which is priced otherwise.
                let ways = [Sets::Each(sets.clone()), Sets::each(sets)];
                let steps_s = ways.each_ref().map(|sets| {
                    let times = split.times(case, sets);
                    simulated.simulator().run(&times).total.seconds().0
                });
                (steps_s, peak(&split.memory(case, &ways[0], occupancies)))
            };
            all = choices.into_par_iter().map(of_choice).collect();
            continue;
        }
        let fits = all.iter().filter(|(_, peak)| *peak <= question.capacity());
        let each = fits.map(|(steps_s, _)| *steps_s);
        let [line_s, least_s] = each.fold([f64::INFINITY; 2], |least, own| {
            [0, 1].map(|price| f64::min(least[price], own[price]))
        });
        let bound_s = split.mixed_bound_s(case, occupancies, &simulated);
        assert!(
            bound_s <= line_s * (1.0 + NEAR),
            "{layout:?} {limit:?}: {bound_s} {line_s}"
        );
        let found = |below_s, parts, looks: &Looks<'_>| {
            let under = (occupancies, &simulated);
            let found = split.by_layer_in_step(case, under, (below_s, parts), looks);
            let best_s = found.best.map_or(f64::INFINITY, |best| best.0);
            assert!(
                found.least_s <= line_s * (1.0 + 2.0 * NEAR),
                "{layout:?} {limit:?} below {below_s}: {} {line_s}",
                found.least_s
            );
            (best_s, found.least_s)
        };
        let (best_s, known_s) = found(f64::INFINITY, usize::MAX, &unwatched());
        let is_near = |own_s: f64| {
            (own_s / line_s - 1.0).abs() < 2.0 * NEAR || (own_s / least_s - 1.0).abs() < 2.0 * NEAR
        };
        let what = format!("{layout:?} {limit:?}: {best_s} {known_s} {line_s} {least_s}");
        assert!(is_near(best_s) && is_near(known_s), "{what}");
        if question.shards_gradients() {
            // No part is left open whose only choice is priced otherwise.
            assert!(
                best_s.is_infinite() || known_s >= best_s * (1.0 - 2.0 * NEAR),
                "{what}"
            );
        }
        let (none_s, below_s) = found(0.9 * best_s, usize::MAX, &unwatched());
        assert!(none_s == f64::INFINITY && below_s == 0.9 * best_s, "{what}");
        let (above_s, _) = found(1.1 * best_s, usize::MAX, &unwatched());
        assert!((above_s / best_s - 1.0).abs() < 2.0 * NEAR, "{what}");
        let stop = |_: &Progress| ControlFlow::Break(());
        found(
            f64::INFINITY,
            usize::MAX,
            &Looks::new(&stop, Phase::Looking, 1),
        );
        let (_, first_s) = found(f64::INFINITY, 1, &unwatched());
        divided.push(first_s < line_s * (1.0 - 2.0 * NEAR));
    }
    divided
}

/// Seconds and bytes of ways to compute again.
type Ways = Vec<(f64, Bytes)>;

/// Of a layout under less and less memory, what is known as a share of what the best choice takes that was tried.
fn each_choice(
    (question, layout, schedules): (&mut Question<'_>, &Layout, &Schedules),
    random: &mut SplitMix64,
) -> Vec<f64> {
    let shapes = &[Shapes::new(layout)];
    let unit = &Unit {
        layout,
        shapes,
        schedules,
        floor: 0.0,
    };
    let schedule = question.schedules(layout.pp(), layout.vpp()).next();
    let Some(schedule) = schedule else {
        return Vec::new();
    };
    let layers = question.kind_of.len() as u32;
    let mut of_ways = question.choices.clone();
    for _ in 0..30 {
        let of_layer = |_| random.below(question.sets.len() as u64) as usize;
        of_ways.push(Sets::Each((0..layers).map(of_layer).collect()));
    }
    let mut rows = 0;
    let occupancies = schedules.occupancies(layout, schedule);
    let ends = [u32::from(layout.stages() <= layers), 0];
    let mut all: Vec<(Vec<u32>, Ways)> = Vec::new();
    let mut shares = Vec::new();
    for limit in [None, Some(7), Some(3), Some(1)] {
        let peaks = all.iter().flat_map(|(_, ways)| ways);
        let mut peaks: Vec<Bytes> = peaks.map(|(_, peak)| *peak).collect();
        peaks.sort_unstable();
        question.limit = limit.map(|part| peaks[peaks.len() * part / 10]);
        let shape = shapes[0].held_under(question, schedule, (true, 0));
        let case = unit.case(question, shape, schedule);
        let simulated = || schedules.simulated(layout, schedule);
        let of_sets = |split: &StageSplit, sets: &Sets| {
            let times = split.times(case, sets);
            let step = simulated().simulator().run(&times).total.seconds().0;
            (step, peak(&split.memory(case, sets, occupancies)))
        };
        if limit.is_none() {
            for stages in cuts(layers, layout.stages(), ends) {
                let sizes = stages.iter().map(|stage| stage.len() as u32).collect();
                let split = StageSplit::new(case, stages);
                let each = of_ways.iter().map(|sets| of_sets(&split, sets));
                all.push((sizes, each.collect()));
            }
        }
        let capacity = question.capacity();
        // And the choices of each layer that the search makes.
        let best = |(number, (sizes, ways)): (usize, &(Vec<u32>, Ways))| {
            let split = StageSplit::new(case, stages_of(sizes));
            let closer = || closer((case, &split), (occupancies, &simulated()));
            let closer = number.is_multiple_of(11).then(closer).flatten();
            let chosen = split.by_layer(case, occupancies).into_iter().chain(closer);
            let chosen: Vec<_> = chosen.map(|sets| of_sets(&split, &sets)).collect();
            let fits = ways.iter().chain(&chosen);
            let fits = fits.filter(|(_, peak)| *peak <= capacity);
            let best_s = fits
                .map(|(step_s, _)| *step_s)
                .fold(f64::INFINITY, f64::min);
            (sizes.clone(), best_s)
        };
        let each: Vec<(Vec<u32>, f64)> = all.iter().enumerate().map(best).collect();
        let best_s = each.iter().map(|(_, best_s)| *best_s);
        let best_s = best_s.fold(f64::INFINITY, f64::min);
        for (sizes, best_s) in &each {
            let split = StageSplit::new(case, stages_of(sizes));
            let least = unit.by_layer(case, &split, (0.0, 0), &unwatched());
            let bound_s = least.least_s;
            assert!(
                bound_s <= best_s * (1.0 + NEAR),
                "{layout:?} {limit:?} {sizes:?}: {bound_s} {best_s}"
            );
        }
        if best_s == f64::INFINITY || !Interleaved::may_look(case) {
            continue;
        }
        let room = unit.room(case, capacity).expect("whole weights");
        let most = room.most(Of::Any);
        let mut splits = Interleaved::by_layer(
            case,
            (Some(&room), &most),
            (simulated(), occupancies),
            (0.0, 1.01 * best_s),
        );
        let least_s = looked_through(&mut splits, &each);
        let fitting = |ways: &Ways| -> Vec<&Sets> {
            let each = of_ways.iter().zip(ways);
            let fitting = each.filter(|(_, (_, peak))| *peak <= capacity);
            fitting.map(|(sets, _)| sets).collect()
        };
        for (sizes, ways) in all.iter().step_by(5) {
            rows += ranks_compute_again(&splits, sizes, &fitting(ways));
        }
        if limit.is_some() {
            shares.push(least_s / best_s);
        }
    }
    assert!(
        rows > 0 || shares.is_empty(),
        "{layout:?}: nothing is asked of whole layers"
    );
    shares
}

/// The choice of the layers of a split that comes up first in the step.
fn closer(
    (case, split): (Case<'_>, &StageSplit),
    under: (&[Vec<Occupancy>], &Simulated),
) -> Option<Sets> {
    let found = split.by_layer_in_step(case, under, (f64::INFINITY, 1), &unwatched());
    found.best.map(|(_, sets)| sets)
}

/// What splits take at least, which for none is more than the best of each that is known.
fn looked_through(splits: &mut Interleaved<'_>, each: &[(Vec<u32>, f64)]) -> f64 {
    let layout = splits.case.layout;
    let best_s = each.iter().map(|(_, best_s)| *best_s);
    let best_s = best_s.fold(f64::INFINITY, f64::min);
    let mut least_s = 1.01 * best_s;
    while splits.least_s() < least_s {
        let found = splits.look((least_s, usize::MAX), None, &unwatched());
        least_s = found.map_or(least_s, |found| found.step_s);
        splits.close(least_s);
    }
    assert!(
        least_s <= best_s * (1.0 + NEAR),
        "{layout:?}: {least_s} {best_s}"
    );
    for (sizes, best_s) in each.iter().filter(|(_, best_s)| *best_s < f64::INFINITY) {
        let (own_s, _) = splits.least_of_split_s(sizes, &mut Again::new());
        assert!(
            own_s.is_some_and(|own_s| own_s <= best_s * (1.0 + NEAR)),
            "{layout:?} {sizes:?}: {own_s:?} {best_s}"
        );
    }
    least_s
}

/// Of how many ranks of a split it is known what they compute again at least, which is no more than any of some choices does that fit.
fn ranks_compute_again(splits: &Interleaved<'_>, sizes: &[u32], choices: &[&Sets]) -> usize {
    let (case, stages) = (splits.case, stages_of(sizes));
    let limits = Limits::of(case.layout, sizes);
    let mut found = Again::new();
    let ranks = 0..limits.ranks.len();
    let known = ranks.filter(|&rank| {
        let points = splits.least_of_rank(&limits, rank, &mut found);
        let least_s = points.as_ref().map(|points| points.first().map(|of| of[1]));
        for sets in choices {
            let layers = own(case.layout, rank).flat_map(|stage| &stages[stage]);
            let again = layers.map(|&layer| {
                let kind = &case.shape.kinds[case.question.kind_of[layer as usize]];
                kind.again_s(sets.least(layer))
            });
            let again_s = again.sum::<f64>() * (1.0 + 1e-9) + 1e-12;
            let is_more = least_s.is_none_or(|least_s| least_s.is_some_and(|s| s <= again_s));
            assert!(
                is_more,
                "{:?} {rank} {sizes:?} {sets:?}: {least_s:?} {again_s}",
                case.layout
            );
        }
        points.is_some()
    });
    known.count()
}

#[test]
fn oracle_the_best_of_all_splits_is_found() {
    use Optimizer::{Adam, Muon};
    use StackName::{Megatron, Moefold};
    let combined = Some("grad-reduce,param-gather,p2p,expert-alltoall");
    let mut all_over = 0;
    let delayed = Some("grad-reduce,param-gather,p2p,expert-alltoall,delay-wgrad");
    for (name, layers, stack, optimizer, overlap, every) in [
        ("mixtral-8x7b", &[0; 9][..], Megatron, Adam, None, 127),
        ("mixtral-8x7b", &[0; 7], Moefold, Adam, None, 61),
        // Passes hide exchanges of each other.
        ("mixtral-8x7b", &[0; 9], Megatron, Adam, combined, 127),
        ("mixtral-8x7b", &[0; 9], Megatron, Adam, delayed, 127),
        ("mixtral-8x7b", &[0; 7], Moefold, Adam, delayed, 127),
        (
            "deepseek-v2-lite",
            &[0, 0, 1, 1, 1, 1, 1, 1],
            Megatron,
            Adam,
            delayed,
            127,
        ),
        // Layers of two kinds: dense ones first, and in turns.
        (
            "deepseek-v2-lite",
            &[0, 0, 1, 1, 1, 1, 1, 1],
            Megatron,
            Adam,
            None,
            127,
        ),
        (
            "deepseek-v2-lite",
            &[0, 0, 1, 1, 1, 1, 1, 1],
            Megatron,
            Muon,
            None,
            269,
        ),
        (
            "gpt-oss-120b",
            &[0, 1, 2, 3, 4, 5, 6, 7],
            Megatron,
            Adam,
            None,
            41,
        ),
        (
            "qwen3-next-80b-a3b",
            &[0, 1, 2, 3, 4, 5, 6, 7],
            Moefold,
            Adam,
            None,
            67,
        ),
    ] {
        let seen = check(name, layers, (stack, optimizer, None), overlap, every);
        let Seen {
            cases,
            full,
            uneven,
            narrowed,
            over,
        } = seen;
        all_over += over;
        assert!(
            cases > 20 && full > 10 && uneven > 10 && narrowed > 10,
            "{name}: {seen:?}"
        );
    }
    assert!(all_over > 20, "{all_over}");
    // Each layer takes as long as its busiest expert: there are more kinds than of which is known how much passes hide.
    let of_layer = |layer: u32| {
        let mut tokens = vec![8.0; 8];
        tokens[0] += f64::from(layer * layer % 11);
        tokens
    };
    let lists: Vec<Vec<f64>> = (0..9).map(of_layer).collect();
    for (overlap, every) in [(None, 257), (combined, 127), (delayed, 257)] {
        let routing = Some(Routing::new("h.json", &lists).expect("a histogram"));
        let of = (Megatron, Adam, routing);
        let seen = check("mixtral-8x7b", &[0; 9], of, overlap, every);
        assert!(seen.cases > 20 && seen.uneven > 10, "{seen:?}");
    }
}
