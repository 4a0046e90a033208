//! [`Interleaved`]: the best split of layers into stages, by branch and bound.
//!
//! A step is as long as the longest path through its work, and any other split takes as long at least as that path does there: a linear
//! function of how many layers each stage has. Where passes are combined, what they hide of each other's exchanges is taken off by planes
//! above it ([`hiding`]), or where layers are of many kinds, all that they may hide; where each layer may compute again what it may by itself,
//! parts of layers do what has to for want of room. Paths that are the longest in some split, or in stages of parts of layers, are cuts of a
//! linear program, whose optimum no split beats (Kelley, The cutting-plane method for solving convex programs, 1960). A rank or a stage with a
//! part of a layer is divided into one with fewer layers and one with more, until no program takes less than the best split that was simulated.

mod again;
mod ends;
mod hiding;
mod probe;
mod program;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;

use ends::Ends;
use hiding::{Hides, Hiding};
use program::{Classes, Limits, MOST_KINDS, Point, Program, Row, Unsolved, WHOLE, passes_s};

use super::candidate::{Case, NEAR, StageSplit, message, own, spans};
use super::line::Line;
use super::recompute::Sets;
use super::room::{Most, Of, Room, SavedShares};
use super::schedules::Simulated;
use super::shape::{Kind, Question};
use super::unit::peak;
use super::watch::Looks;
use crate::choice::{RecomputePlan, ScheduleName};
use crate::memory::Occupancy;
use crate::options::Effort;
use crate::partition::stages_of;
use crate::simulate::{LongestPath, StageTimes};

/// What a time is rounded by at most, in seconds.
const ROUNDED_S: f64 = 0.5e-9;
/// Cuts that are added to a program at once at most.
const CUTS: usize = 8;
/// How often that is done for all splits together before they are divided.
const ROUNDS: usize = 15;
/// How often their layers are probed after that.
const SWEEPS: usize = 3;
/// From how many stages layers are moved, and to how many.
const MOVED: usize = 4;
/// As many rows of a program as it takes to find what a rank computes again.
const ROWS_OF_RANK: usize = 6;
/// How often a program of one split is cut, where layers choose.
const ROWS_OF_SPLIT: usize = 60;

/// Seconds that ranks compute again at least where layers choose, by rank and by the kinds of layers of its stages; infinite where these have
/// no room.
type Again = BTreeMap<(usize, Vec<Vec<usize>>), f64>;

/// Splits that are left to look at, and what is known of them.
struct Node {
    limits: Limits,
    /// Cuts that hold its point.
    rows: Vec<Row>,
    /// None where the program was not solved.
    point: Option<Point>,
    /// Seconds that none of them takes less than.
    least_s: f64,
    next: Next,
}

/// What is done next with splits that are left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// More cuts are added, and so often again.
    Cut(usize),
    /// Their layers are probed, so often at most.
    Probe(usize),
    Divide,
    /// It is one split, whose layers choose.
    Choose,
}

/// Splits of a case that [may be looked at](Self::may_look). See the module's documentation.
pub(crate) struct Interleaved<'q> {
    case: Case<'q>,
    sets: Sets,
    simulated: Simulated,
    occupancies: &'q [Vec<Occupancy>],
    /// By rank: what layers may take of it at each instant.
    memory: Vec<Vec<Row>>,
    classes: Classes,
    /// Those of all splits before they are looked at; none where there is no split.
    limits: Option<Limits>,
    /// Seconds that no split takes less than, before they are looked at.
    floor_s: f64,
    ends: Ends,
    hiding: Option<Hiding<'q>>,
    /// Whether each layer may compute again what it may by itself: seconds of a split are then what it takes at least.
    by_layer: bool,
    /// Whether it is asked then what whole layers compute again at least, and what of that is known.
    asks_for_whole: bool,
    known_again: Again,
    /// Splits that are left, none before they are looked at.
    open: Vec<Node>,
    /// Seconds that none takes less than whose layers have chosen.
    left_s: f64,
    /// The best split that was simulated.
    good: Option<Point>,
    /// Its seconds.
    good_s: f64,
    /// By layers of each stage, seconds of splits that were simulated; none of those that have no room.
    seen: BTreeMap<Vec<u32>, Option<f64>>,
    /// [`NEAR`], or more where passes are so short that rounding them to nanoseconds is.
    near: f64,
    /// Rows that were added to programs so far.
    added: usize,
    /// Whether splits are of any of some recompute sets for all layers.
    is_any: bool,
    /// The point and rows of the program that was solved last, where it says all that there is to say of its splits.
    last: Option<(Point, Vec<Row>)>,
}

/// Paths that are the longest near a point, by how many passes they have: what they take under other recompute sets is no less than the
/// step there either.
pub(crate) struct Paths<'q> {
    question: &'q Question<'q>,
    schedule: ScheduleName,
    longest: Vec<Arc<LongestPath>>,
    point: Point,
}

/// Lines and planes over layers that are near what is no line, where a point is.
struct Lines {
    /// See [`Ends::lines`].
    ends: Vec<[Line; 3]>,
    /// Where passes hide exchanges.
    hides: Option<Hides>,
}

/// The best split of some.
#[derive(Debug)]
pub(crate) struct Best {
    pub(crate) step_s: f64,
    pub(crate) stages: Vec<Vec<u32>>,
    /// What each layer computes again, where that is chosen one by one and known.
    pub(crate) recompute: Option<RecomputePlan>,
}

/// What is found of the splits of a node.
#[derive(Default)]
struct Looked {
    /// Those of them that may take less than what is known.
    left: Option<Node>,
    /// Splits that were tried, by layers of each stage, and their seconds where they have room.
    tried: Vec<(Vec<u32>, Option<f64>)>,
    /// Rows that were added to programs.
    added: usize,
    /// What ranks compute again at least.
    again: Again,
    /// The point and rows of a program that takes no less than what is known.
    closed: Option<(Point, Vec<Row>)>,
}

impl<'q> Interleaved<'q> {
    /// Splits that take less than something.
    pub(crate) fn new(
        (case, sets): (Case<'q>, &Sets),
        (room, most): (Option<&Room<'_>>, &Most),
        under: (Simulated, &'q [Vec<Occupancy>]),
        within_s: (f64, f64),
    ) -> Self {
        Self::of(
            (case, sets, Of::Choice(sets)),
            (room, most),
            under,
            within_s,
        )
    }

    /// Splits under any of some recompute sets for all layers: these take as long as under the fastest, and as much memory as under those that
    /// take the least.
    pub(crate) fn of_any(
        (case, fastest): (Case<'q>, &Sets),
        (room, most, sets): (Option<&Room<'_>>, &Most, &[usize]),
        under: (Simulated, &'q [Vec<Occupancy>]),
        within_s: (f64, f64),
    ) -> Self {
        let of = Of::Some(sets);
        Self {
            is_any: sets.len() > 1,
            ..Self::of((case, fastest, of), (room, most), under, within_s)
        }
    }

    /// The same where each layer may compute again what it may by itself, and what is found takes so long at least.
    pub(crate) fn by_layer(
        case: Case<'q>,
        (room, most): (Option<&Room<'_>>, &Most),
        under: (Simulated, &'q [Vec<Occupancy>]),
        within_s: (f64, f64),
    ) -> Self {
        let occupancies = under.1;
        let nothing = (case, &case.question.choices[0], Of::Any);
        let mut all = Self::of(nothing, (room, most), under, within_s);
        all.by_layer = true;
        // Of layers of many kinds, as with recorded routing, a program would have too many variables.
        if let Some(room) = room.filter(|_| all.classes.kinds.len() <= MOST_KINDS) {
            let (savers, shares) = room.by_layer(&all.classes.kinds, occupancies);
            let of_rank = |(rank, shares): (usize, Vec<SavedShares>)| {
                let own = || own(case.layout, rank);
                let rows = shares.iter().map(|of| Row::of_saved_memory(own(), of));
                rows.collect()
            };
            all.memory = shares.into_iter().enumerate().map(of_rank).collect();
            all.classes.savers = savers;
            all.asks_for_whole = all.classes.may_take_all(&case.shape.kinds);
        }
        all
    }

    fn of(
        (case, sets, of): (Case<'q>, &Sets, Of<'_>),
        (room, most): (Option<&Room<'_>>, &Most),
        (simulated, occupancies): (Simulated, &'q [Vec<Occupancy>]),
        (floor_s, below_s): (f64, f64),
    ) -> Self {
        let classes = Classes::new(case, sets);
        let limits = Limits::new(case.layout, &classes, most, below_s);
        let shares = room.map(|room| room.shares(of, occupancies));
        let shares = shares.unwrap_or_default().into_iter().enumerate();
        let memory = shares.map(|(rank, shares)| {
            let stages = own(case.layout, rank);
            let rows = shares
                .iter()
                .map(|of| Row::of_memory(&classes, stages.clone(), of));
            rows.collect()
        });
        Self {
            case,
            sets: sets.clone(),
            simulated,
            occupancies,
            memory: memory.collect(),
            near: NEAR.max(3.0 * ROUNDED_S / classes.shortest_s()),
            ends: Ends::default(),
            hiding: None,
            by_layer: false,
            asks_for_whole: false,
            known_again: Again::new(),
            classes,
            limits,
            floor_s,
            open: Vec::new(),
            left_s: f64::INFINITY,
            good: None,
            good_s: f64::INFINITY,
            seen: BTreeMap::new(),
            added: 0,
            is_any: false,
            last: None,
        }
    }

    /// Whether seconds of what is found are what it takes at least: its layers do not choose in the step.
    pub(crate) fn is_bound(&self) -> bool {
        self.by_layer && !self.chooses()
    }

    /// The most layers that a stage may have; none where there is no split.
    pub(crate) fn largest(&self) -> Option<u32> {
        let limits = self.limits.as_ref()?;
        limits.stages.iter().map(|[_, most]| *most).max()
    }

    /// Whether splits of a case can be looked at: weights and gradients of a rank rest whole.
    pub(crate) fn may_look(case: Case<'_>) -> bool {
        !case.question.shards_weights() && !case.question.shards_gradients()
    }

    /// What was done so far.
    pub(crate) fn work(&self) -> usize {
        self.added * self.work_of_row()
    }

    /// What a row counts that is added to a program: about as long as that takes.
    fn work_of_row(&self) -> usize {
        // Each class has variables and rows of its own in each stage.
        let of_stage = self.classes.each.len().pow(2).div_ceil(4) + self.classes.savers.len();
        32 + self.case.layout.stages() as usize * of_stage
    }

    /// Seconds that no split takes less than whose layers have chosen one by one.
    pub(crate) fn left_s(&self) -> f64 {
        self.left_s
    }

    /// Seconds that no split takes less than that is left; infinite where none is.
    pub(crate) fn least_s(&self) -> f64 {
        if self.limits.is_some() {
            return self.floor_s;
        }
        let each = self.open.iter().map(|node| node.least_s);
        each.fold(f64::INFINITY, f64::min)
    }

    /// Looks at all splits, or closer at those that take the least as far as is known, with about so much work at most. The best that is
    /// found, where it takes less than something.
    pub(crate) fn look(
        &mut self,
        (below_s, most): (f64, usize),
        paths: Option<&Paths<'_>>,
        looks: &Looks<'_>,
    ) -> Option<Best> {
        if let Some(limits) = self.limits.take() {
            self.begin(&limits);
            let rows = paths.map_or_else(Vec::new, |paths| self.along_all(paths, &limits));
            let known = (rows, self.floor_s);
            let looked = self.looked_at(limits, known, Next::Cut(ROUNDS), below_s);
            return self.keep([looked], below_s);
        }
        self.close(below_s);
        let each = self.open.iter().enumerate();
        let (next, _) = each.min_by(|(_, a), (_, b)| a.least_s.total_cmp(&b.least_s))?;
        let node = self.open.swap_remove(next);
        let look = |limits: Option<Limits>, next| {
            let known = (node.rows.clone(), node.least_s);
            let looked = limits.map(|limits| self.looked_at(limits, known, next, below_s));
            looked.unwrap_or_default()
        };
        let looked = match node.next {
            Next::Cut(rounds) => {
                let rounds = rounds.checked_sub(1).map(Next::Cut);
                let next = rounds.unwrap_or(Next::Probe(SWEEPS));
                [look(Some(node.limits.clone()), next), Looked::default()]
            }
            Next::Probe(sweeps) => {
                let most = most / self.work_of_row();
                let (limits, added) = self.probed(&node, (below_s, most), looks);
                let is_same = limits.as_ref() == Some(&node.limits);
                let next = match sweeps.checked_sub(1) {
                    Some(sweeps) if sweeps > 0 && !is_same => Next::Probe(sweeps),
                    _ => Next::Divide,
                };
                let moved = if sweeps == SWEEPS {
                    self.moved(&node.limits)
                } else {
                    Looked::default()
                };
                [look(limits, next), Looked { added, ..moved }]
            }
            Next::Choose => return self.choose(&node, below_s, looks),
            Next::Divide => {
                let [fewer, more] = self.halves(&node);
                let look = |limits| look(limits, Next::Divide);
                rayon::join(|| look(fewer), || look(more)).into()
            }
        };
        self.keep(looked, below_s)
    }

    /// Looks at all splits with a few rows of a program, before anything else does: whether that says that none takes less than something.
    pub(crate) fn glance(&mut self, below_s: f64, paths: Option<&Paths<'_>>) -> bool {
        let Some(limits) = self.limits.take() else {
            return true;
        };
        self.begin(&limits);
        let rows = paths.map_or_else(Vec::new, |paths| self.along_all(paths, &limits));
        self.added += 1 + rows.len() / 4;
        let enough_s = self.enough_s(below_s);
        let mut added = 0;
        let program = Program::new(self.case.layout, &self.classes, &limits, rows);
        let solved = program
            .and_then(|program| self.cut_to((program, &limits), (enough_s, CUTS), &mut added));
        self.added += added;
        let is_over = match solved {
            Ok(program) => {
                let is_over = program.seconds() >= enough_s;
                self.floor_s = self.floor_s.max(program.seconds());
                self.last = Some((program.point(), program.tight()));
                is_over
            }
            Err(unsolved) => unsolved == Unsolved::NoPoint,
        };
        self.limits = Some(limits);
        is_over
    }

    fn begin(&mut self, limits: &Limits) {
        // Slower sets may hide more of what is reduced.
        let any = self.is_any.then(|| {
            let fastest = self.sets.least(0);
            Sets::Each(vec![fastest; self.case.question.kind_of.len()])
        });
        self.ends = Ends::new(self.case, any.as_ref().unwrap_or(&self.sets), limits);
        let simulator = self.simulated.simulator();
        self.hiding = Hiding::new((self.case, &self.sets), limits, simulator);
    }

    /// Whether its splits were divided before, or are all closed.
    pub(crate) fn is_divided(&self) -> bool {
        self.limits.is_none() && self.undivided().is_none()
    }

    /// The node of all splits, beside which some may be left that are to choose.
    fn undivided(&self) -> Option<&Node> {
        let mut nodes = self.open.iter().filter(|node| node.next != Next::Choose);
        let first = nodes.next();
        first.filter(|_| nodes.next().is_none())
    }

    /// Paths of the program of all splits, once these are closed or glanced at or it has as many as it is given before it is divided.
    pub(crate) fn paths(&self) -> Option<Paths<'q>> {
        let of_node = match self.undivided() {
            Some(Node {
                next: Next::Probe(_) | Next::Divide,
                rows,
                point: Some(point),
                ..
            }) => Some((point, rows)),
            _ => None,
        };
        let last = self.last.as_ref().map(|(point, rows)| (point, rows));
        let (point, rows) = last.or(of_node)?;
        let longest = rows.iter().filter_map(Row::path).cloned();
        Some(Paths {
            question: self.case.question,
            schedule: self.case.schedule,
            longest: longest.collect(),
            point: point.clone(),
        })
    }

    /// Leaves splits that take no less than something.
    pub(crate) fn close(&mut self, below_s: f64) {
        let enough_s = self.enough_s(below_s);
        if self.floor_s >= enough_s {
            self.limits = None;
        }
        self.open.retain(|node| node.least_s < enough_s);
    }

    /// Seconds that a split has to take less than to be looked for where one takes so long.
    fn enough_s(&self, best_s: f64) -> f64 {
        best_s * (1.0 - self.near)
    }

    fn keep(&mut self, looked: impl IntoIterator<Item = Looked>, below_s: f64) -> Option<Best> {
        let (chooses, enough_s) = (self.chooses(), self.enough_s(below_s));
        let mut best = None;
        for Looked {
            left,
            tried,
            added,
            again,
            closed,
        } in looked
        {
            self.last = closed.filter(|_| self.open.is_empty() && left.is_none());
            self.open.extend(left);
            self.added += added;
            self.known_again.extend(again);
            for (sizes, step_s) in tried {
                if let Some(step_s) = step_s.filter(|step_s| *step_s < self.good_s) {
                    self.good_s = step_s;
                    self.good = Some(Point::of(&self.classes, &sizes));
                    best = (step_s < below_s && !chooses).then(|| Best {
                        step_s,
                        stages: stages_of(&sizes),
                        recompute: None,
                    });
                }
                let limits = Limits::of(self.case.layout, &sizes);
                let is_known = self.seen.insert(sizes, step_s).is_some();
                let least_s = step_s.filter(|least_s| chooses && !is_known && *least_s < enough_s);
                self.open.extend(least_s.map(|least_s| Node {
                    limits,
                    rows: Vec::new(),
                    point: None,
                    least_s,
                    next: Next::Choose,
                }));
            }
        }
        best
    }

    /// Whether the best choice of what layers compute again is asked for, one by one.
    fn chooses(&self) -> bool {
        self.by_layer && self.case.question.options.effort == Effort::Patient
    }

    /// The best choice of the one split of a node, where it takes less than something.
    fn choose(&mut self, node: &Node, below_s: f64, looks: &Looks<'_>) -> Option<Best> {
        let sizes: Vec<u32> = node
            .limits
            .stages
            .iter()
            .map(|[layers, _]| *layers)
            .collect();
        let split = StageSplit::new(self.case, stages_of(&sizes));
        let under = (self.occupancies, &self.simulated);
        let found = split.by_layer_in_step(self.case, under, (below_s, usize::MAX), looks);
        self.left_s = self.left_s.min(found.least_s.max(node.least_s));
        found.best.map(|(step_s, sets)| Best {
            step_s,
            stages: split.stages,
            recompute: Some(self.case.question.recompute(&sets)),
        })
    }

    /// Looks at splits within some limits, under some cuts and more, where these are below what a step takes.
    fn looked_at(
        &self,
        limits: Limits,
        (rows, mut least_s): (Vec<Row>, f64),
        mut next: Next,
        below_s: f64,
    ) -> Looked {
        // A program that is begun with some rows takes as long as some that are added.
        let (mut tried, mut added) = (Vec::new(), 1 + rows.len() / 4);
        let (mut found, mut closed) = (Again::new(), None);
        let is_cut_alone = matches!(next, Next::Cut(_));
        let left = || {
            let mut program = Program::new(self.case.layout, &self.classes, &limits, rows)?;
            if program.seconds() >= self.enough_s(below_s) {
                return Err(Unsolved::NoPoint);
            }
            let again = self.least_again(&limits, &program.point(), &mut found)?;
            for cut in 0..=CUTS {
                let point = program.point();
                let again = again.iter().filter(|row| row.is_broken(&point)).cloned();
                for row in self.full(&point).into_iter().chain(again) {
                    program = program.with(row)?;
                    added += 1;
                }
                least_s = least_s.max(program.seconds());
                if least_s >= self.enough_s(below_s) {
                    closed = Some((program.point(), program.tight()));
                    return Err(Unsolved::NoPoint);
                }
                let point = program.point();
                let (sizes, is_whole) = point.rounded(&limits);
                if (is_whole || is_cut_alone || cut == 0 || cut == CUTS)
                    && let Some(sizes) = sizes
                {
                    let (step_s, rows) = self.step_s(&sizes, &mut found);
                    added += rows;
                    tried.push((sizes, step_s));
                    let is_reached = |step_s| {
                        // Where it takes so long at least another may take less.
                        !self.chooses() && is_whole && self.enough_s(step_s) <= least_s
                    };
                    if limits.is_single() || step_s.is_some_and(is_reached) {
                        return Err(Unsolved::NoPoint);
                    }
                }
                if cut == CUTS {
                    break;
                }
                // Paths on the way to a good split hold for more points than those that are the longest at one.
                let is_cut = |row: &Row| row.value(&point) > least_s * (1.0 + 0.1 * NEAR);
                let on_way = self
                    .good
                    .as_ref()
                    .map(|good| self.cut(&limits, &good.between(&point)));
                let row = on_way.filter(is_cut);
                let row = row.or_else(|| Some(self.cut(&limits, &point)).filter(is_cut));
                let Some(row) = row else {
                    if is_cut_alone {
                        next = Next::Probe(SWEEPS);
                    }
                    break;
                };
                program = program.with(row)?;
                added += 1;
            }
            let (point, rows) = (program.point(), program.tight());
            Ok((Some(point), rows))
        };
        let solved = left();
        added += ROWS_OF_RANK * found.len();
        let again = found;
        let looked = |left, tried| Looked {
            left,
            tried,
            added,
            again,
            closed,
        };
        let (point, rows) = match solved {
            Ok(left) => left,
            Err(Unsolved::NoPoint) => return looked(None, tried),
            // Nothing is known of them but what was before.
            Err(Unsolved::Failed) if limits.is_single() => {
                let sizes: Vec<u32> = limits.stages.iter().map(|[fewest, _]| *fewest).collect();
                let (step_s, _) = self.step_s(&sizes, &mut Again::new());
                tried.push((sizes, step_s));
                return looked(None, tried);
            }
            Err(Unsolved::Failed) => {
                next = Next::Divide;
                (None, Vec::new())
            }
        };
        let left = Node {
            limits,
            rows,
            point,
            least_s,
            next,
        };
        looked(Some(left), tried)
    }

    /// The best split that was simulated with single layers moved, as long as it takes less: from stages that the longest path has many
    /// passes of to stages that it has few of.
    fn moved(&self, limits: &Limits) -> Looked {
        let simulator = self.simulated.simulator();
        let mut looked = Looked::default();
        let mut best = self.seen.iter().filter_map(with_room).min_by(by_seconds);
        while let Some((sizes, step_s)) = best {
            let times = StageSplit::new(self.case, stages_of(&sizes)).times(self.case, &self.sets);
            let path = simulator.longest(&times);
            let mut stages: Vec<usize> = (0..sizes.len()).collect();
            stages.sort_by_key(|&stage| path.forward[stage] + path.backward[stage]);
            let may_give = |&&stage: &&usize| sizes[stage] > limits.stages[stage][0];
            let may_take = |&&stage: &&usize| sizes[stage] < limits.stages[stage][1];
            let sources: Vec<&usize> = stages.iter().rev().filter(may_give).take(MOVED).collect();
            let targets: Vec<&usize> = stages.iter().filter(may_take).take(MOVED).collect();
            let one_moved = |(&source, &target): (&usize, &usize)| {
                let mut sizes = sizes.clone();
                sizes[source] -= 1;
                sizes[target] += 1;
                let mut found = Again::new();
                let (step_s, rows) = self.step_s(&sizes, &mut found);
                ((sizes, step_s), (rows, found))
            };
            let of_source = |&source| targets.par_iter().map(move |&target| (source, target));
            let each = sources.par_iter().flat_map(of_source);
            let each = each.filter(|(source, target)| source != target);
            let (all, found): (Vec<_>, Vec<(usize, Again)>) = each.map(one_moved).unzip();
            for (rows, found) in found {
                looked.added += rows + ROWS_OF_RANK * found.len();
                looked.again.extend(found);
            }
            let each = all.iter().map(|(sizes, step_s)| (sizes, step_s));
            let next = each.filter_map(with_room).min_by(by_seconds);
            best = next.filter(|next| next.1 < step_s);
            looked.tried.extend(all);
        }
        looked
    }

    /// Seconds of a split, by the layers of each stage, where it has room; at least, where each layer computes again what it may by itself. And
    /// how many rows were added to a program for that.
    fn step_s(&self, sizes: &[u32], found: &mut Again) -> (Option<f64>, usize) {
        if let Some(known) = self.seen.get(sizes) {
            return (*known, 0);
        }
        if self.by_layer {
            return self.least_of_split_s(sizes, found);
        }
        let (case, sets) = (self.case, &self.sets);
        let split = StageSplit::new(case, stages_of(sizes));
        let taken = peak(&split.memory(case, sets, self.occupancies));
        let on_host = split.on_host(case, sets, self.occupancies);
        let has_room =
            taken <= case.question.capacity() && case.question.host_holds(taken, on_host);
        let step_s = || {
            let times = split.times(case, sets);
            self.simulated.simulator().run(&times).total.seconds().0
        };
        (has_room.then(step_s), 0)
    }

    /// Seconds that a split takes at least where each layer computes again what it may by itself: those of a program of parts of layers;
    /// none where even these have no room. And how many rows it was given.
    fn least_of_split_s(&self, sizes: &[u32], found: &mut Again) -> (Option<f64>, usize) {
        let limits = Limits::of(self.case.layout, sizes);
        let mut program = match Program::new(self.case.layout, &self.classes, &limits, Vec::new()) {
            Ok(program) => program,
            Err(unsolved) => return ((unsolved == Unsolved::Failed).then_some(self.floor_s), 1),
        };
        let (mut least_s, mut rows) = (self.floor_s, 1);
        let Ok(again) = self.least_again(&limits, &program.point(), found) else {
            return (None, rows);
        };
        rows += again.len();
        for row in again {
            program = match program.with(row) {
                Ok(program) => program,
                Err(Unsolved::NoPoint) => return (None, rows),
                Err(Unsolved::Failed) => return (Some(least_s), rows),
            };
        }
        for _ in 0..ROWS_OF_SPLIT {
            match self.cut_once(program, &limits, 0.1 * NEAR) {
                Ok((next, added)) => {
                    least_s = least_s.max(next.seconds());
                    program = next;
                    rows += added;
                    if added == 0 {
                        break;
                    }
                }
                Err(Unsolved::NoPoint) => return (None, rows),
                Err(Unsolved::Failed) => break,
            }
        }
        (Some(least_s), rows)
    }

    /// A program with what its point is beyond: rows of memory, and a cut that is above it by more than some share. And how many.
    fn cut_once(
        &self,
        mut program: Program,
        limits: &Limits,
        share: f64,
    ) -> Result<(Program, usize), Unsolved> {
        let (point, least_s) = (program.point(), program.seconds());
        let cut = Some(self.cut(limits, &point));
        let cut = cut.filter(|cut| cut.value(&point) > least_s * (1.0 + share));
        let mut added = 0;
        for row in self.full(&point).into_iter().chain(cut) {
            program = program.with(row)?;
            added += 1;
        }
        Ok((program, added))
    }

    /// Two parts of the splits of a node: the rank, or where all have whole layers the stage, whose layers are the farthest from a whole
    /// number has fewer of them or more.
    fn halves(&self, node: &Node) -> [Option<Limits>; 2] {
        let (limits, layout) = (&node.limits, self.case.layout);
        let farthest = |each: &[f64], limits: &[[u32; 2]]| {
            let off = |place: &usize| (each[*place] - each[*place].round()).abs();
            let may_divide = |place: &usize| limits[*place][0] < limits[*place][1];
            let places = (0..each.len()).filter(|place| off(place) > WHOLE);
            let places = places.filter(may_divide).rev();
            let place = places.max_by(|a, b| off(a).total_cmp(&off(b)))?;
            let [fewest, most] = limits[place];
            Some((place, (each[place] as u32).clamp(fewest, most - 1)))
        };
        let stages = node.point.as_ref().map_or(&[][..], |point| &point.stages);
        let ranks = (0..layout.pp() as usize).filter(|_| !stages.is_empty());
        let ranks = ranks.map(|rank| own(layout, rank).map(|stage| stages[stage]).sum::<f64>());
        let ranks: Vec<f64> = ranks.collect();
        let halves = if let Some((rank, fewer)) = farthest(&ranks, &limits.ranks) {
            [[0, fewer], [fewer + 1, u32::MAX]].map(|of| limits.with_rank(rank, of))
        } else {
            let farthest = farthest(stages, &limits.stages);
            let (stage, fewer) = farthest.unwrap_or_else(|| {
                // Its point has no room, kinds of layers are where they cannot be, or more layers compute again than there.
                let again = |stage: &usize| {
                    let again = node
                        .point
                        .as_ref()
                        .and_then(|point| point.again.get(*stage));
                    let own = stages
                        .get(*stage)
                        .map_or(0.0, |own| own.min(self.classes.first.into()));
                    again.map_or(0.0, |again| own - again)
                };
                let wide = |stage: &usize| {
                    let [fewest, most] = limits.stages[*stage];
                    (most - fewest, Reverse(*stage))
                };
                let all = (0..limits.stages.len())
                    .filter(|&stage| limits.stages[stage][0] < limits.stages[stage][1]);
                let stage = all
                    .max_by(|a, b| {
                        again(a)
                            .total_cmp(&again(b))
                            .then_with(|| wide(a).cmp(&wide(b)))
                    })
                    .expect("there are stages");
                let [fewest, most] = limits.stages[stage];
                let own = stages.get(stage).map_or(fewest, |own| own.round() as u32);
                (stage, own.clamp(fewest, most - 1))
            });
            [[0, fewer], [fewer + 1, u32::MAX]].map(|of| limits.with_stage(stage, of))
        };
        halves.map(|half| half.narrowed(layout, &self.classes))
    }

    /// Of each rank whose layers have no room as a point has them, what they may come to.
    fn full(&self, point: &Point) -> Vec<Row> {
        let by_value = |a: &&Row, b: &&Row| a.value(point).total_cmp(&b.value(point));
        let fullest = self.memory.iter().map(|rows| rows.iter().max_by(by_value));
        let full = fullest.flatten().filter(|row| row.is_broken(point));
        full.cloned().collect()
    }

    /// Seconds that every split within some limits takes at least: those of the path that is the longest at a point.
    fn cut(&self, limits: &Limits, point: &Point) -> Row {
        let lines = self.lines(limits, point);
        let times = self.times(point, &lines);
        let path = self.simulated.simulator().longest(&times);
        self.along(Arc::new(path), &lines)
    }

    fn lines(&self, limits: &Limits, point: &Point) -> Lines {
        let hiding = self.hiding.as_ref();
        let mut ends = self.ends.lines(self.case, limits, point);
        if self.hides_again() {
            for (rank, [_, reduce, _]) in ends.iter_mut().enumerate() {
                if reduce.at(self.of_rank(point, rank)) <= self.classes.again_s(point, rank) {
                    *reduce = Line::default();
                }
            }
        }
        Lines {
            ends,
            hides: hiding.map(|hiding| hiding.near(limits, point)),
        }
    }

    /// Whether reductions of a rank are hidden by what layers of its first stage compute again by themselves: of a microbatch, the last.
    fn hides_again(&self) -> bool {
        self.by_layer && StageSplit::hides_reductions(self.case)
    }

    /// Layers of a rank.
    fn of_rank(&self, point: &Point, rank: usize) -> f64 {
        let stages = own(self.case.layout, rank);
        stages.map(|stage| point.stages[stage]).sum()
    }

    /// What some paths take in any split within some limits at least; none where they are of other passes and messages.
    fn along_all(&self, paths: &Paths<'_>, limits: &Limits) -> Vec<Row> {
        let Case {
            question, schedule, ..
        } = self.case;
        if !std::ptr::eq(paths.question, question) || paths.schedule != schedule {
            return Vec::new();
        }
        let lines = self.lines(limits, &paths.point);
        let each = paths.longest.iter().cloned();
        each.map(|path| self.along(path, &lines)).collect()
    }

    /// Seconds of each stage that its layers and the ends of the model take, of a kind of pass: see [`passes_s`].
    fn seconds(&self, of_layers: impl Fn(usize) -> f64, pass: usize) -> Vec<f64> {
        let shape = self.case.shape;
        let of_end = |end: &Kind| passes_s(self.case, end, self.sets.of_ends())[pass];
        let mut seconds: Vec<f64> = (0..self.case.layout.stages() as usize)
            .map(of_layers)
            .collect();
        seconds[0] += of_end(&shape.embedding);
        *seconds.last_mut().expect("there are stages") += of_end(&shape.head);
        seconds
    }

    /// What passes, messages and the ends of ranks take at a point, of which the lines are given.
    fn times(&self, point: &Point, lines: &Lines) -> StageTimes {
        let Case {
            question, layout, ..
        } = self.case;
        let of_classes = |pass: usize| {
            move |stage: usize| -> f64 {
                let layers = self.classes.each.iter().zip(&point.layers[stage]);
                layers.map(|(class, layers)| class.0[pass] * layers).sum()
            }
        };
        let forward_s = self.seconds(of_classes(0), 0);
        let again = |stage: usize| {
            let first = point.again.get(stage);
            let first_s = first.map_or(0.0, |layers| layers * self.classes.first_again_s);
            first_s + self.classes.again_s(point, stage)
        };
        let backward = of_classes(1);
        let backward_s = self.seconds(|stage| backward(stage) + again(stage), 1);
        let mut times = StageTimes::new(layout.pp(), spans(&forward_s), spans(&backward_s));
        if self.case.schedule.divides_backward() {
            let weight_s = self.seconds(of_classes(2), 2);
            times.weight = Some(spans(&weight_s));
        }
        if let Some((_, cost)) = message(self.case) {
            times.hop.fill(cost.time.to_span());
        }
        times.hop_overlapped = question.stack.sends_beside(question.overlap, layout.vpp());
        let hides = lines.hides.as_ref();
        times.hidden = hides.map(|hides| hides.at(self.case, point));
        for (rank, own) in lines.ends.iter().enumerate() {
            let layers = self.of_rank(point, rank);
            let [gather, reduce, optimizer] = own.map(|line| line.at(layers));
            let hidden = if self.hides_again() {
                self.classes.again_s(point, rank)
            } else {
                0.0
            };
            let own = [gather, reduce - hidden, optimizer].map(|seconds| seconds.max(0.0));
            let [gather, reduce, optimizer] = spans(&own)[..] else {
                unreachable!("as many as lines")
            };
            times.first_forward[rank] += gather;
            times.reduce[rank] = reduce;
            times.optimizer[rank] = optimizer;
        }
        times
    }

    /// Seconds that a path takes in any split at least.
    fn along(&self, path: Arc<LongestPath>, lines: &Lines) -> Row {
        let Case { layout, shape, .. } = self.case;
        let stages = layout.stages() as usize;
        let set = self.sets.of_ends();
        let passes = |stage: usize, [forward_s, backward_s, weight_s]: [f64; 3]| {
            f64::from(path.forward[stage]) * forward_s
                + f64::from(path.backward[stage]) * backward_s
                + path.weight[stage] as f64 * weight_s
        };
        let of_end = |stage, end: &Kind| passes(stage, passes_s(self.case, end, set));
        let each = path
            .forward
            .iter()
            .chain(&path.backward)
            .map(|&passes| u64::from(passes));
        let apart = path.weight.iter().map(|passes| passes.unsigned_abs());
        // And what is gathered before first passes, what is reduced after the last, and the optimizer step.
        let gathered = path.first_forward.iter().filter(|is_first| **is_first);
        let less = lines.hides.as_ref();
        let less = less.map(|hides| hides.along(self.case, &path));
        let hidden = less.iter().map(|less| less.passes);
        let rounded = each.chain(apart).chain(hidden).sum::<u64>() as f64;
        let rounded = rounded + gathered.count() as f64 + 2.0;
        let mut constant = path.messages.seconds().0 - ROUNDED_S * rounded;
        constant += of_end(0, &shape.embedding) + of_end(stages - 1, &shape.head);
        let mut slopes = vec![0.0; stages];
        if let Some(less) = less {
            constant -= less.at_none;
            slopes = less.slopes.iter().map(|slope| -slope).collect();
        }
        let mut again: Vec<f64> = path.backward.iter().copied().map(f64::from).collect();
        for (rank, of_rank) in lines.ends.iter().enumerate() {
            let is_hidden = path.reduce[rank] && of_rank[1] != Line::default();
            if is_hidden && self.hides_again() {
                again[rank] -= 1.0;
            }
            let is_last = path.optimizer as usize == rank;
            let on_path = [path.first_forward[rank], path.reduce[rank], is_last];
            for (line, _) in of_rank.iter().zip(on_path).filter(|(_, on_path)| *on_path) {
                constant += line.at_none;
                own(layout, rank).for_each(|stage| slopes[stage] += line.slope);
            }
        }
        let layers = (0..stages).map(|stage| {
            let each = self.classes.each.iter();
            let each = each.map(|of| passes(stage, of.0));
            each.map(|seconds| seconds + slopes[stage]).collect()
        });
        let layers = layers.collect();
        Row::of_path(path, &self.classes, (layers, &again, constant))
    }
}

/// Recompute sets under which no layer has a shorter backward pass than under others.
fn longest_sets(case: Case<'_>) -> Option<Sets> {
    let set = case.question.sets.len() - 1;
    let is_longest = |kind: &Kind| {
        let others = kind.backward_s.iter();
        others.copied().all(|own| own <= kind.backward_s[set])
    };
    let kinds = &case.shape.kinds;
    kinds.iter().all(is_longest).then_some(Sets::Every(set))
}

/// A split and its seconds, where it has room.
fn with_room((sizes, step_s): (&Vec<u32>, &Option<f64>)) -> Option<(Vec<u32>, f64)> {
    step_s.map(|step_s| (sizes.clone(), step_s))
}

fn by_seconds(a: &(Vec<u32>, f64), b: &(Vec<u32>, f64)) -> std::cmp::Ordering {
    a.1.total_cmp(&b.1)
}
