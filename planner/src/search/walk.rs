//! [`walk`]: the step of a plan on one rank, from what its stack declares.
//!
//! For stacks whose runtime is not at hand to be traced. Passes begin when the simulated pipeline lets
//! them; what a pass works in is taken for as long as it runs, what it saves layer by layer.

use std::collections::BTreeMap;
use std::rc::Rc;

use moefold_profiles::pricing::Costs;
use moefold_profiles::units::{Bytes, GIB, Instant, Seconds};
use moefold_profiles::{ByClass, Collective, CollectiveKind, Op, Pass, TensorClass};

use super::candidate::{Case, StageSplit};
use super::questions::question;
use super::recompute::Sets;
use super::shape::{Kind, Shape};
use super::{Asked, prices};
use crate::choice::Zero;
use crate::layout::Layout;
use crate::mesh::{self, Placement};
use crate::options::PlanError;
use crate::plan::Plan;
use crate::rules::Rules;
use crate::runtime::{Level, Lowered, Part, Running, Runtime, Task, Work, cut};
use crate::schedule::{Action, Schedule, Stage};
use crate::simulate::{self, Simulator};
use crate::walk::{Allocation, At, Event, Walked, play};
use moefold_profiles::trace::{Category, Lane};

/// Works on the stages of a plan as a search prices them, under the routing of the plan.
fn of_plan<T>(
    plan: &Plan,
    layout: &Layout,
    costs: &Costs,
    runtime: &dyn Runtime,
    work: impl FnOnce(Case<'_>, &StageSplit) -> T,
) -> Result<T, PlanError> {
    let planned = &plan.planned;
    let options = plan.options();
    let (model, cluster, gpus) = (&plan.model, &plan.cluster, layout.gpus());
    let costs = &*prices(costs, &options, (cluster, gpus));
    let rules = Rules::of(model, &options);
    let asked = Asked::new(model, cluster, gpus, &options, costs, runtime);
    let question = question(&asked, &rules)?;
    let shapes = Shape::under(&question, layout, &question.sets);
    let shape = shapes
        .iter()
        .find(|shape| shape.dispatcher == planned.dispatcher);
    let schedule = planned.pipeline.schedule;
    let shape = shape.unwrap_or(&shapes[0]);
    let case = Case {
        question: &question,
        layout,
        shape: &shape.held_under(&question, layout, schedule),
        schedule,
    };
    let split = StageSplit::new(case, planned.pipeline.stages.clone());
    Ok(work(case, &split))
}

/// When the passes of a rank of a plan begin, its reductions and its update after them, as simulated: in the
/// order of its schedule, which has messages besides.
pub fn starts(
    plan: &Plan,
    layout: &Layout,
    rank: u32,
    costs: &Costs,
    runtime: &dyn Runtime,
) -> Result<Vec<Instant>, PlanError> {
    let pipeline_rank = mesh::coordinates(layout, rank).pp;
    of_plan(plan, layout, costs, runtime, |case, split| {
        starts_of(case, split, pipeline_rank)
    })
}

fn starts_of(case: Case<'_>, split: &StageSplit, pipeline_rank: u32) -> Vec<Instant> {
    let whole = |_, duration| {
        vec![simulate::Part {
            name: String::new(),
            category: Category::Bubble,
            lane: Lane::Compute,
            layer: None,
            duration,
        }]
    };
    let sets = &case.question.choices[0];
    let times = split.times(case, sets);
    let timeline = Simulator::new(&Schedule::of(case.layout, case.schedule)).trace(&times, whole);
    let spans = timeline.spans.iter();
    spans
        .filter(|span| span.rank == pipeline_rank && span.lane == Lane::Compute)
        .map(|span| span.start)
        .collect()
}

/// Walks the step of `rank` of a plan, as `runtime` declares it, under the routing of the plan.
pub fn walk(
    plan: &Plan,
    layout: &Layout,
    rank: u32,
    costs: &Costs,
    runtime: &dyn Runtime,
) -> Result<Walked, PlanError> {
    if let Some(zero) = plan.planned.zero.filter(|zero| *zero != Zero::States) {
        return Err(PlanError::Unable {
            what: format!("a dry run of `zero` {}", zero.name()),
            limit: "it is priced, and its step is not walked; use a plan of `zero` 1".to_owned(),
        });
    }
    if let Some(instances) = plan.planned.optimizer_instances {
        return Err(PlanError::Unable {
            what: format!("a dry run of `num_distributed_optimizer_instances` {instances}"),
            limit: "they are priced, and the step is not walked; use a plan of one".to_owned(),
        });
    }
    if plan.planned.optimizer.deals_tensors() {
        return Err(PlanError::Unable {
            what: format!("a dry run of `optimizer` {}", plan.planned.optimizer.name()),
            limit: "it is priced, and its step is not walked; use a plan of `optimizer` adam"
                .to_owned(),
        });
    }
    of_plan(plan, layout, costs, runtime, |case, split| {
        walked(plan, case, split, rank)
    })
}

fn walked(plan: &Plan, case: Case<'_>, split: &StageSplit, rank: u32) -> Walked {
    let (planned, question) = (&plan.planned, case.question);
    let (layout, shape) = (case.layout, case.shape);
    let pipeline_rank = mesh::coordinates(layout, rank).pp;
    let mut walker = Walker {
        events: Vec::new(),
        allocations: 0,
        collectives: 0,
        transfers: 0,
        transfer: None,
        pauses: Vec::new(),
        left: Vec::new(),
        case,
        split,
        lowered: (0..shape.kinds.len() + 2)
            .map(|index| kind_of(case, index))
            .map(|kind| {
                let under = |set| Rc::new(question.lowered(layout, shape, kind, set));
                (0..question.sets.len()).map(under).collect()
            })
            .collect(),
    };
    let held = split.held_by(pipeline_rank as usize);
    for class in TensorClass::ALL {
        if class != TensorClass::Overhead && held[class] > Bytes::ZERO {
            walker.take(class, held[class], class.name());
        }
    }
    let setup = std::mem::take(&mut walker.events);
    walker.step(pipeline_rank);
    let mut walked = play(
        rank,
        &setup,
        &walker.events,
        question.costs,
        &question.stack,
    );
    // Of the plan's total what is no tensor.
    let all = planned.predicted.memory_gib_by_pp_rank[pipeline_rank as usize];
    let all = Bytes((all * GIB as f64).round() as u64);
    walked.walk.bytes[TensorClass::Overhead] =
        Bytes(all.0.saturating_sub(walked.walk.peak_bytes.0));
    walked
}

/// Writes events.
struct Walker<'a> {
    events: Vec<Event>,
    allocations: u64,
    collectives: u64,
    /// Copies to and from the host so far, and the one that is not awaited yet.
    transfers: u64,
    transfer: Option<u64>,
    /// Where events of the pass that is written pause, where passes are combined.
    pauses: Vec<usize>,
    /// Gradients of weights that wait.
    left: Vec<(Work, At)>,
    case: Case<'a>,
    split: &'a StageSplit,
    /// Work of the kinds of layers, the embedding and the head, under each recompute set.
    lowered: Vec<Vec<Rc<Lowered>>>,
}

impl Walker<'_> {
    fn take(&mut self, class: TensorClass, bytes: Bytes, name: &str) -> Allocation {
        let allocation = Allocation {
            id: self.allocations,
            class,
            bytes,
            name: Some(name.to_owned().into()),
        };
        self.allocations += 1;
        self.events.push(Event::Allocated(allocation.clone()));
        allocation
    }

    fn give(&mut self, allocations: Vec<Allocation>) {
        self.events
            .extend(allocations.into_iter().map(Event::Freed));
    }

    fn take_level(&mut self, level: Level, name: &str) -> Vec<Allocation> {
        let bytes: ByClass<Bytes> = level.bytes();
        let some = bytes.iter().filter(|(_, bytes)| **bytes > Bytes::ZERO);
        let some: Vec<_> = some.map(|(class, bytes)| (class, *bytes)).collect();
        let take = |(class, bytes)| self.take(class, bytes, name);
        some.into_iter().map(take).collect()
    }

    /// All actions of a pipeline rank.
    fn step(&mut self, pipeline_rank: u32) {
        let layout = self.case.layout;
        let schedule = Schedule::of(layout, self.case.schedule);
        let mut starts = starts_of(self.case, self.split, pipeline_rank).into_iter();
        let overlap = self.case.question.overlap;
        let (reduces, gathers) = self.replicas(pipeline_rank as usize);
        let mut gathering = Vec::new();
        if overlap.param_gather {
            gathering = self.start_all(&gathers);
        }
        let mut reducing = None;
        let last = layout.microbatches() - 1;
        let mut saved = BTreeMap::new();
        for &action in &schedule.ranks[pipeline_rank as usize] {
            if !action.is_message() {
                self.events.extend(starts.next().map(Event::NotBefore));
            }
            match action {
                Action::Forward(stage, microbatch) => {
                    let kept = self.forward(stage, microbatch.0);
                    self.pauses.clear();
                    saved.insert((stage, microbatch), kept);
                    self.await_all(std::mem::take(&mut gathering));
                }
                Action::Backward(stage, microbatch) => {
                    // Gradients are whole in a stage's last backward, under which they are reduced.
                    if overlap.grad_reduce && microbatch.0 == last && reducing.is_none() {
                        reducing = Some(self.start_all(&reduces));
                    }
                    let kept = saved.remove(&(stage, microbatch));
                    self.backward(stage, microbatch.0, kept.unwrap_or_default());
                    self.pauses.clear();
                }
                Action::Combined { forward, backward } => {
                    let before = std::mem::take(&mut self.events);
                    let gone: Vec<Vec<Allocation>> = saved.remove(&backward).unwrap_or_default();
                    self.backward(backward.0, backward.1.0, gone.clone());
                    let second = self.paused();
                    let kept = self.forward(forward.0, forward.1.0);
                    let first = self.paused();
                    self.events = before;
                    self.take_turns(second, first, [&kept, &gone]);
                    saved.insert(forward, kept);
                }
                Action::BackwardInput(..) | Action::BackwardWeight(..) => {
                    unreachable!("stacks that declare their work divide no backward pass")
                }
                Action::RecvActivation(..) | Action::RecvGradient(..) => self.message(),
                Action::OptimizerStep => {
                    let pending = match reducing.take() {
                        Some(pending) => pending,
                        None => self.start_all(&reduces),
                    };
                    self.await_all(pending);
                    self.update(pipeline_rank as usize);
                    if !overlap.param_gather {
                        let pending = self.start_all(&gathers);
                        self.await_all(pending);
                    }
                }
                // Gradients are reduced above, messages told where they are received.
                Action::ReduceGradients(_)
                | Action::SendActivation(..)
                | Action::SendGradient(..) => {}
            }
        }
    }

    /// What has been written of a pass, up to each of its pauses.
    fn paused(&mut self) -> Vec<Vec<Event>> {
        let mut events = std::mem::take(&mut self.events);
        let pauses = std::mem::take(&mut self.pauses);
        let mut parts: Vec<Vec<Event>> = Vec::new();
        for at in pauses.into_iter().rev() {
            parts.push(events.split_off(at));
        }
        parts.push(events);
        parts.reverse();
        parts
    }

    /// Writes parts of two passes in turns. Both have what they work in at once; of what layers save, that of one comes
    /// as that of another goes, all but the last that goes, as [`StageSplit`] counts it.
    fn take_turns(
        &mut self,
        mut first: Vec<Vec<Event>>,
        mut second: Vec<Vec<Event>>,
        [kept, gone]: [&[Vec<Allocation>]; 2],
    ) {
        let (mut taken, mut given) = (Vec::new(), Vec::new());
        for part in first.iter_mut().chain(&mut second) {
            for event in std::mem::take(part) {
                match &event {
                    Event::Allocated(own) if !kept.iter().flatten().any(|one| one.id == own.id) => {
                        taken.push(event);
                    }
                    Event::Freed(own) if !gone.iter().flatten().any(|one| one.id == own.id) => {
                        given.push(event);
                    }
                    Event::Allocated(_) | Event::Freed(_) => {}
                    _ => part.push(event),
                }
            }
        }
        self.events.append(&mut taken);
        let (mut kept, mut gone) = (kept.iter(), gone.iter().rev());
        let mut last = None;
        while kept.len() + gone.len() > 0 {
            let comes = kept.next().into_iter().flatten().cloned();
            self.events.extend(comes.map(Event::Allocated));
            let goes = gone.next();
            if goes.is_some() && gone.len() == 0 {
                last = goes;
            } else {
                let goes = goes.into_iter().flatten().cloned();
                self.events.extend(goes.map(Event::Freed));
            }
        }
        let (mut first, mut second) = (first.into_iter(), second.into_iter());
        while first.len() + second.len() > 0 {
            self.events.extend(first.next().into_iter().flatten());
            self.events.extend(second.next().into_iter().flatten());
        }
        let last = last.into_iter().flatten().cloned();
        self.events.extend(last.map(Event::Freed));
        self.events.append(&mut given);
    }

    /// The work of a pass of one layer, which may be one of two that take turns: pauses are where the ranks wait for
    /// the tokens of each other, and gradients of weights that wait come before.
    fn pass(&mut self, list: &[Work], at: At, backward: bool) {
        if !self.case.schedule.combines() {
            return self.work(list, at, None);
        }
        let delays = backward && self.case.question.overlap.delay_wgrad;
        let is_of_weights = |work: &Work| {
            let op = matches!(work.task, Task::Op(op) if op.pass() == Some(Pass::Wgrad));
            delays && (work.of_weights || op)
        };
        let parts = cut(list, backward);
        let last = parts.len() - 1;
        for (number, part) in parts.into_iter().enumerate() {
            let (left, now): (Vec<Work>, Vec<Work>) = part.into_iter().partition(is_of_weights);
            let from = self.events.len();
            self.work(&now, at, None);
            self.left.extend(left.into_iter().map(|work| (work, at)));
            if number == last {
                continue;
            }
            let sent = self.collectives - 1;
            let awaited = |event: &Event| *event == Event::Awaited { number: sent };
            let place = self.events[from..].iter().rposition(awaited);
            let awaited = place.map(|place| self.events.remove(from + place));
            self.settle();
            self.pauses.push(self.events.len());
            self.events.extend(awaited);
        }
    }

    /// Runs gradients of weights that have waited.
    fn settle(&mut self) {
        for (work, at) in std::mem::take(&mut self.left) {
            self.work(&[work], at, None);
        }
    }

    /// Collectives over replicas, with their groups: reductions, and gathers of weights. In the order of
    /// [`crate::lower::ends::step`].
    fn replicas(&self, pipeline_rank: usize) -> (Vec<Named>, Vec<Named>) {
        let layout = self.case.layout;
        let groups = [(layout.dp() * layout.cp(), "dp-cp"), (layout.edp(), "edp")];
        let work = &self.split.ends[pipeline_rank].work;
        (named(groups, &work.reduce), named(groups, &work.gather))
    }

    fn start_all(&mut self, list: &[Named]) -> Vec<u64> {
        let start = |&(group, collective): &Named| {
            self.start(group, collective, None, Category::DpComm, At::default())
        };
        list.iter().map(start).collect()
    }

    fn await_all(&mut self, pending: Vec<u64>) {
        let awaited = pending.into_iter();
        self.events
            .extend(awaited.map(|number| Event::Awaited { number }));
    }

    fn message(&mut self) {
        if let Some((message, cost)) = super::candidate::message(self.case) {
            // Passes begin when their message is there. How far it goes the message itself does not say.
            let levels = &self.case.question.cluster.oversubscription;
            let seconds = (!levels.is_empty()).then_some(cost.time);
            self.start("pp", message, seconds, Category::PpComm, At::default());
        }
    }

    fn collective(&mut self, group: &str, collective: Collective, category: Category, at: At) {
        let number = self.start(group, collective, None, category, at);
        self.events.push(Event::Awaited { number });
    }

    fn start(
        &mut self,
        group: &str,
        collective: Collective,
        seconds: Option<Seconds>,
        category: Category,
        at: At,
    ) -> u64 {
        let number = self.collectives;
        self.collectives += 1;
        self.events.push(Event::Started {
            number,
            group: group.into(),
            collective,
            seconds,
            category,
            at,
        });
        number
    }

    /// Which recompute set each layer has: a plan has one choice.
    fn sets(&self) -> &Sets {
        &self.case.question.choices[0]
    }

    /// Layers of a stage in order, with the ends of the model where they are: each with its kind and its recompute set.
    fn layers(&self, stage: Stage) -> Vec<(Option<u32>, usize, usize)> {
        let (stage, question) = (stage.0 as usize, self.case.question);
        let (shape, sets) = (self.case.shape, self.sets());
        let mut all = Vec::new();
        if stage == 0 {
            all.push((None, shape.kinds.len(), sets.of_ends()));
        }
        for (before, &layer) in (0..).zip(&self.split.stages[stage]) {
            let set = sets.of(layer, before);
            all.push((Some(layer), question.kind_of[layer as usize], set));
        }
        if stage + 1 == self.split.stages.len() {
            all.push((None, shape.kinds.len() + 1, sets.of_ends()));
        }
        all
    }

    fn kind(&self, index: usize) -> &'static str {
        let kinds = self.case.shape.kinds.len();
        match index {
            _ if index < kinds => "layer",
            _ if index == kinds => "embedding",
            _ => "head",
        }
    }

    fn forward(&mut self, stage: Stage, microbatch: u32) -> Vec<Vec<Allocation>> {
        let memory = self
            .split
            .stage_memory(self.case.shape, stage.0 as usize, self.sets())
            .between(Level::default(), false, false);
        let working = self.take_level(memory.running(Running::Forward), "working set");
        let mut saved = Vec::new();
        let layers = self.layers(stage);
        let all = layers.len();
        for (number, (layer, index, set)) in layers.into_iter().enumerate() {
            let kind = kind_of(self.case, index);
            let name = format!("saved by a {}", self.kind(index));
            let passes = kind.memory[set].passes();
            let stays = self.stays(index, number + 1 == all);
            let kept = passes.saved + passes.away.last * i64::from(stays);
            saved.push(self.take_level(kept, &name));
            let at = At {
                microbatch: Some(microbatch),
                layer,
            };
            let lowered = Rc::clone(&self.lowered[index][set]);
            self.pass(&moving(&lowered.forward, stays), at, false);
        }
        let copied = self.split.copied_by(stage.0 as usize);
        let copied = self.take_level(copied, "copy of a message");
        if let Some(first) = saved.first_mut() {
            first.extend(copied);
        }
        self.transferred();
        self.give(working);
        saved
    }

    /// Whether what a part of a stage saves stays on the device: of the last layer, where no head runs after it.
    fn stays(&self, index: usize, is_last: bool) -> bool {
        is_last && index < self.case.shape.kinds.len()
    }

    fn backward(&mut self, stage: Stage, microbatch: u32, saved: Vec<Vec<Allocation>>) {
        let memory = self
            .split
            .stage_memory(self.case.shape, stage.0 as usize, self.sets())
            .between(Level::default(), false, false);
        let layers = self.layers(stage);
        let all = layers.len();
        // Where the first layers alone compute all again, they work in another set than those behind them.
        let turns = match self.sets() {
            Sets::First { .. } => {
                let turns = (self.split).turns(self.case.shape, stage.0 as usize, self.sets());
                [turns.behind, turns.first]
            }
            _ => [memory.running(Running::Backward); 2],
        };
        let mut working = self.take_level(turns[0], "working set");
        let mut is_first = false;
        for (number, ((layer, index, set), saved)) in
            layers.into_iter().zip(saved).enumerate().rev()
        {
            let stays = self.stays(index, number + 1 == all);
            let at = At {
                microbatch: Some(microbatch),
                layer,
            };
            if matches!(self.sets(), Sets::First { set: own, .. } if *own == set) && !is_first {
                is_first = true;
                self.give(std::mem::take(&mut working));
                working = self.take_level(turns[1], "working set");
            }
            let lowered = Rc::clone(&self.lowered[index][set]);
            let again: Vec<Work> = lowered.again(0).copied().collect();
            self.work(&again, at, Some(Category::Recompute));
            self.pass(&moving(&lowered.backward, stays), at, true);
            // Beside its own work, which is as long as that of the layer before where layers are alike.
            self.transferred();
            self.give(saved);
        }
        self.settle();
        self.give(working);
    }

    /// The work of one layer; what runs beside its core is started first and awaited last, what runs beside its
    /// shared expert is awaited behind that.
    fn work(&mut self, list: &[Work], at: At, category: Option<Category>) {
        let (beside, own): (Vec<&Work>, Vec<&Work>) = list
            .iter()
            .partition(|work| work.beside == Some(Part::Core));
        let (mut pending, mut sent) = (Vec::new(), Vec::new());
        for work in beside {
            if let Task::Collective(collective) = work.task {
                let category = category.unwrap_or(work.category);
                pending.push(self.start(self.group(work), collective, None, category, at));
            }
        }
        for work in own {
            let group = self.group(work);
            let category = category.unwrap_or(work.category);
            if work.beside == Some(Part::Shared) {
                sent.push(self.start_sending(work, group, category, at));
                continue;
            }
            if work.part != Some(Part::Shared) {
                let sent = sent.drain(..);
                self.events
                    .extend(sent.map(|number| Event::Awaited { number }));
            }
            match work.task {
                Task::Op(op) => {
                    self.events.push(Event::Op {
                        op,
                        category,
                        at,
                        of_weights: work.of_weights,
                    });
                    let routes = matches!(
                        op,
                        Op::Router {
                            pass: Pass::Forward,
                            ..
                        }
                    );
                    if routes && category != Category::Recompute {
                        // Dropless routing reads its counts back.
                        let (name, reads) = ("counts_to_host", 1);
                        self.events.push(Event::HostRead { name, reads });
                    }
                }
                Task::Collective(collective) => self.collective(group, collective, category, at),
                Task::Exchange { .. } => {
                    let number = self.start_sending(work, group, category, at);
                    self.events.push(Event::Awaited { number });
                }
                Task::HostRead => {
                    let (name, reads) = ("counts_to_host", 1);
                    self.events.push(Event::HostRead { name, reads });
                }
                Task::Transfer { bytes, leaves } => {
                    // One that leaves is awaited where the next does.
                    self.transferred();
                    self.transfer(bytes, leaves, at);
                }
            }
        }
        for number in sent.into_iter().chain(pending) {
            self.events.push(Event::Awaited { number });
        }
    }

    /// Starts a dispatch or combine of tokens.
    fn start_sending(&mut self, work: &Work, group: &str, category: Category, at: At) -> u64 {
        match work.task {
            Task::Exchange {
                local,
                remote,
                group: Placement { ranks, .. },
                ..
            } => {
                let cost = crate::price::cost_of(work, self.case.question.costs);
                let collective = Collective {
                    kind: CollectiveKind::AllToAll,
                    bytes: local + remote,
                    ranks,
                    ranks_per_domain: ranks,
                };
                self.start(group, collective, Some(cost.time), category, at)
            }
            Task::Collective(collective) => self.start(group, collective, None, category, at),
            Task::Op(_) | Task::HostRead | Task::Transfer { .. } => {
                unreachable!("{work:?} sends nothing")
            }
        }
    }

    /// Lets the device wait for what was copied last.
    fn transferred(&mut self) {
        let waited = self.transfer.take();
        self.events
            .extend(waited.map(|number| Event::Transferred { number }));
    }

    /// The name of the group that some work runs over.
    fn group(&self, work: &Work) -> &'static str {
        let groups = &self.case.shape.groups;
        match (work.category, work.task) {
            (Category::CpComm, _) => "cp",
            (Category::EpComm, Task::Collective(all)) if all.ranks != groups.ep.ranks => "tp-ep",
            (Category::EpComm, _) => "ep",
            (_, Task::Collective(_)) if work.part == Some(Part::Dispatch) => "etp",
            _ => "tp",
        }
    }

    /// What nothing hides at the end of the step, and the optimizer.
    fn update(&mut self, pipeline_rank: usize) {
        let (layout, at) = (self.case.layout, At::default());
        let work = &self.split.ends[pipeline_rank].work;
        for (group, collective) in named([(layout.tp(), "tp"), (layout.pp(), "pp")], &work.exposed)
        {
            self.collective(group, collective, Category::DpComm, at);
        }
        for &sum in &work.sums {
            self.collective("world", sum, Category::DpComm, at);
        }
        for &op in &work.optimizer {
            let category = Category::Optimizer;
            self.events.push(Event::Op {
                op,
                category,
                at,
                of_weights: false,
            });
        }
        // States that pass through the device: in the stream of copies one comes before the last leaves.
        let streamed = self.split.ends[pipeline_rank].work.streamed.clone();
        let mut leaving = None;
        for bytes in streamed {
            for (bytes, leaves) in [Some((bytes, false)), leaving.replace((bytes, true))]
                .into_iter()
                .flatten()
            {
                self.transfer(bytes, leaves, at);
            }
        }
        if let Some((bytes, leaves)) = leaving {
            self.transfer(bytes, leaves, at);
        }
        self.transferred();
    }

    /// Lets bytes leave for the host or come back, and forgets what was copied before.
    fn transfer(&mut self, bytes: Bytes, leaves: bool, at: At) {
        let number = self.transfers;
        self.transfers += 1;
        self.transfer = Some(number);
        self.events.push(Event::Transfer {
            number,
            bytes,
            leaves,
            at,
        });
    }
}

/// A kind of layer, or behind them the embedding and the head.
fn kind_of(case: Case<'_>, index: usize) -> &Kind {
    let shape = case.shape;
    match index.checked_sub(shape.kinds.len()) {
        None => &shape.kinds[index],
        Some(0) => &shape.embedding,
        Some(_) => &shape.head,
    }
}

/// A collective with the name of its group.
type Named = (&'static str, Collective);

/// The groups of a list of collectives, which has one for each group of several ranks.
fn named(groups: [(u32, &'static str); 2], list: &[Collective]) -> Vec<Named> {
    let groups = groups.into_iter().filter(|(ranks, _)| *ranks > 1);
    let names = groups.map(|(_, name)| name);
    names.zip(list.iter().copied()).collect()
}

/// Work without the transfers of what stays.
fn moving(list: &[Work], stays: bool) -> Vec<Work> {
    let list = list.iter().copied();
    let is_kept = |work: &Work| !(stays && matches!(work.task, Task::Transfer { .. }));
    list.filter(is_kept).collect()
}
