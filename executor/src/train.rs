//! [`run`]: trains under a plan, on ranks that are threads of this process; [`run_in`] on those of any
//! world.
//!
//! The entry point of the crate: refuses what is not implemented, starts the ranks, and takes one
//! step after another. Writing a run directory is the caller's business; whoever wants to hold the
//! ranks itself uses [`Trainer`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use moefold_planner::layout::{Batch, Degrees, Layout};
use moefold_planner::model::Model;
use moefold_planner::plan::{LayoutRecord, PlannedLayout};
use moefold_planner::schedule::{Schedule, Stage};
use moefold_profiles::run::{RunSummary, StepRecord};
use moefold_profiles::trace::{Origin, Trace};
use moefold_profiles::units::Bytes;

use crate::checkpoint::{self, Course, Resumed, Saved, Saver, Saving, Written};
use crate::data::Samples;
use crate::device::DeviceSpec;
use crate::error::Error;
use crate::gather::{self, Put, RankRecord};
use crate::lr::LearningRate;
use crate::model::{Holding, Shard, global_tensors};
use crate::moe::router::AuxLoss;
use crate::optimizer::{AdamOptions, State, ZeroAdam};
use crate::rank::Context;
use crate::run::{rank_peak, summarize};
use crate::stage::StageModel;
use crate::step::{HostTokens, StepOutcome, Stepper};
use crate::store::Store;
use crate::support;
use crate::transport::{RankContext, World};
use crate::weights::{Collector, Region, Source};

/// Where initial weights come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Init {
    /// Drawn from the seed, by global coordinates: the same under every layout.
    #[default]
    Random,
    /// A Hugging Face checkpoint folder.
    HuggingFace(PathBuf),
    /// A checkpoint of a run: training goes on after its steps, with the states it had.
    Resume(Resumed),
}

impl Init {
    /// The checkpoint that training goes on from.
    pub fn resumed(&self) -> Option<&Resumed> {
        match self {
            Self::Random | Self::HuggingFace(_) => None,
            Self::Resume(resumed) => Some(resumed),
        }
    }
}

/// How to train, besides the plan.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOptions {
    /// Steps of the whole run, those before a checkpoint it goes on from among them.
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
    /// What every rank computes on.
    pub device: DeviceSpec,
    /// Steps whose spans go into the trace one by one.
    pub traced_steps: Range<u64>,
    /// Whether checkpoints are saved, and where.
    pub save: Option<Saving>,
}

/// What a run gives.
#[derive(Debug)]
pub struct Trained {
    /// One record a step.
    pub steps: Vec<StepRecord>,
    /// Times and peaks.
    pub summary: RunSummary,
    /// Spans of the traced steps, all ranks.
    pub trace: Trace,
    /// The final weights, whole.
    pub weights: Collector,
    /// The checkpoints that were saved, those that are not kept any more among them.
    pub checkpoints: Vec<Written>,
}

/// Trains `model` as `plan` says, on ranks that are threads of this process. `on_step` is called after
/// every step, from the thread of rank 0.
pub fn run(
    plan: &PlannedLayout,
    model: &Model,
    batch: &Batch,
    options: &TrainOptions,
    samples: &Samples,
    on_step: &(dyn Fn(&StepRecord) + Sync),
) -> Result<Trained, Error> {
    let layout = &plan.layout;
    let world = World::threads(layout.tp * layout.cp * layout.pp * layout.dp);
    let trained = run_in(&world, plan, model, batch, options, samples, true, on_step)?;
    Ok(trained.expect("rank 0 is a thread of this process"))
}

/// Trains on the ranks of `world`. Where rank 0 is elsewhere, nothing is returned: what is measured,
/// and where `keep_weights` asks for them the final weights, go to its process. Without `keep_weights`
/// the collector may be left empty.
#[expect(
    clippy::too_many_arguments,
    reason = "what a run is made of, each of its own type"
)]
pub fn run_in(
    world: &World,
    plan: &PlannedLayout,
    model: &Model,
    batch: &Batch,
    options: &TrainOptions,
    samples: &Samples,
    keep_weights: bool,
    on_step: &(dyn Fn(&StepRecord) + Sync),
) -> Result<Option<Trained>, Error> {
    support::check(plan, model, &options.device)?;
    let layout = prove(&plan.layout, model, batch)?;
    if world.ranks() != layout.gpus() {
        return Err(Error::Request(format!(
            "the plan is for {} ranks, and {} were started: start as many processes as the plan has \
             ranks, or plan for as many",
            layout.gpus(),
            world.ranks()
        )));
    }
    let (weights, course) = begin(model, batch, options, samples)?;
    let collector = Collector::new();
    let rank = |rank: &RankContext| {
        let recorder = rank.recorder();
        let ordinal = rank.gpu() as usize;
        let device = options.device.open(ordinal, rank.local_ranks())?;
        let cx = Context::join(rank, &layout, device, recorder);
        if let Some(saved) = weights.saved() {
            saved.verify(&cx.world)?;
        }
        let saver = Saver::of(rank, &cx.world, options, model, course.as_ref())?;
        let mut trainer = Trainer::new(cx, model, batch.seq_len, options, &weights)?;
        let report = |record: &StepRecord| {
            if rank.rank() == 0 {
                on_step(record);
            }
        };
        let (steps, checkpoints, record) = train(
            &mut trainer,
            batch,
            options,
            samples,
            saver.as_ref(),
            &report,
        )?;
        let weights = |put: &mut Put<'_>| {
            if keep_weights {
                trainer.each_part(put)?;
            }
            Ok(())
        };
        let records = gather::at_first(rank, record, &weights, &collector)?;
        Ok(((steps, checkpoints), records))
    };
    let ran = world.run(rank).inspect_err(|_| {
        if let (Some(saving), true) = (&options.save, world.has_first()) {
            checkpoint::discard_partial(&saving.run_dir);
        }
    });
    let (mut told, records): (Vec<_>, Vec<_>) = ran?.into_iter().unzip();
    if !world.has_first() {
        return Ok(None);
    }
    let (steps, checkpoints) = told.swap_remove(0);
    let mut times = Vec::new();
    let mut spans = Vec::new();
    let mut peaks = Vec::new();
    for record in records.into_iter().flatten() {
        times.push(record.times);
        spans.extend(record.spans);
        peaks.push(record.peak);
    }
    let summary = summarize(
        &steps,
        &times,
        peaks,
        warmup_steps(steps.len() as u64),
        options.device.shares_cores(layout.gpus()),
    );
    Ok(Some(Trained {
        summary,
        trace: Trace {
            origin: Origin::Measured,
            spans,
        },
        weights: collector,
        steps,
        checkpoints,
    }))
}

/// The initial weights; and where a checkpoint says how it was trained or is to say so, how this run is.
fn begin(
    model: &Model,
    batch: &Batch,
    options: &TrainOptions,
    samples: &Samples,
) -> Result<(Source, Option<Course>), Error> {
    let weights = match &options.init {
        Init::Random => Source::Random {
            seed: options.seed,
            std: model.initializer_range,
        },
        Init::HuggingFace(folder) => Source::hugging_face(folder, &global_tensors(model))?,
        Init::Resume(from) => Source::Saved(Box::new(Saved::open(&from.checkpoint, model)?)),
    };
    if weights.saved().is_none() && options.save.is_none() {
        return Ok((weights, None));
    }
    let course = Course::of(options, batch, samples)?;
    if let Some(saved) = weights.saved() {
        saved.check(&course, options.steps)?;
    }
    Ok((weights, Some(course)))
}

/// Leading steps whose times are not counted: a quarter of a short run, three of a long one.
fn warmup_steps(steps: u64) -> u64 {
    (steps / 4).min(3)
}

/// All steps of one rank.
fn train(
    trainer: &mut Trainer,
    batch: &Batch,
    options: &TrainOptions,
    samples: &Samples,
    saver: Option<&Saver<'_>>,
    report: &dyn Fn(&StepRecord),
) -> Result<(Vec<StepRecord>, Vec<Written>, RankRecord), Error> {
    let mut records = Vec::new();
    let mut checkpoints = Vec::new();
    let mut times = Vec::new();
    let mut settled = trainer.cx.device.allocations();
    for step in trainer.steps()..options.steps {
        let recorder = trainer.cx.recorder.clone();
        recorder.begin_step(step as u32, options.traced_steps.contains(&step));
        let lr = options.lr.at(step);
        let mine = microbatches(samples, &trainer.cx, batch, step)?;
        let outcome = trainer.step(&mine, lr)?;
        let time = recorder.end_step();
        let record = trainer.record(batch, step, lr, outcome, time.step.0)?;
        report(&record);
        records.push(record);
        if times.is_empty() {
            settled = trainer.cx.device.allocations();
        }
        times.push(time);
        if let Some(saver) = saver.filter(|saver| saver.is_due(step + 1)) {
            checkpoints.push(saver.save(trainer, step + 1)?);
        }
    }
    let cx = &trainer.cx;
    let record = RankRecord {
        times,
        spans: cx.recorder.take_spans(),
        peak: rank_peak(cx.rank, cx.at.pp, &cx.device, settled),
    };
    Ok((records, checkpoints, record))
}

/// One rank, ready to step.
#[derive(Debug)]
pub struct Trainer {
    /// Its place.
    pub cx: Context,
    stepper: Stepper,
}

impl Trainer {
    /// Allocates the rank's shard and fills it. The model and layout must have passed
    /// [`support::check`].
    pub fn new(
        cx: Context,
        model: &Model,
        seq_len: u64,
        options: &TrainOptions,
        weights: &Source,
    ) -> Result<Self, Error> {
        let holding = Holding::whole(model);
        let shard = Shard::new(model, &cx.layout, &cx.at, &holding);
        let store = Store::new(&cx.device, shard);
        let aux = (options.aux_loss_coef > 0.0).then(|| AuxLoss {
            coefficient: options.aux_loss_coef,
            microbatches: cx.layout.microbatches(),
        });
        let stage = StageModel::new(model, &store, &holding, aux);
        let mut optimizer = ZeroAdam::new(&cx, &store, options.adam);
        fill(&store, &optimizer, weights)?;
        if let Some(saved) = weights.saved() {
            saved.restore(&store, &mut optimizer)?;
        }
        let schedule = Schedule::of(&cx.layout);
        let actions = schedule.ranks[cx.at.pp as usize].clone();
        let stages = BTreeMap::from([(Stage(0), stage)]);
        let stepper = Stepper::new(
            &cx,
            model,
            store,
            stages,
            optimizer,
            actions,
            seq_len as usize,
        );
        Ok(Self { cx, stepper })
    }

    /// Steps taken, those before the checkpoint it began with among them.
    pub fn steps(&self) -> u64 {
        self.stepper.optimizer.steps()
    }

    /// Runs one step on the rank's part of a global batch.
    pub fn step(&mut self, microbatches: &[HostTokens], lr: f64) -> Result<StepOutcome, Error> {
        self.stepper.step(&self.cx, microbatches, lr)
    }

    /// What the rank holds and how it steps.
    pub fn stepper(&self) -> &Stepper {
        &self.stepper
    }

    /// Puts what this rank is the master of, in f32.
    pub fn collect(&self, collector: &Collector) {
        let put = |region: &Region<'_>, values: &[f32]| {
            collector.put(region, values);
            Ok(())
        };
        self.each_part(&mut { put })
            .expect("a collector takes everything");
    }

    /// Hands over what this rank is the master of, in f32, part by part.
    pub(crate) fn each_part(&self, put: &mut Put<'_>) -> Result<(), Error> {
        for owned in self.stepper.optimizer.owned(&self.stepper.store.shard) {
            let values = owned.state(State::Master).to_f32();
            let mut values = values.as_slice();
            for part in owned.regions() {
                let (own, rest) = values.split_at(part.len());
                put(&part, own)?;
                values = rest;
            }
        }
        Ok(())
    }

    /// The record of a step, the same on every rank.
    fn record(
        &self,
        batch: &Batch,
        step: u64,
        lr: f64,
        outcome: StepOutcome,
        step_s: f64,
    ) -> Result<StepRecord, Error> {
        let peak = self.cx.device.memory().peak_total().0;
        let own = [step_s.to_bits(), peak];
        let all = self.cx.world.exchange_counts(&own)?;
        let step_s = all
            .iter()
            .map(|rank| f64::from_bits(rank[0]))
            .fold(0.0, f64::max);
        let tokens = (batch.global_batch * batch.seq_len) as f64;
        Ok(StepRecord {
            step,
            loss: outcome.loss,
            aux_loss: outcome.aux_loss,
            z_loss: 0.0,
            grad_norm: outcome.grad_norm,
            lr,
            step_s,
            tokens_per_s: tokens / step_s,
            peak_bytes: Bytes(all.iter().map(|rank| rank[1]).max().unwrap_or(0)),
            expert_load: outcome.expert_load,
            dropped: 0,
        })
    }
}

/// Gives weights and masters their initial values; only the former are rounded.
fn fill(store: &Store, optimizer: &ZeroAdam, source: &Source) -> Result<(), Error> {
    for parameter in &store.shard.parameters {
        for slice in &parameter.slices {
            let values = source.read(&slice.region())?;
            store.slice(parameter, slice).copy_from_f32(&values);
            if let Some((elements, masters)) = optimizer.masters(parameter, slice) {
                masters.copy_from_f32(&values[elements]);
            }
        }
    }
    Ok(())
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

/// The layout of a plan, proven for its model and batch.
pub(crate) fn prove(record: &LayoutRecord, model: &Model, batch: &Batch) -> Result<Layout, Error> {
    let degrees = Degrees {
        gpus: record.tp * record.cp * record.pp * record.dp,
        tp: record.tp,
        cp: record.cp,
        pp: record.pp,
        vpp: record.vpp,
        ep: record.ep,
        etp: record.etp,
        mbs: record.mbs,
    };
    Layout::new(&degrees, model, batch).map_err(|broken| {
        let rules: Vec<String> = broken.iter().map(ToString::to_string).collect();
        Error::Request(format!(
            "the plan's layout is not legal: {}",
            rules.join("; ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::Mutex;

    use moefold_kernels::Dtype;
    use moefold_planner::plan::Plan;
    use moefold_profiles::Precision;

    use super::*;
    use crate::data::{Order, Stream};
    use crate::testing;

    const STEPS: u64 = 4;

    fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/mixtral")
    }

    fn samples(plan: &Plan) -> Samples {
        let stream = Stream::indexed(&fixture().join("tokens")).expect("tokens");
        let seq_len = plan.request.batch.seq_len;
        Samples::new(stream, seq_len, plan.model.vocab_size, Order::Stream).expect("enough")
    }

    fn options() -> TrainOptions {
        TrainOptions {
            steps: STEPS,
            lr: LearningRate::constant(2e-3),
            adam: AdamOptions::default(),
            aux_loss_coef: 0.0,
            seed: 1,
            init: Init::HuggingFace(fixture()),
            device: DeviceSpec::Cpu {
                threads_per_rank: Some(1),
            },
            traced_steps: 1..2,
            save: None,
        }
    }

    /// The plan of the fixtures on four ranks: TP 2 and DP 2 for attention, EP 4 for experts.
    fn folded() -> Plan {
        let mut plan = testing::plan();
        let layout = &mut plan.planned.layout;
        (layout.tp, layout.dp, layout.ep, layout.mbs) = (2, 2, 4, 2);
        layout.microbatches = 1;
        plan
    }

    fn train(plan: &Plan) -> (Trained, Vec<StepRecord>) {
        let seen = Mutex::new(Vec::new());
        let on_step = |record: &StepRecord| seen.lock().expect("one rank").push(record.clone());
        let (model, batch) = (&plan.model, &plan.request.batch);
        let trained = run(
            &plan.planned,
            model,
            batch,
            &options(),
            &samples(plan),
            &on_step,
        );
        (
            trained.expect("trains"),
            seen.into_inner().expect("one rank"),
        )
    }

    #[test]
    fn a_run_reports_its_steps_its_time_and_its_weights() {
        let plan = folded();
        let (trained, seen) = train(&plan);
        assert_eq!(seen, trained.steps);
        assert_eq!(trained.steps.len() as u64, STEPS);
        assert_eq!(trained.summary.final_loss, trained.steps[3].loss);
        assert_eq!(trained.summary.peak_by_rank.len(), 4);

        let ranks: BTreeSet<u32> = trained.trace.spans.iter().map(|span| span.rank).collect();
        assert_eq!(ranks, BTreeSet::from([0, 1, 2, 3]));
        assert!(trained.trace.spans.iter().all(|span| span.step == Some(1)));
        let stems: BTreeSet<&str> = trained
            .trace
            .spans
            .iter()
            .map(|s| s.name.as_str())
            .collect();
        for stem in [
            "gemm",
            "grouped_gemm",
            "attention",
            "all_to_all",
            "reduce_scatter",
            "adamw",
        ] {
            assert!(stems.contains(stem), "{stems:?} lacks {stem}");
        }
        assert_eq!(trained.weights.tensors(), global_tensors(&plan.model));

        let (single, _) = train(&testing::plan());
        for (found, expected) in trained.steps.iter().zip(&single.steps) {
            let error = (found.loss / expected.loss - 1.0).abs();
            assert!(error < 1e-5, "{} and {}", found.loss, expected.loss);
        }
        for tensor in global_tensors(&plan.model) {
            // Every rank put the part that it updates.
            let (found, expected) = (trained.weights.get(&tensor), single.weights.get(&tensor));
            let squares =
                |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
            let error = squares(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
            let whole = squares(&mut expected.iter().copied());
            assert!(error < 1e-4 * whole, "{}: {error} of {whole}", tensor.name);
        }
    }

    #[test]
    fn a_bf16_run_says_where_the_host_waits_and_keeps_what_weights_are_rounded_from() {
        let mut plan = testing::plan();
        plan.request.batch.global_batch = 2;
        plan.planned.layout.microbatches = 2;
        let trained = |precision, device: DeviceSpec| {
            let mut planned = plan.planned.clone();
            planned.precision = precision;
            let options = TrainOptions {
                steps: 1,
                traced_steps: 0..1,
                device,
                ..options()
            };
            let batch = &plan.request.batch;
            run(
                &planned,
                &plan.model,
                batch,
                &options,
                &samples(&plan),
                &|_| (),
            )
            .expect("trains")
        };
        let emulated = DeviceSpec::Emulated {
            architecture: moefold_kernels::cuda::Architecture::SM80,
            dtype: Dtype::Bf16,
            seed: 1,
            reserve: Some(Bytes(6 << 20)),
        };
        if !testing::is_at_hand(&emulated) {
            return;
        }
        let found = trained(Precision::Bf16, emulated);
        let expected = trained(Precision::Fp32, options().device);
        let (loss, cpu_loss) = (found.steps[0].loss, expected.steps[0].loss);
        assert!(
            (loss / cpu_loss - 1.0).abs() < 1e-2,
            "{loss} and {cpu_loss}"
        );

        let summary = &found.summary;
        let peak = &summary.peak_by_rank[0];
        assert_eq!((peak.reserved, peak.growths), (Bytes(6 << 20), 0));
        let alive = peak.bytes.total() - peak.bytes.overhead;
        assert!(
            alive <= peak.reached && peak.reached <= peak.reserved,
            "{peak:?}"
        );
        assert!((summary.time_s.total().0 / summary.step_s - 1.0).abs() < 1e-6);
        // Two layers in each of two microbatches.
        let reads = [("counts_to_host", 4.0), ("sums_to_host", 1.0)];
        for (name, times) in reads {
            assert_eq!(summary.host_reads[name], times);
            let spans = found.trace.spans.iter().filter(|span| span.name == name);
            assert_eq!(spans.count() as f64, times);
        }
        assert_eq!(summary.host_reads.len(), reads.len());
        assert!(expected.summary.host_reads.is_empty());

        let weights = |trained: &Trained| -> Vec<f32> {
            let tensors = trained.weights.tensors().into_iter();
            tensors
                .flat_map(|tensor| trained.weights.get(&tensor))
                .collect()
        };
        let (weights, cpu_weights) = (weights(&found), weights(&expected));
        // The first step of Adam moves every weight by about the learning rate, less than half the
        // distance of bf16 numbers around 1; so weights kept in bf16 would show.
        let rounded = |w: &&f32| w.to_bits().trailing_zeros() >= 16;
        let num_rounded = weights.iter().filter(rounded).count();
        assert!(
            num_rounded < weights.len() / 100,
            "{num_rounded} of {}",
            weights.len()
        );
        let same = |(a, b): &(&f32, &f32)| (**a - **b).abs() < 1e-5;
        let num_same = weights.iter().zip(&cpu_weights).filter(same).count();
        assert!(
            num_same > weights.len() * 8 / 10,
            "{num_same} of {}",
            weights.len()
        );
    }

    #[test]
    fn an_edited_layout_is_proven_again() {
        let mut plan = folded();
        plan.planned.layout.ep = 3;
        let (model, batch) = (&plan.model, &plan.request.batch);
        let refused = run(
            &plan.planned,
            model,
            batch,
            &options(),
            &samples(&plan),
            &|_| (),
        );
        let error = refused.expect_err("8 experts over 3 ranks");
        assert!(error.is_bad_request(), "{error}");
        assert!(error.to_string().contains("not legal"), "{error}");
    }
}
