//! Runs of plans of a folder, and what they leave.

use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::plans::Bench;
use super::program::program;
use super::tiny::tokens;

/// For two ranks and for four.
pub(crate) const TWO: (&str, &str) = ("2", "tp=1,ep=2,etp=1,mbs=2");
pub(crate) const FOUR: (&str, &str) = ("4", "tp=2,ep=4,etp=1,mbs=1");

/// More steps than any test waits for.
pub(crate) const ENDLESS: [&str; 2] = ["--steps", "1000000"];

impl Bench {
    /// Training by the plan for so many ranks, in the bench's folder.
    pub(crate) fn execute(&self, ranks: &str, rest: &[&str]) -> Command {
        let (plan, data) = (self.path(&format!("{ranks}.json")), tokens());
        let first = ["execute", &plan, "--data", &data, "--device", "cpu"];
        let mut command = program(&[&first, rest].concat());
        command.current_dir(self.0.0.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Number, loss and gradient norm of the steps of a run.
    pub(crate) fn steps(&self, run: &str) -> Vec<(u64, f64, f64)> {
        let steps = self.0.steps(run).into_iter();
        steps
            .map(|step| (step.step, step.loss, step.grad_norm))
            .collect()
    }

    /// The steps of the complete checkpoints of a run, and whether there is anything else.
    pub(crate) fn checkpoints(&self, run: &str) -> (Vec<u64>, bool) {
        let folder = self.path(&format!("{run}/checkpoints"));
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().display().to_string());
        let (mut complete, mut more) = (Vec::new(), false);
        for name in names {
            match name
                .strip_prefix("step-")
                .and_then(|step| step.parse().ok())
            {
                Some(step) => complete.push(step),
                None => more = true,
            }
        }
        complete.sort_unstable();
        (complete, more)
    }
}

/// Waits until something is so.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(
            begun.elapsed() < Duration::from_mins(1),
            "waited for {what}"
        );
        thread::sleep(Duration::from_millis(2));
    }
}
