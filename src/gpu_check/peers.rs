//! Other programs of the same run: PyTorch at the same shapes, and compute-sanitizer.

use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use moefold_kernels::check::{Sizes, loads};
use serde_json::{Value, json};

const SCRIPT: &str = include_str!("torch.py");

/// A peer's time for a case.
pub(crate) struct PeerTime {
    pub(crate) sizes: String,
    pub(crate) case: String,
    pub(crate) median_s: f64,
}

/// What PyTorch said, or why it did not.
pub(crate) struct Torch {
    /// One line for the report: its version, or why there are no times.
    pub(crate) note: String,
    pub(crate) times: Vec<PeerTime>,
    /// Every line it printed.
    pub(crate) said: Vec<Value>,
}

/// Times PyTorch with `python` at these sizes.
pub(crate) fn torch(python: &str, sizes: &[Sizes]) -> Torch {
    match ask(python, sizes) {
        Ok(torch) => torch,
        Err(why) => Torch {
            note: format!("PyTorch was not timed: {why}"),
            times: Vec::new(),
            said: Vec::new(),
        },
    }
}

fn ask(python: &str, sizes: &[Sizes]) -> Result<Torch, String> {
    let child = Command::new(python)
        .args(["-c", SCRIPT])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.map_err(|error| format!("{python}: {error}"))?;
    let request = json!(sizes.iter().map(described).collect::<Vec<_>>()).to_string();
    if let Some(mut stdin) = child.stdin.take() {
        // A script that ended early has closed its end; its own message says why.
        let _ = stdin.write_all(request.as_bytes());
    }
    let output = wait_at_most(child, TORCH_DEADLINE).map_err(|error| error.to_string())?;
    let said: Vec<Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let text = |line: &Value, key: &str| line[key].as_str().map(str::to_owned);
    let times: Vec<PeerTime> = said
        .iter()
        .filter_map(|line| {
            Some(PeerTime {
                sizes: text(line, "sizes")?,
                case: text(line, "case")?,
                median_s: line["median_s"].as_f64()?,
            })
        })
        .collect();
    if times.is_empty() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last = stderr.lines().last().unwrap_or("it printed no time");
        return Err(last.to_owned());
    }
    let version = said.iter().find_map(|line| text(line, "torch"));
    Ok(Torch {
        note: format!("PyTorch {}", version.unwrap_or_default()),
        times,
        said,
    })
}

fn described(sizes: &Sizes) -> Value {
    json!({
        "name": sizes.name, "tokens": sizes.tokens, "seqs": sizes.seqs, "hidden": sizes.hidden,
        "heads": sizes.heads, "kv_heads": sizes.kv_heads, "qk_dim": sizes.qk_dim,
        "v_dim": sizes.v_dim, "experts": sizes.experts, "topk": sizes.topk, "width": sizes.width,
        "vocab": sizes.vocab, "loads": loads(sizes),
    })
}

/// What compute-sanitizer said of one op.
pub(crate) struct Sanitized {
    /// One line for the report.
    pub(crate) note: String,
    /// Whether it found something wrong.
    pub(crate) found_errors: bool,
}

/// What looks for stray accesses, for races in shared memory and for misused barriers.
pub(crate) const TOOLS: [&str; 3] = ["memcheck", "racecheck", "synccheck"];

/// How long all of them may take together.
pub(crate) const SANITIZER_TIME: Duration = Duration::from_mins(12);

/// Runs the small sizes of `op` under a tool of compute-sanitizer. What it printed is in `log`.
pub(crate) fn sanitizer(
    tool: &str,
    op: &str,
    program: &Path,
    arguments: &[String],
    log: &Path,
    until: Instant,
) -> Sanitized {
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
        .arg(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let output = match child.and_then(|child| wait_at_most(child, left.min(SANITIZER_DEADLINE))) {
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

const TORCH_DEADLINE: Duration = Duration::from_mins(5);
const SANITIZER_DEADLINE: Duration = Duration::from_mins(2);

/// What a process printed; one that takes longer is killed and an error.
pub(super) fn wait_at_most(mut child: Child, deadline: Duration) -> io::Result<Output> {
    let pipes = (child.stdout.take(), child.stderr.take());
    let read = |pipe: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            // What came before a broken pipe is all there is.
            let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
            bytes
        })
    };
    let stdout = read(pipes.0.map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
    let stderr = read(pipes.1.map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > deadline {
            child.kill()?;
            child.wait()?;
            let why = format!("no end after {} s: killed", deadline.as_secs());
            return Err(io::Error::other(why));
        }
        thread::sleep(Duration::from_millis(50));
    };
    Ok(Output {
        status,
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
    })
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
