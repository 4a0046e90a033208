//! `moefold quickstart`: the whole loop on this machine with a small model and real text: plan, train
//! under a folded layout, measure, plan again with what was measured, compare.
//!
//! Every stage calls what the verbs call and names the command that would do the same by hand.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use moefold_executor::claim::Claim;
use moefold_executor::data::{Order, Samples, TokenStream, Tokenizer};
use moefold_executor::device::DeviceSpec;
use moefold_executor::files::write_json;
use moefold_executor::lr::{Decay, LearningRate};
use moefold_executor::moe::balance::Balancing;
use moefold_executor::optimizer::AdamOptions;
use moefold_executor::options::{Init, TrainOptions};
use moefold_executor::profile::rehearsal::Course;
use moefold_planner::choice::{Dispatcher, StackName};
use moefold_planner::layout::{Batch, PartialDegrees};
use moefold_planner::model::{Model, presets};
use moefold_planner::options::SearchOptions;
use moefold_planner::plan::Plan;
use moefold_profiles::run::RunSummary;
use moefold_profiles::{Cluster, presets as clusters};
use moefold_reports::format;
use serde::Serialize;

use crate::cli::QuickstartArgs;
use crate::execute::train_into;
use crate::failure::{Failure, failure};
use crate::output::Output;
use crate::plan::{Found, NamedProfile, Question, load_profiles};
use crate::profile::{MeasuredHere, measure};

/// English text in the public domain; see `quickstart/SOURCE.md`.
pub(crate) const TEXT: &str = include_str!("quickstart/text.txt");
pub(crate) const MODEL: &str = "quickstart";
pub(crate) const BATCH: Batch = Batch {
    seq_len: 128,
    global_batch: 16,
};
const LEARNING_RATE: f64 = 3e-3;
const AUX_LOSS_COEF: f64 = 0.01;
/// One for all plans: what is measured of one is what another is priced with.
const DISPATCHER: Dispatcher = Dispatcher::Alltoall;
/// Plans shown, and enough to show all there are.
const TOP: usize = 5;
const EVERYTHING: usize = 10_000;
const FOLDED: &str = "plan-folded.json";
const REPLANNED: &str = "plan-folded-replanned.json";
const BEST: &str = "plan-best.json";
/// Time given to measuring.
const PROFILE_BUDGET_S: f64 = 25.0;

/// What `--json` prints.
#[derive(Serialize)]
struct QuickstartJson {
    directory: PathBuf,
    report: PathBuf,
    /// Predicted over measured step time minus one, before anything was measured.
    error_before: f64,
    /// The same after `profile`.
    error_after: f64,
    final_loss: f64,
    tokens_per_s: f64,
}

/// What all stages share.
struct Stage<'a> {
    args: &'a QuickstartArgs,
    dir: &'a Path,
    model: Model,
    cluster: Cluster,
    samples: Samples,
    output: Output,
}

pub(crate) fn run(args: &QuickstartArgs, output: Output) -> Result<(), Failure> {
    let claim = match &args.out {
        Some(dir) => Claim::new(dir, "all of it is written"),
        None => Claim::numbered(Path::new("runs"), "quickstart"),
    };
    let claim = claim.map_err(failure)?;
    let dir = claim.path().to_owned();
    let stage = prepare(args, &dir, output)?;

    let before = stage.plan_first()?;
    let first = stage.train("run-unmeasured", FOLDED, &before)?;
    let profile = stage.profile(&before)?;
    let (after, best) = stage.plan_again(&profile)?;
    let second = stage.train("run-profiled", REPLANNED, &after)?;
    if best.planned.layout != after.planned.layout {
        stage.train("run-best", BEST, &best)?;
    }
    let report = stage.compare()?;

    let error = |plan: &Plan, run: &RunSummary| plan.planned.predicted.step_s / run.step_s - 1.0;
    let answer = QuickstartJson {
        directory: dir.clone(),
        report,
        error_before: error(&before, &first),
        error_after: error(&after, &second),
        final_loss: second.final_loss,
        tokens_per_s: second.tokens_per_s,
    };
    output.answer(&answer, || summary(&answer))
}

/// How the model is trained for some steps.
pub(crate) fn training(steps: u32, seed: u64) -> TrainOptions {
    let steps = u64::from(steps);
    TrainOptions {
        steps,
        lr: LearningRate {
            warmup: steps / 10,
            decay: Decay::Cosine,
            steps,
            ..LearningRate::constant(LEARNING_RATE)
        },
        adam: AdamOptions::default(),
        // Without it a few experts take most tokens within some dozens of steps.
        balancing: Balancing {
            aux_loss_coef: AUX_LOSS_COEF,
            ..Balancing::default()
        },
        mtp_loss_scaling_factor: moefold_executor::options::MTP_LOSS_SCALING_FACTOR,
        seed,
        init: Init::Random,
        device: DeviceSpec::CPU,
        traced_steps: steps / 2..steps / 2 + 2,
        save: None,
    }
}

fn summary(answer: &QuickstartJson) -> String {
    format!(
        "\nThe step of the folded layout was predicted {} before anything was measured, and {} with this machine's \
         profile.\nOpen {} to see where the time and the memory went.\n",
        format::step_off(answer.error_before),
        format::step_off(answer.error_after),
        answer.report.display()
    )
}

/// Makes everything the stages read.
fn prepare<'a>(
    args: &'a QuickstartArgs,
    dir: &'a Path,
    output: Output,
) -> Result<Stage<'a>, Failure> {
    if args.steps == 0 || args.ranks == 0 {
        return Err(Failure::Request(anyhow!(
            "--steps and --ranks: expected at least 1 each"
        )));
    }
    let model = presets::load(MODEL).map_err(Failure::runtime)?;
    let experts = model.moe().map_or(1, |moe| moe.experts);
    if !experts.is_multiple_of(args.ranks.into()) {
        let divides = |ranks: &u64| experts.is_multiple_of(*ranks);
        let all: Vec<String> = (1..=experts)
            .filter(divides)
            .map(|ranks| ranks.to_string())
            .collect();
        return Err(Failure::Request(anyhow!(
            "--ranks: found {}, expected one of {}, over which the {experts} experts of {MODEL} divide",
            args.ranks,
            all.join(", ")
        )));
    }
    fs::write(dir.join("text.txt"), TEXT)
        .with_context(|| format!("{}: cannot be written", dir.display()))
        .map_err(Failure::Runtime)?;
    let stream = TokenStream::text(&[dir.join("text.txt")], &Tokenizer::Byte).map_err(failure)?;
    let order = Order::Shuffled { seed: args.seed };
    let samples = Samples::new(stream, BATCH.seq_len, model.vocab_size, order).map_err(failure)?;
    Ok(Stage {
        args,
        dir,
        model,
        cluster: clusters::local(args.ranks),
        samples,
        output,
    })
}

impl Stage<'_> {
    /// Attention and experts mapped differently: attention tensor parallel over pairs of ranks,
    /// experts spread whole over all of them.
    fn folded(&self) -> PartialDegrees {
        PartialDegrees {
            tp: Some(2.min(self.args.ranks)),
            ep: Some(self.args.ranks),
            etp: Some(1),
            ..PartialDegrees::default()
        }
    }

    fn heading(&self, title: &str, commands: &[String]) -> Result<(), Failure> {
        self.output.say(&format!("\n== {title}"))?;
        for command in commands {
            self.output.say(&format!("   $ moefold {command}"))?;
        }
        Ok(self.output.say("")?)
    }

    fn search(&self, pins: PartialDegrees, profiles: &[NamedProfile]) -> Result<Found, Failure> {
        self.search_for(TOP, pins, profiles)
    }

    fn search_for(
        &self,
        top: usize,
        pins: PartialDegrees,
        profiles: &[NamedProfile],
    ) -> Result<Found, Failure> {
        let options = SearchOptions {
            pins,
            top,
            dispatcher: Some(DISPATCHER),
            ..SearchOptions::new(BATCH, StackName::Moefold)
        };
        Question::new(&self.model, &self.cluster, self.args.ranks, profiles).ask(&options)
    }

    fn path(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn plan_command(&self, rest: &str) -> String {
        format!(
            "plan --model {MODEL} --cluster local --gpus {} --seq-len {} --global-batch {} --dispatcher {} {rest}",
            self.args.ranks,
            BATCH.seq_len,
            BATCH.global_batch,
            DISPATCHER.name()
        )
    }

    /// The same pins as on the command line.
    fn folded_flag(&self) -> String {
        format!(
            "--layout tp={},ep={},etp=1",
            2.min(self.args.ranks),
            self.args.ranks
        )
    }

    /// Data and flags of training, as on the command line.
    fn training_flags(&self) -> String {
        format!(
            "--text {} --steps {} --lr {LEARNING_RATE} --lr-schedule cosine --warmup {} --aux-loss-coef {AUX_LOSS_COEF} \
             --seed {}",
            self.path("text.txt"),
            self.args.steps,
            self.args.steps / 10,
            self.args.seed
        )
    }

    fn plan_first(&self) -> Result<Plan, Failure> {
        let title = format!(
            "1. Plan {} ranks of this machine, before anything is measured",
            self.args.ranks
        );
        let out = self.path(FOLDED);
        self.heading(
            &title,
            &[self.plan_command(&format!("{} --out {out}", self.folded_flag()))],
        )?;
        let found = self.search(self.folded(), &[])?;
        let plan = found.best();
        plan.save(Path::new(&out)).map_err(Failure::runtime)?;
        self.output.say(&moefold_reports::plan_table(
            &found.answer,
            &found.alternatives,
        ))?;
        self.output.say(
            "The layout is pinned to a folded one: attention and experts divide the same ranks \
             differently. Look at the confidence: every price is a guess so far.",
        )?;
        Ok(plan)
    }

    fn train(&self, name: &str, file: &str, plan: &Plan) -> Result<RunSummary, Failure> {
        let degrees = plan.planned.layout;
        let number = match name {
            "run-unmeasured" => 2,
            _ => 5,
        };
        let title = format!(
            "{number}. Train {} steps on {} tokens of English text under {degrees}",
            self.args.steps,
            format::grouped(TEXT.len() as u64)
        );
        let command = format!(
            "execute {} {} --out {}",
            self.path(file),
            self.training_flags(),
            self.path(name)
        );
        self.heading(&title, &[command])?;
        let options = training(self.args.steps, self.args.seed);
        let trained = train_into(
            &self.dir.join(name),
            plan,
            &self.samples,
            &options,
            self.output,
        )?;
        self.output.say(&format!(
            "median step {} s, predicted {} s; {}/trace.json opens in Perfetto.",
            format::three_digits(trained.summary.step_s),
            format::three_digits(plan.planned.predicted.step_s),
            self.path(name)
        ))?;
        Ok(trained.summary)
    }

    fn profile(&self, folded: &Plan) -> Result<Vec<NamedProfile>, Failure> {
        let out = self.path("profile");
        let title = format!(
            "3. Measure this machine under {} concurrent ranks",
            self.args.ranks
        );
        self.heading(
            &title,
            &[format!(
                "profile --plan {} {} --out {out}",
                self.path(FOLDED),
                self.training_flags()
            )],
        )?;
        // The folded layouts and those that might beat them.
        let mut plans: Vec<Plan> = Vec::new();
        for pins in [self.folded(), PartialDegrees::default()] {
            for planned in self.search(pins, &[])?.answer.plans {
                let is_new = |plan: &Plan| plan.planned.layout != planned.layout;
                if plans.iter().all(is_new) {
                    plans.push(Plan {
                        planned,
                        ..folded.clone()
                    });
                }
            }
        }
        self.output.say(&format!(
            "Training the {} likely layouts for some steps each, for {PROFILE_BUDGET_S:.0} s or so.",
            plans.len()
        ))?;
        let course = Course {
            samples: &self.samples,
            options: &training(self.args.steps, self.args.seed),
        };
        let MeasuredHere { measured, .. } = measure(&plans, course, PROFILE_BUDGET_S, self.output)?;
        let directory = PathBuf::from(&out);
        measured
            .profile
            .save(&directory)
            .map_err(Failure::runtime)?;
        self.output.say(&format!(
            "{} ops and collectives measured; raw samples are in {out}/profile.json.",
            measured.profile.samples.len()
        ))?;
        load_profiles(&[directory], &self.cluster)
    }

    /// The folded layout priced again, and the best layout of all.
    fn plan_again(&self, profiles: &[NamedProfile]) -> Result<(Plan, Plan), Failure> {
        let profile = self.path("profile");
        let (folded_out, best_out) = (self.path(REPLANNED), self.path(BEST));
        let commands = [
            self.plan_command(&format!(
                "{} --profile {profile} --out {folded_out}",
                self.folded_flag()
            )),
            self.plan_command(&format!("--profile {profile} --out {best_out}")),
        ];
        self.heading("4. Plan again, priced by the profile", &commands)?;
        let folded = self.search(self.folded(), profiles)?.best();
        folded
            .save(Path::new(&folded_out))
            .map_err(Failure::runtime)?;
        let mut found = self.search(PartialDegrees::default(), profiles)?;
        // The space is small: with room for all in the ranking nothing is pruned, and the picture of
        // speed against memory has every layout that fits.
        let all = self.search_for(EVERYTHING, PartialDegrees::default(), profiles)?;
        found.answer.search.feasible = all.answer.search.feasible;
        let best = found.best();
        best.save(Path::new(&best_out)).map_err(Failure::runtime)?;
        write_json(&self.dir.join("answer.json"), &found.answer).map_err(failure)?;
        self.output.say(&moefold_reports::plan_table(
            &found.answer,
            &found.alternatives,
        ))?;
        Ok((folded, best))
    }

    fn compare(&self) -> Result<PathBuf, Failure> {
        let inputs: Vec<PathBuf> = ["answer.json", "run-unmeasured", "run-profiled", "run-best"]
            .iter()
            .map(|name| self.dir.join(name))
            .filter(|path| path.exists())
            .collect();
        let out = self.dir.join("report");
        let listed: Vec<String> = inputs
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        let command = format!("compare {} --out {}", listed.join(" "), out.display());
        self.heading(
            "6. Compare what was predicted with what was measured",
            &[command],
        )?;
        let written = moefold_reports::compare(&inputs, &out).map_err(Failure::runtime)?;
        for finding in &written.findings {
            self.output.say(&format!("- {finding}"))?;
        }
        Ok(out.join("report.html"))
    }
}
