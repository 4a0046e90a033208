//! Balances the sums of several stages a rank by moving single layers.

use super::Line;
use crate::layout::Places;

impl Line {
    /// The best of the local optima reached from some cuts and, where layers differ, from cuts one
    /// move away from the first optimum, as far as the budget of moves goes.
    pub(super) fn balance_ranks(&self, cuts: Vec<usize>, places: Places) -> Vec<usize> {
        let mut search = Descent {
            line: self,
            places,
            moves_left: usize::MAX,
        };
        let (mut best, optimum) = search.descend(cuts);
        let mut best_cuts = optimum.clone();
        if self.layers_are_equal() {
            return best_cuts;
        }
        search.moves_left = MOVES;
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

    fn layers_are_equal(&self) -> bool {
        let layer = |i: usize| self.before[i + 1] - self.before[i];
        (1..self.layers()).all(|i| layer(i) == layer(0))
    }

    fn can_give(&self, cuts: &[usize], stage: usize) -> bool {
        cuts[stage + 1] - cuts[stage] > self.needs(stage)
    }

    /// Weighs cuts.
    pub(super) fn balance(&self, cuts: &[usize], places: Places) -> Balance {
        self.loads(cuts, places).balance()
    }

    fn loads(&self, cuts: &[usize], places: Places) -> Loads {
        let stages = 0..self.stages;
        let weight = |stage| self.weight(stage, cuts[stage], cuts[stage + 1]);
        let stages: Vec<u64> = stages.map(weight).collect();
        let mut ranks = vec![0_u64; places.pp() as usize];
        for (stage, &weight) in stages.iter().enumerate() {
            let rank = &mut ranks[places.rank_of(stage as u32) as usize];
            *rank = rank.saturating_add(weight);
        }
        Loads {
            stages,
            ranks,
            places,
        }
    }
}

/// What stages weigh, and the ranks that have them.
struct Loads {
    stages: Vec<u64>,
    ranks: Vec<u64>,
    places: Places,
}

impl Loads {
    fn set(&mut self, stage: usize, weight: u64) {
        let before = std::mem::replace(&mut self.stages[stage], weight);
        if before != weight {
            let rank = &mut self.ranks[self.places.rank_of(stage as u32) as usize];
            *rank = rank.wrapping_add(weight).wrapping_sub(before);
        }
    }

    fn heaviest(of: &[u64]) -> u64 {
        of.iter().fold(0, |most, &weight| most.max(weight))
    }

    fn balance(&self) -> Balance {
        let (max_rank, max_stage) = (Self::heaviest(&self.ranks), Self::heaviest(&self.stages));
        let there = |of: &[u64], most| of.iter().filter(|&&weight| weight == most).count();
        Balance {
            pace: pace(max_rank, max_stage),
            max_rank,
            ranks_there: there(&self.ranks, max_rank),
            max_stage,
            stages_there: there(&self.stages, max_stage),
        }
    }

    /// The balance where it is better than another.
    fn better_than(&self, other: Balance) -> Option<Balance> {
        let (max_rank, max_stage) = (Self::heaviest(&self.ranks), Self::heaviest(&self.stages));
        if (pace(max_rank, max_stage), max_rank) > (other.pace, other.max_rank) {
            return None;
        }
        Some(self.balance()).filter(|balance| *balance < other)
    }
}

/// Moves that variations of a first optimum may try: about a millisecond's worth.
const MOVES: usize = 1 << 12;

/// A descent over single moves.
struct Descent<'a> {
    line: &'a Line,
    places: Places,
    moves_left: usize,
}

impl Descent<'_> {
    /// Moves layers between stages while the balance improves.
    fn descend(&mut self, mut cuts: Vec<usize>) -> (Balance, Vec<usize>) {
        let mut balance = self.line.balance(&cuts, self.places);
        while let Some((better, source, target)) = self.better_move(&cuts, balance) {
            balance = better;
            shift(&mut cuts, source, target);
            debug_assert_eq!(balance, self.line.balance(&cuts, self.places));
        }
        (balance, cuts)
    }

    /// The best single move off a heaviest rank or stage, if any is an improvement. The balance is that of the cuts.
    ///
    /// From one target to the next only the weights of a few stages change: of the source, of both targets, and of
    /// those between where layers differ.
    fn better_move(&mut self, cuts: &[usize], balance: Balance) -> Option<(Balance, usize, usize)> {
        let line = self.line;
        let mut loads = line.loads(cuts, self.places);
        let plain = loads.stages.clone();
        let heavy: Vec<usize> = (0..line.stages)
            .filter(|&stage| {
                let rank = self.places.rank_of(stage as u32);
                let heaviest = loads.ranks[rank as usize] == balance.max_rank;
                (heaviest || plain[stage] == balance.max_stage) && line.can_give(cuts, stage)
            })
            .collect();
        let weight = |stage: usize, from: usize, to: usize| line.weight(stage, from, to);
        let mut best = None;
        let mut least = balance;
        for source in heavy {
            let (from, to) = (cuts[source], cuts[source + 1]);
            loads.set(source, weight(source, from + 1, to));
            for stage in 1..source {
                loads.set(stage, weight(stage, cuts[stage] + 1, cuts[stage + 1] + 1));
            }
            for target in (0..line.stages).filter(|&target| target != source) {
                if self.moves_left == 0 {
                    return best;
                }
                self.moves_left -= 1;
                let (first, last) = (cuts[target], cuts[target + 1]);
                if target < source {
                    loads.set(target, weight(target, first, last + 1));
                } else {
                    if target == source + 1 {
                        loads.set(source, weight(source, from, to - 1));
                    }
                    loads.set(target, weight(target, first - 1, last));
                }
                if let Some(better) = loads.better_than(least) {
                    least = better;
                    best = Some((better, source, target));
                }
                let passed = if target < source {
                    plain[target]
                } else {
                    weight(target, first - 1, last - 1)
                };
                loads.set(target, passed);
            }
            for (stage, &weight) in plain.iter().enumerate().skip(source) {
                loads.set(stage, weight);
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
fn shift(cuts: &mut [usize], source: usize, target: usize) {
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
    pace: u128,
    pub(super) max_rank: u64,
    ranks_there: usize,
    pub(super) max_stage: u64,
    stages_there: usize,
}
