//! [`Tree`]: which op called which, from the times of a thread's ops.

use std::collections::BTreeMap;

use super::text::{Event, Thread};

/// One op.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    /// Its event.
    pub(super) event: usize,
    /// Who called it.
    parent: Option<usize>,
    /// One past the last node below it; nodes of a thread are in the order of calls.
    end: usize,
}

/// The ops of all threads.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    /// Nodes of each thread, with the starts and ends of their events.
    threads: BTreeMap<Thread, Vec<(f64, f64, usize)>>,
}

impl Tree {
    /// Orders the events that `is_op` picks.
    pub(super) fn of(events: &[Event<'_>], is_op: impl Fn(&Event<'_>) -> bool) -> Self {
        let mut by_thread: BTreeMap<Thread, Vec<usize>> = BTreeMap::new();
        for (index, event) in events.iter().enumerate().filter(|(_, event)| is_op(event)) {
            by_thread.entry(event.thread()).or_default().push(index);
        }
        let mut nodes: Vec<Node> = Vec::new();
        let mut threads = BTreeMap::new();
        for (thread, mut calls) in by_thread {
            // A caller begins no later than what it calls; of those that begin together it ends last.
            calls.sort_by(|&a, &b| {
                let (a, b) = (&events[a], &events[b]);
                let by_start = a.start.total_cmp(&b.start);
                by_start.then(b.duration.total_cmp(&a.duration))
            });
            let mut open: Vec<usize> = Vec::new();
            let mut spans = Vec::with_capacity(calls.len());
            for event in calls {
                let start = events[event].start;
                let end = |node: usize| {
                    let caller: &Event<'_> = &events[node];
                    caller.start + caller.duration
                };
                while let Some(node) = open.pop_if(|node| end(nodes[*node].event) <= start) {
                    nodes[node].end = nodes.len();
                }
                spans.push((start, start + events[event].duration, nodes.len()));
                nodes.push(Node {
                    event,
                    parent: open.last().copied(),
                    end: 0,
                });
                open.push(nodes.len() - 1);
            }
            for node in open {
                nodes[node].end = nodes.len();
            }
            threads.insert(thread, spans);
        }
        Self { nodes, threads }
    }

    pub(super) fn node(&self, node: usize) -> Node {
        self.nodes[node]
    }

    /// All, in the order of their numbers.
    pub(super) fn nodes(&self) -> impl Iterator<Item = Node> + '_ {
        self.nodes.iter().copied()
    }

    /// Those that nobody called.
    pub(super) fn roots(&self) -> impl Iterator<Item = usize> + use<> {
        let roots = self.nodes.iter().enumerate();
        let roots = roots.filter(|(_, node)| node.parent.is_none());
        let roots: Vec<usize> = roots.map(|(index, _)| index).collect();
        roots.into_iter()
    }

    /// A node and all below it.
    pub(super) fn below(&self, node: usize) -> impl Iterator<Item = usize> + use<> {
        node..self.nodes[node].end
    }

    /// What a node called itself.
    pub(super) fn children(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        let below = node + 1..self.nodes[node].end;
        below.filter(move |&other| self.nodes[other].parent == Some(node))
    }

    /// A node, who called it, and so on.
    pub(super) fn upwards(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(Some(node), |&node| self.nodes[node].parent)
    }

    /// The innermost op of a thread that runs at a moment.
    pub(super) fn around(&self, thread: &Thread, moment: f64) -> Option<usize> {
        let spans = self.threads.get(thread)?;
        let after = spans.partition_point(|&(start, ..)| start <= moment);
        let (_, _, last) = *spans.get(after.checked_sub(1)?)?;
        let first = spans[0].2;
        self.upwards(last)
            .find(|&node| spans[node - first].1 > moment)
    }
}
