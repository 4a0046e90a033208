//! [`Ends`]: what ranks take beside their passes, by how many layers they have.

use std::collections::{BTreeMap, BTreeSet};

use moefold_profiles::units::Span;

use super::super::candidate::{Case, StageSplit, own};
use super::super::line::Line;
use super::super::recompute::Sets;
use super::program::{Limits, MOST_KINDS, Point};

/// Layers of a rank, by kind.
type Counts = Vec<u32>;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Ends {
    known: BTreeMap<Counts, End>,
    /// The first layer of each kind and the one behind its last, where no others are between them: so many of each are then the same
    /// layers in the same order, whatever stages they are in. None where that is not so.
    blocks: Option<Vec<[u32; 2]>>,
}

/// With so many layers of each kind on each rank.
struct End {
    /// A split that has all of them in the first stage of each rank.
    split: StageSplit,
    /// By rank.
    reduce_s: Vec<f64>,
    /// By rank.
    optimizer_s: Vec<f64>,
}

impl Ends {
    /// Of ranks within some limits.
    pub(super) fn new(case: Case<'_>, sets: &Sets, limits: &Limits) -> Self {
        let mut ends = Self {
            known: BTreeMap::new(),
            blocks: blocks(&case.question.kind_of, case.shape.kinds.len()),
        };
        let mut all: BTreeSet<Counts> = BTreeSet::new();
        for (rank, &[fewest, most]) in limits.ranks.iter().enumerate() {
            let kinds = ends.of_kinds(case, limits, rank);
            let each = (fewest..=most).flat_map(|layers| ends.ways(case, layers, &kinds));
            all.extend(each);
        }
        let known = all.into_iter().map(|counts| {
            let end = End::new(case, sets, &counts);
            (counts, end)
        });
        ends.known = known.collect();
        ends
    }

    /// By rank, lines that are below what its weights take that are gathered before the first forward pass, what its gradients take that
    /// are reduced after the last backward pass, and its optimizer step, in seconds by layers of the rank, within some limits: as near as
    /// can be where a point has them.
    pub(super) fn lines(&self, case: Case<'_>, limits: &Limits, point: &Point) -> Vec<[Line; 3]> {
        let (layout, shape) = (case.layout, case.shape);
        let kinds = || case.question.kind_of.iter().map(|&kind| &shape.kinds[kind]);
        let slowest_s = kinds().map(|kind| kind.forward_s).fold(0.0, f64::max);
        // When the first message of a rank is there at the latest.
        let mut arrives = 0.0;
        let mut lines = Vec::new();
        for rank in 0..layout.pp() as usize {
            let [fewest, most] = limits.ranks[rank];
            let kinds = self.of_kinds(case, limits, rank);
            let mut points = [const { Vec::new() }; 3];
            for layers in fewest..=most {
                let own = self.of_rank(case, rank, (layers, &kinds), arrives);
                let own = own.unwrap_or_default();
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
    /// these are, among so many of each kind; none where nothing is known of them.
    fn of_rank(
        &self,
        case: Case<'_>,
        rank: usize,
        (layers, kinds): (u32, &[[u32; 2]]),
        arrives: f64,
    ) -> Option<[f64; 3]> {
        let ways = self.ways(case, layers, kinds).into_iter();
        let each = ways.map(|counts| {
            // Ranks of more layers than were within limits.
            let Some(end) = self.known.get(&counts) else {
                return [0.0; 3];
            };
            if self.blocks.is_none() {
                return [0.0, 0.0, end.optimizer_s[rank]];
            }
            let gather_s = end.split.gather_shows_s(case, rank, arrives);
            [gather_s, end.reduce_s[rank], end.optimizer_s[rank]]
        });
        each.reduce(|least, own| [0, 1, 2].map(|end| f64::min(least[end], own[end])))
    }

    /// The fewest and the most layers of each kind that a rank may have within some limits; of kinds between which there are others, those
    /// that it has.
    fn of_kinds(&self, case: Case<'_>, limits: &Limits, rank: usize) -> Vec<[u32; 2]> {
        let Some(blocks) = &self.blocks else {
            return Vec::new();
        };
        let ends = limits.boundaries(case.question.kind_of.len() as u32);
        let of_stage = |stage: usize, [first, behind]: [u32; 2]| {
            limits.counts(&ends, stage, |layer| layer.clamp(first, behind) - first)
        };
        let of_kind = |&block: &[u32; 2]| {
            let stages = own(case.layout, rank).map(|stage| of_stage(stage, block));
            stages.fold([0, 0], |sum, own| [sum[0] + own[0], sum[1] + own[1]])
        };
        blocks.iter().map(of_kind).collect()
    }

    /// So many layers by kind, within limits of each; where these are not known, all of one, of which any others have no less to update,
    /// but where replicas divide whole tensors: these may each have less where tensors differ.
    fn ways(&self, case: Case<'_>, layers: u32, kinds: &[[u32; 2]]) -> Vec<Counts> {
        if self.blocks.is_some() {
            return among(layers, kinds);
        }
        let kinds: BTreeSet<usize> = case.question.kind_of.iter().copied().collect();
        if kinds.len() > MOST_KINDS || case.question.options.optimizer.deals_tensors() {
            return Vec::new();
        }
        let of_kind = |kind: usize| {
            let mut counts = vec![0; case.shape.kinds.len()];
            counts[kind] = layers;
            counts
        };
        kinds.into_iter().map(of_kind).collect()
    }
}

/// All numbers within some limits that add up to something.
fn among(sum: u32, limits: &[[u32; 2]]) -> Vec<Counts> {
    let Some((&[fewest, most], rest)) = limits.split_last() else {
        return if sum == 0 {
            vec![Vec::new()]
        } else {
            Vec::new()
        };
    };
    let each = (fewest..=most.min(sum)).flat_map(|last| {
        let others = among(sum - last, rest).into_iter();
        others.map(move |mut counts| {
            counts.push(last);
            counts
        })
    });
    each.collect()
}

/// The first layer of each kind and the one behind its last, where layers of a kind follow one another and kinds are few.
fn blocks(kind_of: &[usize], kinds: usize) -> Option<Vec<[u32; 2]>> {
    let mut blocks = vec![[0; 2]; kinds];
    for (layer, &kind) in (0..).zip(kind_of) {
        let [first, behind] = &mut blocks[kind];
        if first == behind {
            *first = layer;
        } else if *behind < layer {
            return None;
        }
        *behind = layer + 1;
    }
    let some = blocks.iter().filter(|[first, behind]| first < behind);
    (some.count() <= MOST_KINDS).then_some(blocks)
}

impl End {
    fn new(case: Case<'_>, sets: &Sets, counts: &Counts) -> Self {
        let layout = case.layout;
        let pp = layout.pp() as usize;
        let kind_of = &case.question.kind_of;
        // Kinds are in the order of their layers, and layers of a kind are alike.
        let of_kind = |(kind, &count): (usize, &u32)| {
            let first = kind_of.iter().position(|own| *own == kind);
            first.map(|first| vec![first as u32; count as usize])
        };
        let mut layers: Vec<Vec<u32>> = counts.iter().enumerate().filter_map(of_kind).collect();
        layers.sort_unstable();
        let layers = layers.concat();
        let is_one_kind = counts.iter().filter(|count| **count > 0).count() < 2;
        let mut stages = vec![Vec::new(); layout.stages() as usize];
        stages[..pp].fill(layers);
        let split = StageSplit::new(case, stages);
        let times = split.times(case, sets);
        let seconds = |spans: &[Span]| -> Vec<f64> {
            spans[..pp].iter().map(|span| span.seconds().0).collect()
        };
        // Beside backward passes, of which no layers may have longer ones.
        let beside = |most: &Sets| {
            let ranks = 0..pp;
            let of_rank = |rank| split.reduced_at_least_s(case, rank, most);
            ranks.map(of_rank).collect()
        };
        let longest = || super::longest_sets(case).map(|longest| beside(&longest));
        let reduce_s = match sets {
            _ if !StageSplit::hides_reductions(case) => seconds(&times.reduce),
            Sets::Every(_) => seconds(&times.reduce),
            &Sets::First { layers, set } if is_one_kind => beside(&Sets::First {
                layers: layers.saturating_mul(layout.vpp()),
                set,
            }),
            &Sets::First { set, .. } => beside(&Sets::Every(set)),
            Sets::Each(_) => longest().unwrap_or_else(|| vec![0.0; pp]),
        };
        Self {
            reduce_s,
            optimizer_s: seconds(&times.optimizer),
            split,
        }
    }
}
