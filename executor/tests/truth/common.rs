//! Fixtures, and training them under a layout: shared by the tests of the executor's truth.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use moefold_executor::data::{Order, Samples, TokenStream, Tokenizer};
use moefold_executor::device::DeviceSpec;
use moefold_executor::error::Error;
use moefold_executor::lr::LearningRate;
use moefold_executor::model::{Slice, global_tensors};
use moefold_executor::moe::balance::Balancing;
use moefold_executor::optimizer::AdamOptions;
use moefold_executor::options::{Init, Savers, TrainOptions};
use moefold_executor::rank::Context;
use moefold_executor::step::StepOutcome;
use moefold_executor::train::{self, Trainer};
use moefold_executor::transport::World;
use moefold_executor::weights::Source;
use moefold_kernels::{Device, Tensor};
use moefold_planner::choice::{CpComm, RecomputePlan, ScheduleName, StackName};
use moefold_planner::layout::{Batch, Degrees, Layout};
use moefold_planner::model::Model;
use moefold_planner::options::SearchOptions;
use moefold_planner::rules::Rules;
use serde::Deserialize;

/// How attention reaches the keys of other ranks here.
pub(crate) const WAYS: [CpComm; 3] = [CpComm::P2p, CpComm::A2a, CpComm::Allgather];

/// What a reference implementation did.
#[derive(Debug, Deserialize)]
pub(crate) struct Golden {
    pub(crate) seq_len: u64,
    pub(crate) global_batch: u64,
    pub(crate) lr: f64,
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    pub(crate) clip: f64,
    pub(crate) steps: Vec<GoldenStep>,
    /// Sum and L2 norm of every updated tensor.
    pub(crate) r#final: BTreeMap<String, (f64, f64)>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct GoldenStep {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    /// Of each depth of multi-token prediction.
    #[serde(default)]
    pub(crate) mtp_losses: Vec<f64>,
}

/// A fixture folder, read.
pub(crate) struct Fixture {
    pub(crate) name: &'static str,
    pub(crate) model: Model,
    pub(crate) golden: Golden,
    pub(crate) samples: Samples,
    /// What it gives time for memory with; nothing, as loaded.
    pub(crate) savers: Savers,
    /// How ranks are numbered.
    pub(crate) rank_order: moefold_planner::layout::Order,
    /// Where the weights are; absent, they are random.
    folder: Option<PathBuf>,
}

/// Global tensors by name, row-major.
pub(crate) type Tensors = BTreeMap<String, Vec<f32>>;

/// What a run gave.
pub(crate) struct Trained {
    pub(crate) steps: Vec<StepOutcome>,
    pub(crate) weights: Tensors,
}

impl Fixture {
    pub(crate) fn load(name: &'static str) -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../tests/fixtures")
            .join(name);
        let read = |file: &str| std::fs::read(folder.join(file)).expect("a fixture is complete");
        let golden: Golden = serde_json::from_slice(&read("golden.json")).expect("golden.json");
        let model = moefold_planner::model::hf::read(&folder).expect("config.json");
        let stream = TokenStream::indexed(&folder.join("tokens")).expect("tokens");
        let samples = Samples::new(stream, golden.seq_len, model.vocab_size, Order::TokenStream)
            .expect("enough tokens");
        Self {
            name,
            model,
            golden,
            samples,
            savers: Savers::default(),
            rank_order: moefold_planner::layout::Order::default(),
            folder: Some(folder),
        }
    }

    /// Another file of the fixture.
    pub(crate) fn read<T: serde::de::DeserializeOwned>(&self, file: &str) -> T {
        let folder = self.folder.as_ref().expect("a fixture as loaded");
        let text = std::fs::read(folder.join(file)).expect("a fixture is complete");
        serde_json::from_slice(&text).expect(file)
    }

    /// The fixture's model with a vocabulary of bytes and random weights, on English text.
    pub(crate) fn on_text(mut self) -> Self {
        let text = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../src/quickstart/text.txt");
        let bytes = Tokenizer::named("byte").expect("known");
        let stream = TokenStream::text(&[text], &bytes).expect("text");
        self.model.vocab_size = 256;
        self.samples = Samples::new(
            stream,
            self.golden.seq_len,
            self.model.vocab_size,
            Order::Shuffled { seed: 1 },
        )
        .expect("enough text");
        self.folder = None;
        self
    }

    /// The fixture's samples for another model, with random weights.
    pub(crate) fn with_model(mut self, model: Model) -> Self {
        self.model = model;
        self.folder = None;
        self
    }

    /// The fixture with some of its layers' modules computed again.
    pub(crate) fn recomputing(mut self, recompute: impl Into<RecomputePlan>) -> Self {
        self.savers.recompute = recompute.into();
        self
    }

    /// The fixture's layers again and again, so many in all, with random weights.
    pub(crate) fn with_layers(self, layers: usize) -> Self {
        let mut model = self.model.clone();
        model.layers = model.layers.into_iter().cycle().take(layers).collect();
        self.with_model(model)
    }

    /// The layers of each stage: about as many in each, the first ones more. Of more stages than layers the last has
    /// none, or where a rank has several the first, and one between where that is not enough.
    pub(crate) fn stages(&self, layout: &Layout) -> Vec<Vec<u32>> {
        let (layers, stages) = (self.model.layers.len() as u32, layout.stages());
        let cut = |stage: u32| {
            if stages > layers && layout.vpp() > 1 {
                layers * stage / stages
            } else {
                (layers * stage).div_ceil(stages)
            }
        };
        (0..stages)
            .map(|stage| (cut(stage)..cut(stage + 1)).collect())
            .collect()
    }

    /// The fixture with fewer sequences a step.
    pub(crate) fn with_batch(mut self, global_batch: u64) -> Self {
        self.golden.global_batch = global_batch;
        self
    }

    pub(crate) fn batch(&self) -> Batch {
        Batch {
            seq_len: self.golden.seq_len,
            global_batch: self.golden.global_batch,
        }
    }

    pub(crate) fn layout(&self, degrees: &Degrees) -> Layout {
        let usual = ScheduleName::of(degrees.pp, degrees.vpp);
        let options = SearchOptions {
            schedule: Some(self.savers.schedule.unwrap_or(usual)),
            order: Some(self.rank_order),
            cp_comm: Some(self.savers.cp_comm),
            overlap: Some(self.savers.overlap),
            ..SearchOptions::new(self.batch(), StackName::Moefold)
        };
        let rules = Rules::of(&self.model, &options);
        rules.layout(degrees).expect("a legal layout")
    }

    pub(crate) fn options(&self) -> TrainOptions {
        let golden = &self.golden;
        TrainOptions {
            steps: golden.steps.len() as u64,
            lr: LearningRate::constant(golden.lr),
            adam: AdamOptions {
                betas: golden.betas,
                eps: golden.eps,
                weight_decay: golden.weight_decay,
                clip: Some(golden.clip),
            },
            balancing: Balancing::default(),
            mtp_loss_scaling_factor: moefold_executor::options::MTP_LOSS_SCALING_FACTOR,
            seed: 0,
            init: Init::Random,
            device: DeviceSpec::Cpu {
                threads_per_rank: Some(1),
            },
            traced_steps: 0..0,
            save: None,
        }
    }

    /// The weights the fixture begins with.
    pub(crate) fn weights(&self) -> Source {
        match &self.folder {
            Some(folder) => {
                Source::hugging_face(folder, &global_tensors(&self.model)).expect("the checkpoint")
            }
            None => Source::Random {
                seed: 1,
                std: self.model.initializer_range,
            },
        }
    }

    /// One rank, ready to step.
    pub(crate) fn trainer(
        &self,
        cx: Context,
        options: &TrainOptions,
        weights: &Source,
    ) -> Result<Trainer, Error> {
        let (stages, seq_len) = (self.stages(&cx.layout), self.golden.seq_len);
        let (model, savers) = (&self.model, &self.savers);
        Trainer::new(cx, model, &stages, seq_len, savers, options, weights)
    }

    /// Trains under a layout for some steps, on one thread a rank.
    pub(crate) fn train(&self, degrees: &Degrees, steps: u64, options: &TrainOptions) -> Trained {
        let (trained, _) = self.train_with(degrees, steps, options, |_| ());
        trained
    }

    /// [`Fixture::train`], with a look at every rank at the end.
    pub(crate) fn train_with<T: Send>(
        &self,
        degrees: &Degrees,
        steps: u64,
        options: &TrainOptions,
        look: impl Fn(&Trainer) -> T + Sync,
    ) -> (Trained, Vec<T>) {
        let open = || {
            let ranks = degrees.gpus;
            options.device.open(0, ranks).expect("a CPU")
        };
        self.train_on(open, degrees, steps, options, look)
    }

    /// [`Fixture::train_with`] on devices of the caller's, one a rank.
    pub(crate) fn train_on<T: Send>(
        &self,
        open: impl Fn() -> Device + Sync,
        degrees: &Degrees,
        steps: u64,
        options: &TrainOptions,
        look: impl Fn(&Trainer) -> T + Sync,
    ) -> (Trained, Vec<T>) {
        let layout = self.layout(degrees);
        let weights = self.weights();
        let ranks = World::threads(layout.gpus())
            .run(|rank| {
                let device = open();
                device.poison(true);
                let cx = Context::join(rank, &layout, device, rank.recorder());
                let mut trainer = self.trainer(cx, options, &weights)?;
                let mut outcomes = Vec::new();
                for step in 0..steps {
                    let mine =
                        train::microbatches(&self.samples, &trainer.cx, &self.batch(), step)?;
                    outcomes.push(trainer.step(&mine, options.lr.at(step))?);
                }
                trainer.stepper().gather_weights(&trainer.cx)?;
                let slices = held(&trainer);
                Ok((outcomes, slices, look(&trainer)))
            })
            .unwrap_or_else(|error| panic!("{} under {degrees:?}: {error}", self.name));
        let mut weights = Tensors::new();
        let (mut all_outcomes, mut looks) = (Vec::new(), Vec::new());
        for (outcomes, slices, seen) in ranks {
            for (slice, values) in slices {
                place(&mut weights, &slice, &values);
            }
            all_outcomes.push(outcomes);
            looks.push(seen);
        }
        let steps = all_outcomes.swap_remove(0);
        for other in all_outcomes {
            assert_eq!(steps, other, "ranks of {degrees:?} report different steps");
        }
        (Trained { steps, weights }, looks)
    }
}

/// Every slice a rank holds, with its values.
pub(crate) fn held(trainer: &Trainer) -> Vec<(Slice, Vec<f32>)> {
    let (store, optimizer) = (&trainer.stepper().store, &trainer.stepper().optimizer);
    let parameters = store.shard.parameters.iter();
    parameters
        .flat_map(|parameter| {
            let slices = parameter.slices.iter();
            slices.map(|slice| {
                let values = match store.slice(parameter, slice) {
                    Some(whole) => whole.to_f32(),
                    // Of what rests divided, NaN for all that other ranks have.
                    None => spread(slice.len(), optimizer.weights(parameter, slice)),
                };
                (slice.clone(), values)
            })
        })
        .collect()
}

/// Some of `len` values in their places, and NaN in the others.
fn spread(len: usize, part: Option<(Range<usize>, Tensor)>) -> Vec<f32> {
    let mut values = vec![f32::NAN; len];
    if let Some((own, part)) = part {
        values[own].copy_from_slice(&part.to_f32());
    }
    values
}

/// Writes the numbers of a slice into the global tensor. What several ranks hold must be the same bits.
pub(crate) fn place(tensors: &mut Tensors, slice: &Slice, values: &[f32]) {
    let len: usize = slice.dims.iter().product();
    // Of three dims the last ones are matrices, one below the other.
    let width = slice.dims[1..].last().copied().unwrap_or(1);
    let global = tensors
        .entry(slice.tensor.clone())
        .or_insert_with(|| vec![f32::NAN; len]);
    let mut values = values.iter();
    for row in slice.rows.clone() {
        for col in slice.cols.clone() {
            let value = *values.next().expect("a slice has a value for each place");
            let there = &mut global[row * width + col];
            assert!(
                there.is_nan() || value.is_nan() || there.to_bits() == value.to_bits(),
                "{} [{row}, {col}]: replicas hold {there} and {value}",
                slice.tensor
            );
            if !value.is_nan() {
                *there = value;
            }
        }
    }
}

/// Degrees without context or pipeline parallelism.
pub(crate) const fn degrees(gpus: u32, tp: u32, ep: u32, etp: u32, mbs: u32) -> Degrees {
    Degrees {
        gpus,
        tp,
        cp: 1,
        pp: 1,
        vpp: 1,
        ep,
        etp,
        mbs,
    }
}

/// The same degrees with sequences cut over `cp` ranks.
pub(crate) const fn cut(degrees: Degrees, cp: u32) -> Degrees {
    Degrees { cp, ..degrees }
}

/// The same degrees with a pipeline.
pub(crate) const fn piped(degrees: Degrees, pp: u32, vpp: u32) -> Degrees {
    Degrees { pp, vpp, ..degrees }
}

/// Asserts that two numbers agree to a relative tolerance.
pub(crate) fn assert_close(found: f64, expected: f64, tolerance: f64, what: &str) {
    let error = (found - expected).abs() / expected.abs().max(f64::MIN_POSITIVE);
    assert!(
        error <= tolerance,
        "{what}: found {found}, expected {expected}, relative error {error:.2e} above {tolerance:e}"
    );
}
