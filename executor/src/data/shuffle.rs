//! A seeded permutation of `0..n` without a table of it.
//!
//! A Feistel network over the smallest even number of bits that holds `n`, walked until the result
//! is below `n` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3).
//! Every rank can ask for any element of any epoch; the order is not cryptographic, only mixed.

use moefold_profiles::random::mix;

/// One permutation of `0..n`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Permutation {
    n: u64,
    half_bits: u32,
    keys: [u64; Self::ROUNDS],
}

impl Permutation {
    /// Four rounds make a strong pseudo-random permutation of a good round function (Luby and
    /// Rackoff 1988); small domains get more for evenness.
    const ROUNDS: usize = 8;

    /// The permutation of `0..n` that belongs to a seed and an epoch.
    pub(super) fn new(n: u64, seed: u64, epoch: u64) -> Self {
        assert!(n > 0, "a permutation of nothing");
        let bits = u64::BITS - (n - 1).leading_zeros();
        let mut state = mix(mix(seed) ^ epoch);
        let keys = std::array::from_fn(|_| {
            state = mix(state);
            state
        });
        Self {
            n,
            half_bits: bits.div_ceil(2).max(1),
            keys,
        }
    }

    /// Where `i` goes.
    pub(super) fn apply(&self, i: u64) -> u64 {
        assert!(i < self.n, "element {i} of {}", self.n);
        let mut value = i;
        loop {
            value = self.encrypt(value);
            if value < self.n {
                return value;
            }
        }
    }

    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(n: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let permutation = Permutation::new(n, seed, epoch);
        (0..n).map(|i| permutation.apply(i)).collect()
    }

    #[test]
    fn law_it_is_a_permutation_for_every_small_size() {
        for n in 1..300 {
            let mut order = order(n, n, 1);
            order.sort_unstable();
            assert!(order.into_iter().eq(0..n), "n = {n}");
        }
    }

    #[test]
    fn law_seeds_and_epochs_differ_and_repeat() {
        assert_eq!(order(1000, 1, 0), order(1000, 1, 0));
        assert_ne!(order(1000, 1, 0), order(1000, 2, 0));
        assert_ne!(order(1000, 1, 0), order(1000, 1, 1));
    }

    #[test]
    fn elements_are_spread_evenly() {
        // Of 1000 elements about one stays in place, and neighbours land 333 apart on average.
        let order = order(1000, 3, 0);
        let fixed = (0..).zip(&order).filter(|(i, v)| i == *v).count();
        assert!(fixed < 8, "{fixed} fixed points");
        let apart: u64 = order.windows(2).map(|w| w[0].abs_diff(w[1])).sum();
        assert!((300..370).contains(&(apart / 999)), "{}", apart / 999);
    }
}
