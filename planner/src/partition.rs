//! Cuts a model's layers into pipeline stages.
//!
//! Stages are contiguous runs of layers, chunk by chunk, and [`Places`] says which rank has which. The embedding adds
//! to the first stage, norm, head and multi-token prediction to the last. Works on weights of any unit (nanoseconds,
//! bytes); what weighs how much is the caller's business.

mod balance;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::layout::Places;

/// What the layers weigh.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    /// Each decoder layer.
    pub layers: &'a [u64],
    /// What the first stage carries besides: the embedding.
    pub first: u64,
    /// What the last stage carries besides: norm, head, multi-token prediction.
    pub last: u64,
    /// Whether the first stage may hold no layer at all, as under Megatron-Core's
    /// `account_for_embedding_in_pipeline_split`.
    pub first_may_be_bare: bool,
    /// Whether the last stage may, as under `account_for_loss_in_pipeline_split`. No other stage may.
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

/// Cuts layers into the stages of some places; `None` where there are fewer layers than stages that need
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
pub fn partition(weights: &Weights, places: Places) -> Option<Partition> {
    let line = Line::new(weights, places.stages() as usize)?;
    let mut cuts = line.least_heaviest_stage(u64::MAX, |_, _| Some(0))?;
    if places.vpp() > 1 {
        cuts = line.balance_ranks(cuts, places);
    }
    Some(line.partition(&cuts, places))
}

/// The cut into so many stages, one a rank, whose heaviest is least, and among those the sum of squares, where a stage of
/// some layers weighs something more, or is none that may be, and then none of more layers may. `None` where all cuts that are
/// left have a stage above `cap`.
pub fn within(
    weights: &Weights,
    stages: u32,
    cap: u64,
    more: impl Fn(usize, Range<usize>) -> Option<u64>,
) -> Option<Vec<Vec<u32>>> {
    let line = Line::new(weights, stages as usize)?;
    Some(held_by(&line.least_heaviest_stage(cap, more)?))
}

/// The best cut that is reached from one by moving a layer from a stage to another, as [`partition`] does where ranks have several
/// stages, so that no rank holds more layers than `most` says of it. `None` where some still do, or there are fewer layers than
/// stages that need one.
pub fn holding(
    weights: &Weights,
    places: Places,
    stages: &[Vec<u32>],
    most: impl Fn(usize) -> u64,
) -> Option<Partition> {
    let line = Line::new(weights, stages.len())?;
    let most: Vec<u64> = (0..places.pp() as usize).map(most).collect();
    let all = most
        .iter()
        .fold(0, |all: u64, most| all.saturating_add(*most));
    if all < line.layers() as u64 {
        return None;
    }
    let cuts = line.hold_no_more(positions(stages), places, &most)?;
    Some(line.partition(&cuts, places))
}

/// A step under 1F1B or ZB-H1, of which each rank has one stage.
///
/// Under 1F1B a rank `w` before the last one runs `w` forward passes before its first backward pass waits for the stages behind
/// it, `a` for one microbatch, and as many backward passes after its last forward pass, while that one's microbatch is behind it.
/// So with microbatches `m` of `f` and `b` it takes `m (f + b) + max(0, a - w f) + max(0, a - w b)` from what a microbatch takes
/// to reach it until it has to go back. Where there are not more than `w + 1` of them, it waits once, beside `m - 1` passes.
/// Under ZB-H1 only forward passes come before it, and it waits for those behind without their gradients of weights. Its own may
/// fill what is left at the end.
/// That is no more than a step takes, and under 1F1B all of it where stages weigh the same and messages take no time.
#[derive(Debug, Clone, Copy)]
pub struct OneStageEach<'w> {
    /// What both passes weigh.
    pub both: Weights<'w>,
    /// Forward passes alone.
    pub forward: Weights<'w>,
    /// A message between two ranks, in the unit of weights.
    pub hop: u64,
    /// Whether messages travel beside compute; if not, that of the sender stands still.
    pub beside: bool,
    /// Both passes without gradients of weights, where backward passes are divided.
    pub divided: Option<Weights<'w>>,
    /// Stages, one a rank.
    pub stages: u32,
    /// Microbatches of the step.
    pub microbatches: u32,
}

impl OneStageEach<'_> {
    /// The least time over all [cuts](within), in the unit of the weights. `None` where no cut takes so little as `cap`.
    pub fn least(
        &self,
        cap: u64,
        more: impl Fn(usize, Range<usize>) -> Option<u64>,
    ) -> Option<u64> {
        let lines = self.lines()?;
        let rank = |stage, from, to| self.rank(&lines, stage, from..to, &more);
        let (least, _) = lines[0].best(cap, rank, |last, own| last.max(u128::from(own)))?;
        Some(u64::try_from(least).unwrap_or(u64::MAX))
    }

    /// All [cuts](within) that may take no more than `cap`. `None` where these are more than `most`.
    pub fn cuts(
        &self,
        cap: u64,
        more: impl Fn(usize, Range<usize>) -> Option<u64>,
        most: usize,
    ) -> Option<Vec<Vec<Vec<u32>>>> {
        let Some(lines) = self.lines() else {
            return Some(Vec::new());
        };
        lines[0].cuts(most, |stage, layers| {
            let weight = self.rank(&lines, stage, layers, &more);
            let [_, own] = weight.filter(|[floor, _]| *floor <= cap)?;
            Some(own <= cap)
        })
    }

    fn lines(&self) -> Option<[Line; 3]> {
        let line = |weights| Line::new(weights, self.stages as usize);
        let waited = self.divided.as_ref().unwrap_or(&self.both);
        Some([line(&self.both)?, line(&self.forward)?, line(waited)?])
    }

    /// Until a rank of some layers has done its work, without and with what it weighs besides; none where it may not hold them.
    fn rank(
        &self,
        [both, forward, waited]: &[Line; 3],
        stage: usize,
        layers: Range<usize>,
        more: &impl Fn(usize, Range<usize>) -> Option<u64>,
    ) -> Option<[u64; 2]> {
        let more = more(stage, layers.clone())?;
        let microbatches = u64::from(self.microbatches);
        let own = both.weight(stage, layers.start, layers.end);
        // What a microbatch takes in the stages before this one, and in those behind.
        let before = |line: &Line| {
            let first = if stage == 0 { 0 } else { line.first };
            line.before[layers.start].saturating_add(first)
        };
        let own_waited = waited.weight(stage, layers.start, layers.end);
        let behind = waited.all().saturating_sub(before(waited));
        let behind = behind.saturating_sub(own_waited);
        let warm_up = u64::from(self.stages) - 1 - stage as u64;
        // Messages that a rank sends with each microbatch, forward and backward, and those of the ranks before and behind it.
        let sends = [warm_up.min(1), (stage as u64).min(1)];
        let own_hops = if self.beside { [0; 2] } else { sends };
        let hops = |count: u64| self.hop.saturating_mul(count);
        let behind = behind.saturating_add(hops(2 * warm_up - own_hops[0]));
        let before = if self.divided.is_some() {
            before(forward).saturating_add(hops(stage as u64))
        } else {
            before(both).saturating_add(hops(2 * stage as u64 - own_hops[1]))
        };
        let own = own.saturating_add(hops(own_hops[0] + own_hops[1]));
        let forward = forward.weight(stage, layers.start, layers.end);
        let forward = forward.saturating_add(hops(own_hops[0])).min(own);
        let passes_beside = warm_up.min(microbatches - 1);
        let done = |more: u64| {
            let both = own.saturating_add(more);
            let done = both.saturating_mul(microbatches).saturating_add(before);
            let idle = |pass: u64| behind.saturating_sub(passes_beside.saturating_mul(pass));
            let idle = [forward, both - forward].map(idle);
            let idle = if self.divided.is_some() {
                idle[0]
            } else if warm_up + 1 < microbatches {
                idle[0].saturating_add(idle[1])
            } else {
                idle[0].max(idle[1])
            };
            done.saturating_add(idle)
        };
        Some([done(0), done(more)])
    }
}

/// All cuts into stages, of which none but the ends may be empty. `None` where these are more than `most`.
pub fn cuts(weights: &Weights, stages: u32, most: usize) -> Option<Vec<Vec<Vec<u32>>>> {
    let line = Line::new(weights, stages as usize);
    line.map_or(Some(Vec::new()), |line| line.cuts(most, |_, _| Some(true)))
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

/// A cut into stages of about equal weight, in one pass: each stage ends where its share of the
/// whole does. Good enough to judge a layout by; [`partition`] finds better ones. `None` where there
/// are fewer layers than stages that need one.
pub fn proportional(weights: &Weights, stages: u32) -> Option<Vec<Vec<u32>>> {
    let line = Line::new(weights, stages as usize)?;
    Some(held_by(&line.in_one_pass()))
}

/// Stages that differ from some by a layer less in one and one more in another, of which one is the first or the last or both
/// follow each other; layers between move on. The last alone may be left without any.
pub fn moves(stages: &[Vec<u32>]) -> Vec<Vec<Vec<u32>>> {
    let last = stages.len().saturating_sub(1);
    let mut all = Vec::new();
    for source in (0..=last).filter(|&stage| stages[stage].len() > usize::from(stage != last)) {
        let is_near = |&target: &usize| {
            let ends = [0, last];
            target.abs_diff(source) == 1 || ends.contains(&source) || ends.contains(&target)
        };
        for target in (0..=last)
            .filter(|target| *target != source)
            .filter(is_near)
        {
            all.push(moved(stages, source, target));
        }
    }
    all
}

/// Stages with a layer less in one and one more in another; layers between move on.
pub fn moved(stages: &[Vec<u32>], source: usize, target: usize) -> Vec<Vec<u32>> {
    let mut cuts = positions(stages);
    balance::shift(&mut cuts, source, target);
    held_by(&cuts)
}

/// Where stages begin, and where the last ends.
fn positions(stages: &[Vec<u32>]) -> Vec<usize> {
    ends_of(stages.iter().map(Vec::len))
}

/// The same of stages of some sizes.
fn ends_of(sizes: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut end = 0;
    let ends = sizes.map(|size| {
        end += size;
        end
    });
    std::iter::once(0).chain(ends).collect()
}

/// Stages of so many layers each.
pub(crate) fn stages_of(sizes: &[u32]) -> Vec<Vec<u32>> {
    held_by(&ends_of(sizes.iter().map(|&size| size as usize)))
}

/// The layers between cuts.
fn held_by(cuts: &[usize]) -> Vec<Vec<u32>> {
    let stages = cuts.windows(2);
    stages
        .map(|cut| (cut[0] as u32..cut[1] as u32).collect())
        .collect()
}

/// Layers on a line, with prefix sums of their weights. Cuts are `stages + 1` positions: stage `s`
/// holds the layers from `cuts[s]` to `cuts[s + 1]`.
struct Line {
    before: Vec<u64>,
    first: u64,
    last: u64,
    stages: usize,
    /// Layers that the first and the last stage hold at least.
    ends_need: [usize; 2],
}

impl Line {
    fn new(weights: &Weights, stages: usize) -> Option<Self> {
        let mut before = vec![0];
        for &layer in weights.layers {
            before.push(layer.saturating_add(before[before.len() - 1]));
        }
        let ends = [weights.first_may_be_bare, weights.last_may_be_bare];
        let line = Self {
            before,
            first: weights.first,
            last: weights.last,
            stages,
            ends_need: ends.map(|may_be_bare| usize::from(!may_be_bare || stages == 1)),
        };
        let needed: usize = (0..stages).map(|stage| line.needs(stage)).sum();
        (weights.layers.len() >= needed).then_some(line)
    }

    fn layers(&self) -> usize {
        self.before.len() - 1
    }

    fn all(&self) -> u64 {
        let layers = self.before[self.layers()];
        layers.saturating_add(self.first).saturating_add(self.last)
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
        let [first, last] = self.ends_need;
        match stage {
            0 => first,
            stage if stage + 1 == self.stages => last,
            _ => 1,
        }
    }

    /// All cuts into stages that may have the layers between them; where it is unsaid whether one may, nor may one that has more.
    /// `None` where these are more than `most`.
    fn cuts(
        &self,
        most: usize,
        may: impl Fn(usize, Range<usize>) -> Option<bool>,
    ) -> Option<Vec<Vec<Vec<u32>>>> {
        let layers = self.layers();
        // By stage and where it begins: where it may end.
        let mut ends = vec![vec![Vec::new(); layers + 1]; self.stages];
        for stage in (0..self.stages).rev() {
            let is_last = stage + 1 == self.stages;
            for from in 0..=layers {
                for to in from + self.needs(stage)..=layers {
                    let Some(may) = may(stage, from..to) else {
                        break;
                    };
                    let goes_on = if is_last {
                        to == layers
                    } else {
                        !ends[stage + 1][to].is_empty()
                    };
                    if goes_on && may {
                        ends[stage][from].push(to);
                    }
                }
            }
        }
        let mut found = Vec::new();
        let mut open = vec![vec![0]];
        while let Some(cut) = open.pop() {
            let stage = cut.len() - 1;
            if stage == self.stages {
                if found.len() == most {
                    return None;
                }
                found.push(held_by(&cut));
                continue;
            }
            open.extend(ends[stage][cut[stage]].iter().map(|&to| {
                let mut longer = cut.clone();
                longer.push(to);
                longer
            }));
        }
        Some(found)
    }

    /// Cuts into stages of about equal weight.
    fn in_one_pass(&self) -> Vec<usize> {
        let (layers, stages) = (self.layers(), self.stages);
        let whole = self.all();
        let mut cuts = vec![0; stages + 1];
        cuts[stages] = layers;
        for stage in 1..stages {
            let share = u128::from(whole) * stage as u128 / stages as u128;
            // Layers for the stages behind must be left, and each before needs one.
            let most = layers - (stages - 1 - stage) - self.needs(stages - 1);
            let mut cut = cuts[stage - 1] + self.needs(stage - 1);
            let middle = |at: usize| {
                let before = u128::from(self.first) + u128::from(self.before[at]);
                before + u128::from(self.before[at + 1] - self.before[at]) / 2
            };
            while cut < most && middle(cut) <= share {
                cut += 1;
            }
            cuts[stage] = cut;
        }
        cuts
    }

    /// The cuts whose heaviest stage is least, and among those the sum of squares: see [`within`].
    fn least_heaviest_stage(
        &self,
        cap: u64,
        more: impl Fn(usize, Range<usize>) -> Option<u64>,
    ) -> Option<Vec<usize>> {
        let weight = |stage, from, to| {
            let more = more(stage, from..to)?;
            let own = self.weight(stage, from, to);
            Some([own, own.saturating_add(more)])
        };
        // No heavier than any cut's.
        let cuts = self.in_one_pass();
        let stages = cuts.windows(2).enumerate();
        let known = stages.map(|(stage, cut)| Some(weight(stage, cut[0], cut[1])?[1]));
        let known: Option<Vec<u64>> = known.collect();
        let known = known.and_then(|known| known.into_iter().max());
        let known = known.map_or(cap, |known| known.min(cap));
        let heavier = |best: u128, stage| best.max(u128::from(stage));
        let (least, _) = self.best(known, weight, heavier)?;
        let squares = |sum: u128, stage: u64| {
            let sum = sum.saturating_add(u128::from(stage).pow(2));
            sum.min(u128::MAX - 1)
        };
        let cap = u64::try_from(least).unwrap_or(u64::MAX);
        Some(self.best(cap, weight, squares)?.1)
    }

    /// The least total over all cuts into stages that weigh something and none above `cap`, and cuts that reach it.
    /// `weight` of a stage is a floor that grows with its layers, and then what it weighs, which is no less; with more layers
    /// than one that weighs nothing it weighs nothing either. `add` extends a total by a stage and grows with both.
    fn best(
        &self,
        cap: u64,
        weight: impl Fn(usize, usize, usize) -> Option<[u64; 2]>,
        add: impl Fn(u128, u64) -> u128,
    ) -> Option<(u128, Vec<usize>)> {
        let layers = self.layers();
        // [stage][layers placed]: least total, and where the stage begins.
        let mut total = vec![u128::MAX; layers + 1];
        total[0] = 0;
        let mut begins = vec![vec![0; layers + 1]; self.stages];
        for (stage, begins) in begins.iter_mut().enumerate() {
            let mut next = vec![u128::MAX; layers + 1];
            for to in self.needs(stage)..=layers {
                for from in (0..=to - self.needs(stage)).rev() {
                    if total[from] == u128::MAX {
                        continue;
                    }
                    let weight = weight(stage, from, to).filter(|[floor, _]| *floor <= cap);
                    let Some([floor, weight]) = weight else {
                        break;
                    };
                    if add(0, floor) >= next[to] {
                        // With more layers it only adds more.
                        break;
                    }
                    if weight > cap {
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
        if total[layers] == u128::MAX {
            return None;
        }
        let mut cuts = vec![layers; self.stages + 1];
        for stage in (0..self.stages).rev() {
            cuts[stage] = begins[stage][cuts[stage + 1]];
        }
        Some((total[layers], cuts))
    }

    fn partition(&self, cuts: &[usize], places: Places) -> Partition {
        let balance = self.balance(cuts, places);
        Partition {
            stages: held_by(cuts),
            max_stage: balance.max_stage,
            max_rank: balance.max_rank,
        }
    }
}
