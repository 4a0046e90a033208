//! [`Moment`]: an instant of a schedule, where only numbers of layers are asked about.

use crate::layout::Places;
use crate::memory::Occupancy;
use crate::runtime::Running;

/// What an instant of a pipeline rank has, whatever layers its stages have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Moment {
    /// Microbatches between their passes in each chunk at least.
    pub(crate) live: f64,
    /// Those whose gradients of weights are left in each chunk at least.
    pub(crate) kept: f64,
    /// Microbatches between their passes in the first stage and in the last, where these are the rank's.
    pub(crate) ends: [f64; 2],
    /// Messages beside those of the running pass.
    pub(crate) messages: f64,
    /// Whether a backward pass runs that is whole or of inputs.
    pub(crate) goes_back: bool,
}

/// By pipeline rank, the moments that take most of its memory: of those that differ by which chunks have what, few are left.
pub(crate) fn moments(occupancies: &[Vec<Occupancy>], places: Places) -> Vec<Vec<Moment>> {
    let holder = places.rank_of(places.stages() - 1) as usize;
    let each = occupancies.iter().enumerate();
    each.map(|(rank, of_rank)| {
        let mut most: Vec<Moment> = Vec::new();
        for at in of_rank {
            let own = Moment::of(at, [rank == 0, rank == holder]);
            if !most.iter().any(|known| known.covers(&own)) {
                most.retain(|known| !own.covers(known));
                most.push(own);
            }
        }
        most
    })
    .collect()
}

impl Moment {
    /// That of a rank that has the first stage, the last or neither.
    pub(crate) fn of(at: &Occupancy, [has_first, has_last]: [bool; 2]) -> Self {
        let fewest = |of: &[u32]| of.iter().copied().min().map_or(0.0, f64::from);
        let own = |has: bool, live: Option<&u32>| match live {
            Some(&live) if has => f64::from(live),
            _ => 0.0,
        };
        Self {
            live: fewest(&at.live),
            kept: fewest(&at.kept),
            ends: [
                own(has_first, at.live.first()),
                own(has_last, at.live.last()),
            ],
            messages: f64::from(at.messages),
            goes_back: at.running == Running::Backward,
        }
    }

    /// Whether no more is there at another. What the ends of the model have may be less than the messages that they replace, so
    /// of them there is as much.
    fn covers(&self, other: &Self) -> bool {
        self.ends == other.ends
            && self.live >= other.live
            && self.kept >= other.kept
            && self.messages >= other.messages
            && self.goes_back >= other.goes_back
    }
}
