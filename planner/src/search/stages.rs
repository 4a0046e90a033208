//! Cuts of layers into stages: what no cut takes less than, and one that has room.

use std::ops::Range;

use moefold_profiles::ByClass;
use moefold_profiles::units::{Bytes, Span};

use super::candidate::{Case, StageSplit, layer_weights, message, nanoseconds, weights};
use super::floor::floor_s;
use super::recompute::Sets;
use super::room::{Most, Of, Room};
use super::shape::Kind;
use super::unit::peak;
use crate::memory::Occupancy;
use crate::partition::{self, OneStageEach, Weights};

/// What stages weigh under some recompute sets beside the least of their layers: first layers that compute more again than
/// those behind, and what has to for want of room. Nothing that a rank may not hold has a weight.
fn more<'q>(
    case: Case<'q>,
    sets: &Sets,
    most: &'q Most,
) -> impl Fn(usize, Range<usize>) -> Option<u64> + 'q {
    let first = match *sets {
        Sets::First { layers, set } => Some((layers as usize, set)),
        _ => None,
    };
    let mut before = vec![0];
    for &kind in &case.question.kind_of {
        let kind = &case.shape.kinds[kind];
        let more = nanoseconds(first.map_or(0.0, |(_, set)| kind.again_s(set)));
        before.push(more.saturating_add(before[before.len() - 1]));
    }
    move |stage, layers| {
        let to = first.map_or(layers.start, |(first, _)| {
            layers.end.min(layers.start + first)
        });
        let again = nanoseconds(most.again_s(stage, &layers)?);
        Some(again.max(before[to] - before[layers.start]))
    }
}

/// Whether no pass hides part of another, so that those of a rank take what its layers take, whatever stages they are in.
fn ranks_add_up(case: Case<'_>) -> bool {
    !case.schedule.combines() && !hides(case)
}

/// Whether passes hide exchanges of tokens.
pub(crate) fn hides(case: Case<'_>) -> bool {
    let question = case.question;
    question.stack.hides(question.overlap).expert_alltoall
}

/// Whether nothing else says how long a stage takes, and what of a step comes before it: a rank has one stage.
fn stages_add_up(case: Case<'_>) -> bool {
    case.layout.vpp() == 1 && ranks_add_up(case)
}

/// Seconds of a step in which each pipeline rank does no layer: the ends of the model that are its own, and until a microbatch has
/// passed a stage of each rank before it, all as light as the lightest layer.
fn beside_layers_s(case: Case<'_>, sets: &Sets, lightest_s: f64) -> Vec<f64> {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let set = sets.of_ends();
    let ends = [&shape.embedding, &shape.head].map(|end| end.least_s(question, set)[1]);
    let [stage, embedding] = if case.schedule.divides_backward() {
        let forward = kinds(case).map(|kind| kind.forward_s);
        let lightest_s = forward.fold(f64::INFINITY, f64::min);
        [lightest_s, shape.embedding.forward_s]
    } else {
        [lightest_s, ends[0]]
    };
    let stage = if may_be_bare(case) { 0.0 } else { stage };
    let last = layout.places().rank_of(layout.stages() - 1);
    let of_rank = |rank: u32| {
        let before = f64::from(rank) * stage + if rank > 0 { embedding } else { 0.0 };
        let own = [rank == 0, rank == last];
        let own = own.iter().zip(ends).filter(|(is_own, _)| **is_own);
        before + f64::from(layout.microbatches()) * own.map(|(_, end)| end).sum::<f64>()
    };
    (0..layout.pp()).map(of_rank).collect()
}

/// Whether stages but the last may have no layer.
fn may_be_bare(case: Case<'_>) -> bool {
    let question = case.question;
    question.options.stages.is_some() || case.layout.stages() as usize > question.kind_of.len()
}

/// Of layers in the order of the model.
fn kinds(case: Case<'_>) -> impl Iterator<Item = &Kind> {
    let each = case.question.kind_of.iter();
    each.map(move |&kind| &case.shape.kinds[kind])
}

/// Seconds of a microbatch in which a pipeline rank of so many layers computes again those that sets name at the beginning of its
/// stages: at least, for one stage may have all but a layer of each other, and the last of all none.
fn first_again_s(case: Case<'_>, sets: &Sets) -> impl Fn(u32, usize) -> f64 {
    let layout = case.layout;
    let (named, each_s) = match *sets {
        Sets::First { layers, set } => {
            let each = kinds(case).map(|kind| kind.again_s(set));
            (layers, each.fold(f64::INFINITY, f64::min))
        }
        _ => (0, 0.0),
    };
    let last = layout.places().rank_of(layout.stages() - 1);
    let others = if may_be_bare(case) {
        0
    } else {
        layout.vpp() - 1
    };
    move |rank, layers| {
        let others = others.saturating_sub(u32::from(rank == last));
        layers.min((named + others) as usize) as f64 * each_s
    }
}

/// The least seconds in which ranks, each with room for so many layers at most, can do all of them; or `within_s`, where that is less.
///
/// A rank begins when a microbatch has passed a stage of each rank before it, and where backward passes are whole, it ends as long
/// before the step does ([`crate::simulate::lower_bound`]). So in a given time it does so many whole layers at most, were all as
/// light as the lightest of some kinds; and all ranks together have to do as many as there are of these kinds. Of the layers of a
/// rank some take longer: those at the beginning of its stages that sets name, and those that have to for want of room.
fn least_of_ranks_s(case: Case<'_>, sets: &Sets, most: &Most, within_s: f64) -> f64 {
    let (question, layout) = (case.question, case.layout);
    // Stages are rounded to nanoseconds, by half of one at most in each pass.
    let passes =
        2 * u64::from(layout.vpp()) * u64::from(layout.microbatches()) + 2 * u64::from(layout.pp());
    let rounded_s = Span(passes).seconds().0;
    let microbatches = f64::from(layout.microbatches());
    // Without what passes may hide of each other.
    let seconds = |layer: u32, kind: usize| {
        let [_, both_s] = case.shape.kinds[kind].least_s(question, sets.least(layer));
        both_s
    };
    let mut layers: Vec<f64> = (0..)
        .zip(&question.kind_of)
        .map(|(layer, &kind)| seconds(layer, kind))
        .collect();
    layers.sort_by(|a, b| b.total_cmp(a));
    let Some(&lightest_s) = layers.last() else {
        return 0.0;
    };
    let (beside_s, first_s) = (
        beside_layers_s(case, sets, lightest_s),
        first_again_s(case, sets),
    );
    let mut least = 0.0_f64;
    for (count, each) in (1..).zip(&layers) {
        if layers.get(count).is_some_and(|next| next == each) {
            continue;
        }
        // Where layers compute again by themselves, all of a kind are alike before they do.
        let alike = most.as_lightest(&|kind| seconds(0, kind) >= *each);
        // When a rank has done a layer of at least some weight, two, and so on to as many as it may hold.
        let of_rank = |rank: u32| {
            let (alike, first_s) = (&alike, &first_s);
            let held = most.of_rank(rank as usize).min(count as u64) as usize;
            let beside_s = beside_s[rank as usize];
            (1..=held).map_while(move |layers| {
                let again = alike
                    .as_ref()
                    .map_or(Some(0.0), |alike| alike.again_s(rank as usize, layers));
                let again = again?.max(first_s(rank, layers));
                let done = beside_s + microbatches * (*each * layers as f64 + again);
                Some(done).filter(|done| *done < within_s + rounded_s)
            })
        };
        let mut done: Vec<f64> = (0..layout.pp()).flat_map(of_rank).collect();
        if done.len() < count {
            // Ranks have no room for them, or not the time.
            return within_s;
        }
        let (_, all, _) = done.select_nth_unstable_by(count - 1, f64::total_cmp);
        least = least.max(*all);
    }
    least - rounded_s
}

/// Seconds that no split of a layout takes less than under some recompute sets where ranks may hold so many layers at most; or
/// `within_s`, where that is less.
pub(crate) fn least_s(case: Case<'_>, sets: &Sets, most: &Most, within_s: f64) -> f64 {
    if let Sets::First { layers, set } = *sets {
        return least_of_block_s(case, (layers, set), most, within_s);
    }
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let floor = floor_s(question, layout, &shape.work_under(question, sets));
    if floor >= within_s {
        return within_s;
    }
    floor.max(least_in_stages_s(case, sets, most, within_s))
}

/// The same by what ranks and stages are, beside the work of all layers.
fn least_in_stages_s(case: Case<'_>, sets: &Sets, most: &Most, within_s: f64) -> f64 {
    let least = least_of_ranks_s(case, sets, most, within_s);
    // Given stages may be bare where cuts have layers.
    let are_cuts = stages_add_up(case) && case.question.options.stages.is_none();
    if least < within_s && are_cuts {
        least.max(least_of_cuts_s(case, sets, most, within_s))
    } else {
        least.min(within_s)
    }
}

/// The same where `layers` at the beginning of each stage take some set and the others the first; or `within_s`, where
/// that is less. A rank of more layers than take so long by themselves takes longer, and of one that has no more, no less
/// than so great a share of its layers is computed again.
fn least_of_block_s(
    case: Case<'_>,
    (layers, set): (u32, usize),
    most: &Most,
    within_s: f64,
) -> f64 {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let least = |seconds: &dyn Fn(&Kind) -> f64| {
        let each = kinds(case).map(seconds);
        each.fold(f64::INFINITY, f64::min)
    };
    let lightest_s = least(&|kind| kind.least_s(question, 0)[1]) * f64::from(layout.microbatches());
    let many = (within_s / lightest_s).max(1.0);
    let more_s = least(&|kind| kind.again_s(set)) * (f64::from(layers) / many).min(1.0);
    let floor = floor_s(question, layout, &shape.work_and(question, more_s, set));
    if floor >= within_s {
        return within_s;
    }
    let sets = Sets::First { layers, set };
    floor.max(least_in_stages_s(case, &sets, most, within_s))
}

/// Seconds that no cut into stages takes less than, whatever else a step has than its layers; or `within_s`, where that is
/// less.
fn least_of_cuts_s(case: Case<'_>, sets: &Sets, most: &Most, within_s: f64) -> f64 {
    of_cuts(case, sets, within_s, |step, cap, rounded| {
        let least = step.least(cap, more(case, sets, most));
        least.map_or(within_s, |least| {
            let least_s = Span(least.saturating_sub(rounded)).seconds().0;
            least_s.min(within_s)
        })
    })
}

/// All cuts into stages that may take less than `below_s` under some recompute sets where ranks may hold so many layers at most, and
/// where ranks have several, all that there are. None where these are more than `limit`.
pub(crate) fn open_cuts(
    case: Case<'_>,
    sets: &Sets,
    most: &Most,
    (below_s, limit): (f64, usize),
) -> Option<Vec<Vec<Vec<u32>>>> {
    if least_s(case, sets, most, below_s) >= below_s {
        return Some(Vec::new());
    }
    of_cuts(case, sets, below_s, |step, cap, _| {
        if stages_add_up(case) {
            step.cuts(cap, more(case, sets, most), limit)
        } else {
            partition::cuts(&step.both, step.stages, limit)
        }
    })
}

/// Does something with the layers of a case as they are cut, with how much stages may weigh that take so long, and with how much
/// of that is rounded.
fn of_cuts<T>(
    case: Case<'_>,
    sets: &Sets,
    within_s: f64,
    with: impl FnOnce(OneStageEach<'_>, u64, u64) -> T,
) -> T {
    let Case {
        question,
        layout,
        shape,
        ..
    } = case;
    let layers = layer_weights(case, sets);
    let both = weights(case, &layers, sets);
    let ends = [&shape.embedding, &shape.head];
    let of = |part: &dyn Fn(&Kind, u64) -> u64| {
        let layers = kinds(case).zip(&layers);
        let layers = layers.map(|(kind, &both)| part(kind, both));
        let [first, last] = [(ends[0], both.first), (ends[1], both.last)];
        let of_ends = [first, last].map(|(end, both)| part(end, both));
        (layers.collect::<Vec<_>>(), of_ends)
    };
    let forward = of(&|kind, _| nanoseconds(kind.forward_s));
    let waited = of(&|kind, both| both.saturating_sub(nanoseconds(kind.weight_s)));
    let parts = [&forward, &waited].map(|(layers, [first, last])| Weights {
        layers,
        first: *first,
        last: *last,
        ..both
    });
    let message = message(case).map_or(0.0, |(_, cost)| cost.time.0);
    let step = OneStageEach {
        both,
        forward: parts[0],
        hop: nanoseconds(message),
        beside: question.stack.sends_beside(question.overlap, layout.vpp()),
        divided: case.schedule.divides_backward().then_some(parts[1]),
        stages: layout.stages(),
        microbatches: layout.microbatches(),
    };
    // Layers and ends are rounded to nanoseconds each, stages as a whole: by one at most in each pass through them.
    let passes = 3 + u64::from(step.microbatches) + 2 * u64::from(step.stages);
    let rounded = (2 * layers.len() as u64 + 2).saturating_mul(passes);
    let cap = nanoseconds(within_s).saturating_add(rounded);
    with(step, cap, rounded)
}

/// Tries of a split with room: a rank that has none for its layers has fewer in the next.
const TRIES: usize = 8;

/// Bounds are told up to so many times the limit, so that they still help under a larger one.
pub(crate) const BEYOND: f64 = 1.25;

/// A split whose ranks have room under some recompute sets: the one whose heaviest stage is least of the cuts that a floor of
/// memory allows, or where ranks have several stages the best that moves of layers make of a split, of which it may be known what it
/// takes; with fewer layers on each rank that turns out to be too full, until none is. Where none is found in a few tries, or
/// would take `below_s` or longer, the error is how many seconds any takes at least, where there is less room, too.
pub(crate) fn split_with_room(
    case: Case<'_>,
    sets: &Sets,
    (split, known): (&StageSplit, Option<Vec<ByClass<Bytes>>>),
    (room, occupancies): (&Room<'_>, &[Vec<Occupancy>]),
    below_s: f64,
) -> Result<StageSplit, f64> {
    let most = room.most(Of::Choice(sets));
    let any_s = least_s(case, sets, &most, BEYOND * below_s);
    if any_s >= below_s {
        return Err(any_s);
    }
    let found = split_within(case, sets, (split, known), (most, occupancies), below_s);
    found.ok_or(any_s)
}

/// The same where ranks may hold so many layers at most.
fn split_within(
    case: Case<'_>,
    sets: &Sets,
    (split, known): (&StageSplit, Option<Vec<ByClass<Bytes>>>),
    (mut most, occupancies): (Most, &[Vec<Occupancy>]),
    below_s: f64,
) -> Option<StageSplit> {
    let Case {
        question, layout, ..
    } = case;
    let capacity = question.capacity();
    let several = layout.vpp() > 1;
    let fits_as = |stages: &[Vec<u32>], taken: &[ByClass<Bytes>]| {
        let split = eased(case, sets, occupancies, (stages, taken))?;
        (split.bound(case, sets).seconds().0 < below_s).then_some(split)
    };
    let mut stages = split.stages.clone();
    if several {
        let taken = known.unwrap_or_else(|| split.memory(case, sets, occupancies));
        if let Some(split) = fits_as(&stages, &taken) {
            return Some(split);
        }
        most.lower_full(layout, &stages, &taken, capacity)?;
    }
    let layers = layer_weights(case, sets);
    let weights = weights(case, &layers, sets);
    let cap = nanoseconds(below_s) / u64::from(layout.microbatches());
    let cap = cap.saturating_add(layers.len() as u64);
    for _ in 0..TRIES {
        stages = if several {
            if least_s(case, sets, &most, below_s) >= below_s {
                return None;
            }
            let most = |rank| most.of_rank(rank);
            let held = partition::holding(&weights, layout.places(), &stages, most)?;
            if ranks_add_up(case) && held.max_rank > cap {
                return None;
            }
            held.stages
        } else {
            let more = more(case, sets, &most);
            partition::within(&weights, layout.stages(), cap, more)?
        };
        let split = StageSplit::new(case, stages.clone());
        if split.bound(case, sets).seconds().0 >= below_s {
            return None;
        }
        let memory = split.memory(case, sets, occupancies);
        if peak(&memory) <= capacity {
            return Some(split);
        }
        if several && let Some(split) = fits_as(&stages, &memory) {
            return Some(split);
        }
        most.lower_full(layout, &stages, &memory, capacity)?;
    }
    None
}

/// Stages that have room with as many layers on each rank: those of a rank that is too full go from its first stages, whose
/// activations more microbatches hold at once, to its last. `taken` is what ranks take before. None where that does not help.
fn eased(
    case: Case<'_>,
    sets: &Sets,
    occupancies: &[Vec<Occupancy>],
    (stages, taken): (&[Vec<u32>], &[ByClass<Bytes>]),
) -> Option<StageSplit> {
    let capacity = case.question.capacity();
    let mut stages = stages.to_vec();
    let mut taken = taken.to_vec();
    loop {
        let full = taken.iter().position(|rank| rank.total() > capacity)?;
        let own = case.layout.places().of_rank(full as u32);
        let own: Vec<usize> = own.map(|stage| stage as usize).collect();
        let (last, earlier) = own.split_last()?;
        let first = earlier.iter().find(|&&stage| stages[stage].len() > 1)?;
        stages = partition::moved(&stages, *first, *last);
        let split = StageSplit::new(case, stages.clone());
        let now = split.memory(case, sets, occupancies);
        if peak(&now) <= capacity {
            return Some(split);
        }
        // No layer that follows saves more.
        let [was, is] = [&taken, &now].map(|ranks| ranks[full].total());
        let saved = was.0.saturating_sub(is.0);
        let left: usize = earlier
            .iter()
            .map(|&stage| stages[stage].len().saturating_sub(1))
            .sum();
        let over = is.0.saturating_sub(capacity.0);
        if saved == 0 || over > saved.saturating_mul(left as u64) {
            return None;
        }
        taken = now;
    }
}

#[cfg(test)]
mod tests {
    use moefold_profiles::Cluster;
    use moefold_profiles::presets::{Machine, cluster, local_on};
    use moefold_profiles::pricing::Costs;
    use moefold_profiles::statistics::median;
    use moefold_profiles::units::{Bytes, GIB};

    use super::*;
    use crate::choice::{Overlap, StackName};
    use crate::layout::{Batch, Layout};
    use crate::model::{Model, presets};
    use crate::options::SearchOptions;
    use crate::rules::{Rules, Variants};
    use crate::schedule::Schedule;
    use crate::search::Asked;
    use crate::search::judged::candidates;
    use crate::search::questions::question;
    use crate::search::shape::Shape;
    use crate::search::tests::cuts;
    use crate::search::watch::unwatched;
    use crate::simulate::Simulator;
    use crate::stack::megatron::Declared;

    const LAYERS: u32 = 6;

    /// By how much bounds were below the best split of some layouts, of one stage a rank and of several.
    fn check(
        model: &Model,
        cluster: &Cluster,
        options: &SearchOptions,
        every: usize,
    ) -> [Vec<f64>; 2] {
        let costs = &Costs::for_cluster(cluster, &[]);
        let rules = &Rules::of(model, options);
        let asked = Asked::new(model, cluster, 16, options, costs, &Declared);
        let question = &question(&asked, rules).expect("legal");
        let layouts = candidates(
            std::slice::from_ref(question),
            (16, Variants::Few),
            rules,
            &unwatched,
        );
        let layouts = layouts.expect("unwatched").layouts;
        let mut off = [Vec::new(), Vec::new()];
        let is_cut = |layout: &&Layout| layout.pp() > 1 && layout.stages() <= LAYERS;
        for layout in layouts.iter().filter(is_cut).step_by(every) {
            let shapes = Shape::under(question, layout, &question.sets);
            for schedule in question.schedules(layout.pp(), layout.vpp()) {
                let simulator = Simulator::new(&Schedule::of(layout, schedule));
                let case = Case {
                    question,
                    layout,
                    shape: &shapes[0],
                    schedule,
                };
                let cuts = cuts(LAYERS, layout.stages(), [1, 0]).into_iter();
                let splits: Vec<StageSplit> = cuts.map(|cut| StageSplit::new(case, cut)).collect();
                let set = question.sets.len() - 1;
                let first = (1..3).map(|layers| Sets::First { layers, set });
                for sets in question.choices.iter().step_by(9).cloned().chain(first) {
                    let each = splits.iter().map(|split| {
                        let times = split.times(case, &sets);
                        simulator.run(&times).total.seconds().0
                    });
                    let best_s = each.fold(f64::INFINITY, f64::min);
                    let (endless, within_s) = (&Most::default(), 1e6);
                    let bound_s = least_s(case, &sets, endless, within_s);
                    assert!(
                        bound_s <= best_s,
                        "{layout:?} {schedule:?} {sets:?}: {bound_s} {best_s}"
                    );
                    off[usize::from(layout.vpp() > 1)].push(best_s / bound_s - 1.0);
                }
            }
        }
        off
    }

    /// No split of a layout takes less than what no split is to take, whatever recomputes and in whatever order passes run; and
    /// bounds are near where they are made to be.
    #[test]
    fn law_no_split_takes_less_than_its_bound() {
        let batch = |seq_len, global_batch| Batch {
            seq_len,
            global_batch,
        };
        let mut model = presets::load("deepseek-v3").expect("a preset");
        model.layers.drain(LAYERS as usize + 1..);
        model.layers.drain(..1);
        let h100 = cluster("dgx-h100").expect("a preset");
        let options = SearchOptions::new(batch(4096, 64), StackName::Megatron);
        let [one, several] = check(&model, &h100, &options, 9);
        for (off, most) in [(one, 0.06), (several, 0.26)] {
            let count = off.len();
            let usual = median(off).expect("some");
            assert!(count > 100 && usual < most, "{count}: {usual}");
        }
        // Where passes run as one and nothing is hidden, each rank is further ahead than under 1F1B.
        let mut model = presets::load("quickstart").expect("a preset");
        let layers = model.layers.iter().cycle();
        model.layers = layers.take(LAYERS as usize).cloned().collect();
        let machine = Machine {
            cores: 16,
            memory: Bytes(64 * GIB),
            flops_per_cycle: 32,
        };
        let overlaps = ["none", "expert-alltoall"];
        for overlap in overlaps.map(str::parse::<Overlap>) {
            let options = SearchOptions {
                overlap: Some(overlap.expect("words")),
                precision: moefold_profiles::Precision::Fp32,
                ..SearchOptions::new(batch(128, 64), StackName::Moefold)
            };
            let [one, several] = check(&model, &local_on(machine, 16), &options, 17);
            assert!(one.len() > 20 && several.len() > 20, "{one:?} {several:?}");
        }
    }
}
