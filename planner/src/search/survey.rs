//! [`survey`]: every layout worth trying at a glance, for the picture of speed against memory.
//!
//! The search prices what may win and prunes the rest unseen. Here each layout gets one look: under
//! the dispatcher of least work and a split found in one pass, the one recompute set for all layers
//! that is fastest among those that fit, under the usual schedule of its degrees, or that asked for. Its memory is the memory model's, its time the bound that pruning uses, not
//! a simulated step. There may be a hundred thousand of them, so they are counted in a grid.

use std::collections::{BTreeMap, BTreeSet};

use moefold_profiles::units::Bytes;
use rayon::prelude::*;

use super::candidate::{Case, likely_split};
use super::room::{Of, Room};
use super::shape::{Question, ShapeKey, Shapes, shape_key};
use super::unit::{Unit, peak};
use super::watch::{Looks, Phase, Watch};
use crate::answer::{Survey, SurveyCell};

/// Degrees of attention, experts and microbatch that are looked at, of as many as there are evenly apart.
const SHAPES: usize = 512;

/// Looks at the units of a search, where there are many at some; none where the search is stopped before.
pub(crate) fn survey(
    questions: &[Question<'_>],
    units: &[Unit<'_>],
    watch: &Watch<'_>,
) -> Option<Survey> {
    // Where that is open, nothing leaves for the host.
    let plain = questions.iter();
    let plain = plain.take_while(|of| of.offload() == questions[0].offload());
    let questions = &questions[..plain.count()];
    let key = |unit: &Unit<'_>| shape_key(&questions[0], unit.layout);
    let shapes: BTreeSet<ShapeKey> = units.iter().map(key).collect();
    let apart = shapes.len().div_ceil(SHAPES).max(1);
    let shapes: BTreeSet<ShapeKey> = shapes.into_iter().step_by(apart).collect();
    let of_shapes = |unit: &&Unit<'_>| shapes.contains(&key(unit));
    let units: Vec<&Unit<'_>> = units.iter().filter(of_shapes).collect();
    let looks = Looks::new(watch, Phase::Surveying, units.len());
    let seen: Option<Vec<Option<(Bytes, f64)>>> = units
        .par_iter()
        .with_min_len(64)
        .map(|unit| looks.one(|| glance(questions, unit)))
        .collect();
    let seen = seen?;
    let fitting = || seen.iter().flatten();
    let fastest_s = fitting()
        .map(|&(_, step_s)| step_s)
        .fold(f64::INFINITY, f64::min);
    let capacity_gib = questions[0].capacity().gib();
    let mut counts: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    for &(memory, step_s) in fitting() {
        let column = Survey::cell(memory.gib() / capacity_gib);
        let row = Survey::cell(fastest_s / step_s);
        *counts.entry((column, row)).or_default() += 1;
    }
    Some(Survey {
        layouts: units.len() as u64,
        fitting: fitting().count() as u64,
        capacity_gib,
        fastest_s: if fastest_s.is_finite() {
            fastest_s
        } else {
            0.0
        },
        cells: counts
            .into_iter()
            .map(|((column, row), layouts)| SurveyCell(column, row, layouts))
            .collect(),
    })
}

/// Peak memory and least time of a layout under the fastest recompute set that fits, of the first question under which
/// one does: those of more graphs come first. `None` where none does.
fn glance(questions: &[Question<'_>], unit: &Unit<'_>) -> Option<(Bytes, f64)> {
    let mut each = questions.iter().zip(unit.shapes);
    each.find_map(|(question, shapes)| glance_under(question, unit, shapes))
}

fn glance_under(
    question: &Question<'_>,
    unit: &Unit<'_>,
    of_question: &Shapes,
) -> Option<(Bytes, f64)> {
    let (layout, capacity) = (unit.layout, question.capacity());
    let (schedule, occupancies) = unit.schedules(question).next()?;
    let shapes = of_question.first(question).iter();
    let by_work = shapes.map(|shape| shape.work(question).all_s);
    let (index, _) = by_work.enumerate().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let shape = of_question.held_under(question, schedule, (false, index));
    let case = Case {
        question,
        layout,
        shape,
        schedule,
    };
    // What no split has room for needs none.
    let room = |case| unit.room(case, capacity);
    let may_hold =
        |room: &Option<Room<'_>>, of: Of<'_>| room.as_ref().is_none_or(|room| room.may_hold(of));
    let plain = may_hold(&room(case), Of::Choice(&question.choices[0]));
    if !plain && question.choices.len() == 1 {
        return None;
    }
    let split = likely_split(case)?;
    if split.held() > capacity {
        return None;
    }
    let peak_of =
        |case, choice: usize| peak(&split.memory(case, &question.choices[choice], occupancies));
    let step_s = |case, choice: usize| {
        let bound = split.bound(case, &question.choices[choice]);
        bound.seconds().0
    };
    // No choice is faster than the first.
    if plain {
        let memory = peak_of(case, 0);
        if memory <= capacity {
            return Some((memory, step_s(case, 0)));
        }
    }
    let shape = of_question.held_under(question, schedule, (true, index));
    let case = Case { shape, ..case };
    let room = room(case);
    if !may_hold(&room, Of::Any) {
        return None;
    }
    let fits = |&&choice: &&usize| may_hold(&room, Of::Choice(&question.choices[choice]));
    let (choice, memory) = shape
        .choices_by_time()
        .iter()
        .filter(fits)
        .map(|&choice| (choice, peak_of(case, choice)))
        .find(|&(_, memory)| memory <= capacity)?;
    Some((memory, step_s(case, choice)))
}
