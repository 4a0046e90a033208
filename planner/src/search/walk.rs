//! [`walk`]: the step of a plan on one rank, from what its stack declares.
//!
//! For stacks whose runtime is not at hand to be traced. Passes begin when the simulated pipeline lets
//! them; what a pass works in is taken for as long as it runs, what it saves layer by layer.

use moefold_profiles::pricing::Costs;
use moefold_profiles::units::{Bytes, GIB, Instant};
use moefold_profiles::{ByClass, Collective, TensorClass};

use super::candidate::{Case, StageSplit};
use super::question;
use super::shape::{Kind, Shape};
use crate::choice::Recompute;
use crate::layout::Layout;
use crate::lower::{Lowered, Task, Work, runs_again};
use crate::memory::tape::Level;
use crate::mesh::{self, Placement};
use crate::options::{PlanError, SearchOptions};
use crate::plan::Plan;
use crate::rules::Rules;
use crate::runtime::Runtime;
use crate::schedule::{Action, Schedule, Stage};
use crate::simulate::{Part as Span, Simulator};
use crate::stack::Stack;
use crate::walk::{Allocation, At, Event, Walked, play};
use moefold_profiles::trace::{Category, Lane};

/// Walks the step of `rank` of a plan, as `runtime` declares it, under balanced routing.
pub fn walk(
    plan: &Plan,
    layout: &Layout,
    rank: u32,
    costs: &Costs,
    runtime: &dyn Runtime,
) -> Result<Walked, PlanError> {
    let planned = &plan.planned;
    let options = SearchOptions {
        precision: planned.precision,
        optimizer: planned.optimizer,
        dispatcher: Some(planned.dispatcher),
        recompute: Some(planned.recompute.clone()),
        ..SearchOptions::new(plan.request.batch, planned.stack)
    };
    let rules = Rules::of(&plan.model, &options);
    let (model, cluster, gpus) = (&plan.model, &plan.cluster, layout.gpus());
    let question = question(model, cluster, gpus, &options, costs, runtime, &rules)?;
    let shapes = Shape::all(&question, layout);
    let shape = shapes
        .iter()
        .find(|shape| shape.dispatcher == planned.dispatcher);
    let shape = shape.unwrap_or(&shapes[0]);
    let case = Case {
        question: &question,
        layout,
        shape,
    };
    let split = StageSplit::new(case, planned.pipeline.stages.clone());
    let pipeline_rank = mesh::coordinates(layout, rank).pp;
    let mut walker = Walker {
        events: Vec::new(),
        allocations: 0,
        collectives: 0,
        set: &planned.recompute,
        case,
        split: &split,
    };
    let held = split.held_by(pipeline_rank as usize);
    for class in TensorClass::ALL {
        if class != TensorClass::Overhead && held[class] > Bytes::ZERO {
            walker.take(class, held[class], class.name());
        }
    }
    let setup = std::mem::take(&mut walker.events);
    walker.step(pipeline_rank);
    let mut walked = play(rank, &setup, &walker.events, costs, &question.stack);
    // Of the plan's total what is no tensor.
    let all = planned.predicted.memory_gib_by_pp_rank[pipeline_rank as usize];
    let all = Bytes((all * GIB as f64).round() as u64);
    walked.walk.bytes[TensorClass::Overhead] =
        Bytes(all.0.saturating_sub(walked.walk.peak_bytes.0));
    Ok(walked)
}

/// Writes events.
struct Walker<'a> {
    events: Vec<Event>,
    allocations: u64,
    collectives: u64,
    set: &'a Recompute,
    case: Case<'a>,
    split: &'a StageSplit,
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
        let schedule = Schedule::of(layout);
        let times = self.split.times(self.case.shape, 0);
        let whole = |action: Action, duration| {
            vec![Span {
                name: format!("{action:?}"),
                category: Category::Bubble,
                lane: Lane::Compute,
                layer: None,
                duration,
            }]
        };
        let timeline = Simulator::new(&schedule).trace(&times, whole);
        let starts = timeline
            .spans
            .iter()
            .filter(|span| span.rank == pipeline_rank && span.lane == Lane::Compute);
        let starts: Vec<(String, Option<u32>, Instant)> = starts
            .map(|span| (span.name.clone(), span.microbatch, span.start))
            .collect();
        let mut saved = std::collections::BTreeMap::new();
        for &action in &schedule.ranks[pipeline_rank as usize] {
            let name = format!("{action:?}");
            let start = starts.iter().find(|(known, ..)| *known == name);
            if let Some((_, _, start)) = start {
                self.events.push(Event::NotBefore(*start));
            }
            match action {
                Action::Forward(stage, microbatch) => {
                    let kept = self.forward(stage, microbatch.0);
                    saved.insert((stage, microbatch), kept);
                }
                Action::Backward(stage, microbatch) => {
                    let kept = saved.remove(&(stage, microbatch));
                    self.backward(stage, microbatch.0, kept.unwrap_or_default());
                }
                Action::RecvActivation(..) | Action::RecvGradient(..) => self.message(),
                Action::ReduceGradients(_) => {}
                Action::OptimizerStep => self.update(pipeline_rank as usize),
                Action::SendActivation(..) | Action::SendGradient(..) => {}
            }
        }
    }

    fn message(&mut self) {
        if let Some(message) = super::candidate::message(self.case) {
            self.collective("pp", message, Category::PpComm, At::default());
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
        seconds: Option<moefold_profiles::units::Seconds>,
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

    /// Layers of a stage in order, with the ends of the model where they are.
    fn layers(&self, stage: Stage) -> Vec<(Option<u32>, usize)> {
        let (stage, question) = (stage.0 as usize, self.case.question);
        let shape = self.case.shape;
        let mut all = Vec::new();
        if stage == 0 {
            all.push((None, shape.kinds.len()));
        }
        for &layer in &self.split.stages[stage] {
            all.push((Some(layer), question.kind_of[layer as usize]));
        }
        if stage + 1 == self.split.stages.len() {
            all.push((None, shape.kinds.len() + 1));
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

    fn lowered(&self, kind: &Kind) -> Lowered {
        let Case {
            question,
            layout,
            shape,
        } = self.case;
        question.lowered(layout, shape, kind)
    }

    fn kind_of(&self, index: usize) -> Kind {
        let shape = self.case.shape;
        match index.checked_sub(shape.kinds.len()) {
            None => shape.kinds[index].clone(),
            Some(0) => shape.embedding.clone(),
            Some(_) => shape.head.clone(),
        }
    }

    fn forward(&mut self, stage: Stage, microbatch: u32) -> Vec<Vec<Allocation>> {
        let memory = self
            .split
            .stage_memory(self.case.shape, stage.0 as usize, 0);
        let working = self.take_level(memory.running(false), "working set");
        let mut saved = Vec::new();
        for (layer, index) in self.layers(stage) {
            let kind = self.kind_of(index);
            let name = format!("saved by a {}", self.kind(index));
            saved.push(self.take_level(kind.memory[0].passes.saved, &name));
            let at = At {
                microbatch: Some(microbatch),
                layer,
            };
            let lowered = self.lowered(&kind);
            self.work(&lowered.forward, at, None);
        }
        self.give(working);
        saved
    }

    fn backward(&mut self, stage: Stage, microbatch: u32, saved: Vec<Vec<Allocation>>) {
        let memory = self
            .split
            .stage_memory(self.case.shape, stage.0 as usize, 0);
        let working = self.take_level(memory.running(true), "working set");
        let layers = self.layers(stage);
        for ((layer, index), saved) in layers.into_iter().zip(saved).rev() {
            let kind = self.kind_of(index);
            let at = At {
                microbatch: Some(microbatch),
                layer,
            };
            let lowered = self.lowered(&kind);
            let again: Vec<Work> = lowered
                .forward
                .iter()
                .filter(|work| work.part.is_some_and(|part| runs_again(self.set, part)))
                .copied()
                .collect();
            self.work(&again, at, Some(Category::Recompute));
            self.work(&lowered.backward, at, None);
            self.give(saved);
        }
        self.give(working);
    }

    /// The work of one layer; what runs beside its core is started first and awaited last.
    fn work(&mut self, list: &[Work], at: At, category: Option<Category>) {
        let (beside, own): (Vec<&Work>, Vec<&Work>) =
            list.iter().partition(|work| work.beside_core);
        let mut pending = Vec::new();
        for work in beside {
            if let Task::Collective(collective) = work.task {
                let category = category.unwrap_or(work.category);
                pending.push(self.start(self.group(work), collective, None, category, at));
            }
        }
        for work in own {
            let group = self.group(work);
            let category = category.unwrap_or(work.category);
            match work.task {
                Task::Op(op) => {
                    if let (moefold_profiles::Op::Router { .. }, Stack::Megatron(_)) =
                        (op, &self.case.question.stack)
                        && op.pass() == Some(moefold_profiles::Pass::Forward)
                    {
                        let (name, reads) = ("counts_to_host", 1);
                        self.events.push(Event::HostRead { name, reads });
                    }
                    self.events.push(Event::Op { op, category, at });
                }
                Task::Collective(collective) => self.collective(group, collective, category, at),
                Task::Exchange {
                    local,
                    remote,
                    group: Placement { ranks, .. },
                } => {
                    let cost = crate::price::cost_of(work, self.case.question.costs);
                    let collective = Collective {
                        kind: moefold_profiles::CollectiveKind::AllToAll,
                        bytes: local + remote,
                        ranks,
                        ranks_per_domain: ranks,
                    };
                    let number = self.start(group, collective, Some(cost.time), category, at);
                    self.events.push(Event::Awaited { number });
                }
                Task::HostRead => {
                    let (name, reads) = ("counts_to_host", 1);
                    self.events.push(Event::HostRead { name, reads });
                }
            }
        }
        for number in pending {
            self.events.push(Event::Awaited { number });
        }
    }

    /// The name of the group that some work runs over.
    fn group(&self, work: &Work) -> &'static str {
        let groups = &self.case.shape.groups;
        match (work.category, work.task) {
            (Category::CpComm, _) => "cp",
            (Category::EpComm, Task::Collective(all)) if all.ranks != groups.ep.ranks => "tp-ep",
            (Category::EpComm, _) => "ep",
            (_, Task::Collective(_)) if work.part == Some(crate::lower::Part::Dispatch) => "etp",
            _ => "tp",
        }
    }

    /// The end of the step.
    fn update(&mut self, pipeline_rank: usize) {
        let work = self.split.ends[pipeline_rank].work.clone();
        let at = At::default();
        let layout = self.case.layout;
        let named = |names: [(u32, &'static str); 2], list: &[Collective]| -> Vec<_> {
            let names = names.into_iter().filter(|(ranks, _)| *ranks > 1);
            names
                .map(|(_, name)| name)
                .zip(list.iter().copied())
                .collect()
        };
        // In the order of [`crate::lower::ends::step`].
        let replicas = [(layout.dp() * layout.cp(), "dp-cp"), (layout.edp(), "edp")];
        let shared = [(layout.tp(), "tp"), (layout.pp(), "pp")];
        let before = [named(replicas, &work.reduce), named(shared, &work.exposed)].concat();
        let after = named(replicas, &work.gather);
        for (group, collective) in before {
            self.collective(group, collective, Category::DpComm, at);
        }
        for op in work.optimizer {
            let category = Category::Optimizer;
            self.events.push(Event::Op { op, category, at });
        }
        for (group, collective) in after {
            self.collective(group, collective, Category::DpComm, at);
        }
    }
}
