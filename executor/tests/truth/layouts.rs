//! Every layout against a single rank.

use moefold_planner::layout::{Degrees, Layout};

use crate::common::{Fixture, Trained, assert_close, degrees};

/// Relative, of the losses of all steps.
const TOLERANCE: f64 = 1e-5;

/// Every legal layout of `gpus` ranks without context or pipeline parallelism, one rank to eight.
fn legal(fixture: &Fixture, gpus: u32) -> Vec<Degrees> {
    let mut all = Vec::new();
    for tp in 1..=gpus {
        for ep in 1..=gpus {
            for etp in 1..=gpus {
                for mbs in [1, 2, 3, 4, 6, 8, 12, 24] {
                    let degrees = degrees(gpus, tp, ep, etp, mbs);
                    if Layout::new(&degrees, &fixture.model, &fixture.batch()).is_ok() {
                        all.push(degrees);
                    }
                }
            }
        }
    }
    all
}

fn assert_equal(fixture: &Fixture, single: &Trained, degrees: &Degrees, steps: u64) {
    let trained = fixture.train(degrees, steps, &fixture.options());
    for (step, (found, expected)) in trained.steps.iter().zip(&single.steps).enumerate() {
        let what = |value: &str| format!("{} {degrees:?} step {step} {value}", fixture.name);
        assert_close(found.loss, expected.loss, TOLERANCE, &what("loss"));
        assert_close(
            found.grad_norm,
            expected.grad_norm,
            10.0 * TOLERANCE,
            &what("grad_norm"),
        );
    }
}

fn check_all(name: &'static str, steps: u64, at_least: usize) {
    let fixture = Fixture::load(name);
    let single = fixture.train(&degrees(1, 1, 1, 1, 24), steps, &fixture.options());
    let mut count = 0;
    for gpus in 1..=8 {
        // The smallest and the largest microbatch of every division of the ranks.
        let mut all = legal(&fixture, gpus);
        all.sort_by_key(|d| (d.tp, d.ep, d.etp, d.mbs));
        let last_of = |i: usize| {
            let key = |d: &Degrees| (d.tp, d.ep, d.etp);
            i + 1 == all.len() || key(&all[i]) != key(&all[i + 1])
        };
        for (i, degrees) in all.iter().enumerate() {
            if last_of(i) || degrees.mbs == 1 {
                assert_equal(&fixture, &single, degrees, steps);
                count += 1;
            }
        }
    }
    assert!(count >= at_least, "{name}: only {count} layouts were legal");
}

#[test]
fn oracle_every_layout_of_mixtral_equals_one_rank() {
    check_all("mixtral", 3, 100);
}

#[test]
fn oracle_every_layout_of_qwen3_moe_equals_one_rank() {
    check_all("qwen3_moe", 3, 100);
}

#[test]
fn oracle_every_layout_of_a_dense_model_equals_one_rank() {
    check_all("qwen3_tied", 3, 10);
}
