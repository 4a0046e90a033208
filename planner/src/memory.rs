//! Memory of a pipeline rank at its worst instant, by exact replay of the schedule.
//!
//! Static state is parameters times bytes. Activations are what is live when the schedule is played
//! forward: each `Forward` of a stage adds what its layers keep, each `Backward` takes it away
//! (Megatron-LM's static schedules allocate in that order); where it is divided, `BackwardInput` leaves what
//! gradients of weights need until their `BackwardWeight`. What the running pass works in comes on
//! top: exactly, where a stack says in what order it takes and gives ([`Passes`](crate::runtime::Passes)), else the largest
//! working set of its layers ([`WorkingSets`](crate::runtime::WorkingSets)). Fragmentation of an allocator is not modelled.

use std::collections::BTreeSet;
use std::ops::Add as _;

use moefold_profiles::units::Bytes;
use moefold_profiles::{ByClass, TensorClass};

use crate::layout::Places;
use crate::runtime::{Height as _, Level, Running, StageMemory};
use crate::schedule::{Action, Schedule, Stage};
use crate::tensors::{Dealt, Owned};

/// An instant of a rank's schedule that no other instant dominates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occupancy {
    /// Microbatches of each chunk of the rank between forward and backward pass, the running one included; of two that
    /// run as one not the one that runs forward.
    pub live: Vec<u32>,
    /// Microbatches of each chunk of the rank whose gradients of weights are left, the running one included.
    pub kept: Vec<u32>,
    /// The chunk that runs, of two the one forward.
    pub chunk: usize,
    /// What of it.
    pub running: Running,
    /// Messages that are there beside those of the running pass: the last that the rank has sent in each direction to
    /// each of its neighbours, and what it has received, or its other stage has given, for a later pass.
    pub messages: u32,
}

impl Occupancy {
    fn dominates(&self, other: &Self) -> bool {
        let all = |own: &[u32], others: &[u32]| own.iter().zip(others).all(|(a, b)| a >= b);
        self.chunk == other.chunk
            && self.running == other.running
            && self.messages >= other.messages
            && all(&self.live, &other.live)
            && all(&self.kept, &other.kept)
    }
}

/// The undominated instants of every pipeline rank.
pub fn occupancies(schedule: &Schedule) -> Vec<Vec<Occupancy>> {
    let places = schedule.places();
    let ranks = schedule.ranks.iter();
    ranks
        .map(|actions| rank_occupancies(actions, places))
        .collect()
}

fn rank_occupancies(actions: &[Action], places: Places) -> Vec<Occupancy> {
    let chunk_of = |stage: Stage| places.chunk_of(stage.0) as usize;
    let mut live = vec![0_u32; places.vpp() as usize];
    let mut kept = live.clone();
    // By direction, forward and back, the ranks that something was sent to; and what is there for later passes.
    let mut sent: BTreeSet<(bool, u32)> = BTreeSet::new();
    let mut worst: Vec<Occupancy> = Vec::new();
    let mut early = 0_usize;
    let has_next = |stage: Stage| stage.0 + 1 < places.stages();
    // What a pass gives another stage of the rank.
    let stays_forward = |s: Stage| usize::from(has_next(s) && !places.is_sent(s.0));
    let stays_back = |s: Stage| usize::from(s.0 > 0 && !places.is_received(s.0));
    let mut see = |[live, kept]: [&[u32]; 2], chunk: usize, running: Running, messages: usize| {
        let occupancy = Occupancy {
            live: live.to_vec(),
            kept: kept.to_vec(),
            chunk,
            running,
            messages: messages as u32,
        };
        if !worst.iter().any(|known| known.dominates(&occupancy)) {
            worst.retain(|known| !occupancy.dominates(known));
            worst.push(occupancy);
        }
    };
    for action in actions {
        match *action {
            Action::RecvActivation(..) | Action::RecvGradient(..) => early += 1,
            Action::Forward(stage, _) => {
                let chunk = chunk_of(stage);
                live[chunk] += 1;
                early -= usize::from(stage.0 > 0);
                see([&live, &kept], chunk, Running::Forward, sent.len() + early);
                early += stays_forward(stage);
            }
            Action::Backward(stage, _) | Action::BackwardInput(stage, _) => {
                let chunk = chunk_of(stage);
                early -= usize::from(has_next(stage));
                see([&live, &kept], chunk, Running::Backward, sent.len() + early);
                early += stays_back(stage);
                live[chunk] -= 1;
                kept[chunk] += u32::from(matches!(action, Action::BackwardInput(..)));
            }
            Action::Combined { forward, backward } => {
                early -= usize::from(forward.0.0 > 0);
                early -= usize::from(has_next(backward.0));
                let passed_on = stays_forward(forward.0) + stays_back(backward.0);
                let [chunk, backward] = [forward.0, backward.0].map(chunk_of);
                let running = Running::Combined { backward };
                see([&live, &kept], chunk, running, sent.len() + early);
                early += passed_on;
                live[chunk] += 1;
                live[backward] -= 1;
            }
            Action::BackwardWeight(stage, _) => {
                let chunk = chunk_of(stage);
                see([&live, &kept], chunk, Running::Weight, sent.len() + early);
                kept[chunk] -= 1;
            }
            Action::SendActivation(stage, _) => {
                sent.insert((false, places.rank_of(stage.0 + 1)));
            }
            Action::SendGradient(stage, _) => {
                sent.insert((true, places.rank_of(stage.0 - 1)));
            }
            _ => {}
        }
    }
    assert!(
        live.iter().chain(&kept).all(|&n| n == 0),
        "a schedule runs every backward"
    );
    worst
}

/// Bytes a parameter takes on a rank, by what divides them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StateBytes {
    /// The model weight, on every replica.
    pub weight: f64,
    /// The same of what no recipe quantizes ([`Shard::wide`](crate::shard::Shard::wide)).
    pub unquantized: f64,
    /// The main gradient, on every replica.
    pub gradient: f64,
    /// Master weight and moments, divided over the replicas (ZeRO-1); where these divide whole tensors, of a matrix.
    pub sharded: f64,
    /// What Adam keeps of a parameter beyond that.
    pub adams: f64,
}

impl StateBytes {
    /// Model weights of so many parameters, of which so many are not quantized.
    pub fn weights(&self, parameters: u64, wide: u64) -> Bytes {
        let quantized = parameters.saturating_sub(wide);
        each(quantized, self.weight) + each(wide, self.unquantized)
    }

    /// Main gradients of so many parameters.
    pub fn gradients(&self, parameters: u64) -> Bytes {
        each(parameters, self.gradient)
    }

    /// Masters and moments of what a replica owns.
    pub fn owned(&self, owned: &Owned) -> Bytes {
        each(owned.elements(), self.sharded) + each(owned.adams(), self.adams)
    }

    /// What the update of whole tensors has beside them, over so many replicas of dense ones and of experts: f32 gradients
    /// of what the fullest owns, where main gradients are narrower; and where weights are `gathered` behind it, those of a family
    /// and what the rank sends of them, in bf16 (`_allgather_helper` in `megatron/core/optimizer/layer_wise_optimizer.py` of
    /// 0.16.1). What matrices work in, one after the other, is less and left out.
    pub fn beside_tensors(&self, dealt: &[Dealt; 2], replicas: [u64; 2], gathered: bool) -> Bytes {
        let own: u64 = dealt.iter().map(|dealt| dealt.fullest.elements()).sum();
        let widened = if self.gradient < 4.0 {
            Bytes(4 * own)
        } else {
            Bytes::ZERO
        };
        let families = dealt.iter().zip(replicas);
        let several = families.filter(|(_, replicas)| gathered && *replicas > 1);
        let buffers =
            several.map(|(dealt, _)| Bytes(2 * (dealt.elements + dealt.fullest.elements())));
        widened + buffers.max().unwrap_or(Bytes::ZERO)
    }
}

/// So many times so many bytes, whole.
fn each(count: u64, bytes: f64) -> Bytes {
    Bytes((count as f64 * bytes).ceil() as u64)
}

/// Static memory of a rank that holds so many elements of dense parameters and of experts, `wide` of them not
/// quantized, their state over so many replicas each.
pub fn state(
    [dense, experts]: [u64; 2],
    wide: u64,
    bytes: StateBytes,
    [dense_shards, expert_shards]: [u64; 2],
) -> ByClass<Bytes> {
    let mut rank = ByClass::default();
    rank[TensorClass::Weights] = bytes.weights(dense + experts, wide);
    rank[TensorClass::Gradients] = bytes.gradients(dense + experts);
    rank[TensorClass::Optimizer] = each(dense.div_ceil(dense_shards), bytes.sharded)
        + each(experts.div_ceil(expert_shards), bytes.sharded);
    rank
}

/// Replicas over which a rank's dense parameters, and its experts, are divided.
#[derive(Debug, Clone, Copy)]
pub struct Shards {
    /// Of weights and gradients, where these rest divided.
    pub weights: [u64; 2],
    /// Of masters and moments.
    pub states: [u64; 2],
}

/// Memory of a rank whose weights and gradients are divided too (ZeRO-3): its shards, and beside them the buffers in which
/// units are `whole`.
pub fn fully_sharded(
    held: [u64; 2],
    wide: u64,
    bytes: StateBytes,
    shards: Shards,
    whole: Bytes,
) -> ByClass<Bytes> {
    let mut rank = gradients_sharded(held, wide, bytes, shards, whole);
    // What is not quantized is dense.
    rank[TensorClass::Weights] = bytes.weights(
        parts(held, shards.weights),
        wide.div_ceil(shards.weights[0]),
    );
    rank
}

/// Memory of a rank whose gradients are divided too (ZeRO-2): its shards, and beside them what is `whole` until it is
/// reduced.
pub fn gradients_sharded(
    held: [u64; 2],
    wide: u64,
    bytes: StateBytes,
    shards: Shards,
    whole: Bytes,
) -> ByClass<Bytes> {
    let mut rank = state(held, wide, bytes, shards.states);
    rank[TensorClass::Gradients] = bytes.gradients(parts(held, shards.weights));
    rank[TensorClass::Transient] = whole;
    rank
}

/// A rank's parts of parameters of both families that are cut into so many shards each.
fn parts(held: [u64; 2], shards: [u64; 2]) -> u64 {
    let both = held.iter().zip(shards);
    both.map(|(held, shards)| held.div_ceil(shards)).sum()
}

/// Elements of gradients that Megatron-FSDP lets wait for their reduction or be in it before it waits for one
/// (`suggested_RS_queue_capacity` in `megatron_fsdp.py`, where nobody says `--suggested-communication-unit-size`). How
/// full the queue gets is a matter of the network; it is taken to be full.
pub const REDUCED_AT_ONCE: u64 = 1_000_000_000;

/// What is whole at once of units with so many bytes of weights and of gradients: weights of the two largest, the one that
/// runs and the one that is gathered ahead, and so many `copies` of the gradients of the largest. Megatron-FSDP
/// (`optim_grads_params`) has one, PyTorch's FSDP2 another that it reduces from
/// (`torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`, `foreach_reduce`).
pub fn largest_units(units: impl Iterator<Item = [Bytes; 2]>, copies: u64) -> Bytes {
    let (mut weights, mut gradients) = ([Bytes::ZERO; 2], Bytes::ZERO);
    for [weight, gradient] in units {
        if weight > weights[0] {
            weights = [weight, weights[0]];
        } else {
            weights[1] = weights[1].max(weight);
        }
        gradients = gradients.max(gradient);
    }
    weights[0] + weights[1] + gradients * copies
}

/// Adds the worst instant of a step to what a rank holds throughout: of its passes, or after the last of
/// them. `message` is what a message that was sent holds until the next one of its direction, `streamed` what is
/// there at once of states that pass through the device in their update. `running` says what is alive at most while
/// passes run, above what they and others have kept so far.
pub fn at_worst_instant(
    rank: ByClass<Bytes>,
    stages: &[StageMemory],
    occupancies: &[Occupancy],
    message: Level,
    streamed: Level,
    running: impl Fn(&Occupancy) -> Level,
) -> ByClass<Bytes> {
    let update = stages.iter().map(|stage| stage.update);
    let update = update.fold(streamed, Level::higher);
    let worst = occupancies.iter().fold(update, |worst, occupancy| {
        let counts = occupancy.live.iter().zip(&occupancy.kept);
        let sent = message * i64::from(occupancy.messages);
        let alive = stages.iter().zip(counts);
        let alive = alive.fold(sent, |sum, (stage, (&live, &kept))| {
            sum + stage.passes.saved * i64::from(live) + stage.passes.kept * i64::from(kept)
        });
        worst.higher(alive + running(occupancy))
    });
    let beside = stages.iter().map(|stage| stage.beside);
    rank + beside.fold(worst, Level::add).bytes()
}

/// The most bytes that a rank has in memory of its host: what its microbatches have left there.
pub fn on_host(stages: &[StageMemory], occupancies: &[Occupancy]) -> Bytes {
    let at = |occupancy: &Occupancy| -> i64 {
        let live = stages.iter().zip(&occupancy.live);
        live.map(|(stage, &live)| stage.passes.away.host.total() * i64::from(live))
            .sum()
    };
    let most = occupancies.iter().map(at).max().unwrap_or(0);
    Bytes(u64::try_from(most).expect("bytes are there or not"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::ScheduleName;
    use crate::runtime::Passes;

    fn schedule(pp: u32, vpp: u32, microbatches: u32) -> Schedule {
        Schedule::new(ScheduleName::of(pp, vpp), pp, vpp, microbatches)
    }

    fn most_live(occupancies: &[Occupancy]) -> u32 {
        occupancies
            .iter()
            .map(|occupancy| occupancy.live.iter().sum())
            .max()
            .unwrap_or(0)
    }

    #[test]
    fn golden_chunks_in_flight_of_interleaved_schedules() {
        // Megatron-Core's warm-up counts: 2 (pp - r - 1) + (vpp - 1) pp, and the one that runs.
        for (pp, vpp, expected) in [
            (4, 4, vec![19, 17, 15, 13]),
            (2, 8, vec![17, 15]),
            (8, 4, vec![39, 37, 35, 33, 31, 29, 27, 25]),
        ] {
            let occupancies = occupancies(&schedule(pp, vpp, 8 * pp));
            let live: Vec<u32> = occupancies.iter().map(|rank| most_live(rank)).collect();
            assert_eq!(live, expected, "pp {pp} vpp {vpp}");
        }
    }

    #[test]
    fn differential_the_worst_moment_is_the_schedules_own_peak() {
        for (pp, vpp, microbatches) in [(1, 1, 3), (4, 1, 6), (4, 1, 2), (2, 3, 8), (4, 2, 12)] {
            let schedule = schedule(pp, vpp, microbatches);
            let kept = |stage: Stage| Bytes(1000 + 37 * u64::from(stage.0 * stage.0));
            for (rank, occupancies) in (0..).zip(occupancies(&schedule)) {
                let stages: Vec<StageMemory> = (0..vpp)
                    .map(|chunk| StageMemory {
                        passes: Passes::keeping(kept(Stage(chunk * pp + rank))),
                        ..StageMemory::default()
                    })
                    .collect();
                let worst = at_worst_instant(
                    ByClass::default(),
                    &stages,
                    &occupancies,
                    Level::default(),
                    Level::default(),
                    |at| stages[at.chunk].running(at.running),
                );
                let peak = schedule.peak_live(rank, kept).bytes;
                assert_eq!(
                    worst[TensorClass::Activations],
                    peak,
                    "pp {pp} vpp {vpp} rank {rank}"
                );
            }
        }
    }

    /// Four parameters of MXFP8 weights, one of them wide, by hand: 3 x 2.0625 + 2 bytes. Of units the two largest are
    /// whole, and gradients of the largest.
    #[test]
    fn golden_what_is_not_quantized_is_wide_in_shards_and_in_buffers() {
        let bytes = StateBytes {
            weight: 2.0625,
            unquantized: 2.0,
            gradient: 4.0,
            sharded: 12.0,
            adams: 0.0,
        };
        let units = [(1600, 0), (800, 800), (320, 16)];
        let sizes = units.map(|(all, wide)| [bytes.weights(all, wide), Bytes(4 * all)]);
        assert_eq!(sizes.map(|[weights, _]| weights.0), [3300, 1600, 659]);
        let whole = largest_units(sizes.into_iter(), 1);
        assert_eq!(whole.0, 3300 + 1600 + 6400);
        let twice = largest_units(sizes.into_iter(), 2);
        assert_eq!(twice.0, 3300 + 1600 + 2 * 6400);
        let shards = Shards {
            weights: [8, 4],
            states: [16, 8],
        };
        let rank = fully_sharded([1120, 1600], 816, bytes, shards, whole);
        assert_eq!(rank[TensorClass::Transient], whole);
        // 140 dense and 400 of experts, 102 of them wide.
        assert_eq!(rank[TensorClass::Weights].0, 904 + 204);
        assert_eq!(rank[TensorClass::Gradients].0, 4 * 540);
        assert_eq!(rank[TensorClass::Optimizer].0, 12 * 270);
        let state = state([1120, 1600], 816, bytes, [8, 4]);
        assert_eq!(state[TensorClass::Weights].0, 3927 + 1632);
    }

    /// What a divided schedule keeps, replayed action by action: bytes between its passes, and in them.
    #[test]
    fn differential_divided_passes_peak_where_a_plain_replay_does() {
        let [saved, forward, backward, kept, weight] = [1000, 1100, 50, 700, 30];
        let level = |bytes| Level::of(TensorClass::Activations, Bytes(bytes));
        let passes = Passes {
            saved: level(saved),
            forward: level(forward),
            backward: level(backward),
            kept: level(kept),
            weight: level(weight),
            ..Passes::default()
        };
        let stage = StageMemory {
            passes,
            ..StageMemory::default()
        };
        for (pp, microbatches) in (2..6).flat_map(|pp| (1..9).map(move |m| (pp, m))) {
            let schedule = Schedule::new(ScheduleName::ZbH1, pp, 1, microbatches);
            for (rank, own) in occupancies(&schedule).iter().enumerate() {
                let (mut alive, mut peak) = (0, 0);
                for action in &schedule.ranks[rank] {
                    let [more, left] = match action {
                        Action::Forward(..) => [forward, alive + saved],
                        Action::BackwardInput(..) => [backward, alive - saved + kept],
                        Action::BackwardWeight(..) => [weight, alive - kept],
                        _ => continue,
                    };
                    peak = peak.max(alive + more);
                    alive = left;
                }
                let none = Level::default();
                let of_one = |at: &Occupancy| stage.running(at.running);
                let worst = at_worst_instant(ByClass::default(), &[stage], own, none, none, of_one);
                assert_eq!(worst.total(), Bytes(peak), "{pp} {microbatches} {rank}");
            }
        }
    }

    /// The search looks at four groups of microbatches instead of all.
    #[test]
    fn law_moments_do_not_depend_on_microbatches_past_four_groups() {
        for (pp, vpp) in [(2, 1), (4, 1), (2, 2), (4, 3)] {
            for name in ScheduleName::all_of(pp, vpp) {
                let of = |groups| Schedule::new(name, pp, vpp, groups * pp);
                let few = occupancies(&of(4));
                let many = occupancies(&of(11));
                for (few, many) in few.iter().zip(&many) {
                    assert_eq!(few.len(), many.len());
                    assert!(
                        many.iter().all(|occupancy| few.contains(occupancy)),
                        "{pp} {vpp} {name:?}"
                    );
                }
            }
        }
    }
}
