//! [`place`]: which experts each expert-parallel rank is best given, where they are not as busy as one another, and which
//! of them are best held more than once.
//!
//! Time goes by the busiest rank. Every rank holds as many experts, so this is number partitioning with a cardinality,
//! which is NP-hard: experts go to the least busy rank that has room, the busiest first (LPT: Graham, *Bounds on
//! multiprocessing timing anomalies*, SIAM Journal on Applied Mathematics 17, 1969), and then change places as long as
//! that helps. Tokens of an expert divide evenly among its copies (as in the load balancer of arXiv 2412.19437, section
//! 3.4), so the next copy is always of the expert with the busiest ones: no other choice leaves these less busy.

/// Experts of ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// Those of each rank, in ascending order. One that is held more than once is on several ranks.
    pub ranks: Vec<Vec<u32>>,
    /// Load of the busiest rank over the mean of all.
    pub busiest: f64,
}

/// One expert on a rank, with its share of the load.
#[derive(Debug, Clone, Copy)]
struct Held {
    expert: usize,
    load: f64,
}

/// Experts as Megatron-Core places them: in order. `ranks` divides them.
pub fn in_order(loads: &[f64], ranks: usize) -> Placed {
    let each = loads.len() / ranks;
    let held = loads.iter().enumerate();
    let held: Vec<Held> = held.map(|(expert, &load)| Held { expert, load }).collect();
    placed(held.chunks(each).map(<[Held]>::to_vec).collect())
}

/// What is this near to the load that no placement goes below is not looked beyond.
const NEAR: f64 = 1e-3;

/// Experts placed so that the busiest of `ranks` has little to do; each rank has room for `copies` more than its share.
/// `ranks` divides the experts, of which some have a load. Tries one more copy at a time until the busiest rank is within
/// a thousandth of what no placement goes below, room is full, or `is_stopped`, and gives the best.
pub fn place(loads: &[f64], ranks: usize, copies: usize, is_stopped: &dyn Fn() -> bool) -> Placed {
    let room = loads.len() / ranks + copies;
    let enough = at_least(loads, ranks, copies) * (1.0 + NEAR);
    let mut best = in_order(loads, ranks);
    let mut times = vec![1; loads.len()];
    // Room need not be filled: smaller shares do not always fit together better.
    for _ in 0..=ranks * copies {
        let found = packed(loads, &times, ranks, room);
        if found.busiest < best.busiest {
            best = found;
        }
        if best.busiest <= enough || is_stopped() || !copy_busiest(loads, &mut times, ranks) {
            break;
        }
    }
    best
}

/// Experts that are held so many `times` each, on ranks that have room for so many.
fn packed(loads: &[f64], times: &[usize], ranks: usize, room: usize) -> Placed {
    let each = times.iter().enumerate();
    let mut held: Vec<Held> = each
        .flat_map(|(expert, &times)| {
            let load = loads[expert] / times as f64;
            std::iter::repeat_n(Held { expert, load }, times)
        })
        .collect();
    held.sort_by(|a, b| b.load.total_cmp(&a.load).then(a.expert.cmp(&b.expert)));
    let mut all: Vec<Vec<Held>> = vec![Vec::with_capacity(room); ranks];
    let mut sums = vec![0.0; ranks];
    for one in held {
        // A second copy on a rank serves no one; where only such ranks have room, it stays without work there.
        let fits = |rank: &usize| all[*rank].len() < room;
        let is_new = |rank: &usize| all[*rank].iter().all(|held| held.expert != one.expert);
        let least = |ranks: &mut dyn Iterator<Item = usize>| {
            ranks.min_by(|&a: &usize, &b: &usize| f64::total_cmp(&sums[a], &sums[b]))
        };
        let rank = least(&mut (0..ranks).filter(fits).filter(is_new))
            .or_else(|| least(&mut (0..ranks).filter(fits)))
            .expect("as much room as experts and copies");
        all[rank].push(one);
        sums[rank] += one.load;
    }
    exchange(&mut all, &mut sums);
    placed(all)
}

/// The load of the busiest rank over the mean that no placement goes below: some rank has the mean at least, and some rank
/// the busiest copy.
pub fn at_least(loads: &[f64], ranks: usize, copies: usize) -> f64 {
    let mut times = vec![1; loads.len()];
    for _ in 0..ranks * copies {
        copy_busiest(loads, &mut times, ranks);
    }
    let shares = loads.iter().zip(times);
    let largest = shares.map(|(load, times)| load / times as f64);
    let total: f64 = loads.iter().sum();
    (largest.fold(0.0, f64::max) * ranks as f64 / total).max(1.0)
}

/// Holds the expert once more whose copies are the busiest; false where every rank has every expert.
fn copy_busiest(loads: &[f64], times: &mut [usize], ranks: usize) -> bool {
    let share = |expert: usize| loads[expert] / times[expert] as f64;
    let busiest = (0..loads.len())
        .filter(|&expert| times[expert] < ranks)
        .max_by(|&a, &b| share(a).total_cmp(&share(b)).then(b.cmp(&a)));
    if let Some(expert) = busiest {
        times[expert] += 1;
    }
    busiest.is_some()
}

/// Has the busiest rank and another change experts, as long as the busier of the two is less busy after it.
fn exchange(all: &mut [Vec<Held>], sums: &mut [f64]) {
    let knows = |held: &[Held], expert: usize| held.iter().any(|one| one.expert == expert);
    loop {
        let ranks = 0..sums.len();
        let Some(busiest) = ranks.max_by(|&a, &b| sums[a].total_cmp(&sums[b])) else {
            return;
        };
        let mut best: Option<(f64, [usize; 3])> = None;
        for (own, one) in all[busiest].iter().enumerate() {
            for (rank, others) in all.iter().enumerate() {
                for (other, two) in others.iter().enumerate() {
                    let moved = one.load - two.load;
                    let after = (sums[busiest] - moved).max(sums[rank] + moved);
                    let better =
                        after < best.map_or(sums[busiest], |(least, _)| least) * (1.0 - 1e-12);
                    if rank != busiest
                        && better
                        && !knows(others, one.expert)
                        && !knows(&all[busiest], two.expert)
                    {
                        best = Some((after, [own, rank, other]));
                    }
                }
            }
        }
        let Some((_, [own, rank, other])) = best else {
            return;
        };
        let (one, two) = (all[busiest][own], all[rank][other]);
        (all[busiest][own], all[rank][other]) = (two, one);
        sums[busiest] += two.load - one.load;
        sums[rank] += one.load - two.load;
    }
}

fn placed(all: Vec<Vec<Held>>) -> Placed {
    let sum = |held: &Vec<Held>| held.iter().map(|one| one.load).sum::<f64>();
    let sums: Vec<f64> = all.iter().map(sum).collect();
    let total: f64 = sums.iter().sum();
    let most = sums.iter().copied().fold(0.0, f64::max);
    let ranks = all.into_iter().map(|held| {
        let mut experts: Vec<u32> = held.iter().map(|one| one.expert as u32).collect();
        experts.sort_unstable();
        experts
    });
    Placed {
        ranks: ranks.collect(),
        busiest: most * sums.len() as f64 / total,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    /// The least that any placement leaves the busiest rank, by trying all, over all ways to copy too.
    fn brute(loads: &[f64], ranks: usize, copies: usize) -> f64 {
        fn ways(
            loads: &[f64],
            times: &mut Vec<usize>,
            (left, ranks, room): (usize, usize, usize),
            best: &mut f64,
        ) {
            if times.len() == loads.len() {
                let mut all = vec![Vec::new(); ranks];
                put(loads, times, 0, 0, &mut all, room, best);
                return;
            }
            for more in 0..=left.min(ranks - 1) {
                times.push(1 + more);
                ways(loads, times, (left - more, ranks, room), best);
                times.pop();
            }
        }
        /// Puts copy after copy of an expert on ranks in ascending order.
        fn put(
            loads: &[f64],
            times: &[usize],
            expert: usize,
            placed: usize,
            all: &mut [Vec<usize>],
            room: usize,
            best: &mut f64,
        ) {
            if expert == loads.len() {
                let sum = |held: &Vec<usize>| {
                    let each = held.iter().map(|&one| loads[one] / times[one] as f64);
                    each.sum::<f64>()
                };
                *best = best.min(all.iter().map(sum).fold(0.0, f64::max));
                return;
            }
            if placed == times[expert] {
                put(loads, times, expert + 1, 0, all, room, best);
                return;
            }
            let last = all.iter().rposition(|held| held.contains(&expert));
            for rank in last.map_or(0, |last| last + 1)..all.len() {
                if all[rank].len() < room {
                    all[rank].push(expert);
                    put(loads, times, expert, placed + 1, all, room, best);
                    all[rank].pop();
                }
            }
        }
        let mut best = f64::INFINITY;
        let room = loads.len() / ranks + copies;
        ways(
            loads,
            &mut Vec::new(),
            (ranks * copies, ranks, room),
            &mut best,
        );
        best * ranks as f64 / loads.iter().sum::<f64>()
    }

    fn check(loads: &[f64], ranks: usize, copies: usize) -> Result<[f64; 2], TestCaseError> {
        let found = place(loads, ranks, copies, &|| false);
        let room = loads.len() / ranks + copies;
        let mut times = vec![0; loads.len()];
        for held in &found.ranks {
            prop_assert!(held.len() <= room);
            for &expert in held {
                times[expert as usize] += 1;
            }
        }
        prop_assert!(times.iter().all(|&times| times > 0));
        let sums = found.ranks.iter().map(|held| {
            let each = held
                .iter()
                .map(|&one| loads[one as usize] / f64::from(times[one as usize]));
            each.sum::<f64>()
        });
        let most = sums.fold(0.0, f64::max) * ranks as f64 / loads.iter().sum::<f64>();
        prop_assert!((most / found.busiest - 1.0).abs() < 1e-9);
        prop_assert!(found.busiest <= in_order(loads, ranks).busiest * (1.0 + 1e-9));
        let best = brute(loads, ranks, copies);
        prop_assert!(
            at_least(loads, ranks, copies) <= best * (1.0 + 1e-9),
            "{:?}",
            loads
        );
        prop_assert!(found.busiest >= best * (1.0 - 1e-9));
        Ok([found.busiest, best])
    }

    #[test]
    fn golden_placements() {
        // 9 + 1 = 6 + 4 = 5 + 5, by hand.
        let found = place(&[9.0, 6.0, 5.0, 5.0, 4.0, 1.0], 3, 0, &|| false);
        assert_eq!(found.busiest, 1.0);
        assert_eq!(found.ranks, [[0, 5], [1, 4], [2, 3]]);
        assert_eq!(in_order(&[9.0, 6.0, 5.0, 5.0, 4.0, 1.0], 3).busiest, 1.5);
        // More than a rank's share is on both ranks, and another expert with it: 4.5 + 1 + 0.5, twice.
        let found = place(&[9.0, 1.0, 1.0, 1.0], 2, 1, &|| false);
        assert_eq!(found.busiest, 1.0);
        assert!(
            found.ranks.iter().all(|held| held.contains(&0)),
            "{found:?}"
        );
        // With room alone, no copy is needed: 6 = 2 + 2 + 2.
        let found = place(&[6.0, 2.0, 2.0, 2.0], 2, 1, &|| false);
        assert_eq!(found.ranks, [vec![0], vec![1, 2, 3]]);
    }

    #[test]
    fn a_stop_leaves_the_best_so_far_and_what_is_near_the_bound_is_not_looked_beyond() {
        let loads: Vec<f64> = (0..64)
            .map(|expert| f64::from(expert % 7 + 1).powi(3))
            .collect();
        let placed = |copies, stop_after| {
            let looks = Cell::new(0);
            let is_stopped = || looks.replace(looks.get() + 1) >= stop_after;
            let found = place(&loads, 8, copies, &is_stopped);
            (found, looks.get())
        };
        let (whole, looks) = placed(56, u32::MAX);
        assert!(whole.busiest <= at_least(&loads, 8, 56) * (1.0 + NEAR));
        assert!(looks < 8 * 56, "{looks} numbers of copies");
        let (first, looks) = placed(56, 0);
        assert_eq!(looks, 1);
        assert!(whole.busiest < first.busiest && first.busiest < in_order(&loads, 8).busiest);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// Against every placement of few experts: never below the best, and at most a fifth above it.
        #[test]
        fn oracle_no_placement_of_few_experts_is_much_better(
            loads in proptest::collection::vec(0.01_f64..10.0, 8),
            ranks in proptest::sample::select(vec![1_usize, 2, 4]),
        ) {
            let [found, best] = check(&loads, ranks, 0)?;
            prop_assert!(found <= best * 1.2, "{} {} {:?}", found, best, loads);
        }

        /// The same with copies, of which the best number each is tried too.
        #[test]
        fn oracle_no_copies_of_few_experts_are_much_better(
            loads in proptest::collection::vec(0.01_f64..10.0, 4),
            ranks in proptest::sample::select(vec![1_usize, 2, 4]),
        ) {
            let [found, best] = check(&loads, ranks, usize::from(ranks > 1))?;
            prop_assert!(found <= best * 1.35, "{} {} {:?}", found, best, loads);
        }
    }
}
