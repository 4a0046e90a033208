//! [`Waits`]: what passes wait for where weights and gradients rest divided, or gradients alone, from two microbatches played
//! unit by unit.
//!
//! A unit is gathered when a pass comes to it, and where that is to run beside compute when the pass comes to the one
//! before it; its gradients are reduced once its backward pass is over, and awaited there or when their buffer is
//! needed. Collectives come one after the other.

use moefold_profiles::Op;

use crate::bucket::Held;
use crate::choice::Overlap;
use crate::price::slower;

/// What is gathered and reduced as one: a family of a unit.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// Dense parameters, or experts.
    pub(super) family: usize,
    pub(super) unit: usize,
    /// In which it is whole: of weights, of gradients.
    pub(super) buffers: [usize; 2],
    /// What gathers its weights over instances that divide the states, before the first gather of a step.
    pub(super) before_s: f64,
    /// None where its weights rest whole.
    pub(super) gather_s: Option<f64>,
    pub(super) reduce_s: f64,
    /// What adds its reduced gradients up, and how long that takes.
    pub(super) sweeps: Vec<Op>,
    pub(super) swept_s: f64,
}

/// What passes wait for, in seconds.
#[derive(Debug, Clone, Default)]
pub(super) struct Waits {
    /// The forward pass of the first microbatch, that of any other, a backward pass, and one in a step of which no other
    /// goes before it, which nobody else's reductions hold up: a step has one such, counted as its last.
    pub(super) first_forward: f64,
    pub(super) forward: f64,
    pub(super) backward: f64,
    pub(super) last_backward: f64,
    /// What is left to reduce after the last backward pass.
    pub(super) reduce: f64,
    /// What is left to reduce after a backward pass, beside the forward pass that follows it.
    left: f64,
    /// How often each gather runs: in the first microbatch, and in every other.
    pub(super) gathers: Vec<[u32; 2]>,
    /// What adds reduced gradients up, in every microbatch.
    pub(super) swept: Vec<Op>,
}

/// Which way a pass goes.
const FORWARD: usize = 0;
const BACKWARD: usize = 1;

impl Waits {
    /// Those of a step of so many microbatches, whose units take `passes_s` forward and backward, in order of use, and
    /// `slowed` of what collectives run beside longer. `keeps` says whether a unit that is in its buffer still is not gathered again.
    pub(super) fn played(
        parts: &[Part],
        (passes_s, slowed): (&[[f64; 2]], [f64; 2]),
        overlap: Overlap,
        keeps: bool,
        microbatches: u32,
    ) -> Self {
        let mut of_units = vec![Vec::new(); passes_s.len()];
        for (number, part) in parts.iter().enumerate() {
            of_units[part.unit].push(number);
        }
        let mut player = Player {
            parts,
            of_units,
            overlap,
            slowed,
            held: Held::default(),
            first: true,
            now: 0.0,
            lane: 0.0,
            gathered: vec![0.0; parts.len()],
            gathers: vec![0; parts.len()],
            reduced: Vec::new(),
        };
        let (mut passed_s, mut left) = ([[0.0; 2]; 2], [0.0; 2]);
        let mut gathers = vec![[0; 2]; parts.len()];
        for (microbatch, passed_s) in passed_s.iter_mut().enumerate() {
            for pass in [FORWARD, BACKWARD] {
                if !keeps {
                    player.held = Held::default();
                }
                player.first = (microbatch, pass) == (0, FORWARD);
                let began = player.now;
                player.pass(pass, passes_s);
                passed_s[pass] = player.now - began;
            }
            left[microbatch] = (player.lane - player.now).max(0.0);
            for (all, own) in gathers.iter_mut().zip(&mut player.gathers) {
                all[microbatch] = std::mem::take(own);
            }
        }
        let after = player.now;
        player.settle(|_| true);
        let alone = |pass: usize| passes_s.iter().map(|seconds| seconds[pass]).sum::<f64>();
        let usual = usize::from(microbatches > 1);
        let waited = |microbatch: usize, pass: usize| -> f64 {
            (passed_s[microbatch][pass] - alone(pass)).max(0.0)
        };
        Self {
            first_forward: waited(0, FORWARD),
            forward: waited(usual, FORWARD),
            backward: waited(usual, BACKWARD),
            last_backward: waited(0, BACKWARD),
            reduce: player.now - after,
            left: left[usual],
            gathers,
            swept: parts
                .iter()
                .flat_map(|part| part.sweeps.iter().copied())
                .collect(),
        }
    }

    /// What of it may be hidden at most where backward passes take longer, but none longer than where these are the waits: of what a microbatch waits
    /// for, and of what the last backward pass does with what is left to reduce. With more to compute passes end no sooner and wait no
    /// longer; but what is reduced beside them, and was beside forward passes, may slow them more.
    pub(super) fn may_hide_s(&self, longest: &Self, slowed: [f64; 2]) -> [f64; 2] {
        let moved_s = (self.left - longest.left).max(0.0);
        let slower_s = (slowed[BACKWARD] - slowed[FORWARD]).max(0.0) * moved_s;
        let [all, least] = [self, longest].map(Self::in_parts);
        let [usual, last] = [0, 1].map(|part| (all[part] - least[part]).max(0.0));
        [usual + slower_s, last]
    }

    fn in_parts(&self) -> [f64; 2] {
        // Gathers of a forward pass come after reductions of the microbatch before.
        let usual = self.forward + self.backward;
        [usual, self.last_backward + self.reduce]
    }

    /// Those of passes in a step of so many microbatches.
    pub(super) fn passes_s(&self, microbatches: u32) -> f64 {
        let others = f64::from(microbatches - 1);
        self.first_forward + (self.forward + self.backward) * others + self.last_backward
    }

    /// How often each gather of weights that rest divided runs in a step of so many microbatches.
    pub(super) fn gathered(&self, microbatches: u32) -> impl Iterator<Item = f64> {
        let each = self.gathers.iter();
        each.map(move |&[first, other]| f64::from(first + other * (microbatches - 1)))
    }
}

struct Player<'a> {
    parts: &'a [Part],
    /// Numbers of parts, by unit.
    of_units: Vec<Vec<usize>>,
    overlap: Overlap,
    slowed: [f64; 2],
    held: Held,
    /// Whether it is the first pass of a step.
    first: bool,
    /// When compute goes on, and when the last collective ends.
    now: f64,
    lane: f64,
    /// By part, when it was gathered last, and how often.
    gathered: Vec<f64>,
    gathers: Vec<u32>,
    /// Reductions that are not awaited yet: of which part, and when they end.
    reduced: Vec<(usize, f64)>,
}

impl Player<'_> {
    fn pass(&mut self, pass: usize, passes_s: &[[f64; 2]]) {
        if pass == BACKWARD {
            self.settle(|_| true);
        }
        let units = passes_s.len();
        for step in 0..units {
            let (unit, next) = match pass {
                FORWARD => (step, Some(step + 1)),
                _ => (units - 1 - step, (units - 1 - step).checked_sub(1)),
            };
            self.gather(unit);
            if let Some(next) = next.filter(|&next| self.overlap.param_gather && next < units) {
                self.gather(next);
            }
            let own = self.of_units[unit].clone();
            for &number in &own {
                self.now = self.now.max(self.gathered[number]);
                if pass == BACKWARD {
                    let buffer = |part: &Part| (part.family, part.buffers[1]);
                    let own = buffer(&self.parts[number]);
                    self.settle(|other| buffer(other) == own);
                }
            }
            self.compute(pass, passes_s[unit][pass]);
            if pass == BACKWARD {
                for &number in &own {
                    self.lane = self.lane.max(self.now) + self.parts[number].reduce_s;
                    self.reduced.push((number, self.lane));
                }
                if !self.overlap.grad_reduce {
                    self.settle(|_| true);
                }
            }
        }
    }

    /// Computes something of a pass.
    fn compute(&mut self, pass: usize, alone_s: f64) {
        // Collectives go on without a gap until the last of them ends.
        self.now += alone_s + slower(alone_s, self.lane - self.now, self.slowed[pass]);
    }

    /// Gathers what of a unit its buffers do not hold.
    fn gather(&mut self, unit: usize) {
        for &number in &self.of_units[unit] {
            let part = &self.parts[number];
            if let Some(gather_s) = part.gather_s
                && self.held.take(part.family, part.buffers[0], unit)
            {
                let before_s = if self.first { part.before_s } else { 0.0 };
                self.lane = self.lane.max(self.now) + before_s + gather_s;
                self.gathered[number] = self.lane;
                self.gathers[number] += 1;
            }
        }
    }

    /// Waits for reductions of some parts and adds what they give up.
    fn settle(&mut self, those: impl Fn(&Part) -> bool) {
        for (number, ends) in std::mem::take(&mut self.reduced) {
            let parts = self.parts;
            let part = &parts[number];
            if those(part) {
                self.now = self.now.max(ends);
                self.compute(BACKWARD, part.swept_s);
            } else {
                self.reduced.push((number, ends));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Four units of one family, each gathered in 2 and reduced in 3 seconds.
    fn parts(turns: [usize; 2]) -> Vec<Part> {
        let part = |unit: usize| Part {
            family: 0,
            unit,
            buffers: turns.map(|turns| unit % turns),
            before_s: 0.0,
            gather_s: Some(2.0),
            reduce_s: 3.0,
            sweeps: Vec::new(),
            swept_s: 0.5,
        };
        (0..4).map(part).collect()
    }

    #[test]
    fn golden_waits_of_four_units() {
        let passes_s = [[5.0, 9.0]; 4];
        let beside = Overlap {
            grad_reduce: true,
            param_gather: true,
            ..Overlap::default()
        };
        // When they are needed: forward three, as the first is there but in the first microbatch; backward three and
        // all reductions.
        let waits = Waits::played(
            &parts([1, 1]),
            (&passes_s, [0.0; 2]),
            Overlap::default(),
            true,
            2,
        );
        assert_eq!(waits.gathers, [[2, 1], [2, 2], [2, 2], [1, 1]]);
        let found = [waits.first_forward, waits.forward, waits.backward];
        assert_eq!(found, [8.0, 6.0, 3.0 * 2.0 + 4.0 * 3.5]);
        assert_eq!(waits.reduce, 0.0);
        // Beside: the first one; what adds gradients up; behind the last pass its reduction.
        let waits = Waits::played(&parts([2, 2]), (&passes_s, [0.0; 2]), beside, true, 2);
        assert_eq!(waits.gathers, [[2, 1], [2, 1], [1, 1], [1, 1]]);
        let found = [waits.first_forward, waits.forward, waits.backward];
        assert_eq!(found, [2.0, 0.0, 2.0]);
        assert_eq!(waits.reduce, 3.0 + 0.5);
        // Gathers over instances before the first ones, of 4 seconds: the first unit waits for 6, each other for what of 6 is
        // longer than a pass of 5. All else is as without them.
        let mut over = parts([2, 2]);
        let play = |parts: &[Part]| Waits::played(parts, (&passes_s, [0.0; 2]), beside, false, 2);
        let usual = play(&over);
        for part in &mut over {
            part.before_s = 4.0;
        }
        let waits = play(&over);
        assert_eq!(waits.first_forward, 6.0 + 3.0 * 1.0);
        let others = |waits: &Waits| [waits.forward, waits.backward, waits.last_backward];
        assert_eq!(others(&waits), others(&usual));
        // Weights that rest whole are not gathered, and reductions go on beside the next forward pass.
        let mut whole = parts([4, 4]);
        for part in &mut whole {
            (part.gather_s, part.swept_s) = (None, 0.0);
        }
        let waits = Waits::played(&whole, (&passes_s, [0.0; 2]), beside, false, 2);
        assert_eq!(waits.gathers, [[0, 0]; 4]);
        let found = [waits.first_forward, waits.forward, waits.backward];
        assert_eq!((found, waits.reduce), ([0.0; 3], 3.0));
        // Of twelve seconds of reductions three are beside a backward pass of four, which the first of them waits for.
        let slow = [[5.0, 1.0]; 4];
        let waits = Waits::played(&whole, (&slow, [0.0; 2]), beside, false, 2);
        assert_eq!((waits.backward, waits.reduce), (0.0, 9.0));
        // A step is as long as what bounds it: in each microbatch its reductions, from the first gradients on, as nothing goes
        // backward before they are done. More compute does not shorten it.
        let step = |backward: f64, microbatches: u32| {
            let passes_s = [[0.5, backward]; 4];
            let waits = Waits::played(&whole, (&passes_s, [0.0; 2]), beside, false, microbatches);
            let others = f64::from(microbatches - 1);
            let passed = waits.first_forward + others * waits.forward + others * waits.backward;
            let alone = f64::from(microbatches) * 4.0 * (0.5 + backward);
            alone + passed + waits.last_backward + waits.reduce
        };
        for microbatches in [1, 2, 5] {
            for backward in [0.25, 0.5, 1.0] {
                let expected = 4.0 * 0.5 + f64::from(microbatches) * (backward + 12.0);
                let found = step(backward, microbatches);
                assert!(
                    (found - expected).abs() < 1e-9,
                    "{backward} {microbatches}: {found}"
                );
            }
        }
        let waits = Waits::played(&whole, (&passes_s, [0.0; 2]), Overlap::default(), false, 2);
        assert_eq!((waits.backward, waits.reduce), (12.0, 0.0));
        // Released after each pass, a unit is gathered for both.
        let waits = Waits::played(&parts([2, 2]), (&passes_s, [0.0; 2]), beside, false, 2);
        assert_eq!(waits.gathers, [[2, 2]; 4]);
        let waited = waits.forward + waits.backward;
        // Beside the forward pass run three gathers of 2, beside the backward pass and what adds its gradients up three of 2 and three reductions
        // of 3.
        let waits = Waits::played(&parts([2, 2]), (&passes_s, [0.1, 0.2]), beside, false, 2);
        let slower = waits.forward + waits.backward - waited;
        assert!(
            (slower - (0.1 * 6.0 + 0.2 * 15.0)).abs() < 1e-12,
            "{slower}"
        );
    }

    /// A unit: seconds to gather, to reduce, to add up, of a forward and of a backward pass, and what that takes longer twice.
    fn unit() -> impl Strategy<Value = [f64; 7]> {
        prop::array::uniform7((0_u32..12).prop_map(|tenths| f64::from(tenths) / 4.0))
    }

    proptest! {
        #[test]
        fn law_longer_passes_end_no_sooner_and_hide_no_more_than_may_be(
            units in prop::collection::vec(unit(), 1..6),
            turns in prop::array::uniform2(1_usize..4),
            slowed in prop::array::uniform2((0_u32..4).prop_map(|tenths| f64::from(tenths) / 10.0)),
            (grad_reduce, param_gather, gathers, keeps) in any::<(bool, bool, bool, bool)>(),
            microbatches in 1_u32..4,
        ) {
            let parts = units.iter().enumerate().map(|(unit, of)| Part {
                family: unit % 2,
                unit,
                buffers: turns.map(|turns| unit % turns),
                before_s: 0.0,
                gather_s: gathers.then_some(of[0]),
                reduce_s: of[1],
                sweeps: Vec::new(),
                swept_s: of[2] / 8.0,
            });
            let parts: Vec<Part> = parts.collect();
            let overlap = Overlap { grad_reduce, param_gather, ..Overlap::default() };
            let played = |longer: usize| {
                let passes = units.iter().map(|of| [of[3], of[4..=4 + longer].iter().sum()]);
                let passes_s: Vec<[f64; 2]> = passes.collect();
                let waits = Waits::played(&parts, (&passes_s, slowed), overlap, keeps, microbatches);
                let alone = [0, 1].map(|pass| passes_s.iter().map(|of| of[pass]).sum::<f64>());
                let waited_s = waits.in_parts();
                let alone_s = [alone[0] + alone[1], alone[1]];
                let ends = [0, 1].map(|part| alone_s[part] + waited_s[part]);
                (waits, waited_s, ends)
            };
            let [(plain, plain_s, plain_ends), (_, more_s, more_ends), (longest, ..)] = [0, 1, 2].map(played);
            let hidden = plain.may_hide_s(&longest, slowed);
            // One microbatch has no other.
            for part in usize::from(microbatches == 1)..2 {
                let what = format!("{part}: {more_s:?} {plain_s:?} {hidden:?} {more_ends:?} {plain_ends:?}");
                prop_assert!(more_s[part] >= plain_s[part] - hidden[part] - 1e-9, "{what}");
                prop_assert!(more_ends[part] >= plain_ends[part] - 1e-9, "{what}");
            }
        }
    }
}
