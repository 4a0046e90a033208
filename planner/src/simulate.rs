//! The time of one step: a [`Schedule`] and the durations of its parts, simulated.
//!
//! Every pass of the schedule (stage by microbatch by direction) is a node of a directed acyclic
//! graph, as are the reductions and steps at its end; edges are program order on a rank, messages
//! between ranks, and the barrier of the gradient norm before the optimizer. The longest path, in
//! integer nanoseconds, is the step. Nothing is priced here: [`StageTimes`] come from the cost
//! engine. Links carry one message as fast as many (no contention), and a receive holds up the pass
//! after it, not a send that stands between them.

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

/// Work on one rank, and the message it ends with.
#[derive(Debug, Clone, Copy)]
struct Node {
    rank: u32,
    action: Action,
    /// The boundary that the result is sent over.
    sends: Option<Stage>,
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
    /// On a schedule that does not [`Schedule::validate`], or sends twice between two passes.
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
            match node.action {
                Action::Forward(..) => time.forward += duration,
                Action::Backward(..) => time.backward += duration,
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
            if let Some(boundary) = node.sends {
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
                        ready = ready.max(end + hop);
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

    fn duration(&self, node: Node, times: &StageTimes) -> Span {
        match node.action {
            Action::Forward(stage, microbatch) if microbatch.0 == 0 => {
                times.first_forward[stage.0 as usize]
            }
            Action::Forward(stage, _) => times.forward[stage.0 as usize],
            Action::Backward(stage, microbatch) if microbatch.0 + 1 == self.microbatches => {
                times.last_backward[stage.0 as usize]
            }
            Action::Backward(stage, _) => times.backward[stage.0 as usize],
            Action::ReduceGradients(stage) => times.reduce[stage.0 as usize],
            Action::OptimizerStep => times.optimizer[node.rank as usize],
            _ => unreachable!("messages are edges"),
        }
    }
}

/// How long a rank's compute stands still after some work to send its result.
fn held(node: &Node, times: &StageTimes) -> Span {
    match node.sends {
        Some(boundary) if !times.hop_overlapped => times.hop[boundary.0 as usize],
        _ => Span::ZERO,
    }
}

/// A message between two nodes, and the boundary it crosses.
type Message = (NodeIndex, NodeIndex, Stage);

/// The work of every rank in program order, and the messages to connect.
fn programs(schedule: &Schedule) -> (DiGraph<Node, Dependency>, Vec<Message>) {
    let passes = 2 * (schedule.num_stages() * schedule.microbatches) as usize;
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
                    let old = graph[from].sends.replace(boundary(action));
                    assert!(old.is_none(), "one send follows a pass");
                    sent.push((from, action));
                }
                _ => {
                    let node = graph.add_node(Node {
                        rank: rank as u32,
                        action,
                        sends: None,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::ScheduleName;

    fn random(seed: &mut u64, below: u64) -> u64 {
        *seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) % below
    }

    fn random_times(seed: &mut u64, pp: u32, stages: u32) -> StageTimes {
        let mut spans = |count: u32, below: u64| -> Vec<Span> {
            (0..count).map(|_| Span(random(seed, below))).collect()
        };
        StageTimes {
            forward: spans(stages, 100),
            first_forward: spans(stages, 150),
            backward: spans(stages, 200),
            last_backward: spans(stages, 250),
            hop: spans(stages - 1, 60),
            hop_overlapped: false,
            reduce: spans(stages, 50),
            optimizer: spans(pp, 80),
        }
    }

    fn schedules() -> impl Iterator<Item = Schedule> {
        let sizes = (1..=5).flat_map(|pp| (1..=4).map(move |vpp| (pp, vpp)));
        sizes.flat_map(|(pp, vpp)| {
            (1..=9)
                .filter_map(move |microbatches| match (pp, vpp) {
                    (1, 1) => Some((ScheduleName::None, microbatches)),
                    (1, _) => None,
                    (_, 1) => Some((ScheduleName::OneFOneB, microbatches)),
                    _ => (microbatches <= 3)
                        .then_some((ScheduleName::Interleaved, microbatches * pp)),
                })
                .map(move |(name, microbatches)| Schedule::new(name, pp, vpp, microbatches))
        })
    }

    /// The dumb way: every rank in turn takes its next action once the message it needs is there.
    fn event_loop(schedule: &Schedule, times: &StageTimes) -> Span {
        let ranks = schedule.ranks.len();
        let mut clock = vec![0_u64; ranks];
        let mut next = vec![0; ranks];
        let mut arrivals = std::collections::HashMap::new();
        let last = schedule.microbatches - 1;
        loop {
            let mut moved = false;
            for rank in 0..ranks {
                let Some(&action) = schedule.ranks[rank].get(next[rank]) else {
                    continue;
                };
                let now = &mut clock[rank];
                match action {
                    Action::RecvActivation(s, m) => match arrivals.get(&(s.0, m.0, true)) {
                        Some(&at) => *now = (*now).max(at),
                        None => continue,
                    },
                    Action::RecvGradient(s, m) => match arrivals.get(&(s.0, m.0, false)) {
                        Some(&at) => *now = (*now).max(at),
                        None => continue,
                    },
                    Action::Forward(s, m) => {
                        let all = [&times.forward, &times.first_forward];
                        *now += all[usize::from(m.0 == 0)][s.0 as usize].0;
                    }
                    Action::Backward(s, m) => {
                        let all = [&times.backward, &times.last_backward];
                        *now += all[usize::from(m.0 == last)][s.0 as usize].0;
                    }
                    Action::SendActivation(s, m) => {
                        let there = *now + times.hop[s.0 as usize].0;
                        arrivals.insert((s.0 + 1, m.0, true), there);
                        if !times.hop_overlapped {
                            *now = there;
                        }
                    }
                    Action::SendGradient(s, m) => {
                        let there = *now + times.hop[s.0 as usize - 1].0;
                        arrivals.insert((s.0 - 1, m.0, false), there);
                        if !times.hop_overlapped {
                            *now = there;
                        }
                    }
                    Action::ReduceGradients(s) => *now += times.reduce[s.0 as usize].0,
                    Action::OptimizerStep => continue,
                }
                next[rank] += 1;
                moved = true;
            }
            if !moved {
                break;
            }
        }
        let barrier = clock.iter().copied().max().expect("ranks");
        let step = times.optimizer.iter().map(|o| o.0).max().expect("ranks");
        Span(barrier + step)
    }

    #[test]
    fn oracle_equals_a_dumb_event_loop() {
        let mut seed = 2026;
        for schedule in schedules() {
            for overlapped in [false, true] {
                let mut times = random_times(&mut seed, schedule.pp, schedule.num_stages());
                times.hop_overlapped = overlapped;
                let timeline = simulate(&schedule, &times);
                let (pp, vpp, m) = (schedule.pp, schedule.vpp, schedule.microbatches);
                assert_eq!(
                    timeline.total,
                    event_loop(&schedule, &times),
                    "pp {pp} vpp {vpp} microbatches {m} overlapped {overlapped}"
                );
            }
        }
    }

    #[test]
    fn law_parts_of_every_rank_sum_to_the_step() {
        let mut seed = 5;
        for schedule in schedules() {
            let mut times = random_times(&mut seed, schedule.pp, schedule.num_stages());
            for overlapped in [false, true] {
                times.hop_overlapped = overlapped;
                let timeline = simulate(&schedule, &times);
                for rank in &timeline.ranks {
                    assert_eq!(rank.total(), timeline.total);
                    assert!(rank.busy() <= timeline.total);
                }
                // Nobody comes to the optimizer later than the critical rank, so what it waits for
                // is only what other stages owe it.
                let slowest = times.optimizer.iter().max().expect("ranks");
                let own = times.optimizer[timeline.critical as usize];
                assert!(timeline.critical_rank().bubble >= *slowest - own);
            }
        }
    }

    #[test]
    fn law_bound_never_exceeds_the_simulation() {
        let mut seed = 11;
        for schedule in schedules() {
            for round in 0..6 {
                let mut times = random_times(&mut seed, schedule.pp, schedule.num_stages());
                times.hop_overlapped = round % 2 == 0;
                if round > 3 {
                    times.reduce.fill(Span::ZERO);
                    times.first_forward.clone_from(&times.forward);
                    times.last_backward.clone_from(&times.backward);
                }
                let bound = lower_bound(schedule.pp, schedule.vpp, schedule.microbatches, &times);
                let total = simulate(&schedule, &times).total;
                assert!(bound <= total, "{bound:?} {total:?}");
            }
        }
    }

    #[test]
    fn law_faster_is_never_slower() {
        let mut seed = 23;
        for schedule in schedules() {
            for overlapped in [false, true] {
                let mut slow = random_times(&mut seed, schedule.pp, schedule.num_stages());
                slow.hop_overlapped = overlapped;
                let simulator = Simulator::new(&schedule);
                let total = simulator.run(&slow).total;
                let mut fast = slow.clone();
                for hop in &mut fast.hop {
                    hop.0 /= 2;
                }
                assert!(simulator.run(&fast).total <= total);
                fast.forward[0].0 /= 2;
                assert!(simulator.run(&fast).total <= total);
                let mut hidden = slow.clone();
                hidden.hop_overlapped = true;
                assert!(simulator.run(&hidden).total <= total);
            }
        }
    }

    /// PipeDream-flush (arXiv 2104.04473, section 2.2): with equal stages and free messages the
    /// bubble is `pp - 1` microbatches, and `vpp` stages a rank divide it.
    #[test]
    fn golden_equal_stages_have_the_published_bubble() {
        let (forward, backward) = (12, 24);
        for schedule in schedules() {
            let stages = schedule.num_stages() as usize;
            let vpp = u64::from(schedule.vpp);
            let (pp, m) = (u64::from(schedule.pp), u64::from(schedule.microbatches));
            // A stage is a vpp-th of a rank's work; 12 and 24 divide by every vpp tried.
            let times = StageTimes::new(
                schedule.pp,
                vec![Span(forward / vpp); stages],
                vec![Span(backward / vpp); stages],
            );
            let expected = Span((m * vpp + pp - 1) * (forward + backward) / vpp);
            let timeline = simulate(&schedule, &times);
            let bound = lower_bound(schedule.pp, schedule.vpp, schedule.microbatches, &times);
            assert_eq!(timeline.total, expected);
            assert_eq!(bound, expected);
            assert_eq!(
                timeline.critical_rank().bubble,
                Span((pp - 1) * (forward + backward) / vpp)
            );
        }
    }

    #[test]
    fn golden_two_ranks_with_exposed_messages() {
        let schedule = Schedule::new(ScheduleName::OneFOneB, 2, 1, 2);
        let mut times = StageTimes::new(2, vec![Span(10); 2], vec![Span(20); 2]);
        times.hop = vec![Span(3)];
        times.reduce = vec![Span(4), Span(5)];
        times.optimizer = vec![Span(7); 2];
        // Rank 0: F 0-10, send -13, F -23, send -26; rank 1: F 13-23, B -43, send -46, F -56,
        // B -76, send -79; rank 0: B 46-66, B 79-99, reduce -103; optimizer -110.
        let timeline = simulate(&schedule, &times);
        assert_eq!(timeline.total, Span(110));
        assert_eq!(timeline.critical, 0);
        assert_eq!(
            *timeline.critical_rank(),
            RankTime {
                forward: Span(20),
                backward: Span(40),
                // Two sends, and the two gradients' ways.
                p2p: Span(3 + 3 + 3 + 3),
                bubble: Span(110 - 20 - 40 - 12 - 4 - 7),
                reduce: Span(4),
                optimizer: Span(7),
            }
        );
        // Beside compute, only the ways that someone waits for remain.
        times.hop_overlapped = true;
        assert_eq!(
            simulate(&schedule, &times).total,
            Span(13 + 10 + 20 + 10 + 20 + 3 + 20 + 11)
        );
    }

    #[test]
    fn law_trace_covers_exactly_the_busy_time() {
        let mut seed = 3;
        for schedule in schedules() {
            let times = random_times(&mut seed, schedule.pp, schedule.num_stages());
            let simulator = Simulator::new(&schedule);
            let timeline = simulator.run(&times);
            let trace = simulator.trace(&times, |action, duration| {
                let (name, category) = match action {
                    Action::Forward(..) => ("forward", Category::Dense),
                    Action::Backward(..) => ("backward", Category::Dense),
                    Action::ReduceGradients(_) => ("reduce", Category::DpComm),
                    _ => ("optimizer", Category::Optimizer),
                };
                vec![Part {
                    name: name.into(),
                    category,
                    lane: Lane::Compute,
                    layer: None,
                    duration,
                }]
            });
            for (rank, time) in timeline.ranks.iter().enumerate() {
                let on_compute = trace
                    .spans
                    .iter()
                    .filter(|span| span.rank == rank as u32 && span.lane == Lane::Compute);
                let busy: Span = on_compute.map(TraceSpan::duration).sum();
                assert_eq!(busy, time.busy());
            }
            let end = trace
                .spans
                .iter()
                .map(|span| span.end)
                .max()
                .expect("spans");
            assert_eq!(end - Instant(0), timeline.total);
        }
    }
}
