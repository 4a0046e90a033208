//! [`Candidates`]: the tuples of degrees of a space, judged.

use std::{iter, mem};

use rayon::prelude::*;

use super::floor::{Weights, held};
use super::shape::Question;
use super::watch::{Looks, Phase, Watch};
use crate::layout::{Degrees, Layout, Order, PartialDegrees};
use crate::mesh::{GroupKind, placement};
use crate::options::{PlanError, SearchOptions};
use crate::rules::{Rules, TOGETHER, Variants, tuples};

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Candidates {
    /// Those that are legal and worth trying.
    pub(super) layouts: Vec<Layout>,
    /// Candidates there are: tuples times what else is open.
    pub(super) space: u64,
    /// Why candidates are refused, in the order in which reasons are met: a search adds to a few of them
    /// tens of thousands of times.
    pub(super) refusals: Vec<Refusal>,
    /// Candidates whose weights alone are too much.
    pub(super) too_large: u64,
    /// Whether some tuple is legal.
    pub(super) any_legal: bool,
}

/// Candidates refused for one reason.
pub(super) struct Refusal {
    /// The short key they are counted under.
    pub(super) reason: &'static str,
    pub(super) count: u64,
    /// A sentence about the first.
    pub(super) example: String,
}

/// Tuples that are judged between two looks at the watch.
const JUDGED: usize = 1 << 16;

/// Those of all tuples of degrees for a job.
pub(super) fn candidates(
    questions: &[Question<'_>],
    (gpus, variants): (u32, Variants),
    rules: &Rules,
    watch: &Watch<'_>,
) -> Result<Candidates, PlanError> {
    let question = &questions[0];
    let options = question.options;
    let spaces = pins(options, gpus);
    let each = |pins: &PartialDegrees| tuples(question.model, gpus, &options.batch, pins, variants);
    let begins = Looks::new(watch, Phase::Judging, 0);
    if begins.look().is_break() {
        return Err(PlanError::Stopped);
    }
    let all = spaces.iter().map(|pins| each(pins).count()).sum();
    let looks = Looks::new(watch, Phase::Judging, all);
    let mut tuples = spaces.iter().flat_map(each);
    let mut some = Vec::with_capacity(JUDGED);
    let (mut found, mut layouts) = (Candidates::default(), Vec::new());
    loop {
        if looks.look().is_break() {
            return Err(PlanError::Stopped);
        }
        some.clear();
        some.extend(tuples.by_ref().take(JUDGED));
        let parts: Vec<Candidates> = some
            .par_chunks(TOGETHER)
            .map_init(Weights::new, |weights, some| {
                Candidates::among(questions, rules, weights, some)
            })
            .collect();
        for mut part in parts {
            layouts.push(mem::take(&mut part.layouts));
            found.add(part);
        }
        looks.seen(some.len());
        if some.len() < JUDGED {
            found.layouts = layouts.concat();
            return Ok(found);
        }
    }
}

/// What is pinned of each space that is looked at: one, or where stages are given one for each division of them
/// among pipeline ranks.
pub(super) fn pins(options: &SearchOptions, gpus: u32) -> Vec<PartialDegrees> {
    let pins = options.pins;
    let (Some(given), None) = (&options.stages, pins.vpp) else {
        return vec![pins];
    };
    let stages = given.stages().len() as u32;
    let divides = |pp: &u32| stages.is_multiple_of(*pp) && gpus.is_multiple_of(*pp);
    let ranks = (1..=stages).filter(divides);
    let divided = ranks.filter(|&pp| pins.pp.is_none_or(|pin| pin == pp));
    let divided: Vec<PartialDegrees> = divided
        .map(|pp| PartialDegrees {
            pp: Some(pp),
            vpp: Some(stages / pp),
            ..pins
        })
        .collect();
    if divided.is_empty() {
        vec![pins]
    } else {
        divided
    }
}

impl Candidates {
    /// Those among some tuples.
    fn among(
        questions: &[Question<'_>],
        rules: &Rules,
        weights: &mut Weights,
        tuples: &[Degrees],
    ) -> Self {
        let question = &questions[0];
        let capacity = question.capacity();
        let (mut broken, mut each) = (Vec::new(), Vec::new());
        let mut found = Self::default();
        for degrees in tuples {
            let ways = questions.iter().map(|question| question.ways(degrees));
            each.clear();
            each.extend(questions.iter().zip(ways));
            let legal = each.iter().map(|(of, ways)| ways * of.legal_sets());
            let legal: u64 = legal.sum();
            let illegal = each
                .iter()
                .map(|(of, ways)| ways * of.illegal_sets.len() as u64);
            let all = legal + illegal.sum::<u64>();
            found.space += all;
            let Some(layout) = rules.judge(degrees, true, &mut broken) else {
                found.refuse(broken[0].reason(), all, &broken[0]);
                continue;
            };
            found.any_legal = true;
            let fits = held(question, &layout, weights) <= capacity;
            let other = question.renumbered(&layout);
            if other.is_some() {
                found.space += all;
            }
            // What is refused of one order is of the other.
            for layout in iter::once(layout).chain(other) {
                for (question, ways) in &each {
                    for illegal in &question.illegal_sets {
                        found.refuse(illegal.reason(), *ways, illegal);
                    }
                }
                if fits {
                    found.layouts.push(layout);
                } else {
                    found.too_large += legal;
                }
            }
        }
        found
    }

    /// Counts those of the tuples that follow, whose layouts are kept elsewhere.
    fn add(&mut self, other: Self) {
        self.space += other.space;
        self.too_large += other.too_large;
        self.any_legal |= other.any_legal;
        for of in other.refusals {
            self.refuse(of.reason, of.count, &of.example);
        }
    }

    /// Counts; the sentence is written once a reason, for there are many refusals.
    fn refuse(&mut self, reason: &'static str, count: u64, why: &dyn std::fmt::Display) {
        match self.refusals.iter_mut().find(|r| r.reason == reason) {
            Some(before) => before.count += count,
            None => self.refusals.push(Refusal {
                reason,
                count,
                example: why.to_string(),
            }),
        }
    }
}

impl Question<'_> {
    /// A layout with its ranks in the other order, where orders are open and that is legal and may take other time: only
    /// groups of replicas and of stages lie elsewhere, so it does where one of those crosses domains or nodes
    /// otherwise.
    fn renumbered(&self, layout: &Layout) -> Option<Layout> {
        if self.options.order.is_some() || layout.pp() == 1 || layout.dp() == 1 {
            return None;
        }
        let other = layout.numbered(Order::DP_LAST)?;
        let kinds = [GroupKind::DpCp, GroupKind::Edp, GroupKind::Pp];
        let of = |layout| kinds.map(|kind| placement(layout, kind, self.cluster));
        let differs = of(layout) != of(&other);
        // Parts of replicas may lie elsewhere where the whole does not.
        (differs || self.options.instances > 1).then_some(other)
    }
}
