//! [`BySet`]: memory by recompute set, kept once where sets take as much.
//!
//! The ends of a model recompute nothing, and a dense layer has few of the modules that sets name: of dozens of sets
//! they have one or a few memories.

use std::ops::Index;
use std::sync::Arc;

use crate::runtime::StageMemory;

/// See the module's documentation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BySet {
    distinct: Arc<[StageMemory]>,
    /// By set, a place among them.
    places: Arc<[u16]>,
}

impl BySet {
    /// Of the memory under each set, in order.
    pub(crate) fn new(each: &[StageMemory]) -> Self {
        let mut distinct: Vec<StageMemory> = Vec::new();
        let places = each.iter().map(|memory| {
            let known = distinct.iter().position(|known| known == memory);
            known.unwrap_or_else(|| {
                distinct.push(*memory);
                distinct.len() - 1
            }) as u16
        });
        let places = places.collect();
        Self {
            distinct: distinct.into(),
            places,
        }
    }

    /// Sets.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// By set.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &StageMemory> {
        self.places
            .iter()
            .map(|&place| &self.distinct[usize::from(place)])
    }

    /// Each once, whatever sets it is of.
    pub(crate) fn distinct(&self) -> &[StageMemory] {
        &self.distinct
    }
}

impl Index<usize> for BySet {
    type Output = StageMemory;

    fn index(&self, set: usize) -> &StageMemory {
        &self.distinct[usize::from(self.places[set])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Passes;
    use moefold_profiles::units::Bytes;

    #[test]
    fn law_each_set_has_its_own() {
        let of = |bytes| StageMemory {
            passes: Passes::keeping(Bytes(bytes)),
            ..StageMemory::default()
        };
        let each = [7, 3, 7, 7, 9, 3].map(of);
        let kept = BySet::new(&each);
        assert_eq!(kept.len(), each.len());
        assert!(kept.iter().eq(&each));
        assert!((0..each.len()).all(|set| kept[set] == each[set]));
        assert_eq!(kept.distinct(), [7, 3, 9].map(of));
    }
}
