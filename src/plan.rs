//! `moefold plan`: search, show, write the best plan.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use moefold_executor::trace;
use moefold_planner::answer::{Answer, PlacedExperts, PlacedLayer, Untried, Why};
use moefold_planner::choice::{Capacity, HostShare, Objective, StackName};
use moefold_planner::experts;
use moefold_planner::layout::{Batch, PartialDegrees};
use moefold_planner::model::Model;
use moefold_planner::options::{Effort, LeastMemory, PlanError, Routing, SearchOptions};
use moefold_planner::plan::{Alternative, PLAN_VERSION, Plan, PlannedLayout, ProfileUsed, Request};
use moefold_planner::search::{self, Asked, Lengths, Progress, SearchResult, Watch};
use moefold_profiles::directory::{Key, Taken};
use moefold_profiles::files::check_writable;
use moefold_profiles::{Cluster, Costs, Precision, Profile, presets};

use crate::cli::PlanArgs;
use crate::exportable;
use crate::failure::Failure;
use crate::flags::{self, Goal, Placed};
use crate::output::Output;
use crate::sizes::{Best, NoSize, Wanted};
use crate::watch::Watcher;

/// Points of the front at most.
const FRONT_STEPS: usize = 24;

pub(crate) fn run(args: &PlanArgs, output: Output) -> Result<(), Failure> {
    let model = Model::resolve(&args.model).map_err(Failure::request)?;
    let cluster = cluster(&args.cluster, args.gpus)?;
    let gpus = gpus(&cluster, args.gpus)?;
    let mut options = options(args, &cluster)?;
    if let Some(path) = &args.out {
        // Behind a search that took long its answer would be lost.
        check_writable(path)
            .with_context(|| format!("--out {}: cannot be written", path.display()))
            .map_err(Failure::Runtime)?;
    }
    // Only the machine-readable answer has room for every layout.
    options.survey = output.json;
    let profiles = load_profiles(&args.profile, &cluster)?;
    options.routing = routing(args, &profiles, &model, output)?;
    let watcher = Watcher::new(output, args.time_limit)?;
    let watch = |progress: &Progress| watcher.look(progress);
    let wanted = Wanted::new(args, (&model, &cluster), &options)?;
    let several = wanted.is_some() || args.objective == Goal::SeqLen;
    if args.front && !several {
        options.front = FRONT_STEPS;
    }
    let mut question = Question::new(&model, &cluster, gpus, &profiles).watched(&watch);
    for note in question.costs.notes() {
        output.note(note)?;
    }
    if let Some(fitted) = question.costs.calibration()
        && fitted.stack != options.stack.name()
    {
        output.note(&format!(
            "the calibration was fitted to steps of the {} stack, and this plan is for {}: its host and \
             overlap may differ",
            fitted.stack,
            options.stack.name()
        ))?;
    }
    let mut found = if let Some(wanted) = wanted {
        let sized = |gpus| {
            let sized = Question::new(&model, &cluster, gpus, &profiles).watched(&watch);
            sized.search(&options)
        };
        best_size(&wanted, (&cluster, gpus), (&watcher, output), sized)?
    } else {
        let lengths = match args.objective {
            Goal::SeqLen => question.lengths(&mut options).map(Some),
            _ => Ok(None),
        };
        match lengths.and_then(|lengths| question.longest(&options, lengths)) {
            Ok(found) => found,
            Err(error) if matches!(*error, PlanError::Stopped) => {
                return Err(watcher.found_nothing());
            }
            Err(error) => {
                let failure = question.refused(&options, output, *error)?;
                if watcher.is_stopped() {
                    output.note("stopped: changes are missing from the table")?;
                }
                watcher.done();
                Watcher::end()?;
                return Err(failure);
            }
        }
    };
    let request = found.answer.request.as_ref();
    question.gpus = request.map_or(gpus, |request| request.gpus);
    if args.front && several {
        question.add_front(&mut found, &options)?;
    }
    let first = &found.answer.plans[0];
    let untried = question.unsearched(&options, first).into_iter();
    found.answer.search.not_searched = untried.map(|(untried, _)| untried).collect();
    if watcher.is_stopped() {
        // What is asked about the best so far is answered all the same.
        question.watch = None;
    }
    if let Some(asked) = &args.why {
        found.answer.why = Some(question.why(&options, asked, &found)?);
    }
    if let Some(copies) = args.place_experts {
        found.answer.experts =
            Some(question.place(&options, &found, copies, &|| watcher.is_stopped())?);
    }
    watcher.done();
    if let Some(path) = &args.out {
        found.best().save(path).map_err(Failure::runtime)?;
    }
    output.answer(&found.answer, || {
        let mut text = moefold_reports::plan_table(&found.answer, &found.alternatives);
        if args.front && options.objective != Objective::Memory {
            text.push('\n');
            text.push_str(&moefold_reports::front_table(&found.answer));
        }
        if let Some(path) = &args.out {
            text.push_str("\nThe best plan is in ");
            text.push_str(&path.display().to_string());
            text.push_str(".\n");
            if found.best().planned.stack == StackName::Megatron {
                text.push_str(&exportable::launched(&found.best(), path));
                text.push('\n');
            }
        }
        text
    })?;
    Watcher::end()
}

/// The best plan of several numbers of GPUs, with what each comes to.
fn best_size(
    wanted: &Wanted,
    (cluster, gpus): (&Cluster, u32),
    (watcher, output): (&Watcher, Output),
    search: impl Fn(u32) -> Result<Found, Box<PlanError>>,
) -> Result<Found, Failure> {
    let step_s = |found: &Found| found.answer.plans[0].predicted.step_s;
    let best = wanted.best(cluster, gpus, watcher, search, step_s);
    let Best {
        mut found,
        sizes,
        nothing,
        stopped,
    } = best.map_err(|none| match none {
        NoSize::Stopped => watcher.found_nothing(),
        NoSize::Refused(error) => refusal(*error),
        NoSize::TooLate(error) => Failure::Infeasible(error),
    })?;
    found.answer.sizes = sizes;
    if !nothing.is_empty() {
        let each = nothing.iter().map(ToString::to_string).collect::<Vec<_>>();
        output.note(&format!(
            "failures leave nothing of training on {} GPUs",
            each.join(", ")
        ))?;
    }
    if stopped {
        // Numbers of GPUs that were not searched may be better.
        let search = &mut found.answer.search;
        search.unseen = Some(search.unseen.unwrap_or(0));
        search.optimal = false;
    }
    Ok(found)
}

/// A profile directory with the name it was given by.
pub(crate) struct NamedProfile {
    name: String,
    profile: Profile,
}

/// What a search answered.
pub(crate) struct Found {
    /// What `--json` prints.
    pub(crate) answer: Answer,
    /// Runners-up in short.
    pub(crate) alternatives: Vec<Alternative>,
}

impl Found {
    /// The best plan as a file to be.
    pub(crate) fn best(&self) -> Plan {
        self.plan(0)
    }

    /// How many plans were found.
    pub(crate) fn num_plans(&self) -> usize {
        self.answer.plans.len()
    }

    /// One of the plans, best first, as a file to be.
    pub(crate) fn plan(&self, place: usize) -> Plan {
        let asked = "the search records what it was asked";
        Plan {
            version: PLAN_VERSION,
            planned: self.answer.plans[place].clone(),
            model: self.answer.model.clone().expect(asked),
            cluster: self.answer.cluster.clone().expect(asked),
            request: self.answer.request.clone().expect(asked),
            profiles: self.answer.profiles.clone(),
            // Those that say why they are slower than the first.
            alternatives: match place {
                0 => self.alternatives.clone(),
                _ => Vec::new(),
            },
        }
    }
}

/// What is to be planned, with its prices.
pub(crate) struct Question<'a> {
    model: &'a Model,
    cluster: &'a Cluster,
    gpus: u32,
    profiles: &'a [NamedProfile],
    costs: Costs,
    /// Who is told how far a search is.
    watch: Option<&'a Watch<'a>>,
}

impl<'a> Question<'a> {
    pub(crate) fn new(
        model: &'a Model,
        cluster: &'a Cluster,
        gpus: u32,
        profiles: &'a [NamedProfile],
    ) -> Self {
        Self {
            model,
            cluster,
            gpus,
            profiles,
            costs: Costs::for_cluster(cluster, &bare(profiles)),
            watch: None,
        }
    }

    /// The same, where somebody watches.
    fn watched(self, watch: &'a Watch<'a>) -> Self {
        Self {
            watch: Some(watch),
            ..self
        }
    }

    /// Tells whoever watches.
    fn look(&self, progress: &Progress) -> ControlFlow<()> {
        self.watch
            .map_or(ControlFlow::Continue(()), |watch| watch(progress))
    }

    /// Searches, and says how long that took.
    pub(crate) fn ask(&self, options: &SearchOptions) -> Result<Found, Failure> {
        self.search(options).map_err(|error| refusal(*error))
    }

    /// What is asked of the planner.
    fn asking<T>(&self, options: &SearchOptions, ask: impl FnOnce(&Asked<'_>) -> T) -> T {
        let runtime = trace::runtime(options.stack, self.model, self.cluster);
        let watch = |progress: &Progress| self.look(progress);
        ask(&Asked {
            model: self.model,
            cluster: self.cluster,
            gpus: self.gpus,
            options,
            costs: &self.costs,
            runtime: runtime.as_ref(),
            watch: &watch,
        })
    }

    /// The same, refused in the planner's own words.
    pub(crate) fn search(&self, options: &SearchOptions) -> Result<Found, Box<PlanError>> {
        self.found(options, search::plan_watched)
    }

    /// What is tried only where it is named and was not, each with what asks for it.
    pub(crate) fn unsearched(
        &self,
        options: &SearchOptions,
        first: &PlannedLayout,
    ) -> Vec<(Untried, SearchOptions)> {
        self.asking(options, |asked| search::unsearched(asked, first))
    }

    /// What one of the planner's searches finds.
    fn found(
        &self,
        options: &SearchOptions,
        search: impl FnOnce(&Asked<'_>) -> Result<SearchResult, PlanError>,
    ) -> Result<Found, Box<PlanError>> {
        let started = Instant::now();
        let result = self.asking(options, search).map_err(Box::new)?;
        let mut search = result.search;
        search.elapsed_s = started.elapsed().as_secs_f64();
        let used = |named: &NamedProfile| ProfileUsed {
            name: named.name.clone(),
            hash: named.profile.hash(),
            pace_s: named.profile.pace_s,
        };
        Ok(Found {
            answer: Answer {
                plans: result.plans,
                search,
                model: Some(self.model.clone()),
                cluster: Some(self.cluster.clone()),
                request: Some(Request::of(self.gpus, options)),
                profiles: self.profiles.iter().map(used).collect(),
                why: None,
                sizes: Vec::new(),
                lengths: Vec::new(),
                experts: None,
            },
            alternatives: result.alternatives,
        })
    }

    /// Looks for the longest sequence that fits, and has the options ask for it.
    fn lengths(&self, options: &mut SearchOptions) -> Result<Lengths, Box<PlanError>> {
        let lengths = self.asking(options, search::longest).map_err(Box::new)?;
        options.batch.seq_len = lengths.longest();
        Ok(lengths)
    }

    /// Searches, and says what other lengths come to where they were looked at.
    fn longest(
        &self,
        options: &SearchOptions,
        lengths: Option<Lengths>,
    ) -> Result<Found, Box<PlanError>> {
        // The length that was found is planned, though the search for it was stopped.
        let stopped = lengths.as_ref().is_some_and(|lengths| lengths.stopped);
        let watch = self.watch.filter(|_| !stopped);
        let costs = self.costs.clone();
        let mut found = Self {
            costs,
            watch,
            ..*self
        }
        .search(options)?;
        if let Some(Lengths { mut tried, stopped }) = lengths {
            let predicted = &found.answer.plans[0].predicted;
            let planned = tried
                .iter_mut()
                .find(|length| length.seq_len == options.batch.seq_len);
            if let Some(planned) = planned {
                planned.step_s = Some(predicted.step_s);
                planned.peak_gib = Some(predicted.peak_gib);
            }
            let search = &mut found.answer.search;
            if stopped {
                // Longer ones may fit.
                search.unseen = Some(search.unseen.unwrap_or(0));
                search.optimal = false;
            }
            found.answer.lengths = tried;
        }
        Ok(found)
    }

    /// Why there is no plan, with what would fit where that is for want of memory.
    fn refused(
        &self,
        options: &SearchOptions,
        output: Output,
        error: PlanError,
    ) -> Result<Failure, Failure> {
        let least = match &error {
            PlanError::Infeasible { least, .. } => least.clone(),
            _ => None,
        };
        match refusal(error) {
            Failure::Infeasible(error) => {
                self.short_of_memory(options, output, least.as_deref(), &error)
            }
            failure => Ok(failure),
        }
    }

    /// Says beside an error what would fit, in the answer where that is for programs.
    fn short_of_memory(
        &self,
        options: &SearchOptions,
        output: Output,
        least: Option<&LeastMemory>,
        error: &anyhow::Error,
    ) -> Result<Failure, Failure> {
        let mut shortage = self.asking(options, |asked| search::closest(asked, least));
        for saver in &mut shortage.savers {
            // As they are given together.
            saver.change = flags::in_words_of_flags(&saver.change).replace(", --", " --");
        }
        if output.json {
            output.answer(&shortage, String::new)?;
        }
        let table = moefold_reports::shortage_table(&shortage);
        Ok(Failure::Infeasible(anyhow!(
            "{error:#}\n\n{}",
            table.trim_end()
        )))
    }

    /// What became of a layout beside what was found.
    fn why(&self, options: &SearchOptions, asked: &Placed, found: &Found) -> Result<Why, Failure> {
        if asked.degrees == PartialDegrees::default() {
            return Err(Failure::Request(anyhow!(
                "--why: found no degrees, expected a layout, as tp=2,pp=4 or 'TP2 PP4 | EP8'"
            )));
        }
        let options = &SearchOptions {
            order: asked.order.or(options.order),
            cp_comm: asked.cp_comm.or(options.cp_comm),
            ..options.clone()
        };
        let plans = &found.answer.plans;
        let why = self.asking(options, |all| search::why(all, &asked.degrees, plans));
        let mut why = why.map_err(refusal)?;
        for rule in &mut why.rules {
            *rule = flags::in_words_of_flags(rule);
        }
        Ok(why)
    }

    /// How the experts of the best plan are best placed under the mean routing, with so many more on each rank.
    fn place(
        &self,
        options: &SearchOptions,
        found: &Found,
        copies: u32,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<PlacedExperts, Failure> {
        let refuse = |message: String| Failure::Request(anyhow!(message));
        let shares = options.routing.as_ref().and_then(Routing::shares);
        let Some((routing, shares)) = options.routing.as_ref().zip(shares) else {
            return Err(refuse(
                "--place-experts: routing is balanced, and no placement is better than another; add --routing RUN_DIR or \
                 --routing HISTOGRAM.json"
                    .to_owned(),
            ));
        };
        let best = found.best();
        let ep = best.planned.layout.ep;
        let experts = shares[0].len();
        let more = experts - experts / ep as usize;
        if copies as usize > more {
            return Err(refuse(format!(
                "--place-experts {copies}: a rank of #1 has {} of {experts} experts, so it can hold at most {more} more",
                experts / ep as usize
            )));
        }
        let (ranks, each) = (ep as usize, copies as usize);
        let layers: Vec<PlacedLayer> = shares
            .iter()
            .map(|loads| {
                let placed = experts::place(loads, ranks, each, is_stopped);
                PlacedLayer {
                    in_order: experts::in_order(loads, ranks).busiest,
                    busiest: placed.busiest,
                    at_least: experts::at_least(loads, ranks, each),
                    ranks: placed.ranks,
                }
            })
            .collect();
        let step_s = |own: fn(&PlacedLayer) -> f64| {
            let pinned = SearchOptions {
                routing: Some(routing.with_loads(ep, layers.iter().map(own).collect())),
                memory_headroom: 0.0,
                ..best.pinned()
            };
            let found = self.ask(&pinned)?;
            Ok::<f64, Failure>(found.answer.plans[0].predicted.step_s)
        };
        Ok(PlacedExperts {
            ep,
            copies,
            in_order_step_s: step_s(|layer| layer.in_order)?,
            step_s: if copies == 0 {
                Some(step_s(|layer| layer.busiest)?)
            } else {
                None
            },
            layers,
        })
    }

    /// Adds the front of speed against memory behind the winner of one of several searches.
    fn add_front(&self, found: &mut Found, options: &SearchOptions) -> Result<(), Failure> {
        let options = SearchOptions {
            front: FRONT_STEPS,
            top: 1,
            survey: false,
            ..options.clone()
        };
        let again = match self.found(&options, search::plan_briefly) {
            Ok(again) => again.answer.search.feasible,
            Err(error) => match *error {
                PlanError::Infeasible { .. } | PlanError::Stopped => return Ok(()),
                error => return Err(refusal(error)),
            },
        };
        let feasible = &mut found.answer.search.feasible;
        for candidate in again {
            if !feasible.contains(&candidate) {
                feasible.push(candidate);
            }
        }
        Ok(())
    }
}

/// What was asked for in `plan`, asked again for so many `gpus` of its cluster. Prices are the cluster's own, and loads of
/// experts are balanced, as the plan does not hold what it was made from. Who watches may stop it.
pub(crate) fn again(plan: &Plan, gpus: u32, watch: &Watch<'_>) -> Result<Plan, Box<PlanError>> {
    let cluster = if plan.cluster.gpu.is_cpu() && plan.cluster.name.eq_ignore_ascii_case("local") {
        presets::local(gpus)
    } else {
        plan.cluster.clone()
    };
    let question = Question::new(&plan.model, &cluster, gpus, &[]).watched(watch);
    let mut asked = SearchOptions {
        stack: StackName::Moefold,
        ..plan.asked()
    };
    let mut found = question.search(&asked);
    // What was named for more ranks need not go with fewer.
    if found.is_err() && asked.schedule.take().is_some() {
        found = question.search(&asked);
    }
    if found.is_err() && asked.overlap.take().is_some() {
        asked.bucket_elements = None;
        found = question.search(&asked);
    }
    Ok(found?.best())
}

/// Loads profile directories and refuses those of another device.
pub(crate) fn load_profiles(
    directories: &[PathBuf],
    cluster: &Cluster,
) -> Result<Vec<NamedProfile>, Failure> {
    let load = |directory: &PathBuf| {
        let profile = Profile::load(directory).map_err(Failure::request)?;
        profile
            .check(cluster)
            .with_context(|| format!("--profile {}", directory.display()))
            .map_err(Failure::Request)?;
        Ok(NamedProfile {
            name: name_of(directory),
            profile,
        })
    };
    directories.iter().map(load).collect()
}

/// Loads of experts that the last run among profiles recorded, with its directory, where none of them exchanged tokens in
/// training: waits there are what loads of experts cost, as far as a profile knows it.
pub(crate) fn recorded_loads<'d>(
    directories: &'d [PathBuf],
    profiles: &[NamedProfile],
    model: &Model,
) -> Option<(&'d Path, Routing)> {
    let samples = profiles.iter().flat_map(|named| &named.profile.samples);
    let mut trained = samples.filter(|sample| sample.taken == Taken::Training);
    let is_exchange = |key: Key| matches!(key, Key::Collective(of) if of.is_of_tokens());
    if trained.any(|sample| is_exchange(sample.key)) {
        return None;
    }
    directories.iter().rev().find_map(|run| {
        let loads = Routing::read(run).ok()?;
        loads.check(model).ok().map(|()| (run.as_path(), loads))
    })
}

/// Profiles without their names.
pub(crate) fn bare(profiles: &[NamedProfile]) -> Vec<Profile> {
    profiles.iter().map(|named| named.profile.clone()).collect()
}

fn name_of(directory: &Path) -> String {
    directory.file_name().map_or_else(
        || directory.display().to_string(),
        |name| name.to_string_lossy().into_owned(),
    )
}

/// The cluster an argument means; `local` has as many ranks as are asked for.
pub(crate) fn cluster(name: &Path, gpus: Option<u32>) -> Result<Cluster, Failure> {
    match gpus {
        Some(ranks) if ranks > 0 && name.as_os_str().eq_ignore_ascii_case("local") => {
            Ok(presets::local(ranks))
        }
        _ => presets::resolve(name).map_err(Failure::request),
    }
}

/// How many of the cluster's GPUs are used.
pub(crate) fn gpus(cluster: &Cluster, asked: Option<u32>) -> Result<u32, Failure> {
    let refuse = |message: String| Err(Failure::Request(anyhow!(message)));
    match (asked, cluster.num_gpus) {
        (Some(0), _) => refuse("--gpus: found 0, expected at least 1".to_owned()),
        (Some(asked), Some(there)) if asked > there => refuse(format!(
            "--gpus: found {asked}, but cluster {} has {there}",
            cluster.name
        )),
        (Some(asked), _) => Ok(asked),
        (None, Some(there)) => Ok(there),
        (None, None) => refuse(format!(
            "--gpus is missing, and cluster {} has no fixed size; add for example --gpus {}",
            cluster.name,
            cluster.gpus_per_domain.max(cluster.gpus_per_node)
        )),
    }
}

/// What the search may vary and what the flags fix.
fn options(args: &PlanArgs, cluster: &Cluster) -> Result<SearchOptions, Failure> {
    let batch = Batch {
        seq_len: args.seq_len,
        global_batch: args.global_batch,
    };
    let on_cpu = cluster.gpu.is_cpu();
    let runs_here = if on_cpu {
        StackName::Moefold
    } else {
        StackName::Megatron
    };
    let mut options = SearchOptions::new(batch, args.stack.unwrap_or(runs_here));
    if args.time_limit.is_some() {
        options.effort = Effort::Patient;
    }
    // On GPUs every stack trains in bf16 unless told otherwise.
    let on_gpus = (!on_cpu).then_some(Precision::Bf16);
    if let Some(precision) = args.precision.or(on_gpus) {
        options.precision = precision;
    }
    let layout = args.layout.unwrap_or_default();
    options.pins = layout.degrees;
    options.dispatcher = args.dispatcher.0;
    if let (Some(said), Some(other)) = (layout.order, args.rank_order.0)
        && said != other
    {
        return Err(Failure::Request(anyhow!(
            "--layout says the order of ranks {said}, and --rank-order {other}; give one of them"
        )));
    }
    options.order = layout.order.or(args.rank_order.0);
    let asked = args.cp_comm_type.as_ref().map(|asked| asked.0);
    if let (Some(said), Some(Some(other))) = (layout.cp_comm, asked)
        && said != other
    {
        return Err(Failure::Request(anyhow!(
            "--layout says `cp {}`, and --cp-comm-type {}; give one of them",
            said.name(),
            other.name()
        )));
    }
    options.cp_comm = layout.cp_comm.or(asked.unwrap_or(options.cp_comm));
    if let [inside, outside] = args.hierarchical_context_parallel_sizes[..] {
        for size in [inside, outside] {
            if size == 0 {
                return Err(Failure::Request(anyhow!(
                    "--hierarchical-context-parallel-sizes: found {inside} {outside}, expected two numbers of at least 1"
                )));
            }
        }
        options.cp_sizes = Some([inside, outside]);
    }
    options.capacity = args.expert_capacity_factor.map(|factor| Capacity {
        factor,
        drop_policy: args.token_drop_policy,
        pad: args.pad_expert_input_to_capacity,
    });
    options.recompute.clone_from(&args.recompute.0);
    options.offload = args.offload.0;
    options.stages.clone_from(&args.pipeline_layout);
    options.overlap = args.overlap.0;
    let overlap = options.overlap.unwrap_or_default();
    options.schedule = args.schedule.0.map(|named| named.beside(overlap));
    options.graphs = args.cuda_graph.0;
    options.fp8_attention = args.fp8_attention;
    options.zero = args.zero;
    options.instances = args.num_distributed_optimizer_instances;
    options.bucket_elements = args.ddp_bucket_size;
    options.optimizer = args.optimizer;
    options.masters = args.masters;
    options.primary_weights = args.primary_weights;
    options.optimizer_offload = HostShare(args.optimizer_offload_fraction);
    options.grad_dtype = args.grad_dtype;
    options.objective = match args.objective {
        Goal::Memory => Objective::Memory,
        // On given GPUs the fastest is the cheapest.
        Goal::Throughput | Goal::Cost | Goal::Gpus | Goal::Goodput | Goal::SeqLen => {
            Objective::Throughput
        }
    };
    options.memory_headroom = args.memory_headroom / 100.0;
    options.top = args.top as usize;
    Ok(options)
}

/// How experts are loaded: as is said, else as a run recorded it that is a profile and says nothing of what that costs; balanced
/// otherwise.
fn routing(
    args: &PlanArgs,
    profiles: &[NamedProfile],
    model: &Model,
    output: Output,
) -> Result<Option<Routing>, Failure> {
    match &args.routing {
        Some(loads) if loads.as_os_str() == "balanced" => Ok(None),
        Some(loads) => Routing::read(loads).map(Some).map_err(|error| {
            let error = anyhow::Error::from(error);
            Failure::Request(error.context("--routing"))
        }),
        None => {
            let recorded = recorded_loads(&args.profile, profiles, model);
            if let Some((run, _)) = &recorded {
                let run = run.display();
                output.note(&format!(
                    "{run} exchanged no tokens, so no measurement says what ranks wait for the busiest experts: their loads are \
                     taken as it recorded them (--routing {run}; --routing balanced takes none)"
                ))?;
            }
            Ok(recorded.map(|(_, loads)| loads))
        }
    }
}

/// Nothing feasible is an answer of its own; everything else is a bad request.
pub(crate) fn refusal(error: PlanError) -> Failure {
    let infeasible = matches!(
        error,
        PlanError::Infeasible { .. } | PlanError::Hosts { .. }
    );
    let message = format!("{:#}", anyhow::Error::from(error));
    let error = anyhow!(flags::in_words_of_flags(&message));
    if infeasible {
        Failure::Infeasible(error)
    } else {
        Failure::Request(error)
    }
}

#[cfg(test)]
mod tests {
    use moefold_planner::choice::ScheduleName;
    use moefold_planner::model::presets as models;

    use super::*;

    #[test]
    fn what_was_asked_for_is_asked_for_again_as_far_as_it_goes() {
        let model = models::load("quickstart").expect("a preset");
        let batch = Batch {
            seq_len: 64,
            global_batch: 8,
        };
        let overlap = "grad-reduce".parse().expect("a word");
        let asked = SearchOptions {
            schedule: Some(ScheduleName::ZbV),
            overlap: Some(overlap),
            memory_headroom: 0.25,
            bucket_elements: Some(1000),
            ..SearchOptions::new(batch, StackName::Moefold)
        };
        let cluster = presets::local(4);
        let question = Question::new(&model, &cluster, 4, &[]);
        let plan = question.search(&asked).expect("there is one").best();
        let unwatched = |_: &Progress| ControlFlow::Continue(());
        let two = again(&plan, 2, &unwatched).expect("a pipeline of two");
        // One rank has no pipeline.
        let one = again(&plan, 1, &unwatched).expect("the whole model");
        let stopped = again(&plan, 2, &|_| ControlFlow::Break(())).map_err(|error| *error);
        assert!(matches!(stopped, Err(PlanError::Stopped)));
        assert_eq!(one.planned.pipeline.schedule, ScheduleName::None);
        for plan in [&plan, &two, &one] {
            assert_eq!(plan.planned.overlap, Some(overlap));
            assert_eq!(plan.request.memory_headroom, Some(0.25));
        }
        assert_eq!((two.request.gpus, &two.cluster), (2, &presets::local(2)));
        for plan in [&plan, &two] {
            assert_eq!(plan.planned.pipeline.schedule, ScheduleName::ZbV);
            assert_eq!(plan.planned.bucket_elements, Some(1000));
        }
    }
}
