//! `moefold validate --here`: how near the loop of plan, measure and plan again comes on this machine's CPU.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use moefold_executor::data::{Order, Samples, TokenStream, Tokenizer};
use moefold_executor::profile::rehearsal::Course;
use moefold_executor::record::{recorded_share, recording_costs};
use moefold_planner::choice::{Dispatcher, StackName};
use moefold_planner::layout::PartialDegrees;
use moefold_planner::model::{Model, presets as models};
use moefold_planner::options::{Routing, SearchOptions};
use moefold_planner::plan::Plan;
use moefold_profiles::presets;
use moefold_profiles::statistics::median;
use moefold_profiles::trace::{Category, TimeByCategory};
use moefold_profiles::units::GIB;
use moefold_reports::format;
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::ValidateArgs;
use crate::execute::train_into;
use crate::failure::{Failure, failure};
use crate::output::Output;
use crate::plan::{Question, load_profiles, recorded_loads};
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
/// Cores that other programs may keep busy beside a trial whose times say something.
const QUIET: f64 = 0.1;
/// By how much the speed of the machine may change between two times that are compared.
const STEADY: f64 = 0.05;

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
    /// Four of five steps are expected between these, with the machine's profile.
    profile_step_s_low: Option<f64>,
    profile_step_s_high: Option<f64>,
    own_run_step_s: f64,
    other_run_step_s: Option<f64>,
    /// By category, in training and as predicted with the profile.
    measured_time_s: TimeByCategory,
    profile_time_s: TimeByCategory,
    /// Peak memory of the fullest rank: measured, and as predicted with the run's routing.
    measured_gib: f64,
    routed_gib: f64,
    /// Cores that other programs kept busy while it trained, where the system says.
    others_busy: Option<f64>,
    /// What a fixed piece of work took on all cores, seconds: before the machine was measured and after, and where the system
    /// says what it did, before training and after. Clocks show here, and what else runs on the host of a virtual machine.
    pace_s: Vec<f64>,
    /// The median step of the third and of the last quarter of the rehearsal, where there was one, and of training: what
    /// happens between two paces, and routers that have not settled.
    rehearsed_quarters_s: Option<[f64; 2]>,
    quarters_s: [f64; 2],
    /// See [`recording_costs`].
    #[serde(skip)]
    recording: Vec<f64>,
}

/// How many of some predictions were as near as they should be, and whether those are enough.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Bar {
    name: &'static str,
    held: usize,
    of: usize,
    met: bool,
}

/// In how many repetitions something was as near with a profile as it should be, and whether in four of five.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct Near {
    held: usize,
    of: usize,
    met: bool,
}

/// Over the repetitions of a layout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct NearLayout {
    layout: String,
    ranks: u32,
    /// The step within 10 percent.
    step: Near,
    /// Categories that count, each within 25 percent.
    categories: BTreeMap<Category, Near>,
}

/// What recorded steps took more than those around them.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Recording {
    /// Recorded steps that were compared.
    steps: usize,
    /// What they took more, on average, and its standard error.
    of_step: f64,
    error: f64,
    /// What that is of a run.
    of_run: f64,
}

/// What `--json` prints.
#[derive(Serialize)]
struct HereJson {
    bars: Vec<Bar>,
    layouts: Vec<NearLayout>,
    recording: Option<Recording>,
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
    let folder = tempfile::tempdir()
        .context("a temporary folder cannot be made")
        .map_err(Failure::Runtime)?;
    let trials = Bench::new(args, folder.path(), output)?.trials()?;
    let layouts = layouts(&trials);
    let answer = HereJson {
        bars: bars(&trials, &layouts),
        layouts,
        recording: recording(&trials, args.steps),
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
        let cluster = presets::local(ranks);
        let named = load_profiles(profiles, &cluster)?;
        let recorded = || recorded_loads(profiles, &named, &self.model);
        let routing = routing.or_else(|| recorded().map(|(_, loads)| loads));
        let pins = format!("{degrees},{REST}").parse::<PartialDegrees>();
        let options = SearchOptions {
            pins: pins.expect("the layouts are degrees"),
            routing,
            dispatcher: Some(Dispatcher::Alltoall),
            ..SearchOptions::new(BATCH, StackName::Moefold)
        };
        let found = Question::new(&self.model, &cluster, ranks, &named).ask(&options)?;
        Ok(found.best())
    }

    fn trial(&self, repetition: u32, number: usize) -> Result<Trial, Failure> {
        let unmeasured = self.plan(number, &[], None)?;
        let profile = self.folder.join(format!("profile-{repetition}-{number}"));
        let options = training(self.args.steps, 0);
        let here = measure(
            std::slice::from_ref(&unmeasured),
            Course {
                samples: &self.samples,
                options: &options,
            },
            self.args.budget_s,
            self.output,
        )?;
        here.measured
            .profile
            .save(&profile)
            .map_err(Failure::runtime)?;
        let profiled = self.plan(number, &[profile], None)?;

        let run = self.run_dir(repetition, number);
        let trained = train_into(&run, &profiled, &self.samples, &options, self.output)?;
        let summary = trained.summary;
        let paces_s = [
            here.measured.profile.pace_s,
            summary.host.and_then(|host| host.pace_s),
        ];
        let own = self.plan(number, std::slice::from_ref(&run), None)?;
        let routing = Routing::read(&run).map_err(Failure::runtime)?;
        let routed = self.plan(number, &[], Some(routing))?;

        let steps: Vec<f64> = trained.steps.iter().map(|step| step.step_s).collect();
        let peaks = summary.peak_by_rank.iter().map(|peak| peak.bytes.total().0);
        Ok(Trial {
            repetition,
            ranks: LAYOUTS[number].0,
            layout: profiled.planned.layout.to_string(),
            measured_step_s: summary.step_s,
            unmeasured_step_s: unmeasured.planned.predicted.step_s,
            profile_step_s: profiled.planned.predicted.step_s,
            profile_step_s_low: profiled.planned.predicted.step_s_low,
            profile_step_s_high: profiled.planned.predicted.step_s_high,
            own_run_step_s: own.planned.predicted.step_s,
            other_run_step_s: None,
            measured_time_s: summary.time_s,
            profile_time_s: profiled.planned.predicted.time_s,
            measured_gib: peaks.max().unwrap_or(0) as f64 / GIB as f64,
            routed_gib: routed.planned.predicted.peak_gib,
            others_busy: summary.host.and_then(|host| host.others_busy),
            pace_s: paces_s.into_iter().flatten().flatten().collect(),
            rehearsed_quarters_s: quarters_s(&here.rehearsed_step_s),
            quarters_s: quarters_s(&steps).expect("there are as many steps"),
            recording: recording_costs(&steps, &options.traced_steps),
        })
    }
}

impl Trial {
    /// Predicted over measured less one.
    fn error(&self, predicted_s: f64) -> f64 {
        predicted_s / self.measured_step_s - 1.0
    }

    /// Whether the measured step was in the interval of the prediction with the profile, where it has one.
    fn is_inside(&self) -> Option<bool> {
        let within = self.profile_step_s_low?..=self.profile_step_s_high?;
        Some(within.contains(&self.measured_step_s))
    }

    /// Whether other programs kept the machine busy.
    fn is_disturbed(&self) -> bool {
        self.others_busy.is_some_and(|others| others > QUIET)
    }

    /// By how much the speed of the machine, or of training, changed in its time.
    fn change(&self) -> f64 {
        let rehearsed = self
            .rehearsed_quarters_s
            .map_or(0.0, |times_s| spread(&times_s));
        spread(&self.pace_s)
            .max(spread(&self.quarters_s))
            .max(rehearsed)
    }

    /// Whether two times that were measured in it can be compared.
    fn is_steady(&self) -> bool {
        !self.is_disturbed() && self.change() <= STEADY
    }

    /// What the piece of work took, seconds.
    fn pace(&self) -> f64 {
        median(self.pace_s.clone()).expect("the CPU is measured")
    }

    /// Whether its times can be compared with those of another.
    fn is_like(&self, other: &Self) -> bool {
        let all: Vec<f64> = self.pace_s.iter().chain(&other.pace_s).copied().collect();
        self.is_steady() && other.is_steady() && spread(&all) <= STEADY
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

/// The most of some times over the least, less one.
fn spread(times_s: &[f64]) -> f64 {
    let most = times_s.iter().copied().fold(0.0, f64::max);
    let least = times_s.iter().copied().fold(f64::INFINITY, f64::min);
    if least > 0.0 { most / least - 1.0 } else { 0.0 }
}

/// The median of each quarter of some steps that counts: in the first half a run gets going. Of fewer than four there are
/// none.
fn quarters_s(steps_s: &[f64]) -> Option<[f64; 2]> {
    let count = steps_s.len();
    let of_quarter = |quarter: usize| {
        let own = &steps_s[quarter * count / 4..(quarter + 1) * count / 4];
        median(own.to_vec())
    };
    Some([of_quarter(2)?, of_quarter(3)?]).filter(|_| count >= 4)
}

impl Near {
    fn add(&mut self, held: bool) {
        self.held += usize::from(held);
        self.of += 1;
        self.met = 5 * self.held >= 4 * self.of;
    }

    /// Whether it was met, where it was judged.
    fn judged(&self) -> Option<bool> {
        (self.of > 0).then_some(self.met)
    }
}

/// Each layout over its repetitions on a steady machine.
fn layouts(trials: &[Trial]) -> Vec<NearLayout> {
    let mut layouts: Vec<NearLayout> = Vec::new();
    for trial in trials {
        let is_same =
            |near: &NearLayout| (&near.layout, near.ranks) == (&trial.layout, trial.ranks);
        let at = layouts.iter().position(is_same).unwrap_or_else(|| {
            layouts.push(NearLayout {
                layout: trial.layout.clone(),
                ranks: trial.ranks,
                step: Near::default(),
                categories: BTreeMap::new(),
            });
            layouts.len() - 1
        });
        if !trial.is_steady() {
            continue;
        }
        let near = &mut layouts[at];
        near.step
            .add(trial.error(trial.profile_step_s).abs() <= 0.10);
        for (category, error) in trial.categories() {
            let of = near.categories.entry(category).or_default();
            of.add(error.abs() <= 0.25);
        }
    }
    layouts
}

/// Over all trials, of runs of so many steps; nothing where too few steps can be compared.
fn recording(trials: &[Trial], steps: u32) -> Option<Recording> {
    let costs: Vec<f64> = trials.iter().flat_map(|t| t.recording.clone()).collect();
    let count = costs.len() as f64;
    if count < 2.0 {
        return None;
    }
    let mean = costs.iter().sum::<f64>() / count;
    let squares: f64 = costs.iter().map(|cost| (cost - mean).powi(2)).sum();
    Some(Recording {
        steps: costs.len(),
        of_step: mean.exp_m1(),
        error: (squares / (count - 1.0) / count).sqrt(),
        of_run: recorded_share(steps.into()) * mean.exp_m1(),
    })
}

/// What the predictions are held to.
fn bars(trials: &[Trial], layouts: &[NearLayout]) -> Vec<Bar> {
    let mut bars = Vec::new();
    let mut bar = |name, each: Vec<bool>| {
        let held = each.iter().filter(|held| **held).count();
        bars.push(Bar {
            name,
            held,
            of: each.len(),
            met: held == each.len(),
        });
    };
    let of_each = |near: &dyn Fn(&Trial) -> Option<bool>| trials.iter().filter_map(near).collect();
    let steady = || trials.iter().filter(|trial| trial.is_steady());
    let each_near = |of: &dyn Fn(&NearLayout) -> Vec<Near>| {
        let each = layouts.iter().flat_map(of);
        each.filter_map(|near| near.judged()).collect()
    };
    bar(
        "layouts with a profile within 10%, 4 of 5 times",
        each_near(&|near| vec![near.step]),
    );
    bar(
        "with a profile no worse by 5 points",
        steady()
            .map(|t| {
                let before = t.error(t.unmeasured_step_s).abs();
                t.error(t.profile_step_s).abs() <= before + 0.05
            })
            .collect(),
    );
    bar(
        "with its own run within 5%",
        steady()
            .map(|t| t.error(t.own_run_step_s).abs() <= 0.05)
            .collect(),
    );
    bar(
        "with the run of another layout within 10%",
        of_each(&|t| {
            let near = t.error(t.other_run_step_s?).abs() <= 0.10;
            t.is_like(of_the_ranks(trials, t)?).then_some(near)
        }),
    );
    bar(
        "categories with a profile within 25%, 4 of 5 times",
        each_near(&|near| near.categories.values().copied().collect()),
    );
    bar("pairs in order", orders(trials));
    bar(
        "peak memory with the run's routing within 3%",
        of_each(&|t| Some((t.routed_gib / t.measured_gib - 1.0).abs() <= 0.03)),
    );
    bars
}

/// The trial of the other layout of as many ranks in the same repetition.
fn of_the_ranks<'a>(trials: &'a [Trial], one: &Trial) -> Option<&'a Trial> {
    trials.iter().find(|other| {
        (other.repetition, other.ranks) == (one.repetition, one.ranks) && other.layout != one.layout
    })
}

/// Of the pairs of layouts of one repetition whose steps are apart, both at the speed that the machine had in their time: whether
/// predicted in that order.
fn orders(trials: &[Trial]) -> Vec<bool> {
    let mut held = Vec::new();
    for (i, one) in trials.iter().enumerate() {
        let others = trials[i + 1..].iter();
        let others = others.filter(|other| other.repetition == one.repetition);
        for other in others.filter(|other| one.is_steady() && other.is_steady()) {
            let paces = one.pace() / other.pace();
            let measured = one.measured_step_s / other.measured_step_s / paces;
            if measured.max(1.0 / measured) > 1.0 + APART {
                let predicted = one.profile_step_s / other.profile_step_s / paces;
                held.push((measured > 1.0) == (predicted > 1.0));
            }
        }
    }
    held
}

/// Trials, and how to read them.
fn trials_text(trials: &[Trial]) -> String {
    let mut table = Table::new([
        "layout",
        ">ranks",
        ">measured",
        ">unmeasured",
        ">profile",
        "80%",
        ">own run",
        ">another's",
        "category furthest off",
        ">peak",
        ">others",
        ">speed",
    ]);
    for trial in trials {
        let error = |predicted_s: f64| format::signed_percent(trial.error(predicted_s));
        let by_size = |a: &(Category, f64), b: &(Category, f64)| a.1.abs().total_cmp(&b.1.abs());
        let furthest = trial.categories().max_by(by_size);
        table.row([
            trial.layout.clone(),
            trial.ranks.to_string(),
            format::seconds(trial.measured_step_s),
            error(trial.unmeasured_step_s),
            error(trial.profile_step_s),
            match trial.is_inside() {
                Some(true) => "inside".to_owned(),
                Some(false) => "outside".to_owned(),
                None => super::dash(),
            },
            error(trial.own_run_step_s),
            trial.other_run_step_s.map_or_else(super::dash, error),
            furthest.map_or_else(super::dash, |(category, error)| {
                format!("{} {}", category.name(), format::signed_percent(error))
            }),
            format::signed_percent(trial.routed_gib / trial.measured_gib - 1.0),
            match trial.others_busy {
                Some(others) => format!(
                    "{others:.2}{}",
                    if trial.is_disturbed() { "!" } else { " " }
                ),
                None => super::dash(),
            },
            format!(
                "{}{}",
                format::percent(trial.change()),
                if trial.change() <= STEADY { " " } else { "~" }
            ),
        ]);
    }
    let steady = trials.iter().filter(|trial| trial.is_steady()).count();
    format!(
        "{}\nPredicted over measured, less one. Profile: of this machine; 80%: whether the step was in its interval. Own run, \
         another's: what training measured as profile, of this layout and of the other one of as many ranks. Peak: with \
         the run's routing. Others: cores that other programs kept busy (! above {QUIET}). Speed: by how much a fixed piece of work \
         around the trial, or a quarter of its steps, took longer than another. {steady} of {} trials were on a quiet machine that \
         kept its speed within {:.0}%; of the others (~) only memory is judged. Two trials are compared where both were at one \
         speed, pairs in order by their steps at one. Categories count from {:.0}% of a step on, with the profile; pairs where steps \
         are more than {:.0}% apart.\n",
        table.text(),
        trials.len(),
        100.0 * STEADY,
        100.0 * COUNTS,
        100.0 * APART,
    )
}

fn summary(answer: &HereJson) -> String {
    let word = |met| if met { "held" } else { "not held" };
    let counted: BTreeSet<Category> = answer
        .layouts
        .iter()
        .flat_map(|near| near.categories.keys().copied())
        .collect();
    let names = counted
        .iter()
        .map(|category| format!(">{}", category.name()));
    let head = ["layout", ">ranks", ">step"].map(str::to_owned);
    let mut near = Table::new(head.into_iter().chain(names));
    for layout in &answer.layouts {
        let of = |near: Option<&Near>| {
            let near = near.filter(|near| near.of > 0);
            near.map_or_else(super::dash, |near| format!("{} of {}", near.held, near.of))
        };
        let categories = counted
            .iter()
            .map(|category| of(layout.categories.get(category)));
        let own = [
            layout.layout.clone(),
            layout.ranks.to_string(),
            of(Some(&layout.step)),
        ];
        near.row(own.into_iter().chain(categories));
    }
    let judged: Vec<&Bar> = answer.bars.iter().filter(|bar| bar.of > 0).collect();
    let mut held = Table::new(["", ">near", ">of", ""]);
    for bar in &judged {
        held.row([
            bar.name.to_owned(),
            bar.held.to_string(),
            bar.of.to_string(),
            word(bar.met).to_owned(),
        ]);
    }
    let recording = answer.recording.as_ref().map_or(String::new(), |recording| {
        format!(
            "\nA recorded step takes {} more than those around it, give or take {} (one standard error, {} of them), which is \
             {} of a run.\n",
            format::signed_percent(recording.of_step),
            format::percent(recording.error),
            recording.steps,
            format::signed_percent(recording.of_run),
        )
    });
    let missed = judged.iter().filter(|bar| !bar.met);
    let missed: Vec<&str> = missed.map(|bar| bar.name).collect();
    let last = if judged.len() < answer.bars.len() && missed.is_empty() {
        let (judged, all) = (judged.len(), answer.bars.len());
        format!("{judged} of {all} bars could be judged, and held.")
    } else if missed.is_empty() {
        format!("All {} bars held.", judged.len())
    } else {
        let held = judged.len() - missed.len();
        format!(
            "{held} of {} bars held; not: {}.",
            judged.len(),
            missed.join("; ")
        )
    };
    format!(
        "{}\nOn a quiet machine that kept its speed, with the profile: the step within 10%, categories within 25%.\n\n\
         {}\n{}{recording}\n{last}\n",
        trials_text(&answer.trials),
        near.text(),
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
            profile_step_s_low: None,
            profile_step_s_high: None,
            own_run_step_s: measured,
            other_run_step_s: None,
            measured_time_s: time_s.clone(),
            profile_time_s: time_s,
            measured_gib: 1.0,
            routed_gib: 1.0,
            others_busy: None,
            pace_s: vec![0.02; 4],
            rehearsed_quarters_s: None,
            quarters_s: [measured; 2],
            recording: Vec::new(),
        }
    }

    /// What was measured while the machine's speed changed is judged by nothing that compares two moments, nor is a pair of
    /// steady trials at two speeds; what is of one moment is judged.
    #[test]
    fn golden_a_machine_that_changes_its_speed_judges_less() {
        let mut trials = [trial(0, 1.0), trial(0, 1.2)];
        for (trial, layout) in trials.iter_mut().zip(["TP2", "DP2"]) {
            trial.layout = layout.to_owned();
            trial.other_run_step_s = Some(trial.measured_step_s);
        }
        let judged = |trials: &[Trial]| -> Vec<usize> {
            held(trials).into_iter().map(|[_, of]| of).collect()
        };
        assert_eq!(judged(&trials), [2, 2, 2, 2, 2, 1, 2]);
        trials[1].pace_s = vec![0.0225; 4];
        assert_eq!(judged(&trials), [2, 2, 2, 0, 2, 0, 2]);
        trials[1].pace_s = vec![0.016; 4];
        assert_eq!(judged(&trials), [2, 2, 2, 0, 2, 1, 2]);
        trials[1].pace_s = vec![0.02, 0.02, 0.02, 0.0211];
        assert_eq!(judged(&trials), [1, 1, 1, 0, 1, 0, 2]);
        trials[1].pace_s = vec![0.02, 0.02, 0.02, 0.0209];
        trials[1].quarters_s = [1.2, 1.27];
        assert_eq!(judged(&trials), [1, 1, 1, 0, 1, 0, 2]);
        let rehearsed_s = std::mem::replace(&mut trials[1].quarters_s, [1.2; 2]);
        assert_eq!(judged(&trials), [2, 2, 2, 2, 2, 1, 2]);
        trials[1].rehearsed_quarters_s = Some(rehearsed_s);
        assert_eq!(judged(&trials), [1, 1, 1, 0, 1, 0, 2]);
    }

    #[test]
    fn golden_quarters_have_medians() {
        let steps: Vec<f64> = (0..12).map(f64::from).collect();
        assert_eq!(quarters_s(&steps), Some([7.0, 10.0]));
        assert_eq!(quarters_s(&[1.0, 2.0, 3.0, 4.0]), Some([3.0, 4.0]));
        assert_eq!(quarters_s(&[1.0, 2.0, 3.0]), None);
    }

    fn held(trials: &[Trial]) -> Vec<[usize; 2]> {
        let bars = bars(trials, &layouts(trials));
        assert!(bars.iter().all(|bar| bar.met == (bar.held == bar.of)));
        bars.iter().map(|bar| [bar.held, bar.of]).collect()
    }

    /// Of five repetitions one layout is near in four, the other in three; and a category the other way round.
    #[test]
    fn golden_a_layout_is_judged_over_its_repetitions() {
        let mut trials = Vec::new();
        for repetition in 0..5 {
            for (ranks, misses) in [(1, 1), (2, 2)] {
                let mut trial = trial(repetition, 1.0);
                trial.ranks = ranks;
                if repetition < misses {
                    trial.profile_step_s = 1.2;
                }
                if repetition < 3 - misses {
                    trial.profile_time_s.add(Category::Attention, Seconds(0.3));
                }
                trials.push(trial);
            }
        }
        let layouts = layouts(&trials);
        let near = |held, met| Near { held, of: 5, met };
        let found: Vec<_> = layouts.iter().map(|l| (l.ranks, l.step)).collect();
        assert_eq!(found, [(1, near(4, true)), (2, near(3, false))]);
        for (layout, other) in layouts.iter().zip(layouts.iter().rev()) {
            let attention = BTreeMap::from([(Category::Attention, other.step)]);
            assert_eq!(layout.categories, attention);
        }
        let bars = bars(&trials, &layouts);
        assert_eq!((bars[0].held, bars[0].of, bars[0].met), (1, 2, false));
        assert_eq!((bars[4].held, bars[4].of, bars[4].met), (1, 2, false));
        trials[0].others_busy = Some(0.5);
        let answer = HereJson {
            bars,
            layouts,
            recording: None,
            trials,
        };
        let text = summary(&answer);
        let last = text.lines().last().expect("a line");
        assert!(
            last.contains("bars held; not: layouts with a profile"),
            "{last}"
        );
        assert!(
            text.contains("0.50!")
                && text.contains("9 of 10 trials")
                && text.matches("3 of 5").count() == 2,
            "{text}"
        );
    }

    #[test]
    fn golden_a_step_is_inside_its_interval_or_not() {
        let mut trial = trial(0, 1.0);
        assert_eq!(trial.is_inside(), None);
        (trial.profile_step_s_low, trial.profile_step_s_high) = (Some(0.9), Some(1.0));
        assert_eq!(trial.is_inside(), Some(true));
        trial.measured_step_s = 1.01;
        assert_eq!(trial.is_inside(), Some(false));
    }

    /// Of four steps that took 0, 2, 2 and 4 percent more; half of a short run is recorded.
    #[test]
    fn golden_what_recording_costs_has_an_error() {
        let mut trials = [trial(0, 1.0), trial(1, 1.0)];
        assert_eq!(recording(&trials, 40), None);
        trials[0].recording = vec![0.0, 0.02];
        trials[1].recording = vec![0.02, 0.04];
        let found = recording(&trials, 40).expect("there are four");
        assert_eq!(found.steps, 4);
        assert!((found.of_step - 0.02_f64.exp_m1()).abs() < 1e-12);
        assert!((found.of_run - 0.5 * found.of_step).abs() < 1e-12);
        assert!((found.error - (8e-4_f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
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
            [[0, 1], [0, 1], [0, 1], [0, 0], [1, 1], [0, 0], [0, 1]]
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
        // As far apart as the speeds of the machine.
        trials[2].pace_s = vec![0.0235; 4];
        assert_eq!(orders(&trials), [false; 0]);
    }
}
