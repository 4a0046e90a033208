//! `moefold execute`: train under a plan and leave a run directory.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use moefold_executor::checkpoint::{self, Written};
use moefold_executor::data::{
    Blend, Order, Packing, Samples, Share, TokenStream, Tokenizer, Validation,
};
use moefold_executor::device::DeviceSpec;
use moefold_executor::environment::Environment;
use moefold_executor::files::check_directory;
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
use crate::device;
use crate::dry_run;
use crate::failure::{Failure, failure};
use crate::launch;
use crate::output::Output;

/// Steps after warm-up whose spans go into `trace.json`: enough to see a pattern, few enough to open.
const TRACED_STEPS: u64 = 3;

/// Steps between evaluations, and batches of one, as Megatron-LM has them.
const EVAL_INTERVAL: u64 = 1000;
const EVAL_ITERS: u64 = 100;

/// What `--json` prints.
#[derive(Serialize)]
struct ExecuteJson<'a> {
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
    let plan = Plan::load(&args.plan).map_err(Failure::request)?;
    let device = device::choose(args.device, output)?.of_plan(&plan, args.launch, None)?;
    let world = match args.launch {
        Launch::Threads => World::threads(plan.request.gpus),
        Launch::Processes => return launch::processes(plan.request.gpus),
        Launch::Env => World::process(launch::from_environment()?)
            .heartbeat(Duration::from_secs_f64(args.heartbeat_s))
            .listen()
            .map_err(failure)?,
    };
    let world = match Launched::timeout().map_err(failure)? {
        Some(deadline) => world.deadline(deadline),
        None => world,
    };
    let (training, validation) = samples(args, &plan)?;
    let data = Data {
        training: &training,
        validation: validation.as_ref(),
    };
    let dir = match &args.out {
        Some(dir) => dir.clone(),
        None => numbered(Path::new("runs"), "run"),
    };
    let init = init(args, world.has_first().then_some(output))?;
    let mut options = options(&args.train, init, device)?;
    options.save = args.save_every.map(|every| Saving {
        every: u64::from(every),
        run_dir: dir.clone(),
    });
    let keep_weights = args.save_hf.is_some();
    if let Some(folder) = &args.save_hf {
        check_directory(folder, "weights are written").map_err(failure)?;
    }
    let trained = train_in(&world, &dir, &plan, data, &options, keep_weights, output)?;
    let Some((trained, profile)) = trained else {
        // Rank 0's process leaves what there is to leave.
        return Ok(());
    };
    if let Some(dir) = &args.profile_out {
        profile.save(dir).map_err(Failure::runtime)?;
    }
    if let Some(folder) = &args.save_hf {
        let config = weights::hf_config(&plan.model).map_err(failure)?;
        trained.weights.save(folder, &config).map_err(failure)?;
    }
    let (summary, checkpoint) = (&trained.summary, trained.checkpoints.last());
    for why in checkpoint.iter().flat_map(|saved| &saved.not_removed) {
        output.note(why)?;
    }
    output.answer(
        &ExecuteJson {
            run_dir: &dir,
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
                dir.display()
            );
            if plan.planned.capacity.is_some() {
                writeln!(text, "{}", dropped(&trained.steps)).expect("a string takes any text");
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

/// What a run begins with, as the flags say; the choice of a checkpoint is shown on `output`.
fn init(args: &ExecuteArgs, output: Option<Output>) -> Result<Init, Failure> {
    let Some(path) = &args.resume else {
        return Ok(match args.init.as_str() {
            "random" => Init::Random,
            folder => Init::HuggingFace(PathBuf::from(folder)),
        });
    };
    let found = checkpoint::find(path).map_err(failure)?;
    if let Some(output) = output {
        for why in &found.passed_over {
            output.note(why)?;
        }
        let from = &found.resumed;
        output.say(&format!(
            "going on from {}, after {} steps",
            from.checkpoint.display(),
            from.step
        ))?;
    }
    Ok(Init::Resume(found.resumed))
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
    let trained = train_in(&world, dir, plan, data, options, true, output)?;
    let (trained, _) = trained.expect("rank 0 is a thread of this process");
    Ok(trained)
}

/// The same on the ranks of `world`. Where rank 0 is another process, that one shows, writes and
/// returns.
fn train_in(
    world: &World,
    dir: &Path,
    plan: &Plan,
    data: Data<'_>,
    options: &TrainOptions,
    keep_weights: bool,
    output: Output,
) -> Result<Option<(Trained, Profile)>, Failure> {
    if !world.has_first() {
        run_in(world, plan, data, options, keep_weights, &|_| ())?;
        return Ok(None);
    }
    let ranks = plan.request.gpus;
    let mut environment = Environment::detect(ranks, &options.device);
    environment.resumed = options.init.resumed().cloned();
    let files = Mutex::new((
        RunDir::create(dir, plan, &environment).map_err(failure)?,
        Ok(()),
    ));
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
    let on_step = |record: &StepRecord| {
        let mut guard = files
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let (files, written) = &mut *guard;
        if written.is_ok() {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            *written = files.step(record, now.map_or(0.0, |since| since.as_secs_f64()));
        }
        progress.inc(1);
        if record.validation.is_some()
            || record.step.is_multiple_of(every)
            || record.step + 1 == options.steps
        {
            // A reader that went away shows when the answer is printed.
            let _ = output.say(&course.line(record));
        }
    };
    let here = if world.is_apart() { 1 } else { ranks };
    let watch = HostWatch::begin(here * environment.threads_per_rank, !world.is_apart());
    let trained = run_in(world, plan, data, options, keep_weights, &on_step)?;
    let mut trained = trained.expect("rank 0 is here");
    trained.summary.host = watch.and_then(HostWatch::end);
    progress.finish_and_clear();
    let (files, written) = files
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    written.map_err(failure)?;
    let profile = trained.measured.profile(&environment);
    files
        .finish(&trained.trace, &profile, &trained.summary)
        .map_err(failure)?;
    Ok(Some((trained, profile)))
}

fn run_in(
    world: &World,
    plan: &Plan,
    data: Data<'_>,
    options: &TrainOptions,
    keep_weights: bool,
    on_step: &(dyn Fn(&StepRecord) + Sync),
) -> Result<Option<Trained>, Failure> {
    train::run_in(
        world,
        &plan.planned,
        &plan.model,
        &plan.request.batch,
        options,
        data,
        keep_weights,
        on_step,
    )
    .map_err(failure)
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

/// The first of `folder/stem-1`, `folder/stem-2`, ... that does not exist.
pub(crate) fn numbered(folder: &Path, stem: &str) -> PathBuf {
    (1..=u32::MAX)
        .map(|number| folder.join(format!("{stem}-{number}")))
        .find(|path| !path.exists())
        .expect("numbers do not run out")
}

/// What to train on, and what to validate on.
fn samples(args: &ExecuteArgs, plan: &Plan) -> Result<(Samples, Option<Validation>), Failure> {
    let blend = if args.data.is_empty() {
        Tokenizer::named(&args.tokenizer)
            .and_then(|tokenizer| TokenStream::text(&args.text, &tokenizer))
            .map(Blend::of)
    } else {
        Blend::open("--data", &args.data)
    }
    .map_err(failure)?;
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

fn options(args: &TrainArgs, init: Init, device: DeviceSpec) -> Result<TrainOptions, Failure> {
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
            anneal: match args.wsd_decay {
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
