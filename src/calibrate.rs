//! `moefold calibrate`: measured steps of known layouts, and the factors on prices that they ask for.

use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context as _, anyhow};
use moefold_executor::files::check_no_run;
use moefold_executor::{environment, trace};
use moefold_planner::calibrate::{Measured, fit};
use moefold_planner::plan::Plan;
use moefold_planner::search;
use moefold_profiles::calibration::{Calibration, Factors, Fitted};
use moefold_profiles::import;
use moefold_profiles::run::RunSummary;
use moefold_profiles::{Costs, Profile};
use moefold_reports::format;
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::CalibrateArgs;
use crate::failure::{Failure, failure};
use crate::output::Output;
use crate::plan::{bare, load_profiles};

/// How far a plan priced again may be from what it says before that is worth a word.
const DRIFT: f64 = 0.01;

/// How many times as long as its prediction a step may take, or its prediction as long as it: what is further off is another step,
/// or in other units.
const MOST_TIMES: f64 = 100.0;

/// What `--json` prints.
#[derive(Serialize)]
struct CalibrateJson<'a> {
    #[serde(serialize_with = "moefold_executor::files::shown")]
    directory: &'a Path,
    calibration: &'a Calibration,
    /// Factors that the steps say next to nothing of.
    undetermined: Vec<&'static str>,
}

pub(crate) fn run(args: &CalibrateArgs, output: Output) -> Result<(), Failure> {
    check_no_run(&args.out, "a profile is written").map_err(failure)?;
    let (plans, measured) = (args.plan.len(), args.measured.len());
    if plans != measured {
        return Err(Failure::Request(anyhow!(
            "--plan is given {plans} times and --measured {measured} times; expected a --measured for each \
             --plan, in the same order"
        )));
    }
    let plans: Vec<Plan> = args
        .plan
        .iter()
        .map(|path| Plan::load(path).map_err(Failure::request))
        .collect::<Result<_, _>>()?;
    one_machine(args, &plans)?;
    let steps: Vec<Measured> = (args.plan.iter().zip(&plans))
        .zip(&args.measured)
        .map(|((path, plan), measured)| {
            let step_s = step_s(plan, measured, output)?;
            within_reach(path, plan, (measured, step_s))?;
            Ok(Measured {
                source: format!("{}, {}", path.display(), measured.display()),
                step_s,
            })
        })
        .collect::<Result<_, Failure>>()?;
    let profiles = bare(&load_profiles(&args.profile, &plans[0].cluster)?);
    let calibration = fitted(&plans, &steps, &profiles, output)?;
    let profile = Profile {
        date: environment::rfc3339(SystemTime::now()),
        command: std::env::args().collect::<Vec<_>>().join(" "),
        calibration: Some(calibration.clone()),
        ..Profile::of(&plans[0].cluster.gpu.name, Vec::new())
    };
    profile.save(&args.out).map_err(Failure::runtime)?;
    let parts = parts(&calibration);
    let answer = CalibrateJson {
        directory: &args.out,
        calibration: &calibration,
        undetermined: parts
            .into_iter()
            .filter(|(_, fitted)| fitted.is_undetermined())
            .map(|(name, _)| name)
            .collect(),
    };
    output.answer(&answer, || text(&answer))
}

fn parts(calibration: &Calibration) -> [(&'static str, Fitted); 3] {
    [
        ("compute", calibration.compute),
        ("network", calibration.network),
        ("host", calibration.host),
    ]
}

/// Refuses a step in which devices would compute faster than they can, and one that no factors would explain.
fn within_reach(path: &Path, plan: &Plan, (measured, step_s): (&Path, f64)) -> Result<(), Failure> {
    let predicted = &plan.planned.predicted;
    let times = step_s / predicted.step_s;
    if !(MOST_TIMES.recip()..=MOST_TIMES).contains(&times) {
        return Err(Failure::Request(anyhow!(
            "--measured {}: found a step of {step_s} s, expected one within {MOST_TIMES} times the {} of {}; the seconds of \
             one step are meant, under the batch and on the ranks of that plan",
            measured.display(),
            format::seconds(predicted.step_s),
            path.display()
        )));
    }
    let least_s = predicted.step_s * predicted.mfu;
    // FLOPs of tokens that a capacity drops are not computed.
    if step_s > least_s || plan.cluster.gpu.is_cpu() || plan.planned.capacity.is_some() {
        return Ok(());
    }
    Err(Failure::Request(anyhow!(
        "--measured {}: found a step of {step_s} s, expected one of more than {}, in which all GPUs of {} compute at \
         their peak; the seconds of one step are meant, under the batch and on the GPUs of that plan",
        measured.display(),
        format::seconds(least_s),
        path.display()
    )))
}

/// Refuses plans of different devices or stacks: their factors are not the same.
fn one_machine(args: &CalibrateArgs, plans: &[Plan]) -> Result<(), Failure> {
    let of = |plan: &Plan| (plan.cluster.gpu.name.clone(), plan.planned.stack.name());
    let (gpu, stack) = of(&plans[0]);
    for (path, plan) in args.plan.iter().zip(plans) {
        let found = of(plan);
        if found != (gpu.clone(), stack) {
            return Err(Failure::Request(anyhow!(
                "--plan {}: found {} under {}, expected {gpu} under {stack}, as in {}; calibrate each by itself",
                path.display(),
                found.0,
                found.1,
                args.plan[0].display()
            )));
        }
    }
    Ok(())
}

/// The factors, with a word about plans that are not priced as they were.
fn fitted(
    plans: &[Plan],
    steps: &[Measured],
    profiles: &[Profile],
    output: Output,
) -> Result<Calibration, Failure> {
    let mut priced = Vec::new();
    for plan in plans {
        let costs = Costs::for_cluster(&plan.cluster, profiles).times(Factors::default());
        let runtime = trace::runtime(plan.planned.stack, &plan.model, &plan.cluster);
        priced.push((plan, costs, runtime));
    }
    let predict = |index: usize, factors: Factors| {
        let (plan, costs, runtime) = &priced[index];
        search::again(plan, &costs.times(factors), runtime.as_ref())
            .map(|again| again.predicted.step_s)
            .map_err(|error| Failure::Request(anyhow::Error::from(error)))
    };
    for (index, (plan, step)) in plans.iter().zip(steps).enumerate() {
        let (now, then) = (
            predict(index, Factors::default())?,
            plan.planned.predicted.step_s,
        );
        let drift = now / then - 1.0;
        if drift.abs() > DRIFT {
            output.note(&format!(
                "{}: the plan says {}, and is priced at {} now ({}): other profiles, or other tables",
                step.source,
                format::seconds(then),
                format::seconds(now),
                format::signed_percent(drift)
            ))?;
        }
    }
    fit(plans[0].planned.stack.name(), steps, &predict)
}

/// What a step took: seconds as they stand, or the median of what a directory or a log holds.
fn step_s(plan: &Plan, measured: &Path, output: Output) -> Result<f64, Failure> {
    let shown = measured.display();
    let refuse = |found: &str| {
        Failure::Request(anyhow!(
            "--measured {shown}: found {found}, expected seconds above 0, a run directory, a profile \
             directory with steps, or a Megatron log"
        ))
    };
    if let Some(Ok(seconds)) = measured.to_str().map(str::parse::<f64>) {
        let fits = seconds.is_finite() && seconds > 0.0;
        return if fits {
            Ok(seconds)
        } else {
            Err(refuse("no time"))
        };
    }
    let summary = measured.join("summary.json");
    if summary.is_file() {
        return of_run(plan, measured, &summary);
    }
    if !measured.exists() {
        return Err(refuse("no such file"));
    }
    let steps = if measured.is_dir() {
        let profile = Profile::load(measured).map_err(Failure::request)?;
        let of_device = profile.check(&plan.cluster);
        of_device
            .with_context(|| format!("--measured {shown}"))
            .map_err(Failure::Request)?;
        profile.steps
    } else {
        import::steps(measured).map_err(Failure::request)?
    };
    let steps = steps.ok_or_else(|| refuse("no steps in it"))?;
    if let Some(note) = steps.note() {
        output.note(&format!("{shown}: {note}"))?;
    }
    let step_s = steps.median_of(plan.request.batch.global_batch);
    step_s.map_err(|found| Failure::Request(anyhow!("--measured {shown}: {found}")))
}

/// The median step of a run, which must be of the plan.
fn of_run(plan: &Plan, run: &Path, summary: &Path) -> Result<f64, Failure> {
    let ran = Plan::load(&run.join("plan.json")).map_err(Failure::request)?;
    let same = |plan: &Plan| {
        let planned = &plan.planned;
        let parts = (planned.layout, planned.precision, planned.stack);
        (parts, plan.request.batch, plan.model.clone())
    };
    if same(&ran) != same(plan) {
        return Err(Failure::Request(anyhow!(
            "--measured {}: found a run of {} of {}, expected a run of the plan, {} of {}",
            run.display(),
            ran.planned.layout,
            ran.model.name,
            plan.planned.layout,
            plan.model.name
        )));
    }
    let text = std::fs::read_to_string(summary)
        .with_context(|| format!("cannot read {}", summary.display()))
        .map_err(Failure::Request)?;
    let summary = RunSummary::read(&text).map_err(|problem| {
        Failure::Request(anyhow!(
            "{} is no summary of a run: {problem}",
            summary.display()
        ))
    })?;
    if !summary.step_s.is_finite() || summary.step_s <= 0.0 {
        return Err(Failure::Request(anyhow!(
            "--measured {}: found {} s a step, expected a run of at least one step after warm-up",
            run.display(),
            summary.step_s
        )));
    }
    Ok(summary.step_s)
}

fn text(answer: &CalibrateJson<'_>) -> String {
    let calibration = answer.calibration;
    let mut table = Table::new(["times of", ">factor", ">give or take", ">before", ""]);
    for (name, fitted) in parts(calibration) {
        let spread = |sigma: f64| format::percent(sigma.exp_m1());
        let what = match name {
            "compute" => "ops",
            "network" => "communication",
            _ => "the host",
        };
        let open = if fitted.is_undetermined() {
            "undetermined by these measurements"
        } else {
            ""
        };
        table.row([
            what.to_owned(),
            format!("{:.3}", fitted.factor),
            spread(fitted.sigma),
            spread(fitted.prior_sigma),
            open.to_owned(),
        ]);
    }
    let mut steps = Table::new(["step", ">measured", ">before", ">after", ">from the others"]);
    for step in &calibration.steps {
        let error = |seconds: f64| format::signed_percent(seconds / step.measured_s - 1.0);
        steps.row([
            step.source.clone(),
            format::seconds(step.measured_s),
            error(step.before_s),
            error(step.after_s),
            step.left_out_s.map_or_else(|| "-".to_owned(), error),
        ]);
    }
    format!(
        "{}\n{}\nWritten to {dir}; plan with --profile {dir}\n",
        table.text(),
        steps.text(),
        dir = answer.directory.display()
    )
}
