//! What no split of a layout takes less than, and which may take less than something.

use std::collections::BTreeSet;

use rayon::prelude::*;

use super::candidate::{Case, PARTS, StageSplit};
use super::interleaved::{Best, Interleaved, Paths};
use super::recompute::Sets;
use super::room::{Most, Of, Room};
use super::shape::{Kind, Question, Shapes};
use super::stages;
use super::unit::{Unit, peak};
use super::watch::Looks;
use crate::choice::{RecomputePlan, ScheduleName};
use crate::memory::Occupancy;
use crate::options::Effort;
use crate::stack::ByLayer;

/// Of how many open splits of the best plan's layout all are tried.
const SPLITS: usize = 1000;
/// How much [work](Interleaved::work) is done to find it, where they are too many: up to fifteen seconds or so on two cores.
const WORK: usize = 10_000_000;
/// The same of another layout, whose splits are to take less than those of the best.
const BRIEF_WORK: usize = 24_000;
/// The same at a glance.
const GLANCE: usize = 4000;
/// What a split counts that is listed to be tried.
const CUT: usize = 8;
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
        let may_be_last = matches!(sets, Sets::First { .. });
        if may_be_last && stages::least_s(case(shape), sets, &endless, least_s) >= least_s {
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
    /// The same of any layout, as far as a glance does not rule them out.
    Glance,
    /// The same of a layout that is open after a glance.
    Other,
}

impl Splits {
    /// Whether ways to recompute are glanced at together before they are looked at one by one.
    fn glances(self) -> bool {
        matches!(self, Self::Glance | Self::Other)
    }

    /// How many parts of the choices of a split's layers are looked at for the best in the step, where so many splits are open.
    fn parts(self, effort: Effort, splits: usize) -> usize {
        match (self, effort) {
            (Self::All | Self::Other, Effort::Patient) => usize::MAX,
            (Self::All, _) if splits == 1 => PARTS,
            _ => 0,
        }
    }

    /// How much work is done at most.
    fn work(self, effort: Option<Effort>) -> usize {
        match (self, effort) {
            (Self::Glance, _) => GLANCE,
            (Self::Better, _) | (_, Some(Effort::Brief)) => BRIEF_WORK,
            (_, Some(Effort::Patient)) => usize::MAX,
            (Self::Next, _) => WORK / 10,
            (Self::All | Self::Other, _) => WORK,
        }
    }
}

/// Splits that may take less than some time and have room.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) splits: BTreeSet<Vec<Vec<u32>>>,
    /// Splits with the best choice that was found of what each layer computes again by itself.
    pub(crate) chosen: Vec<(Vec<Vec<u32>>, RecomputePlan)>,
    /// Seconds that no other takes less than, nor one of them where each layer computes again what it may by itself: not all ways to do so
    /// are tried.
    pub(crate) left_s: f64,
}

impl Default for Open {
    fn default() -> Self {
        Self {
            splits: BTreeSet::new(),
            chosen: Vec::new(),
            left_s: f64::INFINITY,
        }
    }
}

impl Open {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.splits.is_empty() && self.chosen.is_empty()
    }

    /// With those of another layout.
    pub(crate) fn add(&mut self, other: Self) {
        self.splits.extend(other.splits);
        self.chosen.extend(other.chosen);
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
    fn add_best<'q>(
        &mut self,
        (mut all, mut paths): (Vec<Interleaved<'q>>, Option<Paths<'q>>),
        (below_s, most): (f64, usize),
        looks: &Looks<'_>,
    ) {
        let least = |a: &Best, b: &Best| a.step_s.total_cmp(&b.step_s);
        let mut best: Option<Best> = None;
        let mut is_led = false;
        let mut done = 0;
        loop {
            let below_s = best.as_ref().map_or(below_s, |best| best.step_s);
            for splits in &mut all {
                splits.close(below_s);
            }
            all.retain(|splits| splits.least_s() < f64::INFINITY);
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
            let chosen = all.iter().map(Interleaved::left_s);
            self.left_s = chosen.fold(self.left_s, f64::min);
            // One is looked at until it is closed or nothing is gained without dividing its splits; others begin with its paths, or with
            // those of the last that was closed.
            let closed = all.iter().take(at_once).rev().find_map(Interleaved::paths);
            paths = closed.or(paths);
            let found = looked.into_iter().filter_map(|(found, _)| found);
            if let Some(found) = found.min_by(least) {
                let before = best.replace(found);
                // Where its seconds are no more than it takes one before it may take less.
                let may_win = before.filter(|_| all.iter().any(Interleaved::is_bound));
                self.splits.extend(may_win.map(|before| before.stages));
            }
        }
        if let Some(best) = best {
            self.left_s = self.left_s.min(best.step_s);
            match best.recompute {
                Some(recompute) => self.chosen.push((best.stages, recompute)),
                None => _ = self.splits.insert(best.stages),
            }
        }
    }
}

/// Cases whose splits are looked for by branch and bound.
#[derive(Default)]
struct LookedFor<'q> {
    each: Vec<Interleaved<'q>>,
    /// Where each layer computes again what it may by itself.
    by_layer: Vec<Interleaved<'q>>,
    /// Paths of some of them.
    paths: Option<Paths<'q>>,
    /// See [`Interleaved::work`]; splits that are listed count, too.
    work: usize,
}

impl<'q> LookedFor<'q> {
    /// Adds a case under those of some recompute sets for all layers that a glance leaves open: it is at many sets at once, and at half of
    /// them where that says nothing, with about so much work at most. What none takes less than of those that it was not at.
    fn add_open(
        &mut self,
        (unit, case): (&'q Unit<'_>, Case<'q>),
        (room, mut sets): (Option<&Room<'_>>, Vec<usize>),
        (below_s, most_work): (f64, usize),
        looks: &Looks<'_>,
    ) -> f64 {
        let shape = case.shape;
        let kinds = || shape.kinds.iter().chain([&shape.embedding, &shape.head]);
        let seconds = |set: usize| kinds().map(|kind| kind.backward_s[set]).sum::<f64>();
        sets.sort_by(|&a, &b| seconds(a).total_cmp(&seconds(b)).then(a.cmp(&b)));
        // What passes hide of each other may be more under sets that take longer.
        let adds_up = !case.schedule.combines() && !stages::hides(case);
        let are_slower = |sets: &[usize]| {
            let is_slower = |kind: &Kind| {
                let mut each = sets.iter().map(|&set| kind.backward_s[set]);
                each.all(|own| kind.backward_s[sets[0]] <= own)
            };
            adds_up && kinds().all(is_slower)
        };
        let mut left_s = f64::INFINITY;
        let mut groups = vec![(sets, 0.0)];
        while let Some((mut group, mut known_s)) = groups.pop() {
            if self.work > most_work || looks.look().is_break() {
                left_s = left_s.min(known_s);
                continue;
            }
            if group.len() == 1 || are_slower(&group) {
                let fastest = Sets::Every(group[0]);
                let most = room.map_or_else(Most::default, |room| room.most(Of::Some(&group)));
                let simulated = unit.schedules.simulated(unit.layout, case.schedule);
                let occupancies = unit.schedules.occupancies(unit.layout, case.schedule);
                let floor_s = stages::least_s(case, &fastest, &Most::default(), below_s);
                let mut all = Interleaved::of_any(
                    (case, &fastest),
                    (room, &most, &group),
                    (simulated, occupancies),
                    (floor_s, below_s),
                );
                let is_over = all.glance(below_s, self.paths.as_ref());
                self.work += all.work();
                self.paths = all.paths().or(self.paths.take());
                if is_over {
                    continue;
                }
                known_s = all.least_s();
                if group.len() == 1 {
                    self.each.push(all);
                    continue;
                }
            }
            let slower = group.split_off(group.len().div_ceil(2));
            groups.extend([slower, group].map(|group| (group, known_s)));
        }
        left_s
    }
}

/// Splits of a unit that may take less than `below_s` and have room: where ranks have several stages, or splits are too many to try, the best, if
/// it does.
pub(crate) fn open_splits(
    questions: &[Question<'_>],
    unit: &Unit<'_>,
    (below_s, which): (f64, Splits),
    looks: &Looks<'_>,
) -> Open {
    let effort = questions.iter().map(|question| question.options.effort);
    let most = which.work(effort.max());
    let (mut open, mut looked_for) = (Open::default(), LookedFor::default());
    for (question, shapes) in questions.iter().zip(unit.shapes) {
        let each = shapes.first(question).iter().enumerate();
        for ((index, first), (schedule, _)) in
            each.flat_map(|shape| unit.schedules(question).map(move |under| (shape, under)))
        {
            let case = |shape| unit.case(question, shape, schedule);
            // No other choice takes less than the first.
            let endless = &Most::default();
            let least_s = stages::least_s(case(first), &question.choices[0], endless, below_s);
            if least_s >= below_s {
                continue;
            }
            let all = question.choices.len() > 1;
            let shape = shapes.held_under(question, schedule, (all, index));
            let of = (unit, case(shape));
            let found = (&mut open, &mut looked_for);
            open_of_case(of, (below_s, which, most), found, looks);
        }
    }
    let LookedFor {
        each,
        by_layer,
        paths,
        ..
    } = looked_for;
    let work = if which == Splits::Glance { 0 } else { most };
    open.add_best((each, paths), (below_s, work), looks);
    // The best of these takes so long at least.
    open.add_best((by_layer, None), (below_s, work), looks);
    open
}

/// The same of a case: those that are tried, and what is looked for.
fn open_of_case<'q>(
    (unit, case): (&'q Unit<'_>, Case<'q>),
    (below_s, which, most_work): (f64, Splits, usize),
    (open, looked_for): (&mut Open, &mut LookedFor<'q>),
    looks: &Looks<'_>,
) {
    let question = case.question;
    let occupancies = unit.schedules.occupancies(unit.layout, case.schedule);
    let room = unit.room(case, question.capacity());
    let endless = &Most::default();
    let least_s = |sets: &Sets| stages::least_s(case, sets, endless, below_s);
    // Sets for all layers of which splits are looked for.
    let mut each_set = Vec::new();
    each_way(question, |sets, of| {
        if least_s(sets) >= below_s {
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
        let is_whole = which == Splits::All || which.glances();
        if !(is_whole || several && looks_at_all) {
            open.left_s = 0.0;
            return None;
        }
        if which.glances() && !looks_at_all && looked_for.work >= most_work {
            open.left_s = open.left_s.min(stages::least_s(case, sets, &most, below_s));
            return Some(true);
        }
        // Where ranks have one stage each, splits that a bound leaves open may be few enough to try all.
        let limit = if looks_at_all {
            SPLITS - open.splits.len()
        } else {
            SPLITS
        };
        let cuts = match &question.options.stages {
            Some(given) => Some(vec![given.stages().to_vec()]),
            None if several && looks_at_all => None,
            None => stages::open_cuts(case, sets, &most, (below_s, limit)),
        };
        if cuts.is_none() && looks_at_all {
            if let (true, Of::Choice(Sets::Every(set))) = (which.glances(), of) {
                each_set.push(*set);
                return Some(true);
            }
            let simulated = unit.schedules.simulated(unit.layout, case.schedule);
            let (room, schedule) = ((room.as_ref(), &most), (simulated, occupancies));
            let within_s = (least_s(sets), below_s);
            if !of_choice {
                if which == Splits::Better {
                    return None;
                }
                let all = Interleaved::by_layer(case, room, schedule, within_s);
                looked_for.by_layer.push(all);
                return Some(true);
            }
            let splits = Interleaved::new((case, sets), room, schedule, within_s);
            // More layers than a stage has do not compute again, and fewer were asked for before.
            let is_chosen = question.choices.contains(sets);
            let is_more = splits.largest().is_some_and(
                |most| matches!(sets, Sets::First { layers, .. } if !is_chosen && *layers > most),
            );
            looked_for.each.extend((!is_more).then_some(splits));
            return Some(!is_more);
        }
        looked_for.work += CUT * (1 + cuts.as_ref().map_or(SPLITS, Vec::len));
        let least_s = || stages::least_s(case, sets, &most, below_s);
        let cuts = match cuts {
            Some(cuts) if !of_choice => cuts,
            cuts => {
                let under = (sets, occupancies);
                let is_open = |cut: &Vec<Vec<u32>>| is_open((case, cut), under, below_s);
                let cuts = cuts.map(|cuts| cuts.into_iter().filter(is_open).collect());
                open.add_splits(cuts, least_s);
                return Some(true);
            }
        };
        let parts = which.parts(question.options.effort, cuts.len());
        let each = cuts.into_par_iter().map(|cut| {
            let split = StageSplit::new(case, cut);
            let found = unit.by_layer(case, &split, (below_s, parts), looks);
            (split.stages, found)
        });
        for (stages, found) in each.collect::<Vec<_>>() {
            if found.least_s < below_s {
                open.left_s = open.left_s.min(found.least_s);
                match found.best {
                    Some((_, sets)) => open.chosen.push((stages, question.recompute(&sets))),
                    // It was looked at, or is to be.
                    None if parts > 0 || which.glances() => {}
                    None => open.add_splits(Some(vec![stages]), || found.least_s),
                }
            }
        }
        Some(true)
    });
    if !each_set.is_empty() {
        let under = (room.as_ref(), each_set);
        let left_s = looked_for.add_open((unit, case), under, (below_s, most_work), looks);
        open.left_s = open.left_s.min(left_s);
    }
}

/// Whether a cut may take less than `below_s` under some recompute sets: of one stage, whose bound is its step, whether it does and has room.
fn is_open(
    (case, cut): (Case<'_>, &[Vec<u32>]),
    (sets, occupancies): (&Sets, &[Vec<Occupancy>]),
    below_s: f64,
) -> bool {
    if cut.len() > 1 {
        return true;
    }
    let split = StageSplit::new(case, cut.to_vec());
    let has_room = || peak(&split.memory(case, sets, occupancies)) <= case.question.capacity();
    split.bound(case, sets).seconds().0 < below_s && has_room()
}
