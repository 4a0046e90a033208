//! [`Traced`]: what the planner asks about this executor, answered by running its modules.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use moefold_kernels::cuda::{Architecture, Properties};
use moefold_kernels::rope;
use moefold_kernels::{Device, TensorClass};
use moefold_planner::bucket::Division;
use moefold_planner::choice::{CpComm, Module, Offload, Overlap, Recompute, Zero};
use moefold_planner::layout::{Batch, Layout};
use moefold_planner::local::Local;
use moefold_planner::model::{Layer, Model, count as counted};
use moefold_planner::runtime::{
    Again, Block, Height as _, Level, Lowered, Passes, Piece, Runtime, Setting, StageMemory,
    StepMemory, Stretches, Task, Work,
};
use moefold_planner::shard::{self, Shard as Counts};
use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Cluster, Dtype, Precision};

use super::heard::{Heard, Item, Items, OfWeights, back_in_turns, in_turns};
use super::walk::piece_on;
use super::{Assumed, Tape};
use crate::data::Packing;
use crate::error::Error;
use crate::model::{self, Family, Parameter, Shard, Spread};
use crate::moe::balance::Balancing;
use crate::moe::dispatch::Dispatching;
use crate::moe::{RoutingStats, Sparse};
use crate::optimizer::sum_over_tp;
use crate::rank::Context;
use crate::rotary::Rotation;
use crate::stage::{StageModel, StageOutput, Tokens, Visitor};
use crate::step::{HostTokens, keep_offsets, loss_at, offsets, rotations, routers, sums, upload};
use crate::store::Store;
use crate::support;

/// Answers for this executor, about one model on the devices of one cluster. What was asked before is
/// remembered by the sizes that it depends on.
pub struct Traced<'a> {
    model: &'a Model,
    /// The GPU; absent on a CPU.
    gpu: Option<Properties>,
    pieces: Mutex<BTreeMap<Sizes, Arc<Answer>>>,
    steps: Mutex<BTreeMap<[u64; 4], [Level; 2]>>,
}

/// What is traced as one, and the sizes that decide what it does: `[precision and what is offloaded, cp_comm,
/// seq_len, whether the backward pass is divided, whether weights rest so, whether gradients of weights are delayed]`; of what attention's
/// degrees decide `[tp, mbs, cp]`; of routed experts, which know nothing of them but tp where an expert is
/// shared, or where gradients of the router are completed in every pass, `[ep, etp and tp, local tokens, rows of the rank's experts]` and how tokens go there `[dispatcher,
/// capacity, what is dropped, padding]`. Depths of multi-token prediction, which are the head's, are decided by
/// all.
type Sizes = (Unit, [u64; 4], [u64; 3], [u64; 3], [u64; 4]);

/// What is traced as one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Unit {
    /// A piece of the model, with its modules that run again.
    Piece(model::Piece, Recompute),
    /// A decoder layer that runs again as a whole.
    Whole(u32),
}

/// Events of a pass of a piece, about as many as most have.
const EVENTS: usize = 256;

/// Where a piece runs.
#[derive(Clone, Copy)]
struct Site<'a> {
    layout: &'a Layout,
    local: &'a Local,
    precision: Precision,
    cp_comm: CpComm,
    dispatching: Dispatching,
    shared_beside: bool,
    /// Whether gradients are completed after every backward pass.
    sharded: bool,
    of_weights: OfWeights,
    offload: Offload,
}

impl<'a> From<&Setting<'a>> for Site<'a> {
    fn from(setting: &Setting<'a>) -> Self {
        Self {
            layout: setting.layout,
            local: setting.local,
            precision: setting.precision,
            cp_comm: setting.cp_comm,
            dispatching: dispatching(setting),
            shared_beside: setting.shared_beside,
            sharded: setting.sharded,
            of_weights: OfWeights::AtOnce,
            offload: setting.offload,
        }
    }
}

impl Site<'_> {
    /// Units of their own where their gradients are completed by themselves; weights are no part of what is traced.
    fn division(&self) -> Division {
        if self.sharded {
            return Division::of(Zero::Fsdp, Overlap::default(), None);
        }
        Division::Whole
    }
}

fn dispatching(setting: &Setting<'_>) -> Dispatching {
    Dispatching {
        dispatcher: setting.dispatcher,
        capacity: setting.capacity,
    }
}

/// Completes gradients of units that rest divided, as the optimizer does.
struct Completing<'a> {
    /// None where they rest whole.
    store: Option<&'a Store>,
}

impl Visitor for Completing<'_> {
    fn added(&mut self, cx: &Context, unit: model::Unit) -> Result<(), Error> {
        let Some(store) = self.store else {
            return Ok(());
        };
        let shard = &store.shard;
        let own = shard.units.iter().position(|own| *own == unit);
        for bucket in &shard.buckets {
            if Some(bucket.units.start) == own {
                sum_over_tp(cx, shard, bucket, &store.bucket(bucket).grads)?;
            }
        }
        Ok(())
    }
}

/// What one piece does with one microbatch.
#[derive(Debug)]
struct Answer {
    forward: Items,
    /// What of the forward pass runs again in the backward pass.
    again: Items,
    /// All else of it.
    backward: Items,
    /// What leaves for the host in the stream of copies, if there is one.
    leaves: Bytes,
    passes: Passes,
    /// The same, cut where they pause.
    stretches: Stretches,
    padding: Counts,
    /// The most that completing its gradients has alive.
    update: Level,
    /// Of each depth of multi-token prediction of the head parameters, and what is between them.
    depths: Vec<[Counts; 2]>,
    /// What it has beside parameters: correction biases.
    beside: Level,
    /// The largest tensor it allocates.
    largest: Bytes,
}

impl<'a> Traced<'a> {
    /// Answers about `model` on the devices of `cluster`.
    pub fn new(model: &'a Model, cluster: &Cluster) -> Self {
        Self::on(model, properties(cluster))
    }

    /// Answers about `model` on a GPU, or without one on a CPU.
    pub fn on(model: &'a Model, gpu: Option<Properties>) -> Self {
        Self {
            model,
            gpu,
            pieces: Mutex::default(),
            steps: Mutex::default(),
        }
    }

    /// A device without memory that stands for the cluster's.
    fn device(&self, dtype: Dtype) -> Device {
        match &self.gpu {
            None => Device::meta_cpu(),
            Some(gpu) => Device::meta_cuda(gpu.clone(), dtype),
        }
    }

    /// What a piece does, nothing recomputed.
    fn answer(&self, site: Site<'_>, piece: model::Piece) -> Arc<Answer> {
        self.answer_of(site, Unit::Piece(piece, Recompute::None))
    }

    fn answer_of(&self, site: Site<'_>, unit: Unit) -> Arc<Answer> {
        let local = site.local;
        let routed = |layer: u32| self.model.layer(layer).moe();
        let (by_attention, by_experts) = match unit {
            Unit::Piece(model::Piece::FeedForward(layer), _) => {
                (routed(layer).is_none(), routed(layer))
            }
            Unit::Piece(model::Piece::Head, _) => {
                (true, self.model.mtp.iter().find_map(Layer::moe))
            }
            Unit::Piece(..) => (true, None),
            Unit::Whole(layer) => (true, routed(layer)),
        };
        let [mut attention, mut experts] = [[0; 3]; 2];
        let mut dispatching = [0; 4];
        if by_attention {
            attention = [local.tp, local.mbs, local.cp];
        }
        if let Some(moe) = by_experts {
            let knows_tp = moe.shared.is_some() || site.sharded;
            let tp = if knows_tp { local.tp } else { 0 };
            let degrees = local.ep << 42 | local.etp << 21 | tp;
            experts = [degrees, local.tokens_local, local.expert_rows];
            // A rank with all experts is the same under every dispatcher.
            let sends = local.ep * local.etp > 1;
            dispatching[0] = u64::from(sends) * site.dispatching.dispatcher as u64;
            let beside = sends && site.shared_beside && moe.shared.is_some();
            dispatching[0] |= u64::from(beside) << 8;
            if let Some(capacity) = site.dispatching.capacity {
                let each = capacity.rows(local.tokens_local, moe.topk, moe.experts);
                let policy = capacity.drop_policy as u64;
                dispatching[1..].copy_from_slice(&[each, policy, u64::from(capacity.pad)]);
            }
        }
        let kind = site.precision as u64 | u64::from(site.offload.bits()) << 32;
        let always = [
            kind,
            site.cp_comm as u64,
            local.seq_len,
            site.of_weights as u64 | u64::from(site.sharded) << 2,
        ];
        let sizes = (unit, always, attention, experts, dispatching);
        let known = |pieces: &BTreeMap<Sizes, Arc<Answer>>| pieces.get(&sizes).cloned();
        if let Some(answer) = known(&self.pieces.lock().unwrap_or_else(PoisonError::into_inner)) {
            return answer;
        }
        let answer = self.trace(site, &sizes.0);
        let answer = Arc::new(answer.expect("ranks that are assumed to be there do not fail"));
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        pieces.insert(sizes, Arc::clone(&answer));
        answer
    }

    /// Runs a unit forward and backward on a rank that has as much as any.
    fn trace(&self, site: Site<'_>, unit: &Unit) -> Result<Answer, Error> {
        let (pieces, recompute) = match unit {
            Unit::Piece(piece, recompute) => (vec![*piece], recompute),
            Unit::Whole(layer) => (pieces_of(self.model, *layer), &Recompute::Full),
        };
        let has = |piece| pieces.contains(&piece);
        let (model, local, layout) = (self.model, site.local, site.layout);
        let device = self.device(site.precision.activation());
        let tape = Tape::with_room(EVENTS);
        let assumed = Assumed::Load(self.load(local));
        let mut cx = piece_on(device, layout, assumed, &tape);
        cx.cp_comm = site.cp_comm;
        let at = cx.at;
        let shard = Shard::unsliced(model, layout, &at, &pieces, site.division());
        let store = Store::new(&cx.device, shard);
        let sparse = Sparse {
            balancing: Balancing::default(),
            dispatching: site.dispatching,
            shared_beside: site.shared_beside,
        };
        let again = |_| recompute.clone();
        let to_save = (&again as &dyn Fn(u32) -> Recompute, site.offload);
        let stage = StageModel::new(model, &store, &pieces, sparse, to_save, 0.0).going_on();
        let depths = match pieces[0] {
            model::Piece::Head => model.mtp.len(),
            _ => 0,
        };
        let sums = sums(&cx, depths);
        let rope = match pieces[0] {
            model::Piece::Mixer(_) | model::Piece::Head => {
                rotations(&cx, model, local.seq_len as usize, local.mbs as usize)
            }
            _ => rope::table(&cx.device, &(0..0), &[1.0], 1.0),
        };
        let integers = || {
            let dims = [local.tokens as usize];
            cx.device.empty(TensorClass::Activations, Dtype::I32, &dims)
        };
        let tokens = Tokens {
            ids: integers(),
            targets: integers(),
            sequences: (local.mbs as usize).into(),
            rope: &rope,
            loss_scale: 1.0,
            ahead: (0..depths).map(|_| [integers(), integers()]).collect(),
        };
        let stream = || {
            let dims = [local.tokens_local as usize, model.hidden as usize];
            let dtype = cx.device.dtype();
            cx.device.empty(TensorClass::Activations, dtype, &dims)
        };
        // Where a router leaves its offsets.
        let router = routers(model).next();
        let kept = offsets(&cx, &site.dispatching, router.as_slice(), 1);
        // What comes from the piece before, and from the one after.
        let x = (!has(model::Piece::Embedding)).then(stream);
        let dy = (!has(model::Piece::Head)).then(stream);

        tape.wipe();
        let routed = |_, stats: RoutingStats| {
            if let Some(kept) = &kept {
                keep_offsets(&cx, &stats, &kept.reshape(&[kept.len()]));
            }
        };
        // The residual stream is the next piece's, which gives it back.
        let given = |output| match output {
            StageOutput::Hidden(hidden) => Some(hidden),
            StageOutput::Losses(all) => {
                for (number, losses) in all.iter().enumerate() {
                    let at = loss_at(number);
                    cx.op(Category::Dense, || sums.add_sum(at, 1.0, losses));
                }
                None
            }
        };
        let mut nobody = ();
        let pass = stage.forward(&cx, x, &tokens, &mut nobody, routed);
        let ((hidden, saved), forward) =
            in_turns(&cx, &tape, pass, |(output, saved)| (given(output), saved))?;
        let mut completing = Completing {
            store: site.sharded.then_some(&store),
        };
        let pass = stage.backward(&cx, dy, &tokens, saved, &mut completing);
        let ((dx, mut backward), left) = back_in_turns(&cx, &tape, site.of_weights, pass)?;
        left.run(&cx.recorder);
        let weight = tape.read(Heard::of);
        if let Some(first) = backward.stretches.first_mut() {
            first.settles = settles(model, pieces[0]);
        }
        let stretches = Stretches {
            forward: forward.stretches,
            backward: backward.stretches,
        };
        let (forward, backward) = (forward.heard, backward.heard);
        for bucket in store.shard.buckets.iter().filter(|_| !site.sharded) {
            let grads = store.bucket(bucket).grads;
            sum_over_tp(&cx, &store.shard, bucket, &grads)?;
        }
        let update = tape.read(Heard::of);
        drop((hidden, dx));
        let heard = [forward, backward, weight, update];
        let moves = !site.offload.is_none();
        let mut answer = Answer::of(heard, stretches, &store.shard, moves);
        answer.forget(site.of_weights, unit);
        Ok(answer)
    }

    /// Rows of the rank's experts over the mean of all ranks.
    fn load(&self, local: &Local) -> f64 {
        let mean = |topk| (local.tokens_local * topk * local.etp) as f64;
        let moe = self.model.moe();
        moe.map_or(1.0, |moe| local.expert_rows as f64 / mean(moe.topk))
    }

    fn pieces(&self, piece: Piece<'_>) -> Vec<model::Piece> {
        match piece {
            Piece::Embedding => vec![model::Piece::Embedding],
            Piece::Head => vec![model::Piece::Head],
            Piece::Layer(layer) => blocks(self.model, layer),
        }
    }
}

impl Answer {
    /// Of what was heard of the forward pass, the backward pass, gradients of weights left for later, and the sums
    /// that complete gradients; `moves` says whether saved tensors leave for the host.
    fn of(
        [forward, backward, weight, update]: [Heard; 4],
        stretches: Stretches,
        shard: &Shard,
        moves: bool,
    ) -> Self {
        let mut passes = Passes::divided(&forward.account, &backward.account, &weight.account);
        if moves {
            passes = passes.leaving(forward.on_host);
        }
        let largest = [forward.largest, backward.largest, weight.largest];
        let items = backward.items.into_iter().chain(weight.items);
        let (again, rest): (Vec<Item>, Vec<Item>) =
            items.partition(|item| item.category == Category::Recompute);
        let biases = Dtype::F32.bytes(shard.balance_len as u64);
        Self {
            leaves: forward.leaves,
            stretches,
            passes,
            padding: padding(&shard.parameters),
            depths: depths(shard),
            beside: Level::of(TensorClass::Weights, biases),
            update: update.account.peak(),
            largest: largest.into_iter().fold(update.largest, Bytes::max),
            forward: forward.items.into_iter().collect(),
            again: again.into_iter().collect(),
            backward: rest.into_iter().collect(),
        }
    }

    /// Drops the lists that nobody asks for, by far the most of an answer: work is asked for with gradients of
    /// weights at once, and of what runs again only that.
    fn forget(&mut self, of_weights: OfWeights, unit: &Unit) {
        if !matches!(unit, Unit::Piece(_, Recompute::None)) {
            (self.forward, self.backward) = Default::default();
        }
        if of_weights != OfWeights::AtOnce {
            (self.forward, self.again, self.backward) = Default::default();
        }
    }
}

/// Final norm and head, and the depths of multi-token prediction: each has its projection whole, and where the
/// first stage is on another rank they have a copy of the embedding.
fn head_with_depths(model: &Model, local: &Local, parts_ends: bool) -> Counts {
    let mut counts = shard::head(model, local);
    if parts_ends && !model.mtp.is_empty() && !model.tied_embeddings {
        counts += shard::embedding(model, local);
    }
    let depths = shard::mtp(model, local);
    for (depth, params) in depths.into_iter().zip(counted::params(model).mtp) {
        counts += depth;
        counts.split -= params.projection.div_ceil(local.tp);
        counts.replicated += params.projection;
    }
    counts
}

/// The pieces of a decoder layer, as those of the first layer that is alike.
fn blocks(model: &Model, layer: &Layer) -> Vec<model::Piece> {
    let known = model.layers.iter().position(|own| own == layer);
    let index = known.expect("a layer of the model that is asked about") as u32;
    pieces_of(model, index)
}

fn pieces_of(model: &Model, index: u32) -> Vec<model::Piece> {
    let layer = &model.layers[index as usize];
    let mixer = layer.mixer.is_some();
    let feed_forward = layer.ffn.is_some();
    let mut pieces = Vec::with_capacity(2);
    pieces.extend(mixer.then_some(model::Piece::Mixer(index)));
    pieces.extend(feed_forward.then_some(model::Piece::FeedForward(index)));
    pieces
}

impl Traced<'_> {
    /// What is traced of some pieces that follow one another under a recompute set.
    fn units(&self, pieces: &[model::Piece], set: &Recompute) -> Vec<Unit> {
        let layer = match pieces[0] {
            model::Piece::Mixer(layer) | model::Piece::FeedForward(layer) => Some(layer),
            _ => None,
        };
        if let (Recompute::Full, Some(layer)) = (set, layer) {
            return vec![Unit::Whole(layer)];
        }
        let unit = |&piece| Unit::Piece(piece, self.of_piece(piece, set));
        pieces.iter().map(unit).collect()
    }

    /// Of a recompute set, the modules that a piece has.
    fn of_piece(&self, piece: model::Piece, set: &Recompute) -> Recompute {
        let Recompute::Modules(modules) = set else {
            return Recompute::None;
        };
        let has = |module| match (piece, module) {
            (model::Piece::Mixer(_) | model::Piece::FeedForward(_), Module::Layernorm)
            | (model::Piece::Mixer(_), Module::CoreAttn | Module::MlaUpProj) => true,
            (model::Piece::FeedForward(layer), module) => {
                let routed = self.model.layers[layer as usize].moe().is_some();
                match module {
                    Module::MoeAct | Module::Moe | Module::SharedExperts => routed,
                    Module::Mlp => !routed,
                    _ => false,
                }
            }
            _ => false,
        };
        Recompute::of(
            modules
                .iter()
                .copied()
                .filter(|&module| has(module))
                .collect(),
        )
    }
}

impl Runtime for Traced<'_> {
    fn refuses(&self, model: &Model, precision: Precision) -> Option<String> {
        let mut reasons = support::in_model(model);
        if self.gpu.is_some() {
            reasons.extend(support::beyond_kernels(model));
        } else if precision.activation() != Dtype::F32 {
            reasons.push(format!(
                "precision \"{precision}\" is not implemented on the CPU, use \"fp32\", or a cluster of GPUs"
            ));
        }
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    fn work(&self, setting: &Setting<'_>, piece: Piece<'_>, sets: &[Recompute]) -> Lowered {
        let mut lowered = Lowered::default();
        let queues = self.gpu.is_some();
        let pieces = self.pieces(piece);
        let answers: Vec<_> = pieces
            .iter()
            .map(|&p| self.answer(setting.into(), p))
            .collect();
        let count = |of: fn(&Answer) -> &Items| answers.iter().map(|a| of(a).len()).sum();
        lowered.forward.reserve(count(|answer| &answer.forward));
        lowered.backward.reserve(count(|answer| &answer.backward));
        // Under one recompute set, what leaves is what it leaves.
        let leaves: Vec<Bytes> = match sets {
            [set] => {
                let units = self.units(&pieces, set).into_iter();
                units
                    .map(|unit| self.answer_of(setting.into(), unit).leaves)
                    .chain(std::iter::repeat(Bytes::ZERO))
                    .take(answers.len())
                    .collect()
            }
            _ => answers.iter().map(|answer| answer.leaves).collect(),
        };
        let transfer = |bytes: Bytes, leaves: bool| {
            let is_there = queues && !setting.offload.is_none() && matches!(piece, Piece::Layer(_));
            is_there.then_some(Work {
                task: Task::Transfer { bytes, leaves },
                category: Category::Offload,
                part: None,
                beside: None,
                of_weights: false,
                pauses: false,
            })
        };
        for (answer, &bytes) in answers.iter().zip(&leaves) {
            let forward = answer.forward.iter();
            lowered
                .forward
                .extend(forward.map(|item| item.work(setting, queues)));
            lowered.forward.extend(transfer(bytes, true));
        }
        for (answer, &bytes) in answers.iter().zip(&leaves).rev() {
            let backward = answer.backward.iter();
            lowered.backward.extend(transfer(bytes, false));
            lowered
                .backward
                .extend(backward.map(|item| item.work(setting, queues)));
        }
        let units: Vec<_> = sets.iter().map(|set| self.units(&pieces, set)).collect();
        let mut told: Vec<&Unit> = Vec::new();
        for unit in units.iter().flatten() {
            if told.contains(&unit) || matches!(unit, Unit::Piece(_, Recompute::None)) {
                continue;
            }
            told.push(unit);
            let answer = self.answer_of(setting.into(), unit.clone());
            lowered.again.push(Again {
                sets: Again::sets(units.iter().map(|units| units.contains(unit))),
                work: answer
                    .again
                    .iter()
                    .map(|item| item.work(setting, queues))
                    .collect(),
            });
        }
        lowered
    }

    fn block(&self, setting: &Setting<'_>, layer: &Layer, block: Block) -> Lowered {
        let is_of = |piece: &&model::Piece| match block {
            Block::Mixer => matches!(piece, model::Piece::Mixer(_)),
            Block::FeedForward => matches!(piece, model::Piece::FeedForward(_)),
        };
        let queues = self.gpu.is_some();
        let pieces = self.pieces(Piece::Layer(layer));
        let answer = pieces.iter().find(is_of);
        let answer = answer.map(|&piece| self.answer(setting.into(), piece));
        let list = |of: fn(&Answer) -> &Items| {
            let items = answer.iter().flat_map(|answer| of(answer).iter());
            items.map(|item| item.work(setting, queues)).collect()
        };
        Lowered {
            forward: list(|answer| &answer.forward),
            backward: list(|answer| &answer.backward),
            again: Vec::new(),
        }
    }

    fn memory(
        &self,
        setting: &Setting<'_>,
        piece: Piece<'_>,
        sets: &[Recompute],
    ) -> Vec<StageMemory> {
        let parts_ends = setting.layout.places().parts_ends();
        self.memory_at(setting.into(), parts_ends, piece, sets)
    }

    fn divided_memory(
        &self,
        setting: &Setting<'_>,
        piece: Piece<'_>,
        sets: &[Recompute],
    ) -> Vec<StageMemory> {
        let site = Site {
            of_weights: OfWeights::After,
            ..setting.into()
        };
        let parts_ends = setting.layout.places().parts_ends();
        self.memory_at(site, parts_ends, piece, sets)
    }

    fn stretches(
        &self,
        setting: &Setting<'_>,
        piece: Piece<'_>,
        sets: &[Recompute],
        delays: bool,
    ) -> Option<Vec<Stretches>> {
        let of_weights = if delays {
            OfWeights::Delayed
        } else {
            OfWeights::AtOnce
        };
        let site = Site {
            of_weights,
            ..setting.into()
        };
        let pieces = self.pieces(piece);
        let under = |set| {
            let units = self.units(&pieces, set).into_iter();
            let answers: Vec<_> = units.map(|unit| self.answer_of(site, unit)).collect();
            let forward = answers.iter().flat_map(|a| &a.stretches.forward);
            let backward = answers.iter().rev().flat_map(|a| &a.stretches.backward);
            Stretches {
                forward: forward.copied().collect(),
                backward: backward.copied().collect(),
            }
        };
        Some(sets.iter().map(under).collect())
    }

    fn depths(&self, setting: &Setting<'_>) -> Vec<[Counts; 2]> {
        // Units of their own, whether or not dense weights have replicas.
        let site = Site {
            sharded: true,
            ..setting.into()
        };
        self.answer(site, model::Piece::Head).depths.clone()
    }

    fn step(&self, setting: &Setting<'_>, microbatches: u32) -> StepMemory {
        let local = setting.local;
        let pads = setting.capacity.is_some_and(|capacity| capacity.pad);
        let uncounted = u64::from(pads || local.ep * local.etp == 1);
        let sizes = [local.mbs, local.tokens, setting.precision as u64, uncounted];
        let steps = || self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let known = steps().get(&sizes).copied();
        let [fixed, microbatch] = known.unwrap_or_else(|| {
            let levels = self.standing(setting);
            steps().insert(sizes, levels);
            levels
        });
        let dtype = setting.precision.activation();
        let message = dtype.bytes(local.tokens_local * self.model.hidden);
        StepMemory {
            standing: fixed + microbatch * i64::from(microbatches),
            message: Level::of(TensorClass::Activations, message),
            // On a CPU the host knows it.
            update: match &self.gpu {
                Some(_) => Level::of(TensorClass::Transient, Dtype::F32.bytes(1)),
                None => Level::default(),
            },
            grain: model::ALIGNMENT as u64,
        }
    }
}

impl Traced<'_> {
    /// [`Runtime::memory`] of a pipeline of `pp` ranks.
    fn memory_at(
        &self,
        site: Site<'_>,
        parts_ends: bool,
        piece: Piece<'_>,
        sets: &[Recompute],
    ) -> Vec<StageMemory> {
        let (model, local) = (self.model, site.local);
        let mut memory = StageMemory {
            shard: match piece {
                Piece::Embedding => shard::embedding(model, local),
                Piece::Layer(layer) => shard::layer(model, layer, local),
                Piece::Head => head_with_depths(model, local, parts_ends),
            },
            ..StageMemory::default()
        };
        let pieces = self.pieces(piece);
        for &piece in &pieces {
            let answer = self.answer(site, piece);
            memory.padding += answer.padding;
            memory.update = memory.update.higher(answer.update);
            memory.beside = memory.beside + answer.beside;
        }
        let passes = |set| {
            let units = self.units(&pieces, set).into_iter();
            let passes = units.map(|unit| self.answer_of(site, unit).passes);
            passes.fold(Passes::default(), Passes::then)
        };
        sets.iter()
            .map(|set| StageMemory {
                passes: passes(set),
                ..memory
            })
            .collect()
    }

    /// The largest tensor that a step allocates beside weights, gradients and the optimizer's state, where
    /// the experts of a rank get `load` times the mean of all.
    pub(crate) fn largest(
        &self,
        layout: &Layout,
        batch: &Batch,
        precision: Precision,
        cp_comm: CpComm,
        dispatching: Dispatching,
        load: f64,
    ) -> Bytes {
        let local = Local::new(layout, self.model, batch, load);
        let site = Site {
            layout,
            local: &local.within(self.model, dispatching.capacity),
            precision,
            cp_comm,
            dispatching,
            // What runs beside what, all tensors are the same, and what comes back is as large as it was.
            shared_beside: false,
            sharded: false,
            of_weights: OfWeights::AtOnce,
            offload: Offload::NONE,
        };
        let pieces = model::pieces(self.model).into_iter();
        let sizes = pieces.map(|piece| self.answer(site, piece).largest);
        sizes.max().unwrap_or(Bytes::ZERO)
    }

    /// What stands throughout a step, and what each of its microbatches adds.
    fn standing(&self, setting: &Setting<'_>) -> [Level; 2] {
        let local = setting.local;
        let device = self.device(setting.precision.activation());
        let tape = Tape::default();
        let cx = piece_on(device, setting.layout, Assumed::BALANCED, &tape);
        tape.wipe();
        let rope = rotations(&cx, self.model, local.seq_len as usize, local.mbs as usize);
        let depths = self.model.mtp.len();
        let sums = sums(&cx, depths);
        let fixed = tape.read(Heard::of).account.live();
        let size = [local.mbs as usize, local.seq_len as usize];
        let len = size[0] * size[1];
        let tokens = HostTokens::blank(len, Packing::default());
        let rotation = Rotation::or_unread(self.model);
        let tokens = std::slice::from_ref(&tokens);
        let uploaded = upload(&cx, size, depths, &rope, &rotation, tokens);
        let routers: Vec<_> = routers(self.model).collect();
        let kept = offsets(&cx, &dispatching(setting), &routers, 1);
        let microbatch = tape.read(Heard::of).account.live();
        drop((rope, sums, uploaded, kept));
        [fixed, microbatch]
    }
}

impl fmt::Debug for Traced<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this executor for {} on {:?}", self.model.name, self.gpu)
    }
}

/// The properties of a cluster's GPUs as far as ops depend on them; none of a CPU's.
pub(super) fn properties(cluster: &Cluster) -> Option<Properties> {
    let gpu = &cluster.gpu;
    if gpu.is_cpu() {
        return None;
    }
    let assumed = Properties::assumed(gpu.arch.parse().unwrap_or(Architecture::SM80));
    Some(Properties {
        name: gpu.name.clone(),
        multiprocessors: gpu.num_sms,
        memory: gpu.memory(),
        ..assumed
    })
}

/// Whether gradients of weights that wait run before the backward pass of a piece: see [`StageModel::backward`].
fn settles(model: &Model, piece: model::Piece) -> bool {
    match piece {
        model::Piece::Embedding => true,
        model::Piece::FeedForward(layer) => model.layer(layer).moe().is_none(),
        _ => false,
    }
}

/// Elements between parameters where they rest.
fn padding<'p>(parameters: impl IntoIterator<Item = &'p Parameter>) -> Counts {
    count(parameters, |parameter| {
        parameter.len().next_multiple_of(model::ALIGNMENT) - parameter.len()
    })
}

/// Of each depth of multi-token prediction that is a unit by itself, elements and what is between parameters.
fn depths(shard: &Shard) -> Vec<[Counts; 2]> {
    let behind = shard
        .units
        .iter()
        .skip_while(|unit| **unit != model::Unit::Head)
        .skip(1);
    let of_unit = |unit: &model::Unit| {
        let own = || {
            let all = shard.parameters.iter();
            all.filter(move |parameter| parameter.layer.map(model::Unit::Layer) == Some(*unit))
        };
        [count(own(), Parameter::len), padding(own())]
    };
    behind.map(of_unit).collect()
}

/// Sums what parameters have, by how they are divided.
fn count<'p>(
    parameters: impl IntoIterator<Item = &'p Parameter>,
    of: impl Fn(&Parameter) -> usize,
) -> Counts {
    let mut counts = Counts::default();
    for parameter in parameters {
        let own = of(parameter) as u64;
        match (parameter.family, parameter.spread) {
            (Family::Expert, _) => counts.experts += own,
            (Family::Dense, Spread::Replicated) => counts.replicated += own,
            (Family::Dense, _) => counts.split += own,
            // All of it is counted, with what is behind it.
            (Family::Balance, _) => {}
        }
    }
    counts
}
