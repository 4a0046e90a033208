//! `moefold check`: settings of Megatron-LM, judged: whether they are legal, whether they fit, how fast they are, and what
//! is faster by which flags.

use std::fmt::Write as _;

use anyhow::anyhow;
use moefold_planner::choice::Dispatcher;
use moefold_planner::layout::PartialDegrees;
use moefold_planner::model::Model;
use moefold_planner::options::{PlanError, SearchOptions};
use moefold_planner::plan::{Plan, PlannedLayout};
use moefold_planner::search::ENDLESS_GIB;
use moefold_planner::settings::{
    self, Change, Form, Job, Problem, Reading, Setting, Settings, Target, Value, Version, Written,
};
use moefold_profiles::{Cluster, TensorClass};
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::CheckArgs;
use crate::failure::Failure;
use crate::flags;
use crate::output::Output;
use crate::plan::{Found, NamedProfile, Question, cluster, gpus, load_profiles};

/// Gains below this share of a step are none.
const GAIN: f64 = 0.005;

/// Of how many layouts, the fastest first, one is looked for that the settings can say.
const TRIED: usize = 8;

/// What `check --json` prints.
#[derive(Debug, Serialize)]
struct Checked<'a> {
    /// The release of Megatron-LM.
    megatron: Version,
    /// The model; `settings` where no preset is the same.
    model: &'a str,
    /// The cluster.
    cluster: &'a str,
    /// Ranks.
    gpus: u32,
    /// Rules that are broken, each with what would work.
    broken: Vec<String>,
    /// The nearest legal degrees, in words; absent where the degrees are legal.
    #[serde(skip_serializing_if = "Option::is_none")]
    nearest: Option<String>,
    /// Whether it fits; absent where the degrees are not legal.
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<bool>,
    /// Memory of a device, GiB.
    capacity_gib: f64,
    /// The settings as a plan; absent where the degrees are not legal.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<&'a PlannedLayout>,
    /// What is faster.
    better: &'a [Better],
    /// Flags without a price.
    unpriced: Vec<Unpriced<'a>>,
    /// Flags that say nothing of speed or memory.
    not_read: Vec<String>,
    /// Flags that nobody knows.
    unknown: Vec<Unknown>,
    /// What is priced otherwise than it is said.
    notes: &'a [String],
}

/// A plan that is faster, or one that fits.
#[derive(Debug, Serialize)]
struct Better {
    /// Whether it has the degrees of the settings.
    same_degrees: bool,
    /// What it has that is tried only where it is named, as a flag of `plan`.
    #[serde(skip_serializing_if = "Option::is_none")]
    named: Option<String>,
    /// By what share of the settings' speed it is faster; absent where they have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    faster: Option<f64>,
    /// What changes.
    changes: Vec<Changed>,
    /// The plan.
    plan: PlannedLayout,
    #[serde(skip)]
    whole: Plan,
}

#[derive(Debug, Serialize)]
struct Changed {
    /// A flag with its dashes, or a variable of the environment.
    name: String,
    /// What it is; absent where it is not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    /// What it is to be; absent where it is to go.
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<String>,
    #[serde(skip)]
    default: &'static str,
}

#[derive(Debug, Serialize)]
struct Unpriced<'a> {
    flag: String,
    does: &'a str,
}

#[derive(Debug, Serialize)]
struct Unknown {
    flag: String,
    nearest: String,
}

pub(crate) fn run(args: &CheckArgs, output: Output) -> Result<(), Failure> {
    let settings = settings::read_file(&args.settings).map_err(Failure::request)?;
    let cluster = cluster(&args.cluster, args.gpus)?;
    let gpus = gpus(&cluster, args.gpus)?;
    let profiles = load_profiles(&args.profile, &cluster)?;
    let given = args.model.as_deref().map(Model::resolve).transpose();
    let given = given.map_err(Failure::request)?;
    let target = Target {
        version: args.megatron,
        cluster: &cluster,
        gpus,
    };
    let reading = settings::reading::read(&settings, &target, given.as_ref())
        .map_err(|problems| unreadable(&problems))?;
    let case = Case {
        settings: &settings,
        reading: &reading,
        target,
        profiles: &profiles,
    };
    let judged = case.judge()?;
    let mut notes = reading.notes.clone();
    let better = case.better(judged.priced.as_ref(), &mut notes);
    if let Some(path) = &args.out
        && let Some(priced) = &judged.priced
    {
        priced.plan.save(path).map_err(Failure::runtime)?;
    }
    if let Some(path) = &args.better
        && let Some(best) = better.last()
    {
        best.whole.save(path).map_err(Failure::runtime)?;
    }
    let checked = Checked {
        megatron: args.megatron,
        model: &reading.job.model.name,
        cluster: &cluster.name,
        gpus,
        broken: judged.broken.clone(),
        nearest: judged.nearest.clone(),
        fits: judged.priced.as_ref().map(|priced| priced.fits),
        capacity_gib: cluster.gpu.memory_gib,
        plan: judged.priced.as_ref().map(|priced| &priced.plan.planned),
        better: &better,
        unpriced: unpriced(&reading),
        not_read: reading.kept.iter().map(Setting::flag).collect(),
        unknown: unknown(&reading),
        notes: &notes,
    };
    output.answer(&checked, || {
        let mut text = text(&checked, &reading);
        if let (Some(path), false) = (&args.better, better.is_empty()) {
            let (path, base) = (path.display(), args.settings.display());
            let release = args.megatron.name();
            let _ = writeln!(
                text,
                "\nThe fastest is in {path}; into the settings: moefold export {path} --to {} --base {base} --megatron {release}",
                Form::MegatronLm.name()
            );
        }
        text
    })?;
    if !checked.broken.is_empty() {
        let number = checked.broken.len();
        let rules = if number == 1 { "a rule" } else { "rules" };
        return Err(Failure::Request(anyhow!(
            "the settings break {rules} ({number})"
        )));
    }
    if !checked.unknown.is_empty() {
        let number = checked.unknown.len();
        let flags = if number == 1 { "a flag" } else { "flags" };
        return Err(Failure::Request(anyhow!(
            "Megatron-LM does not have {flags} of the settings ({number})"
        )));
    }
    match checked.fits {
        Some(false) => Err(Failure::Infeasible(anyhow!("the settings do not fit"))),
        _ => Ok(()),
    }
}

/// Settings that cannot be priced, with all that is wrong.
pub(crate) fn unreadable(problems: &[Problem]) -> Failure {
    let lines: Vec<String> = problems.iter().map(|one| format!("  {one}")).collect();
    Failure::Request(anyhow!(
        "the settings cannot be priced:\n{}",
        lines.join("\n")
    ))
}

/// Settings with where they are to run.
struct Case<'a> {
    settings: &'a Settings,
    reading: &'a Reading,
    target: Target<'a>,
    profiles: &'a [NamedProfile],
}

/// What comes of settings.
struct Judged {
    broken: Vec<String>,
    nearest: Option<String>,
    priced: Option<Priced>,
}

struct Priced {
    plan: Plan,
    fits: bool,
}

impl Case<'_> {
    fn question<'q>(&'q self, cluster: &'q Cluster) -> Question<'q> {
        let job = &self.reading.job;
        Question::new(&job.model, cluster, job.gpus, self.profiles)
    }

    fn ask(&self, cluster: &Cluster, options: &SearchOptions) -> Result<Found, Box<PlanError>> {
        self.question(cluster).search(options)
    }

    /// The settings themselves, priced also where they do not fit.
    fn judge(&self) -> Result<Judged, Failure> {
        // What is run already keeps no room but what it needs.
        let options = &SearchOptions {
            memory_headroom: 0.0,
            ..self.reading.job.options.clone()
        };
        let broken = self.reading.broken.iter().map(ToString::to_string);
        let mut broken: Vec<String> = broken.collect();
        let mut nearest = None;
        let cluster = self.target.cluster;
        let found = match self.ask(cluster, options) {
            Ok(found) => Some((found, true)),
            Err(error) => match *error {
                PlanError::Infeasible { .. } => {
                    let mut endless = cluster.clone();
                    endless.gpu.memory_gib = ENDLESS_GIB;
                    let found = self.ask(&endless, options);
                    let refusal = |error: Box<PlanError>| crate::plan::refusal(*error);
                    Some((found.map_err(refusal)?, false))
                }
                error @ PlanError::Hosts { .. } => return Err(crate::plan::refusal(error)),
                error => {
                    let Some((rules, degrees)) = error.rules() else {
                        let message = format!("{:#}", anyhow::Error::from(error));
                        return Err(Failure::Request(anyhow!(in_flags(&message))));
                    };
                    broken.extend(rules.iter().map(|rule| in_flags(rule)));
                    nearest = degrees.as_deref().map(in_flags);
                    None
                }
            },
        };
        let priced = found.map(|(found, fits)| {
            let mut plan = found.best();
            plan.cluster = cluster.clone();
            Priced { plan, fits }
        });
        Ok(Judged {
            broken,
            nearest,
            priced,
        })
    }

    /// What is faster: with the degrees of the settings, with any, and with what is tried only where it is named.
    fn better(&self, now: Option<&Priced>, notes: &mut Vec<String>) -> Vec<Better> {
        let said = &self.reading.job.options;
        let free = SearchOptions {
            dispatcher: None,
            order: None,
            recompute: None,
            schedule: None,
            stages: None,
            overlap: None,
            ..said.clone()
        };
        let mut open = SearchOptions {
            // What no release can say is not proposed.
            pins: PartialDegrees {
                cp: (!settings::cuts_sequences(&self.reading.job.model, self.target.version))
                    .then_some(1),
                ..PartialDegrees::default()
            },
            ..free.clone()
        };
        let mut found: Vec<Better> = Vec::new();
        for (same_degrees, options) in [(true, &free), (false, &open)] {
            let options = &SearchOptions {
                top: TRIED,
                ..options.clone()
            };
            for (place, whole) in self.fastest(options).into_iter().enumerate() {
                let step_s = whole.planned.predicted.step_s;
                let before = found.last().map(|better| better.plan.predicted.step_s);
                let faster = now.map(|now| now.plan.planned.predicted.step_s / step_s - 1.0);
                let fits = now.is_some_and(|now| now.fits);
                if before.is_some_and(|before| before / step_s - 1.0 < GAIN)
                    || (fits && faster.is_some_and(|faster| faster < GAIN))
                {
                    break;
                }
                match self.put(&whole) {
                    Ok(written) => {
                        let kind = (same_degrees, None);
                        found.push(self.improved(kind, faster, &written, whole));
                        break;
                    }
                    Err(reason) if place == 0 => {
                        let degrees = if same_degrees {
                            "of these degrees "
                        } else {
                            ""
                        };
                        notes.push(format!(
                            "the fastest layout {degrees}({step_s:.3} s) cannot be said here: {reason}"
                        ));
                    }
                    Err(_) => {}
                }
            }
        }
        if !settings::has_hybridep(self.target.version) {
            let own = now.map(|now| &now.plan.planned);
            let first = found.last().map(|better| &better.plan).or(own);
            open.dispatcher = first.map(|first| first.dispatcher);
        }
        found.extend(self.named(&open, now, found.last()));
        found
    }

    /// Plans, the fastest first, under dispatchers that the release has.
    fn fastest(&self, options: &SearchOptions) -> Vec<Plan> {
        let has_hybridep = settings::has_hybridep(self.target.version);
        let dispatchers = match options.dispatcher {
            None if !has_hybridep => vec![Some(Dispatcher::Deepep), Some(Dispatcher::Alltoall)],
            own => vec![own],
        };
        let under = |dispatcher| {
            let options = &SearchOptions {
                dispatcher,
                ..options.clone()
            };
            self.ask(self.target.cluster, options).ok()
        };
        let answers = dispatchers.into_iter().filter_map(under);
        let plans =
            answers.flat_map(|found| (0..found.num_plans()).map(move |place| found.plan(place)));
        let mut plans: Vec<Plan> = plans.collect();
        let step_s = |plan: &Plan| plan.planned.predicted.step_s;
        plans.sort_by(|a, b| step_s(a).total_cmp(&step_s(b)));
        plans
    }

    /// The fastest that the degrees of `best`, or without it of the settings, come to with what is tried only where it is
    /// named, where that is faster still.
    fn named(
        &self,
        open: &SearchOptions,
        now: Option<&Priced>,
        best: Option<&Better>,
    ) -> Option<Better> {
        let own = now.map(|now| &now.plan.planned);
        let first = best.map(|best| &best.plan).or(own)?;
        let fits = best.is_some() || now.is_some_and(|now| now.fits);
        let most_s = if fits {
            first.predicted.step_s / (1.0 + GAIN)
        } else {
            f64::INFINITY
        };
        let cluster = self.target.cluster;
        let all = self.question(cluster).unsearched(open, first);
        let is_faster = |step_s: f64| step_s <= most_s;
        all.into_iter()
            .filter(|(untried, _)| {
                untried.fits == Some(true) && untried.step_s.is_some_and(is_faster)
            })
            .find_map(|(untried, options)| {
                let whole = self.ask(cluster, &options).ok()?.best();
                let step_s = whole.planned.predicted.step_s;
                let written = self.put(&whole).ok().filter(|_| is_faster(step_s))?;
                let faster = own.map(|own| own.predicted.step_s / step_s - 1.0);
                let pins = self.reading.job.options.pins;
                let same_degrees = whole.planned.layout.pinned() == pins;
                let kind = (same_degrees, Some(untried.flag()));
                Some(self.improved(kind, faster, &written, whole))
            })
    }

    /// A plan that is faster, with what it changes of the settings.
    fn improved(
        &self,
        (same_degrees, named): (bool, Option<String>),
        faster: Option<f64>,
        written: &Written,
        whole: Plan,
    ) -> Better {
        Better {
            same_degrees,
            named,
            faster,
            changes: self.changes(written),
            plan: whole.planned.clone(),
            whole,
        }
    }

    /// The settings with a plan put into them.
    fn put(&self, plan: &Plan) -> Result<Written, String> {
        let put = settings::onto(
            self.settings,
            self.reading,
            &Job::of_plan(plan),
            &self.target,
        );
        put.map_err(|refused| {
            let all: Vec<String> = refused.iter().map(ToString::to_string).collect();
            all.join("; ")
        })
    }

    fn changes(&self, written: &Written) -> Vec<Changed> {
        let changed = |change: Change| Changed {
            name: change.name,
            from: change.from,
            to: change.to,
            default: change.default,
        };
        let all = settings::changes(self.settings, &written.settings);
        all.into_iter().map(changed).collect()
    }
}

/// Options of the planner whose flags have other names in Megatron-LM; what has no flag of its own there is in words.
const OPTIONS: [(&str, &str); 33] = [
    (
        "`overlap` grad-reduce,param-gather",
        "--overlap-grad-reduce and --overlap-param-gather",
    ),
    (
        "`overlap` expert-alltoall,delay-wgrad",
        "--overlap-moe-expert-parallel-comm and --delay-wgrad-compute",
    ),
    ("param-gather in `overlap`", "--overlap-param-gather"),
    ("shared-expert in `overlap`", "--moe-shared-expert-overlap"),
    (
        "expert-alltoall in `overlap`",
        "--overlap-moe-expert-parallel-comm",
    ),
    ("delay-wgrad in `overlap`", "--delay-wgrad-compute"),
    (
        "p2p overlap (Megatron-Core), which `overlap` leaves out",
        "overlapped messages, which --no-overlap-p2p-communication turns off",
    ),
    (
        "or p2p in `overlap`",
        "or without --no-overlap-p2p-communication",
    ),
    (", which `overlap` leaves out", ""),
    ("`overlap`", "the overlap"),
    ("`seq_len`", "--seq-length"),
    ("`global_batch`", "--global-batch-size"),
    (
        "`dispatcher` hybridep",
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
    ),
    ("`dispatcher`", "--moe-token-dispatcher-type"),
    (
        "`cuda_graph` full_iteration",
        "--cuda-graph-impl full_iteration",
    ),
    (
        "`cuda_graph`",
        "--cuda-graph-modules (before main --cuda-graph-scope)",
    ),
    ("`rank_order`", "the order of ranks"),
    ("`recompute`", "--recompute-modules"),
    ("`offload`", "--offload-modules"),
    ("`pipeline_layout`", "--pipeline-model-parallel-layout"),
    ("`expert_capacity_factor`", "--moe-expert-capacity-factor"),
    (
        "`pad_expert_input_to_capacity`",
        "--moe-pad-expert-input-to-capacity",
    ),
    ("`token_drop_policy`", "--moe-token-drop-policy"),
    ("`zero` fsdp2", "--use-torch-fsdp2"),
    ("`zero` hfsdp", "--outer-dp-sharding-strategy optim"),
    (
        "`zero` fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
    ),
    ("`zero` 2", "--data-parallel-sharding-strategy optim_grads"),
    ("`zero` 1", "--data-parallel-sharding-strategy optim"),
    ("`grad_dtype`", "--main-grads-dtype"),
    ("`primary_weights` fp8", "--fp8-param-gather"),
    ("`fp8_attention`", "--fp8-dot-product-attention"),
    (
        "needs grad-reduce beside",
        "needs --overlap-grad-reduce beside",
    ),
    (
        "needs expert-alltoall beside",
        "needs --overlap-moe-expert-parallel-comm beside",
    ),
];

/// A sentence of the planner with the options that it names as flags of Megatron-LM.
fn in_flags(sentence: &str) -> String {
    let own = OPTIONS.iter();
    let named = own.fold(sentence.to_owned(), |sentence, (option, flag)| {
        sentence.replace(option, flag)
    });
    // The others are called the same.
    flags::in_words_of_flags(&named)
}

fn unpriced(reading: &Reading) -> Vec<Unpriced<'_>> {
    let all = reading.unpriced.iter();
    all.map(|(setting, does)| Unpriced {
        flag: shown(setting),
        does,
    })
    .collect()
}

fn unknown(reading: &Reading) -> Vec<Unknown> {
    let all = reading.unknown.iter();
    all.map(|(setting, nearest)| Unknown {
        flag: setting.flag(),
        nearest: settings::flag(nearest),
    })
    .collect()
}

fn shown(setting: &Setting) -> String {
    match &setting.value {
        Value::On | Value::Off => setting.flag(),
        Value::Words(words) => format!("{} {}", setting.flag(), words.join(" ")),
    }
}

/// The answer for a person.
fn text(checked: &Checked<'_>, reading: &Reading) -> String {
    let mut out = String::new();
    let options = &reading.job.options;
    let (batch, precision) = (options.batch, options.precision);
    let preset = if checked.model == "settings" {
        "a model of its own"
    } else {
        checked.model
    };
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "{preset} on {} GPUs of {}, {} sequences of {} a step, {precision}: {}",
        checked.gpus, checked.cluster, batch.global_batch, batch.seq_len, options.pins
    );
    if checked.broken.is_empty() && checked.unknown.is_empty() {
        out.push_str("Legal.\n");
    } else if checked.broken.is_empty() {
        out.push_str(
            "Legal, but for unknown flags: Megatron-LM refuses those that it does not have.\n",
        );
    } else {
        let _ = writeln!(
            out,
            "Not legal for Megatron-LM {}:",
            checked.megatron.name()
        );
        for rule in checked.broken.iter().chain(&checked.nearest) {
            let _ = writeln!(out, "  {rule}");
        }
    }
    if let (Some(plan), Some(fits)) = (checked.plan, checked.fits) {
        memory(plan, fits, checked.capacity_gib, &mut out);
        let predicted = &plan.predicted;
        let range = match (predicted.step_s_low, predicted.step_s_high) {
            (Some(low), Some(high)) => format!(" ({low:.3} to {high:.3} in four cases of five)"),
            _ => String::new(),
        };
        let _ = writeln!(
            out,
            "A step takes {:.3} s{range}: {:.0} tokens/s and {:.0} TFLOP/s a GPU.",
            predicted.step_s, predicted.tokens_per_s_per_gpu, predicted.model_tflops_per_gpu
        );
    }
    changes(checked, &mut out);
    list(
        "Not priced, here and in what is faster:",
        checked
            .unpriced
            .iter()
            .map(|one| format!("{}: {}", one.flag, one.does)),
        &mut out,
    );
    list(
        "Unknown:",
        checked
            .unknown
            .iter()
            .map(|one| format!("{}; nearest: {}", one.flag, one.nearest)),
        &mut out,
    );
    list("Note:", checked.notes.iter().cloned(), &mut out);
    if !checked.not_read.is_empty() {
        let _ = writeln!(
            out,
            "\nNot read, as speed and memory do not hang on it ({}):\n{}",
            checked.not_read.len(),
            wrapped(&checked.not_read, 110)
        );
    }
    out
}

fn memory(plan: &PlannedLayout, fits: bool, capacity_gib: f64, out: &mut String) {
    let predicted = &plan.predicted;
    let verdict = if fits { "Fits" } else { "Does not fit" };
    let _ = writeln!(
        out,
        "{verdict}: {:.1} of {capacity_gib:.1} GiB on the fullest rank.",
        predicted.peak_gib
    );
    let classes = TensorClass::ALL.map(|class| format!(">{}", class.name()));
    let (first, last) = ([">pipeline rank".to_owned()], [">all (GiB)".to_owned()]);
    let mut table = Table::new(first.into_iter().chain(classes).chain(last));
    let ranks = &predicted.memory_classes_gib_by_pp_rank;
    for (rank, parts) in ranks.iter().enumerate() {
        let gib = parts.iter().map(|(_, gib)| *gib).chain([parts.total()]);
        let gib = gib.map(|gib| format!("{gib:.1}"));
        table.row([rank.to_string()].into_iter().chain(gib));
    }
    out.push_str(&table.text());
}

fn changes(checked: &Checked<'_>, out: &mut String) {
    if checked.better.is_empty() {
        if checked.fits == Some(true) {
            out.push_str("\nNothing that is searched is faster.\n");
        }
        return;
    }
    for better in checked.better {
        let flags = better
            .changes
            .iter()
            .filter(|one| one.name.starts_with("--"))
            .count();
        let gain = match (better.faster, checked.fits) {
            (Some(faster), Some(true)) => format!("{:.0} percent faster", faster * 100.0),
            (_, Some(false)) => "it fits".to_owned(),
            _ => "it is legal and fits".to_owned(),
        };
        let own = if better.same_degrees {
            ", degrees as they are"
        } else {
            ""
        };
        let named = better.named.as_ref().map_or_else(String::new, |named| {
            format!(", with what plan tries only where named ({named})")
        });
        let predicted = &better.plan.predicted;
        let _ = writeln!(
            out,
            "\nChange {flags} flag{}{own}{named}: {gain} ({:.3} s, {:.1} GiB)",
            if flags == 1 { "" } else { "s" },
            predicted.step_s,
            predicted.peak_gib
        );
        let width = better
            .changes
            .iter()
            .map(|one| one.name.len())
            .max()
            .unwrap_or(0);
        for change in &better.changes {
            let absent = match change.default {
                "" => "absent".to_owned(),
                default => format!("absent ({default})"),
            };
            let from = change.from.clone().unwrap_or_else(|| absent.clone());
            let to = change.to.clone().unwrap_or(absent);
            let _ = writeln!(out, "  {:width$}  {from} -> {to}", change.name);
        }
    }
}

fn list(heading: &str, lines: impl Iterator<Item = String>, out: &mut String) {
    let mut lines = lines.peekable();
    if lines.peek().is_some() {
        let _ = writeln!(out, "\n{heading}");
    }
    for line in lines {
        let _ = writeln!(out, "  {line}");
    }
}

fn wrapped(words: &[String], width: usize) -> String {
    let mut lines = vec![String::from(" ")];
    for word in words {
        let last = lines.last_mut().expect("never empty");
        if last.len() + word.len() >= width {
            lines.push(format!("  {word}"));
        } else {
            last.push(' ');
            last.push_str(word);
        }
    }
    lines.join("\n")
}
