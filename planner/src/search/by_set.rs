//! [`BySet`]: memory by recompute set, kept once where sets take as much.
//!
//! The ends of a model recompute nothing, and a dense layer has few of the modules that sets name: of dozens of sets
//! they have one or a few memories.

use std::ops::Index;
use std::sync::Arc;

use crate::runtime::{Away, Level, Passes, StageMemory, WorkingSets};

/// See the module's documentation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BySet {
    /// What no set changes.
    alike: Arc<StageMemory>,
    distinct: Arc<[OfSet]>,
    /// By set, a place among them.
    places: Arc<[u16]>,
}

/// What sets change of a memory: its passes and what they work in. A search keeps hundreds of thousands, and of most of
/// them nothing leaves for the host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OfSet {
    saved: Level,
    forward: Level,
    backward: Level,
    kept: Level,
    weight: Level,
    away: Option<Box<Away>>,
    pub(crate) sets: WorkingSets,
}

impl OfSet {
    fn of(memory: &StageMemory) -> Self {
        let Passes {
            saved,
            forward,
            backward,
            kept,
            weight,
            away,
        } = memory.passes;
        Self {
            saved,
            forward,
            backward,
            kept,
            weight,
            away: (away != Away::default()).then(|| Box::new(away)),
            sets: memory.sets,
        }
    }

    pub(crate) fn passes(&self) -> Passes {
        Passes {
            saved: self.saved,
            forward: self.forward,
            backward: self.backward,
            kept: self.kept,
            weight: self.weight,
            away: self.away.as_deref().copied().unwrap_or_default(),
        }
    }
}

/// A memory without what sets change.
fn alike(memory: &StageMemory) -> StageMemory {
    StageMemory {
        passes: Passes::default(),
        sets: WorkingSets::default(),
        ..*memory
    }
}

impl BySet {
    /// Of the memory under each set, in order.
    ///
    /// # Panics
    /// Where there are no sets, or one changes more than what runs: parameters, or what completes gradients.
    pub(crate) fn new(each: &[StageMemory]) -> Self {
        let alike_of = each.first().map(alike).expect("there is a set");
        let mut distinct: Vec<OfSet> = Vec::new();
        let places = each.iter().map(|memory| {
            let own = OfSet::of(memory);
            assert!(
                alike(memory) == alike_of,
                "sets change what runs, and nothing else"
            );
            let known = distinct.iter().position(|known| *known == own);
            known.unwrap_or_else(|| {
                distinct.push(own);
                distinct.len() - 1
            }) as u16
        });
        let places = places.collect();
        Self {
            alike: Arc::new(alike_of),
            distinct: distinct.into(),
            places,
        }
    }

    /// Sets.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// What no set changes: neither passes nor what they work in.
    pub(crate) fn alike(&self) -> &StageMemory {
        &self.alike
    }

    /// All of it under a set.
    pub(crate) fn under(&self, set: usize) -> StageMemory {
        let own = &self[set];
        StageMemory {
            passes: own.passes(),
            sets: own.sets,
            ..*self.alike
        }
    }

    /// By set.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &OfSet> {
        self.places
            .iter()
            .map(|&place| &self.distinct[usize::from(place)])
    }

    /// Each once, whatever sets it is of.
    pub(crate) fn distinct(&self) -> &[OfSet] {
        &self.distinct
    }
}

impl Index<usize> for BySet {
    type Output = OfSet;

    fn index(&self, set: usize) -> &OfSet {
        &self.distinct[usize::from(self.places[set])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moefold_profiles::units::Bytes;

    #[test]
    fn law_each_set_has_its_own() {
        // What leaves for the host comes back too.
        let of = |bytes| StageMemory {
            passes: Passes::keeping_beside(Bytes(bytes), Bytes(bytes % 2)),
            ..StageMemory::default()
        };
        let each = [7, 3, 7, 7, 9, 3].map(of);
        let kept = BySet::new(&each);
        assert_eq!(kept.len(), each.len());
        assert!(kept.iter().cloned().eq(each.iter().map(OfSet::of)));
        assert!((0..each.len()).all(|set| kept.under(set) == each[set]));
        assert_eq!(
            kept.distinct(),
            [7, 3, 9].map(|bytes| OfSet::of(&of(bytes)))
        );
    }
}
