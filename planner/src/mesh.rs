//! The rank arithmetic of a layout: which ranks form which group.
//!
//! The only place where rank numbers are taken apart. Two grids lie over the same ranks, one for
//! attention (tp, cp, dp, pp) and one for experts (etp, ep, edp, pp); in each, a rank is a number in
//! mixed radix whose digits are its coordinates, the fastest axis first in the [`Order`]. A group is
//! what remains when every axis outside a [`GroupKind`]'s set is held fixed. This is the construction
//! of Megatron-Core (`megatron/core/parallel_state.py`, `RankGenerator`), so that a plan's groups are
//! the groups its launch will have. Where groups sit in a cluster is in [`placement()`]; printing
//! them is in [`listing()`].

mod listing;
mod placement;
#[cfg(test)]
mod tests;

use crate::layout::grids;
use crate::layout::{Degrees, Illegal, Layout};

pub use crate::layout::{Axis, Order};
pub use listing::{GroupListing, describe, listing, mesh};
pub use placement::{Placement, cut, domain_in_job, placement};

/// Kinds of process group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupKind {
    /// Tensor and sequence parallel, vocabulary-parallel loss.
    Tp,
    /// Context parallel: ring or all-to-all attention.
    Cp,
    /// Data parallel: who sees different samples.
    Dp,
    /// Dense gradients and dense optimizer shards.
    DpCp,
    /// Token counts of the balancing losses.
    TpCp,
    /// Expert-load counts over all tokens of a microbatch round.
    TpDpCp,
    /// Pipeline neighbours; the same in both grids.
    Pp,
    /// Token exchange between experts.
    Ep,
    /// The slices of one expert.
    Etp,
    /// Everyone who holds a part of one set of experts.
    TpEp,
    /// Expert gradients and expert optimizer shards.
    Edp,
    /// The expert part of the gradient norm.
    TpEpPp,
}

impl GroupKind {
    /// Every kind, in the order listings show them.
    pub const ALL: [Self; 12] = [
        Self::Tp,
        Self::Cp,
        Self::Dp,
        Self::DpCp,
        Self::TpCp,
        Self::TpDpCp,
        Self::Pp,
        Self::Ep,
        Self::Etp,
        Self::TpEp,
        Self::Edp,
        Self::TpEpPp,
    ];

    /// The name in listings and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tp => "tp",
            Self::Cp => "cp",
            Self::Dp => "dp",
            Self::DpCp => "dp-cp",
            Self::TpCp => "tp-cp",
            Self::TpDpCp => "tp-dp-cp",
            Self::Pp => "pp",
            Self::Ep => "ep",
            Self::Etp => "etp",
            Self::TpEp => "tp-ep",
            Self::Edp => "edp",
            Self::TpEpPp => "tp-ep-pp",
        }
    }

    /// Whether a group of this name is of ranks that hold the same parameters: their collectives go beside those
    /// of layers.
    pub fn over_replicas(name: &str) -> bool {
        [Self::DpCp, Self::Edp]
            .iter()
            .any(|kind| kind.name() == name)
    }

    /// Whether a group of this name is of ranks that send each other tokens for their experts: other collectives of
    /// layers go beside those.
    pub fn sends_tokens(name: &str) -> bool {
        Self::Ep.name() == name
    }

    /// Whether the group belongs to the expert grid.
    pub fn is_expert(self) -> bool {
        matches!(
            self,
            Self::Ep | Self::Etp | Self::TpEp | Self::Edp | Self::TpEpPp
        )
    }

    /// The axes that vary inside a group, in the terms of its own grid.
    fn axes(self) -> &'static [Axis] {
        match self {
            Self::Tp | Self::Etp => &[Axis::Tp],
            Self::Cp => &[Axis::Cp],
            Self::Dp | Self::Edp => &[Axis::Dp],
            Self::DpCp => &[Axis::Dp, Axis::Cp],
            Self::TpCp => &[Axis::Tp, Axis::Cp],
            Self::TpDpCp => &[Axis::Tp, Axis::Dp, Axis::Cp],
            Self::Pp => &[Axis::Pp],
            Self::Ep => &[Axis::Ep],
            Self::TpEp => &[Axis::Tp, Axis::Ep],
            Self::TpEpPp => &[Axis::Tp, Axis::Ep, Axis::Pp],
        }
    }
}

/// Where a rank stands on every axis of both grids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(
    missing_docs,
    reason = "the standard abbreviations, spelled out in layout.rs"
)]
pub struct Coordinates {
    pub tp: u32,
    pub cp: u32,
    pub dp: u32,
    pub pp: u32,
    pub etp: u32,
    pub ep: u32,
    pub edp: u32,
}

/// One axis of a grid: how many positions, and how far apart in rank numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Digit {
    axis: Axis,
    size: u32,
    stride: u32,
}

impl Digit {
    fn of(self, rank: u32) -> u32 {
        rank / self.stride % self.size
    }
}

/// The digits of rank numbers, fastest first.
type Grid = [Digit; 5];

/// Both grids over the ranks of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    gpus: u32,
    attention: Grid,
    expert: Grid,
}

impl Mesh {
    /// Lays both grids over the ranks, or says which do not fit.
    ///
    /// Needs no model: whether the degrees suit one is [`crate::rules::Rules`]' question.
    pub fn new(degrees: &Degrees, order: Order) -> Result<Self, Vec<Illegal>> {
        let mut broken = Vec::new();
        let Some((dp, edp)) = grids(degrees, &mut broken).filter(|_| broken.is_empty()) else {
            return Err(broken);
        };
        let mesh = Self::of_sizes(degrees, dp, edp, order);
        if mesh.pipeline_groups_agree() {
            Ok(mesh)
        } else {
            let pp = degrees.pp;
            Err(vec![Illegal::PipelineGroups { pp, dp, edp }])
        }
    }

    /// The mesh of a legal layout, in its order.
    pub fn of(layout: &Layout) -> Self {
        let (dp, edp) = (layout.dp(), layout.edp());
        Self::of_sizes(&layout.degrees(), dp, edp, layout.order())
    }

    fn of_sizes(d: &Degrees, dp: u32, edp: u32, order: Order) -> Self {
        let grid = |size: &dyn Fn(Axis) -> u32| {
            let mut stride = 1;
            order.axes().map(|axis| {
                let digit = Digit {
                    axis,
                    size: size(axis),
                    stride,
                };
                stride *= digit.size;
                digit
            })
        };
        Self {
            gpus: d.gpus,
            attention: grid(&|axis| match axis {
                Axis::Tp => d.tp,
                Axis::Cp => d.cp,
                Axis::Ep => 1,
                Axis::Dp => dp,
                Axis::Pp => d.pp,
            }),
            expert: grid(&|axis| match axis {
                Axis::Tp => d.etp,
                Axis::Cp => 1,
                Axis::Ep => d.ep,
                Axis::Dp => edp,
                Axis::Pp => d.pp,
            }),
        }
    }

    /// Equal pp strides are equal pp groups: a group is a rank with its pp digit replaced.
    fn pipeline_groups_agree(&self) -> bool {
        let stride = |grid: &Grid| digit(grid, Axis::Pp).stride;
        digit(&self.attention, Axis::Pp).size == 1
            || stride(&self.attention) == stride(&self.expert)
    }

    /// Ranks of the job.
    pub fn gpus(&self) -> u32 {
        self.gpus
    }

    /// Ranks of each group of a kind.
    pub fn group_size(&self, kind: GroupKind) -> u32 {
        self.varying(kind).map(|digit| digit.size).product()
    }

    /// Groups of a kind.
    pub fn num_groups(&self, kind: GroupKind) -> u32 {
        self.gpus / self.group_size(kind)
    }

    /// All groups of a kind, ordered by their first rank, each in ascending order.
    pub fn groups(&self, kind: GroupKind) -> Vec<Vec<u32>> {
        (0..self.num_groups(kind))
            .map(|group| self.members(kind, self.first_rank(kind, group)))
            .collect()
    }

    /// The group of a kind that a rank belongs to, in ascending order.
    pub fn group_of(&self, kind: GroupKind, rank: u32) -> Vec<u32> {
        self.members(kind, rank - self.offset(kind, rank))
    }

    /// Where a rank stands on every axis.
    pub fn coordinates(&self, rank: u32) -> Coordinates {
        assert!(rank < self.gpus, "rank {rank} of {} ranks", self.gpus);
        let attention = |axis| digit(&self.attention, axis).of(rank);
        let expert = |axis| digit(&self.expert, axis).of(rank);
        Coordinates {
            tp: attention(Axis::Tp),
            cp: attention(Axis::Cp),
            dp: attention(Axis::Dp),
            pp: attention(Axis::Pp),
            etp: expert(Axis::Tp),
            ep: expert(Axis::Ep),
            edp: expert(Axis::Dp),
        }
    }

    fn grid(&self, kind: GroupKind) -> &Grid {
        if kind.is_expert() {
            &self.expert
        } else {
            &self.attention
        }
    }

    /// The digits that vary inside a group, fastest first.
    fn varying(&self, kind: GroupKind) -> impl Iterator<Item = Digit> {
        let inside = move |digit: &Digit| kind.axes().contains(&digit.axis);
        self.grid(kind).iter().copied().filter(inside)
    }

    /// The digits that tell groups apart, fastest first.
    fn fixed(&self, kind: GroupKind) -> impl Iterator<Item = Digit> {
        let outside = move |digit: &Digit| !kind.axes().contains(&digit.axis);
        self.grid(kind).iter().copied().filter(outside)
    }

    /// The lowest rank of group number `group`.
    fn first_rank(&self, kind: GroupKind, group: u32) -> u32 {
        decode(self.fixed(kind), group)
    }

    /// How far a rank lies above the lowest rank of its group.
    fn offset(&self, kind: GroupKind, rank: u32) -> u32 {
        self.varying(kind)
            .map(|digit| digit.of(rank) * digit.stride)
            .sum()
    }

    fn members(&self, kind: GroupKind, first: u32) -> Vec<u32> {
        (0..self.group_size(kind))
            .map(|index| first + decode(self.varying(kind), index))
            .collect()
    }
}

fn digit(grid: &Grid, axis: Axis) -> Digit {
    *grid
        .iter()
        .find(|digit| digit.axis == axis)
        .expect("an order names every axis")
}

/// The rank whose given digits spell `number` and whose others are zero.
fn decode(digits: impl Iterator<Item = Digit>, mut number: u32) -> u32 {
    let mut rank = 0;
    for digit in digits {
        rank += number % digit.size * digit.stride;
        number /= digit.size;
    }
    rank
}

/// The ranks with the two ends of the model that a rank computes: the first and the last of its pipeline
/// where it is one of the two, which may share an embedding; else, and where one rank has both, the rank alone. Under
/// the default order.
pub fn ends_of(layout: &Layout, rank: u32) -> Vec<u32> {
    let pipeline = group_of(layout, GroupKind::Pp, rank);
    match pipeline[..] {
        [first, .., last] if layout.places().parts_ends() && [first, last].contains(&rank) => {
            vec![first, last]
        }
        _ => vec![rank],
    }
}

/// The chunks that a context-parallel rank has of a sequence of `2 cp` equal ones: one from either end, so that
/// causal attention is as much work on every rank. They are those of Megatron-Core (`megatron/core/utils.py`,
/// `get_batch_on_this_cp_rank`).
pub fn chunks(cp: u32, rank: u32) -> [u32; 2] {
    assert!(rank < cp, "context-parallel rank {rank} of {cp}");
    [rank, 2 * cp - 1 - rank]
}

/// All groups of a kind of a layout.
pub fn groups(layout: &Layout, kind: GroupKind) -> Vec<Vec<u32>> {
    Mesh::of(layout).groups(kind)
}

/// The group of a kind that a rank belongs to, of a layout.
pub fn group_of(layout: &Layout, kind: GroupKind, rank: u32) -> Vec<u32> {
    Mesh::of(layout).group_of(kind, rank)
}

/// Where a rank stands on every axis, of a layout.
pub fn coordinates(layout: &Layout, rank: u32) -> Coordinates {
    Mesh::of(layout).coordinates(rank)
}
