//! [`Input`]: a file or directory that can be compared, read and checked.
//!
//! Four kinds: a `plan.json`, what `plan --json` printed, a run directory, and steps that another program ran of the
//! plan named before them. Which one a path is follows from what is there, never from its name. Reading only; what is
//! made of several inputs is in [`crate::subject`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use moefold_planner::answer::Answer;
use moefold_planner::plan::Plan;
use moefold_profiles::directory::{MeasuredSteps, PROFILE_FILE};
use moefold_profiles::import::{self, ImportError};
use moefold_profiles::run::{RunSummary, StepRecord};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::ReportError;

/// One thing given to `compare`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Input {
    /// Where it was read from.
    pub(crate) path: PathBuf,
    /// What it is.
    pub(crate) content: Content,
}

/// What an input holds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Content {
    /// A `plan.json`, and steps of it that another program ran.
    Plan(Box<Plan>, Option<Logged>),
    /// What `plan --json` printed.
    Answer(Box<Answer>),
    /// A run directory.
    Run(Box<Run>),
    /// A log of Megatron-LM, or a profile with steps.
    Steps(MeasuredSteps),
}

/// Steps of a plan that another program ran.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Logged {
    /// The log or the profile.
    pub(crate) source: String,
    /// How many steps.
    pub(crate) steps: usize,
    /// What one should know before believing them.
    pub(crate) note: Option<&'static str>,
    /// Their median, seconds.
    pub(crate) step_s: f64,
}

/// A run directory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Run {
    /// The plan that ran.
    pub(crate) plan: Plan,
    /// Its steps, in order.
    pub(crate) steps: Vec<StepRecord>,
    /// What it measured.
    pub(crate) summary: RunSummary,
    /// The machine it ran on, as `env.json` has it; empty without one.
    pub(crate) env: BTreeMap<String, serde_json::Value>,
}

impl Input {
    /// Reads a path.
    pub(crate) fn read(path: &Path) -> Result<Self, ReportError> {
        let content = if path.is_dir() {
            read_directory(path)?
        } else {
            read_file(path)?
        };
        Ok(Self {
            path: path.to_owned(),
            content,
        })
    }
}

/// Inputs in which steps of another program are with the plan that is named right before them.
pub(crate) fn paired(inputs: Vec<Input>) -> Result<Vec<Input>, ReportError> {
    let mut paired: Vec<Input> = Vec::new();
    for input in inputs {
        let Content::Steps(steps) = input.content else {
            paired.push(input);
            continue;
        };
        let before = paired.last_mut().map(|before| &mut before.content);
        let Some(Content::Plan(plan, logged @ None)) = before else {
            return Err(ReportError::StepsAlone { path: input.path });
        };
        let step_s = steps.median_of(plan.request.batch.global_batch);
        *logged = Some(Logged {
            source: input.path.display().to_string(),
            steps: steps.seconds.len(),
            note: steps.note(),
            step_s: step_s.map_err(|what| ReportError::Format {
                path: input.path,
                what,
            })?,
        });
    }
    Ok(paired)
}

/// A directory is a run, a profile with steps, or holds a lone `plan.json`.
fn read_directory(path: &Path) -> Result<Content, ReportError> {
    let here = |name: &str| path.join(name);
    let plan_file = here("plan.json");
    if !plan_file.is_file() {
        if here(PROFILE_FILE).is_file()
            && let Some(steps) = import::steps(path)?
        {
            return Ok(Content::Steps(steps));
        }
        return Err(ReportError::NotARun {
            path: path.to_owned(),
            missing: "plan.json",
        });
    }
    let (has_steps, has_summary) = (
        here("steps.jsonl").is_file(),
        here("summary.json").is_file(),
    );
    if !has_steps && !has_summary {
        return read_plan(&plan_file);
    }
    if !has_steps || !has_summary {
        let missing = if has_steps {
            "summary.json"
        } else {
            "steps.jsonl"
        };
        return Err(ReportError::NotARun {
            path: path.to_owned(),
            missing,
        });
    }
    let env_file = here("env.json");
    let env = if env_file.is_file() {
        parse(&env_file, &text_of(&env_file)?)?
    } else {
        BTreeMap::new()
    };
    let run = Run {
        plan: Plan::load(&plan_file)?,
        steps: read_steps(&here("steps.jsonl"))?,
        summary: read_summary(&here("summary.json"))?,
        env,
    };
    let (lines, ran) = (run.steps.len() as u64, run.summary.steps);
    if lines < ran {
        return Err(ReportError::Format {
            path: here("steps.jsonl"),
            what: format!("found {lines} steps, expected the {ran} that summary.json says ran"),
        });
    }
    Ok(Content::Run(Box::new(run)))
}

/// The keys that tell the kinds of file apart.
#[derive(Deserialize)]
struct Keys {
    plans: Option<IgnoredAny>,
    layout: Option<IgnoredAny>,
}

fn read_file(path: &Path) -> Result<Content, ReportError> {
    let text = text_of(path)?;
    if import::is_log(&text)
        && let Some(steps) = import::steps(path)?
    {
        return Ok(Content::Steps(steps));
    }
    let keys: Keys = serde_json::from_str(&text).map_err(|error| ReportError::NoJson {
        path: path.to_owned(),
        error,
    })?;
    match keys {
        Keys { plans: Some(_), .. } => {
            let answer: Answer = parse(path, &text)?;
            answer.check(path)?;
            Ok(Content::Answer(Box::new(answer)))
        }
        Keys {
            layout: Some(_), ..
        } => read_plan(path),
        Keys { .. } => Err(ReportError::UnknownKind {
            path: path.to_owned(),
        }),
    }
}

fn read_plan(path: &Path) -> Result<Content, ReportError> {
    Ok(Content::Plan(Box::new(Plan::load(path)?), None))
}

fn read_summary(path: &Path) -> Result<RunSummary, ReportError> {
    RunSummary::read(&text_of(path)?).map_err(|what| ReportError::Format {
        path: path.to_owned(),
        what,
    })
}

fn read_steps(path: &Path) -> Result<Vec<StepRecord>, ReportError> {
    let text = text_of(path)?;
    StepRecord::lines(&text)
        .map(|line| {
            line.map_err(|(line, problem)| ReportError::Format {
                path: path.to_owned(),
                what: format!("line {line}: {problem}"),
            })
        })
        .collect()
}

/// The text of a file, compressed by gzip or not.
fn text_of(path: &Path) -> Result<String, ReportError> {
    import::text(path).map_err(|error| match error {
        ImportError::Unreadable { path, source } => ReportError::Read { path, source },
        other => other.into(),
    })
}

fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ReportError> {
    serde_json::from_str(text).map_err(|error| ReportError::Format {
        path: path.to_owned(),
        what: error.to_string(),
    })
}
