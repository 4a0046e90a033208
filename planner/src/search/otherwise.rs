//! What a chosen layout comes to if tokens are routed otherwise: balanced where a routing was recorded,
//! and with twice the rows on one rank where balance is an assumption.

use super::candidate::{Case, StageSplit};
use super::predict::{self, Choice};
use super::shape::{Assumption, Question, Shape};
use super::unit::Found;
use crate::plan::{Outcome, PlannedRouting};
use crate::simulate::Simulator;

/// How tokens are assumed to reach the experts of a candidate, and what another way would do; nothing
/// without experts.
pub(crate) fn routing(
    question: &Question<'_>,
    found: &Found<'_>,
    simulator: &Simulator,
) -> Option<PlannedRouting> {
    let outcome = |routing| outcome(question, found, simulator, routing);
    question.model.moe()?;
    Some(match question.routing {
        Assumption::Load(load) => PlannedRouting::Balanced {
            doubled: outcome(Assumption::Load(2.0 * load)),
        },
        Assumption::Recorded(routing) => {
            let loads = question.loads(found.unit.layout.ep());
            PlannedRouting::Recorded {
                source: routing.source().to_owned(),
                busiest: loads.busiest,
                fullest: loads.fullest,
                balanced: outcome(Assumption::BALANCED),
            }
        }
    })
}

/// The candidate's layout, dispatcher, way to keys, split and recompute sets, priced under a routing.
fn outcome<'a>(
    question: &Question<'a>,
    found: &Found<'_>,
    simulator: &Simulator,
    routing: Assumption<'a>,
) -> Outcome {
    let (layout, chosen) = (found.unit.layout, found.choice());
    let question = &question.under(routing).of(chosen.sets);
    let shapes = Shape::under(question, layout, &question.sets);
    let shape = shapes
        .iter()
        .find(|shape| shape.wires() == chosen.shape.wires())
        .expect("the same are tried");
    let shape = &shape.held_under(question, layout, found.schedule);
    let case = Case {
        question,
        layout,
        shape,
        schedule: found.schedule,
    };
    let split = StageSplit::new(case, chosen.split.stages.clone());
    let sets = &question.choices[0];
    let memory = split.memory(case, sets, found.occupancies);
    let on_host = split.on_host(case, sets, found.occupancies);
    let choice = Choice {
        layout,
        schedule: found.schedule,
        shape,
        split: &split,
        sets,
    };
    let predicted = predict::planned(question, &choice, simulator, &memory, on_host)
        .plan
        .predicted;
    Outcome {
        step_s: predicted.step_s,
        peak_gib: predicted.peak_gib,
    }
}
