//! Tests of plans under routing that was recorded.

use super::{run, small};
use crate::choice::Recompute;
use crate::options::Routing;
use crate::plan::{PlannedLayout, PlannedRouting};

/// One layout of a model, routed as said.
fn routed(pp: u32, lists: Option<Vec<Vec<f64>>>) -> PlannedLayout {
    let (model, mut cluster, mut options) = small();
    cluster.gpu.memory_gib = 1e3;
    let pins = format!("tp=2,cp=1,pp={pp},vpp=1,ep=8,etp=1,mbs=1");
    options.pins = pins.parse().expect("degrees");
    options.recompute = Some(Recompute::None.into());
    options.routing = lists.map(|lists| Routing::new("h.json", &lists).expect("a histogram"));
    run(&model, &cluster, 32, &options).plans.remove(0)
}

#[test]
fn law_even_histograms_are_balanced_routing() {
    let balanced = routed(2, None);
    for lists in [1, 32] {
        let mut even = routed(2, Some(vec![vec![7.0; 8]; lists]));
        let Some(PlannedRouting::Recorded {
            source,
            busiest,
            fullest,
            balanced: outcome,
        }) = even.predicted.routing.take()
        else {
            panic!("a histogram was given");
        };
        assert_eq!(source, "h.json");
        assert_eq!((busiest, fullest), (vec![1.0; 32], vec![1.0; 32]));
        let p = &balanced.predicted;
        assert_eq!((outcome.step_s, outcome.peak_gib), (p.step_s, p.peak_gib));
        // Layers are priced one by one or all at once; sums are rounded in another order.
        assert_eq!(even.predicted.memory_gib, p.memory_gib);
        assert!((even.predicted.step_s / p.step_s - 1.0).abs() < 1e-9);
    }
}

#[test]
fn law_what_is_not_even_costs_in_the_layers_that_have_it() {
    let uneven = || {
        let mut tokens = vec![1.0; 8];
        tokens[2] = 7.0;
        tokens
    };
    let only = |layers: usize| {
        let list = |layer| {
            if layer < layers {
                uneven()
            } else {
                vec![1.0; 8]
            }
        };
        let predicted = routed(1, Some((0..32).map(list).collect())).predicted;
        let Some(PlannedRouting::Recorded {
            busiest, balanced, ..
        }) = &predicted.routing
        else {
            panic!("a histogram was given");
        };
        let heavy = busiest.iter().filter(|&&load| load == 4.0).count();
        assert_eq!(heavy, layers);
        (
            predicted.step_s - balanced.step_s,
            predicted.peak_gib - balanced.peak_gib,
        )
    };
    let (two, four, all) = (only(2), only(4), only(32));
    assert!(two.0 > 0.0 && two.1 > 0.0, "{two:?}");
    // Twice as many layers cost twice as much.
    assert!((four.0 / two.0 - 2.0).abs() < 1e-6, "{two:?} {four:?}");
    assert!(all.0 > 4.0 * two.0 && all.1 > four.1, "{four:?} {all:?}");
    let whole = routed(1, Some(vec![uneven()])).predicted;
    let Some(PlannedRouting::Recorded { balanced, .. }) = &whole.routing else {
        panic!("a histogram was given");
    };
    assert!((whole.step_s - balanced.step_s - all.0).abs() < 1e-9 * whole.step_s);
    assert!((whole.peak_gib - balanced.peak_gib - all.1).abs() < 1e-9);
}

#[test]
fn oracle_what_twice_the_load_takes_is_a_histogram_that_has_it() {
    let balanced = routed(2, None).predicted;
    let Some(PlannedRouting::Balanced { doubled }) = &balanced.routing else {
        panic!("nothing was given");
    };
    // One of eight has a quarter.
    let mut twice = vec![3.0; 8];
    twice[7] = 7.0;
    let twice = routed(2, Some(vec![twice])).predicted;
    assert_eq!(
        (doubled.step_s, doubled.peak_gib),
        (twice.step_s, twice.peak_gib)
    );
    assert!(doubled.step_s > balanced.step_s && doubled.peak_gib > balanced.peak_gib);
}
