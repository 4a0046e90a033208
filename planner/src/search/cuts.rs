//! [`Cuts`]: how the layers of a shape were balanced over stages, for those who ask again.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::layout::Places;

/// Layers of stages that were balanced before, by the places of stages; none where layers are too few.
#[derive(Debug, Default)]
pub(crate) struct Cuts(Mutex<HashMap<Places, Option<Vec<Vec<u32>>>>>);

impl Cuts {
    /// Those of some places, balanced where they are not known.
    pub(crate) fn of(
        &self,
        places: Places,
        balanced: impl FnOnce() -> Option<Vec<Vec<u32>>>,
    ) -> Option<Vec<Vec<u32>>> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cuts) = known().get(&places) {
            return cuts.clone();
        }
        let cuts = balanced();
        known().insert(places, cuts.clone());
        cuts
    }
}
