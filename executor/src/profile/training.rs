//! A run as a profile: what its steps took, by key of the cost tables.
//!
//! A sample is the mean of a key's calls on one rank in one step. Of the steps that were sampled, the half nearest to the median counts: a step that
//! something else on the machine held up says nothing of training.
//!
//! What data decides, as the rows of an expert, differs from call to call, and would make a key of each.
//! Where a key has many sizes that differ in one number alone, those within a quarter of an octave are
//! one sample set, at the mean size, with times in proportion.

use std::collections::BTreeMap;

use moefold_profiles::directory::{Key, Sample, Taken, Wait};
use moefold_profiles::host::HostCost;
use moefold_profiles::statistics::{median, nearest_half};
use moefold_profiles::{Op, Profile};

use super::Described;
use crate::environment::Environment;
use crate::record::{KeyTime, SampledStep};

/// Sizes of one key that are told apart.
const SIZES: usize = 8;
/// Timings of one key, and waits, that are kept.
const KEPT: usize = 96;

/// What a run measured: a profile but for where and when.
#[derive(Debug, Clone)]
pub struct Measurements {
    pub(crate) device: Described,
    pub(crate) samples: Vec<Sample>,
}

impl Measurements {
    /// The profile, of a run in `environment`.
    pub fn profile(&self, environment: &Environment) -> Profile {
        let samples = self.samples.clone();
        self.device
            .clone()
            .profile(environment, String::new(), samples)
    }
}

/// Those of `keys` that training has not measured. Where data decides a size (rows of an expert), training met
/// sizes of its own: one within an octave of them is not missing, as it would only be timed without what
/// training does to it.
pub fn missing(keys: impl IntoIterator<Item = Key>, trained: &Profile) -> Vec<Key> {
    let split = |mut key: Key| {
        let size = size(&mut key).map(std::mem::take);
        (key, size)
    };
    let mut met: BTreeMap<Key, Vec<Option<u64>>> = BTreeMap::new();
    for sample in &trained.samples {
        let (family, size) = split(sample.key);
        met.entry(family).or_default().push(size);
    }
    let near = |met: Option<u64>, asked: Option<u64>| match (met, asked) {
        (Some(met), Some(asked)) => met.max(asked) <= 2 * met.min(asked),
        _ => met == asked,
    };
    let is_missing = |key: &Key| {
        let (family, asked) = split(*key);
        let sizes = met.get(&family).map_or(&[][..], Vec::as_slice);
        !sizes.iter().any(|&size| near(size, asked))
    };
    keys.into_iter().filter(is_missing).collect()
}

/// The samples of a run. `steps` are those of every rank, and `step_s` how long each step of the run took, by
/// its number. Between ops on a device that has a queue the host does not show.
pub(crate) fn samples(
    steps: &[Vec<SampledStep>],
    step_s: &BTreeMap<u64, f64>,
    warmup: u64,
    queued: bool,
) -> Vec<Sample> {
    let usual = usual(steps, step_s, warmup);
    let counted = || {
        let all = steps.iter().flatten();
        all.filter(|step| usual.contains(&step.step))
    };
    let mut by_key: BTreeMap<Key, Vec<&KeyTime>> = BTreeMap::new();
    for (key, time) in counted().flat_map(|step| &step.keys) {
        by_key.entry(*key).or_default().push(time);
    }
    let mut samples: Vec<Sample> = joined(by_key)
        .into_iter()
        .filter_map(|(key, times)| sample(key, &times))
        .collect();
    let host: Vec<f64> = counted()
        .filter_map(|step| {
            let calls: u64 = step.keys.iter().map(|(_, time)| time.calls).sum();
            let each = step.host_s / calls.max(1) as f64;
            (each > 0.0).then_some(each)
        })
        .collect();
    if !queued && !host.is_empty() {
        let launch = Key::Host(HostCost::Launch);
        samples.push(Sample::of(launch, Taken::Training, thinned(&host)));
    }
    samples
}

/// The half of the sampled steps whose length is nearest to the median, at least three where there are.
fn usual(steps: &[Vec<SampledStep>], step_s: &BTreeMap<u64, f64>, warmup: u64) -> Vec<u64> {
    let sampled = steps.first().map_or(&[][..], Vec::as_slice);
    let mut lengths: Vec<(u64, f64)> = sampled
        .iter()
        .filter_map(|step| Some((step.step, *step_s.get(&step.step)?)))
        .collect();
    let first = step_s.keys().next().copied().unwrap_or(0);
    if lengths.iter().any(|(step, _)| *step >= first + warmup) {
        lengths.retain(|(step, _)| *step >= first + warmup);
    }
    let settled = step_s.range(first + warmup..).map(|(_, seconds)| *seconds);
    let middle = median(settled.collect()).unwrap_or(0.0);
    nearest_half(lengths, middle)
}

/// What one size took.
#[derive(Debug, Clone)]
struct Timed {
    calls: f64,
    seconds: f64,
    waits: Vec<[f64; 2]>,
}

/// Joins keys that differ in a size that data decides.
fn joined(by_key: BTreeMap<Key, Vec<&KeyTime>>) -> BTreeMap<Key, Vec<Timed>> {
    let mut families: BTreeMap<Key, Vec<(u64, Vec<&KeyTime>)>> = BTreeMap::new();
    let mut joined: BTreeMap<Key, Vec<Timed>> = BTreeMap::new();
    for (key, times) in by_key {
        let mut family = key;
        match size(&mut family).map(std::mem::take) {
            Some(size) => families.entry(family).or_default().push((size, times)),
            None => {
                joined.insert(key, times.into_iter().map(|time| at(time, 1.0)).collect());
            }
        }
    }
    for (family, sizes) in families {
        let apart = sizes.len() <= SIZES;
        let octave = |size: u64| (4.0 * (size.max(1) as f64).log2()).floor() as u64;
        let mut sets: BTreeMap<u64, Vec<(u64, Vec<&KeyTime>)>> = BTreeMap::new();
        for (size, times) in sizes {
            let set = if apart { size } else { octave(size) };
            sets.entry(set).or_default().push((size, times));
        }
        for set in sets.into_values() {
            let calls =
                |times: &[&KeyTime]| times.iter().map(|time| time.calls).sum::<u64>() as f64;
            let all: f64 = set.iter().map(|(_, times)| calls(times)).sum();
            let sum: f64 = set
                .iter()
                .map(|(size, times)| *size as f64 * calls(times))
                .sum();
            let mean = (sum / f64::max(all, 1.0)).round() as u64;
            let mut key = family;
            *size(&mut key).expect("it has a size") = mean;
            let times = set.into_iter().flat_map(|(size, times)| {
                let factor = mean as f64 / size.max(1) as f64;
                times.into_iter().map(move |time| at(time, factor))
            });
            joined.entry(key).or_default().extend(times);
        }
    }
    joined
}

fn at(time: &KeyTime, factor: f64) -> Timed {
    Timed {
        calls: time.calls as f64,
        seconds: time.seconds * factor,
        waits: time.waits.clone(),
    }
}

/// The size of a key that data may decide.
fn size(key: &mut Key) -> Option<&mut u64> {
    match key {
        Key::Op(
            Op::GroupedGemm { rows, .. }
            | Op::Swiglu { rows, .. }
            | Op::Permute { rows, .. }
            | Op::Unpermute { rows, .. },
        ) => Some(rows),
        Key::Op(Op::Sweep { len, .. } | Op::Add { len, .. }) => Some(len),
        Key::Collective(collective) => Some(&mut collective.bytes.0),
        Key::Op(_) | Key::Host(_) => None,
    }
}

fn sample(key: Key, times: &[Timed]) -> Option<Sample> {
    let timed = times
        .iter()
        .filter(|time| time.calls > 0.0 && time.seconds > 0.0);
    let seconds: Vec<f64> = timed.map(|time| time.seconds / time.calls).collect();
    let waits = times.iter().flat_map(|time| &time.waits);
    let waits: Vec<Wait> = waits.copied().map(Wait::once).collect();
    (!seconds.is_empty()).then(|| Sample {
        waits: folded(&waits),
        ..Sample::of(key, Taken::Training, thinned(&seconds))
    })
}

/// Waits, summed over several meetings where they are many.
pub(super) fn folded(waits: &[Wait]) -> Vec<Wait> {
    let each = waits.len().div_ceil(KEPT).max(1);
    let sum = |waits: &[Wait]| waits.iter().copied().sum();
    waits.chunks(each).map(sum).collect()
}

/// As many as are kept, evenly from all.
pub(super) fn thinned<T: Copy>(all: &[T]) -> Vec<T> {
    let kept = all.len().min(KEPT);
    (0..kept).map(|i| all[i * all.len() / kept]).collect()
}

#[cfg(test)]
mod tests {
    use moefold_profiles::units::Bytes;
    use moefold_profiles::{Collective, CollectiveKind, Dtype, Pass};

    use super::*;

    fn gemm(m: u64) -> Key {
        Key::Op(Op::Gemm {
            m,
            n: 8,
            k: 8,
            pass: Pass::Forward,
            dtype: Dtype::F32,
        })
    }

    fn permute(rows: u64) -> Key {
        Key::Op(Op::Permute {
            rows,
            dim: 8,
            pass: Pass::Forward,
            dtype: Dtype::F32,
        })
    }

    fn took(calls: u64, seconds: f64) -> KeyTime {
        KeyTime {
            calls,
            seconds,
            waits: Vec::new(),
        }
    }

    fn step(step: u64, keys: Vec<(Key, KeyTime)>) -> SampledStep {
        SampledStep {
            step,
            host_s: 0.0,
            keys,
        }
    }

    fn lengths(seconds: &[f64]) -> BTreeMap<u64, f64> {
        (0..).zip(seconds.iter().copied()).collect()
    }

    #[test]
    fn golden_a_sample_is_the_mean_call_of_a_rank_in_a_usual_step() {
        // The first warms up, the fifth was disturbed; three of the others are nearest to the median, 2.1.
        let step_s = lengths(&[9.0, 2.0, 2.1, 2.2, 5.0, 1.0]);
        let rank = |factor: f64| -> Vec<SampledStep> {
            let at = |i: u64| step(i, vec![(gemm(4), took(2, factor * (i + 1) as f64))]);
            (0..6).map(at).collect()
        };
        let samples = samples(&[rank(2.0), rank(4.0)], &step_s, 1, false);
        let [sample] = &samples[..] else {
            panic!("one key, found {samples:?}");
        };
        assert_eq!((sample.key, sample.taken), (gemm(4), Taken::Training));
        assert_eq!(sample.seconds, [2.0, 3.0, 4.0, 4.0, 6.0, 8.0]);
    }

    #[test]
    fn golden_sizes_that_data_decides_are_joined_where_they_are_many() {
        let keys = |count: u64| -> Vec<(Key, KeyTime)> {
            let of = |i: u64| (permute(1024 + i), took(1, (1024 + i) as f64));
            (0..count).map(of).collect()
        };
        let one_step = lengths(&[1.0]);
        let few = samples(&[vec![step(0, keys(8))]], &one_step, 0, false);
        assert_eq!(few.len(), 8);
        let many = samples(&[vec![step(0, keys(9))]], &one_step, 0, false);
        let [joined] = &many[..] else {
            panic!("one size, found {many:?}");
        };
        // A second a row, so at the mean size all take as many.
        assert_eq!(joined.key, permute(1028));
        assert!(
            joined.seconds.iter().all(|s| (s - 1028.0).abs() < 1e-9),
            "{joined:?}"
        );
        // Sizes that are far apart stay apart; what data does not decide is never joined.
        let mut apart = keys(9);
        apart.push((permute(4096), took(1, 1.0)));
        apart.extend((1..20).map(|m| (gemm(m), took(1, 1.0))));
        let apart = samples(&[vec![step(0, apart)]], &one_step, 0, false);
        assert_eq!(apart.len(), 2 + 19);
    }

    #[test]
    fn what_training_met_at_about_its_size_is_not_missing() {
        let keys = vec![(gemm(4), took(1, 1.0)), (permute(100), took(1, 1.0))];
        let met = samples(&[vec![step(0, keys)]], &lengths(&[1.0]), 0, true);
        let profile = Profile::of("cpu", met);
        let asked = [4, 5].map(gemm).into_iter();
        let asked = asked.chain([49, 50, 100, 200, 201].map(permute));
        let expected = vec![gemm(5), permute(49), permute(201)];
        assert_eq!(missing(asked, &profile), expected);
    }

    #[test]
    fn golden_the_host_has_what_no_key_covers_a_call() {
        let keys = vec![(gemm(4), took(3, 1.0)), (permute(4), took(1, 1.0))];
        let mut only = step(0, keys);
        only.host_s = 0.5;
        let steps = [vec![only]];
        let found = samples(&steps, &lengths(&[1.0]), 0, false);
        let launch = Key::Host(HostCost::Launch);
        let host = found.iter().find(|sample| sample.key == launch);
        assert_eq!(host.expect("there is a host").seconds, [0.125]);
        let queued = samples(&steps, &lengths(&[1.0]), 0, true);
        assert!(queued.iter().all(|sample| sample.key != launch));
    }

    #[test]
    fn waits_keep_their_sums_where_they_are_many() {
        let key = Key::Collective(Collective {
            kind: CollectiveKind::AllToAll,
            bytes: Bytes(64),
            ranks: 2,
            ranks_per_domain: 2,
        });
        let waits: Vec<[f64; 2]> = (0..960).map(|i| [f64::from(i), 1.0]).collect();
        let time = KeyTime {
            waits,
            ..took(960, 1.0)
        };
        let found = samples(
            &[vec![step(0, vec![(key, time)])]],
            &lengths(&[1.0]),
            0,
            false,
        );
        let kept = &found[0].waits;
        assert_eq!(kept.len(), KEPT);
        assert!(
            kept.iter()
                .all(|wait| wait.apart_s == 10.0 && wait.times == 10)
        );
        let all: Wait = kept.iter().copied().sum();
        assert_eq!((all.waited_s, all.times), (959.0 * 960.0 / 2.0, 960));
    }
}
