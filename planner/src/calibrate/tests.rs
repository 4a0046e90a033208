//! Fits of machines whose factors are known.

use std::convert::Infallible;

use moefold_profiles::{Costs, presets};

use super::*;
use crate::choice::{Recompute, StackName};
use crate::layout::Batch;
use crate::model::{self, Model};
use crate::options::SearchOptions;
use crate::plan::Plan;
use crate::search;
use crate::stack::megatron::Declared;

fn machine(compute: f64, network: f64, host: f64) -> Factors {
    Factors {
        compute,
        network,
        host,
    }
}

/// A step of a machine whose host runs beside its device: seconds of ops, of communication and of the host.
fn toy([ops, network, host]: [f64; 3], factors: Factors) -> f64 {
    let device = ops * factors.compute + network * factors.network;
    device + (host * factors.host - device).max(0.0)
}

fn fitted(parts: &[[f64; 3]], truth: Factors) -> Calibration {
    let steps: Vec<Measured> = parts
        .iter()
        .map(|parts| Measured {
            source: format!("{parts:?}"),
            step_s: toy(*parts, truth),
        })
        .collect();
    let predict = |index: usize, factors: Factors| Ok::<_, Infallible>(toy(parts[index], factors));
    fit("toy", &steps, &predict).unwrap_or_else(|never| match never {})
}

fn near(fitted: Fitted, truth: f64) -> bool {
    (fitted.factor / truth).ln().abs() < 2.0 * fitted.sigma
}

#[test]
fn law_the_truth_is_recovered_where_steps_determine_it() {
    // Ops alone, communication mostly, and a host that is in the way.
    let parts = [
        [1.0, 0.0, 0.1],
        [0.9, 0.1, 0.1],
        [0.2, 1.0, 0.1],
        [0.1, 1.4, 0.1],
        [0.1, 0.0, 0.5],
        [0.1, 0.1, 0.9],
    ];
    for (compute, network, host) in [
        (1.0, 1.0, 1.0),
        (1.3, 1.0, 1.0),
        (1.2, 1.5, 2.0),
        (0.9, 0.8, 4.0),
    ] {
        let found = fitted(&parts, machine(compute, network, host));
        for (fitted, truth) in [
            (found.compute, compute),
            (found.network, network),
            (found.host, host),
        ] {
            assert!(near(fitted, truth), "{truth}: {fitted:?}");
            assert!(
                (fitted.factor / truth - 1.0).abs() < 0.05,
                "{truth}: {fitted:?}"
            );
            assert!(!fitted.is_undetermined(), "{fitted:?}");
        }
        for step in &found.steps {
            assert!(
                (step.after_s / step.measured_s - 1.0).abs() < 0.02,
                "{step:?}"
            );
            let left_out = step.left_out_s.expect("six steps");
            assert!((left_out / step.measured_s - 1.0).abs() < 0.10, "{step:?}");
        }
    }
}

#[test]
fn law_what_steps_do_not_show_keeps_its_prior() {
    // One step of ops: nothing of the network, nothing of a host that is hidden.
    let found = fitted(&[[1.0, 0.0, 0.1]], machine(1.3, 1.5, 1.5));
    assert!((found.compute.factor / 1.3 - 1.0).abs() < 0.02, "{found:?}");
    assert!(!found.compute.is_undetermined());
    for open in [found.network, found.host] {
        assert!(open.is_undetermined(), "{open:?}");
        assert!((open.factor - 1.0).abs() < 1e-6, "{open:?}");
        assert!((open.sigma / open.prior_sigma - 1.0).abs() < 1e-6);
    }
    assert_eq!(found.steps[0].left_out_s, None);
    // Ops and communication always in one proportion: their sum is known, neither of them well.
    let found = fitted(&[[0.5, 0.5, 0.0]], machine(1.2, 1.2, 1.0));
    assert!(found.covariance[0][1] < 0.0);
    let apart = found.sigma([1.0, 0.0, 0.0]);
    let together = found.sigma([0.5, 0.5, 0.0]);
    assert!(together < 0.5 * apart, "{together} {apart}");
}

#[test]
fn law_a_machine_that_factors_do_not_describe_says_so() {
    let parts = [
        [1.0, 0.0, 0.0],
        [1.0, 0.1, 0.0],
        [1.0, 0.2, 0.0],
        [1.0, 0.3, 0.0],
    ];
    let noise = [1.3, 0.8, 1.25, 0.75];
    let steps: Vec<Measured> = parts
        .iter()
        .zip(noise)
        .map(|(parts, noise)| Measured {
            source: String::new(),
            step_s: noise * toy(*parts, Factors::default()),
        })
        .collect();
    let predict = |index: usize, factors: Factors| Ok::<_, Infallible>(toy(parts[index], factors));
    let found = fit("toy", &steps, &predict).unwrap_or_else(|never| match never {});
    assert!(found.residual_sigma > 0.2, "{}", found.residual_sigma);
}

#[test]
fn law_an_inverse_times_its_matrix_is_one() {
    let matrix = [[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]];
    let inverse = inverse(matrix);
    for (row, cells) in matrix.iter().enumerate() {
        for column in 0..FACTORS {
            let cell: f64 = cells.iter().zip(inverse).map(|(a, b)| a * b[column]).sum();
            let one = f64::from(u8::from(row == column));
            assert!((cell - one).abs() < 1e-12);
        }
    }
}

/// A plan of Mixtral on H100 with pinned degrees, priced from the shipped tables.
fn plan(model: &Model, degrees: &str, costs: &Costs) -> Plan {
    let cluster = presets::cluster("dgx-h100").expect("a preset");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 256,
    };
    let options = SearchOptions {
        pins: degrees.parse().expect("degrees"),
        recompute: Some(Recompute::None.into()),
        top: 1,
        ..SearchOptions::new(batch, StackName::Megatron)
    };
    let found = search::plan(model, &cluster, 64, &options, costs, &Declared).expect("fits");
    Plan::of(found.plans[0].clone(), model, &cluster, 64, &options)
}

#[test]
fn a_slower_cluster_is_recovered_from_steps_of_plans() {
    let model = model::presets::load("mixtral-8x7b").expect("a preset");
    let costs = Costs::for_cluster(&presets::cluster("dgx-h100").expect("a preset"), &[]);
    let plans = [
        "tp=1,cp=1,pp=4,vpp=1,ep=8,etp=1,mbs=1",
        "tp=4,cp=1,pp=2,vpp=1,ep=4,etp=1,mbs=2",
        "tp=8,cp=1,pp=4,vpp=2,ep=2,etp=4,mbs=1",
        "tp=2,cp=2,pp=2,vpp=1,ep=8,etp=2,mbs=1",
        "tp=1,cp=1,pp=8,vpp=1,ep=8,etp=1,mbs=1",
        "tp=8,cp=1,pp=2,vpp=1,ep=8,etp=1,mbs=8",
    ]
    .map(|degrees| plan(&model, degrees, &costs));
    let time = |plan: &Plan, factors| {
        let again = search::again(plan, &costs.times(factors), &Declared);
        again.expect("it was planned").predicted.step_s
    };
    for plan in &plans {
        let same = time(plan, Factors::default());
        assert!((same / plan.planned.predicted.step_s - 1.0).abs() < 1e-9);
    }
    let truth = machine(1.25, 1.6, 1.5);
    let steps: Vec<Measured> = plans
        .iter()
        .map(|plan| Measured {
            source: String::new(),
            step_s: time(plan, truth),
        })
        .collect();
    let predict =
        |index: usize, factors: Factors| Ok::<_, Infallible>(time(&plans[index], factors));
    let found = fit("megatron", &steps, &predict).unwrap_or_else(|never| match never {});
    assert!(near(found.compute, truth.compute), "{:?}", found.compute);
    assert!(near(found.network, truth.network), "{:?}", found.network);
    assert!(!found.compute.is_undetermined() && !found.network.is_undetermined());
    // After each read of counts the device waits for what the host launches next.
    assert!(near(found.host, truth.host), "{:?}", found.host);
    assert!(!found.host.is_undetermined(), "{:?}", found.host);
    // Priced with the calibration, a plan says so and is off by little.
    let profile = moefold_profiles::Profile {
        calibration: Some(found),
        ..moefold_profiles::Profile::of("h100", Vec::new())
    };
    let calibrated = Costs::for_cluster(&plans[0].cluster, &[profile]);
    let again = search::again(&plans[0], &calibrated, &Declared).expect("it was planned");
    let (low, high) = (again.predicted.step_s_low, again.predicted.step_s_high);
    let (low, high) = low.zip(high).expect("a prediction has an interval");
    assert!((low..=high).contains(&steps[0].step_s), "{low} {high}");
    assert!(high / low < 1.2, "{low} {high}");
}
