//! `moefold execute`: train under a plan and leave a run directory.

mod begin;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use moefold_executor::Error;
use moefold_executor::checkpoint::Written;
use moefold_executor::claim::Claim;
use moefold_executor::control::{Control, Watch};
use moefold_executor::data::{
    Blend, Order, Packing, Samples, Share, TokenStream, Tokenizer, Validation,
};
use moefold_executor::device::DeviceSpec;
use moefold_executor::environment::Environment;
use moefold_executor::files;
use moefold_executor::host::HostWatch;
use moefold_executor::lr::{Anneal, Decay, LearningRate};
use moefold_executor::moe::balance::Balancing;
use moefold_executor::optimizer::AdamOptions;
use moefold_executor::options::{Init, Saving, TrainOptions};
use moefold_executor::run::RunDir;
use moefold_executor::train::{self, Data, Trained};
use moefold_executor::transport::{Launched, World};
use moefold_executor::weights;
use moefold_planner::plan::Plan;
use moefold_profiles::Profile;
use moefold_profiles::run::{RunSummary, StepRecord};
use serde::Serialize;

use crate::cli::{ExecuteArgs, Launch, LrSchedule, PackingArgs, TrainArgs, WsdDecay};
use crate::device::{self, Copies};
use crate::dry_run;
use crate::failure::{Failure, failure};
use crate::launch::{self, OnSignal};
use crate::output::Output;
use crate::restart::{self, Restarts};
use crate::signals;

/// Steps after warm-up whose spans go into `trace.json`: enough to see a pattern, few enough to open.
const TRACED_STEPS: u64 = 3;

/// Steps between evaluations, and batches of one, as Megatron-LM has them.
const EVAL_INTERVAL: u64 = 1000;
const EVAL_ITERS: u64 = 100;

/// What `--json` prints.
#[derive(Serialize)]
struct ExecuteJson<'a> {
    #[serde(serialize_with = "files::shown")]
    run_dir: &'a Path,
    /// The last one, where any was saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<&'a Written>,
    summary: &'a RunSummary,
}

pub(crate) fn run(args: &ExecuteArgs, output: Output) -> Result<(), Failure> {
    if args.dry_run {
        return dry_run::run(args, output);
    }
    if args.data.is_empty() && args.text.is_empty() {
        return Err(Failure::Request(anyhow!(
            "nothing to train on: give --text FILE... or --data PREFIX... (PREFIX.bin, PREFIX.idx)"
        )));
    }
    let plan = Plan::load(args.again.replanned.as_ref().unwrap_or(&args.plan));
    let plan = plan.map_err(Failure::request)?;
    let restarts = Restarts::of(args)?;
    let chosen = device::choose(args.device, output)?;
    let device = chosen.of_plan(&plan, args.launch, None, Copies::of(args))?;
    let world = match args.launch {
        Launch::Threads => World::threads(plan.request.gpus),
        Launch::Processes => {
            return match restarts {
                Some(restarts) => restart::run(args, plan, &chosen, restarts, output),
                None => launch::processes(plan.request.gpus, OnSignal::Tell),
            };
        }
        Launch::Env => World::process(launch::from_environment()?)
            .heartbeat(Duration::from_secs_f64(args.heartbeat_s))
            .listen()
            .map_err(failure)?,
    };
    let world = match Launched::timeout().map_err(failure)? {
        Some(deadline) => world.deadline(deadline),
        None => world,
    };
    let (training, validation) = samples(args, &plan, world.has_first())?;
    let data = Data {
        training: &training,
        validation: validation.as_ref(),
    };
    let is_first = world.has_first();
    begin::same_model(args, &plan)?;
    let init = begin::init(args, is_first.then_some(output))?;
    let mut options = options(&args.train, init, device)?;
    if let Some((dir, summary)) = begin::finished(args, &options) {
        if !is_first {
            return Ok(());
        }
        let (checkpoint, run_dir) = (None, dir);
        let answer = ExecuteJson {
            run_dir,
            checkpoint,
            summary: &summary,
        };
        let (done, dir) = (first_step(&options.init), dir.display());
        return output.answer(&answer, || {
            format!("{done} steps are done: nothing is left to do in {dir}\n")
        });
    }
    // Rank 0's process leaves what there is to leave.
    let claims = is_first.then(|| Claims::of(args, &plan)).transpose()?;
    options.save = Some(Saving {
        every: args.save_every.map(u64::from),
        run_dir: claims.as_ref().map_or_else(
            || PathBuf::from("runs"),
            |claims| claims.run.path().to_owned(),
        ),
    });
    // Those beside the run directory are held until the end.
    let (run, _beside) = claims.map(|claims| (claims.run, claims.beside)).unzip();
    let keep_weights = args.save_hf.is_some();
    signals::catch()?;
    let within = Duration::from_secs(args.stop_within.into());
    signals::watch(within, move |text| {
        if is_first {
            // Nothing is left to do when stderr is gone.
            let _ = output.note(text);
        }
    })?;
    let control = Control::stopped_by(signals::told());
    let ran = train_in(
        &world,
        run,
        &plan,
        data,
        &options,
        keep_weights,
        &control,
        output,
    )?;
    signals::over();
    if let Some(signal) = control.stopped() {
        return Err(stopped(signal, ran.as_ref(), &options, &plan));
    }
    let Some(ran) = ran else {
        return Ok(());
    };
    let shown = save(args, &plan, ran)?;
    show(args, &plan, &shown, output)
}

/// Writes what was asked for beside the run directory: all that can be, also where the directory could not be written.
fn save(args: &ExecuteArgs, plan: &Plan, ran: Ran) -> Result<Shown, Failure> {
    let Ran {
        dir,
        trained,
        profile,
        unwritten,
    } = ran;
    let mut unwritten: Vec<Failure> = unwritten.into_iter().collect();
    let unsaved = unsaved(&trained.unsaved);
    if let Some(folder) = &args.save_hf {
        let config = weights::hf_config(&plan.model);
        let saved = config.and_then(|config| trained.weights.save(folder, &config));
        unwritten.extend(saved.map_err(failure).err());
    }
    if let Some(dir) = &args.profile_out {
        unwritten.extend(profile.save(dir).map_err(Failure::runtime).err());
    }
    if unwritten.is_empty() && unsaved.is_none() {
        return Ok(Shown {
            dir,
            steps: trained.steps,
            summary: trained.summary,
            checkpoints: trained.checkpoints,
        });
    }
    let unwritten = unwritten.iter().map(ToString::to_string);
    let all: Vec<String> = unsaved.into_iter().chain(unwritten).collect();
    Err(Failure::runtime(Error::Unsaved(all.join("; "))))
}

/// What is to be said at the end of checkpoints that could not be written, each of which was said when it failed.
fn unsaved(all: &[String]) -> Option<String> {
    match all {
        [] => None,
        [one] => Some(one.clone()),
        [.., last] => Some(format!(
            "{} checkpoints, of which the last: {last}",
            all.len()
        )),
    }
}

/// What a run is shown by.
struct Shown {
    dir: PathBuf,
    steps: Vec<StepRecord>,
    summary: RunSummary,
    checkpoints: Vec<Written>,
}

fn show(args: &ExecuteArgs, plan: &Plan, shown: &Shown, output: Output) -> Result<(), Failure> {
    let (summary, checkpoint) = (&shown.summary, shown.checkpoints.last());
    for why in checkpoint.iter().flat_map(|saved| &saved.not_removed) {
        output.note(why)?;
    }
    output.answer(
        &ExecuteJson {
            run_dir: &shown.dir,
            checkpoint,
            summary,
        },
        || {
            let validation = summary.validation.map_or(String::new(), |found| {
                format!(", validation loss {:.4} over {} samples", found.loss, found.samples)
            });
            let mut text = format!(
                "median step {:.4} s, {:.0} tokens/s, final loss {:.4}{validation}\n{}run directory: {}\n",
                summary.step_s,
                summary.tokens_per_s,
                summary.final_loss,
                moefold_reports::peak_text(summary),
                shown.dir.display()
            );
            if plan.planned.capacity.is_some() {
                writeln!(text, "{}", dropped(&shown.steps)).expect("a string takes any text");
            }
            if let Some(saved) = checkpoint {
                writeln!(text, "checkpoint: {}", described(saved))
                    .expect("a string takes any text");
            }
            if let Some(dir) = &args.profile_out {
                writeln!(text, "profile: {}", dir.display()).expect("a string takes any text");
            }
            if let Some(folder) = &args.save_hf {
                writeln!(text, "weights: {}", folder.display()).expect("a string takes any text");
            }
            text
        },
    )
}

/// A checkpoint in words.
fn described(saved: &Written) -> String {
    format!(
        "{} ({:.1} MiB, written in {:.2} s)",
        saved.dir.display(),
        saved.bytes as f64 / f64::from(1 << 20),
        saved.seconds
    )
}

/// What a run will write, held and tried before its first step.
struct Claims {
    run: Claim,
    /// Directories of weights and of the profile, where there are any.
    beside: [Option<Claim>; 2],
}

impl Claims {
    fn of(args: &ExecuteArgs, plan: &Plan) -> Result<Self, Failure> {
        let run = match &args.out {
            Some(dir) if args.again.goes_on => RunDir::claim_again(dir),
            Some(dir) => RunDir::claim(dir),
            None => Claim::numbered(Path::new("runs"), "run"),
        };
        let run = run.map_err(failure)?;
        let of_weights = |folder: &PathBuf| {
            let claim = Claim::of_directory(folder, "weights are written")?;
            claim.check_room(weights::saved_bytes(&plan.model), "the weights")?;
            Ok(claim)
        };
        // One of an earlier run is replaced.
        let of_profile = |dir: &PathBuf| {
            files::check_no_run(dir, "a profile is written")?;
            let claim = Claim::again(dir, "a profile is written")?;
            claim.probe(1)?;
            Ok(claim)
        };
        let weights = args.save_hf.as_ref().map(of_weights).transpose();
        let profile = args.profile_out.as_ref().map(of_profile).transpose();
        let beside = [weights.map_err(failure)?, profile.map_err(failure)?];
        Ok(Self { run, beside })
    }
}

/// The end that a signal asked for.
fn stopped(signal: usize, ran: Option<&Ran>, options: &TrainOptions, plan: &Plan) -> Failure {
    let name = signals::name(signal);
    let Some(ran) = ran else {
        return Failure::Signalled(signal, anyhow!("{name}: stopped with the other ranks"));
    };
    let done = ran.trained.steps.last().map_or(0, |step| step.step + 1);
    let dir = ran.dir.display();
    let saved = ran.trained.checkpoints.last();
    let goes_on = saved.map(|saved| {
        format!(
            "checkpoint: {}; `--resume {dir}` goes on from it",
            described(saved)
        )
    });
    let unwritten = ran.unwritten.iter().map(ToString::to_string);
    let missing = unsaved(&ran.trained.unsaved).into_iter().chain(unwritten);
    let (steps, model) = (options.steps, &plan.model.name);
    let all = [format!(
        "{name}: stopped after {done} steps of {steps} of {model}"
    )];
    let all: Vec<String> = all.into_iter().chain(goes_on).chain(missing).collect();
    let error = anyhow!(all.join("; "));
    if saved.is_some_and(|saved| saved.step == done) {
        Failure::Signalled(signal, error)
    } else {
        // The checkpoint that a signal asks for is what could not be written.
        Failure::Runtime(error)
    }
}

/// What a run came to on rank 0.
struct Ran {
    /// Its directory.
    dir: PathBuf,
    trained: Trained,
    profile: Profile,
    /// What of the directory could not be written.
    unwritten: Option<Failure>,
}

/// Trains under a plan on rank threads, shows each step, and leaves everything measured in `dir`.
pub(crate) fn train_into(
    dir: &Path,
    plan: &Plan,
    samples: &Samples,
    options: &TrainOptions,
    output: Output,
) -> Result<Trained, Failure> {
    let world = World::threads(plan.request.gpus);
    let data = Data {
        training: samples,
        validation: None,
    };
    let claim = RunDir::claim(dir).map_err(failure)?;
    let control = Control::default();
    let ran = train_in(
        &world,
        Some(claim),
        plan,
        data,
        options,
        true,
        &control,
        output,
    )?;
    let ran = ran.expect("rank 0 is a thread of this process");
    ran.unwritten.map_or(Ok(ran.trained), Err)
}

/// A run directory that steps go into.
struct Journal {
    files: RunDir,
    /// Whether the last step could not be written.
    is_failing: bool,
}

impl Journal {
    /// Adds a step. That it cannot be written is noted once, and a checkpoint is asked for; the run fails only where its
    /// directory is lost.
    fn step(
        &mut self,
        record: &StepRecord,
        control: &Control,
        note: &dyn Fn(&str),
    ) -> Result<(), Error> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let time_s = now.map_or(0.0, |since| since.as_secs_f64());
        let step = record.step;
        match self.files.step(record, time_s) {
            Err(error @ Error::Lost { .. }) => return Err(error),
            Err(error) if !self.is_failing => {
                self.is_failing = true;
                note(&format!(
                    "step {step}: {error}; training goes on, what is to be written is kept and tried again after every \
                     step, and a checkpoint is saved if that can be"
                ));
                control.save();
            }
            Ok(()) if self.is_failing => {
                self.is_failing = false;
                note(&format!("step {step}: all steps are written again"));
            }
            Ok(()) | Err(_) => {}
        }
        Ok(())
    }
}

fn lock(journal: &Mutex<Journal>) -> MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same on the ranks of `world`. Where rank 0 is another process, that one shows, writes and
/// returns.
#[expect(
    clippy::too_many_arguments,
    reason = "what a run is made of, each of its own type"
)]
fn train_in(
    world: &World,
    run: Option<Claim>,
    plan: &Plan,
    data: Data<'_>,
    options: &TrainOptions,
    keep_weights: bool,
    control: &Control,
    output: Output,
) -> Result<Option<Ran>, Failure> {
    let run_in = |watch: Watch<'_>| {
        train::run_in(
            world,
            &plan.planned,
            &plan.model,
            &plan.request.batch,
            options,
            data,
            keep_weights,
            watch,
        )
        .map_err(failure)
    };
    let Some(run) = run else {
        run_in(Watch {
            on_step: &|_| Ok(()),
            on_note: &|_| (),
            control,
        })?;
        return Ok(None);
    };
    let ranks = plan.request.gpus;
    let mut environment = Environment::detect(ranks, &options.device);
    environment.resumed = options.init.resumed().cloned();
    let dir = run.path().to_owned();
    let journal = Mutex::new(Journal {
        files: RunDir::create(run, plan, &environment).map_err(failure)?,
        is_failing: false,
    });
    let steps = options.steps.saturating_sub(first_step(&options.init));
    let progress = output.progress(steps, "training");
    let every = if output.verbose {
        1
    } else {
        (steps / 10).max(1)
    };
    let course = Course {
        plan,
        first: first_step(&options.init),
        steps: options.steps,
        began: Instant::now(),
    };
    // A reader of notes that went away shows when the answer is printed.
    let on_note = |text: &str| progress.suspend(|| drop(output.note(text)));
    let on_step = |record: &StepRecord| {
        lock(&journal).step(record, control, &on_note)?;
        progress.inc(1);
        if record.validation.is_some()
            || record.step.is_multiple_of(every)
            || record.step + 1 == options.steps
        {
            // A reader that went away shows when the answer is printed.
            let _ = progress.suspend(|| output.say(&course.line(record)));
        }
        Ok(())
    };
    let here = if world.is_apart() { 1 } else { ranks };
    let watch = HostWatch::begin(
        &options.device,
        here * environment.threads_per_rank,
        !world.is_apart(),
    );
    let trained = run_in(Watch {
        on_step: &on_step,
        on_note: &on_note,
        control,
    });
    // A directory that is lost is the reason of what fails then.
    let lost = |error| {
        lock(&journal)
            .files
            .check()
            .map_err(failure)
            .err()
            .unwrap_or(error)
    };
    let mut trained = trained.map_err(lost)?.expect("rank 0 is here");
    trained.summary.host = watch.and_then(HostWatch::end);
    progress.finish_and_clear();
    let Journal { mut files, .. } = journal.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut profile = trained.measured.profile(&environment);
    profile.pace_s = trained.summary.host.and_then(|host| host.pace_s);
    let written = match control.stopped() {
        // Without a summary it is a run that did not finish.
        Some(_) => files.flush(),
        None => files.finish(&trained.trace, &profile, &trained.summary),
    };
    Ok(Some(Ran {
        dir,
        trained,
        profile,
        unwritten: written.map_err(failure).err(),
    }))
}

/// Steps that were taken before the run.
fn first_step(init: &Init) -> u64 {
    init.resumed().map_or(0, |resumed| resumed.step)
}

/// What a line of progress needs beside the step.
struct Course<'a> {
    plan: &'a Plan,
    first: u64,
    steps: u64,
    began: Instant,
}

impl Course<'_> {
    fn line(&self, record: &StepRecord) -> String {
        let StepRecord { step, loss, .. } = record;
        let predicted = &self.plan.planned.predicted;
        // The FLOPs of a token over the FLOP/s of the device, as the plan has them.
        let mfu = predicted.mfu / predicted.tokens_per_s_per_gpu * record.tokens_per_s
            / f64::from(self.plan.request.gpus);
        let each = self.began.elapsed().div_f64((step + 1 - self.first) as f64);
        let left = each.mul_f64((self.steps - step - 1) as f64).as_secs();
        let (hours, minutes, seconds) = (left / 3600, left / 60 % 60, left % 60);
        let validation = record.validation.map_or(String::new(), |found| {
            format!(
                "  validation loss {:.4} (perplexity {:.2})",
                found.loss, found.perplexity
            )
        });
        let drops = match self.plan.planned.capacity {
            None => String::new(),
            Some(_) => format!("{}  ", dropped(std::slice::from_ref(record))),
        };
        format!(
            "step {step:>5}  loss {loss:.4}  grad norm {:.3}  {drops}{:.3} s  {:.0} tokens/s  MFU {}  {hours}:{minutes:02}:{seconds:02} left{validation}",
            record.grad_norm,
            record.step_s,
            record.tokens_per_s,
            moefold_reports::format::percent(mfu)
        )
    }
}

/// What experts have dropped of the tokens that chose them.
fn dropped(steps: &[StepRecord]) -> String {
    let dropped: u64 = steps.iter().map(|step| step.dropped).sum();
    let loads = steps.iter().flat_map(|step| &step.expert_load);
    let all: u64 = loads.flatten().sum();
    let share = dropped as f64 / all.max(1) as f64;
    format!(
        "dropped tokens {dropped} ({})",
        moefold_reports::format::percent(share)
    )
}

/// What to train on, and what to validate on. One process of a run reads all of it where that was asked for.
fn samples(
    args: &ExecuteArgs,
    plan: &Plan,
    is_first: bool,
) -> Result<(Samples, Option<Validation>), Failure> {
    let verify = |blend: &Blend| {
        if args.verify_data && is_first {
            blend.verify().map_err(failure)?;
        }
        Ok::<_, Failure>(())
    };
    let blend = if args.data.is_empty() {
        Tokenizer::named(&args.tokenizer)
            .and_then(|tokenizer| TokenStream::text(&args.text, &tokenizer))
            .map(Blend::of)
    } else {
        Blend::open("--data", &args.data)
    }
    .map_err(failure)?;
    verify(&blend)?;
    let order = if args.no_shuffle {
        Order::TokenStream
    } else {
        Order::Shuffled {
            seed: args.train.seed,
        }
    };
    let packing = args.packing.packing(plan)?;
    let cut = |blend: &Blend, share| {
        let batch = &plan.request.batch;
        let share = args.split.map(|split| (split, share));
        Samples::of_blend(blend, share, batch.seq_len, plan.model.vocab_size, order)
            .map(|samples| samples.packed(packing))
            .map_err(failure)
    };
    let training = cut(&blend, Share::Training)?;
    let held = if args.split.is_some() {
        Some(cut(&blend, Share::Validation)?)
    } else if args.valid_data.is_empty() {
        None
    } else {
        let held = Blend::open("--valid-data", &args.valid_data).map_err(failure)?;
        verify(&held)?;
        Some(cut(&held, Share::Validation)?)
    };
    let given = [
        ("--eval-interval", args.eval_interval),
        ("--eval-iters", args.eval_iters),
    ];
    if held.is_none()
        && let Some((flag, _)) = given.iter().find(|(_, value)| value.is_some())
    {
        return Err(Failure::Request(anyhow!(
            "{flag}: there is nothing to validate on: give --split or --valid-data"
        )));
    }
    let validation = held.map(|samples| Validation {
        samples,
        every: args.eval_interval.map_or(EVAL_INTERVAL, u64::from),
        iters: args.eval_iters.map_or(EVAL_ITERS, u64::from),
    });
    Ok((training, validation))
}

impl PackingArgs {
    /// What they say of samples for a plan.
    pub(crate) fn packing(&self, plan: &Plan) -> Result<Packing, Failure> {
        let packing = Packing {
            reset_position_ids: self.reset_position_ids,
            reset_attention_mask: self.reset_attention_mask,
            eod_mask_loss: self.eod_mask_loss,
            eod_token: self.eod_token.map(u32::cast_signed),
        };
        let refuse =
            |id: u32, why: String| Err(Failure::Request(anyhow!("--eod-token {id}: {why}")));
        match self.eod_token {
            Some(id) if !packing.is_any() => refuse(
                id,
                "nothing is a document's own: give --reset-position-ids, --reset-attention-mask or --eod-mask-loss"
                    .to_owned(),
            ),
            Some(id) if u64::from(id) >= plan.model.vocab_size => refuse(
                id,
                format!("expected an id below {}, the model's vocabulary", plan.model.vocab_size),
            ),
            _ => Ok(packing),
        }
    }
}

impl TrainArgs {
    /// How the load of experts is balanced.
    pub(crate) fn balancing(&self) -> Balancing {
        Balancing {
            aux_loss_coef: self.aux_loss_coef,
            seq_aux_loss_coef: self.seq_aux_loss_coef,
            global_aux_loss_coef: self.global_aux_loss_coef,
            z_loss_coef: self.z_loss_coef,
            bias_update_rate: self.bias_update_rate,
        }
    }
}

pub(crate) fn options(
    args: &TrainArgs,
    init: Init,
    device: DeviceSpec,
) -> Result<TrainOptions, Failure> {
    let not_negative = [
        ("--lr", args.lr),
        ("--eps", args.eps),
        ("--weight-decay", args.weight_decay),
        ("--clip", args.clip),
        ("--aux-loss-coef", args.aux_loss_coef),
        ("--seq-aux-loss-coef", args.seq_aux_loss_coef),
        ("--global-aux-loss-coef", args.global_aux_loss_coef),
        ("--z-loss-coef", args.z_loss_coef),
        ("--bias-update-rate", args.bias_update_rate),
        ("--min-lr", args.min_lr.unwrap_or(0.0)),
        ("--mtp-loss-scaling-factor", args.mtp_loss_scaling_factor),
    ];
    for (flag, value) in not_negative {
        if !value.is_finite() || value < 0.0 {
            return Err(Failure::Request(anyhow!(
                "{flag}: found {value}, expected a number of at least 0"
            )));
        }
    }
    for (flag, value) in [("--beta1", args.beta1), ("--beta2", args.beta2)] {
        if !(0.0..1.0).contains(&value) {
            return Err(Failure::Request(anyhow!(
                "{flag}: found {value}, expected a number from 0 to below 1"
            )));
        }
    }
    if let Some(least) = args.min_lr
        && least > args.lr
    {
        return Err(Failure::Request(anyhow!(
            "--min-lr {least}: is above --lr {}; rates fall to it",
            args.lr
        )));
    }
    if let Some(decayed) = args.lr_decay_steps
        && decayed <= args.warmup
    {
        return Err(Failure::Request(anyhow!(
            "--lr-decay-steps {decayed}: is within the warm-up, --warmup {}; it counts from the first step",
            args.warmup
        )));
    }
    let of_wsd = [
        ("--wsd-decay", args.wsd_decay.is_some()),
        ("--wsd-decay-steps", args.wsd_decay_steps.is_some()),
    ];
    if args.lr_schedule != LrSchedule::Wsd
        && let Some((flag, _)) = of_wsd.iter().find(|(_, is_given)| *is_given)
    {
        return Err(Failure::Request(anyhow!("{flag}: needs --lr-schedule wsd")));
    }
    let steps = u64::from(args.steps);
    let first = first_step(&init);
    let first_traced = first + (steps.saturating_sub(first) / 4).min(3);
    Ok(TrainOptions {
        steps,
        lr: LearningRate {
            peak: args.lr,
            warmup: u64::from(args.warmup),
            decay: match args.lr_schedule {
                LrSchedule::Constant => Decay::Constant,
                LrSchedule::Linear => Decay::Linear,
                LrSchedule::Cosine => Decay::Cosine,
                LrSchedule::InverseSquareRoot => Decay::InverseSquareRoot,
                LrSchedule::Wsd => Decay::Wsd,
            },
            steps: args.lr_decay_steps.map_or(steps, u64::from),
            floor: args.min_lr,
            anneal: match args.wsd_decay.unwrap_or(WsdDecay::Linear) {
                WsdDecay::Linear => Anneal::Linear,
                WsdDecay::Cosine => Anneal::Cosine,
                WsdDecay::Exponential => Anneal::Exponential,
                WsdDecay::MinusSqrt => Anneal::MinusSqrt,
            },
            anneal_steps: args.wsd_decay_steps.map(u64::from),
        },
        adam: AdamOptions {
            betas: (args.beta1, args.beta2),
            eps: args.eps,
            weight_decay: args.weight_decay,
            clip: (args.clip > 0.0).then_some(args.clip),
        },
        balancing: args.balancing(),
        mtp_loss_scaling_factor: args.mtp_loss_scaling_factor,
        seed: args.seed,
        init,
        device,
        traced_steps: first_traced..first_traced + TRACED_STEPS,
        save: None,
    })
}
