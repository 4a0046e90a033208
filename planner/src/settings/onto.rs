//! [`onto`]: what a plan says, put into settings that are there; and [`changes`]: which flags that changes.

use super::job::Job;
use super::model::same_model;
use super::reading::Reading;
use super::rules::{self, Target};
use super::table;
use super::text::{Setting, Settings, Value, flag};
use super::write::{Rest, all, merged};
use super::writer::{Refusal, Written};

/// Puts a job into settings: what they mean otherwise is changed, and all else stays word for word, also what is not
/// read. `reading` is what the settings say. Rules that they break already are not refused again.
pub fn onto(
    settings: &Settings,
    reading: &Reading,
    job: &Job,
    target: &Target<'_>,
) -> Result<Written, Vec<Refusal>> {
    let all = |job: &Job| all(job, target.cluster, target.version, Rest::Absent);
    // What is there may break rules; compared are words, which it has all the same.
    let own = all(&reading.job);
    let mut plan = all(job);
    // A model that is there needs no flag for what it is.
    let known = same_model(&reading.job.model, &job.model);
    let mut refused = plan
        .refused
        .split_off(if known { plan.refused_of_model } else { 0 });
    let mut written = merged(settings, &own.written, &plan.written);
    mend(&mut written.settings, &plan.written.settings, target);
    leave_out_newer(&mut written, target);
    let before = rules::broken(settings, target);
    let after = rules::broken(&written.settings, target).into_iter();
    let new = after
        .filter(|broken| !before.contains(broken))
        .map(|broken| {
            let (what, nearest) = broken.in_two();
            Refusal { what, nearest }
        });
    refused.extend(new);
    if refused.is_empty() {
        Ok(written)
    } else {
        Err(refused)
    }
}

/// Says what others say, where fewer rules are broken so.
fn mend(settings: &mut Settings, others: &Settings, target: &Target<'_>) {
    let mut keep_better = |change: &dyn Fn(&mut Settings)| {
        let mut own = settings.clone();
        change(&mut own);
        if rules::broken(&own, target).len() < rules::broken(settings, target).len() {
            *settings = own;
        }
    };
    for (name, value) in &others.env {
        keep_better(&|own| own.export(name, value));
    }
    for Setting { name, value } in &others.flags {
        keep_better(&|own| own.set(name, value.clone()));
    }
}

/// Leaves out flags that a release does not have yet, and notes them.
fn leave_out_newer(written: &mut Written, target: &Target<'_>) {
    let version = target.version;
    let is_newer = |setting: &Setting| {
        let known = table::find(&setting.name);
        known.is_some_and(|known| known.since > version)
    };
    let flags = std::mem::take(&mut written.settings.flags);
    let (newer, kept): (Vec<Setting>, Vec<Setting>) = flags.into_iter().partition(is_newer);
    written.settings.flags = kept;
    let newer = newer.iter().filter(|setting| setting.value != Value::Off);
    let newer: Vec<String> = newer.map(Setting::flag).collect();
    if !newer.is_empty() {
        let (name, flags) = (version.name(), newer.join(", "));
        let note = format!("left out, as Megatron-Core {name} does not have it: {flags}");
        written.notes.push(note);
    }
}

/// A flag or a variable that two settings say otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The flag with its dashes, or the variable.
    pub name: String,
    /// What it is before; nothing where it is absent.
    pub from: Option<String>,
    /// What it is after; nothing where it is gone.
    pub to: Option<String>,
    /// What holds where the flag is absent, if anything is known to.
    pub default: &'static str,
}

impl Change {
    /// Whether it says anything else than before: a flag may be spelled out as it is where it is absent.
    fn changes_something(&self) -> bool {
        let said = |side: &Option<String>| side.clone().unwrap_or_else(|| self.default.to_owned());
        said(&self.from) != said(&self.to)
    }
}

/// What differs between two settings, flags first.
pub fn changes(before: &Settings, after: &Settings) -> Vec<Change> {
    let shown = |settings: &Settings, name: &str| match settings.get(name) {
        None | Some(Value::Off) => None,
        Some(value) => Some(value.shown()),
    };
    let mut names: Vec<&str> = Vec::new();
    for setting in after.flags.iter().chain(&before.flags) {
        if !names.contains(&setting.name.as_str()) {
            names.push(&setting.name);
        }
    }
    let flags = names.into_iter().map(|name| Change {
        name: flag(name),
        from: shown(before, name),
        to: shown(after, name),
        default: table::find(name).map_or("", |known| known.default),
    });
    let variables = after.env.iter().chain(&before.env).map(|(name, _)| name);
    let mut seen = Vec::new();
    let variables: Vec<Change> = variables
        .filter(|name| {
            let new = !seen.contains(name);
            seen.push(name);
            new
        })
        .map(|name| Change {
            name: name.clone(),
            from: before.variable(name).map(str::to_owned),
            to: after.variable(name).map(str::to_owned),
            default: "",
        })
        .collect();
    let all = flags.chain(variables);
    all.filter(Change::changes_something).collect()
}
