//! [`Places`]: which pipeline rank has which stage.

/// Where the stages of a pipeline are: the one place that says so. A stage is a number counted over all chunks, in the
/// order that a microbatch comes to them; chunk `c` of every rank is among stages `c * pp..(c + 1) * pp`.
///
/// Stages go around the ranks, each chunk from the first rank to the last; or as a V (Qi et al., Pipeline Parallelism
/// with Controllable Memory, arXiv 2405.15362): the second chunk comes back from the last rank to the first, so that the
/// last rank has both stages in the middle and the first rank both ends of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Places {
    pp: u32,
    vpp: u32,
    is_vee: bool,
}

impl Places {
    /// Those of `vpp` stages on each of `pp` ranks, which go around them or as a V.
    ///
    /// # Panics
    /// Where a V has not two chunks, or no two ranks.
    pub fn new(pp: u32, vpp: u32, is_vee: bool) -> Self {
        assert!(pp >= 1 && vpp >= 1);
        assert!(!is_vee || (pp > 1 && vpp == 2), "a V has two chunks a rank");
        Self { pp, vpp, is_vee }
    }

    /// Pipeline ranks.
    pub fn pp(self) -> u32 {
        self.pp
    }

    /// Stages a rank.
    pub fn vpp(self) -> u32 {
        self.vpp
    }

    /// Stages over all ranks.
    pub fn stages(self) -> u32 {
        self.pp * self.vpp
    }

    /// The pipeline rank that holds a stage.
    pub fn rank_of(self, stage: u32) -> u32 {
        let place = stage % self.pp;
        if self.comes_back(self.chunk_of(stage)) {
            self.pp - 1 - place
        } else {
            place
        }
    }

    /// Which of its rank's chunks a stage is.
    pub fn chunk_of(self, stage: u32) -> u32 {
        stage / self.pp
    }

    /// The stage that is a chunk of a pipeline rank.
    pub fn stage_of(self, rank: u32, chunk: u32) -> u32 {
        let place = if self.comes_back(chunk) {
            self.pp - 1 - rank
        } else {
            rank
        };
        chunk * self.pp + place
    }

    /// The stages of a pipeline rank, chunk by chunk.
    pub fn of_rank(self, rank: u32) -> impl Iterator<Item = u32> + Clone {
        (0..self.vpp).map(move |chunk| self.stage_of(rank, chunk))
    }

    /// Whether what a stage gives is sent: there is a next stage, and another rank has it.
    pub fn is_sent(self, stage: u32) -> bool {
        let next = stage + 1;
        next < self.stages() && self.rank_of(next) != self.rank_of(stage)
    }

    /// Whether a stage begins with what another rank sends.
    pub fn is_received(self, stage: u32) -> bool {
        stage
            .checked_sub(1)
            .is_some_and(|before| self.is_sent(before))
    }

    /// Whether the first stage and the last are on different ranks.
    pub fn parts_ends(self) -> bool {
        self.rank_of(0) != self.rank_of(self.stages() - 1)
    }

    /// Pipeline ranks that send each other the outputs of stages, the sender first, each pair once. Gradients go
    /// the other way.
    pub fn lines(self) -> Vec<[u32; 2]> {
        let mut lines = Vec::new();
        for stage in (0..self.stages()).filter(|&stage| self.is_sent(stage)) {
            let line = [stage, stage + 1].map(|stage| self.rank_of(stage));
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        lines
    }

    fn comes_back(self, chunk: u32) -> bool {
        self.is_vee && chunk % 2 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Places> {
        (1..=6).flat_map(|pp| {
            let around = (1..=4).map(move |vpp| Places::new(pp, vpp, false));
            around.chain((pp > 1).then(|| Places::new(pp, 2, true)))
        })
    }

    #[test]
    fn law_every_stage_is_one_chunk_of_one_rank() {
        for places in all() {
            let mut found: Vec<u32> = (0..places.pp())
                .flat_map(|rank| places.of_rank(rank))
                .collect();
            found.sort_unstable();
            assert!(found.into_iter().eq(0..places.stages()), "{places:?}");
            for stage in 0..places.stages() {
                let (rank, chunk) = (places.rank_of(stage), places.chunk_of(stage));
                assert_eq!(places.stage_of(rank, chunk), stage, "{places:?}");
            }
        }
    }

    /// Megatron-Core's chunks go around; those of arXiv 2405.15362 go there and back.
    #[test]
    fn golden_places() {
        let ranks = |places: Places| -> Vec<u32> {
            (0..places.stages()).map(|s| places.rank_of(s)).collect()
        };
        assert_eq!(ranks(Places::new(3, 2, false)), [0, 1, 2, 0, 1, 2]);
        assert_eq!(ranks(Places::new(3, 2, true)), [0, 1, 2, 2, 1, 0]);
        let around = Places::new(3, 2, false);
        assert_eq!(around.lines(), [[0, 1], [1, 2], [2, 0]]);
        let vee = Places::new(3, 2, true);
        assert_eq!(vee.lines(), [[0, 1], [1, 2], [2, 1], [1, 0]]);
        assert_eq!(Places::new(2, 1, false).lines(), [[0, 1]]);
        assert!(around.parts_ends() && !vee.parts_ends());
        assert!(!vee.is_sent(2) && !vee.is_received(3));
        assert!(!Places::new(1, 1, false).parts_ends());
    }
}
