//! Numbers that only have to be mixed, the same on every machine: SplitMix64 (Steele, Lea and Flood,
//! "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).

/// What the state of the generator grows by: 2^64 over the golden ratio, made odd.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The number that a generator in this state gives next. As a function of its own, a mixer: every bit of
/// the result depends on every bit of `state`, and no two states give the same.
#[inline]
pub fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(GAMMA);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The generator.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator whose numbers belong to this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        let drawn = mix(self.0);
        self.0 = self.0.wrapping_add(GAMMA);
        drawn
    }

    /// What the `n`th draw after `n` others gives, so that many threads can share a sequence.
    #[inline]
    pub fn nth(&self, n: u64) -> u64 {
        mix(self.0.wrapping_add(GAMMA.wrapping_mul(n)))
    }

    /// Goes on as if `n` numbers had been drawn.
    pub fn skip(&mut self, n: u64) {
        self.0 = self.0.wrapping_add(GAMMA.wrapping_mul(n));
    }

    /// One of the numbers below `end`, which is small beside 2^64.
    #[inline]
    pub fn below(&mut self, end: u64) -> u64 {
        self.draw() % end
    }

    /// At least 0 and below 1, in steps of 2^-53.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of seed 1234567 by the reference implementation in C
    /// (<https://prng.di.unimi.it/splitmix64.c>).
    #[test]
    fn oracle_the_numbers_are_those_of_the_reference() {
        let mut random = SplitMix64::new(1_234_567);
        let drawn = [(); 3].map(|()| random.draw());
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        assert_eq!(drawn, expected);
        let start = SplitMix64::new(1_234_567);
        assert_eq!([0, 1, 2].map(|n| start.nth(n)), expected);
        let mut later = start.clone();
        later.skip(2);
        assert_eq!(later.draw(), expected[2]);
    }
}
