//! `moefold export`: a plan as settings of Megatron-LM, for its command line, YAML, torchrun or Slurm.

use anyhow::{Context as _, anyhow};
use moefold_planner::plan::Plan;
use moefold_planner::settings::{
    self, Form, Heading, Job, Refusal, Rest, Settings, Target, Value, Version, Written,
};
use moefold_profiles::files::write_atomically;
use serde::Serialize;

use crate::cli::ExportArgs;
use crate::exportable::fills_nodes;
use crate::failure::Failure;
use crate::output::Output;

/// What `export --json` prints.
#[derive(Debug, Serialize)]
struct Exported<'a> {
    /// The form.
    to: Form,
    /// The release of Megatron-LM.
    megatron: Version,
    /// Variables of the environment.
    env: Vec<Variable<'a>>,
    /// Flags with their values: true, or words.
    args: Vec<Arg<'a>>,
    /// What a reader should know.
    notes: &'a [String],
    /// The whole file.
    text: &'a str,
}

#[derive(Debug, Serialize)]
struct Variable<'a> {
    name: &'a str,
    value: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    remark: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct Arg<'a> {
    flag: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remark: Option<&'a str>,
}

pub(crate) fn run(args: &ExportArgs, output: Output) -> Result<(), Failure> {
    let plan = Plan::load(&args.plan).map_err(Failure::request)?;
    let mut written = match &args.base {
        None => settings::write(
            &Job::of_plan(&plan),
            &plan.cluster,
            args.megatron,
            Rest::Placeholders,
        )
        .map_err(|refused| refusal(args.to, &refused))?,
        Some(path) => {
            let base = settings::read_file(path).map_err(Failure::request)?;
            on(&base, &plan, args)?
        }
    };
    let stack = settings::note_on_stack(plan.planned.stack);
    written.notes.extend(stack.map(str::to_owned));
    for note in &written.notes {
        output.note(note)?;
    }
    if matches!(args.to, Form::Torchrun | Form::Slurm) && !fills_nodes(&plan) {
        let (gpus, node) = (plan.request.gpus, plan.cluster.gpus_per_node);
        return Err(Failure::Request(anyhow!(
            "--to {}: the plan is for {gpus} GPUs, which are no whole nodes of {node}, and this starts as many on every \
             node: plan for {} or {} GPUs, or write --to megatron-lm and start the ranks yourself",
            args.to.name(),
            gpus / node * node,
            gpus.next_multiple_of(node),
        )));
    }
    let text = settings::text_of(args.to, &written, &heading(&plan, args.megatron));
    if let Some(path) = &args.out {
        write_atomically(path, |out| out.write_all(text.as_bytes()))
            .with_context(|| format!("--out {}: cannot be written", path.display()))
            .map_err(Failure::Runtime)?;
    }
    let env = written.settings.env.iter().map(|(name, value)| Variable {
        name,
        value,
        remark: written.remark(name),
    });
    let exported = Exported {
        to: args.to,
        megatron: args.megatron,
        env: env.collect(),
        args: arguments(&written),
        notes: &written.notes,
        text: &text,
    };
    output.answer(&exported, || match &args.out {
        None => text.clone(),
        Some(path) => format!("The settings are in {}.\n", path.display()),
    })
}

/// The plan put into settings that are there.
fn on(base: &Settings, plan: &Plan, args: &ExportArgs) -> Result<Written, Failure> {
    let job = Job::of_plan(plan);
    let target = Target {
        version: args.megatron,
        cluster: &plan.cluster,
        gpus: plan.request.gpus,
    };
    let read = |model| settings::reading::read(base, &target, model);
    // What the flags leave open of the model is as the plan's.
    let reading = read(None).or_else(|_| read(Some(&plan.model)));
    let reading = reading.map_err(|problems| crate::check::unreadable(&problems))?;
    settings::onto(base, &reading, &job, &target).map_err(|refused| refusal(args.to, &refused))
}

fn arguments(written: &Written) -> Vec<Arg<'_>> {
    let flags = written.settings.flags.iter();
    let on = flags.filter(|setting| setting.value != Value::Off);
    on.map(|setting| Arg {
        flag: setting.flag(),
        values: match &setting.value {
            Value::Words(words) => Some(words),
            Value::On | Value::Off => None,
        },
        remark: written.remark(&setting.name),
    })
    .collect()
}

/// What stands above the settings of a plan.
pub(crate) fn heading(plan: &Plan, version: Version) -> Heading {
    let (planned, request) = (&plan.planned, &plan.request);
    let predicted = &planned.predicted;
    let layout = planned.layout.pinned();
    let expected = format!(
        "Expected: {:.3} s a step, {:.0} tokens/s a GPU, {:.1} GiB on the fullest of {:.1} GiB.",
        predicted.step_s,
        predicted.tokens_per_s_per_gpu,
        predicted.peak_gib,
        plan.cluster.gpu.memory_gib
    );
    // Names are anyone's, and the settings may be run as a script.
    let plain = |name: &str| name.replace(char::is_control, " ");
    let is_word = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    Heading {
        lines: vec![
            format!(
                "{} on {} GPUs of {}: {layout},dp={}.",
                plain(&plan.model.name),
                request.gpus,
                plain(&plan.cluster.name),
                planned.layout.dp
            ),
            expected,
        ],
        name: (plan.model.name.to_lowercase()).replace(|c| !is_word(c), "-"),
        gpus: request.gpus,
        gpus_per_node: plan.cluster.gpus_per_node,
        version,
    }
}

/// Everything that the target cannot say, by name.
pub(crate) fn refusal(to: Form, refused: &[Refusal]) -> Failure {
    let lines: Vec<String> = refused.iter().map(|one| format!("  {one}")).collect();
    Failure::Request(anyhow!(
        "the plan cannot be written for {}:\n{}",
        to.name(),
        lines.join("\n")
    ))
}
