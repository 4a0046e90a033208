//! Measures ops and collectives on this machine, for the planner's prices.
//!
//! What is best known is what training itself measures: [`rehearsal`] trains layouts for some steps, and
//! [`training`] makes samples of any run. The rest of this module times keys by themselves.
//!
//! On the CPU every key is run on all rank threads at once, as in training, so that what ranks take from each
//! other (caches, memory bandwidth) is in the numbers. An op is timed run by run, on operands that
//! [`Evict`] has put out of the core's own caches, by the rank's own clock: where ranks outnumber the
//! cores, by the time its thread ran, and ranks over cores times that. A sample of a collective is a batch of
//! back-to-back runs between two barriers, divided by their number, on the slowest rank.
//!
//! On a GPU an op is timed by the device ([`queued`]), and what it and its host cost each other is
//! measured apart ([`mod@host`]). Ranks that are threads share one GPU: one of them measures ops, since a
//! plan gives each rank a GPU, and the collectives are copies within one memory. Ranks that are processes
//! have a GPU each. They all measure ops, at the same time, and a sample is the slowest rank's: a step
//! waits for that one, and power, heat and the host are shared as in training. Their collectives are
//! those of the machine.
//!
//! Nothing is averaged over samples: a profile keeps them raw.

mod collectives;
mod evict;
mod host;
mod ops;
mod queued;
pub mod rehearsal;
mod sweep;
pub mod training;

use std::time::{Duration, Instant};

use moefold_kernels::Device;
use moefold_kernels::cases::Load;
use moefold_profiles::directory::{Key, OverheadBytes, Profile, Sample, Taken};
use moefold_profiles::statistics::median;
use moefold_profiles::{Op, presets};
use serde::{Deserialize, Serialize};

pub use training::Measurements;

pub use sweep::{default_sweep, gpu_sweep, host_keys};

use self::collectives::{Groups, Machines};
use self::evict::Evict;
use crate::clock::Clock;
use crate::device::DeviceSpec;
use crate::environment::{Environment, gpu_clocks};
use crate::error::Error;
use crate::transport::{Communicator, RankContext, TransportError, World};

/// Runs of an op on a CPU that make a sample.
const RUNS: u32 = 4;
/// A batch lasts at least this long: several time slices of a general-purpose scheduler.
const BATCH: Duration = Duration::from_millis(12);
/// Fewer samples than this say nothing about spread.
const SAMPLES_MIN: usize = 3;
/// What ranks tell each other beside the collectives that are measured, at most.
const WORDS_BYTES: u64 = 16 << 20;

/// What to measure and how.
#[derive(Debug, Clone)]
pub struct ProfileOptions {
    /// What to measure; duplicates are measured once.
    pub keys: Vec<Key>,
    /// Ranks that run at the same time.
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

impl ProfileOptions {
    /// How long a rank may have to wait for another that still measures.
    pub fn longest_wait(&self) -> Duration {
        self.budget + Duration::from_mins(10)
    }
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
    pub skipped: Skipped,
}

/// Keys that are not measured, with why.
pub type Skipped = Vec<(Key, &'static str)>;

/// Measures every key on ranks that are threads of this process; `progress` is called on rank 0.
pub fn run(
    options: &ProfileOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Measured, Error> {
    let world = World::threads(options.ranks).deadline(options.longest_wait());
    let measured = run_in(&world, options, progress)?;
    Ok(measured.expect("rank 0 is a thread of this process"))
}

/// Measures every key on the ranks of `world`, as many as the options say. Where rank 0 is elsewhere,
/// nothing is returned: the profile is its process's.
pub fn run_in(
    world: &World,
    options: &ProfileOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Option<Measured>, Error> {
    assert_eq!(world.ranks(), options.ranks, "ranks that run");
    let mut keys = options.keys.clone();
    keys.sort_unstable();
    keys.dedup();
    let before = clocks(&options.device);
    let collectives = keys.iter().filter_map(|key| match key {
        Key::Collective(collective) => Some(collective.bytes.0),
        _ => None,
    });
    // One is under way, and a member may be at the next.
    let most = collectives.max().unwrap_or(0).saturating_mul(4);
    let world = world.clone().on_the_way(most.saturating_add(WORDS_BYTES));
    let taken = world.run(|rank| take(rank, options, &keys, progress))?;
    if !world.has_first() {
        return Ok(None);
    }
    let first = taken.into_iter().next().expect("at least one rank");
    let clocks = [("before", before), ("after", clocks(&options.device))]
        .into_iter()
        .filter_map(|(when, said)| said.map(|said| format!("{when}: {said}")))
        .collect::<Vec<_>>()
        .join("; ");
    let environment = Environment::detect(options.ranks, &options.device);
    Ok(Some(Measured {
        profile: first.device.profile(&environment, clocks, first.samples),
        skipped: first.skipped,
    }))
}

/// What one rank brought.
struct Brought {
    samples: Vec<Sample>,
    skipped: Skipped,
    device: Described,
}

/// A rank's device, as far as a profile says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Described {
    /// The vendor's name of its GPU.
    name: Option<String>,
    overhead: Option<OverheadBytes>,
    pub(crate) local_ranks: u32,
    /// Whether it is a GPU that the ranks share.
    shared: bool,
}

impl Described {
    /// `device` of `rank`, with what has been taken of its memory.
    pub(crate) fn of(rank: &RankContext, device: &Device) -> Self {
        let name = device.properties().map(|of| of.name.clone());
        Self {
            shared: name.is_some() && rank.ranks() > 1 && !rank.is_apart(),
            name,
            overhead: device.overhead().map(|taken| OverheadBytes {
                context: taken.context,
                workspaces: taken.workspaces,
                other: taken.other,
                others: taken.others,
            }),
            local_ranks: rank.local_ranks(),
        }
    }

    /// Samples that were taken on it.
    pub(crate) fn profile(
        self,
        environment: &Environment,
        clocks: String,
        samples: Vec<Sample>,
    ) -> Profile {
        let preset = self.name.as_deref().map(presets::gpu_name);
        Profile {
            device_name: self.name,
            shared_device: self.shared,
            overhead: self.overhead,
            machine: environment.machine(),
            cores: environment.cores,
            concurrent_ranks: self.local_ranks,
            versions: environment.versions(),
            clocks,
            date: environment.date.clone(),
            command: environment.command.join(" "),
            ..Profile::of(preset.as_deref().unwrap_or("cpu"), samples)
        }
    }
}

/// One rank's samples of all keys.
fn take(
    rank: &RankContext,
    options: &ProfileOptions,
    keys: &[Key],
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Brought, Error> {
    let ordinal = rank.gpu() as usize;
    let device = options.device.open(ordinal, rank.local_ranks())?;
    let rank = &rank.on(&device);
    let everyone: Vec<u32> = (0..rank.ranks()).collect();
    let world = rank.communicator("world", &everyone);
    expect_alike(&world, &device)?;
    let machines = Machines::find(rank, &world)?;
    let taker = Taker {
        rank,
        world,
        machines,
        groups: Groups::new(rank, machines),
        flush: queued::Flush::new(&device),
        device: &device,
        options,
    };
    let (wanted, skipped) = taker.wanted(keys);
    let samples = taker.samples(&wanted, progress)?;
    Ok(Brought {
        samples,
        skipped,
        // After everything was run.
        device: Described::of(rank, &device),
    })
}

/// Refuses devices of several kinds: a profile is of one.
fn expect_alike(world: &Communicator, device: &Device) -> Result<(), Error> {
    let name = device.properties().map_or("", |of| &of.name);
    let own: Vec<u64> = name.bytes().map(u64::from).collect();
    let all = world.exchange_counts(&own)?;
    let Some(other) = all.iter().position(|name| *name != all[0]) else {
        return Ok(());
    };
    let name = |rank: usize| -> String {
        let bytes: Vec<u8> = all[rank].iter().map(|&byte| byte as u8).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Err(Error::Request(format!(
        "rank 0 has a GPU {:?} and rank {other} a {:?}, and a profile is of one kind: measure each kind \
         on its own, with CUDA_VISIBLE_DEVICES or fewer ranks",
        name(0),
        name(other)
    )))
}

/// Clocks, temperature and power of the GPUs now, where the driver's tool says; none of a CPU.
fn clocks(device: &DeviceSpec) -> Option<String> {
    (device.name() == "cuda").then(gpu_clocks).flatten()
}

/// Rows of the fullest group over the mean.
fn skew(key: &Key) -> f64 {
    let Key::Op(Op::GroupedGemm { rows, groups, .. }) = *key else {
        return 1.0;
    };
    let counts = Load::Skewed.counts(rows as usize, groups as usize);
    let fullest = counts.into_iter().max();
    fullest.unwrap_or(0) as f64 * groups as f64 / rows.max(1) as f64
}

/// One rank, measuring.
struct Taker<'a> {
    rank: &'a RankContext,
    world: Communicator,
    machines: Machines,
    groups: Groups<'a>,
    flush: queued::Flush<'a>,
    device: &'a Device,
    options: &'a ProfileOptions,
}

impl Taker<'_> {
    /// What can be measured here, and of grouped products with uneven groups too; what cannot, with
    /// why. The same on every rank.
    fn wanted(&self, keys: &[Key]) -> (Vec<(Key, bool)>, Skipped) {
        let (mut wanted, mut skipped) = (Vec::new(), Vec::new());
        for &key in keys {
            let refused = match key {
                Key::Op(op) => ops::refusal(self.device, &op),
                Key::Collective(collective) => self.machines.refusal(&collective),
                Key::Host(_) => host::refusal(self.device),
            };
            if let Some(reason) = refused {
                skipped.push((key, reason));
                continue;
            }
            wanted.push((key, false));
            let grouped = matches!(key, Key::Op(Op::GroupedGemm { groups: 2.., .. }));
            wanted.extend((grouped && self.is_queued()).then_some((key, true)));
        }
        (wanted, skipped)
    }

    /// Samples of the keys, in the time that the options give from here on: the ranks have met.
    fn samples(
        &self,
        wanted: &[(Key, bool)],
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Vec<Sample>, Error> {
        let started = Instant::now();
        let mut samples = Vec::with_capacity(wanted.len());
        for (done, &(key, skewed)) in wanted.iter().enumerate() {
            let left = self.options.budget.saturating_sub(started.elapsed());
            let share = left.div_f64((wanted.len() - done) as f64);
            let Some(seconds) = self.measure(key, skewed, share)? else {
                continue;
            };
            self.device.trim();
            if self.rank.rank() == 0 {
                progress(Progress {
                    done: done + 1,
                    total: wanted.len(),
                    key,
                    median_s: median(seconds.clone()).unwrap_or(0.0),
                });
            }
            let taken = match key {
                Key::Op(_) => Taken::Cold,
                Key::Collective(_) | Key::Host(_) => Taken::Repeated,
            };
            samples.push(Sample {
                skew: skewed.then(|| skew(&key)),
                ..Sample::of(key, taken, seconds)
            });
        }
        Ok(samples)
    }

    fn is_queued(&self) -> bool {
        self.device.properties().is_some()
    }

    /// The samples of one key, seconds a run; nothing on a rank that has no part in it.
    fn measure(&self, key: Key, skewed: bool, share: Duration) -> Result<Option<Vec<f64>>, Error> {
        let mut work: Box<dyn FnMut() -> Result<(), TransportError>> = match key {
            Key::Op(_) | Key::Host(_) if self.shares_device() && self.rank.rank() > 0 => {
                return Ok(None);
            }
            Key::Op(op) if self.is_queued() => {
                let seconds = queued::measure(&self.flush, &op, skewed, self.options, share);
                return self.slowest(seconds).map(Some);
            }
            Key::Host(cost) => {
                let ordinal = self.rank.gpu() as usize;
                let seconds = host::measure(self.device, ordinal, cost, self.options, share)?;
                return self.slowest(seconds).map(Some);
            }
            Key::Op(op) => return self.cold(&op, share).map(Some),
            Key::Collective(collective) => self.groups.prepare(self.device, &collective),
        };
        self.together(&mut work, share).map(Some)
    }

    /// Whether all ranks have one GPU, and so only one of them measures what one rank does.
    fn shares_device(&self) -> bool {
        self.is_queued() && !self.rank.is_apart()
    }

    /// Of samples that every rank took on a GPU of its own, the slowest ones: as many as all have.
    fn slowest(&self, own: Vec<f64>) -> Result<Vec<f64>, Error> {
        if self.shares_device() {
            return Ok(own);
        }
        let words: Vec<u64> = own.iter().map(|seconds| seconds.to_bits()).collect();
        let all = self.world.exchange_counts(&words)?;
        let count = all.iter().map(|rank| rank.len()).min().unwrap_or(0);
        let at = |i: usize| all.iter().map(move |rank| f64::from_bits(rank[i]));
        Ok((0..count).map(|i| at(i).fold(0.0, f64::max)).collect())
    }

    /// The samples of an op that every rank runs on cold operands, all ranks' in one list.
    fn cold(&self, op: &Op, share: Duration) -> Result<Vec<f64>, Error> {
        let began = Instant::now();
        let stretch = self.options.device.stretch(self.rank.local_ranks());
        let clock = Clock::new(began, stretch);
        let mut evict = Evict::new();
        let mut run = ops::prepare(self.device, op);
        // It touches memory for the first time.
        run();
        let mut own = Vec::with_capacity(self.options.repeats);
        for sample in 0..self.options.warmup + self.options.repeats {
            let ns = cold_ns(&clock, &mut || evict.run(), &mut run);
            if sample >= self.options.warmup {
                own.push(clock.counted(ns).0.max(1e-9) / f64::from(RUNS));
            }
            let out_of_time = agree(&self.world, began.elapsed() >= share)?;
            if out_of_time && own.len() >= SAMPLES_MIN.min(self.options.repeats) {
                break;
            }
        }
        let words: Vec<u64> = own.iter().map(|seconds| seconds.to_bits()).collect();
        let all = self.world.exchange_counts(&words)?;
        Ok(all
            .iter()
            .flat_map(|rank| rank.iter())
            .map(|&word| f64::from_bits(word))
            .collect())
    }

    /// The samples of what all ranks run at once, the same on every rank.
    fn together(
        &self,
        work: &mut dyn FnMut() -> Result<(), TransportError>,
        share: Duration,
    ) -> Result<Vec<f64>, Error> {
        let began = Instant::now();
        // The first run touches memory for the first time; the second says how many make a batch.
        let first = self.batch(work, 1)?;
        let once = self.batch(work, 1)?.min(first);
        let runs = (BATCH.as_secs_f64() / once.max(1e-9)).ceil().max(1.0) as u64;
        let mut seconds = Vec::with_capacity(self.options.repeats);
        for sample in 0..self.options.warmup + self.options.repeats {
            let time = self.batch(work, runs)? / runs as f64;
            if sample >= self.options.warmup {
                seconds.push(time);
            }
            let out_of_time = agree(&self.world, began.elapsed() >= share)?;
            if out_of_time && seconds.len() >= SAMPLES_MIN.min(self.options.repeats) {
                break;
            }
        }
        Ok(seconds)
    }

    /// Runs `work` so many times on all ranks at once; the time of the slowest.
    fn batch(
        &self,
        work: &mut dyn FnMut() -> Result<(), TransportError>,
        runs: u64,
    ) -> Result<f64, Error> {
        self.device.synchronize();
        self.world.barrier()?;
        let start = Instant::now();
        for _ in 0..runs {
            work()?;
        }
        self.device.synchronize();
        let own = start.elapsed().as_nanos() as u64;
        let all = self.world.exchange_counts(&[own])?;
        let slowest = all.iter().flat_map(|rank| rank.iter()).max();
        let slowest = *slowest.unwrap_or(&own);
        Ok(slowest as f64 * 1e-9)
    }
}

/// Nanoseconds of the runs of a sample, before each of which `evict` puts the operands out of the caches.
fn cold_ns(clock: &Clock, evict: &mut dyn FnMut(), run: &mut dyn FnMut()) -> u64 {
    let mut ns = 0;
    for _ in 0..RUNS {
        evict();
        let start = clock.own_ns();
        run();
        ns += clock.own_ns() - start;
    }
    ns
}

/// Whether rank 0 says so: ranks must not disagree about what comes next.
fn agree(world: &Communicator, mine: bool) -> Result<bool, Error> {
    let all = world.exchange_counts(&[u64::from(mine)])?;
    Ok(all[0][0] == 1)
}

#[cfg(test)]
mod tests;
