//! Memory of a pipeline rank at its worst instant, by exact replay of the schedule.
//!
//! Static state is parameters times bytes. Activations are what is live when the schedule is played
//! forward: each `Forward` of a stage adds what its layers keep, each `Backward` takes it away, and
//! the working set of the pass that is running comes on top (Megatron-LM's static schedules allocate
//! in that order). Fragmentation of an allocator is not modelled.

use moefold_profiles::units::Bytes;

use crate::plan::MemoryRecord;
use crate::schedule::{Action, Schedule, Stage};
use crate::shard::Shard;
use crate::stack::StateBytes;

/// An instant of a rank's schedule that no other instant dominates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// Live microbatches of each chunk of the rank, the running one included.
    pub live: Vec<u32>,
    /// The chunk that runs.
    pub chunk: usize,
    /// Whether its backward runs.
    pub backward: bool,
}

impl Moment {
    fn dominates(&self, other: &Self) -> bool {
        self.chunk == other.chunk
            && self.backward == other.backward
            && self.live.iter().zip(&other.live).all(|(a, b)| a >= b)
    }
}

/// The undominated instants of every pipeline rank.
pub fn moments(schedule: &Schedule, pp: u32, vpp: u32) -> Vec<Vec<Moment>> {
    schedule
        .ranks
        .iter()
        .map(|actions| rank_moments(actions, pp, vpp))
        .collect()
}

fn rank_moments(actions: &[Action], pp: u32, vpp: u32) -> Vec<Moment> {
    let chunk_of = |stage: Stage| (stage.0 / pp) as usize;
    let mut live = vec![0_u32; vpp as usize];
    let mut worst: Vec<Moment> = Vec::new();
    let mut see = |moment: Moment| {
        if !worst.iter().any(|known| known.dominates(&moment)) {
            worst.retain(|known| !moment.dominates(known));
            worst.push(moment);
        }
    };
    for action in actions {
        match *action {
            Action::Forward(stage, _) => {
                let chunk = chunk_of(stage);
                live[chunk] += 1;
                see(Moment {
                    live: live.clone(),
                    chunk,
                    backward: false,
                });
            }
            Action::Backward(stage, _) => {
                let chunk = chunk_of(stage);
                see(Moment {
                    live: live.clone(),
                    chunk,
                    backward: true,
                });
                live[chunk] -= 1;
            }
            _ => {}
        }
    }
    assert!(
        live.iter().all(|&n| n == 0),
        "a schedule runs every backward"
    );
    worst
}

/// What one stage (chunk) of a rank takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageMemory {
    /// Parameters.
    pub shard: Shard,
    /// Kept for the backward pass of one microbatch.
    pub kept: Bytes,
    /// Working set of a forward pass.
    pub forward: Bytes,
    /// Working set of a backward pass.
    pub backward: Bytes,
    /// Logits and loss buffers, between the head's forward and its backward.
    pub logits: Bytes,
    /// Working set of the head's backward, beside the logits.
    pub head: Bytes,
}

impl StageMemory {
    /// Adds layers that are alike: what is kept adds up, of working sets the largest counts.
    pub fn add_layers(&mut self, layer: &Self, count: u32) {
        let count = u64::from(count);
        self.shard += layer.shard * count;
        self.kept += layer.kept * count;
        self.forward = self.forward.max(layer.forward);
        self.backward = self.backward.max(layer.backward);
        self.logits += layer.logits * count;
        self.head = self.head.max(layer.head);
    }

    /// Working set and logits of the worst instant of a pass. The head's backward comes first and
    /// frees the logits before the layers run theirs.
    fn running(&self, backward: bool) -> (Bytes, Bytes) {
        let layers = if backward {
            self.backward
        } else {
            self.forward
        };
        let head = if backward { self.head } else { Bytes::ZERO };
        if self.logits + head > layers {
            (head, self.logits)
        } else {
            (layers, Bytes::ZERO)
        }
    }
}

/// Bytes of a rank at its worst instant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Model weights.
    pub weights: Bytes,
    /// Main gradients.
    pub gradients: Bytes,
    /// Master weights and moments.
    pub optimizer: Bytes,
    /// Kept activations.
    pub activations: Bytes,
    /// Working set.
    pub transient: Bytes,
    /// Logits and loss buffers.
    pub logits: Bytes,
    /// Context, communicators, staging.
    pub overhead: Bytes,
}

impl RankMemory {
    /// The sum of the parts.
    pub fn total(&self) -> Bytes {
        self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.transient
            + self.logits
            + self.overhead
    }

    /// In GiB.
    pub fn record(&self) -> MemoryRecord {
        MemoryRecord {
            weights: self.weights.gib(),
            gradients: self.gradients.gib(),
            optimizer: self.optimizer.gib(),
            activations: self.activations.gib(),
            transient: self.transient.gib(),
            logits: self.logits.gib(),
            overhead: self.overhead.gib(),
        }
    }
}

/// Static memory of a rank that holds `shard`, dense state over `dense_shards` replicas and experts'
/// over `expert_shards`.
pub fn state(
    shard: &Shard,
    bytes: StateBytes,
    dense_shards: u64,
    expert_shards: u64,
) -> RankMemory {
    let per = |count: u64, each: f64| Bytes((count as f64 * each).ceil() as u64);
    RankMemory {
        weights: per(shard.total(), bytes.weight),
        gradients: per(shard.total(), bytes.gradient),
        optimizer: per(shard.dense().div_ceil(dense_shards), bytes.sharded)
            + per(shard.experts.div_ceil(expert_shards), bytes.sharded),
        ..RankMemory::default()
    }
}

/// Adds the worst instant's activations, working set and logits to a rank's static memory.
pub fn at_worst_moment(
    mut rank: RankMemory,
    stages: &[StageMemory],
    moments: &[Moment],
) -> RankMemory {
    let mut worst = Bytes::ZERO;
    for moment in moments {
        let kept: Bytes = stages
            .iter()
            .zip(&moment.live)
            .map(|(stage, &live)| stage.kept * u64::from(live))
            .sum();
        let (transient, logits) = stages[moment.chunk].running(moment.backward);
        let total = kept + transient + logits;
        if total > worst {
            worst = total;
            rank.activations = kept;
            rank.transient = transient;
            rank.logits = logits;
        }
    }
    rank
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::ScheduleName;

    fn schedule(pp: u32, vpp: u32, microbatches: u32) -> Schedule {
        let name = match (pp, vpp) {
            (1, _) => ScheduleName::None,
            (_, 1) => ScheduleName::OneFOneB,
            _ => ScheduleName::Interleaved,
        };
        Schedule::new(name, pp, vpp, microbatches)
    }

    fn most_live(moments: &[Moment]) -> u32 {
        moments
            .iter()
            .map(|moment| moment.live.iter().sum())
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
            let moments = moments(&schedule(pp, vpp, 8 * pp), pp, vpp);
            let live: Vec<u32> = moments.iter().map(|rank| most_live(rank)).collect();
            assert_eq!(live, expected, "pp {pp} vpp {vpp}");
        }
    }

    #[test]
    fn differential_the_worst_moment_is_the_schedules_own_peak() {
        for (pp, vpp, microbatches) in [(1, 1, 3), (4, 1, 6), (4, 1, 2), (2, 3, 8), (4, 2, 12)] {
            let schedule = schedule(pp, vpp, microbatches);
            let kept = |stage: Stage| Bytes(1000 + 37 * u64::from(stage.0 * stage.0));
            for (rank, moments) in (0..).zip(moments(&schedule, pp, vpp)) {
                let stages: Vec<StageMemory> = (0..vpp)
                    .map(|chunk| StageMemory {
                        kept: kept(Stage(chunk * pp + rank)),
                        ..StageMemory::default()
                    })
                    .collect();
                let worst = at_worst_moment(RankMemory::default(), &stages, &moments);
                let peak = schedule.peak_live(rank, kept).bytes;
                assert_eq!(worst.activations, peak, "pp {pp} vpp {vpp} rank {rank}");
            }
        }
    }

    /// The search looks at four groups of microbatches instead of all.
    #[test]
    fn law_moments_do_not_depend_on_microbatches_past_four_groups() {
        for (pp, vpp) in [(2, 1), (4, 1), (2, 2), (4, 3)] {
            let few = moments(&schedule(pp, vpp, 4 * pp), pp, vpp);
            let many = moments(&schedule(pp, vpp, 11 * pp), pp, vpp);
            for (few, many) in few.iter().zip(&many) {
                assert_eq!(few.len(), many.len());
                assert!(many.iter().all(|moment| few.contains(moment)), "{pp} {vpp}");
            }
        }
    }
}
