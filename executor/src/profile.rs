//! Measures ops and collectives on this machine, for the planner's prices.
//!
//! On the CPU every key is run on all rank threads at once, as in training, so that what ranks take from each
//! other (cores, caches, memory bandwidth) is in the numbers. A sample is a batch of back-to-back
//! runs between two barriers, divided by their number, on the slowest rank: a batch is much longer
//! than a scheduler's time slice, so ranks that outnumber the cores are charged for waiting their
//! turn. Successive runs use different memory, since in training an op rarely finds its weights in
//! a cache. On a GPU an op is run by one rank and timed by the device ([`queued`]), what it and its
//! host cost each other is measured apart ([`mod@host`]), and collectives are those of ranks that share
//! the device. Nothing is averaged over samples: a profile keeps them raw.

mod collectives;
mod host;
mod ops;
mod queued;
mod sweep;

use std::time::{Duration, Instant};

use moefold_kernels::Device;
use moefold_profiles::directory::{Key, OverheadBytes, PROFILE_VERSION, Profile, Sample};
use moefold_profiles::{Op, presets};

pub use sweep::{default_sweep, gpu_sweep, host_keys};

use crate::device::DeviceSpec;
use crate::environment::{Environment, gpu_clocks};
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
    pub skipped: Skipped,
}

/// Keys that are not measured, with why.
pub type Skipped = Vec<(Key, &'static str)>;

/// Measures every key; `progress` is called on rank 0.
pub fn run(
    options: &ProfileOptions,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Measured, Error> {
    let mut keys = options.keys.clone();
    keys.sort_unstable();
    keys.dedup();
    let started = Instant::now();
    let before = clocks(&options.device);
    // Ranks that wait while one measures alone are not lost.
    let deadline = options.budget + Duration::from_mins(10);
    let world = World::threads(options.ranks).deadline(deadline);
    let per_rank = world.run(|rank| {
        let device = options.device.open(0, options.ranks)?;
        let everyone: Vec<u32> = (0..rank.ranks()).collect();
        let taker = Taker {
            rank,
            world: rank.communicator("world", &everyone),
            flush: queued::Flush::new(&device),
            device: &device,
            options,
        };
        let (wanted, skipped) = taker.wanted(&keys);
        let mut samples = Vec::with_capacity(wanted.len());
        for (done, &(key, skewed)) in wanted.iter().enumerate() {
            let left = options.budget.saturating_sub(started.elapsed());
            let share = left.div_f64((wanted.len() - done) as f64);
            let Some(seconds) = taker.measure(key, skewed, share)? else {
                continue;
            };
            device.trim();
            if rank.rank() == 0 {
                progress(Progress {
                    done: done + 1,
                    total: wanted.len(),
                    key,
                    median_s: median(seconds.clone()),
                });
            }
            samples.push(Sample {
                key,
                skew: skewed.then(|| skew(&key)),
                seconds,
            });
        }
        let name = device
            .properties()
            .map(|properties| properties.name.clone());
        // Of the rank whose device ran everything, after it did.
        let overhead = device.overhead().map(|taken| OverheadBytes {
            context: taken.context,
            workspaces: taken.workspaces,
            other: taken.other,
        });
        Ok((samples, skipped, name, overhead))
    })?;
    let first = per_rank.into_iter().next().expect("at least one rank");
    let (samples, skipped, device_name, overhead) = first;
    let environment = Environment::detect(options.ranks, &options.device);
    let on_gpu = device_name.is_some();
    let clocks = [("before", before), ("after", clocks(&options.device))]
        .into_iter()
        .filter_map(|(when, said)| said.map(|said| format!("{when}: {said}")))
        .collect::<Vec<_>>()
        .join("; ");
    Ok(Measured {
        profile: Profile {
            version: PROFILE_VERSION,
            device: device_name
                .as_deref()
                .map_or_else(|| "cpu".to_owned(), presets::gpu_name),
            device_name,
            shared_device: on_gpu && options.ranks > 1,
            overhead,
            machine: environment.machine(),
            cores: environment.cores,
            concurrent_ranks: options.ranks,
            versions: environment.versions(),
            clocks,
            date: environment.date,
            command: environment.command.join(" "),
            samples,
        },
        skipped,
    })
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
    let fullest = ops::group_rows(rows, groups, true).into_iter().max();
    fullest.unwrap_or(0) as f64 * groups as f64 / rows.max(1) as f64
}

/// One rank, measuring.
struct Taker<'a> {
    rank: &'a RankContext,
    world: Communicator,
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
                Key::Collective(collective) => {
                    collectives::refusal(&collective, self.options.ranks)
                }
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

    fn is_queued(&self) -> bool {
        self.device.properties().is_some()
    }

    /// The samples of one key, seconds a run; nothing on a rank that has no part in it. On a GPU
    /// rank 0 measures ops alone: a plan gives each rank a GPU.
    fn measure(&self, key: Key, skewed: bool, share: Duration) -> Result<Option<Vec<f64>>, Error> {
        let mut work: Box<dyn FnMut() -> Result<(), TransportError>> = match key {
            Key::Op(_) | Key::Host(_) if self.is_queued() && self.rank.rank() > 0 => {
                return Ok(None);
            }
            Key::Op(op) if self.is_queued() => {
                let seconds = queued::measure(&self.flush, &op, skewed, self.options, share);
                return Ok(Some(seconds));
            }
            Key::Host(cost) => {
                return host::measure(self.device, cost, self.options, share).map(Some);
            }
            Key::Op(op) => {
                let mut run = ops::prepare(self.device, &op);
                Box::new(move || {
                    run();
                    Ok(())
                })
            }
            Key::Collective(collective) => {
                collectives::prepare(self.rank, self.device, &collective)
            }
        };
        self.together(&mut work, share).map(Some)
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
        let slowest = all.into_iter().flatten().max().unwrap_or(own);
        Ok(slowest as f64 * 1e-9)
    }
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
    use moefold_profiles::{Collective, CollectiveKind, Dtype, Pass};

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
        let device = Device::cpu(1);
        for ranks in [1, 2, 4, 6, 8] {
            for key in default_sweep(ranks) {
                let refused = match key {
                    Key::Op(op) => ops::refusal(&device, &op),
                    Key::Collective(collective) => collectives::refusal(&collective, ranks),
                    Key::Host(_) => Some("a host cost"),
                };
                assert_eq!(refused, None, "{ranks} ranks: {key:?}");
            }
        }
    }

    /// An op of every kind, tiny.
    fn tiny_ops() -> Vec<Op> {
        let dtype = Dtype::Bf16;
        let pass = Pass::Backward;
        let (rows, dim) = (16, 64);
        let grouped = |pass| Op::GroupedGemm {
            groups: 3,
            rows: 32,
            n: 64,
            k: 32,
            pass,
            dtype,
        };
        let gemm = |pass| Op::Gemm {
            m: 32,
            n: 64,
            k: 32,
            pass,
            dtype,
        };
        vec![
            gemm(Pass::Forward),
            gemm(Pass::Wgrad),
            grouped(Pass::Forward),
            grouped(Pass::Wgrad),
            Op::Attention {
                batch: 1,
                heads: 2,
                kv_heads: 1,
                q_len: 16,
                kv_len: 16,
                qk_dim: 64,
                v_dim: 64,
                causal: true,
                pass,
                dtype,
            },
            Op::RmsNorm {
                rows,
                dim,
                pass,
                dtype,
            },
            Op::Swiglu {
                rows,
                dim,
                pass,
                dtype,
            },
            Op::Router {
                rows,
                experts: 8,
                topk: 2,
                pass,
            },
            Op::Permute {
                rows,
                dim,
                pass,
                dtype,
            },
            Op::Embedding {
                rows,
                dim,
                pass,
                dtype,
            },
            Op::CrossEntropy {
                rows,
                vocab: 64,
                pass,
                dtype,
            },
            Op::Adamw { len: 256, dtype },
            Op::GradNorm { len: 256 },
        ]
    }

    /// On a device with a queue: every kind of op, uneven groups, and what the host costs.
    #[test]
    fn an_emulated_gpu_is_profiled_and_its_profile_prices_plans() {
        use moefold_kernels::cuda::Architecture;
        use moefold_profiles::host::{Direction, HostCost};
        use moefold_profiles::{Costs, Source};

        let device = DeviceSpec::Emulated {
            architecture: Architecture::SM90,
            dtype: Dtype::Bf16,
            seed: 1,
        };
        if device.open(0, 1).is_err() {
            return;
        }
        let copy = |direction| HostCost::Copy {
            bytes: Bytes(1 << 16),
            direction,
        };
        let ops = tiny_ops();
        let costs = [
            HostCost::Launch,
            HostCost::Read,
            copy(Direction::ToDevice),
            copy(Direction::Both),
        ];
        let f32_gemm = Key::Op(Op::Gemm {
            m: 8,
            n: 8,
            k: 8,
            pass: Pass::Forward,
            dtype: Dtype::F32,
        });
        let options = ProfileOptions {
            keys: ops
                .iter()
                .map(|op| Key::Op(*op))
                .chain(costs.map(Key::Host))
                .chain([f32_gemm])
                .collect(),
            ranks: 1,
            device,
            warmup: 0,
            repeats: 1,
            budget: Duration::ZERO,
        };
        let measured = run(&options, &|_| ()).expect("measures");
        let reason = "the device was opened in bf16";
        assert_eq!(measured.skipped, [(f32_gemm, reason)]);
        let profile = measured.profile;
        assert!(profile.device_name.is_some() && !profile.shared_device);
        let skewed: Vec<f64> = profile.samples.iter().filter_map(|s| s.skew).collect();
        // Of 32 rows over 3 groups, 22, 10 and none.
        assert_eq!(skewed, [22.0 * 3.0 / 32.0; 2]);
        let even = profile.samples.len() - skewed.len();
        assert_eq!(even, ops.len() + costs.len());
        let folder = tempfile::tempdir().expect("a temporary folder");
        profile.save(folder.path()).expect("a valid profile");
        let profile = Profile::load(folder.path()).expect("loads");

        let mut cluster = presets::cluster("dgx-h200").expect("a preset");
        cluster.gpu.name.clone_from(&profile.device);
        let costs = Costs::for_cluster(&cluster, &[profile]);
        for op in &ops {
            assert_eq!(costs.op(op).source, Source::Measured, "{op:?}");
        }
        assert!(costs.host().launch.is_some() && costs.host().read.is_some());
    }

    #[test]
    fn ranks_that_share_a_gpu_measure_their_collectives() {
        let device = DeviceSpec::Emulated {
            architecture: moefold_kernels::cuda::Architecture::SM80,
            dtype: Dtype::F32,
            seed: 2,
        };
        if device.open(0, 1).is_err() {
            return;
        }
        let gemm = Key::Op(Op::Gemm {
            m: 8,
            n: 8,
            k: 8,
            pass: Pass::Forward,
            dtype: Dtype::F32,
        });
        let options = ProfileOptions {
            keys: vec![
                gemm,
                collective(CollectiveKind::AllReduce, 2),
                collective(CollectiveKind::AllToAll, 2),
            ],
            ranks: 2,
            device,
            warmup: 0,
            repeats: 1,
            budget: Duration::ZERO,
        };
        let measured = run(&options, &|_| ()).expect("measures");
        assert!(measured.skipped.is_empty(), "{:?}", measured.skipped);
        assert!(measured.profile.shared_device);
        assert_eq!(measured.profile.samples.len(), 3);
    }
}
