//! Balances the sums of several stages a rank by moving single layers.

use std::cmp::Ordering;

use super::Line;
use crate::layout::Places;

impl Line {
    /// The best of the local optima reached from cuts of least heaviest stage and, where layers differ, from cuts one move away from
    /// the first optimum, as far as the budget of moves goes: a small one where the pace is the least there is, and only how many
    /// ranks and stages are as heavy is left to improve.
    pub(super) fn balance_ranks(&self, cuts: Vec<usize>, places: Places) -> Vec<usize> {
        let endless = vec![u64::MAX; places.pp() as usize];
        let mut search = Descent::new(self, places, &endless);
        let least_stage = self.balance(&cuts, places).max_stage;
        let (mut best, optimum) = search.descend(cuts);
        let mut best_cuts = optimum.clone();
        if self.layers_are_equal() {
            return best_cuts;
        }
        let least = pace(self.least_heaviest_rank(places), least_stage);
        search.moves_left = if best.pace == least { FEW } else { MOVES };
        for (source, target) in (0..self.stages).flat_map(|s| (0..self.stages).map(move |t| (s, t)))
        {
            if source != target && self.can_give(&optimum, source) && search.moves_left > 0 {
                let mut varied = optimum.clone();
                shift(&mut varied, source, target);
                let (balance, varied) = search.descend(varied);
                if balance < best {
                    (best, best_cuts) = (balance, varied);
                }
            }
        }
        best_cuts
    }

    /// The local optimum reached from some cuts where each rank may hold so many layers at most. None where one still holds more.
    pub(super) fn hold_no_more(
        &self,
        cuts: Vec<usize>,
        places: Places,
        most: &[u64],
    ) -> Option<Vec<usize>> {
        let (balance, cuts) = Descent::new(self, places, most).descend(cuts);
        (balance.too_many == 0).then_some(cuts)
    }

    /// What the heaviest rank weighs at least: layers are whole, so that in a given time ranks together do so many at most, were
    /// all as light as the lightest of some.
    pub(super) fn least_heaviest_rank(&self, places: Places) -> u64 {
        let mut ends = vec![0; places.pp() as usize];
        ends[0] = self.first;
        let last = &mut ends[places.rank_of(places.stages() - 1) as usize];
        *last = last.saturating_add(self.last);
        let mut layers: Vec<u64> = self.before.windows(2).map(|two| two[1] - two[0]).collect();
        layers.sort_unstable_by(|a, b| b.cmp(a));
        let mut least = heaviest(&ends);
        for (count, &weight) in (1..).zip(&layers) {
            if layers.get(count) == Some(&weight) {
                continue;
            }
            // When each rank has done one, two, and so on.
            let done = |end: &u64| {
                let end = *end;
                (1..=count as u64)
                    .map(move |layers| end.saturating_add(layers.saturating_mul(weight)))
            };
            let mut done: Vec<u64> = ends.iter().flat_map(done).collect();
            let (_, all, _) = done.select_nth_unstable(count - 1);
            least = least.max(*all);
        }
        least
    }

    fn layers_are_equal(&self) -> bool {
        let layer = |i: usize| self.before[i + 1] - self.before[i];
        (1..self.layers()).all(|i| layer(i) == layer(0))
    }

    fn can_give(&self, cuts: &[usize], stage: usize) -> bool {
        cuts[stage + 1] - cuts[stage] > self.needs(stage)
    }

    /// Weighs cuts.
    pub(super) fn balance(&self, cuts: &[usize], places: Places) -> Balance {
        let stages: Vec<u64> = self.stages_of(cuts).collect();
        let mut ranks = vec![0_u64; places.pp() as usize];
        for (stage, &weight) in stages.iter().enumerate() {
            let rank = &mut ranks[places.rank_of(stage as u32) as usize];
            *rank = rank.saturating_add(weight);
        }
        Balance::of(0, Heaviest::among(&stages), &ranks)
    }

    /// What stages weigh.
    fn stages_of(&self, cuts: &[usize]) -> impl Iterator<Item = u64> {
        let each = cuts.windows(2).enumerate();
        each.map(|(stage, cut)| self.weight(stage, cut[0], cut[1]))
    }
}

/// The heaviest of some stages, and how many are as heavy.
#[derive(Debug, Clone, Copy, Default)]
struct Heaviest {
    weight: u64,
    there: usize,
}

impl Heaviest {
    fn among(weights: &[u64]) -> Self {
        let each = weights.iter();
        each.fold(Self::default(), |sum, &weight| sum.and(Self::one(weight)))
    }

    fn one(weight: u64) -> Self {
        Self { weight, there: 1 }
    }

    fn and(self, other: Self) -> Self {
        match self.weight.cmp(&other.weight) {
            Ordering::Less => other,
            Ordering::Greater => self,
            Ordering::Equal => Self {
                there: self.there + other.there,
                ..self
            },
        }
    }
}

/// Moves that variations of a first optimum may try: about a millisecond's worth.
const MOVES: usize = 1 << 12;
/// The same where the pace cannot get better.
const FEW: usize = 1 << 10;

/// A descent over single moves.
struct Descent<'a> {
    line: &'a Line,
    places: Places,
    /// The rank that has each stage.
    rank_of: Vec<usize>,
    /// Layers that each rank may hold at most.
    most: &'a [u64],
    moves_left: usize,
    /// What stages weigh, before a move.
    plain: Vec<u64>,
    /// By stage: the heaviest of those before it, before a move.
    before: Vec<Heaviest>,
    /// By stage: the heaviest from it on, before a move.
    after: Vec<Heaviest>,
    /// The same up to the source, of stages that a layer passes through.
    passed: Vec<Heaviest>,
    /// What ranks weigh.
    ranks: Vec<u64>,
}

impl<'a> Descent<'a> {
    fn new(line: &'a Line, places: Places, most: &'a [u64]) -> Self {
        let rank_of = (0..line.stages).map(|stage| places.rank_of(stage as u32) as usize);
        Self {
            line,
            places,
            rank_of: rank_of.collect(),
            most,
            moves_left: usize::MAX,
            plain: Vec::new(),
            before: Vec::new(),
            after: Vec::new(),
            passed: vec![Heaviest::default(); line.stages + 1],
            ranks: Vec::new(),
        }
    }

    /// Moves layers between stages while the balance improves.
    fn descend(&mut self, mut cuts: Vec<usize>) -> (Balance, Vec<usize>) {
        let mut balance = self.balance(&cuts);
        while let Some((better, source, target)) = self.better_move(&cuts, balance) {
            balance = better;
            shift(&mut cuts, source, target);
            debug_assert_eq!(balance, self.balance(&cuts));
        }
        (balance, cuts)
    }

    fn balance(&self, cuts: &[usize]) -> Balance {
        let held = self.held(cuts).into_iter().zip(self.most);
        Balance {
            too_many: held.map(|(held, most)| held.saturating_sub(*most)).sum(),
            ..self.line.balance(cuts, self.places)
        }
    }

    /// Layers of each rank.
    fn held(&self, cuts: &[usize]) -> Vec<u64> {
        let mut held = vec![0; self.most.len()];
        for (rank, cut) in self.rank_of.iter().zip(cuts.windows(2)) {
            held[*rank] += (cut[1] - cut[0]) as u64;
        }
        held
    }

    /// Weighs what stands before a move.
    fn weigh(&mut self, cuts: &[usize]) {
        self.plain.clear();
        self.plain.extend(self.line.stages_of(cuts));
        self.ranks.clear();
        self.ranks.resize(self.places.pp() as usize, 0);
        self.before.clear();
        let mut sum = Heaviest::default();
        for (&rank, &weight) in self.rank_of.iter().zip(&self.plain) {
            self.ranks[rank] = self.ranks[rank].saturating_add(weight);
            self.before.push(sum);
            sum = sum.and(Heaviest::one(weight));
        }
        self.after.clear();
        self.after.resize(self.plain.len() + 1, Heaviest::default());
        for (stage, &weight) in self.plain.iter().enumerate().rev() {
            self.after[stage] = self.after[stage + 1].and(Heaviest::one(weight));
        }
    }

    /// A stage comes to weigh otherwise.
    fn set(&mut self, stage: usize, before: u64, weight: u64) {
        if before != weight {
            let rank = &mut self.ranks[self.rank_of[stage]];
            *rank = rank.wrapping_add(weight).wrapping_sub(before);
        }
    }

    /// The best single move off a heaviest rank or stage or off a rank of too many layers, if any is an improvement.
    /// The balance is that of the cuts.
    ///
    /// From one target to the next only the weights of a few stages change: of the source, of both targets, and of
    /// those between where layers differ. Stages on either side weigh what they did.
    fn better_move(&mut self, cuts: &[usize], balance: Balance) -> Option<(Balance, usize, usize)> {
        let line = self.line;
        self.weigh(cuts);
        let (held, most) = (self.held(cuts), self.most);
        let mut best = None;
        let mut least = balance;
        for source in 0..line.stages {
            let giver = self.rank_of[source];
            let has_more = held[giver] > most[giver];
            let is_heaviest = self.ranks[giver] == balance.max_rank;
            let own = self.plain[source];
            if !(has_more || is_heaviest || own == balance.max_stage)
                || !line.can_give(cuts, source)
            {
                continue;
            }
            let too_many = |taker: usize| {
                if taker == giver {
                    balance.too_many
                } else {
                    let more = u64::from(held[taker] >= most[taker]);
                    balance.too_many + more - u64::from(has_more)
                }
            };
            let (from, to) = (cuts[source], cuts[source + 1]);
            let moved_on = |stage: usize| line.weight(stage, cuts[stage] + 1, cuts[stage + 1] + 1);
            let moved_back =
                |stage: usize| line.weight(stage, cuts[stage] - 1, cuts[stage + 1] - 1);
            // Targets before the source, from the first: those between take a layer behind and give one in front.
            let left = line.weight(source, from + 1, to);
            self.set(source, own, left);
            self.passed[source] = Heaviest::one(left).and(self.after[source + 1]);
            for stage in (1..source).rev() {
                let weight = moved_on(stage);
                self.set(stage, self.plain[stage], weight);
                self.passed[stage] = self.passed[stage + 1].and(Heaviest::one(weight));
            }
            for target in 0..source {
                if self.moves_left == 0 {
                    return best;
                }
                self.moves_left -= 1;
                let there = self.plain[target];
                let weight = line.weight(target, cuts[target], cuts[target + 1] + 1);
                let passing = if target == 0 { there } else { moved_on(target) };
                self.set(target, passing, weight);
                let stages = self.before[target].and(Heaviest::one(weight));
                let too_many = too_many(self.rank_of[target]);
                let stages = stages.and(self.passed[target + 1]);
                if let Some(better) = least.improved(too_many, stages, &self.ranks) {
                    least = better;
                    best = Some((better, source, target));
                }
                self.set(target, weight, there);
            }
            // Those behind it.
            let left_behind = line.weight(source, from, to - 1);
            self.set(source, left, left_behind);
            let mut stages = self.before[source].and(Heaviest::one(left_behind));
            for target in source + 1..line.stages {
                if self.moves_left == 0 {
                    return best;
                }
                self.moves_left -= 1;
                let there = self.plain[target];
                let weight = line.weight(target, cuts[target] - 1, cuts[target + 1]);
                self.set(target, there, weight);
                let too_many = too_many(self.rank_of[target]);
                let all = stages.and(Heaviest::one(weight));
                let all = all.and(self.after[target + 1]);
                if let Some(better) = least.improved(too_many, all, &self.ranks) {
                    least = better;
                    best = Some((better, source, target));
                }
                if target + 1 < line.stages {
                    let passing = moved_back(target);
                    self.set(target, weight, passing);
                    stages = stages.and(Heaviest::one(passing));
                } else {
                    self.set(target, weight, there);
                }
            }
            self.set(source, left_behind, own);
            for stage in source + 1..line.stages.saturating_sub(1) {
                self.set(stage, moved_back(stage), self.plain[stage]);
            }
        }
        best
    }
}

/// What several stages a rank are balanced by. It is proportional to the length of a step of `4 pp`
/// microbatches: the heaviest rank does its work for each of them, and the warm-up and drain last about
/// `pp` times the heaviest stage.
pub(super) fn pace(max_rank: u64, max_stage: u64) -> u128 {
    4 * u128::from(max_rank) + u128::from(max_stage)
}

/// Takes one layer from `source` and gives one to `target`; stages between keep their number.
pub(super) fn shift(cuts: &mut [usize], source: usize, target: usize) {
    if source < target {
        cuts[source + 1..=target]
            .iter_mut()
            .for_each(|cut| *cut -= 1);
    } else {
        cuts[target + 1..=source]
            .iter_mut()
            .for_each(|cut| *cut += 1);
    }
}

/// How good a cut is, the weightiest part first; less is better. The counts let a move that lowers
/// one of several heaviest ranks count as progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Balance {
    /// Layers of ranks above what each may hold.
    too_many: u64,
    pace: u128,
    pub(super) max_rank: u64,
    ranks_there: usize,
    pub(super) max_stage: u64,
    stages_there: usize,
}

impl Balance {
    fn of(too_many: u64, stages: Heaviest, ranks: &[u64]) -> Self {
        let max_rank = heaviest(ranks);
        Self {
            too_many,
            pace: pace(max_rank, stages.weight),
            max_rank,
            ranks_there: ranks.iter().filter(|&&weight| weight == max_rank).count(),
            max_stage: stages.weight,
            stages_there: stages.there,
        }
    }

    /// That of some ranks and their stages where it is better.
    fn improved(self, too_many: u64, stages: Heaviest, ranks: &[u64]) -> Option<Self> {
        let max_rank = heaviest(ranks);
        let first = (too_many, pace(max_rank, stages.weight), max_rank);
        if first > (self.too_many, self.pace, self.max_rank) {
            return None;
        }
        Some(Self::of(too_many, stages, ranks)).filter(|balance| *balance < self)
    }
}

fn heaviest(of: &[u64]) -> u64 {
    of.iter().fold(0, |most, &weight| most.max(weight))
}
