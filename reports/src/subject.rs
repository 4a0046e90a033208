//! [`Subject`]: one layout to be compared, predicted and perhaps measured; [`Comparison`]: all of
//! them, with names that tell them apart.
//!
//! Names are settled here, once, so that every plot, table and sentence calls a subject the same.

use std::collections::BTreeMap;
use std::path::Path;

use moefold_planner::answer::{Candidate, SearchRecord, Survey};
use moefold_planner::choice::{Recompute, RecomputePlan};
use moefold_planner::model::Model;
use moefold_planner::plan::{PlannedLayout, ProfileUsed, Request};
use moefold_profiles::Cluster;
use moefold_profiles::run::{RunSummary, StepRecord};

use crate::format;
use crate::inputs::{Content, Input, Logged};

/// One layout to be compared.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Subject {
    /// Where it comes from, unique among the subjects: `run-a`, `plans #3`.
    pub(crate) name: String,
    /// Its degrees in short.
    pub(crate) layout: String,
    /// What else tells it from the others (recompute set, dispatcher, model, ...); often empty.
    pub(crate) details: String,
    /// The plan.
    pub(crate) planned: PlannedLayout,
    /// What it was planned for.
    pub(crate) setting: Setting,
    /// What it did when it ran.
    pub(crate) measured: Option<Measured>,
    /// How long its step took where another program ran it.
    pub(crate) logged: Option<Logged>,
    /// Profiles that its prices came from.
    pub(crate) profiles: Vec<ProfileUsed>,
}

/// What a plan was made for; parts are absent in a bare search answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Setting {
    /// The model.
    pub(crate) model: Option<Model>,
    /// The cluster.
    pub(crate) cluster: Option<Cluster>,
    /// The request.
    pub(crate) request: Option<Request>,
}

/// What a run left.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measured {
    /// Its steps.
    pub(crate) steps: Vec<StepRecord>,
    /// Its figures.
    pub(crate) summary: RunSummary,
    /// Its machine.
    pub(crate) env: BTreeMap<String, serde_json::Value>,
}

/// A layout that was considered, for the picture of the trade-off.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Considered {
    /// The layout in short.
    pub(crate) layout: String,
    /// What it recomputes.
    pub(crate) details: String,
    /// Peak memory, GiB.
    pub(crate) peak_gib: f64,
    /// Tokens a second on each GPU.
    pub(crate) tokens_per_s_per_gpu: f64,
    /// Profiles that its prices came from.
    pub(crate) profiles: Vec<ProfileUsed>,
}

/// All layouts of a search at a glance.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Surveyed {
    pub(crate) survey: Survey,
    /// Tokens a second on each GPU at the grid's upper edge.
    pub(crate) fastest: f64,
    /// Profiles that its prices came from.
    pub(crate) profiles: Vec<ProfileUsed>,
}

/// Everything that is compared.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Comparison {
    /// The subjects, in the order of the inputs.
    pub(crate) subjects: Vec<Subject>,
    /// Layouts that fit, subjects left out.
    pub(crate) considered: Vec<Considered>,
    /// Surveys of searches among the inputs.
    pub(crate) surveys: Vec<Surveyed>,
    /// Records of the searches among the inputs, by input name.
    pub(crate) searches: Vec<(String, SearchRecord)>,
}

/// Tokens of a step on each GPU.
fn tokens_of(planned: &PlannedLayout) -> f64 {
    planned.predicted.tokens_per_s_per_gpu * planned.predicted.step_s
}

impl Setting {
    /// Memory a rank can use, GiB.
    pub(crate) fn capacity_gib(&self) -> Option<f64> {
        self.cluster.as_ref().map(|cluster| cluster.gpu.memory_gib)
    }

    /// Whether steps of two settings can be set side by side: the same model and the same work on
    /// the same ranks. Parts that are unknown do not differ.
    fn is_comparable(&self, other: &Self) -> bool {
        self.trains_as(other)
            && agree(
                self.cluster.as_ref().map(|c| &c.name),
                other.cluster.as_ref().map(|c| &c.name),
            )
            && agree(
                self.request.as_ref().map(|r| r.gpus),
                other.request.as_ref().map(|r| r.gpus),
            )
    }

    /// Whether losses of two settings can be set side by side: the same model and batch, on whatever ranks.
    pub(crate) fn trains_as(&self, other: &Self) -> bool {
        agree(
            self.model.as_ref().map(|m| &m.name),
            other.model.as_ref().map(|m| &m.name),
        ) && agree(
            self.request.as_ref().map(|r| r.batch),
            other.request.as_ref().map(|r| r.batch),
        )
    }
}

fn agree<T: PartialEq>(a: Option<T>, b: Option<T>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a == b,
        _ => true,
    }
}

impl Subject {
    /// Degrees and details.
    pub(crate) fn described(&self) -> String {
        if self.details.is_empty() {
            self.layout.clone()
        } else {
            format!("{}, {}", self.layout, self.details)
        }
    }

    /// Seconds a step: measured where it ran.
    pub(crate) fn step_s(&self) -> f64 {
        let predicted = self.planned.predicted.step_s;
        self.measured_step_s().unwrap_or(predicted)
    }

    /// Measured seconds a step, whoever ran it.
    pub(crate) fn measured_step_s(&self) -> Option<f64> {
        let ran = self.measured.as_ref().map(|m| m.summary.step_s);
        ran.or(self.logged.as_ref().map(|logged| logged.step_s))
    }

    /// Ranks of the job.
    pub(crate) fn ranks(&self) -> u32 {
        let l = &self.planned.layout;
        l.tp * l.cp * l.dp * l.pp
    }

    /// Tokens a second on each GPU: measured where it ran.
    pub(crate) fn tokens_per_s_per_gpu(&self) -> f64 {
        match &self.measured {
            Some(measured) => measured.summary.tokens_per_s / f64::from(self.ranks()),
            None => tokens_of(&self.planned) / self.step_s(),
        }
    }

    /// The same, measured alone.
    pub(crate) fn measured_tokens_per_s_per_gpu(&self) -> Option<f64> {
        self.measured_step_s().map(|_| self.tokens_per_s_per_gpu())
    }

    /// Model FLOP/s over peak: measured where it ran. For one model and batch it goes as the inverse of
    /// the step.
    pub(crate) fn mfu(&self) -> f64 {
        let predicted = &self.planned.predicted;
        predicted.mfu * predicted.step_s / self.step_s()
    }

    /// Measured peak of the worst rank, GiB, where it ran.
    pub(crate) fn measured_peak_gib(&self) -> Option<f64> {
        let peaks = &self.measured.as_ref()?.summary.peak_by_rank;
        peaks.iter().map(|p| p.bytes.total().gib()).reduce(f64::max)
    }

    /// Prediction over measurement of the step, less one: positive when the prediction was too slow.
    pub(crate) fn step_error(&self) -> Option<f64> {
        Some(self.planned.predicted.step_s / self.measured_step_s()? - 1.0)
    }
}

impl Comparison {
    /// Puts inputs side by side.
    pub(crate) fn of(inputs: Vec<Input>) -> Self {
        let names = input_names(&inputs);
        let mut comparison = Self::default();
        for (input, name) in inputs.into_iter().zip(names) {
            comparison.add(input, &name);
        }
        comparison.drop_duplicates();
        comparison.name_details();
        comparison
    }

    fn add(&mut self, input: Input, name: &str) {
        match input.content {
            Content::Plan(plan, logged) => {
                let setting = Setting {
                    model: Some(plan.model),
                    cluster: Some(plan.cluster),
                    request: Some(plan.request),
                };
                for runner_up in plan.alternatives {
                    let candidate = Candidate {
                        layout: runner_up.layout,
                        recompute: runner_up.recompute,
                        schedule: runner_up.schedule,
                        rank_order: runner_up.rank_order,
                        cp_comm_type: Some(
                            runner_up.cp_comm_type.unwrap_or(plan.planned.cp_comm()),
                        )
                        .filter(|_| runner_up.layout.cp > 1),
                        cuda_graph: runner_up.cuda_graph,
                        step_s: runner_up.step_s,
                        peak_gib: runner_up.peak_gib,
                    };
                    self.consider(&candidate, &plan.planned, &plan.profiles);
                }
                self.push(name.to_owned(), plan.planned, setting, plan.profiles, None);
                let pushed = self.subjects.last_mut().expect("it was pushed");
                pushed.logged = logged;
            }
            Content::Steps(_) => unreachable!("steps are paired with their plan"),
            Content::Run(run) => {
                let setting = Setting {
                    model: Some(run.plan.model),
                    cluster: Some(run.plan.cluster),
                    request: Some(run.plan.request),
                };
                let measured = Measured {
                    steps: run.steps,
                    summary: run.summary,
                    env: run.env,
                };
                let (planned, profiles) = (run.plan.planned, run.plan.profiles);
                self.push(name.to_owned(), planned, setting, profiles, Some(measured));
            }
            Content::Answer(answer) => {
                if let Some(best) = answer.plans.first() {
                    for candidate in &answer.search.feasible {
                        let listed = answer.plans.iter().any(|plan| {
                            plan.layout == candidate.layout
                                && plan.recompute == candidate.recompute
                                && plan.pipeline.schedule.chosen() == candidate.schedule
                                && plan.rank_order == candidate.rank_order
                                && plan.cp_comm() == candidate.cp_comm_type.unwrap_or_default()
                                && plan.cuda_graph == candidate.cuda_graph
                        });
                        if !listed {
                            self.consider(candidate, best, &answer.profiles);
                        }
                    }
                }
                let setting = Setting {
                    model: answer.model,
                    cluster: answer.cluster,
                    request: answer.request,
                };
                let only = answer.plans.len() == 1;
                let tokens_per_gpu = answer.plans.first().map(tokens_of);
                for (i, planned) in answer.plans.into_iter().enumerate() {
                    let name = if only {
                        name.to_owned()
                    } else {
                        format!("{name} #{}", i + 1)
                    };
                    self.push(
                        name,
                        planned,
                        setting.clone(),
                        answer.profiles.clone(),
                        None,
                    );
                }
                let mut record = answer.search;
                record.feasible.clear();
                if let Some((survey, tokens)) = record.survey.take().zip(tokens_per_gpu)
                    && survey.fastest_s > 0.0
                {
                    self.surveys.push(Surveyed {
                        fastest: tokens / survey.fastest_s,
                        survey,
                        profiles: answer.profiles,
                    });
                }
                self.searches.push((name.to_owned(), record));
            }
        }
    }

    fn push(
        &mut self,
        name: String,
        planned: PlannedLayout,
        setting: Setting,
        profiles: Vec<ProfileUsed>,
        measured: Option<Measured>,
    ) {
        self.subjects.push(Subject {
            name,
            layout: format::planned(&planned),
            details: String::new(),
            planned,
            setting,
            measured,
            logged: None,
            profiles,
        });
    }

    /// Notes a candidate, whose tokens a step are those of a plan from the same search.
    fn consider(&mut self, candidate: &Candidate, of: &PlannedLayout, profiles: &[ProfileUsed]) {
        let tokens_per_gpu = tokens_of(of);
        self.considered.push(Considered {
            layout: format::candidate(candidate),
            details: details(candidate),
            peak_gib: candidate.peak_gib,
            tokens_per_s_per_gpu: tokens_per_gpu / candidate.step_s,
            profiles: profiles.to_vec(),
        });
    }

    /// A plan given beside the run of that plan, or twice, is one subject. Runs come first.
    fn drop_duplicates(&mut self) {
        let same = |a: &Subject, b: &Subject| a.planned == b.planned && a.setting == b.setting;
        let mut kept: Vec<Subject> = Vec::new();
        for subject in std::mem::take(&mut self.subjects) {
            match kept.iter_mut().find(|other| same(other, &subject)) {
                Some(other) if other.measured_step_s().is_none() => {
                    if subject.measured_step_s().is_some() {
                        *other = subject;
                    }
                }
                Some(_) if subject.measured_step_s().is_none() => {}
                _ => kept.push(subject),
            }
        }
        kept.sort_by_key(|subject| subject.measured_step_s().is_none());
        self.subjects = kept;
    }

    /// Says of each subject what differs between them besides the degrees.
    fn name_details(&mut self) {
        fn varies<T: PartialEq>(subjects: &[Subject], of: impl Fn(&Subject) -> T) -> bool {
            subjects.windows(2).any(|pair| of(&pair[0]) != of(&pair[1]))
        }
        let s = &self.subjects;
        let recompute = varies(s, |s| s.planned.recompute.clone());
        let dispatcher = varies(s, |s| s.planned.dispatcher);
        // Degrees say the others.
        let schedule = varies(s, |s| s.planned.pipeline.schedule.chosen());
        let capacity = varies(s, |s| s.planned.capacity);
        let cp_comm = varies(s, |s| s.planned.cp_comm());
        let offload = varies(s, |s| s.planned.offload);
        let overlap = varies(s, |s| s.planned.overlap);
        let graphs = varies(s, |s| s.planned.cuda_graph);
        let zero = varies(s, |s| s.planned.zero);
        let optimizer = varies(s, |s| s.planned.optimizer);
        let masters = varies(s, |s| s.planned.masters);
        let on_host = varies(s, |s| s.planned.optimizer_offload_fraction);
        let precision = varies(s, |s| s.planned.precision);
        let stack = varies(s, |s| s.planned.stack);
        let model = varies(s, |s| s.setting.model.as_ref().map(|m| m.name.clone()));
        let cluster = varies(s, |s| s.setting.cluster.as_ref().map(|c| c.name.clone()));
        for subject in &mut self.subjects {
            let planned = &subject.planned;
            let mut words = Vec::new();
            if recompute {
                words.push(recompute_words(&planned.recompute));
            }
            if capacity {
                words.push(planned.capacity.map_or_else(
                    || "dropless".to_owned(),
                    |capacity| format!("capacity factor {}", capacity.factor),
                ));
            }
            if cp_comm {
                words.push(format!("CP by {}", json_word(&planned.cp_comm())));
            }
            for (shown, word) in [
                (schedule, json_word(&planned.pipeline.schedule)),
                (dispatcher, json_word(&planned.dispatcher)),
                (offload, format!("offload {}", planned.offload)),
                (
                    graphs,
                    format!("CUDA graphs {}", planned.cuda_graph.unwrap_or_default()),
                ),
                (
                    overlap,
                    planned.overlap.map_or_else(
                        || "the usual overlap".to_owned(),
                        |overlap| format!("overlap {}", String::from(overlap)),
                    ),
                ),
                (
                    zero,
                    format!("zero {}", planned.zero.unwrap_or_default().name()),
                ),
                (optimizer, json_word(&planned.optimizer)),
                (
                    masters,
                    format!("masters {}", planned.masters.unwrap_or_default().name()),
                ),
                (
                    on_host,
                    format!(
                        "{} of states on the host",
                        planned.optimizer_offload_fraction.unwrap_or_default().0
                    ),
                ),
                (precision, json_word(&planned.precision)),
                (stack, json_word(&planned.stack)),
            ] {
                if shown {
                    words.push(word);
                }
            }
            if let (true, Some(model)) = (model, &subject.setting.model) {
                words.push(model.name.clone());
            }
            if let (true, Some(cluster)) = (cluster, &subject.setting.cluster) {
                words.push(cluster.name.clone());
            }
            subject.details = words.join(", ");
        }
    }

    /// Whether the steps of all subjects do the same work on the same machine.
    pub(crate) fn is_comparable(&self) -> bool {
        let first = self.subjects.first();
        self.subjects
            .iter()
            .all(|s| first.is_none_or(|f| f.setting.is_comparable(&s.setting)))
    }

    /// What a rank is: `GPU`, or `rank` where every cluster is a CPU.
    pub(crate) fn rank_word(&self) -> &'static str {
        let mut clusters = self.subjects.iter().map(|s| s.setting.cluster.as_ref());
        if clusters.all(|c| c.is_some_and(|c| c.gpu.is_cpu())) {
            "rank"
        } else {
            "GPU"
        }
    }

    /// The profiles that the best-informed predictions were priced from. Predictions from different
    /// prices differ for the same layout, so only those from one set of profiles are ranked against
    /// each other: the set whose predictions rest on the largest share of measured costs.
    pub(crate) fn best_prices(&self) -> &[ProfileUsed] {
        let known = |s: &Subject| {
            let c = &s.planned.predicted.confidence;
            c.measured + 0.5 * c.interpolated
        };
        let best = self
            .subjects
            .iter()
            .reduce(|best, s| if known(s) > known(best) { s } else { best });
        best.map_or(&[], |s| &s.profiles)
    }

    /// Subjects that ran.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (&Subject, &Measured)> {
        self.subjects
            .iter()
            .filter_map(|s| s.measured.as_ref().map(|m| (s, m)))
    }

    /// Whether the step of any was measured.
    pub(crate) fn any_step_measured(&self) -> bool {
        let mut steps = self.subjects.iter().map(Subject::measured_step_s);
        steps.any(|step| step.is_some())
    }

    /// Indices of the subjects from fastest to slowest, by tokens a second on each GPU. Measured and
    /// predicted speeds are not mixed: with a measured one among them, only those are ranked.
    pub(crate) fn ranking(&self) -> Vec<usize> {
        let any = self.any_step_measured();
        let mut order: Vec<usize> = (0..self.subjects.len())
            .filter(|&i| !any || self.subjects[i].measured_step_s().is_some())
            .collect();
        order.sort_by(|&a, &b| {
            let speed = |i: usize| self.subjects[i].tokens_per_s_per_gpu();
            speed(b).total_cmp(&speed(a)).then(a.cmp(&b))
        });
        order
    }
}

/// What sets a runner-up apart beside its degrees.
fn details(candidate: &Candidate) -> String {
    let mut words = vec![recompute_words(&candidate.recompute)];
    words.extend(
        candidate
            .schedule
            .map(|schedule| schedule.name().to_owned()),
    );
    words.extend(
        candidate
            .cuda_graph
            .map(|graphs| format!("CUDA graphs {graphs}")),
    );
    words.join(", ")
}

fn recompute_words(plan: &RecomputePlan) -> String {
    match plan.alike() {
        Some(Recompute::None) => "no recompute".to_owned(),
        Some(Recompute::Full) => "full recompute".to_owned(),
        Some(Recompute::Modules(_)) | None => format!("recompute {}", format::recompute(plan)),
    }
}

/// How a plain enum is written in JSON.
pub(crate) fn json_word<T: serde::Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(other) => other.to_string(),
        Err(_) => String::new(),
    }
}

/// A short name for each input: file stem or directory name, more of the path where they clash.
fn input_names(inputs: &[Input]) -> Vec<String> {
    let paths: Vec<Vec<String>> = inputs.iter().map(|input| parts(&input.path)).collect();
    let tail =
        |parts: &[String], length: usize| parts[parts.len().saturating_sub(length)..].join("/");
    paths
        .iter()
        .enumerate()
        .map(|(i, own)| {
            let clash = |name: &str, length: usize| {
                paths
                    .iter()
                    .enumerate()
                    .any(|(j, other)| i != j && tail(other, length) == name)
            };
            for length in 1..=own.len() {
                let name = tail(own, length);
                if !clash(&name, length) {
                    return name;
                }
            }
            let earlier = paths[..i].iter().filter(|other| *other == own).count();
            format!("{} ({})", tail(own, own.len()), earlier + 1)
        })
        .collect()
}

/// The parts of a path that name it: a file called `plan.json` goes by its directory.
fn parts(path: &Path) -> Vec<String> {
    let mut parts: Vec<String> = path
        .components()
        .filter_map(|part| match part {
            std::path::Component::Normal(part) => Some(part.to_string_lossy().into_owned()),
            _ => None,
        })
        .collect();
    if let Some(last) = parts.pop() {
        let stem = last.strip_suffix(".json").unwrap_or(&last);
        if parts.is_empty() || stem != "plan" {
            parts.push(stem.to_owned());
        }
    }
    if parts.is_empty() {
        parts.push(path.to_string_lossy().into_owned());
    }
    parts
}
