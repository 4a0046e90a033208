//! [`LongestPath`]: the work that a step is as long as.

use moefold_profiles::units::{Instant, Span};

use super::{Message, Simulator, StageTimes};
use crate::schedule::{Action, Stage};

/// The longest path through a step, as what it adds up. No step of the same schedule and messages is shorter than that comes to under its
/// times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LongestPath {
    /// By stage: forward passes.
    pub forward: Vec<u32>,
    /// By stage: whether the first of them is one of these.
    pub first_forward: Vec<bool>,
    /// By stage: backward passes, whole or of inputs, the last as any other.
    pub backward: Vec<u32>,
    /// By stage: gradients of weights by themselves, less backward passes of inputs, which are without.
    pub weight: Vec<i64>,
    /// By stage that runs forward and chunk that runs backward: passes that are combined.
    pub together: Vec<Vec<u32>>,
    /// By stage: whole backward passes that run alone.
    pub alone: Vec<u32>,
    /// By stage: whether its gradients are reduced.
    pub reduce: Vec<bool>,
    /// Messages, together.
    pub messages: Span,
    /// The pipeline rank whose optimizer step is the last.
    pub optimizer: u32,
}

impl Simulator {
    /// The longest path of a step, one of them where there are several.
    pub fn longest(&self, times: &StageTimes) -> LongestPath {
        let stages = self.num_stages as usize;
        let mut path = LongestPath {
            forward: vec![0; stages],
            first_forward: vec![false; stages],
            backward: vec![0; stages],
            weight: vec![0; stages],
            together: vec![vec![0; stages / self.pp as usize]; stages],
            alone: vec![0; stages],
            reduce: vec![false; stages],
            messages: Span::ZERO,
            optimizer: 0,
        };
        let mut ran = vec![[Instant(0); 2]; self.nodes.len()];
        let mut order = self.order.iter();
        self.walk(times, |_, own| {
            let index = *order.next().expect("as many as there are");
            ran[index as usize] = [own.start, own.end];
        });
        // All optimizer steps begin when the last rank is ready.
        let steps = (0..self.pp).map(|rank| self.begins[rank as usize + 1] - 1);
        let last = steps.rev().max_by_key(|&step| ran[step][1]);
        let last = last.expect("there is a rank");
        path.optimizer = self.nodes[last].rank;
        let freed = |index: usize| ran[index][1] + self.nodes[index].held(times);
        let ready = (0..self.pp as usize).map(|rank| self.begins[rank + 1] - 2);
        let mut next = ready.rev().max_by_key(|&index| freed(index));
        if let Some(index) = next {
            path.messages += self.nodes[index].held(times);
        }
        while let Some(index) = next {
            let node = &self.nodes[index];
            path.count(node.action, self.pp);
            let [start, _] = ran[index];
            let is_first = self.begins[node.rank as usize] == index;
            let before = (!is_first).then(|| index - 1);
            let own = before.filter(|&before| freed(before) == start);
            let sent = |&(from, message): &(u32, Message)| {
                let (from, sender) = (from as usize, &self.nodes[from as usize]);
                let way = sender.arrives_after(message, times);
                (ran[from][1] + way == start).then_some((from, way))
            };
            next = if start == Instant(0) {
                None
            } else if let Some(before) = own {
                path.messages += self.nodes[before].held(times);
                Some(before)
            } else {
                let (from, way) = node
                    .receives
                    .iter()
                    .flatten()
                    .find_map(sent)
                    .expect("it waits for something");
                path.messages += way;
                Some(from)
            };
        }
        path
    }
}

impl LongestPath {
    fn count(&mut self, action: Action, pp: u32) {
        let at = |stage: Stage| stage.0 as usize;
        match action {
            Action::Forward(stage, microbatch) => {
                self.forward[at(stage)] += 1;
                self.first_forward[at(stage)] |= microbatch.0 == 0;
            }
            Action::Backward(stage, _) => {
                self.backward[at(stage)] += 1;
                self.alone[at(stage)] += 1;
            }
            Action::Combined {
                forward: (forward, microbatch),
                backward: (backward, _),
            } => {
                self.forward[at(forward)] += 1;
                self.first_forward[at(forward)] |= microbatch.0 == 0;
                self.backward[at(backward)] += 1;
                self.together[at(forward)][at(backward) / pp as usize] += 1;
            }
            Action::BackwardInput(stage, _) => {
                self.backward[at(stage)] += 1;
                self.weight[at(stage)] -= 1;
            }
            Action::BackwardWeight(stage, _) => self.weight[at(stage)] += 1,
            Action::ReduceGradients(stage) => self.reduce[at(stage)] = true,
            other => panic!("{other:?} is no work of a path"),
        }
    }
}
