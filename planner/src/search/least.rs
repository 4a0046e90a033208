//! What no split of a layout takes less than.

use std::collections::BTreeSet;

use rayon::prelude::*;

use super::candidate::StageSplit;
use super::interleaved::{Best, Interleaved};
use super::recompute::Sets;
use super::room::{Most, Of, Room};
use super::shape::{Question, Shapes};
use super::stages;
use super::unit::Unit;
use super::watch::Looks;
use crate::choice::ScheduleName;
use crate::options::Effort;
use crate::stack::ByLayer;

/// Of how many open splits of the best plan's layout all are tried.
const SPLITS: usize = 1000;
/// How much [work](Interleaved::work) is done to find it, where they are too many: up to fifteen seconds or so on two cores.
const WORK: usize = 10_000_000;
/// The same of another layout, whose splits are to take less than those of the best.
const BRIEF_WORK: usize = 24_000;
/// How many choices of recompute sets are looked at at once.
const AT_ONCE: usize = 2;

/// Seconds that no child of a unit takes less than which may fit, however its layers are split; or `within_s`, where that
/// is less.
pub(crate) fn least_of_splits_s(questions: &[Question<'_>], unit: &Unit<'_>, within_s: f64) -> f64 {
    let mut least_s = within_s;
    for (question, shapes) in questions.iter().zip(unit.shapes) {
        for (under, _) in unit.schedules(question) {
            for index in 0..shapes.first(question).len() {
                least_s = least_of_shape_s((question, unit), shapes, index, under, least_s);
            }
        }
    }
    least_s
}

/// The same of one of its shapes under a schedule.
fn least_of_shape_s(
    (question, unit): (&Question<'_>, &Unit<'_>),
    shapes: &Shapes,
    index: usize,
    schedule: ScheduleName,
    within_s: f64,
) -> f64 {
    let (capacity, choices) = (question.capacity(), &question.choices);
    let case = |shape| unit.case(question, shape, schedule);
    let endless = Most::default();
    // No other choice takes less than the first.
    let first = &shapes.first(question)[index];
    let least_s = stages::least_s(case(first), &choices[0], &endless, within_s);
    if least_s >= within_s {
        return within_s;
    }
    let held = |all| shapes.held_under(question, schedule, (all, index));
    let (first, of) = (held(false), Of::Choice(&choices[0]));
    let is_least = |room: Room<'_>| {
        let most = room.may_hold(of).then(|| room.most(of));
        let of_most = |most| stages::least_s(case(first), &choices[0], &most, within_s);
        most.is_some_and(|most| of_most(most) <= least_s)
    };
    if unit.room(case(first), capacity).is_none_or(is_least) {
        return least_s;
    }
    let shape = held(choices.len() > 1);
    let room = unit.room(case(shape), capacity);
    let room = room.expect("there was one of the first choice");
    // How many layers ranks may hold, where all have places.
    let most = |of: Of<'_>| room.may_hold(of).then(|| room.most(of));
    let mut least_s = within_s;
    each_way(question, |sets, of| {
        if stages::least_s(case(shape), sets, &endless, least_s) >= least_s {
            return Some(false);
        }
        if let Some(most) = most(of) {
            least_s = stages::least_s(case(shape), sets, &most, least_s);
        }
        Some(true)
    });
    least_s
}

/// Does something with each way to recompute, and with what is asked of a room then: with the choices of recompute sets, and where
/// layers may choose, with the first for all that they may choose, or with so many layers at the beginning of each stage as long as
/// these may still win, which it says: more take longer. None where it has had enough.
fn each_way(
    question: &Question<'_>,
    mut with: impl FnMut(&Sets, Of<'_>) -> Option<bool>,
) -> Option<()> {
    for sets in &question.choices {
        with(sets, Of::Choice(sets))?;
    }
    match question.by_layer.filter(|_| question.choices.len() > 1) {
        Some(ByLayer::Each) => {
            with(&question.choices[0], Of::Any)?;
        }
        Some(ByLayer::Block) => {
            let set = question.sets.len() - 1;
            for layers in 1..=question.kind_of.len() as u32 {
                let sets = Sets::First { layers, set };
                if !with(&sets, Of::Choice(&sets))? {
                    break;
                }
            }
        }
        None => {}
    }
    Some(())
}

/// Which splits of a layout are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Splits {
    /// All that may be its best.
    All,
    /// The same of ranks with several stages, of a layout that takes hardly longer than the best, with a tenth of the work.
    Next,
    /// For a moment, better ones of ranks with several stages.
    Better,
}

/// Splits that may take less than some time and have room.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) splits: BTreeSet<Vec<Vec<u32>>>,
    /// Seconds that no other takes less than, nor one of them where each layer computes again what it may by itself: not all ways to do so
    /// are tried.
    pub(crate) left_s: f64,
}

impl Default for Open {
    fn default() -> Self {
        Self {
            splits: BTreeSet::new(),
            left_s: f64::INFINITY,
        }
    }
}

impl Open {
    /// With those of another layout.
    pub(crate) fn add(&mut self, other: Self) {
        self.splits.extend(other.splits);
        self.left_s = self.left_s.min(other.left_s);
    }

    /// With some splits; where these are too many or not known, says what none takes less than.
    fn add_splits(&mut self, splits: Option<Vec<Vec<Vec<u32>>>>, least_s: impl FnOnce() -> f64) {
        let splits = splits.unwrap_or_else(|| {
            self.left_s = self.left_s.min(least_s());
            Vec::new()
        });
        self.splits.extend(splits);
        if self.splits.len() > SPLITS {
            self.left_s = 0.0;
            self.splits.clear();
        }
    }

    /// With the best of splits that take less than some time, as far as it is found in so much work.
    fn add_best(
        &mut self,
        mut all: Vec<Interleaved<'_>>,
        (below_s, most): (f64, usize),
        looks: &Looks<'_>,
    ) {
        let least = |a: &Best, b: &Best| a.step_s.total_cmp(&b.step_s);
        let mut best: Option<Best> = None;
        let (mut paths, mut is_led) = (None, false);
        let mut done = 0;
        loop {
            let below_s = best.as_ref().map_or(below_s, |best| best.step_s);
            for splits in &mut all {
                splits.close(below_s);
            }
            all.retain(|splits| splits.least_s() < f64::INFINITY);
            // One is looked at until nothing is gained without dividing its splits; others begin with its paths.
            paths = paths.or_else(|| all.first().and_then(Interleaved::paths));
            is_led |= paths.is_some() || all.first().is_some_and(Interleaved::is_divided);
            if is_led {
                all.sort_by(|a, b| a.least_s().total_cmp(&b.least_s()));
            }
            let at_once = if is_led { AT_ONCE } else { 1 };
            let Some(least_s) = all.iter().map(Interleaved::least_s).reduce(f64::min) else {
                break;
            };
            if done >= most || looks.begin().is_break() {
                self.left_s = self.left_s.min(least_s);
                break;
            }
            let next = all.par_iter_mut().take(at_once);
            let looked: Vec<(Option<Best>, usize)> = next
                .map(|splits| {
                    let before = splits.work();
                    let found = splits.look((below_s, most - done), paths.as_ref(), looks);
                    (found, splits.work() - before)
                })
                .collect();
            done += looked.iter().map(|(_, work)| work).sum::<usize>();
            let found = looked.into_iter().filter_map(|(found, _)| found);
            if let Some(found) = found.min_by(least) {
                let before = best.replace(found);
                // Where layers choose its seconds are no more than it takes: one before it may take less.
                let may_win = before.filter(|_| all.iter().any(Interleaved::is_by_layer));
                self.splits.extend(may_win.map(|before| before.stages));
            }
        }
        if let Some(best) = best {
            self.left_s = self.left_s.min(best.step_s);
            self.splits.insert(best.stages);
        }
    }
}

/// Seconds that one split of a unit takes no less than where each layer computes again what it may by itself, in every shape and
/// under every schedule.
pub(crate) fn least_by_layer_s(
    questions: &[Question<'_>],
    unit: &Unit<'_>,
    stages: &[Vec<u32>],
) -> f64 {
    let mut least_s = f64::INFINITY;
    for (question, shapes) in questions.iter().zip(unit.shapes) {
        if question.by_layer != Some(ByLayer::Each) {
            continue;
        }
        for (schedule, _) in unit.schedules(question) {
            for index in 0..shapes.first(question).len() {
                let shape = shapes.held_under(question, schedule, (true, index));
                let case = unit.case(question, shape, schedule);
                let split = StageSplit::new(case, stages.to_vec());
                least_s = least_s.min(unit.by_layer_bound_s(case, &split));
            }
        }
    }
    least_s
}

/// Splits of a unit that may take less than `below_s` and have room: where ranks have several stages, or splits are too many to try, the best, if
/// it does.
pub(crate) fn open_splits(
    questions: &[Question<'_>],
    unit: &Unit<'_>,
    (below_s, which): (f64, Splits),
    looks: &Looks<'_>,
) -> Open {
    let mut open = Open::default();
    let (mut interleaved, mut by_layer) = (Vec::new(), Vec::new());
    for (question, shapes) in questions.iter().zip(unit.shapes) {
        let each = shapes.first(question).iter().enumerate();
        for ((index, first), (schedule, occupancies)) in
            each.flat_map(|shape| unit.schedules(question).map(move |under| (shape, under)))
        {
            let case = |shape| unit.case(question, shape, schedule);
            let least_s = |shape, sets: &Sets| {
                let endless = &Most::default();
                stages::least_s(case(shape), sets, endless, below_s)
            };
            // No other choice takes less than the first.
            if least_s(first, &question.choices[0]) >= below_s {
                continue;
            }
            let all = question.choices.len() > 1;
            let shape = shapes.held_under(question, schedule, (all, index));
            let case = case(shape);
            let room = unit.room(case, question.capacity());
            each_way(question, |sets, of| {
                if least_s(shape, sets) >= below_s {
                    return Some(false);
                }
                let most = match &room {
                    Some(room) if !room.may_hold(of) => return Some(true),
                    Some(room) => room.most(of),
                    None => Most::default(),
                };
                let of_choice = matches!(of, Of::Choice(_));
                let several = case.layout.vpp() > 1;
                let looks_at_all = Interleaved::may_look(case);
                if which != Splits::All && !(several && looks_at_all) {
                    open.left_s = 0.0;
                    return None;
                }
                // Where ranks have one stage each, splits that a bound leaves open may be few enough to try all.
                let limit = if looks_at_all {
                    SPLITS - open.splits.len()
                } else {
                    SPLITS
                };
                let cuts = || stages::open_cuts(case, sets, &most, (below_s, limit));
                let cuts = if several && looks_at_all {
                    None
                } else {
                    cuts()
                };
                if cuts.is_none() && looks_at_all {
                    let simulated = unit.schedules.simulated(unit.layout, schedule);
                    let (room, schedule) = ((room.as_ref(), &most), (simulated, occupancies));
                    let within_s = (least_s(shape, sets), below_s);
                    if !of_choice {
                        if which == Splits::Better {
                            return None;
                        }
                        by_layer.push(Interleaved::by_layer(case, room, schedule, within_s));
                        return Some(true);
                    }
                    let splits = Interleaved::new((case, sets), room, schedule, within_s);
                    // More layers than a stage has do not compute again, and fewer were asked for before.
                    let is_chosen = question.choices.contains(sets);
                    let is_more = splits.largest().is_some_and(
                        |most| matches!(sets, Sets::First { layers, .. } if !is_chosen && *layers > most),
                    );
                    interleaved.extend((!is_more).then_some(splits));
                    return Some(!is_more);
                }
                let least_s = || stages::least_s(case, sets, &most, below_s);
                let cuts = match cuts {
                    Some(cuts) if !of_choice => cuts,
                    cuts => {
                        open.add_splits(cuts, least_s);
                        return Some(true);
                    }
                };
                for cut in cuts {
                    let split = StageSplit::new(case, cut);
                    let bound_s = unit.by_layer_bound_s(case, &split);
                    if bound_s < below_s {
                        open.left_s = open.left_s.min(bound_s);
                        open.add_splits(Some(vec![split.stages]), || bound_s);
                    }
                }
                Some(true)
            });
        }
    }
    let effort = questions.iter().map(|question| question.options.effort);
    let most = match (which, effort.max()) {
        (Splits::Better, _) | (_, Some(Effort::Brief)) => BRIEF_WORK,
        (_, Some(Effort::Patient)) => usize::MAX,
        (Splits::Next, _) => WORK / 10,
        (Splits::All, _) => WORK,
    };
    open.add_best(interleaved, (below_s, most), looks);
    // The best of these takes so long at least.
    open.add_best(by_layer, (below_s, most), looks);
    open
}
