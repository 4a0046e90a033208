//! The small cases under compute-sanitizer.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use moefold_kernels::Dtype;
use moefold_kernels::check::Sizes;

use crate::apart::arguments;
use crate::deadline::wait_at_most;
use crate::part::Part;
use crate::parts::stems;
use crate::{Error, Options, together};

/// What compute-sanitizer said of one op.
pub(crate) struct Sanitized {
    /// One line for the report.
    pub(crate) note: String,
    /// Whether it found something wrong.
    pub(crate) found_errors: bool,
}

/// What looks for stray accesses, for races in shared memory and for misused barriers.
const TOOLS: [&str; 3] = ["memcheck", "racecheck", "synccheck"];

/// How long all of them may take together.
const ALL_TIME: Duration = Duration::from_mins(12);

/// How long one run may take.
const DEADLINE: Duration = Duration::from_mins(2);

/// Runs the smallest sizes under every tool, each op in a process of its own, some at the same time.
pub(crate) fn sanitized(options: &Options) -> Result<Vec<Sanitized>, Error> {
    // Rows of whole 16 bytes: those the kernels of tiles and bulk copies take.
    let Some(sizes) = Sizes::small().into_iter().find(Sizes::is_wide) else {
        return Ok(Vec::new());
    };
    let until = Instant::now() + ALL_TIME;
    let stems = stems(&sizes, Dtype::Bf16);
    // One tool over all ops before the next: what there is no time for is the last tool's.
    let runs: Vec<_> = TOOLS
        .iter()
        .flat_map(|&tool| stems.iter().map(move |op| (tool, op)))
        .collect();
    let notes = together(&runs, |&(tool, op)| {
        let part = Part {
            sizes: sizes.name.to_owned(),
            dtype: Dtype::Bf16,
            op: op.clone(),
            timed: false,
            skip: Vec::new(),
        };
        let mut command = Command::new(&options.program);
        command.args(arguments(&part, options)?);
        let log = options.out.join(format!("{tool}-{op}.log"));
        Ok(sanitizer(tool, op, &command, &log, until))
    })?;
    notes.into_iter().collect()
}

/// Runs the command, which is a part of `op`, under a tool. What the tool printed is in `log`.
fn sanitizer(tool: &str, op: &str, part: &Command, log: &Path, until: Instant) -> Sanitized {
    let skipped = |why: String| Sanitized {
        note: format!("{op}: compute-sanitizer {tool} was not run: {why}"),
        found_errors: false,
    };
    let Some(sanitizer) = on_path("compute-sanitizer") else {
        return skipped("it is not on PATH".to_owned());
    };
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return skipped("its time was up".to_owned());
    }
    let child = Command::new(sanitizer)
        .args(["--tool", tool, "--error-exitcode", "9"])
        .arg(part.get_program())
        .args(part.get_args())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let output = match child.and_then(|child| wait_at_most(child, left.min(DEADLINE))) {
        Err(error) => return skipped(error.to_string()),
        Ok(output) => output,
    };
    let mut text = output.stdout;
    text.extend(output.stderr);
    let kept = match std::fs::write(log, &text) {
        Ok(()) => String::new(),
        Err(error) => format!("; its log: {error}"),
    };
    let text = String::from_utf8_lossy(&text);
    let summary = text.lines().rfind(|line| line.contains(" SUMMARY: "));
    let summary = summary.map(|line| line.trim_start_matches(['=', ' ']));
    match summary {
        None => skipped(format!("no summary, {}{kept}", output.status)),
        Some(summary) => Sanitized {
            note: format!("{op}: compute-sanitizer {tool}: {summary}{kept}"),
            found_errors: !is_clean(summary),
        },
    }
}

/// Whether a summary is of nothing found: `ERROR SUMMARY: 0 errors`, or of races
/// `RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)`.
fn is_clean(summary: &str) -> bool {
    summary.contains("SUMMARY: 0 errors") || summary.contains("SUMMARY: 0 hazards")
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::is_clean;

    #[test]
    fn a_summary_of_something_found_is_not_clean() {
        assert!(is_clean("ERROR SUMMARY: 0 errors"));
        assert!(is_clean(
            "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
        ));
        assert!(!is_clean("ERROR SUMMARY: 10 errors"));
        assert!(!is_clean(
            "RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"
        ));
    }
}
