//! Cuts against every cut there is.

use moefold_profiles::random::SplitMix64;
use moefold_profiles::units::Span;

use super::balance::{Balance, pace};
use super::*;
use crate::choice::ScheduleName;
use crate::schedule::Schedule;
use crate::simulate::{StageTimes, simulate};

fn around(pp: u32, vpp: u32) -> Places {
    Places::new(pp, vpp, false)
}

/// Every cut of a line.
fn cuts_of(line: &Line) -> Vec<Vec<usize>> {
    fn extend(line: &Line, cuts: &mut Vec<usize>, found: &mut Vec<Vec<usize>>) {
        let stage = cuts.len() - 1;
        if stage == line.stages {
            found.extend((cuts[stage] == line.layers()).then(|| cuts.clone()));
            return;
        }
        for to in cuts[stage] + line.needs(stage)..=line.layers() {
            cuts.push(to);
            extend(line, cuts, found);
            cuts.pop();
        }
    }
    let mut found = Vec::new();
    extend(line, &mut vec![0], &mut found);
    found
}

/// Every cut of the layers, as `(max_rank, max_stage)`.
fn all_cuts(weights: &Weights, ranks: &[usize]) -> Vec<(u64, u64)> {
    let line = Line::new(weights, ranks.len()).expect("enough layers");
    let heaviest = |cuts: Vec<usize>| {
        let mut sums = vec![0; ranks.len()];
        let stages: Vec<u64> = (cuts.windows(2).enumerate())
            .map(|(stage, cut)| line.weight(stage, cut[0], cut[1]))
            .collect();
        for (rank, weight) in ranks.iter().zip(&stages) {
            sums[*rank] += weight;
        }
        let heaviest = |of: Vec<u64>| of.into_iter().max().expect("a stage");
        (heaviest(sums), heaviest(stages))
    };
    cuts_of(&line).into_iter().map(heaviest).collect()
}

fn check_is_a_cut(stages: &[Vec<u32>], layers: usize) {
    let flat: Vec<u32> = stages.iter().flatten().copied().collect();
    assert_eq!(flat, (0..layers as u32).collect::<Vec<_>>());
}

/// No cut has a lighter heaviest rank than is told, and some have no heavier one.
#[test]
fn oracle_no_cut_has_a_lighter_heaviest_rank() {
    let mut random = SplitMix64::new(5);
    let mut met = 0;
    for case in 0..300 {
        let places = [
            around(2, 2),
            around(2, 3),
            around(3, 2),
            Places::new(2, 2, true),
        ][case % 4];
        let layers: Vec<u64> = (0..u64::from(places.stages()) + random.below(5))
            .map(|layer| if layer < 2 { random.below(9) } else { 7 })
            .collect();
        let weights = Weights {
            layers: &layers,
            first: random.below(5),
            last: random.below(15),
            first_may_be_bare: case % 3 == 0,
            last_may_be_bare: case % 2 == 0,
        };
        let line = Line::new(&weights, places.stages() as usize).expect("enough layers");
        let ranks: Vec<usize> = (0..places.stages())
            .map(|stage| places.rank_of(stage) as usize)
            .collect();
        let all = all_cuts(&weights, &ranks);
        let least = all.iter().map(|(rank, _)| *rank).min().expect("a cut");
        let told = line.least_heaviest_rank(places);
        assert!(told <= least, "{weights:?} {places:?}: {told} {least}");
        met += u32::from(told == least);
    }
    assert!(met > 100, "{met}");
}

#[test]
fn oracle_heaviest_stage_is_least() {
    let mut random = SplitMix64::new(1);
    for case in 0..300 {
        let num_layers = 1 + random.below(9) as usize;
        let layers: Vec<u64> = (0..num_layers).map(|_| random.below(20)).collect();
        let weights = Weights {
            layers: &layers,
            first: random.below(20),
            last: random.below(40),
            first_may_be_bare: case % 3 == 0,
            last_may_be_bare: case % 2 == 0,
        };
        for pp in 1..=num_layers.min(6) {
            let cut = partition(&weights, around(pp as u32, 1)).expect("enough layers");
            check_is_a_cut(&cut.stages, num_layers);
            let best = all_cuts(&weights, &(0..pp).collect::<Vec<_>>())
                .into_iter()
                .map(|(_, s)| s)
                .min();
            assert_eq!(
                Some(cut.max_stage),
                best,
                "case {case}: {weights:?} pp {pp}"
            );
            assert_eq!(cut.max_rank, cut.max_stage);
        }
    }
}

/// A step whose stages weigh so much each.
fn simulated(step: &OneStageEach<'_>, cuts: &[usize], each: &[u64]) -> u64 {
    let line = Line::new(&step.forward, step.stages as usize).expect("enough layers");
    let stages = cuts.windows(2).enumerate();
    let forward = stages.map(|(stage, cut)| Span(line.weight(stage, cut[0], cut[1])));
    let forward: Vec<Span> = forward.collect();
    let passes = forward.iter().zip(each);
    let backward = passes.map(|(forward, &both)| Span(both) - *forward);
    let mut times = StageTimes::new(step.stages, forward.clone(), backward.collect());
    times.hop = vec![Span(step.hop); step.stages as usize - 1];
    times.hop_overlapped = step.beside;
    let name = if let Some(passed) = &step.divided {
        let [both, passed] = [&step.both, passed].map(|weights| Line::new(weights, each.len()));
        let [both, passed] = [both, passed].map(|line| line.expect("enough layers"));
        let of = |line: &Line, stage: usize| line.weight(stage, cuts[stage], cuts[stage + 1]);
        let weight = |stage| Span(of(&both, stage) - of(&passed, stage));
        times.weight = Some((0..each.len()).map(weight).collect());
        ScheduleName::ZbH1
    } else {
        ScheduleName::of(step.stages, 1)
    };
    let schedule = Schedule::new(name, step.stages, 1, step.microbatches);
    simulate(&schedule, &times).total.0
}

/// Enough steps are bounded by what they take, and all by about that.
fn check_off(off: [Vec<f64>; 2]) {
    for (off, (least, most)) in off.into_iter().zip([(90, 0.05), (8, 0.07)]) {
        let reached = off.iter().filter(|off| **off == 0.0).count();
        let off = off.iter().sum::<f64>() / off.len() as f64;
        assert!(
            reached > least && off < most,
            "{reached} reached, {off} off"
        );
    }
}

/// Parts of what layers and ends weigh.
fn parts<'w>(of: &Weights<'_>, layers: &'w [u64], [first, last]: [u64; 2]) -> Weights<'w> {
    Weights {
        layers,
        first,
        last,
        first_may_be_bare: of.first_may_be_bare,
        last_may_be_bare: of.last_may_be_bare,
    }
}

/// Where stages may hold so many layers at most, and their first layers weigh more than those behind.
#[test]
fn oracle_of_what_stages_may_hold_the_best_is_found() {
    let mut random = SplitMix64::new(11);
    let (mut found, mut none, mut tried) = (0, 0, 0);
    // By how much less than a step it says, of whole backward passes and of divided ones.
    let mut off = [Vec::new(), Vec::new()];
    for case in 0..400 {
        let num_layers = 2 + random.below(8) as usize;
        let stages = 1 + random.below(num_layers.min(5) as u64) as usize;
        let layers: Vec<u64> = (0..num_layers).map(|_| 1 + random.below(20)).collect();
        let weights = Weights {
            layers: &layers,
            first: random.below(20),
            last: random.below(40),
            first_may_be_bare: false,
            last_may_be_bare: case % 2 == 0,
        };
        let most: Vec<usize> = (0..stages).map(|_| 1 + random.below(6) as usize).collect();
        let again: Vec<u64> = (0..num_layers).map(|_| random.below(12)).collect();
        let first = random.below(4) as usize;
        // It does not grow with every layer.
        let more = |stage: usize, of: Range<usize>| {
            let is_there = of.len() <= most[stage];
            is_there.then(|| of.take(first).map(|layer| again[layer]).sum())
        };
        let forwards: Vec<u64> = layers.iter().map(|both| random.below(both + 1)).collect();
        let ends = [weights.first, weights.last].map(|both| random.below(both + 1));
        let forward = parts(&weights, &forwards, ends);
        // A part of what backward passes weigh is of gradients of weights.
        let part = |(both, forward): (&u64, &u64)| both - (both - forward) / 3;
        let passes: Vec<u64> = layers.iter().zip(&forwards).map(part).collect();
        let ends = [
            part((&weights.first, &ends[0])),
            part((&weights.last, &ends[1])),
        ];
        let passed = parts(&weights, &passes, ends);
        let line = Line::new(&weights, stages).expect("enough layers");
        let one_each = OneStageEach {
            both: weights,
            forward,
            hop: random.below(4),
            beside: case % 3 == 0,
            divided: (stages > 1 && case % 4 == 0).then_some(passed),
            stages: stages as u32,
            microbatches: 1 + random.below(16) as u32,
        };
        let weigh = |cuts: &[usize]| -> Option<Vec<u64>> {
            let each = cuts.windows(2).enumerate();
            each.map(|(stage, cut)| {
                Some(line.weight(stage, cut[0], cut[1]) + more(stage, cut[0]..cut[1])?)
            })
            .collect()
        };
        // Of each cut: its heaviest stage, the sum of squares, and its step.
        let all = cuts_of(&line).into_iter().filter_map(|cuts| {
            let each = weigh(&cuts)?;
            let squares: u64 = each.iter().map(|own| own * own).sum();
            Some((
                each.iter().copied().max()?,
                squares,
                simulated(&one_each, &cuts, &each),
            ))
        });
        let all: Vec<(u64, u64, u64)> = all.collect();
        let best = all
            .iter()
            .map(|&(heaviest, squares, _)| (heaviest, squares));
        let step = all.iter().map(|&(.., step)| step).min();
        let least = |cap: u64| one_each.least(cap, more);
        // Cuts that may take so little are all that do, and no other takes less than one does at least.
        let cap = step.unwrap_or(1) + case % 7;
        let open = one_each.cuts(cap, more, usize::MAX).expect("endless");
        let open: Vec<Vec<usize>> = open.iter().map(|stages| positions(stages)).collect();
        let fast = cuts_of(&line).into_iter().filter(|cuts| {
            weigh(cuts).is_some_and(|each| simulated(&one_each, cuts, &each) <= cap)
        });
        let missed: Vec<Vec<usize>> = fast.filter(|cuts| !open.contains(cuts)).collect();
        assert!(missed.is_empty(), "case {case}: {missed:?}");
        if let Some(fewer) = open.len().checked_sub(1) {
            assert_eq!(one_each.cuts(cap, more, fewer), None, "case {case}");
        }
        tried += open.len();
        let own = least(u64::MAX);
        assert_eq!(own.is_some(), step.is_some(), "case {case}");
        if let (Some(own), Some(step)) = (own, step) {
            assert!(own <= step, "case {case}: {own} {step}");
            assert_eq!(least(own), Some(own), "case {case}");
            assert_eq!(least(own - 1), None, "case {case}");
            off[usize::from(one_each.divided.is_some())].push(step as f64 / own as f64 - 1.0);
        }
        let cut = within(&weights, stages as u32, u64::MAX, more);
        let cut = cut.map(|stages| {
            check_is_a_cut(&stages, num_layers);
            let each = weigh(&positions(&stages)).expect("may be held");
            let squares = each.iter().map(|own| own * own).sum::<u64>();
            (*each.iter().max().expect("a stage"), squares)
        });
        assert_eq!(cut, best.min(), "case {case}");
        *if cut.is_some() { &mut found } else { &mut none } += 1;
    }
    assert!(found > 100 && none > 50, "{found} found, {none} without");
    check_off(off);
    assert!(tried > 500, "{tried} tried");
}

#[test]
fn oracle_all_cuts_are_gone_through() {
    for (bare, stages) in (0..4).flat_map(|bare| (1..8).map(move |stages| (bare, stages))) {
        let weights = Weights {
            layers: &[1; 6],
            first: 0,
            last: 0,
            first_may_be_bare: bare % 2 == 1,
            last_may_be_bare: bare > 1,
        };
        let Some(line) = Line::new(&weights, stages) else {
            assert_eq!(cuts(&weights, stages as u32, 0), Some(Vec::new()));
            continue;
        };
        let mut all: Vec<_> = cuts_of(&line).iter().map(|cut| held_by(cut)).collect();
        let mut found = cuts(&weights, stages as u32, all.len()).expect("as many");
        assert_eq!(cuts(&weights, stages as u32, all.len() - 1), None);
        all.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, all, "{stages} {bare}");
    }
}

#[test]
fn oracle_equal_layers_are_balanced_best() {
    for num_layers in 4..=12 {
        let layers = vec![10; num_layers];
        for (first, last) in [(0, 0), (3, 14), (25, 0), (0, 31), (7, 7)] {
            for (pp, vpp) in [(2, 2), (2, 3), (3, 2), (4, 2), (2, 4)] {
                for (first_may_be_bare, last_may_be_bare) in
                    [(false, false), (false, true), (true, false), (true, true)]
                {
                    let ends = usize::from(first_may_be_bare) + usize::from(last_may_be_bare);
                    if pp * vpp > num_layers + ends {
                        continue;
                    }
                    let weights = Weights {
                        layers: &layers,
                        first,
                        last,
                        first_may_be_bare,
                        last_may_be_bare,
                    };
                    let goes_around = |stage| stage % pp;
                    let comes_back = |stage: usize| stage.min(2 * pp - 1 - stage.min(2 * pp - 1));
                    let ways: [(bool, &dyn Fn(usize) -> usize); 2] =
                        [(false, &goes_around), (true, &comes_back)];
                    for (is_vee, rank_of) in ways.into_iter().take(if vpp == 2 { 2 } else { 1 }) {
                        let places = Places::new(pp as u32, vpp as u32, is_vee);
                        let cut = partition(&weights, places).expect("enough");
                        check_is_a_cut(&cut.stages, num_layers);
                        let ranks: Vec<usize> = (0..pp * vpp).map(rank_of).collect();
                        let all = all_cuts(&weights, &ranks);
                        let best = all.into_iter().map(|(rank, stage)| pace(rank, stage)).min();
                        let found = pace(cut.max_rank, cut.max_stage);
                        assert_eq!(Some(found), best, "{weights:?} {places:?}");
                    }
                }
            }
        }
    }
}

/// Six to eleven layers of two weights, and ends.
struct Unequal {
    layers: Vec<u64>,
    first: u64,
    last: u64,
}

impl Unequal {
    fn draw(random: &mut SplitMix64) -> Self {
        let num_layers = 6 + random.below(6);
        let layers = (0..num_layers).map(|_| if random.below(3) == 0 { 7 } else { 10 });
        Self {
            layers: layers.collect(),
            first: random.below(5),
            last: random.below(25),
        }
    }

    fn weights(&self, last_may_be_bare: bool) -> Weights<'_> {
        Weights {
            layers: &self.layers,
            first: self.first,
            last: self.last,
            first_may_be_bare: false,
            last_may_be_bare,
        }
    }
}

/// Unequal layers: a local optimum, seldom and little above the best.
#[test]
fn differential_unequal_layers_come_close() {
    let mut random = SplitMix64::new(7);
    let (mut exact, mut cases, mut worst) = (0, 0, 1.0_f64);
    for _ in 0..200 {
        let drawn = Unequal::draw(&mut random);
        let (num_layers, weights) = (drawn.layers.len(), drawn.weights(false));
        for (pp, vpp) in [(2, 2), (3, 2), (2, 3)] {
            let cut = partition(&weights, around(pp as u32, vpp as u32)).expect("enough layers");
            check_is_a_cut(&cut.stages, num_layers);
            let ranks: Vec<usize> = (0..pp * vpp).map(|stage| stage % pp).collect();
            let all = all_cuts(&weights, &ranks).into_iter();
            let best = all
                .map(|(rank, stage)| pace(rank, stage))
                .min()
                .expect("some");
            let found = pace(cut.max_rank, cut.max_stage);
            assert!(found >= best);
            worst = worst.max(found as f64 / best as f64);
            exact += usize::from(found == best);
            cases += 1;
        }
    }
    assert!(
        exact * 10 >= cases * 9 && worst < 1.1,
        "{exact} of {cases} exact, worst {worst:.3}"
    );
}

/// Where ranks of several stages may hold so many layers at most: moves that go on from a balanced cut find one wherever there is
/// room, and little above the best.
#[test]
fn oracle_what_ranks_hold_no_more_of_comes_close() {
    let mut random = SplitMix64::new(23);
    let (mut found, mut exact, mut none, mut missed, mut worst) = (0, 0, 0, 0, 1.0_f64);
    for _ in 0..400 {
        let drawn = Unequal::draw(&mut random);
        let (num_layers, weights) = (drawn.layers.len(), drawn.weights(true));
        for (pp, vpp) in [(2, 2), (3, 2), (2, 3)] {
            let places = around(pp as u32, vpp as u32);
            let line = Line::new(&weights, pp * vpp).expect("enough layers");
            let even = num_layers.div_ceil(pp) as u64;
            let most: Vec<u64> = (0..pp).map(|_| even - 1 + random.below(3)).collect();
            let held = |cuts: &[usize]| {
                let mut held = vec![0; pp];
                for (stage, cut) in cuts.windows(2).enumerate() {
                    held[stage % pp] += (cut[1] - cut[0]) as u64;
                }
                held
            };
            let may = |cuts: &Vec<usize>| {
                held(cuts)
                    .iter()
                    .zip(&most)
                    .all(|(held, most)| held <= most)
            };
            let of = |cuts: &[usize]| {
                let Balance {
                    max_rank,
                    max_stage,
                    ..
                } = line.balance(cuts, places);
                pace(max_rank, max_stage)
            };
            let best = cuts_of(&line)
                .into_iter()
                .filter(may)
                .map(|cuts| of(&cuts))
                .min();
            let balanced = partition(&weights, places).expect("enough layers");
            let cut = holding(&weights, places, &balanced.stages, |rank| most[rank]);
            match (cut, best) {
                (Some(cut), Some(best)) => {
                    check_is_a_cut(&cut.stages, num_layers);
                    assert!(may(&positions(&cut.stages)), "{cut:?} {most:?}");
                    let own = pace(cut.max_rank, cut.max_stage);
                    worst = worst.max(own as f64 / best as f64);
                    exact += usize::from(own == best);
                    found += 1;
                }
                (None, Some(_)) => missed += 1,
                (cut, None) => {
                    assert!(cut.is_none(), "{cut:?} {most:?}");
                    none += 1;
                }
            }
        }
    }
    assert!(
        missed == 0 && none > 100 && exact * 10 >= found * 8 && worst < 1.2,
        "{found} found, {exact} exact, {missed} missed, {none} without, worst {worst:.3}"
    );
}

#[test]
fn golden_small_cuts() {
    let check = |layers: &[u64], first, last, pp, vpp, lens: &[usize]| {
        let weights = Weights {
            layers,
            first,
            last,
            first_may_be_bare: false,
            last_may_be_bare: false,
        };
        let cut = partition(&weights, around(pp, vpp)).expect("enough layers");
        let found: Vec<usize> = cut.stages.iter().map(Vec::len).collect();
        assert_eq!(found, lens);
    };
    check(&[1; 8], 0, 0, 4, 1, &[2, 2, 2, 2]);
    // A heavy head takes a layer's place.
    check(&[1; 7], 0, 1, 4, 1, &[2, 2, 2, 1]);
    // Two stages have to hold three; they do not fall on one rank.
    check(&[1; 10], 0, 0, 2, 2, &[3, 3, 2, 2]);
    assert!(uniform(7, 2, 2).is_none());
    assert_eq!(
        uniform(4, 2, 1).expect("divides"),
        vec![vec![0, 1], vec![2, 3]]
    );
}

#[test]
fn too_few_layers_are_refused() {
    let weights = |layers, [first_may_be_bare, last_may_be_bare]: [bool; 2]| Weights {
        layers,
        first: 1,
        last: 1,
        first_may_be_bare,
        last_may_be_bare,
    };
    for (ends, most) in [
        ([false, false], 3),
        ([false, true], 4),
        ([true, false], 4),
        ([true, true], 5),
    ] {
        for stages in 1..8 {
            let weights = weights(&[1; 3], ends);
            let found = [
                partition(&weights, around(stages, 1)).is_some(),
                partition(&weights, around(1, stages)).is_some(),
                proportional(&weights, stages).is_some(),
            ];
            assert_eq!(found, [stages <= most; 3], "{ends:?} {stages}");
        }
    }
    let both = partition(&weights(&[1; 3], [true; 2]), around(5, 1)).expect("ends are bare");
    assert_eq!(both.stages, [vec![], vec![0], vec![1], vec![2], vec![]]);
    assert!(partition(&weights(&[], [true; 2]), around(1, 1)).is_none());
}

#[test]
fn law_a_proportional_cut_holds_every_layer_and_is_near_the_best() {
    for layers in 1..14_usize {
        for stages in 1..=layers as u32 + 2 {
            let line: Vec<u64> = (0..layers).map(|i| 10 + (i as u64 * 7) % 4).collect();
            let weights = Weights {
                layers: &line,
                first: 3,
                last: 8,
                first_may_be_bare: stages as usize > layers,
                last_may_be_bare: true,
            };
            let best = partition(&weights, around(stages, 1));
            let cut = proportional(&weights, stages);
            assert_eq!(cut.is_some(), best.is_some(), "{layers} {stages}");
            let Some((cut, best)) = cut.zip(best) else {
                continue;
            };
            assert_eq!(cut.len(), stages as usize);
            let middle = usize::from(stages as usize > layers)..cut.len() - 1;
            assert!(middle.is_empty() || cut[middle].iter().all(|held| !held.is_empty()));
            let held: Vec<u32> = cut.concat();
            assert!(held.into_iter().eq(0..layers as u32), "{cut:?}");
            let weight = |(stage, held): (usize, &Vec<u32>)| -> u64 {
                let ends = if stage == 0 { 3 } else { 0 };
                let ends = ends + if stage + 1 == cut.len() { 8 } else { 0 };
                ends + held.iter().map(|&i| line[i as usize]).sum::<u64>()
            };
            let heaviest = cut.iter().enumerate().map(weight).max().expect("a stage");
            // One layer and the ends more, at most.
            assert!(heaviest <= best.max_stage + 13 + 11, "{cut:?}");
        }
    }
}
