//! [`Waits`]: what ranks wait for the last of them where they meet, as training measured it.
//!
//! Two things keep ranks apart. They drift: one is held up here, another there, and who sleeps needs a while to wake. Of
//! a meeting that is more a matter of the machine than of how long ranks were apart, so the mean wait of a meeting is a
//! function of that time and no share of it. And where data sends more rows to the experts of some ranks, the others
//! wait for these at the exchange behind them: a share of the time that the mean rank's experts take.

use std::collections::BTreeMap;

use super::Scaled;
use super::local::{distance, is_of_tokens};
use crate::directory::{Key, RankLoads, Wait};

/// Ranks, and ranks a domain.
type Group = [u32; 2];

/// See the module's documentation.
#[derive(Debug, Clone, Default)]
pub(super) struct Waits {
    drift: Vec<(Group, Drift)>,
    /// Seconds waited for the busiest experts over seconds in experts: where tokens come back from them, and at other
    /// collectives behind them, whose ranks share tokens.
    uneven: [Vec<(Group, f64)>; 2],
    /// The former by expert ranks, as routing has it.
    routed: BTreeMap<u32, f64>,
}

impl Waits {
    pub(super) fn new(profiles: &[Scaled]) -> Self {
        let mut drift: BTreeMap<Group, Vec<Wait>> = BTreeMap::new();
        let mut experts: [BTreeMap<Group, Vec<Wait>>; 2] = Default::default();
        for Scaled { profile, factor } in profiles {
            for sample in &profile.samples {
                let Key::Collective(key) = sample.key else {
                    continue;
                };
                for wait in sample.waits.iter().map(|wait| wait.scaled(*factor)) {
                    let of = if wait.experts_s > 0.0 {
                        &mut experts[usize::from(!is_of_tokens(&key))]
                    } else {
                        &mut drift
                    };
                    let group = [key.ranks, key.ranks_per_domain];
                    of.entry(group).or_default().push(wait);
                }
            }
        }
        let drift = drift.into_iter();
        let drift = drift.map(|(group, waits)| (group, Drift::new(&waits)));
        let mut own = Self {
            drift: drift.collect(),
            uneven: Default::default(),
            routed: routed(profiles),
        };
        own.uneven = experts.map(|groups| {
            let groups = groups.into_iter();
            let share = |(group, waits)| (group, own.share_behind_experts(group, waits));
            groups.map(share).collect()
        });
        own
    }

    /// What ranks waited beside what they drift apart, over their time in experts.
    fn share_behind_experts(&self, group: Group, waits: Vec<Wait>) -> f64 {
        let sum = waits.iter().copied().fold(Wait::default(), Wait::and);
        let drifted = |wait: Wait| {
            let meetings = wait.meetings.max(1.0);
            meetings * self.drift(group, wait.apart_s / meetings)
        };
        let drifted: f64 = waits.into_iter().map(drifted).sum();
        ((sum.waited_s - drifted) / sum.experts_s).max(0.0)
    }

    /// The mean wait of a meeting of ranks that were so long apart. The nearest group speaks for others.
    pub(super) fn drift(&self, group: Group, apart_s: f64) -> f64 {
        let drift = nearest(&self.drift, group);
        drift.map_or(0.0, |drift| drift.at(apart_s))
    }

    /// What share of the time in experts the mean rank waits for the busiest of a group. Where tokens come back from
    /// experts it is as measured of a group like it, else as routing has it, else as measured of the nearest.
    pub(super) fn uneven(&self, group: Group, of_tokens: bool) -> f64 {
        let measured = &self.uneven[usize::from(!of_tokens)];
        let own = measured.iter().find(|(other, _)| *other == group);
        let routed = || self.routed.get(&group[0]).copied().filter(|_| of_tokens);
        own.map(|(_, share)| *share)
            .or_else(routed)
            .or_else(|| nearest(measured, group).copied())
            .unwrap_or(0.0)
    }
}

fn nearest<T>(all: &[(Group, T)], group: Group) -> Option<&T> {
    let far = |one: &&(Group, T)| distance(one.0, group);
    let found = all.iter().min_by(|a, b| far(a).total_cmp(&far(b)));
    found.map(|(_, found)| found)
}

/// What the mean rank waits, over its own time in experts, where ranks have loads; the mean of all profiles that know.
fn routed(profiles: &[Scaled]) -> BTreeMap<u32, f64> {
    let mut known: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for Scaled { profile, .. } in profiles {
        // What a group has of the cores, where all groups have as much.
        let cores = |ranks: u32| {
            f64::from(ranks) * f64::from(profile.cores) / f64::from(profile.concurrent_ranks)
        };
        for RankLoads { ranks, sorted } in &profile.loads {
            let share = waiting_share(sorted, cores(*ranks));
            known.entry(*ranks).or_default().push(share);
        }
    }
    let mean = |all: Vec<f64>| all.iter().sum::<f64>() / all.len() as f64;
    let known = known.into_iter();
    known.map(|(ranks, all)| (ranks, mean(all))).collect()
}

/// What time passes beyond that of even loads, over the latter, where ranks have such loads, the most first, and share
/// so many cores evenly: with `k` left each has a whole core or one of `k` parts of all.
fn waiting_share(sorted: &[f64], cores: f64) -> f64 {
    let slower = |active: usize| (active as f64 / cores.max(f64::MIN_POSITIVE)).max(1.0);
    let less = sorted.iter().skip(1).chain(&[0.0]);
    let stretches = sorted.iter().zip(less).enumerate();
    let taken: f64 = stretches
        .map(|(i, (load, less))| (load - less) * slower(i + 1))
        .sum();
    let mean = sorted.iter().sum::<f64>() / sorted.len().max(1) as f64;
    let even = mean * slower(sorted.len());
    if even > 0.0 {
        (taken / even - 1.0).max(0.0)
    } else {
        0.0
    }
}

/// The mean wait of a meeting by the time apart before it: straight from nothing through points, and level after the
/// last.
#[derive(Debug, Clone)]
struct Drift(Vec<[f64; 2]>);

impl Drift {
    /// Means of meetings whose times apart are within an octave, joined where more time apart waits less.
    fn new(waits: &[Wait]) -> Self {
        let mut octaves: BTreeMap<i64, Wait> = BTreeMap::new();
        for wait in waits.iter().filter(|wait| wait.apart_s > 0.0) {
            let octave = (wait.apart_s / wait.meetings.max(1.0)).log2().floor();
            let sum = octaves.entry(octave as i64).or_default();
            *sum = sum.and(*wait);
        }
        let each = |wait: &Wait| wait.waited_s / wait.meetings.max(1.0);
        let mut joined: Vec<Wait> = Vec::new();
        for mut next in octaves.into_values() {
            while let Some(last) = joined.pop_if(|last| each(last) > each(&next)) {
                next = next.and(last);
            }
            joined.push(next);
        }
        let point = |wait: &Wait| [wait.apart_s / wait.meetings.max(1.0), each(wait)];
        Self(joined.iter().map(point).collect())
    }

    fn at(&self, apart_s: f64) -> f64 {
        let above = self.0.partition_point(|point| point[0] < apart_s);
        let before = above.checked_sub(1).map_or([0.0; 2], |i| self.0[i]);
        match self.0.get(above) {
            None => before[1],
            Some(next) => {
                let way = (apart_s - before[0]) / (next[0] - before[0]);
                before[1] + way * (next[1] - before[1])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(waited_s: f64, apart_s: f64, meetings: f64) -> Wait {
        Wait {
            waited_s,
            apart_s,
            experts_s: 0.0,
            meetings,
        }
    }

    #[test]
    fn golden_the_mean_wait_rises_and_stays() {
        // Octaves of 1, 4, 16 and 64 seconds apart wait 1, 4, 2 and 8; the second and third are joined to 3.
        let waits = [
            wait(1.0, 1.0, 1.0),
            wait(8.0, 8.0, 2.0),
            wait(4.0, 32.0, 2.0),
            wait(8.0, 64.0, 1.0),
        ];
        let drift = Drift::new(&waits);
        assert_eq!(drift.0, [[1.0, 1.0], [10.0, 3.0], [64.0, 8.0]]);
        for (apart, waited) in [(0.0, 0.0), (0.5, 0.5), (5.5, 2.0), (37.0, 5.5), (1e3, 8.0)] {
            assert!((drift.at(apart) - waited).abs() < 1e-12, "{apart}");
        }
        assert_eq!(Drift::new(&[]).at(1.0), 0.0);
    }

    /// Ranks on too few cores, run in slices so short that it does not matter in which order.
    fn played(sorted: &[f64], cores: f64) -> f64 {
        const SLICE: f64 = 1e-4;
        let mut left = sorted.to_vec();
        let mut now = 0.0;
        loop {
            let active = left.iter().filter(|left| **left > 0.0).count() as f64;
            if active == 0.0 {
                return now;
            }
            let rate = (cores / active).min(1.0);
            left.iter_mut().for_each(|left| *left -= SLICE * rate);
            now += SLICE;
        }
    }

    #[test]
    fn oracle_who_shares_cores_waits_as_in_slices() {
        for (sorted, cores) in [
            (&[1.5, 1.2, 0.8, 0.5][..], 2.0),
            (&[1.5, 1.2, 0.8, 0.5], 4.0),
            (&[1.5, 1.2, 0.8, 0.5], 1.0),
            (&[2.0, 2.0, 0.0, 0.0], 2.0),
            (&[4.0, 0.0, 0.0, 0.0], 2.0),
            (&[1.4, 1.0, 0.6], 1.5),
            (&[1.25, 0.75], 2.0),
        ] {
            let even = vec![1.0; sorted.len()];
            let expected = played(sorted, cores) / played(&even, cores) - 1.0;
            let found = waiting_share(sorted, cores);
            assert!(
                (found - expected).abs() < 2e-3,
                "{sorted:?} on {cores}: {found} {expected}"
            );
        }
        // Of two on two cores, the mean waits half of what they differ by.
        assert!((waiting_share(&[1.25, 0.75], 2.0) - 0.25).abs() < 1e-12);
        assert_eq!(waiting_share(&[], 2.0), 0.0);
    }
}
