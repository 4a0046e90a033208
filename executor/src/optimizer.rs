//! [`ZeroAdam`]: AdamW whose states are sharded over the ranks that replicate a parameter (ZeRO-1).
//!
//! Dense parameters are reduced and sharded over `dp-cp`, experts over `edp`; both gradients are sums
//! over all tokens of the step, so both are scaled by `1 / (DP * CP)` (Megatron-Core: an expert's
//! gradient already holds the tokens of every rank that sends to it). The global norm counts every
//! element of the model once: each shard on the rank that owns it, and what TP ranks replicate on the
//! first of them, and what both ends of a pipeline hold on the first. Weights of f32 are their own masters; of
//! narrower weights every shard has masters in f32, which begin as the initial values before rounding and are
//! what is saved at the end. Where a plan says so, a shard keeps of its masters what the weights lack (see
//! [`adamw`]), which computes the same to the bit. Moments are f32 or bf16, as a plan says.
//!
//! [`states`] has where these rest. Each bucket of a family ([`Bucket`]) is sharded by itself. Where a plan says so, it is reduced as soon as the
//! last backward pass has left its units ([`Reducing`]), and gathered beside the first forward pass of the next
//! step ([`Gathering`]); else after all passes and after the update.

mod states;

use std::collections::VecDeque;
use std::ops::Range;

use moefold_kernels::adamw::{self, Adamw};
use moefold_kernels::{Dtype, Factor, Scalars, Tensor, TensorClass, elementwise};
use moefold_planner::choice::Overlap;
use moefold_profiles::trace::Category;

use self::states::{Held, States, Stream};
use crate::error::Error;
use crate::model::{Bucket, Family, Parameter, Shard, Slice, Spread, Unit};
use crate::options::Savers;
use crate::rank::Context;
use crate::store::Store;
use crate::transport::{Communicator, Pending};
use crate::weights::{Region, State};

/// Constants of AdamW (decoupled weight decay, arXiv 1711.05101).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamOptions {
    /// Decay rates of the two moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay, on tensors of two or more dimensions.
    pub weight_decay: f64,
    /// Greatest global L2 norm of the gradients; none clips nothing.
    pub clip: Option<f64>,
}

impl Default for AdamOptions {
    fn default() -> Self {
        Self {
            betas: (0.9, 0.95),
            eps: 1e-8,
            weight_decay: 0.1,
            clip: Some(1.0),
        }
    }
}

/// The optimizer of one rank.
#[derive(Debug)]
pub struct ZeroAdam {
    options: AdamOptions,
    overlap: Overlap,
    buckets: Vec<BucketShard>,
    states: Vec<States>,
    /// The correction biases of routers, which this updates not: on the first of their replicas, for
    /// whoever asks what is saved.
    balance: Option<Tensor>,
    steps: u64,
}

/// Some elements of a slice, whose states rest here one after the other.
#[derive(Debug)]
pub(crate) struct Owned<'a> {
    optimizer: &'a ZeroAdam,
    parameter: &'a Parameter,
    slice: &'a Slice,
    elements: Range<usize>,
}

impl<'a> Owned<'a> {
    /// Elements.
    pub(crate) fn len(&self) -> usize {
        self.elements.len()
    }

    /// The rectangles that they form, in order.
    pub(crate) fn regions(&self) -> Vec<Region<'a>> {
        self.slice.region().parts(self.elements.clone())
    }

    /// The states that they have.
    pub(crate) fn states(&self) -> &'static [State] {
        State::of(&self.slice.tensor)
    }

    /// A state of theirs, in order, in f32.
    pub(crate) fn state(&self, state: State) -> Vec<f32> {
        let found = self.optimizer.state(state, self.parameter, self.slice);
        found.expect("moments are where masters are")
    }
}

/// The part of one bucket that this rank updates.
#[derive(Debug)]
struct BucketShard {
    bucket: Bucket,
    group: Communicator,
    /// Whether its gradients are completed after all passes: both ends of a pipeline have some, or TP ranks share
    /// heads, whose sum takes memory.
    late: bool,
    /// Where in the family's buffers the shard lies.
    range: Range<usize>,
    /// The whole bucket.
    all_weights: Tensor,
    all_grads: Tensor,
    /// The shard's part of them.
    weights: Tensor,
    grads: Tensor,
    /// Where the family's states of the shard begin.
    states_at: usize,
    segments: Vec<Segment>,
}

/// A range of a shard whose elements are treated alike.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    /// In the shard.
    range: Range<usize>,
    decays: bool,
    counted: bool,
}

/// Where some elements of a slice have their states.
struct Place<'a> {
    /// None of what nothing updates here.
    bucket: Option<&'a BucketShard>,
    /// Of the slice.
    elements: Range<usize>,
    /// In the bucket's shard.
    own: Range<usize>,
    /// The model's.
    weights: Tensor,
}

/// Reductions that were started before the passes of a step are over.
#[derive(Debug, Default)]
pub struct Reducing {
    /// By bucket, units whose gradients are not whole yet.
    left: Vec<usize>,
    pending: Vec<Pending>,
}

/// Gathers of weights that are under way, in order of use, each with the first unit that waits for it.
#[derive(Debug, Default)]
pub struct Gathering(VecDeque<(usize, Pending)>);

impl Gathering {
    /// Waits for the weights of a unit of `shard`.
    pub fn await_unit(&mut self, cx: &Context, shard: &Shard, unit: Unit) -> Result<(), Error> {
        let number = shard.units.iter().position(|own| *own == unit);
        self.await_until(cx, number.expect("a unit of the rank"))
    }

    /// Waits for all.
    pub fn finish(mut self, cx: &Context) -> Result<(), Error> {
        self.await_until(cx, usize::MAX)
    }

    fn await_until(&mut self, cx: &Context, unit: usize) -> Result<(), Error> {
        while let Some((_, pending)) = self.0.pop_front_if(|(first, _)| *first <= unit) {
            cx.comm(Category::DpComm, "all_gather", || pending.wait())?;
        }
        Ok(())
    }
}

impl ZeroAdam {
    /// States for the rank's shards of `store`, all zero, of the types that `savers` say.
    pub fn new(cx: &Context, store: &Store, options: AdamOptions, savers: &Savers) -> Self {
        let families = [Family::Dense, Family::Expert].into_iter();
        let families = families.filter(|&family| store.shard.buffer_len(family) > 0);
        let states = families.clone().map(|family| {
            let weights = &store.flat(family).weights;
            let len = weights.len() / cx.replicas(family).size();
            States::new(cx, (family, weights.dtype()), len, savers)
        });
        let states = states.collect();
        let buckets = families
            .flat_map(|family| BucketShard::of_family(cx, store, family))
            .collect();
        let balance = &store.flat(Family::Balance).weights;
        let is_first = cx.replicas(Family::Balance).index() == 0;
        Self {
            options,
            overlap: savers.overlap,
            buckets,
            states,
            balance: is_first.then(|| balance.clone()),
            steps: 0,
        }
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Goes on as if it had taken this many steps.
    pub fn resume_at(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// What this rank alone saves of `shard`: what it updates, and of what TP ranks hold in common the
    /// part that it counts.
    pub(crate) fn owned<'a>(&'a self, shard: &'a Shard) -> impl Iterator<Item = Owned<'a>> {
        let counted = shard.parameters.iter().filter(|p| p.counted);
        let slices =
            counted.flat_map(|parameter| parameter.slices.iter().map(move |s| (parameter, s)));
        slices.filter_map(|(parameter, slice)| {
            let elements = self.elements(parameter, slice)?;
            Some(Owned {
                optimizer: self,
                parameter,
                slice,
                elements,
            })
        })
    }

    /// Which elements of a slice of a parameter have their states here, row by row.
    pub fn elements(&self, parameter: &Parameter, slice: &Slice) -> Option<Range<usize>> {
        Some(self.place(parameter, slice)?.elements)
    }

    /// A state here of a slice of a parameter, of its [`ZeroAdam::elements`] in order, in f32; none where it has
    /// no such state.
    pub fn state(&self, state: State, parameter: &Parameter, slice: &Slice) -> Option<Vec<f32>> {
        let place = self.place(parameter, slice)?;
        match place.bucket {
            None => (state == State::Master).then(|| place.weights.to_f32()),
            Some(of) => {
                let Some(tensors) = self.states_of(of).read(state, &of.in_states(&place.own))
                else {
                    return Some(place.weights.to_f32());
                };
                let mut at = 0;
                let values = tensors.iter().flat_map(|own| {
                    let weights = place.weights.view(at, own.dims());
                    at += own.len();
                    if state == State::Master {
                        adamw::masters_of(&weights, own)
                    } else {
                        own.to_f32()
                    }
                });
                Some(values.collect())
            }
        }
    }

    /// Gives a state of a slice's [`ZeroAdam::elements`] its values; the weights of masters have theirs.
    ///
    /// # Panics
    /// When there are others than those, or there is no such state.
    pub fn put(&self, state: State, parameter: &Parameter, slice: &Slice, values: &[f32]) {
        let place = self.place(parameter, slice).expect("states of the rank");
        match place.bucket {
            None => {
                assert!(state == State::Master, "a bias has values alone");
                place.weights.copy_from_f32(values);
            }
            Some(of) => {
                let (states, own) = (self.states_of(of), of.in_states(&place.own));
                let Some(tensors) = states.read(state, &own) else {
                    return place.weights.copy_from_f32(values);
                };
                let mut rest = values;
                for tensor in &tensors {
                    let (own, others) = rest.split_at(tensor.len());
                    if state == State::Master {
                        adamw::put_masters(None, Some(tensor), own);
                    } else {
                        tensor.copy_from_f32(own);
                    }
                    rest = others;
                }
                states.write(state, &own, &tensors);
            }
        }
    }

    /// Where states of a slice of a parameter are, if some are here.
    fn place(&self, parameter: &Parameter, slice: &Slice) -> Option<Place<'_>> {
        let at = parameter.offset + slice.at;
        if parameter.family == Family::Balance {
            let own = at..at + slice.len();
            return Some(Place {
                bucket: None,
                elements: 0..slice.len(),
                weights: view(self.balance.as_ref()?, &own),
                own,
            });
        }
        let of = self
            .buckets
            .iter()
            .find(|of| of.bucket.family == parameter.family && of.bucket.range.contains(&at))?;
        let start = of.range.start.max(at);
        let end = of.range.end.min(at + slice.len());
        (start < end).then(|| {
            let own = start - of.range.start..end - of.range.start;
            Place {
                bucket: Some(of),
                elements: start - at..end - at,
                weights: view(&of.weights, &own),
                own,
            }
        })
    }

    /// The states of a bucket's family.
    fn states_of(&self, of: &BucketShard) -> &States {
        let mut all = self.states.iter();
        let own = all.find(|states| states.family == of.bucket.family);
        own.expect("every family with buckets has states")
    }

    /// The reductions of a step that begins.
    pub fn reducing(&self) -> Reducing {
        Reducing {
            left: (self.buckets.iter())
                .map(|of| of.bucket.units.len())
                .collect(),
            pending: Vec::new(),
        }
    }

    /// Hears that no pass adds to the gradients of a unit any more: where a bucket is whole by that, and the plan
    /// says so, its reduction starts.
    pub fn whole(
        &self,
        cx: &Context,
        store: &Store,
        reducing: &mut Reducing,
        unit: Unit,
    ) -> Result<(), Error> {
        if !self.overlap.grad_reduce {
            return Ok(());
        }
        let unit = store.shard.units.iter().position(|own| *own == unit);
        let unit = unit.expect("a unit of the rank");
        for (of, left) in self.buckets.iter().zip(&mut reducing.left) {
            if !of.bucket.units.contains(&unit) {
                continue;
            }
            *left -= 1;
            if *left == 0 && !of.late {
                sum_over_tp(cx, store, &of.bucket)?;
                reducing.pending.extend(of.start_reduction(cx)?);
            }
        }
        Ok(())
    }

    /// Sums the gradients over their groups, where that has not begun, so that every shard is complete.
    pub fn reduce_gradients(
        &self,
        cx: &Context,
        store: &Store,
        reducing: &mut Reducing,
    ) -> Result<(), Error> {
        sum_over_ends(cx, store)?;
        // Those of which no pass said that they are whole, and those that the line above completes.
        let all = self.buckets.iter().zip(&reducing.left);
        let rest = all.filter(|(of, left)| of.late || **left > 0);
        let rest: Vec<&BucketShard> = rest.map(|(of, _)| of).collect();
        for of in &rest {
            sum_over_tp(cx, store, &of.bucket)?;
        }
        for of in &rest {
            reducing.pending.extend(of.start_reduction(cx)?);
        }
        for pending in reducing.pending.drain(..) {
            cx.comm(Category::DpComm, "reduce_scatter", || pending.wait())?;
        }
        Ok(())
    }

    /// Starts to gather all weights from their shards, in order of use, where the plan says that a step begins
    /// with that.
    pub fn gather(&self, cx: &Context) -> Result<Gathering, Error> {
        let mut gathering = Gathering::default();
        if !self.overlap.param_gather {
            return Ok(gathering);
        }
        let mut buckets: Vec<&BucketShard> = self.buckets.iter().collect();
        buckets.sort_by_key(|of| of.bucket.units.start);
        for of in buckets {
            let pending = of.start_gather(cx)?;
            let first = of.bucket.units.start;
            gathering.0.extend(pending.map(|pending| (first, pending)));
        }
        Ok(gathering)
    }

    /// Adds to number `i` of `sums` the squares of the gradients that this rank counts, scaled as the
    /// update will scale them. The sum over all ranks is the square of the global norm.
    pub fn add_squares(&self, cx: &Context, sums: &Scalars, i: usize) {
        let factor = gradient_scale(cx).powi(2);
        for of in &self.buckets {
            for segment in of.segments.iter().filter(|segment| segment.counted) {
                let grads = view(&of.grads, &segment.range);
                cx.op(Category::Optimizer, || {
                    sums.add_squares(i, factor, &grads);
                });
            }
        }
    }

    /// Clips by the global norm, whose square is number `i` of `sums`, updates the shards, gathers
    /// the weights where the next step does not begin with that, and clears the gradients.
    pub fn step(&mut self, cx: &Context, lr: f64, sums: &Scalars, i: usize) -> Result<(), Error> {
        self.steps += 1;
        let scale = cx.op(Category::Optimizer, || {
            Factor::clipped(sums, i, gradient_scale(cx), self.options.clip)
        });
        let rule = Adamw {
            lr,
            beta1: self.options.betas.0,
            beta2: self.options.betas.1,
            eps: self.options.eps,
            weight_decay: self.options.weight_decay,
            step: self.steps,
        };
        let mut pending: Vec<Pending> = Vec::new();
        let stream = Stream::begin(cx, &mut self.states);
        for bucket in &self.buckets {
            let kept = &self.states_of(bucket).kept;
            bucket.update(cx, kept, &rule, &scale);
            if bucket.ends_in(kept) {
                pending.extend(self.updated(cx, bucket)?);
            }
        }
        let mut all = std::mem::take(&mut self.states);
        stream.run(cx, &mut all, |of, held| {
            let family = |bucket: &&BucketShard| bucket.bucket.family == of.family;
            for bucket in self.buckets.iter().filter(family) {
                bucket.update(cx, held, &rule, &scale);
                if bucket.ends_in(held) {
                    pending.extend(self.updated(cx, bucket)?);
                }
            }
            Ok(())
        })?;
        self.states = all;
        for pending in pending {
            cx.comm(Category::DpComm, "all_gather", || pending.wait())?;
        }
        Ok(())
    }

    /// Starts to gather a bucket that is updated, where the next step does not begin with that, and clears its
    /// gradients.
    fn updated(&self, cx: &Context, bucket: &BucketShard) -> Result<Option<Pending>, Error> {
        let pending = match self.overlap.param_gather {
            true => None,
            false => bucket.start_gather(cx)?,
        };
        cx.op(Category::Optimizer, || {
            elementwise::fill(&bucket.all_grads, 0.0);
        });
        Ok(pending)
    }
}

impl BucketShard {
    /// Those of a family, whose states rest one after the other.
    fn of_family(cx: &Context, store: &Store, family: Family) -> Vec<Self> {
        let group = cx.replicas(family);
        let flat = store.flat(family);
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
                Self {
                    late: shard.in_bucket(bucket).any(|parameter| {
                        (parameter.at_both_ends && !cx.ends.is_solo())
                            || matches!(parameter.spread, Spread::SharedBy(_))
                    }),
                    all_weights: view(&flat.weights, &bucket.range),
                    all_grads: view(&flat.grads, &bucket.range),
                    weights: view(&flat.weights, &range),
                    grads: view(&flat.grads, &range),
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
    fn in_states(&self, own: &Range<usize>) -> Range<usize> {
        own.start + self.states_at..own.end + self.states_at
    }

    /// Whether its last element is among those of which states are held.
    fn ends_in(&self, held: &Held) -> bool {
        let end = self.states_at + self.range.len();
        held.elements.start < end && end <= held.elements.end
    }

    /// Updates those of its elements of which states are held.
    fn update(&self, cx: &Context, held: &Held, rule: &Adamw, scale: &Factor) {
        for segment in &self.segments {
            let in_states = states::common(&self.in_states(&segment.range), &held.elements);
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
    fn start_reduction(&self, cx: &Context) -> Result<Option<Pending>, Error> {
        if self.group.is_solo() {
            return Ok(None);
        }
        let start = || {
            self.group
                .start_reduce_scatter(&self.all_grads, &self.grads)
        };
        Ok(Some(cx.comm(Category::DpComm, "reduce_scatter", start)?))
    }

    /// Starts to gather its weights from the replicas, where there are several.
    fn start_gather(&self, cx: &Context) -> Result<Option<Pending>, Error> {
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

/// Both families' gradients are sums over data-parallel replicas of means over their tokens.
fn gradient_scale(cx: &Context) -> f64 {
    1.0 / f64::from(cx.layout.dp() * cx.layout.cp())
}

/// Completes the gradients of what both ends of a pipeline hold: each has seen its own use of it.
fn sum_over_ends(cx: &Context, store: &Store) -> Result<(), Error> {
    if cx.ends.is_solo() {
        return Ok(());
    }
    let both = store.shard.family(Family::Dense);
    for parameter in both.filter(|parameter| parameter.at_both_ends) {
        let grads = view(&store.flat(Family::Dense).grads, &parameter.range());
        cx.comm(Category::DpComm, "all_reduce", || {
            cx.ends.all_reduce(&grads)
        })?;
    }
    Ok(())
}

/// Completes the gradients of what TP ranks hold of a bucket in common: each has seen its own tokens or heads.
pub(crate) fn sum_over_tp(cx: &Context, store: &Store, bucket: &Bucket) -> Result<(), Error> {
    if cx.tp.is_solo() || bucket.family != Family::Dense {
        return Ok(());
    }
    let grads = &store.flat(Family::Dense).grads;
    let replicated = store.shard.replicated_range(bucket);
    if !replicated.is_empty() {
        cx.comm(Category::TpComm, "all_reduce", || {
            cx.tp.all_reduce(&view(grads, &replicated))
        })?;
    }
    for parameter in store.shard.in_bucket(bucket) {
        let Spread::SharedBy(ranks) = parameter.spread else {
            continue;
        };
        // One block for every distinct head; the ranks that share one add into the same block.
        let own = view(grads, &parameter.range());
        let blocks = cx.tp.size() / ranks;
        let all = cx
            .device
            .zeros(TensorClass::Transient, Dtype::F32, &[blocks * own.len()]);
        let block = all.view(cx.tp.index() / ranks * own.len(), own.dims());
        cx.op(Category::TpComm, || elementwise::copy(&own, &block));
        cx.comm(Category::TpComm, "all_reduce", || cx.tp.all_reduce(&all))?;
        cx.op(Category::TpComm, || elementwise::copy(&block, &own));
    }
    Ok(())
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

fn view(flat: &Tensor, range: &Range<usize>) -> Tensor {
    flat.view(range.start, &[range.len()])
}
