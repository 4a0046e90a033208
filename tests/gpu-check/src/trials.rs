//! Trials: whole runs on the GPU, by the program's own commands, and what their files say.
//!
//! Each command is a process of its own with a deadline and a log, and works in a folder of its own
//! under `--out`, which stays: plans, runs, profiles and reports are there to be looked at.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use moefold_profiles::presets;
use moefold_profiles::run::{RunSummary, StepRecord};
use moefold_reports::tables::Table;
use serde::Serialize;
use serde_json::Value;

use crate::deadline::wait_at_most;
use crate::{Error, Options};

mod losses;
mod resume;
mod speed;

/// The trials, in order.
pub(crate) const NAMES: [&str; 5] = ["curve", "layouts", "profile", "models", "resume"];

/// What a trial came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// What was to be equal is.
    Right,
    /// It is not, or a command failed.
    Wrong,
    /// There was nothing to judge.
    Seen,
}

/// A trial that was made.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Trial {
    pub(crate) name: &'static str,
    pub(crate) verdict: Verdict,
    pub(crate) seconds: f64,
    /// Sentences: what went wrong, what was left out and why.
    pub(crate) notes: Vec<String>,
    /// Figures as a person reads them.
    #[serde(skip)]
    pub(crate) tables: Vec<(String, Table)>,
    /// The same and more, for programs.
    pub(crate) data: Value,
}

impl Trial {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            verdict: Verdict::Seen,
            seconds: 0.0,
            notes: Vec::new(),
            tables: Vec::new(),
            data: Value::Null,
        }
    }

    /// Judges one thing: wrong once is wrong.
    fn judge(&mut self, right: bool) {
        self.verdict = match (self.verdict, right) {
            (Verdict::Wrong, _) | (_, false) => Verdict::Wrong,
            (_, true) => Verdict::Right,
        };
    }

    /// Judges a command that failed.
    fn failed(&mut self, why: String) {
        self.judge(false);
        self.notes.push(why);
    }
}

/// Makes the trial of this name.
pub(crate) fn make(
    name: &'static str,
    options: &Options,
    gpu: Option<&str>,
) -> Result<Trial, Error> {
    let began = Instant::now();
    let bench = Bench::new(name, options, gpu)?;
    let mut trial = Trial::new(name);
    match name {
        "curve" => losses::curve(&bench, &mut trial),
        "layouts" => losses::layouts(&bench, &mut trial)?,
        "profile" => speed::profile(&bench, &mut trial),
        "models" => speed::models(&bench, &mut trial)?,
        _ => resume::resume(&bench, &mut trial),
    }
    trial.seconds = began.elapsed().as_secs_f64();
    Ok(trial)
}

/// Where a trial works and on what.
struct Bench<'a> {
    options: &'a Options,
    folder: PathBuf,
    /// The cluster preset of the GPU, or the CPU's in a rehearsal.
    cluster: String,
}

impl<'a> Bench<'a> {
    fn new(name: &str, options: &'a Options, gpu: Option<&str>) -> Result<Self, Error> {
        let folder = options.out.join(name);
        // What an earlier check left there would stand in the way of its runs.
        let emptied = match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            emptied => emptied,
        };
        emptied
            .and_then(|()| fs::create_dir_all(&folder))
            .map_err(Error::of_trial(&folder))?;
        let cluster = match gpu {
            None => Ok("local".to_owned()),
            Some(gpu) => cluster_of(gpu, &folder),
        }
        .map_err(Error::of_trial(&folder))?;
        Ok(Self {
            options,
            folder,
            cluster,
        })
    }

    /// `--device` of the commands.
    fn device(&self) -> &'static str {
        if self.options.rehearse { "cpu" } else { "cuda" }
    }

    /// The text that small models are trained on.
    fn text(&self) -> Result<String, String> {
        let path = self.folder.join("text.txt");
        if !path.exists() {
            fs::write(&path, self.options.text)
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(path.display().to_string())
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// Runs a command of the program, its output in `NAME.log`; the last line of what it complained
    /// of where it failed or took too long.
    fn moefold(&self, name: &str, arguments: &[&str], deadline: Duration) -> Result<(), String> {
        let mut command = Command::new(&self.options.program);
        command.args(arguments);
        if !self.options.rehearse {
            // The commands take the first GPU they see.
            command.env("CUDA_VISIBLE_DEVICES", self.options.device.to_string());
        }
        self.logged(name, command, deadline).map(|_| ())
    }

    /// Runs a program; what it printed is in `NAME.log` and returned.
    fn logged(
        &self,
        name: &str,
        mut command: Command,
        deadline: Duration,
    ) -> Result<String, String> {
        let complaints = self.folder.join(format!("{name}.stderr"));
        let file = File::create(&complaints).map_err(|error| error.to_string())?;
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn();
        let ended = child.and_then(|child| wait_at_most(child, deadline));
        // Of a program that was killed there is what it complained of.
        let said = ended.as_ref().map_or_else(
            |_| String::new(),
            |ended| String::from_utf8_lossy(&ended.stdout).into_owned(),
        );
        let complained = fs::read_to_string(&complaints).unwrap_or_default();
        let log = format!("{said}{complained}");
        // The log is for a person; a full disk shows elsewhere.
        let _ = fs::write(self.folder.join(format!("{name}.log")), log);
        let _ = fs::remove_file(&complaints);
        let ended = ended.map_err(|error| format!("{name}: {error}"))?;
        if ended.status.success() {
            return Ok(said);
        }
        let last = complained.lines().last().unwrap_or("it said nothing");
        Err(format!("{name}: {}: {last}", ended.status))
    }

    fn steps(&self, run: &str) -> Result<Vec<StepRecord>, String> {
        let path = self.folder.join(run).join("steps.jsonl");
        let text = read(&path)?;
        let line = |line: &str| serde_json::from_str(line).map_err(|error| error.to_string());
        text.lines().map(line).collect()
    }

    fn summary(&self, run: &str) -> Result<RunSummary, String> {
        let path = self.folder.join(run).join("summary.json");
        serde_json::from_str(&read(&path)?).map_err(|error| format!("{}: {error}", path.display()))
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The first cluster preset made of a GPU; for a GPU that none is made of, a file that says what an
/// H100 is under its name, so that its profile applies.
fn cluster_of(vendor_name: &str, folder: &Path) -> std::io::Result<String> {
    let gpu = presets::gpu_name(vendor_name);
    let known = presets::cluster_names()
        .into_iter()
        .find(|name| presets::cluster(name).is_ok_and(|cluster| cluster.gpu.name == gpu));
    if let Some(known) = known {
        return Ok(known.to_owned());
    }
    let path = folder.join("cluster.toml");
    let text =
        format!("version = 1\nbase = \"dgx-h100\"\n[gpu]\nbase = \"h100\"\nname = \"{gpu}\"\n");
    fs::write(&path, text)?;
    Ok(path.display().to_string())
}

/// Seconds that are plenty for a command that takes some.
fn minutes(count: u64) -> Duration {
    Duration::from_mins(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_planned_for_under_its_own_name() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for (vendor, name) in [("NVIDIA H200", "h200"), ("NVIDIA L40S", "nvidia-l40s")] {
            let cluster = cluster_of(vendor, folder.path()).expect("written");
            let cluster = presets::resolve(&cluster).expect("a cluster");
            assert_eq!(cluster.gpu.name, name);
        }
    }
}
