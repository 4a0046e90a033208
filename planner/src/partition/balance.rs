//! Balances the sums of several stages a rank by moving single layers.

use super::Line;

impl Line {
    /// The best of the local optima reached from some cuts and, where layers differ, from cuts one
    /// move away from the first optimum, as far as the budget of moves goes.
    pub(super) fn balance_ranks(&self, cuts: Vec<usize>, pp: usize) -> Vec<usize> {
        let mut search = Descent {
            line: self,
            pp,
            moves_left: usize::MAX,
            moved: Vec::new(),
            ranks: Vec::new(),
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

    /// Weighs cuts; `ranks` is scratch space and holds the weight of each rank afterwards.
    pub(super) fn balance(&self, cuts: &[usize], pp: usize, ranks: &mut Vec<u64>) -> Balance {
        ranks.clear();
        ranks.resize(pp, 0);
        let (mut max_stage, mut stages_there, mut rank) = (0, 0, 0);
        for stage in 0..self.stages {
            let weight = self.weight(stage, cuts[stage], cuts[stage + 1]);
            ranks[rank] = ranks[rank].saturating_add(weight);
            rank = if rank + 1 == pp { 0 } else { rank + 1 };
            if weight > max_stage {
                (max_stage, stages_there) = (weight, 0);
            }
            stages_there += usize::from(weight == max_stage);
        }
        let max_rank = ranks.iter().copied().max().unwrap_or(0);
        Balance {
            pace: pace(max_rank, max_stage),
            max_rank,
            ranks_there: ranks.iter().filter(|&&rank| rank == max_rank).count(),
            max_stage,
            stages_there,
        }
    }
}

/// Moves that variations of a first optimum may try: about a millisecond's worth.
const MOVES: usize = 1 << 12;

/// A descent over single moves, with its scratch space.
struct Descent<'a> {
    line: &'a Line,
    pp: usize,
    moves_left: usize,
    moved: Vec<usize>,
    ranks: Vec<u64>,
}

impl Descent<'_> {
    /// Moves layers between stages while the balance improves.
    fn descend(&mut self, mut cuts: Vec<usize>) -> (Balance, Vec<usize>) {
        let mut balance = self.line.balance(&cuts, self.pp, &mut self.ranks);
        while let Some((better, source, target)) = self.better_move(&cuts, balance) {
            balance = better;
            shift(&mut cuts, source, target);
        }
        (balance, cuts)
    }

    /// The best single move off a heaviest rank or stage, if any is an improvement. The balance is
    /// that of the cuts, and the ranks still hold their weights.
    fn better_move(&mut self, cuts: &[usize], balance: Balance) -> Option<(Balance, usize, usize)> {
        let line = self.line;
        line.balance(cuts, self.pp, &mut self.ranks);
        let heavy: Vec<usize> = (0..line.stages)
            .filter(|&stage| {
                let weight = line.weight(stage, cuts[stage], cuts[stage + 1]);
                let heaviest = self.ranks[stage % self.pp] == balance.max_rank;
                (heaviest || weight == balance.max_stage) && line.can_give(cuts, stage)
            })
            .collect();
        let mut best = None;
        let mut least = balance;
        for source in heavy {
            for target in (0..line.stages).filter(|&target| target != source) {
                if self.moves_left == 0 {
                    return best;
                }
                self.moves_left -= 1;
                self.moved.clear();
                self.moved.extend_from_slice(cuts);
                shift(&mut self.moved, source, target);
                let moved = line.balance(&self.moved, self.pp, &mut self.ranks);
                if moved < least {
                    least = moved;
                    best = Some((moved, source, target));
                }
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
