//! The choice of layers that compute again one by one under which the step of a split is the shortest.
//!
//! A step is as long as its longest path, and a path takes a second more for each second of a backward pass that it has. Paths that are
//! weighted, one in all, are no longer than the step; of them each pipeline rank shortens its own passes by itself
//! ([`by_layer`](crate::search::by_layer)), and what the ranks come to no choice takes less than (a Lagrangian relaxation: Geoffrion, Lagrangean
//! relaxation for integer programming, 1974). The best weights are those of a linear program over the paths and the choices that are known so far,
//! to which those are added that it leads to. Where choices of a rank are then mixed, those in which a stage takes less than some seconds are looked
//! at by themselves, and those in which it takes more.

use microlp::{ComparisonOp, OptimizationDirection, Problem};

use moefold_profiles::units::Seconds;

use super::choosing::OfRank;
use super::{Case, NEAR, StageSplit, spans};
use crate::memory::Occupancy;
use crate::search::by_layer::{Counts, Looked};
use crate::search::line::Line;
use crate::search::recompute::Sets;
use crate::search::schedules::Simulated;
use crate::search::watch::Looks;
use crate::simulate::{Simulator, StageTimes};

/// Parts of all choices of a split that are looked at where there is little time.
pub(crate) const PARTS: usize = 16;
/// Programs of one part of the choices at most.
const ROUNDS: usize = 40;
/// Of what a part may take less than is known, the share that ranks may be uncertain of together.
const UNCERTAIN: f64 = 0.1;
/// Seconds by which two passes that are rounded differ at most from what they do otherwise.
const ROUNDED_S: f64 = 1e-9;

/// What is found of the choices of a split.
#[derive(Debug)]
pub(crate) struct InStep {
    /// The best, where it takes less than was asked for, and its seconds.
    pub(crate) best: Option<(f64, Sets)>,
    /// Seconds that no other takes less than.
    pub(crate) least_s: f64,
}

impl StageSplit {
    /// The choice for each layer under which the step is the shortest of those that fit, where it takes less than `below_s`; or the best that
    /// comes up as so many parts of all choices are looked at.
    pub(crate) fn by_layer_in_step(
        &self,
        case: Case<'_>,
        (occupancies, simulated): (&[Vec<Occupancy>], &Simulated),
        (below_s, parts): (f64, usize),
        looks: &Looks<'_>,
    ) -> InStep {
        if case.question.shards_gradients() {
            let under = (&occupancies[0][..], simulated);
            return self.by_layer_with_waits(case, under, (below_s, parts), looks);
        }
        let under = (occupancies, simulated.simulator());
        let mut choices = Choices::new(self, case, under, (parts, looks));
        let mut open: Vec<Part> = choices.all().into_iter().collect();
        for looked in 0.. {
            let enough_s = choices.enough_s(below_s);
            open.retain(|part| part.least_s < enough_s);
            let each = open.iter().enumerate();
            let next = each.min_by(|(_, a), (_, b)| a.least_s.total_cmp(&b.least_s));
            let Some((next, _)) = next else {
                break;
            };
            // Something is found though the search is stopped before.
            if looked >= parts || looked > 0 && looks.look().is_break() {
                let left = open.iter().map(|part| part.least_s);
                choices.left_s = left.fold(choices.left_s, f64::min);
                break;
            }
            let mut part = open.swap_remove(next);
            choices.look(&mut part, below_s);
            if part.least_s >= choices.enough_s(below_s) {
                continue;
            }
            match choices.divided(&part) {
                Some(place) => open.extend(choices.parts(&part, place)),
                None if choices.may_take_all && !part.takes_all => {
                    part.takes_all = true;
                    open.push(part);
                }
                None => choices.left_s = choices.left_s.min(part.least_s),
            }
        }
        let best_s = choices
            .best
            .as_ref()
            .map_or(below_s, |best| best.0.min(below_s));
        InStep {
            best: choices.best.filter(|best| best.0 < below_s),
            least_s: choices.left_s.min(best_s),
        }
    }
}

/// All choices of a split, and what is known of them.
struct Choices<'s> {
    split: &'s StageSplit,
    case: Case<'s>,
    simulator: &'s Simulator,
    looks: &'s Looks<'s>,
    /// Whether all ways of ranks may be looked at, however many they are.
    may_take_all: bool,
    ranks: Vec<OfRank<'s>>,
    /// Durations where nothing is computed again.
    once: StageTimes,
    /// The same of backward passes, by stage.
    backward_s: Vec<f64>,
    /// And of layers in them.
    layers_s: Vec<f64>,
    /// By rank, see [`StageSplit::reduced_by_layer_s`]; none where reductions wait for all passes.
    reduced: Vec<Line>,
    /// By rank.
    points: Vec<Vec<Point>>,
    paths: Vec<Path>,
    best: Option<(f64, Sets)>,
    /// What choices take no less than that are not looked at any more.
    left_s: f64,
}

/// A choice of a rank.
struct Point {
    /// Of the layers of each of its stages.
    seconds: Vec<f64>,
    sets: Vec<Vec<usize>>,
}

/// A path through the step.
#[derive(Clone)]
struct Path {
    /// Seconds of what no choice changes.
    at_none: f64,
    /// By stage, seconds for each second of its layers.
    slopes: Vec<f64>,
}

/// Choices in which each stage takes so long, and what is known of them.
#[derive(Clone)]
struct Part {
    /// See [`Counts::within_s`].
    within_s: Vec<[f64; 2]>,
    /// Seconds of the step that none takes less than.
    least_s: f64,
    /// Whether all ways of ranks are looked at, as less does not say more of it.
    takes_all: bool,
    /// By rank, what its stages take at least in all, and the point in which they do.
    sums: Vec<(f64, usize)>,
    /// By rank, points that its program has.
    points: Vec<Vec<usize>>,
    /// Paths that it has.
    paths: Vec<usize>,
    /// Those of them with the best weights, together, and which these are.
    weighted: Path,
    held: Vec<usize>,
}

impl<'s> Choices<'s> {
    fn new(
        split: &'s StageSplit,
        case: Case<'s>,
        (occupancies, simulator): (&'s [Vec<Occupancy>], &'s Simulator),
        (parts, looks): (usize, &'s Looks<'s>),
    ) -> Self {
        let once = &Sets::Every(0);
        let stages = 0..split.stages.len();
        let of_layers = |stage| {
            let layers = split.layers(stage);
            layers
                .map(|(_, kind)| case.shape.kinds[kind].backward_s[0])
                .sum()
        };
        let ranks = split.ranks(case, occupancies);
        let hides = StageSplit::hides_reductions(case);
        let hiding = (0..ranks.len()).filter(|_| hides);
        Self {
            reduced: hiding
                .map(|rank| split.reduced_by_layer_s(case, rank))
                .collect(),
            split,
            case,
            simulator,
            looks,
            may_take_all: parts == usize::MAX,
            once: split.times(case, once),
            backward_s: split.backward_s(case.shape, once),
            layers_s: stages.map(of_layers).collect(),
            points: ranks.iter().map(|_| Vec::new()).collect(),
            paths: Vec::new(),
            ranks,
            best: None,
            left_s: f64::INFINITY,
        }
    }

    /// All choices; none where no choice is found.
    fn all(&mut self) -> Option<Part> {
        let ranks = self.ranks.len();
        let mut all = Part {
            within_s: vec![[0.0, f64::INFINITY]; self.layers_s.len()],
            least_s: 0.0,
            takes_all: false,
            sums: vec![(0.0, 0); ranks],
            points: vec![Vec::new(); ranks],
            paths: Vec::new(),
            weighted: Path {
                at_none: 0.0,
                slopes: vec![0.0; self.layers_s.len()],
            },
            held: Vec::new(),
        };
        (0..ranks)
            .all(|rank| self.sum_up(&mut all, rank))
            .then_some(all)
    }

    /// Looks for what a rank takes at least in all in a part. Whether a choice is found that does.
    fn sum_up(&mut self, part: &mut Part, rank: usize) -> bool {
        let alike = Path {
            at_none: 0.0,
            slopes: vec![1.0; self.layers_s.len()],
        };
        let (mut point, mut least_s) = self.shortened(part, rank, &alike);
        if point.is_none() && least_s < f64::INFINITY && self.may_take_all {
            part.takes_all = true;
            (point, least_s) = self.shortened(part, rank, &alike);
        }
        if let Some(point) = point {
            part.sums[rank] = (least_s, point);
            add(&mut part.points[rank], point);
        } else if least_s < f64::INFINITY {
            // There may be some.
            self.left_s = self.left_s.min(part.least_s);
        }
        point.is_some()
    }

    /// Seconds that a choice has to take less than to be looked for.
    fn enough_s(&self, below_s: f64) -> f64 {
        let best_s = self.best.as_ref().map_or(f64::INFINITY, |best| best.0);
        best_s.min(below_s) * (1.0 - NEAR)
    }

    /// Looks at a part for choices that take less than something, and for what none takes less than.
    fn look(&mut self, part: &mut Part, below_s: f64) {
        let first: Vec<usize> = part.sums.iter().map(|(_, point)| *point).collect();
        self.simulate(part, &first);
        for _ in 0..ROUNDS {
            let Some(weighted) = self.weighted(part) else {
                break;
            };
            (part.weighted, part.held) = weighted;
            let (chosen, is_new) = self.shorten(part, below_s);
            if part.least_s >= self.enough_s(below_s) || self.looks.look().is_break() {
                break;
            }
            let is_longer = self.simulate(part, &chosen);
            let is_longer = self.between(part) || is_longer;
            if !is_new && !is_longer {
                break;
            }
        }
    }

    /// A part in two, as a stage takes less than some seconds or no less; without those in which no choice is found.
    fn parts(&mut self, part: &Part, (stage, at_s): (usize, f64)) -> Vec<Part> {
        let rank = self
            .ranks
            .iter()
            .position(|own| own.stages.contains(&stage));
        let rank = rank.expect("a stage is of a rank");
        let [from, to] = part.within_s[stage];
        let mut parts = Vec::new();
        for within in [[from, at_s], [at_s, to]] {
            let mut own = part.clone();
            own.within_s[stage] = within;
            own.paths.clone_from(&part.held);
            own.points = (0..self.ranks.len())
                .map(|rank| {
                    let best = self.best_points(part, rank).into_iter();
                    best.filter(|&point| self.has(&own, rank, point)).collect()
                })
                .collect();
            if self.sum_up(&mut own, rank) {
                for (points, (_, point)) in own.points.iter_mut().zip(&own.sums) {
                    add(points, *point);
                }
                parts.push(own);
            }
        }
        parts
    }

    /// The choice of a rank in a part that counts the least on paths, and what none counts less than.
    fn shortened(&mut self, part: &Part, rank: usize, paths: &Path) -> (Option<usize>, f64) {
        let known = self.best_known(part, rank, paths);
        let own = &self.ranks[rank];
        let of_stage = |&stage: &usize| Counts {
            weight: paths.slopes[stage],
            within_s: part.within_s[stage],
        };
        let counts: Vec<Counts> = own.stages.iter().map(of_stage).collect();
        let goes_on = || self.looks.look().is_continue();
        let looked = if part.takes_all {
            Looked::All(&goes_on)
        } else {
            Looked::Few
        };
        let (choice, least_s) = match known {
            Some((_, known_s)) => match own.quicker(&counts, known_s, looked) {
                Ok(quicker) => {
                    let least_s = quicker.as_ref().map_or(known_s, |quicker| quicker.0);
                    (quicker, least_s)
                }
                Err(least_s) => (None, least_s.min(known_s)),
            },
            None => own.fastest(&counts, looked),
        };
        let point = choice.map(|(_, sets)| {
            let seconds = own.stages.iter().zip(&sets).map(|(&stage, sets)| {
                let layers = self.split.layers(stage).zip(sets);
                layers
                    .map(|((_, kind), &set)| self.case.shape.kinds[kind].backward_s[set])
                    .sum()
            });
            let seconds: Vec<f64> = seconds.collect();
            let known = self.points[rank]
                .iter()
                .position(|known| known.seconds == seconds);
            known.unwrap_or_else(|| {
                self.points[rank].push(Point { seconds, sets });
                self.points[rank].len() - 1
            })
        });
        (point.or(known.map(|(point, _)| point)), least_s)
    }

    /// Simulates a choice, by the point of each rank. Whether a part did not have its longest path.
    fn simulate(&mut self, part: &mut Part, points: &[usize]) -> bool {
        let mut sets = vec![0; self.case.question.kind_of.len()];
        let mut layers_s = vec![0.0; self.layers_s.len()];
        for ((own, points), &point) in self.ranks.iter().zip(&self.points).zip(points) {
            let point = &points[point];
            self.split.take(&mut sets, &own.stages, point.sets.clone());
            for (&stage, seconds) in own.stages.iter().zip(&point.seconds) {
                layers_s[stage] = *seconds;
            }
        }
        let step_s = |times: &StageTimes| self.simulator.run(times).total.seconds().0;
        let chosen = Sets::each(sets.clone());
        let times = self.split.times(self.case, &Sets::Each(sets));
        let line_s = step_s(&times);
        let whole_s = match &chosen {
            // Where all layers choose alike what is reduced beside them is not on a line.
            Sets::Every(_) => step_s(&self.split.times(self.case, &chosen)),
            Sets::Each(_) | Sets::First { .. } => line_s,
        };
        if self.best.as_ref().is_none_or(|best| whole_s < best.0) {
            self.best = Some((whole_s, chosen));
        }
        self.add_path(part, &times, (&layers_s, line_s))
    }

    /// Adds the longest path of a step to a part, if it did not have it.
    fn add_path(
        &mut self,
        part: &mut Part,
        times: &StageTimes,
        (layers_s, step_s): (&[f64], f64),
    ) -> bool {
        let path = self.simulator.longest(times);
        let mut slopes: Vec<f64> = path.backward.iter().copied().map(f64::from).collect();
        for (rank, of) in self.reduced.iter().enumerate() {
            let shows_s = of.at(layers_s[rank] - self.layers_s[rank]);
            let is_longer = path.reduce[rank] && shows_s > 0.0;
            slopes[rank] += if is_longer { of.slope } else { 0.0 };
        }
        let rounded: u32 = path.backward.iter().sum();
        let at_none = step_s - along(&slopes, layers_s) - ROUNDED_S * f64::from(rounded + 1);
        let is_no_longer =
            |known: &Path| known.slopes == slopes && at_none <= known.at_none + 1e-9 * step_s;
        let known = self.paths.iter().position(is_no_longer);
        let path = known.unwrap_or_else(|| {
            self.paths.push(Path { at_none, slopes });
            self.paths.len() - 1
        });
        add(&mut part.paths, path)
    }

    /// Paths of a part, with the best weights for its points, and those that have any. None where the program is not solved.
    fn weighted(&self, part: &Part) -> Option<(Path, Vec<usize>)> {
        let lines: Vec<&Path> = part.paths.iter().map(|&path| &self.paths[path]).collect();
        let mut problem = Problem::new(OptimizationDirection::Maximize);
        let base_s = lines[0].at_none;
        let weights: Vec<_> = lines
            .iter()
            .map(|line| problem.add_var(line.at_none - base_s, (0.0, 1.0)))
            .collect();
        let all: Vec<_> = weights.iter().map(|&weight| (weight, 1.0)).collect();
        problem.add_constraint(all, ComparisonOp::Eq, 1.0);
        for (rank, points) in part.points.iter().enumerate() {
            let own = problem.add_var(1.0, (f64::NEG_INFINITY, f64::INFINITY));
            for &point in points {
                let mut terms = vec![(own, 1.0)];
                let each = weights.iter().zip(&lines);
                terms.extend(each.map(|(&weight, line)| (weight, -self.of(line, rank, point))));
                problem.add_constraint(terms, ComparisonOp::Le, 0.0);
            }
        }
        let solution = problem.solve().ok()?.into_solution().ok()?;
        let weights: Vec<f64> = weights
            .iter()
            .map(|&of| solution.var_value_raw(of).max(0.0))
            .collect();
        let sum: f64 = weights.iter().sum();
        let each = || weights.iter().map(|weight| weight / sum).zip(&lines);
        let stages = 0..self.layers_s.len();
        let slopes = stages.map(|stage| {
            each()
                .map(|(weight, line)| weight * line.slopes[stage])
                .sum()
        });
        let held = part.paths.iter().zip(&weights);
        let held = held.filter(|(_, weight)| **weight > 1e-9 * sum);
        let path = Path {
            at_none: each().map(|(weight, line)| weight * line.at_none).sum(),
            slopes: slopes.collect(),
        };
        Some((path, held.map(|(&path, _)| path).collect()))
    }

    /// What a point of a rank counts on paths.
    fn of(&self, paths: &Path, rank: usize, point: usize) -> f64 {
        let stages = self.ranks[rank].stages.iter();
        let each = stages.zip(&self.points[rank][point].seconds);
        each.map(|(&stage, seconds)| paths.slopes[stage] * seconds)
            .sum()
    }

    /// The point of a rank in a part that counts the least on paths, of those that are known, and what it counts.
    fn best_known(&self, part: &Part, rank: usize, paths: &Path) -> Option<(usize, f64)> {
        let points = (0..self.points[rank].len()).filter(|&point| self.has(part, rank, point));
        let each = points.map(|point| (point, self.of(paths, rank, point)));
        each.min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Whether a part has a point of a rank.
    fn has(&self, part: &Part, rank: usize, point: usize) -> bool {
        let stages = self.ranks[rank].stages.iter();
        let mut each = stages.zip(&self.points[rank][point].seconds);
        each.all(|(&stage, seconds)| {
            let [from, to] = part.within_s[stage];
            (from..to).contains(seconds)
        })
    }

    /// Has ranks choose by the weights of a part as far as that may close it. The point of each that counts the least, and whether there are any that the
    /// part did not have.
    fn shorten(&mut self, part: &mut Part, below_s: f64) -> (Vec<usize>, bool) {
        let weighted = part.weighted.clone();
        let mut chosen = Vec::new();
        // What the point of each rank counts, and what none counts less than.
        let mut each: Vec<[f64; 2]> = Vec::new();
        for (rank, own) in self.ranks.iter().enumerate() {
            let known = self.best_known(part, rank, &weighted);
            let (point, known_s) = known.expect("one was looked for");
            let slopes = own.stages.iter().map(|&stage| weighted.slopes[stage]);
            let alike = slopes.fold(f64::INFINITY, f64::min);
            let more = own.stages.iter().map(|&stage| {
                let from_s = part.within_s[stage][0].max(self.layers_s[stage]);
                (weighted.slopes[stage] - alike) * from_s
            });
            let least_s = alike * part.sums[rank].0 + more.sum::<f64>();
            each.push([known_s, least_s.min(known_s)]);
            chosen.push(point);
        }
        let uncertain = |[known_s, least_s]: [f64; 2]| known_s - least_s;
        let least_s = |each: &[[f64; 2]]| {
            let least_s = weighted.at_none + each.iter().map(|own| own[1]).sum::<f64>();
            // Sums are rounded.
            least_s * (1.0 - 1e-12)
        };
        let mut order: Vec<usize> = (0..each.len()).collect();
        order.sort_by(|&a, &b| uncertain(each[b]).total_cmp(&uncertain(each[a])));
        for rank in order {
            let left_s = self.enough_s(below_s) - least_s(&each);
            let all_s: f64 = each.iter().copied().map(uncertain).sum();
            if left_s <= 0.0 || all_s <= UNCERTAIN * left_s || uncertain(each[rank]) <= 0.0 {
                break;
            }
            let (point, least_s) = self.shortened(part, rank, &weighted);
            each[rank][1] = each[rank][1].max(least_s);
            if let Some(point) = point {
                let own_s = self.of(&weighted, rank, point);
                if own_s < each[rank][0] {
                    (each[rank][0], chosen[rank]) = (own_s, point);
                }
            }
        }
        part.least_s = part.least_s.max(least_s(&each));
        let mut is_new = false;
        for (points, &point) in part.points.iter_mut().zip(&chosen) {
            is_new |= add(points, point);
        }
        (chosen, is_new)
    }

    /// Adds the longest path where ranks take what the best points of a part do on average. Whether it did not have it.
    fn between(&mut self, part: &mut Part) -> bool {
        let mut layers_s = self.layers_s.clone();
        for (rank, own) in self.ranks.iter().enumerate() {
            let best = self.best_points(part, rank);
            for (place, &stage) in own.stages.iter().enumerate() {
                let each = best
                    .iter()
                    .map(|&point| self.points[rank][point].seconds[place]);
                layers_s[stage] = each.sum::<f64>() / best.len() as f64;
            }
        }
        let backward = self
            .backward_s
            .iter()
            .zip(layers_s.iter().zip(&self.layers_s));
        let backward: Vec<f64> = backward
            .map(|(all, (own, once))| all + (own - once))
            .collect();
        let mut times = self.once.clone();
        times.backward = spans(&backward);
        times.last_backward.clone_from(&times.backward);
        for (rank, of) in self.reduced.iter().enumerate() {
            let shows_s = of.at(layers_s[rank] - self.layers_s[rank]);
            times.reduce[rank] = Seconds(shows_s.max(0.0)).to_span();
        }
        let step_s = self.simulator.run(&times).total.seconds().0;
        self.add_path(part, &times, (&layers_s, step_s))
    }

    /// Points of a rank that a part has and that count the least by its weights.
    fn best_points(&self, part: &Part, rank: usize) -> Vec<usize> {
        let points = &part.points[rank];
        let of = |point: usize| self.of(&part.weighted, rank, point);
        let least_s = points
            .iter()
            .map(|&point| of(point))
            .fold(f64::INFINITY, f64::min);
        let limit_s = least_s + 1e-9 * part.least_s;
        let best = points.iter().copied().filter(|&point| of(point) <= limit_s);
        best.collect()
    }

    /// The stage, and its seconds, at which choices of a part are to be divided: those that its weights mix differ the most there; where they mix none,
    /// those that it has.
    fn divided(&self, part: &Part) -> Option<(usize, f64)> {
        let farthest = |points: &dyn Fn(usize) -> Vec<usize>| {
            let mut farthest: Option<(f64, usize, f64)> = None;
            for (rank, own) in self.ranks.iter().enumerate() {
                let points = points(rank);
                for (place, &stage) in own.stages.iter().enumerate() {
                    let each = points.iter().map(|&point| &self.points[rank][point]);
                    let [from, to] = each.fold([f64::INFINITY, 0.0], |[from, to], point| {
                        let own_s = point.seconds[place];
                        [f64::min(from, own_s), f64::max(to, own_s)]
                    });
                    let by_s = part.weighted.slopes[stage] * (to - from);
                    // Sums of the same are rounded otherwise in another order.
                    let least_s = 1e-9 * part.least_s;
                    if by_s > farthest.map_or(least_s, |farthest| farthest.0) {
                        farthest = Some((by_s, stage, 0.5 * (from + to)));
                    }
                }
            }
            farthest.map(|(_, stage, at_s)| (stage, at_s))
        };
        let mixed = farthest(&|rank| self.best_points(part, rank));
        mixed.or_else(|| farthest(&|rank| part.points[rank].clone()))
    }
}

/// Adds something where it is not there. Whether it was not.
fn add(all: &mut Vec<usize>, own: usize) -> bool {
    let is_new = !all.contains(&own);
    all.extend(is_new.then_some(own));
    is_new
}

fn along(slopes: &[f64], seconds: &[f64]) -> f64 {
    let each = slopes.iter().zip(seconds);
    each.map(|(slope, seconds)| slope * seconds).sum()
}
