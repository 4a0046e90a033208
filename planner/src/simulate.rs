//! The time of one step: a [`Schedule`] and the durations of its parts, simulated.
//!
//! Every pass of the schedule (stage by microbatch by direction, parts of divided ones each) is a node of a directed acyclic
//! graph, as are the reductions and steps at its end; edges are program order on a rank, messages
//! between ranks, and the barrier of the gradient norm before the optimizer. The longest path, in
//! integer nanoseconds, is the step. Nothing is priced here: [`StageTimes`] come from the cost
//! engine. Links carry one message as fast as many (no contention), and a receive holds up the pass
//! after it, not a send that stands between them.

mod bound;
mod path;
#[cfg(test)]
mod tests;

use std::array;
use std::collections::BTreeSet;
use std::iter::Flatten;

use moefold_profiles::trace::{Lane, Origin};
use moefold_profiles::units::{Instant, Span};
use moefold_profiles::{Category, Trace, TraceSpan};
use petgraph::Graph;
use petgraph::visit::{DfsPostOrder, GraphBase, GraphRef, IntoNeighbors, VisitMap, Visitable};

use crate::layout::Places;
use crate::schedule::{Action, ActionIndex, Microbatch, Schedule, Stage};

pub use bound::lower_bound;
pub use path::LongestPath;

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
    /// By stage: of a pass that runs it forward, or of one of the rank that runs backward alone, at most.
    pub most: Vec<Span>,
}

impl Hidden {
    /// Of stages in some places, by what passes hide together and alone.
    pub fn new(places: Places, together: Vec<Vec<Span>>, alone: Vec<Span>) -> Self {
        let most = |(stage, together): (u32, &Vec<Span>)| {
            let own = places.of_rank(places.rank_of(stage));
            let alone = own.map(|other| alone[other as usize]);
            let both = together.iter().copied().chain(alone).max();
            both.unwrap_or(Span::ZERO)
        };
        Self {
            most: (0..).zip(&together).map(most).collect(),
            together,
            alone,
        }
    }
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

    /// See [`Hidden::most`].
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

/// What passes send each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    /// What a stage gives, to the stage after it.
    Activation,
    /// The gradient of what a stage took, to the stage before it.
    Gradient,
}

/// Work on one rank, the messages it waits for and those it ends with. A step has a million of them, so they are small.
#[derive(Debug, Clone, Copy)]
struct Node {
    rank: u32,
    action: Action,
    /// The work whose results it waits for, and which of them.
    receives: [Option<(NodeIndex, Message)>; 2],
    /// What is sent of its own, in that order.
    sends: [Option<Message>; 2],
}

impl Node {
    fn new(rank: u32, action: Action) -> Self {
        Self {
            rank,
            action,
            receives: [None; 2],
            sends: [None; 2],
        }
    }

    /// The pass that a message of it comes from.
    ///
    /// # Panics
    /// Where it gives no such thing.
    fn gives(&self, message: Message) -> (Stage, Microbatch) {
        match (self.action, message) {
            (Action::Forward(stage, of), Message::Activation)
            | (Action::Backward(stage, of) | Action::BackwardInput(stage, of), Message::Gradient) => {
                (stage, of)
            }
            (Action::Combined { forward, .. }, Message::Activation) => forward,
            (Action::Combined { backward, .. }, Message::Gradient) => backward,
            (other, _) => panic!("{other:?} gives no {message:?}"),
        }
    }

    fn send(&self, message: Message) -> Action {
        let (stage, microbatch) = self.gives(message);
        match message {
            Message::Activation => Action::SendActivation(stage, microbatch),
            Message::Gradient => Action::SendGradient(stage, microbatch),
        }
    }

    /// How long a message of it is under way.
    fn hop(&self, message: Message, times: &StageTimes) -> Span {
        let stage = self.gives(message).0.0 as usize;
        match message {
            Message::Activation => times.hop[stage],
            Message::Gradient => times.hop[stage - 1],
        }
    }

    /// How long the rank's compute stands still after it to send its results.
    fn held(&self, times: &StageTimes) -> Span {
        let sends = self.sends.iter().flatten();
        let sends = sends.filter(|_| !times.hop_overlapped);
        sends.map(|&message| self.hop(message, times)).sum()
    }

    /// How long after its end a message arrives: where sending holds a rank up, after the one that leaves before it.
    fn arrives_after(&self, message: Message, times: &StageTimes) -> Span {
        let hop = self.hop(message, times);
        match self.sends {
            [Some(first), Some(second)] if second == message && !times.hop_overlapped => {
                self.hop(first, times) + hop
            }
            _ => hop,
        }
    }
}

/// A place among all work: rank after rank, each in program order.
type NodeIndex = u32;

/// The dependencies of a schedule, built once and run with many times.
#[derive(Debug)]
pub struct Simulator {
    pp: u32,
    num_stages: u32,
    microbatches: u32,
    nodes: Vec<Node>,
    /// By rank, where its work begins, and where the last ends. A rank's last work is its optimizer step, which waits for
    /// what every other does before its own.
    begins: Vec<usize>,
    /// Each after what it waits for.
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
        let (nodes, begins) = programs(schedule);
        let order = in_order(&nodes, &begins);
        Self {
            pp: schedule.pp,
            num_stages: schedule.num_stages(),
            microbatches: schedule.microbatches,
            nodes,
            begins,
            order,
        }
    }

    /// By stage that runs forward, the chunks that run backward beside it in some pass.
    pub fn combined(&self) -> Vec<BTreeSet<u32>> {
        let mut all = vec![BTreeSet::new(); self.num_stages as usize];
        for node in &self.nodes {
            if let Action::Combined { forward, backward } = node.action {
                all[forward.0.0 as usize].insert(backward.0.0 / self.pp);
            }
        }
        all
    }

    /// The longest path under some times.
    pub fn run(&self, times: &StageTimes) -> Timeline {
        let mut total = Span::ZERO;
        let mut ranks = vec![RankTime::default(); self.pp as usize];
        let mut ready = vec![Instant(0); self.pp as usize];
        self.walk(times, |node, ran| {
            let time = &mut ranks[node.rank as usize];
            let duration = ran.end - ran.start;
            total = total.max(ran.end - Instant(0));
            time.p2p += ran.in_transit + node.held(times);
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
        });
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
        let mut all = vec![Vec::new(); self.pp as usize];
        self.walk(times, |node, ran| {
            let spans = &mut all[node.rank as usize];
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
            for message in node.sends.into_iter().flatten() {
                let message = Part {
                    name: "send_recv".into(),
                    category: Category::PpComm,
                    lane: Lane::Communication,
                    layer: None,
                    duration: node.hop(message, times),
                };
                push(message, ran.end);
            }
        });
        Trace {
            origin: Origin::Predicted,
            spans: all.concat(),
        }
    }

    /// Says of all work when it runs: that of a rank in program order, and each after what it waits for.
    fn walk(&self, times: &StageTimes, mut each: impl FnMut(&Node, Ran)) {
        times.check(self.pp, self.num_stages);
        let mut ends = vec![Instant(0); self.nodes.len()];
        // When the rank's compute is free after some work.
        let freed = |ends: &[Instant], index: usize| ends[index] + self.nodes[index].held(times);
        for &index in &self.order {
            let index = index as usize;
            let node = &self.nodes[index];
            let rank = node.rank as usize;
            let (mut free, mut ready, mut hop) = (Instant(0), Instant(0), Span::ZERO);
            if index > self.begins[rank] {
                free = freed(&ends, index - 1);
            }
            if index + 1 == self.begins[rank + 1] {
                let others = (0..self.pp as usize).filter(|&other| other != rank);
                let others = others.map(|other| freed(&ends, self.begins[other + 1] - 2));
                ready = others.max().unwrap_or(ready);
            }
            for &(from, message) in node.receives.iter().flatten() {
                let (sent, sender) = (ends[from as usize], &self.nodes[from as usize]);
                let arrives = sent + sender.arrives_after(message, times);
                if arrives > ready {
                    (ready, hop) = (arrives, sender.hop(message, times));
                }
            }
            let start = free.max(ready);
            let end = start + self.duration(node, times);
            ends[index] = end;
            let in_transit = hop.min(start - free);
            each(
                node,
                Ran {
                    start,
                    end,
                    free,
                    in_transit,
                },
            );
        }
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

    fn duration(&self, node: &Node, times: &StageTimes) -> Span {
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

/// The work of every rank in program order, connected by messages, and where that of each begins and the last ends.
fn programs(schedule: &Schedule) -> (Vec<Node>, Vec<usize>) {
    let all = schedule.ranks.iter().flatten();
    let work = all.filter(|action| !action.is_message());
    let mut nodes: Vec<Node> = Vec::with_capacity(work.count());
    let mut begins = vec![0];
    let index = ActionIndex::of(schedule);
    // By receive: the work that waits for it.
    let mut waits = vec![NodeIndex::MAX; index.receives()];
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let mut received = Vec::new();
        for &action in actions {
            let sent = match action {
                Action::SendActivation(..) => Message::Activation,
                Action::SendGradient(..) => Message::Gradient,
                Action::RecvActivation(..) | Action::RecvGradient(..) => {
                    received.push(index.number(action));
                    continue;
                }
                _ => {
                    for receive in received.drain(..) {
                        waits[receive] = nodes.len() as NodeIndex;
                    }
                    nodes.push(Node::new(rank as u32, action));
                    continue;
                }
            };
            let last = nodes.last_mut().expect("a send follows a pass");
            assert_eq!(last.send(sent), action, "a send follows its pass");
            let free = last.sends.iter_mut().find(|of| of.is_none());
            *free.expect("a pass gives two things at most") = Some(sent);
        }
        begins.push(nodes.len());
    }
    for from in 0..nodes.len() {
        for message in nodes[from].sends.into_iter().flatten() {
            let receive = nodes[from].send(message).received_as();
            let receive = index.number(receive.expect("a send is received"));
            let receives = &mut nodes[waits[receive] as usize].receives;
            let free = receives.iter_mut().find(|of| of.is_none());
            *free.expect("a pass receives what it works on") = Some((from as NodeIndex, message));
        }
    }
    (nodes, begins)
}

/// All work, each after what it waits for. The steps at the end wait for all ranks.
fn in_order(nodes: &[Node], begins: &[usize]) -> Vec<NodeIndex> {
    let waits = Waits { nodes, begins };
    let steps = begins[1..].iter().map(|end| (end - 1) as NodeIndex);
    let mut order = Vec::with_capacity(nodes.len());
    let mut walk = DfsPostOrder::empty(waits);
    for step in steps.clone() {
        walk.move_to(step - 1);
        while let Some(node) = walk.next(waits) {
            let is_done = |before: NodeIndex| walk.finished.is_visited(&before);
            assert!(
                waits.neighbors(node).all(is_done),
                "a sound schedule has no cycle"
            );
            order.push(node);
        }
    }
    order.extend(steps);
    order
}

/// The graph of the work before the steps, whose edges lead from work to what it waits for.
#[derive(Debug, Clone, Copy)]
struct Waits<'a> {
    nodes: &'a [Node],
    begins: &'a [usize],
}

/// Work that a walk has seen, as petgraph keeps it for graphs of its own.
type Seen = <Graph<(), ()> as Visitable>::Map;

impl GraphBase for Waits<'_> {
    type NodeId = NodeIndex;
    type EdgeId = ();
}

impl GraphRef for Waits<'_> {}

impl IntoNeighbors for Waits<'_> {
    type Neighbors = Flatten<array::IntoIter<Option<NodeIndex>, 3>>;

    fn neighbors(self, node: NodeIndex) -> Self::Neighbors {
        let Node { rank, receives, .. } = self.nodes[node as usize];
        let [one, other] = receives.map(|receive| receive.map(|(from, _)| from));
        let begins = self.begins[rank as usize] == node as usize;
        let before = (!begins).then(|| node - 1);
        [one, other, before].into_iter().flatten()
    }
}

impl Visitable for Waits<'_> {
    type Map = Seen;

    fn visit_map(&self) -> Seen {
        Seen::with_capacity(self.nodes.len())
    }

    fn reset_map(&self, map: &mut Seen) {
        map.clear();
    }
}
