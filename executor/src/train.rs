//! [`run`]: trains under a plan, on ranks that are threads of this process; [`run_in`] on those of any
//! world.
//!
//! The entry point of the crate: refuses what is not implemented, starts the ranks, and takes one
//! step after another. Writing a run directory is the caller's business; whoever wants to hold the
//! ranks itself uses [`Trainer`].

#[cfg(test)]
mod tests;
mod trainer;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use moefold_planner::layout::{Batch, Degrees, Illegal, Layout};
use moefold_planner::model::{Model, hf};
use moefold_planner::plan::PlannedLayout;
use moefold_profiles::run::{RunSummary, StepRecord};
use moefold_profiles::trace::{Origin, Trace};

use crate::checkpoint::{self, Checkpoint, Fingerprint, Saver, Written};
use crate::control::{Control, Watch, Wish};
use crate::data::{Samples, Validation};
use crate::error::Error;
use crate::gather::{self, Put, RankRecord};
use crate::model::global_tensors;
use crate::options::{Init, Savers, TrainOptions};
use crate::profile::{Described, Measurements, training};
use crate::rank::Context;
use crate::record::Sampler;
use crate::run::{Counted, rank_peak, summarize};
use crate::support;
use crate::traffic;
use crate::transport::{RankContext, World};
use crate::weights::{Collector, Source};

pub(crate) use trainer::Weights;
pub use trainer::{Trainer, microbatches};

/// What a run gives.
#[derive(Debug)]
pub struct Trained {
    /// One record a step.
    pub steps: Vec<StepRecord>,
    /// Times and peaks.
    pub summary: RunSummary,
    /// Spans of the traced steps, all ranks.
    pub trace: Trace,
    /// What every op and collective took: a run is a profile.
    pub measured: Measurements,
    /// The final weights, whole.
    pub weights: Collector,
    /// The checkpoints that were saved, those that are not kept any more among them.
    pub checkpoints: Vec<Written>,
    /// Why others were not that were due, a sentence each.
    pub unsaved: Vec<String>,
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
    let data = Data {
        training: samples,
        validation: None,
    };
    let watch = Watch {
        on_step: &|record| {
            on_step(record);
            Ok(())
        },
        on_note: &|_| (),
        control: &Control::default(),
    };
    let trained = run_in(&world, plan, model, batch, options, data, true, watch)?;
    Ok(trained.expect("rank 0 is a thread of this process"))
}

/// What a run reads.
#[derive(Debug, Clone, Copy)]
pub struct Data<'a> {
    /// What it trains on.
    pub training: &'a Samples,
    /// What it is judged by meanwhile.
    pub validation: Option<&'a Validation>,
}

/// Trains on the ranks of `world`. Where rank 0 is elsewhere, nothing is returned: what is measured,
/// and where `keep_weights` asks for them the final weights, go to its process. Without `keep_weights`
/// the collector may be left empty. A run that is told to stop returns after fewer steps; its [`Control`] says so.
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
    data: Data<'_>,
    keep_weights: bool,
    watch: Watch<'_>,
) -> Result<Option<Trained>, Error> {
    support::check(plan, model, &options.device)?;
    support::check_packing(plan, data.training.packing())?;
    let layout = prove(plan, model, batch)?;
    if world.ranks() != layout.gpus() {
        return Err(Error::Request(format!(
            "the plan is for {} ranks, and {} were started: start as many processes as the plan has \
             ranks, or plan for as many",
            layout.gpus(),
            world.ranks()
        )));
    }
    let savers = Savers::of(plan);
    let (weights, fingerprint) = begin(model, batch, options, data.training)?;
    if let (Source::HuggingFace(folder), true) = (&weights, world.has_first()) {
        folder.verify()?;
    }
    let collector = Collector::new();
    let (said, changed) = (fingerprint.as_ref(), AtomicBool::new(false));
    let stages = &plan.pipeline.stages[..];
    let rank = |rank: &RankContext| {
        let stretch = options.device.stretch(rank.local_ranks());
        let recorder = rank.recorder().stretched(stretch);
        let ordinal = rank.gpu() as usize;
        let device = options.device.open(ordinal, rank.local_ranks())?;
        let cx = Context::join(rank, &layout, device, recorder);
        if let Some(saved) = weights.saved() {
            saved.verify(&cx.world)?;
        }
        let mut saver = Saver::of(rank, &cx.world, options, model, said, &changed)?;
        let mut trainer =
            Trainer::new(cx, model, stages, batch.seq_len, &savers, options, &weights)?;
        let (steps, record) = train(
            rank,
            &mut trainer,
            batch,
            options,
            data,
            saver.as_mut(),
            watch,
        )?;
        let weights = |put: &mut Put<'_>| {
            if keep_weights {
                trainer.each_part(put)?;
            }
            Ok(())
        };
        let records = gather::at_first(rank, record, &weights, &collector)?;
        let saved = saver.map(Saver::into_saved).unwrap_or_default();
        Ok(((steps, saved), records))
    };
    let terms = if world.is_apart() {
        terms(plan, model, batch, options, data, &weights, keep_weights)?
    } else {
        BTreeMap::new()
    };
    let world = world
        .agreeing(terms)
        .on_the_way(traffic::most(plan, model, batch, options));
    let ran = world.run(rank).inspect_err(|_| {
        if let (Some(saving), true) = (&options.save, changed.load(Ordering::Relaxed)) {
            checkpoint::discard_partial(&saving.run_dir);
        }
    });
    let (mut told, records): (Vec<_>, Vec<_>) = ran?.into_iter().unzip();
    if !world.has_first() {
        return Ok(None);
    }
    let (steps, (checkpoints, unsaved)) = told.swap_remove(0);
    let mut times = Vec::new();
    let mut spans = Vec::new();
    let mut peaks = Vec::new();
    let mut sampled = Vec::new();
    let mut device = None;
    for record in records.into_iter().flatten() {
        times.push(record.times);
        spans.extend(record.spans);
        peaks.push(record.peak);
        sampled.push(record.sampled);
        device.get_or_insert(record.device);
    }
    let warmup = warmup_steps(steps.len() as u64);
    let device = device.expect("rank 0 is here");
    let queued = options.device.name() == "cuda";
    let counted = Counted::of(queued, options.device.stretch(device.local_ranks));
    let of = plan.predicted.critical_pp_rank;
    let summary = summarize(&steps, &times, peaks, warmup, (counted, of));
    let step_s = steps.iter().map(|step| (step.step, step.step_s)).collect();
    let samples = training::samples(&sampled, &step_s, warmup, queued);
    Ok(Some(Trained {
        summary,
        trace: Trace {
            origin: Origin::Measured,
            spans,
        },
        weights: collector,
        measured: Measurements { device, samples },
        steps,
        checkpoints,
        unsaved,
    }))
}

/// The initial weights; and where a checkpoint says how it was trained or is to say so, how this run is.
fn begin(
    model: &Model,
    batch: &Batch,
    options: &TrainOptions,
    samples: &Samples,
) -> Result<(Source, Option<Fingerprint>), Error> {
    let weights = match &options.init {
        Init::Random => Source::Random {
            seed: options.seed,
            std: model.initializer_range,
        },
        Init::HuggingFace(folder) => {
            let weights = Source::hugging_face(folder, &global_tensors(model))?;
            check_config(folder, model)?;
            weights
        }
        Init::Resume(from) => {
            Source::Checkpoint(Box::new(Checkpoint::open(&from.checkpoint, model)?))
        }
    };
    if weights.saved().is_none() && options.save.is_none() {
        return Ok((weights, None));
    }
    let fingerprint = Fingerprint::of(options, batch, samples)?;
    if let Some(saved) = weights.saved() {
        saved.check(&fingerprint, options.steps)?;
    }
    Ok((weights, Some(fingerprint)))
}

/// Refuses weights whose configuration says another model than the plan; without one they are trusted.
fn check_config(folder: &Path, model: &Model) -> Result<(), Error> {
    let path = folder.join("config.json");
    if !path.is_file() {
        return Ok(());
    }
    let found = hf::read(&path).map_err(|error| Error::Request(error.to_string()))?;
    let differs = checkpoint::of_other_model(&found, model);
    differs.map_or(Ok(()), |differs| {
        Err(Error::Request(format!(
            "{}: is of another model than {}, which the plan is for: {differs}; make a plan for this one",
            path.display(),
            model.name
        )))
    })
}

/// What ranks that were started one by one must have been given alike: the plan, what decides the course of
/// training, and when checkpoints are due. Names are those of [`Fingerprint`] or flags.
fn terms(
    plan: &PlannedLayout,
    model: &Model,
    batch: &Batch,
    options: &TrainOptions,
    data: Data<'_>,
    weights: &Source,
    keep_weights: bool,
) -> Result<BTreeMap<String, String>, Error> {
    let fingerprint = Fingerprint::of(options, batch, data.training)?;
    let fingerprint = serde_json::to_value(fingerprint).expect("options are plain data");
    let fingerprint = fingerprint.as_object().expect("it has fields");
    let mut terms: BTreeMap<String, String> = fingerprint
        .iter()
        .map(|(name, said)| (name.clone(), said.to_string()))
        .collect();
    let plan = serde_json::to_vec(&(plan, model)).expect("a plan is plain data");
    let validation = data.validation.map(|validation| {
        let samples = validation.samples.fingerprint()?;
        Ok::<_, Error>(format!(
            "{samples} every {} steps, {} batches",
            validation.every, validation.iters
        ))
    });
    terms.extend([
        ("moefold".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        (
            "plan".to_owned(),
            blake3::hash(&plan).to_hex()[..16].to_owned(),
        ),
        ("init".to_owned(), weights.described()?),
        ("steps in all".to_owned(), options.steps.to_string()),
        ("device".to_owned(), options.device.name().to_owned()),
        ("keeping weights".to_owned(), keep_weights.to_string()),
    ]);
    if let Some(validation) = validation.transpose()? {
        terms.insert("validation".to_owned(), validation);
    }
    if let Some(every) = options.save.as_ref().and_then(|saving| saving.every) {
        terms.insert("save-every".to_owned(), every.to_string());
    }
    Ok(terms)
}

/// Leading steps whose times are not counted: half of a short run, [`WARMUP`] of a long one.
fn warmup_steps(steps: u64) -> u64 {
    (steps / 2).min(WARMUP)
}

/// Steps until ranks have had buffers of most of the sizes that data decides: each is touched for the first time, which on a
/// CPU takes several times as long as what is computed in it.
const WARMUP: u64 = 20;

/// All steps of one rank.
fn train(
    ranks: &RankContext,
    trainer: &mut Trainer,
    batch: &Batch,
    options: &TrainOptions,
    data: Data<'_>,
    mut saver: Option<&mut Saver<'_>>,
    watch: Watch<'_>,
) -> Result<(Vec<StepRecord>, RankRecord), Error> {
    let is_first = ranks.rank() == 0;
    let note = |text: &str| {
        if is_first {
            (watch.on_note)(text);
        }
    };
    let mut records = Vec::new();
    let mut times = Vec::new();
    let mut sampler = Sampler::new(trainer.steps());
    let mut settled = trainer.cx.device.allocations();
    for step in trainer.steps()..options.steps {
        let recorder = trainer.cx.recorder.clone();
        let detail = sampler.detail(step, options.traced_steps.contains(&step));
        recorder.begin_step(step as u32, detail);
        let lr = options.lr.at(step);
        let mine = microbatches(data.training, &trainer.cx, batch, step)?;
        let outcome = trainer.step(&mine, lr);
        if let (Err(Error::Diverged { .. }), Some(saver)) = (&outcome, saver.as_deref_mut()) {
            // All ranks end here, and what is being saved is of an earlier step.
            saver.settle(&note)?;
        }
        let outcome = outcome?;
        if let (true, Some(saver)) = (records.is_empty(), saver.as_deref()) {
            // What ends the step is said after this, so no rank saves yet.
            saver.clear_way(step)?;
        }
        let mut time = recorder.end_step();
        sampler.take(step, &mut time);
        let says = [
            watch.control.wish().word(),
            saver.as_deref_mut().map_or(0, Saver::word),
        ];
        let (mut record, wish, said) =
            trainer.record(batch, step, lr, outcome, time.step.0, says)?;
        let due = |validation: &&Validation| validation.is_due(step + 1, options.steps);
        if let Some(validation) = data.validation.filter(due) {
            record.validation = Some(trainer.evaluate(validation, batch, step)?);
        }
        let is_asked = matches!(wish, Wish::Stop(_));
        let stops = is_asked && step + 1 < options.steps;
        let is_due = saver
            .as_deref()
            .is_some_and(|saver| saver.is_due(step + 1) || is_asked);
        if let Some(saver) = saver.as_deref_mut() {
            saver.heard(said, &note)?;
            if is_due {
                // Before anybody hears of the step: what is lost at any moment is less than two intervals.
                saver.settle(&note)?;
            }
        }
        if is_first {
            (watch.on_step)(&record)?;
        }
        records.push(record);
        if times.is_empty() {
            settled = trainer.cx.device.allocations();
        }
        times.push(time);
        if let Some(saver) = saver.as_deref_mut()
            && (is_due || wish == Wish::Save)
        {
            saver.begin(trainer, step + 1, !is_due, &note)?;
        }
        if let (Wish::Stop(reason), true) = (wish, stops) {
            watch.control.note_stop(reason);
            break;
        }
    }
    if let Some(saver) = saver {
        saver.settle(&note)?;
    }
    let cx = &trainer.cx;
    let record = RankRecord {
        times,
        spans: cx.recorder.take_spans(),
        sampled: sampler.into_steps(),
        device: Described::of(ranks, &cx.device),
        peak: rank_peak(cx.rank, cx.at.pp, &cx.device, settled),
    };
    Ok((records, record))
}

/// The layout of a plan, proven for its model and batch.
pub(crate) fn prove(plan: &PlannedLayout, model: &Model, batch: &Batch) -> Result<Layout, Error> {
    let record = &plan.layout;
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
    let pipeline = &plan.pipeline;
    let staged = (pipeline.schedule, pipeline.stages.len());
    let layout = Layout::of_stages(&degrees, staged, model, batch);
    let order = plan.rank_order.unwrap_or_default();
    let numbered = |layout: Layout| {
        let ours = layout.numbered(order);
        let (pp, dp, edp) = (layout.pp(), layout.dp(), layout.edp());
        ours.ok_or_else(|| vec![Illegal::PipelineGroups { pp, dp, edp }])
    };
    let layout = layout.and_then(numbered);
    layout.map_err(|broken| {
        let rules: Vec<String> = broken.iter().map(ToString::to_string).collect();
        Error::Request(format!(
            "the plan's layout is not legal: {}",
            rules.join("; ")
        ))
    })
}
