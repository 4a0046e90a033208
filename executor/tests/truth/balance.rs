//! Losses of routers and correction biases against Hugging Face transformers and plain PyTorch, and in
//! layouts against one rank.

use std::collections::BTreeMap;

use moefold_executor::moe::balance::Balancing;
use moefold_planner::layout::Degrees;
use serde::Deserialize;

use crate::common::{Fixture, Trained, assert_close, cut, degrees, piped};

/// Relative, of losses and norms.
const TOLERANCE: f64 = 1e-4;

#[derive(Deserialize)]
struct Golden {
    microbatch: u32,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    #[serde(rename = "case")]
    knobs: Knobs,
    steps: Vec<Step>,
    correction_biases: BTreeMap<String, Vec<f64>>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(default)]
struct Knobs {
    aux: f64,
    seq: f64,
    glob: f64,
    z: f64,
    rate: f64,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            aux: 0.0,
            seq: 0.0,
            glob: 0.0,
            z: 0.0,
            rate: 0.0,
        }
    }
}

#[derive(Deserialize)]
struct Step {
    loss: f64,
    aux_loss: f64,
    z_loss: f64,
    grad_norm: f64,
}

fn train(fixture: &Fixture, degrees: &Degrees, steps: u64, knobs: Knobs) -> Trained {
    let mut options = fixture.options();
    options.balancing = Balancing {
        aux_loss_coef: knobs.aux,
        seq_aux_loss_coef: knobs.seq,
        global_aux_loss_coef: knobs.glob,
        z_loss_coef: knobs.z,
        bias_update_rate: knobs.rate,
    };
    fixture.train(degrees, steps, &options)
}

/// One rank against the golden, then layouts of as many microbatches a replica against one rank.
fn check(name: &'static str, layouts: &[Degrees]) {
    let fixture = Fixture::load(name);
    let golden: Golden = fixture.read("balance.json");
    for Case {
        knobs,
        steps,
        correction_biases,
    } in &golden.cases
    {
        let one = degrees(1, 1, 1, 1, golden.microbatch);
        let single = train(&fixture, &one, steps.len() as u64, *knobs);
        for (i, (found, golden)) in single.steps.iter().zip(steps).enumerate() {
            for (value, found, golden) in [
                ("loss", found.loss, golden.loss),
                ("aux_loss", found.aux_loss, golden.aux_loss),
                ("z_loss", found.z_loss, golden.z_loss),
                ("grad_norm", found.grad_norm, golden.grad_norm),
            ] {
                let what = format!("{name} {knobs:?}, step {i}, {value}");
                assert_close(found, golden, TOLERANCE, &what);
            }
        }
        for (tensor, golden) in correction_biases {
            let found = single.weights[tensor].iter().zip(golden);
            let error = found.map(|(found, golden)| (f64::from(*found) - golden).abs());
            let error = error.fold(0.0, f64::max);
            assert!(
                error < 1e-6,
                "{name} {knobs:?}: {tensor} is off by {error:e}"
            );
        }
        for degrees in layouts {
            // The loss over all replicas depends on what they have had so far.
            if knobs.glob > 0.0 && degrees.gpus > degrees.tp * degrees.cp * degrees.pp {
                continue;
            }
            let trained = train(&fixture, degrees, steps.len() as u64, *knobs);
            for (found, expected) in trained.steps.iter().zip(&single.steps) {
                let what = |value: &str| format!("{name} {knobs:?} {degrees:?}: {value}");
                assert_close(found.loss, expected.loss, 1e-5, &what("loss"));
                assert_close(found.aux_loss, expected.aux_loss, 1e-5, &what("aux_loss"));
                assert_close(found.z_loss, expected.z_loss, 1e-5, &what("z_loss"));
                assert_close(found.grad_norm, expected.grad_norm, 1e-4, &what("norm"));
            }
            for tensor in correction_biases.keys() {
                let [found, expected] = [&trained, &single].map(|run| &run.weights[tensor]);
                assert_eq!(found, expected, "{name} {knobs:?} {degrees:?}: {tensor}");
            }
        }
    }
}

const LAYOUTS: [Degrees; 7] = [
    piped(degrees(2, 1, 1, 1, 4), 2, 1),
    degrees(2, 2, 2, 1, 4),
    degrees(4, 4, 1, 2, 4),
    degrees(8, 8, 4, 2, 4),
    degrees(6, 2, 2, 1, 4),
    cut(degrees(4, 2, 4, 1, 4), 2),
    cut(degrees(8, 1, 2, 2, 4), 4),
];

#[test]
fn oracle_losses_of_softmax_routers() {
    check("mixtral", &LAYOUTS);
}

#[test]
fn oracle_losses_and_biases_of_sigmoid_routers() {
    check("glm4_moe", &LAYOUTS);
}

/// Over replicas, the mean of what each has, of all their tokens.
#[test]
fn differential_the_loss_over_replicas_is_that_of_their_tokens() {
    let fixture = Fixture::load("mixtral").with_batch(8);
    let all = |coefficients: [f64; 2]| Knobs {
        aux: coefficients[0],
        glob: coefficients[1],
        ..Knobs::default()
    };
    // One microbatch of all tokens: the same loss, and its gradient over as many replicas as there are.
    let single = train(&fixture, &degrees(1, 1, 1, 1, 8), 1, all([0.1, 0.0]));
    let replicas = train(&fixture, &degrees(4, 1, 2, 1, 2), 1, all([0.0, 0.4]));
    let (single, replicas) = (&single.steps[0], &replicas.steps[0]);
    assert_close(replicas.aux_loss, 4.0 * single.aux_loss, 1e-5, "aux_loss");
    assert_close(replicas.grad_norm, single.grad_norm, 1e-5, "grad_norm");
}
