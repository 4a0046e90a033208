//! What a check found, as JSON and as tables.

use std::fmt::Write as _;
use std::path::Path;

use moefold_kernels::cuda::libraries::{Answer, Library, find};
use moefold_profiles::files::write_atomically;
use moefold_reports::format;
use moefold_reports::tables::Table;
use serde::Serialize;
use serde_json::{Value, json};

use crate::Error;
use crate::part::{Ceilings, Line, Outcome, SEED, Time};
use crate::sanitizer::Sanitized;
use crate::torch::{PeerTime, Torch};
use crate::trials::{Trial, Verdict};

/// Everything a check found.
pub struct Report {
    /// What the machine has.
    pub(crate) doctor: Value,
    pub(crate) device: String,
    pub(crate) command: String,
    /// What the driver's tool said of clocks, temperature and power, before and after.
    pub(crate) clocks: [Option<String>; 2],
    pub(crate) ceilings: Option<Ceilings>,
    pub(crate) lines: Vec<Line>,
    pub(crate) torch: Option<Torch>,
    pub(crate) sanitizer: Option<Vec<Sanitized>>,
    pub(crate) trials: Vec<Trial>,
}

/// What a check came to, for programs.
#[derive(Debug, Serialize)]
pub struct Summary {
    device: String,
    cases: usize,
    wrong: usize,
    ceilings: Option<Ceilings>,
    trials: Vec<(&'static str, Verdict)>,
}

/// A trial's name, verdict and time.
fn heading(trial: &Trial) -> String {
    let verdict = match trial.verdict {
        Verdict::Right => "ok",
        Verdict::Wrong => "WRONG",
        Verdict::Seen => "seen",
    };
    format!("{}: {verdict}, {:.0} s", trial.name, trial.seconds)
}

impl Line {
    fn time(&self) -> Option<Time> {
        match &self.outcome {
            Outcome::Ran { time, .. } => *time,
            Outcome::Failed(_) => None,
        }
    }

    /// The least time this device could take, by its measured ceilings.
    fn floor_s(&self, ceilings: Ceilings) -> f64 {
        let moving = self.bytes / ceilings.copy_bytes_per_s;
        if self.matrix {
            moving.max(self.flops / ceilings.dense_flops_per_s)
        } else {
            moving
        }
    }

    /// The output furthest from its reference, in words.
    fn verdict(&self) -> String {
        match &self.outcome {
            Outcome::Failed(why) => format!("FAILED {why}"),
            Outcome::Ran { outputs, .. } => {
                let share = |o: &super::part::Output| match (o.error, o.tolerance) {
                    (None, _) => f64::INFINITY,
                    (Some(error), tolerance) if tolerance > 0.0 => error / tolerance,
                    (Some(error), _) => error,
                };
                let worst = outputs.iter().max_by(|a, b| share(a).total_cmp(&share(b)));
                worst.map_or_else(
                    || "FAILED nothing was compared".to_owned(),
                    |worst| {
                        let found = if worst.passes { "ok" } else { "WRONG" };
                        let error = worst
                            .error
                            .map_or_else(|| "no number".to_owned(), |error| format!("{error:.1e}"));
                        format!("{found} {} {error} of {:.0e}", worst.name, worst.tolerance)
                    },
                )
            }
        }
    }
}

impl Report {
    /// Adds a case, or its time to what is known of it.
    pub(crate) fn add(&mut self, line: Line) {
        match self.lines.iter_mut().find(|known| known.is_of(&line)) {
            Some(known) => known.take_time(line.outcome),
            None => self.lines.push(line),
        }
    }

    /// Cases and trials that were made.
    pub fn made(&self) -> usize {
        self.lines.len() + self.trials.len()
    }

    /// Cases and trials that are wrong or failed, and runs of compute-sanitizer that found something.
    pub fn wrong(&self) -> usize {
        let cases = self.lines.iter().filter(|line| !line.is_right()).count();
        let sanitized = self.sanitizer.iter().flatten();
        let trials = self.trials.iter();
        cases
            + sanitized.filter(|one| one.found_errors).count()
            + trials
                .filter(|trial| trial.verdict == Verdict::Wrong)
                .count()
    }

    /// Writes both files, replacing those of before.
    pub(crate) fn write(&self, folder: &Path, unix_s: u64) -> Result<(), Error> {
        let files = [
            ("gpu-check.json", self.json(unix_s)?),
            ("gpu-check.md", self.markdown()),
        ];
        for (name, text) in files {
            let path = folder.join(name);
            write_atomically(&path, |file| file.write_all(text.as_bytes()))
                .map_err(|cause| Error::Write { path, cause })?;
        }
        Ok(())
    }

    /// What it came to.
    pub fn summary(&self) -> Summary {
        Summary {
            device: self.device.clone(),
            cases: self.lines.len(),
            wrong: self.wrong(),
            ceilings: self.ceilings,
            trials: self
                .trials
                .iter()
                .map(|trial| (trial.name, trial.verdict))
                .collect(),
        }
    }

    fn json(&self, unix_s: u64) -> Result<String, Error> {
        let document = json!({
            "version": 1,
            "moefold": env!("CARGO_PKG_VERSION"),
            "device": self.device,
            "command": self.command,
            "written_unix_s": unix_s,
            "clocks": { "before": self.clocks[0], "after": self.clocks[1] },
            "doctor": self.doctor,
            "ceilings": self.ceilings,
            "cases": self.lines,
            "torch": self.torch.as_ref().map(|torch| json!({
                "note": torch.note,
                "said": torch.said,
            })),
            "sanitizer": self.sanitizer.as_ref().map(|all| {
                all.iter().map(|one| &one.note).collect::<Vec<_>>()
            }),
            "trials": self.trials,
            "seed": SEED,
        });
        Ok(serde_json::to_string_pretty(&document)?)
    }

    /// What a person reads at the end of the command.
    pub fn text(&self) -> String {
        let mut text = self.head("\n");
        let correctness = self.correctness();
        if !correctness.is_empty() {
            let _ = write!(text, "\n{}", correctness.text());
        }
        let times = self.times();
        if !times.is_empty() {
            let _ = write!(text, "\n{}", times.text());
        }
        for trial in &self.trials {
            let _ = write!(text, "\n{}\n", heading(trial));
            for (title, table) in &trial.tables {
                let _ = write!(text, "\n{title}\n\n{}", table.text());
            }
            for note in &trial.notes {
                let _ = writeln!(text, "- {note}");
            }
        }
        let _ = write!(text, "\n{}\n", self.verdict());
        text
    }

    fn markdown(&self) -> String {
        let mut text = format!("# gpu-check\n\n{}", self.head("\n\n"));
        let _ = write!(text, "\n{}\n", self.verdict());
        let correctness = self.correctness();
        if !correctness.is_empty() {
            let _ = write!(
                text,
                "\n## Against the reference\n\n{}",
                correctness.markdown()
            );
        }
        let times = self.times();
        if !times.is_empty() {
            let _ = write!(
                text,
                "\n## Against the clock\n\nFloor: the larger of the bytes over the copy ceiling and, for \
                 products, the FLOPs over the dense ceiling. Gap: time over floor. PyTorch: its time over \
                 ours, so above 1 ours is faster.\n\n{}",
                times.markdown()
            );
        }
        for trial in &self.trials {
            let _ = write!(text, "\n## {}\n", heading(trial));
            for (title, table) in &trial.tables {
                let _ = write!(text, "\n{title}:\n\n{}", table.markdown());
            }
            for note in &trial.notes {
                let _ = write!(text, "\n- {note}");
            }
            text.push('\n');
        }
        text
    }

    fn head(&self, end: &str) -> String {
        let mut lines = vec![
            format!("device: {}", self.device),
            format!("command: {}", self.command),
        ];
        for (when, clocks) in ["before", "after"].iter().zip(&self.clocks) {
            if let Some(clocks) = clocks {
                lines.push(format!("nvidia-smi {when}: {clocks}"));
            }
        }
        if let Some(ceilings) = self.ceilings {
            lines.push(format!(
                "ceilings: copy {:.0} GB/s, dense product {:.1} TFLOP/s",
                ceilings.copy_bytes_per_s / 1e9,
                ceilings.dense_flops_per_s / 1e12
            ));
        }
        if let Some(torch) = &self.torch {
            lines.push(torch.note.clone());
        }
        lines.push(match find(Library::CublasLt) {
            Answer::Found(found) => format!("dense products: cuBLASLt of {}", found.path.display()),
            _ => "dense products: moefold's own, for want of cuBLASLt; so is the dense ceiling"
                .to_owned(),
        });
        let sanitized = self.sanitizer.iter().flatten();
        lines.extend(sanitized.map(|one| one.note.clone()));
        lines.push(String::new());
        lines.join(end)
    }

    fn verdict(&self) -> String {
        let counted = |count: usize, what: &str| match count {
            0 => None,
            1 => Some(format!("1 {what}")),
            count => Some(format!("{count} {what}s")),
        };
        let made = [
            counted(self.lines.len(), "case"),
            counted(self.trials.len(), "trial"),
        ];
        let made = made.into_iter().flatten().collect::<Vec<_>>();
        let made = made.join(" and ");
        match self.wrong() {
            0 => format!("{made}, all right"),
            wrong => format!("{made}, {wrong} WRONG or failed"),
        }
    }

    /// One row a case.
    fn correctness(&self) -> Table {
        let mut table = Table::new(["case", "sizes", "dtype", "worst output"]);
        for line in &self.lines {
            table.row([
                line.case.clone(),
                line.sizes.clone(),
                line.dtype.to_string(),
                line.verdict(),
            ]);
        }
        table
    }

    /// One row a case that was timed.
    fn times(&self) -> Table {
        let mut table = Table::new([
            "case",
            "sizes",
            ">us",
            ">spread",
            ">TFLOP/s",
            ">GB/s",
            ">floor us",
            ">gap",
            ">PyTorch",
        ]);
        for line in &self.lines {
            let Some(time) = line.time() else { continue };
            let [fast, slow] = time.quartiles_s;
            let floor = self.ceilings.map(|ceilings| line.floor_s(ceilings));
            let peer = self.peer(line).map(|peer| peer / time.median_s);
            let number = |value: Option<f64>, digits: usize| {
                value.map_or_else(String::new, |value| format!("{value:.digits$}"))
            };
            table.row([
                line.case.clone(),
                line.sizes.clone(),
                format!("{:.1}", time.median_s * 1e6),
                format::percent((slow - fast) / time.median_s),
                number(line.matrix.then(|| line.flops / time.median_s / 1e12), 1),
                format!("{:.0}", line.bytes / time.median_s / 1e9),
                number(floor.map(|floor| floor * 1e6), 1),
                number(floor.map(|floor| time.median_s / floor), 2),
                number(peer, 2),
            ]);
        }
        table
    }

    fn peer(&self, line: &Line) -> Option<f64> {
        let torch = self.torch.as_ref()?;
        let same = |peer: &&PeerTime| peer.sizes == line.sizes && peer.case == line.case;
        Some(torch.times.iter().find(same)?.median_s)
    }
}
