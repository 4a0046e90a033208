//! Evaluation is the forward pass of a step, and nothing else.

use moefold_executor::rank::Context;
use moefold_executor::train::{self, Trainer};
use moefold_executor::transport::World;
use moefold_planner::choice::Recompute;
use moefold_planner::layout::Degrees;

use super::common::{Fixture, degrees, held, piped, place};
use super::overlap::BOTH;
use super::sharded::sharded;

const STEPS: u64 = 3;

/// Evaluates before every step the batch that it is to train on. The losses must be the step's, training must be
/// what it is without, and memory must come no higher than in the step.
fn check(fixture: &Fixture, degrees: &Degrees) {
    let options = fixture.options();
    let peak = |trainer: &Trainer| trainer.cx.device.memory().peak_total();
    let (expected, peaks) = fixture.train_with(degrees, STEPS, &options, peak);
    let layout = fixture.layout(degrees);
    let weights = fixture.weights();
    let ranks = World::threads(layout.gpus()).run(|rank| {
        let device = options.device.open(0, layout.gpus())?;
        device.poison(true);
        let cx = Context::join(rank, &layout, device, rank.recorder());
        let mut trainer = fixture.trainer(cx, &options, &weights)?;
        let mut steps = Vec::new();
        for step in 0..STEPS {
            let mine = train::microbatches(&fixture.samples, &trainer.cx, &fixture.batch(), step)?;
            let [sum, tokens] = trainer.stepper().evaluate(&trainer.cx, &mine)?;
            let before = sum / tokens;
            let outcome = trainer.step(&mine, options.lr.at(step))?;
            steps.push((before, outcome));
        }
        Ok((steps, held(&trainer), peak(&trainer)))
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{} under {degrees:?}: {error}", fixture.name));
    for ((steps, slices, evaluated), peak) in ranks.into_iter().zip(peaks) {
        assert_eq!(
            evaluated, peak,
            "peaks of {} under {degrees:?}",
            fixture.name
        );
        for ((before, outcome), expected) in steps.iter().zip(&expected.steps) {
            assert_eq!(outcome, expected, "{} under {degrees:?}", fixture.name);
            assert_eq!(before.to_bits(), outcome.loss.to_bits(), "{degrees:?}");
        }
        let mut weights = expected.weights.clone();
        for (slice, values) in slices {
            // It is the same bits, or this panics.
            place(&mut weights, &slice, &values);
        }
    }
}

#[test]
fn law_an_evaluation_is_the_forward_pass_of_a_step_under_every_kind_of_layout() {
    check(&Fixture::load("mixtral"), &degrees(1, 1, 1, 1, 2));
    check(&Fixture::load("mixtral"), &degrees(4, 2, 4, 1, 1));
    let piped_and_again = Fixture::load("mixtral")
        .with_layers(4)
        .recomputing(Recompute::Full);
    check(&piped_and_again, &piped(degrees(4, 1, 2, 1, 1), 2, 2));
    let divided = sharded(Fixture::load("mixtral"), BOTH);
    check(&divided, &degrees(4, 2, 2, 1, 1));
}
