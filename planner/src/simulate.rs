//! The time of one step: a [`Schedule`] and the durations of its parts, simulated.
//!
//! Every pass of the schedule (stage by microbatch by direction, parts of divided ones each) is a node of a directed acyclic
//! graph, as are the reductions and steps at its end; edges are program order on a rank, messages
//! between ranks, and the barrier of the gradient norm before the optimizer. The longest path, in
//! integer nanoseconds, is the step. Nothing is priced here: [`StageTimes`] come from the cost
//! engine. Links carry one message as fast as many (no contention), and a receive holds up the pass
//! after it, not a send that stands between them.

mod bound;
#[cfg(test)]
mod tests;

use moefold_profiles::trace::{Lane, Origin};
use moefold_profiles::units::{Instant, Span};
use moefold_profiles::{Category, Trace, TraceSpan};
use petgraph::Direction::Incoming;
use petgraph::algo::toposort;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;

use crate::schedule::{Action, ActionIndex, Microbatch, Schedule, Stage};

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
    /// By stage: the part of it that only adds to gradients of weights, where the schedule divides backward
    /// passes; else none.
    pub weight: Option<Vec<Span>>,
    /// What is hidden of the exchanges of tokens where the schedule combines passes; else none.
    pub hidden: Option<Hidden>,
    /// By stage: the backward pass of the last microbatch, which may carry the gradient reduction. Where it is
    /// divided, gradients of weights are as in the others.
    pub last_backward: Vec<Span>,
    /// By boundary, between stage `s` and `s + 1`: one message, either way; of none where one rank has both.
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

/// What passes hide of their exchanges of tokens where a forward and a backward run as one. Times of passes are those
/// without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hidden {
    /// By stage that runs forward and chunk that runs backward: by how much both are shorter than one after the other.
    pub together: Vec<Vec<Span>>,
    /// By stage: of a backward pass that runs alone, under gradients of weights that wait.
    pub alone: Vec<Span>,
    /// By stage: of both its passes at most.
    pub most: Vec<Span>,
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
            weight: None,
            hidden: None,
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
        let weight = self.weight.as_ref();
        assert!(
            weight.is_none_or(|weight| weight.len() == stages),
            "weight: one time a stage"
        );
        assert_eq!(self.hop.len(), stages - 1, "hop: one time a boundary");
        assert_eq!(self.optimizer.len(), pp as usize, "one time a rank");
    }
}

impl StageTimes {
    /// What of a backward pass of a stage is left for later.
    fn weight(&self, stage: usize) -> Span {
        self.weight
            .as_ref()
            .map_or(Span::ZERO, |weight| weight[stage])
    }

    /// What a backward pass of a stage hides that runs alone.
    fn alone(&self, stage: usize) -> Span {
        let hidden = self.hidden.as_ref();
        hidden.map_or(Span::ZERO, |hidden| hidden.alone[stage])
    }

    /// What both passes of a stage hide at most.
    fn most(&self, stage: usize) -> Span {
        let hidden = self.hidden.as_ref();
        hidden.map_or(Span::ZERO, |hidden| hidden.most[stage])
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
    /// What forward and backward passes are shorter by, as exchanges of tokens run beside compute: no part.
    pub hidden: Span,
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

/// One stretch of a pass or message, for a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Stem of the op or collective.
    pub name: String,
    /// What it counts as.
    pub category: Category,
    /// The stream it runs on.
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

/// Work on one rank, and the message it ends with.
#[derive(Debug, Clone, Copy)]
struct Node {
    rank: u32,
    action: Action,
    /// The boundaries that the results are sent over.
    sends: [Option<Stage>; 2],
}

/// Why work waits for other work.
#[derive(Debug, Clone, Copy)]
enum Dependency {
    /// The same rank does one after the other.
    Program,
    /// A message over the boundary after a stage.
    Message(Stage),
    /// The gradient norm needs every rank.
    Barrier,
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

/// When work ran, and why not earlier.
#[derive(Debug, Clone, Copy, Default)]
struct Ran {
    start: Instant,
    end: Instant,
    /// When the rank's compute was free before it.
    free: Instant,
    /// The part of the wait from then on in which a message was on its way.
    in_transit: Span,
}

impl Simulator {
    /// Builds the graph.
    ///
    /// # Panics
    /// On a schedule that does not [`Schedule::validate`], or sends more often than passes give something.
    pub fn new(schedule: &Schedule) -> Self {
        let (mut graph, messages) = programs(schedule);
        for (from, to, boundary) in messages {
            graph.add_edge(from, to, Dependency::Message(boundary));
        }
        let steps: Vec<NodeIndex> = graph
            .node_indices()
            .filter(|&node| graph[node].action == Action::OptimizerStep)
            .collect();
        for &step in &steps {
            // A step is the last on its rank, so the work before it is the node before it.
            for last in steps.iter().map(|other| NodeIndex::new(other.index() - 1)) {
                if graph[last].rank != graph[step].rank {
                    graph.add_edge(last, step, Dependency::Barrier);
                }
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
        let mut ready = vec![Instant(0); self.pp as usize];
        for (node, ran) in self.graph.node_weights().zip(&ran) {
            let time = &mut ranks[node.rank as usize];
            let duration = ran.end - ran.start;
            time.p2p += ran.in_transit + held(node, times);
            time.hidden += self.hidden(node.action, times);
            match node.action {
                Action::Forward(..) => time.forward += duration,
                Action::Backward(..) | Action::BackwardInput(..) | Action::BackwardWeight(..) => {
                    time.backward += duration;
                }
                // What both take less is no more the one's than the other's.
                Action::Combined { forward, .. } => {
                    let forward = times.forward[forward.0.0 as usize].min(duration);
                    time.forward += forward;
                    time.backward += duration - forward;
                }
                Action::ReduceGradients(_) => time.reduce += duration,
                _ => {
                    time.optimizer += duration;
                    ready[node.rank as usize] = ran.free;
                }
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
            let mut push = |part: Part, start: Instant| {
                let end = start + part.duration;
                spans.push(TraceSpan {
                    key: None,
                    rank: node.rank,
                    lane: part.lane,
                    name: part.name,
                    category: part.category,
                    start,
                    end,
                    microbatch: node.action.microbatch().map(|m| m.0),
                    layer: part.layer,
                    step: None,
                });
                end
            };
            let mut start = ran.start;
            for part in parts(node.action, ran.end - ran.start) {
                start = push(part, start);
            }
            for boundary in node.sends.into_iter().flatten() {
                let message = Part {
                    name: "send_recv".into(),
                    category: Category::PpComm,
                    lane: Lane::Communication,
                    layer: None,
                    duration: times.hop[boundary.0 as usize],
                };
                push(message, ran.end);
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
            let (mut free, mut ready, mut hop) = (Instant(0), Instant(0), Span::ZERO);
            for edge in self.graph.edges_directed(node, Incoming) {
                let before = edge.source();
                let end = ran[before.index()].end;
                match edge.weight() {
                    Dependency::Program => free = end + held(&self.graph[before], times),
                    Dependency::Barrier => {
                        ready = ready.max(end + held(&self.graph[before], times));
                    }
                    Dependency::Message(boundary) => {
                        hop = times.hop[boundary.0 as usize];
                        ready = ready
                            .max(end + before_sending(&self.graph[before], *boundary, times) + hop);
                    }
                }
            }
            let start = free.max(ready);
            ran[node.index()] = Ran {
                start,
                end: start + self.duration(self.graph[node], times),
                free,
                in_transit: hop.min(start - free),
            };
        }
        ran
    }

    /// What some work hides of exchanges of tokens.
    fn hidden(&self, action: Action, times: &StageTimes) -> Span {
        match (action, &times.hidden) {
            (Action::Combined { forward, backward }, Some(hidden)) => {
                let chunk = backward.0.0 / self.pp;
                hidden.together[forward.0.0 as usize][chunk as usize]
            }
            (Action::Backward(stage, _), Some(hidden)) => hidden.alone[stage.0 as usize],
            _ => Span::ZERO,
        }
    }

    fn duration(&self, node: Node, times: &StageTimes) -> Span {
        let passes = node.action.passes();
        let all: Span = passes
            .map(|pass| self.duration_of(pass, node.rank, times))
            .sum();
        all - self.hidden(node.action, times).min(all)
    }

    fn duration_of(&self, pass: Action, rank: u32, times: &StageTimes) -> Span {
        match pass {
            Action::Forward(stage, microbatch) if microbatch.0 == 0 => {
                times.first_forward[stage.0 as usize]
            }
            Action::Forward(stage, _) => times.forward[stage.0 as usize],
            Action::Backward(stage, microbatch) => self.backward(stage, microbatch, times),
            Action::BackwardInput(stage, microbatch) => {
                self.backward(stage, microbatch, times) - times.weight(stage.0 as usize)
            }
            Action::BackwardWeight(stage, _) => times.weight(stage.0 as usize),
            Action::ReduceGradients(stage) => times.reduce[stage.0 as usize],
            Action::OptimizerStep => times.optimizer[rank as usize],
            _ => unreachable!("messages are edges"),
        }
    }

    fn backward(&self, stage: Stage, microbatch: Microbatch, times: &StageTimes) -> Span {
        let is_last = microbatch.0 + 1 == self.microbatches;
        let all = if is_last {
            &times.last_backward
        } else {
            &times.backward
        };
        all[stage.0 as usize]
    }
}

/// How long a rank's compute stands still after some work to send its result.
fn held(node: &Node, times: &StageTimes) -> Span {
    let sends = node.sends.iter().flatten();
    let sends = sends.filter(|_| !times.hop_overlapped);
    sends.map(|boundary| times.hop[boundary.0 as usize]).sum()
}

/// How long a message over a boundary waits for one that leaves before it, where sending holds a rank up.
fn before_sending(node: &Node, boundary: Stage, times: &StageTimes) -> Span {
    match node.sends {
        [Some(first), Some(second)] if second == boundary && !times.hop_overlapped => {
            times.hop[first.0 as usize]
        }
        _ => Span::ZERO,
    }
}

/// A message between two nodes, and the boundary it crosses.
type Message = (NodeIndex, NodeIndex, Stage);

/// The work of every rank in program order, and the messages to connect.
fn programs(schedule: &Schedule) -> (DiGraph<Node, Dependency>, Vec<Message>) {
    let passes = 3 * (schedule.num_stages() * schedule.microbatches) as usize;
    let mut graph: DiGraph<Node, Dependency> =
        DiGraph::with_capacity(passes + 128, 2 * passes + 128);
    let index = ActionIndex::of(schedule);
    // By receive: the work that waits for it. By send: the work it follows.
    let mut waits = vec![NodeIndex::end(); index.len()];
    let mut sent = Vec::with_capacity(passes);
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let mut before: Option<NodeIndex> = None;
        let mut received = Vec::new();
        for &action in actions {
            match (action, before) {
                (Action::RecvActivation(..) | Action::RecvGradient(..), _) => {
                    received.push(index.number(action));
                }
                (Action::SendActivation(..) | Action::SendGradient(..), Some(from)) => {
                    let most = graph[from].action.passes().count();
                    let free = graph[from].sends[..most].iter_mut().find(|of| of.is_none());
                    *free.expect("one send follows a pass") = Some(boundary(action));
                    sent.push((from, action));
                }
                _ => {
                    let node = graph.add_node(Node {
                        rank: rank as u32,
                        action,
                        sends: [None; 2],
                    });
                    for receive in received.drain(..) {
                        waits[receive] = node;
                    }
                    if let Some(before) = before.replace(node) {
                        graph.add_edge(before, node, Dependency::Program);
                    }
                }
            }
        }
    }
    let messages = sent.into_iter().map(|(from, action)| {
        let receive = action.received_as().expect("a send is received");
        (from, waits[index.number(receive)], boundary(action))
    });
    (graph, messages.collect())
}

/// The boundary that a send crosses, named by the stage before it.
fn boundary(send: Action) -> Stage {
    match send {
        Action::SendActivation(stage, _) => stage,
        Action::SendGradient(Stage(stage), _) => Stage(stage - 1),
        other => unreachable!("{other:?} is no send"),
    }
}
