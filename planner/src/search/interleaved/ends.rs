//! [`Ends`]: what ranks take beside their passes, by how many layers they have.

use std::collections::{BTreeMap, BTreeSet};

use moefold_profiles::units::Span;

use super::super::candidate::{Case, StageSplit, own};
use super::super::recompute::Sets;
use super::program::{Limits, Line, Point};

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Ends {
    /// By layers of a rank.
    known: BTreeMap<u32, End>,
}

/// With so many layers on each rank.
struct End {
    /// Of the first kind of layer alone, all in the first stage of each rank.
    split: StageSplit,
    /// By rank, with these.
    reduce_s: Vec<f64>,
    /// By rank, with layers of the kind that takes the least.
    optimizer_s: Vec<f64>,
}

impl Ends {
    /// Of ranks within some limits.
    pub(super) fn new(case: Case<'_>, sets: &Sets, limits: &Limits) -> Self {
        let numbers: BTreeSet<u32> = limits
            .ranks
            .iter()
            .flat_map(|&[fewest, most]| fewest..=most)
            .collect();
        let known = numbers
            .into_iter()
            .map(|layers| (layers, End::new(case, sets, layers)));
        Self {
            known: known.collect(),
        }
    }

    /// By rank, lines that are below what its weights take that are gathered before the first forward pass, what its gradients take that
    /// are reduced after the last backward pass, and its optimizer step, in seconds by layers of the rank, within some limits: as near as
    /// can be where a point has them.
    pub(super) fn lines(
        &self,
        (case, sets): (Case<'_>, &Sets),
        limits: &Limits,
        point: &Point,
    ) -> Vec<[Line; 3]> {
        let (layout, shape) = (case.layout, case.shape);
        let kinds = || case.question.kind_of.iter().map(|&kind| &shape.kinds[kind]);
        let slowest_s = kinds().map(|kind| kind.forward_s).fold(0.0, f64::max);
        // When the first message of a rank is there at the latest.
        let mut arrives = 0.0;
        let mut lines = Vec::new();
        for rank in 0..layout.pp() as usize {
            let [fewest, most] = limits.ranks[rank];
            let mut points = [const { Vec::new() }; 3];
            for layers in fewest..=most {
                let own = self.of_rank((case, sets), rank, layers, arrives);
                for (points, seconds) in points.iter_mut().zip(own) {
                    points.push([f64::from(layers), seconds]);
                }
            }
            let layers: f64 = own(layout, rank).map(|stage| point.stages[stage]).sum();
            lines.push(points.map(|points| Line::below(&points, layers)));
            arrives += slowest_s * f64::from(limits.stages[rank][1]);
            if rank == 0 {
                arrives += shape.embedding.forward_s;
            }
        }
        lines
    }

    /// Seconds of the three on a rank of so many layers, whose first message is there after some: no more than it takes whatever layers
    /// these are.
    fn of_rank(
        &self,
        (case, sets): (Case<'_>, &Sets),
        rank: usize,
        layers: u32,
        arrives: f64,
    ) -> [f64; 3] {
        let end = &self.known[&layers];
        let kind_of = &case.question.kind_of;
        let is_one_kind = kind_of.iter().all(|kind| *kind == kind_of[0]);
        // Reductions run beside backward passes, which take as long in any order of stages where all layers do.
        let is_alike = is_one_kind && matches!(sets, Sets::Every(_));
        // Replicas that divide whole tensors may each have less to do where these differ; of elements they have no less than where all
        // layers are of the smallest kind.
        let is_sum = is_one_kind || !case.question.options.optimizer.deals_tensors();
        [
            if is_one_kind {
                end.split.gather_shows_s(case, rank, arrives)
            } else {
                0.0
            },
            if is_alike { end.reduce_s[rank] } else { 0.0 },
            if is_sum { end.optimizer_s[rank] } else { 0.0 },
        ]
    }
}

impl End {
    fn new(case: Case<'_>, sets: &Sets, layers: u32) -> Self {
        let layout = case.layout;
        let pp = layout.pp() as usize;
        let of_kind = |kind: usize| {
            let kind_of = &case.question.kind_of;
            let layer = kind_of.iter().position(|own| *own == kind)? as u32;
            let mut stages = vec![Vec::new(); layout.stages() as usize];
            stages[..pp].fill(vec![layer; layers as usize]);
            let split = StageSplit::new(case, stages);
            let times = split.times(case, sets);
            let seconds =
                |spans: &[Span]| spans[..pp].iter().map(|span| span.seconds().0).collect();
            Some(Self {
                split,
                reduce_s: seconds(&times.reduce),
                optimizer_s: seconds(&times.optimizer),
            })
        };
        let each = (0..case.shape.kinds.len()).filter_map(of_kind);
        let least = each.reduce(|mut least, own| {
            for (least, own) in least.optimizer_s.iter_mut().zip(own.optimizer_s) {
                *least = least.min(own);
            }
            least
        });
        least.expect("there are layers")
    }
}
