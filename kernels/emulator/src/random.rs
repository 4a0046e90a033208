//! The emulator's dice.

use moefold_profiles::random::SplitMix64;

/// Numbers of one stream of a seed.
pub(crate) struct Random(SplitMix64);

impl Random {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut random = SplitMix64::new(seed ^ stream.wrapping_mul(0xd6e8_feb8_6659_fd93));
        random.draw();
        Self(random)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.draw()
    }

    /// From 0 up to but not including `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        // The upper half of a product with a 32-bit number; the bias is of no concern here.
        (((self.next() >> 32) * end as u64) >> 32) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}
