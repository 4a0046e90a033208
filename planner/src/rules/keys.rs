//! [`KeyWays`]: how attention may reach the keys of other context-parallel ranks, and what each way demands.

use super::choices::{has_windows, heads};
use crate::choice::{CpComm, StackName};
use crate::layout::Illegal;
use crate::model::Model;
use crate::options::SearchOptions;

/// The ways that are tried. The default has none, which demands nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeyWays {
    /// The usual first.
    tried: Vec<CpComm>,
    /// Whether sequences of the model are cut by exchanging heads alone.
    uncut: bool,
    /// The numbers of heads of its attention.
    heads: Vec<u64>,
    /// Ranks of each level of a hierarchy, where they were given.
    sizes: Option<[u32; 2]>,
}

impl KeyWays {
    /// Those of a request: the one that was asked for, or all that its stack has.
    pub(crate) fn of(model: &Model, options: &SearchOptions) -> Self {
        let ours = options.stack == StackName::Moefold;
        let has = |way: &CpComm| !ours || *way != CpComm::Hierarchical;
        Self {
            tried: match (options.cp_comm, options.cp_sizes) {
                (Some(way), _) => vec![way],
                // Levels that were given are of one way.
                (None, Some(_)) => vec![CpComm::Hierarchical],
                (None, None) => CpComm::ALL.into_iter().filter(has).collect(),
            },
            uncut: ours && has_windows(model),
            heads: heads(model),
            sizes: options.cp_sizes,
        }
    }

    /// The ways that are tried, whatever the degrees are.
    pub(super) fn tried(&self) -> &[CpComm] {
        &self.tried
    }

    /// The ways that so many ranks may take; of one rank, which has all keys, the first.
    pub(crate) fn legal(&self, tp: u32, cp: u32) -> impl Iterator<Item = CpComm> {
        let all = self.tried.iter().copied();
        all.take(if cp > 1 { usize::MAX } else { 1 })
            .filter(move |&way| self.broken(way, tp, cp).is_empty())
    }

    /// Adds the rules that the first way breaks, where no way breaks none.
    pub(super) fn check(&self, tp: u32, cp: u32, broken: &mut Vec<Illegal>) {
        if let Some(&first) = self.tried.first()
            && self.legal(tp, cp).next().is_none()
        {
            broken.extend(self.broken(first, tp, cp));
        }
    }

    /// The rules that one way breaks.
    fn broken(&self, way: CpComm, tp: u32, cp: u32) -> Vec<Illegal> {
        let mut broken = Vec::new();
        if cp <= 1 {
            return broken;
        }
        let uneven = |over: u64| {
            let mut heads = self.heads.iter().copied();
            heads.find(|heads| over > 0 && !heads.is_multiple_of(over))
        };
        let tp_times = |ranks: u32| u64::from(tp) * u64::from(ranks);
        match way {
            CpComm::P2p | CpComm::Allgather if self.uncut => {
                let cp_comm = way;
                broken.push(Illegal::UncutAttention { cp_comm, cp });
            }
            CpComm::A2a => {
                if let Some(heads) = uneven(tp_times(cp)) {
                    broken.push(Illegal::HeadsOverCp { heads, tp, cp });
                }
            }
            CpComm::P2p | CpComm::Allgather | CpComm::Hierarchical => {}
        }
        if let Some(sizes) = self.sizes {
            let [inside, outside] = sizes;
            if u64::from(inside) * u64::from(outside) != u64::from(cp) {
                broken.push(Illegal::HierarchySizes { sizes, cp });
            }
            if let Some(heads) = uneven(tp_times(inside)).filter(|_| inside > 1) {
                broken.push(Illegal::HeadsOverLevel { heads, tp, inside });
            }
        }
        broken
    }
}
