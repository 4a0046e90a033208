//! [`Program`]: layers of stages as a linear program, and what it is made of.

use std::sync::Arc;
use std::time::Duration;

use microlp::{
    ComparisonOp, Error, OptimizationDirection, Problem, Solution, SolutionStatus, SolveOutcome,
    Variable,
};

use super::super::candidate::{Case, own};
use super::super::line::Line;
use super::super::recompute::Sets;
use super::super::room::{Most, SavedShares, Shares};
use super::super::savers::Saver;
use super::super::shape::Kind;
use super::super::stages::hides;
use crate::layout::Layout;
use crate::simulate::LongestPath;

/// Of models of more kinds of layers nothing is known that depends on which layers stages have: with recorded routing each layer may be of its own.
pub(super) const MOST_KINDS: usize = 3;

/// How far a number of layers may be from a whole one and be one.
pub(super) const WHOLE: f64 = 1e-6;

/// After how long a program is given up: the solver may go round in circles, and no program here takes a tenth of a second.
const GIVEN_UP: Duration = Duration::from_secs(20);

/// Layers that take as long as each other: seconds of a forward pass, of a backward pass, and what of that is gradients of weights,
/// where it is divided.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Class(pub(super) [f64; 3]);

/// The layers of a model under some recompute sets.
pub(super) struct Classes {
    pub(super) each: Vec<Class>,
    /// The class of each layer, in order.
    pub(super) of_layer: Vec<usize>,
    /// By class, its kinds of layers.
    pub(super) kinds: Vec<Vec<usize>>,
    /// How they take less memory, where each layer may compute again what it may by itself.
    pub(super) savers: Vec<Saver>,
    /// Layers at the beginning of each stage that compute again, where these do alone.
    pub(super) first: u32,
    /// Seconds that each of those computes again, of different ones the least.
    pub(super) first_again_s: f64,
    /// Seconds of both passes of any layer at least, whatever they hide.
    least_s: f64,
}

/// The fewest and the most layers of each stage and of each rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) stages: Vec<[u32; 2]>,
    pub(super) ranks: Vec<[u32; 2]>,
}

/// Parts of layers, as a program has them.
#[derive(Debug, Clone)]
pub(super) struct Point {
    /// By stage, of each class.
    pub(super) layers: Vec<Vec<f64>>,
    /// By stage, of all.
    pub(super) stages: Vec<f64>,
    /// By stage, that compute again at its beginning; none where none does by itself.
    pub(super) again: Vec<f64>,
    /// By stage, layers of each saver.
    pub(super) savers: Vec<Vec<f64>>,
}

/// A limit of a linear function of layers.
#[derive(Debug, Clone)]
pub(super) struct Row(Arc<Linear>);

#[derive(Debug)]
struct Linear {
    /// By stage, of each class.
    layers: Vec<Vec<f64>>,
    /// By stage.
    again: Vec<f64>,
    /// By stage, of each saver.
    savers: Vec<Vec<f64>>,
    constant: f64,
    /// The path that it is seconds of, which the step takes at least; if none, it is one at most.
    path: Option<Arc<LongestPath>>,
}

/// Why a program has no solution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unsolved {
    /// There is no point, or none that is asked for.
    NoPoint,
    /// It was not solved.
    Failed,
}

/// A linear program, solved. Rows are added to it as it is, which [`good_lp`] cannot.
#[derive(Clone)]
pub(super) struct Program {
    solution: Solution,
    variables: Arc<Variables>,
    rows: Vec<Row>,
}

struct Variables {
    /// Layers of the model.
    num_layers: f64,
    /// Seconds of the step.
    step: Variable,
    /// By stage, of each class.
    layers: Vec<Vec<Variable>>,
    /// By stage; none where none does by itself.
    again: Vec<Again>,
    /// By stage, of each saver.
    savers: Vec<Vec<Variable>>,
}

/// Layers at the beginning of a stage that compute again.
enum Again {
    /// Of so many layers of the stage.
    Line(Line),
    Variable(Variable),
}

/// Whether passes count as if all was hidden of their exchanges that may be, as layers are of too many kinds to know how much is.
pub(super) fn takes_off(case: Case<'_>) -> bool {
    hides(case) && case.shape.kinds.len() > MOST_KINDS
}

/// Seconds of the passes of a piece at least, under a recompute set: forward, backward, and gradients of weights where these are divided from it.
pub(super) fn passes_s(case: Case<'_>, kind: &Kind, set: usize) -> [f64; 3] {
    let divides = case.schedule.divides_backward();
    let weight_s = if divides { kind.weight_s } else { 0.0 };
    if takes_off(case) {
        let [forward_s, both_s] = kind.least_s(case.question, set);
        return [forward_s, both_s - forward_s, weight_s];
    }
    [kind.forward_s, kind.backward_s[set], weight_s]
}

impl Classes {
    pub(super) fn new(case: Case<'_>, sets: &Sets) -> Self {
        let kinds = &case.shape.kinds;
        let mut classes = Self {
            each: Vec::new(),
            of_layer: Vec::new(),
            kinds: Vec::new(),
            savers: Vec::new(),
            first: 0,
            first_again_s: 0.0,
            least_s: f64::INFINITY,
        };
        for (layer, &place) in (0..).zip(&case.question.kind_of) {
            let kind = &kinds[place];
            let set = sets.least(layer);
            let [_, least_s] = kind.least_s(case.question, set);
            classes.least_s = classes.least_s.min(least_s.max(0.0));
            let own = Class(passes_s(case, kind, set));
            let known = classes.each.iter().position(|known| *known == own);
            let class = known.unwrap_or_else(|| {
                classes.each.push(own);
                classes.kinds.push(Vec::new());
                classes.each.len() - 1
            });
            classes.of_layer.push(class);
            if !classes.kinds[class].contains(&place) {
                classes.kinds[class].push(place);
            }
        }
        if let Sets::First { layers, set } = *sets {
            let each = case.question.kind_of.iter();
            let each = each.map(|&place| kinds[place].backward_s[set] - kinds[place].backward_s[0]);
            classes.first = layers;
            classes.first_again_s = each.fold(f64::INFINITY, f64::min);
        }
        classes
    }

    /// Seconds of the shortest pass of a layer, or of both that hide what they may, where that is less and more than nothing.
    pub(super) fn shortest_s(&self) -> f64 {
        let each = self.each.iter().flat_map(|of| &of.0[..2]);
        let each = each.chain([&self.least_s]).copied();
        each.filter(|each| *each > 0.0)
            .fold(f64::INFINITY, f64::min)
    }

    /// Whether layers that compute again by parts may do so for as long as whole ones, whatever these choose.
    pub(super) fn may_take_all(&self, kinds: &[Kind]) -> bool {
        let of_class = |(class, places): (usize, &Vec<usize>)| {
            let own = self.savers.iter().filter(|saver| saver.of == class);
            let most: f64 = own.map(|saver| saver.seconds).sum();
            let ways = places.iter().flat_map(|&place| {
                let kind = &kinds[place];
                let ways = kind.ways.iter();
                ways.map(|way| way.seconds() - kind.backward_s[0])
            });
            ways.fold(0.0, f64::max) <= most * (1.0 + 1e-9)
        };
        self.kinds.iter().enumerate().all(of_class)
    }

    /// Seconds of a microbatch that layers of a stage compute again by themselves.
    pub(super) fn again_s(&self, point: &Point, stage: usize) -> f64 {
        let layers = point.savers.get(stage).into_iter().flatten();
        let each = self.savers.iter().zip(layers);
        each.map(|(saver, layers)| saver.seconds * layers).sum()
    }

    pub(super) fn layers(&self) -> u32 {
        self.of_layer.len() as u32
    }

    /// By stage, the fewest and the most layers of each class within some limits, where stages end in some places.
    fn within(&self, limits: &Limits, ends: &[[u32; 2]]) -> Vec<Vec<[u32; 2]>> {
        let mut all = vec![Vec::new(); ends.len()];
        for class in 0..self.each.len() {
            let before = self.before(class);
            for (stage, of) in all.iter_mut().enumerate() {
                of.push(limits.counts(ends, stage, |layer| before[layer as usize] as u32));
            }
        }
        all
    }

    /// Layers of a class before each layer, and in all.
    fn before(&self, class: usize) -> Vec<f64> {
        let mut before = vec![0.0];
        for &own in &self.of_layer {
            before.push(before[before.len() - 1] + f64::from(u8::from(own == class)));
        }
        before
    }
}

impl Limits {
    /// Those of splits that take less than something; none where layers are too few for all stages, or too many for all ranks.
    pub(super) fn new(
        layout: &Layout,
        classes: &Classes,
        most: &Most,
        below_s: f64,
    ) -> Option<Self> {
        let num_stages = layout.stages();
        let first_may_be_bare = num_stages > classes.layers();
        let stage = |stage: u32| {
            let may_be_bare = stage + 1 == num_stages || stage == 0 && first_may_be_bare;
            [u32::from(!may_be_bare), u32::MAX]
        };
        let in_time = below_s / (classes.least_s * f64::from(layout.microbatches()));
        let rank = |rank: u32| {
            let has_room = u32::try_from(most.of_rank(rank as usize)).unwrap_or(u32::MAX);
            [0, has_room.min(in_time as u32)]
        };
        let limits = Self {
            stages: (0..num_stages).map(stage).collect(),
            ranks: (0..layout.pp()).map(rank).collect(),
        };
        limits.narrowed(layout, classes)
    }

    /// Those of one split, by the layers of each stage.
    pub(super) fn of(layout: &Layout, sizes: &[u32]) -> Self {
        let of_rank = |rank: u32| {
            let stages = own(layout, rank as usize);
            [stages.map(|stage| sizes[stage]).sum(); 2]
        };
        Self {
            stages: sizes.iter().map(|&size| [size; 2]).collect(),
            ranks: (0..layout.pp()).map(of_rank).collect(),
        }
    }

    /// Whether only one split is within them.
    pub(super) fn is_single(&self) -> bool {
        self.stages.iter().all(|[fewest, most]| fewest == most)
    }

    pub(super) fn with_stage(&self, stage: usize, [fewest, most]: [u32; 2]) -> Self {
        let mut limits = self.clone();
        let own = &mut limits.stages[stage];
        *own = [own[0].max(fewest), own[1].min(most)];
        limits
    }

    pub(super) fn with_rank(&self, rank: usize, [fewest, most]: [u32; 2]) -> Self {
        let mut limits = self.clone();
        let own = &mut limits.ranks[rank];
        *own = [own[0].max(fewest), own[1].min(most)];
        limits
    }

    /// With what follows for ranks from their stages, for stages from their rank, and for both from how many layers there are; none
    /// where no split is within them.
    pub(super) fn narrowed(mut self, layout: &Layout, classes: &Classes) -> Option<Self> {
        let all = [classes.layers(); 2];
        let mut before = None;
        while before.as_ref() != Some(&self.ranks) {
            before = Some(self.ranks.clone());
            for rank in 0..self.ranks.len() {
                let stages: Vec<usize> = own(layout, rank).collect();
                let mut parts: Vec<[u32; 2]> =
                    stages.iter().map(|&stage| self.stages[stage]).collect();
                narrow(&mut self.ranks[rank], &mut parts)?;
                for (stage, part) in stages.into_iter().zip(parts) {
                    self.stages[stage] = part;
                }
            }
            narrow(&mut all.clone(), &mut self.ranks)?;
        }
        Some(self)
    }

    /// Where each stage may end, first and last.
    pub(super) fn boundaries(&self, layers: u32) -> Vec<[u32; 2]> {
        let mut after = self
            .stages
            .iter()
            .fold([0, 0_u32], |sum, own| added(sum, *own));
        let mut before = [0, 0];
        let each = self.stages.iter().map(|own| {
            before = added(before, *own);
            after = [after[0] - own[0], after[1].saturating_sub(own[1])];
            [before[0], before[1].min(layers - after[0])]
        });
        each.collect()
    }

    /// The fewest and the most layers of a stage of those of which there are so many before each, where stages end in some places.
    pub(super) fn counts(
        &self,
        ends: &[[u32; 2]],
        stage: usize,
        before: impl Fn(u32) -> u32,
    ) -> [u32; 2] {
        let from = stage.checked_sub(1).map_or([0, 0], |before| ends[before]);
        let [fewest, most] = self.stages[stage];
        let [first, last] = ends[stage];
        let mut counts = [u32::MAX, 0];
        for from in from[0]..=from[1] {
            let reach = first.max(from + fewest)..=last.min(from.saturating_add(most));
            for to in reach {
                let own = before(to) - before(from);
                counts = [counts[0].min(own), counts[1].max(own)];
            }
        }
        counts
    }
}

fn added(a: [u32; 2], b: [u32; 2]) -> [u32; 2] {
    [a[0] + b[0], a[1].saturating_add(b[1])]
}

/// Narrows limits of a whole and of its parts to what is possible; none where nothing is.
fn narrow(whole: &mut [u32; 2], parts: &mut [[u32; 2]]) -> Option<()> {
    let sum = parts.iter().fold([0, 0], |sum, part| added(sum, *part));
    *whole = [whole[0].max(sum[0]), whole[1].min(sum[1])];
    let [fewest, most] = *whole;
    for part in parts {
        let others = [sum[0] - part[0], sum[1].saturating_sub(part[1])];
        let at_most = most.checked_sub(others[0])?;
        let at_least = if sum[1] == u32::MAX {
            0
        } else {
            fewest.saturating_sub(others[1])
        };
        *part = [part[0].max(at_least), part[1].min(at_most)];
        if part[0] > part[1] {
            return None;
        }
    }
    (fewest <= most).then_some(())
}

impl Point {
    /// That of a split, by the layers of each stage.
    pub(super) fn of(classes: &Classes, sizes: &[u32]) -> Self {
        let mut from = 0;
        let of_stage = |&size: &u32| {
            let mut layers = vec![0.0; classes.each.len()];
            for &class in &classes.of_layer[from..from + size as usize] {
                layers[class] += 1.0;
            }
            from += size as usize;
            layers
        };
        let layers = sizes.iter().map(of_stage).collect();
        let again = sizes.iter().map(|size| f64::from(classes.first.min(*size)));
        Self {
            layers,
            stages: sizes.iter().map(|&size| f64::from(size)).collect(),
            again: if classes.first > 0 {
                again.collect()
            } else {
                Vec::new()
            },
            savers: Vec::new(),
        }
    }

    /// The one between two.
    pub(super) fn between(&self, other: &Self) -> Self {
        let half = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| 0.5 * (a + b)).collect();
        let halves =
            |a: &[Vec<f64>], b: &[Vec<f64>]| a.iter().zip(b).map(|(a, b)| half(a, b)).collect();
        Self {
            layers: halves(&self.layers, &other.layers),
            stages: half(&self.stages, &other.stages),
            again: half(&self.again, &other.again),
            savers: if self.savers.is_empty() {
                // Of a split nothing is known of them.
                other.savers.clone()
            } else {
                halves(&self.savers, &other.savers)
            },
        }
    }

    /// Whole numbers of layers near to it within limits of stages, where these allow it, and whether they are the point itself.
    pub(super) fn rounded(&self, limits: &Limits) -> (Option<Vec<u32>>, bool) {
        let is_whole = |layers: &f64| (layers - layers.round()).abs() < WHOLE;
        if self.stages.iter().all(is_whole) {
            let sizes = self.stages.iter().map(|layers| layers.round() as u32);
            return (Some(sizes.collect()), true);
        }
        let all: f64 = self.stages.iter().sum();
        let floor = |(layers, [fewest, most]): (&f64, &[u32; 2])| {
            ((layers + WHOLE) as u32).clamp(*fewest, *most)
        };
        let mut sizes: Vec<u32> = self.stages.iter().zip(&limits.stages).map(floor).collect();
        let left = (all.round() as u32).checked_sub(sizes.iter().sum());
        let may_grow = |stage: &usize| sizes[*stage] < limits.stages[*stage][1];
        let mut order: Vec<usize> = (0..sizes.len()).filter(may_grow).collect();
        let part = |stage: usize| self.stages[stage] - f64::from(sizes[stage]);
        order.sort_by(|&a, &b| part(b).total_cmp(&part(a)));
        let grown = left.and_then(|left| order.get(..left as usize));
        let rounded = grown.map(|grown| {
            for &stage in grown {
                sizes[stage] += 1;
            }
            sizes
        });
        (rounded, false)
    }
}

impl Row {
    /// A step takes as many seconds as a path at least: of each layer, and of so many passes by stage of what computes again.
    pub(super) fn of_path(
        path: Arc<LongestPath>,
        classes: &Classes,
        (layers, passes, constant): (Vec<Vec<f64>>, &[f64], f64),
    ) -> Self {
        let again = passes.iter().map(|passes| passes * classes.first_again_s);
        let of_savers = |passes: &f64| {
            let each = classes.savers.iter();
            each.map(|saver| passes * saver.seconds).collect()
        };
        Self(Arc::new(Linear {
            layers,
            again: again.collect(),
            savers: passes.iter().map(of_savers).collect(),
            constant,
            path: Some(path),
        }))
    }

    /// Layers of the stages of a rank have room.
    pub(super) fn of_memory(
        classes: &Classes,
        stages: impl Iterator<Item = usize>,
        shares: &Shares,
    ) -> Self {
        let mut layers = Vec::new();
        let mut again = Vec::new();
        for (stage, [first, behind]) in stages.zip(&shares.by_chunk) {
            let is_among = |kinds: &Vec<usize>| kinds.iter().all(|&kind| shares.among[kind]);
            let each = classes.kinds.iter();
            layers.resize(stage, Vec::new());
            layers.push(
                each.map(|kinds| if is_among(kinds) { *behind } else { 0.0 })
                    .collect(),
            );
            again.resize(stage, 0.0);
            again.push(if classes.first > 0 {
                first - behind
            } else {
                0.0
            });
        }
        Self(Arc::new(Linear {
            layers,
            again,
            savers: Vec::new(),
            constant: 0.0,
            path: None,
        }))
    }

    /// The same where each layer may compute again what it may by itself.
    pub(super) fn of_saved_memory(
        stages: impl Iterator<Item = usize>,
        shares: &SavedShares,
    ) -> Self {
        let mut parts = [Vec::new(), Vec::new()];
        for (stage, of) in stages.zip(&shares.by_chunk) {
            for (part, own) in parts.iter_mut().zip(of) {
                part.resize(stage, Vec::new());
                part.push(own.clone());
            }
        }
        let [layers, mut savers] = parts;
        let each = savers.iter_mut().flatten();
        each.for_each(|share| *share = -*share);
        Self(Arc::new(Linear {
            layers,
            again: Vec::new(),
            savers,
            constant: 0.0,
            path: None,
        }))
    }

    /// Layers of the stages of a rank compute again as many seconds as a line at least.
    pub(super) fn of_again(
        classes: &Classes,
        stages: impl Iterator<Item = usize>,
        line: Line,
    ) -> Self {
        let (mut layers, mut savers) = (Vec::new(), Vec::new());
        // About one.
        let each = classes.savers.iter();
        let unit = each
            .map(|saver| saver.seconds)
            .fold(f64::MIN_POSITIVE, f64::max);
        for stage in stages {
            layers.resize(stage, Vec::new());
            layers.push(vec![line.slope / unit; classes.each.len()]);
            savers.resize(stage, Vec::new());
            let each = classes.savers.iter();
            savers.push(each.map(|saver| -saver.seconds / unit).collect());
        }
        Self(Arc::new(Linear {
            layers,
            again: Vec::new(),
            savers,
            constant: 1.0 + line.at_none / unit,
            path: None,
        }))
    }

    pub(super) fn path(&self) -> Option<&Arc<LongestPath>> {
        self.0.path.as_ref()
    }

    /// What it is at a point.
    pub(super) fn value(&self, point: &Point) -> f64 {
        let Linear {
            layers,
            again,
            savers,
            constant,
            ..
        } = &*self.0;
        let both = layers.iter().zip(&point.layers);
        let both = both.chain(savers.iter().zip(&point.savers));
        let each = both.flat_map(|(own, at)| own.iter().zip(at));
        let each = each.chain(again.iter().zip(&point.again));
        constant + each.map(|(own, at)| own * at).sum::<f64>()
    }

    /// Whether a point is beyond it, where it is no path.
    pub(super) fn is_broken(&self, point: &Point) -> bool {
        self.value(point) > 1.0 + 1e-7
    }

    /// As terms that come to so much at most.
    fn constraint(&self, variables: &Variables) -> (Vec<(Variable, f64)>, f64) {
        let Linear {
            layers,
            again,
            savers,
            constant,
            path,
        } = &*self.0;
        let mut most = -constant;
        let mut terms = Vec::new();
        for (stage, (own, of)) in layers.iter().zip(&variables.layers).enumerate() {
            let mut slope = 0.0;
            match variables.again.get(stage) {
                Some(Again::Line(line)) => {
                    slope = again[stage] * line.slope;
                    most -= again[stage] * line.at_none;
                }
                Some(Again::Variable(of)) => terms.push((*of, again[stage])),
                None => {}
            }
            terms.extend(own.iter().zip(of).map(|(own, of)| (*of, own + slope)));
        }
        let savers = savers.iter().zip(&variables.savers);
        terms.extend(savers.flat_map(|(own, of)| of.iter().copied().zip(own.iter().copied())));
        if path.is_some() {
            terms.push((variables.step, -1.0));
        } else {
            most += 1.0;
        }
        terms.retain(|(_, each)| *each != 0.0);
        (terms, most)
    }
}

impl Program {
    /// The program of splits within some limits and rows.
    pub(super) fn new(
        layout: &Layout,
        classes: &Classes,
        limits: &Limits,
        known: Vec<Row>,
    ) -> Result<Self, Unsolved> {
        let mut problem = Problem::new(OptimizationDirection::Minimize);
        problem.set_time_limit(GIVEN_UP);
        let step = problem.add_var(1.0, (0.0, f64::INFINITY));
        let ends = limits.boundaries(classes.layers());
        let within = classes.within(limits, &ends);
        if within.iter().flatten().any(|[fewest, most]| fewest > most) {
            return Err(Unsolved::NoPoint);
        }
        let mut variable =
            |&[fewest, most]: &[u32; 2]| problem.add_var(0.0, (fewest.into(), most.into()));
        let of_stage = |of: &Vec<[u32; 2]>| of.iter().map(&mut variable).collect();
        let layers: Vec<Vec<Variable>> = within.iter().map(of_stage).collect();
        let mut rows = Rows {
            problem: &mut problem,
            layers: &layers,
            within: &within,
        };
        for class in 0..classes.each.len() {
            let all = classes.before(class)[classes.of_layer.len()];
            let stages = layers.iter().map(|of| (of[class], 1.0)).collect::<Vec<_>>();
            rows.problem.add_constraint(stages, ComparisonOp::Eq, all);
        }
        for (stage, &limits) in limits.stages.iter().enumerate() {
            rows.between(stage..=stage, |_| 1.0, limits.map(f64::from));
        }
        for (rank, &limits) in limits.ranks.iter().enumerate() {
            rows.between(own(layout, rank), |_| 1.0, limits.map(f64::from));
        }
        in_order(&mut rows, classes, &ends);
        let again = if classes.first > 0 {
            first_again(&mut problem, classes.first, &layers, limits)
        } else {
            Vec::new()
        };
        let of_stage = layers.iter().zip(&within);
        let savers = of_stage.map(|of| by_savers(&mut problem, &classes.savers, of));
        let variables = Variables {
            num_layers: classes.layers().into(),
            step,
            savers: savers.collect(),
            layers,
            again,
        };
        for row in &known {
            let (terms, most) = row.constraint(&variables);
            problem.add_constraint(terms, ComparisonOp::Le, most);
        }
        Ok(Self {
            solution: variables.solved(problem.solve())?,
            variables: Arc::new(variables),
            rows: known,
        })
    }

    /// With one more row.
    pub(super) fn with(mut self, row: Row) -> Result<Self, Unsolved> {
        let (terms, most) = row.constraint(&self.variables);
        let outcome = self.solution.add_constraint(terms, ComparisonOp::Le, most);
        self.solution = self.variables.solved(outcome)?;
        self.rows.push(row);
        Ok(self)
    }

    /// With so many layers in some stages together.
    pub(super) fn between(
        mut self,
        stages: &[usize],
        [fewest, most]: [u32; 2],
    ) -> Result<Self, Unsolved> {
        let of = stages
            .iter()
            .flat_map(|&stage| &self.variables.layers[stage]);
        let of: Vec<Variable> = of.copied().collect();
        let (at_least, at_most) = ((ComparisonOp::Ge, fewest), (ComparisonOp::Le, most));
        for ((op, bound), is_one) in [(at_least, fewest > 0), (at_most, most < u32::MAX)] {
            if is_one {
                let outcome = self.solution.add_constraint(terms(&of), op, bound.into());
                self.solution = self.variables.solved(outcome)?;
            }
        }
        Ok(self)
    }

    /// Seconds of the step, the least that there are.
    pub(super) fn seconds(&self) -> f64 {
        self.solution.objective()
    }

    pub(super) fn point(&self) -> Point {
        let value = |of: &Variable| self.solution.var_value_raw(*of);
        let layers = self.variables.layers.iter();
        let layers: Vec<Vec<f64>> = layers.map(|of| of.iter().map(value).collect()).collect();
        let stages: Vec<f64> = layers.iter().map(|of| of.iter().sum()).collect();
        let again = self.variables.again.iter().zip(&stages);
        let again = again.map(|(again, &layers)| match again {
            Again::Line(line) => line.at(layers),
            Again::Variable(of) => value(of),
        });
        let savers = self.variables.savers.iter();
        Point {
            again: again.collect(),
            savers: savers.map(|of| of.iter().map(value).collect()).collect(),
            layers,
            stages,
        }
    }

    /// Rows that hold its point.
    pub(super) fn tight(self) -> Vec<Row> {
        let (point, step_s) = (self.point(), self.seconds());
        let is_tight = |row: &Row| {
            let limit = if row.path().is_some() { step_s } else { 1.0 };
            row.value(&point) > limit * (1.0 - 1e-7)
        };
        self.rows.into_iter().filter(is_tight).collect()
    }
}

impl Variables {
    /// A solution, if there is one that has all layers: where a program is too ill-conditioned for the solver, it may return others.
    fn solved(&self, outcome: Result<SolveOutcome, Error>) -> Result<Solution, Unsolved> {
        match outcome.map(SolveOutcome::into_solution) {
            Ok(Ok(solution)) if solution.status() == SolutionStatus::Optimal => {
                let layers = self.layers.iter().flatten();
                let layers: f64 = layers.map(|of| solution.var_value_raw(*of)).sum();
                let has_all = (layers - self.num_layers).abs() < WHOLE * self.num_layers;
                has_all.then_some(solution).ok_or(Unsolved::Failed)
            }
            Err(Error::Infeasible) => Err(Unsolved::NoPoint),
            _ => Err(Unsolved::Failed),
        }
    }
}

fn terms(of: &[Variable]) -> Vec<(Variable, f64)> {
    of.iter().map(|&of| (of, 1.0)).collect()
}

/// Limits of a program that is being written.
struct Rows<'p> {
    problem: &'p mut Problem,
    /// By stage, of each class.
    layers: &'p [Vec<Variable>],
    /// The same: the fewest and the most.
    within: &'p [Vec<[u32; 2]>],
}

impl Rows<'_> {
    /// Layers of some stages, those of each class times something, come to no less and no more than something; where limits of each do
    /// not say so already.
    fn between(
        &mut self,
        stages: impl Iterator<Item = usize>,
        times: impl Fn(usize) -> f64,
        [fewest, most]: [f64; 2],
    ) {
        let mut terms = Vec::new();
        let (mut low, mut high) = (0.0, 0.0);
        for stage in stages {
            let each = self.layers[stage].iter().zip(&self.within[stage]);
            for (class, (&layers, within)) in each.enumerate() {
                let ends = within.map(|layers| times(class) * f64::from(layers));
                low += ends[0].min(ends[1]);
                high += ends[0].max(ends[1]);
                terms.push((layers, times(class)));
            }
        }
        if low < fewest {
            self.problem
                .add_constraint(terms.clone(), ComparisonOp::Ge, fewest);
        }
        if high > most {
            self.problem.add_constraint(terms, ComparisonOp::Le, most);
        }
    }
}

/// Layers are in order: before the end of a stage there are about as many of a class as before the layer there.
fn in_order(rows: &mut Rows<'_>, classes: &Classes, ends: &[[u32; 2]]) {
    for class in 1..classes.each.len() {
        let before = classes.before(class);
        for (stage, &[from, to]) in ends.iter().enumerate() {
            let point = |end: u32| [f64::from(end), before[end as usize]];
            let line = Line::through(point(from), point(to));
            let off = (from..=to)
                .map(point)
                .map(|[end, count]| count - line.at(end));
            let low = off.clone().fold(f64::INFINITY, f64::min);
            let high = off.fold(f64::NEG_INFINITY, f64::max);
            let times = |own: usize| f64::from(u8::from(own == class)) - line.slope;
            rows.between(0..=stage, times, [low, high].map(|off| line.at_none + off));
        }
    }
}

/// Layers at the beginning of each stage that compute again: as many as it has, but no more than are named, which is no less than a
/// chord.
fn first_again(
    problem: &mut Problem,
    first: u32,
    layers: &[Vec<Variable>],
    limits: &Limits,
) -> Vec<Again> {
    let each = layers.iter().zip(&limits.stages).map(|(of, ends)| {
        let [from, to] = ends.map(|layers| [layers, layers.min(first)].map(f64::from));
        let line = Line::through(from, to);
        if ends[1] <= first || ends[0] >= first {
            return Again::Line(line);
        }
        let again = problem.add_var(0.0, (0.0, first.into()));
        let mut with = |slope: f64, op, bound| {
            let mut terms = vec![(again, 1.0)];
            terms.extend(of.iter().map(|&of| (of, -slope)));
            problem.add_constraint(terms, op, bound);
        };
        with(line.slope, ComparisonOp::Ge, line.at_none);
        with(1.0, ComparisonOp::Le, 0.0);
        Again::Variable(again)
    });
    each.collect()
}

/// Layers of a stage that each saver makes take less: no more than there are of its class.
fn by_savers(
    problem: &mut Problem,
    savers: &[Saver],
    (layers, within): (&Vec<Variable>, &Vec<[u32; 2]>),
) -> Vec<Variable> {
    let of_saver = |saver: &Saver| {
        let [fewest, most] = within[saver.of];
        let own = problem.add_var(0.0, (0.0, most.into()));
        if fewest < most {
            let terms = [(own, 1.0), (layers[saver.of], -1.0)];
            problem.add_constraint(terms, ComparisonOp::Le, 0.0);
        }
        own
    };
    savers.iter().map(of_saver).collect()
}
