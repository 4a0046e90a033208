//! PyTorch at the same shapes, timed by a script of its own (`torch.py`).

use std::ffi::OsStr;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use moefold_kernels::check::{Sizes, loads};
use serde_json::{Value, json};

use crate::deadline::wait_at_most;

const SCRIPT: &str = include_str!("torch.py");

/// How long all of its times may take together.
const DEADLINE: Duration = Duration::from_mins(5);

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
pub(crate) fn times(python: &OsStr, sizes: &[Sizes]) -> Torch {
    match ask(python, sizes) {
        Ok(torch) => torch,
        Err(why) => Torch {
            note: format!("PyTorch was not timed: {why}"),
            times: Vec::new(),
            said: Vec::new(),
        },
    }
}

fn ask(python: &OsStr, sizes: &[Sizes]) -> Result<Torch, String> {
    let child = Command::new(python)
        .args(["-c", SCRIPT])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.map_err(|error| format!("{}: {error}", python.display()))?;
    let request = json!(sizes.iter().map(described).collect::<Vec<_>>()).to_string();
    if let Some(mut stdin) = child.stdin.take() {
        // A script that ended early has closed its end; its own message says why.
        let _ = stdin.write_all(request.as_bytes());
    }
    let output = wait_at_most(child, DEADLINE).map_err(|error| error.to_string())?;
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
