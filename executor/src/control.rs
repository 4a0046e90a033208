//! [`Control`]: what a run is told while it trains, and [`Watch`]: who hears of it.
//!
//! What one rank was told, all ranks do after the same step: they agree in the exchange that ends every step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use moefold_profiles::run::StepRecord;

use crate::error::Error;

/// What a run is told while it trains. Shared by the ranks of a process.
#[derive(Debug, Default)]
pub struct Control {
    /// Why to stop; 0 where nobody asks for it.
    stop: Arc<AtomicUsize>,
    save: AtomicBool,
    /// Why the ranks stopped; 0 where they did not.
    stopped: AtomicUsize,
}

/// What ranks agree to do after a step, the greatest of what any of them was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wish {
    /// Go on.
    None,
    /// Save a checkpoint where that can be, then go on.
    Save,
    /// Save a checkpoint and end, for a reason.
    Stop(usize),
}

impl Control {
    /// A run that ends after the step in which `stop` is no longer 0, with a checkpoint. The number is its reason.
    pub fn stopped_by(stop: Arc<AtomicUsize>) -> Self {
        Self {
            stop,
            ..Self::default()
        }
    }

    /// Asks for a checkpoint after the step.
    pub fn save(&self) {
        self.save.store(true, Ordering::Relaxed);
    }

    /// Why the run ended before its last step, where it did.
    pub fn stopped(&self) -> Option<usize> {
        Some(self.stopped.load(Ordering::Relaxed)).filter(|reason| *reason > 0)
    }

    /// Notes that the run ends here.
    pub(crate) fn note_stop(&self, reason: usize) {
        self.stopped.store(reason, Ordering::Relaxed);
    }

    /// What this process was told since it was last asked.
    pub(crate) fn wish(&self) -> Wish {
        match self.stop.load(Ordering::Relaxed) {
            0 if self.save.swap(false, Ordering::Relaxed) => Wish::Save,
            0 => Wish::None,
            reason => Wish::Stop(reason),
        }
    }
}

impl Wish {
    /// As ranks tell each other.
    pub(crate) fn word(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Save => 1,
            Self::Stop(reason) => 1 + reason as u64,
        }
    }

    pub(crate) fn of_word(word: u64) -> Self {
        match word {
            0 => Self::None,
            1 => Self::Save,
            more => Self::Stop(more as usize - 1),
        }
    }
}

/// What a rank says of the checkpoint that is being saved: it has no file that others wait for.
pub(crate) const IDLE: u64 = 0;
/// Its file is written.
pub(crate) const WRITTEN: u64 = 1;
/// Its file could not be written.
pub(crate) const FAILED: u64 = 2;

/// What all ranks said of it in one exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) least: u64,
    pub(crate) most: u64,
}

impl Said {
    /// The words of all ranks.
    pub(crate) fn of(words: impl Iterator<Item = u64> + Clone) -> Self {
        Self {
            least: words.clone().min().unwrap_or(IDLE),
            most: words.max().unwrap_or(IDLE),
        }
    }
}

/// Who follows a run, and what it is told.
#[derive(Clone, Copy)]
pub struct Watch<'a> {
    /// Called after every step, from the thread of rank 0; the run ends with what it fails with.
    pub on_step: &'a (dyn Fn(&StepRecord) -> Result<(), Error> + Sync),
    /// Hears from rank 0 what a user should know.
    pub on_note: &'a (dyn Fn(&str) + Sync),
    /// What the run is told.
    pub control: &'a Control,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_the_greatest_wish_is_the_greatest_word() {
        let all = [Wish::None, Wish::Save, Wish::Stop(1), Wish::Stop(15)];
        assert!(all.is_sorted());
        assert!(all.map(Wish::word).is_sorted());
        assert_eq!(all.map(|wish| Wish::of_word(wish.word())), all);
    }

    #[test]
    fn a_checkpoint_is_asked_for_once_and_an_end_for_good() {
        let stop = Arc::new(AtomicUsize::new(0));
        let control = Control::stopped_by(Arc::clone(&stop));
        assert_eq!(control.wish(), Wish::None);
        control.save();
        assert_eq!([control.wish(), control.wish()], [Wish::Save, Wish::None]);
        stop.store(15, Ordering::Relaxed);
        assert_eq!([control.wish(); 2], [Wish::Stop(15); 2]);
        assert_eq!(control.stopped(), None);
        control.note_stop(15);
        assert_eq!(control.stopped(), Some(15));
    }
}
