//! `moefold validate --here`: how near the loop of plan, measure and plan again comes on this machine's CPU.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use moefold_executor::data::{Order, Samples, TokenStream, Tokenizer};
use moefold_executor::profile::rehearsal::Course;
use moefold_planner::choice::{Dispatcher, StackName};
use moefold_planner::layout::PartialDegrees;
use moefold_planner::model::{Model, presets as models};
use moefold_planner::options::{Routing, SearchOptions};
use moefold_planner::plan::Plan;
use moefold_profiles::presets;
use moefold_profiles::trace::{Category, TimeByCategory};
use moefold_profiles::units::GIB;
use moefold_reports::format;
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::ValidateArgs;
use crate::execute::train_into;
use crate::failure::{Failure, failure};
use crate::output::Output;
use crate::plan::{NamedProfile, Question, load_profiles};
use crate::profile::measure;
use crate::quickstart::{BATCH, MODEL, TEXT, training};

/// Ranks of the layouts that are tried, and their degrees.
const LAYOUTS: [(u32, &str); 5] = [
    (4, "tp=2,ep=4,mbs=8"),
    (4, "tp=1,ep=4,mbs=4"),
    (1, "tp=1,ep=1,mbs=8"),
    (2, "tp=1,ep=2,mbs=8"),
    (2, "tp=2,ep=1,mbs=8"),
];
/// The others.
const REST: &str = "cp=1,pp=1,vpp=1,etp=1";
/// A category counts from this share of a step on.
const COUNTS: f64 = 0.05;
/// Steps that differ by less have no order.
const APART: f64 = 0.10;

/// A layout, planned, measured, trained and planned again.
#[derive(Debug, Clone, Serialize)]
struct Trial {
    repetition: u32,
    ranks: u32,
    layout: String,
    /// A step of training.
    measured_step_s: f64,
    /// As predicted before anything was measured, with the machine's profile, with the run itself as profile,
    /// and with the run of the other layout of as many ranks.
    unmeasured_step_s: f64,
    profile_step_s: f64,
    own_run_step_s: f64,
    other_run_step_s: Option<f64>,
    /// By category, in training and as predicted with the profile.
    measured_time_s: TimeByCategory,
    profile_time_s: TimeByCategory,
    /// Peak memory of the fullest rank: measured, and as predicted with the run's routing.
    measured_gib: f64,
    routed_gib: f64,
}

/// How many of some predictions were as near as they should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Bar {
    name: &'static str,
    held: usize,
    of: usize,
}

/// What `--json` prints.
#[derive(Serialize)]
struct HereJson {
    bars: Vec<Bar>,
    trials: Vec<Trial>,
}

/// What all trials share.
struct Bench<'a> {
    args: &'a ValidateArgs,
    folder: &'a Path,
    model: Model,
    samples: Samples,
    output: Output,
}

pub(super) fn run(args: &ValidateArgs, output: Output) -> Result<(), Failure> {
    if args.steps == 0 || args.repeat == 0 {
        return Err(Failure::Request(anyhow!(
            "--steps and --repeat: expected at least 1 each"
        )));
    }
    let folder = tempfile::tempdir()
        .context("a temporary folder cannot be made")
        .map_err(Failure::Runtime)?;
    let trials = Bench::new(args, folder.path(), output)?.trials()?;
    let answer = HereJson {
        bars: bars(&trials),
        trials,
    };
    output.answer(&answer, || summary(&answer))
}

impl<'a> Bench<'a> {
    fn new(args: &'a ValidateArgs, folder: &'a Path, output: Output) -> Result<Self, Failure> {
        let text = folder.join("text.txt");
        fs::write(&text, TEXT)
            .with_context(|| format!("{}: cannot be written", text.display()))
            .map_err(Failure::Runtime)?;
        let model = models::load(MODEL).map_err(Failure::runtime)?;
        let stream = TokenStream::text(&[text], &Tokenizer::Byte).map_err(failure)?;
        let order = Order::Shuffled { seed: 0 };
        let samples =
            Samples::new(stream, BATCH.seq_len, model.vocab_size, order).map_err(failure)?;
        Ok(Self {
            args,
            folder,
            model,
            samples,
            output,
        })
    }

    /// Every layout as often as asked for, in turns.
    fn trials(&self) -> Result<Vec<Trial>, Failure> {
        let mut trials = Vec::new();
        let bar = self.output.progress(
            u64::from(self.args.repeat) * LAYOUTS.len() as u64,
            "planning, measuring, training",
        );
        for repetition in 0..self.args.repeat {
            let first = trials.len();
            for number in 0..LAYOUTS.len() {
                trials.push(self.trial(repetition, number)?);
                bar.inc(1);
            }
            for number in 0..LAYOUTS.len() {
                let same_ranks =
                    |&other: &usize| other != number && LAYOUTS[other].0 == LAYOUTS[number].0;
                if let Some(other) = (0..LAYOUTS.len()).find(same_ranks) {
                    let plan = self.plan(number, &[self.run_dir(repetition, other)], None)?;
                    trials[first + number].other_run_step_s = Some(plan.planned.predicted.step_s);
                }
            }
        }
        bar.finish_and_clear();
        Ok(trials)
    }

    fn run_dir(&self, repetition: u32, number: usize) -> PathBuf {
        self.folder.join(format!("run-{repetition}-{number}"))
    }

    /// The plan of a layout, priced by some profiles.
    fn plan(
        &self,
        number: usize,
        profiles: &[PathBuf],
        routing: Option<Routing>,
    ) -> Result<Plan, Failure> {
        let (ranks, degrees) = LAYOUTS[number];
        let pins = format!("{degrees},{REST}").parse::<PartialDegrees>();
        let options = SearchOptions {
            pins: pins.expect("the layouts are degrees"),
            routing,
            dispatcher: Some(Dispatcher::Alltoall),
            ..SearchOptions::new(BATCH, StackName::Moefold)
        };
        let cluster = presets::local(ranks);
        let profiles: Vec<NamedProfile> = load_profiles(profiles, &cluster)?;
        let found = Question::new(&self.model, &cluster, ranks, &profiles).ask(&options)?;
        Ok(found.best())
    }

    fn trial(&self, repetition: u32, number: usize) -> Result<Trial, Failure> {
        let unmeasured = self.plan(number, &[], None)?;
        let profile = self.folder.join(format!("profile-{repetition}-{number}"));
        let options = training(self.args.steps, 0);
        let measured = measure(
            std::slice::from_ref(&unmeasured),
            Course {
                samples: &self.samples,
                options: &options,
            },
            self.args.budget_s,
            self.output,
        )?;
        measured.profile.save(&profile).map_err(Failure::runtime)?;
        let profiled = self.plan(number, &[profile], None)?;

        let run = self.run_dir(repetition, number);
        let trained = train_into(&run, &profiled, &self.samples, &options, self.output)?;
        let summary = trained.summary;
        let own = self.plan(number, std::slice::from_ref(&run), None)?;
        let routing = Routing::read(&run.display().to_string()).map_err(Failure::runtime)?;
        let routed = self.plan(number, &[], Some(routing))?;

        let peaks = summary.peak_by_rank.iter().map(|peak| peak.bytes.total().0);
        Ok(Trial {
            repetition,
            ranks: LAYOUTS[number].0,
            layout: profiled.planned.layout.to_string(),
            measured_step_s: summary.step_s,
            unmeasured_step_s: unmeasured.planned.predicted.step_s,
            profile_step_s: profiled.planned.predicted.step_s,
            own_run_step_s: own.planned.predicted.step_s,
            other_run_step_s: None,
            measured_time_s: summary.time_s,
            profile_time_s: profiled.planned.predicted.time_s,
            measured_gib: peaks.max().unwrap_or(0) as f64 / GIB as f64,
            routed_gib: routed.planned.predicted.peak_gib,
        })
    }
}

impl Trial {
    /// Predicted over measured less one.
    fn error(&self, predicted_s: f64) -> f64 {
        predicted_s / self.measured_step_s - 1.0
    }

    /// The errors of the categories that count, with the profile.
    fn categories(&self) -> impl Iterator<Item = (Category, f64)> {
        Category::ALL.into_iter().filter_map(|category| {
            let [measured, predicted] =
                [&self.measured_time_s, &self.profile_time_s].map(|time| time.get(category).0);
            let counts = measured > COUNTS * self.measured_step_s;
            counts.then(|| (category, predicted / measured - 1.0))
        })
    }
}

/// What the predictions are held to.
fn bars(trials: &[Trial]) -> Vec<Bar> {
    let mut bars = Vec::new();
    let mut bar = |name, held: Vec<bool>| {
        bars.push(Bar {
            name,
            held: held.iter().filter(|held| **held).count(),
            of: held.len(),
        });
    };
    let of_each = |near: &dyn Fn(&Trial) -> Option<bool>| trials.iter().filter_map(near).collect();
    bar(
        "with a profile within 10%",
        of_each(&|t| Some(t.error(t.profile_step_s).abs() <= 0.10)),
    );
    bar(
        "with a profile no worse by 5 points",
        of_each(&|t| {
            let before = t.error(t.unmeasured_step_s).abs();
            Some(t.error(t.profile_step_s).abs() <= before + 0.05)
        }),
    );
    bar(
        "with its own run within 5%",
        of_each(&|t| Some(t.error(t.own_run_step_s).abs() <= 0.05)),
    );
    bar(
        "with the run of another layout within 10%",
        of_each(&|t| Some(t.error(t.other_run_step_s?).abs() <= 0.10)),
    );
    let categories = trials.iter().flat_map(Trial::categories);
    bar(
        "categories with a profile within 25%",
        categories.map(|(_, error)| error.abs() <= 0.25).collect(),
    );
    bar("pairs in order", orders(trials));
    bar(
        "peak memory with the run's routing within 3%",
        of_each(&|t| Some((t.routed_gib / t.measured_gib - 1.0).abs() <= 0.03)),
    );
    bars
}

/// Of the pairs of layouts of one repetition whose steps are apart: whether predicted in that order.
fn orders(trials: &[Trial]) -> Vec<bool> {
    let mut held = Vec::new();
    for (i, one) in trials.iter().enumerate() {
        let others = trials[i + 1..].iter();
        for other in others.filter(|other| other.repetition == one.repetition) {
            let measured = one.measured_step_s / other.measured_step_s;
            if measured.max(1.0 / measured) > 1.0 + APART {
                let predicted = one.profile_step_s / other.profile_step_s;
                held.push((measured > 1.0) == (predicted > 1.0));
            }
        }
    }
    held
}

fn summary(answer: &HereJson) -> String {
    let mut table = Table::new([
        "layout",
        ">ranks",
        ">measured",
        ">unmeasured",
        ">profile",
        ">own run",
        ">another's",
        "category furthest off",
        ">peak",
    ]);
    for trial in &answer.trials {
        let error = |predicted_s: f64| format::signed_percent(trial.error(predicted_s));
        let by_size = |a: &(Category, f64), b: &(Category, f64)| a.1.abs().total_cmp(&b.1.abs());
        let furthest = trial.categories().max_by(by_size);
        table.row([
            trial.layout.clone(),
            trial.ranks.to_string(),
            format::seconds(trial.measured_step_s),
            error(trial.unmeasured_step_s),
            error(trial.profile_step_s),
            error(trial.own_run_step_s),
            trial.other_run_step_s.map_or_else(super::dash, error),
            furthest.map_or_else(super::dash, |(category, error)| {
                format!("{} {}", category.name(), format::signed_percent(error))
            }),
            format::signed_percent(trial.routed_gib / trial.measured_gib - 1.0),
        ]);
    }
    let mut held = Table::new(["", ">held", ">of"]);
    for bar in &answer.bars {
        held.row([
            bar.name.to_owned(),
            bar.held.to_string(),
            bar.of.to_string(),
        ]);
    }
    format!(
        "{}\nPredicted over measured, less one. Profile: of this machine. Own run, another's: what training measured as \
         profile, of this layout and of the other one of as many ranks. Peak: with the run's routing. Categories count \
         from {:.0}% of a step on, with the profile; pairs where steps are more than {:.0}% apart.\n\n{}",
        table.text(),
        100.0 * COUNTS,
        100.0 * APART,
        held.text()
    )
}

#[cfg(test)]
mod tests {
    use moefold_profiles::units::Seconds;

    use super::*;

    /// A trial that measured `measured` seconds and was predicted right, but for what is changed.
    fn trial(repetition: u32, measured: f64) -> Trial {
        let mut time_s = TimeByCategory::default();
        time_s.add(Category::Attention, Seconds(0.97 * measured));
        time_s.add(Category::Waiting, Seconds(0.03 * measured));
        Trial {
            repetition,
            ranks: 2,
            layout: String::new(),
            measured_step_s: measured,
            unmeasured_step_s: measured,
            profile_step_s: measured,
            own_run_step_s: measured,
            other_run_step_s: None,
            measured_time_s: time_s.clone(),
            profile_time_s: time_s,
            measured_gib: 1.0,
            routed_gib: 1.0,
        }
    }

    fn held(trials: &[Trial]) -> Vec<[usize; 2]> {
        bars(trials).iter().map(|bar| [bar.held, bar.of]).collect()
    }

    #[test]
    fn golden_each_bar_holds_what_it_is_named_after() {
        let right = trial(0, 1.0);
        assert_eq!(
            held(std::slice::from_ref(&right)),
            [[1, 1], [1, 1], [1, 1], [0, 0], [1, 1], [0, 0], [1, 1]]
        );
        let mut off = right.clone();
        (off.unmeasured_step_s, off.profile_step_s) = (1.05, 0.89);
        (off.own_run_step_s, off.other_run_step_s) = (1.06, Some(0.91));
        off.routed_gib = 0.96;
        // What is no large part of the step may be off.
        off.profile_time_s.add(Category::Waiting, Seconds(1.0));
        assert_eq!(
            held(&[off.clone()]),
            [[0, 1], [0, 1], [0, 1], [1, 1], [1, 1], [0, 0], [0, 1]]
        );
        off.profile_time_s.add(Category::Attention, Seconds(0.26));
        assert_eq!(held(&[off])[4], [0, 1]);
    }

    #[test]
    fn golden_only_layouts_of_one_repetition_that_are_apart_have_an_order() {
        let mut trials = [trial(0, 1.0), trial(0, 1.09), trial(0, 1.2), trial(1, 2.0)];
        assert_eq!(orders(&trials), [true, true]);
        trials[2].profile_step_s = 1.05;
        assert_eq!(orders(&trials), [true, false]);
    }
}
