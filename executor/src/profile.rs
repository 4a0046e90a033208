//! Measures ops and collectives on this machine, for the planner's prices.
//!
//! Every key is run on all rank threads at once, as in training, so that what ranks take from each
//! other (cores, caches, memory bandwidth) is in the numbers. A sample is a batch of back-to-back
//! runs between two barriers, divided by their number, on the slowest rank: a batch is much longer
//! than a scheduler's time slice, so ranks that outnumber the cores are charged for waiting their
//! turn. Successive runs use different memory, since in training an op rarely finds its weights in
//! a cache. Nothing is averaged over samples: a profile keeps them raw.

mod collectives;
mod ops;
mod sweep;

use std::time::{Duration, Instant};

use moefold_kernels::Device;
use moefold_profiles::directory::{Key, PROFILE_VERSION, Profile, Sample};

pub use sweep::default_sweep;

use crate::device::DeviceSpec;
use crate::environment::Environment;
use crate::error::Error;
use crate::run::median;
use crate::transport::{Communicator, RankContext, TransportError, World};

/// A batch lasts at least this long: several time slices of a general-purpose scheduler.
const BATCH: Duration = Duration::from_millis(12);
/// Fewer samples than this say nothing about spread.
const SAMPLES_MIN: usize = 3;

/// What to measure and how.
#[derive(Debug, Clone)]
pub struct ProfileOptions {
    /// What to measure; duplicates are measured once.
    pub keys: Vec<Key>,
    /// Rank threads that run at the same time.
    pub ranks: u32,
    /// What every rank measures.
    pub device: DeviceSpec,
    /// Batches before the samples.
    pub warmup: usize,
    /// Samples of each key.
    pub repeats: usize,
    /// Time for everything. Keys get fewer samples, at least three, rather than more time.
    pub budget: Duration,
}

/// A key that has just been measured.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Keys measured so far.
    pub done: usize,
    /// Keys to measure.
    pub total: usize,
    /// The key.
    pub key: Key,
    /// Its median, seconds.
    pub median_s: f64,
}

/// What [`run`] measured.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The samples, with where and how they were taken.
    pub profile: Profile,
    /// Keys that this device has no implementation of, with the reason.
    pub skipped: Vec<(Key, &'static str)>,
}

/// Measures every key on every rank; `progress` is called on rank 0.
pub fn run(
    options: &ProfileOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Measured, Error> {
    let mut keys = options.keys.clone();
    keys.sort_unstable();
    keys.dedup();
    let (keys, skipped) = runnable(keys, options.ranks);
    let started = Instant::now();
    let per_rank = World::threads(options.ranks).run(|rank| {
        let device = options.device.open(0, options.ranks)?;
        let everyone: Vec<u32> = (0..rank.ranks()).collect();
        let world = rank.communicator("world", &everyone);
        let mut samples = Vec::with_capacity(keys.len());
        for (done, &key) in keys.iter().enumerate() {
            let left = options.budget.saturating_sub(started.elapsed());
            let share = left.div_f64((keys.len() - done) as f64);
            let seconds = measure(rank, &world, &device, key, options, share)?;
            device.trim();
            if rank.rank() == 0 {
                progress(Progress {
                    done: done + 1,
                    total: keys.len(),
                    key,
                    median_s: median(seconds.clone()),
                });
            }
            samples.push(Sample { key, seconds });
        }
        Ok(samples)
    })?;
    let samples = per_rank.into_iter().next().expect("at least one rank");
    let environment = Environment::detect(
        options.ranks,
        options.device.threads_per_rank(options.ranks) as u32,
    );
    Ok(Measured {
        profile: Profile {
            version: PROFILE_VERSION,
            device: environment.device.clone(),
            machine: environment.machine(),
            cores: environment.cores,
            concurrent_ranks: options.ranks,
            versions: vec![format!("moefold {}", environment.moefold)],
            clocks: String::new(),
            date: environment.date,
            command: environment.command.join(" "),
            samples,
        },
        skipped,
    })
}

/// Splits keys into those that can be run here and those that cannot.
fn runnable(keys: Vec<Key>, ranks: u32) -> (Vec<Key>, Vec<(Key, &'static str)>) {
    let mut skipped = Vec::new();
    let mut runnable = Vec::new();
    for key in keys {
        let refused = match key {
            Key::Op(op) => ops::refusal(&op),
            Key::Collective(collective) => collectives::refusal(&collective, ranks),
        };
        match refused {
            None => runnable.push(key),
            Some(reason) => skipped.push((key, reason)),
        }
    }
    (runnable, skipped)
}

/// The samples of one key, seconds a run; the same on every rank.
fn measure(
    rank: &RankContext,
    world: &Communicator,
    device: &Device,
    key: Key,
    options: &ProfileOptions,
    share: Duration,
) -> Result<Vec<f64>, Error> {
    let mut work: Box<dyn FnMut() -> Result<(), TransportError>> = match key {
        Key::Op(op) => {
            let mut run = ops::prepare(device, &op);
            Box::new(move || {
                run();
                Ok(())
            })
        }
        Key::Collective(collective) => collectives::prepare(rank, device, &collective),
    };
    let began = Instant::now();
    // The first run touches memory for the first time; the second says how many make a batch.
    let first = batch(world, &mut work, 1)?;
    let once = batch(world, &mut work, 1)?.min(first);
    let runs = (BATCH.as_secs_f64() / once.max(1e-9)).ceil().max(1.0) as u64;
    let mut seconds = Vec::with_capacity(options.repeats);
    for sample in 0..options.warmup + options.repeats {
        let time = batch(world, &mut work, runs)? / runs as f64;
        if sample >= options.warmup {
            seconds.push(time);
        }
        let out_of_time = agree(world, began.elapsed() >= share)?;
        if out_of_time && seconds.len() >= SAMPLES_MIN.min(options.repeats) {
            break;
        }
    }
    Ok(seconds)
}

/// Runs `work` so many times on all ranks at once; the time of the slowest.
fn batch(
    world: &Communicator,
    work: &mut dyn FnMut() -> Result<(), TransportError>,
    runs: u64,
) -> Result<f64, Error> {
    world.barrier()?;
    let start = Instant::now();
    for _ in 0..runs {
        work()?;
    }
    let own = start.elapsed().as_nanos() as u64;
    let all = world.exchange_counts(&[own])?;
    let slowest = all.into_iter().flatten().max().unwrap_or(own);
    Ok(slowest as f64 * 1e-9)
}

/// Whether rank 0 says so: ranks must not disagree about what comes next.
fn agree(world: &Communicator, mine: bool) -> Result<bool, Error> {
    let all = world.exchange_counts(&[u64::from(mine)])?;
    Ok(all[0][0] == 1)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use moefold_profiles::units::Bytes;
    use moefold_profiles::{Collective, CollectiveKind, Dtype, Op, Pass};

    use super::*;

    fn collective(kind: CollectiveKind, ranks: u32) -> Key {
        Key::Collective(Collective {
            kind,
            bytes: Bytes(4096),
            ranks,
            ranks_per_domain: ranks,
        })
    }

    #[test]
    fn every_runnable_key_gets_samples_and_the_others_a_reason() {
        let gemm = |dtype| {
            Key::Op(Op::Gemm {
                m: 8,
                n: 16,
                k: 8,
                pass: Pass::Forward,
                dtype,
            })
        };
        let options = ProfileOptions {
            keys: vec![
                gemm(Dtype::F32),
                gemm(Dtype::F32),
                gemm(Dtype::Bf16),
                collective(CollectiveKind::AllReduce, 2),
                collective(CollectiveKind::AllToAll, 4),
                collective(CollectiveKind::AllReduce, 3),
                collective(CollectiveKind::SendRecv, 2),
            ],
            ranks: 4,
            device: DeviceSpec::Cpu {
                threads_per_rank: Some(1),
            },
            warmup: 0,
            repeats: 3,
            budget: Duration::ZERO,
        };
        let calls = AtomicUsize::new(0);
        let measured = run(&options, &|progress| {
            calls.fetch_add(1, Ordering::Relaxed);
            assert_eq!(progress.total, 3);
            assert!(progress.median_s > 0.0);
        })
        .expect("measures");
        assert_eq!(calls.into_inner(), 3);
        assert_eq!(measured.skipped.len(), 3, "{:?}", measured.skipped);
        let profile = measured.profile;
        assert_eq!((profile.samples.len(), profile.concurrent_ranks), (3, 4));
        for sample in &profile.samples {
            assert_eq!(sample.seconds.len(), 3);
            assert!(sample.seconds.iter().all(|s| *s > 0.0), "{sample:?}");
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        profile.save(folder.path()).expect("a valid profile");
        assert_eq!(Profile::load(folder.path()).expect("loads"), profile);
    }

    #[test]
    fn the_default_sweep_is_all_runnable() {
        for ranks in [1, 2, 4, 6, 8] {
            let (_, skipped) = runnable(default_sweep(ranks), ranks);
            assert!(skipped.is_empty(), "{ranks} ranks: {skipped:?}");
        }
    }
}
