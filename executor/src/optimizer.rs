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
//!
//! A family that rests divided (ZeRO-3, arXiv 1910.02054) has weights and gradients in such shards too. Its units are
//! gathered before each of their passes, where their buffers do not hold them still, and their gradients reduced and
//! added to the shard's after each backward pass.

mod shard;
mod states;

use std::collections::VecDeque;
use std::ops::Range;

use moefold_kernels::adamw::{self, Adamw};
use moefold_kernels::{Dtype, Factor, Scalars, Tensor, TensorClass, elementwise};
use moefold_planner::bucket::Held;
use moefold_planner::choice::Overlap;
use moefold_profiles::trace::Category;

use self::shard::BucketShard;
pub use self::states::Kept;
use self::states::{States, Stream, view};
use crate::error::Error;
use crate::model::{Bucket, Family, Parameter, Shard, Slice, Spread, Unit};
use crate::rank::Context;
use crate::store::Store;
use crate::transport::Pending;
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
    /// Those of one microbatch, by number of their bucket.
    divided: Vec<(usize, Pending)>,
}

/// Gathers of weights that are under way.
#[derive(Debug, Default)]
pub struct Gathering {
    /// In order of use, each with the first unit that waits for it.
    whole: VecDeque<(usize, Pending)>,
    /// What the buffers of divided units hold, or are to.
    held: Held,
    /// Of these, by number of their bucket.
    divided: Vec<(usize, Pending)>,
}

/// Which way a pass goes through units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// In order of use.
    Forward,
    /// The other way.
    Backward,
}

impl Gathering {
    /// Waits for all that a step begins with.
    pub fn finish(mut self, cx: &Context) -> Result<(), Error> {
        self.await_until(cx, usize::MAX)
    }

    fn await_until(&mut self, cx: &Context, unit: usize) -> Result<(), Error> {
        while let Some((_, pending)) = self.whole.pop_front_if(|(first, _)| *first <= unit) {
            cx.comm(Category::DpComm, "all_gather", || pending.wait())?;
        }
        Ok(())
    }
}

impl ZeroAdam {
    /// States for the rank's shards of `store`, all zero.
    pub fn new(
        cx: &Context,
        store: &Store,
        options: AdamOptions,
        kept: Kept,
        overlap: Overlap,
    ) -> Self {
        let families = [Family::Dense, Family::Expert].into_iter();
        let families = families.filter(|&family| store.shard.buffer_len(family) > 0);
        let states = families.clone().map(|family| {
            let len = store.shard.buffer_len(family) / cx.replicas(family).size();
            let weights = store.flat(family).weights.dtype();
            States::new(cx, (family, weights), len, kept)
        });
        let states = states.collect();
        let buckets = families
            .flat_map(|family| BucketShard::of_family(cx, store, family))
            .collect();
        let balance = &store.flat(Family::Balance).weights;
        let is_first = cx.replicas(Family::Balance).index() == 0;
        Self {
            options,
            overlap,
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

    /// The weights here of a slice of a parameter, with which of its elements they are, row by row.
    pub fn weights(&self, parameter: &Parameter, slice: &Slice) -> Option<(Range<usize>, Tensor)> {
        self.part(parameter, slice, |of| &of.weights)
    }

    /// The same of the sums of their gradients, once they are reduced.
    pub fn gradients(
        &self,
        parameter: &Parameter,
        slice: &Slice,
    ) -> Option<(Range<usize>, Tensor)> {
        self.part(parameter, slice, |of| &of.grads)
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
        let (of, elements, own) = self.shard_of(parameter, slice)?;
        Some(Place {
            bucket: Some(of),
            elements,
            weights: view(&of.weights, &own),
            own,
        })
    }

    /// What this rank has of a slice in a tensor of the shard that it is in, with which of its elements that is.
    fn part(
        &self,
        parameter: &Parameter,
        slice: &Slice,
        values: impl Fn(&BucketShard) -> &Tensor,
    ) -> Option<(Range<usize>, Tensor)> {
        let (of, elements, own) = self.shard_of(parameter, slice)?;
        Some((elements, view(values(of), &own)))
    }

    /// The shard that has a part of a slice, if one has: which elements of the slice, and where in the shard.
    fn shard_of(
        &self,
        parameter: &Parameter,
        slice: &Slice,
    ) -> Option<(&BucketShard, Range<usize>, Range<usize>)> {
        let at = parameter.offset + slice.at;
        let of = self
            .buckets
            .iter()
            .find(|of| of.bucket.family == parameter.family && of.bucket.range.contains(&at))?;
        let start = of.range.start.max(at);
        let end = of.range.end.min(at + slice.len());
        (start < end).then(|| {
            let own = start - of.range.start..end - of.range.start;
            (of, start - at..end - at, own)
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
            ..Reducing::default()
        }
    }

    /// Has the weights of a unit there before a pass goes through it: waits for them, and where a unit rests divided
    /// gathers it, and the next one of the pass beside it where the plan says so.
    pub fn come_to(
        &self,
        cx: &Context,
        shard: &Shard,
        gathering: &mut Gathering,
        unit: Unit,
        pass: Pass,
    ) -> Result<(), Error> {
        // What is in no unit of its own is in the head's, which came before.
        let Some(unit) = shard.units.iter().position(|own| *own == unit) else {
            return Ok(());
        };
        if pass == Pass::Forward {
            gathering.await_until(cx, unit)?;
        }
        self.gather_unit(cx, gathering, unit)?;
        let next = match pass {
            Pass::Forward => Some(unit + 1),
            Pass::Backward => unit.checked_sub(1),
        };
        if let Some(next) = next.filter(|_| self.overlap.param_gather) {
            self.gather_unit(cx, gathering, next)?;
        }
        let under_way = std::mem::take(&mut gathering.divided);
        for (number, pending) in under_way {
            if self.buckets[number].bucket.units.start == unit {
                cx.comm(Category::DpComm, "all_gather", || pending.wait())?;
            } else {
                gathering.divided.push((number, pending));
            }
        }
        Ok(())
    }

    /// Starts to gather what of a unit rests divided, where its buffers hold something else.
    fn gather_unit(
        &self,
        cx: &Context,
        gathering: &mut Gathering,
        unit: usize,
    ) -> Result<(), Error> {
        for (number, of) in self.of_unit(unit) {
            let [buffer, _] = of.divided.expect("one that rests divided");
            if gathering.held.take(of.bucket.family as usize, buffer, unit) {
                let pending = of.start_gather(cx)?;
                gathering
                    .divided
                    .extend(pending.map(|pending| (number, pending)));
            }
        }
        Ok(())
    }

    /// The buckets of a unit that rest divided, with their numbers.
    fn of_unit(&self, unit: usize) -> impl Iterator<Item = (usize, &BucketShard)> {
        let all = self.buckets.iter().enumerate();
        all.filter(move |(_, of)| of.divided.is_some() && of.bucket.units.start == unit)
    }

    /// Makes room for the gradients of a unit that a backward pass comes to: those that were in its buffers are
    /// reduced by then.
    pub fn clear_for(
        &self,
        cx: &Context,
        shard: &Shard,
        reducing: &mut Reducing,
        unit: Unit,
    ) -> Result<(), Error> {
        let unit = shard.units.iter().position(|own| *own == unit);
        for (_, of) in unit.into_iter().flat_map(|unit| self.of_unit(unit)) {
            let own = (of.bucket.family, of.divided.map(|[_, grads]| grads));
            self.settle_those(cx, reducing, &|other| {
                (other.bucket.family, other.divided.map(|[_, grads]| grads)) == own
            })?;
        }
        Ok(())
    }

    /// Waits for reductions of gradients that rest divided, and adds them to those of the shards.
    pub fn settle(&self, cx: &Context, reducing: &mut Reducing) -> Result<(), Error> {
        self.settle_those(cx, reducing, &|_| true)
    }

    fn settle_those(
        &self,
        cx: &Context,
        reducing: &mut Reducing,
        those: &dyn Fn(&BucketShard) -> bool,
    ) -> Result<(), Error> {
        let under_way = std::mem::take(&mut reducing.divided);
        for (number, pending) in under_way {
            let of = &self.buckets[number];
            if !those(of) {
                reducing.divided.push((number, pending));
                continue;
            }
            cx.comm(Category::DpComm, "reduce_scatter", || pending.wait())?;
            cx.op(Category::DpComm, || {
                elementwise::add_into(&of.grads, &of.reduced());
                elementwise::fill(&of.all_grads, 0.0);
            });
        }
        Ok(())
    }

    /// Hears that a backward pass has added to all gradients of a unit: of what rests divided their reduction starts.
    pub fn added(
        &self,
        cx: &Context,
        store: &Store,
        reducing: &mut Reducing,
        unit: Unit,
    ) -> Result<(), Error> {
        let unit = store.shard.units.iter().position(|own| *own == unit);
        for (number, of) in unit.into_iter().flat_map(|unit| self.of_unit(unit)) {
            sum_over_tp(cx, &store.shard, &of.bucket, &of.all_grads)?;
            let pending = of.start_reduction(cx)?;
            reducing
                .divided
                .extend(pending.map(|pending| (number, pending)));
        }
        if !self.overlap.grad_reduce {
            self.settle(cx, reducing)?;
        }
        Ok(())
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
        // What is in no unit of its own is in the head's, which is told of by itself.
        let Some(unit) = store.shard.units.iter().position(|own| *own == unit) else {
            return Ok(());
        };
        for (of, left) in self.buckets.iter().zip(&mut reducing.left) {
            if of.divided.is_some() || !of.bucket.units.contains(&unit) {
                continue;
            }
            *left -= 1;
            if *left == 0 && !of.late {
                sum_over_tp(cx, &store.shard, &of.bucket, &of.all_grads)?;
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
        self.settle(cx, reducing)?;
        sum_over_ends(cx, store)?;
        // Those of which no pass said that they are whole, and those that the line above completes.
        let all = self.buckets.iter().zip(&reducing.left);
        let rest = all.filter(|(of, left)| of.divided.is_none() && (of.late || **left > 0));
        let rest: Vec<&BucketShard> = rest.map(|(of, _)| of).collect();
        for of in &rest {
            sum_over_tp(cx, &store.shard, &of.bucket, &of.all_grads)?;
        }
        for of in &rest {
            reducing.pending.extend(of.start_reduction(cx)?);
        }
        for pending in reducing.pending.drain(..) {
            cx.comm(Category::DpComm, "reduce_scatter", || pending.wait())?;
        }
        Ok(())
    }

    /// Starts to gather all weights that rest whole from their shards, in order of use, where the plan says that a
    /// step begins with that.
    pub fn gather(&self, cx: &Context) -> Result<Gathering, Error> {
        let mut gathering = Gathering::default();
        if !self.overlap.param_gather {
            return Ok(gathering);
        }
        let whole = self.buckets.iter().filter(|of| of.divided.is_none());
        let mut buckets: Vec<&BucketShard> = whole.collect();
        buckets.sort_by_key(|of| of.bucket.units.start);
        for of in buckets {
            let pending = of.start_gather(cx)?;
            let first = of.bucket.units.start;
            gathering
                .whole
                .extend(pending.map(|pending| (first, pending)));
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
    /// the weights that rest whole where the next step does not begin with that, and clears the gradients.
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
        let pending = if self.overlap.param_gather || bucket.divided.is_some() {
            None
        } else {
            bucket.start_gather(cx)?
        };
        // Of what rests divided, all gradients are cleared once they are reduced.
        let grads = match bucket.divided {
            None => &bucket.all_grads,
            Some(_) => &bucket.grads,
        };
        cx.op(Category::Optimizer, || elementwise::fill(grads, 0.0));
        Ok(pending)
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

/// Completes the gradients of what TP ranks hold of a bucket in common, of all of which `grads` are: each rank has seen
/// its own tokens or heads.
pub(crate) fn sum_over_tp(
    cx: &Context,
    shard: &Shard,
    bucket: &Bucket,
    grads: &Tensor,
) -> Result<(), Error> {
    if cx.tp.is_solo() || bucket.family != Family::Dense {
        return Ok(());
    }
    let own = |range: Range<usize>| {
        let start = bucket.range.start;
        view(grads, &(range.start - start..range.end - start))
    };
    let replicated = shard.replicated_range(bucket);
    if !replicated.is_empty() {
        cx.comm(Category::TpComm, "all_reduce", || {
            cx.tp.all_reduce(&own(replicated))
        })?;
    }
    for parameter in shard.in_bucket(bucket) {
        let Spread::SharedBy(ranks) = parameter.spread else {
            continue;
        };
        // One block for every distinct head; the ranks that share one add into the same block.
        let own = own(parameter.range());
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
