//! [`longest`]: the longest sequence that fits.
//!
//! A step keeps its number of sequences, and each is as long as memory allows. Tried are the length that was asked for
//! and multiples of `2 GPUs` above it, of `2 TP CP` where both are fixed: these every context and tensor parallel degree
//! divides, so a layout that goes with one of them goes with all. Lengths are doubled until one does not fit, and what lies between is halved down to neighbours.

use super::{Asked, SearchResult, plan_briefly, plan_watched};
use crate::answer::Length;
use crate::options::PlanError;
use crate::rules::{MOST_POSITIONS, MOST_TOKENS};

/// The lengths that were tried.
#[derive(Debug, Clone, PartialEq)]
pub struct Lengths {
    /// Each with its fastest plan if it fits, the shortest first.
    pub tried: Vec<Length>,
    /// Whether the search was stopped while longer ones were left.
    pub stopped: bool,
}

impl Lengths {
    /// The longest that fits.
    pub fn longest(&self) -> u64 {
        let fitting = self.tried.iter().filter(|length| length.step_s.is_some());
        fitting.map(|length| length.seq_len).max().unwrap_or(0)
    }
}

/// Looks for the longest sequence that fits, from the length of the options on.
///
/// # Errors
///
/// What is wrong with the request, or that not even that length fits; [`PlanError::Stopped`] where that is not known yet.
pub fn longest(asked: &Asked<'_>) -> Result<Lengths, PlanError> {
    let shortest = asked.options.batch.seq_len;
    let first = match at(asked, shortest, &plan_briefly) {
        // With what it needs at least.
        Err(PlanError::Infeasible { .. }) => at(asked, shortest, &plan_watched),
        other => other,
    };
    let mut tried = vec![first?];
    let found = find(shortest, grain(asked), most(asked), &mut |seq_len| {
        let length = match at(asked, seq_len, &plan_briefly) {
            Ok(length) => length,
            Err(PlanError::Stopped) => return Err(PlanError::Stopped),
            Err(_) => Length {
                seq_len,
                step_s: None,
                peak_gib: None,
            },
        };
        let fits = length.step_s.is_some();
        tried.push(length);
        Ok(fits)
    });
    tried.sort_by_key(|length| length.seq_len);
    Ok(Lengths {
        tried,
        stopped: found.is_err(),
    })
}

/// One of the searches.
type Search = dyn Fn(&Asked<'_>) -> Result<SearchResult, PlanError>;

/// The fastest plan of a length.
fn at(asked: &Asked<'_>, seq_len: u64, search: &Search) -> Result<Length, PlanError> {
    let mut options = asked.options.clone().alone();
    options.batch.seq_len = seq_len;
    let options = &options;
    let found = search(&Asked { options, ..*asked })?;
    let predicted = &found.plans[0].predicted;
    Ok(Length {
        seq_len,
        step_s: Some(predicted.step_s),
        peak_gib: Some(predicted.peak_gib),
    })
}

/// Lengths beyond the shortest are multiples of this.
fn grain(asked: &Asked<'_>) -> u64 {
    let pins = asked.options.pins;
    let ranks = match (pins.tp, pins.cp) {
        (Some(tp), Some(cp)) => u64::from(tp) * u64::from(cp),
        _ => asked.gpus.into(),
    };
    2 * ranks.max(1)
}

/// What rules allow of a length.
fn most(asked: &Asked<'_>) -> u64 {
    MOST_POSITIONS.min(MOST_TOKENS / asked.options.batch.global_batch.max(1))
}

/// Asks about multiples of `grain` from `fitting` up to `most`, doubling, then halving, until one that fits and the next
/// one, which does not, are known. Ends with the error of what is asked.
fn find<E>(
    fitting: u64,
    grain: u64,
    most: u64,
    fits: &mut dyn FnMut(u64) -> Result<bool, E>,
) -> Result<(), E> {
    // In grains; the first need not be whole.
    let (mut low, most) = (fitting / grain, most / grain);
    let mut high = loop {
        if low >= most {
            return Ok(());
        }
        let next = (2 * low).clamp(low + 1, most);
        if fits(next * grain)? {
            low = next;
        } else {
            break next;
        }
    };
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle * grain)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_the_last_that_fits_is_found_and_its_neighbour_asked() {
        for grain in [1, 2, 16, 96] {
            for fitting in [1, 7, 64, 100] {
                for limit in fitting..fitting + 400 {
                    let most = 450;
                    let (mut best, mut least_not) = (fitting, u64::MAX);
                    let found = find(fitting, grain, most, &mut |length| {
                        assert!(length > fitting && length <= most && length.is_multiple_of(grain));
                        if length <= limit {
                            best = best.max(length);
                        } else {
                            least_not = least_not.min(length);
                        }
                        Ok::<bool, ()>(length <= limit)
                    });
                    assert!(found.is_ok());
                    let multiples = (1..=most / grain).map(|n| n * grain);
                    let fit = multiples.filter(|&n| n <= limit && n > fitting);
                    let expected = fit.max().unwrap_or(fitting);
                    assert_eq!(best, expected, "{grain} {fitting} {limit}");
                    let next = (best / grain + 1) * grain;
                    assert!(
                        next > most || least_not == next,
                        "{grain} {fitting} {limit}"
                    );
                }
            }
        }
    }
}
