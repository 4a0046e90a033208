//! [`Failures`]: how often a job fails, what that costs, and how often it is to save.
//!
//! Failures come at random: the time to the next one is exponential, and a job of `n` GPUs fails `n` times as often as
//! one GPU. A failure takes back what was trained since the last save and costs a restart, which may fail as well.
//! Expected times are those of J. T. Daly, *A higher order estimate of the optimum checkpoint interval for restart
//! dumps*, Future Generation Computer Systems 22 (2006), 303-312; the first order of the interval is J. W. Young's
//! (*A first order approximation to the optimum checkpoint interval*, Communications of the ACM 17 (1974), 530-531).

/// What failures cost a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Failures {
    /// Seconds between two failures of the job, on average.
    pub mtbf_s: f64,
    /// Seconds for which a save holds training up.
    pub save_s: f64,
    /// Seconds from a failure until training goes on from the last save.
    pub restart_s: f64,
}

impl Failures {
    /// The share of time in which steps are made that last, where the job saves after every `interval_s` seconds of them,
    /// above 0. Daly's complete model: with `M` between failures, saves of `C`, restarts of `R` and `t` between saves
    /// the time for `t` seconds of steps is `M exp(R / M) (exp((t + C) / M) - 1)`.
    pub fn goodput(&self, interval_s: f64) -> f64 {
        let of = |seconds: f64| seconds / self.mtbf_s;
        let lost = of(self.restart_s).exp() * of(interval_s + self.save_s).exp_m1();
        of(interval_s) / lost
    }

    /// Seconds of steps between saves that [`Failures::goodput`] is greatest for: the `t` of
    /// `exp((t + C) / M) (1 - t / M) = 1`, at which its derivative is 0. Young's `sqrt(2 C M)` and Daly's series are
    /// approximations of it.
    pub fn best_interval_s(&self) -> f64 {
        let save = self.save_s / self.mtbf_s;
        // Falls from `exp(C / M)` at 0 to 0 at 1.
        let above = |share: f64| (share + save) + (-share).ln_1p() > 0.0;
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..100 {
            let middle = 0.5 * (low + high);
            if above(middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        0.5 * (low + high) * self.mtbf_s
    }

    /// Steps of `step_s` seconds between saves that goodput is greatest for, at least one.
    pub fn best_steps(&self, step_s: f64) -> u64 {
        let fewer = (self.best_interval_s() / step_s).floor().max(1.0);
        let more = fewer + 1.0;
        // It has one maximum, which lies between the two.
        if self.goodput(more * step_s) > self.goodput(fewer * step_s) {
            more as u64
        } else {
            fewer as u64
        }
    }
}

#[cfg(test)]
mod tests {
    use moefold_profiles::random::SplitMix64;
    use proptest::prelude::*;

    use super::*;

    /// Daly's series for the interval, his equation 37.
    fn daly(failures: &Failures) -> f64 {
        let Failures { mtbf_s, save_s, .. } = *failures;
        let share = save_s / (2.0 * mtbf_s);
        if share >= 1.0 {
            return mtbf_s;
        }
        let young = (2.0 * save_s * mtbf_s).sqrt();
        young * (1.0 + share.sqrt() / 3.0 + share / 9.0) - save_s
    }

    /// The share of time that lasts of a job that trains and saves `saves` times, failure by failure.
    fn simulated(failures: &Failures, interval_s: f64, saves: u32, seed: u64) -> f64 {
        let mut random = SplitMix64::new(seed);
        let mut next = || {
            let even = ((random.draw() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
            -failures.mtbf_s * even.ln()
        };
        let mut passed = 0.0;
        let mut left = next();
        // Goes on for some seconds, or up to the next failure.
        let mut survives = |seconds: f64| {
            let whole = left > seconds;
            let took = if whole { seconds } else { left };
            passed += took;
            left -= took;
            if !whole {
                left = next();
            }
            whole
        };
        for _ in 0..saves {
            while !survives(interval_s + failures.save_s) {
                while !survives(failures.restart_s) {}
            }
        }
        f64::from(saves) * interval_s / passed
    }

    #[test]
    fn golden_intervals_are_those_of_young_and_daly() {
        for (mtbf_s, save_s, off) in [
            (86_400.0, 1.0, 1e-4),
            (86_400.0, 300.0, 1e-3),
            (10_000.0, 600.0, 2e-3),
            (3_600.0, 600.0, 6e-3),
            (1_000.0, 1_000.0, 3e-2),
        ] {
            let failures = Failures {
                mtbf_s,
                save_s,
                restart_s: 60.0,
            };
            let (best, series) = (failures.best_interval_s(), daly(&failures));
            assert!((best / series - 1.0).abs() < off, "{best} {series}");
            let young = (2.0 * save_s * mtbf_s).sqrt();
            let first_order = 2.0 * (save_s / mtbf_s).sqrt();
            assert!((best / young - 1.0).abs() < first_order, "{best} {young}");
        }
        // Nothing to pay, nothing to wait for.
        let free = Failures {
            mtbf_s: 100.0,
            save_s: 0.0,
            restart_s: 0.0,
        };
        assert!(free.best_interval_s() < 1e-6);
        assert_eq!(free.best_steps(2.0), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]

        /// What is expected is what a job meets that is played failure by failure.
        #[test]
        fn oracle_goodput_is_that_of_failures_played(
            seed in any::<u64>(),
            save in 0.001_f64..0.3,
            restart in 0.001_f64..0.5,
            interval in 0.02_f64..1.5,
        ) {
            let mtbf_s = 5_000.0;
            let failures = Failures { mtbf_s, save_s: save * mtbf_s, restart_s: restart * mtbf_s };
            let played = simulated(&failures, interval * mtbf_s, 100_000, seed);
            let expected = failures.goodput(interval * mtbf_s);
            prop_assert!((played / expected - 1.0).abs() < 0.03, "{} {}", played, expected);
        }

        /// No other number of steps is better.
        #[test]
        fn oracle_no_other_interval_is_better(
            save in 0.0_f64..2.0,
            restart in 0.0_f64..1.0,
            step in 0.002_f64..0.5,
        ) {
            let mtbf_s = 7_200.0;
            let failures = Failures { mtbf_s, save_s: save * mtbf_s, restart_s: restart * mtbf_s };
            let step_s = step * mtbf_s;
            let best = failures.best_steps(step_s);
            let goodput = failures.goodput(best as f64 * step_s);
            for steps in 1..2_000_u32 {
                let other = failures.goodput(f64::from(steps) * step_s);
                prop_assert!(other <= goodput * (1.0 + 1e-12), "{} {}", best, steps);
            }
        }
    }
}
