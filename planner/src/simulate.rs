//! The time of one step: a [`Schedule`] and the durations of its parts, simulated.
//!
//! Every action of the schedule is a node of a directed acyclic graph; edges are program order on a
//! rank, messages between ranks, and the barrier of the gradient norm before the optimizer. The
//! longest path, in integer nanoseconds, is the step. Nothing is priced here: [`StageTimes`] come
//! from the cost engine. Links carry one message as fast as many (no contention).

mod bound;

use moefold_profiles::trace::{Lane, Origin};
use moefold_profiles::units::{Instant, Span};
use moefold_profiles::{Category, Trace, TraceSpan};
use petgraph::Direction::Incoming;
use petgraph::algo::toposort;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;

use crate::schedule::{Action, ActionIndex, Schedule, Stage};

pub use bound::lower_bound;

/// How long the parts of a step take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageTimes {
    /// By stage: one forward pass.
    pub forward: Vec<Span>,
    /// By stage: the forward pass of microbatch 0, which may wait for gathered parameters.
    pub first_forward: Vec<Span>,
    /// By stage: one backward pass, recomputation included.
    pub backward: Vec<Span>,
    /// By stage: the backward pass of the last microbatch, which may carry the gradient reduction.
    pub last_backward: Vec<Span>,
    /// By boundary, between stage `s` and `s + 1`: one message, either way.
    pub hop: Vec<Span>,
    /// Whether messages travel beside compute. If so a receiver waits only for what has not arrived;
    /// if not the sender's compute also stands still while it sends (Megatron without virtual
    /// stages).
    pub hop_overlapped: bool,
    /// By stage: what is left of the gradient reduction after the last backward pass.
    pub reduce: Vec<Span>,
    /// By pipeline rank: gradient norm, optimizer step, what is exposed of the parameter gather.
    pub optimizer: Vec<Span>,
}

impl StageTimes {
    /// Times of passes alone: every microbatch alike, messages, reduction and optimizer free.
    pub fn new(pp: u32, forward: Vec<Span>, backward: Vec<Span>) -> Self {
        let stages = forward.len();
        assert_eq!(stages, backward.len(), "a backward for each forward");
        Self {
            first_forward: forward.clone(),
            last_backward: backward.clone(),
            forward,
            backward,
            hop: vec![Span::ZERO; stages.saturating_sub(1)],
            hop_overlapped: false,
            reduce: vec![Span::ZERO; stages],
            optimizer: vec![Span::ZERO; pp as usize],
        }
    }

    /// Asserts that there is a time for every stage, boundary and rank.
    fn check(&self, pp: u32, num_stages: u32) {
        let stages = num_stages as usize;
        for (what, times) in [
            ("forward", &self.forward),
            ("first_forward", &self.first_forward),
            ("backward", &self.backward),
            ("last_backward", &self.last_backward),
            ("reduce", &self.reduce),
        ] {
            assert_eq!(times.len(), stages, "{what}: one time a stage");
        }
        assert_eq!(self.hop.len(), stages - 1, "hop: one time a boundary");
        assert_eq!(self.optimizer.len(), pp as usize, "one time a rank");
    }
}

/// Where the time of one pipeline rank goes; the parts sum to the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankTime {
    /// Forward passes.
    pub forward: Span,
    /// Backward passes.
    pub backward: Span,
    /// Messages: the rank's compute stands still for one to leave or to arrive.
    pub p2p: Span,
    /// Waiting for work that other ranks have not done yet.
    pub bubble: Span,
    /// Gradient reduction after the last backward pass.
    pub reduce: Span,
    /// The optimizer step.
    pub optimizer: Span,
}

impl RankTime {
    /// The sum of the parts.
    pub fn total(&self) -> Span {
        self.busy() + self.p2p + self.bubble
    }

    /// The parts in which the rank works.
    pub fn busy(&self) -> Span {
        self.forward + self.backward + self.reduce + self.optimizer
    }
}

/// A simulated step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// From the first action to the end of the last.
    pub total: Span,
    /// By pipeline rank, each summing to `total`.
    pub ranks: Vec<RankTime>,
    /// The rank that everyone waits for: the last to come to the optimizer step.
    pub critical: u32,
}

impl Timeline {
    /// Where the time of the critical rank goes.
    pub fn critical_rank(&self) -> &RankTime {
        &self.ranks[self.critical as usize]
    }
}

/// One stretch of a pass or message, for a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Stem of the op or collective.
    pub name: String,
    /// What it counts as.
    pub category: Category,
    /// The queue it runs on.
    pub lane: Lane,
    /// Model layer, where it belongs to one.
    pub layer: Option<u32>,
    /// How long.
    pub duration: Span,
}

/// Simulates one step.
pub fn simulate(schedule: &Schedule, times: &StageTimes) -> Timeline {
    Simulator::new(schedule).run(times)
}

/// Why an action waits for another.
#[derive(Debug, Clone, Copy)]
enum Dependency {
    /// The same rank does one after the other.
    Program,
    /// A message over the boundary after a stage.
    Message(Stage),
    /// The gradient norm needs every rank.
    Barrier,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    rank: u32,
    action: Action,
}

/// The dependencies of a schedule, built once and run with many times.
#[derive(Debug)]
pub struct Simulator {
    pp: u32,
    num_stages: u32,
    microbatches: u32,
    graph: DiGraph<Node, Dependency>,
    order: Vec<NodeIndex>,
}

/// When an action ran, and why not earlier.
#[derive(Debug, Clone, Copy, Default)]
struct Ran {
    start: Instant,
    end: Instant,
    /// From the end of the rank's action before to the start.
    waited: Span,
    /// The part of that wait in which the message was on its way.
    in_transit: Span,
}

impl Simulator {
    /// Builds the graph.
    ///
    /// # Panics
    /// On a schedule that does not [`Schedule::validate`].
    pub fn new(schedule: &Schedule) -> Self {
        let num_actions = schedule.ranks.iter().map(Vec::len).sum();
        let mut graph = DiGraph::with_capacity(num_actions, 2 * num_actions);
        let index = ActionIndex::of(schedule);
        let mut receives = vec![NodeIndex::end(); index.len()];
        let mut steps = Vec::new();
        for (rank, actions) in schedule.ranks.iter().enumerate() {
            let mut before = None;
            for &action in actions {
                let node = graph.add_node(Node {
                    rank: rank as u32,
                    action,
                });
                if let Some(before) = before.replace(node) {
                    graph.add_edge(before, node, Dependency::Program);
                }
                match action {
                    Action::RecvActivation(..) | Action::RecvGradient(..) => {
                        receives[index.number(action)] = node;
                    }
                    Action::OptimizerStep => steps.push(node),
                    _ => {}
                }
            }
        }
        for node in graph.node_indices() {
            let action = graph[node].action;
            if let Some(receive) = action.received_as() {
                let boundary = boundary(action).expect("a message crosses one");
                let receive = receives[index.number(receive)];
                graph.add_edge(node, receive, Dependency::Message(boundary));
            }
        }
        let lasts: Vec<NodeIndex> = steps
            .iter()
            .filter_map(|&step| program_before(&graph, step))
            .collect();
        for (&step, &last) in steps.iter().flat_map(|s| lasts.iter().map(move |l| (s, l))) {
            if graph[last].rank != graph[step].rank {
                graph.add_edge(last, step, Dependency::Barrier);
            }
        }
        let order = toposort(&graph, None).expect("a sound schedule has no cycle");
        Self {
            pp: schedule.pp,
            num_stages: schedule.num_stages(),
            microbatches: schedule.microbatches,
            graph,
            order,
        }
    }

    /// The longest path under some times.
    pub fn run(&self, times: &StageTimes) -> Timeline {
        let ran = self.ran(times);
        let end = ran.iter().map(|r| r.end).max().unwrap_or_default();
        let total = end - Instant(0);
        let mut ranks = vec![RankTime::default(); self.pp as usize];
        let mut ready = vec![Span::ZERO; self.pp as usize];
        for (node, ran) in self.graph.node_weights().zip(&ran) {
            let time = &mut ranks[node.rank as usize];
            let duration = ran.end - ran.start;
            time.p2p += ran.in_transit;
            match node.action {
                Action::Forward(..) => time.forward += duration,
                Action::Backward(..) => time.backward += duration,
                Action::ReduceGradients(_) => time.reduce += duration,
                Action::OptimizerStep => {
                    time.optimizer += duration;
                    ready[node.rank as usize] = ran.start - Instant(0) - ran.waited;
                }
                _ => time.p2p += duration,
            }
        }
        for time in &mut ranks {
            time.bubble = total - time.busy() - time.p2p;
        }
        let critical = (0..self.pp)
            .rev()
            .max_by_key(|&rank| ready[rank as usize])
            .expect("there is a rank");
        Timeline {
            total,
            ranks,
            critical,
        }
    }

    /// The spans of the step. `parts` says what a pass, reduction or optimizer step is made of; they
    /// follow each other, and their durations should sum to the action's.
    pub fn trace(&self, times: &StageTimes, parts: impl Fn(Action, Span) -> Vec<Part>) -> Trace {
        let mut spans = Vec::new();
        for (node, ran) in self.graph.node_weights().zip(self.ran(times)) {
            let &Node { rank, action } = node;
            let microbatch = action.microbatch().map(|m| m.0);
            let span = |part: Part, start: Instant| TraceSpan {
                rank,
                lane: part.lane,
                name: part.name,
                category: part.category,
                start,
                end: start + part.duration,
                microbatch,
                layer: part.layer,
                step: None,
            };
            match action {
                Action::RecvActivation(..) | Action::RecvGradient(..) => {}
                Action::SendActivation(..) | Action::SendGradient(..) => {
                    let message = Part {
                        name: "send_recv".into(),
                        category: Category::PpComm,
                        lane: Lane::Communication,
                        layer: None,
                        duration: times.hop[boundary(action).expect("crosses one").0 as usize],
                    };
                    spans.push(span(message, ran.start));
                }
                _ => {
                    let mut start = ran.start;
                    for part in parts(action, ran.end - ran.start) {
                        let next = start + part.duration;
                        spans.push(span(part, start));
                        start = next;
                    }
                }
            }
        }
        Trace {
            origin: Origin::Predicted,
            spans,
        }
    }

    fn ran(&self, times: &StageTimes) -> Vec<Ran> {
        times.check(self.pp, self.num_stages);
        let mut ran = vec![Ran::default(); self.graph.node_count()];
        for &node in &self.order {
            let (mut free, mut ready, mut sent) = (Instant(0), Instant(0), None);
            for edge in self.graph.edges_directed(node, Incoming) {
                let end = ran[edge.source().index()].end;
                match edge.weight() {
                    Dependency::Program => free = end,
                    Dependency::Barrier => ready = ready.max(end),
                    Dependency::Message(boundary) => {
                        let hop = times.hop[boundary.0 as usize];
                        let late = if times.hop_overlapped {
                            hop
                        } else {
                            Span::ZERO
                        };
                        ready = ready.max(end + late);
                        sent = Some(hop);
                    }
                }
            }
            let start = free.max(ready);
            let waited = start - free;
            ran[node.index()] = Ran {
                start,
                end: start + self.duration(self.graph[node].action, times),
                waited,
                in_transit: sent.map_or(Span::ZERO, |hop| hop.min(waited)),
            };
        }
        ran
    }

    /// How long an action holds its rank's compute.
    fn duration(&self, action: Action, times: &StageTimes) -> Span {
        match action {
            Action::Forward(stage, microbatch) if microbatch.0 == 0 => {
                times.first_forward[stage.0 as usize]
            }
            Action::Forward(stage, _) => times.forward[stage.0 as usize],
            Action::Backward(stage, microbatch) if microbatch.0 + 1 == self.microbatches => {
                times.last_backward[stage.0 as usize]
            }
            Action::Backward(stage, _) => times.backward[stage.0 as usize],
            Action::ReduceGradients(stage) => times.reduce[stage.0 as usize],
            Action::SendActivation(..) | Action::SendGradient(..) if !times.hop_overlapped => {
                times.hop[boundary(action).expect("a message crosses one").0 as usize]
            }
            _ => Span::ZERO,
        }
    }
}

/// The boundary that a send crosses, named by the stage before it.
fn boundary(action: Action) -> Option<Stage> {
    match action {
        Action::SendActivation(stage, _) => Some(stage),
        Action::SendGradient(stage, _) => Some(Stage(stage.0 - 1)),
        _ => None,
    }
}

fn program_before(graph: &DiGraph<Node, Dependency>, node: NodeIndex) -> Option<NodeIndex> {
    graph
        .edges_directed(node, Incoming)
        .find(|edge| matches!(edge.weight(), Dependency::Program))
        .map(|edge| edge.source())
}
