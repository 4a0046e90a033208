//! [`run`]: trains under a plan, on ranks that are threads of this process.
//!
//! The entry point of the crate: refuses what is not implemented, starts the ranks, and reads as one
//! step after another. Writing a run directory is [`crate::run`]'s business; a caller that wants to
//! hold the ranks itself uses [`Trainer`].

use std::collections::BTreeMap;
use std::path::PathBuf;

use moefold_planner::layout::Batch;
use moefold_planner::model::Model;
use moefold_planner::schedule::{Schedule, Stage};

use crate::data::Samples;
use crate::error::Error;
use crate::lr::LearningRate;
use crate::model::{Holding, Shard, Slice};
use crate::moe::router::AuxLoss;
use crate::optimizer::{AdamOptions, ZeroAdam};
use crate::rank::Context;
use crate::stage::StageModel;
use crate::step::{HostTokens, StepOutcome, Stepper};
use crate::store::Store;

/// Where initial weights come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Init {
    /// Drawn from the seed, by global coordinates: the same under every layout.
    #[default]
    Random,
    /// A Hugging Face checkpoint folder.
    HuggingFace(PathBuf),
}

/// How to train, besides the plan.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// Steps to run.
    pub steps: u64,
    /// Learning rate by step.
    pub lr: LearningRate,
    /// Optimizer constants.
    pub adam: AdamOptions,
    /// Coefficient of the load-balancing loss; 0 is off.
    pub aux_loss_coef: f64,
    /// Seed of random weights.
    pub seed: u64,
    /// Initial weights.
    pub init: Init,
    /// CPU threads of each rank; absent, the machine's cores are shared out evenly.
    pub threads_per_rank: Option<usize>,
}

/// Gives the values of one slice of a global tensor, row-major.
pub type WeightSource<'a> = dyn Fn(&Slice) -> Result<Vec<f32>, Error> + 'a;

/// One rank, ready to step.
#[derive(Debug)]
pub struct Trainer {
    /// Its place.
    pub cx: Context,
    stepper: Stepper,
}

impl Trainer {
    /// Allocates the rank's shard and fills it. The model and layout must have passed
    /// [`crate::support::check`].
    pub fn new(
        cx: Context,
        model: &Model,
        seq_len: u64,
        options: &TrainOptions,
        weights: &WeightSource<'_>,
    ) -> Result<Self, Error> {
        let holding = Holding::whole(model);
        let shard = Shard::new(model, &cx.layout, &cx.at, &holding);
        let store = Store::new(&cx.device, shard);
        store.fill(weights)?;
        let aux = (options.aux_loss_coef > 0.0).then(|| AuxLoss {
            coefficient: options.aux_loss_coef,
            microbatches: cx.layout.microbatches(),
        });
        let stage = StageModel::new(model, &store, &holding, aux);
        let optimizer = ZeroAdam::new(&cx, &store, options.adam);
        let schedule = Schedule::of(&cx.layout);
        let actions = schedule.ranks[cx.at.pp as usize].clone();
        let stages = BTreeMap::from([(Stage(0), stage)]);
        let stepper = Stepper::new(&cx, model, store, stages, optimizer, actions, seq_len as usize);
        Ok(Self { cx, stepper })
    }

    /// Runs one step on the rank's part of a global batch.
    pub fn step(&mut self, microbatches: &[HostTokens], lr: f64) -> Result<StepOutcome, Error> {
        self.stepper.step(&self.cx, microbatches, lr)
    }

    /// The rank's weights and gradients.
    pub fn store(&self) -> &Store {
        &self.stepper.store
    }
}

/// The microbatches of a rank in a step: microbatch `m` of data-parallel rank `d` takes the samples
/// `(m * DP + d) * mbs ..` of the step's, `mbs` of them.
pub fn microbatches(
    samples: &Samples,
    cx: &Context,
    batch: &Batch,
    step: u64,
) -> Result<Vec<HostTokens>, Error> {
    let layout = &cx.layout;
    let mbs = u64::from(layout.mbs());
    let first = Samples::of_step(step, batch.global_batch).start;
    (0..u64::from(layout.microbatches()))
        .map(|microbatch| {
            let block = microbatch * u64::from(layout.dp()) + u64::from(cx.at.dp);
            let mut tokens = HostTokens {
                ids: Vec::new(),
                targets: Vec::new(),
            };
            for sample in 0..mbs {
                let sample = samples.get(first + block * mbs + sample)?;
                tokens.ids.extend(sample.inputs);
                tokens.targets.extend(sample.targets);
            }
            Ok(tokens)
        })
        .collect()
}
