//! How much finer recomputation could still save: a linear relaxation.
//!
//! Where every layer takes its own set, a rank recomputes no more than its memory asks for. How many
//! layers take which set is an integer program; relaxed to fractions it is a linear one whose optimum no
//! choice can beat, so it bounds what such a choice could gain on the plan's layout. The search decides
//! ([`super::by_layer`], where a runtime offers it), the bound only says how far it may be from the best.

use good_lp::{Expression, Solution, SolverModel, constraint, microlp, variable, variables};
use moefold_profiles::statistics::unbeaten;

/// One way to run a layer: seconds that it computes again, GiB that a microbatch keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Way {
    pub(crate) seconds: f64,
    pub(crate) gib: f64,
}

/// Layers that are alike: same kind, same chunk.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Alike {
    pub(crate) layers: u32,
    /// Live microbatches at each occupancy.
    pub(crate) live: Vec<u32>,
    pub(crate) ways: Vec<Way>,
}

/// The least seconds of one microbatch that a rank computes again whose activations fit `room_gib` at every occupancy;
/// `None` where not even a fraction fits.
pub(crate) fn least_work(groups: &[Alike], room_gib: &[f64]) -> Option<f64> {
    let mut problem = variables!();
    let mut work = Expression::from(0.0);
    let mut all = Vec::with_capacity(groups.len());
    let mut used = vec![Expression::from(0.0); room_gib.len()];
    for group in groups {
        let mut layers = Expression::from(0.0);
        let ways = unbeaten(group.ways.clone(), |way| [way.seconds, way.gib]);
        for way in ways {
            let share = problem.add(variable().min(0.0));
            layers += share;
            work += share * way.seconds;
            for (used, &live) in used.iter_mut().zip(&group.live) {
                *used += share * (way.gib * f64::from(live));
            }
        }
        all.push(constraint!(layers == f64::from(group.layers)));
    }
    for (used, &room) in used.into_iter().zip(room_gib) {
        all.push(constraint!(used <= room));
    }
    let solved = problem
        .minimise(work.clone())
        .using(microlp)
        .with_all(all)
        .solve();
    solved.ok().map(|solution| solution.eval(work))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Tries every assignment of whole layers.
    fn brute_force(groups: &[Alike], room: &[f64]) -> Option<f64> {
        fn assign(groups: &[Alike], room: &[f64], left: u32) -> Option<f64> {
            let Some(group) = groups.first() else {
                return room.iter().all(|&room| room >= -1e-9).then_some(0.0);
            };
            if left == 0 {
                let next = groups.get(1).map_or(0, |next| next.layers);
                return assign(&groups[1..], room, next);
            }
            group
                .ways
                .iter()
                .filter_map(|way| {
                    let room: Vec<f64> = room
                        .iter()
                        .zip(&group.live)
                        .map(|(room, &live)| room - way.gib * f64::from(live))
                        .collect();
                    assign(groups, &room, left - 1).map(|rest| rest + way.seconds)
                })
                .min_by(f64::total_cmp)
        }
        assign(groups, room, groups.first().map_or(0, |group| group.layers))
    }

    proptest! {
        #[test]
        fn law_the_relaxation_never_exceeds_the_best_whole_choice(
            layers in proptest::collection::vec(1_u32..4, 1..3),
            ways in proptest::collection::vec((1_u32..20, 0_u32..10), 1..4),
            live in proptest::collection::vec(1_u32..5, 2),
            room in proptest::collection::vec(1_u32..60, 2),
        ) {
            let ways: Vec<Way> = ways
                .iter()
                .map(|&(seconds, gib)| Way { seconds: f64::from(seconds), gib: f64::from(gib) })
                .collect();
            let groups: Vec<Alike> = layers
                .iter()
                .map(|&layers| Alike { layers, live: live.clone(), ways: ways.clone() })
                .collect();
            let room: Vec<f64> = room.iter().map(|&room| f64::from(room)).collect();
            let bound = least_work(&groups, &room);
            if let Some(exact) = brute_force(&groups, &room) {
                let bound = bound.expect("what fits whole fits in fractions");
                prop_assert!(bound <= exact + 1e-6, "{bound} > {exact}");
            }
        }
    }

    #[test]
    fn oracle_one_layer_in_two_is_enough_where_half_the_memory_is() {
        let ways = vec![
            Way {
                seconds: 1.0,
                gib: 2.0,
            },
            Way {
                seconds: 1.5,
                gib: 1.0,
            },
        ];
        let group = Alike {
            layers: 4,
            live: vec![1],
            ways,
        };
        let work = least_work(&[group], &[6.0]).expect("fits");
        assert!((work - 5.0).abs() < 1e-9, "{work}");
    }
}
