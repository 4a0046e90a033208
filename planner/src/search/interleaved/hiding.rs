//! [`Hiding`]: what passes that take turns hide of their exchanges, by how many layers their stages have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use super::super::candidate::{Case, Exchanges, own};
use super::super::line::Line;
use super::super::recompute::Sets;
use super::super::shape::Kind;
use super::super::stages::hides;
use super::program::{Limits, Point, takes_off};
use crate::simulate::{Hidden, LongestPath, Simulator};

/// What a stage may have, with the places of kinds of layers: the embedding, layers each under a recompute set, the head.
type Run = (bool, Vec<(usize, usize)>, bool);

/// See the module's documentation.
pub(super) struct Hiding<'q> {
    case: Case<'q>,
    /// Of each run that is unlike others.
    known: Vec<Exchanges>,
    /// By whether a stage is the first, the last or neither, by its first layer and by how many it has: which of them.
    places: [Vec<Vec<usize>>; 3],
    /// By stage that runs forward, chunks that run backward beside it.
    combined: Vec<BTreeSet<u32>>,
    /// By run that runs forward and by run that runs backward, seconds that are hidden, once they were asked for.
    together: Vec<OnceLock<f64>>,
}

/// A plane over the layers of a stage that runs forward and of one that runs backward, by what it is of no layers and of each more.
#[derive(Debug, Clone, Copy, Default)]
struct Plane {
    at_none: f64,
    slopes: [f64; 2],
}

/// Seconds that are no less than what passes hide within some limits: as near as can be where a point has their layers.
pub(super) struct Hides {
    /// By stage that runs forward and chunk that runs backward; nothing of those that never do at once.
    together: Vec<Vec<Plane>>,
    /// By stage that runs backward alone.
    alone: Vec<Line>,
}

/// What a path takes less, as a linear function of layers.
pub(super) struct Less {
    pub(super) at_none: f64,
    /// By stage.
    pub(super) slopes: Vec<f64>,
    /// Passes that are rounded.
    pub(super) passes: u64,
}

impl<'q> Hiding<'q> {
    /// Of a case within some limits, where some passes are combined; none where no pass hides anything, or where layers are of many kinds and all
    /// is taken off that may be hidden: see [`passes_s`](super::program::passes_s).
    pub(super) fn new(
        (case, sets): (Case<'q>, &Sets),
        limits: &Limits,
        simulator: &Simulator,
    ) -> Option<Self> {
        if !hides(case) || takes_off(case) {
            return None;
        }
        let question = case.question;
        let shape = case.shape;
        let num_layers = question.kind_of.len() as u32;
        let mut ids: BTreeMap<Run, usize> = BTreeMap::new();
        let mut known = Vec::new();
        let each = limits.stages.iter().map(|[_, most]| *most);
        let largest = each.max().unwrap_or(0).min(num_layers);
        let mut id = |[is_first, is_last]: [bool; 2], start: u32, layers: u32| {
            let own = (0..layers).map(|before| {
                let layer = start + before;
                (question.kind_of[layer as usize], sets.of(layer, before))
            });
            let run = (is_first, own.collect::<Vec<_>>(), is_last);
            *ids.entry(run).or_insert_with_key(|(_, layers, _)| {
                let end = |kind, is_there: bool| is_there.then_some((kind, sets.of_ends(), 1));
                let own = layers
                    .iter()
                    .map(|&(kind, set)| (&shape.kinds[kind], set, 1));
                let first = end(&shape.embedding, is_first).into_iter();
                let last = end(&shape.head, is_last);
                let pieces: Vec<(&Kind, usize, u32)> = first.chain(own).chain(last).collect();
                known.push(Exchanges::of(question, &pieces));
                known.len() - 1
            })
        };
        let [inner, first, last] = [[false, false], [true, false], [false, true]].map(|ends| {
            let starts = if ends[0] { 0..1 } else { 0..num_layers + 1 };
            let each = starts.map(|start| {
                let most = largest.min(num_layers - start);
                let fits = |layers: &u32| !ends[1] || start + layers == num_layers;
                let each = (0..=most).filter(fits);
                each.map(|layers| id(ends, start, layers))
                    .collect::<Vec<_>>()
            });
            each.collect::<Vec<_>>()
        });
        let together = known.len() * known.len();
        Some(Self {
            case,
            combined: simulator.combined(),
            places: [first, last, inner],
            together: (0..together).map(|_| OnceLock::new()).collect(),
            known,
        })
    }

    /// See [`Hides`].
    pub(super) fn near(&self, limits: &Limits, point: &Point) -> Hides {
        let layout = self.case.layout;
        let all = self.within(limits);
        let each = (0..all.len()).map(|stage| {
            let rank = layout.places().rank_of(stage as u32) as usize;
            let plane = |(chunk, other)| {
                let is_there = self.combined[stage].contains(&chunk);
                let plane = is_there.then(|| self.plane([stage, other], &all, point));
                plane.unwrap_or_default()
            };
            (0..).zip(own(layout, rank)).map(plane).collect()
        });
        let alone = all.iter().enumerate().map(|(stage, runs)| {
            let points = runs.of_layers().map(|(layers, runs)| {
                let each = runs.iter().map(|&run| self.alone_s(run));
                [layers, each.fold(0.0, f64::max)]
            });
            above(points, point.stages[stage])
        });
        Hides {
            together: each.collect(),
            alone: alone.collect(),
        }
    }

    /// By stage, what it may have within some limits.
    fn within(&self, limits: &Limits) -> Vec<Runs> {
        let num_layers = self.case.question.kind_of.len() as u32;
        let mut ends = limits.boundaries(num_layers);
        let last = ends.len() - 1;
        ends[last] = [num_layers; 2];
        let of_stage = |(stage, &[fewest, most]): (usize, &[u32; 2])| {
            let from = stage.checked_sub(1).map_or([0, 0], |before| ends[before]);
            let to = ends[stage];
            let places = &self.places[match stage {
                0 => 0,
                _ if stage == last => 1,
                _ => 2,
            }];
            let of_layers = |layers: u32| {
                let starts = from[0].max(to[0].saturating_sub(layers))..=from[1];
                let starts = starts.take_while(|start| start + layers <= to[1]);
                let mut runs: Vec<usize> = if stage == last {
                    starts.map(|start| places[start as usize][0]).collect()
                } else {
                    starts
                        .map(|start| places[start as usize][layers as usize])
                        .collect()
                };
                runs.sort_unstable();
                runs.dedup();
                runs
            };
            Runs {
                fewest,
                runs: (fewest..=most).map(of_layers).collect(),
            }
        };
        limits.stages.iter().enumerate().map(of_stage).collect()
    }

    fn plane(&self, [forward, backward]: [usize; 2], all: &[Runs], point: &Point) -> Plane {
        let at = [forward, backward].map(|stage| point.stages[stage]);
        if forward == backward {
            let points = all[forward].of_layers().map(|(layers, runs)| {
                let each = runs.iter().map(|&run| self.together_s(run, run));
                [layers, each.fold(0.0, f64::max)]
            });
            let line = above(points, at[0]);
            return Plane {
                at_none: line.at_none,
                slopes: [line.slope, 0.0],
            };
        }
        let [rows, columns] = [forward, backward].map(|stage| &all[stage]);
        let seconds = |forward: &[usize], backward: &[usize]| {
            let pairs = forward
                .iter()
                .flat_map(|&forward| backward.iter().map(move |&backward| (forward, backward)));
            let each = pairs.map(|(forward, backward)| self.together_s(forward, backward));
            each.fold(0.0, f64::max)
        };
        let table: Vec<Vec<f64>> = rows
            .runs
            .iter()
            .map(|forward| {
                let each = columns.runs.iter();
                each.map(|backward| seconds(forward, backward)).collect()
            })
            .collect();
        let cell = |runs: &Runs, at: f64| {
            let last = runs.runs.len() - 1;
            let place =
                ((at - f64::from(runs.fewest)).max(0.0) as usize).min(last.saturating_sub(1));
            [place, (place + 1).min(last)]
        };
        let [up, along] = [cell(rows, at[0]), cell(columns, at[1])];
        // Planes through three corners of the cell that the point is in, as high as all others need.
        let corners = (0..2).flat_map(|column| (0..2).map(move |row| (row, column)));
        let planes = corners.map(|(row, column)| {
            let slopes = [
                table[up[1]][along[column]] - table[up[0]][along[column]],
                table[up[row]][along[1]] - table[up[row]][along[0]],
            ];
            let plane = |at: [f64; 2]| slopes[0] * at[0] + slopes[1] * at[1];
            let each = rows.of_layers().zip(&table).flat_map(|((row, _), of)| {
                let each = columns.of_layers().zip(of);
                each.map(move |((column, _), seconds)| seconds - plane([row, column]))
            });
            let at_none = each.fold(f64::NEG_INFINITY, f64::max);
            Plane { at_none, slopes }
        });
        let lower = |a: &Plane, b: &Plane| a.at(at).total_cmp(&b.at(at));
        planes.min_by(lower).expect("a cell has corners")
    }

    fn together_s(&self, forward: usize, backward: usize) -> f64 {
        let known = &self.together[forward * self.known.len() + backward];
        *known.get_or_init(|| {
            let [forward, backward] = [forward, backward].map(|run| &self.known[run]);
            backward.hidden_s(self.case.question, Some(forward))
        })
    }

    fn alone_s(&self, run: usize) -> f64 {
        self.known[run].hidden_s(self.case.question, None)
    }
}

/// What a stage may have, by how many layers.
struct Runs {
    fewest: u32,
    runs: Vec<Vec<usize>>,
}

impl Runs {
    fn of_layers(&self) -> impl Iterator<Item = (f64, &Vec<usize>)> {
        (self.fewest..).map(f64::from).zip(&self.runs)
    }
}

/// Of the lines that are below none of some points, which are in order, the one that is the lowest at a place between them.
fn above(points: impl Iterator<Item = [f64; 2]>, place: f64) -> Line {
    let points: Vec<[f64; 2]> = points.map(|[at, seconds]| [at, -seconds]).collect();
    let below = Line::below(&points, place);
    Line {
        at_none: -below.at_none,
        slope: -below.slope,
    }
}

impl Plane {
    fn at(self, layers: [f64; 2]) -> f64 {
        self.at_none + self.slopes[0] * layers[0] + self.slopes[1] * layers[1]
    }
}

impl Hides {
    /// What is hidden at a point.
    pub(super) fn at(&self, case: Case<'_>, point: &Point) -> Hidden {
        let span = |seconds: f64| super::spans(&[seconds.max(0.0)])[0];
        let together = self.together.iter().enumerate().map(|(stage, planes)| {
            let others = own(
                case.layout,
                case.layout.places().rank_of(stage as u32) as usize,
            );
            let each = planes.iter().zip(others);
            each.map(|(plane, other)| {
                span(plane.at([stage, other].map(|stage| point.stages[stage])))
            })
            .collect()
        });
        let alone = self.alone.iter().zip(&point.stages);
        let alone = alone.map(|(line, &at)| span(line.at(at))).collect();
        Hidden::new(case.layout.places(), together.collect(), alone)
    }

    /// What a path hides.
    pub(super) fn along(&self, case: Case<'_>, path: &LongestPath) -> Less {
        let mut less = Less {
            at_none: 0.0,
            slopes: vec![0.0; self.alone.len()],
            passes: 0,
        };
        let mut add = |passes: u32, at_none: f64, of_stages: &[(usize, f64)]| {
            less.passes += u64::from(passes);
            less.at_none += f64::from(passes) * at_none;
            for &(stage, slope) in of_stages {
                less.slopes[stage] += f64::from(passes) * slope;
            }
        };
        for (stage, (planes, line)) in self.together.iter().zip(&self.alone).enumerate() {
            add(path.alone[stage], line.at_none, &[(stage, line.slope)]);
            let others = own(
                case.layout,
                case.layout.places().rank_of(stage as u32) as usize,
            );
            let each = path.together[stage].iter().zip(planes).zip(others);
            for ((&passes, plane), other) in each {
                let [forward, backward] = plane.slopes;
                add(
                    passes,
                    plane.at_none,
                    &[(stage, forward), (other, backward)],
                );
            }
        }
        less
    }
}
