//! [`Known`]: what a search has learnt of layouts, and the front of speed against memory that follows from it.
//!
//! Behind the fastest plan the front goes on with the fastest that needs less memory, and so on until nothing fits. Each
//! step is a search under a smaller memory, of which the ones before it have done most: under less memory the best of a
//! layout is the same as long as it fits, and no layout gets faster, but for what a split that has room takes less than
//! the one that was balanced without.

use moefold_profiles::units::{Bytes, GIB};
use rayon::prelude::*;

use super::floor::{Weights, held};
use super::shape::Question;
use super::unit::{Bounds, Found, Outcome, Unit};
use super::visit::{BATCH, visit};
use super::watch::{Aim, Looks, Phase, Watch, aimed};
use crate::answer::Candidate;
use crate::choice::Objective;

/// The part of its memory that the next plan of a front needs less at least: closer ones are alike to whoever chooses.
pub(super) const LESS: f64 = 0.005;

/// See the module's documentation. It knows the units that it was made for, or nothing.
pub(super) struct Known<'a>(Vec<One<'a>>);

/// What is known of a unit, under the memory that was looked at last or less.
struct One<'a> {
    /// The fastest child, where it is known: of few units it ever is.
    best: Option<Box<Found<'a>>>,
    /// No other child takes less, in seconds.
    left_s: f64,
    /// The same by question and place.
    bounds: Vec<Bounds>,
}

impl<'a> Known<'a> {
    /// Of units nothing but their floors.
    pub(super) fn new(units: &[Unit<'_>]) -> Self {
        let each = units.iter();
        Self(
            each.map(|unit| One {
                best: None,
                left_s: unit.floor,
                bounds: Vec::new(),
            })
            .collect(),
        )
    }

    /// A unit was looked at.
    pub(super) fn learn(&mut self, place: usize, outcome: &Outcome<'a>) {
        if let Some(one) = self.0.get_mut(place) {
            *one = One {
                best: outcome.best.clone().map(Box::new),
                left_s: outcome.left_s,
                // Nobody asks again about what nothing is left of.
                bounds: if outcome.left_s < f64::INFINITY {
                    outcome.bounds.clone()
                } else {
                    Vec::new()
                },
            };
        }
    }

    /// Adds the front behind the fastest plan of the same units to candidates that are known: of each step the fastest that
    /// needs less memory than the one before, as many as are wanted at most.
    pub(super) fn front(
        &mut self,
        questions: &mut [Question<'_>],
        units: &'a [Unit<'a>],
        fastest: &Found<'a>,
        (known, steps): (&mut Vec<Candidate>, usize),
        watch: &Watch<'_>,
    ) {
        if self.0.is_empty() || questions[0].options.objective == Objective::Memory {
            return;
        }
        let watch = &aimed(Aim::Front, watch);
        let question = &questions[0];
        let each = units.par_iter().map_init(Weights::new, |weights, unit| {
            held(question, unit.layout, weights)
        });
        let floors: Vec<Bytes> = each.collect();
        // Places of units that may fit: what they hold at least does.
        let mut may_fit: Vec<usize> = (0..units.len()).collect();
        let mut peak_gib = fastest.peak.gib();
        for _ in 0..steps {
            let room = Bytes((peak_gib * (1.0 - LESS) * GIB as f64) as u64);
            for question in &mut *questions {
                question.limit = Some(room);
            }
            may_fit.retain(|&place| floors[place] <= room);
            let Some(place) = self.fastest_within(questions, (units, &may_fit), room, watch) else {
                break;
            };
            let best = self.0[place].best.as_ref().expect("it was found");
            peak_gib = best.peak.gib();
            let point = best.candidate(&questions[best.question]);
            if !known.contains(&point) {
                known.push(point);
            }
        }
    }

    /// The place of the unit that is fastest within some memory, of those that may fit; none where nothing does, or the search is
    /// stopped.
    fn fastest_within(
        &mut self,
        questions: &[Question<'_>],
        (units, may_fit): (&'a [Unit<'a>], &[usize]),
        room: Bytes,
        watch: &Watch<'_>,
    ) -> Option<usize> {
        for &place in may_fit {
            let best = &mut self.0[place].best;
            *best = best.take().filter(|best| best.peak <= room);
        }
        let scored =
            |one: &One<'a>, place: usize| one.best.as_ref().map(|best| (best.step_s, place));
        let faster = |a: (f64, usize), b: (f64, usize)| {
            let layouts = || units[a.1].layout.cmp(units[b.1].layout);
            if b.0
                .total_cmp(&a.0)
                .then_with(|| layouts().reverse())
                .is_lt()
            {
                b
            } else {
                a
            }
        };
        let each = may_fit.iter();
        let fitting = each.filter_map(|&place| scored(&self.0[place], place));
        let mut best = fitting.reduce(faster);
        let open = |one: &One<'a>, best: Option<(f64, usize)>| {
            one.best.is_none() && one.left_s < best.map_or(f64::INFINITY, |best| best.0)
        };
        let each = may_fit.iter().copied();
        let mut left: Vec<usize> = each.filter(|&place| open(&self.0[place], best)).collect();
        left.sort_by(|&a, &b| {
            let floors = self.0[a].left_s.total_cmp(&self.0[b].left_s);
            floors.then_with(|| units[a].layout.cmp(units[b].layout))
        });
        let mut looks = Looks::new(watch, Phase::Looking, left.len());
        for batch in left.chunks(BATCH) {
            let limit = best.map_or(f64::INFINITY, |best| best.0);
            if self.0[batch[0]].left_s >= limit {
                break;
            }
            looks.best_s = best.map(|best| best.0);
            let outcomes: Vec<Outcome<'a>> = batch
                .par_iter()
                .map(|&place| {
                    visit(
                        questions,
                        &units[place],
                        limit,
                        &looks,
                        &self.0[place].bounds,
                    )
                })
                .collect();
            if outcomes.iter().any(|outcome| outcome.stopped) {
                return None;
            }
            for (&place, outcome) in batch.iter().zip(&outcomes) {
                self.learn(place, outcome);
                if let Some(own) = scored(&self.0[place], place) {
                    best = Some(best.map_or(own, |best| faster(best, own)));
                }
            }
        }
        best.map(|(_, place)| place)
    }
}
