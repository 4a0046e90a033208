//! `moefold import`: measurements that others made, as a profile directory.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::SystemTime;

use moefold_executor::environment;
use moefold_executor::files::check_no_run;
use moefold_profiles::directory::{MeasuredSteps, PROFILE_FILE};
use moefold_profiles::import::{self, DeviceTime, Imported, LeftOut, Options};
use moefold_profiles::statistics;
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::ImportArgs;
use crate::failure::{Failure, failure};
use crate::output::Output;

/// Names of work left out that are shown to a person who did not ask for all.
const SHOWN: usize = 12;

/// What `--json` prints.
#[derive(Serialize)]
struct ImportJson<'a> {
    #[serde(serialize_with = "moefold_executor::files::shown")]
    directory: &'a Path,
    format: &'static str,
    device: &'a str,
    /// Keys by the name of their op or collective.
    keys: BTreeMap<&'static str, usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<&'a MeasuredSteps>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_time: Option<DeviceTime>,
    left_out: &'a [LeftOut],
    notes: &'a [String],
}

pub(crate) fn run(args: &ImportArgs, output: Output) -> Result<(), Failure> {
    check_no_run(&args.out, "a profile is written").map_err(failure)?;
    let options = Options {
        format: args.format,
        device: args.device.as_deref(),
    };
    let mut imported = import::import(&args.source, &options).map_err(Failure::request)?;
    let profile = &mut imported.profile;
    if profile.date.is_empty() {
        profile.date = environment::rfc3339(SystemTime::now());
    }
    let replaces = args.out.join(PROFILE_FILE).is_file();
    imported.profile.save(&args.out).map_err(Failure::runtime)?;
    if replaces {
        let dir = args.out.display();
        output.note(&format!("{dir} had a profile, which this one replaces; plan with several by --profile DIR --profile OTHER"))?;
    }
    for note in &imported.notes {
        output.note(note)?;
    }
    let mut keys: BTreeMap<&str, usize> = BTreeMap::new();
    for sample in &imported.profile.samples {
        *keys.entry(sample.key.stem()).or_default() += 1;
    }
    let answer = ImportJson {
        directory: &args.out,
        format: imported.format.name(),
        device: &imported.profile.device,
        keys,
        steps: imported.profile.steps.as_ref(),
        device_time: imported.device_time,
        left_out: &imported.left_out,
        notes: &imported.notes,
    };
    output.answer(&answer, || text(&answer, &imported, output))
}

fn text(answer: &ImportJson<'_>, imported: &Imported, output: Output) -> String {
    let mut text = String::new();
    let samples = &imported.profile.samples;
    if !samples.is_empty() {
        let mut table = Table::new(["op or collective", ">keys", ">timings"]);
        for (stem, keys) in &answer.keys {
            let same = samples.iter().filter(|sample| sample.key.stem() == *stem);
            let timings: usize = same.map(|sample| sample.seconds.len()).sum();
            table.row([(*stem).to_owned(), keys.to_string(), timings.to_string()]);
        }
        text.push_str(&table.text());
        text.push('\n');
    }
    if let Some(steps) = answer.steps {
        let median = statistics::median(steps.seconds.clone()).expect("a log has a step");
        writeln!(text, "{}: {:.3} s a step", steps.source, median).expect(ANY);
    }
    if let Some(time) = &answer.device_time {
        writeln!(
            text,
            "Of {:.3} s the device was busy {:.3} and idle {:.3} ({:.1} %); collectives took {:.3}, \
             alone {:.3}",
            time.span_s,
            time.busy_s,
            time.idle_s,
            100.0 * time.idle_s / time.span_s,
            time.collective_s,
            time.exposed_collective_s
        )
        .expect(ANY);
    }
    if !answer.left_out.is_empty() {
        text.push_str("\nLeft out:\n");
        text.push_str(&left_out(answer.left_out, output));
    }
    let dir = answer.directory.display();
    let next = if samples.is_empty() && answer.steps.is_some() {
        format!(
            "hold them against a plan: compare plan.json {dir}, or calibrate --plan plan.json --measured {dir}"
        )
    } else {
        format!("plan with --profile {dir}")
    };
    writeln!(
        text,
        "\n{} keys of {} from {} ({}) in {dir}; {next}",
        samples.len(),
        answer.device,
        imported
            .profile
            .command
            .trim_start_matches("moefold import "),
        answer.format
    )
    .expect(ANY);
    text
}

const ANY: &str = "a string takes any text";

fn left_out(items: &[LeftOut], output: Output) -> String {
    let shown = if output.verbose { items.len() } else { SHOWN };
    let mut table = Table::new(["name", ">times", ">seconds", ">share", "why"]);
    let or_dash = |figure: Option<String>| figure.unwrap_or_else(|| "-".to_owned());
    for item in items.iter().take(shown) {
        table.row([
            item.name.clone(),
            item.count.to_string(),
            or_dash(item.seconds.map(|seconds| format!("{seconds:.6}"))),
            or_dash(item.share.map(|share| format!("{:.1} %", 100.0 * share))),
            item.why.clone(),
        ]);
    }
    let mut text = table.text();
    if let Some(more) = items.len().checked_sub(shown).filter(|&more| more > 0) {
        writeln!(text, "and {more} more: --verbose, or --json").expect(ANY);
    }
    text
}
