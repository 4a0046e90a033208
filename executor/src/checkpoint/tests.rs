//! Runs that save, stop and go on, by topic; here is what they are made of.

mod damage;
mod layouts;
mod resume;
mod saving;

use std::fs;
use std::path::{Path, PathBuf};

use moefold_kernels::Dtype;
use moefold_planner::choice::{HostShare, Masters, Optimizer, Overlap, ScheduleName, Zero};
use moefold_planner::layout::{Batch, Degrees, Layout};
use moefold_planner::model::{Model, hf};
use moefold_planner::plan::LayoutRecord;
use moefold_profiles::Precision;

use super::*;
use crate::control::{Control, Watch};
use crate::data::TokenStream;
use crate::device::DeviceSpec;
use crate::lr::LearningRate;
use crate::model::global_tensors;
use crate::moe::balance::Balancing;
use crate::optimizer::AdamOptions;
use crate::options::{Init, Saving};
use crate::train::{self, Data, Trained};
use crate::transport::World;
use crate::unpriced::planned;

const SEQ_LEN: u64 = 16;

const CPU: DeviceSpec = DeviceSpec::Cpu {
    threads_per_rank: Some(1),
};

/// A fixture to train, and how.
struct Bench {
    model: Model,
    samples: Samples,
    batch: Batch,
    options: TrainOptions,
    optimizer: Optimizer,
    masters: Masters,
    on_host: HostShare,
    /// Pipeline ranks, and stages of each.
    pipeline: [u32; 2],
    /// The schedule, where it is not the usual one of these.
    schedule: Option<ScheduleName>,
    /// Context-parallel ranks.
    cp: u32,
    /// Elements that a bucket has at least, where gradients are reduced in several.
    bucket: Option<u64>,
    /// What data parallelism divides.
    zero: Zero,
}

impl Bench {
    fn new(name: &str, global_batch: u64) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let model = hf::read(&folder.join(name)).expect("a fixture");
        let stream = TokenStream::indexed(&folder.join(name).join("tokens")).expect("tokens");
        let order = Order::Shuffled { seed: 3 };
        let samples = Samples::new(stream, SEQ_LEN, model.vocab_size, order).expect("enough");
        let steps = 8;
        Self {
            model,
            samples,
            batch: Batch {
                seq_len: SEQ_LEN,
                global_batch,
            },
            options: TrainOptions {
                steps,
                lr: LearningRate {
                    warmup: 2,
                    decay: Decay::Cosine,
                    steps,
                    ..LearningRate::constant(3e-3)
                },
                adam: AdamOptions::default(),
                balancing: Balancing::default(),
                mtp_loss_scaling_factor: crate::options::MTP_LOSS_SCALING_FACTOR,
                seed: 1,
                init: Init::Random,
                device: CPU,
                traced_steps: 0..0,
                save: None,
            },
            optimizer: Optimizer::Adam,
            masters: Masters::default(),
            on_host: HostShare::default(),
            pipeline: [1, 1],
            schedule: None,
            cp: 1,
            bucket: None,
            zero: Zero::States,
        }
    }

    /// The same with its layers again and again, so many in all.
    fn with_layers(mut self, layers: usize) -> Self {
        let all = std::mem::take(&mut self.model.layers);
        self.model.layers = all.into_iter().cycle().take(layers).collect();
        self
    }

    /// The same, saving into `run_dir`.
    fn saving(&self, every: u64, run_dir: &Path) -> TrainOptions {
        TrainOptions {
            save: Some(Saving {
                every: Some(every),
                run_dir: run_dir.to_owned(),
            }),
            ..self.options.clone()
        }
    }

    /// The same under a pipeline of so many ranks and stages of each.
    fn piped(mut self, pipeline: [u32; 2]) -> Self {
        self.pipeline = pipeline;
        self
    }

    /// The same under a schedule of these.
    fn under(mut self, schedule: ScheduleName) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// The same with gradients reduced and weights gathered in buckets, beside compute.
    fn bucketed(mut self, least: Option<u64>) -> Self {
        self.bucket = least;
        self
    }

    /// The same where data parallelism divides this, weights gathered beside compute.
    fn dividing(mut self, zero: Zero) -> Self {
        self.zero = zero;
        self
    }

    /// The same with sequences cut over so many ranks.
    fn cut(mut self, cp: u32) -> Self {
        self.cp = cp;
        self
    }

    fn stages(&self, layout: &Layout) -> Vec<Vec<u32>> {
        planned(&self.model, LayoutRecord::from(layout))
            .pipeline
            .stages
    }

    fn layout(&self, degrees: [u32; 5]) -> Layout {
        let [gpus, tp, ep, etp, mbs] = degrees;
        let [pp, vpp] = self.pipeline;
        let degrees = Degrees {
            gpus,
            tp,
            cp: self.cp,
            pp,
            vpp,
            ep,
            etp,
            mbs,
        };
        let layout = Layout::new(&degrees, &self.model, &self.batch).expect("a legal layout");
        layout.under(self.schedule.unwrap_or(ScheduleName::of(pp, vpp)))
    }

    fn train(&self, degrees: [u32; 5], options: &TrainOptions) -> Result<Trained, Error> {
        let watch = Watch {
            on_step: &|_| Ok(()),
            on_note: &|note| panic!("{note}"),
            control: &Control::default(),
        };
        self.train_watched(degrees, options, watch)
    }

    fn train_watched(
        &self,
        degrees: [u32; 5],
        options: &TrainOptions,
        watch: Watch<'_>,
    ) -> Result<Trained, Error> {
        let layout = self.layout(degrees);
        let mut plan = planned(&self.model, LayoutRecord::from(&layout));
        let usual = plan.pipeline.schedule;
        plan.pipeline.schedule = self.schedule.unwrap_or(usual);
        plan.precision = match options.device.dtype() {
            Dtype::Bf16 => Precision::Bf16,
            _ => Precision::Fp32,
        };
        plan.optimizer = self.optimizer;
        plan.masters = Some(self.masters);
        plan.optimizer_offload_fraction = Some(self.on_host);
        plan.bucket_elements = self.bucket;
        plan.zero = (self.zero != Zero::default()).then_some(self.zero);
        let beside = self.bucket.is_some() || plan.zero.is_some();
        let combines = plan.pipeline.schedule.combines();
        plan.overlap = (beside || combines).then_some(Overlap {
            grad_reduce: beside,
            param_gather: beside,
            expert_alltoall: combines,
            delay_wgrad: combines,
            ..Overlap::default()
        });
        let (model, batch) = (&self.model, &self.batch);
        let data = Data {
            training: &self.samples,
            validation: None,
        };
        let world = World::threads(layout.gpus());
        let trained = train::run_in(&world, &plan, model, batch, options, data, true, watch)?;
        Ok(trained.expect("rank 0 is a thread of this process"))
    }

    /// Goes on from `dir`.
    fn resume(&self, degrees: [u32; 5], dir: &Path, options: &TrainOptions) -> Trained {
        let options = TrainOptions {
            init: from(dir),
            ..options.clone()
        };
        let resumed = self.train(degrees, &options);
        resumed.unwrap_or_else(|error| panic!("{degrees:?}: {error}"))
    }

    fn weights(&self, trained: &Trained) -> Vec<f32> {
        let tensors = global_tensors(&self.model).into_iter();
        tensors.flat_map(|t| trained.weights.get(&t)).collect()
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// To go on from the checkpoint in `dir`; how many steps it has is read from it.
fn from(dir: &Path) -> Init {
    Init::Resume(Resumed {
        checkpoint: dir.to_owned(),
        step: 0,
    })
}

fn step_dir(run: &Path, step: u64) -> PathBuf {
    folder_of(&run.join(FOLDER), step)
}

/// A run of four steps with a checkpoint after each, of which the last two are left.
fn saved_run(bench: &mut Bench) -> tempfile::TempDir {
    bench.options.steps = 4;
    bench.options.lr = LearningRate::constant(1e-3);
    let run = folder();
    let trained = bench.train([4, 2, 4, 1, 2], &bench.saving(1, run.path()));
    let written: Vec<u64> = trained
        .expect("trains")
        .checkpoints
        .iter()
        .map(|written| written.step)
        .collect();
    assert_eq!(written, [1, 2, 3, 4]);
    run
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("readable").file_name().display().to_string())
        .collect();
    names.sort();
    names
}
