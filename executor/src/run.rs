//! [`RunDir`]: the folder a training run leaves behind, and the summary of what it measured.
//!
//! The folder is held before the first step ([`Claim`]), and what the run writes is tried. `plan.json` and `env.json`
//! are written with the first step, so that a run that is refused leaves
//! nothing in the way of the next try; `steps.jsonl` grows a line a step and can be followed, and so does
//! what TensorBoard reads ([`Events`]). Lines that cannot be written are kept, and tried again after the next step.
//! `trace.json` and `summary.json` come at the end. A folder without a summary is a run that did not
//! finish. Checkpoints, where they are asked for, lie in a folder of their own
//! ([`crate::checkpoint`]). The types of the files are in [`moefold_profiles::run`], and reading
//! them is the reports' business.

mod events;
mod log;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use moefold_kernels::Device;
use moefold_planner::plan::Plan;
use moefold_profiles::run::{RUN_VERSION, RankPeak, RunSummary, StepRecord};
use moefold_profiles::statistics::{median, nearest_half};
use moefold_profiles::trace::{Category, Lane, TimeByCategory, Trace};
use moefold_profiles::units::{Bytes, Seconds};
use moefold_profiles::{ByClass, Profile, TensorClass};

use crate::checkpoint;
use crate::claim::{Claim, PROBE};
use crate::environment::{Environment, resident_peak};
use crate::error::Error;
use crate::files::{check_new, write_json};
use crate::record::{Busy, StepTime};

pub use events::Events;

use log::Log;

/// Bytes that are tried beside what is written with the first step: steps and their events for some time.
const MARGIN: u64 = 16 << 10;

const STEPS_FILE: &str = "steps.jsonl";
const SUMMARY_FILE: &str = "summary.json";

/// A run directory being written.
#[derive(Debug)]
pub struct RunDir {
    claim: Claim,
    plan: Plan,
    environment: Environment,
    /// Whether what precedes the steps is there.
    is_begun: bool,
    steps: Log,
    events: Events,
}

impl RunDir {
    /// Holds a directory for a run.
    pub fn claim(dir: &Path) -> Result<Claim, Error> {
        let what = "a run is written";
        if is_of_run(dir) && !Claim::is_held(dir) {
            return Err(Error::Request(format!(
                "{}: is not empty, it holds a run; {what} to a new or empty directory: choose another, or go on with that run by \
                 `execute --continue`",
                dir.display()
            )));
        }
        Claim::new(dir, what)
    }

    /// Holds the directory of a run that has ended, for that run to go on in, or one that is new or empty.
    pub fn claim_again(dir: &Path) -> Result<Claim, Error> {
        if check_new(dir, "a run is written").is_err() && !is_of_run(dir) {
            return Err(Error::Request(format!(
                "{}: is no directory of a run, which has {STEPS_FILE} or checkpoints; a run goes on in its own, or \
                 begins in one that is new or empty: choose another",
                dir.display()
            )));
        }
        Claim::again(dir, "a run goes on")
    }

    /// The file in `dir` of a plan for so many `ranks` that were left of a run.
    pub fn plan_of(dir: &Path, ranks: u32) -> PathBuf {
        dir.join(format!("plan-{ranks}-ranks.json"))
    }

    /// Begins a run in a directory that is held, and sees that it can be written to.
    ///
    /// In one that is [held again](Self::claim_again) the run goes on with the step after the checkpoint that
    /// `environment` names, else with the first. What is there of that step and later ones goes with the first step
    /// that is written, and so does the summary. Until then nothing is changed.
    pub fn create(claim: Claim, plan: &Plan, environment: &Environment) -> Result<Self, Error> {
        let path = claim.path();
        let steps = path.join(STEPS_FILE);
        let (steps, events) = if claim.is_again() {
            let first = environment.resumed.as_ref().map_or(0, |from| from.step);
            let (kept, next) = kept_steps(&steps, first).map_err(Error::io(&steps, "read"))?;
            // Where steps are missing, which no reader takes for a run, what is there stays apart.
            let log = if next.is_some_and(|next| next != first) {
                Log::beside(steps, apart(path, first))
            } else {
                Log::after(steps, kept)
            };
            (log, Events::after(path, first)?)
        } else {
            (Log::new(steps), Events::of(path))
        };
        let run = Self {
            plan: plan.clone(),
            environment: environment.clone(),
            is_begun: false,
            steps,
            events,
            claim,
        };
        let length = |json: serde_json::Result<Vec<u8>>| json.map_or(0, |json| json.len() as u64);
        let first = length(serde_json::to_vec_pretty(plan))
            + length(serde_json::to_vec_pretty(environment));
        run.claim.probe(first + MARGIN)?;
        Ok(run)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.claim.path()
    }

    /// Refuses to go on in a directory that was removed or renamed.
    pub fn check(&self) -> Result<(), Error> {
        self.claim.check()
    }

    /// Adds a step that ended at a time in seconds since 1970. It is in the files when this returns without an error.
    /// With one it is kept, and the next step tries again; after [`Error::Lost`] there is nothing to try.
    pub fn step(&mut self, record: &StepRecord, time_s: f64) -> Result<(), Error> {
        self.claim.check()?;
        let mut line = serde_json::to_vec(record)
            .map_err(|error| Error::malformed(self.path(), error.to_string()))?;
        line.push(b'\n');
        self.steps.add(&line);
        // First the file that one run alone can make, and by which its directory is known.
        let steps = self.steps.flush();
        let begun = self.begin();
        let events = self.events.step(record, time_s);
        // The one after which there is nothing to try comes first.
        let failed = [begun, steps, events].into_iter().filter_map(Result::err);
        let mut failed: Vec<Error> = failed.collect();
        failed.sort_by_key(|error| !matches!(error, Error::Lost { .. }));
        failed.into_iter().next().map_or(Ok(()), Err)
    }

    /// Writes what precedes the steps.
    fn begin(&mut self) -> Result<(), Error> {
        if !self.is_begun {
            if self.claim.is_again() {
                let path = self.path().join(SUMMARY_FILE);
                match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(Error::io(&path, "remove")(error));
                    }
                    _ => {}
                }
            }
            write_json(&self.path().join("plan.json"), &self.plan)?;
            write_json(&self.path().join("env.json"), &self.environment)?;
            self.is_begun = true;
        }
        Ok(())
    }

    /// Ends the run: writes all that can be written, and fails with the first that cannot.
    pub fn finish(
        mut self,
        trace: &Trace,
        profile: &Profile,
        summary: &RunSummary,
    ) -> Result<(), Error> {
        self.claim.check()?;
        let begun = self.begin();
        let steps = self.flush();
        let dir = self.path();
        // A run that took no step measured nothing.
        let profile = if profile.samples.is_empty() {
            Ok(())
        } else {
            profile.save(dir).map_err(Error::from)
        };
        let trace = write_json(&dir.join("trace.json"), &trace.chrome());
        begun.and(steps).and(profile).and(trace)?;
        // The last, as it says that the run is whole.
        write_json(&dir.join(SUMMARY_FILE), summary)
    }

    /// Writes the steps that could not be written before.
    pub fn flush(&mut self) -> Result<(), Error> {
        let (steps, events) = (self.steps.flush(), self.events.flush());
        steps.and(events)
    }
}

/// Whether a run has begun in `dir`, however early it ended.
fn is_of_run(dir: &Path) -> bool {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .any(|name| {
            let planned = name
                .strip_prefix("plan-")
                .is_some_and(|rest| rest.ends_with("-ranks.json"));
            planned || [STEPS_FILE, checkpoint::FOLDER, PROBE].contains(&name.as_str())
        })
}

/// Where steps before `first` go that are no part of a run that goes on with it; nothing is there yet.
fn apart(dir: &Path, first: u64) -> PathBuf {
    let numbered = (2..).map(|number| format!("-{number}"));
    std::iter::once(String::new())
        .chain(numbered)
        .map(|number| dir.join(format!("{STEPS_FILE}.before-{first}{number}")))
        .find(|path| !path.exists())
        .expect("there is always another number")
}

/// Bytes of the leading whole lines of steps before `first` that follow one another, and the step after them; none
/// where there is no file.
fn kept_steps(path: &Path, first: u64) -> io::Result<(u64, Option<u64>)> {
    #[derive(serde::Deserialize)]
    struct Numbered {
        step: u64,
    }
    let mut file = match File::open(path) {
        Ok(file) => BufReader::new(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, None)),
        Err(error) => return Err(error),
    };
    let (mut kept, mut next) = (0, None);
    loop {
        let mut line = Vec::new();
        file.read_until(b'\n', &mut line)?;
        let whole = line.strip_suffix(b"\n");
        match whole.and_then(|line| serde_json::from_slice::<Numbered>(line).ok()) {
            Some(Numbered { step }) if step < first && next.is_none_or(|next| next == step) => {
                kept += line.len() as u64;
                next = Some(step + 1);
            }
            _ => return Ok((kept, next)),
        }
    }
}

/// The peak of a rank, from its device's account, and what is taken of the device beside tensors:
/// ranks that share a GPU share that, and each tells all of it. `settled` is how often the device had
/// taken memory after the first step.
pub fn rank_peak(rank: u32, pp_rank: u32, device: &Device, settled: u64) -> RankPeak {
    let memory = device.memory();
    let mut bytes = ByClass::from_fn(|class| memory.at_peak(class));
    bytes[TensorClass::Overhead] = device.overhead().map_or(Bytes::ZERO, |overhead| {
        overhead.context + overhead.workspaces + overhead.other
    });
    RankPeak {
        rank,
        pp_rank,
        reserved: device.reserved(),
        reached: device.extent(),
        growths: device.allocations() - settled,
        resident: resident_peak().unwrap_or(Bytes::ZERO),
        host_bytes: Some(memory.peak_on_host()).filter(|bytes| *bytes > Bytes::ZERO),
        bytes,
    }
}

/// Ranks whose mean says where a step's time went: of all such sets the one that works most, and so waits least.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// Each by itself: of devices with a clock of their own.
    Rank,
    /// Those of a pipeline rank, as at a collective one waits for what another still does. So waiting is priced, too.
    Stage,
    /// All that are asked for: they share too few cores.
    All,
}

impl Counted {
    /// Those of devices that have a queue of work or not, and stretch the time of a rank by so much.
    pub fn of(queued: bool, stretch: f64) -> Self {
        if queued {
            Self::Rank
        } else if stretch > 1.0 {
            Self::All
        } else {
            Self::Stage
        }
    }
}

/// Summarizes a run.
///
/// `times` and `peak_by_rank` are by rank, the former then by step. Categories and busy times are the mean of the ranks
/// that `counted` names together, over the half of the recorded steps after warm-up whose length is nearest to the
/// median: where time went in a step that something held up says little of the others. They are scaled from their mean
/// to the median step, which `step_s` is. Of several pipeline ranks they are of the one that is asked for, if any: that of which a plan says
/// the same.
/// A run no longer than its warm-up is summarized whole.
pub fn summarize(
    records: &[StepRecord],
    times: &[Vec<StepTime>],
    peak_by_rank: Vec<RankPeak>,
    warmup_steps: u64,
    (counted, of): (Counted, Option<u32>),
) -> RunSummary {
    let steps = records.len();
    assert!(
        times.iter().all(|rank| rank.len() == steps),
        "one time a step and rank"
    );
    let skipped = if (warmup_steps as usize) < steps {
        warmup_steps as usize
    } else {
        0
    };
    let measured = &records[skipped..];
    let step_s = median(measured.iter().map(|r| r.step_s).collect()).unwrap_or(0.0);
    let tokens = measured
        .first()
        .map_or(0.0, |r| (r.tokens_per_s * r.step_s).round());
    let is_recorded =
        |rank: &Vec<StepTime>, step: usize| rank[step].time != TimeByCategory::default();
    let recorded =
        (skipped..steps).filter(|&step| times.iter().all(|rank| is_recorded(rank, step)));
    let lengths = recorded.map(|step| (step, records[step].step_s));
    let usual = nearest_half(lengths.collect(), step_s);
    let mut together: BTreeMap<u32, Vec<&StepTime>> = BTreeMap::new();
    let is_asked = |peak: &RankPeak| of == Some(peak.pp_rank);
    let is_any = !peak_by_rank.iter().any(is_asked);
    let each = times.iter().zip(&peak_by_rank);
    for (rank, peak) in each.filter(|(_, peak)| is_any || is_asked(peak)) {
        let group = match counted {
            Counted::Rank => peak.rank,
            Counted::Stage => peak.pp_rank,
            Counted::All => 0,
        };
        let usual = usual.iter().map(|&step| &rank[step]);
        together.entry(group).or_default().extend(usual);
    }
    let means = together.into_values().map(mean_time);
    let busiest = means.max_by(|a, b| f64::total_cmp(&work(a), &work(b)));
    let told = within(busiest.unwrap_or_default());
    let scale = match told.step.0 {
        0.0 => 0.0,
        mean => step_s / mean,
    };
    let busy = |of: &dyn Fn(&Busy) -> f64| {
        let named = |(&(_, name), busy): (&(Lane, &str), &Busy)| (name.to_owned(), of(busy));
        told.busy.iter().map(named).collect()
    };
    RunSummary {
        version: RUN_VERSION,
        steps: steps as u64,
        warmup_steps: skipped as u64,
        step_s,
        tokens_per_s: if step_s > 0.0 { tokens / step_s } else { 0.0 },
        time_s: told.time.scaled(scale),
        hidden_s: seconds_of(&told.hidden.scaled(scale)),
        busy_s: busy(&|busy| busy.seconds * scale),
        calls: busy(&|busy| busy.calls),
        host_reads: told
            .host_reads
            .iter()
            .map(|(&name, &reads)| (name.to_owned(), reads))
            .collect(),
        peak_by_rank,
        final_loss: records.last().map_or(f64::NAN, |r| r.loss),
        validation: records.iter().rev().find_map(|r| r.validation),
        host: None,
    }
}

/// Time spent on anything but exchanging with other ranks.
fn work(time: &StepTime) -> f64 {
    let between = Category::ALL.into_iter().filter(|c| c.is_between_ranks());
    time.time.total().0 - between.map(|c| time.time.get(c).0).sum::<f64>()
}

/// The mean of steps.
fn mean_time<'a>(steps: impl IntoIterator<Item = &'a StepTime>) -> StepTime {
    let mut mean = StepTime::default();
    let mut count = 0.0;
    for step in steps {
        count += 1.0;
        for category in Category::ALL {
            mean.time.add(category, step.time.get(category));
            mean.hidden.add(category, step.hidden.get(category));
        }
        for (&key, busy) in &step.busy {
            let sum = mean.busy.entry(key).or_default();
            sum.calls += busy.calls;
            sum.seconds += busy.seconds;
        }
        for (&name, reads) in &step.host_reads {
            *mean.host_reads.entry(name).or_default() += reads;
        }
    }
    let share = 1.0 / f64::max(count, 1.0);
    mean.time = mean.time.scaled(share);
    mean.hidden = mean.hidden.scaled(share);
    mean.step = mean.time.total();
    for busy in mean.busy.values_mut() {
        busy.calls *= share;
        busy.seconds *= share;
    }
    mean.host_reads
        .values_mut()
        .for_each(|reads| *reads *= share);
    mean
}

/// The mean of ranks on shared cores, of which threads may have run a little longer than there were cores for, as a
/// system counts their time and a run its steps by other clocks: what they ran is then all of the step.
fn within(mut mean: StepTime) -> StepTime {
    let idle = [Category::Waiting, Category::Bubble];
    let waited = idle.map(|category| mean.time.get(category).0);
    let waited = waited[0] + waited[1];
    if waited >= 0.0 {
        // Of what little is over, one may be less than nothing: the other has it all.
        if idle.iter().any(|&category| mean.time.get(category).0 < 0.0) {
            let [larger, smaller] = if mean.time.get(idle[0]) > mean.time.get(idle[1]) {
                idle
            } else {
                [idle[1], idle[0]]
            };
            mean.time.add(larger, mean.time.get(smaller));
            mean.time.add(smaller, Seconds(-mean.time.get(smaller).0));
        }
        return mean;
    }
    let share = mean.step.0 / (mean.step.0 - waited);
    let ran = std::mem::take(&mut mean.time);
    for category in Category::ALL
        .into_iter()
        .filter(|category| !idle.contains(category))
    {
        mean.time
            .add(category, Seconds(share * ran.get(category).0));
    }
    for busy in mean.busy.values_mut() {
        busy.seconds *= share;
    }
    mean
}

/// The categories that took any time, by name.
fn seconds_of(time: &TimeByCategory) -> BTreeMap<Category, f64> {
    let all = Category::ALL.map(|category| (category, time.get(category).0));
    all.into_iter().filter(|&(_, s)| s > 0.0).collect()
}

#[cfg(test)]
mod tests {
    use moefold_profiles::directory::{Key, Sample, Taken};
    use moefold_profiles::host::HostCost;

    use super::*;
    use crate::device::DeviceSpec;

    const CPU: DeviceSpec = DeviceSpec::Cpu {
        threads_per_rank: Some(1),
    };

    #[test]
    fn steps_that_stay_apart_take_nothing_s_place() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for name in ["before-4", "before-4-2", "before-4-3"] {
            let path = apart(dir.path(), 4);
            assert_eq!(path, dir.path().join(format!("steps.jsonl.{name}")));
            fs::write(path, "steps").expect("writes");
        }
    }

    fn record(step: u64, step_s: f64) -> StepRecord {
        StepRecord {
            step,
            loss: 5.0 - step as f64,
            mtp_losses: Vec::new(),
            aux_loss: 0.0,
            z_loss: 0.0,
            grad_norm: 1.0,
            lr: 1e-3,
            step_s,
            tokens_per_s: 512.0 / step_s,
            peak_bytes: Bytes(1024),
            expert_load: vec![vec![1, 2]],
            correction_bias: None,
            fullest: None,
            dropped: 0,
            dropped_by_layer: Vec::new(),
            validation: None,
        }
    }

    fn busy(seconds: f64) -> Busy {
        Busy {
            calls: 2.0,
            seconds,
        }
    }

    fn time(attention: f64, wait: f64) -> StepTime {
        let mut time = TimeByCategory::default();
        time.add(Category::Attention, Seconds(attention));
        time.add(Category::EpComm, Seconds(wait));
        let mut hidden = TimeByCategory::default();
        hidden.add(Category::EpComm, Seconds(attention / 2.0));
        StepTime {
            step: Seconds(attention + wait),
            time,
            hidden,
            busy: BTreeMap::from([
                ((Lane::Compute, "gemm"), busy(attention)),
                ((Lane::Communication, "all_to_all"), busy(wait)),
            ]),
            host_reads: BTreeMap::from([("counts_to_host", 3.0)]),
            keys: BTreeMap::new(),
        }
    }

    /// Peaks of ranks of these pipeline ranks.
    fn peaks(pp_ranks: &[u32]) -> Vec<RankPeak> {
        let peak = |(rank, &pp_rank)| RankPeak {
            rank,
            pp_rank,
            reserved: Bytes(0),
            reached: Bytes(0),
            growths: 0,
            resident: Bytes(0),
            host_bytes: None,
            bytes: ByClass::default(),
        };
        (0..).zip(pp_ranks).map(peak).collect()
    }

    #[test]
    fn golden_a_summary_leaves_out_warm_up_and_takes_the_busiest_rank() {
        let records = [
            record(0, 9.0),
            record(1, 1.0),
            record(2, 4.0),
            record(3, 1.0),
        ];
        let idle = vec![time(0.25, 0.75); 4];
        let busy = vec![
            time(5.0, 4.0),
            time(0.5, 0.5),
            time(3.5, 0.5),
            time(0.5, 0.5),
        ];
        let summary = summarize(
            &records,
            &[idle, busy],
            peaks(&[0, 0]),
            1,
            (Counted::Rank, None),
        );
        assert_eq!((summary.steps, summary.warmup_steps), (4, 1));
        assert_eq!(summary.step_s, 1.0);
        assert_eq!(summary.tokens_per_s, 512.0);
        assert_eq!(summary.final_loss, 2.0);
        // A mean step of 2 s, 1.5 s of it attention, scaled to the median of 1 s.
        assert!((summary.time_s.get(Category::Attention).0 - 0.75).abs() < 1e-12);
        assert_eq!(summary.hidden_s.len(), 1);
        assert!((summary.hidden_s[&Category::EpComm] - 0.375).abs() < 1e-12);
        assert!((summary.time_s.total().0 - summary.step_s).abs() < 1e-12);
        assert!((summary.busy_s["all_to_all"] - 0.25).abs() < 1e-12);
        assert_eq!(summary.calls["all_to_all"], 2.0);
        assert!((summary.host_reads["counts_to_host"] - 3.0).abs() < 1e-12);
        // Shorter than its warm-up: everything counts.
        let one = [vec![time(5.0, 4.0)]];
        let short = summarize(&records[..1], &one, peaks(&[0]), 3, (Counted::Rank, None));
        assert_eq!((short.warmup_steps, short.step_s), (0, 9.0));
        let none = summarize(&[], &[], Vec::new(), 3, (Counted::Rank, None));
        assert!(none.final_loss.is_nan());
    }

    #[test]
    fn golden_steps_of_which_only_the_whole_is_known_count_for_the_median_alone() {
        let records = [1.0, 2.0, 3.0].map(|step_s| record(0, step_s));
        let whole = StepTime {
            step: Seconds(2.0),
            ..StepTime::default()
        };
        let times = vec![time(0.5, 0.5), whole, time(1.5, 1.5)];
        let summary = summarize(&records, &[times], peaks(&[0]), 0, (Counted::Stage, None));
        assert_eq!(summary.step_s, 2.0);
        assert!((summary.time_s.get(Category::Attention).0 - 1.0).abs() < 1e-12);
    }

    #[test]
    fn golden_where_time_goes_is_told_of_steps_near_the_median() {
        // Two of eight steps waited long, as something held them up, and two were short.
        let lengths = [1.0, 9.0, 1.0, 0.5, 1.0, 1.0, 9.0, 0.5];
        let records: Vec<StepRecord> = (0..).zip(lengths).map(|(i, s)| record(i, s)).collect();
        let times = lengths.map(|step_s| time(0.5, step_s - 0.5)).to_vec();
        let summary = summarize(&records, &[times], peaks(&[0]), 0, (Counted::Stage, None));
        assert_eq!(summary.step_s, 1.0);
        assert!((summary.time_s.get(Category::Attention).0 - 0.5).abs() < 1e-12);
        assert!((summary.busy_s["all_to_all"] - 0.5).abs() < 1e-12);
    }

    #[test]
    fn golden_of_ranks_that_share_cores_the_mean_is_told() {
        // One had to wait, of the other more ran than there was time for.
        let waiting = |waited: f64| {
            let mut time = time(0.5 - waited, 0.5);
            time.time.add(Category::Waiting, Seconds(waited));
            vec![time]
        };
        let ranks = [waiting(0.375), waiting(-0.125)];
        let summary = summarize(
            &[record(0, 1.0)],
            &ranks,
            peaks(&[0, 0]),
            0,
            (Counted::All, None),
        );
        assert!((summary.time_s.get(Category::Waiting).0 - 0.125).abs() < 1e-12);
        assert!((summary.time_s.get(Category::Attention).0 - 0.375).abs() < 1e-12);
        assert!((summary.time_s.total().0 - summary.step_s).abs() < 1e-12);
    }

    /// Two of four ranks are of the pipeline rank that works most; what one of them waits is what the other does meanwhile.
    #[test]
    fn golden_of_a_stage_the_mean_of_its_ranks_is_told() {
        let rank = |worked: f64, waited: f64| {
            let mut time = time(worked, 0.0);
            time.time.add(Category::Waiting, Seconds(waited));
            time.time
                .add(Category::Bubble, Seconds(1.0 - worked - waited));
            vec![time]
        };
        let ranks = [
            rank(0.5, 0.0),
            rank(0.875, 0.0),
            rank(0.5, 0.25),
            rank(0.375, 0.5),
        ];
        let of = |counted| {
            let summary = summarize(
                &[record(0, 1.0)],
                &ranks,
                peaks(&[0, 0, 1, 1]),
                0,
                (counted, None),
            );
            [Category::Attention, Category::Waiting, Category::Bubble]
                .map(|c| summary.time_s.get(c).0)
        };
        assert_eq!(of(Counted::Stage), [0.6875, 0.0, 0.3125]);
        let asked = |counted, pp_rank| {
            let counted = (counted, Some(pp_rank));
            let summary = summarize(&[record(0, 1.0)], &ranks, peaks(&[0, 0, 1, 1]), 0, counted);
            summary.time_s.get(Category::Attention).0
        };
        let of_each = |counted| [0, 1].map(|pp_rank| asked(counted, pp_rank));
        assert_eq!(of_each(Counted::Stage), [0.6875, 0.4375]);
        assert_eq!(of_each(Counted::All), [0.6875, 0.4375]);
        assert_eq!(asked(Counted::Stage, 2), 0.6875);
        assert_eq!(of(Counted::All), [0.5625, 0.1875, 0.25]);
        assert_eq!(of(Counted::Rank), [0.875, 0.0, 0.125]);
    }

    #[test]
    fn golden_what_ran_is_no_more_than_the_step() {
        // Of two ranks on shared cores 1.25 s ran in a second.
        let mut over = time(0.75, 0.5);
        over.step = Seconds(1.0);
        over.time.add(Category::Waiting, Seconds(-0.25));
        let ranks = [vec![over.clone()], vec![over]];
        let summary = summarize(
            &[record(0, 1.0)],
            &ranks,
            peaks(&[0, 0]),
            0,
            (Counted::All, None),
        );
        assert_eq!(summary.time_s.get(Category::Waiting).0, 0.0);
        assert!((summary.time_s.get(Category::Attention).0 - 0.6).abs() < 1e-12);
        assert!((summary.busy_s["all_to_all"] - 0.8 * 0.5).abs() < 1e-12);
        assert!((summary.time_s.total().0 - summary.step_s).abs() < 1e-12);
    }

    #[test]
    fn a_directory_in_use_is_refused() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("steps.jsonl"), "").expect("writes");
        let refused = RunDir::claim(folder.path()).expect_err("in use");
        assert!(refused.to_string().contains("is not empty"), "{refused}");
        assert!(refused.is_bad_request());
    }

    #[test]
    fn a_run_writes_its_files_and_each_step_at_once() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = folder.path().join("runs/first");
        let plan = crate::testing::plan();
        let environment = Environment::detect(1, &CPU);
        let claim = RunDir::claim(&dir).expect("is new");
        let mut run = RunDir::create(claim, &plan, &environment).expect("begins");
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).expect("is there");
        let names = || std::fs::read_dir(&dir).expect("is there").count();
        assert_eq!(names(), 0, "nothing before the first step");
        for step in 0..2 {
            run.step(&record(step, 1.0), step as f64).expect("writes");
            assert_eq!(read("steps.jsonl").lines().count() as u64, step + 1);
        }
        assert!(!dir.join("summary.json").exists());
        let trace = Trace {
            origin: moefold_profiles::trace::Origin::Measured,
            spans: Vec::new(),
        };
        let records = [record(0, 1.0), record(1, 1.0)];
        let times = [vec![time(0.5, 0.5); 2]];
        let summary = summarize(&records, &times, peaks(&[0]), 0, (Counted::Rank, None));
        let launch = Key::Host(HostCost::Launch);
        let profile = Profile::of("cpu", vec![Sample::of(launch, Taken::Training, vec![1e-6])]);
        run.finish(&trace, &profile, &summary).expect("ends");
        assert_eq!(Profile::load(&dir).expect("a run is a profile"), profile);
        let last: StepRecord =
            serde_json::from_str(read("steps.jsonl").lines().last().expect("two lines"))
                .expect("parses");
        assert_eq!(last, records[1]);
        assert_eq!(
            serde_json::from_str::<RunSummary>(&read("summary.json")).expect("parses"),
            summary
        );
        assert_eq!(
            serde_json::from_str::<Plan>(&read("plan.json")).expect("parses"),
            plan
        );
        assert!(read("trace.json").contains("traceEvents"));
        assert!(read("env.json").contains("\"cores\""));
        assert_eq!(
            std::fs::read_dir(&dir).expect("is there").count(),
            7,
            "nothing temporary"
        );
    }
}
