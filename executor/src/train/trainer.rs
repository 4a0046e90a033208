//! [`Trainer`]: one rank with its shard, taking steps.

use std::collections::BTreeMap;

use moefold_kernels::adamw;
use moefold_planner::choice::Recompute;
use moefold_planner::layout::Batch;
use moefold_planner::mesh::{self, GroupKind};
use moefold_planner::model::Model;
use moefold_planner::schedule::{Microbatch, Stage};
use moefold_profiles::run::{Evaluation, FullestMicrobatch, StepRecord};
use moefold_profiles::units::Bytes;

use crate::control::{Said, Wish};
use crate::data::{Samples, Validation};
use crate::error::Error;
use crate::gather::Put;
use crate::model::{Piece, Shard, pieces_of};
use crate::moe::Sparse;
use crate::moe::balance::{Balancing, Biases};
use crate::optimizer::{AdamOptions, Kept, ZeroAdam};
use crate::options::{Savers, TrainOptions};
use crate::rank::Context;
use crate::record::Detail;
use crate::stage::StageModel;
use crate::step::{HostTokens, StepOutcome, Stepper};
use crate::store::Store;
use crate::weights::{Collector, Region, Source, State};

/// One rank, ready to step.
#[derive(Debug)]
pub struct Trainer {
    /// Its place.
    pub cx: Context,
    stepper: Stepper,
    /// Peak of the worst rank so far.
    peak_bytes: Bytes,
}

/// Weights of the losses beside the model's own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weights {
    /// Of those that balance experts.
    pub(crate) balancing: Balancing,
    /// Of the losses of multi-token prediction together.
    pub(crate) mtp: f64,
}

impl Trainer {
    /// Allocates the rank's shard and fills it. `stages` are the layers of each pipeline stage. The model and
    /// layout must have passed [`crate::support::check`].
    pub fn new(
        cx: Context,
        model: &Model,
        stages: &[Vec<u32>],
        seq_len: u64,
        savers: &Savers,
        options: &TrainOptions,
        weights: &Source,
    ) -> Result<Self, Error> {
        let losses = Weights {
            balancing: options.balancing,
            mtp: options.mtp_loss_scaling_factor,
        };
        let mut trainer = Self::assemble(cx, model, stages, seq_len, savers, options.adam, losses);
        let Stepper {
            store,
            optimizer,
            biases,
            ..
        } = &mut trainer.stepper;
        fill(store, optimizer, weights)?;
        biases.read(store);
        if let Some(saved) = weights.saved() {
            saved.restore(store, optimizer)?;
        }
        Ok(trainer)
    }

    /// Allocates the rank's shard and leaves it zero.
    pub(crate) fn assemble(
        mut cx: Context,
        model: &Model,
        stages: &[Vec<u32>],
        seq_len: u64,
        savers: &Savers,
        adam: AdamOptions,
        losses: Weights,
    ) -> Self {
        cx.cp_comm = savers.cp_comm;
        let own = cx.layout.places().of_rank(cx.at.pp).map(Stage);
        let own: Vec<_> = own
            .map(|stage| (stage, pieces_of(model, stages, stage)))
            .collect();
        let pieces: Vec<Piece> = own.iter().flat_map(|(_, pieces)| pieces).copied().collect();
        let shard = Shard::new(model, &cx.layout, &cx.at, &pieces, savers.division());
        let store = Store::new(&cx.device, shard);
        let biases = Biases::new(model, &store, losses.balancing.bias_update_rate);
        let again = |layer| savers.recompute.of_layer(layer).clone();
        let stages = own.into_iter().map(|(stage, pieces)| {
            let Weights { balancing, mtp } = losses;
            let sparse = Sparse {
                balancing,
                dispatching: savers.dispatching,
                shared_beside: savers.overlap.shared_expert,
            };
            let built = {
                let to_save = (&again as &dyn Fn(u32) -> Recompute, savers.offload);
                StageModel::new(model, &store, &pieces, sparse, to_save, mtp)
            };
            (stage, built)
        });
        let stages: BTreeMap<_, _> = stages.collect();
        let kept = Kept {
            optimizer: savers.optimizer,
            masters: savers.masters,
            on_host: savers.optimizer_offload,
        };
        let optimizer = ZeroAdam::new(&cx, &store, adam, kept, savers.overlap);
        let schedule = savers.schedule_of(&cx.layout);
        let actions = schedule.ranks[cx.at.pp as usize].clone();
        let stepper = Stepper::new(
            &cx,
            model,
            store,
            stages,
            (optimizer, biases),
            (actions, savers.dispatching),
            seq_len as usize,
        );
        let stepper = stepper.delaying(savers.overlap.delay_wgrad);
        Self {
            cx,
            stepper,
            peak_bytes: Bytes::ZERO,
        }
    }

    /// Steps taken, those before the checkpoint it began with among them.
    pub fn steps(&self) -> u64 {
        self.stepper.optimizer.steps()
    }

    /// Runs one step on the rank's part of a global batch.
    pub fn step(&mut self, microbatches: &[HostTokens], lr: f64) -> Result<StepOutcome, Error> {
        self.stepper.step(&self.cx, microbatches, lr)
    }

    /// How the model does on validation data, after a step.
    pub(super) fn evaluate(
        &self,
        validation: &Validation,
        batch: &Batch,
        step: u64,
    ) -> Result<Evaluation, Error> {
        let recorder = self.cx.recorder.clone();
        recorder.begin_step(step as u32, Detail::Whole);
        let iters = validation.iters(batch.global_batch);
        let (mut sum, mut tokens) = (0.0, 0.0);
        for iter in 0..iters {
            let mine = microbatches(&validation.samples, &self.cx, batch, iter)?;
            let [losses, counted] = self.stepper.evaluate(&self.cx, &mine)?;
            sum += losses;
            tokens += counted;
        }
        let loss = sum / tokens;
        Ok(Evaluation {
            loss,
            perplexity: loss.exp(),
            samples: iters * batch.global_batch,
            eval_s: recorder.end_step().step.0,
        })
    }

    /// What the rank holds and how it steps.
    pub fn stepper(&self) -> &Stepper {
        &self.stepper
    }

    /// Puts what this rank is the master of, in f32.
    pub fn collect(&self, collector: &Collector) {
        let put = |region: &Region<'_>, values: &[f32]| {
            collector.put(region, values);
            Ok(())
        };
        self.each_part(&mut { put })
            .expect("a collector takes everything");
    }

    /// Hands over what this rank is the master of, in f32, part by part.
    pub(crate) fn each_part(&self, put: &mut Put<'_>) -> Result<(), Error> {
        for owned in self.stepper.optimizer.owned(&self.stepper.store.shard) {
            let values = owned.state(State::Master);
            let mut values = values.as_slice();
            for part in owned.regions() {
                let (own, rest) = values.split_at(part.len());
                put(&part, own)?;
                values = rest;
            }
        }
        Ok(())
    }

    /// The record of a step, and what the ranks say after it ([`Wish`] and [`Said`]);
    /// the same on every rank.
    pub(super) fn record(
        &mut self,
        batch: &Batch,
        step: u64,
        lr: f64,
        outcome: StepOutcome,
        step_s: f64,
        says: [u64; 2],
    ) -> Result<(StepRecord, Wish, Said), Error> {
        let peak = self.cx.device.memory().peak_total().0;
        // Counted from 1, and 0 for none.
        let peaked = self
            .stepper
            .peaked()
            .map_or(0, |microbatch| microbatch.0 + 1);
        let [least, most] = self.stepper.biases.extremes();
        let own = [
            step_s.to_bits(),
            peak,
            peaked.into(),
            u64::from(self.cx.at.ep),
            least.to_bits(),
            most.to_bits(),
            says[0],
            says[1],
        ];
        let all = self.cx.world.exchange_counts(&own)?;
        let wish = all.iter().map(|rank| rank[6]).max().unwrap_or(0);
        let said = Said::of(all.iter().map(|rank| rank[7]));
        let peak_bytes = all.iter().map(|rank| rank[1]).max().unwrap_or(0);
        let worst = all.iter().position(|rank| rank[1] == peak_bytes);
        let worst = worst.expect("one of them is the most");
        let is_higher = Bytes(peak_bytes) > self.peak_bytes;
        self.peak_bytes = Bytes(peak_bytes);
        let fullest = if is_higher && all[worst][2] > 0 {
            // Every stage of its pipeline tells of its own layers.
            let pipeline = mesh::group_of(&self.cx.layout, GroupKind::Pp, worst as u32);
            let microbatch = Microbatch(all[worst][2] as u32 - 1);
            let is_one = pipeline.contains(&self.cx.rank);
            let own = is_one.then(|| self.stepper.exchanged(microbatch));
            Some(FullestMicrobatch {
                ep: self.cx.layout.ep(),
                ep_rank: all[worst][3] as u32,
                load: self.shared(own, &outcome.expert_load)?,
            })
        } else {
            None
        };
        // Each stage of a pipeline has those of its own layers; a minimum with NaN is the other number.
        let bias = |word: usize, other: fn(f64, f64) -> f64| {
            let of_ranks = all.iter().map(|rank| f64::from_bits(rank[word]));
            of_ranks.fold(f64::NAN, other)
        };
        let correction_bias = Some([bias(4, f64::min), bias(5, f64::max)]);
        let correction_bias = correction_bias.filter(|[least, _]| !least.is_nan());
        let step_s = all
            .iter()
            .map(|rank| f64::from_bits(rank[0]))
            .fold(0.0, f64::max);
        let tokens = (batch.global_batch * batch.seq_len) as f64;
        let record = StepRecord {
            step,
            loss: outcome.loss,
            mtp_losses: outcome.mtp_losses,
            aux_loss: outcome.aux_loss,
            z_loss: outcome.z_loss,
            grad_norm: outcome.grad_norm,
            lr,
            step_s,
            tokens_per_s: tokens / step_s,
            peak_bytes: Bytes(peak_bytes),
            expert_load: outcome.expert_load,
            correction_bias,
            fullest,
            dropped: outcome.dropped.iter().sum(),
            dropped_by_layer: outcome.dropped,
            validation: None,
        };
        Ok((record, Wish::of_word(wish), said))
    }

    /// Counts that one rank has, on all ranks; in lists of the sizes of `like`.
    fn shared(&self, own: Option<&[Vec<u64>]>, like: &[Vec<u64>]) -> Result<Vec<Vec<u64>>, Error> {
        let mut all: Vec<f64> = match own {
            Some(own) => own.iter().flatten().map(|&count| count as f64).collect(),
            None => vec![0.0; like.iter().map(Vec::len).sum()],
        };
        self.cx.world.all_reduce_f64(&mut all)?;
        let mut all = all.into_iter().map(|count| count as u64);
        let lists = like.iter();
        Ok(lists
            .map(|list| all.by_ref().take(list.len()).collect())
            .collect())
    }
}

/// Gives weights and masters their initial values; only the former are rounded. Of weights that rest divided, a rank
/// reads its own.
fn fill(store: &Store, optimizer: &ZeroAdam, source: &Source) -> Result<(), Error> {
    for parameter in &store.shard.parameters {
        for slice in &parameter.slices {
            if let Some(weights) = store.slice(parameter, slice) {
                let values = source.read(&slice.region())?;
                adamw::put_masters(Some(&weights), None, &values);
                if let Some(elements) = optimizer.elements(parameter, slice) {
                    optimizer.put(State::Master, parameter, slice, &values[elements]);
                }
            } else if let Some((elements, weights)) = optimizer.weights(parameter, slice) {
                let mut values = Vec::with_capacity(elements.len());
                for part in slice.region().parts(elements) {
                    values.extend(source.read(&part)?);
                }
                adamw::put_masters(Some(&weights), None, &values);
                optimizer.put(State::Master, parameter, slice, &values);
            }
        }
    }
    Ok(())
}

/// The microbatches of a rank in a step: microbatch `m` of data-parallel rank `d` takes the samples
/// `(m * DP + d) * mbs ..` of the step's, `mbs` of them.
pub fn microbatches(
    samples: &Samples,
    cx: &Context,
    batch: &Batch,
    step: u64,
) -> Result<Vec<HostTokens>, Error> {
    let layout = &cx.layout;
    let mbs = u64::from(layout.mbs());
    let first = Samples::of_step(step, batch.global_batch).start;
    (0..u64::from(layout.microbatches()))
        .map(|microbatch| {
            let block = microbatch * u64::from(layout.dp()) + u64::from(cx.at.dp);
            let packing = samples.packing();
            let mut tokens = HostTokens {
                ids: Vec::new(),
                targets: Vec::new(),
                starts: packing.resets().then(Vec::new),
                packing,
            };
            for sample in 0..mbs {
                let sample = samples.get(first + block * mbs + sample)?;
                tokens.ids.extend(sample.inputs);
                tokens.targets.extend(sample.targets);
                if let (Some(all), Some(starts)) = (&mut tokens.starts, sample.starts) {
                    all.extend(starts);
                }
            }
            Ok(tokens)
        })
        .collect()
}
