//! Cuts a model's layers into pipeline stages.
//!
//! Stages are contiguous runs of layers, chunk by chunk: stage `s` is chunk `s / pp` of rank
//! `s % pp`. The embedding adds to the first stage, norm, head and multi-token prediction to the
//! last. Works on weights of any unit (nanoseconds, bytes); what weighs how much is the caller's
//! business.

mod balance;

/// What the layers weigh.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    /// Each decoder layer.
    pub layers: &'a [u64],
    /// What the first stage carries besides: the embedding.
    pub first: u64,
    /// What the last stage carries besides: norm, head, multi-token prediction.
    pub last: u64,
    /// Whether the last stage may hold no layer at all. No other stage may.
    pub last_may_be_bare: bool,
}

/// A cut and how heavy it came out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// For each stage the layers it holds.
    pub stages: Vec<Vec<u32>>,
    /// The heaviest stage.
    pub max_stage: u64,
    /// The heaviest rank: the sum over its stages.
    pub max_rank: u64,
}

/// Cuts layers into `pp * vpp` stages; `None` where there are fewer layers than stages that need
/// one.
///
/// With one stage a rank the heaviest stage is least, exactly (dynamic program over stages and
/// layers), and among such cuts the sum of squares is.
///
/// With several, it is `4 x heaviest rank + heaviest stage` that is made small: a steady pipeline
/// moves at the pace of the rank with most work, and the heaviest stage sets the length of warm-up
/// and drain. The search starts from the cut of least heaviest stage and moves one layer from a
/// stage to another, shifting the stages between, while that helps. What it finds is a local
/// optimum; where all layers weigh the same it was the optimum in every case that brute force
/// reaches, where they differ in nine of ten.
pub fn partition(weights: &Weights, pp: u32, vpp: u32) -> Option<Partition> {
    assert!(pp >= 1 && vpp >= 1);
    let stages = pp as usize * vpp as usize;
    let line = Line::new(weights, stages)?;
    let mut cuts = line.least_heaviest_stage();
    if vpp > 1 {
        cuts = line.balance_ranks(cuts, pp as usize);
    }
    Some(line.partition(&cuts, pp as usize))
}

/// Equal stages, as Megatron-Core cuts without further flags: `None` unless the layers divide.
pub fn uniform(layers: u32, pp: u32, vpp: u32) -> Option<Vec<Vec<u32>>> {
    let stages = pp.checked_mul(vpp)?;
    if stages == 0 || layers == 0 || !layers.is_multiple_of(stages) {
        return None;
    }
    let each = layers / stages;
    let stage = |s: u32| (s * each..(s + 1) * each).collect();
    Some((0..stages).map(stage).collect())
}

/// Layers on a line, with prefix sums of their weights. Cuts are `stages + 1` positions: stage `s`
/// holds the layers from `cuts[s]` to `cuts[s + 1]`.
struct Line {
    before: Vec<u64>,
    first: u64,
    last: u64,
    stages: usize,
    /// Layers the last stage holds at least.
    last_needs: usize,
}

impl Line {
    fn new(weights: &Weights, stages: usize) -> Option<Self> {
        let mut before = vec![0];
        for &layer in weights.layers {
            before.push(layer.saturating_add(before[before.len() - 1]));
        }
        let last_needs = usize::from(!weights.last_may_be_bare || stages == 1);
        (weights.layers.len() + 1 >= stages + last_needs).then_some(Self {
            before,
            first: weights.first,
            last: weights.last,
            stages,
            last_needs,
        })
    }

    fn layers(&self) -> usize {
        self.before.len() - 1
    }

    fn weight(&self, stage: usize, from: usize, to: usize) -> u64 {
        let mut weight = self.before[to] - self.before[from];
        if stage == 0 {
            weight = weight.saturating_add(self.first);
        }
        if stage + 1 == self.stages {
            weight = weight.saturating_add(self.last);
        }
        weight
    }

    fn needs(&self, stage: usize) -> usize {
        if stage + 1 == self.stages {
            self.last_needs
        } else {
            1
        }
    }

    /// The cuts whose heaviest stage is least, and among those the sum of squares.
    fn least_heaviest_stage(&self) -> Vec<usize> {
        let (least, _) = self.best(u64::MAX, |best, stage| best.max(u128::from(stage)));
        let squares = |sum: u128, stage: u64| sum.saturating_add(u128::from(stage).pow(2));
        let cap = u64::try_from(least).unwrap_or(u64::MAX);
        self.best(cap, squares).1
    }

    /// The least total over all cuts without a stage above `cap`, and cuts that reach it, where
    /// `add` extends a total by a stage and grows with both.
    fn best(&self, cap: u64, add: impl Fn(u128, u64) -> u128) -> (u128, Vec<usize>) {
        let layers = self.layers();
        // [stage][layers placed]: least total, and where the stage begins.
        let mut total = vec![u128::MAX; layers + 1];
        total[0] = 0;
        let mut begins = vec![vec![0; layers + 1]; self.stages];
        for (stage, begins) in begins.iter_mut().enumerate() {
            let mut next = vec![u128::MAX; layers + 1];
            for to in self.needs(stage)..=layers {
                for from in (0..=to - self.needs(stage)).rev() {
                    let weight = self.weight(stage, from, to);
                    if weight > cap {
                        break;
                    }
                    if total[from] == u128::MAX {
                        continue;
                    }
                    let sum = add(total[from], weight);
                    if sum < next[to] {
                        next[to] = sum;
                        begins[to] = from;
                    }
                }
            }
            total = next;
        }
        let mut cuts = vec![layers; self.stages + 1];
        for stage in (0..self.stages).rev() {
            cuts[stage] = begins[stage][cuts[stage + 1]];
        }
        (total[layers], cuts)
    }

    fn partition(&self, cuts: &[usize], pp: usize) -> Partition {
        let balance = self.balance(cuts, pp, &mut Vec::new());
        let stages = cuts
            .windows(2)
            .map(|cut| (cut[0] as u32..cut[1] as u32).collect());
        Partition {
            stages: stages.collect(),
            max_stage: balance.max_stage,
            max_rank: balance.max_rank,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::balance::pace;
    use super::*;

    /// A fixed pseudo-random sequence (Knuth's MMIX congruence), so that failures repeat.
    fn random(seed: &mut u64, below: u64) -> u64 {
        *seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) % below
    }

    /// Every cut of the layers, as `(max_rank, max_stage)`.
    fn all_cuts(weights: &Weights, pp: usize, stages: usize) -> Vec<(u64, u64)> {
        fn extend(line: &Line, cuts: &mut Vec<usize>, pp: usize, found: &mut Vec<(u64, u64)>) {
            let stage = cuts.len() - 1;
            if stage == line.stages {
                if cuts[stage] == line.layers() {
                    let mut ranks = vec![0; pp];
                    let mut heaviest = 0;
                    for s in 0..stage {
                        let weight = line.weight(s, cuts[s], cuts[s + 1]);
                        ranks[s % pp] += weight;
                        heaviest = heaviest.max(weight);
                    }
                    found.push((ranks.into_iter().max().unwrap(), heaviest));
                }
                return;
            }
            for to in cuts[stage] + line.needs(stage)..=line.layers() {
                cuts.push(to);
                extend(line, cuts, pp, found);
                cuts.pop();
            }
        }
        let line = Line::new(weights, stages).expect("enough layers");
        let mut found = Vec::new();
        extend(&line, &mut vec![0], pp, &mut found);
        found
    }

    fn check_is_a_cut(stages: &[Vec<u32>], layers: usize) {
        let flat: Vec<u32> = stages.iter().flatten().copied().collect();
        assert_eq!(flat, (0..layers as u32).collect::<Vec<_>>());
    }

    #[test]
    fn oracle_heaviest_stage_is_least() {
        let mut seed = 1;
        for case in 0..300 {
            let num_layers = 1 + random(&mut seed, 9) as usize;
            let layers: Vec<u64> = (0..num_layers).map(|_| random(&mut seed, 20)).collect();
            let weights = Weights {
                layers: &layers,
                first: random(&mut seed, 20),
                last: random(&mut seed, 40),
                last_may_be_bare: case % 2 == 0,
            };
            for pp in 1..=num_layers.min(6) {
                let cut = partition(&weights, pp as u32, 1).expect("enough layers");
                check_is_a_cut(&cut.stages, num_layers);
                let best = all_cuts(&weights, pp, pp).into_iter().map(|(_, s)| s).min();
                assert_eq!(
                    Some(cut.max_stage),
                    best,
                    "case {case}: {weights:?} pp {pp}"
                );
                assert_eq!(cut.max_rank, cut.max_stage);
            }
        }
    }

    #[test]
    fn oracle_equal_layers_are_balanced_best() {
        for num_layers in 4..=12 {
            let layers = vec![10; num_layers];
            for (first, last) in [(0, 0), (3, 14), (25, 0), (0, 31), (7, 7)] {
                for (pp, vpp) in [(2, 2), (2, 3), (3, 2), (4, 2), (2, 4)] {
                    if pp * vpp > num_layers {
                        continue;
                    }
                    for last_may_be_bare in [false, true] {
                        let weights = Weights {
                            layers: &layers,
                            first,
                            last,
                            last_may_be_bare,
                        };
                        let cut = partition(&weights, pp as u32, vpp as u32).expect("enough");
                        check_is_a_cut(&cut.stages, num_layers);
                        let all = all_cuts(&weights, pp, pp * vpp);
                        let best = all.into_iter().map(|(rank, stage)| pace(rank, stage)).min();
                        let found = pace(cut.max_rank, cut.max_stage);
                        assert_eq!(Some(found), best, "{weights:?} pp {pp} vpp {vpp}");
                    }
                }
            }
        }
    }

    /// Unequal layers: a local optimum, seldom and little above the best.
    #[test]
    fn differential_unequal_layers_come_close() {
        let (mut seed, mut exact, mut cases, mut worst) = (7, 0, 0, 1.0_f64);
        for _ in 0..200 {
            let num_layers = 6 + random(&mut seed, 6) as usize;
            let layers: Vec<u64> = (0..num_layers)
                .map(|_| if random(&mut seed, 3) == 0 { 7 } else { 10 })
                .collect();
            let weights = Weights {
                layers: &layers,
                first: random(&mut seed, 5),
                last: random(&mut seed, 25),
                last_may_be_bare: false,
            };
            for (pp, vpp) in [(2, 2), (3, 2), (2, 3)] {
                let cut = partition(&weights, pp as u32, vpp as u32).expect("enough layers");
                check_is_a_cut(&cut.stages, num_layers);
                let all = all_cuts(&weights, pp, pp * vpp).into_iter();
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

    #[test]
    fn golden_small_cuts() {
        let check = |layers: &[u64], first, last, pp, vpp, lens: &[usize]| {
            let weights = Weights {
                layers,
                first,
                last,
                last_may_be_bare: false,
            };
            let cut = partition(&weights, pp, vpp).expect("enough layers");
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
        let weights = |layers, last_may_be_bare| Weights {
            layers,
            first: 1,
            last: 1,
            last_may_be_bare,
        };
        assert!(partition(&weights(&[1; 3], false), 4, 1).is_none());
        assert!(partition(&weights(&[1; 3], true), 4, 1).is_some());
        assert!(partition(&weights(&[], true), 1, 1).is_none());
    }
}
