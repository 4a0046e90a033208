//! [`BucketShard`]: the part of a bucket whose states a rank has, and what is done to it.

use std::ops::Range;

use moefold_kernels::adamw::{self, Adamw};
use moefold_kernels::{Factor, Tensor};
use moefold_profiles::trace::Category;

use super::states::{Held, common, view};
use crate::error::Error;
use crate::model::{Bucket, Family, Shard, Spread};
use crate::rank::Context;
use crate::store::{Flat, Store};
use crate::transport::{Communicator, Pending};
use crate::weights::State;

/// The part of one bucket that this rank updates.
#[derive(Debug)]
pub(super) struct BucketShard {
    pub(super) bucket: Bucket,
    pub(super) group: Communicator,
    /// Whether its gradients are completed after all passes: both ends of a pipeline have some, or TP ranks share
    /// heads, whose sum takes memory.
    pub(super) late: bool,
    /// Of a family that rests divided, which buffers of weights and gradients it is whole in.
    pub(super) divided: Option<[usize; 2]>,
    /// Which elements of the family the shard has.
    pub(super) range: Range<usize>,
    /// The whole bucket.
    pub(super) all_weights: Tensor,
    pub(super) all_grads: Tensor,
    /// The shard's part of them.
    pub(super) weights: Tensor,
    pub(super) grads: Tensor,
    /// Where the family's states of the shard begin.
    pub(super) states_at: usize,
    pub(super) segments: Vec<Segment>,
}

/// A range of a shard whose elements are treated alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    /// In the shard.
    pub(super) range: Range<usize>,
    pub(super) decays: bool,
    pub(super) counted: bool,
}

impl BucketShard {
    /// Those of a family, whose states rest one after the other.
    pub(super) fn of_family(cx: &Context, store: &Store, family: Family) -> Vec<Self> {
        let group = cx.replicas(family);
        let flat = store.flat(family);
        let divided = store.shard.divided(family);
        let shard = &store.shard;
        let buckets = shard
            .buckets
            .iter()
            .filter(|bucket| bucket.family == family);
        let mut at = 0;
        buckets
            .map(|bucket| {
                let len = bucket.range.len() / group.size();
                let start = bucket.range.start + group.index() * len;
                let range = start..start + len;
                let states_at = at;
                at += len;
                let own = states_at..at;
                let resting = if divided.is_some() { &own } else { &range };
                let weights = view(&flat.weights, resting);
                let grads = view(&flat.grads, resting);
                let Flat {
                    weights: all_weights,
                    grads: all_grads,
                } = store.bucket(bucket);
                let unit = bucket.units.start;
                Self {
                    divided: divided.map(|d| [0, 1].map(|kind| d.of_units[kind][unit])),
                    late: shard.in_bucket(bucket).any(|parameter| {
                        (parameter.at_both_ends && !cx.ends.is_solo())
                            || matches!(parameter.spread, Spread::SharedBy(_))
                    }),
                    all_weights,
                    all_grads,
                    weights,
                    grads,
                    states_at,
                    segments: segments(shard, family, &range),
                    group: group.clone(),
                    bucket: bucket.clone(),
                    range,
                }
            })
            .collect()
    }

    /// Some of its elements among the family's states.
    pub(super) fn in_states(&self, own: &Range<usize>) -> Range<usize> {
        own.start + self.states_at..own.end + self.states_at
    }

    /// Whether its last element is among those of which states are held.
    pub(super) fn ends_in(&self, held: &Held) -> bool {
        let end = self.states_at + self.range.len();
        held.elements.start < end && end <= held.elements.end
    }

    /// Updates those of its elements of which states are held.
    pub(super) fn update(&self, cx: &Context, held: &Held, rule: &Adamw, scale: &Factor) {
        for segment in &self.segments {
            let in_states = common(&self.in_states(&segment.range), &held.elements);
            if in_states.is_empty() {
                continue;
            }
            let own = in_states.start - self.states_at..in_states.end - self.states_at;
            let state = |state| {
                let all = held.state(state)?;
                let start = in_states.start - held.elements.start;
                Some(all.view(start, &[own.len()]))
            };
            let moments = [State::FirstMoment, State::SecondMoment].map(state);
            let [first, second] = moments.map(|moment| moment.expect("moments are always kept"));
            let weights = view(&self.weights, &own);
            let rule = Adamw {
                weight_decay: if segment.decays {
                    rule.weight_decay
                } else {
                    0.0
                },
                ..*rule
            };
            cx.op(Category::Optimizer, || {
                adamw::step_by(
                    &state(State::Master).unwrap_or_else(|| weights.clone()),
                    &view(&self.grads, &own),
                    &first,
                    &second,
                    Some(&weights),
                    &rule,
                    scale,
                );
            });
        }
    }

    /// Starts to sum its gradients over the replicas, where there are several.
    pub(super) fn start_reduction(&self, cx: &Context) -> Result<Option<Pending>, Error> {
        if self.group.is_solo() {
            return Ok(None);
        }
        let start = || {
            self.group
                .start_reduce_scatter(&self.all_grads, &self.reduced())
        };
        Ok(Some(cx.comm(Category::DpComm, "reduce_scatter", start)?))
    }

    /// Of all gradients those of the shard: where they are once they are reduced.
    pub(super) fn reduced(&self) -> Tensor {
        let start = self.range.start - self.bucket.range.start;
        self.all_grads.view(start, &[self.range.len()])
    }

    /// Starts to gather its weights from the replicas, where there are several.
    pub(super) fn start_gather(&self, cx: &Context) -> Result<Option<Pending>, Error> {
        if self.group.is_solo() {
            return Ok(None);
        }
        let start = || {
            self.group
                .start_all_gather(&self.weights, &self.all_weights)
        };
        Ok(Some(cx.comm(Category::DpComm, "all_gather", start)?))
    }
}

/// The parameters inside `shard_range` of a family's buffer, neighbours treated alike merged. What
/// lies between parameters is padding, zero in weights, gradients and moments alike.
fn segments(shard: &Shard, family: Family, shard_range: &Range<usize>) -> Vec<Segment> {
    let mut list: Vec<Segment> = Vec::new();
    for parameter in shard.family(family) {
        let range = parameter.range();
        let start = range.start.max(shard_range.start);
        let end = range.end.min(shard_range.end);
        if start >= end {
            continue;
        }
        let segment = Segment {
            range: start - shard_range.start..end - shard_range.start,
            decays: parameter.decays(),
            counted: parameter.counted,
        };
        match list.last_mut() {
            Some(last) if (last.decays, last.counted) == (segment.decays, segment.counted) => {
                last.range.end = segment.range.end;
            }
            _ => list.push(segment),
        }
    }
    list
}
